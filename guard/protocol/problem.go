package protocol

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Error returns the text of a JSON-RPC error that answers m, with the problem as its data. message
// is a sentence that programs show. data is the text of a JSON value, or nil. Not for REST.
func (m *Message) Error(message string, data []byte) []byte {
	body := rpcAnswer{Version: "2.0", ID: orNull(m.ID), Error: &rpcError{Code: problemCode, Message: message, Data: data}}
	return body.text()
}

// ToolError returns the text of a result that tells the model of m, a tools/call, what has failed.
// Its data stands in `_meta`.
func (m *Message) ToolError(message string, data []byte) []byte {
	result := toolResult{Content: []content{{Type: "text", Text: message}}, IsError: true}
	if m.Version >= "2026-07-28" {
		result.ResultType = "complete"
	}
	if data != nil {
		result.Meta = map[string]json.RawMessage{"agent-guard/problem": data}
	}
	body := rpcAnswer{Version: "2.0", ID: orNull(m.ID), Result: &result}
	return body.text()
}

type rpcAnswer struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Result  *toolResult     `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

type rpcError struct {
	Code    int             `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

type toolResult struct {
	ResultType string                     `json:"resultType,omitempty"`
	Content    []content                  `json:"content"`
	IsError    bool                       `json:"isError"`
	Meta       map[string]json.RawMessage `json:"_meta,omitempty"`
}

type content struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

func (a *rpcAnswer) text() []byte {
	text, err := json.Marshal(a)
	if err != nil {
		panic("protocol: " + err.Error()) // its parts are valid JSON
	}
	return text
}

// maxServers and maxTools bound what is learned.
const (
	maxServers = 256
	maxTools   = 4096
)

// Tools are the tools that servers have announced as read-only. The zero value knows none. It may
// be used by many goroutines.
type Tools struct {
	mu      sync.Mutex
	servers map[string]map[string]bool // whether a tool is read-only
}

// Learn notes what a server says of a tool. A server that has ever called it something else than
// read-only is believed in that.
func (t *Tools) Learn(server, tool string, readOnly bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tools := t.servers[server]
	if tools == nil {
		if len(t.servers) >= maxServers {
			return // what is not known is consequential
		}
		if t.servers == nil {
			t.servers = map[string]map[string]bool{}
		}
		tools = map[string]bool{}
		t.servers[server] = tools
	}
	before, known := tools[tool]
	if known || len(tools) < maxTools {
		tools[tool] = readOnly && (before || !known)
	}
}

// ReadOnly reports whether a server announces a tool as read-only.
func (t *Tools) ReadOnly(server, tool string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.servers[server][tool]
}

// taskID is the id of the messages that ask for tasks.
const taskID = `"task"`

// TaskQuery returns a message that asks for a task that m has begun, and the header fields that go with
// it beside those of the session. It is nil where m can begin none that could be asked for by a message.
func (m *Message) TaskQuery(task string) (text []byte, header map[string]string) {
	method, member := "tasks/get", "id"
	switch {
	case m.REST, m.Batch, m.Protocol == JSONRPC:
		return nil, nil
	case m.Protocol == MCP:
		if member = "taskId"; m.Version >= "2026-07-28" {
			header = map[string]string{"Mcp-Method": method, "Mcp-Name": task}
		}
	case strings.HasPrefix(m.Method, "Send"):
		method = "GetTask"
	}
	text, err := json.Marshal(map[string]any{
		"jsonrpc": "2.0", "id": json.RawMessage(taskID), "method": method, "params": map[string]string{member: task},
	})
	if err != nil {
		panic("protocol: " + err.Error()) // its parts are text
	}
	return text, header
}

// TaskOutcome judges the answer to a TaskQuery. known reports that it shows the task.
func (m *Message) TaskOutcome(task string, status int, contentType string, body []byte) (o Outcome, known bool) {
	query := Message{Protocol: m.Protocol, ID: []byte(taskID)}
	o = query.Outcome(status, contentType, body)
	return o, status == http.StatusOK && o.Meaning == Executed && o.Code == 0 && o.Task == task
}

// TaskAnswer reads the answer to a TaskQuery. known reports that the server has the task: m was
// executed. answer is what the task is as the answer to m, nil if that is not certain.
func (m *Message) TaskAnswer(task string, status int, contentType string, body []byte) (answer []byte, as string, known bool) {
	if _, known = m.TaskOutcome(task, status, contentType, body); !known {
		return nil, "", false
	}
	top, ok := jsonx.ObjectOf(bytes.Trim(body, " \t\r\n"))
	if !ok || isStream(contentType) || m.Protocol == MCP && m.Version >= "2026-07-28" {
		return nil, "", true
	}
	wrap := `%s`
	if m.Protocol == MCP || strings.HasPrefix(m.Method, "Send") {
		wrap = `{"task":%s}`
	}
	text := fmt.Appendf(nil, `{"jsonrpc":"2.0","id":`+taskID+`,"result":`+wrap+`}`, top.Get("result"))
	if m.Method != "message/stream" && m.Method != "SendStreamingMessage" {
		return text, "application/json", true
	}
	var line bytes.Buffer
	line.WriteString("data: ")
	if json.Compact(&line, text) != nil {
		return nil, "", true
	}
	line.WriteString("\n\n")
	return line.Bytes(), "text/event-stream", true
}
