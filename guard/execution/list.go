package execution

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Filter selects executions; the zero value selects all.
type Filter struct {
	// States lists the states; none is all.
	States []State
	// Guard, Action and Method as they were recorded; empty is any.
	Guard, Action, Method string
	// Caller is the beginning of the hash of the caller's identity, at most 16 bytes; nil is any.
	Caller []byte
	// Workflow is the workflow's id; empty is any. OrWorkflows are its other ids; they count with
	// Workflow only.
	Workflow    string
	OrWorkflows []string // see Workflow
	// ID is the caller's name for the execution, Checkpoint the id of the token that announced
	// it; empty is any.
	ID, Checkpoint string
	// NotMethod excludes a method; empty excludes none.
	NotMethod string
	// From and To bound the time of the claim: at or after From, before To. Zero is no bound.
	From, To time.Time
}

// Page is a part of a listing.
type Page struct {
	// Executions, the youngest first.
	Executions []Recorded
	// Next is where the next page begins; empty after the last. A page may have fewer executions
	// than asked for, even none, and still a next page.
	Next string
}

// MaxPage is the largest number of executions on a page.
const MaxPage = 1000

// maxOpened bounds the records opened for a page: a selective filter gives short pages instead of
// long waits.
const maxOpened = 5000

// ErrCursor: the text is not a page's beginning.
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

// List returns up to limit executions that pass f, from after on; empty is the beginning.
// Executions that begin or end meanwhile may be on no page or on two.
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
			found, err := g.get(ctx, p.key, false) // many outcomes may be pending
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

// first is the position before all that passes.
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
		bytes.HasPrefix(record.Caller[:], f.Caller) &&
		(f.NotMethod == "" || f.NotMethod != record.Method) &&
		(f.ID == "" || shorten(f.ID, maxRecordedID) == record.ID) &&
		(f.Checkpoint == "" || record.Announced(f.Checkpoint)) &&
		(f.Workflow == "" || slices.Contains(f.workflows(), record.Workflow))
}

func (f *Filter) workflows() []string {
	all := make([]string, 0, 1+len(f.OrWorkflows))
	for _, id := range append([]string{f.Workflow}, f.OrWorkflows...) {
		all = append(all, shortText(id))
	}
	return all
}

// State returns the state. An execution whose owner is gone is in doubt, even if that is not
// recorded yet.
func (r *Recorded) State() State {
	if r.Status == Doubtful {
		return StateInDoubt
	}
	return r.Record.State
}

// positions returns the n youngest executions after the given position that may pass f, by the
// most selective index.
func (g *Guard) positions(ctx context.Context, f *Filter, after position, n int) ([]position, error) {
	top := &topmost{after: after, n: n}
	var err error
	switch {
	case len(f.Caller) == len(CallerHash{}) && f.ID != "":
		err = g.ofCaller(ctx, g.idPrefix(CallerHash(f.Caller), shorten(f.ID, maxRecordedID)), top)
	case f.Caller != nil:
		err = g.ofCaller(ctx, append([]byte{spaceCaller}, f.Caller...), top)
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
			// Executions whose owner is gone count as in doubt.
			err = errors.Join(err, g.byAge(ctx, []byte{spaceState, byte(StateSending)}, top))
		}
		return top.sorted(), err
	}
	err = errors.Join(err, g.byAge(ctx, []byte{spaceState, byte(StateSending)}, top))
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

// ofCaller reads the index of a caller, or of one of its ids; it is ordered by id.
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

// topmost keeps the first n positions after one; its memory holds about twice as many.
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

// Recorded is one execution as operators and inquiring callers see it.
type Recorded struct {
	Key Key
	Finding
}

// Shown is what its caller and operators see of an execution; operators see more. Its members are an API. Nothing of
// the request but its line is in it, and nothing of an answer but its status (P3, P8).
type Shown struct {
	// Key is the execution key in hexadecimal; logs show its first 16 digits.
	Key string `json:"key"`
	// State is a word of State, or for operators that of a free key.
	State string `json:"state"`
	// Action is the action's configured name.
	Action string `json:"action,omitempty"`
	Method string `json:"method,omitempty"`
	// Path is without the query, which is not recorded.
	Path string `json:"path,omitempty"`
	// WorkflowName is what the caller named the workflow, if anything.
	WorkflowName string `json:"workflow_name,omitempty"`
	// Cause is why the execution is in doubt.
	Cause string `json:"cause,omitempty"`
	// Created is when the call was claimed.
	Created time.Time `json:"created,omitzero"`
	// Deadline is when the execution ends at the latest. Callers see it while it runs.
	Deadline time.Time `json:"deadline,omitzero"`
	// Settled is when the outcome was recorded.
	Settled time.Time `json:"settled,omitzero"`
	// Status is that of the upstream's answer, or of the one that an operator supplied; 0 without one.
	Status int `json:"status,omitempty"`
	// Result describes the answer of a completed execution.
	Result *ShownResult `json:"result,omitempty"`
}

// ShownResult describes a recorded answer.
type ShownResult struct {
	// Kept says that the answer was recorded: it may have been too large.
	Kept bool `json:"kept"`
	// Expires is the time until which the answer can be replayed.
	Expires time.Time `json:"expires,omitzero"`
}

// Show is the execution as it is shown.
func (r *Recorded) Show() Shown {
	record := r.Record
	s := Shown{
		Key: r.Key.Hex(), State: r.State().String(), Action: record.Action, Method: record.Method, Path: record.Path,
		WorkflowName: record.Workflow, Created: record.Created.UTC(), Deadline: record.Deadline.UTC(),
		Settled: record.Settled.UTC(), Status: record.Status,
	}
	switch r.State() {
	case StateInDoubt: // other outcomes have a cause too, but only doubts show it
		s.Cause = string(record.Cause)
	case StateCompleted:
		s.Result = &ShownResult{Kept: record.Result.Kept}
		if s.Result.Kept { // or it is that of pieces that are left
			s.Result.Expires = record.Result.Expires.UTC()
		}
	}
	return s
}

// Errors of Expand.
var (
	// ErrUnknown: no execution is recorded under this key.
	ErrUnknown = errors.New("guard: no such execution")
	// ErrAmbiguous: more than one key begins like this.
	ErrAmbiguous = errors.New("guard: more than one execution's key begins like this; give more digits")
	// ErrKeyForm: the text is no key.
	ErrKeyForm = errors.New("guard: a key has 4 to 64 hexadecimal digits")
)

// minPrefix is the smallest number of digits that Expand takes.
const minPrefix = 4

// Get returns what is recorded under key, whatever the fingerprint, or ErrUnknown.
func (g *Guard) Get(ctx context.Context, key Key) (Recorded, error) { return g.get(ctx, key, true) }

func (g *Guard) get(ctx context.Context, key Key, tries bool) (Recorded, error) {
	record, _, err := g.load(ctx, key)
	if err != nil {
		return Recorded{}, err
	}
	if record == nil {
		return Recorded{}, ErrUnknown
	}
	found, err := g.lookUp(ctx, key, record.Fingerprint, false, tries)
	if err != nil {
		return Recorded{}, err
	}
	switch found.Status {
	case Free, Mismatch: // it was released in between, and perhaps used anew
		return Recorded{}, ErrUnknown
	case RunningHere:
		found.Record = record
	}
	return Recorded{Key: key, Finding: found}, nil
}

// Expand returns the one recorded key that begins with these hexadecimal digits; if there is
// none, one that is free and was resolved once.
func (g *Guard) Expand(ctx context.Context, prefix string) (Key, error) {
	if len(prefix) < minPrefix || len(prefix) > 2*keySize {
		return Key{}, ErrKeyForm
	}
	from, err := hex.DecodeString(prefix + strings.Repeat("0", len(prefix)%2))
	if err != nil {
		return Key{}, ErrKeyForm
	}
	to, err := hex.DecodeString(prefix + strings.Repeat("f", len(prefix)%2))
	if err != nil {
		return Key{}, ErrKeyForm
	}
	key, err := g.expand(ctx, spaceRecord, from, to, keyIn)
	if errors.Is(err, ErrUnknown) {
		key, err = g.expand(ctx, spaceResolved, from, to, func(name []byte) Key { return Key(name[1 : 1+keySize]) })
	}
	return key, err
}

// expand returns the one key between from and to in a space of the store.
func (g *Guard) expand(ctx context.Context, space byte, from, to []byte, keyOf func(name []byte) Key) (Key, error) {
	r := store.Range{From: append([]byte{space}, from...), To: store.Prefix(append([]byte{space}, to...)).To}
	var key Key
	found := false
	for entry, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return Key{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
		next := keyOf(entry.Key)
		if found && next != key {
			return Key{}, ErrAmbiguous
		}
		key, found = next, true
	}
	if !found {
		return Key{}, ErrUnknown
	}
	return key, nil
}

// ByID returns the executions that caller named id: several if it used the id for different
// methods, paths or guards; at most a thousand settled ones. Another caller's are not found, and
// the look-up takes the same way as for an unknown id (P3).
func (g *Guard) ByID(ctx context.Context, caller CallerHash, id string) ([]Recorded, error) {
	mine := func(r *Record) bool { return r.Caller == caller && r.ID == shorten(id, maxRecordedID) }
	prefix := g.idPrefix(caller, id)
	settled, err := g.keysUnder(ctx, prefix)
	if err != nil {
		return nil, err
	}
	open, err := g.openKeys(ctx, func(f *Flight) bool { return f.caller == caller && f.id == id })
	if err != nil {
		return nil, err
	}
	// Read again: an open execution may have been settled between the two reads. One in doubt may
	// run again, so the first read is needed too.
	since, err := g.keysUnder(ctx, prefix)
	if err != nil {
		return nil, err
	}
	keys := slices.Concat(settled, open, since)
	var all []Recorded
	seen := make(map[Key]bool, len(keys))
	for _, key := range keys {
		if seen[key] {
			continue
		}
		seen[key] = true
		found, err := g.Get(ctx, key)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if mine(found.Record) {
			all = append(all, found)
		}
	}
	return all, nil
}

// Knows reports whether caller has a recorded execution that ended or runs here. Released ones do
// not count.
func (g *Guard) Knows(ctx context.Context, caller CallerHash) (bool, error) {
	if g.flights.of(caller) {
		return true, nil
	}
	r := store.Prefix(callerPrefix(caller))
	r.Limit = 1
	for _, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrStore, err)
		}
		return true, nil
	}
	return false, nil
}

// maxNamed bounds the settled executions of ByID.
const maxNamed = 1000

// keysUnder lists the keys in an index whose entries begin with prefix, up to maxNamed.
func (g *Guard) keysUnder(ctx context.Context, prefix []byte) ([]Key, error) {
	var keys []Key
	r := store.Prefix(prefix)
	r.Limit = maxNamed
	for entry, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		keys = append(keys, keyIn(entry.Key))
	}
	return keys, nil
}

// openKeys lists the keys of executions that have not ended, by the index by state: those that
// run here and pass the filter, and all others.
func (g *Guard) openKeys(ctx context.Context, here func(*Flight) bool) ([]Key, error) {
	var keys []Key
	for entry, err := range g.store.Scan(ctx, store.Prefix([]byte{spaceState, byte(StateSending)})) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		key := keyIn(entry.Key)
		if f := g.flights.find(key); f == nil || here(f) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

const maxDoubts = 100_000

// Doubts counts the executions in doubt, up to 100,000, and says when the oldest was claimed;
// zero without one. It reads index keys only, oldest first.
//
// An execution whose outcome the store refused is not counted before the store is reopened: until
// then its index entry says that it runs.
func (g *Guard) Doubts(ctx context.Context) (n int, oldest time.Time, err error) {
	prefix := []byte{spaceState, byte(StateInDoubt)}
	within := store.Prefix(prefix)
	within.Limit = maxDoubts
	for entry, err := range g.store.Scan(ctx, within) {
		if err != nil {
			return 0, time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if n == 0 {
			created := binary.BigEndian.Uint64(entry.Key[len(prefix):])
			oldest = time.Unix(0, int64(created))
		}
		n++
	}
	return n, oldest, nil
}

// Count is how many executions there are of one kind.
type Count struct {
	N int `json:"count"`
	// More says that there are more than N: the counting stopped there.
	More bool `json:"at_least,omitempty"`
	// Oldest is when the first of them was claimed; the zero time without one.
	Oldest time.Time `json:"oldest,omitzero"`
}

func (c *Count) add(created time.Time) {
	if c.N == 0 || created.Before(c.Oldest) {
		c.Oldest = created
	}
	c.N++
}

// Tally counts the executions in each state, up to most of each, by the index. As in List, one
// whose owner is gone counts as in doubt.
func (g *Guard) Tally(ctx context.Context, most int) (map[State]Count, error) {
	all := make(map[State]Count, len(States()))
	var orphans []time.Time
	for _, state := range States() {
		var c Count
		r := store.Prefix([]byte{spaceState, byte(state)})
		r.Limit = most + 1
		for entry, err := range g.store.Scan(ctx, r) {
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			}
			if c.N == most {
				c.More = true
				break
			}
			created := time.Unix(0, createdIn(entry.Key))
			if state.open() && g.flights.find(keyIn(entry.Key)) == nil {
				is, err := g.stateOf(ctx, keyIn(entry.Key))
				switch {
				case err != nil:
					return nil, err
				case is == StateInDoubt:
					orphans = append(orphans, created)
					continue
				case is != state: // it has ended in between
					continue
				}
			}
			c.add(created)
		}
		all[state] = c
	}
	doubts := all[StateInDoubt]
	for _, created := range orphans {
		doubts.add(created)
	}
	all[StateInDoubt] = doubts
	return all, nil
}

// stateOf is the state as a listing shows it; zero where nothing is recorded.
func (g *Guard) stateOf(ctx context.Context, key Key) (State, error) {
	found, err := g.Get(ctx, key)
	if errors.Is(err, ErrUnknown) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return found.State(), nil
}
