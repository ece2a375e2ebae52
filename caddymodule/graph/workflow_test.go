package graph_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
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
	ckpt := g.add(gateway, flow, "checkpoint", checkpoint(), task)
	done := g.add(gateway, flow, "pay", ofCall("completed", caller), task, ckpt)
	next := g.add(bob, flow, "next", nil, task)
	failed := g.add(bob, flow, "atd:error", ext().Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "timeout"), next)
	g.add(mallory, foreign, "elsewhere", nil)
	end := g.add(alice, flow, "workflow_complete", ext().Text(ect.MemberTerminalStatus, "success"))

	var doc workflowDoc
	got := g.get("workflows/"+flow, asAlice)
	got.private()
	got.read(200, &doc)
	if doc.WID != flow || doc.Status != "failed" || doc.Stated != "success" || doc.Truncated || fmt.Sprint(doc.Tasks) != "map[done:1 failed:1]" {
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
	outer := g.add(gateway, flow, "checkpoint", ofCall("", caller))
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
	g.get("workflows/"+flow, Reader{Caller: other}).read(200, &doc)
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

// P3: who has told of an error may read that, and has no other part in the workflow.
func TestAnErrorGivesNoPart(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	asBob := Reader{Issuer: bob}
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
	ckpt := g.add(gateway, flow, "checkpoint", checkpoint(), task)
	g.add(mallory, flow, "pay", ofCall("completed", caller), task, ckpt)
	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	for _, n := range doc.Nodes {
		if n.State == "done" || n.Iss == mallory && n.Answer != 0 {
			t.Errorf("%+v", n)
		}
	}
}

// P6: states are not told of a workflow that was not read to its end.
func TestTruncatedWorkflow(t *testing.T) {
	g := newGate(t, func(o *Options) { o.MaxNodes = 3 })
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
	if _, err := g.log.Wait(t.Context(), flow, fmt.Sprint(size-1)); err != nil {
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
	ckpt := put(ect.ATD, "checkpoint", checkpoint(), task)
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
// order of recording, and a receipt is to be had from the node that wrote the entry.
func TestWorkflowOverTwoLogs(t *testing.T) {
	g := newGate(t)
	other := g.open("a.gateway.example/ledger")
	task := g.add(alice, flow, "act", nil)
	ckpt := g.add(gateway, flow, "checkpoint", checkpoint(), task)
	g.add(gateway, flow, "pay", ofCall("in_doubt", caller), task, ckpt)
	last := g.token(gateway, ect.Claims{Workflow: flow, Action: "pay", Ext: ofCall("completed", caller), Parents: []string{task.ID(), ckpt.ID()}})
	if err := other.Append(t.Context(), events(last)); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Wait(t.Context(), flow, last.ID()); err != nil {
		t.Fatal(err)
	}
	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if doc.Status != "success" || doc.Tasks["done"] != 1 || len(doc.Nodes) != 4 || doc.Nodes[3].JTI != last.ID() || doc.Nodes[3].Log != "a.gateway.example/ledger" {
		t.Errorf("%+v", doc)
	}
	var entry entryDoc
	g.get("ledger/entries?jti="+last.ID(), asAlice).read(200, &entry)
	if entry.Receipt != nil || entry.Log != "a.gateway.example/ledger" || entry.Token != last.Raw() {
		t.Errorf("%+v", entry)
	}
}

// Whoever saw the end of a call can rely on its record: the answer waits for what was
// recorded before the question came.
func TestWorkflowWaitsForWhatWasRecorded(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	hold(t, g)
	next := g.token(alice, ect.Claims{Workflow: flow, Action: "act", Parents: []string{task.ID()}})
	if err := g.log.Append(t.Context(), events(next)); err != nil {
		t.Fatal(err)
	}
	// What has no place is no part of the answer, which says so and is not for ever.
	going, exit := context.WithCancel(t.Context())
	g.Waits = going
	exit()
	g.get("workflows/"+flow, asAlice).refused(503, "store-unavailable", "")
	g.Waits = context.Background()
	go g.release()
	var doc workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &doc)
	if len(doc.Nodes) != 2 || doc.Nodes[0].State != "done" {
		t.Errorf("%+v", doc)
	}
}
