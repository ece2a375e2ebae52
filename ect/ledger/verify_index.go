package ledger

import (
	"bytes"
	"errors"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// accounts looks for ids that lead to no entry. Where there are as many as entries, each
// of which was found by its own, there are none; only else they are read one by one.
func (v *verifier) accounts() error {
	leading := int64(0)
	for found, err := range v.store.Scan(v.ctx, store.Prefix([]byte{space, spaceID})) {
		if err != nil {
			return err
		}
		where, ok := decodeAccount(found.Value)
		switch {
		case !ok || len(found.Key) != idKeySize:
			v.fault(-1, "what stands under an id cannot be read")
		case where.log != v.id:
		case where.waiting:
			if err := v.waits(found.Key, where); err != nil {
				return err
			}
		case where.index < v.report.Head.Size:
			leading++
		default:
			if err := v.behind(where.index, "an id leads here, "); err != nil {
				return err
			}
		}
	}
	if leading == v.report.Entries {
		return nil
	}
	for found, err := range v.store.Scan(v.ctx, store.Prefix([]byte{space, spaceID})) {
		if err != nil {
			return err
		}
		where, ok := decodeAccount(found.Value)
		if !ok || where.log != v.id || where.waiting || where.index >= v.report.Head.Size {
			continue
		}
		e, err := v.read(v.ctx, v.id, where.index)
		if err := v.answered(err); err != nil {
			return err
		}
		if err != nil || !bytes.Equal(v.idKey(e.Workflow, e.ID), found.Key) {
			v.fault(where.index, "an id leads here that is not the entry's")
		}
	}
	return nil
}

// answered is err where it says nothing of what the store holds.
func (v *verifier) answered(err error) error {
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrTampered) {
		return nil
	}
	return err
}

// waits holds that an event which waits is there.
func (v *verifier) waits(key []byte, where account) error {
	_, err := v.store.Get(v.ctx, v.outboxKey(where.ticket))
	if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	now, err := v.store.Get(v.ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if again, ok := decodeAccount(now.Value); ok && again == where {
		v.fault(-1, "an event that waited for the sequencer is missing (ticket %d)", where.ticket.number)
	}
	return nil
}

// workflows looks for places in workflows' lists that lead to no entry of theirs.
func (v *verifier) workflows() error {
	const size = 2 + idHash + 16
	mine := func(key []byte) (int64, bool) {
		if len(key) != size || logID(key[2+idHash:][:8]) != v.id {
			return 0, false
		}
		return indexIn(key), true
	}
	n := int64(0)
	for found, err := range v.store.Scan(v.ctx, store.Prefix([]byte{space, spaceWorkflow})) {
		if err != nil {
			return err
		}
		at, ok := mine(found.Key)
		switch {
		case ok && at < v.report.Head.Size:
			n++
		case ok:
			if err := v.behind(at, "stands in a workflow's list, "); err != nil {
				return err
			}
		}
	}
	if n == v.listed {
		return nil
	}
	for found, err := range v.store.Scan(v.ctx, store.Prefix([]byte{space, spaceWorkflow})) {
		if err != nil {
			return err
		}
		at, ok := mine(found.Key)
		if !ok || at >= v.report.Head.Size {
			continue
		}
		e, err := v.read(v.ctx, v.id, at)
		if err := v.answered(err); err != nil {
			return err
		}
		if err != nil || e.Workflow == "" || !bytes.Equal(v.workflowKey(e.Workflow, v.id, at), found.Key) {
			v.fault(at, "stands in the list of a workflow that is not its own")
		}
	}
	return nil
}

// outbox opens what waits for the sequencer.
func (v *verifier) outbox() error {
	for found, err := range v.store.Scan(v.ctx, store.Prefix(logKey(spaceOutbox, v.id, 0))) {
		if err != nil {
			return err
		}
		t, ok := ticketIn(found.Key)
		if !ok {
			v.fault(-1, "something stands among the events that wait")
			continue
		}
		v.report.Waiting++
		if err := v.waiting(t, found); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) waiting(t ticket, found store.Entry) error {
	plain, err := v.sealer.Open(nil, found.Value, found.Key)
	var e Entry
	if err == nil {
		e, err = decode(plain)
	}
	if err != nil {
		v.fault(-1, "an event that waits cannot be read (ticket %d): %s", t.number, err)
		return nil
	}
	now, err := v.store.Get(v.ctx, v.idKey(e.Workflow, e.ID))
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	where, ok := decodeAccount(now.Value)
	if err == nil && ok && where.log == v.id && where.waiting && where.ticket == t {
		return nil
	}
	if _, err := v.store.Get(v.ctx, found.Key); err != nil {
		return v.answered(err) // it came into the tree meanwhile
	}
	v.fault(-1, "an event that waits is not to be found by its id (ticket %d)", t.number)
	return nil
}
