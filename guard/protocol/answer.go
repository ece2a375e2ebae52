package protocol

import (
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Meaning says what an answer tells of its call.
type Meaning uint8

const (
	// Unanswered: there was no final answer, or none that could be read.
	Unanswered Meaning = iota
	// Executed: there is a result, also one that says that the tool has failed.
	Executed
	// NotExecuted: an error before anything was executed.
	NotExecuted
	// Failed: an error that says no more than an HTTP status of 500.
	Failed
	// Doubtful: another guard has the call in doubt, or has a record in its way.
	Doubtful
)

// Outcome is what an answer says.
type Outcome struct {
	Meaning Meaning
	// Code is the code of a JSON-RPC error, or 0.
	Code int
	// Step says that the server asks for input first: the client sends the call again with it.
	Step bool
	// Task is the id of the task that goes on, or empty.
	Task string
	// Resumable says that the stream ends between two events, and that the last id of an event is not
	// empty: it may go on with a GET.
	Resumable bool
	// ToolError says that the tool has run and says itself that it has failed.
	ToolError bool
	// State is the state of the task, or the member `status` of a result that has one, in lower case
	// with hyphens; empty without.
	State string
	// Status is the HTTP status of another guard's problem, or 0.
	Status int
	// Version is the revision that a server of MCP has chosen for a session; empty for other answers.
	Version string
}

// Internal reports that the answer is the internal error of JSON-RPC (-32603), which clients try again as
// they do a status of 500. Codes beside it may be the fault of who asks.
func (o *Outcome) Internal() bool { return o.Code == -32603 }

// Reply is what a repeated answer takes from the request that asks for it.
type Reply struct {
	// ID is the id of the request as it was sent; nil keeps the id.
	ID []byte
	// Progress is the progress token as it was sent; with nil no progress is repeated.
	Progress []byte
	// Live says that the call still runs: what its server asks the client for is repeated too.
	Live bool
}

// problemCode is the code of all JSON-RPC errors that the guard itself answers with.
const problemCode = -32090

// maxScalar is the longest value of an answer that is read, and maxHeld the longest beginning of a
// message that is held until it is clear what it is, in bytes.
const (
	maxScalar = 1 << 10
	maxHeld   = 64 << 10
)

// Answer follows an answer's body while it is written. It keeps a bounded part of it.
type Answer struct {
	// Part gets the text of each message of a stream of events, as it comes. Message is called at the
	// end of each, with the id of the request that it answers as it stands there, nil where it is not
	// certainly a response; progress says that it is news of a running request, said is the outcome with it.
	// Both or neither must be set, before the first Write.
	Part    func(text []byte)
	Message func(id []byte, progress bool, said Outcome)

	// Each text is a result of A2A without JSON-RPC around it, or the body of another status, which says nothing here.
	rest     bool
	protocol Protocol
	learn    func(tool string, readOnly bool)
	lines    lines // of a stream of events
	mark     int   // bytes of a mark before JSON that have come
	stream   bool
	scan     scanner
	value    []byte // the value being read, from path at
	at       string
	reads    bool
	m        answered
	out      Outcome
	begun    bool       // what came shows that something was executed
	asked    *Message   // nil: any response is taken for the answer
	wrapped  bool       // with rest: the beginning of a message was put before the text
	rewrite  *rewriting // nil: the answer is read only
}

// answered is what is known of one message of an answer.
type answered struct {
	response, request bool // it has a result or an error; a method
	failed            bool // an error
	result, erred     bool // it has these members, and error is not null
	object            bool // the result is one
	toolErrors        int  // members isError that are not false
	id, state         string
	name              []byte // the id as it stands there; only where somebody asks for it
	version           string
	method            string
	code              string
	status, problem   string // error.data.status and .type of another guard
	final             bool   // A2A: nothing follows
	step              bool
	task              string
	tool              string // the tool being listed
	readOnly          bool
}

// NewAnswer follows an answer with this Content-Type to a message of this protocol. learn is called
// for each tool of a list, with its annotation; it may be nil.
func NewAnswer(p Protocol, contentType string, learn func(tool string, readOnly bool)) *Answer {
	return &Answer{protocol: p, learn: learn, stream: isStream(contentType)}
}

// Answer follows the answer to m with this Content-Type: of a batch that to m alone.
func (m *Message) Answer(contentType string) *Answer {
	a := &Answer{protocol: m.Protocol, stream: isStream(contentType), rest: m.REST}
	if m.Batch {
		a.asked = m
	}
	return a
}

func isStream(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// Write reads the next part of the body. It never fails.
func (a *Answer) Write(p []byte) (int, error) {
	n := len(p)
	if a.stream {
		a.lines.split(a, p)
		return n, nil
	}
	for ; a.mark < len(byteOrderMark) && len(p) > 0; p = p[1:] {
		if p[0] != byteOrderMark[a.mark] {
			a.feed([]byte(byteOrderMark[:a.mark])) // it is none
			a.mark = len(byteOrderMark)
			break
		}
		if a.mark++; a.mark == len(byteOrderMark) {
			a.emit([]byte(byteOrderMark))
		}
	}
	a.feed(p)
	return n, nil
}

// byteOrderMark may stand before JSON, and is no part of it (RFC 8259, section 8.1).
const byteOrderMark = "\ufeff"

// End returns the outcome of the whole body. An event without its empty line does not count, as
// its clients do not see it either.
func (a *Answer) End() Outcome {
	if !a.stream {
		a.finish()
	}
	o := a.out
	o.Resumable = o.Resumable && !a.lines.within
	return o
}

// feed scans JSON and passes it on.
func (a *Answer) feed(p []byte) {
	if a.rest && !a.wrapped && len(p) > 0 {
		a.wrapped = true
		a.feed([]byte(`{"result":`))
	}
	batch := a.asked != nil && a.asked.Batch
	for len(p) > 0 {
		if batch && len(a.scan.open) == 0 && a.scan.in == 0 { // between the messages of an array
			if p = bytes.TrimLeft(p, " \t\r\n[],"); len(p) == 0 {
				return
			}
		}
		n, ev := a.scan.next(p)
		if a.reads && len(a.value) <= maxScalar {
			a.value = append(a.value, p[:n]...)
		}
		a.emit(p[:n])
		if a.Part != nil {
			a.Part(p[:n])
		}
		p = p[n:]
		switch {
		case ev == begins:
			a.begins(p[0])
		case ev == ended && a.reads:
			a.ended()
		case ev == closed:
			a.closed()
			if batch && len(a.scan.open) == 0 {
				a.finish()
			}
		}
	}
}

func (a *Answer) emit(p []byte) {
	if a.rewrite != nil {
		a.rewrite.write(p)
	}
}

// begins notes what the message is by the members that it has.
func (a *Answer) begins(first byte) {
	a.at = a.scan.path()
	switch a.at {
	case "result":
		a.m.response, a.m.result, a.m.object = true, true, first == '{'
	case "error":
		a.m.response, a.m.failed, a.m.erred = true, first == '{', a.m.erred || first != 'n'
	case "result.message":
		a.m.final = true
	}
	if a.at == pathIsError {
		a.m.toolErrors++
	}
	if a.rewrite != nil {
		a.rewrite.known(&a.m)
	}
	if a.at != "" && first != '{' && first != '[' {
		a.reads, a.value = true, a.value[:0]
		if a.rewrite != nil {
			a.rewrite.begins(a.at)
		}
	}
}

// ended reads a value.
func (a *Answer) ended() {
	a.reads = false
	text := ""
	if len(a.value) <= maxScalar {
		text = string(a.value)
		if text[0] == '"' {
			text = jsonx.Unquote(a.value)
		}
	}
	if a.at == pathIsError && (text == "false" || text == "null") {
		a.m.toolErrors--
	}
	switch a.at {
	case "id", "params.progressToken":
		if a.at == "id" {
			if a.m.id = text; a.Message != nil && len(a.value) <= maxScalar {
				a.m.name = bytes.Clone(a.value)
			}
		}
		if a.rewrite != nil {
			a.rewrite.ends(a.at, a.value, &a.m)
		}
	case "method":
		a.m.request, a.m.method = true, text
	case "error.code":
		a.m.code = text
	case "error.data.status":
		a.m.status = text
	case "error.data.type":
		a.m.problem = text
	case "result.resultType":
		a.m.step = text == "input_required"
	case "result.kind":
		a.m.final = a.m.final || text == "message"
	case "result.final", "result.statusUpdate.final":
		a.m.final = a.m.final || text == "true"
	case "result.status.state", "result.task.status.state", "result.statusUpdate.status.state":
		a.m.state = stateOf(text)
		a.m.final = a.m.final || slices.Contains(settled, a.m.state)
	case "result.protocolVersion":
		a.m.version = text
	case "result.status", "result.task.status", "result.structuredContent.status":
		a.m.state = stateOf(text)
	case "result.task.taskId", "result.taskId", "result.id", "result.task.id", "result.statusUpdate.taskId":
		if a.m.task == "" && (a.protocol == A2A || a.at != "result.id") {
			a.m.task = text
		}
	case "result.tools..name":
		a.m.tool = text
	case "result.tools..annotations.readOnlyHint":
		a.m.readOnly = text == "true"
	}
}

// closed learns a tool at the end of its description.
func (a *Answer) closed() {
	if a.learn == nil || len(a.scan.open) != 3 || a.scan.path() != pathTool {
		return
	}
	if a.m.tool != "" {
		a.learn(a.m.tool, a.m.readOnly)
	}
	a.m.tool, a.m.readOnly = "", false
}

// stateOf is a state as the revisions of the protocols write it, in one form.
func stateOf(text string) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(text, "TASK_STATE_")), "_", "-")
}

// settled are the states in which a task of A2A is at an end, or waits for its client.
var settled = []string{"completed", "failed", "canceled", "cancelled", "rejected", "input-required", "auth-required"}

// finish takes a whole message into account.
func (a *Answer) finish() {
	if a.rewrite != nil {
		a.rewrite.finish(&a.m)
	}
	m := a.m
	a.m, a.reads, a.wrapped = answered{}, false, false
	ignored := a.asked != nil && !a.answers(&m)
	if !m.response || m.request || m.result == m.erred || m.erred && !m.failed || !a.whole() {
		m.name = nil
	}
	a.scan = scanner{open: a.scan.open[:0]}
	a.take(&m, ignored)
	if a.Message != nil {
		a.Message(m.name, m.method == "notifications/progress", a.out)
	}
}

// take has the outcome follow from a message.
func (a *Answer) take(m *answered, ignored bool) {
	if !m.response || m.request {
		a.begun = a.begun || m.method == "notifications/progress"
		return
	}
	if ignored || a.out.Meaning == Executed || a.out.Meaning == Doubtful {
		return // what comes later does not undo it
	}
	if m.task != "" && a.protocol != JSONRPC {
		a.out.Task = m.task
	}
	a.out.State, a.out.ToolError, a.out.Version = m.state, m.toolErrors > 0, m.version
	switch {
	case m.failed:
		a.out.Code, _ = strconv.Atoi(m.code)
		if a.out.Code == problemCode {
			a.out.Status, _ = strconv.Atoi(m.status)
		}
		a.out.Meaning = meaningOf(a.protocol, a.out.Code, m)
		a.out.Step = a.protocol == MCP && a.out.Code == codeNeedsURL
		if a.begun && a.out.Meaning == NotExecuted && !a.out.Step {
			a.out.Meaning = Failed
		}
	case a.protocol == A2A && a.stream && !m.final:
		a.begun = true
	default:
		a.out.Meaning, a.out.Step = Executed, m.step
	}
}

// codeNeedsURL is MCP's error of a call that needs its user at a page first.
const codeNeedsURL = -32042

// meaningOf says what a JSON-RPC error means for its call. -32602 proves nothing: SDKs also give it
// for results that do not fit the tool's output schema, once the tool has run.
func meaningOf(p Protocol, code int, m *answered) Meaning {
	switch {
	case code == problemCode && strings.Contains(m.problem, "/.well-known/cascade/problems/"):
		if m.status == strconv.Itoa(http.StatusConflict) {
			return Doubtful
		}
		return NotExecuted
	case code == -32700, code == -32600, code == -32601:
		return NotExecuted
	case p == MCP && (-32022 <= code && code <= -32020 || code == codeNeedsURL):
		return NotExecuted
	case p == A2A && -32009 <= code && code <= -32001 && code != -32006:
		return NotExecuted
	case code == -32603, -32099 <= code && code <= -32000:
		return Failed
	}
	return Executed // an error of the method itself
}

// Judge completes the outcome of an answer by its HTTP status. Unanswered leaves the verdict to the
// rules of HTTP where the status is not 200.
func Judge(m *Message, status int, o Outcome) Outcome {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusUnsupportedMediaType:
		// The transport refuses: a tool's own errors have the status 200. With 404 a session has
		// ended, and the client sends the call again in a new one.
		if m.Protocol == MCP && (o.Meaning == Unanswered || o.Meaning == Failed) {
			o.Meaning = NotExecuted
		}
	}
	return o
}

// Outcome judges the whole answer to m by its status and what it says. Unlike Answer it takes nothing
// for a result that is not certainly one: a whole JSON text, with the id of m, and without an error
// beside it.
func (m *Message) Outcome(status int, contentType string, body []byte) Outcome {
	a := NewAnswer(m.Protocol, contentType, nil)
	a.asked = m
	body = bytes.TrimPrefix(body, []byte(byteOrderMark))
	if m.REST { // as JSON-RPC says the same; events of REST are not read
		a.stream, body = false, slices.Concat([]byte(`{"result":`), body, []byte{'}'})
	}
	if !a.stream && !json.Valid(body) {
		body = nil
	}
	_, _ = a.Write(body) // never fails
	return Judge(m, status, a.End())
}

// Final returns the text that answers m in the whole body of a stream of events, or of the answer to a batch: of a
// message that is not certainly one, of what is neither, and of an answer in several steps nil.
func (m *Message) Final(contentType string, body []byte) []byte {
	stream := isStream(contentType)
	if !stream && !m.Batch || m.REST || m.Outcome(http.StatusOK, contentType, body).Meaning != Executed {
		return nil
	}
	body = bytes.TrimPrefix(body, []byte(byteOrderMark))
	if !stream {
		return m.among(body)
	}
	body = bytes.ReplaceAll(bytes.ReplaceAll(body, []byte("\r\n"), []byte{'\n'}), []byte{'\r'}, []byte{'\n'})
	for event := range bytes.SplitSeq(body, []byte("\n\n")) {
		var data []byte
		for line := range bytes.SplitSeq(event, []byte{'\n'}) {
			if rest, is := bytes.CutPrefix(line, []byte("data:")); is {
				data = append(append(data, rest...), '\n')
			}
		}
		if text := m.among(data); text != nil {
			return text
		}
	}
	return nil
}

// among returns the answer to m that a text is, or that is an element of it; nil without one.
func (m *Message) among(text []byte) []byte {
	if text = bytes.TrimSpace(text); m.Batch && json.Valid(text) && text[0] == '[' {
		for element := range jsonx.Elements(text) {
			if answer := m.among(element); answer != nil && element[0] == '{' {
				return answer
			}
		}
		return nil
	}
	if len(text) == 0 || m.Outcome(http.StatusOK, "", text).Meaning != Executed {
		return nil
	}
	return text
}

// Proves reports whether the whole answer to m, with the status 200, shows that its server speaks MCP:
// it is a full result of `initialize`, or a list of tools. sent is what else the client has sent. What
// a server could have made of the client's own words is no proof (ADR 0072).
func (m *Message) Proves(contentType string, answer []byte, sent ...string) bool {
	own := map[string]string{"initialize": "serverInfo", "tools/list": "inputSchema"}[m.Method] // a server's own
	if m.Protocol != MCP || own == "" || m.ID == nil {
		return false
	}
	for _, text := range append(sent, string(m.Body)) {
		if strings.Contains(text, own) || strings.Contains(text, `\`) {
			return false
		}
	}
	media, _, _ := mime.ParseMediaType(contentType)
	o := m.Outcome(http.StatusOK, contentType, answer)
	if isStream(contentType) {
		answer = m.Final(contentType, answer)
	} else if !body.IsJSON(media) {
		return false
	}
	answer = bytes.TrimPrefix(answer, []byte(byteOrderMark))
	if o.Meaning != Executed || o.Code != 0 || !json.Valid(answer) {
		return false
	}
	top, ok := jsonx.ObjectOf(bytes.TrimSpace(answer))
	if !ok || !top.Clear(envelope) || jsonx.Unquote(top.Get("jsonrpc")) != "2.0" || !bytes.Equal(top.Get("id"), m.ID) {
		return false
	}
	result, _ := jsonx.ObjectOf(top.Get("result"))
	if m.Method == "initialize" {
		_, able := jsonx.ObjectOf(result.Get("capabilities"))
		info, _ := jsonx.ObjectOf(result.Get(own))
		return able && jsonx.Unquote(result.Get("protocolVersion")) != "" && jsonx.Unquote(info.Get("name")) != ""
	}
	if tools := result.Get("tools"); tools != nil && tools[0] == '[' {
		found := false
		for element := range jsonx.Elements(tools) {
			tool, _ := jsonx.ObjectOf(element)
			if _, ok := jsonx.ObjectOf(tool.Get(own)); !ok || jsonx.Unquote(tool.Get("name")) == "" {
				return false
			}
			found = true
		}
		return found
	}
	return false
}

// answers reports whether a message that has ended is certainly the answer to the one that was asked.
func (a *Answer) answers(m *answered) bool {
	id := string(a.asked.ID)
	if id != "" && id[0] == '"' {
		id = jsonx.Unquote(a.asked.ID)
	}
	switch {
	case !a.whole():
		return false
	case m.failed:
		return !m.result && m.code != "" && (m.id == id || !a.asked.Batch && (m.id == "null" || m.id == ""))
	}
	return m.result && !m.erred && (m.object || a.protocol == JSONRPC) && m.id == id
}

// whole reports that a message ends where its text ends.
func (a *Answer) whole() bool { return !a.scan.broken && len(a.scan.open) == 0 && a.scan.in == 0 }

// SameID is an id of JSON-RPC, as it was sent, in a form that two texts of one id share.
func SameID(id []byte) string {
	if len(id) > 0 && id[0] == '"' {
		return `"` + jsonx.Unquote(id)
	}
	return string(id)
}

// lines splits a stream of events (HTML, "Server-sent events") that comes in pieces.
type lines struct {
	head   []byte // the beginning of a line
	in     byte   // 'd' in a line of data, 'i' of an id, 'o' in another; 0 at its beginning
	space  bool   // one space before the data does not belong to it
	cr     byte   // the line before had this kind and ended with a CR
	later  bool   // the first line is over, which may begin with a mark of its byte order
	within bool   // an event has begun
	id     byte   // of that event: 0 it has none, 1 it is empty, 2 it is not
}

// maxField is longer than each name that counts, with its colon and a byte order mark.
const maxField = 8

func (l *lines) split(a *Answer, p []byte) {
	for len(p) > 0 {
		before := l.cr
		if l.cr = 0; before != 0 && p[0] == '\n' {
			if before != 'i' {
				a.emit(p[:1])
			}
			if before == 'e' && a.rewrite != nil { // it belongs to the event that has ended
				a.rewrite.finish(&answered{})
			}
			p = p[1:]
			continue
		}
		switch l.in {
		case 0:
			l.begin(a, p[0])
			p = p[1:]
		case 'd':
			if l.space && p[0] == ' ' {
				a.emit(p[:1])
				l.space, p = false, p[1:]
				continue
			}
			l.space = false
			fallthrough
		default:
			n := bytes.IndexAny(p, "\r\n")
			if n < 0 {
				n = len(p)
			}
			switch {
			case l.in == 'd':
				a.feed(p[:n])
			case l.in != 'i':
				a.emit(p[:n])
			case len(bytes.TrimLeft(p[:n], " ")) > 0:
				l.id = 2
			}
			if p = p[n:]; len(p) > 0 {
				l.end(a, p[0])
				p = p[1:]
			}
		}
	}
}

// begin takes a byte of the beginning of a line.
func (l *lines) begin(a *Answer, c byte) {
	over := c == '\r' || c == '\n'
	if over && len(l.head) == 0 {
		l.in = 'e' // the end of an event
		l.end(a, c)
		return
	}
	if !over {
		l.within = l.within || c != ':' || len(l.head) > 0 // a comment belongs to no event
		l.head = append(l.head, c)
		if c != ':' && len(l.head) < maxField {
			return
		}
	}
	name := string(l.head)
	if !l.later {
		name = strings.TrimPrefix(name, byteOrderMark)
	}
	switch l.later = true; strings.TrimSuffix(name, ":") {
	case "data":
		l.in, l.space = 'd', !over
	case "id":
		l.in, l.id = 'i', 1
	default:
		l.in = 'o'
	}
	if l.in != 'i' {
		a.emit(l.head)
	}
	l.head = l.head[:0]
	if over {
		l.end(a, c)
	}
}

// end ends a line with c.
func (l *lines) end(a *Answer, c byte) {
	if l.in == 'd' { // a line's end is white space for JSON
		if a.Part != nil {
			a.Part([]byte{' '})
		}
		if _, ev := a.scan.next([]byte{'\n'}); ev == ended && a.reads {
			a.ended()
			_, _ = a.scan.next([]byte{'\n'})
		}
	}
	if l.in != 'i' {
		a.emit([]byte{c})
	}
	if c == '\r' {
		l.cr = l.in
	}
	if l.in == 'e' {
		if l.id != 0 {
			a.out.Resumable = l.id == 2
		}
		l.within, l.id = false, 0
		a.finish()
	}
	l.in = 0
}

// Reader returns from, the body of a recorded answer, as the answer to the request of r. What is
// neither JSON nor a stream of events stays as it is. It changes
// ids and progress tokens only, and leaves out ids of events; a stream also loses what the server
// asked the first client for. It holds no more than 64 KiB at a time beyond what it has read.
func (r Reply) Reader(from io.Reader, contentType string) io.Reader {
	stream := isStream(contentType)
	if media, _, _ := mime.ParseMediaType(contentType); !stream && !body.IsJSON(media) && contentType != "" {
		return from
	}
	rewrite := rewriting{reply: r, stream: stream, from: -1, token: -1, id: -1}
	return &replyReader{from: from, a: &Answer{protocol: MCP, stream: stream, rewrite: &rewrite}}
}

type replyReader struct {
	from io.Reader
	a    *Answer
	err  error
	buf  []byte
}

// Read implements io.Reader.
func (r *replyReader) Read(p []byte) (int, error) {
	w := r.a.rewrite
	for w.safe == 0 && r.err == nil {
		if r.buf == nil {
			r.buf = make([]byte, 16<<10)
		}
		var n int
		n, r.err = r.from.Read(r.buf)
		_, _ = r.a.Write(r.buf[:n]) // never fails
		if r.err != nil {
			w.write(r.a.lines.head)
			if r.a.mark < len(byteOrderMark) {
				w.write([]byte(byteOrderMark[:r.a.mark]))
			}
			w.safe = len(w.out)
		}
	}
	if w.safe == 0 {
		return 0, r.err
	}
	n := copy(p, w.out[:w.safe])
	w.out = append(w.out[:0], w.out[n:]...)
	w.safe -= n
	w.begun -= n
	for _, at := range []*int{&w.from, &w.token, &w.id} {
		*at = max(*at-n, -1)
	}
	return n, nil
}

// rewriting makes the text of another answer. What it writes into out can be taken up to safe.
type rewriting struct {
	reply  Reply
	stream bool
	out    []byte
	safe   int
	begun  int  // where the message begins that is held
	passes bool // the message is clear, and not held any more
	drops  bool // it is left out
	asks   bool // it is a request of the server, which only the first client could answer

	from, token, id   int // where in out a value, a progress token and an id begin; -1: nowhere
	tokenSize, idSize int
}

func (w *rewriting) write(p []byte) {
	if w.drops {
		return
	}
	w.out = append(w.out, p...)
	switch {
	case w.passes && w.from < 0:
		w.safe = len(w.out)
	case len(w.out)-max(w.begun, w.from) <= maxHeld:
	case w.passes: // no id is so long
		w.from = -1
		w.safe = len(w.out)
	case w.stream && (w.token >= 0 || w.asks):
		w.drops, w.out, w.from = true, w.out[:w.begun], -1
	default:
		w.pass()
	}
}

// pass lets through what is held of a message, and the rest of it.
func (w *rewriting) pass() {
	w.passes = true
	if w.from < 0 {
		w.safe = len(w.out)
	}
}

// begins notes where a value begins that may have to be replaced.
func (w *rewriting) begins(at string) {
	if !w.drops && (at == "id" || at == "params.progressToken") {
		w.from = len(w.out)
	}
}

// ends replaces the value that has ended, or notes where it stands until it is clear whether to.
func (w *rewriting) ends(at string, value []byte, m *answered) {
	from := w.from
	if w.from = -1; from < 0 || len(w.out)-from != len(value) {
		return
	}
	switch {
	case at == "params.progressToken":
		w.token, w.tokenSize = from, len(value)
	case string(value) != "null": // with which the server does not know whom it answers
		w.id, w.idSize = from, len(value)
	}
	w.known(m)
	if w.passes {
		w.safe = len(w.out)
	}
}

// known decides about a message as soon as it is clear what it is.
func (w *rewriting) known(m *answered) {
	switch {
	case w.drops:
	case m.response && !m.request:
		if w.id >= 0 && w.reply.ID != nil {
			w.splice(w.id, w.idSize, w.reply.ID)
		}
		w.id = -1
		w.pass()
	case m.request && strings.HasPrefix(m.method, "notifications/") && m.method != "notifications/progress":
		w.pass()
	default:
		w.asks = m.request && m.method != "notifications/progress" && !w.reply.Live
	}
}

func (w *rewriting) splice(at, size int, value []byte) {
	w.out = slices.Replace(w.out, at, at+size, value...)
}

// finish ends a message. What it was is clear now.
func (w *rewriting) finish(m *answered) {
	switch {
	case w.drops || w.passes:
	case w.stream && primes(w.out[w.begun:]): // for a stream that its client can resume
		w.out = w.out[:w.begun]
	case m.method == "notifications/progress" && w.token >= 0 && w.reply.Progress != nil:
		w.splice(w.token, w.tokenSize, w.reply.Progress)
	case m.method == "notifications/progress" && w.stream, w.asks && w.id >= 0 && w.stream:
		w.out = w.out[:w.begun]
	}
	w.safe, w.begun = len(w.out), len(w.out)
	w.passes, w.drops, w.asks, w.from, w.token, w.id = false, false, false, -1, -1, -1
}

// primes reports that an event has data, and that it is empty.
func primes(event []byte) (empty bool) {
	for line := range bytes.FieldsFuncSeq(event, func(c rune) bool { return c == '\r' || c == '\n' }) {
		name, value, _ := bytes.Cut(line, []byte{':'})
		switch {
		case string(name) != "data":
		case len(bytes.TrimSpace(value)) > 0:
			return false
		default:
			empty = true
		}
	}
	return empty
}

// Unrepeatable are header fields that a recorded answer loses as the answer to another request: they
// belong to one session, or to its exact bytes.
var Unrepeatable = append([]string{HeaderSession, "Last-Event-Id", "Etag"}, OfBody...)

// OfBody are header fields that do not fit a body that was changed.
var OfBody = []string{"Content-Length", "Content-Digest", "Repr-Digest", "Digest", "Content-Md5"}
