//go:build unix

package operate

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

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// procProtocols are the ways to a gateway.
var procProtocols = map[string]func() *http.Client{
	"h1":  harness.ProcDial,
	"h2c": harness.ProcDialH2,
}

// Section "Exit", P7: at SIGTERM with clients that have gone, executions end and are
// recorded; nothing is in doubt afterwards.
func TestProcessExitKeepsWhatClientsLeft(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		t.Run(name, func(t *testing.T) {
			const calls = 24
			upstream := harness.ProcNewUpstream(t)
			site := harness.ProcNewSite(t, upstream.Addr)
			gateway := site.Start(t)

			ctx, leave := context.WithCancel(t.Context())
			client := dial()
			var holds []*harness.Gate
			var lost []<-chan harness.ProcFuture
			for i := range calls {
				id := fmt.Sprintf("left-%s-%d", name, i)
				hold := upstream.Hold(t, id)
				lost = append(lost, gateway.Begin(ctx, client, harness.ProcCall{Id: id}))
				holds = append(holds, hold)
			}
			for _, hold := range holds {
				harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
			}
			leave()
			for _, f := range lost {
				if f := harness.WaitWithin(t, harness.ProcBound, f, "the client leaves"); f.Err == nil {
					t.Fatal("a client did not leave")
				}
			}
			client.CloseIdleConnections()
			gateway.Term(t)
			harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("exiting; byeee"), "the gateway knows")
			for _, hold := range holds {
				hold.Open()
			}
			gateway.Wait(t)
			if gateway.Err != nil {
				t.Errorf("the gateway ended with %v", gateway.Err)
			}

			gateway = site.Start(t)
			for i := range calls {
				if a := gateway.Post(t, harness.ProcCall{Id: fmt.Sprintf("left-%s-%d", name, i)}); !a.Replayed() || a.Status != http.StatusCreated {
					t.Errorf("P7: the result of a call whose client had gone: %v", a)
				}
			}
			if got := upstream.Total(); got != calls {
				t.Errorf("P1: %d executions, not %d", got, calls)
			}
			gateway.End(t)
		})
	}
}

// Section "Exit": SIGTERM under load. Whoever is served sees the end; whoever is not
// can send again; nothing is in doubt.
func TestProcessExitUnderLoad(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		t.Run(name, func(t *testing.T) {
			upstream := harness.ProcNewUpstream(t)
			site := harness.ProcNewSite(t, upstream.Addr)
			gateway := site.Start(t)
			enough := make(chan struct{})
			upstream.Watch(func(n int) {
				if n == 200 {
					close(enough)
				}
			})

			var mu sync.Mutex
			seen := map[string]harness.ProcAnswer{} // without an answer: open
			var clients sync.WaitGroup
			for worker := range 8 {
				clients.Go(func() {
					client := dial()
					defer client.CloseIdleConnections()
					for n := 0; ; n++ {
						c := harness.ProcCall{Id: fmt.Sprintf("load-%s-%d-%d", name, worker, n)}
						a, err := harness.ProcPost(t.Context(), client, site.Addr, c)
						mu.Lock()
						seen[c.Id] = a
						mu.Unlock()
						if err != nil || a.Execution() == "" {
							if err == nil && a.Problem() != "shutting-down" {
								t.Errorf("%s: %v", c.Id, a)
							}
							return
						}
					}
				})
			}
			harness.WaitWithin(t, harness.ProcBound, enough, "load")
			gateway.End(t)
			clients.Wait()

			gateway = site.Start(t)
			client := harness.ProcDial()
			for id, first := range seen {
				a, err := harness.ProcPost(t.Context(), client, site.Addr, harness.ProcCall{Id: id})
				switch {
				case err != nil:
					t.Fatal(err)
				case first.Execution() != "":
					harness.WantProcReplay(t, first, a)
				case !a.Executed() && !a.Replayed():
					t.Errorf("a call without an answer at a clean exit: %v", a)
				}
			}
			if gateway.Log.Has("executions were open when the last process ended") {
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
				upstream := harness.ProcNewUpstream(t)
				site := harness.ProcNewSite(t, upstream.Addr)
				gateway := site.Start(t)
				done := gateway.Post(t, harness.ProcCall{Id: "done"})

				hold := upstream.Hold(t, "running")
				client := dial()
				owner := gateway.Begin(t.Context(), client, harness.ProcCall{Id: "running"})
				harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
				gateway.Term(t)
				harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("exiting; byeee"), "the gateway knows")

				var refused harness.ProcAnswer
				harness.EventuallyWithin(t, harness.ProcBound, "the gate is shut", func() bool {
					// Until it is, calls run; each has an id of its own.
					a, err := harness.ProcPost(t.Context(), client, site.Addr, harness.ProcCall{Id: fmt.Sprint("late-", upstream.Total())})
					if err != nil {
						t.Fatalf("refused without an answer: %v", err)
					}
					refused = a
					return !a.Executed()
				})
				if refused.Status != http.StatusServiceUnavailable || refused.Problem() != "shutting-down" || refused.Header.Get("Retry-After") == "" {
					t.Errorf("want 503 shutting-down with Retry-After: %v %v", refused, refused.Header)
				}
				harness.WantProcReplay(t, done, gateway.Post(t, harness.ProcCall{Id: "done"}))
				follower := gateway.Begin(t.Context(), client, harness.ProcCall{Id: "running"})
				hold.Open()
				if f := harness.WaitWithin(t, harness.ProcBound, owner, "the running call ends"); f.Err != nil || !f.Answer.Executed() {
					t.Errorf("P7: the running call: %v, %v", f.Answer, f.Err)
				}
				// It came before the result or after it, and got it either way, unless
				// the door closed before it came.
				if f := harness.WaitWithin(t, harness.ProcBound, follower, "the second call ends"); f.Err == nil && f.Answer.Status != http.StatusCreated {
					t.Errorf("a retry of the running call: %v", f.Answer)
				}
				// A connection that came while the server began to stop may be told of it
				// never (net/http, HTTP/2 without TLS), and would be waited for.
				client.CloseIdleConnections()
				gateway.Wait(t)
				if gateway.Err != nil {
					t.Errorf("the gateway ended with %v", gateway.Err)
				}
				if got := upstream.Arrivals("running"); got != 1 {
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
					upstream := harness.ProcNewUpstream(t)
					site := harness.ProcNewSite(t, upstream.Addr)
					site.App = "drain 300ms"
					gateway := site.Start(t)
					hold := upstream.Hold(t, "slow")
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					client := dial()
					owner := gateway.Begin(ctx, client, harness.ProcCall{Id: "slow"})
					harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
					if !stays {
						leave()
						harness.WaitWithin(t, harness.ProcBound, owner, "the client leaves")
						client.CloseIdleConnections()
					}
					began := time.Now()
					gateway.End(t)
					if took := time.Since(began); took < 300*time.Millisecond {
						t.Errorf("it exited after %v, before its drain was over", took)
					}
					if stays {
						if f := harness.WaitWithin(t, harness.ProcBound, owner, "the call ends"); f.Err == nil {
							harness.WantProcDoubt(t, f.Answer)
						}
					}
					hold.Open()
					gateway = site.Start(t)
					harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: "slow"}))
					if got := upstream.Arrivals("slow"); got != 1 {
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
	f := harness.NewFlood(32 << 20)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		f.Answer(w, nil)
	}))
	defer upstream.Close()
	site := harness.ProcNewSite(t, strings.TrimPrefix(upstream.URL, "http://"))
	site.App = "drain 300ms"
	gateway := site.Start(t)
	conn, err := net.Dial("tcp", site.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	harness.Write(t, conn, "POST / HTTP/1.1\r\nHost: "+site.Addr+"\r\nIdempotency-Key: slow\r\nContent-Length: 0\r\n\r\n")
	harness.Wait(t, f.Taken, "the upstream's end")
	again := func() string {
		res, err := http.DefaultClient.Do(procRequest(t, site.Addr, "slow"))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return string(body)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the call is completed", func() bool { return strings.Contains(again(), `"state":"completed"`) })
	http.DefaultClient.CloseIdleConnections()
	gateway.End(t)
	got, err := io.Copy(io.Discard, conn)
	if got >= int64(f.Size) {
		t.Errorf("%d bytes, %v: the client did read all", got, err)
	}
	site.Start(t)
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
