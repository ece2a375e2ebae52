package badger

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const leadEnds = "AGENT_GUARD_LEAD_ENDS"

// A commit that ends without a result ends the process, and says where.
func TestLeadThatPanics(t *testing.T) {
	if how := os.Getenv(leadEnds); how != "" {
		endWhileLeading(t, how)
		return
	}
	for _, how := range []string{"panic", "Goexit"} {
		t.Run(how, func(t *testing.T) {
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLeadThatPanics$", "-test.timeout=1m")
			child.Env = append(os.Environ(), leadEnds+"="+how)
			out, err := child.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 2 || strings.Contains(string(out), "test timed out") {
				t.Fatalf("the process ended with %v: %s", err, out)
			}
			for _, part := range []string{"ended midway", "stopMidway", "commitGroup"} {
				if !strings.Contains(string(out), part) {
					t.Errorf("no %s in: %s", part, out)
				}
			}
		})
	}
}

func stopMidway(how string) error {
	if how == "panic" {
		panic("hook failed")
	}
	runtime.Goexit()
	return nil
}

// endWhileLeading recovers from panics in a commit, as net/http does.
func endWhileLeading(t *testing.T, how string) {
	s, d := newFaulty(t, Options{})
	d.set(func() { d.onCommit = func() error { return stopMidway(how) } })
	var caller sync.WaitGroup
	caller.Go(func() {
		defer func() { _ = recover() }()
		_, err := s.Commit(t.Context(), put("a", "1"))
		t.Errorf("the commit returned %v", err)
	})
	caller.Wait()
	_, err := s.Commit(t.Context(), put("b", "1"))
	t.Errorf("the next commit returned %v", err)
}

// P2: however commits, a failing disk and Close coincide, each commit is answered, what was acknowledged
// is there, versions rise, and nothing is acknowledged after the disk has failed.
func TestCommitsRaceCloseAndFailure(t *testing.T) {
	for _, fails := range []bool{false, true} {
		for _, clients := range []int{1, 3, 6, 20} {
			// Without a wait, commits queue behind the group that is being committed.
			for _, groupWait := range []time.Duration{0, -1} {
				t.Run(fmt.Sprint(fails, clients, groupWait), func(t *testing.T) {
					raceClose(t, fails, clients, groupWait)
				})
			}
		}
	}
}

func raceClose(t *testing.T, fails bool, clients int, groupWait time.Duration) {
	s, d := newFaulty(t, Options{GroupWait: groupWait})
	var failed atomic.Bool
	var acknowledged atomic.Int64
	stop := int64(40 * clients)
	if fails {
		d.set(func() {
			d.landed = func() error {
				if acknowledged.Load() < stop {
					return nil
				}
				failed.Store(true)
				return errDisk
			}
		})
	}
	var all sync.WaitGroup
	done := make([]int, clients) // of each client, the acknowledged commits
	enough := make(chan struct{})
	once := sync.OnceFunc(func() { close(enough) })
	for c := range clients {
		all.Go(func() {
			defer once()
			var last store.Version
			for i := range 400 {
				before := failed.Load()
				key := fmt.Sprintf("%d/%d", c, i)
				if i%5 == 4 { // one that loses, to a batch of its own group or not
					_, err := s.Commit(t.Context(), insert(fmt.Sprintf("%d/%d", c, i-1), "2"), put("never", "1"))
					if err == nil {
						t.Errorf("a second insertion landed")
					}
					done[c]++
					continue
				}
				v, err := s.Commit(t.Context(), insert(key, key), put("shared", key))
				switch {
				case err == nil && before:
					t.Error("acknowledged after the disk had failed")
				case err == nil && v <= last:
					t.Errorf("version %d after %d", v, last)
				case err == nil:
					last, done[c] = v, done[c]+1
					if acknowledged.Add(1) == stop && !fails {
						once()
					}
					continue
				case !errors.Is(err, store.ErrClosed) && !errors.Is(err, store.ErrUnknown) && !errors.Is(err, store.ErrUnhealthy):
					t.Errorf("commit: %v", err)
				}
				return
			}
		})
	}
	closed := make(chan error, 1)
	go func() {
		<-enough
		closed <- s.Close()
	}()
	ended := make(chan struct{})
	go func() {
		all.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("a commit was never answered")
	}
	if err := <-closed; err != nil && !fails {
		t.Error(err)
	}
	if s.queue.led || len(s.queue.waiting) > 0 {
		t.Errorf("closed with %d batches that wait, led: %v", len(s.queue.waiting), s.queue.led)
	}
	again := reopenWith(t, s.dir, Options{}, osDisk{})
	for c, n := range done {
		for i := range n {
			if i%5 != 4 {
				wantValue(t, again, fmt.Sprintf("%d/%d", c, i), fmt.Sprintf("%d/%d", c, i))
			}
		}
	}
	_, err := again.Get(t.Context(), []byte("never"))
	wantErr(t, "what never landed", err, store.ErrNotFound)
}
