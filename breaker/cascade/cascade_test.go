package cascade_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// bench is a detector with a clock.
type bench struct {
	*testing.T
	*cascade.Detector
	now     time.Time
	changes []cascade.Change
}

func newBench(t *testing.T) *bench { return benchOf(t, cascade.SettingsOf(0, 0, 0)) }

func benchOf(t *testing.T, s cascade.Settings) *bench {
	return &bench{T: t, Detector: cascade.New(s), now: start}
}

// Findings are the open ones, and those that have been closed.
func (b *bench) Findings() []cascade.Finding {
	all := b.Detector.Findings()
	for _, c := range b.changes {
		if c.Kind == cascade.Closed {
			all = append(all, c.Finding)
		}
	}
	return all
}

func (b *bench) after(d time.Duration) *bench {
	b.now = b.now.Add(d)
	return b
}

func (b *bench) task(wf, id, agent string, parents ...string) {
	b.note(b.Node(b.now, cascade.Node{ID: id, Workflow: wf, Agent: agent, Parents: parents}))
}

// call is a call by an agent to another one, whose pool has the name of the agent.
func (b *bench) call(wf, id, agent, to string, parents ...string) {
	b.note(b.Node(b.now, cascade.Node{
		ID: id, Workflow: wf, Agent: agent, Parents: parents, Upstream: cascade.Upstream{Pool: "pool-" + to, Agent: to},
	}))
}

func (b *bench) fails(wf, id string, kind cascade.Kind) {
	b.note(b.Fail(b.now, cascade.Failure{Workflow: wf, Node: id, Error: "error-" + id, Kind: kind, Address: "1"}))
}

func (b *bench) says(wf, id, agent string, causes ...string) {
	b.note(b.Fail(b.now, cascade.Failure{Workflow: wf, Node: id, Error: "error-" + id, By: agent, Causes: causes}))
}

func (b *bench) opens(downstream, holder, by, wf string) {
	b.note(b.Breaker(b.now, cascade.Breaker{Downstream: downstream, Holder: holder, By: by, Workflow: wf, Event: "open-" + holder + by, Open: true}))
}

func (b *bench) note(c []cascade.Change) { b.changes = append(b.changes, c...) }

// one is the only finding.
func (b *bench) one() cascade.Finding {
	b.Helper()
	all := b.Findings()
	if len(all) != 1 {
		b.Fatalf("%d findings: %+v", len(all), all)
	}
	return all[0]
}

func (b *bench) none(why string) {
	b.Helper()
	if all := b.Findings(); len(all) != 0 {
		b.Fatalf("%s: %+v", why, all)
	}
}

// chain is the case of cascade, Figure 1: a calls b, b calls c, c calls d.
func (b *bench) chain(wf string) {
	b.task(wf, "a", "a")
	for i, to := range []string{"b", "c", "d"} {
		by := string(rune('a' + i))
		b.call(wf, by+to, by, to, by)
		b.task(wf, to, to, by+to)
	}
}

// cascade 3.4.2, Figure 1: d fails, and with it c, and with that b.
func TestDepthFirst(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.after(time.Second).fails("w", "cd", cascade.Failed)
	b.after(time.Millisecond).fails("w", "bc", cascade.Failed)
	b.none("two agents are no cascade")
	b.after(time.Millisecond).fails("w", "ab", cascade.Failed)
	f := b.one()
	if f.Pattern != cascade.DepthFirst || f.Class != cascade.Agent && f.Class != cascade.Service || f.Root.Node != "cd" || f.Root.Error != "error-cd" || f.Root.Agent != "d" || f.Root.Pool != "pool-d" {
		t.Errorf("%+v", f)
	}
	p := f.Parts[0]
	if !slices.Equal(p.Failed, []string{"b", "c", "d"}) || !slices.Equal(p.BlastRadius, []string{"a", "b", "c", "d"}) || f.Failed != 3 || f.Affected != 4 ||
		!slices.Equal(p.Errors, []string{"error-cd", "error-bc", "error-ab"}) {
		t.Errorf("%+v", f)
	}
	if len(b.changes) != 1 || b.changes[0].Kind != cascade.Opened {
		t.Errorf("%+v", b.changes)
	}
}

// What follows from the root later is in the blast radius, too (cascade 2).
func TestBlastRadiusFollows(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	for _, id := range []string{"cd", "bc", "ab"} {
		b.after(time.Millisecond).fails("w", id, cascade.Failed)
	}
	b.task("w", "late", "e", "cd")
	b.task("w", "later", "f", "late")
	b.task("w", "apart", "g", "a")
	if f, _ := b.Finding(b.one().ID); !slices.Equal(f.Parts[0].BlastRadius, []string{"a", "b", "c", "d", "e", "f"}) {
		t.Errorf("%+v", f)
	}
}

// A callee that hangs makes its callers time out, the first of them first (cascade 3.1.2): the root is what
// they wait for.
func TestWhatHangsIsTheRoot(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.after(5*time.Second).fails("w", "ab", cascade.Timeout)
	b.after(time.Second).fails("w", "bc", cascade.Timeout)
	b.after(time.Second).fails("w", "cd", cascade.Timeout)
	if f := b.one(); f.Root.Agent != "d" {
		t.Errorf("%+v", f)
	}
}

// atd.upstream_errors leads from symptom to root (ATD, "Error Signaling"), also where the times and the DAG
// do not, and where the root is reported last.
func TestErrorsNameTheRoot(t *testing.T) {
	b := newBench(t)
	for i, by := range []string{"a", "b", "c", "d"} {
		b.task("w", by, by)
		b.call("w", by+"x", by, fmt.Sprint("x", i), by)
	}
	failed := func(node, err string, causes ...string) {
		b.note(b.Fail(b.now, cascade.Failure{Workflow: "w", Node: node, Error: err, Causes: causes}))
	}
	b.after(time.Second)
	failed("ax", "ea", "eb")
	b.after(time.Hour)
	failed("bx", "eb", "ec")
	b.none("the third has not failed")
	b.after(time.Second)
	failed("cx", "ec", "ed")
	if f := b.one(); f.Root.Error != "ec" || !slices.Contains(f.Root.Reasons, cascade.NamedByError) {
		t.Errorf("%+v", f)
	}
	b.after(time.Second)
	failed("dx", "ed")
	if f := b.changes[len(b.changes)-1]; f.Kind != cascade.Rerooted || f.Finding.Root.Error != "ed" {
		t.Errorf("%+v", f)
	}
}

// cascade 3.4.2: siblings that fail at once have shared infrastructure in common.
func TestBreadthFirst(t *testing.T) {
	b := newBench(t)
	b.task("w", "a", "a")
	for i := range 5 {
		b.call("w", fmt.Sprint("s", i), "a", fmt.Sprint("x", i), "a")
	}
	for i := range 3 {
		b.after(50*time.Millisecond).fails("w", fmt.Sprint("s", i), cascade.Unreachable)
	}
	if f := b.one(); f.Pattern != cascade.BreadthFirst || f.Class != cascade.Infrastructure || f.Failed != 3 {
		t.Errorf("%+v", f)
	}

	b = newBench(t)
	b.call("w", "za", "z", "a")
	b.note(b.Succeed(b.now, "w", "za"))
	for i := range 3 { // a goes on when it has answered
		b.call("w", fmt.Sprint("s", i), "a", fmt.Sprint("x", i), "za")
		b.after(50*time.Millisecond).fails("w", fmt.Sprint("s", i), cascade.Failed)
	}
	if f := b.one(); f.Pattern != cascade.BreadthFirst || f.Failed != 3 {
		t.Errorf("%+v", f)
	}
}

// Failures that are far apart, few among many, or on another branch, are no cascade.
func TestIndependentFailures(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.fails("w", "cd", cascade.Failed)
	b.after(time.Hour).fails("w", "bc", cascade.Failed)
	b.after(time.Hour).fails("w", "ab", cascade.Failed)
	b.none("hours apart")

	b = newBench(t)
	b.chain("w")
	b.fails("w", "ab", cascade.Timeout)
	b.after(time.Hour).fails("w", "bc", cascade.Timeout)
	b.after(time.Hour).fails("w", "cd", cascade.Timeout)
	b.none("hours apart, the callers first")

	for _, n := range []int{60, 200} {
		b = newBench(t)
		b.task("w", "a", "a")
		for i := range n {
			b.call("w", fmt.Sprint("s", i), "a", fmt.Sprint("x", i), "a")
		}
		for i := range 4 {
			b.after(2*time.Second).fails("w", fmt.Sprint("s", i*n/4), cascade.Failed)
		}
		b.none(fmt.Sprint("4 siblings of ", n))
	}

	b = newBench(t)
	b.chain("w")
	b.fails("w", "cd", cascade.Failed)
	b.note(b.Succeed(b.now, "w", "bc"))
	b.after(time.Second).fails("w", "ab", cascade.Failed)
	b.none("c did without d")
}

// A retry that succeeds ends what the failure can have caused.
func TestRetriedFailures(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.fails("w", "cd", cascade.Failed)
	b.call("w", "cd2", "c", "d", "c")
	b.note(b.Succeed(b.now, "w", "cd2"))
	b.after(time.Second).fails("w", "bc", cascade.Failed)
	b.after(time.Second).fails("w", "ab", cascade.Failed)
	b.none("d had answered")
}

// ATD, "Coordinated Circuit Breaking": three breakers on one downstream within a minute are one finding, which
// asks for one probe.
func TestClustering(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.opens("d", "node-1", "", "")
	b.after(20*time.Second).opens("d", "", "a", "w")
	b.none("two of three")
	b.after(20*time.Second).opens("d", "", "b", "w")
	b.none("b has never called d")
	b.opens("d", "", "c", "w")
	b.none("a has not either")
	b.opens("d", "node-2", "", "")
	f := b.one()
	if f.Pattern != cascade.Clustering || !f.OneProbe || f.Downstream != "d" || len(f.Breakers) != 3 || f.Root.Agent != "d" || f.Root.Error != "open-node-1" {
		t.Errorf("%+v", f)
	}
	b.after(30*time.Second).opens("d", "node-3", "", "")
	if len(b.changes) != 1 {
		t.Errorf("alerted again: %+v", b.changes)
	}

	b = newBench(t)
	for i := range 9 {
		b.after(31*time.Second).opens("d", fmt.Sprint(i), "", "")
	}
	b.none("never three in a minute")
}

// C-3.4.2-b, Figure 6: a cluster names the agents whose breakers have opened, the downstream that has failed, and the
// openings in the order of their own times, of which the first is the root; also where they are heard later.
func TestClusterNamesAgents(t *testing.T) {
	for _, later := range []time.Duration{0, 10 * time.Second} {
		b := newBench(t)
		for _, name := range []string{"a", "b", "c"} {
			b.task("w", name, name)
		}
		b.task("v", "v", "a")
		b.note(b.Advance(b.now.Add(later)))
		b.opens("d", "", "a", "v") // which is another workflow's, and not shown to this one (P3)
		for _, name := range []string{"c", "a", "b"} {
			b.opens("d", "", name, "w")
		}
		f := b.one()
		if f.Pattern != cascade.Clustering || f.Root.Error != "open-c" || f.Root.Workflow != "w" || f.Failed != 1 || f.Affected != 4 || len(f.Parts) != 1 || !f.Began.Equal(b.now) {
			t.Fatalf("%+v", f)
		}
		p := f.Parts[0]
		if p.Workflow != "w" || !slices.Equal(p.Errors, []string{"open-c", "open-a", "open-b"}) || !slices.Equal(p.Failed, []string{"d"}) ||
			!slices.Equal(p.BlastRadius, []string{"a", "b", "c", "d"}) {
			t.Errorf("%+v", p)
		}
	}
	// Breakers of gateways that calls of several workflows have opened: each has its own part.
	b := newBench(t)
	for _, wf := range []string{"v", "w", "w"} {
		b.after(time.Second).opens("d", fmt.Sprint("node-", b.now.Unix()), "", wf)
	}
	if f := b.one(); len(f.Parts) != 2 || f.Root.Workflow != "v" || len(f.Parts[0].Errors) != 1 || len(f.Parts[1].Errors) != 2 || f.Parts[0].Errors[0] != f.Root.Error {
		t.Errorf("%+v", f)
	}
}

// A cascade and the breakers that it opens are one finding.
func TestClusterJoinsItsCascade(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	for _, id := range []string{"cd", "bc", "ab"} {
		b.after(time.Millisecond).fails("w", id, cascade.Failed)
	}
	for i := range 3 {
		b.opens("d", fmt.Sprint(i), "", "w")
	}
	if f := b.one(); !f.OneProbe || f.Pattern != cascade.DepthFirst || len(b.changes) != 2 || b.changes[1].Kind != cascade.Grown {
		t.Errorf("%+v %+v", f, b.changes)
	}
}

// P3: what is said of workflows in which somebody has no part opens nothing, and neither do many words of one
// agent.
func TestStrangersAndLiars(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.task("v", "v", "stranger")
	for _, id := range []string{"a", "b", "c", "d", "ab", "bc", "cd"} {
		b.says("w", id, "stranger")
	}
	for i := range 9 {
		b.opens("d", "", "stranger", "w")
		b.opens("d", "", fmt.Sprint("nobody-", i), "w")
	}
	// One who belongs to the workflow.
	for i := range 100 {
		id := fmt.Sprint("lie", i)
		b.task("w", id, "liar", "a", "b", "c", "d")
		b.says("w", id, "liar", "error-cd")
		b.says("w", "d", "liar")
		b.opens("d", "", "liar", "w")
	}
	b.none("lies")
	// Two that fail, and the liar, are not three.
	b.after(time.Second).fails("w", "cd", cascade.Failed)
	b.after(time.Millisecond).fails("w", "bc", cascade.Failed)
	b.task("w", "lie", "liar", "cd")
	b.says("w", "lie", "liar", "error-bc", "error-cd")
	b.none("the liar is no third")
	// And the cascade is found all the same, with its root.
	b.after(time.Millisecond).fails("w", "ab", cascade.Failed)
	if f := b.one(); f.Root.Node != "cd" || slices.Contains(f.Parts[0].Failed, "liar") {
		t.Errorf("%+v", f)
	}
}

// Reports of one agent among siblings neither make a coincidence a finding, nor hide what is none.
func TestFloodAmongSiblings(t *testing.T) {
	flood := func(b *bench, siblings, failures int) {
		b.task("w", "a", "a")
		b.call("w", "ax", "a", "x", "a")
		for i := range siblings {
			b.call("w", fmt.Sprint("s", i), "a", fmt.Sprint("x", i), "a")
		}
		for i := range failures {
			for j := range 100 {
				id := fmt.Sprint("lie", i, "-", j)
				b.task("w", id, "x", "ax", "a")
				b.says("w", id, "x")
			}
			b.after(time.Second).fails("w", fmt.Sprint("s", i), cascade.Failed)
		}
	}
	b := newBench(t)
	flood(b, 200, 2)
	b.none("2 of 200")
	b = newBench(t)
	flood(b, 6, 4)
	if f := b.one(); !slices.Contains(f.Parts[0].Failed, "x3") {
		t.Errorf("%+v", f)
	}
}

// P3: what agents report of calls to one service links no two workflows, and neither can anybody add to the
// nodes of somebody else.
func TestReportsStayInTheirWorkflow(t *testing.T) {
	b := benchOf(t, cascade.SettingsOf(0, 2, 0))
	for i := range 9 {
		w := fmt.Sprint("w", i)
		b.call(w, "za", "z", fmt.Sprint("a", i))
		b.call(w, "ad", fmt.Sprint("a", i), "d", "za")
		b.says(w, "ad", fmt.Sprint("a", i))
		b.opens("d", "", fmt.Sprint("a", i), w)
	}
	b.none("one report in each")

	b = newBench(t)
	b.chain("w")
	b.task("w", "x", "x")
	b.task("w", "x", "liar", "cd") // the id of somebody else's
	b.fails("w", "cd", cascade.Failed)
	b.after(time.Millisecond).fails("w", "bc", cascade.Failed)
	b.after(time.Millisecond).fails("w", "x", cascade.Failed)
	b.none("x has nothing to do with it")

	// What agents of a workflow report of a service is not the cascade that the gateway sees in another one.
	b = newBench(t)
	b.chain("w")
	for _, name := range []string{"a", "b", "c"} {
		b.call("v", name, name, "d")
		b.opens("d", "", name, "v")
	}
	for _, id := range []string{"cd", "bc", "ab"} {
		b.after(time.Millisecond).fails("w", id, cascade.Failed)
	}
	if all := b.Findings(); len(all) != 2 || len(all[0].Parts) != 1 || len(all[1].Parts) != 1 {
		t.Errorf("%+v", all)
	}
}

// What an agent reports of its part of a call that the gateway saw end well counts for nothing.
func TestTheGatewayKnowsBetter(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.says("w", "d", "d")
	b.says("w", "c", "c", "error-d")
	b.note(b.Succeed(b.now, "w", "cd"))
	b.says("w", "b", "b", "error-c")
	b.none("d has answered well")

	b = newBench(t)
	b.chain("w")
	b.note(b.Succeed(b.now, "w", "cd"))
	b.says("w", "d", "d")
	b.says("w", "c", "c", "error-d")
	b.says("w", "b", "b", "error-c")
	b.none("d had answered well")
}

// Pools that cannot be reached at the same time have lost what they share, also where they are called in
// different workflows.
func TestLostTogether(t *testing.T) {
	b := newBench(t)
	b.chain("v")
	b.fails("v", "cd", cascade.Unreachable)
	b.after(time.Millisecond).fails("v", "bc", cascade.Failed)
	b.call("w", "ax", "a", "x")
	b.after(15*time.Second).fails("w", "ax", cascade.Unreachable)
	if f := b.one(); f.Class != cascade.Infrastructure || f.Pattern != cascade.BreadthFirst || len(f.Parts) != 2 {
		t.Errorf("%+v", f)
	}
}

// Agents that report only themselves are a cascade if they name each other.
func TestReportsAlone(t *testing.T) {
	b := newBench(t)
	b.task("w", "a", "a")
	b.task("w", "b", "b", "a")
	b.task("w", "c", "c", "b")
	b.after(time.Second).says("w", "c", "c")
	b.after(time.Second).says("w", "b", "b", "error-c")
	b.after(time.Second).says("w", "a", "a", "error-b")
	if f := b.one(); f.Root.Agent != "c" || f.Root.Pool != "" {
		t.Errorf("%+v", f)
	}
}

// One service that fails in several workflows is one finding, with a part for each of them (cascade 3.3.2).
func TestSeveralWorkflows(t *testing.T) {
	b := newBench(t)
	b.Pool("pool-d", []string{"1"})
	for i := range 4 {
		w := fmt.Sprint("w", i)
		b.chain(w)
		for _, id := range []string{"cd", "bc", "ab"} {
			b.after(time.Millisecond).fails(w, id, cascade.Failed)
		}
	}
	f := b.one()
	if len(f.Parts) != 4 || f.Class != cascade.Service || !slices.Contains(f.Root.Reasons, cascade.AllAddresses) {
		t.Errorf("%+v", f)
	}
	for i, p := range f.Parts {
		if p.Workflow != fmt.Sprint("w", i) || len(p.Failed) != 3 {
			t.Errorf("%+v", p)
		}
	}
	var kinds []cascade.ChangeKind
	for _, c := range b.changes {
		kinds = append(kinds, c.Kind)
	}
	if !slices.Equal(kinds, []cascade.ChangeKind{cascade.Opened, cascade.Grown, cascade.Grown}) {
		t.Errorf("once, and again when it has doubled: %v", kinds)
	}
}

// A second workflow that meets the same service later joins the finding that is open.
func TestTheSameServiceAgain(t *testing.T) {
	b := newBench(t)
	for i := range 2 {
		w := fmt.Sprint("w", i)
		b.after(40 * time.Second)
		b.chain(w)
		for _, id := range []string{"cd", "bc", "ab"} {
			b.fails(w, id, cascade.Failed)
		}
	}
	if f := b.one(); len(f.Parts) != 2 {
		t.Errorf("%+v", f)
	}
}

// Callees that are given up have not failed: their caller has.
func TestGivenUp(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	b.after(time.Second).fails("w", "cd", cascade.Canceled)
	b.fails("w", "bc", cascade.Canceled)
	b.fails("w", "ab", cascade.Timeout)
	b.none("only b has failed")

	b = newBench(t)
	b.chain("w")
	b.after(time.Second).fails("w", "ab", cascade.Timeout)
	b.fails("w", "bc", cascade.Canceled)
	b.fails("w", "cd", cascade.Canceled)
	b.none("only b has failed, and the others later")
}

// Signals are reasons for a root and for its class (cascade 3.4.1).
func TestSignals(t *testing.T) {
	b := newBench(t)
	b.Pool("pool-d", []string{"1", "2"})
	b.chain("w")
	b.Slow("pool-d", "1", true)
	b.Exhausted(cascade.Resource{Name: "memory"}, true)
	b.fails("w", "cd", cascade.Exhausted)
	for _, id := range []string{"bc", "ab"} {
		b.after(time.Millisecond).fails("w", id, cascade.Failed)
	}
	if f := b.one(); f.Class != cascade.Infrastructure || !slices.Contains(f.Root.Reasons, cascade.IsSlow) || !slices.Contains(f.Root.Reasons, cascade.IsExhausted) {
		t.Errorf("%+v", f)
	}
}

// A finding ends when nothing has been added to it for five minutes. What comes then is another one.
func TestClosing(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	for _, id := range []string{"cd", "bc", "ab"} {
		b.fails("w", id, cascade.Failed)
	}
	b.after(cascade.Quiet - time.Second)
	b.note(b.Advance(b.now))
	if f := b.one(); !f.Closed.IsZero() {
		t.Error("too early")
	}
	b.after(time.Second)
	b.note(b.Advance(b.now))
	first := b.one()
	if first.Closed != b.now || b.changes[len(b.changes)-1].Kind != cascade.Closed {
		t.Errorf("%+v", b.changes)
	}
	for _, id := range []string{"cd", "bc", "ab"} {
		b.after(time.Millisecond).fails("w", id, cascade.Failed)
	}
	if all := b.Findings(); len(all) != 2 || all[0].ID == first.ID {
		t.Errorf("%+v", all)
	}
}

// A retry that was made elsewhere, and is known before what it replaces, shows that that has caused nothing; so does the
// good end of a call that is known before its failure.
func TestKnownBeforeItIsRetried(t *testing.T) {
	b := newBench(t)
	b.chain("retried")
	b.chain("well")
	b.call("retried", "again", "c", "d", "c")
	later := b.now.Add(time.Second)
	b.note(b.Succeed(later, "retried", "again"))
	b.note(b.Succeed(later, "well", "bc"))
	for _, wf := range []string{"retried", "well"} {
		for _, id := range []string{"cd", "bc", "ab"} {
			b.fails(wf, id, cascade.Failed)
		}
	}
	b.none("one of the three has not failed in the end")
	b.after(2*time.Second).fails("retried", "cd", cascade.Failed)
	if f := b.one(); f.Failed != 3 {
		t.Errorf("it has failed since then: %+v", f)
	}
}

// What timed out has waited for a call that is known later, and from whose answer nothing is known.
func TestWaitedForWhatComesLate(t *testing.T) {
	b := newBench(t)
	ended := b.now.Add(5 * time.Second)
	for i, id := range []string{"ab", "bc"} {
		b.call("w", id, string(id[0]), string(id[1]), []string{"", "ab"}[i])
		b.note(b.Fail(ended.Add(time.Duration(i)), cascade.Failure{Workflow: "w", Node: id, Kind: cascade.Timeout, Address: "1"}))
	}
	b.none("two agents")
	b.call("w", "cd", "c", "d", "bc")
	b.note(b.Fail(ended.Add(2*time.Second), cascade.Failure{Workflow: "w", Node: "cd", Kind: cascade.Timeout, Address: "1"}))
	if f := b.one(); f.Root.Agent != "d" {
		t.Errorf("%+v", f)
	}
}

// A caller's failure that is heard first has the cause that it would have had: the last failure below it, and not all.
func TestTheLastBelowIsTheCause(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {3, 2, 0, 1}} {
		b := newBench(t)
		b.call("w", "a", "user", "a")
		for i := range 200 {
			b.call("w", fmt.Sprint(i), "a", fmt.Sprint("x", i), "a")
		}
		for _, i := range order {
			b.now = start.Add(time.Duration(i) * 4 * time.Second)
			if i == 3 {
				b.now = b.now.Add(-3 * time.Second)
			}
			b.fails("w", []string{"0", "50", "100", "a"}[i], cascade.Failed)
		}
		b.none(fmt.Sprint("a has failed because of one of them: ", order))
	}
}

// What is heard again when its cascade has ended is no other one.
func TestHeardAgainWhenItHasEnded(t *testing.T) {
	b := newBench(t)
	b.chain("w")
	for range 2 {
		for _, id := range []string{"cd", "bc", "ab"} {
			b.fails("w", id, cascade.Failed)
		}
		b.note(b.Advance(b.now.Add(time.Hour)))
	}
	if f := b.one(); f.Closed.IsZero() {
		t.Errorf("%+v", f)
	}
}

// The same events lead to the same findings.
func TestDeterministic(t *testing.T) {
	for _, seed := range []uint64{15, 45, 55, 98} {
		a, b := replay(t, trace(seed)), replay(t, trace(seed))
		x, _ := json.Marshal(alertsOf(a))
		y, _ := json.Marshal(alertsOf(b))
		if string(x) != string(y) {
			t.Errorf("seed %d: %s\n%s", seed, x, y)
		}
	}
}

func alertsOf(all []*alerted) (alerts []cascade.Finding) {
	for _, a := range all {
		alerts = append(alerts, a.alerts...)
	}
	return alerts
}

// Memory is shared among agents: those that hold the most lose their oldest nodes, in their quietest
// workflows, and nobody else does.
func TestForgetting(t *testing.T) {
	b := benchOf(t, cascade.SettingsOf(1000, 0, 0))
	b.chain("victim")
	for i := range 5000 {
		b.task(fmt.Sprint("flood", i), fmt.Sprint(i), "stranger")
		b.task("victim", fmt.Sprint("x", i), "member", "a")
		b.says("victim", fmt.Sprint("x", i), "member")
	}
	if s := b.Stats(); s.Nodes > 1000 {
		t.Errorf("%+v", s)
	}
	for _, id := range []string{"cd", "bc", "ab"} {
		b.after(time.Millisecond).fails("victim", id, cascade.Failed)
	}
	if f := b.one(); f.Root.Node != "cd" || f.Affected != 4 {
		t.Errorf("%+v", f)
	}
	if err := b.Faults(); err != nil {
		t.Error(err)
	}

	b = benchOf(t, cascade.SettingsOf(1000, 0, 0))
	b.task("quiet", "q", "a")
	b.task("busy", "old", "a")
	for i := range 3000 {
		b.task("busy", fmt.Sprint(i), "a", "old")
	}
	b.task("quiet", "child", "z", "q")
	b.task("busy", "last", "z", "2999")
	if s := b.Stats(); s.Workflows != 2 || s.Nodes > 1000 {
		t.Errorf("%+v", s)
	}
}

// Nothing of hostile shape does harm: cycles, themselves as parents, long names, unknown nodes, many parents.
func TestHostileShapes(t *testing.T) {
	b := benchOf(t, cascade.SettingsOf(1000, 0, 0))
	for range 2 {
		b.task("w", "a", "a", "b", "a")
		b.task("w", "b", "b", "a", "b")
		b.task("w", "c", "c", "a", "b", "c")
	}
	for _, id := range []string{"a", "b", "c", "nobody"} {
		b.says("w", id, id, "error-a", "error-b", "error-c", "error-"+id)
		b.fails("w", id, cascade.Failed)
	}
	var many []string
	for i := range 1000 {
		many = append(many, fmt.Sprint("p", i))
		b.task("w", many[i], "p")
	}
	b.task("w", "wide", "w", many...)
	b.task("w", strings.Repeat("x", 300), "w")
	b.task("w", "long", strings.Repeat("x", 2000))
	b.fails("w", "wide", cascade.Failed)
	if err := b.Faults(); err != nil {
		t.Error(err)
	}
	if s := b.Stats(); s.Nodes > 1000 {
		t.Errorf("%+v", s)
	}
}

// big fills a detector with workflows in which calls fail as seldom, and spread as far, at any size.
func big(t testing.TB, nodes int) (d *cascade.Detector, event func()) {
	t.Helper()
	d = cascade.New(cascade.SettingsOf(nodes, 0, 0))
	r := rand.New(rand.NewPCG(1, uint64(nodes)))
	now, n := start, 0
	var recent []string
	event = func() {
		n++
		now = now.Add(10 * time.Millisecond)
		wf := fmt.Sprintf("workflow-%08d-0000-4000-8000-000000000000", n/200)
		id := fmt.Sprintf("call-%08d-0000-4000-8000-000000000000", n)
		if n%200 == 0 {
			recent = recent[:0]
		}
		node := cascade.Node{ID: id, Aliases: []string{id + "s"}, Workflow: wf, Agent: fmt.Sprint("agent-", r.IntN(100))}
		if len(recent) > 0 {
			node.Parents = []string{recent[r.IntN(len(recent))], recent[len(recent)-1]}
		}
		to := fmt.Sprint("service-", r.IntN(50))
		node.Upstream = cascade.Upstream{Pool: to, Agent: to}
		d.Node(now, node)
		recent = append(recent, id)
		if r.IntN(50) == 0 {
			for _, id := range recent[max(len(recent)-r.IntN(5), 0):] {
				d.Fail(now, cascade.Failure{Workflow: wf, Node: id, Error: "e" + id, Address: "1"})
			}
		} else {
			d.Succeed(now, wf, id)
		}
		d.Advance(now)
	}
	for range nodes + nodes/4 {
		event()
	}
	return d, event
}

// 100,000 nodes take 64 MB at most, and an event does not cost more than with 1,000. The cost is counted in
// steps, not in time.
func TestHundredThousandNodes(t *testing.T) {
	cost := func(d *cascade.Detector, event func()) (mean float64, most int64) {
		before := d.Work()
		for range 5000 {
			at := d.Work()
			event()
			most = max(most, d.Work()-at)
		}
		return float64(d.Work()-before) / 5000, most
	}
	small, most := cost(big(t, 1000))
	var d *cascade.Detector
	var event func()
	nodes := 100_000
	if raced {
		nodes = 20_000
	}
	used := heap(func() { d, event = big(t, nodes) })
	large, mostLarge := cost(d, event)
	t.Logf("steps of an event: %.1f, at most %d, at 1,000 nodes; %.1f, at most %d, at %d nodes in %.1f MB", small, most, large, mostLarge, d.Stats().Nodes, used)
	if large > 2*small || mostLarge > 5000 {
		t.Error("an event costs more with more nodes")
	}
	if used > 64 || d.Stats().Nodes < nodes/100*99 {
		t.Error("too much memory for a node")
	}
	runtime.KeepAlive(event)
}

// heap is how many MB the heap has grown by.
func heap(by func()) float64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	by()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return float64(int64(after.HeapAlloc)-int64(before.HeapAlloc)) / 1e6
}

// Where all nodes have failed there are fewer, so that the memory is bounded all the same.
func TestAllHaveFailed(t *testing.T) {
	b := benchOf(t, cascade.SettingsOf(20_000, 0, 0))
	used := heap(func() {
		for i := range 30_000 {
			id, wf := fmt.Sprintf("call-%08d-0000-4000-8000-000000000000", i), fmt.Sprint("workflow-", i/50)
			b.Node(b.now, cascade.Node{
				ID: id, Aliases: []string{id + "s"}, Workflow: wf, Agent: fmt.Sprint("agent-", i%1000), Parents: []string{fmt.Sprintf("call-%08d-0000-4000-8000-000000000000", i-1)},
				Upstream: cascade.Upstream{Pool: fmt.Sprint("pool-", i%100)},
			})
			b.Fail(b.now, cascade.Failure{Workflow: wf, Node: id, Error: "error-" + id, Kind: cascade.Kind(i % 7), Causes: []string{"unknown-" + id}})
		}
	})
	t.Logf("%+v: %.1f MB", b.Stats(), used)
	if used > 20 {
		t.Error("too much")
	}
	if err := b.Faults(); err != nil {
		t.Error(err)
	}
}

// Events may come from any goroutine, in any order.
func TestConcurrent(t *testing.T) {
	b := benchOf(t, cascade.SettingsOf(1000, 0, 0))
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range 2000 {
				random(b.Detector, r.IntN, start.Add(time.Duration(r.IntN(1e9))))
			}
		})
	}
	wg.Wait()
	if err := b.Faults(); err != nil {
		t.Error(err)
	}
}

// random feeds one event that pick chooses.
func random(d *cascade.Detector, pick func(int) int, now time.Time) {
	names := []string{"a", "b", "c", "d", "e", "f", "g", ""}
	wf, id, agent := fmt.Sprint("w", pick(3)), fmt.Sprint(pick(40)), names[pick(8)]
	var others []string
	for range pick(4) {
		others = append(others, fmt.Sprint(pick(40)))
	}
	switch pick(12) {
	case 0, 1, 2, 3:
		d.Node(now, cascade.Node{ID: id, Workflow: wf, Parents: others, Agent: agent, Aliases: others[:len(others)/2], Upstream: cascade.Upstream{Pool: names[pick(8)], Agent: names[pick(8)]}, Target: names[pick(8)]})
	case 4, 5, 6, 7:
		for i, o := range others {
			others[i] = "e" + o
		}
		by := ""
		if pick(2) == 0 {
			by = agent
		}
		d.Fail(now, cascade.Failure{Workflow: wf, Node: id, Error: "e" + id, Kind: cascade.Kind(pick(7)), Causes: others, By: by, Address: names[pick(8)]})
	case 8:
		d.Succeed(now, wf, id)
	case 9:
		d.Breaker(now, cascade.Breaker{Downstream: names[pick(8)], Pool: names[pick(8)], Address: id, By: names[pick(8)], Workflow: wf, Open: pick(3) > 0, Targets: names[:pick(3)]})
		d.AnsweredAbout(now, names[pick(8)], pick(3))
	case 10:
		d.Slow(names[pick(8)], id, pick(2) == 0)
		d.Exhausted(cascade.Resource{Pool: names[pick(8)], Name: id}, pick(2) == 0)
		d.Pool(names[pick(8)], others)
	default:
		d.Advance(now)
		for _, f := range d.Findings() {
			d.Finding(f.ID)
		}
	}
}

// No order of events breaks what must always hold.
func FuzzEvents(f *testing.F) {
	f.Add([]byte("0123456789abcdefghijklmnopqrstuvwxyz"))
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 2))
		events := make([]byte, 4000)
		for i := range events {
			events[i] = byte(r.Uint32())
		}
		f.Add(events)
	}
	f.Fuzz(func(t *testing.T, events []byte) {
		set := cascade.SettingsOf(60, 2, 5*time.Second)
		d := cascade.New(set)
		now := start
		pick := func(n int) int {
			if len(events) == 0 {
				return 0
			}
			v := int(events[0])
			events = events[1:]
			return v % n
		}
		for i := 0; len(events) > 0; i++ {
			now = now.Add(time.Duration(pick(40)-4) * 50 * time.Millisecond)
			if pick(40) == 0 {
				now = now.Add(cascade.Quiet)
			}
			random(d, pick, now)
			if i%8 == 0 {
				if err := d.Faults(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := d.Faults(); err != nil {
			t.Fatal(err)
		}
		if s := d.Stats(); s.Nodes > 60 {
			t.Fatalf("%+v", s)
		}
	})
}

func TestSettings(t *testing.T) {
	for _, window := range []time.Duration{time.Millisecond, 2 * time.Hour} {
		if _, err := (cascade.Settings{Window: jsontime.Duration(window)}).Check(); err == nil || !strings.HasPrefix(err.Error(), "window is ") {
			t.Errorf("%s: %v", window, err)
		}
	}
	b := benchOf(t, cascade.SettingsOf(2000, 0, 0))
	for i := range 1900 {
		b.task("w", fmt.Sprint(i), "a")
	}
	b.Configure(cascade.SettingsOf(1000, 0, 0))
	if s := b.Stats(); s.Nodes > 1000 {
		t.Errorf("%+v", s)
	}
	for text, kind := range map[string]cascade.Kind{
		"timeout": cascade.Timeout, "constraint_violation": cascade.Rejected, "resource_exhausted": cascade.Exhausted,
		"upstream_cascade": cascade.Failed, "action_failed": cascade.Failed, "": cascade.Failed,
	} {
		if cascade.ParseKind(text) != kind {
			t.Errorf("%q is %d", text, cascade.ParseKind(text))
		}
	}
}

func BenchmarkEvent(b *testing.B) {
	for _, nodes := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(nodes), func(b *testing.B) {
			_, event := big(b, nodes)
			b.ReportAllocs()
			for b.Loop() {
				event()
			}
		})
	}
}

// An address that has answered is not down, also if the calls are not known one by one.
func TestAnswersWithoutNodes(t *testing.T) {
	for _, c := range []struct {
		answers int
		want    cascade.Class
	}{{0, cascade.Service}, {3, cascade.Agent}} {
		set, err := cascade.Settings{}.Check()
		if err != nil {
			t.Fatal(err)
		}
		d, now := cascade.New(set), time.Unix(1_800_000_000, 0)
		d.Node(now, cascade.Node{ID: "call", Workflow: "w", Agent: "caller", Upstream: cascade.Upstream{Pool: "x"}})
		d.Fail(now, cascade.Failure{Workflow: "w", Node: "call", Address: "x:1"})
		now = now.Add(time.Second)
		d.Answered(now, "x", "x:1", c.answers)
		var found []cascade.Change
		for i := range 3 {
			found = append(found, d.Breaker(now, cascade.Breaker{Downstream: "x", Pool: "x", Address: fmt.Sprint("y:", i), Open: true})...)
		}
		if len(found) != 1 || found[0].Finding.Class != c.want {
			t.Errorf("after %d answers: %+v, want the class %s", c.answers, found, c.want)
		}
	}
}
