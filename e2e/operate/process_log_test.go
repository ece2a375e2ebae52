//go:build unix

package operate

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Options that have no effect, as they are written, are logged when the configuration loads.
func TestProcessWarnsOfOptionsWithoutEffect(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	const nobody, all = "nobody has the role that has to approve calls", "`exempt` takes every path"
	for name, c := range map[string]struct{ guard, want string }{
		"a role of nobody":      {"approve acountant", nobody},
		"a role of users":       {"approve accountant\n roles_from {http.auth.user.roles}", ""},
		"a role of a caller":    {"approve accountant\n role accountant user:alice", ""},
		"the role of operators": {"approve", ""},
		"every path is exempt":  {"exempt path /*", all},
		"a path is exempt":      {"exempt path /search/*", ""},
	} {
		t.Run(name, func(t *testing.T) {
			site := harness.ProcNewSite(t, upstream.Addr)
			site.Guard = c.guard
			gateway := site.Start(t)
			gateway.End(t)
			for _, warning := range []string{nobody, all} {
				want := 0
				if warning == c.want {
					want = 1
				}
				if got := strings.Count(gateway.Log.String(), warning); got != want {
					t.Errorf("%q is logged %d times, want %d", warning, got, want)
				}
			}
		})
	}
}

// The space of ids that callers without a credential share is warned of once, not with each
// reload, and not where every request has to authenticate itself first.
func TestProcessWarnsOfAnonymousOnce(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	const warning = "calls without any credential share one space"
	for name, c := range map[string]struct {
		auth string
		want int
	}{
		"nobody asks who calls":    {"", 1},
		"basic_auth of everything": {"basic_auth {\n alice $2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS\n}", 0},
		"basic_auth of a part":     {"basic_auth /admin/* {\n alice $2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS\n}", 1},
	} {
		t.Run(name, func(t *testing.T) {
			site := harness.ProcNewSite(t, upstream.Addr)
			config := func(deadline string) string {
				site.Raw, site.Guard = "", "deadline "+deadline
				return strings.Replace(site.Config(), "\tagent_proxy ", "\t"+c.auth+"\n\tagent_proxy ", 1)
			}
			site.Raw = config("60s")
			gateway := site.Start(t)
			for _, deadline := range []string{"61s", "62s"} {
				site.Raw = config(deadline)
				gateway.Reload(t)
			}
			gateway.End(t)
			if got := strings.Count(gateway.Log.String(), warning); got != c.want {
				t.Errorf("warned %d times, want %d", got, c.want)
			}
		})
	}
}
