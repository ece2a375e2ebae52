package badger

import (
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// batch is one Commit on its way through the committer.
type batch struct {
	writes []store.Write
	staged []staged
	bulk   int // bytes of bulk values that go to their files first
	inline int // bytes of the others
	size   int // of its changes in a frame, and about what they take in memory

	// What the committer answers, before it sends to done.
	done    chan struct{}
	version store.Version
	err     error
	lost    int    // the write that lost, or -1
	found   []byte // what stands under its key; nil is nothing

	// onGroup is set where the verdict rests on an earlier batch of the same
	// group: it stands only if that group's sync succeeds.
	onGroup bool
}

// staged is one write as the log will hold it.
type staged struct {
	key   []byte // with the byte in front
	value []byte // header and value; nil deletes
	apart bool   // value is a pointer, to be filled in
}

const (
	// entryOverhead is what Badger adds to key and value when it sizes a
	// transaction.
	entryOverhead = 12
	// maxInline is the size from which on a bulk value goes straight to its file,
	// with a sync of its own. Writing it twice would cost more.
	maxInline = 32 << 10
)

var batches = sync.Pool{New: func() any { return &batch{done: make(chan struct{}, 1)} }}

// newBatch encodes writes in the caller's goroutine, so that the committer only
// fills in versions and pointers.
func newBatch(writes []store.Write, now time.Time) *batch {
	b := batches.Get().(*batch)
	b.writes, b.lost = writes, -1
	total := 0
	for i := range writes {
		total += 1 + len(writes[i].Key) + headerSize + stagedSize(&writes[i])
	}
	memory := make([]byte, 0, total)
	take := func(n int) []byte {
		from := len(memory)
		memory = memory[:from+n]
		return memory[from : from+n : from+n]
	}
	for i := range writes {
		w := &writes[i]
		s := staged{key: take(1 + len(w.Key))}
		s.key[0] = userSpace
		copy(s.key[1:], w.Key)
		// A write that has expired already is the same as a deletion, and must not
		// make a file for a time that a sweep may have passed.
		gone := w.Delete || !w.Expires.IsZero() && !now.Before(w.Expires)
		switch {
		case gone:
		case w.Bulk && len(w.Value) >= maxInline:
			s.value, s.apart = take(headerSize+pointerSize), true
			putHeader(s.value, w.Expires, flagBulk)
			b.bulk += len(w.Value)
		case w.Bulk:
			s.value = take(headerSize + len(w.Value))
			putHeader(s.value, w.Expires, flagBulk|flagInline)
			copy(s.value[headerSize:], w.Value)
			b.inline += len(w.Value)
		default:
			s.value = take(headerSize + len(w.Value))
			putHeader(s.value, w.Expires, 0)
			copy(s.value[headerSize:], w.Value)
		}
		b.size += len(s.key) + len(s.value) + entryOverhead
		b.staged = append(b.staged, s)
	}
	return b
}

// stagedSize is the size of what stands in a value behind its header.
func stagedSize(w *store.Write) int {
	if w.Bulk && len(w.Value) >= maxInline {
		return pointerSize
	}
	return len(w.Value)
}

func (b *batch) finish(err error) {
	b.err = err
	b.done <- struct{}{}
}

// release gives the batch back; its memory lives on in the overlay.
func (b *batch) release() {
	clear(b.staged)
	*b = batch{done: b.done, staged: b.staged[:0]}
	batches.Put(b)
}
