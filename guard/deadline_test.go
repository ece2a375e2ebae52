package guard

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// cascade 3.3.1: the gateway's deadline is shorter than its caller's, and never longer
// than the action's own.
func TestDeadlines(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        time.Duration
	}{
		{"", "", time.Minute},
		{"Request-Timeout", "10", 9 * time.Second},
		{"Request-Timeout", "0.5", 450 * time.Millisecond},
		{"Request-Timeout", "20s", 18 * time.Second},
		{"Request-Timeout", "3600", time.Minute},
		{"Request-Timeout", "0", time.Minute},
		{"Request-Timeout", "-5", time.Minute},
		{"Request-Timeout", "NaN", time.Minute},
		{"Request-Timeout", "1e300", time.Minute},
		{"Request-Timeout", "soon", time.Minute},
		{"Grpc-Timeout", "5S", 4500 * time.Millisecond},
		{"Grpc-Timeout", "100m", 90 * time.Millisecond},
		{"Grpc-Timeout", "99999999H", time.Minute},
		{"Grpc-Timeout", "S", time.Minute},
		{"Grpc-Timeout", "-1S", time.Minute},
		{"Grpc-Timeout", "123456789S", time.Minute},
	} {
		header := make(http.Header)
		if c.name != "" {
			header[c.name] = []string{c.value}
		}
		if got := atMost(time.Minute, header); got != c.want {
			t.Errorf("%s: %s: %v, want %v", c.name, c.value, got, c.want)
		}
	}
}

func newClock(d time.Duration) *clock {
	c := new(clock)
	c.start(context.Background(), d)
	return c
}

// The deadline is the upstream's: it stands still while readers are waited for, and for as
// long again at most.
func TestTheClockStandsStillForReaders(t *testing.T) {
	after := func(d time.Duration) <-chan struct{} {
		ready := make(chan struct{})
		time.AfterFunc(d, func() { close(ready) })
		return ready
	}
	synctest.Test(t, func(t *testing.T) {
		c := newClock(time.Minute)
		defer c.stop()
		began := time.Now()
		time.Sleep(30 * time.Second)
		if !c.wait(after(40 * time.Second)) {
			t.Error("a reader that came was not waited for")
		}
		if at, _ := c.Deadline(); at.Sub(began) != 100*time.Second {
			t.Errorf("over after %v", at.Sub(began))
		}
		if c.wait(after(time.Hour)) || time.Since(began) != 90*time.Second {
			t.Errorf("readers were waited for until %v", time.Since(began))
		}
		if c.wait(after(time.Hour)) || time.Since(began) != 90*time.Second {
			t.Error("readers were waited for longer than a deadline")
		}
		<-c.Done()
		if took := time.Since(began); took != 2*time.Minute || !c.overdue() {
			t.Errorf("over after %v, overdue %v", took, c.overdue())
		}
	})
	synctest.Test(t, func(t *testing.T) { // an exit ends the wait, too
		c := newClock(time.Minute)
		time.AfterFunc(time.Second, c.stop)
		if c.wait(after(time.Hour)) || c.overdue() || !errors.Is(c.Err(), context.Canceled) {
			t.Errorf("%v", c.Err())
		}
	})
	synctest.Test(t, func(t *testing.T) { // what is over stays over
		c := newClock(time.Minute)
		time.Sleep(time.Hour)
		c.pausing(time.Hour)
		c.touch()
		if c.wait(after(time.Second)) || !c.overdue() {
			t.Error("a clock went on after its deadline")
		}
	})
}

// A stream that has no deadline ends when it pauses for too long.
func TestTheClockOfAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClock(time.Minute)
		defer c.stop()
		c.touch() // which a deadline does not heed
		began := time.Now()
		c.pausing(40 * time.Second)
		for range 100 {
			time.Sleep(39 * time.Second)
			c.touch()
		}
		<-c.Done()
		if took := time.Since(began); took != 3940*time.Second || !c.overdue() {
			t.Errorf("over after %v, overdue %v", took, c.overdue())
		}
	})
}
