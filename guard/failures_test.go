package guard_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// failureSpace is where the coordinator records failures.
const failureSpace = "ue"

// recorded counts the writes of failures in the commits, and all other writes, until done is called.
func (b *saga) recorded() (done func() (failures, others int)) {
	var failures, others int
	var mu sync.Mutex
	count := func(batch []store.Write) error {
		mu.Lock()
		defer mu.Unlock()
		if !slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] != 'l' }) {
			return nil // the ledger moves what is recorded, in its own time
		}
		for _, w := range batch {
			if strings.HasPrefix(string(w.Key), failureSpace) && !w.Delete {
				failures++
			} else {
				others++
			}
		}
		return nil
	}
	b.disk.before.Store(&count)
	return func() (int, int) {
		<-time.After(time.Minute) // the ledger takes its time
		synctest.Wait()
		b.disk.before.Store(nil)
		return failures, others
	}
}

// A-error-signaling-f: which outcomes of calls are escalated, and with which cause. What was refused, was
// not executed, is in doubt or is of no workflow that somebody has named asks nobody.
func TestFailedCallsAskPeople(t *testing.T) {
	for name, test := range map[string]struct {
		route   string
		answer  int
		error   string // the severity of an error of the called agent in the answer
		onError string
		send    func(b *saga, route string) *httptest.ResponseRecorder // nil is with a token of the workflow
		cause   hitl.Cause
		caller  string
	}{
		"done":                         {route: "POST /charges", answer: 200},
		"refused":                      {route: "POST /charges", answer: 422},
		"released":                     {route: "POST /charges", answer: 429},
		"released, to be tried again":  {route: "POST /charges", answer: 503},
		"in doubt":                     {route: "POST /charges", answer: 504},
		"failed":                       {route: "POST /charges", answer: 500, cause: hitl.CauseFailed, caller: "issuer:" + agentName + "a"},
		"failed, rolled back":          {route: "POST /charges", answer: 500, onError: "rollback"},
		"failed, and cannot be undone": {route: "POST /mail", answer: 500, cause: hitl.CauseIrreversible, caller: "issuer:" + agentName + "a"},
		"done, with an error":          {route: "POST /charges", answer: 200, error: "error", cause: hitl.CauseFailed, caller: "issuer:" + agentName + "a"},
		"done, with a warning":         {route: "POST /charges", answer: 200, error: "warning"},
		"done, with a critical error":  {route: "POST /charges", answer: 200, error: "critical", cause: hitl.CauseError, caller: "issuer:" + agentName + "a"},
		"refused, with an error":       {route: "POST /charges", answer: 422, error: "error", cause: hitl.CauseFailed, caller: "issuer:" + agentName + "a"},
		"released, with an error":      {route: "POST /charges", answer: 429, error: "error"},
		"done with an error, on_error": {route: "POST /charges", answer: 200, error: "error", onError: "rollback", cause: hitl.CauseFailed, caller: "issuer:" + agentName + "a"},
		"failed, by nobody in particular": {route: "POST /charges", answer: 500, cause: hitl.CauseFailed, send: func(b *saga, route string) *httptest.ResponseRecorder {
			return b.sent(route, "Workflow-Id", b.wid)
		}},
		"failed, in a trace": {route: "POST /charges", answer: 500, send: func(b *saga, route string) *httptest.ResponseRecorder {
			return b.sent(route, "Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
		}},
		"failed, without a workflow": {route: "POST /charges", answer: 500, send: func(b *saga, route string) *httptest.ResponseRecorder {
			return b.sent(route)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			undoing(t, func(b *saga) {
				b.config.Actions[1].OnError = test.onError
				b.begin()
				b.on(test.route, func(w http.ResponseWriter, r *http.Request) {
					if test.error != "" {
						w.Header().Set(ect.FieldName, b.token(b.agents["b"], ect.Claims{
							Workflow: b.wid, Action: "error", Parents: []string{r.Header.Get("Execution-Parent")},
							Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, test.error).Text(ect.MemberErrorType, "action_failed"),
						}).Raw())
					}
					w.WriteHeader(test.answer)
					_, _ = w.Write([]byte(`{"id":"ch_1"}`))
				})
				done := b.recorded()
				var got *httptest.ResponseRecorder
				if test.send == nil {
					got = b.try(test.route, `{"amount":1}`).ResponseRecorder
				} else {
					got = test.send(b, test.route)
				}
				failures, _ := done()
				want := 0
				if test.cause != "" || test.onError != "" {
					want = 1
				}
				if failures != want {
					b.Errorf("%d %s: %d failures are recorded, want %d", got.Code, got.Body, failures, want)
				}
				page, err := b.escalations.List(b.Context(), hitl.Filter{}, "", 10)
				b.check(err)
				if test.cause == "" {
					if len(page.Escalations) != 0 {
						b.Errorf("%+v", page.Escalations)
					}
					return
				}
				if len(page.Escalations) != 1 {
					b.Fatalf("%d %s: %+v", got.Code, got.Body, page.Escalations)
				}
				e, workflow := page.Escalations[0], b.wid
				if test.caller == "" { // who has no token does not reach the workflows of those who have one
					workflow = evidence.NamedWorkflowID(b.wid)
				}
				if e.Cause != test.cause || e.Level != hitl.Approval || e.Held || e.Workflow != workflow || e.Caller != test.caller || e.Links.Checkpoint == "" || e.Links.Error == "" {
					b.Errorf("%+v", e)
				}
				b.has(workflow, e.Links.Error)
			})
		})
	}
}

// sent makes a call without a token, with these header fields.
func (b *saga) sent(route string, fields ...string) *httptest.ResponseRecorder {
	method, path, _ := strings.Cut(route, " ")
	r := httptest.NewRequestWithContext(b.Context(), method, path, strings.NewReader(`{"amount":1}`))
	r.Header.Set("Idempotency-Key", uuid.NewString())
	for i := 0; i < len(fields); i += 2 {
		r.Header.Set(fields[i], fields[i+1])
	}
	w := httptest.NewRecorder()
	b.serve(w, r)
	return w
}

// What becomes of failures costs a call that does not fail nothing: its commits have the writes that
// they have where nobody takes failures. One that fails has one write more.
func TestFailuresCostOtherCallsNothing(t *testing.T) {
	undoing(t, func(b *saga) {
		writes := func(status int, taken bool) (int, int) {
			b.engine.Coordinator = func() *rollback.Coordinator {
				if !taken {
					return nil
				}
				return b.Coordinator
			}
			b.on("POST /charges", says(status, `{"id":"ch_1"}`))
			done := b.recorded()
			if got := b.try("POST /charges", `{"amount":1}`); got.Code != status {
				b.Fatalf("%d %s", got.Code, got.Body)
			}
			b.disk.before.Store(nil) // what the coordinator does comes afterwards
			return done()
		}
		writes(200, true) // begins the workflow
		for _, status := range []int{200, 422} {
			without, with := [2]int{}, [2]int{}
			without[0], without[1] = writes(status, false)
			with[0], with[1] = writes(status, true)
			if with != without || with[0] != 0 {
				b.Errorf("%d: %d failures and %d other writes, want %d and %d", status, with[0], with[1], without[0], without[1])
			}
		}
		if failures, _ := writes(500, true); failures != 1 {
			b.Errorf("%d failures of a failed call", failures)
		}
	})
}
