//go:build unix

package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/crypto/bcrypt"

	"github.com/agent-guard/caddy-agent-guard/ect"
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
		PlanHash    string `json:"plan_hash"`
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
	if hash := shown.Proposal.RequestHash + shown.Proposal.PlanHash; hash != "" {
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
	site.operate(t, "escalations", "approve", id, "--operator", "ann").fails(t, "nothing was changed") // nobody answers the question
	site.operate(t, "escalations", "approve", id, "--operator", "ann", "--hash", "sha-256:0").fails(t, "not that of what is proposed now")
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

	// The trail: the call follows from the decision, and that from the escalation.
	var decision, opened *ect.Unverified
	follows := false
	site.exported(t, func(token *ect.Unverified) {
		switch {
		case token.Action() == "escalation" && !strings.Contains(token.Payload(), id):
		case token.Action() == "escalation":
			opened = token
		case token.Action() == "escalation_decision":
			decision = token
			if strings.Contains(token.Payload(), "ann") {
				t.Errorf("the token names who decided: %s", token.Payload())
			}
		case token.Action() == "checkpoint" && decision != nil:
			follows = follows || slices.Contains(token.Parents(), decision.ID())
		}
	})
	if opened == nil || decision == nil || !slices.Contains(decision.Parents(), opened.ID()) || decision.Workflow() != s.wid || !follows {
		t.Errorf("the trail: %v, %v, the call follows: %t", opened, decision, follows)
	}

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

// No proposal says more than its approval does: people who are asked about a rollback of the whole workflow that ends
// partial are not asked to resume what it has ended.
func TestProcessWholeWorkflowIsNotResumed(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = sagaActions
	site.start(t)
	s := site.gateway(t).saga(a)
	lab.write("/docs/x", `{"n":1}`)
	first := s.do(put("/docs/x", `{"n":2}`))
	s.do(charge(7), first.checkpoint)
	lab.on("POST /refunds", -1, restSays(200, `{"status":"failed"}`))
	s.back(rollbackBody{Checkpoint: first.checkpoint, Scope: "full_workflow", Reason: "a test"}).want(t, "partial", "refused")
	list := procDocument[struct{ Escalations []escalationDoc }](t, site.operate(t, "escalations", "list", "-o", "json").says(t)).Escalations
	at := slices.IndexFunc(list, func(e escalationDoc) bool { return e.Cause == "rollback_partial" })
	if at < 0 || list[at].Held || list[at].Proposal.Kind != "" {
		t.Fatalf("%+v", list)
	}
	if text := site.operate(t, "escalations", "show", list[at].ID).says(t); !strings.Contains(text, "An approval changes nothing") {
		t.Errorf("%s", text)
	}
	for _, e := range list {
		site.decides(t, "approve", e.ID)
	}
	s.try(charge(8)).problem(t, http.StatusForbidden, "workflow-stopped")
}

// P4: a workflow that people hold, or may hold, does not go on while the store cannot say so. Others
// do, and it waits for its person again once the store is back.
func TestP4HoldsThatCannotBeRead(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	held, other := g.saga(a), g.saga(a)
	charged := held.do(charge(7))
	lab.on("POST /refunds", -1, restSays(200, `{"status":"failed"}`))
	held.back(rollbackBody{Checkpoint: charged.checkpoint, Reason: "a test"}).want(t, "failed", "refused")
	id := held.try(charge(8)).escalation(t)
	record := []byte("he") // of an escalation
	g.store.onGet(func(key []byte) error {
		if bytes.HasPrefix(key, record) {
			return errBroken
		}
		return nil
	})
	for range 3 {
		held.try(charge(8)).retryable(t, http.StatusServiceUnavailable, "store-unavailable")
	}
	other.do(charge(9))
	g.store.onGet(nil)
	if got := held.try(charge(8)); got.slug() != "workflow-stopped" || got.escalation(t) != id {
		t.Errorf("once the store is back: %d %s", got.status, got.body)
	}
	lab.arrived("POST /charges", 2)
}

// P3, and who decides: by a role of the site's users or of trusted issuers, over the gateway's paths.
func TestWhoDecidesEscalations(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	lab, ops, other := newRestLab(t), newAgent(t, "ops"), newAgent(t, "a")
	users := ""
	for _, name := range []string{"ann", "bob", "eve", "ops"} {
		users += name + " " + string(hash) + "\n"
	}
	g := launch(t, setup{
		app: trusting(t, ops, other) + "\n hitl {\n role_issuers spiffe://example.com/agent/ops\n }",
		site: "basic_auth {\n " + users + " }\n agent_proxy " + lab.addr + " {\n operators user:ops\n role payments user:ann issuer:spiffe://example.com/agent/nobody\n role mail user:bob\n" +
			" action pay {\n match path /charges\n approve payments\n }\n }",
	})
	as := func(user string, r request) request {
		if r.header == nil {
			r.header = map[string]string{}
		}
		r.header["Authorization"] = "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":secret"))
		return r
	}
	const all = "/.well-known/cascade/escalations"
	get := func(user, path string) reply { return g.call(as(user, request{method: "GET", path: path})) }
	decision := func(id, body string) request {
		return request{path: all + "/" + id + "/decision", body: body, header: headers{"Content-Type": "application/json"}}
	}
	ask := func(n int) (id, hash string) {
		t.Helper()
		r := charge(n)
		r.id = fmt.Sprint("order-", n)
		got := g.call(as("eve", r))
		id = got.escalation(t)
		return id, document[escalationDoc](t, get("eve", all+"/"+id)).Proposal.RequestHash
	}
	id, of := ask(1)
	unknown := get("bob", all+"/"+uuid.NewString())
	unknown.terminal(t, http.StatusNotFound, "escalation-unknown")
	for _, user := range []string{"bob", "ops"} { // another role, also that of operators, sees as much as what is not there
		got := get(user, all+"/"+id)
		if got.status != unknown.status || got.slug() != unknown.slug() {
			t.Errorf("%s: %d %s", user, got.status, got.body)
		}
		if list := document[struct{ Escalations []escalationDoc }](t, get(user, all)); len(list.Escalations) != 0 {
			t.Errorf("%s sees %+v", user, list)
		}
		g.call(as(user, decision(id, `{"decision":"approve","request_hash":"`+of+`"}`))).terminal(t, http.StatusNotFound, "escalation-unknown")
	}
	for _, user := range []string{"eve", "ann"} {
		if list := document[struct{ Escalations []escalationDoc }](t, get(user, all+"?status=pending")); len(list.Escalations) != 1 || list.Escalations[0].ID != id {
			t.Errorf("%s sees %+v", user, list)
		}
	}
	approve := `{"decision":"approve","request_hash":"` + of + `","reason":"fine"}`
	g.call(as("eve", decision(id, approve))).terminal(t, http.StatusForbidden, "decision-refused")
	g.call(as("ann", decision(id, `{"decision":"approve","request_hash":"sha-256:0"}`))).terminal(t, http.StatusConflict, "decision-void")
	g.call(as("ann", decision(id, `{"decision":"deny","request_hash":"`+of+`"}`))).terminal(t, http.StatusBadRequest, "parameter-invalid")
	g.call(as("ann", decision(id, `{"decision":"approve","decision":"deny"}`))).terminal(t, http.StatusBadRequest, "parameter-invalid")
	for name, value := range map[string]string{"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"} {
		r := as("ann", decision(id, approve))
		r.header[name] = value
		if got := g.call(r); got.status != http.StatusForbidden && got.status != http.StatusBadRequest {
			t.Errorf("%s %s: %d %s", name, value, got.status, got.body)
		}
	}
	if got := document[escalationDoc](t, get("ann", all+"/"+id)); got.Status != "pending" {
		t.Fatalf("%+v", got)
	}
	if got := g.call(as("ann", decision(id, approve))); got.status != http.StatusOK || document[escalationDoc](t, got).Status != "approved" {
		t.Errorf("%d %s", got.status, got.body)
	}
	g.call(as("ann", decision(id, approve))).terminal(t, http.StatusConflict, "decision-void")
	if got := document[escalationDoc](t, get("eve", all+"/"+id)); got.Status != "approved" || len(got.Decisions) != 0 {
		t.Errorf("who asked learns who decided: %+v", got)
	}

	// Tokens: only of the issuers that are trusted with roles, bound to this very decision.
	id, of = ask(2)
	approve = `{"decision":"approve","escalation_id":"` + id + `","request_hash":"` + of + `"}`
	token := func(a *agent, body string, roles ...string) *ect.Token {
		return a.issue(ect.Claims{Action: "decide", Input: ect.Sum([]byte(body)), Ext: new(ect.ExtBuilder).Texts("roles", roles)})
	}
	by := func(token *ect.Token, body string) reply { return g.call(as("eve", with(token, decision(id, body)))) }
	by(token(other, approve, "payments"), approve).terminal(t, http.StatusNotFound, "escalation-unknown")
	by(token(ops, approve, "cooks"), approve).terminal(t, http.StatusNotFound, "escalation-unknown")
	by(token(ops, "another", "payments"), approve).refusedFor(t, http.StatusForbidden, "inp_hash")
	elsewhere := strings.Replace(approve, id, uuid.NewString(), 1)
	by(token(ops, elsewhere, "payments"), elsewhere).terminal(t, http.StatusBadRequest, "parameter-invalid")
	if got := by(token(ops, approve, "payments"), approve); got.status != http.StatusOK || document[escalationDoc](t, got).Decisions[0].By != "issuer:spiffe://example.com/agent/ops" {
		t.Errorf("%d %s", got.status, got.body)
	}
	lab.wantEffects()
}

// The page of a message's link: for who has the link, a name and the role; nothing is decided by a
// GET, from another site, or on what has changed meanwhile.
func TestPageOfAnEscalation(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	links := make(chan string, 8)
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var m struct{ Data struct{ Page string } }
		_ = json.NewDecoder(r.Body).Decode(&m) // the test reads what came
		links <- m.Data.Page
	}))
	t.Cleanup(hook.Close)
	lab := newRestLab(t)
	g := launch(t, setup{
		app: "hitl {\n webhook " + hook.URL + " {\n secret whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n }\n page https://ops.example.com/\n }",
		site: "basic_auth {\n ann " + string(hash) + "\n bob " + string(hash) + "\n eve " + string(hash) + "\n }\n agent_proxy " + lab.addr +
			" {\n approve\n operators user:ann user:bob\n }",
	})
	send := func(user, method, path, body string, header ...string) reply {
		r := request{method: method, path: path, body: body, header: map[string]string{
			"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":secret")),
		}}
		if body != "" {
			r.header["Content-Type"] = "application/x-www-form-urlencoded"
		}
		for i := 0; i < len(header); i += 2 {
			r.header[header[i]] = header[i+1]
		}
		return g.call(r)
	}
	pay := func() reply {
		return send("eve", "POST", "/charges", `{"amount":7,"note":"<script>7</script>"}`, "Content-Type", "application/json", "Idempotency-Key", "order-7")
	}
	id := pay().escalation(t)
	page, ok := strings.CutPrefix(wait(t, links, "the message"), "https://ops.example.com")
	if !ok || !strings.HasPrefix(page, "/.well-known/cascade/escalations/"+id+"/page?key=") {
		t.Fatalf("the link is %q", page)
	}
	seen := send("ann", "GET", page, "")
	if seen.status != http.StatusOK || !strings.Contains(seen.body, "&lt;script&gt;7&lt;/script&gt;") || strings.Contains(seen.body, "<script") ||
		!strings.Contains(seen.header.Get("Content-Security-Policy"), "default-src 'none'") || seen.header.Get("Cache-Control") != "no-store" ||
		seen.header.Get("Referrer-Policy") != "no-referrer" {
		t.Fatalf("%d %v %s", seen.status, seen.header, seen.body)
	}
	send("eve", "GET", page, "").terminal(t, http.StatusNotFound, "escalation-unknown")
	send("ann", "GET", strings.TrimRight(page, "=")+"x", "").terminal(t, http.StatusNotFound, "escalation-unknown")
	_, token, _ := strings.Cut(seen.body, `name="token" value="`)
	token, _, _ = strings.Cut(token, `"`)
	form := strings.Replace(page, "/page?", "/form?", 1)
	body := func(token string) string {
		return url.Values{"decision": {"approve"}, "reason": {"fine"}, "token": {token}}.Encode()
	}
	for _, c := range [][]string{
		{"ann", body("")}, {"bob", body(token)}, // without a form's token, or with that of another person
		{"ann", body(token), "Origin", "https://evil.example"}, {"ann", body(token), "Sec-Fetch-Site", "cross-site"},
	} {
		if got := send(c[0], "POST", form, c[1], c[2:]...); got.status == http.StatusOK && !strings.Contains(got.body, "Nothing was decided") {
			t.Errorf("%q: %d %s", c, got.status, got.body)
		}
		if got := pay(); got.slug() != "approval-required" {
			t.Fatalf("%q has decided: %d %s", c, got.status, got.body)
		}
	}
	send("ann", "GET", form, "")
	if got := send("ann", "POST", form, body(token), "Sec-Fetch-Site", "same-origin"); got.status != http.StatusOK || !strings.Contains(got.body, "It is recorded.") ||
		!strings.Contains(got.body, "user:ann, approve. fine") {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := send("ann", "POST", form, body(token)); !strings.Contains(got.body, "Nothing was decided") {
		t.Errorf("again: %d %s", got.status, got.body)
	}
	if got := pay(); got.status != http.StatusCreated {
		t.Errorf("approved: %d %s", got.status, got.body)
	}
}

// ATD "HITL Escalation on Error", and "Interaction with HITL", case 1: a critical error that an agent
// reports is escalated, and any of a call that cannot be undone; once for a call, linked to the error.
func TestProcessErrorsAreEscalated(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = sagaActions
	site.start(t)
	g := site.gateway(t)
	s := g.saga(a)
	charged, mail := s.do(charge(7)), s.do(request{path: "/mail"})
	report := func(severity, checkpoint string) string {
		t.Helper()
		token := a.issue(ect.Claims{
			Workflow: s.wid, Action: "error", Parents: []string{checkpoint},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed").
				Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberDescription, "wrong amount"),
		})
		got := g.call(request{path: "/.well-known/cascade/errors", reader: nothing{}, header: map[string]string{ect.FieldName: token.Raw()}})
		if got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return token.ID()
	}
	report("warning", charged.checkpoint)
	critical := report("critical", charged.checkpoint)
	report("critical", charged.checkpoint) // the same call
	irreversible := report("warning", mail.checkpoint)
	list := procDocument[struct {
		Escalations []struct {
			Cause, Workflow, Token string
			Level                  int
			Links                  struct{ Error, Checkpoint string }
		}
	}](t, site.operate(t, "escalations", "list", "-o", "json").says(t)).Escalations
	if len(list) != 2 {
		t.Fatalf("%+v", list)
	}
	for i, want := range []struct{ cause, err, checkpoint string }{
		{"irreversible_rollback", irreversible, mail.checkpoint}, {"critical_error", critical, charged.checkpoint},
	} {
		if got := list[i]; got.Cause != want.cause || got.Level != 2 || got.Workflow != s.wid || got.Links.Error != want.err || got.Links.Checkpoint != want.checkpoint {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	linked := 0
	site.exported(t, func(token *ect.Unverified) {
		if token.Action() == "escalation" && (slices.Contains(token.Parents(), critical) || slices.Contains(token.Parents(), irreversible)) {
			linked++
		}
	})
	if linked != 2 {
		t.Errorf("%d escalations follow from their errors", linked)
	}
	for _, n := range s.view().Nodes {
		if n.ExecAct == "escalation" && (n.Event != "escalation" || n.State != "") {
			t.Errorf("the gateway's escalation is read as a task: %+v", n)
		}
	}
	s.do(charge(8)) // they hold nothing
}

// ATD "HITL Escalation on Error": a deployment's rules, in the drafts' own form. What they do not
// understand is denied, and nobody's approval counts where they allow none.
func TestProcessRulesOfADeployment(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a) + "\n hitl {\n rules " + site.path("rules.json") + "\n }"
	site.guard = sagaActions
	rules := func(text string) {
		t.Helper()
		if err := os.WriteFile(site.path("rules.json"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rules("{\"hitl\": {\n\"rules\": [{\"id\": 7}]}}")
	if log := site.refused(t); !strings.Contains(log, "rules.json: line 2") || !strings.Contains(log, "Caddyfile:") {
		t.Errorf("the rules are accepted: %s", log)
	}
	const rule = `{"id": %q, "trigger": {"kind": "keyword_match", "op": "eq", "value": %q, "input_ref": %q},
		"required_role": "operator:oncall", "action": %q, "allow_override": %t, "override_action": "continue"}`
	rules(fmt.Sprintf(`{"hitl": {"rules": [`+rule+","+rule+","+rule+`]}}`, "r-pause", "critical", "ext.aerr.severity", "pause", true,
		"r-odd", "resource_exhausted", "atd.error_type", "celebrate", false, "r-final", "constraint_violation", "atd.error_type", "pause", false))
	site.start(t)
	g := site.gateway(t)
	for _, c := range []struct {
		severity, kind, slug, role string
		final                      bool
	}{
		{"critical", "timeout", "workflow-paused", "operator:oncall", false},
		{"warning", "resource_exhausted", "workflow-stopped", "operator:oncall", true},
		{"warning", "constraint_violation", "workflow-paused", "operator:oncall", true},
		{"warning", "timeout", "", "", false},
	} {
		s := g.saga(a)
		charged := s.do(charge(7))
		token := a.issue(ect.Claims{
			Workflow: s.wid, Action: "error", Parents: []string{charged.checkpoint},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, c.severity).Text(ect.MemberErrorType, c.kind).
				Text(ect.MemberCheckpointID, charged.checkpoint).Text(ect.MemberDescription, "wrong amount"),
		})
		if got := g.call(request{path: "/.well-known/cascade/errors", reader: nothing{}, header: map[string]string{ect.FieldName: token.Raw()}}); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		refused := s.try(charge(8))
		if c.slug == "" {
			if refused.status >= 300 {
				t.Errorf("%+v: %d %s", c, refused.status, refused.body)
			}
			continue
		}
		if refused.slug() != c.slug {
			t.Errorf("%+v: %d %s", c, refused.status, refused.body)
			continue
		}
		id := refused.escalation(t)
		if shown := procDocument[escalationDoc](t, site.operate(t, "escalations", "show", id, "-o", "json").says(t)); shown.RequiredRole != c.role {
			t.Errorf("%+v: %+v", c, shown)
		}
		if c.final {
			site.operate(t, "escalations", "approve", id, "--operator", "ann").fails(t, "allows no override")
			continue
		}
		site.decides(t, "approve", id)
		s.do(charge(8))
	}
}

// C-3.3.2-b, C-2-b: an error that names something of another workflow is refused as if that were
// unknown (P3), and the people of that workflow are asked: once for its reporter, also over a kill,
// and only so often that nobody is flooded.
func TestProcessErrorsOfOtherWorkflows(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := newRestLab(t), newAgent(t, "a"), newAgent(t, "b")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a, b)
	site.guard = sagaActions
	gateway := site.start(t)
	g := site.gateway(t)
	charged := g.saga(a)
	first := charged.do(charge(7))
	elsewhere := g.saga(b)
	own := elsewhere.do(charge(8))
	report := func(named ...string) reply {
		t.Helper()
		token := b.issue(ect.Claims{
			Workflow: elsewhere.wid, Action: "error", Parents: named,
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberDescription, "wrong"),
		})
		return g.call(request{path: "/.well-known/cascade/errors", reader: nothing{}, header: map[string]string{ect.FieldName: token.Raw()}})
	}
	type escalation struct {
		Cause, Workflow, Caller string
		Level                   int
		Held                    bool
		Links                   struct{ Checkpoint string }
	}
	opened := func(n int) []escalation {
		t.Helper()
		var list []escalation
		eventuallyWithin(t, procBound, fmt.Sprint(n, " escalations"), func() bool {
			list = procDocument[struct{ Escalations []escalation }](t, site.operate(t, "escalations", "list", "--all", "-o", "json").says(t)).Escalations
			return len(list) >= n
		})
		return list
	}
	unknown := report(uuid.NewString())
	unknown.refusedFor(t, http.StatusForbidden, "parent-unknown")
	crossing := report(first.checkpoint)
	if crossing.status != unknown.status || crossing.body != unknown.body || fmt.Sprint(len(crossing.header)) != fmt.Sprint(len(unknown.header)) {
		t.Errorf("P3: %d %s, and of an unknown id %d %s", crossing.status, crossing.body, unknown.status, unknown.body)
	}
	list := opened(1)
	want := escalation{Cause: "workflow_boundary", Workflow: charged.wid, Caller: "issuer:" + b.issuer.Identity(), Level: 2}
	want.Links.Checkpoint = first.checkpoint
	if list[0] != want {
		t.Errorf("%+v, want %+v", list[0], want)
	}
	report(first.checkpoint)                                 // again
	report(own.checkpoint, charged.do(charge(9)).checkpoint) // another call of the same workflow, with a parent of its own
	gateway.kill()
	site.start(t)
	for range 20 { // in as many workflows
		other := g.saga(a)
		report(other.do(charge(1)).checkpoint)
	}
	opened(16)
	other := g.saga(a)
	report(other.do(charge(1)).checkpoint)
	charged.do(charge(10)) // it holds nothing
	if list = opened(16); len(list) != 16 || slices.ContainsFunc(list, func(e escalation) bool { return e.Workflow == elsewhere.wid }) {
		t.Errorf("%d escalations because of one reporter, or one of its own workflow: %+v", len(list), list)
	}
}

// C-3.3.2-b: a rollback ends at the boundary of its workflow. What follows from it in another one
// stays, and the people of that one are asked; who asked for the rollback does not learn of it (P3).
func TestProcessRollbackAtTheBoundary(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := newRestLab(t), newAgent(t, "a"), newAgent(t, "b")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a, b) + "\n trust {\n cross_workflow\n }"
	site.guard = sagaActions
	site.start(t)
	g := site.gateway(t)
	s, other, third := g.saga(a), g.saga(b), g.saga(b)
	task := a.issue(ect.Claims{Workflow: s.wid})
	charged := g.call(with(task, charge(1)))
	outside := other.do(charge(2), charged.header.Get("Execution-Checkpoint"))
	more := third.do(charge(3), task.ID())
	doc := s.back(rollbackBody{Checkpoint: charged.header.Get("Execution-Checkpoint"), Scope: "sub_dag", Reason: "a test"})
	doc.want(t, "completed")
	if len(doc.Steps) != 1 || len(doc.Escalations) != 0 {
		t.Errorf("%+v", doc)
	}
	lab.wantCharge(outside.id(t), "open")
	lab.wantCharge(more.id(t), "open")
	var asked []string
	for _, e := range procDocument[struct {
		Escalations []struct {
			Cause, Workflow string
			Level           int
		}
	}](t, site.operate(t, "escalations", "list", "-o", "json").says(t)).Escalations {
		if e.Cause != "workflow_boundary" || e.Level != 2 {
			t.Errorf("%+v", e)
		}
		asked = append(asked, e.Workflow)
	}
	want := []string{other.wid, third.wid}
	slices.Sort(asked)
	slices.Sort(want)
	if !slices.Equal(asked, want) {
		t.Errorf("the people of %q are asked, want %q", asked, want)
	}
	// One that nothing follows from elsewhere asks nobody.
	other.back(rollbackBody{Checkpoint: outside.checkpoint, Reason: "a test"}).want(t, "completed")
	if list := site.operate(t, "escalations", "list", "-o", "json").says(t); strings.Count(list, "workflow_boundary") != 2 {
		t.Errorf("%s", list)
	}
}

// A-checkpoint-ect-format-c: a rollback of what cannot be undone asks people; where none of them is
// reached in time, it goes by unreachable_human: a denial, a pause of the workflow, or another role.
// Nobody's silence approves.
func TestProcessUnreachableHuman(t *testing.T) {
	t.Parallel() // its gateways are processes
	for option, want := range map[string]struct {
		status, role, slug string
		held               bool
	}{
		"deny":          {status: "expired", role: "operator"},
		"pause":         {status: "pending", role: "operator", slug: "workflow-paused", held: true},
		"escalate lead": {status: "pending", role: "lead"},
	} {
		lab, a := newRestLab(t), newAgent(t, "a")
		site := procNewSite(t, lab.addr)
		site.guard = sagaActions
		within := "2s"
		if want.status == "pending" {
			within = "5s" // and then again
		}
		site.app = trusting(t, a) + "\n hitl {\n unreachable_human continue\n }"
		if log := site.refused(t); !strings.Contains(log, "nobody's silence approves") || !strings.Contains(log, "Caddyfile:") {
			t.Errorf("silence approves: %s", log)
		}
		site.app = trusting(t, a) + "\n hitl {\n unreachable_human " + option + " {\n within " + within + "\n }\n }"
		site.start(t)
		s := site.gateway(t).saga(a)
		doc := s.back(rollbackBody{Checkpoint: s.do(request{path: "/mail"}).checkpoint, Reason: "a test"})
		doc.want(t, "escalated", "irreversible")
		if len(doc.Escalations) != 1 {
			t.Fatalf("%+v", doc)
		}
		show := func() escalationDoc {
			return procDocument[escalationDoc](t, site.operate(t, "escalations", "show", doc.Escalations[0], "-o", "json").says(t))
		}
		var got escalationDoc
		eventuallyWithin(t, procBound, option, func() bool {
			got = show()
			return got.Status == want.status && got.RequiredRole == want.role && got.Held == want.held
		})
		if len(got.Decisions) != 0 {
			t.Errorf("%s: %+v", option, got)
		}
		if next := s.try(charge(8)); next.status < 300 == (want.slug != "") || want.slug != "" && next.slug() != want.slug {
			t.Errorf("%s: %d %s", option, next.status, next.body)
		}
		if !want.held {
			continue
		}
		// What holds the workflow is among the questions that wait for people, and says what an approval does.
		if list := site.operate(t, "escalations", "list", "--status", "pending").says(t); !strings.Contains(list, got.ID) || got.Proposal.Kind != "resume" {
			t.Errorf("%s: %s, %+v", option, list, got)
		}
		site.decides(t, "approve", got.ID)
		s.do(charge(8))
	}
}

// An approval is good for the time that people had to decide, once more. A call that comes later is
// refused for good under its id, and another id is another question; nothing runs.
func TestApprovalIsNotGoodForEver(t *testing.T) {
	boss, u := newAgent(t, "boss"), newUpstream(t)
	g := launch(t, setup{app: trusting(t, boss) + "\n hitl {\n role_issuers " + boss.issuer.Identity() + "\n }", site: fmt.Sprintf(`agent_proxy %s {
		operators issuer:%s
		approve {
			within 1h
		}
	}`, u.addr, boss.issuer.Identity())})
	pay := func(id string) reply { return g.call(request{path: "/pay", id: id, header: ann}) }
	asked := pay("k")
	id := asked.escalation(t)
	hash := document[escalationDoc](t, g.get(boss, "escalations/"+id)).Proposal.RequestHash
	body := fmt.Sprintf(`{"decision":"approve","escalation_id":%q,"request_hash":%q,"reason":"fine"}`, id, hash)
	got := g.call(with(boss.issue(ect.Claims{Action: "decide", Input: ect.Sum([]byte(body))}), request{
		path: "/.well-known/cascade/escalations/" + id + "/decision", header: headers{"Content-Type": "application/json"}, body: body,
	}))
	if got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
	}
	g.store.pass(time.Hour + time.Second)
	for range 2 {
		late := pay("k")
		if doc := late.terminal(t, http.StatusForbidden, "approval-denied"); !strings.Contains(doc.Detail, "not made in time") || late.escalation(t) != id {
			t.Errorf("%+v", doc)
		}
	}
	if other := pay("other"); other.escalation(t) == id {
		t.Error("another id is the same question")
	}
	u.arrived("/pay", 0)
}
