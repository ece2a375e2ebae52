package wal

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// A file is filled with zeros before it is used: a sync costs less if neither the file's size
// nor its blocks change. A file whose frames are no longer needed is reused under another
// number. Each use has a seed of its own in the header, so that no frame of an earlier use
// passes its checksum.
//
//	bytes 0-3    magic
//	bytes 4-7    CRC-32C of bytes 8 to 31, the seed
//	bytes 8-15   number of the file
//	bytes 16-23  random
//	bytes 24-31  size of the file
//	from firstFrame on, frames
const (
	magic      = 0x61676c31 // "agl1"
	headerSize = 32
	firstFrame = 4096 // apart from the header, whose sector is never rewritten
	suffix     = ".wal"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type file struct {
	f      *os.File
	number uint64
	size   int64
	seed   uint32

	// Of a full file; guarded by the log's lock.
	full    bool
	last    uint64 // the last frame in it
	applied uint64 // the owner's timestamp at which it had all of it elsewhere; 0 is not yet
}

func nameOf(number uint64) string { return fmt.Sprintf("%012d%s", number, suffix) }

func numberOf(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, err == nil
}

// create makes an empty file; its name is not durable yet. After an error the file is removed.
func create(dir string, number uint64, size int64, d Disk) (l *file, err error) {
	f, err := os.OpenFile(filepath.Join(dir, nameOf(number)), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	l = &file{f: f, size: size}
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < size && err == nil; at += int64(len(zeros)) {
		err = d.Write(f, zeros[:min(int64(len(zeros)), size-at)], at)
	}
	if err == nil {
		err = l.begin(number, d)
	}
	if err != nil {
		return nil, errors.Join(err, l.remove())
	}
	return l, nil
}

// reuse makes a file of one that is no longer needed.
func (l *file) reuse(number uint64, d Disk) (*file, error) {
	name := l.f.Name()
	next := filepath.Join(filepath.Dir(name), nameOf(number))
	l.f.Close() // some systems rename no open file
	if err := os.Rename(name, next); err != nil {
		return nil, errors.Join(err, os.Remove(name))
	}
	f, err := os.OpenFile(next, os.O_RDWR, 0)
	if err != nil {
		return nil, errors.Join(err, os.Remove(next))
	}
	renamed := &file{f: f, size: l.size}
	if err := renamed.begin(number, d); err != nil {
		return nil, errors.Join(err, renamed.remove())
	}
	return renamed, nil
}

// begin writes the header and makes the file durable.
func (l *file) begin(number uint64, d Disk) error {
	head := make([]byte, headerSize)
	binary.BigEndian.PutUint32(head, magic)
	binary.BigEndian.PutUint64(head[8:], number)
	rand.Read(head[16:24])
	binary.BigEndian.PutUint64(head[24:], uint64(l.size))
	l.number, l.seed = number, crc32.Checksum(head[8:], castagnoli)
	binary.BigEndian.PutUint32(head[4:], l.seed)
	if err := d.Write(l.f, head, 0); err != nil {
		return err
	}
	return d.Sync(l.f)
}

func (l *file) remove() error {
	l.f.Close()
	return os.Remove(l.f.Name())
}

// readFile calls do for the frames of a file in order, and returns the offset after the last
// one. A frame that is not whole ends the file, since the last one may be torn; a whole one
// after it is proof of damage.
func readFile(name string, do func(f Frame) error) (end int64, err error) {
	content, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errors.New("file is missing")
	}
	if err != nil {
		return 0, err
	}
	number, _ := numberOf(filepath.Base(name))
	if len(content) < firstFrame || binary.BigEndian.Uint32(content) != magic ||
		binary.BigEndian.Uint32(content[4:]) != crc32.Checksum(content[8:headerSize], castagnoli) ||
		binary.BigEndian.Uint64(content[8:]) != number ||
		binary.BigEndian.Uint64(content[24:]) != uint64(len(content)) {
		return 0, errors.New("header is garbled")
	}
	seed := binary.BigEndian.Uint32(content[4:])
	at := firstFrame
	for {
		f, ok := readFrame(content[at:], seed)
		if !ok {
			break
		}
		f.At = int64(at)
		if err := do(f); err != nil {
			return f.At, err
		}
		at += f.size
	}
	begin := binary.BigEndian.AppendUint32(nil, frameMagic)
	for next := at; ; next++ {
		found := bytes.Index(content[next:], begin)
		if found < 0 {
			return int64(at), nil
		}
		next += found
		if _, ok := readFrame(content[next:], seed); ok && next%frameAlign == 0 {
			return int64(at), fmt.Errorf("damaged at byte %d, with a whole frame behind it", at)
		}
	}
}

// A frame holds one group, and is read whole or not at all. Numbers are big endian.
//
//	bytes 0-3    magic
//	bytes 4-7    CRC-32C of what follows, begun with the seed of the file
//	bytes 8-15   number of the frame, one more than that of the frame before
//	bytes 16-23  the highest version in it
//	bytes 24-27  length of the contents
//	bytes 28-31  zero
//	then         the contents, and zeros up to a multiple of frameAlign
const (
	frameMagic  = 0x61676631 // "agf1"
	frameHeader = 32
	frameAlign  = 8
)

// Frame is a frame as it was read.
type Frame struct {
	Seq      uint64
	Version  store.Version
	Contents []byte
	At       int64 // where it begins in its file

	size int // in the file
}

// BeginFrame reserves the header of a frame in b. The contents are appended to what it returns.
func BeginFrame(b []byte) []byte { return append(b[:0], make([]byte, frameHeader)...) }

// endFrame fills in the header of b, which begins with room for it.
func endFrame(b []byte, seed uint32, seq uint64, version store.Version) []byte {
	length := len(b) - frameHeader
	for len(b)%frameAlign != 0 {
		b = append(b, 0)
	}
	binary.BigEndian.PutUint32(b, frameMagic)
	binary.BigEndian.PutUint64(b[8:], seq)
	binary.BigEndian.PutUint64(b[16:], uint64(version))
	binary.BigEndian.PutUint32(b[24:], uint32(length))
	binary.BigEndian.PutUint32(b[4:], crc32.Update(seed, castagnoli, b[8:frameHeader+length]))
	return b
}

// readFrame reads the frame at the beginning of b; ok is false if it is not whole.
func readFrame(b []byte, seed uint32) (f Frame, ok bool) {
	if len(b) < frameHeader || binary.BigEndian.Uint32(b) != frameMagic {
		return Frame{}, false
	}
	end := frameHeader + uint64(binary.BigEndian.Uint32(b[24:]))
	size := (end + frameAlign - 1) / frameAlign * frameAlign
	if size > uint64(len(b)) ||
		crc32.Update(seed, castagnoli, b[8:end]) != binary.BigEndian.Uint32(b[4:]) {
		return Frame{}, false
	}
	return Frame{
		Seq:      binary.BigEndian.Uint64(b[8:]),
		Version:  store.Version(binary.BigEndian.Uint64(b[16:])),
		Contents: b[frameHeader:end:end],
		size:     int(size),
	}, true
}
