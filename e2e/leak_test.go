package e2e

import (
	"fmt"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"testing"
)

// Nothing is left over of calls that ended in any way, nor of a gateway that was
// stopped: no goroutine, and no file.
func TestNothingLeaks(t *testing.T) {
	mixed(t) // what is made once is made now
	goroutines, files := settled(t), openFiles()
	for range 3 {
		mixed(t)
	}
	eventually(t, "the goroutines are gone", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "the files are closed", func() bool { return openFiles() <= files })
}

// The file of a spilled body goes with its call, whatever becomes of that.
func TestSpilledBodiesAreFreed(t *testing.T) {
	u := newUpstream(t)
	u.on("/reset", reset)
	u.on("/refused", status(429, ""))
	g := start(t, `
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
	}`, freeAddress(t), u.addr)
	spilled := strings.Repeat("x", 2<<20)
	calls := func() {
		for _, path := range []string{"/ok", "/reset", "/refused", "/unsent", "/unsent/unread"} {
			for range 2 {
				g.call(request{path: path, id: "k", body: spilled})
			}
		}
		g.call(request{path: "/ok", id: "k", body: spilled + "x"})
		g.call(request{path: "/ok", id: "a b", body: spilled})
		if res, err := g.send(request{path: "/ok", id: "large", reader: onlyReader{strings.NewReader(spilled + spilled)}}); err == nil {
			read(res).terminal(t, 413, "body-too-large")
		} // else the answer overtook the rest of the body
		conn := g.dial()
		write(t, conn, "POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"+spilled)
		_ = conn.Close()
		eventually(t, "all calls are over", func() bool { return waiting("caddymodule.(*Handler).ServeHTTP") == 0 })
	}
	runtime.GC()
	// What nobody closed would be closed by the garbage collector.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	before := unlinkedFiles() // of other tests
	calls()
	eventually(t, "the files are closed", func() bool { return unlinkedFiles() <= before })
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
	eventually(t, "the goroutines settle", func() bool {
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
		u := newUpstream(t)
		g := launch(t, setup{badger: true, site: fmt.Sprintf(probing, u.addr, "")})
		u.on("/reset", reset)
		u.on("/cut", raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"))
		u.on("/large", status(200, strings.Repeat("x", 9<<20)))
		u.on("/kept", status(200, strings.Repeat("x", 1<<20)))
		u.on("/status/k", status(202, ""))
		for _, path := range []string{"/ok", "/reset", "/cut", "/large", "/kept"} {
			for range 2 {
				g.call(request{path: path, id: "k"})
			}
		}
		g.call(request{path: "/spilled", id: "k", body: strings.Repeat("x", 3<<20)})
		g.call(request{path: "/ok", id: "k", body: "{}"})
		g.call(request{path: "/ok", id: "a b"})

		s, hold := newSteps(t), newGate(t)
		u.on("/steps", s.answer)
		u.on("/held", func(http.ResponseWriter, *arrival) { hold.pass() })
		r := request{path: "/steps", id: "k"}
		owner, follower := g.open(r, "executed"), g.open(r, "attached")
		s.piece("x", owner.Body, follower.Body)
		_ = owner.Body.Close()
		s.end(follower.Body)

		held := request{path: "/held", id: "k", client: g.newClient(nil)}
		leave := g.leaving(held)
		wait(t, hold.arrived, "the call")
		leaveToo := g.leaving(held)
		followers(t, 1)
		leaveToo()
		leave()
		owned := g.begin(request{path: "/held", id: "k", header: ann})
		eventually(t, "the call arrives", func() bool { return u.arrivals("/held") == 2 })
		state, output := asking("k?wait=60s", ann), asking("k/output?wait=60s", ann)
		state.client, output.client = g.newClient(nil), g.newClient(nil)
		leaveState, leaveOutput := g.leaving(state), g.leaving(output)
		awaited(t, 1)
		followers(t, 1)
		leaveState()
		leaveOutput()
		polled := g.begin(state)
		awaited(t, 1)
		hold.open()
		owned.answer()
		polled.answer().execution(t, "k")
		eventually(t, "all calls are over", func() bool { return waiting("caddymodule.(*Handler).ServeHTTP") == 0 })
	})
	if t.Failed() {
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
	}
}
