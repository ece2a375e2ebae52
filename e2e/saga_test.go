package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// sagaActions are the actions of a gateway before a restLab: one for each way to undo.
const sagaActions = `
	action doc {
		match path /docs/* /plain/* /versions/*
		restore
	}
	action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
		}
	}
	action mail {
		match path /mail
		irreversible
	}`

// site is the site over a restLab.
func (l *restLab) site() string { return "agent_proxy " + l.addr + " {" + sagaActions + "\n}" }

// saga is an agent's workflow at a gateway.
type saga struct {
	t   *testing.T
	g   *gateway
	a   *agent
	wid string
}

func (g *gateway) saga(a *agent) *saga {
	return &saga{g.t, g, a, uuid.NewString()}
}

// in is the saga in a subtest, which fails where something of it does.
func (s *saga) in(t *testing.T) *saga {
	g := *s.g
	g.t = t
	return &saga{t, &g, s.a, s.wid}
}

// lab runs a gateway before a restLab, with these actions.
func launchLab(t *testing.T, actions string, agents ...*agent) (*restLab, *gateway) {
	t.Helper()
	lab := newRestLab(t)
	return lab, launch(t, setup{app: trusting(t, agents...), site: "agent_proxy " + lab.addr + " {\n" + actions + "\n}"})
}

// undoesParts is the option with which a rollback undoes what can be undone.
const undoesParts = "\nrollback {\n partial allow\n}\n"

// launchParts is launchLab with undoesParts.
func launchParts(t *testing.T, actions string, agents ...*agent) (*restLab, *gateway) {
	t.Helper()
	lab := newRestLab(t)
	return lab, launch(t, setup{app: trusting(t, agents...) + undoesParts, site: "agent_proxy " + lab.addr + " {\n" + actions + "\n}"})
}

// sagaStep is a call of a saga.
type sagaStep struct {
	checkpoint string
	reply
}

// try makes a call that follows from others.
func (s *saga) try(r request, after ...string) sagaStep {
	s.t.Helper()
	got := s.g.call(s.calling(r, after...))
	return sagaStep{got.header.Get("Execution-Checkpoint"), got}
}

// calling is a call with a token that follows from others.
func (s *saga) calling(r request, after ...string) request {
	s.t.Helper()
	return with(s.a.issue(ect.Claims{Workflow: s.wid, Parents: after}), r)
}

// do makes a call that must succeed, and names a checkpoint.
func (s *saga) do(r request, after ...string) sagaStep {
	s.t.Helper()
	step := s.try(r, after...)
	if step.status >= 300 || step.checkpoint == "" {
		s.t.Fatalf("%s %s: %d %q %v", r.method, r.path, step.status, step.body, step.header)
	}
	return step
}

func put(path, body string) request { return request{method: "PUT", path: path, body: body} }

func charge(amount int) request {
	return request{path: "/charges", body: fmt.Sprintf(`{"amount":%d}`, amount)}
}

// id is the id in the answer of a step.
func (s sagaStep) id(t *testing.T) string {
	t.Helper()
	return document[struct{ ID string }](t, s.reply).ID
}

// rollbackBody is what is asked of a rollback.
type rollbackBody struct {
	ID         string `json:"rollback_id,omitempty"`
	Checkpoint string `json:"checkpoint_id,omitempty"`
	Phase      string `json:"phase,omitempty"`
	Scope      string `json:"scope,omitempty"`
	Cascade    bool   `json:"cascade,omitempty"`
	Keep       bool   `json:"keep_dependants,omitempty"`
	Reason     string `json:"reason,omitempty"`
}

// rollbackDoc is what is told of a rollback.
type rollbackDoc struct {
	ID          string `json:"rollback_id"`
	Checkpoint  string `json:"checkpoint_id"`
	Scope       string
	State       string
	Status      string
	Effect      string
	Joined      string
	TimedOut    bool   `json:"timed_out"`
	Before      string `json:"state_hash_before"`
	After       string `json:"state_hash_after"`
	Cascaded    []struct{ Agent, Status string }
	Failed      []string `json:"failed_agents"`
	Dependants  []string
	Steps       []rollbackStep
	Others      int
	Elsewhere   []string
	Escalations []string
	Tokens      struct{ Start, Complete string }
	ECT         string
}

type rollbackStep struct {
	Checkpoint                            string `json:"checkpoint_id"`
	Action, State, Status, Effect, Reason string
	Critical, Via                         string
	Review                                bool
	Level, Attempts                       int
}

// ask asks for a rollback, with a token of its own.
func (s *saga) ask(b rollbackBody) reply {
	s.t.Helper()
	return s.g.call(s.asking(b))
}

func (s *saga) asking(b rollbackBody) request {
	s.t.Helper()
	return s.askingAfter(b, b.Checkpoint)
}

// askingAfter is a request for a rollback whose token has these parents.
func (s *saga) askingAfter(b rollbackBody, after ...string) request {
	s.t.Helper()
	text, err := json.Marshal(b)
	if err != nil {
		s.t.Fatal(err)
	}
	ext := new(ect.ExtBuilder).Text(ect.MemberReason, b.Reason).
		Bool(ect.MemberCascade, b.Cascade || b.Scope != "" && b.Scope != "single")
	if b.Scope != "" {
		ext.Text(ect.MemberScope, b.Scope)
	}
	token := s.a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Parents: after, Ext: ext})
	return with(token, request{path: "/.well-known/cascade/rollback", body: string(text)})
}

// begun asks for a rollback, and does not wait for more than that it is accepted.
func (s *saga) begun(b rollbackBody) {
	s.t.Helper()
	r := s.asking(b)
	r.header["Prefer"] = "respond-async"
	if got := s.g.call(r); got.status != http.StatusAccepted || got.header.Get("Location") == "" {
		s.t.Fatalf("the rollback is not accepted: %d %v %s", got.status, got.header, got.body)
	}
}

// back asks for a rollback and waits until it is finished.
func (s *saga) back(b rollbackBody) rollbackDoc {
	s.t.Helper()
	if b.ID == "" {
		b.ID = "urn:uuid:" + uuid.NewString()
	}
	got := s.ask(b)
	if got.status >= 400 {
		s.t.Fatalf("the rollback is refused: %d %s", got.status, got.body)
	}
	if got.status == http.StatusAccepted {
		return s.finished(b.ID)
	}
	return document[rollbackDoc](s.t, got)
}

// finished is the rollback once it is.
func (s *saga) finished(id string) (doc rollbackDoc) {
	s.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		got := s.look(id + "?wait=10s")
		if doc = document[rollbackDoc](s.t, got); doc.Status != "" {
			return doc
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("the rollback does not end: %s", got.body)
		}
	}
}

// look asks how far a rollback is.
func (s *saga) look(id string) reply {
	s.t.Helper()
	token := s.a.issue(ect.Claims{Workflow: s.wid, Action: "look"})
	return s.g.call(with(token, request{method: "GET", path: "/.well-known/cascade/rollback/" + id}))
}

// want checks what came of a rollback.
func (d rollbackDoc) want(t *testing.T, status string, reasons ...string) {
	t.Helper()
	var got []string
	for _, s := range d.Steps {
		if s.Reason != "" {
			got = append(got, s.Reason)
		}
	}
	if d.Status != status || strings.Join(got, " ") != strings.Join(reasons, " ") {
		t.Errorf("the rollback is %s %q, want %s %q: %+v", d.Status, got, status, reasons, d)
	}
}

// rollbackID is the id of a test's nth rollback.
func rollbackID(n int) string { return fmt.Sprintf("urn:uuid:5f0c8b66-5c1b-4f0e-9d0f-%012d", n) }

// checkpoint looks at a checkpoint.
func (s *saga) checkpoint(id string) reply {
	s.t.Helper()
	token := s.a.issue(ect.Claims{Workflow: s.wid, Action: "look"})
	return s.g.call(with(token, request{method: "GET", path: "/.well-known/cascade/checkpoints/" + id + "?wait=0s"}))
}

// checkpointDoc is what is told of a checkpoint.
type checkpointDoc struct {
	JTI          string
	Token        string
	Verification struct{ Signature, Snapshot string }
	Reversible   bool
	Way          string
	Undo         struct{ State, Rollback string }
}

// view is the workflow as its tokens tell it.
func (s *saga) view() workflowView {
	s.t.Helper()
	return document[workflowView](s.t, s.g.get(s.a, "workflows/"+s.wid))
}
