package evidence_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

type nodeDoc struct {
	JTI, State, Detail, Outcome, Iss, Severity, Worst, Entry, Log string
	Event                                                         string
	Answer                                                        int    `json:"answer_status"`
	WorstSeverity                                                 string `json:"worst_severity"`
	Index                                                         int64
	Recorded, Expires                                             time.Time
	Reversible                                                    *bool
	Guards                                                        []string
	Missing                                                       []string `json:"missing_parents"`
}

type workflowDoc struct {
	WID           string
	Status        string
	Stated        string `json:"stated_status"`
	Truncated     bool
	Tasks         map[string]int
	Recovery      []string `json:"recovery_points"`
	Roots, Leaves []string
	Nodes         []nodeDoc
	Edges         []struct{ From, To, Kind string }
}

// A-node-states: the gateway's and the agents' tokens together make the graph, with the
// state of every node.
func TestWorkflow(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	done := g.add(gateway, flow, "pay", ofCall("completed", callerKey), task, ckpt)
	next := g.add(bob, flow, "next", nil, task)
	failed := g.add(bob, flow, "atd:error", ext().Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "timeout"), next)
	g.add(mallory, foreign, "elsewhere", nil)
	end := g.add(alice, flow, "workflow_complete", ext().Text(ect.MemberTerminalStatus, "success"))

	var doc workflowDoc
	got := g.get("workflows/"+flow, asAlice)
	got.private()
	got.read(200, &doc)
	if doc.WID != flow || doc.Status != "partial" || doc.Stated != "success" || doc.Truncated || fmt.Sprint(doc.Tasks) != "map[done:1 failed:1]" {
		t.Errorf("%+v", doc)
	}
	if !slices.Equal(doc.Recovery, []string{ckpt.ID()}) || len(doc.Roots) != 2 || doc.Roots[0] != task.ID() {
		t.Errorf("recovery points %v, roots %v", doc.Recovery, doc.Roots)
	}
	if !slices.Equal(sorted(doc.Leaves), sorted([]string{done.ID(), failed.ID(), end.ID()})) {
		t.Errorf("leaves %v", doc.Leaves)
	}
	states := map[string]string{
		task.ID(): "done", ckpt.ID(): "done", done.ID(): "done", next.ID(): "failed", failed.ID(): "", end.ID(): "",
	}
	if len(doc.Nodes) != len(states) {
		t.Fatalf("%d nodes", len(doc.Nodes))
	}
	for _, n := range doc.Nodes {
		if want, ok := states[n.JTI]; !ok || n.State != want || n.Log != origin || n.Recorded.IsZero() {
			t.Errorf("%+v, want %s", n, want)
		}
		switch n.JTI {
		case done.ID():
			if n.Outcome != "completed" || n.Answer != 201 || n.Index != 2 {
				t.Errorf("%+v", n)
			}
			r := g.get(n.Entry[len(basePath):], asAlice)
			if r.Code != 200 {
				t.Errorf("the entry: %d", r.Code)
			}
		case ckpt.ID():
			if n.Reversible == nil || !*n.Reversible || !n.Expires.Equal(ckpt.IssuedAt().Add(time.Hour)) || len(n.Guards) != 2 || n.Event != "checkpoint" {
				t.Errorf("%+v", n)
			}
		case next.ID():
			if n.WorstSeverity != "critical" || n.Reversible != nil {
				t.Errorf("%+v", n)
			}
		case failed.ID():
			if n.Event != "error" || n.Severity != "critical" {
				t.Errorf("%+v", n)
			}
		}
	}
	kinds := make(map[string]int)
	for _, e := range doc.Edges {
		kinds[e.Kind]++
	}
	if fmt.Sprint(kinds) != "map[caused:2 checkpoint_of:1 error_of:1 settles:1]" {
		t.Errorf("edges %v", kinds)
	}
}

// P3 and ADR 0023: who took part without a token sees what is linked to its own calls,
// since strangers may use the same name; and so does the issuer of a token, who can name
// any workflow in it (cascade 6.1).
func TestCallersSeeWhatIsLinked(t *testing.T) {
	g := newGate(t)
	other := [16]byte{7}
	outer := g.add(gateway, flow, "checkpoint", ofCall("", callerKey))
	inner := g.add(gateway, flow, "checkpoint", ofCall("", other), outer)
	stranger := g.add(gateway, flow, "checkpoint", ofCall("", other))
	theirs := g.add(gateway, flow, "pay", ofCall("completed", other), stranger)
	var doc workflowDoc
	g.get("workflows/"+flow, asCaller).read(200, &doc)
	if len(doc.Nodes) != 2 || doc.Nodes[0].JTI != outer.ID() || doc.Nodes[1].JTI != inner.ID() || len(doc.Edges) != 1 {
		t.Errorf("%+v", doc)
	}
	for token, status := range map[*ect.Token]int{outer: 200, inner: 200, stranger: 404, theirs: 404} {
		for _, path := range []string{"ledger/entries?jti=" + token.ID(), "ledger/entries?jti=" + token.ID() + "&wid=" + flow} {
			if got := g.get(path, asCaller); got.Code != status {
				t.Errorf("%s: %d, want %d", path, got.Code, status)
			}
		}
	}
	same(t, "a stranger's entry", g.get("ledger/entries/99", asCaller), g.get("ledger/entries/2", asCaller))
	doc = workflowDoc{}
	g.get("workflows/"+flow, router.Reader{Caller: other}).read(200, &doc)
	if len(doc.Nodes) != 4 {
		t.Errorf("%+v", doc)
	}
	g.add(alice, flow, "act", nil)
	doc = workflowDoc{}
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if len(doc.Nodes) != 1 {
		t.Errorf("%+v", doc)
	}
	g.add(alice, flow, "act", nil, inner)
	doc = workflowDoc{}
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if len(doc.Nodes) != 4 {
		t.Errorf("%+v", doc)
	}
}

// P3: who has reported an error may read that, and has no other part in the workflow.
func TestAnErrorGivesNoPart(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	asBob := router.Reader{Issuer: bob}
	var doc recordedDoc
	g.post(asBob, g.token(bob, anError(task)).Raw()).read(201, &doc)
	g.get(strings.TrimPrefix(doc.Recorded[0].Entry, basePath), asBob).read(200, &struct{}{})
	g.get("workflows/"+flow, asBob).refused(404, "workflow-unknown", "")
	g.get("ledger/entries/0", asBob).refused(404, "entry-unknown", "")
	g.get("ledger/entries?jti="+task.ID()+"&wid="+flow, asBob).refused(404, "entry-unknown", "")
}

// P6: an outcome is believed of the gateway alone.
func TestAgentsDoNotSettle(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	g.add(mallory, flow, "pay", ofCall("completed", callerKey), task, ckpt)
	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	for _, n := range doc.Nodes {
		if n.State == "done" || n.Iss == mallory && n.Answer != 0 {
			t.Errorf("%+v", n)
		}
	}
}

// P6: states are not shown of a workflow that was not read to its end.
func TestTruncatedWorkflow(t *testing.T) {
	g := newGate(t, func(o *Ledger) { o.MaxNodes = 3 })
	first := g.add(alice, flow, "act", nil)
	for range 2 {
		g.add(alice, flow, "act", nil, first)
	}
	var whole, doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &whole)
	if whole.Truncated || len(whole.Nodes) != 3 || whole.Status != "running" {
		t.Errorf("%+v", whole)
	}
	g.add(alice, flow, "act", nil, first)
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if !doc.Truncated || len(doc.Nodes) != 3 || doc.Status != "" || doc.Tasks != nil || doc.Recovery != nil {
		t.Errorf("%+v", doc)
	}
	for _, n := range doc.Nodes {
		if n.State != "" {
			t.Errorf("%+v", n)
		}
	}
}

// A-node-states-b, A-topological-order-d: a workflow whose start names a plan is shown with it, from the
// records alone, to who takes part in that (P3), with what it says of its nodes (A-resource-claim-format-a).
// States are there only if all was read (P6): also where its tokens are too many to be listed.
func TestWorkflowShowsItsPlan(t *testing.T) {
	d, err := plan.Parse([]byte(`{"wf_id": "trip", "nodes": [{"id": "hold", "label": "hold_budget", "reversible": true, "resource_hints": {"priority": "high", "cpu": "0.5"}}, {"id": "pay", "hitl_required": true}, {"id": "mail"}], "edges": [{"from": "hold", "to": "pay"}, {"from": "pay", "to": "mail"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, func(o *Ledger) {
		o.Plans, o.MaxNodes, o.MaxPlanned = map[string]*plan.Descriptor{"trip": d}, 4, 10
	})
	type page struct {
		workflowDoc
		LeftOut int `json:"left_out"`
		Plan    *plan.Progress
	}
	var doc page
	read := func(who router.Reader) *plan.Progress {
		t.Helper()
		doc = page{}
		g.get("workflows/"+flow, who).read(200, &doc)
		return doc.Plan
	}
	named := func(name string) *ect.ExtBuilder { return ext().Text(ect.MemberWorkflowName, name) }
	task := g.add(alice, flow, "act", ext().Text("atd.node", "hold"))
	if p := read(asAlice); p != nil {
		t.Errorf("without a start: %+v", p)
	}
	g.add(alice, flow, "workflow_start", named("trip"), task)
	g.add(alice, flow, "workflow_start", named("other"), task) // the first one counts
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	g.add(gateway, flow, "act", ofCall("completed", callerKey), task, ckpt)
	g.add(alice, flow, "look_around", nil, task)
	p := read(asAlice)
	if p == nil || p.PlanID != "trip" || p.Version != d.Version() || len(p.Others) != 1 ||
		fmt.Sprintf("%s %s %v %v", p.Nodes[0].State, p.Nodes[1].State, p.Nodes[1].Ready, p.Nodes[2].Ready) != "done pending true false" || p.Nodes[2].Holds[0].Node != "pay" {
		t.Errorf("%+v", p)
	}
	if doc.Truncated || doc.LeftOut != 2 || len(doc.Nodes) != 4 || doc.Status != "running" || doc.Nodes[0].State != "done" {
		t.Errorf("%+v", doc)
	}
	for _, e := range doc.Edges { // they have both ends
		if !slices.ContainsFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == e.From }) || !slices.ContainsFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == e.To }) {
			t.Errorf("%+v", e)
		}
	}
	said := func(p *plan.Progress) string {
		return fmt.Sprintf("%v %v %+v %v", *p.Nodes[0].Reversible, p.Nodes[1].HITLRequired, *p.Nodes[0].Hints, p.Nodes[2].Hints)
	}
	if got := said(p); got != `true true {Priority:high TimeoutS:0 CPU:0.5 MemoryMB:0 GPU: NetworkMbps:0} <nil>` {
		t.Error(got)
	}
	// A stranger who uses the name changes nothing of it, and sees nothing: operators see both, and the initiator's plan.
	g.add(bob, flow, "pay", nil)
	g.add(bob, flow, "look", nil)
	for name, who := range map[string]router.Reader{"alice": asAlice, "an operator": {Operator: true}} {
		p := read(who)
		if p == nil || fmt.Sprintf("%s %s %v %d", p.Nodes[0].State, p.Nodes[1].State, p.Nodes[1].Ready, len(p.Others)) != "done pending true 1" || doc.Truncated {
			t.Errorf("%s: %+v", name, p)
		}
		if want := map[string]int{"alice": 2, "an operator": 4}[name]; doc.LeftOut != want {
			t.Errorf("%s: %d tokens are left out, want %d", name, doc.LeftOut, want)
		}
	}
	for range 4 {
		g.add(alice, flow, "act", nil, task)
	}
	p = read(router.Reader{Operator: true})
	if p == nil || !p.Truncated || p.Status != "" || p.Nodes[0].State != "" || p.Nodes[1].Ready || len(p.Nodes[1].After) != 1 || said(p) != said(d.Outline()) || !doc.Truncated || len(doc.Nodes) != 4 {
		t.Errorf("a part was read: %+v", doc)
	}
}

// A workflow longer than a page of the ledger is read whole.
func TestLongWorkflow(t *testing.T) {
	g := newGate(t)
	const size = 2*ledger.MaxPage + 5
	var batch []ledger.Event
	for i := range size {
		batch = append(batch, ledger.Event{ID: fmt.Sprint(i), Workflow: flow, Issuer: alice, Action: "act", Payload: []byte("token")})
		if len(batch) == ledger.MaxEvents || i == size-1 {
			if err := g.log.Append(t.Context(), batch); err != nil {
				t.Fatal(err)
			}
			batch = nil
		}
	}
	if _, err := g.log.Lookup(t.Context(), flow, fmt.Sprint(size-1)); err != nil {
		t.Fatal(err)
	}
	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if len(doc.Nodes) != size || doc.Truncated {
		t.Errorf("%d nodes, truncated %v", len(doc.Nodes), doc.Truncated)
	}
}

// What the tokens of all three vocabularies say reaches the graph.
func TestWorkflowInOtherVocabularies(t *testing.T) {
	g := newGate(t)
	read := func() (doc workflowDoc) {
		t.Helper()
		g.get("workflows/"+flow, asAlice).read(200, &doc)
		return doc
	}
	put := func(v ect.Vocabulary, action string, ext *ect.ExtBuilder, parents ...*ect.Token) *ect.Token {
		token := g.token(alice, ect.Claims{Workflow: flow, Action: action, Ext: ext, Parents: idsOf(parents), Vocabulary: v})
		g.put(events(token)...)
		return token
	}
	task := put(ect.Cascade, "act", nil)
	ckpt := put(ect.ATD, "checkpoint", checkpointToken(), task)
	put(ect.AERR, "checkpoint", ext().Bool(ect.MemberReversible, true)) // nobody promises to keep it
	if doc := read(); !slices.Equal(doc.Recovery, []string{ckpt.ID()}) {
		t.Errorf("recovery points %v", doc.Recovery)
	}
	put(ect.AERR, "error", ext().Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout"), ckpt)
	if doc := read(); doc.Tasks["failed"] != 1 {
		t.Errorf("%v", doc.Tasks)
	}
	// A name that is only read.
	payload := fmt.Sprintf(`{"jti":%q,"wid":%q,"exec_act":"aerr:rollback_escalated","par":[],"ext":{"aerr.checkpoint_id":%q}}`, nowhere, flow, strings.ToUpper(ckpt.ID()))
	g.put(ledger.Event{
		ID: nowhere, Workflow: flow, Action: "aerr:rollback_escalated", Issuer: alice,
		Payload: []byte(base64.RawURLEncoding.EncodeToString([]byte(payload))),
	})
	if doc := read(); doc.Status != "escalated" || doc.Tasks["escalated"] != 1 {
		t.Errorf("%+v", doc)
	}
	var entry entryDoc
	g.get("ledger/entries?jti="+nowhere, asAlice).read(200, &entry)
	if entry.Signed || entry.Level != "L1" || entry.Token == "" {
		t.Errorf("%+v", entry)
	}
	put(ect.ATD, "rollback_complete", ext().Text(ect.MemberCheckpointID, ckpt.ID()).Text(ect.MemberStatus, "completed"))
	if doc := read(); doc.Tasks["rolled_back"] != 1 || len(doc.Recovery) != 0 {
		t.Errorf("%+v", doc)
	}
}

// The nodes of a fleet have a log each: a workflow is read over all of them in the
// order of recording, and every node has heads, entries and proofs of each log.
func TestWorkflowOverTwoLogs(t *testing.T) {
	g := newGate(t)
	other := g.open("a.gateway.example/ledger")
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	g.add(gateway, flow, "pay", ofCall("in_doubt", callerKey), task, ckpt)
	last := g.token(gateway, ect.Claims{Workflow: flow, Action: "pay", Ext: ofCall("completed", callerKey), Parents: []string{task.ID(), ckpt.ID()}})
	if err := other.Append(t.Context(), events(last)); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Lookup(t.Context(), flow, last.ID()); err != nil {
		t.Fatal(err)
	}
	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if doc.Status != "success" || doc.Tasks["done"] != 1 || len(doc.Nodes) != 4 || doc.Nodes[3].JTI != last.ID() || doc.Nodes[3].Log != "a.gateway.example/ledger" {
		t.Errorf("%+v", doc)
	}
	var entry entryDoc
	g.get("ledger/entries?jti="+last.ID(), asAlice).read(200, &entry)
	if entry.Log != "a.gateway.example/ledger" || entry.Token != last.Raw() {
		t.Errorf("%+v", entry)
	}
	if head, err := entry.Receipt.Check(entry.Leaf, "a.gateway.example/ledger", g.keys); err != nil || head.Size != 1 {
		t.Errorf("%+v %v", head, err)
	}

	// Without a name a request is about the log of the node that is asked; an index counts in its log.
	const named = "log=a.gateway.example%2Fledger"
	type headDoc struct {
		Origin, Key, Note string
		Size              int64
		Altered           bool
		Logs              []headDoc
	}
	var head, theirs headDoc
	g.get("ledger/head", asAlice).read(200, &head)
	if head.Origin != origin || head.Size != 3 || len(head.Logs) != 1 || head.Logs[0].Origin != "a.gateway.example/ledger" || head.Logs[0].Size != 1 {
		t.Errorf("%+v", head)
	}
	g.get("ledger/head?"+named, asAlice).read(200, &theirs)
	if !reflect.DeepEqual(theirs, head.Logs[0]) || theirs.Key == "" {
		t.Errorf("%+v", theirs)
	}
	if _, err := ledger.ParseHead([]byte(theirs.Note), theirs.Origin, g.keys); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{"ledger/entries/0": task.ID(), "ledger/entries/0?" + named: last.ID()} {
		g.get(path, asAlice).read(200, &entry)
		if entry.JTI != want {
			t.Errorf("%s: %s", path, entry.JTI)
		}
	}
	g.get("ledger/entries/1?"+named, asAlice).refused(404, "entry-unknown", "")
	g.get("ledger/proof?index=0&"+named, asAlice).read(200, &head)
	g.get("ledger/consistency?old=1&"+named, asAlice).read(200, &head)
	g.get("ledger/proof?index=1&"+named, asAlice).refused(404, "entry-unknown", "")
	for _, path := range []string{"ledger/head", "ledger/entries/0", "ledger/proof?index=0", "ledger/consistency?old=1"} {
		separator := map[bool]string{true: "&", false: "?"}[strings.Contains(path, "?")]
		g.get(path+separator+"log=nobody", asAlice).refused(400, "parameter-invalid", "")
		g.get(path+separator+"log=", asAlice).refused(400, "parameter-invalid", "")
	}

	// A log that was altered does not hide the others.
	for found, err := range g.store.Scan(t.Context(), store.Prefix([]byte("lh"))) {
		if err != nil {
			t.Fatal(err)
		}
		if bytes.HasPrefix(found.Value, []byte("a.gateway")) {
			note := bytes.Replace(found.Value, []byte("\n1\n"), []byte("\n2\n"), 1)
			if _, err := g.store.Commit(t.Context(), store.Write{Key: found.Key, Value: note}); err != nil {
				t.Fatal(err)
			}
		}
	}
	head = headDoc{}
	g.get("ledger/head", asAlice).read(200, &head)
	if head.Origin != origin || len(head.Logs) != 1 || !head.Logs[0].Altered || head.Logs[0].Size != 0 {
		t.Errorf("%+v", head)
	}
}

// recorder records calls as the gateway does.
type recorder struct {
	*gate
	ledgerEvents *Evidence
	builder      *EventBuilder
}

func newRecorder(t *testing.T) *recorder {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	recorded, err := Open(t.Context(), Options{Store: memory.New(memory.Options{}), Sealer: seal.Generate(), Node: "n", Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := recorded.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	builder, err := recorded.EventBuilder(gateway)
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, func(o *Ledger) { o.Log, o.HeadKey = recorded.Log(), recorded.HeadKeyOf })
	g.log = recorded.Log()
	return &recorder{g, recorded, builder}
}

// append records drafts and waits for their places.
func (g *recorder) append(drafts ...*ect.Draft) {
	g.t.Helper()
	if err := g.ledgerEvents.Append(g.t.Context(), time.Now(), nil, drafts...); err != nil {
		g.t.Fatal(err)
	}
	for _, d := range drafts {
		if _, err := g.log.Lookup(g.t.Context(), d.Workflow(), d.ID()); err != nil {
			g.t.Fatal(err)
		}
	}
}

// claim announces a call and gives the id of its checkpoint.
func (g *recorder) claim(key byte, workflow string, parents ...string) (*Call, string) {
	g.t.Helper()
	c := &Call{
		Key: execution.Key{key}, Caller: callerKey, Action: "pay", Workflow: WorkflowID(workflow), Parents: parents,
		Target: "POST example.com/pay", RollbackURI: "https://gateway.example/.well-known/cascade/rollback", TTL: time.Hour,
	}
	draft, err := g.builder.Checkpoint(time.Now(), c)
	if err != nil {
		g.t.Fatal(err)
	}
	g.append(draft)
	return c, draft.ID()
}

func (g *recorder) settle(c *Call, o Outcome) {
	g.t.Helper()
	drafts, err := g.builder.Outcome(time.Now(), c, &o)
	if err != nil {
		g.t.Fatal(err)
	}
	g.append(drafts...)
}

// tasks are the states of a workflow's tasks.
func (g *recorder) tasks(workflow, want string) workflowDoc {
	g.t.Helper()
	var doc workflowDoc
	g.get("workflows/"+workflow, asCaller).read(http.StatusOK, &doc)
	var got []string
	for _, state := range []string{"running", "done", "failed"} {
		for range doc.Tasks[state] {
			got = append(got, state)
		}
	}
	if strings.Join(got, " ") != want {
		g.t.Errorf("tasks %v, want %s", doc.Tasks, want)
	}
	return doc
}

// A-node-states-d and P6: the states that follow from what the gateway really records
// (ADR 0023), from the claim to a doubt that is settled.
func TestStatesOfWhatTheGatewayRecords(t *testing.T) {
	g := newRecorder(t)
	token := g.add(alice, flow, "act", nil)
	c, id := g.claim(1, flow, token.ID())
	g.tasks(flow, "running")
	g.settle(c, Outcome{Checkpoint: id, Verdict: execution.InDoubt, Cause: execution.CauseDeadline})
	doc := g.tasks(flow, "failed")
	for _, n := range doc.Nodes {
		if n.JTI == token.ID() && (n.Detail != "in_doubt" || n.WorstSeverity != "critical") {
			t.Errorf("%+v", n)
		}
	}
	g.settle(c, Outcome{Checkpoint: id, Verdict: execution.Completed, By: "operator"})
	g.tasks(flow, "done")
	// An answer that says that it failed.
	other := g.add(alice, flow, "act", nil)
	c, id = g.claim(2, flow, other.ID())
	g.settle(c, Outcome{Checkpoint: id, Verdict: execution.Completed, Status: 500})
	g.tasks(flow, "done failed")
}

// A call without tokens in a workflow that has a name, another one within it, and one
// that was made again.
func TestNestedCallsWithoutTokens(t *testing.T) {
	g := newRecorder(t)
	const name = "nightly billing"
	path := "nightly%20billing"
	outer, outerID := g.claim(1, name)
	inner, innerID := g.claim(2, name, outerID)
	g.tasks(path, "running running")
	g.settle(inner, Outcome{Checkpoint: innerID, Verdict: execution.Released, Cause: execution.CauseNotSent})
	g.tasks(path, "running failed")
	inner, innerID = g.claim(2, name, outerID)
	g.tasks(path, "running running")
	g.settle(inner, Outcome{Checkpoint: innerID, Verdict: execution.Completed, Status: 201})
	g.tasks(path, "running done")
	g.settle(outer, Outcome{Checkpoint: outerID, Verdict: execution.Completed, Status: 200})
	doc := g.tasks(path, "done done")
	if doc.Status != "success" || doc.WID != WorkflowID(name) {
		t.Errorf("%+v", doc)
	}
	var entry entryDoc
	g.get("ledger/entries?wid="+path+"&jti="+outerID, asCaller).read(http.StatusOK, &entry)
	if entry.JTI != outerID || !entry.Signed {
		t.Errorf("%+v", entry)
	}
	g.get("workflows/"+path, asMallory).refused(404, "workflow-unknown", "")
}

// Where tokens are believed, a call without one has a workflow that is made of its name
// even where that is a UUID; its caller asks by the name.
func TestWorkflowOfANameThatTokensUseToo(t *testing.T) {
	g := newRecorder(t)
	g.add(alice, flow, "act", nil)
	c := &Call{
		Key: execution.Key{1}, Caller: callerKey, Action: "pay", Workflow: NamedWorkflowID(flow), Target: "POST example.com/pay",
		RollbackURI: "https://gateway.example/.well-known/cascade/rollback", TTL: time.Hour,
	}
	draft, err := g.builder.Checkpoint(time.Now(), c)
	if err != nil {
		t.Fatal(err)
	}
	g.append(draft)
	doc := g.tasks(flow, "running")
	if doc.WID != NamedWorkflowID(flow) || len(doc.Nodes) != 1 {
		t.Errorf("%+v", doc)
	}
	var theirs workflowDoc
	g.get("workflows/"+flow, asAlice).read(http.StatusOK, &theirs)
	if theirs.WID != flow || len(theirs.Nodes) != 1 {
		t.Errorf("%+v", theirs)
	}
	g.get("ledger/entries?wid="+flow+"&jti="+draft.ID(), asCaller).read(http.StatusOK, &struct{}{})
	g.get("ledger/entries?wid="+flow+"&jti="+draft.ID(), asAlice).refused(404, "entry-unknown", "")
}

// A-node-states-f and P6: what the tokens of a rollback make of the checkpoints that it
// has undone, and of those that it has not, whatever is said of the rollback as a whole.
func TestStatesOfARollback(t *testing.T) {
	g := newRecorder(t)
	var checkpoints []string
	for key := range byte(4) {
		c, id := g.claim(key+1, flow)
		g.settle(c, Outcome{Checkpoint: id, Verdict: execution.Completed, Status: 200})
		checkpoints = append(checkpoints, id)
	}
	r := &rollback.Rollback{
		ID: uuid.NewString(), Checkpoint: checkpoints[0], Workflow: flow, Scope: rollback.SubDAG, Reason: "it was wrong",
		Status: rollback.Partial, Journal: rollback.Journal{Mixed: true}, Steps: []rollback.Step{
			{Checkpoint: checkpoints[0], Agent: gateway, Status: rollback.Completed, Attempts: 1},
			{Checkpoint: checkpoints[1], Agent: alice, Status: rollback.Completed},
			{Checkpoint: checkpoints[2], Agent: alice, Status: rollback.Failed},
			{Checkpoint: checkpoints[3], Agent: bob, Status: rollback.Escalated},
		},
	}
	must := func(d *ect.Draft, err error) *ect.Draft {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	now := time.Now()
	want := func(what string, states ...string) {
		t.Helper()
		var doc workflowDoc
		g.get("workflows/"+flow, asCaller).read(http.StatusOK, &doc)
		for i, id := range checkpoints {
			at := slices.IndexFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == id })
			if at < 0 {
				t.Fatalf("%s: there is no %s", what, id)
			}
			n := doc.Nodes[at]
			if got := n.State + " " + n.Detail; got != states[i] {
				t.Errorf("%s: checkpoint %d is %q, want %q", what, i, got, states[i])
			}
			for _, task := range n.Guards {
				of := doc.Nodes[slices.IndexFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == task })]
				if got := of.State + " " + of.Detail; got != states[i] {
					t.Errorf("%s: the call of checkpoint %d is %q, want %q", what, i, got, states[i])
				}
			}
		}
	}
	start := must(g.builder.RollbackStart(now, r, checkpoints[0]))
	r.Start = start.ID()
	g.append(start)
	want("asked for", "done rollback_requested", "done ", "done ", "done ")
	g.append(
		must(g.builder.Compensate(now, r, &r.Steps[0])), must(g.builder.RollbackStep(now, r, &r.Steps[1])),
		must(g.builder.RollbackStep(now, r, &r.Steps[2])), must(g.builder.RollbackStep(now, r, &r.Steps[3])),
	)
	after := []string{"rolled_back ", "rolled_back ", "done rollback_failed", "escalated compensation_required"}
	want("every step recorded", after...)
	// An error of the rollback is none of the call, which was done.
	g.append(must(g.builder.RollbackError(now, r, checkpoints[2], "timeout", "The rollback was not done in time.")))
	g.append(must(g.builder.RollbackComplete(now, r)))
	want("the whole recorded", after...)

	// Another one, which puts right what the first has not.
	again := *r
	again.ID, again.Checkpoint, again.Status, again.Start = uuid.NewString(), checkpoints[2], rollback.Completed, ""
	again.Steps = []rollback.Step{{Checkpoint: checkpoints[2], Agent: alice, Status: rollback.Completed}}
	start = must(g.builder.RollbackStart(now, &again, checkpoints[2]))
	again.Start = start.ID()
	g.append(start)
	want("asked for again", "rolled_back ", "rolled_back ", "done rollback_requested", "escalated compensation_required")
	g.append(must(g.builder.RollbackStep(now, &again, &again.Steps[0])), must(g.builder.RollbackComplete(now, &again)))
	want("undone", "rolled_back ", "rolled_back ", "rolled_back ", "escalated compensation_required")
}

// P4: while an event cannot be read, nobody can say how a workflow has ended.
func TestUnreadableEvents(t *testing.T) {
	g := newGate(t, func(o *Ledger) {
		o.OpenSince = func(context.Context, string) (store.Version, error) { return 1, nil }
	})
	g.add(alice, flow, "act", nil)
	g.add(gateway, flow, "act", nil)
	for found, err := range g.store.Scan(t.Context(), store.Prefix([]byte("le"))) {
		if err != nil {
			t.Fatal(err)
		}
		key, value := bytes.Clone(found.Key), bytes.Clone(found.Value)
		value[len(value)-1] ^= 1
		if _, err := g.store.Commit(t.Context(), store.Write{Key: key, Value: value}); err != nil {
			t.Fatal(err)
		}
	}
	if _, found, err := g.End(t.Context(), flow); !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("ended: %v, %v", found, err)
	}
}

// A plan that the workflow's start names, and that is not in force, does not keep it from its end.
func TestPlanThatIsOnlyShownIsNoEnd(t *testing.T) {
	d, err := plan.Parse([]byte(`{"wf_id": "trip", "nodes": [{"id": "never"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, func(o *Ledger) {
		o.Plans = map[string]*plan.Descriptor{"trip": d}
		o.OpenSince = func(context.Context, string) (store.Version, error) { return 1, nil }
	})
	task := g.add(alice, flow, "act", nil)
	g.add(alice, flow, "workflow_start", ext().Text(ect.MemberWorkflowName, "trip"), task)
	ckpt := g.add(gateway, flow, "checkpoint", checkpointToken(), task)
	g.add(gateway, flow, "act", ofCall("completed", callerKey), task, ckpt)
	var doc struct{ Plan *plan.Progress }
	if g.get("workflows/"+flow, asAlice).read(200, &doc); doc.Plan == nil {
		t.Fatal("it is not shown")
	}
	if end, found, err := g.End(t.Context(), flow); end.Planned || end.Status != "success" || !found || err != nil {
		t.Errorf("%+v, %v, %v", end, found, err)
	}
}
