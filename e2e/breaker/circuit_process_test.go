//go:build unix

package breaker

import (
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// circuitUntil is how a log tells of a breaker's state that outlived its process.
var circuitUntil = regexp.MustCompile(`"a circuit breaker was not closed when the last process ended".*"state":"open","until":([0-9.]+),"cause":"connection closed without an answer"`)

// OPEN stays OPEN over a reload with other thresholds, and over
// kill -9 with the same deadline. What the configuration overrules ends with it.
func TestCircuitSurvives(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	gateway := harness.ProcTripped(t, site, upstream)

	site.Guard = "breaker {\n min_volume 50\n cooldown 1s\n}"
	gateway.Reload(t)
	harness.WantProcRefused(t, gateway, upstream)

	site.Guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	var until string
	for range 2 {
		gateway.Kill()
		gateway = site.Start(t)
		found := circuitUntil.FindStringSubmatch(gateway.Log.String())
		if found == nil {
			t.Fatalf("the log does not tell of the breaker:\n%s", gateway.Log.Tail(4000))
		}
		second, _, _ := strings.Cut(found[1], ".") // times keep only their wall clock
		if until != "" && until != second {
			t.Errorf("open until %s, and after another kill until %s", until, second)
		}
		until = second
		harness.WantProcRefused(t, gateway, upstream)
	}

	site.Operate(t, "circuits", "set", upstream.Addr, "forced_closed").Says(t)
	if a := gateway.Retry(t, harness.ProcCall{Id: "refused"}); !a.Executed() || upstream.Arrivals("refused") != 1 {
		t.Errorf("forced closed: %v, %d arrivals", a, upstream.Arrivals("refused"))
	}
	gateway.End(t)
}

// What an operator says of a breaker holds until it is taken back, over kill -9.
func TestCircuitModeByAnOperator(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	if a := gateway.Post(t, harness.ProcCall{Id: "before"}); !a.Executed() {
		t.Fatal(a)
	}
	site.Operate(t, "circuits", "set", upstream.Addr, "forced_open").Says(t)
	harness.WantProcRefused(t, gateway, upstream)
	gateway.Kill()
	gateway = site.Start(t)
	harness.WantProcRefused(t, gateway, upstream)
	site.Operate(t, "circuits", "set", "127.0.0.1:1", "auto").Fails(t, `the upstream "127.0.0.1:1" has no circuit breaker`)
	site.Operate(t, "circuits", "set", upstream.Addr, "observe").Says(t)
	for _, id := range []string{"lost-1", "lost-2"} {
		upstream.Script(id, harness.ProcLost)
		gateway.Post(t, harness.ProcCall{Id: id})
	}
	gateway.Kill()
	gateway = site.Start(t)
	if out := site.Operate(t, "circuits", "list").Says(t); !strings.Contains(out, upstream.Addr) || !strings.Contains(out, "observe") {
		t.Errorf("after a kill:\n%s", out)
	}
	if a := gateway.Retry(t, harness.ProcCall{Id: "refused"}); !a.Executed() || upstream.Arrivals("refused") != 1 {
		t.Errorf("observed: %v, %d arrivals", a, upstream.Arrivals("refused"))
	}
	gateway.End(t)
}

// An upstream that the configuration has no more is forgotten.
func TestCircuitOfAnUpstreamThatIsGone(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, other := harness.ProcNewUpstream(t), harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	gateway := harness.ProcTripped(t, site, upstream)
	site.Upstream = other.Addr
	gateway.Reload(t)
	if a := gateway.Retry(t, harness.ProcCall{Id: "refused"}); !a.Executed() {
		t.Errorf("at the other upstream: %v", a)
	}
	if !gateway.Log.Says("no configuration leads to its upstream any more") {
		t.Error("the log does not tell that a breaker was forgotten")
	}
	// With the upstream at once, so that only the reload can have made it forgotten.
	gateway.Kill()
	site.Upstream = upstream.Addr
	gateway = site.Start(t)
	if circuitUntil.MatchString(gateway.Log.String()) {
		t.Error("the state of a breaker whose upstream was gone is restored")
	}
	if a := gateway.Retry(t, harness.ProcCall{Id: "back"}); !a.Executed() {
		t.Errorf("at the first upstream again: %v", a)
	}
}

// OPEN stays OPEN over an orderly end, in which the configuration is given up too.
func TestCircuitSurvivesAnOrderlyEnd(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	harness.ProcTripped(t, site, upstream).End(t)
	gateway := site.Start(t)
	harness.WantProcRefused(t, gateway, upstream)
	gateway.End(t)
}
