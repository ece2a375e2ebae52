package contain

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// cascadeLab is a gateway before agents that call each other through it: b calls c, c calls d, and d fails
// at /d while it is down.
type cascadeLab struct {
	*harness.Gateway
	u      *harness.Upstream
	agents map[string]*harness.Agent
	app    string
	site   string
}

// newCascadeLab has further options of the app.
func newCascadeLab(t *testing.T, options string, strangers ...*harness.Agent) *cascadeLab {
	t.Helper()
	lab := layCascadeLab(t, options, strangers...)
	lab.Gateway = harness.Launch(t, harness.Setup{App: lab.app, Badger: true, Site: lab.site})
	return lab
}

// layCascadeLab starts no gateway.
func layCascadeLab(t *testing.T, options string, strangers ...*harness.Agent) *cascadeLab {
	t.Helper()
	lab := &cascadeLab{u: harness.NewUpstream(t), agents: map[string]*harness.Agent{}}
	all := strangers
	for _, name := range []string{"a", "b", "c", "d"} {
		lab.agents[name] = harness.NewAgent(t, name)
		all = append(all, lab.agents[name])
	}
	for name, next := range map[string]string{"b": "c", "c": "d"} {
		lab.u.On("/"+name, func(w http.ResponseWriter, r *harness.Arrival) {
			var parent *ect.Unverified
			raws, _ := ect.ParseFields(r.Header[ect.FieldName])
			for _, raw := range raws {
				if token, err := ect.ParseInsecure(raw); err == nil && token.Event() == ect.EventCheckpoint {
					parent = token
				}
			}
			if parent == nil {
				t.Errorf("%s was called without a checkpoint", name)
				return
			}
			got := lab.act(name, parent.Workflow(), "/"+next, parent.ID())
			w.WriteHeader(map[bool]int{true: http.StatusCreated, false: http.StatusInternalServerError}[got.Status == http.StatusCreated])
		})
	}
	var site strings.Builder
	for _, name := range []string{"b", "c", "d"} {
		fmt.Fprintf(&site, "handle /%s* {\n agent_proxy %s {\n name %s\n identity spiffe://example.com/agent/%s\n default_undo irreversible\n }\n }\n", name, lab.u.Addr, name, name)
	}
	lab.site = site.String() + "handle /metrics {\n metrics\n }\n agent_guard_endpoints\n"
	lab.app = harness.Trusting(t, all...) + "\n" + options
	return lab
}

// act has an agent make a call in a workflow.
func (l *cascadeLab) act(name, wid, path string, parents ...string) harness.Reply {
	return l.Call(harness.With(l.agents[name].Issue(ect.Claims{Workflow: wid, Parents: parents}), harness.Request{Path: path}))
}

// cascades waits until an agent sees so many cascades in a workflow.
func (l *cascadeLab) cascades(a *harness.Agent, wid string, n int) (all []api.Cascade) {
	l.T.Helper()
	harness.Eventually(l.T, "cascades in the workflow", func() bool {
		all = harness.Document[api.CascadeList](l.T, l.Get(a, "cascades?wid="+wid)).Cascades
		return len(all) == n
	})
	return all
}

// C-3.4.2-c, C-3.4.3-a to -d: a failure that goes up a chain of agents is named with its root, in the ledger
// of the workflow, once, and over a restart; who has no part in it sees nothing.
func TestCascadeInDepth(t *testing.T) {
	stranger := harness.NewAgent(t, "stranger")
	lab := newCascadeLab(t, "on_cascade alert {\n escalate 2\n}", stranger)
	a, wid := lab.agents["a"], uuid.NewString()
	lab.u.On("/d", harness.Status(http.StatusInternalServerError, ""))
	if got := lab.act("a", wid, "/b"); got.Status != http.StatusInternalServerError {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	found := lab.cascades(a, wid, 1)[0]
	if found.Pattern != "depth_first" || found.Class != "agent" || found.State != "open" || found.Root == nil || found.Root.Agent != "spiffe://example.com/agent/d" ||
		found.Root.Guard != "d" || found.Root.Upstream != lab.u.Addr || len(found.Root.Reasons) == 0 || found.Failed != 3 || len(found.Workflows) != 1 {
		t.Fatalf("%+v %+v", found, found.Root)
	}
	part := found.Workflows[0]
	if len(part.Alerts) != 1 || !slices.Contains(part.Errors, found.Root.Error) || part.Escalation == "" ||
		!slices.Contains(part.BlastRadius, "spiffe://example.com/agent/a") {
		t.Errorf("%+v", part)
	}
	one := harness.Document[api.Cascade](t, lab.Get(a, "cascades/"+found.ID))
	if one.ID != found.ID || len(one.Workflows) != 1 {
		t.Errorf("%+v", one)
	}
	for _, path := range []string{"cascades?wid=" + wid, "cascades"} {
		if seen := harness.Document[api.CascadeList](t, lab.Get(stranger, path)); len(seen.Cascades) != 0 {
			t.Errorf("%s shows a stranger %+v", path, seen)
		}
	}
	for _, path := range []string{"cascades/" + found.ID, "cascades/unknown"} {
		lab.Get(stranger, path).Problem(t, http.StatusForbidden, "not-in-workflow")
	}
	if got := lab.Get(stranger, "circuits"); got.Status != http.StatusOK { // no guard is behind the endpoints' site
		t.Errorf("circuits: %d %s", got.Status, got.Body)
	}
	// The alert is a node of the workflow that follows from the errors.
	page := harness.Document[harness.CascadeView](t, lab.Get(a, "workflows/"+wid))
	alert := slices.IndexFunc(page.Nodes, func(n harness.CascadeNode) bool { return n.Event == "cascade_detected" })
	if alert < 0 || page.Nodes[alert].JTI != part.Alerts[0] || page.Nodes[alert].Cascade != "/.well-known/cascade/cascades/"+found.ID {
		t.Errorf("%+v", page)
	}

	harness.Stop(t)
	harness.Load(t, lab.Config(lab.site))
	harness.Eventually(t, "what spread before the restart is found again", func() bool { return lab.Samples("/metrics")["agent_guard_cascades_open"] == "1" })
	if again := lab.cascades(a, wid, 1)[0]; again.ID != found.ID || len(again.Workflows[0].Alerts) != 1 || again.Workflows[0].Escalation != part.Escalation {
		t.Errorf("after a restart it is recorded again: %+v", again)
	}
}

// C-3.1.2-b: three services change one system, which their checkpoints name. After a wrong write calls of several
// agents fail at all three: the system is the root, and the last write to it is named.
func TestCascadeOfSharedState(t *testing.T) {
	lab := newCascadeLab(t, "")
	site := strings.ReplaceAll(lab.site, "default_undo irreversible", "default_undo irreversible\n target store")
	harness.Load(t, lab.Config(site))
	a, wid := lab.agents["a"], uuid.NewString()
	for _, name := range []string{"b", "c", "d"} {
		lab.u.On("/"+name+"/write", harness.Status(http.StatusCreated, ""))
		lab.u.On("/"+name+"/read", harness.Status(http.StatusInternalServerError, ""))
	}
	began := a.Issue(ect.Claims{Workflow: wid})
	wrong := lab.Call(harness.With(began, harness.Request{Path: "/b/write"}))
	for i, name := range []string{"b", "c", "d"} {
		lab.act([]string{"a", "b", "c"}[i], wid, "/"+name+"/read", began.ID())
	}
	found := lab.cascades(a, wid, 1)[0]
	if r := found.Root; r == nil || r.Target != "store" || r.LastWrite != wrong.Header.Get("Execution-Checkpoint") || r.Agent != "" || r.Guard != "" ||
		!slices.Contains(r.Reasons, "shared_state") || found.Class != "infrastructure" || found.Failed != 3 {
		t.Fatalf("%+v %+v", found, found.Root)
	}
}

// P3: the last write to what several agents change is not shown to who has no part in that write, even where it is
// of the same workflow.
func TestLastWriteOfAStranger(t *testing.T) {
	stranger := harness.NewAgent(t, "stranger")
	lab := newCascadeLab(t, "", stranger)
	lab.agents["stranger"] = stranger
	harness.Load(t, lab.Config(strings.ReplaceAll(lab.site, "default_undo irreversible", "default_undo irreversible\n target store")))
	a, wid := lab.agents["a"], uuid.NewString()
	began := a.Issue(ect.Claims{Workflow: wid})
	for _, name := range []string{"b", "c", "d"} {
		lab.u.On("/"+name+"/began", harness.Status(http.StatusCreated, ""))
		lab.u.On("/"+name+"/write", harness.Status(http.StatusCreated, ""))
		lab.u.On("/"+name+"/read", harness.Status(http.StatusInternalServerError, ""))
	}
	lab.Call(harness.With(began, harness.Request{Path: "/b/began"}))
	if got := lab.act("stranger", wid, "/b/write"); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	for i, name := range []string{"b", "c", "d"} {
		lab.act([]string{"a", "b", "c"}[i], wid, "/"+name+"/read", began.ID())
	}
	if r := lab.cascades(a, wid, 1)[0].Root; r == nil || r.Target != "store" || r.LastWrite != "" {
		t.Errorf("%+v", r)
	}
}

// C-3.4.2-d and `on_cascade pause`: calls side by side that fail at once are a cascade, and the workflow is
// paused until a person resumes it. Another workflow goes on.
func TestCascadeInBreadthPauses(t *testing.T) {
	lab := newCascadeLab(t, "on_cascade pause")
	a, wid := lab.agents["a"], uuid.NewString()
	for _, name := range []string{"b", "c", "d"} {
		lab.u.On("/"+name, harness.Status(http.StatusInternalServerError, ""))
	}
	began := a.Issue(ect.Claims{Workflow: wid})
	lab.Call(harness.With(began, harness.Request{Path: "/b/began"}))
	lab.act("a", wid, "/b", began.ID()) // of failures that do not follow from each other the earliest is the root
	var pending []*harness.Pending
	for i, name := range []string{"c", "d", "b", "c", "d"} {
		caller := []string{"b", "c", "d", "b", "c"}[i]
		pending = append(pending, lab.Begin(harness.With(lab.agents[caller].Issue(ect.Claims{Workflow: wid, Parents: []string{began.ID()}}), harness.Request{Path: "/" + name})))
	}
	for _, p := range pending {
		p.Answer()
	}
	found := lab.cascades(a, wid, 1)[0]
	if found.Pattern != "breadth_first" || found.Root == nil || found.Root.Guard != "b" || len(found.Workflows) != 1 || found.Workflows[0].Escalation == "" {
		t.Fatalf("%+v %+v", found, found.Root)
	}
	lab.act("a", wid, "/b/more", began.ID()).Problem(t, http.StatusConflict, "workflow-paused")
	if got := lab.act("a", uuid.NewString(), "/b/other"); got.Status != http.StatusCreated {
		t.Errorf("another workflow: %d %s", got.Status, got.Body)
	}
}

// `on_cascade open`: the breaker of the upstream where it began is opened for a cooldown.
func TestCascadeOpensTheRoot(t *testing.T) {
	lab := newCascadeLab(t, "on_cascade open")
	a, wid := lab.agents["a"], uuid.NewString()
	lab.u.On("/d", harness.Status(http.StatusInternalServerError, ""))
	lab.act("a", wid, "/b")
	found := lab.cascades(a, wid, 1)[0]
	harness.Eventually(t, "the breaker is open", func() bool {
		one := harness.Document[api.Cascade](t, lab.Get(a, "cascades/"+found.ID))
		return slices.Contains(one.Opened, lab.u.Addr)
	})
	lab.act("a", uuid.NewString(), "/b/other").Problem(t, http.StatusServiceUnavailable, "circuit-open")
}

// A-coordinated-circuit-breaking-c, C-3.4.2-b: three breakers that open on one downstream are one question to
// people, and one probe in place of three.
func TestCascadeOfBreakers(t *testing.T) {
	a := harness.NewAgent(t, "a")
	var site strings.Builder
	var all []*harness.Upstream
	for i := range 3 {
		u := harness.NewUpstream(t)
		u.On("/down", harness.Status(http.StatusServiceUnavailable, ""))
		all = append(all, u)
		fmt.Fprintf(&site, "handle_path /%d/* {\n agent_proxy %s {\n name u%d\n breaker {\n consecutive 2\n downstream %s spiffe://example.com/agent/shared\n }\n }\n }\n", i, u.Addr, i, u.Addr)
	}
	site.WriteString("agent_guard_endpoints {\n role operator issuer:spiffe://example.com/agent/a\n}\n")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: site.String()})
	for i := range all {
		for range 2 {
			g.Call(harness.Request{Method: "GET", Path: fmt.Sprintf("/%d/down", i)})
		}
	}
	var found []api.Cascade
	harness.Eventually(t, "the breakers are a cascade", func() bool {
		found = harness.Document[api.CascadeList](t, g.Call(harness.With(a.Issue(ect.Claims{Action: "look"}), harness.Request{Method: "GET", Path: "/0/.well-known/cascade/cascades"}))).Cascades
		return len(found) == 1
	})
	if c := found[0]; c.Pattern != "clustering" || c.Class != "service" || !c.OneProbe || !slices.Contains(c.Breakers, all[0].Addr) {
		t.Errorf("%+v", c)
	}
	type asked struct {
		Escalations []struct{ Cause string }
	}
	shared := func() (n int) {
		for _, e := range harness.Document[asked](t, g.Get(a, "escalations")).Escalations {
			if e.Cause == "shared_dependency" {
				n++
			}
		}
		return n
	}
	if n := shared(); n != 1 {
		t.Errorf("%d questions to people", n)
	}
}

// C-3.4.2-b, Figure 6: breakers of agents that open on one downstream are a cascade that names these agents, in its
// token, on the workflow's page and for its initiator, with one root everywhere, also after a restart. It is one question.
func TestCascadeOfReportedBreakers(t *testing.T) {
	lab := newCascadeLab(t, "")
	site := strings.Replace(lab.site, "agent_guard_endpoints\n", "agent_guard_endpoints {\n role operator issuer:spiffe://example.com/agent/a\n}\n", 1)
	harness.Load(t, lab.Config(site))
	a, wid := lab.agents["a"], uuid.NewString()
	began := a.Issue(ect.Claims{Workflow: wid})
	lab.Call(harness.With(began, harness.Request{Path: "/d/began"}))
	var opened []string
	for _, name := range []string{"d", "b", "c"} {
		by := lab.agents[name]
		task := by.Issue(ect.Claims{Workflow: wid, Parents: []string{began.ID()}})
		if got := lab.Call(harness.With(task, harness.Request{Path: "/d/work"})); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		report := by.Issue(harness.EventOf("circuit_breaker_open", ect.Cascade, wid, []string{task.ID()}))
		next := harness.With(by.Issue(ect.Claims{Workflow: wid, Parents: []string{task.ID()}}), harness.Request{Path: "/d/more"})
		next.Header[ect.FieldName] = report.Raw() + ", " + next.Header[ect.FieldName]
		if got := lab.Call(next); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		opened = append(opened, report.ID())
	}
	const shared = "spiffe://example.com/b"
	reach := []string{"spiffe://example.com/agent/b", "spiffe://example.com/agent/c", "spiffe://example.com/agent/d", shared}
	seen := func(when string) api.Cascade {
		t.Helper()
		found := lab.cascades(a, wid, 1)[0]
		if len(found.Workflows) != 1 || found.Pattern != "clustering" || found.Root == nil || found.Root.Error != opened[0] || found.Affected != 4 || found.Failed != 1 {
			t.Fatalf("%s: %+v %+v", when, found, found.Root)
		}
		part := found.Workflows[0]
		if !slices.Equal(part.Errors, opened) || !slices.Equal(part.BlastRadius, reach) || !slices.Equal(part.Failed, []string{shared}) || len(part.Alerts) != 1 {
			t.Errorf("%s: %+v", when, part)
		}
		return found
	}
	found := seen("at first")
	alert := lab.Entry(a, wid, found.Workflows[0].Alerts[0])
	agents, _ := alert.Ext().Int(ect.MemberAffectedAgents)
	root, _ := alert.Ext().Text(ect.MemberRootCause)
	named, _ := alert.Ext().Texts(ect.MemberBlastRadius)
	if !slices.Equal(alert.Parents(), opened) || agents != 4 || root != opened[0] || !slices.Equal(named, reach) {
		t.Errorf("%s", alert.Payload())
	}
	page := harness.Document[harness.CascadeView](t, lab.Get(a, "workflows/"+wid))
	if !slices.ContainsFunc(page.Nodes, func(n harness.CascadeNode) bool { return n.JTI == alert.ID() && n.Event == "cascade_detected" }) {
		t.Errorf("it is not on the page: %+v", page)
	}
	asked := harness.Document[struct {
		Escalations []struct{ Cause, Workflow string }
	}](t, lab.Get(a, "escalations?status=pending")).Escalations
	if len(asked) != 1 || asked[0].Cause != "shared_dependency" || asked[0].Workflow != wid {
		t.Errorf("asked %+v", asked)
	}

	harness.Stop(t)
	harness.Load(t, lab.Config(site))
	harness.Eventually(t, "it is found again", func() bool { return lab.Samples("/metrics")["agent_guard_cascades_open"] == "1" })
	if again := seen("after a restart"); again.ID != found.ID {
		t.Errorf("it is another one: %+v", again)
	}
}

// C-6.2-b: what strangers report opens and hides nothing. A flood of errors about a workflow that is not
// theirs is refused, and the cascade of that workflow is found all the same.
func TestCascadeAndStrangers(t *testing.T) {
	stranger := harness.NewAgent(t, "stranger")
	lab := newCascadeLab(t, "on_cascade alert", stranger)
	a, wid := lab.agents["a"], uuid.NewString()
	began := a.Issue(ect.Claims{Workflow: wid})
	got := lab.Call(harness.With(began, harness.Request{Path: "/b/began"}))
	for range 50 {
		report := stranger.Issue(ect.Claims{Workflow: wid, Action: "error", Parents: []string{began.ID(), got.Header.Get("Execution-Checkpoint")}, Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "timeout").Text(ect.MemberDescription, "no answer")})
		if got := lab.Call(harness.With(report, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status < 400 {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	lab.u.On("/d", harness.Status(http.StatusInternalServerError, ""))
	lab.act("a", wid, "/b", began.ID())
	found := lab.cascades(a, wid, 1)[0]
	if found.Root == nil || found.Root.Agent != "spiffe://example.com/agent/d" || found.Failed != 3 {
		t.Errorf("%+v %+v", found, found.Root)
	}
}

// C-3.4.1-a, C-3.4.1-e: permits, places to wait and connections that are used up are metrics, and a reason for the
// root of what fails meanwhile.
func TestCascadeOfAnExhaustedPool(t *testing.T) {
	lab := newCascadeLab(t, "on_cascade alert")
	site := strings.Replace(lab.site, "name d\n", "name d\n bulkhead {\n total 10\n per_workflow 9\n queue off\n }\n transport agent_guard {\n max_conns_per_host 10\n }\n", 1)
	harness.Load(t, lab.Config(site))
	a, wid := lab.agents["a"], uuid.NewString()
	is := func(resource, n string) {
		t.Helper()
		metric := fmt.Sprintf(`agent_guard_exhausted{guard="d",resource=%q}`, resource)
		harness.Eventually(t, resource+" is "+n, func() bool { return lab.Samples("/metrics")[metric] == n })
	}
	for _, resource := range []string{"permits", "queue", "connections"} {
		is(resource, "0")
	}
	hold := lab.u.Line("/d/held")
	release := sync.OnceFunc(func() { close(hold.Next) })
	t.Cleanup(release)
	var held []*harness.Pending
	busy := uuid.NewString()
	call := func() harness.Request {
		return harness.With(lab.agents["b"].Issue(ect.Claims{Workflow: busy}), harness.Request{Path: "/d/held"})
	}
	for range 9 {
		held = append(held, lab.Begin(call()))
	}
	is("permits", "1")
	is("connections", "1")
	harness.Eventually(t, "calls find no place to wait", func() bool {
		lab.Call(call()).Problem(t, http.StatusTooManyRequests, "bulkhead-full")
		return lab.Samples("/metrics")[`agent_guard_exhausted{guard="d",resource="queue"}`] == "1"
	})
	lab.u.On("/d", harness.Status(http.StatusTooManyRequests, ""))
	lab.act("a", wid, "/b")
	found := lab.cascades(a, wid, 1)[0]
	if found.Root == nil || found.Root.Guard != "d" || !slices.Contains(found.Root.Reasons, "exhausted") {
		t.Errorf("%+v %+v", found, found.Root)
	}
	release()
	for _, p := range held {
		p.Answer()
	}
	is("permits", "0")
}
