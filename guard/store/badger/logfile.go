package badger

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// A file of the log is written with zeros before it is used: a sync of what lies
// within the file's size and blocks costs less than one that must record new ones.
// A file whose frames are no longer needed is used again under another number. The
// header gives each use a seed of its own, so that no frame of an earlier use passes.
//
//	bytes 0-3    magic
//	bytes 4-7    CRC-32C of bytes 8 to 31, the seed
//	bytes 8-15   number of the file
//	bytes 16-23  random
//	bytes 24-31  size of the file
//	from logFrames on, frames
const (
	logMagic  = 0x61676c31 // "agl1"
	logHead   = 32
	logFrames = 4096 // apart from the header, whose sector is not written again
	logSuffix = ".wal"
)

type logFile struct {
	f      *os.File
	number uint64
	size   int64
	seed   uint32

	// Of a file that is full; guarded by the log's lock.
	full    bool
	last    uint64 // the last frame in it
	applied uint64 // a timestamp at which Badger had that frame; 0 is not yet
}

func logName(number uint64) string { return fmt.Sprintf("%012d%s", number, logSuffix) }

func logNumber(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, logSuffix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, err == nil
}

var errLogHeader = errors.New("header is garbled")

// createLog makes an empty file of the log; its name is not durable yet. A file that
// could not be made whole is removed.
func createLog(dir string, number uint64, size int64, d disk) (l *logFile, err error) {
	f, err := os.OpenFile(filepath.Join(dir, logName(number)), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	l = &logFile{f: f, size: size}
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < size && err == nil; at += int64(len(zeros)) {
		err = d.write(f, zeros[:min(int64(len(zeros)), size-at)], at)
	}
	if err == nil {
		err = l.begin(number, d)
	}
	if err != nil {
		return nil, errors.Join(err, l.remove())
	}
	return l, nil
}

// again gives a file that is no longer needed another number.
func (l *logFile) again(number uint64, d disk) (*logFile, error) {
	name := l.f.Name()
	next := filepath.Join(filepath.Dir(name), logName(number))
	l.f.Close() // some systems rename no open file
	if err := os.Rename(name, next); err != nil {
		return nil, errors.Join(err, os.Remove(name))
	}
	f, err := os.OpenFile(next, os.O_RDWR, 0)
	if err != nil {
		return nil, errors.Join(err, os.Remove(next))
	}
	renamed := &logFile{f: f, size: l.size}
	if err := renamed.begin(number, d); err != nil {
		return nil, errors.Join(err, renamed.remove())
	}
	return renamed, nil
}

// begin writes the header and makes the file durable.
func (l *logFile) begin(number uint64, d disk) error {
	head := make([]byte, logHead)
	binary.BigEndian.PutUint32(head, logMagic)
	binary.BigEndian.PutUint64(head[8:], number)
	rand.Read(head[16:24])
	binary.BigEndian.PutUint64(head[24:], uint64(l.size))
	l.number, l.seed = number, crc32.Checksum(head[8:], castagnoli)
	binary.BigEndian.PutUint32(head[4:], l.seed)
	if err := d.write(l.f, head, 0); err != nil {
		return err
	}
	return d.sync(l.f)
}

func (l *logFile) remove() error {
	l.f.Close()
	return os.Remove(l.f.Name())
}

// readLog returns the contents of a file of the log and its seed.
func readLog(dir string, number uint64) (content []byte, seed uint32, err error) {
	content, err = os.ReadFile(filepath.Join(dir, logName(number)))
	if err != nil {
		return nil, 0, err
	}
	if len(content) < logFrames || binary.BigEndian.Uint32(content) != logMagic {
		return nil, 0, errLogHeader
	}
	seed = crc32.Checksum(content[8:logHead], castagnoli)
	if binary.BigEndian.Uint32(content[4:]) != seed ||
		binary.BigEndian.Uint64(content[8:]) != number ||
		binary.BigEndian.Uint64(content[24:]) != uint64(len(content)) {
		return nil, 0, errLogHeader
	}
	return content, seed, nil
}

// framesIn hands the frames of a file to do, in order, and returns the offset behind
// the last one. A frame that is not whole ends the file: the last one of all may be
// torn. Whole ones behind it show that it is not the last one.
func framesIn(content []byte, seed uint32, do func(at int, f frame) error) (end int, err error) {
	at := logFrames
	for {
		f, ok := readFrame(content[at:], seed)
		if !ok {
			break
		}
		if err := do(at, f); err != nil {
			return at, err
		}
		at += f.size
	}
	magic := binary.BigEndian.AppendUint32(nil, frameMagic)
	for next := at; ; {
		found := bytes.Index(content[next:], magic)
		if found < 0 {
			return at, nil
		}
		next += found
		if _, ok := readFrame(content[next:], seed); ok && next%frameAlign == 0 {
			return at, fmt.Errorf("damaged at byte %d, with a whole frame behind it", at)
		}
		next++
	}
}
