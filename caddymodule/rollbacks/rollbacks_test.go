package rollbacks_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	. "github.com/agent-guard/caddy-agent-guard/caddymodule/rollbacks"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	gateway = "spiffe://example.com/gateway"
	former  = "spiffe://example.com/gateway-of-before"
	alice   = "spiffe://example.com/agent/alice"
	bob     = "spiffe://example.com/agent/bob"
)

var (
	caller = guard.CallerHash{7}
	state  = ect.Sum([]byte("a snapshot"))
)

// bench is a gateway with its ledger, and two agents.
type bench struct {
	t       *testing.T
	store   store.Store
	sealer  *seal.Ring
	ring    *ect.Ring
	told    *evidence.Evidence
	voice   Voice
	mute    bool
	ledger  *Ledger
	issuers map[string]*ect.Issuer
	// sources are the keys that agents publish.
	sources map[string]ect.Source
	rings   map[string]*ect.Ring
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{
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
		issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: name, Ring: ring})
		if err != nil {
			t.Fatal(err)
		}
		b.issuers[name] = issuer
	}
	b.open()
	b.ledger = New(Options{Keep: time.Hour, Voice: func() (Voice, bool) { return b.voice, !b.mute }})
	return b
}

func newRing(t *testing.T) *ect.Ring {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// open begins a life of the gateway.
func (b *bench) open() {
	b.t.Helper()
	told, err := evidence.Open(b.t.Context(), evidence.Options{Store: b.store, Sealer: b.sealer, Node: "n1", Ring: b.ring})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = told.Close(context.Background()) })
	for _, name := range []string{former, gateway} {
		if err := told.Named(b.t.Context(), name, b.ring); err != nil {
			b.t.Fatal(err)
		}
	}
	witness, err := told.Witness(gateway, ect.Draft00, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	b.told, b.voice = told, Voice{Evidence: told, Witness: witness}
	b.trust(alice, bob)
}

// trust takes the keys of agents for known, and no others.
func (b *bench) trust(names ...string) {
	b.t.Helper()
	sources := []ect.Source{newRing(b.t).Source(ect.Owner{})}
	for _, name := range names {
		sources = append(sources, b.sources[name])
	}
	var err error
	if b.voice.Verifier, err = ect.NewVerifier(ect.Policy{Audience: []string{gateway}, Sources: sources}); err != nil {
		b.t.Fatal(err)
	}
}

// token records a token of an issuer.
func (b *bench) token(issuer string, c ect.Claims) *ect.Token {
	b.t.Helper()
	c.Audience = []string{gateway}
	if c.Action == "" {
		c.Action = "act"
	}
	token, err := b.issuers[issuer].Issue(time.Now(), c)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.told.Append(b.t.Context(), time.Now(), []*ect.Token{token}); err != nil {
		b.t.Fatal(err)
	}
	return token
}

// checkpoint records a checkpoint that can be undone.
func (b *bench) checkpoint(issuer, workflow, execution string, parents ...string) *ect.Token {
	b.t.Helper()
	ext := new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://g.example/rollback").Int(ect.MemberTTL, 3600)
	if issuer == gateway || issuer == former {
		ext.Text(evidence.MemberCaller, fmt.Sprintf("%x", caller[:])).Text(evidence.MemberExecution, execution)
	}
	return b.token(issuer, ect.Claims{Workflow: workflow, Action: "checkpoint", Parents: parents, Output: state, Ext: ext})
}

// settled records what came of the call of a checkpoint.
func (b *bench) settled(workflow, execution, outcome, id string, parents ...string) *ect.Token {
	b.t.Helper()
	return b.token(gateway, ect.Claims{ID: id, Workflow: workflow, Action: "pay", Parents: parents, Ext: new(ect.ExtBuilder).
		Text(evidence.MemberOutcome, outcome).Text(evidence.MemberCaller, fmt.Sprintf("%x", caller[:])).Text(evidence.MemberExecution, execution)})
}

func (b *bench) get(id string) rollback.Checkpoint {
	b.t.Helper()
	c, err := b.ledger.Checkpoint(b.t.Context(), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

func (b *bench) nodes(workflow, target string) map[string]plan.Node {
	b.t.Helper()
	nodes, err := b.ledger.Nodes(b.t.Context(), workflow, target)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := plan.New(workflow, nodes); err != nil {
		b.t.Error(err)
	}
	all := make(map[string]plan.Node)
	for _, n := range nodes {
		all[n.ID] = n
	}
	return all
}

// commit lets a telling land.
func (b *bench) commit(told rollback.Telling, err error) error {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
	if writes := told.Writes(); len(writes) > 0 {
		_, err = b.store.Commit(b.t.Context(), writes...)
	}
	return told.Done(err)
}

// Cascade 4.2.3: what the token of a checkpoint says, and the agent behind it.
func TestCascade423Checkpoint(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	task := b.token(alice, ect.Claims{Workflow: workflow})
	outer := b.checkpoint(gateway, workflow, "x1", task.ID())
	inner := b.checkpoint(gateway, workflow, "x2", outer.ID())
	c := b.get(strings.ToUpper(inner.ID())) // at once: it need not have its place
	want := rollback.Checkpoint{
		ID: inner.ID(), Workflow: workflow, Agent: alice, Own: true, Sum: state.Bytes(), Reversible: true,
		Expires: inner.IssuedAt().Add(time.Hour), TTL: time.Hour, Parents: []string{outer.ID()},
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
	if _, err := b.ledger.Nodes(t.Context(), workflow, inner.ID()); !errors.Is(err, ErrNoIdentity) {
		t.Errorf("without an identity: %v", err)
	}
}

// Cascade 4.2.3: stored tokens are verified as such, also under replaced keys; one of an
// agent whose key is gone is taken by its proof.
func TestCascade423KeysOfStoredTokens(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	task := b.token(alice, ect.Claims{Workflow: workflow})
	c := b.checkpoint(gateway, workflow, "x1", task.ID())
	b.trust(bob)
	if got := b.get(c.ID()); got.Agent != alice {
		t.Errorf("%+v", got)
	}
	b.voice.Verifier = nil
	if got := b.get(c.ID()); got.Agent != alice {
		t.Errorf("%+v", got)
	}
	// Somebody else's key that says that it is the gateway's.
	b.issuers["forger"], _ = ect.NewIssuer(ect.IssuerOptions{Identity: gateway, Ring: newRing(t)})
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
		if err := b.told.Log().Append(t.Context(), []ledger.Event{event}); err != nil {
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
	b := newBench(t)
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
	b := newBench(t)
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

// What was told is made into the nodes of a plan: kinds, states, guards, and who is behind
// them (ATD "Rollback Authorization").
func TestNodesOfAPlan(t *testing.T) {
	b := newBench(t)
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
	r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: undone.ID(), Workflow: workflow, Scope: plan.Single, Status: rollback.Completed}
	if err := b.commit(b.ledger.Stepped(t.Context(), r, &rollback.Step{Checkpoint: undone.ID(), Status: rollback.Completed}, 0)); err != nil {
		t.Fatal(err)
	}
	nodes := b.nodes(workflow, "")
	if byTarget := b.nodes("", strings.ToUpper(done.ID())); len(nodes) != 10 || len(byTarget) != len(nodes) {
		t.Errorf("%d nodes, and %d of the workflow of a checkpoint", len(nodes), len(byTarget))
	}
	for _, want := range []plan.Node{
		{ID: task.ID(), Kind: plan.Action, By: alice, Done: true},
		{ID: came.ID(), Kind: plan.Action, By: alice, Done: true},
		{ID: done.ID(), Kind: plan.Checkpoint, State: plan.Standing, By: alice, Guards: []string{came.ID(), task.ID()}},
		{ID: flying.ID(), Kind: plan.Checkpoint, State: plan.InFlight, By: evidence.CallerName(caller)},
		{ID: never.ID(), Kind: plan.Checkpoint, State: plan.NeverRan, By: bob},
		{ID: undone.ID(), Kind: plan.Checkpoint, State: plan.Undone, By: evidence.CallerName(caller)},
		{ID: group.ID(), Kind: plan.Group, State: plan.Standing, By: bob},
	} {
		got := nodes[want.ID]
		if got.Kind != want.Kind || got.State != want.State || got.By != want.By || got.Done != want.Done {
			t.Errorf("%+v, want %+v", got, want)
		}
		if want.Guards != nil && fmt.Sprint(got.Guards) != fmt.Sprint(want.Guards) {
			t.Errorf("guards %v, want %v", got.Guards, want.Guards)
		}
		if (want.State != "") != got.Reversible || (want.State != "") != (time.Until(got.Expires) > 50*time.Minute) {
			t.Errorf("%s: reversible %v until %v", want.State, got.Reversible, got.Expires)
		}
	}
	g, err := plan.New(workflow, slices.Collect(func(yield func(plan.Node) bool) {
		for _, n := range nodes {
			if !yield(n) {
				return
			}
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	for who, want := range map[graph.Reader]bool{
		{Issuer: alice}: true,
		{Issuer: bob}:   false,
		{Issuer: evidence.CallerName(caller)[:7]}: false,
		{Caller: caller}:                  true, // of the call in flight
		{Caller: caller, Anonymous: true}: false,
		{Caller: guard.CallerHash{8}}:     false,
		{}:                                false,
		{Issuer: bob, Caller: caller}:     false, // a token speaks for its issuer alone
		{Issuer: gateway}:                 false,
		{Issuer: alice, Caller: guard.CallerHash{}}: true,
	} {
		if got := g.MayAsk(Requester(who), flying.ID(), plan.Ancestor); got != want {
			t.Errorf("%+v may ask: %v", who, got)
		}
	}
	// What agents say of callers counts for nothing.
	liar := b.token(bob, ect.Claims{Workflow: workflow, Ext: new(ect.ExtBuilder).Text(evidence.MemberCaller, fmt.Sprintf("%x", caller[:]))})
	if got := b.nodes(workflow, "")[liar.ID()]; got.By != bob {
		t.Errorf("%+v", got)
	}
}

// A checkpoint without a workflow is alone, and stands as what came of its call says.
func TestCheckpointWithoutAWorkflow(t *testing.T) {
	b := newBench(t)
	task := b.token(alice, ect.Claims{})
	flying, released := b.checkpoint(gateway, "", "x1", task.ID()), b.checkpoint(gateway, "", "x2")
	b.settled("", "x2", "released", b.told.NodeID(released.ID()), released.ID())
	doubt := b.checkpoint(gateway, "", "x3")
	b.settled("", "x3", "in_doubt", b.told.NodeID(doubt.ID()), doubt.ID())
	b.token(alice, ect.Claims{Parents: []string{flying.ID()}})
	for id, want := range map[string]plan.Node{
		flying.ID(): {State: plan.InFlight, By: alice}, released.ID(): {State: plan.NeverRan, By: evidence.CallerName(caller)},
		doubt.ID(): {State: plan.Standing, By: evidence.CallerName(caller)},
	} {
		nodes := b.nodes("", id)
		if got := nodes[id]; len(nodes) != 1 || got.Kind != plan.Checkpoint || got.State != want.State || got.By != want.By {
			t.Errorf("%+v, want %+v", nodes, want)
		}
		if got := b.get(id); got.Workflow != "" || !got.Own {
			t.Errorf("%+v", got)
		}
	}
	for _, id := range []string{task.ID(), uuid.NewString()} {
		if _, err := b.ledger.Nodes(t.Context(), "", id); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("%s: %v", id, err)
		}
	}
}

// P6: a workflow that is too large is refused, and never cut.
func TestP6TooManyNodes(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	var batch []*ect.Draft
	for n := range plan.MaxNodes + 1 {
		d, err := b.issuers[gateway].Draft(time.Now(), ect.Claims{Audience: []string{gateway}, Workflow: workflow, Action: "act"})
		if err != nil {
			t.Fatal(err)
		}
		if batch = append(batch, d); len(batch) == 16 || n == plan.MaxNodes {
			if err := b.told.Append(t.Context(), time.Now(), nil, batch...); err != nil {
				t.Fatal(err)
			}
			batch = nil
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.told.Log().Flush(ctx); err != nil {
		t.Fatal(err)
	}
	_, err := b.ledger.Nodes(t.Context(), workflow, "")
	if refused := (*plan.TooManyError)(nil); !errors.As(err, &refused) || refused.Limit != plan.MaxNodes {
		t.Errorf("%v", err)
	}
}
