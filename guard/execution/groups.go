package execution

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"math"
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
	parts := [...]string{q.Scope.Caller, q.Scope.Guard, q.Scope.Method, q.Scope.Path, q.Peer}
	size := len(q.Fingerprint)
	for _, part := range parts {
		size += binary.MaxVarintLen64 + len(part)
	}
	compute := func() groupHash {
		sum := store.Index(sealer, "group", q.Scope.Caller, q.Scope.Guard, q.Scope.Method, q.Scope.Path, q.Peer, string(q.Fingerprint[:]))
		return groupHash(sum[:])
	}
	if size > mostName {
		return compute()
	}
	var memory [mostName]byte
	name := append(memory[:0], q.Fingerprint[:]...)
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

	in      *group // nil where it is not in the table
	class   class
	resting bool // in the queue of its shard
}

// class is what an execution is for a retry.
type class uint8

const (
	classTaken        class = iota // a refusal that a retry has taken
	classWaited                    // its client waits for the answer
	classAskedInDoubt              // in doubt, and its client waits to learn that
	classInDoubt                   // in doubt, and nobody waits
	classRefused                   // its retry runs
	classPending                   // the same, under its id, since people are asked about that
	classEvident                   // nobody waits, and there is evidence
	classAnswered                  // nobody waits, and there is none
	classes                        // how many there are
)

func (k *known) classify() class {
	waits := k.away || k.holder != nil && k.holder.waits()
	switch {
	case k.taken:
		return classTaken
	case k.refused() && k.asked:
		return classPending
	case k.refused():
		return classRefused
	case k.state == StateInDoubt && waits:
		return classAskedInDoubt
	case k.state == StateInDoubt:
		return classInDoubt
	case waits:
		return classWaited
	case k.evidence() != "":
		return classEvident
	}
	return classAnswered
}

// refused reports that a retry runs as a new call. One that is attached still may run it itself.
func (k *known) refused() bool { return k.released && (k.holder == nil || k.holder.answered) }

// evidence is what the execution has to say for a retry; empty without any.
func (k *known) evidence() Evidence {
	switch {
	case k.refused():
		return ""
	case k.state == StateInDoubt:
		return EvidenceInDoubt
	case !k.learned && (k.holder != nil && !k.holder.answered && k.holder.gone.Err() != nil || k.holder == nil && k.unanswered):
		return EvidenceUnanswered
	case (k.retriable || k.internal) && (k.holder == nil || k.holder.answered):
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

// group is what is known of equal calls.
type group struct {
	listed    []*known     // by class, count and age: each look-up is a binary search
	number    [classes]int // of each class
	read      uint64       // the clock's epoch in which the rows of the store were listed; 0 if they were not
	gap       gap
	unwatched *Attempt   // the youngest one that waits, whose leave nobody has asked for yet
	waiting   []*Attempt // new calls that wait for the news that another one's client has left
}

// gap describes the answered executions that were forgotten, but have rows in the store.
type gap struct {
	ended time.Time          // of the last
	began [mostGap]time.Time // the youngest with each count, the last one of all greater ones; zero: none
}

// mostGap is how many counts a gap tells apart. Few clients try more than three times.
const mostGap = 3

func (g *gap) add(other gap) {
	if other.ended.After(g.ended) {
		g.ended = other.ended
	}
	for count, began := range other.began {
		if began.After(g.began[count]) {
			g.began[count] = began
		}
	}
}

// gapOf describes an execution that is forgotten.
func gapOf(k *known) gap {
	g := gap{ended: k.ended}
	g.began[min(k.count, mostGap-1)] = k.began
	return g
}

// end is the place behind those of a class with at most this count.
func (g *group) end(c class, count int) int {
	from, to := 0, len(g.listed)
	for from < to { // sort.Search would call a function for each step, several times for a retry
		i := (from + to) / 2
		if k := g.listed[i]; k.class > c || k.class == c && k.count > count {
			to = i
		} else {
			from = i + 1
		}
	}
	return from
}

// place is where k stands, or would.
func (g *group) place(k *known) int {
	from, to := g.end(k.class, k.count-1), g.end(k.class, k.count)
	for from < to {
		i := (from + to) / 2
		if !k.younger(g.listed[i]) {
			to = i
		} else {
			from = i + 1
		}
	}
	return from
}

func (g *group) insert(k *known) {
	k.class = k.classify()
	g.number[k.class]++
	g.listed = slices.Insert(g.listed, g.place(k), k)
}

func (g *group) cut(k *known) {
	g.number[k.class]--
	i := g.place(k)
	g.listed = slices.Delete(g.listed, i, i+1)
}

const (
	// mostKnown bounds what is kept in memory; beyond it the store is scanned.
	mostKnown = 1 << 16
	// mostResting bounds the answered executions of a shard; beyond it the store is read for a call
	// that says that it is a retry, unless it is that of one that is kept.
	mostResting = 1 << 8
	// mostRead bounds what is read of a group for such a call (ADR 0091).
	mostRead = 1 << 8
	// mostRefused bounds the refusals of one group.
	mostRefused = 64
	// mostCount bounds the number that a retry gives itself: a greater one counts as this.
	mostCount = 63
)

// groups is the table.
type groups struct {
	g        *Guard
	shards   [64]groupShard
	n        atomic.Int64
	room     int // for answered executions, of each shard
	most     int // that are read of a group for a call that says that it is a retry
	hashes   hashes
	earlier  earlier // read-only
	clock    clock
	crashes  []crash // of earlier processes
	alone    bool    // a gateway may have had the store alone; read-only
	armed    atomic.Bool
	flushing turn
	closed   bool
	opened   time.Time // by the store's clock, as is ended
	ended    time.Time // nothing whose marks were looked at has ended later
	follows  bool      // another writing of the marks is to follow
}

type groupShard struct {
	sync.Mutex
	of       map[groupHash]*group
	keys     map[member]*known // all that are in a group
	aliases  map[member]*known // by the keys that stand for them
	removals [64]uint64        // by group
	pending  []*known          // whose marks may have to change, or that are being settled
	resting  []*known          // answered executions, in the order in which they are forgotten
	order    uint64            // how many attempts have begun
	gap      gap               // of all groups that are not in the table
	absent   group             // stands for one of those
	missing  [mostGap]known    // stand for what a gap describes, while one is chosen
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
		g = &group{gap: s.gap}
		s.of[hash] = g
	}
	return g
}

// add lists k in its group.
func (t *groups) add(s *groupShard, k *known) {
	if k.order == 0 {
		s.order++
		k.order = s.order
	}
	k.in = s.group(k.group)
	k.in.insert(k)
	s.keys[member{k.group, k.key}] = k
	for _, key := range k.aliases {
		s.aliases[member{k.group, key}] = k
	}
	t.n.Add(1)
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
	k.in.cut(k)
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
		s.gap.add(g.gap)
		delete(s.of, hash)
	}
}

// move lists k anew after a change of what its place depends on.
func (g *group) move(k *known, change func()) {
	if len(g.listed) == 1 { // most calls have no equal
		change()
		g.number[k.class]--
		k.class = k.classify()
		g.number[k.class]++
		return
	}
	g.cut(k)
	change()
	g.insert(k)
}

// changed lists k anew where it has become something else for a retry.
func (k *known) changed() {
	if g := k.in; g != nil && k.class != k.classify() {
		g.move(k, func() {})
		g.pass()
	}
}

// pass wakes the call that has waited for the longest time, where it need not wait: an equal one can
// be taken, or none is left to wait for. Whoever is woken passes on what is left.
func (g *group) pass() {
	if of := &g.number; len(g.waiting) == 0 || of[classWaited] > 0 && of[classEvident]+of[classInDoubt]+of[classAskedInDoubt]+of[classPending] == 0 {
		return
	}
	a := g.waiting[0]
	g.waiting = slices.Delete(g.waiting, 0, 1)
	select {
	case a.woken <- struct{}{}:
	default: // it was woken before
	}
}

// youngest returns the youngest execution of a class whose count is not above most; nil without one.
func (t *groups) youngest(s *groupShard, g *group, c class, most int, now time.Time) (best *known) {
	for k := t.highest(s, g, c, most, now); k != nil; k = t.highest(s, g, c, k.count-1, now) {
		if best == nil || k.younger(best) {
			best = k
		}
	}
	return best
}

// highest returns the youngest execution of those of a class with the highest count that is not above
// most; nil without one. What is too old is removed.
func (t *groups) highest(s *groupShard, g *group, c class, most int, now time.Time) *known {
	if g.number[c] == 0 { // as most classes: few calls have an equal
		return nil
	}
	for i := g.end(c, most); i > 0 && g.listed[i-1].class == c; i-- {
		k := g.listed[i-1]
		if !k.over(now) {
			return k
		}
		t.remove(s, k)
	}
	return nil
}

// match ranks how well an execution fits a retry.
const (
	matchAlone  = 1 << iota // it is in doubt, and nobody asks for it
	matchClear              // it is not in doubt
	matchReason             // there is evidence, or it is the youngest and was refused
	matchCount              // it has the number before that of the call
)

// choose returns the execution that a call is a retry of; nil for a new call. A refused one makes it a new
// call too. With gaps it may be one that was forgotten, which is in no group.
func (t *groups) choose(s *groupShard, g *group, a *Attempt, gaps bool, now time.Time) (best *known) {
	count, rank := a.count, 0
	var pending *known
	if !a.given && g.number[classPending] > 0 {
		pending = t.pending(s, g, now)
	}
	consider := func(k *known, match int) {
		if k == nil {
			return
		}
		if count > 0 && k.count == count-1 {
			match |= matchCount
		}
		if best == nil || match > rank || match == rank && k.younger(best) {
			best, rank = k, match
		}
	}
	if count == 0 {
		if consider(t.youngest(s, g, classEvident, mostCount, now), matchClear|matchReason); best != nil {
			return best
		}
		consider(t.youngest(s, g, classInDoubt, mostCount, now), matchReason|matchAlone)
		consider(t.youngest(s, g, classAskedInDoubt, mostCount, now), matchReason)
		if best == nil {
			best = pending
		}
		return best
	}
	var free *known // the youngest that may have been executed, and that nobody waits for
	for _, c := range [...]struct {
		class
		match, most int
		free        bool
	}{
		{classEvident, matchClear | matchReason, mostCount, true},
		{classInDoubt, matchReason | matchAlone, mostCount, true},
		{classAskedInDoubt, matchReason, mostCount, false},
		{classAnswered, matchClear, mostCount, true},
		{classWaited, matchClear, count - 1, false},
	} {
		k := t.youngest(s, g, c.class, c.most, now)
		if k == nil {
			continue
		}
		if c.free && (free == nil || k.younger(free)) {
			free = k
		}
		consider(k, c.match)
		consider(t.highest(s, g, c.class, count-1, now), c.match)
	}
	if gaps && now.Sub(g.gap.ended) < a.window {
		for i, began := range g.gap.began {
			if k := &s.missing[i]; !began.IsZero() {
				k.class, k.began, k.order, k.count = classAnswered, began, math.MaxUint64, i
				if i == min(count, mostGap)-1 {
					k.count = count - 1
				}
				if free == nil || k.younger(free) {
					free = k
				}
				consider(k, matchClear)
			}
		}
	}
	for _, k := range [...]*known{t.highest(s, g, classRefused, count-1, now), t.youngest(s, g, classRefused, mostCount, now), pending} {
		match := matchClear
		if k != nil && (free == nil || k.younger(free)) {
			match |= matchReason
		}
		consider(k, match)
	}
	return best
}

// pending returns the call that people are asked about whose last attempt is the oldest, so that the next one
// takes another; nil without one. What is too old is removed.
func (t *groups) pending(s *groupShard, g *group, now time.Time) *known {
	for {
		var oldest *known
		for _, k := range g.listed[g.end(classPending-1, mostCount):g.end(classPending, mostCount)] {
			if oldest == nil || oldest.younger(k) {
				oldest = k
			}
		}
		if oldest == nil || !oldest.over(now) {
			return oldest
		}
		t.remove(s, oldest)
	}
}

// answered returns the answered execution that fits a call best which says that it is a retry; nil without
// one.
func (t *groups) answered(s *groupShard, g *group, count int, now time.Time) *known {
	k := t.highest(s, g, classAnswered, count-1, now)
	if k != nil && k.count == count-1 {
		return k
	}
	return t.youngest(s, g, classAnswered, mostCount, now)
}

// unlisted reports that the store may have rows of the group g, of this hash, from before memory had
// everything.
func (t *groups) unlisted(s *groupShard, g *group, hash groupHash, window time.Duration, now time.Time) bool {
	if now.Sub(s.since) >= window || t.shared() { // which are asked
		return false
	}
	epoch := t.clock.epoch.Load()
	return (g == nil || g.read != epoch) && (s.shrunk || t.earlier.has(hash, epoch))
}

// rest keeps an answered execution, as far as there is room.
func (t *groups) rest(s *groupShard, k *known) {
	if k.resting {
		return
	}
	k.resting = true
	for s.resting = append(s.resting, k); len(s.resting) > t.room; {
		k := s.resting[0]
		s.resting[0] = nil
		s.resting = s.resting[1:]
		k.resting = false
		if k.in == nil || !k.rests() || k.pending {
			continue // it comes back when it rests
		}
		k.in.gap.add(gapOf(k))
		t.remove(s, k)
	}
}

// rests reports that the execution says nothing but that it was answered.
func (k *known) rests() bool {
	return k.holder == nil && k.runner == nil && k.class == classAnswered && k.state != 0
}

// forget forgets the oldest refusal of a group that has no room for one more.
func (t *groups) forget(s *groupShard, g *group) {
	var oldest *known
	first := g.end(classRefused-1, mostCount)
	for i := first; i < len(g.listed) && g.listed[i].class == classRefused; i = g.end(classRefused, g.listed[i].count) {
		if k := g.listed[i]; oldest == nil || oldest.younger(k) {
			oldest = k
		}
	}
	if oldest != nil && g.end(classRefused, mostCount)-first >= mostRefused && oldest.holder == nil {
		oldest.forgotten = true
		t.remove(s, oldest)
		t.pend(s, oldest)
	}
}

// shrink forgets what is too old, and where there still is too much what the store knows as well.
func (t *groups) shrink() {
	now := time.Now()
	for _, all := range []bool{false, true} {
		for i := range t.shards {
			if t.n.Load() <= mostKnown {
				return
			}
			s := &t.shards[i]
			s.Lock()
			for _, g := range s.of {
				for _, k := range slices.Clone(g.listed) {
					idle := k.holder == nil && k.runner == nil && !k.pending && !k.taken && !k.unrecorded
					if k.over(now) || all && idle {
						t.remove(s, k)
					}
				}
				if all {
					g.read = 0
				}
			}
			if all {
				s.since, s.shrunk = now, true
			}
			s.Unlock()
		}
	}
}
