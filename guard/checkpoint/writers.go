package checkpoint

import (
	"context"
	"sync"
)

// writers counts what is sealed and not committed yet, so that re-sealing can wait for
// what was sealed with an older key. The zero value is ready.
type writers struct {
	mu      sync.Mutex
	current *turn
	older   []*turn // not known to be empty
}

// turn is those who have entered between two passes of re-sealing.
type turn struct {
	w    *writers
	n    int
	idle chan struct{} // closed when n is 0; nil while nobody waits
}

// enter is called before anything is sealed; the turn is left after the commit.
func (w *writers) enter() *turn {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		w.current = &turn{w: w}
	}
	w.current.n++
	return w.current
}

func (t *turn) leave() {
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	t.n--
	if t.n == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// wait waits for all who have entered before it. Others enter meanwhile.
func (w *writers) wait(ctx context.Context) error {
	w.mu.Lock()
	if w.current != nil {
		w.older = append(w.older, w.current)
		w.current = nil
	}
	older := w.older
	w.older = nil
	w.mu.Unlock()
	for i, t := range older {
		if err := t.await(ctx); err != nil {
			w.mu.Lock()
			w.older = append(w.older, older[i:]...)
			w.mu.Unlock()
			return err
		}
	}
	return nil
}

func (t *turn) await(ctx context.Context) error {
	t.w.mu.Lock()
	if t.n == 0 {
		t.w.mu.Unlock()
		return nil
	}
	if t.idle == nil {
		t.idle = make(chan struct{})
	}
	idle := t.idle
	t.w.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
