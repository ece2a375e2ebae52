package badger

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"strconv"
)

// A store of the old form has no log of its own. There the logs of Badger's memory
// tables are all there is of the last few MiB after a crash. Badger reads each up to the first entry that does not match and forgets the
// rest without a word. A torn end is normal, for the last transaction may not have
// been acknowledged; but as every transaction is synced before the next one is
// written, more than one of them behind the tear means that acknowledged ones are
// damaged (P1, P2).
//
// An entry: meta, user meta, varints of the lengths of key and value and of the
// expiry, key, value, CRC-32C over all of it.
const (
	memHeader = 20 // before the first entry
	metaTxn   = 1 << 6
	metaEnd   = 1 << 7 // of a transaction; its value is the timestamp
)

// checkLogs checks all logs in dir. Older ones than the newest may also have a torn
// end: Badger cuts it when it opens, but does not sync the cut.
func checkLogs(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, "*.mem"))
	if err != nil {
		return err
	}
	for _, name := range names {
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		end := wholePart(content)
		if n := transactionsIn(content[min(end, len(content)):]); n > 1 {
			return fmt.Errorf("%s: damaged at byte %d, with %d transactions behind it", filepath.Base(name), end, n)
		}
	}
	return nil
}

// wholePart is the offset behind the last whole transaction, as Badger finds it.
func wholePart(log []byte) int {
	end, at := memHeader, memHeader
	var current uint64 // the transaction under way
	for {
		e, ok := nextEntry(log, at)
		if !ok {
			return end
		}
		at += e.size
		switch {
		case e.meta&metaTxn != 0 && (current == 0 || current == e.ts):
			current = e.ts
		case e.meta&metaEnd != 0 && string(e.value) == strconv.FormatUint(current, 10):
			current, end = 0, at
		default: // we write nothing outside of transactions
			return end
		}
	}
}

type logEntry struct {
	meta  byte
	ts    uint64
	value []byte
	size  int
}

func nextEntry(log []byte, at int) (e logEntry, ok bool) {
	if at+2 > len(log) {
		return e, false
	}
	rest := log[at:]
	header := 2
	var numbers [3]uint64 // lengths of key and value, expiry
	for i := range numbers {
		n, size := binary.Uvarint(rest[header:])
		if size <= 0 {
			return e, false
		}
		numbers[i] = n
		header += size
	}
	key, value := numbers[0], numbers[1]
	if key < 8 || key > math.MaxUint16 || value > uint64(len(rest)) {
		return e, false
	}
	body := header + int(key) + int(value)
	if body+crc32.Size > len(rest) ||
		crc32.Checksum(rest[:body], castagnoli) != binary.BigEndian.Uint32(rest[body:]) {
		return e, false
	}
	return logEntry{
		meta:  rest[0],
		ts:    math.MaxUint64 - binary.BigEndian.Uint64(rest[header+int(key)-8:]),
		value: rest[header+int(key) : body],
		size:  body + crc32.Size,
	}, true
}

// transactionsIn counts the ends of transactions in a stretch that cannot be read
// from its beginning.
func transactionsIn(log []byte) (n int) {
	name := []byte("!badger!txn")
	for {
		at := bytes.Index(log, name)
		if at < 0 {
			return n
		}
		log = log[at+len(name):]
		if len(log) < 8 {
			return n
		}
		ts := math.MaxUint64 - binary.BigEndian.Uint64(log)
		if ts > 0 && bytes.HasPrefix(log[8:], strconv.AppendUint(nil, ts, 10)) {
			n++
		}
	}
}
