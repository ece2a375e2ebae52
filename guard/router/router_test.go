package router

import (
	"net/http"
	"net/url"
	"testing"
	"time"
)

// A path is compared segment by segment after percent-decoding, and a name keeps its encoding:
// an encoded slash does not separate segments.
func TestMatch(t *testing.T) {
	table := []Route[string]{
		{"/a/b", http.MethodGet, "fixed"}, {"/a/{name}", http.MethodPost, "name"},
		{"/a/{name}/c", http.MethodGet, "inner"}, {"/rest/{path...}", http.MethodGet, "rest"},
	}
	for path, want := range map[string][2]string{
		"/a/b": {"fixed"}, "/%61/%62": {"fixed"}, "/a/x": {"name", "x"}, "/a/x%2Fy": {"name", "x%2Fy"}, "/a/x/c": {"inner", "x"},
		"/rest/": {"rest"}, "/rest/x": {"rest", "x"}, "/rest/x/y%2Fz/": {"rest", "x/y%2Fz/"},
		"": {}, "/": {}, "a/b": {}, "/a": {}, "/a/": {}, "/a//c": {}, "/a%2Fb": {}, "/a/x/": {}, "/a/x/d": {}, "/a/b/c/d": {}, "/A/b": {},
		"/rest": {}, "/rest%2Fx": {}, "//a/b": {},
	} {
		to, name := Match(table, path)
		if to == nil {
			to = &Route[string]{}
		}
		if to.To != want[0] || name != want[1] {
			t.Errorf("%q is %q with %q, not %q", path, to.To, name, want)
		}
	}
	get, post := &table[0], &table[1]
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, ""} {
		reads, writes := method == http.MethodGet || method == http.MethodHead, method == http.MethodPost
		if get.Allows(method) != reads || post.Allows(method) != writes {
			t.Errorf("%q: %v, %v", method, get.Allows(method), post.Allows(method))
		}
	}
}

// A wait is a duration or a number of seconds, and bounded.
func TestWait(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"0": 0, "30": 30 * time.Second, "30s": 30 * time.Second, "1m": time.Minute, "250ms": 250 * time.Millisecond,
		"61": time.Minute, "24h": time.Minute, "18446744073709551615": time.Minute,
	} {
		if got, err := (Params{url.Values{"wait": {text}}}).Wait(); err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
}
