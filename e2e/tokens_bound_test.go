package e2e

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
	make    func(c *tokenCase) request
}

const (
	cascadePath = "/.well-known/cascade/"
	tokenHost   = "gateway.example.com"
)

// tokenUses are all rows.
var tokenUses = []tokenUse{
	{"call", "a guarded call", "ask aerr error end plan decide hold", "its key and fingerprint", false, func(c *tokenCase) request {
		return put("/docs/"+c.id, c.text)
	}},
	{"read of the upstream", "an unguarded request", "ask aerr error end", "method, host and URL", false, func(c *tokenCase) request {
		return request{method: "GET", path: "/docs/read"}
	}},
	{"body", "an unguarded request with a body", "ask aerr error end plan decide hold", "itself: nothing tells a retry from another request", true, func(c *tokenCase) request {
		return request{method: "GET", path: "/docs/read", body: cmp.Or(c.text, "{}")}
	}},
	{"read of the gateway", "GET of any other path of the gateway", "ask aerr error end plan decide hold", "method, host and URL", false, func(c *tokenCase) request {
		return request{method: "GET", path: c.reads()[int(c.id[0])%len(c.reads())]}
	}},
	{"checkpoint", "GET `checkpoints/{jti}`", "ask aerr error end plan decide hold", "method, host and URL", false, func(c *tokenCase) request {
		return request{method: "GET", path: cascadePath + "checkpoints/" + c.step.checkpoint + "?wait=0s"}
	}},
	{"dry run", "POST `rollback` with `dry_run`", "ask aerr", "phase `dry`, body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "rollback", body: c.body(`, "dry_run": true`)}
	}},
	{"dry prepare", "POST `rollback/prepare` with `dry_run`", "ask aerr", "phase `dry`, body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "rollback/prepare", body: c.body(`, "scope": "single", "dry_run": true`)}
	}},
	{"prepare", "POST `rollback/prepare`", "ask aerr", "phase `prepare`, body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "rollback/prepare", body: c.body("")}
	}},
	{"release", "POST `rollback/prepare`, phase `release`", "ask aerr", "phase `release`, body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "rollback/prepare", body: c.body(`, "phase": "release"`)}
	}},
	{"execute", "POST `rollback`", "ask aerr", "phase `execute`, body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "rollback", body: c.body(`, "phase": "execute"`)}
	}},
	{"execute, ATD", "POST `/.well-known/atd/rollback`", "ask", "phase `execute`, body", false, func(c *tokenCase) request {
		return request{path: "/.well-known/atd/rollback", body: "{}"}
	}},
	{"execute, AERR", "POST `/aerr/rollback`", "aerr", "phase `execute`, body", false, func(c *tokenCase) request {
		return request{path: "/aerr/rollback", body: c.body("")}
	}},
	{"errors", "POST `errors`", "error", "this endpoint: the token is the body", false, func(*tokenCase) request {
		return request{path: cascadePath + "errors", reader: nothing{}}
	}},
	{"end", "POST `workflows/{id}/complete`", "end", "this endpoint: the token is the body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "workflows/" + c.wid + "/complete", reader: nothing{}}
	}},
	{"plan", "PUT `workflows/{id}`", "plan", "workflow, body", false, func(c *tokenCase) request {
		return request{method: http.MethodPut, path: cascadePath + "workflows/" + c.wid, body: c.text, header: headers{"Content-Type": planType}}
	}},
	{"decision", "POST `escalations/{id}/decision`", "decide", "body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "escalations/" + c.asked + "/decision", body: c.text}
	}},
	{"hold", "POST `workflows/{id}/holds`", "hold", "body", false, func(c *tokenCase) request {
		return request{path: cascadePath + "workflows/" + c.wid + "/holds", body: c.text}
	}},
}

// tokenKinds are the kinds of tokens that newTokenCase issues.
var tokenKinds = []string{"ask", "aerr", "error", "end", "plan", "decide", "hold"}

func tokenUseOf(name string) tokenUse {
	return tokenUses[slices.IndexFunc(tokenUses, func(u tokenUse) bool { return u.name == name })]
}

// tokenCase is a token that is presented twice.
type tokenCase struct {
	*saga
	kind          string
	id, text      string // text is the body that the token of a kind with inp_hash names
	asked         string // escalation of the kind "decide"
	step          sagaStep
	token         *ect.Token
	first, second tokenUse
	answer        reply
}

// reads are paths of the gateway at which the agent may read.
func (c *tokenCase) reads() []string {
	var paths []string
	for _, path := range []string{
		"ledger/head", "ledger/consistency?old=1&new=1", "ledger/entries?jti=" + c.step.checkpoint, "ledger/proof?index=0", "workflows/" + c.wid,
		"circuits", "cascades?wid=" + c.wid, "executions/" + url.PathEscape(c.step.header.Get("Execution-Id")), "escalations",
	} {
		paths = append(paths, cascadePath+path)
	}
	return append(paths, "/.well-known/aerr/circuits", "/aerr/circuits")
}

// body is that of a request for a rollback; another phase, and so another use, has another id.
func (c *tokenCase) body(more string) string {
	return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q%s}`, uuid.NewSHA1(uuid.NameSpaceURL, []byte(c.id+more)), c.step.checkpoint, more)
}

// send presents the token.
func (c *tokenCase) send(use tokenUse) reply {
	c.t.Helper()
	r := use.make(c)
	r.host = tokenHost // also after a restart, at another port
	return c.g.call(with(c.token, r))
}

func newTokenCase(s *saga, kind string, first, second tokenUse) *tokenCase {
	s.t.Helper()
	return newPhaseCase(s, kind, "", first, second)
}

// newPhaseCase has a token that says what it is for, as those of gateways do.
func newPhaseCase(s *saga, kind, phase string, first, second tokenUse) *tokenCase {
	s.t.Helper()
	charged := charge(1)
	charged.host = tokenHost
	c := &tokenCase{saga: s, kind: kind, id: uuid.NewString(), first: first, second: second, step: s.do(charged)}
	claims := ect.Claims{Workflow: s.wid, Parents: []string{c.step.checkpoint}}
	switch kind {
	case "ask":
		claims.Action, claims.Ext = "rollback_request", new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, false)
	case "aerr":
		claims.Action, claims.Parents = "rollback_request", []string{s.reports(c.step.checkpoint)}
		claims.Ext = new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, false)
	case "error":
		claims.Action, claims.Ext = "error", new(ect.ExtBuilder).Text(ect.MemberSeverity, "info").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, c.step.checkpoint)
	case "end":
		claims.Action, claims.Ext = "workflow_complete", new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "flow").Text(ect.MemberTerminalStatus, "success")
	case "plan":
		c.text = strings.Replace(tripPlan, "the flow", c.id, 1)
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
			claims.Ext = claims.Ext.Text(ect.MemberCheckpointID, c.step.checkpoint)
		}
		if body := first.make(c).body; body != "" {
			claims.Input = ect.Sum([]byte(body))
		}
	}
	c.token = s.a.issue(claims)
	return c
}

// question is an escalation that waits for a decision, and the hash of what it proposes.
func (c *tokenCase) question() (id, hash string) {
	c.t.Helper()
	var doc struct {
		Escalation string `json:"escalation_id"`
		Proposal   struct {
			Hash string `json:"request_hash"`
		}
	}
	read := func(r request) {
		r.host = tokenHost
		if got := c.g.call(r); json.Unmarshal([]byte(got.body), &doc) != nil {
			c.t.Fatalf("%s: %d %s", r.path, got.status, got.body)
		}
	}
	read(request{path: "/approved", id: c.id, header: ann})
	read(with(c.a.issue(ect.Claims{Action: "look"}), request{method: "GET", path: cascadePath + "escalations/" + doc.Escalation}))
	return doc.Escalation, doc.Proposal.Hash
}

// tokenSetup is a gateway at which agent may do whatever tokenUses has.
func tokenSetup(t *testing.T, a *agent, lab *restLab) setup {
	return setup{
		app:  trusting(t, a) + "\nrollback {\n coordinators " + a.issuer.Identity() + "\n rate 100000\n reservation 10m\n }",
		site: "agent_proxy " + lab.addr + " {" + tokenActions(a) + "\n}",
	}
}

// tokenActions are sagaActions, and one that the agent approves.
func tokenActions(a *agent) string {
	return sagaActions + "\n operators issuer:" + a.issuer.Identity() + "\n action approved {\n match path /approved\n approve {\n within 1h\n }\n }"
}

// C-6.1-a, P3, P5: a token is bound at its first use, durably, to the endpoint, the phase and the body.
// The same once more is a retry with the same result; whatever else is asked for with it is refused, and
// done at no time: neither before a restart of the gateway nor after it. So a token that has looked never acts.
func TestTokenIsBoundAtItsFirstUse(t *testing.T) {
	a, lab := newAgent(t, "a"), newRestLab(t)
	setting := tokenSetup(t, a, lab)
	g := launch(t, setting)
	lab.write("/docs/read", "1")
	var all []*tokenCase
	for _, kind := range tokenKinds {
		for _, first := range tokenUses {
			for _, second := range tokenUses {
				if !slices.Contains(strings.Fields(first.kinds), kind) || !slices.Contains(strings.Fields(second.kinds), kind) {
					continue
				}
				c := newTokenCase(g.saga(a), kind, first, second)
				if c.answer = c.send(first); c.answer.status/100 != 2 {
					t.Fatalf("%s, %s: %d %s", kind, first.name, c.answer.status, c.answer.body)
				}
				all = append(all, c)
				c.again(t, lab, kind+", in one life")
			}
		}
	}
	if len(all) < 170 {
		t.Errorf("%d pairs", len(all))
	}
	stop(t)
	setting.store = g.store
	g = launch(t, setting)
	for _, c := range all {
		c.g = g
		c.again(t, lab, "after a restart")
	}
}

// again presents the token for its second use.
func (c *tokenCase) again(t *testing.T, lab *restLab, when string) {
	t.Helper()
	before := len(lab.all("POST /*", "")) + len(lab.all("PUT /docs/*", ""))
	var got reply
	eventually(t, when+": "+c.first.name+", then "+c.second.name+": no call of the workflow runs, at this gateway too", func() bool {
		got = c.send(c.second)
		return got.status != http.StatusConflict || got.slug() != "workflow-running"
	})
	switch {
	case c.first.name == c.second.name && c.first.once:
		got.refusedFor(t, http.StatusForbidden, "replayed")
	case c.first.name == c.second.name:
		if got.status/100 != 2 || c.first.name != "plan" && got.status != c.answer.status && c.first.name != "errors" && c.first.name != "end" {
			t.Errorf("%s, %s again: %d %s, first %d", when, c.first.name, got.status, got.body, c.answer.status)
		}
	case c.first.name == "call" && c.second.name == "errors":
		// The call has reported it: it is recorded already, and nothing is done.
		if got.status != http.StatusOK {
			t.Errorf("%s: %d %s", when, got.status, got.body)
		}
	case c.second.name == "call" && c.first.name == "prepare" && got.slug() == "workflow-paused": // by the reservation
	case c.second.name == "call" && c.first.name == "plan" && got.slug() == "node-unknown": // in the plan
	default:
		got.refusedFor(t, http.StatusForbidden, "replayed")
	}
	if after := len(lab.all("POST /*", "")) + len(lab.all("PUT /docs/*", "")); after != before {
		t.Errorf("%s: the token of a %s is good for a %s", when, c.first.name, c.second.name)
	}
	if t.Failed() {
		t.Fatalf("%s: %s, then %s", when, c.first.name, c.second.name)
	}
}

// C-6.1-a: the token of a read is good for no other path of the gateway, before and after a restart.
func TestTokensReadAtOnePath(t *testing.T) {
	a, lab := newAgent(t, "a"), newRestLab(t)
	setting := tokenSetup(t, a, lab)
	g := launch(t, setting)
	c := newTokenCase(g.saga(a), "ask", tokenUse{}, tokenUse{})
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: c.step.checkpoint, Scope: "single"}
	c.back(asked).want(t, "completed")
	paths := append(c.reads(), cascadePath+"rollback/"+asked.ID, cascadePath+"checkpoints/"+c.step.checkpoint+"?wait=0s")
	tokens := make([]*ect.Token, len(paths))
	read := func(path string, token *ect.Token) reply {
		return c.g.call(with(token, request{method: "GET", path: path, host: tokenHost}))
	}
	look := func(when string) {
		t.Helper()
		for i, token := range tokens {
			for j, path := range paths {
				if got := read(path, token); i == j && got.status != http.StatusOK {
					t.Errorf("%s, %s: %d %s", when, path, got.status, got.body)
				} else if i != j {
					got.refusedFor(t, http.StatusForbidden, "replayed")
				}
			}
		}
	}
	for i, path := range paths {
		tokens[i] = a.issue(ect.Claims{Workflow: c.wid, Action: "look", Parents: []string{c.step.checkpoint}})
		if got := read(path, tokens[i]); got.status != http.StatusOK {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	look("in one life")
	stop(t)
	setting.store = g.store
	c.g = launch(t, setting)
	look("after a restart")
}

// C-6.1-a: a token that says what it is for (`agent_guard.phase`), as those of gateways do, is good for that alone.
func TestTokensThatSayTheirPhase(t *testing.T) {
	a, lab := newAgent(t, "a"), newRestLab(t)
	g := launch(t, tokenSetup(t, a, lab))
	lab.write("/docs/read", "1")
	look := func(name, path string) tokenUse {
		return tokenUse{name: name, kinds: "ask", make: func(c *tokenCase) request {
			return request{method: "GET", path: cascadePath + strings.NewReplacer("{wid}", c.wid, "{id}", rollbackID(1)).Replace(path)}
		}}
	}
	uses := append(slices.DeleteFunc(slices.Clone(tokenUses), func(u tokenUse) bool { return u.name == "read of the gateway" }),
		look("head", "ledger/head"), look("workflow", "workflows/{wid}"), look("status", "rollback/{id}"), look("tokens", "workflows/{wid}/tokens"), look("circuits", "circuits"))
	fits := map[string][]string{
		"dry": {"dry run", "dry prepare"}, "prepare": {"prepare"}, "release": {"release"}, "execute": {"execute", "execute, ATD", "execute, AERR"},
		"checkpoint": {"checkpoint"}, "status": {"status"}, "read": {"tokens", "circuits"}, "hold": {"hold"}, "other": nil,
	}
	s := g.saga(a)
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: s.do(charge(1)).checkpoint, Scope: "single"}).want(t, "completed")
	for phase, good := range fits {
		for _, use := range uses {
			kinds := strings.Fields(use.kinds)
			c := newPhaseCase(s, kinds[len(kinds)-1], phase, use, use)
			before := len(lab.all("POST /*", "")) + len(lab.all("PUT /docs/*", ""))
			got := c.send(use)
			if slices.Contains(good, use.name) {
				if got.status/100 != 2 {
					t.Errorf("%s, %s: %d %s", phase, use.name, got.status, got.body)
				}
				continue
			}
			if got.status != http.StatusForbidden {
				t.Errorf("%s, %s: %d %s", phase, use.name, got.status, got.body)
			}
			if after := len(lab.all("POST /*", "")) + len(lab.all("PUT /docs/*", "")); after != before {
				t.Errorf("a token with the phase %s is good for a %s", phase, use.name)
			}
		}
	}
}

// C-6.1-a: a token that is spent asks nobody for an approval.
func TestSpentTokensAskNobody(t *testing.T) {
	a, lab := newAgent(t, "a"), newRestLab(t)
	s := launch(t, tokenSetup(t, a, lab)).saga(a)
	list := func() reply {
		return s.g.call(with(a.issue(ect.Claims{Action: "look"}), request{method: "GET", path: cascadePath + "escalations", host: tokenHost}))
	}
	spent := a.issue(ect.Claims{Workflow: s.wid, Action: "look"})
	before := list()
	for _, r := range []request{{method: "GET", path: cascadePath + "ledger/head"}, {path: "/approved", body: "{}"}, {path: "/approved", body: `{"to":1}`}} {
		r.host = tokenHost
		if got := s.g.call(with(spent, r)); r.method == "" {
			got.refusedFor(t, http.StatusForbidden, "replayed")
		} else if got.status != http.StatusOK {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	if after := list(); before.status != http.StatusOK || after.body != before.body {
		t.Errorf("before: %d %s\nafter: %d %s", before.status, before.body, after.status, after.body)
	}
}

// docs/threat_model.md has the same table.
func TestTokenUsesAreWritten(t *testing.T) {
	text, err := os.ReadFile("../docs/threat_model.md")
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
	a, lab := newAgent(t, "a"), newRestLab(t)
	g := launch(t, setup{app: trusting(t, a) + "\nrollback {\n rate 100000\n }", site: lab.site()})
	for _, names := range [][2]string{{"dry run", "execute"}, {"checkpoint", "execute"}, {"call", "execute"}, {"prepare", "execute"}} {
		for range 8 {
			c := newTokenCase(g.saga(a), "ask", tokenUseOf(names[0]), tokenUseOf(names[1]))
			var wg sync.WaitGroup
			var got [2]reply
			for i, of := range []tokenUse{c.first, c.second} {
				wg.Go(func() { got[i] = c.send(of) })
			}
			wg.Wait()
			if done := got[0].status/100 == 2; done == (got[1].status/100 == 2) {
				t.Errorf("%v: %d %s and %d %s", names, got[0].status, got[0].body, got[1].status, got[1].body)
			}
		}
	}
}
