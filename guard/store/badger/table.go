package badger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/dgraph-io/badger/v4/fb"
)

// inspectTable reads a table file of Badger, compares every part with its checksum,
// and counts what will expire. Badger's own check ends the process, or panics in a
// goroutine of its own, on files that are cut or garbled in the wrong place.
//
// From the end: 4 bytes length of the checksum, the checksum of the index, 4 bytes
// length of the index, the index; before them the blocks that the index lists.
func inspectTable(f *os.File) (c census, err error) {
	defer func() {
		// The index is read by generated code that trusts its offsets. It is
		// covered by a checksum, but so short a one proves little.
		if r := recover(); r != nil {
			err = fmt.Errorf("index cannot be read: %v", r)
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return c, err
	}
	index, blocks, err := readIndex(f, info.Size())
	if err != nil {
		return c, err
	}
	r := blockReader{f: f, end: blocks}
	count := counting{buckets: make(map[int64]int64)}
	var at int64
	var offset fb.BlockOffset
	for i := range index.OffsetsLength() {
		if !index.Offsets(&offset, i) {
			return c, fmt.Errorf("block %d is not in the index", i)
		}
		length := int64(offset.Len())
		if int64(offset.Offset()) != at || at+length > blocks {
			return c, fmt.Errorf("block %d lies outside", i)
		}
		block, err := r.read(at, int(length))
		if err != nil {
			return c, fmt.Errorf("block %d: %w", i, err)
		}
		entries, err := checkBlock(block)
		if err != nil {
			return c, fmt.Errorf("block %d: %w", i, err)
		}
		if err := count.block(entries); err != nil {
			return c, fmt.Errorf("block %d: %w", i, err)
		}
		at += length
	}
	if index.OffsetsLength() == 0 || at != blocks {
		return c, errors.New("the index does not cover the file")
	}
	return count.census(info.Size()), nil
}

// blockReader reads blocks, one after the other, in large pieces.
type blockReader struct {
	f     *os.File
	end   int64 // of the blocks
	piece []byte
	from  int64 // where piece begins
}

func (r *blockReader) read(at int64, length int) ([]byte, error) {
	const large = 512 << 10
	if at < r.from || at+int64(length) > r.from+int64(len(r.piece)) {
		size := int(min(int64(max(large, length)), r.end-at))
		if cap(r.piece) < size {
			r.piece = make([]byte, size)
		}
		r.from, r.piece = at, r.piece[:size]
		if _, err := r.f.ReadAt(r.piece, at); err != nil {
			return nil, err
		}
	}
	return r.piece[at-r.from:][:length], nil
}

// readIndex returns the index of a table and the size of the blocks before it.
func readIndex(f io.ReaderAt, size int64) (*fb.TableIndex, int64, error) {
	end := size
	// back reads the n bytes before those read so far.
	back := func(n int64) ([]byte, error) {
		if n < 0 || n > end {
			return nil, errors.New("the file is cut or its end is garbled")
		}
		end -= n
		b := make([]byte, n)
		_, err := f.ReadAt(b, end)
		return b, err
	}
	counted := func() ([]byte, error) {
		n, err := back(4)
		if err != nil {
			return nil, err
		}
		return back(int64(binary.BigEndian.Uint32(n)))
	}
	sum, err := counted()
	if err != nil {
		return nil, 0, err
	}
	index, err := counted()
	if err != nil {
		return nil, 0, err
	}
	if err := checkSum(index, sum); err != nil {
		return nil, 0, fmt.Errorf("index: %w", err)
	}
	if len(index) < 8 {
		return nil, 0, errors.New("no index")
	}
	return fb.GetRootAsTableIndex(index, 0), end, nil
}

// checkBlock checks one block: entries, then the checksum over them, then its length.
func checkBlock(block []byte) (entries []byte, err error) {
	if len(block) < 4 {
		return nil, errors.New("too short")
	}
	end := len(block) - 4
	length := int(binary.BigEndian.Uint32(block[end:]))
	if length < 0 || length > end {
		return nil, errors.New("length of the checksum is garbled")
	}
	return block[:end-length], checkSum(block[:end-length], block[end-length:end])
}

// checkSum compares data with a checksum as Badger writes it: the message
// pb.Checksum, of which CRC-32C is the default algorithm, so that only its sum, field
// 2, is there.
func checkSum(data, sum []byte) error {
	var want uint64
	if len(sum) > 0 {
		n := 0
		if want, n = binary.Uvarint(sum[1:]); sum[0] != 2<<3 || n != len(sum)-1 {
			return errors.New("checksum is garbled or of an unknown kind")
		}
	}
	if uint64(crc32.Checksum(data, castagnoli)) != want {
		return errors.New("checksum does not match")
	}
	return nil
}
