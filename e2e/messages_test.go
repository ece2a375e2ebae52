package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// toolServer answers messages as MCP servers do. It counts the calls of each tool.
type toolServer struct {
	mu    sync.Mutex
	calls map[string]int
	seen  int   // requests
	hold  *gate // for calls of tools; may be nil

	refunds   []string // as they came, each with its session
	refunded  string   // what they are answered after the id; empty is a result
	cancelled []string // the ids of requests
}

func (s *toolServer) count(tool string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[tool]
}

func (s *toolServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // what is cut fits no case
	s.mu.Lock()
	hold := s.hold
	s.mu.Unlock()
	if hold != nil && strings.Contains(string(body), `"tools/call"`) {
		hold.pass()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen++
	id := "null"
	if _, rest, ok := strings.Cut(string(body), `"id":`); ok {
		id = rest[:strings.IndexAny(rest, ",}")]
	}
	called := func(tool string) bool { return strings.Contains(string(body), `"name":"`+tool+`"`) }
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Mcp-Session-Id", "session of "+id)
	switch {
	case strings.Contains(string(body), `"tools/list"`):
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":`+id+`,"result":{"tools":[{"name":"get","annotations":{"readOnlyHint":true}},{"name":"pay"}]}}`)
	case called("pay"), called("get"):
		for _, tool := range []string{"pay", "get"} {
			if called(tool) {
				s.calls[tool]++
				_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"content":[],"n":%d}}`, id, s.calls[tool])
			}
		}
	case called("refund"):
		s.refunds = append(s.refunds, r.Header.Get("Mcp-Session-Id")+" "+string(body))
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, id, cmp.Or(s.refunded, `"result":{"content":[]}`))
	case called("fail"):
		s.calls["fail"]++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"content":[],"isError":true,"n":%d}}`, id, s.calls["fail"])
	case called("unknown"), called("invalid"):
		tool, code := "unknown", -32601
		if called("invalid") {
			tool, code = "invalid", -32602
		}
		s.calls[tool]++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":"Unknown tool"}}`, id, code)
	case called("busy"):
		s.calls["busy"]++
		w.WriteHeader(http.StatusTooManyRequests)
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32000,"message":"Later"}}`, id)
	case called("broken"), strings.Contains(string(body), `"prompts/list"`):
		s.calls["broken"]++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"Internal"}}`, id)
	case called("breaking"):
		s.calls["breaking"]++
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"error\":{\"code\":-32603,\"message\":\"Internal\"}}\n\n", id)
	case called("stream"), called("cut"):
		w.Header().Set("Content-Type", "text/event-stream")
		if called("stream") { // without an id nobody can resume it
			_, _ = io.WriteString(w, "id: 1\n")
		}
		_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":\"first\",\"progress\":1}}\n\n")
		if called("cut") {
			s.calls["cut"]++
			return
		}
		s.calls["stream"]++
		_, _ = fmt.Fprintf(w, "id: 2\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"n\":%d}}\n\n", id, s.calls["stream"])
	case strings.Contains(string(body), "notifications/cancelled"):
		_, rest, _ := strings.Cut(string(body), `"requestId":`)
		s.cancelled = append(s.cancelled, rest[:strings.IndexAny(rest, ",}")])
		w.WriteHeader(http.StatusAccepted)
	case strings.Contains(string(body), "notifications/"):
		w.WriteHeader(http.StatusAccepted)
	default:
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":`+id+`,"result":{}}`)
	}
}

func newToolServer(t *testing.T) (*toolServer, string) {
	s := &toolServer{calls: map[string]int{}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, strings.TrimPrefix(server.URL, "http://")
}

// message is a POST of a message in a session of its own.
func message(body string, header ...string) request {
	h := map[string]string{
		"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Session-Id": "a", "Mcp-Protocol-Version": "2025-11-25",
	}
	for i := 0; i < len(header); i += 2 {
		h[header[i]] = header[i+1]
	}
	return request{path: "/mcp", body: body, header: h}
}

func toolCall(id, tool, more string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"` + tool + `","arguments":{}` + more + `}}`
}

const keyA = `,"_meta":{"execution-id":"a","progressToken":"first"}`

// What changes nothing passes as through a bare proxy; tools count by what is known of them.
func TestMessagesThatPass(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n missing_id require\n exempt tool stream\n}", addr)
	for _, body := range []string{
		`{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}`, `{"jsonrpc":"2.0","id":1,"method":"ping"}`,
		`{"jsonrpc":"2.0","method":"notifications/initialized"}`, `{"jsonrpc":"2.0","id":7,"result":{}}`,
		`[{"jsonrpc":"2.0","id":1,"method":"ping"}]`, toolCall("1", "stream", ""),
	} {
		got := g.call(message(body))
		if got.status != 200 && got.status != 202 || got.header.Get("Execution-Status") != "" || got.header.Get("Execution-Id") != "" {
			t.Errorf("%s: %d %v", body, got.status, got.header)
		}
	}
	if got := g.call(request{method: "DELETE", path: "/mcp", header: map[string]string{"Mcp-Session-Id": "a"}}); got.status != 200 || got.header.Get("Execution-Status") != "" {
		t.Errorf("the end of the session: %d %v", got.status, got.header)
	}
	// Nobody knows yet that `get` is read-only, and a call needs a key here.
	refused := g.call(message(toolCall("5", "get", "")))
	if refused.status != 200 || !strings.HasPrefix(refused.body, `{"jsonrpc":"2.0","id":5,"error":{"code":-32090,`) || s.count("get") != 0 {
		t.Errorf("a call without a key: %d %s", refused.status, refused.body)
	}
	g.call(message(`{"jsonrpc":"2.0","id":2,"method":"tools/list"}`))
	if got := g.call(message(toolCall("6", "get", ""))); s.count("get") != 1 || got.header.Get("Execution-Status") != "" {
		t.Errorf("a read-only tool: %s", got.body)
	}
	if got := g.call(message(toolCall("7", "pay", ""))); !strings.Contains(got.body, "execution-id-missing") || s.count("pay") != 0 {
		t.Errorf("a tool that is not read-only: %s", got.body)
	}
	before := s.seen
	if got := g.call(message(`{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call"}`)); got.status != 400 || s.seen != before {
		t.Errorf("a message that servers read in two ways: %d %s", got.status, got.body)
	}
}

// A retry under another id of JSON-RPC is answered under its own, and runs nothing. The id of
// JSON-RPC is no key, and a session is a caller.
func TestMessagesAreAnsweredOnce(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n execution_id argument request_key\n execution_id meta execution-id\n}", addr)
	g.call(message(toolCall("1", "pay", keyA))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":1}}`, "executed")
	got := g.call(message(toolCall(`"x2"`, "pay", `,"_meta":{"execution-id":"a","progressToken":9}`)))
	got.want(t, 200, `{"jsonrpc":"2.0","id":"x2","result":{"content":[],"n":1}}`, "replayed")
	if session := got.header.Get("Mcp-Session-Id"); session != "" {
		t.Errorf("the replay names the session %q", session)
	}
	g.call(message(toolCall("1", "pay", ""))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":2}}`, "executed")
	g.call(message(toolCall("1", "pay", ""))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":3}}`, "executed")
	g.call(message(toolCall("1", "pay", keyA), "Mcp-Session-Id", "b")).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":4}}`, "executed")
	g.call(message(toolCall("1", "pay", keyA), "Idempotency-Key", "first")).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":5}}`, "executed")
	mismatch := g.call(message(toolCall("3", "fail", keyA)))
	if mismatch.status != 200 || !strings.Contains(mismatch.body, `"id":3,"error":{"code":-32090,`) || !strings.Contains(mismatch.body, "fingerprint-mismatch") {
		t.Errorf("another tool under the same key: %d %s", mismatch.status, mismatch.body)
	}
	argument := func(id, key string) string {
		return strings.Replace(toolCall(id, "pay", ""), `"arguments":{}`, `"arguments":{"request_key":"`+key+`"}`, 1)
	}
	g.call(message(argument("1", "k1"))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":6}}`, "executed")
	g.call(message(argument("2", "k1"))).want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"content":[],"n":6}}`, "replayed")
	if s.count("fail") != 0 {
		t.Error("the mismatch has run")
	}
}

// What the answer says decides, not its status.
func TestMessagesMeanings(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n}", addr)
	g.call(message(toolCall("1", "fail", keyA))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true,"n":1}}`, "executed")
	g.call(message(toolCall("2", "fail", keyA))).want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"content":[],"isError":true,"n":1}}`, "replayed")
	key := func(id string) string { return strings.Replace(keyA, `"a"`, `"`+id+`"`, 1) }
	for _, id := range []string{"1", "2"} {
		g.call(message(toolCall(id, "unknown", key("u")))).want(t, 200, `{"jsonrpc":"2.0","id":`+id+`,"error":{"code":-32601,"message":"Unknown tool"}}`, "executed")
	}
	if n := s.count("unknown"); n != 2 {
		t.Errorf("a call that was never executed has been sent %d times", n)
	}
	// Also a tool that has run gives -32602, where its result does not fit its schema.
	for _, id := range []string{"1", "2"} {
		if got := g.call(message(toolCall(id, "invalid", key("i")))); !strings.Contains(got.body, `"id":`+id+`,"error":{"code":-32602,`) || s.count("invalid") != 1 {
			t.Errorf("after -32602: %s, sent %d times", got.body, s.count("invalid"))
		}
	}
	// ADR 0070: -32603 is a 500, so without a key the next equal call is its retry; others may be meant.
	for _, tool := range []string{"broken", "breaking", "invalid"} {
		g.call(message(toolCall("1", tool, "")))
		again := g.call(message(toolCall("2", tool, "")))
		if recognized := again.header.Get("Execution-Recognized") != ""; recognized != (tool != "invalid") || !strings.Contains(again.body, `"id":2,`) {
			t.Errorf("after the error of %s: recognised %t, %s", tool, recognized, again.body)
		}
	}
	if s.count("broken") != 1 || s.count("breaking") != 1 || s.count("invalid") != 3 {
		t.Errorf("sent %d, %d and %d times", s.count("broken"), s.count("breaking"), s.count("invalid"))
	}
	// A status that refuses stays one, whatever the error beside it.
	for n := range 2 {
		if got := g.call(message(toolCall("1", "busy", key("b")))); got.status != 429 || s.count("busy") != n+1 {
			t.Errorf("a call that the server has no time for: %d, sent %d times", got.status, s.count("busy"))
		}
	}
	const event = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":%s,\"progress\":1}}\n\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"n\":1}}\n\n"
	if got := g.call(message(toolCall("1", "stream", key("s")))); !strings.Contains(got.body, "id: 2\n") {
		t.Errorf("the first stream: %q", got.body)
	}
	g.call(message(toolCall("2", "stream", strings.Replace(key("s"), `"first"`, "5", 1)))).want(t, 200, fmt.Sprintf(event, "5", "2"), "replayed")
	g.call(message(toolCall("1", "cut", key("c"))))
	doubt := g.call(message(toolCall("2", "cut", key("c"))))
	if doubt.status != 200 || !strings.Contains(doubt.body, `"id":2,"error":{"code":-32090,`) || doubt.header.Get("Execution-Status") != "in_doubt" || s.count("cut") != 1 {
		t.Errorf("after a stream without its answer: %d %s %v", doubt.status, doubt.body, doubt.header)
	}
}

// An action is chosen by the tool and its arguments, of a generic message by its method, also in a batch.
func TestMessagesChooseTheirAction(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, `agent_proxy %s {
		protocol mcp
		action euros {
			match path /mcp
			match tool fail pay
			match argument /money/currency EUR
			match argument /n 1
			outcome in_doubt 200
		}
		missing_id mint
	}`, addr)
	money := func(tool, arguments string) string {
		return strings.Replace(toolCall("1", tool, ""), `"arguments":{}`, `"arguments":`+arguments, 1)
	}
	euro := money("pay", `{"money":{"currency":"EUR"},"n":1}`)
	const ping = `{"jsonrpc":"2.0","id":8,"method":"ping"}`
	for _, c := range []struct{ body, status string }{
		{euro, "in_doubt"},
		{money("fail", `{"n":1,"money":{"currency":"\u0045UR"}}`), "in_doubt"},
		{money("pay", `{"money":{"currency":"USD"},"n":1}`), "executed"},
		{money("pay", `{"money":{"currency":"EUR"},"n":1.0}`), "executed"},
		{money("pay", `{"money":{"currency":"EUR"}}`), "executed"},
		{money("pay", `{"money":{"currency":"EUR","currency":"EUR"},"n":1}`), "executed"},
		{money("get", `{"money":{"currency":"EUR"},"n":1}`), "executed"},
	} {
		if got := g.call(message(c.body)); got.header.Get("Execution-Status") != c.status {
			t.Errorf("%s: %d %v, want %s", c.body, got.status, got.header, c.status)
		}
	}
	other := message(euro)
	other.path = "/elsewhere"
	if got := g.call(other); got.header.Get("Execution-Status") != "executed" {
		t.Errorf("on another path: %v", got.header)
	}
	named := func(key, body string) request { return message(body, "Idempotency-Key", key) }
	if got := g.call(named("one", "["+ping+","+euro+"]")); got.header.Get("Execution-Status") != "in_doubt" {
		t.Errorf("a batch: %v", got.header)
	}
	before := s.seen
	mixed := g.call(named("two", "["+ping+","+euro+","+toolCall("2", "pay", "")+"]"))
	if mixed.status != 400 || !strings.Contains(mixed.body, "batch-mixed") || s.seen != before {
		t.Errorf("a batch of two calls: %d %s", mixed.status, mixed.body)
	}
	var policy struct {
		Actions []struct {
			Name      string
			Tools     []string
			Arguments map[string]string
		}
	}
	if err := json.Unmarshal([]byte(g.call(request{method: "GET", path: "/.well-known/cascade/policy"}).body), &policy); err != nil ||
		fmt.Sprint(policy.Actions) != "[{euros [fail pay] map[/money/currency:EUR /n:1]} {default [] map[]}]" {
		t.Errorf("the policy: %v %v", policy, err)
	}
}

// Of messages that call no tool the method and the parameters count.
func TestMessagesChooseTheirActionByMethod(t *testing.T) {
	_, addr := newToolServer(t)
	g := start(t, `agent_proxy %s {
		protocol jsonrpc
		action first {
			match tool transfer
			match argument /0 a
			outcome in_doubt 200
		}
	}`, addr)
	for body, status := range map[string]string{
		`{"jsonrpc":"2.0","id":1,"method":"transfer","params":["a"]}`: "in_doubt",
		`{"jsonrpc":"2.0","id":1,"method":"transfer","params":["b"]}`: "executed",
		`{"jsonrpc":"2.0","id":1,"method":"other","params":["a"]}`:    "executed",
	} {
		if got := g.call(message(body)); got.header.Get("Execution-Status") != status {
			t.Errorf("%s: %d %v, want %s", body, got.status, got.header, status)
		}
	}
}

// A model reads results, and not the errors of the transport: what is in doubt can be said to it. A
// call whose retry runs again, and any other problem, stays an error.
func TestMessagesTellModelsOfDoubts(t *testing.T) {
	upstream := newUpstream(t)
	upstream.on("/mcp", reset)
	g := start(t, `agent_proxy %s {
		protocol mcp
		breaker off
		in_doubt_as tool_result
		action again {
			match tool again
			on_unknown retry
		}
		action error {
			match tool error
			in_doubt_as problem
		}
	}`, upstream.addr)
	for attempt, id := range []string{"1", `"two"`} {
		got := g.call(message(toolCall(id, "pay", keyA), "Mcp-Protocol-Version", "2026-07-28"))
		var answer struct {
			ID     json.RawMessage
			Error  json.RawMessage
			Result struct {
				IsError    bool
				ResultType string
				Content    []struct{ Type, Text string }
				Meta       map[string]struct {
					Type, State string
					ID          string `json:"execution_id"`
				} `json:"_meta"`
			}
		}
		if err := json.Unmarshal([]byte(got.body), &answer); err != nil {
			t.Fatal(err, got.body)
		}
		r, problem := answer.Result, answer.Result.Meta["agent-guard/problem"]
		if got.status != 200 || string(answer.ID) != id || answer.Error != nil || !r.IsError || r.ResultType != "complete" || len(r.Content) != 1 {
			t.Fatalf("attempt %d: %d %s", attempt+1, got.status, got.body)
		}
		for _, part := range []string{"Cause: connection_lost.", "Do not simply repeat it", "The execution is a."} {
			if text := r.Content[0]; text.Type != "text" || !strings.Contains(text.Text, part) {
				t.Errorf("attempt %d: %q is not in %q", attempt+1, part, text.Text)
			}
		}
		if !strings.HasSuffix(problem.Type, "/in-doubt") || problem.ID != "a" || problem.State != "in_doubt" ||
			got.header.Get("Execution-Status") != "in_doubt" || got.header.Get("X-Should-Retry") != "false" {
			t.Errorf("attempt %d: %+v, %v", attempt+1, problem, got.header)
		}
	}
	upstream.arrived("/mcp", 1)
	for _, body := range []string{
		toolCall("3", "again", `,"_meta":{"execution-id":"b"}`), toolCall("3", "error", `,"_meta":{"execution-id":"c"}`),
		toolCall("3", "other", keyA), // another call under the first one's id
		`{"jsonrpc":"2.0","id":3,"method":"tools/unknown","params":{"name":"x"}}`,
	} {
		if got := g.call(message(body)); got.status != 200 || !strings.HasPrefix(got.body, `{"jsonrpc":"2.0","id":3,"error":{"code":-32090,`) {
			t.Errorf("%s: %d %s", body, got.status, got.body)
		}
	}
}

// A token in `_meta` is as good as one in the header: for one call and its retries, with the call that
// it hashes, and where one is required.
func TestMessagesCarryTokens(t *testing.T) {
	s, addr := newToolServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + addr + " {\n protocol mcp\n require_ect\n}"})
	meta := func(tokens string) string { return `,"_meta":{"progressToken":1,"execution-context":` + tokens + `}` }
	quoted := func(token *ect.Token) string { return strconv.Quote(token.Raw()) }
	one := a.issue(ect.Claims{})
	g.call(message(toolCall("1", "pay", meta(quoted(one))))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":1}}`, "executed")
	g.call(message(toolCall("2", "pay", meta("["+quoted(one)+"]")), "Mcp-Session-Id", "b")).want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"content":[],"n":1}}`, "replayed")
	g.call(with(one, message(toolCall("3", "pay", meta(quoted(one)))))).want(t, 200, `{"jsonrpc":"2.0","id":3,"result":{"content":[],"n":1}}`, "replayed")

	input := func(tool string) *ect.Token {
		return a.issue(ect.Claims{Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"` + tool + `"}}`))})
	}
	hashed := input("pay")
	g.call(message(toolCall("1", "pay", meta(quoted(hashed))))).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":2}}`, "executed")
	inHeader := message(toolCall("1", "pay", ""))
	whole := a.issue(ect.Claims{Input: ect.Sum([]byte(inHeader.body))})
	g.call(with(whole, inHeader)).want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":3}}`, "executed")

	for name, c := range map[string]struct {
		request request
		reason  string
	}{
		"none":                    {message(toolCall("1", "pay", "")), "missing"},
		"another call's":          {message(toolCall("1", "pay", meta(quoted(input("fail"))))), "inp_hash"},
		"the message's in header": {with(input("pay"), message(toolCall("1", "pay", ""))), "inp_hash"},
		"no token":                {message(toolCall("1", "pay", meta("7"))), "malformed"},
		"a stranger's":            {message(toolCall("1", "pay", meta(quoted(newAgent(t, "x").issue(ect.Claims{}))))), ""},
	} {
		got := g.call(c.request)
		if got.status != 200 || !strings.Contains(got.body, `"code":-32090`) || !strings.Contains(got.body, "/ect-invalid") || !strings.Contains(got.body, `"reason":"`+c.reason) {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
	if got := g.call(message(toolCall("1", "fail", meta(quoted(one))))); !strings.Contains(got.body, `"code":-32090`) {
		t.Errorf("a token that was used for another call: %s", got.body)
	}
	if s.count("pay") != 3 || s.count("fail") != 0 {
		t.Errorf("%d and %d calls", s.count("pay"), s.count("fail"))
	}
	const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"%s}`
	if got := g.call(message(fmt.Sprintf(ping, ""))); got.status != 200 || got.header.Get("Execution-Status") != "refused" ||
		!strings.HasPrefix(got.body, `{"jsonrpc":"2.0","id":1,"error":{"code":-32090,`) || !strings.Contains(got.body, `"reason":"missing"`) {
		t.Errorf("a ping without a token: %d %s", got.status, got.body)
	}
	g.call(message(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)).refusedFor(t, 403, "missing")
	params := func(token *ect.Token) string {
		return `,"params":{"_meta":{"execution-context":` + quoted(token) + `}}`
	}
	if got := g.call(message(fmt.Sprintf(ping, params(a.issue(ect.Claims{}))))); got.status != 200 {
		t.Errorf("a ping with a token: %d %s", got.status, got.body)
	}
	g.call(message(fmt.Sprintf("["+ping+","+ping+"]", params(a.issue(ect.Claims{})), ""))).refusedFor(t, 403, "missing")
}

// Cascade 3.2.1: a failure that a message reports is one, though its status is 200.
func TestMessagesFailuresAreErrors(t *testing.T) {
	_, addr := newToolServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + addr + " {\n protocol mcp\n}"})
	for tool, want := range map[string][2]string{
		"broken": {"error", "in_band_error"}, "breaking": {"error", "in_band_error"}, "fail": {"warning", "tool_error"},
		"invalid": {"warning", "tool_error"}, "pay": {},
	} {
		nodes := 4
		if tool == "pay" {
			nodes = 3
		}
		s := g.saga(a)
		step := s.try(message(toolCall("1", tool, "")))
		failures := s.events(nodes, ect.EventError)
		if len(failures) != nodes-3 {
			t.Errorf("%s has %d errors", tool, len(failures))
		}
		for _, u := range failures {
			says(t, u, map[ect.Member]string{
				ect.MemberSeverity: strconv.Quote(want[0]), ect.MemberErrorType: `"action_failed"`,
				ect.MemberCheckpointID: strconv.Quote(step.checkpoint), ect.MemberDescription: strconv.Quote("default: " + want[1]),
			})
		}
	}
}

// A doubt whose answer had named a task is settled by it; without a task nothing is asked.
func TestMessagesInDoubtAreAskedForByTheirTask(t *testing.T) {
	u := newUpstream(t)
	var mu sync.Mutex
	sends, asked, task := 0, []string(nil), `{"id":"t1","kind":"task","status":{"state":"working"}}`
	u.on("/a2a", func(w http.ResponseWriter, in *arrival) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(in.body, "tasks/get") {
			asked = append(asked, in.Header.Get("Authorization")+" "+in.body)
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":"task",`+task+`}`)
			return
		}
		sends++
		w.Header().Set("Content-Type", "text/event-stream")
		if !strings.Contains(in.body, "nothing") {
			_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":"+`{"id":"t1","kind":"task","status":{"state":"working"}}`+"}\n\n")
		}
		_ = http.NewResponseController(w).Flush() // an error shows as a call without a task
		panic(http.ErrAbortHandler)
	})
	g := start(t, "agent_proxy %s {\n protocol a2a\n on_unknown probe task {\n header Authorization {http.request.header.Authorization}\n }\n}", u.addr)
	send := func(id, message string) request {
		return request{path: "/a2a", body: `{"jsonrpc":"2.0","id":` + id + `,"method":"message/stream","params":{"message":{"messageId":"` + message + `","parts":[]}}}`,
			header: map[string]string{"Content-Type": "application/json", "Authorization": "Bearer one"}}
	}
	answer := func(to string) { mu.Lock(); defer mu.Unlock(); task = to }
	state := func() (int, int) { mu.Lock(); defer mu.Unlock(); return sends, len(asked) }

	g.call(send("1", "m"))
	answer(`"error":{"code":-32001,"message":"Task not found"}`) // which may have been forgotten
	if got := g.call(send("2", "m")); !strings.Contains(got.body, "/in-doubt") {
		t.Errorf("while the task is not known: %s", got.body)
	}
	answer(`"result":{"id":"t1","kind":"task","status":{"state":"completed"}}`)
	want := "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"id\":\"t1\",\"kind\":\"task\",\"status\":{\"state\":\"completed\"}}}\n\n"
	for _, id := range []string{"3", "4"} {
		got := g.call(send(id, "m"))
		if got.want(t, 200, fmt.Sprintf(want, id), "replayed"); got.header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("%v", got.header)
		}
	}
	if sent, questions := state(); sent != 1 || questions != 2 || asked[1] != `Bearer one {"id":"task","jsonrpc":"2.0","method":"tasks/get","params":{"id":"t1"}}` {
		t.Errorf("%d sends, asked %q", sent, asked)
	}
	g.call(send("1", "nothing"))
	if got := g.call(send("2", "nothing")); !strings.Contains(got.body, "/in-doubt") {
		t.Errorf("without a task: %s", got.body)
	}
	if sent, questions := state(); sent != 2 || questions != 2 {
		t.Errorf("%d sends, %d questions", sent, questions)
	}
}

// Digests are of the body that one client got, wherever they stand.
func TestMessagesAreRepeatedWithoutDigests(t *testing.T) {
	u := newUpstream(t)
	u.on("/mcp", func(w http.ResponseWriter, _ *arrival) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Trailer", "Content-Digest, X-Sum")
		w.Header().Set("Repr-Digest", "sha-256=:a:")
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{}}`)
		for _, name := range []string{"Content-Digest", "X-Sum", http.TrailerPrefix + "Repr-Digest", http.TrailerPrefix + "Digest"} {
			w.Header().Set(name, "sha-256=:b:")
		}
	})
	g := start(t, "agent_proxy %s {\n protocol mcp\n}", u.addr)
	first := g.call(message(toolCall("1", "pay", keyA)))
	if first.trailer.Get("Content-Digest") == "" || first.trailer.Get("Repr-Digest") == "" || first.header.Get("Repr-Digest") == "" {
		t.Fatalf("the first answer: %v, %v", first.header, first.trailer)
	}
	again := g.call(message(toolCall("2", "pay", keyA)))
	again.want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{}}`, "replayed")
	if again.trailer.Get("X-Sum") == "" {
		t.Errorf("the trailer is lost: %v", again.trailer)
	}
	for _, name := range []string{"Content-Digest", "Repr-Digest", "Digest"} {
		if again.trailer.Get(name)+again.header.Get(name) != "" {
			t.Errorf("%s is repeated: %v, %v", name, again.header, again.trailer)
		}
	}
}

// A trace context in `_meta` names the workflow, after those of the header.
func TestMessagesNameTheirWorkflow(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n}", u.addr)
	const trace, other = "0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c"
	of := func(id string) string { return "00-" + id + "-b7ad6b7169203331-01" }
	call := toolCall("1", "pay", `,"_meta":{"traceparent":"`+of(trace)+`"}`)
	for _, c := range []struct {
		header []string
		want   string
	}{{nil, trace}, {[]string{"Traceparent", of(other)}, other}, {[]string{"Workflow-Id", "w"}, "w"}} {
		g.call(message(call, c.header...))
		if got := u.last("/mcp").Header.Get("Workflow-Id"); got != c.want {
			t.Errorf("%v: the workflow %q, want %q", c.header, got, c.want)
		}
	}
}

// An internal error is a failure of the upstream, in JSON and in a stream, of a tool and of a list. What
// a tool or a caller does wrong is none.
func TestMessagesFeedTheBreaker(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n breaker {\n consecutive 3\n cooldown 10h\n}\n}", addr)
	for _, tool := range []string{"fail", "unknown", "invalid", "fail", "pay"} {
		g.call(message(toolCall("1", tool, "")))
	}
	if now := circuit(t, addr); now.Failures != 0 || now.State != breaker.Closed {
		t.Fatalf("after errors of callers and tools: %+v", now)
	}
	g.call(message(toolCall("1", "broken", "")))
	g.call(message(toolCall("1", "breaking", "")))
	if now := circuit(t, addr); now.Failures != 2 || now.State != breaker.Closed {
		t.Fatalf("after two internal errors: %+v", now)
	}
	g.call(message(`{"jsonrpc":"2.0","id":1,"method":"prompts/list"}`))
	if now := circuit(t, addr); now.State != breaker.Open || now.Cause != "JSON-RPC error -32603" {
		t.Fatalf("after the third: %+v", now)
	}
	if got := g.call(message(toolCall("9", "pay", ""))); !strings.HasPrefix(got.body, `{"jsonrpc":"2.0","id":9,"error":{"code":-32090,`) ||
		!strings.Contains(got.body, "circuit-open") || s.count("pay") != 1 {
		t.Errorf("a call while it is open: %s", got.body)
	}
	// A probe that ends with an internal error closes nothing.
	halfOpen(t, addr)
	g.call(message(toolCall("1", "broken", "")))
	if now := circuit(t, addr); now.State == breaker.Closed {
		t.Errorf("after a probe with an internal error: %+v", now)
	}
	halfOpen(t, addr)
	g.call(message(toolCall("1", "fail", "")))
	if now := circuit(t, addr); now.State != breaker.Closed {
		t.Errorf("after a probe that a tool has answered: %+v", now)
	}
}

// With `auto` a breaker reads the answers of those servers only that have shown that they speak MCP: no
// caller of another one can open it by a body that looks like a message.
func TestMessagesThatNobodyHasNamedFeedNoBreaker(t *testing.T) {
	_, addr := newToolServer(t)
	g := start(t, "agent_proxy %s {\n breaker {\n consecutive 3\n cooldown 10h\n}\n}", addr)
	for range 4 {
		g.call(message(toolCall("1", "broken", "")))
	}
	if now := circuit(t, addr); now.Failures != 0 || now.State != breaker.Closed {
		t.Errorf("after internal errors: %+v", now)
	}
}

// What undoes a call of a tool can be a call of another one, in the session of the first.
func TestMessagesAreUndoneByMessages(t *testing.T) {
	s, addr := newToolServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: `agent_proxy ` + addr + ` {
		protocol mcp
		action pay {
			match tool pay
			compensate POST /mcp {
				body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{"payment":"{response.json./result/n}","of":"{request.json./params/name}"}}}}}}` + "`" + `
				header Mcp-Session-Id {request.header.Mcp-Session-Id}
				header Accept "application/json, text/event-stream"
			}
		}
	}`})
	saga := g.saga(a)
	paid := saga.do(message(toolCall("1", "pay", ""), "Mcp-Session-Id", "the first"))
	saga.back(rollbackBody{Checkpoint: paid.checkpoint, Reason: "wrong order"}).want(t, "completed")
	s.mu.Lock()
	defer s.mu.Unlock()
	want := `the first {"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"refund","arguments":{"payment":"1","of":"pay"}}}`
	if len(s.refunds) != 1 || s.refunds[0] != want || s.calls["pay"] != 1 {
		t.Errorf("%q", s.refunds)
	}
}

// Servers may answer with a stream of events as well; its answer has the values of the undo.
func TestMessagesInStreamsAreUndone(t *testing.T) {
	s, addr := newToolServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: `agent_proxy ` + addr + ` {
		protocol mcp
		default_undo compensate POST /mcp {
			body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{"payment":{response.json./result/n}}}}}}}` + "`" + `
		}
	}`})
	saga := g.saga(a)
	made := saga.do(message(toolCall("1", "stream", "")))
	saga.back(rollbackBody{Checkpoint: made.checkpoint}).want(t, "completed")
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refunds) != 1 || !strings.Contains(s.refunds[0], `{"payment":1}`) {
		t.Errorf("%q", s.refunds)
	}
}

// P6: an undo that is a message is not done because its status is 200.
func TestMessagesThatUndoAreJudgedByMeaning(t *testing.T) {
	s, addr := newToolServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: `agent_proxy ` + addr + ` {
		protocol mcp
		action pay {
			match tool pay
			compensate POST /mcp {
				body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{}}}}}}` + "`" + `
			}
		}
	}`})
	for answer, want := range map[string][]string{
		`"result":{"content":[],"isError":true}`: {"failed", "refused", ""},
		`"error":{"code":-32601}`:                {"failed", "unexpected", ""},
		`"error":{"code":-32602}`:                {"escalated", "unexpected", "unknown"},
	} {
		s.mu.Lock()
		s.refunded = answer
		s.mu.Unlock()
		saga := g.saga(a) // a failed rollback stops its workflow
		doc := saga.back(rollbackBody{Checkpoint: saga.do(message(toolCall("1", "pay", ""))).checkpoint})
		if doc.Status != want[0] || len(doc.Steps) != 1 || doc.Steps[0].Reason != want[1] || doc.Effect != want[2] {
			t.Errorf("%s: %+v", answer, doc)
		}
	}
}

// P1: where the session of the call has ended, its undo gets one of its own, and is executed once.
func TestMessagesAreUndoneInANewSession(t *testing.T) {
	var mu sync.Mutex
	var log []string
	session := "first"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what is cut is no case below
		mu.Lock()
		defer mu.Unlock()
		var m struct {
			Method string
			Params struct{ Name string }
		}
		_ = json.Unmarshal(body, &m) // DELETE has none
		log = append(log, strings.Join([]string{r.Method, m.Method, m.Params.Name, r.Header.Get("Mcp-Session-Id"), r.Header.Get("X-Api-Key")}, " "))
		w.Header().Set("Content-Type", "application/json")
		switch {
		case m.Method == "initialize":
			session = "second"
			w.Header().Set("Mcp-Session-Id", session)
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"id\":\"initialize\",\"result\":{\"protocolVersion\":\"2025-11-25\",\"capabilities\":{}}}\n\n")
		case r.Header.Get("Mcp-Session-Id") != session:
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}`)
		case r.Method == http.MethodDelete:
		case m.Method == "notifications/initialized":
			w.WriteHeader(http.StatusAccepted)
		default:
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{"content":[]}}`)
		}
	}))
	t.Cleanup(server.Close)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: `agent_proxy ` + strings.TrimPrefix(server.URL, "http://") + ` {
		protocol mcp
		action pay {
			match tool pay
			compensate POST /mcp {
				body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{}}}}}}` + "`" + `
				header Mcp-Session-Id {request.header.Mcp-Session-Id}
				header X-Api-Key "the gateway's"
			}
		}
	}`})
	saga := g.saga(a)
	paid := saga.do(message(toolCall("1", "pay", ""), "Mcp-Session-Id", "first"))
	mu.Lock()
	session = "" // the server has started anew
	mu.Unlock()
	doc := saga.back(rollbackBody{Checkpoint: paid.checkpoint})
	doc.want(t, "completed")
	mu.Lock()
	defer mu.Unlock()
	want := []string{
		"POST tools/call pay first ", "POST tools/call refund first the gateway's", "POST initialize   the gateway's",
		"POST notifications/initialized  second the gateway's", "POST tools/call refund second the gateway's", "DELETE   second the gateway's",
	}
	if !slices.Equal(log, want) || doc.Steps[0].Attempts != 2 {
		t.Errorf("%q, %+v", log, doc.Steps)
	}
}

// P1: a client that says notifications/cancelled has left, though its request stays open. The upstream
// hears of it once, with the id that it knows, and so do operators.
func TestMessagesCancelled(t *testing.T) {
	o := observed(t)
	s, addr := newToolServer(t)
	hold := newGate(t)
	s.hold = hold
	g := launch(t, setup{global: everyEvent, site: fmt.Sprintf(`handle /metrics {
		metrics
	}
	handle {
		agent_proxy %s {
			protocol mcp
			missing_id recognize
		}
	}`, addr)})
	cancel := func(id string, passedOn bool, heard ...string) {
		t.Helper()
		got := g.call(message(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":` + id + `,"reason":"timeout"}}`))
		if e := o.event(); got.status != 202 || e.Name() != "agent_guard.call_cancelled" || e.Data["passed_on"] != passedOn || e.Data["key"] == nil {
			t.Errorf("%d, %s %v", got.status, e.Name(), e.Data)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if !slices.Equal(s.cancelled, heard) {
			t.Errorf("the upstream has heard of %q", s.cancelled)
		}
	}
	first := g.begin(message(toolCall("3", "pay", "")))
	<-hold.arrived
	cancel("3", true, "3")
	retry := g.begin(message(toolCall(`"four"`, "pay", "")))
	if e := o.event(); e.Name() != "agent_guard.call_recognized" || e.Data["evidence"] != "unanswered" {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
	followers(t, 1)
	cancel(`"four"`, false, "3")
	last := g.begin(message(toolCall("5", "pay", "")))
	o.event()
	followers(t, 2)
	hold.open()
	for id, p := range map[string]*pending{"3": first, `"four"`: retry, "5": last} {
		if got := p.answer(); got.status != 200 || !strings.Contains(got.body, `"id":`+id+`,"result"`) {
			t.Errorf("%s: %d %s", id, got.status, got.body)
		}
	}
	if n := s.count("pay"); n != 1 {
		t.Errorf("it was executed %d times", n)
	}
	samples := g.samples("/metrics")
	for _, result := range []string{"kept", "passed_on"} {
		if n := samples[`agent_guard_cancellations_total{action="default",guard="default",result="`+result+`"}`]; n != "1" {
			t.Errorf("%s: %s", result, n)
		}
	}
}

// What a client answers to `input_required` is a step of its own under the key of the call: sent again it
// is a retry, and the next step is none.
func TestMessagesHaveSteps(t *testing.T) {
	for i, protocol := range []string{"mcp", "auto", "mcp", "auto"} {
		s, addr := newToolServer(t)
		g := start(t, "agent_proxy %s {\n protocol %s\n}", addr, protocol)
		step := func(answers string) request {
			if i >= 2 { // its key is in the header
				r := message(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{}` + answers + `}}`)
				r.id = "a"
				return r
			}
			return message(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{}` + answers + `,"_meta":{"execution-id":"a"}}}`)
		}
		for i, c := range []struct{ answers, status, n string }{
			{"", "executed", "1"}, {`,"requestState":"1"`, "executed", "2"}, {`,"inputResponses":{"a":1},"requestState":"1"`, "executed", "3"},
			{`,"requestState":"1"`, "replayed", "2"}, {"", "replayed", "1"}, {`,"requestState":"1","inputResponses":{"a":1}`, "replayed", "3"},
			{`,"inputResponses":{"a":2},"requestState":"1"`, "executed", "4"},
		} {
			if got := g.guardedAs(fmt.Sprint(protocol, " ", i), step(c.answers), c.status); !strings.Contains(got.body, `"n":`+c.n+`}`) {
				t.Errorf("%s %d: %s, want the answer %s", protocol, i, got.body, c.n)
			}
		}
		if s.count("pay") != 4 {
			t.Errorf("%s: %d payments", protocol, s.count("pay"))
		}
	}
}

// With `protocol none` a message is a request as any other, whatever its server is.
func TestMessagesWithoutProtocol(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	g := start(t, "agent_proxy %s {\n protocol none\n}", strings.TrimPrefix(server.URL, "http://"))
	g.guardedAs("the first", hello(initializes), "executed")
	g.guardedAs("a ping", message(ping(1)), "executed")
	g.guardedAs("a key in the message", message(toolCall("4", "pay", `,"_meta":{"execution-id":"k"}`)), "executed")
	g.guardedAs("again", message(toolCall("4", "pay", `,"_meta":{"execution-id":"k"}`)), "executed")
}

// P1, P2: a site that knows nothing of agents sees no difference between `protocol none` and the default:
// the same bytes arrive and come back, and what was recorded before a reload is found after it.
func TestPlainSitesWithTheDefaultProtocol(t *testing.T) {
	u := newUpstream(t)
	u.on("/v1", func(w http.ResponseWriter, a *arrival) {
		seen := a.Header.Clone()
		for _, name := range []string{"Idempotency-Key", "Execution-Parent", "X-Forwarded-Host"} { // of one gateway and call
			seen.Del(name)
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Etag", `"1"`)
		_ = json.NewEncoder(w).Encode(map[string]any{
			"uri": a.RequestURI, "length": a.ContentLength, "coding": a.TransferEncoding, "header": seen, "body": a.body, "trailer": a.trailer,
		})
	})
	long := strings.Repeat("long ", 1<<16)
	bodies := map[string]request{
		"an object":                {body: `{"amount":1}`},
		"names of messages":        {body: `{"id":1,"method":"card","params":{"a":1},"amount":1}`},
		"a message but for a name": {body: `{"jsonrpc":"2.0","id":1,"method":"ping","amount":1}`},
		"another version":          {body: `{"jsonrpc":"1.0","id":1,"method":"ping"}`},
		"a key beside":             {body: `{"_meta":{"execution-id":"x"},"amount":1}`},
		"white space":              {body: " \r\n\t{ \"amount\" : 1 } "},
		"an array":                 {body: `[{"amount":1},{"id":2}]`},
		"nothing in it":            {body: `{}`}, "a text": {body: `"a"`}, "a number": {body: `1`}, "no JSON": {body: `{"id":`}, "no JSON at all": {body: "amount"},
		"an odd first name":   {body: `{"\u0069d":1,"amount":2}`},
		"long":                {body: `{"amount":"` + long + `"}`},
		"long, late":          {body: `{"params":"` + long + `","amount":1}`},
		"chunked":             {reader: slowly(`{"amount":1}`), body: `{"amount":1}`},
		"chunked and long":    {reader: slowly(`{"id":"` + long + `","a":1}`), body: `{"id":"` + long + `","a":1}`, trailer: http.Header{"X-Sum": {"1"}}},
		"chunked and unclear": {reader: slowly(`{"id":1,"params":"` + long + `"}`), body: `{"id":1,"params":"` + long + `"}`},
		"a session":           {body: `{"amount":1}`, header: map[string]string{"Mcp-Session-Id": "s", "Authorization": "Bearer a"}},
		"a tree":              {body: `{"a":1}`, header: map[string]string{"Content-Type": "application/vnd.api+json; charset=utf-8"}},
		"a form":              {body: `a=1`, header: map[string]string{"Content-Type": "application/x-www-form-urlencoded"}},
		"a put":               {method: "PUT", body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`},
		"compressed":          {body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`, header: map[string]string{"Content-Encoding": "gzip"}},
		"expecting":           {body: `{"amount":1}`, header: map[string]string{"Expect": "100-continue"}},
	}
	g := start(t, "agent_proxy %s {\n protocol none\n}", u.addr)
	send := func(name, key string) string {
		r := bodies[name]
		if again, ok := r.reader.(*slowReader); ok {
			r.reader = slowly(again.text)
		}
		r.path, r.id = "/v1?q=1", key+strings.ReplaceAll(name, " ", "-")
		got := g.call(r)
		for _, own := range []string{"Date", "Execution-Id", "Execution-Status", "Idempotent-Replayed"} {
			got.header.Del(own)
		}
		return fmt.Sprint(got.status, got.header, got.trailer, got.length, got.body)
	}
	before := map[string]string{}
	for name := range bodies {
		before[name] = send(name, "")
	}
	seen := u.total()
	g.reload("agent_proxy " + u.addr)
	for name := range bodies {
		if after := send(name, ""); after != before[name] {
			t.Errorf("%s is not replayed after a reload:\n%.300s\nwas\n%.300s", name, after, before[name])
		}
	}
	if u.total() != seen {
		t.Errorf("%d calls ran again after a reload", u.total()-seen)
	}
	for name := range bodies {
		if after := send(name, "new-"); after != before[name] {
			t.Errorf("%s:\n%.300s\nwas\n%.300s", name, after, before[name])
		}
	}
	if u.total() != 2*seen {
		t.Errorf("%d calls arrived, want %d", u.total(), 2*seen)
	}
}

// slowly is a reader that gives a text in pieces of 700 bytes.
func slowly(text string) *slowReader { return &slowReader{text: text, left: text} }

type slowReader struct{ text, left string }

func (s *slowReader) Read(p []byte) (int, error) {
	if s.left == "" {
		return 0, io.EOF
	}
	n := copy(p, s.left[:min(len(s.left), 700)])
	s.left = s.left[n:]
	return n, nil
}

// P1: a message whose key was recorded when none were read does not run again when they are.
func TestMessagesRecordedWithoutProtocol(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	addr := strings.TrimPrefix(server.URL, "http://")
	g := start(t, "agent_proxy %s {\n protocol none\n}", addr)
	call := message(toolCall("4", "pay", ""), "Idempotency-Key", "k", "Authorization", "Bearer a")
	g.guardedAs("before", call, "executed")
	g.reload("agent_proxy " + addr)
	got := g.call(call)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pays != 1 || got.header.Get("Execution-Status") == "executed" {
		t.Errorf("it ran again: %s %s", got.header.Get("Execution-Status"), got.body)
	}
}

// Whoever has read the final answer from an event has been answered, and may close the stream
// before its end (ADR 0070): an equal call afterwards is meant. With an event before that it is a
// retry.
func TestMessagesAreAnsweredByTheirFinalEvent(t *testing.T) {
	for _, final := range []bool{true, false} {
		t.Run(fmt.Sprint("final ", final), func(t *testing.T) {
			var mu sync.Mutex
			calls := 0
			hold := newGate(t)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				calls++
				n := calls
				mu.Unlock()
				w.Header().Set("Content-Type", "text/event-stream")
				answer := fmt.Sprintf("data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"n\":%d}}\n\n", n)
				first := answer
				if !final {
					first = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\n\n"
				}
				_, _ = io.WriteString(w, first)
				if n == 1 {
					_ = http.NewResponseController(w).Flush()
					hold.pass()
				}
				if !final {
					_, _ = io.WriteString(w, answer)
				}
			}))
			t.Cleanup(server.Close)
			t.Cleanup(hold.open)
			g := start(t, "e2e_leaves\nagent_proxy %s {\n protocol mcp\n missing_id recognize\n breaker off\n}", strings.TrimPrefix(server.URL, "http://"))
			known := left.Load()
			leaving, leave := withCancel(g.build(message(toolCall("1", "pay", ""), leaver, "yes")))
			defer leave()
			res, err := g.client.Do(leaving)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(res.Body).ReadString('}'); err != nil { // the event is there
				t.Fatal(err)
			}
			leave()
			eventually(t, "the gateway knows that the client has left", func() bool { return left.Load() == known+1 })
			if final {
				if got := g.call(message(toolCall("1", "pay", ""))); !strings.Contains(got.body, `"n":2`) {
					t.Errorf("the same call, meant again while the stream of the first is open: %s", got.body)
				}
			}
			hold.open()
			idle(t)
			want := `"n":1`
			if final {
				want = `"n":3`
			}
			if got := g.call(message(toolCall("1", "pay", ""))); !strings.Contains(got.body, want) {
				t.Errorf("the same call, once the first has ended: %s, want %s", got.body, want)
			}
		})
	}
}

// sessionServer speaks MCP, and counts what it executes. With plain it executes every POST and answers
// as no server of MCP does; with echo it answers with what it was sent.
type sessionServer struct {
	mu          sync.Mutex
	pays, seen  int
	deletes     int
	plain, echo bool
	empty       bool
	lose        bool // the next answer
}

func (s *sessionServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // what is cut fits no case
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen++
	if r.Method == http.MethodDelete {
		s.deletes++
		return
	}
	var m struct {
		ID     json.RawMessage
		Method string
		Params json.RawMessage
	}
	_ = json.Unmarshal(body, &m) // what is none has no method
	if s.lose {
		s.lose = false
		s.pays++
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	result := "{}"
	switch {
	case s.empty:
		return
	case s.echo:
		result = string(m.Params)
	case s.plain:
		_, _ = fmt.Fprintf(w, `{"n":%d}`, s.seen)
		return
	case m.Method == "initialize":
		result = `{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s"}}`
		w.Header().Set("Mcp-Session-Id", fmt.Sprint("session ", s.seen))
	case m.Method == "tools/list":
		result = `{"tools":[{"name":"pay","inputSchema":{"type":"object"}}]}`
	case m.Method == "tools/call" && bytes.Contains(body, []byte(`"pay"`)):
		s.pays++
		result = fmt.Sprintf(`{"content":[],"n":%d}`, s.pays)
	case m.Method == "tools/call":
		s.pays++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"Unknown tool"}}`, m.ID)
		return
	case m.ID == nil:
		w.WriteHeader(http.StatusAccepted)
		return
	}
	_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, result)
}

const initializes = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}`

func ping(id int) string { return fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, id) }

// hello is the first message of a client, which has no session yet.
func hello(body string, header ...string) request {
	r := message(body, header...)
	delete(r.header, "Mcp-Session-Id")
	delete(r.header, "Mcp-Protocol-Version")
	return r
}

// guardedAs makes a call and compares whether it was guarded.
func (g *gateway) guardedAs(what string, r request, status string) reply {
	g.t.Helper()
	a := g.call(r)
	if got := a.header.Get("Execution-Status"); got != status {
		g.t.Errorf("%s: %d %q %s", what, a.status, got, a.body)
	}
	return a
}

// With auto, a server has to show that it speaks MCP before a message that changes nothing passes.
func TestProtocolIsProven(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	addr := strings.TrimPrefix(server.URL, "http://")
	site := "agent_proxy " + addr // auto is the default
	g := start(t, "%s", site)

	g.guardedAs("before a proof", message(ping(1)), "executed")
	s.mu.Lock()
	s.lose = true // which makes an equal call a retry, but for this one
	s.mu.Unlock()
	g.guardedAs("whose answer is lost", hello(initializes), "in_doubt")
	a := g.guardedAs("the first message", hello(initializes), "executed")
	if b := g.guardedAs("of another client", hello(initializes), ""); a.body != b.body || a.header.Get("Mcp-Session-Id") == b.header.Get("Mcp-Session-Id") {
		t.Errorf("two clients have one session: %s", b.header.Get("Mcp-Session-Id"))
	}
	g.guardedAs("after it", message(ping(1)), "")
	g.guardedAs("in another session", message(ping(2), "Mcp-Session-Id", "b"), "")
	g.guardedAs("a list", message(`{"jsonrpc":"2.0","id":3,"method":"tools/list"}`), "")
	g.guardedAs("a tool", message(toolCall("4", "pay", "")), "executed")
	g.guardedAs("an unknown method", message(`{"jsonrpc":"2.0","id":5,"method":"pay"}`), "executed")
	end := message("")
	end.method = "DELETE"
	g.guardedAs("DELETE", end, "executed")

	// What goes another way may come to another server.
	for what, header := range map[string][]string{"another host": {"Host", "other"}, "a field": {"X-Tenant", "b"}, "a credential": {"Authorization", "Bearer b"}} {
		r := message(ping(1), header...)
		if header[0] == "Host" {
			delete(r.header, "Host")
			r.host = header[1]
		}
		g.guardedAs(what, r, "executed")
	}
	elsewhere := message(ping(1))
	elsewhere.path = "/other"
	g.guardedAs("another path", elsewhere, "executed")

	// Not executed, says the answer, and only now that counts.
	g.guardedAs("an unknown tool before a proof", message(toolCall("6", "none", `,"_meta":{"execution-id":"k"}`), "X-Tenant", "b"), "executed")
	g.guardedAs("its retry before a proof", message(toolCall("7", "none", `,"_meta":{"execution-id":"k"}`), "X-Tenant", "b"), "replayed")
	g.guardedAs("an unknown tool", message(toolCall("6", "none", `,"_meta":{"execution-id":"k2"}`)), "executed")
	g.guardedAs("again", message(toolCall("7", "none", `,"_meta":{"execution-id":"k2"}`)), "executed")

	g.reload(site + "\n# anew")
	g.guardedAs("after a reload", message(ping(1)), "executed")
	g.guardedAs("a tool after a reload", message(toolCall("8", "none", `,"_meta":{"execution-id":"l"}`)), "executed")
	if b := g.guardedAs("its retry", message(toolCall("9", "none", `,"_meta":{"execution-id":"l"}`)), "replayed"); !strings.Contains(b.body, `"id":9`) {
		t.Errorf("the id of the one that asks is missing: %s", b.body)
	}
	g.guardedAs("a list proves it again", message(`{"jsonrpc":"2.0","id":3,"method":"tools/list"}`), "executed")
	g.guardedAs("so this passes", message(ping(1)), "")

	for what, change := range map[string]func(bool){
		"plain": func(is bool) { s.plain = is }, "empty": func(is bool) { s.empty = is },
	} {
		for _, status := range []string{"", "in_doubt"} {
			r := message(ping(1))
			if status != "" {
				r = message(toolCall("1", "pay", ""), "Idempotency-Key", what)
			}
			s.mu.Lock()
			change(true)
			s.mu.Unlock()
			if status != "" {
				g.call(r)
			} else {
				g.guardedAs(what, r, status)
			}
			g.guardedAs(what+" shows", message(ping(1)), "executed")
			s.mu.Lock()
			change(false)
			s.mu.Unlock()
			g.guardedAs("a proof", hello(initializes), "executed")
			g.guardedAs("passes", message(ping(1)), "")
		}
	}
}

// With auto, a body that cannot be read is refused as that of any other call, and logs can show it.
func TestUnreadBodiesWithAuto(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	g := start(t, "header >X-Problem {http.agent_guard.problem}\nagent_proxy %s {\n protocol auto\n max_body 10\n}", strings.TrimPrefix(server.URL, "http://"))
	if a := g.call(message(ping(1))); a.status != http.StatusRequestEntityTooLarge || a.header.Get("X-Problem") != "body-too-large" || s.seen != 0 {
		t.Errorf("%d, problem %q, seen %d: %s", a.status, a.header.Get("X-Problem"), s.seen, a.body)
	}
}

// Who names himself MCP finds no way around the guard of a server of another kind, not even of one that
// gives back what it was sent.
func TestProtocolIsNotTheCallersWord(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	addr := strings.TrimPrefix(server.URL, "http://")
	crafted := strings.Replace(initializes, "clientInfo", "serverInfo", 1)
	for _, c := range []struct {
		name, site  string
		plain, echo bool
	}{
		{"plain", "agent_proxy %s", true, false},
		{"echo", "agent_proxy %s", false, true},
		{"several upstreams", "agent_proxy %[1]s %[1]s {\n protocol auto\n}", false, false},
		{"by a matcher", "agent_guard {\n protocol auto\n}\n@a header X-A a\nreverse_proxy @a %[1]s\nreverse_proxy %[1]s", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.mu.Lock()
			s.plain, s.echo = c.plain, c.echo
			s.mu.Unlock()
			g := start(t, c.site, addr)
			for range 2 {
				g.guardedAs("initialize", hello(initializes), "executed")
				g.guardedAs("a crafted one", hello(crafted), "executed")
				g.guardedAs("in a field", hello(initializes, "X-A", `{"serverInfo":{"name":"s"}}`), "executed")
				g.guardedAs("ping", message(ping(1)), "executed")
				g.guardedAs("a batch", message("["+ping(1)+"]"), "executed")
				g.guardedAs("a list", message(`{"jsonrpc":"2.0","id":3,"method":"tools/list"}`), "executed")
			}
		})
	}
}

// a2aForm is one of the forms in which a message is sent to an agent.
type a2aForm struct {
	name, send, stream string // a method, or a path
	header             string // A2A-Version
	working, final     string // the results of a stream
}

var a2aForms = []a2aForm{
	{name: "0.3", send: "message/send", stream: "message/stream",
		working: `{"kind":"task","id":"t","status":{"state":"working"}}`, final: `{"kind":"status-update","taskId":"t","status":{"state":"completed"},"final":true}`},
	{name: "1.0", send: "SendMessage", stream: "SendStreamingMessage", header: "1.0",
		working: `{"task":{"id":"t","status":{"state":"TASK_STATE_WORKING"}}}`, final: `{"statusUpdate":{"taskId":"t","status":{"state":"TASK_STATE_COMPLETED"}}}`},
	{name: "1.0 over REST", send: "/message:send", stream: "/message:stream", header: "1.0",
		working: `{"task":{"id":"t","status":{"state":"TASK_STATE_WORKING"}}}`, final: `{"statusUpdate":{"taskId":"t","status":{"state":"TASK_STATE_COMPLETED"}}}`},
}

func (f *a2aForm) rest() bool { return f.send[0] == '/' }

// to is a request with a message, by a method or a path.
func (f *a2aForm) to(method, id, message, text string) request {
	body := `{"message":{"messageId":"` + message + `","role":"ROLE_USER","parts":[{"text":"` + text + `"}]}}`
	r := request{path: method, body: body, header: map[string]string{"Content-Type": "application/json", "Authorization": "Bearer ada"}}
	if !f.rest() {
		r.path, r.body = "/agent", `{"jsonrpc":"2.0","id":`+id+`,"method":"`+method+`","params":`+body+`}`
	}
	if f.header != "" {
		r.header["A2A-Version"] = f.header
	}
	return r
}

// result is an answer, or an event of one, to the request with this id.
func (f *a2aForm) result(id, text string) string {
	if f.rest() {
		return text
	}
	return `{"jsonrpc":"2.0","id":` + id + `,"result":` + text + `}`
}

// A2A 0.3 and 1.0, as JSON-RPC and REST: a message is known by its messageId, answered and streamed again under
// the id that asks, and in doubt where its answer is lost. REST has statuses and problems of its own.
func TestMessagesOfA2A(t *testing.T) {
	for _, protocol := range []string{"a2a", "auto"} {
		for _, f := range a2aForms {
			t.Run(protocol+" "+f.name, func(t *testing.T) {
				u := newUpstream(t)
				var mu sync.Mutex
				effects, hold := map[string]int{}, newGate(t)
				t.Cleanup(hold.open)
				serve := func(w http.ResponseWriter, a *arrival) {
					id := "null"
					if _, rest, ok := strings.Cut(a.body, `"id":`); ok {
						id = rest[:strings.IndexAny(rest, ",}")]
					}
					_, rest, _ := strings.Cut(a.body, `"text":"`)
					text, _, _ := strings.Cut(rest, `"`)
					mu.Lock()
					effects[text]++
					n := effects[text]
					mu.Unlock()
					event := func(text string) {
						_, _ = io.WriteString(w, "data: "+f.result(id, text)+"\n\n")
						_ = http.NewResponseController(w).Flush() // an error shows as a missing event
					}
					w.Header().Set("Content-Type", "text/event-stream")
					switch text {
					case "lose":
						panic(http.ErrAbortHandler)
					case "stream":
						event(f.working)
						hold.pass()
						event(f.final)
					case "cut":
						event(f.working)
					default:
						w.Header().Set("Content-Type", "application/json")
						_, _ = io.WriteString(w, f.result(id, fmt.Sprintf(`{"message":{"parts":[]},"n":%d}`, n)))
					}
				}
				for _, path := range []string{"/agent", "/message:send", "/message:stream", "/tasks/t"} {
					u.on(path, serve)
				}
				g := start(t, "agent_proxy %s {\n protocol %s\n breaker off\n}", u.addr, protocol)

				g.call(f.to(f.send, "1", "m1", "pay")).want(t, 200, f.result("1", `{"message":{"parts":[]},"n":1}`), "executed")
				g.call(f.to(f.send, `"x"`, "m1", "pay")).want(t, 200, f.result(`"x"`, `{"message":{"parts":[]},"n":1}`), "replayed")
				g.call(f.to(f.send, "1", "m2", "pay")).want(t, 200, f.result("1", `{"message":{"parts":[]},"n":2}`), "executed")

				problem := func(what, id, slug string, status int, got reply) {
					t.Helper()
					if f.rest() {
						got.problem(t, status, slug)
					} else if got.status != 200 || !strings.HasPrefix(got.body, `{"jsonrpc":"2.0","id":`+id+`,"error":{"code":-32090,`) || !strings.Contains(got.body, "/problems/"+slug) {
						t.Errorf("%s: %d %s", what, got.status, got.body)
					}
				}
				problem("the id of another message", "4", "fingerprint-mismatch", 422, g.call(f.to(f.send, "4", "m1", "other")))
				for _, id := range []string{"5", `"six"`} {
					problem("a lost answer", id, "in-doubt", 409, g.call(f.to(f.send, id, "m3", "lose")))
				}

				first := g.begin(f.to(f.stream, "7", "m4", "stream"))
				wait(t, hold.arrived, "the stream")
				second := g.begin(f.to(f.stream, `"eight"`, "m4", "stream"))
				followers(t, 1)
				hold.open()
				events := func(id string) string {
					return "data: " + f.result(id, f.working) + "\n\ndata: " + f.result(id, f.final) + "\n\n"
				}
				first.answer().want(t, 200, events("7"), "executed")
				second.answer().want(t, 200, events(`"eight"`), "attached")
				g.call(f.to(f.stream, "9", "m4", "stream")).want(t, 200, events("9"), "replayed")

				want := map[string]int{"pay": 2, "lose": 1, "stream": 1}
				if protocol == "a2a" {
					g.call(f.to(f.stream, "1", "m5", "cut"))
					problem("a stream without its final event", "2", "in-doubt", 409, g.call(f.to(f.stream, "2", "m5", "cut")))
					want["cut"] = 1
					if f.rest() {
						g.call(request{method: http.MethodGet, path: "/tasks/t"}).passed(t, 200)
					} else {
						g.call(request{path: "/agent", body: `{"jsonrpc":"2.0","id":3,"method":"tasks/get","params":{"id":"t"}}`, header: map[string]string{"Content-Type": "application/json"}}).passed(t, 200)
					}
					want[""] = 1
				}
				mu.Lock()
				defer mu.Unlock()
				if !maps.Equal(effects, want) {
					t.Errorf("%v, want %v", effects, want)
				}
			})
		}
	}
}

// MCP 2025-03-26 to 2026-07-28: what changes nothing passes, a call with a key runs once and is answered under
// the id that asks. The header fields of a revision reach the server and come back as they are.
func TestMessagesOfEachRevision(t *testing.T) {
	for _, c := range []struct {
		version, session string
		opens            string // the method
		mirrors          bool   // the header says what the body does
	}{
		{"", "", "initialize", false}, // 2025-03-26 has no field for it
		{"", "s", "initialize", false},
		{"2025-06-18", "s", "initialize", false},
		{"2025-11-25", "s", "initialize", false},
		{"2026-07-28", "", "server/discover", true},
	} {
		t.Run(c.version+" "+c.session, func(t *testing.T) {
			u := newUpstream(t)
			u.on("/mcp", func(w http.ResponseWriter, a *arrival) {
				_, rest, _ := strings.Cut(a.body, `"id":`)
				id := rest[:strings.IndexAny(rest, ",}")]
				w.Header().Set("Content-Type", "text/event-stream")
				w.Header().Set("X-Accel-Buffering", "no")
				result := `{"resultType":"complete"}`
				if strings.Contains(a.body, `"tools/list"`) {
					result = `{"tools":[{"name":"get","inputSchema":{},"annotations":{"readOnlyHint":true}},{"name":"look","inputSchema":{},"annotations":{"readOnlyHint":true}}]}`
				}
				_, _ = fmt.Fprintf(w, "id: 1\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":%s}\n\n", id, result)
			})
			g := start(t, "agent_proxy %s {\n protocol mcp\n exempt tool peek\n consequential tool look\n}", u.addr)
			send := func(id, method, tool, more string) request {
				body := `{"jsonrpc":"2.0","id":` + id + `,"method":"` + method + `","params":{}}`
				if tool != "" {
					body = toolCall(id, tool, more)
				}
				r := message(body)
				delete(r.header, "Mcp-Session-Id")
				delete(r.header, "Mcp-Protocol-Version")
				if c.session != "" {
					r.header["Mcp-Session-Id"] = c.session
				}
				if c.version != "" {
					r.header["Mcp-Protocol-Version"] = c.version
				}
				if c.mirrors {
					r.header["Mcp-Method"] = method
					if tool != "" {
						r.header["Mcp-Name"], r.header["Mcp-Param-Region"] = tool, "eu"
					}
				}
				return r
			}
			for _, method := range []string{c.opens, "ping", "tools/list", "resources/read", "prompts/get"} {
				g.call(send("1", method, "", "")).passed(t, 200)
			}
			g.call(send("1", "tools/call", "peek", "")).passed(t, 200)
			g.call(send("1", "tools/call", "get", "")).passed(t, 200) // by its server's word
			if got := g.call(send("1", "tools/call", "look", "")); got.header.Get("Execution-Status") != "executed" {
				t.Errorf("the operator's word does not go first: %v", got.header)
			}
			first := g.call(send("3", "tools/call", "pay", keyA))
			if !strings.Contains(first.body, `"id":3,`) || first.header.Get("Execution-Status") != "executed" || first.header.Get("X-Accel-Buffering") != "no" {
				t.Errorf("%v %q", first.header, first.body)
			}
			in := u.last("/mcp")
			for name, value := range send("3", "tools/call", "pay", keyA).header {
				if strings.HasPrefix(name, "Mcp-") && in.Header.Get(name) != value {
					t.Errorf("%s came as %q, not %q", name, in.Header.Get(name), value)
				}
			}
			n := u.total()
			again := g.call(send(`"four"`, "tools/call", "pay", keyA))
			if !strings.Contains(again.body, `"id":"four",`) || strings.Contains(again.body, "id: 1") || again.header.Get("Execution-Status") != "replayed" || u.total() != n {
				t.Errorf("%v %q, %d calls", again.header, again.body, u.total()-n)
			}
		})
	}
}
