package api

import (
	"net/url"
	"testing"
)

// Equivalent percent-encodings (RFC 3986, section 6.2.2.2) name the same resource, so that none
// of them reaches an upstream. A call to guard is left alone.
func TestRoutes(t *testing.T) {
	for path, want := range map[string]endpoint{
		"/.well-known/cascade/policy": endpointPolicy, "/.well-known/cascade/%70olicy": endpointPolicy,
		"/%2Ewell-known/cascade/health": endpointHealth, "/aerr/circuits": endpointCircuits, "/aerr/%63ircuits": endpointCircuits,
		"/.well-known/cascade/problems/": endpointProblems, "/.well-known/cascade/problems/in-doubt": endpointProblems,
		"/.well-known/cascade/executions/a/output": endpointExecutions, "/.well-known/cascade/ledger/entries": endpointLedger,
		"/.well-known/cascade/ledger/entries/1": endpointLedger, "/.well-known/cascade/%6Cedger/head": endpointLedger,
		"/aerr/rollback": endpointRollback, "/aerr/%72ollback": endpointRollback, "/.well-known/atd/rollback": endpointRollback,
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
