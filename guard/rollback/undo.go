package rollback

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// undoTask is one checkpoint to undo, for one rollback. An interrupted undo goes on with the same
// task.
type undoTask struct {
	// Rollback is the rollback's id, a UUID in its canonical form.
	Rollback string
	// PartOf is the rollback at another gateway of which Rollback is a part; empty without.
	PartOf string
	// Again is the id of a later rollback that resumes a doubt of Rollback; empty for the first.
	// Requests still have the ids of Rollback, so that the upstream recognises them.
	Again string
	// Forgotten says that the record of Rollback is gone: its key may have been used, though it
	// is free.
	Forgotten bool
	// Step is the checkpoint that the rollback names, if that is another attempt of the call than
	// Checkpoint.
	Step string
	// Checkpoint was read and verified.
	Checkpoint *checkpoint.Checkpoint
	// Reason is sent to delegates.
	Reason string
	// Due is the end of the rollback: nothing is sent after it, but the outcome of what was sent
	// before is asked for once more. Zero is never.
	Due time.Time
	// Precedence decides between Rollback and others at participants.
	Precedence precedence
	// Foreign says that Checkpoint stands for one that the participant itself has made, and whose
	// token is verified.
	Foreign bool
	// Dry says that a participant is only asked, and reserves nothing.
	Dry bool
	// Quit is closed when the process shuts down: a running request is awaited, and none is sent
	// after a pause. Nil is never.
	Quit <-chan struct{}
}

var (
	// errTask: a task is not complete.
	errTask = errors.New("undo: no task")
	// errQuit: shutting down. The same task goes on later.
	errQuit = errors.New("undo: the process ends")
)

// whole is the id of the rollback that a person or an agent has asked for. Participants behind a
// participant are asked for parts of that, too: they do not conflict with each other.
func (t *undoTask) whole() string { return cmp.Or(t.PartOf, t.Rollback) }

func (t *undoTask) check() error {
	switch {
	case t.Rollback == "" || strings.Contains(t.Rollback+t.Again, "/"):
		return fmt.Errorf("%w: the rollback's id is empty or has a slash", errTask)
	case t.Checkpoint == nil || t.Checkpoint.Snapshot == nil:
		return fmt.Errorf("%w: without a checkpoint", errTask)
	}
	return nil
}

// undoResult is the outcome of an undo.
type undoResult struct {
	// Done says that the effect is gone: proven, or by the contract of the answer.
	Done bool
	// Unknown says that the undo may or may not have had its effect, or that there may be none to
	// undo. Never with Done.
	Unknown bool
	// Reason is a fixed word for why it is not done; empty if it is.
	Reason Reason
	// Cause is the checkpoint's cause of ReasonIrreversible, and a participant's own word for ReasonRefused;
	// empty otherwise.
	Cause checkpoint.Reason
	// Completion is the id of the participant's signed result in the ledger; empty without one.
	Completion string
	// Status is the status of the last answer to the undo; 0 without one.
	Status int
	// Attempts counts how often the undo was sent; of earlier processes what they recorded, at
	// least one if they left it in doubt.
	Attempts int
	// Before and After are salted SHA-256 hashes of the target's bodies before and after the
	// undo: equal for equal bodies under one Rollback of the task, and nowhere else. Zero if there was
	// nothing, if it was not read (After without Verify), and for what is not restored.
	Before, After [32]byte
	// Version is the restored version; zero if it has no entity tag of its own, or somebody else
	// may have made it. It must be recorded with the outcome: the undo of the call before is
	// compared with it.
	Version checkpoint.Version
}

// Reason is a fixed word for why an undo is not done.
type Reason string

// The reasons.
const (
	reasonIrreversible  Reason = "irreversible"   // it cannot be undone
	ReasonChanged       Reason = "changed-since"  // somebody has changed it after the call
	ReasonRefused       Reason = "refused"        // 409: it has failed for good
	ReasonUnauthorized  Reason = "unauthorized"   // 401 or 403
	reasonUnexpected    Reason = "unexpected"     // an answer that the contract does not know
	reasonLost          Reason = "answer-lost"    // no decisive answer, and it may have had its effect
	ReasonUnreachable   Reason = "unreachable"    // no answer, and nothing was sent
	reasonTimeout       Reason = "timeout"        // not done when the rollback was due
	reasonUnfilled      Reason = "template"       // the request cannot be made of what was recorded
	ReasonNoUpstream    Reason = "no-upstream"    // the configuration does not lead there any more
	ReasonNoCredentials Reason = "no-credentials" // the recorded credentials are gone, or for another server
	ReasonOtherUpstream Reason = "other-upstream" // the configuration leads elsewhere than the recorded credentials may go
	reasonPartial       Reason = "partial"        // the delegate has undone a part
	reasonEscalated     Reason = "escalated"      // the delegate has left it to a person
	reasonUnverified    Reason = "unverified"     // after it, something else stands there
	reasonNoPostImage   Reason = "no-image"       // what stood there is not known
	ReasonForeign       Reason = "foreign"        // what the answer to the call has named is not the checkpoint of it
)

// Defaults of undoerOptions.
const (
	defaultFirst   = time.Second         // before an undo is sent a second time
	defaultLongest = time.Minute         // between two later times
	defaultTimeout = 30 * time.Second    // of one request
	defaultPoll    = 2 * time.Second     // between the first two questions for a status
	defaultKeep    = 30 * 24 * time.Hour // as a key is kept
)

// undoerOptions configure an undoer. Guard, Checkpoints and Sender are required.
type undoerOptions struct {
	// Guard runs the requests that change something.
	Guard *execution.Guard
	// Checkpoints has the recorded credentials.
	Checkpoints *checkpoint.Store
	Sender      Sender
	// First is the wait before an undo is sent again; it doubles each time, up to Longest.
	// Retry-After is waited at least, but never more than half of the time until the task is due.
	First, Longest time.Duration
	// Timeout bounds one request.
	Timeout time.Duration
	// Poll is the wait between two status requests; it grows like First.
	Poll time.Duration
	// Keep is how long after the rollback is due the answer to an undo is kept and its key taken:
	// at least as long as the rollback's record.
	Keep time.Duration
}

// undoer undoes calls. It is safe for concurrent use, also for the same task twice: one sends,
// the other waits for the outcome.
type undoer struct {
	o           undoerOptions
	hash        func(rollback string, state []byte) [32]byte
	noStateHash bool // asks for no state before and after a compensation; for tests that count requests
}

func newUndoer(o undoerOptions) *undoer {
	o.First = cmp.Or(o.First, defaultFirst)
	o.Longest = max(cmp.Or(o.Longest, defaultLongest), o.First)
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	o.Poll = cmp.Or(o.Poll, defaultPoll)
	o.Keep = cmp.Or(o.Keep, defaultKeep)
	u := &undoer{o: o}
	u.hash = u.saltedHash
	return u
}

// Undo undoes the call, and returns only what is known (P6). It may take until the task is due,
// and for one request longer.
//
// An error says nothing about the undo: ctx ended, errQuit, the store is unavailable, or
// guard.ErrDraining. The same task then goes on later, also after a restart.
func (u *undoer) Undo(ctx context.Context, t undoTask) (undoResult, error) {
	if err := t.check(); err != nil {
		return undoResult{}, err
	}
	c := t.Checkpoint
	way := c.Snapshot.Way
	if (way == checkpoint.Compensate || way == checkpoint.Delegate) && c.Result != nil && HadNoEffect(c.Result.Upstream) &&
		c.Snapshot.First == "" { // a refusal says nothing of an attempt before it
		return undoResult{Done: true}, nil
	}
	if c.Result != nil && c.Result.Reason == checkpoint.ReasonChanged {
		return undoResult{Reason: ReasonChanged}, nil // whatever on_changed says: what is to be put back is not known
	}
	if cause, irreversible := irreversible(c); irreversible {
		return undoResult{Reason: reasonIrreversible, Cause: cause}, nil
	}
	j, err := u.newJob(t)
	if err != nil {
		// The recorded undo can never be done: a result, and no error.
		return undoResult{Reason: reasonUnfilled}, nil
	}
	switch {
	case c.Snapshot.Way == checkpoint.Restore:
		return j.restore(ctx)
	case c.Snapshot.Way == checkpoint.Compensate && j.templates.compensate != nil,
		c.Snapshot.Way == checkpoint.Delegate && j.spec.Delegate != "":
		return j.compensated(ctx)
	}
	return undoResult{Reason: reasonUnfilled}, nil
}

// irreversible reports that a call cannot be undone, and why.
func irreversible(c *checkpoint.Checkpoint) (cause checkpoint.Reason, is bool) {
	if c.Snapshot.Way == checkpoint.Irreversible {
		return c.Snapshot.Reason, true
	}
	if c.Result != nil && c.Result.Reason != "" {
		return c.Result.Reason, true
	}
	return "", false
}

// HadNoEffect reports that a call had no effect, by the status of the upstream's own answer, 0 if
// unknown: a declined payment is not refunded. 408 does not say so, and 409 may be about an
// earlier attempt. It counts for compensate and delegate; restore compares the state.
func HadNoEffect(status int) bool {
	return status/100 == 4 && status != http.StatusRequestTimeout && status != http.StatusConflict
}

type job struct {
	*undoer
	task      undoTask
	call      *checkpoint.Snapshot
	spec      *Spec
	templates templates
	scope     execution.Scope
	key       execution.Key

	undoResult             // what is known so far
	owed       bool        // an attempt of an earlier rollback may have had its effect, and the key is this one's own
	window     WriteWindow // of what is restored; nil where none is open
	left       string      // the entity tag of what was put back; empty is none, or not known
	peerReason Reason      // the participant's own word for a refusal in this life; empty without one
}

// No request has this method: nobody else can take the key of an undo.
const (
	undoCaller = "agent_guard undo"
	undoMethod = "(undo)"
	undoPath   = "/"
	undoAction = "undo"
	// stateMethod belongs to no execution.
	stateMethod = "(state)"
)

func (u *undoer) newJob(t undoTask) (*job, error) {
	call := t.Checkpoint.Snapshot
	spec, err := ParseSpec(call.Undo)
	if err != nil {
		return nil, err
	}
	parsed, err := spec.templates()
	if err != nil {
		return nil, err
	}
	j := &job{undoer: u, task: t, call: call, spec: spec, templates: parsed}
	j.useKeyOf(t.Rollback)
	return j, nil
}

// useKeyOf takes the key of a rollback. P1: all attempts of a call share one, that of the first,
// whichever of them is known today.
func (j *job) useKeyOf(rollback string) {
	j.scope = execution.Scope{
		Caller: undoCaller, Guard: j.spec.Guard, Method: undoMethod, Path: undoPath,
		ID: rollback + "/" + j.call.Root(),
	}
	j.key = j.o.Guard.Key(j.scope)
}

// useOwnKey continues under this rollback's own key, if an earlier rollback has an answer of
// unknown effect: that answer stays, as the last under its key. The upstream sees the same key as
// before.
func (j *job) useOwnKey(n note) bool {
	if j.task.Again == "" || j.owed || !n.Unknown || n.Reading == pending {
		return false
	}
	j.take(n)
	j.owed, j.Unknown = true, true
	j.useKeyOf(j.task.Again)
	return true
}

func (j *job) guarded() *execution.Call {
	keep := j.o.Keep
	if !j.task.Due.IsZero() {
		keep += max(0, time.Until(j.task.Due)) // the rollback may go on until then
	}
	return &execution.Call{
		Key: j.key, Scope: j.scope, Origin: execution.OriginDerived, Host: j.call.Request.Host,
		Action: undoAction, Workflow: j.call.Workflow, Checkpoint: j.call.ID,
		Deadline: j.o.Timeout, KeepResult: keep, KeepKey: keep, ResultCap: 1,
	}
}

// idempotencyKey is the id under which the undo is sent, or its hash if it would be invalid.
func (j *job) idempotencyKey() string {
	whole := j.task.Rollback + "/" + j.call.Root()
	if id, err := execution.ParseID([]string{whole}); err == nil && id == whole {
		return id
	}
	sum := sha256.Sum256([]byte(whole))
	return "undo-" + hex.EncodeToString(sum[:])
}

// result is the result of an undo that is not done.
func (j *job) result(why Reason) undoResult {
	r := j.undoResult
	r.Reason = why
	if why == ReasonRefused && j.peerReason != ReasonRefused {
		r.Cause = checkpoint.Reason(j.peerReason)
	}
	return r
}

func (j *job) done() undoResult {
	r := j.undoResult
	r.Done, r.Unknown = true, false
	return r
}

// late is the result of an undo that cannot be tried again in time, or at all, after its last
// note.
func (j *job) late(n note) undoResult {
	switch {
	case n.reason != "":
		return j.result(n.reason)
	case n.Reading == unsent && !j.Unknown:
		return j.result(ReasonUnreachable)
	}
	return j.result(reasonTimeout)
}

func (j *job) overdue() bool { return !j.task.Due.IsZero() && !time.Now().Before(j.task.Due) }

// requestError is the error of a request that cannot be made.
type requestError struct{ why Reason }

func (b requestError) Error() string { return string(b.why) }

// completeRequest completes a request to url.
func (j *job) completeRequest(ctx context.Context, o Outgoing) (*Outgoing, error) {
	if o.Header == nil {
		o.Header = http.Header{}
	}
	o.Guard, o.Action, o.Spec = j.spec.Guard, j.call.Action, j.spec
	o.Rollback, o.Checkpoint, o.Workflow = j.task.Rollback, j.call.Root(), j.call.Workflow
	o.Execution = j.call.Execution
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
	credentials, err := j.o.Checkpoints.Credentials(ctx, j.call.ID)
	switch {
	case errors.Is(err, checkpoint.ErrUnknown), errors.Is(err, checkpoint.ErrTampered):
		return nil, requestError{ReasonNoCredentials}
	case err != nil:
		return nil, err
	}
	written := o.Header
	o.Header = http.Header{}
	maps.Copy(o.Header, credentials)
	maps.Copy(o.Header, written) // what the configuration writes wins
	return &o, nil
}

// LacksValues reports that the request of a compensation lacks recorded values: a call whose
// answer was lost did not leave them. It is false for what only Undo can find out.
func LacksValues(c *checkpoint.Checkpoint) bool {
	if c.Result != nil {
		return false
	}
	spec, err := ParseSpec(c.Snapshot.Undo)
	if err != nil {
		return false
	}
	if c.Snapshot.Way == checkpoint.Delegate {
		return spec.Agent != ""
	}
	t, err := spec.templates()
	return err == nil && t.compensate.Needs().Response()
}

// undoing is the request of compensate and delegate that undoes the call.
func (j *job) undoing(ctx context.Context) (*Outgoing, error) {
	if j.participant() {
		return j.participating(ctx, PhaseExecute)
	}
	if j.call.Way == checkpoint.Delegate {
		body, err := json.Marshal(struct {
			Rollback   string `json:"rollback_id"`
			Checkpoint string `json:"checkpoint_id"`
			Phase      string `json:"phase"`
			// The agent also undoes what it did for the call, as the token says.
			Cascade bool   `json:"cascade"`
			Reason  string `json:"reason,omitempty"`
		}{"urn:uuid:" + j.task.Rollback, j.call.Root(), "execute", true, j.task.Reason})
		if err != nil {
			return nil, requestError{reasonUnfilled}
		}
		return j.completeRequest(ctx, Outgoing{
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

// asking is the status request of the undo; nil if there is none, or it needs unknown values of
// the call's answer.
func (j *job) asking(ctx context.Context) (*Outgoing, error) {
	if j.templates.status == nil {
		return nil, nil
	}
	o, err := j.fill(ctx, j.templates.status)
	if errors.Is(err, requestError{reasonUnfilled}) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	o.Delegated = j.delegated() && strings.HasPrefix(j.spec.Delegate, j.templates.status.Origin()+"/")
	return o, nil
}

// fill makes a request from a template and the records.
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
		return nil, requestError{reasonUnfilled}
	}
	return j.completeRequest(ctx, Outgoing{Method: req.Method, URL: req.URL, Header: req.Header, Body: req.Body})
}

func message(m *checkpoint.Message) template.Message {
	return template.Message{Header: m.Header, ContentType: m.ContentType, Body: m.Body}
}

// find returns the state of the undo's guarded request once it runs no more; running only if that
// takes longer than the task may.
func (j *job) find(ctx context.Context) (execution.Finding, error) {
	for {
		found, err := j.o.Guard.LookUp(ctx, j.key, body.Fingerprint{})
		if err != nil {
			return found, err
		}
		switch found.Status {
		case execution.Doubtful:
			if r := found.Record; r.State == execution.StateSending && r.Boot == j.o.Guard.Boot() {
				// P1: what came of it may be known in this process, and is still to be recorded.
				return found, execution.ErrUnrecorded
			}
			j.Unknown, j.Attempts, j.Status = true, max(j.Attempts, 1), found.Record.Status
			return found, nil
		case execution.RunningHere, execution.RunningElsewhere:
			if j.overdue() {
				j.Unknown, j.Attempts = true, max(j.Attempts, 1)
				return found, nil
			}
			if err := j.await(ctx); err != nil {
				return found, err
			}
		case execution.Free:
			// Nothing was sent, or an operator knows that it was not applied.
			j.Unknown = j.owed
			if j.task.Forgotten && !j.owed {
				j.Unknown, err = j.unsettled(ctx)
				if j.Unknown {
					j.Attempts = max(j.Attempts, 1)
				}
			}
			return found, err
		default:
			return found, nil
		}
	}
}

// recorded finds the note of a final answer; nil where the undo is still to be done, is in doubt, or runs for longer
// than the task may. read reads an answer that is only a status.
func (j *job) recorded(ctx context.Context, read func(*Answer) note) (execution.Finding, *note, error) {
	for {
		found, err := j.find(ctx)
		if err != nil {
			return found, nil, err
		}
		switch found.Status {
		case execution.Free, execution.Doubtful, execution.RunningHere, execution.RunningElsewhere:
			return found, nil, nil
		}
		n, err := j.settled(ctx, found, read)
		if err != nil || !j.useOwnKey(n) {
			return found, &n, err
		}
	}
}

// unsettled reports that no operator has decided about the doubt of an earlier rollback whose key
// is free (P6).
func (j *job) unsettled(ctx context.Context) (bool, error) {
	said, err := j.o.Guard.Resolutions(ctx, j.key)
	return len(said) == 0 || said[len(said)-1].Applied, err
}

func (j *job) await(ctx context.Context) error {
	within := ctx
	if !j.task.Due.IsZero() {
		var cancel context.CancelFunc
		within, cancel = context.WithDeadline(ctx, j.task.Due)
		defer cancel()
	}
	err := j.o.Guard.Await(within, j.key)
	if within.Err() != nil && ctx.Err() == nil {
		return nil // it is the task that is overdue
	}
	return err
}

// attempt sends the undo once, as a guarded execution over what was found. The returned note is
// on disk (P2, P6); with an error it is not.
func (j *job) attempt(ctx context.Context, found execution.Finding, out *Outgoing, read func(*Answer) note) (note, error) {
	e, err := j.o.Guard.Claim(ctx, j.guarded(), found)
	if errors.Is(err, execution.ErrTaken) {
		return note{Reading: taken}, nil
	}
	if err != nil {
		return note{}, err
	}
	before := j.Unknown
	n, cause := note{Reading: lost}, execution.CauseInterrupted
	settled := false
	settle := func() error {
		settled = true
		outcome := execution.Outcome{Verdict: execution.InDoubt, Cause: cause, Status: n.status}
		switch {
		case n.Reading.final():
			n.Attempts, n.Before, n.Unknown = j.Attempts, j.Before, n.Unknown || before && n.Reading != done
			e.Recording().Start(n.status, n.header())
			outcome.Verdict, outcome.Whole = execution.Completed, true
		case found.Status != execution.Doubtful && !n.Reading.doubtful():
			// A key that was in doubt before stays so: that request was not the unsent one.
			outcome.Verdict = execution.Released
		}
		return e.SettleWith(context.WithoutCancel(ctx), outcome, nothingElse{})
	}
	defer func() {
		if !settled { // the sender has panicked
			j.Unknown = true
			_ = settle()
		}
	}()
	again, end := *out, func() {} // the sender may change its own
	again.Header = out.Header.Clone()
	sent, sentCause := j.send(ctx, out, read)
	if sent.wantsSession {
		sent, sentCause, end = j.inNewSession(ctx, &again, sent, read)
	}
	n, cause = sent, sentCause
	if n.Reading != unsent {
		j.Attempts++
	}
	if n.status != 0 {
		j.Status = n.status
	}
	j.Unknown = j.Unknown || n.Reading.doubtful()
	if err := settle(); err != nil {
		return n, err
	}
	if !n.Reading.doubtful() && n.Reading != pending { // else its server may still be at it
		end()
	}
	if !n.Reading.final() && ctx.Err() != nil {
		return n, ctx.Err()
	}
	return n, nil
}

// nothingElse is in the commit of an undo's outcome. Where the store takes that only later, the guard holds it, and the
// same task finds it then.
type nothingElse struct{}

func (nothingElse) Size() int64                          { return 0 }
func (nothingElse) Again(context.Context) []*store.Batch { return nil }

// send sends a request and reads its answer.
func (j *job) send(ctx context.Context, out *Outgoing, read func(*Answer) note) (note, execution.Cause) {
	within, cancel := context.WithTimeout(ctx, j.o.Timeout)
	defer cancel()
	a, err := j.o.Sender.Send(within, out)
	if err == nil && a != nil {
		n := read(a)
		n.status, n.after, n.fresh = a.Status, retryAfter(a.Header), true
		if n.Reading == accepted {
			// settled distinguishes it from a pending answer by the cause.
			return n, execution.CauseNoAnswer
		}
		return n, execution.CauseStatus
	}
	var why *SendError
	switch {
	case errors.As(err, &why) && (why.NotSent || why.Reason != ""):
		return note{Reading: unsent, reason: why.Reason}, execution.CauseNotSent
	case ctx.Err() != nil:
		return note{Reading: lost}, execution.CauseInterrupted
	case within.Err() != nil:
		return note{Reading: lost}, execution.CauseDeadline
	}
	return note{Reading: lost}, execution.CauseLost
}

// fieldNote is the field of a recorded answer with its note. Its body is not kept: the note has its meaning.
const fieldNote = "Undo-Note"

// header is the recorded form of a final note.
func (n *note) header() map[string][]string {
	kept := *n
	if len(kept.Tag) > maxTag {
		kept.Tag = ""
	}
	return map[string][]string{fieldNote: {string(store.Encode(nil, &kept))}}
}

// read reads what header recorded; false if it did not.
func (n *note) read(h map[string][]string) bool {
	var kept note
	if text := h[fieldNote]; len(text) != 1 || store.Decode([]byte(text[0]), &kept) != nil || !kept.Reading.final() {
		return false
	}
	*n = kept
	return true
}

// settled is the note of a request that was settled before. read reads an answer that is only a
// status.
func (j *job) settled(ctx context.Context, found execution.Finding, read func(*Answer) note) (note, error) {
	if found.Record == nil || found.Status == execution.Mismatch || found.Status == execution.RolledBack {
		return note{Reading: unexpected, Unknown: true}, nil // not by us
	}
	n := note{Reading: done, status: found.Record.Status, Attempts: 1}
	if found.Status == execution.Replayable {
		result, err := j.o.Guard.Result(ctx, j.key, found)
		switch {
		case err == nil && n.read(result.Head.Header):
			n.status = result.Head.Status
			return n, nil
		case err == nil:
			n.status = result.Head.Status
		case !errors.Is(err, execution.ErrResultUnavailable):
			return note{}, err
		}
	}
	// An operator settled a doubt: with an answer, or only as applied, which leaves a status that
	// decides nothing.
	if r := read(&Answer{Status: n.status}).Reading; r.final() && n.status != 0 {
		n.Reading = r
	} else if n.status == http.StatusAccepted && found.Record.Cause == execution.CauseStatus {
		n.Reading = pending // ours, whose Location the store had no room for
	}
	return n, nil
}

func (j *job) take(n note) {
	j.Unknown, j.Status = n.Unknown, n.status
	j.Attempts, j.Completion = max(j.Attempts, n.Attempts), cmp.Or(n.Completion, j.Completion)
	if n.Before != [32]byte{} {
		j.Before = n.Before
	}
}

// applied settles a doubt with what was found out since.
func (j *job) applied(ctx context.Context, found execution.Finding, n note) error {
	if found.Status != execution.Doubtful {
		return nil // it is the doubt of an earlier rollback, whose answer stands
	}
	n.Attempts, n.Before = j.Attempts, j.Before
	head := &execution.Head{Status: n.status, Header: n.header()}
	of := execution.Recorded{Key: j.key, Finding: found}
	err := j.o.Guard.SettleDoubt(context.WithoutCancel(ctx), of, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: head})
	if errors.Is(err, execution.ErrTaken) {
		return nil // by another one who found it out; what is known stays so
	}
	return err
}

// pace says when to try again.
type pace struct {
	first, next, longest time.Duration
	due                  time.Time
	quit                 <-chan struct{}
}

func (j *job) pace(first time.Duration) *pace {
	return &pace{first: first, next: first, longest: max(first, j.o.Longest), due: j.task.Due, quit: j.task.Quit}
}

// wait waits for the next try, at least for least, but for at most half of the time left: a long
// Retry-After does not end the undo. The last waits are shorter, to use the time left. It returns
// false when the task is due.
func (p *pace) wait(ctx context.Context, least time.Duration) (bool, error) {
	d, due := max(p.next, least), false
	p.next = min(2*p.next, p.longest)
	if !p.due.IsZero() {
		left := time.Until(p.due)
		if d = min(d, max(left/2, p.first)); d >= left {
			d, due = left, true
		}
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return !due, nil
	case <-ctx.Done():
		return false, ctx.Err()
	case <-p.quit:
		return false, errQuit
	}
}

// retryAfter is the wait that an answer asks for; 0 without one.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if seconds, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(0, time.Until(at))
	}
	return 0
}
