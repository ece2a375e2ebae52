package hitl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// keep is how long an escalation is kept after its state last changed.
const keep = 90 * 24 * time.Hour

// Errors of Store.
var (
	// ErrNotFound: no escalation has this id, or it has expired.
	ErrNotFound = errors.New("hitl: no such escalation")
	// ErrStore: the store did not answer or refused a record.
	ErrStore = errors.New("hitl: the store is unavailable")
	// ErrUnreadable: the escalation does not open, or cannot be decoded.
	ErrUnreadable = errors.New("hitl: the escalation cannot be read")
	// ErrAlreadyOpen: the same escalation was opened before the commit, so that nothing of it was
	// written. Prepare it again; it then adds no writes.
	ErrAlreadyOpen = errors.New("hitl: somebody else has opened the same escalation meanwhile")
)

// Store records, finds and lists escalations. It is safe for concurrent use, also by several
// nodes over one store.
type Store struct {
	store   store.Store
	sealer  store.Sealer
	records store.Table[Escalation]
	// unreachable is for what cannot be undone, where the opening has no time to decide of its own.
	unreachable atomic.Pointer[Unreachable]

	holds holds
	// fleet and fences are nil where one gateway has the store. The fence of a workflow changes whenever
	// something begins to hold it.
	fleet  *fleet.Fleet
	fences *store.Fences

	mu        sync.Mutex
	news      chan struct{} // closed when something was opened here
	onOpened  func(Escalation)
	onDecided func(Escalation)
	evidence  Evidence
}

// NewStore makes the escalation store over st. Those that are not delivered are kept forever, and those
// that hold a workflow or still propose something. Call Load before the first call.
func NewStore(st store.Store, sealer store.Sealer) *Store {
	nobody := func(Escalation) {}
	d := &Store{
		store: st, sealer: sealer, news: make(chan struct{}), onOpened: nobody, onDecided: nobody,
		fleet: fleet.Of(st), fences: store.FollowFences(st, []byte{space, kindFence}),
		records: store.Table[Escalation]{
			Store: st, Sealer: sealer, Prefix: string([]byte{space, kindRecord}),
			Failed: ErrStore, Unreadable: ErrUnreadable, Missing: ErrNotFound, Check: (*Escalation).check,
		},
	}
	d.fleet.Follow([]byte{space, kindHold}, d.holds.change)
	return d
}

// Configure says what happens where nobody decides in time about a call that cannot be undone (ATD,
// "Checkpoint ECT Format"), for later openings of CauseIrreversible; nil is no time to decide at all.
func (d *Store) Configure(unreachable *Unreachable) { d.unreachable.Store(unreachable) }

// OnOpened calls f for each escalation opened here from now on, after its commit, on the opening
// goroutine. f must not wait.
func (d *Store) OnOpened(f func(Escalation)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onOpened = f
}

// changed returns a channel that is closed when the next escalation is opened here.
func (d *Store) changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.news
}

// Opened is an escalation and the batch that opens it, which is empty if it is open already.
type Opened struct {
	*store.Batch
	escalation Escalation
}

// Prepare makes the writes that open an escalation in the commit of the decision that causes it.
// If it is open already, there are none. The errors are errOpening, ErrStore and ErrUnreadable.
//
// The batch must be ended; its error is ErrAlreadyOpen if the escalation made the commit fail.
// Its writes must not come first: a nearly full store judges a batch by its first write.
func (d *Store) Prepare(ctx context.Context, o Opening) (*Opened, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	id := d.idOf(o.Key)
	found, _, err := d.read(ctx, id)
	if err == nil {
		return &Opened{escalation: *found}, nil
	}
	if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	now, err := d.now(ctx)
	if err != nil {
		return nil, err
	}
	e := Escalation{
		ID: id.String(), Level: o.Level, LevelName: o.Level.String(), Cause: o.Cause, Summary: shorten(o.Summary, maxSummary),
		Workflow: shorten(o.Workflow, maxText), Caller: shorten(o.Caller, maxText),
		Links: Links{
			Checkpoint: shorten(o.Links.Checkpoint, maxText), Rollback: shorten(o.Links.Rollback, maxText),
			Error: shorten(o.Links.Error, maxText), Execution: shorten(o.Links.Execution, maxText),
			Upstream: shorten(o.Links.Upstream, maxText),
		},
		State: Open, Opened: now, Changed: now, NextAttempt: now,
		Status: Pending, Proposal: o.Proposal, RequiredRole: cmp.Or(o.Role, DefaultRole), Quorum: o.Quorum,
		Requester: shorten(o.Requester, maxText), Held: o.Level != Approval && o.Workflow != "" && !o.Lifted,
		Private: Private{Final: o.Final, Notice: o.Notice},
	}
	for _, p := range o.Participants {
		e.Participants = append(e.Participants, NewParticipant(shorten(p.Agent, maxText), shorten(p.URI, maxText)))
	}
	if o.Notice {
		e.State, e.Status, e.NextAttempt = Notified, Withdrawn, time.Time{}
	}
	if u := d.unreachable.Load(); u != nil && o.Cause == CauseIrreversible && o.Within == 0 {
		o.Unreachable, o.Within = *u, cmp.Or(u.Within, defaultWithin)
	}
	if o.Unreachable.Do == unreachablePause || o.Unreachable.Do == unreachableEscalate { // else it is denied
		e.Unreachable = o.Unreachable
	}
	if e.Held && o.Proposal.Kind == "" && !o.Notice && !o.Final {
		e.Proposal = resumption()
	}
	e.Proposal.Text = shorten(e.Proposal.Text, maxProposal)
	if o.Within > 0 {
		e.Deadline = now.Add(o.Within)
	}
	token, evidence, err := d.recorded(ctx, nil, &e)
	if err != nil {
		return nil, err
	}
	e.Token = token
	d.holds.note(&e) // before the commit: no call begins between that and this
	p := &Opened{Batch: store.NewBatch(d.put(id, nil, &e, store.Absent())...)}
	p.escalation = e
	own := p.Writes()[:1]
	p.Join(evidence)
	p.OnDone(func(err error) error {
		if err == nil || errors.Is(err, store.ErrUnknown) { // it may have landed
			d.fences.Forget(d.fenceKey(e.Workflow))
			d.mu.Lock()
			close(d.news)
			d.news = make(chan struct{})
			opened := d.onOpened
			d.mu.Unlock()
			if err == nil {
				opened(e)
			}
		}
		if store.Lost(err, own) {
			return fmt.Errorf("%w: %w", ErrAlreadyOpen, err)
		}
		return err
	})
	return p, nil
}

// Escalation is the one to open, or the open one.
func (p *Opened) Escalation() Escalation { return p.escalation }

// Fresh reports whether the commit opens it; if not, it was open before.
func (p *Opened) Fresh() bool { return p.Batch != nil }

// Open opens an escalation in its own commit, or finds it open. The error is errOpening, ErrStore
// or ErrUnreadable; after ErrStore it may be open all the same, and opening it again is safe.
func (d *Store) Open(ctx context.Context, o Opening) (Escalation, error) {
	for {
		p, err := d.Prepare(ctx, o)
		if err != nil {
			return Escalation{}, err
		}
		if !p.Fresh() {
			return p.escalation, nil
		}
		switch err = p.Commit(ctx, d.store); {
		case err == nil:
			return p.escalation, nil
		case !errors.Is(err, ErrAlreadyOpen):
			return Escalation{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
}

// Get returns the escalation with this id, or ErrNotFound, ErrStore, ErrUnreadable. One that is
// overdue expires with it.
func (d *Store) Get(ctx context.Context, id string) (Escalation, error) {
	parsed, err := parseID(id)
	if err != nil {
		return Escalation{}, err
	}
	e, _, err := d.read(ctx, parsed)
	if err != nil {
		return Escalation{}, err
	}
	if e.expiry().IsZero() {
		return *e, nil
	}
	found, err := d.change(ctx, id, func(*Escalation, time.Time) (*Escalation, error) { return nil, nil })
	if errors.Is(err, ErrExpired) {
		err = nil
	}
	return found, err
}

// Find returns the escalation of an occasion, as Get does.
func (d *Store) Find(ctx context.Context, key string) (Escalation, error) {
	return d.Get(ctx, d.idOf(key).String())
}

// read returns the escalation and its version.
func (d *Store) read(ctx context.Context, id uuid.UUID) (*Escalation, store.Version, error) {
	row, err := d.records.Get(ctx, recordKey(id))
	if errors.Is(err, ErrUnreadable) {
		err = fmt.Errorf("%w: escalation %s", err, id)
	}
	return row.Record, row.Version, err
}

// update commits what make returns, which is no decision, on the condition that nothing else has changed. It returns
// that; nil if make changes nothing.
func (d *Store) update(ctx context.Context, id uuid.UUID, make func(e *Escalation, now time.Time) (*Escalation, error)) (*Escalation, error) {
	for {
		old, version, err := d.read(ctx, id)
		if err != nil {
			return nil, err
		}
		now, err := d.now(ctx)
		if err != nil {
			return nil, err
		}
		next, err := make(old, now)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if next == nil {
			return nil, nil
		}
		_, err = d.store.Commit(ctx, d.put(id, old, next, store.VersionIs(version))...)
		if err == nil {
			return next, nil
		}
		if !errors.As(err, new(*store.Conflict)) {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
}

func (d *Store) now(ctx context.Context) (time.Time, error) {
	now, err := d.store.Now(ctx)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return now.Round(0).UTC(), nil
}

// Filter selects escalations; the zero value selects all.
type Filter struct {
	// Workflow is the workflow's id; empty is any.
	Workflow string
	// Level, State and Status are compared; zero or empty is any.
	Level  Level
	State  State
	Status Status
}

// Page is a part of a listing. Its members are an API.
type Page struct {
	// Escalations are sorted by age, the newest first.
	Escalations []Escalation `json:"escalations"`
	// Unreadable counts records that do not open.
	Unreadable int `json:"unreadable,omitempty"`
	// Next is where the next page begins; empty after the last. A page may have fewer than asked
	// for, even none, and still a next one.
	Next string `json:"next,omitempty"`
}

const (
	// maxPage is the largest number of escalations on a page.
	maxPage = 1000
	// maxSeen bounds the index entries that are read for a page.
	maxSeen = 20 * listChunk
	// listChunk is how many of them are read at once.
	listChunk = 256
)

// ErrCursor: the text does not say where a page begins.
var ErrCursor = errors.New("hitl: this is not where a page begins; give what an earlier page named as the next")

// List returns up to limit escalations that pass f, from after on; empty is the beginning. One
// that changes meanwhile may be on no page.
func (d *Store) List(ctx context.Context, f Filter, after string, limit int) (Page, error) {
	limit = min(max(limit, 1), maxPage)
	prefix := []byte{space, kindAge}
	if f.Workflow != "" {
		prefix = d.workflowPrefix(f.Workflow)
	}
	r := store.Prefix(prefix)
	r.Reverse, r.Limit = true, listChunk
	if after != "" {
		place, err := base64.RawURLEncoding.DecodeString(after)
		if err != nil || len(place) != placeSize {
			return Page{}, ErrCursor
		}
		r.To = append(bytes.Clone(prefix), place...)
	}
	page := Page{Escalations: []Escalation{}}
	for range maxSeen / listChunk {
		names, last, err := d.passing(ctx, &f, r)
		if err != nil {
			return Page{}, err
		}
		for _, name := range names {
			if err := d.appendTo(ctx, &f, name, &page); err != nil {
				return Page{}, err
			}
			if len(page.Escalations) == limit {
				page.Next = cursor(name)
				return page, nil
			}
		}
		if last == nil {
			return page, nil
		}
		r.To = last
	}
	page.Next = cursor(r.To)
	return page, nil
}

func cursor(name []byte) string {
	return base64.RawURLEncoding.EncodeToString(name[len(name)-placeSize:])
}

// passing reads part of an index: the keys of the entries that pass, and the last key of all; nil
// at the end.
func (d *Store) passing(ctx context.Context, f *Filter, r store.Range) (names [][]byte, last []byte, err error) {
	n := 0
	for entry, err := range d.store.Scan(ctx, r) {
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		n++
		last = entry.Key
		if e := readIndexed(entry.Value); f.passes(&e) {
			names = append(names, entry.Key)
		}
	}
	if n < r.Limit {
		last = nil
	}
	return names, last, nil
}

func (f *Filter) passes(e *Escalation) bool {
	return (f.Level == 0 || f.Level == e.Level) && (f.State == "" || f.State == e.State) && (f.Status == "" || f.Status == e.Status)
}

// appendTo adds the escalation of an index entry to the page, if it still passes.
func (d *Store) appendTo(ctx context.Context, f *Filter, name []byte, page *Page) error {
	_, id := placeIn(name)
	e, _, err := d.read(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound):
	case errors.Is(err, ErrUnreadable):
		page.Unreadable++
	case err != nil:
		return err
	case f.passes(e):
		page.Escalations = append(page.Escalations, *e)
	}
	return nil
}

// maxCount bounds the escalations that are counted, the newest.
const maxCount = 100_000

// Counts are the numbers of escalations, and the times of the oldest pending ones.
type Counts struct {
	// N are the numbers by level, state and status.
	N map[Level]map[State]map[Status]int
	// Oldest is when the oldest pending escalation of a level was opened; none of a level without one.
	Oldest map[Level]time.Time
}

// Count counts all escalations, up to 100,000, the newest. It opens none.
func (d *Store) Count(ctx context.Context) (Counts, error) {
	counts := Counts{N: map[Level]map[State]map[Status]int{}, Oldest: map[Level]time.Time{}}
	for l := Pause; l <= Stop; l++ {
		counts.N[l] = map[State]map[Status]int{}
		for _, s := range States() {
			counts.N[l][s] = map[Status]int{Pending: 0}
		}
	}
	r := store.Prefix([]byte{space, kindAge})
	r.Reverse, r.Limit = true, maxCount
	for entry, err := range d.store.Scan(ctx, r) {
		if err != nil {
			return Counts{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
		e := readIndexed(entry.Value)
		if of := counts.N[e.Level][e.State]; of != nil {
			if of[e.Status]++; e.Status == Pending {
				counts.Oldest[e.Level], _ = placeIn(entry.Key)
			}
		}
	}
	return counts, nil
}

// Reseal seals anew, with the newest key, what is sealed with older ones, and returns how many
// escalations. It may be stopped anywhere and starts over. Those that do not open are left and
// reported as ErrUnreadable: then the older keys must not be given up.
//
// An escalation prepared under an older key and committed after the walk is sealed anew by its
// Dispatcher.
func (d *Store) Reseal(ctx context.Context) (int, error) {
	r := store.NewResealer(d.store, d.sealer)
	if err := r.Tables(ctx, d.records.Prefix); err != nil {
		return r.Resealed, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if r.Damaged > 0 {
		return r.Resealed, fmt.Errorf("%w: %d of them", ErrUnreadable, r.Damaged)
	}
	return r.Resealed, nil
}
