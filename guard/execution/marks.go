package execution

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// What the store knows of calls without a key: a row for each, with a mark, for the window after its end
// (ADR 0070).

// The marks of a row.
const (
	markNone       = 0
	markUnanswered = 'u'
	markReleased   = 'r'
	markAnswered   = 'a' // after it was not, or a crash has left that open
)

// note has the mark of an execution written if it is to change.
func (t *groups) note(s *groupShard, k *known) {
	if k.forgotten {
		return // its row is to be deleted
	}
	if k.wanted() != k.mark || k.state == StateCompleted && len(k.aliases) > 0 {
		t.pend(s, k)
		return
	}
	if k.foreign && k.in != nil && k.holder == nil && k.runner == nil {
		t.remove(s, k)
	}
}

// wanted is the mark that the row of an execution should have.
func (k *known) wanted() byte {
	switch {
	case k.asked:
		return k.mark
	case k.held && k.holder != nil && !k.holder.answered:
		return markHeld
	case k.held && k.holder == nil && k.unanswered:
		return markUnanswered
	case k.held:
		return markAnswered
	case k.foreign:
		return k.mark
	case k.released:
		return markReleased
	case k.state != StateCompleted || k.runner != nil:
		return k.mark
	case !k.learned && (k.holder != nil && !k.holder.answered || k.holder == nil && k.unanswered):
		return markUnanswered
	case k.mark != markNone || k.crashed:
		return markAnswered
	}
	return markNone
}

func (t *groups) pend(s *groupShard, k *known) {
	if !k.pending {
		k.pending = true
		s.pending = append(s.pending, k)
	}
	t.arm()
}

func (t *groups) arm() {
	if !t.armed.Load() && !t.armed.Swap(true) {
		time.AfterFunc(markEvery, func() { _ = t.flush(context.Background(), false) })
	}
}

// turn is for one at a time. It is a channel, since who waits for it waits for a commit, which a clock of tests sees.
type turn chan struct{}

func (t turn) tryEnter() bool {
	select {
	case t <- struct{}{}:
		return true
	default:
		return false
	}
}

func (t turn) leave() { <-t }

// again has the marks written once more, once nobody else does.
func (t *groups) again() {
	if !t.flushing.tryEnter() {
		time.AfterFunc(markEvery, t.again)
		return
	}
	defer t.flushing.leave()
	if t.armed.Load() && !t.closed {
		time.AfterFunc(markEvery, t.again)
		return
	}
	t.follows = false
	_ = t.write(context.Background(), false)
}

// clientsRetry reports whether clients retry a call that is answered with this status. 409 is left
// out: ours leaves the attempt unanswered.
func clientsRetry(status int) bool { return status == 408 || status == 429 || status >= 500 }

// flush writes the marks that have changed, and up to when a crash is no evidence: up to now where it is the last
// one of a process that ends in order, behind which none may come.
func (t *groups) flush(ctx context.Context, last bool) error {
	t.flushing <- struct{}{}
	defer t.flushing.leave()
	t.armed.Store(false)
	err := t.write(ctx, last)
	t.closed = t.closed || last
	return err
}

// write is flush, with flushing held.
func (t *groups) write(ctx context.Context, last bool) error {
	if t.closed {
		return nil
	}
	now, err := t.g.store.Now(ctx)
	if err != nil {
		if !errors.Is(err, store.ErrClosed) {
			t.arm()
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	m, upTo := t.changed(now)
	if !last {
		upTo = upTo.Add(-crashEvidence)
	}
	for batch := range slices.Chunk(append(m.batch, t.marksWritten(upTo, last)), store.MaxBatch) {
		if _, err := t.g.store.Commit(ctx, batch...); err != nil {
			return t.unmarked(m.of, err)
		}
		n := min(len(batch), len(m.of))
		t.marked(m.of[:n], m.marks[:n])
		m.of, m.marks = m.of[n:], m.marks[n:]
	}
	if !last && !t.follows && t.ended.After(upTo) { // until the store says that it was long enough ago
		t.follows = true
		time.AfterFunc(crashEvidence, t.again)
	}
	t.shrink()
	return nil
}

// marking is a batch of writes, each with its execution and the mark that this one has then.
type marking struct {
	batch []store.Write
	of    []*known
	marks []byte
}

func (m *marking) add(k *known, mark byte, w store.Write) {
	m.batch, m.of, m.marks = append(m.batch, w), append(m.of, k), append(m.marks, mark)
}

// changed takes the pending executions and says what is to be written of them, up to when: now, or the begin of an
// outcome's recording, whose execution stays pending.
func (t *groups) changed(now time.Time) (m marking, upTo time.Time) {
	upTo = now
	for i := range t.shards {
		s := &t.shards[i]
		s.Lock()
		pending := s.pending
		s.pending = nil
		for _, k := range pending {
			k.pending = false
			t.ended = slices.MaxFunc([]time.Time{t.ended, now, k.settled}, time.Time.Compare)
			if k.settling.IsZero() {
				t.change(s, k, now, &m)
				continue
			}
			upTo = slices.MinFunc([]time.Time{upTo, k.settling}, time.Time.Compare)
			t.pend(s, k)
		}
		s.Unlock()
	}
	return m, upTo
}

// change adds what is to be written of an execution.
func (t *groups) change(s *groupShard, k *known, now time.Time, m *marking) {
	done := true
	if k.state == StateCompleted {
		for _, key := range k.aliases {
			m.add(k, k.mark, store.Write{Key: aliasKey(key), Value: k.key[:], Expires: k.expires})
		}
		s.unalias(k)
		done, k.aliases = len(k.aliases) == 0, nil
	}
	switch mark := k.wanted(); {
	case k.forgotten:
		m.add(k, k.mark, store.Write{Key: appendRowKey(nil, k.group, k.key), Delete: true})
	case mark != k.mark:
		m.add(k, mark, k.row(t.g.boot, mark, now))
	case done:
		t.note(s, k)
	}
}

// unmarked has marks written again that could not be.
func (t *groups) unmarked(all []*known, err error) error {
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

// marked notes which marks are in the store.
func (t *groups) marked(all []*known, marks []byte) {
	for i, k := range all {
		s := t.shard(k.group)
		s.Lock()
		k.mark = marks[i]
		t.note(s, k)
		s.Unlock()
	}
}

// DropPending drops the outcomes that the store has not taken: recovery finds their calls in doubt. It is called before
// what makes their batches is closed; Close does so, too.
func (g *Guard) DropPending() { g.pending.end() }

// Close writes what is still to be noted of calls without a key. It is called once, before the store
// is closed.
func (g *Guard) Close(ctx context.Context) error {
	g.members.stop()
	g.pending.end()
	return g.groups.flush(ctx, true)
}

const (
	markEvery     = time.Second     // how late marks may be written
	crashEvidence = 2 * time.Second // for what ended so long before a crash, it is evidence
)

// open begins a table over what earlier processes have left.
func (t *groups) open(g *Guard) {
	t.flushing = make(turn, 1)
	t.g, t.room, t.hashes.seed = g, mostKnown, maphash.MakeSeed()
	if t.shared() || g.fresh { // members are asked, and of a new store memory has everything
		return
	}
	now := time.Now()
	for i := range t.shards {
		t.shards[i].since = now
	}
}

// earlier says of which groups an earlier process has left rows.
type earlier struct {
	groups []uint64 // the beginnings of their hashes, in order
	upTo   uint64   // the last one that was looked at; above it any may have some
}

// mostEarlier bounds the rows that are looked at.
const mostEarlier = 1 << 16

func beginning(group groupHash) uint64 { return binary.BigEndian.Uint64(group[:]) }

// has reports that there may be rows of a group.
func (e *earlier) has(group groupHash) bool {
	at := beginning(group)
	if at > e.upTo {
		return true
	}
	_, found := slices.BinarySearch(e.groups, at)
	return found
}

// survey finds of which groups there are rows, once those of what an earlier process has left open are
// written. Others are not looked for in the store. Where it cannot be read, all are.
func (t *groups) survey(ctx context.Context) {
	r := store.Prefix([]byte{spaceGroup})
	r.Limit = mostEarlier
	var e earlier
	n := 0
	for entry, err := range t.g.store.Scan(ctx, r) {
		if err != nil || len(entry.Key) != 1+len(groupHash{})+keySize {
			return
		}
		n++
		if at := beginning(groupHash(entry.Key[1:])); len(e.groups) == 0 || e.groups[len(e.groups)-1] != at {
			e.groups = append(e.groups, at)
			e.upTo = at
		}
	}
	if n < mostEarlier {
		e.upTo = math.MaxUint64
	}
	t.earlier = e
}

// recovered notes a doubt of an earlier process that the store had no room for.
func (t *groups) recovered(key Key, r *Record) {
	t.found(key, r, known{state: StateInDoubt, unrecorded: true})
}

// recorded notes that a doubt is recorded which was known here only.
func (t *groups) recorded(key Key, r *Record) {
	s := t.shard(r.Group)
	s.Lock()
	defer s.Unlock()
	if k := s.keys[member{r.Group, key}]; k != nil && k.state == StateInDoubt {
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
	k.key, k.id, k.group, k.window, k.count = key, r.ID, r.Group, r.Window, r.Count
	k.began, k.ended = now, now
	t.add(s, &k)
}

// rowSize is the size of the key and the value of a row.
const rowSize = 1 + len(groupHash{}) + keySize + 1 + binary.MaxVarintLen64 + 8

func appendRowKey(b []byte, group groupHash, key Key) []byte {
	return append(append(append(b, spaceGroup), group[:]...), key[:]...)
}

// aliasKey is the name of the entry that says which execution a key stands for.
func aliasKey(key Key) []byte { return append([]byte{spaceAlias}, key[:]...) }

func appendRow(b []byte, mark byte, count int, settled time.Time) []byte {
	return appendTime(binary.AppendUvarint(append(b, mark), uint64(count)), settled)
}

// row is written where the mark of an execution changes, by the member with this boot.
func (k *known) row(boot string, mark byte, now time.Time) store.Write {
	if k.held {
		return heldBy(boot, k.group, k.key, mark, now.Add(k.window+groupKept+time.Hour))
	}
	if k.settled.IsZero() { // the store had no clock then
		k.settled = now
	}
	w := store.Write{
		Key: appendRowKey(nil, k.group, k.key), Value: appendRow(nil, mark, k.count, k.settled),
		Expires: k.settled.Add(k.window),
	}
	if mark == markUnanswered {
		w.Expires = now.Add(k.window) // from the leave of the client
	}
	return w
}

// read returns what the store knows of a group and memory does not.
func (t *groups) read(ctx context.Context, group groupHash, window time.Duration) (all []*known, err error) {
	now, err := t.g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	here := time.Now()
	s := t.shard(group)
	for entry, err := range t.g.store.Scan(ctx, store.Prefix(append([]byte{spaceGroup}, group[:]...))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		k, err := decodeRow(entry)
		if err != nil {
			return nil, unreadable(err)
		}
		s.Lock()
		listed := s.keys[member{group, k.key}] != nil
		s.Unlock()
		if listed {
			continue
		}
		k.group, k.window = group, window
		k.began = here.Add(k.settled.Sub(now))
		k.ended = here.Add(entry.Expires.Sub(now) - window)
		all = append(all, k)
	}
	all = slices.DeleteFunc(all, func(k *known) bool {
		if k.released || err != nil {
			return false
		}
		var record *Record
		if record, _, err = t.g.load(ctx, k.key); record == nil {
			return true
		}
		k.id = record.ID
		err = t.describe(ctx, k, record)
		return false
	})
	return all, err
}

// describe completes what a row says by the record.
func (t *groups) describe(ctx context.Context, k *known, record *Record) error {
	k.state, k.expires, k.boot = StateCompleted, record.expires(), record.Boot
	if record.State == StateInDoubt || record.State.open() {
		k.state = StateInDoubt
	}
	k.elsewhere = record.State == StateInDoubt && record.Cause == CauseElsewhere
	k.retriable, k.internal = record.State == StateCompleted && clientsRetry(record.Status), record.Internal
	if !k.expires.IsZero() {
		k.window = min(k.window, record.KeepKey)
	}
	if k.mark == markNone && record.Boot != t.g.boot && record.Cause != CauseElsewhere { // else its client looks there
		var err error
		if k.crashed, err = t.unwritten(ctx, record.Boot, k.settled); err != nil {
			return err
		}
	}
	k.unanswered = k.mark == markUnanswered || k.crashed
	return nil
}

func decodeRow(entry store.Entry) (*known, error) {
	if len(entry.Value) < 2 {
		return nil, errEncoding
	}
	count, n := binary.Uvarint(entry.Value[1:])
	if n <= 0 || len(entry.Value) != 1+n+8 {
		return nil, errEncoding
	}
	k := &known{key: keyIn(entry.Key), count: int(min(count, mostCount)), mark: entry.Value[0]}
	k.settled = time.Unix(0, int64(binary.BigEndian.Uint64(entry.Value[1+n:])))
	k.released = k.mark == markReleased
	return k, nil
}
