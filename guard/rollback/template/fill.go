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
	"unicode/utf16"
	"unicode/utf8"
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
			return value{}, ErrAbsent
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
			return value{}, ErrMalformed
		}
		return single(values[n.arg])
	case requestHeader:
		return single(r.src.Request.Header[n.arg])
	case requestBody:
		return r.request.value(&r.src.Request, n.tokens)
	case responseStatus:
		return value{text: strconv.Itoa(r.src.Status)}, nil
	case responseHeader:
		return single(r.src.Response.Header[n.arg])
	case responseBody:
		return r.response.value(&r.src.Response, n.tokens)
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
		return value{}, ErrAbsent
	}
	return value{text: s, quoted: true}, nil
}

// single returns a value that may have occurred more than once.
func single(values []string) (value, error) {
	switch len(values) {
	case 0:
		return value{}, ErrAbsent
	case 1:
		return value{text: values[0], quoted: true}, nil
	}
	return value{}, ErrAmbiguous
}

func segment(path string, i int) (value, error) {
	rest, ok := strings.CutPrefix(path, "/")
	if !ok {
		return value{}, ErrAbsent
	}
	segments := strings.Split(rest, "/")
	if i >= len(segments) {
		return value{}, ErrAbsent
	}
	plain, err := url.PathUnescape(segments[i])
	if err != nil {
		return value{}, ErrMalformed
	}
	return value{text: plain, quoted: true}, nil
}

func (d *document) value(m *Message, tokens []string) (value, error) {
	if len(m.Body) == 0 {
		return value{}, ErrAbsent
	}
	if !d.read {
		media, _, err := mime.ParseMediaType(m.ContentType)
		typed := m.ContentType == "" || err == nil && isJSON(media)
		d.read, d.valid = true, typed && isDocument(m.Body)
	}
	if !d.valid {
		return value{}, ErrNotJSON
	}
	return find(m.Body, tokens)
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

// appendValue appends v, escaped for the place. The error is ErrEmpty or ErrUnfit.
func (p place) appendValue(dst []byte, v value) ([]byte, error) {
	switch p {
	case pathSegment:
		if v.text == "" {
			return nil, ErrEmpty
		}
		if v.text == "." || v.text == ".." || strings.ContainsFunc(v.text, ambiguousInPath) {
			return nil, ErrUnfit
		}
		return appendEscaped(dst, v.text), nil
	case pairValue:
		return appendEscaped(dst, v.text), nil
	case headerValue:
		if v.text == "" {
			return nil, ErrEmpty
		}
		if strings.Trim(v.text, " \t") != v.text || strings.ContainsFunc(v.text, isControl) {
			return nil, ErrUnfit
		}
		return append(dst, v.text...), nil
	}
	if !utf8.ValidString(v.text) {
		return nil, ErrUnfit
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

// appendEscaped percent-encodes all characters but the unreserved ones of RFC 3986.
func appendEscaped(dst []byte, s string) []byte {
	const digits = "0123456789ABCDEF"
	for i := range len(s) {
		if c := s[i]; isAlphanumeric(c) || strings.IndexByte("-._~", c) >= 0 {
			dst = append(dst, c)
		} else {
			dst = append(dst, '%', digits[c>>4], digits[c&15])
		}
	}
	return dst
}

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
	escape := func(text string) string { return string(appendEscaped(nil, text)) }
	return compose(fields, "form ", "", "&", "", func(name string, value []piece) string {
		return escape(name) + "=" + rewrite(value, escape)
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

// Needs returns what the template reads.
func (t *Template) Needs() Needs {
	var n Needs
	n.add(t.url)
	for _, f := range t.header {
		n.add(f.value)
	}
	n.add(t.body)
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

// Fill makes the request. The error is a *FillError.
func (t *Template) Fill(src *Source) (Request, error) {
	f := filler{values: reader{src: src}, room: MaxRequest}
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
	if err == nil && len(v.text) > MaxValue {
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
	f.err = &FillError{f.last.name.text, f.last.place.String(), err}
}

// value is the value of a placeholder.
type value struct {
	text   string
	quoted bool // a JSON string, not a number or a boolean
}

// isDocument reports whether all decoders read doc alike, apart from duplicate members:
// valid JSON (RFC 8259), valid UTF-8, no lone surrogates.
func isDocument(doc []byte) bool {
	return utf8.Valid(doc) && json.Valid(doc) && loneSurrogate(doc) < 0
}

// loneSurrogate finds an escape, in valid JSON, of half a character. Many decoders replace
// all of them with the same character.
func loneSurrogate(doc []byte) int {
	for i := 0; i < len(doc); i++ {
		if doc[i] != '\\' {
			continue
		}
		at := i
		i++
		if doc[i] != 'u' {
			continue
		}
		high := unit(doc[i+1:])
		i += 4
		if !utf16.IsSurrogate(high) {
			continue
		}
		if !bytes.HasPrefix(doc[i+1:], []byte(`\u`)) || utf16.DecodeRune(high, unit(doc[i+3:])) == utf8.RuneError {
			return at
		}
		i += 6
	}
	return -1
}

// unit decodes four hexadecimal digits.
func unit(digits []byte) rune {
	n, _ := strconv.ParseUint(string(digits[:4]), 16, 16) // checked: the JSON is valid
	return rune(n)
}

// find returns the scalar at tokens in doc, which must satisfy isDocument. The error is
// ErrAbsent, ErrNotScalar or ErrAmbiguous.
func find(doc []byte, tokens []string) (value, error) {
	c := cursor{doc: doc}
	for _, token := range tokens {
		found, err := false, error(nil)
		switch c.next() {
		case '{':
			found, err = c.member(token)
		case '[':
			found = c.element(token)
		}
		if err != nil {
			return value{}, err
		}
		if !found {
			return value{}, ErrAbsent
		}
	}
	switch first := c.next(); first {
	case '{', '[':
		return value{}, ErrNotScalar
	case 'n':
		return value{}, ErrAbsent
	case '"':
		return value{text: c.text(), quoted: true}, nil
	}
	return value{text: string(c.skip())}, nil
}

// cursor reads a document that is known to be valid.
type cursor struct {
	doc []byte
	i   int
}

// next skips white space and returns the next byte without taking it.
func (c *cursor) next() byte {
	for c.doc[c.i] <= ' ' {
		c.i++
	}
	return c.doc[c.i]
}

// take takes a punctuation byte.
func (c *cursor) take() byte {
	b := c.next()
	c.i++
	return b
}

// skip takes a value and returns it as written.
func (c *cursor) skip() []byte {
	first := c.next()
	from := c.i
	switch first {
	case '"':
		c.skipString()
	case '{', '[':
		for depth := 0; depth > 0 || c.i == from; {
			switch c.doc[c.i] {
			case '"':
				c.skipString()
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
			}
			c.i++
		}
	default:
		for c.i < len(c.doc) && bytes.IndexByte([]byte(" \t\r\n,]}"), c.doc[c.i]) < 0 {
			c.i++
		}
	}
	return c.doc[from:c.i]
}

func (c *cursor) skipString() {
	for c.i++; c.doc[c.i] != '"'; c.i++ {
		if c.doc[c.i] == '\\' {
			c.i++
		}
	}
	c.i++
}

// text takes a string and decodes it.
func (c *cursor) text() (s string) {
	_ = json.Unmarshal(c.skip(), &s) // a valid string into a string: no error is possible
	return s
}

// member moves to the value of a member of the object at the cursor.
func (c *cursor) member(name string) (found bool, err error) {
	c.i++
	at := 0
	if c.next() == '}' {
		return false, nil
	}
	for {
		same := c.text() == name
		c.take() // colon
		if same && found {
			return false, ErrAmbiguous
		}
		if same {
			found, at = true, c.i
		}
		c.skip()
		if c.take() == '}' {
			c.i = at
			return found, nil
		}
	}
}

// element moves to an element of the array at the cursor. "-" and numbers with leading
// zeros match no element (RFC 6901, section 4).
func (c *cursor) element(token string) (found bool) {
	c.i++
	index, err := strconv.ParseUint(token, 10, 31)
	if err != nil || strconv.FormatUint(index, 10) != token || c.next() == ']' {
		return false
	}
	for ; index > 0; index-- {
		c.skip()
		if c.take() == ']' {
			return false
		}
	}
	return true
}

// checkDocument reports where doc does not satisfy isDocument, or has an object with
// duplicate members.
func checkDocument(doc []byte) *ParseError {
	var syntax *json.SyntaxError
	if err := json.Unmarshal(doc, new(json.RawMessage)); errors.As(err, &syntax) {
		// The offset is after the invalid byte, or the end of the text.
		return bad(max(int(syntax.Offset)-1, 0), "%v", syntax)
	}
	for i := 0; i < len(doc); {
		r, size := utf8.DecodeRune(doc[i:])
		if r == utf8.RuneError && size == 1 {
			return bad(i, "invalid UTF-8")
		}
		i += size
	}
	if at := loneSurrogate(doc); at >= 0 {
		return bad(at, "half of a surrogate pair")
	}
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	type container struct {
		names  map[string]bool // nil in an array
		inside bool            // the next string is a value
	}
	var open []container
	for {
		from := int(d.InputOffset())
		token, err := d.Token()
		if err != nil {
			return nil // the end: the document is valid
		}
		top := len(open) - 1
		if s, ok := token.(string); ok && top >= 0 && open[top].names != nil && !open[top].inside {
			if open[top].names[s] {
				from += bytes.IndexByte(doc[from:], '"') // past comma and space
				return bad(from, "the name %q occurs twice in one object", s)
			}
			open[top].names[s], open[top].inside = true, true
			continue
		}
		switch token {
		case json.Delim('{'):
			open = append(open, container{names: make(map[string]bool)})
			continue
		case json.Delim('['):
			open = append(open, container{})
			continue
		case json.Delim('}'), json.Delim(']'):
			open = open[:top]
			top--
		}
		if top >= 0 {
			open[top].inside = false
		}
	}
}
