package postgres

import (
	"encoding/binary"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"
)

// byteaArrays encodes keys and values in one piece. The codec of pgx, which does the rest, asks reflection for each
// element, and lets the buffer of a group grow from 256 bytes on: that was half of what a commit allocates.
type byteaArrays struct{ *pgtype.ArrayCodec }

// byteaArray is the type of keys and values, for a connection that sends many.
var byteaArray = &pgtype.Type{Name: "_bytea", OID: pgtype.ByteaArrayOID, Codec: byteaArrays{&pgtype.ArrayCodec{
	ElementType: &pgtype.Type{Name: "bytea", OID: pgtype.ByteaOID, Codec: pgtype.ByteaCodec{}},
}}}

// PlanEncode implements pgtype.Codec.
func (c byteaArrays) PlanEncode(m *pgtype.Map, oid uint32, format int16, value any) pgtype.EncodePlan {
	if format != pgtype.BinaryFormatCode {
		return c.ArrayCodec.PlanEncode(m, oid, format, value)
	}
	switch value.(type) {
	case [][]byte:
		return encodeByteas{}
	default:
		return c.ArrayCodec.PlanEncode(m, oid, format, value)
	}
}

type encodeByteas struct{}

// Encode implements pgtype.EncodePlan. A nil element is NULL.
func (encodeByteas) Encode(value any, buf []byte) ([]byte, error) {
	all := value.([][]byte)
	if all == nil {
		return nil, nil
	}
	size, null := 5*4, uint32(0)
	for _, one := range all {
		size += 4 + len(one)
		if one == nil {
			null = 1
		}
	}
	buf = slices.Grow(buf, size)
	put := func(n uint32) { buf = binary.BigEndian.AppendUint32(buf, n) }
	put(1) // dimension
	put(null)
	put(pgtype.ByteaOID)
	put(uint32(len(all)))
	put(1) // the number of the first element
	for _, one := range all {
		if one == nil {
			put(1<<32 - 1)
			continue
		}
		put(uint32(len(one)))
		buf = append(buf, one...)
	}
	return buf, nil
}
