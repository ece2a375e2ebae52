package harness

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// NewBatchServer is a tool server that takes arrays of messages too. Its answer to one is an array, or a stream of
// events if that to one of the messages is.
func NewBatchServer(t *testing.T) (*toolServer, string) {
	s := &toolServer{Calls: map[string]int{}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what is cut fits no case
		w.Header().Set("Content-Type", "application/json")
		var messages []json.RawMessage
		if json.Unmarshal(body, &messages) != nil {
			messages = []json.RawMessage{body}
		}
		if strings.Contains(string(body), `"tools/list"`) { // which proves the protocol
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"get","inputSchema":{},"annotations":{"readOnlyHint":true}}]}}`)
			return
		}
		var answers []string
		stream := ""
		for _, m := range messages {
			one := r.Clone(r.Context())
			one.Body = io.NopCloser(bytes.NewReader(m))
			to := httptest.NewRecorder()
			s.ServeHTTP(to, one)
			if to.Header().Get("Content-Type") == "text/event-stream" {
				stream = to.Body.String()
			} else if to.Body.Len() > 0 {
				answers = append(answers, to.Body.String())
			}
		}
		switch {
		case stream != "":
			w.Header().Set("Content-Type", "text/event-stream")
			for _, text := range answers {
				_, _ = io.WriteString(w, "data: "+text+"\n\n")
			}
			_, _ = io.WriteString(w, stream)
		case body[0] == '[':
			_, _ = io.WriteString(w, BatchOf(answers...))
		default:
			_, _ = io.WriteString(w, strings.Join(answers, ""))
		}
	}))
	t.Cleanup(server.Close)
	return s, strings.TrimPrefix(server.URL, "http://")
}

// BatchOf makes a batch of messages.
func BatchOf(messages ...string) string { return "[" + strings.Join(messages, ",") + "]" }

// Keyed is the call of a tool with a key.
func Keyed(id, tool, key string) string {
	return ToolCall(id, tool, `,"_meta":{"execution-id":"`+key+`"}`)
}

// toolServer answers messages as MCP servers do. It counts the calls of each tool.
type toolServer struct {
	Mu    sync.Mutex
	Calls map[string]int
	Seen  int   // requests
	Hold  *Gate // for calls of tools; may be nil

	Refunds   []string // as they came, each with its session
	Refunded  string   // what they are answered after the id; empty is a result
	Cancelled []string // the ids of requests
}

func (s *toolServer) Count(tool string) int {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Calls[tool]
}

func (s *toolServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // what is cut fits no case
	s.Mu.Lock()
	hold := s.Hold
	s.Mu.Unlock()
	if hold != nil && strings.Contains(string(body), `"tools/call"`) {
		hold.Pass()
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Seen++
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
				s.Calls[tool]++
				_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"content":[],"n":%d}}`, id, s.Calls[tool])
			}
		}
	case called("refund"):
		s.Refunds = append(s.Refunds, r.Header.Get("Mcp-Session-Id")+" "+string(body))
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, id, cmp.Or(s.Refunded, `"result":{"content":[]}`))
	case called("fail"):
		s.Calls["fail"]++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"content":[],"isError":true,"n":%d}}`, id, s.Calls["fail"])
	case called("unknown"), called("invalid"):
		tool, code := "unknown", -32601
		if called("invalid") {
			tool, code = "invalid", -32602
		}
		s.Calls[tool]++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":"Unknown tool"}}`, id, code)
	case called("busy"):
		s.Calls["busy"]++
		w.WriteHeader(http.StatusTooManyRequests)
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32000,"message":"Later"}}`, id)
	case called("broken"), strings.Contains(string(body), `"prompts/list"`):
		s.Calls["broken"]++
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"Internal"}}`, id)
	case called("breaking"):
		s.Calls["breaking"]++
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"error\":{\"code\":-32603,\"message\":\"Internal\"}}\n\n", id)
	case called("stream"), called("cut"):
		w.Header().Set("Content-Type", "text/event-stream")
		if called("stream") { // without an id nobody can resume it
			_, _ = io.WriteString(w, "id: 1\n")
		}
		_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":\"first\",\"progress\":1}}\n\n")
		if called("cut") {
			s.Calls["cut"]++
			return
		}
		s.Calls["stream"]++
		_, _ = fmt.Fprintf(w, "id: 2\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"n\":%d}}\n\n", id, s.Calls["stream"])
	case strings.Contains(string(body), "notifications/cancelled"):
		_, rest, _ := strings.Cut(string(body), `"requestId":`)
		s.Cancelled = append(s.Cancelled, rest[:strings.IndexAny(rest, ",}")])
		w.WriteHeader(http.StatusAccepted)
	case strings.Contains(string(body), "notifications/"):
		w.WriteHeader(http.StatusAccepted)
	default:
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":`+id+`,"result":{}}`)
	}
}

// NewToolServer starts a server of MCP, and returns it with its address.
func NewToolServer(t *testing.T) (*toolServer, string) {
	s := &toolServer{Calls: map[string]int{}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, strings.TrimPrefix(server.URL, "http://")
}

// Message is a POST of a message in a session of its own.
func Message(body string, header ...string) Request {
	h := map[string]string{
		"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Session-Id": "a", "Mcp-Protocol-Version": "2025-11-25",
	}
	for i := 0; i < len(header); i += 2 {
		h[header[i]] = header[i+1]
	}
	return Request{Path: "/mcp", Body: body, Header: h}
}

// ToolCall is the call of a tool. more is added to its parameters.
func ToolCall(id, tool, more string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"` + tool + `","arguments":{}` + more + `}}`
}

// KeyA gives the call of a tool the key "a".
const KeyA = `,"_meta":{"execution-id":"a","progressToken":"first"}`

// Initializes is the first message of a client of MCP.
const Initializes = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}`

// Ping is a message that changes nothing.
func Ping(id int) string { return fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, id) }

// Hello is the first message of a client, which has no session yet.
func Hello(body string, header ...string) Request {
	r := Message(body, header...)
	delete(r.Header, "Mcp-Session-Id")
	delete(r.Header, "Mcp-Protocol-Version")
	return r
}

// GuardedAs makes a call and compares whether it was guarded.
func (g *Gateway) GuardedAs(what string, r Request, status string) Reply {
	g.T.Helper()
	a := g.Call(r)
	if got := a.Header.Get("Execution-Status"); got != status {
		g.T.Errorf("%s: %d %q %s", what, a.Status, got, a.Body)
	}
	return a
}

// Resume opens a GET stream of a session, whose header has come.
func (g *Gateway) Resume(session, last string) *http.Response {
	g.T.Helper()
	return g.ResumeOn(g.Client, "", session, last)
}

// ResumeOn is resume by another client.
func (g *Gateway) ResumeOn(client *http.Client, host, session, last string) *http.Response {
	g.T.Helper()
	header := map[string]string{"Accept": "text/event-stream", "Mcp-Session-Id": session, "Accept-Encoding": "gzip"}
	if last != "" {
		header["Last-Event-Id"] = last
	}
	res, err := g.Send(Request{Method: http.MethodGet, Path: "/mcp", Header: header, Host: host, Client: client})
	if err != nil {
		g.T.Fatal(err)
	}
	g.T.Cleanup(func() { _ = res.Body.Close() })
	if res.StatusCode != 200 || res.Header.Get("Execution-Id") != "" {
		g.T.Errorf("%d %v", res.StatusCode, res.Header)
	}
	return res
}
