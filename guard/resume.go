package guard

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// A server of MCP may end the stream of a POST before its answer, and give that on a GET stream of the
// same session (MCP 2025-11-25, "Resumability and Redelivery"). The call is in doubt then, and the answer
// is evidence that settles the doubt (ADR 0078).

const (
	// maxResumed is the longest answer that is read from a GET stream, and keptResumed the longest that
	// is replayed, in bytes.
	maxResumed  = 64 << 20
	keptResumed = 256 << 10
	// maxElsewhere bounds the memory of the calls in doubt whose answers may come on GET streams, in bytes,
	// each with elsewhereCost, its message and what its undo needs of that. The oldest ones are forgotten.
	maxElsewhere  = 64 << 20
	elsewhereCost = 32 << 10
	usedCost      = 512 // of one whose answer is not taken any more
)

// elsewhere are the calls in doubt of this process whose answers may come on GET streams.
type elsewhere struct {
	mu    sync.Mutex
	of    map[requestName]map[string]*awaited // by session and id of JSON-RPC
	order []*awaited                          // the oldest first
	bytes int
}

// awaited is a call in doubt whose answer may come on a GET stream of its session.
type awaited struct {
	session requestName // without an id
	id      string
	call    *Call    // nil once an answer was taken, or where two doubts of the session share the id
	claim   [16]byte // of its execution
	way     proof
	byHTTP  execution.Outcome // without the answer
	works   bool              // a GET stream has brought progress: an error does not say that nothing was executed
	bytes   int
}

// add lists the call of x, whose doubt is recorded with that claim.
func (l *elsewhere) add(x *Call, claim [16]byte, byHTTP execution.Outcome) {
	a := &awaited{session: x.client.session, id: x.client.name.id, call: x, claim: claim, byHTTP: byHTTP}
	if a.session.session == "" {
		return
	}
	if x.h.rules.Guesses() {
		a.way = proofOf(x.h, x.r, true)
	}
	a.bytes = elsewhereCost + len(x.message.Whole) + len(x.capture.source.Request.Body)
	l.mu.Lock()
	defer l.mu.Unlock()
	if other := l.of[a.session][a.id]; other != nil {
		l.use(other)
		return
	}
	if l.of == nil {
		l.of = map[requestName]map[string]*awaited{}
	}
	if l.of[a.session] == nil {
		l.of[a.session] = map[string]*awaited{}
	}
	l.of[a.session][a.id] = a
	l.order, l.bytes = append(l.order, a), l.bytes+a.bytes
	for l.bytes > maxElsewhere {
		old := l.order[0]
		l.order, l.bytes = l.order[1:], l.bytes-old.bytes
		if delete(l.of[old.session], old.id); len(l.of[old.session]) == 0 {
			delete(l.of, old.session)
		}
	}
}

// use has no answer taken for a any more. It stays, since another answer to its id says nothing of others.
func (l *elsewhere) use(a *awaited) {
	if a.call != nil {
		a.call, a.bytes, l.bytes = nil, usedCost, l.bytes-a.bytes+usedCost
	}
}

// awaits reports that a session has calls whose answers may come. With progress they are at work.
func (l *elsewhere) awaits(session requestName, progress bool) (any bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.of[session] {
		a.works = a.works || progress
		any = any || a.call != nil
	}
	return any
}

// take returns the one call of a session that an answer belongs to, once; call is nil where none fits.
func (l *elsewhere) take(session requestName, way proof, id string, running *clients) (taken awaited) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.of[session][id]
	if a == nil || a.call == nil || a.way != way || running.share(session, id, a.call) {
		return awaited{}
	}
	taken = *a
	l.use(a)
	return taken
}

// share reports that another call than x has been sent with this id, and runs.
func (l *clients) share(session requestName, id string, x *Call) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.sessions[session] {
		if c.sent && c.name.id == id && c.call != x {
			return true
		}
	}
	return false
}

// resumes has the clients of a session whose connections have broken wait again until gone ends, as a GET
// resumes their streams (ADR 0070), and reports whether there are any.
func (l *clients) resumes(session requestName, gone context.Context) (any bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.sessions[session] {
		if c.said || c.gone.Err() == nil || !c.resumable.Load() {
			continue
		}
		any = true
		if a := c.call.call.Attempt; a != nil {
			a.WaitsElsewhere(gone)
		}
	}
	return any
}

// resumer passes on the answer to a GET of a session, and reads it for what it says of calls in doubt. Bytes
// do not wait for that.
type resumer struct {
	passing
	h       *Handler
	engine  *Engine
	session requestName
	way     proof
	over    context.CancelFunc // of the wait of those who resume a stream by it; nil where it resumes none

	answer *protocol.Answer // nil where it is no stream of events
	text   *body.Spool      // the message that comes
	unread bool             // it is not kept
	ends   sync.WaitGroup   // of what its answers settle
}

// sessionOf names the session of a request. Its caller is named without tokens: those are of a single
// call, and no GET that resumes its stream has them.
func (h *Handler) sessionOf(g *execution.Guard, r *http.Request) (n requestName) {
	if r.Header.Get(protocol.HeaderSession) == "" {
		return n
	}
	if caller, err := h.Callers.Of(r, "", g.Keyed); err == nil {
		n = h.requestName(r, caller, nil)
	}
	return n
}

// listen returns what w and r are for a GET that may bring the answer to a call in doubt, or resumes the
// stream of one that runs; else nil. One that resumes a stream asks for an answer that can be read.
func (h *Handler) listen(w http.ResponseWriter, r *http.Request) (*resumer, *http.Request) {
	session := r.Header.Get(protocol.HeaderSession)
	if h.rules == nil || session == "" || r.Method != http.MethodGet || h.Protocol != protocol.MCP && !h.rules.Guesses() {
		return nil, r
	}
	e, release, err := h.Open()
	if err != nil {
		return nil, r // nothing is recorded
	}
	defer release() // settle asks again
	l := &resumer{h: h, engine: e, session: h.sessionOf(e.Executions, r)}
	l.passing = passing{ResponseWriter: w, to: l}
	resumes := r.Header.Get("Last-Event-Id") != ""
	if resumes {
		var gone context.Context
		gone, l.over = context.WithCancel(r.Context())
		if !e.clients.resumes(l.session, gone) {
			l.over()
			l.over = nil
		}
	}
	if l.over == nil && !e.elsewhere.awaits(l.session, false) {
		return nil, r
	}
	if h.rules.Guesses() {
		l.way = proofOf(h, r, true)
	}
	if resumes && r.Header.Get("Accept-Encoding") != "" {
		r = r.WithContext(r.Context())
		r.Header = r.Header.Clone()
		r.Header.Set("Accept-Encoding", "identity")
	}
	return l, r
}

// begins looks whether the answer is one that can be read.
func (l *resumer) begins(status int) {
	h := l.Header()
	if status == http.StatusOK && strings.HasPrefix(h.Get("Content-Type"), "text/event-stream") && h.Get("Content-Encoding") == "" {
		l.answer = protocol.NewAnswer(protocol.MCP, h.Get("Content-Type"), nil)
		l.answer.Part, l.answer.Message = l.part, l.message
	}
}

func (l *resumer) hears(p []byte) {
	if l.answer != nil {
		_, _ = l.answer.Write(p) // never fails
	}
}

// part keeps a part of a message, as long as an answer is awaited.
func (l *resumer) part(p []byte) {
	if l.unread || l.text == nil && len(bytes.TrimSpace(p)) == 0 {
		return
	}
	if l.text == nil {
		if l.unread = !l.engine.elsewhere.awaits(l.session, false); l.unread {
			return
		}
		l.text = body.NewSpool(body.SpoolOptions{Limit: maxResumed, Budget: l.engine.Executions.BodyMemory()})
	}
	if _, err := l.text.Write(p); err != nil {
		_ = l.text.Close() // it is not taken
		l.text, l.unread = nil, true
	}
}

// message ends a message.
func (l *resumer) message(id []byte, progress bool, _ protocol.Outcome) {
	text := l.text
	l.text, l.unread = nil, false
	if text == nil {
		return
	}
	if progress {
		l.engine.elsewhere.awaits(l.session, true)
	}
	var a awaited
	if id != nil {
		a = l.engine.elsewhere.take(l.session, l.way, protocol.SameID(id), &l.engine.clients)
	}
	if a.call == nil {
		_ = text.Close()
		return
	}
	key := string(a.call.call.Key[:])
	l.engine.running.begin(key) // before the client has read the answer and may call again
	l.ends.Go(func() {
		defer text.Close()
		defer l.engine.running.end(key)
		defer func() {
			if p := recover(); p != nil { // P7: it ends nobody else's call; this one stays in doubt
				l.h.Logger.Error("settling a doubt by the answer on a GET stream panicked; the call stays in doubt",
					slog.Any("key", a.call.call.Key), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			}
		}()
		if err := l.settle(&a, text); err != nil && !errors.Is(err, execution.ErrTaken) {
			l.h.Logger.Error("the answer on a GET stream cannot settle a doubt; the call stays in doubt",
				slog.Any("key", a.call.call.Key), slog.Any("error", err))
		}
	})
}

// settle settles a doubt by an answer, which means what it would have meant in the stream of the POST.
func (l *resumer) settle(a *awaited, text *body.Spool) error {
	x, ctx := a.call, context.Background()
	e, release, err := l.h.Open()
	if err != nil {
		return err
	}
	defer release()
	policy, err := l.h.Tokens()
	if err != nil {
		return err
	}
	if a.works {
		_, _ = io.WriteString(x.up.heard, "data: {\"method\":\"notifications/progress\"}\n\n") // never fails
	}
	from := text.NewReader()
	defer from.Close()
	event := io.MultiReader(strings.NewReader("event: message\ndata: "), from, strings.NewReader("\n\n"))
	body, err := io.ReadAll(io.LimitReader(event, keptResumed+1))
	if err != nil {
		return err
	}
	_, _ = x.up.heard.Write(body) // never fails
	if _, err := io.Copy(x.up.heard, event); err != nil {
		return err
	}
	o := x.in.stillInDoubt(x.up.understand(a.byHTTP))
	if o.Verdict == execution.InDoubt {
		return nil
	}
	found, err := e.Executions.Get(ctx, x.call.Key)
	switch {
	case errors.Is(err, execution.ErrUnknown):
		return nil
	case err != nil:
		return err
	case found.Status != execution.Doubtful || found.Record.Claim != a.claim:
		return nil // it was settled, or has run again
	}
	how := execution.Resolution{By: execution.ByAnswer, Applied: o.Verdict == execution.Completed}
	var undo *store.Batch
	if len(body) <= keptResumed {
		header := http.Header{"Content-Type": {"text/event-stream"}}
		how.Answer, how.Body = &execution.Head{Status: o.Status, Header: header}, body
		if how.Applied && x.capture.decision.Way == checkpoint.Compensate { // else its values are not in the answer
			x.capture.hears(body)
			undo = x.capture.undoable(ctx, x, o, header)
		}
	}
	err = e.Executions.SettleDoubt(ctx, found, how, policy.SettledBy(ctx, x.call.Key, found.Record, how.Applied, how.By), undo)
	if err == nil {
		x.resolved(o.Verdict, how.By)
	}
	return err
}

// close ends the stream, once what its answers settle is recorded (P7).
func (l *resumer) close() {
	if l.text != nil {
		_ = l.text.Close()
	}
	if l.over != nil {
		l.over()
	}
	l.ends.Wait()
}
