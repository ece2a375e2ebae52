package guard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Filter says which executions to list; the zero value is all of them.
type Filter struct {
	// States lists the states; none is all.
	States []State
	// Guard, Action and Method are compared as they were recorded; empty is any.
	Guard, Action, Method string
	// Caller is the hash of the caller's identity; nil is any.
	Caller *CallerHash
	// Workflow is the workflow's id; empty is any. OrWorkflows are further ids under which
	// the same workflow goes; they count with Workflow only.
	Workflow    string
	OrWorkflows []string // see Workflow
	// ID is the caller's name for the execution, and Checkpoint the id of the token that has
	// announced it; empty is any.
	ID, Checkpoint string
	// NotMethod leaves out those with this method; empty leaves out none.
	NotMethod string
	// From and To bound when the execution was claimed: at or after From, before
	// To. The zero time is no bound.
	From, To time.Time
}

// Page is a part of a listing.
type Page struct {
	// Executions, the youngest first.
	Executions []Recorded
	// Next is where the next page begins, empty after the last one. A page may hold
	// fewer executions than were asked for, even none, and still have a next one.
	Next string
}

// MaxPage is the largest number of executions on a page.
const MaxPage = 1000

// maxOpened bounds the records that are opened for a page: a filter that few of them
// pass gives short pages instead of a long wait.
const maxOpened = 5000

// ErrCursor: the text does not say where a page begins.
var ErrCursor = errors.New("guard: this is not where a page begins; give what an earlier page named as the next")

// position is an execution's place in the order of a listing.
type position struct {
	created int64
	key     Key
}

// compare orders by age, the youngest first.
func (p position) compare(q position) int {
	return cmp.Or(cmp.Compare(q.created, p.created), bytes.Compare(q.key[:], p.key[:]))
}

func (p position) String() string {
	b := binary.BigEndian.AppendUint64(nil, uint64(p.created))
	return base64.RawURLEncoding.EncodeToString(append(b, p.key[:]...))
}

func parsePosition(text string) (position, error) {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) != 8+keySize {
		return position{}, ErrCursor
	}
	return position{created: int64(binary.BigEndian.Uint64(b)), key: Key(b[8:])}, nil
}

// List returns up to limit executions that pass f, from where after says; empty is
// the beginning. Executions that begin or end meanwhile may be on no page or on two.
func (g *Guard) List(ctx context.Context, f Filter, after string, limit int) (Page, error) {
	limit = min(max(limit, 1), MaxPage)
	at := f.first()
	if after != "" {
		p, err := parsePosition(after)
		if err != nil {
			return Page{}, err
		}
		if p.compare(at) > 0 {
			at = p
		}
	}
	var page Page
	for opened := 0; opened < maxOpened; {
		n := min(max(4*limit, 64), maxOpened)
		if f.Caller != nil {
			n = maxOpened // every look at its index reads all of it
		}
		positions, err := g.positions(ctx, &f, at, n)
		if err != nil {
			return Page{}, err
		}
		for _, p := range positions {
			if p.created < f.from() {
				return page, nil
			}
			at = p
			opened++
			found, err := g.Look(ctx, p.key)
			if errors.Is(err, ErrUnknown) {
				continue
			}
			if err != nil {
				return Page{}, err
			}
			if found.Record.Created.UnixNano() == p.created && f.passes(&found) {
				page.Executions = append(page.Executions, found)
			}
			if len(page.Executions) == limit {
				page.Next = at.String()
				return page, nil
			}
		}
		if len(positions) < n {
			return page, nil
		}
	}
	page.Next = at.String()
	return page, nil
}

// first is the position in front of all that passes.
func (f *Filter) first() position {
	p := position{created: int64(^uint64(0) >> 1)}
	if !f.To.IsZero() {
		p.created = f.To.UnixNano() - 1
	}
	for i := range p.key {
		p.key[i] = 0xff
	}
	return p
}

func (f *Filter) from() int64 {
	if f.From.IsZero() {
		return 0
	}
	return f.From.UnixNano()
}

func (f *Filter) passes(r *Recorded) bool {
	record := r.Record
	return (len(f.States) == 0 || slices.Contains(f.States, r.State())) &&
		(f.Guard == "" || f.Guard == record.Guard) &&
		(f.Action == "" || f.Action == record.Action) &&
		(f.Method == "" || f.Method == record.Method) &&
		(f.Caller == nil || *f.Caller == record.Caller) &&
		(f.NotMethod == "" || f.NotMethod != record.Method) &&
		(f.ID == "" || shorten(f.ID, maxRecordedID) == record.ID) &&
		(f.Checkpoint == "" || record.Announced(f.Checkpoint)) &&
		(f.Workflow == "" || slices.Contains(f.workflows(), record.Workflow))
}

// workflows are the ids of the workflow as they were recorded.
func (f *Filter) workflows() []string {
	all := make([]string, 0, 1+len(f.OrWorkflows))
	for _, id := range append([]string{f.Workflow}, f.OrWorkflows...) {
		all = append(all, shorten(id, maxRecordedText))
	}
	return all
}

// State is the state as it is known: an execution whose owner is gone is in doubt,
// whether or not anybody has recorded that yet.
func (r *Recorded) State() State {
	if r.Standing == Doubtful {
		return StateInDoubt
	}
	return r.Record.State
}

// positions returns the n youngest executions after the given position that may pass
// f, by the index that leaves fewest.
func (g *Guard) positions(ctx context.Context, f *Filter, after position, n int) ([]position, error) {
	top := &topmost{after: after, n: n}
	var err error
	switch {
	case f.Caller != nil && f.ID != "":
		err = g.ofCaller(ctx, g.idPrefix(*f.Caller, shorten(f.ID, maxRecordedID)), top)
	case f.Caller != nil:
		err = g.ofCaller(ctx, callerPrefix(*f.Caller), top)
	case f.Workflow != "":
		for _, id := range f.workflows() {
			err = errors.Join(err, g.byAge(ctx, g.workflowPrefix(id), top))
		}
	default:
		states := f.States
		if len(states) == 0 {
			states = States()
		}
		for _, state := range states {
			err = errors.Join(err, g.byAge(ctx, []byte{spaceState, byte(state)}, top))
		}
		if slices.Contains(states, StateInDoubt) && !slices.Contains(states, StateSending) {
			// Those whose owner is gone count as in doubt.
			err = errors.Join(err, g.byAge(ctx, []byte{spaceState, byte(StateSending)}, top))
		}
		return top.sorted(), err
	}
	for _, state := range []State{StateClaimed, StateSending} {
		err = errors.Join(err, g.byAge(ctx, []byte{spaceState, byte(state)}, top))
	}
	return top.sorted(), err
}

// byAge reads an index whose entries are ordered by age.
func (g *Guard) byAge(ctx context.Context, prefix []byte, top *topmost) error {
	r := store.Prefix(prefix)
	r.Reverse, r.Limit = true, top.n
	end := binary.BigEndian.AppendUint64(bytes.Clone(prefix), uint64(top.after.created))
	r.To = append(end, top.after.key[:]...)
	for entry, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		top.add(position{created: createdIn(entry.Key), key: keyIn(entry.Key)})
	}
	return nil
}

// ofCaller reads the index of a caller, or of an id of its, which is ordered by id.
func (g *Guard) ofCaller(ctx context.Context, prefix []byte, top *topmost) error {
	for entry, err := range g.store.Scan(ctx, store.Prefix(prefix)) {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		a, err := decodeAccount(entry.Value)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		top.add(position{created: a.created.UnixNano(), key: keyIn(entry.Key)})
	}
	return nil
}

// topmost keeps the first n positions after one, in memory for about twice as many.
type topmost struct {
	after position
	n     int
	kept  []position
}

func (t *topmost) add(p position) {
	if p.compare(t.after) <= 0 {
		return
	}
	t.kept = append(t.kept, p)
	if len(t.kept) >= 2*t.n {
		t.kept = t.sorted()
	}
}

// sorted returns the first n, each once.
func (t *topmost) sorted() []position {
	slices.SortFunc(t.kept, position.compare)
	t.kept = slices.CompactFunc(t.kept, func(p, q position) bool { return p == q })
	return t.kept[:min(len(t.kept), t.n)]
}
