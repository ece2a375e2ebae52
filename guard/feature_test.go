package guard_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// heldGate refuses with err, and counts what it holds.
type heldGate struct {
	err         error
	asked, held int
}

func (g *heldGate) Admit(context.Context, *guard.Request) (leave func(), err error) {
	g.asked++
	g.held++
	return func() { g.held-- }, g.err
}

// part runs claim and settle.
type part struct {
	claim  func(commit *store.Batch) error
	settle func(o execution.Outcome, commit *store.Batch)
}

func (p part) Claim(_ context.Context, _ *guard.Request, commit *store.Batch) error {
	return p.claim(commit)
}

func (p part) Settle(_ context.Context, _ *guard.Request, o execution.Outcome, commit *store.Batch) {
	p.settle(o, commit)
}

// featured is a guard with features, in front of next. call makes a call with that key.
func featured(t *testing.T, st store.Store, c guard.Config, next http.HandlerFunc) (call func(key string) *httptest.ResponseRecorder) {
	t.Helper()
	engine, _, err := guard.OpenEngine(t.Context(), st, seal.Generate(), nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Open, c.Next = engine.Open, next
	h, err := guard.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return func(key string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/charges", strings.NewReader("amount=10"))
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
}

// A gate gives back once what it holds, whoever ends the call, and before the answer is waited for; a retry of what has
// run meets no gate.
func TestGateHoldsAndGivesBack(t *testing.T) {
	refused := problem.New(problem.QuotaExceeded, "No.")
	for name, c := range map[string]struct {
		first, second error // of the two gates
		panics        bool
		status        int
		says          string
	}{
		"it runs":                {status: http.StatusOK, says: "executed"},
		"the first gate refuses": {first: refused, status: http.StatusTooManyRequests, says: "refused"},
		"the other gate refuses": {second: refused, status: http.StatusTooManyRequests, says: "refused"},
		"a gate fails":           {second: errors.New("away"), status: http.StatusServiceUnavailable, says: "refused"},
		"the upstream panics":    {panics: true, status: http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			one, two := &heldGate{err: c.first}, &heldGate{err: c.second}
			ran := 0
			call := featured(t, memory.New(memory.Options{}), guard.Config{Gates: []guard.Gate{one, two}}, func(w http.ResponseWriter, _ *http.Request) {
				ran++
				if one.held != 1 || two.held != 1 {
					t.Errorf("while it runs %d and %d are held", one.held, two.held)
				}
				if c.panics {
					panic(http.ErrAbortHandler)
				}
				_, _ = io.WriteString(w, "charged")
			})
			try := func() (w *httptest.ResponseRecorder) {
				defer func() { _ = recover() }()
				w = httptest.NewRecorder()
				return call("a")
			}
			w := try()
			if !c.panics && (w.Code != c.status || w.Header().Get("Execution-Status") != c.says) {
				t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
			}
			if one.held != 0 || two.held != 0 {
				t.Errorf("afterwards %d and %d are held", one.held, two.held)
			}
			asked := one.asked
			if one.err, two.err = nil, nil; ran == 1 {
				if try(); one.asked != asked || ran != 1 {
					t.Errorf("a retry of what has run was asked %d times, and ran %d times", one.asked-asked, ran)
				}
			} else if w = try(); w.Header().Get("Execution-Status") != "executed" {
				t.Errorf("after the refusal: %d %v", w.Code, w.Header()) // its key was free
			}
		})
	}
}

// P1, P2: the writes of a part land in the commits of claim and outcome; where a condition of the claim's fails, the part
// is asked again, and nothing has been sent until then.
func TestPartLandsWithTheCall(t *testing.T) {
	st := memory.New(memory.Options{})
	key, stands := []byte("Mark"), func() string {
		e, err := st.Get(t.Context(), []byte("Mark"))
		if errors.Is(err, store.ErrNotFound) {
			return ""
		}
		if err != nil {
			t.Fatal(err)
		}
		return string(e.Value)
	}
	var seen []string
	claims := 0
	p := part{
		claim: func(commit *store.Batch) error {
			if claims++; claims == 1 { // somebody writes between the read and the commit
				commit.Add(store.Write{Key: key, Value: []byte("first"), If: store.VersionIs(1 << 40)})
				return nil
			}
			commit.Add(store.Write{Key: key, Value: []byte("claimed"), If: store.Absent()})
			return nil
		},
		settle: func(o execution.Outcome, commit *store.Batch) {
			commit.Add(store.Write{Key: key, Value: []byte(o.Verdict.String())})
		},
	}
	call := featured(t, st, guard.Config{Parts: []guard.Part{p}}, func(w http.ResponseWriter, _ *http.Request) { seen = append(seen, stands()) })
	if w := call("a"); w.Code != http.StatusOK || w.Header().Get("Execution-Status") != "executed" {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
	if !slices.Equal(seen, []string{"claimed"}) || claims != 2 || stands() != "completed" {
		t.Errorf("the upstream saw %q, the part was asked %d times, at the end stands %q", seen, claims, stands())
	}
	if w := call("a"); w.Header().Get("Execution-Status") != "replayed" || claims != 2 {
		t.Errorf("the retry: %v, and the part was asked %d times", w.Header(), claims)
	}
}

// A part that refuses leaves the key free, and nothing of the parts before it.
func TestPartRefuses(t *testing.T) {
	st, err := memory.New(memory.Options{}), error(problem.New(problem.QuotaExceeded, "No."))
	ended := error(nil)
	parts := []guard.Part{
		part{claim: func(commit *store.Batch) error {
			commit.Add(store.Write{Key: []byte("Mark"), Value: []byte("x")})
			commit.OnDone(func(err error) error { ended = err; return err })
			return nil
		}, settle: func(execution.Outcome, *store.Batch) {}},
		part{claim: func(*store.Batch) error { return err }, settle: func(execution.Outcome, *store.Batch) {}},
	}
	ran := 0
	call := featured(t, st, guard.Config{Parts: parts}, func(http.ResponseWriter, *http.Request) { ran++ })
	if w := call("a"); w.Code != http.StatusTooManyRequests || ran != 0 || ended == nil {
		t.Errorf("%d %s, it ran %d times; the commit of the part before ended with %v", w.Code, w.Body, ran, ended)
	}
	if _, got := st.Get(t.Context(), []byte("Mark")); !errors.Is(got, store.ErrNotFound) {
		t.Errorf("a write of the part before stands: %v", got)
	}
	if err = nil; call("a").Header().Get("Execution-Status") != "executed" || ran != 1 || ended != nil {
		t.Errorf("the key was not free: it ran %d times, %v", ran, ended)
	}
}
