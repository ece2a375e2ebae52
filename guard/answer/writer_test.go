package answer_test

import (
	"bytes"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
)

// ADR 0055: a failure of known length waits whole, as far as it may, and nothing else does.
func TestFailuresWaitWhole(t *testing.T) {
	for _, c := range []struct {
		status        int
		length        string
		before, after []string
		sent          bool
	}{
		{404, "6", nil, []string{"status 404", "write abcdef"}, false},
		{500, "9", nil, []string{"status 500", "write abcdef"}, false}, // cut short
		{404, "7", nil, []string{"status 404", "write abcdef"}, false},
		{399, "6", []string{"status 399", "write abcde"}, []string{"write f"}, true},
		{404, "", []string{"status 404", "write abcdef"}, nil, true},
		{404, "65", []string{"status 404", "write abcdef"}, nil, true},
	} {
		to := newClient()
		w := newWriter(to, post())
		w.HoldFailures = 64
		if c.length != "" {
			w.Header().Set("Content-Length", c.length)
		}
		w.WriteHeader(c.status)
		_, _ = w.Write([]byte("abcdef"))
		if !slices.Equal(to.log, c.before) || w.Sent() != c.sent {
			t.Errorf("%d %q: before its release the client has %q, sent %t", c.status, c.length, to.log, w.Sent())
		}
		w.Release()
		if all := slices.Concat(c.before, c.after); !slices.Equal(to.log, all) {
			t.Errorf("%d %q: the client has %q, want %q", c.status, c.length, to.log, all)
		}
	}
	to := newClient()
	w := newWriter(to, post())
	w.HoldFailures = 64
	w.Header().Set("Content-Length", "3")
	w.WriteHeader(404)
	_, _ = w.Write([]byte("abcd"))
	w.Flush()
	if len(to.log) > 0 {
		t.Errorf("flushed: %q", to.log)
	}
	if w.Release(); !slices.Equal(to.log, []string{"status 404", "write abc"}) {
		t.Errorf("beyond its length: %q", to.log)
	}
}

// P7 and step 8: everything flows at once but the end, which Release lets go.
func TestTheEndIsHeldBack(t *testing.T) {
	for _, c := range []struct {
		name   string
		method string
		status int
		length string // Content-Length
		writes []string
		before []string // what the client has before Release
		after  []string // and what it gets then
	}{
		{"the last byte of a known length", http.MethodPost, 201, "6", []string{"abc", "def"},
			[]string{"status 201", "write abc", "write de"}, []string{"write f"}},
		{"one byte", http.MethodPost, 200, "1", []string{"a"}, []string{"status 200"}, []string{"write a"}},
		{"all in one write", http.MethodPost, 200, "3", []string{"abc"}, []string{"status 200", "write ab"}, []string{"write c"}},
		{"the last byte in a write of its own", http.MethodPost, 200, "3", []string{"ab", "c"}, []string{"status 200", "write ab"}, []string{"write c"}},
		{"nothing of an unknown length but its end, which is the return", http.MethodPost, 200, "", []string{"abc", "def"},
			[]string{"status 200", "write abc", "write def"}, nil},
		{"a length that is no number is unknown", http.MethodPost, 200, "many", []string{"abc"}, []string{"status 200", "write abc"}, nil},
		{"a negative length is unknown", http.MethodPost, 200, "-1", []string{"abc"}, []string{"status 200", "write abc"}, nil},
		{"the header of an empty body", http.MethodPost, 200, "0", nil, nil, []string{"status 200"}},
		{"the header of an empty body, whatever is written", http.MethodPost, 200, "0", []string{"x"}, nil, []string{"status 200"}},
		{"the header of 204", http.MethodPost, 204, "", []string{"x"}, nil, []string{"status 204"}},
		{"the header of 304", http.MethodPost, 304, "7", nil, nil, []string{"status 304"}},
		{"the header for HEAD", http.MethodHead, 200, "7", nil, nil, []string{"status 200"}},
		{"what is beyond the length is dropped", http.MethodPost, 200, "3", []string{"abcd", "efg"}, []string{"status 200", "write ab"}, []string{"write c"}},
		{"an empty write is none", http.MethodPost, 200, "2", []string{"", "ab", ""}, []string{"status 200", "write a"}, []string{"write b"}},
		{"a body that stays short has no end to release", http.MethodPost, 200, "9", []string{"abc"}, []string{"status 200", "write abc"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := post()
			r.Method = c.method
			to := newClient()
			w := newWriter(to, r)
			if c.length != "" {
				w.Header().Set("Content-Length", c.length)
			}
			w.WriteHeader(c.status)
			for _, text := range c.writes {
				if n, err := w.Write([]byte(text)); n != len(text) || err != nil {
					t.Errorf("writing %q: %d, %v", text, n, err)
				}
			}
			if !slices.Equal(to.log, c.before) {
				t.Errorf("before its release the client has %q, want %q", to.log, c.before)
			}
			if w.Sent() != (len(c.before) > 0) {
				t.Errorf("Sent is %v with %q", w.Sent(), to.log)
			}
			w.Release()
			if got := to.log[len(c.before):]; !slices.Equal(got, c.after) {
				t.Errorf("Release lets go %q, want %q", got, c.after)
			}
			if !w.Sent() {
				t.Error("Sent is false after Release")
			}
			w.Release()
			if len(to.log) != len(c.before)+len(c.after) {
				t.Errorf("the second Release sends again: %q", to.log)
			}
		})
	}
}

func TestWritingWithoutAHeaderIsA200(t *testing.T) {
	to := newClient()
	w := newWriter(to, post())
	_, _ = w.Write([]byte("abc"))
	w.WriteHeader(500) // too late
	if want := []string{"status 200", "write abc"}; !slices.Equal(to.log, want) {
		t.Errorf("the client has %q, want %q", to.log, want)
	}
}

// P7: bytes flow at once, so a flush reaches the client, but not the held end.
func TestFlush(t *testing.T) {
	to := newClient()
	w := newWriter(to, post())
	w.Flush() // sends the header
	_, _ = w.Write([]byte("data: 1\n\n"))
	if err := http.NewResponseController(w).Flush(); err != nil {
		t.Error(err)
	}
	if want := []string{"status 200", "flush", "write data: 1\n\n", "flush"}; !slices.Equal(to.log, want) {
		t.Errorf("the client has %q, want %q", to.log, want)
	}

	to = newClient()
	w = newWriter(to, post())
	w.WriteHeader(204)
	w.Flush()
	if len(to.log) != 0 {
		t.Errorf("a flush let a held header go: %q", to.log)
	}
}

// A writer that cannot flush is no client that has left: the answer goes on.
func TestAnswerGoesOnWhereNothingCanBeFlushed(t *testing.T) {
	to := newClient()
	w := newWriter(plainClient{to}, post())
	w.Flush()
	_, _ = w.Write([]byte("abc"))
	if want := []string{"status 200", "write abc"}; !slices.Equal(to.log, want) {
		t.Errorf("the client has %q, want %q", to.log, want)
	}
}

func TestInformationalAnswersPassAtOnce(t *testing.T) {
	to := newClient()
	w := newWriter(to, post())
	w.WriteHeader(http.StatusContinue)
	w.WriteHeader(http.StatusEarlyHints)
	if w.Sent() {
		t.Error("an informational answer counts as the final one")
	}
	w.WriteHeader(204)
	w.Release()
	if want := []string{"status 100", "status 103", "status 204"}; !slices.Equal(to.log, want) {
		t.Errorf("the client has %q, want %q", to.log, want)
	}
}

// P7: the client's leaving stops nothing: writes succeed and are dropped.
func TestTheClientsLeavingIsNotNoticed(t *testing.T) {
	to := newClient()
	w := newWriter(to, post())
	_, _ = w.Write([]byte("abc"))
	to.gone = true
	for range 2 {
		if n, err := w.Write([]byte("def")); n != 3 || err != nil {
			t.Errorf("writing to a client that left: %d, %v", n, err)
		}
	}
	to.gone = false // once gone, always gone: what it missed cannot be made up for
	_, _ = w.Write([]byte("ghi"))
	w.Flush()
	w.Release()
	if string(to.body) != "abc" {
		t.Errorf("the client that left after abc has %q", to.body)
	}
}

// A failed flush tells of the client's leaving as a failed write does.
func TestAFailedFlushIsTheClientsLeaving(t *testing.T) {
	to := newClient()
	w := newWriter(to, post())
	w.WriteHeader(200)
	to.gone = true
	w.Flush()
	to.gone = false
	_, _ = w.Write([]byte("abc"))
	if len(to.body) != 0 {
		t.Errorf("the client that left has %q", to.body)
	}
}

// P7: a client that stalls is treated as one that left, so that it cannot hold an
// execution; the limit is for this answer, not for the connection.
// stalled is a client that takes nothing until its connection's deadline has passed.
type stalled struct {
	header   http.Header
	deadline chan struct{}
	passed   sync.Once
}

func (s *stalled) Header() http.Header { return s.header }
func (s *stalled) WriteHeader(int)     {}

func (s *stalled) Write([]byte) (int, error) {
	<-s.deadline
	return 0, os.ErrDeadlineExceeded
}

func (s *stalled) FlushError() error {
	_, err := s.Write(nil)
	return err
}

func (s *stalled) SetWriteDeadline(t time.Time) error {
	if !t.After(time.Now()) {
		s.passed.Do(func() { close(s.deadline) })
	}
	return nil
}

// P7: a client that stalls is taken for one that left, and holds nothing up for longer
// than that takes.
func TestStallingClientsAreGivenUp(t *testing.T) {
	for name, stall := range map[string]func(*answer.Writer){
		"in a write": func(w *answer.Writer) { _, _ = w.Write([]byte("x")) },
		"in a flush": func(w *answer.Writer) { w.Flush() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWriter(&stalled{header: http.Header{}, deadline: make(chan struct{})}, post())
				begin := time.Now()
				w.WriteHeader(200)
				stall(w)
				_, _ = w.Write([]byte("dropped"))
				w.Flush()
				w.Release()
				if took := time.Since(begin); took != 30*time.Second {
					t.Errorf("given up after %v", took)
				}
			})
		})
	}
}

// slowDeadline is a stalled client whose deadline takes a while to be set.
type slowDeadline struct {
	stalled
	setting, twice atomic.Bool
}

func (s *slowDeadline) SetWriteDeadline(t time.Time) error {
	if s.setting.Swap(true) {
		s.twice.Store(true)
	}
	defer s.setting.Store(false)
	defer func() { <-time.After(time.Second) }()
	return s.stalled.SetWriteDeadline(t)
}

// The writers of handlers are not made for two goroutines: the one whose write was overdue waits until the deadline
// that has ended it is set.
func TestDeadlinesOfAStallAreSetOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := &slowDeadline{stalled: stalled{header: http.Header{}, deadline: make(chan struct{})}}
		w := newWriter(to, post())
		_, _ = w.Write([]byte("x"))
		if to.setting.Load() || to.twice.Load() {
			t.Error("a deadline was set while another one was")
		}
	})
}

// P7: silence of the upstream is not the client's stalling, and sets no deadline.
func TestSilenceSetsNoDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := newClient()
		w := newWriter(to, post())
		_, _ = w.Write(bytes.Repeat([]byte("x"), 128<<10))
		w.Flush()
		time.Sleep(time.Hour)
		_, _ = w.Write([]byte("end"))
		w.Release()
		if len(to.deadlines) != 0 {
			t.Errorf("deadlines %v", to.deadlines)
		}
		if !strings.HasSuffix(string(to.body), "xend") {
			t.Errorf("%d bytes arrived", len(to.body))
		}
	})
}

func TestWritersWithoutDeadlinesWork(t *testing.T) {
	to := newClient()
	w := newWriter(plainClient{to}, post())
	_, _ = w.Write(bytes.Repeat([]byte("x"), 128<<10))
	_, _ = w.Write([]byte("end"))
	w.Release()
	if !strings.HasSuffix(string(to.body), "xend") || len(to.body) != 128<<10+3 {
		t.Errorf("%d bytes arrived", len(to.body))
	}
}
