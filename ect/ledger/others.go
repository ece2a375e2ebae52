package ledger

import (
	"bytes"
	"context"
	"errors"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// HeadPrefix begins the store's keys of the heads of all logs. A log's head is written whenever entries are
// added to its tree.
func HeadPrefix() []byte { return []byte{space, spaceHead} }

// Others reads what is added to the other logs of a store. It is for one goroutine at a time.
type Others struct {
	log  *Log
	next map[logID]int64
}

// Others begins behind the entries that the other logs have now.
func (l *Log) Others(ctx context.Context) (*Others, error) {
	o := &Others{l, map[logID]int64{}}
	return o, o.heads(ctx, func(log logID, head Head) error {
		o.next[log] = head.Size
		return nil
	})
}

// Read calls visit with each entry that was added since Others or the last Read, those of one log in their
// order. Entries that were pruned since, or altered, are left out. visit must not wait. After an error the next
// Read goes on behind what was visited.
func (o *Others) Read(ctx context.Context, visit func(e *Entry)) error {
	return o.heads(ctx, func(log logID, head Head) error {
		if o.next[log] >= head.Size {
			return nil
		}
		r := store.Range{From: entryKey(log, o.next[log]), To: entryKey(log, head.Size)}
		for found, err := range o.log.scan(ctx, r) {
			e, err := o.log.scanned(found, err)
			if err != nil && !errors.Is(err, ErrTampered) { // which a verification reports
				return err
			}
			if err == nil {
				e := e.in(head.Origin)
				visit(&e)
			}
			o.next[log] = indexIn(found.Key) + 1
		}
		o.next[log] = head.Size
		return nil
	})
}

// heads visits the heads of the other logs. Those that do not verify are left out.
func (o *Others) heads(ctx context.Context, visit func(log logID, head Head) error) error {
	var notes [][]byte
	for found, err := range o.log.store.Scan(ctx, store.Prefix(HeadPrefix())) {
		if err != nil {
			return err
		}
		if !bytes.Equal(found.Key, o.log.headKey()) {
			notes = append(notes, bytes.Clone(found.Value))
		}
	}
	for _, note := range notes {
		head, err := parseHeadText(noteText(note))
		if err != nil {
			continue
		}
		keys, err := o.log.options.KeysOf(head.Origin)
		if err == nil {
			_, err = ParseHead(note, head.Origin, keys)
		}
		if err != nil {
			continue
		}
		if err := visit(logOf(o.log.sealer, head.Origin), head); err != nil {
			return err
		}
	}
	return nil
}
