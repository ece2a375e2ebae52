//go:build unix

package crash

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// procAfter is what a retry must meet after the gateway was killed and started again.
type procAfter string

const (
	procFree   procAfter = "free"   // it runs, once
	procDoubt  procAfter = "doubt"  // 409, it never runs
	procReplay procAfter = "replay" // the recorded answer
)

// P1, P2, P6: SIGKILL at each named point around the commits of a call.
func TestCrashAroundCommits(t *testing.T) {
	t.Parallel() // its gateways are processes
	tests := []struct {
		point    string
		header   map[string]string
		id       string
		arrivals int // when the gateway was killed
		want     procAfter
	}{
		{point: "before claim", arrivals: 0, want: procFree},
		// The claim says "sending" at once: what was not sent cannot be told from
		// what was.
		{point: "after claim", arrivals: 0, want: procDoubt},
		{point: "before outcome", arrivals: 1, want: procDoubt},
		{point: "after outcome", arrivals: 1, want: procReplay},
		{point: "before outcome", header: map[string]string{harness.ProcChunked: "yes"}, arrivals: 1, want: procDoubt},
		{point: "after outcome", header: map[string]string{harness.ProcChunked: "yes"}, arrivals: 1, want: procReplay},
		{point: "before outcome", header: map[string]string{harness.ProcStatus: "204"}, arrivals: 1, want: procDoubt},
		{point: "after outcome", header: map[string]string{harness.ProcStatus: "204"}, arrivals: 1, want: procReplay},
		{point: "after outcome", header: map[string]string{harness.ProcSize: "5000"}, arrivals: 1, want: procReplay},
		{point: "before piece", header: map[string]string{harness.ProcSize: "600000"}, arrivals: 1, want: procDoubt},
		{point: "after piece", header: map[string]string{harness.ProcSize: "600000"}, arrivals: 1, want: procDoubt},
		{point: "before outcome", header: map[string]string{harness.ProcSize: "600000"}, arrivals: 1, want: procDoubt},
		{point: "after outcome", header: map[string]string{harness.ProcSize: "600000"}, arrivals: 1, want: procReplay},
		{point: "before release", id: harness.ProcTwice + "a", header: map[string]string{harness.ProcStatus: "429"}, arrivals: 1, want: procDoubt},
		{point: "after release", id: harness.ProcTwice + "b", header: map[string]string{harness.ProcStatus: "429"}, arrivals: 1, want: procFree},
	}
	upstream := harness.ProcNewUpstream(t)
	stages := harness.ProcNewStages(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Store = "staged " + site.Path("data") + " " + stages.Url
	gateway := site.Start(t)
	for i, test := range tests {
		name := test.point
		for k, v := range test.header {
			name += " " + strings.TrimPrefix(k, "X-Answer-") + "=" + v
		}
		// One store for all: what an earlier crash left behind must not matter.
		t.Run(name, func(t *testing.T) {
			c := harness.ProcCall{Id: test.id, Header: test.header}
			if c.Id == "" {
				c.Id = "call-" + string(rune('a'+i))
			}
			if !gateway.Alive() { // the test before has failed
				gateway = site.Start(t)
			}
			first := gateway.Post(t, harness.ProcCall{Id: c.Id + "-before", Header: map[string]string{harness.ProcSize: "5000"}})
			reached := stages.Arm(test.point)
			lost := gateway.Begin(t.Context(), harness.ProcDial(), c)
			harness.WaitWithin(t, harness.ProcBound, reached, test.point)
			gateway.Kill()
			if f := harness.WaitWithin(t, harness.ProcBound, lost, "the call ends"); f.Err == nil {
				t.Errorf("P7: the client saw the end of an answer that waited for its commit: %v", f.Answer)
			}
			if got := upstream.Arrivals(c.Id); got != test.arrivals {
				t.Fatalf("%d arrivals at the kill, not %d", got, test.arrivals)
			}

			gateway = site.Start(t)
			for range 2 {
				a := gateway.Post(t, harness.ProcCall{Id: c.Id, Header: test.header})
				switch test.want {
				case procDoubt:
					harness.WantProcDoubt(t, a)
				case procFree:
					if !a.Executed() && !a.Replayed() && a.Status != http.StatusTooManyRequests {
						t.Errorf("want it to run: %v", a)
					}
				case procReplay:
					if !a.Replayed() {
						t.Errorf("want a replay: %v", a)
					}
				}
			}
			want := test.arrivals
			if test.want == procFree {
				want++
				if strings.HasPrefix(c.Id, harness.ProcTwice) {
					want++ // 429 is never recorded: both retries ran
				}
			}
			if got := upstream.Arrivals(c.Id); got != want {
				t.Errorf("P1: %d arrivals in all, not %d", got, want)
			}
			harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: c.Id + "-before", Header: map[string]string{harness.ProcSize: "5000"}}))
		})
	}
}

// P1: SIGKILL while the upstream decides the moment.
func TestCrashWhileTheUpstreamWorks(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Guard = "flush_interval -1" // Caddy holds small answers of known length back
	gateway := site.Start(t)

	t.Run("before the answer", func(t *testing.T) {
		hold := upstream.Hold(t, "held")
		lost := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "held"})
		harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
		gateway.Kill()
		harness.WaitWithin(t, harness.ProcBound, lost, "the call ends")
		hold.Open()
		gateway = site.Start(t)
		harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: "held"}))
	})

	t.Run("between header and body", func(t *testing.T) {
		release := make(chan struct{})
		t.Cleanup(func() { close(release) })
		upstream.Script("torn", func(w http.ResponseWriter, _ *http.Request, effect int) {
			w.Header().Set("Content-Length", "1000")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "first half")
			_ = http.NewResponseController(w).Flush()
			<-release
		})
		// The bytes flow at once (P7), so the client knows that the upstream answers.
		resp, err := harness.ProcSend(t.Context(), harness.ProcDial(), site.Addr, harness.ProcCall{Id: "torn"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		gateway.Kill()
		if _, err := io.ReadAll(resp.Body); err == nil {
			t.Error("the client took a torn answer for a whole one")
		}
		gateway = site.Start(t)
		harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: "torn"}))
	})

	t.Run("at the end of the answer", func(t *testing.T) {
		for _, header := range []map[string]string{nil, {harness.ProcChunked: "yes"}, {harness.ProcStatus: "204"}, {harness.ProcSize: "600000"}} {
			c := harness.ProcCall{Id: "seen-" + header[harness.ProcChunked] + header[harness.ProcStatus] + header[harness.ProcSize], Header: header}
			first := gateway.Post(t, c)
			gateway.Kill() // the end was seen a moment ago
			gateway = site.Start(t)
			harness.WantProcReplay(t, first, gateway.Post(t, c))
		}
	})

	t.Run("before it reads anything", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		gateway.End(t)
		site.Upstream = l.Addr().String()
		gateway = site.Start(t)
		accepted := make(chan net.Conn, 1)
		go func() {
			if conn, err := l.Accept(); err == nil {
				accepted <- conn
			}
		}()
		lost := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "unread"})
		conn := harness.WaitWithin(t, harness.ProcBound, accepted, "a connection")
		gateway.Kill()
		_ = conn.Close()
		harness.WaitWithin(t, harness.ProcBound, lost, "the call ends")

		site.Upstream = upstream.Addr
		gateway = site.Start(t)
		harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: "unread"}))
		if got := upstream.Arrivals("unread"); got != 0 {
			t.Errorf("P1: %d arrivals after the kill", got)
		}
	})
}

// P1: SIGKILL while the gateway recovers what a kill before left behind, and while
// a store is made for the first time.
func TestCrashWhileStarting(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	stages := harness.ProcNewStages(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Store = "staged " + site.Path("data") + " " + stages.Url

	killAt := func(point string) {
		t.Helper()
		reached := stages.Arm(point)
		gateway := site.Launch(t)
		harness.WaitWithin(t, harness.ProcBound, reached, point)
		gateway.Kill()
	}
	for _, point := range []string{"before open", "after open", "before christening", "after christening"} {
		killAt(point)
	}
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "done"})
	var ids []string
	var lost []<-chan harness.ProcFuture
	for _, id := range []string{"open-1", "open-2", "open-3"} {
		hold := upstream.Hold(t, id)
		lost = append(lost, gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: id}))
		harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
		ids = append(ids, id)
	}
	gateway.Kill()
	for _, f := range lost {
		harness.WaitWithin(t, harness.ProcBound, f, "the call ends")
	}
	// Three executions were open: each kill lets one more of them be recovered.
	for _, point := range []string{"after open", "before outcome", "after outcome", "before outcome", "after outcome"} {
		killAt(point)
	}
	gateway = site.Start(t)
	for _, id := range ids {
		harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: id}))
	}
	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "done"}))
	if got := upstream.Total(); got != 4 {
		t.Errorf("P1: %d executions, not 4", got)
	}
}

// Attached callers of a killed execution see no end either.
func TestCrashCutsThoseAttached(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	stages := harness.ProcNewStages(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Store = "staged " + site.Path("data") + " " + stages.Url
	gateway := site.Start(t)

	hold := upstream.Hold(t, "shared")
	reached := stages.Arm("before outcome")
	ctx, cancel := context.WithTimeout(t.Context(), harness.ProcBound)
	defer cancel()
	calls := []<-chan harness.ProcFuture{gateway.Begin(ctx, harness.ProcDial(), harness.ProcCall{Id: "shared"})}
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	for range 4 {
		calls = append(calls, gateway.Begin(ctx, harness.ProcDial(), harness.ProcCall{Id: "shared"}))
	}
	hold.Open()
	harness.WaitWithin(t, harness.ProcBound, reached, "before outcome")
	gateway.Kill()
	for i, c := range calls {
		if f := harness.WaitWithin(t, harness.ProcBound, c, "the call ends"); f.Err == nil {
			t.Errorf("P7: caller %d saw an end before the commit: %v", i, f.Answer)
		}
	}
	gateway = site.Start(t)
	harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: "shared"}))
	if got := upstream.Arrivals("shared"); got != 1 {
		t.Errorf("P1: %d arrivals", got)
	}
}
