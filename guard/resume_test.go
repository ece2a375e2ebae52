package guard_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
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
				flush(w)
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
	s.config.Protocol = protocolName
	s.config.MissingID = guard.MissingRecognize
	s.config.OneServer = func() bool { return true }
	s.start()
	return s
}

// end lets all streams end.
func (s *resuming) end() {
	s.over.Do(func() { close(s.events) })
	synctest.Wait()
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
	slow  time.Duration // each write
}

func (w *stream) Write(p []byte) (int, error) {
	<-time.After(w.slow)
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
	return fmt.Sprintf("event: message\ndata: {\"result\":{\"n\":%s},\"jsonrpc\":\"2.0\",\"id\":%s} \n\n", of, id)
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

// elsewhere says that the call with the key "k" is in doubt, since its answer may come on another stream.
func (s *resuming) elsewhere() {
	s.Helper()
	s.doubt("continues_elsewhere")
}

// MCP 2025-11-25: the answer to a POST whose stream has ended comes on a GET stream of its session. It settles the
// doubt of its own call, and of no other one (P1, P3, P6).
func TestAnswersOnGETStreamsSettleDoubts(t *testing.T) {
	const notification = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\n\n"
	const asked = "data: {\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"elicitation/create\",\"params\":{}}\n\n"
	ran := map[string]int64{"an id that its session has had": 2, "an id that another session has had": 2, "several": 3, "two with one id": 2, "two with one id, after the answer": 2, "an error, and a retry": 2, "it has run again": 2}
	for name, test := range map[string]func(s *resuming){
		"everybody gets it from then on": func(s *resuming) {
			s.call("ada", "3", "k")
			s.elsewhere()
			get := s.get("ada", "Last-Event-Id", "1")
			s.sends(notification, ": keep\n\n", asked, response("3"))
			s.do(s.pay("ada", "4", "k"), "200 replayed "+resumed("3", "4"))
			s.end()
			<-get.ended
			if want := notification + ": keep\n\n" + asked + response("3"); get.Body.String() != want {
				s.Errorf("the GET has brought %q, want %q", get.Body, want)
			}
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
			s.elsewhere()
		},
		"on a GET that was there before": func(s *resuming) {
			s.get("ada")
			s.call("ada", "3", "k")
			s.sends(response("3"))
			s.elsewhere()
		},
		"without Last-Event-ID": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
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
		"over several lines": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"id\":3,\r\ndata:\"result\":{}}\r\n\r\n")
			s.do(s.pay("ada", "5", "k"), "200 replayed event: message\ndata: {\"id\":5, \"result\":{}} \n\n")
		},
		"larger than what is kept": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"id\":3,\"result\":{\"n\":\"" + strings.Repeat("x", 256<<10) + "\"}}\n\n")
			w := s.begin(s.pay("ada", "5", "k"))
			if !strings.Contains(w.Body.String(), "result-unavailable") {
				s.Errorf("%d %s", w.Code, w.Body)
			}
		},
		"after its connection has broken, and a GET has resumed its stream": func(s *resuming) {
			s.until = make(chan struct{})
			r, leave := withLeave(s.pay("ada", "3", "k"))
			s.begin(r)
			leave()
			synctest.Wait()
			s.get("ada", "Last-Event-Id", "1")
			close(s.until)
			synctest.Wait()
			s.elsewhere()
			s.sends(response("3"))
			s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		},
		"before the stream of the POST has ended": func(s *resuming) {
			s.until = make(chan struct{})
			s.begin(s.pay("ada", "3", "k"))
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3"))
			close(s.until)
			synctest.Wait()
			s.elsewhere()
		},
		"on a GET that breaks and is resumed": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3")[:30], "")
			s.elsewhere()
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
			if w := s.begin(s.pay("ada", "7", "m")); w.Header().Get("Execution-Status") != "in_doubt" {
				s.Errorf("the third: %v", w.Header())
			}
		},
		"two with one id": func(s *resuming) {
			s.call("ada", "3", "k")
			s.call("ada", "3", "l")
			s.get("ada")
			s.sends(response("3"))
			s.elsewhere()
			if w := s.begin(s.pay("ada", "7", "l")); w.Header().Get("Execution-Status") != "in_doubt" {
				s.Errorf("the second: %v", w.Header())
			}
		},
		"two with one id, after the answer": func(s *resuming) {
			s.call("ada", "3", "l")
			s.get("ada")
			s.sends(response("3"))
			s.call("ada", "3", "k")
			s.get("ada")
			s.events <- response("3") // of the first once more, or of this one
			s.events <- response("3")
			synctest.Wait()
			s.elsewhere()
		},
		"an id that its session has had": func(s *resuming) { // of a call that still runs
			s.call("ada", "3", "k")
			s.until = make(chan struct{})
			s.begin(s.pay("ada", "3", "l"))
			s.get("ada")
			s.sends(response("3"))
			s.elsewhere()
			close(s.until)
		},
		"an id that another session has had": func(s *resuming) {
			s.call("eve", "3", "first")
			s.call("ada", "3", "k")
			s.get("ada", "Last-Event-Id", "1")
			s.sends(response("3"))
			s.do(s.pay("ada", "4", "k"), "200 replayed "+resumed("3", "4"))
		},
		"what is no answer": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends(asked, "data: {\"id\":3,\"result\":{}\n\n", "data: {\"id\":3,\"result\":{},\"error\":{}}\n\n", "data: {\"id\":3}\n\n", "data: {\"result\":{}}\n\n")
			s.elsewhere()
		},
		"of other sessions and callers": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("eve")
			s.sends(response("3"), "")
			s.get("ada", "Mcp-Session-Id", "eve")
			s.sends(response("3"), "")
			s.get("ada", "Authorization", "Bearer eve")
			s.sends(response("3"))
			s.elsewhere()
		},
		"compressed": func(s *resuming) {
			s.call("ada", "3", "k")
			s.header.Set("Content-Encoding", "x")
			s.get("ada")
			s.sends(response("3"))
			s.elsewhere()
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
			s.elsewhere()
		},
		"after the process was killed": func(s *resuming) {
			s.call("ada", "3", "k")
			s.start()
			s.get("ada")
			s.sends(response("3"))
			s.elsewhere()
		},
		"an error, and a retry": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"id\":3,\"error\":{\"code\":-32601}}\n\n")
			s.priming = "data: {\"id\":4,\"result\":{}}\n\n"
			s.do(s.pay("ada", "4", "k"), "200 executed data: {\"id\":4,\"result\":{}}\n\n")
		},
		"an error after news of its work": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.sends("data: {\"method\":\"notifications/progress\",\"params\":{\"progressToken\":1}}\n\n", "data: {\"id\":3,\"error\":{\"code\":-32601}}\n\n")
			s.do(s.pay("ada", "4", "k"), "200 replayed event: message\ndata: {\"id\":4,\"error\":{\"code\":-32601}} \n\n")
		},
		"it has run again": func(s *resuming) {
			s.config.Policy = guard.Policy{OnUnknown: guard.OnUnknownRetry}
			s.start()
			s.call("ada", "3", "k")
			s.call("ada", "4", "k")
			s.get("ada")
			s.sends(response("3")) // says nothing of the second attempt
			found, err := s.engine.Executions.List(s.Context(), execution.Filter{}, "", 10)
			if err != nil || len(found.Executions) != 1 || found.Executions[0].Record.State != execution.StateInDoubt {
				s.Errorf("%+v, %v", found, err)
			}
		},
		"the store does not answer": func(s *resuming) {
			s.call("ada", "3", "k")
			s.get("ada")
			s.disk.broken.Store(true)
			s.sends(response("3"))
			s.disk.broken.Store(false)
			s.elsewhere()
		},
		"the upstream has heard before that nobody waits": func(s *resuming) {
			s.until = make(chan struct{})
			s.begin(s.pay("ada", "3", "k"))
			s.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
			close(s.until)
			synctest.Wait()
			s.doubt("client_left")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newResuming(t, protocol.MCP)
				test(s)
				s.was(max(1, ran[name]))
				s.end()
			})
		})
	}
}

// ADR 0070: that doubt is no evidence of a retry, before it is settled and afterwards: its client may still get its
// answer. Equal calls without a key are meant.
func TestDoubtsElsewhereAreNoEvidence(t *testing.T) {
	for name, test := range map[string]func(s *resuming){
		"in doubt": func(s *resuming) {
			s.call("ada", "3", "")
			s.call("ada", "4", "")
			<-time.After(time.Minute)
			s.start() // by what is stored
			s.call("ada", "5", "")
		},
		"without a session": func(s *resuming) {
			for id := range 3 {
				r := s.pay("ada", fmt.Sprint(id), "")
				r.Header.Del("Mcp-Session-Id")
				s.serve(httptest.NewRecorder(), r)
			}
		},
		"settled": func(s *resuming) {
			s.call("ada", "3", "")
			s.get("ada")
			s.sends(response("3"))
			s.call("ada", "4", "")
			s.start()
			s.call("ada", "5", "")
		},
		"settled by an error like a 500": func(s *resuming) {
			s.call("ada", "3", "")
			s.get("ada")
			s.sends("data: {\"jsonrpc\":\"2.0\",\"id\":3,\"error\":{\"code\":-32603,\"message\":\"Internal\"}}\n\n")
			s.call("ada", "4", "")
			s.call("ada", "5", "")
		},
		"before it is recorded": func(s *resuming) {
			s.disk.takes = time.Second
			for id := range 3 {
				go s.call("ada", fmt.Sprint(id), "")
				<-time.After(1500 * time.Millisecond)
			}
			<-time.After(10 * time.Second)
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
			s.calls.Add(1)
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
			s.calls.Add(2)
			close(s.until)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newResuming(t, protocol.MCP)
				test(s)
				s.was(3)
				s.end()
				<-time.After(time.Minute)
			})
		})
	}
}

// P7: the event with the answer does not wait for the record, the end of its stream does. A client that reads slowly
// holds up no record.
func TestGETStreamsEndWithTheRecord(t *testing.T) {
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
		var retry sync.WaitGroup // its client has the answer
		retry.Go(func() { s.do(s.pay("ada", "4", "k"), "200 replayed "+resumed("3", "4")) })
		synctest.Wait()
		s.end()
		<-get.ended
		if waited := time.Since(began); waited != time.Second {
			t.Errorf("the end has waited for %v", waited)
		}
		retry.Wait()
		s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
	})
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.MCP)
		s.call("ada", "3", "k")
		get := s.get("ada")
		get.slow = time.Hour
		s.sends(response("3"))
		began := time.Now()
		s.do(s.pay("ada", "5", "k"), "200 replayed "+resumed("3", "5"))
		if waited := time.Since(began); waited != 0 {
			t.Errorf("it has waited for %v", waited)
		}
		s.end()
		<-get.ended
	})
}

// P1: who calls again gets the answer that its client has read on a GET stream, also where the record is read before
// the answer is in it. The wait ends with the record, where that fails as well, and with the time for running calls.
func TestRetriesWaitForAnAnswerThatIsBeingRecorded(t *testing.T) {
	for name, test := range map[string]func(s *resuming){
		"who reads the record earlier": func(s *resuming) {
			s.disk.slow.Store(int64(2 * time.Second))
			s.do(s.pay("ada", "4", "k"), "200 replayed "+resumed("3", "4"))
		},
		"it cannot be recorded": func(s *resuming) {
			s.disk.broken.Store(true)
			began := time.Now()
			s.elsewhere()
			if waited := time.Since(began); waited != time.Second {
				s.Errorf("the doubt is told after %v", waited)
			}
		},
		"it is not recorded in time": func(s *resuming) {
			s.config.AttachWait = jsontime.Duration(time.Second / 2)
			s.config.Open = s.engine.Open
			s.guard, _ = guard.New(s.config)
			began := time.Now()
			s.elsewhere()
			if waited := time.Since(began); waited != time.Second/2 {
				s.Errorf("the doubt is told after %v", waited)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newResuming(t, protocol.MCP)
				s.call("ada", "3", "k")
				get := s.get("ada")
				s.disk.takes = time.Second
				s.sends(response("3"))
				test(s)
				s.end()
				<-get.ended
			})
		})
	}
}

// With protocol auto only what its server has shown counts, and only on the same way to it.
func TestGETStreamsOfProvenServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResuming(t, protocol.Auto)
		s.serve(httptest.NewRecorder(), s.pay("ada", "3", "j"))
		s.do(s.pay("ada", "4", "j"), "200 replayed ") // by the rules of HTTP
		hello := s.message("ada", `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}`)
		s.serve(httptest.NewRecorder(), hello)
		s.call("ada", "7", "k")
		s.get("ada", "X-Tenant", "other")
		s.sends(response("7"), "")
		s.elsewhere()
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
