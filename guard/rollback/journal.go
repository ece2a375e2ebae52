package rollback

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// sealed makes the write of a value that is kept sealed under its key.
func (c *Coordinator) sealed(key, plain []byte, condition store.Condition) store.Write {
	return store.Write{Key: key, If: condition, Value: c.o.Sealer.Seal(nil, plain, key)}
}

func (c *Coordinator) headWrite(n name, h *head, condition store.Condition) (store.Write, error) {
	plain, err := json.Marshal(h)
	if err != nil {
		return store.Write{}, err
	}
	return c.sealed(keyOf(kindHead, n), plain, condition), nil
}

func (c *Coordinator) stepWrite(n name, i int, s *Step) (store.Write, error) {
	plain, err := s.encode()
	if err != nil {
		return store.Write{}, err
	}
	return c.sealed(partKey(kindStep, n, i), plain, store.Condition{}), nil
}

// planWrites are the pieces of a plan.
func (c *Coordinator) planWrites(n name, p *planned) ([]store.Write, error) {
	packed, err := p.encode()
	if err != nil {
		return nil, err
	}
	var writes []store.Write
	for len(packed) > 0 {
		size := min(len(packed), pieceSize)
		writes = append(writes, c.sealed(partKey(kindPlan, n, len(writes)), packed[:size], store.Condition{}))
		packed = packed[size:]
	}
	return writes, nil
}

// open returns the plain value of an entry.
func (c *Coordinator) open(entry store.Entry) ([]byte, error) {
	plain, err := c.o.Sealer.Open(nil, entry.Value, entry.Key)
	if err != nil {
		return nil, unreadable(err)
	}
	return plain, nil
}

func unreadable(err error) error { return fmt.Errorf("%w: %w: %w", ErrStore, ErrUnreadable, err) }

// readHead reads a head and its version; ErrUnknown where there is none.
func (c *Coordinator) readHead(ctx context.Context, n name) (*head, store.Version, error) {
	entry, err := c.o.Store.Get(ctx, keyOf(kindHead, n))
	if errors.Is(err, store.ErrNotFound) {
		return nil, 0, ErrUnknown
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrStore, err)
	}
	plain, err := c.open(entry)
	if err != nil {
		return nil, 0, err
	}
	h := new(head)
	if err := json.Unmarshal(plain, h); err != nil {
		return nil, 0, unreadable(err)
	}
	return h, entry.Version, nil
}

// load reads a rollback with its plan and its steps.
func (c *Coordinator) load(ctx context.Context, n name) (*run, error) {
	h, version, err := c.readHead(ctx, n)
	if err != nil {
		return nil, err
	}
	var packed []byte
	for i := range h.Pieces {
		entry, err := c.o.Store.Get(ctx, partKey(kindPlan, n, i))
		if errors.Is(err, store.ErrNotFound) {
			return nil, unreadable(fmt.Errorf("the plan of rollback %s: %w", h.ID, err))
		}
		if err != nil {
			return nil, fmt.Errorf("%w: the plan of rollback %s: %w", ErrStore, h.ID, err)
		}
		piece, err := c.open(entry)
		if err != nil {
			return nil, err
		}
		packed = append(packed, piece...)
	}
	p, err := decodePlanned(packed)
	if err != nil {
		return nil, unreadable(err)
	}
	// What is followed is what was accepted (C-4.3.1-d).
	if sum := p.Plan.Hash(); subtle.ConstantTimeCompare(sum[:], h.Hash) != 1 {
		return nil, unreadable(errors.New("the plan is not the one that was accepted"))
	}
	r := newRun(n, h, version, p)
	if len(r.steps) != h.Steps {
		return nil, unreadable(errors.New("the plan has another number of steps"))
	}
	for entry, err := range c.o.Store.Scan(ctx, store.Prefix(keyOf(kindStep, n))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if err := c.readStep(r, entry); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (c *Coordinator) readStep(r *run, entry store.Entry) error {
	plain, err := c.open(entry)
	if err != nil {
		return err
	}
	i := indexIn(entry.Key)
	if i >= len(r.steps) {
		return unreadable(errors.New("a step that the plan does not have"))
	}
	if err := r.steps[i].decode(plain); err != nil {
		return unreadable(err)
	}
	return nil
}
