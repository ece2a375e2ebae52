package rollback

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A participant counts as having done its part only if it has signed that itself, for this rollback,
// request, checkpoint, workflow and gateway, whatever else it answers; and it is asked only for the
// checkpoint that it has made for the call (P6).
func TestParticipantsAreNotBelieved(t *testing.T) {
	stranger := harness.NewAgent(t, "stranger")
	for name, c := range map[string]struct {
		lies           func(p *harness.Participant)
		status, reason string
		asked          bool
	}{
		"it tells the truth":      {func(*harness.Participant) {}, "completed", "", true},
		"it is slow to come back": {func(p *harness.Participant) { p.Answers = []int{503, 429} }, "completed", "", true},
		"no signature":            {func(p *harness.Participant) { p.Complete = func(*ect.Claims) *harness.Agent { return nil } }, "escalated", "unexpected", true},
		"another's signature":     {func(p *harness.Participant) { p.Complete = func(*ect.Claims) *harness.Agent { return stranger } }, "escalated", "unexpected", true},
		"of another rollback": {func(p *harness.Participant) {
			p.Said = map[ect.Member]string{ect.MemberRollbackID: harness.RollbackID(9)}
		}, "escalated", "unexpected", true},
		"of another checkpoint":       {func(p *harness.Participant) { p.Said = map[ect.Member]string{ect.MemberCheckpointID: uuid.NewString()} }, "escalated", "unexpected", true},
		"another status in the token": {func(p *harness.Participant) { p.Said = map[ect.Member]string{ect.MemberStatus: "failed"} }, "failed", "refused", true},
		"for another gateway": {func(p *harness.Participant) {
			p.Complete = func(c *ect.Claims) *harness.Agent { c.Audience = []string{"spiffe://example.com/other"}; return p.As }
		}, "escalated", "unexpected", true},
		"of another workflow": {func(p *harness.Participant) {
			p.Complete = func(c *ect.Claims) *harness.Agent { c.Workflow = uuid.NewString(); return p.As }
		}, "escalated", "unexpected", true},
		"of another request": {func(p *harness.Participant) {
			p.Complete = func(c *ect.Claims) *harness.Agent { c.Parents = []string{p.Prepares}; return p.As } // that to prepare
		}, "escalated", "unexpected", true},
		"of nobody's request": {func(p *harness.Participant) {
			p.Complete = func(c *ect.Claims) *harness.Agent { c.Parents = []string{uuid.NewString()}; return p.As }
		}, "escalated", "unexpected", true},
		"that follows from nothing": {func(p *harness.Participant) {
			p.Complete = func(c *ect.Claims) *harness.Agent { c.Parents = nil; return p.As }
		}, "escalated", "unexpected", true},
		"through its own start":               {func(p *harness.Participant) { p.Start(p.As, "") }, "completed", "", true},
		"through another's start":             {func(p *harness.Participant) { p.Start(stranger, "") }, "escalated", "unexpected", true},
		"through a start of another request":  {func(p *harness.Participant) { p.Start(p.As, uuid.NewString()) }, "escalated", "unexpected", true},
		"done in the token, failed beside it": {func(p *harness.Participant) { p.Body = `{"status":"failed"}` }, "completed", "", true},
		"failed, and no signature": {func(p *harness.Participant) {
			p.Body, p.Complete = `{"status":"failed"}`, func(*ect.Claims) *harness.Agent { return nil }
		}, "escalated", "unexpected", true},
		"410":                                {func(p *harness.Participant) { p.Answers = []int{410} }, "escalated", "unexpected", false},
		"a checkpoint of another call":       {func(p *harness.Participant) { p.Parent = func(string) string { return uuid.NewString() } }, "escalated", "foreign", false},
		"a checkpoint that it does not know": {func(p *harness.Participant) { p.Name = func(string) string { return uuid.NewString() } }, "escalated", "foreign", false},
		"rolled back elsewhere":              {func(p *harness.Participant) { p.RollbackURI = "http://127.0.0.1:1/rollback" }, "escalated", "foreign", false},
		"no checkpoint":                      {func(p *harness.Participant) { p.Name = func(string) string { return "" } }, "escalated", "irreversible", false},
	} {
		t.Run(name, func(t *testing.T) {
			a, p := harness.NewAgent(t, "a"), harness.NewParticipant(t)
			c.lies(p)
			at := strings.TrimPrefix(p.URL, "http://")
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, p.As, stranger), Site: fmt.Sprintf(
				"agent_proxy %s {\n identity %s\n action remote {\n match path /remote\n delegate http://%[1]s/.well-known/cascade/rollback %[2]s\n }\n }", at, p.As.Issuer.Identity())})
			s := g.Saga(a)
			step := s.Do(harness.Request{Path: "/remote"})
			doc := s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint})
			if c.reason == "" {
				doc.Want(t, c.status)
			} else {
				doc.Want(t, c.status, c.reason)
			}
			if unknown := c.reason == "unexpected"; unknown != (doc.Effect == "unknown") {
				t.Errorf("the effect is %q", doc.Effect)
			}
			p.Mu.Lock()
			if asked := len(p.Undone) == 1; asked != c.asked {
				t.Errorf("it has undone %v", p.Undone)
			}
			for id, n := range p.Undone {
				if n != 1 {
					t.Errorf("%s was undone %d times", id, n)
				}
			}
			p.Mu.Unlock()
			harness.Stop(t)
		})
	}
}

// Who does not answer within `prepare_timeout` cannot prepare: `unreachable`.
func TestPrepareTimeout(t *testing.T) {
	a, p := harness.NewAgent(t, "a"), harness.NewParticipant(t)
	p.Away = true
	at := strings.TrimPrefix(p.URL, "http://")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, p.As) + "\nrollback {\n prepare_timeout 1s\n}", Site: fmt.Sprintf(
		"agent_proxy %s {\n identity %s\n action remote {\n match path /remote\n delegate http://%[1]s/.well-known/cascade/rollback %[2]s\n }\n }", at, p.As.Issuer.Identity())})
	s := g.Saga(a)
	step := s.Do(harness.Request{Path: "/remote"})
	s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint}).Want(t, "escalated", "unreachable")
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Prepared != 1 || len(p.Undone) > 0 { // the next question would come after 2s
		t.Errorf("asked %d times, and %v undone", p.Prepared, p.Undone)
	}
}
