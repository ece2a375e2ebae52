package guard_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// The promises hold for the guard alone, with an upstream that is a function and no program
// around it. What needs sockets, processes or Caddy is in e2e.

// disk is a store whose commits take their time, and can fail.
type disk struct {
	*memory.Store
	takes   time.Duration
	broken  atomic.Bool
	commits atomic.Int64
	before  atomic.Pointer[func(batch []store.Write) error] // each commit; nil is nothing
	reading atomic.Pointer[func() error]                    // before each Get; nil is nothing
	slow    atomic.Int64                                    // the time that a Get takes once it has read an entry
	unread  atomic.Int64                                    // scans of the ledger that failed, if damaged
	damaged atomic.Bool
}

func (d *disk) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	if d.damaged.Load() && len(r.From) > 0 && r.From[0] == 'l' {
		d.unread.Add(1)
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, errors.New("input/output error")) }
	}
	return d.Store.Scan(ctx, r)
}

func (d *disk) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	<-time.After(d.takes)
	if d.broken.Load() {
		return 0, errors.New("no space left on device")
	}
	if before := d.before.Load(); before != nil {
		if err := (*before)(batch); err != nil {
			return 0, err
		}
	}
	v, err := d.Store.Commit(ctx, batch...)
	d.commits.Add(1)
	return v, err
}

func (d *disk) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if reading := d.reading.Load(); reading != nil {
		if err := (*reading)(); err != nil {
			return store.Entry{}, err
		}
	}
	e, err := d.Store.Get(ctx, key)
	if err == nil {
		<-time.After(time.Duration(d.slow.Load()))
	}
	return e, err
}

// bed is a guard under test, in front of an upstream that is a function.
type bed struct {
	*testing.T
	disk   *disk
	ring   *seal.Ring
	config guard.Config
	calls  atomic.Int64 // that have come to the upstream
	engine *guard.Engine
	guard  *guard.Handler
}

func newBed(t *testing.T, upstream func(n int64, w http.ResponseWriter, r *http.Request)) *bed {
	b := &bed{T: t, disk: &disk{Store: memory.New(memory.Options{})}, ring: seal.Generate()}
	b.config.Next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { upstream(b.calls.Add(1), w, r) })
	b.start()
	return b
}

// start is a process that begins over what is stored. One that runs is dead from then on.
func (b *bed) start() {
	b.Helper()
	engine, _, err := guard.OpenEngine(b.Context(), b.disk, b.ring, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.engine, b.config.Open = engine, engine.Open
	if b.guard, err = guard.New(b.config); err != nil {
		b.Fatal(err)
	}
}

// post makes the call "k" of a caller, whose credential may be empty.
func (b *bed) post(credential string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/charges", strings.NewReader("amount=10"))
	r.Header.Set("Idempotency-Key", "k")
	if credential != "" {
		r.Header.Set("Authorization", "Bearer "+credential)
	}
	return r
}

// serve makes a call as net/http does, which an answer without its end aborts.
func (b *bed) serve(w http.ResponseWriter, r *http.Request) { serve(b.guard, w, r) }

func serve(h http.Handler, w http.ResponseWriter, r *http.Request) {
	defer func() {
		if p := recover(); p != nil && p != http.ErrAbortHandler {
			panic(p)
		}
	}()
	h.ServeHTTP(w, r)
}

// do makes a call and compares status, Execution-Status and body with "200 executed body".
func (b *bed) do(r *http.Request, want string) {
	b.Helper()
	w := httptest.NewRecorder()
	b.serve(w, r)
	body := ""
	if w.Code < 400 {
		body = " " + w.Body.String()
	}
	if got := fmt.Sprint(w.Code, " ", w.Header().Get("Execution-Status"), body); got != want {
		b.Errorf("got %s, want %s (%s)", got, want, w.Body)
	}
}

// was compares how many calls have come to the upstream.
func (b *bed) was(n int64) {
	b.Helper()
	if got := b.calls.Load(); got != n {
		b.Errorf("the upstream was called %d times, want %d", got, n)
	}
}

func charge(n int64, w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, "charge ", n) }

// slowly answers after a time, whoever has left.
func slowly(n int64, w http.ResponseWriter, r *http.Request) {
	<-time.After(10 * time.Second)
	charge(n, w, r)
}

// P1: however a retry comes, the upstream sees one call.
func TestP1OneCall(t *testing.T) {
	for name, retry := range map[string]func(b *bed){
		"after the answer": func(b *bed) {
			b.do(b.post(""), "200 executed charge 1")
			b.do(b.post(""), "200 replayed charge 1")
		},
		"while it runs": func(b *bed) {
			var all sync.WaitGroup
			all.Go(func() { b.do(b.post(""), "200 executed charge 1") })
			synctest.Wait()
			for range 9 {
				all.Go(func() { b.do(b.post(""), "200 attached charge 1") })
			}
			all.Wait()
		},
		"with another body": func(b *bed) {
			b.do(b.post(""), "200 executed charge 1")
			other := b.post("")
			other.Body = io.NopCloser(strings.NewReader("amount=99"))
			b.do(other, "422 refused")
		},
		"after the process has died, and a year": func(b *bed) {
			go b.serve(httptest.NewRecorder(), b.post(""))
			synctest.Wait()
			b.start()
			b.do(b.post(""), "409 in_doubt")
			<-time.After(365 * 24 * time.Hour)
			b.do(b.post(""), "409 in_doubt")
		},
		"after its answer was stored, by another process": func(b *bed) {
			b.do(b.post(""), "200 executed charge 1")
			b.start()
			b.do(b.post(""), "200 replayed charge 1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, slowly)
				retry(b)
				b.was(1)
			})
		})
	}
}

// P2: what comes to the upstream is recorded. A process that dies there leaves a doubt.
func TestP2TheClaimIsDurableFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bed
		var opened int64 // commits that have returned before the call
		b = newBed(t, func(int64, http.ResponseWriter, *http.Request) {
			if n := b.disk.commits.Load() - opened; n != 1 {
				t.Errorf("%d commits have returned when the call leaves", n)
			}
			b.start()
			b.do(b.post(""), "409 in_doubt")
		})
		b.disk.takes, opened = time.Second, b.disk.commits.Load()
		b.serve(httptest.NewRecorder(), b.post(""))
		b.was(1)
	})
}

// P3: another caller's key is another key, and says nothing of the first.
func TestP3CallersAreApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, charge)
		b.do(b.post("ann"), "200 executed charge 1")
		b.do(b.post("bob"), "200 executed charge 2")
		other := b.post("bob")
		other.Body = io.NopCloser(strings.NewReader("amount=99"))
		b.do(other, "422 refused") // of bob's own call
		b.do(b.post("eve"), "200 executed charge 3")
		b.do(b.post("ann"), "200 replayed charge 1")
	})
}

// P4: without a store nothing is forwarded, unless the configuration says so.
func TestP4FailsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, charge)
		b.disk.broken.Store(true)
		b.disk.takes = time.Second
		var all sync.WaitGroup
		for range 10 { // one fails, and those who wait for it fail too
			all.Go(func() { b.do(b.post(""), "503 refused") })
		}
		all.Wait()
		b.was(0)
		b.config.FailOpen = true
		b.start()
		b.do(b.post(""), "200 unguarded charge 1")
		b.disk.broken.Store(false)
		b.do(b.post(""), "200 executed charge 2")
	})
}

// P4, P1: a guard that fails open forwards nothing where it is not certain that nothing is claimed
// or was executed.
func TestP4FailsOpenForNewCallsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/doubt" {
				says(504, "")(w, r)
				return
			}
			charge(n, w, r)
		})
		b.config.FailOpen = true
		b.start()
		at := func(path string) *http.Request {
			r := b.post("")
			r.URL.Path = path
			return r
		}
		b.do(at("/known"), "200 executed charge 1")
		b.do(at("/doubt"), "504 in_doubt")
		for _, err := range []error{store.ErrUnknown, store.ErrInvalid} { // the claim may stand, or is not taken
			before := func([]store.Write) error { return err }
			b.disk.before.Store(&before)
			b.do(at("/new"), "503 refused")
		}
		b.disk.before.Store(nil)
		b.disk.broken.Store(true) // what the look-up finds stands, whatever fails
		b.do(at("/known"), "200 replayed charge 1")
		other := at("/known")
		other.Body = io.NopCloser(strings.NewReader("amount=99"))
		b.do(other, "422 refused")
		b.do(at("/doubt"), "409 in_doubt")
		b.was(2)
	})
}

// P4: nor is a call forwarded, or a new id safe, that has met an earlier one before the store
// fails. The refusal says where that stands; of what nobody has met it says nothing.
func TestP4RefusalsOfKnownCalls(t *testing.T) {
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		fails  func(b *bed)
		want   string
	}{
		"a claim over a doubt": {says(504, ""), func(b *bed) { b.disk.broken.Store(true) }, "503 refused store-unavailable in_doubt again"},
		"a result": {says(200, strings.Repeat("x", 300<<10)), func(b *bed) { // whose pieces are read one after the other
			reads := 0
			reading := func() error {
				if reads++; reads > 1 {
					return errors.New("broken")
				}
				return nil
			}
			b.disk.reading.Store(&reading)
		}, "503 refused store-unavailable completed again"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownRetry}}, c.answer)
				b.config.FailOpen = true
				b.start()
				b.serve(httptest.NewRecorder(), b.post(""))
				c.fails(b)
				b.sees(b.post(""), c.want)
				b.was(1)
			})
		})
	}
	synctest.Test(t, func(t *testing.T) { // it waits for an execution, and then cannot look again
		b := acting(t, guard.Action{}, silent)
		b.config.FailOpen, b.config.AttachWait = true, jsontime.Duration(time.Hour)
		b.start()
		var all sync.WaitGroup
		b.begin(&all)
		synctest.Wait()
		all.Go(func() { b.sees(b.post(""), "503 refused store-unavailable running again") })
		synctest.Wait()
		reading := func() error { return errors.New("broken") }
		b.disk.reading.Store(&reading)
		all.Wait()
		b.was(1)
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, charge)
		b.disk.broken.Store(true)
		b.sees(b.post(""), "503 refused store-unavailable  again")
	})
}

// P5: a call is undone once, however often and under whatever ids that is asked for, also after
// restarts; one id has one result, and no other content.
func TestP5UndoneOnce(t *testing.T) {
	undoing(t, func(b *saga) {
		charge, id := b.do("POST /charges", "{}"), uuid.NewString()
		var all sync.WaitGroup
		for range 9 {
			all.Go(func() {
				b.check(b.begun(id, charge))
				b.ended(id, "completed")
			})
		}
		all.Wait()
		first := b.ended(id, "completed")
		b.begin()
		<-time.After(29 * 24 * time.Hour)
		b.check(b.begun(id, charge))
		if again := b.ended(id, "completed"); !again.Finished.Equal(first.Finished) {
			b.Errorf("it ended at %v, and then at %v", first.Finished, again.Finished)
		}
		if err := b.begun(id, charge, rollback.SubDAG); !errors.Is(err, rollback.ErrMismatch) {
			b.Errorf("the id with another scope: %v", err)
		}
		b.had("charged ch_1", "refunded ch_1")
	})
	undoing(t, func(b *saga) {
		charge := b.do("POST /charges", "{}")
		b.back("completed", charge)
		b.back("completed", charge)
		b.back("completed", charge, rollback.FullWorkflow)
		b.had("charged ch_1", "refunded ch_1")
	})
}

// P5: what follows from a call is undone before it, and of several changes of one document the
// last one first, whether they follow from each other or not.
func TestP5LastComesFirst(t *testing.T) {
	undoing(t, func(b *saga) {
		b.write("/docs/x", "v0")
		doc := b.do("PUT /docs/x", "v1")
		charge := b.do("POST /charges", "{}", doc.checkpoint)
		last := b.do("PUT /plain/y", "new", charge.checkpoint)
		b.back("completed", last, rollback.FullWorkflow)
		b.had("/docs/x is v1", "charged ch_2", "/plain/y is new", "deleted /plain/y", "refunded ch_2", "/docs/x is v0")
	})
	undoing(t, func(b *saga) {
		paths := []string{"/docs/x", "/plain/y", "/docs/z"}
		var last step
		for _, text := range []string{"v1", "v2", "v3", "v4"} {
			for _, path := range paths {
				last = b.do("PUT "+path, text)
			}
		}
		b.back("completed", last, rollback.FullWorkflow)
		for _, path := range paths {
			b.stands(path, "")
		}
	})
}

// P5: nothing follows from a call while it is being undone, nor begins in a workflow that was undone
// as a whole, also after a restart.
func TestP5NothingFollows(t *testing.T) {
	const paused, stopped = "409 workflow-paused", "403 workflow-stopped"
	refused := func(b *saga, want string, after ...string) {
		b.Helper()
		s := b.try("POST /mail", "", after...)
		var doc struct{ Type string }
		_ = json.Unmarshal(s.Body.Bytes(), &doc) // else it has none
		b.want(fmt.Sprint(s.Code, " ", path.Base(doc.Type)), want)
	}
	undoing(t, func(b *saga) {
		charge, id, hold := b.do("POST /charges", "{}"), uuid.NewString(), newGate()
		b.on("POST /refunds", b.waits(hold))
		b.check(b.begun(id, charge))
		<-hold.arrived
		refused(b, paused, charge.checkpoint)
		b.do("POST /mail", "")
		close(hold.open)
		b.ended(id, "completed")
		b.had("charged ch_1", "mailed", "refunded ch_1")
		b.do("POST /mail", "", charge.checkpoint)
	})
	undoing(t, func(b *saga) {
		charge, id, hold := b.do("POST /charges", "{}"), uuid.NewString(), newGate()
		b.on("POST /refunds", b.waits(hold))
		b.check(b.begun(id, charge, rollback.FullWorkflow))
		<-hold.arrived
		refused(b, stopped)
		b.other().do("POST /mail", "")
		close(hold.open)
		b.ended(id, "completed")
		refused(b, stopped)
		b.begin()
		refused(b, stopped)
		b.had("charged ch_1", "mailed", "refunded ch_1")
	})
}

// P5, P6: what nothing can undo, and what somebody else has changed since, is left to a person;
// the rest is undone.
func TestP5LeftToAPerson(t *testing.T) {
	escalated := func(b *saga, cause hitl.Cause) {
		b.Helper()
		page, err := b.escalations.List(b.Context(), hitl.Filter{}, "", 10)
		b.check(err)
		if !slices.ContainsFunc(page.Escalations, func(e hitl.Escalation) bool { return e.Cause == cause }) {
			b.Errorf("no escalation says %s: %+v", cause, page.Escalations)
		}
	}
	undoing(t, func(b *saga) {
		b.back("escalated irreversible", b.do("POST /mail", ""))
		escalated(b, hitl.CauseIrreversible)
		b.had("mailed")
	})
	undoing(t, func(b *saga) {
		b.do("POST /mail", "")
		if r := b.back("partial irreversible", b.do("POST /charges", "{}"), rollback.FullWorkflow); !r.Mixed {
			b.Errorf("%+v", r)
		}
		escalated(b, hitl.CauseIrreversible)
		b.had("mailed", "charged ch_2", "refunded ch_2")
	})
	undoing(t, func(b *saga) {
		for _, path := range []string{"/docs/x", "/plain/x"} {
			b.write(path, "v0")
			doc := b.do("PUT "+path, "v1")
			b.write(path, "another's")
			b.back("escalated changed-since", doc)
			b.stands(path, "another's")
		}
	})
}

// P5: a rollback goes on where its process has died, under the same key: what was done is not
// done again, and what was not is.
func TestP5GoesOnAfterARestart(t *testing.T) {
	undoing(t, func(b *saga) {
		b.write("/docs/x", "v0")
		doc := b.do("PUT /docs/x", "v1")
		b.do("POST /charges", "{}", doc.checkpoint)
		id, hold := uuid.NewString(), newGate()
		defer close(hold.open)
		b.on("POST /refunds", b.late(hold))
		b.check(b.begun(id, doc, rollback.FullWorkflow))
		<-hold.arrived
		b.stands("/docs/x", "v1")
		b.begin()
		b.ended(id, "completed")
		b.stands("/docs/x", "v0")
		b.had("/docs/x is v1", "charged ch_2", "refunded ch_2", "/docs/x is v0")
	})
}

// P6: what is not known is in doubt, and what was refused is released.
func TestP6NothingIsCalledDone(t *testing.T) {
	for name, c := range map[string]struct {
		upstream func(w http.ResponseWriter)
		first    string // Execution-Status of the call
		retry    string
	}{
		"a gateway's error":    {func(w http.ResponseWriter) { w.WriteHeader(502) }, "in_doubt", "409 in_doubt"},
		"no answer in time":    {func(http.ResponseWriter) { <-time.After(time.Hour) }, "in_doubt", "409 in_doubt"},
		"an answer cut short":  {func(w http.ResponseWriter) { _, _ = io.WriteString(w, "char"); panic(http.ErrAbortHandler) }, "executed", "409 in_doubt"},
		"an empty answer":      {func(http.ResponseWriter) {}, "executed", "200 replayed "},
		"a refusal":            {func(w http.ResponseWriter) { w.WriteHeader(401) }, "executed", "200 executed charge 2"},
		"an error that counts": {func(w http.ResponseWriter) { w.WriteHeader(404) }, "executed", "404 replayed"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, func(n int64, w http.ResponseWriter, r *http.Request) {
					if n > 1 {
						charge(n, w, r)
						return
					}
					c.upstream(w)
				})
				w := httptest.NewRecorder()
				b.serve(w, b.post(""))
				if got := w.Header().Get("Execution-Status"); got != c.first {
					t.Errorf("Execution-Status %q, want %q", got, c.first)
				}
				b.do(b.post(""), c.retry)
			})
		})
	}
}

// arrivals is a client that notes when bytes come.
type arrivals struct {
	http.ResponseWriter
	mu  sync.Mutex
	at  []time.Time // of each byte
	all strings.Builder
}

func (a *arrivals) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range p {
		a.at = append(a.at, time.Now())
	}
	return a.all.Write(p)
}

func (a *arrivals) FlushError() error { return nil }

// P7: bytes flow at once; the last one waits for the commit of the outcome, and no more.
func TestP7OnlyTheEndWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(_ int64, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "3")
			for range 3 {
				_, _ = io.WriteString(w, "x")
				_ = http.NewResponseController(w).Flush()
				<-time.After(10 * time.Second)
			}
		})
		b.disk.takes = time.Second
		began := time.Now()
		a := &arrivals{ResponseWriter: httptest.NewRecorder()}
		b.serve(a, b.post(""))
		if a.all.String() != "xxx" {
			t.Fatalf("%q", a.all.String())
		}
		for i, want := range []time.Duration{1 * time.Second, 11 * time.Second, 32 * time.Second} {
			if got := a.at[i].Sub(began); got != want {
				t.Errorf("byte %d came after %v, want %v", i, got, want)
			}
		}
	})
}

// P7: a client that leaves loses nothing.
func TestP7ClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		ctx, leave := context.WithCancel(t.Context())
		go b.serve(httptest.NewRecorder(), b.post("").WithContext(ctx))
		synctest.Wait()
		leave()
		synctest.Wait()
		b.do(b.post(""), "200 attached charge 1")
		b.do(b.post(""), "200 replayed charge 1")
		b.was(1)
	})
}
