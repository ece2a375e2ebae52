package cli

import (
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

func someCircuits() *proxy.Document {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return &proxy.Document{Circuits: []proxy.Circuit{
		{Upstream: "10.0.0.7:9001", Status: breaker.Status{
			State: breaker.Open, ErrorRate: 2.0 / 54, Calls: 54, NextProbe: at.Add(30 * time.Second), Cause: "status 503",
		}},
		{Upstream: "10.0.0.8:9001", Class: "write", Status: breaker.Status{Mode: breaker.Observe, Calls: 3}},
		{Upstream: "evil\x1b[2J:1", Status: breaker.Status{State: breaker.HalfOpen, Cause: "\x1b[2J"}},
	}}
}

// Section "CLI": how breakers are shown.
func TestGoldenCircuits(t *testing.T) {
	now := time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC)
	golden(t, "circuits_list", describeCircuits(someCircuits(), now))
	fleet := someCircuits()
	for i := range fleet.Circuits {
		fleet.Circuits[i].Node, fleet.Circuits[i].Age = []string{"a", "a", "b"}[i], []int64{0, 0, 90}[i]
	}
	golden(t, "circuits_fleet", describeCircuits(fleet, now))
	if out := describeCircuits(&proxy.Document{}, now); out != "No upstream has been called yet.\n" {
		t.Errorf("%q", out)
	}
}

// Section "CLI": what is asked of the server.
func TestCircuitsAsk(t *testing.T) {
	server := newAdminServer(t, func(*http.Request) any { return someCircuits() })
	for args, want := range map[string]string{
		"circuits list":                            "GET /agent_guard/circuits ",
		"circuits list --fleet":                    "GET /agent_guard/circuits?scope=fleet ",
		"circuits set a:1 forced_open":             `POST /agent_guard/circuits/mode {"upstream":"a:1","mode":"forced_open"}`,
		"circuits set a:1 auto --class read":       `POST /agent_guard/circuits/mode {"upstream":"a:1","class":"read","mode":"auto"}`,
		"circuits set a:1 observe --store /data/1": `POST /agent_guard/circuits/mode?store=%2Fdata%2F1 {"upstream":"a:1","mode":"observe"}`,
	} {
		command := strings.Fields(args)
		out, _, err := server.run(t, command...)
		if err != nil || strings.Join(server.asked, "\n") != want || !strings.HasPrefix(out, "UPSTREAM ") {
			t.Errorf("%s asks %s: %v\n%s", args, server.asked, err, out)
		}
		if got := document[proxy.Document](t, append(command, "--address", server.address)...); len(got.Circuits) != 3 || got.Circuits[0].ErrorRate != 2.0/54 {
			t.Errorf("%s: %+v", args, got)
		}
	}
	server.asked = nil
	refuses(t, `"open" is no mode; it is one of auto, observe, forced_open, forced_closed`, "circuits", "set", "a:1", "open", "--address", server.address)
	refuses(t, "give UPSTREAM and MODE", "circuits", "set", "a:1")
	if server.asked != nil {
		t.Errorf("asked %s", server.asked)
	}
}

// Section "CLI": how the gateways over a store are shown, and what is asked of the server.
func TestNodes(t *testing.T) {
	doc := &admin.NodeList{Nodes: []admin.Node{
		{Node: "one", This: true, Version: "v1.2.3", SeenAge: 0.2, Open: 12, LogSize: 40321, SealingKeys: []uint32{1, 2}, Differs: []string{}},
		{Node: "two", Version: "v1.2.3", SeenAge: 4.9, SealingKeys: []uint32{1}, Differs: []string{"guard pay: retain_key", "quota.open_executions"}},
		{Node: "evil\x1b[2J", SeenAge: 75},
	}}
	golden(t, "nodes", describeNodes(doc, time.Time{}))
	server := newAdminServer(t, func(*http.Request) any { return doc })
	out, _, err := server.run(t, "nodes")
	if want := "GET /agent_guard/nodes "; err != nil || strings.Join(server.asked, "\n") != want || !strings.HasPrefix(out, "NODE ") {
		t.Errorf("it asks %s: %v\n%s", server.asked, err, out)
	}
	if got := document[admin.NodeList](t, "nodes", "--address", server.address); len(got.Nodes) != 3 || got.Nodes[0].LogSize != 40321 {
		t.Errorf("%+v", got)
	}
}

// gatewayKeys are keys in every state.
func gatewayKeys() *admin.Identity {
	at := time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)
	return &admin.Identity{
		Name: gatewayID, File: "/data/agent_guard.identity", Algorithm: "EdDSA",
		Keys: []admin.IdentityKey{
			{ID: strings.Repeat("r", 43), Algorithm: "ES256", Until: at.Add(-72 * time.Hour), Revoked: true},
			{ID: strings.Repeat("a", 43), Algorithm: "ES256", Created: at.Add(-90 * 24 * time.Hour), Until: at.Add(-time.Second)},
			{ID: "evil\x1b[2J", Algorithm: "ES256", Created: at.Add(-time.Hour), Until: at.Add(23 * time.Hour)},
			{ID: strings.Repeat("b", 43), Algorithm: "EdDSA", Created: at, Signs: true},
		},
	}
}

// Section "CLI": what each key of the identity is for.
func TestGoldenIdentity(t *testing.T) {
	golden(t, "identity_show", describeIdentity(gatewayKeys(), time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)))
}

// Section "CLI": what is asked of the server, and what is printed of its answer.
func TestIdentityAsks(t *testing.T) {
	server := newAdminServer(t, func(*http.Request) any { return gatewayKeys() })
	for args, want := range map[string]string{
		"identity show":                     "GET /agent_guard/identity ",
		"identity show --store /data/one":   "GET /agent_guard/identity?store=%2Fdata%2Fone ",
		"identity rotate":                   "POST /agent_guard/identity/rotate {}",
		"identity rotate --stolen":          `POST /agent_guard/identity/rotate {"stolen":true}`,
		"identity rotate --store /data/one": "POST /agent_guard/identity/rotate?store=%2Fdata%2Fone {}",
	} {
		command := strings.Fields(args)
		out, hint, err := server.run(t, command...)
		if err != nil || strings.Join(server.asked, "\n") != want || !strings.HasPrefix(out, "The gateway is "+gatewayID+", and makes keys for EdDSA.\n") {
			t.Errorf("%s asks %s: %v\n%s", args, server.asked, err, out)
		}
		if strings.Contains(args, "rotate") != strings.HasPrefix(hint, "Copy the key file anew. ") {
			t.Errorf("%s says %q", args, hint)
		}
		if got := document[admin.Identity](t, append(command, "--address", server.address)...); len(got.Keys) != 4 || got.File != "/data/agent_guard.identity" {
			t.Errorf("%s: %+v", args, got)
		}
	}
}

// Section "CLI": a refusal is the error, and nothing says that a key was made.
func TestIdentityRefused(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte("{\"error\":\"configure `identity`\"}"))
	}))
	defer server.Close()
	for _, verb := range []string{"show", "rotate"} {
		out, hint, err := run(t, "identity", verb, "--address", server.Listener.Addr().String())
		if err == nil || err.Error() != "configure `identity`" || out != "" || strings.Contains(hint, "Copy") {
			t.Errorf("%s: %v %q %q", verb, err, out, hint)
		}
	}
	refuses(t, "`caddy agent-guard identity show` takes no arguments", "identity", "show", "more")
	refuses(t, "unknown flag: --stolen", "identity", "show", "--stolen")
}

func someEscalations() []hitl.Escalation {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return []hitl.Escalation{
		{
			ID: "01234567-89ab-8def-8123-456789abcdef", Level: 3, LevelName: "stop", Status: "pending", State: "undeliverable", Cause: "rollback_failed",
			Summary: "The refund of checkpoint-7 was refused.", Workflow: "w", Opened: at, Changed: at, Attempts: 7, LastError: "410",
		},
		{
			ID: "11234567-89ab-8def-8123-456789abcdef", Level: 2, LevelName: "approval", Status: "denied", State: "notified", Cause: "breaker_permanently_open",
			Summary: "evil\x1b[2J " + strings.Repeat("long ", 40), Opened: at.Add(5 * time.Second), Changed: at, Attempts: 1,
		},
	}
}

// Section "CLI": how escalations are shown.
func TestGoldenEscalations(t *testing.T) {
	golden(t, "escalations_list", tableOf(time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC), someEscalations(), escalationRow))
}

// Section "CLI": what is asked of the server, and that pages are followed.
func TestEscalationsAsk(t *testing.T) {
	server := newAdminServer(t, func(r *http.Request) any {
		if r.URL.Query().Get("after") == "more" {
			return hitl.Page{Escalations: someEscalations()[1:]}
		}
		return hitl.Page{Escalations: someEscalations()[:1], Next: "more", Unreadable: 1}
	})
	list := func(args string) (string, string) {
		t.Helper()
		out, diagnostics, err := server.run(t, strings.Fields("escalations list "+args)...)
		if err != nil {
			t.Fatal(err)
		}
		return out, diagnostics
	}
	for args, want := range map[string]string{
		"--limit 1": "limit=1", "--status pending --limit 1": "limit=1&status=pending",
		"--limit 1 --state open --level stop --workflow w --after x": "after=x&level=stop&limit=1&state=open&workflow=w",
	} {
		out, diagnostics := list(args)
		if strings.Join(server.asked, "\n") != "GET /agent_guard/escalations?"+want+" " || !strings.HasPrefix(out, "OPENED ") ||
			!strings.Contains(diagnostics, "--after more goes on") || !strings.Contains(diagnostics, "1 escalations are recorded and cannot be read.") {
			t.Errorf("%s asks %q:\n%s%s", args, server.asked, out, diagnostics)
		}
	}
	if out, _ := list("--all"); len(server.asked) != 2 || strings.Count(out, "-89ab-8def-8123-") != 2 {
		t.Errorf("%q\n%s", server.asked, out)
	}
	all := document[hitl.Page](t, "escalations", "list", "--all", "--address", server.address)
	if len(all.Escalations) != 2 || !reflect.DeepEqual(all.Escalations[0], someEscalations()[0]) {
		t.Errorf("%+v", all)
	}
	refuses(t, "use pending, approved, denied, expired or withdrawn", "escalations", "list", "--status", "open")
	refuses(t, "use pause, approval or stop", "escalations", "list", "--level", "4")
	refuses(t, "--limit must be at least 1", "escalations", "list", "--limit", "0")
}

// Section "CLI": what is said of keys, in every state that they can be in.
func TestDescribeKeys(t *testing.T) {
	now := time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)
	status := &gateway.KeyStatus{Source: "file", File: "/data/guard.key", Keys: []gateway.Key{
		{ID: 1, Created: now.AddDate(0, -6, 0)},
		{ID: 2, Created: now.AddDate(0, -1, 0), InUse: true, Until: now.Add(5 * time.Hour)},
		{ID: 3, Created: now.Add(-time.Minute), Newest: true, InUse: true},
	}, Resealing: &gateway.Resealing{Done: true, ResealProgress: execution.ResealProgress{
		Key: 3, Seen: 10, Resealed: 7, Damaged: 1, Finished: now.Add(-time.Second), Left: []execution.KeyLeft{{ID: 2, Records: 1, Results: 2}},
	}}}
	out := describeKeys(status, now)
	want := `The key ring is in /data/guard.key.
KEY  USE     CREATED                          NEEDED UNTIL
1    unused  2026-05-20T14:00:00Z (184d ago)  -
2    opens   2026-10-20T14:00:00Z (31d ago)   2026-11-20T19:00:00Z (in 5h)
3    seals   2026-11-20T13:59:00Z (1m ago)    -
Re-sealing to key 3: done, 2026-11-20T13:59:59Z (1s ago); 10 values seen, 7 sealed anew, 1 damaged.
Key 2 still has 1 records and 2 parts of answers.
`
	if out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	for want, r := range map[string]*gateway.Resealing{
		"Re-sealing to key 2: running; 3 values seen, 0 sealed anew, 0 damaged.":                                     {ResealProgress: execution.ResealProgress{Key: 2, Seen: 3}},
		"Re-sealing to key 2: stopped, and will be tried again: disk full; 0 values seen, 0 sealed anew, 0 damaged.": {ResealProgress: execution.ResealProgress{Key: 2}, Error: "disk full"},
	} {
		if got := describeResealing(r, now); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	status.Resealing, status.Keys[1].Newest, status.Keys[2] = nil, true, gateway.Key{ID: 3, Lacking: []string{"b", "c"}}
	if out := describeKeys(status, now); !strings.Contains(out, "3    waits   -                                -\nKey 3 seals once all gateways on the store have it. It is missing at: b, c.\n") {
		t.Errorf("got\n%s", out)
	}
	status.Made = 3
	for want, of := range map[string]*gateway.KeyStatus{
		"Copy the key file to the gateways that lack": status, "No key was made": {}, "Copy the key file anew": {Made: 2}, "with all its secrets": {Ring: "{}"},
	} {
		if got := adviseRotation(of); !strings.HasPrefix(got, want) && (of.Ring == "" || !strings.Contains(got, want)) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if out := describeKeys(&gateway.KeyStatus{Ring: "{}\n"}, now); out != "{}\n" { // for a file
		t.Errorf("got %q", out)
	}
	if out := describeKeys(&gateway.KeyStatus{Source: "value"}, now); !strings.Contains(out, "given as a value") {
		t.Error(out)
	}
}

func proposing() hitl.Escalation {
	e := someEscalations()[1]
	e.Status, e.Proposal = "pending", hitl.Proposal{Kind: "run-call", Text: "POST /pay\n{\"to\": \"evil\x1b[2J\"}", RequestHash: "sha-256:1"}
	e.Decisions = []hitl.Decision{{By: "user:ann", Decision: "approve", Reason: "fine", At: e.Opened}}
	e.Requester, e.Quorum, e.RequiredRole, e.Held, e.Deadline = "issuer:agent", 2, "payments", true, e.Opened.Add(time.Hour)
	return e
}

// Section "CLI": how an escalation is shown.
func TestGoldenEscalation(t *testing.T) {
	e := proposing()
	golden(t, "escalations_show", describeEscalation(&e, e.Opened.Add(5*time.Second)))
}

// Section "CLI": an approval names what was shown, and is refused here if that has changed.
func TestEscalationsAreDecided(t *testing.T) {
	e := proposing()
	server := newAdminServer(t, func(*http.Request) any { return e })
	get := "GET /agent_guard/escalations/e-1 "
	for args, want := range map[string]string{
		"show e-1": get,
		"approve e-1 --hash sha-256:1 --operator ann": get + "\n" + `POST /agent_guard/escalations/e-1/decision {"decision":"approve","request_hash":"sha-256:1","operator":"ann"}`,
		"approve e-1 --yes --operator ann":            get + "\n" + `POST /agent_guard/escalations/e-1/decision {"decision":"approve","request_hash":"sha-256:1","operator":"ann"}`,
		"deny e-1 --reason no --operator ann":         get + "\n" + `POST /agent_guard/escalations/e-1/decision {"decision":"deny","request_hash":"sha-256:1","operator":"ann","reason":"no"}`,
		"ask e-1 --operator bob":                      `POST /agent_guard/escalations/e-1/ask {"operator":"bob"}`,
	} {
		out, _, err := server.run(t, strings.Fields("escalations "+args)...)
		if err != nil || strings.Join(server.asked, "\n") != want || !strings.HasPrefix(out, "escalation ") {
			t.Errorf("%s asks %q: %v\n%s", args, server.asked, err, out)
		}
	}
	for flags, want := range map[string]string{"": "nothing was changed", "--hash sha-256:2": "look at that with `escalations show e-1`"} {
		_, _, err := server.run(t, strings.Fields("escalations approve e-1 --operator ann "+flags)...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "sha-256:1") || len(server.asked) != 1 {
			t.Errorf("%q: %v, asked %q", flags, err, server.asked)
		}
	}
	refuses(t, "give one ID", "escalations", "approve")
}

func someCascades() *api.CascadeList {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return &api.CascadeList{Cascades: []api.Cascade{
		{
			ID: "44a2fed48ded0166e0fe086ddc3db15c", State: "open", Pattern: "depth_first", Class: "agent", Failed: 3, Affected: 4, Began: at, Last: at.Add(time.Second),
			Root: &api.CascadeRoot{Workflow: "w", Error: "e", Agent: "spiffe://example.com/agent/d", Guard: "d", Upstream: "10.0.0.7:9001", Reasons: []string{"earliest", "named_by_errors"}},
			Workflows: []api.CascadePart{{
				Workflow: "w", Alerts: []string{"alert"}, Errors: []string{"e"}, Failed: []string{"evil\x1b[2J"}, BlastRadius: []string{"a", "evil\x1b[2J"}, Escalation: "esc",
			}},
		},
		{ID: "0123", State: "closed", Pattern: "clustering", Class: "service", Downstream: "10.0.0.8:9001", Breakers: []string{"10.0.0.8:9001"}, OneProbe: true, Began: at, Last: at},
	}}
}

// Section "CLI": how cascades are shown, and what is asked of the server.
func TestGoldenCascades(t *testing.T) {
	now := time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC)
	golden(t, "cascades_list", describeCascades(someCascades(), now))
	golden(t, "cascades_show", describeCascade(&someCascades().Cascades[0], now))
	if out := describeCascades(&api.CascadeList{}, now); out != "No failure has spread.\n" {
		t.Errorf("%q", out)
	}
	server := newAdminServer(t, func(r *http.Request) any {
		if strings.HasSuffix(r.URL.Path, "/cascades") {
			return someCascades()
		}
		return someCascades().Cascades[1]
	})
	for args, want := range map[string]string{"cascades list": "GET /agent_guard/cascades ", "cascades show 0123": "GET /agent_guard/cascades/0123 "} {
		out, _, err := server.run(t, strings.Fields(args)...)
		if err != nil || strings.Join(server.asked, "\n") != want || !strings.Contains(out, "0123") {
			t.Errorf("%s asks %s: %v\n%s", args, server.asked, err, out)
		}
	}
	refuses(t, "give one ID", "cascades", "show")
}

// On PostgreSQL the lines about the disk give way to those about the database.
func TestStoreStatsOfADatabase(t *testing.T) {
	lag := 1.25
	report := &admin.Report{
		Commits: 10, Batches: 25, RecordsPerSync: 2.5, Size: map[string]uint64{"rows": 2048, "indexes": 1024},
		Database: &admin.Database{
			LeaseLeft: 9.96, Connections: map[string]int{"in_use": 1, "idle": 2, "max": 10}, Waits: 4, Waited: 0.5,
			Known: true, Living: 7, Dead: 3, OldestTransaction: 60, Standbys: 2, Lag: &lag,
		},
	}
	got := describeStore(&admin.StoreStatus{Path: "postgres:agent_guard@1", Health: "ok", Node: "n", Boot: "b", Store: report}, time.Now())
	for _, line := range []string{
		"size                  3.0 KiB: indexes 1.0 KiB, rows 2.0 KiB", "rows                  7", "dead rows             3", "vacuumed              not known",
		"oldest transaction    60.0s", "standbys              2, 1.2s behind", "lease                 ends in 10.0s unless it is renewed",
		"connections           1 in use, 2 idle, at most 10 for reading", "waits                 4 for a connection, 0.5s together",
		"commits               10", "records per sync      2.5", "batches               25",
	} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("%q is not in\n%s", line, got)
		}
	}
	for _, word := range []string{"bodies", "segments", "reclaimed"} {
		if strings.Contains(got, word) {
			t.Errorf("%q is said of a database:\n%s", word, got)
		}
	}
	report.Database.Known, report.Database.Lag = false, nil
	if got := describeStore(&admin.StoreStatus{Store: report}, time.Now()); strings.Contains(got, "dead rows") || !strings.Contains(got, "lease ") {
		t.Errorf("of a database that was not asked yet:\n%s", got)
	}
}
