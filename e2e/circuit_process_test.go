//go:build unix

package e2e

import (
	"net/http"
	"regexp"
	"strings"
	"testing"
)

// circuitUntil is how a log tells of a breaker's state that outlived its process.
var circuitUntil = regexp.MustCompile(`"a circuit breaker was not closed when the last process ended".*"state":"open","until":([0-9.]+),"cause":"connection closed without an answer"`)

// procTripped starts a gateway and opens the breaker of its upstream with two calls.
func procTripped(t *testing.T, site *procSite, upstream *procUpstream) *procGateway {
	t.Helper()
	gateway := site.start(t)
	if a := gateway.post(t, procCall{id: "before"}); !a.executed() {
		t.Fatal(a)
	}
	for _, id := range []string{"lost-1", "lost-2"} {
		upstream.script(id, procLost)
		gateway.post(t, procCall{id: id})
	}
	wantProcRefused(t, gateway, upstream)
	return gateway
}

// wantProcRefused makes a call that the breaker refuses, and a replay that it does not.
func wantProcRefused(t *testing.T, gateway *procGateway, upstream *procUpstream) {
	t.Helper()
	if a := gateway.retry(t, procCall{id: "refused"}); a.problem() != "circuit-open" || a.status != http.StatusServiceUnavailable {
		t.Errorf("while the breaker is open: %v", a)
	}
	if a := gateway.retry(t, procCall{id: "before"}); !a.replayed() {
		t.Errorf("a recorded call while the breaker is open: %v", a)
	}
	if upstream.arrivals("refused") != 0 {
		t.Error("an open breaker has let a call through")
	}
}

// OPEN stays OPEN over a reload with other thresholds, and over
// kill -9 with the same deadline. What the configuration overrules ends with it.
func TestCircuitSurvives(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	gateway := procTripped(t, site, upstream)

	site.guard = "breaker {\n min_volume 50\n cooldown 1s\n}"
	gateway.reload(t)
	wantProcRefused(t, gateway, upstream)

	site.guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	var until string
	for range 2 {
		gateway.kill()
		gateway = site.start(t)
		found := circuitUntil.FindStringSubmatch(gateway.log.String())
		if found == nil {
			t.Fatalf("the log does not tell of the breaker:\n%s", gateway.log.tail(4000))
		}
		second, _, _ := strings.Cut(found[1], ".") // times keep only their wall clock
		if until != "" && until != second {
			t.Errorf("open until %s, and after another kill until %s", until, second)
		}
		until = second
		wantProcRefused(t, gateway, upstream)
	}

	site.operate(t, "circuits", "set", upstream.addr, "forced_closed").says(t)
	if a := gateway.retry(t, procCall{id: "refused"}); !a.executed() || upstream.arrivals("refused") != 1 {
		t.Errorf("forced closed: %v, %d arrivals", a, upstream.arrivals("refused"))
	}
	gateway.end(t)
}

// What an operator says of a breaker holds until it is taken back, over kill -9.
func TestCircuitModeByAnOperator(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	if a := gateway.post(t, procCall{id: "before"}); !a.executed() {
		t.Fatal(a)
	}
	site.operate(t, "circuits", "set", upstream.addr, "forced_open").says(t)
	wantProcRefused(t, gateway, upstream)
	gateway.kill()
	gateway = site.start(t)
	wantProcRefused(t, gateway, upstream)
	site.operate(t, "circuits", "set", "127.0.0.1:1", "auto").fails(t, `the upstream "127.0.0.1:1" has no circuit breaker`)
	site.operate(t, "circuits", "set", upstream.addr, "observe").says(t)
	for _, id := range []string{"lost-1", "lost-2"} {
		upstream.script(id, procLost)
		gateway.post(t, procCall{id: id})
	}
	gateway.kill()
	gateway = site.start(t)
	if out := site.operate(t, "circuits", "list").says(t); !strings.Contains(out, upstream.addr) || !strings.Contains(out, "observe") {
		t.Errorf("after a kill:\n%s", out)
	}
	if a := gateway.retry(t, procCall{id: "refused"}); !a.executed() || upstream.arrivals("refused") != 1 {
		t.Errorf("observed: %v, %d arrivals", a, upstream.arrivals("refused"))
	}
	gateway.end(t)
}

// An upstream that the configuration has no more is forgotten.
func TestCircuitOfAnUpstreamThatIsGone(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, other := procNewUpstream(t), procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	gateway := procTripped(t, site, upstream)
	site.upstream = other.addr
	gateway.reload(t)
	if a := gateway.retry(t, procCall{id: "refused"}); !a.executed() {
		t.Errorf("at the other upstream: %v", a)
	}
	if !gateway.log.says("no configuration leads to its upstream any more") {
		t.Error("the log does not tell that a breaker was forgotten")
	}
	// With the upstream at once, so that only the reload can have made it forgotten.
	gateway.kill()
	site.upstream = upstream.addr
	gateway = site.start(t)
	if circuitUntil.MatchString(gateway.log.String()) {
		t.Error("the state of a breaker whose upstream was gone is restored")
	}
	if a := gateway.retry(t, procCall{id: "back"}); !a.executed() {
		t.Errorf("at the first upstream again: %v", a)
	}
}

// OPEN stays OPEN over an orderly end, in which the configuration is given up too.
func TestCircuitSurvivesAnOrderlyEnd(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.guard = "breaker {\n consecutive 2\n cooldown 10h\n}"
	procTripped(t, site, upstream).end(t)
	gateway := site.start(t)
	wantProcRefused(t, gateway, upstream)
	gateway.end(t)
}
