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
	bulk   int   // bytes of bulk values
	size   int64 // of its entries in a Badger transaction

	// What the committer answers, before it sends to done.
	done    chan struct{}
	version store.Version
	err     error
	lost    int    // the write that lost, or -1
	found   []byte // what stands under its key, as in Badger; nil is nothing

	// onGroup is set where the verdict rests on an earlier batch of the same
	// group: it stands only if that group's sync succeeds.
	onGroup bool
}

// staged is one write as Badger will hold it.
type staged struct {
	key     []byte // with the byte in front
	value   []byte // header and value; nil deletes
	expires time.Time
}

// entryOverhead is what Badger adds to key and value when it sizes a transaction.
const entryOverhead = 12

var batches = sync.Pool{New: func() any { return &batch{done: make(chan struct{}, 1)} }}

// newBatch encodes writes in the caller's goroutine, so that the committer only
// fills in versions and pointers.
func newBatch(writes []store.Write, now time.Time) *batch {
	b := batches.Get().(*batch)
	b.writes, b.lost = writes, -1
	total := 0
	for i := range writes {
		total += 1 + len(writes[i].Key) + headerSize + max(len(writes[i].Value), pointerSize)
	}
	memory := make([]byte, 0, total)
	take := func(n int) []byte {
		from := len(memory)
		memory = memory[:from+n]
		return memory[from : from+n : from+n]
	}
	for i := range writes {
		w := &writes[i]
		s := staged{key: take(1 + len(w.Key)), expires: w.Expires}
		s.key[0] = userSpace
		copy(s.key[1:], w.Key)
		// A write that has expired already is the same as a deletion, and must not
		// make a file for a time that a sweep may have passed.
		gone := w.Delete || !w.Expires.IsZero() && !now.Before(w.Expires)
		switch {
		case gone:
		case w.Bulk:
			s.value = take(headerSize + pointerSize)
			putHeader(s.value, w.Expires, true)
			b.bulk += len(w.Value)
		default:
			s.value = take(headerSize + len(w.Value))
			putHeader(s.value, w.Expires, false)
			copy(s.value[headerSize:], w.Value)
		}
		b.size += int64(len(s.key)+len(s.value)) + entryOverhead
		b.staged = append(b.staged, s)
	}
	return b
}

// hasBulk reports whether the batch waits for files of bulk values.
func (b *batch) hasBulk() bool {
	for i := range b.writes {
		if b.writes[i].Bulk && b.staged[i].value != nil {
			return true
		}
	}
	return false
}

func (b *batch) finish(err error) {
	b.err = err
	b.done <- struct{}{}
}

// release gives the batch back; its memory may live on in Badger.
func (b *batch) release() {
	clear(b.staged)
	*b = batch{done: b.done, staged: b.staged[:0]}
	batches.Put(b)
}
