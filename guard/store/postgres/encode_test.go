package postgres

import (
	"bytes"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"
)

// Keys and values are encoded as pgx itself would, in one allocation.
func TestArraysAreEncodedAsByPgx(t *testing.T) {
	own, pgx := pgtype.NewMap(), pgtype.NewMap()
	own.RegisterType(byteaArray)
	long := bytes.Repeat([]byte("long "), 1000)
	for name, all := range map[string][][]byte{
		"NULL":          nil,
		"none":          {},
		"one":           {[]byte("key")},
		"an empty one":  {{}},
		"several":       {[]byte("a"), {}, long, {0, 255}},
		"NULL elements": {[]byte("a"), nil, {}},
	} {
		for _, format := range []int16{pgtype.BinaryFormatCode, pgtype.TextFormatCode} {
			got, err := own.Encode(pgtype.ByteaArrayOID, format, all, []byte("before"))
			want, wantErr := pgx.Encode(pgtype.ByteaArrayOID, format, all, []byte("before"))
			if err != nil || wantErr != nil || !bytes.Equal(got, want) || (got == nil) != (want == nil) {
				t.Errorf("%s, format %d: %x, %v; want %x, %v", name, format, got, err, want, wantErr)
			}
		}
	}
	var scanned [][]byte
	buf, err := own.Encode(pgtype.ByteaArrayOID, pgtype.BinaryFormatCode, [][]byte{[]byte("a"), long}, nil)
	if err == nil {
		err = own.Scan(pgtype.ByteaArrayOID, pgtype.BinaryFormatCode, buf, &scanned)
	}
	if err != nil || len(scanned) != 2 || !bytes.Equal(scanned[1], long) {
		t.Errorf("read back: %d elements, %v", len(scanned), err)
	}
	many := make([][]byte, 100)
	for i := range many {
		many[i] = long
	}
	if n := testing.AllocsPerRun(100, func() {
		if _, err := own.Encode(pgtype.ByteaArrayOID, pgtype.BinaryFormatCode, many, make([]byte, 0, 256)); err != nil {
			t.Fatal(err)
		}
	}); n > 4 {
		t.Errorf("%v allocations for %d elements", n, len(many))
	}
}
