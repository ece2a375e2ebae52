package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// MaxEvents is the largest number of events of one Record, so that a batch has room
// for what they tell of.
const MaxEvents = 16

// Pending are events on their way into a commit.
type Pending struct {
	l       *Log
	tickets []uint64
	writes  []store.Write
	done    bool
}

// Record makes the writes by which events reach the log, in their order: they ride in
// the commit of the state change that the events tell of. An id that its workflow has
// already makes that commit fail. What the events refer to must not change any more.
//
// Done must be called with the error of the commit, whatever it is.
func (l *Log) Record(events ...Event) (*Pending, error) {
	if len(events) == 0 || len(events) > MaxEvents {
		return nil, fmt.Errorf("%w: %d events at once, from 1 to %d", ErrInvalid, len(events), MaxEvents)
	}
	for i := range events {
		if err := events[i].check(); err != nil {
			return nil, err
		}
		if events[i].Unsigned && l.options.Signer == nil {
			return nil, fmt.Errorf("%w: unsigned, and the log has no signer", ErrInvalid)
		}
	}
	p := &Pending{l: l, writes: make([]store.Write, 0, 4*len(events))}
	for i := range events {
		e := new(events[i])
		id := l.idKey(e.Workflow, e.ID)
		if p.has(id) != nil {
			p.abandon()
			return nil, fmt.Errorf("%w: twice in one commit", ErrDuplicate)
		}
		number, err := l.queue.open(e)
		if err != nil {
			p.abandon()
			return nil, err
		}
		p.tickets = append(p.tickets, number)
		t := ticket{number, l.boot}
		where := account{log: l.id, waiting: true, ticket: t}
		key := l.outboxKey(t)
		plain := e.encode(make([]byte, 0, len(e.Payload)+fixedOverhead))
		p.writes = append(p.writes,
			store.Write{Key: id, If: store.Absent(), Value: where.encode()},
			store.Write{Key: key, Value: l.sealer.Seal(make([]byte, 0, len(plain)+64), plain, key)},
		)
		if !p.guard(e) {
			p.abandon()
			return nil, fmt.Errorf("%w: twice in one commit", ErrDuplicate)
		}
	}
	return p, nil
}

// guard adds what keeps an id that is given without a workflow from being given in one
// too, before or after: the key of the other is absent. The ids of unsigned events are the
// log's own, and nobody knows them before they stand. It reports false where an event that
// came before in the same commit has the id.
func (p *Pending) guard(e *Event) bool {
	if e.Unsigned {
		return true
	}
	given := p.l.givenKey(e.ID)
	if e.Workflow == "" {
		return p.add(store.Write{Key: given, If: store.Absent(), Delete: true})
	}
	return p.add(store.Write{Key: p.l.idKey("", e.ID), If: store.Absent(), Delete: true}) &&
		p.add(store.Write{Key: given, Expires: e.KeepUntil})
}

// add adds a write that may be there already. It reports false where another one is there.
func (p *Pending) add(w store.Write) bool {
	there := p.has(w.Key)
	if there == nil {
		p.writes = append(p.writes, w)
		return true
	}
	return there.Delete == w.Delete && len(there.Value) == 0
}

// has is the write under a key; nil without one.
func (p *Pending) has(key []byte) *store.Write {
	for i := range p.writes {
		if bytes.Equal(p.writes[i].Key, key) {
			return &p.writes[i]
		}
	}
	return nil
}

// Writes are the riders, two for each event and two more at most for one that is signed.
func (p *Pending) Writes() []store.Write { return p.writes }

// Done tells the log what came of the commit and wakes the sequencer. It returns err,
// as ErrDuplicate where the commit failed because an id was taken. Calls after the
// first change nothing.
func (p *Pending) Done(err error) error {
	if !p.done {
		p.done = true
		for _, number := range p.tickets {
			switch {
			case err == nil:
				p.l.queue.landed(number)
			case errors.Is(err, store.ErrUnknown):
				p.l.queue.lost(number)
			default:
				p.l.queue.gone(number)
			}
		}
	}
	if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
		for i := range p.writes {
			if bytes.Equal(p.writes[i].Key, lost.Key) {
				return fmt.Errorf("%w: %w", ErrDuplicate, err)
			}
		}
	}
	return err
}

func (p *Pending) abandon() {
	for _, number := range p.tickets {
		p.l.queue.gone(number)
	}
}

// Append records events by a commit of their own, which carries riders, and returns
// when they are durable. They reach the tree a moment later: see Wait.
func (l *Log) Append(ctx context.Context, events []Event, riders ...store.Write) error {
	p, err := l.Record(events...)
	if err != nil {
		return err
	}
	_, err = l.store.Commit(ctx, append(p.Writes(), riders...)...)
	return p.Done(err)
}
