package evidence

import (
	"encoding/base64"
	"net/http"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ECT level L3: nobody relies on a token before it stands in the ledger. The upstream
// sees a request once its token can be proven.
func TestLevel3ProvesBeforeForwarding(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + harness.Level3, Site: "agent_proxy " + upstream.Addr})
	wid := uuid.NewString()
	parent := a.Issue(ect.Claims{Workflow: wid, Action: "plan"})
	token := a.Issue(ect.Claims{Workflow: wid, Parents: []string{parent.ID()}})
	look := a.Issue(ect.Claims{Workflow: wid, Action: "look"})
	shows := func(tokens ...*ect.Token) func(http.ResponseWriter, *harness.Arrival) {
		return func(w http.ResponseWriter, _ *harness.Arrival) {
			for _, token := range tokens {
				g.Proves(a, token)
			}
			w.WriteHeader(http.StatusCreated)
		}
	}
	upstream.On("/pay", shows(parent, token))
	upstream.On("/balance", shows(look))
	call := g.Begin(harness.Request{Path: "/pay", Header: map[string]string{ect.FieldName: token.Raw() + ", " + parent.Raw()}})
	read := g.Begin(harness.With(look, harness.Request{Method: "GET", Path: "/balance"}))
	for _, p := range []*harness.Pending{call, read} {
		if got := p.Answer(); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}

	// The same call with the same token is a replay, any other use is none.
	r := harness.Request{Path: "/pay", Header: map[string]string{ect.FieldName: token.Raw() + ", " + parent.Raw()}}
	if got := g.Call(r); got.Header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %v %s", got.Status, got.Header, got.Body)
	}
	g.Call(harness.With(token, harness.Request{Path: "/else"})).RefusedFor(t, 403, "replayed")
	upstream.Arrived("/pay", 1)
	upstream.Arrived("/else", 0)

	// What follows names parents that stand in the ledger, a token or the gateway's own.
	next := a.Issue(ect.Claims{Workflow: wid, Parents: []string{token.ID(), call.Answer().Header.Get("Execution-Checkpoint")}})
	upstream.On("/next", func(w http.ResponseWriter, _ *harness.Arrival) {
		g.Proves(a, next)
		w.WriteHeader(http.StatusCreated)
	})
	if got := g.Call(harness.With(next, harness.Request{Path: "/next"})); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// ECT level L3: the checkpoint that an upstream gets as a token can be proven too, also
// where the caller has sent none. What the upstream tells of may name it as a parent.
func TestLevel3ForwardedCheckpoint(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b) + harness.Level3, Site: "agent_proxy " + upstream.Addr + " {\n identity " + b.Issuer.Identity() + "\n }"})
	wid := uuid.NewString()
	upstream.On("/pay", func(w http.ResponseWriter, in *harness.Arrival) {
		lines := in.Header.Values(ect.FieldName)
		checkpoint, err := ect.ParseInsecure(lines[len(lines)-1])
		if err != nil {
			t.Error(err)
			return
		}
		failure := b.Issue(ect.Claims{
			Workflow: wid, Action: "error", Parents: []string{checkpoint.ID()},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
		})
		w.Header().Set(ect.FieldName, failure.Raw())
		w.WriteHeader(http.StatusInternalServerError)
	})
	bare := g.Begin(harness.Request{Path: "/pay", Id: "bare"})
	if got := bare.Answer(); got.Status != http.StatusInternalServerError {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/pay", Id: "k"}))
	g.SettledView(a, wid, 5) // token, checkpoint, the upstream's error, node, error
}

// ECT level L3: what is unsigned, or has a parent that is neither in the ledger nor
// there, is refused, whatever the method.
func TestLevel3Refuses(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + harness.Level3, Site: "agent_proxy " + upstream.Addr})
	unsigned := base64.RawURLEncoding.EncodeToString([]byte(a.Issue(ect.Claims{}).Payload()))
	orphan := a.Issue(ect.Claims{Parents: []string{uuid.NewString()}}).Raw()
	for _, method := range []string{"POST", "GET"} {
		for field, reason := range map[string]string{unsigned: "level", orphan: "parent-unknown"} {
			r := harness.Request{Method: method, Path: "/pay", Header: map[string]string{ect.FieldName: field}}
			g.Call(r).RefusedFor(t, 403, reason)
		}
	}
	if upstream.Total() != 0 {
		t.Errorf("%d calls arrived", upstream.Total())
	}
}

// ECT level L3: the token of a request that changes nothing stands in the ledger before
// the request goes on, and what it was used for is known after a restart.
func TestLevel3RecordsSafeRequests(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	s := harness.Setup{App: harness.Trusting(t, a) + harness.Level3, Site: "agent_proxy " + upstream.Addr}
	g := harness.Launch(t, s)
	wid := uuid.NewString()
	look := a.Issue(ect.Claims{Workflow: wid, Action: "look"})
	upstream.On("/balance", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(http.StatusOK) })
	same := harness.With(look, harness.Request{Method: "GET", Path: "/balance", Host: "gateway.example"}) // the port changes
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if got := g.Call(same); got.Status != http.StatusOK {
				t.Errorf("%d %s", got.Status, got.Body)
			}
		})
	}
	all.Wait()
	g.Proves(a, look)
	others := []harness.Request{{Path: "/pay"}, {Method: "GET", Path: "/else"}}
	for _, r := range others {
		g.Call(harness.With(look, r)).RefusedFor(t, 403, "replayed")
	}
	harness.Stop(t)
	s.Store = g.Store
	g = harness.Launch(t, s)
	for _, r := range others {
		g.Call(harness.With(look, r)).RefusedFor(t, 403, "replayed")
	}
	if got := g.Call(same); got.Status != http.StatusOK {
		t.Errorf("a retry: %d %s", got.Status, got.Body)
	}
	upstream.Arrived("/pay", 0)
	upstream.Arrived("/else", 0)
	pay := a.Issue(ect.Claims{Workflow: wid, Parents: []string{look.ID()}})
	if got := g.Call(harness.With(pay, harness.Request{Path: "/pay"})); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// ECT level L3: what an agent tells of is answered once it can be proven.
func TestLevel3ErrorsOfAgents(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + harness.Level3, Site: "agent_proxy " + upstream.Addr})
	token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
	g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	failure := a.Issue(ect.Claims{
		Workflow: token.Workflow(), Action: string(ect.EventError), Parents: []string{token.ID()},
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
	})
	r := harness.With(failure, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})
	if got := g.Call(r); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	g.Proves(a, failure)
}
