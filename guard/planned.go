package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Plans are the plans of workflows that a configuration knows, and what follows from plans.
type Plans struct {
	// Files are those of the configuration, by their wf_id.
	Files map[string]*plan.Descriptor
	// Observed records what calls do that are no node of their workflow's plan, in place of refusing them.
	Observed bool
}

// planned is what the plan of a call's workflow says of the call.
type planned struct {
	plan     *plan.Descriptor // nil: the workflow has none
	node     int              // its place in plan.Nodes; -1 if the call is none, where plans are observed
	observed bool             // nothing is refused because of the plan
	assigned *plan.Assigned
	undoes   bool // the call undoes an earlier one: neither a node nor an order holds it
	fence    store.Fence
}

// maxNode is the longest id of a node, and maxQuoted how much of a name a refusal quotes, both in bytes.
const (
	maxNode   = 128
	maxQuoted = 64
)

// statedNode is the node that a request names in the header Workflow-Node; empty for none.
func statedNode(r *http.Request) (string, error) {
	lines := r.Header[headerWorkflowNode]
	switch {
	case len(lines) == 0 || len(lines) == 1 && lines[0] == "":
		return "", nil
	case len(lines) > 1:
		return "", problem.New(problem.WorkflowIDInvalid, "The header Workflow-Node was sent more than once; send exactly one line, with the id of one node.")
	case len(lines[0]) > maxNode || strings.ContainsFunc(lines[0], func(c rune) bool { return c <= ' ' || c > '~' }):
		return "", problem.New(problem.WorkflowIDInvalid, "The header Workflow-Node holds no id of a node; send 1 to 128 visible ASCII characters.")
	}
	return lines[0], nil
}

// node is the node that the caller's own tokens name, and what they do; both may be empty.
func (p *Tokens) node() (named, action string) {
	for _, t := range p.Own {
		if !t.Proven() {
			continue
		}
		if id, _ := t.Ext().Text(evidence.MemberNode); named == "" && len(id) <= maxNode {
			named = id
		}
		if action == "" && t.Event() == "" {
			action = t.Action()
		}
	}
	return named, action
}

// findNode finds out which node of its workflow's plan a call is, before anything is recorded for it: a
// call that is none, or could be several, is refused (A-optional-b).
func findNode(q *Request, facts *evidence.Call) (found planned, err error) {
	undoes, err := undoes(q)
	if err != nil {
		return found, q.storeFailed(err)
	}
	fence, err := q.engine.Plans.Fence(q.r.Context(), q.facts.Workflow)
	if err != nil {
		return found, q.storeFailed(err)
	}
	a, err := planOf(q, facts)
	if err != nil { // nothing is known of what it may do (P4)
		return found, q.storeFailed(err)
	}
	if a == nil {
		return planned{undoes: undoes, fence: fence}, nil
	}
	named, action := q.tokens.node()
	if stated, _ := statedNode(q.r); named == "" { // fingerprint has checked it
		named = stated
	}
	action = cmp.Or(action, q.action.Name)
	node, err := a.Plan.Which(named, action)
	if undoes || err != nil { // what undoes is no task of the plan
		node = -1
	}
	found = planned{a.Plan, node, q.policy.Plans.Observed, a, undoes, fence}
	switch {
	case undoes, err == nil, found.observed:
		return found, nil
	case errors.Is(err, plan.ErrAmbiguousNode):
		return found, problemOf(problem.NodeAmbiguous, fmt.Sprintf("Several nodes of the workflow's plan are called %q. Nothing was forwarded.", evidence.Printable(action, maxQuoted)), 0)
	case named != "":
		return found, problemOf(problem.NodeUnknown, fmt.Sprintf("The workflow's plan has no node %q. Nothing was forwarded.", evidence.Printable(named, maxQuoted)), 0)
	}
	return found, problemOf(problem.NodeUnknown, fmt.Sprintf("The workflow's plan has no node that is called %q. Nothing was forwarded.", evidence.Printable(action, maxQuoted)), 0)
}

// undoes reports whether a call undoes an earlier one of its workflow here, by its caller's word: the caller's own
// token asks for that, or says that it has begun, and names the checkpoint of such a call, in which its issuer
// has a part (CheckReports). What is still to be done must not hold up what is to be undone (ADR 0125).
func undoes(q *Request) (bool, error) {
	for _, t := range q.tokens.Own {
		if !t.Proven() || !slices.Contains([]ect.Event{ect.EventRollbackRequest, ect.EventRollbackStart, ect.EventCompensate}, t.Event()) {
			continue
		}
		for _, id := range append([]string{evidence.NamedCheckpoint(t.Ext())}, t.Parents()...) {
			if is, err := q.policy.Events.Guards(q.r.Context(), q.facts.Workflow, id); is || err != nil {
				return is, err
			}
		}
	}
	return false, nil
}

// takesPart says of a call's checkpoint whether it is in what this call takes part in (P3).
func takesPart(q *Request, facts *evidence.Call) func(call string) (bool, error) {
	return func(call string) (has bool, err error) {
		err = readPart(q, facts, func(_ *plan.Live, p *plan.Part) { has = p.Has(call) })
		return has, err
	}
}

// called reports whether something was called before in what the call takes part in.
func called(q *Request, facts *evidence.Call) (before bool, err error) {
	err = readPart(q, facts, func(_ *plan.Live, p *plan.Part) { before = p.Called() })
	return before, err
}

// planOf finds the plan that binds the call: the one of what it takes part in, or of the workflow, or else the one
// that the call brings into force, if nothing was called before in what it takes part in.
func planOf(q *Request, facts *evidence.Call) (a *plan.Assigned, err error) {
	plans, ctx := q.engine.Plans, q.r.Context()
	a, err = plans.Of(ctx, q.facts.Workflow, takesPart(q, facts))
	if a != nil || err != nil || len(q.tokens.All) == 0 {
		return a, err
	}
	offers := plans.Offers(q.facts.Workflow)
	if len(q.policy.Plans.Files) == 0 && !offers {
		return nil, nil
	}
	issuers, follows := q.initiators()
	if offers { // also by those whose tokens were recorded before
		if err := readPart(q, facts, func(l *plan.Live, _ *plan.Part) {
			issuers = append(issuers, l.Issuers(q.named(facts), maxAncestors)...)
		}); err != nil {
			return nil, err
		}
	}
	var offered *plan.Assigned
	for _, issuer := range issuers {
		if offered, err = plans.Offered(ctx, q.facts.Workflow, issuer); err != nil {
			return nil, err
		}
		if offered != nil {
			break
		}
	}
	switch {
	case offered != nil && !offered.Begun.IsZero():
		return offered, nil
	case offered != nil:
	case follows != nil:
		offered = follows
	default:
		return nil, nil
	}
	// What a participant wants binds the others only from their first call on.
	if a, err = plans.Settle(ctx, q.facts.Workflow, takesPart(q, facts)); a != nil || err != nil {
		return a, err
	}
	if late, err := called(q, facts); late || err != nil {
		return nil, err
	}
	return offered, nil
}

// initiators are the issuers of the tokens that led to the call, the caller first, and the plan of the
// configuration that a workflow_start among these tokens names; nil without one.
func (q *Request) initiators() (issuers []string, follows *plan.Assigned) {
	for _, t := range slices.Concat(q.tokens.Own, q.tokens.All, q.policy.Evidence.Unrecorded(q.tokens.All, maxAncestors)) {
		if !t.Proven() || evidence.WorkflowID(t.Workflow()) != q.facts.Workflow || q.policy.Events.Issued(t) {
			continue
		}
		if !slices.Contains(issuers, t.Issuer()) {
			issuers = append(issuers, t.Issuer())
		}
		if t.Event() == ect.EventWorkflowStart && follows == nil {
			name, _ := t.Ext().Text(ect.MemberWorkflowName)
			if d := q.policy.Plans.Files[name]; d != nil {
				follows = &plan.Assigned{
					Workflow: q.facts.Workflow, Issuer: t.Issuer(), By: "plan " + d.WorkflowID, Version: d.Version(), Size: int64(len(d.Canonical())), Plan: d,
				}
			}
		}
	}
	return issuers, follows
}

// follow notes which plans of the configuration are named by the workflow_start of workflows that have not
// begun: these tokens are recorded, and a later call does not bring them again.
func (t *TokenPolicy) follow(ctx context.Context, tokens []*ect.Token) error {
	for _, token := range tokens {
		if !token.Proven() || token.Event() != ect.EventWorkflowStart || token.Workflow() == "" {
			continue
		}
		name, _ := token.Ext().Text(ect.MemberWorkflowName)
		d := t.Plans.Files[name]
		if d == nil {
			continue
		}
		_, _, err := t.Engine.Plans.Put(ctx, plan.Putting{Workflow: evidence.WorkflowID(token.Workflow()), Issuer: token.Issuer(), By: token.Issuer(), Plan: d})
		switch {
		case err == nil, errors.Is(err, plan.ErrExists), errors.Is(err, plan.ErrBegun): // the earlier one counts
		case errors.Is(err, plan.ErrFull):
			return problem.New(problem.QuotaExceeded, "The agent has as many plans as it may. Nothing was forwarded.")
		default:
			return StoreClosed(err)
		}
	}
	return nil
}

// beginPlan adds to the commit of a claim that who takes part in the call stays with its plan. Without one, no plan
// begins beside a call that may be the first. After execution.ErrTaken look the call up again.
func beginPlan(ctx context.Context, q *Request, in *admission, checkpoint string, claim *store.Batch) error {
	by, facts, plans := &in.planned, &in.facts, q.engine.Plans
	var b *store.Batch
	var err error
	switch {
	case by.assigned != nil:
		b, err = plans.Begin(ctx, by.assigned, checkpoint, func() (bool, error) { return called(q, facts) })
	case q.facts.Workflow == "":
	case len(q.tokens.All) > 0 && (plans.Offers(q.facts.Workflow) || len(q.policy.Plans.Files) > 0):
		b, err = besidePlans(ctx, q, facts)
	case plans.Has(q.facts.Workflow): // since it was admitted, which may have taken long
		var a *plan.Assigned
		if a, err = plans.Of(ctx, q.facts.Workflow, takesPart(q, facts)); a != nil {
			err = plan.ErrChanged
		}
	}
	switch {
	case errors.Is(err, plan.ErrChanged):
		return execution.ErrTaken
	case err != nil:
		return q.storeFailed(err)
	}
	claim.Join(b)
	return nil
}

// besidePlans is for the claim of a call without a plan: none begins beside it, if it may be the first. Behind an
// earlier call none begins, but one may have begun since the call was admitted.
func besidePlans(ctx context.Context, q *Request, facts *evidence.Call) (*store.Batch, error) {
	plans := q.engine.Plans
	offers := plans.Offers(q.facts.Workflow)
	first, err := q.policy.Events.Begins(ctx, q.facts.Workflow)
	if err == nil && !first && offers {
		first, err = called(q, facts)
		first = !first
	}
	switch {
	case err != nil:
		return nil, err
	case first:
		return plans.Beside(ctx, q.facts.Workflow, takesPart(q, facts))
	case offers:
		if a, err := plans.Of(ctx, q.facts.Workflow, takesPart(q, facts)); a != nil || err != nil {
			return nil, cmp.Or(err, plan.ErrChanged)
		}
	}
	return nil, nil
}
