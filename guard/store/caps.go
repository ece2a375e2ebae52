package store

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"
)

// Caps keep several gateways that share a store within one limit, without a word between them for most additions:
// each member has a cap of its own on what it has added and still stands, and all caps together, with what stands of
// members that are gone, are never more than the limit. Rates are not bounded so.
type Caps struct {
	st      Shared
	boot    string
	records Table[capsRecord]
}

// NewCaps returns the caps of a store; nil if it is no Shared.
func NewCaps(st Store) *Caps {
	shared, is := st.(Shared)
	if !is {
		return nil
	}
	return &Caps{shared, shared.Self().Boot, Table[capsRecord]{Store: st}}
}

// Boot is that of this member, by which entries are counted.
func (c *Caps) Boot() string { return c.boot }

// Amount is a number of entries and their size.
type Amount struct {
	N     int   `json:"n,omitempty"`
	Bytes int64 `json:"bytes,omitempty"`
}

func (a Amount) plus(b Amount) Amount { return Amount{a.N + b.N, a.Bytes + b.Bytes} }

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

// Allowance is what this member may have of a holder without asking anybody. The zero value is nothing.
type Allowance struct {
	own, limit Amount    // own is part of limit
	until      time.Time // then it is asked for anew

	full       Full // the last answer, which counts for a moment
	fullOf     Amount
	fullFor    Amount
	fullBefore time.Time
}

// Drop has this member ask before it adds to mine, which is as in CapRequest: what it was to add has not come about, and
// with Must there may have been no room for more.
func (a *Allowance) Drop(mine Amount) { a.own = a.own.least(mine) }

// Full says that a member may not add what it needs.
type Full struct {
	// Taken is what stands of all members, with what they have set aside for themselves.
	Taken Amount
	// Retry is when to ask again: some of it is being given back. Zero if something has to end first.
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
	// share is which part of what is left a member takes at a time, besides what it needs.
	share = 4
	// capTime is how long a member uses a cap before it asks for it anew, and capKept how long its record is kept.
	capTime, capKept = time.Hour, 24 * time.Hour
	// fullTime is how long nothing is asked for after nothing was left.
	fullTime = time.Second
)

// CapRequest says what a member wants to add for a holder.
type CapRequest struct {
	// Key is that of the holder's record.
	Key []byte
	// Limit is that of the holder; a zero member is none.
	Limit Amount
	// Need is what is to be added.
	Need Amount
	// Must says that it takes the place of what stands already, so that it is never refused.
	Must bool
	// Mine is what this member has added and still stands, or may. It may be more than there is, and never less.
	Mine func() Amount
	// Left makes what a member that is gone has left behind countable; nil where it is.
	Left func(ctx context.Context, boot string) error
	// Count calls add with what stands, by the boot of who has added it.
	Count func(add func(boot string, one Amount)) error
}

// Admit reports whether this member may add what it needs; full is nil if so. The caller locks the holder's
// allowance, and then adds. The error is that of the store, or of the request's functions.
func (c *Caps) Admit(ctx context.Context, a *Allowance, now time.Time, q *CapRequest) (full *Full, err error) {
	if q.Mine().plus(q.Need).within(a.own, q.Limit) && q.Limit.bounds(a.limit) && now.Before(a.until) {
		return nil, nil
	}
	if !q.Must && now.Before(a.fullBefore) && a.fullOf.bounds(q.Limit) && a.fullFor.within(q.Need, q.Limit) {
		return &a.full, nil
	}
	own, full, err := c.raise(ctx, now, q)
	if err != nil {
		return nil, err
	}
	if full == nil {
		a.own, a.limit, a.until, a.fullBefore = own, q.Limit, now.Add(capTime), time.Time{}
		return nil, nil
	}
	a.Drop(q.Mine()) // which was counted anew: nothing else is known to be left
	a.full, a.fullOf, a.fullFor, a.fullBefore = *full, q.Limit, q.Need, now.Add(fullTime)
	return full, nil
}

// Renew has what this member may have last on, for a holder of whom something runs that is in no count.
func (c *Caps) Renew(ctx context.Context, a *Allowance, now time.Time, q *CapRequest) error {
	if a.limit == (Amount{}) {
		return nil
	}
	a.until, q.Limit, q.Must = time.Time{}, a.limit, true
	_, err := c.Admit(ctx, a, now, q)
	return err
}

// raise raises this member's cap so that it may add what it needs, and returns it. Where it may not, the cap is as it
// was.
func (c *Caps) raise(ctx context.Context, now time.Time, q *CapRequest) (own Amount, full *Full, err error) {
	expires := now.Add(capKept)
	for {
		r, is, err := c.read(ctx, q.Key)
		if err != nil {
			return own, nil, err
		}
		spare := false
		var living []memberCap
		for _, m := range r.Caps { // before the count: what is gone adds nothing to it
			if m.Boot == c.boot {
				continue
			}
			gone, err := c.st.Gone(ctx, m.Boot)
			if err == nil && gone && q.Left != nil {
				err = q.Left(ctx, m.Boot)
			}
			if err != nil {
				return own, nil, err
			}
			if !gone {
				living = append(living, m)
			}
		}
		stands := map[string]Amount{}
		if err := q.Count(func(boot string, one Amount) { stands[boot] = stands[boot].plus(one) }); err != nil {
			return own, nil, err
		}
		mine := q.Mine().most(stands[c.boot])
		taken := mine
		delete(stands, c.boot)
		for _, m := range living {
			taken = taken.plus(m.most(stands[m.Boot]))
			spare = spare || m.N > stands[m.Boot].N || m.Bytes > stands[m.Boot].Bytes
			delete(stands, m.Boot)
		}
		for _, rest := range stands {
			taken = taken.plus(rest)
		}
		fits := taken.plus(q.Need).within(q.Limit, q.Limit)
		if !fits && !q.Must {
			full := &Full{Taken: taken}
			if !spare {
				return own, full, nil
			}
			full.Retry = now.Add(fullTime)
			r.Asked = true // also where it was before: a member may have missed that
			if err := c.write(ctx, q.Key, expires, r, is); err != nil && !errors.As(err, new(*Conflict)) {
				return own, nil, err
			}
			return own, full, nil
		}
		own = mine.plus(q.Need)
		if fits {
			left := Amount{max(q.Limit.N-taken.N, 0) / share, max(q.Limit.Bytes-taken.Bytes, 0) / share}
			own = mine.plus(q.Need.most(left))
		}
		err = c.write(ctx, q.Key, expires, &capsRecord{Caps: append(living, memberCap{c.boot, own})}, is)
		if err == nil || !errors.As(err, new(*Conflict)) {
			return own, nil, err
		}
	}
}

// Asked reports whether somebody has found nothing left of a holder.
func (c *Caps) Asked(ctx context.Context, key []byte) (bool, error) {
	r, _, err := c.read(ctx, key)
	return r.Asked, err
}

// GiveBack gives back what this member does not use of its cap. mine is as in CapRequest; the caller locks the
// allowance.
func (c *Caps) GiveBack(ctx context.Context, a *Allowance, key []byte, mine Amount) error {
	a.Drop(mine) // before: whether or not it is written
	now, err := c.st.Now(ctx)
	if err != nil {
		return err
	}
	for {
		r, is, err := c.read(ctx, key)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(r.Caps, func(m memberCap) bool { return m.Boot == c.boot })
		if i < 0 || r.Caps[i].least(mine) == r.Caps[i].Amount {
			return nil // there is nothing
		}
		r.Caps[i].Amount = r.Caps[i].least(mine)
		err = c.write(ctx, key, now.Add(capKept), r, is)
		if err == nil || !errors.As(err, new(*Conflict)) {
			return err
		}
	}
}

func (c *Caps) read(ctx context.Context, key []byte) (*capsRecord, Condition, error) {
	row, err := c.records.Get(ctx, key)
	if row.Record == nil {
		row.Record = new(capsRecord)
	}
	return row.Record, row.Version.Unchanged(), err
}

func (c *Caps) write(ctx context.Context, key []byte, expires time.Time, r *capsRecord, is Condition) error {
	_, err := c.st.Commit(ctx, c.records.Put(bytes.Clone(key), r, is, expires))
	return err
}
