//go:build unix

package e2e

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
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
		{point: "before outcome", header: map[string]string{procChunked: "yes"}, arrivals: 1, want: procDoubt},
		{point: "after outcome", header: map[string]string{procChunked: "yes"}, arrivals: 1, want: procReplay},
		{point: "before outcome", header: map[string]string{procStatus: "204"}, arrivals: 1, want: procDoubt},
		{point: "after outcome", header: map[string]string{procStatus: "204"}, arrivals: 1, want: procReplay},
		{point: "after outcome", header: map[string]string{procSize: "5000"}, arrivals: 1, want: procReplay},
		{point: "before piece", header: map[string]string{procSize: "600000"}, arrivals: 1, want: procDoubt},
		{point: "after piece", header: map[string]string{procSize: "600000"}, arrivals: 1, want: procDoubt},
		{point: "before outcome", header: map[string]string{procSize: "600000"}, arrivals: 1, want: procDoubt},
		{point: "after outcome", header: map[string]string{procSize: "600000"}, arrivals: 1, want: procReplay},
		{point: "before release", id: procTwice + "a", header: map[string]string{procStatus: "429"}, arrivals: 1, want: procDoubt},
		{point: "after release", id: procTwice + "b", header: map[string]string{procStatus: "429"}, arrivals: 1, want: procFree},
	}
	upstream := procNewUpstream(t)
	stages := procNewStages(t)
	site := procNewSite(t, upstream.addr)
	site.store = "staged " + site.path("data") + " " + stages.url
	gateway := site.start(t)
	for i, test := range tests {
		name := test.point
		for k, v := range test.header {
			name += " " + strings.TrimPrefix(k, "X-Answer-") + "=" + v
		}
		// One store for all: what an earlier crash left behind must not matter.
		t.Run(name, func(t *testing.T) {
			c := procCall{id: test.id, header: test.header}
			if c.id == "" {
				c.id = "call-" + string(rune('a'+i))
			}
			if !gateway.alive() { // the test before has failed
				gateway = site.start(t)
			}
			first := gateway.post(t, procCall{id: c.id + "-before", header: map[string]string{procSize: "5000"}})
			reached := stages.arm(test.point)
			lost := gateway.begin(t.Context(), procDial(), c)
			waitWithin(t, procBound, reached, test.point)
			gateway.kill()
			if f := waitWithin(t, procBound, lost, "the call ends"); f.err == nil {
				t.Errorf("P7: the client saw the end of an answer that waited for its commit: %v", f.answer)
			}
			if got := upstream.arrivals(c.id); got != test.arrivals {
				t.Fatalf("%d arrivals at the kill, not %d", got, test.arrivals)
			}

			gateway = site.start(t)
			for range 2 {
				a := gateway.post(t, procCall{id: c.id, header: test.header})
				switch test.want {
				case procDoubt:
					wantProcDoubt(t, a)
				case procFree:
					if !a.executed() && !a.replayed() && a.status != http.StatusTooManyRequests {
						t.Errorf("want it to run: %v", a)
					}
				case procReplay:
					if !a.replayed() {
						t.Errorf("want a replay: %v", a)
					}
				}
			}
			want := test.arrivals
			if test.want == procFree {
				want++
				if strings.HasPrefix(c.id, procTwice) {
					want++ // 429 is never recorded: both retries ran
				}
			}
			if got := upstream.arrivals(c.id); got != want {
				t.Errorf("P1: %d arrivals in all, not %d", got, want)
			}
			wantProcReplay(t, first, gateway.post(t, procCall{id: c.id + "-before", header: map[string]string{procSize: "5000"}}))
		})
	}
}

// P1: SIGKILL while the upstream decides the moment.
func TestCrashWhileTheUpstreamWorks(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.guard = "flush_interval -1" // Caddy holds small answers of known length back
	gateway := site.start(t)

	t.Run("before the answer", func(t *testing.T) {
		hold := upstream.hold(t, "held")
		lost := gateway.begin(t.Context(), procDial(), procCall{id: "held"})
		waitWithin(t, procBound, hold.arrived, "arrival")
		gateway.kill()
		waitWithin(t, procBound, lost, "the call ends")
		hold.open()
		gateway = site.start(t)
		wantProcDoubt(t, gateway.post(t, procCall{id: "held"}))
	})

	t.Run("between header and body", func(t *testing.T) {
		release := make(chan struct{})
		t.Cleanup(func() { close(release) })
		upstream.script("torn", func(w http.ResponseWriter, _ *http.Request, effect int) {
			w.Header().Set("Content-Length", "1000")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "first half")
			_ = http.NewResponseController(w).Flush()
			<-release
		})
		// The bytes flow at once (P7), so the client knows that the upstream answers.
		resp, err := procSend(t.Context(), procDial(), site.addr, procCall{id: "torn"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		gateway.kill()
		if _, err := io.ReadAll(resp.Body); err == nil {
			t.Error("the client took a torn answer for a whole one")
		}
		gateway = site.start(t)
		wantProcDoubt(t, gateway.post(t, procCall{id: "torn"}))
	})

	t.Run("at the end of the answer", func(t *testing.T) {
		for _, header := range []map[string]string{nil, {procChunked: "yes"}, {procStatus: "204"}, {procSize: "600000"}} {
			c := procCall{id: "seen-" + header[procChunked] + header[procStatus] + header[procSize], header: header}
			first := gateway.post(t, c)
			gateway.kill() // the end was seen a moment ago
			gateway = site.start(t)
			wantProcReplay(t, first, gateway.post(t, c))
		}
	})

	t.Run("before it reads anything", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		gateway.end(t)
		site.upstream = l.Addr().String()
		gateway = site.start(t)
		accepted := make(chan net.Conn, 1)
		go func() {
			if conn, err := l.Accept(); err == nil {
				accepted <- conn
			}
		}()
		lost := gateway.begin(t.Context(), procDial(), procCall{id: "unread"})
		conn := waitWithin(t, procBound, accepted, "a connection")
		gateway.kill()
		_ = conn.Close()
		waitWithin(t, procBound, lost, "the call ends")

		site.upstream = upstream.addr
		gateway = site.start(t)
		wantProcDoubt(t, gateway.post(t, procCall{id: "unread"}))
		if got := upstream.arrivals("unread"); got != 0 {
			t.Errorf("P1: %d arrivals after the kill", got)
		}
	})
}

// P1: SIGKILL while the gateway recovers what a kill before left behind, and while
// a store is made for the first time.
func TestCrashWhileStarting(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	stages := procNewStages(t)
	site := procNewSite(t, upstream.addr)
	site.store = "staged " + site.path("data") + " " + stages.url

	killAt := func(point string) {
		t.Helper()
		reached := stages.arm(point)
		gateway := site.launch(t)
		waitWithin(t, procBound, reached, point)
		gateway.kill()
	}
	for _, point := range []string{"before open", "after open", "before christening", "after christening"} {
		killAt(point)
	}
	gateway := site.start(t)
	first := gateway.post(t, procCall{id: "done"})
	var ids []string
	var lost []<-chan procFuture
	for _, id := range []string{"open-1", "open-2", "open-3"} {
		hold := upstream.hold(t, id)
		lost = append(lost, gateway.begin(t.Context(), procDial(), procCall{id: id}))
		waitWithin(t, procBound, hold.arrived, "arrival")
		ids = append(ids, id)
	}
	gateway.kill()
	for _, f := range lost {
		waitWithin(t, procBound, f, "the call ends")
	}
	// Three executions were open: each kill lets one more of them be recovered.
	for _, point := range []string{"after open", "before outcome", "after outcome", "before outcome", "after outcome"} {
		killAt(point)
	}
	gateway = site.start(t)
	for _, id := range ids {
		wantProcDoubt(t, gateway.post(t, procCall{id: id}))
	}
	wantProcReplay(t, first, gateway.post(t, procCall{id: "done"}))
	if got := upstream.total(); got != 4 {
		t.Errorf("P1: %d executions, not 4", got)
	}
}

// Attached callers of a killed execution see no end either.
func TestCrashCutsThoseAttached(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	stages := procNewStages(t)
	site := procNewSite(t, upstream.addr)
	site.store = "staged " + site.path("data") + " " + stages.url
	gateway := site.start(t)

	hold := upstream.hold(t, "shared")
	reached := stages.arm("before outcome")
	ctx, cancel := context.WithTimeout(t.Context(), procBound)
	defer cancel()
	calls := []<-chan procFuture{gateway.begin(ctx, procDial(), procCall{id: "shared"})}
	waitWithin(t, procBound, hold.arrived, "arrival")
	for range 4 {
		calls = append(calls, gateway.begin(ctx, procDial(), procCall{id: "shared"}))
	}
	hold.open()
	waitWithin(t, procBound, reached, "before outcome")
	gateway.kill()
	for i, c := range calls {
		if f := waitWithin(t, procBound, c, "the call ends"); f.err == nil {
			t.Errorf("P7: caller %d saw an end before the commit: %v", i, f.answer)
		}
	}
	gateway = site.start(t)
	wantProcDoubt(t, gateway.post(t, procCall{id: "shared"}))
	if got := upstream.arrivals("shared"); got != 1 {
		t.Errorf("P1: %d arrivals", got)
	}
}
