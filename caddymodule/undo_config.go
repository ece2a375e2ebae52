package caddymodule

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// undoCompiler compiles the ways to undo the calls of one action.
type undoCompiler struct {
	plan     *guard.UndoPlan
	recorded bool // the call's own credentials are kept for its undo
	// secret reports whether a header field is a credential of callers, which templates cannot read.
	secret func(field string) bool
}

// compileUndo checks the ways and terms of an action, and parses its templates. Terms are
// complete; name is the guard's; fields say which header fields are credentials of its
// callers. The error is an *invalid.
func compileUndo(w *Ways, t *guard.Terms, name string, fields *body.Fields) (*guard.UndoPlan, error) {
	if err := w.check(); err != nil {
		return nil, err
	}
	p := &guard.UndoPlan{
		Spec:    rollback.Spec{Guard: name, OnLost: t.OnLost, Auth: t.UndoAuth, Fields: map[string]map[string]string{}},
		Restore: w.Restore != nil, OnChanged: w.onChanged(t), Verify: w.Restore != nil && w.Restore.Verify != verifyOff, Delegate: w.Delegate, Agent: w.DelegateTo,
	}
	p.Header = func() (http.Header, error) { return fieldsOf(p.Spec.Fields, "") }
	ordinary := body.NewFields()
	c := undoCompiler{p, t.UndoAuth == rollback.AuthRecorded, func(field string) bool { // in every configuration, and in this one
		return field == "Cookie" || ordinary.Class(field) == body.Credential ||
			fields != nil && fields.Class(field) == body.Credential
	}}
	if w.Delegate != "" {
		if err := checkDelegate(w.Delegate); err != nil {
			return nil, invalidOption("delegate", "%w", err)
		}
		if err := w.checkSigned(); err != nil {
			return nil, err
		}
		if c.recorded {
			return nil, invalidOption("undo_auth", "recorded: the call's credentials go to its own upstream, and delegate asks another; set undo_auth config for the action")
		}
	}
	if w.Restore != nil {
		if err := c.restore(w.Restore); err != nil {
			return nil, invalidOption("restore", "%w", err)
		}
	}
	if w.Compensate == nil {
		return p, nil
	}
	err := c.compensation(w.Compensate)
	if err == nil {
		named := p.Spec
		named.Guard = cmp.Or(name, "default") // a Caddyfile may leave it out
		p.Needs, err = named.Needs()
	}
	if err != nil {
		return nil, invalidOption("compensate", "%w", err)
	}
	return p, nil
}

func (c *undoCompiler) restore(r *Restore) error {
	if err := checkOptions(restoreOptions(), r); err != nil {
		return err
	}
	// All of them come from the configuration: a restore has no template.
	f, err := part(r.Header, func(string) bool { return true })
	if err != nil {
		return err
	}
	return c.add("", f.config)
}

func (c *undoCompiler) compensation(of *Compensation) error {
	spec, config, err := of.spec(c.secret)
	if err != nil {
		return err
	}
	if c.plan.Compensate, err = c.parse(spec, config); err != nil {
		return err
	}
	c.plan.Spec.Compensate = &spec
	if spec.Method == http.MethodGet || spec.Method == http.MethodHead {
		return fmt.Errorf("method: %s changes nothing that could be undone; write a method like POST or DELETE", spec.Method)
	}
	if of.Status == nil {
		return nil
	}
	asks, config, err := of.Status.spec(c.secret)
	if err == nil {
		c.plan.Status, err = c.parse(asks, config)
	}
	if err == nil && asks.Method != http.MethodGet {
		err = fmt.Errorf("method: a status is asked for with GET, and not with %s", asks.Method)
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	c.plan.Spec.Status = &asks
	return nil
}

// parse parses a template, and adds the fields of the configuration that go with it.
func (c *undoCompiler) parse(spec template.Spec, config map[string]string) (*template.Template, error) {
	t, err := template.Parse(spec)
	if err != nil {
		return nil, plain(err)
	}
	n := t.Needs()
	for _, name := range n.RequestHeader {
		if name == headerToken {
			return nil, fmt.Errorf("{request.header.%s} is the caller's token, which no template hands on; send a header of your own", name)
		}
		if c.secret(name) {
			return nil, fmt.Errorf("{request.header.%s} is a credential of the caller's, which no template hands on; set undo_auth recorded, or a header of your own", name)
		}
	}
	if c.recorded && t.Origin() != "" {
		return nil, errors.New("url: with undo_auth recorded a call's credentials go to its own upstream only; begin with /, or set undo_auth config")
	}
	return t, c.add(t.Origin(), config)
}

// add adds fields of the configuration for an origin.
func (c *undoCompiler) add(origin string, config map[string]string) error {
	fields := c.plan.Spec.Fields
	for name, value := range config {
		if err := checkPlaceholders(value); err != nil {
			return fmt.Errorf("header %s: %w", name, err)
		}
		if c.recorded && c.secret(name) {
			return fmt.Errorf("header %s: with undo_auth recorded the call's own credentials are sent; leave the field away, or set undo_auth config", name)
		}
		if fields[origin] == nil {
			fields[origin] = map[string]string{}
		}
		if before, ok := fields[origin][name]; ok && before != value {
			return fmt.Errorf("header %s: it has two values for one server; give it the same wherever it stands", name)
		}
		fields[origin][name] = value
	}
	return nil
}

// checkPlaceholders refuses placeholders that do not exist.
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

// exposed lists the servers, by scheme and host, that get fields of the configuration
// without TLS and are not on this machine. It is no error: a mesh may encrypt the
// connection.
func exposed(p *guard.UndoPlan) []string {
	var all []string
	for origin := range p.Spec.Fields {
		if u, err := url.Parse(origin); err == nil && u.Scheme == "http" && !loopback(u.Hostname()) {
			all = append(all, origin)
		}
	}
	slices.Sort(all)
	return all
}

// unset returns the error of fieldsOf for a field of the configuration that has no value now.
// That is no error of the configuration: the value may be there when something is undone.
func unset(p *guard.UndoPlan) error {
	var all []error
	for _, origin := range slices.Sorted(maps.Keys(p.Spec.Fields)) {
		if _, err := fieldsOf(p.Spec.Fields, origin+"/"); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// fieldsOf returns the fields of the configuration for an undo request to a URL: the
// credentials for its server only. A placeholder without a value is an error: without its
// credential, a server may answer as if the resource did not exist.
func fieldsOf(config map[string]map[string]string, target string) (http.Header, error) {
	fields := config[originOfURL(target)]
	header := make(http.Header, len(fields))
	repl := caddy.NewReplacer()
	for name, value := range fields {
		value, err := repl.ReplaceOrErr(value, true, true)
		if err != nil {
			return nil, fmt.Errorf("header %s: %w", name, err)
		}
		header.Set(name, value)
	}
	return header, nil
}

// originOfURL returns the server of a URL; empty for a path, which is for the call's upstream.
func originOfURL(target string) string {
	scheme, rest, ok := strings.Cut(target, "://")
	if !ok || strings.HasPrefix(target, "/") {
		return ""
	}
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		rest = rest[:end]
	}
	return scheme + "://" + rest
}

// wordsOf are the ways of a plan, in the order in which they are tried. Without one the calls are irreversible.
func wordsOf(p *guard.UndoPlan) (words []string) {
	if p == nil {
		return []string{checkpoint.Irreversible.String()}
	}
	if p.Restore {
		words = append(words, checkpoint.Restore.String())
	}
	if p.Compensate != nil {
		words = append(words, checkpoint.Compensate.String())
	}
	if p.Delegate != "" {
		words = append(words, checkpoint.Delegate.String())
	}
	return words
}

// Ways are the ways to undo calls. Set one, or none: then the calls cannot be undone, and their
// checkpoints say so. Only `restore` and `compensate` can be combined: if the state cannot be put
// back, the call is compensated.
type Ways struct {
	// Puts back the state of the target before a PUT, PATCH or DELETE. The guard reads it with GET
	// before the call and after it.
	Restore *Restore `json:"restore,omitempty"`

	// Takes the effect back with another request.
	Compensate *Compensation `json:"compensate,omitempty"`

	// Asks the agent that was called to undo it: its rollback URI, like
	// `https://agent.example.com/.well-known/cascade/rollback`. It contains no placeholders, so
	// that no caller can choose who is asked; plain http is accepted only for the same machine.
	Delegate string `json:"delegate,omitempty"`

	// The identity of the agent behind `delegate`, if it is another such gateway, or takes part in
	// the two phases of a rollback in the same way: it is then asked to prepare and to execute the
	// rollback of the checkpoint that its answer to the call has named, and its answers count only
	// if it has signed them. Needs `trust` with its keys. `delegate` needs this or
	// `delegate_unsigned`.
	DelegateTo string `json:"delegate_to,omitempty"`

	// The agent behind `delegate` is asked to undo the call by the checkpoint of this gateway, and
	// what it answers counts without a signature. Not with `delegate_to`. Default: false.
	DelegateUnsigned bool `json:"delegate_unsigned,omitempty"`

	// Declares that nothing undoes the calls: a rollback needs a person. Default: false, which
	// means the same if no way is set.
	Irreversible bool `json:"irreversible,omitempty"`
}

// Restore puts back the state before the call.
type Restore struct {
	// Header fields of the guard's requests that read and put back the state, such as credentials
	// where `undo_auth` is `config`. Values may have placeholders like `{env.TOKEN}`.
	Header map[string]string `json:"header,omitempty"`

	// Like the option `on_changed` of the action, which it overrides.
	OnChanged string `json:"on_changed,omitempty"`

	// `off` skips the read after the state was put back. Default: on.
	Verify string `json:"verify,omitempty"`
}

// Request is built from a recorded call and its answer.
type Request struct {
	// The method, in capital letters.
	Method string `json:"method,omitempty"`

	// A path and query for the upstream of the call, or a whole URL. Placeholders like
	// `{response.json./id}` and `{request.path.2}` are filled, and escaped for their place.
	URL string `json:"url,omitempty"`

	// Header fields. Credentials, and values with placeholders like `{env.TOKEN}`, are those of the
	// configuration at the time of the undo; other values may have the placeholders of the URL, and
	// are recorded with the call.
	Header map[string]string `json:"header,omitempty"`
}

// Compensation is a request that takes the effect of a call back.
type Compensation struct {
	Request

	// A JSON object as the body, by its members.
	JSON map[string]string `json:"json,omitempty"`

	// A form as the body, by its fields.
	Form map[string]string `json:"form,omitempty"`

	// The media type of `body`.
	ContentType string `json:"content_type,omitempty"`

	// Any other body, as text with placeholders.
	Body string `json:"body,omitempty"`

	// Asks for the outcome of the compensation if its answer was lost, or was 202.
	Status *Request `json:"status,omitempty"`
}

// ownRequests reports whether the guard itself makes requests to the upstream, and the
// option that needs them.
func (w *Ways) ownRequests() (option string, own bool) {
	switch c := w.Compensate; {
	case w.Restore != nil:
		return "restore", true
	case c != nil && (strings.HasPrefix(c.URL, "/") || c.Status != nil && strings.HasPrefix(c.Status.URL, "/")):
		return "compensate", true
	}
	return "", false
}

// check refuses ways that cannot be combined.
func (w *Ways) check() error {
	var given []string
	for option, set := range map[string]bool{
		"restore": w.Restore != nil, "compensate": w.Compensate != nil, "delegate": w.Delegate != "", "irreversible": w.Irreversible,
	} {
		if set {
			given = append(given, option)
		}
	}
	if w.Delegate == "" && (w.DelegateTo != "" || w.DelegateUnsigned) {
		return invalidOption("delegate", "its URI is missing; say where the agent is asked")
	}
	slices.Sort(given)
	if len(given) > 1 && !slices.Equal(given, []string{"compensate", "restore"}) {
		return invalidOption(given[len(given)-1], "it goes not with %s; give one way to undo the calls, or restore and compensate", given[0])
	}
	return nil
}

// checkSigned holds that the configuration says whose answers count: P6, those of nobody would be
// of unknown effect, all of them.
func (w *Ways) checkSigned() error {
	switch {
	case w.DelegateTo == "" && !w.DelegateUnsigned:
		return invalidOption("delegate", "nothing says whose answers count; write the identity of the agent that signs them behind the URI, or `unsigned` if they count without a signature")
	case w.DelegateTo != "" && w.DelegateUnsigned:
		return invalidOption("delegate", "it has an identity and `unsigned`, and its answers count either with that signature or without one; leave one of them away")
	case w.DelegateTo == "":
		return nil
	}
	if err := checkIdentity(w.DelegateTo); err != nil {
		return invalidOption("delegate", "%w", err)
	}
	return nil
}

func checkDelegate(text string) error {
	u, err := url.Parse(text)
	const right = "use one like https://agent.example.com/.well-known/cascade/rollback"
	switch {
	case strings.ContainsAny(text, "{}"):
		return errors.New("it holds a placeholder, and nobody but the configuration may choose who is asked; write the host out")
	case err != nil || u.Host == "" || u.Opaque != "" || u.Scheme != "https" && u.Scheme != "http":
		return fmt.Errorf("%q is no absolute URI; %s", text, right)
	case u.User != nil:
		return errors.New("it holds a user or a password, which would stand in checkpoints; leave them away")
	case u.Fragment != "" || strings.Contains(text, "#"):
		return fmt.Errorf("it has a fragment, which is never sent; %s", right)
	case u.Hostname() == "" || strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }):
		return fmt.Errorf("%q is no absolute URI; %s", text, right)
	case len(text) > maxDelegate:
		return fmt.Errorf("it is longer than %d bytes", maxDelegate)
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return fmt.Errorf("%q would be asked without TLS; use https, which only the own machine can do without", text)
	}
	return nil
}

const maxDelegate = 2 << 10

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// fields are header fields by their source.
type fields struct {
	// config are read from the configuration at the time of the undo, recorded are in
	// templates.
	config   map[string]string
	recorded []template.Field
}

// part separates fields: credentials, and those with a placeholder of the process, stay in
// the configuration and are never stored (P8); the others belong to the template.
func part(header map[string]string, secret func(field string) bool) (fields, error) {
	var f fields
	seen := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(header)) {
		value := header[name]
		canonical := http.CanonicalHeaderKey(name)
		switch {
		case !httpguts.ValidHeaderFieldName(name):
			return f, fmt.Errorf("header %s: it is no name of a header field", name)
		case seen[canonical] != "":
			return f, fmt.Errorf("header %s: it is the same field as %s; write it once", name, seen[canonical])
		case ofGuard[canonical] != "":
			return f, fmt.Errorf("header %s: %s; leave it away", name, ofGuard[canonical])
		case value == "":
			return f, fmt.Errorf("header %s: its value is empty; write one, or leave it away", name)
		}
		seen[canonical] = name
		if !secret(canonical) && !ofProcess(value) {
			f.recorded = append(f.recorded, template.Field{Name: canonical, Value: value})
			continue
		}
		if _, err := template.Parse(template.Spec{Method: http.MethodGet, URL: "/", Header: []template.Field{{Name: name, Value: "x"}}}); err != nil {
			return f, plain(err)
		}
		if strings.Contains(value, "{request.") || strings.Contains(value, "{response.") {
			return f, fmt.Errorf("header %s: a credential of the configuration holds nothing of a call; write it out, or as {env.NAME}", name)
		}
		if f.config == nil {
			f.config = map[string]string{}
		}
		f.config[canonical] = value
	}
	return f, nil
}

// ofGuard are header fields that only the guard sets in an undo, with the reason.
var ofGuard = map[string]string{
	"Idempotency-Key":    "every undo has one of its own, by which it runs once",
	headerToken:          "a token says who calls, and nobody but the guard can issue one for an undo",
	"Workflow-Id":        "every undo has that of its call's workflow",
	"Execution-Rollback": "every undo has the id of its rollback",
	"Accept-Encoding":    "bodies are compared, and so asked for without compression",
}

const headerToken = "Execution-Context"

// ofProcess reports whether value has a placeholder that is not of a call.
func ofProcess(value string) bool {
	for _, space := range []string{"{env.", "{file.", "{system."} {
		if strings.Contains(value, space) {
			return true
		}
	}
	return false
}

// plain removes the offset from an error of a composed template, where it means nothing.
func plain(err error) error {
	if parse := (*template.ParseError)(nil); errors.As(err, &parse) {
		return fmt.Errorf("%s: %s", parse.Field, parse.Problem)
	}
	return err
}

// spec returns the template of a request, and its fields of the configuration.
func (r *Request) spec(secret func(field string) bool) (template.Spec, map[string]string, error) {
	f, err := part(r.Header, secret)
	return template.Spec{Method: r.Method, URL: r.URL, Header: f.recorded}, f.config, err
}

// spec returns the template of a compensation, and its fields of the configuration.
func (c *Compensation) spec(secret func(field string) bool) (template.Spec, map[string]string, error) {
	spec, config, err := c.Request.spec(secret)
	if err != nil {
		return spec, nil, err
	}
	bodies := 0
	for _, given := range []bool{len(c.JSON) > 0, len(c.Form) > 0, c.Body != "" || c.ContentType != ""} {
		if given {
			bodies++
		}
	}
	switch {
	case bodies > 1:
		return spec, nil, errors.New("it has several bodies; give one of json, form and body")
	case len(c.JSON) > 0:
		spec.ContentType = "application/json"
		spec.Body, err = template.JSONObject(sorted(c.JSON))
	case len(c.Form) > 0:
		spec.ContentType = "application/x-www-form-urlencoded"
		spec.Body, err = template.Form(sorted(c.Form))
	default:
		spec.ContentType, spec.Body = c.ContentType, c.Body
	}
	return spec, config, plain(err)
}

func sorted(m map[string]string) []template.Field {
	var list []template.Field
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, template.Field{Name: name, Value: m[name]})
	}
	return list
}

// onChanged returns the effective value of on_changed.
func (w *Ways) onChanged(t *guard.Terms) string {
	if w.Restore != nil && w.Restore.OnChanged != "" {
		return w.Restore.OnChanged
	}
	return t.OnChanged
}

const verifyOff = "off"
