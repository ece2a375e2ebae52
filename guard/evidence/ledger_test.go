package evidence_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
	guardworkflow "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const (
	gateway = "spiffe://example.com/gateway"
	former  = "spiffe://example.com/gateway-of-before"
	alice   = "spiffe://example.com/agent/alice"
	bob     = "spiffe://example.com/agent/bob"
)

var (
	caller = execution.CallerHash{7}
	state  = ect.Sum([]byte("a snapshot"))
)

// rollbackBench is a gateway with its ledger, and two agents.
type rollbackBench struct {
	t        testing.TB
	store    store.Store
	sealer   *seal.Ring
	ring     *ect.Ring
	evidence *Evidence
	recorder Recorder
	mute     bool
	ledger   rollback.Ledger
	issuers  map[string]*ect.Issuer
	// sources are the keys that agents publish.
	sources map[string]ect.Source
	rings   map[string]*ect.Ring
}

func newRollbackBench(t testing.TB) *rollbackBench {
	t.Helper()
	b := &rollbackBench{
		t: t, store: memory.New(memory.Options{}), sealer: seal.Generate(), ring: newRing(t),
		issuers: map[string]*ect.Issuer{}, sources: map[string]ect.Source{}, rings: map[string]*ect.Ring{},
	}
	for _, name := range []string{gateway, former, alice, bob} {
		ring := b.ring
		if name == alice || name == bob {
			ring = newRing(t)
			owner, err := ect.ParseOwner(name)
			if err != nil {
				t.Fatal(err)
			}
			b.sources[name], b.rings[name] = ring.Source(owner), ring
		}
		issuer, err := ect.NewIssuer(name, ring)
		if err != nil {
			t.Fatal(err)
		}
		b.issuers[name] = issuer
	}
	b.open()
	b.ledger = NewRollbackLedger(RollbackLedgerOptions{Keep: time.Hour, Recorder: func() (Recorder, bool) { return b.recorder, !b.mute }})
	return b
}

// open begins a life of the gateway.
func (b *rollbackBench) open() {
	b.t.Helper()
	opened, err := Open(b.t.Context(), Options{Store: b.store, Sealer: b.sealer, Node: "n1", Ring: b.ring})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = opened.Close(context.Background()) })
	for _, name := range []string{former, gateway} {
		if err := opened.RecordName(b.t.Context(), name, b.ring); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := opened.SignWhenShown(b.t.Context(), b.ring); err != nil {
		b.t.Fatal(err)
	}
	builder, err := opened.EventBuilder(gateway)
	if err != nil {
		b.t.Fatal(err)
	}
	b.evidence, b.recorder = opened, Recorder{Evidence: opened, EventBuilder: builder}
	b.trust(alice, bob)
}

// signAtOnce has events signed when they are recorded, as under every key that is not noted.
func (b *rollbackBench) signAtOnce() {
	b.t.Helper()
	if err := b.evidence.ForgetKeys(b.t.Context(), b.evidence.KeysToSign()...); err != nil {
		b.t.Fatal(err)
	}
}

// trust takes the keys of agents for known, and no others.
func (b *rollbackBench) trust(names ...string) {
	b.t.Helper()
	sources := []ect.Source{newRing(b.t).Source(ect.Owner{})}
	for _, name := range names {
		sources = append(sources, b.sources[name])
	}
	var err error
	if b.recorder.Verifier, err = ect.NewVerifier(ect.Policy{Audience: []string{gateway}, Sources: sources}); err != nil {
		b.t.Fatal(err)
	}
}

// token records a token of an issuer.
func (b *rollbackBench) token(issuer string, c ect.Claims) *ect.Token {
	b.t.Helper()
	c.Audience = []string{gateway}
	if c.Action == "" {
		c.Action = "act"
	}
	token, err := b.issuers[issuer].Issue(time.Now(), c)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.evidence.Append(b.t.Context(), time.Now(), []*ect.Token{token}); err != nil {
		b.t.Fatal(err)
	}
	return token
}

// checkpoint records a checkpoint that can be undone.
func (b *rollbackBench) checkpoint(issuer, workflow, execution string, parents ...string) *ect.Token {
	b.t.Helper()
	ext := new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://g.example/rollback").Int(ect.MemberTTL, 3600)
	if issuer == gateway || issuer == former {
		ext.Text("agent_guard.caller", fmt.Sprintf("%x", caller[:])).Text("agent_guard.execution", execution)
	}
	return b.token(issuer, ect.Claims{Workflow: workflow, Action: "checkpoint", Parents: parents, Output: state, Ext: ext})
}

// settled records what came of the call of a checkpoint.
func (b *rollbackBench) settled(workflow, execution, outcome, id string, parents ...string) *ect.Token {
	b.t.Helper()
	return b.token(gateway, ect.Claims{ID: id, Workflow: workflow, Action: "pay", Parents: parents, Ext: new(ect.ExtBuilder).
		Text("agent_guard.outcome", outcome).Text("agent_guard.caller", fmt.Sprintf("%x", caller[:])).Text("agent_guard.execution", execution)})
}

func (b *rollbackBench) get(id string) rollback.Checkpoint {
	b.t.Helper()
	c, err := b.ledger.Checkpoint(b.t.Context(), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

// graph is what a plan of all of a workflow is made on.
func (b *rollbackBench) graph(workflow, target string) *guardworkflow.Graph {
	b.t.Helper()
	view, err := b.ledger.Graph(b.t.Context(), rollback.Query{Workflow: workflow, Target: target, Scope: rollback.FullWorkflow})
	if err != nil {
		b.t.Fatal(err)
	}
	return view.Graph
}

// at is the node with an id.
func at(t testing.TB, g *guardworkflow.Graph, id string) *guardworkflow.Node {
	t.Helper()
	i, there := g.Index(id)
	if !there {
		t.Fatalf("%s is not in the graph", id)
	}
	return g.At(i)
}

// commit commits a batch.
func (b *rollbackBench) commit(batch rollback.Evidence, err error) error {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
	if writes := batch.Writes(); len(writes) > 0 {
		_, err = b.store.Commit(b.t.Context(), writes...)
	}
	return batch.Done(err)
}

// Cascade 4.2.3: what the token of a checkpoint says, and the agent behind it.
func TestCascade423Checkpoint(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	task := b.token(alice, ect.Claims{Workflow: workflow})
	outer := b.checkpoint(gateway, workflow, "x1", task.ID())
	inner := b.checkpoint(gateway, workflow, "x2", outer.ID())
	c := b.get(strings.ToUpper(inner.ID())) // at once: it need not have its place
	want := rollback.Checkpoint{
		ID: inner.ID(), Workflow: workflow, Agent: alice, Own: true, Issuer: gateway, RollbackURI: "https://g.example/rollback",
		Sum: state.Bytes(), Reversible: true,
		Expires: inner.IssuedAt().Add(time.Hour), TTL: time.Hour, Parents: []string{outer.ID()}, Audience: []string{gateway},
	}
	if fmt.Sprint(c) != fmt.Sprint(want) {
		t.Errorf("%+v, want %+v", c, want)
	}
	if c := b.get(b.checkpoint(gateway, workflow, "x3").ID()); c.Agent != gateway {
		t.Errorf("nobody's token led to it, and it is of %s", c.Agent)
	}
	if c := b.get(b.checkpoint(former, workflow, "x4").ID()); !c.Own || c.Agent != former {
		t.Errorf("%+v", c)
	}
	group := b.checkpoint(bob, workflow, "", outer.ID(), inner.ID())
	if c := b.get(group.ID()); c.Own || c.Agent != bob || len(c.Parents) != 2 {
		t.Errorf("%+v", c)
	}
	for _, id := range []string{uuid.NewString(), task.ID(), "no id at all", ""} {
		_, err := b.ledger.Checkpoint(t.Context(), id)
		if !errors.Is(err, rollback.ErrUnknown) || !errors.Is(err, rollback.ErrCheckpointUnknown) {
			t.Errorf("%q: %v", id, err)
		}
	}
	b.mute = true
	if _, err := b.ledger.Checkpoint(t.Context(), inner.ID()); !errors.Is(err, ErrNoIdentity) {
		t.Errorf("without an identity: %v", err)
	}
	if _, err := b.ledger.Graph(t.Context(), rollback.Query{Target: inner.ID()}); !errors.Is(err, ErrNoIdentity) {
		t.Errorf("without an identity: %v", err)
	}
}

// Cascade 4.2.3: stored tokens are verified as such, also under replaced keys; one of an
// agent whose key is gone is taken by its proof.
func TestCascade423KeysOfStoredTokens(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	task := b.token(alice, ect.Claims{Workflow: workflow})
	c := b.checkpoint(gateway, workflow, "x1", task.ID())
	b.trust(bob)
	if got := b.get(c.ID()); got.Agent != alice {
		t.Errorf("%+v", got)
	}
	b.recorder.Verifier = nil
	if got := b.get(c.ID()); got.Agent != alice {
		t.Errorf("%+v", got)
	}
	// Somebody else's key that says that it is the gateway's.
	b.issuers["forger"], _ = ect.NewIssuer(gateway, newRing(t))
	forged := b.checkpoint("forger", workflow, "x2", task.ID())
	if c, err := b.ledger.Checkpoint(t.Context(), forged.ID()); !tampered(err) || c.Workflow != workflow || c.ID != forged.ID() {
		t.Errorf("forged: %v %+v", err, c)
	}
	below := b.checkpoint(gateway, workflow, "x3", forged.ID())
	if _, err := b.ledger.Checkpoint(t.Context(), below.ID()); !tampered(err) {
		t.Errorf("with a forged parent: %v", err)
	}
	// A signature that does not hold under a key that is known, and a token that is not
	// the one that the entry is of.
	b.trust(alice, bob)
	good := b.token(alice, ect.Claims{Workflow: workflow})
	for name, payload := range map[string]string{"altered": good.Raw()[:len(good.Raw())-8] + "AAAAAAAA", "another": good.Raw()} {
		event := ledger.Event{ID: uuid.NewString(), Workflow: workflow, Issuer: alice, Action: "act", Payload: []byte(payload)}
		if err := b.evidence.Log().Append(t.Context(), []ledger.Event{event}); err != nil {
			t.Fatal(err)
		}
		c := b.checkpoint(gateway, workflow, name, event.ID)
		if _, err := b.ledger.Checkpoint(t.Context(), c.ID()); !tampered(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func tampered(err error) bool { return errors.Is(err, checkpoint.ErrTampered) }

// What a stolen key has caused can be undone once it is revoked, and so can what an agent
// has that is down; their own checkpoints are not believed.
func TestRevokedAndMissingKeysOfAgents(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	task := b.token(alice, ect.Claims{Workflow: workflow})
	caused, theirs := b.checkpoint(gateway, workflow, "x1", task.ID()), b.checkpoint(alice, workflow, "", task.ID())
	if c := b.get(theirs.ID()); c.Own || c.Agent != alice {
		t.Errorf("%+v", c)
	}
	text, err := b.rings[alice].PublicSet(time.Now(), alice)
	if err != nil {
		t.Fatal(err)
	}
	revoked, err := ect.ParseSet([]byte(strings.Replace(string(text), `"kty"`, `"revoked":true,"kty"`, 1)), ect.Owner{})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		source ect.Source
		refuse func(error) bool
	}{
		{revoked, tampered},
		{down{}, func(err error) bool { return errors.Is(err, ect.ErrUnavailable) && !tampered(err) }},
	} {
		b.sources[alice] = test.source
		b.trust(alice)
		if c := b.get(caused.ID()); c.Agent != alice {
			t.Errorf("%+v", c)
		}
		if _, err := b.ledger.Checkpoint(t.Context(), theirs.ID()); !test.refuse(err) {
			t.Errorf("%v", err)
		}
	}
}

// down is an agent whose keys cannot be fetched.
type down struct{}

// Keys implements ect.Source.
func (down) Keys(context.Context, string) ([]*ect.Key, error) { return nil, errors.New("down") }

// P3: an id is taken in its workflow only; nobody puts another checkpoint before one.
func TestP3SameIDInTwoWorkflows(t *testing.T) {
	b := newRollbackBench(t)
	mine, theirs := uuid.NewString(), uuid.NewString()
	c := b.checkpoint(gateway, mine, "x1")
	ext := func() *ect.ExtBuilder {
		return new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "x").Int(ect.MemberTTL, 60)
	}
	b.token(bob, ect.Claims{ID: c.ID(), Workflow: theirs, Action: "checkpoint", Ext: ext()})
	if got := b.get(c.ID()); got.Workflow != mine || !got.Own {
		t.Errorf("%+v", got)
	}
	group := b.token(alice, ect.Claims{Workflow: mine, Action: "checkpoint", Parents: []string{c.ID()}, Ext: ext()})
	b.get(group.ID()) // it has its place
	b.token(bob, ect.Claims{ID: group.ID(), Workflow: theirs, Action: "checkpoint", Ext: ext()})
	if got := b.get(group.ID()); got.Workflow != mine || got.Agent != alice {
		t.Errorf("%+v", got)
	}
}

// What is recorded is made into the nodes of a plan: kinds, states, guards, and who is behind
// them (ATD "Rollback Authorization").
func TestNodesOfAPlan(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	outside := b.token(bob, ect.Claims{}) // in no workflow
	task := b.token(alice, ect.Claims{Workflow: workflow})
	done := b.checkpoint(gateway, workflow, "x1", task.ID())
	came := b.settled(workflow, "x1", "completed", "", task.ID(), done.ID())
	flying := b.checkpoint(gateway, workflow, "x2", came.ID())
	never := b.checkpoint(gateway, workflow, "x3", outside.ID())
	b.settled(workflow, "x3", "released", "", outside.ID(), never.ID())
	undone := b.checkpoint(gateway, workflow, "x4")
	b.settled(workflow, "x4", "completed", "", undone.ID())
	group := b.checkpoint(bob, workflow, "", done.ID(), undone.ID())
	r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: undone.ID(), Workflow: workflow, Scope: rollback.Single, Status: rollback.Completed}
	if err := b.commit(b.ledger.Stepped(t.Context(), r, &rollback.Step{Checkpoint: undone.ID(), Status: rollback.Completed}, 0)); err != nil {
		t.Fatal(err)
	}
	g := b.graph(workflow, "")
	if byTarget := b.graph("", strings.ToUpper(done.ID())); g.Len() != 10 || byTarget.Len() != g.Len() {
		t.Errorf("%d nodes, and %d of the workflow of a checkpoint", g.Len(), byTarget.Len())
	}
	for _, want := range []struct {
		id     string
		state  rollback.NodeState // of a checkpoint
		by     string
		group  bool
		guards []string
	}{
		{id: task.ID(), by: alice},
		{id: came.ID(), by: alice},
		{id: done.ID(), state: rollback.Ran, by: alice, guards: []string{came.ID(), task.ID()}},
		{id: flying.ID(), state: rollback.InFlight, by: CallerName(caller)},
		{id: never.ID(), state: rollback.NeverRan, by: bob},
		{id: undone.ID(), state: rollback.Undone, by: CallerName(caller)},
		{id: group.ID(), state: rollback.Ran, by: bob, group: true},
	} {
		got := at(t, g, want.id)
		switch {
		case want.state != "":
			if !got.IsCheckpoint() || rollback.RecordedState(got) != want.state {
				t.Errorf("%+v, want %+v", got, want)
			}
		case !got.IsTask() || got.State != guardworkflow.Done:
			t.Errorf("%+v, want %+v", got, want)
		}
		if got.By != want.by || got.Group != want.group || got.Report {
			t.Errorf("%+v, want %+v", got, want)
		}
		if want.guards != nil && fmt.Sprint(got.Guards) != fmt.Sprint(want.guards) {
			t.Errorf("guards %v, want %v", got.Guards, want.guards)
		}
		if (want.state != "") != got.Reversible || (want.state != "") != (time.Until(got.Expires) > 50*time.Minute) {
			t.Errorf("%s: reversible %v until %v", want.state, got.Reversible, got.Expires)
		}
	}
	last := -1
	for _, id := range []string{task.ID(), done.ID(), came.ID(), flying.ID(), never.ID(), undone.ID(), group.ID()} {
		i, _ := g.Index(id)
		if g.Seq(i) <= last {
			t.Errorf("%s began at %d, after %d", id, g.Seq(i), last)
		}
		last = g.Seq(i)
	}
	for who, want := range map[string]bool{
		alice:                               true,
		bob:                                 false,
		CallerName(caller):                  true, // of the call in flight
		CallerName(caller)[:7]:              false,
		CallerName(execution.CallerHash{8}): false,
		gateway:                             false,
		"":                                  false,
	} {
		if got := rollback.MayAsk(g, who, flying.ID(), rollback.Ancestor); got != want {
			t.Errorf("%q may ask: %v", who, got)
		}
	}
	// What agents say of callers counts for nothing.
	liar := b.token(bob, ect.Claims{Workflow: workflow, Ext: new(ect.ExtBuilder).Text("agent_guard.caller", fmt.Sprintf("%x", caller[:]))})
	if got := at(t, b.graph(workflow, ""), liar.ID()); got.By != bob {
		t.Errorf("%+v", got)
	}
}

// A checkpoint without a workflow is alone, and stands as what came of its call says.
func TestCheckpointWithoutAWorkflow(t *testing.T) {
	b := newRollbackBench(t)
	task := b.token(alice, ect.Claims{})
	flying, released := b.checkpoint(gateway, "", "x1", task.ID()), b.checkpoint(gateway, "", "x2")
	b.settled("", "x2", "released", b.evidence.NodeID(released.ID()), released.ID())
	doubt := b.checkpoint(gateway, "", "x3")
	b.settled("", "x3", "in_doubt", b.evidence.NodeID(doubt.ID()), doubt.ID())
	b.token(alice, ect.Claims{Parents: []string{flying.ID()}})
	for id, want := range map[string]struct {
		state rollback.NodeState
		by    string
	}{
		flying.ID(): {rollback.InFlight, alice}, released.ID(): {rollback.NeverRan, CallerName(caller)}, doubt.ID(): {rollback.Ran, CallerName(caller)},
	} {
		g := b.graph("", id)
		got := at(t, g, id)
		if g.Len() != 1 || !got.IsCheckpoint() || got.Group || len(g.Guarded(0)) > 0 || rollback.RecordedState(got) != want.state || got.By != want.by {
			t.Errorf("%d nodes, %+v, want %+v", g.Len(), got, want)
		}
		if got := b.get(id); got.Workflow != "" || !got.Own {
			t.Errorf("%+v", got)
		}
	}
	for _, id := range []string{task.ID(), uuid.NewString()} {
		if _, err := b.ledger.Graph(t.Context(), rollback.Query{Target: id}); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("%s: %v", id, err)
		}
	}
}

// P6: a workflow that is too large for a plan of all of it is refused, and never cut. So is
// what follows from a checkpoint.
func TestP6TooManyNodes(t *testing.T) {
	b := newRollbackBench(t)
	const most = 40
	b.ledger = NewRollbackLedger(RollbackLedgerOptions{Keep: time.Hour, MaxNodes: most, Recorder: func() (Recorder, bool) { return b.recorder, true }})
	workflow := uuid.NewString()
	first := b.checkpoint(gateway, workflow, "x0")
	for n := range most {
		b.token(alice, ect.Claims{Workflow: workflow, Parents: []string{first.ID()}})
		b.token(bob, ect.Claims{Workflow: workflow})
		for _, scope := range []rollback.Scope{rollback.SubDAG, rollback.FullWorkflow} {
			over := n+2 > most || scope == rollback.FullWorkflow && 2*n+3 > most
			_, err := b.ledger.Graph(t.Context(), rollback.Query{Target: first.ID(), Scope: scope})
			if refused := (*rollback.TooManyError)(nil); errors.As(err, &refused) != over || over && refused.Limit != most {
				t.Errorf("%s after %d: %v", scope, n, err)
			}
		}
		if view, err := b.ledger.Graph(t.Context(), rollback.Query{Target: first.ID(), Scope: rollback.Single}); view.More || err != nil {
			t.Errorf("%t, %v", view.More, err)
		}
	}
}

// counting counts what is read of a store.
type counting struct {
	store.Store
	gets atomic.Int64
}

func (c *counting) Get(ctx context.Context, key []byte) (store.Entry, error) {
	c.gets.Add(1)
	return c.Store.Get(ctx, key)
}

// Cascade 4.2.3: what led to the checkpoints of one workflow is not verified anew for each
// of them, or nobody could plan the rollback of a long chain in time. The agent behind each
// is the nearest all the same.
func TestAgentsOfALongChain(t *testing.T) {
	b := newRollbackBench(t)
	if err := b.evidence.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	reads := &counting{Store: b.store}
	b.store = reads
	b.open()
	each := func(length int, first, middle string) int64 {
		wid := uuid.NewString()
		var ids, want []string
		var parents []string
		by := gateway
		for i := range length {
			for at, agent := range map[int]string{0: first, length / 2: middle} {
				if i == at && agent != "" {
					parents, by = append(parents, b.token(agent, ect.Claims{Workflow: wid, Parents: parents}).ID()), agent
				}
			}
			id := b.checkpoint(gateway, wid, fmt.Sprint(wid, i), parents...).ID()
			parents = []string{id}
			ids, want = append(ids, id), append(want, by)
		}
		b.get(ids[0]) // all have their places
		before := reads.gets.Load()
		for i := length - 1; i >= 0; i-- {
			if got := b.get(ids[i]).Agent; got != want[i] {
				t.Errorf("%d of %d: %s, want %s", i, length, got, want[i])
			}
		}
		return (reads.gets.Load() - before) / int64(length)
	}
	for _, agents := range [][2]string{{"", ""}, {alice, ""}, {alice, bob}, {"", bob}} {
		short, long := each(10, agents[0], agents[1]), each(60, agents[0], agents[1])
		if long > 2*short {
			t.Errorf("%v: %d reads for each of 10, and %d for each of 60", agents, short, long)
		}
	}
}

// The gateway's tokens are verified by their signatures where they are recorded with them, and
// by the tree where not; a key that is revoked, or in no key file any more, vouches for no
// checkpoint either way.
func TestOwnTokensOfBothForms(t *testing.T) {
	for _, shown := range []bool{true, false} {
		b := newRollbackBench(t)
		if !shown {
			b.signAtOnce()
		}
		draft, err := b.recorder.EventBuilder.Checkpoint(time.Now(), &Call{
			Caller: caller, Action: "charge", Workflow: uuid.NewString(), TTL: time.Hour, State: state, Reversible: true,
		})
		if err == nil {
			err = b.evidence.Append(t.Context(), time.Now().Add(time.Hour), nil, draft)
		}
		if err != nil {
			t.Fatal(err)
		}
		if c := b.get(draft.ID()); !c.Own || !c.Reversible || c.Workflow != draft.Workflow() {
			t.Errorf("shown %v: %+v", shown, c)
		}
		text, err := b.ring.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "ring")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := b.ring.Rotate(file, ect.ES256, time.Now(), time.Hour, b.evidence.KeysToSign()...); err != nil {
			t.Fatal(err)
		}
		b.get(draft.ID())
		kid := b.ring.List()[0].ID
		if text, err = b.ring.MarshalText(); err != nil {
			t.Fatal(err)
		}
		text = bytes.Replace(text, []byte(`"kid": "`+kid+`"`), []byte(`"revoked": true, "kid": "`+kid+`"`), 1)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		revoked, err := ect.LoadRing(file)
		if err != nil || !revoked.List()[0].Revoked {
			t.Fatal(err)
		}
		b.ring.Reload(revoked)
		if _, err := b.ledger.Checkpoint(t.Context(), draft.ID()); !errors.Is(err, checkpoint.ErrTampered) {
			t.Errorf("shown %v: under a revoked key: %v", shown, err)
		}
		b.ring.Reload(newRing(t))
		if _, err := b.ledger.Checkpoint(t.Context(), draft.ID()); !errors.Is(err, checkpoint.ErrTampered) {
			t.Errorf("shown %v: under a key that the file has no more: %v", shown, err)
		}
	}
}

// entry is what the ledger has under an id.
func (b *rollbackBench) entry(workflow, id string) *ect.Unverified {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	e, err := b.evidence.Log().Lookup(ctx, workflow, id)
	if err != nil {
		b.t.Fatal(err)
	}
	raw, err := b.evidence.Log().Token(ctx, &e)
	if err != nil {
		b.t.Fatal(err)
	}
	u, err := ect.ParseInsecure(string(raw))
	if err != nil {
		b.t.Fatal(err)
	}
	return u
}

// Cascade 4.4.1: a rollback follows from the error that caused it, else from the token
// that asked, else from its checkpoint; what the ledger does not hold is no parent.
func TestCascade441ParentOfTheStart(t *testing.T) {
	for name, workflow := range map[string]string{"in a workflow": uuid.NewString(), "in none": ""} {
		t.Run(name, func(t *testing.T) {
			b := newRollbackBench(t)
			c := b.checkpoint(gateway, workflow, "x1")
			failure, request := b.token(alice, ect.Claims{Workflow: workflow}), b.token(alice, ect.Claims{Workflow: workflow})
			elsewhere := b.token(alice, ect.Claims{Workflow: uuid.NewString()})
			for _, test := range []struct {
				parents []string
				want    string
			}{
				{[]string{failure.ID(), request.ID()}, failure.ID()},
				{[]string{uuid.NewString(), request.ID()}, request.ID()},
				{[]string{elsewhere.ID(), "", "no id"}, c.ID()},
				{nil, c.ID()},
			} {
				r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: rollback.Single}
				batch, err := b.ledger.Started(t.Context(), r, test.parents)
				if err := b.commit(batch, err); err != nil {
					t.Fatal(err)
				}
				if got := b.entry(workflow, batch.ID); fmt.Sprint(got.Parents()) != fmt.Sprint([]string{test.want}) || got.Issuer() != gateway {
					t.Errorf("%v: parents %v, want %s", test.parents, got.Parents(), test.want)
				}
			}
		})
	}
}

// The token that asks is recorded with the start, behind what led to it, and not before:
// else it would be a part of the workflow that lineage is judged by.
func TestRequestIsRecordedWithTheStart(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	c := b.checkpoint(gateway, workflow, "x1")
	issue := func(parents ...string) *ect.Token {
		token, err := b.issuers[alice].Issue(time.Now(), ect.Claims{Audience: []string{gateway}, Workflow: workflow, Action: "read", Parents: parents})
		if err != nil {
			t.Fatal(err)
		}
		b.evidence.Seen([]*ect.Token{token})
		return token
	}
	read := issue(c.ID())
	request := issue(read.ID())
	if g := b.graph(workflow, ""); g.Len() != 1 {
		t.Errorf("%d nodes before the rollback was accepted", g.Len())
	}
	for range 2 { // another rollback that follows from the same request
		r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: rollback.Single}
		batch, err := b.ledger.Started(t.Context(), r, []string{request.ID()})
		if err := b.commit(batch, err); err != nil {
			t.Fatal(err)
		}
		if got := b.entry(workflow, batch.ID); fmt.Sprint(got.Parents()) != fmt.Sprint([]string{request.ID()}) {
			t.Errorf("parents %v", got.Parents())
		}
	}
	if g := b.graph(workflow, ""); g.Len() != 5 || at(t, g, request.ID()).By != alice || at(t, g, read.ID()).By != alice {
		t.Errorf("%v", g.Nodes())
	}
}

// P5: what is recorded is not recorded again, in this life or the next, and its id stays.
func TestP5RecordedOnce(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	c := b.checkpoint(gateway, workflow, "x1")
	r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: rollback.Single, Status: rollback.Failed}
	step := &rollback.Step{Checkpoint: c.ID(), Agent: gateway, Status: rollback.Failed, Attempts: 1}
	r.Steps = []rollback.Step{*step}
	ctx := t.Context()
	events := map[string]func() (rollback.Evidence, error){
		"start":    func() (rollback.Evidence, error) { return b.ledger.Started(ctx, r, nil) },
		"step":     func() (rollback.Evidence, error) { return b.ledger.Stepped(ctx, r, step, checkpoint.Compensate) },
		"complete": func() (rollback.Evidence, error) { return b.ledger.Completed(ctx, r) },
		"timeout": func() (rollback.Evidence, error) {
			return b.ledger.Erred(ctx, r, c.ID(), "timeout", "Not done in time.")
		},
		"failed": func() (rollback.Evidence, error) { return b.ledger.Erred(ctx, r, c.ID(), "action_failed", "Refused.") },
	}
	ids := map[string]string{}
	for name, record := range events {
		first, err := record()
		if err != nil {
			t.Fatal(err)
		}
		second, err := record() // before the first has landed
		if err != nil || second.ID != first.ID || len(second.Writes()) == 0 {
			t.Fatalf("%s: %v", name, err)
		}
		if err := b.commit(first, nil); err != nil {
			t.Fatal(err)
		}
		if err := b.commit(second, nil); !errors.Is(err, ledger.ErrDuplicate) {
			t.Errorf("%s landed twice: %v", name, err)
		}
		third, err := record()
		if err != nil || third.ID != first.ID || len(third.Writes()) != 0 || third.Done(nil) != nil {
			t.Errorf("%s, when it stands: %v", name, err)
		}
		if other := ids[first.ID]; other != "" {
			t.Errorf("%s and %s have one id", name, other)
		}
		ids[first.ID] = name
		b.entry(workflow, first.ID)
	}
	closing, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := b.evidence.Close(closing); err != nil {
		t.Fatal(err)
	}
	b.open()
	for name, record := range events {
		batch, err := record()
		if err != nil || ids[batch.ID] != name || len(batch.Writes()) != 0 {
			t.Errorf("%s in the next life: %v", name, err)
		}
	}
	b.mute = true
	for name, record := range events {
		if _, err := record(); !errors.Is(err, ErrNoIdentity) {
			t.Errorf("%s without an identity: %v", name, err)
		}
	}
}

// Cascade Figure 13: compensate where a compensation was sent, else rollback_complete.
func TestCascade442StepsOfEachWay(t *testing.T) {
	for _, test := range []struct {
		way      checkpoint.Way
		attempts int
		want     string
	}{
		{checkpoint.Compensate, 1, "compensate"}, {checkpoint.Compensate, 0, "rollback_complete"},
		{checkpoint.Restore, 1, "rollback_complete"}, {checkpoint.Delegate, 2, "rollback_complete"}, {checkpoint.Irreversible, 0, "rollback_complete"},
	} {
		b := newRollbackBench(t)
		workflow := uuid.NewString()
		c := b.checkpoint(gateway, workflow, "x1")
		r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow}
		batch, err := b.ledger.Stepped(t.Context(), r, &rollback.Step{Checkpoint: c.ID(), Status: rollback.Completed, Attempts: test.attempts}, test.way)
		if err := b.commit(batch, err); err != nil {
			t.Fatal(err)
		}
		if got := b.entry(workflow, batch.ID); got.Action() != test.want || got.Parents()[0] != c.ID() {
			t.Errorf("%s after %d attempts: %s below %v", test.way, test.attempts, got.Action(), got.Parents())
		}
	}
}

// Cascade 4.1.3, ATD "Workflow Boundary ECTs": with a rollback of the whole workflow this
// has ended, in the words of ATD, behind its start where somebody has recorded that.
func TestCascade413WorkflowComplete(t *testing.T) {
	for status, want := range map[rollback.Status]string{
		rollback.Completed: "rolled_back", rollback.Partial: "partial", rollback.Escalated: "escalated", rollback.Failed: "failed",
	} {
		b := newRollbackBench(t)
		workflow := uuid.NewString()
		start := b.token(alice, ect.Claims{Workflow: workflow, Action: "workflow_start",
			Ext: new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "the flow").Text(ect.MemberDescription, "what it does")})
		c := b.checkpoint(gateway, workflow, "x1")
		b.graph(workflow, "") // as a plan was made, before
		for _, scope := range []rollback.Scope{rollback.SubDAG, rollback.FullWorkflow} {
			r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: scope, Status: status}
			batch, err := b.ledger.Completed(t.Context(), r)
			if err := b.commit(batch, err); err != nil {
				t.Fatal(err)
			}
			id := b.evidence.WorkflowCompleteID(r.ID)
			if scope != rollback.FullWorkflow {
				if batch, err := b.evidence.IsRecorded(t.Context(), workflow, id); batch || err != nil {
					t.Errorf("%s: recorded %v, %v", scope, batch, err)
				}
				continue
			}
			got := b.entry(workflow, id)
			name, _ := got.Ext().Text(ect.MemberWorkflowName)
			said, _ := got.Ext().Text(ect.MemberTerminalStatus)
			elapsed, timed := got.Ext().Number(ect.MemberElapsed)
			if got.Event() != ect.EventWorkflowComplete || len(got.Lacks()) > 0 || name != "the flow" || said != want || !timed || elapsed < 0 ||
				fmt.Sprint(got.Parents()) != fmt.Sprint([]string{start.ID(), batch.ID}) {
				t.Errorf("%s %v: %q %q %v", got.Action(), got.Parents(), name, said, elapsed)
			}
		}
	}
}

// No end is recorded that has not seen the result of a rollback: its commit rewrites the note of an end that is awaited.
func TestNoEndBesideTheResultOfARollback(t *testing.T) {
	b, ctx, workflow := newRollbackBench(t), t.Context(), uuid.NewString()
	c := b.checkpoint(gateway, workflow, "x1")
	for _, scope := range []rollback.Scope{rollback.Single, rollback.FullWorkflow} {
		for _, awaited := range []bool{false, true} {
			if awaited {
				if _, err := b.store.Commit(ctx, b.evidence.Opened(time.Now(), workflow)); err != nil {
					t.Fatal(err)
				}
			}
			read, err := b.evidence.OpenSince(ctx, workflow)
			if err != nil {
				t.Fatal(err)
			}
			r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: scope, Status: rollback.Completed}
			batch, err := b.ledger.Completed(ctx, r)
			if err := b.commit(batch, err); err != nil {
				t.Fatal(err)
			}
			since, err := b.evidence.OpenSince(ctx, workflow)
			if err != nil || (since != 0) != awaited || awaited && since == read {
				t.Errorf("%s: the note is %d, before %d: %v", scope, since, read, err)
			}
			if _, err := b.store.Commit(ctx, b.evidence.Closed(workflow, since)); err != nil {
				t.Fatal(err)
			}
		}
	}
}
