//go:build unix

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// procProtocols are the ways to a gateway.
var procProtocols = map[string]func() *http.Client{
	"h1":  procDial,
	"h2c": procDialH2,
}

// Section "Exit", P7: at SIGTERM with clients that have gone, executions end and are
// recorded; nothing is in doubt afterwards.
func TestProcessExitKeepsWhatClientsLeft(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		t.Run(name, func(t *testing.T) {
			const calls = 24
			upstream := procNewUpstream(t)
			site := procNewSite(t, upstream.addr)
			gateway := site.start(t)

			ctx, leave := context.WithCancel(t.Context())
			client := dial()
			var holds []*gate
			var lost []<-chan procFuture
			for i := range calls {
				id := fmt.Sprintf("left-%s-%d", name, i)
				hold := upstream.hold(t, id)
				lost = append(lost, gateway.begin(ctx, client, procCall{id: id}))
				holds = append(holds, hold)
			}
			for _, hold := range holds {
				waitWithin(t, procBound, hold.arrived, "arrival")
			}
			leave()
			for _, f := range lost {
				if f := waitWithin(t, procBound, f, "the client leaves"); f.err == nil {
					t.Fatal("a client did not leave")
				}
			}
			client.CloseIdleConnections()
			gateway.term(t)
			waitWithin(t, procBound, gateway.log.when("exiting; byeee"), "the gateway knows")
			for _, hold := range holds {
				hold.open()
			}
			gateway.wait(t)
			if gateway.err != nil {
				t.Errorf("the gateway ended with %v", gateway.err)
			}

			gateway = site.start(t)
			for i := range calls {
				if a := gateway.post(t, procCall{id: fmt.Sprintf("left-%s-%d", name, i)}); !a.replayed() || a.status != http.StatusCreated {
					t.Errorf("P7: the result of a call whose client had gone: %v", a)
				}
			}
			if got := upstream.total(); got != calls {
				t.Errorf("P1: %d executions, not %d", got, calls)
			}
			gateway.end(t)
		})
	}
}

// Section "Exit": SIGTERM under load. Whoever is served sees the end; whoever is not
// can send again; nothing is in doubt.
func TestProcessExitUnderLoad(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		t.Run(name, func(t *testing.T) {
			upstream := procNewUpstream(t)
			site := procNewSite(t, upstream.addr)
			gateway := site.start(t)
			enough := make(chan struct{})
			upstream.watch(func(n int) {
				if n == 200 {
					close(enough)
				}
			})

			var mu sync.Mutex
			seen := map[string]procAnswer{} // without an answer: open
			var clients sync.WaitGroup
			for worker := range 8 {
				clients.Go(func() {
					client := dial()
					defer client.CloseIdleConnections()
					for n := 0; ; n++ {
						c := procCall{id: fmt.Sprintf("load-%s-%d-%d", name, worker, n)}
						a, err := procPost(t.Context(), client, site.addr, c)
						mu.Lock()
						seen[c.id] = a
						mu.Unlock()
						if err != nil || a.execution() == "" {
							if err == nil && a.problem() != "shutting-down" {
								t.Errorf("%s: %v", c.id, a)
							}
							return
						}
					}
				})
			}
			waitWithin(t, procBound, enough, "load")
			gateway.end(t)
			clients.Wait()

			gateway = site.start(t)
			client := procDial()
			for id, first := range seen {
				a, err := procPost(t.Context(), client, site.addr, procCall{id: id})
				switch {
				case err != nil:
					t.Fatal(err)
				case first.execution() != "":
					wantProcReplay(t, first, a)
				case !a.executed() && !a.replayed():
					t.Errorf("a call without an answer at a clean exit: %v", a)
				}
			}
			if gateway.log.has("executions were open when the last process ended") {
				t.Error("P6: a clean exit left executions in doubt")
			}
		})
	}
}

// Section "Exit": while running executions are awaited, new guarded calls are refused
// such that they are sent again, and everything else is served.
func TestProcessExitRefusesNewCalls(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		// Caddy stops its apps in no particular order: several exits see both.
		for round := range 2 {
			t.Run(name+"/"+strconv.Itoa(round), func(t *testing.T) {
				upstream := procNewUpstream(t)
				site := procNewSite(t, upstream.addr)
				gateway := site.start(t)
				done := gateway.post(t, procCall{id: "done"})

				hold := upstream.hold(t, "running")
				client := dial()
				owner := gateway.begin(t.Context(), client, procCall{id: "running"})
				waitWithin(t, procBound, hold.arrived, "arrival")
				gateway.term(t)
				waitWithin(t, procBound, gateway.log.when("exiting; byeee"), "the gateway knows")

				var refused procAnswer
				eventuallyWithin(t, procBound, "the gate is shut", func() bool {
					// Until it is, calls run; each has an id of its own.
					a, err := procPost(t.Context(), client, site.addr, procCall{id: fmt.Sprint("late-", upstream.total())})
					if err != nil {
						t.Fatalf("refused without an answer: %v", err)
					}
					refused = a
					return !a.executed()
				})
				if refused.status != http.StatusServiceUnavailable || refused.problem() != "shutting-down" || refused.header.Get("Retry-After") == "" {
					t.Errorf("want 503 shutting-down with Retry-After: %v %v", refused, refused.header)
				}
				wantProcReplay(t, done, gateway.post(t, procCall{id: "done"}))
				follower := gateway.begin(t.Context(), client, procCall{id: "running"})
				hold.open()
				if f := waitWithin(t, procBound, owner, "the running call ends"); f.err != nil || !f.answer.executed() {
					t.Errorf("P7: the running call: %v, %v", f.answer, f.err)
				}
				// It came before the result or after it, and got it either way, unless
				// the door closed before it came.
				if f := waitWithin(t, procBound, follower, "the second call ends"); f.err == nil && f.answer.status != http.StatusCreated {
					t.Errorf("a retry of the running call: %v", f.answer)
				}
				// A connection that came while the server began to stop may be told of it
				// never (net/http, HTTP/2 without TLS), and would be waited for.
				client.CloseIdleConnections()
				gateway.wait(t)
				if gateway.err != nil {
					t.Errorf("the gateway ended with %v", gateway.err)
				}
				if got := upstream.arrivals("running"); got != 1 {
					t.Errorf("P1: %d arrivals", got)
				}
			})
		}
	}
}

// Section "Exit": an upstream that is slower than `drain` does not keep the process.
// Its call is in doubt.
func TestProcessExitLeavesWhatIsTooSlow(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		for _, stays := range []bool{true, false} {
			for round := range 2 { // both orders of the apps' stopping
				t.Run(fmt.Sprintf("%s/client stays %v/%d", name, stays, round), func(t *testing.T) {
					upstream := procNewUpstream(t)
					site := procNewSite(t, upstream.addr)
					site.app = "drain 300ms"
					gateway := site.start(t)
					hold := upstream.hold(t, "slow")
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					client := dial()
					owner := gateway.begin(ctx, client, procCall{id: "slow"})
					waitWithin(t, procBound, hold.arrived, "arrival")
					if !stays {
						leave()
						waitWithin(t, procBound, owner, "the client leaves")
						client.CloseIdleConnections()
					}
					began := time.Now()
					gateway.end(t)
					if took := time.Since(began); took < 300*time.Millisecond {
						t.Errorf("it exited after %v, before its drain was over", took)
					}
					if stays {
						if f := waitWithin(t, procBound, owner, "the call ends"); f.err == nil {
							wantProcDoubt(t, f.answer)
						}
					}
					hold.open()
					gateway = site.start(t)
					wantProcDoubt(t, gateway.post(t, procCall{id: "slow"}))
					if got := upstream.arrivals("slow"); got != 1 {
						t.Errorf("P1: %d arrivals", got)
					}
				})
			}
		}
	}
}

// Section "Exit": a client that reads the answer of a completed call slowly does not keep
// the process for longer than `drain` either, and the record stands.
func TestProcessExitDoesNotWaitForSlowReaders(t *testing.T) {
	t.Parallel() // its gateways are processes
	f := newFlood(32 << 20)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		f.answer(w, nil)
	}))
	defer upstream.Close()
	site := procNewSite(t, strings.TrimPrefix(upstream.URL, "http://"))
	site.app = "drain 300ms"
	gateway := site.start(t)
	conn, err := net.Dial("tcp", site.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	write(t, conn, "POST / HTTP/1.1\r\nHost: "+site.addr+"\r\nIdempotency-Key: slow\r\nContent-Length: 0\r\n\r\n")
	wait(t, f.taken, "the upstream's end")
	again := func() string {
		res, err := http.DefaultClient.Do(procRequest(t, site.addr, "slow"))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return string(body)
	}
	eventuallyWithin(t, procBound, "the call is completed", func() bool { return strings.Contains(again(), `"state":"completed"`) })
	http.DefaultClient.CloseIdleConnections()
	gateway.end(t)
	got, err := io.Copy(io.Discard, conn)
	if got >= int64(f.size) {
		t.Errorf("%d bytes, %v: the client did read all", got, err)
	}
	site.start(t)
	if body := again(); !strings.Contains(body, `"state":"completed"`) {
		t.Errorf("after the restart: %s", body)
	}
}

// procRequest is an empty POST.
func procRequest(t *testing.T, addr, id string) *http.Request {
	t.Helper()
	r, err := http.NewRequest(http.MethodPost, "http://"+addr+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Idempotency-Key", id)
	return r
}
