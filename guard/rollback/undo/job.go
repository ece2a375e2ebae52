package undo

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execid"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// job is one Undo under way.
type job struct {
	*Undoer
	task      Task
	call      *checkpoint.Snapshot
	spec      *Spec
	templates templates
	scope     guard.Scope
	key       guard.Key

	doubt         bool  // an attempt may have had its effect
	owed          bool  // one of an earlier rollback's may have, and the key is this one's own
	answer        *note // that is known, and not recorded
	attempts      int
	status        int
	before, after [32]byte
	window        Window // of what is restored; nil where none is open
}

// No request has this method: nobody else can take the key of an undo.
const (
	undoCaller = "agent_guard undo"
	undoMethod = "(undo)"
	undoPath   = "/"
	undoAction = "undo"
	// stateMethod is for no execution at all.
	stateMethod = "(state)"
)

func (u *Undoer) newJob(t Task) (*job, error) {
	call := t.Checkpoint.Snapshot
	spec, err := ParseSpec(call.Undo)
	if err != nil {
		return nil, err
	}
	parsed, err := spec.templates()
	if err != nil {
		return nil, err
	}
	j := &job{Undoer: u, task: t, call: call, spec: spec, templates: parsed}
	j.under(t.Rollback)
	return j, nil
}

// under takes the key of a rollback. P1: the attempts of a call have one between them, that
// of the first, whichever of them is known today.
func (j *job) under(rollback string) {
	j.scope = guard.Scope{
		Caller: undoCaller, Guard: j.spec.Guard, Method: undoMethod, Path: undoPath,
		ID: rollback + "/" + j.call.Root(),
	}
	j.key = j.o.Guard.Key(j.scope)
}

// anew goes on under a key of this rollback's own, where an earlier one has left an answer
// from which nobody knows what came of it: that answer stands, and is the last under its
// key. The upstream sees no other key than before.
func (j *job) anew(n note) bool {
	if j.task.Again == "" || j.owed || !n.unknown || n.reading == pending {
		return false
	}
	j.take(n)
	j.owed, j.doubt = true, true
	j.under(j.task.Again)
	return true
}

// guarded is the call as the guard knows it.
func (j *job) guarded() *guard.Call {
	keep := j.o.Keep
	if !j.task.Due.IsZero() {
		keep += max(0, time.Until(j.task.Due)) // the rollback may go on until then
	}
	return &guard.Call{
		Key: j.key, Scope: j.scope, Origin: guard.OriginDerived, Host: j.call.Request.Host,
		Action: undoAction, Workflow: j.call.Workflow, Checkpoint: j.call.ID,
		Deadline: j.o.Timeout, KeepResult: keep, KeepKey: keep, ResultCap: 1,
	}
}

// idempotencyKey is the id under which the undo is sent. Where it would be no valid one
// it is the hash of what it would be.
func (j *job) idempotencyKey() string {
	whole := j.task.Rollback + "/" + j.call.Root()
	if id, err := execid.ParseHeader([]string{whole}); err == nil && id == whole {
		return id
	}
	sum := sha256.Sum256([]byte(whole))
	return "undo-" + hex.EncodeToString(sum[:])
}

// result is what came of it where it is not done.
func (j *job) result(why Reason) Result {
	return Result{Unknown: j.doubt, Reason: why, Status: j.status, Attempts: j.attempts, Before: j.before, After: j.after}
}

func (j *job) done() Result {
	return Result{Done: true, Status: j.status, Attempts: j.attempts, Before: j.before, After: j.after}
}

// late is the result of an undo that cannot be tried again in time, or not at all any
// more, after what came of it last.
func (j *job) late(n note) Result {
	switch {
	case n.reason != "":
		return j.result(n.reason)
	case n.reading == unsent && !j.doubt:
		return j.result(ReasonUnreachable)
	}
	return j.result(ReasonTimeout)
}

func (j *job) overdue() bool { return !j.task.Due.IsZero() && !time.Now().Before(j.task.Due) }

// A barred is the error of a request that cannot be made.
type barred struct{ why Reason }

func (b barred) Error() string { return string(b.why) }

// dress makes a request whole that goes to url.
func (j *job) dress(ctx context.Context, o Outgoing) (*Outgoing, error) {
	if o.Header == nil {
		o.Header = http.Header{}
	}
	o.Guard, o.Action, o.Upstream = j.spec.Guard, j.call.Action, j.call.Upstream
	o.Rollback, o.Checkpoint, o.Workflow = j.task.Rollback, j.call.Root(), j.call.Workflow
	o.Reason, o.Step = j.task.Reason, cmp.Or(j.task.Step, j.call.ID)
	if !strings.HasPrefix(o.URL, "/") {
		return &o, nil // the call's credentials are for its upstream only
	}
	o.Host = j.call.Request.Host
	if j.spec.Auth != AuthRecorded {
		return &o, nil
	}
	o.Recorded = true
	if j.call.Credentials == 0 {
		return &o, nil // the call itself had none
	}
	credentials, err := j.o.Vault.Credentials(ctx, j.call.ID)
	switch {
	case errors.Is(err, checkpoint.ErrUnknown), errors.Is(err, checkpoint.ErrTampered):
		return nil, barred{ReasonNoCredentials}
	case err != nil:
		return nil, err
	}
	written := o.Header
	o.Header = http.Header{}
	maps.Copy(o.Header, credentials)
	maps.Copy(o.Header, written) // what the configuration writes wins
	return &o, nil
}

// Lacks reports that the request of a compensation cannot be made of what is recorded: a
// call whose answer was lost has not left the values that it needs of it. It is false for
// what Undo itself has to find out.
func Lacks(c *checkpoint.Checkpoint) bool {
	if c.Snapshot.Way != checkpoint.Compensate || c.Result != nil {
		return false
	}
	spec, err := ParseSpec(c.Snapshot.Undo)
	if err != nil {
		return false
	}
	t, err := spec.templates()
	return err == nil && t.compensate != nil && t.compensate.Needs().Response()
}

// undoing is the request that undoes the call, for compensate and delegate.
func (j *job) undoing(ctx context.Context) (*Outgoing, error) {
	if j.call.Way == checkpoint.Delegate {
		body, err := json.Marshal(struct {
			Rollback   string `json:"rollback_id"`
			Checkpoint string `json:"checkpoint_id"`
			Phase      string `json:"phase"`
			// What the agent has done for the call goes with it, as the token says too.
			Cascade bool   `json:"cascade"`
			Reason  string `json:"reason,omitempty"`
		}{"urn:uuid:" + j.task.Rollback, j.call.Root(), "execute", true, j.task.Reason})
		if err != nil {
			return nil, barred{ReasonUnfilled}
		}
		return j.dress(ctx, Outgoing{
			Method: http.MethodPost, URL: j.spec.Delegate, Body: body, Delegated: true,
			Header: http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {j.idempotencyKey()}},
		})
	}
	o, err := j.fill(ctx, j.templates.compensate)
	if err != nil {
		return nil, err
	}
	o.Header.Set("Idempotency-Key", j.idempotencyKey())
	return o, nil
}

// asking is the request that asks what became of the undo; nil where there is none, or
// what it needs of the answer to the call is not known.
func (j *job) asking(ctx context.Context) (*Outgoing, error) {
	if j.templates.status == nil {
		return nil, nil
	}
	o, err := j.fill(ctx, j.templates.status)
	if errors.Is(err, barred{ReasonUnfilled}) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	o.Delegated = j.delegated() && strings.HasPrefix(j.spec.Delegate, j.templates.status.Origin()+"/")
	return o, nil
}

// fill makes a request of a template and of what was recorded.
func (j *job) fill(ctx context.Context, t *template.Template) (*Outgoing, error) {
	r := &j.call.Request
	src := &template.Source{
		Path: r.Path, Query: r.Query, Request: message(&r.Message),
		ExecutionID: j.spec.ExecutionID, WorkflowID: j.call.Workflow,
		RollbackID: j.task.Rollback, CheckpointID: j.call.Root(),
	}
	if result := j.task.Checkpoint.Result; result != nil {
		src.Status, src.Response = result.Status, message(&result.Answer)
	}
	req, err := t.Fill(src)
	if err != nil {
		return nil, barred{ReasonUnfilled}
	}
	return j.dress(ctx, Outgoing{Method: req.Method, URL: req.URL, Header: req.Header, Body: req.Body})
}

func message(m *checkpoint.Message) template.Message {
	return template.Message{Header: m.Header, ContentType: m.ContentType, Body: m.Body}
}
