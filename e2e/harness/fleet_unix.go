//go:build unix

package harness

import (
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// fleetNode is what `nodes` shows of a gateway.
type fleetNode struct {
	Node        string
	This        bool
	SeenAge     float64  `json:"seen_age"`
	Open        int      `json:"open_executions"`
	LogSize     int64    `json:"log_entries"`
	SealingKeys []uint32 `json:"sealing_keys"`
	Differs     []string
}

// Nodes lists the gateways on the store, as the command does.
func (s *ProcSite) Nodes(t *testing.T) []fleetNode {
	t.Helper()
	return ProcDocument[struct{ Nodes []fleetNode }](t, s.Operate(t, "nodes", "-o", "json").Says(t)).Nodes
}

// PostgresSite is a gateway's site with its store in the server's database, and false where there
// is no PostgreSQL.
func PostgresSite(t *testing.T, upstream *ProcUpstream) (*ProcSite, *pgserver.Server, bool) {
	t.Helper()
	server := pgserver.Test(t)
	if server == nil {
		return nil, nil, false
	}
	return WithPostgres(ProcNewSite(t, upstream.Addr), server.DSN()), server, true
}

// WithPostgres gives the site its store there. Its node is "one".
func WithPostgres(site *ProcSite, dsn string) *ProcSite {
	site.Store = "postgres {\n\t\t\tdsn {env.TEST_DSN}\n\t\t\tnode one\n\t\t\tlease 10s\n\t\t}"
	site.App = "keys file " + site.Path("keys")
	site.Env = append(site.Env, "TEST_DSN="+dsn+" statement_timeout=1000")
	return site
}

// Unavailable reports that the call was refused since the store is not available, in the time that
// is promised (P4).
func Unavailable(t *testing.T, gateway *ProcGateway, c ProcCall) bool {
	t.Helper()
	begun := time.Now()
	a := gateway.Post(t, c)
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("the call was answered after %v", took)
	}
	return a.Status == http.StatusServiceUnavailable && a.Problem() == "store-unavailable"
}
