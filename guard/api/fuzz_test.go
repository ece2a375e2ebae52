package api

import (
	"errors"
	"net/url"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// FuzzQuestion: whatever stands in a path and a query is read in one way or refused
// with a problem, and an id that was read stays what it is.
func FuzzQuestion(f *testing.F) {
	for _, seed := range []string{
		"/.well-known/cascade/ledger/entries/12", "/.well-known/cascade/ledger/entries?jti=a&wid=b&wait=30s",
		"/.well-known/cascade/ledger/proof?index=1&size=2", "/.well-known/cascade/workflows/A0B1C2D3-E4F5-6789-ABCD-EF0123456789",
		"/.well-known/cascade/workflows/a%2Fb", "/.well-known/cascade/errors", "/.well-known/cascade/workflows/%zz",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, target string) {
		u, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		to, ok := parseRoute(u)
		if !ok {
			return
		}
		if !Owns(u.Path) || to.endpoint == 0 {
			t.Errorf("%q is %+v", target, to)
		}
		read := func(err error) bool {
			var p *problem.Problem
			if err != nil && (!errors.As(err, &p) || p.Kind() != router.ParameterInvalid) {
				t.Errorf("%q: %v", target, err)
			}
			return err == nil
		}
		if to.name != "" && to.endpoint != endpointProblems {
			if name, err := router.Segment(to.name, "name"); read(err) {
				again, err := router.Segment(url.PathEscape(name), "name")
				if err != nil || again != name {
					t.Errorf("%q is %q, and that is %q, %v", to.name, name, again, err)
				}
			}
		}
		p, err := router.ParseParams(u, "jti", "wid", "wait", "index", "size", "old", "new")
		if !read(err) {
			return
		}
		for _, name := range []string{"index", "size", "old", "new"} {
			n, there, err := p.Number(name)
			if read(err) && (n < 0 || !there && n != 0) {
				t.Errorf("%q: %s is %d", target, name, n)
			}
		}
		if wait, err := p.Wait(); read(err) && (wait < 0 || wait > router.LongestQuestion) {
			t.Errorf("%q: waits %v", target, wait)
		}
		for _, name := range []string{"jti", "wid"} {
			id, there, err := p.Name(name)
			if read(err) && there != (id != "") {
				t.Errorf("%q: %s is %q", target, name, id)
			}
		}
	})
}
