package guard_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// resuming is a guard in front of a server that ends the streams of POSTs without an answer.
type resuming struct {
	*agents
	priming string        // what such a stream has
	until   chan struct{} // nil: it ends at once
	events  chan string   // what a GET brings; "" breaks it off
	header  http.Header   // of the answer to a GET
	over    sync.Once     // no more events
	breaks  bool          // that end is none
	buffers bool          // the handler leaves flushing to the end of the stream
}

const primed = "id: 1\nretry: 500\ndata: \n\n"

func newResuming(t *testing.T, protocolName protocol.Protocol) *resuming {
	s := &resuming{agents: &agents{}, priming: primed, events: make(chan string), header: http.Header{"Content-Type": {"text/event-stream"}}}
	flush := func(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() } // a recorder flushes
	s.bed = newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what is cut fits no case
		switch {
		case r.Method == http.MethodGet:
			s.calls.Add(-1)
			for name := range s.header {
				w.Header().Set(name, s.header.Get(name))
			}
			flush(w)
			for event := range s.events {
				if event == "" {
					panic(http.ErrAbortHandler)
				}
				if _, err := io.WriteString(w, event); err != nil {
					return
				}
				if !s.buffers {
					flush(w)
				}
			}
		case !strings.Contains(string(body), "tools/call"):
			s.calls.Add(-1)
			s.other = append(s.other, string(body))
			if strings.Contains(string(body), "initialize") {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s"}}}`)
				return
			}
			w.WriteHeader(http.StatusAccepted)
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, s.priming)
			flush(w)
			if s.until != nil {
				<-s.until
			}
			if s.breaks {
				panic(http.ErrAbortHandler)
			}
		}
	})
	s.config.Protocol = &protocol.Rules{Protocol: protocolName}
	s.config.MissingID = guard.MissingRecognize
	s.config.OneServer = func() bool { return true }
	s.start()
	return s
}

// end lets all streams end, and the deadlines of what is open pass.
func (s *resuming) end() {
	s.over.Do(func() { close(s.events) })
	<-time.After(10 * time.Minute)
}

// get opens a GET stream of a session.
func (s *resuming) get(session string, fields ...string) *stream {
	r := httptest.NewRequest(http.MethodGet, "/mcp", nil)
	r.Header.Set("Accept", "text/event-stream")
	r.Header.Set("Authorization", "Bearer "+session)
	r.Header.Set("Mcp-Session-Id", session)
	for i := 0; i < len(fields); i += 2 {
		r.Header.Set(fields[i], fields[i+1])
	}
	w := &stream{ResponseRecorder: httptest.NewRecorder(), ended: make(chan struct{})}
	r, w.leave = withLeave(r)
	go func() {
		defer close(w.ended)
		s.serve(w, r)
	}()
	synctest.Wait()
	return w
}

func withLeave(r *http.Request) (*http.Request, context.CancelFunc) {
	ctx, leave := context.WithCancel(r.Context())
	return r.WithContext(ctx), leave
}

// stream is the client of a GET stream.
type stream struct {
	*httptest.ResponseRecorder
	leave context.CancelFunc
	ended chan struct{}
	gone  bool // writes fail
	slow  time.Duration
}

func (w *stream) Write(p []byte) (int, error) {
	<-time.After(w.slow)
	if w.gone {
		return 0, errors.New("the client has left")
	}
	return w.ResponseRecorder.Write(p)
}

// sends has the server send events on the open GET stream.
func (s *resuming) sends(events ...string) {
	for _, event := range events {
		s.events <- event
		synctest.Wait()
	}
}

func response(id string) string {
	return fmt.Sprintf("event: message\nid: e\ndata: {\"result\":{\"n\":%s},\"jsonrpc\":\"2.0\",\"id\":%[1]s}\n\n", id)
}

// resumed is how response is repeated to the request with another id.
func resumed(of, id string) string {
	return fmt.Sprintf("\nevent: message\ndata: {\"result\":{\"n\":%s},\"jsonrpc\":\"2.0\",\"id\":%s} \n\n", of, id)
}

// calls makes a call whose stream ends at once.
func (s *resuming) call(session, id, key string) {
	s.Helper()
	w := httptest.NewRecorder()
	r, leave := withLeave(s.pay(session, id, key))
	s.serve(w, r)
	leave() // as net/http does
	if w.Code != 200 || w.Header().Get("Execution-Status") != "executed" || w.Body.String() != s.priming {
		s.Errorf("%d %v %q", w.Code, w.Header(), w.Body)
	}
	synctest.Wait()
}

// doubt is what a retry with the key "k" is told, with the cause.
func (s *resuming) doubt(cause string) {
	s.Helper()
	w := httptest.NewRecorder()
	s.serve(w, s.pay("ada", "99", "k"))
	if w.Header().Get("Execution-Status") != "in_doubt" || !strings.Contains(w.Body.String(), "Cause: "+cause+".") {
		s.Errorf("%v %s, want in doubt by %s", w.Header(), w.Body, cause)
	}
}

// open says that a call with the key "k" goes on.
func (s *resuming) open() {
	s.Helper()
	r, leave := withLeave(s.pay("ada", "98", "k"))
	w := s.begin(r)
	defer leave()
	if w.Header().Get("Execution-Status") != "attached" {
		s.Errorf("%v %s", w.Header(), w.Body)
	}
}

// MCP 2025-11-25: the answer to a POST whose stream has ended comes on a GET stream of its session. The
// call is executed once, and everybody gets that answer (P1).
func TestResumedStreams(t *testing.T) {
	const notification = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\n\n"
	const asked = "data: {\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"elicitation/create\",\"params\":{}}\n\n"
	for name, test := range map[string]func(s *resuming){
		"an id that its session has had": func(s *resuming) {
			s.call("ada", "3", "first")
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3"))
			s.call("ada", "3", "k")
			s.sends(response("3")) // of the first one once more, or of this one
			s.open()
			s.end()
			s.doubt("continues_elsewhere")
			s.calls.Add(-1) // the first one
		},
		"an id that another session has had": func(s *resuming) {
			s.call("eve", "3", "first")
			s.call("ada", "3", "k")
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3"))
			s.do(s.pay("ada", "4", "k"), "200 replayed "+resumed("3", "4"))
			s.calls.Add(-1) // the first one
			s.end()
		},
		"everybody gets its answer": func(s *resuming) {
			s.call("ada", "3", "k")
			retry := s.begin(s.pay("ada", "4", "k"))
			get := s.get("ada", "Last-Event-Id", "1")
			s.sends(notification, ": keep\n\n", asked, response("3"))
			s.over.Do(func() { close(s.events) })
			<-get.ended
			if want := notification + ": keep\n\n" + asked + response("3"); get.Body.String() != want {
				s.Errorf("the GET has brought %q, want %q", get.Body, want)
			}
			s.answered(retry, "attached "+resumed("3", "4"))
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"without the id of an event": func(s *resuming) {
			s.priming = "retry: 500\ndata: \n\n"
			s.call("ada", "3", "k")
			s.doubt("no_response")
		},
		"with an id that is taken back": func(s *resuming) {
			s.priming = primed + "id:\ndata: \n\n"
			s.call("ada", "3", "k")
			s.doubt("no_response")
		},
		"in the middle of an event": func(s *resuming) {
			s.priming = primed + "data: {"
			s.call("ada", "3", "k")
			s.doubt("no_response")
		},
		"without a session": func(s *resuming) {
			r := s.pay("ada", "3", "k")
			r.Header.Del("Mcp-Session-Id")
			s.serve(httptest.NewRecorder(), r)
			s.doubt("continues_elsewhere")
		},
		"without an answer until its deadline": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			retry := s.begin(s.pay("ada", "4", "k"))
			<-time.After(5*time.Minute - time.Second)
			s.open()
			<-time.After(time.Second)
			synctest.Wait()
			s.doubt("continues_elsewhere")
			if body := retry.Body.String(); !strings.Contains(body, `"id":4,"error":{"code":-32090,`) || !strings.Contains(body, "in_doubt") {
				s.Errorf("%q", body)
			}
		},
		"without a GET for a minute": func(s *resuming) {
			s.call("ada", "3", "k")
			<-time.After(59 * time.Second)
			s.open()
			get := s.get("ada")
			<-time.After(2 * time.Minute)
			s.open()
			s.sends("")
			<-get.ended
			s.get("eve")
			<-time.After(59 * time.Second)
			s.open()
			<-time.After(time.Second)
			synctest.Wait()
			s.doubt("continues_elsewhere")
		},
		"on a GET that was there before": func(s *resuming) {
			s.get("ada")
			s.sends(notification)
			s.call("ada", "3", "k")
			s.sends(response("3"))
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"in pieces": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			for _, c := range response("3") {
				s.events <- string(c)
			}
			synctest.Wait()
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"before the stream of the POST has ended": func(s *resuming) {
			s.until = make(chan struct{})
			first := s.begin(s.pay("ada", "3", "k"))
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3"), "data: {\"id\":3,\"result\":{\"n\":9}}\n\n")
			close(s.until)
			synctest.Wait()
			s.answered(first, "executed "+primed)
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"on a GET that breaks and is resumed": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3")[:30], "")
			s.open()
			s.get("ada", "Last-Event-Id", "1")
			s.sends(notification, response("3"), response("3"))
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"several": func(s *resuming) {
			s.call("ada", "3", "k")
			s.call("ada", `"3"`, "l")
			s.call("ada", "4", "m")
			s.get("ada")
			s.sends(response("5") + response(`"\u0033"`) + response("3"))
			s.do(s.pay("ada", "7", "k"), "200 replayed "+resumed("3", "7"))
			s.do(s.pay("ada", "7", "l"), "200 replayed "+resumed(`"\u0033"`, "7"))
			if w := s.begin(s.pay("ada", "7", "m")); w.Header().Get("Execution-Status") != "attached" {
				s.Errorf("the third: %v", w.Header())
			}
		},
		"two with one id": func(s *resuming) {
			s.call("ada", "3", "k")
			s.call("ada", "3", "l")
			s.get("ada")
			s.sends(response("3"))
			s.open()
			if w := s.begin(s.pay("ada", "7", "l")); w.Header().Get("Execution-Status") != "attached" {
				s.Errorf("the second: %v", w.Header())
			}
		},
		"one with the id of a retry": func(s *resuming) {
			s.call("ada", "3", "k")
			s.begin(s.pay("ada", "4", "k"))
			s.call("ada", "4", "l")
			s.get("ada")
			s.sends(response("4"))
			s.do(s.pay("ada", "7", "l"), "200 replayed "+resumed("4", "7"))
			s.open()
		},
		"what is no answer": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends(asked, "data: {\"id\":3,\"result\":{}\n\n", "data: {\"id\":3,\"result\":{},\"error\":{}}\n\n", "data: {\"id\":3}\n\n", "data: {\"result\":{}}\n\n")
			s.open()
		},
		"over several lines": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"id\":3,\r\ndata:\"result\":{}}\r\n\r\n")
			s.do(s.pay("ada", "5", "k"), "200 replayed \nevent: message\ndata: {\"id\":5, \"result\":{}} \n\n")
		},
		"of other sessions and callers": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("eve")
			s.sends(response("3"), "")
			s.get("ada", "Mcp-Session-Id", "eve")
			s.sends(response("3"), "")
			s.get("ada", "Authorization", "Bearer eve")
			s.sends(response("3"))
			s.open()
		},
		"compressed": func(s *resuming) {
			s.call("ada", "3", "k")
			s.header.Set("Content-Encoding", "x")
			s.get("ada")
			s.sends(response("3"))
			s.open()
		},
		"by a new configuration": func(s *resuming) {
			s.call("ada", "3", "k")
			s.config.Open = s.engine.Open
			s.guard, _ = guard.New(s.config)
			s.get("ada")
			s.sends(response("3"))
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"by a guard of another name": func(s *resuming) {
			s.call("ada", "3", "k")
			first := s.guard
			s.config.Open, s.config.Name = s.engine.Open, "other"
			s.guard, _ = guard.New(s.config)
			s.get("ada")
			s.sends(response("3"))
			s.guard = first
			s.open()
		},
		"after the process was killed": func(s *resuming) {
			s.call("ada", "3", "k")
			s.start()
			s.get("ada")
			s.sends(response("3"))
			s.doubt("gateway_died")
		},
		"an error": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"id\":3,\"error\":{\"code\":-32601}}\n\n")
			s.priming = "data: {\"id\":4,\"result\":{}}\n\n"
			s.do(s.pay("ada", "4", "k"), "200 executed data: {\"id\":4,\"result\":{}}\n\n")
			s.calls.Add(-1) // both are meant
		},
		"an error after news of its work": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"method\":\"notifications/progress\",\"params\":{\"progressToken\":1}}\n\n", "data: {\"id\":3,\"error\":{\"code\":-32601}}\n\n")
			s.do(s.pay("ada", "4", "k"), "200 replayed \nevent: message\ndata: {\"id\":4,\"error\":{\"code\":-32601}} \n\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newResuming(t, protocol.MCP)
				s.agents.open = true
				test(s)
				s.was(max(1, map[string]int64{"several": 3, "two with one id": 2, "one with the id of a retry": 2}[name]))
				s.end()
			})
		})
	}
}

// ADR 0070: the end of such a stream is no answer. Its client has been answered once the event with the
// answer was written to a GET stream of its session.
func TestResumedStreamsAreEvidence(t *testing.T) {
	for name, test := range map[string]func(s *resuming){
		"a call that is meant while the first one's client waits": func(s *resuming) {
			s.call("ada", "3", "")
			s.call("ada", "4", "")
			s.get("ada")
			s.call("ada", "5", "")
			s.was(3)
		},
		"a call that is meant when the first one is in doubt": func(s *resuming) {
			s.call("ada", "3", "")
			<-time.After(time.Minute + time.Second)
			s.call("ada", "4", "")
			<-time.After(time.Minute + 10*time.Second)
			s.start() // by what is stored
			s.call("ada", "5", "")
			s.was(3)
		},
		"a call that is meant when there is no room for the first one": func(s *resuming) {
			for id := range 3 {
				r := s.pay("ada", fmt.Sprint(id), "")
				r.Header.Del("Mcp-Session-Id") // it is not kept open
				s.serve(httptest.NewRecorder(), r)
			}
			s.was(3)
		},
		"its connection breaks, and it resumes": func(s *resuming) {
			s.until = make(chan struct{})
			r, leave := withLeave(s.pay("ada", "3", ""))
			s.begin(r)
			leave()
			synctest.Wait()
			get := s.get("ada", "Last-Event-Id", "1")
			s.begin(s.pay("ada", "4", ""))
			<-time.After(time.Second)
			s.was(2)
			s.sends("") // and breaks for good
			<-get.ended
			synctest.Wait()
			s.begin(s.pay("ada", "5", ""))
			<-time.After(time.Second)
			s.was(2)
			close(s.until)
		},
		"its connection breaks, it resumes, and says that it waits no more": func(s *resuming) {
			s.until = make(chan struct{})
			r, leave := withLeave(s.pay("ada", "3", ""))
			s.begin(r)
			leave()
			s.get("ada", "Last-Event-Id", "1")
			s.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
			s.begin(s.pay("ada", "4", ""))
			<-time.After(time.Second)
			s.was(1)
			close(s.until)
		},
		"a call that is meant after the answer": func(s *resuming) {
			s.call("ada", "3", "")
			s.get("ada")
			s.sends(response("3"))
			s.call("ada", "4", "")
			s.was(2)
		},
		"an error like a 500, before it is recorded": func(s *resuming) {
			s.call("ada", "3", "")
			s.get("ada")
			s.disk.takes = time.Second
			s.sends("data: {\"jsonrpc\":\"2.0\",\"id\":3,\"error\":{\"code\":-32603,\"message\":\"Internal\"}}\n\n")
			retry := s.begin(s.pay("ada", "4", ""))
			<-time.After(time.Minute)
			if body := retry.Body.String(); retry.Header().Get("Execution-Recognized") == "" || !strings.Contains(body, `"id":4`) || !strings.Contains(body, "-32603") {
				s.Errorf("%v %s", retry.Header(), body)
			}
			s.was(1)
		},
		"the answer is flushed at the end": func(s *resuming) {
			s.buffers = true
			s.call("ada", "3", "")
			get := s.get("ada")
			s.sends(response("3"))
			s.over.Do(func() { close(s.events) })
			<-get.ended
			s.call("ada", "4", "")
			s.was(2)
		},
		"the answer could not be written": func(s *resuming) {
			s.call("ada", "3", "")
			get := s.get("ada")
			get.gone = true
			s.sends(response("3"))
			s.do(s.pay("ada", "4", ""), "200 replayed "+resumed("3", "4"))
			s.was(1)
		},
		"that it could not be written comes out later": func(s *resuming) {
			s.call("ada", "3", "")
			get := s.get("ada")
			get.gone, get.slow = true, time.Second
			s.events <- response("3")
			<-time.After(2 * time.Second)
			s.do(s.pay("ada", "4", ""), "200 replayed "+resumed("3", "4"))
			s.was(1)
		},
		"its client has left": func(s *resuming) {
			s.call("ada", "3", "")
			s.get("ada").leave()
			s.sends(response("3"))
			s.do(s.pay("ada", "4", ""), "200 replayed "+resumed("3", "4"))
			s.was(1)
		},
		"it says that it waits no more": func(s *resuming) {
			s.call("ada", "3", "")
			s.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
			retry := s.begin(s.pay("ada", "4", ""))
			s.get("ada")
			s.sends(response("3"))
			s.answered(retry, "attached "+resumed("3", "4"))
			s.was(1)
		},
		"its retry says that it waits no more": func(s *resuming) {
			s.call("ada", "3", "k")
			s.begin(s.pay("ada", "4", "k"))
			s.cancel("ada", "4", "") // the first has not said so
			s.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
			s.was(1)
		},
		"it has said so before the stream has ended": func(s *resuming) {
			s.until = make(chan struct{})
			s.begin(s.pay("ada", "3", "k"))
			s.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
			close(s.until)
			synctest.Wait()
			s.doubt("client_left")
			s.was(1)
		},
		"it has said so, and the upstream has not heard it": func(s *resuming) {
			s.until = make(chan struct{})
			s.begin(s.pay("ada", "3", "k"))
			s.begin(s.pay("ada", "4", "k"))
			s.cancel("ada", "3", "")
			close(s.until)
			synctest.Wait()
			s.cancel("ada", "4", fmt.Sprintf(cancelled, "3"))
			s.was(1)
		},
		"it has left before the stream has ended": func(s *resuming) {
			s.until = make(chan struct{})
			r, leave := withLeave(s.pay("ada", "3", "k"))
			s.begin(r)
			leave()
			close(s.until)
			synctest.Wait()
			s.open()
			s.was(1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newResuming(t, protocol.MCP)
				s.agents.open = true
				test(s)
				s.end()
			})
		})
	}
}

// With on_leave cancel there is no request to cancel once the stream has ended: the call stays open.
func TestResumedStreamsStayOpenWithOnLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.MCP)
		s.config.Actions = []*guard.Action{{Name: "default", Default: true, CancelOnLeave: true}}
		s.start()
		s.call("ada", "3", "k")
		s.open() // and that one leaves
		s.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
		s.open()
		s.get("ada")
		s.sends(response("3"))
		s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		s.was(1)
		s.end()
	})
}

// P7: the event with the answer does not wait for the record, the end of its stream does.
func TestResumedStreamsEndWithTheRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.MCP)
		s.disk.takes = time.Second
		s.call("ada", "3", "k")
		get := s.get("ada")
		began := time.Now()
		s.sends(response("3"))
		if get.Body.String() != response("3") || time.Since(began) != 0 {
			t.Errorf("%q after %v", get.Body, time.Since(began))
		}
		s.over.Do(func() { close(s.events) })
		<-get.ended
		if waited := time.Since(began); waited != time.Second {
			t.Errorf("the end has waited for %v", waited)
		}
		s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
	})
}

// P6: an answer whose outcome cannot be recorded leaves the call in doubt.
func TestResumedStreamsWithoutAStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.MCP)
		s.call("ada", "3", "k")
		s.get("ada")
		s.disk.broken.Store(true)
		s.sends(response("3"))
		s.disk.broken.Store(false)
		s.doubt("outcome_unrecorded")
		s.was(1)
		s.end()
	})
}

// What waits for its answer runs: it counts for the quota, an exit waits for it, and it is in doubt where
// the exit cannot wait.
func TestResumedStreamsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.MCP)
		s.config.Quota = execution.Quota{Open: 1}
		s.start()
		uncut, cut := context.WithCancel(t.Context())
		defer cut()
		s.engine.Uncut = uncut
		s.call("ada", "3", "k")
		w := httptest.NewRecorder()
		s.serve(w, s.pay("ada", "4", "l"))
		if !strings.Contains(w.Body.String(), "quota-exceeded") {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if n := s.engine.Executions.Drain(ctx); n != 1 {
			t.Errorf("%d are running", n)
		}
		cut()
		if n := s.engine.Executions.Drain(t.Context()); n != 0 {
			t.Errorf("%d are running", n)
		}
		s.doubt("interrupted")
		s.was(1)
	})
}

// With protocol auto only what its server has shown counts, and only on the same way to it.
func TestResumedStreamsOfProvenServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.Auto)
		s.serve(httptest.NewRecorder(), s.pay("ada", "3", "j"))
		s.do(s.pay("ada", "4", "j"), "200 replayed ") // by the rules of HTTP
		hello := s.message("ada", `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}`)
		s.serve(httptest.NewRecorder(), hello)
		s.call("ada", "7", "k")
		s.get("ada", "X-Tenant", "other")
		s.sends(response("7"), "")
		s.open()
		s.get("ada", "Cache-Control", "no-store", "Last-Event-Id", "1")
		s.sends(response("7"))
		s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("7", "5"))
		s.end()
	})
}

// P6: a stream that is cut before its final answer is in doubt at once, though events of it had ids, by which
// its client may go on on a GET: who calls again is told so, and does not wait.
func TestStreamCutBeforeItsAnswerIsInDoubt(t *testing.T) {
	for _, priming := range []string{primed, "id: 1\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":1,\"progress\":1}}\n\n"} {
		synctest.Test(t, func(t *testing.T) {
			s := newResuming(t, protocol.MCP)
			s.priming, s.until, s.breaks = priming, make(chan struct{}), true
			s.begin(s.pay("ada", "3", "k"))
			close(s.until)
			synctest.Wait()
			began := time.Now()
			s.doubt("answer_truncated")
			if waited := time.Since(began); waited != 0 {
				t.Errorf("the doubt is told after %v", waited)
			}
			get := s.get("ada", "Last-Event-Id", "1") // passes, and proves nothing of what is in doubt
			s.sends(response("3"))
			if get.Body.String() != response("3") {
				t.Errorf("%q", get.Body)
			}
			s.doubt("answer_truncated")
			s.was(1)
			s.end()
		})
	}
}

// P7: who does not read the stream of a session holds up nobody who waits for an answer that has come on it, nor
// another stream of the session. Nothing is kept for him: his server waits, as behind a bare proxy.
func TestResumedStreamsOfSlowClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.MCP)
		s.agents.open = true
		s.call("ada", "3", "k")
		s.call("ada", "4", "l")
		began := time.Now()
		waits := s.begin(s.pay("ada", "5", "k"))
		slow := s.get("ada", "Last-Event-Id", "1")
		slow.slow = time.Hour
		s.sends(response("3"))
		s.answered(waits, "attached "+resumed("3", "5"))
		s.do(s.pay("ada", "6", "k"), "200 replayed "+resumed("3", "6"))
		select {
		case s.events <- response("4"):
			t.Error("the server has gone on")
		default:
		}
		other := s.get("ada", "Last-Event-Id", "1")
		s.sends(response("4"))
		if other.Body.String() != response("4") {
			t.Errorf("%q", other.Body)
		}
		s.do(s.pay("ada", "7", "l"), "200 replayed "+resumed("4", "7"))
		if waited := time.Since(began); waited != 0 {
			t.Errorf("they have waited for %v", waited)
		}
		s.was(2)
		s.over.Do(func() { close(s.events) })
		<-slow.ended
		if slow.Body.String() != response("3") {
			t.Errorf("%q", slow.Body)
		}
	})
}
