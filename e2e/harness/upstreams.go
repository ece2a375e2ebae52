package harness

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// PassesOn makes two calls. The second follows from a checkpoint that the participant has made itself,
// and that from the first; the token comes with the call.
func (s *Saga) PassesOn(p *Participant) (root SagaStep, theirs *ect.Token, leaf SagaStep) {
	s.T.Helper()
	root = s.Do(Charge(1))
	action := p.As.Issue(ect.Claims{Workflow: s.Wid, Action: "reserve", Parents: []string{root.Checkpoint}})
	theirs = p.As.Issue(ect.Claims{
		Workflow: s.Wid, Action: "checkpoint", Parents: []string{action.ID()}, Output: ect.Sum([]byte("state")),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.RollbackURI).Int(ect.MemberTTL, 3600),
	})
	next := With(s.A.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{theirs.ID()}}), Charge(2))
	next.Header[ect.FieldName] += ", " + theirs.Raw() + ", " + action.Raw()
	leaf = SagaStep{Reply: s.G.Call(next)}
	if leaf.Status != http.StatusCreated {
		s.T.Fatalf("%d %s", leaf.Status, leaf.Body)
	}
	return root, theirs, leaf
}

func init() {
	caddy.RegisterModule(do{})
	httpcaddyfile.RegisterHandlerDirective("e2e_do", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		d := new(do)
		h.Next()
		if !h.Args(&d.What) {
			return nil, h.ArgErr()
		}
		return d, nil
	})
}

// do is a handler that ends in a certain way.
type do struct {
	What string `json:"what"`

	before bool
}

func (do) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.e2e_do", New: func() caddy.Module { return new(do) }}
}

func (d *do) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if d.What == "stale" {
		if d.before {
			return next.ServeHTTP(w, r)
		}
		d.before = true
		return stale(r)
	}
	if d.What == "short" {
		w.Header().Set("Content-Length", "9")
		fmt.Fprint(w, "part")
		return nil
	}
	late := strings.HasPrefix(d.What, "late_")
	if late {
		fmt.Fprint(w, "begin")
		_ = http.NewResponseController(w).Flush()
	}
	switch strings.TrimPrefix(d.What, "late_") {
	case "panic":
		panic(http.ErrAbortHandler)
	case "error":
		return caddyhttp.Error(http.StatusServiceUnavailable, errors.New("no upstreams available, or so"))
	}
	return nil
}

// stale ends the way reverse_proxy does with our transport, where a connection that
// it was given is dead.
func stale(r *http.Request) error {
	attempt := proxy.FromContext(r.Context()).Attempt()
	trace := httptrace.ContextClientTrace(r.Context())
	trace.GetConn("upstream:80")
	trace.GotConn(httptrace.GotConnInfo{Conn: deadConn{}, Reused: true})
	err := errors.New("the connection is dead")
	attempt.Done(err)
	r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Set("http.reverse_proxy.retries", 0)
	return caddyhttp.Error(http.StatusBadGateway, err)
}

// deadConn is a counted connection on which nothing is written.
type deadConn struct{ net.Conn }

func (deadConn) Count(*proxy.Attempt) {}
func (deadConn) Multiplexed() bool    { return false }

func init() {
	caddy.RegisterModule(leaves{})
	httpcaddyfile.RegisterHandlerDirective("e2e_leaves", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(leaves), nil
	})
	httpcaddyfile.RegisterDirectiveOrder("e2e_leaves", httpcaddyfile.Before, "tracing")
}

// Leaver is the field of calls whose clients will leave. Clients that close their connection at
// once when they are answered leave as well.
const Leaver = "X-Will-Leave"

// leaves is a handler that notes when such a client has left. The guard sees it at the same time:
// the contexts of both end as one.
type leaves struct{}

// Left counts the calls of observers' handlers that have not ended.
var Left atomic.Int64

// LeftLog is what a gateway that is a process says then.
const LeftLog = "e2e: a client has left"

func (leaves) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.e2e_leaves", New: func() caddy.Module { return new(leaves) }}
}

func (leaves) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if r.Header.Get(Leaver) == "" {
		return next.ServeHTTP(w, r)
	}
	r.Header.Del(Leaver) // the retry has none
	stop := context.AfterFunc(r.Context(), func() {
		Left.Add(1)
		caddy.Log().Info(LeftLog)
	})
	defer stop()
	return next.ServeHTTP(w, r)
}

func init() {
	caddy.RegisterModule(observe{})
	caddy.RegisterModule(listener{})
	httpcaddyfile.RegisterHandlerDirective("e2e_observe", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		if h.NextArg() {
			return nil, h.ArgErr()
		}
		return new(observe), nil
	})
	httpcaddyfile.RegisterDirectiveOrder("e2e_observe", httpcaddyfile.Before, "tracing")
}

// observer is what one test gets to see. Tests of this process run one after the other.
type observer struct {
	t     *testing.T
	spans *tracetest.SpanRecorder
	trace *sdktrace.TracerProvider

	mu     sync.Mutex
	seen   []map[string]string // placeholders of each request, by name
	Events chan caddy.Event
}

var present struct {
	sync.Mutex
	*observer
}

// Observed lets what is observed come to this test.
func Observed(t *testing.T) *observer {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	o := &observer{
		t: t, spans: spans, trace: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)),
		Events: make(chan caddy.Event, 1000),
	}
	set := func(o *observer) {
		present.Lock()
		defer present.Unlock()
		present.observer = o
	}
	set(o)
	t.Cleanup(func() { set(nil) })
	return o
}

func currentObserver() *observer {
	present.Lock()
	defer present.Unlock()
	return present.observer
}

var placeholders = []string{
	"status", "guard", "action", "outcome", "cause", "problem", "age", "key", "caller", "execution_id", "workflow", "recognized",
}

// observe is a handler outside the guard: it makes a span that records, as `tracing`
// does, and notes the placeholders once the request is answered, as access logs do.
type observe struct{}

func (observe) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.e2e_observe", New: func() caddy.Module { return new(observe) }}
}

func (observe) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	o := currentObserver()
	if o == nil {
		return next.ServeHTTP(w, r)
	}
	ctx, span := o.trace.Tracer("e2e").Start(r.Context(), "call")
	defer span.End()
	defer func() {
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		values := map[string]string{}
		for _, name := range placeholders {
			if value := repl.ReplaceAll("{http.agent_guard."+name+"}", ""); value != "" {
				values[name] = value
			}
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.seen = append(o.seen, values)
	}()
	return next.ServeHTTP(w, r.WithContext(ctx))
}

// last are the placeholders of the n-th request, from 0; it waits for its end.
func (o *observer) Request(n int) map[string]string {
	o.t.Helper()
	Eventually(o.t, "the request is over", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.seen) > n
	})
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen[n]
}

// Attributes are those of the span of the n-th request.
func (o *observer) Attributes(n int) map[string]string {
	o.t.Helper()
	Eventually(o.t, "the span is over", func() bool { return len(o.spans.Ended()) > n })
	all := map[string]string{}
	for _, a := range o.spans.Ended()[n].Attributes() {
		all[string(a.Key)] = a.Value.AsString()
	}
	return all
}

// Event waits for the next one.
func (o *observer) Event() caddy.Event {
	o.t.Helper()
	return Wait(o.t, o.Events, "an event")
}

// listener is an event handler that passes events on to the test.
type listener struct{}

func (listener) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.e2e", New: func() caddy.Module { return new(listener) }}
}

func (listener) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	return nil
}

func (listener) Handle(_ context.Context, e caddy.Event) error {
	if o := currentObserver(); o != nil {
		o.Events <- e
	}
	return nil
}

// RestEffect is a line of the lab's ledger: something that has happened.
type RestEffect struct {
	N    int    `json:"n"`
	What string `json:"what"` // created, changed, deleted, charged, refunded, asked, undone
	Of   string `json:"of"`   // a path, or the id of a charge
	Key  string `json:"key,omitempty"`
}

// record writes what is about to happen into the ledger: it is on disk when record returns.
// Under the lab's lock.
func (l *RestLab) record(c *RestCall, what, of string) {
	l.effects++
	e := RestEffect{l.effects, what, of, c.Header.Get("Idempotency-Key")}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = l.ledger.Write(append(line, '\n'))
	}
	if err == nil {
		err = l.ledger.Sync()
	}
	if err != nil {
		panic(err)
	}
	if l.seen != nil {
		l.seen(e)
	}
}

// LedgerEffects reads the ledger from its file.
func (l *RestLab) LedgerEffects() (all []RestEffect) {
	l.t.Helper()
	text, err := os.ReadFile(l.path)
	if err != nil {
		l.t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var e RestEffect
		if err := json.Unmarshal(line, &e); err != nil || e.N != len(all)+1 {
			l.t.Fatalf("line %d of the ledger is %q (%v)", len(all)+1, line, err)
		}
		all = append(all, e)
	}
	return all
}

// audit fails where one key has led to two effects (P1).
func (l *RestLab) audit() {
	l.t.Helper()
	seen := map[string]RestEffect{}
	for _, e := range l.LedgerEffects() {
		if e.Key == "" {
			continue
		}
		if before, twice := seen[e.Key]; twice {
			l.t.Errorf("P1: %q has led to %+v and to %+v", e.Key, before, e)
		}
		seen[e.Key] = e
	}
}

// EffectsOn is how often something has happened to a thing.
func (l *RestLab) EffectsOn(what, of string) (n int) {
	l.t.Helper()
	for _, e := range l.LedgerEffects() {
		if e.What == what && e.Of == of {
			n++
		}
	}
	return n
}

// WantEffects checks what has happened, in its order: "charged ch_1".
func (l *RestLab) WantEffects(want ...string) {
	l.t.Helper()
	var got []string
	for _, e := range l.LedgerEffects() {
		got = append(got, e.What+" "+e.Of)
	}
	if !slices.Equal(got, want) {
		l.t.Errorf("the service has seen\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// charge takes money. Under the lab's lock.
func (c *RestCall) charge() RestAnswer {
	charge := &RestCharge{ID: fmt.Sprintf("ch_%d", len(c.lab.Charges)+1), State: "open"}
	if err := json.Unmarshal([]byte(c.Body), charge); err != nil {
		return RestAnswer{Status: http.StatusBadRequest}
	}
	c.lab.record(c, "charged", charge.ID)
	c.lab.Charges[charge.ID] = charge
	return restJSON(http.StatusCreated, charge)
}

// refund gives money back. Under the lab's lock.
func (c *RestCall) refund() RestAnswer {
	var asked struct{ Charge string }
	if err := json.Unmarshal([]byte(c.Body), &asked); err != nil {
		return RestAnswer{Status: http.StatusBadRequest}
	}
	charge := c.lab.Charges[asked.Charge]
	if charge == nil {
		return RestAnswer{Status: http.StatusUnprocessableEntity, Body: `{"error":"no such charge"}`}
	}
	return c.once("refunded", charge.ID, func() RestAnswer {
		if charge.State == "refunded" {
			return RestAnswer{Status: http.StatusConflict, Body: `{"error":"refunded already"}`}
		}
		charge.State = "refunded"
		return RestAnswer{Status: http.StatusOK, Body: `{"refunded":"` + charge.ID + `"}`}
	})
}

// refunded says whether a charge was refunded. Under the lab's lock.
func (c *RestCall) refunded(charge string) RestAnswer {
	if known := c.lab.Charges[charge]; known != nil && known.State == "refunded" {
		return RestAnswer{Status: http.StatusOK, Body: `{"refunded":"` + charge + `"}`}
	}
	return RestAnswer{Status: http.StatusNotFound, Body: `{"error":"no such refund"}`}
}

// once does something for an Idempotency-Key; it repeats its answer. Under the lab's lock.
func (c *RestCall) once(what, of string, do func() RestAnswer) RestAnswer {
	key := c.Header.Get("Idempotency-Key")
	if key == "" {
		return RestAnswer{Status: http.StatusBadRequest, Body: `{"error":"no Idempotency-Key"}`}
	}
	if done, ok := c.lab.done[key]; ok {
		return done
	}
	answer := do()
	if answer.Status < 300 {
		c.lab.record(c, what, of)
		c.lab.done[key] = answer
	}
	return answer
}

func restJSON(status int, v any) RestAnswer {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return RestAnswer{Status: status, Body: string(text)}
}

// RestSays answers and does nothing.
func RestSays(status int, body string, header ...string) func(*RestCall) {
	return func(c *RestCall) { c.Say(RestAnswer{status, fields(header), body}) }
}

// RestDoes does what is asked for and answers something else.
func RestDoes(status int, body string, header ...string) func(*RestCall) {
	return func(c *RestCall) {
		c.Act()
		c.Say(RestAnswer{status, fields(header), body})
	}
}

// RestLoses does what is asked for and breaks the connection.
func RestLoses(c *RestCall) {
	c.Act()
	Reset(c.W, nil)
}

// RestDrops breaks the connection and does nothing.
func RestDrops(c *RestCall) { Reset(c.W, nil) }

// RestWaits waits at the gate before it does anything.
func RestWaits(g *Gate) func(*RestCall) {
	return func(c *RestCall) {
		g.Pass()
		c.Usual()
	}
}

func fields(pairs []string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

// RestLab is a REST service whose state changes, so that a test can see whether it was
// put back. Whatever happens there is in its ledger, on disk, before it is answered: the
// ledger is the only truth about what was done, whatever gateways say.
//
//	GET, PUT, PATCH, DELETE /docs/{name}   documents, with ETags and conditions
//	the same at /plain/{name}              without ETags
//	the same at /versions/{name}           with the number of the change as the ETag
//	POST /charges, GET /charges/{id}       money taken
//	POST /refunds, GET /refunds/{charge}   money given back, once for each Idempotency-Key
//	POST /agents/{name}                    an agent that does something
//	POST /agents/{name}/rollback           and undoes it, once for each Idempotency-Key
//	POST /mail                             what nobody can undo
type RestLab struct {
	t    *testing.T
	Addr string
	path string // of the ledger

	mu       sync.Mutex
	server   *http.Server
	ledger   *os.File
	effects  int
	docs     map[string]string
	versions map[string]int // of documents: how often each was changed
	Charges  map[string]*RestCharge
	done     map[string]RestAnswer // what an Idempotency-Key has led to
	scripts  []*restScript
	arrivals []*restArrival
	seen     func(RestEffect)
}

// RestCharge is money that was taken.
type RestCharge struct {
	ID     string `json:"id"`
	Amount int    `json:"amount"`
	State  string `json:"state"` // open or refunded
}

// restArrival is a request as it came.
type restArrival struct {
	route  string // method and path
	Header http.Header
	Body   string
}

// RestAnswer is what the service answers.
type RestAnswer struct {
	Status int
	Header http.Header
	Body   string
}

// RestCall is a request that is being answered.
type RestCall struct {
	lab *RestLab
	W   http.ResponseWriter
	*restArrival
	method, path string
}

// restScript answers some requests instead of the service.
type restScript struct {
	pattern string // of a method and a path, as path.Match reads it
	of      string // what the path's end or the body must name; empty is anything
	times   int    // negative is for ever
	answer  func(*RestCall)
}

// NewRestLab starts an API whose resources tests write.
func NewRestLab(t *testing.T) *RestLab {
	t.Helper()
	l := &RestLab{
		t: t, Addr: FreeAddress(t), path: filepath.Join(t.TempDir(), "ledger"),
		docs: map[string]string{}, versions: map[string]int{}, Charges: map[string]*RestCharge{}, done: map[string]RestAnswer{},
	}
	var err error
	if l.ledger, err = os.OpenFile(l.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		t.Fatal(err)
	}
	l.Up()
	t.Cleanup(func() {
		l.Down()
		_ = l.ledger.Close()
		l.audit()
	})
	return l
}

// Up lets the service listen, again after it was down.
func (l *RestLab) Up() {
	l.t.Helper()
	var listener net.Listener
	Eventually(l.t, "the port of the service is free", func() (ok bool) { // see FreeAddress
		var err error
		listener, err = net.Listen("tcp", l.Addr)
		return err == nil
	})
	server := &http.Server{Handler: l}
	l.mu.Lock()
	l.server = server
	l.mu.Unlock()
	go func() { _ = server.Serve(listener) }()
}

// Down lets the service refuse all connections. Its state stays.
func (l *RestLab) Down() {
	l.mu.Lock()
	server := l.server
	l.mu.Unlock()
	_ = server.Close()
}

// On answers the next requests that match by a script.
func (l *RestLab) On(pattern string, times int, answer func(*RestCall)) {
	l.OnFor(pattern, "", times, answer)
}

// OnFor is on for requests that name something.
func (l *RestLab) OnFor(pattern, of string, times int, answer func(*RestCall)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.scripts = append(l.scripts, &restScript{pattern, of, times, answer})
}

// matches reports whether a request has a method and a path, and names something; empty
// is anything.
func (a *restArrival) matches(pattern, of string) bool {
	is, _ := path.Match(pattern, a.route)
	return is && (of == "" || path.Base(a.route) == of || strings.Contains(a.Body, strconv.Quote(of)))
}

// Watch has f called at each effect, once it is in the ledger.
func (l *RestLab) Watch(f func(RestEffect)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = f
}

// All are the requests that match and name something; empty is anything.
func (l *RestLab) All(pattern, of string) (all []*restArrival) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.arrivals {
		if a.matches(pattern, of) {
			all = append(all, a)
		}
	}
	return all
}

// Last is the last request for a path.
func (l *RestLab) Last(path string) *restArrival {
	all := l.All("* "+path, "")
	if len(all) == 0 {
		return new(restArrival)
	}
	return all[len(all)-1]
}

// Arrived checks how many requests came that match.
func (l *RestLab) Arrived(pattern string, want int) {
	l.t.Helper()
	if got := len(l.All(pattern, "")); got != want {
		l.t.Errorf("%s arrived %d times, want %d", pattern, got, want)
	}
}

// Doc is a document as it stands there; empty is none.
func (l *RestLab) Doc(path string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.docs[path]
}

// Write changes a document past the gateway; empty deletes it.
func (l *RestLab) Write(path, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change(path, text, text != "")
}

// change changes a document, also to what it was. Under the lab's lock.
func (l *RestLab) change(path, text string, exists bool) {
	l.versions[path]++
	if !exists {
		delete(l.docs, path)
		return
	}
	l.docs[path] = text
}

// tag is the ETag of a document that exists; empty is none. Under the lab's lock.
func (l *RestLab) tag(path string) string {
	switch {
	case strings.HasPrefix(path, "/docs/"):
		return restTag(l.docs[path])
	case strings.HasPrefix(path, "/versions/"):
		return fmt.Sprintf(`"v%d"`, l.versions[path])
	}
	return ""
}

// WantDoc checks a document; empty is none.
func (l *RestLab) WantDoc(path, want string) {
	l.t.Helper()
	if got := l.Doc(path); got != want {
		l.t.Errorf("%s is %q, want %q", path, got, want)
	}
}

// WantCharge checks the state of a charge.
func (l *RestLab) WantCharge(id, want string) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.Charges[id]; c == nil || c.State != want {
		l.t.Errorf("the charge %s is %+v, want it %s", id, c, want)
	}
}

// ServeHTTP answers requests, and notes them in the ledger.
func (l *RestLab) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // not a whole request: nothing is done
	}
	c := &RestCall{
		lab: l, W: w, method: r.Method, path: r.URL.Path,
		restArrival: &restArrival{r.Method + " " + r.URL.Path, r.Header.Clone(), string(body)},
	}
	answer := (*RestCall).Usual
	l.mu.Lock()
	l.arrivals = append(l.arrivals, c.restArrival)
	for _, s := range l.scripts {
		if s.times != 0 && c.matches(s.pattern, s.of) {
			s.times--
			answer = s.answer
			break
		}
	}
	l.mu.Unlock()
	answer(c)
}

// Usual does what is asked for and answers.
func (c *RestCall) Usual() { c.Say(c.Act()) }

// Say answers.
func (c *RestCall) Say(a RestAnswer) {
	for name, values := range a.Header {
		c.W.Header()[name] = values
	}
	if a.Body != "" && c.W.Header().Get("Content-Type") == "" {
		c.W.Header().Set("Content-Type", "application/json")
	}
	c.W.Header().Set("Content-Length", strconv.Itoa(len(a.Body)))
	c.W.WriteHeader(a.Status)
	if a.Body != "" {
		_, _ = io.WriteString(c.W, a.Body)
	}
}

// Act does what is asked for, once it is in the ledger.
func (c *RestCall) Act() RestAnswer {
	c.lab.mu.Lock()
	defer c.lab.mu.Unlock()
	switch place, name := path.Split(c.path); {
	case place == "/docs/" || place == "/plain/" || place == "/versions/":
		return c.document()
	case c.route == "POST /charges":
		return c.charge()
	case place == "/charges/" && c.lab.Charges[name] != nil:
		return restJSON(http.StatusOK, c.lab.Charges[name])
	case c.route == "POST /refunds":
		return c.refund()
	case place == "/refunds/":
		return c.refunded(name)
	case c.method == "POST" && (place == "/agents/" || c.path == "/mail"):
		c.lab.record(c, "asked", c.path)
		return RestAnswer{Status: http.StatusOK, Body: `{"done":true}`}
	case c.method == "POST" && strings.HasPrefix(place, "/agents/"):
		return c.once("undone", path.Dir(c.path), func() RestAnswer {
			return RestAnswer{Status: http.StatusOK, Body: `{"status":"completed"}`}
		})
	default:
		return RestAnswer{Status: http.StatusNotFound}
	}
}

// document is a request for a document. Under the lab's lock.
func (c *RestCall) document() RestAnswer {
	was, exists := c.lab.docs[c.path]
	tag := c.lab.tag(c.path)
	if !holds(c.Header.Get("If-Match"), tag, exists, true) || !holds(c.Header.Get("If-None-Match"), tag, exists, false) {
		if c.method == "GET" {
			return RestAnswer{Status: http.StatusNotModified}
		}
		return RestAnswer{Status: http.StatusPreconditionFailed}
	}
	switch {
	case c.method == "GET" && exists:
		return c.shown(http.StatusOK, was)
	case c.method == "PUT":
		status, what := http.StatusOK, "changed"
		if !exists {
			status, what = http.StatusCreated, "created"
		}
		c.lab.record(c, what, c.path)
		c.lab.change(c.path, c.Body, true)
		return c.shown(status, c.Body)
	case c.method == "PATCH" && exists:
		now, err := restMerge(was, c.Body)
		if err != nil {
			return RestAnswer{Status: http.StatusBadRequest}
		}
		c.lab.record(c, "changed", c.path)
		c.lab.change(c.path, now, true)
		return c.shown(http.StatusOK, now)
	case c.method == "DELETE" && exists:
		c.lab.record(c, "deleted", c.path)
		c.lab.change(c.path, "", false)
		return RestAnswer{Status: http.StatusNoContent}
	default:
		return RestAnswer{Status: http.StatusNotFound}
	}
}

// shown is a document as it is answered.
func (c *RestCall) shown(status int, text string) RestAnswer {
	a := RestAnswer{Status: status, Header: http.Header{}, Body: text}
	if tag := c.lab.tag(c.path); tag != "" {
		a.Header.Set("Etag", tag)
	}
	return a
}

// holds reports whether a condition holds of a document with this tag; empty is none.
func holds(condition, tag string, exists, wanted bool) bool {
	if condition == "" {
		return true
	}
	return wanted == (exists && (condition == "*" || condition == tag))
}

func restTag(text string) string {
	sum := sha256.Sum256([]byte(text))
	return `"` + hex.EncodeToString(sum[:6]) + `"`
}

// restMerge is a merge of two flat objects.
func restMerge(text, patch string) (string, error) {
	var object, changes map[string]any
	if err := json.Unmarshal([]byte(text), &object); err != nil {
		return "", err
	}
	if err := json.Unmarshal([]byte(patch), &changes); err != nil {
		return "", err
	}
	for name, value := range changes {
		object[name] = value
	}
	merged, err := json.Marshal(object)
	return string(merged), err
}

// Arrival is one request as the upstream got it.
type Arrival struct {
	*http.Request
	Body    string
	Trailer http.Header
	// n counts the arrivals at this path, from 1.
	N int
}

// Upstream is a server that counts what arrives, by path.
type Upstream struct {
	t    *testing.T
	Addr string

	Mu       sync.Mutex
	Seen     map[string][]*Arrival
	handlers map[string]func(http.ResponseWriter, *Arrival)
}

// NewUpstream runs an upstream on HTTP/1. Paths without a handler answer 201 with
// the number of the arrival.
func NewUpstream(t *testing.T) *Upstream {
	t.Helper()
	u := MakeUpstream(t)
	u.run(false)
	return u
}

// NewH2CUpstream runs an upstream that speaks HTTP/2 without TLS too.
func NewH2CUpstream(t *testing.T) *Upstream {
	t.Helper()
	u := MakeUpstream(t)
	u.run(true)
	return u
}

// NewTLSUpstream runs an upstream on HTTP/1 over TLS, whose certificate nobody knows.
func NewTLSUpstream(t *testing.T) *Upstream {
	t.Helper()
	u := MakeUpstream(t)
	server := httptest.NewTLSServer(u)
	u.Addr = server.Listener.Addr().String()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return u
}

// MakeUpstream makes an upstream without a server.
func MakeUpstream(t *testing.T) *Upstream {
	return &Upstream{t: t, Seen: map[string][]*Arrival{}, handlers: map[string]func(http.ResponseWriter, *Arrival){}}
}

func (u *Upstream) run(h2c bool) {
	server := httptest.NewUnstartedServer(u)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(h2c)
	server.Start()
	u.Addr = server.Listener.Addr().String()
	u.t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
}

// On answers the calls to path.
func (u *Upstream) On(path string, answer func(w http.ResponseWriter, a *Arrival)) {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	u.handlers[path] = answer
}

// ServeHTTP notes each request, and answers it.
func (u *Upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.EscapedPath()
	a := &Arrival{Request: r}
	u.Mu.Lock()
	u.Seen[path] = append(u.Seen[path], a)
	a.N = len(u.Seen[path])
	answer := u.handlers[path]
	u.Mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the request was broken off
	}
	u.Mu.Lock()
	a.Body, a.Trailer = string(body), r.Trailer.Clone()
	u.Mu.Unlock()
	if answer == nil {
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "arrival %d", a.N)
		return
	}
	answer(w, a)
}

// Arrivals counts the requests at path, broken ones too.
func (u *Upstream) Arrivals(path string) int {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	return len(u.Seen[path])
}

// Total counts all requests.
func (u *Upstream) Total() int {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	n := 0
	for _, seen := range u.Seen {
		n += len(seen)
	}
	return n
}

// Arrived checks how often path was reached.
func (u *Upstream) Arrived(path string, want int) {
	u.t.Helper()
	if got := u.Arrivals(path); got != want {
		u.t.Errorf("%s arrived %d times, want %d", path, got, want)
	}
}

// Last is the last request at path.
func (u *Upstream) Last(path string) *Arrival {
	u.t.Helper()
	u.Mu.Lock()
	defer u.Mu.Unlock()
	seen := u.Seen[path]
	if len(seen) == 0 {
		u.t.Fatalf("nothing arrived at %s", path)
	}
	return seen[len(seen)-1]
}

// Raw answers with these bytes and ends the connection.
func Raw(text string) func(http.ResponseWriter, *Arrival) {
	return func(w http.ResponseWriter, _ *Arrival) {
		conn, buf := Hijack(w)
		defer conn.Close()
		_, _ = buf.WriteString(text) // the other side's view is what is tested
		_ = buf.Flush()
	}
}

// Reset ends the connection with RST, without an answer.
func Reset(w http.ResponseWriter, _ *Arrival) {
	conn, _ := Hijack(w)
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
}

// Hijack takes the connection of a request over.
func Hijack(w http.ResponseWriter) (net.Conn, *bufio.ReadWriter) {
	conn, buf, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err) // only HTTP/1 upstreams are asked
	}
	return conn, buf
}

// Status answers with a status and header fields, in pairs.
func Status(code int, body string, header ...string) func(http.ResponseWriter, *Arrival) {
	return func(w http.ResponseWriter, _ *Arrival) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Add(header[i], header[i+1])
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// Gate holds an upstream's answer until the test opens it.
type Gate struct {
	Arrived chan struct{} // closed with the first arrival
	opened  chan struct{}
	once    sync.Once
	open1   sync.Once
}

// NewGate makes a gate that is closed.
func NewGate(t *testing.T) *Gate {
	g := &Gate{Arrived: make(chan struct{}), opened: make(chan struct{})}
	t.Cleanup(g.Open)
	return g
}

// Open lets everybody pass from now on.
func (g *Gate) Open() { g.open1.Do(func() { close(g.opened) }) }

// Pass says that somebody is here and waits for the opening.
func (g *Gate) Pass() {
	g.once.Do(func() { close(g.Arrived) })
	<-g.opened
}
