package breaker

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Key names what a breaker stands for.
type Key struct {
	// Upstream is the address, as the caller writes it.
	Upstream string
	// Class is the class of operations, such as read or write; empty for all of them.
	Class string
}

func (k Key) String() string {
	if k.Class == "" {
		return k.Upstream
	}
	return k.Upstream + " (" + k.Class + ")"
}

// DefaultMax is how many breakers a registry holds if nothing else is said.
const DefaultMax = 1024

// Registry holds a breaker for each key. It is bounded: when it is full, breakers make
// room that are closed, count nothing and have nothing to remember. Where there is
// none of these, further keys share one breaker that refuses nobody.
type Registry struct {
	max  int
	hook Hook

	breakers atomic.Pointer[map[Key]*Breaker] // replaced as a whole, so that reading takes no lock
	overflow *Breaker
	turned   atomic.Uint64

	mu sync.Mutex // who replaces breakers
}

// NewRegistry returns an empty registry for at most limit breakers, DefaultMax if it is
// 0 or less. The hook hears of all of them; it may be nil.
func NewRegistry(limit int, hook Hook) *Registry {
	if limit <= 0 {
		limit = DefaultMax
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

// Get returns the key's breaker and makes it if there is none. The breaker goes by
// these rules from now on; other rules than before change neither state nor counts.
// Ask for each call: a breaker that one holds on to may be evicted when it is idle.
func (r *Registry) Get(key Key, rules *Rules) *Breaker {
	b := (*r.breakers.Load())[key]
	if b == nil {
		b = r.add(key, rules)
	}
	if b.rules.Load() != rules && b != r.overflow {
		b.SetRules(rules)
	}
	return b
}

// Find returns the key's breaker, or nil.
func (r *Registry) Find(key Key) *Breaker { return (*r.breakers.Load())[key] }

// Overflowed is how many times Get found no room.
func (r *Registry) Overflowed() uint64 { return r.turned.Load() }

// Drop removes the breakers whose keys match, such as those of an upstream that the
// configuration no longer has. Their state is forgotten, and the hook hears no more of
// them.
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

// Status returns the status of every breaker, sorted by key.
func (r *Registry) Status() []Status {
	all := make([]Status, 0, len(*r.breakers.Load()))
	for _, b := range *r.breakers.Load() {
		all = append(all, b.Status())
	}
	slices.SortFunc(all, func(a, b Status) int { return compareKeys(a.Key, b.Key) })
	return all
}

// Snapshot returns the snapshots of the breakers that a new one would not replace,
// sorted by key.
func (r *Registry) Snapshot() []Snapshot {
	var all []Snapshot
	for _, b := range *r.breakers.Load() {
		if s := b.Snapshot(); !s.Blank() {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b Snapshot) int {
		return compareKeys(Key{a.Upstream, a.Class}, Key{b.Upstream, b.Class})
	})
	return all
}

// Restore adds a breaker from its snapshot, unless its key has one already that has
// something to remember: what lives knows better. One that is blank is replaced, so that
// a call which came first does not undo the snapshot; no call can come between. It fails
// on a snapshot that no breaker can have made, and changes nothing then.
func (r *Registry) Restore(s Snapshot, rules *Rules) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, err := Restore(s, rules, r.hook)
	if err != nil {
		return err
	}
	before := r.Find(b.key)
	if before != nil && !before.stopBlank() || !r.put(b) {
		b.stop()
	}
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

// put adds b, in the place of what its key has, if there is room or can be made. Called
// with the mutex held.
func (r *Registry) put(b *Breaker) bool {
	next := maps.Clone(*r.breakers.Load())
	delete(next, b.key)
	if len(next) >= r.max {
		r.evict(next)
	}
	if len(next) >= r.max {
		r.turned.Add(1)
		return false
	}
	next[b.key] = b
	r.breakers.Store(&next)
	return true
}

// evict removes up to an eighth of the bound, those that have been idle for longest.
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

// idleSince tells since when the breaker counts nothing, if a new one would do as well.
func (b *Breaker) idleSince() (time.Time, bool) {
	b.mu.Lock()
	defer b.unlock()
	idle := b.state == Closed && b.mode == Auto && !b.period.awake &&
		(b.outage.cooldown == 0 || time.Since(b.since) >= b.rules.Load().set.Healthy)
	if !idle {
		return time.Time{}, false
	}
	return b.period.slept, true
}

// stopBlank is stop for a breaker that a new one could replace. It reports false, and does
// nothing, where this one has something to remember.
func (b *Breaker) stopBlank() bool {
	b.mu.Lock()
	defer b.unlock()
	if b.state != Closed || b.mode != Auto || b.outage.cooldown != 0 {
		return false
	}
	b.end()
	return true
}

// stop ends the breaker's life as a state machine. Permits that are out stay valid.
func (b *Breaker) stop() {
	b.mu.Lock()
	defer b.unlock()
	b.end()
}

// end is stop, with the mutex held.
func (b *Breaker) end() {
	b.stopped = true
	b.events = nil
	if b.timer != nil {
		b.timer.Stop()
	}
}

func compareKeys(a, b Key) int {
	return cmp.Or(cmp.Compare(a.Upstream, b.Upstream), cmp.Compare(a.Class, b.Class))
}
