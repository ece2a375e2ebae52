package e2e

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"testing"

	"github.com/google/uuid"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

const level3 = "\n trust {\n min_level L3\n }"

// proves holds that the ledger can prove a token: its entry with a receipt, and the
// inclusion proof by itself.
func (g *gateway) proves(a *agent, token *ect.Token) {
	g.t.Helper()
	got := g.get(a, "ledger/entries?jti="+token.ID()+"&wid="+token.Workflow())
	if got.status != http.StatusOK {
		g.t.Errorf("the entry of %s: %d %s", token.Action(), got.status, got.body)
		return
	}
	entry := document[struct {
		Log     string
		Token   string
		Leaf    []byte
		Receipt *ledger.Receipt
	}](g.t, got)
	log := "log=" + url.QueryEscape(entry.Log) // that of another gateway, where several share a store
	head := document[struct{ Origin, Key string }](g.t, g.get(a, "ledger/head?"+log))
	key, err := note.NewVerifier(head.Key)
	if err != nil {
		g.t.Error(err)
		return
	}
	if entry.Token != token.Raw() || entry.Receipt == nil {
		g.t.Errorf("of %s the ledger has %s", token.Action(), got.body)
		return
	}
	if _, err := entry.Receipt.Check(entry.Leaf, head.Origin, note.VerifierList(key)); err != nil {
		g.t.Error(err)
	}
	if got := g.get(a, "ledger/proof?index="+strconv.FormatInt(entry.Receipt.Index, 10)+"&"+log); got.status != http.StatusOK {
		g.t.Errorf("the inclusion proof: %d %s", got.status, got.body)
	}
}

// ECT level L3: nobody relies on a token before it stands in the ledger. The upstream
// sees a request once its token can be proven.
func TestLevel3ProvesBeforeForwarding(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a) + level3, site: "agent_proxy " + upstream.addr})
	wid := uuid.NewString()
	parent := a.issue(ect.Claims{Workflow: wid, Action: "plan"})
	token := a.issue(ect.Claims{Workflow: wid, Parents: []string{parent.ID()}})
	look := a.issue(ect.Claims{Workflow: wid, Action: "look"})
	shows := func(tokens ...*ect.Token) func(http.ResponseWriter, *arrival) {
		return func(w http.ResponseWriter, _ *arrival) {
			for _, token := range tokens {
				g.proves(a, token)
			}
			w.WriteHeader(http.StatusCreated)
		}
	}
	upstream.on("/pay", shows(parent, token))
	upstream.on("/balance", shows(look))
	call := g.begin(request{path: "/pay", header: map[string]string{ect.FieldName: token.Raw() + ", " + parent.Raw()}})
	read := g.begin(with(look, request{method: "GET", path: "/balance"}))
	for _, p := range []*pending{call, read} {
		if got := p.answer(); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}

	// The same call with the same token is a replay, any other use is none.
	r := request{path: "/pay", header: map[string]string{ect.FieldName: token.Raw() + ", " + parent.Raw()}}
	if got := g.call(r); got.header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %v %s", got.status, got.header, got.body)
	}
	g.call(with(token, request{path: "/else"})).refusedFor(t, 403, "replayed")
	upstream.arrived("/pay", 1)
	upstream.arrived("/else", 0)

	// What follows names parents that stand in the ledger, a token or the gateway's own.
	next := a.issue(ect.Claims{Workflow: wid, Parents: []string{token.ID(), call.answer().header.Get("Execution-Checkpoint")}})
	upstream.on("/next", func(w http.ResponseWriter, _ *arrival) {
		g.proves(a, next)
		w.WriteHeader(http.StatusCreated)
	})
	if got := g.call(with(next, request{path: "/next"})); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// ECT level L3: the checkpoint that an upstream gets as a token can be proven too, also
// where the caller has sent none. What the upstream tells of may name it as a parent.
func TestLevel3ForwardedCheckpoint(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b) + level3, site: "agent_proxy " + upstream.addr + " {\n identity " + b.issuer.Identity() + "\n }"})
	wid := uuid.NewString()
	upstream.on("/pay", func(w http.ResponseWriter, in *arrival) {
		lines := in.Header.Values(ect.FieldName)
		checkpoint, err := ect.ParseInsecure(lines[len(lines)-1])
		if err != nil {
			t.Error(err)
			return
		}
		failure := b.issue(ect.Claims{
			Workflow: wid, Action: "error", Parents: []string{checkpoint.ID()},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
		})
		w.Header().Set(ect.FieldName, failure.Raw())
		w.WriteHeader(http.StatusInternalServerError)
	})
	bare := g.begin(request{path: "/pay", id: "bare"})
	if got := bare.answer(); got.status != http.StatusInternalServerError {
		t.Errorf("%d %s", got.status, got.body)
	}
	g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/pay", id: "k"}))
	g.settledView(a, wid, 5) // token, checkpoint, the upstream's error, node, error
}

// ECT level L3: what is unsigned, or has a parent that is neither in the ledger nor
// there, is refused, whatever the method.
func TestLevel3Refuses(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a) + level3, site: "agent_proxy " + upstream.addr})
	unsigned := base64.RawURLEncoding.EncodeToString([]byte(a.issue(ect.Claims{}).Payload()))
	orphan := a.issue(ect.Claims{Parents: []string{uuid.NewString()}}).Raw()
	for _, method := range []string{"POST", "GET"} {
		for field, reason := range map[string]string{unsigned: "level", orphan: "parent-unknown"} {
			r := request{method: method, path: "/pay", header: map[string]string{ect.FieldName: field}}
			g.call(r).refusedFor(t, 403, reason)
		}
	}
	if upstream.total() != 0 {
		t.Errorf("%d calls arrived", upstream.total())
	}
}

// ECT level L3: the token of a request that changes nothing stands in the ledger before
// the request goes on, and what it was used for is known after a restart.
func TestLevel3RecordsSafeRequests(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	s := setup{app: trusting(t, a) + level3, site: "agent_proxy " + upstream.addr}
	g := launch(t, s)
	wid := uuid.NewString()
	look := a.issue(ect.Claims{Workflow: wid, Action: "look"})
	upstream.on("/balance", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(http.StatusOK) })
	same := with(look, request{method: "GET", path: "/balance", host: "gateway.example"}) // the port changes
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if got := g.call(same); got.status != http.StatusOK {
				t.Errorf("%d %s", got.status, got.body)
			}
		})
	}
	all.Wait()
	g.proves(a, look)
	others := []request{{path: "/pay"}, {method: "GET", path: "/else"}}
	for _, r := range others {
		g.call(with(look, r)).refusedFor(t, 403, "replayed")
	}
	stop(t)
	s.store = g.store
	g = launch(t, s)
	for _, r := range others {
		g.call(with(look, r)).refusedFor(t, 403, "replayed")
	}
	if got := g.call(same); got.status != http.StatusOK {
		t.Errorf("a retry: %d %s", got.status, got.body)
	}
	upstream.arrived("/pay", 0)
	upstream.arrived("/else", 0)
	pay := a.issue(ect.Claims{Workflow: wid, Parents: []string{look.ID()}})
	if got := g.call(with(pay, request{path: "/pay"})); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// ECT level L3: what an agent tells of is answered once it can be proven.
func TestLevel3ErrorsOfAgents(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a) + level3, site: "agent_proxy " + upstream.addr})
	token := a.issue(ect.Claims{Workflow: uuid.NewString()})
	g.call(with(token, request{path: "/pay"}))
	failure := a.issue(ect.Claims{
		Workflow: token.Workflow(), Action: string(ect.EventError), Parents: []string{token.ID()},
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
	})
	r := with(failure, request{path: "/.well-known/cascade/errors", reader: nothing{}})
	if got := g.call(r); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	g.proves(a, failure)
}
