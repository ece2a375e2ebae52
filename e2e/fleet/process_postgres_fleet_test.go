//go:build unix

package fleet

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// ADR 0135, P1, P2, P6, P7: two gateways on one database. A retry at one finds the execution of the other, also while
// it runs; a rollback at one undoes the call of the other; what a killed one had under way is in doubt for the other at
// once, which serves all else; and one leaves and comes back without anybody noticing.
func TestProcessPostgresFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := harness.NewRestLab(t)
	one, server, there := harness.PostgresSite(t, &harness.ProcUpstream{Addr: lab.Addr})
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, lab.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	keys := "keys file " + one.Path("keys")
	for _, site := range []*harness.ProcSite{one, two} {
		site.Guard = harness.SagaActions
		site.App = keys + "\n\t\tidentity " + harness.GatewayIdentity + " {\n\t\t\tkey_file " + site.Path("identity") + "\n\t\t}"
	}
	two.App += "\n\t\tquota {\n\t\t\topen_executions 100\n\t\t}"
	a, b := one.Start(t), two.Start(t)
	at := func(site *harness.ProcSite, r harness.Request, id string) harness.Reply {
		t.Helper()
		r.Id, r.Host = id, one.Addr
		r.Header = harness.Headers{"Authorization": "Bearer " + harness.ProcCredential, "Workflow-Id": "w-" + t.Name()}
		return site.Gateway(t).Call(r)
	}

	// A retry comes to the other gateway.
	first := at(one, harness.Charge(7), "first")
	if again := at(two, harness.Charge(7), "first"); first.Status != http.StatusOK && first.Status != http.StatusCreated ||
		again.Header.Get("Execution-Status") != "replayed" || again.Body != first.Body {
		t.Fatalf("%d %s, and at the other gateway %d %s %s", first.Status, first.Body, again.Status, again.Header.Get("Execution-Status"), again.Body)
	}

	// And while it runs: it gets the same bytes, from the first on.
	begun, next := make(chan struct{}), make(chan struct{})
	lab.On("POST /slow", 1, func(c *harness.RestCall) {
		c.W.WriteHeader(http.StatusCreated)
		for _, line := range []string{"one\n", "two\n"} {
			_, _ = io.WriteString(c.W, line)
			_ = http.NewResponseController(c.W).Flush()
			if line == "one\n" {
				close(begun)
				<-next
			}
		}
	})
	slow := harness.ProcCall{Id: "slow", Path: "/slow", Host: one.Addr}
	owner := a.Begin(t.Context(), harness.ProcDial(), slow)
	harness.WaitWithin(t, harness.ProcBound, begun, "the call arrives")
	attached, err := harness.ProcSend(t.Context(), harness.ProcDial(), two.Addr, slow)
	if err != nil {
		t.Fatal(err)
	}
	defer attached.Body.Close()
	lines := bufio.NewReader(attached.Body)
	if line, err := lines.ReadString('\n'); err != nil || line != "one\n" || attached.Header.Get("Execution-Status") != "attached" {
		t.Errorf("at the other gateway: %d %q %v", attached.StatusCode, line, err)
	}
	nodes := two.Nodes(t)
	if len(nodes) != 2 || nodes[0].Node != "one" || nodes[0].This || nodes[1].Node != "two" || !nodes[1].This {
		t.Errorf("%+v", nodes)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "each knows what differs, and the log of the other", func() bool {
		n := two.Nodes(t)[0]
		return slices.Contains(n.Differs, "quota.open_executions") && len(n.Differs) == 1 && n.LogSize > 0 && len(n.SealingKeys) == 1 && n.SeenAge < 8
	})
	close(next)
	rest, err := io.ReadAll(lines)
	if err != nil || string(rest) != "two\n" {
		t.Errorf("the rest at the other gateway: %q %v", rest, err)
	}
	if owner := harness.WaitWithin(t, harness.ProcBound, owner, "the answer"); owner.Err != nil || owner.Answer.Body != "one\ntwo\n" {
		t.Errorf("the owner got %v", owner)
	}
	lab.Arrived("POST /slow", 1)

	// A rollback at the other one.
	two.Operate(t, "rollback", first.Header.Get("Execution-Checkpoint"), "--reason", "ordered twice").Says(t)
	lab.WantCharge(harness.SagaStep{Checkpoint: "", Reply: first}.Id(t), "refunded")

	// Both show the same of the execution, of its rollback and of its workflow, byte by byte; the last two once the
	// ledger of the other one says so.
	admin := func(site *harness.ProcSite, path string) string {
		t.Helper()
		resp, err := http.Get("http://" + site.Admin + "/agent_guard/" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s %v", path, resp.StatusCode, b, err)
		}
		return string(b)
	}
	rollback := harness.ProcDocument[struct {
		Rollbacks []struct {
			ID string `json:"rollback_id"`
		}
	}](t, admin(one, "rollbacks")).Rollbacks
	if len(rollback) != 1 {
		t.Fatalf("%+v", rollback)
	}
	for _, path := range []string{"executions?id=first", "rollbacks", "rollback/" + rollback[0].ID, "workflows/w-" + t.Name()} {
		harness.EventuallyWithin(t, harness.ProcBound, "both show the same: "+path, func() bool { return admin(one, path) == admin(two, path) })
	}
	for path, status := range map[string]int{"executions/first": http.StatusOK, "executions/first/output": http.StatusConflict} { // it was undone
		r := harness.Request{Method: "GET", Path: "/.well-known/cascade/" + path}
		if mine, other := at(one, r, ""), at(two, r, ""); mine.Status != status || other.Status != status || mine.Body != other.Body {
			t.Errorf("%s: %d %s, and at the other one %d %s", path, mine.Status, mine.Body, other.Status, other.Body)
		}
	}

	// One leaves, and comes back.
	a.End(t)
	if nodes := two.Nodes(t); len(nodes) != 1 || nodes[0].Node != "two" {
		t.Errorf("after one has left: %+v", nodes)
	}
	beside := at(two, harness.Charge(8), "beside")
	a = one.Start(t)
	if again := at(one, harness.Charge(8), "beside"); again.Body != beside.Body || again.Header.Get("Execution-Status") != "replayed" {
		t.Errorf("%s, and at the gateway that came back %d %s", beside.Body, again.Status, again.Body)
	}

	// One is killed with a call under way.
	arrived, over := make(chan struct{}), make(chan struct{})
	lab.On("POST /slow", 1, func(*harness.RestCall) {
		close(arrived)
		<-over
	})
	defer close(over)
	open := harness.ProcCall{Id: "open", Path: "/slow", Host: one.Addr}
	a.Begin(t.Context(), harness.ProcDial(), open)
	harness.WaitWithin(t, harness.ProcBound, arrived, "the call arrives")
	a.Kill()
	killed := time.Now()
	if a := at(two, harness.Charge(9), "after"); a.Header.Get("Execution-Status") != "executed" {
		t.Errorf("a call beside it: %d %s", a.Status, a.Body)
	}
	harness.WantProcDoubt(t, b.Post(t, open)) // it follows the call until its owner is gone
	if took := time.Since(killed); took > 30*time.Second {
		t.Errorf("what the killed one had under way was in doubt after %v; its lease is 10s", took)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the ledger says so, though nobody has started again", func() (found bool) { // P7
		two.Exported(t, func(token *ect.Unverified) {
			outcome, _ := token.Ext().Text("agent_guard.outcome")
			found = found || outcome == "in_doubt"
		})
		return found
	})
}

// C-3.4.2-c, ADR 0138: a chain of calls that goes from one node to the other and back fails from its end. That is one
// cascade, with the root at the end of the chain, at both nodes; it is recorded once, and has one question.
func TestProcessFleetCascade(t *testing.T) {
	t.Parallel() // its gateways are processes
	u := harness.NewUpstream(t)
	agents := map[string]*harness.Agent{}
	var all []*harness.Agent
	for _, name := range []string{"a", "b", "c", "d"} {
		agents[name] = harness.NewAgent(t, name)
		all = append(all, agents[name])
	}
	one, server, there := harness.PostgresSite(t, &harness.ProcUpstream{Addr: u.Addr})
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, u.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	var guards strings.Builder
	for _, name := range []string{"b", "c", "d"} {
		fmt.Fprintf(&guards, "\thandle /%s* {\n\t\tagent_proxy %s {\n\t\t\tname %s\n\t\t\tidentity %s\n\t\t\tdefault_undo irreversible\n\t\t}\n\t}\n", name, u.Addr, name, agents[name].Issuer.Identity())
	}
	sites := map[string]*harness.ProcSite{"/b": one, "/c": two, "/d": one}
	for _, site := range []*harness.ProcSite{one, two} {
		site.Raw = fmt.Sprintf("{\n\tadmin %s\n\tpersist_config off\n\tagent_guard {\n\t\tstore %s\n\t\tkeys file %s\n\t\ton_cascade alert {\n\t\t\tescalate 2\n\t\t}\n\t\t%s\n\t}\n}\nhttp://%s {\n\tbind 127.0.0.1\n%s\tagent_guard_endpoints\n}\n",
			site.Admin, site.Store, one.Path("keys"), harness.Trusting(t, all...), site.Addr, guards.String())
		site.Start(t)
	}
	act := func(name, wid, path string, parents ...string) harness.Reply {
		return sites[path].Gateway(t).Call(harness.With(agents[name].Issue(ect.Claims{Workflow: wid, Parents: parents}), harness.Request{Path: path}))
	}
	for _, name := range []string{"b", "c"} { // each passes the call on to the next
		u.On("/"+name, func(w http.ResponseWriter, r *harness.Arrival) {
			parent := harness.CheckpointIn(t, r.Header)
			if got := act(name, parent.Workflow(), "/"+string(name[0]+1), parent.ID()); got.Status != http.StatusInternalServerError {
				t.Errorf("%s got %d %s", name, got.Status, got.Body)
			}
			w.WriteHeader(http.StatusInternalServerError)
		})
	}
	u.On("/d", harness.Status(http.StatusInternalServerError, ""))
	wid := uuid.NewString()
	if got := act("a", wid, "/b"); got.Status != http.StatusInternalServerError {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	var seen []api.Cascade
	for _, site := range []*harness.ProcSite{one, two} {
		var found []api.Cascade
		harness.EventuallyWithin(t, harness.ProcBound, "the cascade is known at "+site.Addr, func() bool {
			found = harness.Document[api.CascadeList](t, site.Gateway(t).Get(agents["a"], "cascades?wid="+wid)).Cascades
			return len(found) == 1 && found[0].Failed == 3
		})
		c := found[0]
		if c.Root == nil || c.Root.Agent != agents["d"].Issuer.Identity() || c.Pattern != "depth_first" || len(c.Workflows) != 1 || len(c.Workflows[0].Alerts) != 1 ||
			c.Workflows[0].Escalation == "" || len(c.Workflows[0].Errors) != 3 {
			t.Errorf("%+v %+v", c, c.Root)
		}
		seen = append(seen, c)
	}
	if seen[0].ID != seen[1].ID || seen[0].Workflows[0].Escalation != seen[1].Workflows[0].Escalation {
		t.Errorf("the nodes show two: %+v", seen)
	}
	alerts := 0
	harness.EventuallyWithin(t, harness.ProcBound, "the alert is in the ledger", func() bool {
		page := harness.Document[harness.CascadeView](t, two.Gateway(t).Get(agents["a"], "workflows/"+wid))
		alerts = len(slices.DeleteFunc(page.Nodes, func(n harness.CascadeNode) bool { return n.Event != "cascade_detected" }))
		return alerts > 0
	})
	if alerts != 1 {
		t.Errorf("%d alerts are recorded", alerts)
	}
}
