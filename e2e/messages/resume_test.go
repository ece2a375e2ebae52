package messages

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// resumable is a server of MCP that ends the streams of its calls at once, and answers them on GET
// streams of their sessions (2025-11-25).
type resumable struct {
	mu      sync.Mutex
	counted map[string]int         // the calls, by session
	get     map[string]chan string // what the GET stream of a session brings
	length  bool                   // the streams of calls have a length
	refunds []string               // as they came
}

func newResumable(t *testing.T) (*resumable, string) {
	s := &resumable{counted: map[string]int{}, get: map[string]chan string{}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, strings.TrimPrefix(server.URL, "http://")
}

const priming = "id: p\nretry: 10\ndata: \n\n"

func (s *resumable) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	session := r.Header.Get("Mcp-Session-Id")
	w.Header().Set("Content-Type", "text/event-stream")
	if r.Method == http.MethodGet {
		w.Header().Set("X-Encoding", r.Header.Get("Accept-Encoding"))
		events := s.stream(session)
		_ = http.NewResponseController(w).Flush()
		for {
			select {
			case event := <-events:
				if event == "" {
					return
				}
				_, _ = io.WriteString(w, event)
				_ = http.NewResponseController(w).Flush()
			case <-r.Context().Done():
				return
			}
		}
	}
	body, _ := io.ReadAll(r.Body) // what is cut fits no case
	s.mu.Lock()
	defer s.mu.Unlock()
	if strings.Contains(string(body), `"refund"`) {
		s.refunds = append(s.refunds, string(body))
		_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n")
		return
	}
	s.counted[session]++
	if s.length {
		w.Header().Set("Content-Length", fmt.Sprint(len(priming)))
	}
	_, _ = io.WriteString(w, priming)
}

// send has an event sent on the GET stream of a session; an empty one ends it.
func (s *resumable) send(t *testing.T, session, event string) {
	t.Helper()
	select {
	case s.stream(session) <- event:
	case <-time.After(harness.Patience):
		t.Fatal("no GET stream is open")
	}
}

// stream is what the GET stream of a session takes, without a buffer.
func (s *resumable) stream(session string) chan string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.get[session] == nil {
		s.get[session] = make(chan string)
	}
	return s.get[session]
}

func (s *resumable) executed(t *testing.T, session string, want int) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.counted[session]; n != want {
		t.Errorf("%d calls of %s were executed, want %d", n, session, want)
	}
}

func answerOf(id string, n int) string {
	return fmt.Sprintf("event: message\nid: a\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"n\":%d}}\n\n", id, n)
}

// elsewhere says that a call with the key KeyA is in doubt, since its answer may come on another stream.
func elsewhere(t *testing.T, got harness.Reply) {
	t.Helper()
	if got.Header.Get("Execution-Status") != "in_doubt" || !strings.Contains(got.Body, "Cause: continues_elsewhere.") {
		t.Errorf("%d %v %s", got.Status, got.Header, got.Body)
	}
}

// P1, P6, P7: a call whose stream ends without an answer is in doubt. Its client gets that end, and the answer on a GET
// stream of its session, on another connection too. With it the doubt is settled, and retries with the key get it.
func TestStreamsAreResumed(t *testing.T) {
	ca := harness.NewAuthority(t)
	for _, version := range []string{"1", "2", "1, with a length"} {
		t.Run("HTTP/"+version, func(t *testing.T) {
			s, addr := newResumable(t)
			s.length = version == "1, with a length"
			g := harness.Launch(t, harness.Setup{
				Site:    fmt.Sprintf("agent_proxy %s {\n protocol mcp\n missing_id recognize\n}\ntls %s", addr, ca.Files(t, "localhost")),
				Address: func(port string) string { return "https://localhost:" + port },
			})
			g.Client = g.NewClient(ca.Client(nil))
			if version == "2" {
				g.Client = g.H2Client(ca.Client(nil))
			}
			on := func(r harness.Request) harness.Request {
				r.Host = "localhost"
				return r
			}
			if got := g.Call(on(harness.Message(harness.ToolCall("3", "pay", harness.KeyA)))); got.Body != priming || got.Header.Get("Execution-Status") != "executed" {
				t.Errorf("%v %q", got.Header, got.Body)
			}
			elsewhere(t, g.Call(on(harness.Message(harness.ToolCall(`"four"`, "pay", harness.KeyA)))))
			get := g.ResumeOn(g.NewClient(ca.Client(nil)), "localhost", "a", "p")
			if encoding := get.Header.Get("X-Encoding"); encoding != "identity" {
				t.Errorf("a stream that is resumed may come as %q", encoding)
			}
			notification := "id: n\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\n\n"
			for _, event := range []string{notification, answerOf("3", 1)} {
				s.send(t, "a", event)
				got := make([]byte, len(event))
				if _, err := io.ReadFull(get.Body, got); err != nil || string(got) != event {
					t.Errorf("the GET has brought %q, %v", got, err)
				}
			}
			s.send(t, "a", "")
			if rest, err := io.ReadAll(get.Body); err != nil || len(rest) > 0 { // its end waits for the record
				t.Errorf("%q, %v", rest, err)
			}
			got := g.Call(on(harness.Message(harness.ToolCall(`"four"`, "pay", harness.KeyA))))
			if want := "event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":\"four\",\"result\":{\"n\":1}} \n\n"; got.Body != want || got.Header.Get("Execution-Status") != "replayed" {
				t.Errorf("the retry gets %v %q", got.Header, got.Body)
			}
			s.executed(t, "a", 1)
		})
	}
}

// P1: a client whose stream has ended before its answer still waits, on a GET stream, or until that is open. Equal
// calls without a key are meant, from the same session and from another one of the caller.
func TestWhoWaitsElsewhereIsNoRetry(t *testing.T) {
	for _, waits := range []string{"before its GET", "after its answer", "without a session"} {
		t.Run(waits, func(t *testing.T) {
			s, addr := newResumable(t)
			g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n missing_id recognize\n}", addr)
			first := ""
			if waits != "without a session" {
				first = "a"
			}
			pay := func(session, id string) harness.Reply {
				r := harness.Message(harness.ToolCall(id, "pay", ""), "Mcp-Session-Id", session)
				if session == "" {
					delete(r.Header, "Mcp-Session-Id")
				}
				return g.Call(r)
			}
			pay(first, "3")
			if waits == "after its answer" {
				get := g.Resume(first, "p")
				s.send(t, first, answerOf("3", 1))
				s.send(t, first, "")
				_, _ = io.ReadAll(get.Body) // its end waits for the record
			}
			for n, session := range []string{first, "b"} {
				got := pay(session, fmt.Sprint(4+n))
				if h := got.Header; got.Body != priming || h.Get("Execution-Status") != "executed" || h.Get("Execution-Recognized") != "" {
					t.Errorf("an equal call from %q: %v %q", session, got.Header, got.Body)
				}
			}
			s.executed(t, first, 2)
			s.executed(t, "b", 1)
		})
	}
}

// The doubt is settled over a reload, too, by a GET through the new configuration. The status request shows both.
func TestStreamsAreResumedAfterAReload(t *testing.T) {
	s, addr := newResumable(t)
	s.length = true
	site := "agent_proxy " + addr + " {\n protocol mcp\n}"
	g := harness.Start(t, "%s", site)
	status := func() harness.Reply {
		return g.Call(harness.Request{Method: http.MethodGet, Path: harness.ExecutionsPath + "a", Header: map[string]string{"Mcp-Session-Id": "a"}})
	}
	if got := g.Call(harness.Message(harness.ToolCall("3", "pay", harness.KeyA))); got.Body != priming {
		t.Errorf("%q", got.Body)
	}
	if got := status(); !strings.Contains(got.Body, `"state": "in_doubt"`) {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	g.Reload(site + "\nheader X-New yes")
	get := g.Resume("a", "")
	if get.Header.Get("X-New") != "yes" || get.Header.Get("X-Encoding") != "gzip" {
		t.Errorf("%v", get.Header)
	}
	s.send(t, "a", answerOf("3", 1))
	if line, err := bufio.NewReader(get.Body).ReadString('}'); err != nil || !strings.Contains(line, `"n":1`) {
		t.Errorf("%q, %v", line, err)
	}
	s.send(t, "a", "")
	_, _ = io.ReadAll(get.Body) // its end waits for the record
	if got := g.Call(harness.Message(harness.ToolCall("5", "pay", harness.KeyA))); got.Header.Get("Execution-Status") != "replayed" || !strings.Contains(got.Body, `"id":5,"result":{"n":1}`) {
		t.Errorf("%v %q", got.Header, got.Body)
	}
	if got := status(); !strings.Contains(got.Body, `"state": "completed"`) {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := g.Call(harness.Request{Method: http.MethodGet, Path: harness.ExecutionsPath + "a/output", Header: map[string]string{"Mcp-Session-Id": "a"}}); !strings.Contains(got.Body, `"n":1`) {
		t.Errorf("%d %v %q", got.Status, got.Header, got.Body)
	}
	s.executed(t, "a", 1)
}

// P3, P6: what comes in another session or to another caller settles nothing, though the ids of the requests are equal,
// and neither does an answer to an id that two calls of the session share.
func TestStreamsAreResumedInTheirSession(t *testing.T) {
	s, addr := newResumable(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n}", addr)
	pay := func(session, caller, id string) harness.Reply {
		return g.Call(harness.Message(harness.ToolCall(id, "pay", harness.KeyA), "Mcp-Session-Id", session, "Authorization", "Bearer "+caller))
	}
	get := func(session, caller, id string, n int) {
		t.Helper()
		res, err := g.Send(harness.Request{Method: http.MethodGet, Path: "/mcp", Header: map[string]string{
			"Accept": "text/event-stream", "Mcp-Session-Id": session, "Authorization": "Bearer " + caller, "Last-Event-Id": "p",
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		s.send(t, session, answerOf(id, n))
		s.send(t, session, "")
		if body, err := io.ReadAll(res.Body); err != nil || string(body) != answerOf(id, n) { // its end waits for the record
			t.Errorf("%q, %v", body, err)
		}
	}
	pay("a", "ada", "3")
	get("a", "eve", "3", 7)
	elsewhere(t, pay("a", "ada", "4"))
	pay("b", "eve", "3")
	get("b", "eve", "3", 2)
	elsewhere(t, pay("a", "ada", "4"))
	get("a", "ada", "3", 1)
	for _, c := range [][]string{{"a", "ada", `"n":1`}, {"b", "eve", `"n":2`}} {
		if got := pay(c[0], c[1], "5"); got.Header.Get("Execution-Status") != "replayed" || !strings.Contains(got.Body, c[2]) {
			t.Errorf("%s: %v %s", c[0], got.Header, got.Body)
		}
		s.executed(t, c[0], 1)
	}
	pay("c", "bob", "3")
	g.Call(harness.Message(harness.ToolCall("3", "pay", strings.Replace(harness.KeyA, `"a"`, `"b"`, 1)), "Mcp-Session-Id", "c", "Authorization", "Bearer bob"))
	get("c", "bob", "3", 1)
	elsewhere(t, pay("c", "bob", "4"))
	s.executed(t, "c", 2)
}

// An answer that comes on a GET stream has the values of the undo.
func TestStreamsThatAreResumedAreUndone(t *testing.T) {
	s, addr := newResumable(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: `agent_proxy ` + addr + ` {
		protocol mcp
		default_undo compensate POST /mcp {
			body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{"payment":{response.json./result/n}}}}}}}` + "`" + `
		}
	}`})
	saga := g.Saga(a)
	made := saga.Do(harness.Message(harness.ToolCall("3", "pay", "")))
	get := g.Resume("a", "p")
	s.send(t, "a", answerOf("3", 7))
	s.send(t, "a", "")
	_, _ = io.ReadAll(get.Body) // its end waits for the record
	saga.Back(harness.RollbackBody{Checkpoint: made.Checkpoint}).Want(t, "completed")
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refunds) != 1 || !strings.Contains(s.refunds[0], `{"payment":7}`) {
		t.Errorf("%q", s.refunds)
	}
}
