package problem_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
)

// Terminal problems carry what stops the SDKs' retries; retryable ones carry none
// of it (an `error` member makes stripe-go give up).
func TestProblemsTellSDKsWhetherToRetry(t *testing.T) {
	retryable := map[string]bool{"workflow-paused": true, "snapshot-failed": true, "in-progress": true, "store-unavailable": true, "ect-unavailable": true, "shutting-down": true, "quota-exceeded": true, "circuit-open": true}
	for _, k := range problem.Kinds() {
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
			body, has := doc["error"].(map[string]any)
			if retryable[k.Slug] {
				if has || w.Header().Get("X-Should-Retry") != "" || w.Header().Get("Retry-After") == "" {
					t.Errorf("retryable, but error=%v X-Should-Retry=%q Retry-After=%q",
						has, w.Header().Get("X-Should-Retry"), w.Header().Get("Retry-After"))
				}
				return
			}
			if w.Header().Get("X-Should-Retry") != "false" || w.Header().Get("Retry-After") != "" {
				t.Errorf("terminal, but X-Should-Retry=%q Retry-After=%q", w.Header().Get("X-Should-Retry"), w.Header().Get("Retry-After"))
			}
			for _, member := range []string{"type", "code", "message"} {
				if s, ok := body[member].(string); !ok || s == "" {
					t.Errorf("error.%s = %v, want a string", member, body[member])
				}
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

// E-states-b: what an open breaker refuses has AERR's error type, where SDKs do not take
// it for a reason to give up.
func TestErrorTypeOfAnOpenCircuit(t *testing.T) {
	for _, k := range problem.Kinds() {
		w := httptest.NewRecorder()
		problem.New(k, "").Write(w)
		if has := strings.Contains(w.Body.String(), `"error_type":"circuit_open"`); has != (k.Slug == "circuit-open") {
			t.Errorf("%s: %s", k.Slug, w.Body)
		}
	}
}

func TestRetryAfterIsACeilingInSeconds(t *testing.T) {
	for after, want := range map[time.Duration]string{0: "1", time.Millisecond: "1", 1500 * time.Millisecond: "2", 3 * time.Second: "3"} {
		p := problem.New(problem.InProgress, "")
		p.RetryAfter = after
		w := httptest.NewRecorder()
		p.Write(w)
		if got := w.Header().Get("Retry-After"); got != want {
			t.Errorf("%v: Retry-After %q, want %q", after, got, want)
		}
	}
}

func TestEveryProblemIsExplainedToAPerson(t *testing.T) {
	for _, k := range problem.Kinds() {
		for accept, kind := range map[string]string{"text/html": "text/html", "": "text/plain"} {
			r := httptest.NewRequest(http.MethodGet, problem.BasePath+k.Slug, nil)
			r.Header.Set("Accept", accept)
			w := httptest.NewRecorder()
			problem.ServePage(w, r, k.Slug)
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
	problem.ServePage(index, httptest.NewRequest(http.MethodGet, "/", nil), "")
	for _, k := range problem.Kinds() {
		if !strings.Contains(index.Body.String(), problem.BasePath+k.Slug+"\n") {
			t.Errorf("the index lacks %s", k.Slug)
		}
	}
	w := httptest.NewRecorder()
	problem.ServePage(w, httptest.NewRequest(http.MethodGet, "/", nil), "no-such")
	if w.Code != http.StatusNotFound {
		t.Errorf("unknown slug: %d", w.Code)
	}
}
