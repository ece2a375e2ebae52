//go:build unix

package e2e

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

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// fleetNode is what `nodes` shows of a gateway.
type fleetNode struct {
	Node        string
	This        bool
	SeenAge     float64  `json:"seen_age"`
	Open        int      `json:"open_executions"`
	LogSize     int64    `json:"log_entries"`
	SealingKeys []uint32 `json:"sealing_keys"`
	Differs     []string
}

func (s *procSite) nodes(t *testing.T) []fleetNode {
	t.Helper()
	return procDocument[struct{ Nodes []fleetNode }](t, s.operate(t, "nodes", "-o", "json").says(t)).Nodes
}

// ADR 0135, P1, P2, P6, P7: two gateways on one database. A retry at one finds the execution of the other, also while
// it runs; a rollback at one undoes the call of the other; what a killed one had under way is in doubt for the other at
// once, which serves all else; and one leaves and comes back without anybody noticing.
func TestProcessPostgresFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := newRestLab(t)
	one, server, there := postgresSite(t, &procUpstream{addr: lab.addr})
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, lab.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	keys := "keys file " + one.path("keys")
	for _, site := range []*procSite{one, two} {
		site.guard = sagaActions
		site.app = keys + "\n\t\tidentity " + gatewayIdentity + " {\n\t\t\tkey_file " + site.path("identity") + "\n\t\t}"
	}
	two.app += "\n\t\tquota {\n\t\t\topen_executions 100\n\t\t}"
	a, b := one.start(t), two.start(t)
	at := func(site *procSite, r request, id string) reply {
		t.Helper()
		r.id, r.host = id, one.addr
		r.header = headers{"Authorization": "Bearer " + procCredential, "Workflow-Id": "w-" + t.Name()}
		return site.gateway(t).call(r)
	}

	// A retry comes to the other gateway.
	first := at(one, charge(7), "first")
	if again := at(two, charge(7), "first"); first.status != http.StatusOK && first.status != http.StatusCreated ||
		again.header.Get("Execution-Status") != "replayed" || again.body != first.body {
		t.Fatalf("%d %s, and at the other gateway %d %s %s", first.status, first.body, again.status, again.header.Get("Execution-Status"), again.body)
	}

	// And while it runs: it gets the same bytes, from the first on.
	begun, next := make(chan struct{}), make(chan struct{})
	lab.on("POST /slow", 1, func(c *restCall) {
		c.w.WriteHeader(http.StatusCreated)
		for _, line := range []string{"one\n", "two\n"} {
			_, _ = io.WriteString(c.w, line)
			_ = http.NewResponseController(c.w).Flush()
			if line == "one\n" {
				close(begun)
				<-next
			}
		}
	})
	slow := procCall{id: "slow", path: "/slow", host: one.addr}
	owner := a.begin(t.Context(), procDial(), slow)
	waitWithin(t, procBound, begun, "the call arrives")
	attached, err := procSend(t.Context(), procDial(), two.addr, slow)
	if err != nil {
		t.Fatal(err)
	}
	defer attached.Body.Close()
	lines := bufio.NewReader(attached.Body)
	if line, err := lines.ReadString('\n'); err != nil || line != "one\n" || attached.Header.Get("Execution-Status") != "attached" {
		t.Errorf("at the other gateway: %d %q %v", attached.StatusCode, line, err)
	}
	nodes := two.nodes(t)
	if len(nodes) != 2 || nodes[0].Node != "one" || nodes[0].This || nodes[1].Node != "two" || !nodes[1].This {
		t.Errorf("%+v", nodes)
	}
	eventuallyWithin(t, procBound, "each knows what differs, and the log of the other", func() bool {
		n := two.nodes(t)[0]
		return slices.Contains(n.Differs, "quota.open_executions") && len(n.Differs) == 1 && n.LogSize > 0 && len(n.SealingKeys) == 1 && n.SeenAge < 8
	})
	close(next)
	rest, err := io.ReadAll(lines)
	if err != nil || string(rest) != "two\n" {
		t.Errorf("the rest at the other gateway: %q %v", rest, err)
	}
	if owner := waitWithin(t, procBound, owner, "the answer"); owner.err != nil || owner.answer.body != "one\ntwo\n" {
		t.Errorf("the owner got %v", owner)
	}
	lab.arrived("POST /slow", 1)

	// A rollback at the other one.
	two.operate(t, "rollback", first.header.Get("Execution-Checkpoint"), "--reason", "ordered twice").says(t)
	lab.wantCharge(sagaStep{"", first}.id(t), "refunded")

	// Both show the same of the execution, of its rollback and of its workflow, byte by byte; the last two once the
	// ledger of the other one says so.
	admin := func(site *procSite, path string) string {
		t.Helper()
		resp, err := http.Get("http://" + site.admin + "/agent_guard/" + path)
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
	rollback := procDocument[struct {
		Rollbacks []struct {
			ID string `json:"rollback_id"`
		}
	}](t, admin(one, "rollbacks")).Rollbacks
	if len(rollback) != 1 {
		t.Fatalf("%+v", rollback)
	}
	for _, path := range []string{"executions?id=first", "rollbacks", "rollback/" + rollback[0].ID, "workflows/w-" + t.Name()} {
		eventuallyWithin(t, procBound, "both show the same: "+path, func() bool { return admin(one, path) == admin(two, path) })
	}
	for path, status := range map[string]int{"executions/first": http.StatusOK, "executions/first/output": http.StatusConflict} { // it was undone
		r := request{method: "GET", path: "/.well-known/cascade/" + path}
		if mine, other := at(one, r, ""), at(two, r, ""); mine.status != status || other.status != status || mine.body != other.body {
			t.Errorf("%s: %d %s, and at the other one %d %s", path, mine.status, mine.body, other.status, other.body)
		}
	}

	// One leaves, and comes back.
	a.end(t)
	if nodes := two.nodes(t); len(nodes) != 1 || nodes[0].Node != "two" {
		t.Errorf("after one has left: %+v", nodes)
	}
	beside := at(two, charge(8), "beside")
	a = one.start(t)
	if again := at(one, charge(8), "beside"); again.body != beside.body || again.header.Get("Execution-Status") != "replayed" {
		t.Errorf("%s, and at the gateway that came back %d %s", beside.body, again.status, again.body)
	}

	// One is killed with a call under way.
	arrived, over := make(chan struct{}), make(chan struct{})
	lab.on("POST /slow", 1, func(*restCall) {
		close(arrived)
		<-over
	})
	defer close(over)
	open := procCall{id: "open", path: "/slow", host: one.addr}
	a.begin(t.Context(), procDial(), open)
	waitWithin(t, procBound, arrived, "the call arrives")
	a.kill()
	killed := time.Now()
	if a := at(two, charge(9), "after"); a.header.Get("Execution-Status") != "executed" {
		t.Errorf("a call beside it: %d %s", a.status, a.body)
	}
	wantProcDoubt(t, b.post(t, open)) // it follows the call until its owner is gone
	if took := time.Since(killed); took > 30*time.Second {
		t.Errorf("what the killed one had under way was in doubt after %v; its lease is 10s", took)
	}
	eventuallyWithin(t, procBound, "the ledger says so, though nobody has started again", func() (found bool) { // P7
		two.exported(t, func(token *ect.Unverified) {
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
	u := newUpstream(t)
	agents := map[string]*agent{}
	var all []*agent
	for _, name := range []string{"a", "b", "c", "d"} {
		agents[name] = newAgent(t, name)
		all = append(all, agents[name])
	}
	one, server, there := postgresSite(t, &procUpstream{addr: u.addr})
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, u.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	var guards strings.Builder
	for _, name := range []string{"b", "c", "d"} {
		fmt.Fprintf(&guards, "\thandle /%s* {\n\t\tagent_proxy %s {\n\t\t\tname %s\n\t\t\tidentity %s\n\t\t\tdefault_undo irreversible\n\t\t}\n\t}\n", name, u.addr, name, agents[name].issuer.Identity())
	}
	sites := map[string]*procSite{"/b": one, "/c": two, "/d": one}
	for _, site := range []*procSite{one, two} {
		site.raw = fmt.Sprintf("{\n\tadmin %s\n\tpersist_config off\n\tagent_guard {\n\t\tstore %s\n\t\tkeys file %s\n\t\ton_cascade alert {\n\t\t\tescalate 2\n\t\t}\n\t\t%s\n\t}\n}\nhttp://%s {\n\tbind 127.0.0.1\n%s\tagent_guard_endpoints\n}\n",
			site.admin, site.store, one.path("keys"), trusting(t, all...), site.addr, guards.String())
		site.start(t)
	}
	act := func(name, wid, path string, parents ...string) reply {
		return sites[path].gateway(t).call(with(agents[name].issue(ect.Claims{Workflow: wid, Parents: parents}), request{path: path}))
	}
	for _, name := range []string{"b", "c"} { // each passes the call on to the next
		u.on("/"+name, func(w http.ResponseWriter, r *arrival) {
			parent := checkpointIn(t, r.Header)
			if got := act(name, parent.Workflow(), "/"+string(name[0]+1), parent.ID()); got.status != http.StatusInternalServerError {
				t.Errorf("%s got %d %s", name, got.status, got.body)
			}
			w.WriteHeader(http.StatusInternalServerError)
		})
	}
	u.on("/d", status(http.StatusInternalServerError, ""))
	wid := uuid.NewString()
	if got := act("a", wid, "/b"); got.status != http.StatusInternalServerError {
		t.Fatalf("%d %s", got.status, got.body)
	}
	var seen []api.Cascade
	for _, site := range []*procSite{one, two} {
		var found []api.Cascade
		eventuallyWithin(t, procBound, "the cascade is known at "+site.addr, func() bool {
			found = document[api.CascadeList](t, site.gateway(t).get(agents["a"], "cascades?wid="+wid)).Cascades
			return len(found) == 1 && found[0].Failed == 3
		})
		c := found[0]
		if c.Root == nil || c.Root.Agent != agents["d"].issuer.Identity() || c.Pattern != "depth_first" || len(c.Workflows) != 1 || len(c.Workflows[0].Alerts) != 1 ||
			c.Workflows[0].Escalation == "" || len(c.Workflows[0].Errors) != 3 {
			t.Errorf("%+v %+v", c, c.Root)
		}
		seen = append(seen, c)
	}
	if seen[0].ID != seen[1].ID || seen[0].Workflows[0].Escalation != seen[1].Workflows[0].Escalation {
		t.Errorf("the nodes show two: %+v", seen)
	}
	alerts := 0
	eventuallyWithin(t, procBound, "the alert is in the ledger", func() bool {
		page := document[cascadeView](t, two.gateway(t).get(agents["a"], "workflows/"+wid))
		alerts = len(slices.DeleteFunc(page.Nodes, func(n cascadeNode) bool { return n.Event != "cascade_detected" }))
		return alerts > 0
	})
	if alerts != 1 {
		t.Errorf("%d alerts are recorded", alerts)
	}
}
