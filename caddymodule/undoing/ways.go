package undoing

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// Ways are the ways to undo calls. One is given, or none: then the calls cannot be
// undone, and their checkpoints say so. Only `restore` and `compensate` go together:
// what cannot be put back is then compensated.
type Ways struct {
	// Puts back what stood at the target of a PUT, PATCH or DELETE: the guard reads it
	// with GET before the call and after it.
	Restore *Restore `json:"restore,omitempty"`

	// Takes the effect back by another request.
	Compensate *Compensation `json:"compensate,omitempty"`

	// Asks the agent that was called to undo it: its rollback URI, as in
	// `https://agent.example.com/.well-known/cascade/rollback`. It is written out, so that
	// no caller chooses who is asked; plain http leads to the own machine only.
	Delegate string `json:"delegate,omitempty"`

	// Says that nothing undoes the calls: a rollback needs a person. Default: false,
	// which means the same where there is no way.
	Irreversible bool `json:"irreversible,omitempty"`
}

// Restore puts back what stood there.
type Restore struct {
	// Header fields of the guard's requests that read and put back: credentials, where
	// `undo_auth` is `config`. Values may have placeholders like `{env.TOKEN}`.
	Header map[string]string `json:"header,omitempty"`

	// As the option `on_changed` of the action, which it precedes.
	OnChanged string `json:"on_changed,omitempty"`

	// `off` leaves out the look at what was put back. Default: on.
	Verify string `json:"verify,omitempty"`
}

// Request is a request that is made of a recorded call and its answer.
type Request struct {
	// The method, in capital letters.
	Method string `json:"method,omitempty"`

	// A path and a query for the upstream of the call, or a whole URL. Placeholders like
	// `{response.json./id}` and `{request.path.2}` are filled, escaped by their place.
	URL string `json:"url,omitempty"`

	// Header fields. Credentials, and values with placeholders like `{env.TOKEN}`, are
	// those of the configuration when it is undone; other values may have the
	// placeholders of the URL, and are recorded with the call.
	Header map[string]string `json:"header,omitempty"`
}

// Compensation is a request that takes a call's effect back.
type Compensation struct {
	Request

	// A JSON object as the body, by its members.
	JSON map[string]string `json:"json,omitempty"`

	// A form as the body, by its fields.
	Form map[string]string `json:"form,omitempty"`

	// Any other body, and its media type.
	ContentType string `json:"content_type,omitempty"`
	Body        string `json:"body,omitempty"` // See ContentType.

	// Asks what became of the compensation where its answer was lost, or was 202.
	Status *Request `json:"status,omitempty"`
}

// Empty says that no way is given.
func (w *Ways) Empty() bool { return *w == Ways{} }

// OwnRequests says that the guard itself makes requests to the upstream, and which
// option asks for them.
func (w *Ways) OwnRequests() (option string, own bool) {
	switch c := w.Compensate; {
	case w.Restore != nil:
		return "restore", true
	case c != nil && (strings.HasPrefix(c.URL, "/") || c.Status != nil && strings.HasPrefix(c.Status.URL, "/")):
		return "compensate", true
	}
	return "", false
}

// check finds ways that do not go together.
func (w *Ways) check() error {
	var given []string
	for option, set := range map[string]bool{
		"restore": w.Restore != nil, "compensate": w.Compensate != nil, "delegate": w.Delegate != "", "irreversible": w.Irreversible,
	} {
		if set {
			given = append(given, option)
		}
	}
	slices.Sort(given)
	if len(given) > 1 && !slices.Equal(given, []string{"compensate", "restore"}) {
		return wrong(given[len(given)-1], "it goes not with %s; give one way to undo the calls, or restore and compensate", given[0])
	}
	return nil
}

// checkDelegate checks an agent's rollback URI.
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

// fields are header fields by whose they are.
type fields struct {
	// config are taken from the configuration of the day, recorded stand in templates.
	config   map[string]string
	recorded []template.Field
}

// part tells the fields of the configuration from those of a template: those that are
// credentials, or that have a placeholder of the process, never get on disk (P8).
func part(header map[string]string, credentials []string) (fields, error) {
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
		if !slices.Contains(credentials, canonical) && !ofProcess(value) {
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

// ofGuard are fields that are the guard's to write into an undo, and why.
var ofGuard = map[string]string{
	"Idempotency-Key": "every undo has one of its own, by which it runs once",
	headerToken:       "a token says who calls, and nobody but the guard can issue one for an undo",
	"Workflow-Id":     "every undo has that of its call's workflow",
	"Accept-Encoding": "bodies are compared, and so asked for without compression",
}

const headerToken = "Execution-Context"

// ofProcess reports a placeholder that is not of a call.
func ofProcess(value string) bool {
	for _, space := range []string{"{env.", "{file.", "{system."} {
		if strings.Contains(value, space) {
			return true
		}
	}
	return false
}

// plain gives an error of a template without the offset, which means nothing in a
// composed one.
func plain(err error) error {
	if parse := (*template.ParseError)(nil); errors.As(err, &parse) {
		return fmt.Errorf("%s: %s", parse.Field, parse.Problem)
	}
	return err
}

// spec makes the template of a request.
func (r *Request) spec(credentials []string) (template.Spec, map[string]string, error) {
	f, err := part(r.Header, credentials)
	return template.Spec{Method: r.Method, URL: r.URL, Header: f.recorded}, f.config, err
}

// spec makes the template of a compensation.
func (c *Compensation) spec(credentials []string) (template.Spec, map[string]string, error) {
	spec, config, err := c.Request.spec(credentials)
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

// onChanged is the choice that holds for a way.
func (w *Ways) onChanged(t *Terms) string {
	if w.Restore != nil && w.Restore.OnChanged != "" {
		return w.Restore.OnChanged
	}
	return t.OnChanged
}

const verifyOff = "off"

func (r *Restore) check() error {
	if r.OnChanged != "" {
		if err := oneOf(r.OnChanged, Choices()["on_changed"]); err != nil {
			return fmt.Errorf("on_changed: %w", err)
		}
	}
	if r.Verify != "" && r.Verify != verifyOff {
		return fmt.Errorf("verify: %q is unknown; use %s, or leave it out", r.Verify, verifyOff)
	}
	return nil
}
