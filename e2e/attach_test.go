package e2e

import (
	"bufio"
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

// "Attach": the wait limit counts to the first byte, then 409 `in-progress`. A stream
// that is followed is not cut by it.
func TestAttachWait(t *testing.T) {
	u, hold, s := newUpstream(t), newGate(t), newSteps(t)
	g := start(t, "agent_proxy %s {\n attach_wait 50ms\n}", u.addr)
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "done")(w, a)
	})
	u.on("/stream", s.answer)
	stream := request{path: "/stream", id: "k"}
	owner := g.open(stream, "executed")
	follower := g.open(stream, "attached")

	held := request{path: "/held", id: "k"}
	running := g.begin(held)
	wait(t, hold.arrived, "the call")
	for range 2 { // after which the limit has passed for the stream too
		doc := g.call(held).retryable(t, 409, "in-progress")
		if doc.State != "running" || *doc.SafeNewKey || doc.ExecutionID != "k" {
			t.Errorf("%+v", doc)
		}
	}
	s.piece("still here", owner.Body, follower.Body)
	s.end(owner.Body, follower.Body)
	hold.open()
	running.answer().want(t, 201, "done", "executed")
	g.call(held).want(t, 201, "done", "replayed")
	u.arrived("/held", 1)
}

// "Attach": who follows a cut answer sees that it is cut; who came before its header
// gets the problem.
func TestAttachedToACutAnswer(t *testing.T) {
	u, s, hold := newUpstream(t), newSteps(t), newGate(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		s.answer(w, a)
		panic(http.ErrAbortHandler)
	})
	u.on("/silent", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		reset(w, a)
	})
	r := request{path: "/x", id: "k"}
	owner, follower := g.open(r, "executed"), g.open(r, "attached")
	s.piece("one", owner.Body, follower.Body)
	close(s.next)
	for name, res := range map[string]*http.Response{"owner": owner, "follower": follower} {
		if rest, err := io.ReadAll(res.Body); err == nil {
			t.Errorf("the %s saw an end: %q", name, rest)
		}
	}
	g.call(r).terminal(t, 409, "in-doubt")

	r.path = "/silent"
	calls := []*pending{g.begin(r)}
	wait(t, hold.arrived, "the call")
	for range 5 {
		calls = append(calls, g.begin(r))
	}
	followers(t, 5)
	hold.open()
	for _, p := range calls {
		p.answer().terminal(t, 409, "in-doubt")
	}
	u.arrived("/silent", 1)
}

// "Capture": past the cap those who are attached go on live, newcomers and retries
// get 409; the key is kept.
func TestOverMaxResult(t *testing.T) {
	u, s := newUpstream(t), newSteps(t)
	g := start(t, "agent_proxy %s {\n max_result 1KiB\n}", u.addr)
	u.on("/x", s.answer)
	r := request{path: "/x", id: "k"}
	owner, follower := g.open(r, "executed"), g.open(r, "attached")
	piece := strings.Repeat("x", 600)
	s.piece(piece, owner.Body, follower.Body)
	s.piece(piece, owner.Body, follower.Body)
	doc := g.call(r).terminal(t, 409, "result-unavailable")
	if doc.State != "running" || *doc.SafeNewKey {
		t.Errorf("a newcomer got %+v", doc)
	}
	for range 20 {
		s.piece(piece, owner.Body, follower.Body)
	}
	s.end(owner.Body, follower.Body)
	doc = g.call(r).terminal(t, 409, "result-unavailable")
	if doc.State != "completed" || *doc.SafeNewKey {
		t.Errorf("a retry got %+v", doc)
	}
	u.arrived("/x", 1)

	// One byte more or less decides.
	for size, kept := range map[int]bool{1 << 10: true, 1<<10 + 1: false} {
		r := request{path: fmt.Sprint("/", size), id: "k"}
		body := strings.Repeat("y", size)
		u.on(r.path, status(200, body))
		g.call(r).want(t, 200, body, "executed")
		if again := g.call(r); kept {
			again.want(t, 200, body, "replayed")
		} else {
			again.terminal(t, 409, "result-unavailable")
		}
	}
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

// "A release by status gives that answer to all waiters", and then the key is free.
func TestReleaseByStatusAnswersAllWaiters(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", first(func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(429, "slow down", "Retry-After", "3")(w, a)
	}))
	r := request{path: "/x", id: "k"}
	calls := []*pending{g.begin(r)}
	wait(t, hold.arrived, "the call")
	for range 20 {
		calls = append(calls, g.begin(r))
	}
	followers(t, 20)
	hold.open()
	for i, p := range calls {
		want := "attached"
		if i == 0 {
			want = "executed"
		}
		got := p.answer()
		got.want(t, 429, "slow down", want)
		if got.header.Get("Retry-After") != "3" {
			t.Errorf("header %v", got.header)
		}
	}
	u.arrived("/x", 1)
	g.call(r).want(t, 201, "arrival 2", "executed")
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
			if got.status != 502 || got.header.Get("Execution-Status") != "" {
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

// A follower that leaves, or reads nothing, disturbs nobody.
func TestFollowerLeaves(t *testing.T) {
	u, s := newUpstream(t), newSteps(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", s.answer)
	r := request{path: "/x", id: "k"}
	owner := g.open(r, "executed")
	leaver, stays := g.open(r, "attached"), g.open(r, "attached")

	lazy := g.dial()
	write(t, lazy, "POST /x HTTP/1.1\r\nHost: "+g.addr+"\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"amount\":1}")
	if line, err := bufio.NewReaderSize(lazy, 16).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
		t.Fatalf("%q %v", line, err)
	}
	s.piece("one", owner.Body, leaver.Body, stays.Body)
	_ = leaver.Body.Close()
	big := strings.Repeat("x", 1<<20)
	s.piece(big, owner.Body, stays.Body)
	s.end(owner.Body, stays.Body)
	_ = lazy.Close()
	g.call(r).want(t, 200, "one"+big, "replayed")
	u.arrived("/x", 1)
}
