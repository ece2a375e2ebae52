package call

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

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
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

func (s *steps) answer(w http.ResponseWriter, a *harness.Arrival) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Arrival", fmt.Sprint(a.N))
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
	case <-time.After(harness.Patience):
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

// "Attach": a duplicate of a running call gets the same bytes, from the beginning and
// live.
func TestAttach(t *testing.T) {
	u, s := harness.NewUpstream(t), newSteps(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	u.On("/x", s.answer)
	r := harness.Request{Path: "/x", Id: "k"}
	owner := g.Open(r, "executed")
	follower := g.Open(r, "attached") // before there is any byte
	s.piece("one\n", owner.Body, follower.Body)
	late := g.Open(r, "attached")
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
	g.Call(r).Want(t, 200, "one\ntwo\nthree\n", "replayed")
	u.Arrived("/x", 1)
}

// P1: a thousand equal calls at once are one execution, and all get its answer.
func TestThousandDuplicates(t *testing.T) {
	const n = 1000
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Launch(t, harness.Setup{Site: "agent_proxy " + u.Addr, Badger: true})
	body := strings.Repeat("the one answer ", 100)
	u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, body)(w, a)
	})
	r := harness.Request{Path: "/x", Id: "k"}
	done := make(chan []harness.Reply, 1)
	go func() {
		defer close(done) // of a failed call
		done <- g.Calls(n, r)
	}()
	harness.Wait(t, hold.Arrived, "the first call")
	harness.Followers(t, n-1)
	hold.Open()
	executed, attached := 0, 0
	for _, got := range harness.Wait(t, done, "all answers") {
		if got.Status != 201 || got.Body != body || got.Cut {
			t.Fatalf("%d %q, cut %v", got.Status, got.Body, got.Cut)
		}
		switch got.Header.Get("Execution-Status") {
		case "executed":
			executed++
		case "attached":
			attached++
		}
	}
	if executed != 1 || attached != n-1 {
		t.Errorf("%d executed, %d attached", executed, attached)
	}
	u.Arrived("/x", 1)
}

// "A release by proof elects exactly one waiter to run" (trap 15). What proves it
// here is a connection that ends before the request is written.
func TestReleaseByProofElectsOne(t *testing.T) {
	u, hold := harness.MakeUpstream(t), harness.NewGate(t)
	server := httptest.NewUnstartedServer(u)
	server.Listener = &firstIsLost{Listener: server.Listener, hold: hold}
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	g := harness.Start(t, "agent_proxy https://%s {\n transport agent_guard {\n tls_insecure_skip_verify\n}\n}", server.Listener.Addr())
	r := harness.Request{Path: "/x", Id: "k"}
	calls := []*harness.Pending{g.Begin(r)}
	harness.Wait(t, hold.Arrived, "the first call's connection")
	for range 10 {
		calls = append(calls, g.Begin(r))
	}
	harness.Followers(t, 10)
	hold.Open()
	count := map[string]int{}
	for i, p := range calls {
		got := p.Answer()
		if i == 0 {
			if got.Status != 502 || got.Header.Get("Execution-Status") != "released" {
				t.Errorf("the first got %d %v", got.Status, got.Header)
			}
			continue
		}
		if got.Status != 201 || got.Body != "arrival 1" {
			t.Errorf("%d %q", got.Status, got.Body)
		}
		count[got.Header.Get("Execution-Status")]++
	}
	if count["executed"] != 1 {
		t.Errorf("%v", count)
	}
	u.Arrived("/x", 1)
}

// firstIsLost is a listener that ends its first connection before a byte came back.
type firstIsLost struct {
	net.Listener
	hold *harness.Gate
	once sync.Once
}

func (l *firstIsLost) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	lost := false
	l.once.Do(func() { lost = true })
	if !lost || err != nil {
		return conn, err
	}
	l.hold.Pass()
	_ = conn.Close()
	return l.Listener.Accept()
}

// P7: a client's leaving never loses a result, whenever it leaves and whoever else is
// there (trap 13).
func TestOwnerLeaves(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, version := range []string{"h1", "h2c"} {
		for _, when := range []string{"header", "body", "attached"} {
			t.Run(version+" "+when, func(t *testing.T) {
				client := g.NewClient(nil)
				if version == "h2c" {
					client = g.H2cClient()
				}
				hold, s := harness.NewGate(t), newSteps(t)
				r := harness.Request{Path: "/" + version + "-" + when, Id: "k", Client: client}
				u.On(r.Path, func(w http.ResponseWriter, a *harness.Arrival) {
					hold.Pass()
					s.answer(w, a)
				})
				var follower *http.Response
				other := harness.Request{Path: r.Path, Id: "k"}
				if when == "header" {
					leave := g.Leaving(r)
					harness.Wait(t, hold.Arrived, "the call")
					leave()
					hold.Open()
				} else {
					hold.Open()
					owner := g.Open(r, "executed")
					s.piece("one ", owner.Body)
					if when == "attached" {
						follower = g.Open(other, "attached")
						if got := make([]byte, 4); true {
							if _, err := io.ReadFull(follower.Body, got); err != nil {
								t.Fatal(err)
							}
						}
					}
					_ = owner.Body.Close()
					client.CloseIdleConnections()
				}
				harness.Wait(t, s.begun, "the upstream's answer")
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
				harness.Eventually(t, "the execution is settled", func() bool { return harness.Waiting("guard.(*Call).execute") == 0 })
				g.Call(other).Want(t, 200, want+big, "replayed")
				u.Arrived(r.Path, 1)
			})
		}
	}
}
