package api

import (
	"net/http"
	"net/url"
	"testing"
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

// Equivalent percent-encodings (RFC 3986, section 6.2.2.2) name the same resource, so that none
// of them reaches an upstream. A call to guard is left alone.
func TestRoutes(t *testing.T) {
	for path, want := range map[string]endpoint{
		"/.well-known/cascade/policy": endpointPolicy, "/.well-known/cascade/%70olicy": endpointPolicy,
		"/%2Ewell-known/cascade/health": endpointHealth, "/aerr/circuits": endpointCircuits, "/aerr/%63ircuits": endpointCircuits,
		"/.well-known/cascade/problems/": endpointProblems, "/.well-known/cascade/problems/in-doubt": endpointProblems,
		"/.well-known/cascade/executions/a/output": endpointExecutions, "/.well-known/cascade/ledger/entries": endpointEntries,
		"/.well-known/cascade/ledger/entries/1": endpointEntry, "/.well-known/cascade/%6Cedger/head": endpointHead,
		"/aerr/rollback": endpointAskRollback, "/aerr/%72ollback": endpointAskRollback, "/.well-known/atd/rollback": endpointAskRollback,
		"/.well-known/cascade/ledger/entries/": 0, "/.well-known/cascade/workflows/a/b": 0, "/.well-known/cascade": 0,
		"/.well-known%2Fcascade/health": 0, "/.well-known/atd/circuits": 0, "/rollback": 0, "/": 0,
	} {
		u, err := url.Parse(path)
		if err != nil {
			t.Fatal(err)
		}
		to, ok := parseRoute(u)
		if to.endpoint != want || ok != (want != 0) {
			t.Errorf("%s is %d, %v, not %d", path, to.endpoint, ok, want)
		}
	}
}
