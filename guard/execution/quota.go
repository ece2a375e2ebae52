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

// unsettled are the open executions of a caller.
type unsettled struct {
	running, doubts int
	shared
}

// shared is of a holder where several gateways share the store (ADR 0137). Each counts what it has written itself. What
// is less than it has counted, since it was settled elsewhere or counted twice, is seen when it counts anew: before it
// finds nothing left.
type shared struct {
	allowance store.Allowance
	// lost are the bytes of executions of this member whose outcome is not in the store. The indexes lack them.
	lost map[Key]int64
	// everywhere are the doubts of all members, when they were counted last.
	everywhere int
}

func (s *shared) lostBytes() (bytes int64) {
	for _, b := range s.lost {
		bytes += b
	}
	return bytes
}

// lose notes an execution, and reports that it is the first of its holder: who has one is not forgotten.
func (s *shared) lose(key Key, bytes int64) (first bool) {
	if first = len(s.lost) == 0; first {
		s.lost = map[Key]int64{}
	}
	s.lost[key] = bytes
	return first
}

// find forgets the executions that have an outcome now, and reports that none is left where one was.
func (s *shared) find(ctx context.Context, g *Guard) (last bool, err error) {
	had := len(s.lost) > 0
	for key := range s.lost {
		r, _, err := g.load(ctx, key)
		if err != nil {
			return false, err
		}
		if r == nil || !r.State.open() || r.Boot != g.boot || g.flights.find(key) != nil {
			delete(s.lost, key)
		}
	}
	return had && len(s.lost) == 0, nil
}

// countsFor is the member for which a record counts: who has written it, but for doubts that others have recorded.
func (r *Record) countsFor() string { return cmp.Or(r.Counts, r.Boot) }

// countHere has a record that this member writes over another's count for itself.
func countHere(g *Guard, r *Record) {
	if g.caps != nil && r.countsFor() != g.boot {
		r.Counts = g.boot
	}
}

// counted reports whether this member has counted a record.
func counted(g *Guard, r *Record) bool { return g.caps == nil || r.countsFor() == g.boot }

// settleLeft has what a member that is gone has left open in the indexes.
func settleLeft(ctx context.Context, g *Guard, boot string) error {
	unrecorded, err := g.members.sweep(ctx, boot)
	if err == nil && unrecorded > 0 {
		err = fmt.Errorf("%w: it has no room to record %d executions of a gateway that has left", ErrStore, unrecorded)
	}
	return err
}

const (
	// kindCap is of what each member may have of a quota: v c kind holder.
	kindCap = 'c'

	capOfCaller, capOfLot = 'c', 'w' // the kinds
)

// renewTime is how often caps are asked for anew of whom something runs, so that they stay.
const renewTime = time.Hour

// renewCaps keeps what this member may have of those of whom something runs here.
func renewCaps(ctx context.Context, g *Guard) {
	for _, caller := range g.quotas.usages.Entered() {
		u := g.quotas.usages.Enter(caller)
		g.quotas.renew(ctx, u, caller)
		g.quotas.usages.Leave(u)
	}
	for _, hash := range g.lots.usages.Entered() {
		u := g.lots.usages.Enter(hash)
		g.lots.renew(ctx, u, hash)
		g.lots.usages.Leave(u)
	}
}

// capChanged gives back what this member does not use, if another one has found nothing left.
func capChanged(ctx context.Context, g *Guard, key []byte) {
	if len(key) != len(capKey(0, [16]byte{})) { // any of them: who finds nothing left asks again
		return
	}
	if asked, err := g.caps.Asked(ctx, key); err != nil || !asked {
		return
	}
	switch holder := [16]byte(key[3:]); key[2] {
	case capOfCaller:
		u := g.quotas.usages.Enter(holder) // also of one that was forgotten, whose cap stands
		defer g.quotas.usages.Leave(u)
		u.Lock()
		defer u.Unlock()
		if g.quotas.count(ctx, u, holder, func(string, store.Amount) {}) == nil {
			_ = g.caps.GiveBack(ctx, &u.State.allowance, key, held(u))
		}
	case capOfLot:
		u := g.lots.usages.Enter(holder)
		defer g.lots.usages.Leave(u)
		u.Lock()
		defer u.Unlock()
		// Of one that was forgotten nothing runs, and what is stored is in the index.
		if u.State.workflow == "" || g.lots.count(ctx, u, holder, func(string, store.Amount) {}) == nil {
			_ = g.caps.GiveBack(ctx, &u.State.allowance, key, store.Amount{Bytes: heldBytes(u)})
		}
	}
}

func capKey(kind byte, holder [16]byte) []byte {
	return append(append(make([]byte, 0, 3+16), spaceLive, kindCap, kind), holder[:]...)
}

type usage = store.Usage[unsettled]

// quotas counts the executions and bytes of callers with a quota.
type quotas struct {
	g      *Guard
	usages store.Usages[CallerHash, unsettled]
}

// usageWindow is the granularity with which the expiry of records is counted.
const usageWindow = 10 * time.Minute

// held is what this member has of a caller.
func held(u *usage) store.Amount {
	s := &u.State
	return store.Amount{N: s.running + s.doubts + len(s.lost), Bytes: u.Bytes + s.lostBytes()}
}

// admit counts an execution of caller, or returns a QuotaError. An execution that runs again is
// counted already, as the doubt old, and always admitted: otherwise a caller full of doubts could
// settle none. Pass the returned usage to leave; it is nil without a quota, if nothing is counted
// of the caller.
func (q *quotas) admit(ctx context.Context, caller CallerHash, limit Quota, now time.Time, old *Record) (*usage, error) {
	if limit.none() && q.usages.Known(caller) == nil {
		return nil, nil
	}
	u := q.usages.Enter(caller)
	if err := q.enter(ctx, u, caller, limit, now, old); err != nil {
		q.usages.Leave(u)
		return nil, err
	}
	return u, nil
}

func (q *quotas) enter(ctx context.Context, u *usage, caller CallerHash, limit Quota, now time.Time, old *Record) error {
	u.Lock()
	defer u.Unlock()
	if !u.Counted {
		if err := q.count(ctx, u, caller, func(string, store.Amount) {}); err != nil {
			return err
		}
	}
	retry := u.Expire(now)
	has := held(u)
	switch {
	case q.g.caps != nil:
		if limit.none() || old != nil && counted(q.g, old) { // which it is instead of
			break
		}
		if err := q.share(ctx, u, caller, limit, now, retry, old != nil); err != nil {
			return err
		}
	case old != nil:
	case limit.Open > 0 && has.N >= limit.Open:
		return &QuotaError{Open: has.N, Doubts: u.State.doubts, Bytes: u.Bytes, Quota: limit}
	case limit.Bytes > 0 && u.Bytes >= limit.Bytes:
		return &QuotaError{Open: has.N, Doubts: u.State.doubts, Bytes: u.Bytes, Quota: limit, Retry: retry}
	}
	u.State.running++
	return nil
}

// share has this member run one more execution within the limit of all members, or returns a QuotaError.
func (q *quotas) share(ctx context.Context, u *usage, caller CallerHash, limit Quota, now, retry time.Time, must bool) error {
	full, err := q.g.caps.Admit(ctx, &u.State.allowance, now, q.request(ctx, u, caller, limit, must))
	switch {
	case err != nil && errors.Is(err, ErrStore):
		return err
	case err != nil:
		return fmt.Errorf("%w: %w", ErrStore, err)
	case full == nil:
		return nil
	}
	over := &QuotaError{Open: full.Taken.N, Doubts: u.State.everywhere, Bytes: full.Taken.Bytes, Quota: limit, Retry: full.Retry}
	if over.Retry.IsZero() && (limit.Open <= 0 || over.Open < limit.Open) {
		over.Retry = retry
	}
	return over
}

func (q *quotas) request(ctx context.Context, u *usage, caller CallerHash, limit Quota, must bool) *store.CapRequest {
	return &store.CapRequest{
		Key: capKey(capOfCaller, caller), Limit: store.Amount{N: limit.Open, Bytes: limit.Bytes},
		Need: store.Amount{N: 1, Bytes: 1}, Must: must, // a byte: who has reached the limit runs nothing more
		Mine: func() store.Amount { return held(u) }, Left: func(ctx context.Context, boot string) error { return settleLeft(ctx, q.g, boot) },
		Count: func(add func(string, store.Amount)) error { return q.count(ctx, u, caller, add) },
	}
}

func (q *quotas) renew(ctx context.Context, u *usage, caller CallerHash) {
	u.Lock()
	defer u.Unlock()
	if now, err := q.g.store.Now(ctx); err == nil {
		r := q.request(ctx, u, caller, Quota{}, true)
		r.Need = store.Amount{}
		_ = q.g.caps.Renew(ctx, &u.State.allowance, now, r) // else in an hour
	}
}

// count counts anew what stands of a caller. What others have written goes to add, by their boot.
func (q *quotas) count(ctx context.Context, u *usage, caller CallerHash, add func(boot string, one store.Amount)) error {
	s := &u.State
	s.doubts, s.everywhere = 0, 0
	now, err := q.g.store.Now(ctx)
	if err == nil {
		err = u.Count(ctx, q.g.store, callerPrefix(caller), func(entry store.Entry) error {
			a, err := decodeAccount(entry.Value)
			if err != nil {
				return err
			}
			one := store.Amount{Bytes: a.bytes(now)}
			if a.state == StateInDoubt {
				one.N = 1
				s.everywhere++
			}
			if q.g.caps == nil || a.boot == q.g.boot {
				a.add(u, entry.Expires)
			} else {
				add(a.boot, one)
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	u.Expire(now)
	last, err := s.find(ctx, q.g)
	if last {
		q.usages.Leave(u)
	}
	s.everywhere += len(s.lost)
	return err
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

// unrecorded counts an execution that was admitted to u, of which the store may have a record, or another one than r.
func (q *quotas) unrecorded(u *usage, key Key, r *Record) {
	switch {
	case u == nil:
	case q.g.caps != nil:
		u.Lock()
		defer u.Unlock()
		if u.State.lose(key, int64(r.size())) {
			q.usages.Enter(r.Caller)
		}
	case !r.State.open():
		settled(u, r)
	}
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

// unclaimed ends an execution that was admitted to u, and does not run.
func (q *quotas) unclaimed(u *usage) {
	if u == nil {
		return
	}
	u.Lock()
	u.State.running--
	u.State.allowance.Drop(held(u))
	u.Unlock()
	q.usages.Leave(u)
}

// resolved counts that a doubt of r's caller was settled, or runs again. next is the new record;
// nil if it is not in the index.
func (q *quotas) resolved(key Key, r, next *Record) {
	u := q.usages.Known(r.Caller)
	if u == nil {
		return
	}
	u.Lock()
	defer u.Unlock()
	if q.g.caps == nil {
		u.State.doubts = max(u.State.doubts-1, 0)
		u.Add(-1, -int64(r.size()), r.Created, time.Time{})
	} else if _, was := u.State.lost[key]; was {
		if delete(u.State.lost, key); len(u.State.lost) == 0 {
			q.usages.Leave(u)
		}
	}
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
	if old != nil && q.g.caps == nil {
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
	boot          string  // for whom it counts, where several gateways share the store
}

// bytes is what stands of an account whose record has not expired.
func (a account) bytes(now time.Time) int64 {
	if a.result > 0 && now.Before(a.resultExpires) {
		return a.record + a.result
	}
	return a.record
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

// lot counts what the calls of one lotHash have stored.
type lot = store.Usage[unstored]

// unstored is what is reserved of a lot besides what it has stored, and how large its answers are lately, in bytes.
type unstored struct {
	reserved, answers int64
	workflow          string // of the lot
	shared
}

// heldBytes is what this member has of a lot.
func heldBytes(u *lot) int64 { return u.Bytes + u.State.reserved + u.State.lostBytes() }

// lots bound what workflows store. What a change may need is reserved before its commit, so that the limit
// holds whatever races.
type lots struct {
	g      *Guard
	most   atomic.Int64
	usages store.Usages[lotHash, unstored]
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
	sum := store.Index(l.g.sealer, "stored bytes", c.Workflow, string(caller[:]))
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
	hash          lotHash
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
	if r == nil || r.Lot == (lotHash{}) || next == nil && !counted(l.g, old) {
		return h, nil
	}
	u := l.usages.Enter(r.Lot)
	u.Lock()
	defer u.Unlock()
	u.State.workflow = r.Workflow
	if !u.Counted {
		if err := l.count(ctx, u, r.Lot, func(string, store.Amount) {}); err != nil {
			l.usages.Leave(u)
			return h, err
		}
	}
	most := l.most.Load()
	answer = min(answer, max(usualAnswer, min(u.State.answers, most/usualPart)))
	retry, record, was := u.Expire(now), int64(0), int64(0)
	if next != nil {
		a := charged(next)
		record = a.record + a.result
	}
	replaces := old != nil && counted(l.g, old)
	if replaces {
		a := charged(old)
		was = a.record + a.result
	}
	need := max(answer+record-was, 0)
	over, err := l.take(ctx, u, r.Lot, need, false, now)
	if over != nil && force {
		if answer, need = 0, record; replaces {
			need = 0 // a record grows by less than what it was charged for
		}
		over, err = l.take(ctx, u, r.Lot, need, true, now)
	}
	if over != nil {
		err, over.Retry = over, cmp.Or(over.Retry, retry)
	}
	if err != nil {
		l.usages.Leave(u)
		return h, err
	}
	u.State.reserved += need
	return holding{l, u, r.Lot, old, need, answer}, nil
}

// take reports whether a lot has room for so many bytes. With must it has.
func (l *lots) take(ctx context.Context, u *lot, hash lotHash, need int64, must bool, now time.Time) (over *QuotaError, err error) {
	most, has := l.most.Load(), heldBytes(u)
	switch {
	case most <= 0 || need <= 0:
		return nil, nil
	case l.g.caps == nil:
		if must || has+need <= most {
			return nil, nil
		}
		return &QuotaError{Bytes: has, Workflow: most}, nil
	}
	full, err := l.g.caps.Admit(ctx, &u.State.allowance, now, l.request(ctx, u, hash, need, must))
	switch {
	case err != nil && errors.Is(err, ErrStore):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	case full == nil:
		return nil, nil
	}
	return &QuotaError{Bytes: full.Taken.Bytes, Workflow: most, Retry: full.Retry}, nil
}

func (l *lots) request(ctx context.Context, u *lot, hash lotHash, need int64, must bool) *store.CapRequest {
	return &store.CapRequest{
		Key: capKey(capOfLot, hash), Limit: store.Amount{Bytes: l.most.Load()}, Need: store.Amount{Bytes: need}, Must: must,
		Mine: func() store.Amount { return store.Amount{Bytes: heldBytes(u)} }, Left: func(ctx context.Context, boot string) error { return settleLeft(ctx, l.g, boot) },
		Count: func(add func(string, store.Amount)) error { return l.count(ctx, u, hash, add) },
	}
}

func (l *lots) renew(ctx context.Context, u *lot, hash lotHash) {
	u.Lock()
	defer u.Unlock()
	if now, err := l.g.store.Now(ctx); err == nil {
		_ = l.g.caps.Renew(ctx, &u.State.allowance, now, l.request(ctx, u, hash, 0, true)) // else in an hour
	}
}

// count counts anew what stands of a lot. What others have written goes to add, by their boot.
func (l *lots) count(ctx context.Context, u *lot, hash lotHash, add func(boot string, one store.Amount)) error {
	now, err := l.g.store.Now(ctx)
	if err == nil {
		err = u.Count(ctx, l.g.store, l.g.workflowPrefix(u.State.workflow), func(entry store.Entry) error {
			a, err := decodeAccount(entry.Value)
			if err != nil || a.lot != hash {
				return err
			}
			if a.state == StateInDoubt {
				a.record += growth
			}
			if l.g.caps == nil || a.boot == l.g.boot {
				addAccount(u, 1, a, entry.Expires)
			} else {
				add(a.boot, store.Amount{Bytes: a.bytes(now)})
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	u.Expire(now)
	last, err := u.State.find(ctx, l.g)
	if last {
		l.usages.Leave(u)
	}
	return err
}

// room reserves so many bytes for an answer in all. The error is errNotKept, or that of the store.
func (h *holding) room(answer int64) error {
	u := h.lot
	if u == nil {
		return nil
	}
	ctx, now := context.Background(), time.Time{}
	if h.lots.g.caps != nil {
		var err error
		if now, err = h.lots.g.store.Now(ctx); err != nil {
			return err
		}
	}
	u.Lock()
	defer u.Unlock()
	u.State.answers = max(u.State.answers, answer)
	more := answer - h.answer
	if over, err := h.lots.take(ctx, u, h.hash, more, false, now); over != nil || err != nil {
		return cmp.Or(err, errNotKept)
	}
	if more > 0 {
		u.State.reserved += more
		h.bytes, h.answer = h.bytes+more, answer
	}
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
	u.State.reserved -= h.bytes
	u.State.answers -= u.State.answers / 16
	alone := h.lots.g.caps == nil
	if !committed {
		u.State.allowance.Drop(store.Amount{Bytes: heldBytes(u)})
	}
	if committed && h.old != nil && alone {
		addAccount(u, -1, charged(h.old), h.old.expires())
	}
	if _, was := u.State.lost[key]; was && committed { // the index has it now
		if delete(u.State.lost, key); len(u.State.lost) == 0 {
			defer h.lots.usages.Leave(u)
		}
	}
	switch {
	case left != nil && !committed && !alone:
		a := charged(left)
		if u.State.lose(key, max(a.record+a.result, h.bytes)) { // an answer may be there, too
			h.lots.usages.Enter(h.hash)
		}
	case left != nil:
		addAccount(u, 1, charged(left), left.expires())
	}
	u.Unlock()
	h.lots.usages.Leave(u)
}
