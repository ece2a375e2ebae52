package execution

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Quota bounds what one caller may hold in the store at a time, so that a flood of
// one does not become an outage of all. A zero member is no bound.
type Quota struct {
	// Open is the largest number of executions that run or are in doubt.
	Open int
	// Bytes is the largest size of a caller's records and answers. It is looked at
	// before a call is claimed; the answer of a call that runs is kept whatever its
	// size, so the bound may be passed by the answers of the open executions.
	Bytes int64
}

func (q Quota) none() bool { return q.Open <= 0 && q.Bytes <= 0 }

// QuotaError refuses a claim. Nothing was recorded of it.
type QuotaError struct {
	// Open and Bytes are what the caller holds; Doubts of Open are in doubt.
	Open   int
	Doubts int
	Bytes  int64
	Quota  Quota
	// Retry is when, at the earliest, it holds less by expiry alone; zero where the
	// end of open executions is what to wait for.
	Retry time.Time
}

func (e *QuotaError) Error() string {
	if e.Quota.Open > 0 && e.Open >= e.Quota.Open {
		return fmt.Sprintf("guard: the caller has %d open executions, at most %d", e.Open, e.Quota.Open)
	}
	return fmt.Sprintf("guard: the caller has %d bytes stored, at most %d", e.Bytes, e.Quota.Bytes)
}

// usages is what the callers hold that were bounded of late. What is not in it is
// counted from the index of the caller's executions.
type usages struct {
	mu sync.Mutex
	m  map[CallerHash]*usage
}

// maxUsages is how many callers are remembered; beyond it, idle ones are forgotten.
const maxUsages = 10_000

// usage is what one caller holds.
type usage struct {
	users int // who enter or have entered; guarded by usages.mu

	mu      sync.Mutex
	counted bool
	running int
	doubts  int
	bytes   int64
	expiry  map[int64]int64 // bytes by the end of the window in which they expire
	soonest int64           // the first of these ends; 0 without one
}

// How exactly expiring bytes are remembered: by windows of a 64th to a 32nd of the time
// that is left, so that there are few of them however long a key is kept.
const (
	leastWindow = 10 * time.Minute
	windows     = 64
)

// of returns the usage of caller, which is not forgotten until it is given back.
func (u *usages) of(caller CallerHash) *usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.m == nil {
		u.m = map[CallerHash]*usage{}
	}
	held := u.m[caller]
	if held == nil {
		if len(u.m) >= maxUsages {
			u.forget()
		}
		held = &usage{expiry: map[int64]int64{}}
		u.m[caller] = held
	}
	held.users++
	return held
}

func (u *usages) giveBack(held *usage) {
	u.mu.Lock()
	defer u.mu.Unlock()
	held.users--
}

// forget drops the callers who run nothing, with mu held.
func (u *usages) forget() {
	for caller, held := range u.m {
		if held.users == 0 {
			delete(u.m, caller)
		}
	}
}

// known returns the usage of caller if it is remembered.
func (u *usages) known(caller CallerHash) *usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.m[caller]
}

// admit enters an execution of caller, or returns a QuotaError. One that runs again is
// counted already, as a doubt, and always admitted: else a caller full of doubts could
// settle none of them. The usage that it got must be left again; it is nil where there
// is no quota, and nothing is remembered of the caller from when there was one.
func (g *Guard) admit(ctx context.Context, caller CallerHash, q Quota, now time.Time, again bool) (*usage, error) {
	if q.none() && g.usages.known(caller) == nil {
		return nil, nil
	}
	if again {
		q = Quota{}
	}
	u := g.usages.of(caller)
	err := u.check(ctx, g, caller, q, now)
	if err != nil {
		g.usages.giveBack(u)
		return nil, err
	}
	return u, nil
}

func (u *usage) check(ctx context.Context, g *Guard, caller CallerHash, q Quota, now time.Time) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.counted {
		// Where that is much it takes long, and is not begun anew because a client has left.
		if err := u.count(context.WithoutCancel(ctx), g, caller, now); err != nil {
			return err
		}
	}
	retry := u.expire(now)
	open := u.running + u.doubts
	switch {
	case q.Open > 0 && open >= q.Open:
		return &QuotaError{Open: open, Doubts: u.doubts, Bytes: u.bytes, Quota: q}
	case q.Bytes > 0 && u.bytes >= q.Bytes:
		return &QuotaError{Open: open, Doubts: u.doubts, Bytes: u.bytes, Quota: q, Retry: retry}
	}
	u.running++
	return nil
}

// count reads what caller holds from the index, once, with mu held: those who come
// at the same time wait for it.
func (u *usage) count(ctx context.Context, g *Guard, caller CallerHash, now time.Time) error {
	u.doubts, u.bytes, u.soonest = 0, 0, 0
	clear(u.expiry)
	for entry, err := range g.store.Scan(ctx, store.Prefix(callerPrefix(caller))) {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		a, err := decodeAccount(entry.Value)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		u.add(a, now, entry.Expires)
	}
	u.counted = true
	return nil
}

// add counts an execution that is settled and whose record expires at the given time.
func (u *usage) add(a account, now, expires time.Time) {
	if a.state == StateInDoubt {
		u.doubts++
	}
	u.keep(a.record, now, expires)
	if a.result > 0 {
		u.keep(a.result, now, a.resultExpires)
	}
}

func (u *usage) keep(bytes int64, now, expires time.Time) {
	u.bytes += bytes
	if expires.IsZero() {
		return
	}
	window := leastWindow
	for window < expires.Sub(now)/windows {
		window *= 2
	}
	at := expires.UnixNano()
	end := at - at%int64(window) + int64(window)
	u.expiry[end] += bytes
	if u.soonest == 0 || end < u.soonest {
		u.soonest = end
	}
}

// expire forgets what has expired and returns when the next does; the zero time where
// nothing will.
func (u *usage) expire(now time.Time) (next time.Time) {
	if u.soonest != 0 && u.soonest <= now.UnixNano() {
		u.soonest = 0
		for end, bytes := range u.expiry {
			if end <= now.UnixNano() {
				u.bytes -= bytes
				delete(u.expiry, end)
			} else if u.soonest == 0 || end < u.soonest {
				u.soonest = end
			}
		}
	}
	if u.soonest == 0 {
		return time.Time{}
	}
	return time.Unix(0, u.soonest)
}

// settled counts what is recorded of an execution that was admitted to u.
func (u *usage) settled(r *Record) {
	if u == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.counted {
		u.add(accountOf(r, r.size()), r.Settled, r.expires())
	}
}

// leave ends an execution that was admitted to u.
func (g *Guard) leave(u *usage) {
	if u == nil {
		return
	}
	u.mu.Lock()
	u.running--
	u.mu.Unlock()
	g.usages.giveBack(u)
}

// resolved counts that a doubt of r's caller was settled, or is run again. Next is
// what is recorded now; nil where that is not in the index.
func (g *Guard) resolved(r, next *Record) {
	u := g.usages.known(r.Caller)
	if u == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.counted {
		return
	}
	u.doubts = max(u.doubts-1, 0)
	u.bytes = max(u.bytes-int64(r.size()), 0)
	if next != nil {
		u.add(accountOf(next, next.size()), next.Settled, next.expires())
	}
}

// account is what an index entry tells of a settled execution, so that counting a
// caller's needs no record to be opened. Nothing in it is the caller's.
type account struct {
	state   State
	created time.Time
	// record and result are bytes: of the record before it is sealed, until the
	// entry itself expires, and of the answer beside it, until resultExpires.
	record, result int64
	resultExpires  time.Time
}

func accountOf(r *Record, record int) account {
	a := account{state: r.State, created: r.Created, record: int64(record), result: r.Result.Size}
	if a.result > 0 {
		a.resultExpires = r.Result.Expires
	}
	return a
}

// The tags of an account's fields, under the rules of a record's.
const (
	tagAccountState = 1 + iota
	tagAccountCreated
	tagAccountRecord
	tagAccountResult
	tagAccountResultExpires
)

func (a account) encode() []byte {
	e := encoder{make([]byte, 0, 48)}
	e.int(tagAccountState, int64(a.state))
	e.time(tagAccountCreated, a.created)
	e.int(tagAccountRecord, a.record)
	e.int(tagAccountResult, a.result)
	e.time(tagAccountResultExpires, a.resultExpires)
	return e.b
}

func decodeAccount(b []byte) (account, error) {
	var a account
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagAccountState:
			a.state = State(d.int())
		case tagAccountCreated:
			a.created = d.time()
		case tagAccountRecord:
			a.record = d.int()
		case tagAccountResult:
			a.result = d.int()
		case tagAccountResultExpires:
			a.resultExpires = d.time()
		}
	}
	return a, d.err
}

// Count is how many executions there are of one kind.
type Count struct {
	N int
	// More says that there are more than N: the counting stopped there.
	More bool
	// Oldest is when the first of them was claimed; the zero time without one.
	Oldest time.Time
}

func (c *Count) add(created time.Time) {
	if c.N == 0 || created.Before(c.Oldest) {
		c.Oldest = created
	}
	c.N++
}

// Tally counts the executions in each state, up to most of each, by the index. One
// whose owner is gone counts as in doubt, as List has it.
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
			if state.Open() && g.flights.find(keyIn(entry.Key)) == nil {
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

// Node is the name of this gateway, kept with its store.
func (g *Guard) Node() string { return g.node }

// Boot is the name of this life of the gateway.
func (g *Guard) Boot() string { return g.boot }
