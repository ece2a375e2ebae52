//go:build unix

package e2e

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Section "CLI": an operator looks at what a rollback would do, and does it; both go the
// way that agents' rollbacks go, and the operator is recorded.
func TestProcessOperatorRollsBack(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := newRestLab(t)
	site := procNewSite(t, lab.addr)
	site.app = "identity " + gatewayIdentity
	site.guard = sagaActions
	site.start(t)
	g := site.gateway(t)
	call := func(r request) reply {
		t.Helper()
		r.header = headers{"Authorization": "Bearer " + procCredential, "Workflow-Id": "w-" + t.Name()}
		got := g.call(r)
		if got.status >= 300 || got.header.Get("Execution-Checkpoint") == "" {
			t.Fatalf("%d %v %s", got.status, got.header, got.body)
		}
		return got
	}
	charged := call(charge(7))
	id := sagaStep{"", charged}.id(t)
	mailed := call(request{path: "/mail"})
	checkpoint, mail := charged.header.Get("Execution-Checkpoint"), mailed.header.Get("Execution-Checkpoint")

	plan := site.operate(t, "rollback", checkpoint, "--dry-run").says(t)
	if !strings.Contains(plan, checkpoint) || !strings.Contains(plan, "undo") {
		t.Errorf("the plan is\n%s", plan)
	}
	irreversible := site.operate(t, "rollback", mail, "--dry-run", "--reason", "a look").says(t)
	if !strings.Contains(irreversible, "escalate") {
		t.Errorf("the plan is\n%s", irreversible)
	}
	// The checkpoint says that it can be undone; what came of the call says otherwise.
	lab.on("POST /charges", 1, restSays(http.StatusOK, `{}`))
	nameless := call(charge(8)).header.Get("Execution-Checkpoint")
	vain := site.operate(t, "rollback", nameless, "--dry-run").says(t)
	if !strings.Contains(vain, "escalate") {
		t.Errorf("the plan is\n%s", vain)
	}
	lab.arrived("POST /refunds", 0)

	done := procDocument[struct {
		rollbackDoc
		Operator     string
		Workflow     string
		WorkflowName string `json:"workflow_name"`
		Steps        []struct{ Way string }
	}](t, site.operate(t, "rollback", checkpoint, "--reason", "ordered twice", "-o", "json").says(t))
	done.want(t, "completed")
	if done.Operator != "ada" || strings.Contains(done.ID, "(") {
		t.Errorf("%+v", done)
	}
	if name := "w-" + t.Name(); done.WorkflowName != name || done.Workflow == name || len(done.Steps) != 1 || done.Steps[0].Way != "compensate POST /refunds" {
		t.Errorf("%+v", done)
	}
	// Tokens know the workflow by its UUID only, executions by its name.
	for _, workflow := range []string{done.Workflow, done.WorkflowName} {
		if got := site.operate(t, "executions", "list", "--workflow", workflow).says(t); !strings.Contains(got, "/mail") || !strings.Contains(got, "(undo)") {
			t.Errorf("%s:\n%s", workflow, got)
		}
	}
	lab.wantCharge(id, "refunded")

	site.operate(t, "rollback", uuid.NewString(), "--reason", "no such thing").fails(t, "checkpoint")
	// What cannot be undone is no success (P6).
	if got := site.operate(t, "rollback", mail, "--reason", "sent in error", "-o", "json"); got.code == 0 || !strings.Contains(got.out+got.err, "escalated") {
		t.Errorf("exit code %d: %s%s", got.code, got.out, got.err)
	}
	lab.arrived("POST /refunds", 1)
}

// An operator is told what depends on what would be undone, and says that it stays.
func TestProcessOperatorKeepsDependants(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := newRestLab(t)
	site := procNewSite(t, lab.addr)
	site.app = "identity " + gatewayIdentity
	site.guard = sagaActions
	site.start(t)
	g := site.gateway(t)
	call := func(r request, parent string) reply {
		t.Helper()
		r.header = headers{"Authorization": "Bearer " + procCredential, "Workflow-Id": "w-" + t.Name(), "Execution-Parent": parent}
		got := g.call(r)
		if got.status >= 300 || got.header.Get("Execution-Checkpoint") == "" {
			t.Fatalf("%d %v %s", got.status, got.header, got.body)
		}
		return got
	}
	first := call(charge(1), "")
	call(charge(2), first.header.Get("Execution-Id"))
	checkpoint := first.header.Get("Execution-Checkpoint")
	site.operate(t, "rollback", checkpoint, "--dry-run").fails(t, "depend")
	site.operate(t, "rollback", checkpoint, "--reason", "ordered twice").fails(t, "depend", "cascade", "keep_dependants")
	lab.arrived("POST /refunds", 0)
	site.operate(t, "rollback", checkpoint, "--keep-dependants", "--dry-run").says(t)
	if got := site.operate(t, "rollback", checkpoint, "--reason", "ordered twice", "--keep-dependants").says(t); !strings.Contains(got, "depend") {
		t.Errorf("%s", got)
	}
	lab.wantEffects("charged ch_1", "charged ch_2", "refunded ch_1")
}

// A rollback that hangs says why, and how often it was tried.
func TestProcessOperatorSeesARollbackHang(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := newRestLab(t)
	site := procNewSite(t, lab.addr)
	site.app = "identity " + gatewayIdentity
	site.guard = sagaActions
	site.start(t)
	r := charge(7)
	r.header = headers{"Authorization": "Bearer " + procCredential}
	checkpoint := site.gateway(t).call(r).header.Get("Execution-Checkpoint")
	lab.on("POST /refunds", 1_000, restSays(http.StatusServiceUnavailable, `{}`))
	id := uuid.NewString()
	site.operate(t, "rollback", checkpoint, "--reason", "ordered twice", "--no-wait", "--id", id).says(t)
	eventuallyWithin(t, procBound, "a second attempt", func() bool {
		doc := procDocument[struct {
			Steps []struct {
				State     string
				Attempts  int
				LastCause string `json:"last_cause"`
			}
		}](t, site.operate(t, "rollbacks", id, "-o", "json").says(t))
		if len(doc.Steps) != 1 || doc.Steps[0].Attempts < 2 {
			return false
		}
		if step := doc.Steps[0]; step.State != "running" || !strings.Contains(step.LastCause, "503") {
			t.Errorf("%+v", step)
		}
		return true
	})
	if shown := site.operate(t, "rollbacks", id).says(t); !strings.Contains(shown, "running") || !strings.Contains(shown, "answered with 503") {
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
	secrets := []string{secretOld, secretNew, secretAnswer, procCredential}
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = "undo_auth recorded" + sagaActions
	gateway := site.start(t)
	s := site.gateway(t).saga(a)
	lab.write("/docs/x", `{"is":"`+secretOld+`"}`)
	credential := headers{"Authorization": "Bearer " + procCredential}
	root := s.do(request{method: "PUT", path: "/docs/x", body: `{"is":"` + secretNew + `"}`, header: credential})
	credential = headers{"Authorization": "Bearer " + procCredential}
	charged := s.do(request{path: "/charges", body: `{"amount":1,"note":"` + secretNew + `"}`, header: credential}, root.checkpoint)
	lab.on("POST /refunds", 1, restDoes(200, `{"note":"`+secretAnswer+`"}`, "X-Note", secretAnswer))
	check := func(when string) {
		t.Helper()
		procSearch(t, when, site.dir, secrets)
		procFind(t, when+": the log", []byte(gateway.log.String()), secrets)
	}
	check("before")
	got := s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true, Reason: "a test"})
	s.finished(rollbackID(1)).want(t, "completed")
	lab.wantCharge(charged.id(t), "refunded")
	for _, asked := range []string{"POST /refunds", "PUT /docs/x"} {
		all := lab.all(asked, "")
		if last := all[len(all)-1]; last.header.Get("Authorization") != credential["Authorization"] {
			t.Errorf("%s was asked for without the recorded credential", asked)
		}
	}
	procFind(t, "the answer", []byte(got.body), secrets)
	procFind(t, "the rollback", []byte(s.look(rollbackID(1)).body), secrets)
	procFind(t, "the checkpoint", []byte(s.checkpoint(root.checkpoint).body), secrets)
	procFind(t, "the metrics", []byte(gateway.metricsText(t)), secrets)
	site.exported(t, func(token *ect.Unverified) {
		procFind(t, "the token "+token.Action(), []byte(token.Payload()), secrets)
	})
	check("after")
	gateway.end(t)
	check("ended")
}

// A reload while a rollback is under way: it goes on, by the new configuration, and sends
// nothing twice.
func TestProcessReloadsInARollback(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = sagaActions
	gateway := site.start(t)
	s := site.gateway(t).saga(a)
	lab.write("/docs/x", `{"n":1}`)
	root := s.do(put("/docs/x", `{"n":2}`))
	next := s.do(charge(1), root.checkpoint)
	hold := newGate(t)
	lab.on("POST /refunds", 1, restWaits(hold))
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
	wait(t, hold.arrived, "the refund")
	site.global = "grace_period 10s" // another configuration
	gateway.reload(t)
	s.g.reloads = true
	hold.open()
	s.finished(rollbackID(1)).want(t, "completed")
	lab.wantCharge(next.id(t), "refunded")
	lab.wantDoc("/docs/x", `{"n":1}`)
	lab.arrived("POST /refunds", 1)
}

// Cascade 4.2.1: what only a person can undo waits for one, on disk: operators see it, also
// after a kill, with its level and its cause.
func TestProcessEscalationIsRecorded(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = sagaActions
	gateway := site.start(t)
	s := site.gateway(t).saga(a)
	mail := s.do(request{path: "/mail"})
	doc := s.back(rollbackBody{Checkpoint: mail.checkpoint, Reason: "wrong address"})
	doc.want(t, "escalated", "irreversible")
	if len(doc.Escalations) != 1 {
		t.Fatalf("%+v", doc)
	}
	for _, when := range []string{"at once", "after a kill"} {
		if list := site.operate(t, "escalations", "list", "-o", "json").says(t); !strings.Contains(list, doc.Escalations[0]) || !strings.Contains(list, s.wid) {
			t.Errorf("%s: %s is not among\n%s", when, doc.Escalations[0], list)
		}
		gateway.kill()
		gateway = site.start(t)
	}
	lab.wantEffects("asked /mail")
}

// P6: a call that is being undone does not run again meanwhile, also where it belongs to no
// workflow: what it does would stand, and the rollback call it undone.
func TestProcessRetryDuringTheUndo(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, attempts := range []int{1, 2} {
		lab := newRestLab(t)
		site := procNewSite(t, lab.addr)
		site.app = "identity " + gatewayIdentity
		site.guard = "action charge {\n match path /charges\n on_unknown retry\n compensate POST /refunds {\n json charge {request.json./id}\n }\n }"
		site.start(t)
		g := site.gateway(t)
		calling := func(id string) request {
			body := fmt.Sprintf(`{"id":%q,"amount":7}`, id)
			return request{path: "/charges", id: id, body: body, header: headers{"Authorization": "Bearer " + procCredential}}
		}
		lab.on("POST /charges", 1, restDoes(http.StatusGatewayTimeout, ""))
		if attempts > 1 { // which it knows by then
			lab.on("POST /charges", attempts-1, restSays(http.StatusGatewayTimeout, ""))
		}
		first := ""
		for range attempts {
			first = cmp.Or(first, g.call(calling("ch_1")).header.Get("Execution-Checkpoint"))
		}
		hold, id := newGate(t), uuid.NewString()
		lab.on("POST /refunds", 1, restWaits(hold))
		site.operate(t, "rollback", first, "--reason", "ordered twice", "--no-wait", "--id", id).says(t)
		<-hold.arrived
		if got := g.call(calling("ch_1")); got.slug() != "workflow-paused" {
			t.Errorf("after %d attempts, during the undo: %d %s", attempts, got.status, got.body)
		}
		// Another call of no workflow is none of its business.
		if got := g.call(calling("ch_2")); got.status != http.StatusCreated {
			t.Errorf("another call: %d %s", got.status, got.body)
		}
		hold.open()
		eventuallyWithin(t, procBound, "the end of the rollback", func() bool {
			return procDocument[rollbackDoc](t, site.operate(t, "rollbacks", id, "-o", "json").says(t)).Status == "completed"
		})
		if got := g.call(calling("ch_1")); got.slug() != "rolled-back" {
			t.Errorf("after %d attempts, when it is undone: %d %s", attempts, got.status, got.body)
		}
		lab.wantCharge("ch_1", "refunded")
		lab.wantCharge("ch_2", "open")
		lab.arrived("POST /charges", attempts+1)
	}
}
