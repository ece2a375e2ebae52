// Package e2e holds the gateway to its promises over real sockets: the plugin as
// Caddy loads it, between clients and upstreams that count what arrives.
package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/agent-guard/caddy-agent-guard"
)

// patience bounds every wait. No test comes near it unless something is broken.
const patience = 45 * time.Second

// gateway is a Caddy with one site that runs in this process. Caddy is global, so
// there is one at a time.
type gateway struct {
	t      *testing.T
	addr   string // host:port
	scheme string
	store  *testStore // nil with the real one
	client *http.Client
	config func(site string) string // the whole Caddyfile
	// reloads says that calls are made beside a reload, and again where it has closed
	// their connection: see retry.
	reloads bool
}

// setup is what a test says of its gateway.
type setup struct {
	// global are further global options.
	global string
	// app are further options of the app.
	app string
	// site are the site's directives. %s in it is the upstream's address.
	site string
	// badger takes the embedded store instead of one in memory.
	badger bool
	// store is one in memory that another gateway had; nil is a new one.
	store *testStore
	// address makes a site address of the port; nil is http.
	address func(port string) string
	// before stands before the site, such as an import of snippets.
	before string
	// more makes further sites of the port.
	more func(port string) string
}

// start runs a gateway until the end of the test. Its site is a Caddyfile's.
func start(t *testing.T, site string, args ...any) *gateway {
	t.Helper()
	return launch(t, setup{site: fmt.Sprintf(site, args...)})
}

func launch(t *testing.T, s setup) *gateway {
	t.Helper()
	dir := t.TempDir()
	g := &gateway{t: t, scheme: "http"}
	storeOption := "badger " + filepath.Join(dir, "store")
	if s.badger {
		t.Cleanup(func() { closed(t, filepath.Join(dir, "store")) })
	} else {
		g.store = s.store
		if g.store == nil {
			g.store = newTestStore(filepath.Join(dir, "store"))
			t.Cleanup(g.store.forget)
		}
		storeOption = "e2e " + g.store.path
	}
	g.addr = freeAddress(t)
	_, port, _ := net.SplitHostPort(g.addr)
	address := "http://:" + port
	if s.address != nil {
		address = s.address(port)
		g.scheme, _, _ = strings.Cut(address, "://")
	}
	more := ""
	if s.more != nil {
		more = s.more(port)
	}
	g.config = func(site string) string {
		return fmt.Sprintf(`{
	admin off
	persist_config off
	auto_https off
	storage file_system %q
	default_bind 127.0.0.1
	grace_period 10s
	log {
		output discard
	}
	servers {
		protocols h1 h2 h2c
	}
	agent_guard {
		store %s
		%s
	}
	%s
}
%s%s {
	%s
}
%s
`, dir, storeOption, s.app, s.global, s.before, address, site, more)
	}
	load(t, g.config(s.site))
	g.client = g.newClient(nil)
	return g
}

// reload gives the gateway's site other directives.
func (g *gateway) reload(site string) {
	g.t.Helper()
	if err := loadConfig(g.config(site)); err != nil {
		g.t.Fatal(err)
	}
	replaced(g.t)
}

// replaced waits until the servers of configurations before have stopped accepting. Caddy
// (2.11) has a reload return before, and they share the port with the new ones.
func replaced(t *testing.T) {
	t.Helper()
	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return
	}
	for _, s := range app.(*caddyhttp.App).Servers {
		for _, address := range s.Listen {
			eventually(t, "the servers of the configuration before have stopped", func() bool { return listening(t, address) <= 1 })
		}
	}
}

// listening counts the sockets that listen on an address of TCP over IPv4.
func listening(t *testing.T, address string) (n int) {
	t.Helper()
	at, err := netip.ParseAddrPort(address)
	if err != nil || !at.Addr().Is4() {
		return 0 // of another network
	}
	ip := at.Addr().As4()
	slices.Reverse(ip[:])
	want := fmt.Sprintf("%X:%04X", ip, at.Port())
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0 // this system has no such list
	}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 3 && fields[1] == want && fields[3] == "0A" {
			n++
		}
	}
	return n
}

// loadConfig loads a Caddyfile as `caddy reload` does.
func loadConfig(text string) error {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return err
	}
	return caddy.Load(config, true)
}

// freeAddress is an address on which nobody listens, and which no other test is given,
// of this process or another: nobody listens there while a gateway starts anew, and
// Caddy's listeners share a port (SO_REUSEPORT) instead of failing. A listener on a port
// beside it keeps it until the end of the test. Neither is a port that the system gives
// to connections.
func freeAddress(t *testing.T) string {
	t.Helper()
	const first, ports = 20_000, 6_000
	// A process that another test starts meanwhile has the listener, too, until it executes its program: the
	// port would not be free when it is closed here.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	for range 1000 {
		port := first + rand.IntN(ports)
		kept, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port+ports))
		if err != nil {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
		if err != nil {
			_ = kept.Close()
			continue
		}
		t.Cleanup(func() { _ = kept.Close() })
		_ = l.Close()
		watchWire(t, l.Addr().String())
		return l.Addr().String()
	}
	t.Fatal("no port is free")
	return ""
}

// load runs a Caddyfile until the end of the test.
func load(t *testing.T, text string) {
	t.Helper()
	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") {
			t.Logf("adapting: %s", w)
		}
	}
	if err := caddy.Load(config, true); err != nil {
		t.Fatalf("%v\n%s", err, config)
	}
	t.Cleanup(func() { stop(t) })
	replaced(t)
}

// stop ends the gateway before the test does, so that another can be started.
func stop(t *testing.T) {
	t.Helper()
	if err := caddy.Stop(); err != nil {
		t.Errorf("stopping: %v", err)
	}
}

// newClient makes a client that opens a connection for each call, adds nothing of
// its own, and so sends nothing twice.
func (g *gateway) newClient(config *tls.Config) *http.Client {
	transport := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, TLSClientConfig: config,
	}
	g.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{
		Transport: recorded{transport}, Timeout: patience,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// request is a call to make. What is not set is a POST with a small JSON body.
type request struct {
	method string
	path   string
	id     string // Idempotency-Key
	body   string
	host   string
	header map[string]string
	client *http.Client
	// reader takes the place of body; its length is not announced.
	reader io.Reader
	// trailer is sent after the body.
	trailer http.Header
}

// reply is what the client saw.
type reply struct {
	status  int
	header  http.Header
	trailer http.Header
	body    string
	cut     bool // the answer was not whole
	proto   int
	length  int64
}

func (g *gateway) url(path string) string { return g.scheme + "://" + g.addr + path }

// build makes the http.Request of r.
func (g *gateway) build(r request) *http.Request {
	g.t.Helper()
	method := r.method
	if method == "" {
		method = http.MethodPost
	}
	var body io.Reader
	switch {
	case r.reader != nil:
		body = r.reader
	case r.body != "":
		body = strings.NewReader(r.body)
	case method != http.MethodGet && method != http.MethodHead && method != http.MethodOptions:
		body = strings.NewReader(`{"amount":1}`)
	}
	req, err := http.NewRequest(method, g.url(r.path), body)
	if err != nil {
		g.t.Fatal(err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.id != "" {
		req.Header.Set("Idempotency-Key", r.id)
	}
	for name, value := range r.header {
		req.Header.Set(name, value)
	}
	if r.host != "" {
		req.Host = r.host
	}
	req.Trailer = r.trailer
	return req
}

// send makes the call and returns the answer as soon as its header is there.
func (g *gateway) send(r request) (*http.Response, error) {
	client := r.client
	if client == nil {
		client = g.client
	}
	return client.Do(g.build(r))
}

// call makes the call and reads the whole answer.
func (g *gateway) call(r request) reply {
	g.t.Helper()
	if g.reloads {
		return g.retry(r)
	}
	res, err := g.send(r)
	if err != nil {
		g.t.Fatalf("%s %s: %v", r.method, r.path, err)
	}
	return read(res)
}

// retry makes a call until it is answered, as clients do whose connection ends before
// an answer begins. Caddy (2.11) has a reload return before the servers of before have
// stopped accepting, and Go's server gives no request to a handler that it has read
// when its Shutdown has begun: it closes the connection, new ones too, whatever
// handlers there are. An answer that has begun is whole, also then.
func (g *gateway) retry(r request) (got reply) {
	g.t.Helper()
	eventually(g.t, "an answer, from the server of before the reload or the one after it", func() bool {
		res, err := g.send(r)
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
			return false
		}
		if err != nil {
			g.t.Fatalf("%s %s: %v", r.method, r.path, err)
		}
		if got = read(res); got.cut {
			g.t.Fatalf("%s %s: the answer is not whole: %d %q", r.method, r.path, got.status, got.body)
		}
		return true
	})
	return got
}

// broken makes a call whose connection ends without an answer.
func (g *gateway) broken(r request) {
	g.t.Helper()
	res, err := g.send(r)
	if err == nil {
		got := read(res)
		g.t.Fatalf("%s was answered: %d %q", r.path, got.status, got.body)
	}
}

func read(res *http.Response) reply {
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return reply{
		status: res.StatusCode, header: res.Header, trailer: res.Trailer, body: string(body),
		cut: err != nil, proto: res.ProtoMajor, length: res.ContentLength,
	}
}

// calls makes n equal calls at once and returns their answers.
func (g *gateway) calls(n int, r request) []reply {
	g.t.Helper()
	results := make(chan func() (reply, error), n)
	for range n {
		req, client := g.build(r), g.client
		if r.client != nil {
			client = r.client
		}
		go func() {
			res, err := client.Do(req)
			if err != nil {
				results <- func() (reply, error) { return reply{}, err }
				return
			}
			got := read(res)
			results <- func() (reply, error) { return got, nil }
		}()
	}
	all := make([]reply, 0, n)
	for range n {
		got, err := (<-results)()
		if err != nil {
			g.t.Fatal(err)
		}
		all = append(all, got)
	}
	return all
}

// withCancel makes r one that can be broken off.
func withCancel(r *http.Request) (*http.Request, func()) {
	ctx, cancel := context.WithCancel(r.Context())
	return r.WithContext(ctx), cancel
}

// pending is a call that was begun in the background.
type pending struct {
	t    *testing.T
	done chan struct{}
	got  reply
	err  error
}

// begin makes a call in the background.
func (g *gateway) begin(r request) *pending {
	g.t.Helper()
	p := &pending{t: g.t, done: make(chan struct{})}
	req, client := g.build(r), g.client
	if r.client != nil {
		client = r.client
	}
	go func() {
		defer close(p.done)
		res, err := client.Do(req)
		if err != nil {
			p.err = err
			return
		}
		p.got = read(res)
	}()
	return p
}

// answer waits for the whole answer.
func (p *pending) answer() reply {
	p.t.Helper()
	wait(p.t, p.done, "the answer")
	if p.err != nil {
		p.t.Fatal(p.err)
	}
	return p.got
}

// unanswered fails where the call is already over.
func (p *pending) unanswered(when string) {
	p.t.Helper()
	select {
	case <-p.done:
		p.t.Fatalf("answered %s: %d %q %v", when, p.got.status, p.got.body, p.err)
	default:
	}
}

// wait waits for a channel to be closed or to give something.
func wait[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	return waitWithin(t, patience, c, what)
}

func waitWithin[T any](t *testing.T, bound time.Duration, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(bound):
		t.Fatalf("%s did not come", what)
		panic("unreachable")
	}
}

// eventually asks until the answer is yes.
func eventually(t *testing.T, what string, yes func() bool) {
	t.Helper()
	eventuallyWithin(t, patience, what, yes)
}

func eventuallyWithin(t *testing.T, bound time.Duration, what string, yes func() bool) {
	t.Helper()
	eventuallyEvery(t, 2*time.Millisecond, bound, what, yes)
}

// eventuallyEvery asks once in each pause: for questions that have a rate.
func eventuallyEvery(t *testing.T, pause, bound time.Duration, what string, yes func() bool) {
	t.Helper()
	deadline := time.After(bound)
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for !yes() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("never: %s", what)
		}
	}
}

// problemDoc is the body of a problem.
type problemDoc struct {
	Type        string `json:"type"`
	Title       string `json:"title"`
	Status      int    `json:"status"`
	Detail      string `json:"detail"`
	ErrorType   string `json:"error_type"`
	ExecutionID string `json:"execution_id"`
	State       string `json:"state"`
	Reason      string `json:"reason"`
	SafeNewKey  *bool  `json:"safe_new_key"`
	StatusURL   string `json:"status_url"`
	Dependants  []string
	Error       *struct {
		Type    *string `json:"type"`
		Code    *string `json:"code"`
		Message *string `json:"message"`
		Status  *string `json:"status"`
	} `json:"error"`
}

// problem reads r as the problem with this slug.
func (r reply) problem(t *testing.T, status int, slug string) problemDoc {
	t.Helper()
	var doc problemDoc
	if err := json.NewDecoder(bytes.NewReader([]byte(r.body))).Decode(&doc); err != nil {
		t.Fatalf("want the problem %s, got %d %q (%v)", slug, r.status, r.body, err)
	}
	if r.status != status || doc.Status != status || doc.Type != "/.well-known/cascade/problems/"+slug {
		t.Fatalf("want the problem %d %s, got %d %q", status, slug, r.status, r.body)
	}
	if got := r.header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("%s has Content-Type %q", slug, got)
	}
	if r.cut {
		t.Errorf("%s was cut", slug)
	}
	// stripe-node takes an answer without one for a success.
	if e := doc.Error; e == nil || e.Type == nil || e.Code == nil || e.Message == nil {
		t.Errorf("%s has no whole error member: %s", slug, r.body)
	}
	return doc
}

// terminal reads r as a problem that no SDK may retry.
func (r reply) terminal(t *testing.T, status int, slug string) problemDoc {
	t.Helper()
	doc := r.problem(t, status, slug)
	if doc.Error != nil && doc.Error.Status != nil {
		t.Errorf("%s makes stripe-go retry: %s", slug, r.body)
	}
	for _, name := range []string{"X-Should-Retry", "Stripe-Should-Retry"} {
		if got := r.header.Get(name); got != "false" {
			t.Errorf("%s has %s %q", slug, name, got)
		}
	}
	if got := r.header.Get("Retry-After"); got != "" {
		t.Errorf("%s has Retry-After %q", slug, got)
	}
	return doc
}

// retryable reads r as a problem that SDKs shall retry.
func (r reply) retryable(t *testing.T, status int, slug string) problemDoc {
	t.Helper()
	doc := r.problem(t, status, slug)
	if doc.Error == nil || doc.Error.Status == nil || *doc.Error.Status != strconv.Itoa(status) || r.header.Get("X-Should-Retry") != "" {
		t.Errorf("%s keeps SDKs from retrying: %v %s", slug, r.header, r.body)
	}
	if got := r.header.Get("Stripe-Should-Retry"); got != "true" {
		t.Errorf("%s has Stripe-Should-Retry %q", slug, got)
	}
	if r.header.Get("Retry-After") == "" {
		t.Errorf("%s has no Retry-After", slug)
	}
	return doc
}

// want checks status, body and Execution-Status of a whole answer.
func (r reply) want(t *testing.T, status int, body, execution string) {
	t.Helper()
	if r.cut || r.status != status || r.body != body || r.header.Get("Execution-Status") != execution {
		t.Errorf("got %d %q (%s, cut %v), want %d %q (%s)",
			r.status, r.body, r.header.Get("Execution-Status"), r.cut, status, body, execution)
	}
	replayed := ""
	if execution == "replayed" {
		replayed = "true"
	}
	if got := r.header.Get("Idempotent-Replayed"); got != replayed {
		t.Errorf("Idempotent-Replayed is %q for an answer that was %s", got, execution)
	}
	if execution != "" && r.header.Get("Execution-Id") == "" {
		t.Error("the answer names no Execution-Id")
	}
}
