package rollback_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	agent   = "spiffe://example.com/agent"
	gateway = "spiffe://example.com/gateway"
	ttl     = 24 * time.Hour
	keep    = 30 * 24 * time.Hour
)

var ctx = context.Background()

// mortal is a store whose process dies at a commit: it does not land, or it lands and
// the answer is lost. Afterwards nothing answers.
type mortal struct {
	store.Store
	mu      sync.Mutex
	commits int
	dies    int // at this commit; negative is never
	lands   bool
	deaf    atomic.Bool                               // does not answer reads
	refuses atomic.Bool                               // takes no commits
	rotten  atomic.Value                              // the key of a damaged value, a string
	read    atomic.Pointer[func(key []byte)]          // after a Get
	landed  atomic.Pointer[func(batch []store.Write)] // is called before the answer to a commit; may be nil
	dead    chan struct{}
}

var errDead = errors.New("the process has died")

func alive(st store.Store) *mortal { return &mortal{Store: st, dies: -1, dead: make(chan struct{})} }

func (m *mortal) gone() bool {
	select {
	case <-m.dead:
		return true
	default:
		return false
	}
}

func (m *mortal) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if m.gone() || m.deaf.Load() {
		return store.Entry{}, errDead
	}
	if m.rotten.Load() == string(key) {
		return store.Entry{}, fmt.Errorf("reading: %w", store.ErrDamaged)
	}
	entry, err := m.Store.Get(ctx, key)
	if read := m.read.Load(); read != nil {
		(*read)(key)
	}
	return entry, err
}

func (m *mortal) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	version, err := m.commit(ctx, batch)
	if landed := m.landed.Load(); landed != nil && err == nil {
		(*landed)(batch)
	}
	return version, err
}

func (m *mortal) commit(ctx context.Context, batch []store.Write) (store.Version, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone() {
		return 0, errDead
	}
	if m.refuses.Load() {
		return 0, store.ErrUnavailable
	}
	if m.commits == m.dies {
		defer close(m.dead) // what lands has landed before the next life reads
		if m.lands {
			_, _ = m.Store.Commit(ctx, batch...)
			return 0, store.ErrUnknown
		}
		return 0, errDead
	}
	m.commits++
	return m.Store.Commit(ctx, batch...)
}

// mortalMember is a member of a shared store that dies like that.
type mortalMember struct {
	store.Shared
	m *mortal
}

func (m *mortalMember) Get(ctx context.Context, key []byte) (store.Entry, error) {
	return m.m.Get(ctx, key)
}

func (m *mortalMember) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	return m.m.Commit(ctx, batch...)
}

// world is what stands outside, and outlasts the gateway. It takes an undo once under
// one key, as upstreams do by contract.
type world struct {
	mu      sync.Mutex
	effects map[string][]string // checkpoint -> the keys that it was undone under
	order   []string
	answers map[string]rollback.Result // of a checkpoint; the zero value is done
	hold    map[string]chan struct{}
	sends   int

	prepared  int                        // how often somebody was asked
	winners   map[string]string          // of a checkpoint: the rollback that takes precedence there
	obstacles map[string]string          // of a checkpoint: why it cannot be prepared
	changed   map[string]rollback.Reason // of a checkpoint: why a restore would leave its target alone
}

func (w *world) apply(key, checkpoint string) rollback.Result {
	w.mu.Lock()
	hold := w.hold[checkpoint]
	w.mu.Unlock()
	if hold != nil {
		<-hold
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sends++
	answer, given := w.answers[checkpoint]
	if !given {
		answer = rollback.Result{Done: true, Status: 200, After: [32]byte{1}}
	}
	if answer.Done && !slices.Contains(w.effects[checkpoint], key) {
		w.effects[checkpoint] = append(w.effects[checkpoint], key)
		w.order = append(w.order, checkpoint)
	}
	answer.Attempts = 1
	return answer
}

// undoer journals before it sends and after, as the real one does.
type undoer struct {
	st    store.Store
	world *world
	asked chan string // gets each checkpoint that is to be undone; may be nil
	seen  func(rollback.Task)
	// asks is called when a participant is asked, which answers unless ctx has ended; may be nil.
	asks     func(ctx context.Context, t rollback.Task)
	reads    func(ctx context.Context) // is called when a target is read; may be nil
	releases chan string               // gets each checkpoint that is released; may be nil
	block    bool                      // sends nothing until ctx ends or the rollback is due
}

func (u *undoer) Prepare(ctx context.Context, t rollback.Task) (string, error) {
	if t.Checkpoint.Snapshot.Way == checkpoint.Restore {
		if u.reads != nil {
			u.reads(ctx)
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		u.world.mu.Lock()
		defer u.world.mu.Unlock()
		return string(u.world.changed[t.Checkpoint.Snapshot.Root()]), nil
	}
	if u.asks != nil {
		u.asks(ctx, t)
	}
	if ctx.Err() != nil {
		return "unreachable", nil
	}
	u.world.mu.Lock()
	defer u.world.mu.Unlock()
	u.world.prepared++
	id := t.Checkpoint.Snapshot.Root()
	if winner := u.world.winners[id]; winner != "" {
		return "", &rollback.ConflictError{Winner: winner}
	}
	return u.world.obstacles[id], nil
}

func (u *undoer) Release(ctx context.Context, t rollback.Task) error {
	if u.releases != nil {
		select {
		case u.releases <- t.Checkpoint.Snapshot.Root():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (u *undoer) Undo(ctx context.Context, t rollback.Task) (rollback.Result, error) {
	id := t.Checkpoint.Snapshot.Root()
	if u.seen != nil {
		u.seen(t)
	}
	if u.asked != nil {
		u.asked <- id
	}
	if u.block {
		select {
		case <-ctx.Done():
			return rollback.Result{}, ctx.Err()
		case <-t.Quit:
			return rollback.Result{}, rollback.ErrQuit
		case <-time.After(time.Until(t.Due)):
			return rollback.Result{Reason: rollback.ReasonTimeout}, nil
		}
	}
	key := []byte("zz undo " + t.Rollback + " " + id)
	entry, err := u.st.Get(ctx, key)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return rollback.Result{}, err
	}
	if err != nil || string(entry.Value) != "answered" {
		if _, err := u.st.Commit(ctx, store.Write{Key: key, Value: []byte("sent")}); err != nil {
			if entry.Value != nil {
				err = fmt.Errorf("%w: %w", execution.ErrUnrecorded, err)
			}
			return rollback.Result{}, err
		}
		u.world.apply(t.Rollback+id, id)
		if _, err := u.st.Commit(ctx, store.Write{Key: key, Value: []byte("answered")}); err != nil {
			return rollback.Result{}, fmt.Errorf("%w: %w", execution.ErrUnrecorded, err)
		}
	}
	return u.world.apply(t.Rollback+id, id), nil
}

// ledger knows a workflow by heart and records into the store.
type ledger struct {
	mu           sync.Mutex
	nodes        []Node
	elsewhere    map[string][]string // the workflows of ids
	more         bool                // of what a Single rollback may leave
	tokens       map[string]rollback.Checkpoint
	versionErr   error
	records      atomic.Int64
	tamper       map[string]bool
	broken       map[string]error // the errors of tokens
	graphErr     error
	tokenReads   atomic.Int64
	reads        atomic.Int64 // of nodes
	pending      atomic.Int64
	beforeRecord func(words []string) // called before anything is recorded; may be nil
}

func (l *ledger) Checkpoint(_ context.Context, id string) (rollback.Checkpoint, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tokenReads.Add(1)
	cp, known := l.tokens[id]
	switch {
	case !known:
		return cp, rollback.ErrUnknown
	case l.tamper[id]:
		return cp, checkpoint.ErrTampered
	}
	return cp, l.broken[id]
}

func (l *ledger) Graph(_ context.Context, q rollback.Query) (rollback.View, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads.Add(1)
	if _, known := l.tokens[q.Target]; !known {
		return rollback.View{}, rollback.ErrUnknown
	}
	if l.graphErr != nil {
		return rollback.View{}, l.graphErr
	}
	return rollback.View{
		Graph: graphOf("w", l.nodes...).Graph, More: l.more && q.Scope == rollback.Single, Version: l.version(),
	}, nil
}

// version is the number of nodes: tests only add some.
func (l *ledger) version() string { return fmt.Sprint("v", len(l.nodes)) }

func (l *ledger) Workflows(_ context.Context, id string) (all []string, _ error) {
	return l.elsewhere[id], nil
}

func (l *ledger) Crossed(context.Context, *rollback.Rollback) ([]string, error) { return nil, nil }

func (l *ledger) Unchanged(_ context.Context, _, version string) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return version == l.version(), l.versionErr
}

func (l *ledger) record(words ...string) (rollback.Evidence, error) {
	if l.beforeRecord != nil {
		l.beforeRecord(words)
	}
	id := fmt.Sprint("token-", l.records.Add(1))
	l.pending.Add(1)
	b := store.NewBatch(store.Write{Key: []byte("l " + id), If: store.Absent(), Value: []byte(strings.Join(words, " "))})
	b.OnDone(func(err error) error { l.pending.Add(-1); return err })
	return rollback.Evidence{ID: id, Batch: b}, nil
}

func (l *ledger) Started(_ context.Context, r *rollback.Rollback, parents []string) (rollback.Evidence, error) {
	return l.record("start", r.ID, strings.Join(parents, ","))
}

func (l *ledger) Stepped(_ context.Context, r *rollback.Rollback, s *rollback.Step, way checkpoint.Way) (rollback.Evidence, error) {
	return l.record("step", r.ID, s.Checkpoint, string(s.Status), way.String())
}

func (l *ledger) Completed(_ context.Context, r *rollback.Rollback) (rollback.Evidence, error) {
	return l.record("complete", r.ID, string(r.Status))
}

func (l *ledger) Erred(_ context.Context, r *rollback.Rollback, id, errorType, _ string) (rollback.Evidence, error) {
	return l.record("error", r.ID, id, errorType)
}

// rig is a gateway over a store that outlives it.
type rig struct {
	t      testing.TB
	mem    *memory.Store
	ring   *seal.Ring
	world  *world
	ledger *ledger

	node            string         // of a member; empty where one gateway has the store
	member          *memory.Member // of this life; nil without
	st              *mortal
	guard           *execution.Guard
	checkpoints     *checkpoint.Store
	escalationStore *hitl.Store
	undoer          *undoer
	prepareTimeout  time.Duration
	spec            []byte      // of the calls that are made; may be nil
	onError         bool        // errors roll the calls that are made back
	fence           store.Fence // of the admission whose claim is made next
	participants    func(issuer, rollbackURI string) (string, error)
	discover        func(workflow string) (fresh bool, unreached []rollback.Obstacle, err error)
	*rollback.Coordinator
}

func newRig(t testing.TB) *rig {
	r := &rig{
		t: t, mem: memory.New(memory.Options{}), ring: seal.Generate(),
		world:  &world{effects: map[string][]string{}, answers: map[string]rollback.Result{}, hold: map[string]chan struct{}{}},
		ledger: &ledger{tokens: map[string]rollback.Checkpoint{}, tamper: map[string]bool{}},
	}
	r.open()
	return r
}

// open begins a life. Nothing is started.
func (r *rig) open() {
	r.t.Helper()
	r.st = alive(r.mem)
	st := store.Store(r.st)
	if r.node != "" {
		r.member = r.mem.Join(r.node)
		r.st = alive(r.member)
		st = &mortalMember{r.member, r.st}
	}
	var err error
	if r.guard, _, err = execution.Open(ctx, st, r.ring); err != nil {
		r.t.Fatal(err)
	}
	r.checkpoints = checkpoint.New(st, r.ring)
	r.escalationStore = hitl.NewStore(st, r.ring)
	r.undoer = &undoer{st: r.st, world: r.world}
	r.Coordinator, err = rollback.OpenWith(rollback.Options{
		Store: st, Sealer: r.ring, Guard: r.guard, Checkpoints: r.checkpoints, Escalations: r.escalationStore, Ledger: r.ledger, Keep: keep,
		PrepareTimeout: func() time.Duration { return r.prepareTimeout },
		Participants: func(issuer, uri string) (string, error) {
			if r.participants == nil {
				return "", nil
			}
			return r.participants(issuer, uri)
		},
		Discover: func(_ context.Context, workflow string) (bool, []rollback.Obstacle, error) {
			if r.discover == nil {
				return false, nil, nil
			}
			return r.discover(workflow)
		},
	}, r.undoer)
	if err != nil {
		r.t.Fatal(err)
	}
	c, g := r.Coordinator, r.guard
	r.t.Cleanup(func() {
		stop(c)
		_ = g.Close(ctx) // the store may be dead
	})
}

func (r *rig) start() {
	r.t.Helper()
	if err := r.Start(ctx); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) restart() {
	r.t.Helper()
	stop(r.Coordinator)
	r.open()
	r.start()
}

// stop ends a life at once.
func stop(c *rollback.Coordinator) {
	over, cancel := context.WithCancel(ctx)
	cancel()
	_ = c.Stop(over)
}

func (r *rig) action(id string, parents ...string) {
	r.ledger.nodes = append(r.ledger.nodes, Node{ID: id, Kind: ActionNode, Parents: parents, By: agent, Done: true})
}

// known adds a checkpoint's token.
func (r *rig) known(id string, kind NodeKind, state rollback.NodeState, cp rollback.Checkpoint, guards ...string) {
	cp.ID, cp.Workflow, cp.Agent, cp.TTL = id, "w", agent, ttl
	cp.Expires = r.now().Add(ttl)
	r.ledger.tokens[id] = cp
	r.ledger.nodes = append(r.ledger.nodes, Node{
		ID: id, Kind: kind, Parents: cp.Parents, By: gateway, Own: true, State: state, Reversible: cp.Reversible, Expires: cp.Expires, Guards: guards,
	})
}

func (r *rig) now() time.Time {
	now, err := r.mem.Now(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return now
}

func (r *rig) call(id string) *execution.Call {
	s := execution.Scope{Caller: agent, Guard: "default", Method: "PUT", Path: "/" + id, ID: id}
	return &execution.Call{
		Key: r.guard.Key(s), Scope: s, Fingerprint: body.Fingerprint{7}, Action: "update", Workflow: "w",
		Checkpoint: "c" + id, Deadline: time.Hour, KeepResult: time.Hour, KeepKey: keep, ResultCap: 1 << 20,
	}
}

// claimed is a call that runs: action id after its parents, and checkpoint "c"+id.
func (r *rig) claimed(id string, way checkpoint.Way, parents ...string) (*execution.Execution, checkpoint.Handle) {
	r.t.Helper()
	c := r.call(id)
	s := checkpoint.Snapshot{
		ID: "c" + id, Workflow: "w", Caller: r.guard.Caller(agent), Execution: c.Key, Action: "update", Way: way,
		Request: checkpoint.Request{Method: "PUT", Path: "/" + id}, Undo: r.spec, OnError: r.onError,
	}
	if way == checkpoint.Irreversible {
		s.Reason = checkpoint.ReasonDeclared
	}
	p, err := r.checkpoints.Prepare(ctx, s, nil, checkpoint.Terms{TTL: ttl})
	if err != nil {
		r.t.Fatal(err)
	}
	e, err := r.guard.Claim(ctx, c, execution.Finding{}, p.Batch)
	if err != nil {
		r.t.Fatal(err)
	}
	r.action(id, parents...)
	cp := rollback.Checkpoint{Own: true, Sum: p.Sum(), Reversible: way != checkpoint.Irreversible, Parents: []string{id}}
	r.known("c"+id, CheckpointNode, rollback.InFlight, cp, id)
	return e, p.Handle()
}

func (r *rig) settle(id string, e *execution.Execution, h checkpoint.Handle, v execution.Verdict) {
	r.t.Helper()
	b, state := r.checkpoints.Release(h), rollback.NeverRan
	if v != execution.Released {
		_ = b.Done(errors.New("not used"))
		p, err := r.checkpoints.Record(ctx, h, checkpoint.Result{Status: 200})
		if err != nil {
			r.t.Fatal(err)
		}
		b, state = p.Batch, rollback.Ran
	}
	if err := e.Settle(ctx, execution.Outcome{Verdict: v, Status: 200, Whole: true}, b); err != nil {
		r.t.Fatal(err)
	}
	for i := range r.ledger.nodes {
		if r.ledger.nodes[i].ID == "c"+id {
			r.ledger.nodes[i].State = state
		}
	}
}

// made is a call that has ended.
func (r *rig) made(id string, way checkpoint.Way, v execution.Verdict, parents ...string) {
	r.t.Helper()
	e, h := r.claimed(id, way, parents...)
	r.settle(id, e, h, v)
}

func (r *rig) group(id string, members ...string) {
	r.known(id, GroupNode, rollback.Ran, rollback.Checkpoint{Own: true, Reversible: true, Parents: members})
}

// request is one that leaves what depends on what it undoes.
func request(target string, scope rollback.Scope) rollback.Request {
	return rollback.Request{
		KeepDependants: true,
		ID:             uuid.NewString(), Checkpoint: target, Scope: scope, Reason: "it went wrong", By: agent, Lineage: rollback.Ancestor,
		Token: "request-" + uuid.NewString(), Error: "error-1",
	}
}

func (r *rig) execute(q rollback.Request, extra ...store.Write) *rollback.Rollback {
	r.t.Helper()
	b, err := r.Execute(ctx, q, writing(extra...))
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

// writing admits every rollback, with further writes in its commit.
func writing(extra ...store.Write) func(context.Context, bool) ([]store.Write, error) {
	return func(context.Context, bool) ([]store.Write, error) { return extra, nil }
}

func (r *rig) wait(id string) *rollback.Rollback {
	r.t.Helper()
	patience, cancel := context.WithTimeout(ctx, 60*24*time.Hour)
	defer cancel()
	b, err := r.Wait(patience, id)
	if err != nil {
		r.t.Fatalf("waiting: %v; %+v", err, b)
	}
	return b
}

func (r *rig) run(q rollback.Request) *rollback.Rollback {
	r.t.Helper()
	return r.wait(r.execute(q).ID)
}

// recorded counts the evidence, by its words.
func (r *rig) recorded() map[string]int {
	r.t.Helper()
	all := map[string]int{}
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("l token-"))) {
		if err != nil {
			r.t.Fatal(err)
		}
		all[string(entry.Value)]++
	}
	return all
}

func (r *rig) wantCallStatus(id string, want execution.Status) {
	r.t.Helper()
	c := r.call(id)
	found, err := r.guard.LookUp(ctx, c.Key, c.Fingerprint)
	if err != nil || found.Status != want {
		r.t.Errorf("call %s: status %d, %v; want %d", id, found.Status, err, want)
	}
}

func (r *rig) escalations() map[hitl.Cause]int {
	r.t.Helper()
	page, err := r.escalationStore.List(ctx, hitl.Filter{}, "", 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	all := map[hitl.Cause]int{}
	for _, e := range page.Escalations {
		all[e.Cause]++
	}
	return all
}

// ends are how steps have ended, in their order.
func ends(b *rollback.Rollback) string {
	var all []string
	for _, s := range b.Steps {
		text := s.Checkpoint + "=" + string(s.Status)
		if s.Reason != "" {
			text += "(" + s.Reason + ")"
		}
		if s.Cancelled {
			text += "(cancelled)"
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

func wantEnd(t testing.TB, b *rollback.Rollback, status rollback.Status, steps string) {
	t.Helper()
	if b.State != rollback.Finished || b.Status != status || ends(b) != steps {
		t.Errorf("%s %s: %s\nwant %s: %s", b.State, b.Status, ends(b), status, steps)
	}
}

const (
	rollbackID   = "3f0e8d5a-6d3b-4f5e-9a51-0d9a4f3c2b11"
	checkpointID = "ckpt-1"
	key          = rollbackID + "/" + checkpointID
)

var errUndoDead = errors.New("the process has died")

// undoMortal is a store that takes nothing any more once its process is dead. Each commit is
// two steps: before it lands, and after.
type undoMortal struct {
	store.Store
	step func() (dead bool)
}

func (m *undoMortal) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if m.step() {
		return 0, errUndoDead
	}
	version, err := m.Store.Commit(ctx, batch...)
	if m.step() {
		return 0, errUndoDead
	}
	return version, err
}

// undoRig is an Undoer over a store that outlives it, and an upstream that answers as it is
// told.
type undoRig struct {
	t           *testing.T
	mem         *memory.Store
	ring        *seal.Ring
	guard       *execution.Guard
	checkpoints *checkpoint.Store
	rollback.Undoer
	options rollback.UndoerOptions

	mu    sync.Mutex
	nth   int // of its lives
	steps int // until the process dies; negative is never
	dead  bool
	life  context.Context
	die   func()
	// pass lets time pass.
	pass func(time.Duration)
	// crashes counts the lives that ended early.
	crashes int
	// answer is what the upstream does.
	answer func(r *rollback.Outgoing) (*rollback.Answer, error)
	sent   []*rollback.Outgoing
}

func undoNewRig(t *testing.T) *undoRig {
	r := &undoRig{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
	r.restart(-1)
	return r
}

// bubble runs a test with a rig under a clock of its own.
func bubble(t *testing.T, test func(t *testing.T, r *undoRig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := undoNewRig(t)
		r.pass = func(d time.Duration) { time.Sleep(d) }
		test(t, r)
	})
}

// restart begins another life, which dies after so many steps.
func (r *undoRig) restart(steps int) {
	r.t.Helper()
	r.mu.Lock()
	r.nth++
	life := r.nth
	r.steps, r.dead = -1, false
	r.life, r.die = context.WithCancel(context.Background())
	r.mu.Unlock()
	r.t.Cleanup(r.die)
	// What the life before has left running finds its store dead.
	st := &undoMortal{Store: r.mem, step: func() bool { return r.stepOf(life) }}
	g, _, err := execution.Open(context.Background(), st, r.ring)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.steps = steps
	r.mu.Unlock()
	r.guard, r.checkpoints = g, checkpoint.New(st, r.ring)
	o := r.options
	o.Guard, o.Checkpoints, o.Sender = g, r.checkpoints, r
	r.Undoer = rollback.NewUndoer(o)
	rollback.HashPlainly(r.Undoer)
	rollback.SeeNoStatus(r.Undoer) // TestCascadeFigure12OfCompensations looks at it
}

func (r *undoRig) step() bool {
	r.mu.Lock()
	life := r.nth
	r.mu.Unlock()
	return r.stepOf(life)
}

// died reports that the process of now is dead.
func (r *undoRig) died() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dead
}

func (r *undoRig) stepOf(life int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if life != r.nth {
		return true
	}
	if r.steps == 0 {
		r.dead = true
		r.die()
	}
	r.steps--
	return r.dead
}

// Send implements undo.Sender. The process can die before and after the upstream has the
// request.
func (r *undoRig) Send(ctx context.Context, o *rollback.Outgoing) (*rollback.Answer, error) {
	if r.step() {
		return nil, errUndoDead
	}
	r.mu.Lock()
	kept := *o
	kept.Header = o.Header.Clone()
	r.sent = append(r.sent, &kept)
	answer := r.answer
	r.mu.Unlock()
	a, err := answer(o)
	for name := range o.Header { // a sender may do what it likes with its request
		o.Header.Set(name, "spoilt")
	}
	o.URL = "spoilt"
	if r.step() {
		return nil, errUndoDead
	}
	return a, err
}

// changing are the requests that were to change something.
func (r *undoRig) changing() (all []*rollback.Outgoing) {
	for _, o := range r.sent {
		if o.Method != http.MethodGet {
			all = append(all, o)
		}
	}
	return all
}

func (r *undoRig) asked() int { return len(r.sent) - len(r.changing()) }

func (r *undoRig) undo(t rollback.Task) rollback.Result {
	r.t.Helper()
	got, err := r.Undo(context.Background(), t)
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

func (r *undoRig) wants(t rollback.Task, want rollback.Result) {
	r.t.Helper()
	got := r.undo(t)
	got.Version = checkpoint.Version{} // tests of versions look at it
	if got != want {
		r.t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// answers gives one answer after the other, the last again and again.
func (r *undoRig) answers(all ...any) {
	n := 0
	r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
		next := all[min(n, len(all)-1)]
		n++
		switch next := next.(type) {
		case int:
			return &rollback.Answer{Status: next}, nil
		case string:
			return &rollback.Answer{Status: 200, Body: []byte(next)}, nil
		case *rollback.Answer:
			return next, nil
		case error:
			return nil, next
		}
		panic(fmt.Sprint(next))
	}
}

var (
	errLost   = errors.New("connection reset")
	errUnsent = &rollback.SendError{NotSent: true, Err: errors.New("connection refused")}
)

func accepted(location string) *rollback.Answer {
	return &rollback.Answer{Status: 202, Header: http.Header{"Location": {location}}}
}

func later(status int, after string) *rollback.Answer {
	return &rollback.Answer{Status: status, Header: http.Header{"Retry-After": {after}}}
}

// due is how long tasks of these tests have.
const due = time.Hour

func task(way checkpoint.Way, spec rollback.Spec) rollback.Task {
	spec.Guard, spec.ExecutionID = "default", "order-7"
	if way == checkpoint.Compensate && spec.Compensate == nil {
		spec.Compensate = &template.Spec{Method: "POST", URL: "/refunds", ContentType: "application/json", Body: `{{"charge":"{response.json./id}"}}`}
	}
	if way == checkpoint.Delegate && spec.Delegate == "" {
		spec.Delegate = "https://agent.example/.well-known/cascade/rollback"
	}
	return rollback.Task{Rollback: rollbackID, Due: time.Now().Add(due), Reason: "wrong order", Checkpoint: &checkpoint.Checkpoint{
		Snapshot: &checkpoint.Snapshot{
			ID: checkpointID, Workflow: "w-1", Action: "charge", Upstream: "up:9001", Way: way, Undo: spec.Encode(),
			Request: checkpoint.Request{Method: "POST", Host: "api.example", Path: "/charges", Query: "a=1"},
		},
		Result: &checkpoint.Result{Status: 201, Answer: checkpoint.Message{Body: []byte(`{"id":"ch_1"}`)}},
	}}
}

// status is a request that asks.
var status = &template.Spec{Method: "GET", URL: "/refunds/{rollback.id}"}

// resource is an upstream with one resource under entity tags.
type resource struct {
	there   bool
	body    []byte
	version int
	tags    bool                   // it has entity tags, and honours conditions
	tag     func(*resource) string // its entity tag; nil is the version
	// before and after run around a change, which is lost or refused where they say so.
	before func(o *rollback.Outgoing) (*rollback.Answer, error)
	after  func(o *rollback.Outgoing) (*rollback.Answer, error)
	writes int
}

func (u *resource) etag() string {
	if !u.tags {
		return ""
	}
	if u.tag != nil {
		return u.tag(u)
	}
	return fmt.Sprintf(`"v%d"`, u.version)
}

func (u *resource) set(there bool, body string) {
	u.there, u.body, u.version = there, []byte(body), u.version+1
}

func (u *resource) image() *checkpoint.Image {
	i := rollback.ImageOf(u.get())
	return i
}

func (u *resource) get() *rollback.Answer {
	if !u.there {
		return &rollback.Answer{Status: 404}
	}
	h := http.Header{"Content-Type": {"application/json"}, "Content-Language": {"en"}}
	if e := u.etag(); e != "" {
		h.Set("ETag", e)
	}
	return &rollback.Answer{Status: 200, Header: h, Body: bytes.Clone(u.body)}
}

func (u *resource) serve(o *rollback.Outgoing) (*rollback.Answer, error) {
	if o.Method == http.MethodGet {
		return u.get(), nil
	}
	if u.before != nil {
		if a, err := u.before(o); a != nil || err != nil {
			return a, err
		}
	}
	match, none := o.Header.Get("If-Match"), o.Header.Get("If-None-Match")
	switch {
	case match != "" && (!u.there || match != u.etag()), none == "*" && u.there:
		return &rollback.Answer{Status: 412}, nil
	case o.Method == http.MethodDelete && !u.there:
		return &rollback.Answer{Status: 404}, nil
	}
	u.writes++
	u.set(o.Method == http.MethodPut, string(o.Body))
	if u.after != nil {
		if a, err := u.after(o); a != nil || err != nil {
			return a, err
		}
	}
	return &rollback.Answer{Status: 204}, nil
}
