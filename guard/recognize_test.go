package guard_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
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
			r.Header.Set("Amz-Sdk-Request", "attempt=2; max=3")
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
			b.serve(&client{header: http.Header{}, gone: true}, b.keyless(""))
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

// P1 with a new key for each attempt: it is looked up by the same evidence where keys are advisory,
// and from then on names that execution.
func TestNewKeysThatAreAdvisory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := recognizing(t, charge)
		b.config.Actions = []*guard.Action{{Name: "default", Default: true, AdvisoryKeys: true}}
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
		<-time.After(2 * time.Second)
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
