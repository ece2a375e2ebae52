package evidence_test

import (
	"context"
	"encoding/base64"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// refusal is the code that a token was refused with.
func refusal(err error) ect.Code {
	var refused *ect.Error
	if errors.As(err, &refused) {
		return refused.Code
	}
	return ""
}

// ECT level L3: tokens that were entered can be proven, parents first, and are good for
// this use alone, in the next life too.
func TestEnteredTokens(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	parent := b.token(t, ect.Claims{Workflow: workflow})
	token := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{parent.ID()}})
	all, own := []*ect.Token{token, parent}, []*ect.Token{token}
	for range 2 {
		for range 2 {
			if err := b.evidence.RecordTokens(ctx, all, own, evidence.Use{1}); err != nil {
				t.Fatal(err)
			}
		}
		var places []int64
		for _, one := range all {
			entry, err := b.evidence.Log().Lookup(ctx, workflow, one.ID())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.evidence.Log().Receipt(ctx, entry.Index); err != nil {
				t.Error(err)
			}
			places = append(places, entry.Index)
		}
		if places[0] <= places[1] || b.evidence.Log().Head().Size != 2 {
			t.Errorf("child and parent stand at %v of %d", places, b.evidence.Log().Head().Size)
		}
		if got := refusal(b.evidence.RecordTokens(ctx, all, own, evidence.Use{2})); got != ect.CodeReplayed {
			t.Errorf("used for something else: %q", got)
		}
		altered := b.token(t, ect.Claims{Workflow: workflow, ID: token.ID(), Action: "else"})
		if got := refusal(b.evidence.RecordTokens(ctx, []*ect.Token{altered}, nil, evidence.Use{1})); got != ect.CodeReplayed {
			t.Errorf("another token of the id: %q", got)
		}
		b.close(t)
		b.open(t)
	}
	// A parent that came along was not used: it is good for a use of its own.
	if err := b.evidence.RecordTokens(ctx, []*ect.Token{parent}, []*ect.Token{parent}, evidence.Use{3}); err != nil {
		t.Error(err)
	}
	if got := refusal(b.evidence.RecordTokens(ctx, []*ect.Token{parent}, []*ect.Token{parent}, evidence.Use{4})); got != ect.CodeReplayed {
		t.Errorf("used for something else: %q", got)
	}
}

// Of many uses at once exactly one enters.
func TestOneUseEnters(t *testing.T) {
	b := newBench(t)
	token := []*ect.Token{b.token(t, ect.Claims{Workflow: uuid.NewString()})}
	var entered atomic.Int64
	var all sync.WaitGroup
	for n := range 20 {
		all.Go(func() {
			switch err := b.evidence.RecordTokens(t.Context(), token, token, evidence.Use{byte(n)}); {
			case err == nil:
				entered.Add(1)
			case refusal(err) != ect.CodeReplayed:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if entered.Load() != 1 {
		t.Errorf("%d uses entered", entered.Load())
	}
}

// P4: tokens that have entered and were used for nothing are free, over restarts too;
// then of many uses at once one is recorded, of all tokens or none.
func TestEnteredTokensAreSpentOnce(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	tokens := []*ect.Token{b.token(t, ect.Claims{Workflow: workflow}), b.token(t, ect.Claims{Workflow: workflow})}
	for range 2 {
		if err := b.evidence.RecordTokens(ctx, tokens, nil, evidence.Use{1}); err != nil {
			t.Fatal(err)
		}
		b.close(t)
		b.open(t)
	}
	for _, token := range tokens {
		if got, err := b.evidence.UseStatus(ctx, token, evidence.Use{2}); err != nil || got != evidence.Unused {
			t.Errorf("%v %v", got, err)
		}
	}
	var spent atomic.Int64
	var all sync.WaitGroup
	for n := range 20 {
		all.Go(func() {
			switch err := b.evidence.Spend(ctx, tokens, evidence.Use{byte(n)}); {
			case err == nil:
				spent.Add(1)
			case refusal(err) != ect.CodeReplayed:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if spent.Load() != 1 {
		t.Errorf("%d uses were recorded", spent.Load())
	}
	fresh := b.token(t, ect.Claims{Workflow: workflow})
	if got := refusal(b.evidence.Spend(ctx, append(tokens, fresh), evidence.Use{99})); got != ect.CodeReplayed {
		t.Errorf("%q", got)
	}
	if got, err := b.evidence.UseStatus(ctx, fresh, evidence.Use{99}); err != nil || got != evidence.Unused {
		t.Errorf("used beside another that was refused: %v %v", got, err)
	}
}

// What stands in the ledger is L3 where it carries a signature, in this life and the
// next; a token without one, and an event that could not be signed, are L1.
func TestLevelsOfRecordedTokens(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	workflow := uuid.NewString()
	v, err := ect.NewVerifier(ect.Policy{Audience: []string{identity}, MinLevel: ect.L1})
	if err != nil {
		t.Fatal(err)
	}
	raw := base64.RawURLEncoding.EncodeToString([]byte(b.token(t, ect.Claims{Workflow: workflow}).Payload()))
	unsigned, err := v.Verify(ctx, raw, ect.Presentation{Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	signed := b.token(t, ect.Claims{Workflow: workflow})
	draft, err := b.builder.Checkpoint(time.Now(), &evidence.Call{Workflow: workflow, Action: "pay"})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Append(ctx, time.Now(), []*ect.Token{unsigned, signed}, draft); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		b.evidence.AcceptUnsigned()
		for id, want := range map[string]ect.Level{
			unsigned.ID(): ect.L1, signed.ID(): ect.L3, draft.ID(): ect.L3,
		} {
			nodes, err := b.evidence.Graph(workflow).Nodes(ctx, id)
			if err != nil || len(nodes) != 1 || nodes[0].Level != want {
				t.Errorf("%+v %v, want %v", nodes, err, want)
			}
		}
		b.close(t)
		b.open(t) // which remembers nothing
	}
}

// However many ways lead to an ancestor, it is looked at once: 40 forks and joins have
// 2^40 of them.
func TestForksAndJoinsOfUnrecordedTokens(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	var before []string
	var last *ect.Token
	for range 40 {
		last = b.token(t, ect.Claims{Workflow: workflow, Parents: before})
		other := b.token(t, ect.Claims{Workflow: workflow, Parents: before})
		b.evidence.Seen([]*ect.Token{last, other})
		before = []string{last.ID(), other.ID()}
	}
	if found := b.evidence.Unrecorded([]*ect.Token{last}, 100); len(found) != 2*39 {
		t.Errorf("%d ancestors", len(found))
	}
}

// The nearest ancestors are recorded, each behind its own parents.
func TestNearestUnrecordedTokens(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	var chain []*ect.Token
	for n := range 6 {
		c := ect.Claims{Workflow: workflow}
		if n > 0 {
			c.Parents = []string{chain[n-1].ID()}
		}
		chain = append(chain, b.token(t, c))
	}
	b.evidence.Seen(chain)
	last := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{chain[5].ID()}})
	found := b.evidence.Unrecorded([]*ect.Token{last}, 4)
	if len(found) != 4 {
		t.Fatalf("%d found", len(found))
	}
	for n, token := range found {
		if token != chain[2+n] {
			t.Errorf("at %d stands %s", n, token.ID())
		}
	}
}

// A token that names no workflow is an ancestor in any, and stands before what follows
// from it. One of the workflow itself goes before it.
func TestAncestorsWithoutAWorkflow(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	first := b.token(t, ect.Claims{})
	second := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{first.ID()}})
	foreign := b.token(t, ect.Claims{Workflow: uuid.NewString(), ID: second.ID()})
	named := b.token(t, ect.Claims{ID: second.ID()})
	b.evidence.Seen([]*ect.Token{named, foreign, second, first})
	last := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{second.ID()}})
	if found := b.evidence.Unrecorded([]*ect.Token{last}, 9); len(found) != 2 || found[0] != first || found[1] != second {
		t.Errorf("%d ancestors", len(found))
	}
	for id, digest := range map[string][32]byte{first.ID(): first.Digest(), second.ID(): second.Digest()} {
		nodes, err := b.evidence.Graph(workflow).Nodes(t.Context(), id)
		if err != nil || len(nodes) != 1 || nodes[0].Digest != digest {
			t.Errorf("%+v %v", nodes, err)
		}
	}
}

// A token that is bound in a commit is bound for every process and every life, to its
// bytes and its use (P1).
func TestBoundTokens(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	token := b.token(t, ect.Claims{Workflow: uuid.NewString()})
	use, other := evidence.Use{1}, evidence.Use{2}
	if _, err := b.store.Commit(ctx, b.evidence.UseWrite(token, use, time.Time{})); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.Commit(ctx, b.evidence.UseWrite(token, other, time.Time{})); !errors.As(err, new(*store.Conflict)) {
		t.Errorf("bound a second time: %v", err)
	}
	b.close(t)
	b.open(t)
	altered := b.token(t, ect.Claims{Workflow: token.Workflow(), ID: token.ID(), Action: "else"})
	elsewhere := b.token(t, ect.Claims{Workflow: uuid.NewString(), ID: token.ID()})
	for _, c := range []struct {
		token *ect.Token
		use   evidence.Use
		want  evidence.TokenStatus
	}{{token, use, evidence.Same}, {token, other, evidence.Other}, {altered, use, evidence.Other}, {elsewhere, use, evidence.Unused}} {
		if got, err := b.evidence.UseStatus(ctx, c.token, c.use); err != nil || got != c.want {
			t.Errorf("%v %v, want %v", got, err, c.want)
		}
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
		if err := b.evidence.Append(ctx, time.Now(), []*ect.Token{token}); err != nil {
			t.Fatal(err)
		}
	}
	find := func() {
		t.Helper()
		child := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{parent.ID()}})
		for _, dag := range []ect.DAG{b.evidence.Graph(workflow), b.evidence.GraphOf(child)} {
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
	if nodes, err := b.evidence.Graph(workflow).Nodes(ctx, uuid.NewString()); err != nil || len(nodes) != 0 {
		t.Errorf("%+v %v", nodes, err)
	}
}

// link records that an execution has a checkpoint.
func (b *bench) link(t *testing.T, c *evidence.Call, execution, checkpoint string) {
	t.Helper()
	w, err := b.evidence.Link(t.Context(), c, execution, checkpoint, time.Now().Add(time.Hour))
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
		if got, err := b.evidence.Parent(ctx, workflow, execution); err != nil || got != want {
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
	nested.Caller = execution.CallerHash{9}
	b.link(t, nested, "order-7", uuid.NewString())
	parent("w", "order-7", later)
	// P3: two callers, one id: nobody is found by it any more.
	stranger := call("w")
	stranger.Caller = execution.CallerHash{8}
	for _, c := range []*evidence.Call{stranger, stranger, call("w")} {
		b.link(t, c, "order-7", uuid.NewString())
		parent("w", "order-7", "")
	}
}

// cascade 4.2.2: an agent's checkpoint is kept as long as it says itself.
func TestPromisesOfAgents(t *testing.T) {
	b := newBench(t)
	now := time.Now()
	long := b.token(t, ect.Claims{Action: "checkpoint", Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 90*24*3600)})
	endless := b.token(t, ect.Claims{Action: "checkpoint", Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Number(ect.MemberTTL, 1e300)})
	short := b.token(t, ect.Claims{})
	if err := b.evidence.Append(t.Context(), now, []*ect.Token{long, endless, short}); err != nil {
		t.Fatal(err)
	}
	for token, want := range map[*ect.Token]time.Duration{long: 90 * 24 * time.Hour, endless: 366 * 24 * time.Hour, short: time.Hour} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		entry, err := b.evidence.Log().Lookup(ctx, "", token.ID())
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if kept := entry.KeepUntil.Sub(now); kept < want-time.Minute || kept > want+time.Hour {
			t.Errorf("%s is kept for %v, want %v", token.Action(), kept, want)
		}
	}
}
