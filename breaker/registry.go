package breaker

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Key names a breaker.
type Key struct {
	// Upstream is the address of the upstream; any text.
	Upstream string
	// Class is the class of operations, such as read or write; empty for all.
	Class string
}

func (k Key) String() string {
	if k.Class == "" {
		return k.Upstream
	}
	return k.Upstream + " (" + k.Class + ")"
}

// defaultMax is how many breakers a registry holds by default.
const defaultMax = 1024

// Registry holds a breaker for each key, up to a limit. If it is full, idle breakers are removed: those
// that equal a new one. If there are none, further keys share one breaker that refuses no calls. It is
// safe for concurrent use.
type Registry struct {
	max  int
	hook Hook

	breakers  atomic.Pointer[map[Key]*Breaker] // replaced as a whole, so that reading takes no lock
	overflow  *Breaker
	overflows atomic.Uint64 // how many times there was no room

	mu sync.Mutex // held while breakers is replaced
}

// NewRegistry returns an empty registry for at most limit breakers, 1,024 if it is 0 or less. The
// hook gets the events of all of them; it may be nil.
func NewRegistry(limit int, hook Hook) *Registry {
	if limit <= 0 {
		limit = defaultMax
	}
	r := &Registry{max: limit, hook: hook}
	r.breakers.Store(&map[Key]*Breaker{})
	defaults, err := NewRules(Settings{})
	if err != nil {
		panic(err) // the defaults are in their ranges
	}
	r.overflow = New(Key{}, defaults, nil)
	r.overflow.SetMode(ForcedClosed)
	return r
}

// Get returns the key's breaker, a new one if there is none. It uses these rules from now on; new rules
// change neither state nor counts. Call Get for each call: an idle breaker may be evicted.
func (r *Registry) Get(key Key, rules *Rules) *Breaker {
	b := (*r.breakers.Load())[key]
	if b == nil {
		b = r.add(key, rules)
	}
	if b.rules.Load() != rules && b != r.overflow {
		b.rules.Store(rules)
	}
	return b
}

// Find returns the key's breaker, or nil.
func (r *Registry) Find(key Key) *Breaker { return (*r.breakers.Load())[key] }

// Drop removes the breakers whose keys match, such as those of an upstream that was removed from the
// configuration. Their state is lost, and the hook gets no more of their events.
func (r *Registry) Drop(match func(Key) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := maps.Clone(*r.breakers.Load())
	for key, b := range next {
		if match(key) {
			b.stop()
			delete(next, key)
		}
	}
	r.breakers.Store(&next)
}

// ShareProbes has the breakers of these keys probe as one, or each for itself again: one at a time, and after
// a failed probe none of them before the cooldown of its breaker is over. Probes that are under way go on.
// Keys without a breaker are ignored.
func (r *Registry) ShareProbes(share bool, keys ...Key) {
	var l *lane
	if share {
		l = new(lane)
	}
	for _, key := range keys {
		b := r.Find(key)
		if b == nil {
			continue
		}
		b.mu.Lock()
		b.lane.leave(b, time.Time{})
		b.lane = l
		if b.probe.holder != 0 {
			b.lane.enter(b, time.Now())
		}
		b.unlock()
	}
}

// Status returns the status of every breaker, sorted by key.
func (r *Registry) Status() []Status {
	all := make([]Status, 0, len(*r.breakers.Load()))
	for _, b := range *r.breakers.Load() {
		all = append(all, b.Status())
	}
	slices.SortFunc(all, func(a, b Status) int {
		return cmp.Or(cmp.Compare(a.Key.Upstream, b.Key.Upstream), cmp.Compare(a.Key.Class, b.Key.Class))
	})
	return all
}

// Restore adds a breaker from its snapshot, unless its key has a breaker already that is not blank. A
// blank one is replaced atomically, so that a call that came before Restore does not discard the
// snapshot. The error is that of Snapshot.Check.
func (r *Registry) Restore(s Snapshot, rules *Rules) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, err := restore(s, rules, r.hook)
	if err != nil {
		return err
	}
	before := r.Find(b.key)
	if before != nil && !before.stopBlank() || !r.put(b) {
		return nil
	}
	b.resume()
	return nil
}

func (r *Registry) add(key Key, rules *Rules) *Breaker {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b := r.Find(key); b != nil {
		return b
	}
	b := New(key, rules, r.hook)
	if !r.put(b) {
		return r.overflow
	}
	return b
}

// put adds b, or replaces the breaker of its key. It returns false if there is no room and none can be
// made. The mutex is held.
func (r *Registry) put(b *Breaker) bool {
	next := maps.Clone(*r.breakers.Load())
	delete(next, b.key)
	if len(next) >= r.max {
		r.evict(next)
	}
	if len(next) >= r.max {
		r.overflows.Add(1)
		return false
	}
	next[b.key] = b
	r.breakers.Store(&next)
	return true
}

// evict removes up to an eighth of the limit: the breakers that have been idle for longest.
func (r *Registry) evict(from map[Key]*Breaker) {
	type idle struct {
		b     *Breaker
		since time.Time
	}
	var idles []idle
	for _, b := range from {
		if since, ok := b.idleSince(); ok {
			idles = append(idles, idle{b, since})
		}
	}
	slices.SortFunc(idles, func(a, b idle) int { return a.since.Compare(b.since) })
	for _, i := range idles[:min(len(idles), max(r.max/8, 1))] {
		i.b.stop()
		delete(from, i.b.key)
	}
}

// idleSince is when the window became empty; false if the breaker differs from a new one.
func (b *Breaker) idleSince() (time.Time, bool) {
	b.mu.Lock()
	defer b.unlock()
	idle := b.state == Closed && b.mode == Auto && !b.period.awake &&
		(b.outage.cooldown == 0 || time.Since(b.since) >= healthy)
	if !idle {
		return time.Time{}, false
	}
	return b.period.slept, true
}

// stopBlank is stop for a breaker that equals a new one. For others it returns false.
func (b *Breaker) stopBlank() bool {
	b.mu.Lock()
	defer b.unlock()
	if b.state != Closed || b.mode != Auto || b.outage.cooldown != 0 {
		return false
	}
	b.end()
	return true
}

// stop ends all changes of state. Permits stay valid.
func (b *Breaker) stop() {
	b.mu.Lock()
	defer b.unlock()
	b.end()
}

// end is stop, with the mutex held.
func (b *Breaker) end() {
	b.stopped = true
	b.lane.leave(b, time.Time{})
	b.events = nil
	if b.timer != nil {
		b.timer.Stop()
	}
}
