package cascade

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Resource is something of a pool, or of the gateway itself, that can be exhausted (cascade 3.4.1).
type Resource struct {
	// Pool is whose it is; empty for the gateway's own.
	Pool string
	// Name is permits, queue, connections, memory, disk or store.
	Name string
}

// Reading is how much of a resource is used at one moment (cascade 3.4.1). Each of the four ways to be
// exhausted may be left out.
type Reading struct {
	// Pool and Resource are as in Resource.
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
	last map[Resource]Reading
	full map[Resource]bool
}

// Update takes what was read now, and returns what is exhausted since the update before, and what is not any more. A
// resource is exhausted where nine tenths are in use, where something was refused since then, where the operations
// since then were slow, or where its owner says so. One that is not read any more is not.
func (e *Exhaustion) Update(now []Reading) (begun, ended []Resource) {
	e.mu.Lock()
	defer e.mu.Unlock()
	last, full := make(map[Resource]Reading, len(now)), map[Resource]bool{}
	for _, r := range now {
		s := Resource{r.Pool, r.Resource}
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
			begun = append(begun, s)
		}
	}
	for s := range e.full {
		if !full[s] {
			ended = append(ended, s)
		}
	}
	e.last, e.full = last, full
	return begun, ended
}

// Exhausted returns what is exhausted.
func (e *Exhaustion) Exhausted() []Resource {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.full))
}
