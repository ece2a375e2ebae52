package e2e

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// errorOf is the error token in an answer to a call with a token: it tells of this call, is
// meant for its caller, and is what the ledger has.
func (g *gateway) errorOf(t *testing.T, a *agent, call *ect.Token, got reply) *ect.Unverified {
	t.Helper()
	lines := append(got.header.Values(ect.FieldName), got.trailer.Values(ect.FieldName)...)
	if len(lines) != 1 {
		t.Fatalf("%d: the answer has %d lines of %s: %v", got.status, len(lines), ect.FieldName, got.header)
	}
	token, err := ect.ParseInsecure(lines[0])
	if err != nil {
		t.Fatal(err)
	}
	if token.Event() != ect.EventError || token.Workflow() != call.Workflow() || !slices.Contains(token.Audience(), a.issuer.Identity()) {
		t.Errorf("the error of %d says %s", got.status, token.Payload())
	}
	var stands reply
	eventually(t, "the error stands in the ledger", func() bool {
		stands = g.get(a, "ledger/entries?jti="+token.ID()+"&wid="+token.Workflow())
		return stands.status == http.StatusOK
	})
	entry := document[struct{ Token string }](t, stands)
	if entry.Token != lines[0] {
		t.Errorf("the ledger has %q, and the answer %q", entry.Token, lines[0])
	}
	return token
}

// AERR "Error Signaling" (E-error-signaling-a): who has made a call that failed gets the error
// with the answer, in Execution-Context.
func TestErrorsReachTheCaller(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr + " {\n breaker off\n }"})
	upstream.on("/refused", status(http.StatusUnprocessableEntity, "no such account"))
	upstream.on("/broken", status(http.StatusInternalServerError, "broken"))
	upstream.on("/bare", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(http.StatusNotFound) })
	upstream.on("/streams", func(w http.ResponseWriter, _ *arrival) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, "first, ")
		http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, "second")
	})
	upstream.on("/large", status(http.StatusNotFound, strings.Repeat("x", 1<<17)))
	upstream.on("/lost", func(http.ResponseWriter, *arrival) { panic(http.ErrAbortHandler) })
	upstream.on("/short", func(w http.ResponseWriter, _ *arrival) {
		w.Header().Set("Content-Length", "10")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, "short")
		panic(http.ErrAbortHandler)
	})
	for _, c := range []struct {
		path, body, severity string
		status               int
		trailer              bool
	}{
		{"/refused", "no such account", "warning", 422, false},
		{"/bare", "", "warning", 404, false},
		{"/broken", "broken", "error", 500, false},
		{"/streams", "first, second", "warning", 404, true},
	} {
		t.Run(c.path, func(t *testing.T) {
			call := a.issue(ect.Claims{Workflow: uuid.NewString()})
			got := g.call(with(call, request{path: c.path}))
			got.want(t, c.status, c.body, "executed")
			failed := g.errorOf(t, a, call, got)
			severity, _ := failed.Ext().Text(ect.MemberSeverity)
			named, _ := failed.Ext().Text(ect.MemberCheckpointID)
			if severity != c.severity || named != got.header.Get("Execution-Checkpoint") || !slices.Contains(failed.Parents(), call.ID()) ||
				(len(got.trailer) > 0) != c.trailer {
				t.Errorf("%s %v", failed.Payload(), got.trailer)
			}
			again := g.call(with(call, request{path: c.path}))
			again.want(t, c.status, c.body, "replayed")
			if replayed := g.errorOf(t, a, call, again); replayed.ID() != failed.ID() {
				t.Errorf("the replay tells of %s, the call of %s", replayed.ID(), failed.ID())
			}
		})
	}
	for _, path := range []string{"/lost", "/short"} { // in doubt
		t.Run(path, func(t *testing.T) {
			call := a.issue(ect.Claims{Workflow: uuid.NewString()})
			var first string
			for range 2 {
				got := g.call(with(call, request{path: path}))
				failed := g.errorOf(t, a, call, got)
				if severity, _ := failed.Ext().Text(ect.MemberSeverity); severity != "critical" {
					t.Error(failed.Payload())
				}
				if got.status == http.StatusConflict {
					doc := document[struct {
						ErrorECT string `json:"error_ect"`
					}](t, reply{status: 200, body: got.body})
					if doc.ErrorECT != failed.ID() {
						t.Errorf("the problem names %q, and the token is %s", doc.ErrorECT, failed.ID())
					}
				}
				if first == "" {
					first = failed.ID()
				} else if first != failed.ID() {
					t.Errorf("the retry tells of %s, the call of %s", failed.ID(), first)
				}
			}
		})
	}
	t.Run("beyond what is held", func(t *testing.T) {
		got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{path: "/large"}))
		got.want(t, 404, strings.Repeat("x", 1<<17), "executed")
		if len(got.header.Values(ect.FieldName)) > 0 {
			t.Error(got.header)
		}
	})
	// P3: nobody without a token of its own is told, nor somebody else.
	for _, r := range []request{{path: "/lost", id: "one"}, {path: "/lost", id: "one"}, {path: "/refused", id: "two"}} {
		if got := g.call(r); len(got.header.Values(ect.FieldName)) > 0 || strings.Contains(got.body, "error_ect") {
			t.Errorf("%d %v %s", got.status, got.header, got.body)
		}
	}
	wid := uuid.NewString()
	mine, theirs := a.issue(ect.Claims{Workflow: wid}), b.issue(ect.Claims{Workflow: wid})
	one, two := g.call(with(mine, request{path: "/lost", id: "one"})), g.call(with(theirs, request{path: "/lost", id: "one"}))
	if x, y := g.errorOf(t, a, mine, one), g.errorOf(t, b, theirs, two); x.ID() == y.ID() || slices.Contains(y.Audience(), a.issuer.Identity()) {
		t.Errorf("%s\n%s", x.Payload(), y.Payload())
	}
	// What went well tells of no error.
	if got := g.call(with(a.issue(ect.Claims{}), request{path: "/fine"})); len(got.header.Values(ect.FieldName)) > 0 {
		t.Error(got.header)
	}
}

// A call that was not sent has failed too.
func TestErrorOfACallThatWasNotSent(t *testing.T) {
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + freeAddress(t)})
	call := a.issue(ect.Claims{Workflow: uuid.NewString()})
	got := g.call(with(call, request{path: "/pay"}))
	if got.status != http.StatusBadGateway {
		t.Fatalf("%d %s", got.status, got.body)
	}
	g.errorOf(t, a, call, got)
}

// AERR "States" (E-states-c): what an open breaker refuses is told with an error that says
// circuit_open: one for each caller and workflow, however often it asks.
func TestErrorsOfAnOpenBreaker(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr + " {\n breaker {\n consecutive 2\n cooldown 10h\n }\n }"})
	upstream.on("/down", status(http.StatusServiceUnavailable, ""))
	wid := uuid.NewString()
	for range 2 {
		g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/down"}))
	}
	seen := map[string]bool{}
	for _, by := range []*agent{a, b} {
		var first string
		for range 3 {
			call := by.issue(ect.Claims{Workflow: wid})
			got := g.call(with(call, request{path: "/pay"}))
			got.problem(t, http.StatusServiceUnavailable, "circuit-open")
			failed := g.errorOf(t, by, call, got)
			kind, _ := failed.Ext().Text(ect.MemberErrorType)
			if kind != "circuit_open" || !strings.Contains(got.body, `"error_ect":"`+failed.ID()+`"`) || first != "" && first != failed.ID() {
				t.Errorf("%s\n%s, the first was %s", failed.Payload(), got.body, first)
			}
			first = failed.ID()
		}
		if seen[first] {
			t.Error("P3: another caller is told of the same error")
		}
		seen[first] = true
	}
	upstream.arrived("/pay", 0)
	if got := g.call(request{path: "/pay", id: "one"}); len(got.header.Values(ect.FieldName)) > 0 || strings.Contains(got.body, "error_ect") {
		t.Errorf("without a token: %v %s", got.header, got.body)
	}
}
