package rollbackapi

import (
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// maxFollowUp is how many sentences a document has.
const maxFollowUp = 50

// remedies say what a person does about a step that is not completed, by its reason.
var remedies = map[string]string{
	string(undo.ReasonIrreversible):  "it cannot be undone by the gateway; undo it by hand, or decide that it stays",
	string(undo.ReasonChanged):       "somebody has changed it since; look at it, and put it back by hand or leave it",
	string(undo.ReasonRefused):       "the upstream refuses to undo it for good; ask who runs it, and undo it by hand",
	string(undo.ReasonUnauthorized):  "the upstream did not accept the credentials of the undo; correct `undo_auth`, and undo it by hand or ask again under a new id",
	string(undo.ReasonUnexpected):    "the upstream's answer to the undo is not known; find out what became of it",
	string(undo.ReasonPartial):       "the agent that was asked has undone a part of it; look there for the rest, and undo it by hand",
	string(undo.ReasonEscalated):     "the agent that was asked has left it to a person; look there who decides",
	string(undo.ReasonLost):          "no answer to the undo came, and it may have had its effect; find out in the target system",
	string(undo.ReasonUnreachable):   "the upstream could not be reached, and nothing was sent; ask again under a new id when it is back",
	string(undo.ReasonTimeout):       "it was not done in time; look at it, and ask again under a new id or undo it by hand",
	string(undo.ReasonUnfilled):      "the request of the undo cannot be made of what was recorded, as where the answer to the call was lost; find out what became of the call, and undo it by hand",
	string(undo.ReasonNoUpstream):    "the configuration does not lead to its upstream any more; undo it by hand, or put the route back and ask again under a new id",
	string(undo.ReasonOtherUpstream): "the configuration leads to another upstream than the one that the recorded credentials are for; undo it by hand, or put the route back and ask again under a new id",
	string(undo.ReasonNoCredentials): "the recorded credentials are gone; undo it by hand",
	string(undo.ReasonUnverified):    "after the undo something else stands there; look at it",
	string(undo.ReasonNoPostImage):   "what stood there after the call is not known; compare by hand before you put it back",
	reasonExpired:                    "its time to be undone is over; undo it by hand, or decide that it stays",
	"checkpoint-tampered":            "what is kept of it is not what was recorded; examine the store, and undo it by hand",
	"foreign":                        "another gateway or agent has made the checkpoint; ask for its rollback there",
	"missing":                        "the group contains checkpoints that nobody knows here; find out what they stood for",
	"members":                        "some of what the group contains was not undone; look at the steps of those",
	"busy":                           "another rollback has left it half undone; look at that one before you ask again under a new id",
	"unavailable":                    "the undo could not be carried on in time, and it may have had its effect; find out in the target system, and ask again under a new id",
}

// reasonExpired is also foreseen.
const reasonExpired = "checkpoint-expired"

const otherRemedy = "it is not undone; look at it"

// followUp says what a person must still do. Of a plan it says what would be left.
func followUp(r *rollback.Rollback) []string {
	var all []string
	add := func(format string, args ...any) {
		switch len(all) {
		case maxFollowUp:
		case maxFollowUp - 1:
			all = append(all, "There is more; look at the steps.")
		default:
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	for i := range r.Steps {
		s := &r.Steps[i]
		reason := s.Reason
		switch {
		case s.State == rollback.StepDone && s.Status == rollback.Completed:
			continue
		case s.State == rollback.StepDone:
		case r.State == rollback.Executing:
			continue // nobody has to do anything yet
		case s.What == plan.Expired:
			reason = reasonExpired
		case s.What == plan.Escalate && reason == "":
			reason = string(undo.ReasonIrreversible)
		case s.What == plan.Escalate:
		default:
			continue
		}
		remedy, ok := remedies[reason]
		if !ok {
			remedy = otherRemedy
		}
		text := fmt.Sprintf("Checkpoint %s: %s.", s.Checkpoint, remedy)
		if s.Escalation != "" {
			text += fmt.Sprintf(" Escalation %s waits for a decision.", s.Escalation)
		}
		add("%s", text)
	}
	if p := r.Plan; p != nil && r.State != rollback.Executing {
		if n := len(p.Passed); n > 0 {
			add("%d actions in the scope have no checkpoint, so that nothing undoes them; look at `uncovered`.", n)
		}
		if n := len(p.Dependants); n > 0 {
			add("%d completed actions depend on what is undone, and stay; look at `dependants`.", n)
		}
		if n := p.Left; n > 0 {
			add("%d checkpoints under the workflow's id are not linked to the requester's part of it, and stay; a coordinator or an operator can undo them.", n)
		}
		if n := len(p.Missing); n > 0 {
			add("%d checkpoints of a group are not known here; look at `missing`.", n)
		}
	}
	return all
}
