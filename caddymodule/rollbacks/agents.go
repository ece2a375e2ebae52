package rollbacks

import (
	"context"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// behind remembers for a short time which agent's token is the nearest that led to the
// gateway's own: the checkpoints of one workflow have the same ancestors, each of which
// would be verified once more for each of them.
type behind struct {
	mu sync.Mutex
	m  map[place]nearest
}

// place is where an entry stands.
type place struct {
	log   string
	index int64
}

// nearest is the agent that is reached over the fewest parents; its name is empty where
// none is.
type nearest struct {
	agent string
	far   int
	found time.Time
}

const (
	// behindTime is how long what was found is believed: keys are revoked meanwhile.
	behindTime = time.Minute
	// maxBehind bounds what is remembered; each takes about 150 bytes.
	maxBehind = 50_000
)

func (b *behind) known(e *ledger.Entry, now time.Time) (nearest, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, ok := b.m[placeOf(e)]
	return n, ok && now.Sub(n.found).Abs() < behindTime
}

func (b *behind) keep(at place, n nearest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.m == nil || len(b.m) >= maxBehind {
		b.m = map[place]nearest{}
	}
	b.m[at] = n
}

func placeOf(e *ledger.Entry) place { return place{e.Log, e.Index} }

// walk is a search for the nearest agent.
type walk struct {
	b     *behind
	from  map[place]place // over which entry another one was reached
	depth map[place]int
	begin time.Time
}

// agent is the identity behind a checkpoint: its issuer where that is an agent, else that
// of the nearest agent's token that led to it, else the gateway.
func (v *Voice) agent(ctx context.Context, b *behind, e *ledger.Entry, parents []*ledger.Entry) (string, error) {
	if !v.own(e) {
		return e.Issuer, nil // which a checkpoint has
	}
	w := walk{b: b, from: map[place]place{}, depth: map[place]int{placeOf(e): 0}, begin: time.Now()}
	var best nearest
	var met place
	reached := func(p *ledger.Entry, agent string, far int) {
		if best.agent == "" || far < best.far {
			best, met = nearest{agent: agent, far: far}, placeOf(p)
		}
	}
	level := w.next(e, parents)
	for far := 1; len(level) > 0 && (best.agent == "" || far < best.far); far++ {
		var above []*ledger.Entry
		for _, p := range level {
			if graph.NobodysWord(p) {
				continue // nor is what it names
			}
			if !v.own(p) {
				reached(p, p.Issuer, far)
				continue
			}
			if n, ok := b.known(p, w.begin); ok {
				if n.agent != "" {
					reached(p, n.agent, far+n.far)
				}
				continue
			}
			more, err := v.parents(ctx, p)
			if err != nil {
				return "", err
			}
			above = append(above, w.next(p, more)...)
			if len(w.depth) > ect.MaxAncestors {
				return "", &plan.TooManyError{What: "ancestors", Count: len(w.depth), Limit: ect.MaxAncestors}
			}
		}
		level = above
	}
	if best.agent != "" {
		w.keep(met, best)
		return best.agent, nil
	}
	for at := range w.depth { // none of them has one
		b.keep(at, nearest{found: w.begin})
	}
	return e.Issuer, nil
}

// next are the parents of an entry that were not met before.
func (w *walk) next(e *ledger.Entry, parents []*ledger.Entry) (fresh []*ledger.Entry) {
	for _, p := range parents {
		at := placeOf(p)
		if _, met := w.depth[at]; !met {
			w.depth[at], w.from[at] = w.depth[placeOf(e)]+1, placeOf(e)
			fresh = append(fresh, p)
		}
	}
	return fresh
}

// keep remembers an agent for all by which it was reached: to each of them it is the
// nearest, since it is that to the first.
func (w *walk) keep(at place, best nearest) {
	for {
		child, there := w.from[at]
		if !there {
			return
		}
		at = child
		w.b.keep(at, nearest{agent: best.agent, far: best.far - w.depth[at], found: w.begin})
	}
}
