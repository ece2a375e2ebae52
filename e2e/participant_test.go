package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// participant is an agent that speaks the protocol of cascade 4.2.2 and 4.3.2, and lies where it
// is told to. It has one checkpoint for each call.
type participant struct {
	t  *testing.T
	as *agent
	*httptest.Server

	mu          sync.Mutex
	made        map[string]string // its checkpoints: their tokens
	calls       []string          // their ids, in the order of the calls
	undone      map[string]int
	prepared    int
	prepares    string                 // the id of the last token that asked for that
	away        bool                   // to prepare
	parent      func(id string) string // of the checkpoint for a call; nil is the call's
	name        func(id string) string // of the checkpoint in the answer; nil is its own
	rollbackURI string
	said        map[ect.Member]string      // in a completion, in the place of the truth
	complete    func(c *ect.Claims) *agent // who signs a completion, after a change; nil is nobody
	along       func() []string            // tokens that come with a completion; nil is none
	body        string                     // of the answer to execute; empty says that it is completed
	answers     []int                      // to execute, before it does anything
	results     map[string]string          // of rollbacks that it has done: their tokens
	// before answers in its place, if it reports so; path is that below the well-known one.
	before func(path string, w http.ResponseWriter, asked participantAsked) bool
}

// participantAsked is a request of the protocol.
type participantAsked struct {
	ID         string `json:"rollback_id"`
	Checkpoint string `json:"checkpoint_id"`
	Phase      string
	DryRun     bool `json:"dry_run"`
	Token      *ect.Unverified
}

func newParticipant(t *testing.T) *participant {
	p := &participant{t: t, as: newAgent(t, "remote"), made: map[string]string{}, undone: map[string]int{}, results: map[string]string{}}
	p.complete = func(*ect.Claims) *agent { return p.as }
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Close)
	p.rollbackURI = p.URL + "/.well-known/cascade/rollback"
	return p
}

func (p *participant) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body participantAsked
	_ = json.NewDecoder(r.Body).Decode(&body) // calls have another one
	field, _, _ := strings.Cut(r.Header.Get(ect.FieldName), ",")
	token, err := ect.ParseInsecure(strings.TrimSpace(field))
	if err != nil {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	body.Token = token
	path := strings.TrimPrefix(r.URL.Path, "/.well-known/cascade/")
	if p.before != nil && p.before(path, w, body) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case strings.HasPrefix(path, "workflows/"): // which the draft does not have
		w.WriteHeader(http.StatusNotFound)
	case strings.HasPrefix(path, "checkpoints/"):
		_ = json.NewEncoder(w).Encode(map[string]string{"token": p.made[strings.TrimPrefix(path, "checkpoints/")]})
	case path == "rollback/prepare":
		if body.Phase != "release" { // that may come right after
			p.prepared++
		}
		p.prepares = body.Token.ID()
		if p.away {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprint(w, `{"status":"prepared"}`)
	case path == "rollback" && len(p.answers) > 0:
		w.WriteHeader(p.answers[0])
		p.answers = p.answers[1:]
	case path == "rollback":
		if raw := p.result(body); raw != "" {
			w.Header().Set(ect.FieldName, raw)
			if p.along != nil {
				w.Header()[ect.FieldName] = append(w.Header()[ect.FieldName], p.along()...)
			}
		}
		_, _ = fmt.Fprint(w, cmp.Or(p.body, `{"status":"completed"}`))
	default: // a call
		id, parent := uuid.NewString(), ""
		for raw := range strings.SplitSeq(strings.Join(r.Header.Values(ect.FieldName), ","), ",") {
			if one, err := ect.ParseInsecure(strings.TrimSpace(raw)); err == nil && one.Issuer() == gatewayIdentity {
				parent = one.ID()
			}
		}
		if p.parent != nil {
			parent = p.parent(parent)
		}
		p.calls = append(p.calls, id)
		p.made[id] = p.as.issue(ect.Claims{
			Audience: []string{p.as.issuer.Identity()}, ID: id, Workflow: token.Workflow(), Action: "checkpoint", Parents: []string{parent}, Output: ect.Sum([]byte(id)),
			Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.rollbackURI).Int(ect.MemberTTL, 3600),
		}).Raw()
		if p.name != nil {
			id = p.name(id)
		}
		if id != "" {
			w.Header().Set("Execution-Checkpoint", id)
		}
		w.WriteHeader(http.StatusCreated)
	}
}

// result carries out what it is asked for, and returns what it signs. One id has one result (cascade
// 4.3.4).
func (p *participant) result(asked participantAsked) string {
	if _, again := p.results[asked.ID]; !again {
		p.undone[asked.Checkpoint]++
		p.results[asked.ID] = p.completion(asked)
	}
	return p.results[asked.ID]
}

// completion is what it signs of a request that it has carried out; empty if nobody does.
func (p *participant) completion(asked participantAsked) string {
	c := ect.Claims{
		Audience: []string{gatewayIdentity}, Workflow: asked.Token.Workflow(), Action: "rollback_complete", Parents: []string{asked.Token.ID()},
		Ext: new(ect.ExtBuilder),
	}
	for _, m := range []struct {
		name ect.Member
		true string
	}{{ect.MemberRollbackID, asked.ID}, {ect.MemberCheckpointID, asked.Checkpoint}, {ect.MemberStatus, "completed"}} {
		if lie := p.said[m.name]; lie != "" {
			m.true = lie
		}
		c.Ext.Text(m.name, m.true)
	}
	by := p.complete(&c)
	if by == nil {
		return ""
	}
	return by.issue(c).Raw()
}

// start lets a completion follow from a rollback_start of by that comes along, as in Figure 12, and that
// from the request; from another node if one is given.
func (p *participant) start(by *agent, from string) {
	var started *ect.Token
	p.complete = func(c *ect.Claims) *agent {
		started = by.issue(ect.Claims{
			Audience: []string{gatewayIdentity}, Workflow: c.Workflow, Action: "rollback_start", Parents: []string{cmp.Or(from, c.Parents[0])},
		})
		c.Parents = []string{started.ID()}
		return p.as
	}
	p.along = func() []string { return []string{started.Raw()} }
}

// A participant counts as having done its part only if it has signed that itself, for this rollback,
// request, checkpoint, workflow and gateway, whatever else it answers; and it is asked only for the
// checkpoint that it has made for the call (P6).
func TestParticipantsAreNotBelieved(t *testing.T) {
	stranger := newAgent(t, "stranger")
	for name, c := range map[string]struct {
		lies           func(p *participant)
		status, reason string
		asked          bool
	}{
		"it tells the truth":          {func(*participant) {}, "completed", "", true},
		"it is slow to come back":     {func(p *participant) { p.answers = []int{503, 429} }, "completed", "", true},
		"no signature":                {func(p *participant) { p.complete = func(*ect.Claims) *agent { return nil } }, "escalated", "unexpected", true},
		"another's signature":         {func(p *participant) { p.complete = func(*ect.Claims) *agent { return stranger } }, "escalated", "unexpected", true},
		"of another rollback":         {func(p *participant) { p.said = map[ect.Member]string{ect.MemberRollbackID: rollbackID(9)} }, "escalated", "unexpected", true},
		"of another checkpoint":       {func(p *participant) { p.said = map[ect.Member]string{ect.MemberCheckpointID: uuid.NewString()} }, "escalated", "unexpected", true},
		"another status in the token": {func(p *participant) { p.said = map[ect.Member]string{ect.MemberStatus: "failed"} }, "failed", "refused", true},
		"for another gateway": {func(p *participant) {
			p.complete = func(c *ect.Claims) *agent { c.Audience = []string{"spiffe://example.com/other"}; return p.as }
		}, "escalated", "unexpected", true},
		"of another workflow": {func(p *participant) {
			p.complete = func(c *ect.Claims) *agent { c.Workflow = uuid.NewString(); return p.as }
		}, "escalated", "unexpected", true},
		"of another request": {func(p *participant) {
			p.complete = func(c *ect.Claims) *agent { c.Parents = []string{p.prepares}; return p.as } // that to prepare
		}, "escalated", "unexpected", true},
		"of nobody's request": {func(p *participant) {
			p.complete = func(c *ect.Claims) *agent { c.Parents = []string{uuid.NewString()}; return p.as }
		}, "escalated", "unexpected", true},
		"that follows from nothing": {func(p *participant) {
			p.complete = func(c *ect.Claims) *agent { c.Parents = nil; return p.as }
		}, "escalated", "unexpected", true},
		"through its own start":               {func(p *participant) { p.start(p.as, "") }, "completed", "", true},
		"through another's start":             {func(p *participant) { p.start(stranger, "") }, "escalated", "unexpected", true},
		"through a start of another request":  {func(p *participant) { p.start(p.as, uuid.NewString()) }, "escalated", "unexpected", true},
		"done in the token, failed beside it": {func(p *participant) { p.body = `{"status":"failed"}` }, "completed", "", true},
		"failed, and no signature": {func(p *participant) {
			p.body, p.complete = `{"status":"failed"}`, func(*ect.Claims) *agent { return nil }
		}, "escalated", "unexpected", true},
		"410":                                {func(p *participant) { p.answers = []int{410} }, "escalated", "unexpected", false},
		"a checkpoint of another call":       {func(p *participant) { p.parent = func(string) string { return uuid.NewString() } }, "escalated", "foreign", false},
		"a checkpoint that it does not know": {func(p *participant) { p.name = func(string) string { return uuid.NewString() } }, "escalated", "foreign", false},
		"rolled back elsewhere":              {func(p *participant) { p.rollbackURI = "http://127.0.0.1:1/rollback" }, "escalated", "foreign", false},
		"no checkpoint":                      {func(p *participant) { p.name = func(string) string { return "" } }, "escalated", "irreversible", false},
	} {
		t.Run(name, func(t *testing.T) {
			a, p := newAgent(t, "a"), newParticipant(t)
			c.lies(p)
			at := strings.TrimPrefix(p.URL, "http://")
			g := launch(t, setup{app: trusting(t, a, p.as, stranger), site: fmt.Sprintf(
				"agent_proxy %s {\n identity %s\n action remote {\n match path /remote\n delegate http://%[1]s/.well-known/cascade/rollback %[2]s\n }\n }", at, p.as.issuer.Identity())})
			s := g.saga(a)
			step := s.do(request{path: "/remote"})
			doc := s.back(rollbackBody{Checkpoint: step.checkpoint})
			if c.reason == "" {
				doc.want(t, c.status)
			} else {
				doc.want(t, c.status, c.reason)
			}
			if unknown := c.reason == "unexpected"; unknown != (doc.Effect == "unknown") {
				t.Errorf("the effect is %q", doc.Effect)
			}
			p.mu.Lock()
			if asked := len(p.undone) == 1; asked != c.asked {
				t.Errorf("it has undone %v", p.undone)
			}
			for id, n := range p.undone {
				if n != 1 {
					t.Errorf("%s was undone %d times", id, n)
				}
			}
			p.mu.Unlock()
			stop(t)
		})
	}
}

// Who does not answer within `prepare_timeout` cannot prepare: `unreachable`.
func TestPrepareTimeout(t *testing.T) {
	a, p := newAgent(t, "a"), newParticipant(t)
	p.away = true
	at := strings.TrimPrefix(p.URL, "http://")
	g := launch(t, setup{app: trusting(t, a, p.as) + "\nrollback {\n prepare_timeout 1s\n}", site: fmt.Sprintf(
		"agent_proxy %s {\n identity %s\n action remote {\n match path /remote\n delegate http://%[1]s/.well-known/cascade/rollback %[2]s\n }\n }", at, p.as.issuer.Identity())})
	s := g.saga(a)
	step := s.do(request{path: "/remote"})
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "escalated", "unreachable")
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.prepared != 1 || len(p.undone) > 0 { // the next question would come after 2s
		t.Errorf("asked %d times, and %v undone", p.prepared, p.undone)
	}
}
