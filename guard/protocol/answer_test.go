package protocol_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

const (
	asJSON   = "application/json"
	asStream = "text/event-stream; charset=utf-8"
)

func outcome(p protocol.Protocol, contentType, body string) protocol.Outcome {
	a := protocol.NewAnswer(p, contentType, nil)
	_, _ = io.WriteString(a, body)
	return a.End()
}

// What an answer means: isError is executed, protocol errors are not, -32603 is like a 500, and a
// stream without its final answer is no answer.
func TestMeaning(t *testing.T) {
	for _, c := range []struct {
		protocol protocol.Protocol
		body     string
		want     protocol.Outcome
	}{
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"result":{"content":[]}}`, protocol.Outcome{Meaning: protocol.Executed}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"result":{"content":[{"error":{"code":-32602}}],"isError":true}}`, protocol.Outcome{Meaning: protocol.Executed, ToolError: true}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"Unknown tool"}}`, protocol.Outcome{Meaning: protocol.Executed, Code: -32602}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"Method not found"}}`, protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32601}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":""}}`, protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32020}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32042,"message":""}}`, protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32042, Step: true}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":""}}`, protocol.Outcome{Meaning: protocol.Failed, Code: -32603}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"message":"","code":-32001}}`, protocol.Outcome{Meaning: protocol.Failed, Code: -32001}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":5,"message":"no money"}}`, protocol.Outcome{Meaning: protocol.Executed, Code: 5}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32090,"data":{"type":"/x/.well-known/cascade/problems/in-doubt","status":409}}}`, protocol.Outcome{Meaning: protocol.Doubtful, Code: -32090, Status: 409}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32090,"data":{"type":"/.well-known/cascade/problems/store-unavailable","status":503}}}`, protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32090, Status: 503}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":-32090,"data":{"status":503}}}`, protocol.Outcome{Meaning: protocol.Failed, Code: -32090, Status: 503}}, // a server's own code
		// A name with a dot in it, and an empty one, are no path.
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error.code":-32601,"error":{"code":5,"message":""}}`, protocol.Outcome{Meaning: protocol.Executed, Code: 5}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"error":{"code":5,"message":""},"error\u002ecode":-32601}`, protocol.Outcome{Meaning: protocol.Executed, Code: 5}},
		// After a sign of its execution no error says that there was none, and after a result none counts.
		{protocol.MCP, "data: {\"method\":\"notifications/progress\"}\n\ndata: {\"error\":{\"code\":-32601}}\n\n", protocol.Outcome{Meaning: protocol.Failed, Code: -32601}},
		{protocol.A2A, "data: {\"result\":{\"status\":{\"state\":\"working\"}}}\n\ndata: {\"error\":{\"code\":-32004}}\n\n", protocol.Outcome{Meaning: protocol.Failed, Code: -32004}},
		{protocol.MCP, "data: {\"result\":{}}\n\ndata: {\"error\":{\"code\":-32601}}\n\n", protocol.Outcome{Meaning: protocol.Executed}},
		{protocol.MCP, "data: {\"method\":\"notifications/progress\"}\n\ndata: {\"error\":{\"code\":-32042}}\n\n", protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32042, Step: true}},
		{protocol.A2A, `{"jsonrpc":"2.0","id":1,"error":{"code":-32001}}`, protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32001}},
		{protocol.A2A, `{"jsonrpc":"2.0","id":1,"error":{"code":-32006}}`, protocol.Outcome{Meaning: protocol.Failed, Code: -32006}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"result":{"resultType":"input_required","inputRequests":{}}}`, protocol.Outcome{Meaning: protocol.Executed, Step: true}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"result":{"task":{"taskId":"t9","status":"working"}}}`, protocol.Outcome{Meaning: protocol.Executed, Task: "t9", State: "working"}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"result":{"resultType":"task","taskId":"t9"}}`, protocol.Outcome{Meaning: protocol.Executed, Task: "t9"}},
		{protocol.A2A, `{"jsonrpc":"2.0","id":1,"result":{"kind":"task","id":"t9","status":{"state":"working"}}}`, protocol.Outcome{Meaning: protocol.Executed, Task: "t9", State: "working"}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"result":{"a":"` + strings.Repeat("x", 5000) + `"},"id":1}`, protocol.Outcome{Meaning: protocol.Executed}},
		{protocol.MCP, `{"jsonrpc":"2.0","id":1,"method":"ping"}`, protocol.Outcome{}},
		{protocol.MCP, ``, protocol.Outcome{}}, {protocol.MCP, `<html>`, protocol.Outcome{}}, {protocol.MCP, `]]`, protocol.Outcome{}},
		{protocol.MCP, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\n", protocol.Outcome{}},
		{protocol.MCP, "id: 1\ndata:\n\n", protocol.Outcome{Resumable: true}},
		{protocol.MCP, "data:\r\nid:1\r\n\r\n: alive\r\n", protocol.Outcome{Resumable: true}},
		{protocol.MCP, "id: 1\ndata: {\"method\":\"ping\"}\n\ndata:\n\n", protocol.Outcome{Resumable: true}}, // its last id stays
		// Its client has no id, or the end of an event is missing.
		{protocol.MCP, "data:\n\n", protocol.Outcome{}},
		{protocol.MCP, "id:\ndata:\n\n", protocol.Outcome{}},
		{protocol.MCP, "id: 1\n\nid\n\n", protocol.Outcome{}},
		{protocol.MCP, "id: 1\ndata:\n", protocol.Outcome{}},
		{protocol.MCP, "id: 1\ndata:\n\nda", protocol.Outcome{}},
		{protocol.MCP, "id: 1\ndata:\n\nretry: 1\n", protocol.Outcome{}},
		{protocol.MCP, "event: message\ndata: {\"jsonrpc\":\"2.0\",\ndata: \"id\":1,\"result\":{}}\n\n", protocol.Outcome{Meaning: protocol.Executed}},
		{protocol.MCP, "event: message\r\ndata: {\"jsonrpc\":\"2.0\",\r\ndata:\"id\":1,\"error\":{\"code\":-32601\r\ndata:}}\r\n\r\n", protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32601}},
		{protocol.MCP, "\ufeffdata: {\"result\":{}}\r\r", protocol.Outcome{Meaning: protocol.Executed}},
		{protocol.MCP, "data: {\"result\":{}}\n", protocol.Outcome{}}, // no client has seen it
		{protocol.MCP, ": data: {\"result\":{}}\n\n", protocol.Outcome{}},
		{protocol.A2A, "data: {\"result\":{\"kind\":\"task\",\"id\":\"t\",\"status\":{\"state\":\"working\"}}}\n\n", protocol.Outcome{Task: "t", State: "working"}},
		{protocol.A2A, "data: {\"result\":{\"kind\":\"status-update\",\"final\":true}}\n\n", protocol.Outcome{Meaning: protocol.Executed}},
		{protocol.A2A, "data: {\"result\":{\"statusUpdate\":{\"status\":{\"state\":\"TASK_STATE_INPUT_REQUIRED\"}}}}\n\n", protocol.Outcome{Meaning: protocol.Executed, State: "input-required"}},
		{protocol.A2A, "data: {\"result\":{\"message\":{\"parts\":[]}}}\n\n", protocol.Outcome{Meaning: protocol.Executed}},
	} {
		as := asJSON
		if !strings.HasPrefix(c.body, "{") && len(c.body) > 6 {
			as = asStream
		}
		if got := outcome(c.protocol, as, c.body); got != c.want {
			t.Errorf("%s %.200s: %+v", c.protocol, c.body, got)
		}
	}
}

func TestJudge(t *testing.T) {
	mcp, a2a := &protocol.Message{Protocol: protocol.MCP}, &protocol.Message{Protocol: protocol.A2A}
	for _, c := range []struct {
		m      *protocol.Message
		status int
		said   protocol.Meaning
		want   protocol.Meaning
	}{
		{mcp, http.StatusNotFound, protocol.Unanswered, protocol.NotExecuted}, // its session has ended
		{mcp, http.StatusBadRequest, protocol.Failed, protocol.NotExecuted},
		{mcp, http.StatusBadRequest, protocol.Executed, protocol.Executed},
		{mcp, http.StatusOK, protocol.Unanswered, protocol.Unanswered},
		{mcp, http.StatusBadGateway, protocol.Unanswered, protocol.Unanswered},
		{a2a, http.StatusNotFound, protocol.Unanswered, protocol.Unanswered},
	} {
		if got := protocol.Judge(c.m, c.status, protocol.Outcome{Meaning: c.said}); got.Meaning != c.want {
			t.Errorf("%s, status %d, %d: %d", c.m.Protocol, c.status, c.said, got.Meaning)
		}
	}
}

// A whole answer counts only where it is certainly the answer to the message.
func TestOutcome(t *testing.T) {
	asked := func(p protocol.Protocol, path, body string) *protocol.Message {
		q, ok := (&protocol.Rules{Protocol: p}).Parse(http.Header{}, path, []byte(body))
		if !ok {
			t.Fatalf("%s is no message", body)
		}
		return &q[0]
	}
	call := asked(protocol.MCP, "/mcp", `{"jsonrpc":"2.0","id":"a\u0031","method":"tools/call","params":{"name":"refund"}}`)
	send := asked(protocol.A2A, "/", `{"jsonrpc":"2.0","id":1,"method":"message/send","params":{}}`)
	rest := asked(protocol.A2A, "/message:send", `{"message":{}}`)
	plain := asked(protocol.JSONRPC, "/", `{"jsonrpc":"2.0","id":1,"method":"refund"}`)
	for _, c := range []struct {
		m        *protocol.Message
		as, body string
		want     protocol.Outcome
	}{
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"content":[]}}`, protocol.Outcome{Meaning: protocol.Executed}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"content":[],"isError":false}}`, protocol.Outcome{Meaning: protocol.Executed}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"content":[],"IsError":true}}`, protocol.Outcome{Meaning: protocol.Executed, ToolError: true}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"isError":true,"isError":false}}`, protocol.Outcome{Meaning: protocol.Executed, ToolError: true}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"isError":"true"}}`, protocol.Outcome{Meaning: protocol.Executed, ToolError: true}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"isError":{}}}`, protocol.Outcome{Meaning: protocol.Executed, ToolError: true}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"structuredContent":{"status":"FAILED"}}}`, protocol.Outcome{Meaning: protocol.Executed, State: "failed"}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"protocolVersion":"2025-06-18"}}`, protocol.Outcome{Meaning: protocol.Executed, Version: "2025-06-18"}},
		{call, asStream, "data: {\"id\":\"a1\",\"result\":{}}\n\n", protocol.Outcome{Meaning: protocol.Executed}},
		// What another one is told, what is cut, and what says two things, is no answer.
		{call, asJSON, `{"jsonrpc":"2.0","id":"a2","result":{"content":[]}}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","result":{"content":[]}}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"content":[]}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{"content":[]}}}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":null}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":true}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","result":{},"error":{"code":-32601}}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","error":"no","result":{}}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","error":"no"}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","error":{}}`, protocol.Outcome{}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a1","error":null}`, protocol.Outcome{}},
		{call, asJSON, `[{"jsonrpc":"2.0","id":"a1","result":{}}]`, protocol.Outcome{}},
		{call, asJSON, ``, protocol.Outcome{}},
		{call, asStream, "data: {\"id\":\"a1\",\"result\":{\n\n", protocol.Outcome{}},
		{call, asStream, "data: {\"id\":\"a1\",\"result\":{}}\n", protocol.Outcome{}},
		{call, asStream, "data: {\"id\":\"b\",\"result\":{}}\n\ndata: {\"id\":\"a1\",\"error\":{\"code\":-32601}}\n\n", protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32601}},
		{call, asJSON, `{"jsonrpc":"2.0","id":null,"error":{"code":-32700}}`, protocol.Outcome{Meaning: protocol.NotExecuted, Code: -32700}},
		{call, asJSON, `{"jsonrpc":"2.0","id":"a2","error":{"code":-32601}}`, protocol.Outcome{}},
		{plain, asJSON, `{"jsonrpc":"2.0","id":1,"result":null}`, protocol.Outcome{Meaning: protocol.Executed}},
		{plain, asJSON, `{"jsonrpc":"2.0","id":1,"error":null,"result":{"id":"re_1","status":"in_progress"}}`, protocol.Outcome{Meaning: protocol.Executed, State: "in-progress"}},
		{send, asJSON, `{"jsonrpc":"2.0","id":1,"result":{"kind":"task","id":"t","status":{"state":"failed"}}}`, protocol.Outcome{Meaning: protocol.Executed, Task: "t", State: "failed"}},
		{send, asStream, "data: {\"id\":1,\"result\":{\"kind\":\"status-update\",\"taskId\":\"t\",\"status\":{\"state\":\"working\"}}}\n\n", protocol.Outcome{Task: "t", State: "working"}},
		{rest, asJSON, `{"task":{"id":"t","status":{"state":"TASK_STATE_COMPLETED"}}}`, protocol.Outcome{Meaning: protocol.Executed, Task: "t", State: "completed"}},
		{rest, asJSON, `{"task":`, protocol.Outcome{}},
		{rest, asStream, "data: {\"task\":{}}\n\n", protocol.Outcome{}},
	} {
		if got := c.m.Outcome(http.StatusOK, c.as, []byte(c.body)); got != c.want {
			t.Errorf("%s %s: %+v", c.m.Method, c.body, got)
		}
	}
	if got := call.Outcome(http.StatusNotFound, "text/plain", []byte("session not found")); got.Meaning != protocol.NotExecuted {
		t.Errorf("404: %+v", got)
	}
}

// A task that its server still has is the answer to the call that has begun it, in the form of its
// method. Anything else says nothing.
func TestTaskAnswer(t *testing.T) {
	read := func(p protocol.Protocol, version, method string) *protocol.Message {
		q, ok := (&protocol.Rules{Protocol: p}).Parse(http.Header{"Mcp-Protocol-Version": {version}}, "/", []byte(`{"jsonrpc":"2.0","id":1,"method":"`+method+`","params":{}}`))
		if !ok {
			t.Fatal(method)
		}
		return &q[0]
	}
	const a2a, mcp = `{"id":"t","status":{"state":"working"}}`, `{"taskId":"t","status":"working"}`
	for _, c := range []struct {
		m                         *protocol.Message
		query, result, answer, as string
	}{
		{read(protocol.A2A, "", "message/send"), `{"id":"task","jsonrpc":"2.0","method":"tasks/get","params":{"id":"t"}}`, a2a, `{"jsonrpc":"2.0","id":"task","result":` + a2a + `}`, asJSON},
		{read(protocol.A2A, "", "message/stream"), `{"id":"task","jsonrpc":"2.0","method":"tasks/get","params":{"id":"t"}}`, a2a, `data: {"jsonrpc":"2.0","id":"task","result":` + a2a + "}\n\n", "text/event-stream"},
		{read(protocol.A2A, "", "SendStreamingMessage"), `{"id":"task","jsonrpc":"2.0","method":"GetTask","params":{"id":"t"}}`, a2a, `data: {"jsonrpc":"2.0","id":"task","result":{"task":` + a2a + "}}\n\n", "text/event-stream"},
		{read(protocol.MCP, "2025-11-25", "tools/call"), `{"id":"task","jsonrpc":"2.0","method":"tasks/get","params":{"taskId":"t"}}`, mcp, `{"jsonrpc":"2.0","id":"task","result":{"task":` + mcp + `}}`, asJSON},
		{read(protocol.MCP, "2026-07-28", "tools/call"), `{"id":"task","jsonrpc":"2.0","method":"tasks/get","params":{"taskId":"t"}}`, mcp, "", ""},
	} {
		text, header := c.m.TaskQuery("t")
		if string(text) != c.query || (header["Mcp-Name"] == "t") != (c.m.Version == "2026-07-28") {
			t.Errorf("%s asks %s %v", c.m.Method, text, header)
		}
		body := "\n{\"jsonrpc\":\"2.0\",\n\"id\":\"task\",\"result\":" + c.result + "}"
		answer, as, known := c.m.TaskAnswer("t", 200, asJSON, []byte(body))
		if string(answer) != c.answer || as != c.as || !known {
			t.Errorf("%s: %q, %s, %v", c.m.Method, answer, as, known)
		}
		for _, other := range []string{`{"jsonrpc":"2.0","id":"task","error":{"code":-32001}}`, `{}`, `{"jsonrpc":"2.0","id":2,"result":` + c.result + `}`, `{"jsonrpc":"2.0","id":"task","result":{}}`} {
			if _, _, known := c.m.TaskAnswer("t", 200, asJSON, []byte(other)); known {
				t.Errorf("%s shows the task", other)
			}
		}
		if _, _, known := c.m.TaskAnswer("t", 500, asJSON, []byte(body)); known {
			t.Error("a 500 shows the task")
		}
		if _, _, known := c.m.TaskAnswer("u", 200, asJSON, []byte(body)); known {
			t.Error("it is another task")
		}
	}
	if text, _ := read(protocol.JSONRPC, "", "pay").TaskQuery("t"); text != nil {
		t.Errorf("generic JSON-RPC asks %s", text)
	}
}

// The event that answers is what a stream says.
func TestFinal(t *testing.T) {
	q, _ := (&protocol.Rules{Protocol: protocol.MCP}).Parse(http.Header{}, "/", []byte(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay"}}`))
	const progress, answer = "data: {\"method\":\"notifications/progress\"}\n\n", `{"jsonrpc":"2.0","id":1,"result":{"n":1}}`
	for body, want := range map[string]string{
		progress + "event: message\nid: 2\ndata: " + answer + "\n\n":     answer,
		"\ufeffdata:" + answer + "\r\n\r\n":                              answer,
		"data: {\"jsonrpc\":\"2.0\",\rdata: \"id\":1,\"result\":{}}\r\r": "{\"jsonrpc\":\"2.0\",\n \"id\":1,\"result\":{}}",
		progress: "", "data: " + answer + "\n": "", "data: {\"id\":2,\"result\":{}}\n\n": "", "": "",
		"data: {\"id\":1,\"error\":{\"code\":-32601}}\n\n": "",
	} {
		if got := string(q[0].Final(asStream, []byte(body))); got != want {
			t.Errorf("%q: %q", body, got)
		}
	}
	if got := q[0].Final(asJSON, []byte(answer)); got != nil {
		t.Errorf("JSON is no stream: %s", got)
	}
}

func TestLearnsTools(t *testing.T) {
	const list = `{"jsonrpc":"2.0","id":1,"result":{"tools":[
		{"name":"get","annotations":{"title":"name","readOnlyHint":true},"inputSchema":{"properties":{"name":{"type":"string"}}}},
		{"annotations":{"readOnlyHint":false},"inputSchema":{"tools":[{"name":"x","annotations":{"readOnlyHint":true}}]},"name":"pay"},
		{"name":"mail"},{"annotations":{"readOnlyHint":true}},{"name":"l\u0069st","annotations":{"readOnly\u0048int":true}}],"nextCursor":"2"}}`
	want := map[string]bool{"get": true, "pay": false, "mail": false, "list": true}
	for as, body := range map[string]string{asJSON: list, asStream: "data: " + strings.ReplaceAll(list, "\n", "\ndata: ") + "\n\n"} {
		got := map[string]bool{}
		a := protocol.NewAnswer(protocol.MCP, as, func(tool string, readOnly bool) { got[tool] = readOnly })
		_, _ = io.WriteString(a, body)
		a.End()
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v", as, got)
		}
	}
}

func reply(as, body, id, progress string, live bool) string {
	r := protocol.Reply{ID: []byte(id), Live: live}
	if progress != "" {
		r.Progress = []byte(progress)
	}
	text, err := io.ReadAll(iotest.OneByteReader(r.Reader(strings.NewReader(body), as)))
	if err != nil {
		panic(err)
	}
	return string(text)
}

// A repeated answer has the id and the progress token of the request that asks, and is byte by byte
// the same otherwise.
func TestReply(t *testing.T) {
	const progress = "event: message\nid: 4\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":\"old\", \"progress\":1}}\n\n"
	long := strings.Repeat(`"id":1,\"`, 20000)
	for _, c := range []struct{ name, as, body, want string }{
		{"id first", asJSON, ` {"jsonrpc":"2.0", "id" : 1 ,"result":{"id":1,"x":[{"id":1}]}} `, ` {"jsonrpc":"2.0", "id" : "new" ,"result":{"id":1,"x":[{"id":1}]}} `},
		{"id last", asJSON, `{"error":{"code":1,"data":{"id":1}},"id":"old"}`, `{"error":{"code":1,"data":{"id":1}},"id":"new"}`},
		{"escaped name", asJSON, `{"\u0069d":1,"result":0}`, `{"\u0069d":"new","result":0}`},
		{"no id known", asJSON, `{"id":null,"error":{}}`, `{"id":null,"error":{}}`},
		{"no message", asJSON, `{"id":1,"name":"x"}`, `{"id":1,"name":"x"}`},
		{"no JSON", asJSON, `<id>1</id>`, `<id>1</id>`},
		{"cut", asJSON, `{"id":1,"result":{"a`, `{"id":"new","result":{"a`},
		{"long", asJSON, `{"result":"` + strings.ReplaceAll(long, `"`, `\"`) + `","id":1}`, `{"result":"` + strings.ReplaceAll(long, `"`, `\"`) + `","id":"new"}`},
		{"priming", asStream, "id: 7\nretry: 5\ndata: \n\ndatabase: 1\n\n: alive\n\ndata: {\"id\":1,\"result\":{}}\n\n", "database: 1\n\n: alive\n\ndata: {\"id\":\"new\",\"result\":{}}\n\n"},
		{"stream", asStream, "event: message\nid: 7\nretry: 5\ndata: {\"id\":1,\"result\":{}}\n\n", "event: message\nretry: 5\ndata: {\"id\":\"new\",\"result\":{}}\n\n"},
		{"lines", asStream, "data: {\"id\":1\r\ndata: ,\"result\":{}}\r\n\r\n: x\r\n\r\nid: 9\r\n\r\n", "data: {\"id\":\"new\"\r\ndata: ,\"result\":{}}\r\n\r\n: x\r\n\r\n\r\n"},
		{"every event", asStream, "data:{\"id\":1,\"result\":1}\n\ndata:{\"result\":2,\"id\":1}\n\n", "data:{\"id\":\"new\",\"result\":1}\n\ndata:{\"result\":2,\"id\":\"new\"}\n\n"},
		{"long event", asStream, "data: {\"result\":[" + strings.Repeat("1,\ndata: ", 20000) + "1],\"id\":1}\n\n", "data: {\"result\":[" + strings.Repeat("1,\ndata: ", 20000) + "1],\"id\":\"new\"}\n\n"},
		{"progress", asStream, progress + "data: {\"id\":1,\"result\":1}\n\n",
			strings.Replace(strings.Replace(progress, `"old"`, `5`, 1), "id: 4\n", "", 1) + "data: {\"id\":\"new\",\"result\":1}\n\n"},
		{"other notification", asStream, "data: {\"method\":\"notifications/message\",\"params\":{\"id\":1}}\n\n", "data: {\"method\":\"notifications/message\",\"params\":{\"id\":1}}\n\n"},
		{"question", asStream, "data: {\"id\":1,\"method\":\"sampling/createMessage\",\"params\":{}}\n\ndata: {\"id\":1,\"result\":1}\n\n", "data: {\"id\":\"new\",\"result\":1}\n\n"},
		{"long question", asStream, "data: {\"id\":1,\"method\":\"sampling/createMessage\",\"params\":[" + strings.Repeat("1,", 90000) + "1]}\n\ndata: {\"id\":1,\"result\":1}\n\n", "data: {\"id\":\"new\",\"result\":1}\n\n"},
		{"no end", asStream, "data: {\"id\":1,\"result\":1}\n\ndat", "data: {\"id\":\"new\",\"result\":1}\n\ndat"},
	} {
		if got := reply(c.as, c.body, `"new"`, "5", false); got != c.want {
			t.Errorf("%s:\n%.300s\nis not\n%.300s", c.name, got, c.want)
		}
	}
	if got := reply(asStream, progress+progress+"data: {\"id\":1,\"result\":1}\n\n", "2", "", false); got != "data: {\"id\":2,\"result\":1}\n\n" {
		t.Errorf("without a progress token: %s", got)
	}
	const question = "data: {\"id\":1,\"method\":\"elicitation/create\"}\n\n"
	if got := reply(asStream, question, "2", "", true); got != question {
		t.Errorf("while it runs the question is %s", got)
	}
}

// What is no JSON and no stream of events is repeated as it is, and the end of an event comes before
// the next one does.
func TestReplyOfOtherAnswers(t *testing.T) {
	const answer = `{"id":1,"result":{}}`
	if got := reply("text/plain", answer, "2", "", false); got != answer {
		t.Errorf("plain text is repeated as %s", got)
	}
	const event = "data: {\"id\":1,\"result\":{}}\r\n\r\n"
	delivered := 0
	live := io.MultiReader(iotest.OneByteReader(strings.NewReader(event)), readFunc(func([]byte) (int, error) {
		if delivered != len(event) {
			t.Errorf("%d of %d bytes have come before the next event", delivered, len(event))
		}
		return 0, io.EOF
	}))
	r := protocol.Reply{ID: []byte("2"), Live: true}.Reader(live, asStream)
	for p := make([]byte, 100); ; {
		n, err := r.Read(p)
		if delivered += n; err != nil {
			return
		}
	}
}

type readFunc func(p []byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// pieces writes body in pieces of random lengths.
func pieces(a io.Writer, body []byte, rnd *rand.Rand) {
	for len(body) > 0 {
		n := 1 + rnd.IntN(min(len(body), 9))
		_, _ = a.Write(body[:n])
		body = body[n:]
	}
}

// An answer means the same in whatever pieces it comes, and what is repeated of it in pieces too.
// A JSON answer is repeated as it is but for its id.
// each lists the messages of an answer.
func each(a *protocol.Answer) *[]string {
	var all []string
	text := ""
	a.Part = func(part []byte) { text += string(part) }
	a.Message = func(id []byte, progress bool, _ protocol.Outcome) {
		all, text = append(all, fmt.Sprintf("%s %t %s", id, progress, text)), ""
	}
	return &all
}

// A stream says which request each of its messages answers, and with what.
func TestMessagesOfAStream(t *testing.T) {
	a := protocol.NewAnswer(protocol.MCP, asStream, nil)
	got := each(a)
	_, _ = io.WriteString(a, "id: 1\ndata: \n\n"+
		"data: {\"result\":{\"id\":2},\"id\":\"a\\u0031\"}\n\n"+
		"data: {\"id\":1,\ndata:\"error\":{\"code\":1}}\n\n"+
		"data: {\"method\":\"notifications/progress\"}\r\r"+
		"data: {\"id\":1,\"method\":\"x\",\"result\":1}\n\ndata: {\"id\":1,\"result\":1\n\ndata: {\"id\":1,\"result\":1,\"error\":{}}\n\ndata: {\"id\":1,\"error\":1}\n\ndata: [{\"id\":1,\"result\":1}]\n\ndata: {\"id\":1,\"result\":1}")
	want := []string{
		" false  ", `"a\u0031" false {"result":{"id":2},"id":"a\u0031"} `, `1 false {"id":1, "error":{"code":1}} `, ` true {"method":"notifications/progress"} `,
		` false {"id":1,"method":"x","result":1} `, ` false {"id":1,"result":1 `, ` false {"id":1,"result":1,"error":{}} `, ` false {"id":1,"error":1} `, ` false [{"id":1,"result":1}] `,
	}
	if !slices.Equal(*got, want) {
		t.Errorf("%q", *got)
	}
	for a, b := range map[string]string{`"a\u0031"`: `"a1"`, `1`: `1`} {
		if protocol.SameID([]byte(a)) != protocol.SameID([]byte(b)) || protocol.SameID([]byte(a)) == protocol.SameID([]byte(`"1"`)) {
			t.Errorf("%s and %s", a, b)
		}
	}
}

func FuzzAnswer(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"a","annotations":{"readOnlyHint":true}}]}}`, `{"error":{"code":-32602},"id":"x"}`, `{"id":1,"id":2,"result":0}`,
		"data: {\"id\":1,\r\ndata: \"result\":{}}\r\n\r\n", "\ufeffid: 1\rdata: {}\r\r: x\n\n", "data: {\"method\":\"notifications/progress\",\"params\":{\"progressToken\":1}}\n\n", "{\"id\"", "data", "[[[", "data:1\n\n", "data: {\"id\n\ndata: \":1}\n\n",
	} {
		f.Add([]byte(s), true, uint64(1))
		f.Add([]byte(s), false, uint64(2))
	}
	f.Fuzz(func(t *testing.T, body []byte, stream bool, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		as := asJSON
		if stream {
			as = asStream
		}
		whole := protocol.NewAnswer(protocol.A2A, as, func(string, bool) {})
		messages := each(whole)
		_, _ = whole.Write(body)
		parts := protocol.NewAnswer(protocol.A2A, as, func(string, bool) {})
		same := each(parts)
		pieces(parts, body, rnd)
		if stream && !slices.Equal(*messages, *same) {
			t.Fatalf("%q: whole %q, in pieces %q", body, *messages, *same)
		}
		if a, b := whole.End(), parts.End(); a != b {
			t.Fatalf("%q: whole %+v, in pieces %+v", body, a, b)
		}
		r := protocol.Reply{ID: []byte(`"new"`), Progress: []byte(`[7]`)}
		want, err := io.ReadAll(r.Reader(bytes.NewReader(body), as))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r.Reader(iotest.OneByteReader(bytes.NewReader(body)), as))
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%q is repeated as %q, in pieces as %q, %v", body, want, got, err)
		}
		var before, after map[string]json.RawMessage
		if stream || json.Unmarshal(body, &before) != nil {
			return
		}
		if err := json.Unmarshal(want, &after); err != nil {
			t.Fatalf("%q is repeated as %q: %v", body, want, err)
		}
		_, result := before["result"]
		_, failed := before["error"]
		for name, value := range before {
			same := bytes.Equal(value, after[name])
			if id := string(after["id"]); name == "id" && (result || failed) && len(before["method"]) == 0 && (value[0] == '"' || value[0] == '-' || '0' <= value[0] && value[0] <= '9') {
				if same = id == `"new"`; len(value) > 1000 {
					continue
				}
			}
			if !same && name != "id" {
				t.Fatalf("%q is repeated as %q", body, want)
			}
		}
	})
}

// Only what no client could have had a server repeat proves that it speaks MCP.
func TestProofs(t *testing.T) {
	const (
		initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c"}}}`
		answer     = `{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s"}}}`
		list       = `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`
		tools      = `{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"pay","inputSchema":{}}]}}`
		js         = "application/json"
	)
	for _, c := range []struct {
		name, body, contentType, answer, sent string
		want                                  bool
	}{
		{"initialize", initialize, js + "; charset=utf-8", answer, "", true},
		{"in a stream", initialize, "text/event-stream", "id: 1\ndata:\n\ndata: " + answer + "\n\n", "", true},
		{"tools", list, js, tools, "", true},
		{"no media type", initialize, "", answer, "", false},
		{"text", initialize, "text/plain", answer, "", false},
		{"another id", initialize, js, strings.Replace(answer, `"id":1`, `"id":2`, 1), "", false},
		{"the id as a string", initialize, js, strings.Replace(answer, `"id":1`, `"id":"1"`, 1), "", false},
		{"another version", initialize, js, strings.Replace(answer, `2.0`, `1.0`, 1), "", false},
		{"the request", initialize, js, initialize, "", false},
		{"its parameters", initialize, js, `{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c"}}}`, "", false},
		{"parameters like the answer", strings.Replace(initialize, "clientInfo", "serverInfo", 1), js, answer, "", false},
		{"escaped", strings.Replace(initialize, "clientInfo", `\u0073erverInfo`, 1), js, answer, "", false},
		{"a field like the answer", initialize, js, answer, answer, false},
		{"an escaped field", initialize, js, answer, `\u0073erverInfo`, false},
		{"an error", initialize, js, `{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"m"}}`, "", false},
		{"cut", initialize, js, answer[:len(answer)-1], "", false},
		{"a further id", initialize, js, strings.Replace(answer, `"id":1`, `"ID":1,"id":1`, 1), "", false},
		{"no tools", list, js, `{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}`, "", false},
		{"tools without a schema", list, js, strings.Replace(tools, "inputSchema", "schema", 1), "", false},
		{"one without a name", list, js, strings.Replace(tools, "}]", `},{"inputSchema":{}}]`, 1), "", false},
		{"another method", `{"jsonrpc":"2.0","id":1,"method":"ping"}`, js, answer, "", false},
	} {
		q, ok := (&protocol.Rules{}).Parse(http.Header{}, "/mcp", []byte(c.body))
		if !ok {
			t.Fatalf("%s: no message", c.name)
		}
		if got := q[0].Proves(c.contentType, []byte(c.answer), c.sent); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// The REST form of A2A has results without JSON-RPC around them, also in events.
func TestAnswersOverREST(t *testing.T) {
	for body, want := range map[string]protocol.Outcome{
		`{"message":{"parts":[]}}`:                                   {Meaning: protocol.Executed},
		`{"task":{"id":"t","status":{"state":"TASK_STATE_FAILED"}}}`: {Meaning: protocol.Executed, Task: "t", State: "failed"},
		`{"error":{"code":-32601},"method":"x"}`:                     {Meaning: protocol.Executed},
		"":                                                           {},
		"data: {\"task\":{\"id\":\"t\",\"status\":{\"state\":\"TASK_STATE_WORKING\"}}}\n\n":                                         {Task: "t", State: "working"},
		"data: {\"task\":{\"id\":\"t\"}}\n\ndata: {\"artifactUpdate\":{\"taskId\":\"t\"}}\n\n: alive\n\n":                           {Task: "t"},
		"data: {\"task\":{\"id\":\"t\"}}\n\ndata: {\"statusUpdate\":{\"status\":\ndata: {\"state\":\"TASK_STATE_COMPLETED\"}}}\n\n": {Meaning: protocol.Executed, Task: "t", State: "completed"},
		"data: {\"statusUpdate\":{\"taskId\":\"t\",\"final\":true}}\n\n":                                                            {Meaning: protocol.Executed, Task: "t"},
		"data: {\"message\":{}}\n\n":           {Meaning: protocol.Executed},
		"data: {\"message\":{}}\n":             {}, // no client has seen it
		"data: {\"error\":{\"code\":500}}\n\n": {},
	} {
		as := asStream
		if strings.HasPrefix(body, "{") || body == "" {
			as = asJSON
		}
		for _, size := range []int{1, 1 << 10} {
			a := (&protocol.Message{Protocol: protocol.A2A, REST: true}).Answer(as)
			for text := body; text != ""; {
				n := min(size, len(text))
				_, _ = io.WriteString(a, text[:n])
				text = text[n:]
			}
			if got := a.End(); got != want {
				t.Errorf("%q in pieces of %d: %+v, want %+v", body, size, got, want)
			}
		}
	}
}
