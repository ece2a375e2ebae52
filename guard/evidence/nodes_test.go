package evidence_test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	guardworkflow "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// call records a guarded call of an agent, or of a caller without tokens where issuer is
// empty, that follows from others, and returns its checkpoint and all its ids.
func (b *rollbackBench) call(issuer, workflow, outcome string, parents ...string) (checkpoint string, ids []string) {
	b.t.Helper()
	execution := uuid.NewString()
	if issuer != "" {
		token := b.token(issuer, ect.Claims{Workflow: workflow, Parents: parents})
		parents, ids = []string{token.ID()}, append(ids, token.ID())
	}
	c := b.checkpoint(gateway, workflow, execution, parents...)
	ids = append(ids, c.ID())
	if outcome != "" {
		s := b.settled(workflow, execution, outcome, b.evidence.NodeID(c.ID()), append(parents, c.ID())...)
		ids = append(ids, s.ID())
	}
	return c.ID(), ids
}

// What is near to a checkpoint makes the plan that all of its workflow makes, and gives the same
// right to ask, whatever the workflow looks like.
func TestNearbyMakesTheSamePlan(t *testing.T) {
	seeds := uint64(12)
	if raced {
		seeds = 3
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 50))
			b := newRollbackBench(t)
			workflow := uuid.NewString()
			var ids, checkpoints, mine, theirs []string
			known := map[string]rollback.NodeState{} // what the checkpoint store and the executions know
			some := func() (parents []string) {
				for range min(r.IntN(3), len(ids)) {
					if id := ids[r.IntN(len(ids))]; !slices.Contains(parents, id) {
						parents = append(parents, id)
					}
				}
				return parents
			}
			for range 40 {
				who := []string{alice, bob, ""}[r.IntN(3)]
				switch n := r.IntN(12); {
				case n == 0 && len(checkpoints) > 1: // a group
					at := r.IntN(len(checkpoints) - 1)
					of := checkpoints[at : at+2 : at+2]
					c := b.checkpoint(alice, workflow, "", of...)
					checkpoints, ids = append(checkpoints, c.ID()), append(ids, c.ID())
				case n == 1 && len(ids) > 0: // an agent's own, behind an action or before one
					c := b.checkpoint(bob, workflow, "", some()...)
					act := b.token(bob, ect.Claims{Workflow: workflow, Parents: append(some(), c.ID())})
					checkpoints, ids = append(checkpoints, c.ID()), append(ids, c.ID(), act.ID())
				case n == 4: // another gateway's, which is this one's parent for its call
					parents := some()
					if len(theirs) > 0 && r.IntN(3) > 0 {
						parents = []string{theirs[r.IntN(len(theirs))]}
					}
					before := b.checkpoint(bob, workflow, "", parents...).ID()
					outcome := outcomes[r.IntN(len(outcomes))]
					c, all := b.call("", workflow, outcome, before)
					known[c] = stateAfter(outcome)
					theirs, checkpoints, ids = append(theirs, before), append(checkpoints, c), append(append(ids, before), all...)
				case n == 2 && len(mine) > 0: // of her own: what strangers report is not recorded
					e := b.token(alice, ect.Claims{Workflow: workflow, Action: "error", Parents: []string{mine[r.IntN(len(mine))]}, Ext: new(ect.ExtBuilder).
						Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, "")})
					ids = append(ids, e.ID())
				case n == 3 && len(checkpoints) > 0: // undone, as its maker or the gateway tells
					c := append(checkpoints, theirs...)[r.IntN(len(checkpoints)+len(theirs))]
					if known[c] != "" {
						known[c] = rollback.Undone
					}
					ext := func() *ect.ExtBuilder {
						return new(ect.ExtBuilder).Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, c)
					}
					start := b.token(gateway, ect.Claims{Workflow: workflow, Action: "rollback_start", Parents: []string{c},
						Ext: ext().Text(ect.MemberScope, "single").Text(ect.MemberReason, "why")})
					b.token(gateway, ect.Claims{Workflow: workflow, Action: "rollback_complete", Parents: []string{start.ID()}, Ext: ext().Text(ect.MemberStatus, "completed")})
				default:
					outcome := outcomes[r.IntN(len(outcomes))]
					c, all := b.call(who, workflow, outcome, some()...)
					known[c] = stateAfter(outcome)
					checkpoints, ids = append(checkpoints, c), append(ids, all...)
					if who == alice {
						mine = append(mine, all[0])
					}
				}
			}
			stateOf := func(n *guardworkflow.Node) (rollback.NodeState, error) {
				if state := known[n.ID]; state != "" {
					return state, nil
				}
				return rollback.RecordedState(n), nil
			}
			for _, target := range append(checkpoints, theirs...) {
				whole, err := b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: rollback.FullWorkflow})
				if err != nil {
					t.Fatal(err)
				}
				all := whole.Graph
				for _, scope := range []rollback.Scope{rollback.Single, rollback.SubDAG} {
					for _, by := range []string{"", alice, bob, "spiffe://example.com/agent/eve"} {
						for _, lineage := range []rollback.Lineage{rollback.Ancestor, rollback.Workflow} {
							near, err := b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: scope, By: by, Lineage: lineage})
							if err != nil || near.More {
								t.Fatal(near.More, err)
							}
							part := near.Graph
							what := fmt.Sprintf("%s of %s for %q (%s), %d of %d nodes", scope, target, by, lineage, part.Len(), all.Len())
							if got, want := rollback.MayAsk(part, by, target, lineage), rollback.MayAsk(all, by, target, lineage); got != want {
								t.Errorf("%s: may ask %t, want %t", what, got, want)
							}
							ask := rollback.PlanInput{Workflow: workflow, Target: target, Scope: scope, By: by, Lineage: lineage, Now: time.Now()}
							got, err := rollback.MakePlan(part, ask, stateOf)
							want, err2 := rollback.MakePlan(all, ask, stateOf)
							if (err == nil) != (err2 == nil) || err == nil && got.Hash() != want.Hash() {
								t.Fatalf("%s:\n%+v %v\nwant\n%+v %v", what, got, err, want, err2)
							}
						}
					}
				}
			}
		})
	}
}

// What counts of a checkpoint of others before a call is read: what reports on it, and what else
// follows from it if it is undone itself, since the call's own checkpoint does not follow from all that
// its outcome follows from.
func TestTheCheckpointBeforeACall(t *testing.T) {
	b := newRollbackBench(t)
	workflow, execution := uuid.NewString(), uuid.NewString()
	reported := b.checkpoint(bob, workflow, "").ID()
	part, _ := b.call("", workflow, "completed", reported)
	b.token(bob, ect.Claims{Workflow: workflow, Action: "error", Parents: []string{reported}, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, "")})

	led, _ := b.call(alice, workflow, "completed")
	before := b.checkpoint(bob, workflow, "").ID()
	other := b.token(bob, ect.Claims{Workflow: workflow, Parents: []string{before}}).ID()
	own := b.checkpoint(gateway, workflow, execution, before).ID()
	b.settled(workflow, execution, "completed", b.evidence.NodeID(own), before, own, led)

	for target, want := range map[string]func(p *rollback.Plan) bool{
		part: func(p *rollback.Plan) bool { return p.Levels[0][0].Critical == "severity" },
		led:  func(p *rollback.Plan) bool { return slices.Contains(p.Along, other) },
	} {
		var plans []*rollback.Plan
		for _, scope := range []rollback.Scope{rollback.FullWorkflow, rollback.SubDAG} {
			view, err := b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: scope})
			if err != nil {
				t.Fatal(err)
			}
			p, err := rollback.MakePlan(view.Graph, rollback.PlanInput{Workflow: workflow, Target: target, Scope: rollback.SubDAG, Now: time.Now()},
				func(n *guardworkflow.Node) (rollback.NodeState, error) { return rollback.RecordedState(n), nil })
			if err != nil {
				t.Fatal(err)
			}
			plans = append(plans, p)
		}
		if !reflect.DeepEqual(plans[0], plans[1]) || !want(plans[1]) {
			t.Errorf("of the whole workflow %+v\nof what is near %+v", plans[0], plans[1])
		}
	}
}

var outcomes = []string{"completed", "completed", "in_doubt", "released", ""}

// stateAfter is the state of a call with this outcome.
func stateAfter(outcome string) rollback.NodeState {
	switch outcome {
	case "released":
		return rollback.NeverRan
	case "":
		return rollback.InFlight
	}
	return rollback.Ran
}

// counted counts what is read of a store.
type counted struct {
	store.Store
	reads atomic.Int64
}

func (c *counted) Get(ctx context.Context, key []byte) (store.Entry, error) {
	c.reads.Add(1)
	return c.Store.Get(ctx, key)
}

func (c *counted) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		c.reads.Add(1)
		for e, err := range c.Store.Scan(ctx, r) {
			c.reads.Add(1)
			if !yield(e, err) {
				return
			}
		}
	}
}

// flood records calls of a workflow by drafts of the gateway, many in a commit: beside each
// other, or each following from the one before.
func (b *rollbackBench) flood(workflow string, calls int, chain string) (last string) {
	b.t.Helper()
	var batch []*ect.Draft
	add := func(c ect.Claims) string {
		c.Workflow, c.Audience = workflow, []string{gateway}
		d, err := b.issuers[gateway].Draft(time.Now(), c)
		if err != nil {
			b.t.Fatal(err)
		}
		batch = append(batch, d)
		return d.ID()
	}
	for n := range calls {
		ext := new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://g.example/rollback").Int(ect.MemberTTL, 3600)
		var parents []string
		if chain != "" {
			parents = []string{chain}
		}
		id := add(ect.Claims{Action: "checkpoint", Parents: parents, Output: state, Ext: ext})
		add(ect.Claims{ID: b.evidence.NodeID(id), Action: "pay", Parents: append(parents, id)})
		if chain != "" {
			chain = id
		}
		last = id
		if len(batch) >= 14 || n == calls-1 {
			if err := b.evidence.Append(b.t.Context(), time.Now(), nil, batch...); err != nil {
				b.t.Fatal(err)
			}
			batch = nil
		}
	}
	return last
}

// B2: what is read for a rollback does not depend on how large the workflow is, beside the
// target or before it, nor on what a stranger makes under its id.
func TestLargeWorkflowsCostNothing(t *testing.T) {
	b := newRollbackBench(t)
	reading := &counted{Store: b.store}
	b.store = reading
	b.open()
	workflow := uuid.NewString()
	root, _ := b.call(alice, workflow, "completed")
	reads := func(target string, scope rollback.Scope) int64 {
		t.Helper()
		before := reading.reads.Load()
		view, err := b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: scope, By: alice, Lineage: rollback.Ancestor})
		if err != nil || view.More {
			t.Fatal(view.More, err)
		}
		if !rollback.MayAsk(view.Graph, alice, target, rollback.Ancestor) {
			t.Error("she may not ask")
		}
		return reading.reads.Load() - before
	}
	target, ids := b.call(alice, workflow, "completed", root)
	b.call(bob, workflow, "completed", ids...)
	few := [2]int64{reads(target, rollback.Single), reads(target, rollback.SubDAG)}
	b.flood(workflow, 2000, "")
	b.flood(workflow, 300, root)
	// A look that comes before the last entries have their place in the tree reads a
	// little more.
	const waiting = 20
	if many := [2]int64{reads(target, rollback.Single), reads(target, rollback.SubDAG)}; max(many[0], many[1]) > min(few[0], few[1])+waiting || few[0] > 100 {
		t.Errorf("%d reads, and %d in a workflow of 4,600 nodes", few, many)
	}
	// At the end of a long chain too.
	last := b.flood(workflow, 300, target)
	short, shorts := b.call(alice, workflow, "completed", root)
	long, longs := b.call(alice, workflow, "completed", last)
	b.call(bob, workflow, "completed", shorts...)
	b.call(bob, workflow, "completed", longs...)
	if a, c := reads(short, rollback.SubDAG), reads(long, rollback.SubDAG); c > a+10 {
		t.Errorf("%d reads, and %d at the end of a chain", a, c)
	}
}

// The parts of a rollback at a participant cost the same however many there are: each plan reads its
// own call, and not those that the coordinator's other checkpoints lead to (ADR 0098).
func TestPartsOfARollbackAreLinear(t *testing.T) {
	for _, chain := range []bool{false, true} {
		few, some := readsOfParts(t, 30, chain)
		many, all := readsOfParts(t, 90, chain)
		if many > few+2 || all > some || few > 60 {
			t.Errorf("chain %t: %d reads and at most %d nodes for each of 30 parts, %d and %d for each of 90", chain, few, some, many, all)
		}
	}
}

// readsOfParts is what the plan of each part reads, and the most nodes that it has, of so many calls
// of another gateway: all from the first, or each from the one before. Each is asked for and undone.
func readsOfParts(t *testing.T, calls int, chain bool) (reads int64, nodes int) {
	t.Helper()
	b := newRollbackBench(t)
	reading := &counted{Store: b.store}
	b.store = reading
	b.open()
	workflow := uuid.NewString()
	var before, parts []string
	for range calls {
		k := b.checkpoint(bob, workflow, "", before...).ID()
		part, _ := b.call("", workflow, "completed", k)
		if parts = append(parts, part); chain || before == nil {
			before = []string{k}
		}
	}
	ext := func(part string) *ect.ExtBuilder {
		return new(ect.ExtBuilder).Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, part)
	}
	for _, phase := range []string{"prepare", "execute"} {
		for _, part := range slices.Backward(parts) {
			request := b.token(bob, ect.Claims{Workflow: workflow, Parents: []string{part}, Action: "rollback_request",
				Ext: ext(part).Text(ect.MemberScope, "sub_dag").Text(ect.MemberReason, "why")})
			at := reading.reads.Load()
			view, err := b.ledger.Graph(t.Context(), rollback.Query{Target: part, Scope: rollback.SubDAG, Lineage: rollback.Ancestor})
			if err != nil {
				t.Fatal(err)
			}
			reads, nodes = reads+reading.reads.Load()-at, max(nodes, view.Graph.Len())
			if phase == "execute" {
				start := b.token(gateway, ect.Claims{Workflow: workflow, Action: "rollback_start", Parents: []string{request.ID()},
					Ext: ext(part).Text(ect.MemberScope, "sub_dag").Text(ect.MemberReason, "why")})
				b.token(gateway, ect.Claims{Workflow: workflow, Action: "rollback_complete", Parents: []string{start.ID()}, Ext: ext(part).Text(ect.MemberStatus, "completed")})
			}
		}
	}
	return reads / int64(2*calls), nodes
}

// Of a workflow of 12,000 nodes, in a store on disk, a plan reads as many entries as of one
// of 100.
func TestPlanReadsTheSameOfALargeWorkflow(t *testing.T) {
	few, many := newLarge(t, 100), newLarge(t, 12_000)
	for _, scope := range []rollback.Scope{rollback.Single, rollback.SubDAG} {
		read := func(l *large) (reads int64, nodes int) {
			before := l.reading.reads.Load()
			nodes = l.plan(t, scope).Len()
			return l.reading.reads.Load() - before, nodes
		}
		want, near := read(few)
		if got, all := read(many); got > want || all != near || near < 4 || want < int64(near) {
			t.Errorf("%s: %d reads and %d nodes, of the small workflow %d and %d", scope, got, all, want, near)
		}
	}
}

// Of a checkpoint from which very much follows, a Single rollback looks at some of it, and says
// that there is more.
func TestSingleLooksAtSomeOfWhatFollows(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	target, _ := b.call(alice, workflow, "completed")
	b.flood(workflow, 700, target)
	view, err := b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: rollback.Single, By: alice, Lineage: rollback.Ancestor})
	if err != nil || !view.More || view.Graph.Len() < 1000 || view.Graph.Len() > 1100 {
		t.Errorf("%d nodes, %t, %v", view.Graph.Len(), view.More, err)
	}
	view, err = b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: rollback.SubDAG})
	if err != nil || view.More || view.Graph.Len() != 1403 {
		t.Errorf("%d nodes, %t, %v", view.Graph.Len(), view.More, err)
	}
	var refused *rollback.TooManyError
	if errors.As(err, &refused) {
		t.Error(refused)
	}
}

// A version of a workflow counts until something is recorded that can change a plan. Requests for
// rollbacks cannot, but where a result is recorded that they outdate.
func TestUnchanged(t *testing.T) {
	b := newRollbackBench(t)
	workflow := uuid.NewString()
	target, ids := b.call(alice, workflow, "completed")
	read := func() string {
		t.Helper()
		view, err := b.ledger.Graph(t.Context(), rollback.Query{Target: target, Scope: rollback.SubDAG, By: alice, Lineage: rollback.Ancestor})
		if err != nil || view.Version == "" {
			t.Fatal(view.Version, err)
		}
		return view.Version
	}
	unchanged := func(version string, want bool) {
		t.Helper()
		if got, err := b.ledger.Unchanged(t.Context(), workflow, version); got != want || err != nil {
			t.Errorf("unchanged %t, %v; want %t", got, err, want)
		}
	}
	request := func() {
		for _, event := range []ect.Event{ect.EventRollbackRequest, ect.EventRollbackStart} {
			b.token(alice, ect.Claims{Workflow: workflow, Parents: []string{target}, Action: ect.Cascade.Event(event)})
		}
	}
	version := read()
	unchanged(version, true)
	b.call(bob, uuid.NewString(), "completed")
	unchanged(version, true) // another workflow
	request()
	request()
	unchanged(version, true)
	b.token(bob, ect.Claims{Workflow: workflow, Parents: ids[:1]})
	unchanged(version, false)
	request()
	unchanged(version, false)
	version = read()
	unchanged(version, true)
	b.token(alice, ect.Claims{Workflow: workflow, Parents: []string{target}, Action: ect.Cascade.Event(ect.EventRollbackComplete)})
	unchanged(version, false)
	version = read()
	unchanged(version, true)
	request()
	unchanged(version, false)
	unchanged("", false)
	if got, err := b.ledger.Unchanged(t.Context(), uuid.NewString(), read()); got || err != nil {
		t.Errorf("of another workflow: %t, %v", got, err)
	}
	lone, err := b.ledger.Graph(t.Context(), rollback.Query{Target: b.checkpoint(gateway, "", "x9").ID()})
	if got, err2 := b.ledger.Unchanged(t.Context(), "", lone.Version); !got || err != nil || err2 != nil {
		t.Errorf("without a workflow: %t, %v, %v", got, err, err2)
	}
	unchanged(lone.Version, false)
	workflow = ""
	unchanged(version, false)
	unchanged("", false)
}

// BenchmarkNodes is what a plan reads of a workflow of so many nodes, in a store on disk: for
// one call, and for one from which two others follow. A million nodes take some minutes to
// record.
func BenchmarkNodes(b *testing.B) {
	for _, nodes := range []int{100, 10_000, 1_000_000} {
		var l *large
		b.Run(fmt.Sprint(nodes), func(b *testing.B) {
			if l == nil {
				l = newLarge(b, nodes)
			}
			for _, scope := range []rollback.Scope{rollback.Single, rollback.SubDAG} {
				b.Run(string(scope), func(b *testing.B) {
					before := l.reading.reads.Load()
					for b.Loop() {
						l.plan(b, scope)
					}
					b.ReportMetric(float64(l.reading.reads.Load()-before)/float64(b.N), "reads/op")
				})
			}
		})
	}
}

// large is a workflow of many nodes in a store on disk, with a call in it from which two
// others follow.
type large struct {
	*rollbackBench
	reading *counted
	target  string
}

func newLarge(t testing.TB, nodes int) *large {
	t.Helper()
	st, err := badger.Open(t.TempDir(), badger.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	l := &large{rollbackBench: newRollbackBench(t), reading: &counted{Store: st}}
	l.store = l.reading
	l.open()
	workflow := uuid.NewString()
	root, _ := l.call(alice, workflow, "completed")
	l.populate(workflow, nodes/4, "")
	l.populate(workflow, nodes/4, root)
	first, ids := l.call(alice, workflow, "completed", root)
	second, _ := l.call(bob, workflow, "completed", ids...)
	l.call(bob, workflow, "completed", second)
	log := l.evidence.Log()
	if size := log.Head().Size; size < int64(nodes) {
		t.Fatalf("%d entries, want %d", size, nodes)
	}
	l.target = first
	return l
}

// plan makes the plan of undoing the call.
func (l *large) plan(t testing.TB, scope rollback.Scope) *guardworkflow.Graph {
	q := rollback.Query{Target: l.target, Scope: scope, By: alice, Lineage: rollback.Ancestor}
	view, err := l.ledger.Graph(t.Context(), q)
	if err != nil || view.More {
		t.Fatal(view.More, err)
	}
	return view.Graph
}

// populate records calls of the gateway without signing them: beside each other, or each
// following from the one before. Each takes the place of one that is signed, with the same
// keys; its token is another's. That is good for what is not read.
func (b *rollbackBench) populate(workflow string, calls int, chain string) {
	b.t.Helper()
	recorded := b.evidence
	if err := recorded.Close(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	head := newHeadKey(b.t, b.sealer.Index("ledger head key", "agent-guard/n1"))
	log, err := ledger.Open(b.t.Context(), ledger.Options{
		Store: b.store, Sealer: b.sealer, Origin: "agent-guard/n1", HeadSigner: head, HeadKeys: note.VerifierList(head.Verifier),
		Links: recorded.IndexIDs,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	token := func(c ect.Claims) []byte {
		c.Workflow, c.Audience = workflow, []string{gateway}
		t, err := b.issuers[gateway].Issue(time.Now(), c)
		if err != nil {
			b.t.Fatal(err)
		}
		return []byte(t.Raw())
	}
	checkpoint := token(ect.Claims{Action: "checkpoint", Parents: []string{uuid.NewString()}, Output: state, Ext: new(ect.ExtBuilder).
		Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://g.example/rollback").Int(ect.MemberTTL, 3600)})
	node := token(ect.Claims{Action: "pay", Parents: []string{uuid.NewString(), uuid.NewString()}})

	var writers sync.WaitGroup
	batches := make(chan []ledger.Event)
	for range 16 { // they share the disk's syncs
		writers.Go(func() {
			for events := range batches {
				if err := log.Append(b.t.Context(), events); err != nil {
					b.t.Error(err)
				}
			}
		})
	}
	batch := make([]ledger.Event, 0, ledger.MaxEvents)
	for n := range calls {
		var parents []string
		if chain != "" {
			parents = []string{chain}
		}
		id := uuid.NewString()
		at := ledger.Event{Workflow: workflow, Issuer: gateway, Time: time.Now()}
		c, a := at, at
		c.ID, c.Action, c.Parents, c.Payload = id, "checkpoint", parents, checkpoint
		a.ID, a.Action, a.Parents, a.Payload = recorded.NodeID(id), "pay", append(parents[:len(parents):len(parents)], id), node
		if batch = append(batch, c, a); chain != "" {
			chain = id
		}
		if len(batch) < ledger.MaxEvents && n < calls-1 {
			continue
		}
		batches <- batch
		batch = make([]ledger.Event, 0, ledger.MaxEvents)
	}
	close(batches)
	writers.Wait()
	if err := log.Close(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	b.open()
}

// headKey signs the heads of the gateway's log.
type headKey struct {
	note.Verifier
	private ed25519.PrivateKey
}

func newHeadKey(t testing.TB, seed [32]byte) headKey {
	t.Helper()
	private := ed25519.NewKeyFromSeed(seed[:])
	text, err := note.NewEd25519VerifierKey("agent-guard/n1", private.Public().(ed25519.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := note.NewVerifier(text)
	if err != nil {
		t.Fatal(err)
	}
	return headKey{verifier, private}
}

// Sign implements note.Signer.
func (k headKey) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(k.private, msg), nil }
