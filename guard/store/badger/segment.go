package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// A segment holds the bulk values of one time partition, appended one after the
// other. Nothing in it is trusted without a pointer from Badger, so whatever a
// crash left at its end is never read.
//
//	bytes 0-3    magic
//	bytes 4-7    length of the key
//	bytes 8-11   length of the value
//	bytes 12-15  CRC-32C of key and value
//	then         key, value
const (
	segmentMagic  = 0x61676231 // "agb1"
	segmentHeader = 16
	segmentSuffix = ".seg"
	droppedSuffix = ".dropped"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// partition is the end of the window that expires falls into, Unix seconds. It
// names the segment, so that the window may change between openings.
func partition(expires time.Time, window time.Duration) int64 {
	seconds, width := expires.Unix(), int64(window/time.Second)
	start := seconds - ((seconds%width)+width)%width
	return start + width
}

func segmentName(end int64) string { return strconv.FormatInt(end, 10) + segmentSuffix }

func segmentEnd(name string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok {
		return 0, false
	}
	end, err := strconv.ParseInt(digits, 10, 64)
	return end, err == nil
}

func appendSegment(b, key, value []byte) (_ []byte, sum uint32) {
	sum = crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, value)
	b = binary.BigEndian.AppendUint32(b, segmentMagic)
	b = binary.BigEndian.AppendUint32(b, uint32(len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	b = binary.BigEndian.AppendUint32(b, sum)
	b = append(b, key...)
	return append(b, value...), sum
}

// readSegment reads the value that p says stands under key.
func readSegment(f *os.File, p pointer, key []byte) ([]byte, error) {
	b := make([]byte, segmentHeader+len(key)+int(p.length))
	if _, err := f.ReadAt(b, int64(p.offset)); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("segment %d ends inside the value", p.segment)
		}
		return nil, err
	}
	value := b[segmentHeader+len(key):]
	switch {
	case binary.BigEndian.Uint32(b) != segmentMagic,
		binary.BigEndian.Uint32(b[4:]) != uint32(len(key)),
		!bytes.Equal(b[segmentHeader:segmentHeader+len(key)], key),
		binary.BigEndian.Uint32(b[8:]) != p.length,
		binary.BigEndian.Uint32(b[12:]) != p.sum:
		return nil, fmt.Errorf("segment %d holds something else at %d", p.segment, p.offset)
	case crc32.Checksum(b[segmentHeader:], castagnoli) != p.sum:
		return nil, fmt.Errorf("checksum does not match in segment %d at %d", p.segment, p.offset)
	}
	return value[:len(value):len(value)], nil
}
