//go:build unix

package e2e

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

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Interaction with HITL", cases 3 and e: a cascade pauses before what is of severity critical,
// for its plan, over a reload and a kill. Its workflow waits. An approval carries out what was shown,
// and all of it follows from the decision; a denial leaves everything as it is, and is in the ledger.
func TestProcessCriticalNodeWaits(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, verb := range []string{"approve", "deny"} {
		lab, a := newRestLab(t), newAgent(t, "a")
		site := procNewSite(t, lab.addr)
		site.app = trusting(t, a)
		site.guard = criticalActions
		gateway := site.start(t)
		s, other := site.gateway(t).saga(a), site.gateway(t).saga(a)
		lab.write("/docs/x", `{"n":1}`)
		root := s.do(put("/docs/x", `{"n":2}`))
		charged := s.do(charge(1), root.checkpoint)
		b := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
		doc := s.waits(b)
		if refused := s.try(charge(2)); refused.slug() != "workflow-paused" || refused.escalation(t) != doc.Waits {
			t.Errorf("%d %s", refused.status, refused.body)
		}
		other.do(charge(3))
		gateway.kill()
		gateway = site.start(t)
		site.global = "grace_period 10s" // another configuration
		gateway.reload(t)
		s.g.reloads = true
		if again := document[waitingDoc](t, s.look(b.ID)); again.Waits != doc.Waits || again.PlanHash != doc.PlanHash {
			t.Errorf("%+v, before %+v", again, doc)
		}
		lab.arrived("POST /refunds", 0)
		shown := procDocument[escalationDoc](t, site.operate(t, "escalations", "show", doc.Waits, "-o", "json").says(t))
		if shown.Level != 1 || shown.Cause != "critical_node" || shown.Proposal.Kind != "continue-rollback" || shown.Proposal.PlanHash != doc.PlanHash || !shown.Held ||
			shown.Requester != "issuer:"+a.issuer.Identity() || !strings.Contains(shown.Proposal.Text, charged.checkpoint) {
			t.Errorf("%+v", shown)
		}
		if text := site.operate(t, "escalations", "show", doc.Waits).says(t); !strings.Contains(text, doc.PlanHash) {
			t.Errorf("the command does not show the plan's hash: %s", text)
		}
		site.operate(t, "escalations", verb, doc.Waits, "--operator", "ann", "--reason", "seen", "--hash", strings.Repeat("0", 64)).fails(t, "not that of what is proposed now")
		site.decides(t, verb, doc.Waits)
		site.operate(t, "escalations", verb, doc.Waits, "--operator", "bob", "--reason", "me too", "--hash", doc.PlanHash).fails(t, "decided already")
		done := s.finished(b.ID)
		if verb == "approve" {
			done.want(t, "completed")
			lab.wantCharge(charged.id(t), "refunded")
			lab.wantDoc("/docs/x", `{"n":1}`)
			s.do(charge(4))
		} else {
			done.want(t, "escalated", "denied", "denied")
			lab.arrived("POST /refunds", 0)
			lab.wantDoc("/docs/x", `{"n":2}`)
			if refused := s.try(charge(4)); refused.slug() != "workflow-paused" || refused.escalation(t) != doc.Waits {
				t.Errorf("%d %s", refused.status, refused.body)
			}
		}
		tokens := map[string]*ect.Unverified{}
		var opened, decision *ect.Unverified
		site.exported(t, func(token *ect.Unverified) {
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
		if opened == nil || decision == nil || complete == nil || !slices.Contains(opened.Parents(), charged.checkpoint) || !slices.Contains(decision.Parents(), opened.ID()) ||
			!slices.Contains(complete.Parents(), decision.ID()) || strings.Contains(decision.Payload(), "ann") {
			t.Errorf("the trail: %v, %v, %v", opened, decision, complete)
		}
	}
}

// C-4.3.2-h: where a part may not be undone by itself, people are asked for exactly that part. Nothing
// is undone before; a denial leaves everything.
func TestProcessPartialRollbackIsProposed(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = criticalActions
	gateway := site.start(t)
	for i, verb := range []string{"approve", "deny"} {
		s := site.gateway(t).saga(a)
		path := fmt.Sprint("/docs/", verb)
		lab.write(path, `{"n":1}`)
		root := s.do(put(path, `{"n":2}`))
		mail := s.do(request{path: "/mail"}, root.checkpoint)
		b := rollbackBody{ID: rollbackID(i + 1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
		doc := s.waits(b)
		gateway.kill()
		gateway = site.start(t)
		s.g.reloads = true
		shown := procDocument[escalationDoc](t, site.operate(t, "escalations", "show", doc.Waits, "-o", "json").says(t))
		if shown.Level != 2 || shown.Cause != "critical_node" || shown.Proposal.Kind != "partial-rollback" || shown.Proposal.PlanHash != doc.PlanHash ||
			!strings.Contains(shown.Proposal.Text, "stays: checkpoint "+mail.checkpoint) || !strings.Contains(shown.Proposal.Text, "is undone: checkpoint "+root.checkpoint) {
			t.Errorf("%+v", shown)
		}
		lab.wantDoc(path, `{"n":2}`)
		site.decides(t, verb, doc.Waits)
		done := s.finished(b.ID)
		if verb == "approve" {
			done.want(t, "partial", "irreversible")
			lab.wantDoc(path, `{"n":1}`)
		} else {
			done.want(t, "escalated", "irreversible", "denied")
			lab.wantDoc(path, `{"n":2}`)
		}
	}
}

// C-4.3.2-h: `critical` at a gateway that takes part counts as it does here, by the checkpoint that it has
// signed: people are asked before the rest is undone without it.
func TestProcessCriticalAtAParticipant(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := layAskingStar(t)
	c.sites[1].guard = criticalActions
	s := c.begin().saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(put("/docs/x", `{"n":2}`))
	mail := c.direct(1, request{path: "/mail"}, root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	doc := s.prepare(asked, http.StatusConflict)
	if len(doc.Steps) != 2 || doc.Steps[0].Checkpoint != mail.checkpoint || doc.Steps[0].Critical != "action" {
		t.Errorf("%+v", doc.Steps)
	}
	c.sites[0].decides(t, "deny", s.waits(asked).Waits)
	s.finished(asked.ID).want(t, "escalated", "irreversible", "denied")
	c.lab.wantDoc("/docs/x", `{"n":2}`)
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
	lab, a := newRestLab(t), newAgent(t, "a")
	users := ""
	for i := range 8 {
		users += fmt.Sprintf("u%d %s\n", i, hash)
	}
	g := launch(t, setup{
		app: trusting(t, a) + "\n hitl {\n webhook " + hook.URL + " {\n secret whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n }\n page https://ops.example.com/\n }",
		site: "basic_auth /.well-known/cascade/escalations/* {\n" + users + "}\n agent_proxy " + lab.addr + " {\n operators user:u0 user:u1 user:u2 user:u3 user:u4 user:u5 user:u6 user:u7\n" +
			" action short {\n match path /docs/short*\n restore\n checkpoint_ttl 2s\n severity critical\n }\n" + criticalActions + "\n}",
	})
	as := func(user int, r request) reply {
		if r.header == nil {
			r.header = map[string]string{}
		}
		r.header["Authorization"] = "Basic " + base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "u%d:secret", user))
		return g.call(r)
	}
	const all = "/.well-known/cascade/escalations/"
	decide := func(user int, id, verb, hash string) reply {
		body := fmt.Sprintf(`{"decision":%q,"plan_hash":%q,"reason":"seen"}`, verb, hash)
		return as(user, request{path: all + id + "/decision", body: body, header: headers{"Content-Type": "application/json"}})
	}
	reason := func(r reply) string {
		var doc struct{ Reason string }
		if err := json.Unmarshal([]byte(r.body), &doc); err != nil {
			t.Errorf("%v: %s", err, r.body)
		}
		return doc.Reason
	}
	s := g.saga(a)
	lab.write("/docs/x", `{"n":1}`)
	root := s.do(put("/docs/x", `{"n":2}`))
	s.do(charge(1), root.checkpoint)
	b := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	doc := s.waits(b)
	page := strings.TrimPrefix(wait(t, links, "the message"), "https://ops.example.com")
	if seen := as(0, request{method: "GET", path: page}); seen.status != http.StatusOK || !strings.Contains(seen.body, "Plan "+doc.PlanHash) || !strings.Contains(seen.body, "continue-rollback") {
		t.Errorf("%d %s", seen.status, seen.body)
	}
	if shown := document[escalationDoc](t, as(0, request{method: "GET", path: all + doc.Waits})); shown.Proposal.PlanHash != doc.PlanHash {
		t.Errorf("%+v", shown)
	}
	if got := decide(0, doc.Waits, "approve", strings.Repeat("0", 64)); got.slug() != "decision-void" || reason(got) != "changed" {
		t.Errorf("another plan: %d %s", got.status, got.body)
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
		switch r := got.(reply); {
		case r.status == http.StatusOK && winner < 0:
			winner = user
		case r.slug() != "decision-void" || reason(r) != "decided":
			t.Errorf("user %d: %d %s", user, r.status, r.body)
		}
	}
	if got := decide(max(winner, 0), doc.Waits, "approve", doc.PlanHash); got.slug() != "decision-void" || reason(got) != "decided" {
		t.Errorf("again: %d %s", got.status, got.body)
	}
	switch done := s.finished(b.ID); winner % 2 {
	case 0:
		done.want(t, "completed")
	case 1:
		done.want(t, "escalated", "denied", "denied")
	default:
		t.Errorf("nobody's decision counted: %+v", done)
	}

	// Decisions around the deadline: one result each, and nothing is undone without an approval.
	for i, offset := range []time.Duration{-time.Second, -20 * time.Millisecond, 0, 20 * time.Millisecond} {
		s, path := g.saga(a), fmt.Sprint("/docs/short", i)
		lab.write(path, `{"n":1}`)
		root := s.do(put(fmt.Sprint("/docs/shortroot", i), `{"n":1}`))
		s.do(put(path, `{"n":2}`), root.checkpoint)
		b := rollbackBody{ID: rollbackID(i + 2), Checkpoint: root.checkpoint, Scope: "sub_dag"}
		s.begun(b)
		var doc waitingDoc
		eventuallyWithin(t, patience, "a question, or the end", func() bool {
			doc = document[waitingDoc](t, s.look(b.ID))
			return doc.Waits != "" || doc.Status != ""
		})
		if doc.Waits != "" {
			shown := document[escalationDoc](t, as(0, request{method: "GET", path: all + doc.Waits}))
			<-time.After(time.Until(shown.Deadline.Add(offset)))
			got := decide(0, doc.Waits, "approve", doc.PlanHash)
			end := document[escalationDoc](t, as(0, request{method: "GET", path: all + doc.Waits}))
			switch {
			case got.status == http.StatusOK && end.Status == "approved":
			case got.slug() == "decision-void" && reason(got) == "expired" && end.Status == "expired":
			default:
				t.Errorf("%s: %d %s, then %s", offset, got.status, got.body, end.Status)
			}
			if done := s.finished(b.ID); end.Status == "expired" && (done.Status != "escalated" || !done.TimedOut) {
				t.Errorf("%s: %+v", offset, done)
			}
			if end.Status == "expired" { // approved, it may have been undone, or be too late
				lab.wantDoc(path, `{"n":2}`)
			}
		}
	}
}
