package badger

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/dgraph-io/badger/v4/fb"
	"github.com/dgraph-io/badger/v4/pb"
	"google.golang.org/protobuf/proto"
)

// checkTable reads a table file of Badger and compares every part with its checksum.
// Badger's own check ends the process, or panics in a goroutine of its own, on files
// that are cut or garbled in the wrong place.
//
// From the end: 4 bytes length of the checksum, the checksum of the index, 4 bytes
// length of the index, the index; before them the blocks that the index lists.
func checkTable(name string) (err error) {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	defer func() {
		// The index is read by generated code that trusts its offsets. It is
		// covered by a checksum, but so short a one proves little.
		if r := recover(); r != nil {
			err = fmt.Errorf("index cannot be read: %v", r)
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	index, blocks, err := readIndex(f, info.Size())
	if err != nil {
		return err
	}
	r := bufio.NewReaderSize(f, 1<<20)
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	var at int64
	var offset fb.BlockOffset
	for i := range index.OffsetsLength() {
		if !index.Offsets(&offset, i) {
			return fmt.Errorf("block %d is not in the index", i)
		}
		if int64(offset.Offset()) != at || at+int64(offset.Len()) > blocks {
			return fmt.Errorf("block %d lies outside", i)
		}
		block := make([]byte, offset.Len())
		if _, err := io.ReadFull(r, block); err != nil {
			return fmt.Errorf("block %d: %w", i, err)
		}
		if err := checkBlock(block); err != nil {
			return fmt.Errorf("block %d: %w", i, err)
		}
		at += int64(len(block))
	}
	if index.OffsetsLength() == 0 || at != blocks {
		return errors.New("the index does not cover the file")
	}
	return nil
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

// checkBlock checks one block: data, then the checksum over it, then its length.
func checkBlock(block []byte) error {
	if len(block) < 4 {
		return errors.New("too short")
	}
	end := len(block) - 4
	length := int(binary.BigEndian.Uint32(block[end:]))
	if length < 0 || length > end {
		return errors.New("length of the checksum is garbled")
	}
	return checkSum(block[:end-length], block[end-length:end])
}

func checkSum(data, sum []byte) error {
	var want pb.Checksum
	if err := proto.Unmarshal(sum, &want); err != nil {
		return fmt.Errorf("checksum is garbled: %w", err)
	}
	if want.Algo != pb.Checksum_CRC32C {
		return fmt.Errorf("unknown checksum %d", want.Algo)
	}
	if got := uint64(crc32.Checksum(data, castagnoli)); got != want.Sum {
		return errors.New("checksum does not match")
	}
	return nil
}
