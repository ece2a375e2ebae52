package evidence

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// tokenUse is a row of the table in docs/threat_model.md: where a token can be presented, and what it is
// bound to then.
type tokenUse struct {
	name    string
	request string // as the document has it
	kinds   string // of tokens that are good for it, see newTokenCase
	bound   string // what it is bound to
	once    bool   // it is good once, also for the same request
	make    func(c *tokenCase) harness.Request
}

const (
	cascadePath = "/.well-known/cascade/"
	tokenHost   = "gateway.example.com"
)

// tokenUses are all rows.
var tokenUses = []tokenUse{
	{"call", "a guarded call", "ask aerr error end plan decide hold", "its key and fingerprint", false, func(c *tokenCase) harness.Request {
		return harness.Put("/docs/"+c.id, c.text)
	}},
	{"read of the upstream", "an unguarded request", "ask aerr error end", "method, host and URL", false, func(c *tokenCase) harness.Request {
		return harness.Request{Method: "GET", Path: "/docs/read"}
	}},
	{"body", "an unguarded request with a body", "ask aerr error end plan decide hold", "itself: nothing tells a retry from another request", true, func(c *tokenCase) harness.Request {
		return harness.Request{Method: "GET", Path: "/docs/read", Body: cmp.Or(c.text, "{}")}
	}},
	{"read of the gateway", "GET of any other path of the gateway", "ask aerr error end plan decide hold", "method, host and URL", false, func(c *tokenCase) harness.Request {
		return harness.Request{Method: "GET", Path: c.reads()[int(c.id[0])%len(c.reads())]}
	}},
	{"checkpoint", "GET `checkpoints/{jti}`", "ask aerr error end plan decide hold", "method, host and URL", false, func(c *tokenCase) harness.Request {
		return harness.Request{Method: "GET", Path: cascadePath + "checkpoints/" + c.step.Checkpoint + "?wait=0s"}
	}},
	{"dry run", "POST `rollback` with `dry_run`", "ask aerr", "phase `dry`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "rollback", Body: c.body(`, "dry_run": true`)}
	}},
	{"dry prepare", "POST `rollback/prepare` with `dry_run`", "ask aerr", "phase `dry`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "rollback/prepare", Body: c.body(`, "scope": "single", "dry_run": true`)}
	}},
	{"prepare", "POST `rollback/prepare`", "ask aerr", "phase `prepare`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "rollback/prepare", Body: c.body("")}
	}},
	{"release", "POST `rollback/prepare`, phase `release`", "ask aerr", "phase `release`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "rollback/prepare", Body: c.body(`, "phase": "release"`)}
	}},
	{"execute", "POST `rollback`", "ask aerr", "phase `execute`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "rollback", Body: c.body(`, "phase": "execute"`)}
	}},
	{"execute, ATD", "POST `/.well-known/atd/rollback`", "ask", "phase `execute`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: "/.well-known/atd/rollback", Body: "{}"}
	}},
	{"execute, AERR", "POST `/aerr/rollback`", "aerr", "phase `execute`, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: "/aerr/rollback", Body: c.body("")}
	}},
	{"errors", "POST `errors`", "error", "this endpoint: the token is the body", false, func(*tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "errors", Reader: harness.Nothing{}}
	}},
	{"end", "POST `workflows/{id}/complete`", "end", "this endpoint: the token is the body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "workflows/" + c.Wid + "/complete", Reader: harness.Nothing{}}
	}},
	{"plan", "PUT `workflows/{id}`", "plan", "workflow, body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Method: http.MethodPut, Path: cascadePath + "workflows/" + c.Wid, Body: c.text, Header: harness.Headers{"Content-Type": harness.PlanType}}
	}},
	{"decision", "POST `escalations/{id}/decision`", "decide", "body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "escalations/" + c.asked + "/decision", Body: c.text}
	}},
	{"hold", "POST `workflows/{id}/holds`", "hold", "body", false, func(c *tokenCase) harness.Request {
		return harness.Request{Path: cascadePath + "workflows/" + c.Wid + "/holds", Body: c.text}
	}},
}

// tokenKinds are the kinds of tokens that newTokenCase issues.
var tokenKinds = []string{"ask", "aerr", "error", "end", "plan", "decide", "hold"}

func tokenUseOf(name string) tokenUse {
	return tokenUses[slices.IndexFunc(tokenUses, func(u tokenUse) bool { return u.name == name })]
}

// tokenCase is a token that is presented twice.
type tokenCase struct {
	*harness.Saga
	kind          string
	id, text      string // text is the body that the token of a kind with inp_hash names
	asked         string // escalation of the kind "decide"
	step          harness.SagaStep
	token         *ect.Token
	first, second tokenUse
	answer        harness.Reply
}

// reads are paths of the gateway at which the agent may read.
func (c *tokenCase) reads() []string {
	var paths []string
	for _, path := range []string{
		"ledger/head", "ledger/consistency?old=1&new=1", "ledger/entries?jti=" + c.step.Checkpoint, "ledger/proof?index=0", "workflows/" + c.Wid,
		"circuits", "cascades?wid=" + c.Wid, "executions/" + url.PathEscape(c.step.Header.Get("Execution-Id")), "escalations",
	} {
		paths = append(paths, cascadePath+path)
	}
	return append(paths, "/.well-known/aerr/circuits", "/aerr/circuits")
}

// body is that of a request for a rollback; another phase, and so another use, has another id.
func (c *tokenCase) body(more string) string {
	return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q%s}`, uuid.NewSHA1(uuid.NameSpaceURL, []byte(c.id+more)), c.step.Checkpoint, more)
}

// send presents the token.
func (c *tokenCase) send(use tokenUse) harness.Reply {
	c.T.Helper()
	r := use.make(c)
	r.Host = tokenHost // also after a restart, at another port
	return c.G.Call(harness.With(c.token, r))
}

func newTokenCase(s *harness.Saga, kind string, first, second tokenUse) *tokenCase {
	s.T.Helper()
	return newPhaseCase(s, kind, "", first, second)
}

// newPhaseCase has a token that says what it is for, as those of gateways do.
func newPhaseCase(s *harness.Saga, kind, phase string, first, second tokenUse) *tokenCase {
	s.T.Helper()
	charged := harness.Charge(1)
	charged.Host = tokenHost
	c := &tokenCase{Saga: s, kind: kind, id: uuid.NewString(), first: first, second: second, step: s.Do(charged)}
	claims := ect.Claims{Workflow: s.Wid, Parents: []string{c.step.Checkpoint}}
	switch kind {
	case "ask":
		claims.Action, claims.Ext = "rollback_request", new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, false)
	case "aerr":
		claims.Action, claims.Parents = "rollback_request", []string{s.Reports(c.step.Checkpoint)}
		claims.Ext = new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, false)
	case "error":
		claims.Action, claims.Ext = "error", new(ect.ExtBuilder).Text(ect.MemberSeverity, "info").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, c.step.Checkpoint)
	case "end":
		claims.Action, claims.Ext = "workflow_complete", new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "flow").Text(ect.MemberTerminalStatus, "success")
	case "plan":
		c.text = strings.Replace(harness.TripPlan, "the flow", c.id, 1)
	case "decide":
		var hash string
		c.asked, hash = c.question()
		c.text = fmt.Sprintf(`{"decision": "approve", "escalation_id": %q, "request_hash": %q}`, c.asked, hash)
	case "hold":
		c.text = fmt.Sprintf(`{"escalation_id": %q, "opened": "2026-01-01T00:00:00Z", "state": "lifted", "level": "pause", "cause": "rollback_partial"}`, c.id)
	}
	if c.text != "" {
		claims.Input = ect.Sum([]byte(c.text))
	}
	if phase != "" {
		if claims.Ext == nil {
			claims.Ext = new(ect.ExtBuilder)
		}
		claims.Ext = claims.Ext.Text("agent_guard.phase", phase)
		if kind != "error" {
			claims.Ext = claims.Ext.Text(ect.MemberCheckpointID, c.step.Checkpoint)
		}
		if body := first.make(c).Body; body != "" {
			claims.Input = ect.Sum([]byte(body))
		}
	}
	c.token = s.A.Issue(claims)
	return c
}

// question is an escalation that waits for a decision, and the hash of what it proposes.
func (c *tokenCase) question() (id, hash string) {
	c.T.Helper()
	var doc struct {
		Escalation string `json:"escalation_id"`
		Proposal   struct {
			Hash string `json:"request_hash"`
		}
	}
	read := func(r harness.Request) {
		r.Host = tokenHost
		if got := c.G.Call(r); json.Unmarshal([]byte(got.Body), &doc) != nil {
			c.T.Fatalf("%s: %d %s", r.Path, got.Status, got.Body)
		}
	}
	read(harness.Request{Path: "/approved", Id: c.id, Header: harness.Ann})
	read(harness.With(c.A.Issue(ect.Claims{Action: "look"}), harness.Request{Method: "GET", Path: cascadePath + "escalations/" + doc.Escalation}))
	return doc.Escalation, doc.Proposal.Hash
}

// C-6.1-a, P3, P5: a token is bound at its first use, durably, to the endpoint, the phase and the body.
// The same once more is a retry with the same result; whatever else is asked for with it is refused, and
// done at no time: neither before a restart of the gateway nor after it. So a token that has looked never acts.
func TestTokenIsBoundAtItsFirstUse(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	setting := harness.TokenSetup(t, a, lab)
	g := harness.Launch(t, setting)
	lab.Write("/docs/read", "1")
	var all []*tokenCase
	for _, kind := range tokenKinds {
		for _, first := range tokenUses {
			for _, second := range tokenUses {
				if !slices.Contains(strings.Fields(first.kinds), kind) || !slices.Contains(strings.Fields(second.kinds), kind) {
					continue
				}
				c := newTokenCase(g.Saga(a), kind, first, second)
				if c.answer = c.send(first); c.answer.Status/100 != 2 {
					t.Fatalf("%s, %s: %d %s", kind, first.name, c.answer.Status, c.answer.Body)
				}
				all = append(all, c)
				c.again(t, lab, kind+", in one life")
			}
		}
	}
	if len(all) < 170 {
		t.Errorf("%d pairs", len(all))
	}
	harness.Stop(t)
	setting.Store = g.Store
	g = harness.Launch(t, setting)
	for _, c := range all {
		c.G = g
		c.again(t, lab, "after a restart")
	}
}

// again presents the token for its second use.
func (c *tokenCase) again(t *testing.T, lab *harness.RestLab, when string) {
	t.Helper()
	before := len(lab.All("POST /*", "")) + len(lab.All("PUT /docs/*", ""))
	var got harness.Reply
	harness.Eventually(t, when+": "+c.first.name+", then "+c.second.name+": no call of the workflow runs, at this gateway too", func() bool {
		got = c.send(c.second)
		return got.Status != http.StatusConflict || got.Slug() != "workflow-running"
	})
	switch {
	case c.first.name == c.second.name && c.first.once:
		got.RefusedFor(t, http.StatusForbidden, "replayed")
	case c.first.name == c.second.name:
		if got.Status/100 != 2 || c.first.name != "plan" && got.Status != c.answer.Status && c.first.name != "errors" && c.first.name != "end" {
			t.Errorf("%s, %s again: %d %s, first %d", when, c.first.name, got.Status, got.Body, c.answer.Status)
		}
	case c.first.name == "call" && c.second.name == "errors":
		// The call has reported it: it is recorded already, and nothing is done.
		if got.Status != http.StatusOK {
			t.Errorf("%s: %d %s", when, got.Status, got.Body)
		}
	case c.second.name == "call" && c.first.name == "prepare" && got.Slug() == "workflow-paused": // by the reservation
	case c.second.name == "call" && c.first.name == "plan" && got.Slug() == "node-unknown": // in the plan
	default:
		got.RefusedFor(t, http.StatusForbidden, "replayed")
	}
	if after := len(lab.All("POST /*", "")) + len(lab.All("PUT /docs/*", "")); after != before {
		t.Errorf("%s: the token of a %s is good for a %s", when, c.first.name, c.second.name)
	}
	if t.Failed() {
		t.Fatalf("%s: %s, then %s", when, c.first.name, c.second.name)
	}
}

// C-6.1-a: the token of a read is good for no other path of the gateway, before and after a restart.
func TestTokensReadAtOnePath(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	setting := harness.TokenSetup(t, a, lab)
	g := harness.Launch(t, setting)
	c := newTokenCase(g.Saga(a), "ask", tokenUse{}, tokenUse{})
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: c.step.Checkpoint, Scope: "single"}
	c.Back(asked).Want(t, "completed")
	paths := append(c.reads(), cascadePath+"rollback/"+asked.ID, cascadePath+"checkpoints/"+c.step.Checkpoint+"?wait=0s")
	tokens := make([]*ect.Token, len(paths))
	read := func(path string, token *ect.Token) harness.Reply {
		return c.G.Call(harness.With(token, harness.Request{Method: "GET", Path: path, Host: tokenHost}))
	}
	look := func(when string) {
		t.Helper()
		for i, token := range tokens {
			for j, path := range paths {
				if got := read(path, token); i == j && got.Status != http.StatusOK {
					t.Errorf("%s, %s: %d %s", when, path, got.Status, got.Body)
				} else if i != j {
					got.RefusedFor(t, http.StatusForbidden, "replayed")
				}
			}
		}
	}
	for i, path := range paths {
		tokens[i] = a.Issue(ect.Claims{Workflow: c.Wid, Action: "look", Parents: []string{c.step.Checkpoint}})
		if got := read(path, tokens[i]); got.Status != http.StatusOK {
			t.Errorf("%s: %d %s", path, got.Status, got.Body)
		}
	}
	look("in one life")
	harness.Stop(t)
	setting.Store = g.Store
	c.G = harness.Launch(t, setting)
	look("after a restart")
}

// C-6.1-a: a token that says what it is for (`agent_guard.phase`), as those of gateways do, is good for that alone.
func TestTokensThatSayTheirPhase(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	g := harness.Launch(t, harness.TokenSetup(t, a, lab))
	lab.Write("/docs/read", "1")
	look := func(name, path string) tokenUse {
		return tokenUse{name: name, kinds: "ask", make: func(c *tokenCase) harness.Request {
			return harness.Request{Method: "GET", Path: cascadePath + strings.NewReplacer("{wid}", c.Wid, "{id}", harness.RollbackID(1)).Replace(path)}
		}}
	}
	uses := append(slices.DeleteFunc(slices.Clone(tokenUses), func(u tokenUse) bool { return u.name == "read of the gateway" }),
		look("head", "ledger/head"), look("workflow", "workflows/{wid}"), look("status", "rollback/{id}"), look("tokens", "workflows/{wid}/tokens"), look("circuits", "circuits"))
	fits := map[string][]string{
		"dry": {"dry run", "dry prepare"}, "prepare": {"prepare"}, "release": {"release"}, "execute": {"execute", "execute, ATD", "execute, AERR"},
		"checkpoint": {"checkpoint"}, "status": {"status"}, "read": {"tokens", "circuits"}, "hold": {"hold"}, "other": nil,
	}
	s := g.Saga(a)
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: s.Do(harness.Charge(1)).Checkpoint, Scope: "single"}).Want(t, "completed")
	for phase, good := range fits {
		for _, use := range uses {
			kinds := strings.Fields(use.kinds)
			c := newPhaseCase(s, kinds[len(kinds)-1], phase, use, use)
			before := len(lab.All("POST /*", "")) + len(lab.All("PUT /docs/*", ""))
			got := c.send(use)
			if slices.Contains(good, use.name) {
				if got.Status/100 != 2 {
					t.Errorf("%s, %s: %d %s", phase, use.name, got.Status, got.Body)
				}
				continue
			}
			if got.Status != http.StatusForbidden {
				t.Errorf("%s, %s: %d %s", phase, use.name, got.Status, got.Body)
			}
			if after := len(lab.All("POST /*", "")) + len(lab.All("PUT /docs/*", "")); after != before {
				t.Errorf("a token with the phase %s is good for a %s", phase, use.name)
			}
		}
	}
}

// C-6.1-a: a token that is spent asks nobody for an approval.
func TestSpentTokensAskNobody(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	s := harness.Launch(t, harness.TokenSetup(t, a, lab)).Saga(a)
	list := func() harness.Reply {
		return s.G.Call(harness.With(a.Issue(ect.Claims{Action: "look"}), harness.Request{Method: "GET", Path: cascadePath + "escalations", Host: tokenHost}))
	}
	spent := a.Issue(ect.Claims{Workflow: s.Wid, Action: "look"})
	before := list()
	for _, r := range []harness.Request{{Method: "GET", Path: cascadePath + "ledger/head"}, {Path: "/approved", Body: "{}"}, {Path: "/approved", Body: `{"to":1}`}} {
		r.Host = tokenHost
		if got := s.G.Call(harness.With(spent, r)); r.Method == "" {
			got.RefusedFor(t, http.StatusForbidden, "replayed")
		} else if got.Status != http.StatusOK {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	if after := list(); before.Status != http.StatusOK || after.Body != before.Body {
		t.Errorf("before: %d %s\nafter: %d %s", before.Status, before.Body, after.Status, after.Body)
	}
}

// docs/threat_model.md has the same table.
func TestTokenUsesAreWritten(t *testing.T) {
	text, err := os.ReadFile("../../docs/threat_model.md")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for _, use := range tokenUses {
		of := map[string]string{
			"ask aerr": "`rollback_request`, `rollback_start`", "ask": "`rollback_request`", "aerr": "`rollback_request`",
			"error": "`error`", "end": "`workflow_complete`", "plan": "with `inp_hash`",
			"decide": "with `inp_hash`", "hold": "with `inp_hash`, of a coordinator",
		}[use.kinds]
		if of == "" {
			of = "any"
		}
		fmt.Fprintf(&want, "| %s | %s | %s |\n", use.request, of, use.bound)
	}
	if !strings.Contains(string(text), want.String()) {
		t.Errorf("the table is not\n%s", want.String())
	}
}

// Of two uses of one token at the same moment, one comes to something.
func TestTokenIsBoundOnce(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\nrollback {\n rate 100000\n }", Site: lab.Site()})
	for _, names := range [][2]string{{"dry run", "execute"}, {"checkpoint", "execute"}, {"call", "execute"}, {"prepare", "execute"}} {
		for range 8 {
			c := newTokenCase(g.Saga(a), "ask", tokenUseOf(names[0]), tokenUseOf(names[1]))
			var wg sync.WaitGroup
			var got [2]harness.Reply
			for i, of := range []tokenUse{c.first, c.second} {
				wg.Go(func() { got[i] = c.send(of) })
			}
			wg.Wait()
			if done := got[0].Status/100 == 2; done == (got[1].Status/100 == 2) {
				t.Errorf("%v: %d %s and %d %s", names, got[0].Status, got[0].Body, got[1].Status, got[1].Body)
			}
		}
	}
}
