package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// mover is the sequencer's own state.
type mover struct {
	*Log
	all     bool            // the next move reads the outbox
	damaged map[ticket]bool // do not open; found by the present scans of everything
}

// waiting is an event on its way into the tree.
type waiting struct {
	ticket ticket
	event  Event
}

// move moves the first events that wait into the tree, by one commit. rest says that
// there may be more.
//
// Events of this process are at hand. What others left or landed unknown to anybody is
// read from the outbox, when the log is opened, after a commit that was lost, and now
// and then.
func (m *mover) move(ctx context.Context) (rest bool, err error) {
	if m.all {
		return m.moveAll(ctx)
	}
	found, sure := m.queue.recorded(m.boot, maxMoved)
	if !sure {
		m.all = true
		return m.moveAll(ctx)
	}
	if len(found) == 0 {
		return false, nil
	}
	n, err := m.commit(ctx, found)
	return n < len(found) || n == maxMoved, err
}

// moveAll moves the first events of the outbox.
func (m *mover) moveAll(ctx context.Context) (rest bool, err error) {
	look := m.queue.look()
	if m.damaged == nil {
		m.damaged = make(map[ticket]bool)
	}
	found, end, err := m.scan(ctx)
	if err != nil {
		return false, err
	}
	if end {
		m.settle(look, found)
	}
	n := 0
	if len(found) > 0 {
		if n, err = m.commit(ctx, found); err != nil {
			return false, err
		}
	}
	if end && n == len(found) && !m.queue.closed() {
		m.all, m.damaged = false, nil
	}
	return !end || n > 0 || n < len(found), nil
}

// settle tells the queue what a scan that reached the end saw.
func (m *mover) settle(look uint64, found []waiting) {
	seen, foreign := make(map[uint64]bool), 0
	for i := range found {
		if t := &found[i].ticket; t.boot == m.boot {
			seen[t.number] = true
		} else {
			foreign++
		}
	}
	m.queue.looked(look, seen, foreign)
	m.counts.damaged.Store(int64(len(m.damaged)))
}

// scan reads the first events of the outbox. end says that there are no others.
func (m *mover) scan(ctx context.Context) (found []waiting, end bool, err error) {
	r := store.Prefix(logKey(spaceOutbox, m.id, 0))
	r.Limit = maxMoved + len(m.damaged)
	n := 0
	for e, err := range m.store.Scan(ctx, r) {
		if err != nil {
			return nil, false, err
		}
		n++
		t, ok := ticketIn(e.Key)
		if !ok || m.damaged[t] {
			continue
		}
		plain, err := m.sealer.Open(nil, e.Value, e.Key)
		var entry Entry
		if err == nil {
			entry, err = decode(plain)
		}
		if err != nil {
			m.skip(t, err)
			continue
		}
		found = append(found, waiting{t, entry.Event})
	}
	return found, n < r.Limit, nil
}

// skip leaves an event that does not open where it is: Verify names it, and a ring
// that is complete again opens it. Events behind it go on.
func (m *mover) skip(t ticket, err error) {
	m.damaged[t] = true
	m.counts.damaged.Store(int64(len(m.damaged)))
	if t.boot == m.boot {
		m.queue.gone(t.number)
	}
	m.options.Logger.Error("an event that waits for the ledger does not open", slog.Any("error", err))
}

// token makes the token of an event that has none.
func (m *mover) token(ctx context.Context, e *Event) error {
	if !e.Unsigned || m.options.Signer == nil {
		return nil
	}
	token, err := m.options.Signer.Sign(ctx, *e)
	if err == nil {
		signed := *e
		signed.Payload, signed.Unsigned, signed.Draft = token, false, nil
		if err = signed.check(); err == nil {
			*e = signed
			return nil
		}
		err = fmt.Errorf("%w: its token: %w", ErrRefused, err)
	}
	if !errors.Is(err, ErrRefused) {
		return fmt.Errorf("signing an event: %w", err)
	}
	m.counts.refused.Add(1)
	m.options.Logger.Error("an event goes into the ledger without a token", slog.String("id", e.ID), slog.Any("error", err))
	return nil
}

// tokens makes the tokens of as many events as it can, from the first.
func (m *mover) tokens(ctx context.Context, found []waiting) ([]waiting, error) {
	for i := range found {
		if err := m.token(ctx, &found[i].event); err != nil {
			if i == 0 {
				return nil, err
			}
			return found[:i], nil
		}
	}
	return found, nil
}

// commit puts events into the tree, and returns how many, from the first.
func (m *mover) commit(ctx context.Context, found []waiting) (n int, err error) {
	if found, err = m.tokens(ctx, found); err != nil {
		return 0, err
	}
	now, err := m.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	before := m.now.Load()
	if now = now.Round(0); now.Before(before.recorded) {
		now = before.recorded
	}
	after := &state{tree: before.clone(), recorded: now}
	batch := make([]store.Write, 1, treeWrites+movedWrites*len(found))
	room := maxMovedBytes
	var tiles []tile
	var own []uint64
	for i := range found {
		w := &found[i]
		index := after.size
		leaf := w.event.encodeLeaf(make([]byte, 0, len(w.event.Payload)+fixedOverhead), index, now)
		if room -= len(leaf) + sealedMore; room < 0 {
			found = found[:i]
			break
		}
		hash := tlog.RecordHash(leaf)
		tiles = after.add(hash, tiles)
		batch = m.entryWrites(batch, &w.event, index, leaf, hash)
		if i == 0 {
			// Where the tree ends nothing may stand: what does was put there by
			// somebody else.
			batch[entryWrite].If = store.Absent()
		}
		batch = append(batch, store.Write{Key: m.outboxKey(w.ticket), Delete: true})
		if w.ticket.boot == m.boot {
			own = append(own, w.ticket.number)
		}
	}
	for _, t := range tiles {
		batch = append(batch, store.Write{Key: m.tileKey(t.level, t.n), Value: joinHashes(t.hashes)})
	}
	if after.head, err = m.sign(after.tree); err != nil {
		return 0, err
	}
	batch[0] = store.Write{Key: m.headKey(), Value: after.head.Note, If: store.VersionIs(before.version)}
	after.version, err = m.store.Commit(ctx, batch...)
	if err == nil {
		m.now.Store(after)
		m.queue.moved(own, len(found)-len(own))
		return len(found), nil
	}
	return 0, m.failed(ctx, before, err)
}

// entryWrite is where the first entry of a move stands in its batch, behind the head.
const entryWrite = 1

// entryWrites are what an entry is in the store.
func (m *mover) entryWrites(batch []store.Write, e *Event, index int64, leaf []byte, hash tlog.Hash) []store.Write {
	key := m.entryKey(index)
	where := account{log: m.id, index: index, check: checkOf(hash)}
	batch = append(batch,
		store.Write{Key: key, Value: m.sealer.Seal(make([]byte, 0, len(leaf)+64), leaf, key)},
		store.Write{Key: m.idKey(e.Workflow, e.ID), Value: where.encode()},
	)
	if e.Workflow != "" {
		batch = append(batch, store.Write{Key: m.workflowKey(e.Workflow, m.id, index)})
	}
	return batch
}

// failed finds out what a commit that did not succeed left behind. Where another
// process moved the log on, this one goes on from there, if the tree grew out of the
// one that it knew.
func (m *mover) failed(ctx context.Context, before *state, failure error) error {
	lost := (*store.Conflict)(nil)
	if !errors.As(failure, &lost) && !errors.Is(failure, store.ErrUnknown) {
		return failure
	}
	found, err := m.load(ctx)
	if err != nil {
		return err
	}
	if err := found.contains(ctx, m.shelf, &before.head); err != nil {
		return err
	}
	if lost != nil && found.version == before.version {
		return fmt.Errorf("%w: something stands in the way of entry %d", ErrTampered, before.size)
	}
	if found.version == before.version {
		return failure // it did not land
	}
	m.now.Store(found)
	m.queue.overtake()
	m.all = true
	return nil
}
