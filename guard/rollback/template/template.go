package template

import (
	"mime"
	"net/http"
	"strings"
)

// Limits in bytes.
const (
	// MaxValue is the longest value that a placeholder may have, before escaping.
	MaxValue = 4 << 10
	// MaxRequest is the size of the largest request: its URL, its header fields with
	// their names, and its body. It holds for what a template says by itself too.
	MaxRequest = 64 << 10
)

// Spec is a template as the configuration has it. URL, values of Header and Body may
// hold placeholders.
type Spec struct {
	// Method is written in capital letters.
	Method string
	// URL is a path with a query or none, like "/v1/refunds", for the upstream of the
	// call, or a whole https or http URL.
	URL string
	// Header has each name once, and none that belongs to the connection.
	Header []Field
	// ContentType is the media type of Body; it goes with a body, and only with one.
	ContentType string
	// Body is JSON, a form (application/x-www-form-urlencoded), or anything else
	// without placeholders.
	Body string
}

// Field is one header field.
type Field struct{ Name, Value string }

// Template makes requests. It does not change and may be used by many goroutines.
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

// Parse reads a template. The error is a *ParseError.
func Parse(spec Spec) (*Template, error) {
	t := &Template{method: spec.Method, contentType: spec.ContentType}
	size := len(spec.URL) + len(spec.ContentType) + len(spec.Body)
	for _, f := range spec.Header {
		size += len(f.Name) + len(f.Value)
	}
	if size > MaxRequest {
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

// Origin is the scheme and host that the request goes to, like "https://example.com:8443",
// or empty for the upstream of the call. No value can change it.
func (t *Template) Origin() string { return t.origin }

func checkMethod(method string) *ParseError {
	switch {
	case strings.ContainsAny(method, "{}"):
		return bad(strings.IndexAny(method, "{}"), "a method can hold no placeholder; write one out, like POST")
	case !isToken(method) || strings.ToUpper(method) != method:
		return bad(0, "%q is no method; write one in capital letters, like POST", method)
	case method == http.MethodConnect || method == http.MethodTrace:
		return bad(0, "%s changes nothing that could be undone; write a method like POST or DELETE", method)
	}
	return nil
}

// kind is how a body is written.
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
	case isJSON(media):
		k = jsonBody
	case media == "application/x-www-form-urlencoded":
		k = formBody
	}
	if charset, ok := params["charset"]; ok && k != otherBody && !strings.EqualFold(charset, "utf-8") {
		return 0, bad(0, "the body is written in UTF-8, not in %q; leave charset away", charset)
	}
	return k, nil
}

// isJSON knows application/json and the types that are JSON by their suffix (RFC 6839).
func isJSON(media string) bool {
	return media == "application/json" || strings.HasSuffix(media, "+json")
}

func outsideASCII(r rune) bool { return r < ' ' || r > '~' }
