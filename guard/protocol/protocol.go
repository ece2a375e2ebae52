// Package protocol reads the messages of agents: JSON-RPC 2.0, the Model Context Protocol (MCP,
// revisions 2025-03-26 to 2026-07-28) and Agent2Agent (A2A 0.3 and 1.0, as JSON-RPC and REST). It
// says what a message does, which key names its effect, and what an answer means, and it rewrites
// a recorded answer for another request.
//
// A message is taken for harmless only where every server reads it so. What is not clear, such as
// a member that comes twice or in another case, is left to the rules of HTTP.
package protocol

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Protocol names a protocol of agents.
type Protocol string

// The protocols. Auto finds out by header and body; None reads no message.
const (
	Auto    Protocol = "auto"
	MCP     Protocol = "mcp"
	A2A     Protocol = "a2a"
	JSONRPC Protocol = "jsonrpc"
	None    Protocol = "none"
)

// Header fields of the protocols, in their canonical form.
const (
	HeaderSession = "Mcp-Session-Id"
	HeaderVersion = "Mcp-Protocol-Version"
	HeaderA2A     = "A2a-Version"
)

// Rules say how messages are read. They must not be changed while they are in use.
type Rules struct {
	// Protocol is the protocol of the upstream. Empty is Auto.
	Protocol Protocol
	// MetaKeys are the members of `_meta` that name the effect, in order. Nil: idempotency-key,
	// idempotency_key, idempotencyKey and execution-id.
	MetaKeys []string
	// Arguments are the arguments of a tool that name the effect, in order.
	Arguments []string
	// Exempt and Consequential are tools that change nothing, and tools that do, whatever their
	// annotations say. Consequential goes first.
	Exempt, Consequential []string
}

var metaKeys = []string{"idempotency-key", "idempotency_key", "idempotencyKey", "execution-id"}

// Guesses reports whether the protocol is found out by header and body.
func (u *Rules) Guesses() bool { return u.Protocol == Auto || u.Protocol == "" }

// Reads reports whether the body of r decides what r does: it is a POST with JSON that is not
// compressed.
func (u *Rules) Reads(r *http.Request) bool {
	if u.Protocol == None || r.Method != http.MethodPost || len(r.Header["Content-Type"]) != 1 {
		return false
	}
	for _, coding := range r.Header["Content-Encoding"] {
		if !strings.EqualFold(strings.TrimSpace(coding), "identity") {
			return false
		}
	}
	if r.Header["Content-Type"][0] == "application/json" {
		return true
	}
	media, parameters, err := mime.ParseMediaType(r.Header["Content-Type"][0])
	if charset := parameters["charset"]; err != nil || charset != "" && !strings.EqualFold(charset, "utf-8") {
		return false
	}
	return body.IsJSON(media)
}

// Message is one message of a request.
type Message struct {
	// Protocol is MCP, A2A or JSONRPC. REST says that it is A2A without JSON-RPC around it.
	Protocol Protocol
	REST     bool
	// Version is the revision that the header names, or empty.
	Version string
	// Batch says that it stands in an array, beside other messages.
	Batch bool
	// Body is the text of the message as it was sent, and Whole that of the body in which it stands.
	Body, Whole []byte
	// ID is the id as it was sent. It is nil for notifications, answers and REST.
	ID []byte
	// Method is empty for answers. REST has the names of A2A 1.0.
	Method string
	// Tool is the name in tools/call; empty if it is missing or not clear.
	Tool string
	// Name is what actions are chosen by: the tool in tools/call, else the method.
	Name string
	// Content has the arguments of a tool, or the parameters of another message; of REST the body.
	// Nil: there are none, or the tool is not clear.
	Content []byte
	// Frees says that what is under way may wait for m: a notification, an answer, or what ends or goes
	// on with a task.
	Frees bool
	// Trace is the W3C trace context of `_meta`, or of the metadata of A2A; empty without one.
	Trace string

	params    jsonx.Object // of JSON-RPC; the body of REST
	meta      jsonx.Object
	arguments []byte
}

// Begins reports whether a body for path that begins with text can be a message, so that it has to be
// read whole. text may be all of it.
func (u *Rules) Begins(path string, text []byte) bool {
	if !u.Guesses() || methodREST(path) != "" {
		return true
	}
	next := func(i int) int { // the next byte that is no white space
		for i < len(text) && strings.IndexByte(" \t\r\n", text[i]) >= 0 {
			i++
		}
		return i
	}
	i := next(0)
	if i < len(text) && text[i] == '[' {
		i = next(i + 1)
	}
	if i < len(text) && text[i] != '{' {
		return false
	}
	for i = next(i + 1); i < len(text); i = next(i + 1) {
		if text[i] != '"' {
			return text[i] != '}' // an object without members is none; else it is no JSON
		}
		end := bytes.IndexByte(text[i+1:], '"')
		if end < 0 {
			return true
		}
		name := text[i+1 : i+1+end]
		if !slices.ContainsFunc(envelope, func(member string) bool { return member == string(name) }) {
			return bytes.IndexByte(name, '\\') >= 0
		}
		if i = next(i + end + 2); i >= len(text) || text[i] != ':' {
			return true
		}
		if i = next(jsonx.Skip(text, next(i+1))); i >= len(text) || text[i] != ',' {
			return true
		}
	}
	return true
}

// Parse reads the body of a request for path with this header: a message of the protocol, or those of a batch in
// their order. It reports whether the body is one. The result refers to body.
func (u *Rules) Parse(header http.Header, path string, body []byte) ([]Message, bool) {
	if u.Protocol == None || !json.Valid(body) || !utf8.Valid(body) { // readers differ in what they make of other bytes
		return nil, false
	}
	body = bytes.Trim(body, " \t\r\n")
	if body[0] == '[' {
		var all []Message
		for element := range jsonx.Elements(body) {
			m, ok := u.message(header, element)
			if !ok {
				return nil, false
			}
			m.Batch, m.Whole = true, body
			all = append(all, m)
		}
		return all, len(all) > 0
	}
	m, ok := u.message(header, body)
	if !ok {
		m, ok = u.rest(header, path, body)
	}
	m.Whole = body
	return []Message{m}, ok
}

// envelope are the members of a JSON-RPC message.
var envelope = []string{"jsonrpc", "id", "method", "params", "result", "error"}

func (u *Rules) message(header http.Header, text []byte) (Message, bool) {
	var room [8]jsonx.Member
	if text[0] != '{' {
		return Message{}, false
	}
	top, ok := jsonx.AppendMembers(room[:0], text), true
	if !top.Clear(envelope) || jsonx.Unquote(top.Get("jsonrpc")) != "2.0" {
		return Message{}, false
	}
	// In a body that nobody has announced a further member may mean something to its server.
	strict := u.Guesses()
	if strict && slices.ContainsFunc(top, func(m jsonx.Member) bool { return !slices.Contains(envelope, m.Name) }) {
		return Message{}, false
	}
	m := Message{Body: text, ID: top.Get("id"), Method: jsonx.Unquote(top.Get("method"))}
	answer := top.Get("result") != nil || top.Get("error") != nil
	if answer == (m.Method != "") || m.Method == "" && top.Get("method") != nil {
		return Message{}, false
	}
	switch {
	case answer, m.ID == nil:
		m.ID = nil
	case m.ID[0] != '"' && !jsonx.IsNumber(m.ID) && string(m.ID) != "null":
		return Message{}, false
	}
	if params := top.Get("params"); params != nil && params[0] == '{' {
		if m.params, ok = jsonx.ObjectOf(params); !ok {
			return Message{}, false
		}
	}
	m.Content = top.Get("params")
	m.Protocol = u.Protocol
	if strict {
		m.Protocol = recognise(header, &m)
	}
	m.read(header)
	m.Frees = m.ID == nil || slices.Contains(methodsOfTasks, m.Method)
	// Who answers must have been asked. A server may go by the header instead.
	named := header.Get("Mcp-Method")
	return m, (!answer || m.Protocol != JSONRPC) && (m.Protocol != MCP || named == "" || named == m.Method)
}

// recognise finds the protocol of a message.
func recognise(header http.Header, m *Message) Protocol {
	_, mcp := methodsMCP[m.Method]
	mcp = mcp && m.Method != "tasks/update" || slices.Contains(notificationsMCP, m.Method)
	_, a2a := methodsA2A[m.Method]
	isMCP := header.Get(HeaderSession) != "" || header.Get(HeaderVersion) != "" || header.Get("Mcp-Method") != ""
	isA2A := header.Get(HeaderA2A) != "" || header.Get("A2a-Extensions") != "" || header.Get("X-A2a-Extensions") != ""
	switch {
	case isA2A && !isMCP:
		return A2A
	case isMCP && !isA2A:
		return MCP
	case mcp != a2a && mcp:
		return MCP
	case mcp != a2a:
		return A2A
	}
	return JSONRPC
}

// read takes from the parameters what names the call.
func (m *Message) read(header http.Header) {
	m.meta, _ = jsonx.ObjectOf(m.params.Get("_meta"))
	m.Name, m.Trace = m.Method, jsonx.Unquote(m.meta.Get("traceparent"))
	if m.Protocol == A2A {
		m.Version = header.Get(HeaderA2A)
		if m.Trace == "" {
			metadata, _ := jsonx.ObjectOf(m.params.Get("metadata"))
			m.Trace = jsonx.Unquote(metadata.Get("traceparent"))
		}
		return
	}
	m.Version = header.Get(HeaderVersion)
	if m.Method == "tools/call" {
		m.Content, m.Name = nil, ""
	}
	if m.Method == "tools/call" && m.params.Clear([]string{"name", "arguments", "_meta"}) {
		m.Tool = jsonx.Unquote(m.params.Get("name"))
		if named := header.Get("Mcp-Name"); named != "" && named != m.Tool {
			m.Tool = ""
		}
		m.arguments = m.params.Get("arguments")
		m.Content, m.Name = m.arguments, m.Tool
	}
}

// rest reads a request of A2A's REST form by its path.
func (u *Rules) rest(header http.Header, path string, body []byte) (Message, bool) {
	if u.Protocol != A2A && u.Protocol != Auto && u.Protocol != "" {
		return Message{}, false
	}
	method := methodREST(path)
	if method == "" {
		return Message{}, false
	}
	top, ok := jsonx.ObjectOf(body)
	if !ok {
		return Message{}, false
	}
	m := Message{
		Protocol: A2A, REST: true, Method: method, Name: method, Version: header.Get(HeaderA2A),
		Body: body, Content: body, params: top, Frees: slices.Contains(methodsOfTasks, method),
	}
	if u.Protocol == A2A {
		return m, true
	}
	message, _ := jsonx.ObjectOf(top.Get("message"))
	// What a caller says of himself makes nothing harmless that another server may execute.
	return m, strings.HasPrefix(m.Method, "Send") && message.Get("messageId") != nil && message.Get("role") != nil
}

// methodREST is the method of A2A that a path of its REST form stands for, or empty.
func methodREST(path string) string {
	for _, of := range pathsOfREST {
		if strings.HasSuffix(path, of.suffix) {
			return of.method
		}
	}
	return ""
}

var pathsOfREST = []struct{ suffix, method string }{
	{"/message:send", "SendMessage"}, {"/message:stream", "SendStreamingMessage"}, {":cancel", "CancelTask"},
	{":subscribe", "SubscribeToTask"}, {"/pushNotificationConfigs", "CreateTaskPushNotificationConfig"},
}

// notificationsMCP are those of clients, which tell MCP without its header fields.
var notificationsMCP = []string{
	"notifications/initialized", "notifications/cancelled", "notifications/progress", "notifications/roots/list_changed",
}

// The methods of clients, and whether they change something. Others do. To cancel a task, or to
// delete something, twice is the same as once in both protocols.
var (
	methodsMCP = map[string]bool{
		"initialize": false, "ping": false, "server/discover": false, "tools/list": false, "tools/call": true,
		"resources/list": false, "resources/templates/list": false, "resources/read": false,
		"resources/subscribe": false, "resources/unsubscribe": false, "prompts/list": false, "prompts/get": false,
		"completion/complete": false, "logging/setLevel": false, "subscriptions/listen": false,
		"tasks/get": false, "tasks/result": false, "tasks/list": false, "tasks/cancel": false, "tasks/update": false,
	}
	methodsA2A = map[string]bool{
		"message/send": true, "message/stream": true, "SendMessage": true, "SendStreamingMessage": true,
		"tasks/get": false, "tasks/list": false, "tasks/cancel": false, "tasks/resubscribe": false,
		"GetTask": false, "ListTasks": false, "CancelTask": false, "SubscribeToTask": false,
		"tasks/pushNotificationConfig/set": true, "tasks/pushNotificationConfig/get": false,
		"tasks/pushNotificationConfig/list": false, "tasks/pushNotificationConfig/delete": false,
		"CreateTaskPushNotificationConfig": true, "SetTaskPushNotificationConfig": true,
		"GetTaskPushNotificationConfig": false, "ListTaskPushNotificationConfigs": false,
		"ListTaskPushNotificationConfig": false, "DeleteTaskPushNotificationConfig": false,
		"agent/getAuthenticatedExtendedCard": false, "GetExtendedAgentCard": false, "agent/getCard": false,
	}
)

// methodsOfTasks are those that a task may wait for, and with it the stream or the call that shows it.
var methodsOfTasks = []string{"tasks/cancel", "tasks/update", "CancelTask"}

// Changes reports whether m may change something. readOnly says that the server has announced the
// tool as read-only.
func (u *Rules) Changes(m *Message, readOnly bool) bool {
	methods := methodsMCP
	switch m.Protocol {
	case JSONRPC:
		return true
	case A2A:
		methods = methodsA2A
	}
	changes, known := methods[m.Method]
	switch {
	case m.Method == "", m.Protocol == MCP && m.ID == nil && strings.HasPrefix(m.Method, "notifications/"):
		return false
	case !known:
		return true
	case m.Method != "tools/call" || m.Tool == "":
		return changes
	case slices.Contains(u.Consequential, m.Tool):
		return true
	}
	return !slices.Contains(u.Exempt, m.Tool) && !readOnly
}

// Errors of a key. They do not contain it.
var (
	// errKeyType: the key is neither a string nor a number.
	errKeyType = errors.New("the key in the message is neither a string nor a number")
	// errKeyTwice: its name occurs more than once, so that the server may read another one.
	errKeyTwice = errors.New("the key in the message occurs more than once")
)

// Key returns the key that the message itself names: that of `_meta`, that of an argument, or the
// messageId of A2A with the id of its task. Empty: there is none. It is never the id of JSON-RPC,
// which is unique within a session only. A text of more than 200 bytes, or with other characters
// than visible ASCII, is replaced by its hash. Steps of one call have different keys.
func (u *Rules) Key(m *Message) (string, error) {
	type place struct {
		names []string
		of    jsonx.Object
	}
	places := []place{{u.metaNames(), m.meta}}
	if len(u.Arguments) > 0 {
		arguments, _ := jsonx.ObjectOf(m.arguments)
		places = append(places, place{u.Arguments, arguments})
	}
	for _, place := range places {
		for _, name := range place.names {
			value := place.of.Get(name)
			switch {
			case value == nil:
				continue
			case !place.of.Clear([]string{name}):
				return "", errKeyTwice
			case string(value) == "null":
				continue
			case value[0] == '"':
				value = []byte(jsonx.Unquote(value))
			case !jsonx.IsNumber(value):
				return "", errKeyType
			}
			if len(value) > 0 {
				return m.StepOf(tidy(string(value))), nil
			}
		}
	}
	if m.Protocol != A2A || !strings.HasPrefix(strings.ToLower(m.Method), "send") && !strings.HasPrefix(m.Method, "message/") {
		return "", nil
	}
	message, _ := jsonx.ObjectOf(m.params.Get("message"))
	if !message.Clear([]string{"messageId", "taskId"}) {
		return "", errKeyTwice
	}
	id, task := jsonx.Unquote(message.Get("messageId")), jsonx.Unquote(message.Get("taskId"))
	if id == "" {
		return "", nil
	}
	key := messageIDs.Replace(id)
	if task != "" {
		key += "@" + task
	}
	return tidy(key), nil
}

func (u *Rules) metaNames() []string {
	if u.MetaKeys == nil {
		return metaKeys
	}
	return u.MetaKeys
}

// messageIDs keeps an id apart from the id of a task behind it.
var messageIDs = strings.NewReplacer("%", "%25", "@", "%40")

// tidy makes an id of at most 200 visible characters of any text.
func tidy(text string) string {
	const most = 200
	if len(text) <= most && !strings.ContainsFunc(text, func(c rune) bool { return c < 0x21 || c > 0x7e }) {
		return text
	}
	sum := sha256.Sum256([]byte(text))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// StepOf is the key of the step that the message is of the call with this key: of the first one the key itself.
func (m *Message) StepOf(key string) string {
	step := m.step()
	if step == "" {
		return key
	}
	return tidy(key) + step
}

// step names the step that the message is of its call, by what the client answers to an
// `input_required`. It is empty for the first.
func (m *Message) step() string {
	responses, state := m.params.Get("inputResponses"), m.params.Get("requestState")
	if responses == nil && state == nil {
		return ""
	}
	text := slices.Concat([]byte{'['}, orNull(responses), []byte{','}, orNull(state), []byte{']'})
	sum, _, err := (*body.Comparison)(nil).Read(body.Request{
		ContentType: "application/json", Body: strings.NewReader(string(text)), Size: int64(len(text)),
	})
	if err != nil {
		panic("protocol: " + err.Error()) // it is in memory
	}
	return "~" + hex.EncodeToString(sum[:16])
}

func orNull(value []byte) []byte {
	if value == nil {
		return []byte("null")
	}
	return value
}

// Exclude returns what two attempts of the same call may differ in: the id, the members of `_meta` (of generic
// JSON-RPC those that the guard reads), the trace context and the messageId of A2A. An argument counts, also one that
// is the key: with a key from elsewhere it is content. All of a batch counts: its recorded answer keeps its ids.
func (u *Rules) Exclude(m *Message) []jsonx.Pointer {
	if m.Batch {
		return nil
	}
	switch m.Protocol {
	case MCP:
		return slices.Clip(placesMCP)
	case A2A:
		places, metadata, inMessage := slices.Clip(placesA2A), jsonx.Pointer{"params", "metadata"}, jsonx.Pointer{"params", "message", "metadata"}
		if m.REST {
			places, metadata, inMessage = slices.Clip(placesREST), metadata[1:], inMessage[1:]
		}
		message, _ := jsonx.ObjectOf(m.params.Get("message"))
		if only(m.params.Get("metadata"), traceNames) {
			places = append(places, metadata)
		}
		if only(message.Get("metadata"), traceNames) {
			places = append(places, inMessage)
		}
		return places
	}
	// Its `_meta` may mean anything to its server, but for what the guard itself reads there.
	names := slices.Concat(metaJSONRPC, u.metaNames())
	places := append(below(names, "params", "_meta"), jsonx.Pointer{"id"})
	if only(m.params.Get("_meta"), names) {
		places = append(places, jsonx.Pointer{"params", "_meta"})
	}
	return places
}

var (
	placesMCP = []jsonx.Pointer{{"id"}, {"params", "_meta"}}
	placesA2A = slices.Concat(below(traceNames, "params", "metadata"), below(traceNames, "params", "message", "metadata"),
		[]jsonx.Pointer{{"id"}, {"params", "_meta"}, {"params", "message", "messageId"}})
	placesREST = slices.Concat(below(traceNames, "metadata"), below(traceNames, "message", "metadata"),
		[]jsonx.Pointer{{"message", "messageId"}})

	traceNames  = []string{"traceparent", "tracestate", "baggage"}
	metaJSONRPC = append([]string{"progressToken", "execution-context"}, traceNames...)
)

// only reports whether a text is an object without other members than these: one that an attempt adds, or leaves
// out, as a whole.
func only(text []byte, names []string) bool {
	o, ok := jsonx.ObjectOf(text)
	return ok && !slices.ContainsFunc(o, func(m jsonx.Member) bool { return !slices.Contains(names, m.Name) })
}

// below are the places of members of the object at a place.
func below(names []string, place ...string) (places []jsonx.Pointer) {
	for _, name := range names {
		places = append(places, append(slices.Clip(place), name))
	}
	return places
}

// Tokens returns the tokens in the member execution-context of `_meta`, a string or a list of
// strings. It is nil if there are none; ok is false if the member is something else.
func (m *Message) Tokens() (tokens []string, ok bool) {
	value := m.meta.Get("execution-context")
	switch {
	case value == nil:
		return nil, true
	case !m.meta.Clear([]string{"execution-context"}):
		return nil, false
	case value[0] == '"':
		return []string{jsonx.Unquote(value)}, true
	case value[0] != '[':
		return nil, false
	}
	for element := range jsonx.Elements(value) {
		if element[0] != '"' {
			return nil, false
		}
		tokens = append(tokens, jsonx.Unquote(element))
	}
	return tokens, true
}

// WithTokens returns the body of m with these tokens in the place of those in its `_meta`.
func (m *Message) WithTokens(tokens []string) []byte {
	old := m.meta.Get("execution-context")
	if old == nil {
		return m.Whole
	}
	text, err := json.Marshal(append([]string{}, tokens...)) // never null
	if err != nil {
		panic("protocol: " + err.Error()) // its parts are text
	}
	from := cap(m.Whole) - cap(old) // both reach to the end of the same array
	return slices.Concat(m.Whole[:from], text, m.Whole[from+len(old):])
}

// Input is what a token in `_meta` hashes of its message: method and params without `_meta`, as an
// object in the canonical form of RFC 8785. A token cannot hash what it stands in, and ids and
// progress tokens are made when a message is sent. ok is false where two texts that servers may
// read differently have one form: a name twice, a number that no double has, half a surrogate pair.
func (m *Message) Input() (text []byte, ok bool) {
	params := slices.DeleteFunc(slices.Clone(m.params), func(p jsonx.Member) bool { return p.Name == "_meta" })
	method, err := json.Marshal(m.Method)
	if err != nil {
		return nil, false
	}
	text, _ = jsonx.Object{{Name: "method", Value: method}}.AppendCanonical(nil)
	text, ok = params.AppendCanonical(append(text[:len(text)-1], `,"params":`...))
	return append(text, '}'), ok
}

// Cancels returns the id of the request that a notifications/cancelled names, as it was sent; nil
// for other messages.
func (m *Message) Cancels() []byte {
	if m.Protocol != MCP || m.Method != "notifications/cancelled" || !m.params.Clear([]string{"requestId"}) {
		return nil
	}
	return m.params.Get("requestId")
}

// WithRequestID returns the text of a notifications/cancelled for another request.
func (m *Message) WithRequestID(id []byte) []byte {
	if m.Cancels() == nil {
		return m.Body
	}
	old := m.Cancels()
	from := cap(m.Body) - cap(old) // both reach to the end of the same array
	return slices.Concat(m.Body[:from], id, m.Body[from+len(old):])
}

// Reply is what an answer that was recorded for another request takes from the one that asks.
func (m *Message) Reply() Reply {
	return Reply{ID: m.ID, Progress: m.meta.Get("progressToken")}
}
