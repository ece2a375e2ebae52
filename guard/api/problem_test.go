package api_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// Every problem has the `error` without which stripe-node takes it for a success.
// Terminal ones carry what stops the SDKs' retries; retryable ones a string where
// stripe-go wants a number, so that it retries what it cannot read.
func TestProblemsTellSDKsWhetherToRetry(t *testing.T) {
	retryable := map[string]bool{"body-timeout": true, "workflow-running": true, "workflow-paused": true, "approval-required": true, "snapshot-failed": true, "in-progress": true, "store-unavailable": true, "ect-unavailable": true, "shutting-down": true, "quota-exceeded": true, "bulkhead-full": true, "dependency-not-done": true, "circuit-open": true, "upstream-unreachable": true}
	for _, k := range Kinds() {
		t.Run(k.Slug, func(t *testing.T) {
			p := problem.New(k, "some detail")
			p.ExecutionID, p.State = "id-1", "in_doubt"
			w := httptest.NewRecorder()
			p.Write(w)

			var doc map[string]any
			if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
				t.Fatal(err)
			}
			for member, want := range map[string]any{
				"type": "/.well-known/cascade/problems/" + k.Slug, "title": k.Title, "status": float64(k.Status),
				"detail": "some detail", "execution_id": "id-1", "state": "in_doubt", "safe_new_key": k.SafeNewKey,
			} {
				if doc[member] != want {
					t.Errorf("%s = %v, want %v", member, doc[member], want)
				}
			}
			if w.Code != k.Status || w.Header().Get("Content-Type") != "application/problem+json" {
				t.Errorf("status %d, type %q", w.Code, w.Header().Get("Content-Type"))
			}
			body, _ := doc["error"].(map[string]any)
			for _, member := range []string{"type", "code", "message"} {
				if s, ok := body[member].(string); !ok || s == "" {
					t.Errorf("error.%s = %v, want a string", member, body[member])
				}
			}
			status, has := body["status"]
			stainless, stripe := w.Header().Get("X-Should-Retry"), w.Header().Get("Stripe-Should-Retry")
			if retryable[k.Slug] {
				if status != strconv.Itoa(k.Status) || stainless != "" || stripe != "true" || w.Header().Get("Retry-After") == "" {
					t.Errorf("retryable, but error.status=%v, header %v", status, w.Header())
				}
				return
			}
			if has || stainless != "false" || stripe != "false" || w.Header().Get("Retry-After") != "" {
				t.Errorf("terminal, but error.status=%v, header %v", status, w.Header())
			}
		})
	}
}

// Where the caller can ask what becomes of the call, a problem says so in both ways.
func TestProblemLeadsToTheStatus(t *testing.T) {
	p := problem.New(problem.InDoubt, "")
	p.StatusURL = "/status/k"
	w := httptest.NewRecorder()
	p.Write(w)
	if links := w.Header().Values("Link"); len(links) != 2 || links[1] != `</status/k>; rel="status"` {
		t.Errorf("links %q", links)
	}
	if !strings.Contains(w.Body.String(), `"status_url":"/status/k"`) {
		t.Errorf("body %s", w.Body)
	}
}

// E-states-b: what an open breaker refuses has AERR's error type.
func TestErrorTypeOfAnOpenCircuit(t *testing.T) {
	for _, k := range Kinds() {
		w := httptest.NewRecorder()
		problem.New(k, "").Write(w)
		if has := strings.Contains(w.Body.String(), `"error_type":"circuit_open"`); has != (k.Slug == "circuit-open") {
			t.Errorf("%s: %s", k.Slug, w.Body)
		}
	}
}

func TestEveryProblemIsExplainedToAPerson(t *testing.T) {
	for _, k := range Kinds() {
		for accept, kind := range map[string]string{"text/html": "text/html", "": "text/plain"} {
			r := httptest.NewRequest(http.MethodGet, problem.BasePath+k.Slug, nil)
			r.Header.Set("Accept", accept)
			w := httptest.NewRecorder()
			new(Endpoints).Serve(w, r)
			if w.Code != 200 || !strings.HasPrefix(w.Header().Get("Content-Type"), kind) {
				t.Errorf("%s as %q: %d %q", k.Slug, accept, w.Code, w.Header().Get("Content-Type"))
			}
			for _, part := range []string{k.Title, "caller should do", "operator can do"} {
				if !strings.Contains(w.Body.String(), part) {
					t.Errorf("%s as %q lacks %q", k.Slug, accept, part)
				}
			}
		}
	}
	index := httptest.NewRecorder()
	new(Endpoints).Serve(index, httptest.NewRequest(http.MethodGet, problem.BasePath, nil))
	for _, k := range Kinds() {
		if !strings.Contains(index.Body.String(), problem.BasePath+k.Slug+"\n") {
			t.Errorf("the index lacks %s", k.Slug)
		}
	}
	w := httptest.NewRecorder()
	new(Endpoints).Serve(w, httptest.NewRequest(http.MethodGet, problem.BasePath+"no-such", nil))
	if w.Code != http.StatusNotFound {
		t.Errorf("unknown slug: %d", w.Code)
	}
}

// P1: a new key is called safe only where it cannot repeat an effect: where the problem
// is given after a look that found nothing recorded under the old one, where no call of
// this kind is ever forwarded, or where nothing but a rollback is asked for, which undoes
// nothing twice. Every kind is judged here; a new one is not safe until it is.
func TestSafeNewKey(t *testing.T) {
	safe := map[string]string{
		"execution-id-missing": "there is no old key", "execution-id-invalid": "no call has run under such a key",
		"rolled-back":    "the effect was undone",
		"quota-exceeded": "found free", "bulkhead-full": "found free", "dependency-not-done": "found free", "snapshot-failed": "found free", "workflow-paused": "found free", "workflow-stopped": "found free", "approval-required": "found free", "approval-denied": "found free",
		"upstream-unreachable": "proven", "node-unknown": "found free", "node-ambiguous": "found free",
		"not-in-workflow": "a rollback", "coordinator-required": "a rollback", "rollback-conflict": "a rollback", "rollback-mismatch": "a rollback",
		"cannot-prepare": "a rollback", "plan-changed": "a rollback", "depended-on": "a rollback", "checkpoint-unknown": "a rollback", "checkpoint-expired": "a rollback", "checkpoint-tampered": "a rollback",
	}
	// Answered before anybody has looked under the key, about questions, or of what is known
	// to run, to have run or to be in doubt.
	unsafe := []string{
		"caller-unstable", "workflow-id-invalid", "batch-mixed", "fingerprint-mismatch", "in-progress", "in-doubt", "result-expired", "result-unavailable", "store-unavailable",
		"shutting-down", "circuit-open", "body-too-large", "body-timeout", "stream-refused", "authentication-required", "execution-unknown", "ect-invalid",
		"ect-unavailable", "entry-unknown", "entry-pruned", "workflow-unknown", "workflow-running", "initiator-required", "parameter-invalid", "escalation-unknown", "decision-refused", "decision-void",
		"plan-invalid", "plan-refused", "plan-exists", "plan-replaced", "plan-in-force", "media-type-unsupported",
	}
	for _, k := range Kinds() {
		if k.SafeNewKey != (safe[k.Slug] != "") || k.SafeNewKey == slices.Contains(unsafe, k.Slug) {
			t.Errorf("%s: safe_new_key is %v, which nobody has judged", k.Slug, k.SafeNewKey)
		}
		for _, c := range []struct {
			state  string
			undone bool
		}{{"running", false}, {"completed", false}, {"in_doubt", false}, {"rolled_back", true}} {
			p := problem.New(k, "")
			p.Known(c.state, c.undone)
			w := httptest.NewRecorder()
			p.Write(w)
			var doc struct {
				State string `json:"state"`
				Safe  bool   `json:"safe_new_key"`
			}
			if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil || doc.State != c.state || doc.Safe && !c.undone {
				t.Errorf("%s of a call that is %s: %+v %v", k.Slug, c.state, doc, err)
			}
		}
	}
}

// The status of gRPC of every kind, and what a client that is configured to retry makes of it.
func TestGRPCStatuses(t *testing.T) {
	codes := map[string]string{
		"execution-id-missing": "3", "execution-id-invalid": "3", "workflow-id-invalid": "3", "batch-mixed": "3", "caller-unstable": "3", "parameter-invalid": "3",
		"node-unknown": "3", "node-ambiguous": "3", "plan-invalid": "3", "plan-refused": "7", "plan-exists": "9", "plan-replaced": "9", "plan-in-force": "9", "media-type-unsupported": "9",
		"authentication-required": "16",
		"ect-invalid":             "7", "not-in-workflow": "7", "coordinator-required": "7", "workflow-stopped": "7", "initiator-required": "7",
		"execution-unknown": "5", "entry-unknown": "5", "workflow-unknown": "5", "checkpoint-unknown": "5", "escalation-unknown": "5", "decision-refused": "7", "decision-void": "9",
		"fingerprint-mismatch": "6", "rollback-mismatch": "6", "result-expired": "6", "result-unavailable": "6",
		"body-too-large": "8", "quota-exceeded": "8", "bulkhead-full": "8",
		"in-doubt": "9", "cannot-prepare": "9", "plan-changed": "9", "depended-on": "9", "checkpoint-tampered": "9", "checkpoint-expired": "9", "entry-pruned": "9",
		"rolled-back": "10", "rollback-conflict": "10", "stream-refused": "12",
		"in-progress": "14", "workflow-running": "14", "dependency-not-done": "14", "workflow-paused": "14", "approval-required": "14", "approval-denied": "7", "snapshot-failed": "14", "store-unavailable": "14", "shutting-down": "14",
		"circuit-open": "14", "upstream-unreachable": "14", "ect-unavailable": "14", "body-timeout": "14",
	}
	for _, k := range Kinds() {
		p := problem.New(k, "100% of \u00e9.")
		p.State = "in_doubt"
		w := httptest.NewRecorder()
		p.WriteGRPC(w, "application/grpc+proto; x=y")
		h := w.Header()
		if w.Code != 200 || w.Body.Len() > 0 || h.Get("Content-Type") != "application/grpc+proto" || h.Get("Grpc-Status") != codes[k.Slug] ||
			h.Get("Grpc-Message") != k.Title+". 100%25 of %C3%A9." || h.Get("Execution-Problem") != k.Slug ||
			h.Get("Execution-State") != "in_doubt" || h.Get("Execution-Safe-New-Key") != strconv.FormatBool(k.SafeNewKey) {
			t.Errorf("%s: %d %v", k.Slug, w.Code, h)
		}
		retries := h.Get("Grpc-Retry-Pushback-Ms") != "-1"
		if code := codes[k.Slug]; retries != (code == "14" || k.Slug == "quota-exceeded" || k.Slug == "bulkhead-full") {
			t.Errorf("%s: code %s, pushback %s", k.Slug, code, h.Get("Grpc-Retry-Pushback-Ms"))
		}
	}
}
