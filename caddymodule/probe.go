package caddymodule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// Probe asks the upstream whether a call in doubt was applied. The request goes
// through the handler's `upstream`, with nothing of the caller's but what the
// configuration names.
type Probe struct {
	// The method. Default: GET.
	Method string `json:"method,omitempty"`

	// The path and query to ask, with placeholders like
	// `{http.agent_guard.execution_id}`. Their values are escaped by place: one
	// path segment, or one query value.
	URI string `json:"uri,omitempty"`

	// Header fields of the request. Values may have placeholders.
	Header map[string]string `json:"header,omitempty"`

	// Which answers say that the call was applied.
	Applied *Evidence `json:"applied,omitempty"`

	// Which answers say that it was not applied, so that it may run. Judged after
	// `applied`. An answer that says neither leaves the call in doubt.
	NotApplied *Evidence `json:"not_applied,omitempty"`

	// Makes the answer that said "applied" the result of the call, which is then
	// replayed. Else the result is unavailable. Default: false.
	UseAnswer bool `json:"use_answer,omitempty"`

	// How long to wait for the answer. Default: 10s.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	path, query template
}

// Evidence matches an answer. All that is set must hold.
type Evidence struct {
	// Status and header of the answer.
	caddyhttp.ResponseMatcher

	// Values in the answer's JSON body, by JSON pointer: strings or numbers.
	JSON map[string]string `json:"json,omitempty"`

	pointers map[string]fingerprint.Pointer
}

// maxProbeAnswer is the largest answer of a probe that is read, in bytes.
const maxProbeAnswer = 256 << 10

func (p *Probe) provision() error {
	inherit(&p.Method, http.MethodGet)
	inherit(&p.Timeout, caddy.Duration(10*time.Second))
	if err := checkMethod(p.Method); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	if err := checkDuration(p.Timeout); err != nil {
		return fmt.Errorf("probe: timeout: %w", err)
	}
	if err := checkFields(slices.Sorted(maps.Keys(p.Header))); err != nil {
		return fmt.Errorf("probe: header: %w", err)
	}
	path, query, _ := strings.Cut(p.URI, "?")
	if !strings.HasPrefix(path, "/") {
		return fmt.Errorf("probe: URI %q must begin with a slash: the upstream is the handler's own", p.URI)
	}
	var err error
	if p.path, err = parseTemplate(path, url.PathEscape); err != nil {
		return fmt.Errorf("probe: URI %q: %w", p.URI, err)
	}
	if p.query, err = parseTemplate(query, url.QueryEscape); err != nil {
		return fmt.Errorf("probe: URI %q: %w", p.URI, err)
	}
	if _, err := url.ParseRequestURI(p.path.sample()); err != nil || strings.ContainsAny(p.URI, "# \t") {
		return fmt.Errorf("probe: URI %q is malformed; write a path and a query, escaped", p.URI)
	}
	if p.Applied == nil && p.NotApplied == nil {
		return errors.New("probe: neither applied nor not_applied is set, so that no answer would say anything")
	}
	if err := p.Applied.provision(); err != nil {
		return fmt.Errorf("probe: applied: %w", err)
	}
	if err := p.NotApplied.provision(); err != nil {
		return fmt.Errorf("probe: not_applied: %w", err)
	}
	return nil
}

// checkMethod finds what no upstream would know.
func checkMethod(method string) error {
	if !httpguts.ValidHeaderFieldName(method) || strings.ToUpper(method) != method {
		return fmt.Errorf("%q is no method; write one in capital letters, like GET", method)
	}
	return nil
}

func (e *Evidence) provision() error {
	if e == nil {
		return nil
	}
	if len(e.StatusCode) == 0 && len(e.Headers) == 0 && len(e.JSON) == 0 {
		return errors.New("it names no status, header or json, and would match every answer")
	}
	if err := checkAnswer(&e.ResponseMatcher); err != nil {
		return err
	}
	e.pointers = map[string]fingerprint.Pointer{}
	for text := range e.JSON {
		p, err := fingerprint.ParsePointer(text)
		if err != nil {
			return fmt.Errorf("json %q: %w", text, err)
		}
		e.pointers[text] = p
	}
	return nil
}

func (e *Evidence) matches(a *probeAnswer) bool {
	if e == nil || !e.Match(a.status, a.header) {
		return false
	}
	for text, want := range e.JSON {
		got, found, err := fingerprint.Lookup(bytes.NewReader(a.body), int64(len(a.body)), e.pointers[text])
		if err != nil || !found || got != want {
			return false
		}
	}
	return true
}

// template is text with placeholders whose values are escaped.
type template []templatePart

type templatePart struct {
	text        string
	placeholder bool
	escape      func(string) string
}

// parseTemplate reads text with {placeholders}.
func parseTemplate(text string, escape func(string) string) (template, error) {
	var t template
	for text != "" {
		before, rest, open := strings.Cut(text, "{")
		if before != "" {
			t = append(t, templatePart{text: before})
		}
		if !open {
			break
		}
		name, after, closed := strings.Cut(rest, "}")
		if !closed || name == "" {
			return nil, errors.New("a placeholder is empty or not closed")
		}
		t = append(t, templatePart{text: name, placeholder: true, escape: escape})
		text = after
	}
	return t, nil
}

// sample is the template with something in the place of each value.
func (t template) sample() string {
	var b strings.Builder
	for _, part := range t {
		if part.placeholder {
			b.WriteString("x")
		} else {
			b.WriteString(part.text)
		}
	}
	return b.String()
}

// fill writes the template out. A placeholder without a value is an error: the
// request would ask something else than was meant.
func (t template) fill(repl *caddy.Replacer) (string, error) {
	var b strings.Builder
	for _, part := range t {
		if !part.placeholder {
			b.WriteString(part.text)
			continue
		}
		value, _ := repl.GetString(part.text)
		if value == "" {
			return "", fmt.Errorf("placeholder {%s} has no value", part.text)
		}
		b.WriteString(part.escape(value))
	}
	return b.String(), nil
}

// probeAnswer is a response writer that keeps a small answer.
type probeAnswer struct {
	status int
	header http.Header
	body   []byte
	large  bool
}

func (a *probeAnswer) Header() http.Header { return a.header }

func (a *probeAnswer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

func (a *probeAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if len(a.body)+len(p) > maxProbeAnswer {
		a.large = true
		return len(p), nil
	}
	a.body = append(a.body, p...)
	return len(p), nil
}

// target is the escaped path and the query to ask.
func (p *Probe) target(repl *caddy.Replacer) (path, query string, err error) {
	if path, err = p.path.fill(repl); err != nil {
		return "", "", err
	}
	// Whoever chooses the values must not choose another path.
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "." || segment == ".." {
			return "", "", fmt.Errorf("the path %q would lead elsewhere", path)
		}
	}
	query, err = p.query.fill(repl)
	return path, query, err
}

// ask sends the probe for the call of x.
func (p *Probe) ask(x *exchange) (*probeAnswer, error) {
	repl := replacer(x.r)
	path, query, err := p.target(repl)
	if err != nil {
		return nil, err
	}
	// The caller's leaving must not waste what others are waiting for.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.r.Context()), time.Duration(p.Timeout))
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, p.Method, (&url.URL{Path: "/"}).String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	if r.URL.Path, err = url.PathUnescape(path); err != nil {
		return nil, err
	}
	r.URL.RawPath, r.URL.RawQuery = path, query
	r.RequestURI = r.URL.RequestURI()
	r.Host, r.RemoteAddr = x.r.Host, x.r.RemoteAddr
	for name, value := range p.Header {
		r.Header.Set(name, repl.ReplaceAll(value, ""))
	}
	r.Header.Set("Accept-Encoding", "identity")
	a := &probeAnswer{header: http.Header{}}
	server, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), a, server)
	panicked, err := handOn(x.h.upstream, a, r)
	switch {
	case panicked != nil:
		return nil, fmt.Errorf("the answer was cut short: %v", panicked)
	case err != nil:
		return nil, err
	case a.large:
		return nil, fmt.Errorf("the answer is larger than %d bytes", maxProbeAnswer)
	}
	return a, nil
}

// prober lets one probe run for a key at a time; the others wait for what it finds.
type prober struct {
	mu      sync.Mutex
	running map[guard.Key]*probing
}

// probing is a probe that runs.
type probing struct {
	over chan struct{}
	// doubt says, once over is closed, that the call stays in doubt.
	doubt bool
}

// enter returns the probe of key, and whether the caller is to make it. Who makes it
// must call leave.
func (p *prober) enter(key guard.Key) (probe *probing, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if probe, ok := p.running[key]; ok {
		return probe, false
	}
	if p.running == nil {
		p.running = map[guard.Key]*probing{}
	}
	probe = &probing{over: make(chan struct{})}
	p.running[key] = probe
	return probe, true
}

func (p *prober) leave(key guard.Key, probe *probing) {
	p.mu.Lock()
	delete(p.running, key)
	p.mu.Unlock()
	close(probe.over)
}

// probe settles a call in doubt by asking the upstream about it. Of many retries one
// asks; the others do what its answer allows.
func (x *exchange) probe(found guard.Finding) (step, error) {
	probe, first := x.h.probes.enter(x.call.Key)
	if !first {
		select {
		case <-probe.over:
		case <-x.r.Context().Done():
			return stepDone, x.gone()
		}
		if probe.doubt {
			return stepDone, x.inDoubt(found.Record.Cause)
		}
		return stepFind, nil
	}
	x.probing = probe
	// It may have been settled since it was found.
	found, err := x.find()
	if err != nil || found.Standing != guard.Doubtful {
		x.probed()
		return stepFind, err
	}
	next, err := x.settleDoubt(found)
	if next == stepDone && err == nil {
		probe.doubt = true
		err = x.inDoubt(found.Record.Cause)
	}
	if next != stepClaim { // those who wait must find the claim
		x.probed()
	}
	return next, err
}

// probed lets those go who wait for the probe of this call.
func (x *exchange) probed() {
	if x.probing != nil {
		x.h.probes.leave(x.call.Key, x.probing)
		x.probing = nil
	}
}

// settleDoubt asks, and records that the call was applied. stepDone says that it stays
// in doubt.
func (x *exchange) settleDoubt(found guard.Finding) (step, error) {
	p := x.action.Probe
	a, err := p.ask(x)
	if err != nil {
		x.h.logger.Warn("the status probe gave no answer; the call stays in doubt",
			zap.Stringer("key", x.call.Key), zap.Error(err))
		return stepDone, nil
	}
	switch {
	case p.Applied.matches(a):
		var head *guard.Head
		if p.UseAnswer {
			head = &guard.Head{Status: a.status, Header: answer.Replayable(a.header)}
		}
		// Others wait for this, whether or not the caller does.
		err := x.guard.Applied(context.WithoutCancel(x.r.Context()), x.call.Key, found, head, a.body)
		if err != nil && !errors.Is(err, guard.ErrTaken) {
			return stepFind, x.storeFailed(err)
		}
		return stepFind, nil
	case p.NotApplied.matches(a):
		return stepClaim, nil
	}
	return stepDone, nil
}

// compile chains handlers, the first outermost.
func compile(mods []any) caddyhttp.Handler {
	next := caddyhttp.Handler(caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		return caddyhttp.Error(http.StatusBadGateway, errors.New("agent_guard: no handler in `upstream` answered"))
	}))
	for i := len(mods) - 1; i >= 0; i-- {
		middleware, inner := mods[i].(caddyhttp.MiddlewareHandler), next
		next = caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return middleware.ServeHTTP(w, r, inner)
		})
	}
	return next
}
