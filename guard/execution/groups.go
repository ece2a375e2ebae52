package execution

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
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

// hashes remembers the hashes of the groups that were asked for last. A retry comes soon after its call, and a keyed
// hash costs as much as the rest of its decision. It depends on nothing but the name of the group, which is compared
// whole: no group is taken for another one (P3).
type hashes struct {
	seed  maphash.Seed
	slots [mostHashes]struct {
		sync.Mutex
		name []byte
		hash groupHash
	}
}

const (
	mostHashes = 1 << 10
	// mostName bounds the memory of a name, in bytes.
	mostName = 512
)

// of returns the hash of the group of a call.
func (h *hashes) of(sealer store.Sealer, q *Question) groupHash {
	c := &q.Scope
	parts := [...]string{c.Caller, c.Tenant, c.Guard, c.Method, c.Path, q.Peer}
	size := len(q.Whole)
	for _, part := range parts {
		size += binary.MaxVarintLen64 + len(part)
	}
	compute := func() groupHash {
		sum := store.Index(sealer, "group", c.Caller, c.Tenant, c.Guard, c.Method, c.Path, q.Peer, string(q.Whole[:]))
		return groupHash(sum[:])
	}
	if size > mostName {
		return compute()
	}
	var memory [mostName]byte
	name := append(memory[:0], q.Whole[:]...)
	for _, part := range parts {
		name = append(binary.AppendUvarint(name, uint64(len(part))), part...)
	}
	s := &h.slots[maphash.Bytes(h.seed, name)%mostHashes]
	s.Lock()
	defer s.Unlock()
	if !bytes.Equal(s.name, name) {
		s.name, s.hash = append(s.name[:0], name...), compute()
	}
	return s.hash
}

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
	retriable  bool // the last attempt's answer was one that clients retry, by its status
	internal   bool // its answer is one by what it says
	ended      time.Time
	taken      bool      // by the retry of the refused attempt
	unrecorded bool      // that it is in doubt is known here only
	elsewhere  bool      // it is in doubt, and its client may get the answer on another stream
	settling   time.Time // by the store's clock; while its outcome is being recorded
	settled    time.Time // by the store's clock
	mark       byte      // in its row
	crashed    bool      // its process has ended before it could write a mark
	pending    bool      // in the list of its shard
	expires    time.Time // of its record; zero where that is not known
	aliases    []Key     // that stand for it, and do not expire yet
	forgotten  bool      // its row is to be deleted
	learned    bool      // its caller has got the answer by another request since the last attempt
	asked      bool      // it was not claimed, since people are asked first (ADR 0122)

	foreign bool   // another member runs it or has run it
	boot    string // of the member that has said so
	away    bool   // a client waits for its answer at another member
	held    bool   // a retry of this member has taken it, which has an entry: its marks go there

	in *group // nil where it is not in the table
}

// waits reports that a client waits for the answer.
func (k *known) waits() bool { return k.away || k.holder != nil && k.holder.waits() }

// doubtful reports that the execution is in doubt, and that nobody may get its answer elsewhere.
func (k *known) doubtful() bool { return k.state == StateInDoubt && !k.elsewhere }

// free reports that a call can be taken for a retry of the execution: some evidence says so, or it was refused.
func (k *known) free() bool { return !k.taken && (k.evidence() != "" || k.refused()) }

// refused reports that a retry runs as a new call. One that is attached still may run it itself.
func (k *known) refused() bool { return k.released && (k.holder == nil || k.holder.answered) }

// deserted reports that the client of the last attempt has left without a whole answer.
func (k *known) deserted() bool {
	if k.holder == nil {
		return k.unanswered
	}
	return !k.holder.answered && k.holder.gone.Err() != nil
}

// evidence is what the execution has to say for a retry; empty without any.
func (k *known) evidence() Evidence {
	switch {
	case k.refused(), k.state == StateInDoubt && k.elsewhere: // who may still wait is no retry, wherever it waits
		return ""
	case k.state == StateInDoubt:
		return evidenceInDoubt
	case !k.learned && k.deserted():
		return evidenceUnanswered
	case (k.retriable || k.internal) && (k.holder == nil || k.holder.answered):
		return evidenceAnswer
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

// group is what is known of equal calls.
type group struct {
	listed    []*known
	read      bool       // whether the rows of the store were listed
	forgot    time.Time  // the latest end of those that were forgotten, but have rows in the store; zero for none
	unwatched *Attempt   // the youngest one that waits, whose leave nobody has asked for yet
	waiting   []*Attempt // new calls that wait for the news that another one's client has left
}

// own is how many of the executions are of this gateway.
func (g *group) own() (n int) {
	for _, k := range g.listed {
		if !k.foreign {
			n++
		}
	}
	return n
}

// waited reports that some client waits for an answer that is no doubt.
func (g *group) waited() bool {
	return slices.ContainsFunc(g.listed, func(k *known) bool { return k.waits() && !k.doubtful() && !k.refused() && !k.taken })
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
	hashes   hashes
	earlier  earlier // read-only
	armed    atomic.Bool
	flushing turn
	closed   bool
	ended    time.Time // by the store's clock: nothing whose marks were looked at has ended later
	follows  bool      // another writing of the marks is to follow
}

type groupShard struct {
	sync.Mutex
	of       map[groupHash]*group
	keys     map[member]*known // all that are in a group
	aliases  map[member]*known // by the keys that stand for them
	removals [64]uint64        // by group
	pending  []*known          // whose marks may have to change, or that are being settled
	order    uint64            // how many attempts have begun
	forgot   time.Time         // that of all groups that are not in the table
	since    time.Time         // memory has everything that ended later
	shrunk   bool              // since is of this process's own forgetting
}

// member names an execution by what it was called with.
type member struct {
	group groupHash
	key   Key
}

func (s *groupShard) removed(group groupHash) *uint64 { return &s.removals[group[1]%64] }

func (t *groups) shard(group groupHash) *groupShard { return &t.shards[group[0]%64] }

// group returns the group of a hash, which is added where it is missing.
func (s *groupShard) group(hash groupHash) *group {
	g := s.of[hash]
	if g == nil {
		if s.of == nil {
			s.of, s.keys, s.aliases = map[groupHash]*group{}, map[member]*known{}, map[member]*known{}
		}
		g = &group{forgot: s.forgot}
		s.of[hash] = g
	}
	return g
}

// add lists k in its group, unless that has no room.
func (t *groups) add(s *groupShard, k *known) {
	if k.order == 0 {
		s.order++
		k.order = s.order
	}
	k.in = s.group(k.group)
	k.in.listed = append(k.in.listed, k)
	s.keys[member{k.group, k.key}] = k
	for _, key := range k.aliases {
		s.aliases[member{k.group, key}] = k
	}
	t.n.Add(1)
	k.forgotten = false
	if !k.foreign && k.in.own() > mostAlike {
		t.makeRoom(s, k)
	}
}

// makeRoom forgets one execution of the group of k, which was added last: one that was answered, else a refusal, else
// k itself. Their rows are deleted.
func (t *groups) makeRoom(s *groupShard, k *known) {
	var oldest *known
	for _, other := range k.in.listed {
		idle := other.rests() || other.refused() && other.holder == nil && !other.taken
		if idle && !other.foreign && (oldest == nil || other.rests() && !oldest.rests() ||
			other.rests() == oldest.rests() && oldest.younger(other)) {
			oldest = other
		}
	}
	if oldest == nil {
		t.drop(s, k)
		return
	}
	oldest.forgotten = true
	t.pend(s, oldest)
	t.drop(s, oldest)
	*s.removed(k.group)++
}

func (t *groups) remove(s *groupShard, k *known) {
	g := k.in
	if g == nil {
		return
	}
	t.drop(s, k)
	*s.removed(k.group)++
	g.pass()
	s.tidy(k.group, g)
}

// drop takes k from its group, of which nothing else changes.
func (t *groups) drop(s *groupShard, k *known) {
	i := slices.Index(k.in.listed, k)
	k.in.listed = slices.Delete(k.in.listed, i, i+1)
	k.in = nil
	if m := (member{k.group, k.key}); s.keys[m] == k { // else the same key has run again
		delete(s.keys, m)
	}
	s.unalias(k)
	t.n.Add(-1)
}

// unalias removes the keys that stand for k.
func (s *groupShard) unalias(k *known) {
	for _, key := range k.aliases {
		if m := (member{k.group, key}); s.aliases[m] == k {
			delete(s.aliases, m)
		}
	}
}

// tidy removes a group that has nothing.
func (s *groupShard) tidy(hash groupHash, g *group) {
	if len(g.listed) == 0 && len(g.waiting) == 0 && s.of[hash] == g {
		if g.forgot.After(s.forgot) {
			s.forgot = g.forgot
		}
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
	if len(g.waiting) == 0 || g.waited() && !slices.ContainsFunc(g.listed, (*known).free) {
		return
	}
	a := g.waiting[0]
	g.waiting = slices.Delete(g.waiting, 0, 1)
	select {
	case a.woken <- struct{}{}:
	default: // it was woken before
	}
}

// expire removes the executions of a group that are too old. An error that was delivered is no evidence any more once
// clients do not retry it, errors after its end.
func (t *groups) expire(s *groupShard, g *group, now time.Time, errors time.Duration) {
	for i := len(g.listed) - 1; i >= 0; i-- {
		k := g.listed[i]
		switch {
		case k.over(now):
			t.remove(s, k)
		case k.evidence() == evidenceAnswer && k.runner == nil && !k.ended.IsZero() && now.Sub(k.ended) >= errors:
			k.retriable, k.internal = false, false
			t.note(s, k)
		}
	}
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
func (g *group) choose(a *Attempt) (best *known) {
	// An answered execution whose own retry of this count was answered is not what the call repeats.
	other := func(k *known) bool { return k.evidence() == "" && !k.refused() && k.count >= a.count }
	var youngest *known // that may have been executed, and that nobody waits for
	for _, k := range g.listed {
		if !k.refused() && !k.waits() && !other(k) && (youngest == nil || k.younger(youngest)) {
			youngest = k
		}
	}
	rank, pending := -1, g.pending()
	for _, k := range g.listed {
		reason := k.evidence() != ""
		switch {
		case k.taken || other(k):
			continue
		case k.asked && k.refused():
			if k != pending || a.given {
				continue
			}
		case a.count == 0 && !reason || k.waits() && !k.doubtful() && k.count >= a.count:
			continue
		}
		match := 0
		if a.count > 0 && k.count == a.count-1 {
			match |= matchCount
		}
		if reason || a.count > 0 && k.refused() && (youngest == nil || k.younger(youngest)) {
			match |= matchReason
		}
		if !k.doubtful() {
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

// pending returns the call that people are asked about whose last attempt is the oldest, so that the next one
// takes another; nil without one.
func (g *group) pending() (oldest *known) {
	for _, k := range g.listed {
		if k.asked && k.refused() && !k.taken && (oldest == nil || oldest.younger(k)) {
			oldest = k
		}
	}
	return oldest
}

// unlisted reports that the store may have rows of the group g, of this hash, that memory has not: from before it had
// everything, or, where the call says that it is a retry, of answered executions that were forgotten.
func (t *groups) unlisted(s *groupShard, g *group, hash groupHash, window time.Duration, retry bool, now time.Time) bool {
	forgot := s.forgot
	if g != nil {
		forgot = g.forgot
	}
	if retry && now.Sub(forgot) < window {
		return true
	}
	if now.Sub(s.since) >= window || t.shared() { // which are asked
		return false
	}
	return (g == nil || !g.read) && (s.shrunk || t.earlier.has(hash))
}

// rests reports that the execution says nothing but that it was answered.
func (k *known) rests() bool {
	return k.holder == nil && k.runner == nil && k.state != 0 && !k.taken && !k.free()
}

// idle reports that nobody waits for the execution, and that the store knows of it what memory does.
func (k *known) idle() bool {
	return k.holder == nil && k.runner == nil && !k.pending && !k.taken && !k.unrecorded
}

// shrink forgets what is too old, then what was answered, and if that is not enough what the store knows as well.
func (t *groups) shrink() {
	now := time.Now()
	for _, forget := range []func(k *known) bool{
		func(k *known) bool { return k.over(now) },
		func(k *known) bool { return k.idle() && k.rests() },
		(*known).idle,
	} {
		for i := range t.shards {
			if t.n.Load() <= t.room {
				return
			}
			t.shards[i].forget(t, forget, now)
		}
	}
}

// forget removes those executions of a shard for which the function says so.
func (s *groupShard) forget(t *groups, forget func(k *known) bool, now time.Time) {
	s.Lock()
	defer s.Unlock()
	for _, g := range s.of {
		for _, k := range slices.Clone(g.listed) {
			switch {
			case !forget(k):
				continue
			case k.over(now):
			case k.rests():
				if k.ended.After(g.forgot) {
					g.forgot = k.ended
				}
			default:
				g.read, s.since, s.shrunk = false, now, true
			}
			t.remove(s, k)
		}
	}
}
