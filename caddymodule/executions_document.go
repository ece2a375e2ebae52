package caddymodule

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// executionsDocument tells a caller of the executions that it has named with one id.
// Its members are an API.
type executionsDocument struct {
	ExecutionID string            `json:"execution_id"`
	Executions  []executionStatus `json:"executions"` // the youngest first
}

type executionStatus struct {
	Key      string `json:"key"`
	Method   string `json:"method"`
	Path     string `json:"path"`
	Action   string `json:"action"`
	Workflow string `json:"workflow,omitempty"`
	State    string `json:"state"`
	// Cause is why it is in doubt.
	Cause   string    `json:"cause,omitempty"`
	Created time.Time `json:"created"`
	// Deadline is when it ends at the latest, while it runs.
	Deadline time.Time `json:"deadline,omitzero"`
	Settled  time.Time `json:"settled,omitzero"`
	// Status is that of the upstream's answer.
	Status int              `json:"status,omitempty"`
	Result *executionResult `json:"result,omitempty"`
	// Replayable says that a retry gets the recorded answer, and so does OutputURL.
	Replayable bool   `json:"replayable"`
	SafeNewKey bool   `json:"safe_new_key"`
	OutputURL  string `json:"output_url"`
}

// executionResult is what is known of a completed execution's answer.
type executionResult struct {
	// Kept says that the answer was recorded.
	Kept bool `json:"kept"`
	// Expires is until when it can be replayed.
	Expires time.Time `json:"expires,omitzero"`
}

func describe(id string, e *guard.Recorded) executionStatus {
	r := e.Record
	running := e.Standing == guard.RunningHere || e.Standing == guard.RunningElsewhere
	s := executionStatus{
		Key: e.Key.Hex(), Method: r.Method, Path: r.Path, Action: r.Action, Workflow: r.Workflow,
		State: e.State().String(), Created: r.Created.UTC(), Status: r.Status,
		Replayable: e.Standing == guard.Replayable,
		SafeNewKey: e.Standing == guard.RolledBack,
		OutputURL:  executionsPath + inPath(id) + "/output?key=" + e.Key.Hex(),
	}
	switch {
	case running:
		s.Deadline = r.Deadline.UTC()
	case e.Standing == guard.Doubtful:
		s.Cause = string(r.Cause)
	}
	if !r.Settled.IsZero() {
		s.Settled = r.Settled.UTC()
	}
	if r.State == guard.StateCompleted {
		s.Result = &executionResult{Kept: r.Result.Kept}
		if r.Result.Kept {
			s.Result.Expires = r.Result.Expires.UTC()
		}
	}
	return s
}

// writeList answers with the state of the executions.
func (q *inquiry) writeList(status int, all []guard.Recorded) error {
	doc := executionsDocument{ExecutionID: q.id, Executions: make([]executionStatus, len(all))}
	for i := range all {
		doc.Executions[i] = describe(q.id, &all[i])
	}
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	body = append(body, '\n')
	h := q.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	protect(h)
	q.w.WriteHeader(status)
	_, _ = q.w.Write(body) // the client may be gone; there is nobody to tell
	return nil
}

// protect keeps what belongs to one caller out of caches, and out of other sites'
// pages.
func protect(h http.Header) {
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}
