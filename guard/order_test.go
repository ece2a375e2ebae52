package guard_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// inOrder runs a test of calls that the parents in their tokens order, and that wait for so long. Calls to
// /slow take three seconds.
func inOrder(t *testing.T, wait time.Duration, test func(b *trust)) {
	t.Helper()
	trusting(t, ect.L2, func(b *trust) {
		b.config.Actions = []*guard.Action{{Name: "default", Default: true, ParOrder: true, OrderWait: wait}}
		b.begin()
		b.answer = func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/slow":
				<-time.After(3 * time.Second)
			case "/fails":
				w.WriteHeader(http.StatusUnprocessableEntity)
			case "/doubt":
				w.WriteHeader(http.StatusBadGateway)
			}
		}
		test(b)
	})
}

// in makes a token of the agent a in a workflow.
func (b *trust) in(wid string, parents ...string) *ect.Token {
	b.Helper()
	return b.token(b.agents["a"], ect.Claims{Workflow: wid, Parents: parents})
}

// held compares a refusal: the id of what the call waits for, its state, and whether for good.
func (b *trust) held(w *httptest.ResponseRecorder, of *ect.Token, state string, final bool) {
	b.Helper()
	var doc struct {
		Type, Reason string
		Dependencies []api.Dependency
		Safe         bool `json:"safe_new_key"`
	}
	b.check(json.Unmarshal(w.Body.Bytes(), &doc))
	retry := w.Header().Get("Retry-After")
	if w.Code != http.StatusConflict || doc.Type != api.BasePath+"dependency-not-done" || !doc.Safe || len(doc.Dependencies) != 1 || (doc.Reason == "final") != final || (retry == "") != final {
		b.Fatalf("%d %s, Retry-After %q", w.Code, w.Body, retry)
	}
	if d := doc.Dependencies[0]; d.Task != of.ID() || strings.TrimSpace(string(d.State)+" "+string(d.Detail)) != state || d.Final != final || d.Action != "charge_card" {
		b.Errorf("%+v, want %s: %s, for good: %v", d, of.ID(), state, final)
	}
}

// A-topological-order-b, -c: a call whose token names a call that is not done is refused before anything of it
// is recorded, and goes through when that is done. What does not depend on it is not held up, and what was
// executed is replayed, whatever has become of its parents.
func TestParOrder(t *testing.T) {
	inOrder(t, 0, func(b *trust) {
		wid := uuid.NewString()
		first, beside := b.in(wid), b.in(wid)
		second := b.in(wid, first.ID())
		over := make(chan string)
		go func() { over <- b.uses("POST /slow", "", "", first.Raw()) }()
		synctest.Wait()
		b.held(b.send("POST /pay", "", "", second.Raw()), first, "running", false)
		b.held(b.send("POST /pay", "", "", second.Raw()), first, "running", false) // no key was burned, no token used up
		b.want(b.uses("POST /pay", "", "", beside.Raw()), "200 executed")
		b.want(<-over, "200 executed")
		b.was(2)
		b.want(b.uses("POST /pay", "", "", second.Raw()), "200 executed")
		third := b.in(wid, second.ID(), beside.ID())
		b.want(b.uses("POST /pay", "", "", third.Raw()), "200 executed")

		b.check(b.evidence.Append(b.Context(), time.Now(), []*ect.Token{b.failure(wid, second.ID())}))
		b.want(b.uses("POST /pay", "", "", third.Raw()), "200 replayed")
		b.held(b.send("POST /pay", "", "", b.in(wid, second.ID()).Raw()), second, "failed", true)
		b.was(4)
	})
}

// P6: what is in doubt is not done, and what has failed never will be. So it is after a restart, and what
// was not executed can be made again.
func TestParOrderAfterFailures(t *testing.T) {
	inOrder(t, 0, func(b *trust) {
		wid := uuid.NewString()
		failed, doubt := b.in(wid), b.in(wid)
		b.want(b.uses("POST /fails", "", "", failed.Raw()), "422 executed")
		b.want(b.uses("POST /doubt", "", "", doubt.Raw()), "502 in_doubt")
		for range 2 {
			b.held(b.send("POST /pay", "", "", b.in(wid, failed.ID()).Raw()), failed, "failed", true)
			b.held(b.send("POST /pay", "", "", b.in(wid, doubt.ID()).Raw()), doubt, "failed in_doubt", false)
			b.check(b.evidence.Close(context.Background()))
			b.begin()
		}
		// What is no call of the gateway's is done, as the token says that follows from it.
		look := b.in(wid)
		b.want(b.uses("GET /balance", "", "", look.Raw()), "200")
		b.want(b.uses("POST /pay", "", "", look.Raw(), b.in(wid, look.ID()).Raw()), "200 executed")
	})
}

// A call waits for what it depends on where that is wished: no longer than its own caller, and not for what
// will never be done.
func TestParOrderWaits(t *testing.T) {
	inOrder(t, time.Minute, func(b *trust) {
		wid := uuid.NewString()
		first := b.in(wid)
		over := make(chan string, 2)
		begun := time.Now()
		go func() { over <- b.uses("POST /slow", "", "", first.Raw()) }()
		synctest.Wait()
		go func() { over <- b.uses("POST /pay", "", "", b.in(wid, first.ID()).Raw()) }()

		waits := func(ctx context.Context, limit string) *httptest.ResponseRecorder {
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/pay", strings.NewReader(""))
			r.Header.Set(ect.FieldName, b.in(wid, first.ID()).Raw())
			r.Header.Set("Request-Timeout", limit)
			w := httptest.NewRecorder()
			b.serve(w, r)
			return w
		}
		b.held(waits(b.Context(), "1"), first, "running", false)
		if took := time.Since(begun); took > time.Second || took < 800*time.Millisecond {
			t.Errorf("refused after %v", took)
		}
		gone, leave := context.WithCancel(b.Context())
		left := make(chan int)
		go func() { left <- waits(gone, "").Code }()
		synctest.Wait()
		leave()
		if code := <-left; code != guard.StatusClientClosed {
			t.Errorf("who has left gets %d", code)
		}
		b.want(<-over, "200 executed")
		b.want(<-over, "200 executed")
		if took := time.Since(begun).Round(time.Second); took != 3*time.Second {
			t.Errorf("it took %v", took)
		}
		b.was(2)

		failed := b.in(wid)
		b.want(b.uses("POST /fails", "", "", failed.Raw()), "422 executed")
		begun = time.Now()
		b.held(b.send("POST /pay", "", "", b.in(wid, failed.ID()).Raw()), failed, "failed", true)
		if took := time.Since(begun); took > time.Second {
			t.Errorf("for what has failed it waited %v", took)
		}
		doubt := b.in(wid)
		b.want(b.uses("POST /doubt", "", "", doubt.Raw()), "502 in_doubt")
		begun = time.Now()
		b.held(b.send("POST /pay", "", "", b.in(wid, doubt.ID()).Raw()), doubt, "failed in_doubt", false)
		if took := time.Since(begun).Round(time.Second); took != time.Minute {
			t.Errorf("for a doubt it waited %v", took)
		}
	})
}

// P4: where the ledger does not say what has become of the parents, nothing is forwarded.
func TestParOrderFailsClosed(t *testing.T) {
	inOrder(t, 0, func(b *trust) {
		wid := uuid.NewString()
		first := b.in(wid)
		b.want(b.uses("POST /pay", "", "", first.Raw()), "200 executed")
		b.check(b.evidence.Log().Flush(b.Context()))
		second := b.in(wid, first.ID())
		b.disk.damaged.Store(true)
		w := b.send("POST /pay", "k", "", second.Raw())
		b.disk.damaged.Store(false)
		if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "store-unavailable") || b.disk.unread.Load() == 0 {
			t.Errorf("%d %s, %d scans", w.Code, w.Body, b.disk.unread.Load())
		}
		b.was(1)
		b.want(b.uses("POST /pay", "k", "", second.Raw()), "200 executed")
	})
}

// However many calls there are that follow from one, each is admitted once that is done, and none before.
func TestParOrderOfMany(t *testing.T) {
	inOrder(t, time.Minute, func(b *trust) {
		wid := uuid.NewString()
		first := b.in(wid)
		over := make(chan string)
		go func() { over <- b.uses("POST /slow", "", "", first.Raw()) }()
		synctest.Wait()
		begun := time.Now()
		for i := range 50 {
			token := b.in(wid, first.ID())
			go func() { over <- b.uses("POST /pay", fmt.Sprint("k", i), "", token.Raw()) }()
		}
		synctest.Wait()
		b.was(1)
		for range 51 {
			b.want(<-over, "200 executed")
		}
		if took := time.Since(begun); took > 4*time.Second {
			t.Errorf("it took %v", took)
		}
		b.was(51)
	})
}
