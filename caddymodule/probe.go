package caddymodule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Probe asks the upstream whether a call in doubt took effect. The request goes through the
// handler's `upstream`, and contains nothing of the caller's except what the configuration names.
type Probe struct {
	// Asks for the task that the call has begun, with `tasks/get` of MCP or A2A (`GetTask` in A2A 1.0)
	// at the path of the call, where its answer had named the task before it was cut off. That the
	// upstream has the task means that the call was applied, and the task becomes its result. It needs
	// `protocol mcp`, `a2a` or `auto`, and takes `header` and `timeout` only. Default: false.
	Task bool `json:"task,omitempty"`

	// The method. Default: GET.
	Method string `json:"method,omitempty"`

	// The path and query, with placeholders like `{http.agent_guard.execution_id}`. Their values
	// are escaped for their place: one path segment, or one query value.
	URI string `json:"uri,omitempty"`

	// Header fields of the request. Values may have placeholders.
	Header map[string]string `json:"header,omitempty"`

	// The answers that say that the call was applied.
	Applied *Evidence `json:"applied,omitempty"`

	// The answers that say that it was not applied, so that it may run; checked after `applied`.
	// Any other answer leaves the call in doubt.
	NotApplied *Evidence `json:"not_applied,omitempty"`

	// Makes the answer that said "applied" the result of the call, which is then replayed.
	// Otherwise the result is unavailable. Default: false.
	UseAnswer bool `json:"use_answer,omitempty"`

	// How long to wait for the answer. Default: 10s.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	path, query probeTemplate
}

func (p *Probe) provision() error {
	inherit(&p.Timeout, caddy.Duration(10*time.Second))
	if err := checkOptions(probeOptions(), p); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	if p.Task {
		if p.Method != "" || p.URI != "" || p.Applied != nil || p.NotApplied != nil || p.UseAnswer {
			return errors.New("probe: a task is asked for with tasks/get, and is the call's answer; leave method, URI, applied, not_applied and use_answer away")
		}
		return nil
	}
	inherit(&p.Method, http.MethodGet)
	if !httpguts.ValidHeaderFieldName(p.Method) || strings.ToUpper(p.Method) != p.Method {
		return fmt.Errorf("probe: %q is no method; write one in capital letters, like GET", p.Method)
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

// asksForACall reports whether the request depends on the call. Otherwise one answer would
// decide all calls.
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

// target returns the escaped path and query of the probe.
func (p *Probe) target(repl *caddy.Replacer) (path, query string, err error) {
	if path, err = p.path.fill(repl); err != nil {
		return "", "", err
	}
	// A value must not be able to change the path.
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "." || segment == ".." {
			return "", "", errors.New("a value in the path would lead elsewhere")
		}
	}
	query, err = p.query.fill(repl)
	return path, query, err
}

// forCalls returns the probe in the form that package guard needs.
func (p *Probe) forCalls(h *Handler) *guard.Probe {
	probe := &guard.Probe{
		Ask: func(r *http.Request, message *guard.InternalRequest) (*guard.InternalAnswer, error) {
			return p.ask(h, r, message)
		},
		Applied: p.Applied.matches, NotApplied: p.NotApplied.matches, UseAnswer: p.UseAnswer || p.Task, Task: p.Task,
	}
	if p.Task {
		probe.Applied = func(*guard.InternalAnswer) bool { return true } // else it is an error
	}
	return probe
}

// maxProbeAnswer is the largest body of a probe's answer that is read, in bytes.
const maxProbeAnswer = 256 << 10

// ask sends the probe for the call of r, or a message of the guard about it.
func (p *Probe) ask(h *Handler, r *http.Request, message *guard.InternalRequest) (*guard.InternalAnswer, error) {
	repl := replacer(r)
	if message == nil {
		path, query, err := p.target(repl)
		if err != nil {
			return nil, err
		}
		message = &guard.InternalRequest{Method: p.Method, Path: path, Query: query, Header: http.Header{}}
	}
	// Others may wait for the probe after the caller has disconnected.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Duration(p.Timeout))
	defer cancel()
	for name, value := range p.Header {
		// Without its credential, an upstream may answer as if the call were unknown.
		value, err := repl.ReplaceOrErr(value, true, true)
		if err != nil {
			return nil, fmt.Errorf("header %s: %w", name, err)
		}
		message.Header.Set(name, value)
	}
	message.Host, message.Remote, message.MaxAnswer = r.Host, r.RemoteAddr, maxProbeAnswer
	return h.send(ctx, message)
}

// Evidence matches an answer. Every member that is set must match.
type Evidence struct {
	// Status and header of the answer.
	caddyhttp.ResponseMatcher

	// Values in the answer's JSON body, by JSON pointer: strings or numbers.
	JSON map[string]string `json:"json,omitempty"`

	pointers map[string]jsonx.Pointer
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
	e.pointers = map[string]jsonx.Pointer{}
	for text := range e.JSON {
		p, err := jsonx.ParsePointer(text)
		if err != nil {
			return fmt.Errorf("json %q: %w", text, err)
		}
		e.pointers[text] = p
	}
	return nil
}

func (e *Evidence) matches(a *guard.InternalAnswer) bool {
	if e == nil || !e.Match(a.Status, a.Header) {
		return false
	}
	for text, want := range e.JSON {
		got, found, err := body.Lookup(bytes.NewReader(a.Body), int64(len(a.Body)), e.pointers[text])
		if err != nil || !found || got != want {
			return false
		}
	}
	return true
}

// probeTemplate is text with placeholders whose values are escaped.
type probeTemplate []templatePart

// varies reports whether a placeholder depends on the request.
func (t probeTemplate) varies() bool {
	return slices.ContainsFunc(t, func(part templatePart) bool {
		space, _, _ := strings.Cut(part.text, ".")
		return part.placeholder && !slices.Contains([]string{"env", "file", "system", "time"}, space)
	})
}

// sample returns the template filled with example values.
func (t probeTemplate) sample() string {
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

// fill replaces the placeholders. A missing value is an error, because the probe would ask
// about something else.
func (t probeTemplate) fill(repl *caddy.Replacer) (string, error) {
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

type templatePart struct {
	text        string
	placeholder bool
	escape      func(string) string
}

// parseTemplate parses text with {placeholders}.
func parseTemplate(text string, escape func(string) string) (probeTemplate, error) {
	var t probeTemplate
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
