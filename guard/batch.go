package guard

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// A batch with a message that changes something is taken apart (ADR 0077): each message is handled as
// if it had come alone.

const (
	// mostMessages bounds the messages of such a batch, and batchWidth those that are worked on at once.
	mostMessages = 1000
	batchWidth   = 16
	// lastWrites is how long the client has for what it gets once no caller is waited for any more.
	lastWrites = 5 * time.Second
	// maxPart is the largest message of an answer, in bytes.
	maxPart = 64 << 20
)

// comesApart reports that the messages of a batch are handled one by one. A batch that its caller has
// named as a whole, by an id or a token, is one call, and `initialize` must not be in any. So is one of
// which nothing says that its server speaks MCP or A2A: it may take the array for data, or keep its order.
// The request alone decides (P1): a proof and an announced tool come and go, and records of the calls and
// one of the whole would know nothing of each other.
func comesApart(x *Call, q *protocol.Request) bool {
	h := x.h
	changes := false
	for i := range q.Messages {
		m := &q.Messages[i]
		if m.Method == "initialize" {
			return false
		}
		named := !h.Protocol.Guesses() || m.Protocol != protocol.JSONRPC
		readOnly := understood(x) && h.tools.ReadOnly(h.server(x.r), m.Tool) // then it changes nothing either way
		changes = changes || named && h.Protocol.Changes(m, readOnly)
	}
	if !changes || len(x.r.Header[ect.FieldName]) > 0 {
		return false
	}
	_, err := x.statedID()
	return errors.Is(err, errNoID)
}

// batch is a batch that is taken apart.
type batch struct {
	x      *Call // with the request and its body; it is not guarded itself
	next   Next
	before http.Header // of the answer, as the handlers before the guard have set it
	events bool        // the answers come as a stream of events; else as one array
	parts  []*part
	begun  atomic.Bool // the stream has begun
	until  time.Time   // when the answer has to be there; zero where the client does not say how long it waits

	mu   sync.Mutex // for all that follows
	out  Writer
	torn bool    // an event could not be written to its end
	last []*part // whose clients the end of the answer answers
}

// serveBatch handles the messages of x, and gives their answers as those of a batch.
func serveBatch(w http.ResponseWriter, x *Call, next Next) error {
	h := x.h
	defer func() { _ = x.body.Close() }()
	if x.release != nil { // the engine has to stay until all answers are handed over
		defer x.release()
	}
	messages := x.batch.Messages
	if len(messages) > mostMessages {
		h.refuseUnguarded(w, x.r, nil, api.NewProblem(api.BodyTooLarge,
			fmt.Sprintf("The batch has %d messages; send at most %d at once.", len(messages), mostMessages)))
		return nil
	}
	h.Host.Note(x.r, "status", statusBatch)
	b := &batch{x: x, next: next, before: maps.Clone(w.Header()), events: acceptsEvents(x.r.Header)}
	for i := range messages {
		// Generic JSON-RPC knows arrays only.
		b.events = b.events && messages[i].Protocol != protocol.JSONRPC
		b.parts = append(b.parts, &part{b: b, asked: &messages[i], header: b.before.Clone()})
	}
	if left, said := callersTime(x.r.Header, h.DeadlineHeader); said {
		b.until = time.Now().Add(time.Duration(float64(left) * shorter))
	}
	b.out.begin(w, x.r, &h.alarms)
	if e := x.engine; e != nil {
		e.readers.enter()
		defer e.readers.leave()
		ended := make(chan struct{})
		defer close(ended)
		defer context.AfterFunc(e.Waits, func() {
			select {
			case <-ended:
			case <-time.After(lastWrites):
				b.out.ring()
			}
		})()
	}
	defer b.close()
	slots := make(chan struct{}, batchWidth)
	var all sync.WaitGroup
	for _, p := range b.parts {
		slots <- struct{}{}
		all.Go(func() {
			p.run()
			<-slots
		})
	}
	all.Wait()
	return b.finish()
}

// acceptsEvents reports that the client names streams of events among what it accepts.
func acceptsEvents(h http.Header) bool {
	for _, line := range h["Accept"] {
		for item := range strings.SplitSeq(line, ",") {
			if isEvents(item) {
				return true
			}
		}
	}
	return false
}

// isEvents reports that a media type is that of a stream of events.
func isEvents(text string) bool {
	media, _, _ := strings.Cut(text, ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// close ends the calls. Until here their clients have waited for the batch.
func (b *batch) close() {
	for _, p := range b.parts {
		if p.call != nil {
			p.call.waitOver()
		}
		for _, text := range []*spool.Spool{p.text, p.response} {
			if text != nil {
				_ = text.Close()
			}
		}
	}
}

// finish gives the client what it has not got yet.
func (b *batch) finish() error {
	requests := slices.DeleteFunc(slices.Clone(b.parts), func(p *part) bool { return p.asked.ID == nil })
	switch {
	case b.begun.Load():
	case len(requests) == 0:
		refused := slices.IndexFunc(b.parts, func(p *part) bool { return p.refusal() != 0 })
		return b.passOn(b.parts[max(refused, 0)])
	case !slices.ContainsFunc(requests, func(p *part) bool { return p.refusal() == 0 || p.refusal() != requests[0].refusal() }):
		return b.passOn(requests[0])
	case b.events:
		b.begin(nil)
	default:
		b.array(requests)
		return nil
	}
	if b.torn {
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	b.release(slices.DeleteFunc(slices.Clone(b.parts), func(p *part) bool { return p.asked.ID != nil }))
	return nil
}

// release lets the end of the answer go, which answers the clients of these messages.
func (b *batch) release(of []*part) {
	b.last, b.out.attempt = of, b
	b.out.Release()
}

// passOn gives the answer of one message as that of the batch: none has another, as where the session
// has ended or a credential is refused.
func (b *batch) passOn(p *part) error {
	switch {
	case errors.Is(p.err, errBroken):
		panic(http.ErrAbortHandler)
	case p.status == 0:
		b.x.giveBack()
		return p.err
	}
	b.head(p)
	if bodyAllowed(p.status) {
		size := int64(0)
		if p.text != nil {
			size = p.text.Size()
		}
		b.out.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	}
	b.out.WriteHeader(p.status)
	if p.text != nil {
		b.copy(p.text.NewReader())
	}
	b.release(b.parts)
	return nil
}

// array answers with the responses as one array. None is handed over before its end is.
func (b *batch) array(requests []*part) {
	var first *part
	failures, size := make([][]byte, len(requests)), int64(1)
	for i, p := range requests {
		if !p.answered {
			failures[i] = p.failure()
			size += int64(len(failures[i])) + 1
			continue
		}
		size += p.response.Size() + 1
		if first == nil && !p.ours() {
			first = p
		}
	}
	b.head(first)
	h := b.out.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.FormatInt(size, 10))
	b.out.WriteHeader(http.StatusOK)
	next := "["
	for i, p := range requests {
		_, _ = io.WriteString(&b.out, next) // never fails
		next = ","
		if p.answered {
			b.copy(p.response.NewReader())
		} else {
			_, _ = b.out.Write(failures[i]) // never fails
		}
	}
	_, _ = io.WriteString(&b.out, "]") // never fails
	b.release(b.parts)
}

// copy writes text to the client.
func (b *batch) copy(text io.ReadCloser) {
	_, err := io.Copy(struct{ io.Writer }{&b.out}, text)
	_ = text.Close()
	if err != nil { // it could not be read again
		panic(http.ErrAbortHandler)
	}
}

// Answering implements answering for the end of the answer.
func (b *batch) Answering(int, bool) {
	for _, p := range b.last {
		if p.attempt != nil && p.informs() {
			p.attempt.Answering(cmp.Or(p.shows, p.status), false)
		}
	}
}

// Unanswered implements answering.
func (b *batch) Unanswered() {
	for _, p := range b.last {
		if p.attempt != nil {
			p.attempt.Unanswered()
		}
	}
}

// head takes the header of the answer from p, but for what belongs to p's call or to its bytes. A
// problem of ours says nothing about the others; p may be nil.
func (b *batch) head(p *part) {
	h := b.out.Header()
	fill(h, b.before)
	if p != nil && !p.ours() {
		fill(h, p.header)
	}
	for _, name := range slices.Concat(ours[:], protocol.OfBody, []string{"Etag", "Last-Event-Id", "Trailer", "Transfer-Encoding"}) {
		delete(h, name)
	}
}

// begin begins the stream with the header of p. The caller holds mu.
func (b *batch) begin(p *part) {
	if !b.begun.CompareAndSwap(false, true) {
		return
	}
	b.head(p)
	h := b.out.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache, no-transform")
	b.out.WriteHeader(http.StatusOK)
	b.out.Flush()
	for _, p := range b.parts {
		if p.over && !p.answered && p.asked.ID != nil {
			b.event(p, io.NopCloser(bytes.NewReader(p.failure())), true)
		}
	}
}

// event writes a message as an event; response says that it answers p. The caller holds mu.
func (b *batch) event(p *part, text io.ReadCloser, response bool) {
	defer func() { _ = text.Close() }()
	if b.out.gone || b.torn {
		return
	}
	counts := response && p.attempt != nil && p.informs()
	if counts {
		p.attempt.Answering(cmp.Or(p.shows, p.status), false) // before the write, which a client may answer with its next call
		defer func() {
			if b.out.gone || b.torn {
				p.attempt.Unanswered()
			}
		}()
	}
	to := bufio.NewWriter(&b.out)                         // which never fails
	_, _ = to.WriteString("event: message\ndata: ")       // as above
	if _, err := io.Copy(oneLine{to}, text); err != nil { // it could not be read again
		b.torn = true
		return
	}
	_, _ = to.WriteString("\n\n") // as above
	_ = to.Flush()                // as above
	b.out.Flush()
}

// oneLine leaves out the ends of lines, which mean nothing in JSON.
type oneLine struct{ to io.Writer }

func (l oneLine) Write(p []byte) (int, error) {
	for line := range bytes.FieldsFuncSeq(p, func(c rune) bool { return c == '\r' || c == '\n' }) {
		if _, err := l.to.Write(line); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// part is a message of a batch, and the response writer of its answer.
type part struct {
	b       *batch
	asked   *protocol.Message
	call    *Call              // that the message was, once it is over; nil where it was passed
	attempt *execution.Attempt // of the call; may be nil
	of      *Call              // that attempt is of; nil without

	header   http.Header
	status   int
	shows    int // the status that the response stands for; 0 without one
	answer   *protocol.Answer
	events   bool         // the answer is a stream
	coded    bool         // it cannot be read
	text     *spool.Spool // of the message that comes, without line ends; nil before its first byte
	response *spool.Spool // for the array
	whole    bool         // the guard has let the end of the answer go
	answered bool         // there is a response, and the batch has it
	over     bool         // nothing more comes; guarded by mu of b
	err      error        // why there is no answer, or no whole one
}

// run handles the message as if it had come alone.
func (p *part) run() {
	if err := p.serve(p.b.x.h); err != nil {
		p.err = err
	}
	p.end()
}

var (
	// errBroken: the answer ended before its end.
	errBroken = errors.New("the answer broke off")
	// errNoTime: the message has not begun in the time of its batch.
	errNoTime = errors.New("agent_guard: the time of the batch is over")
)

// within is d, or what is left of the time that the client waits, which is one time for all messages of
// a batch (cascade 3.3.1). p is nil for any other request.
func (p *part) within(d time.Duration) time.Duration {
	if p == nil || p.b.until.IsZero() {
		return d
	}
	return min(d, time.Until(p.b.until))
}

// announce has h say how long the client still waits.
func (p *part) announce(h http.Header) {
	if p != nil && !p.b.until.IsZero() {
		left := max(time.Until(p.b.until).Seconds()/shorter, 1e-9)
		h.Set(p.b.x.h.DeadlineHeader, strconv.FormatFloat(left, 'f', 9, 64))
	}
}

func (p *part) serve(h *Handler) (err error) {
	defer func() {
		switch reason := recover(); reason {
		case nil:
		case http.ErrAbortHandler:
			err = errBroken
		default: // it ends the answer to this message only
			err = errBroken
			h.Logger.Error("answering a message of a batch panicked", slog.Any("panic", reason), slog.String("stack", string(debug.Stack())))
		}
	}()
	r, done := h.Host.Message(p.b.x.r, p)
	defer done()
	r.Header.Del("Expect") // the body is here
	for _, name := range protocol.OfBody {
		r.Header.Del(name)
	}
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(p.asked.Body)), int64(len(p.asked.Body)), nil
	return h.serve(p, r, p.b.next, p)
}

// Header implements http.ResponseWriter.
func (p *part) Header() http.Header { return p.header }

// WriteHeader implements http.ResponseWriter.
func (p *part) WriteHeader(status int) {
	if informational(status) || p.status != 0 {
		return
	}
	p.status, p.coded = status, p.header.Get("Content-Encoding") != ""
	p.events = isEvents(p.header.Get("Content-Type")) && !p.coded
	p.answer = protocol.NewAnswer(p.asked.Protocol, p.header.Get("Content-Type"), nil)
	p.answer.Part, p.answer.Message = p.piece, p.message
	if p.events && p.b.events && status == http.StatusOK && !p.b.begun.Load() { // else an event may be on its way to a slow client
		p.b.mu.Lock()
		defer p.b.mu.Unlock()
		p.b.begin(p)
	}
}

// Write implements http.ResponseWriter. An error means that the client takes nothing any more.
func (p *part) Write(text []byte) (int, error) {
	if p.status == 0 {
		p.WriteHeader(http.StatusOK)
	}
	if p.coded {
		p.piece(text)
		return len(text), nil
	}
	_, _ = p.answer.Write(text) // never fails
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if p.b.out.gone {
		return 0, errLeft
	}
	return len(text), nil
}

// FlushError implements http.ResponseController. Whole messages are flushed.
func (p *part) FlushError() error {
	if p.status == 0 {
		p.WriteHeader(http.StatusOK)
	}
	return nil
}

// SetWriteDeadline implements http.ResponseController. The connection is that of all.
func (p *part) SetWriteDeadline(at time.Time) error { return p.b.out.control().SetWriteDeadline(at) }

// piece keeps a piece of a message.
func (p *part) piece(text []byte) {
	if p.events && p.text == nil { // an event without data is none
		if text = bytes.TrimLeft(text, " "); len(text) == 0 {
			return
		}
	}
	if p.text == nil {
		options := spool.Options{Limit: maxPart}
		if e := p.b.x.executions; e != nil {
			options.Budget = e.BodyMemory()
		}
		p.text = spool.New(options)
	}
	if _, err := p.text.Write(text); err != nil {
		p.err = err
	}
}

// message gives a whole message on. What is no response is for clients that read events.
func (p *part) message(id []byte, _ bool, said protocol.Outcome) {
	response := id != nil && (string(id) != "null" || string(p.asked.ID) == "null")
	if response && p.of != nil {
		p.shows = shows(p.of, p.status, said)
	}
	text := p.text
	if p.events {
		p.text = nil
	}
	switch {
	case p.err != nil, text == nil, !p.events && (!response || !isObject(text)), !p.b.events && p.events && !(response && isObject(text)):
	case p.b.events:
		p.b.mu.Lock()
		defer p.b.mu.Unlock()
		p.answered = p.answered || response
		p.b.begin(p)
		p.b.event(p, text.NewReader(), response)
	default:
		if p.response != nil {
			_ = p.response.Close() // A2A has several, of which the last counts
		}
		p.answered, p.response, p.text = true, text, nil
		return
	}
	if p.events && text != nil {
		_ = text.Close()
	}
}

// isObject reports that text is one JSON object and nothing else.
func isObject(text *spool.Spool) bool {
	if all, ok := text.Bytes(); ok {
		all = bytes.TrimLeft(all, " \t\r\n")
		return len(all) > 0 && all[0] == '{' && json.Valid(all)
	}
	from := text.NewReader()
	defer func() { _ = from.Close() }()
	tokens := json.NewDecoder(from)
	tokens.UseNumber()
	for depth, n := 0, 0; ; n++ {
		token, err := tokens.Token()
		if errors.Is(err, io.EOF) {
			return n > 0 && depth == 0
		}
		if err != nil || n == 0 && token != json.Delim('{') || n > 0 && depth == 0 {
			return false
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
}

// end takes the answer for whole, if it is.
func (p *part) end() {
	if p.answer != nil && !p.events && !p.coded && p.err == nil {
		_ = p.answer.End()
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	p.over = true
	if p.b.begun.Load() && !p.answered && p.asked.ID != nil {
		p.b.event(p, io.NopCloser(bytes.NewReader(p.failure())), true)
	}
}

// Answering implements answering: the batch says when the client is answered.
func (p *part) Answering(int, bool) { p.whole = true }

// Unanswered implements answering.
func (p *part) Unanswered() { p.whole = false }

// informs reports that what the client gets for the message is what became of the call.
func (p *part) informs() bool { return p.whole && (p.answered || p.asked.ID == nil || p.refusal() > 0) }

// ours reports that the answer is a problem of the guard.
func (p *part) ours() bool {
	status := p.header.Get(HeaderExecutionStatus)
	return status == StatusRefused || status == StatusInDoubt
}

func (p *part) doubtful() bool { return p.call != nil && p.call.doubtful }

// refusal is the status with which a server has refused the message on the level of HTTP; -1 where it
// could not be sent, and 0 for anything else.
func (p *part) refusal() int {
	switch {
	case p.answered, p.doubtful(), errors.Is(p.err, errBroken):
	case p.status == 0 && p.err != nil:
		return -1
	case p.status >= http.StatusBadRequest && p.err == nil:
		return p.status
	}
	return 0
}

// maxRefusal is how much of the body of a refusal its client is shown, in bytes.
const maxRefusal = 4 << 10

// failure is the response to a message that has none.
func (p *part) failure() []byte {
	if p.doubtful() {
		problem := (*api.Problem)(nil)
		if errors.As(p.call.inDoubt(p.call.noted.cause), &problem) {
			p.call.pointToStatus(problem)
			document := documentWriter{header: http.Header{}}
			problem.Mount = p.call.h.Host.Mount(p.call.r)
			writeMessage(&document, problem, p.asked, p.call.action.DoubtAsResult)
			return document.body
		}
	}
	said := struct {
		Status int             `json:"status"`
		Body   json.RawMessage `json:"body,omitempty"`
	}{Status: p.status}
	text := "The answer to this message is none that can be read."
	known := (*StatusError)(nil)
	switch {
	case errors.Is(p.err, spool.ErrLimit):
		text = fmt.Sprintf("The answer to this message is larger than %d bytes.", maxPart)
	case errors.Is(p.err, errBroken):
		text = "The answer to this message broke off."
	case errors.Is(p.err, errNoTime):
		said.Status = http.StatusGatewayTimeout
		text = "The time of the batch was over before this message began. It was not forwarded."
	case p.status == 0 && errors.As(p.err, &known):
		said.Status = known.Status
		text = "The message could not be forwarded."
	case p.status == 0:
		said.Status = http.StatusBadGateway
		text = "The message could not be forwarded."
	case p.err == nil && p.status >= http.StatusBadRequest:
		text = fmt.Sprintf("The server has answered this message with the HTTP status %d.", p.status)
		if p.text != nil && p.text.Size() <= maxRefusal {
			if body, ok := p.text.Bytes(); ok && json.Valid(body) {
				said.Body = body
			}
		}
	}
	data, err := json.Marshal(said)
	if err != nil {
		panic("agent_guard: " + err.Error()) // its parts are valid JSON
	}
	return p.asked.Error(text, data)
}
