//go:build unix

package e2e

import (
	"bytes"
	"slices"
	"sync"
	"testing"
	"time"
)

// procPoll waits until done reports true.
func procPoll(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(procBound)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// procReceive waits for an event.
func procReceive[T any](t *testing.T, what string, events <-chan T) T {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(procBound):
		t.Fatalf("waited in vain: %s", what)
		panic("unreachable")
	}
}

// procLog collects what a process says, and tells when it has said something.
type procLog struct {
	mu    sync.Mutex
	text  bytes.Buffer
	waits []procWait
}

type procWait struct {
	said func(text []byte) bool
	done chan struct{}
}

func (l *procLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.text.Write(p)
	l.waits = slices.DeleteFunc(l.waits, func(w procWait) bool {
		said := w.said(l.text.Bytes())
		if said {
			close(w.done)
		}
		return said
	})
	return n, err
}

func (l *procLog) wait(said func(text []byte) bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := procWait{said, make(chan struct{})}
	if said(l.text.Bytes()) {
		close(w.done)
	} else {
		l.waits = append(l.waits, w)
	}
	return w.done
}

// when is closed once the process has said text.
func (l *procLog) when(text string) <-chan struct{} {
	return l.wait(func(said []byte) bool { return bytes.Contains(said, []byte(text)) })
}

// line is closed once the process has said n lines.
func (l *procLog) line(n int) <-chan struct{} {
	return l.wait(func(said []byte) bool { return bytes.Count(said, []byte{'\n'}) >= n })
}

func (l *procLog) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.text.Bytes(), []byte(text))
}

// says waits until the process has said text, and reports whether it has: what it says
// comes through a pipe.
func (l *procLog) says(text string) bool {
	select {
	case <-l.when(text):
		return true
	case <-time.After(patience):
		return false
	}
}

func (l *procLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *procLog) tail(n int) string {
	text := l.String()
	return text[max(0, len(text)-n):]
}
