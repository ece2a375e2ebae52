package call

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// stripeRetries is what stripe-go 85 does with an answer: below 400 and 429 with
// lock_timeout aside, it gives up exactly where the body has an `error` object that
// parses; everything else counts as a failure of the transport. The clients themselves
// stand in e2e/clients.
func stripeRetries(r harness.Reply) bool {
	var body struct {
		Error *struct {
			Type    string `json:"type"`
			Code    string `json:"code"`
			Message string `json:"message"`
			Status  int    `json:"status"`
		} `json:"error"`
	}
	if r.Status < 400 {
		return false
	}
	if json.Unmarshal([]byte(r.Body), &body) != nil || body.Error == nil {
		return true
	}
	return r.Status == 429 && body.Error.Code == "lock_timeout"
}

// stripeNodeRetries is what stripe-node 23 does. Whether it throws in the end depends on
// the body alone (ProblemDoc).
func stripeNodeRetries(r harness.Reply) bool {
	switch r.Header.Get("Stripe-Should-Retry") {
	case "true":
		return true
	case "false":
		return false
	}
	return r.Status == 409 || r.Status >= 500
}

// stainlessRetries is what the SDKs made by Stainless (anthropic, openai) do.
func stainlessRetries(r harness.Reply) bool {
	switch r.Header.Get("X-Should-Retry") {
	case "true":
		return true
	case "false":
		return false
	}
	return r.Status == 408 || r.Status == 409 || r.Status == 429 || r.Status >= 500
}

// retryableRetries is what go-retryablehttp does.
func retryableRetries(r harness.Reply) bool {
	return r.Status == 429 || r.Status == 0 || r.Status >= 500 && r.Status != 501
}

// provoked makes the gateway answer with every kind of problem that it has.
func provoked(t *testing.T) map[string]harness.Reply {
	t.Helper()
	u, hold, a := harness.NewUpstream(t), harness.NewGate(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: "quota {\n open_executions 2\n}\n" + harness.Trusting(t, a), Site: fmt.Sprintf(`agent_proxy %s {
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
	}`, u.Addr)})
	u.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, "")(w, a)
	})
	u.On("/doubt", harness.Reset)
	u.On("/large", harness.Status(200, "more than ten bytes"))
	got := map[string]harness.Reply{
		"execution-id-missing": g.Call(harness.Request{Path: "/x"}),
		"execution-id-invalid": g.Call(harness.Request{Path: "/x", Id: "a b"}),
		"workflow-id-invalid":  g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Workflow-Id": "a b"}}),
		"batch-mixed": g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Content-Type": "application/json"},
			Body: `[{"jsonrpc":"2.0","id":1,"method":"one"},{"jsonrpc":"2.0","id":2,"method":"two"}]`}),
		"caller-unstable": g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Authorization": "DPoP x"}}),
		"body-too-large":  g.Call(harness.Request{Path: "/x", Id: "k", Body: strings.Repeat("x", 2000)}),
	}
	again := func(slug string, one, two harness.Request) {
		g.Call(one)
		got[slug] = g.Call(two)
	}
	again("fingerprint-mismatch", harness.Request{Path: "/x", Id: "k"}, harness.Request{Path: "/x", Id: "k", Body: "{}"})
	again("in-doubt", harness.Request{Path: "/doubt", Id: "k"}, harness.Request{Path: "/doubt", Id: "k"})
	again("result-unavailable", harness.Request{Path: "/large", Id: "k"}, harness.Request{Path: "/large", Id: "k"})

	u.On("/doubt/2", harness.Reset)
	for _, path := range []string{"/doubt", "/doubt/2", "/y"} {
		got["quota-exceeded"] = g.Call(harness.Request{Path: path, Id: "k", Header: harness.Ann})
	}
	got["approval-required"] = g.Call(harness.Request{Path: "/asks", Id: "k"})
	got["authentication-required"] = g.Call(asking("k", nil))
	got["execution-unknown"] = g.Call(asking("k", harness.Bob))
	got["parameter-invalid"] = g.Call(asking("k?wait=soon", harness.Ann))

	got["ect-invalid"] = g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Execution-Context": harness.NewAgent(t, "stranger").Issue(ect.Claims{}).Raw()}})
	got["workflow-unknown"] = g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/w", Header: harness.Ann})
	got["entry-unknown"] = g.Get(a, "ledger/entries/999999")

	u.On("/snap", func(w http.ResponseWriter, a *harness.Arrival) {
		if a.Method == http.MethodGet {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	got["snapshot-failed"] = g.Call(harness.Request{Method: "PUT", Path: "/snap", Id: "k", Header: harness.Bob})
	look := func(id string) harness.Reply {
		return g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/checkpoints/" + id, Header: harness.Bob})
	}
	got["not-in-workflow"] = look(uuid.NewString() + "?wait=0")
	brief := g.Call(harness.Request{Path: "/snap", Id: "brief", Header: harness.Bob}).Header.Get("Execution-Checkpoint")
	harness.Eventually(t, "the end of a checkpoint", func() bool {
		got["checkpoint-expired"] = look(brief)
		return got["checkpoint-expired"].Status != 200
	})

	running := g.Begin(harness.Request{Path: "/held", Id: "k"})
	harness.Wait(t, hold.Arrived, "the call")
	got["in-progress"] = g.Call(harness.Request{Path: "/held", Id: "k"})
	hold.Open()
	running.Answer()

	harness.Force(t, u.Addr, breaker.ForcedOpen)
	got["circuit-open"] = g.Call(harness.Request{Path: "/y", Id: "k"})
	harness.Force(t, u.Addr, breaker.ForcedClosed)

	g.Call(harness.Request{Path: "/expires", Id: "k"})
	g.Store.Pass(2 * 3600e9)
	got["result-expired"] = g.Call(harness.Request{Path: "/expires", Id: "k"})
	g.Store.FailCommits(harness.ErrBroken)
	got["store-unavailable"] = g.Call(harness.Request{Path: "/y", Id: "k"})
	g.Store.OnCommit(nil)
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
			doc := got.Problem(t, k.Status, k.Slug)
			if retry[k.Slug] {
				got.Retryable(t, k.Status, k.Slug)
			} else {
				got.Terminal(t, k.Status, k.Slug)
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
			if doc.ExecutionID != id || got.Header.Get("Execution-Id") != id {
				t.Errorf("execution_id %q, Execution-Id %q, want %q", doc.ExecutionID, got.Header.Get("Execution-Id"), id)
			}
			execution := "refused"
			if k.Slug == "in-doubt" {
				execution = "in_doubt"
			}
			for name, want := range map[string]string{
				"Cache-Control": "no-store", "Link": `</.well-known/cascade/policy>; rel="describedby"`,
				"Execution-Status": execution, "Idempotent-Replayed": "", "Content-Length": fmt.Sprint(len(got.Body)),
			} {
				if v := got.Header.Get(name); v != want {
					t.Errorf("%s is %q, want %q", name, v, want)
				}
			}
			// In the order in which people read it, and nothing else.
			var members map[string]any
			if err := json.Unmarshal([]byte(got.Body), &members); err != nil {
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
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{
		App:  "quota {\n stored_bytes 1MiB\n}",
		Site: fmt.Sprintf("agent_proxy %s {\n name payments\n missing_id derive 90s\n fingerprint_exclude /t\n action pay {\n match path /pay\n keys advisory\n preset stripe\n retain_key 48h\n}\n}", u.Addr),
	})
	g.Store.OnGet(func([]byte) error { return harness.ErrBroken })
	g.Store.FailCommits(harness.ErrBroken)
	for _, k := range api.Kinds() {
		for accept, kind := range map[string]string{"": "text/plain", "text/html,*/*": "text/html"} {
			got := g.Call(harness.Request{Method: "GET", Path: problem.BasePath + k.Slug, Header: harness.Headers{"Accept": accept}})
			if got.Status != 200 || !strings.HasPrefix(got.Header.Get("Content-Type"), kind) || !strings.Contains(got.Body, k.Title) {
				t.Errorf("%s: %d %v", k.Slug, got.Status, got.Header)
			}
		}
	}
	if got := g.Call(harness.Request{Method: "GET", Path: problem.BasePath + "no-such"}); got.Status != 404 {
		t.Errorf("an unknown problem: %d", got.Status)
	}
	const policy = "/.well-known/cascade/policy"
	got := g.Call(harness.Request{Method: "GET", Path: policy})
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
	if err := json.Unmarshal([]byte(got.Body), &doc); err != nil || got.Status != 200 || got.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %v", got.Status, got.Header, err)
	}
	if doc.Guard != "payments" || doc.ExecutionID.Missing != "derive" || doc.ExecutionID.Window != 90 || doc.ExecutionID.Recognized != 600 ||
		fmt.Sprint(doc.Fingerprint.Excluded) != "[/t]" || len(doc.Problems) != len(api.Kinds()) ||
		fmt.Sprint(doc.Actions) != "[{pay stripe 172800 resend 82800 advisory} {default default 2.592e+06 block 0 trusted}]" {
		t.Errorf("policy %+v", doc)
	}
	if doc.Executions.Status != harness.ExecutionsPath+"{id}{?wait,key,method,path}" || doc.Executions.Output != harness.ExecutionsPath+"{id}/output{?wait,key,method,path}" ||
		doc.Executions.MaxWait != 60 || fmt.Sprint(doc.Quota) != "map[stored_bytes:1048576]" {
		t.Errorf("policy %+v", doc)
	}
	head := g.Call(harness.Request{Method: "HEAD", Path: policy})
	if head.Status != 200 || head.Body != "" {
		t.Errorf("HEAD: %d", head.Status)
	}
	for _, path := range []string{policy, problem.BasePath + "in-doubt"} {
		if got := g.Call(harness.Request{Path: path, Id: "k"}); got.Status != 405 || got.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("POST %s: %d %v", path, got.Status, got.Header)
		}
	}
	if u.Total() != 0 {
		t.Errorf("%d calls reached the upstream", u.Total())
	}
}

// `endpoints off` leaves the paths to the upstream; agent_guard_endpoints answers what
// belongs to no route.
func TestEndpointsElsewhere(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `
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
	}`, u.Addr)
	get := func(path string) harness.Reply { return g.Call(harness.Request{Method: "GET", Path: path}) }
	if got := get(problem.BasePath + "in-doubt"); got.Status != 200 {
		t.Errorf("%d", got.Status)
	}
	if got := get("/.well-known/cascade/policy"); got.Status != 418 {
		t.Errorf("%d", got.Status)
	}
	if got := get(problem.BasePath + "in-progress"); got.Status != 201 || got.Body != "arrival 1" {
		t.Errorf("%d %q", got.Status, got.Body)
	}
	g.Call(harness.Request{Path: "/.well-known/cascade/x", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	if got := g.Call(asking("k", harness.Ann)); got.Status != 201 || got.Body != "arrival 1" {
		t.Errorf("%d %q", got.Status, got.Body)
	}
}

// A7: where the site takes a prefix off, every URL that the gateway gives has it, and
// leads back to the guard.
func TestURLsLeadBackThroughThePrefix(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "handle_path /api/* {\n agent_proxy %s\n}\nhandle {\n respond elsewhere 404\n}", u.Addr)
	u.On("/pay", harness.Reset)
	r := harness.Request{Path: "/api/pay", Id: "k", Header: harness.Ann}
	var doc harness.ProblemDoc
	if got := g.Call(r); json.Unmarshal([]byte(got.Body), &doc) != nil || got.Status != 409 {
		t.Fatalf("%d %q", got.Status, got.Body)
	}
	get := func(what, path string, header harness.Headers) harness.Reply {
		t.Helper()
		got := g.Call(harness.Request{Method: "GET", Path: path, Header: header})
		if !strings.HasPrefix(path, "/api/.well-known/cascade/") || got.Status != 200 || got.Body == "elsewhere" {
			t.Errorf("%s is %q, which gives %d %q", what, path, got.Status, got.Body)
		}
		return got
	}
	get("type", doc.Type, nil)
	list := harness.Document[struct {
		Executions []struct {
			State string
			URL   string `json:"output_url"`
		}
	}](t, get("status_url", doc.StatusURL, harness.Ann))
	if len(list.Executions) != 1 || list.Executions[0].State != "in_doubt" {
		t.Fatalf("%+v", list)
	}
	if got := g.Call(harness.Request{Method: "GET", Path: list.Executions[0].URL, Header: harness.Ann}); got.Status != 409 {
		t.Errorf("output_url gives %d %q", got.Status, got.Body)
	}
	again := g.Call(r)
	for _, link := range again.Header.Values("Link") {
		url, _, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
		get(link, url, harness.Ann)
	}
	policy := get("the policy", "/api/.well-known/cascade/policy", nil)
	for _, url := range []string{harness.ExecutionsPath + "{id}{?wait,key,method,path}", problem.BasePath + "in-doubt"} {
		if !strings.Contains(policy.Body, `"/api`+url+`"`) {
			t.Errorf("the policy lacks /api%s:\n%s", url, policy.Body)
		}
	}
}
