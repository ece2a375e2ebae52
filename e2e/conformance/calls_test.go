//go:build unix

package conformance

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Execution Guard RFC, "Open Questions": for how long results, keys and checkpoints are kept
// where nothing is configured, as published and as it is.
func TestConformanceDefaults(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr})
	policy := harness.Document[struct {
		Actions []struct {
			Result     float64 `json:"retain_result_s"`
			Key        float64 `json:"retain_key_s"`
			Checkpoint float64 `json:"checkpoint_ttl_s"`
		}
	}](t, g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/policy"}))
	const day = 24 * 3600
	if len(policy.Actions) != 1 || policy.Actions[0].Result != day || policy.Actions[0].Key != 30*day || policy.Actions[0].Checkpoint != day {
		t.Errorf("%+v", policy)
	}
	r := harness.Request{Path: "/x", Id: "k"}
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	g.Store.Pass(23 * time.Hour)
	g.Call(r).Want(t, 201, "arrival 1", "replayed")
	g.Store.Pass(2 * time.Hour)
	g.Call(r).Terminal(t, 409, "result-expired")
	g.Store.Pass(28 * day * time.Second)
	g.Call(r).Terminal(t, 409, "result-expired")
	g.Store.Pass(2 * day * time.Second)
	g.Call(r).Want(t, 201, "arrival 2", "executed")
}

// ATD "Checkpoint Placement Policy", cascade 4.2.1-a: every method that may change something
// has a checkpoint that is stored before the call leaves; what changes nothing has none.
func TestGuardedMethodsHaveCheckpoints(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr + " {\n consequential path /fire\n action measure {\n match path /measure\n consequential\n }\n }"})
	stored := func() (n int) {
		for _, err := range g.Store.Memory.Scan(context.Background(), store.Prefix([]byte("kb"))) {
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
		u.On(path, func(w http.ResponseWriter, _ *harness.Arrival) {
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
		token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
		got := g.Call(harness.With(token, harness.Request{Method: c.method, Path: c.path}))
		id := got.Header.Get("Execution-Checkpoint")
		if got.Status != http.StatusOK || (id != "") != c.has || there != c.has {
			t.Errorf("%s %s: %d, checkpoint %q, stored before it left: %v", c.method, c.path, got.Status, id, there)
		}
		if c.has && id != "" {
			v := g.CheckpointOf(a, got)
			if v.Claims.Ext["cascade.reversible"] != false || v.Verification.Snapshot != "matches" {
				t.Errorf("%s: %+v", c.method, v)
			}
		}
	}
}

// ATD "Topological Order": tasks without a common ancestor run side by side.
func TestCallsSideBySide(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	one, two := harness.NewGate(t), harness.NewGate(t)
	u.On("/one", func(http.ResponseWriter, *harness.Arrival) { one.Pass() })
	u.On("/two", func(http.ResponseWriter, *harness.Arrival) { two.Pass() })
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr})
	wid := uuid.NewString()
	first := g.Begin(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/one"}))
	second := g.Begin(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/two"}))
	harness.Wait(t, one.Arrived, "the first")
	harness.Wait(t, two.Arrived, "the second, beside it")
	two.Open()
	second.Answer()
	one.Open()
	first.Answer()
}

// Cascade 4.2.2-a, ATD "Checkpoint ECT Format": a checkpoint is there, and can be rolled back
// to, until its ttl is over, over restarts, also where the ledger has pruned what came with it;
// then it is not.
func TestCascade422KeptForItsTTL(t *testing.T) {
	a := harness.NewAgent(t, "a")
	app, lab := strings.Replace(harness.Trusting(t, a), "key_file", "retain 1h\n key_file", 1), harness.NewRestLab(t)
	setting := harness.Setup{App: app, Site: "agent_proxy " + lab.Addr + " {\n" + strings.ReplaceAll(harness.SagaActions, "match path /charges", "match path /charges\n checkpoint_ttl 1000h") + "\n}"}
	g := harness.Launch(t, setting)
	s := g.Saga(a)
	long, short := s.Do(harness.Charge(1)), s.Do(harness.Put("/docs/x", `{"n":1}`))
	// The ledger prunes 256 entries at a time.
	for range 90 {
		s.Do(harness.Put("/docs/y", `{"n":1}`))
	}
	g.SettledView(a, s.Wid, 92*3)
	again := func() {
		t.Helper()
		harness.Stop(t)
		setting.Store = g.Store
		g = harness.Launch(t, setting)
		s.G = g
	}
	g.Store.Pass(23 * time.Hour)
	again()
	for _, id := range []string{long.Checkpoint, short.Checkpoint} {
		doc := harness.Document[harness.CheckpointDoc](t, s.Checkpoint(id))
		if doc.Verification.Signature != "valid" || doc.Verification.Snapshot != "matches" || !doc.Reversible {
			t.Errorf("within its ttl: %+v", doc)
		}
	}
	g.Store.Pass(970 * time.Hour)
	again()
	harness.Eventually(t, "the ledger has pruned the checkpoint with the shorter ttl", func() bool {
		return g.Get(a, "ledger/entries?jti="+short.Checkpoint+"&wid="+s.Wid).Status != http.StatusOK
	})
	if got := s.Checkpoint(short.Checkpoint); got.Status < 400 {
		t.Errorf("after its ttl: %d %s", got.Status, got.Body)
	}
	doc := harness.Document[harness.CheckpointDoc](t, s.Checkpoint(long.Checkpoint))
	if doc.Verification.Signature != "valid" || doc.Verification.Snapshot != "matches" || !doc.Reversible {
		t.Errorf("after 993 of its 1000 hours: %+v", doc)
	}
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: long.Checkpoint}).Want(t, "completed")
	lab.WantCharge(long.Id(t), "refunded")
	lab.WantDoc("/docs/x", `{"n":1}`)
}

// ATD "Node States", brief "Data Model": running, rolled back and escalated nodes, and the
// details that say more.
func TestNodeStatesOnTheWire(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	hold := harness.NewGate(t)
	lab.On("POST /charges", 1, harness.RestWaits(hold))
	token := a.Issue(ect.Claims{Workflow: s.Wid})
	running := g.Begin(harness.With(token, harness.Charge(1)))
	harness.Wait(t, hold.Arrived, "the charge")
	harness.Eventually(t, "the workflow shows it", func() bool { return g.Get(a, "workflows/"+s.Wid).Status == http.StatusOK })
	if got := g.SettledView(a, s.Wid, 2).State(token.ID()); got != "running" {
		t.Errorf("while it runs it is %s", got)
	}
	hold.Open()
	done := harness.SagaStep{Reply: running.Answer()}
	done.Checkpoint = done.Header.Get("Execution-Checkpoint")
	mailed := a.Issue(ect.Claims{Workflow: s.Wid})
	mail := g.Call(harness.With(mailed, harness.Request{Path: "/mail"}))
	lab.On("POST /charges", 1, harness.RestLoses)
	doubtful := a.Issue(ect.Claims{Workflow: s.Wid})
	g.Call(harness.With(doubtful, harness.Charge(2)))
	lab.On("POST /charges", 1, harness.RestSays(http.StatusTooManyRequests, ""))
	released := a.Issue(ect.Claims{Workflow: s.Wid})
	g.Call(harness.With(released, harness.Charge(3)))
	// Token, checkpoint and node of each, and two errors.
	find := func(v harness.WorkflowView, id string) (n harness.WorkflowNode) {
		for _, n := range v.Nodes {
			if n.JTI == id {
				return n
			}
		}
		return n
	}
	v := g.SettledView(a, s.Wid, 4*3+2)
	for _, c := range []struct {
		token         *ect.Token
		state, detail string
	}{{token, "done", ""}, {mailed, "done", ""}, {doubtful, "failed", "in_doubt"}, {released, "failed", "released"}} {
		if n := find(v, c.token.ID()); n.State != c.state || n.Detail != c.detail {
			t.Errorf("%+v, want %s %q", n, c.state, c.detail)
		}
	}
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: done.Checkpoint}).Want(t, "completed")
	s.Back(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: mail.Header.Get("Execution-Checkpoint")}).Want(t, "escalated", "irreversible")
	lab.On("POST /charges", 1, (*harness.RestCall).Usual)
	// Four more for each rollback: the request, its start, the step and the whole.
	v = g.SettledView(a, s.Wid, 4*3+2+2*4)
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
	upstream := harness.ProcNewUpstream(t)
	var sites []*harness.ProcSite
	for range 2 {
		site := harness.ProcNewSite(t, upstream.Addr)
		site.Guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
		sites = append(sites, site)
	}
	other := sites[1].Start(t)
	tripped := harness.ProcTripped(t, sites[0], upstream)
	if a := other.Post(t, harness.ProcCall{Id: "elsewhere"}); !a.Executed() {
		t.Errorf("the other gateway's breaker is open too: %v", a)
	}
	harness.WantProcRefused(t, tripped, upstream)
	tripped.End(t)
	other.End(t)
}

// ATD "Partial Rollback and Blast Radius Containment": what is undone must not be what a
// completed action outside of it depends on.
func TestATDSiblingDependsOnTheWire(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	// The second call is that of two tokens: one follows from the first call, the other from
	// nothing. What follows from the other one alone is outside of the sub-DAG.
	below, beside := a.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{root.Checkpoint}}), a.Issue(ect.Claims{Workflow: s.Wid})
	both := harness.With(below, harness.Charge(2))
	both.Header[ect.FieldName] += ", " + beside.Raw()
	if got := g.Call(both); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	later := s.Do(harness.Charge(3), beside.ID())
	got := s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true})
	if doc := got.Problem(t, http.StatusConflict, "depended-on"); len(doc.Dependants) == 0 {
		t.Errorf("%s", got.Body)
	}
	lab.Arrived("POST /refunds", 0)
	lab.WantCharge(later.Id(t), "open")
}

// ATD "Rollback Timeout and Escalation": a rollback is due after half of the shortest ttl of
// what it undoes.
func TestRollbackIsDue(t *testing.T) {
	a := harness.NewAgent(t, "a")
	_, g := harness.LaunchLab(t, strings.Replace(harness.SagaActions, "match path /charges", "match path /charges\n checkpoint_ttl 2h", 1), a)
	due := func(b harness.RollbackBody, s *harness.Saga) time.Duration {
		t.Helper()
		b.ID = "urn:uuid:" + uuid.NewString()
		s.Back(b).Want(t, "completed")
		doc := harness.Document[struct{ Asked, Due time.Time }](t, s.Look(b.ID))
		return doc.Due.Sub(doc.Asked).Round(time.Minute)
	}
	s := g.Saga(a)
	root := s.Do(harness.Put("/docs/x", `{"n":1}`))
	s.Do(harness.Charge(1), root.Checkpoint)
	if got := due(harness.RollbackBody{Checkpoint: root.Checkpoint, Cascade: true}, s); got != time.Hour {
		t.Errorf("with a ttl of a day and one of two hours: %v", got)
	}
	s = g.Saga(a)
	alone := s.Do(harness.Put("/docs/y", `{"n":1}`))
	if got := due(harness.RollbackBody{Checkpoint: alone.Checkpoint}, s); got != 12*time.Hour {
		t.Errorf("with a ttl of a day: %v", got)
	}
}

// Architecture brief, "Data Model": what a request for a rollback says is recorded, and shown
// with its result.
func TestBriefRollbackRequest(t *testing.T) {
	a := harness.NewAgent(t, "a")
	_, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	token := a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Parents: []string{step.Checkpoint},
		Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "wrong amount").Bool(ect.MemberCascade, true)})
	body := `{"rollback_id":"` + harness.RollbackID(7) + `","checkpoint_id":"` + step.Checkpoint + `","scope":"sub_dag","reason":"wrong amount","urgency":"high"}`
	asked := harness.With(token, harness.Request{Path: "/.well-known/cascade/rollback", Body: body})
	type shown struct {
		ID         string `json:"rollback_id"`
		Checkpoint string `json:"checkpoint_id"`
		Scope      string
		Reason     string
		Urgency    string
		Requester  string
	}
	want := shown{harness.RollbackID(7), step.Checkpoint, "sub_dag", "wrong amount", "high", a.Issuer.Identity()}
	if got := harness.Document[shown](t, g.Call(asked)); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := harness.Document[shown](t, s.Look(harness.RollbackID(7))); got != want {
		t.Errorf("later: %+v, want %+v", got, want)
	}
	// Another urgency is another request (P5).
	asked.Body = strings.Replace(body, "high", "low", 1)
	token = a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Parents: []string{step.Checkpoint},
		Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "wrong amount").Bool(ect.MemberCascade, true)})
	g.Call(harness.With(token, asked)).Problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")
}

// Architecture brief, B-normative-e, -f: a request always gets a result: what was done, a
// problem that says why nothing was, or the place where the result will be.
func TestBriefEveryRequestHasAResult(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a, b)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	for name, c := range map[string]struct {
		r      harness.Request
		status int
		slug   string
	}{
		"no body":         {harness.With(a.Issue(harness.EventOf("rollback_request", ect.Cascade, s.Wid, []string{step.Checkpoint})), harness.Request{Path: "/.well-known/cascade/rollback", Reader: harness.Nothing{}}), 400, "parameter-invalid"},
		"no id":           {s.Asking(harness.RollbackBody{Checkpoint: step.Checkpoint}), 400, "parameter-invalid"},
		"another phase":   {s.Asking(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint, Phase: "abort"}), 400, "parameter-invalid"},
		"an unknown one":  {s.AskingAfter(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: uuid.NewString()}), 403, "not-in-workflow"},
		"a stranger's":    {(&harness.Saga{T: t, G: g, A: b, Wid: s.Wid}).AskingAfter(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}), 403, "not-in-workflow"},
		"without a token": {harness.Request{Path: "/.well-known/cascade/rollback", Body: "{}"}, 401, "authentication-required"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				if doc := g.Call(c.r).Problem(t, c.status, c.slug); doc.Detail == "" {
					t.Errorf("%+v says nothing", doc)
				}
			}
		})
	}
	lab.Arrived("POST /refunds", 0)

	hold := harness.NewGate(t)
	lab.On("POST /refunds", 1, harness.RestWaits(hold))
	r := s.Asking(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: step.Checkpoint})
	r.Header["Prefer"] = "respond-async"
	got := g.Call(r)
	if got.Status != http.StatusAccepted || got.Header.Get("Location") != "/.well-known/cascade/rollback/"+strings.TrimPrefix(harness.RollbackID(2), "urn:uuid:")+"?checkpoint_id="+step.Checkpoint || got.Header.Get("Retry-After") == "" {
		t.Errorf("%d %v %s", got.Status, got.Header, got.Body)
	}
	hold.Open()
	s.Finished(harness.RollbackID(2)).Want(t, "completed")
}

// AERR "Problem Statement": A has B change a firewall; C's monitoring fails of it; D, which
// cannot work any more, says that the root lies before it; the cascade stops at the breaker, and
// the chain is undone.
func TestAERRScenario(t *testing.T) {
	a, b, c, d := harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "c"), harness.NewAgent(t, "d")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b, c, d) + harness.UndoesParts, Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n" + harness.Tripping + "\n}"})
	lab.Write("/docs/firewall", `{"open":[22]}`)
	s := g.Saga(a)
	by := func(who *harness.Agent) *harness.Saga { return &harness.Saga{T: t, G: g, A: who, Wid: s.Wid} }
	delegation := s.Do(harness.Charge(1))
	changed := by(b).Do(harness.Put("/docs/firewall", `{"open":[]}`), delegation.Checkpoint)
	lab.On("POST /agents/monitor", 2, harness.RestSays(http.StatusServiceUnavailable, ""))
	for range 2 {
		by(c).Try(harness.Request{Path: "/agents/monitor"}, changed.Checkpoint)
	}
	// The cascade is halted: D's call does not reach what fails.
	refused := by(d).Try(harness.Request{Path: "/agents/classify"}, changed.Checkpoint)
	refused.Problem(t, http.StatusServiceUnavailable, "circuit-open")
	lab.Arrived("POST /agents/classify", 0)

	var root string
	harness.Eventually(t, "an error of C's call stands in the ledger", func() bool {
		for _, n := range harness.Document[harness.WorkflowView](t, g.Get(a, "workflows/"+s.Wid)).Nodes {
			if n.Event == "error" {
				root = n.JTI
			}
		}
		return root != ""
	})
	// D names it as the root; D has a part in the workflow since it was called from it.
	harness.Force(t, lab.Addr, breaker.ForcedClosed)
	t.Cleanup(func() { harness.Force(t, lab.Addr, breaker.Auto) })
	own := by(d).Do(harness.Charge(2), changed.Checkpoint)
	claims := harness.EventOf("aerr:error", ect.AERR, s.Wid, []string{own.Checkpoint}, ect.MemberErrorType)
	claims.Ext.Text(ect.MemberErrorType, "upstream_cascade").Texts(ect.MemberUpstreamErrors, []string{root})
	report := d.Issue(claims)
	if got := g.Call(harness.With(report, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	if named, _ := g.Entry(a, s.Wid, report.ID()).Ext().Texts(ect.MemberUpstreamErrors); !slices.Equal(named, []string{root}) {
		t.Errorf("the root is %v, want %s", named, root)
	}
	// A undoes the chain because of it.
	asking := a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: []string{report.ID()}})
	body := `{"rollback_id":"` + harness.RollbackID(1) + `","checkpoint_id":"` + delegation.Checkpoint + `","cascade":true,"reason":"the firewall"}`
	got := g.Call(harness.With(asking, harness.Request{Path: "/aerr/rollback", Body: body}))
	if got.Status >= 300 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	s.Finished(harness.RollbackID(1))
	lab.WantDoc("/docs/firewall", `{"open":[22]}`)
	lab.WantCharge(delegation.Id(t), "refunded")
	lab.WantCharge(own.Id(t), "refunded")
}
