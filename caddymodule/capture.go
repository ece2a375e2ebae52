package caddymodule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	templates "github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// capture is what is kept of a call so that it can be undone. What is decided is decided
// before the call leaves (DESIGN, "Settled here").
type capture struct {
	decision undoing.Decision
	source   templates.Source // of the templates: the request, and later the answer
	images   *errand          // reads what stands at the target; nil where nobody asks
	image    *checkpoint.Image
	pending  *checkpoint.Pending // the snapshot on its way into the claim's commit
	handle   checkpoint.Handle   // of the checkpoint that stands
	kept     bool                // it stands
	result   *checkpoint.Result  // of the call, once it was found out

	answer []byte // the beginning of the answer's body, where it is needed
	over   bool   // the answer's body is larger than what is kept
}

// foresee finds out how the call can be undone. It comes before the claim, so that a
// gateway that dies while it reads leaves nothing behind (ADR 0031); a claim that is
// lost afterwards has read in vain.
func (x *exchange) foresee(found guard.Finding) error {
	x.capture = capture{}
	x.window.close()
	x.window = nil
	if x.story.way == nil {
		return nil
	}
	c, plan := &x.capture, x.action.undo
	if plan == nil {
		c.decision = undoing.Decision{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonDeclared}
		if x.action.Name == defaultAction && !x.action.Irreversible {
			c.decision.Reason = checkpoint.ReasonNoAction
		}
		return nil
	}
	if plan.Restores(x.r.Method) {
		x.window = x.engine.targets.open(x.place())
		err := x.imageBefore(plan, found)
		if x.r.Context().Err() != nil {
			return x.gone()
		}
		if err != nil && !plan.Compensates() && plan.Terms().Refuses() {
			return x.noSnapshot(err)
		}
		if err != nil {
			x.h.logger.Warn("what a call changes could not be read before it",
				zap.String("guard", x.h.Name), zap.String("action", x.action.Name), zap.Error(err))
		}
	}
	body, large, err := x.undoBody(plan)
	if err != nil {
		return err
	}
	if large {
		c.decision = undoing.Decision{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonTooLarge}
		c.image = nil
		return nil
	}
	c.source = templates.Source{
		Path: x.r.URL.EscapedPath(), Query: x.r.URL.RawQuery,
		Request:     templates.Message{Header: x.r.Header, ContentType: x.r.Header.Get("Content-Type"), Body: body},
		ExecutionID: x.call.Scope.ID, WorkflowID: x.story.call.Workflow,
	}
	return nil
}

// noSnapshot refuses a call whose state before could not be read.
func (x *exchange) noSnapshot(why error) error {
	if err := refusedByCircuit(why, verifiedHere(x.call.Scope.Caller)); err != why {
		return err
	}
	p := x.problem(problem.SnapshotFailed, "Nothing was forwarded.", 0)
	p.Cause = why
	return p
}

// undoBody is the request's body, where the undo needs something of it.
func (x *exchange) undoBody(plan *undoing.Plan) (body []byte, large bool, err error) {
	switch {
	case !plan.ReadsRequestBody() || x.capture.image != nil || encoded(x.r.Header):
		return nil, false, nil
	case x.body.Size() > plan.Terms().MaxImage:
		return nil, true, nil
	}
	reader := x.body.NewReader()
	defer reader.Close()
	if body, err = io.ReadAll(reader); err != nil {
		return nil, false, x.unkept(err)
	}
	return body, false, nil
}

// encoded reports that a body has a content coding, so that nothing can be read of it.
func encoded(h http.Header) bool {
	for _, line := range h["Content-Encoding"] {
		if coding := textproto.TrimString(line); coding != "" && !strings.EqualFold(coding, "identity") {
			return true
		}
	}
	return false
}

// keepSnapshot makes the checkpoint's snapshot and credentials ride in the claim's
// commit (P2), and tells the story what its token says of them.
func (x *exchange) keepSnapshot(ctx context.Context) error {
	c, s := &x.capture, &x.story
	id := uuid.NewString()
	if plan := x.action.undo; plan != nil && c.decision.Way == 0 {
		c.source.CheckpointID = id
		c.decision = plan.Decide(x.r.Method, &c.source, c.image != nil)
	}
	snapshot := checkpoint.Snapshot{
		ID: id, Workflow: s.call.Workflow, Caller: x.guard.Caller(x.call.Scope.Caller), Execution: x.call.Key,
		Action: x.action.Name, Upstream: x.h.upstreamName(), Way: c.decision.Way, Reason: c.decision.Reason,
		Request: checkpoint.Request{
			Method: x.r.Method, Host: x.r.Host, Path: x.r.URL.EscapedPath(), Query: x.r.URL.RawQuery, Message: c.decision.Request,
		},
		Undo: c.decision.Undo,
	}
	if snapshot.Way == checkpoint.Restore {
		snapshot.Image = c.image
	}
	if x.mayHaveRun() {
		var err error
		if snapshot.First, err = x.firstAttempt(ctx, id); err != nil {
			return x.storeFailed(err)
		}
	}
	var credentials map[string][]string
	if x.action.Recorded() && (snapshot.Way == checkpoint.Restore || snapshot.Way == checkpoint.Compensate) {
		credentials = x.credentials()
	}
	p, err := x.engine.vault.Prepare(ctx, snapshot, credentials, x.h.app.Quota.ofCheckpoints(&x.action.Terms))
	if over := (*checkpoint.QuotaError)(nil); errors.As(err, &over) {
		return x.overCheckpoints(over)
	}
	if err != nil {
		return x.storeFailed(err)
	}
	if c.pending, c.handle = p, p.Handle(); !p.Snapshot().Reversible() {
		c.decision = undoing.Decision{Way: checkpoint.Irreversible, Reason: p.Snapshot().Reason}
	}
	s.call.Checkpoint, s.call.State, s.call.Reversible = id, ect.HashOf(p.Sum()), p.Snapshot().Reversible()
	return nil
}

// firstAttempt is the checkpoint of the first attempt of a call that may have run before,
// for the checkpoint of this one.
func (x *exchange) firstAttempt(ctx context.Context, own string) (string, error) {
	if x.before == "" {
		return own, nil
	}
	return x.engine.vault.First(ctx, x.before)
}

// credentials are the fields by which the caller is known to the upstream.
func (x *exchange) credentials() map[string][]string {
	found := map[string][]string{}
	for _, name := range append([]string{"Cookie"}, x.h.credentials...) {
		if values := x.r.Header[name]; len(values) > 0 {
			found[name] = slices.Clone(values)
		}
	}
	return found
}

// snapshotEnded says what came of the claim.
func (x *exchange) snapshotEnded(err error) error {
	c := &x.capture
	if c.pending == nil {
		return err
	}
	err = c.pending.Done(err)
	c.kept, c.pending = err == nil, nil
	return err
}

// undoable makes what a rollback needs of the call's end ride in the outcome's commit; nil
// where there is nothing. An outcome is recorded whether or not that succeeds (P1).
func (x *exchange) undoable(ctx context.Context, o guard.Outcome, header http.Header) *checkpoint.Pending {
	c := &x.capture
	if !c.kept {
		return nil
	}
	if o.Verdict == guard.InDoubt { // nobody knows what stands there
		return x.othersBeside(ctx)
	}
	if o.Verdict == guard.Released {
		return x.engine.vault.Release(c.handle)
	}
	if c.decision.Way == checkpoint.Irreversible {
		return nil // a person undoes it, and this is a write less for each such call
	}
	x.observe(o, header)
	p, err := x.engine.vault.Record(ctx, c.handle, *c.result, int(x.action.MaxImage))
	if err != nil {
		x.h.logger.Error("what is needed to undo a call cannot be recorded", zap.Stringer("key", x.call.Key), zap.Error(err))
		return nil
	}
	return p
}

// observe finds out what is recorded of a completed call, once. Where the end of its answer
// does not wait for the record, it still waits for this: whoever has seen the end may
// change what the call has left.
func (x *exchange) observe(o guard.Outcome, header http.Header) {
	c := &x.capture
	if !c.kept || c.result != nil || o.Verdict != guard.Completed {
		return
	}
	result := checkpoint.Result{Status: o.Status, Upstream: x.upstreamsOwn()}
	switch c.decision.Way {
	case checkpoint.Restore:
		result.Image, result.Reason = x.imageAfter(cmp.Or(result.Upstream, o.Status), header)
	case checkpoint.Compensate:
		if x.mayHaveRun() || !undo.Refused(result.Upstream) { // else nothing is to be undone
			result.Answer, result.Reason = x.answered(o.Status, header)
		}
	}
	c.result = &result
}

// answered is what a compensation needs of the answer.
func (x *exchange) answered(status int, header http.Header) (checkpoint.Message, checkpoint.Reason) {
	c := &x.capture
	if c.over {
		return checkpoint.Message{}, checkpoint.ReasonTooLarge
	}
	c.source.Status = status
	c.source.Response = templates.Message{Header: header, ContentType: header.Get("Content-Type")}
	if !encoded(header) {
		c.source.Response.Body = c.answer
	}
	return c.decision.Answered(&c.source)
}

// overhear keeps the beginning of the answer's body, where a compensation needs it.
func (x *exchange) overhear(p []byte) {
	c := &x.capture
	if c.over || !c.decision.ReadsAnswer() {
		return
	}
	if c.over = int64(len(c.answer)+len(p)) > x.action.MaxImage; c.over {
		c.answer = nil
		return
	}
	c.answer = append(c.answer, p...)
}

// imageBefore finds out what stood at the target before the call.
func (x *exchange) imageBefore(plan *undoing.Plan, found guard.Finding) error {
	header, err := plan.Fields("")
	if err != nil {
		return err
	}
	look := undo.Look(&checkpoint.Request{Message: checkpoint.Message{Header: x.r.Header}})
	for name, values := range look.Header {
		if header[name] == nil {
			header[name] = values
		}
	}
	if plan.Terms().Recorded() {
		for name, values := range x.credentials() {
			if header[name] == nil { // as in the undo: what the configuration writes wins
				header[name] = values
			}
		}
	}
	request := &errand{
		method: look.Method, path: x.r.URL.EscapedPath(), query: x.r.URL.RawQuery,
		host: x.r.Host, remote: x.r.RemoteAddr, header: header, most: plan.Terms().MaxImage,
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), time.Duration(plan.Terms().SnapshotTimeout))
	defer cancel()
	image, err := x.readImage(ctx, request)
	if err == nil && x.mayHaveRun() {
		image, err = x.imageBeforeAll(ctx, found.Record.Checkpoint, image)
	}
	if err == nil {
		x.capture.images, x.capture.image = request, image
	}
	return err
}

// place names what the call changes, for those who change it too.
func (x *exchange) place() string {
	return checkpoint.TargetOf(x.h.upstreamName(), x.r.URL.EscapedPath())
}

// errDisturbed: the images may be of what somebody else has done.
var errDisturbed = errors.New("another call has changed the target between the look before this call and the one after it")

// imageAfter reads what the call has left. The end of the answer waits for it, and no
// longer than for the state before (P7).
func (x *exchange) imageAfter(status int, header http.Header) (*checkpoint.Image, checkpoint.Reason) {
	ctx, cancel := x.engine.detach(x.r.Context(), time.Duration(x.action.SnapshotTimeout))
	defer cancel()
	image, err := x.readImage(circuits.Undo(ctx), x.capture.images) // past a breaker that has opened meanwhile
	if x.window.close() {
		err = errDisturbed
	} else if err == nil {
		err = x.agrees(status, header, image)
	}
	if err != nil {
		x.h.logger.Warn("what a call has left could not be read; only a person can undo it",
			zap.Stringer("key", x.call.Key), zap.String("action", x.action.Name), zap.Error(err))
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

// agrees holds that the state after the call is what the upstream says that it has done. A
// rollback must not take something else for the call's work, nor the old state for a call
// that was taken back (P6).
func (x *exchange) agrees(status int, header http.Header, after *checkpoint.Image) error {
	before, deleted := x.capture.image, x.r.Method == http.MethodDelete
	switch {
	case status/100 != 2:
	case status == http.StatusAccepted:
		if undo.Same(before, after) {
			return errors.New("the answer 202 promises a change, and nothing has changed yet")
		}
	case after.Exists == deleted: // a copy that lags, or something else
		return fmt.Errorf("the answer %d to a %s, and the state after it do not agree", status, x.r.Method)
	case after.Exists && !encoded(header) && otherTag(header.Get("ETag"), after.ETag):
		// RFC 9110, section 8.8.3: that of the answer is of what the call has made.
		return fmt.Errorf("%w: the entity tag of its answer is another", errDisturbed)
	case !deleted && !before.Exists && status != http.StatusCreated && !x.onlyCreates():
		return fmt.Errorf("%w: it was answered %d", errNotCreated, status)
	case deleted && !before.Exists: // it hides from the guard what was there
		return fmt.Errorf("the answer %d to a DELETE, and that nothing was there before it do not agree", status)
	}
	return nil
}

// errNotCreated: what seems to be new may have been there before, such as where the look
// before the call was answered by a copy that lags. It must not be deleted (P6).
var errNotCreated = errors.New("nothing stood there before the call, and its answer does not say 201: that it has created something (RFC 9110, section 9.3.4)")

// onlyCreates reports that the call itself asks to fail where something is there.
func (x *exchange) onlyCreates() bool {
	return slices.Equal(x.r.Header["If-None-Match"], []string{"*"})
}

// otherTag reports whether two entity tags are there and are of different states.
func otherTag(a, b string) bool {
	return a != "" && b != "" && strings.TrimPrefix(a, "W/") != strings.TrimPrefix(b, "W/")
}

// readImage reads what stands at a target.
func (x *exchange) readImage(ctx context.Context, r *errand) (*checkpoint.Image, error) {
	a, err := x.h.send(ctx, r)
	if err != nil {
		return nil, err
	}
	image := undo.ImageOf(&undo.Answer{Status: a.status, Header: a.header, Body: a.body})
	switch {
	case a.replaced:
		return nil, fmt.Errorf("the answer %d to GET is not the upstream's", a.status)
	case image == nil:
		return nil, fmt.Errorf("the answer %d to GET does not say what stands there; 200, 204, 404 and 410 do", a.status)
	case image.Exists && a.unframed && x.action.Unframed != unframedComplete:
		return nil, errors.New("the answer to GET is framed by nothing but the end of its connection, so that a cut cannot be seen")
	}
	return image, nil
}
