package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// cascadeLab is a gateway before agents that call each other through it: b calls c, c calls d, and d fails
// at /d while it is down.
type cascadeLab struct {
	*gateway
	u      *upstream
	agents map[string]*agent
	site   string
}

// newCascadeLab has further options of the app.
func newCascadeLab(t *testing.T, options string, strangers ...*agent) *cascadeLab {
	t.Helper()
	lab := &cascadeLab{u: newUpstream(t), agents: map[string]*agent{}}
	all := strangers
	for _, name := range []string{"a", "b", "c", "d"} {
		lab.agents[name] = newAgent(t, name)
		all = append(all, lab.agents[name])
	}
	for name, next := range map[string]string{"b": "c", "c": "d"} {
		lab.u.on("/"+name, func(w http.ResponseWriter, r *arrival) {
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
			w.WriteHeader(map[bool]int{true: http.StatusCreated, false: http.StatusInternalServerError}[got.status == http.StatusCreated])
		})
	}
	var site strings.Builder
	for _, name := range []string{"b", "c", "d"} {
		fmt.Fprintf(&site, "handle /%s* {\n agent_proxy %s {\n name %s\n identity spiffe://example.com/agent/%s\n default_undo irreversible\n }\n }\n", name, lab.u.addr, name, name)
	}
	lab.site = site.String() + "handle /metrics {\n metrics\n }\n agent_guard_endpoints\n"
	lab.gateway = launch(t, setup{app: trusting(t, all...) + "\n" + options, badger: true, site: lab.site})
	return lab
}

// act has an agent make a call in a workflow.
func (l *cascadeLab) act(name, wid, path string, parents ...string) reply {
	return l.call(with(l.agents[name].issue(ect.Claims{Workflow: wid, Parents: parents}), request{path: path}))
}

// cascades waits until an agent sees so many cascades in a workflow.
func (l *cascadeLab) cascades(a *agent, wid string, n int) (all []api.Cascade) {
	l.t.Helper()
	eventually(l.t, "cascades in the workflow", func() bool {
		all = document[api.CascadeList](l.t, l.get(a, "cascades?wid="+wid)).Cascades
		return len(all) == n
	})
	return all
}

// C-3.4.2-c, C-3.4.3-a to -d: a failure that goes up a chain of agents is named with its root, in the ledger
// of the workflow, once, and over a restart; who has no part in it sees nothing.
func TestCascadeInDepth(t *testing.T) {
	stranger := newAgent(t, "stranger")
	lab := newCascadeLab(t, "on_cascade alert {\n escalate 2\n}", stranger)
	a, wid := lab.agents["a"], uuid.NewString()
	lab.u.on("/d", status(http.StatusInternalServerError, ""))
	if got := lab.act("a", wid, "/b"); got.status != http.StatusInternalServerError {
		t.Fatalf("%d %s", got.status, got.body)
	}
	found := lab.cascades(a, wid, 1)[0]
	if found.Pattern != "depth_first" || found.Class != "agent" || found.State != "open" || found.Root == nil || found.Root.Agent != "spiffe://example.com/agent/d" ||
		found.Root.Guard != "d" || found.Root.Upstream != lab.u.addr || len(found.Root.Reasons) == 0 || found.Failed != 3 || len(found.Workflows) != 1 {
		t.Fatalf("%+v %+v", found, found.Root)
	}
	part := found.Workflows[0]
	if len(part.Alerts) != 1 || !slices.Contains(part.Errors, found.Root.Error) || part.Escalation == "" ||
		!slices.Contains(part.BlastRadius, "spiffe://example.com/agent/a") {
		t.Errorf("%+v", part)
	}
	one := document[api.Cascade](t, lab.get(a, "cascades/"+found.ID))
	if one.ID != found.ID || len(one.Workflows) != 1 {
		t.Errorf("%+v", one)
	}
	for _, path := range []string{"cascades?wid=" + wid, "cascades"} {
		if seen := document[api.CascadeList](t, lab.get(stranger, path)); len(seen.Cascades) != 0 {
			t.Errorf("%s shows a stranger %+v", path, seen)
		}
	}
	for _, path := range []string{"cascades/" + found.ID, "cascades/unknown"} {
		lab.get(stranger, path).problem(t, http.StatusForbidden, "not-in-workflow")
	}
	if got := lab.get(stranger, "circuits"); got.status != http.StatusOK { // no guard is behind the endpoints' site
		t.Errorf("circuits: %d %s", got.status, got.body)
	}
	// The alert is a node of the workflow that follows from the errors.
	page := document[cascadeView](t, lab.get(a, "workflows/"+wid))
	alert := slices.IndexFunc(page.Nodes, func(n cascadeNode) bool { return n.Event == "cascade_detected" })
	if alert < 0 || page.Nodes[alert].JTI != part.Alerts[0] || page.Nodes[alert].Cascade != "/.well-known/cascade/cascades/"+found.ID {
		t.Errorf("%+v", page)
	}

	stop(t)
	load(t, lab.config(lab.site))
	eventually(t, "what spread before the restart is found again", func() bool { return lab.samples("/metrics")["agent_guard_cascades_open"] == "1" })
	if again := lab.cascades(a, wid, 1)[0]; again.ID != found.ID || len(again.Workflows[0].Alerts) != 1 || again.Workflows[0].Escalation != part.Escalation {
		t.Errorf("after a restart it is recorded again: %+v", again)
	}
}

// C-3.1.2-b: three services change one system, which their checkpoints name. After a wrong write calls of several
// agents fail at all three: the system is the root, and the last write to it is named.
func TestCascadeOfSharedState(t *testing.T) {
	lab := newCascadeLab(t, "")
	site := strings.ReplaceAll(lab.site, "default_undo irreversible", "default_undo irreversible\n target store")
	load(t, lab.config(site))
	a, wid := lab.agents["a"], uuid.NewString()
	for _, name := range []string{"b", "c", "d"} {
		lab.u.on("/"+name+"/write", status(http.StatusCreated, ""))
		lab.u.on("/"+name+"/read", status(http.StatusInternalServerError, ""))
	}
	began := a.issue(ect.Claims{Workflow: wid})
	wrong := lab.call(with(began, request{path: "/b/write"}))
	for i, name := range []string{"b", "c", "d"} {
		lab.act([]string{"a", "b", "c"}[i], wid, "/"+name+"/read", began.ID())
	}
	found := lab.cascades(a, wid, 1)[0]
	if r := found.Root; r == nil || r.Target != "store" || r.LastWrite != wrong.header.Get("Execution-Checkpoint") || r.Agent != "" || r.Guard != "" ||
		!slices.Contains(r.Reasons, "shared_state") || found.Class != "infrastructure" || found.Failed != 3 {
		t.Fatalf("%+v %+v", found, found.Root)
	}
}

// P3: the last write to what several agents change is not shown to who has no part in that write, even where it is
// of the same workflow.
func TestLastWriteOfAStranger(t *testing.T) {
	stranger := newAgent(t, "stranger")
	lab := newCascadeLab(t, "", stranger)
	lab.agents["stranger"] = stranger
	load(t, lab.config(strings.ReplaceAll(lab.site, "default_undo irreversible", "default_undo irreversible\n target store")))
	a, wid := lab.agents["a"], uuid.NewString()
	began := a.issue(ect.Claims{Workflow: wid})
	for _, name := range []string{"b", "c", "d"} {
		lab.u.on("/"+name+"/began", status(http.StatusCreated, ""))
		lab.u.on("/"+name+"/write", status(http.StatusCreated, ""))
		lab.u.on("/"+name+"/read", status(http.StatusInternalServerError, ""))
	}
	lab.call(with(began, request{path: "/b/began"}))
	if got := lab.act("stranger", wid, "/b/write"); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
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
		lab.u.on("/"+name, status(http.StatusInternalServerError, ""))
	}
	began := a.issue(ect.Claims{Workflow: wid})
	lab.call(with(began, request{path: "/b/began"}))
	lab.act("a", wid, "/b", began.ID()) // of failures that do not follow from each other the earliest is the root
	var pending []*pending
	for i, name := range []string{"c", "d", "b", "c", "d"} {
		caller := []string{"b", "c", "d", "b", "c"}[i]
		pending = append(pending, lab.begin(with(lab.agents[caller].issue(ect.Claims{Workflow: wid, Parents: []string{began.ID()}}), request{path: "/" + name})))
	}
	for _, p := range pending {
		p.answer()
	}
	found := lab.cascades(a, wid, 1)[0]
	if found.Pattern != "breadth_first" || found.Root == nil || found.Root.Guard != "b" || len(found.Workflows) != 1 || found.Workflows[0].Escalation == "" {
		t.Fatalf("%+v %+v", found, found.Root)
	}
	lab.act("a", wid, "/b/more", began.ID()).problem(t, http.StatusConflict, "workflow-paused")
	if got := lab.act("a", uuid.NewString(), "/b/other"); got.status != http.StatusCreated {
		t.Errorf("another workflow: %d %s", got.status, got.body)
	}
}

// `on_cascade open`: the breaker of the upstream where it began is opened for a cooldown.
func TestCascadeOpensTheRoot(t *testing.T) {
	lab := newCascadeLab(t, "on_cascade open")
	a, wid := lab.agents["a"], uuid.NewString()
	lab.u.on("/d", status(http.StatusInternalServerError, ""))
	lab.act("a", wid, "/b")
	found := lab.cascades(a, wid, 1)[0]
	eventually(t, "the breaker is open", func() bool {
		one := document[api.Cascade](t, lab.get(a, "cascades/"+found.ID))
		return slices.Contains(one.Opened, lab.u.addr)
	})
	lab.act("a", uuid.NewString(), "/b/other").problem(t, http.StatusServiceUnavailable, "circuit-open")
}

// A-coordinated-circuit-breaking-c, C-3.4.2-b: three breakers that open on one downstream are one question to
// people, and one probe in place of three.
func TestCascadeOfBreakers(t *testing.T) {
	a := newAgent(t, "a")
	var site strings.Builder
	var all []*upstream
	for i := range 3 {
		u := newUpstream(t)
		u.on("/down", status(http.StatusServiceUnavailable, ""))
		all = append(all, u)
		fmt.Fprintf(&site, "handle_path /%d/* {\n agent_proxy %s {\n name u%d\n breaker {\n consecutive 2\n downstream %s spiffe://example.com/agent/shared\n }\n }\n }\n", i, u.addr, i, u.addr)
	}
	site.WriteString("agent_guard_endpoints {\n role operator issuer:spiffe://example.com/agent/a\n}\n")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: site.String()})
	for i := range all {
		for range 2 {
			g.call(request{method: "GET", path: fmt.Sprintf("/%d/down", i)})
		}
	}
	var found []api.Cascade
	eventually(t, "the breakers are a cascade", func() bool {
		found = document[api.CascadeList](t, g.call(with(a.issue(ect.Claims{Action: "look"}), request{method: "GET", path: "/0/.well-known/cascade/cascades"}))).Cascades
		return len(found) == 1
	})
	if c := found[0]; c.Pattern != "clustering" || c.Class != "service" || !c.OneProbe || !slices.Contains(c.Breakers, all[0].addr) {
		t.Errorf("%+v", c)
	}
	type asked struct {
		Escalations []struct{ Cause string }
	}
	shared := func() (n int) {
		for _, e := range document[asked](t, g.get(a, "escalations")).Escalations {
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
	load(t, lab.config(site))
	a, wid := lab.agents["a"], uuid.NewString()
	began := a.issue(ect.Claims{Workflow: wid})
	lab.call(with(began, request{path: "/d/began"}))
	var opened []string
	for _, name := range []string{"d", "b", "c"} {
		by := lab.agents[name]
		task := by.issue(ect.Claims{Workflow: wid, Parents: []string{began.ID()}})
		if got := lab.call(with(task, request{path: "/d/work"})); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		report := by.issue(eventOf("circuit_breaker_open", ect.Cascade, wid, []string{task.ID()}))
		next := with(by.issue(ect.Claims{Workflow: wid, Parents: []string{task.ID()}}), request{path: "/d/more"})
		next.header[ect.FieldName] = report.Raw() + ", " + next.header[ect.FieldName]
		if got := lab.call(next); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
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
	alert := lab.entry(a, wid, found.Workflows[0].Alerts[0])
	agents, _ := alert.Ext().Int(ect.MemberAffectedAgents)
	root, _ := alert.Ext().Text(ect.MemberRootCause)
	named, _ := alert.Ext().Texts(ect.MemberBlastRadius)
	if !slices.Equal(alert.Parents(), opened) || agents != 4 || root != opened[0] || !slices.Equal(named, reach) {
		t.Errorf("%s", alert.Payload())
	}
	page := document[cascadeView](t, lab.get(a, "workflows/"+wid))
	if !slices.ContainsFunc(page.Nodes, func(n cascadeNode) bool { return n.JTI == alert.ID() && n.Event == "cascade_detected" }) {
		t.Errorf("it is not on the page: %+v", page)
	}
	asked := document[struct {
		Escalations []struct{ Cause, Workflow string }
	}](t, lab.get(a, "escalations?status=pending")).Escalations
	if len(asked) != 1 || asked[0].Cause != "shared_dependency" || asked[0].Workflow != wid {
		t.Errorf("asked %+v", asked)
	}

	stop(t)
	load(t, lab.config(site))
	eventually(t, "it is found again", func() bool { return lab.samples("/metrics")["agent_guard_cascades_open"] == "1" })
	if again := seen("after a restart"); again.ID != found.ID {
		t.Errorf("it is another one: %+v", again)
	}
}

// C-6.2-b: what strangers report opens and hides nothing. A flood of errors about a workflow that is not
// theirs is refused, and the cascade of that workflow is found all the same.
func TestCascadeAndStrangers(t *testing.T) {
	stranger := newAgent(t, "stranger")
	lab := newCascadeLab(t, "on_cascade alert", stranger)
	a, wid := lab.agents["a"], uuid.NewString()
	began := a.issue(ect.Claims{Workflow: wid})
	got := lab.call(with(began, request{path: "/b/began"}))
	for range 50 {
		report := stranger.issue(ect.Claims{Workflow: wid, Action: "error", Parents: []string{began.ID(), got.header.Get("Execution-Checkpoint")}, Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "timeout").Text(ect.MemberDescription, "no answer")})
		if got := lab.call(with(report, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status < 400 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	lab.u.on("/d", status(http.StatusInternalServerError, ""))
	lab.act("a", wid, "/b", began.ID())
	found := lab.cascades(a, wid, 1)[0]
	if found.Root == nil || found.Root.Agent != "spiffe://example.com/agent/d" || found.Failed != 3 {
		t.Errorf("%+v %+v", found, found.Root)
	}
}

// cascadeView is what a workflow's page says of alerts.
type cascadeView struct{ Nodes []cascadeNode }

type cascadeNode struct{ JTI, Event, Cascade string }

// C-3.4.1-a, C-3.4.1-e: permits, places to wait and connections that are used up are metrics, and a reason for the
// root of what fails meanwhile.
func TestCascadeOfAnExhaustedPool(t *testing.T) {
	lab := newCascadeLab(t, "on_cascade alert")
	site := strings.Replace(lab.site, "name d\n", "name d\n bulkhead {\n total 10\n per_workflow 9\n queue off\n }\n transport agent_guard {\n max_conns_per_host 10\n }\n", 1)
	load(t, lab.config(site))
	a, wid := lab.agents["a"], uuid.NewString()
	is := func(resource, n string) {
		t.Helper()
		metric := fmt.Sprintf(`agent_guard_exhausted{guard="d",resource=%q}`, resource)
		eventually(t, resource+" is "+n, func() bool { return lab.samples("/metrics")[metric] == n })
	}
	for _, resource := range []string{"permits", "queue", "connections"} {
		is(resource, "0")
	}
	hold := lab.u.line("/d/held")
	release := sync.OnceFunc(func() { close(hold.next) })
	t.Cleanup(release)
	var held []*pending
	busy := uuid.NewString()
	call := func() request {
		return with(lab.agents["b"].issue(ect.Claims{Workflow: busy}), request{path: "/d/held"})
	}
	for range 9 {
		held = append(held, lab.begin(call()))
	}
	is("permits", "1")
	is("connections", "1")
	eventually(t, "calls find no place to wait", func() bool {
		lab.call(call()).problem(t, http.StatusTooManyRequests, "bulkhead-full")
		return lab.samples("/metrics")[`agent_guard_exhausted{guard="d",resource="queue"}`] == "1"
	})
	lab.u.on("/d", status(http.StatusTooManyRequests, ""))
	lab.act("a", wid, "/b")
	found := lab.cascades(a, wid, 1)[0]
	if found.Root == nil || found.Root.Guard != "d" || !slices.Contains(found.Root.Reasons, "exhausted") {
		t.Errorf("%+v %+v", found, found.Root)
	}
	release()
	for _, p := range held {
		p.answer()
	}
	is("permits", "0")
}

// C-3.4.1-c, C-3.4.1-d: answers that are slow against what is usual of the upstream are a reason for the root of what
// fails meanwhile. What is usual is known after 200 answers and 30 s, and outlives a reload.
func TestCascadeOfASlowUpstream(t *testing.T) {
	lab := newCascadeLab(t, "on_cascade alert")
	ask := func(path string) *pending { return lab.begin(request{method: "GET", path: path}) }
	begun := time.Now()
	for range 200 {
		if got := ask("/d/usual").answer(); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	wait(t, time.After(time.Until(begun.Add(31*time.Second))), "the end of the first window")
	ask("/d/usual").answer()
	usual := func() string {
		return lab.samples("/metrics")[fmt.Sprintf("agent_guard_upstream_latency_usual_seconds{upstream=%q}", lab.u.addr)]
	}
	first := usual()
	n, err := strconv.ParseFloat(first, 64)
	if err != nil || n <= 0 || n > 5 {
		t.Fatalf("the baseline is %q", first)
	}
	load(t, lab.config(lab.site+"\n# reloaded"))
	lab.u.on("/d/slow", func(w http.ResponseWriter, _ *arrival) {
		<-time.After(time.Second + time.Duration(4*n*float64(time.Second))) // more than three times the usual, and than 250 ms
		w.WriteHeader(http.StatusCreated)
	})
	var slow []*pending
	for range 10 {
		slow = append(slow, ask("/d/slow"))
	}
	for _, p := range slow {
		p.answer()
	}
	lab.u.on("/d", status(http.StatusInternalServerError, ""))
	wid := uuid.NewString()
	lab.act("a", wid, "/b")
	found := lab.cascades(lab.agents["a"], wid, 1)[0]
	if found.Root == nil || found.Root.Upstream != lab.u.addr || !slices.Contains(found.Root.Reasons, "slow") {
		t.Errorf("%+v %+v", found, found.Root)
	}
	if again := usual(); again != first {
		t.Errorf("the baseline was %s, and is %s", first, again)
	}
}
