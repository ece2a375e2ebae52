package admin

import (
	"encoding/json"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// The bodies of plans.
type (
	// Plans is the answer to GET plans.
	Plans struct {
		// Plans are those of all workflows, the latest first.
		Plans []evidence.PlanDocument `json:"plans"`
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

func listPlans(q *request) (any, error) {
	found, err := q.Plans().List(q.Context())
	if err != nil {
		return nil, err
	}
	doc := Plans{Plans: make([]evidence.PlanDocument, 0, len(found))}
	for i := range found {
		doc.Plans = append(doc.Plans, evidence.DescribePlan(&found[i]))
	}
	return doc, nil
}

// putPlan takes a plan from an operator, who may put one for any workflow.
func putPlan(q *request, put *PlanPut) (any, error) {
	if err := namesOperator(put.Operator, "puts it"); err != nil {
		return nil, err
	}
	to := plan.Putting{Workflow: evidence.WorkflowID(ledger.Canonical(q.name)), By: operatorPrefix + put.Operator}
	if put.Replaces != "" {
		to.Replaces = []string{put.Replaces}
	}
	return q.PutPlan(q.Context(), put.Plan, to)
}
