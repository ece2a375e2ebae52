package api

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// What an agent answers to a request to prepare (cascade 4.3.2).
const (
	statusPrepared      = "prepared"
	statusCannotPrepare = "cannot_prepare"
	statusReleased      = "released"
)

// releasedDocument is the answer to a release: nothing is reserved for the rollback.
type releasedDocument struct {
	// RollbackID is the id as a URN (urn:uuid:).
	RollbackID string `json:"rollback_id"`
	// CheckpointID is the checkpoint that was to be rolled back.
	CheckpointID string `json:"checkpoint_id"`
	// Status is released.
	Status string `json:"status"`
}

// preparedDocument is the answer to a request to prepare a rollback: its document, with what
// stands in the way. Its members are an API.
type preparedDocument struct {
	rollback.Rollback
	// Status is prepared or cannot_prepare.
	Status string `json:"status"`
	// Reason is a fixed word for why there is no plan that may be carried out; empty where
	// agents say why they cannot prepare.
	Reason string `json:"reason_code,omitempty"`
	// Conflicting is the rollback that takes precedence (cascade 4.3.4).
	Conflicting string `json:"conflicting_rollback_id,omitempty"`
	// Until is when the reservation ends; missing without one.
	Until time.Time `json:"reserved_until,omitzero"`
	// Irreversible are the checkpoints of calls that cannot be undone.
	Irreversible []string `json:"irreversible,omitempty"`
	// Agents are those of the plan, with their answers.
	Agents []rollback.Obstacle `json:"agents"`
}

// describePrepared makes the answer to a request to prepare.
func describePrepared(p *rollback.Prepared, id string) *preparedDocument {
	doc := &preparedDocument{Rollback: *Describe(p.Rollback, id), Status: statusPrepared, Until: p.Rollback.Until, Agents: []rollback.Obstacle{}}
	if !p.Ready() {
		doc.Status = statusCannotPrepare
	}
	if p.Rollback.Until.IsZero() && p.Rollback.State == rollback.Reserved {
		doc.State, doc.Asked, doc.Due = rollback.Planned, time.Time{}, time.Time{}
	}
	conflict, depended := (*rollback.ConflictError)(nil), (*rollback.DependedOnError)(nil)
	switch {
	case errors.As(p.Refusal, &conflict):
		doc.Reason, doc.Conflicting = "conflict", urn(conflict.Winner)
	case errors.As(p.Refusal, &depended):
		doc.Reason, doc.Dependants = dependedOn.Slug, depended.Dependants
	case errors.Is(p.Refusal, checkpoint.ErrExpired):
		doc.Reason = checkpointExpired.Slug
	case errors.Is(p.Refusal, checkpoint.ErrTampered):
		doc.Reason = checkpointTampered.Slug
	}
	status, named := statusPrepared, map[string]bool{}
	if doc.Reason != "" {
		status = statusCannotPrepare
	}
	for _, o := range p.Obstacles {
		if o.Reason == string(rollback.ReasonIrreversible) {
			doc.Irreversible = append(doc.Irreversible, o.Checkpoint)
		}
		named[o.Agent] = true
		o.Status = statusCannotPrepare
		doc.Agents = append(doc.Agents, o)
	}
	for i := range p.Rollback.Steps {
		if agent := p.Rollback.Steps[i].Agent; !named[agent] {
			named[agent] = true
			doc.Agents = append(doc.Agents, rollback.Obstacle{Agent: agent, Status: status, Reason: doc.Reason})
		}
	}
	if len(doc.Agents) == 0 && doc.Reason != "" { // there is no plan that names them
		doc.Agents = append(doc.Agents, rollback.Obstacle{Status: status, Reason: doc.Reason, Checkpoint: doc.Checkpoint})
	}
	return doc
}

// Describe is a rollback as it is shown to who has asked for it under an id.
func Describe(r *rollback.Rollback, id string) *rollback.Rollback {
	doc := *r
	doc.ID, doc.Effect = urn(cmp.Or(r.Named, id)), effect(r.Unknown, r.Mixed)
	doc.Steps, doc.Cascaded = slices.Clone(r.Steps), []rollback.AgentStatus{}
	if r.Joined != "" {
		doc.Joined = urn(r.Joined)
	}
	if p := r.Plan; p != nil {
		sum := p.Hash()
		doc.PlanHash = hex.EncodeToString(sum[:])
		doc.Uncovered, doc.Along, doc.Dependants, doc.Missing = p.Passed, p.Along, p.Dependants, p.Missing
		doc.Others = p.Left
		for _, left := range p.Elsewhere {
			doc.Elsewhere = append(doc.Elsewhere, left.Checkpoint)
		}
	}
	doc.Unreached = slices.Clone(r.Unreached)
	for i := range doc.Unreached {
		doc.Unreached[i].Status = statusCannotPrepare
	}
	if doc.Steps == nil {
		doc.Steps = []rollback.Step{}
	}
	for i := range doc.Steps {
		step := &doc.Steps[i]
		step.Action, step.Effect = action(step), effect(step.Unknown, false)
	}
	if r.State == rollback.Finished {
		var others []ect.Outcome
		others, doc.FailedAgents = evidence.RollbackAgents(r)
		for _, o := range others {
			doc.Cascaded = append(doc.Cascaded, rollback.AgentStatus{Agent: o.Agent, Status: rollback.Status(o.Status)})
		}
	}
	doc.FollowUp = r.Remaining()
	return &doc
}

// Drawing draws the steps, with nothing that the document does not say: the target at the top,
// and the arrows to what followed from it.
func Drawing(d *rollback.Rollback) *drawing.Drawing {
	top := 0
	places := make(map[string]int, len(d.Steps))
	for i := range d.Steps {
		places[d.Steps[i].Checkpoint] = i
		top = max(top, d.Steps[i].Level)
	}
	p := &drawing.Drawing{Title: "Rollback " + d.ID + ": " + inWords(string(d.State), string(d.Status))}
	note := func(parts ...string) {
		if text := inWords(parts...); text != "" {
			p.Notes = append(p.Notes, text)
		}
	}
	note("checkpoint "+d.Checkpoint, "scope "+string(d.Scope))
	note(labelled("asked", moment(d.Asked)), labelled("due", moment(d.Due)), labelled("finished", moment(d.Finished)))
	if d.TimedOut {
		note("not done in time")
	}
	note(labelled("waits for the decision of people on escalation", d.Waits))
	note(labelled("effect", d.Effect))
	note(labelled("joined", d.Joined))
	for i := range d.Unreached {
		note(fmt.Sprintf("nobody knows what %s has done in the workflow (%s)", d.Unreached[i].Agent, d.Unreached[i].Reason))
	}
	if n := len(d.Uncovered); n > 0 {
		note(fmt.Sprintf("%d actions without a checkpoint are not shown", n))
	}
	note("What followed from a call stands below it, and is undone before it: level 0 first.")
	for level := range top + 1 {
		p.Layers = append(p.Layers, fmt.Sprint("level ", top-level))
	}
	for i := range d.Steps {
		s := &d.Steps[i]
		node := drawing.Node{Layer: top - s.Level, Name: cmp.Or(s.Agent, "(agent not known)"), Tone: tone(s)}
		node.State = s.Action + ": " + cmp.Or(string(s.Status), string(s.State), string(d.State))
		node.Lines = []string{
			labelled("reason", inWords(s.Reason, s.Cause)), labelled("effect", s.Effect), "", s.Checkpoint,
			labelled("begun", moment(s.Begun)), labelled("ended", moment(s.Ended)),
		}
		if c := s.Call; c != nil {
			node.Lines[2] = strings.TrimSpace(c.Action + " " + c.Method + " " + c.Path)
		}
		p.Nodes = append(p.Nodes, node)
		for _, id := range s.Earlier {
			if to, ok := places[id]; ok {
				p.Edges = append(p.Edges, drawing.Edge{From: i, To: to})
			}
		}
	}
	return p
}

func tone(s *rollback.Step) drawing.Tone {
	switch {
	case s.Status == rollback.Completed:
		return drawing.Good
	case s.Status == rollback.Failed:
		return drawing.Bad
	case s.Status != "", s.Action == "escalate":
		return drawing.Warning
	case s.State == rollback.StepRunning:
		return drawing.Active
	}
	return drawing.Plain
}

// inWords joins the parts that are not empty.
func inWords(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ", ")
}

func labelled(label, text string) string {
	if text == "" {
		return ""
	}
	return label + " " + text
}

func moment(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format("2006-01-02T15:04:05.000Z07:00")
}

// action returns the action of a step as one word. A call that never ran is cancelled, not
// rolled back: the architecture brief has a word of its own for it.
func action(s *rollback.Step) string {
	if s.Cancelled {
		return "cancel"
	}
	switch s.What {
	case rollback.Block:
		return "cancel"
	case rollback.Expired, rollback.Escalate:
		return "escalate"
	case rollback.Nothing:
		return "none"
	}
	return string(s.What) // wait, gather, undo
}

func effect(unknown, mixed bool) string {
	switch {
	case unknown:
		return rollback.EffectUnknown // it takes precedence
	case mixed:
		return rollback.EffectMixed
	}
	return ""
}

// result is the result of a rollback in the form of an older draft: the members of its
// token, and the token (ATD "Basic Rollback", AERR "Rollback Response"). Its members are an
// API.
type result struct {
	Action  string          `json:"exec_act"`
	ID      string          `json:"jti"`
	Parents []string        `json:"par"`
	OutHash string          `json:"out_hash,omitempty"`
	Ext     json.RawMessage `json:"ext"`
	ECT     string          `json:"ect"`
}

// answerIn answers with a finished rollback in the form of an older draft.
func (q *rollbackRequest) answerIn(ctx context.Context, r *rollback.Rollback, id string, v ect.Vocabulary, request string) error {
	raw, err := q.Tokens.Result(ctx, r, request, v)
	if err != nil {
		if q.r.Context().Err() == nil {
			q.Logger.Warn("the result of a rollback cannot be written in the vocabulary that was asked for",
				slog.String("rollback", id), slog.String("vocabulary", v.String()), slog.Any("error", err))
		}
		return err
	}
	token, err := ect.ParseInsecure(raw) // the gateway has just signed it
	if err != nil {
		return err
	}
	doc := result{
		Action: token.Action(), ID: token.ID(), Parents: token.Parents(), OutHash: token.OutputHash().String(),
		Ext: json.RawMessage(token.Ext().JSON()), ECT: raw,
	}
	if token.OutputHash().IsZero() {
		doc.OutHash = ""
	}
	q.w.Header().Set(ect.FieldName, raw)
	return q.writeJSON(http.StatusOK, doc)
}
