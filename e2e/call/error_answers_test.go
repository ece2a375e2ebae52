package call

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// AERR "Error Signaling" (E-error-signaling-a): who has made a call that failed gets the error
// with the answer, in Execution-Context.
func TestErrorsReachTheCaller(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr + " {\n breaker off\n }"})
	upstream.On("/refused", harness.Status(http.StatusUnprocessableEntity, "no such account"))
	upstream.On("/broken", harness.Status(http.StatusInternalServerError, "broken"))
	upstream.On("/bare", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(http.StatusNotFound) })
	upstream.On("/streams", func(w http.ResponseWriter, _ *harness.Arrival) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, "first, ")
		http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, "second")
	})
	upstream.On("/large", harness.Status(http.StatusNotFound, strings.Repeat("x", 1<<17)))
	upstream.On("/lost", func(http.ResponseWriter, *harness.Arrival) { panic(http.ErrAbortHandler) })
	upstream.On("/short", func(w http.ResponseWriter, _ *harness.Arrival) {
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
			call := a.Issue(ect.Claims{Workflow: uuid.NewString()})
			got := g.Call(harness.With(call, harness.Request{Path: c.path}))
			got.Want(t, c.status, c.body, "executed")
			failed := g.ErrorOf(t, a, call, got)
			severity, _ := failed.Ext().Text(ect.MemberSeverity)
			named, _ := failed.Ext().Text(ect.MemberCheckpointID)
			if severity != c.severity || named != got.Header.Get("Execution-Checkpoint") || !slices.Contains(failed.Parents(), call.ID()) ||
				(len(got.Trailer) > 0) != c.trailer {
				t.Errorf("%s %v", failed.Payload(), got.Trailer)
			}
			again := g.Call(harness.With(call, harness.Request{Path: c.path}))
			again.Want(t, c.status, c.body, "replayed")
			if replayed := g.ErrorOf(t, a, call, again); replayed.ID() != failed.ID() {
				t.Errorf("the replay tells of %s, the call of %s", replayed.ID(), failed.ID())
			}
		})
	}
	for _, path := range []string{"/lost", "/short"} { // in doubt
		t.Run(path, func(t *testing.T) {
			call := a.Issue(ect.Claims{Workflow: uuid.NewString()})
			var first string
			for range 2 {
				got := g.Call(harness.With(call, harness.Request{Path: path}))
				failed := g.ErrorOf(t, a, call, got)
				if severity, _ := failed.Ext().Text(ect.MemberSeverity); severity != "critical" {
					t.Error(failed.Payload())
				}
				if got.Status == http.StatusConflict {
					doc := harness.Document[struct {
						ErrorECT string `json:"error_ect"`
					}](t, harness.Reply{Status: 200, Body: got.Body})
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
		got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Path: "/large"}))
		got.Want(t, 404, strings.Repeat("x", 1<<17), "executed")
		if len(got.Header.Values(ect.FieldName)) > 0 {
			t.Error(got.Header)
		}
	})
	// P3: nobody without a token of its own is told, nor somebody else.
	for _, r := range []harness.Request{{Path: "/lost", Id: "one"}, {Path: "/lost", Id: "one"}, {Path: "/refused", Id: "two"}} {
		if got := g.Call(r); len(got.Header.Values(ect.FieldName)) > 0 || strings.Contains(got.Body, "error_ect") {
			t.Errorf("%d %v %s", got.Status, got.Header, got.Body)
		}
	}
	wid := uuid.NewString()
	mine, theirs := a.Issue(ect.Claims{Workflow: wid}), b.Issue(ect.Claims{Workflow: wid})
	one, two := g.Call(harness.With(mine, harness.Request{Path: "/lost", Id: "one"})), g.Call(harness.With(theirs, harness.Request{Path: "/lost", Id: "one"}))
	if x, y := g.ErrorOf(t, a, mine, one), g.ErrorOf(t, b, theirs, two); x.ID() == y.ID() || slices.Contains(y.Audience(), a.Issuer.Identity()) {
		t.Errorf("%s\n%s", x.Payload(), y.Payload())
	}
	// What went well tells of no error.
	if got := g.Call(harness.With(a.Issue(ect.Claims{}), harness.Request{Path: "/fine"})); len(got.Header.Values(ect.FieldName)) > 0 {
		t.Error(got.Header)
	}
}

// A call that was not sent has failed too.
func TestErrorOfACallThatWasNotSent(t *testing.T) {
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + harness.FreeAddress(t)})
	call := a.Issue(ect.Claims{Workflow: uuid.NewString()})
	got := g.Call(harness.With(call, harness.Request{Path: "/pay"}))
	if got.Status != http.StatusBadGateway {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	g.ErrorOf(t, a, call, got)
}

// AERR "States" (E-states-c): what an open breaker refuses is told with an error that says
// circuit_open: one for each caller and workflow, however often it asks.
func TestErrorsOfAnOpenBreaker(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr + " {\n breaker {\n consecutive 2\n cooldown 10h\n }\n }"})
	upstream.On("/down", harness.Status(http.StatusServiceUnavailable, ""))
	wid := uuid.NewString()
	for range 2 {
		g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/down"}))
	}
	seen := map[string]bool{}
	for _, by := range []*harness.Agent{a, b} {
		var first string
		for range 3 {
			call := by.Issue(ect.Claims{Workflow: wid})
			got := g.Call(harness.With(call, harness.Request{Path: "/pay"}))
			got.Problem(t, http.StatusServiceUnavailable, "circuit-open")
			failed := g.ErrorOf(t, by, call, got)
			kind, _ := failed.Ext().Text(ect.MemberErrorType)
			if kind != "circuit_open" || !strings.Contains(got.Body, `"error_ect":"`+failed.ID()+`"`) || first != "" && first != failed.ID() {
				t.Errorf("%s\n%s, the first was %s", failed.Payload(), got.Body, first)
			}
			first = failed.ID()
		}
		if seen[first] {
			t.Error("P3: another caller is told of the same error")
		}
		seen[first] = true
	}
	upstream.Arrived("/pay", 0)
	if got := g.Call(harness.Request{Path: "/pay", Id: "one"}); len(got.Header.Values(ect.FieldName)) > 0 || strings.Contains(got.Body, "error_ect") {
		t.Errorf("without a token: %v %s", got.Header, got.Body)
	}
}
