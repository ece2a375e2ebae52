package cascade

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"
)

// Reading is how much of a resource is used at one moment (cascade 3.4.1). Each of the four ways to be
// exhausted may be left out.
type Reading struct {
	// Pool is whose resource it is; empty for the gateway's own. Resource is as in Signal.
	Pool, Resource string
	// Used of Limit are in use now; a Limit of 0 is none.
	Used, Limit float64
	// Refused is how often something found the resource used up, since the process began.
	Refused uint64
	// Ops is how many operations have ended since the process began, and Took how long they took together.
	Ops  uint64
	Took time.Duration
	// Full says that it is exhausted.
	Full bool
}

const (
	// fullShare is the share in use from which a resource is exhausted.
	fullShare = 0.9
	// slowest is how long operations take on average where what they use is exhausted.
	slowest = 500 * time.Millisecond
)

// Exhaustion finds resources that are used up, in readings of each moment. Its methods may be called from any
// goroutine.
type Exhaustion struct {
	mu   sync.Mutex
	last map[Signal]Reading
	full map[Signal]bool
}

// Update takes what was read now, and returns the signals that have begun and ended since the update before. A
// resource is exhausted where nine tenths are in use, where something was refused since then, where the operations
// since then were slow, or where its owner says so. One that is not read any more is not.
func (e *Exhaustion) Update(now []Reading) (changed []Signal) {
	e.mu.Lock()
	defer e.mu.Unlock()
	last, full := make(map[Signal]Reading, len(now)), map[Signal]bool{}
	for _, r := range now {
		s := Signal{Kind: Full, Pool: r.Pool, Resource: r.Resource}
		before, known := e.last[s]
		last[s] = r
		refused := known && r.Refused > before.Refused
		slow := known && r.Ops > before.Ops && (r.Took-before.Took)/time.Duration(r.Ops-before.Ops) >= slowest
		if r.Full || refused || slow || r.Limit > 0 && r.Used >= fullShare*r.Limit {
			full[s] = true
		}
	}
	for s := range full {
		if !e.full[s] {
			s.Active = true
			changed = append(changed, s)
		}
	}
	for s := range e.full {
		if !full[s] {
			changed = append(changed, s)
		}
	}
	e.last, e.full = last, full
	slices.SortFunc(changed, func(a, b Signal) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Resource, b.Resource))
	})
	return changed
}

// Exhausted returns the signals that last.
func (e *Exhaustion) Exhausted() []Signal {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.full))
}
