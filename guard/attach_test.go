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

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// pieces answers with some bytes every 10 s, which are flushed, and ends so.
func pieces(end func(), all ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for i, piece := range all {
			if i > 0 {
				select {
				case <-time.After(10 * time.Second):
				case <-r.Context().Done():
					panic(http.ErrAbortHandler) // as a proxy does
				}
			}
			_, _ = io.WriteString(w, piece)
			_ = http.NewResponseController(w).Flush()
		}
		end()
	}
}

func whole() {}

func cut() { panic(http.ErrAbortHandler) }

// reader is a client that may leave.
type reader struct {
	*httptest.ResponseRecorder
	gone  bool // it saw no end
	leave func()
	first time.Time // when its first byte came
}

func (r *reader) Write(p []byte) (int, error) {
	if len(p) > 0 && r.first.IsZero() {
		r.first = time.Now()
	}
	return r.ResponseRecorder.Write(p)
}

// begin makes the call "k" in the background.
func (b *bed) begin(all *sync.WaitGroup) *reader {
	ctx, leave := context.WithCancel(b.Context())
	r := &reader{ResponseRecorder: httptest.NewRecorder(), gone: true, leave: leave}
	all.Go(func() {
		defer func() {
			if p := recover(); p != nil && p != http.ErrAbortHandler {
				panic(p)
			}
		}()
		b.guard.ServeHTTP(r, b.post("").WithContext(ctx))
		r.gone = ctx.Err() != nil
	})
	return r
}

// saw compares what a client got of an answer.
func (r *reader) saw(t *testing.T, execution, body string, gone bool) {
	t.Helper()
	if got := r.Header().Get("Execution-Status"); got != execution || r.Body.String() != body || r.gone != gone {
		t.Errorf("%d %q %q, gone %v; want %q %q, gone %v", r.Code, got, r.Body, r.gone, execution, body, gone)
	}
}

// "Attach": the wait limit counts to the first byte. A stream that is followed is not cut by
// it, and is followed from its beginning.
func TestAttachWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{}, pieces(whole, "a", "b", "c"))
		b.config.AttachWait = jsontime.Duration(8 * time.Second)
		b.start()
		var all sync.WaitGroup
		owner := b.begin(&all)
		synctest.Wait()
		b.sees(b.post(""), "409 refused in-progress running again") // the first byte comes after 10 s
		early := b.begin(&all)
		<-time.After(7 * time.Second)
		late := b.begin(&all)
		all.Wait()
		owner.saw(t, "executed", "abc", false)
		early.saw(t, "attached", "abc", false)
		late.saw(t, "attached", "abc", false)
		b.sees(b.post(""), "200 replayed abc")
		b.was(1)
	})
}

// P6, P7: what those see who share an answer, and who comes after them: its cut, whether the
// upstream or the deadline makes it, and nothing of one who leaves.
func TestSharedAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		action guard.Action
		end    func()
		leaves bool // of several followers, one
		body   string
		cut    bool
		cause  string // of the doubt
	}{
		"whole":           {guard.Action{}, whole, false, "abc", false, ""},
		"cut":             {guard.Action{}, cut, false, "abc", true, "answer_truncated"},
		"past a deadline": {guard.Action{Policy: guard.Policy{Deadline: jsontime.Duration(25 * time.Second)}}, whole, false, "ab", true, "deadline"},
		"one leaves":      {guard.Action{}, whole, true, "abc", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, c.action, pieces(c.end, "a", "b", "c"))
				var all sync.WaitGroup
				owner := b.begin(&all)
				synctest.Wait()
				one, leaver := b.begin(&all), b.begin(&all)
				<-time.After(15 * time.Second)
				if c.leaves {
					leaver.leave()
				}
				all.Wait()
				owner.saw(t, "executed", c.body, c.cut)
				one.saw(t, "attached", c.body, c.cut)
				if !c.leaves {
					leaver.saw(t, "attached", c.body, c.cut)
				}
				w := httptest.NewRecorder()
				b.serve(w, b.post(""))
				if c.cut && (w.Code != 409 || !strings.Contains(w.Body.String(), "Cause: "+c.cause)) || !c.cut && w.Body.String() != c.body {
					t.Errorf("a retry got %d %s", w.Code, w.Body)
				}
				b.was(1)
			})
		})
	}
}

// "Capture": past the cap those who are attached go on live, newcomers and retries get a
// refusal, and the key is kept. One byte more or less decides.
func TestOverMaxResult(t *testing.T) {
	piece := strings.Repeat("x", 600)
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{Policy: guard.Policy{MaxResult: 1000}}, pieces(whole, piece, piece, piece))
		var all sync.WaitGroup
		owner := b.begin(&all)
		synctest.Wait()
		follower := b.begin(&all)
		<-time.After(25 * time.Second)
		b.sees(b.post(""), "409 refused result-unavailable running final")
		all.Wait()
		owner.saw(t, "executed", piece+piece+piece, false)
		follower.saw(t, "attached", piece+piece+piece, false)
		b.sees(b.post(""), "409 refused result-unavailable completed final")
		b.was(1)
	})
	for more, want := range map[string]string{"": "200 replayed " + piece, "x": "409 refused result-unavailable completed final"} {
		synctest.Test(t, func(t *testing.T) {
			b := acting(t, guard.Action{Policy: guard.Policy{MaxResult: 600}}, says(200, piece+more))
			b.sees(b.post(""), "200 executed "+piece+more)
			b.sees(b.post(""), want)
		})
	}
}

// "A release by status gives that answer to all waiters", and then the key is free.
func TestReleaseByStatusAnswersAllWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{}, says(429, "slow down", "Retry-After", "3"))
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				if h := b.sees(b.post(""), []string{"429 executed slow down", "429 attached slow down"}[min(i, 1)]); h.Get("Retry-After") != "3" {
					t.Errorf("%v", h)
				}
			})
			synctest.Wait()
		}
		all.Wait()
		b.was(1)
		b.sees(b.post(""), "200 executed charge 2")
	})
}

// P1: where a first call runs or is in doubt, also because nothing could be recorded of it, a
// refusal of another request under its id says so. Who took a new id would have the effect twice.
func TestMismatchSaysWhatIsKnown(t *testing.T) {
	other := func(b *bed) *http.Request {
		r := b.post("")
		r.Body = io.NopCloser(strings.NewReader("amount=99"))
		return r
	}
	for state, answer := range map[string]http.HandlerFunc{"completed": says(200, ""), "in_doubt": says(502, "")} {
		synctest.Test(t, func(t *testing.T) {
			b := acting(t, guard.Action{}, answer)
			var all sync.WaitGroup
			b.begin(&all)
			synctest.Wait()
			b.sees(other(b), "422 refused fingerprint-mismatch running final")
			all.Wait()
			b.sees(other(b), fmt.Sprintf("422 refused fingerprint-mismatch %s final", state))
			b.was(1)
		})
	}
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{}, says(200, "done"))
		var all sync.WaitGroup
		b.begin(&all)
		synctest.Wait()
		b.disk.broken.Store(true)
		all.Wait()
		b.disk.broken.Store(false)
		b.sees(other(b), "422 refused fingerprint-mismatch in_doubt final")
		b.was(1)
	})
}
