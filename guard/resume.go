package guard

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// A server of MCP may end the stream of a POST before its answer, and give that on a GET stream of the
// same session (MCP 2025-11-25, "Resumability and Redelivery"). The execution goes on without a request
// until then, or until its deadline (ADR 0078).

const (
	// maxResumed is the longest answer that is taken from a GET stream, in bytes.
	maxResumed = 64 << 20
	// maxOpen bounds the memory of the calls that wait for one, in bytes, each with openCost, its message
	// and what its undo needs of that.
	maxOpen  = 64 << 20
	openCost = 16 << 10
	// resumeTime is how long a call waits for its answer while no GET stream of its session is open.
	resumeTime = time.Minute
)

// resumption is an answer that has come on a GET stream.
type resumption struct {
	text    *spool.Spool
	written chan struct{} // closed when it has been written to the client of that stream, or cannot be
	settled func()        // is called when its outcome is recorded
}

// wait has a client stay listed after its request has ended, for an answer on a GET stream of its
// session. It counts as waiting until it says that it does not. comes is closed when the answer is there;
// it is nil where there is no room, or where the upstream was told that nobody waits: left.
func (l *clients) wait(c *client, cost int) (comes <-chan struct{}, left bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.cancelled || !slices.Contains(l.named[c.name], c) || l.waiting+cost > maxOpen {
		return nil, c.cancelled
	}
	if c.stop != nil {
		c.stop() // there is no request left to cancel
		c.stop = nil
	}
	said := c.said
	c.gone, c.leave = context.WithCancel(context.Background())
	if said {
		c.leave()
	}
	l.waiting += cost
	c.cost, c.comes = cost, make(chan struct{})
	if c.answer != nil {
		close(c.comes)
	}
	c.lapse = time.AfterFunc(resumeTime, func() { c.call.clock.leaves(0) })
	if l.streams[c.session] > 0 {
		c.lapse.Stop()
	}
	if a := c.call.call.Attempt; a != nil {
		a.WaitsElsewhere(c.gone)
	}
	return c.comes, false
}

// streaming notes that one more GET stream of a session is open, or one less. Without any, its calls wait for
// resumeTime at most. Those whose connections have broken wait again while a GET resumes a stream.
func (l *clients) streaming(session requestName, more int, resumes context.Context) {
	if session.session == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams == nil {
		l.streams = map[requestName]int{}
	}
	if l.streams[session] += more; l.streams[session] == 0 {
		delete(l.streams, session)
	}
	for _, c := range l.sessions[session] {
		left := c.comes == nil && !c.said && c.gone.Err() != nil
		if a := c.call.call.Attempt; resumes != nil && a != nil && left && c.resumable.Load() {
			a.WaitsElsewhere(resumes)
		}
		switch {
		case c.lapse == nil:
		case l.streams[session] > 0:
			c.lapse.Stop()
		default:
			c.lapse.Reset(resumeTime)
		}
	}
}

// usedIDs remembers which ids the calls of sessions have had: 4,096 at least, as hashes.
type usedIDs struct {
	seed       maphash.Seed
	young, old map[uint64]struct{}
}

// again reports that a session has had an id before, and remembers it.
func (u *usedIDs) again(session requestName, id string) bool {
	if len(u.young) >= 4096 || u.young == nil {
		if u.young == nil {
			u.seed = maphash.MakeSeed()
		}
		u.young, u.old = map[uint64]struct{}{}, u.young
	}
	session.id = id
	hash := maphash.Comparable(u.seed, session)
	_, young := u.young[hash]
	_, old := u.old[hash]
	u.young[hash] = struct{}{}
	return young || old
}

// resumed hands an answer to the one call of a session that it belongs to. It returns nil where none
// fits, or more than one, or where it may be that of an earlier call with the same id. A call that waits for
// it is settled at once, which ends waits for.
func (l *clients) resumed(session requestName, way proof, id []byte, text *spool.Spool, ends *sync.WaitGroup) (c *client, waits bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, other := range l.sessions[session] {
		if !other.sent || other.name.id != protocol.SameID(id) || other.call.h.Protocol.Guesses() && proofOf(other.call.h, other.call.r, true) != way {
			continue
		}
		if c != nil {
			return nil, false
		}
		c = other
	}
	if c == nil || c.reused || c.answer != nil { // that is the same once more
		return nil, false
	}
	c.answer = &resumption{text: text, written: make(chan struct{}), settled: func() {}}
	if c.comes != nil {
		ends.Add(1)
		c.answer.settled = ends.Done
		close(c.comes)
	}
	return c, c.comes != nil
}

// running reports that calls of a session are running. With progress one of them is at work: an error
// afterwards does not say that nothing was executed.
func (l *clients) running(session requestName, progress bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.sessions[session] {
		c.progressed = c.progressed || progress
	}
	return len(l.sessions[session]) > 0
}

// keepOpen has an execution go on whose answer may still come on a GET stream. The stream of its client,
// who has to know that it may resume it, ends at once. byHTTP is the outcome without the answer, o what
// it means that there is none.
func keepOpen(x *Call, e *execution.Execution, f *forwarding, byHTTP execution.Outcome, o *execution.Outcome) (bool, error) {
	if o.Verdict != execution.InDoubt || o.Cause != execution.CauseElsewhere || x.client.session.session == "" {
		return false, nil
	}
	left := x.client.leave // ADR 0070: from here on its client does not wait for this request
	comes, gone := x.engine.clients.wait(&x.client, openCost+len(x.message.Whole)+len(x.capture.source.Request.Body))
	if gone {
		o.Cause = execution.CauseLeft
	}
	if comes == nil {
		return false, nil
	}
	defer left()
	x.goesOn, x.w.goesOn = true, true
	_ = x.body.Close()
	written := func() {}
	if x.h.restores {
		written = x.engine.Writes.Write(x.place(), x.window)
	}
	go func() {
		defer x.close()
		defer written()
		select {
		case <-comes:
		case <-x.clock.Done():
		}
		answer := x.engine.clients.remove(&x.client)
		settleResumed(x, e, byHTTP, answer)
		if answer != nil {
			<-answer.written // an attempt ends when it is known whether its client has the answer
		}
	}()
	return true, x.releaseEnd(f)
}

// settleResumed records the outcome of a call that has waited for its answer, which is nil where none has
// come. What logs may read of the call belongs to its request, which has ended.
func settleResumed(x *Call, e *execution.Execution, byHTTP execution.Outcome, answer *resumption) {
	settled := false
	defer func() {
		if p := recover(); p != nil { // P7: it ends nobody else's call; this one is in doubt, as in execute
			x.h.Logger.Error("a call that has waited for its answer panicked; it is in doubt",
				slog.Any("key", x.call.Key), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			if !settled {
				x.countEnd(execution.Outcome{Verdict: execution.InDoubt}, x.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseInterrupted}, nil))
			}
		}
		if answer != nil {
			answer.settled()
		}
	}()
	o := outcomeResumed(x, byHTTP, answer)
	x.clock.stop()
	failed(x, o)
	settled = true
	err := x.settle(e, o, x.rec.Header())
	x.countEnd(o, err)
	if err != nil {
		x.unrecorded()
		x.h.Logger.Error("the outcome of a call that has waited for its answer could not be recorded; it is in doubt",
			slog.Any("key", x.call.Key), slog.Any("error", err))
	} else if o.Verdict == execution.InDoubt {
		reportDoubt(x, o)
	}
}

// outcomeResumed judges and records the answer as if it had come in the stream of the POST.
func outcomeResumed(x *Call, byHTTP execution.Outcome, answer *resumption) execution.Outcome {
	o := execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseInterrupted, Status: byHTTP.Status, Task: x.heard.End().Task}
	switch {
	case context.Cause(x.clock.Context) == errLeft && x.client.said:
		o.Cause = execution.CauseLeft
	case x.clock.overdue(), context.Cause(x.clock.Context) == errLeft:
		o.Cause = execution.CauseElsewhere
	}
	if answer == nil {
		return o
	}
	defer answer.text.Close()
	if x.client.progressed {
		_, _ = io.WriteString(x.heard, "data: {\"method\":\"notifications/progress\"}\n\n") // never fails
	}
	from := answer.text.NewReader()
	defer from.Close()
	event := io.MultiReader(strings.NewReader("\nevent: message\ndata: "), from, strings.NewReader("\n\n"))
	if _, err := io.Copy(sinkWriter{&x.sink}, event); err != nil {
		o.Cause = execution.CauseUnrecorded
		return o
	}
	o = x.stillInDoubt(understand(x, byHTTP))
	if o.Verdict == execution.InDoubt {
		o.Task = x.heard.End().Task
	}
	return o
}

// sinkWriter records what nobody but followers gets.
type sinkWriter struct{ to *callSink }

func (w sinkWriter) Write(p []byte) (int, error) {
	w.to.Write(p, false)
	return len(p), nil
}

// resumer passes on the answer to a GET of a session, and hands what it says to the calls that it
// answers. Bytes do not wait for that.
type resumer struct {
	http.ResponseWriter
	clients *clients
	memory  *spool.Budget
	session requestName
	way     proof
	gone    context.Context    // ends when its client has left
	over    context.CancelFunc // of the wait of those who resume a stream by it; nil where it resumes none

	begun  bool
	answer *protocol.Answer // nil where it is no stream of events
	text   *spool.Spool     // the message that comes
	unread bool             // it is not kept
	fresh  []*client        // whose answers are not flushed yet
	ends   sync.WaitGroup   // of the calls that it has answered
}

// sessionOf names the session of a request. Its caller is named without tokens: those are of a single
// call, and no GET that resumes its stream has them.
func (h *Handler) sessionOf(g *execution.Guard, r *http.Request) (n requestName) {
	if r.Header.Get(protocol.HeaderSession) == "" {
		return n
	}
	if caller, err := h.CallerOf(g, r, ""); err == nil {
		n = h.requestName(r, caller, nil)
	}
	return n
}

// listen returns what w and r are for a GET of a session of MCP, for whose answer calls may wait; else
// nil. One that resumes a stream asks for an answer that can be read.
func (h *Handler) listen(w http.ResponseWriter, r *http.Request) (*resumer, *http.Request) {
	session := r.Header.Get(protocol.HeaderSession)
	if h.Protocol == nil || session == "" || r.Method != http.MethodGet || h.Protocol.Protocol != protocol.MCP && !h.Protocol.Guesses() {
		return nil, r
	}
	e, release, err := h.Open()
	if err != nil {
		return nil, r // nothing runs
	}
	defer release() // what runs holds it
	l := &resumer{ResponseWriter: w, clients: &e.clients, memory: e.Executions.BodyMemory(), session: h.sessionOf(e.Executions, r), gone: r.Context()}
	if h.Protocol.Guesses() {
		l.way = proofOf(h, r, true)
	}
	var resumes context.Context
	if r.Header.Get("Last-Event-Id") != "" {
		resumes, l.over = context.WithCancel(r.Context())
	}
	l.clients.streaming(l.session, 1, resumes)
	if resumes != nil && r.Header.Get("Accept-Encoding") != "" {
		r = r.WithContext(r.Context())
		r.Header = r.Header.Clone()
		r.Header.Set("Accept-Encoding", "identity")
	}
	return l, r
}

// begin looks whether the answer is one that can be read.
func (l *resumer) begin(status int) {
	if l.begun || informational(status) {
		return
	}
	l.begun = true
	h := l.Header()
	if status == http.StatusOK && strings.HasPrefix(h.Get("Content-Type"), "text/event-stream") && h.Get("Content-Encoding") == "" {
		l.answer = protocol.NewAnswer(protocol.MCP, h.Get("Content-Type"), nil)
		l.answer.Part, l.answer.Message = l.part, l.message
	}
}

// WriteHeader implements http.ResponseWriter.
func (l *resumer) WriteHeader(status int) {
	l.begin(status)
	l.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (l *resumer) Write(p []byte) (int, error) {
	l.begin(http.StatusOK)
	if l.answer != nil {
		_, _ = l.answer.Write(p) // never fails
	}
	n, err := l.ResponseWriter.Write(p)
	if err != nil {
		l.handed(false)
	}
	return n, err
}

// FlushError is Flush for http.ResponseController.
func (l *resumer) FlushError() error {
	l.begin(http.StatusOK)
	err := http.NewResponseController(l.ResponseWriter).Flush()
	l.handed(err == nil || errors.Is(err, http.ErrNotSupported))
	return err
}

// Unwrap is for http.ResponseController.
func (l *resumer) Unwrap() http.ResponseWriter { return l.ResponseWriter }

// part keeps a part of a message, as long as calls of the session are running.
func (l *resumer) part(p []byte) {
	if l.unread || l.text == nil && len(bytes.TrimSpace(p)) == 0 {
		return
	}
	if l.text == nil {
		if l.unread = !l.clients.running(l.session, false); l.unread {
			return
		}
		l.text = spool.New(spool.Options{Limit: maxResumed, Budget: l.memory})
	}
	if _, err := l.text.Write(p); err != nil {
		_ = l.text.Close() // it is not taken
		l.text, l.unread = nil, true
	}
}

// message ends a message. ADR 0070: the client is answered from before the write of its event.
func (l *resumer) message(id []byte, progress bool, said protocol.Outcome) {
	text := l.text
	l.text, l.unread = nil, false
	if text == nil {
		return
	}
	if progress {
		l.clients.running(l.session, true)
	}
	var c *client
	waits := false
	if id != nil {
		c, waits = l.clients.resumed(l.session, l.way, id, text, &l.ends)
	}
	if c == nil {
		_ = text.Close()
		return
	}
	if attempt := c.call.call.Attempt; attempt != nil && l.gone.Err() == nil {
		status := http.StatusOK
		if waits {
			status = shows(c.call, status, said)
		} else if said.Internal() { // the stream of the POST goes on
			status = http.StatusInternalServerError
		}
		attempt.Answering(status, true)
	}
	l.fresh = append(l.fresh, c)
}

// handed notes whether the client has got what was written.
func (l *resumer) handed(whole bool) {
	for _, c := range l.fresh {
		if attempt := c.call.call.Attempt; attempt != nil && !whole {
			attempt.Unanswered()
		}
		close(c.answer.written)
	}
	l.fresh = nil
}

// close ends the stream, once the outcomes of the calls that it has answered are recorded (P7).
func (l *resumer) close() {
	if len(l.fresh) > 0 {
		_ = l.FlushError() // notes what it says
	}
	if l.text != nil {
		_ = l.text.Close()
	}
	l.clients.streaming(l.session, -1, nil)
	if l.over != nil {
		l.over()
	}
	l.ends.Wait()
}
