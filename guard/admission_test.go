package guard_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// withBulkhead has the guard of b share its upstream.
func (b *bed) withBulkhead(s bulkhead.Settings) *bulkhead.Pool {
	b.Helper()
	checked, err := s.Check()
	if err != nil {
		b.Fatal(err)
	}
	b.config.Bulkhead = bulkhead.New(checked)
	b.start()
	return b.config.Bulkhead
}

// of is a call of a workflow, with its own id.
func (b *bed) of(workflow, id string, fields ...string) *http.Request {
	r := b.post("a")
	r.Header.Set("Idempotency-Key", id)
	if workflow != "" {
		r.Header.Set("Workflow-Id", workflow)
	}
	for i := 0; i < len(fields); i += 2 {
		r.Header.Set(fields[i], fields[i+1])
	}
	return r
}

func (b *bed) returned(p *bulkhead.Pool) {
	b.Helper()
	if s := p.Status(); s.InUse != 0 || s.Waiting != 0 {
		b.Errorf("in the end %d permits are held, and %d calls wait", s.InUse, s.Waiting)
	}
}

// ADR 0137: of gateways that share a store each has a bulkhead of its own, with all of its limits; what callers may have
// open is bounded for all of them together.
func TestBulkheadsOfAFleet(t *testing.T) {
	for name, c := range map[string]struct {
		settings bulkhead.Settings
		quota    execution.Quota
		each     int
		all      int64
	}{
		"rate":            {bulkhead.Settings{Rate: 2}, execution.Quota{}, 2, 4},
		"per_workflow":    {bulkhead.Settings{PerWorkflow: 3, Queue: -1}, execution.Quota{}, 3, 6},
		"open_executions": {bulkhead.Settings{}, execution.Quota{Open: 3}, 3, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, slowly)
				b.config.Quota = c.quota
				var all sync.WaitGroup
				for _, node := range []string{"one", "two"} {
					checked, err := c.settings.Check()
					if err != nil {
						t.Fatal(err)
					}
					b.config.Bulkhead = bulkhead.New(checked)
					n := b.node(b.disk.Join(node))
					for i := range c.each + 1 {
						all.Go(func() { n.guard.ServeHTTP(httptest.NewRecorder(), n.of("w", fmt.Sprint(node, i))) })
						synctest.Wait()
					}
				}
				all.Wait()
				b.was(c.all)
			})
		})
	}
}

// A call that gets no permit was not sent, and its key stays free.
func TestBulkheadFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		p := b.withBulkhead(bulkhead.Settings{Total: 1, Queue: -1})
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "1"), "200 executed charge 1") })
		synctest.Wait()
		w := httptest.NewRecorder()
		b.serve(w, b.of("v", "2"))
		if w.Code != 429 || w.Header().Get("Retry-After") != "1" || w.Header().Get("Execution-Status") != "refused" ||
			!strings.Contains(w.Body.String(), `/problems/bulkhead-full"`) || !strings.Contains(w.Body.String(), `"reason":"queue_full"`) ||
			!strings.Contains(w.Body.String(), `"safe_new_key":true`) || !strings.Contains(w.Body.String(), `"execution_id":"2"`) {
			t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
		}
		// What reads only needs a permit too; what was recorded does not.
		r := b.of("v", "")
		r.Method = http.MethodGet
		b.do(r, "429 refused")
		all.Go(func() { b.do(b.of("w", "1"), "200 attached charge 1") })
		all.Wait()
		b.was(1)
		all.Go(func() { b.do(b.of("v", "2"), "200 executed charge 2") })
		synctest.Wait()
		b.do(b.of("w", "1"), "200 replayed charge 1")
		all.Wait()
		b.was(2)
		b.returned(p)
	})
}

// Calls without a workflow share one lot, whoever makes them.
func TestBulkheadWithoutAWorkflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		p := b.withBulkhead(bulkhead.Settings{Total: 10, PerWorkflow: 1, Queue: -1})
		other := b.of("", "2")
		other.Header.Set("Authorization", "Bearer other")
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("", "1"), "200 executed charge 1") })
		synctest.Wait()
		b.do(other, "429 refused")
		all.Go(func() { b.do(b.of("w", "3"), "200 executed charge 2") })
		all.Wait()
		b.returned(p)
	})
}

// cascade 3.3.3: the backlog of one workflow does not keep another one waiting.
func TestBulkheadQueuesApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		p := b.withBulkhead(bulkhead.Settings{Total: 2, Wait: jsontime.Duration(time.Hour)})
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() { b.serve(httptest.NewRecorder(), b.of("flood", fmt.Sprint(i))) })
		}
		synctest.Wait()
		begun := time.Now()
		b.serve(httptest.NewRecorder(), b.of("other", "other"))
		if took := time.Since(begun); took > 20*time.Second {
			t.Errorf("a call of another workflow took %s, want 10 s and at most 10 s of waiting", took)
		}
		all.Wait()
		b.was(21)
		b.returned(p)
	})
}

// A client that leaves while its call waits leaves nothing behind.
func TestBulkheadWaitingClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		p := b.withBulkhead(bulkhead.Settings{Total: 1})
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "1"), "200 executed charge 1") })
		synctest.Wait()
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		b.serve(httptest.NewRecorder(), b.of("v", "2").WithContext(ctx))
		get := b.of("v", "").WithContext(ctx)
		get.Method = http.MethodGet
		b.serve(httptest.NewRecorder(), get)
		all.Wait()
		b.was(1)
		b.do(b.of("v", "2"), "200 executed charge 2")
		b.returned(p)
	})
}

// What a call has waited is taken off the time that its caller has.
func TestBulkheadWaitsInTheCallersTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(10 * time.Second):
			case <-r.Context().Done():
			}
			charge(n, w, r)
		})
		p := b.withBulkhead(bulkhead.Settings{Total: 1})
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "1"), "200 executed charge 1") })
		synctest.Wait()
		begun := time.Now()
		b.serve(httptest.NewRecorder(), b.of("v", "2", "Request-Timeout", "15"))
		if took := time.Since(begun); took < 13*time.Second || took > 14*time.Second {
			t.Errorf("a call with 15 s took %s, want nine tenths: 10 of them waiting", took)
		}
		all.Wait()
		b.was(2)
		all.Go(func() { b.serve(httptest.NewRecorder(), b.of("w", "3")) })
		synctest.Wait()
		b.do(b.of("v", "4", "Request-Timeout", "5"), "429 refused")
		all.Wait()
		b.was(3)
		b.returned(p)
	})
}

// Every way to end a call returns its permit.
func TestBulkheadPermitsComeBack(t *testing.T) {
	for name, upstream := range map[string]http.HandlerFunc{
		"answer": func(w http.ResponseWriter, r *http.Request) { charge(1, w, r) },
		"panic":  func(http.ResponseWriter, *http.Request) { panic("upstream") },
		"abort":  func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"half an answer": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("half"))
		},
		"a stream of hours": func(w http.ResponseWriter, r *http.Request) {
			for range 3 * 60 {
				_, _ = io.WriteString(w, "more\n")
				<-time.After(time.Minute)
			}
			if b := r.Context().Value(bedKey{}).(*bed); b.config.Bulkhead.Status().InUse != 1 {
				b.Error("a stream of hours holds no permit")
			}
		},
		"cancelled": func(_ http.ResponseWriter, r *http.Request) {
			r.Context().Value(leaving{}).(context.CancelFunc)()
			<-time.After(time.Hour)
		},
		"refusal":      func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) },
		"server error": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
		"the disk fails": func(w http.ResponseWriter, r *http.Request) {
			r.Context().Value(bedKey{}).(*bed).disk.broken.Store(true)
			charge(1, w, r)
		},
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			t.Run(method+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) { upstream(w, r) })
					p := b.withBulkhead(bulkhead.Settings{Total: 1})
					for i := range 3 {
						r := b.of("w", fmt.Sprint(i))
						ctx, leave := context.WithCancel(context.WithValue(r.Context(), bedKey{}, b))
						r = r.WithContext(context.WithValue(ctx, leaving{}, leave))
						r.Method = method
						func() {
							defer func() { _ = recover() }()
							b.guard.ServeHTTP(httptest.NewRecorder(), r)
						}()
						synctest.Wait()
						b.returned(p)
						leave()
					}
					if p.Status().Counts.Granted == 0 {
						t.Error("no call had a permit")
					}
				})
			})
		}
	}
}

type bedKey struct{}

// A caller whom nobody has verified raises no class, and takes part in no other caller's workflow.
func TestBulkheadBelievesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		b.config.Policy.Priority, b.config.Host = "{http.request.header.Urgency}", headerHost{}
		p := b.withBulkhead(bulkhead.Settings{Total: 1, Queue: 2})
		var all sync.WaitGroup
		var order []string
		var mu sync.Mutex
		call := func(r *http.Request) {
			all.Go(func() {
				b.serve(httptest.NewRecorder(), r)
				mu.Lock()
				defer mu.Unlock()
				order = append(order, r.Header.Get("Idempotency-Key"))
			})
			synctest.Wait()
			<-time.After(time.Millisecond)
		}
		stranger := func(id string) *http.Request {
			r := b.of("w", id, "Urgency", "critical")
			r.Header.Set("Authorization", "Bearer stranger")
			return r
		}
		call(b.of("w", "holds"))
		call(stranger("s1"))
		call(stranger("s2"))
		b.do(stranger("s3"), "429 refused") // the stranger's own queue is full
		call(b.of("w", "low", "Urgency", "low"))
		call(b.of("v", "first"))
		all.Wait()
		// The queue of w is not the stranger's; and of calls of class normal those are first whose
		// workflow has used the least.
		if got := strings.Join(order, " "); got != "holds s1 first s2 low" {
			t.Errorf("the order was %s", got)
		}
		b.returned(p)
	})
}

// headerHost expands {http.request.header.NAME}.
type headerHost struct{ guard.StatusHost }

func (headerHost) Expand(r *http.Request, text string) (string, bool) {
	name, ok := strings.CutPrefix(strings.Trim(text, "{}"), "http.request.header.")
	return r.Header.Get(name), ok
}

// Over the quotas of its workflow a call is refused, and its key stays free.
func TestBulkheadQuotas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		p := b.withBulkhead(bulkhead.Settings{Rate: 1})
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "1"), "200 executed charge 1") })
		synctest.Wait()
		all.Wait()
		all.Go(func() { b.do(b.of("w", "2"), "200 executed charge 2") })
		all.Wait()
		b.was(2)
		for i := range 3 {
			r := b.of("quick", fmt.Sprint("q", i))
			r.Method, r.Body, r.ContentLength = http.MethodGet, http.NoBody, 0
			all.Go(func() { b.serve(httptest.NewRecorder(), r) })
			synctest.Wait()
		}
		all.Wait()
		b.was(3)
		if n := p.Status().Counts.Refused[bulkhead.OverRate]; n != 2 {
			t.Errorf("%d calls over the rate were refused, want 2", n)
		}
		b.returned(p)
	})
}

// An undo has its own lane: what its workflow holds does not keep it waiting.
func TestBulkheadLetsUndosPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		b.withBulkhead(bulkhead.Settings{Total: 1, Queue: -1})
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "1"), "200 executed charge 1") })
		synctest.Wait()
		r := b.of("w", "2")
		b.do(r.WithContext(guard.AsOwn(r.Context())), "200  charge 2")
		all.Wait()
	})
}

// A call that waits for too long is an event, once, and waits on.
func TestBulkheadUnserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
			<-time.After(70 * time.Second)
			charge(n, w, nil)
		})
		p := b.withBulkhead(bulkhead.Settings{Total: 1, Wait: jsontime.Duration(time.Hour)})
		var events []string
		begun := time.Now()
		b.engine.Emit = func(e guard.Event) bool {
			events = append(events, fmt.Sprint(e.Name, " ", e.Data()["class"], " ", time.Since(begun)))
			return true
		}
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "1"), "200 executed charge 1") })
		synctest.Wait()
		all.Go(func() { b.do(b.of("v", "2"), "200 executed charge 2") })
		all.Wait()
		if got := fmt.Sprint(events); got != "[agent_guard.call_unserved normal 1m0s]" {
			t.Errorf("events %s", got)
		}
		// So is a request that is not guarded.
		events, begun = nil, time.Now()
		all.Go(func() { b.do(b.of("w", "3"), "200 executed charge 3") })
		synctest.Wait()
		all.Go(func() {
			r := b.of("v", "")
			r.Method = http.MethodGet
			b.do(r, "200  charge 4")
		})
		all.Wait()
		if got := fmt.Sprint(events); got != "[agent_guard.call_unserved normal 1m0s]" {
			t.Errorf("events of a request that is not guarded: %s", got)
		}
		b.returned(p)
	})
}

// What a running call may wait for itself, such as what cancels it or answers its server's question, needs
// no permit: it would wait for the call. All else does, also in a batch.
func TestBulkheadLetsPassWhatCallsWaitFor(t *testing.T) {
	const id = `,"id":8`
	message := func(id, method string) string {
		return `{"jsonrpc":"2.0"` + id + `,"method":"` + method + `","params":{"id":"t","taskId":"t"}}`
	}
	type sent struct{ method, path, body string }
	post := func(body string) sent { return sent{"POST", "/mcp", body} }
	for of, test := range map[protocol.Protocol]struct{ free, waits []sent }{
		protocol.MCP: {
			free: []sent{
				post(fmt.Sprintf(cancelled, "4")), post(`{"jsonrpc":"2.0","id":7,"result":{"action":"accept"}}`),
				post(`[` + message("", "notifications/progress") + `,{"jsonrpc":"2.0","id":7,"result":{}},` + message(id, "tasks/cancel") + `]`),
				post(message("", "notifications/progress")), post(message(id, "tasks/cancel")), post(message(id, "tasks/update")),
				{"DELETE", "/mcp", ""},
			},
			waits: []sent{
				post(message(id, "ping")), post(message(id, "tasks/get")), post(message(id, "tasks/result")), {"GET", "/mcp", ""},
				post(`[` + message(id, "ping") + `]`), post(`[` + message("", "notifications/progress") + `,` + message(id, "ping") + `]`),
			},
		},
		protocol.A2A: {
			free: []sent{post(message(id, "tasks/cancel")), post(message(id, "CancelTask")), {"POST", "/v1/tasks/t:cancel", "{}"}},
			waits: []sent{
				post(message(id, "tasks/get")), post(message(id, "tasks/resubscribe")), post(message(id, "SubscribeToTask")),
				{"POST", "/v1/tasks/t:subscribe", "{}"}, {"DELETE", "/v1/tasks/t/pushNotificationConfigs/c", ""},
			},
		},
	} {
		t.Run(string(of), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAgents(t)
				a.config.Protocol = of
				p := a.withBulkhead(bulkhead.Settings{Total: 1, Queue: -1})
				body := `{"jsonrpc":"2.0","id":3,"method":"message/send","params":{"message":{"messageId":"m","role":"user","name":"tools/call"}}}`
				if of == protocol.MCP {
					body = `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"pay"}}`
				}
				first := a.begin(a.message("ada", body))
				for i, all := range [][]sent{test.free, test.waits} {
					for _, s := range all {
						r := a.message("ada", s.body)
						r.Method, r.URL.Path = s.method, s.path
						w := httptest.NewRecorder()
						a.serve(w, r)
						if full := strings.Contains(w.Body.String(), "bulkhead-full"); full != (i == 1) {
							t.Errorf("%v is answered %d %s", s, w.Code, w.Body)
						}
					}
				}
				if n := len(a.other); n != len(test.free) {
					t.Errorf("the upstream has heard %d messages, want %d", n, len(test.free))
				}
				a.answered(first, `executed {"jsonrpc":"2.0","id":3,"result":{"n":1}}`)
				a.returned(p)
			})
		})
	}
}

// refuses says that every call is refused, so that its key is free again.
func refuses(_ int64, w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusTooManyRequests)
}

// Of calls that all failed and are all retried, a fifth is sent again. The others leave their keys free and
// are sent once there is room. What is answered from the record, attaches or comes first is no retry.
func TestRetryBudgetOfAWorkflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		upstream := refuses
		b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) { upstream(n, w, r) })
		p := b.withBulkhead(bulkhead.Settings{RetryFloor: -1})
		for i := range 10 {
			b.do(b.of("w", fmt.Sprint(i)), "429 executed")
		}
		b.do(b.of("w", "0"), "429 executed")
		b.do(b.of("w", "1"), "429 executed")
		w := httptest.NewRecorder()
		b.serve(w, b.of("w", "2"))
		if body := w.Body.String(); w.Code != 429 || w.Header().Get("Execution-Status") != "refused" || w.Header().Get("Retry-After") == "" ||
			!strings.Contains(body, `/problems/quota-exceeded"`) || !strings.Contains(body, `"reason":"over_retries"`) ||
			!strings.Contains(body, `"safe_new_key":true`) || !strings.Contains(body, `"execution_id":"2"`) {
			t.Errorf("%d %v %s", w.Code, w.Header(), body)
		}
		b.was(12)
		upstream = slowly
		var all sync.WaitGroup
		all.Go(func() { b.do(b.of("w", "first"), "200 executed charge 13") }) // no retry
		synctest.Wait()
		all.Go(func() { b.do(b.of("w", "first"), "200 attached charge 13") })
		undo := b.of("w", "3")
		all.Go(func() { b.do(undo.WithContext(guard.AsOwn(undo.Context())), "200  charge 14") })
		all.Wait()
		for range 20 {
			b.do(b.of("w", "first"), "200 replayed charge 13")
		}
		upstream = charge
		<-time.After(10 * time.Second) // none is recent
		b.do(b.of("w", "2"), "429 refused")
		for i := range 5 {
			r := b.of("w", "")
			r.Method = http.MethodGet
			b.do(r, fmt.Sprintf("200  charge %d", 15+i))
		}
		b.do(b.of("w", "2"), "200 executed charge 20")
		b.returned(p)
		if n := p.Status().Counts.Retries; n != 3 {
			t.Errorf("%d retries were sent, want 3", n)
		}
	})
}

// A call that says that it is a retry is one, also if it is not guarded. What strangers say of a workflow
// takes nothing from another caller's.
func TestRetryBudgetOfWhoSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, charge)
		p := b.withBulkhead(bulkhead.Settings{RetryFloor: -1})
		get := func(fields ...string) *http.Request {
			r := b.of("w", "", fields...)
			r.Method, r.Body = http.MethodGet, http.NoBody
			return r
		}
		for i := range 5 {
			b.do(get("X-Stainless-Retry-Count", "0"), fmt.Sprintf("200  charge %d", i+1))
		}
		stranger := get("Amz-Sdk-Request", "attempt=2; max=3")
		stranger.Header.Set("Authorization", "Bearer stranger")
		b.do(stranger, "429 refused")
		b.do(get("X-Stainless-Retry-Count", "1"), "200  charge 6")
		b.do(get("X-Stainless-Retry-Count", "1"), "429 refused")
		b.do(b.of("w", "k", "X-Stainless-Retry-Count", "2"), "429 refused")
		b.do(b.of("w", "k"), "200 executed charge 7")
		b.was(7)
		b.returned(p)
	})
}

// A call in doubt that would be sent again is a retry. Refused, it is in doubt as before (P6).
func TestRetryBudgetOfDoubts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(n int64, w http.ResponseWriter, _ *http.Request) {
			if n == 1 {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			charge(n, w, nil)
		})
		b.config.Actions = []*guard.Action{{Policy: guard.Policy{OnUnknown: guard.OnUnknownRetry}}}
		p := b.withBulkhead(bulkhead.Settings{RetryFloor: -1})
		b.do(b.of("w", "1"), "502 in_doubt")
		w := httptest.NewRecorder()
		b.serve(w, b.of("w", "1"))
		if body := w.Body.String(); w.Code != 429 || !strings.Contains(body, `"reason":"over_retries"`) ||
			!strings.Contains(body, `"state":"in_doubt"`) || !strings.Contains(body, `"safe_new_key":false`) {
			t.Errorf("%d %s", w.Code, body)
		}
		for i := range 4 {
			b.do(b.of("w", fmt.Sprint("more", i)), fmt.Sprintf("200 executed charge %d", i+2))
		}
		b.do(b.of("w", "1"), "200 executed charge 6")
		b.returned(p)
	})
}

// A call that was released comes back a thousand times at once: it is one retry, and the others attach.
func TestRetryBudgetOfOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
			if n == 1 {
				refuses(n, w, r)
				return
			}
			slowly(n, w, r)
		})
		p := b.withBulkhead(bulkhead.Settings{RetryFloor: 1})
		b.do(b.of("w", "1"), "429 executed")
		var all sync.WaitGroup
		for range 1000 {
			all.Go(func() {
				w := httptest.NewRecorder()
				b.serve(w, b.of("w", "1"))
				if w.Code != 200 || w.Body.String() != "charge 2" {
					t.Errorf("%d %s", w.Code, w.Body)
				}
			})
		}
		all.Wait()
		b.was(2)
		b.returned(p)
		if n := p.Status().Counts.Retries; n != 1 {
			t.Errorf("%d retries were sent, want 1", n)
		}
	})
}
