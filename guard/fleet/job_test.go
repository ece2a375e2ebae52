package fleet_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A job looks at once, and then when something causes it; a failed look is repeated after its pause, whatever comes.
func TestJobLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New(memory.Options{})
		mine, other := fleet.Of(st.Join("a")), st.Join("b")
		wake, news := make(chan struct{}, 1), make(chan struct{})
		began := time.Now()
		type look struct {
			at   time.Duration
			left bool
		}
		var mu sync.Mutex // guards what follows, and news
		var looks []look
		var fail error
		var failed []error
		with := func(do func()) {
			mu.Lock()
			defer mu.Unlock()
			do()
		}
		stop := fleet.Job{
			Fleet: mine, Every: time.Minute, Retry: 10 * time.Second, Wake: wake,
			News: func() <-chan struct{} {
				mu.Lock()
				defer mu.Unlock()
				return news
			},
			Failed: func(err error) { with(func() { failed = append(failed, err) }) },
			Do: func(_ context.Context, left bool) (time.Duration, error) {
				mu.Lock()
				defer mu.Unlock()
				looks = append(looks, look{time.Since(began), left})
				if len(looks) == 2 {
					return 5 * time.Second, nil
				}
				return 0, fail
			},
		}.Start()
		expect := func(what string, want ...look) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(looks, want) {
				t.Fatalf("%s: it has looked at %v, want %v", what, looks, want)
			}
		}
		want := []look{{0, true}}
		expect("at first", want...)
		wake <- struct{}{}
		want = append(want, look{0, false})
		expect("woken", want...)
		time.Sleep(5 * time.Second)
		want = append(want, look{5 * time.Second, false})
		expect("after the wait that it has asked for", want...)
		time.Sleep(time.Minute)
		want = append(want, look{65 * time.Second, false})
		expect("after its interval", want...)
		before := news
		with(func() { news = make(chan struct{}) })
		close(before)
		want = append(want, look{65 * time.Second, false})
		expect("after news", want...)
		with(func() { fail = errors.New("the store is away") })
		other.Remove()
		want = append(want, look{65 * time.Second, true})
		expect("after a member has left", want...)
		wake <- struct{}{}
		expect("woken while it pauses", want...)
		with(func() { fail = nil })
		time.Sleep(10 * time.Second)
		want = append(want, look{75 * time.Second, true}, look{75 * time.Second, false})
		expect("after the pause, and the signal that has waited", want...)
		stop()
		if len(failed) != 1 {
			t.Errorf("%d failures were told", len(failed))
		}
	})
}

// A job ends with its store, and with its member.
func TestJobEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, err := range []error{store.ErrClosed, store.ErrUnhealthy} {
			fleet.Job{Do: func(context.Context, bool) (time.Duration, error) { return 0, err }}.Run(t.Context())
		}
		st := memory.New(memory.Options{})
		member := st.Join("a")
		ended := make(chan struct{})
		looks := 0
		go func() {
			defer close(ended)
			fleet.Job{Fleet: fleet.Of(member), Do: func(context.Context, bool) (time.Duration, error) {
				looks++
				return 0, nil
			}}.Run(t.Context())
		}()
		synctest.Wait()
		member.Remove()
		<-ended
		if looks != 1 {
			t.Errorf("it has looked %d times", looks)
		}
	})
}

// Without a fleet there is nobody to wait for.
func TestAlone(t *testing.T) {
	var alone *fleet.Fleet
	if fleet.Of(memory.New(memory.Options{})) != nil || alone.Left() != nil || alone.Boot() != "" {
		t.Error("a gateway that has its store alone has a fleet")
	}
	if first, err := alone.First(t.Context()); !first || err != nil {
		t.Error("a gateway that has its store alone waits for others", first, err)
	}
	alone.Follow(nil, nil)()
}

// That a member is gone stays so, also where the store cannot be asked any more.
func TestGone(t *testing.T) {
	st := memory.New(memory.Options{})
	a, b := fleet.Of(st.Join("a")), st.Join("b")
	boot := b.Self().Boot
	if gone, err := a.Gone(t.Context(), boot); gone || err != nil {
		t.Fatal(gone, err)
	}
	b.Remove()
	if gone, err := a.Gone(t.Context(), boot); !gone || err != nil {
		t.Fatal(gone, err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if gone, err := a.Gone(t.Context(), boot); !gone || err != nil {
		t.Fatal(gone, err)
	}
}

// removed is a removed member whose store answers nothing any more, and whose Left stays closed.
type removed struct{ store.Shared }

func (removed) Left() <-chan struct{} {
	closed := make(chan struct{})
	close(closed)
	return closed
}

func (removed) Gone(context.Context, string) (bool, error) { return false, store.ErrUnhealthy }

// A job whose looks never fail ends with its member all the same.
func TestJobEndsWhereTheStoreSaysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		fleet.Job{
			Fleet: fleet.Of(removed{memory.New(memory.Options{}).Join("a")}), Every: time.Minute,
			Do: func(context.Context, bool) (time.Duration, error) {
				if looks++; looks == 1000 {
					cancel()
				}
				return 0, nil
			},
		}.Run(ctx)
		if looks > 3 {
			t.Errorf("it has looked %d times, without a pause", looks)
		}
	})
}

// One member is the first, and another one when that is gone; who was removed is not told that it is.
func TestFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New(memory.Options{})
		a := st.Join("b") // by when it has joined, not by its name
		time.Sleep(time.Second)
		b := st.Join("a")
		first := func(m store.Store) bool {
			is, err := fleet.Of(m).First(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return is
		}
		if !first(a) || first(b) {
			t.Error("not the one that has joined first")
		}
		a.Remove()
		if !first(b) || first(a) {
			t.Error("not the one that is left")
		}
		b.Remove()
		if is, err := fleet.Of(b).First(t.Context()); is || !errors.Is(err, store.ErrUnhealthy) {
			t.Errorf("where there is nobody: %t, %v", is, err)
		}
	})
}

// A record that names no member is of a gateway that had the store alone.
func TestGoneWithoutABoot(t *testing.T) {
	if gone, err := fleet.Of(memory.New(memory.Options{}).Join("a")).Gone(t.Context(), ""); !gone || err != nil {
		t.Error(gone, err)
	}
}
