//go:build unix

package e2e

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Execution Guard RFC, "Open Questions": for how long results, keys and checkpoints are kept
// where nothing is configured, as published and as it is.
func TestConformanceDefaults(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr})
	policy := document[struct {
		Actions []struct {
			Result     float64 `json:"retain_result_s"`
			Key        float64 `json:"retain_key_s"`
			Checkpoint float64 `json:"checkpoint_ttl_s"`
		}
	}](t, g.call(request{method: "GET", path: "/.well-known/cascade/policy"}))
	const day = 24 * 3600
	if len(policy.Actions) != 1 || policy.Actions[0].Result != day || policy.Actions[0].Key != 30*day || policy.Actions[0].Checkpoint != day {
		t.Errorf("%+v", policy)
	}
	r := request{path: "/x", id: "k"}
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.store.pass(23 * time.Hour)
	g.call(r).want(t, 201, "arrival 1", "replayed")
	g.store.pass(2 * time.Hour)
	g.call(r).terminal(t, 409, "result-expired")
	g.store.pass(28 * day * time.Second)
	g.call(r).terminal(t, 409, "result-expired")
	g.store.pass(2 * day * time.Second)
	g.call(r).want(t, 201, "arrival 2", "executed")
}

// ATD "Checkpoint Placement Policy", cascade 4.2.1-a: every method that may change something
// has a checkpoint that is stored before the call leaves; what changes nothing has none.
func TestGuardedMethodsHaveCheckpoints(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr + " {\n consequential path /fire\n action measure {\n match path /measure\n consequential\n }\n }"})
	stored := func() (n int) {
		for _, err := range g.store.memory.Scan(context.Background(), store.Prefix([]byte("kb"))) {
			if err != nil {
				t.Error(err)
			}
			n++
		}
		return n
	}
	var before int
	var there bool
	for _, path := range []string{"/device", "/fire", "/measure"} {
		u.on(path, func(w http.ResponseWriter, _ *arrival) {
			there = stored() > before
			w.WriteHeader(http.StatusOK)
		})
	}
	for _, c := range []struct {
		method, path string
		has          bool
	}{
		{"POST", "/device", true}, {"PUT", "/device", true}, {"PATCH", "/device", true}, {"DELETE", "/device", true},
		{"MKCOL", "/device", true}, {"LOCK", "/device", true}, {"X-ANY", "/device", true}, {"GET", "/fire", true}, {"GET", "/measure", true},
		{"GET", "/device", false}, {"HEAD", "/device", false}, {"OPTIONS", "/device", false},
	} {
		before, there = stored(), false
		token := a.issue(ect.Claims{Workflow: uuid.NewString()})
		got := g.call(with(token, request{method: c.method, path: c.path}))
		id := got.header.Get("Execution-Checkpoint")
		if got.status != http.StatusOK || (id != "") != c.has || there != c.has {
			t.Errorf("%s %s: %d, checkpoint %q, stored before it left: %v", c.method, c.path, got.status, id, there)
		}
		if c.has && id != "" {
			v := g.checkpointOf(a, got)
			if v.Claims.Ext["cascade.reversible"] != false || v.Verification.Snapshot != "matches" {
				t.Errorf("%s: %+v", c.method, v)
			}
		}
	}
}

// ATD "Topological Order": tasks without a common ancestor run side by side.
func TestCallsSideBySide(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	one, two := newGate(t), newGate(t)
	u.on("/one", func(http.ResponseWriter, *arrival) { one.pass() })
	u.on("/two", func(http.ResponseWriter, *arrival) { two.pass() })
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr})
	wid := uuid.NewString()
	first := g.begin(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/one"}))
	second := g.begin(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/two"}))
	wait(t, one.arrived, "the first")
	wait(t, two.arrived, "the second, beside it")
	two.open()
	second.answer()
	one.open()
	first.answer()
}

// Cascade 4.2.2-a, ATD "Checkpoint ECT Format": a checkpoint is there, and can be rolled back
// to, until its ttl is over, over restarts, also where the ledger has pruned what came with it;
// then it is not.
func TestCascade422KeptForItsTTL(t *testing.T) {
	a := newAgent(t, "a")
	app, lab := strings.Replace(trusting(t, a), "key_file", "retain 1h\n key_file", 1), newRestLab(t)
	setting := setup{app: app, site: "agent_proxy " + lab.addr + " {\n" + strings.ReplaceAll(sagaActions, "match path /charges", "match path /charges\n checkpoint_ttl 1000h") + "\n}"}
	g := launch(t, setting)
	s := g.saga(a)
	long, short := s.do(charge(1)), s.do(put("/docs/x", `{"n":1}`))
	// The ledger prunes 256 entries at a time.
	for range 90 {
		s.do(put("/docs/y", `{"n":1}`))
	}
	g.settledView(a, s.wid, 92*3)
	again := func() {
		t.Helper()
		stop(t)
		setting.store = g.store
		g = launch(t, setting)
		s.g = g
	}
	g.store.pass(23 * time.Hour)
	again()
	for _, id := range []string{long.checkpoint, short.checkpoint} {
		doc := document[checkpointDoc](t, s.checkpoint(id))
		if doc.Verification.Signature != "valid" || doc.Verification.Snapshot != "matches" || !doc.Reversible {
			t.Errorf("within its ttl: %+v", doc)
		}
	}
	g.store.pass(970 * time.Hour)
	again()
	eventually(t, "the ledger has pruned the checkpoint with the shorter ttl", func() bool {
		return g.get(a, "ledger/entries?jti="+short.checkpoint+"&wid="+s.wid).status != http.StatusOK
	})
	if got := s.checkpoint(short.checkpoint); got.status < 400 {
		t.Errorf("after its ttl: %d %s", got.status, got.body)
	}
	doc := document[checkpointDoc](t, s.checkpoint(long.checkpoint))
	if doc.Verification.Signature != "valid" || doc.Verification.Snapshot != "matches" || !doc.Reversible {
		t.Errorf("after 993 of its 1000 hours: %+v", doc)
	}
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: long.checkpoint}).want(t, "completed")
	lab.wantCharge(long.id(t), "refunded")
	lab.wantDoc("/docs/x", `{"n":1}`)
}

// ATD "Node States", brief "Data Model": running, rolled back and escalated nodes, and the
// details that say more.
func TestNodeStatesOnTheWire(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	hold := newGate(t)
	lab.on("POST /charges", 1, restWaits(hold))
	token := a.issue(ect.Claims{Workflow: s.wid})
	running := g.begin(with(token, charge(1)))
	wait(t, hold.arrived, "the charge")
	eventually(t, "the workflow shows it", func() bool { return g.get(a, "workflows/"+s.wid).status == http.StatusOK })
	if got := g.settledView(a, s.wid, 2).state(token.ID()); got != "running" {
		t.Errorf("while it runs it is %s", got)
	}
	hold.open()
	done := sagaStep{reply: running.answer()}
	done.checkpoint = done.header.Get("Execution-Checkpoint")
	mailed := a.issue(ect.Claims{Workflow: s.wid})
	mail := g.call(with(mailed, request{path: "/mail"}))
	lab.on("POST /charges", 1, restLoses)
	doubtful := a.issue(ect.Claims{Workflow: s.wid})
	g.call(with(doubtful, charge(2)))
	lab.on("POST /charges", 1, restSays(http.StatusTooManyRequests, ""))
	released := a.issue(ect.Claims{Workflow: s.wid})
	g.call(with(released, charge(3)))
	// Token, checkpoint and node of each, and two errors.
	find := func(v workflowView, id string) (n workflowNode) {
		for _, n := range v.Nodes {
			if n.JTI == id {
				return n
			}
		}
		return n
	}
	v := g.settledView(a, s.wid, 4*3+2)
	for _, c := range []struct {
		token         *ect.Token
		state, detail string
	}{{token, "done", ""}, {mailed, "done", ""}, {doubtful, "failed", "in_doubt"}, {released, "failed", "released"}} {
		if n := find(v, c.token.ID()); n.State != c.state || n.Detail != c.detail {
			t.Errorf("%+v, want %s %q", n, c.state, c.detail)
		}
	}
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: done.checkpoint}).want(t, "completed")
	s.back(rollbackBody{ID: rollbackID(2), Checkpoint: mail.header.Get("Execution-Checkpoint")}).want(t, "escalated", "irreversible")
	lab.on("POST /charges", 1, (*restCall).usual)
	// Four more for each rollback: the request, its start, the step and the whole.
	v = g.settledView(a, s.wid, 4*3+2+2*4)
	if n := find(v, token.ID()); n.State != "rolled_back" {
		t.Errorf("undone: %+v", n)
	}
	if n := find(v, mailed.ID()); n.State != "escalated" || n.Detail != "compensation_required" {
		t.Errorf("escalated: %+v", n)
	}
}

// ATD "Coordinated Circuit Breaking": of gateways that share an upstream each has its own
// breaker. It is not shared over the upstream's address in another process, nor do an agent's
// words move it.
func TestTwoGatewaysHaveTheirOwnBreakers(t *testing.T) {
	upstream := procNewUpstream(t)
	var sites []*procSite
	for range 2 {
		site := procNewSite(t, upstream.addr)
		site.guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
		sites = append(sites, site)
	}
	other := sites[1].start(t)
	tripped := procTripped(t, sites[0], upstream)
	if a := other.post(t, procCall{id: "elsewhere"}); !a.executed() {
		t.Errorf("the other gateway's breaker is open too: %v", a)
	}
	wantProcRefused(t, tripped, upstream)
	tripped.end(t)
	other.end(t)
}

// ATD "Partial Rollback and Blast Radius Containment": what is undone must not be what a
// completed action outside of it depends on.
func TestATDSiblingDependsOnTheWire(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	// The second call is that of two tokens: one follows from the first call, the other from
	// nothing. What follows from the other one alone is outside of the sub-DAG.
	below, beside := a.issue(ect.Claims{Workflow: s.wid, Parents: []string{root.checkpoint}}), a.issue(ect.Claims{Workflow: s.wid})
	both := with(below, charge(2))
	both.header[ect.FieldName] += ", " + beside.Raw()
	if got := g.call(both); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	later := s.do(charge(3), beside.ID())
	got := s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
	if doc := got.problem(t, http.StatusConflict, "depended-on"); len(doc.Dependants) == 0 {
		t.Errorf("%s", got.body)
	}
	lab.arrived("POST /refunds", 0)
	lab.wantCharge(later.id(t), "open")
}

// ATD "Rollback Timeout and Escalation": a rollback is due after half of the shortest ttl of
// what it undoes.
func TestRollbackIsDue(t *testing.T) {
	a := newAgent(t, "a")
	_, g := launchLab(t, strings.Replace(sagaActions, "match path /charges", "match path /charges\n checkpoint_ttl 2h", 1), a)
	due := func(b rollbackBody, s *saga) time.Duration {
		t.Helper()
		b.ID = "urn:uuid:" + uuid.NewString()
		s.back(b).want(t, "completed")
		doc := document[struct{ Asked, Due time.Time }](t, s.look(b.ID))
		return doc.Due.Sub(doc.Asked).Round(time.Minute)
	}
	s := g.saga(a)
	root := s.do(put("/docs/x", `{"n":1}`))
	s.do(charge(1), root.checkpoint)
	if got := due(rollbackBody{Checkpoint: root.checkpoint, Cascade: true}, s); got != time.Hour {
		t.Errorf("with a ttl of a day and one of two hours: %v", got)
	}
	s = g.saga(a)
	alone := s.do(put("/docs/y", `{"n":1}`))
	if got := due(rollbackBody{Checkpoint: alone.checkpoint}, s); got != 12*time.Hour {
		t.Errorf("with a ttl of a day: %v", got)
	}
}

// Architecture brief, "Data Model": what a request for a rollback says is recorded, and shown
// with its result.
func TestBriefRollbackRequest(t *testing.T) {
	a := newAgent(t, "a")
	_, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(1))
	token := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Parents: []string{step.checkpoint},
		Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "wrong amount").Bool(ect.MemberCascade, true)})
	body := `{"rollback_id":"` + rollbackID(7) + `","checkpoint_id":"` + step.checkpoint + `","scope":"sub_dag","reason":"wrong amount","urgency":"high"}`
	asked := with(token, request{path: "/.well-known/cascade/rollback", body: body})
	type shown struct {
		ID         string `json:"rollback_id"`
		Checkpoint string `json:"checkpoint_id"`
		Scope      string
		Reason     string
		Urgency    string
		Requester  string
	}
	want := shown{rollbackID(7), step.checkpoint, "sub_dag", "wrong amount", "high", a.issuer.Identity()}
	if got := document[shown](t, g.call(asked)); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := document[shown](t, s.look(rollbackID(7))); got != want {
		t.Errorf("later: %+v, want %+v", got, want)
	}
	// Another urgency is another request (P5).
	asked.body = strings.Replace(body, "high", "low", 1)
	token = a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Parents: []string{step.checkpoint},
		Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "wrong amount").Bool(ect.MemberCascade, true)})
	g.call(with(token, asked)).problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")
}

// Architecture brief, B-normative-e, -f: a request always gets a result: what was done, a
// problem that says why nothing was, or the place where the result will be.
func TestBriefEveryRequestHasAResult(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, g := launchLab(t, sagaActions, a, b)
	s := g.saga(a)
	step := s.do(charge(1))
	for name, c := range map[string]struct {
		r      request
		status int
		slug   string
	}{
		"no body":         {with(a.issue(eventOf("rollback_request", ect.Cascade, s.wid, []string{step.checkpoint})), request{path: "/.well-known/cascade/rollback", reader: nothing{}}), 400, "parameter-invalid"},
		"no id":           {s.asking(rollbackBody{Checkpoint: step.checkpoint}), 400, "parameter-invalid"},
		"another phase":   {s.asking(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint, Phase: "abort"}), 400, "parameter-invalid"},
		"an unknown one":  {s.askingAfter(rollbackBody{ID: rollbackID(1), Checkpoint: uuid.NewString()}), 403, "not-in-workflow"},
		"a stranger's":    {(&saga{t, g, b, s.wid}).askingAfter(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}), 403, "not-in-workflow"},
		"without a token": {request{path: "/.well-known/cascade/rollback", body: "{}"}, 401, "authentication-required"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				if doc := g.call(c.r).problem(t, c.status, c.slug); doc.Detail == "" {
					t.Errorf("%+v says nothing", doc)
				}
			}
		})
	}
	lab.arrived("POST /refunds", 0)

	hold := newGate(t)
	lab.on("POST /refunds", 1, restWaits(hold))
	r := s.asking(rollbackBody{ID: rollbackID(2), Checkpoint: step.checkpoint})
	r.header["Prefer"] = "respond-async"
	got := g.call(r)
	if got.status != http.StatusAccepted || got.header.Get("Location") != "/.well-known/cascade/rollback/"+strings.TrimPrefix(rollbackID(2), "urn:uuid:")+"?checkpoint_id="+step.checkpoint || got.header.Get("Retry-After") == "" {
		t.Errorf("%d %v %s", got.status, got.header, got.body)
	}
	hold.open()
	s.finished(rollbackID(2)).want(t, "completed")
}

// AERR "Problem Statement": A has B change a firewall; C's monitoring fails of it; D, which
// cannot work any more, says that the root lies before it; the cascade stops at the breaker, and
// the chain is undone.
func TestAERRScenario(t *testing.T) {
	a, b, c, d := newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "c"), newAgent(t, "d")
	lab := newRestLab(t)
	g := launch(t, setup{app: trusting(t, a, b, c, d) + undoesParts, site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n" + tripping + "\n}"})
	lab.write("/docs/firewall", `{"open":[22]}`)
	s := g.saga(a)
	by := func(who *agent) *saga { return &saga{t, g, who, s.wid} }
	delegation := s.do(charge(1))
	changed := by(b).do(put("/docs/firewall", `{"open":[]}`), delegation.checkpoint)
	lab.on("POST /agents/monitor", 2, restSays(http.StatusServiceUnavailable, ""))
	for range 2 {
		by(c).try(request{path: "/agents/monitor"}, changed.checkpoint)
	}
	// The cascade is halted: D's call does not reach what fails.
	refused := by(d).try(request{path: "/agents/classify"}, changed.checkpoint)
	refused.problem(t, http.StatusServiceUnavailable, "circuit-open")
	lab.arrived("POST /agents/classify", 0)

	var root string
	eventually(t, "an error of C's call stands in the ledger", func() bool {
		for _, n := range document[workflowView](t, g.get(a, "workflows/"+s.wid)).Nodes {
			if n.Event == "error" {
				root = n.JTI
			}
		}
		return root != ""
	})
	// D names it as the root; D has a part in the workflow since it was called from it.
	force(t, lab.addr, breaker.ForcedClosed)
	t.Cleanup(func() { force(t, lab.addr, breaker.Auto) })
	own := by(d).do(charge(2), changed.checkpoint)
	claims := eventOf("aerr:error", ect.AERR, s.wid, []string{own.checkpoint}, ect.MemberErrorType)
	claims.Ext.Text(ect.MemberErrorType, "upstream_cascade").Texts(ect.MemberUpstreamErrors, []string{root})
	report := d.issue(claims)
	if got := g.call(with(report, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if named, _ := g.entry(a, s.wid, report.ID()).Ext().Texts(ect.MemberUpstreamErrors); !slices.Equal(named, []string{root}) {
		t.Errorf("the root is %v, want %s", named, root)
	}
	// A undoes the chain because of it.
	asking := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: []string{report.ID()}})
	body := `{"rollback_id":"` + rollbackID(1) + `","checkpoint_id":"` + delegation.checkpoint + `","cascade":true,"reason":"the firewall"}`
	got := g.call(with(asking, request{path: "/aerr/rollback", body: body}))
	if got.status >= 300 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	s.finished(rollbackID(1))
	lab.wantDoc("/docs/firewall", `{"open":[22]}`)
	lab.wantCharge(delegation.id(t), "refunded")
	lab.wantCharge(own.id(t), "refunded")
}
