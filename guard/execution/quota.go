package execution

import (
	"context"
	"fmt"
	"sync/atomic"
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
	// Workflow is the limit of LimitWorkflows, where that refuses: then Bytes are those of the workflow,
	// with what its running calls may need. Else it is 0.
	Workflow int64
	// Retry is the earliest time at which expiry alone frees room; zero if open executions must
	// end first.
	Retry time.Time
}

func (e *QuotaError) Error() string {
	if e.Workflow > 0 {
		return fmt.Sprintf("guard: the workflow has %d bytes stored, at most %d, and no room for more", e.Bytes, e.Workflow)
	}
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
	lot           lotHash // in the index of workflows only
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
	addAccount(u, 1, a, expires)
}

// addAccount counts an account n times, 1 or -1.
func addAccount[S any](u *store.Usage[S], n int, a account, expires time.Time) {
	u.Add(n, int64(n)*a.record, a.created, expires)
	if a.result > 0 {
		u.Add(n, int64(n)*a.result, a.created, a.resultExpires)
	}
}

// The tags of an account's fields.
const (
	tagAccountState = 1 + iota
	tagAccountCreated
	tagAccountRecord
	tagAccountResult
	tagAccountResultExpires
	tagAccountLot
)

// accountSize is the largest size of an encoded account.
const accountSize = 48 + 2 + len(lotHash{})

func (a account) appendTo(b []byte) []byte {
	e := store.Encoder{B: b}
	e.Int(tagAccountState, int64(a.state))
	e.Time(tagAccountCreated, a.created)
	e.Int(tagAccountRecord, a.record)
	e.Int(tagAccountResult, a.result)
	e.Time(tagAccountResultExpires, a.resultExpires)
	if a.lot != (lotHash{}) {
		e.Bytes(tagAccountLot, a.lot[:])
	}
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
		case tagAccountLot:
			d.Fill(a.lot[:])
		}
	}
	return a, d.Err
}

// lotHash names the calls that share a limit of LimitWorkflows: those of a workflow that a token proves, or
// of a workflow and one caller, since who only knows its name must not use up what others need (P3). Zero
// is no limit.
type lotHash [16]byte

// lot counts what the calls of one lotHash have stored.
type lot = store.Usage[unstored]

// unstored is what is reserved of a lot besides what it has stored, and how large its answers are lately, in bytes.
type unstored struct{ reserved, answers int64 }

// lots bound what workflows store. What a change may need is reserved before its commit, so that the limit
// holds whatever races.
type lots struct {
	records *records
	store   store.Store
	most    atomic.Int64
	usages  store.Usages[lotHash, unstored]
}

const (
	// growth is more than the outcome of a call, or its settlement, adds to its record besides an answer.
	growth = 512
	// usualAnswer is the least that a running call reserves for its answer, unless its ResultCap is smaller. If
	// answers of the workflow were larger it is more, up to a part of the limit. What a still larger one needs is
	// reserved as it comes.
	usualAnswer = 64 << 10
	usualPart   = 4
)

func (l *lots) of(c *Call, caller CallerHash) lotHash {
	switch {
	case c.Workflow == "" || l.most.Load() <= 0:
		return lotHash{}
	case c.Proven:
		caller = CallerHash{}
	}
	sum := store.Index(l.records.sealer, "stored bytes", c.Workflow, string(caller[:]))
	return lotHash(sum[:16])
}

// charged is what a record counts for. One that is not settled has room for what becomes of it.
func charged(r *Record) account {
	a := accountOf(r, r.size())
	if r.State == StateInDoubt || r.State.open() {
		a.record += growth
	}
	return a
}

// holding is what a change of a record has reserved. The zero value is that of one without a limit.
type holding struct {
	lots          *lots
	lot           *lot
	old           *Record // that is replaced; nil for none
	bytes, answer int64   // reserved in all, and for the answer of a running call
}

// hold reserves what next needs more than old, and at most answer bytes for the answer of a running call. Either
// record may be nil; both have one lot. If there is no room the error is a QuotaError, or with force nothing
// is reserved for the answer.
func (l *lots) hold(ctx context.Context, old, next *Record, answer int64, force bool, now time.Time) (h holding, err error) {
	r := next
	if r == nil {
		r = old
	}
	if r == nil || r.Lot == (lotHash{}) {
		return h, nil
	}
	u := l.usages.Enter(r.Lot)
	u.Lock()
	defer u.Unlock()
	if !u.Counted {
		if err := l.count(ctx, u, r); err != nil {
			l.usages.Leave(u)
			return h, err
		}
	}
	most := l.most.Load()
	answer = min(answer, max(usualAnswer, min(u.State.answers, most/usualPart)))
	retry, need, record := u.Expire(now), answer, int64(0)
	if next != nil {
		a := charged(next)
		record = a.record
		need += a.record + a.result
	}
	if old != nil {
		a := charged(old)
		need = max(need-a.record-a.result, 0)
	}
	if most > 0 && need > 0 && u.Bytes+u.State.reserved+need > most {
		if !force {
			l.usages.Leave(u)
			return h, &QuotaError{Bytes: u.Bytes + u.State.reserved, Workflow: most, Retry: retry}
		}
		if answer, need = 0, record; old != nil {
			need = 0 // a record grows by less than what it was charged for
		}
	}
	u.State.reserved += need
	return holding{l, u, old, need, answer}, nil
}

func (l *lots) count(ctx context.Context, u *lot, r *Record) error {
	err := u.Count(ctx, l.store, l.records.workflowPrefix(r.Workflow), func(entry store.Entry) error {
		a, err := decodeAccount(entry.Value)
		if err == nil && a.lot == r.Lot {
			if a.state == StateInDoubt {
				a.record += growth
			}
			addAccount(u, 1, a, entry.Expires)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// room reserves so many bytes for an answer in all, or reports false.
func (h *holding) room(answer int64) bool {
	u := h.lot
	if u == nil {
		return true
	}
	u.Lock()
	defer u.Unlock()
	u.State.answers = max(u.State.answers, answer)
	more := answer - h.answer
	if most := h.lots.most.Load(); more <= 0 || most > 0 && u.Bytes+u.State.reserved+more > most {
		return more <= 0
	}
	u.State.reserved += more
	h.bytes, h.answer = h.bytes+more, answer
	return true
}

// end counts the record that is left instead of the old one, nil for none. Without a commit, left is nil
// and the old one stays.
func (h *holding) end(committed bool, left *Record) {
	u := h.lot
	if u == nil {
		return
	}
	h.lot = nil
	u.Lock()
	u.State.reserved -= h.bytes
	u.State.answers -= u.State.answers / 16
	if committed && h.old != nil {
		addAccount(u, -1, charged(h.old), h.old.expires())
	}
	if left != nil {
		addAccount(u, 1, charged(left), left.expires())
	}
	u.Unlock()
	h.lots.usages.Leave(u)
}
