package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (x *Call) inDoubt(cause execution.Cause) error {
	p := x.problem(api.InDoubt, "Cause: "+string(cause)+".", execution.StateInDoubt)
	p.RetryHelps = x.runsAgain()
	return p
}

// doubtMarks are the fields of an answer in doubt. SDKs must not retry it, unless a retry runs
// the call again.
func (x *Call) doubtMarks() http.Header {
	marks := http.Header{HeaderExecutionStatus: {StatusInDoubt}}
	if !x.runsAgain() {
		api.NoRetry(marks)
	}
	return marks
}

// runsAgain reports that a retry of the call in doubt runs it again.
func (x *Call) runsAgain() bool {
	switch x.action.OnUnknown {
	case OnUnknownRetry:
		return true
	case OnUnknownResend:
		return x.call.Sent != [32]byte{} && !x.stays
	}
	return false
}

// mayHaveRun reports that the call runs although it may have run before: its action allows that,
// and no probe has denied it.
func (x *Call) mayHaveRun() bool { return x.earlier != "" }

// stillInDoubt is the outcome of an attempt that was not executed after one that may have been:
// what is proven of this one says nothing about the other (P6).
func (x *Call) stillInDoubt(o execution.Outcome) execution.Outcome {
	if o.Verdict == execution.Released && x.mayHaveRun() {
		o.Verdict, o.Cause = execution.InDoubt, x.earlier
	}
	return o
}

// refusedInDoubt adds to a refusal that the call may have been executed before.
func (x *Call) refusedInDoubt(err error) error {
	if p := (*api.Problem)(nil); errors.As(err, &p) && x.mayHaveRun() {
		p.Doubtful, p.State = true, execution.StateInDoubt.String()
	}
	return err
}

// settleDoubt asks the upstream, and records it if the call was applied. stepDone means that the
// doubt stays.
func (x *Call) settleDoubt(found execution.Finding) (step, error) {
	p := x.action.Probe
	a, err := x.ask(p, found.Record.Task)
	if err != nil {
		x.action.Counts.Probed(ProbeUnknown)
		x.h.Logger.Warn("the status probe gave no answer; the call stays in doubt",
			slog.Any("key", x.call.Key), slog.Any("error", err))
		return stepDone, nil
	}
	switch {
	case p.Applied(a):
		x.action.Counts.Probed(ProbeApplied)
		var head *execution.Head
		if p.UseAnswer && a.Status != 0 {
			head = &execution.Head{Status: a.Status, Header: Replayable(a.Header)}
		}
		// Others wait for this, whether or not the caller does.
		ctx := context.WithoutCancel(x.r.Context())
		batch := x.evidence.policy.SettledBy(ctx, x.call.Key, found.Record, true, execution.ByProbe)
		of := execution.Recorded{Key: x.call.Key, Finding: found}
		err := x.executions.SettleDoubt(ctx, of, execution.Resolution{
			By: execution.ByProbe, Applied: true, Answer: head, Body: a.Body,
		}, batch)
		if err != nil && !errors.Is(err, execution.ErrTaken) {
			return stepLookUp, x.storeFailed(err)
		}
		if err == nil {
			x.resolved(execution.Completed, execution.ByProbe)
		}
		return stepLookUp, nil
	case p.NotApplied(a):
		x.action.Counts.Probed(ProbeNotApplied)
		return stepClaim, nil
	}
	x.action.Counts.Probed(ProbeUnknown)
	return stepDone, nil
}

// errNoTask: a call whose answer was lost has left no id of a task, and then nothing can be asked.
var errNoTask = errors.New("no task of the call is known")

// ask sends the probe. Where it asks for a task, the answer is the task's as one to the call.
func (x *Call) ask(p *Probe, task string) (*InternalAnswer, error) {
	if !p.Task {
		return p.Ask(x.r, nil)
	}
	if task == "" || x.message == nil {
		return nil, errNoTask
	}
	text, header := x.message.TaskQuery(task)
	if text == nil {
		return nil, errNoTask
	}
	question := &InternalRequest{Method: http.MethodPost, Path: x.r.URL.EscapedPath(), Query: x.r.URL.RawQuery, Header: http.Header{}, Body: text}
	for name, value := range header {
		question.Header.Set(name, value)
	}
	for _, name := range []string{protocol.HeaderSession, protocol.HeaderVersion, protocol.HeaderA2A} {
		if values := x.r.Header[name]; len(values) > 0 {
			question.Header[name] = values
		}
	}
	question.Header.Set("Content-Type", "application/json")
	question.Header.Set("Accept", "application/json, text/event-stream")
	a, err := p.Ask(x.r, question)
	if err != nil {
		return nil, err
	}
	body, as, known := x.message.TaskAnswer(task, a.Status, a.Header.Get("Content-Type"), a.Body)
	switch {
	case !known || a.Replaced:
		return nil, fmt.Errorf("the answer %d to the question for the task does not show it", a.Status)
	case body == nil:
		return new(InternalAnswer), nil
	}
	return &InternalAnswer{Status: http.StatusOK, Header: http.Header{"Content-Type": {as}}, Body: body}, nil
}

func (x *Call) resolved(v execution.Verdict, by string) {
	x.emit(EventResolved, map[string]any{"outcome": v.String(), "by": by})
}

// lateOutcome is the outcome of a call, for the case that it can be recorded only later (ADR 0147). Its client has got
// the doubt by then.
type lateOutcome struct {
	x        *Call
	outcome  execution.Outcome
	answer   http.Header    // what its evidence needs of it
	reported reportedErrors // what of that is recorded already
}

// Size implements execution.Later.
func (l *lateOutcome) Size() int64 {
	c := &l.x.capture
	size := callSize + len(c.answer) + len(c.source.Request.Body)
	if l.x.message != nil {
		size += len(l.x.message.Whole)
	}
	if c.image != nil {
		size += len(c.image.Body)
	}
	if r := c.result; r != nil {
		size += len(r.Answer.Body)
		if r.Image != nil {
			size += len(r.Image.Body)
		}
	}
	return int64(size)
}

// callSize is about what a call keeps besides the bodies that are counted, in bytes.
const callSize = 8 << 10

// Again implements execution.Later.
func (l *lateOutcome) Again(ctx context.Context) (all []*store.Batch) {
	x := l.x
	defer func() { // P7: it ends nobody else's call
		if p := recover(); p != nil {
			x.h.Logger.Error("the evidence of an outcome that is recorded late panicked; the outcome is recorded without it",
				slog.Any("key", x.call.Key), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			for _, b := range all {
				_ = b.Done(errLatePanic)
			}
			all = nil
		}
	}()
	all = append(all, x.outcomeEvents(ctx, l.outcome, l.answer, true))
	all = append(all, x.undoable(ctx, l.outcome, l.answer))
	return append(all, written(x, true))
}

var errLatePanic = errors.New("agent_guard: the evidence of an outcome panicked")

// Over implements execution.Later.
func (l *lateOutcome) Over(err error) {
	x := l.x
	switch {
	case err == nil:
		x.h.Logger.Info("the outcome of a call that was in doubt is recorded: it came while the store did not answer",
			slog.Any("key", x.call.Key), slog.String("outcome", l.outcome.Verdict.String()))
	case errors.Is(err, execution.ErrTaken): // whoever was first has said so
	default:
		x.h.Logger.Error("the outcome of a call cannot be recorded; it stays in doubt", slog.Any("key", x.call.Key), slog.Any("error", err))
	}
}

// Moved implements execution.Later.
func (l *lateOutcome) Moved(late *execution.Late) {
	l.x.h.moved.add(l.x.h, late, l.x.executions.Boot())
}

const (
	// movedEvery is how often it is looked whether the store is open again.
	movedEvery = time.Second
	// movedTime is how long that is waited for.
	movedTime = time.Hour
	// mostMoved bounds the outcomes that wait for that; what is beyond it stays in doubt.
	mostMoved = 1024
)

// movedOutcomes are the outcomes of calls whose gateway was removed from the shared store, or has closed it, before they
// were recorded: an answer is evidence, also then. The engine of such a call is given up meanwhile, so only the end
// of the process ends it.
type movedOutcomes struct {
	mu      sync.Mutex
	waiting []movedOutcome
	armed   bool
}

type movedOutcome struct {
	*execution.Late
	boot string // of the member that has run it
	till time.Time
}

func (m *movedOutcomes) add(h *Handler, late *execution.Late, boot string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.waiting) >= mostMoved {
		h.Logger.Error("the outcomes of too many calls wait for the store; this one stays in doubt", slog.Any("key", late.Key()))
		return
	}
	m.waiting = append(m.waiting, movedOutcome{late, boot, time.Now().Add(movedTime)})
	m.arm(h)
}

// arm has a round tried in a while, with mu held.
func (m *movedOutcomes) arm(h *Handler) {
	if !m.armed && len(m.waiting) > 0 && !h.Host.Exiting() {
		m.armed = true
		time.AfterFunc(movedEvery, func() { m.round(h) })
	}
}

// round settles what the calls have left in doubt, if the store is open again.
func (m *movedOutcomes) round(h *Handler) {
	if h.Host.Exiting() {
		return
	}
	e, release, err := h.Open()
	if err == nil {
		defer release()
	}
	m.mu.Lock()
	all := m.waiting
	m.waiting = nil
	m.mu.Unlock()
	var left []movedOutcome
	for _, o := range all {
		switch {
		case time.Now().After(o.till):
		case err != nil || e.Executions.Boot() == o.boot:
			left = append(left, o)
		default:
			var over bool
			if over, err = settledLate(h, e, o.Late); !over {
				left = append(left, o) // and so does the rest of them, if the store has failed
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting, m.armed = append(left, m.waiting...), false
	m.arm(h)
}

// settledLate reports whether there is nothing more to be tried.
func settledLate(h *Handler, e *Engine, late *execution.Late) (over bool, err error) {
	ctx := context.Background()
	policy, err := h.Tokens()
	if err != nil {
		return false, err
	}
	applied, err := e.Executions.SettleLate(ctx, late, func(r *execution.Record, how execution.Resolution) *store.Batch {
		return policy.SettledBy(ctx, late.Key(), r, how.Applied, how.By)
	})
	switch {
	case errors.Is(err, execution.ErrTaken):
		return true, nil
	case err != nil:
		h.Logger.Warn("the outcome of a call that was in doubt cannot be recorded yet", slog.Any("key", late.Key()), slog.Any("error", err))
		return false, err
	}
	h.Logger.Info("the outcome of a call that was in doubt is recorded: it came while this gateway was no member of its store",
		slog.Any("key", late.Key()), slog.Bool("executed", applied))
	return true, nil
}

// prober runs one probe per key at a time; others wait for its result.
type prober struct {
	mu      sync.Mutex
	running map[execution.Key]*probing
}

// enter returns the probe of key, and whether the caller must run it and then call leave.
func (p *prober) enter(key execution.Key) (probe *probing, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if probe, ok := p.running[key]; ok {
		return probe, false
	}
	if p.running == nil {
		p.running = map[execution.Key]*probing{}
	}
	probe = &probing{over: make(chan struct{})}
	p.running[key] = probe
	return probe, true
}

func (p *prober) leave(key execution.Key, probe *probing) {
	p.mu.Lock()
	delete(p.running, key)
	p.mu.Unlock()
	close(probe.over)
}

type probing struct {
	over chan struct{}
	// doubt says, once over is closed, that the call stays in doubt.
	doubt bool
}

// Probe asks the upstream whether it applied a call in doubt.
type Probe struct {
	// Ask sends the question about a request's call, or a message of the guard, which lacks host and
	// credentials. An error means no answer.
	Ask func(r *http.Request, message *InternalRequest) (*InternalAnswer, error)
	// Task asks for the task that the answer to the call's message has named. That its server has it
	// says that the call was applied.
	Task bool
	// Applied and NotApplied recognise the answers for a call that was applied, and that was not.
	// Applied is tried first; any other answer leaves the call in doubt.
	Applied, NotApplied func(a *InternalAnswer) bool
	// UseAnswer makes the answer that means "applied" the call's result.
	UseAnswer bool
}

// InternalRequest is the guard's own request to the upstream: a status probe, or a read of a
// target's state.
type InternalRequest struct {
	Method string
	// Path is escaped, Query without the question mark.
	Path, Query string
	Host        string
	// Remote is the address of the client on whose behalf it is sent.
	Remote string
	Header http.Header
	// Body is nil for requests without one.
	Body []byte
	// MaxAnswer bounds the answer, in bytes.
	MaxAnswer int64
}

// InternalAnswer is the answer to an InternalRequest.
type InternalAnswer struct {
	Status int
	Header http.Header
	Body   []byte
	// Unframed says that only the end of the connection ends the body.
	Unframed bool
	// Replaced says that another handler answered instead of the upstream.
	Replaced bool
}
