package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (q *Request) inDoubt(cause execution.Cause) *problem.Problem {
	p := problemOf(problem.InDoubt, "Cause: "+string(cause)+".", execution.StateInDoubt)
	p.RetryHelps = q.runsAgain()
	return p
}

// doubtMarks are the fields of an answer in doubt. SDKs must not retry it, unless a retry runs
// the call again.
func (q *Request) doubtMarks() http.Header {
	marks := http.Header{HeaderExecutionStatus: {statusInDoubt}}
	if !q.runsAgain() {
		problem.NoRetry(marks)
	}
	return marks
}

// runsAgain reports that a retry of the call in doubt runs it again.
func (q *Request) runsAgain() bool {
	switch q.action.OnUnknown {
	case OnUnknownRetry:
		return true
	case OnUnknownResend:
		return q.call.Sent != [32]byte{}
	}
	return false
}

// mayHaveRun reports that the call runs although it may have run before: its action allows that,
// and no probe has denied it.
func (in *admission) mayHaveRun() bool { return in.earlier != "" }

// stillInDoubt is the outcome of an attempt that was not executed after one that may have been:
// what is proven of this one says nothing about the other (P6).
func (in *admission) stillInDoubt(o execution.Outcome) execution.Outcome {
	if o.Verdict == execution.Released && in.mayHaveRun() {
		o.Verdict, o.Cause = execution.InDoubt, in.earlier
	}
	return o
}

// refusedInDoubt adds to a refusal that the call may have been executed before.
func (in *admission) refusedInDoubt(err error) error {
	if p := (*problem.Problem)(nil); errors.As(err, &p) && in.mayHaveRun() {
		p.Doubtful, p.State = true, execution.StateInDoubt.String()
	}
	return err
}

// settleDoubt asks the upstream, and records it if the call was applied. stepDone means that the
// doubt stays.
func (q *Request) settleDoubt(found execution.Finding) (step, error) {
	p := q.action.Probe
	a, err := q.ask(p, found.Record.Task)
	if err != nil {
		q.action.Counts.Probed(ProbeUnknown)
		q.h.Logger.Warn("the status probe gave no answer; the call stays in doubt",
			slog.Any("key", q.call.Key), slog.Any("error", err))
		return stepDone, nil
	}
	switch {
	case p.Applied(a):
		q.action.Counts.Probed(ProbeApplied)
		var head *execution.Head
		if p.UseAnswer && a.Status != 0 {
			head = &execution.Head{Status: a.Status, Header: answer.Replayable(a.Header)}
		}
		// Others wait for this, whether or not the caller does.
		ctx := context.WithoutCancel(q.r.Context())
		batch := q.policy.SettledBy(ctx, q.call.Key, found.Record, true, execution.ByProbe)
		of := execution.Recorded{Key: q.call.Key, Finding: found}
		err := q.executions.SettleDoubt(ctx, of, execution.Resolution{
			By: execution.ByProbe, Applied: true, Answer: head, Body: a.Body,
		}, batch)
		if err != nil && !errors.Is(err, execution.ErrTaken) {
			return stepLookUp, q.storeFailed(err)
		}
		if err == nil {
			q.resolved(execution.Completed, execution.ByProbe)
		}
		return stepLookUp, nil
	case p.NotApplied(a):
		q.action.Counts.Probed(ProbeNotApplied)
		return stepClaim, nil
	}
	q.action.Counts.Probed(ProbeUnknown)
	return stepDone, nil
}

// errNoTask: a call whose answer was lost has left no id of a task, and then nothing can be asked.
var errNoTask = errors.New("no task of the call is known")

// ask sends the probe. Where it asks for a task, the answer is the task's as one to the call.
func (q *guardedRequest) ask(p *Probe, task string) (*InternalAnswer, error) {
	if !p.Task {
		return p.Ask(q.r, nil)
	}
	if task == "" || q.message == nil {
		return nil, errNoTask
	}
	text, header := q.message.TaskQuery(task)
	if text == nil {
		return nil, errNoTask
	}
	question := &InternalRequest{Method: http.MethodPost, Path: q.r.URL.EscapedPath(), Query: q.r.URL.RawQuery, Header: http.Header{}, Body: text}
	for name, value := range header {
		question.Header.Set(name, value)
	}
	for _, name := range []string{protocol.HeaderSession, protocol.HeaderVersion, protocol.HeaderA2A} {
		if values := q.r.Header[name]; len(values) > 0 {
			question.Header[name] = values
		}
	}
	question.Header.Set("Content-Type", "application/json")
	question.Header.Set("Accept", "application/json, text/event-stream")
	a, err := p.Ask(q.r, question)
	if err != nil {
		return nil, err
	}
	body, as, known := q.message.TaskAnswer(task, a.Status, a.Header.Get("Content-Type"), a.Body)
	switch {
	case !known || a.Replaced:
		return nil, fmt.Errorf("the answer %d to the question for the task does not show it", a.Status)
	case body == nil:
		return new(InternalAnswer), nil
	}
	return &InternalAnswer{Status: http.StatusOK, Header: http.Header{"Content-Type": {as}}, Body: body}, nil
}

func (q *Request) resolved(v execution.Verdict, by string) {
	q.emit(EventResolved, map[string]any{"outcome": v.String(), "by": by})
}

// carried is what the commit of a call's outcome carries, made anew where the store takes the outcome
// only later (ADR 0147). Its client has got the doubt by then.
type carried struct {
	x        *Call
	outcome  execution.Outcome
	answer   http.Header    // the errors that the upstream has reported with its answer
	reported reportedErrors // those of them that are recorded already
}

// Size implements execution.Carried.
func (l *carried) Size() int64 {
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

// Again implements execution.Carried.
func (l *carried) Again(ctx context.Context) (all []*store.Batch) {
	x, logged := l.x, store.NewBatch()
	defer func() { // P7: it ends nobody else's call
		if p := recover(); p != nil {
			x.h.Logger.Error("making the evidence of an outcome again panicked; the outcome is recorded without it",
				slog.Any("key", x.call.Key), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			for _, b := range all {
				_ = b.Done(errAgainPanicked)
			}
			all = nil
		}
	}()
	logged.OnDone(func(err error) error {
		if err == nil {
			x.h.Logger.Info("the outcome of a call that was in doubt is recorded",
				slog.Any("key", x.call.Key), slog.String("outcome", l.outcome.Verdict.String()))
		}
		return err
	})
	all = append(all, logged, x.outcomeEvents(ctx, l.outcome, l.answer, true))
	all = append(all, x.capture.undoable(ctx, x, l.outcome, l.answer))
	return append(all, written(&x.Request, true, 0), x.settled(ctx, x.h.Parts, l.outcome))
}

var errAgainPanicked = errors.New("agent_guard: making the evidence of an outcome again panicked")

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
	// ForceQuery sends a question mark even if the query is empty.
	ForceQuery bool
}

// InternalAnswer is the answer to an InternalRequest.
type InternalAnswer struct {
	Status int
	Header http.Header
	Body   []byte
	// Cut says that the body is longer than MaxAnswer, or may be incomplete.
	Cut bool
	// Unframed says that only the end of the connection ends the body.
	Unframed bool
	// Replaced says that another handler answered instead of the upstream.
	Replaced bool
}
