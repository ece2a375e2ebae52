package admin

import (
	"encoding/json"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// The bodies of plans.
type (
	// Plans is the answer to GET plans.
	Plans struct {
		// Plans are those of all workflows, the latest first.
		Plans []api.PlanDocument `json:"plans"`
	}
	// PlanPut is the body of POST plans/{id}.
	PlanPut struct {
		// Operator is who puts the plan.
		Operator string `json:"operator"`
		// Replaces is the version that it replaces, or "*" for any; empty where there is none.
		Replaces string `json:"replaces,omitempty"`
		// Plan is the plan itself.
		Plan json.RawMessage `json:"plan"`
	}
)

func listPlans(r *http.Request, st Store) (any, error) {
	found, err := st.Plans().List(r.Context())
	if err != nil {
		return nil, err
	}
	doc := Plans{Plans: make([]api.PlanDocument, 0, len(found))}
	for i := range found {
		doc.Plans = append(doc.Plans, api.DescribePlan(&found[i]))
	}
	return doc, nil
}

// putPlan takes a plan from an operator, who may put one for any workflow.
func putPlan(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	var put PlanPut
	if err := decode(r.Body, plan.MaxSize+maxRollback, &put); err != nil {
		return nil, refuse(http.StatusBadRequest, `the request is no {"operator": "...", "replaces": "...", "plan": {...}}: %v`, err)
	}
	if put.Operator == "" || len(put.Operator) > maxRollbackOperator {
		return nil, refuse(http.StatusBadRequest, "operator: say who puts it, in at most %d bytes", maxRollbackOperator)
	}
	to := plan.Putting{Workflow: evidence.WorkflowID(evidence.Canonical(p.name)), By: operatorPrefix + put.Operator}
	if put.Replaces != "" {
		to.Replaces = []string{put.Replaces}
	}
	return st.PutPlan(r.Context(), put.Plan, to)
}
