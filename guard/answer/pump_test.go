package answer_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
)

// lazy is a client that takes what it is let to take.
type lazy struct {
	client
	take     chan struct{} // one for every write; closed, all
	deadline chan struct{}
	once     sync.Once
}

func newLazy() *lazy {
	return &lazy{client: client{header: http.Header{}}, take: make(chan struct{}), deadline: make(chan struct{})}
}

func (l *lazy) Write(p []byte) (int, error) {
	select {
	case <-l.take:
		return l.client.Write(p)
	case <-l.deadline:
		return 0, io.ErrClosedPipe
	}
}

func (l *lazy) SetWriteDeadline(time.Time) error {
	l.once.Do(func() { close(l.deadline) })
	return nil
}

// full is a sink that has room for so many bytes to be read back.
type full struct {
	sink
	room    int
	patient func(ready <-chan struct{}) bool
}

func (f *full) Write(p []byte, needed bool) bool {
	if len(f.body)+len(p) > f.room {
		return false
	}
	return f.sink.Write(p, needed)
}
func (f *full) Wait(ready <-chan struct{}) bool  { return f.patient(ready) }
func (f *full) ReadBack(off int64) io.ReadCloser { return &readBack{&f.sink, int(off)} }

func part(i int) []byte { return bytes.Repeat([]byte{byte('a' + i)}, 20<<10) }

// P7: the recorder takes all at once however slow the client is, and the client gets all
// of it in order, the end after its release.
func TestASlowClientHoldsNothingUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := newLazy()
		rec := record(to, post())
		rec.Header().Set("Content-Length", "204800")
		var want []byte
		for i := range 10 {
			_, _ = rec.Write(part(i)) // would hang the test
			want = append(want, part(i)...)
		}
		if _, whole := rec.Finish(); !whole || rec.sink.body != string(want) {
			t.Errorf("recorded %d bytes", len(rec.sink.body))
		}
		close(to.take)
		synctest.Wait()
		if got := len(to.body); got != len(want)-1 {
			t.Errorf("before its release the client has %d bytes of %d", got, len(want))
		}
		if !rec.Release(t.Context(), 0) {
			t.Error("the release says that bytes are missing")
		}
		if !bytes.Equal(to.body, want) {
			t.Errorf("the client has %d other bytes", len(to.body))
		}
	})
}

// P7: each event is flushed, and after the bytes that it is made of.
func TestEventsAreFlushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := newClient()
		rec := record(to, post())
		rec.Flush()
		synctest.Wait()
		for _, event := range []string{"data: 1", "data: 2"} {
			_, _ = rec.Write([]byte(event))
			rec.Flush()
			synctest.Wait()
		}
		want := []string{"status 200", "flush", "write data: 1", "flush", "write data: 2", "flush"}
		if !slices.Equal(to.log, want) {
			t.Errorf("the client has %q, want %q", to.log, want)
		}
		rec.Finish()
		rec.Release(t.Context(), 0)
	})
}

// A client that takes nothing is one that left, after 30 s. The recording goes on.
func TestAClientThatTakesNothingIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := record(newLazy(), post())
		begin := time.Now()
		for i := range 10 {
			_, _ = rec.Write(part(i))
		}
		rec.Finish()
		if took := time.Since(begin); took != 0 || len(rec.sink.body) != 200<<10 {
			t.Errorf("after %v %d bytes are recorded", took, len(rec.sink.body))
		}
		rec.Release(t.Context(), 0)
		if took := time.Since(begin); took != 30*time.Second {
			t.Errorf("given up after %v", took)
		}
	})
}

// An exit does not wait for a client for ever, and the client sees that bytes are missing.
func TestASlowClientIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := record(newLazy(), post())
		for i := range 10 {
			_, _ = rec.Write(part(i))
		}
		rec.Finish()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if rec.Release(ctx, 0) {
			t.Error("the release says that the client has all")
		}
	})
}

// Where nothing can be read back, the client is waited for, and given up only as the sink
// says.
func TestWhereNothingCanBeReadBack(t *testing.T) {
	run := func(to *lazy, sink *full) (rec *answer.Recorder, want []byte) {
		rec = newRecorder(newWriter(to, post()), sink)
		for i := range 10 {
			_, _ = rec.Write(part(i))
			want = append(want, part(i)...)
		}
		rec.Finish()
		return rec, want
	}
	for _, room := range []int{0, 90 << 10} {
		synctest.Test(t, func(t *testing.T) {
			to := newLazy()
			waits := 0
			sink := &full{room: room, patient: func(ready <-chan struct{}) bool {
				waits++
				<-ready
				return true
			}}
			go func() {
				time.Sleep(time.Minute / 4)
				close(to.take)
			}()
			rec, want := run(to, sink)
			if !rec.Release(t.Context(), 0) || !bytes.Equal(to.body, want) {
				t.Errorf("the client has %d bytes of %d", len(to.body), len(want))
			}
			if waits == 0 {
				t.Error("nobody waited for the client")
			}
		})
		synctest.Test(t, func(t *testing.T) {
			sink := &full{room: room, patient: func(<-chan struct{}) bool { return false }}
			rec, _ := run(newLazy(), sink)
			if rec.Release(t.Context(), 0) {
				t.Error("the release says that the client has all")
			}
		})
	}
}

// The client's header map does not change while the client is written to: the trailer
// goes there with the end.
func TestTheTrailerGoesWithTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := newLazy()
		rec := record(to, post())
		rec.Header().Set("Trailer", "X-Sum")
		_, _ = rec.Write(part(0))
		rec.Header().Set("X-Sum", "1")
		rec.Header().Set(http.TrailerPrefix+"X-Late", "2")
		rec.Finish()
		if to.header.Get("X-Sum") != "" || to.header.Get("Trailer") != "X-Sum" {
			t.Errorf("before the end: %v", to.header)
		}
		close(to.take)
		rec.Release(t.Context(), 0)
		if to.header.Get("X-Sum") != "1" || to.header.Get(http.TrailerPrefix+"X-Late") != "2" {
			t.Errorf("with the end: %v", to.header)
		}
	})
}

// Small answers, which net/http keeps in memory, take no goroutine of their own.
func TestSmallAnswersAreWrittenDirectly(t *testing.T) {
	to := newClient()
	rec := record(to, post())
	_, _ = rec.Write([]byte(strings.Repeat("x", 2<<10)))
	if len(to.body) != 2<<10 || rec.Apart() {
		t.Errorf("%d bytes written, apart %v", len(to.body), rec.Apart())
	}
}
