package guard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// capture is what is recorded of a call for its undo, decided before the call leaves.
type capture struct {
	decision Decision
	source   template.Source  // of the templates: the request, and later the answer
	images   *InternalRequest // reads the target's state; nil where it is not needed
	image    *checkpoint.Image
	window   *writeWindow       // in which nobody else must change what is restored; nil without
	pending  *store.Batch       // the snapshot, for the claim's commit
	handle   *checkpoint.Handle // of the recorded checkpoint; nil without
	result   *checkpoint.Result // of the call, once it was read

	answer []byte // the beginning of the answer's body, where it is needed
	over   bool   // the answer's body is larger than what is kept

	participant string // the checkpoint that the answer has named, which nothing proves
}

// planUndo finds out how the call can be undone. It comes before the claim, so that a gateway
// that dies during the read leaves nothing behind (ADR 0031); if the claim is lost the read was
// in vain.
func (c *capture) planUndo(q *Request, in *admission) error {
	c.window.Close()
	*c = capture{}
	if q.policy == nil {
		return nil
	}
	plan := q.action.Undo
	if plan == nil {
		c.decision = Decision{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonDeclared}
		if q.action.Default && !q.action.Irreversible {
			c.decision.Reason = checkpoint.ReasonNoAction
		}
		return nil
	}
	if plan.restores(q.r.Method) {
		c.window = q.engine.Writes.Open(q.place(), q.call.Key)
		err := c.imageBefore(q, in, plan)
		if q.r.Context().Err() != nil {
			return q.gone()
		}
		if err != nil && plan.Compensate == nil && q.action.OnSnapshotError != checkpoint.Irreversible.String() {
			return q.noSnapshot(err)
		}
		if err != nil {
			q.h.Logger.Warn("what a call changes could not be read before it",
				slog.String("guard", q.h.Name), slog.String("action", q.action.Name), slog.Any("error", err))
		}
	}
	body, large, err := q.undoBody(plan, c.image != nil)
	if err != nil {
		return err
	}
	if large {
		c.decision = Decision{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonTooLarge}
		c.image = nil
		return nil
	}
	c.source = template.Source{
		Path: q.r.URL.EscapedPath(), Query: q.r.URL.RawQuery,
		Request:     template.Message{Header: q.r.Header, ContentType: q.r.Header.Get("Content-Type"), Body: body},
		ExecutionID: q.call.Scope.ID, WorkflowID: q.facts.Workflow,
	}
	return nil
}

func (q *Request) noSnapshot(why error) error {
	if err := refusedByCircuit(why, caller.Verified(q.call.Scope.Caller)); err != why {
		return err
	}
	return problemOf(problem.SnapshotFailed, "Nothing was forwarded.", 0).Because(why)
}

func (q *Request) undoBody(plan *UndoPlan, imaged bool) (body []byte, large bool, err error) {
	switch {
	case !plan.readsRequestBody() || imaged || encoded(q.r.Header):
		return nil, false, nil
	case q.body.Size() > checkpoint.MaxImage:
		return nil, true, nil
	}
	if m := q.message; m != nil && m.Batch { // the others of it are not undone
		return m.Body, false, nil
	}
	if body, err = io.ReadAll(io.NewSectionReader(q.body, 0, q.body.Size())); err != nil {
		return nil, false, unkept(err)
	}
	return body, false, nil
}

// encoded reports that a body has a content coding, so that it cannot be read.
func encoded(h http.Header) bool {
	for _, line := range h["Content-Encoding"] {
		if coding := textproto.TrimString(line); coding != "" && !strings.EqualFold(coding, "identity") {
			return true
		}
	}
	return false
}

// keepSnapshot adds the checkpoint's snapshot and credentials to the claim's commit (P2), and
// records them in its token.
func (c *capture) keepSnapshot(ctx context.Context, q *Request, in *admission) (*checkpoint.Pending, error) {
	id := uuid.NewString()
	if plan := q.action.Undo; plan != nil && c.decision.Way == 0 {
		c.source.CheckpointID = id
		c.decision = plan.Decide(q.r.Method, &c.source, c.image != nil)
	}
	snapshot := checkpoint.Snapshot{
		ID: id, Workflow: q.facts.Workflow, Caller: q.executions.Caller(q.call.Scope.Caller), Execution: q.call.Key,
		Action: q.action.Name, Upstream: q.h.Reach, Way: c.decision.Way, Reason: c.decision.Reason,
		Request: checkpoint.Request{
			Method: q.r.Method, Host: q.r.Host, Path: q.r.URL.EscapedPath(), Query: q.r.URL.RawQuery, Message: c.decision.Request,
		},
		Undo: c.decision.Undo, OnError: q.action.OnError == OnErrorRollback,
	}
	if snapshot.Way == checkpoint.Restore {
		snapshot.Image = c.image
	}
	if in.mayHaveRun() {
		snapshot.First = id
		if in.before != "" {
			var err error
			if snapshot.First, err = q.engine.Checkpoints.First(ctx, in.before); err != nil {
				return nil, q.storeFailed(err)
			}
		}
	}
	var credentials map[string][]string
	if q.action.UndoAuth == rollback.AuthRecorded && (snapshot.Way == checkpoint.Restore || snapshot.Way == checkpoint.Compensate) {
		credentials = q.credentials()
	}
	terms := q.h.Checkpoints
	terms.TTL, terms.Place = time.Duration(q.action.CheckpointTTL), c.decision.Place
	p, err := q.engine.Checkpoints.Prepare(ctx, snapshot, credentials, terms)
	if over := (*checkpoint.QuotaError)(nil); errors.As(err, &over) {
		return nil, overCheckpoints(over)
	}
	if err != nil {
		return nil, q.storeFailed(err)
	}
	handle := p.Handle()
	if c.pending, c.handle = p.Batch, &handle; !p.Snapshot().Reversible() {
		c.decision = Decision{Way: checkpoint.Irreversible, Reason: p.Snapshot().Reason}
	}
	return p, nil
}

func (q *guardedRequest) credentials() map[string][]string {
	found := map[string][]string{}
	for name, values := range q.r.Header {
		if name == "Cookie" || q.h.fields.Class(name) == body.Credential {
			found[name] = slices.Clone(values)
		}
	}
	return found
}

func (c *capture) ended(err error) error {
	if c.pending == nil {
		return err
	}
	if err = c.pending.Done(err); err != nil {
		c.handle = nil
	}
	c.pending = nil
	return err
}

// undoable is the batch for the outcome's commit with what a rollback needs of the call's end;
// nil if nothing. The outcome is recorded even if that fails (P1).
func (c *capture) undoable(ctx context.Context, x *Call, o execution.Outcome, header http.Header) *store.Batch {
	if c.handle == nil {
		return nil
	}
	result := checkpoint.Result{Reason: checkpoint.ReasonChanged}
	switch {
	case o.Verdict == execution.Released:
		return x.engine.Checkpoints.Release(*c.handle)
	case o.Verdict == execution.InDoubt:
		// Its effect is unknown. Its rollback and further attempts need to know only whether somebody else has
		// written to its target.
		if c.decision.Way != checkpoint.Restore || !c.window.end() {
			return nil
		}
	case c.decision.Way == checkpoint.Irreversible:
		return nil // only a person can undo it; this saves a write
	default:
		c.observe(&x.Request, &x.in, x.up.upstream.Status(), o, header)
		result = *c.result
	}
	p, err := x.engine.Checkpoints.Record(ctx, *c.handle, result)
	if err != nil {
		x.h.Logger.Error("what is needed to undo a call cannot be recorded", slog.Any("key", x.call.Key), slog.Any("error", err))
		return nil
	}
	return p.Batch
}

// observe reads, once, what is recorded of a completed call. The end of its answer always waits
// for this, even if it does not wait for the record: a client that has seen the end may change
// what the call left.
func (c *capture) observe(q *Request, in *admission, upstream int, o execution.Outcome, header http.Header) {
	if c.handle == nil || c.result != nil || o.Verdict != execution.Completed {
		return
	}
	result := checkpoint.Result{Status: o.Status, Upstream: upstream}
	switch c.decision.Way {
	case checkpoint.Restore:
		result.Image, result.Reason = c.imageAfter(q, cmp.Or(result.Upstream, o.Status), header)
	case checkpoint.Compensate:
		if in.mayHaveRun() || !rollback.HadNoEffect(result.Upstream) { // else nothing is to be undone
			result.Answer, result.Reason = c.answered(q, o.Status, header)
		}
	case checkpoint.Delegate:
		if c.decision.plan.Agent != "" && (in.mayHaveRun() || !rollback.HadNoEffect(result.Upstream)) {
			result.Answer, result.Reason = rollback.NamedCheckpoint(c.participant)
		}
	}
	c.result = &result
}

func (c *capture) answered(q *Request, status int, header http.Header) (checkpoint.Message, checkpoint.Reason) {
	if c.over {
		return checkpoint.Message{}, checkpoint.ReasonTooLarge
	}
	c.source.Status = status
	c.source.Response = template.Message{Header: header, ContentType: header.Get("Content-Type")}
	if !encoded(header) {
		c.source.Response.Body = c.answer
		if q.message != nil {
			if text := q.message.Final(header.Get("Content-Type"), c.answer); text != nil {
				c.source.Response.ContentType, c.source.Response.Body = "application/json", text
			}
		}
	}
	return c.decision.Answered(&c.source)
}

// hears keeps the beginning of the answer's body for a compensation.
func (c *capture) hears(p []byte) {
	if c.over || !c.decision.ReadsAnswer() {
		return
	}
	if c.over = len(c.answer)+len(p) > checkpoint.MaxImage; c.over {
		c.answer = nil
		return
	}
	c.answer = append(c.answer, p...)
}

// snapshotTime bounds each read of the target's state: before the call, and after it.
const snapshotTime = 10 * time.Second

func (c *capture) imageBefore(q *Request, in *admission, plan *UndoPlan) error {
	header, err := plan.header()
	if err != nil {
		return err
	}
	look := rollback.ImageRequest(&checkpoint.Request{Message: checkpoint.Message{Header: q.r.Header}})
	for name, values := range look.Header {
		if header[name] == nil {
			header[name] = values
		}
	}
	if q.action.UndoAuth == rollback.AuthRecorded {
		for name, values := range q.credentials() {
			if header[name] == nil { // as in the undo: what the configuration writes wins
				header[name] = values
			}
		}
	}
	request := &InternalRequest{
		Method: look.Method, Path: q.r.URL.EscapedPath(), Query: q.r.URL.RawQuery,
		Host: q.r.Host, Remote: q.r.RemoteAddr, Header: header, MaxAnswer: checkpoint.MaxImage,
	}
	ctx, cancel := context.WithTimeout(q.r.Context(), snapshotTime)
	defer cancel()
	image, err := q.readImage(ctx, request)
	if err == nil && in.mayHaveRun() {
		image, err = c.imageBeforeAll(ctx, q, in.before, image)
	}
	if err == nil {
		c.images, c.image = request, image
	}
	return err
}

// place names the target of the call, for concurrent calls of the same target.
func (q *guardedRequest) place() string {
	return checkpoint.TargetOf(q.h.Reach, q.r.URL.EscapedPath())
}

// errDisturbed: the images may show what somebody else did.
var errDisturbed = errors.New("another call has changed the target between the look before this call and the one after it")

// imageAfter reads the state after the call. The end of the answer waits for it as long as for
// the state before, at most (P7).
func (c *capture) imageAfter(q *Request, status int, header http.Header) (*checkpoint.Image, checkpoint.Reason) {
	var limit clock
	q.engine.detach(&limit, q.r.Context(), snapshotTime)
	defer limit.stop()
	image, err := q.readImage(WithUndo(&limit), c.images) // past a breaker that has opened meanwhile
	if c.window.end() {
		err = errDisturbed
	} else if err == nil {
		err = c.agrees(q.r, status, header, image)
	}
	if err != nil {
		q.h.Logger.Warn("what a call has left could not be read; only a person can undo it",
			slog.Any("key", q.call.Key), slog.String("action", q.action.Name), slog.Any("error", err))
		switch {
		case errors.Is(err, errDisturbed):
			return nil, checkpoint.ReasonChanged
		case errors.Is(err, errNotCreated):
			return nil, checkpoint.ReasonNotCreated
		}
		return nil, checkpoint.ReasonNoImage
	}
	return image, ""
}

// agrees checks that the state after the call is what the upstream says that it did. A rollback
// must not mistake something else for the call's work, nor the old state for a call that was
// taken back (P6).
func (c *capture) agrees(r *http.Request, status int, header http.Header, after *checkpoint.Image) error {
	before, deleted := c.image, r.Method == http.MethodDelete
	switch {
	case status/100 != 2:
	case status == http.StatusAccepted:
		if rollback.Same(before, after) {
			return errors.New("the answer 202 promises a change, and nothing has changed yet")
		}
	case after.Exists == deleted: // a replica that lags, or another change
		return fmt.Errorf("the answer %d to a %s, and the state after it do not agree", status, r.Method)
	case after.Exists && !encoded(header) && otherTag(header.Get("ETag"), after.ETag):
		// RFC 9110, section 8.8.3: the answer's tag is that of the state that the call made.
		return fmt.Errorf("%w: the entity tag of its answer is another", errDisturbed)
	case !deleted && !before.Exists && status != http.StatusCreated && !slices.Equal(r.Header["If-None-Match"], []string{"*"}): // else the call itself fails where something is
		return fmt.Errorf("%w: it was answered %d", errNotCreated, status)
	case deleted && !before.Exists: // the guard may not see what was there
		return fmt.Errorf("the answer %d to a DELETE, and that nothing was there before it do not agree", status)
	}
	return nil
}

// errNotCreated: what seems new may have been there before, for example if the read before the
// call came from a lagging replica. It must not be deleted (P6).
var errNotCreated = errors.New("nothing stood there before the call, and its answer does not say 201: that it has created something (RFC 9110, section 9.3.4)")

// otherTag reports whether two entity tags exist and are of different states.
func otherTag(a, b string) bool {
	return a != "" && b != "" && strings.TrimPrefix(a, "W/") != strings.TrimPrefix(b, "W/")
}

func (q *guardedRequest) readImage(ctx context.Context, r *InternalRequest) (*checkpoint.Image, error) {
	a, err := q.h.Send(ctx, r)
	if err != nil {
		return nil, err
	}
	image := rollback.ImageOf(&rollback.Answer{Status: a.Status, Header: a.Header, Body: a.Body})
	switch {
	case a.Replaced:
		return nil, fmt.Errorf("the answer %d to GET is not the upstream's", a.Status)
	case image == nil:
		return nil, fmt.Errorf("the answer %d to GET does not say what stands there; 200, 204, 404 and 410 do", a.Status)
	case image.Exists && a.Unframed:
		return nil, errors.New("the answer to GET is framed by nothing but the end of its connection, so that a cut cannot be seen")
	}
	return image, nil
}

// imageBeforeAll is the state before a call that may have been executed already: the one read
// before its earlier attempt, as the current one may be its own work (P6). If the current state
// is neither that nor what the attempt would have left, or somebody wrote during the attempt, its
// author is unknown: the window is disturbed.
func (c *capture) imageBeforeAll(
	ctx context.Context, q *Request, earlier string, now *checkpoint.Image,
) (*checkpoint.Image, error) {
	before, err := q.engine.Checkpoints.Before(ctx, earlier)
	if err != nil {
		return nil, err
	}
	others, err := q.engine.Checkpoints.Disturbed(ctx, earlier)
	if err != nil {
		return nil, err
	}
	if !others && !rollback.Same(before, now) {
		own, err := q.leaves(now)
		if err != nil {
			return nil, err
		}
		others = !own
	}
	if others {
		c.window.disturb()
	}
	return before, nil
}

// leaves reports that an image is what the call itself would leave.
func (q *Request) leaves(image *checkpoint.Image) (bool, error) {
	switch {
	case q.r.Method == http.MethodDelete:
		return !image.Exists, nil
	case q.r.Method != http.MethodPut, !image.Exists, encoded(q.r.Header), int64(len(image.Body)) != q.body.Size():
		return false, nil
	}
	if sent := q.r.Header.Get("Content-Type"); sent != "" && mediaType(sent) != mediaType(image.ContentType) {
		return false, nil
	}
	body, err := io.ReadAll(io.NewSectionReader(q.body, 0, q.body.Size()))
	return bytes.Equal(body, image.Body), err
}

// mediaType strips the parameters, since servers add some.
func mediaType(field string) string {
	if plain, _, err := mime.ParseMediaType(field); err == nil {
		return plain
	}
	return field
}

// WriteTracker tracks which guarded calls change the same target at the same time, so that none
// takes another's write for its own or for the state before it (P6). It sees calls through the
// restoring guards of this process, and of all that share its store; other writes are found by entity tags, or not at
// all.
type WriteTracker struct {
	mu    sync.Mutex
	all   map[string]*trackedTarget
	fleet *fleetWrites // nil where one gateway has the store
}

// trackedTarget is a target while calls change it.
type trackedTarget struct {
	windows map[*writeWindow]bool
	writing int
	prefix  string // of its entries; empty where one gateway has the store
}

// writeWindow lasts from the read before a call, or an undo, to the read after it.
type writeWindow struct {
	of   *WriteTracker
	name string
	own  execution.Key // that of the call which is made, or undone

	// Guarded by of.mu.
	disturbed bool // somebody else has written in it
	closed    bool
}

func (t *WriteTracker) at(name string) *trackedTarget {
	if t.all == nil {
		t.all = map[string]*trackedTarget{}
	}
	found := t.all[name]
	if found == nil {
		found = &trackedTarget{windows: map[*writeWindow]bool{}}
		t.all[name] = found
	}
	return found
}

// left forgets an unused target, with mu held.
func (t *WriteTracker) left(name string) {
	if at := t.all[name]; len(at.windows) == 0 && at.writing == 0 {
		delete(t.all, name)
	}
}

// Open begins a window of the call with the key own, or of its undo. It must be closed. Where other gateways cannot be
// asked who writes there it is disturbed.
func (t *WriteTracker) Open(name string, own execution.Key) *writeWindow {
	err := t.fleet.catchUp()
	w := t.open(name, own)
	if err != nil || t.fleet.writing(name, own) {
		w.disturb()
	}
	return w
}

func (t *WriteTracker) open(name string, own execution.Key) *writeWindow {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := t.at(name)
	if at.prefix == "" && t.fleet != nil {
		at.prefix = string(t.fleet.writes.Key(t.fleet.target(name)))
	}
	w := &writeWindow{of: t, name: name, own: own, disturbed: at.writing > 0}
	at.windows[w] = true
	return w
}

// Disturbed implements rollback.WriteWindow. It knows of all writes that have begun before the call, at all gateways.
func (w *writeWindow) Disturbed() bool {
	if err := w.of.fleet.catchUp(); err != nil {
		w.disturb()
	}
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	return w.disturbed
}

// disturb marks a write of somebody else that the tracker did not see.
func (w *writeWindow) disturb() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	w.disturbed = true
}

// Close implements rollback.WriteWindow.
func (w *writeWindow) Close() {
	if w == nil {
		return
	}
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	if !w.closed {
		w.closed = true
		delete(w.of.all[w.name].windows, w)
		w.of.left(w.name)
	}
}

// end ends a window, and reports whether it was disturbed. A nil window was not.
func (w *writeWindow) end() bool {
	if w == nil {
		return false
	}
	defer w.Close()
	return w.Disturbed()
}

// write marks the beginning of a write to a target, by a call with that window or none. over must
// be called at its end.
func (t *WriteTracker) write(name string, own *writeWindow) (over func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := t.at(name)
	if own != nil && at.writing > 0 {
		own.disturbed = true
	}
	for w := range at.windows {
		w.disturbed = w.disturbed || w != own
	}
	at.writing++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		at.writing--
		t.left(name)
	}
}

// WriteUndo is write for an undo of the call undone, whose window may be nil. P6: it refuses the write if somebody else
// has written since the undo's read, with a *rollback.SendError.
func (t *WriteTracker) WriteUndo(name string, undone execution.Key, window rollback.WriteWindow) (over func(), err error) {
	own, _ := window.(*writeWindow)
	if own != nil && own.name != name { // a new read goes where the write goes
		return nil, unsentUndo("", "the configuration leads to another upstream than when the target was looked at")
	}
	announced, err := t.fleet.announceUndo(name, undone)
	if err != nil {
		return nil, unsentUndo("", "it cannot be recorded that the target is written: "+err.Error())
	}
	written := t.write(name, own)
	over = func() {
		written()
		announced()
	}
	if own != nil && own.Disturbed() {
		over()
		return nil, unsentUndo(rollback.ReasonChanged, "another call has changed the target since it was looked at")
	}
	return over, nil
}

func unsentUndo(reason rollback.Reason, why string) error {
	return &rollback.SendError{NotSent: true, Reason: reason, Err: errors.New("undo: " + why)}
}

// UndoPlan is how the calls of one action are undone: restored, compensated by another request,
// or delegated to an agent. It does not change and may be used by many goroutines.
type UndoPlan struct {
	// Spec is what is recorded for the undo of every call. Its Auth and OnLost are those of the action, if left out.
	Spec rollback.Spec
	// Restore restores the target of a PUT, PATCH or DELETE. OnChanged says what to do if it was
	// changed since, if not what the action says; Verify that the result is read.
	Restore   bool
	OnChanged string
	Verify    bool
	// Compensate makes the request that takes a call back, Status the one for its outcome; nil
	// without. Needs are those of both.
	Compensate, Status *template.Template
	Needs              template.Needs
	// Delegate is the URI where an agent is asked to undo the call, or empty. Agent is as in
	// rollback.Spec.
	Delegate, Agent string
	// Header has the configured fields of requests to the call's upstream. Nil: none.
	Header func() (http.Header, error)
}

// Decision is how one call will be undone.
type Decision struct {
	// Way is as in checkpoint.Snapshot.
	Way checkpoint.Way
	// Reason is as in checkpoint.Snapshot.
	Reason checkpoint.Reason
	// Request is the recorded part of the request's message.
	Request checkpoint.Message
	// Undo is the recorded way to undo it.
	Undo []byte
	// Place is as in checkpoint.Terms.
	Place string

	plan *UndoPlan
}

// restores reports whether GET shows what a call with this method changes, so that an image is
// needed.
func (p *UndoPlan) restores(method string) bool {
	switch method {
	case http.MethodPut, http.MethodPatch, http.MethodDelete:
		return p.Restore
	}
	return false
}

// readsRequestBody says that Decide needs the request's body.
func (p *UndoPlan) readsRequestBody() bool { return len(p.Needs.RequestBody) > 0 }

// Decide says how a call is undone, before it leaves. src has all that is known of the call then;
// imaged says that the target's state was read.
func (p *UndoPlan) Decide(method string, src *template.Source, imaged bool) Decision {
	d := Decision{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonDeclared, plan: p}
	spec := rollback.Spec{
		Guard: p.Spec.Guard, Reach: p.Spec.Reach, Fields: p.Spec.Fields,
		ExecutionID: src.ExecutionID, OnLost: p.Spec.OnLost, Auth: p.Spec.Auth,
	}
	switch {
	case imaged && p.restores(method):
		d.Way, d.Request = checkpoint.Restore, chosen(&src.Request, rollback.ImageRequestFields, false)
		spec.OnChanged = p.OnChanged
		spec.Verify = p.Verify
	case p.Compensate != nil:
		full := *src // with any answer that has everything
		full.Status, full.Response = http.StatusOK, stand(&p.Needs)
		if reason := p.filled(&full); reason != "" {
			d.Reason = reason
			return d
		}
		names := p.Needs.RequestHeader
		if spec.Target = p.restores(method); spec.Target {
			names = append(slices.Clone(names), rollback.ImageRequestFields...)
		}
		d.Way, d.Request = checkpoint.Compensate, chosen(&src.Request, names, p.readsRequestBody())
		spec.Compensate, spec.Status, spec.Protocol = p.Spec.Compensate, p.Spec.Status, p.Spec.Protocol
	case p.Delegate != "":
		d.Way, spec.Delegate, spec.Agent = checkpoint.Delegate, p.Delegate, p.Agent
	case p.restores(method):
		d.Reason = checkpoint.ReasonNoImage
		return d
	case p.Restore:
		d.Reason = checkpoint.ReasonMethod
		return d
	default:
		return d
	}
	d.Reason = ""
	d.Undo, d.Place = spec.Encode(), spec.Place()
	return d
}

// Answered is the recorded part of an answer, or why the call cannot be undone although its
// checkpoint says that it can. src is that of Decide with the answer.
func (d *Decision) Answered(src *template.Source) (checkpoint.Message, checkpoint.Reason) {
	if d.Way != checkpoint.Compensate {
		return checkpoint.Message{}, ""
	}
	if reason := d.plan.filled(src); reason != "" {
		return checkpoint.Message{}, reason
	}
	return chosen(&src.Response, d.plan.Needs.ResponseHeader, d.ReadsAnswer()), ""
}

// ReadsAnswer says that Answered needs the answer's body.
func (d *Decision) ReadsAnswer() bool {
	return d.Way == checkpoint.Compensate && len(d.plan.Needs.ResponseBody) > 0
}

func (p *UndoPlan) filled(src *template.Source) checkpoint.Reason {
	full := *src
	full.RollbackID = "00000000-0000-4000-8000-000000000000" // any will do
	for _, t := range []*template.Template{p.Compensate, p.Status} {
		if t == nil {
			continue
		}
		_, err := t.Fill(&full)
		switch {
		case errors.Is(err, template.ErrTooLarge):
			return checkpoint.ReasonTooLarge
		case err != nil:
			return checkpoint.ReasonAbsent
		}
	}
	return ""
}

// stand is an answer with everything that is needed.
func stand(n *template.Needs) template.Message {
	m := template.Message{Header: http.Header{}}
	for _, name := range n.ResponseHeader {
		m.Header[name] = []string{"x"}
	}
	var doc any
	for _, pointer := range n.ResponseBody {
		doc = grown(doc, strings.Split(pointer, "/")[1:])
	}
	if doc != nil {
		m.Body, _ = json.Marshal(doc) // maps and strings only
	}
	return m
}

var unescape = strings.NewReplacer("~1", "/", "~0", "~")

// grown is doc with a text at a JSON pointer. An index is a name like others.
func grown(doc any, tokens []string) any {
	if len(tokens) == 0 {
		return "x"
	}
	members, _ := doc.(map[string]any)
	members = maps.Clone(members)
	if members == nil {
		members = map[string]any{}
	}
	name := unescape.Replace(tokens[0])
	members[name] = grown(members[name], tokens[1:])
	return members
}

// chosen is the recorded part of a message.
func chosen(m *template.Message, names []string, body bool) checkpoint.Message {
	var kept checkpoint.Message
	for _, name := range names {
		if kept.Header == nil {
			kept.Header = map[string][]string{}
		}
		kept.Header[name] = slices.Clone(m.Header[name])
	}
	if body {
		kept.ContentType, kept.Body = m.ContentType, m.Body
	}
	return kept
}

func (p *UndoPlan) header() (http.Header, error) {
	if p.Header == nil {
		return http.Header{}, nil
	}
	return p.Header()
}
