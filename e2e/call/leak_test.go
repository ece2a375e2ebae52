package call

import (
	"fmt"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Nothing is left over of calls that ended in any way, nor of a gateway that was
// stopped: no goroutine, and no file.
func TestNothingLeaks(t *testing.T) {
	mixed(t) // what is made once is made now
	goroutines, files := settled(t), openFiles()
	for range 3 {
		mixed(t)
	}
	harness.Eventually(t, "the goroutines are gone", func() bool { return runtime.NumGoroutine() <= goroutines })
	harness.Eventually(t, "the files are closed", func() bool { return openFiles() <= files })
}

// The file of a spilled body goes with its call, whatever becomes of that.
func TestSpilledBodiesAreFreed(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/reset", harness.Reset)
	u.On("/refused", harness.Status(429, ""))
	g := harness.Start(t, `
	handle /unsent* {
		agent_proxy %s {
			name unsent
		}
	}
	handle {
		agent_proxy %s {
			max_body 3MiB
		}
	}
	handle_errors {
		reverse_proxy /unsent %[2]s
	}`, harness.FreeAddress(t), u.Addr)
	spilled := strings.Repeat("x", 2<<20)
	calls := func() {
		for _, path := range []string{"/ok", "/reset", "/refused", "/unsent", "/unsent/unread"} {
			for range 2 {
				g.Call(harness.Request{Path: path, Id: "k", Body: spilled})
			}
		}
		g.Call(harness.Request{Path: "/ok", Id: "k", Body: spilled + "x"})
		g.Call(harness.Request{Path: "/ok", Id: "a b", Body: spilled})
		if res, err := g.Send(harness.Request{Path: "/ok", Id: "large", Reader: harness.OnlyReader{Reader: strings.NewReader(spilled + spilled)}}); err == nil {
			harness.Read(res).Terminal(t, 413, "body-too-large")
		} // else the answer overtook the rest of the body
		conn := g.Dial()
		harness.Write(t, conn, "POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"+spilled)
		_ = conn.Close()
		harness.Eventually(t, "all calls are over", func() bool { return harness.Waiting("caddymodule.(*Handler).ServeHTTP") == 0 })
	}
	runtime.GC()
	// What nobody closed would be closed by the garbage collector.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	before := unlinkedFiles() // of other tests
	calls()
	harness.Eventually(t, "the files are closed", func() bool { return unlinkedFiles() <= before })
}

// unlinkedFiles counts the open files of this process that have no name any more.
func unlinkedFiles() int {
	const list = "/proc/self/fd/"
	entries, err := os.ReadDir(list)
	if err != nil {
		return 0 // this system has no such list
	}
	n := 0
	for _, e := range entries {
		if name, err := os.Readlink(list + e.Name()); err == nil && strings.HasSuffix(name, " (deleted)") {
			n++
		}
	}
	return n
}

// settled waits until the number of goroutines does not fall any more.
func settled(t *testing.T) int {
	t.Helper()
	least, same := runtime.NumGoroutine(), 0
	harness.Eventually(t, "the goroutines settle", func() bool {
		if n := runtime.NumGoroutine(); n < least {
			least, same = n, 0
		} else {
			same++
		}
		return same > 100
	})
	return least
}

// openFiles counts the files and sockets of this process.
func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0 // this system has no such list
	}
	return len(entries)
}

// mixed runs a gateway, makes calls that end in all ways, and stops it.
func mixed(t *testing.T) {
	t.Run("mixed", func(t *testing.T) {
		u := harness.NewUpstream(t)
		g := harness.Launch(t, harness.Setup{Badger: true, Site: fmt.Sprintf(probing, u.Addr, "")})
		u.On("/reset", harness.Reset)
		u.On("/cut", harness.Raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"))
		u.On("/large", harness.Status(200, strings.Repeat("x", 9<<20)))
		u.On("/kept", harness.Status(200, strings.Repeat("x", 1<<20)))
		u.On("/status/k", harness.Status(202, ""))
		for _, path := range []string{"/ok", "/reset", "/cut", "/large", "/kept"} {
			for range 2 {
				g.Call(harness.Request{Path: path, Id: "k"})
			}
		}
		g.Call(harness.Request{Path: "/spilled", Id: "k", Body: strings.Repeat("x", 3<<20)})
		g.Call(harness.Request{Path: "/ok", Id: "k", Body: "{}"})
		g.Call(harness.Request{Path: "/ok", Id: "a b"})

		s, hold := newSteps(t), harness.NewGate(t)
		u.On("/steps", s.answer)
		u.On("/held", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
		r := harness.Request{Path: "/steps", Id: "k"}
		owner, follower := g.Open(r, "executed"), g.Open(r, "attached")
		s.piece("x", owner.Body, follower.Body)
		_ = owner.Body.Close()
		s.end(follower.Body)

		held := harness.Request{Path: "/held", Id: "k", Client: g.NewClient(nil)}
		leave := g.Leaving(held)
		harness.Wait(t, hold.Arrived, "the call")
		leaveToo := g.Leaving(held)
		harness.Followers(t, 1)
		leaveToo()
		leave()
		owned := g.Begin(harness.Request{Path: "/held", Id: "k", Header: harness.Ann})
		harness.Eventually(t, "the call arrives", func() bool { return u.Arrivals("/held") == 2 })
		state, output := asking("k?wait=60s", harness.Ann), asking("k/output?wait=60s", harness.Ann)
		state.Client, output.Client = g.NewClient(nil), g.NewClient(nil)
		leaveState, leaveOutput := g.Leaving(state), g.Leaving(output)
		awaited(t, 1)
		harness.Followers(t, 1)
		leaveState()
		leaveOutput()
		polled := g.Begin(state)
		awaited(t, 1)
		hold.Open()
		owned.Answer()
		polled.Answer().Execution(t, "k")
		harness.Eventually(t, "all calls are over", func() bool { return harness.Waiting("caddymodule.(*Handler).ServeHTTP") == 0 })
	})
	if t.Failed() {
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
	}
}
