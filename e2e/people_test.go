package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// escalationDoc is what operators see of an escalation.
type escalationDoc struct {
	ID, Status, Cause, Requester string
	Level                        int
	LevelName                    string `json:"level_name"`
	RequiredRole                 string `json:"required_role"`
	Held                         bool
	Deadline                     time.Time
	Proposal                     struct {
		Kind, Text  string
		RequestHash string `json:"request_hash"`
	}
	Decisions []struct{ By, Decision, Reason string }
}

// escalation is the id that a refusal names.
func (r reply) escalation(t *testing.T) string {
	t.Helper()
	var doc struct {
		Escalation string `json:"escalation_id"`
	}
	if err := json.Unmarshal([]byte(r.body), &doc); err != nil || doc.Escalation == "" {
		t.Fatalf("%d %s names no escalation: %v", r.status, r.body, err)
	}
	return doc.Escalation
}

// decides decides as an operator, on what is shown.
func (s *procSite) decides(t *testing.T, verb, id string) escalationDoc {
	t.Helper()
	shown := procDocument[escalationDoc](t, s.operate(t, "escalations", "show", id, "-o", "json").says(t))
	args := []string{"escalations", verb, id, "--operator", "ann", "--reason", "seen", "-o", "json"}
	if hash := shown.Proposal.RequestHash; hash != "" {
		args = append(args, "--hash", hash)
	}
	return procDocument[escalationDoc](t, s.operate(t, args...).says(t))
}

// ATD "Interaction with HITL", level 2: a call waits for an approval, on disk and in no connection.
// It is not sent and takes no key before; afterwards it is, once.
func TestProcessApprovalBeforeTheCall(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = "action pay {\n match path /charges\n approve payments {\n within 1h\n }\n compensate POST /refunds {\n json charge {response.json./id}\n }\n }"
	gateway := site.start(t)
	s := site.gateway(t).saga(a)
	pay := charge(7)
	pay.id = "order-7"
	asked := s.try(pay)
	if asked.status != http.StatusConflict || asked.slug() != "approval-required" || asked.header.Get("Retry-After") != "30" {
		t.Fatalf("%d %v %s", asked.status, asked.header, asked.body)
	}
	id := asked.escalation(t)
	for _, when := range []string{"at once", "after a reload", "after a kill"} {
		if again := s.try(pay); again.slug() != "approval-required" || again.escalation(t) != id {
			t.Errorf("%s: %d %s", when, again.status, again.body)
		}
		shown := procDocument[escalationDoc](t, site.operate(t, "escalations", "show", id, "-o", "json").says(t))
		if shown.Status != "pending" || shown.RequiredRole != "payments" || shown.Proposal.Kind != "run-call" || !strings.HasPrefix(shown.Requester, "issuer:") ||
			!strings.Contains(shown.Proposal.Text, "POST ") || !strings.Contains(shown.Proposal.Text, `{"amount":7}`) || shown.Deadline.IsZero() {
			t.Errorf("%s: %+v", when, shown)
		}
		switch when {
		case "at once":
			site.global = "grace_period 10s" // another configuration
			gateway.reload(t)
			s.g.reloads = true
		case "after a reload":
			gateway.kill()
			gateway = site.start(t)
		}
	}
	other := charge(8)
	other.id = "order-7"
	if got := s.try(other); got.slug() != "approval-required" || got.escalation(t) == id {
		t.Errorf("another body: %d %s", got.status, got.body)
	}
	lab.wantEffects()
	site.operate(t, "escalations", "approve", id, "--operator", "ann").fails(t, "--hash")
	site.operate(t, "escalations", "approve", id, "--operator", "ann", "--hash", "sha-256:0").fails(t, "what is proposed now has")
	if got := site.decides(t, "approve", id); got.Status != "approved" || got.Decisions[0].By != "operator:ann" {
		t.Errorf("%+v", got)
	}
	site.operate(t, "escalations", "deny", id, "--operator", "bob", "--reason", "too late").fails(t, "decided already")
	gateway.kill() // between the decision and the call
	site.start(t)
	paid := s.try(pay)
	if paid.status != http.StatusCreated {
		t.Fatalf("approved: %d %s", paid.status, paid.body)
	}
	if again := s.try(pay); again.status != http.StatusCreated || again.body != paid.body || again.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("again: %d %v %s", again.status, again.header, again.body)
	}
	if got := s.try(other); got.slug() != "fingerprint-mismatch" {
		t.Errorf("the other body, now: %d %s", got.status, got.body)
	}
	lab.arrived("POST /charges", 1)

	denied := charge(9)
	denied.id = "order-9"
	site.decides(t, "deny", s.try(denied).escalation(t))
	if got := s.try(denied); got.status != http.StatusForbidden || got.slug() != "approval-denied" || got.header.Get("Retry-After") != "" {
		t.Errorf("denied: %d %s", got.status, got.body)
	}
	lab.arrived("POST /charges", 1)
}

// Nobody decides in time: that is a denial, by the store's clock.
func TestProcessApprovalExpires(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := newRestLab(t)
	site := procNewSite(t, lab.addr)
	site.guard = "approve {\n within 1s\n }"
	site.start(t)
	g := site.gateway(t)
	pay := request{path: "/charges", id: "a", body: `{"amount":1}`}
	id := g.call(pay).escalation(t)
	eventuallyWithin(t, procBound, "the end of the time to decide", func() bool { return g.call(pay).slug() == "approval-denied" })
	if got := procDocument[escalationDoc](t, site.operate(t, "escalations", "show", id, "-o", "json").says(t)); got.Status != "expired" || len(got.Decisions) != 0 {
		t.Errorf("%+v", got)
	}
	lab.wantEffects()
}

// One action of a guard may go without, and what waits does not hold other calls.
func TestApprovalIsOfAnAction(t *testing.T) {
	_, g := launchLab(t, "approve ops\n action notes {\n match path /docs/*\n approve off\n }")
	if got := g.call(put("/docs/x", `{"n":1}`)); got.status >= 300 {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := g.call(charge(1)); got.slug() != "approval-required" {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// A caller cannot flood people with questions.
func TestQuestionsAreBounded(t *testing.T) {
	_, g := launchLab(t, "approve")
	for i := range 101 {
		got := g.call(request{path: "/charges", id: fmt.Sprint(i), body: `{"amount":1}`, header: headers{"Authorization": "Bearer one"}})
		want := "approval-required"
		if i == 100 {
			want = "quota-exceeded"
		}
		if got.slug() != want {
			t.Fatalf("%d: %d %s", i, got.status, got.body)
		}
	}
	if got := g.call(request{path: "/charges", id: "other", body: `{"amount":1}`, header: headers{"Authorization": "Bearer two"}}); got.slug() != "approval-required" {
		t.Errorf("another caller: %d %s", got.status, got.body)
	}
}

// ATD "Interaction with HITL": a failed rollback stops its workflow, a partial one pauses it, over a
// kill, a denial and a reload, until a person resumes it; other workflows go on.
func TestProcessWorkflowsWaitForPeople(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, want := range map[string]struct {
		level, slug string
		status      int
	}{"failed": {"stop", "workflow-stopped", http.StatusForbidden}, "partial": {"pause", "workflow-paused", http.StatusConflict}} {
		lab, a := newRestLab(t), newAgent(t, "a")
		site := procNewSite(t, lab.addr)
		site.app = trusting(t, a)
		site.guard = sagaActions
		gateway := site.start(t)
		s, other := site.gateway(t).saga(a), site.gateway(t).saga(a)
		lab.write("/docs/x", `{"n":1}`)
		body := rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Reason: "a test"}
		if name == "partial" {
			first := s.do(put("/docs/x", `{"n":2}`))
			s.do(charge(7), first.checkpoint)
			body.Checkpoint, body.Cascade = first.checkpoint, true
		} else {
			body.Checkpoint = s.do(charge(7)).checkpoint
		}
		lab.on("POST /refunds", -1, restSays(200, `{"status":"failed"}`))
		s.back(body).want(t, name, "refused")
		refused := s.try(charge(8))
		if refused.status != want.status || refused.slug() != want.slug || (refused.header.Get("Retry-After") == "30") != (want.slug == "workflow-paused") {
			t.Fatalf("%s: %d %v %s", name, refused.status, refused.header, refused.body)
		}
		id := refused.escalation(t)
		other.do(charge(9))
		if got := site.decides(t, "deny", id); got.LevelName != want.level || got.Status != "denied" || !got.Held || got.Proposal.Kind != "resume" {
			t.Errorf("%s: %+v", name, got)
		}
		gateway.kill()
		site.start(t)
		if got := s.try(charge(8)); got.slug() != want.slug || got.escalation(t) != id {
			t.Errorf("%s: denied, and after a kill: %d %s", name, got.status, got.body)
		}
		site.operate(t, "escalations", "approve", id, "--operator", "ann").fails(t, "decided already")
		site.operate(t, "escalations", "ask", id, "--operator", "bob").says(t)
		site.operate(t, "escalations", "approve", id, "--operator", "bob").fails(t, "who asked cannot approve")
		site.decides(t, "approve", id)
		s.do(charge(8))
	}
}
