package execution

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Retries of calls without a key, or with a new one that is advisory, are recognised by evidence
// (ADR 0070).

// Question asks whether a call is a retry.
type Question struct {
	// Scope and Fingerprint are those of the call if it is a new one. Scope.ID is of no account for
	// what it equals, and Peer tells callers without a credential apart.
	Scope       Scope
	Fingerprint body.Fingerprint
	// Whole is the fingerprint with all that equal calls have in common where they have no key.
	Whole body.Fingerprint
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
	// evidenceUnanswered: the earlier attempt's client has left, or did not get the whole answer.
	evidenceUnanswered Evidence = "unanswered"
	// evidenceInDoubt: the execution is in doubt.
	evidenceInDoubt Evidence = "in_doubt"
	// evidenceAnswer: the earlier attempt's answer was one that clients retry.
	evidenceAnswer Evidence = "answer"
	// evidenceStated: the call says that it is a retry.
	evidenceStated Evidence = "stated"
	// evidenceKey: a call with the same key was recognised before.
	evidenceKey Evidence = "key"
)

// EvidenceKinds are all kinds of evidence.
var EvidenceKinds = [...]Evidence{evidenceUnanswered, evidenceInDoubt, evidenceAnswer, evidenceStated, evidenceKey}

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
	refused  *known // the refusal that it is the retry of; nil without one
	was      *known // what its execution was before it was taken, in a shared store
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
	a.known.changed()
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
	removals uint64
	named    *known        // by the call's key
	alias    store.Version // of what the key stood for

	others *others // what is known elsewhere; nil for nothing

	asked  bool // the store
	stored []*known
	unread error // why the store could not say
}

// decision says how Recognize goes on.
type decision int

const (
	decided decision = iota
	viewAnew
	askStore
	awaitNews
)

// Recognize decides whether a call is a retry, and registers it. End must follow. That a given key
// stands for another execution is durable then. The error is ErrStore, or that of ctx.
func (g *Guard) Recognize(ctx context.Context, q Question) (*Attempt, error) {
	t := &g.groups
	a := &Attempt{
		at: t, given: q.Given, group: t.hashes.of(g.sealer, &q), window: q.Window, gone: q.Gone,
		errors: cmp.Or(q.ErrorWindow, q.Window), count: min(q.Count, mostCount),
	}
	if q.Given {
		a.own = g.Key(q.Scope)
	}
	var v view
	next := viewAnew
	if !q.Given && g.members.store == nil { // then memory may say all
		next = t.decide(a, &q, &v)
	}
	for ; ; next = t.decide(a, &q, &v) {
		var err error
		switch next {
		case awaitNews:
			if err = a.await(ctx); err == nil {
				err = t.view(ctx, a, &q, &v)
			}
		case viewAnew:
			err = t.view(ctx, a, &q, &v)
		case askStore:
			v.asked = true
			v.stored, v.unread = t.read(ctx, a.group, a.window)
		default:
			if v.unread != nil && a.Evidence == "" { // what memory knows holds without the store
				a.End()
				return nil, v.unread
			}
			if g.members.store != nil && a.Evidence != "" && a.known.state != StateInDoubt {
				err = t.take(ctx, a, v.others)
			}
			if lost := (*store.Conflict)(nil); errors.As(err, &lost) { // another node was faster
				t.giveUp(a)
				a.Evidence = ""
				err = t.view(ctx, a, &q, &v)
				break
			}
			if err == nil && (!a.given || a.Key == a.own || v.named != nil) {
				return a, nil
			}
			if err == nil {
				err = t.stand(ctx, a, &v)
			}
			if err == nil {
				return a, nil
			}
			a.End()
			if lost := (*store.Conflict)(nil); !errors.As(err, &lost) {
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			}
			a.Evidence = "" // another call with this key was first
			err = t.view(ctx, a, &q, &v)
		}
		if err != nil {
			return nil, err
		}
	}
}

// view reads what decide needs before it asks for more.
func (t *groups) view(ctx context.Context, a *Attempt, q *Question, v *view) error {
	s := t.shard(a.group)
	s.Lock()
	*v = view{removals: *s.removed(a.group)}
	s.Unlock()
	if t.shared() {
		var err error
		if v.others, err = t.elsewhere(ctx, a.group, a.window); err != nil {
			return err
		}
	}
	if !a.given {
		return nil
	}
	return t.named(ctx, a, q.Scope.ID, q.Fingerprint, v)
}

// named finds the execution that the call's key stands for: its own, or the one that it was
// recognised as. That of another content has no state: the call is refused by its record.
func (t *groups) named(ctx context.Context, a *Attempt, id string, fp body.Fingerprint, v *view) error {
	k := &known{key: a.own, id: id, group: a.group, window: a.window, count: a.count}
	record, _, err := t.g.load(ctx, k.key)
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
		k.key, v.alias = Key(entry.Value), entry.Version
		record, _, err = t.g.load(ctx, k.key)
	}
	if err != nil || record == nil { // what has expired, or was released, is not known
		return err
	}
	if k.key != a.own {
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
	if err := t.describe(ctx, k, record); err != nil {
		return err
	}
	if record.State.open() {
		orphan, err := t.g.members.orphaned(ctx, record)
		if err != nil {
			return err
		}
		if t.g.flights.find(k.key) != nil || !orphan {
			k.state = StateSending
		}
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
		store.Write{Key: aliasKey(a.own), If: condition, Value: key[:], Expires: expires},
		store.Write{Key: recordKey(a.own), If: store.Absent(), Delete: true})
	return err
}

// decide registers a as a retry or as a new call, unless it needs more for that.
func (t *groups) decide(a *Attempt, q *Question, v *view) decision {
	s := t.shard(a.group)
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	if (v.asked || a.given) && *s.removed(a.group) != v.removals {
		return viewAnew
	}
	if v.others != nil {
		defer t.dismiss(s, a.group)
		t.enlist(s, a.group, v.others)
	}
	g := s.of[a.group]
	if g != nil {
		g.watch()
	}
	if v.asked && v.unread == nil {
		g = t.list(s, a.group, v)
		defer func() { s.tidy(a.group, g) }()
	}
	if k := a.standsFor(s, v.named); k != nil {
		if k != v.named || k.state != 0 {
			t.hold(s, a, k, now)
		} else {
			k.holder, a.known = a, k
		}
		if a.ID, a.Key = k.id, k.key; a.Key != a.own {
			a.Evidence = evidenceKey
		}
		return decided
	}
	if !v.asked && t.unlisted(s, g, a.group, a.window, a.count > 0, now) {
		v.removals = *s.removed(a.group)
		return askStore
	}
	if g != nil {
		t.expire(s, g, now, a.errors)
	}
	g = s.group(a.group)
	k := g.choose(a)
	if k == nil && g.waited() && (a.until.IsZero() || now.Before(a.until)) {
		if a.until.IsZero() {
			a.until, a.woken = now.Add(retryWait), make(chan struct{}, 1)
		}
		g.waiting = append(g.waiting, a)
		return awaitNews
	}
	if k != nil && k.refused() {
		a.takes(k)
		k = nil
	}
	if k == nil {
		if a.ID, a.Key = q.Scope.ID, a.own; !a.given && a.refused != nil && a.refused.asked {
			a.ID, a.Key = a.refused.id, a.refused.key
		} else if !a.given {
			q.Scope.ID = q.NewID()
			a.ID, a.Key = q.Scope.ID, t.g.Key(q.Scope)
		}
		if own := s.keys[member{a.group, a.Key}]; own != nil && a.refused == nil && !own.taken { // its own key was refused
			a.takes(own)
		}
		k = &known{key: a.Key, id: a.ID, group: a.group, window: a.window, count: a.count}
	} else {
		if a.Evidence, a.ID, a.Key = k.evidence(), k.id, k.key; a.Evidence == "" {
			a.Evidence = evidenceStated
		}
		if a.given && a.Key != a.own && (k.state != StateCompleted || k.expires.IsZero()) {
			k.aliases = append(k.aliases, a.own)
			s.aliases[member{k.group, a.own}] = k
		}
	}
	t.hold(s, a, k, now)
	g.pass()
	return decided
}

// takes has the attempt be the retry of a refusal.
func (a *Attempt) takes(k *known) {
	k.taken, a.refused = true, k
	k.changed()
}

// list adds what the store knows of a group, where memory does not. It returns the group.
func (t *groups) list(s *groupShard, group groupHash, v *view) *group {
	g := s.group(group)
	g.read, g.forgot = true, time.Time{}
	for _, k := range v.stored {
		if s.keys[member{group, k.key}] == nil && (!t.shared() || k.boot == t.g.boot) {
			t.add(s, k)
		}
	}
	return g
}

// standsFor returns the execution that the call's key is known to stand for; nil for a new key.
func (a *Attempt) standsFor(s *groupShard, named *known) *known {
	if !a.given {
		return nil
	}
	key := a.own
	if named != nil {
		key = named.key
	}
	k := s.keys[member{a.group, key}]
	if k != nil && !k.refused() {
		return k
	}
	if other := s.aliases[member{a.group, key}]; named == nil && other != nil && !other.refused() {
		return other
	}
	if k != nil {
		return nil // it was refused since named was read
	}
	return named
}

// hold has the attempt wait for the answer of k.
func (t *groups) hold(s *groupShard, a *Attempt, k *known, now time.Time) {
	s.order++
	if t.shared() {
		was := *k
		a.was = &was
	}
	a.known = k
	k.count, k.began, k.order = max(k.count, a.count), now, s.order
	k.holder, k.unanswered, k.retriable, k.learned = a, false, false, false
	if k.in == nil {
		t.add(s, k)
	}
	if k.in != nil {
		k.in.unwatched = a
	}
	t.note(s, k)
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
	if settling.IsZero() && k.in == nil { // another call with its key was refused meanwhile
		k.holder = a
		a.at.add(s, k)
	}
	k.runner, k.state, k.released, k.settling, k.foreign = a, StateSending, false, settling, false
	k.changed()
	if a.refused != nil {
		a.at.remove(s, a.refused)
		a.refused = nil
	}
	if !settling.IsZero() {
		a.at.pend(s, k)
	}
}

// claims completes the batch of the attempt's claim: what it is the retry of is not taken again.
func (a *Attempt) claims(batch []store.Write, now, until time.Time) []store.Write {
	if a == nil {
		return batch
	}
	if a.at.shared() {
		batch = append(batch, a.at.knows(a.group, until.Add(a.window+groupKept)))
		if a.refused != nil && a.refused.key != a.Key {
			batch = append(batch, heldBy(a.at.g.boot, a.group, a.refused.key, markAnswered, now.Add(a.window+groupKept)))
		}
	}
	if a.refused == nil {
		return batch
	}
	return append(batch, store.Write{Key: appendRowKey(nil, a.group, a.refused.key), Delete: true})
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
	if k.runner != nil || k.state != StateInDoubt {
		return
	}
	if k.in == nil && s.keys[member{k.group, k.key}] == nil { // it was forgotten; its row is new
		k.ended = time.Now()
		a.at.add(s, k)
	}
	a.ends(s, o, at, keep, true)
}

// ends is settled, with the shard locked.
func (a *Attempt) ends(s *groupShard, o *Outcome, at time.Time, keep time.Duration, recorded bool) {
	k := a.known
	k.runner, k.settling, k.settled, k.ended = nil, time.Time{}, at, time.Now()
	k.state, k.mark = StateCompleted, markNone // the outcome has its row written anew
	k.unrecorded, k.expires, k.internal, k.elsewhere = !recorded, at.Add(keep), o.Internal, o.Cause == CauseElsewhere
	switch o.Verdict {
	case Completed:
		k.window = min(k.window, keep) // a retry could not find more
	case InDoubt:
		k.state = StateInDoubt
	case Released:
		k.released, k.mark = true, markReleased
	}
	k.forgotten = k.in == nil // its group has no room for it
	k.changed()
	a.at.pend(s, k)
}

// Completed notes that the execution has a result: a doubt was settled meanwhile.
func (a *Attempt) Completed(ctx context.Context) {
	if a.completed() && a.at.shared() {
		a.at.takeSettled(ctx, a)
	}
}

// completed reports whether what it notes is news.
func (a *Attempt) completed() bool {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	k := a.known
	if k.runner != nil || k.state != StateInDoubt {
		return false
	}
	k.state, k.unrecorded = StateCompleted, false
	if !k.elsewhere { // as Guard.put has marked it
		k.mark = markUnanswered
	}
	k.changed()
	return true
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
	a.known.changed()
}

// Unanswered takes Answering back: the write has failed, or the client says that it does not wait.
func (a *Attempt) Unanswered() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	a.answered = false
	a.known.changed()
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
	a.known.changed()
}

// Asked notes that people are asked about the call, which is not claimed then: for that long after its end, or
// for its window, an equal call without a key takes its id (ADR 0122). A given key names the call itself.
func (a *Attempt) Asked(keep time.Duration) {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if k := a.known; !a.given && k.holder == a && k.state == 0 && k.in != nil {
		k.asked, k.window = true, max(k.window, keep)
	}
}

// End ends the attempt. What it ran must be settled before.
func (a *Attempt) End() {
	s := a.at.shard(a.group)
	s.Lock()
	defer s.Unlock()
	if a.unwatch != nil {
		a.unwatch()
	}
	k := a.known
	if k.in != nil && k.in.unwatched == a {
		k.in.unwatched = nil // its request is not kept for it
	}
	if k.holder == a {
		a.at.released(s, k, !a.answered)
	}
	if r := a.refused; r != nil { // a was refused before it could run
		a.refused = nil
		if k.asked && k.in != nil && k.key == r.key { // the same once more
			a.at.remove(s, r)
			return
		}
		r.taken = false
		r.changed()
		if r.in != nil {
			s.keys[member{r.group, r.key}] = r
		}
	}
}

// released notes that nobody holds the execution any more.
func (t *groups) released(s *groupShard, k *known, unanswered bool) {
	k.holder, k.unanswered = nil, unanswered
	if k.ended.IsZero() || k.unanswered && k.state != StateInDoubt {
		k.ended = time.Now()
	}
	if k.state == 0 && !k.released { // it was never claimed
		if !k.asked {
			t.remove(s, k)
			return
		}
		k.released = true
	}
	k.changed()
	t.note(s, k)
}

// Reader is the caller of an execution who asks for its answer by another request than a call (ADR 0091).
// Where no client of a call waits for it, the answer is that to the call.
type Reader struct {
	at   *groups
	of   member
	gone context.Context
	read *known // that was answered so; nil before
	turn uint64 // of its attempt
}

// Reader returns the reader of an execution that equal calls are recognised as, whose client leaves when
// ctx ends; nil for any other execution, and where what is known of it cannot be read: then its client
// counts as not answered, as before.
func (g *Guard) Reader(ctx context.Context, e *Recorded) *Reader {
	if e.Record.Group == (groupHash{}) || g.groups.listed(ctx, e.Record.Group, e.Record.Window) != nil {
		return nil
	}
	return &Reader{at: &g.groups, of: member{e.Record.Group, e.Key}, gone: ctx}
}

// listed returns when memory has what the store knows of a group.
func (t *groups) listed(ctx context.Context, group groupHash, window time.Duration) error {
	for {
		s := t.shard(group)
		s.Lock()
		v := view{removals: *s.removed(group)}
		unlisted := t.unlisted(s, s.of[group], group, window, false, time.Now())
		s.Unlock()
		if !unlisted {
			return nil
		}
		if v.stored, v.unread = t.read(ctx, group, window); v.unread != nil {
			return v.unread
		}
		s.Lock()
		current := *s.removed(group) == v.removals
		if current {
			s.tidy(group, t.list(s, group, &v))
		}
		s.Unlock()
		if current {
			return nil
		}
	}
}

// Answering notes that the end of the answer with this status is about to be written.
func (r *Reader) Answering(status int, _ bool) {
	s := r.at.shard(r.of.group)
	s.Lock()
	defer s.Unlock()
	k := s.keys[r.of]
	if k == nil || r.gone.Err() != nil || k.holder != nil && k.holder.waits() {
		return
	}
	r.read, r.turn = k, k.order
	k.learned, k.retriable = true, clientsRetry(status)
	k.changed()
	r.at.note(s, k)
}

// Unanswered takes Answering back.
func (r *Reader) Unanswered() {
	s := r.at.shard(r.of.group)
	s.Lock()
	defer s.Unlock()
	if k := r.read; k != nil && k.order == r.turn {
		k.learned = false
		k.changed()
		r.at.note(s, k)
	}
}
