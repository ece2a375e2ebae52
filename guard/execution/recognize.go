package execution

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Retries of calls without a key, or with a new one that is advisory, are recognised by evidence
// (ADR 0070).

// Question asks whether a call is a retry.
type Question struct {
	// Scope and Fingerprint are those of the call if it is a new one. Scope.ID is of no account for
	// what it equals, and Peer tells callers without a credential apart.
	Scope       Scope
	Fingerprint Fingerprint
	// Whole is the fingerprint with all that equal calls have in common where they have no key.
	Whole Fingerprint
	Peer  string
	// Given says that the caller has named the effect by Scope.ID. It is not asked further where that
	// is known. Otherwise NewID makes the id of a new call; it is called under a lock.
	Given bool
	NewID func() string
	// Count is the number that the call gives itself as a retry, from 1 on; 0 where it gives none. All
	// above 63 are one.
	Count int
	// Window is how long after its end an execution is recognised.
	Window time.Duration
	// ErrorWindow is how long after its end an answer that clients retry is evidence. Default: Window.
	ErrorWindow time.Duration
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
	given    bool
	own      Key // that the caller has given
	group    groupHash
	window   time.Duration
	errors   time.Duration // ErrorWindow
	count    int
	known    *known
	refused  *known // the refusal that it is the retry of, which is not in the table meanwhile; nil without one
	was      *known // what its execution was before it was taken; nil where nobody else may take it
	gone     context.Context
	unwatch  func() bool // ends the wait for the leave of its client; nil where nobody has asked for it
	answered bool

	until time.Time     // when it has waited long enough for the leave of others; zero before it waits
	woken chan struct{} // where it need not wait
}

func (a *Attempt) waits() bool { return !a.answered && a.gone.Err() == nil }

// left notes that the client has left.
func (a *Attempt) left() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.changed(s)
}

// changed has those that wait here and at other members learn what has become of the attempt.
func (a *Attempt) changed(s *groupShard) {
	a.known.changed()
	if a.at.shared() && a.known.holder == a {
		a.at.note(s, a.known)
	}
}

// watch has the group learn when the client of its youngest attempt leaves. Those before it have been
// asked for when that came: nobody pays for it whose call has no equal.
func (g *group) watch() {
	a := g.unwatched
	if a == nil {
		return
	}
	g.unwatched = nil
	if a.gone.Err() == nil {
		a.unwatch = context.AfterFunc(a.gone, a.left)
	}
	a.known.changed()
}

// retryWait is how long an equal call waits for the news that the first one's client has left.
const retryWait = 30 * time.Millisecond

// view is what is read of the store while the shard of a group is not locked. It is read again if something
// was forgotten meanwhile.
type view struct {
	asked    bool // the store
	removals uint64
	rows     []row
	named    *known        // by the call's key
	alias    store.Version // of what the key stood for
	unread   error         // why the store could not say

	takes bool // an execution that may be known at other members
}

// decision says how Recognize goes on.
type decision int

const (
	decided decision = iota
	askStore
	awaitNews
)

// Recognize decides whether a call is a retry, and registers it. End must follow. That a given key
// stands for another execution is durable then. The error is ErrStore, or that of ctx.
func (g *Guard) Recognize(ctx context.Context, q Question) (*Attempt, error) {
	t := &g.groups
	a := &Attempt{
		at: t, given: q.Given, group: groupOf(g.sealer, &q), window: q.Window, errors: cmp.Or(q.ErrorWindow, q.Window),
		count: min(q.Count, mostCount), gone: q.Gone,
	}
	if q.Given {
		a.own = g.Key(q.Scope)
	}
	v := view{asked: q.Given || t.shared()}
	for { // else memory may say all
		if v.asked {
			v = t.view(ctx, a, &q)
		}
		switch t.decide(a, &q, &v) {
		case askStore:
			v.asked = true
			continue
		case awaitNews:
			if err := a.await(ctx); err != nil {
				return nil, err
			}
			continue
		}
		if v.unread != nil && a.Evidence == "" { // what memory knows holds without the store
			a.End()
			return nil, v.unread
		}
		err := t.take(ctx, a, &v)
		if err == nil {
			return a, nil
		}
		t.giveUp(a)
		if !errors.As(err, new(*store.Conflict)) {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		} // another call, or another member, was first
	}
}

// view reads what decide needs of the store.
func (t *groups) view(ctx context.Context, a *Attempt, q *Question) view {
	v := view{asked: true}
	s := t.shard(a.group)
	s.Lock()
	v.removals = s.removals
	s.Unlock()
	if v.rows, v.unread = t.read(ctx, a.group, a.window); v.unread == nil && a.given {
		v.unread = t.named(ctx, a, q, &v)
	}
	return v
}

// named finds the execution that the call's key stands for: its own, or the one that it was recognised as. Where that
// is not in the call's group, or its window is over, the record alone decides.
func (t *groups) named(ctx context.Context, a *Attempt, q *Question, v *view) error {
	key := a.own
	record, _, err := t.g.load(ctx, key)
	if err == nil && record == nil {
		entry, lost := t.g.store.Get(ctx, aliasKey(a.own))
		switch {
		case errors.Is(lost, store.ErrNotFound):
			return nil
		case lost != nil:
			return fmt.Errorf("%w: %w", ErrStore, lost)
		case len(entry.Value) != keySize:
			return unreadable(errEncoding)
		}
		key, v.alias = Key(entry.Value), entry.Version
		record, _, err = t.g.load(ctx, key)
	}
	if err != nil || record == nil { // what has expired, or was released, is not known
		return err
	}
	v.named = &known{member: member{a.group, key}, id: record.ID, window: a.window, count: a.count}
	if key == a.own {
		v.named.id = q.Scope.ID // whole
	}
	return nil
}

// take makes durable what the attempt has taken: that it is the one retry over all members which has taken its
// execution, and what its key stands for. The error is a *store.Conflict if another call was first.
func (t *groups) take(ctx context.Context, a *Attempt, v *view) error {
	stands := a.given && a.Key != a.own && v.named == nil
	if !stands && !v.takes {
		return nil
	}
	now, err := t.g.store.Now(ctx)
	if err != nil {
		return err
	}
	s := t.shard(a.group)
	s.Lock()
	k := a.known
	var batch []store.Write
	if stands {
		alias := store.Write{Key: aliasKey(a.own), If: store.Absent(), Value: a.Key[:]}
		if v.alias != 0 {
			alias.If = store.VersionIs(v.alias)
		}
		if k.state == StateCompleted {
			alias.Expires = k.expires
		}
		batch = append(batch, alias, store.Write{Key: recordKey(a.own), If: store.Absent(), Delete: true})
	}
	if v.takes {
		w := k.row(t.g.boot, markHeld, now)
		w.If, w.Expires = store.Absent(), now.Add(a.window+groupKept)
		for _, r := range v.rows {
			if r.key == a.Key {
				w.If = store.VersionIs(r.version)
				if r.until.After(w.Expires) {
					w.Expires = r.until
				}
			}
		}
		batch = append(batch, w)
	}
	s.Unlock()
	if _, err := t.g.store.Commit(ctx, batch...); err != nil {
		return err
	}
	s.Lock()
	defer s.Unlock()
	s.removals++ // whoever has read before has not seen it
	if v.takes {
		k.mark = markHeld
		t.note(s, k)
	}
	return nil
}

// giveUp has an attempt not have taken its execution.
func (t *groups) giveUp(a *Attempt) {
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.unwatches()
	if k := a.known; k.holder == a && k.in != nil {
		was := a.was
		k.holder, k.count, k.began = was.holder, was.count, was.began
		k.unanswered, k.retriable = was.unanswered, was.retriable
		t.leaves(s, k)
	}
	a.Evidence, a.unwatch = "", nil
}

// decide registers a as a retry or as a new call, unless it needs more for that.
func (t *groups) decide(a *Attempt, q *Question, v *view) decision {
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	g := s.of[a.group]
	if v.asked && s.removals != v.removals || !v.asked && s.unlisted(g, a.window, a.count, now) {
		return askStore
	}
	if g != nil {
		g.watch()
	}
	all := t.list(s, a, v, now)
	g = s.group(a.group)
	defer s.tidy(a.group, g)
	if k := a.standsFor(all, v.named); k != nil {
		if k == v.named {
			k.holder, a.known = a, k
		} else {
			v.takes = t.hold(s, a, k, now)
		}
		if a.ID, a.Key = k.id, k.key; a.Key != a.own {
			a.Evidence = EvidenceKey
		}
		return decided
	}
	k := choose(all, a)
	if k == nil && awaited(all) && (a.until.IsZero() || now.Before(a.until)) {
		if a.until.IsZero() {
			a.until, a.woken = now.Add(retryWait), make(chan struct{}, 1)
		}
		g.waiting = append(g.waiting, a)
		return awaitNews
	}
	if k != nil && k.refused() {
		t.takes(s, a, k)
		k = nil
	}
	if k == nil {
		if a.ID, a.Key = q.Scope.ID, a.own; !a.given && a.refused != nil && a.refused.state == stateAsked {
			a.ID, a.Key = a.refused.id, a.refused.key
		} else if !a.given {
			q.Scope.ID = q.NewID()
			a.ID, a.Key = q.Scope.ID, t.g.Key(q.Scope)
		}
		if own := s.keys[member{a.group, a.Key}]; own != nil && a.refused == nil { // its own key was refused
			t.takes(s, a, own)
		}
		k = &known{member: member{a.group, a.Key}, id: a.ID, window: a.window, count: a.count}
		t.hold(s, a, k, now)
	} else {
		if a.Evidence, a.ID, a.Key = k.evidence(), k.id, k.key; a.Evidence == "" {
			a.Evidence = EvidenceStated
		}
		v.takes = t.hold(s, a, k, now)
		if k = a.known; a.given && a.Key != a.own && (k.state != StateCompleted || k.expires.IsZero()) {
			k.aliases = append(k.aliases, a.own)
		}
	}
	g.pass()
	return decided
}

// list returns the executions that a call may be a retry of. Rows that memory has not are added to it, but for a store
// that is shared: there the member that holds an execution knows it, and memory has those which this member holds.
func (t *groups) list(s *groupShard, a *Attempt, v *view, now time.Time) (all []*known) {
	g := s.of[a.group]
	if v.asked && v.unread == nil && !t.shared() {
		g = s.group(a.group)
		g.read = true
		for _, r := range v.rows {
			deleted := func(k *known) bool { return k.forgotten && k.member == r.member } // soon
			if s.keys[r.member] == nil && r.state != 0 && !slices.ContainsFunc(s.pending, deleted) {
				t.add(s, r.known)
			}
		}
	}
	if g != nil {
		t.expire(s, g, now, a.errors)
		all = g.listed
	}
	if !t.shared() {
		return all
	}
	all = slices.DeleteFunc(slices.Clone(all), func(k *known) bool {
		i := slices.IndexFunc(v.rows, func(r row) bool { return r.key == k.key })
		if i < 0 {
			return k.foreign
		}
		return !v.rows[i].mine
	})
	for _, r := range v.rows {
		if r.state != 0 && !(r.mine && s.keys[r.member] != nil) && !r.over(now) {
			r.stale(now, a.errors)
			all = append(all, r.known)
		}
	}
	return all
}

// takes has the attempt be the retry of a refusal.
func (t *groups) takes(s *groupShard, a *Attempt, k *known) {
	if own := s.keys[k.member]; own != nil {
		k = own
		t.drop(s, k)
	}
	a.refused = k
}

// standsFor returns the execution that the call's key is known to stand for; nil for a new key.
func (a *Attempt) standsFor(all []*known, named *known) *known {
	if !a.given {
		return nil
	}
	key := a.own
	if named != nil {
		key = named.key
	}
	for _, k := range all {
		switch {
		case k.key == key && k.refused():
			return nil // it was refused since named was read
		case k.key == key, named == nil && !k.refused() && slices.Contains(k.aliases, key):
			return k
		}
	}
	return named
}

// hold has the attempt wait for the answer of k. takes says that other members have to agree.
func (t *groups) hold(s *groupShard, a *Attempt, k *known, now time.Time) (takes bool) {
	if own := s.keys[k.member]; own != nil && own != k { // another member has held it meanwhile
		own.mark, own.count = k.mark, k.count
		if own.state != StateSending {
			own.state, own.internal, own.ended, own.expires, own.foreign = k.state, k.internal, k.ended, k.expires, k.foreign
		}
		k = own
	}
	if a.given || t.shared() {
		was := *k
		a.was = &was
	}
	takes = t.shared() && k.state != StateInDoubt && k.state != stateElsewhere
	a.known = k
	k.count, k.began = max(k.count, a.count), s.begins(now)
	k.holder, k.away, k.unanswered, k.retriable = a, false, false, false
	if k.in == nil {
		t.add(s, k)
	}
	if t.shared() {
		a.unwatch = context.AfterFunc(a.gone, a.left)
	} else if k.in != nil {
		k.in.unwatched = a
		t.note(s, k)
	}
	return takes
}

// await returns when the attempt is woken, or has waited long enough; the error is ctx's.
func (a *Attempt) await(ctx context.Context) (err error) {
	timer := time.NewTimer(time.Until(a.until))
	defer timer.Stop()
	select {
	case <-a.woken:
		return nil
	case <-timer.C:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if g := s.of[a.group]; g != nil {
		if i := slices.Index(g.waiting, a); i >= 0 {
			g.waiting = slices.Delete(g.waiting, i, i+1)
		} else {
			g.pass() // it was woken as well, and may not take what there is
		}
		s.tidy(a.group, g)
	}
	return err
}

// runs notes that the attempt runs the execution. settling is zero until its outcome is about to be
// recorded: what that will say of the time is later.
func (a *Attempt) runs(settling time.Time) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	k := a.known
	if settling.IsZero() {
		if k.mark = markNone; k.in == nil { // another call with its key was refused meanwhile
			k.holder = a
			a.at.add(s, k)
		}
	}
	k.state, k.settled, k.foreign = StateSending, settling, false
	a.refused = nil
	a.changed(s)
	if !settling.IsZero() {
		a.at.pend(s, k)
	}
}

// claims completes the batch of the attempt's claim: what it is the retry of is not taken again.
func (a *Attempt) claims(batch []store.Write) []store.Write {
	if a == nil || a.refused == nil || a.refused.key == a.Key && a.at.shared() {
		return batch
	}
	return append(batch, store.Write{Key: appendRowKey(nil, a.group, a.refused.key), Delete: true})
}

// releases completes the batch by which an execution is released: a retry runs as a new call. In a shared store the
// retry that holds the execution may claim its key.
func (t *groups) releases(ctx context.Context, batch []store.Write, key Key, r *Record, now time.Time) ([]store.Write, error) {
	if r.Group == (groupHash{}) {
		return batch, nil
	}
	k := known{member: member{r.Group, key}, count: r.Count, window: r.Window, settled: now}
	ours, err := t.held(ctx, []store.Write{k.row(t.g.rowBoot(), markReleased, now)})
	return append(batch, ours...), err
}

// settled notes how the execution has ended.
func (a *Attempt) settled(o *Outcome, at time.Time, keep time.Duration, recorded bool) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.ends(s, o, at, keep, recorded)
}

// settledLate notes that the outcome of an execution is recorded after all which counted as in doubt, unless it runs
// again.
func (a *Attempt) settledLate(o *Outcome, at time.Time, keep time.Duration) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	k := a.known
	if k.state != StateInDoubt && k.state != stateElsewhere {
		return
	}
	if k.in == nil && s.keys[k.member] == nil { // it was forgotten; its row is new
		k.ended = time.Now()
		a.at.add(s, k)
	}
	a.ends(s, o, at, keep, true)
}

// ends is settled, with the shard locked.
func (a *Attempt) ends(s *groupShard, o *Outcome, at time.Time, keep time.Duration, recorded bool) {
	k := a.known
	k.settled, k.ended, k.expires = at, time.Now(), at.Add(keep)
	k.unrecorded, k.internal = !recorded, o.Internal
	if !a.at.shared() {
		k.mark = markNone // the outcome has its row written anew
	}
	switch {
	case o.Verdict == Released:
		k.state, k.mark = stateReleased, markReleased
	case o.Verdict == InDoubt && o.Cause == CauseElsewhere:
		k.state = stateElsewhere
	case o.Verdict == InDoubt:
		k.state = StateInDoubt
	default:
		k.state = StateCompleted
		k.window = min(k.window, keep) // a retry could not find more
	}
	k.forgotten = k.in == nil // its group has no room for it
	k.changed()
	a.at.pend(s, k)
}

// Completed notes that the execution has a result: a doubt was settled meanwhile.
func (a *Attempt) Completed() {
	t, k := a.at, a.known
	s := t.shard(a.group)
	s.Lock()
	settled := k.state == StateInDoubt || k.state == stateElsewhere
	if settled {
		if k.state == StateInDoubt { // as Guard.put has marked it
			k.mark = markUnanswered
		}
		k.state, k.unrecorded = StateCompleted, false
		k.changed()
	}
	s.Unlock()
	if settled && t.shared() {
		v := view{takes: true}
		v.rows, _ = t.read(context.Background(), a.group, a.window)
		_ = t.take(context.Background(), a, &v) // else another retry has taken it
	}
}

// Answering notes that the end of the answer is about to be written: the client is answered,
// unless it has left. Status is that of the answer. elsewhere says that it gets the answer on another
// connection than that of the call, which is there.
func (a *Attempt) Answering(status int, elsewhere bool) {
	s := a.at.shard(a.group)
	s.Lock()
	mark := a.known.mark
	if a.answered = elsewhere || a.gone.Err() == nil; a.known.holder != a || !a.answered {
		mark = markNone
	}
	if a.known.holder == a {
		a.known.retriable = clientsRetry(status)
	}
	a.changed(s)
	s.Unlock()
	a.at.publish(mark)
}

// Unanswered takes Answering back: the write has failed, or the client says that it does not wait.
func (a *Attempt) Unanswered() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.answered = false
	a.changed(s)
}

// WaitsElsewhere notes that the client may get the answer on another stream than that of the call, until gone ends.
func (a *Attempt) WaitsElsewhere(gone context.Context) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if a.unwatch != nil {
		a.unwatch()
	}
	a.gone, a.unwatch = gone, context.AfterFunc(gone, a.left)
	a.changed(s)
}

// Asked notes that people are asked about the call, which is not claimed then: for that long after its end, or
// for its window, an equal call without a key takes its id (ADR 0122). A given key names the call itself.
func (a *Attempt) Asked(keep time.Duration) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if k := a.known; !a.given && k.holder == a && k.state == 0 && k.in != nil {
		k.state, k.window = stateAsked, max(k.window, keep)
	}
}

// End ends the attempt. What it ran must be settled before.
func (a *Attempt) End() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.unwatches()
	k := a.known
	if k.holder == a {
		k.holder, k.unanswered = nil, !a.answered
		if k.ended.IsZero() || k.unanswered && k.state != StateInDoubt && k.state != stateElsewhere {
			k.ended = time.Now()
		}
		a.at.leaves(s, k)
	}
	// a was refused before it could run, and is not asked about in the place of the refusal.
	if r := a.refused; r != nil && !(k.state == stateAsked && k.key == r.key) && !r.foreign && s.keys[r.member] == nil {
		a.at.add(s, r)
		r.changed()
	}
	a.refused = nil
}

// unwatches ends the wait for the leave of the client.
func (a *Attempt) unwatches() {
	if a.unwatch != nil {
		a.unwatch()
	}
	if g := a.known.in; g != nil && g.unwatched == a {
		g.unwatched = nil // its request is not kept for it
	}
}

// leaves notes that an attempt does not hold the execution any more. What another member runs is known by its row.
func (t *groups) leaves(s *groupShard, k *known) {
	if k.state == 0 { // it was never claimed
		t.remove(s, k)
		return
	}
	k.changed()
	t.note(s, k)
	if k.foreign && k.holder == nil {
		t.remove(s, k)
	}
}

// Reader is the caller of an execution who asks for its answer by another request than a call (ADR 0091).
// Where no client of a call waits for it, the answer is that to the call.
type Reader struct {
	at   *groups
	of   member
	gone context.Context
	read *known    // that was answered so; nil before
	turn time.Time // when its attempt began
}

// Reader returns the reader of an execution that equal calls are recognised as, whose client leaves when
// ctx ends; nil for any other execution, and where what is known of it cannot be read: then its client
// counts as not answered, as before.
func (g *Guard) Reader(ctx context.Context, e *Recorded) *Reader {
	t, r := &g.groups, e.Record
	if r.Group == (groupHash{}) {
		return nil
	}
	a := &Attempt{group: r.Group, window: r.Window, errors: r.Window}
	s := t.shard(a.group)
	for v := (view{}); ; v = t.view(ctx, a, nil) {
		s.Lock()
		now := time.Now()
		unread := !v.asked && s.unlisted(s.of[a.group], a.window, 0, now)
		if !unread && v.asked && s.removals == v.removals {
			t.list(s, a, &v, now)
			s.tidy(a.group, s.group(a.group))
		}
		unread = unread || v.asked && s.removals != v.removals
		s.Unlock()
		switch {
		case v.unread != nil:
			return nil
		case !unread:
			return &Reader{at: t, of: member{r.Group, e.Key}, gone: ctx}
		}
	}
}

// Answering notes that the end of the answer with this status is about to be written.
func (r *Reader) Answering(status int, _ bool) {
	s := r.at.shard(r.of.group)
	s.Lock()
	k, mark := s.keys[r.of], byte(markNone)
	if k != nil && r.gone.Err() == nil && !(k.holder != nil && k.holder.waits()) {
		r.read, r.turn, mark = k, k.began, k.mark
		k.holder, k.unanswered, k.retriable = nil, false, clientsRetry(status)
		k.changed()
		r.at.note(s, k)
	}
	s.Unlock()
	r.at.publish(mark)
}

// Unanswered takes Answering back.
func (r *Reader) Unanswered() {
	s := r.at.shard(r.of.group)
	s.Lock()
	defer s.Unlock()
	if k := r.read; k != nil && k.began.Equal(r.turn) {
		k.unanswered = true
		k.changed()
		r.at.note(s, k)
	}
}
