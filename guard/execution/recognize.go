package execution

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Retries of calls without a key, or with a new one that is advisory, are recognised by evidence
// (ADR 0070).

// groupHash is the keyed hash of what equal calls of one caller have in common.
type groupHash [16]byte

// Question asks whether a call is a retry.
type Question struct {
	// Scope and Fingerprint are those of the call if it is a new one. Scope.ID is of no account for
	// what it equals, and Peer tells callers without a credential apart.
	Scope       Scope
	Fingerprint Fingerprint
	Peer        string
	// Given says that the caller has named the effect by Scope.ID. It is not asked further where that
	// is known.
	Given bool
	// Count is the number that the call gives itself as a retry, from 1 on; 0 where it gives none.
	Count int
	// Window is how long after its end an execution is recognised.
	Window time.Duration
	// Gone ends when the client of the call leaves.
	Gone context.Context
}

// Evidence says why a call counts as a retry.
type Evidence string

// The kinds of evidence.
const (
	// EvidenceUnanswered: the earlier attempt's client has left, or did not get the whole answer.
	EvidenceUnanswered Evidence = "unanswered"
	// EvidenceInDoubt: the execution is in doubt.
	EvidenceInDoubt Evidence = "in_doubt"
	// EvidenceAnswer: the earlier attempt's answer was one that clients retry.
	EvidenceAnswer Evidence = "answer"
	// EvidenceStated: the call says that it is a retry.
	EvidenceStated Evidence = "stated"
	// EvidenceKey: a call with the same key was recognised before.
	EvidenceKey Evidence = "key"
)

// Attempt is one call that may be a retry, from Recognize to End. It holds the execution whose
// answer it waits for.
type Attempt struct {
	// Evidence is why the call counts as a retry of the execution with ID and Key; empty for a
	// new call, whose own they are.
	Evidence Evidence
	ID       string
	Key      Key

	at       *groups
	own      *Key // that the caller has given; nil without
	group    groupHash
	window   time.Duration
	count    int
	known    *known
	refused  *known // the refusal that it is the retry of; nil without one
	gone     context.Context
	answered bool
}

func (a *Attempt) waits() bool { return !a.answered && a.gone.Err() == nil }

// known is an execution that a retry may be recognised as.
type known struct {
	key    Key
	id     string
	group  groupHash
	window time.Duration
	began  time.Time // the youngest attempt
	order  uint64    // of those that began at the same time
	count  int       // of its youngest attempt
	holder *Attempt  // the attempt that waits for its answer
	runner *Attempt  // the attempt that runs it

	state      State // StateSending until it has ended, 0 before it was claimed
	released   bool
	unanswered bool // the last attempt has ended without a whole answer
	retriable  bool // the last attempt's answer was one that clients retry
	ended      time.Time
	taken      bool      // by the retry of the refused attempt
	unrecorded bool      // that it is in doubt is known here only
	settling   time.Time // by the store's clock; while its outcome is being recorded
	settled    time.Time // by the store's clock
	mark       byte      // in its row
	crashed    bool      // its process has ended before it could write a mark
	pending    bool      // in the list of its shard
	expires    time.Time // of its record; zero where that is not known
	aliases    []Key     // that stand for it, and do not expire yet
	forgotten  bool      // its row is to be deleted
}

// The marks of a row.
const (
	markNone       = 0
	markUnanswered = 'u'
	markReleased   = 'r'
	markAnswered   = 'a' // after it was not, or a crash has left that open
)

// refused reports that a retry runs as a new call. One that is attached still may run it itself.
func (k *known) refused() bool { return k.released && (k.holder == nil || k.holder.answered) }

// evidence is what the execution has to say for a retry; empty without any.
func (k *known) evidence() Evidence {
	switch {
	case k.refused():
		return ""
	case k.state == StateInDoubt:
		return EvidenceInDoubt
	case k.holder != nil && !k.holder.answered && k.holder.gone.Err() != nil, k.holder == nil && k.unanswered:
		return EvidenceUnanswered
	case k.retriable && (k.holder == nil || k.holder.answered):
		return EvidenceAnswer
	}
	return ""
}

func (k *known) younger(than *known) bool {
	if c := k.began.Compare(than.began); c != 0 {
		return c > 0
	}
	return k.order > than.order
}

func (k *known) over(now time.Time) bool {
	return k.holder == nil && k.runner == nil && now.Sub(k.ended) >= k.window
}

// choose returns the execution that a call with this count is a retry of; nil for a new call. A
// refused one makes it a new call too.
func choose(all []*known, count int, now time.Time) (*known, Evidence) {
	var best *known
	var why Evidence
	rank := -1
	var youngest *known // that may have been executed, and that nobody waits for
	for _, k := range all {
		if !k.refused() && (k.holder == nil || !k.holder.waits()) && !k.over(now) && (youngest == nil || k.younger(youngest)) {
			youngest = k
		}
	}
	for _, k := range all {
		e := k.evidence()
		free := k.holder == nil || !k.holder.waits() || k.state == StateInDoubt || k.count < count
		if k.over(now) || !free || k.taken || count == 0 && e == "" {
			continue
		}
		r := 0
		if count > 0 && k.count == count-1 {
			r += 4
		}
		if e != "" || k.refused() && (youngest == nil || k.younger(youngest)) {
			r += 2
		}
		if k.state != StateInDoubt {
			r++
		}
		if r > rank || r == rank && k.younger(best) {
			best, why, rank = k, e, r
		}
	}
	if best != nil && why == "" {
		why = EvidenceStated
	}
	return best, why
}

const (
	// retryWait is how long an equal call waits for the news that the first one's client has left.
	retryWait = 30 * time.Millisecond
	// markEvery is how late marks may be written.
	markEvery = time.Second
	// mostKnown bounds what is kept in memory; beyond it the store is scanned.
	mostKnown = 1 << 16
	// mostWatched bounds the clients whose leave one call waits for.
	mostWatched = 16
	// mostCrashes bounds the crashes that are remembered.
	mostCrashes = 64
	// mostRefused bounds the refusals of one group.
	mostRefused = 64
)

// groups is the table of the executions that retries may be recognised as.
type groups struct {
	g        *Guard
	shards   [64]groupShard
	n        atomic.Int64
	order    atomic.Uint64
	since    atomic.Pointer[time.Time] // memory has everything that began later
	crashes  []crash                   // of earlier processes
	armed    atomic.Bool
	flushing sync.Mutex
	closed   bool
}

type groupShard struct {
	sync.Mutex
	of       map[groupHash][]*known
	removals [64]uint64 // by group
	pending  []*known   // whose marks may have to change, or that are being settled
}

// crash is the time between the last writing of marks by a process and the start of the next one.
type crash struct{ from, to time.Time }

// view is what is known of a group before its shard is locked. It is read again if something was
// forgotten meanwhile.
type view struct {
	asks     bool // the store
	since    *time.Time
	removals uint64
	stored   []*known
	named    *known        // by the call's key
	alias    store.Version // of what the key stood for
}

func (s *groupShard) removed(group groupHash) *uint64 { return &s.removals[group[1]%64] }

func (t *groups) shard(group groupHash) *groupShard { return &t.shards[group[0]%64] }

// Recognize decides whether a call is a retry, and registers it. End must follow. That a given key
// stands for another execution is durable then. The error is ErrStore, or that of ctx.
func (g *Guard) Recognize(ctx context.Context, q Question) (*Attempt, error) {
	t := &g.groups
	s := q.Scope
	sum := g.sealer.Index("group", s.Caller, s.Guard, s.Method, s.Path, q.Peer, string(q.Fingerprint[:]))
	group := groupHash(sum[:])
	own := g.Key(s)
	a := &Attempt{ID: s.ID, Key: own, at: t, group: group, window: q.Window, count: q.Count, gone: q.Gone}
	if q.Given {
		a.own = &own
	}
	var until time.Time // of the wait for the leave of others
	for {
		v, unread, err := t.view(ctx, a, q.Fingerprint)
		if err != nil {
			return nil, err
		}
		waited := !until.IsZero() && !time.Now().Before(until)
		waiting, again := t.decide(a, v, waited)
		switch {
		case again:
			continue
		case waiting == nil && unread != nil && a.Evidence == "": // what memory knows holds without the store
			a.End()
			return nil, unread
		case waiting == nil:
			if a.own == nil || a.Key == own || v.named != nil {
				return a, nil
			}
			err := t.stand(ctx, a, v)
			if err == nil {
				return a, nil
			}
			a.End()
			if lost := (*store.Conflict)(nil); !errors.As(err, &lost) {
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			}
			a.ID, a.Key, a.Evidence = s.ID, own, "" // another call with this key was first
			continue
		case until.IsZero():
			until = time.Now().Add(retryWait)
		}
		if err := awaitLeave(ctx, waiting, until); err != nil {
			return nil, err
		}
	}
}

// view reads what decide needs of the store. Where only the scan fails the error is unread.
func (t *groups) view(ctx context.Context, a *Attempt, fp Fingerprint) (v *view, unread, err error) {
	v = &view{since: t.since.Load()}
	s := t.shard(a.group)
	s.Lock()
	v.removals = *s.removed(a.group)
	s.Unlock()
	if a.own != nil {
		if err := t.named(ctx, a, fp, v); err != nil || v.named != nil {
			return v, nil, err
		}
	}
	if v.asks = a.count > 0 || time.Since(*v.since) < a.window; v.asks {
		v.stored, unread = t.read(ctx, a.group, a.window)
	}
	return v, unread, nil
}

// named finds the execution that the call's key stands for: its own, or the one that it was
// recognised as. That of another content has no state: the call is refused by its record.
func (t *groups) named(ctx context.Context, a *Attempt, fp Fingerprint, v *view) error {
	k := &known{key: *a.own, id: a.ID, group: a.group, window: a.window, count: a.count}
	record, _, err := t.g.load(ctx, k.key)
	if err == nil && record == nil {
		entry, lost := t.g.store.Get(ctx, aliasKey(*a.own))
		switch {
		case errors.Is(lost, store.ErrNotFound):
			return nil
		case lost != nil:
			return fmt.Errorf("%w: %w", ErrStore, lost)
		case len(entry.Value) != keySize:
			return unreadable(errEncoding)
		}
		k.key, v.alias = Key(entry.Value), entry.Version
		record, _, err = t.g.load(ctx, k.key)
	}
	if err != nil || record == nil { // what has expired, or was released, is not known
		return err
	}
	if k.key != *a.own {
		k.id = record.ID
	}
	v.named = k
	if record.Fingerprint != fp {
		return nil
	}
	now, err := t.g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	entry, err := t.g.store.Get(ctx, appendRowKey(nil, a.group, k.key))
	if err == nil {
		var row *known
		if row, err = decodeRow(entry); err != nil {
			return unreadable(err)
		}
		k.mark, k.settled, k.count = row.mark, row.settled, row.count
		k.ended = time.Now().Add(entry.Expires.Sub(now) - a.window)
	} else if !errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	t.describe(k, record)
	if record.State.open() && t.g.flights.find(k.key) != nil {
		k.state = StateSending
	}
	return nil
}

// stand has the call's key stand for the execution that it was recognised as. The error is a
// *store.Conflict if the key has become known meanwhile.
func (t *groups) stand(ctx context.Context, a *Attempt, v *view) error {
	s := t.shard(a.group)
	s.Lock()
	key, expires := a.known.key, time.Time{}
	if a.known.state == StateCompleted {
		expires = a.known.expires
	}
	s.Unlock()
	condition := store.Absent()
	if v.alias != 0 {
		condition = store.VersionIs(v.alias)
	}
	_, err := t.g.store.Commit(ctx,
		store.Write{Key: aliasKey(*a.own), If: condition, Value: key[:], Expires: expires},
		store.Write{Key: recordKey(*a.own), If: store.Absent(), Delete: true})
	return err
}

// decide registers a as a retry or as a new call. Before it does the latter it returns the
// attempts whose clients still wait, unless the time for that is over. With again, v is too old.
func (t *groups) decide(a *Attempt, v *view, waited bool) (waiting []*Attempt, again bool) {
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if t.since.Load() != v.since || (v.asks || a.own != nil) && *s.removed(a.group) != v.removals {
		return nil, true
	}
	now := time.Now()
	all := s.of[a.group]
	if k := a.standsFor(all, v.named); k != nil {
		if k != v.named || k.state != 0 && !slices.Contains(all, k) {
			t.hold(s, a, k, now)
		} else {
			k.holder, a.known = a, k
		}
		if a.ID, a.Key = k.id, k.key; a.Key != *a.own {
			a.Evidence = EvidenceKey
		}
		return nil, false
	}
	candidates := slices.Clip(all)
	for _, k := range v.stored {
		if !slices.ContainsFunc(all, func(other *known) bool { return other.key == k.key }) {
			candidates = append(candidates, k)
		}
	}
	k, why := choose(candidates, a.count, now)
	if k == nil && !waited {
		for i := len(all) - 1; i >= 0 && len(waiting) < mostWatched; i-- {
			if h := all[i].holder; h != nil && h.waits() {
				waiting = append(waiting, h)
			}
		}
		if waiting != nil {
			return waiting, false
		}
	}
	if k != nil && k.refused() {
		if !slices.Contains(all, k) {
			t.add(s, k)
		}
		k.taken, a.refused, k = true, k, nil
	}
	if k == nil {
		for _, other := range all { // its own key was refused
			if other.key == a.Key && a.refused == nil && !other.taken {
				other.taken, a.refused = true, other
			}
		}
		k = &known{key: a.Key, id: a.ID, group: a.group, window: a.window, count: a.count}
	} else {
		a.Evidence, a.ID, a.Key = why, k.id, k.key
		if a.own != nil && a.Key != *a.own && (k.state != StateCompleted || k.expires.IsZero()) {
			k.aliases = append(k.aliases, *a.own)
		}
	}
	t.hold(s, a, k, now)
	return nil, false
}

// standsFor returns the execution that the call's key is known to stand for; nil for a new key.
func (a *Attempt) standsFor(all []*known, named *known) *known {
	if a.own == nil {
		return nil
	}
	key := *a.own
	if named != nil {
		key = named.key
	}
	for _, k := range all {
		if !k.refused() && (k.key == key || named == nil && slices.Contains(k.aliases, key)) {
			return k
		}
	}
	if slices.ContainsFunc(all, func(k *known) bool { return k.key == key }) {
		return nil // it was refused since named was read
	}
	return named
}

// hold has the attempt wait for the answer of k.
func (t *groups) hold(s *groupShard, a *Attempt, k *known, now time.Time) {
	if !slices.Contains(s.of[a.group], k) {
		t.add(s, k)
	}
	k.count, k.began, k.order = max(k.count, a.count), now, t.order.Add(1)
	k.holder, k.unanswered, k.retriable = a, false, false
	a.known = k
	t.note(s, k)
}

func (t *groups) add(s *groupShard, k *known) {
	if s.of == nil {
		s.of = map[groupHash][]*known{}
	}
	now := time.Now()
	all := slices.DeleteFunc(s.of[k.group], func(k *known) bool { return k.over(now) })
	t.n.Add(int64(len(all) - len(s.of[k.group]) + 1))
	s.of[k.group] = append(all, k)
}

func (t *groups) remove(s *groupShard, k *known) {
	all := s.of[k.group]
	i := slices.Index(all, k)
	if i < 0 {
		return
	}
	t.n.Add(-1)
	*s.removed(k.group)++
	if all = slices.Delete(all, i, i+1); len(all) == 0 {
		delete(s.of, k.group)
		return
	}
	s.of[k.group] = all
}

// awaitLeave returns when one of the clients has left, or at a time; the error is ctx's.
func awaitLeave(ctx context.Context, of []*Attempt, until time.Time) error {
	left := make(chan struct{}, len(of))
	for _, a := range of {
		defer context.AfterFunc(a.gone, func() { left <- struct{}{} })()
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-left:
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// runs notes that the attempt runs the execution. settling is zero until its outcome is about to be
// recorded: what that will say of the time is later.
func (a *Attempt) runs(settling time.Time) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	k := a.known
	if settling.IsZero() && !slices.Contains(s.of[a.group], k) { // another call with its key was refused meanwhile
		k.holder = a
		a.at.add(s, k)
	}
	k.runner, k.state, k.released, k.settling = a, StateSending, false, settling
	if a.refused != nil {
		a.at.remove(s, a.refused)
		a.refused = nil
	}
	if !settling.IsZero() {
		a.at.pend(s, k)
	}
}

// claims completes the batch of the attempt's claim: what it is the retry of is not taken again.
func (a *Attempt) claims(batch []store.Write) []store.Write {
	if a == nil || a.refused == nil {
		return batch
	}
	return append(batch, store.Write{Key: appendRowKey(nil, a.group, a.refused.key), Delete: true})
}

// settled notes how the execution has ended.
func (a *Attempt) settled(v Verdict, at time.Time, keep time.Duration, recorded bool) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	k := a.known
	k.runner, k.settling, k.settled, k.ended = nil, time.Time{}, at, time.Now()
	k.state, k.mark = StateCompleted, markNone // the outcome has its row written anew
	k.unrecorded, k.expires = !recorded, at.Add(keep)
	switch v {
	case InDoubt:
		k.state = StateInDoubt
	case Released:
		k.released, k.mark = true, markReleased
		a.at.forget(s, a.group)
	}
	a.at.pend(s, k)
}

// forget forgets the oldest refusal of a group that has too many.
func (t *groups) forget(s *groupShard, group groupHash) {
	var oldest *known
	n := 0
	for _, k := range s.of[group] {
		if !k.released {
			continue
		}
		n++
		if k.refused() && !k.taken && k.holder == nil && (oldest == nil || oldest.younger(k)) {
			oldest = k
		}
	}
	if n > mostRefused && oldest != nil {
		oldest.forgotten = true
		t.remove(s, oldest)
		t.pend(s, oldest)
	}
}

// Completed notes that the execution has a result: a doubt was settled meanwhile.
func (a *Attempt) Completed() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if k := a.known; k.runner == nil && k.state == StateInDoubt {
		k.state, k.mark, k.unrecorded = StateCompleted, markUnanswered, false // as Guard.put has marked it
	}
}

// Answering notes that the end of the answer is about to be written: the client is answered,
// unless it has left. Status is that of the answer. elsewhere says that it gets the answer on another
// connection than that of the call, which is there.
func (a *Attempt) Answering(status int, elsewhere bool) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.answered = elsewhere || a.gone.Err() == nil
	if a.known.holder == a {
		a.known.retriable = clientsRetry(status)
	}
}

// Unanswered takes Answering back: the write has failed, or the client says that it does not wait.
func (a *Attempt) Unanswered() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.answered = false
}

// End ends the attempt. What it ran must be settled before.
func (a *Attempt) End() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	k := a.known
	if a.refused != nil {
		a.refused.taken = false // a was refused before it could run
	}
	if k.holder != a {
		return
	}
	k.holder = nil
	k.unanswered = !a.answered
	if k.ended.IsZero() || k.unanswered && k.state != StateInDoubt {
		k.ended = time.Now()
	}
	if k.state == 0 && !k.released { // it was never claimed
		a.at.remove(s, k)
		return
	}
	a.at.note(s, k)
}

// note has the mark of an execution written if it is to change, and forgets an execution that has
// nothing to say any more.
func (t *groups) note(s *groupShard, k *known) {
	if k.wanted() != k.mark || k.state == StateCompleted && len(k.aliases) > 0 {
		t.pend(s, k)
		return
	}
	if k.holder == nil && k.runner == nil && !k.released && k.evidence() == "" && k.state != 0 {
		t.remove(s, k)
	}
}

// wanted is the mark that the row of an execution should have.
func (k *known) wanted() byte {
	switch {
	case k.released:
		return markReleased
	case k.state != StateCompleted || k.runner != nil:
		return k.mark
	case k.holder != nil && !k.holder.answered, k.holder == nil && k.unanswered:
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
	if !t.armed.Swap(true) {
		time.AfterFunc(markEvery, func() { _ = t.flush(context.Background()) })
	}
}

// clientsRetry reports whether clients retry a call that is answered with this status. 409 is left
// out: ours leaves the attempt unanswered.
func clientsRetry(status int) bool { return status == 408 || status == 429 || status >= 500 }

// flush writes the marks that have changed, and that all marks are written up to now.
func (t *groups) flush(ctx context.Context) error {
	t.flushing.Lock()
	defer t.flushing.Unlock()
	if t.closed {
		return nil
	}
	t.armed.Store(false)
	upTo, err := t.g.store.Now(ctx)
	if err != nil {
		if !errors.Is(err, store.ErrClosed) {
			t.arm()
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	now := upTo
	var batch []store.Write
	var open []*known
	var marks []byte
	for i := range t.shards {
		s := &t.shards[i]
		s.Lock()
		pending := s.pending
		s.pending = nil
		for _, k := range pending {
			k.pending = false
			if !k.settling.IsZero() {
				if k.settling.Before(upTo) {
					upTo = k.settling
				}
				t.pend(s, k)
				continue
			}
			write := func(w store.Write) {
				open, marks, batch = append(open, k), append(marks, k.mark), append(batch, w)
			}
			done := true
			if k.state == StateCompleted {
				for _, key := range k.aliases {
					write(store.Write{Key: aliasKey(key), Value: k.key[:], Expires: k.expires})
				}
				done, k.aliases = len(k.aliases) == 0, nil
			}
			switch mark := k.wanted(); {
			case k.forgotten:
				write(store.Write{Key: appendRowKey(nil, k.group, k.key), Delete: true})
			case mark != k.mark:
				write(k.row(mark, now))
				marks[len(marks)-1] = mark
			case done:
				t.note(s, k)
			}
		}
		s.Unlock()
	}
	for len(batch) >= store.MaxBatch && err == nil {
		n := store.MaxBatch - 1
		if _, err = t.g.store.Commit(ctx, batch[:n]...); err == nil {
			t.marked(open[:n], marks[:n])
			batch, open, marks = batch[n:], open[n:], marks[n:]
		}
	}
	if err == nil {
		value := appendTime(nil, upTo)
		for _, c := range t.crashes {
			value = appendTime(appendTime(value, c.from), c.to)
		}
		_, err = t.g.store.Commit(ctx, append(batch, store.Write{Key: metaKey(marksName), Value: value})...)
	}
	if err != nil {
		for _, k := range open {
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
	t.marked(open, marks)
	t.shrink()
	return nil
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

// shrink forgets what is too old, and where there is too much what the store knows as well.
func (t *groups) shrink() {
	if t.n.Load() <= mostKnown {
		return
	}
	now := time.Now()
	t.since.Store(&now)
	for i := range t.shards {
		s := &t.shards[i]
		s.Lock()
		for group, all := range s.of {
			kept := slices.DeleteFunc(all, func(k *known) bool {
				return k.over(now) || k.holder == nil && k.runner == nil && !k.pending && !k.taken && !k.unrecorded
			})
			t.n.Add(int64(len(kept) - len(all)))
			if s.of[group] = kept; len(kept) == 0 {
				delete(s.of, group)
			}
		}
		s.Unlock()
	}
}

// Close writes what is still to be noted of calls without a key. It is called once, before the store
// is closed.
func (g *Guard) Close(ctx context.Context) error {
	err := g.groups.flush(ctx)
	g.groups.flushing.Lock()
	defer g.groups.flushing.Unlock()
	g.groups.closed = true
	return err
}

// marksName is the name of the entry that says up to when marks are written.
const marksName = "marks"

// open reads up to when earlier processes have written their marks.
func (t *groups) open(ctx context.Context, g *Guard) error {
	t.g = g
	start := time.Now()
	t.since.Store(&start)
	entry, err := g.store.Get(ctx, metaKey(marksName))
	if errors.Is(err, store.ErrNotFound) {
		if g.node == "node-"+g.boot {
			t.since.Store(new(time.Time)) // the store is new, so memory has everything
			return nil
		}
		// Nothing was marked yet, so that nothing is known.
		entry.Value, err = appendTime(nil, time.Unix(0, 0)), nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	now, err := g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	upTo, crashes, err := decodeMarks(entry.Value)
	if err != nil {
		return unreadable(err)
	}
	if now.Before(upTo) { // the clock was set back
		now = upTo.Add(time.Minute)
	}
	t.crashes = append(crashes, crash{upTo, now})
	if n := len(t.crashes) - mostCrashes; n > 0 {
		t.crashes = t.crashes[n:]
	}
	return nil
}

// recovered notes a doubt of an earlier process that the store had no room for.
func (t *groups) recovered(key Key, r *Record) {
	if r.Group == (groupHash{}) {
		return
	}
	s := t.shard(r.Group)
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	t.add(s, &known{
		key: key, id: r.ID, group: r.Group, window: r.Window, count: r.Count, state: StateInDoubt, unrecorded: true,
		began: now, order: t.order.Add(1), ended: now,
	})
}

func decodeMarks(b []byte) (upTo time.Time, crashes []crash, err error) {
	if len(b)%16 != 8 {
		return upTo, nil, errEncoding
	}
	next := func() time.Time {
		at := time.Unix(0, int64(binary.BigEndian.Uint64(b)))
		b = b[8:]
		return at
	}
	upTo = next()
	for len(b) > 0 {
		crashes = append(crashes, crash{next(), next()})
	}
	return upTo, crashes, nil
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

// row is written where the mark of an execution changes.
func (k *known) row(mark byte, now time.Time) store.Write {
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

// read returns what the store knows of a group.
func (t *groups) read(ctx context.Context, group groupHash, window time.Duration) ([]*known, error) {
	now, err := t.g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	here := time.Now()
	var all []*known
	for entry, err := range t.g.store.Scan(ctx, store.Prefix(append([]byte{spaceGroup}, group[:]...))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		k, err := decodeRow(entry)
		if err != nil {
			return nil, unreadable(err)
		}
		k.group, k.window = group, window
		k.began = here.Add(k.settled.Sub(now))
		k.ended = here.Add(entry.Expires.Sub(now) - window)
		all = append(all, k)
	}
	return slices.DeleteFunc(all, func(k *known) bool {
		if k.released || err != nil {
			return false
		}
		var record *Record
		if record, _, err = t.g.load(ctx, k.key); record == nil {
			return true
		}
		k.id = record.ID
		t.describe(k, record)
		return false
	}), err
}

// describe completes what a row says by the record.
func (t *groups) describe(k *known, record *Record) {
	k.state, k.expires = StateCompleted, record.expires()
	if record.State == StateInDoubt || record.State.open() {
		k.state = StateInDoubt
	}
	k.retriable = record.State == StateCompleted && clientsRetry(record.Status)
	k.crashed = k.mark == markNone && record.Boot != t.g.boot && slices.ContainsFunc(t.crashes, func(c crash) bool {
		return !k.settled.Before(c.from) && !k.settled.After(c.to)
	})
	k.unanswered = k.mark == markUnanswered || k.crashed
}

func decodeRow(entry store.Entry) (*known, error) {
	if len(entry.Value) < 2 {
		return nil, errEncoding
	}
	count, n := binary.Uvarint(entry.Value[1:])
	if n <= 0 || len(entry.Value) != 1+n+8 {
		return nil, errEncoding
	}
	k := &known{key: keyIn(entry.Key), count: int(count), mark: entry.Value[0]}
	k.settled = time.Unix(0, int64(binary.BigEndian.Uint64(entry.Value[1+n:])))
	k.released = k.mark == markReleased
	return k, nil
}
