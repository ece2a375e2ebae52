package guard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// maxMessage is the longest body that is read as a message, in bytes. Longer ones are refused, or where nobody has
// named the protocol guarded by the rules of HTTP.
const maxMessage = 4 << 20

// read makes the request of a guarded call. It reads the body, where that may be a message; harmless is that of a
// message that changes nothing, else nil. Of a request that is refused with err, it tells what is known.
func (h *Handler) read(r *http.Request, action *Action) (_ guardedRequest, harmless []byte, err error) {
	q := guardedRequest{opened: h.open(), h: h, r: r, action: action, began: time.Now()}
	if h.rules == nil || r.ContentLength > maxMessage && h.rules.Guesses() || !h.rules.Reads(r) {
		return q, nil, nil
	}
	begins := false
	q.text, q.took, err = h.readBody(r, q.executions, func(start []byte) bool { begins = h.rules.Begins(r.URL.Path, start); return begins })
	if begins && err == nil {
		q, harmless, err = q.withMessage()
	}
	if err != nil && h.rules.Guesses() {
		q.unreadable, err = err, nil // in its turn, as for a call that is no message
	}
	return q, harmless, err
}

// withMessage reads the body, which begins as a message, as one (ADR 0072), and finds the action that it belongs to.
// harmless is the body of one that changes nothing, else nil. A batch with one message that may change something is
// the call of that message. With more it is refused, unless they are generic JSON-RPC that nobody has announced: an
// array that may be data, and is guarded by the rules of HTTP.
func (of guardedRequest) withMessage() (_ guardedRequest, harmless []byte, err error) {
	h, r, whole := of.h, of.r, of.text
	q := guardedRequest{opened: of.opened, h: h, r: r, began: of.began, action: of.action, text: whole, took: of.took}
	if whole.Size() > maxMessage && h.rules.Guesses() {
		return q, nil, nil
	}
	if whole.Size() > maxMessage { // P1: what it says, such as its key, is not known
		q.message = &protocol.Message{Protocol: h.Protocol}
		if all, ok := h.rules.Parse(r.Header, r.URL.Path, []byte("{}")); ok {
			q.message.REST = all[0].REST
		}
		return q, nil, problem.New(problem.BodyTooLarge, fmt.Sprintf("A message has at most %d bytes.", maxMessage))
	}
	text := make([]byte, whole.Size()) // its own: the message outlives the call, where that is settled later
	if _, err := whole.ReadAt(text, 0); err != nil && err != io.EOF {
		return q, nil, unkept(err)
	}
	all, ok := h.rules.Parse(r.Header, r.URL.Path, text)
	if !ok {
		return q, nil, nil
	}
	if h.rules.Guesses() {
		q.proves = proofOf(h, r, false)
	}
	// What is learned of tools counts with a proof only: a batch that comes again must be the same call (P1).
	changing, announced, known := 0, !h.rules.Guesses() || h.byMessage(), h.understood(q.proves)
	for i := range all {
		m := &all[i]
		if m.Cancels() != nil {
			q.cancels = all
		}
		if h.rules.Changes(m, known && h.tools.ReadOnly(h.server(r), m.Tool)) {
			changing, q.message, announced = changing+1, m, announced || m.Protocol != protocol.JSONRPC
		}
	}
	switch {
	case changing > 1 && announced:
		q.message = nil
		return q, nil, problem.New(problem.BatchMixed, fmt.Sprintf("Send each of the %d in a request of its own.", changing))
	case changing > 1:
		q.message = nil
	case changing == 1 && h.byMessage():
		action, err := h.action(r, q.message)
		if err != nil {
			return q, nil, err
		}
		q.action = action
	case changing == 0 && known:
		harmless = text
	}
	switch {
	case changing > 0:
	case !all[0].Batch:
		q.message = &all[0]
	case harmless != nil: // an error with one id answers no batch
		frees := !slices.ContainsFunc(all, func(m protocol.Message) bool { return !m.Frees })
		q.message = &protocol.Message{Protocol: all[0].Protocol, Frees: frees}
	}
	return q, harmless, nil
}

// A protocol that nobody has configured is what the caller says. So his messages count as such only
// once the server has shown that it speaks the protocol (ADR 0072).

// proof stands for all requests that go the same way as one whose answer has shown that.
type proof [sha256.Size]byte

// mostProofs bounds the proofs of a handler, and maxShown the answer that is read for one, in bytes.
const (
	mostProofs = 1 << 14
	maxShown   = 256 << 10
)

// proofs are those of one handler, so that a new configuration has none.
type proofs struct {
	mu  sync.Mutex
	all map[proof]struct{}
}

func (p *proofs) add(of proof) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == nil {
		p.all = map[proof]struct{}{}
	}
	for other := range p.all {
		if len(p.all) < mostProofs {
			break
		}
		delete(p.all, other)
	}
	p.all[of] = struct{}{}
}

// withdraw forgets all: after an answer unlike MCP, another server may have taken the place of one.
func (p *proofs) withdraw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.all)
}

// proofOf has all of a request that may decide which server executes it. What differs between the
// messages of one client is left out, with get also what differs between them and its GET.
func proofOf(h *Handler, r *http.Request, get bool) proof {
	method, target := h.Host.Original(r)
	forwarded := r.Method
	if get {
		method, forwarded = "", ""
	}
	var room [512]byte
	text := room[:0]
	add := func(part string) { text = append(binary.AppendUvarint(text, uint64(len(part))), part...) }
	for _, part := range []string{method, target.RequestURI(), forwarded, r.URL.RequestURI(), r.Host, peerOf(r)} {
		add(part)
	}
	if r.TLS == nil {
		add("http")
	} else {
		add("https")
		add(r.TLS.ServerName)
		text = binary.AppendUvarint(text, uint64(len(r.TLS.PeerCertificates)))
		for _, cert := range r.TLS.PeerCertificates {
			sum := sha256.Sum256(cert.Raw)
			add(string(sum[:]))
		}
	}
	var all [32]string
	names := all[:0]
	for name := range r.Header {
		switch name {
		case "Content-Type", "Cache-Control", "Pragma":
			if get {
				continue
			}
		case "Content-Length", "Accept", "Expect", "Last-Event-Id", "Traceparent", "Tracestate", "Baggage", "X-Request-Id",
			headerExecutionParent, HeaderWorkflowID, headerWorkflowNode, ect.FieldName:
			continue
		}
		if !strings.HasPrefix(name, "Mcp-") && !IsKey(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		add(name)
		text = binary.AppendUvarint(text, uint64(len(r.Header[name])))
		for _, value := range r.Header[name] {
			add(value)
		}
	}
	return sha256.Sum256(text)
}

// understood reports that the server reads messages as the guard does; way is that of a request to it.
func (h *Handler) understood(way proof) bool {
	p := &h.proofs
	p.mu.Lock()
	defer p.mu.Unlock()
	_, proven := p.all[way]
	return proven || !h.rules.Guesses()
}

// showed keeps the proof that a whole answer with the body shown is, before its client has the end of it.
func (q *guardedRequest) showed(shown *bytes.Buffer, status int, header http.Header) {
	if shown == nil || status != http.StatusOK || header.Get("Content-Encoding") != "" || shown.Len() > maxShown {
		return
	}
	_, target := q.h.Host.Original(q.r)
	sent := []string{target.RequestURI(), target.Path, q.r.URL.RequestURI(), q.r.URL.Path}
	for _, u := range []*url.URL{target, q.r.URL} {
		query, err := url.QueryUnescape(u.RawQuery)
		if err != nil {
			return
		}
		sent = append(sent, query)
	}
	for name, values := range q.r.Header {
		sent = append(append(sent, name), values...)
	}
	if q.message.Proves(header.Get("Content-Type"), shown.Bytes(), sent...) {
		q.h.proofs.add(q.proves)
		a := protocol.NewAnswer(protocol.MCP, header.Get("Content-Type"), q.h.learns(q.r))
		_, _ = a.Write(shown.Bytes()) // never fails
	}
}

// opens reports whether m is the first message of a session of MCP. What it answers is one client's:
// without a key it is never that of another.
func opens(m *protocol.Message) bool { return m != nil && m.Method == "initialize" }

// server names what r is sent to, for what is learned of its tools.
func (h *Handler) server(r *http.Request) string {
	_, target := h.Host.Original(r)
	return r.Host + target.Path
}

// pass forwards a message that changes nothing, with the body text, and learns the tools that it asks for.
func (q guardedRequest) pass(w http.ResponseWriter, text []byte, next Next) error {
	h, r, m := q.h, q.r, q.message
	if q.engine != nil && q.cancels == nil {
		q.release()
	} else if q.engine != nil {
		defer q.release()
		next = canceller{q, next}
	}
	_ = q.text.Close()
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(text)), int64(len(text)), nil
	r.Header.Del("Expect") // the body is here
	var learn func(tool string, readOnly bool)
	if m.Method == "tools/list" {
		learn = h.learns(r)
	}
	if judges := h.rules.Guesses() && m.ID != nil; judges || learn != nil {
		l := &listener{learn: learn}
		l.passing = passing{ResponseWriter: w, to: l}
		w = l
		defer func() {
			media, _, _ := strings.Cut(l.Header().Get("Content-Type"), ";")
			media, read := strings.ToLower(strings.TrimSpace(media)), l.Header().Get("Content-Encoding") == ""
			if !judges || r.Context().Err() != nil || l.status/100 != 2 || media == "text/event-stream" {
				return // it may go on elsewhere, or says nothing of the server
			}
			if l.answer == nil || !body.IsJSON(media) || read && l.answer.End().Meaning == protocol.Unanswered {
				h.proofs.withdraw()
			}
		}()
	}
	err := h.pass(w, r, m, next)
	if err != nil {
		r.Body = io.NopCloser(bytes.NewReader(text)) // for the site's error routes
	}
	return err
}

// learns returns what notes the tools of the server that r is sent to.
func (h *Handler) learns(r *http.Request) func(tool string, readOnly bool) {
	server := h.server(r)
	return func(tool string, readOnly bool) { h.tools.Learn(server, tool, readOnly) }
}

// listener reads an answer that passes by, and the tools in it.
type listener struct {
	passing
	status int
	learn  func(tool string, readOnly bool)
	answer *protocol.Answer
}

func (l *listener) begins(status int) { l.status = status }

func (l *listener) hears(p []byte) {
	if l.answer == nil {
		l.answer = protocol.NewAnswer(protocol.MCP, l.Header().Get("Content-Type"), l.learn)
	}
	if l.Header().Get("Content-Encoding") == "" {
		_, _ = l.answer.Write(p) // never fails
	}
}

// cancelTime is how long an answer is waited for once the upstream was told that nobody waits: most servers give none.
const cancelTime = 5 * time.Second

// mostClients bounds the clients that can say that they do not wait any more.
const mostClients = 1 << 16

// clients are those that wait in this process for the answers of guarded calls.
type clients struct {
	mu       sync.Mutex
	named    map[requestName][]*client   // by what notifications/cancelled name
	sessions map[requestName][]*client   // those of named whose streams may be resumed
	of       map[execution.Key][]*client // by the execution whose answer they wait for
}

// requestName is how a client names its request. An id of JSON-RPC is unique within a session only;
// without one, clients are told apart by their address.
type requestName struct{ guard, caller, server, session, peer, id string }

// client is one that waits for the answer of a call.
type client struct {
	name      requestName
	id        []byte // in the name, as it was sent
	call      *Call
	gone      context.Context    // ends when it has left
	leave     context.CancelFunc // nil where only its connection says so
	listed    bool
	stop      func() bool // the watch over gone; nil without one
	sent      bool        // the upstream has its request
	cancelled bool        // the upstream was told that nobody waits
	said      bool        // it has said itself that it does not

	session   requestName // whose GET streams may bring its answer, without an id; empty: none
	resumable atomic.Bool // an event of its answer had an id, with which a GET may go on
}

func (h *Handler) requestName(r *http.Request, caller string, id []byte) requestName {
	n := requestName{guard: h.Name, caller: caller, server: h.server(r), session: r.Header.Get(protocol.HeaderSession), id: protocol.SameID(id)}
	if n.session == "" {
		n.peer = peerOf(r)
	}
	return n
}

// of names the client of a request, and returns a context that ends when it has left.
func (c *client) of(q *guardedRequest, caller string) context.Context {
	c.gone = q.r.Context()
	if m := q.message; m != nil && m.Protocol == protocol.MCP && m.ID != nil && len(m.ID) <= execution.MaxID {
		c.name, c.id, c.session = q.h.requestName(q.r, caller, m.ID), m.ID, q.h.sessionOf(q.executions, q.r)
		c.gone, c.leave = context.WithCancel(c.gone)
	}
	return c.gone
}

// add lists a client that waits for the answer of an execution, where its leave counts while its
// connection stays, or ends the request to the upstream.
func (l *clients) add(c *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.named, l.sessions, l.of = map[requestName][]*client{}, map[requestName][]*client{}, map[execution.Key][]*client{}
	}
	key := c.call.call.Key
	c.listed = true
	l.of[key] = append(l.of[key], c)
	if c.leave != nil && len(l.named) < mostClients {
		l.named[c.name] = append(l.named[c.name], c)
		if c.session.session != "" {
			l.sessions[c.session] = append(l.sessions[c.session], c)
		}
	}
	if c.call.action.OnLeave == OnLeaveCancel {
		c.stop = context.AfterFunc(c.gone, func() { l.left(key, nil) })
	}
}

// errLeft ends a request to the upstream for whose answer nobody waits.
var errLeft = errors.New("agent_guard: no client waits for the answer")

// left ends the request of an execution if nobody waits for its answer, and its action says so. It is
// called when a client has left, and when the request of sends is about to be sent.
func (l *clients) left(key execution.Key, sends *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sends != nil {
		sends.sent = true
	}
	var sent *client
	for _, c := range l.of[key] {
		if c.gone.Err() == nil {
			return
		}
		if c.sent && c.call.action.OnLeave == OnLeaveCancel {
			sent = c
		}
	}
	if sent != nil {
		sent.call.up.clock.cancel(errLeft)
	}
}

// remove ends the listing of c.
func (l *clients) remove(c *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.stop != nil {
		c.stop()
	}
	c.listed = false
	unlist(l.named, c.name, c)
	unlist(l.sessions, c.session, c)
	unlist(l.of, c.call.call.Key, c)
}

func unlist[K comparable](from map[K][]*client, at K, c *client) {
	if from[at] = slices.DeleteFunc(from[at], func(other *client) bool { return other == c }); len(from[at]) == 0 {
		delete(from, at)
	}
}

// cancel notes that the client of a request waits no more: for retries it has left (ADR 0070). c is
// nil where no such call runs here, or more than one. first has the request that the upstream is to
// be told of, once, when nobody waits for its answer; else it is nil.
func (l *clients) cancel(name requestName) (c, first *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.named[name]
	if len(all) == 0 || slices.ContainsFunc(all, func(c *client) bool { return c.call.call.Key != all[0].call.call.Key }) {
		return nil, nil
	}
	for _, c := range all {
		c.said = true
		c.leave()
		if a := c.call.call.Attempt; a != nil {
			a.Unanswered()
			a.WaitsElsewhere(c.gone) // which is over
		}
	}
	for _, other := range l.of[all[0].call.call.Key] {
		switch {
		case other.gone.Err() == nil:
			return all[0], nil
		case other.sent && !other.cancelled && other.name.session == name.session:
			first = other
		}
	}
	if first != nil {
		first.cancelled = true
		first.call.up.clock.leaves(cancelTime)
	}
	return all[0], first
}

// hasCancelled reports that the upstream was told that nobody waits for the answer of c.
func (l *clients) hasCancelled(c *client) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return c.cancelled
}

// canceller is the handler behind the guard for a body with notifications/cancelled. It hands on
// those that concern the upstream, with the ids that it knows.
type canceller struct {
	guardedRequest
	next Next
}

// ServeHTTP implements Next.
func (n canceller) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	h := n.h
	caller, err := h.Callers.Of(r, h.verifiedBefore(r).Issuer(), n.executions.Keyed)
	if err != nil {
		return n.next.ServeHTTP(w, r) // its calls are refused, so that none runs
	}
	var texts [][]byte
	changed := false
	for i := range n.cancels {
		m := &n.cancels[i]
		id, text := m.Cancels(), m.Body
		if id != nil {
			c, first := n.engine.clients.cancel(h.requestName(r, caller, id))
			switch {
			case c == nil: // no call of ours
			case first == nil:
				text, changed = nil, true
				c.call.action.Counts.Cancelled(false)
			default:
				text, changed = m.WithRequestID(first.id), changed || !bytes.Equal(first.id, id)
				c.call.action.Counts.Cancelled(true)
			}
			if c != nil {
				c.call.emit(eventCancelled, map[string]any{"passed_on": first != nil})
			}
		}
		if text != nil {
			texts = append(texts, text)
		}
	}
	switch {
	case len(texts) == 0:
		w.WriteHeader(http.StatusAccepted)
		return nil
	case changed:
		body := bytes.Join(texts, []byte{','})
		if n.cancels[0].Batch {
			body = slices.Concat([]byte{'['}, body, []byte{']'})
		}
		r = r.WithContext(r.Context())
		r.Header = r.Header.Clone()
		for _, name := range protocol.OfBody {
			r.Header.Del(name)
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	return n.next.ServeHTTP(w, r)
}

// messageKey is the id that a message names itself; m is nil for a call that is none.
func (h *Handler) messageKey(m *protocol.Message) (string, error) {
	if m == nil {
		return "", errNoID
	}
	key, err := h.rules.Key(m)
	if err != nil {
		return "", invalidID(err)
	}
	if key == "" {
		return "", errNoID
	}
	return key, nil
}

// understand judges a whole answer by what it says, where HTTP says no more than that it came.
func (u *roundTrip) understand(o execution.Outcome) execution.Outcome {
	if u.heard == nil {
		return o
	}
	return u.meant(o, u.heard.End())
}

// callMessage is a call as the message that is answered.
type callMessage struct{ *roundTrip }

func (m callMessage) Answer(media string) *protocol.Answer { return m.q.message.Answer(media) }

// Shows is the status that an answer stands for which says this. Where clients retry it, or nobody knows
// what came of the call, that is evidence from the end of the answer on, before it is recorded (ADR 0070).
func (m callMessage) Shows(status int, said protocol.Outcome) int {
	o := execution.Outcome{Verdict: execution.Completed, Status: status, Whole: true}
	if said.Meaning == protocol.Unanswered { // more comes
		return status
	}
	if m.headerCause != "" {
		o.Verdict = execution.InDoubt
	}
	if o = m.in.stillInDoubt(m.meant(o, said)); o.Internal || o.Verdict == execution.InDoubt {
		return http.StatusInternalServerError
	}
	return status
}

// meant is the outcome by what the answer says.
func (u *roundTrip) meant(o execution.Outcome, said protocol.Outcome) execution.Outcome {
	if !o.Whole || o.Verdict == execution.InDoubt || !u.q.h.understood(u.q.proves) {
		return o
	}
	said = protocol.Judge(u.q.message, o.Status, said)
	o.Internal = said.Meaning == protocol.Failed && said.Internal()
	switch said.Meaning {
	case protocol.Executed:
		if said.Code != 0 || said.ToolError || said.Task != "" && (said.State == "failed" || said.State == "rejected") {
			o.Cause = execution.CauseTool
		}
	case protocol.NotExecuted:
		if _, ruled := u.q.action.judge(o.Status, u.rec.Header(), nil); !ruled || o.Status == http.StatusOK {
			o.Verdict = execution.Released
		}
	case protocol.Failed:
		if o.Verdict == execution.Released {
			return o // its status says more, such as 401 or 429
		}
		o.Verdict, o.Cause = u.q.action.Preset.Judge(execution.Answer{Status: http.StatusInternalServerError}), execution.CauseInBand
	case protocol.Doubtful:
		if u.heldUp {
			return o // its header says more than the problem's status in it
		}
		o.Verdict, o.Cause = execution.InDoubt, execution.CauseInBand
	case protocol.Unanswered:
		stream := strings.HasPrefix(u.rec.Header().Get("Content-Type"), "text/event-stream")
		if o.Status == http.StatusOK && (u.q.message.ID != nil || u.q.message.REST && stream) { // it ended before its answer
			if !stream {
				u.q.h.proofs.withdraw()
			}
			o.Verdict, o.Cause = execution.InDoubt, execution.CauseNoResponse // it is whole
			if stream && said.Resumable {
				o.Cause = execution.CauseElsewhere
				if u.q.engine.clients.hasCancelled(u.client) {
					o.Cause = execution.CauseLeft
				}
			}
		}
	}
	return o
}

// isEvents reports that a media type is that of a stream of events.
func isEvents(text string) bool {
	media, _, _ := strings.Cut(text, ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// replyTo is what a repeated answer takes from the message that is answered; nil for plain requests and for batches.
func replyTo(m *protocol.Message, live bool) *protocol.Reply {
	if m == nil || m.REST || m.Batch {
		return nil
	}
	r := m.Reply()
	r.Live = live
	return &r
}

// documentWriter keeps the document of a problem.
type documentWriter struct {
	header http.Header
	body   []byte
}

func (d *documentWriter) Header() http.Header { return d.header }

func (d *documentWriter) WriteHeader(int) {}

func (d *documentWriter) Write(p []byte) (int, error) {
	d.body = append(d.body, p...)
	return len(p), nil
}
