// Package router is how the gateway answers at its own paths: the one table of routes, what
// writes an answer, and what reads a request. The endpoints are with their features, and the
// list of all in guard/api.
package router

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// WellKnown begins all paths but those of the older drafts.
const WellKnown = "/.well-known/cascade/"

// Route is a row of a table of the gateway's own paths (ADR 0063). The table of
// guard/api has those of sites; the admin API has another one, since its listener is another one.
type Route[T any] struct {
	// Path is compared segment by segment after percent-decoding. {name} matches any
	// segment that is not empty, {name...} at the end the rest of the path.
	Path string
	// Method is GET, which includes HEAD, or POST, or several with a comma and a space between them.
	Method string
	// To is the resource or the handler.
	To T
}

// Endpoint is what a feature answers with at a path of a site.
type Endpoint[Feature any] struct {
	// Serve answers. The error is a *problem.Problem that was not sent yet, or that of the request's context.
	Serve func(f Feature, a Responder) error
	// Fits reports whether a token that names its phase may be presented with a request for name; nil is never.
	Fits func(name, phase string, ext ect.Ext) bool
}

// PhaseIs fits the tokens of one phase.
func PhaseIs(only string) func(name, phase string, ext ect.Ext) bool {
	return func(_, phase string, _ ect.Ext) bool { return phase == only }
}

// Match returns the first route that matches a percent-encoded path, and its name, which is
// still encoded: a slash in a name is written as %2F. The route is nil if none matches.
func Match[T any](table []Route[T], path string) (to *Route[T], name string) {
	for i := range table {
		if name, ok := matchPath(table[i].Path, path); ok {
			return &table[i], name
		}
	}
	return nil, ""
}

func matchPath(pattern, path string) (name string, ok bool) {
	for {
		if strings.HasSuffix(pattern, "...}") && !strings.Contains(pattern, "/") {
			return path, true
		}
		want, next, more := strings.Cut(pattern, "/")
		segment, rest, longer := strings.Cut(path, "/")
		switch {
		case more != longer:
			return "", false
		case strings.HasPrefix(want, "{"):
			if name = segment; name == "" {
				return "", false
			}
		case want != segment:
			if plain, err := url.PathUnescape(segment); err != nil || plain != want {
				return "", false
			}
		}
		if !more {
			return name, true
		}
		pattern, path = next, rest
	}
}

// Allows reports whether the route accepts an HTTP method.
func (to *Route[T]) Allows(method string) bool {
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return slices.Contains(strings.Split(to.Method, ", "), method)
}

// Reader is who wants to read something.
type Reader struct {
	// Issuer is the issuer of a verified token; empty without one.
	Issuer string
	// Caller is the keyed hash of the caller's identity; zero without one.
	Caller [16]byte
	// Anonymous readers have no credential and may read nothing (P3).
	Anonymous bool
	// Credential readers have a credential that the gateway did not verify. They may read
	// the workflows and checkpoints of their own calls only (ADR 0024).
	Credential bool
	// Operator readers see all of every workflow.
	Operator bool
}

// Responder writes the answer to one request.
type Responder struct {
	W    http.ResponseWriter
	R    *http.Request
	Name string // the variable part of the path, still percent-encoded
}

// JSON answers with a document.
func (a *Responder) JSON(status int, doc any) error {
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	a.Write(status, "application/json", append(body, '\n'))
	return nil
}

// The media types of pictures.
const (
	mediaDOT = "text/vnd.graphviz"
	mediaSVG = "image/svg+xml"
)

// Form is the media type in which a document is shown to a request: JSON, a picture, or one of more.
func (a *Responder) Form(more ...string) string {
	a.W.Header().Set("Vary", "Accept")
	return Preferred(a.R, append([]string{"application/json", mediaDOT, mediaSVG}, more...)...)
}

// Show answers with a picture of a document, if the form is that of one, else with JSON.
func (a *Responder) Show(status int, form string, doc any, draw func() *drawing.Drawing) error {
	switch form {
	case mediaDOT:
		a.Write(status, mediaDOT+"; charset=utf-8", draw().DOT())
	case mediaSVG:
		// Opened by itself in a browser it is a document of the site's origin.
		a.W.Header().Set("Content-Security-Policy", "default-src 'none'; sandbox")
		a.Write(status, mediaSVG, draw().SVG())
	default:
		return a.JSON(status, doc)
	}
	return nil
}

// maxRanges bounds the members of Accept that are read.
const maxRanges = 64

// Preferred is the offered media type that a request accepts with the highest quality: of several
// the one that it names more exactly, then the first. It is the first one too if the request
// accepts none: an answer in another form is of more use than none (RFC 9110, 12.5.1).
func Preferred(r *http.Request, offered ...string) string {
	ranges := strings.SplitN(strings.Join(r.Header.Values("Accept"), ","), ",", maxRanges)
	best, quality, exact := offered[0], 0.0, 0
	for _, one := range offered {
		q, how := 0.0, 0
		major, _, _ := strings.Cut(one, "/")
		for _, text := range ranges {
			accepted, params, err := mime.ParseMediaType(text)
			specific := 1 + slices.Index([]string{"*/*", major + "/*", one}, accepted)
			if err != nil || specific <= how {
				continue
			}
			how, q = specific, 1
			if text, ok := params["q"]; ok {
				if q, err = strconv.ParseFloat(text, 64); err != nil || !(q >= 0 && q <= 1) {
					q = 0
				}
			}
		}
		if q > quality || q == quality && q > 0 && how > exact {
			best, quality, exact = one, q, how
		}
	}
	return best
}

// Write answers. Caches must not keep the answer, and other sites must not frame it (P3).
func (a *Responder) Write(status int, contentType string, body []byte) {
	h := a.W.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	Protect(h)
	a.W.WriteHeader(status)
	if a.R.Method != http.MethodHead {
		_, _ = a.W.Write(body) // the client may be gone
	}
}

// Respond answers with a body that is the same for all readers. cache is the value of
// Cache-Control; empty for none.
func Respond(w http.ResponseWriter, status int, contentType, cache string, body []byte) {
	w.Header().Set("Content-Type", contentType)
	if cache != "" {
		w.Header().Set("Cache-Control", cache)
	}
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}

// Protect keeps the answer to one caller out of caches and out of other sites' pages.
func Protect(h http.Header) {
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// Until returns a context that ends after d, with ctx or with exit.
func Until(ctx, exit context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(exit, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// UnknownPart is the one answer for what is unknown and what belongs to others (C-6.1-c,
// P3).
func UnknownPart() *problem.Problem {
	return problem.New(NotInWorkflow, "Nothing of it is known for the identity that asks.")
}

// Invalid refuses a request because of one of its parameters, or of its body.
func Invalid(detail string) error { return problem.New(ParameterInvalid, detail) }

// Refused refuses a token with a detail of its own.
func Refused(code ect.Code, detail string) *problem.Problem {
	p := problem.New(problem.ECTInvalid, detail)
	p.Status, p.Reason = (&ect.Error{Code: code}).Status(), string(code)
	return p
}

// ProblemOf maps an error to a problem: the errors of features by the first of their functions that knows it,
// which returns nil for others. otherwise is the problem for unknown errors.
func ProblemOf(err error, otherwise *problem.Problem, features ...func(error) *problem.Problem) *problem.Problem {
	var known *problem.Problem
	if errors.As(err, &known) {
		return known
	}
	var refusal *ect.Error
	if errors.As(err, &refusal) {
		p := problem.New(problem.ECTInvalid, refusal.Detail())
		p.Status, p.Reason, p.Cause = refusal.Status(), string(refusal.Code), refusal.Unwrap()
		return p
	}
	for _, feature := range features {
		if p := feature(err); p != nil {
			return p
		}
	}
	otherwise.Cause = err
	return otherwise
}

// UseAt returns what a token is used for at an endpoint: its phase, if it has several, and the body.
func UseAt(endpoint, phase string, body []byte) [sha256.Size]byte {
	of := ect.Sum(body)
	return sha256.Sum256([]byte("agent_guard " + endpoint + "\x00" + phase + "\x00" + of.String()))
}

// ParseID parses the id of a rollback: a UUID, with or without urn:uuid:.
func ParseID(text string) (string, error) {
	const prefix = "urn:uuid:"
	if plain, err := url.PathUnescape(text); err == nil {
		text = plain
	}
	if len(text) > len(prefix) && strings.EqualFold(text[:len(prefix)], prefix) {
		text = text[len(prefix):]
	}
	id, err := uuid.Parse(text)
	if err != nil || len(text) != len(uuid.Nil.String()) || id == uuid.Nil || id == uuid.Max {
		return "", Invalid("A rollback's id is urn:uuid: and a UUID.")
	}
	return id.String(), nil
}

// ReadObject parses one JSON object without duplicate members: two readers could read
// different requests from it. A null counts as an absent member.
func ReadObject(body []byte) (map[string]json.RawMessage, error) {
	var text json.RawMessage
	d := json.NewDecoder(bytes.NewReader(body))
	err := d.Decode(&text)
	object, ok := jsonx.ObjectOf(text)
	switch {
	case !utf8.Valid(body):
		return nil, Invalid("The body is not UTF-8.")
	case err != nil || !ok:
		return nil, Invalid("The body is no JSON object.")
	case !object.Distinct(strings.Clone):
		return nil, Invalid("A member of the body stands twice.")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, Invalid("Something stands behind the body's JSON object.")
	}
	members := map[string]json.RawMessage{}
	for _, m := range object {
		if string(m.Value) != "null" {
			members[m.Name] = m.Value
		}
	}
	return members, nil
}

const (
	// maxQuery is the longest query string, in bytes.
	maxQuery = 4 << 10
	// LongestQuestion is the longest time that a request waits for an entry or a
	// checkpoint.
	LongestQuestion = 60 * time.Second
)

// Params are the query parameters of a request.
type Params struct{ url.Values }

// ParseParams parses a query in which each of the names may occur once. Other parameters
// are ignored.
func ParseParams(u *url.URL, names ...string) (Params, error) {
	if len(u.RawQuery) > maxQuery {
		return Params{}, Invalid("The query is longer than 4096 bytes.")
	}
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Params{}, Invalid("The query is not percent-encoded correctly.")
	}
	for _, name := range names {
		if len(values[name]) > 1 {
			return Params{}, Invalid(name + " stands more than once.")
		}
	}
	return Params{values}, nil
}

// Number reads a parameter that is a size or an index, and reports whether it is present.
func (p Params) Number(name string) (n int64, there bool, err error) {
	if !p.Has(name) {
		return 0, false, nil
	}
	n, ok := ParseNumber(p.Get(name))
	if !ok {
		return 0, true, Invalid(name + " is not a whole number from 0 on, without a sign or leading zeros.")
	}
	return n, true, nil
}

// Required reads a number that must be present.
func (p Params) Required(name string) (int64, error) {
	n, there, err := p.Number(name)
	if err == nil && !there {
		err = Invalid(name + " is missing.")
	}
	return n, err
}

// ParseNumber parses a decimal number of at most 18 digits without leading zeros or sign.
func ParseNumber(text string) (int64, bool) {
	if len(text) == 0 || len(text) > 18 || len(text) > 1 && text[0] == '0' {
		return 0, false
	}
	if strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// Wait reads how long a request waits: a duration, or a number of seconds. Longer times are cut to LongestQuestion.
func (p Params) Wait() (time.Duration, error) {
	text := p.Get("wait")
	if !p.Has("wait") {
		return 0, nil
	}
	wait, err := time.ParseDuration(text)
	if seconds, notSeconds := strconv.ParseUint(text, 10, 64); notSeconds == nil {
		wait, err = time.Duration(min(seconds, uint64(LongestQuestion/time.Second)))*time.Second, nil
	}
	if err != nil || wait < 0 {
		return 0, Invalid("wait is neither a duration, like 30s, nor a number of seconds.")
	}
	return min(wait, LongestQuestion), nil
}

// Name reads a parameter that is an id, and reports whether it is present.
func (p Params) Name(param string) (id string, there bool, err error) {
	if !p.Has(param) {
		return "", false, nil
	}
	id, err = parseName(p.Get(param), param)
	return id, true, err
}

// Segment decodes an id from the last segment of a path.
func Segment(escaped, what string) (string, error) {
	name, err := url.PathUnescape(escaped)
	if err != nil {
		return "", Invalid("The " + what + " is not percent-encoded correctly.")
	}
	return parseName(name, what)
}

// parseName checks the id of a token or a workflow, and converts UUIDs to lower case.
func parseName(id, what string) (string, error) {
	if id == "" || len(id) > ledger.MaxName || !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl) {
		return "", Invalid(what + " is not an id: 1 to 256 bytes without control characters.")
	}
	return ledger.Canonical(id), nil
}

// The kinds of problems that several features answer with.
var (
	NotInWorkflow = problem.Kind{
		Slug: "not-in-workflow", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "The identity that asks has no part in this",
		Meaning:  "The checkpoint or the rollback is not known, or belongs to a workflow in which the identity that asks has no part, or not the part that is needed: by default only who made the call, or what led to it, may have it undone. These are not told apart. Nothing was touched.",
		Caller:   "Ask with a token of the workflow whose issuer is the checkpoint's ancestor: its own token led to the call, or to one before it.",
		Operator: "`lineage workflow` in the `rollback` block lets everybody who is linked to the checkpoint ask, `coordinators` names who may ask for all. An operator can roll back with `caddy agent-guard rollback`.",
	}
	ParameterInvalid = problem.Kind{
		Slug: "parameter-invalid", Status: http.StatusBadRequest,
		Title:   "The question is malformed",
		Meaning: "A parameter of a request to one of the gateway's own paths cannot be read. This says nothing about any execution.",
		Caller:  "Correct what the detail names.",
	}
	Unauthenticated = problem.Kind{
		Slug: "authentication-required", Status: http.StatusUnauthorized,
		Title:    "Only who took part may ask about it",
		Meaning:  "The request has no credential. What became of an execution is told to the identity that made the call, and what a workflow's tokens say to those who took part in it; never to callers without any.",
		Caller:   "Ask with the credential that the call was made with.",
		Operator: "Who the caller is comes from a client certificate, Caddy's authentication, `caller` or a field that is a credential (docs/same-call.md). Cookies count only where `caller cookie` names them. Calls without any of them can be looked up by an operator only.",
	}
)
