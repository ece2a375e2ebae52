package workflow

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// ATD "Workflow Boundary ECTs": the gateway writes the start of a workflow with its first call, once, unless an
// agent has sent one; who has no part in that call does not see it (P3).
func TestWorkflowStart(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr, Badger: true})
	as := func(who *harness.Agent, wid string) func() harness.Reply {
		return func() harness.Reply { return g.Get(who, "workflows/"+wid) }
	}

	wid := uuid.NewString()
	token := a.Issue(ect.Claims{Workflow: wid})
	first := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	checkpoint := first.Header.Get("Execution-Checkpoint")
	_, starts, _ := g.Boundaries(as(a, wid), 4)
	if len(starts) != 1 {
		t.Fatalf("%d starts", len(starts))
	}
	start := g.Entry(a, wid, starts[0])
	harness.Follows(t, start, checkpoint)
	harness.Says(t, start, map[ect.Member]string{ect.MemberWorkflowName: harness.Quoted(wid), ect.MemberDescription: harness.Quoted("begins with default")}, "cascade.node_count")
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid, Parents: []string{token.ID()}}), harness.Request{Path: "/pay"}))
	if _, starts, _ := g.Boundaries(as(a, wid), 7); len(starts) != 1 {
		t.Errorf("%d starts after two calls", len(starts))
	}
	g.Call(harness.With(b.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/pay"}))
	if v, starts, _ := g.Boundaries(as(b, wid), 3); len(starts) != 0 || len(v.Nodes) != 3 {
		t.Errorf("P3: who uses the same id sees %d nodes, and the start %v", len(v.Nodes), starts)
	}

	// An agent's own start is the start, whenever the call comes.
	wid = uuid.NewString()
	own := a.Issue(harness.EventOf("atd:workflow_start", ect.ATD, wid, nil))
	call := harness.With(a.Issue(ect.Claims{Workflow: wid, Parents: []string{own.ID()}}), harness.Request{Path: "/pay"})
	call.Header[ect.FieldName] = own.Raw() + ", " + call.Header[ect.FieldName]
	g.Call(call)
	if _, starts, _ := g.Boundaries(as(a, wid), 4); len(starts) != 0 {
		t.Errorf("%d starts beside that of the agent", len(starts))
	}

	// Of many first calls one begins the workflow, and none is lost.
	wid = uuid.NewString()
	var calls []*harness.Pending
	for range 8 {
		calls = append(calls, g.Begin(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/pay"})))
	}
	for _, c := range calls {
		if got := c.Answer(); got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	if _, starts, _ := g.Boundaries(as(a, wid), 25); len(starts) != 1 {
		t.Errorf("%d starts of calls side by side", len(starts))
	}

	// A name of the caller's is a workflow, a trace is none that begins.
	key := func(name, value string) map[string]string { return map[string]string{"X-Api-Key": "ada", name: value} }
	g.Call(harness.Request{Path: "/pay", Id: "n1", Header: key("Workflow-Id", "nightly")})
	g.Call(harness.Request{Path: "/pay", Id: "n2", Header: key("Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")})
	for name, want := range map[string]int{"nightly": 3, "4bf92f3577b34da6a3ce929d0e0e4736": 2} {
		v, starts, _ := g.Boundaries(func() harness.Reply {
			return g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + name, Header: map[string]string{"X-Api-Key": "ada"}})
		}, want)
		if len(starts) != want-2 || len(v.Nodes) != want {
			t.Errorf("%s: %d starts of %d nodes", name, len(starts), len(v.Nodes))
		}
	}
}

// ATD "Workflow Boundary ECTs": who has begun a workflow says that it has ended; what is recorded is how it has
// ended, once, whatever happens in it afterwards.
func TestWorkflowIsCompleted(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	upstream.On("/fails", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(http.StatusUnprocessableEntity) })
	arrived, held := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	upstream.On("/slow", func(w http.ResponseWriter, _ *harness.Arrival) {
		close(arrived)
		<-held
		w.WriteHeader(http.StatusCreated)
	})
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr, Badger: true})
	end := func(who *harness.Agent, wid string, parents ...string) map[string]string {
		return map[string]string{ect.FieldName: who.Issue(harness.EventOf("workflow_complete", ect.Cascade, wid, parents)).Raw()}
	}
	wid := uuid.NewString()
	page := func() harness.Reply { return g.Get(a, "workflows/"+wid) }
	first := a.Issue(ect.Claims{Workflow: wid})
	checkpoint := g.Call(harness.With(first, harness.Request{Path: "/pay"})).Header.Get("Execution-Checkpoint")
	slow := g.Begin(harness.With(a.Issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}}), harness.Request{Path: "/slow"}))
	harness.Wait(t, arrived, "the call is at the upstream")
	running := g.Complete(wid, end(a, wid))
	if running.Problem(t, http.StatusConflict, "workflow-running"); running.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	release()
	slow.Answer()

	g.Complete(wid, nil).Problem(t, http.StatusUnauthorized, "authentication-required")
	// P3: a stranger learns nothing, whatever its token names.
	none := uuid.NewString()
	for _, parents := range [][]string{nil, {first.ID()}, {uuid.NewString()}} {
		foreign, unknown := g.Complete(wid, end(b, wid, parents...)), g.Complete(none, end(b, none, parents...))
		if foreign.Status != unknown.Status || foreign.Body != unknown.Body {
			t.Errorf("parents %v: %d %s, and of no workflow %d %s", parents, foreign.Status, foreign.Body, unknown.Status, unknown.Body)
		}
	}
	// Who takes part, and has not begun it, may not.
	g.Call(harness.With(b.Issue(ect.Claims{Workflow: wid, Parents: []string{checkpoint}}), harness.Request{Path: "/pay"}))
	g.Complete(wid, end(b, wid)).Problem(t, http.StatusForbidden, "initiator-required")
	// A token of something else is none of an end.
	g.Complete(wid, harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{}).Header).RefusedFor(t, 403, "exec_act")

	_, starts, _ := g.Boundaries(page, 10)
	stated := end(a, wid, starts...)
	got := g.Complete(wid, stated)
	doc := harness.Document[struct {
		Status string `json:"terminal_status"`
		ID     string `json:"jti"`
	}](t, got)
	v, _, ends := g.Boundaries(page, 12)
	if got.Status != http.StatusCreated || doc.Status != "success" || len(ends) != 1 || ends[0] != doc.ID || v.Status != "success" || v.Stated != "success" {
		t.Fatalf("%d %+v; page: %s, %v", got.Status, doc, v.Status, ends)
	}
	token := g.Entry(a, wid, doc.ID)
	harness.Follows(t, token, starts...)
	harness.Says(t, token, map[ect.Member]string{ect.MemberTerminalStatus: harness.Quoted("success"), ect.MemberWorkflowName: harness.Quoted(wid)})
	if elapsed, ok := token.Ext().Number(ect.MemberElapsed); !ok || elapsed < 0 {
		t.Errorf("%s", token.Payload())
	}
	for _, again := range []map[string]string{stated, end(a, wid)} {
		if same := g.Complete(wid, again); same.Status != http.StatusOK || same.Body != got.Body {
			t.Errorf("again: %d %s", same.Status, same.Body)
		}
	}
	// It goes on, and fails in part; the record of its end stays what it is.
	failed := g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}}), harness.Request{Path: "/fails"}))
	if failed.Status != http.StatusUnprocessableEntity {
		t.Fatalf("%d %s", failed.Status, failed.Body)
	}
	if again := g.Complete(wid, end(a, wid)); again.Status != http.StatusOK || again.Body != got.Body {
		t.Errorf("%d %s", again.Status, again.Body)
	}
	if v, _, ends := g.Boundaries(page, 16); len(ends) != 1 || v.Status != "partial" || v.Stated != "success" {
		t.Errorf("%s, ends %v", v.Status, ends)
	}

	// A caller without tokens, by its own name for the workflow.
	ada := map[string]string{"X-Api-Key": "ada", "Workflow-Id": "nightly"}
	g.Call(harness.Request{Path: "/pay", Id: "n1", Header: ada})
	if got := g.Complete("nightly", ada); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := g.Complete("nightly", map[string]string{"X-Api-Key": "eve"}); got.Status != http.StatusNotFound {
		t.Errorf("P3: %d %s", got.Status, got.Body)
	}
}

// A workflow without a plan ends after an idle time, once.
func TestIdleWorkflowEnds(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\nworkflow_idle 1s", Site: "agent_proxy " + upstream.Addr, Badger: true})
	wid, next := uuid.NewString(), uuid.NewString() // next is looked at later than wid, which goes on after its end
	for _, call := range []struct {
		wid, ended string
		nodes      int
	}{{wid, wid, 5}, {wid, wid, 8}, {next, next, 5}, {"", wid, 8}} {
		if call.wid != "" {
			g.Call(harness.With(a.Issue(ect.Claims{Workflow: call.wid}), harness.Request{Path: "/pay"}))
		}
		if v, _, ends := g.Boundaries(func() harness.Reply { return g.Get(a, "workflows/"+call.ended) }, call.nodes); len(ends) != 1 || v.Status != "success" || v.Stated != "success" {
			t.Errorf("%s, stated %q, ends %v", v.Status, v.Stated, ends)
		}
	}
}

// A plan that is only observed does not keep a workflow from its end by time, and ends it once it is done.
func TestIdleWorkflowEndsBesideAPlan(t *testing.T) {
	p := newPlannedGateway(t, "workflow_idle 1s\nplan_mode observed")
	observed, over := uuid.NewString(), uuid.NewString()
	for _, wid := range []string{observed, over} {
		if got := p.put(p.a, wid, `{"wf_id": "w", "nodes": [{"id": "pay"}]}`, nil); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	p.act(p.a, observed, "other", "/other", nil)
	p.act(p.a, over, "pay", "/pay", nil)
	for wid, want := range map[string]workflow.Status{observed: "partial", over: "success"} {
		var v evidence.Workflow
		harness.Eventually(t, "the end is recorded", func() bool {
			v = harness.Document[evidence.Workflow](t, p.Get(p.a, "workflows/"+wid))
			return v.Stated != ""
		})
		if v.Status != want || v.Stated != string(want) || v.Plan == nil {
			t.Errorf("%s, stated %s, %+v", v.Status, v.Stated, v.Plan)
		}
	}
}

// C-4.1.3-d: nothing that comes after the end of a workflow changes the record of it. A rollback of the whole workflow
// has an end of its own, and stops it.
func TestEndAfterARollback(t *testing.T) {
	a := harness.NewAgent(t, "a")
	_, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	var ends []string
	recorded := func(want int, when string) {
		t.Helper()
		harness.Eventually(t, when, func() bool {
			_, _, ends = g.Boundaries(func() harness.Reply { return g.Get(a, "workflows/"+s.Wid) }, 1)
			return len(ends) >= want
		})
		if len(ends) != want {
			t.Fatalf("%s: the ends %v", when, ends)
		}
	}
	complete := func(status int) harness.Reply {
		t.Helper()
		said := a.Issue(harness.EventOf("workflow_complete", ect.Cascade, s.Wid, nil))
		got := g.Complete(s.Wid, map[string]string{ect.FieldName: said.Raw()})
		if got.Status != status {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return got
	}
	first := s.Do(harness.Charge(1))
	second := s.Do(harness.Charge(2), first.Checkpoint)
	end := complete(http.StatusCreated)
	recorded(1, "it has ended")
	harness.Says(t, g.Entry(a, s.Wid, ends[0]), map[ect.Member]string{ect.MemberTerminalStatus: harness.Quoted("success")})
	s.Back(harness.RollbackBody{Checkpoint: second.Checkpoint}).Want(t, "completed")
	failed := a.Issue(ect.Claims{Workflow: s.Wid, Action: "error", Vocabulary: ect.AERR, Parents: []string{first.Checkpoint}, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "warning").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, first.Checkpoint)})
	if got := g.Call(harness.With(failed, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status >= 300 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	if again := complete(http.StatusOK); again.Body != end.Body {
		t.Errorf("%s, not %s", again.Body, end.Body)
	}
	recorded(1, "a part was undone, and an error reported")
	said := ends[0]

	s.Back(harness.RollbackBody{Checkpoint: first.Checkpoint, Scope: "full_workflow"}).Want(t, "completed")
	recorded(2, "all was undone")
	ends = slices.DeleteFunc(ends, func(id string) bool { return id == said })
	harness.Says(t, g.Entry(a, s.Wid, ends[0]), map[ect.Member]string{ect.MemberTerminalStatus: harness.Quoted("rolled_back")})
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: s.Wid}), harness.Charge(3))).Problem(t, http.StatusForbidden, "workflow-stopped")
}

// Who follows a workflow gets it whole, and then what changes; strangers get what they get of no workflow, and a
// reload ends it.
func TestWorkflowIsFollowed(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	site := "agent_proxy " + upstream.Addr
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: site, Badger: true})
	wid := uuid.NewString()
	path := "/.well-known/cascade/workflows/" + wid
	look := func(who *harness.Agent) harness.Request {
		return harness.With(who.Issue(ect.Claims{Action: "look"}), harness.Request{Path: path})
	}
	first := a.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(first, harness.Request{Path: "/pay"}))
	g.Boundaries(func() harness.Reply { return g.Get(a, "workflows/"+wid) }, 4)

	s := g.Follow(look(a), "text/event-stream", "")
	if s.Res.StatusCode != http.StatusOK || s.Res.Header.Get("Content-Type") != "text/event-stream" || s.Res.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %v", s.Res.StatusCode, s.Res.Header)
	}
	name, id, doc := s.Next()
	if name != "workflow" || id == "" || len(doc.Nodes) != 4 {
		t.Fatalf("%s %s %+v", name, id, doc)
	}
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}}), harness.Request{Path: "/pay"}))
	for len(doc.Nodes) < 7 || doc.Status != "success" {
		before := id
		name, id, change := s.Next()
		if name != "change" || id == before || slices.ContainsFunc(change.Roots, func(root string) bool { return root == "" }) {
			t.Fatalf("%s %s", name, id)
		}
		doc.Apply(change)
	}
	whole := harness.Document[evidence.Workflow](t, g.Get(a, "workflows/"+wid))
	if a, b := sorted(doc), sorted(&whole); a != b {
		t.Errorf("the changes lead to\n%s, not\n%s", a, b)
	}
	// Who comes again and has missed nothing gets nothing again.
	again := g.Follow(look(a), "text/event-stream", "x")
	_, id, _ = again.Next()
	if name, _, _ := g.Follow(look(a), "text/event-stream", id).Next(); name != "" {
		t.Errorf("after %s came %s", id, name)
	}
	// P3
	var answers []string
	for _, of := range []string{wid, uuid.NewString()} {
		r := harness.With(b.Issue(ect.Claims{Action: "look"}), harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + of})
		r.Header["Accept"] = "text/event-stream"
		got := g.Call(r)
		answers = append(answers, fmt.Sprint(got.Status, got.Body))
	}
	if answers[0] != answers[1] || !strings.HasPrefix(answers[0], "404") {
		t.Errorf("%s, and of no workflow %s", answers[0], answers[1])
	}
	// One reader has so many streams.
	full := 0
	for range 16 {
		if s := g.Follow(look(a), "text/event-stream", ""); s.Res.StatusCode == http.StatusTooManyRequests {
			full++
		}
	}
	if full != 3 {
		t.Errorf("%d of 16 streams beside three others were refused", full)
	}
	// Pictures have what the document has.
	for accept, want := range map[string]string{"image/svg+xml": "<svg ", "text/vnd.graphviz": "digraph G {"} {
		r := look(a)
		r.Method, r.Header["Accept"] = "GET", accept
		if got := g.Call(r); !strings.HasPrefix(got.Header.Get("Content-Type"), accept) || !strings.HasPrefix(got.Body, want) || !strings.Contains(got.Body, first.ID()) {
			t.Errorf("%s: %v %.200s", accept, got.Header, got.Body)
		}
	}
	g.Reload(site)
	deadline := time.After(harness.Patience)
	for open := true; open; {
		select {
		case _, open = <-s.Lines:
		case <-deadline:
			t.Fatal("the stream outlives its configuration")
		}
	}
}

// sorted is a document as JSON, with its tokens and edges in one order.
func sorted(doc *evidence.Workflow) string {
	var parts []string
	for _, n := range doc.Nodes {
		text, _ := json.Marshal(n)
		parts = append(parts, string(text))
	}
	for _, e := range doc.Edges {
		text, _ := json.Marshal(e)
		parts = append(parts, string(text))
	}
	slices.Sort(parts)
	c := *doc
	c.Nodes, c.Edges = nil, nil
	text, _ := json.Marshal(c)
	return string(text) + "\n" + strings.Join(parts, "\n")
}

// ATD "Workflow Boundary ECTs": a workflow with a plan begins with what the plan says of it, and ends by itself when
// the leaves of the plan are done, or nothing of it can go on; also where the plan comes after the last call.
func TestPlannedWorkflowEnds(t *testing.T) {
	const trip = `{"wf_id": "trip", "description": "Book a trip", "nodes": [{"id": "hold"}, {"id": "book"}, {"id": "pay"}],
		"edges": [{"from": "hold", "to": "pay"}, {"from": "book", "to": "pay"}]}`
	p := newPlannedGateway(t, "")
	p.upstream.On("/fails", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(http.StatusUnprocessableEntity) })
	for name, c := range map[string]struct {
		by     *harness.Agent // who puts the plan before the calls, or a coordinator afterwards
		book   string
		paid   bool
		leaves bool // the initiator says that nothing more comes
		want   string
	}{
		"all is done":            {p.a, "/book", true, false, "success"},
		"a part fails for good":  {p.a, "/fails", false, false, "partial"},
		"the plan comes later":   {p.c, "/book", true, false, "success"},
		"its initiator gives up": {p.a, "/book", false, true, "partial"},
	} {
		t.Run(name, func(t *testing.T) {
			wid := uuid.NewString()
			put := func(who *harness.Agent) {
				if got := p.put(who, wid, trip, nil); got.Status != http.StatusCreated {
					t.Fatalf("%d %s", got.Status, got.Body)
				}
			}
			if c.by == p.a {
				put(p.a)
			}
			p.act(p.a, wid, "hold", "/hold", nil)
			p.act(p.a, wid, "book", c.book, nil)
			if c.paid {
				p.act(p.a, wid, "pay", "/pay", nil)
			}
			if c.by == p.c {
				put(p.c)
			}
			if c.leaves {
				got := p.Complete(wid, map[string]string{ect.FieldName: p.a.Issue(harness.EventOf("workflow_complete", ect.Cascade, wid, nil)).Raw()})
				if got.Status != http.StatusCreated {
					t.Fatalf("%d %s", got.Status, got.Body)
				}
			}
			var v evidence.Workflow
			var starts, ends []string
			harness.Eventually(t, "the end is recorded", func() bool {
				v, starts, ends = p.Boundaries(func() harness.Reply { return p.Get(p.a, "workflows/"+wid) }, 7)
				return len(ends) > 0
			})
			if string(v.Status) != c.want || len(ends) != 1 || len(starts) != 1 || v.Plan == nil {
				t.Fatalf("%s, %d starts, %d ends, %+v", v.Status, len(starts), len(ends), v.Plan)
			}
			end := p.Entry(p.a, wid, ends[0])
			harness.Follows(t, end, starts...)
			harness.Says(t, end, map[ect.Member]string{ect.MemberTerminalStatus: harness.Quoted(c.want)})
			if c.by == p.a {
				harness.Says(t, p.Entry(p.a, wid, starts[0]), map[ect.Member]string{
					ect.MemberWorkflowName: harness.Quoted("trip"), ect.MemberDescription: harness.Quoted("Book a trip"), "cascade.node_count": "3",
				})
			}
			if n := v.Plan.Nodes[0]; n.Begun.IsZero() || n.Ended.Before(n.Begun) {
				t.Errorf("%+v", n)
			}
		})
	}
}
