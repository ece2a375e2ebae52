package evidence_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	identity = "spiffe://example.com/gateway"
	patience = 20 * time.Second
)

// bench is a store with its evidence, and an agent.
type bench struct {
	store   store.Store
	sealer  *seal.Ring
	ring    *ect.Ring
	told    *evidence.Evidence
	witness *evidence.Witness
	agent   *ect.Issuer

	headFile string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{store: memory.New(memory.Options{}), sealer: seal.Generate(), ring: newRing(t)}
	var err error
	if b.agent, err = ect.NewIssuer(ect.IssuerOptions{Identity: "spiffe://example.com/agent", Ring: newRing(t)}); err != nil {
		t.Fatal(err)
	}
	b.open(t)
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
func (b *bench) open(t *testing.T) {
	t.Helper()
	told, err := evidence.Open(t.Context(), evidence.Options{Store: b.store, Sealer: b.sealer, Node: "n1", Ring: b.ring, HeadFile: b.headFile})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = told.Close(context.Background()) })
	if b.witness, err = told.Witness(identity, ect.Draft00, 0); err != nil {
		t.Fatal(err)
	}
	b.told = told
}

// close ends it.
func (b *bench) close(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := b.told.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) token(t *testing.T, c ect.Claims) *ect.Token {
	t.Helper()
	c.Audience = []string{identity}
	if c.Action == "" {
		c.Action = "pay"
	}
	token, err := b.agent.Issue(time.Now(), c)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// entry is the token that the ledger has of an event.
func (b *bench) entry(t *testing.T, workflow, id string) *ect.Token {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	entry, err := b.told.Log().Wait(ctx, workflow, id)
	if err != nil {
		t.Fatal(err)
	}
	owner, err := ect.ParseOwner(identity)
	if err != nil {
		t.Fatal(err)
	}
	v, err := ect.NewVerifier(ect.Policy{Audience: []string{identity}, Sources: []ect.Source{b.ring.Source(owner)}})
	if err != nil {
		t.Fatal(err)
	}
	token, err := v.VerifyStored(ctx, string(entry.Payload))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func call(workflow string, parents ...string) *evidence.Call {
	return &evidence.Call{
		Key: guard.Key{1, 2}, Caller: guard.CallerHash{3}, Action: "charge", Workflow: workflow, Parents: parents,
		Target: "POST api.example.com/v1/charges", RollbackURI: "https://api.example.com/.well-known/cascade/rollback", TTL: time.Hour,
	}
}

// tell records a call: its checkpoint and what came of it. It returns their ids.
func (b *bench) tell(t *testing.T, c *evidence.Call, o evidence.Outcome, tokens ...*ect.Token) []*ect.Draft {
	t.Helper()
	now := time.Now()
	checkpoint, err := b.witness.Checkpoint(now, c)
	if err != nil {
		t.Fatal(err)
	}
	keep := now.Add(time.Hour)
	if err := b.told.Append(t.Context(), keep, tokens, checkpoint); err != nil {
		t.Fatal(err)
	}
	o.Checkpoint = checkpoint.ID()
	drafts, err := b.witness.Outcome(now, c, &o)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.told.Append(t.Context(), keep, nil, drafts...); err != nil {
		t.Fatal(err)
	}
	return append([]*ect.Draft{checkpoint}, drafts...)
}

// cascade 4.2.1 and ATD "Error Signaling": a checkpoint with all its members before
// the call, its node and, where it failed, an error after it.
func TestNodesOfACall(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	token := b.token(t, ect.Claims{Workflow: workflow})
	told := b.tell(t, call(workflow, token.ID()), evidence.Outcome{
		Verdict: guard.InDoubt, Cause: guard.CauseDeadline, Status: 0, UpstreamErrors: []string{uuid.NewString()},
	}, token)

	checkpoint := b.entry(t, workflow, told[0].ID())
	if checkpoint.Event() != ect.EventCheckpoint || fmt.Sprint(checkpoint.Parents()) != fmt.Sprint([]string{token.ID()}) ||
		checkpoint.Issuer() != identity || checkpoint.Workflow() != workflow {
		t.Errorf("checkpoint %s", checkpoint.Payload())
	}
	if lacks := checkpoint.Lacks(); len(lacks) > 0 {
		t.Errorf("the checkpoint lacks %v", lacks)
	}
	if reversible, ok := checkpoint.Ext().Bool(ect.MemberReversible); reversible || !ok {
		t.Error("P6: nothing undoes the call, and the checkpoint says otherwise")
	}
	node := b.entry(t, workflow, told[1].ID())
	if outcome, _ := node.Ext().Text(evidence.MemberOutcome); node.Action() != "charge" || outcome != "in_doubt" ||
		fmt.Sprint(node.Parents()) != fmt.Sprint([]string{token.ID(), checkpoint.ID()}) {
		t.Errorf("node %s", node.Payload())
	}
	failure := b.entry(t, workflow, told[2].ID())
	severity, _ := failure.Ext().Text(ect.MemberSeverity)
	kind, _ := failure.Ext().Text(ect.MemberErrorType)
	upstream, _ := failure.Ext().Texts(ect.MemberUpstreamErrors)
	about, _ := failure.Ext().Text(ect.MemberCheckpointID)
	if failure.Event() != ect.EventError || severity != "critical" || kind != "timeout" || len(upstream) != 1 || about != checkpoint.ID() ||
		fmt.Sprint(failure.Parents()) != fmt.Sprint([]string{node.ID(), token.ID()}) || len(failure.Lacks()) > 0 {
		t.Errorf("error %s", failure.Payload())
	}
}

// Which failures there are, and how bad they are.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		outcome        evidence.Outcome
		severity, kind string
	}{
		{evidence.Outcome{Verdict: guard.Completed, Status: 201}, "", ""},
		{evidence.Outcome{Verdict: guard.Completed, By: "operator"}, "", ""},
		{evidence.Outcome{Verdict: guard.Released, By: "probe"}, "", ""},
		{evidence.Outcome{Verdict: guard.Completed, Status: 422}, "warning", "action_failed"},
		{evidence.Outcome{Verdict: guard.Completed, Status: 500}, "error", "action_failed"},
		{evidence.Outcome{Verdict: guard.Completed, Status: 500, UpstreamErrors: []string{uuid.NewString()}}, "error", "upstream_cascade"},
		{evidence.Outcome{Verdict: guard.Released, Status: 429}, "warning", "resource_exhausted"},
		{evidence.Outcome{Verdict: guard.Released, Status: 401}, "warning", "constraint_violation"},
		{evidence.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent}, "error", "action_failed"},
		{evidence.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost}, "critical", "unknown"},
	} {
		b := newBench(t)
		told := b.tell(t, call(""), c.outcome)
		if c.kind == "" {
			if len(told) != 2 {
				t.Errorf("%+v: an error is told of", c.outcome)
			}
			continue
		}
		if len(told) != 3 {
			t.Errorf("%+v: no error is told of", c.outcome)
			continue
		}
		severity, _ := told[2].Ext().Text(ect.MemberSeverity)
		kind, _ := told[2].Ext().Text(ect.MemberErrorType)
		if severity != c.severity || kind != c.kind {
			t.Errorf("%+v: %s %s, want %s %s", c.outcome, severity, kind, c.severity, c.kind)
		}
	}
}

// An action that is called like an event is not read as one.
func TestActionNamedLikeAnEvent(t *testing.T) {
	b := newBench(t)
	c := call("")
	c.Action = "atd:checkpoint"
	if told := b.tell(t, c, evidence.Outcome{Verdict: guard.Completed, Status: 200}); told[1].Event() != "" {
		t.Errorf("%s", told[1].Payload())
	}
}

// The same workflow has one id, and it is a UUID.
func TestWorkflowIDs(t *testing.T) {
	const id = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
	for name, want := range map[string]string{
		"": "", id: id, strings.ToUpper(id): id,
		"a0b1c2d3e4f56789abcdef0123456789": id, // a trace id
	} {
		if got := evidence.WorkflowID(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	seen := map[string]bool{}
	for _, name := range []string{"w-1", "w-2", "urn:uuid:" + id, "{" + id + "}", uuid.Nil.String(), uuid.Max.String()} {
		got := evidence.WorkflowID(name)
		if parsed, err := uuid.Parse(got); err != nil || parsed == uuid.Nil || parsed == uuid.Max || got == id || seen[got] || got != evidence.WorkflowID(name) {
			t.Errorf("%s: %s", name, got)
		}
		seen[got] = true
	}
}

// A token that is bound in a commit is bound for every process and every life, to its
// bytes and its use (P1).
func TestBoundTokens(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	token := b.token(t, ect.Claims{Workflow: uuid.NewString()})
	use, other := evidence.Use{1}, evidence.Use{2}
	if _, err := b.store.Commit(ctx, b.told.Bound(token, use, time.Time{})); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.Commit(ctx, b.told.Bound(token, other, time.Time{})); !errors.As(err, new(*store.Conflict)) {
		t.Errorf("bound a second time: %v", err)
	}
	b.close(t)
	b.open(t)
	altered := b.token(t, ect.Claims{Workflow: token.Workflow(), ID: token.ID(), Action: "else"})
	elsewhere := b.token(t, ect.Claims{Workflow: uuid.NewString(), ID: token.ID()})
	for _, c := range []struct {
		token *ect.Token
		use   evidence.Use
		want  evidence.Standing
	}{{token, use, evidence.Same}, {token, other, evidence.Other}, {altered, use, evidence.Other}, {elsewhere, use, evidence.Unused}} {
		if got, err := b.told.Recorded(ctx, c.token, c.use); err != nil || got != c.want {
			t.Errorf("%v %v, want %v", got, err, c.want)
		}
	}
}

// In memory too, exactly one of many uses at once is the first.
func TestTakenTokens(t *testing.T) {
	b := newBench(t)
	token, now := b.token(t, ect.Claims{}), time.Now()
	var first sync.Map
	var all sync.WaitGroup
	for n := range 50 {
		all.Go(func() {
			if got, err := b.told.Take(token, evidence.Use{byte(n)}, now); err != nil || got == evidence.Unused {
				first.Store(n, err)
			}
		})
	}
	all.Wait()
	n := 0
	first.Range(func(_, err any) bool {
		if err != nil {
			t.Error(err)
		}
		n++
		return true
	})
	if n != 1 {
		t.Errorf("%d uses were the first", n)
	}
	for n := range 50 {
		b.told.Forget(token, evidence.Use{byte(n)})
	}
	if got, err := b.told.Take(token, evidence.Use{99}, now); err != nil || got != evidence.Unused {
		t.Errorf("%v %v", got, err)
	}
	// What cannot be presented any more need not be remembered.
	if got, err := b.told.Take(token, evidence.Use{1}, now.Add(48*time.Hour)); err != nil || got != evidence.Unused {
		t.Errorf("after its time: %v %v", got, err)
	}
}

// A parent is found while it waits for its place in the tree, afterwards, and in the
// next life; one of another workflow is not taken for it.
func TestParentsAreFound(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	parent := b.token(t, ect.Claims{Workflow: workflow})
	foreign := b.token(t, ect.Claims{Workflow: uuid.NewString(), ID: parent.ID()})
	for _, token := range []*ect.Token{parent, foreign} {
		if err := b.told.Append(ctx, time.Now(), []*ect.Token{token}); err != nil {
			t.Fatal(err)
		}
	}
	find := func() {
		t.Helper()
		child := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{parent.ID()}})
		for _, dag := range []ect.DAG{b.told.Graph(workflow), b.told.GraphOf(child.Raw())} {
			nodes, err := dag.Nodes(ctx, parent.ID())
			found := false
			for _, n := range nodes {
				found = found || n.Workflow == workflow && n.Digest == parent.Digest()
			}
			if err != nil || !found {
				t.Errorf("%+v %v", nodes, err)
			}
		}
	}
	find()
	b.close(t)
	b.open(t) // which remembers nothing
	find()
	if nodes, err := b.told.Graph(workflow).Nodes(ctx, uuid.NewString()); err != nil || len(nodes) != 0 {
		t.Errorf("%+v %v", nodes, err)
	}
}

// P6: nobody can take the id of a node before it is told: it follows from a secret of
// the store.
func TestNodeIDsAreSecret(t *testing.T) {
	b, other := newBench(t), newBench(t)
	checkpoint := uuid.NewString()
	id := b.told.NodeID(checkpoint)
	if id == other.told.NodeID(checkpoint) {
		t.Error("two stores give one id")
	}
	b.close(t)
	if b.open(t); b.told.NodeID(checkpoint) != id {
		t.Error("the next life gives another id")
	}
	for _, domain := range []string{"outcome", "settled"} {
		o := evidence.Outcome{Checkpoint: checkpoint, Verdict: guard.Completed}
		if domain == "settled" {
			o.By = "operator"
		}
		one, err := b.witness.Outcome(time.Now(), call(""), &o)
		if err != nil {
			t.Fatal(err)
		}
		two, err := other.witness.Outcome(time.Now(), call(""), &o)
		if err != nil {
			t.Fatal(err)
		}
		if one[0].ID() == two[0].ID() {
			t.Errorf("%s: two stores give one id", domain)
		}
	}
}

// link records that an execution has a checkpoint.
func (b *bench) link(t *testing.T, c *evidence.Call, execution, checkpoint string) {
	t.Helper()
	w, err := b.told.Link(t.Context(), c, execution, checkpoint, time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if w == nil {
		return
	}
	if _, err := b.store.Commit(t.Context(), *w); err != nil {
		t.Fatal(err)
	}
}

// A call that names its parent finds that one's checkpoint, in the same workflow only.
func TestLinks(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	checkpoint, later := uuid.NewString(), uuid.NewString()
	b.link(t, call("w"), "order-7", checkpoint)
	parent := func(workflow, execution, want string) {
		t.Helper()
		if got, err := b.told.Parent(ctx, workflow, execution); err != nil || got != want {
			t.Errorf("%s %s: %q %v, want %q", workflow, execution, got, err, want)
		}
	}
	parent("w", "order-7", checkpoint)
	parent("v", "order-7", "")
	parent("w", "order-8", "")
	b.link(t, call("w"), "order-7", later)
	parent("w", "order-7", later)
	// An agent that hands its id on does not take the place of who called it.
	nested := call("w", later)
	nested.Caller = guard.CallerHash{9}
	b.link(t, nested, "order-7", uuid.NewString())
	parent("w", "order-7", later)
	// P3: two callers, one id: nobody is found by it any more.
	stranger := call("w")
	stranger.Caller = guard.CallerHash{8}
	for _, c := range []*evidence.Call{stranger, stranger, call("w")} {
		b.link(t, c, "order-7", uuid.NewString())
		parent("w", "order-7", "")
	}
}

// What an earlier life left in doubt is told of once, however often the gateway starts.
func TestDeathsAreToldOnce(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	token := b.token(t, ect.Claims{Workflow: workflow})
	checkpoint, err := b.witness.Checkpoint(time.Now(), call(workflow, token.ID()))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.told.Append(t.Context(), time.Now(), []*ect.Token{token}, checkpoint); err != nil {
		t.Fatal(err)
	}
	b.close(t)
	record := guard.Record{
		State: guard.StateInDoubt, Cause: guard.CauseDied, Checkpoint: checkpoint.ID(), Workflow: workflow, Action: "charge", KeepResult: time.Hour,
	}
	for range 3 {
		b.open(t)
		if err := b.told.TellDeath(t.Context(), b.witness, guard.Key{1}, &record); err != nil {
			t.Fatal(err)
		}
		node := b.entry(t, workflow, b.told.NodeID(checkpoint.ID()))
		if fmt.Sprint(node.Parents()) != fmt.Sprint([]string{token.ID(), checkpoint.ID()}) {
			t.Errorf("%s", node.Payload())
		}
		b.close(t)
		if size := b.told.Log().Head().Size; size != 4 { // token, checkpoint, node, error
			t.Errorf("%d entries", size)
		}
	}
}

// The key of the heads belongs to the store: it is the same in every life, and another
// store's is another.
func TestHeadKey(t *testing.T) {
	b := newBench(t)
	key := b.told.HeadKey()
	b.close(t)
	b.open(t)
	if b.told.HeadKey() != key {
		t.Error("another key in the next life")
	}
	if other := newBench(t); other.told.HeadKey() == key {
		t.Error("two stores have one key")
	}
}

// An older copy of the whole store is betrayed by the head that was kept beside it, and
// so is a log that is not the one that it was.
func TestOlderCopies(t *testing.T) {
	file := filepath.Join(t.TempDir(), "identity.head")
	b := newBench(t)
	b.close(t)
	b.headFile = file
	b.open(t)
	old := copyOf(t, b.store)
	b.tell(t, call(""), evidence.Outcome{Verdict: guard.Completed, Status: 200})
	b.close(t) // keeps the head
	newer := b.store
	b.store = old
	if _, err := evidence.Open(t.Context(), evidence.Options{Store: old, Sealer: b.sealer, Node: "n1", Ring: b.ring, HeadFile: file}); !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("the older copy: %v", err)
	}
	b.store = newer
	b.open(t)
	b.close(t)
	if err := os.WriteFile(file, []byte("no head"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := evidence.Open(t.Context(), evidence.Options{Store: newer, Sealer: b.sealer, Node: "n1", Ring: b.ring, HeadFile: file}); err == nil {
		t.Error("what is no head was taken for one")
	}
}

func copyOf(t *testing.T, from store.Store) store.Store {
	t.Helper()
	to := memory.New(memory.Options{})
	for e, err := range from.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		if _, err := to.Commit(t.Context(), store.Write{Key: e.Key, Value: e.Value, Expires: e.Expires}); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// cascade 4.2.2: an agent's checkpoint is kept as long as it says itself.
func TestPromisesOfAgents(t *testing.T) {
	b := newBench(t)
	now := time.Now()
	long := b.token(t, ect.Claims{Action: "checkpoint", Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 90*24*3600)})
	endless := b.token(t, ect.Claims{Action: "checkpoint", Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Number(ect.MemberTTL, 1e300)})
	short := b.token(t, ect.Claims{})
	if err := b.told.Append(t.Context(), now, []*ect.Token{long, endless, short}); err != nil {
		t.Fatal(err)
	}
	for token, want := range map[*ect.Token]time.Duration{long: 90 * 24 * time.Hour, endless: 366 * 24 * time.Hour, short: time.Hour} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		entry, err := b.told.Log().Wait(ctx, "", token.ID())
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if kept := entry.KeepUntil.Sub(now); kept < want-time.Minute || kept > want+time.Hour {
			t.Errorf("%s is kept for %v, want %v", token.Action(), kept, want)
		}
	}
}

// P8: neither a token nor an id can be read in the store.
func TestP8NothingIsReadable(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	token := b.token(t, ect.Claims{Workflow: workflow, Action: "marker-action"})
	c := call(workflow, token.ID())
	c.Target = "POST marker-target"
	b.tell(t, c, evidence.Outcome{Verdict: guard.Completed, Status: 200}, token)
	b.link(t, call(workflow), "marker-id", uuid.NewString())
	if _, err := b.store.Commit(t.Context(), b.told.Bound(token, evidence.Use{1}, time.Time{})); err != nil {
		t.Fatal(err)
	}
	b.close(t)
	for e, err := range b.store.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		text := string(e.Key) + string(e.Value)
		for _, secret := range []string{"marker-", workflow, token.ID(), token.Raw(), "spiffe://example.com/agent"} {
			if strings.Contains(text, secret) {
				t.Errorf("%q can be read under %q", secret, e.Key)
			}
		}
	}
}

// A store holds a ledger from its first opening on, so that a lost key is not replaced.
func TestBegun(t *testing.T) {
	if begun, err := evidence.Begun(t.Context(), memory.New(memory.Options{})); err != nil || begun {
		t.Errorf("an empty store: %v %v", begun, err)
	}
	b := newBench(t)
	if begun, err := evidence.Begun(t.Context(), b.store); err != nil || !begun {
		t.Errorf("an open ledger: %v %v", begun, err)
	}
}
