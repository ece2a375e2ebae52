package harness

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Probe makes a call that is the probe, which goes to its caller as it came, and returns
// what it has made of the breaker.
func (g *Gateway) Probe(u *Upstream, r Request) breaker.Status {
	g.T.Helper()
	HalfOpen(g.T, u.Addr)
	if got := g.Call(r); got.Status != http.StatusCreated || got.Body != "signed" || r.Id == "" && got.Header.Get("Execution-Status") != "" {
		g.T.Fatalf("the probe's caller got %d %q %v", got.Status, got.Body, got.Header)
	}
	return Circuit(g.T, u.Addr)
}

// CircuitsView is what the page of breakers tells.
type CircuitsView struct {
	Circuits []struct {
		Downstream  string  `json:"downstream_agent"`
		State       string  `json:"state"`
		ErrorRate   float64 `json:"error_rate"`
		Window      float64 `json:"window_s"`
		LastFailure string  `json:"last_failure_ect"`
		Remaining   int64   `json:"cooldown_remaining_s"` // Figure 3: a whole number
		Upstream    string  `json:"upstream"`
		Opened      string  `json:"open_ect"`
		Cause       string  `json:"last_cause"`
		Rejected    uint64  `json:"rejected"`

		WorkflowThreshold float64 `json:"workflow_threshold"`
	}
}

// Opening is the opening of an upstream's breaker, once it is told.
func (g *Gateway) Opening(a *Agent, upstream string) (opened, failure string) {
	g.T.Helper()
	Eventually(g.T, "the opening is told", func() bool {
		for _, c := range Document[CircuitsView](g.T, g.Get(a, "circuits")).Circuits {
			if c.Upstream == upstream {
				opened, failure = c.Opened, c.LastFailure
			}
		}
		return opened != ""
	})
	return opened, failure
}

func init() {
	caddy.RegisterModule(new(early))
	httpcaddyfile.RegisterGlobalOption("e2e_early", func(d *caddyfile.Dispenser, _ any) (any, error) {
		return httpcaddyfile.App{Name: "e2e_early", Value: []byte("{}")}, nil
	})
}

// early is an app that lets requests come to a site before any app has started: Caddy
// starts its apps in no particular order, and the one that listens may be the first.
type early struct{}

// EarlyRequests makes the requests.
var EarlyRequests atomic.Pointer[func(url string)]

func (*early) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "e2e_early", New: func() caddy.Module { return new(early) }}
}

func (*early) Provision(ctx caddy.Context) error {
	app, err := ctx.App("http")
	if err != nil {
		return err
	}
	for _, site := range app.(*caddyhttp.App).Servers {
		listening := httptest.NewServer(site)
		(*EarlyRequests.Load())(listening.URL)
		listening.Close()
	}
	return nil
}

func (*early) Start() error { return nil }
func (*early) Stop() error  { return nil }

// Circuit is the breaker of an upstream as it stands; closed if there is none.
func Circuit(t *testing.T, upstream string) breaker.Status {
	t.Helper()
	m := proxy.Join()
	defer m.Leave()
	for _, s := range m.Status() {
		if s.Key.Upstream == upstream {
			return s
		}
	}
	return breaker.Status{}
}

// Force does what an operator can do to a breaker.
func Force(t *testing.T, upstream string, mode breaker.Mode) {
	t.Helper()
	m := proxy.Join()
	defer m.Leave()
	if !m.SetMode(breaker.Key{Upstream: upstream}, mode) {
		t.Fatalf("%s has no breaker", upstream)
	}
}

// HalfOpen lets the next suitable call be the probe.
func HalfOpen(t *testing.T, upstream string) {
	t.Helper()
	Force(t, upstream, breaker.ForcedOpen)
	Force(t, upstream, breaker.Auto)
}

// Tripping opens a breaker with its second failure in a row, for longer than any test.
const Tripping = `breaker {
	consecutive 2
	cooldown 10h
}`

// Refused reads an answer as the refusal of a breaker. cascade 6.2: to who is not known
// here it names neither an upstream's address nor a cause.
func (r Reply) Refused(t *testing.T) {
	t.Helper()
	r.RefusedSaying(t, "The circuit breaker of the upstream is open.", "The circuit breaker of the upstream is half-open, and lets one call through at a time.")
}

// RefusedSaying is refused with one of these details.
func (r Reply) RefusedSaying(t *testing.T, details ...string) {
	t.Helper()
	doc := r.Retryable(t, 503, "circuit-open")
	if !slices.Contains(details, doc.Detail) || doc.ErrorType != "circuit_open" || r.Header.Get("Execution-Status") != "refused" {
		t.Errorf("refused with %q, %q, %q", doc.Detail, doc.ErrorType, r.Header.Get("Execution-Status"))
	}
}

// LongWindow keeps what is counted for longer than any test takes.
const LongWindow = "breaker {\n window 1h\n"

// Asking is a token of a workflow with this member of its extensions.
func (a *Agent) Asking(wid, member, value string) *ect.Token {
	a.T.Helper()
	return a.Issue(ect.Claims{Workflow: wid, Ext: new(ect.ExtBuilder).JSON(ect.Member(member), value)})
}

// FailThird makes 20 calls that belong to no workflow, of which six fail.
func (g *Gateway) FailThird(u *Upstream) {
	g.T.Helper()
	u.On("/down", Status(500, ""))
	for n := range 20 {
		path := "/up"
		if n%10 > 6 {
			path = "/down"
		}
		g.Call(Request{Method: "GET", Path: path})
	}
	if s := Circuit(g.T, u.Addr); s.State != breaker.Closed || s.Calls < 20 || s.Failures != 6 {
		g.T.Fatalf("%+v", s)
	}
}

// RefusedByItself reads an answer as the refusal that its workflow has asked for. The
// limit and the upstream are told to who is verified here; the limit is empty for others.
func (r Reply) RefusedByItself(t *testing.T, upstream, limit string) {
	t.Helper()
	const refuses = " refuses this caller, and no other, as its tokens or its plan ask for a stricter limit"
	doc := r.Retryable(t, 503, "circuit-open")
	ok := doc.Detail == "The circuit breaker of the upstream"+refuses+"."
	if limit != "" {
		ok = strings.HasPrefix(doc.Detail, "The circuit breaker of "+upstream+refuses+": more than "+limit) && strings.HasSuffix(doc.Detail, ": status 500.")
	}
	if !ok || doc.Reason != "workflow_threshold" || doc.ErrorType != "circuit_open" || r.Header.Get("Execution-Status") != "refused" {
		t.Errorf("%q, %q, %q, want the limit %q", doc.Detail, doc.Reason, doc.ErrorType, limit)
	}
	if len(r.Header.Get("Retry-After")) > len("3600") {
		t.Errorf("Retry-After %s with a window of an hour", r.Header.Get("Retry-After"))
	}
}

// Circuit is the one breaker that an agent sees.
func (g *Gateway) Circuit(a *Agent) (c struct {
	State     string
	Remaining float64 `json:"cooldown_remaining_s"`
	Rate      float64 `json:"error_rate"`
	Opened    string  `json:"open_ect"`
	Failure   string  `json:"last_failure_ect"`
},
) {
	g.T.Helper()
	doc := Document[struct {
		Circuits []struct {
			State     string
			Remaining float64 `json:"cooldown_remaining_s"`
			Rate      float64 `json:"error_rate"`
			Opened    string  `json:"open_ect"`
			Failure   string  `json:"last_failure_ect"`
		}
	}](g.T, g.Get(a, "circuits"))
	if len(doc.Circuits) != 1 {
		g.T.Fatalf("%+v", doc)
	}
	return doc.Circuits[0]
}

// Times makes so many calls that change nothing.
func (g *Gateway) Times(n int, path string) {
	g.T.Helper()
	for range n {
		g.Call(Request{Method: "GET", Path: path})
	}
}
