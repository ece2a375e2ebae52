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
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
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
}

// maxNode is the longest id of a node, in bytes.
const maxNode = 128

// statedNode is the node that a request names in the header Workflow-Node; empty for none.
func statedNode(r *http.Request) (string, error) {
	lines := r.Header[HeaderWorkflowNode]
	switch {
	case len(lines) == 0 || len(lines) == 1 && lines[0] == "":
		return "", nil
	case len(lines) > 1:
		return "", api.NewProblem(api.WorkflowIDInvalid, "The header Workflow-Node was sent more than once; send exactly one line, with the id of one node.")
	case len(lines[0]) > maxNode || strings.ContainsFunc(lines[0], func(c rune) bool { return c <= ' ' || c > '~' }):
		return "", api.NewProblem(api.WorkflowIDInvalid, "The header Workflow-Node holds no id of a node; send 1 to 128 visible ASCII characters.")
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
func findNode(x *Call) error {
	s := &x.evidence
	a, err := planOf(x)
	if err != nil { // nothing is known of what it may do (P4)
		return x.storeFailed(err)
	}
	if a == nil {
		return nil
	}
	named, action := s.tokens.node()
	if stated, _ := statedNode(x.r); named == "" { // prepare has checked it
		named = stated
	}
	action = cmp.Or(action, x.action.Name)
	s.planned = planned{a.Plan, -1, s.policy.Plans.Observed, a}
	node, err := a.Plan.Which(named, action)
	switch {
	case err == nil:
		s.planned.node, s.call.Node = node, a.Plan.Nodes[node].ID
		return nil
	case s.planned.observed:
		return nil
	case errors.Is(err, plan.ErrAmbiguousNode):
		return x.problem(api.NodeAmbiguous, fmt.Sprintf("Several nodes of the workflow's plan are called %q. Nothing was forwarded.", shortened(action, maxNode)), 0)
	case named != "":
		return x.problem(api.NodeUnknown, fmt.Sprintf("The workflow's plan has no node %q. Nothing was forwarded.", shortened(named, maxNode)), 0)
	}
	return x.problem(api.NodeUnknown, fmt.Sprintf("The workflow's plan has no node that is called %q. Nothing was forwarded.", shortened(action, maxNode)), 0)
}

// planOf finds the plan of the call's workflow: the one in force, or else the one that the call brings
// into force, if it is the workflow's first.
func planOf(x *Call) (a *plan.Assigned, err error) {
	s, plans, ctx := &x.evidence, x.engine.Plans, x.r.Context()
	if a, err = plans.Of(ctx, s.call.Workflow); a != nil || err != nil || len(s.tokens.All) == 0 {
		return a, err
	}
	if len(s.policy.Plans.Files) == 0 && !plans.Offers(s.call.Workflow) {
		return nil, nil
	}
	issuers, follows := s.initiators()
	var offered *plan.Assigned
	for _, issuer := range issuers {
		if offered, err = plans.Offered(ctx, s.call.Workflow, issuer); err != nil {
			return nil, err
		}
		if offered != nil {
			break
		}
	}
	switch {
	case offered != nil:
	case follows != nil:
		offered = &plan.Assigned{Workflow: s.call.Workflow, By: "plan " + follows.WorkflowID, Version: follows.Version(), Size: int64(len(follows.Canonical())), Plan: follows}
	default:
		return nil, nil
	}
	// What a participant wants binds the others only from the workflow's first call on (P3).
	if a, err = plans.Settle(ctx, s.call.Workflow); a != nil || err != nil {
		return a, err
	}
	if begun, err := s.policy.graphOnly().Begun(ctx, s.call.Workflow); begun || err != nil {
		return nil, err
	}
	return offered, nil
}

// initiators are the issuers of the tokens that led to the call, the caller first, and the plan of the
// configuration that a workflow_start among these tokens names; nil without one.
func (s *callEvidence) initiators() (issuers []string, follows *plan.Descriptor) {
	for _, t := range slices.Concat(s.tokens.Own, s.tokens.All, s.policy.Evidence.Unrecorded(s.tokens.All, maxAncestors)) {
		if !t.Proven() || evidence.WorkflowID(t.Workflow()) != s.call.Workflow || s.policy.Events.Issued(t) {
			continue
		}
		if !slices.Contains(issuers, t.Issuer()) {
			issuers = append(issuers, t.Issuer())
		}
		if t.Event() == ect.EventWorkflowStart && follows == nil {
			name, _ := t.Ext().Text(ect.MemberWorkflowName)
			follows = s.policy.Plans.Files[name]
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
			return api.NewProblem(api.QuotaExceeded, "The agent has as many plans as it may. Nothing was forwarded.")
		default:
			return StoreClosed(err)
		}
	}
	return nil
}

// beginPlan adds to the commit of a claim that the workflow stays with its plan. After
// execution.ErrTaken look the call up again.
func beginPlan(ctx context.Context, x *Call, claim *store.Batch) error {
	b, err := x.engine.Plans.Begin(ctx, x.evidence.planned.assigned)
	switch {
	case errors.Is(err, plan.ErrChanged):
		return execution.ErrTaken
	case errors.Is(err, plan.ErrFull):
		return x.problem(api.QuotaExceeded, "As many workflows have a plan as may. Nothing was forwarded.", 0)
	case err != nil:
		return x.storeFailed(err)
	}
	claim.Join(b)
	return nil
}
