package guard_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

func TestFollowerGetsBytesAtOnceAndTheEndOnlyOnceSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		e := r.claim(c)
		flight := r.standing(c, guard.RunningHere).Flight
		f := flight.Follow()
		defer f.Close()

		type read struct {
			text string
			err  error
		}
		reads := make(chan read, 10)
		go func() {
			if head, err := f.Head(ctx); err != nil || head.Status != 200 {
				t.Errorf("head %v, %v", head, err)
			}
			for {
				p := make([]byte, 10)
				n, err := f.Read(ctx, p)
				reads <- read{string(p[:n]), err}
				if err != nil {
					return
				}
			}
		}()
		e.Recording().Start(200, nil)
		e.Write([]byte("one"))
		if got := <-reads; got.text != "one" {
			t.Errorf("read %v", got)
		}
		e.Write([]byte("two"))
		if got := <-reads; got.text != "two" {
			t.Errorf("read %v", got)
		}
		synctest.Wait()
		if len(reads) != 0 {
			t.Fatal("the end came before the outcome was recorded")
		}
		r.settle(e, guard.Outcome{Verdict: guard.Completed, Whole: true})
		if got := <-reads; got.err != io.EOF {
			t.Errorf("read %v", got)
		}
	})
}

func TestTruncatedOwnerTruncatesItsFollowers(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	f := r.find(c).Flight.Follow()
	defer f.Close()
	e.Recording().Start(200, nil)
	e.Write([]byte("half"))
	r.settle(e, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseTruncated})
	p := make([]byte, 10)
	if n, err := f.Read(ctx, p); string(p[:n]) != "half" || err != nil {
		t.Errorf("read %q, %v", p[:n], err)
	}
	if _, err := f.Read(ctx, p); !errors.Is(err, guard.ErrCut) {
		t.Errorf("end of a truncated answer: %v", err)
	}
	r.standing(c, guard.Doubtful)
}

func TestReleaseByStatusAnswersAllWaiters(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	f := r.find(c).Flight.Follow()
	defer f.Close()
	e.Recording().Start(429, nil)
	e.Write([]byte("slow down"))
	r.settle(e, guard.Outcome{Verdict: guard.Released, Status: 429, Whole: true})
	p := make([]byte, 20)
	n, err := f.Read(ctx, p)
	if string(p[:n]) != "slow down" || err != nil {
		t.Errorf("read %q, %v", p[:n], err)
	}
	if _, err := f.Read(ctx, p); err != io.EOF {
		t.Errorf("end: %v", err)
	}
	r.standing(c, guard.Free)
}

func TestReleaseByProofElectsOneWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		owner := r.claim(c)
		var claims, running, most atomic.Int32
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				for {
					found, err := r.Find(ctx, c.Key, c.Fingerprint)
					if err != nil {
						t.Error(err)
						return
					}
					switch found.Standing {
					case guard.Replayable:
						return
					case guard.RunningHere:
						f := found.Flight.Follow()
						if f == nil {
							continue
						}
						_, err := f.Head(ctx)
						f.Close()
						if err == nil {
							return // it has the answer
						}
						<-found.Flight.Done()
					case guard.Free:
						e, err := r.Claim(ctx, c, found)
						if errors.Is(err, guard.ErrTaken) {
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						most.Store(max(most.Load(), running.Add(1)))
						time.Sleep(time.Second)
						n := claims.Add(1)
						running.Add(-1)
						if n < 3 {
							r.settle(e, guard.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent})
							return
						}
						r.settle(e, answered(e, []byte("done")))
						return
					default:
						t.Errorf("standing %d", found.Standing)
						return
					}
				}
			})
		}
		synctest.Wait()
		r.settle(owner, guard.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent})
		wg.Wait()
		if claims.Load() != 3 || most.Load() != 1 {
			t.Errorf("%d claims, %d at once; want 3, one at a time", claims.Load(), most.Load())
		}
	})
}

func TestTooLargeAnswerFlowsOnAndKeepsItsKey(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	c.ResultCap = 1000
	e := r.claim(c)
	flight := r.find(c).Flight
	follower := flight.Follow()
	defer follower.Close()
	e.Recording().Start(200, nil)
	var got []byte
	p := make([]byte, 700)
	for i := range 10 {
		e.Write(bytes.Repeat([]byte{byte('0' + i)}, 700))
		n, err := follower.Read(ctx, p)
		if err != nil {
			t.Fatalf("after %d bytes: %v", len(got), err)
		}
		got = append(got, p[:n]...)
	}
	if flight.Follow() != nil {
		t.Error("a newcomer may follow from a beginning that is gone")
	}
	r.settle(e, guard.Outcome{Verdict: guard.Completed, Status: 200, Whole: true})
	rest, err := io.ReadAll(reader{follower})
	if got = append(got, rest...); err != nil || len(got) != 7000 || got[6999] != '9' {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	r.standing(c, guard.ResultUnavailable)
}

func TestLaggingFollowerOfATooLargeAnswerIsCut(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	c.ResultCap = 1000
	e := r.claim(c)
	f := r.find(c).Flight.Follow()
	defer f.Close()
	e.Recording().Start(200, nil)
	e.Write(make([]byte, 5000))
	r.settle(e, guard.Outcome{Verdict: guard.Completed, Whole: true})
	if _, err := io.ReadAll(reader{f}); !errors.Is(err, guard.ErrCut) {
		t.Errorf("end: %v", err)
	}
}

type reader struct{ f *guard.Follower }

func (r reader) Read(p []byte) (int, error) { return r.f.Read(ctx, p) }

func TestFollowerStopsWaitingWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		e := r.claim(c)
		f := r.find(c).Flight.Follow()
		defer f.Close()
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := f.Head(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("head: %v", err)
		}
		r.settle(e, guard.Outcome{Verdict: guard.Released})
		if _, err := f.Head(ctx); !errors.Is(err, guard.ErrNoAnswer) {
			t.Errorf("head after the release: %v", err)
		}
	})
}
