package rollback

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// ownCircuit is the breaker of what the gateway calls on its own account.
func ownCircuit(t *testing.T, address string) breaker.Status {
	t.Helper()
	m := proxy.Join()
	defer m.Leave()
	for _, s := range m.Status() {
		if s.Key == (breaker.Key{Upstream: address, Class: "undo"}) {
			return s
		}
	}
	return breaker.Status{}
}

func forceOwn(t *testing.T, address string, mode breaker.Mode) {
	t.Helper()
	m := proxy.Join()
	defer m.Leave()
	if !m.SetMode(breaker.Key{Upstream: address, Class: "undo"}, mode) {
		t.Fatalf("%s has no breaker", address)
	}
}

// slowPace bounds what undos do at their own intervals, which grow up to a minute.
const slowPace = 4 * time.Minute

// warnings is the gateway's log, and the option that writes it.
func warnings(t *testing.T) (read func() string, option string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log")
	return func() string {
		text, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return string(text)
	}, fmt.Sprintf("log warnings {\n output file %s\n format json\n level WARN\n}", path)
}

// cascade 3.2, ADR 0053: an agent to which undos are delegated, and a server to which they go
// by a whole URL, has a breaker. While it is open nothing reaches it; the probe lets the
// rollbacks complete.
func TestRollbackBreakerOfWholeURLs(t *testing.T) {
	a, ops := harness.NewAgent(t, "a"), harness.NewAgent(t, "ops")
	u, other := harness.NewUpstream(t), harness.NewUpstream(t)
	log, option := warnings(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, ops), Global: option, Site: fmt.Sprintf(`agent_proxy %s {
		operators issuer:spiffe://example.com/agent/ops
		action delegated {
			match path /delegated
			delegate http://%[2]s/undo unsigned
		}
		action compensated {
			match path /compensated
			compensate POST http://%[2]s/undo
		}
	}`, u.Addr, other.Addr)})
	other.On("/undo", harness.Status(503, ""))
	s := g.Saga(a)
	var all []harness.RollbackBody
	for i, path := range []string{"/delegated", "/compensated", "/delegated", "/compensated", "/delegated"} {
		step := s.Do(harness.Request{Path: path})
		all = append(all, harness.RollbackBody{ID: harness.RollbackID(i + 1), Checkpoint: step.Checkpoint, Reason: "wrong"})
	}
	for _, b := range all {
		s.Begun(b)
	}
	harness.Eventually(t, "five failures open the breaker", func() bool { return ownCircuit(t, other.Addr).State == breaker.Open })
	shown := false
	for _, c := range harness.Document[harness.CircuitsView](t, g.Get(ops, "circuits?state=open")).Circuits {
		shown = shown || c.Upstream == other.Addr && c.Cause == "status 503"
	}
	if !shown {
		t.Error("the document does not show it")
	}
	if harness.Circuit(t, u.Addr).State != breaker.Closed {
		t.Error("undos count for the upstream of the calls")
	}

	// No cooldown ends while nobody looks.
	forceOwn(t, other.Addr, breaker.ForcedOpen)
	refused := func(checkpoint string) int {
		n := 0
		for _, line := range strings.Split(log(), "\n") {
			if strings.Contains(line, checkpoint) && strings.Contains(line, "was not sent") {
				n++
			}
		}
		return n
	}
	before := map[string]int{}
	for _, b := range all {
		before[b.Checkpoint] = refused(b.Checkpoint)
	}
	for _, b := range all { // each has no request under way any more
		harness.EventuallyWithin(t, slowPace, "the undo is refused", func() bool { return refused(b.Checkpoint) > before[b.Checkpoint] })
	}
	arrived, rejected := other.Arrivals("/undo"), ownCircuit(t, other.Addr).Rejected
	harness.EventuallyWithin(t, slowPace, "more are refused", func() bool { return ownCircuit(t, other.Addr).Rejected >= rejected+2 })
	other.Arrived("/undo", arrived)

	hold := harness.NewGate(t)
	other.On("/undo", func(w http.ResponseWriter, _ *harness.Arrival) {
		hold.Pass()
		w.WriteHeader(http.StatusOK)
	})
	forceOwn(t, other.Addr, breaker.Auto)
	harness.EventuallyWithin(t, slowPace, "the probe", func() bool { return other.Arrivals("/undo") > arrived })
	rejected = ownCircuit(t, other.Addr).Rejected
	harness.EventuallyWithin(t, slowPace, "another is refused beside the probe", func() bool { return ownCircuit(t, other.Addr).Rejected > rejected })
	other.Arrived("/undo", arrived+1)
	hold.Open()
	for _, b := range all {
		harness.EventuallyWithin(t, slowPace, "the rollback ends", func() bool {
			return harness.Document[harness.RollbackDoc](t, s.Look(b.ID+"?wait=10s")).Status != ""
		})
		s.Finished(b.ID).Want(t, "completed")
	}
	other.Arrived("/undo", arrived+len(all))
	if got := ownCircuit(t, other.Addr).State; got != breaker.Closed {
		t.Errorf("the breaker is %v", got)
	}
}

// cascade 3.2: a load says where guarded calls come to an upstream without a breaker.
func TestWarningOfAProxyWithoutABreaker(t *testing.T) {
	const plain, ours = "reverse_proxy 127.0.0.1:1", "reverse_proxy 127.0.0.1:1 {\n transport agent_guard\n}"
	for name, c := range map[string]struct {
		site string
		want int
	}{
		"plain":                      {"agent_guard\n" + plain, 1},
		"plain in a route":           {"agent_guard\nhandle /x {\n" + plain + "\n}", 1},
		"with our transport":         {"agent_guard\n" + ours, 0},
		"agent_proxy":                {"agent_proxy 127.0.0.1:1", 0},
		"beside a guard":             {"handle /x {\nagent_proxy 127.0.0.1:1\n}\nhandle {\n" + plain + "\n}", 0},
		"behind what always answers": {"@x path /x\nagent_proxy @x 127.0.0.1:1\n" + plain, 0},
		"asks about a call":          {"route {\nagent_guard\nforward_auth 127.0.0.1:1 {\n uri /auth\n}\n" + ours + "\n}", 0},
	} {
		t.Run(name, func(t *testing.T) {
			log, option := warnings(t)
			harness.Launch(t, harness.Setup{Global: option, Site: c.site})
			var got []string
			for _, line := range strings.Split(log(), "\n") {
				if strings.Contains(line, "has no circuit breaker") {
					got = append(got, line)
				}
			}
			if len(got) != c.want || c.want > 0 && !(strings.Contains(got[0], "`transport agent_guard`") &&
				strings.Contains(got[0], `"route":"srv0/routes/`) && strings.Contains(got[0], "127.0.0.1:1")) {
				t.Errorf("%d warnings, want %d: %v", len(got), c.want, got)
			}
		})
	}
}
