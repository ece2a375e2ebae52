package e2e

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// steps is an answer that goes on by one piece for every signal.
type steps struct {
	t     *testing.T
	next  chan string // a piece; closed is the end
	begun chan struct{}
}

func newSteps(t *testing.T) *steps {
	s := &steps{t: t, next: make(chan string), begun: make(chan struct{})}
	return s
}

func (s *steps) answer(w http.ResponseWriter, a *arrival) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Arrival", fmt.Sprint(a.n))
	_ = http.NewResponseController(w).Flush()
	close(s.begun)
	for {
		select {
		case piece, more := <-s.next:
			if !more {
				return
			}
			_, _ = io.WriteString(w, piece)
			_ = http.NewResponseController(w).Flush()
		case <-a.Context().Done():
			return // the gateway gave up; the test will say so
		}
	}
}

// piece lets the next piece go, and every reader must get it.
func (s *steps) piece(text string, readers ...io.Reader) {
	s.t.Helper()
	select {
	case s.next <- text:
	case <-time.After(patience):
		s.t.Fatal("the upstream's answer is over already")
	}
	for i, r := range readers {
		buf := make([]byte, len(text))
		if _, err := io.ReadFull(r, buf); err != nil || string(buf) != text {
			s.t.Fatalf("reader %d got %q, %v; want %q", i, buf, err, text)
		}
	}
}

func (s *steps) end(readers ...io.Reader) {
	s.t.Helper()
	close(s.next)
	for i, r := range readers {
		if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
			s.t.Errorf("reader %d ended with %q, %v", i, rest, err)
		}
	}
}

// open makes a call and returns its answer with the body still to come.
func (g *gateway) open(r request, execution string) *http.Response {
	g.t.Helper()
	res, err := g.send(r)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { res.Body.Close() })
	if got := res.Header.Get("Execution-Status"); got != execution {
		g.t.Fatalf("%d, Execution-Status %q, want %q", res.StatusCode, got, execution)
	}
	return res
}

// "Attach": a duplicate of a running call gets the same bytes, from the beginning and
// live.
func TestAttach(t *testing.T) {
	u, s := newUpstream(t), newSteps(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", s.answer)
	r := request{path: "/x", id: "k"}
	owner := g.open(r, "executed")
	follower := g.open(r, "attached") // before there is any byte
	s.piece("one\n", owner.Body, follower.Body)
	late := g.open(r, "attached")
	s.piece("two\n", owner.Body, follower.Body)
	if got := make([]byte, 8); true {
		if _, err := io.ReadFull(late.Body, got); err != nil || string(got) != "one\ntwo\n" {
			t.Fatalf("the late one got %q, %v", got, err)
		}
	}
	s.piece("three\n", late.Body, follower.Body, owner.Body)
	s.end(owner.Body, follower.Body, late.Body)
	for _, res := range []*http.Response{follower, late} {
		if res.StatusCode != 200 || res.Header.Get("X-Arrival") != "1" || res.Header.Get("Content-Type") != "text/event-stream" ||
			res.Header.Get("Execution-Id") != "k" || res.Header.Get("Idempotent-Replayed") != "" {
			t.Errorf("attached: %d %v", res.StatusCode, res.Header)
		}
	}
	g.call(r).want(t, 200, "one\ntwo\nthree\n", "replayed")
	u.arrived("/x", 1)
}

// P1: a thousand equal calls at once are one execution, and all get its answer.
func TestThousandDuplicates(t *testing.T) {
	const n = 1000
	u, hold := newUpstream(t), newGate(t)
	g := launch(t, setup{site: "agent_proxy " + u.addr, badger: true})
	body := strings.Repeat("the one answer ", 100)
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, body)(w, a)
	})
	r := request{path: "/x", id: "k"}
	done := make(chan []reply, 1)
	go func() {
		defer close(done) // of a failed call
		done <- g.calls(n, r)
	}()
	wait(t, hold.arrived, "the first call")
	followers(t, n-1)
	hold.open()
	executed, attached := 0, 0
	for _, got := range wait(t, done, "all answers") {
		if got.status != 201 || got.body != body || got.cut {
			t.Fatalf("%d %q, cut %v", got.status, got.body, got.cut)
		}
		switch got.header.Get("Execution-Status") {
		case "executed":
			executed++
		case "attached":
			attached++
		}
	}
	if executed != 1 || attached != n-1 {
		t.Errorf("%d executed, %d attached", executed, attached)
	}
	u.arrived("/x", 1)
}

// "A release by proof elects exactly one waiter to run" (trap 15). What proves it
// here is a connection that ends before the request is written.
func TestReleaseByProofElectsOne(t *testing.T) {
	u, hold := makeUpstream(t), newGate(t)
	server := httptest.NewUnstartedServer(u)
	server.Listener = &firstIsLost{Listener: server.Listener, hold: hold}
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	g := start(t, "agent_proxy https://%s {\n transport agent_guard {\n tls_insecure_skip_verify\n}\n}", server.Listener.Addr())
	r := request{path: "/x", id: "k"}
	calls := []*pending{g.begin(r)}
	wait(t, hold.arrived, "the first call's connection")
	for range 10 {
		calls = append(calls, g.begin(r))
	}
	followers(t, 10)
	hold.open()
	count := map[string]int{}
	for i, p := range calls {
		got := p.answer()
		if i == 0 {
			if got.status != 502 || got.header.Get("Execution-Status") != "released" {
				t.Errorf("the first got %d %v", got.status, got.header)
			}
			continue
		}
		if got.status != 201 || got.body != "arrival 1" {
			t.Errorf("%d %q", got.status, got.body)
		}
		count[got.header.Get("Execution-Status")]++
	}
	if count["executed"] != 1 {
		t.Errorf("%v", count)
	}
	u.arrived("/x", 1)
}

// firstIsLost is a listener that ends its first connection before a byte came back.
type firstIsLost struct {
	net.Listener
	hold *gate
	once sync.Once
}

func (l *firstIsLost) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	lost := false
	l.once.Do(func() { lost = true })
	if !lost || err != nil {
		return conn, err
	}
	l.hold.pass()
	_ = conn.Close()
	return l.Listener.Accept()
}

// P7: a client's leaving never loses a result, whenever it leaves and whoever else is
// there (trap 13).
func TestOwnerLeaves(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, version := range []string{"h1", "h2c"} {
		for _, when := range []string{"header", "body", "attached"} {
			t.Run(version+" "+when, func(t *testing.T) {
				client := g.newClient(nil)
				if version == "h2c" {
					client = g.h2cClient()
				}
				hold, s := newGate(t), newSteps(t)
				r := request{path: "/" + version + "-" + when, id: "k", client: client}
				u.on(r.path, func(w http.ResponseWriter, a *arrival) {
					hold.pass()
					s.answer(w, a)
				})
				var follower *http.Response
				other := request{path: r.path, id: "k"}
				if when == "header" {
					leave := g.leaving(r)
					wait(t, hold.arrived, "the call")
					leave()
					hold.open()
				} else {
					hold.open()
					owner := g.open(r, "executed")
					s.piece("one ", owner.Body)
					if when == "attached" {
						follower = g.open(other, "attached")
						if got := make([]byte, 4); true {
							if _, err := io.ReadFull(follower.Body, got); err != nil {
								t.Fatal(err)
							}
						}
					}
					_ = owner.Body.Close()
					client.CloseIdleConnections()
				}
				wait(t, s.begun, "the upstream's answer")
				want := ""
				if when != "header" {
					want = "one "
				}
				big := strings.Repeat("more ", 100_000) // more than any buffer on the way
				if follower != nil {
					s.piece(big, follower.Body)
					s.end(follower.Body)
				} else {
					s.piece(big)
					s.end()
				}
				eventually(t, "the execution is settled", func() bool { return waiting("guard.(*Call).execute") == 0 })
				g.call(other).want(t, 200, want+big, "replayed")
				u.arrived(r.path, 1)
			})
		}
	}
}

// leaving begins a call and returns what breaks it off.
func (g *gateway) leaving(r request) (leave func()) {
	g.t.Helper()
	req, cancel := withCancel(g.build(r))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if res, err := r.client.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	g.t.Cleanup(cancel)
	return func() {
		cancel()
		wait(g.t, done, "the end of the call")
	}
}
