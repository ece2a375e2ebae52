package undoing

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Plan is how the calls of one action are undone. It does not change and may be used by
// many goroutines.
type Plan struct {
	terms      Terms
	ways       Ways
	spec       undo.Spec
	compensate *template.Template
	status     *template.Template
	needs      template.Needs // of both
	// config are the fields of the configuration, by the origin that they go to; that of
	// the call's upstream is empty.
	config map[string]map[string]string
}

// always are credentials whatever the configuration calls so.
var always = []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key"}

// Compile checks the ways and terms of an action, and reads its templates. Terms are
// complete; guard is the guard's name; credentials are the fields by which it knows
// callers, which no template may ask for. The error is an *Error.
func Compile(w *Ways, t *Terms, guard string, credentials []string) (*Plan, error) {
	if err := w.check(); err != nil {
		return nil, err
	}
	p := &Plan{terms: *t, ways: *w, spec: undo.Spec{Guard: guard, OnLost: t.OnLost, Auth: t.UndoAuth}}
	secret := slices.Clone(always)
	for _, name := range credentials {
		secret = append(secret, http.CanonicalHeaderKey(name))
	}
	if w.Delegate != "" {
		if err := checkDelegate(w.Delegate); err != nil {
			return nil, &Error{"delegate", err}
		}
		if t.Recorded() {
			return nil, wrong("undo_auth", "recorded: the call's credentials go to its own upstream, and delegate asks another; set undo_auth config for the action")
		}
	}
	if w.Restore != nil {
		if err := p.compileRestore(secret); err != nil {
			return nil, &Error{"restore", err}
		}
	}
	if w.Compensate == nil {
		return p, nil
	}
	err := p.compileCompensation(secret)
	if err == nil {
		named := p.spec
		named.Guard = cmp.Or(guard, "default") // which a Caddyfile leaves out
		p.needs, err = named.Needs()
	}
	if err != nil {
		return nil, &Error{"compensate", err}
	}
	return p, nil
}

func (p *Plan) compileRestore(secret []string) error {
	if err := p.ways.Restore.check(); err != nil {
		return err
	}
	// All of them are the configuration's: nothing of a restore is made of a template.
	all := slices.Clone(secret)
	for name := range p.ways.Restore.Header {
		all = append(all, http.CanonicalHeaderKey(name))
	}
	f, err := part(p.ways.Restore.Header, all)
	if err != nil {
		return err
	}
	return p.add("", f.config, secret)
}

func (p *Plan) compileCompensation(secret []string) error {
	c := p.ways.Compensate
	spec, config, err := c.spec(secret)
	if err != nil {
		return err
	}
	if p.compensate, err = p.parse(spec, config, secret); err != nil {
		return err
	}
	p.spec.Compensate = &spec
	if safe(spec.Method) {
		return fmt.Errorf("method: %s changes nothing that could be undone; write a method like POST or DELETE", spec.Method)
	}
	if c.Status == nil {
		return nil
	}
	asks, config, err := c.Status.spec(secret)
	if err == nil {
		p.status, err = p.parse(asks, config, secret)
	}
	if err == nil && asks.Method != http.MethodGet {
		err = fmt.Errorf("method: a status is asked for with GET, and not with %s", asks.Method)
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	p.spec.Status = &asks
	return nil
}

func safe(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// parse reads a template, and adds the fields of the configuration that go with it.
func (p *Plan) parse(spec template.Spec, config map[string]string, secret []string) (*template.Template, error) {
	t, err := template.Parse(spec)
	if err != nil {
		return nil, plain(err)
	}
	n := t.Needs()
	for _, name := range n.RequestHeader {
		if name == headerToken {
			return nil, fmt.Errorf("{request.header.%s} is the caller's token, which no template hands on; send a header of your own", name)
		}
		if slices.Contains(secret, name) {
			return nil, fmt.Errorf("{request.header.%s} is a credential of the caller's, which no template hands on; set undo_auth recorded, or a header of your own", name)
		}
	}
	if p.terms.Recorded() && t.Origin() != "" {
		return nil, errors.New("url: with undo_auth recorded a call's credentials go to its own upstream only; begin with /, or set undo_auth config")
	}
	return t, p.add(t.Origin(), config, secret)
}

// add takes fields of the configuration for an origin.
func (p *Plan) add(origin string, config map[string]string, secret []string) error {
	for name, value := range config {
		if err := checkPlaceholders(value); err != nil {
			return fmt.Errorf("header %s: %w", name, err)
		}
		if p.terms.Recorded() && slices.Contains(secret, name) {
			return fmt.Errorf("header %s: with undo_auth recorded the call's own credentials are sent; leave the field away, or set undo_auth config", name)
		}
		if p.config == nil {
			p.config = map[string]map[string]string{}
		}
		if p.config[origin] == nil {
			p.config[origin] = map[string]string{}
		}
		if before, ok := p.config[origin][name]; ok && before != value {
			return fmt.Errorf("header %s: it has two values for one server; give it the same wherever it stands", name)
		}
		p.config[origin][name] = value
	}
	return nil
}

// checkPlaceholders finds those that no process has.
func checkPlaceholders(value string) error {
	for rest := value; ; {
		_, after, open := strings.Cut(rest, "{")
		if !open {
			return nil
		}
		name, after, closed := strings.Cut(after, "}")
		if !closed || !ofProcess("{"+name) {
			return fmt.Errorf("{%.40s} is no placeholder of the configuration; use one like {env.TOKEN}", name)
		}
		rest = after
	}
}

// Exposed names the servers, by scheme and host, that get fields of the configuration
// without TLS and are not the own machine. It is not an error: a mesh may encrypt beneath.
func (p *Plan) Exposed() []string {
	var all []string
	for origin := range p.config {
		if u, err := url.Parse(origin); err == nil && u.Scheme == "http" && !loopback(u.Hostname()) {
			all = append(all, origin)
		}
	}
	slices.Sort(all)
	return all
}

// Unset says which field of the configuration has no value now, by the error of Fields.
// It may have one when something is undone, so that it is no fault of the configuration.
func (p *Plan) Unset() error {
	var all []error
	for _, origin := range slices.Sorted(maps.Keys(p.config)) {
		if _, err := p.Fields(origin + "/"); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// Fields are the fields of the configuration that go with a request of an undo to a
// URL: the credentials of its server and of no other. A placeholder without a value is
// an error: asked without its credential, a server may answer as if there were nothing.
func (p *Plan) Fields(target string) (http.Header, error) {
	origin := ""
	if scheme, rest, ok := strings.Cut(target, "://"); ok && !strings.HasPrefix(target, "/") {
		end := strings.IndexAny(rest, "/?#")
		if end < 0 {
			end = len(rest)
		}
		origin = scheme + "://" + rest[:end]
	}
	header := make(http.Header, len(p.config[origin]))
	repl := caddy.NewReplacer()
	for name, value := range p.config[origin] {
		value, err := repl.ReplaceOrErr(value, true, true)
		if err != nil {
			return nil, fmt.Errorf("header %s: %w", name, err)
		}
		header.Set(name, value)
	}
	return header, nil
}

// Undoes says that there is a way.
func (p *Plan) Undoes() bool {
	return p.ways.Restore != nil || p.compensate != nil || p.ways.Delegate != ""
}

// Words are the ways, in the order in which they are tried. A nil Plan is irreversible.
func (p *Plan) Words() []string {
	var words []string
	if p == nil {
		return []string{checkpoint.Irreversible.String()}
	}
	for _, way := range []struct {
		checkpoint.Way
		given bool
	}{
		{checkpoint.Restore, p.ways.Restore != nil},
		{checkpoint.Compensate, p.compensate != nil},
		{checkpoint.Delegate, p.ways.Delegate != ""},
	} {
		if way.given {
			words = append(words, way.String())
		}
	}
	if words == nil {
		words = []string{checkpoint.Irreversible.String()}
	}
	return words
}

// Terms are those that the plan was made with.
func (p *Plan) Terms() *Terms { return &p.terms }
