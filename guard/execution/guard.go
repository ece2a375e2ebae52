// Package execution executes a side effect at most once under retries (P1).
//
// A Call names one intended effect by its Key. LookUp returns its record: none, a running
// execution to follow, a result to replay, or a reason to refuse. Claim makes one caller the
// owner, durably, before anything is sent (P2); the owner settles its Execution as completed,
// released or in doubt (P6). An unknown outcome stays in doubt until there is evidence; elapsed
// time is never evidence.
//
// The package knows neither HTTP servers nor Caddy. It keeps everything in a store.Store, sealed
// (P8). docs/state_machine.md draws the states.
package execution

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Guard is one node's view of all executions in one store. It is safe for concurrent use.
type Guard struct {
	records
	store   store.Store
	fresh   bool // the store was empty when it was opened
	members members
	pending pendingOutcomes
	keys    Keys
	flights flights
	groups  groups
	running gate
	namings atomic.Pointer[map[string]Naming] // under which this process makes keys, by guard
	writers store.Writers                     // commits under way with sealed values
	quotas  quotas
	bodies  *body.Budget
}

// BodyMemory bounds the memory that the bodies of all requests and answers share. It begins with
// DefaultBodyMemory.
func (g *Guard) BodyMemory() *body.Budget { return g.bodies }

// LimitWorkflows bounds the bytes of records and answers that the calls of one workflow may have in the
// store, before they are sealed; 0 is no limit. It counts the calls that were claimed under a limit, and
// holds at once. A call that finds no room for its record and an answer, of 64 KiB or as large as those before it
// up to a quarter of the limit, is refused with a QuotaError; an answer that finds none is not kept, like one over
// the ResultCap. A call in doubt can always
// be settled and run again.
func (g *Guard) LimitWorkflows(bytes int64) { g.quotas.most.Store(bytes) }

// DefaultBodyMemory is the default of BodyMemory, in bytes.
const DefaultBodyMemory = 128 << 20

// Errors of Guard.
var (
	// ErrTaken: another call owns the key; look it up again.
	ErrTaken = errors.New("guard: the key was claimed by another call")
	// ErrDraining: the process is shutting down and starts nothing new.
	ErrDraining = errors.New("guard: shutting down")
	// ErrStore: the store did not answer or refused a record. Nothing may be forwarded (P4).
	ErrStore = errors.New("guard: the store is unavailable")
	// ErrUnreadable: the record of the key cannot be read. It comes with ErrStore.
	ErrUnreadable = errors.New("guard: the record cannot be read")
	// ErrUnrecorded: the outcome did not reach the store: the execution is in doubt.
	ErrUnrecorded = errors.New("guard: the outcome could not be recorded")
)

// Open opens the executions in st: it checks that sealer belongs to the store and settles the
// executions that an earlier process left open (Recovery). A process may open one Guard per
// store.
//
// If st is a store.Shared, it settles those of all members that are gone, and again whenever one has left.
// Close ends that.
func Open(ctx context.Context, st store.Store, sealer store.Sealer) (*Guard, Recovery, error) {
	boot := newClaim()
	g := &Guard{
		records: records{sealer: sealer, boot: hex.EncodeToString(boot[:])}, store: st,
		bodies:  body.NewBudget(DefaultBodyMemory),
		pending: pendingOutcomes{all: map[[16]byte]*pendingOutcome{}, round: make(turn, 1)},
	}
	g.pending.ctx, g.pending.cancel = context.WithCancel(context.Background())
	g.members.g, g.pending.g, g.keys = g, g, Keys{g: g, wake: make(chan struct{}, 1)}
	if g.members.store = fleet.Of(st); g.members.store != nil {
		g.boot, g.shared = g.members.store.Boot(), true
	}
	g.quotas.open(g)
	g.namings.Store(&map[string]Naming{})
	var err error
	if g.node, g.fresh, err = g.identify(ctx); err != nil {
		return nil, Recovery{}, err
	}
	g.groups.open(g)
	recovery, err := g.members.recover(ctx, false)
	if err != nil {
		return nil, Recovery{}, fmt.Errorf("recovering executions: %w", err)
	}
	g.groups.survey(ctx)
	g.members.start()
	return g, recovery, nil
}

// OnRecovery has report called, by one goroutine at a time, when executions of a member were settled that has left the
// shared store, and when those of this process were whose outcome could not be recorded.
func (g *Guard) OnRecovery(report func(Recovery)) { g.members.reportTo(report) }

// Drain refuses new executions and waits for the running ones until ctx ends. It returns how many
// still run: if the process ends now, they are found in doubt.
func (g *Guard) Drain(ctx context.Context) int { return g.running.drain(ctx) }

// Running is the number of executions that this process runs.
func (g *Guard) Running() int {
	g.running.mu.Lock()
	defer g.running.mu.Unlock()
	return g.running.n
}

// Keys are the sealing keys of the store.
func (g *Guard) Keys() *Keys { return &g.keys }

// Node is the name of this gateway, kept with its store.
func (g *Guard) Node() string { return g.node }

// Boot identifies this process of the gateway.
func (g *Guard) Boot() string { return g.boot }

func newClaim() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails
	return id
}

// Status is the result of a LookUp.
type Status uint8

// The statuses of an execution.
const (
	// Free: nothing is recorded; the call may be claimed.
	Free Status = iota
	// Mismatch: the key was used for a call with another fingerprint.
	Mismatch
	// RunningHere: a flight of this process; it can be followed.
	RunningHere
	// RunningElsewhere: it runs on another node.
	RunningElsewhere
	// Replayable: completed, the result is kept.
	Replayable
	// ResultExpired: completed, the result has expired, the key is still taken.
	ResultExpired
	// ResultUnavailable: completed, the result was never kept.
	ResultUnavailable
	// Doubtful: in doubt.
	Doubtful
	// RolledBack: undone; refused forever.
	RolledBack
)

// Finding is the state of a key at one moment.
type Finding struct {
	Status Status
	// Record is what the store holds; nil for Free and RunningHere. Of a completed one LookUp may
	// return only what a replay needs: state, claim, fingerprint, checkpoint, Created, First, cause,
	// status and result.
	Record *Record
	// Flight is set for RunningHere.
	Flight  *Flight
	version store.Version
	other   State   // of the call that a Mismatch was recorded of
	answer  *answer // nil where Result has to read it
}

// State is the state of the execution; 0 for Free.
func (f *Finding) State() State {
	switch f.Status {
	case Free:
		return 0
	case Mismatch:
		return f.other
	case RunningHere, RunningElsewhere:
		return StateSending
	case Doubtful:
		return StateInDoubt
	}
	return f.Record.State
}

// LookUp looks a call up: first among the running executions of this process, then in the store.
// Its error is ErrStore: nothing is known.
func (g *Guard) LookUp(ctx context.Context, key Key, fp body.Fingerprint) (Finding, error) {
	return g.lookUp(ctx, key, fp, true, true)
}

// lookUp is LookUp. With replay it reads the answer first, which has what a replay needs of the
// record and is deleted where the record changes: then a replay is one read. With tries a pending outcome is tried.
func (g *Guard) lookUp(ctx context.Context, key Key, fp body.Fingerprint, replay, tries bool) (Finding, error) {
	var orphan store.Version
	for {
		if f := g.flights.find(key); f != nil {
			return f.found(fp), nil
		}
		if replay {
			a, err := g.answerUnder(ctx, key)
			if err == nil {
				found, err := g.found(ctx, &a.record, fp)
				found.answer = a
				return found, err
			}
			if !errors.Is(err, ErrResultUnavailable) {
				return Finding{}, err
			}
		}
		record, version, err := g.load(ctx, key)
		if err != nil {
			return Finding{}, err
		}
		if record == nil {
			return Finding{Status: Free}, nil
		}
		if record.State == StateSending && record.Boot == g.boot && orphan != version {
			// Its flight began or ended between the two reads; read once more. The same version
			// twice without a flight: its outcome was never recorded.
			orphan = version
			continue
		}
		if orphan == version && tries && g.pending.settle(ctx, record.Claim) {
			continue
		}
		found, err := g.found(ctx, record, fp)
		found.version = version
		return found, err
	}
}

func (f *Flight) found(fp body.Fingerprint) Finding {
	if f.fingerprint != fp {
		return Finding{Status: Mismatch, other: StateSending}
	}
	return Finding{Status: RunningHere, Flight: f}
}

// found is what a call with a fingerprint finds where a record is.
func (g *Guard) found(ctx context.Context, record *Record, fp body.Fingerprint) (Finding, error) {
	found := Finding{Record: record}
	if record.Fingerprint != fp && !record.blocked() {
		found.Status, found.other = Mismatch, record.State
		if record.State == StateSending {
			orphan, err := g.members.orphaned(ctx, record)
			if err != nil {
				return found, err
			}
			if orphan { // as status says
				found.other = StateInDoubt
			}
		}
		return found, nil
	}
	var err error
	found.Status, err = g.status(ctx, record)
	return found, err
}

// Follow follows an execution that was found running, here or at another member of a shared store. The flight is nil
// where it cannot be followed from here. The follower is nil if its answer is too large for new followers, or it has
// ended meanwhile; else it must be closed.
func (g *Guard) Follow(key Key, found Finding) (*Flight, *Follower) {
	switch {
	case found.Status == RunningHere:
		return found.Flight, found.Flight.follow()
	case g.members.store == nil:
		return nil, nil
	}
	return g.members.follow(key, found.Record)
}

func (g *Guard) load(ctx context.Context, key Key) (*Record, store.Version, error) {
	name := scratch.Get().(*[]byte)
	defer freeScratch(name)
	*name = appendRecordKey((*name)[:0], key)
	plain, version, err := g.read(ctx, *name)
	if plain == nil || err != nil {
		return nil, 0, err
	}
	record, err := decodeRecord(plain)
	return record, version, unreadable(err)
}

func unreadable(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", errUnreadable, err)
}

// table keeps records that most calls have none of. Executions, their accounts and answers have a codec of their own,
// which takes a sixth of the time.
func table[T any](g *Guard, prefix ...byte) *store.Table[T] {
	return &store.Table[T]{Store: g.store, Sealer: g.sealer, Prefix: string(prefix), Failed: ErrStore, Unreadable: errUnreadable}
}

// errUnreadable is an ErrUnreadable, and so an ErrStore.
var errUnreadable = fmt.Errorf("%w: %w", ErrStore, ErrUnreadable)

// read reads and opens a sealed value; nil is none.
func (g *Guard) read(ctx context.Context, name []byte) ([]byte, store.Version, error) {
	entry, err := g.store.Get(ctx, name)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, 0, nil
	case errors.Is(err, store.ErrDamaged):
		return nil, 0, unreadable(err)
	case err != nil:
		return nil, 0, fmt.Errorf("%w: %w", ErrStore, err)
	}
	plain, err := g.sealer.Open(entry.Value[:0], entry.Value, name)
	return plain, entry.Version, unreadable(err)
}

// blocked reports that every call under the key is refused: its call never ran, and its content
// is unknown.
func (r *Record) blocked() bool {
	return r.State == StateRolledBack && r.Fingerprint == body.Fingerprint{}
}

func (g *Guard) status(ctx context.Context, r *Record) (Status, error) {
	switch r.State {
	case StateRolledBack:
		return RolledBack, nil
	case StateInDoubt:
		return Doubtful, nil
	case StateCompleted:
		if !r.Result.Kept {
			return ResultUnavailable, nil
		}
		now, err := g.store.Now(ctx)
		if err != nil {
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if !now.Before(r.Result.Expires) {
			return ResultExpired, nil
		}
		return Replayable, nil
	default:
		orphan, err := g.members.orphaned(ctx, r)
		if err != nil || !orphan {
			return RunningElsewhere, err
		}
		if r.Cause = CauseUnrecorded; g.members.store != nil && r.Boot != g.boot { // nobody has recorded it yet
			r.Cause = CauseDied
		}
		return Doubtful, nil
	}
}

// Age is how long ago the first attempt of the call was claimed, by the store's clock.
func (g *Guard) Age(ctx context.Context, found Finding) (time.Duration, error) {
	now, err := g.store.Now(ctx)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return now.Sub(found.Record.began()), nil
}

// Claim makes the caller the owner of c's key, durably, before anything is sent (P2). found is
// the result of LookUp: Free, or Doubtful if there is evidence that the call was not applied or
// the route runs it again. The commit carries the batches of other packages and always ends them.
// If the condition of one of their writes fails, the error is its *store.Conflict and nothing is
// claimed.
//
// A *QuotaError means that the caller holds too much already.
//
// The owner must settle the execution, whatever happens.
func (g *Guard) Claim(ctx context.Context, c *Call, found Finding, batches ...*store.Batch) (e *Execution, err error) {
	if under, ok := (*g.namings.Load())[c.Scope.Guard]; c.Naming != nil && (!ok || under != *c.Naming) {
		var naming *store.Batch
		if naming, err = g.holdNaming(ctx, c); naming != nil {
			batches = append(slices.Clip(batches), naming)
		}
	}
	if err == nil {
		e, err = g.begin(ctx, c, found, batches)
	}
	return e, done(err, batches)
}

func done(err error, batches []*store.Batch) error {
	for _, b := range batches {
		err = b.Done(err)
	}
	return err
}

func (g *Guard) begin(ctx context.Context, c *Call, found Finding, batches []*store.Batch) (*Execution, error) {
	if !g.running.enter() {
		return nil, ErrDraining
	}
	caller := g.Caller(c.Scope.Caller)
	flight := g.flights.start(c, caller, g.bodies)
	if flight == nil {
		g.running.leave()
		return nil, ErrTaken
	}
	e, err := g.claim(ctx, c, flight, found, batches)
	if err != nil {
		g.flights.end(flight, endedUnsent)
		g.running.leave()
		if errors.Is(err, store.ErrUnknown) { // it may be there, and is nobody's
			g.pending.drop()
		}
		return nil, err
	}
	return e, nil
}

func (g *Guard) claim(ctx context.Context, c *Call, flight *Flight, found Finding, batches []*store.Batch) (*Execution, error) {
	defer g.writers.Enter()()
	now, err := g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	usage, err := g.quotas.admit(ctx, flight.caller, c.Quota, now, found.Record)
	if err != nil {
		return nil, err
	}
	e := &flight.owner
	*e = Execution{g: g, flight: flight, record: g.newRecord(c, flight.caller, now), usage: usage, attempt: c.Attempt}
	record := &e.record
	condition := store.Absent()
	if found.Record != nil {
		record.First = found.Record.began()
		condition = store.VersionIs(found.version)
	}
	record.Lot = g.quotas.lotOf(c, flight.caller)
	again := found.Record != nil && found.Record.Lot == record.Lot
	if e.holding, err = g.quotas.hold(ctx, nil, record, c.ResultCap, again, now); err != nil {
		g.quotas.unclaimed(usage)
		return nil, err
	}
	room := rooms.Get().(*room)
	defer room.free()
	g.putIn(room, c.Key, found.Record, record, condition, batches...)
	room.writes = c.Attempt.claims(room.writes, now, record.Deadline)
	e.version, err = g.store.Commit(ctx, room.writes...)
	if left := (*Record)(nil); err != nil {
		if errors.Is(err, store.ErrUnknown) { // it may be there
			left = record.unrecorded(nil)
			lose(usage, c.Key, left)
		}
		e.holding.end(false, c.Key, left)
	}
	if err != nil {
		g.quotas.unclaimed(usage)
		var lost *store.Conflict
		switch {
		case !errors.As(err, &lost):
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		case lost.Index == 0:
			return nil, ErrTaken
		}
		return nil, lost
	}
	if found.Record != nil {
		g.quotas.replaced(found.Record.Caller, c.Key, nil)
		g.quotas.Known(store.HolderOf(holdsLot, found.Record.Lot)).Less()
	}
	if c.Attempt != nil {
		c.Attempt.runs(time.Time{})
	}
	return e, nil
}

// gate counts running executions; once shut it admits no new ones.
type gate struct {
	mu   sync.Mutex
	n    int
	shut bool
	idle chan struct{} // closed when n falls to 0 after shut
}

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut {
		return false
	}
	g.n++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// drain shuts the gate and waits until it is empty or ctx ends. It returns how many are left.
func (g *gate) drain(ctx context.Context) int {
	g.mu.Lock()
	g.shut = true
	if g.n == 0 {
		g.mu.Unlock()
		return 0
	}
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	idle := g.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return 0
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n
}

// layoutVersion is the version of the keys and records that this build writes.
const layoutVersion = "3"

// Errors of Open.
var (
	// ErrWrongKey: the store was sealed with another key ring.
	ErrWrongKey = errors.New("guard: the key does not belong to this store: give the key that was made with the store; " +
		"without it no recorded execution can be found, and retries would run again")
	// errLayout: an unknown build wrote the store.
	errLayout = errors.New("guard: the store was written by another version of the gateway")
)

func metaKey(name string) []byte { return append([]byte{spaceMeta}, name...) }

// Fresh reports whether st was never used, so that a new key may be made for it. Any other store
// needs the key that it was made with.
func Fresh(ctx context.Context, st store.Store) (bool, error) {
	for _, err := range st.Scan(ctx, store.Range{Limit: 1}) {
		return false, err
	}
	return true, nil
}

// identify checks the store's key and layout and reads the node's id, or writes them into a fresh
// store.
func (g *Guard) identify(ctx context.Context) (node string, fresh bool, err error) {
	layout, err := g.store.Get(ctx, metaKey("layout"))
	if errors.Is(err, store.ErrNotFound) {
		return g.initialise(ctx)
	}
	if err != nil {
		return "", false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if err := checkLayout(layout); err != nil {
		return "", false, err
	}
	check := metaKey("key")
	entry, err := g.store.Get(ctx, check)
	if errors.Is(err, store.ErrNotFound) {
		return "", false, fmt.Errorf("%w: it holds data without a key check", errLayout)
	}
	if err != nil {
		return "", false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if id := g.sealer.KeyOf(entry.Value); !slices.Contains(g.sealer.KeyIDs(), id) {
		return "", false, fmt.Errorf("%w: it is sealing key %d", ErrMissingKey, id)
	}
	plain, err := g.sealer.Open(nil, entry.Value, check)
	if err != nil || string(plain) != g.keyCheck() {
		return "", false, ErrWrongKey
	}
	if err := g.keys.open(ctx); err != nil {
		return "", false, err
	}
	if g.members.store != nil {
		return g.members.store.Self().Node, false, nil
	}
	name, err := g.store.Get(ctx, metaKey("node"))
	if err != nil {
		return "", false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return string(name.Value), false, nil
}

// keyCheck ties the index key to the sealed marker: a ring with the right sealing key and another
// index key would find no execution.
func (g *Guard) keyCheck() string {
	sum := store.Index(g.sealer, "key check")
	return string(sum[:])
}

func (g *Guard) initialise(ctx context.Context) (node string, fresh bool, err error) {
	fresh, err = Fresh(ctx, g.store)
	if err != nil {
		return "", false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if _, there := g.store.Get(ctx, metaKey("layout")); !fresh && there == nil {
		return g.identify(ctx) // another member was first
	}
	if !fresh {
		return "", false, fmt.Errorf("%w: it holds data without a layout", errLayout)
	}
	node = "node-" + g.boot
	check := metaKey("key")
	ids := g.sealer.KeyIDs()
	keys := keyRecord{Uses: []KeyUse{{ID: ids[len(ids)-1]}}}
	_, err = g.store.Commit(ctx,
		store.Write{Key: check, If: store.Absent(), Value: g.sealer.Seal(nil, []byte(g.keyCheck()), check)},
		store.Write{Key: metaKey("layout"), If: store.Absent(), Value: []byte(layoutVersion)},
		store.Write{Key: metaKey("node"), If: store.Absent(), Value: []byte(node)},
		meta[keyRecord](g).Put(metaKey(keysName), &keys, store.Absent(), time.Time{}),
	)
	if lost := (*store.Conflict)(nil); errors.As(err, &lost) && g.members.store != nil {
		return g.identify(ctx) // another member was first
	}
	if err != nil {
		return "", false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if g.members.store == nil {
		return node, true, nil
	}
	return g.members.store.Self().Node, true, g.keys.open(ctx)
}

// Recovery counts the executions that an earlier process of this node left open, or in a shared store a member
// that is gone.
type Recovery struct {
	// InDoubt: it may have been sent when the process died.
	InDoubt int
	// Unrecorded: it may have been sent, and the store had no room to record that. It is in doubt
	// all the same; the next opening records it.
	Unrecorded int
	// Own says that this process runs on: it could not record their outcomes, and does not have them any more.
	Own bool
}

// scratch has buffers for encoding records before they are sealed.
var scratch = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

const maxScratch = 64 << 10

func freeScratch(b *[]byte) {
	if cap(*b) <= maxScratch {
		scratch.Put(b)
	}
}

// room is the memory of one commit's writes. A store keeps none of it (see store.Store), so it is
// used again once Commit has returned.
type room struct {
	writes []store.Write
	memory []byte // of their keys and values
}

var rooms = sync.Pool{New: func() any { return new(room) }}

// keep returns what was appended to the memory, nil if nothing was. It is not written again.
func (r *room) keep(appended []byte) []byte {
	from := len(r.memory)
	if r.memory = appended; len(appended) == from {
		return nil
	}
	return appended[from:len(appended):len(appended)]
}

func (r *room) delete(key []byte) { r.writes = append(r.writes, store.Write{Key: key, Delete: true}) }

func (r *room) free() {
	clear(r.writes)
	if cap(r.memory) <= maxScratch {
		rooms.Put(r)
	}
}

// Naming is how a guard's configuration names callers and tenants. Under another one retries name other keys, and
// what the store holds runs again (P1).
type Naming struct{ Caller, Credentials, Tenant string }

// namingRefused refuses to name callers and tenants in another way than holds says, in options.
func namingRefused(guard string, options []string, holds string) error {
	return fmt.Errorf("the guard %q: `%s` differ from what its calls were recorded under, and %s: "+
		"retries of those calls would run again. Put it back, give the guard another `name`, under which it begins anew, "+
		"or write `free_keys` into its block if that is meant", guard, strings.Join(options, "` and `"), holds)
}

// CheckNaming returns an error if a guard must not make keys under n, else the condition and the value with which n is
// recorded in the place of what is; the value is nil if it is recorded. free allows it also if that frees keys. The
// error wraps ErrStore if the store cannot be read.
func (g *Guard) CheckNaming(ctx context.Context, guard string, n *Naming, free bool) (as store.Condition, value []byte, err error) {
	const size = 16 // of the hash of an option
	parts := [...]struct{ option, text string }{{"caller", n.Caller}, {"credentials", n.Credentials}, {"tenant", n.Tenant}}
	for _, p := range parts {
		sum := store.Index(g.sealer, "naming", guard, p.option, p.text)
		value = append(value, sum[:size]...)
	}
	entry, err := g.store.Get(ctx, g.namingKey(guard))
	if errors.Is(err, store.ErrNotFound) {
		return store.Absent(), value, nil
	}
	if err != nil {
		return as, nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	var options []string
	for i, p := range parts {
		if at := i * size; len(entry.Value) < at+size || !slices.Equal(entry.Value[at:at+size], value[at:at+size]) {
			options = append(options, p.option)
		}
	}
	if len(options) == 0 {
		return as, nil, nil
	}
	as = store.VersionIs(entry.Version)
	if free {
		return as, value, nil
	}
	held, err := g.holdsKeys(ctx, guard)
	if err != nil {
		return as, nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if held {
		return as, nil, namingRefused(guard, options, "the store holds keys of this guard")
	}
	if shared := g.members.store; shared != nil { // whoever else uses it may be about to make some
		members, err := shared.Members(ctx)
		if err != nil {
			return as, nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if len(members) > 1 {
			return as, nil, namingRefused(guard, options, "another gateway uses the store")
		}
	}
	return as, value, nil
}

func (g *Guard) namingKey(guard string) []byte {
	hash := store.Index(g.sealer, "guard", guard)
	return metaKey("naming" + string(hash[:16]))
}

func (g *Guard) holdsKeys(ctx context.Context, guard string) (bool, error) {
	for after := ""; ; {
		page, err := g.List(ctx, Filter{Guard: shortText(guard)}, after, 1)
		if err != nil || len(page.Executions) > 0 || page.Next == "" {
			return len(page.Executions) > 0, err
		}
		after = page.Next
	}
}

// holdNaming makes the writes by which the claim of a call records under what its guard makes keys, before this process
// makes the first (P1); nil if it is recorded. That it was checked when the configuration was loaded is not enough: the
// store was out of reach, or the keys are younger. If the commit loses against another gateway's, the call looks again.
func (g *Guard) holdNaming(ctx context.Context, c *Call) (*store.Batch, error) {
	as, value, err := g.CheckNaming(ctx, c.Scope.Guard, c.Naming, c.FreeKeys)
	if err != nil {
		return nil, err
	}
	hold := func() {
		for {
			before := g.namings.Load()
			now := maps.Clone(*before)
			now[c.Scope.Guard] = *c.Naming
			if g.namings.CompareAndSwap(before, &now) {
				return
			}
		}
	}
	if value == nil {
		hold()
		return nil, nil
	}
	key := g.namingKey(c.Scope.Guard)
	if g.members.store == nil {
		as = store.Condition{} // all claims of this process write the same, and none has to lose
	}
	batch := store.NewBatch(store.Write{Key: key, If: as, Value: value})
	batch.OnDone(func(err error) error {
		lost := (*store.Conflict)(nil)
		switch {
		case err == nil:
			hold()
		case errors.As(err, &lost) && slices.Equal(lost.Key, key):
			return ErrTaken
		}
		return err
	})
	return batch, nil
}
