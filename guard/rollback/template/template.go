// Package template makes the request that compensates a call from what was recorded of the
// call: its request and its response. Everything that an agent or an upstream sent is
// untrusted: a value can fill its placeholder and change nothing else of the request.
//
// [Parse] parses a template once, when the configuration is loaded. [Template.Fill] then
// makes a [Request] without I/O, always the same for the same [Source].
//
// # Placeholders
//
//	{request.path}            the path as it was sent, percent-encoding kept
//	{request.path.N}          its Nth segment, from 0, decoded: 1 is "ch_7" in /charges/ch_7
//	{request.query.NAME}      a value of the query, decoded
//	{request.header.NAME}     a header field
//	{request.json./POINTER}   a value in the JSON body, by JSON pointer (RFC 6901)
//	{response.status}         the status code
//	{response.header.NAME}    a header field of the answer
//	{response.json./POINTER}  a value in the answer's JSON body
//	{execution.id}            the execution id of the call
//	{workflow.id}             its workflow
//	{rollback.id}             the rollback that asks
//	{checkpoint.id}           the checkpoint of the call's first attempt
//
// Any other name is an error of [Parse]. Literal braces are doubled: {{ and }}, in a JSON
// body too. A name ends at the first closing brace, so members whose names contain a brace
// cannot be read.
//
// Header fields with the caller's credentials (Authorization, Proxy-Authorization, Cookie,
// X-Api-Key, Api-Key) cannot be read: a template must not be able to send them to another
// host. The credentials of an undo are a separate setting.
//
// # Places
//
// The place of a placeholder decides how its value is escaped and which values are refused:
//
//   - In the path it is one segment or a part of one. Everything outside RFC 3986's
//     unreserved characters is percent-encoded. Empty, ".", "..", a slash, a backslash
//     and control characters are refused: some server on the way would resolve them,
//     encoded or not. {request.path} has slashes and cannot stand here.
//   - In the query it is the value, or a part of it, of a name that is written out.
//     Percent-encoded likewise.
//   - In a header field it is the value or a part of it. Empty, control characters, and
//     spaces at its ends are refused.
//   - In a JSON body between quotes it is text, escaped. Outside of quotes it is the
//     whole value: a number is written as it was, digit by digit; a string in quotes;
//     true and false as such.
//   - In a form body it is as in a query.
//
// Method, scheme, host, port, field names, names in queries and forms, and names of JSON
// members cannot have placeholders. The URL is a path, for the upstream of the call, or
// begins with http:// or https:// and a fixed host. Only JSON bodies and forms can have
// placeholders, since the escaping of other types is unknown.
//
// [JSONObject] and [Form] make a body from the names and values of a configuration.
//
// # Errors
//
// [Parse] returns a [*ParseError] with the place and a remedy. [Template.Fill] returns a
// [*fillError], which names the placeholder but not its value, which may be a secret (P8).
// A call whose template cannot be filled cannot be compensated: its checkpoint is marked
// irreversible. This is checked before the rollback's id is known; any id serves for the
// check.
package template

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Limits in bytes.
const (
	// maxValue is the longest value that a placeholder may have, before escaping.
	maxValue = 4 << 10
	// maxRequest is the largest size of a request: URL, header fields with their names, and
	// body. [Parse] applies it to the template's own text.
	maxRequest = 64 << 10
)

// Spec is a template as configured. URL, values of Header and Body may have placeholders.
type Spec struct {
	// Method is the HTTP method in capital letters.
	Method string
	// URL is a path with an optional query, like "/v1/refunds", for the upstream of the
	// call, or a complete http or https URL.
	URL string
	// Header has each name at most once, and no fields of the connection.
	Header []Field
	// ContentType is the media type of Body; required with a body, empty without one.
	ContentType string
	// Body is JSON, a form (application/x-www-form-urlencoded), or anything else without
	// placeholders.
	Body string
}

// Field is one header field.
type Field struct{ Name, Value string }

// Template is a parsed template. It is immutable and safe for concurrent use.
type Template struct {
	method      string
	origin      string
	url         []piece // path and query
	header      []field
	contentType string
	body        []piece
}

type field struct {
	name  string
	value []piece
}

// Parse parses a template. The error is a *ParseError.
func Parse(spec Spec) (*Template, error) {
	t := &Template{method: spec.Method, contentType: spec.ContentType}
	size := len(spec.URL) + len(spec.ContentType) + len(spec.Body)
	for _, f := range spec.Header {
		size += len(f.Name) + len(f.Value)
	}
	if size > maxRequest {
		return nil, &ParseError{"template", 0, "is larger than 64 KiB"}
	}
	if err := checkMethod(spec.Method); err != nil {
		return nil, err.in("method")
	}
	if err := t.parseURL(spec.URL); err != nil {
		return nil, err.in("url")
	}
	if err := t.parseHeader(spec.Header); err != nil {
		return nil, err
	}
	kind, err := bodyKind(spec)
	if err != nil {
		return nil, err.in("content_type")
	}
	if t.body, err = parseBody(spec.Body, kind); err != nil {
		return nil, err.in("body")
	}
	return t, nil
}

// Origin returns the scheme and host of the requests, like "https://example.com:8443";
// empty for the upstream of the call. No value can change it.
func (t *Template) Origin() string { return t.origin }

func checkMethod(method string) *ParseError {
	switch {
	case strings.ContainsAny(method, "{}"):
		return bad(strings.IndexAny(method, "{}"), "a method can hold no placeholder; write one out, like POST")
	case !httpguts.ValidHeaderFieldName(method) || strings.ToUpper(method) != method:
		return bad(0, "%q is no method; write one in capital letters, like POST", method)
	case method == http.MethodConnect || method == http.MethodTrace:
		return bad(0, "%s changes nothing that could be undone; write a method like POST or DELETE", method)
	}
	return nil
}

// kind is the type of a body, which decides its escaping.
type kind uint8

const (
	noBody kind = iota
	jsonBody
	formBody
	otherBody
)

func bodyKind(spec Spec) (kind, *ParseError) {
	switch {
	case spec.Body == "" && spec.ContentType == "":
		return noBody, nil
	case spec.Body == "":
		return 0, bad(0, "there is no body that is %q; write one, or leave the type away", spec.ContentType)
	case spec.ContentType == "":
		return 0, bad(0, "the body has no type; write one, like application/json")
	case spec.Method == http.MethodGet || spec.Method == http.MethodHead:
		return 0, bad(0, "%s has no body; leave body and type away", spec.Method)
	case strings.ContainsAny(spec.ContentType, "{}"):
		return 0, bad(strings.IndexAny(spec.ContentType, "{}"), "a type can hold no placeholder; write one out, like application/json")
	}
	media, params, err := mime.ParseMediaType(spec.ContentType)
	if err != nil || !strings.Contains(media, "/") || strings.ContainsFunc(spec.ContentType, outsideASCII) {
		return 0, bad(0, "%q is no media type; write one like application/json", spec.ContentType)
	}
	k := otherBody
	switch {
	case body.IsJSON(media):
		k = jsonBody
	case media == "application/x-www-form-urlencoded":
		k = formBody
	}
	if charset, ok := params["charset"]; ok && k != otherBody && !strings.EqualFold(charset, "utf-8") {
		return 0, bad(0, "the body is written in UTF-8, not in %q; leave charset away", charset)
	}
	return k, nil
}

func outsideASCII(r rune) bool { return r < ' ' || r > '~' }

// ofConnection are fields that a template must not set: they frame the message, belong to
// one connection, or name the host.
var ofConnection = []string{
	"Connection", "Content-Length", "Expect", "Host", "Keep-Alive", "Proxy-Connection",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func (t *Template) parseHeader(fields []Field) error {
	for _, f := range fields {
		value, err := t.parseField(f)
		if err != nil {
			return err.in("header " + f.Name)
		}
		t.header = append(t.header, field{http.CanonicalHeaderKey(f.Name), value})
	}
	return nil
}

func (t *Template) parseField(f Field) ([]piece, *ParseError) {
	canonical := http.CanonicalHeaderKey(f.Name)
	switch {
	case strings.ContainsAny(f.Name, "{}"):
		return nil, bad(0, "a field's name can hold no placeholder; write it out")
	case !httpguts.ValidHeaderFieldName(f.Name):
		return nil, bad(0, "%q is no name of a header field; write one like If-Match", f.Name)
	case slices.Contains(ofConnection, canonical):
		return nil, bad(0, "%s belongs to the connection; leave it away", canonical)
	case canonical == "Content-Type":
		return nil, bad(0, "the type of the body has a setting of its own; leave the field away")
	case slices.ContainsFunc(t.header, func(have field) bool { return have.name == canonical }):
		return nil, bad(0, "the field is set twice; write it once")
	}
	pieces, err := scan(f.Value)
	if err != nil {
		return nil, err
	}
	if strings.Trim(f.Value, " \t") != f.Value {
		return nil, bad(0, "a value has no space at its ends; leave it away")
	}
	for i := range pieces {
		p := &pieces[i]
		p.place = headerValue
		if at := strings.IndexFunc(p.text, isControl); at >= 0 {
			return nil, bad(p.offset+at, "a value holds no control characters; leave it away")
		}
	}
	return pieces, nil
}

func (t *Template) parseURL(text string) *ParseError {
	rest, err := t.parseOrigin(text)
	if err != nil {
		return err
	}
	start := len(text) - len(rest)
	pieces, err := scan(rest)
	if err == nil {
		err = t.parseTarget(pieces)
	}
	if err != nil {
		err.Offset += start
	}
	return err
}

// parseOrigin parses scheme and host, if present. rest begins with a slash.
func (t *Template) parseOrigin(text string) (rest string, err *ParseError) {
	authority := ""
	switch scheme, after, ok := strings.Cut(text, "://"); {
	case strings.HasPrefix(text, "/"):
		rest = text
	case ok && (scheme == "https" || scheme == "http"):
		end := strings.IndexAny(after, "/?#")
		if end < 0 {
			end = len(after)
		}
		authority, rest = after[:end], after[end:]
		if err := checkAuthority(authority); err != nil {
			err.Offset += len(scheme) + len("://")
			return "", err
		}
		t.origin = scheme + "://" + authority
	case strings.ContainsAny(scheme, "{}"):
		return "", bad(0, "scheme and host can hold no placeholder; begin with /, or with https:// and a host")
	default:
		return "", bad(0, "%q is no URL to send to; begin with / for the upstream of the call, or with https:// or http://", text)
	}
	switch start := len(text) - len(rest); {
	case !strings.HasPrefix(rest, "/"):
		return "", bad(start, "the path is missing; write a slash after the host")
	case strings.HasPrefix(rest, "//"):
		return "", bad(start, "the path begins with two slashes, which some read as a host; write one")
	}
	return rest, nil
}

// checkAuthority checks for a plain host with an optional port.
func checkAuthority(authority string) *ParseError {
	if i := strings.IndexAny(authority, "{}"); i >= 0 {
		return bad(i, "host and port can hold no placeholder; write them out")
	}
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		return bad(0, "a URL must not hold a user or a password; leave everything before the host away and set a header field")
	}
	host, port := authority, ""
	if i := strings.LastIndexByte(authority, ':'); i > strings.LastIndexByte(authority, ']') {
		host, port = authority[:i], authority[i+1:]
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return bad(i+1, "%q is no port; write one between 1 and 65535, or leave the colon away", port)
		}
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if addr, err := netip.ParseAddr(inner); !ok || err != nil || !addr.Is6() || addr.Zone() != "" {
			return bad(0, "%q is no address; write an IPv6 address without a zone in brackets", host)
		}
		return nil
	}
	for i := range len(host) {
		if c := host[i]; !isAlphanumeric(c) && strings.IndexByte("-._", c) < 0 {
			return bad(i, "a host holds letters of ASCII, digits, dots and hyphens; write others as punycode (xn--)")
		}
	}
	if host == "" {
		return bad(0, "the host is missing; write one after //")
	}
	return nil
}

// parseTarget parses path and query.
func (t *Template) parseTarget(pieces []piece) *ParseError {
	path, query, asked := cut(pieces, '?')
	if err := parsePath(path); err != nil {
		return err
	}
	t.url = path
	if !asked {
		return nil
	}
	if err := parsePairs(query, "?/"); err != nil {
		return err
	}
	t.url = append(append(t.url, piece{text: "?"}), query...)
	return nil
}

// inPath are the characters that a path may have unescaped (RFC 3986, section 3.3).
const inPath = "-._~!$&'()*+,;=:@/"

func parsePath(pieces []piece) *ParseError {
	var sample strings.Builder
	for i := range pieces {
		p := &pieces[i]
		if p.name == nil {
			if err := checkEscaped(p, inPath); err != nil {
				return err
			}
			sample.WriteString(p.text)
			continue
		}
		if p.name.what == requestPath {
			return bad(p.offset, "{request.path} is more than one segment; write the path out with {request.path.N} in it")
		}
		p.place = pathSegment
		sample.WriteString(p.place.sample())
	}
	for segment := range strings.SplitSeq(sample.String(), "/") {
		if plain, err := url.PathUnescape(segment); err != nil || plain == "." || plain == ".." {
			return bad(0, "the path's segment %q would be resolved on the way; write the path that is meant", segment)
		}
	}
	return nil
}

// parsePairs parses name=value&name=value. extra are further characters that may be
// unescaped.
func parsePairs(pieces []piece, extra string) *ParseError {
	inValue := false
	for i := range pieces {
		p := &pieces[i]
		if p.name != nil {
			if !inValue {
				return bad(p.offset, "a name in a query or form can hold no placeholder; write name={%s}", p.name.text)
			}
			p.place = pairValue
			continue
		}
		if err := checkEscaped(p, "-._~!$&'()*+,=:@"+extra); err != nil {
			return err
		}
		for j := range len(p.text) {
			switch p.text[j] {
			case '&':
				inValue = false
			case '=':
				inValue = true
			}
		}
	}
	return nil
}

// checkEscaped checks that p has only allowed characters, letters, digits, and complete
// percent-encodings.
func checkEscaped(p *piece, allowed string) *ParseError {
	for i := 0; i < len(p.text); i++ {
		c := p.text[i]
		switch {
		case c == '#':
			return bad(p.offset+i, "a URL that is sent has no fragment; leave # and what follows away, or write %%23")
		case c == '%':
			if !isHex(p.text, i+1) || !isHex(p.text, i+2) {
				return bad(p.offset+i, "two hexadecimal digits must follow the percent sign; write %%25 for the sign itself")
			}
			i += 2
		case !isAlphanumeric(c) && strings.IndexByte(allowed, c) < 0:
			return bad(p.offset+i, "%q cannot stand here as it is; write it percent-encoded, %%%02X", p.text[i:i+1], c)
		}
	}
	return nil
}

func isHex(s string, i int) bool {
	return i < len(s) && strings.IndexByte("0123456789abcdefABCDEF", s[i]) >= 0
}

func parseBody(text string, k kind) ([]piece, *ParseError) {
	if k == noBody {
		return nil, nil
	}
	pieces, err := scan(text)
	if err != nil {
		return nil, err
	}
	switch k {
	case jsonBody:
		if err := placeInJSON(pieces); err != nil {
			return nil, err
		}
		return pieces, checkJSON(pieces)
	case formBody:
		return pieces, parsePairs(pieces, "")
	}
	for _, p := range pieces {
		if p.name != nil {
			return nil, bad(p.offset, "{%s}: only JSON and form bodies can hold placeholders; set the content type to application/json or application/x-www-form-urlencoded", p.name.text)
		}
	}
	return pieces, nil
}

// placeInJSON finds out which placeholders are inside JSON strings. It is correct only for
// valid JSON, which checkJSON checks.
func placeInJSON(pieces []piece) *ParseError {
	quoted, escaped := false, false
	var inString, inName *piece // the piece that opened the current string; the last piece of the string closed last
	for i := range pieces {
		p := &pieces[i]
		if p.name != nil {
			if p.place = jsonValue; quoted {
				p.place, inString = jsonText, p
			}
			continue
		}
		for j := range len(p.text) {
			switch c := p.text[j]; {
			case escaped:
				escaped = false
			case quoted && c == '\\':
				escaped = true
			case c == '"':
				if quoted = !quoted; !quoted {
					inName, inString = inString, nil
				}
			case quoted || strings.IndexByte(" \t\r\n", c) >= 0:
			case c == ':' && inName != nil:
				return bad(inName.offset, "the name of a JSON member can hold no placeholder; write it out")
			default:
				inName = nil
			}
		}
	}
	return nil
}

// checkJSON checks that the body is valid JSON with a sample value for each placeholder.
func checkJSON(pieces []piece) *ParseError {
	var sample []byte
	starts := make([]int, len(pieces)) // offset of each piece in the sample
	for i, p := range pieces {
		starts[i] = len(sample)
		if p.name == nil {
			sample = append(sample, p.text...)
		} else {
			sample = append(sample, p.place.sample()...)
		}
	}
	problem := checkDocument(sample)
	if problem == nil {
		return nil
	}
	offset := problem.Offset
	for i, p := range pieces {
		if starts[i] <= problem.Offset {
			offset = p.offset
			if p.name == nil {
				offset += min(problem.Offset-starts[i], len(p.text))
			}
		}
	}
	return bad(offset, "with values in place the body is no JSON: %s", problem.Problem)
}

// piece is literal text or a placeholder.
type piece struct {
	text   string
	offset int // in the field as configured
	name   *name
	place  place
}

// scan splits text at its placeholders. A doubled brace ends a piece of text, so that
// offset plus an index into the piece is the position in the field.
func scan(text string) ([]piece, *ParseError) {
	var all []piece
	from := 0
	for i := 0; i < len(text); {
		c := text[i]
		switch {
		case c != '{' && c != '}':
			i++
			continue
		case strings.HasPrefix(text[i+1:], text[i:i+1]):
			all = append(all, piece{text: text[from : i+1], offset: from})
			i += 2
			from = i
			continue
		case c == '}':
			return nil, bad(i, "this brace closes nothing; write }} for a brace")
		}
		length := strings.IndexAny(text[i+1:], "{}")
		if length < 0 || text[i+1+length] == '{' {
			return nil, bad(i, "the placeholder is not closed; close it with }, or write {{ for a brace")
		}
		n, err := parseName(text[i+1 : i+1+length])
		if err != nil {
			err.Offset = i
			return nil, err
		}
		if from < i {
			all = append(all, piece{text: text[from:i], offset: from})
		}
		all = append(all, piece{offset: i, name: n})
		i += length + 2
		from = i
	}
	if from < len(text) {
		all = append(all, piece{text: text[from:], offset: from})
	}
	return all, nil
}

// cut splits pieces at the first sep in literal text.
func cut(pieces []piece, sep byte) (before, after []piece, found bool) {
	for i, p := range pieces {
		at := strings.IndexByte(p.text, sep)
		if at < 0 {
			continue
		}
		before = append(before, pieces[:i]...)
		before = append(before, piece{text: p.text[:at], offset: p.offset})
		after = append(after, piece{text: p.text[at+1:], offset: p.offset + at + 1})
		return before, append(after, pieces[i+1:]...), true
	}
	return pieces, nil, false
}

// what is the kind of a placeholder.
type what uint8

const (
	requestPath what = iota
	requestSegment
	requestQuery
	requestHeader
	requestBody
	responseStatus
	responseHeader
	responseBody
	executionID
	workflowID
	rollbackID
	checkpointID
)

// name is a parsed placeholder.
type name struct {
	text    string // as configured
	what    what
	arg     string // name of the query parameter or header field, or JSON pointer
	segment int
	pointer jsonx.Pointer
}

var plainNames = map[string]what{
	"request.path": requestPath, "response.status": responseStatus,
	"execution.id": executionID, "workflow.id": workflowID,
	"rollback.id": rollbackID, "checkpoint.id": checkpointID,
}

// namesWithArg are the prefixes of names with an argument.
var namesWithArg = []struct {
	prefix string
	what   what
}{
	{"request.path.", requestSegment},
	{"request.query.", requestQuery},
	{"request.header.", requestHeader},
	{"request.json.", requestBody},
	{"response.header.", responseHeader},
	{"response.json.", responseBody},
}

const knownNames = "request.path, request.path.N, request.query.NAME, request.header.NAME, request.json./POINTER, " +
	"response.status, response.header.NAME, response.json./POINTER, execution.id, workflow.id, rollback.id, checkpoint.id"

// credentials are header fields that authenticate a caller.
var credentials = []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key"}

func parseName(text string) (*name, *ParseError) {
	if w, ok := plainNames[text]; ok {
		return &name{text: text, what: w}, nil
	}
	for _, known := range namesWithArg {
		if arg, ok := strings.CutPrefix(text, known.prefix); ok {
			n := &name{text: text, what: known.what, arg: arg}
			return n, n.readArg()
		}
	}
	if text == "request.json" || text == "response.json" {
		return nil, bad(0, "{%s} is not one value; name one by JSON pointer, like {%s./id}", text, text)
	}
	return nil, bad(0, "placeholder {%s} is unknown; there are %s; write {{ for a brace", text, knownNames)
}

func (n *name) readArg() *ParseError {
	switch n.what {
	case requestSegment:
		i, err := strconv.Atoi(n.arg)
		if err != nil || strconv.Itoa(i) != n.arg || i < 0 {
			return bad(0, "{%s}: %q is no segment of a path; count from 0, like {request.path.1}", n.text, n.arg)
		}
		n.segment = i
	case requestQuery:
		if n.arg == "" {
			return bad(0, "{%s}: the name is missing; write it as it is decoded, like {request.query.id}", n.text)
		}
	case requestHeader, responseHeader:
		if !httpguts.ValidHeaderFieldName(n.arg) {
			return bad(0, "{%s}: %q is no name of a header field; write one like {response.header.Location}", n.text, n.arg)
		}
		n.arg = http.CanonicalHeaderKey(n.arg)
		if n.what == requestHeader && slices.Contains(credentials, n.arg) {
			return bad(0, "{%s}: templates cannot hand on the caller's credentials; which ones an undo carries is set by undo_auth", n.text)
		}
	default:
		if !strings.HasPrefix(n.arg, "/") {
			return bad(0, "{%s}: %q is no JSON pointer to a value; begin it with a slash, like {response.json./id}", n.text, n.arg)
		}
		var err error
		if n.pointer, err = jsonx.ParsePointer(n.arg); err != nil {
			return bad(0, "{%s}: %v", n.text, err)
		}
	}
	return nil
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// ParseError is an error of [Parse].
type ParseError struct {
	// Field is "method", "url", "header NAME", "content_type", "body", or "template" for
	// the template as a whole.
	Field string
	// Offset is the position in the field as configured, in bytes from 0.
	Offset int
	// Problem describes the error and its remedy.
	Problem string
}

func (e *ParseError) Error() string {
	return fmt.Sprintf("%s, at byte %d: %s", e.Field, e.Offset, e.Problem)
}

func bad(offset int, format string, args ...any) *ParseError {
	return &ParseError{Offset: offset, Problem: fmt.Sprintf(format, args...)}
}

func (e *ParseError) in(field string) *ParseError {
	e.Field = field
	return e
}

// Reasons why a template cannot be filled.
var (
	// errAbsent: there is no such value, or it is null, or no response was recorded.
	errAbsent = errors.New("the value is absent")
	// errEmpty: the value is empty, where a path segment or a header field needs text.
	errEmpty = errors.New("the value is empty")
	// errNotScalar: the value is an object or an array.
	errNotScalar = errors.New("the value is an object or an array; name a string, a number or a boolean in it")
	// errAmbiguous: the header field or query parameter occurred more than once, or an
	// object on the way to the value has duplicate members.
	errAmbiguous = errors.New("the value's name occurs more than once, so that nobody knows which is meant")
	// errNotJSON: the body has another type, or is invalid JSON (RFC 8259), invalid UTF-8
	// or has lone surrogates.
	errNotJSON = errors.New("the body is not valid JSON")
	// errMalformed: the recorded path or query has an invalid percent-encoding, or the
	// query a semicolon, which some servers take for a separator.
	errMalformed = errors.New("the recorded path or query is malformed")
	// errUnfit: the value has characters that its place does not allow, even escaped.
	errUnfit = errors.New("the value cannot stand in this place")
	// ErrTooLarge: the value exceeds maxValue, or the request maxRequest.
	ErrTooLarge = errors.New("the value, or with it the request, is too large")
)

// fillError names the placeholder without a usable value. It never contains the value.
type fillError struct {
	// Placeholder is the name without its braces.
	Placeholder string
	// Place describes where the placeholder is, in words.
	Place string
	// Err is one of the errors of this package.
	Err error
}

func (e *fillError) Error() string {
	return fmt.Sprintf("{%s} as %s: %v", e.Placeholder, e.Place, e.Err)
}

func (e *fillError) Unwrap() error { return e.Err }
