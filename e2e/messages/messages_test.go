package messages

import (
	"bufio"
	"bytes"
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
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// What changes nothing passes as through a bare proxy; tools count by what is known of them.
func TestMessagesThatPass(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n missing_id require\n exempt tool stream\n}", addr)
	for _, body := range []string{
		`{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}`, `{"jsonrpc":"2.0","id":1,"method":"ping"}`,
		`{"jsonrpc":"2.0","method":"notifications/initialized"}`, `{"jsonrpc":"2.0","id":7,"result":{}}`,
		`[{"jsonrpc":"2.0","id":1,"method":"ping"}]`, harness.ToolCall("1", "stream", ""),
	} {
		got := g.Call(harness.Message(body))
		if got.Status != 200 && got.Status != 202 || got.Header.Get("Execution-Status") != "" || got.Header.Get("Execution-Id") != "" {
			t.Errorf("%s: %d %v", body, got.Status, got.Header)
		}
	}
	if got := g.Call(harness.Request{Method: "DELETE", Path: "/mcp", Header: map[string]string{"Mcp-Session-Id": "a"}}); got.Status != 200 || got.Header.Get("Execution-Status") != "" {
		t.Errorf("the end of the session: %d %v", got.Status, got.Header)
	}
	// Nobody knows yet that `get` is read-only, and a call needs a key here.
	refused := g.Call(harness.Message(harness.ToolCall("5", "get", "")))
	if refused.Status != 200 || !strings.HasPrefix(refused.Body, `{"jsonrpc":"2.0","id":5,"error":{"code":-32090,`) || s.Count("get") != 0 {
		t.Errorf("a call without a key: %d %s", refused.Status, refused.Body)
	}
	g.Call(harness.Message(`{"jsonrpc":"2.0","id":2,"method":"tools/list"}`))
	if got := g.Call(harness.Message(harness.ToolCall("6", "get", ""))); s.Count("get") != 1 || got.Header.Get("Execution-Status") != "" {
		t.Errorf("a read-only tool: %s", got.Body)
	}
	if got := g.Call(harness.Message(harness.ToolCall("7", "pay", ""))); !strings.Contains(got.Body, "execution-id-missing") || s.Count("pay") != 0 {
		t.Errorf("a tool that is not read-only: %s", got.Body)
	}
	before := s.Seen
	if got := g.Call(harness.Message(`{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call"}`)); got.Status != 400 || s.Seen != before {
		t.Errorf("a message that servers read in two ways: %d %s", got.Status, got.Body)
	}
}

// A retry under another id of JSON-RPC is answered under its own, and runs nothing. The id of
// JSON-RPC is no key, and a session is a caller.
func TestMessagesAreAnsweredOnce(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n execution_id argument request_key\n execution_id meta execution-id\n}", addr)
	g.Call(harness.Message(harness.ToolCall("1", "pay", harness.KeyA))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":1}}`, "executed")
	got := g.Call(harness.Message(harness.ToolCall(`"x2"`, "pay", `,"_meta":{"execution-id":"a","progressToken":9}`)))
	got.Want(t, 200, `{"jsonrpc":"2.0","id":"x2","result":{"content":[],"n":1}}`, "replayed")
	if session := got.Header.Get("Mcp-Session-Id"); session != "" {
		t.Errorf("the replay names the session %q", session)
	}
	g.Call(harness.Message(harness.ToolCall("1", "pay", ""))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":2}}`, "executed")
	g.Call(harness.Message(harness.ToolCall("1", "pay", ""))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":3}}`, "executed")
	g.Call(harness.Message(harness.ToolCall("1", "pay", harness.KeyA), "Mcp-Session-Id", "b")).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":4}}`, "executed")
	g.Call(harness.Message(harness.ToolCall("1", "pay", harness.KeyA), "Idempotency-Key", "first")).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":5}}`, "executed")
	mismatch := g.Call(harness.Message(harness.ToolCall("3", "fail", harness.KeyA)))
	if mismatch.Status != 200 || !strings.Contains(mismatch.Body, `"id":3,"error":{"code":-32090,`) || !strings.Contains(mismatch.Body, "fingerprint-mismatch") {
		t.Errorf("another tool under the same key: %d %s", mismatch.Status, mismatch.Body)
	}
	argument := func(id, key string) string {
		return strings.Replace(harness.ToolCall(id, "pay", ""), `"arguments":{}`, `"arguments":{"request_key":"`+key+`"}`, 1)
	}
	g.Call(harness.Message(argument("1", "k1"))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":6}}`, "executed")
	g.Call(harness.Message(argument("2", "k1"))).Want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"content":[],"n":6}}`, "replayed")
	if s.Count("fail") != 0 {
		t.Error("the mismatch has run")
	}
}

// What the answer says decides, not its status.
func TestMessagesMeanings(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n}", addr)
	g.Call(harness.Message(harness.ToolCall("1", "fail", harness.KeyA))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true,"n":1}}`, "executed")
	g.Call(harness.Message(harness.ToolCall("2", "fail", harness.KeyA))).Want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"content":[],"isError":true,"n":1}}`, "replayed")
	key := func(id string) string { return strings.Replace(harness.KeyA, `"a"`, `"`+id+`"`, 1) }
	for _, id := range []string{"1", "2"} {
		g.Call(harness.Message(harness.ToolCall(id, "unknown", key("u")))).Want(t, 200, `{"jsonrpc":"2.0","id":`+id+`,"error":{"code":-32601,"message":"Unknown tool"}}`, "executed")
	}
	if n := s.Count("unknown"); n != 2 {
		t.Errorf("a call that was never executed has been sent %d times", n)
	}
	// Also a tool that has run gives -32602, where its result does not fit its schema.
	for _, id := range []string{"1", "2"} {
		if got := g.Call(harness.Message(harness.ToolCall(id, "invalid", key("i")))); !strings.Contains(got.Body, `"id":`+id+`,"error":{"code":-32602,`) || s.Count("invalid") != 1 {
			t.Errorf("after -32602: %s, sent %d times", got.Body, s.Count("invalid"))
		}
	}
	// ADR 0070: -32603 is a 500, so without a key the next equal call is its retry; others may be meant.
	for _, tool := range []string{"broken", "breaking", "invalid"} {
		g.Call(harness.Message(harness.ToolCall("1", tool, "")))
		again := g.Call(harness.Message(harness.ToolCall("2", tool, "")))
		if recognized := again.Header.Get("Execution-Recognized") != ""; recognized != (tool != "invalid") || !strings.Contains(again.Body, `"id":2,`) {
			t.Errorf("after the error of %s: recognised %t, %s", tool, recognized, again.Body)
		}
	}
	if s.Count("broken") != 1 || s.Count("breaking") != 1 || s.Count("invalid") != 3 {
		t.Errorf("sent %d, %d and %d times", s.Count("broken"), s.Count("breaking"), s.Count("invalid"))
	}
	// A status that refuses stays one, whatever the error beside it.
	for n := range 2 {
		if got := g.Call(harness.Message(harness.ToolCall("1", "busy", key("b")))); got.Status != 429 || s.Count("busy") != n+1 {
			t.Errorf("a call that the server has no time for: %d, sent %d times", got.Status, s.Count("busy"))
		}
	}
	const event = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":%s,\"progress\":1}}\n\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"n\":1}}\n\n"
	if got := g.Call(harness.Message(harness.ToolCall("1", "stream", key("s")))); !strings.Contains(got.Body, "id: 2\n") {
		t.Errorf("the first stream: %q", got.Body)
	}
	g.Call(harness.Message(harness.ToolCall("2", "stream", strings.Replace(key("s"), `"first"`, "5", 1)))).Want(t, 200, fmt.Sprintf(event, "5", "2"), "replayed")
	g.Call(harness.Message(harness.ToolCall("1", "cut", key("c"))))
	doubt := g.Call(harness.Message(harness.ToolCall("2", "cut", key("c"))))
	if doubt.Status != 200 || !strings.Contains(doubt.Body, `"id":2,"error":{"code":-32090,`) || doubt.Header.Get("Execution-Status") != "in_doubt" || s.Count("cut") != 1 {
		t.Errorf("after a stream without its answer: %d %s %v", doubt.Status, doubt.Body, doubt.Header)
	}
}

// An action is chosen by the tool and its arguments, of a generic message by its method, also in a batch.
func TestMessagesChooseTheirAction(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, `agent_proxy %s {
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
		return strings.Replace(harness.ToolCall("1", tool, ""), `"arguments":{}`, `"arguments":`+arguments, 1)
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
		if got := g.Call(harness.Message(c.body)); got.Header.Get("Execution-Status") != c.status {
			t.Errorf("%s: %d %v, want %s", c.body, got.Status, got.Header, c.status)
		}
	}
	other := harness.Message(euro)
	other.Path = "/elsewhere"
	if got := g.Call(other); got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("on another path: %v", got.Header)
	}
	named := func(key, body string) harness.Request { return harness.Message(body, "Idempotency-Key", key) }
	if got := g.Call(named("one", "["+ping+","+euro+"]")); got.Header.Get("Execution-Status") != "in_doubt" {
		t.Errorf("a batch: %v", got.Header)
	}
	before := s.Seen
	mixed := g.Call(named("two", "["+ping+","+euro+","+harness.ToolCall("2", "pay", "")+"]"))
	if mixed.Status != 400 || !strings.Contains(mixed.Body, "batch-mixed") || s.Seen != before {
		t.Errorf("a batch of two calls: %d %s", mixed.Status, mixed.Body)
	}
	var policy struct {
		Actions []struct {
			Name      string
			Tools     []string
			Arguments map[string]string
		}
	}
	if err := json.Unmarshal([]byte(g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/policy"}).Body), &policy); err != nil ||
		fmt.Sprint(policy.Actions) != "[{euros [fail pay] map[/money/currency:EUR /n:1]} {default [] map[]}]" {
		t.Errorf("the policy: %v %v", policy, err)
	}
}

// Of messages that call no tool the method and the parameters count.
func TestMessagesChooseTheirActionByMethod(t *testing.T) {
	_, addr := harness.NewToolServer(t)
	g := harness.Start(t, `agent_proxy %s {
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
		if got := g.Call(harness.Message(body)); got.Header.Get("Execution-Status") != status {
			t.Errorf("%s: %d %v, want %s", body, got.Status, got.Header, status)
		}
	}
}

// A model reads results, and not the errors of the transport: what is in doubt can be said to it. A
// call whose retry runs again, and any other problem, stays an error.
func TestMessagesTellModelsOfDoubts(t *testing.T) {
	upstream := harness.NewUpstream(t)
	upstream.On("/mcp", harness.Reset)
	g := harness.Start(t, `agent_proxy %s {
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
	}`, upstream.Addr)
	for attempt, id := range []string{"1", `"two"`} {
		got := g.Call(harness.Message(harness.ToolCall(id, "pay", harness.KeyA), "Mcp-Protocol-Version", "2026-07-28"))
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
		if err := json.Unmarshal([]byte(got.Body), &answer); err != nil {
			t.Fatal(err, got.Body)
		}
		r, problem := answer.Result, answer.Result.Meta["agent-guard/problem"]
		if got.Status != 200 || string(answer.ID) != id || answer.Error != nil || !r.IsError || r.ResultType != "complete" || len(r.Content) != 1 {
			t.Fatalf("attempt %d: %d %s", attempt+1, got.Status, got.Body)
		}
		for _, part := range []string{"Cause: connection_lost.", "Do not simply repeat it", "The execution is a."} {
			if text := r.Content[0]; text.Type != "text" || !strings.Contains(text.Text, part) {
				t.Errorf("attempt %d: %q is not in %q", attempt+1, part, text.Text)
			}
		}
		if !strings.HasSuffix(problem.Type, "/in-doubt") || problem.ID != "a" || problem.State != "in_doubt" ||
			got.Header.Get("Execution-Status") != "in_doubt" || got.Header.Get("X-Should-Retry") != "false" {
			t.Errorf("attempt %d: %+v, %v", attempt+1, problem, got.Header)
		}
	}
	upstream.Arrived("/mcp", 1)
	for _, body := range []string{
		harness.ToolCall("3", "again", `,"_meta":{"execution-id":"b"}`), harness.ToolCall("3", "error", `,"_meta":{"execution-id":"c"}`),
		harness.ToolCall("3", "other", harness.KeyA), // another call under the first one's id
		`{"jsonrpc":"2.0","id":3,"method":"tools/unknown","params":{"name":"x"}}`,
	} {
		if got := g.Call(harness.Message(body)); got.Status != 200 || !strings.HasPrefix(got.Body, `{"jsonrpc":"2.0","id":3,"error":{"code":-32090,`) {
			t.Errorf("%s: %d %s", body, got.Status, got.Body)
		}
	}
}

// A token in `_meta` is as good as one in the header: for one call and its retries, with the call that
// it hashes, and where one is required.
func TestMessagesCarryTokens(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + addr + " {\n protocol mcp\n require_ect\n}"})
	meta := func(tokens string) string { return `,"_meta":{"progressToken":1,"execution-context":` + tokens + `}` }
	quoted := func(token *ect.Token) string { return strconv.Quote(token.Raw()) }
	one := a.Issue(ect.Claims{})
	g.Call(harness.Message(harness.ToolCall("1", "pay", meta(quoted(one))))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":1}}`, "executed")
	g.Call(harness.Message(harness.ToolCall("2", "pay", meta("["+quoted(one)+"]")), "Mcp-Session-Id", "b")).Want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{"content":[],"n":1}}`, "replayed")
	g.Call(harness.With(one, harness.Message(harness.ToolCall("3", "pay", meta(quoted(one)))))).Want(t, 200, `{"jsonrpc":"2.0","id":3,"result":{"content":[],"n":1}}`, "replayed")

	input := func(tool string) *ect.Token {
		return a.Issue(ect.Claims{Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"` + tool + `"}}`))})
	}
	hashed := input("pay")
	g.Call(harness.Message(harness.ToolCall("1", "pay", meta(quoted(hashed))))).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":2}}`, "executed")
	inHeader := harness.Message(harness.ToolCall("1", "pay", ""))
	whole := a.Issue(ect.Claims{Input: ect.Sum([]byte(inHeader.Body))})
	g.Call(harness.With(whole, inHeader)).Want(t, 200, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"n":3}}`, "executed")

	for name, c := range map[string]struct {
		request harness.Request
		reason  string
	}{
		"none":                    {harness.Message(harness.ToolCall("1", "pay", "")), "missing"},
		"another call's":          {harness.Message(harness.ToolCall("1", "pay", meta(quoted(input("fail"))))), "inp_hash"},
		"the message's in header": {harness.With(input("pay"), harness.Message(harness.ToolCall("1", "pay", ""))), "inp_hash"},
		"no token":                {harness.Message(harness.ToolCall("1", "pay", meta("7"))), "malformed"},
		"a stranger's":            {harness.Message(harness.ToolCall("1", "pay", meta(quoted(harness.NewAgent(t, "x").Issue(ect.Claims{}))))), ""},
	} {
		got := g.Call(c.request)
		if got.Status != 200 || !strings.Contains(got.Body, `"code":-32090`) || !strings.Contains(got.Body, "/ect-invalid") || !strings.Contains(got.Body, `"reason":"`+c.reason) {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
		}
	}
	if got := g.Call(harness.Message(harness.ToolCall("1", "fail", meta(quoted(one))))); !strings.Contains(got.Body, `"code":-32090`) {
		t.Errorf("a token that was used for another call: %s", got.Body)
	}
	if s.Count("pay") != 3 || s.Count("fail") != 0 {
		t.Errorf("%d and %d calls", s.Count("pay"), s.Count("fail"))
	}
	const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"%s}`
	if got := g.Call(harness.Message(fmt.Sprintf(ping, ""))); got.Status != 200 || got.Header.Get("Execution-Status") != "refused" ||
		!strings.HasPrefix(got.Body, `{"jsonrpc":"2.0","id":1,"error":{"code":-32090,`) || !strings.Contains(got.Body, `"reason":"missing"`) {
		t.Errorf("a ping without a token: %d %s", got.Status, got.Body)
	}
	g.Call(harness.Message(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)).RefusedFor(t, 403, "missing")
	params := func(token *ect.Token) string {
		return `,"params":{"_meta":{"execution-context":` + quoted(token) + `}}`
	}
	if got := g.Call(harness.Message(fmt.Sprintf(ping, params(a.Issue(ect.Claims{}))))); got.Status != 200 {
		t.Errorf("a ping with a token: %d %s", got.Status, got.Body)
	}
	g.Call(harness.Message(fmt.Sprintf("["+ping+","+ping+"]", params(a.Issue(ect.Claims{})), ""))).RefusedFor(t, 403, "missing")
}

// Cascade 3.2.1: a failure that a message reports is one, though its status is 200.
func TestMessagesFailuresAreErrors(t *testing.T) {
	_, addr := harness.NewToolServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + addr + " {\n protocol mcp\n}"})
	for tool, want := range map[string][2]string{
		"broken": {"error", "in_band_error"}, "breaking": {"error", "in_band_error"}, "fail": {"warning", "tool_error"},
		"invalid": {"warning", "tool_error"}, "pay": {},
	} {
		nodes := 4
		if tool == "pay" {
			nodes = 3
		}
		s := g.Saga(a)
		step := s.Try(harness.Message(harness.ToolCall("1", tool, "")))
		failures := s.Events(nodes, ect.EventError)
		if len(failures) != nodes-3 {
			t.Errorf("%s has %d errors", tool, len(failures))
		}
		for _, u := range failures {
			harness.Says(t, u, map[ect.Member]string{
				ect.MemberSeverity: strconv.Quote(want[0]), ect.MemberErrorType: `"action_failed"`,
				ect.MemberCheckpointID: strconv.Quote(step.Checkpoint), ect.MemberDescription: strconv.Quote("default: " + want[1]),
			})
		}
	}
}

// A doubt whose answer had named a task is settled by it; without a task nothing is asked.
func TestMessagesInDoubtAreAskedForByTheirTask(t *testing.T) {
	u := harness.NewUpstream(t)
	var mu sync.Mutex
	sends, asked, task := 0, []string(nil), `{"id":"t1","kind":"task","status":{"state":"working"}}`
	u.On("/a2a", func(w http.ResponseWriter, in *harness.Arrival) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(in.Body, "tasks/get") {
			asked = append(asked, in.Header.Get("Authorization")+" "+in.Body)
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":"task",`+task+`}`)
			return
		}
		sends++
		w.Header().Set("Content-Type", "text/event-stream")
		if !strings.Contains(in.Body, "nothing") {
			_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":"+`{"id":"t1","kind":"task","status":{"state":"working"}}`+"}\n\n")
		}
		_ = http.NewResponseController(w).Flush() // an error shows as a call without a task
		panic(http.ErrAbortHandler)
	})
	g := harness.Start(t, "agent_proxy %s {\n protocol a2a\n on_unknown probe task {\n header Authorization {http.request.header.Authorization}\n }\n}", u.Addr)
	send := func(id, message string) harness.Request {
		return harness.Request{Path: "/a2a", Body: `{"jsonrpc":"2.0","id":` + id + `,"method":"message/stream","params":{"message":{"messageId":"` + message + `","parts":[]}}}`,
			Header: map[string]string{"Content-Type": "application/json", "Authorization": "Bearer one"}}
	}
	answer := func(to string) { mu.Lock(); defer mu.Unlock(); task = to }
	state := func() (int, int) { mu.Lock(); defer mu.Unlock(); return sends, len(asked) }

	g.Call(send("1", "m"))
	answer(`"error":{"code":-32001,"message":"Task not found"}`) // which may have been forgotten
	if got := g.Call(send("2", "m")); !strings.Contains(got.Body, "/in-doubt") {
		t.Errorf("while the task is not known: %s", got.Body)
	}
	answer(`"result":{"id":"t1","kind":"task","status":{"state":"completed"}}`)
	want := "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"id\":\"t1\",\"kind\":\"task\",\"status\":{\"state\":\"completed\"}}}\n\n"
	for _, id := range []string{"3", "4"} {
		got := g.Call(send(id, "m"))
		if got.Want(t, 200, fmt.Sprintf(want, id), "replayed"); got.Header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("%v", got.Header)
		}
	}
	if sent, questions := state(); sent != 1 || questions != 2 || asked[1] != `Bearer one {"id":"task","jsonrpc":"2.0","method":"tasks/get","params":{"id":"t1"}}` {
		t.Errorf("%d sends, asked %q", sent, asked)
	}
	g.Call(send("1", "nothing"))
	if got := g.Call(send("2", "nothing")); !strings.Contains(got.Body, "/in-doubt") {
		t.Errorf("without a task: %s", got.Body)
	}
	if sent, questions := state(); sent != 2 || questions != 2 {
		t.Errorf("%d sends, %d questions", sent, questions)
	}
}

// Digests are of the body that one client got, wherever they stand.
func TestMessagesAreRepeatedWithoutDigests(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/mcp", func(w http.ResponseWriter, _ *harness.Arrival) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Trailer", "Content-Digest, X-Sum")
		w.Header().Set("Repr-Digest", "sha-256=:a:")
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{}}`)
		for _, name := range []string{"Content-Digest", "X-Sum", http.TrailerPrefix + "Repr-Digest", http.TrailerPrefix + "Digest"} {
			w.Header().Set(name, "sha-256=:b:")
		}
	})
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n}", u.Addr)
	first := g.Call(harness.Message(harness.ToolCall("1", "pay", harness.KeyA)))
	if first.Trailer.Get("Content-Digest") == "" || first.Trailer.Get("Repr-Digest") == "" || first.Header.Get("Repr-Digest") == "" {
		t.Fatalf("the first answer: %v, %v", first.Header, first.Trailer)
	}
	again := g.Call(harness.Message(harness.ToolCall("2", "pay", harness.KeyA)))
	again.Want(t, 200, `{"jsonrpc":"2.0","id":2,"result":{}}`, "replayed")
	if again.Trailer.Get("X-Sum") == "" {
		t.Errorf("the trailer is lost: %v", again.Trailer)
	}
	for _, name := range []string{"Content-Digest", "Repr-Digest", "Digest"} {
		if again.Trailer.Get(name)+again.Header.Get(name) != "" {
			t.Errorf("%s is repeated: %v, %v", name, again.Header, again.Trailer)
		}
	}
}

// A trace context in `_meta` names the workflow, after those of the header.
func TestMessagesNameTheirWorkflow(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n}", u.Addr)
	const trace, other = "0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c"
	of := func(id string) string { return "00-" + id + "-b7ad6b7169203331-01" }
	call := harness.ToolCall("1", "pay", `,"_meta":{"traceparent":"`+of(trace)+`"}`)
	for _, c := range []struct {
		header []string
		want   string
	}{{nil, trace}, {[]string{"Traceparent", of(other)}, other}, {[]string{"Workflow-Id", "w"}, "w"}} {
		g.Call(harness.Message(call, c.header...))
		if got := u.Last("/mcp").Header.Get("Workflow-Id"); got != c.want {
			t.Errorf("%v: the workflow %q, want %q", c.header, got, c.want)
		}
	}
}

// An internal error is a failure of the upstream, in JSON and in a stream, of a tool and of a list. What
// a tool or a caller does wrong is none.
func TestMessagesFeedTheBreaker(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n breaker {\n consecutive 3\n cooldown 10h\n}\n}", addr)
	for _, tool := range []string{"fail", "unknown", "invalid", "fail", "pay"} {
		g.Call(harness.Message(harness.ToolCall("1", tool, "")))
	}
	if now := harness.Circuit(t, addr); now.Failures != 0 || now.State != breaker.Closed {
		t.Fatalf("after errors of callers and tools: %+v", now)
	}
	g.Call(harness.Message(harness.ToolCall("1", "broken", "")))
	g.Call(harness.Message(harness.ToolCall("1", "breaking", "")))
	if now := harness.Circuit(t, addr); now.Failures != 2 || now.State != breaker.Closed {
		t.Fatalf("after two internal errors: %+v", now)
	}
	g.Call(harness.Message(`{"jsonrpc":"2.0","id":1,"method":"prompts/list"}`))
	if now := harness.Circuit(t, addr); now.State != breaker.Open || now.Cause != "JSON-RPC error -32603" {
		t.Fatalf("after the third: %+v", now)
	}
	if got := g.Call(harness.Message(harness.ToolCall("9", "pay", ""))); !strings.HasPrefix(got.Body, `{"jsonrpc":"2.0","id":9,"error":{"code":-32090,`) ||
		!strings.Contains(got.Body, "circuit-open") || s.Count("pay") != 1 {
		t.Errorf("a call while it is open: %s", got.Body)
	}
	// A probe that ends with an internal error closes nothing.
	harness.HalfOpen(t, addr)
	g.Call(harness.Message(harness.ToolCall("1", "broken", "")))
	if now := harness.Circuit(t, addr); now.State == breaker.Closed {
		t.Errorf("after a probe with an internal error: %+v", now)
	}
	harness.HalfOpen(t, addr)
	g.Call(harness.Message(harness.ToolCall("1", "fail", "")))
	if now := harness.Circuit(t, addr); now.State != breaker.Closed {
		t.Errorf("after a probe that a tool has answered: %+v", now)
	}
}

// With `auto` a breaker reads the answers of those servers only that have shown that they speak MCP: no
// caller of another one can open it by a body that looks like a message.
func TestMessagesThatNobodyHasNamedFeedNoBreaker(t *testing.T) {
	_, addr := harness.NewToolServer(t)
	g := harness.Start(t, "agent_proxy %s {\n breaker {\n consecutive 3\n cooldown 10h\n}\n}", addr)
	for range 4 {
		g.Call(harness.Message(harness.ToolCall("1", "broken", "")))
	}
	if now := harness.Circuit(t, addr); now.Failures != 0 || now.State != breaker.Closed {
		t.Errorf("after internal errors: %+v", now)
	}
}

// What undoes a call of a tool can be a call of another one, in the session of the first.
func TestMessagesAreUndoneByMessages(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: `agent_proxy ` + addr + ` {
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
	saga := g.Saga(a)
	paid := saga.Do(harness.Message(harness.ToolCall("1", "pay", ""), "Mcp-Session-Id", "the first"))
	saga.Back(harness.RollbackBody{Checkpoint: paid.Checkpoint, Reason: "wrong order"}).Want(t, "completed")
	s.Mu.Lock()
	defer s.Mu.Unlock()
	want := `the first {"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"refund","arguments":{"payment":"1","of":"pay"}}}`
	if len(s.Refunds) != 1 || s.Refunds[0] != want || s.Calls["pay"] != 1 {
		t.Errorf("%q", s.Refunds)
	}
}

// Servers may answer with a stream of events as well; its answer has the values of the undo.
func TestMessagesInStreamsAreUndone(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: `agent_proxy ` + addr + ` {
		protocol mcp
		default_undo compensate POST /mcp {
			body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{"payment":{response.json./result/n}}}}}}}` + "`" + `
		}
	}`})
	saga := g.Saga(a)
	made := saga.Do(harness.Message(harness.ToolCall("1", "stream", "")))
	saga.Back(harness.RollbackBody{Checkpoint: made.Checkpoint}).Want(t, "completed")
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if len(s.Refunds) != 1 || !strings.Contains(s.Refunds[0], `{"payment":1}`) {
		t.Errorf("%q", s.Refunds)
	}
}

// P6: an undo that is a message is not done because its status is 200.
func TestMessagesThatUndoAreJudgedByMeaning(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: `agent_proxy ` + addr + ` {
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
		s.Mu.Lock()
		s.Refunded = answer
		s.Mu.Unlock()
		saga := g.Saga(a) // a failed rollback stops its workflow
		doc := saga.Back(harness.RollbackBody{Checkpoint: saga.Do(harness.Message(harness.ToolCall("1", "pay", ""))).Checkpoint})
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
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: `agent_proxy ` + strings.TrimPrefix(server.URL, "http://") + ` {
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
	saga := g.Saga(a)
	paid := saga.Do(harness.Message(harness.ToolCall("1", "pay", ""), "Mcp-Session-Id", "first"))
	mu.Lock()
	session = "" // the server has started anew
	mu.Unlock()
	doc := saga.Back(harness.RollbackBody{Checkpoint: paid.Checkpoint})
	doc.Want(t, "completed")
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
	o := harness.Observed(t)
	s, addr := harness.NewToolServer(t)
	hold := harness.NewGate(t)
	s.Hold = hold
	g := harness.Launch(t, harness.Setup{Global: harness.EveryEvent, Site: fmt.Sprintf(`handle /metrics {
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
		got := g.Call(harness.Message(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":` + id + `,"reason":"timeout"}}`))
		if e := o.Event(); got.Status != 202 || e.Name() != "agent_guard.call_cancelled" || e.Data["passed_on"] != passedOn || e.Data["key"] == nil {
			t.Errorf("%d, %s %v", got.Status, e.Name(), e.Data)
		}
		s.Mu.Lock()
		defer s.Mu.Unlock()
		if !slices.Equal(s.Cancelled, heard) {
			t.Errorf("the upstream has heard of %q", s.Cancelled)
		}
	}
	first := g.Begin(harness.Message(harness.ToolCall("3", "pay", "")))
	<-hold.Arrived
	cancel("3", true, "3")
	retry := g.Begin(harness.Message(harness.ToolCall(`"four"`, "pay", "")))
	if e := o.Event(); e.Name() != "agent_guard.call_recognized" || e.Data["evidence"] != "unanswered" {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
	harness.Followers(t, 1)
	cancel(`"four"`, false, "3")
	last := g.Begin(harness.Message(harness.ToolCall("5", "pay", "")))
	o.Event()
	harness.Followers(t, 2)
	hold.Open()
	for id, p := range map[string]*harness.Pending{"3": first, `"four"`: retry, "5": last} {
		if got := p.Answer(); got.Status != 200 || !strings.Contains(got.Body, `"id":`+id+`,"result"`) {
			t.Errorf("%s: %d %s", id, got.Status, got.Body)
		}
	}
	if n := s.Count("pay"); n != 1 {
		t.Errorf("it was executed %d times", n)
	}
	samples := g.Samples("/metrics")
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
		s, addr := harness.NewToolServer(t)
		g := harness.Start(t, "agent_proxy %s {\n protocol %s\n}", addr, protocol)
		step := func(answers string) harness.Request {
			if i >= 2 { // its key is in the header
				r := harness.Message(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{}` + answers + `}}`)
				r.Id = "a"
				return r
			}
			return harness.Message(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{}` + answers + `,"_meta":{"execution-id":"a"}}}`)
		}
		for i, c := range []struct{ answers, status, n string }{
			{"", "executed", "1"}, {`,"requestState":"1"`, "executed", "2"}, {`,"inputResponses":{"a":1},"requestState":"1"`, "executed", "3"},
			{`,"requestState":"1"`, "replayed", "2"}, {"", "replayed", "1"}, {`,"requestState":"1","inputResponses":{"a":1}`, "replayed", "3"},
			{`,"inputResponses":{"a":2},"requestState":"1"`, "executed", "4"},
		} {
			if got := g.GuardedAs(fmt.Sprint(protocol, " ", i), step(c.answers), c.status); !strings.Contains(got.Body, `"n":`+c.n+`}`) {
				t.Errorf("%s %d: %s, want the answer %s", protocol, i, got.Body, c.n)
			}
		}
		if s.Count("pay") != 4 {
			t.Errorf("%s: %d payments", protocol, s.Count("pay"))
		}
	}
}

// With `protocol none` a message is a request as any other, whatever its server is.
func TestMessagesWithoutProtocol(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	g := harness.Start(t, "agent_proxy %s {\n protocol none\n}", strings.TrimPrefix(server.URL, "http://"))
	g.GuardedAs("the first", harness.Hello(harness.Initializes), "executed")
	g.GuardedAs("a ping", harness.Message(harness.Ping(1)), "executed")
	g.GuardedAs("a key in the message", harness.Message(harness.ToolCall("4", "pay", `,"_meta":{"execution-id":"k"}`)), "executed")
	g.GuardedAs("again", harness.Message(harness.ToolCall("4", "pay", `,"_meta":{"execution-id":"k"}`)), "executed")
}

// P1, P2: a site that knows nothing of agents sees no difference between `protocol none` and the default:
// the same bytes arrive and come back, and what was recorded before a reload is found after it.
func TestPlainSitesWithTheDefaultProtocol(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/v1", func(w http.ResponseWriter, a *harness.Arrival) {
		seen := a.Header.Clone()
		for _, name := range []string{"Idempotency-Key", "Execution-Parent", "X-Forwarded-Host"} { // of one gateway and call
			seen.Del(name)
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Etag", `"1"`)
		_ = json.NewEncoder(w).Encode(map[string]any{
			"uri": a.RequestURI, "length": a.ContentLength, "coding": a.TransferEncoding, "header": seen, "body": a.Body, "trailer": a.Trailer,
		})
	})
	long := strings.Repeat("long ", 1<<16)
	bodies := map[string]harness.Request{
		"an object":                {Body: `{"amount":1}`},
		"names of messages":        {Body: `{"id":1,"method":"card","params":{"a":1},"amount":1}`},
		"a message but for a name": {Body: `{"jsonrpc":"2.0","id":1,"method":"ping","amount":1}`},
		"another version":          {Body: `{"jsonrpc":"1.0","id":1,"method":"ping"}`},
		"a key beside":             {Body: `{"_meta":{"execution-id":"x"},"amount":1}`},
		"white space":              {Body: " \r\n\t{ \"amount\" : 1 } "},
		"an array":                 {Body: `[{"amount":1},{"id":2}]`},
		"nothing in it":            {Body: `{}`}, "a text": {Body: `"a"`}, "a number": {Body: `1`}, "no JSON": {Body: `{"id":`}, "no JSON at all": {Body: "amount"},
		"an odd first name":   {Body: `{"\u0069d":1,"amount":2}`},
		"long":                {Body: `{"amount":"` + long + `"}`},
		"long, late":          {Body: `{"params":"` + long + `","amount":1}`},
		"chunked":             {Reader: slowly(`{"amount":1}`), Body: `{"amount":1}`},
		"chunked and long":    {Reader: slowly(`{"id":"` + long + `","a":1}`), Body: `{"id":"` + long + `","a":1}`, Trailer: http.Header{"X-Sum": {"1"}}},
		"chunked and unclear": {Reader: slowly(`{"id":1,"params":"` + long + `"}`), Body: `{"id":1,"params":"` + long + `"}`},
		"a session":           {Body: `{"amount":1}`, Header: map[string]string{"Mcp-Session-Id": "s", "Authorization": "Bearer a"}},
		"a tree":              {Body: `{"a":1}`, Header: map[string]string{"Content-Type": "application/vnd.api+json; charset=utf-8"}},
		"a form":              {Body: `a=1`, Header: map[string]string{"Content-Type": "application/x-www-form-urlencoded"}},
		"a put":               {Method: "PUT", Body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`},
		"compressed":          {Body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`, Header: map[string]string{"Content-Encoding": "gzip"}},
		"expecting":           {Body: `{"amount":1}`, Header: map[string]string{"Expect": "100-continue"}},
	}
	g := harness.Start(t, "agent_proxy %s {\n protocol none\n}", u.Addr)
	send := func(name, key string) string {
		r := bodies[name]
		if again, ok := r.Reader.(*slowReader); ok {
			r.Reader = slowly(again.text)
		}
		r.Path, r.Id = "/v1?q=1", key+strings.ReplaceAll(name, " ", "-")
		got := g.Call(r)
		for _, own := range []string{"Date", "Execution-Id", "Execution-Status", "Idempotent-Replayed"} {
			got.Header.Del(own)
		}
		return fmt.Sprint(got.Status, got.Header, got.Trailer, got.Length, got.Body)
	}
	before := map[string]string{}
	for name := range bodies {
		before[name] = send(name, "")
	}
	seen := u.Total()
	g.Reload("agent_proxy " + u.Addr)
	for name := range bodies {
		if after := send(name, ""); after != before[name] {
			t.Errorf("%s is not replayed after a reload:\n%.300s\nwas\n%.300s", name, after, before[name])
		}
	}
	if u.Total() != seen {
		t.Errorf("%d calls ran again after a reload", u.Total()-seen)
	}
	for name := range bodies {
		if after := send(name, "new-"); after != before[name] {
			t.Errorf("%s:\n%.300s\nwas\n%.300s", name, after, before[name])
		}
	}
	if u.Total() != 2*seen {
		t.Errorf("%d calls arrived, want %d", u.Total(), 2*seen)
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
	g := harness.Start(t, "agent_proxy %s {\n protocol none\n}", addr)
	call := harness.Message(harness.ToolCall("4", "pay", ""), "Idempotency-Key", "k", "Authorization", "Bearer a")
	g.GuardedAs("before", call, "executed")
	g.Reload("agent_proxy " + addr)
	got := g.Call(call)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pays != 1 || got.Header.Get("Execution-Status") == "executed" {
		t.Errorf("it ran again: %s %s", got.Header.Get("Execution-Status"), got.Body)
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
			hold := harness.NewGate(t)
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
					hold.Pass()
				}
				if !final {
					_, _ = io.WriteString(w, answer)
				}
			}))
			t.Cleanup(server.Close)
			t.Cleanup(hold.Open)
			g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n protocol mcp\n missing_id recognize\n breaker off\n}", strings.TrimPrefix(server.URL, "http://"))
			known := harness.Left.Load()
			leaving, leave := harness.WithCancel(g.Build(harness.Message(harness.ToolCall("1", "pay", ""), harness.Leaver, "yes")))
			defer leave()
			res, err := g.Client.Do(leaving)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(res.Body).ReadString('}'); err != nil { // the event is there
				t.Fatal(err)
			}
			leave()
			harness.Eventually(t, "the gateway knows that the client has left", func() bool { return harness.Left.Load() == known+1 })
			if final {
				if got := g.Call(harness.Message(harness.ToolCall("1", "pay", ""))); !strings.Contains(got.Body, `"n":2`) {
					t.Errorf("the same call, meant again while the stream of the first is open: %s", got.Body)
				}
			}
			hold.Open()
			harness.Idle(t)
			want := `"n":1`
			if final {
				want = `"n":3`
			}
			if got := g.Call(harness.Message(harness.ToolCall("1", "pay", ""))); !strings.Contains(got.Body, want) {
				t.Errorf("the same call, once the first has ended: %s, want %s", got.Body, want)
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

// With auto, a server has to show that it speaks MCP before a message that changes nothing passes.
func TestProtocolIsProven(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	addr := strings.TrimPrefix(server.URL, "http://")
	site := "agent_proxy " + addr // auto is the default
	g := harness.Start(t, "%s", site)

	g.GuardedAs("before a proof", harness.Message(harness.Ping(1)), "executed")
	s.mu.Lock()
	s.lose = true // which makes an equal call a retry, but for this one
	s.mu.Unlock()
	g.GuardedAs("whose answer is lost", harness.Hello(harness.Initializes), "in_doubt")
	a := g.GuardedAs("the first message", harness.Hello(harness.Initializes), "executed")
	if b := g.GuardedAs("of another client", harness.Hello(harness.Initializes), ""); a.Body != b.Body || a.Header.Get("Mcp-Session-Id") == b.Header.Get("Mcp-Session-Id") {
		t.Errorf("two clients have one session: %s", b.Header.Get("Mcp-Session-Id"))
	}
	g.GuardedAs("after it", harness.Message(harness.Ping(1)), "")
	g.GuardedAs("in another session", harness.Message(harness.Ping(2), "Mcp-Session-Id", "b"), "")
	g.GuardedAs("a list", harness.Message(`{"jsonrpc":"2.0","id":3,"method":"tools/list"}`), "")
	g.GuardedAs("a tool", harness.Message(harness.ToolCall("4", "pay", "")), "executed")
	g.GuardedAs("an unknown method", harness.Message(`{"jsonrpc":"2.0","id":5,"method":"pay"}`), "executed")
	end := harness.Message("")
	end.Method = "DELETE"
	g.GuardedAs("DELETE", end, "executed")

	// What goes another way may come to another server.
	for what, header := range map[string][]string{"another host": {"Host", "other"}, "a field": {"X-Tenant", "b"}, "a credential": {"Authorization", "Bearer b"}} {
		r := harness.Message(harness.Ping(1), header...)
		if header[0] == "Host" {
			delete(r.Header, "Host")
			r.Host = header[1]
		}
		g.GuardedAs(what, r, "executed")
	}
	elsewhere := harness.Message(harness.Ping(1))
	elsewhere.Path = "/other"
	g.GuardedAs("another path", elsewhere, "executed")

	// Not executed, says the answer, and only now that counts.
	g.GuardedAs("an unknown tool before a proof", harness.Message(harness.ToolCall("6", "none", `,"_meta":{"execution-id":"k"}`), "X-Tenant", "b"), "executed")
	g.GuardedAs("its retry before a proof", harness.Message(harness.ToolCall("7", "none", `,"_meta":{"execution-id":"k"}`), "X-Tenant", "b"), "replayed")
	g.GuardedAs("an unknown tool", harness.Message(harness.ToolCall("6", "none", `,"_meta":{"execution-id":"k2"}`)), "executed")
	g.GuardedAs("again", harness.Message(harness.ToolCall("7", "none", `,"_meta":{"execution-id":"k2"}`)), "executed")

	g.Reload(site + "\n# anew")
	g.GuardedAs("after a reload", harness.Message(harness.Ping(1)), "executed")
	g.GuardedAs("a tool after a reload", harness.Message(harness.ToolCall("8", "none", `,"_meta":{"execution-id":"l"}`)), "executed")
	if b := g.GuardedAs("its retry", harness.Message(harness.ToolCall("9", "none", `,"_meta":{"execution-id":"l"}`)), "replayed"); !strings.Contains(b.Body, `"id":9`) {
		t.Errorf("the id of the one that asks is missing: %s", b.Body)
	}
	g.GuardedAs("a list proves it again", harness.Message(`{"jsonrpc":"2.0","id":3,"method":"tools/list"}`), "executed")
	g.GuardedAs("so this passes", harness.Message(harness.Ping(1)), "")

	for what, change := range map[string]func(bool){
		"plain": func(is bool) { s.plain = is }, "empty": func(is bool) { s.empty = is },
	} {
		for _, status := range []string{"", "in_doubt"} {
			r := harness.Message(harness.Ping(1))
			if status != "" {
				r = harness.Message(harness.ToolCall("1", "pay", ""), "Idempotency-Key", what)
			}
			s.mu.Lock()
			change(true)
			s.mu.Unlock()
			if status != "" {
				g.Call(r)
			} else {
				g.GuardedAs(what, r, status)
			}
			g.GuardedAs(what+" shows", harness.Message(harness.Ping(1)), "executed")
			s.mu.Lock()
			change(false)
			s.mu.Unlock()
			g.GuardedAs("a proof", harness.Hello(harness.Initializes), "executed")
			g.GuardedAs("passes", harness.Message(harness.Ping(1)), "")
		}
	}
}

// With auto, a body that cannot be read is refused as that of any other call, and logs can show it.
func TestUnreadBodiesWithAuto(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	g := harness.Start(t, "header >X-Problem {http.agent_guard.problem}\nagent_proxy %s {\n protocol auto\n max_body 10\n}", strings.TrimPrefix(server.URL, "http://"))
	if a := g.Call(harness.Message(harness.Ping(1))); a.Status != http.StatusRequestEntityTooLarge || a.Header.Get("X-Problem") != "body-too-large" || s.seen != 0 {
		t.Errorf("%d, problem %q, seen %d: %s", a.Status, a.Header.Get("X-Problem"), s.seen, a.Body)
	}
}

// Who names himself MCP finds no way around the guard of a server of another kind, not even of one that
// gives back what it was sent.
func TestProtocolIsNotTheCallersWord(t *testing.T) {
	s := new(sessionServer)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	addr := strings.TrimPrefix(server.URL, "http://")
	crafted := strings.Replace(harness.Initializes, "clientInfo", "serverInfo", 1)
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
			g := harness.Start(t, c.site, addr)
			for range 2 {
				g.GuardedAs("initialize", harness.Hello(harness.Initializes), "executed")
				g.GuardedAs("a crafted one", harness.Hello(crafted), "executed")
				g.GuardedAs("in a field", harness.Hello(harness.Initializes, "X-A", `{"serverInfo":{"name":"s"}}`), "executed")
				g.GuardedAs("ping", harness.Message(harness.Ping(1)), "executed")
				g.GuardedAs("a batch", harness.Message("["+harness.Ping(1)+"]"), "executed")
				g.GuardedAs("a list", harness.Message(`{"jsonrpc":"2.0","id":3,"method":"tools/list"}`), "executed")
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
func (f *a2aForm) to(method, id, message, text string) harness.Request {
	body := `{"message":{"messageId":"` + message + `","role":"ROLE_USER","parts":[{"text":"` + text + `"}]}}`
	r := harness.Request{Path: method, Body: body, Header: map[string]string{"Content-Type": "application/json", "Authorization": "Bearer ada"}}
	if !f.rest() {
		r.Path, r.Body = "/agent", `{"jsonrpc":"2.0","id":`+id+`,"method":"`+method+`","params":`+body+`}`
	}
	if f.header != "" {
		r.Header["A2A-Version"] = f.header
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
				u := harness.NewUpstream(t)
				var mu sync.Mutex
				effects, hold := map[string]int{}, harness.NewGate(t)
				t.Cleanup(hold.Open)
				serve := func(w http.ResponseWriter, a *harness.Arrival) {
					id := "null"
					if _, rest, ok := strings.Cut(a.Body, `"id":`); ok {
						id = rest[:strings.IndexAny(rest, ",}")]
					}
					_, rest, _ := strings.Cut(a.Body, `"text":"`)
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
						hold.Pass()
						event(f.final)
					case "cut":
						event(f.working)
					default:
						w.Header().Set("Content-Type", "application/json")
						_, _ = io.WriteString(w, f.result(id, fmt.Sprintf(`{"message":{"parts":[]},"n":%d}`, n)))
					}
				}
				for _, path := range []string{"/agent", "/message:send", "/message:stream", "/tasks/t"} {
					u.On(path, serve)
				}
				g := harness.Start(t, "agent_proxy %s {\n protocol %s\n breaker off\n}", u.Addr, protocol)

				g.Call(f.to(f.send, "1", "m1", "pay")).Want(t, 200, f.result("1", `{"message":{"parts":[]},"n":1}`), "executed")
				g.Call(f.to(f.send, `"x"`, "m1", "pay")).Want(t, 200, f.result(`"x"`, `{"message":{"parts":[]},"n":1}`), "replayed")
				g.Call(f.to(f.send, "1", "m2", "pay")).Want(t, 200, f.result("1", `{"message":{"parts":[]},"n":2}`), "executed")

				problem := func(what, id, slug string, status int, got harness.Reply) {
					t.Helper()
					if f.rest() {
						got.Problem(t, status, slug)
					} else if got.Status != 200 || !strings.HasPrefix(got.Body, `{"jsonrpc":"2.0","id":`+id+`,"error":{"code":-32090,`) || !strings.Contains(got.Body, "/problems/"+slug) {
						t.Errorf("%s: %d %s", what, got.Status, got.Body)
					}
				}
				problem("the id of another message", "4", "fingerprint-mismatch", 422, g.Call(f.to(f.send, "4", "m1", "other")))
				for _, id := range []string{"5", `"six"`} {
					problem("a lost answer", id, "in-doubt", 409, g.Call(f.to(f.send, id, "m3", "lose")))
				}

				first := g.Begin(f.to(f.stream, "7", "m4", "stream"))
				harness.Wait(t, hold.Arrived, "the stream")
				second := g.Begin(f.to(f.stream, `"eight"`, "m4", "stream"))
				harness.Followers(t, 1)
				hold.Open()
				events := func(id string) string {
					return "data: " + f.result(id, f.working) + "\n\ndata: " + f.result(id, f.final) + "\n\n"
				}
				first.Answer().Want(t, 200, events("7"), "executed")
				second.Answer().Want(t, 200, events(`"eight"`), "attached")
				g.Call(f.to(f.stream, "9", "m4", "stream")).Want(t, 200, events("9"), "replayed")

				want := map[string]int{"pay": 2, "lose": 1, "stream": 1}
				if protocol == "a2a" {
					g.Call(f.to(f.stream, "1", "m5", "cut"))
					problem("a stream without its final event", "2", "in-doubt", 409, g.Call(f.to(f.stream, "2", "m5", "cut")))
					want["cut"] = 1
					if f.rest() {
						g.Call(harness.Request{Method: http.MethodGet, Path: "/tasks/t"}).Passed(t, 200)
					} else {
						g.Call(harness.Request{Path: "/agent", Body: `{"jsonrpc":"2.0","id":3,"method":"tasks/get","params":{"id":"t"}}`, Header: map[string]string{"Content-Type": "application/json"}}).Passed(t, 200)
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
			u := harness.NewUpstream(t)
			u.On("/mcp", func(w http.ResponseWriter, a *harness.Arrival) {
				_, rest, _ := strings.Cut(a.Body, `"id":`)
				id := rest[:strings.IndexAny(rest, ",}")]
				w.Header().Set("Content-Type", "text/event-stream")
				w.Header().Set("X-Accel-Buffering", "no")
				result := `{"resultType":"complete"}`
				if strings.Contains(a.Body, `"tools/list"`) {
					result = `{"tools":[{"name":"get","inputSchema":{},"annotations":{"readOnlyHint":true}},{"name":"look","inputSchema":{},"annotations":{"readOnlyHint":true}}]}`
				}
				_, _ = fmt.Fprintf(w, "id: 1\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":%s}\n\n", id, result)
			})
			g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n exempt tool peek\n consequential tool look\n}", u.Addr)
			send := func(id, method, tool, more string) harness.Request {
				body := `{"jsonrpc":"2.0","id":` + id + `,"method":"` + method + `","params":{}}`
				if tool != "" {
					body = harness.ToolCall(id, tool, more)
				}
				r := harness.Message(body)
				delete(r.Header, "Mcp-Session-Id")
				delete(r.Header, "Mcp-Protocol-Version")
				if c.session != "" {
					r.Header["Mcp-Session-Id"] = c.session
				}
				if c.version != "" {
					r.Header["Mcp-Protocol-Version"] = c.version
				}
				if c.mirrors {
					r.Header["Mcp-Method"] = method
					if tool != "" {
						r.Header["Mcp-Name"], r.Header["Mcp-Param-Region"] = tool, "eu"
					}
				}
				return r
			}
			for _, method := range []string{c.opens, "ping", "tools/list", "resources/read", "prompts/get"} {
				g.Call(send("1", method, "", "")).Passed(t, 200)
			}
			g.Call(send("1", "tools/call", "peek", "")).Passed(t, 200)
			g.Call(send("1", "tools/call", "get", "")).Passed(t, 200) // by its server's word
			if got := g.Call(send("1", "tools/call", "look", "")); got.Header.Get("Execution-Status") != "executed" {
				t.Errorf("the operator's word does not go first: %v", got.Header)
			}
			first := g.Call(send("3", "tools/call", "pay", harness.KeyA))
			if !strings.Contains(first.Body, `"id":3,`) || first.Header.Get("Execution-Status") != "executed" || first.Header.Get("X-Accel-Buffering") != "no" {
				t.Errorf("%v %q", first.Header, first.Body)
			}
			in := u.Last("/mcp")
			for name, value := range send("3", "tools/call", "pay", harness.KeyA).Header {
				if strings.HasPrefix(name, "Mcp-") && in.Header.Get(name) != value {
					t.Errorf("%s came as %q, not %q", name, in.Header.Get(name), value)
				}
			}
			n := u.Total()
			again := g.Call(send(`"four"`, "tools/call", "pay", harness.KeyA))
			if !strings.Contains(again.Body, `"id":"four",`) || strings.Contains(again.Body, "id: 1") || again.Header.Get("Execution-Status") != "replayed" || u.Total() != n {
				t.Errorf("%v %q, %d calls", again.Header, again.Body, u.Total()-n)
			}
		})
	}
}
