package execution

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The table of the executions that retries may be recognised as (ADR 0070, ADR 0091). What is done for
// a call does not grow with the number of those that equal it.

// groupHash is the keyed hash of what equal calls of one caller have in common.
type groupHash [16]byte

// groupOf returns the hash of the group of a call.
func groupOf(sealer store.Sealer, q *Question) groupHash {
	s := &q.Scope
	sum := store.Index(sealer, "group", s.Caller, s.Tenant, s.Guard, s.Method, s.Path, q.Peer, string(q.Whole[:]))
	return groupHash(sum[:])
}

// known is an execution that a retry may be recognised as.
type known struct {
	member
	id     string
	window time.Duration
	began  time.Time // the youngest attempt: no two of a table are alike
	count  int       // of its youngest attempt
	holder *Attempt  // the attempt that waits for its answer; nil where none does here

	state      State     // 0 before it was claimed
	unanswered bool      // the last attempt has ended without a whole answer
	retriable  bool      // the last attempt's answer was one that clients retry, by its status
	internal   bool      // its answer is one by what it says
	ended      time.Time // zero while it has not
	settled    time.Time // by the store's clock; while it runs, when the recording of its outcome began
	expires    time.Time // of its record; zero where that is not known
	unrecorded bool      // that it is in doubt is known here only
	aliases    []Key     // that stand for it, and do not expire yet

	mark      byte // in its row
	pending   bool // in the list of its shard
	forgotten bool // its row is to be deleted
	foreign   bool // another member runs it or has run it
	away      bool // a client waits for its answer at another member

	in *group // nil where it is not in the table
}

// States of the table alone.
const (
	// stateReleased: it was refused, or not sent. A retry runs as a new call.
	stateReleased State = 0x80 + iota
	// stateAsked: it was not claimed, since people are asked first (ADR 0122).
	stateAsked
	// stateElsewhere: it is in doubt, and its client may get the answer on another stream.
	stateElsewhere
)

// waits reports that a client waits for the answer.
func (k *known) waits() bool { return k.away || k.holder != nil && k.holder.waits() }

// held reports that an attempt has not ended whose client was not answered, whether that waits or has left.
func (k *known) held() bool { return k.holder != nil && !k.holder.answered }

// free reports that a call can be taken for a retry of the execution: some evidence says so, or it was refused.
func (k *known) free() bool { return k.evidence() != "" || k.refused() }

// refused reports that a retry runs as a new call. One that is attached still may run it itself.
func (k *known) refused() bool {
	return (k.state == stateReleased || k.state == stateAsked) && !k.held()
}

// lost reports that the last attempt's client has left, or did not get the whole answer.
func (k *known) lost() bool {
	return k.held() && k.holder.gone.Err() != nil || k.holder == nil && k.unanswered
}

// evidence is what the execution has to say for a retry; empty without any.
func (k *known) evidence() Evidence {
	switch {
	case k.refused(), k.state == stateElsewhere: // who may still wait is no retry, wherever it waits
		return ""
	case k.state == StateInDoubt:
		return EvidenceInDoubt
	case k.lost():
		return EvidenceUnanswered
	case (k.retriable || k.internal) && !k.held() && !k.away:
		return EvidenceAnswer
	}
	return ""
}

func (k *known) younger(than *known) bool { return k.began.After(than.began) }

func (k *known) over(now time.Time) bool {
	return k.holder == nil && k.state != StateSending && now.Sub(k.ended) >= k.window
}

// group is what is known of equal calls.
type group struct {
	listed    []*known
	read      bool       // whether the rows of the store were listed
	unwatched *Attempt   // the youngest one that waits, whose leave nobody has asked for yet
	waiting   []*Attempt // new calls that wait for the news that another one's client has left
}

// awaited reports that some client waits for the answer of one of these executions that is no doubt.
func awaited(all []*known) bool {
	return slices.ContainsFunc(all, func(k *known) bool { return k.waits() && k.state != StateInDoubt && !k.refused() })
}

const (
	// mostKnown bounds what is kept in memory; beyond it the store is scanned.
	mostKnown = 1 << 15
	// mostAlike bounds the executions of a group of equal calls. A call beyond it is new, and so is its retry.
	mostAlike = 32
	// mostCount bounds the number that a retry gives itself: a greater one counts as this.
	mostCount = 63
)

// groups is the table.
type groups struct {
	g        *Guard
	shards   [64]groupShard
	n        atomic.Int64
	room     int64 // mostKnown, but in tests
	armed    atomic.Bool
	soon     atomic.Bool   // marks are about to be written that other members have to read
	flushing chan struct{} // holds whoever writes marks; a channel, since a clock of tests sees who waits for it
	closed   bool
	ended    time.Time // by the store's clock: nothing whose marks were looked at has ended later
}

type groupShard struct {
	sync.Mutex
	of       map[groupHash]*group
	keys     map[member]*known // all that are in a group
	removals uint64            // how often something was forgotten
	pending  []*known          // whose marks may have to change, or that are being settled
	began    time.Time         // the youngest attempt
	forgot   time.Time         // the latest end of what was answered and forgotten, but has a row; zero for none
	since    time.Time         // memory has everything else that ended later
}

// member names an execution by what it was called with.
type member struct {
	group groupHash
	key   Key
}

func (t *groups) shard(group groupHash) *groupShard { return &t.shards[group[0]%64] }

// group returns the group of a hash, which is added where it is missing.
func (s *groupShard) group(hash groupHash) *group {
	g := s.of[hash]
	if g == nil {
		if s.of == nil {
			s.of, s.keys = map[groupHash]*group{}, map[member]*known{}
		}
		g = new(group)
		s.of[hash] = g
	}
	return g
}

// begins returns when an attempt begins, after all others of the shard.
func (s *groupShard) begins(now time.Time) time.Time {
	if !now.After(s.began) {
		now = s.began.Add(1)
	}
	s.began = now
	return now
}

// add lists k in its group, unless that has no room.
func (t *groups) add(s *groupShard, k *known) {
	k.in = s.group(k.group)
	k.in.listed = append(k.in.listed, k)
	s.keys[k.member] = k
	k.forgotten = false
	t.n.Add(1)
	if len(k.in.listed) > mostAlike {
		t.makeRoom(s, k)
	}
}

// makeRoom forgets one execution of the group of k, which was added last: one that was answered, else a refusal, else
// k itself. Their rows are deleted.
func (t *groups) makeRoom(s *groupShard, k *known) {
	oldest := k
	for _, other := range k.in.listed {
		rests := other.rests()
		if idle := rests || other.refused() && other.holder == nil; idle && other != k && (oldest == k ||
			rests && !oldest.rests() || rests == oldest.rests() && oldest.younger(other)) {
			oldest = other
		}
	}
	t.drop(s, oldest)
	if oldest != k { // whose row is deleted once it has one
		oldest.forgotten = true
		t.pend(s, oldest)
	}
}

func (t *groups) remove(s *groupShard, k *known) {
	if g := k.in; g != nil {
		t.drop(s, k)
		g.pass()
		s.tidy(k.group, g)
	}
}

// drop takes k from its group, of which nothing else changes.
func (t *groups) drop(s *groupShard, k *known) {
	i := slices.Index(k.in.listed, k)
	k.in.listed = slices.Delete(k.in.listed, i, i+1)
	k.in = nil
	if s.keys[k.member] == k { // else the same key has run again
		delete(s.keys, k.member)
	}
	s.removals++
	t.n.Add(-1)
}

// tidy removes a group that has nothing.
func (s *groupShard) tidy(hash groupHash, g *group) {
	if len(g.listed) == 0 && len(g.waiting) == 0 && s.of[hash] == g {
		delete(s.of, hash)
	}
}

// changed has the calls that wait look at k again, which has become something else for a retry.
func (k *known) changed() {
	if k.in != nil {
		k.in.pass()
	}
}

// pass wakes the call that has waited for the longest time, where it need not wait: an equal one can
// be taken, or none is left to wait for. A woken call passes on what it leaves.
func (g *group) pass() {
	if len(g.waiting) == 0 || awaited(g.listed) && !slices.ContainsFunc(g.listed, (*known).free) {
		return
	}
	a := g.waiting[0]
	g.waiting = slices.Delete(g.waiting, 0, 1)
	select {
	case a.woken <- struct{}{}:
	default: // it was woken before
	}
}

// expire removes the executions of a group that are too old.
func (t *groups) expire(s *groupShard, g *group, now time.Time, errors time.Duration) {
	for i := len(g.listed) - 1; i >= 0; i-- {
		if k := g.listed[i]; k.over(now) {
			t.remove(s, k)
		} else if k.stale(now, errors) {
			t.note(s, k)
		}
	}
}

// stale has an error that was delivered be no evidence any more, once clients do not retry it: errors after its end.
func (k *known) stale(now time.Time, errors time.Duration) bool {
	stale := k.evidence() == EvidenceAnswer && k.state != StateSending && !k.ended.IsZero() && now.Sub(k.ended) >= errors
	if stale {
		k.retriable, k.internal = false, false
	}
	return stale
}

// match ranks how well an execution fits a retry.
const (
	matchAlone  = 1 << iota // it is in doubt, and nobody asks for it
	matchClear              // it is not in doubt
	matchReason             // there is evidence, or it is the youngest and was refused
	matchCount              // it has the number before that of the call
)

// choose returns the execution that a call is a retry of; nil for a new call. A refused one makes it a new
// call too.
func choose(all []*known, a *Attempt) (best *known) {
	// An answered execution whose own retry of this count was answered is not what the call repeats.
	other := func(k *known) bool { return k.evidence() == "" && !k.refused() && k.count >= a.count }
	var youngest *known // that may have been executed, and that nobody waits for
	var asked *known    // the oldest that people are asked about, so that the next call takes another one
	for _, k := range all {
		if !k.refused() && !k.waits() && !other(k) && (youngest == nil || k.younger(youngest)) {
			youngest = k
		}
		if k.state == stateAsked && k.refused() && (asked == nil || asked.younger(k)) {
			asked = k
		}
	}
	rank := -1
	for _, k := range all {
		reason, doubtful := k.evidence() != "", k.state == StateInDoubt
		switch {
		case other(k):
			continue
		case k.state == stateAsked && k.refused():
			if k != asked || a.given {
				continue
			}
		case a.count == 0 && !reason || k.waits() && !doubtful && k.count >= a.count:
			continue
		}
		match := 0
		if a.count > 0 && k.count == a.count-1 {
			match |= matchCount
		}
		if reason || a.count > 0 && k.refused() && (youngest == nil || k.younger(youngest)) {
			match |= matchReason
		}
		if !doubtful {
			match |= matchClear
		} else if !k.waits() {
			match |= matchAlone
		}
		if match > rank || match == rank && k.younger(best) {
			best, rank = k, match
		}
	}
	return best
}

// unlisted reports that the store may have rows of a group that memory has not: from before it had everything, or,
// where the call says that it is a retry, of answered executions that were forgotten.
func (s *groupShard) unlisted(g *group, window time.Duration, count int, now time.Time) bool {
	return count > 0 && now.Sub(s.forgot) < window || now.Sub(s.since) < window && (g == nil || !g.read)
}

// rests reports that the execution says nothing but that it was answered.
func (k *known) rests() bool {
	return k.holder == nil && k.state != 0 && k.state != StateSending && !k.free()
}

// idle reports that nobody waits for the execution, and that the store knows of it what memory does.
func (k *known) idle() bool {
	return k.holder == nil && k.state != StateSending && !k.pending && !k.unrecorded
}

// shrink forgets what is too old, then what was answered, and where there still is too much what the store knows as
// well.
func (t *groups) shrink() {
	now := time.Now()
	for step := range 3 {
		for i := range t.shards {
			if t.n.Load() <= t.room {
				return
			}
			t.shards[i].forget(t, step, now)
		}
	}
}

// forget is a step of shrink in one shard.
func (s *groupShard) forget(t *groups, step int, now time.Time) {
	s.Lock()
	defer s.Unlock()
	for _, g := range s.of {
		for _, k := range slices.Clone(g.listed) {
			switch {
			case k.over(now):
			case step > 0 && k.idle() && k.rests():
				if k.ended.After(s.forgot) {
					s.forgot = k.ended
				}
			case step > 1 && k.idle():
				g.read, s.since = false, now
			default:
				continue
			}
			t.remove(s, k)
		}
	}
}
