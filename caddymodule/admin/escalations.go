package admin

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

// Escalations is what GET escalations answers. Its members are an API.
type Escalations struct {
	// Escalations, the newest first.
	Escalations []Escalation `json:"escalations"`
	// Unreadable counts those that stand there and do not open.
	Unreadable int `json:"unreadable,omitempty"`
	// Next is where the list goes on; absent at its end.
	Next string `json:"next,omitempty"`
}

// Escalation is something that only a person can decide. Its members are an API.
type Escalation struct {
	// ID names it.
	ID string `json:"id"`
	// Level is 1 (pause), 2 (approval) or 3 (stop), LevelName the word.
	Level     uint8  `json:"level"`
	LevelName string `json:"level_name"` // see Level
	// State is open, notified or undeliverable.
	State string `json:"state"`
	// Cause is a fixed word, Summary a sentence.
	Cause   string `json:"cause"`
	Summary string `json:"summary"` // see Cause
	// Workflow and Caller are whose it is.
	Workflow string `json:"workflow,omitempty"`
	Caller   string `json:"caller,omitempty"` // see Workflow
	// WorkflowName is what its caller calls the workflow, where that is another name.
	WorkflowName string `json:"workflow_name,omitempty"`
	// Links lead to what it is about.
	Links EscalationLinks `json:"links"`
	// Opened and Changed are when it was opened, and when its state last changed.
	Opened  time.Time `json:"opened"`
	Changed time.Time `json:"changed"` // see Opened
	// Attempts counts how often somebody was to be told, and LastError is why the last
	// attempt failed, if it did.
	Attempts  int    `json:"attempts"`
	LastError string `json:"last_error,omitempty"` // see Attempts
	// NextAttempt is when the next one is due; absent where none is.
	NextAttempt time.Time `json:"next_attempt,omitzero"`
}

// EscalationLinks lead from an escalation to what it is about.
type EscalationLinks struct {
	// Checkpoint and Error are ids of tokens, Rollback is a rollback's id.
	Checkpoint string `json:"checkpoint,omitempty"`
	Rollback   string `json:"rollback,omitempty"` // see Checkpoint
	Error      string `json:"error,omitempty"`    // see Checkpoint
	// Execution is the hash that names an execution.
	Execution string `json:"execution,omitempty"`
	// Upstream is an upstream's address.
	Upstream string `json:"upstream,omitempty"`
}

// escalations answers GET escalations.
func (a *API) escalations(r *http.Request, st Store, p *params) (any, error) {
	filter, after, limit := hitl.Filter{Workflow: p.one("workflow"), Level: p.level(), State: p.escalationState()}, p.one("after"), p.limit()
	if err := p.done(); err != nil {
		return nil, err
	}
	known := &names{st: st}
	var err error
	if filter.Workflow, err = escalatedAs(r.Context(), st, known.forms(r.Context(), filter.Workflow)); err != nil {
		return nil, err
	}
	found, err := st.Desk().List(r.Context(), filter, after, limit)
	if err != nil {
		return nil, err
	}
	page := Escalations{Escalations: make([]Escalation, 0, len(found.Escalations)), Unreadable: found.Unreadable, Next: found.Next}
	for i := range found.Escalations {
		e := viewEscalation(&found.Escalations[i])
		e.WorkflowName = known.of(r.Context(), e.Workflow, e.Links.Checkpoint)
		page.Escalations = append(page.Escalations, e)
	}
	return page, nil
}

// escalatedAs is the first of the forms of a workflow's id under which there are escalations.
func escalatedAs(ctx context.Context, st Store, forms []string) (string, error) {
	for _, form := range forms {
		page, err := st.Desk().List(ctx, hitl.Filter{Workflow: form}, "", 1)
		if err != nil {
			return "", err
		}
		if len(page.Escalations) > 0 || page.Unreadable > 0 || page.Next != "" {
			return form, nil
		}
	}
	return append(forms, "")[0], nil
}

func viewEscalation(e *hitl.Escalation) Escalation {
	return Escalation{
		ID: e.ID, Level: uint8(e.Level), LevelName: e.Level.String(), State: e.State.String(),
		Cause: string(e.Cause), Summary: e.Summary, Workflow: e.Workflow, Caller: e.Caller, Links: EscalationLinks(e.Links),
		Opened: e.Opened, Changed: e.Changed,
		Attempts: e.Delivery.Attempts, LastError: e.Delivery.LastError, NextAttempt: e.Delivery.Next,
	}
}

// level is a level, by its number or its word; 0 is any.
func (p *params) level() hitl.Level {
	text := p.one("level")
	if text == "" {
		return 0
	}
	for l := hitl.Pause; l <= hitl.Stop; l++ {
		if text == l.String() || text == strconv.Itoa(int(l)) {
			return l
		}
	}
	p.fail("level", fmt.Errorf("%q is no level; there are 1 (pause), 2 (approval) and 3 (stop)", text))
	return 0
}

// escalationState is a state of an escalation; 0 is any.
func (p *params) escalationState() hitl.State {
	text := p.one("state")
	if text == "" {
		return 0
	}
	for _, s := range hitl.States() {
		if text == s.String() {
			return s
		}
	}
	p.fail("state", fmt.Errorf("%q is no state; there are %v", text, hitl.States()))
	return 0
}
