package guard_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// recognizing is a guard whose callers send no key.
func recognizing(t *testing.T, upstream func(n int64, w http.ResponseWriter, r *http.Request)) *bed {
	b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
		if leave, ok := r.Context().Value(leaving{}).(context.CancelFunc); ok {
			leave()
		}
		upstream(n, w, r)
	})
	b.config.MissingID = guard.MissingRecognize
	b.start()
	return b
}

// leaving is the key of what makes the client leave while its call runs.
type leaving struct{}

// lost makes a call whose client leaves while it runs.
func (b *bed) lost() {
	ctx, leave := context.WithCancel(b.Context())
	b.serve(httptest.NewRecorder(), b.keyless("").WithContext(context.WithValue(ctx, leaving{}, leave)))
}

// keyless makes the call of a caller, which says its number as a retry.
func (b *bed) keyless(count string) *http.Request {
	r := b.post("ada")
	r.Header.Del("Idempotency-Key")
	if count != "" {
		r.Header.Set("X-Stainless-Retry-Count", count)
	}
	return r
}

// P1 without a key: what is a retry, and what is a call of its own (ADR 0070).
func TestRetriesWithoutAKey(t *testing.T) {
	for name, test := range map[string]func(b *bed){
		"two are meant": func(b *bed) {
			b.do(b.keyless(""), "200 executed charge 1")
			b.do(b.keyless(""), "200 executed charge 2")
			b.do(b.keyless("0"), "200 executed charge 3")
		},
		"it says that it is a retry": func(b *bed) {
			b.do(b.keyless("0"), "200 executed charge 1")
			w := httptest.NewRecorder()
			b.serve(w, b.keyless("1"))
			if id := w.Header().Get("Execution-Recognized"); w.Body.String() != "charge 1" || id == "" || id != w.Header().Get("Execution-Id") {
				b.Errorf("%s %v", w.Body, w.Header())
			}
			r := b.keyless("")
			r.Header.Set("Amz-Sdk-Request", "attempt=3; max=3")
			b.do(r, "200 replayed charge 1")
			r.Header.Set("Amz-Sdk-Request", "attempt=1; max=3")
			b.do(r, "200 executed charge 2")
		},
		"the client has left": func(b *bed) {
			b.lost()
			b.do(b.keyless(""), "200 replayed charge 1")
			b.do(b.keyless(""), "200 executed charge 2")
		},
		"the answer could not be written": func(b *bed) {
			b.serve(departed{torn{httptest.NewRecorder()}}, b.keyless(""))
			b.do(b.keyless(""), "200 replayed charge 1")
		},
		"another caller's": func(b *bed) {
			b.lost()
			other := b.keyless("1")
			other.Header.Set("Authorization", "Bearer eve")
			b.do(other, "200 executed charge 2")
		},
		"strangers without a credential": func(b *bed) {
			one := b.keyless("")
			one.Header.Del("Authorization")
			b.do(one, "200 executed charge 1")
			other := b.keyless("1")
			other.Header.Del("Authorization")
			other.RemoteAddr = "192.0.2.77:5"
			b.do(other, "200 executed charge 2")
		},
		"over a restart": func(b *bed) {
			b.do(b.keyless(""), "200 executed charge 1")
			b.start() // at once: nothing says that the client got it
			b.do(b.keyless(""), "200 replayed charge 1")
			b.do(b.keyless(""), "200 executed charge 2")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(recognizing(t, charge)) })
		})
	}
}

// What clients retry is judged as with a key: a refusal runs, a failure is replayed, a doubt is said
// for the window.
func TestRetriesWithoutAKeyByOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := recognizing(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(map[int64]int{1: 529, 3: 500, 4: 502}[n] + map[bool]int{true: 200}[n == 2 || n > 4])
		})
		b.do(b.keyless("0"), "529 executed")
		b.do(b.keyless("1"), "200 executed ")
		b.do(b.keyless(""), "500 executed")
		b.do(b.keyless(""), "500 replayed")
		<-time.After(10 * time.Minute)
		b.do(b.keyless(""), "502 in_doubt")
		b.do(b.keyless(""), "409 in_doubt")
		<-time.After(9 * time.Minute)
		b.do(b.keyless("1"), "409 in_doubt")
		<-time.After(time.Minute)
		b.do(b.keyless(""), "200 executed ")
		b.was(5)
	})
}

// Three equal calls that are in doubt, and whose retries come at once, are three: a probe settles each of them.
func TestRetriesOfDoubtsThatAProbeSettles(t *testing.T) {
	for _, answer := range []int{200, 404} {
		synctest.Test(t, func(t *testing.T) {
			b := recognizing(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
				<-time.After(10 * time.Second)
				if n <= 3 {
					w.WriteHeader(http.StatusBadGateway)
				}
				_, _ = fmt.Fprint(w, "charge ", n)
			})
			action := probing(true, func() int {
				<-time.After(time.Second)
				return answer
			})
			action.Name, action.Default = "default", true
			b.config.Actions = []*guard.Action{&action}
			b.start()
			three := func() (ids map[string]bool) {
				ids = map[string]bool{}
				var all sync.WaitGroup
				var mu sync.Mutex
				for range 3 {
					all.Go(func() {
						w := httptest.NewRecorder()
						b.serve(w, b.keyless(""))
						mu.Lock()
						defer mu.Unlock()
						ids[w.Header().Get("Execution-Id")] = true
					})
				}
				all.Wait()
				return ids
			}
			first := three()
			if again := three(); len(first) != 3 || !maps.Equal(again, first) {
				t.Errorf("%v, and their retries %v", first, again)
			}
			b.was(map[int]int64{200: 3, 404: 6}[answer])
		})
	}
}

// P1 with a new key for each attempt: it is looked up by the same evidence where keys are advisory,
// and from then on names that execution.
func TestNewKeysThatAreAdvisory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := recognizing(t, charge)
		b.config.Policy = guard.Policy{Keys: guard.KeysAdvisory}
		b.start()
		keyed := func(key string) *http.Request {
			r := b.post("ada")
			r.Header.Set("Idempotency-Key", key)
			return r
		}
		ctx, leave := context.WithCancel(b.Context())
		b.serve(httptest.NewRecorder(), keyed("a").WithContext(context.WithValue(ctx, leaving{}, leave)))
		other := keyed("b")
		other.Header.Set("Authorization", "Bearer eve")
		b.do(other, "200 executed charge 2")
		<-time.After(1)
		w := httptest.NewRecorder()
		b.serve(w, keyed("b"))
		if h := w.Header(); w.Body.String() != "charge 1" || h.Get("Execution-Recognized") != "a" || h.Get("Execution-Id") != "a" {
			b.Errorf("%s %v", w.Body, h)
		}
		b.do(keyed("c"), "200 executed charge 3")
		<-time.After(5 * time.Second)
		b.start()
		b.do(keyed("b"), "200 replayed charge 1")
		b.do(keyed("a"), "200 replayed charge 1")
		another := keyed("b")
		another.Body = io.NopCloser(strings.NewReader("amount=99"))
		b.do(another, "422 refused")
		b.do(keyed("d"), "200 executed charge 4")
		b.was(4)
	})
}

// agents is a guard of an MCP server. Its calls wait until the test lets them go; what else comes is
// noted.
type agents struct {
	*bed
	hold  chan struct{}
	other []string
	open  bool

	cut     atomic.Bool // a call was cancelled
	streams bool        // the answers of calls are streams of events
}

func newAgents(t *testing.T) *agents {
	a := &agents{hold: make(chan struct{})}
	a.bed = newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what is cut fits no case
		if !strings.Contains(string(body), "tools/call") {
			a.calls.Add(-1)
			a.other = append(a.other, string(body))
			w.WriteHeader(http.StatusAccepted)
			return
		}
		if a.streams {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":3,\"result\":{\"n\":%d}}\n\n", n)
			_ = http.NewResponseController(w).Flush() // a recorder flushes
			<-a.hold
			return
		}
		select {
		case <-a.hold:
		case <-r.Context().Done():
			a.cut.Store(true)
			return
		}
		id, _, _ := strings.Cut(strings.SplitN(string(body), `"id":`, 2)[1], ",")
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"n":%d}}`, id, n)
	})
	a.config.Protocol = protocol.MCP
	a.config.MissingID = guard.MissingRecognize
	a.start()
	return a
}

// message makes a POST of a message; session is that of a caller of the same name.
func (a *agents) message(session, body string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+session)
	r.Header.Set("Mcp-Session-Id", session)
	return r
}

func (a *agents) pay(session, id, key string) *http.Request {
	if key != "" {
		key = `,"_meta":{"execution-id":"` + key + `"}`
	}
	return a.message(session, `{"jsonrpc":"2.0","id":`+id+`,"method":"tools/call","params":{"name":"pay","arguments":{"amount":10}`+key+`}}`)
}

// begin makes a call that the test lets go later.
func (a *agents) begin(r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	go a.serve(w, r)
	synctest.Wait()
	return w
}

const cancelled = `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%s,"reason":"timeout"}}`

// cancel says that a client does not wait, and compares what the upstream hears.
func (a *agents) cancel(session, id, want string) {
	a.Helper()
	a.other = nil
	a.do(a.message(session, fmt.Sprintf(cancelled, id)), "202  ")
	if got := strings.Join(a.other, "\n"); got != want {
		a.Errorf("the upstream has heard %q, not %q", got, want)
	}
}

// answered lets the calls go, and compares an answer.
func (a *agents) answered(w *httptest.ResponseRecorder, want string) {
	a.Helper()
	if !a.open {
		synctest.Wait()
		a.open = true
		close(a.hold)
	}
	synctest.Wait()
	if got := w.Header().Get("Execution-Status") + " " + w.Body.String(); got != want {
		a.Errorf("got %s, want %s", got, want)
	}
}

// P1: after a timeout an SDK of MCP leaves its request open and says notifications/cancelled.
func TestCancelledCallsAreRetried(t *testing.T) {
	heard := func(id string) string { return fmt.Sprintf(cancelled, id) }
	for name, test := range map[string]func(a *agents){
		"while it runs": func(a *agents) {
			a.begin(a.pay("ada", "3", ""))
			a.cancel("ada", "3", heard("3"))
			retry := a.begin(a.pay("ada", "4", ""))
			a.answered(retry, `attached {"jsonrpc":"2.0","id":4,"result":{"n":1}}`)
			a.do(a.pay("ada", "5", ""), `200 executed {"jsonrpc":"2.0","id":5,"result":{"n":2}}`)
			a.was(2)
		},
		"its answer went to a request that nobody reads": func(a *agents) {
			first := a.begin(a.pay("ada", "3", ""))
			a.cancel("ada", "3", heard("3"))
			a.answered(first, `executed {"jsonrpc":"2.0","id":3,"result":{"n":1}}`)
			a.do(a.pay("ada", "4", ""), `200 replayed {"jsonrpc":"2.0","id":4,"result":{"n":1}}`)
			a.was(1)
		},
		"the final event has gone to it": func(a *agents) {
			a.streams = true
			a.begin(a.pay("ada", "3", ""))
			a.cancel("ada", "3", heard("3"))
			retry := a.begin(a.pay("ada", "4", ""))
			a.answered(retry, "attached data: {\"jsonrpc\":\"2.0\",\"id\":4,\"result\":{\"n\":1}}\n\n")
			a.was(1)
		},
		"a retry in the same instant": func(a *agents) {
			a.begin(a.pay("ada", "3", ""))
			retry := httptest.NewRecorder()
			go a.serve(retry, a.pay("ada", "4", ""))
			<-time.After(10 * time.Millisecond)
			a.cancel("ada", "3", heard("3"))
			a.answered(retry, `attached {"jsonrpc":"2.0","id":4,"result":{"n":1}}`)
			a.was(1)
		},
		"each of three attempts, told of once": func(a *agents) {
			a.begin(a.pay("ada", "3", ""))
			a.cancel("ada", "3", heard("3"))
			a.cancel("ada", "3", "")
			a.begin(a.pay("ada", `"b"`, ""))
			a.cancel("ada", `"b"`, "")
			last := a.begin(a.pay("ada", "5", ""))
			a.answered(last, `attached {"jsonrpc":"2.0","id":5,"result":{"n":1}}`)
			a.cancel("ada", "5", heard("5")) // it has been answered: nothing is known here
			a.was(1)
		},
		"one that attached, while the first waits": func(a *agents) {
			first := a.begin(a.pay("ada", "3", "k"))
			a.begin(a.pay("ada", "4", "k"))
			a.cancel("ada", "4", "")
			a.answered(first, `executed {"jsonrpc":"2.0","id":3,"result":{"n":1}}`)
			a.was(1)
		},
		"the first, and then the one that waits": func(a *agents) {
			a.begin(a.pay("ada", "3", "k"))
			second := a.begin(a.pay("ada", `"four"`, "k"))
			a.cancel("ada", "3", "")
			a.cancel("ada", `"four"`, heard("3"))
			a.cancel("ada", `"four"`, "")
			a.answered(second, `attached {"jsonrpc":"2.0","id":"four","result":{"n":1}}`)
		},
		"the first by its connection, then the one that waits": func(a *agents) {
			ctx, leave := context.WithCancel(a.Context())
			a.begin(a.pay("ada", "3", "").WithContext(ctx))
			leave()
			a.begin(a.pay("ada", "4", ""))
			a.cancel("ada", "4", heard("3"))
			retry := a.begin(a.pay("ada", "5", ""))
			a.answered(retry, `attached {"jsonrpc":"2.0","id":5,"result":{"n":1}}`)
			a.was(1)
		},
		"from another session": func(a *agents) {
			a.begin(a.pay("ada", "3", "k"))
			other := a.pay("ada", "4", "k")
			other.Header.Set("Mcp-Session-Id", "new")
			a.begin(other)
			a.cancel("ada", "3", "")
			notice := a.message("ada", heard("4"))
			notice.Header.Set("Mcp-Session-Id", "new")
			a.do(notice, "202  ")
			if len(a.other) != 0 {
				a.Errorf("the upstream has heard %q", a.other)
			}
			close(a.hold)
		},
		"in a batch": func(a *agents) {
			first := a.begin(a.pay("ada", "3", "k"))
			a.begin(a.pay("ada", "4", "k"))
			a.do(a.message("ada", "["+heard("4")+`, {"jsonrpc":"2.0","method":"notifications/initialized"}]`), "202  ")
			a.do(a.message("ada", "["+heard("3")+", "+heard("9")+"]"), "202  ")
			want := []string{`[{"jsonrpc":"2.0","method":"notifications/initialized"}]`, "[" + heard("3") + ", " + heard("9") + "]"}
			if !slices.Equal(a.other, want) {
				a.Errorf("the upstream has heard %q", a.other)
			}
			a.answered(first, `executed {"jsonrpc":"2.0","id":3,"result":{"n":1}}`)
		},
		"without a session": func(a *agents) {
			sessionless := func(address string, r *http.Request) *http.Request {
				r.Header.Del("Mcp-Session-Id")
				r.RemoteAddr = address
				return r
			}
			a.begin(sessionless("192.0.2.7:1", a.pay("ada", "3", "")))
			a.do(sessionless("192.0.2.8:1", a.message("ada", heard("3"))), "202  ") // another's
			second := a.begin(sessionless("192.0.2.7:2", a.pay("ada", "3", "")))
			<-time.After(time.Second)                                               // a new call
			a.do(sessionless("192.0.2.7:3", a.message("ada", heard("3"))), "202  ") // of either
			third := a.begin(sessionless("192.0.2.7:2", a.pay("ada", "4", "")))
			<-time.After(time.Second)
			a.answered(second, `executed {"jsonrpc":"2.0","id":3,"result":{"n":2}}`)
			a.answered(third, `executed {"jsonrpc":"2.0","id":4,"result":{"n":3}}`)
		},
		"others' requests of the same id": func(a *agents) {
			first := a.begin(a.pay("ada", "3", ""))
			a.cancel("eve", "3", heard("3"))
			eve := a.message("ada", heard("3"))
			eve.Header.Set("Authorization", "Bearer eve")
			a.do(eve, "202  ")
			a.cancel("ada", `"3"`, heard(`"3"`))
			second := a.begin(a.pay("ada", "4", ""))
			<-time.After(time.Second)
			a.answered(first, `executed {"jsonrpc":"2.0","id":3,"result":{"n":1}}`)
			a.answered(second, `executed {"jsonrpc":"2.0","id":4,"result":{"n":2}}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newAgents(t)) })
		})
	}
}

// With on_leave cancel the last client that leaves ends the request, and nothing is known of its
// effect (P1, P6).
func TestCancelOnLeave(t *testing.T) {
	for name, test := range map[string]func(a *agents, leave, leaveSecond context.CancelFunc, second func() *httptest.ResponseRecorder){
		"the only one": func(a *agents, leave, _ context.CancelFunc, _ func() *httptest.ResponseRecorder) {
			leave()
			synctest.Wait()
			a.doubted(true)
		},
		"by a notification": func(a *agents, _, _ context.CancelFunc, _ func() *httptest.ResponseRecorder) {
			a.cancel("ada", "3", fmt.Sprintf(cancelled, "3"))
			synctest.Wait()
			a.doubted(true)
		},
		"another waits": func(a *agents, leave, _ context.CancelFunc, second func() *httptest.ResponseRecorder) {
			w := second()
			leave()
			synctest.Wait()
			a.doubted(false)
			a.answered(w, `attached {"jsonrpc":"2.0","id":4,"result":{"n":1}}`)
		},
		"another leaves": func(a *agents, _, leave context.CancelFunc, second func() *httptest.ResponseRecorder) {
			second()
			leave()
			synctest.Wait()
			a.doubted(false)
		},
		"both leave": func(a *agents, leave, leaveSecond context.CancelFunc, second func() *httptest.ResponseRecorder) {
			second()
			leave()
			leaveSecond()
			synctest.Wait()
			a.doubted(true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAgents(t)
				a.config.Policy = guard.Policy{OnLeave: guard.OnLeaveCancel}
				a.start()
				first, leave := context.WithCancel(t.Context())
				other, leaveSecond := context.WithCancel(t.Context())
				a.begin(a.pay("ada", "3", "k").WithContext(first))
				test(a, leave, leaveSecond, func() *httptest.ResponseRecorder { return a.begin(a.pay("ada", "4", "k").WithContext(other)) })
				leave()
				leaveSecond()
				synctest.Wait()
				a.was(1)
			})
		})
	}
}

// doubted compares whether the call was cancelled, after which a retry is told of the doubt.
func (a *agents) doubted(want bool) {
	a.Helper()
	if a.cut.Load() != want {
		a.Errorf("cancelled: %t", !want)
	}
	if !want {
		return
	}
	w := httptest.NewRecorder()
	a.serve(w, a.pay("ada", "5", "k"))
	if h := w.Header(); h.Get("Execution-Status") != "refused" && h.Get("Execution-Status") != "in_doubt" || !strings.Contains(w.Body.String(), "client_left") {
		a.Errorf("%v %s", h, w.Body)
	}
}

// Where the store does not answer, a call that may be a retry is refused (P4).
func TestRetryWithoutAKeyAndWithoutAStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := recognizing(t, charge)
		b.do(b.keyless(""), "200 executed charge 1")
		b.disk.broken.Store(true)
		b.do(b.keyless(""), "503 refused")
		b.disk.broken.Store(false)
		b.do(b.keyless("1"), "200 replayed charge 1")
	})
}

// P1, P4: a retry that was recognised is not forwarded unguarded, though its record cannot be read.
func TestRetryWithoutAKeyDoesNotFailOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := recognizing(t, charge)
		b.config.FailOpen = true
		b.start()
		b.lost()
		<-time.After(2 * time.Second) // its mark is written
		reading := func() error { return errors.New("broken") }
		b.disk.reading.Store(&reading)
		b.do(b.keyless(""), "503 refused")
		b.disk.reading.Store(nil)
		b.do(b.keyless(""), "200 replayed charge 1")
		b.was(1)
	})
}

// departed is a client that has left.
type departed struct{ torn }

func (departed) Write([]byte) (int, error) { return 0, errors.New("the client has left") }

// torn is a client whose connection is found broken when the end of the answer is flushed to it.
type torn struct{ *httptest.ResponseRecorder }

func (torn) FlushError() error { return errors.New("connection reset by peer") }

// *Handed over*: a write that only fails once it is flushed has answered nobody, of an answer as it
// comes and of a recorded one.
func TestAnswersThatCannotBeFlushed(t *testing.T) {
	for status, want := range map[int][]string{
		200: {"200 replayed charge 1", "200 executed charge 2"},
		204: {"204 replayed ", "204 executed "}, // of which the header is the end
	} {
		b := recognizing(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
			if status == http.StatusNoContent {
				w.WriteHeader(status)
				return
			}
			w.Header().Set("Content-Length", "8")
			_, _ = fmt.Fprint(w, "charge ", n)
		})
		for range 3 {
			b.guard.ServeHTTP(torn{httptest.NewRecorder()}, b.keyless(""))
			b.was(1)
		}
		for _, next := range want {
			b.do(b.keyless(""), next)
		}
	}
}

// The same of the final event of a stream that stays open.
func TestFinalEventsThatCannotBeFlushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgents(t)
		a.streams = true
		go a.serve(torn{httptest.NewRecorder()}, a.pay("ada", "3", ""))
		synctest.Wait()
		retry := a.begin(a.pay("ada", "4", ""))
		close(a.hold)
		synctest.Wait()
		if got := retry.Body.String(); !strings.Contains(got, `"id":4,"result":{"n":1}`) {
			t.Errorf("the retry is answered %s", got)
		}
		a.was(1)
	})
}

// With sockets: three equal calls whose clients do not wait for the answer, and are retried, give
// three answers of three executions; two in parallel that wait give two.
func TestRetriesWithoutAKeyOverSockets(t *testing.T) {
	go1 := make(chan struct{})
	var arrived sync.WaitGroup
	arrived.Add(3)
	b := recognizing(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
		if n <= 3 {
			arrived.Done()
			<-go1
		}
		_, _ = fmt.Fprint(w, "charge ", n)
	})
	left := make(chan struct{}, 3) // has one for each client whose leave the server has seen
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		context.AfterFunc(r.Context(), func() {
			select {
			case left <- struct{}{}:
			default:
			}
		})
		b.guard.ServeHTTP(w, r)
	}))
	defer server.Close()
	const request = "POST /charges HTTP/1.1\r\nHost: guard\r\nAuthorization: Bearer ada\r\nContent-Length: 9\r\n\r\namount=10"
	var conns []net.Conn
	for range 3 {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
		if _, err = io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
	}
	arrived.Wait()
	for _, conn := range conns {
		_ = conn.Close()
		<-left
	}
	post := func() (body, recognized string) {
		r, err := http.NewRequest(http.MethodPost, server.URL+"/charges", strings.NewReader("amount=10"))
		if err != nil {
			t.Error(err)
			return
		}
		r.Host = "guard"
		r.Header.Set("Authorization", "Bearer ada")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = answer.Body.Close() }()
		all, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Error(err)
		}
		return string(all), answer.Header.Get("Execution-Recognized")
	}
	var mu sync.Mutex
	answers := map[string]int{}
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			body, recognized := post()
			mu.Lock()
			defer mu.Unlock()
			if answers[body]++; recognized == "" {
				t.Errorf("%s was not recognised", body)
			}
		})
	}
	close(go1)
	all.Wait()
	if len(answers) != 3 || b.calls.Load() != 3 {
		t.Errorf("three retries got %v of %d executions", answers, b.calls.Load())
	}
	if body, recognized := post(); body != "charge 4" || recognized != "" {
		t.Errorf("a call of its own got %s (%s)", body, recognized)
	}
}
