//go:build unix

package harness

import (
	"encoding/json"
	"testing"
	"time"
)

// EscalationDoc is what operators see of an escalation.
type EscalationDoc struct {
	ID, Status, Cause, Requester string
	Level                        int
	LevelName                    string `json:"level_name"`
	RequiredRole                 string `json:"required_role"`
	Held                         bool
	Deadline                     time.Time
	Proposal                     struct {
		Kind, Text  string
		RequestHash string `json:"request_hash"`
		PlanHash    string `json:"plan_hash"`
	}
	Decisions []struct{ By, Decision, Reason string }
}

// Escalation is the id that a refusal names.
func (r Reply) Escalation(t *testing.T) string {
	t.Helper()
	var doc struct {
		Escalation string `json:"escalation_id"`
	}
	if err := json.Unmarshal([]byte(r.Body), &doc); err != nil || doc.Escalation == "" {
		t.Fatalf("%d %s names no escalation: %v", r.Status, r.Body, err)
	}
	return doc.Escalation
}

// Decides decides as an operator, on what is shown.
func (s *ProcSite) Decides(t *testing.T, verb, id string) EscalationDoc {
	t.Helper()
	shown := ProcDocument[EscalationDoc](t, s.Operate(t, "escalations", "show", id, "-o", "json").Says(t))
	args := []string{"escalations", verb, id, "--operator", "ann", "--reason", "seen", "-o", "json"}
	if hash := shown.Proposal.RequestHash + shown.Proposal.PlanHash; hash != "" {
		args = append(args, "--hash", hash)
	}
	return ProcDocument[EscalationDoc](t, s.Operate(t, args...).Says(t))
}
