package cascades

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// members are the watches of two gateways on one store. The first one acts.
func members(t *testing.T) (a, b *rig, holder *memory.Member) {
	t.Helper()
	st, sealer := memory.New(memory.Options{}), seal.Generate()
	holder = st.Join("a")
	a = rigOn(t, holder, sealer)
	b = rigOn(t, st.Join("b"), sealer)
	for _, r := range []*rig{a, b} {
		r.settled()
	}
	return a, b, holder
}

// settled returns when the watch has done all that it was given until now.
func (r *rig) settled() { r.does(func(context.Context) []cascade.Change { return nil }) }

// chosen has the watch find out whether it acts, as it does each second.
func (r *rig) chosen() {
	r.does(func(ctx context.Context) []cascade.Change {
		r.choose(ctx)
		var all []cascade.Change
		for _, c := range r.pending {
			all = append(all, c)
		}
		return all
	})
}

func (r *rig) asked(n int) string {
	r.t.Helper()
	page, err := r.escalations.List(r.t.Context(), hitl.Filter{}, "", 10)
	if err != nil || len(page.Escalations) != n {
		r.t.Fatalf("%d escalations, not %d: %+v %v", len(page.Escalations), n, page.Escalations, err)
	}
	if n == 0 {
		return ""
	}
	return page.Escalations[0].ID
}

// What both nodes find is one cascade, with one alert and one question, which both show; and who acts when the
// first is gone goes on with it.
func TestFleetOneCascade(t *testing.T) {
	a, b, holder := members(t)
	workflow := uuid.NewString()
	b.finds(cascade.Opened, spreading("found by b", workflow, 4))
	b.asked(0)
	a.finds(cascade.Opened, spreading("found by a", workflow, 4))
	first := a.asked(1)
	for _, r := range []*rig{a, b} {
		r.settled()
		all := r.List()
		if len(all) != 1 || all[0].ID != "found by a" || len(all[0].Workflows[0].Alerts) != 1 || all[0].Workflows[0].Escalation != first {
			t.Fatalf("%+v", all)
		}
	}
	holder.Remove()
	b.chosen()
	if all := b.List(); len(all) != 1 || len(all[0].Workflows[0].Alerts) != 1 || b.asked(1) != first {
		t.Errorf("it is said again by who acts next: %+v", all)
	}
	b.finds(cascade.Grown, spreading("found by b", workflow, 8))
	if all := b.List(); len(all) != 1 || len(all[0].Workflows[0].Alerts) != 2 || b.asked(1) != first {
		t.Errorf("it has doubled since: %+v", all)
	}
}

// What the node that acts has found and could not record any more is recorded by the next one.
func TestFleetTakeover(t *testing.T) {
	a, b, holder := members(t)
	f := spreading("1", uuid.NewString(), 4)
	b.finds(cascade.Opened, f)
	holder.Remove()
	a.finds(cascade.Opened, f)
	b.chosen()
	if all := b.List(); len(all) != 1 || len(all[0].Workflows[0].Alerts) != 1 {
		t.Errorf("%+v", all)
	}
	b.asked(1)
}

// What only a node has found that does not act is recorded by that after a while, and what the other has recorded is
// not recorded again.
func TestFleetFoundByOne(t *testing.T) {
	a, b, _ := members(t)
	alone, both := spreading("alone", uuid.NewString(), 4), spreading("both", uuid.NewString(), 4)
	b.finds(cascade.Opened, alone)
	b.finds(cascade.Opened, both)
	overdue := func() {
		b.does(func(ctx context.Context) []cascade.Change { b.overdue(ctx); return nil })
	}
	overdue()
	b.asked(0)
	both.ID = "both, as a calls it"
	a.finds(cascade.Opened, both)
	b.settled()
	b.does(func(context.Context) []cascade.Change {
		for id := range b.peers.found {
			b.peers.found[id] = time.Now().Add(-grace)
		}
		return nil
	})
	overdue()
	a.settled()
	a.asked(2)
	for _, r := range []*rig{a, b} {
		if all := r.List(); len(all) != 2 || !slices.ContainsFunc(all, func(c api.Cascade) bool { return c.ID == "alone" }) {
			t.Errorf("%+v", all)
		}
	}
}

// A node that starts anew acts no more: the other one does.
func TestFleetWhoActs(t *testing.T) {
	a, b, holder := members(t)
	b.chosen()
	if !a.peers.acts || b.peers.acts {
		t.Fatalf("a acts: %v, b acts: %v", a.peers.acts, b.peers.acts)
	}
	holder.Remove()
	b.chosen()
	a.chosen()
	if a.peers.acts || !b.peers.acts {
		t.Errorf("without a: a acts: %v, b acts: %v", a.peers.acts, b.peers.acts)
	}
}

// What follows from a cascade is done by the breakers of every node.
func TestFleetObeys(t *testing.T) {
	a, b, _ := members(t)
	const shared = "spiffe://example.com/agent/shared"
	for _, r := range []*rig{a, b} {
		r.mu.Lock()
		r.look.Settings.Do = TripRoot
		r.mu.Unlock()
		r.does(func(context.Context) []cascade.Change { r.inspect(); return nil })
	}
	f := cascade.Finding{
		ID: "1", Pattern: cascade.Clustering, Class: cascade.Service, Downstream: shared, Breakers: []string{"a:1", "b a:1"}, OneProbe: true,
		Root: cascade.Root{Agent: shared}, Began: time.Now(), Last: time.Now(),
	}
	a.finds(cascade.Opened, f)
	b.settled()
	if !b.shared[shared] || !slices.Equal(a.tripped, []string{shared}) || !slices.Equal(b.tripped, []string{shared}) {
		t.Errorf("b probes as one: %v; tripped are %v and %v", b.shared, a.tripped, b.tripped)
	}
	f.Last = time.Now()
	a.finds(cascade.Grown, f)
	b.settled()
	if len(b.tripped) != 1 {
		t.Errorf("b has tripped %v", b.tripped)
	}
	f.Closed = time.Now()
	a.finds(cascade.Closed, f)
	b.settled()
	if is, there := b.shared[shared]; is || !there {
		t.Error("b still probes as one")
	}
	if _, err := a.store.Commit(t.Context(), store.Write{Key: a.kept.key(f.ID), Delete: true}); err != nil {
		t.Fatal(err)
	}
	b.settled()
	if all := b.List(); len(all) != 0 {
		t.Errorf("b still shows what a has dropped: %+v", all)
	}
}

// C-3.4.2-b: breakers that open on one downstream at several nodes are a cluster, and are none any more when they
// close or their nodes are gone.
func TestFleetClusters(t *testing.T) {
	a, _, _ := members(t)
	a.anonymous.Store(true)
	open := func(node string, state breaker.State) {
		a.CircuitAt(node, breaker.Snapshot{Upstream: "a:1", State: state, Reason: breaker.ErrorRate})
	}
	a.Circuit(breaker.Event{Key: breaker.Key{Upstream: "a:1"}, To: breaker.Open, Reason: breaker.ErrorRate}, "", "")
	open("b", breaker.Open)
	open("b", breaker.Closed)
	open("c", breaker.Open)
	a.settled()
	if all := a.List(); len(all) != 0 {
		t.Fatalf("two are open: %+v", all)
	}
	open("d", breaker.Open)
	a.settled()
	all := a.List()
	if len(all) != 1 || all[0].Pattern != string(cascade.Clustering) || !all[0].OneProbe || !slices.Equal(all[0].Breakers, []string{"a:1", "c a:1", "d a:1"}) {
		t.Fatalf("%+v", all)
	}
	a.asked(1)
}

// What fails is judged against the good answers of all nodes: each says how many it has had, and counts what others
// say since it knows of them.
func TestFleetAnswers(t *testing.T) {
	a, b, _ := members(t)
	topology := Topology{Pools: map[string][]string{"d": {"a:1"}}, Guards: map[string][]string{"a:1": {"d"}}}
	answered := func(r *rig, n uint64) {
		r.mu.Lock()
		r.look.Topology, r.look.Answered = topology, map[string]uint64{"a:1": n}
		r.mu.Unlock()
		r.does(func(ctx context.Context) []cascade.Change {
			r.inspect()
			r.publish(ctx, map[string]int{"invoices": int(n)})
			return nil
		})
	}
	answered(b, 0)
	answered(a, 1000) // said for the first time: it may be of long ago
	b.settled()
	if n := b.peers.answers["a"].Upstreams["a:1"]; n != 1000 {
		t.Fatalf("b knows of %d answers at a", n)
	}
	answered(a, 1500)
	b.settled()
	if got := b.peers.answers["a"]; got.Upstreams["a:1"] != 1500 || got.Targets["invoices"] != 2500 {
		t.Fatalf("b knows of %+v at a", got)
	}
}

// begins records that a call of a chain has begun at this node.
func (r *rig) begins(workflow, to string, parents ...string) (c *evidence.Call, checkpoint string) {
	r.t.Helper()
	c = &evidence.Call{
		Key: execution.Key{1}, Caller: execution.CallerHash{2}, Action: "ask", Workflow: workflow, Parents: parents, Target: to, Guard: to,
		Audience: []string{"spiffe://example.com/agent/" + to}, RollbackURI: "https://g.example/rollback", TTL: time.Hour,
	}
	d, err := r.recorder.EventBuilder.Checkpoint(time.Now(), c)
	if err != nil {
		r.t.Fatal(err)
	}
	r.records(d)
	return c, d.ID()
}

// records waits until what it records has its place in the log: a call that follows comes after it.
func (r *rig) records(drafts ...*ect.Draft) {
	r.t.Helper()
	err := r.recorder.Evidence.Append(r.t.Context(), time.Now().Add(time.Hour), nil, drafts...)
	for _, d := range drafts {
		if err == nil {
			_, err = r.recorder.Evidence.Log().Lookup(r.t.Context(), d.Workflow(), d.ID())
		}
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// fails records that the call has failed.
func (r *rig) fails(c *evidence.Call, checkpoint string) {
	r.t.Helper()
	drafts, err := r.recorder.EventBuilder.Outcome(time.Now(), c, &evidence.Outcome{
		Checkpoint: checkpoint, Verdict: execution.Completed, Cause: execution.CauseStatus, Status: 500,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.records(drafts...)
}

// chain records a chain of calls that fails from its end, each at the node that at names, and returns its workflow
// and who has failed first.
func chain(nodes map[rune]*rig, at string) (workflow, root string) {
	workflow = uuid.NewString()
	var failures []func()
	var parents []string
	for i, node := range at {
		r := nodes[node]
		root = fmt.Sprint(workflow[:8], "-", i)
		c, checkpoint := r.begins(workflow, root, parents...)
		parents = []string{checkpoint}
		failures = append(failures, func() { r.fails(c, checkpoint) })
	}
	for _, fail := range slices.Backward(failures) {
		fail()
	}
	return workflow, "spiffe://example.com/agent/" + root
}

// knows waits until a node shows that so many agents at least have failed in a workflow, and returns all that it shows of it.
func (r *rig) knows(workflow string, failed int) (found []api.Cascade) {
	r.t.Helper()
	for end := time.Now().Add(time.Minute); ; <-time.After(time.Millisecond) {
		found = slices.DeleteFunc(r.List(), func(c api.Cascade) bool {
			return !slices.ContainsFunc(c.Workflows, func(p api.CascadePart) bool { return p.Workflow == workflow })
		})
		if len(found) > 0 && found[0].Failed >= failed {
			return found
		}
		if time.Now().After(end) {
			r.t.Fatalf("%d agents have failed: %+v", failed, found)
		}
	}
}

// C-3.4.2-c, ADR 0138: a chain of calls that goes over several nodes, and back, is one cascade with its root at the end
// of the chain, at all of them; it is recorded once, and people are asked once.
func TestFleetChain(t *testing.T) {
	a, b, _ := members(t)
	nodes := map[rune]*rig{'a': a, 'b': b}
	for i, at := range []string{"aba", "bab", "abab", "baba", "aab", "bbab", "ababa", "babab"} {
		workflow, root := chain(nodes, at)
		found := a.knows(workflow, 3)
		c := found[0]
		if len(found) != 1 || c.Pattern != string(cascade.DepthFirst) || c.Root.Agent != root || len(c.Workflows) != 1 || len(c.Workflows[0].Alerts) != 1 {
			t.Errorf("%s: %+v %+v", at, found, c.Root)
		}
		there := b.knows(workflow, 3)
		if len(there) != 1 || there[0].ID != c.ID || there[0].Root.Agent != root || !slices.Equal(there[0].Workflows[0].Alerts, c.Workflows[0].Alerts) {
			t.Errorf("%s, at the other node: %+v", at, there)
		}
		a.asked(i + 1)
		log := b.recorder.Evidence.Log()
		if _, err := log.Lookup(t.Context(), workflow, c.Workflows[0].Alerts[0]); err != nil {
			t.Fatal(err)
		}
		page, err := log.List(t.Context(), workflow, "", ledger.MaxPage)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(slices.DeleteFunc(page.Entries, func(e ledger.Entry) bool { return e.Action != string(ect.EventCascadeDetected) })); n != 1 {
			t.Errorf("%s: %d alerts are in the ledger", at, n)
		}
	}
}

// Two halves of a chain whose middle is heard last are not two cascades with two questions: all are looked at in the
// order of their time.
func TestFleetChainIsNoTwo(t *testing.T) {
	a, b, _ := members(t)
	for _, r := range []*rig{a, b} {
		r.watching.Store(nil)
	}
	workflow, root := chain(map[rune]*rig{'a': a, 'b': b}, "aaabbbaaa")
	log := a.recorder.Evidence.Log()
	page, err := log.List(t.Context(), workflow, "", ledger.MaxPage)
	if err != nil {
		t.Fatal(err)
	}
	errors := slices.DeleteFunc(page.Entries, func(e ledger.Entry) bool { return e.Action != string(ect.EventError) })
	slices.SortStableFunc(errors, func(x, y ledger.Entry) int { return strings.Compare(x.Log, y.Log) })
	if len(errors) != 9 || errors[5].Log != log.Origin() || errors[6].Log == log.Origin() {
		t.Fatalf("%+v", errors)
	}
	busy, free := make(chan struct{}), make(chan struct{})
	a.later(func(context.Context) []cascade.Change { close(busy); <-free; return nil })
	<-busy
	for i := range errors {
		a.Placed(errors[i].Log, &errors[i].Event, errors[i].Recorded)
	}
	close(free)
	if found := a.knows(workflow, 6); len(found) != 1 || found[0].Into != "" || found[0].Root.Agent != root {
		t.Errorf("%+v", found)
	}
	a.asked(1)
}
