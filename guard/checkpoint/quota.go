package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Quota bounds what stands of one workflow or one caller at a time, so that nobody can
// fill the store with checkpoints (cascade 6.3). A zero member is no bound. Living
// checkpoints are never given up for new ones (cascade 4.2.2). Who has no bound is not
// counted, so that a new one counts what is made from then on.
type Quota struct {
	// Count is the largest number of checkpoints.
	Count int
	// Bytes is the largest size of their snapshots, recorded credentials and results.
	// It is looked at before a call leaves; a large result is kept all the same.
	Bytes int64
}

// The words of a QuotaError.
const (
	OfWorkflow = "workflow"
	OfCaller   = "caller"
	OverCount  = "count"
	OverBytes  = "bytes"
	OverRate   = "rate"
)

// QuotaError refuses a checkpoint, and with it the call. Nothing was recorded.
type QuotaError struct {
	// Of is whose bound it is, OfWorkflow or OfCaller; Over says which, OverCount,
	// OverBytes or OverRate.
	Of, Over string
	// Most is the bound.
	Most int64
	// Retry is when, at the earliest, there is room again; zero where nothing that
	// stands expires.
	Retry time.Time
}

func (e *QuotaError) Error() string {
	switch e.Over {
	case OverRate:
		return fmt.Sprintf("checkpoint: the %s makes more than %d checkpoints in a minute", e.Of, e.Most)
	case OverCount:
		return fmt.Sprintf("checkpoint: the %s has %d checkpoints standing already", e.Of, e.Most)
	default:
		return fmt.Sprintf("checkpoint: the %s would have more than %d bytes of checkpoints", e.Of, e.Most)
	}
}

// bounds are what one scope is held to.
type bounds struct {
	of string
	Quota
	rate int
}

func (b bounds) none() bool { return b.Count <= 0 && b.Bytes <= 0 && b.rate <= 0 }

// of is what t holds a kind of scope to.
func (t *Terms) of(kind byte) bounds {
	if kind == kindWorkflow {
		return bounds{of: OfWorkflow, Quota: t.Workflow, rate: t.Rate}
	}
	return bounds{of: OfCaller, Quota: t.Caller}
}

// scopes are those that s counts in: with a bound of their own, so that nothing is written
// for the others.
func (v *Store) scopes(s *Snapshot, counted func(kind byte) bool) []scope {
	var found []scope
	if counted(kindCaller) {
		found = append(found, scope{kind: kindCaller, hash: s.Caller})
	}
	if s.Workflow != "" && counted(kindWorkflow) {
		sum := v.sealer.Index("checkpoints of workflow", s.Workflow)
		found = append(found, scope{kind: kindWorkflow, hash: [16]byte(sum[:16])})
	}
	return found
}

// reservation is room for a checkpoint that waits for its commit.
type reservation struct {
	v     *Store
	h     *Handle
	taken []room
}

// room is what was taken in one scope.
type room struct {
	u       *usage
	until   time.Time // expiry of the note that is written with it; zero without one
	counted bool      // u holds it already
	rated   bool      // the rate was drawn on
}

// reserve takes room for the checkpoint in all of its scopes, or in none.
func (v *Store) reserve(ctx context.Context, h *Handle, t *Terms, now time.Time) (*reservation, error) {
	r := &reservation{v: v, h: h}
	for _, s := range h.scopes {
		u := v.usages.of(s)
		taken, err := u.reserve(ctx, v, h, t.of(s.kind), now)
		if err != nil {
			v.usages.giveBack(u)
			r.ended(err)
			return nil, err
		}
		r.taken = append(r.taken, taken)
	}
	return r, nil
}

// notes are the writes that tell a later life where to count.
func (r *reservation) notes() []store.Write {
	var writes []store.Write
	for _, t := range r.taken {
		if !t.until.IsZero() {
			writes = append(writes, store.Write{Key: t.u.scope.note(), Expires: t.until})
		}
	}
	return writes
}

// ended counts what came of the commit. What may have landed counts as if it had: less
// is admitted, never more.
func (r *reservation) ended(err error) {
	for _, t := range r.taken {
		t.ended(r.h, err)
		r.v.usages.giveBack(t.u)
	}
}

// charge changes what a standing checkpoint counts for.
func (v *Store) charge(h Handle, n int, bytes int64) {
	for _, s := range h.scopes {
		if u := v.usages.known(s); u != nil {
			u.add(&h, n, bytes)
		}
	}
}

// usages is what the workflows and callers hold that have made checkpoints of late. What
// is not in it is counted from the index, so that a crash forgets nothing.
type usages struct {
	mu sync.Mutex
	m  map[scope]*usage
}

// maxUsages is how many are remembered; beyond it, idle ones are forgotten.
const maxUsages = 10_000

// tally is a number of checkpoints and their bytes.
type tally struct {
	n     int
	bytes int64
}

// usage is what one workflow or caller holds.
type usage struct {
	scope scope
	users int // who have reserved and not ended; guarded by usages.mu

	mu      sync.Mutex
	loaded  bool      // noted is known
	noted   time.Time // until when the store says that the index may hold something
	counted bool      // held has what the index holds
	held    tally
	expiry  map[int64]tally // by the end of the window in which they expire
	soonest int64           // the first of these ends; 0 without one

	// ready is when the bucket of the rate is full again, and interval the time in
	// which it gains one.
	ready    time.Time
	interval time.Duration
}

func (u *usages) of(s scope) *usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.m == nil {
		u.m = map[scope]*usage{}
	}
	held := u.m[s]
	if held == nil {
		if len(u.m) >= maxUsages {
			u.forget()
		}
		held = &usage{scope: s, expiry: map[int64]tally{}}
		u.m[s] = held
	}
	held.users++
	return held
}

func (u *usages) giveBack(held *usage) {
	u.mu.Lock()
	defer u.mu.Unlock()
	held.users--
}

// forget drops those for whom nothing waits for its commit, with mu held.
func (u *usages) forget() {
	for s, held := range u.m {
		if held.users == 0 {
			delete(u.m, s)
		}
	}
}

func (u *usages) known(s scope) *usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.m[s]
}

// reserve takes room for the checkpoint, or returns a QuotaError.
func (u *usage) reserve(ctx context.Context, v *Store, h *Handle, b bounds, now time.Time) (room, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err := u.load(ctx, v); err != nil {
		return room{}, err
	}
	if !u.counted {
		// Where that is much it takes long, and is not begun anew because a client has left.
		if err := u.count(context.WithoutCancel(ctx), v, b.rate); err != nil {
			return room{}, err
		}
	}
	over := &QuotaError{Of: b.of, Retry: u.expire(now)}
	ready := u.ready
	if b.rate > 0 {
		ready = u.next(b.rate, now)
	}
	switch {
	case b.Count > 0 && u.held.n >= b.Count:
		over.Over, over.Most = OverCount, int64(b.Count)
		return room{}, over
	case b.Bytes > 0 && u.held.bytes+h.charge > b.Bytes:
		over.Over, over.Most = OverBytes, b.Bytes
		return room{}, over
	case b.rate > 0 && ready.Sub(now) > time.Minute:
		over.Over, over.Most, over.Retry = OverRate, int64(b.rate), ready.Add(-time.Minute)
		return room{}, over
	}
	taken := room{u: u, counted: u.counted, rated: b.rate > 0}
	u.ready = ready
	if u.counted {
		u.keep(windowEnd(h.created, h.expires), tally{1, h.charge})
	}
	if u.noted.Before(h.expires) {
		taken.until = h.expires.Add(h.expires.Sub(h.created) / 4) // so that few have to write it
	}
	return taken, nil
}

// ended counts what came of the commit that the room was taken for.
func (t *room) ended(h *Handle, err error) {
	u := t.u
	u.mu.Lock()
	defer u.mu.Unlock()
	end := windowEnd(h.created, h.expires)
	switch {
	case err == nil || errors.Is(err, store.ErrUnknown):
		if err == nil && !t.until.IsZero() {
			u.noted = t.until
		}
		if u.counted && !t.counted { // it may be counted twice, until it expires
			u.keep(end, tally{1, h.charge})
		}
	default:
		if t.counted && u.expiry[end].n > 0 {
			u.keep(end, tally{-1, -h.charge})
		}
		if t.rated {
			u.ready = u.ready.Add(-u.interval)
		}
	}
}

// next is when the bucket is full again if one more is taken now.
func (u *usage) next(rate int, now time.Time) time.Time {
	u.interval = time.Minute / time.Duration(rate)
	from := u.ready
	if from.Before(now) {
		from = now
	}
	return from.Add(u.interval)
}

// load asks the store whether the index may hold something: of most workflows it does
// not, and a scan would cost the store much more than this.
func (u *usage) load(ctx context.Context, v *Store) error {
	if u.loaded {
		return nil
	}
	entry, err := v.store.Get(ctx, u.scope.note())
	switch {
	case errors.Is(err, store.ErrNotFound):
		u.counted = true
	case err != nil:
		return fmt.Errorf("%w: %w", ErrStore, err)
	default:
		u.noted = entry.Expires
	}
	u.loaded = true
	return nil
}

// count reads what stands from the index, once, with mu held: those who come at the
// same time wait for it.
func (u *usage) count(ctx context.Context, v *Store, rate int) error {
	var found []account
	var expires []time.Time
	for entry, err := range v.store.Scan(ctx, store.Prefix(u.scope.prefix())) {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		a, err := decodeAccount(entry.Value)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		found, expires = append(found, a), append(expires, entry.Expires)
	}
	for i, a := range found {
		u.keep(windowEnd(a.created, expires[i]), tally{1, a.bytes})
	}
	if rate > 0 {
		slices.SortFunc(found, func(a, b account) int { return a.created.Compare(b.created) })
		for _, a := range found {
			u.ready = u.next(rate, a.created)
		}
	}
	u.counted = true
	return nil
}

// add changes what a checkpoint that is counted already counts for.
func (u *usage) add(h *Handle, n int, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	// What has expired is not counted any more, nor is anything before the index was.
	if end := windowEnd(h.created, h.expires); u.expiry[end].n > 0 {
		u.keep(end, tally{n, bytes})
	}
}

func (u *usage) keep(end int64, t tally) {
	u.held.n += t.n
	u.held.bytes += t.bytes
	at := u.expiry[end]
	at.n += t.n
	at.bytes += t.bytes
	if at.n <= 0 {
		u.held.bytes -= at.bytes
		delete(u.expiry, end)
		return
	}
	u.expiry[end] = at
	if u.soonest == 0 || end < u.soonest {
		u.soonest = end
	}
}

// windows is into how many parts the life of a checkpoint is divided for remembering
// when it ends, so that there are few of them whatever its ttl.
const windows = 64

// windowEnd is the end of the window in which something expires: the same whenever it
// is asked.
func windowEnd(created, expires time.Time) int64 {
	window := time.Second
	for window < expires.Sub(created)/windows {
		window *= 2
	}
	at := expires.UnixNano()
	return at - at%int64(window) + int64(window)
}

// expire forgets what has expired and returns when the next does; the zero time where
// nothing will.
func (u *usage) expire(now time.Time) (next time.Time) {
	if u.soonest != 0 && u.soonest <= now.UnixNano() {
		u.soonest = 0
		for end, t := range u.expiry {
			if end <= now.UnixNano() {
				u.held.n -= t.n
				u.held.bytes -= t.bytes
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

// account is what an index entry tells of a standing checkpoint, so that counting opens
// no snapshot. Nothing in it is a caller's.
type account struct {
	created time.Time
	bytes   int64
}

const (
	tagAccountCreated = 1 + iota
	tagAccountBytes
)

func (a account) encode() []byte {
	e := encoder{make([]byte, 0, 24)}
	e.time(tagAccountCreated, a.created)
	e.int(tagAccountBytes, a.bytes)
	return e.b
}

func decodeAccount(b []byte) (account, error) {
	var a account
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagAccountCreated:
			a.created = d.time()
		case tagAccountBytes:
			a.bytes = d.int()
		}
	}
	return a, d.err
}
