package hitl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// DefaultKeep is how long an escalation is kept after its state last changed.
const DefaultKeep = 90 * 24 * time.Hour

// Sealer keeps values unreadable at rest and derives the store's keys.
type Sealer interface {
	// Seal appends the sealed plaintext to dst; it opens under the same name only.
	Seal(dst, plaintext, name []byte) []byte
	// Open appends the plain value to dst.
	Open(dst, sealed, name []byte) ([]byte, error)
	// Index derives 32 bytes from parts, stable for the life of the store.
	Index(domain string, parts ...string) [32]byte
	// KeyIDs lists the keys with which it opens, by id, the last of which seals.
	KeyIDs() []uint32
	// KeyOf is the id of the key under which a value is sealed.
	KeyOf(sealed []byte) uint32
}

// Errors of Desk.
var (
	// ErrNotFound: no escalation has this id, or it has expired.
	ErrNotFound = errors.New("hitl: no such escalation")
	// ErrStore: the store did not answer or did not take a record.
	ErrStore = errors.New("hitl: the store is unavailable")
	// ErrUnreadable: an escalation stands there and does not open, or cannot be read.
	ErrUnreadable = errors.New("hitl: the escalation cannot be read")
	// ErrAlreadyOpen: somebody else opened the same escalation before the commit, of which
	// therefore nothing landed. Prepare it again; it then adds no writes.
	ErrAlreadyOpen = errors.New("hitl: somebody else has opened the same escalation meanwhile")
)

// Desk records escalations in a store, finds them and lists them. It is safe for
// concurrent use, also by several nodes over one store.
type Desk struct {
	store  store.Store
	sealer Sealer
	keep   atomic.Int64 // nanoseconds

	mu   sync.Mutex
	news chan struct{} // closed when something was opened here
	hear func(Escalation)
}

// NewDesk makes the desk of a store. keep is how long an escalation is kept after its
// state last changed; zero is DefaultKeep. One that nobody was told of is kept for ever.
func NewDesk(st store.Store, sealer Sealer, keep time.Duration) *Desk {
	d := &Desk{store: st, sealer: sealer, news: make(chan struct{}), hear: func(Escalation) {}}
	d.SetKeep(keep)
	return d
}

// SetKeep changes how long an escalation is kept that changes its state from now on; zero
// is DefaultKeep.
func (d *Desk) SetKeep(keep time.Duration) {
	if keep <= 0 {
		keep = DefaultKeep
	}
	d.keep.Store(int64(keep))
}

// Hear lets f hear of each escalation that is opened here from now on, once its commit has
// landed. It is called by whoever opens, and must not wait.
func (d *Desk) Hear(f func(Escalation)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hear = f
}

// changed returns a channel that is closed when the next escalation is opened here.
func (d *Desk) changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.news
}

func (d *Desk) wake() (hear func(Escalation)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.news)
	d.news = make(chan struct{})
	return d.hear
}

// Pending is an escalation on its way into a commit.
type Pending struct {
	desk       *Desk
	escalation Escalation
	writes     []store.Write
}

// Prepare makes the writes that open an escalation, so that it lands in the commit of the
// decision that causes it, or neither does. Where it is open already, there are none. The
// errors are ErrOpening, ErrStore and ErrUnreadable.
//
// Done must be told what came of the commit.
func (d *Desk) Prepare(ctx context.Context, o Opening) (*Pending, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	id := d.idOf(o.Key)
	found, _, err := d.read(ctx, id)
	if err == nil {
		return &Pending{desk: d, escalation: *found}, nil
	}
	if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	now, err := d.now(ctx)
	if err != nil {
		return nil, err
	}
	e := Escalation{
		ID: id.String(), Level: o.Level, Cause: o.Cause, Summary: shorten(o.Summary, maxSummary),
		Workflow: shorten(o.Workflow, maxText), Caller: shorten(o.Caller, maxText),
		Links: Links{
			Checkpoint: shorten(o.Links.Checkpoint, maxText), Rollback: shorten(o.Links.Rollback, maxText),
			Error: shorten(o.Links.Error, maxText), Execution: shorten(o.Links.Execution, maxText),
			Upstream: shorten(o.Links.Upstream, maxText),
		},
		State: Open, Opened: now, Changed: now, Delivery: Delivery{Next: now},
	}
	return &Pending{desk: d, escalation: e, writes: d.put(id, nil, &e, store.Absent())}, nil
}

// Escalation is what is opened, or was before.
func (p *Pending) Escalation() Escalation { return p.escalation }

// Fresh reports whether the commit opens it; if not, it was open before.
func (p *Pending) Fresh() bool { return len(p.writes) > 0 }

// Writes are the riders of the commit. A Pending that is nil has none. They do not go
// first: a nearly full store judges a batch by its first write.
func (p *Pending) Writes() []store.Write {
	if p == nil {
		return nil
	}
	return p.writes
}

// Done tells what came of the commit, and returns err, as ErrAlreadyOpen where this
// escalation made it fail. A Pending that is nil has nothing to say.
func (p *Pending) Done(err error) error {
	if p == nil || len(p.writes) == 0 {
		return err
	}
	if err == nil || errors.Is(err, store.ErrUnknown) { // it may have landed
		if hear := p.desk.wake(); err == nil {
			hear(p.escalation)
		}
	}
	var lost *store.Conflict
	if errors.As(err, &lost) && string(lost.Key) == string(p.writes[0].Key) {
		return fmt.Errorf("%w: %w", ErrAlreadyOpen, err)
	}
	return err
}

// Open opens an escalation by a commit of its own, or finds it open. The error is
// ErrOpening, ErrStore or ErrUnreadable; after ErrStore it may be open all the same, and
// opening it again is safe.
func (d *Desk) Open(ctx context.Context, o Opening) (Escalation, error) {
	for {
		p, err := d.Prepare(ctx, o)
		if err != nil {
			return Escalation{}, err
		}
		if !p.Fresh() {
			return p.escalation, nil
		}
		_, err = d.store.Commit(ctx, p.Writes()...)
		err = p.Done(err)
		switch {
		case err == nil:
			return p.escalation, nil
		case !errors.Is(err, ErrAlreadyOpen):
			return Escalation{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
}

// Get returns the escalation with this id, or ErrNotFound, ErrStore, ErrUnreadable.
func (d *Desk) Get(ctx context.Context, id string) (Escalation, error) {
	parsed, err := uuid.Parse(id)
	if err != nil || parsed.String() != id {
		return Escalation{}, ErrNotFound
	}
	e, _, err := d.read(ctx, parsed)
	if err != nil {
		return Escalation{}, err
	}
	return *e, nil
}

// read returns the escalation and its version.
func (d *Desk) read(ctx context.Context, id uuid.UUID) (*Escalation, store.Version, error) {
	entry, err := d.store.Get(ctx, recordKey(id))
	if errors.Is(err, store.ErrNotFound) {
		return nil, 0, ErrNotFound
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrStore, err)
	}
	plain, err := d.sealer.Open(nil, entry.Value, entry.Key)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrUnreadable, id, err)
	}
	e, err := decode(plain)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrUnreadable, id, err)
	}
	e.ID = id.String()
	return e, entry.Version, nil
}

// now is the store's clock.
func (d *Desk) now(ctx context.Context) (time.Time, error) {
	now, err := d.store.Now(ctx)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return now.Round(0).UTC(), nil
}
