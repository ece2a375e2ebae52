package protocol

import (
	"encoding/json"
	"sync"
)

// Error returns the text of a JSON-RPC error that answers m, with the problem as its data. message
// is a sentence that programs show. data is the text of a JSON value, or nil. Not for REST.
func (m *Message) Error(message string, data []byte) []byte {
	body := rpcAnswer{Version: "2.0", ID: orNull(m.ID), Error: &rpcError{Code: ProblemCode, Message: message, Data: data}}
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
