package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	resealPage  = 256
	resealBatch = 32
)

// Reseal seals anew what stands sealed under older keys, and returns how many values.
// It may be stopped anywhere and starts over; afterwards the log needs no other key
// than the newest, but for events that were recorded meanwhile by somebody who did not
// have that yet. Values that do not open are left, and are the error.
func (l *Log) Reseal(ctx context.Context) (int, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	ids := l.sealer.KeyIDs()
	newest := ids[len(ids)-1]
	total := 0
	var damaged error
	for _, kind := range []byte{spaceOutbox, spaceEntry} {
		r := store.Prefix(logKey(kind, l.id, 0))
		r.Limit = resealPage
		for {
			page, last, err := l.resealPage(ctx, r, newest)
			if err != nil && page == nil {
				return total, err
			}
			damaged = errors.Join(damaged, err)
			n, err := l.resealCommit(ctx, page)
			total += n
			if err != nil {
				return total, err
			}
			if last == nil {
				break
			}
			r.From = append(last, 0)
		}
	}
	return total, damaged
}

// resealPage makes the writes for one page; last is its last key, none at the end.
func (l *Log) resealPage(ctx context.Context, r store.Range, newest uint32) (writes []store.Write, last []byte, damaged error) {
	writes = []store.Write{}
	n := 0
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return nil, nil, err
		}
		n++
		last = found.Key
		if l.sealer.KeyOf(found.Value) == newest {
			continue
		}
		plain, err := l.sealer.Open(nil, found.Value, found.Key)
		if err != nil {
			damaged = fmt.Errorf("%w: %q: %w", ErrTampered, found.Key[:2], err)
			continue
		}
		writes = append(writes, store.Write{
			Key: found.Key, If: store.VersionIs(found.Version),
			Value: l.sealer.Seal(make([]byte, 0, len(plain)+64), plain, found.Key),
		})
	}
	if n < r.Limit {
		last = nil
	}
	return writes, last, damaged
}

// resealCommit leaves out what has changed meanwhile: it came into the tree, and was
// sealed then.
func (l *Log) resealCommit(ctx context.Context, writes []store.Write) (int, error) {
	total := 0
	for len(writes) > 0 {
		step := writes[:min(len(writes), resealBatch)]
		_, err := l.store.Commit(ctx, step...)
		lost := (*store.Conflict)(nil)
		if errors.As(err, &lost) {
			writes = append(append([]store.Write{}, writes[:lost.Index]...), writes[lost.Index+1:]...)
			continue
		}
		if err != nil {
			return total, err
		}
		total += len(step)
		writes = writes[len(step):]
	}
	return total, nil
}
