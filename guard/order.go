package guard

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// A workflow's tasks begin in topological order (ATD, "Topological Order"; ADR 0115): a call is refused until
// what it depends on is done. What it depends on are the nodes directly before its own in the
// workflow's plan, and, where the action's Order says so, the parents that its own tokens name. All states are
// those of the ledger as it is now (guard/evidence/live.go).

// maxDependencies is how many dependencies a problem names.
const maxDependencies = 20

// ordered refuses a call that must not begin before something else is done.
func ordered(q *Request, in *admission) error {
	by := &in.planned
	parents, n := orderedBy(q, by), by.binds()
	if len(parents) == 0 && n == nil {
		return nil
	}
	var found []problem.Dependency
	follows := func(id string) bool {
		return slices.Contains(in.facts.Parents, id) || slices.ContainsFunc(q.tokens.All, func(t *ect.Token) bool { return slices.Contains(t.Parents(), id) })
	}
	err := readPart(q, &in.facts, func(l *plan.Live, p *plan.Part) {
		if n != nil {
			for _, h := range p.Holds(by.plan, n.ID, follows) {
				found = append(found, problem.Dependency{
					Node: h.Node, State: string(h.State), Detail: string(h.Detail), Final: h.Final,
				})
			}
		}
		for _, t := range l.Holding(parents) {
			found = append(found, problem.Dependency{
				Task: t.ID, Action: t.Action, State: string(t.State), Detail: string(t.Detail), Final: t.Final(),
			})
		}
	})
	if err != nil {
		return q.storeFailed(err)
	}
	if len(found) == 0 {
		return nil
	}
	final := func(d problem.Dependency) bool { return d.Final }
	p := problemOf(problem.DependencyNotDone, "", 0)
	p.Final = slices.ContainsFunc(found, final)
	p.Detail = fmt.Sprintf("Of what it depends on %d are not done. Nothing was forwarded.", len(found))
	if p.Final {
		p.Reason = "final"
		slices.SortStableFunc(found, func(a, b problem.Dependency) int {
			switch {
			case a.Final == b.Final:
				return 0
			case a.Final:
				return -1
			}
			return 1
		})
	}
	p.Dependencies = found[:min(len(found), maxDependencies)]
	return p
}

// binds is the node of its workflow's plan that the call is, where that binds it; else nil.
func (p *planned) binds() *plan.Node {
	if p.plan == nil || p.node < 0 || p.observed {
		return nil
	}
	return &p.plan.Nodes[p.node]
}

// approvalOf says who has to approve the call before it is sent: as its action says, else the plan; nil where
// nobody is asked (A-optional-declarative-workflow-format-d).
func approvalOf(q *Request, by *planned) *Approve {
	if n := by.binds(); q.action.Approve == nil && n != nil && n.HITLRequired {
		return new(Approve)
	}
	return q.action.Approve
}

// constrainNode applies what the plan says of the call's time and of the breakers of its upstreams, where that is
// stricter than what is configured (A-circuit-breaker-policy-configuration-a). It returns how long the call may take.
func constrainNode(q *Request, n *plan.Node) time.Duration {
	most := q.call.Deadline
	if n == nil {
		return most
	}
	if n.Hints.TimeoutS > 0 {
		most = min(most, time.Duration(n.Hints.TimeoutS)*time.Second)
	}
	if n.CircuitThreshold == 0 && n.CircuitWindowS == 0 {
		return most
	}
	window := time.Duration(min(n.CircuitWindowS, time.Hour.Seconds()) * float64(time.Second)) // no breaker has a longer one
	if asked, err := breaker.NewView(n.CircuitThreshold, window); err == nil {                 // the plan was checked
		q.h.Host.SetVar(q.r, ViewVar, asked.And(q.h.view(q.r)))
	}
	return most
}

// namesNode reports whether a request says which node of a plan it is. Then it is guarded, whatever its method: a
// task that is not recorded is never done, and its checkpoint would be missing
// (A-checkpoint-placement-policy-f). What is not verified can only have itself guarded.
func namesNode(h *Handler, r *http.Request) bool {
	if r.Header.Get(headerWorkflowNode) == "" && len(r.Header[ect.FieldName]) == 0 {
		return false
	}
	if policy, err := h.Tokens(); err == nil && policy == nil {
		return false // nothing is recorded of it
	}
	raws, _ := ect.ParseFields(r.Header[ect.FieldName]) // else it is refused later
	return r.Header.Get(headerWorkflowNode) != "" || slices.ContainsFunc(raws, func(raw string) bool {
		t, err := ect.ParseInsecure(raw)
		if err != nil {
			return false
		}
		node, _ := t.Ext().Text(evidence.MemberNode)
		return node != ""
	})
}

// before are the calls of the nodes directly before the call's own, and their checkpoints: while a rollback
// undoes one of them, the call must not begin, whether its tokens name it or not.
func before(q *Request, in *admission) (ids []string, err error) {
	n := in.planned.binds()
	if n == nil {
		return nil, nil
	}
	err = readPart(q, &in.facts, func(_ *plan.Live, p *plan.Part) { ids = p.Before(in.planned.plan, n.ID) })
	return ids, err
}

// readPart calls read with the states of the workflow, and with what the call takes part in. See evidence.Live.
func readPart(q *Request, facts *evidence.Call, read func(l *plan.Live, p *plan.Part)) error {
	who, named := facts.Names(), q.named(facts)
	return q.policy.Evidence.Live(q.r.Context(), q.policy.Events, q.facts.Workflow, func(l *plan.Live) { read(l, l.Part(who, named)) })
}

// named are the ids that link the call to what others have done: those of the tokens that led to it, and of their
// parents. Tokens that are not proven link nothing.
func (q *Request) named(facts *evidence.Call) []string {
	ids := slices.Clone(facts.Parents)
	for _, t := range slices.Concat(q.tokens.All, q.policy.Evidence.Unrecorded(q.tokens.All, maxAncestors)) {
		if t.Proven() {
			ids = append(append(ids, t.ID()), t.Parents()...)
		}
	}
	return ids
}

// orderedBy are the parents of the call that have to be done.
func orderedBy(q *Request, by *planned) (parents []string) {
	if q.policy == nil || q.facts.Workflow == "" || q.action.Order != OrderPar || by.undoes {
		return nil
	}
	for _, t := range q.tokens.Own {
		for _, id := range t.Parents() {
			parents = append(parents, id, ect.UnprovenID(id))
		}
	}
	return parents
}
