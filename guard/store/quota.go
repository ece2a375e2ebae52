package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Counter counts what each holder, such as a caller or a workflow, has in a store, and keeps it within a limit. A count
// may be too high, never too low: an amount is set aside before its commit, and nothing is subtracted when an entry is
// removed or replaced. The counter reads the store anew before it refuses for that reason, and after a crash.
//
// Several gateways that share a store keep within the limit together, without a word between them for most additions:
// each member has a cap of its own on what it has added and still stands, and all caps together, with what stands of
// members that are gone, are never more than the limit (ADR 0137). Rates are not bounded so.
//
// Set the exported fields, and call Use first.
type Counter[S any] struct {
	// Window is the longest that an entry counts after its expiry, or a 32nd of its life if that is longer. It must be
	// more than zero.
	Window time.Duration
	// Caps begins the keys of the records of caps; the holder ends them.
	Caps []byte
	// Read calls add with what stands of a holder. It runs under the holder's lock, and forgets what of Lost the store
	// has again.
	Read func(ctx context.Context, h *Held[S], add Stands) error
	// Left makes what a member that is gone has left behind countable; nil where it is.
	Left func(ctx context.Context, boot string) error
	// Failed is the owner's error for a store that does not answer. It is wrapped around the cause.
	Failed error

	store  Store
	shared Shared // nil where one gateway has the store
	boot   string // of this member
	caps   Table[capsRecord]

	mu  sync.Mutex
	all map[Holder]*Held[S]
}

// Stands counts a stored entry for the member with the boot that added it, until the entry expires; the zero time
// is never.
type Stands func(boot string, a Amount, created, expires time.Time)

// Holder names a holder: a byte that says of what kind it is, and a keyed hash.
type Holder [17]byte

// HolderOf is the holder of a kind with a hash.
func HolderOf(kind byte, hash [16]byte) Holder {
	return Holder(append([]byte{kind}, hash[:]...))
}

// Amount is a number of entries and their size.
type Amount struct {
	N     int   `json:"n,omitempty"`
	Bytes int64 `json:"bytes,omitempty"`
}

func (a Amount) plus(b Amount) Amount { return Amount{a.N + b.N, a.Bytes + b.Bytes} }

func (a Amount) minus(b Amount) Amount { return Amount{a.N - b.N, a.Bytes - b.Bytes} }

func (a Amount) most(b Amount) Amount { return Amount{max(a.N, b.N), max(a.Bytes, b.Bytes)} }

func (a Amount) least(b Amount) Amount { return Amount{min(a.N, b.N), min(a.Bytes, b.Bytes)} }

// within reports whether a is not more than most, of which limit says what counts.
func (a Amount) within(most, limit Amount) bool {
	return (limit.N <= 0 || a.N <= most.N) && (limit.Bytes <= 0 || a.Bytes <= most.Bytes)
}

// bounds reports whether what is within the limit b is within the limit a, too.
func (a Amount) bounds(b Amount) bool {
	return (a.N <= 0 || 0 < b.N && b.N <= a.N) && (a.Bytes <= 0 || 0 < b.Bytes && b.Bytes <= a.Bytes)
}

// Held is what one holder has. Its methods lock it, and do nothing where it is nil. State belongs to the owner of the
// counter, who locks it to read or change it.
type Held[S any] struct {
	sync.Mutex
	State  S
	Holder Holder
	// Lost is what this member has tried to write, of which it does not know whether the store has it.
	Lost map[[32]byte]Amount

	stands  Amount // that were added and have not expired
	aside   Amount // for what is not added yet
	counted bool   // the store was; before, nothing is added
	less    bool   // there may be less than was counted

	window  time.Duration
	users   int              // who have entered and not left; guarded by Counter.mu
	expiry  map[int64]Amount // by the end of the window in which they expire
	soonest int64            // the first of these ends; 0 without one

	own, limit Amount    // own is this member's part of limit, which it has without asking anybody
	until      time.Time // then it is asked for anew

	full       Full // the last refusal, which counts for a moment
	fullFor    Request
	fullBefore time.Time
}

// Full says that a holder has no room for what is to be added.
type Full struct {
	// Taken is what stands of all members, with what they have set aside for themselves; Stands is without that.
	Taken, Stands Amount
	// Spare says that others have set aside more than they use, and are giving it back.
	Spare bool
	// Retry is when to ask again: some of it is being given back, or expires. Zero if something has to end first.
	Retry time.Time
}

// capsRecord is the record of a holder.
type capsRecord struct {
	Caps []memberCap `json:"caps"`
	// Asked says that somebody has found nothing left: who has a cap that it does not use gives it back.
	Asked bool `json:"asked,omitempty"`
}

type memberCap struct {
	Boot string `json:"boot"`
	Amount
}

const (
	// maxHeld is how many holders are remembered; beyond it, idle ones are forgotten.
	maxHeld = 10_000
	// windows is into how many parts an entry's life is divided to remember its end, which bounds their number.
	windows = 64
	// share is which part of what is left a member takes at a time, besides what it needs.
	share = 4
	// capTime is how long a member uses a cap before it asks for it anew, and capKept how long its record is kept.
	capTime, capKept = time.Hour, 24 * time.Hour
	// fullTime is how long nothing is counted anew after nothing was left, but at least fullRest times as long as
	// counting took.
	fullTime, fullRest = time.Second, 20
)

// Use begins to count in a store.
func (c *Counter[S]) Use(st Store) {
	c.store, c.caps, c.all = st, Table[capsRecord]{Store: st}, map[Holder]*Held[S]{}
	if shared, is := st.(Shared); is {
		c.shared, c.boot = shared, shared.Self().Boot
	}
}

// Boot is that of this member, by which entries are counted; empty where one gateway has the store.
func (c *Counter[S]) Boot() string { return c.boot }

// Enter returns what a holder has, which is remembered until as many calls of Leave.
func (c *Counter[S]) Enter(holder Holder) *Held[S] {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.all[holder]
	if found == nil {
		if len(c.all) >= maxHeld {
			c.forget()
		}
		found = &Held[S]{Holder: holder, window: c.Window}
		c.all[holder] = found
	}
	found.users++
	return found
}

// Leave gives back what Enter returned.
func (c *Counter[S]) Leave(h *Held[S]) {
	if h != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		h.users--
	}
}

// Known returns what a holder has if it is remembered, or nil.
func (c *Counter[S]) Known(holder Holder) *Held[S] {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all[holder]
}

// forget drops the holders that nobody has entered and who have nothing that is in no store, with mu held.
func (c *Counter[S]) forget() {
	for holder, found := range c.all {
		if found.users == 0 && found.TryLock() {
			if len(found.Lost) == 0 {
				delete(c.all, holder)
			}
			found.Unlock()
		}
	}
}

// Request is what is to be added for a holder.
type Request struct {
	Now time.Time // by the store's clock
	// Limit is that of the holder; a zero member is none.
	Limit, Need Amount
	// Must says that it takes the place of what stands already, so that it is never refused.
	Must bool
}

// Take sets aside what is to be added, or says why there is no room. Release or Drop gives it back.
func (c *Counter[S]) Take(ctx context.Context, h *Held[S], q Request) (*Full, error) {
	now, limit, need, must := q.Now, q.Limit, q.Need, q.Must
	h.Lock()
	defer h.Unlock()
	h.expire(now)
	has := h.mine().plus(need)
	switch {
	case limit == (Amount{}):
	case c.shared == nil && h.counted && (must || has.within(limit, limit)):
	case c.shared != nil && h.counted && has.within(h.own, limit) && limit.bounds(h.limit) && now.Before(h.until):
	case !must && now.Before(h.fullBefore) && h.fullFor.Limit.bounds(limit) && h.fullFor.Need.within(need, limit):
		full := h.full
		return &full, nil
	case c.shared == nil && h.counted && !h.less:
		return &Full{Taken: h.mine(), Stands: h.stands, Retry: h.next()}, nil
	default:
		if full, err := c.raise(ctx, h, q); full != nil || err != nil {
			return full, c.failed(err)
		}
	}
	h.aside = h.aside.plus(need)
	return nil, nil
}

func (c *Counter[S]) failed(err error) error {
	if err == nil || errors.Is(err, c.Failed) {
		return err
	}
	return fmt.Errorf("%w: %w", c.Failed, err)
}

// Count counts what stands of a holder, unless it was counted before.
func (c *Counter[S]) Count(ctx context.Context, h *Held[S], now time.Time) error {
	h.Lock()
	defer h.Unlock()
	if h.counted {
		return nil
	}
	_, _, err := c.count(ctx, h, now)
	return c.failed(err)
}

// count counts anew what stands of a holder, and returns what others have added, by their boots, and when something of
// that expires. It goes on when ctx ends: otherwise a client that leaves could make the next one begin anew.
func (c *Counter[S]) count(
	ctx context.Context, h *Held[S], now time.Time,
) (others map[string]Amount, next time.Time, err error) {
	others = map[string]Amount{}
	h.counted, h.stands, h.expiry, h.soonest = true, Amount{}, nil, 0
	err = c.Read(context.WithoutCancel(ctx), h, func(boot string, a Amount, created, expires time.Time) {
		switch {
		case c.shared == nil || boot == c.boot: // who has the store alone has what members have added, too
			h.add(a, created, expires)
		case expires.IsZero():
			others[boot] = others[boot].plus(a)
		case now.Before(expires):
			others[boot] = others[boot].plus(a)
			if next.IsZero() || expires.Before(next) {
				next = expires
			}
		}
	})
	if err != nil {
		h.counted, h.stands, h.expiry, h.soonest = false, Amount{}, nil, 0
		return nil, next, err
	}
	h.expire(now)
	if own := h.next(); next.IsZero() || !own.IsZero() && own.Before(next) {
		next = own
	}
	h.less = len(h.Lost) > 0 || h.aside != Amount{} // which may be counted twice
	return others, next, nil
}

// raise counts anew, and raises this member's cap so that it may add what it needs. Where it may not, the cap is as it
// was.
func (c *Counter[S]) raise(ctx context.Context, h *Held[S], q Request) (*Full, error) {
	now, limit, need := q.Now, q.Limit, q.Need
	for {
		began := time.Now()
		found, living, err := c.members(ctx, h)
		if err != nil {
			return nil, err
		}
		stands, next, err := c.count(ctx, h, now) // after the members: what is gone adds nothing to it
		if err != nil {
			return nil, err
		}
		mine := h.mine()
		full := &Full{Taken: mine, Stands: mine.minus(h.aside), Retry: next}
		for _, m := range living {
			one := stands[m.Boot]
			full.Taken = full.Taken.plus(m.most(one)).minus(one)
			full.Spare = full.Spare || m.N > one.N || m.Bytes > one.Bytes
		}
		for _, one := range stands {
			full.Taken, full.Stands = full.Taken.plus(one), full.Stands.plus(one)
		}
		fits := full.Taken.plus(need).within(limit, limit)
		if !fits && !q.Must {
			return c.refuse(ctx, h, q, full, found, time.Since(began))
		}
		if c.shared == nil {
			return nil, nil
		}
		own := mine.plus(need)
		if fits {
			left := Amount{max(limit.N-full.Taken.N, 0) / share, max(limit.Bytes-full.Taken.Bytes, 0) / share}
			own = mine.plus(need.most(left))
		}
		err = c.write(ctx, h.Holder, now, &capsRecord{Caps: append(living, memberCap{c.boot, own})}, found)
		if err == nil {
			h.own, h.limit, h.until, h.fullBefore = own, limit, now.Add(capTime), time.Time{}
		}
		if err == nil || !errors.As(err, new(*Conflict)) {
			return nil, err
		}
	}
}

// members are the caps of the other members that are not gone, with the record that has them.
func (c *Counter[S]) members(ctx context.Context, h *Held[S]) (found Row[capsRecord], living []memberCap, err error) {
	if c.shared == nil {
		return found, nil, nil
	}
	if found, err = c.read(ctx, h.Holder); err != nil {
		return found, nil, err
	}
	for _, m := range found.Record.Caps {
		if m.Boot == c.boot {
			continue
		}
		gone, err := c.shared.Gone(ctx, m.Boot)
		if err == nil && gone && c.Left != nil {
			err = c.Left(ctx, m.Boot)
		}
		if err != nil {
			return found, nil, err
		}
		if !gone {
			living = append(living, m)
		}
	}
	return found, living, nil
}

// refuse remembers for a moment that nothing is left, and asks the others to give back what they do not use. The moment
// is longer where counting took long: a flood of one holder must not keep the store busy.
func (c *Counter[S]) refuse(
	ctx context.Context, h *Held[S], q Request, full *Full, found Row[capsRecord], took time.Duration,
) (*Full, error) {
	if full.Spare {
		full.Retry = q.Now.Add(fullTime)
		found.Record.Asked = true // also where it was before: a member may have missed that
		if err := c.write(ctx, h.Holder, q.Now, found.Record, found); err != nil && !errors.As(err, new(*Conflict)) {
			return nil, err
		}
	}
	h.own = h.own.least(h.mine()) // which was counted anew: nothing else is known to be left
	if c.shared != nil || h.less {
		h.full, h.fullFor, h.fullBefore = *full, q, q.Now.Add(max(fullTime, fullRest*took))
	}
	return full, nil
}

// Renew has what this member may have last on, for holders who have set something aside, which is in no count.
func (c *Counter[S]) Renew(ctx context.Context) {
	c.mu.Lock()
	all := make([]*Held[S], 0, len(c.all))
	for _, h := range c.all {
		all = append(all, h)
	}
	c.mu.Unlock()
	now, err := c.store.Now(ctx)
	if err != nil {
		return // else in an hour
	}
	for _, h := range all {
		h.Lock()
		if (h.aside != Amount{} || len(h.Lost) > 0) && h.limit != (Amount{}) {
			_, _ = c.raise(ctx, h, Request{Now: now, Limit: h.limit, Must: true})
		}
		h.Unlock()
	}
}

// Follow gives back what this member does not use, whenever another one has found nothing left. cancel ends that.
func (c *Counter[S]) Follow(ctx context.Context) (cancel func()) {
	if c.shared == nil {
		return func() {}
	}
	return c.shared.Follow(c.Caps, func(key []byte) {
		if key != nil { // else any of them: who finds nothing left asks again
			go func() { _ = c.giveBack(ctx, Holder(key[len(c.Caps):])) }()
		}
	})
}

func (c *Counter[S]) giveBack(ctx context.Context, holder Holder) error {
	if found, err := c.read(ctx, holder); err != nil || !found.Record.Asked {
		return err
	}
	h := c.Enter(holder) // also one that was forgotten, whose cap stands
	defer c.Leave(h)
	h.Lock()
	defer h.Unlock()
	now, err := c.store.Now(ctx)
	if err == nil && h.counted { // of others nothing is set aside, and the others count what stands
		_, _, err = c.count(ctx, h, now)
	}
	if err != nil {
		return err
	}
	mine := h.mine()
	h.own = h.own.least(mine) // before: whether or not it is written
	for {
		found, err := c.read(ctx, holder)
		if err != nil {
			return err
		}
		r := found.Record
		i := slices.IndexFunc(r.Caps, func(m memberCap) bool { return m.Boot == c.boot })
		if i < 0 || r.Caps[i].least(mine) == r.Caps[i].Amount {
			return nil // there is nothing
		}
		r.Caps[i].Amount = r.Caps[i].least(mine)
		err = c.write(ctx, holder, now, r, found)
		if err == nil || !errors.As(err, new(*Conflict)) {
			return err
		}
	}
}

func (c *Counter[S]) key(holder Holder) []byte { return append(bytes.Clone(c.Caps), holder[:]...) }

func (c *Counter[S]) read(ctx context.Context, holder Holder) (Row[capsRecord], error) {
	row, err := c.caps.Get(ctx, c.key(holder))
	if row.Record == nil {
		row.Record = new(capsRecord)
	}
	return row, err
}

// write replaces the record that was found.
func (c *Counter[S]) write(
	ctx context.Context, holder Holder, now time.Time, r *capsRecord, found Row[capsRecord],
) error {
	_, err := c.store.Commit(ctx, c.caps.Put(c.key(holder), r, found.Version.Unchanged(), now.Add(capKept)))
	return err
}

// mine is what this member has added and still stands, or may.
func (h *Held[S]) mine() Amount {
	all := h.stands.plus(h.aside)
	for _, a := range h.Lost {
		all = all.plus(a)
	}
	return all
}

// Add counts an entry until the end of the window in which it expires; the zero time is never. Where it has replaced
// another one, or was not set aside, call Less too.
func (h *Held[S]) Add(a Amount, created, expires time.Time) {
	if h != nil {
		h.Lock()
		defer h.Unlock()
		h.add(a, created, expires)
	}
}

func (h *Held[S]) add(a Amount, created, expires time.Time) {
	if !h.counted { // it will be read from the store
		return
	}
	h.stands = h.stands.plus(a)
	if expires.IsZero() {
		return
	}
	window := h.window
	for window < expires.Sub(created)/windows {
		window *= 2
	}
	at := expires.UnixNano()
	end := at - at%int64(window) + int64(window)
	if h.expiry == nil {
		h.expiry = map[int64]Amount{}
	}
	h.expiry[end] = h.expiry[end].plus(a)
	if h.soonest == 0 || end < h.soonest {
		h.soonest = end
	}
}

// expire forgets what has expired.
func (h *Held[S]) expire(now time.Time) {
	if h.soonest == 0 || h.soonest > now.UnixNano() {
		return
	}
	h.soonest = 0
	for end, a := range h.expiry {
		if end <= now.UnixNano() {
			h.stands = h.stands.minus(a)
			delete(h.expiry, end)
		} else if h.soonest == 0 || end < h.soonest {
			h.soonest = end
		}
	}
}

// next is when the next entry expires; zero if none will.
func (h *Held[S]) next() time.Time {
	if h.soonest == 0 {
		return time.Time{}
	}
	return time.Unix(0, h.soonest)
}

// Release gives back what was set aside and was added since, or has ended.
func (h *Held[S]) Release(a Amount) {
	if h != nil {
		h.Lock()
		defer h.Unlock()
		h.aside = h.aside.minus(a)
	}
}

// Drop gives back what was set aside and does not come about. This member asks before it adds that again: with must
// there may have been no room for it.
func (h *Held[S]) Drop(a Amount) {
	if h != nil {
		h.Lock()
		defer h.Unlock()
		h.aside = h.aside.minus(a)
		h.own = h.own.least(h.mine())
	}
}

// Less says that there may be less than was counted: the next count that finds no room looks.
func (h *Held[S]) Less() {
	if h != nil {
		h.Lock()
		defer h.Unlock()
		h.less, h.fullBefore = true, time.Time{}
	}
}

// Lose counts what the store may have under a key, until Found, or until it is counted anew and found there.
func (h *Held[S]) Lose(key [32]byte, a Amount) {
	if h != nil {
		h.Lock()
		defer h.Unlock()
		if h.Lost == nil {
			h.Lost = map[[32]byte]Amount{}
		}
		h.Lost[key], h.less = a, true
	}
}

// Found says that the store has what was lost under a key, or another entry there.
func (h *Held[S]) Found(key [32]byte) {
	if h != nil {
		h.Lock()
		defer h.Unlock()
		delete(h.Lost, key)
	}
}
