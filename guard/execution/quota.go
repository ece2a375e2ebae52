package execution

import (
	"cmp"
	"context"
	"errors"
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
	// Open and Bytes are what the caller holds; Doubts of Open are in doubt. Where several gateways share the store, they
	// have what the others have set aside for its next calls.
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

// countsFor is the member for which a record counts: who has written it, but for doubts that others have recorded.
func (r *Record) countsFor() string { return cmp.Or(r.Counts, r.Boot) }

// countHere has a record that this member writes over another's count for itself.
func countHere(g *Guard, r *Record) {
	if g.shared && r.countsFor() != g.boot {
		r.Counts = g.boot
	}
}

// counted reports whether this member has counted a record.
func counted(g *Guard, r *Record) bool { return !g.shared || r.countsFor() == g.boot }

const (
	// kindCap is of what each member may have of a quota: v c kind holder.
	kindCap = 'c'

	holdsCaller, holdsLot = 'c', 'w' // the kinds
)

const (
	// renewTime is how often the caps of holders with running calls are renewed, so that they do not expire.
	renewTime = time.Hour
	// usageWindow is the granularity with which the expiry of records is counted.
	usageWindow = 10 * time.Minute
)

// lot is what is known of the calls of one lotHash besides what they hold.
type lot struct {
	workflow string
	answers  int64 // how large they are lately, in bytes
}

type held = store.Held[lot]

// quotas count the executions and bytes of callers with a quota, and the bytes of workflows with a limit.
type quotas struct {
	store.Counter[lot]
	g    *Guard
	most atomic.Int64 // the bytes of a workflow, see LimitWorkflows
}

func (q *quotas) open(g *Guard) {
	q.g, q.Window, q.Caps = g, usageWindow, []byte{spaceLive, kindCap}
	q.Failed, q.Read, q.Left = ErrStore, q.read, q.settleLeft
	q.Use(g.store)
}

// settleLeft has what a member that is gone has left open in the indexes.
func (q *quotas) settleLeft(ctx context.Context, boot string) error {
	unrecorded, err := q.g.members.sweep(ctx, boot)
	if err == nil && unrecorded > 0 {
		err = fmt.Errorf("%w: it has no room to record %d executions of a gateway that has left", ErrStore, unrecorded)
	}
	return err
}

// read counts what the index has of a caller or a lot. It forgets the lost executions that have an outcome now.
func (q *quotas) read(ctx context.Context, h *held, add store.Stands) error {
	hash, ofLot := [16]byte(h.Holder[1:]), h.Holder[0] == holdsLot
	prefix := callerPrefix(hash)
	if ofLot {
		prefix = q.g.workflowPrefix(h.State.workflow)
	}
	for entry, err := range q.g.store.Scan(ctx, store.Prefix(prefix)) {
		if err != nil {
			return err
		}
		a, err := decodeAccount(entry.Value)
		if err != nil {
			return err
		}
		if ofLot {
			if a.lot != hash {
				continue
			}
			a = a.ofLot()
		}
		a.add(entry.Expires, func(amount store.Amount, created, expires time.Time) { add(a.boot, amount, created, expires) })
	}
	for key := range h.Lost {
		r, _, err := q.g.load(ctx, key)
		if err != nil {
			return err
		}
		if r == nil || !r.State.open() || r.Boot != q.g.boot || q.g.flights.find(key) != nil {
			delete(h.Lost, key)
		}
	}
	return nil
}

func ofCaller(caller CallerHash) store.Holder { return store.HolderOf(holdsCaller, caller) }

// oneCall is an execution that runs.
var oneCall = store.Amount{N: 1}

// admit counts an execution of caller, or returns a QuotaError. An execution that runs again is
// counted already, as the doubt old, and always admitted: otherwise a caller full of doubts could
// settle none. Pass what it returns to leave; it is nil without a quota, if nothing is counted
// of the caller.
func (q *quotas) admit(ctx context.Context, caller CallerHash, limit Quota, now time.Time, old *Record) (*held, error) {
	if limit.none() && q.Known(ofCaller(caller)) == nil {
		return nil, nil
	}
	most := store.Amount{N: limit.Open, Bytes: limit.Bytes}
	if limit.none() || q.g.shared && old != nil && counted(q.g, old) { // which it is instead of
		most = store.Amount{}
	}
	u := q.Enter(ofCaller(caller))
	full, err := q.Take(ctx, u, store.Request{Now: now, Limit: most, Need: store.Amount{N: 1, Bytes: 1}, Must: old != nil})
	if full != nil {
		over := &QuotaError{Open: full.Taken.N, Doubts: full.Stands.N, Bytes: full.Taken.Bytes, Quota: limit}
		if limit.Open <= 0 || over.Open < limit.Open || full.Spare { // else open executions must end first
			over.Retry = full.Retry
		}
		err = over
	}
	if err != nil {
		q.Leave(u)
		return nil, err
	}
	u.Release(store.Amount{Bytes: 1}) // it was asked for so that nothing runs where the limit is reached
	return u, nil
}

// leave ends an execution that was admitted to u.
func (q *quotas) leave(u *held) {
	u.Release(oneCall)
	q.Leave(u)
}

// unclaimed ends an execution that was admitted to u, and does not run.
func (q *quotas) unclaimed(u *held) {
	u.Drop(oneCall)
	q.Leave(u)
}

// settled counts the record of an execution that was admitted to u.
func settled(u *held, r *Record) {
	if u != nil {
		accountOf(r, r.size()).add(r.expires(), u.Add)
	}
}

// lose counts an execution that was admitted to u, of which the store may have a record.
func lose(u *held, key Key, r *Record) {
	if u != nil {
		u.Lose(key, store.Amount{N: 1, Bytes: int64(r.size())})
	}
}

// replaced counts next, the record in the place of another one of a caller, such as a doubt that was settled; nil if
// it is not in the index.
func (q *quotas) replaced(caller CallerHash, key Key, next *Record) {
	u := q.Known(ofCaller(caller))
	if next != nil {
		settled(u, next) // before what it replaces is given up, so that the count is never too low
	}
	u.Found(key)
	u.Less()
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
	boot          string  // for whom it counts, where several gateways share the store
}

func accountOf(r *Record, record int) account {
	a := account{state: r.State, created: r.Created, record: int64(record), result: r.Result.Size}
	if a.result > 0 {
		a.resultExpires = r.Result.Expires
	}
	return a
}

// add counts an execution that is settled and whose record expires at the given time.
func (a account) add(expires time.Time, add func(a store.Amount, created, expires time.Time)) {
	n := 0
	if a.state == StateInDoubt && a.lot == (lotHash{}) {
		n = 1
	}
	add(store.Amount{N: n, Bytes: a.record}, a.created, expires)
	if a.result > 0 {
		add(store.Amount{Bytes: a.result}, a.created, a.resultExpires)
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
	tagAccountBoot
)

// accountSize is the largest size of an encoded account.
const accountSize = 48 + 2 + len(lotHash{}) + 2 + 36

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
	e.String(tagAccountBoot, a.boot)
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
		case tagAccountBoot:
			a.boot = string(d.Field)
		}
	}
	return a, d.Err
}

// lotHash names the calls that share a limit of LimitWorkflows: those of a workflow that a token proves, or
// of a workflow and one caller, since who only knows its name must not use up what others need (P3). Zero
// is no limit.
type lotHash [16]byte

const (
	// growth is more than the outcome of a call, or its settlement, adds to its record besides an answer.
	growth = 512
	// usualAnswer is the least that a running call reserves for its answer, unless its ResultCap is smaller. If
	// answers of the workflow were larger it is more, up to a part of the limit. What a still larger one needs is
	// reserved as it comes.
	usualAnswer = 64 << 10
	usualPart   = 4
)

// lotOf is what a call counts in besides its caller's.
func (q *quotas) lotOf(c *Call, caller CallerHash) lotHash {
	switch {
	case c.Workflow == "" || q.most.Load() <= 0:
		return lotHash{}
	case c.Proven:
		caller = CallerHash{}
	}
	sum := store.Index(q.g.sealer, "stored bytes", c.Workflow, string(caller[:]))
	return lotHash(sum[:16])
}

// ofLot is what an account counts for in a lot. One that is not settled has room for what becomes of it.
func (a account) ofLot() account {
	if a.state == StateInDoubt || a.state.open() {
		a.record += growth
	}
	return a
}

// charged is what a record counts for in its lot.
func charged(r *Record) account {
	a := accountOf(r, r.size())
	a.lot = r.Lot
	return a.ofLot()
}

func (a account) bytes() int64 { return a.record + a.result }

// holding is what a change of a record has set aside. The zero value is that of one without a limit.
type holding struct {
	quotas        *quotas
	lot           *held
	replaces      bool  // another record
	bytes, answer int64 // set aside in all, and for the answer of a running call
}

// hold sets aside what next needs more than old, and at most answer bytes for the answer of a running call. old may be
// nil; both have one lot. If there is no room the error is a QuotaError, or with force nothing is set aside for the
// answer.
func (q *quotas) hold(
	ctx context.Context, old, next *Record, answer int64, force bool, now time.Time,
) (h holding, err error) {
	r := cmp.Or(next, old)
	if r == nil || r.Lot == (lotHash{}) || next == nil && !counted(q.g, old) {
		return h, nil
	}
	u := q.Enter(store.HolderOf(holdsLot, r.Lot))
	h = holding{quotas: q, lot: u, replaces: old != nil}
	u.Lock()
	u.State.workflow = r.Workflow
	answer = min(answer, max(usualAnswer, min(u.State.answers, q.most.Load()/usualPart)))
	u.Unlock()
	record, was := int64(0), int64(0)
	if next != nil {
		record = charged(next).bytes()
	}
	replaces := old != nil && counted(q.g, old)
	if replaces {
		was = charged(old).bytes()
	}
	over, err := h.take(ctx, max(answer+record-was, 0), false, now)
	if over != nil && force {
		answer = 0
		if replaces { // a record grows by less than what it was charged for
			record = 0
		}
		over, err = h.take(ctx, record, true, now)
	}
	if over != nil {
		err = over
	}
	if err != nil {
		q.Leave(u)
		return holding{}, err
	}
	h.answer = answer
	return h, nil
}

// take sets aside so many bytes more, or says why there is no room. With must there is.
func (h *holding) take(ctx context.Context, need int64, must bool, now time.Time) (*QuotaError, error) {
	if need <= 0 {
		return nil, nil
	}
	most := h.quotas.most.Load()
	full, err := h.quotas.Take(ctx, h.lot, store.Request{
		Now: now, Limit: store.Amount{Bytes: most}, Need: store.Amount{Bytes: need}, Must: must,
	})
	if full != nil {
		return &QuotaError{Bytes: full.Taken.Bytes, Workflow: most, Retry: full.Retry}, nil
	}
	if err == nil {
		h.bytes += need
	}
	return nil, err
}

// room sets aside so many bytes for an answer in all. The error is errNotKept, or that of the store.
func (h *holding) room(answer int64) error {
	u := h.lot
	if u == nil {
		return nil
	}
	ctx := context.Background()
	now, err := h.quotas.g.store.Now(ctx)
	if err != nil {
		return err
	}
	u.Lock()
	u.State.answers = max(u.State.answers, answer)
	u.Unlock()
	if over, err := h.take(ctx, answer-h.answer, false, now); over != nil || err != nil {
		return cmp.Or(err, errNotKept)
	}
	h.answer = max(h.answer, answer)
	return nil
}

// replaced is end after the commit of a record that replaces a settled one.
func (h *holding) replaced(err error, key Key, record *Record) {
	if err == nil || errors.Is(err, store.ErrUnknown) { // it may be there
		h.end(true, key, record)
	} else {
		h.end(false, key, nil)
	}
}

// end counts the record that is left under key instead of the old one, nil for none. Without a commit, left is nil
// and the old one stays, or left is a record that may be there.
func (h *holding) end(committed bool, key Key, left *Record) {
	u := h.lot
	if u == nil {
		return
	}
	h.lot = nil
	u.Lock()
	u.State.answers -= u.State.answers / 16
	u.Unlock()
	aside := store.Amount{Bytes: h.bytes}
	switch {
	case committed:
		if left != nil {
			charged(left).add(left.expires(), u.Add)
		}
		u.Found(key) // the index has it now
		u.Release(aside)
		if h.replaces {
			u.Less()
		}
	default:
		if left != nil { // an answer may be there, too
			u.Lose(key, store.Amount{Bytes: max(charged(left).bytes(), h.bytes)})
		}
		u.Drop(aside)
	}
	h.quotas.Leave(u)
}
