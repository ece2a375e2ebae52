package guard

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// keptRejections keeps the parents of the rejections that are to be recorded.
type keptRejections struct{ parents []string }

func (k *keptRejections) Name(string) string { return "" }

func (k *keptRejections) Busy() bool { return false }

func (k *keptRejections) RecordRejection(_ *TokenPolicy, _ *breaker.OpenError, _ string, parents []string) {
	k.parents = parents
}

func (k *keptRejections) Unrecorded(breaker.Key, error) {}

// Cascade 3.3.2, C-6.1-a: the rejection of a call that a person has approved follows from the decision, as the call would.
func TestRejectionFollowsFromTheDecision(t *testing.T) {
	h, e, kept := newHandler(t, Config{}), testEngine(t), new(keptRejections)
	e.Circuits = kept
	x := &Call{
		Request: Request{guardedRequest: guardedRequest{
			opened: opened{engine: e, executions: e.Executions, policy: new(TokenPolicy)},
			h:      h, r: request(http.MethodPost, "/charges"), action: h.Actions[0],
		}},
		in: admission{facts: evidence.Call{Workflow: "w", Parents: []string{"earlier", "decision"}}},
	}
	x.facts = evidence.Call{Workflow: "w", Parents: []string{"earlier"}}
	w := httptest.NewRecorder()
	if err := x.unanswered(w, nil, circuitOpen(&breaker.OpenError{State: breaker.Open}, "", false)); err != nil || w.Code != http.StatusServiceUnavailable {
		t.Fatalf("%v, %d %s", err, w.Code, w.Body)
	}
	if !slices.Equal(kept.parents, []string{"earlier", "decision"}) {
		t.Errorf("it follows from %q", kept.parents)
	}
}
