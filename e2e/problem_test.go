package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// stripeRetries is what stripe-go 85 does with an answer: below 400 and 429 with
// lock_timeout aside, it gives up exactly where the body has an `error` object that
// parses; everything else counts as a failure of the transport. The clients themselves
// stand in e2e/clients.
func stripeRetries(r reply) bool {
	var body struct {
		Error *struct {
			Type    string `json:"type"`
			Code    string `json:"code"`
			Message string `json:"message"`
			Status  int    `json:"status"`
		} `json:"error"`
	}
	if r.status < 400 {
		return false
	}
	if json.Unmarshal([]byte(r.body), &body) != nil || body.Error == nil {
		return true
	}
	return r.status == 429 && body.Error.Code == "lock_timeout"
}

// stripeNodeRetries is what stripe-node 23 does. Whether it throws in the end depends on
// the body alone (problemDoc).
func stripeNodeRetries(r reply) bool {
	switch r.header.Get("Stripe-Should-Retry") {
	case "true":
		return true
	case "false":
		return false
	}
	return r.status == 409 || r.status >= 500
}

// stainlessRetries is what the SDKs made by Stainless (anthropic, openai) do.
func stainlessRetries(r reply) bool {
	switch r.header.Get("X-Should-Retry") {
	case "true":
		return true
	case "false":
		return false
	}
	return r.status == 408 || r.status == 409 || r.status == 429 || r.status >= 500
}

// retryableRetries is what go-retryablehttp does.
func retryableRetries(r reply) bool {
	return r.status == 429 || r.status == 0 || r.status >= 500 && r.status != 501
}

// provoked makes the gateway answer with every kind of problem that it has.
func provoked(t *testing.T) map[string]reply {
	t.Helper()
	u, hold, a := newUpstream(t), newGate(t), newAgent(t, "a")
	g := launch(t, setup{app: "quota {\n open_executions 2\n}\n" + trusting(t, a), site: fmt.Sprintf(`agent_proxy %s {
		missing_id require
		max_body 1KiB
		attach_wait 20ms
		retain_result 1h
		protocol jsonrpc
		action one {
			match tool one
		}
		action small {
			match path /large
			max_result 10
		}
		action asks {
			match path /asks
			approve
		}
		action snap {
			match path /snap
			restore
			checkpoint_ttl 1s
		}
	}`, u.addr)})
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "")(w, a)
	})
	u.on("/doubt", reset)
	u.on("/large", status(200, "more than ten bytes"))
	got := map[string]reply{
		"execution-id-missing": g.call(request{path: "/x"}),
		"execution-id-invalid": g.call(request{path: "/x", id: "a b"}),
		"workflow-id-invalid":  g.call(request{path: "/x", id: "k", header: headers{"Workflow-Id": "a b"}}),
		"batch-mixed": g.call(request{path: "/x", id: "k", header: headers{"Content-Type": "application/json"},
			body: `[{"jsonrpc":"2.0","id":1,"method":"one"},{"jsonrpc":"2.0","id":2,"method":"two"}]`}),
		"caller-unstable": g.call(request{path: "/x", id: "k", header: headers{"Authorization": "DPoP x"}}),
		"body-too-large":  g.call(request{path: "/x", id: "k", body: strings.Repeat("x", 2000)}),
	}
	again := func(slug string, one, two request) {
		g.call(one)
		got[slug] = g.call(two)
	}
	again("fingerprint-mismatch", request{path: "/x", id: "k"}, request{path: "/x", id: "k", body: "{}"})
	again("in-doubt", request{path: "/doubt", id: "k"}, request{path: "/doubt", id: "k"})
	again("result-unavailable", request{path: "/large", id: "k"}, request{path: "/large", id: "k"})

	u.on("/doubt/2", reset)
	for _, path := range []string{"/doubt", "/doubt/2", "/y"} {
		got["quota-exceeded"] = g.call(request{path: path, id: "k", header: ann})
	}
	got["approval-required"] = g.call(request{path: "/asks", id: "k"})
	got["authentication-required"] = g.call(asking("k", nil))
	got["execution-unknown"] = g.call(asking("k", bob))
	got["parameter-invalid"] = g.call(asking("k?wait=soon", ann))

	got["ect-invalid"] = g.call(request{path: "/x", id: "k", header: headers{"Execution-Context": newAgent(t, "stranger").issue(ect.Claims{}).Raw()}})
	got["workflow-unknown"] = g.call(request{method: "GET", path: "/.well-known/cascade/workflows/w", header: ann})
	got["entry-unknown"] = g.get(a, "ledger/entries/999999")

	u.on("/snap", func(w http.ResponseWriter, a *arrival) {
		if a.Method == http.MethodGet {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	got["snapshot-failed"] = g.call(request{method: "PUT", path: "/snap", id: "k", header: bob})
	look := func(id string) reply {
		return g.call(request{method: "GET", path: "/.well-known/cascade/checkpoints/" + id, header: bob})
	}
	got["not-in-workflow"] = look(uuid.NewString() + "?wait=0")
	brief := g.call(request{path: "/snap", id: "brief", header: bob}).header.Get("Execution-Checkpoint")
	eventually(t, "the end of a checkpoint", func() bool {
		got["checkpoint-expired"] = look(brief)
		return got["checkpoint-expired"].status != 200
	})

	running := g.begin(request{path: "/held", id: "k"})
	wait(t, hold.arrived, "the call")
	got["in-progress"] = g.call(request{path: "/held", id: "k"})
	hold.open()
	running.answer()

	force(t, u.addr, breaker.ForcedOpen)
	got["circuit-open"] = g.call(request{path: "/y", id: "k"})
	force(t, u.addr, breaker.ForcedClosed)

	g.call(request{path: "/expires", id: "k"})
	g.store.pass(2 * 3600e9)
	got["result-expired"] = g.call(request{path: "/expires", id: "k"})
	g.store.failCommits(errBroken)
	got["store-unavailable"] = g.call(request{path: "/y", id: "k"})
	g.store.onCommit(nil)
	return got
}

// Section "Errors" and trap 28: the form of every problem, and that SDKs retry what a
// retry can cure and nothing else.
func TestProblems(t *testing.T) {
	retry := map[string]bool{"body-timeout": true, "snapshot-failed": true, "in-progress": true, "store-unavailable": true, "ect-unavailable": true, "shutting-down": true, "quota-exceeded": true, "circuit-open": true, "approval-required": true, "upstream-unreachable": true}
	state := map[string]string{
		"in-doubt": "in_doubt", "fingerprint-mismatch": "completed", "result-unavailable": "completed", "result-expired": "completed", "in-progress": "running",
	}
	// A process that ends and a rollback are needed for these; package graph answers
	// with those of the ledger.
	elsewhere := map[string]bool{
		"shutting-down": true, "rolled-back": true,
		"bulkhead-full":        true,                       // bulkhead_test.go
		"upstream-unreachable": true,                       // sent_test.go
		"dependency-not-done":  true,                       // order_test.go
		"stream-refused":       true, "body-timeout": true, // TestUnguardedStreamsRefuse, TestBodyThatStandsStill
		"entry-pruned": true, "ect-unavailable": true, // packages graph and tokens
		// Package api, and TestP5RollbackOfAPut, TestP3RollbackOfOthers, bars_test.go.
		"workflow-stopped": true, "workflow-paused": true, "coordinator-required": true, "rollback-conflict": true, "rollback-mismatch": true, "cannot-prepare": true, "plan-changed": true, "depended-on": true,
		"checkpoint-unknown": true, "checkpoint-tampered": true,
		"node-unknown": true, "node-ambiguous": true, "plan-invalid": true, "plan-refused": true, "plan-exists": true, "plan-replaced": true, "plan-in-force": true, "media-type-unsupported": true, // plans_test.go
		"workflow-running": true, "initiator-required": true, // TestWorkflowIsCompleted
		"approval-denied": true, "escalation-unknown": true, "decision-refused": true, "decision-void": true, // process_people_test.go
	}
	all := provoked(t)
	for _, k := range api.Kinds() {
		got, ok := all[k.Slug]
		if !ok {
			if !elsewhere[k.Slug] {
				t.Errorf("%s was not provoked", k.Slug)
			}
			continue
		}
		t.Run(k.Slug, func(t *testing.T) {
			doc := got.problem(t, k.Status, k.Slug)
			if retry[k.Slug] {
				got.retryable(t, k.Status, k.Slug)
			} else {
				got.terminal(t, k.Status, k.Slug)
			}
			for sdk, retries := range map[string]bool{
				"stripe-go": stripeRetries(got), "stripe-node": stripeNodeRetries(got), "stainless": stainlessRetries(got),
			} {
				if retries != retry[k.Slug] {
					t.Errorf("%s retries: %v", sdk, retries)
				}
			}
			if retryableRetries(got) && !retry[k.Slug] {
				t.Error("go-retryablehttp retries")
			}
			if doc.Title != k.Title || doc.Detail == "" || doc.SafeNewKey == nil || *doc.SafeNewKey != k.SafeNewKey || doc.State != state[k.Slug] {
				t.Errorf("%+v", doc)
			}
			id := "k"
			switch k.Slug {
			case "execution-id-missing", "execution-id-invalid", "workflow-id-invalid", "batch-mixed", "caller-unstable", "body-too-large", "authentication-required",
				"ect-invalid", "entry-unknown", "workflow-unknown", "not-in-workflow", "checkpoint-expired":
				id = "" // not known yet
			}
			if doc.ExecutionID != id || got.header.Get("Execution-Id") != id {
				t.Errorf("execution_id %q, Execution-Id %q, want %q", doc.ExecutionID, got.header.Get("Execution-Id"), id)
			}
			execution := "refused"
			if k.Slug == "in-doubt" {
				execution = "in_doubt"
			}
			for name, want := range map[string]string{
				"Cache-Control": "no-store", "Link": `</.well-known/cascade/policy>; rel="describedby"`,
				"Execution-Status": execution, "Idempotent-Replayed": "", "Content-Length": fmt.Sprint(len(got.body)),
			} {
				if v := got.header.Get(name); v != want {
					t.Errorf("%s is %q, want %q", name, v, want)
				}
			}
			// In the order in which people read it, and nothing else.
			var members map[string]any
			if err := json.Unmarshal([]byte(got.body), &members); err != nil {
				t.Fatal(err)
			}
			for name := range members {
				switch name {
				case "type", "title", "status", "detail", "execution_id", "state", "reason", "error_type", "safe_new_key", "error", "escalation_id":
				default:
					t.Errorf("unknown member %s", name)
				}
			}
		})
	}
}

// The types of problems lead to what explains them; the policy is published. Both
// need no credentials, and touch neither store nor upstream.
func TestEndpoints(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{
		app:  "quota {\n stored_bytes 1MiB\n}",
		site: fmt.Sprintf("agent_proxy %s {\n name payments\n missing_id derive 90s\n fingerprint_exclude /t\n action pay {\n match path /pay\n keys advisory\n preset stripe\n retain_key 48h\n}\n}", u.addr),
	})
	g.store.onGet(func([]byte) error { return errBroken })
	g.store.failCommits(errBroken)
	for _, k := range api.Kinds() {
		for accept, kind := range map[string]string{"": "text/plain", "text/html,*/*": "text/html"} {
			got := g.call(request{method: "GET", path: problem.BasePath + k.Slug, header: headers{"Accept": accept}})
			if got.status != 200 || !strings.HasPrefix(got.header.Get("Content-Type"), kind) || !strings.Contains(got.body, k.Title) {
				t.Errorf("%s: %d %v", k.Slug, got.status, got.header)
			}
		}
	}
	if got := g.call(request{method: "GET", path: problem.BasePath + "no-such"}); got.status != 404 {
		t.Errorf("an unknown problem: %d", got.status)
	}
	const policy = "/.well-known/cascade/policy"
	got := g.call(request{method: "GET", path: policy})
	var doc struct {
		Guard       string `json:"guard"`
		ExecutionID struct {
			Missing string  `json:"missing"`
			Window  float64 `json:"derive_window_s"`

			Recognized float64 `json:"recognize_window_s"`
		} `json:"execution_id"`
		Fingerprint struct {
			Excluded []string `json:"excluded_json_pointers"`
		} `json:"fingerprint"`
		Actions []struct {
			Name      string  `json:"name"`
			Preset    string  `json:"preset"`
			RetainKey float64 `json:"retain_key_s"`
			OnUnknown string  `json:"on_unknown"`
			ResendFor float64 `json:"resend_for_s"`
			Keys      string  `json:"keys"`
		} `json:"actions"`
		Problems []struct {
			Type string `json:"type"`
		} `json:"problems"`
		Executions struct {
			Status  string  `json:"status"`
			Output  string  `json:"output"`
			MaxWait float64 `json:"max_wait_s"`
		} `json:"executions"`
		Quota map[string]int `json:"quota"`
	}
	if err := json.Unmarshal([]byte(got.body), &doc); err != nil || got.status != 200 || got.header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %v", got.status, got.header, err)
	}
	if doc.Guard != "payments" || doc.ExecutionID.Missing != "derive" || doc.ExecutionID.Window != 90 || doc.ExecutionID.Recognized != 600 ||
		fmt.Sprint(doc.Fingerprint.Excluded) != "[/t]" || len(doc.Problems) != len(api.Kinds()) ||
		fmt.Sprint(doc.Actions) != "[{pay stripe 172800 resend 82800 advisory} {default default 2.592e+06 block 0 trusted}]" {
		t.Errorf("policy %+v", doc)
	}
	if doc.Executions.Status != executionsPath+"{id}{?wait,key,method,path}" || doc.Executions.Output != executionsPath+"{id}/output{?wait,key,method,path}" ||
		doc.Executions.MaxWait != 60 || fmt.Sprint(doc.Quota) != "map[stored_bytes:1048576]" {
		t.Errorf("policy %+v", doc)
	}
	head := g.call(request{method: "HEAD", path: policy})
	if head.status != 200 || head.body != "" {
		t.Errorf("HEAD: %d", head.status)
	}
	for _, path := range []string{policy, problem.BasePath + "in-doubt"} {
		if got := g.call(request{path: path, id: "k"}); got.status != 405 || got.header.Get("Allow") != "GET, HEAD" {
			t.Errorf("POST %s: %d %v", path, got.status, got.header)
		}
	}
	if u.total() != 0 {
		t.Errorf("%d calls reached the upstream", u.total())
	}
}

// `endpoints off` leaves the paths to the upstream; agent_guard_endpoints answers what
// belongs to no route.
func TestEndpointsElsewhere(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `
	handle /.well-known/cascade/problems/in-doubt {
		agent_guard_endpoints
		respond "fell through" 418
	}
	handle /.well-known/cascade/policy {
		agent_guard_endpoints
		respond "fell through" 418
	}
	handle {
		agent_proxy %s {
			endpoints off
		}
	}`, u.addr)
	get := func(path string) reply { return g.call(request{method: "GET", path: path}) }
	if got := get(problem.BasePath + "in-doubt"); got.status != 200 {
		t.Errorf("%d", got.status)
	}
	if got := get("/.well-known/cascade/policy"); got.status != 418 {
		t.Errorf("%d", got.status)
	}
	if got := get(problem.BasePath + "in-progress"); got.status != 201 || got.body != "arrival 1" {
		t.Errorf("%d %q", got.status, got.body)
	}
	g.call(request{path: "/.well-known/cascade/x", id: "k"}).want(t, 201, "arrival 1", "executed")
	if got := g.call(asking("k", ann)); got.status != 201 || got.body != "arrival 1" {
		t.Errorf("%d %q", got.status, got.body)
	}
}

// A7: where the site takes a prefix off, every URL that the gateway gives has it, and
// leads back to the guard.
func TestURLsLeadBackThroughThePrefix(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "handle_path /api/* {\n agent_proxy %s\n}\nhandle {\n respond elsewhere 404\n}", u.addr)
	u.on("/pay", reset)
	r := request{path: "/api/pay", id: "k", header: ann}
	var doc problemDoc
	if got := g.call(r); json.Unmarshal([]byte(got.body), &doc) != nil || got.status != 409 {
		t.Fatalf("%d %q", got.status, got.body)
	}
	get := func(what, path string, header headers) reply {
		t.Helper()
		got := g.call(request{method: "GET", path: path, header: header})
		if !strings.HasPrefix(path, "/api/.well-known/cascade/") || got.status != 200 || got.body == "elsewhere" {
			t.Errorf("%s is %q, which gives %d %q", what, path, got.status, got.body)
		}
		return got
	}
	get("type", doc.Type, nil)
	list := document[struct {
		Executions []struct {
			State string
			URL   string `json:"output_url"`
		}
	}](t, get("status_url", doc.StatusURL, ann))
	if len(list.Executions) != 1 || list.Executions[0].State != "in_doubt" {
		t.Fatalf("%+v", list)
	}
	if got := g.call(request{method: "GET", path: list.Executions[0].URL, header: ann}); got.status != 409 {
		t.Errorf("output_url gives %d %q", got.status, got.body)
	}
	again := g.call(r)
	for _, link := range again.header.Values("Link") {
		url, _, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
		get(link, url, ann)
	}
	policy := get("the policy", "/api/.well-known/cascade/policy", nil)
	for _, url := range []string{executionsPath + "{id}{?wait,key,method,path}", problem.BasePath + "in-doubt"} {
		if !strings.Contains(policy.body, `"/api`+url+`"`) {
			t.Errorf("the policy lacks /api%s:\n%s", url, policy.body)
		}
	}
}
