//go:build unix

package people

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

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Interaction with HITL", level 2: a call waits for an approval, on disk and in no connection.
// It is not sent and takes no key before; afterwards it is, once.
func TestProcessApprovalBeforeTheCall(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = "action pay {\n match path /charges\n approve payments {\n within 1h\n }\n compensate POST /refunds {\n json charge {response.json./id}\n }\n }"
	gateway := site.Start(t)
	s := site.Gateway(t).Saga(a)
	pay := harness.Charge(7)
	pay.Id = "order-7"
	asked := s.Try(pay)
	if asked.Status != http.StatusConflict || asked.Slug() != "approval-required" || asked.Header.Get("Retry-After") != "30" {
		t.Fatalf("%d %v %s", asked.Status, asked.Header, asked.Body)
	}
	id := asked.Escalation(t)
	for _, when := range []string{"at once", "after a reload", "after a kill"} {
		if again := s.Try(pay); again.Slug() != "approval-required" || again.Escalation(t) != id {
			t.Errorf("%s: %d %s", when, again.Status, again.Body)
		}
		shown := harness.ProcDocument[harness.EscalationDoc](t, site.Operate(t, "escalations", "show", id, "-o", "json").Says(t))
		if shown.Status != "pending" || shown.RequiredRole != "payments" || shown.Proposal.Kind != "run-call" || !strings.HasPrefix(shown.Requester, "issuer:") ||
			!strings.Contains(shown.Proposal.Text, "POST ") || !strings.Contains(shown.Proposal.Text, `{"amount":7}`) || shown.Deadline.IsZero() {
			t.Errorf("%s: %+v", when, shown)
		}
		switch when {
		case "at once":
			site.Global = "grace_period 10s" // another configuration
			gateway.Reload(t)
			s.G.Reloads = true
		case "after a reload":
			gateway.Kill()
			gateway = site.Start(t)
		}
	}
	other := harness.Charge(8)
	other.Id = "order-7"
	if got := s.Try(other); got.Slug() != "approval-required" || got.Escalation(t) == id {
		t.Errorf("another body: %d %s", got.Status, got.Body)
	}
	lab.WantEffects()
	site.Operate(t, "escalations", "approve", id, "--operator", "ann").Fails(t, "nothing was changed") // nobody answers the question
	site.Operate(t, "escalations", "approve", id, "--operator", "ann", "--hash", "sha-256:0").Fails(t, "not that of what is proposed now")
	if got := site.Decides(t, "approve", id); got.Status != "approved" || got.Decisions[0].By != "operator:ann" {
		t.Errorf("%+v", got)
	}
	site.Operate(t, "escalations", "deny", id, "--operator", "bob", "--reason", "too late").Fails(t, "decided already")
	gateway.Kill() // between the decision and the call
	site.Start(t)
	paid := s.Try(pay)
	if paid.Status != http.StatusCreated {
		t.Fatalf("approved: %d %s", paid.Status, paid.Body)
	}
	if again := s.Try(pay); again.Status != http.StatusCreated || again.Body != paid.Body || again.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("again: %d %v %s", again.Status, again.Header, again.Body)
	}
	if got := s.Try(other); got.Slug() != "fingerprint-mismatch" {
		t.Errorf("the other body, now: %d %s", got.Status, got.Body)
	}
	lab.Arrived("POST /charges", 1)

	// The trail: the call follows from the decision, and that from the escalation.
	var decision, opened *ect.Unverified
	follows := false
	site.Exported(t, func(token *ect.Unverified) {
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
	if opened == nil || decision == nil || !slices.Contains(decision.Parents(), opened.ID()) || decision.Workflow() != s.Wid || !follows {
		t.Errorf("the trail: %v, %v, the call follows: %t", opened, decision, follows)
	}

	denied := harness.Charge(9)
	denied.Id = "order-9"
	site.Decides(t, "deny", s.Try(denied).Escalation(t))
	if got := s.Try(denied); got.Status != http.StatusForbidden || got.Slug() != "approval-denied" || got.Header.Get("Retry-After") != "" {
		t.Errorf("denied: %d %s", got.Status, got.Body)
	}
	lab.Arrived("POST /charges", 1)
}

// Nobody decides in time: that is a denial, by the store's clock.
func TestProcessApprovalExpires(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := harness.NewRestLab(t)
	site := harness.ProcNewSite(t, lab.Addr)
	site.Guard = "approve {\n within 1s\n }"
	site.Start(t)
	g := site.Gateway(t)
	pay := harness.Request{Path: "/charges", Id: "a", Body: `{"amount":1}`}
	id := g.Call(pay).Escalation(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the end of the time to decide", func() bool { return g.Call(pay).Slug() == "approval-denied" })
	if got := harness.ProcDocument[harness.EscalationDoc](t, site.Operate(t, "escalations", "show", id, "-o", "json").Says(t)); got.Status != "expired" || len(got.Decisions) != 0 {
		t.Errorf("%+v", got)
	}
	lab.WantEffects()
}

// One action of a guard may go without, and what waits does not hold other calls.
func TestApprovalIsOfAnAction(t *testing.T) {
	_, g := harness.LaunchLab(t, "approve ops\n action notes {\n match path /docs/*\n approve off\n }")
	if got := g.Call(harness.Put("/docs/x", `{"n":1}`)); got.Status >= 300 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := g.Call(harness.Charge(1)); got.Slug() != "approval-required" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// A caller cannot flood people with questions.
func TestQuestionsAreBounded(t *testing.T) {
	_, g := harness.LaunchLab(t, "approve")
	for i := range 101 {
		got := g.Call(harness.Request{Path: "/charges", Id: fmt.Sprint(i), Body: `{"amount":1}`, Header: harness.Headers{"Authorization": "Bearer one"}})
		want := "approval-required"
		if i == 100 {
			want = "quota-exceeded"
		}
		if got.Slug() != want {
			t.Fatalf("%d: %d %s", i, got.Status, got.Body)
		}
	}
	if got := g.Call(harness.Request{Path: "/charges", Id: "other", Body: `{"amount":1}`, Header: harness.Headers{"Authorization": "Bearer two"}}); got.Slug() != "approval-required" {
		t.Errorf("another caller: %d %s", got.Status, got.Body)
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
		lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
		site := harness.ProcNewSite(t, lab.Addr)
		site.App = harness.Trusting(t, a)
		site.Guard = harness.SagaActions
		gateway := site.Start(t)
		s, other := site.Gateway(t).Saga(a), site.Gateway(t).Saga(a)
		lab.Write("/docs/x", `{"n":1}`)
		body := harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Reason: "a test"}
		if name == "partial" {
			first := s.Do(harness.Put("/docs/x", `{"n":2}`))
			s.Do(harness.Charge(7), first.Checkpoint)
			body.Checkpoint, body.Cascade = first.Checkpoint, true
		} else {
			body.Checkpoint = s.Do(harness.Charge(7)).Checkpoint
		}
		lab.On("POST /refunds", -1, harness.RestSays(200, `{"status":"failed"}`))
		s.Back(body).Want(t, name, "refused")
		refused := s.Try(harness.Charge(8))
		if refused.Status != want.status || refused.Slug() != want.slug || (refused.Header.Get("Retry-After") == "30") != (want.slug == "workflow-paused") {
			t.Fatalf("%s: %d %v %s", name, refused.Status, refused.Header, refused.Body)
		}
		id := refused.Escalation(t)
		other.Do(harness.Charge(9))
		if got := site.Decides(t, "deny", id); got.LevelName != want.level || got.Status != "denied" || !got.Held || got.Proposal.Kind != "resume" {
			t.Errorf("%s: %+v", name, got)
		}
		gateway.Kill()
		site.Start(t)
		if got := s.Try(harness.Charge(8)); got.Slug() != want.slug || got.Escalation(t) != id {
			t.Errorf("%s: denied, and after a kill: %d %s", name, got.Status, got.Body)
		}
		site.Operate(t, "escalations", "approve", id, "--operator", "ann").Fails(t, "decided already")
		site.Operate(t, "escalations", "ask", id, "--operator", "bob").Says(t)
		site.Operate(t, "escalations", "approve", id, "--operator", "bob").Fails(t, "who asked cannot approve")
		site.Decides(t, "approve", id)
		s.Do(harness.Charge(8))
	}
}

// No proposal says more than its approval does: people who are asked about a rollback of the whole workflow that ends
// partial are not asked to resume what it has ended.
func TestProcessWholeWorkflowIsNotResumed(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = harness.SagaActions
	site.Start(t)
	s := site.Gateway(t).Saga(a)
	lab.Write("/docs/x", `{"n":1}`)
	first := s.Do(harness.Put("/docs/x", `{"n":2}`))
	s.Do(harness.Charge(7), first.Checkpoint)
	lab.On("POST /refunds", -1, harness.RestSays(200, `{"status":"failed"}`))
	s.Back(harness.RollbackBody{Checkpoint: first.Checkpoint, Scope: "full_workflow", Reason: "a test"}).Want(t, "partial", "refused")
	list := harness.ProcDocument[struct{ Escalations []harness.EscalationDoc }](t, site.Operate(t, "escalations", "list", "-o", "json").Says(t)).Escalations
	at := slices.IndexFunc(list, func(e harness.EscalationDoc) bool { return e.Cause == "rollback_partial" })
	if at < 0 || list[at].Held || list[at].Proposal.Kind != "" {
		t.Fatalf("%+v", list)
	}
	if text := site.Operate(t, "escalations", "show", list[at].ID).Says(t); !strings.Contains(text, "An approval changes nothing") {
		t.Errorf("%s", text)
	}
	for _, e := range list {
		site.Decides(t, "approve", e.ID)
	}
	s.Try(harness.Charge(8)).Problem(t, http.StatusForbidden, "workflow-stopped")
}

// P4: a workflow that people hold, or may hold, does not go on while the store cannot say so. Others
// do, and it waits for its person again once the store is back.
func TestP4HoldsThatCannotBeRead(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	held, other := g.Saga(a), g.Saga(a)
	charged := held.Do(harness.Charge(7))
	lab.On("POST /refunds", -1, harness.RestSays(200, `{"status":"failed"}`))
	held.Back(harness.RollbackBody{Checkpoint: charged.Checkpoint, Reason: "a test"}).Want(t, "failed", "refused")
	id := held.Try(harness.Charge(8)).Escalation(t)
	record := []byte("he") // of an escalation
	g.Store.OnGet(func(key []byte) error {
		if bytes.HasPrefix(key, record) {
			return harness.ErrBroken
		}
		return nil
	})
	for range 3 {
		held.Try(harness.Charge(8)).Retryable(t, http.StatusServiceUnavailable, "store-unavailable")
	}
	other.Do(harness.Charge(9))
	g.Store.OnGet(nil)
	if got := held.Try(harness.Charge(8)); got.Slug() != "workflow-stopped" || got.Escalation(t) != id {
		t.Errorf("once the store is back: %d %s", got.Status, got.Body)
	}
	lab.Arrived("POST /charges", 2)
}

// P3, and who decides: by a role of the site's users or of trusted issuers, over the gateway's paths.
func TestWhoDecidesEscalations(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	lab, ops, other := harness.NewRestLab(t), harness.NewAgent(t, "ops"), harness.NewAgent(t, "a")
	users := ""
	for _, name := range []string{"ann", "bob", "eve", "ops"} {
		users += name + " " + string(hash) + "\n"
	}
	g := harness.Launch(t, harness.Setup{
		App: harness.Trusting(t, ops, other) + "\n hitl {\n role_issuers spiffe://example.com/agent/ops\n }",
		Site: "basic_auth {\n " + users + " }\n agent_proxy " + lab.Addr + " {\n operators user:ops\n role payments user:ann issuer:spiffe://example.com/agent/nobody\n role mail user:bob\n" +
			" action pay {\n match path /charges\n approve payments\n }\n }",
	})
	as := func(user string, r harness.Request) harness.Request {
		if r.Header == nil {
			r.Header = map[string]string{}
		}
		r.Header["Authorization"] = "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":secret"))
		return r
	}
	const all = "/.well-known/cascade/escalations"
	get := func(user, path string) harness.Reply {
		return g.Call(as(user, harness.Request{Method: "GET", Path: path}))
	}
	decision := func(id, body string) harness.Request {
		return harness.Request{Path: all + "/" + id + "/decision", Body: body, Header: harness.Headers{"Content-Type": "application/json"}}
	}
	ask := func(n int) (id, hash string) {
		t.Helper()
		r := harness.Charge(n)
		r.Id = fmt.Sprint("order-", n)
		got := g.Call(as("eve", r))
		id = got.Escalation(t)
		return id, harness.Document[harness.EscalationDoc](t, get("eve", all+"/"+id)).Proposal.RequestHash
	}
	id, of := ask(1)
	unknown := get("bob", all+"/"+uuid.NewString())
	unknown.Terminal(t, http.StatusNotFound, "escalation-unknown")
	for _, user := range []string{"bob", "ops"} { // another role, also that of operators, sees as much as what is not there
		got := get(user, all+"/"+id)
		if got.Status != unknown.Status || got.Slug() != unknown.Slug() {
			t.Errorf("%s: %d %s", user, got.Status, got.Body)
		}
		if list := harness.Document[struct{ Escalations []harness.EscalationDoc }](t, get(user, all)); len(list.Escalations) != 0 {
			t.Errorf("%s sees %+v", user, list)
		}
		g.Call(as(user, decision(id, `{"decision":"approve","request_hash":"`+of+`"}`))).Terminal(t, http.StatusNotFound, "escalation-unknown")
	}
	for _, user := range []string{"eve", "ann"} {
		if list := harness.Document[struct{ Escalations []harness.EscalationDoc }](t, get(user, all+"?status=pending")); len(list.Escalations) != 1 || list.Escalations[0].ID != id {
			t.Errorf("%s sees %+v", user, list)
		}
	}
	approve := `{"decision":"approve","request_hash":"` + of + `","reason":"fine"}`
	g.Call(as("eve", decision(id, approve))).Terminal(t, http.StatusForbidden, "decision-refused")
	g.Call(as("ann", decision(id, `{"decision":"approve","request_hash":"sha-256:0"}`))).Terminal(t, http.StatusConflict, "decision-void")
	g.Call(as("ann", decision(id, `{"decision":"deny","request_hash":"`+of+`"}`))).Terminal(t, http.StatusBadRequest, "parameter-invalid")
	g.Call(as("ann", decision(id, `{"decision":"approve","decision":"deny"}`))).Terminal(t, http.StatusBadRequest, "parameter-invalid")
	for name, value := range map[string]string{"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"} {
		r := as("ann", decision(id, approve))
		r.Header[name] = value
		if got := g.Call(r); got.Status != http.StatusForbidden && got.Status != http.StatusBadRequest {
			t.Errorf("%s %s: %d %s", name, value, got.Status, got.Body)
		}
	}
	if got := harness.Document[harness.EscalationDoc](t, get("ann", all+"/"+id)); got.Status != "pending" {
		t.Fatalf("%+v", got)
	}
	if got := g.Call(as("ann", decision(id, approve))); got.Status != http.StatusOK || harness.Document[harness.EscalationDoc](t, got).Status != "approved" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	g.Call(as("ann", decision(id, approve))).Terminal(t, http.StatusConflict, "decision-void")
	if got := harness.Document[harness.EscalationDoc](t, get("eve", all+"/"+id)); got.Status != "approved" || len(got.Decisions) != 0 {
		t.Errorf("who asked learns who decided: %+v", got)
	}

	// Tokens: only of the issuers that are trusted with roles, bound to this very decision.
	id, of = ask(2)
	approve = `{"decision":"approve","escalation_id":"` + id + `","request_hash":"` + of + `"}`
	token := func(a *harness.Agent, body string, roles ...string) *ect.Token {
		return a.Issue(ect.Claims{Action: "decide", Input: ect.Sum([]byte(body)), Ext: new(ect.ExtBuilder).Texts("roles", roles)})
	}
	by := func(token *ect.Token, body string) harness.Reply {
		return g.Call(as("eve", harness.With(token, decision(id, body))))
	}
	by(token(other, approve, "payments"), approve).Terminal(t, http.StatusNotFound, "escalation-unknown")
	by(token(ops, approve, "cooks"), approve).Terminal(t, http.StatusNotFound, "escalation-unknown")
	by(token(ops, "another", "payments"), approve).RefusedFor(t, http.StatusForbidden, "inp_hash")
	elsewhere := strings.Replace(approve, id, uuid.NewString(), 1)
	by(token(ops, elsewhere, "payments"), elsewhere).Terminal(t, http.StatusBadRequest, "parameter-invalid")
	if got := by(token(ops, approve, "payments"), approve); got.Status != http.StatusOK || harness.Document[harness.EscalationDoc](t, got).Decisions[0].By != "issuer:spiffe://example.com/agent/ops" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	lab.WantEffects()
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
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{
		App: "hitl {\n webhook " + hook.URL + " {\n secret whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n }\n page https://ops.example.com/\n }",
		Site: "basic_auth {\n ann " + string(hash) + "\n bob " + string(hash) + "\n eve " + string(hash) + "\n }\n agent_proxy " + lab.Addr +
			" {\n approve\n operators user:ann user:bob\n }",
	})
	send := func(user, method, path, body string, header ...string) harness.Reply {
		r := harness.Request{Method: method, Path: path, Body: body, Header: map[string]string{
			"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":secret")),
		}}
		if body != "" {
			r.Header["Content-Type"] = "application/x-www-form-urlencoded"
		}
		for i := 0; i < len(header); i += 2 {
			r.Header[header[i]] = header[i+1]
		}
		return g.Call(r)
	}
	pay := func() harness.Reply {
		return send("eve", "POST", "/charges", `{"amount":7,"note":"<script>7</script>"}`, "Content-Type", "application/json", "Idempotency-Key", "order-7")
	}
	id := pay().Escalation(t)
	page, ok := strings.CutPrefix(harness.Wait(t, links, "the message"), "https://ops.example.com")
	if !ok || !strings.HasPrefix(page, "/.well-known/cascade/escalations/"+id+"/page?key=") {
		t.Fatalf("the link is %q", page)
	}
	seen := send("ann", "GET", page, "")
	if seen.Status != http.StatusOK || !strings.Contains(seen.Body, "&lt;script&gt;7&lt;/script&gt;") || strings.Contains(seen.Body, "<script") ||
		!strings.Contains(seen.Header.Get("Content-Security-Policy"), "default-src 'none'") || seen.Header.Get("Cache-Control") != "no-store" ||
		seen.Header.Get("Referrer-Policy") != "no-referrer" {
		t.Fatalf("%d %v %s", seen.Status, seen.Header, seen.Body)
	}
	send("eve", "GET", page, "").Terminal(t, http.StatusNotFound, "escalation-unknown")
	send("ann", "GET", strings.TrimRight(page, "=")+"x", "").Terminal(t, http.StatusNotFound, "escalation-unknown")
	_, token, _ := strings.Cut(seen.Body, `name="token" value="`)
	token, _, _ = strings.Cut(token, `"`)
	form := strings.Replace(page, "/page?", "/form?", 1)
	body := func(token string) string {
		return url.Values{"decision": {"approve"}, "reason": {"fine"}, "token": {token}}.Encode()
	}
	for _, c := range [][]string{
		{"ann", body("")}, {"bob", body(token)}, // without a form's token, or with that of another person
		{"ann", body(token), "Origin", "https://evil.example"}, {"ann", body(token), "Sec-Fetch-Site", "cross-site"},
	} {
		if got := send(c[0], "POST", form, c[1], c[2:]...); got.Status == http.StatusOK && !strings.Contains(got.Body, "Nothing was decided") {
			t.Errorf("%q: %d %s", c, got.Status, got.Body)
		}
		if got := pay(); got.Slug() != "approval-required" {
			t.Fatalf("%q has decided: %d %s", c, got.Status, got.Body)
		}
	}
	send("ann", "GET", form, "")
	if got := send("ann", "POST", form, body(token), "Sec-Fetch-Site", "same-origin"); got.Status != http.StatusOK || !strings.Contains(got.Body, "It is recorded.") ||
		!strings.Contains(got.Body, "user:ann, approve. fine") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := send("ann", "POST", form, body(token)); !strings.Contains(got.Body, "Nothing was decided") {
		t.Errorf("again: %d %s", got.Status, got.Body)
	}
	if got := pay(); got.Status != http.StatusCreated {
		t.Errorf("approved: %d %s", got.Status, got.Body)
	}
}

// ATD "HITL Escalation on Error", and "Interaction with HITL", case 1: a critical error that an agent
// reports is escalated, and any of a call that cannot be undone; once for a call, linked to the error.
func TestProcessErrorsAreEscalated(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = harness.SagaActions
	site.Start(t)
	g := site.Gateway(t)
	s := g.Saga(a)
	charged, mail := s.Do(harness.Charge(7)), s.Do(harness.Request{Path: "/mail"})
	report := func(severity, checkpoint string) string {
		t.Helper()
		token := a.Issue(ect.Claims{
			Workflow: s.Wid, Action: "error", Parents: []string{checkpoint},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed").
				Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberDescription, "wrong amount"),
		})
		got := g.Call(harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}, Header: map[string]string{ect.FieldName: token.Raw()}})
		if got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return token.ID()
	}
	report("warning", charged.Checkpoint)
	critical := report("critical", charged.Checkpoint)
	report("critical", charged.Checkpoint) // the same call
	irreversible := report("warning", mail.Checkpoint)
	list := harness.ProcDocument[struct {
		Escalations []struct {
			Cause, Workflow, Token string
			Level                  int
			Links                  struct{ Error, Checkpoint string }
		}
	}](t, site.Operate(t, "escalations", "list", "-o", "json").Says(t)).Escalations
	if len(list) != 2 {
		t.Fatalf("%+v", list)
	}
	for i, want := range []struct{ cause, err, checkpoint string }{
		{"irreversible_rollback", irreversible, mail.Checkpoint}, {"critical_error", critical, charged.Checkpoint},
	} {
		if got := list[i]; got.Cause != want.cause || got.Level != 2 || got.Workflow != s.Wid || got.Links.Error != want.err || got.Links.Checkpoint != want.checkpoint {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	linked := 0
	site.Exported(t, func(token *ect.Unverified) {
		if token.Action() == "escalation" && (slices.Contains(token.Parents(), critical) || slices.Contains(token.Parents(), irreversible)) {
			linked++
		}
	})
	if linked != 2 {
		t.Errorf("%d escalations follow from their errors", linked)
	}
	for _, n := range s.View().Nodes {
		if n.ExecAct == "escalation" && (n.Event != "escalation" || n.State != "") {
			t.Errorf("the gateway's escalation is read as a task: %+v", n)
		}
	}
	s.Do(harness.Charge(8)) // they hold nothing
}

// ATD "HITL Escalation on Error": a deployment's rules, in the drafts' own form. What they do not
// understand is denied, and nobody's approval counts where they allow none.
func TestProcessRulesOfADeployment(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a) + "\n hitl {\n rules " + site.Path("rules.json") + "\n }"
	site.Guard = harness.SagaActions
	rules := func(text string) {
		t.Helper()
		if err := os.WriteFile(site.Path("rules.json"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rules("{\"hitl\": {\n\"rules\": [{\"id\": 7}]}}")
	if log := site.Refused(t); !strings.Contains(log, "rules.json: line 2") || !strings.Contains(log, "Caddyfile:") {
		t.Errorf("the rules are accepted: %s", log)
	}
	const rule = `{"id": %q, "trigger": {"kind": "keyword_match", "op": "eq", "value": %q, "input_ref": %q},
		"required_role": "operator:oncall", "action": %q, "allow_override": %t, "override_action": "continue"}`
	rules(fmt.Sprintf(`{"hitl": {"rules": [`+rule+","+rule+","+rule+`]}}`, "r-pause", "critical", "ext.aerr.severity", "pause", true,
		"r-odd", "resource_exhausted", "atd.error_type", "celebrate", false, "r-final", "constraint_violation", "atd.error_type", "pause", false))
	site.Start(t)
	g := site.Gateway(t)
	for _, c := range []struct {
		severity, kind, slug, role string
		final                      bool
	}{
		{"critical", "timeout", "workflow-paused", "operator:oncall", false},
		{"warning", "resource_exhausted", "workflow-stopped", "operator:oncall", true},
		{"warning", "constraint_violation", "workflow-paused", "operator:oncall", true},
		{"warning", "timeout", "", "", false},
	} {
		s := g.Saga(a)
		charged := s.Do(harness.Charge(7))
		token := a.Issue(ect.Claims{
			Workflow: s.Wid, Action: "error", Parents: []string{charged.Checkpoint},
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, c.severity).Text(ect.MemberErrorType, c.kind).
				Text(ect.MemberCheckpointID, charged.Checkpoint).Text(ect.MemberDescription, "wrong amount"),
		})
		if got := g.Call(harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}, Header: map[string]string{ect.FieldName: token.Raw()}}); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		refused := s.Try(harness.Charge(8))
		if c.slug == "" {
			if refused.Status >= 300 {
				t.Errorf("%+v: %d %s", c, refused.Status, refused.Body)
			}
			continue
		}
		if refused.Slug() != c.slug {
			t.Errorf("%+v: %d %s", c, refused.Status, refused.Body)
			continue
		}
		id := refused.Escalation(t)
		if shown := harness.ProcDocument[harness.EscalationDoc](t, site.Operate(t, "escalations", "show", id, "-o", "json").Says(t)); shown.RequiredRole != c.role {
			t.Errorf("%+v: %+v", c, shown)
		}
		if c.final {
			site.Operate(t, "escalations", "approve", id, "--operator", "ann").Fails(t, "allows no override")
			continue
		}
		site.Decides(t, "approve", id)
		s.Do(harness.Charge(8))
	}
}

// C-3.3.2-b, C-2-b: an error that names something of another workflow is refused as if that were
// unknown (P3), and the people of that workflow are asked: once for its reporter, also over a kill,
// and only so often that nobody is flooded.
func TestProcessErrorsOfOtherWorkflows(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a, b)
	site.Guard = harness.SagaActions
	gateway := site.Start(t)
	g := site.Gateway(t)
	charged := g.Saga(a)
	first := charged.Do(harness.Charge(7))
	elsewhere := g.Saga(b)
	own := elsewhere.Do(harness.Charge(8))
	report := func(named ...string) harness.Reply {
		t.Helper()
		token := b.Issue(ect.Claims{
			Workflow: elsewhere.Wid, Action: "error", Parents: named,
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberDescription, "wrong"),
		})
		return g.Call(harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}, Header: map[string]string{ect.FieldName: token.Raw()}})
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
		harness.EventuallyWithin(t, harness.ProcBound, fmt.Sprint(n, " escalations"), func() bool {
			list = harness.ProcDocument[struct{ Escalations []escalation }](t, site.Operate(t, "escalations", "list", "--all", "-o", "json").Says(t)).Escalations
			return len(list) >= n
		})
		return list
	}
	unknown := report(uuid.NewString())
	unknown.RefusedFor(t, http.StatusForbidden, "parent-unknown")
	crossing := report(first.Checkpoint)
	if crossing.Status != unknown.Status || crossing.Body != unknown.Body || fmt.Sprint(len(crossing.Header)) != fmt.Sprint(len(unknown.Header)) {
		t.Errorf("P3: %d %s, and of an unknown id %d %s", crossing.Status, crossing.Body, unknown.Status, unknown.Body)
	}
	list := opened(1)
	want := escalation{Cause: "workflow_boundary", Workflow: charged.Wid, Caller: "issuer:" + b.Issuer.Identity(), Level: 2}
	want.Links.Checkpoint = first.Checkpoint
	if list[0] != want {
		t.Errorf("%+v, want %+v", list[0], want)
	}
	report(first.Checkpoint)                                         // again
	report(own.Checkpoint, charged.Do(harness.Charge(9)).Checkpoint) // another call of the same workflow, with a parent of its own
	gateway.Kill()
	site.Start(t)
	for range 20 { // in as many workflows
		other := g.Saga(a)
		report(other.Do(harness.Charge(1)).Checkpoint)
	}
	opened(16)
	other := g.Saga(a)
	report(other.Do(harness.Charge(1)).Checkpoint)
	charged.Do(harness.Charge(10)) // it holds nothing
	if list = opened(16); len(list) != 16 || slices.ContainsFunc(list, func(e escalation) bool { return e.Workflow == elsewhere.Wid }) {
		t.Errorf("%d escalations because of one reporter, or one of its own workflow: %+v", len(list), list)
	}
}

// C-3.3.2-b: a rollback ends at the boundary of its workflow. What follows from it in another one
// stays, and the people of that one are asked; who asked for the rollback does not learn of it (P3).
func TestProcessRollbackAtTheBoundary(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a, b) + "\n trust {\n cross_workflow\n }"
	site.Guard = harness.SagaActions
	site.Start(t)
	g := site.Gateway(t)
	s, other, third := g.Saga(a), g.Saga(b), g.Saga(b)
	task := a.Issue(ect.Claims{Workflow: s.Wid})
	charged := g.Call(harness.With(task, harness.Charge(1)))
	outside := other.Do(harness.Charge(2), charged.Header.Get("Execution-Checkpoint"))
	more := third.Do(harness.Charge(3), task.ID())
	doc := s.Back(harness.RollbackBody{Checkpoint: charged.Header.Get("Execution-Checkpoint"), Scope: "sub_dag", Reason: "a test"})
	doc.Want(t, "completed")
	if len(doc.Steps) != 1 || len(doc.Escalations) != 0 {
		t.Errorf("%+v", doc)
	}
	lab.WantCharge(outside.Id(t), "open")
	lab.WantCharge(more.Id(t), "open")
	var asked []string
	for _, e := range harness.ProcDocument[struct {
		Escalations []struct {
			Cause, Workflow string
			Level           int
		}
	}](t, site.Operate(t, "escalations", "list", "-o", "json").Says(t)).Escalations {
		if e.Cause != "workflow_boundary" || e.Level != 2 {
			t.Errorf("%+v", e)
		}
		asked = append(asked, e.Workflow)
	}
	want := []string{other.Wid, third.Wid}
	slices.Sort(asked)
	slices.Sort(want)
	if !slices.Equal(asked, want) {
		t.Errorf("the people of %q are asked, want %q", asked, want)
	}
	// One that nothing follows from elsewhere asks nobody.
	other.Back(harness.RollbackBody{Checkpoint: outside.Checkpoint, Reason: "a test"}).Want(t, "completed")
	if list := site.Operate(t, "escalations", "list", "-o", "json").Says(t); strings.Count(list, "workflow_boundary") != 2 {
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
		lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
		site := harness.ProcNewSite(t, lab.Addr)
		site.Guard = harness.SagaActions
		within := "2s"
		if want.status == "pending" {
			within = "5s" // and then again
		}
		site.App = harness.Trusting(t, a) + "\n hitl {\n unreachable_human continue\n }"
		if log := site.Refused(t); !strings.Contains(log, "nobody's silence approves") || !strings.Contains(log, "Caddyfile:") {
			t.Errorf("silence approves: %s", log)
		}
		site.App = harness.Trusting(t, a) + "\n hitl {\n unreachable_human " + option + " {\n within " + within + "\n }\n }"
		site.Start(t)
		s := site.Gateway(t).Saga(a)
		doc := s.Back(harness.RollbackBody{Checkpoint: s.Do(harness.Request{Path: "/mail"}).Checkpoint, Reason: "a test"})
		doc.Want(t, "escalated", "irreversible")
		if len(doc.Escalations) != 1 {
			t.Fatalf("%+v", doc)
		}
		show := func() harness.EscalationDoc {
			return harness.ProcDocument[harness.EscalationDoc](t, site.Operate(t, "escalations", "show", doc.Escalations[0], "-o", "json").Says(t))
		}
		var got harness.EscalationDoc
		harness.EventuallyWithin(t, harness.ProcBound, option, func() bool {
			got = show()
			return got.Status == want.status && got.RequiredRole == want.role && got.Held == want.held
		})
		if len(got.Decisions) != 0 {
			t.Errorf("%s: %+v", option, got)
		}
		if next := s.Try(harness.Charge(8)); next.Status < 300 == (want.slug != "") || want.slug != "" && next.Slug() != want.slug {
			t.Errorf("%s: %d %s", option, next.Status, next.Body)
		}
		if !want.held {
			continue
		}
		// What holds the workflow is among the questions that wait for people, and says what an approval does.
		if list := site.Operate(t, "escalations", "list", "--status", "pending").Says(t); !strings.Contains(list, got.ID) || got.Proposal.Kind != "resume" {
			t.Errorf("%s: %s, %+v", option, list, got)
		}
		site.Decides(t, "approve", got.ID)
		s.Do(harness.Charge(8))
	}
}

// An approval is good for the time that people had to decide, once more. A call that comes later is
// refused for good under its id, and another id is another question; nothing runs.
func TestApprovalIsNotGoodForEver(t *testing.T) {
	boss, u := harness.NewAgent(t, "boss"), harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, boss) + "\n hitl {\n role_issuers " + boss.Issuer.Identity() + "\n }", Site: fmt.Sprintf(`agent_proxy %s {
		operators issuer:%s
		approve {
			within 1h
		}
	}`, u.Addr, boss.Issuer.Identity())})
	pay := func(id string) harness.Reply {
		return g.Call(harness.Request{Path: "/pay", Id: id, Header: harness.Ann})
	}
	asked := pay("k")
	id := asked.Escalation(t)
	hash := harness.Document[harness.EscalationDoc](t, g.Get(boss, "escalations/"+id)).Proposal.RequestHash
	body := fmt.Sprintf(`{"decision":"approve","escalation_id":%q,"request_hash":%q,"reason":"fine"}`, id, hash)
	got := g.Call(harness.With(boss.Issue(ect.Claims{Action: "decide", Input: ect.Sum([]byte(body))}), harness.Request{
		Path: "/.well-known/cascade/escalations/" + id + "/decision", Header: harness.Headers{"Content-Type": "application/json"}, Body: body,
	}))
	if got.Status != http.StatusOK {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	g.Store.Pass(time.Hour + time.Second)
	for range 2 {
		late := pay("k")
		if doc := late.Terminal(t, http.StatusForbidden, "approval-denied"); !strings.Contains(doc.Detail, "not made in time") || late.Escalation(t) != id {
			t.Errorf("%+v", doc)
		}
	}
	if other := pay("other"); other.Escalation(t) == id {
		t.Error("another id is the same question")
	}
	u.Arrived("/pay", 0)
}
