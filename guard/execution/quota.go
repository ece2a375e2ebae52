package execution

import (
	"context"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Quota bounds what one caller may hold in the store at a time, so that a flood of one caller is
// not an outage for all. Zero is no limit.
type Quota struct {
	// Open is the largest number of executions that run or are in doubt.
	Open int
	// Bytes is the largest size of a caller's records and answers. It is checked before a claim;
	// the answers of running calls may exceed it.
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
	// Retry is the earliest time at which expiry alone frees room; zero if open executions must
	// end first.
	Retry time.Time
}

func (e *QuotaError) Error() string {
	if e.Quota.Open > 0 && e.Open >= e.Quota.Open {
		return fmt.Sprintf("guard: the caller has %d open executions, at most %d", e.Open, e.Quota.Open)
	}
	return fmt.Sprintf("guard: the caller has %d bytes stored, at most %d", e.Bytes, e.Quota.Bytes)
}

// unsettled are the open executions of a caller.
type unsettled struct{ running, doubts int }

type usage = store.Usage[unsettled]

// quotas counts the executions and bytes of callers with a quota.
type quotas struct {
	store  store.Store
	usages store.Usages[CallerHash, unsettled]
}

// usageWindow is the granularity with which the expiry of records is counted.
const usageWindow = 10 * time.Minute

// admit counts an execution of caller, or returns a QuotaError. An execution that runs again is
// counted already, as a doubt, and always admitted: otherwise a caller full of doubts could
// settle none. Pass the returned usage to leave; it is nil without a quota, if nothing is counted
// of the caller.
func (q *quotas) admit(ctx context.Context, caller CallerHash, limit Quota, now time.Time, again bool) (*usage, error) {
	if limit.none() && q.usages.Known(caller) == nil {
		return nil, nil
	}
	if again {
		limit = Quota{}
	}
	u := q.usages.Enter(caller)
	if err := q.enter(ctx, u, caller, limit, now); err != nil {
		q.usages.Leave(u)
		return nil, err
	}
	return u, nil
}

func (q *quotas) enter(ctx context.Context, u *usage, caller CallerHash, limit Quota, now time.Time) error {
	u.Lock()
	defer u.Unlock()
	if !u.Counted {
		if err := q.count(ctx, u, caller); err != nil {
			return err
		}
	}
	retry := u.Expire(now)
	open := u.State.running + u.State.doubts
	switch {
	case limit.Open > 0 && open >= limit.Open:
		return &QuotaError{Open: open, Doubts: u.State.doubts, Bytes: u.Bytes, Quota: limit}
	case limit.Bytes > 0 && u.Bytes >= limit.Bytes:
		return &QuotaError{Open: open, Doubts: u.State.doubts, Bytes: u.Bytes, Quota: limit, Retry: retry}
	}
	u.State.running++
	return nil
}

func (q *quotas) count(ctx context.Context, u *usage, caller CallerHash) error {
	u.State.doubts = 0
	err := u.Count(ctx, q.store, callerPrefix(caller), func(entry store.Entry) error {
		a, err := decodeAccount(entry.Value)
		if err == nil {
			a.add(u, entry.Expires)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// settled counts the record of an execution that was admitted to u.
func settled(u *usage, r *Record) {
	if u == nil {
		return
	}
	u.Lock()
	defer u.Unlock()
	accountOf(r, r.size()).add(u, r.expires())
}

// leave ends an execution that was admitted to u.
func (q *quotas) leave(u *usage) {
	if u == nil {
		return
	}
	u.Lock()
	u.State.running--
	u.Unlock()
	q.usages.Leave(u)
}

// resolved counts that a doubt of r's caller was settled, or runs again. next is the new record;
// nil if it is not in the index.
func (q *quotas) resolved(r, next *Record) {
	u := q.usages.Known(r.Caller)
	if u == nil {
		return
	}
	u.Lock()
	defer u.Unlock()
	u.State.doubts = max(u.State.doubts-1, 0)
	u.Add(-1, -int64(r.size()), r.Created, time.Time{})
	if next != nil {
		accountOf(next, next.size()).add(u, next.expires())
	}
}

// rolledBack counts next, the record of a call that was undone or must not run. old, if any, is
// the record before, which was no doubt.
func (q *quotas) rolledBack(old, next *Record) {
	u := q.usages.Known(next.Caller)
	if u == nil {
		return
	}
	u.Lock()
	defer u.Unlock()
	if old != nil {
		u.Add(-1, -int64(old.size()), old.Created, old.expires())
	}
	// The answer beside it stays and is counted.
	u.Add(1, int64(next.size()), next.Created, time.Time{})
}

// account is what an index entry says of a settled execution, so that counting a caller's opens
// no record. It has no data of the caller.
type account struct {
	state         State
	created       time.Time
	record        int64 // bytes, before it is sealed; they expire with the entry
	result        int64 // bytes of the answer beside it
	resultExpires time.Time
}

func accountOf(r *Record, record int) account {
	a := account{state: r.State, created: r.Created, record: int64(record), result: r.Result.Size}
	if a.result > 0 {
		a.resultExpires = r.Result.Expires
	}
	return a
}

// add counts an execution that is settled and whose record expires at the given time.
func (a account) add(u *usage, expires time.Time) {
	if !u.Counted { // it will be read from the index
		return
	}
	if a.state == StateInDoubt {
		u.State.doubts++
	}
	u.Add(1, a.record, a.created, expires)
	if a.result > 0 {
		u.Add(1, a.result, a.created, a.resultExpires)
	}
}

// The tags of an account's fields.
const (
	tagAccountState = 1 + iota
	tagAccountCreated
	tagAccountRecord
	tagAccountResult
	tagAccountResultExpires
)

// accountSize is the largest size of an encoded account.
const accountSize = 48

func (a account) appendTo(b []byte) []byte {
	e := store.Encoder{B: b}
	e.Int(tagAccountState, int64(a.state))
	e.Time(tagAccountCreated, a.created)
	e.Int(tagAccountRecord, a.record)
	e.Int(tagAccountResult, a.result)
	e.Time(tagAccountResultExpires, a.resultExpires)
	return e.B
}

func decodeAccount(b []byte) (account, error) {
	var a account
	d := store.Decoder{B: b, Broken: errEncoding}
	for d.Next() {
		switch d.Tag {
		case tagAccountState:
			a.state = State(d.Int())
		case tagAccountCreated:
			a.created = d.Time()
		case tagAccountRecord:
			a.record = d.Int()
		case tagAccountResult:
			a.result = d.Int()
		case tagAccountResultExpires:
			a.resultExpires = d.Time()
		}
	}
	return a, d.Err
}
