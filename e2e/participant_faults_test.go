package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// remotes runs a gateway before a participant, whose calls it delegates; options are further ones
// of the app, undo those of the action.
func remotes(t *testing.T, a *agent, p *participant, options, undo string) *gateway {
	t.Helper()
	at := strings.TrimPrefix(p.URL, "http://")
	return launch(t, setup{app: trusting(t, a, p.as) + options, site: fmt.Sprintf(
		"agent_proxy %s {\n identity %s\n action remote {\n match path /remote\n %s\n delegate http://%[1]s/.well-known/cascade/rollback %[2]s\n }\n }",
		at, p.as.issuer.Identity(), undo)})
}

// undid is how often the participant has undone something, in all.
func (p *participant) undid() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, times := range p.undone {
		n += times
	}
	return n
}

// Cascade 4.3.2, phase 1: to look ahead, and to prepare, asks an agent that knows nothing but the
// draft for nothing that it would carry out.
func TestPrepareUndoesNothingAtAnAgentOfTheDraft(t *testing.T) {
	a, p := newAgent(t, "a"), newParticipant(t)
	s := remotes(t, a, p, "", "").saga(a)
	step := s.do(request{path: "/remote"})
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint, Scope: "single"}
	text, err := json.Marshal(map[string]any{"rollback_id": rollbackID(2), "checkpoint_id": step.checkpoint, "scope": "single", "dry_run": true})
	if err != nil {
		t.Fatal(err)
	}
	token := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Parents: []string{step.checkpoint}})
	dry := document[preparedDoc](t, s.g.call(with(token, request{path: "/.well-known/cascade/rollback", body: string(text)})))
	if dry.Status != "prepared" || p.undid() != 0 {
		t.Errorf("a look: %+v, and the agent has undone %d", dry, p.undid())
	}
	hash := s.prepare(asked, http.StatusOK).PlanHash
	if p.undid() != 0 {
		t.Errorf("prepare: the agent has undone %d", p.undid())
	}
	document[rollbackDoc](t, s.g.call(s.executing(asked, hash))).want(t, "completed")
	if p.undid() != 1 {
		t.Errorf("execute: the agent has undone %d", p.undid())
	}
}
