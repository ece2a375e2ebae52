package execution

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// What the store knows of calls without a key: a row for each, with a mark, for the window after its end
// (ADR 0070).

// The marks of a row.
const (
	markNone       = 0 // it runs, or was answered, or its client still waits
	markUnanswered = 'u'
	markReleased   = 'r'
	markAnswered   = 'a' // after it was not, or a crash has left that open
	markHeld       = 'w' // in a shared store: a client waits for the answer at the member that the row names
	markAsked      = 'q' // in a shared store: people are asked about the call that the row names
)

// note has the mark of an execution written if it is to change.
func (t *groups) note(s *groupShard, k *known) {
	if !k.forgotten && (t.wanted(k) != k.mark || k.state == StateCompleted && len(k.aliases) > 0) {
		t.pend(s, k)
	}
}

// wanted is the mark that the row of an execution should have.
func (t *groups) wanted(k *known) byte {
	switch lost := k.lost(); {
	case t.shared() && k.state == stateAsked && k.holder == nil:
		return markAsked
	case k.state == 0, k.state == stateAsked, k.state == StateInDoubt, k.state == stateElsewhere:
		return k.mark
	case k.state == stateReleased:
		return markReleased
	case t.shared() && lost:
		return markUnanswered
	case t.shared() && k.held():
		if k.mark == markNone && k.state == StateSending {
			return markNone
		}
		return markHeld
	case k.state == StateSending && !t.shared():
		return k.mark
	case lost || k.held():
		return markUnanswered
	case k.mark != markNone || t.shared() && k.free():
		return markAnswered
	}
	return markNone
}

func (t *groups) pend(s *groupShard, k *known) {
	if !k.pending {
		k.pending = true
		s.pending = append(s.pending, k)
	}
	mark := t.wanted(k)
	if t.shared() && mark != k.mark && (mark != markHeld || k.mark == markUnanswered) {
		if !t.soon.Swap(true) { // whoever waits for the news at another member does not wait for long
			time.AfterFunc(0, func() { _ = t.flush(context.Background(), false) })
		}
		return
	}
	t.arm()
}

func (t *groups) arm() {
	if !t.armed.Load() && !t.armed.Swap(true) {
		time.AfterFunc(markEvery, func() { _ = t.flush(context.Background(), false) })
	}
}

// publish has the store say that the caller gets the answer, before it does, if other members read there that it did
// not: an equal call which comes to them after that is meant.
func (t *groups) publish(mark byte) {
	if t.shared() && mark == markUnanswered {
		_ = t.flush(context.Background(), false)
	}
}

// clientsRetry reports whether clients retry a call that is answered with this status. 409 is left
// out: ours leaves the attempt unanswered.
func clientsRetry(status int) bool { return status == 408 || status == 429 || status >= 500 }

// flush writes the marks that have changed, and up to when a crash is no evidence: up to now where it is the last
// one of a process that ends in order, behind which none may come.
func (t *groups) flush(ctx context.Context, last bool) error {
	t.flushing <- struct{}{}
	defer func() { <-t.flushing }()
	t.armed.Store(false)
	t.soon.Store(false)
	if t.closed {
		return nil
	}
	t.closed = last
	upTo, err := t.g.store.Now(ctx)
	if err != nil {
		if !errors.Is(err, store.ErrClosed) {
			t.arm()
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	now := upTo
	var batch []store.Write
	var all []*known
	var marks []byte
	for i := range t.shards {
		s := &t.shards[i]
		s.Lock()
		pending := s.pending
		s.pending = nil
		for _, k := range pending {
			k.pending = false
			for _, at := range []time.Time{now, k.settled} {
				if at.After(t.ended) {
					t.ended = at
				}
			}
			if k.state == StateSending && !k.settled.IsZero() { // its outcome is being recorded
				if k.settled.Before(upTo) {
					upTo = k.settled
				}
				k.pending, s.pending = true, append(s.pending, k)
				t.arm()
				continue
			}
			mark := t.wanted(k)
			if k.state == StateCompleted {
				for _, key := range k.aliases {
					batch = append(batch, store.Write{Key: aliasKey(key), Value: k.key[:], Expires: k.expires})
				}
				k.aliases = nil
			}
			switch {
			case k.forgotten:
				batch = append(batch, store.Write{Key: appendRowKey(nil, k.group, k.key), Delete: true})
			case mark != k.mark:
				batch = append(batch, k.row(t.g.rowBoot(), mark, now))
			default:
				continue
			}
			all, marks = append(all, k), append(marks, mark)
		}
		s.Unlock()
	}
	if !last {
		upTo = upTo.Add(-crashEvidence)
	}
	if batch, err = t.held(ctx, batch); err == nil {
		for batch = append(batch, t.marksWritten(upTo, last)); len(batch) > 0 && err == nil; {
			n := min(len(batch), store.MaxBatch)
			_, err = t.g.store.Commit(ctx, batch[:n]...)
			batch = batch[n:]
		}
	}
	if err != nil {
		if passing(err) {
			t.arm() // also where it was the row alone
		}
		for _, k := range all {
			if errors.Is(err, store.ErrClosed) {
				break
			}
			s := t.shard(k.group)
			s.Lock()
			t.pend(s, k)
			s.Unlock()
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	if !last && t.ended.After(upTo) { // until the store says that it was long enough ago
		t.arm()
	}
	for i, k := range all {
		s := t.shard(k.group)
		s.Lock()
		k.mark = marks[i]
		t.note(s, k)
		s.Unlock()
	}
	t.shrink()
	return nil
}

// held is what is left of a batch where other members hold executions of this one: their rows stay as they are.
func (t *groups) held(ctx context.Context, batch []store.Write) (ours []store.Write, err error) {
	if !t.shared() {
		return batch, nil
	}
	for _, w := range batch {
		if w.Key[0] == spaceGroup {
			entry, err := t.g.store.Get(ctx, w.Key)
			asked := !w.Delete && w.Value[0] == markAsked // before there is a record
			switch r, unread := t.decodeRow(entry); {
			case errors.Is(err, store.ErrNotFound) && asked:
				w.If = store.Absent()
			case errors.Is(err, store.ErrNotFound):
				continue
			case err != nil:
				return nil, err
			case unread != nil || !r.mine && (r.mark != markAsked || !asked):
				continue
			default:
				w.If = store.VersionIs(entry.Version)
				if entry.Expires.After(w.Expires) {
					w.Expires = entry.Expires
				}
			}
		}
		ours = append(ours, w)
	}
	return ours, nil
}

// EndLate gives up the outcomes that wait for the store, for the guard that is opened next. It is called before what
// their owners need for their batches is closed; Close does so, too.
func (g *Guard) EndLate() { g.late.end() }

// Close writes what is still to be noted of calls without a key. It is called once, before the store
// is closed.
func (g *Guard) Close(ctx context.Context) error {
	g.members.stop()
	g.late.end()
	return g.groups.flush(ctx, true)
}

const (
	markEvery     = time.Second      // how late marks may be written
	crashEvidence = 2 * time.Second  // for what ended so long before a crash, it is evidence
	groupKept     = 10 * time.Minute // how much longer than a call takes, and is recognised, a shared store keeps its row
)

// open begins a table over what earlier processes have left.
func (t *groups) open(g *Guard) {
	t.flushing = make(chan struct{}, 1)
	t.g, t.room = g, mostKnown
	if t.shared() || g.fresh { // its rows are read each time, and of a new store memory has everything
		return
	}
	now := time.Now()
	for i := range t.shards {
		t.shards[i].since = now
	}
}

// shared reports that other members use the store.
func (t *groups) shared() bool { return t.g.members.store != nil }

// recovered notes a doubt of an earlier process that the store had no room for.
func (t *groups) recovered(key Key, r *Record) {
	t.found(key, r, known{state: StateInDoubt, unrecorded: true})
}

// recorded notes that a doubt is recorded which was known here only.
func (t *groups) recorded(key Key, r *Record) {
	s := t.shard(r.Group)
	s.Lock()
	defer s.Unlock()
	if k := s.keys[member{r.Group, key}]; k != nil {
		k.unrecorded = false
	}
}

// resolved notes that a doubt was settled whose window may be over: its row has been written anew, as
// Guard.put marks it. Record is nil where the call was not executed.
func (t *groups) resolved(key Key, doubt, r *Record) {
	if r != nil && doubt.Cause != CauseElsewhere {
		t.found(key, r, known{state: StateCompleted, mark: markUnanswered, unanswered: true, settled: r.Settled, expires: r.expires()})
	}
}

// found adds an execution of a group, unless it is known.
func (t *groups) found(key Key, r *Record, k known) {
	if r.Group == (groupHash{}) {
		return
	}
	s := t.shard(r.Group)
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	if before := s.keys[member{r.Group, key}]; before != nil {
		if !before.over(now) {
			return
		}
		t.remove(s, before)
	}
	k.member, k.id, k.window, k.count = member{r.Group, key}, r.ID, r.Window, r.Count
	k.began, k.ended = s.begins(now), now
	t.add(s, &k)
}

// rowSize is the size of the key and the value of a row.
const rowSize = 1 + len(groupHash{}) + keySize + 1 + binary.MaxVarintLen64 + 8 + 2*len(Record{}.Claim)

func appendRowKey(b []byte, group groupHash, key Key) []byte {
	return append(append(append(b, spaceGroup), group[:]...), key[:]...)
}

// aliasKey is the name of the entry that says which execution a key stands for.
func aliasKey(key Key) []byte { return append([]byte{spaceAlias}, key[:]...) }

// appendRow appends the value of a row. In a shared store it names the member that holds the execution: only that one
// knows its last attempt, and marks the row, until another one takes it.
func appendRow(b []byte, mark byte, count int, at time.Time, boot string) []byte {
	return append(appendTime(binary.AppendUvarint(append(b, mark), uint64(count)), at), boot...)
}

// rowBoot is what rows are written with.
func (l *records) rowBoot() string {
	if l.shared {
		return l.boot
	}
	return ""
}

// row is written where the mark of an execution changes.
func (k *known) row(boot string, mark byte, now time.Time) store.Write {
	at := k.settled
	if at.IsZero() || mark == markUnanswered { // the store had no clock then; from the leave of the client
		at = now
	}
	if mark == markAsked {
		boot += " " + k.id
	}
	return store.Write{
		Key: appendRowKey(nil, k.group, k.key), Value: appendRow(nil, mark, k.count, at, boot), Expires: at.Add(k.window),
	}
}

// row is what the store knows of an execution.
type row struct {
	*known            // without a state where the record is gone, or memory has it
	at      time.Time // of its mark, by the store's clock
	boot    string
	mine    bool // no other member holds it
	version store.Version
	until   time.Time
}

// read returns the rows of a group. Those that memory has, and no other member holds, are not described.
func (t *groups) read(ctx context.Context, group groupHash, window time.Duration) (all []row, err error) {
	now, err := t.g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s := t.shard(group)
	for entry, err := range t.g.store.Scan(ctx, store.Prefix(append([]byte{spaceGroup}, group[:]...))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		r, err := t.decodeRow(entry)
		if err != nil {
			return nil, unreadable(err)
		}
		r.window = window
		all = append(all, r)
	}
	for i := range all {
		r := &all[i]
		s.Lock()
		listed := s.keys[r.member] != nil
		s.Unlock()
		if r.mine && listed {
			continue
		}
		var record *Record
		if r.mark != markReleased && r.mark != markAsked {
			if record, _, err = t.g.load(ctx, r.key); err != nil {
				return nil, err
			}
			if record == nil {
				continue
			}
		}
		if err := t.describe(ctx, r, record, now); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// describe completes what a row says by the record; nil for a refusal, or a call that people are asked about.
func (t *groups) describe(ctx context.Context, r *row, record *Record, now time.Time) error {
	k, here := r.known, time.Now()
	k.began = here.Add(r.at.Sub(now))
	if k.ended = k.began; record == nil {
		if k.state = stateReleased; r.mark == markAsked {
			k.state, k.window = stateAsked, r.until.Sub(r.at)
		}
		return nil
	}
	if k.mark != markUnanswered || record.Settled.After(r.at) {
		k.ended = here.Add(record.Settled.Sub(now))
	}
	k.id, k.state, k.expires = record.ID, record.State, record.expires()
	switch {
	case record.State.open():
		orphan, err := t.g.members.orphaned(ctx, record)
		if err != nil {
			return err
		}
		if k.state = StateSending; orphan && t.g.flights.find(k.key) == nil {
			k.state, k.ended = StateInDoubt, here
		}
	case record.State == StateInDoubt && record.Cause == CauseElsewhere:
		k.state = stateElsewhere
	case record.State != StateInDoubt:
		k.state = StateCompleted
	}
	k.retriable, k.internal = record.State == StateCompleted && clientsRetry(record.Status), record.Internal
	if !k.expires.IsZero() {
		k.window = min(k.window, record.KeepKey)
	}
	k.unanswered = k.mark == markUnanswered
	if k.mark != markNone && k.mark != markHeld || record.Cause == CauseElsewhere { // its client was told to look elsewhere
		return nil
	}
	boot := r.boot
	if !t.shared() {
		boot = record.Boot
	}
	gone, err := t.g.members.left(ctx, boot)
	switch {
	case err != nil:
		return err
	case !gone:
		k.away = k.mark == markHeld || !r.mine && (k.state == StateSending || now.Sub(record.Settled) < 2*markEvery)
		return nil
	case k.mark == markNone:
		gone, err = t.unwritten(ctx, boot, record.Settled)
	}
	if gone { // and its client may not have the answer
		k.unanswered, k.mark = true, markUnanswered
	}
	return err
}

func (t *groups) decodeRow(entry store.Entry) (r row, err error) {
	if len(entry.Key) != 1+len(groupHash{})+keySize || len(entry.Value) < 2 {
		return r, errEncoding
	}
	count, n := binary.Uvarint(entry.Value[1:])
	if n <= 0 || len(entry.Value) < 1+n+8 {
		return r, errEncoding
	}
	at, by := entry.Value[1+n:], string(entry.Value[1+n+8:])
	boot, id, _ := strings.Cut(by, " ")
	r = row{
		known: &known{
			member: member{groupHash(entry.Key[1:]), keyIn(entry.Key)}, id: id,
			count: int(min(count, mostCount)), mark: entry.Value[0],
		},
		at: time.Unix(0, int64(binary.BigEndian.Uint64(at))), boot: boot, version: entry.Version, until: entry.Expires,
	}
	r.mine = !t.shared() || r.boot == t.g.boot
	r.foreign = !r.mine
	return r, nil
}

// Marks of a process that has crashed.

const kindMarks = 'm' // v m boot: up to when a process has written its marks

// marksKept is how long the marks of a process are known that is gone.
const marksKept = 30 * 24 * time.Hour

func marksKey(boot string) []byte { return append([]byte{spaceLive, kindMarks}, boot...) }

// unwritten reports that a process which is gone may not have written the mark of an execution that has settled then:
// it has not ended in order, and its marks were last written before.
func (t *groups) unwritten(ctx context.Context, boot string, settled time.Time) (bool, error) {
	entry, err := t.g.store.Get(ctx, marksKey(boot))
	switch {
	case errors.Is(err, store.ErrNotFound):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%w: %w", ErrStore, err)
	case len(entry.Value) != 9:
		return false, unreadable(errEncoding)
	}
	upTo := time.Unix(0, int64(binary.BigEndian.Uint64(entry.Value)))
	return entry.Value[8] == 0 && !settled.Before(upTo), nil
}

// marksWritten is the entry that unwritten reads, of this process. last says that it ends in order.
func (t *groups) marksWritten(upTo time.Time, last bool) store.Write {
	value := append(appendTime(nil, upTo), 0)
	if last {
		value[8] = 1
	}
	return store.Write{Key: marksKey(t.g.boot), Value: value, Expires: upTo.Add(marksKept)}
}
