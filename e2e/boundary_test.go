package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// boundaries are a workflow's page and the gateway's tokens of its start and its ends, once so many nodes are
// recorded of it.
func (g *gateway) boundaries(ask func() reply, nodes int) (v api.Workflow, starts, ends []string) {
	g.t.Helper()
	eventually(g.t, fmt.Sprint(nodes, " nodes"), func() bool {
		got := ask()
		if got.status != http.StatusOK {
			return false
		}
		v, starts, ends = document[api.Workflow](g.t, got), nil, nil
		n := 0
		for _, node := range v.Nodes {
			if node.Event == "escalation" {
				continue
			}
			n++
			if node.Issuer == gatewayIdentity && node.Event == ect.EventWorkflowStart {
				starts = append(starts, node.ID)
			}
			if node.Issuer == gatewayIdentity && node.Event == ect.EventWorkflowComplete {
				ends = append(ends, node.ID)
			}
		}
		return n >= nodes
	})
	return v, starts, ends
}

// ATD "Workflow Boundary ECTs": the gateway writes the start of a workflow with its first call, once, unless an
// agent has sent one; who has no part in that call does not see it (P3).
func TestWorkflowStart(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr, badger: true})
	as := func(who *agent, wid string) func() reply { return func() reply { return g.get(who, "workflows/"+wid) } }

	wid := uuid.NewString()
	token := a.issue(ect.Claims{Workflow: wid})
	first := g.call(with(token, request{path: "/pay"}))
	checkpoint := first.header.Get("Execution-Checkpoint")
	_, starts, _ := g.boundaries(as(a, wid), 4)
	if len(starts) != 1 {
		t.Fatalf("%d starts", len(starts))
	}
	start := g.entry(a, wid, starts[0])
	follows(t, start, checkpoint)
	says(t, start, map[ect.Member]string{ect.MemberWorkflowName: quoted(wid), ect.MemberDescription: quoted("begins with default")}, "cascade.node_count")
	g.call(with(a.issue(ect.Claims{Workflow: wid, Parents: []string{token.ID()}}), request{path: "/pay"}))
	if _, starts, _ := g.boundaries(as(a, wid), 7); len(starts) != 1 {
		t.Errorf("%d starts after two calls", len(starts))
	}
	g.call(with(b.issue(ect.Claims{Workflow: wid}), request{path: "/pay"}))
	if v, starts, _ := g.boundaries(as(b, wid), 3); len(starts) != 0 || len(v.Nodes) != 3 {
		t.Errorf("P3: who uses the same id sees %d nodes, and the start %v", len(v.Nodes), starts)
	}

	// An agent's own start is the start, whenever the call comes.
	wid = uuid.NewString()
	own := a.issue(eventOf("atd:workflow_start", ect.ATD, wid, nil))
	call := with(a.issue(ect.Claims{Workflow: wid, Parents: []string{own.ID()}}), request{path: "/pay"})
	call.header[ect.FieldName] = own.Raw() + ", " + call.header[ect.FieldName]
	g.call(call)
	if _, starts, _ := g.boundaries(as(a, wid), 4); len(starts) != 0 {
		t.Errorf("%d starts beside that of the agent", len(starts))
	}

	// Of many first calls one begins the workflow, and none is lost.
	wid = uuid.NewString()
	var calls []*pending
	for range 8 {
		calls = append(calls, g.begin(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/pay"})))
	}
	for _, c := range calls {
		if got := c.answer(); got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	if _, starts, _ := g.boundaries(as(a, wid), 25); len(starts) != 1 {
		t.Errorf("%d starts of calls side by side", len(starts))
	}

	// A name of the caller's is a workflow, a trace is none that begins.
	key := func(name, value string) map[string]string { return map[string]string{"X-Api-Key": "ada", name: value} }
	g.call(request{path: "/pay", id: "n1", header: key("Workflow-Id", "nightly")})
	g.call(request{path: "/pay", id: "n2", header: key("Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")})
	for name, want := range map[string]int{"nightly": 3, "4bf92f3577b34da6a3ce929d0e0e4736": 2} {
		v, starts, _ := g.boundaries(func() reply {
			return g.call(request{method: "GET", path: "/.well-known/cascade/workflows/" + name, header: map[string]string{"X-Api-Key": "ada"}})
		}, want)
		if len(starts) != want-2 || len(v.Nodes) != want {
			t.Errorf("%s: %d starts of %d nodes", name, len(starts), len(v.Nodes))
		}
	}
}

// complete says that a workflow has ended, with a token or with a credential.
func (g *gateway) complete(wid string, header map[string]string) reply {
	g.t.Helper()
	return g.call(request{path: "/.well-known/cascade/workflows/" + wid + "/complete", reader: nothing{}, header: header})
}

// ATD "Workflow Boundary ECTs": who has begun a workflow says that it has ended; what is recorded is how it has
// ended, once, whatever happens in it afterwards.
func TestWorkflowIsCompleted(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	upstream.on("/fails", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(http.StatusUnprocessableEntity) })
	arrived, held := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	upstream.on("/slow", func(w http.ResponseWriter, _ *arrival) {
		close(arrived)
		<-held
		w.WriteHeader(http.StatusCreated)
	})
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr, badger: true})
	end := func(who *agent, wid string, parents ...string) map[string]string {
		return map[string]string{ect.FieldName: who.issue(eventOf("workflow_complete", ect.Cascade, wid, parents)).Raw()}
	}
	wid := uuid.NewString()
	page := func() reply { return g.get(a, "workflows/"+wid) }
	first := a.issue(ect.Claims{Workflow: wid})
	checkpoint := g.call(with(first, request{path: "/pay"})).header.Get("Execution-Checkpoint")
	slow := g.begin(with(a.issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}}), request{path: "/slow"}))
	wait(t, arrived, "the call is at the upstream")
	running := g.complete(wid, end(a, wid))
	if running.problem(t, http.StatusConflict, "workflow-running"); running.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	release()
	slow.answer()

	g.complete(wid, nil).problem(t, http.StatusUnauthorized, "authentication-required")
	// P3: a stranger learns nothing, whatever its token names.
	none := uuid.NewString()
	for _, parents := range [][]string{nil, {first.ID()}, {uuid.NewString()}} {
		foreign, unknown := g.complete(wid, end(b, wid, parents...)), g.complete(none, end(b, none, parents...))
		if foreign.status != unknown.status || foreign.body != unknown.body {
			t.Errorf("parents %v: %d %s, and of no workflow %d %s", parents, foreign.status, foreign.body, unknown.status, unknown.body)
		}
	}
	// Who takes part, and has not begun it, may not.
	g.call(with(b.issue(ect.Claims{Workflow: wid, Parents: []string{checkpoint}}), request{path: "/pay"}))
	g.complete(wid, end(b, wid)).problem(t, http.StatusForbidden, "initiator-required")
	// A token of something else is none of an end.
	g.complete(wid, with(a.issue(ect.Claims{Workflow: wid}), request{}).header).refusedFor(t, 403, "exec_act")

	_, starts, _ := g.boundaries(page, 10)
	stated := end(a, wid, starts...)
	got := g.complete(wid, stated)
	doc := document[struct {
		Status string `json:"terminal_status"`
		ID     string `json:"jti"`
	}](t, got)
	v, _, ends := g.boundaries(page, 12)
	if got.status != http.StatusCreated || doc.Status != "success" || len(ends) != 1 || ends[0] != doc.ID || v.Status != "success" || v.Stated != "success" {
		t.Fatalf("%d %+v; page: %s, %v", got.status, doc, v.Status, ends)
	}
	token := g.entry(a, wid, doc.ID)
	follows(t, token, starts...)
	says(t, token, map[ect.Member]string{ect.MemberTerminalStatus: quoted("success"), ect.MemberWorkflowName: quoted(wid)})
	if elapsed, ok := token.Ext().Number(ect.MemberElapsed); !ok || elapsed < 0 {
		t.Errorf("%s", token.Payload())
	}
	for _, again := range []map[string]string{stated, end(a, wid)} {
		if same := g.complete(wid, again); same.status != http.StatusOK || same.body != got.body {
			t.Errorf("again: %d %s", same.status, same.body)
		}
	}
	// It goes on, and fails in part; the record of its end stays what it is.
	failed := g.call(with(a.issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}}), request{path: "/fails"}))
	if failed.status != http.StatusUnprocessableEntity {
		t.Fatalf("%d %s", failed.status, failed.body)
	}
	if again := g.complete(wid, end(a, wid)); again.status != http.StatusOK || again.body != got.body {
		t.Errorf("%d %s", again.status, again.body)
	}
	if v, _, ends := g.boundaries(page, 16); len(ends) != 1 || v.Status != "partial" || v.Stated != "success" {
		t.Errorf("%s, ends %v", v.Status, ends)
	}

	// A caller without tokens, by its own name for the workflow.
	ada := map[string]string{"X-Api-Key": "ada", "Workflow-Id": "nightly"}
	g.call(request{path: "/pay", id: "n1", header: ada})
	if got := g.complete("nightly", ada); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := g.complete("nightly", map[string]string{"X-Api-Key": "eve"}); got.status != http.StatusNotFound {
		t.Errorf("P3: %d %s", got.status, got.body)
	}
}

// A workflow without a plan ends after an idle time, once.
func TestIdleWorkflowEnds(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a) + "\nworkflow_idle 1s", site: "agent_proxy " + upstream.addr, badger: true})
	wid, next := uuid.NewString(), uuid.NewString() // next is looked at later than wid, which goes on after its end
	for _, call := range []struct {
		wid, ended string
		nodes      int
	}{{wid, wid, 5}, {wid, wid, 8}, {next, next, 5}, {"", wid, 8}} {
		if call.wid != "" {
			g.call(with(a.issue(ect.Claims{Workflow: call.wid}), request{path: "/pay"}))
		}
		if v, _, ends := g.boundaries(func() reply { return g.get(a, "workflows/"+call.ended) }, call.nodes); len(ends) != 1 || v.Status != "success" || v.Stated != "success" {
			t.Errorf("%s, stated %q, ends %v", v.Status, v.Stated, ends)
		}
	}
}

// A plan that is only observed does not keep a workflow from its end by time, and ends it once it is done.
func TestIdleWorkflowEndsBesideAPlan(t *testing.T) {
	p := newPlannedGateway(t, "workflow_idle 1s\nplan_mode observed")
	observed, over := uuid.NewString(), uuid.NewString()
	for _, wid := range []string{observed, over} {
		if got := p.put(p.a, wid, `{"wf_id": "w", "nodes": [{"id": "pay"}]}`, nil); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	p.act(p.a, observed, "other", "/other", nil)
	p.act(p.a, over, "pay", "/pay", nil)
	for wid, want := range map[string]workflow.Status{observed: "partial", over: "success"} {
		var v api.Workflow
		eventually(t, "the end is recorded", func() bool {
			v = document[api.Workflow](t, p.get(p.a, "workflows/"+wid))
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
	a := newAgent(t, "a")
	_, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	var ends []string
	recorded := func(want int, when string) {
		t.Helper()
		eventually(t, when, func() bool {
			_, _, ends = g.boundaries(func() reply { return g.get(a, "workflows/"+s.wid) }, 1)
			return len(ends) >= want
		})
		if len(ends) != want {
			t.Fatalf("%s: the ends %v", when, ends)
		}
	}
	complete := func(status int) reply {
		t.Helper()
		said := a.issue(eventOf("workflow_complete", ect.Cascade, s.wid, nil))
		got := g.complete(s.wid, map[string]string{ect.FieldName: said.Raw()})
		if got.status != status {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return got
	}
	first := s.do(charge(1))
	second := s.do(charge(2), first.checkpoint)
	end := complete(http.StatusCreated)
	recorded(1, "it has ended")
	says(t, g.entry(a, s.wid, ends[0]), map[ect.Member]string{ect.MemberTerminalStatus: quoted("success")})
	s.back(rollbackBody{Checkpoint: second.checkpoint}).want(t, "completed")
	failed := a.issue(ect.Claims{Workflow: s.wid, Action: "error", Vocabulary: ect.AERR, Parents: []string{first.checkpoint}, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "warning").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, first.checkpoint)})
	if got := g.call(with(failed, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status >= 300 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if again := complete(http.StatusOK); again.body != end.body {
		t.Errorf("%s, not %s", again.body, end.body)
	}
	recorded(1, "a part was undone, and an error reported")
	said := ends[0]

	s.back(rollbackBody{Checkpoint: first.checkpoint, Scope: "full_workflow"}).want(t, "completed")
	recorded(2, "all was undone")
	ends = slices.DeleteFunc(ends, func(id string) bool { return id == said })
	says(t, g.entry(a, s.wid, ends[0]), map[ect.Member]string{ect.MemberTerminalStatus: quoted("rolled_back")})
	g.call(with(a.issue(ect.Claims{Workflow: s.wid}), charge(3))).problem(t, http.StatusForbidden, "workflow-stopped")
}

// eventStream reads server-sent events.
type eventStream struct {
	t     *testing.T
	res   *http.Response
	lines chan string
}

func (g *gateway) follow(r request, accept, last string) *eventStream {
	g.t.Helper()
	r.method = "GET"
	r.header["Accept"] = accept
	if last != "" {
		r.header["Last-Event-ID"] = last
	}
	res, err := g.send(r)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = res.Body.Close() })
	s := &eventStream{g.t, res, make(chan string, 64)}
	go func() {
		defer close(s.lines)
		for in := bufio.NewReader(res.Body); ; {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			s.lines <- strings.TrimSuffix(line, "\n")
		}
	}()
	return s
}

// next reads an event, or a comment as an event without a name.
func (s *eventStream) next() (name, id string, doc *api.Workflow) {
	s.t.Helper()
	for line := wait(s.t, s.lines, "an event"); line != ""; line = wait(s.t, s.lines, "the rest of an event") {
		field, value, _ := strings.Cut(line, ": ")
		switch field {
		case "event":
			name = value
		case "id":
			id = value
		case "data":
			doc = new(api.Workflow)
			if err := json.Unmarshal([]byte(value), doc); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	return name, id, doc
}

// Who follows a workflow gets it whole, and then what changes; strangers get what they get of no workflow, and a
// reload ends it.
func TestWorkflowIsFollowed(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	site := "agent_proxy " + upstream.addr
	g := launch(t, setup{app: trusting(t, a, b), site: site, badger: true})
	wid := uuid.NewString()
	path := "/.well-known/cascade/workflows/" + wid
	look := func(who *agent) request { return with(who.issue(ect.Claims{Action: "look"}), request{path: path}) }
	first := a.issue(ect.Claims{Workflow: wid})
	g.call(with(first, request{path: "/pay"}))
	g.boundaries(func() reply { return g.get(a, "workflows/"+wid) }, 4)

	s := g.follow(look(a), "text/event-stream", "")
	if s.res.StatusCode != http.StatusOK || s.res.Header.Get("Content-Type") != "text/event-stream" || s.res.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %v", s.res.StatusCode, s.res.Header)
	}
	name, id, doc := s.next()
	if name != "workflow" || id == "" || len(doc.Nodes) != 4 {
		t.Fatalf("%s %s %+v", name, id, doc)
	}
	g.call(with(a.issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}}), request{path: "/pay"}))
	for len(doc.Nodes) < 7 || doc.Status != "success" {
		before := id
		name, id, change := s.next()
		if name != "change" || id == before || slices.ContainsFunc(change.Roots, func(root string) bool { return root == "" }) {
			t.Fatalf("%s %s", name, id)
		}
		doc.Apply(change)
	}
	whole := document[api.Workflow](t, g.get(a, "workflows/"+wid))
	if a, b := sorted(doc), sorted(&whole); a != b {
		t.Errorf("the changes lead to\n%s, not\n%s", a, b)
	}
	// Who comes again and has missed nothing gets nothing again.
	again := g.follow(look(a), "text/event-stream", "x")
	_, id, _ = again.next()
	if name, _, _ := g.follow(look(a), "text/event-stream", id).next(); name != "" {
		t.Errorf("after %s came %s", id, name)
	}
	// P3
	var answers []string
	for _, of := range []string{wid, uuid.NewString()} {
		r := with(b.issue(ect.Claims{Action: "look"}), request{method: "GET", path: "/.well-known/cascade/workflows/" + of})
		r.header["Accept"] = "text/event-stream"
		got := g.call(r)
		answers = append(answers, fmt.Sprint(got.status, got.body))
	}
	if answers[0] != answers[1] || !strings.HasPrefix(answers[0], "404") {
		t.Errorf("%s, and of no workflow %s", answers[0], answers[1])
	}
	// One reader has so many streams.
	full := 0
	for range 16 {
		if s := g.follow(look(a), "text/event-stream", ""); s.res.StatusCode == http.StatusTooManyRequests {
			full++
		}
	}
	if full != 3 {
		t.Errorf("%d of 16 streams beside three others were refused", full)
	}
	// Pictures have what the document has.
	for accept, want := range map[string]string{"image/svg+xml": "<svg ", "text/vnd.graphviz": "digraph G {"} {
		r := look(a)
		r.method, r.header["Accept"] = "GET", accept
		if got := g.call(r); !strings.HasPrefix(got.header.Get("Content-Type"), accept) || !strings.HasPrefix(got.body, want) || !strings.Contains(got.body, first.ID()) {
			t.Errorf("%s: %v %.200s", accept, got.header, got.body)
		}
	}
	g.reload(site)
	deadline := time.After(patience)
	for open := true; open; {
		select {
		case _, open = <-s.lines:
		case <-deadline:
			t.Fatal("the stream outlives its configuration")
		}
	}
}

// sorted is a document as JSON, with its tokens and edges in one order.
func sorted(doc *api.Workflow) string {
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
	p.upstream.on("/fails", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(http.StatusUnprocessableEntity) })
	for name, c := range map[string]struct {
		by     *agent // who puts the plan before the calls, or a coordinator afterwards
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
			put := func(who *agent) {
				if got := p.put(who, wid, trip, nil); got.status != http.StatusCreated {
					t.Fatalf("%d %s", got.status, got.body)
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
				got := p.complete(wid, map[string]string{ect.FieldName: p.a.issue(eventOf("workflow_complete", ect.Cascade, wid, nil)).Raw()})
				if got.status != http.StatusCreated {
					t.Fatalf("%d %s", got.status, got.body)
				}
			}
			var v api.Workflow
			var starts, ends []string
			eventually(t, "the end is recorded", func() bool {
				v, starts, ends = p.boundaries(func() reply { return p.get(p.a, "workflows/"+wid) }, 7)
				return len(ends) > 0
			})
			if string(v.Status) != c.want || len(ends) != 1 || len(starts) != 1 || v.Plan == nil {
				t.Fatalf("%s, %d starts, %d ends, %+v", v.Status, len(starts), len(ends), v.Plan)
			}
			end := p.entry(p.a, wid, ends[0])
			follows(t, end, starts...)
			says(t, end, map[ect.Member]string{ect.MemberTerminalStatus: quoted(c.want)})
			if c.by == p.a {
				says(t, p.entry(p.a, wid, starts[0]), map[ect.Member]string{
					ect.MemberWorkflowName: quoted("trip"), ect.MemberDescription: quoted("Book a trip"), "cascade.node_count": "3",
				})
			}
			if n := v.Plan.Nodes[0]; n.Begun.IsZero() || n.Ended.Before(n.Begun) {
				t.Errorf("%+v", n)
			}
		})
	}
}
