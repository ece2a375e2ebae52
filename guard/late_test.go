package guard_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// absent is a member whose store can be away.
type absent struct {
	*memory.Member
	away atomic.Bool
}

func (l *absent) Now(ctx context.Context) (time.Time, error) {
	if l.away.Load() {
		return time.Time{}, store.ErrUnavailable
	}
	return l.Member.Now(ctx)
}

func (l *absent) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if l.away.Load() {
		return 0, store.ErrUnavailable
	}
	return l.Member.Commit(ctx, batch...)
}

// P6, P7: what came of a call while the store was away is recorded when it is back, at a gateway that was there all the
// time: both gateways give the answer, also where the client has seen it, or the doubt, and a refused call runs again.
func TestOutcomeWhileTheStoreIsAway(t *testing.T) {
	for name, c := range map[string]struct {
		action guard.Action
		status int
		next   string
		calls  int64
	}{
		"executed":               {guard.Action{}, 201, "201 replayed done", 1},
		"executed, or run again": {guard.Action{Policy: guard.Policy{OnUnknown: guard.OnUnknownRetry}}, 201, "201 replayed done", 1},
		"not executed":           {guard.Action{}, 429, "200 executed charge 2", 2},
		"in doubt":               {guard.Action{}, 502, "409 in_doubt in-doubt in_doubt final", 1},
	} {
		for _, first := range []string{"the same gateway", "the other gateway"} {
			t.Run(name+"/"+first, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var st *absent
					b := acting(t, c.action, func(w http.ResponseWriter, r *http.Request) {
						st.away.Store(true)
						says(c.status, "done")(w, r)
					})
					st = &absent{Member: b.disk.Join("one")}
					one, two := b.node(st), b.node(b.disk.Join("two"))
					var client sync.WaitGroup
					owner := one.begin(&client)
					client.Wait()
					if !owner.gone {
						t.Error("its client has seen the end of the answer")
					}
					<-time.After(20 * time.Second)
					if c.action.OnUnknown != guard.OnUnknownRetry {
						var all sync.WaitGroup
						ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
						all.Go(func() { two.serve(httptest.NewRecorder(), two.post("").WithContext(ctx)) }) // it waits
						all.Wait()
						leave()
					}
					st.away.Store(false)
					if first == "the same gateway" {
						one.sees(one.post(""), c.next) // at once
					} else {
						<-time.After(2 * time.Second)
						two.sees(two.post(""), c.next)
					}
					b.was(c.calls)
					if c.calls == 1 {
						one.sees(one.post(""), c.next)
						two.sees(two.post(""), c.next)
						b.was(1)
					}
				})
			})
		}
	}
}

// The time of a call and what the guard adds to it are counted apart: the upstream's part is not the guard's.
func TestTimesOfCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{}, says(200, "done"))
		b.config.Counts = guard.NewCounts("default", nil)
		one := b.node(b.disk.Join("one"))
		one.sees(one.post(""), "200 executed done")
		one.sees(one.post(""), "200 replayed done")
		calls, added := b.config.Counts.Times()
		if e := calls["executed"]; e.Count != 1 || e.Sum != 10 || e.Buckets[5] != 0 || e.Buckets[10] != 1 || e.Buckets[300] != 1 {
			t.Errorf("executed: %+v", e)
		}
		if r := calls["replayed"]; r.Count != 1 || r.Buckets[0.005] != 1 {
			t.Errorf("replayed: %+v", r)
		}
		if added.Count != 1 || added.Buckets[0.0005] != 1 {
			t.Errorf("added: %+v", added)
		}
	})
}
