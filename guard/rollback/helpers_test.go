package rollback_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
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
// nobody is told. Afterwards nothing answers.
type mortal struct {
	store.Store
	mu      sync.Mutex
	commits int
	dies    int // at this commit; negative is never
	lands   bool
	deaf    atomic.Bool // does not answer reads
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
	return m.Store.Get(ctx, key)
}

func (m *mortal) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone() {
		return 0, errDead
	}
	if m.commits == m.dies {
		close(m.dead)
		if m.lands {
			_, _ = m.Store.Commit(ctx, batch...)
			return 0, store.ErrUnknown
		}
		return 0, errDead
	}
	m.commits++
	return m.Store.Commit(ctx, batch...)
}

// world is what stands outside, and outlasts the gateway. It takes an undo once under
// one key, as upstreams do by contract.
type world struct {
	mu      sync.Mutex
	effects map[string][]string // checkpoint -> the keys that it was undone under
	order   []string
	answers map[string]undo.Result // of a checkpoint; the zero value is done
	hold    map[string]chan struct{}
	sends   int
}

func (w *world) apply(key, checkpoint string) undo.Result {
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
		answer = undo.Result{Done: true, Status: 200, After: [32]byte{1}}
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
	seen  func(undo.Task)
	block bool // sends nothing until ctx ends or the rollback is due
}

func (u *undoer) Undo(ctx context.Context, t undo.Task) (undo.Result, error) {
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
			return undo.Result{}, ctx.Err()
		case <-t.Quit:
			return undo.Result{}, undo.ErrQuit
		case <-time.After(time.Until(t.Due)):
			return undo.Result{Reason: undo.ReasonTimeout}, nil
		}
	}
	key := []byte("zz undo " + t.Rollback + " " + id)
	entry, err := u.st.Get(ctx, key)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return undo.Result{}, err
	}
	if err != nil || string(entry.Value) != "answered" {
		if _, err := u.st.Commit(ctx, store.Write{Key: key, Value: []byte("sent")}); err != nil {
			return undo.Result{}, err
		}
		u.world.apply(t.Rollback+id, id)
		if _, err := u.st.Commit(ctx, store.Write{Key: key, Value: []byte("answered")}); err != nil {
			return undo.Result{}, err
		}
	}
	return u.world.apply(t.Rollback+id, id), nil
}

// ledger knows a workflow by heart and tells into the store.
type ledger struct {
	mu      sync.Mutex
	nodes   []plan.Node
	tokens  map[string]rollback.Checkpoint
	told    atomic.Int64
	tamper  map[string]bool
	looks   atomic.Int64
	pending atomic.Int64
	telling func(words []string) // called before anything is told; may be nil
}

func (l *ledger) Checkpoint(_ context.Context, id string) (rollback.Checkpoint, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looks.Add(1)
	cp, known := l.tokens[id]
	switch {
	case !known:
		return cp, rollback.ErrUnknown
	case l.tamper[id]:
		return cp, checkpoint.ErrTampered
	}
	return cp, nil
}

func (l *ledger) Nodes(_ context.Context, _, target string) ([]plan.Node, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.tokens[target]; !known {
		return nil, rollback.ErrUnknown
	}
	return slices.Clone(l.nodes), nil
}

type telling struct {
	l  *ledger
	id string
	w  store.Write
}

func (t *telling) ID() string            { return t.id }
func (t *telling) Writes() []store.Write { return []store.Write{t.w} }
func (t *telling) Done(err error) error  { t.l.pending.Add(-1); return err }

func (l *ledger) tell(words ...string) (rollback.Telling, error) {
	if l.telling != nil {
		l.telling(words)
	}
	id := fmt.Sprint("token-", l.told.Add(1))
	l.pending.Add(1)
	w := store.Write{Key: []byte("l " + id), If: store.Absent(), Value: []byte(strings.Join(words, " "))}
	return &telling{l, id, w}, nil
}

func (l *ledger) Started(_ context.Context, r *rollback.Rollback, parents []string) (rollback.Telling, error) {
	return l.tell("start", r.ID, strings.Join(parents, ","))
}

func (l *ledger) Stepped(_ context.Context, r *rollback.Rollback, s *rollback.Step, way checkpoint.Way) (rollback.Telling, error) {
	return l.tell("step", r.ID, s.Checkpoint, string(s.Status), way.String())
}

func (l *ledger) Completed(_ context.Context, r *rollback.Rollback) (rollback.Telling, error) {
	return l.tell("complete", r.ID, string(r.Status))
}

func (l *ledger) Erred(_ context.Context, r *rollback.Rollback, id, errorType, _ string) (rollback.Telling, error) {
	return l.tell("error", r.ID, id, errorType)
}

// rig is a gateway over a store that outlives it.
type rig struct {
	t      testing.TB
	mem    *memory.Store
	ring   *seal.Ring
	world  *world
	ledger *ledger

	st     *mortal
	guard  *guard.Guard
	vault  *checkpoint.Vault
	desk   *hitl.Desk
	undoer *undoer
	spec   []byte // of the calls that are made; may be nil
	*rollback.Coordinator
}

func newRig(t testing.TB) *rig {
	r := &rig{
		t: t, mem: memory.New(memory.Options{}), ring: seal.Generate(),
		world:  &world{effects: map[string][]string{}, answers: map[string]undo.Result{}, hold: map[string]chan struct{}{}},
		ledger: &ledger{tokens: map[string]rollback.Checkpoint{}, tamper: map[string]bool{}},
	}
	r.open()
	return r
}

// open begins a life. Nothing is started.
func (r *rig) open() {
	r.t.Helper()
	r.st = alive(r.mem)
	var err error
	if r.guard, _, err = guard.Open(ctx, r.st, r.ring); err != nil {
		r.t.Fatal(err)
	}
	r.vault = checkpoint.New(r.st, r.ring)
	r.desk = hitl.NewDesk(r.st, r.ring, 0)
	r.undoer = &undoer{st: r.st, world: r.world}
	r.Coordinator, err = rollback.Open(rollback.Options{
		Store: r.st, Sealer: r.ring, Guard: r.guard, Vault: r.vault, Desk: r.desk, Ledger: r.ledger, Undoer: r.undoer, Keep: keep,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	c := r.Coordinator
	r.t.Cleanup(func() { stop(c) })
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
	r.ledger.nodes = append(r.ledger.nodes, plan.Node{ID: id, Kind: plan.Action, Parents: parents, By: agent, Done: true})
}

// known adds a checkpoint's token.
func (r *rig) known(id string, kind plan.Kind, state plan.State, cp rollback.Checkpoint, guards ...string) {
	cp.ID, cp.Workflow, cp.Agent, cp.TTL = id, "w", agent, ttl
	cp.Expires = r.now().Add(ttl)
	r.ledger.tokens[id] = cp
	r.ledger.nodes = append(r.ledger.nodes, plan.Node{
		ID: id, Kind: kind, Parents: cp.Parents, By: gateway, State: state, Reversible: cp.Reversible, Expires: cp.Expires, Guards: guards,
	})
}

func (r *rig) now() time.Time {
	now, err := r.mem.Now(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return now
}

func (r *rig) call(id string) *guard.Call {
	s := guard.Scope{Caller: agent, Guard: "default", Method: "PUT", Path: "/" + id, ID: id}
	return &guard.Call{
		Key: r.guard.Key(s), Scope: s, Fingerprint: guard.Fingerprint{7}, Action: "update", Workflow: "w",
		Checkpoint: "c" + id, Deadline: time.Hour, KeepResult: time.Hour, KeepKey: keep, ResultCap: 1 << 20,
	}
}

// claimed is a call that runs: action id after its parents, and checkpoint "c"+id.
func (r *rig) claimed(id string, way checkpoint.Way, parents ...string) (*guard.Execution, checkpoint.Handle) {
	r.t.Helper()
	c := r.call(id)
	s := checkpoint.Snapshot{
		ID: "c" + id, Workflow: "w", Caller: r.guard.Caller(agent), Execution: c.Key, Action: "update", Way: way,
		Request: checkpoint.Request{Method: "PUT", Path: "/" + id}, Undo: r.spec,
	}
	if way == checkpoint.Irreversible {
		s.Reason = checkpoint.ReasonDeclared
	}
	p, err := r.vault.Prepare(ctx, s, nil, checkpoint.Terms{TTL: ttl})
	if err != nil {
		r.t.Fatal(err)
	}
	e, err := r.guard.Claim(ctx, c, guard.Finding{}, p.Writes()...)
	if err = p.Done(err); err != nil {
		r.t.Fatal(err)
	}
	r.action(id, parents...)
	cp := rollback.Checkpoint{Own: true, Sum: p.Sum(), Reversible: way != checkpoint.Irreversible, Parents: []string{id}}
	r.known("c"+id, plan.Checkpoint, plan.InFlight, cp, id)
	return e, p.Handle()
}

func (r *rig) settle(id string, e *guard.Execution, h checkpoint.Handle, v guard.Verdict) {
	r.t.Helper()
	p, state := r.vault.Release(h), plan.NeverRan
	if v != guard.Released {
		_ = p.Done(errors.New("not used"))
		var err error
		if p, err = r.vault.Record(ctx, h, checkpoint.Result{Status: 200}, 0); err != nil {
			r.t.Fatal(err)
		}
		state = plan.Standing
	}
	if err := p.Done(e.Settle(ctx, guard.Outcome{Verdict: v, Status: 200, Whole: true}, p.Writes()...)); err != nil {
		r.t.Fatal(err)
	}
	for i := range r.ledger.nodes {
		if r.ledger.nodes[i].ID == "c"+id {
			r.ledger.nodes[i].State = state
		}
	}
}

// made is a call that has ended.
func (r *rig) made(id string, way checkpoint.Way, v guard.Verdict, parents ...string) {
	r.t.Helper()
	e, h := r.claimed(id, way, parents...)
	r.settle(id, e, h, v)
}

func (r *rig) group(id string, members ...string) {
	r.known(id, plan.Group, plan.Standing, rollback.Checkpoint{Own: true, Reversible: true, Parents: members})
}

func request(target string, scope plan.Scope) rollback.Request {
	return rollback.Request{
		ID: uuid.NewString(), Checkpoint: target, Scope: scope, Reason: "it went wrong", By: agent, Lineage: plan.Ancestor,
		Token: "request-" + uuid.NewString(), Error: "error-1",
	}
}

func (r *rig) execute(q rollback.Request, riders ...store.Write) *rollback.Rollback {
	r.t.Helper()
	b, err := r.Execute(ctx, q, riders...)
	if err != nil {
		r.t.Fatal(err)
	}
	return b
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

// said counts what was told, by its words.
func (r *rig) said() map[string]int {
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

func (r *rig) standing(id string, want guard.Standing) {
	r.t.Helper()
	c := r.call(id)
	found, err := r.guard.Find(ctx, c.Key, c.Fingerprint)
	if err != nil || found.Standing != want {
		r.t.Errorf("call %s: standing %d, %v; want %d", id, found.Standing, err, want)
	}
}

func (r *rig) escalations() map[hitl.Cause]int {
	r.t.Helper()
	page, err := r.desk.List(ctx, hitl.Filter{}, "", 1000)
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
