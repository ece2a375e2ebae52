package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// arrival is one request as the upstream got it.
type arrival struct {
	*http.Request
	body    string
	trailer http.Header
	// n counts the arrivals at this path, from 1.
	n int
}

// upstream is a server that counts what arrives, by path.
type upstream struct {
	t    *testing.T
	addr string

	mu       sync.Mutex
	seen     map[string][]*arrival
	handlers map[string]func(http.ResponseWriter, *arrival)
}

// newUpstream runs an upstream on HTTP/1. Paths without a handler answer 201 with
// the number of the arrival.
func newUpstream(t *testing.T) *upstream {
	t.Helper()
	u := makeUpstream(t)
	u.run(false)
	return u
}

// newH2CUpstream runs an upstream that speaks HTTP/2 without TLS too.
func newH2CUpstream(t *testing.T) *upstream {
	t.Helper()
	u := makeUpstream(t)
	u.run(true)
	return u
}

// newTLSUpstream runs an upstream on HTTP/1 over TLS, whose certificate nobody knows.
func newTLSUpstream(t *testing.T) *upstream {
	t.Helper()
	u := makeUpstream(t)
	server := httptest.NewTLSServer(u)
	u.addr = server.Listener.Addr().String()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return u
}

func makeUpstream(t *testing.T) *upstream {
	return &upstream{t: t, seen: map[string][]*arrival{}, handlers: map[string]func(http.ResponseWriter, *arrival){}}
}

func (u *upstream) run(h2c bool) {
	server := httptest.NewUnstartedServer(u)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(h2c)
	server.Start()
	u.addr = server.Listener.Addr().String()
	u.t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
}

// on answers the calls to path.
func (u *upstream) on(path string, answer func(w http.ResponseWriter, a *arrival)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.handlers[path] = answer
}

func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.EscapedPath()
	a := &arrival{Request: r}
	u.mu.Lock()
	u.seen[path] = append(u.seen[path], a)
	a.n = len(u.seen[path])
	answer := u.handlers[path]
	u.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the request was broken off
	}
	u.mu.Lock()
	a.body, a.trailer = string(body), r.Trailer.Clone()
	u.mu.Unlock()
	if answer == nil {
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "arrival %d", a.n)
		return
	}
	answer(w, a)
}

// arrivals counts the requests at path, broken ones too.
func (u *upstream) arrivals(path string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.seen[path])
}

// total counts all requests.
func (u *upstream) total() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	n := 0
	for _, seen := range u.seen {
		n += len(seen)
	}
	return n
}

// arrived checks how often path was reached.
func (u *upstream) arrived(path string, want int) {
	u.t.Helper()
	if got := u.arrivals(path); got != want {
		u.t.Errorf("%s arrived %d times, want %d", path, got, want)
	}
}

// last is the last request at path.
func (u *upstream) last(path string) *arrival {
	u.t.Helper()
	u.mu.Lock()
	defer u.mu.Unlock()
	seen := u.seen[path]
	if len(seen) == 0 {
		u.t.Fatalf("nothing arrived at %s", path)
	}
	return seen[len(seen)-1]
}

// raw answers with these bytes and ends the connection.
func raw(text string) func(http.ResponseWriter, *arrival) {
	return func(w http.ResponseWriter, _ *arrival) {
		conn, buf := hijack(w)
		defer conn.Close()
		_, _ = buf.WriteString(text) // the other side's view is what is tested
		_ = buf.Flush()
	}
}

// reset ends the connection with RST, without an answer.
func reset(w http.ResponseWriter, _ *arrival) {
	conn, _ := hijack(w)
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
}

func hijack(w http.ResponseWriter) (net.Conn, *bufio.ReadWriter) {
	conn, buf, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err) // only HTTP/1 upstreams are asked
	}
	return conn, buf
}

// first answers the first arrival with one, the others with "arrival n".
func first(one func(http.ResponseWriter, *arrival)) func(http.ResponseWriter, *arrival) {
	return sequence(one)
}

// sequence answers the arrivals in their order, and those that come after them with
// "arrival n".
func sequence(answers ...func(http.ResponseWriter, *arrival)) func(http.ResponseWriter, *arrival) {
	return func(w http.ResponseWriter, a *arrival) {
		if a.n <= len(answers) {
			answers[a.n-1](w, a)
			return
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "arrival %d", a.n)
	}
}

// status answers with a status and header fields, in pairs.
func status(code int, body string, header ...string) func(http.ResponseWriter, *arrival) {
	return func(w http.ResponseWriter, _ *arrival) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Add(header[i], header[i+1])
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// gate holds an upstream's answer until the test opens it.
type gate struct {
	arrived chan struct{} // closed with the first arrival
	opened  chan struct{}
	once    sync.Once
	open1   sync.Once
}

func newGate(t *testing.T) *gate {
	g := &gate{arrived: make(chan struct{}), opened: make(chan struct{})}
	t.Cleanup(g.open)
	return g
}

func (g *gate) open() { g.open1.Do(func() { close(g.opened) }) }

// pass says that somebody is here and waits for the opening.
func (g *gate) pass() {
	g.once.Do(func() { close(g.arrived) })
	<-g.opened
}
