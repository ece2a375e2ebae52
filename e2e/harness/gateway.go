// Package harness is what the tests of e2e have in common: the plugin as Caddy loads it, in this process or in one of its
// own, between clients and upstreams that count what arrives.
package harness

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
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

// Patience bounds every wait. No test comes near it unless something is broken.
const Patience = 45 * time.Second

// Gateway is a Caddy with one site that runs in this process. Caddy is global, so
// there is one at a time.
type Gateway struct {
	T      *testing.T
	Addr   string // host:port
	Scheme string
	Store  *testStore // nil with the real one
	Client *http.Client
	Config func(site string) string // the whole Caddyfile
	// reloads says that calls are made beside a reload, and again where it has closed
	// their connection: see retry.
	Reloads bool
}

// Setup is what a test says of its gateway.
type Setup struct {
	// global are further global options.
	Global string
	// app are further options of the app.
	App string
	// site are the site's directives. %s in it is the upstream's address.
	Site string
	// badger takes the embedded store instead of one in memory.
	Badger bool
	// store is one in memory that another gateway had; nil is a new one.
	Store *testStore
	// address makes a site address of the port; nil is http.
	Address func(port string) string
	// before stands before the site, such as an import of snippets.
	Before string
	// more makes further sites of the port.
	More func(port string) string
}

// Start runs a gateway until the end of the test. Its site is a Caddyfile's.
func Start(t *testing.T, site string, args ...any) *Gateway {
	t.Helper()
	return Launch(t, Setup{Site: fmt.Sprintf(site, args...)})
}

// Launch runs a gateway until the end of the test.
func Launch(t *testing.T, s Setup) *Gateway {
	t.Helper()
	dir := t.TempDir()
	g := &Gateway{T: t, Scheme: "http"}
	storeOption := "badger " + filepath.Join(dir, "store")
	if s.Badger {
		t.Cleanup(func() { closed(t, filepath.Join(dir, "store")) })
	} else {
		g.Store = s.Store
		if g.Store == nil {
			g.Store = NewTestStore(filepath.Join(dir, "store"))
			t.Cleanup(func() {
				g.Store.Closed() // it writes files beside the store and the keys, which tests remove
				g.Store.Forget()
			})
		}
		storeOption = "e2e " + g.Store.Path
	}
	g.Addr = FreeAddress(t)
	_, port, _ := net.SplitHostPort(g.Addr)
	address := "http://:" + port
	if s.Address != nil {
		address = s.Address(port)
		g.Scheme, _, _ = strings.Cut(address, "://")
	}
	more := ""
	if s.More != nil {
		more = s.More(port)
	}
	g.Config = func(site string) string {
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
`, dir, storeOption, s.App, s.Global, s.Before, address, site, more)
	}
	Load(t, g.Config(s.Site))
	g.Client = g.NewClient(nil)
	return g
}

// Reload gives the gateway's site other directives.
func (g *Gateway) Reload(site string) {
	g.T.Helper()
	if err := LoadConfig(g.Config(site)); err != nil {
		g.T.Fatal(err)
	}
	Replaced(g.T)
}

// Replaced waits until the servers of configurations before have stopped accepting. Caddy
// (2.11) has a reload return before, and they share the port with the new ones.
func Replaced(t *testing.T) {
	t.Helper()
	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return
	}
	for _, s := range app.(*caddyhttp.App).Servers {
		for _, address := range s.Listen {
			Eventually(t, "the servers of the configuration before have stopped", func() bool { return listening(t, address) <= 1 })
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

// LoadConfig loads a Caddyfile as `caddy reload` does.
func LoadConfig(text string) error {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return err
	}
	return caddy.Load(config, true)
}

// FreeAddress is an address on which nobody listens, and which no other test is given,
// of this process or another: nobody listens there while a gateway starts anew, and
// Caddy's listeners share a port (SO_REUSEPORT) instead of failing. A listener on a port
// beside it keeps it until the end of the test. Neither is a port that the system gives
// to connections.
func FreeAddress(t *testing.T) string {
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

// Load runs a Caddyfile until the end of the test.
func Load(t *testing.T, text string) {
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
	t.Cleanup(func() { Stop(t) })
	Replaced(t)
}

// Stop ends the gateway before the test does, so that another can be started.
func Stop(t *testing.T) {
	t.Helper()
	if err := caddy.Stop(); err != nil {
		t.Errorf("stopping: %v", err)
	}
}

// NewClient makes a client that opens a connection for each call, adds nothing of
// its own, and so sends nothing twice.
func (g *Gateway) NewClient(config *tls.Config) *http.Client {
	transport := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, TLSClientConfig: config,
	}
	g.T.Cleanup(transport.CloseIdleConnections)
	return &http.Client{
		Transport: Recorded{transport}, Timeout: Patience,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Request is a call to make. What is not set is a POST with a small JSON body.
type Request struct {
	Method string
	Path   string
	Id     string // Idempotency-Key
	Body   string
	Host   string
	Header map[string]string
	Client *http.Client
	// reader takes the place of body; its length is not announced.
	Reader io.Reader
	// trailer is sent after the body.
	Trailer http.Header
}

// Reply is what the client saw.
type Reply struct {
	Status  int
	Header  http.Header
	Trailer http.Header
	Body    string
	Cut     bool // the answer was not whole
	Proto   int
	Length  int64
}

func (g *Gateway) url(path string) string { return g.Scheme + "://" + g.Addr + path }

// Build makes the http.Request of r.
func (g *Gateway) Build(r Request) *http.Request {
	g.T.Helper()
	method := r.Method
	if method == "" {
		method = http.MethodPost
	}
	var body io.Reader
	switch {
	case r.Reader != nil:
		body = r.Reader
	case r.Body != "":
		body = strings.NewReader(r.Body)
	case method != http.MethodGet && method != http.MethodHead && method != http.MethodOptions:
		body = strings.NewReader(`{"amount":1}`)
	}
	req, err := http.NewRequest(method, g.url(r.Path), body)
	if err != nil {
		g.T.Fatal(err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.Id != "" {
		req.Header.Set("Idempotency-Key", r.Id)
	}
	for name, value := range r.Header {
		req.Header.Set(name, value)
	}
	if r.Host != "" {
		req.Host = r.Host
	}
	req.Trailer = r.Trailer
	return req
}

// Send makes the call and returns the answer as soon as its header is there.
func (g *Gateway) Send(r Request) (*http.Response, error) {
	client := r.Client
	if client == nil {
		client = g.Client
	}
	return client.Do(g.Build(r))
}

// Call makes the call and reads the whole answer.
func (g *Gateway) Call(r Request) Reply {
	g.T.Helper()
	if g.Reloads {
		return g.Retry(r)
	}
	res, err := g.Send(r)
	if err != nil {
		g.T.Fatalf("%s %s: %v", r.Method, r.Path, err)
	}
	return Read(res)
}

// Retry makes a call until it is answered, as clients do whose connection ends before
// an answer begins. Caddy (2.11) has a reload return before the servers of before have
// stopped accepting, and Go's server gives no request to a handler that it has read
// when its Shutdown has begun: it closes the connection, new ones too, whatever
// handlers there are. An answer that has begun is whole, also then.
func (g *Gateway) Retry(r Request) (got Reply) {
	g.T.Helper()
	Eventually(g.T, "an answer, from the server of before the reload or the one after it", func() bool {
		res, err := g.Send(r)
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
			return false
		}
		if err != nil {
			g.T.Fatalf("%s %s: %v", r.Method, r.Path, err)
		}
		if got = Read(res); got.Cut {
			g.T.Fatalf("%s %s: the answer is not whole: %d %q", r.Method, r.Path, got.Status, got.Body)
		}
		return true
	})
	return got
}

// Broken makes a call whose connection ends without an answer.
func (g *Gateway) Broken(r Request) {
	g.T.Helper()
	res, err := g.Send(r)
	if err == nil {
		got := Read(res)
		g.T.Fatalf("%s was answered: %d %q", r.Path, got.Status, got.Body)
	}
}

// Read reads the whole answer.
func Read(res *http.Response) Reply {
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return Reply{
		Status: res.StatusCode, Header: res.Header, Trailer: res.Trailer, Body: string(body),
		Cut: err != nil, Proto: res.ProtoMajor, Length: res.ContentLength,
	}
}

// Calls makes n equal calls at once and returns their answers.
func (g *Gateway) Calls(n int, r Request) []Reply {
	g.T.Helper()
	results := make(chan func() (Reply, error), n)
	for range n {
		req, client := g.Build(r), g.Client
		if r.Client != nil {
			client = r.Client
		}
		go func() {
			res, err := client.Do(req)
			if err != nil {
				results <- func() (Reply, error) { return Reply{}, err }
				return
			}
			got := Read(res)
			results <- func() (Reply, error) { return got, nil }
		}()
	}
	all := make([]Reply, 0, n)
	for range n {
		got, err := (<-results)()
		if err != nil {
			g.T.Fatal(err)
		}
		all = append(all, got)
	}
	return all
}

// WithCancel makes r one that can be broken off.
func WithCancel(r *http.Request) (*http.Request, func()) {
	ctx, cancel := context.WithCancel(r.Context())
	return r.WithContext(ctx), cancel
}

// Pending is a call that was begun in the background.
type Pending struct {
	t    *testing.T
	Done chan struct{}
	Got  Reply
	Err  error
}

// Begin makes a call in the background.
func (g *Gateway) Begin(r Request) *Pending {
	g.T.Helper()
	p := &Pending{t: g.T, Done: make(chan struct{})}
	req, client := g.Build(r), g.Client
	if r.Client != nil {
		client = r.Client
	}
	go func() {
		defer close(p.Done)
		res, err := client.Do(req)
		if err != nil {
			p.Err = err
			return
		}
		p.Got = Read(res)
	}()
	return p
}

// Answer waits for the whole answer.
func (p *Pending) Answer() Reply {
	p.t.Helper()
	Wait(p.t, p.Done, "the answer")
	if p.Err != nil {
		p.t.Fatal(p.Err)
	}
	return p.Got
}

// Unanswered fails where the call is already over.
func (p *Pending) Unanswered(when string) {
	p.t.Helper()
	select {
	case <-p.Done:
		p.t.Fatalf("answered %s: %d %q %v", when, p.Got.Status, p.Got.Body, p.Err)
	default:
	}
}

// Wait waits for a channel to be closed or to give something.
func Wait[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	return WaitWithin(t, Patience, c, what)
}

// WaitWithin returns what comes from c, within bound.
func WaitWithin[T any](t *testing.T, bound time.Duration, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(bound):
		t.Fatalf("%s did not come", what)
		panic("unreachable")
	}
}

// Eventually asks until the answer is yes.
func Eventually(t *testing.T, what string, yes func() bool) {
	t.Helper()
	EventuallyWithin(t, Patience, what, yes)
}

// EventuallyWithin waits until yes is true, within bound.
func EventuallyWithin(t *testing.T, bound time.Duration, what string, yes func() bool) {
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

// ProblemDoc is the body of a problem.
type ProblemDoc struct {
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

// Problem reads r as the problem with this slug.
func (r Reply) Problem(t *testing.T, status int, slug string) ProblemDoc {
	t.Helper()
	var doc ProblemDoc
	if err := json.NewDecoder(bytes.NewReader([]byte(r.Body))).Decode(&doc); err != nil {
		t.Fatalf("want the problem %s, got %d %q (%v)", slug, r.Status, r.Body, err)
	}
	if r.Status != status || doc.Status != status || doc.Type != "/.well-known/cascade/problems/"+slug {
		t.Fatalf("want the problem %d %s, got %d %q", status, slug, r.Status, r.Body)
	}
	if got := r.Header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("%s has Content-Type %q", slug, got)
	}
	if r.Cut {
		t.Errorf("%s was cut", slug)
	}
	// stripe-node takes an answer without one for a success.
	if e := doc.Error; e == nil || e.Type == nil || e.Code == nil || e.Message == nil {
		t.Errorf("%s has no whole error member: %s", slug, r.Body)
	}
	return doc
}

// Terminal reads r as a problem that no SDK may retry.
func (r Reply) Terminal(t *testing.T, status int, slug string) ProblemDoc {
	t.Helper()
	doc := r.Problem(t, status, slug)
	if doc.Error != nil && doc.Error.Status != nil {
		t.Errorf("%s makes stripe-go retry: %s", slug, r.Body)
	}
	for _, name := range []string{"X-Should-Retry", "Stripe-Should-Retry"} {
		if got := r.Header.Get(name); got != "false" {
			t.Errorf("%s has %s %q", slug, name, got)
		}
	}
	if got := r.Header.Get("Retry-After"); got != "" {
		t.Errorf("%s has Retry-After %q", slug, got)
	}
	return doc
}

// Retryable reads r as a problem that SDKs shall retry.
func (r Reply) Retryable(t *testing.T, status int, slug string) ProblemDoc {
	t.Helper()
	doc := r.Problem(t, status, slug)
	if doc.Error == nil || doc.Error.Status == nil || *doc.Error.Status != strconv.Itoa(status) || r.Header.Get("X-Should-Retry") != "" {
		t.Errorf("%s keeps SDKs from retrying: %v %s", slug, r.Header, r.Body)
	}
	if got := r.Header.Get("Stripe-Should-Retry"); got != "true" {
		t.Errorf("%s has Stripe-Should-Retry %q", slug, got)
	}
	if r.Header.Get("Retry-After") == "" {
		t.Errorf("%s has no Retry-After", slug)
	}
	return doc
}

// Want checks status, body and Execution-Status of a whole answer.
func (r Reply) Want(t *testing.T, status int, body, execution string) {
	t.Helper()
	if r.Cut || r.Status != status || r.Body != body || r.Header.Get("Execution-Status") != execution {
		t.Errorf("got %d %q (%s, cut %v), want %d %q (%s)",
			r.Status, r.Body, r.Header.Get("Execution-Status"), r.Cut, status, body, execution)
	}
	replayed := ""
	if execution == "replayed" {
		replayed = "true"
	}
	if got := r.Header.Get("Idempotent-Replayed"); got != replayed {
		t.Errorf("Idempotent-Replayed is %q for an answer that was %s", got, execution)
	}
	if execution != "" && r.Header.Get("Execution-Id") == "" {
		t.Error("the answer names no Execution-Id")
	}
}

// actInRole makes this process the gateway, where its environment says so.
var actInRole = func() {}

// Main is the TestMain of each package. It has more tests run side by side than there are processors: those that may
// mostly wait.
func Main(m *testing.M) {
	actInRole()
	flag.Parse()
	explicit := false
	flag.Visit(func(f *flag.Flag) { explicit = explicit || f.Name == "test.parallel" })
	if !explicit {
		if err := flag.Set("test.parallel", "4"); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if *recordWire {
		if err := saveWire(); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}
