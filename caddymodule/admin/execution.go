package admin

import (
	"encoding/hex"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// StateFree is the state of a key under which nothing is recorded any more.
const StateFree = "free"

// Page is a part of a listing.
type Page struct {
	// Executions, the youngest first.
	Executions []Execution `json:"executions"`
	// Next is what `after` takes to go on; empty after the last page. A page that is
	// not full, even an empty one, may have a next one.
	Next string `json:"next,omitempty"`
}

// Execution is one execution, as operators see it.
type Execution struct {
	// Key is the execution key in hexadecimal; logs show its first 16 digits.
	Key string `json:"key"`
	// State is claimed, running, completed, in_doubt, rolled_back, or free.
	State string `json:"state"`
	// Detail says more than State where there is more to say: running_here,
	// running_elsewhere, replayable, result_expired or result_unavailable.
	Detail string `json:"detail,omitempty"`
	// ExecutionID is the caller's name for it, shortened to 255 bytes.
	ExecutionID string `json:"execution_id,omitempty"`
	// Origin says where that came from: given, minted or derived.
	Origin string `json:"origin,omitempty"`
	// Guard is the guard's configured name.
	Guard string `json:"guard,omitempty"`
	// Action is the action's configured name.
	Action string `json:"action,omitempty"`
	// Method is the call's.
	Method string `json:"method,omitempty"`
	// Host is the call's.
	Host string `json:"host,omitempty"`
	// Path is the call's. Its query is not recorded.
	Path string `json:"path,omitempty"`
	// Caller is the keyed hash of who asked, in hexadecimal.
	Caller string `json:"caller,omitempty"`
	// Workflow is the workflow's id, if any.
	Workflow string `json:"workflow,omitempty"`
	// WorkflowID is the UUID by which tokens, rollbacks and escalations know the workflow,
	// where its name is another one. Listings leave it out.
	WorkflowID string `json:"workflow_id,omitempty"`
	// Checkpoint is the id of the token that announced it, by which it is rolled back; empty
	// without an identity.
	Checkpoint string `json:"checkpoint,omitempty"`
	// Created is when it was claimed.
	Created time.Time `json:"created,omitzero"`
	// Deadline is until when it may run.
	Deadline time.Time `json:"deadline,omitzero"`
	// Settled is when its outcome was recorded.
	Settled time.Time `json:"settled,omitzero"`
	// Age is the seconds since Created.
	Age int64 `json:"age"`
	// Cause is why it is in doubt.
	Cause string `json:"cause,omitempty"`
	// Status is that of the upstream's answer, or of the one that an operator gave; 0 without one.
	Status int `json:"status,omitempty"`
	// Node is the gateway that ran it.
	Node string `json:"node,omitempty"`
	// Result is what is kept of the answer of a completed execution.
	Result *Result `json:"result,omitempty"`
	// KeyExpires is when the key of a completed execution is free again.
	KeyExpires time.Time `json:"key_expires,omitzero"`
	// Resolutions are what operators have decided, the oldest first. Listings leave
	// them out.
	Resolutions []Resolution `json:"resolutions,omitempty"`
}

// Result is what is kept of an answer.
type Result struct {
	// Kept says that it was recorded at all: it may have been too large.
	Kept bool `json:"kept"`
	// Size is the bytes that it takes in the store.
	Size int64 `json:"size"`
	// Expires is until when it can be replayed.
	Expires time.Time `json:"expires,omitzero"`
	// Replayable says that a retry gets it now.
	Replayable bool `json:"replayable"`
}

// Resolution is what an operator has decided.
type Resolution struct {
	// At is when.
	At time.Time `json:"at"`
	// Applied says that the call was executed.
	Applied bool `json:"applied"`
	// Operator is who decided.
	Operator string `json:"operator"`
	// Reason is on what evidence.
	Reason string `json:"reason"`
	// Cause is why it was in doubt.
	Cause string `json:"cause,omitempty"`
	// Action is the action's name at that time.
	Action string `json:"action,omitempty"`
}

// view is r as operators see it.
func view(r *guard.Recorded, now time.Time) Execution {
	record := r.Record
	x := Execution{
		Key: r.Key.Hex(), State: r.State().String(), Detail: detail(r.Standing),
		ExecutionID: record.ID, Origin: origin(record.Origin), Guard: record.Guard, Action: record.Action,
		Method: record.Method, Host: record.Host, Path: record.Path,
		Caller: hex.EncodeToString(record.Caller[:]), Workflow: record.Workflow, Checkpoint: record.Checkpoint,
		Created: utc(record.Created), Deadline: utc(record.Deadline), Settled: utc(record.Settled),
		Age:   int64(max(now.Sub(record.Created), 0) / time.Second),
		Cause: string(record.Cause), Status: record.Status, Node: record.Node,
	}
	if record.State != guard.StateInDoubt {
		x.Cause = "" // what an outcome was read from is no cause of a doubt
	}
	if record.State == guard.StateCompleted {
		kept := record.Result
		x.Result = &Result{
			Kept: kept.Kept, Size: kept.Size + int64(len(kept.Inline)), Expires: utc(kept.Expires),
			Replayable: r.Standing == guard.Replayable,
		}
		x.KeyExpires = utc(record.Settled.Add(record.KeepKey))
	}
	return x
}

// detail is what a standing says beyond the state.
func detail(s guard.Standing) string {
	switch s {
	case guard.RunningHere:
		return "running_here"
	case guard.RunningElsewhere:
		return "running_elsewhere"
	case guard.Replayable:
		return "replayable"
	case guard.ResultExpired:
		return "result_expired"
	case guard.ResultUnavailable:
		return "result_unavailable"
	default:
		return ""
	}
}

func origin(o guard.Origin) string {
	switch o {
	case guard.OriginGiven:
		return "given"
	case guard.OriginMinted:
		return "minted"
	case guard.OriginDerived:
		return "derived"
	default:
		return ""
	}
}

func utc(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}
