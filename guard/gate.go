package guard

import (
	"context"
	"sync"
)

// gate counts running executions and, once shut, lets no new ones in.
type gate struct {
	mu   sync.Mutex
	n    int
	shut bool
	idle chan struct{} // closed when n falls to 0 after shut
}

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut {
		return false
	}
	g.n++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// drain shuts the gate and waits until it is empty or ctx ends. It returns how many
// are still inside.
func (g *gate) drain(ctx context.Context) int {
	g.mu.Lock()
	g.shut = true
	if g.n == 0 {
		g.mu.Unlock()
		return 0
	}
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	idle := g.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return 0
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n
}
