package messages

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: JSON is JSON by all its media types, and with a byte order mark before an answer: keys in messages count, and a
// repeated answer has the id of its request.
func TestMessagesInAllMediaTypes(t *testing.T) {
	var n atomic.Int64
	var answers string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", answers)
		mark := ""
		if r.Header.Get("X-Mark") != "" {
			mark = "\ufeff"
		}
		_, _ = fmt.Fprintf(w, `%s{"jsonrpc":"2.0","id":1,"result":{"n":%d}}`, mark, n.Add(1))
	}))
	t.Cleanup(server.Close)
	for _, protocol := range []string{"mcp", "auto"} {
		for _, media := range []string{"application/json", "application/json-rpc", "application/jsonrequest", "application/vnd.x+json"} {
			for _, mark := range []string{"", "yes"} {
				t.Run(protocol+" "+media+" "+mark, func(t *testing.T) {
					answers = media
					g := harness.Start(t, "agent_proxy %s {\n protocol %s\n}", strings.TrimPrefix(server.URL, "http://"), protocol)
					before := n.Load()
					call := func(id string) harness.Reply {
						return g.Call(harness.Message(harness.ToolCall(id, "pay", harness.KeyA), "Content-Type", media, "X-Mark", mark))
					}
					if got := call("1"); got.Header.Get("Execution-Status") != "executed" || got.Cut {
						t.Errorf("%v %q", got.Header, got.Body)
					}
					got := call("2")
					if got.Header.Get("Execution-Status") != "replayed" || !strings.Contains(got.Body, `"id":2,"result":`) {
						t.Errorf("the retry gets %v %q", got.Header, got.Body)
					}
					if n.Load() != before+1 {
						t.Errorf("%d effects", n.Load()-before)
					}
				})
			}
		}
	}
}

// P1: a message that is too long to be read may have a key, so that it is refused where the protocol is named. By
// HTTP it is guarded all the same where nobody has named one.
func TestMessagesTooLongToBeRead(t *testing.T) {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n.Add(1)
	}))
	t.Cleanup(server.Close)
	long := harness.ToolCall("1", "pay", harness.KeyA+`,"more":"`+strings.Repeat("x", 4<<20)+`"`)
	for protocol, effects := range map[string]int64{"mcp": 0, "a2a": 0, "auto": 1} {
		n.Store(0)
		g := harness.Start(t, "agent_proxy %s {\n protocol %s\n}", strings.TrimPrefix(server.URL, "http://"), protocol)
		got := g.Call(harness.Message(long))
		if n.Load() != effects {
			t.Errorf("%s: %d effects, want %d", protocol, n.Load(), effects)
		}
		if effects > 0 {
			if got.Header.Get("Execution-Status") != "executed" {
				t.Errorf("%s: %d %v", protocol, got.Status, got.Header)
			}
			continue
		}
		if got.Status != 413 || !strings.Contains(got.Body, `"id":null,"error":{"code":-32090,`) || !strings.Contains(got.Body, "body-too-large") {
			t.Errorf("%s: %d %.300s", protocol, got.Status, got.Body)
		}
	}
}

// With auto, the list of tools that proves the protocol says which of them are read-only.
func TestProofSaysWhichToolsAreReadOnly(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"get","inputSchema":{},"annotations":{"readOnlyHint":true}},`+
			`{"name":"pay","inputSchema":{}}]}}`)
	}))
	t.Cleanup(server.Close)
	g := harness.Start(t, "agent_proxy %s", strings.TrimPrefix(server.URL, "http://"))
	g.Call(harness.Message(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, "Mcp-Protocol-Version", "2026-07-28"))
	for tool, want := range map[string]string{"get": "", "pay": "executed"} {
		if got := g.Call(harness.Message(harness.ToolCall("1", tool, ""), "Mcp-Protocol-Version", "2026-07-28")).Header.Get("Execution-Status"); got != want {
			t.Errorf("%s: %q, want %q", tool, got, want)
		}
	}
}

// A server that hears notifications/cancelled gives no answer. Its call is in doubt soon, and a retry that waits is told
// so, also in a stream that has begun.
func TestCancelledCallIsInDoubtSoon(t *testing.T) {
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	forms := map[string]string{"json": "application/json", "stream": "text/event-stream"}
	calls, site := map[string]*atomic.Int64{}, ""
	for name, media := range forms {
		n := new(atomic.Int64)
		calls[name] = n
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if body, _ := io.ReadAll(r.Body); !strings.Contains(string(body), "tools/call") {
				w.WriteHeader(http.StatusAccepted)
				return
			}
			n.Add(1)
			if media == "text/event-stream" {
				w.Header().Set("Content-Type", media)
				_ = http.NewResponseController(w).Flush()
			}
			select {
			case <-over:
			case <-r.Context().Done():
			}
		}))
		t.Cleanup(server.Close)
		site += fmt.Sprintf("agent_proxy /%s %s {\n name %[1]s\n protocol mcp\n missing_id recognize\n}\n", name, strings.TrimPrefix(server.URL, "http://"))
	}
	g := harness.Start(t, "%s", site)
	message := func(to, text string) harness.Request {
		r := harness.Message(text)
		r.Path = "/" + to
		return r
	}
	t.Run("forms", func(t *testing.T) {
		for name, media := range forms {
			t.Run(media, func(t *testing.T) {
				t.Parallel() // they share a gateway, and wait
				first := g.Begin(message(name, harness.ToolCall("1", "pay", "")))
				harness.Eventually(t, "the call is at its server", func() bool { return calls[name].Load() == 1 })
				g.Call(message(name, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`)).Want(t, 202, "", "")
				got := g.Call(message(name, harness.ToolCall("2", "pay", "")))
				if got.Cut || !strings.Contains(got.Body, `"id":2,"error":{"code":-32090,`) || !strings.Contains(got.Body, "client_left") {
					t.Errorf("the retry gets %d %v %q, cut %t", got.Status, got.Header, got.Body, got.Cut)
				}
				first.Answer()
				if calls[name].Load() != 1 {
					t.Errorf("%d effects", calls[name].Load())
				}
			})
		}
	})
}

// An answer that is unpacked for another client has no digests of what was packed; one that is not what its header says
// comes as it came. Fields of one moment or one client are not repeated.
func TestReplaysOfPackedAnswers(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, "plain")
	_ = z.Close()
	digests := []string{"Content-Digest", "Repr-Digest", "Digest", "Content-Md5"}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, name := range append(digests, "Age", "Clear-Site-Data", "Authentication-Info") {
			w.Header().Set(name, "x")
		}
		w.Header().Set("Content-Encoding", "gzip")
		if r.URL.Path == "/wrong" {
			_, _ = io.WriteString(w, "not packed")
			return
		}
		_, _ = w.Write(packed.Bytes())
	}))
	t.Cleanup(server.Close)
	g := harness.Start(t, "agent_proxy %s", strings.TrimPrefix(server.URL, "http://"))
	for path, want := range map[string]string{"/right": "plain", "/wrong": "not packed"} {
		call := func(accepts string) harness.Reply {
			return g.Call(harness.Request{Path: path, Body: "{}", Header: map[string]string{"Idempotency-Key": path, "Accept-Encoding": accepts}})
		}
		call("gzip")
		got := call("identity")
		if got.Cut || got.Header.Get("Execution-Status") != "replayed" || got.Body != want {
			t.Errorf("%s: %v %q", path, got.Header, got.Body)
		}
		if encoding := got.Header.Get("Content-Encoding"); (encoding == "") != (path == "/right") {
			t.Errorf("%s: Content-Encoding %q", path, encoding)
		}
		for _, name := range digests {
			if value := got.Header.Get(name); (value == "") != (path == "/right") {
				t.Errorf("%s: %s is %q", path, name, value)
			}
		}
		for _, name := range []string{"Age", "Clear-Site-Data", "Authentication-Info"} {
			if got.Header[name] != nil {
				t.Errorf("%s: %s is repeated", path, name)
			}
		}
	}
}
