//go:build unix

package rollback

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Section "CLI": an operator looks at what a rollback would do, and does it; both go the
// way that agents' rollbacks go, and the operator is recorded.
func TestProcessOperatorRollsBack(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := harness.NewRestLab(t)
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = "identity " + harness.GatewayIdentity
	site.Guard = harness.SagaActions
	site.Start(t)
	g := site.Gateway(t)
	call := func(r harness.Request) harness.Reply {
		t.Helper()
		r.Header = harness.Headers{"Authorization": "Bearer " + harness.ProcCredential, "Workflow-Id": "w-" + t.Name()}
		got := g.Call(r)
		if got.Status >= 300 || got.Header.Get("Execution-Checkpoint") == "" {
			t.Fatalf("%d %v %s", got.Status, got.Header, got.Body)
		}
		return got
	}
	charged := call(harness.Charge(7))
	id := harness.SagaStep{Checkpoint: "", Reply: charged}.Id(t)
	mailed := call(harness.Request{Path: "/mail"})
	checkpoint, mail := charged.Header.Get("Execution-Checkpoint"), mailed.Header.Get("Execution-Checkpoint")

	plan := site.Operate(t, "rollback", checkpoint, "--dry-run").Says(t)
	if !strings.Contains(plan, checkpoint) || !strings.Contains(plan, "undo") {
		t.Errorf("the plan is\n%s", plan)
	}
	irreversible := site.Operate(t, "rollback", mail, "--dry-run", "--reason", "a look").Says(t)
	if !strings.Contains(irreversible, "escalate") {
		t.Errorf("the plan is\n%s", irreversible)
	}
	// The checkpoint says that it can be undone; what came of the call says otherwise.
	lab.On("POST /charges", 1, harness.RestSays(http.StatusOK, `{}`))
	nameless := call(harness.Charge(8)).Header.Get("Execution-Checkpoint")
	vain := site.Operate(t, "rollback", nameless, "--dry-run").Says(t)
	if !strings.Contains(vain, "escalate") {
		t.Errorf("the plan is\n%s", vain)
	}
	lab.Arrived("POST /refunds", 0)

	done := harness.ProcDocument[struct {
		harness.RollbackDoc
		Operator     string
		Workflow     string
		WorkflowName string `json:"workflow_name"`
		Steps        []struct{ Way string }
	}](t, site.Operate(t, "rollback", checkpoint, "--reason", "ordered twice", "-o", "json").Says(t))
	done.Want(t, "completed")
	if done.Operator != "ada" || strings.Contains(done.ID, "(") {
		t.Errorf("%+v", done)
	}
	if name := "w-" + t.Name(); done.WorkflowName != name || done.Workflow == name || len(done.Steps) != 1 || done.Steps[0].Way != "compensate POST /refunds" {
		t.Errorf("%+v", done)
	}
	// Tokens know the workflow by its UUID only, executions by its name.
	for _, workflow := range []string{done.Workflow, done.WorkflowName} {
		if got := site.Operate(t, "executions", "list", "--workflow", workflow).Says(t); !strings.Contains(got, "/mail") || !strings.Contains(got, "(undo)") {
			t.Errorf("%s:\n%s", workflow, got)
		}
	}
	lab.WantCharge(id, "refunded")

	site.Operate(t, "rollback", uuid.NewString(), "--reason", "no such thing").Fails(t, "checkpoint")
	// What cannot be undone is no success (P6).
	if got := site.Operate(t, "rollback", mail, "--reason", "sent in error", "-o", "json"); got.Code == 0 || !strings.Contains(got.Out+got.Err, "escalated") {
		t.Errorf("exit code %d: %s%s", got.Code, got.Out, got.Err)
	}
	lab.Arrived("POST /refunds", 1)
}

// An operator is told what depends on what would be undone, and says that it stays.
func TestProcessOperatorKeepsDependants(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := harness.NewRestLab(t)
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = "identity " + harness.GatewayIdentity
	site.Guard = harness.SagaActions
	site.Start(t)
	g := site.Gateway(t)
	call := func(r harness.Request, parent string) harness.Reply {
		t.Helper()
		r.Header = harness.Headers{"Authorization": "Bearer " + harness.ProcCredential, "Workflow-Id": "w-" + t.Name(), "Execution-Parent": parent}
		got := g.Call(r)
		if got.Status >= 300 || got.Header.Get("Execution-Checkpoint") == "" {
			t.Fatalf("%d %v %s", got.Status, got.Header, got.Body)
		}
		return got
	}
	first := call(harness.Charge(1), "")
	call(harness.Charge(2), first.Header.Get("Execution-Id"))
	checkpoint := first.Header.Get("Execution-Checkpoint")
	site.Operate(t, "rollback", checkpoint, "--dry-run").Fails(t, "depend")
	site.Operate(t, "rollback", checkpoint, "--reason", "ordered twice").Fails(t, "depend", "cascade", "keep_dependants")
	lab.Arrived("POST /refunds", 0)
	site.Operate(t, "rollback", checkpoint, "--keep-dependants", "--dry-run").Says(t)
	if got := site.Operate(t, "rollback", checkpoint, "--reason", "ordered twice", "--keep-dependants").Says(t); !strings.Contains(got, "depend") {
		t.Errorf("%s", got)
	}
	lab.WantEffects("charged ch_1", "charged ch_2", "refunded ch_1")
}

// A rollback that hangs says why, and how often it was tried.
func TestProcessOperatorSeesARollbackHang(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := harness.NewRestLab(t)
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = "identity " + harness.GatewayIdentity
	site.Guard = harness.SagaActions
	site.Start(t)
	r := harness.Charge(7)
	r.Header = harness.Headers{"Authorization": "Bearer " + harness.ProcCredential}
	checkpoint := site.Gateway(t).Call(r).Header.Get("Execution-Checkpoint")
	lab.On("POST /refunds", 1_000, harness.RestSays(http.StatusServiceUnavailable, `{}`))
	id := uuid.NewString()
	site.Operate(t, "rollback", checkpoint, "--reason", "ordered twice", "--no-wait", "--id", id).Says(t)
	harness.EventuallyWithin(t, harness.ProcBound, "a second attempt", func() bool {
		doc := harness.ProcDocument[struct {
			Steps []struct {
				State     string
				Attempts  int
				LastCause string `json:"last_cause"`
			}
		}](t, site.Operate(t, "rollbacks", id, "-o", "json").Says(t))
		if len(doc.Steps) != 1 || doc.Steps[0].Attempts < 2 {
			return false
		}
		if step := doc.Steps[0]; step.State != "running" || !strings.Contains(step.LastCause, "503") {
			t.Errorf("%+v", step)
		}
		return true
	})
	if shown := site.Operate(t, "rollbacks", id).Says(t); !strings.Contains(shown, "running") || !strings.Contains(shown, "answered with 503") {
		t.Errorf("%s", shown)
	}
}

// P8: neither what stood there, nor the credentials that an undo uses, nor what an
// upstream answers to it, are in a file, a log, a metric, a token or an answer.
func TestProcessSecretsOfRollbacks(t *testing.T) {
	t.Parallel() // its gateways are processes
	const (
		secretOld    = "secret-state-before-20c4"
		secretNew    = "secret-state-after-8e11"
		secretAnswer = "secret-answer-to-an-undo-55d0"
	)
	secrets := []string{secretOld, secretNew, secretAnswer, harness.ProcCredential}
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = "undo_auth recorded" + harness.SagaActions
	gateway := site.Start(t)
	s := site.Gateway(t).Saga(a)
	lab.Write("/docs/x", `{"is":"`+secretOld+`"}`)
	credential := harness.Headers{"Authorization": "Bearer " + harness.ProcCredential}
	root := s.Do(harness.Request{Method: "PUT", Path: "/docs/x", Body: `{"is":"` + secretNew + `"}`, Header: credential})
	credential = harness.Headers{"Authorization": "Bearer " + harness.ProcCredential}
	charged := s.Do(harness.Request{Path: "/charges", Body: `{"amount":1,"note":"` + secretNew + `"}`, Header: credential}, root.Checkpoint)
	lab.On("POST /refunds", 1, harness.RestDoes(200, `{"note":"`+secretAnswer+`"}`, "X-Note", secretAnswer))
	check := func(when string) {
		t.Helper()
		harness.ProcSearch(t, when, site.Dir, secrets)
		harness.ProcFind(t, when+": the log", []byte(gateway.Log.String()), secrets)
	}
	check("before")
	got := s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true, Reason: "a test"})
	s.Finished(harness.RollbackID(1)).Want(t, "completed")
	lab.WantCharge(charged.Id(t), "refunded")
	for _, asked := range []string{"POST /refunds", "PUT /docs/x"} {
		all := lab.All(asked, "")
		if last := all[len(all)-1]; last.Header.Get("Authorization") != credential["Authorization"] {
			t.Errorf("%s was asked for without the recorded credential", asked)
		}
	}
	harness.ProcFind(t, "the answer", []byte(got.Body), secrets)
	harness.ProcFind(t, "the rollback", []byte(s.Look(harness.RollbackID(1)).Body), secrets)
	harness.ProcFind(t, "the checkpoint", []byte(s.Checkpoint(root.Checkpoint).Body), secrets)
	harness.ProcFind(t, "the metrics", []byte(gateway.MetricsText(t)), secrets)
	site.Exported(t, func(token *ect.Unverified) {
		harness.ProcFind(t, "the token "+token.Action(), []byte(token.Payload()), secrets)
	})
	check("after")
	gateway.End(t)
	check("ended")
}

// A reload while a rollback is under way: it goes on, by the new configuration, and sends
// nothing twice.
func TestProcessReloadsInARollback(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = harness.SagaActions
	gateway := site.Start(t)
	s := site.Gateway(t).Saga(a)
	lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	next := s.Do(harness.Charge(1), root.Checkpoint)
	hold := harness.NewGate(t)
	lab.On("POST /refunds", 1, harness.RestWaits(hold))
	s.Begun(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true})
	harness.Wait(t, hold.Arrived, "the refund")
	site.Global = "grace_period 10s" // another configuration
	gateway.Reload(t)
	s.G.Reloads = true
	hold.Open()
	s.Finished(harness.RollbackID(1)).Want(t, "completed")
	lab.WantCharge(next.Id(t), "refunded")
	lab.WantDoc("/docs/x", `{"n":1}`)
	lab.Arrived("POST /refunds", 1)
}

// Cascade 4.2.1: what only a person can undo waits for one, on disk: operators see it, also
// after a kill, with its level and its cause.
func TestProcessEscalationIsRecorded(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = harness.SagaActions
	gateway := site.Start(t)
	s := site.Gateway(t).Saga(a)
	mail := s.Do(harness.Request{Path: "/mail"})
	doc := s.Back(harness.RollbackBody{Checkpoint: mail.Checkpoint, Reason: "wrong address"})
	doc.Want(t, "escalated", "irreversible")
	if len(doc.Escalations) != 1 {
		t.Fatalf("%+v", doc)
	}
	for _, when := range []string{"at once", "after a kill"} {
		if list := site.Operate(t, "escalations", "list", "-o", "json").Says(t); !strings.Contains(list, doc.Escalations[0]) || !strings.Contains(list, s.Wid) {
			t.Errorf("%s: %s is not among\n%s", when, doc.Escalations[0], list)
		}
		gateway.Kill()
		gateway = site.Start(t)
	}
	lab.WantEffects("asked /mail")
}

// P6: a call that is being undone does not run again meanwhile, also where it belongs to no
// workflow: what it does would stand, and the rollback call it undone.
func TestProcessRetryDuringTheUndo(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, attempts := range []int{1, 2} {
		lab := harness.NewRestLab(t)
		site := harness.ProcNewSite(t, lab.Addr)
		site.App = "identity " + harness.GatewayIdentity
		site.Guard = "action charge {\n match path /charges\n on_unknown retry\n compensate POST /refunds {\n json charge {request.json./id}\n }\n }"
		site.Start(t)
		g := site.Gateway(t)
		calling := func(id string) harness.Request {
			body := fmt.Sprintf(`{"id":%q,"amount":7}`, id)
			return harness.Request{Path: "/charges", Id: id, Body: body, Header: harness.Headers{"Authorization": "Bearer " + harness.ProcCredential}}
		}
		lab.On("POST /charges", 1, harness.RestDoes(http.StatusGatewayTimeout, ""))
		if attempts > 1 { // which it knows by then
			lab.On("POST /charges", attempts-1, harness.RestSays(http.StatusGatewayTimeout, ""))
		}
		first := ""
		for range attempts {
			first = cmp.Or(first, g.Call(calling("ch_1")).Header.Get("Execution-Checkpoint"))
		}
		hold, id := harness.NewGate(t), uuid.NewString()
		lab.On("POST /refunds", 1, harness.RestWaits(hold))
		site.Operate(t, "rollback", first, "--reason", "ordered twice", "--no-wait", "--id", id).Says(t)
		<-hold.Arrived
		if got := g.Call(calling("ch_1")); got.Slug() != "workflow-paused" {
			t.Errorf("after %d attempts, during the undo: %d %s", attempts, got.Status, got.Body)
		}
		// Another call of no workflow is none of its business.
		if got := g.Call(calling("ch_2")); got.Status != http.StatusCreated {
			t.Errorf("another call: %d %s", got.Status, got.Body)
		}
		hold.Open()
		harness.EventuallyWithin(t, harness.ProcBound, "the end of the rollback", func() bool {
			return harness.ProcDocument[harness.RollbackDoc](t, site.Operate(t, "rollbacks", id, "-o", "json").Says(t)).Status == "completed"
		})
		if got := g.Call(calling("ch_1")); got.Slug() != "rolled-back" {
			t.Errorf("after %d attempts, when it is undone: %d %s", attempts, got.Status, got.Body)
		}
		lab.WantCharge("ch_1", "refunded")
		lab.WantCharge("ch_2", "open")
		lab.Arrived("POST /charges", attempts+1)
	}
}
