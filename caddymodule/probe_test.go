package caddymodule

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// target is what a probe of this URI asks with the value v for {v}.
func target(t *testing.T, uri, v string) (string, string, error) {
	t.Helper()
	p := &Probe{URI: uri, Applied: &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{StatusCode: []int{200}}}}
	if err := p.provision(); err != nil {
		t.Fatal(err)
	}
	repl := caddy.NewReplacer()
	repl.Set("v", v)
	return p.target(repl)
}

// "Checkpoints and rollback": values are escaped by place: one path segment, or one
// query value. A caller who chooses the id chooses nothing else.
func TestProbeValuesAreEscapedByPlace(t *testing.T) {
	for _, c := range []struct{ uri, value, path, query string }{
		{"/by-key/{v}", "plain-1", "/by-key/plain-1", ""},
		{"/by-key/{v}", "a/b", "/by-key/a%2Fb", ""},
		{"/by-key/{v}", "a?b=c", "/by-key/a%3Fb=c", ""},
		{"/by-key/{v}", "a#b", "/by-key/a%23b", ""},
		{"/by-key/{v}", "a%2Fb", "/by-key/a%252Fb", ""},
		{"/by-key/{v}", "../admin", "/by-key/..%2Fadmin", ""},
		{"/by-key/{v}", `a\b`, "/by-key/a%5Cb", ""},
		{"/by-key/{v}", "a;b,c", "/by-key/a%3Bb%2Cc", ""},
		{"/by-key/{v}", "{v}", "/by-key/%7Bv%7D", ""},
		{"/by-key/{v}", "a b\r\n", "/by-key/a%20b%0D%0A", ""},
		{"/by-key/x{v}y/{v}", "/", "/by-key/x%2Fy/%2F", ""},
		{"/by-key/x{v}", "..", "/by-key/x..", ""},
		{"/a%20b/{v}", "c", "/a%20b/c", ""},
		{"/status?id={v}&full=1", "a&full=0", "/status", "id=a%26full%3D0&full=1"},
		{"/status?id={v}", "a b+c", "/status", "id=a+b%2Bc"},
		{"/status?id={v}", "a#b?c/d%", "/status", "id=a%23b%3Fc%2Fd%25"},
		{"/status?id={v}", "..", "/status", "id=.."},
		{"/{v}?id={v}", "a/?", "/a%2F%3F", "id=a%2F%3F"},
	} {
		path, query, err := target(t, c.uri, c.value)
		if err != nil || path != c.path || query != c.query {
			t.Errorf("%s with %q: %q ? %q, %v; want %q ? %q", c.uri, c.value, path, query, err, c.path, c.query)
		}
	}
}

// A probe that would ask something else than was meant is not sent.
func TestProbesThatWouldAskElsewhereAreRefused(t *testing.T) {
	for _, c := range []struct{ uri, value string }{
		{"/by-key/{v}", ""},
		{"/status?id={v}", ""},
		{"/by-key/{v}", "."},
		{"/by-key/{v}", ".."},
		{"/by-key/{v}/status", ".."},
		{"/by-key/.{v}", "."},
		{"/by-key/{v}{v}", "."},
		{"/by-key/{unknown}", "a"},
	} {
		if path, query, err := target(t, c.uri, c.value); err == nil {
			t.Errorf("%s with %q asks %q ? %q", c.uri, c.value, path, query)
		}
	}
}

// Whatever the value, the path keeps its segments and the query its values.
func FuzzTemplate(f *testing.F) {
	for _, value := range []string{"a", "", ".", "..", "a/b", "%2e%2e", "?x=1&y=2", "#", "\x00", "ü", "a\\..\\b"} {
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value string) {
		path, query, err := target(t, "/a/{v}/b?id={v}&end=1", value)
		if err != nil {
			if value != "" && value != "." && value != ".." {
				t.Fatalf("%q is refused: %v", value, err)
			}
			return
		}
		segments := strings.Split(path, "/")
		if len(segments) != 4 || segments[1] != "a" || segments[3] != "b" {
			t.Fatalf("%q makes the path %q", value, path)
		}
		if got, err := url.PathUnescape(segments[2]); err != nil || got != value {
			t.Errorf("%q is read from the path as %q, %v", value, got, err)
		}
		values, err := url.ParseQuery(query)
		if err != nil || len(values) != 2 || len(values["id"]) != 1 || values.Get("id") != value || values.Get("end") != "1" {
			t.Errorf("%q makes the query %q: %v, %v", value, query, values, err)
		}
	})
}

func TestEvidence(t *testing.T) {
	answer := &guard.InternalAnswer{Status: 200, Header: http.Header{"X-Source": {"live"}}, Body: []byte(`{"state":"done","n":1.50,"deep":{"/":["x"]},"twice":1,"twice":2}`)}
	for _, c := range []struct {
		name string
		e    *Evidence
		want bool
	}{
		{"none", nil, false},
		{"status", &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{StatusCode: []int{404, 2}}}, true},
		{"other status", &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{StatusCode: []int{404}}}, false},
		{"header", &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{Headers: http.Header{"X-Source": {"live"}}}}, true},
		{"other header", &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{Headers: http.Header{"X-Source": {"cache"}}}}, false},
		{"json", &Evidence{JSON: map[string]string{"/state": "done", "/n": "1.50", "/deep/~1/0": "x"}}, true},
		{"one json of two", &Evidence{JSON: map[string]string{"/state": "done", "/n": "2"}}, false},
		{"absent json", &Evidence{JSON: map[string]string{"/gone": ""}}, false},
		{"ambiguous json", &Evidence{JSON: map[string]string{"/twice": "2"}}, false},
		{"all of them", &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{StatusCode: []int{200}}, JSON: map[string]string{"/state": "done"}}, true},
		{"all but one", &Evidence{ResponseMatcher: caddyhttp.ResponseMatcher{StatusCode: []int{201}}, JSON: map[string]string{"/state": "done"}}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.e.provision(); err != nil {
				t.Fatal(err)
			}
			if got := c.e.matches(answer); got != c.want {
				t.Errorf("matches: %v, want %v", got, c.want)
			}
		})
	}
}

// What a probe answers is kept up to a limit; interim answers are not the answer.
func TestProbeAnswer(t *testing.T) {
	a := newInternalAnswer(maxProbeAnswer)
	a.WriteHeader(http.StatusEarlyHints)
	_, _ = a.Write([]byte("abc"))
	a.WriteHeader(500)
	if a.Status != 200 || string(a.Body) != "abc" {
		t.Errorf("%d %q", a.Status, a.Body)
	}
	if n, err := a.Write(make([]byte, maxProbeAnswer-3)); n != maxProbeAnswer-3 || err != nil || a.Cut {
		t.Errorf("an answer of the longest length: %d, %v, cut %v", n, err, a.Cut)
	}
	if n, err := a.Write([]byte("defg")); n != 4 || err != nil || !a.Cut || len(a.Body) != maxProbeAnswer {
		t.Errorf("a large answer: %d, %v, cut %v, %d bytes kept", n, err, a.Cut, len(a.Body))
	}
}
