//go:build unix

package contain

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Interaction with HITL", cases 3 and e: a cascade pauses before what is of severity critical,
// for its plan, over a reload and a kill. Its workflow waits. An approval carries out what was shown,
// and all of it follows from the decision; a denial leaves everything as it is, and is in the ledger.
func TestProcessCriticalNodeWaits(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, verb := range []string{"approve", "deny"} {
		lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
		site := harness.ProcNewSite(t, lab.Addr)
		site.App = harness.Trusting(t, a)
		site.Guard = criticalActions
		gateway := site.Start(t)
		s, other := site.Gateway(t).Saga(a), site.Gateway(t).Saga(a)
		lab.Write("/docs/x", `{"n":1}`)
		root := s.Do(harness.Put("/docs/x", `{"n":2}`))
		charged := s.Do(harness.Charge(1), root.Checkpoint)
		b := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
		doc := s.Waits(b)
		if refused := s.Try(harness.Charge(2)); refused.Slug() != "workflow-paused" || refused.Escalation(t) != doc.Waits {
			t.Errorf("%d %s", refused.Status, refused.Body)
		}
		other.Do(harness.Charge(3))
		gateway.Kill()
		gateway = site.Start(t)
		site.Global = "grace_period 10s" // another configuration
		gateway.Reload(t)
		s.G.Reloads = true
		if again := harness.Document[harness.WaitingDoc](t, s.Look(b.ID)); again.Waits != doc.Waits || again.PlanHash != doc.PlanHash {
			t.Errorf("%+v, before %+v", again, doc)
		}
		lab.Arrived("POST /refunds", 0)
		shown := harness.ProcDocument[harness.EscalationDoc](t, site.Operate(t, "escalations", "show", doc.Waits, "-o", "json").Says(t))
		if shown.Level != 1 || shown.Cause != "critical_node" || shown.Proposal.Kind != "continue-rollback" || shown.Proposal.PlanHash != doc.PlanHash || !shown.Held ||
			shown.Requester != "issuer:"+a.Issuer.Identity() || !strings.Contains(shown.Proposal.Text, charged.Checkpoint) {
			t.Errorf("%+v", shown)
		}
		if text := site.Operate(t, "escalations", "show", doc.Waits).Says(t); !strings.Contains(text, doc.PlanHash) {
			t.Errorf("the command does not show the plan's hash: %s", text)
		}
		site.Operate(t, "escalations", verb, doc.Waits, "--operator", "ann", "--reason", "seen", "--hash", strings.Repeat("0", 64)).Fails(t, "not that of what is proposed now")
		site.Decides(t, verb, doc.Waits)
		site.Operate(t, "escalations", verb, doc.Waits, "--operator", "bob", "--reason", "me too", "--hash", doc.PlanHash).Fails(t, "decided already")
		done := s.Finished(b.ID)
		if verb == "approve" {
			done.Want(t, "completed")
			lab.WantCharge(charged.Id(t), "refunded")
			lab.WantDoc("/docs/x", `{"n":1}`)
			s.Do(harness.Charge(4))
		} else {
			done.Want(t, "escalated", "denied", "denied")
			lab.Arrived("POST /refunds", 0)
			lab.WantDoc("/docs/x", `{"n":2}`)
			if refused := s.Try(harness.Charge(4)); refused.Slug() != "workflow-paused" || refused.Escalation(t) != doc.Waits {
				t.Errorf("%d %s", refused.Status, refused.Body)
			}
		}
		tokens := map[string]*ect.Unverified{}
		var opened, decision *ect.Unverified
		site.Exported(t, func(token *ect.Unverified) {
			tokens[token.ID()] = token
			switch {
			case !strings.Contains(token.Payload(), doc.Waits):
			case token.Action() == "escalation":
				opened = token
			case token.Action() == "escalation_decision":
				decision = token
			}
		})
		complete := tokens[done.Tokens.Complete]
		if opened == nil || decision == nil || complete == nil || !slices.Contains(opened.Parents(), charged.Checkpoint) || !slices.Contains(decision.Parents(), opened.ID()) ||
			!slices.Contains(complete.Parents(), decision.ID()) || strings.Contains(decision.Payload(), "ann") {
			t.Errorf("the trail: %v, %v, %v", opened, decision, complete)
		}
	}
}

// C-4.3.2-h: where a part may not be undone by itself, people are asked for exactly that part. Nothing
// is undone before; a denial leaves everything.
func TestProcessPartialRollbackIsProposed(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = criticalActions
	gateway := site.Start(t)
	for i, verb := range []string{"approve", "deny"} {
		s := site.Gateway(t).Saga(a)
		path := fmt.Sprint("/docs/", verb)
		lab.Write(path, `{"n":1}`)
		root := s.Do(harness.Put(path, `{"n":2}`))
		mail := s.Do(harness.Request{Path: "/mail"}, root.Checkpoint)
		b := harness.RollbackBody{ID: harness.RollbackID(i + 1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
		doc := s.Waits(b)
		gateway.Kill()
		gateway = site.Start(t)
		s.G.Reloads = true
		shown := harness.ProcDocument[harness.EscalationDoc](t, site.Operate(t, "escalations", "show", doc.Waits, "-o", "json").Says(t))
		if shown.Level != 2 || shown.Cause != "critical_node" || shown.Proposal.Kind != "partial-rollback" || shown.Proposal.PlanHash != doc.PlanHash ||
			!strings.Contains(shown.Proposal.Text, "stays: checkpoint "+mail.Checkpoint) || !strings.Contains(shown.Proposal.Text, "is undone: checkpoint "+root.Checkpoint) {
			t.Errorf("%+v", shown)
		}
		lab.WantDoc(path, `{"n":2}`)
		site.Decides(t, verb, doc.Waits)
		done := s.Finished(b.ID)
		if verb == "approve" {
			done.Want(t, "partial", "irreversible")
			lab.WantDoc(path, `{"n":1}`)
		} else {
			done.Want(t, "escalated", "irreversible", "denied")
			lab.WantDoc(path, `{"n":2}`)
		}
	}
}

// C-4.3.2-h: `critical` at a gateway that takes part counts as it does here, by the checkpoint that it has
// signed: people are asked before the rest is undone without it.
func TestProcessCriticalAtAParticipant(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.LayAskingStar(t)
	c.Sites[1].Guard = criticalActions
	s := c.Begin().Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	mail := c.Direct(1, harness.Request{Path: "/mail"}, root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	doc := s.Prepare(asked, http.StatusConflict)
	if len(doc.Steps) != 2 || doc.Steps[0].Checkpoint != mail.Checkpoint || doc.Steps[0].Critical != "action" {
		t.Errorf("%+v", doc.Steps)
	}
	c.Sites[0].Decides(t, "deny", s.Waits(asked).Waits)
	s.Finished(asked.ID).Want(t, "escalated", "irreversible", "denied")
	c.Lab.WantDoc("/docs/x", `{"n":2}`)
}

// A decision on a rollback has one result, whoever else decides at the same time, and whatever is
// sent again; who decides sees the plan's hash in the document and on the page.
func TestDecisionsOnRollbacksRace(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	links := make(chan string, 64)
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var m struct{ Data struct{ Page string } }
		_ = json.NewDecoder(r.Body).Decode(&m) // the test reads what came
		links <- m.Data.Page
	}))
	t.Cleanup(hook.Close)
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	users := ""
	for i := range 8 {
		users += fmt.Sprintf("u%d %s\n", i, hash)
	}
	g := harness.Launch(t, harness.Setup{
		App: harness.Trusting(t, a) + "\n hitl {\n webhook " + hook.URL + " {\n secret whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n }\n page https://ops.example.com/\n }",
		Site: "basic_auth /.well-known/cascade/escalations/* {\n" + users + "}\n agent_proxy " + lab.Addr + " {\n operators user:u0 user:u1 user:u2 user:u3 user:u4 user:u5 user:u6 user:u7\n" +
			" action short {\n match path /docs/short*\n restore\n checkpoint_ttl 2s\n severity critical\n }\n" + criticalActions + "\n}",
	})
	as := func(user int, r harness.Request) harness.Reply {
		if r.Header == nil {
			r.Header = map[string]string{}
		}
		r.Header["Authorization"] = "Basic " + base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "u%d:secret", user))
		return g.Call(r)
	}
	const all = "/.well-known/cascade/escalations/"
	decide := func(user int, id, verb, hash string) harness.Reply {
		body := fmt.Sprintf(`{"decision":%q,"plan_hash":%q,"reason":"seen"}`, verb, hash)
		return as(user, harness.Request{Path: all + id + "/decision", Body: body, Header: harness.Headers{"Content-Type": "application/json"}})
	}
	reason := func(r harness.Reply) string {
		var doc struct{ Reason string }
		if err := json.Unmarshal([]byte(r.Body), &doc); err != nil {
			t.Errorf("%v: %s", err, r.Body)
		}
		return doc.Reason
	}
	s := g.Saga(a)
	lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	s.Do(harness.Charge(1), root.Checkpoint)
	b := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	doc := s.Waits(b)
	page := strings.TrimPrefix(harness.Wait(t, links, "the message"), "https://ops.example.com")
	if seen := as(0, harness.Request{Method: "GET", Path: page}); seen.Status != http.StatusOK || !strings.Contains(seen.Body, "Plan "+doc.PlanHash) || !strings.Contains(seen.Body, "continue-rollback") {
		t.Errorf("%d %s", seen.Status, seen.Body)
	}
	if shown := harness.Document[harness.EscalationDoc](t, as(0, harness.Request{Method: "GET", Path: all + doc.Waits})); shown.Proposal.PlanHash != doc.PlanHash {
		t.Errorf("%+v", shown)
	}
	if got := decide(0, doc.Waits, "approve", strings.Repeat("0", 64)); got.Slug() != "decision-void" || reason(got) != "changed" {
		t.Errorf("another plan: %d %s", got.Status, got.Body)
	}
	var counted sync.Map
	var wg sync.WaitGroup
	for user := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			counted.Store(user, decide(user, doc.Waits, []string{"approve", "deny"}[user%2], doc.PlanHash))
		}()
	}
	wg.Wait()
	winner := -1
	for user := range 8 {
		got, _ := counted.Load(user)
		switch r := got.(harness.Reply); {
		case r.Status == http.StatusOK && winner < 0:
			winner = user
		case r.Slug() != "decision-void" || reason(r) != "decided":
			t.Errorf("user %d: %d %s", user, r.Status, r.Body)
		}
	}
	if got := decide(max(winner, 0), doc.Waits, "approve", doc.PlanHash); got.Slug() != "decision-void" || reason(got) != "decided" {
		t.Errorf("again: %d %s", got.Status, got.Body)
	}
	switch done := s.Finished(b.ID); winner % 2 {
	case 0:
		done.Want(t, "completed")
	case 1:
		done.Want(t, "escalated", "denied", "denied")
	default:
		t.Errorf("nobody's decision counted: %+v", done)
	}

	// Decisions around the deadline: one result each, and nothing is undone without an approval.
	for i, offset := range []time.Duration{-time.Second, -20 * time.Millisecond, 0, 20 * time.Millisecond} {
		s, path := g.Saga(a), fmt.Sprint("/docs/short", i)
		lab.Write(path, `{"n":1}`)
		root := s.Do(harness.Put(fmt.Sprint("/docs/shortroot", i), `{"n":1}`))
		s.Do(harness.Put(path, `{"n":2}`), root.Checkpoint)
		b := harness.RollbackBody{ID: harness.RollbackID(i + 2), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
		s.Begun(b)
		var doc harness.WaitingDoc
		harness.EventuallyWithin(t, harness.Patience, "a question, or the end", func() bool {
			doc = harness.Document[harness.WaitingDoc](t, s.Look(b.ID))
			return doc.Waits != "" || doc.Status != ""
		})
		if doc.Waits != "" {
			shown := harness.Document[harness.EscalationDoc](t, as(0, harness.Request{Method: "GET", Path: all + doc.Waits}))
			<-time.After(time.Until(shown.Deadline.Add(offset)))
			got := decide(0, doc.Waits, "approve", doc.PlanHash)
			end := harness.Document[harness.EscalationDoc](t, as(0, harness.Request{Method: "GET", Path: all + doc.Waits}))
			switch {
			case got.Status == http.StatusOK && end.Status == "approved":
			case got.Slug() == "decision-void" && reason(got) == "expired" && end.Status == "expired":
			default:
				t.Errorf("%s: %d %s, then %s", offset, got.Status, got.Body, end.Status)
			}
			if done := s.Finished(b.ID); end.Status == "expired" && (done.Status != "escalated" || !done.TimedOut) {
				t.Errorf("%s: %+v", offset, done)
			}
			if end.Status == "expired" { // approved, it may have been undone, or be too late
				lab.WantDoc(path, `{"n":2}`)
			}
		}
	}
}
