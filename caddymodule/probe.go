package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http/httpguts"
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
	if !p.asksForACall() {
		return fmt.Errorf("probe: URI %q is the same for every call; name the call in it, with {http.agent_guard.execution_id}", p.URI)
	}
	if p.UseAnswer && p.Method == http.MethodHead {
		return errors.New("probe: use_answer needs an answer with a body; HEAD has none")
	}
	return nil
}

// asksForACall reports that the request says which call it asks for: else one answer
// would speak for all calls.
func (p *Probe) asksForACall() bool {
	if p.path.varies() || p.query.varies() {
		return true
	}
	for _, value := range p.Header {
		if t, err := parseTemplate(value, nil); err == nil && t.varies() {
			return true
		}
	}
	return false
}

// checkMethod finds what no upstream would know.
func checkMethod(method string) error {
	if !httpguts.ValidHeaderFieldName(method) || strings.ToUpper(method) != method {
		return fmt.Errorf("%q is no method; write one in capital letters, like GET", method)
	}
	return nil
}

// target is the escaped path and the query to ask.
func (p *Probe) target(repl *caddy.Replacer) (path, query string, err error) {
	if path, err = p.path.fill(repl); err != nil {
		return "", "", err
	}
	// Whoever chooses the values must not choose another path.
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "." || segment == ".." {
			return "", "", errors.New("a value in the path would lead elsewhere")
		}
	}
	query, err = p.query.fill(repl)
	return path, query, err
}

// ask sends the probe for the call of x.
func (p *Probe) ask(x *exchange) (*errandAnswer, error) {
	repl := replacer(x.r)
	path, query, err := p.target(repl)
	if err != nil {
		return nil, err
	}
	// The caller's leaving must not waste what others are waiting for.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.r.Context()), time.Duration(p.Timeout))
	defer cancel()
	header := http.Header{}
	for name, value := range p.Header {
		// Asked without its credential, an upstream may answer as if there were nothing.
		if value, err = repl.ReplaceOrErr(value, true, true); err != nil {
			return nil, fmt.Errorf("header %s: %w", name, err)
		}
		header.Set(name, value)
	}
	a, err := x.h.send(ctx, &errand{
		method: p.Method, path: path, query: query, host: x.r.Host, remote: x.r.RemoteAddr,
		header: header, most: maxProbeAnswer,
	})
	if err != nil {
		return nil, err
	}
	return a, nil
}
