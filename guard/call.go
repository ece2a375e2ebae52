package guard

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// Serve is the way of a request (docs/request.md): it guards r, and hands it on to next. Calls
// that change nothing take its first step only. An error says that r was not answered; a
// StatusError has the status that the server is to answer with.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, next Next) error {
	if IsOwn(r) {
		return next.ServeHTTP(w, r)
	}
	if h.Endpoint != nil && h.Endpoint(w, r) {
		return nil
	}
	h.keepEndToEnd(r.Header)
	action, as, err := h.classify(r)
	var p *api.Problem
	switch {
	case errors.As(err, &p):
		h.Host.Note(r, "status", StatusRefused)
		h.Host.Note(r, "problem", p.Kind().Slug)
		h.refuseUnguarded(w, r, p)
		return nil
	case err != nil:
		return err
	case as == classStream:
		w = Mark(w, HeaderExecutionStatus, statusUnguarded)
	}
	if as != classGuarded {
		return h.pass(w, r, next)
	}
	x := &Call{h: h, w: NewWriter(w, r), r: r, action: action, upstream: h.Host.Upstream(next)}
	x.noted.outer = h.Host.Begin(r, x)
	defer x.close()
	err = x.run()
	if err != nil && x.failsOpen(err) {
		err = refusedByCircuit(x.forwardUnguarded(w, next, err), VerifiedHere(x.call.Scope.Caller))
	}
	if errors.As(err, &p) {
		x.recordRejection(p)
		if answered, err := x.degrade(w, p); answered {
			return err
		}
		x.refuse(w, p)
		return nil
	}
	if err != nil {
		x.giveBack()
	}
	return err
}

// pass hands on what is not guarded. A token is verified all the same.
func (h *Handler) pass(w http.ResponseWriter, r *http.Request, next Next) error {
	err := h.verifySafe(r)
	if err == nil {
		err = h.passOn(w, r, next)
	}
	var p *api.Problem
	if !errors.As(err, &p) {
		return err
	}
	h.refuseUnguarded(w, r, p)
	return nil
}

func (h *Handler) refuseUnguarded(w http.ResponseWriter, r *http.Request, p *api.Problem) {
	w.Header().Set(HeaderExecutionStatus, StatusRefused)
	h.CountRefusal(p.Kind().Slug)
	if p.Cause != nil && p.Kind() != api.CircuitOpen { // which is logged once, when it opens
		h.Logger.Error("request refused", slog.String("problem", p.Kind().Slug), slog.Any("error", p.Cause))
	}
	p.Mount = h.Host.Mount(r)
	WriteProblem(w, r, p)
}

// WriteProblem answers r with p in the form that its caller reads. p.Mount makes its URLs
// lead back to the gateway.
func WriteProblem(w http.ResponseWriter, r *http.Request, p *api.Problem) {
	if isGRPC(r) || isMedia(r, "application/grpc-web") || isMedia(r, "application/grpc-web-text") {
		p.WriteGRPC(w, r.Header.Get("Content-Type"))
		return
	}
	p.Write(w)
}

// run takes a guarded call through its steps. What it finds recorded may answer it, or send
// it back to the look-up; so does a claim that another call was faster with.
func (x *Call) run() error {
	if err := x.open(); err != nil {
		return err
	}
	if err := x.prepare(); err != nil { // 1 and 2
		return err
	}
	for {
		found, err := x.lookUp() // 3
		if err != nil {
			return err
		}
		then, err := x.answer(found)
		if errors.Is(err, execution.ErrTaken) || err == nil && then == stepLookUp {
			continue
		}
		if err != nil || then == stepDone {
			return err
		}
		leave, err := x.admit(found) // 4
		if err != nil {
			return err
		}
		run, err := x.claim(found, leave) // 5
		if errors.Is(err, execution.ErrTaken) {
			x.found = true
			continue
		}
		if err != nil {
			return err
		}
		return x.execute(run) // 6, 7 and 8
	}
}

func (x *Call) refuse(w http.ResponseWriter, p *api.Problem) {
	if p.ExecutionID == "" {
		p.ExecutionID = x.call.Scope.ID
	}
	if x.state != 0 {
		p.Known(x.state.String(), x.state == execution.StateRolledBack)
	}
	if p.ExecutionID != "" {
		w.Header().Set(HeaderExecutionID, p.ExecutionID)
	}
	x.pointToStatus(p)
	x.pointToError(w.Header(), p)
	w.Header().Set(HeaderExecutionStatus, StatusRefused)
	if p.Kind() == api.InDoubt {
		w.Header().Set(HeaderExecutionStatus, StatusInDoubt)
	}
	if x.call.Checkpoint != "" {
		w.Header().Set(headerExecutionCheckpoint, x.call.Checkpoint)
	}
	if !x.read && x.r.ProtoMajor == 1 && (x.r.Header.Get("Expect") != "" || p.Kind() == api.BodyTimeout) {
		// Else the server would wait for a body that the client was not asked for, or
		// that does not come.
		w.Header().Set("Connection", "close")
	}
	status := StatusRefused
	if x.doubtful {
		status = StatusInDoubt
	}
	x.note(status, p.Kind().Slug)
	x.action.Counts.Refused(p.Kind().Slug)
	level := slog.LevelDebug
	if p.Cause != nil && p.Kind() != api.CircuitOpen {
		level = slog.LevelError
	}
	if x.h.Logger.Enabled(x.r.Context(), level) {
		fields := []slog.Attr{slog.String("problem", p.Kind().Slug)}
		if p.Cause != nil {
			fields = append(fields, slog.Any("error", p.Cause))
		}
		if x.identified() {
			fields = append(fields, slog.Any("key", x.call.Key))
		}
		x.h.Logger.LogAttrs(x.r.Context(), level, "guarded call refused", fields...)
	}
	p.Mount = x.h.Host.Mount(x.r)
	WriteProblem(w, x.r, p)
}

// The header fields of the guard.
const (
	HeaderExecutionID     = "Execution-Id"
	headerIdempotencyKey  = "Idempotency-Key"
	HeaderExecutionParent = "Execution-Parent"
	HeaderExecutionStatus = "Execution-Status"
	HeaderWorkflowID      = "Workflow-Id"
	HeaderReplayed        = "Idempotent-Replayed"

	headerExecutionCheckpoint = "Execution-Checkpoint"
)

// Call is one guarded call on its way. What it shows is asked for by the goroutine that serves
// it, and may be asked for after that.
type Call struct {
	h      *Handler
	w      *Writer
	r      *http.Request
	action *Action

	upstream   Upstream
	engine     *Engine
	executions *execution.Guard
	release    func() // of the engine; taken over by who works on after the answer
	clock      *clock // of the forwarded call
	body       *spool.Spool
	read       bool // the request's body was read to its end
	call       execution.Call
	wait       time.Time       // when a retry stops waiting for a running execution
	probing    *probing        // the probe that this call makes
	earlier    execution.Cause // of the doubt in which the attempt before this one stands; empty without one
	before     string          // the checkpoint of that attempt, if it has one

	evidence callEvidence
	capture  capture
	window   *WriteWindow // in which nobody else must change what is restored; nil without
	verified bool         // its tokens, or that it needs none

	state       execution.State // of the execution that lookUp has found; 0 without one
	stays       bool            // its doubt stays, though on_unknown would have it sent again
	doubtful    bool            // it was forwarded, and is in doubt
	headerCause execution.Cause // of the doubt that the header of its answer shows; empty without one
	found       bool            // an execution of this id was met
	noted       noted
}

// The statuses of calls that were not executed, as logs and matchers see them.
const (
	statusUnguarded = "unguarded"
)

// open takes a reference to the engine, which a running execution keeps.
func (x *Call) open() error {
	e, release, err := x.h.Open()
	if err != nil {
		return StoreClosed(err)
	}
	x.engine, x.executions, x.release = e, e.Executions, release
	if x.evidence.policy, err = x.h.Tokens(); err != nil {
		return StoreClosed(err)
	}
	return nil
}

func (x *Call) close() {
	x.h.Host.Trace(x.r, x)
	x.noted.over = true
	if x.noted.outer != nil { // else it stays, for the access log
		x.h.Host.Show(x.r, x.noted.outer)
	}
	x.giveTokensBack()
	x.probed()
	x.window.close()
	if x.body != nil {
		_ = x.body.Close()
	}
	if x.release != nil {
		x.release()
	}
}

// prepare finds out which call the request makes. Nothing is recorded yet.
func (x *Call) prepare() error {
	caller, err := x.identify() // 1
	if err != nil {
		return err
	}
	fp, err := x.fingerprint() // 2
	if err != nil {
		return err
	}
	if x.call, err = x.describe(caller, fp); err != nil {
		return err
	}
	x.wait = time.Now().Add(x.h.AttachWait)
	if err := x.begin(); err != nil {
		return err
	}
	x.evidence.policy.constrain(x.h, x.r, &x.evidence.tokens)
	return nil
}

// identify verifies the tokens of the request and names its caller.
func (x *Call) identify() (caller string, err error) {
	if x.evidence.tokens, err = x.h.VerifyTokens(x.evidence.policy, x.r, x.h.RequireECT); err != nil {
		return "", err
	}
	x.verified = true
	return x.h.CallerOf(x.executions, x.r, &x.evidence.tokens)
}

// fingerprint reads the request's body, which must be the one that the tokens speak of, and
// hashes what makes the request this one.
func (x *Call) fingerprint() (execution.Fingerprint, error) {
	if err := x.readBody(); err != nil {
		return execution.Fingerprint{}, err
	}
	if err := x.evidence.tokens.checkInput(x.bodyHash); err != nil {
		return execution.Fingerprint{}, err
	}
	method, target := x.h.Host.Original(x.r)
	sum, err := x.h.fingerprints.Sum(fingerprint.Request{
		Method:          method,
		Host:            strings.ToLower(x.r.Host),
		Path:            target.EscapedPath(),
		RawQuery:        target.RawQuery,
		ContentType:     x.r.Header.Get("Content-Type"),
		ContentEncoding: x.r.Header.Get("Content-Encoding"),
		Body:            x.body,
		Size:            x.body.Size(),
	})
	if err != nil {
		return execution.Fingerprint{}, x.unkept(err)
	}
	return execution.Fingerprint(sum), nil
}

// describe is the call that the request makes: its workflow, its execution id, and with
// them its key.
func (x *Call) describe(caller string, fp execution.Fingerprint) (execution.Call, error) {
	tokens, policy := &x.evidence.tokens, x.action
	work, err := workflow(x.r, tokens)
	if err != nil {
		return execution.Call{}, err
	}
	method, target := x.h.Host.Original(x.r)
	c := execution.Call{
		Fingerprint: fp,
		Scope:       execution.Scope{Caller: caller, Guard: x.h.Name, Method: method, Path: target.EscapedPath()},
		Origin:      execution.OriginGiven,
		Host:        strings.ToLower(x.r.Host),
		Action:      x.action.Name,
		Workflow:    work,
		Deadline:    x.deadline(),
		KeepResult:  policy.RetainResult,
		KeepKey:     policy.RetainKey,
		ResultCap:   policy.MaxResult,
		Quota:       x.h.Quota,
	}
	id, err := x.statedID()
	if joint := tokens.executionID(); errors.Is(err, errNoID) && joint != "" {
		id, err = joint, nil
	}
	if errors.Is(err, errNoID) {
		id, err = x.missingID(&c)
	}
	if err != nil {
		return c, x.unkept(err)
	}
	c.Scope.ID = id
	c.Key = x.executions.Key(c.Scope)
	c.Sent, err = x.sentAs(id)
	return c, err
}

func (x *Call) unkept(err error) error {
	var p *api.Problem
	if errors.As(err, &p) {
		return p
	}
	p = api.NewProblem(api.StoreUnavailable, "The request's body could not be read again.")
	p.Cause = err
	return p
}

// missingID names a call whose caller did not.
func (x *Call) missingID(c *execution.Call) (string, error) {
	if parent := x.r.Header.Get(HeaderExecutionParent); x.h.Inherit && parent != "" {
		c.Origin = execution.OriginDerived
		return x.executions.Inherit(c.Scope, parent, x.action.Name, c.Fingerprint), nil
	}
	switch x.h.MissingID {
	case MissingRequire:
		return "", api.NewProblem(api.ExecutionIDMissing, "Send one "+x.h.firstHeader()+" header.")
	case MissingDerive:
		// Two equal calls can be intended, so the id counts for a short while only.
		c.Origin = execution.OriginDerived
		c.KeepResult, c.KeepKey = x.h.DeriveWindow, x.h.DeriveWindow
		return x.executions.Derive(c.Scope, c.Fingerprint), nil
	default:
		c.Origin = execution.OriginMinted
		return uuid.NewString(), nil
	}
}

func (h *Handler) firstHeader() string {
	for _, s := range h.ExecutionID {
		if s.Header != "" {
			return s.Header
		}
	}
	return "Idempotency-Key"
}

func (x *Call) note(status, slug string) {
	x.noted.status = status
	if slug != "" {
		x.noted.problem = slug
	}
}

func (x *Call) problem(k api.Kind, detail string, state execution.State) *api.Problem {
	p := api.NewProblem(k, detail)
	p.ExecutionID = x.call.Scope.ID
	if state != 0 {
		p.State = state.String()
	}
	return p
}

func (x *Call) gone() error {
	return &StatusError{Status: StatusClientClosed, Err: x.r.Context().Err()}
}

func (x *Call) storeFailed(err error) error {
	if x.r.Context().Err() != nil {
		return x.gone()
	}
	if already := (*api.Problem)(nil); errors.As(err, &already) {
		return already
	}
	if errors.Is(err, execution.ErrDraining) {
		return x.problem(api.ShuttingDown, "Send the call again.", 0)
	}
	p := x.problem(api.StoreUnavailable, "Nothing was forwarded.", 0)
	p.Cause = err
	return p
}

// lookUp finds what runs or is recorded under the call's key.
func (x *Call) lookUp() (execution.Finding, error) {
	found, err := x.executions.LookUp(x.r.Context(), x.call.Key, x.call.Fingerprint)
	if err != nil {
		return found, x.storeFailed(err)
	}
	x.state = found.State()
	return found, nil
}

// admit refuses a call that must not begin now, before anything is recorded of it, and
// prepares its claim. leave must be called when the claim's commit has ended. A call that
// is refused may have been executed before.
func (x *Call) admit(found execution.Finding) (leave func(), err error) {
	if err := x.evidence.tokens.inTime(); err != nil {
		return nil, err // nothing new begins with them
	}
	x.earlier, x.before = "", ""
	if found.Status == execution.Doubtful && x.probing == nil { // which has not denied it
		x.earlier, x.before = found.Record.Cause, found.Record.Checkpoint
	}
	leave, err = x.admitted(found)
	if err != nil {
		x.probed()
		return nil, x.refusedInDoubt(err)
	}
	return leave, nil
}

func (x *Call) admitted(found execution.Finding) (leave func(), err error) {
	leave, err = x.enter(found) // nothing is read for a call that is refused here
	if err != nil {
		return nil, err
	}
	leave()
	if err := x.circuitsOpen(); err != nil {
		return nil, err
	}
	if err := x.planUndo(found); err != nil {
		return nil, err
	}
	if err := x.ledgerAdmits(x.r.Context()); err != nil {
		return nil, err
	}
	return x.enter(found) // rollbacks wait for those who are inside, and nobody waits there
}

// claim makes this call the owner of its key, in one commit with its checkpoint (P2).
// execution.ErrTaken says to look again.
func (x *Call) claim(found execution.Finding, leave func()) (*execution.Execution, error) {
	defer leave()
	defer x.probed()
	run, err := x.commitClaim(found)
	if err == nil && x.probing != nil { // the probe has said that it was not applied
		x.resolved(execution.Released)
	}
	if over := (*execution.QuotaError)(nil); errors.As(err, &over) {
		err = x.overQuota(over)
	} else if err != nil && !errors.Is(err, execution.ErrTaken) {
		err = x.storeFailed(err)
	}
	return run, x.refusedInDoubt(err)
}

func (x *Call) commitClaim(found execution.Finding) (*execution.Execution, error) {
	batch, err := x.recordCall(found)
	if err != nil {
		return nil, x.snapshotEnded(err)
	}
	run, err := x.executions.Claim(x.r.Context(), &x.call, found, batch, x.capture.pending)
	return run, x.callRecorded(batch, x.snapshotEnded(err))
}

// execute forwards the claimed call, settles what came of it, and lets the end of
// the answer go. The client's leaving stops none of it (P7).
func (x *Call) execute(e *execution.Execution) error {
	x.note("executed", "")
	x.state = 0 // what stood there is claimed
	x.action.Counts.Begun()
	x.engine.running.begin(x.call.Checkpoint)
	x.clock = x.engine.detach(x.r.Context(), x.call.Deadline)
	defer x.clock.stop()

	var f forwarding
	settled := false
	defer func() {
		if !settled { // a panic of our own: nothing is proven
			_ = x.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseInterrupted}, nil)
			x.action.Counts.Settled(execution.InDoubt)
		}
	}()
	if err := x.prove(x.clock); err != nil {
		settled = true
		return x.unproven(e, err)
	}
	f = x.forward(e)
	x.clock.stop() // readers have all the time that they need
	outcome := x.stillInDoubt(x.judge(&f))
	x.noted.outcome = outcome.Verdict
	if x.action.Async && outcome.Whole {
		x.observe(outcome, f.rec.Header())
		settled = true
		if outcome.Verdict == execution.InDoubt {
			x.doubted(outcome)
		}
		x.settleLater(e, outcome, f.rec.Header())
		return x.releaseEnd(&f)
	}
	err := x.settle(e, outcome, f.rec.Header())
	settled = true
	x.settled(outcome, err)
	if outcome.Verdict == execution.InDoubt {
		x.doubted(outcome)
	}
	return x.finish(&f, outcome, err)
}

// readBody reads the request's body whole, before anything is claimed.
func (x *Call) readBody() error {
	limit := x.h.MaxBody
	tooLarge := func(limit int64) error {
		return api.NewProblem(api.BodyTooLarge, fmt.Sprintf("This route takes bodies of at most %d bytes.", limit))
	}
	if x.r.ContentLength > limit {
		return tooLarge(limit)
	}
	options := spool.Options{Limit: limit}
	if x.executions != nil { // else the store is not open, and `fail_open` forwards the call
		options.Budget = x.executions.BodyMemory()
	}
	x.body = spool.New(options)
	if x.r.Body == nil || x.r.Body == http.NoBody {
		x.read = true
		return nil
	}
	if x.h.Host.Incremental(x.r.Header) {
		p := api.NewProblem(api.StreamRefused, "It asks to be forwarded while it comes (Incremental), and a guarded call is read whole.")
		p.Status = http.StatusNotImplemented // RFC 10036, section 4.1
		return p
	}
	from := io.Reader(x.r.Body)
	if isGRPC(x.r) {
		from = &oneMessage{Reader: from}
	}
	_, err := io.Copy(x.body, from)
	var spill *spool.SpillError
	var max *http.MaxBytesError
	switch {
	case err == nil:
		x.read = true
		return nil
	case errors.Is(err, spool.ErrLimit):
		return tooLarge(limit)
	case errors.As(err, &max): // by request_body
		return tooLarge(max.Limit)
	case errors.Is(err, errSecondMessage):
		return api.NewProblem(api.StreamRefused, "It is a gRPC call that is declared unary and sends more than one message.")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return api.NewProblem(api.BodyTimeout, fmt.Sprintf("%d bytes of it have come. Nothing was forwarded.", x.body.Size()))
	case errors.As(err, &spill):
		p := api.NewProblem(api.StoreUnavailable, "The request's body could not be kept.")
		p.Cause = err
		return p
	}
	// The client broke off or sent a malformed body.
	return &StatusError{Status: http.StatusBadRequest, Err: fmt.Errorf("reading the request's body: %w", err)}
}

// oneMessage reads the body of a unary gRPC call. Another message makes it a stream, whose
// caller may wait for an answer before it ends: waiting for that end could take for ever.
type oneMessage struct {
	io.Reader
	prefix [5]byte // of the message: whether it is compressed, and its length
	read   int     // of the prefix
	left   uint32  // of the message
}

var errSecondMessage = errors.New("more than one message")

func (m *oneMessage) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	rest := p[:n]
	if m.read < len(m.prefix) {
		took := copy(m.prefix[m.read:], rest)
		m.read += took
		rest = rest[took:]
		if m.read < len(m.prefix) {
			return n, err
		}
		m.left = binary.BigEndian.Uint32(m.prefix[1:])
	}
	if len(rest) > int(m.left) {
		return n, errSecondMessage
	}
	m.left -= uint32(len(rest))
	return n, err
}

// giveBack makes the body readable again for the site's error routes, which would else
// forward the call without it. It is freed with the request.
func (x *Call) giveBack() {
	if !x.read || x.body.Size() == 0 {
		return
	}
	body := x.body.NewReader()
	x.r.Body = body
	context.AfterFunc(x.r.Context(), func() { _ = body.Close() })
}

// lookUpBody reads the id at p in a JSON body. A body that is no JSON has none.
func (x *Call) lookUpBody(p fingerprint.Pointer) (string, error) {
	if !isJSON(x.r.Header.Get("Content-Type")) {
		return "", errNoID
	}
	id, found, err := fingerprint.Lookup(x.body, x.body.Size(), p)
	switch {
	case errors.Is(err, fingerprint.ErrNotJSON), err == nil && !found:
		return "", errNoID
	case errors.Is(err, fingerprint.ErrNotScalar), errors.Is(err, fingerprint.ErrAmbiguous),
		errors.Is(err, fingerprint.ErrValueTooLong):
		return "", invalidID(err)
	}
	return id, err
}

func isJSON(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return media == "application/json" || strings.HasSuffix(media, "+json")
}

// enter admits a call that would claim: not where its workflow is stopped, nor where it
// follows from what is being undone (step 4). leave is
// called when the claim's commit has ended.
func (x *Call) enter(found execution.Finding) (leave func(), err error) {
	var c *rollback.Coordinator
	if find := x.engine.Coordinator; find != nil {
		c = find()
	}
	if c == nil {
		return func() {}, nil
	}
	workflow := x.evidence.call.Workflow
	if x.evidence.policy == nil { // this configuration has no identity, and another one had
		workflow = evidence.WorkflowID(x.call.Workflow)
	}
	if workflow == "" && found.Record != nil && found.Record.Checkpoint != "" {
		root, err := x.engine.Checkpoints.First(x.r.Context(), found.Record.Checkpoint)
		if err != nil {
			return nil, x.storeFailed(err)
		}
		workflow = rollback.AttemptsScope(root)
	}
	leave, err = c.Enter(x.r.Context(), workflow, x.led(workflow, found))
	blocked := (*rollback.BlockedError)(nil)
	switch {
	case err == nil:
		return leave, nil
	case !errors.As(err, &blocked):
		return nil, x.storeFailed(err)
	case blocked.Stopped:
		return nil, x.problem(api.WorkflowStopped, "A rollback of the whole workflow has ended it. Nothing was forwarded.", 0)
	}
	return nil, x.problem(api.WorkflowPaused, "What the call follows from is being rolled back. Nothing was forwarded.", 0)
}

// led is what has led to the call: the ids of its parents, of theirs, and so on, the
// nearest first. What stands in no ledger here has led from elsewhere, and ends the walk.
// It is read only while a rollback of the workflow is under way.
func (x *Call) led(workflow string, found execution.Finding) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		s := &x.evidence
		if s.policy == nil {
			return
		}
		todo := slices.Clone(s.call.Parents)
		if found.Record != nil { // an attempt that is in doubt, and may be just being undone
			todo = append(todo, found.Record.Checkpoint)
		}
		for _, t := range s.tokens.All {
			todo = append(todo, t.ID())
			todo = append(todo, t.Parents()...)
		}
		graph, known := s.policy.Evidence.Graph(workflow), map[string]bool{}
		for len(todo) > 0 {
			id := todo[0]
			todo = todo[1:]
			if known[id] {
				continue
			}
			if known[id] = true; len(known) > ect.MaxAncestors {
				yield("", errTooManyAncestors) // what was not looked at may be undone
				return
			}
			if !yield(id, nil) {
				return
			}
			nodes, err := graph.Nodes(x.r.Context(), id)
			if err != nil {
				yield("", err)
				return
			}
			for i := range nodes {
				if nodes[i].Workflow == workflow || nodes[i].Workflow == "" {
					todo = append(todo, nodes[i].Parents...)
				}
			}
		}
	}
}

var errTooManyAncestors = errors.New("more has led to the call than can be looked at")

// ownRequest is the context key of requests that the gateway makes by itself.
type ownRequest struct{}

// AsOwn marks a request as the gateway's own: guards and endpoints on its way hand it on
// as if they were not there. It is nobody's call, and needs no key, token or record.
func AsOwn(ctx context.Context) context.Context { return context.WithValue(ctx, ownRequest{}, true) }

// IsOwn reports whether AsOwn marked the request.
func IsOwn(r *http.Request) bool { return r.Context().Value(ownRequest{}) != nil }

func (x *Call) statedID() (string, error) {
	for i := range x.h.ExecutionID {
		id, err := x.fromSource(&x.h.ExecutionID[i], i)
		if errors.Is(err, errNoID) {
			continue
		}
		return id, err
	}
	return "", errNoID
}

func (x *Call) fromSource(s *IDSource, index int) (string, error) {
	var id string
	var err error
	switch {
	case s.Header != "":
		lines := x.r.Header[http.CanonicalHeaderKey(s.Header)]
		if len(lines) == 0 {
			return "", errNoID
		}
		id, err = execution.ParseID(lines)
	case s.Placeholder != "":
		var ok bool
		if id, ok = x.h.Host.Expand(x.r, s.Placeholder); !ok {
			return "", errNoID
		}
		err = execution.CheckID(id)
	default:
		if id, err = x.lookUpBody(x.h.pointers[index]); err != nil {
			return "", err
		}
		err = execution.CheckID(id)
	}
	if err != nil {
		return "", invalidID(err)
	}
	return id, nil
}

// circuitsOpen refuses a call that no upstream would take, so that it is not claimed and
// its key stays free.
func (x *Call) circuitsOpen() error {
	open, name := x.h.Refusal(x.r.Method, x.h.view(x.r))
	if open == nil {
		return nil
	}
	return circuitOpen(open, name, VerifiedHere(x.call.Scope.Caller))
}

// overQuota refuses a call whose caller holds too much. Nothing was recorded of it.
func (x *Call) overQuota(over *execution.QuotaError) *api.Problem {
	detail := fmt.Sprintf("The caller has %d bytes of records and answers stored, at most %d.", over.Bytes, over.Quota.Bytes)
	if over.Quota.Open > 0 && over.Open >= over.Quota.Open {
		detail = fmt.Sprintf("The caller has %d executions that run or are in doubt, at most %d.", over.Open, over.Quota.Open)
	}
	full := over.Quota.Open > 0 && over.Doubts >= over.Quota.Open
	if full {
		detail += " All of them are in doubt: an operator or a probe makes room, a retry does not."
	}
	p := x.problem(api.QuotaExceeded, detail, 0)
	if full {
		p.RetryAfter = max(p.RetryAfter, time.Minute)
	}
	if !over.Retry.IsZero() {
		p.RetryAfter = max(p.RetryAfter, time.Until(over.Retry))
	}
	return p
}

// overCheckpoints refuses a call whose workflow or caller has too many checkpoints.
// Nothing was recorded of it.
func (x *Call) overCheckpoints(over *checkpoint.QuotaError) *api.Problem {
	var detail string
	switch over.Over {
	case checkpoint.OverRate:
		detail = fmt.Sprintf("The %s makes more than %d checkpoints in a minute.", over.Of, over.Most)
	case checkpoint.OverCount:
		detail = fmt.Sprintf("The %s has %d checkpoints standing, at most so many.", over.Of, over.Most)
	default:
		detail = fmt.Sprintf("The %s would have more than %d bytes of checkpoints.", over.Of, over.Most)
	}
	p := x.problem(api.QuotaExceeded, detail, 0)
	if !over.Retry.IsZero() {
		p.RetryAfter = max(p.RetryAfter, time.Until(over.Retry))
	}
	return p
}

// pointToStatus says in a problem where its caller can see what becomes of the call.
func (x *Call) pointToStatus(p *api.Problem) {
	if k := p.Kind(); k != api.InProgress && k != api.InDoubt || x.h.Endpoint == nil {
		return
	}
	if x.call.Scope.Caller != Anonymous {
		p.StatusURL = api.ExecutionPath(x.call.Scope.ID)
	}
}

// String keeps everything else of a call out of whatever prints the variable (P8).
func (x *Call) String() string { return x.call.Key.String() }

func (x *Call) identified() bool { return x.call.Scope.ID != "" }

func (x *Call) callerHash() string {
	hash := x.executions.Caller(x.call.Scope.Caller)
	return hex.EncodeToString(hash[:])
}

// Value is what logs and matchers read of the call under a name of docs/observability.md, such
// as `status`. What is not known yet, or does not apply, is empty. It reports false for other
// names.
func (x *Call) Value(name string) (any, bool) {
	switch name {
	case "execution_id":
		return x.call.Scope.ID, true
	case "key":
		if !x.identified() {
			return "", true
		}
		return x.call.Key.String(), true
	case "guard":
		return x.h.Name, true
	case "action":
		return x.action.Name, true
	case "caller":
		if !x.identified() {
			return "", true
		}
		return x.callerHash(), true
	case "workflow":
		return x.call.Workflow, true
	case "issuer":
		return x.evidence.tokens.Issuer(), true
	case "checkpoint":
		return x.call.Checkpoint, true
	case "status":
		return x.noted.status, true
	case "outcome":
		if x.noted.outcome == 0 {
			return "", true
		}
		return x.noted.outcome.String(), true
	case "cause":
		return string(x.noted.cause), true
	case "problem":
		return x.noted.problem, true
	case "age":
		if x.noted.created.IsZero() {
			return "", true
		}
		return strconv.FormatInt(int64(max(0, time.Since(x.noted.created)).Seconds()), 10), true
	}
	return nil, false
}

// Over reports that the guard is done with the call.
func (x *Call) Over() bool { return x.noted.over }

// noted is what is known of a call, for logs and matchers.
type noted struct {
	status  string // empty until it is decided
	problem string // the slug of a refusal
	outcome execution.Verdict
	cause   execution.Cause
	created time.Time // of the execution that is replayed

	outer *Call // of the guard around this one
	over  bool
}

func (x *Call) emit(name string, more map[string]any) {
	data := func() map[string]any {
		data := map[string]any{"guard": x.h.Name, "action": x.action.Name}
		if x.identified() {
			data["key"], data["caller"] = x.call.Key.String(), x.callerHash()
		}
		for k, v := range more {
			data[k] = v
		}
		return data
	}
	if x.engine == nil || x.engine.Emit == nil || !x.engine.Emit(name, data) {
		x.h.Host.Emit(name, data)
	}
}
