package evidence

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	fleetPatience = 20 * time.Second
	fleetName     = "spiffe://example.com/gateway"
)

// testFleet are gateways on one store, with keys of their own.
type testFleet struct {
	t      *testing.T
	store  *memory.Store
	sealer *seal.Ring
}

type testNode struct {
	*Evidence
	t       *testing.T
	member  *memory.Member
	builder *EventBuilder
}

func newFleet(t *testing.T) *testFleet {
	return &testFleet{t, memory.New(memory.Options{}), seal.Generate()}
}

// join begins a life of a node.
func (f *testFleet) join(name string, ring *ect.Ring) *testNode { return f.open(name, ring, nil) }

// open is join, with what hears of events.
func (f *testFleet) open(name string, ring *ect.Ring, placed func(log string, e *ledger.Event, recorded time.Time)) *testNode {
	f.t.Helper()
	n := &testNode{t: f.t, member: f.store.Join(name)}
	var err error
	if n.Evidence, err = Open(f.t.Context(), Options{Store: n.member, Sealer: f.sealer, Ring: ring, Placed: placed}); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = n.Close(context.Background()) })
	if err := n.RecordName(f.t.Context(), fleetName, ring); err != nil {
		f.t.Fatal(err)
	}
	if err := n.SignWhenShown(f.t.Context(), ring); err != nil {
		f.t.Fatal(err)
	}
	if n.builder, err = n.EventBuilder(fleetName); err != nil {
		f.t.Fatal(err)
	}
	return n
}

// record records a checkpoint that a call of the workflow has.
func (n *testNode) record(workflow string, parents ...string) *ect.Draft {
	n.t.Helper()
	d, err := n.builder.Checkpoint(time.Now(), &Call{
		Key: execution.Key{1}, Caller: execution.CallerHash{7}, Action: "pay", Workflow: workflow, Parents: parents, Target: "POST api.example.com/pay",
		RollbackURI: "https://g.example/rollback", TTL: time.Hour, Reversible: true, State: ect.Sum([]byte("a snapshot")),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.Append(n.t.Context(), time.Now().Add(time.Hour), nil, d); err != nil {
		n.t.Fatal(err)
	}
	return d
}

// read waits for an entry, verifies its token under the keys that the node knows, and returns it with the
// name of the key.
func (n *testNode) read(d *ect.Draft) (ledger.Entry, string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), fleetPatience)
	defer cancel()
	e, err := n.Log().Lookup(ctx, d.Workflow(), d.ID())
	if err != nil {
		n.t.Fatal(err)
	}
	raw, err := n.Log().Token(ctx, &e)
	if err != nil {
		n.t.Fatal(err)
	}
	token, err := n.verify(string(raw))
	if err != nil {
		n.t.Fatal(err)
	}
	return e, token.Key().ID()
}

// verify verifies one of the gateway's tokens as it is presented.
func (n *testNode) verify(raw string) (*ect.Token, error) {
	source, err := n.builder.Source()
	if err != nil {
		return nil, err
	}
	seen, err := ect.ParseInsecure(raw)
	if err != nil {
		return nil, err
	}
	v, err := ect.NewVerifier(ect.Policy{Audience: seen.Audience(), Sources: []ect.Source{source}})
	if err != nil {
		return nil, err
	}
	return v.VerifyStored(n.t.Context(), raw)
}

// recorder reads the ledger for rollbacks.
func (n *testNode) recorder() rollback.Ledger {
	return NewRollbackLedger(RollbackLedgerOptions{
		Keep: time.Hour, Recorder: func() (Recorder, bool) { return Recorder{Evidence: n.Evidence, EventBuilder: n.builder}, true },
	})
}

// eventually waits until something holds that another goroutine brings about.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.After(fleetPatience); !holds(); {
		select {
		case <-end:
			t.Fatalf("not in %s: %s", fleetPatience, what)
		case <-time.After(time.Millisecond):
		}
	}
}

// published are the names of the keys that verifiers of new tokens are given.
func (n *testNode) published(now time.Time) (kids []string) {
	n.t.Helper()
	text, err := n.Ring().PublicSet(now, fleetName)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, ring := range append([]ect.RingKey{}, n.Ring().List()...) {
		if strings.Contains(string(text), ring.ID) {
			kids = append(kids, ring.ID)
		}
	}
	return append(kids, fmt.Sprint(strings.Count(string(text), `"kid"`)))
}

func fleetFile(t *testing.T, path string, ring encoding.TextMarshaler) {
	t.Helper()
	text, err := ring.MarshalText()
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func kidOf(ring *ect.Ring) string {
	keys := ring.List()
	return keys[len(keys)-1].ID
}

func mustRing(t *testing.T) *ect.Ring {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// P7: what one node has recorded another finds, reads and verifies, by the key of the node that has signed
// it; a parent at another node is a parent; and each publishes the keys of all.
func TestFleetReadsAllLogs(t *testing.T) {
	f := newFleet(t)
	a, b := f.join("a", mustRing(t)), f.join("b", mustRing(t))
	workflow := uuid.NewString()
	first := a.record(workflow)
	second := b.record(workflow, first.ID())
	third := a.record(workflow, second.ID())
	for _, n := range []*testNode{a, b} {
		for i, d := range []*ect.Draft{first, second, third} {
			e, kid := n.read(d)
			from := []*testNode{a, b, a}[i]
			if e.Log != from.Log().Origin() || kid != kidOf(from.Ring()) {
				t.Errorf("%d is in %s, signed with %s", i, e.Log, kid)
			}
		}
		nodes, err := n.Graph(workflow).Nodes(t.Context(), third.ID())
		if err != nil || len(nodes) != 1 || nodes[0].Level != ect.L3 || !slices.Equal(nodes[0].Parents, []string{second.ID()}) {
			t.Errorf("%+v %v", nodes, err)
		}
		if got := n.published(time.Now()); !slices.Equal(got, []string{kidOf(n.Ring()), "2"}) {
			t.Errorf("published: %q", got)
		}
		if lacks := n.MissingKeys(n.Ring()); len(lacks) > 0 {
			t.Errorf("missing: %q", lacks)
		}
		if got := len(n.KeysToSign()); got != 0 {
			t.Errorf("%d keys sign when somebody asks", got)
		}
		view, err := n.recorder().Graph(t.Context(), rollback.Query{Workflow: workflow, Scope: rollback.FullWorkflow})
		if err != nil || view.Graph.Len() != 3 {
			t.Fatalf("%v %v", view.Graph, err)
		}
		for _, d := range []*ect.Draft{first, second, third} {
			if _, there := view.Graph.Index(d.ID()); !there {
				t.Errorf("%s is not in the graph", d.ID())
			}
		}
	}
}

// Cascade 4.2.3: a rollback at one node verifies a checkpoint that another has recorded, in that one's
// tree; an alteration there is found here.
func TestFleetRollbackVerifiesOtherLogs(t *testing.T) {
	f := newFleet(t)
	a, b := f.join("a", mustRing(t)), f.join("b", mustRing(t))
	d := a.record(uuid.NewString())
	found, err := b.recorder().Checkpoint(t.Context(), d.ID())
	if err != nil || found.ID != d.ID() || !found.Own || !found.Reversible {
		t.Fatalf("%+v %v", found, err)
	}
	e, _ := b.read(d)
	rec := Recorder{Evidence: b.Evidence, EventBuilder: b.builder}
	if proven, err := rec.proven(t.Context(), &e); err != nil || !proven {
		t.Errorf("in its tree: %t %v", proven, err)
	}
	altered := e
	altered.Leaf = append([]byte{}, e.Leaf...)
	altered.Leaf[len(altered.Leaf)-1] ^= 1
	if proven, err := rec.proven(t.Context(), &altered); proven || !errors.Is(err, checkpoint.ErrTampered) {
		t.Errorf("another leaf: %t %v", proven, err)
	}
	other := a.record(uuid.NewString())
	a.read(other)
	var leaf store.Entry
	for found, err := range f.store.Scan(t.Context(), store.Prefix([]byte("le"))) {
		if err != nil {
			t.Fatal(err)
		}
		if leaf.Key == nil {
			leaf = found
		}
	}
	// Sealed again with another recording time, by somebody with the sealing keys.
	plain, err := f.sealer.Open(nil, leaf.Value, leaf.Key)
	if err != nil {
		t.Fatal(err)
	}
	at := strings.Index(string(plain), "pay")
	plain[at] = 'P'
	if _, err := f.store.Commit(t.Context(), store.Write{Key: leaf.Key, Value: f.sealer.Seal(nil, plain, leaf.Key)}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.recorder().Checkpoint(t.Context(), d.ID()); !errors.Is(err, checkpoint.ErrTampered) {
		t.Errorf("entry %d of %s was altered: %v", e.Index, e.Log, err)
	}
}

// A key is rotated on one node: another verifies what the new key signs at once, the old as long as its
// tokens live, and a stolen one no more.
func TestFleetRotation(t *testing.T) {
	f := newFleet(t)
	ring := mustRing(t)
	a, b := f.join("a", ring), f.join("b", mustRing(t))
	path := t.TempDir() + "/a.jwks"
	fleetFile(t, path, ring)
	workflow := uuid.NewString()
	before := a.record(workflow)
	_, old := b.read(before)
	rotate := func(keep time.Duration) {
		t.Helper()
		if _, err := ring.Rotate(path, ect.ES256, time.Now(), keep, a.KeysToSign()...); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(a.RecordName(t.Context(), fleetName, ring), a.SignWhenShown(t.Context(), ring)); err != nil {
			t.Fatal(err)
		}
	}
	rotate(time.Hour)
	token, err := a.builder.Sign(a.record(workflow))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := b.verify(token.Raw()); err != nil || got.Key().ID() == old {
		t.Fatalf("under the new key: %v", err)
	}
	if _, kid := b.read(before); kid != old {
		t.Errorf("signed with %s", kid)
	}
	if got := b.published(time.Now()); got[1] != "3" {
		t.Errorf("published: %q", got)
	}
	if got := b.published(time.Now().Add(2 * time.Hour)); got[1] != "2" {
		t.Errorf("published once its tokens have expired: %q", got)
	}
	rotate(0)
	eventually(t, "the stolen key is published no more", func() bool { return b.published(time.Now().Add(time.Minute))[1] == "2" })
}

// What a node has recorded and not moved when it is gone is moved by the others: once, whoever is first, and
// Once it is back they are its keys again.
func TestFleetKeysOfGoneNodes(t *testing.T) {
	f := newFleet(t)
	ring := mustRing(t)
	a, b := f.join("a", ring), f.join("b", mustRing(t))
	d := a.record(uuid.NewString())
	a.read(d)
	later := time.Now().Add(2 * keepPeer)
	if got := b.published(later); got[1] != "2" {
		t.Fatalf("published while it is there: %q", got)
	}
	a.member.Remove()
	eventually(t, "the keys of the node that is gone have an end", func() bool { return b.published(later)[1] == "1" })
	if now, records := b.published(time.Now()), b.published(time.Time{}); now[1] != "2" || records[1] != "2" {
		t.Errorf("published now %q, for records %q", now, records)
	}
	if _, kid := b.read(d); kid != kidOf(ring) {
		t.Errorf("its record is signed with %s", kid)
	}
	f.join("a", ring)
	eventually(t, "its keys have no end", func() bool { return b.published(later)[1] == "2" })
}

// Two nodes that write their keys under one name at the same time are both in the record.
func TestFleetNames(t *testing.T) {
	f := newFleet(t)
	var nodes []*testNode
	for i := range 4 {
		nodes = append(nodes, f.join(fmt.Sprint("n", i), mustRing(t)))
	}
	var group sync.WaitGroup
	for i, n := range nodes {
		group.Go(func() {
			for _, name := range []string{"spiffe://example.com/former", fleetName} {
				if err := n.RecordName(context.Background(), fmt.Sprint(name, i%2), n.Ring()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	last := f.join("last", mustRing(t))
	for i, n := range nodes {
		for _, name := range []string{fmt.Sprint("spiffe://example.com/former", i%2), fmt.Sprint(fleetName, i%2)} {
			at := slices.IndexFunc(last.names.all, func(f ect.Former) bool { return f.Name == name })
			if at < 0 || !slices.Contains(last.names.all[at].Keys, kidOf(n.Ring())) {
				t.Errorf("%s lacks the key of node %d: %+v", name, i, last.names.all)
			}
		}
	}
}

// The log of a node that is gone is pruned by the others, and what is in it is sealed anew with the others'
// newest key.
func TestFleetPrunesWhatIsLeft(t *testing.T) {
	f := newFleet(t)
	b := f.join("b", mustRing(t))
	left, err := b.openLeft(t.Context(), originPrefix+"a")
	if err != nil {
		t.Fatal(err)
	}
	const entries = 300
	for n := 0; n < entries; {
		var events []ledger.Event
		for range min(ledger.MaxEvents, entries-n) {
			events = append(events, ledger.Event{ID: fmt.Sprint("id-", n), Action: "act", Time: time.Now(), Payload: []byte("token")})
			n++
		}
		if err := left.Append(t.Context(), events); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := b.Prune(t.Context(), -time.Hour); err != nil || n != 256 {
		t.Errorf("%d pruned: %v", n, err)
	}
	theirs, err := b.Log().In(t.Context(), originPrefix+"a")
	if err != nil {
		t.Fatal(err)
	}
	if r, err := theirs.Verify(t.Context()); err != nil || r.Count != 0 || r.Pruned != 256 || r.Entries != entries-256 {
		t.Errorf("%+v %v", r, err)
	}
	path := t.TempDir() + "/keys"
	fleetFile(t, path, f.sealer)
	if _, err := f.sealer.Rotate(path, func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := b.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	ids := f.sealer.KeyIDs()
	for _, prefix := range []string{"le", "nk", "n"} {
		for found, err := range f.store.Scan(t.Context(), store.Prefix([]byte(prefix))) {
			if err != nil {
				t.Fatal(err)
			}
			if got := f.sealer.KeyOf(found.Value); got != ids[len(ids)-1] {
				t.Errorf("%q is sealed with key %d of %d", found.Key, got, ids)
			}
		}
	}
}

// Two nodes that prune and re-seal the log of one that is gone at the same time do each of it once, and the log stays
// whole.
func TestFleetPrunesAtOnce(t *testing.T) {
	f := newFleet(t)
	b, c := f.join("b", mustRing(t)), f.join("c", mustRing(t))
	left, err := b.openLeft(t.Context(), originPrefix+"a")
	if err != nil {
		t.Fatal(err)
	}
	const entries = 300
	for n := 0; n < entries; {
		var events []ledger.Event
		for range min(ledger.MaxEvents, entries-n) {
			events = append(events, ledger.Event{ID: fmt.Sprint("id-", n), Action: "act", Time: time.Now(), Payload: []byte("token")})
			n++
		}
		if err := left.Append(t.Context(), events); err != nil {
			t.Fatal(err)
		}
	}
	path := t.TempDir() + "/keys"
	fleetFile(t, path, f.sealer)
	if _, err := f.sealer.Rotate(path, func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	pruned, errs := make([]int, 2), make([]error, 4)
	var all sync.WaitGroup
	for i, n := range []*testNode{b, c} {
		all.Go(func() { pruned[i], errs[i] = n.Prune(context.Background(), -time.Hour) })
		all.Go(func() { errs[2+i] = n.Reseal(context.Background()) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	for range 2 { // what one has left to the other
		if n, err := b.Prune(t.Context(), -time.Hour); err != nil {
			t.Error(err)
		} else {
			pruned[0] += n
		}
		if err := b.Reseal(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if pruned[0]+pruned[1] != 256 {
		t.Errorf("%d pruned", pruned)
	}
	theirs, err := c.Log().In(t.Context(), originPrefix+"a")
	if err != nil {
		t.Fatal(err)
	}
	if r, err := theirs.Verify(t.Context()); err != nil || r.Count != 0 || r.Pruned != 256 || r.Entries != entries-256 {
		t.Errorf("%+v %v", r, err)
	}
	for found, err := range f.store.Scan(t.Context(), store.Prefix([]byte("le"))) {
		if got := f.sealer.KeyOf(found.Value); err != nil || got != 2 {
			t.Errorf("%q is sealed with key %d, %v", found.Key, got, err)
		}
	}
}

// Level L3 over nodes: what one node has recorded is a proven parent at another one at once.
func TestFleetParentsAreProven(t *testing.T) {
	f := newFleet(t)
	a, b := f.join("a", mustRing(t)), f.join("b", mustRing(t))
	agent, err := ect.NewIssuer("spiffe://example.com/agent", mustRing(t))
	if err != nil {
		t.Fatal(err)
	}
	token, err := agent.Issue(time.Now(), ect.Claims{Audience: []string{fleetName}, Workflow: uuid.NewString(), Action: "read"})
	if err != nil {
		t.Fatal(err)
	}
	tokens := []*ect.Token{token}
	if err := a.RecordTokens(t.Context(), tokens, tokens, Use{1}); err != nil {
		t.Fatal(err)
	}
	nodes, err := b.Graph(token.Workflow()).Nodes(t.Context(), token.ID())
	if err != nil || len(nodes) != 1 || nodes[0].Level != ect.L3 {
		t.Errorf("recorded at a, it is %+v at b: %v", nodes, err)
	}
}

// The states of a workflow that one node has in memory follow what another records in it: at once, and without
// reading the workflow again.
func TestFleetLiveStates(t *testing.T) {
	f := newFleet(t)
	a, b := f.join("a", mustRing(t)), f.join("b", mustRing(t))
	workflow, other := uuid.NewString(), uuid.NewString()
	live := func(n *testNode, name string) (size int) {
		t.Helper()
		if err := n.Live(t.Context(), n.builder, name, func(l *plan.Live) { size = l.Len() }); err != nil {
			t.Fatal(err)
		}
		return size
	}
	b.record(workflow)
	b.record(other)
	if size, n := live(b, workflow), live(b, other); size != 1 || n != 1 {
		t.Fatalf("%d and %d records", size, n)
	}
	before := b.LiveRecords()
	a.record(workflow)
	if got := b.LiveRecords(); got < before {
		t.Errorf("%d of %d records are left", got, before)
	}
	if size := live(b, workflow); size != 2 {
		t.Errorf("%d records", size)
	}
	b.live.recordedElsewhere(nil) // anything may have been recorded
	if got := b.LiveRecords(); got != 0 {
		t.Errorf("%d records are left", got)
	}
	if size := live(b, workflow); size != 2 {
		t.Errorf("%d records", size)
	}
}

// waitsFor says what a token waits for at this node that names these ids as its parents.
func (n *testNode) waitsFor(workflow string, ids ...string) (text string) {
	n.t.Helper()
	if err := n.Live(n.t.Context(), n.builder, workflow, func(l *plan.Live) {
		for _, task := range l.Holding(ids) {
			text += string(task.State) + " " + string(task.Detail)
		}
	}); err != nil {
		n.t.Error(err)
	}
	return text
}

// calls records a call of a workflow that follows from others, and returns its checkpoint and how to record its outcome.
func (n *testNode) calls(workflow string, parents ...string) (checkpoint string, ends func()) {
	n.t.Helper()
	c := &Call{
		Key: execution.Key{byte(len(parents))}, Caller: execution.CallerHash{7}, Action: "pay", Workflow: workflow, Parents: parents,
		Target: "POST api.example.com/pay", TTL: time.Hour,
	}
	d, err := n.builder.Checkpoint(time.Now(), c)
	if err == nil {
		err = n.Append(n.t.Context(), time.Now(), nil, d)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return d.ID(), func() {
		drafts, err := n.builder.Outcome(time.Now(), c, &Outcome{Checkpoint: d.ID(), Verdict: execution.Completed, Status: 200})
		if err == nil {
			err = n.Append(n.t.Context(), time.Now(), nil, drafts...)
		}
		if err != nil {
			n.t.Error(err)
		}
	}
}

// Beside calls at two nodes, each of which follows from one at the other, whoever has seen a call begin or end at one node
// finds that at both: what waits for it is held as long as it runs, and no longer. The states are those of the ledger.
func TestFleetLiveBesideCommits(t *testing.T) {
	f := newFleet(t)
	nodes := []*testNode{f.join("a", mustRing(t)), f.join("b", mustRing(t))}
	workflow := uuid.NewString()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			var before []string
			for step := range 4 {
				at, other := nodes[(i+step)%2], nodes[(i+step+1)%2]
				checkpoint, ends := at.calls(workflow, before...)
				if got := other.waitsFor(workflow, checkpoint); got != "running " {
					t.Errorf("call %d.%d: %q while it runs", i, step, got)
				}
				ends()
				for _, n := range []*testNode{other, at} {
					if got := n.waitsFor(workflow, checkpoint); got != "" {
						t.Errorf("call %d.%d: %q after its outcome was recorded", i, step, got)
					}
				}
				before = []string{checkpoint}
			}
		})
	}
	all.Wait()
	for _, n := range nodes {
		size := 0
		if err := n.Live(t.Context(), n.builder, workflow, func(l *plan.Live) { size = l.Len() }); err != nil || size != 2*8*4 {
			t.Errorf("%d records, %v", size, err)
		}
	}
}

// What a node has recorded before it is gone counts at the others, whether it has its place or not; a node that was removed
// says nothing more of states (P4).
func TestFleetLiveStatesOfAGoneNode(t *testing.T) {
	f := newFleet(t)
	a, b := f.join("a", mustRing(t)), f.join("b", mustRing(t))
	workflow := uuid.NewString()
	if got := b.waitsFor(workflow); got != "" {
		t.Fatal(got)
	}
	done, ends := a.calls(workflow)
	running, _ := a.calls(workflow, done)
	ends()
	a.member.Remove()
	if got := b.waitsFor(workflow, done); got != "" {
		t.Errorf("what is done is %q", got)
	}
	if got := b.waitsFor(workflow, running); got != "running " {
		t.Errorf("what ran when it went is %q", got)
	}
	c := f.join("c", mustRing(t)) // it reads all of it
	if got := c.waitsFor(workflow, done) + c.waitsFor(workflow, running); got != "running " {
		t.Errorf("at a new node: %q", got)
	}
	if err := a.Live(t.Context(), a.builder, workflow, func(*plan.Live) {}); err == nil {
		if err = a.Live(t.Context(), a.builder, workflow, func(*plan.Live) {}); err == nil {
			t.Error("a removed node knows the states")
		}
	}
}

// Every node hears of each event that has its place in the log of any node: once, those of one log in order, also what was
// moved for a node that is gone, and nothing from before it began.
func TestFleetHearsOfAllEvents(t *testing.T) {
	f := newFleet(t)
	var mu sync.Mutex
	heard := map[string][]string{} // ids by node
	hears := func(name string) *testNode {
		return f.open(name, mustRing(t), func(_ string, e *ledger.Event, recorded time.Time) {
			mu.Lock()
			defer mu.Unlock()
			if recorded.IsZero() || e.Workflow == "" {
				t.Errorf("%+v at %v", e, recorded)
			}
			heard[name] = append(heard[name], e.ID)
		})
	}
	knows := func(name string, want []string) {
		t.Helper()
		eventually(t, fmt.Sprint(name, " hears of ", len(want)), func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(heard[name]) >= len(want)
		})
		mu.Lock()
		defer mu.Unlock()
		if got := heard[name]; !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("%s has heard of %d events, want %d", name, len(got), len(want))
		}
	}
	ofLog := func(name string, ids []string) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		got := slices.DeleteFunc(slices.Clone(heard[name]), func(id string) bool { return !slices.Contains(ids, id) })
		if !slices.Equal(got, ids) {
			t.Errorf("%s has not heard of one log in its order", name)
		}
	}
	a := hears("a")
	early := a.record(uuid.NewString())
	a.read(early)
	b := hears("b")
	var ofA, ofB []string
	var both sync.WaitGroup
	both.Go(func() {
		for range 20 {
			ofA = append(ofA, a.record(uuid.NewString()).ID())
		}
	})
	both.Go(func() {
		for range 20 {
			ofB = append(ofB, b.record(uuid.NewString()).ID())
		}
	})
	both.Wait()
	knows("b", slices.Concat(ofA, ofB))
	knows("a", slices.Concat([]string{early.ID()}, ofA, ofB))
	ofLog("a", ofB)
	ofLog("b", ofA)

	gone := f.store.Join("gone")
	o, err := b.logOptions(originPrefix + "gone")
	if err != nil {
		t.Fatal(err)
	}
	o.Store, o.Placed = gone, nil
	log, err := ledger.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for i := range 3 {
		left = append(left, fmt.Sprint("left ", i))
		if err := log.Append(t.Context(), []ledger.Event{{ID: left[i], Workflow: "w", Action: "act", Time: time.Now(), Payload: []byte("token")}}); err != nil {
			t.Fatal(err)
		}
	}
	gone.Remove()
	knows("b", slices.Concat(ofA, ofB, left))
	knows("a", slices.Concat([]string{early.ID()}, ofA, ofB, left))
	ofLog("a", left)
	ofLog("b", left)
}

// P3: a token that one node has seen used is used for all, whatever the request was; of two uses at the same
// time one is right; and the token is a parent everywhere.
func TestFleetTokenUses(t *testing.T) {
	f := newFleet(t)
	a, b := f.join("a", mustRing(t)), f.join("b", mustRing(t))
	agent, err := ect.NewIssuer("spiffe://example.com/agent", mustRing(t))
	if err != nil {
		t.Fatal(err)
	}
	issue := func() *ect.Token {
		t.Helper()
		token, err := agent.Issue(time.Now(), ect.Claims{Audience: []string{fleetName}, Workflow: uuid.NewString(), Action: "read"})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	share := func(n *testNode, token *ect.Token, use Use) error {
		return n.RecordTokens(context.Background(), []*ect.Token{token}, []*ect.Token{token}, use)
	}
	replayed := func(err error) bool {
		var refused *ect.Error
		return errors.As(err, &refused) && refused.Code == ect.CodeReplayed
	}
	token := issue()
	if err := errors.Join(share(a, token, Use{1}), share(a, token, Use{1}), share(b, token, Use{1})); err != nil {
		t.Errorf("the same request again: %v", err)
	}
	if err := share(b, token, Use{2}); !replayed(err) {
		t.Errorf("another request at another node: %v", err)
	}
	if status, err := b.UseStatus(t.Context(), token, Use{2}); status != Other || err != nil {
		t.Errorf("%v %v", status, err)
	}
	nodes, err := b.Graph(token.Workflow()).Nodes(t.Context(), token.ID())
	if err != nil || len(nodes) != 1 || nodes[0].Level != ect.L3 {
		t.Errorf("as a parent: %+v %v", nodes, err)
	}
	for range 20 {
		token := issue()
		results := make(chan error, 2)
		for i, n := range []*testNode{a, b} {
			go func() { results <- share(n, token, Use{byte(i)}) }()
		}
		first, second := <-results, <-results
		if first == nil == (second == nil) || !replayed(errors.Join(first, second)) {
			t.Errorf("at the same time: %v and %v", first, second)
		}
	}
}

// What other nodes can show has to be signed; and a node that opens a store for the first time may have no
// key file yet, but one that has signed must have it.
func TestFleetSigns(t *testing.T) {
	f := newFleet(t)
	member := f.store.Join("a")
	if signed, err := Signed(t.Context(), member, f.sealer); err != nil || signed {
		t.Errorf("a new node: %t %v", signed, err)
	}
	member.Remove()
	a := f.join("a", mustRing(t))
	e, _ := a.read(a.record(uuid.NewString()))
	if e.Header != nil {
		t.Error("it is to be signed when somebody asks")
	}
	for name, want := range map[string]bool{"a": true, "b": false} {
		other := f.store.Join(name)
		if signed, err := Signed(t.Context(), other, f.sealer); err != nil || signed != want {
			t.Errorf("%s: %t %v", name, signed, err)
		}
		other.Remove()
	}
}

// Entries of equal calls without a key stand beside the names of the gateway; whatever hash they have, none is
// taken for the keys of a node, and none has these read again.
func TestFleetKeysAreApartFromEqualCalls(t *testing.T) {
	f := newFleet(t)
	other := f.store.Join("other")
	defer other.Close()
	for first := range 256 { // the group's hash
		key := append([]byte{'n', byte(first)}, make([]byte, 60)...)
		if _, err := other.Commit(t.Context(), store.Write{Key: key, Value: []byte{1}}); err != nil {
			t.Fatal(err)
		}
	}
	a := f.join("a", mustRing(t))
	if err := a.readPeers(t.Context()); err != nil {
		t.Error(err)
	}
	if err := a.retirePeers(t.Context()); err != nil {
		t.Error(err)
	}
}

// A gateway that had the store alone, or another name, has kept the head of its log beside its keys. That log is
// compared with it, and then the head of the log under the new name takes its place.
func TestFleetHeadUnderAnotherName(t *testing.T) {
	f, ring := newFleet(t), mustRing(t)
	file := filepath.Join(t.TempDir(), "identity.head")
	lives := []func() store.Store{
		func() store.Store { return f.store },
		func() store.Store { return f.store.Join("a") },
		func() store.Store { return f.store.Join("b") },
	}
	for i, open := range lives {
		st := open()
		before := copyFleet(t, f.store)
		e, err := Open(t.Context(), Options{Store: st, Sealer: f.sealer, Node: "node-1", Ring: ring, HeadFile: file})
		if err != nil {
			t.Fatalf("life %d: %v", i, err)
		}
		if err := e.RecordName(t.Context(), fleetName, ring); err != nil {
			t.Fatal(err)
		}
		n := &testNode{Evidence: e, t: t}
		if n.builder, err = e.EventBuilder(fleetName); err != nil {
			t.Fatal(err)
		}
		n.record(uuid.NewString())
		if err := e.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(text), e.Log().Origin()+"\n1\n") {
			t.Errorf("life %d has left %q, %v", i, text, err)
		}
		if m, is := st.(*memory.Member); is {
			m.Remove()
		}
		// An older copy of the store is not that log, whatever the name of the next life.
		older := before.Join("c")
		if _, err := Open(t.Context(), Options{Store: older, Sealer: f.sealer, Ring: ring, HeadFile: file}); !errors.Is(err, ledger.ErrTampered) {
			t.Errorf("after life %d, an older copy: %v", i, err)
		}
	}
}

func copyFleet(t *testing.T, from *memory.Store) *memory.Store {
	t.Helper()
	to := memory.New(memory.Options{})
	for e, err := range from.Scan(t.Context(), store.Range{}) {
		if err == nil {
			_, err = to.Commit(t.Context(), store.Write{Key: e.Key, Value: e.Value, Expires: e.Expires})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// Whoever waits for what other nodes have in their logs gets all of it first.
func TestFleetHeard(t *testing.T) {
	f := newFleet(t)
	var mu sync.Mutex
	heard := map[string]bool{}
	a := f.open("a", mustRing(t), func(_ string, e *ledger.Event, _ time.Time) {
		mu.Lock()
		defer mu.Unlock()
		heard[e.ID] = true
	})
	b := f.join("b", mustRing(t))
	for range 50 {
		d, known := b.record(uuid.NewString()), make(chan bool, 1)
		b.read(d)
		a.Heard(func() {
			mu.Lock()
			defer mu.Unlock()
			known <- heard[d.ID()]
		})
		select {
		case is := <-known:
			if !is {
				t.Fatal("an event that was recorded before has not been heard")
			}
		case <-time.After(fleetPatience):
			t.Fatal("nothing is heard")
		}
	}
	alone := false
	if b.Heard(func() { alone = true }); !alone { // it passes nothing on
		t.Error("who hears of nobody waits")
	}
}

// C-3.4.2-c, ADR 0138: a chain of calls that are in the logs of two nodes is one cascade for a feed that gets its
// failures in any order, twice, and before the log that has the failed call.
func TestFleetFeedsAChain(t *testing.T) {
	f := newFleet(t)
	nodes := []*testNode{f.join("a", mustRing(t)), f.join("b", mustRing(t))}
	n := nodes[0]
	begin := func(at *testNode, workflow, to string, parents ...string) (*Call, string) {
		c := &Call{
			Key: execution.Key{1}, Caller: execution.CallerHash{7}, Action: "ask", Workflow: workflow, Parents: parents, Target: to, Guard: to,
			Audience: []string{"spiffe://example.com/agent/" + to}, RollbackURI: "https://g.example/rollback", TTL: time.Hour,
		}
		d, err := at.builder.Checkpoint(time.Now(), c)
		if err == nil {
			err = at.Append(t.Context(), time.Now().Add(time.Hour), nil, d)
		}
		if err != nil {
			t.Fatal(err)
		}
		return c, d.ID()
	}
	fail := func(at *testNode, c *Call, checkpoint string) *ledger.Entry {
		drafts, err := at.builder.Outcome(time.Now(), c, &Outcome{Checkpoint: checkpoint, Verdict: execution.Completed, Cause: execution.CauseStatus, Status: 500})
		if err == nil {
			err = at.Append(t.Context(), time.Now().Add(time.Hour), nil, drafts...)
		}
		if err != nil {
			t.Fatal(err)
		}
		e, _ := n.read(drafts[len(drafts)-1])
		return &e
	}
	for round, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2, 1}, {2, 0, 0, 1}, {1, 2, 0}, {0, 2, 1}} {
		for _, early := range []bool{false, true} {
			settings, err := cascade.Settings{}.Check()
			if err != nil {
				t.Fatal(err)
			}
			feed := &CascadeFeed{
				Detector: cascade.New(settings), Pool: func(target string) string { return target },
				Recorder: func() (Recorder, bool) { return Recorder{Evidence: n.Evidence, EventBuilder: n.builder}, true },
			}
			var last cascade.Finding
			take := func(e *ledger.Entry) {
				changes, err := feed.Take(t.Context(), e)
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range changes {
					last = c.Finding
				}
			}
			workflow := uuid.NewString()
			if early { // the workflow is followed since something else has failed in it
				c, checkpoint := begin(n, workflow, "another")
				take(fail(n, c, checkpoint))
			}
			at := func(i int) *testNode { return nodes[(round+i)%2] }
			outer, first := begin(at(0), workflow, "outer")
			middle, second := begin(at(1), workflow, "middle", first)
			inner, third := begin(at(2), workflow, "inner", second)
			failures := []*ledger.Entry{fail(at(2), inner, third), fail(at(1), middle, second), fail(at(0), outer, first)}
			for _, i := range order {
				take(failures[i])
			}
			if n := feed.Detector.Open(); n != 1 || last.Failed != 3 || last.Root.Pool != "inner" || last.Pattern != cascade.DepthFirst {
				t.Errorf("%v, followed before: %v: %d open, %+v", order, early, n, last)
			}
		}
	}
}
