package template

import (
	"bytes"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Source is what was recorded of a call. Only the parts in [Template.Needs] are required.
// The zero value of a field means absent.
type Source struct {
	// Path is the request's path as sent: percent-encoded, with its leading slash.
	Path string
	// Query is the request's query as sent, without the question mark.
	Query string
	// Request is the call's request.
	Request Message
	// Status is the status of the answer; 0 if there was none, and Response is ignored.
	Status int
	// Response is the answer.
	Response Message

	// The ids of the call and of its rollback.
	ExecutionID, WorkflowID, RollbackID, CheckpointID string
}

// Message is the content of a request or a response. Fill does not change it.
type Message struct {
	Header http.Header // names in canonical form
	// ContentType is the media type of Body. If it is empty, the body may be JSON.
	ContentType string
	// Body is decoded: compressed bodies cannot be read.
	Body []byte
}

// reader reads the values of placeholders and checks each body at most once.
type reader struct {
	src               *Source
	request, response document
}

type document struct {
	read, valid bool
}

// value reads the value of n. The error is one of this package.
func (r *reader) value(n *name) (value, error) {
	switch n.what {
	case responseStatus, responseHeader, responseBody:
		if r.src.Status == 0 {
			return value{}, errAbsent
		}
	}
	switch n.what {
	case requestPath:
		return given(r.src.Path)
	case requestSegment:
		return segment(r.src.Path, n.segment)
	case requestQuery:
		values, err := url.ParseQuery(r.src.Query)
		if err != nil {
			return value{}, errMalformed
		}
		return single(values[n.arg])
	case requestHeader:
		return single(r.src.Request.Header[n.arg])
	case requestBody:
		return r.request.value(&r.src.Request, n.pointer)
	case responseStatus:
		return value{text: strconv.Itoa(r.src.Status)}, nil
	case responseHeader:
		return single(r.src.Response.Header[n.arg])
	case responseBody:
		return r.response.value(&r.src.Response, n.pointer)
	case executionID:
		return given(r.src.ExecutionID)
	case workflowID:
		return given(r.src.WorkflowID)
	case rollbackID:
		return given(r.src.RollbackID)
	default:
		return given(r.src.CheckpointID)
	}
}

// given returns a value that is absent if it is empty.
func given(s string) (value, error) {
	if s == "" {
		return value{}, errAbsent
	}
	return value{text: s, quoted: true}, nil
}

// single returns a value that may have occurred more than once.
func single(values []string) (value, error) {
	switch len(values) {
	case 0:
		return value{}, errAbsent
	case 1:
		return value{text: values[0], quoted: true}, nil
	}
	return value{}, errAmbiguous
}

func segment(path string, i int) (value, error) {
	rest, ok := strings.CutPrefix(path, "/")
	if !ok {
		return value{}, errAbsent
	}
	segments := strings.Split(rest, "/")
	if i >= len(segments) {
		return value{}, errAbsent
	}
	plain, err := url.PathUnescape(segments[i])
	if err != nil {
		return value{}, errMalformed
	}
	return value{text: plain, quoted: true}, nil
}

func (d *document) value(m *Message, pointer jsonx.Pointer) (value, error) {
	if len(m.Body) == 0 {
		return value{}, errAbsent
	}
	if !d.read {
		media, _, err := mime.ParseMediaType(m.ContentType)
		typed := m.ContentType == "" || err == nil && body.IsJSON(media)
		d.read, d.valid = true, typed && jsonx.Valid(m.Body)
	}
	if !d.valid {
		return value{}, errNotJSON
	}
	found, err := pointer.In(m.Body)
	switch {
	case err != nil:
		return value{}, errAmbiguous
	case found == nil || found[0] == 'n':
		return value{}, errAbsent
	case found[0] == '{' || found[0] == '[':
		return value{}, errNotScalar
	case found[0] == '"':
		return value{text: jsonx.Unquote(found), quoted: true}, nil
	}
	return value{text: string(found)}, nil
}

// place is the context of a placeholder, which decides the escaping.
type place uint8

const (
	pathSegment place = iota
	pairValue         // of a query or a form
	headerValue
	jsonText  // between quotes
	jsonValue // outside of quotes
)

var placeWords = [...]string{
	pathSegment: "a path segment", pairValue: "a value of a query or form", headerValue: "a header value",
	jsonText: "text in JSON", jsonValue: "a JSON value",
}

func (p place) String() string { return placeWords[p] }

// sample is the value that Parse uses to check the template.
func (p place) sample() string {
	if p == jsonValue {
		// Unlike a digit, null cannot extend an adjacent number: it is invalid there.
		return "null"
	}
	return "x"
}

// appendValue appends v, escaped for the place. The error is errEmpty or errUnfit.
func (p place) appendValue(dst []byte, v value) ([]byte, error) {
	switch p {
	case pathSegment:
		if v.text == "" {
			return nil, errEmpty
		}
		if v.text == "." || v.text == ".." || strings.ContainsFunc(v.text, ambiguousInPath) {
			return nil, errUnfit
		}
		return append(dst, escaped(v.text)...), nil
	case pairValue:
		return append(dst, escaped(v.text)...), nil
	case headerValue:
		if v.text == "" {
			return nil, errEmpty
		}
		if strings.Trim(v.text, " \t") != v.text || strings.ContainsFunc(v.text, isControl) {
			return nil, errUnfit
		}
		return append(dst, v.text...), nil
	}
	if !utf8.ValidString(v.text) {
		return nil, errUnfit
	}
	if p == jsonValue && !v.quoted {
		return append(dst, v.text...), nil
	}
	quoted := quote(v.text)
	if p == jsonText {
		quoted = quoted[1 : len(quoted)-1]
	}
	return append(dst, quoted...), nil
}

// ambiguousInPath reports characters that some servers interpret even if they are encoded.
func ambiguousInPath(r rune) bool { return r == '/' || r == '\\' || r < ' ' || r == 0x7f }

// isControl does not include the tab, which field values may have (RFC 9110, section 5.5).
func isControl(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

// escaped percent-encodes all characters but the unreserved ones of RFC 3986.
func escaped(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }

// quote encodes s, which is valid UTF-8, as a JSON string.
func quote(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string into memory: no error is possible
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// JSONObject makes a [Spec.Body]: a JSON object with a member for each field, in their
// order. A value that is exactly one placeholder becomes a JSON value, so that numbers stay
// numbers; any other value becomes a string. Literal braces in values are doubled. Names
// cannot have placeholders. The error is a *ParseError; [Parse] reports duplicate names.
func JSONObject(fields []Field) (body string, err error) {
	return compose(fields, "json ", "{{", ",", "}}", func(name string, value []piece) string {
		member := string(quote(name)) + ":"
		if len(value) == 1 && value[0].name != nil {
			return member + "{" + value[0].name.text + "}"
		}
		return member + `"` + rewrite(value, func(text string) string {
			quoted := quote(text)
			return doubleBraces.Replace(string(quoted[1 : len(quoted)-1]))
		}) + `"`
	})
}

// Form makes a [Spec.Body]: a form with a pair for each field, in their order. Names and
// text are percent-encoded; literal braces in values are doubled. Names cannot have
// placeholders. The error is a *ParseError.
func Form(fields []Field) (body string, err error) {
	return compose(fields, "form ", "", "&", "", func(name string, value []piece) string {
		return escaped(name) + "=" + rewrite(value, escaped)
	})
}

var doubleBraces = strings.NewReplacer("{", "{{", "}", "}}")

func compose(fields []Field, place, open, between, end string, write func(name string, value []piece) string) (string, error) {
	var b strings.Builder
	b.WriteString(open)
	for i, f := range fields {
		if strings.ContainsAny(f.Name, "{}") {
			return "", bad(0, "a name can hold no placeholder; write it out, without braces").in(place + f.Name)
		}
		if !utf8.ValidString(f.Name) || !utf8.ValidString(f.Value) {
			return "", bad(0, "name and value must be valid UTF-8").in(place + f.Name)
		}
		value, err := scan(f.Value)
		if err != nil {
			return "", err.in(place + f.Name)
		}
		if i > 0 {
			b.WriteString(between)
		}
		b.WriteString(write(f.Name, value))
	}
	b.WriteString(end)
	return b.String(), nil
}

// rewrite escapes the text between placeholders.
func rewrite(pieces []piece, escape func(string) string) string {
	var b strings.Builder
	for _, p := range pieces {
		if p.name != nil {
			b.WriteString("{" + p.name.text + "}")
		} else {
			b.WriteString(escape(p.text))
		}
	}
	return b.String()
}

// Needs lists what a template reads, so that nothing else has to be recorded. Lists are
// sorted, without duplicates.
type Needs struct {
	// Path says that the request's path is read.
	Path bool
	// Query are names of parameters in the request's query, decoded.
	Query []string
	// RequestHeader and ResponseHeader are names of header fields, in canonical form.
	RequestHeader, ResponseHeader []string
	// RequestBody and ResponseBody are JSON pointers (RFC 6901).
	RequestBody, ResponseBody []string
	// Status says that the status of the response is read.
	Status bool
}

// Response reports whether the response is read: the template can be filled only after the
// call, and never if its answer was lost.
func (n Needs) Response() bool {
	return n.Status || len(n.ResponseHeader) > 0 || len(n.ResponseBody) > 0
}

// Needs returns what the template reads, together with others. Each may be nil.
func (t *Template) Needs(others ...*Template) Needs {
	var n Needs
	for _, t := range append(others, t) {
		if t == nil {
			continue
		}
		n.add(t.url)
		for _, f := range t.header {
			n.add(f.value)
		}
		n.add(t.body)
	}
	for _, list := range []*[]string{&n.Query, &n.RequestHeader, &n.ResponseHeader, &n.RequestBody, &n.ResponseBody} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return n
}

func (n *Needs) add(pieces []piece) {
	for _, p := range pieces {
		if p.name == nil {
			continue
		}
		switch arg := p.name.arg; p.name.what {
		case requestPath, requestSegment:
			n.Path = true
		case requestQuery:
			n.Query = append(n.Query, arg)
		case requestHeader:
			n.RequestHeader = append(n.RequestHeader, arg)
		case requestBody:
			n.RequestBody = append(n.RequestBody, arg)
		case responseStatus:
			n.Status = true
		case responseHeader:
			n.ResponseHeader = append(n.ResponseHeader, arg)
		case responseBody:
			n.ResponseBody = append(n.ResponseBody, arg)
		}
	}
}

// Request is a compensating request.
type Request struct {
	Method string
	// URL is a path and query for the upstream of the call, or begins with
	// [Template.Origin]. It is escaped for sending.
	URL string
	// Header has one value per name, Content-Type included. It is never nil.
	Header http.Header
	// Body is nil for a request without a body.
	Body []byte
}

// Fill makes the request. The error is a *fillError.
func (t *Template) Fill(src *Source) (Request, error) {
	f := filler{values: reader{src: src}, room: maxRequest}
	req := Request{Method: t.method, Header: make(http.Header, len(t.header)+1)}
	f.spend(len(t.origin))
	req.URL = t.origin + string(f.fill(t.url))
	for _, field := range t.header {
		f.spend(len(field.name))
		req.Header[field.name] = []string{string(f.fill(field.value))}
	}
	if t.body != nil {
		f.spend(len(t.contentType))
		req.Header["Content-Type"] = []string{t.contentType}
		req.Body = f.fill(t.body)
	}
	if f.err != nil {
		return Request{}, f.err
	}
	return req, nil
}

// filler appends pieces until an error occurs.
type filler struct {
	values reader
	room   int    // bytes by which the request may still grow
	last   *piece // the placeholder filled last
	err    error
}

func (f *filler) fill(pieces []piece) (dst []byte) {
	for i := 0; i < len(pieces) && f.err == nil; i++ {
		was := len(dst)
		if p := &pieces[i]; p.name == nil {
			dst = append(dst, p.text...)
		} else {
			dst = f.appendValue(dst, p)
		}
		f.spend(len(dst) - was)
	}
	return dst
}

func (f *filler) appendValue(dst []byte, p *piece) []byte {
	f.last = p
	v, err := f.values.value(p.name)
	if err == nil && len(v.text) > maxValue {
		err = ErrTooLarge
	}
	if err == nil {
		dst, err = p.place.appendValue(dst, v)
	}
	if err != nil {
		f.fail(err)
	}
	return dst
}

// spend takes n bytes of the room. Literal text alone cannot exceed it: Parse checks that.
func (f *filler) spend(n int) {
	if f.room -= n; f.room < 0 && f.err == nil {
		f.fail(ErrTooLarge)
	}
}

func (f *filler) fail(err error) {
	f.err = &fillError{f.last.name.text, f.last.place.String(), err}
}

// value is the value of a placeholder.
type value struct {
	text   string
	quoted bool // a JSON string, not a number or a boolean
}

// checkDocument reports where doc is no text that all readers take for the same JSON.
func checkDocument(doc []byte) *ParseError {
	var syntax *json.SyntaxError
	if err := json.Unmarshal(doc, new(json.RawMessage)); errors.As(err, &syntax) {
		// The offset is after the invalid byte, or the end of the text.
		return bad(max(int(syntax.Offset)-1, 0), "%v", syntax)
	}
	s := jsonx.Scanner{JSON: string(doc), Depth: len(doc)}
	ok := s.Whole(func() bool {
		_, ok := s.Value()
		return ok
	})
	switch {
	case ok:
		return nil
	case s.TwiceNamed:
		return bad(s.At, "the name %q occurs twice in one object", s.Name)
	case doc[s.At] == '\\':
		return bad(s.At, "half of a surrogate pair")
	}
	return bad(s.At, "invalid UTF-8")
}
