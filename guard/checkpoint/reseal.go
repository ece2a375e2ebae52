package checkpoint

import (
	"context"
	"fmt"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// writers counts what is sealed and not committed yet, so that re-sealing can wait for
// what was sealed with an older key. The zero value is ready.
type writers struct {
	mu      sync.Mutex
	current *gate
	older   []*gate // not known to be empty
}

// gate is those who have entered between two passes of re-sealing.
type gate struct {
	w    *writers
	n    int
	idle chan struct{} // closed when n is 0; nil while nobody waits
}

// enter is called before anything is sealed; the gate is left after the commit.
func (w *writers) enter() *gate {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		w.current = &gate{w: w}
	}
	w.current.n++
	return w.current
}

func (t *gate) leave() {
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

func (t *gate) await(ctx context.Context) error {
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

const (
	resealPage = 256 // ordinary values that are read in one snapshot
	piecesPage = 16  // pieces that are read in one snapshot
)

// Resealed counts what a Reseal has done.
type Resealed struct {
	// Seen counts the values that were read, Resealed those that were sealed anew.
	Seen, Resealed int
	// Damaged are those that do not open with the key that they name. They stay as they
	// are; Open says ErrTampered of them.
	Damaged int
}

// Reseal seals anew, with the newest key, what was sealed with an older one: snapshots,
// results, their pieces, credentials, marks and versions. Hashes do not change, since they are of
// the plain bytes. Afterwards no checkpoint needs an older key.
//
// It goes beside the traffic, whose commits win, and may be stopped at any moment: the
// next one passes quickly over what was done. It comes before execution.Guard.Reseal, which
// notes the older keys as not needed any more.
func (v *Store) Reseal(ctx context.Context) (Resealed, error) {
	r := store.NewResealer(v.store, v.sealer)
	done := func(err error) (Resealed, error) {
		return Resealed{Seen: r.Seen, Resealed: r.Resealed, Damaged: r.Damaged}, err
	}
	if err := v.writers.wait(ctx); err != nil {
		return done(err)
	}
	for _, kind := range []byte{kindSnapshot, kindResult, kindCredential, kindMark, kindVersion} {
		if err := r.Walk(ctx, []byte{spaceCheckpoint, kind}, resealPage, r.Reseal); err != nil {
			return done(fmt.Errorf("%w: %w", ErrStore, err))
		}
	}
	if err := r.Walk(ctx, []byte{spaceCheckpoint, kindPiece}, piecesPage, r.ResealBulk); err != nil {
		return done(fmt.Errorf("%w: %w", ErrStore, err))
	}
	return done(nil)
}
