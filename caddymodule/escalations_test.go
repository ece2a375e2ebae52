package caddymodule

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

const hookSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// hook is a receiver of escalations.
type hook struct {
	*httptest.Server
	mu     sync.Mutex
	status int
	ids    []string
	came   chan string // summaries, as they come
}

func newHook(t *testing.T, status int) *hook {
	t.Helper()
	h := &hook{status: status, came: make(chan string, 64)}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var message struct {
			Data struct{ ID, Gateway, Summary string }
		}
		if err := json.Unmarshal(body, &message); err != nil || r.Header.Get("webhook-signature") == "" {
			t.Errorf("%v: %s", err, body)
		}
		h.mu.Lock()
		h.ids = append(h.ids, message.Data.ID)
		w.WriteHeader(h.status)
		h.mu.Unlock()
		h.came <- message.Data.Summary
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *hook) answers(status int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.status = status
}

func (h *hook) wait(t *testing.T) string {
	t.Helper()
	select {
	case summary := <-h.came:
		return summary
	case <-time.After(patience):
		t.Fatal("nobody was notified")
		return ""
	}
}

func (h *hook) member() string {
	return fmt.Sprintf(`, "hitl": {"webhook": {"url": %q, "secrets": ["{env.AGENT_GUARD_TEST_HOOK}"]}}`, h.URL+"/hook")
}

// until waits until an escalation is in a state.
func until(t *testing.T, e *engine, id string, state hitl.State) hitl.Escalation {
	t.Helper()
	end := time.Now().Add(patience)
	for {
		esc, err := e.calls.Escalations.Get(t.Context(), id)
		if err == nil && esc.State == state {
			return esc
		}
		if time.Now().After(end) {
			t.Fatalf("%+v, %v; want it %s", esc, err, state)
		}
		<-time.After(time.Millisecond)
	}
}

func escalate(t *testing.T, e *engine, key string) hitl.Escalation {
	t.Helper()
	esc, err := e.calls.Escalations.Open(t.Context(), hitl.Opening{
		Key: key, Level: hitl.Stop, Cause: hitl.CauseRollbackFailed, Summary: "about " + key, Workflow: "w",
	})
	if err != nil {
		t.Fatal(err)
	}
	return esc
}

// ATD, HITL case 4: an upstream that does not come back is escalated at level 2, once an
// outage, and its receiver is notified.
func TestUpstreamThatDoesNotComeBackIsEscalated(t *testing.T) {
	t.Setenv("AGENT_GUARD_TEST_HOOK", hookSecret)
	h := newHook(t, http.StatusNoContent)
	e := started(t, t.TempDir(), h.member()).held
	ev := breaker.Event{
		Key: breaker.Key{Upstream: "a:1"}, From: breaker.HalfOpen, To: breaker.Open, Generation: 7, Time: time.Now(),
		Cause: "status 503", Evidence: "checkpoint@workflow", FailedProbes: 3,
	}
	for range 2 { // reported twice, it is one all the same
		circuitHook{e}.PermanentlyOpen(ev)
	}
	if got := h.wait(t); got != "The upstream a:1 does not come back: 3 probes in a row have failed, the last one with: status 503." {
		t.Errorf("%q", got)
	}
	page, err := e.calls.Escalations.List(t.Context(), hitl.Filter{}, "", 10)
	if err != nil || len(page.Escalations) != 1 {
		t.Fatalf("%+v, %v", page, err)
	}
	esc := until(t, e, page.Escalations[0].ID, hitl.Notified)
	if esc.Level != hitl.Approval || esc.Cause != hitl.CauseBreakerOpen || esc.Links != (hitl.Links{Upstream: "a:1", Checkpoint: "checkpoint"}) || esc.Workflow != "" {
		t.Errorf("%+v", esc)
	}
	ev.Time = ev.Time.Add(time.Hour) // the next outage
	circuitHook{e}.PermanentlyOpen(ev)
	h.wait(t)
	if len(h.ids) != 2 || h.ids[0] == h.ids[1] {
		t.Errorf("%q", h.ids)
	}
}

// A reload neither loses an escalation nor delivers it twice, and the latest configuration
// names the receiver: the log, where it names nobody.
func TestReloadChangesTheReceiver(t *testing.T) {
	t.Setenv("AGENT_GUARD_TEST_HOOK", hookSecret)
	dir := t.TempDir()
	first, second := newHook(t, http.StatusNoContent), newHook(t, http.StatusNoContent)
	old := started(t, dir, first.member())
	e := old.held
	a := escalate(t, e, "a")
	first.wait(t)
	until(t, e, a.ID, hitl.Notified)
	next := started(t, dir, second.member())
	if next.held != e {
		t.Fatal("a reload has opened the store anew")
	}
	b := escalate(t, e, "b")
	second.wait(t)
	until(t, e, b.ID, hitl.Notified)
	cleanUp(t, old)
	c := escalate(t, e, "c")
	second.wait(t)
	until(t, e, c.ID, hitl.Notified)
	started(t, dir, "")
	until(t, e, escalate(t, e, "d").ID, hitl.Notified)
	if !slices.Equal(first.ids, []string{a.ID}) || !slices.Equal(second.ids, []string{b.ID, c.ID}) {
		t.Errorf("notified: %q and %q", first.ids, second.ids)
	}
}

// What could not be delivered before the process ended is delivered by the next one.
func TestEscalationIsToldAfterARestart(t *testing.T) {
	t.Setenv("AGENT_GUARD_TEST_HOOK", hookSecret)
	dir := t.TempDir()
	h := newHook(t, http.StatusInternalServerError)
	var id string
	t.Run("before", func(t *testing.T) {
		e := started(t, dir, h.member()).held
		id = escalate(t, e, "a").ID
		h.wait(t)
	})
	h.answers(http.StatusNoContent)
	e := started(t, dir, h.member()).held
	if esc := until(t, e, id, hitl.Notified); esc.Attempts < 2 {
		t.Errorf("%+v", esc)
	}
	if e.counts == nil || slices.ContainsFunc(h.ids, func(other string) bool { return other != id }) {
		t.Errorf("%q", h.ids)
	}
}

// A receiver that takes nothing more is reported, and the escalation is kept.
func TestUndeliverableEscalation(t *testing.T) {
	t.Setenv("AGENT_GUARD_TEST_HOOK", hookSecret)
	h := newHook(t, http.StatusGone)
	e := started(t, t.TempDir(), h.member()).held
	esc := until(t, e, escalate(t, e, "a").ID, hitl.Undeliverable)
	if !strings.Contains(esc.LastError, "410") || strings.Contains(esc.LastError, "/hook") {
		t.Errorf("%q", esc.LastError)
	}
	found := false
	counted, _ := e.countEscalations()
	for _, r := range counted {
		found = found || r.Level == "stop" && r.State == "undeliverable" && r.Status == "pending" && r.N == 1
	}
	if !found {
		t.Errorf("%+v", counted)
	}
}

// Re-sealing reaches escalations: the older key is not needed for them any more.
func TestEscalationsAreSealedAnew(t *testing.T) {
	e := started(t, t.TempDir(), "").held
	esc := until(t, e, escalate(t, e, "a").ID, hitl.Notified)
	resealed(t, e, rotateKeys(t, e))
	if n, err := e.calls.Escalations.Reseal(t.Context()); err != nil || n != 0 {
		t.Errorf("%d escalations are left under the older key, %v", n, err)
	}
	until(t, e, esc.ID, hitl.Notified)
}

// What is wrong with the receiver is found at load, and shows no secret (P8).
func TestP8WebhookIsCheckedAtLoad(t *testing.T) {
	t.Setenv("AGENT_GUARD_TEST_HOOK", hookSecret)
	for members, want := range map[string]string{
		`{"webhook": {"url": "http://example.com/s3cret", "secrets": ["` + hookSecret + `"]}}`:           `hitl: webhook: url: plain http to "example.com"`,
		`{"webhook": {"url": "https://example.com/s3cret"}}`:                                             "hitl: webhook: secrets: there are 0",
		`{"webhook": {"url": "https://example.com/s3cret", "secrets": ["s3cret"]}}`:                      "hitl: webhook: secret 1 of 1: it does not begin with whsec_",
		`{"webhook": {"url": "https://example.com/s3cret", "secrets": ["{env.AGENT_GUARD_TEST_NONE}"]}}`: "hitl: webhook: secret 1 of 1: ",
		`{"webhook": {"url": "{env.AGENT_GUARD_TEST_NONE}", "secrets": ["` + hookSecret + `"]}}`:         "hitl: webhook: url: ",
		`{"webhook": {"url": "https://a:b@e/s3cret", "secrets": ["{env.AGENT_GUARD_TEST_HOOK}"]}}`:       "hitl: webhook: url: it holds a user or a password",
	} {
		_, err := newApp(t, t.TempDir(), `, "hitl": `+members)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", members, err)
			continue
		}
		if strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), strings.TrimPrefix(hookSecret, "whsec_")) {
			t.Errorf("%s is shown by %v", members, err)
		}
	}
}
