package e2e

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// An upstream that names one error twice does not keep the outcome from being told.
func TestUpstreamErrorTwice(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), badger: true, site: "agent_proxy " + upstream.addr + " {\n identity " + b.issuer.Identity() + "\n }"})
	wid := uuid.NewString()
	upstream.on("/pay", func(w http.ResponseWriter, in *arrival) {
		lines := in.Header.Values(ect.FieldName)
		checkpoint, err := ect.ParseInsecure(lines[len(lines)-1])
		if err != nil {
			t.Error(err)
			return
		}
		sent := b.issue(ect.Claims{
			Workflow: wid, Action: "error", Parents: []string{checkpoint.ID()},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
		})
		w.Header().Set(ect.FieldName, sent.Raw()+", "+sent.Raw())
		w.WriteHeader(http.StatusInternalServerError)
	})
	g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/pay"}))
	g.settledView(a, wid, 5) // token, checkpoint, the upstream's error, node, error
}

// P6: answers that carry one error at the same time are recorded all the same: none of
// the executions is in doubt.
func TestUpstreamErrorInManyAnswers(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), badger: true, site: "agent_proxy " + upstream.addr})
	wid := uuid.NewString()
	root, own := a.issue(ect.Claims{Workflow: wid}), b.issue(ect.Claims{Workflow: wid}) // b is the upstream
	for _, task := range []*ect.Token{root, own} {
		if got := g.call(with(task, request{path: "/root"})); got.status != 201 {
			t.Fatal(got.body)
		}
	}
	for round := range 3 {
		sent := b.issue(ect.Claims{
			Workflow: wid, Action: "error", Parents: []string{own.ID()},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ""),
		})
		answers := make(chan struct{})
		arrivals := make(chan struct{}, 8)
		upstream.on("/pay", func(w http.ResponseWriter, in *arrival) {
			arrivals <- struct{}{}
			<-answers
			w.Header().Set(ect.FieldName, sent.Raw())
			w.WriteHeader(http.StatusCreated)
		})
		var waits []*pending
		for range 8 {
			waits = append(waits, g.begin(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/pay", id: uuid.NewString()})))
		}
		for range 8 {
			<-arrivals
		}
		close(answers)
		for _, p := range waits {
			if got := p.answer(); got.status != 201 {
				t.Errorf("round %d: %d %s", round, got.status, got.body)
			}
		}
		g.entry(b, wid, sent.ID())
	}
}

// P3: who uses another caller's execution id in the same workflow does not see what that
// one's execution causes.
func TestP3SameIDInOneWorkflow(t *testing.T) {
	upstream := newUpstream(t)
	g := launch(t, setup{app: "identity " + gatewayIdentity, site: "agent_proxy " + upstream.addr, badger: true})
	call := func(key, id, parent string) string {
		t.Helper()
		return g.call(request{path: "/pay", id: id, header: map[string]string{
			"X-Api-Key": key, "Workflow-Id": "nightly", "Execution-Parent": parent,
		}}).header.Get("Execution-Checkpoint")
	}
	call("ada", "order-7", "")
	call("eve", "order-7", "")
	nested := call("tool", "", "order-7")
	look := func(key string) reply {
		return g.call(request{method: "GET", path: "/.well-known/cascade/workflows/nightly", header: map[string]string{"X-Api-Key": key}})
	}
	eventually(t, "the nested call is in the ledger", func() bool {
		got := look("tool")
		return got.status == http.StatusOK && document[workflowView](t, got).state(nested) != "none"
	})
	if v := document[workflowView](t, look("eve")); v.state(nested) != "none" {
		t.Errorf("eve sees the call that ada's upstream has made: %+v", v)
	}
}

// The gateway's key may have been given, for another algorithm than a made one has.
func TestGivenKeyOfAnotherAlgorithm(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	file := filepath.Join(t.TempDir(), "given")
	if _, err := ect.CreateRing(file, ect.EdDSA); err != nil {
		t.Fatal(err)
	}
	app := strings.Replace(trusting(t, a), "key_file", "retain 24h\n key_file "+file+"\n #", 1)
	g := launch(t, setup{app: app, site: "agent_proxy " + upstream.addr + " {\n identity spiffe://example.com/billing\n }"})
	if got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{path: "/pay"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	lines := upstream.last("/pay").Header.Values(ect.FieldName)
	r := request{path: "/nested", header: map[string]string{ect.FieldName: lines[len(lines)-1]}}
	if got := g.call(r); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
}
