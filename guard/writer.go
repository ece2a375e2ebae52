// Package guard is the way of a guarded call: what it is forwarded to (Upstream), and how
// its answer goes to the client: at once, but for its end, which waits until the outcome is
// recorded (P7). Answers are recorded on the way, and recorded ones played back.
package guard

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"time"
)

// stallLimit is how long a client may take for one write. A client that stalls is
// treated as one that left: its execution goes on and is recorded.
const stallLimit = 30 * time.Second

// Writer sends an answer and holds back its end: with Content-Length the last byte,
// else the return of the handler (terminating chunk, END_STREAM), for answers
// without a body the header. Release lets the end go.
//
// Errors of the client's connection are swallowed: the first one makes the writer
// drop everything that follows.
type Writer struct {
	w       http.ResponseWriter
	control *http.ResponseController
	head    bool // the request was HEAD

	failures int64 // failures with a body of at most this wait whole

	status int
	held   bool // the header is the end, and waits
	whole  bool // a failure that waits whole
	left   int64
	last   []byte // what waits: a byte, or the body
	sent   bool
	gone   bool
	stall  *time.Timer // ends the write that is under way
}

// NewWriter returns a Writer on w for an answer to r.
func NewWriter(w http.ResponseWriter, r *http.Request) *Writer {
	return &Writer{w: w, control: http.NewResponseController(w), head: r.Method == http.MethodHead, left: -1}
}

// HoldFailures makes the writer hold back answers whose status says that the call has failed,
// header and all, where their announced body has at most so many bytes: what is found out
// about the failure at its end can stand in the header.
func (w *Writer) HoldFailures(most int64) { w.failures = most }

// Header is the client's header map.
func (w *Writer) Header() http.Header { return w.w.Header() }

// Sent reports whether anything of the final answer has left, so that it cannot be
// replaced any more.
func (w *Writer) Sent() bool { return w.sent }

// WriteHeader sends the header, or holds it where it is the end. Informational
// statuses pass through.
func (w *Writer) WriteHeader(status int) {
	if informational(status) {
		w.w.WriteHeader(status)
		return
	}
	if w.status != 0 {
		return
	}
	w.status = status
	w.left = contentLength(w.Header())
	if w.held, w.whole = w.holds(status, w.left); w.held || w.whole {
		return
	}
	w.sent = true
	w.w.WriteHeader(status)
}

// holds reports whether the header of an answer is its end, or waits for it with the body.
func (w *Writer) holds(status int, length int64) (held, whole bool) {
	held = w.head || !bodyAllowed(status) || length == 0
	return held, !held && status >= http.StatusBadRequest && 0 < length && length <= w.failures
}

// takeBack forgets an answer of which nothing was sent.
func (w *Writer) takeBack(header http.Header) {
	clear(w.Header())
	maps.Copy(w.Header(), header)
	w.status, w.held, w.whole, w.left, w.last = 0, false, false, -1, nil
}

// Write sends p, but for the last byte of a body of known length. It never fails.
func (w *Writer) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	n := len(p)
	if n == 0 || w.held {
		return n, nil
	}
	if w.whole {
		p = p[:min(int64(n), w.left)]
		w.last, w.left = append(w.last, p...), w.left-int64(len(p))
		return n, nil
	}
	if w.left >= 0 {
		if int64(n) >= w.left {
			if w.left == 0 {
				return n, nil // beyond Content-Length
			}
			p = p[:w.left]
			w.last = append(w.last, p[len(p)-1])
			p = p[:len(p)-1]
			w.left = 0
		} else {
			w.left -= int64(n)
		}
	}
	w.send(p)
	return n, nil
}

func (w *Writer) send(p []byte) {
	if w.gone || len(p) == 0 {
		return
	}
	err := w.bounded(func() error {
		_, err := w.w.Write(p)
		return err
	})
	if err != nil {
		w.gone = true
	}
}

// bounded ends op where the client stalls. A write deadline that stands while nothing
// is written would reset a healthy HTTP/2 stream whose upstream is silent, so there is
// one only once op is overdue.
func (w *Writer) bounded(op func() error) error {
	if w.stall == nil {
		w.stall = time.AfterFunc(stallLimit, func() { _ = w.control.SetWriteDeadline(time.Now()) })
	} else {
		w.stall.Reset(stallLimit)
	}
	err := op()
	if !w.stall.Stop() {
		w.gone = true // the deadline stands, or is about to
	}
	return err
}

// Flush sends what is buffered on the way to the client.
func (w *Writer) Flush() { _ = w.FlushError() }

// FlushError is Flush for http.ResponseController. It never fails.
func (w *Writer) FlushError() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if w.held || w.whole || w.gone {
		return nil
	}
	if err := w.bounded(w.control.Flush); err != nil && !errors.Is(err, http.ErrNotSupported) {
		w.gone = true
	}
	return nil
}

// Release lets the end of the answer go.
func (w *Writer) Release() {
	if w.held || w.whole {
		w.held, w.whole, w.sent = false, false, true
		w.w.WriteHeader(w.status)
	}
	w.send(w.last)
	w.last = nil
}

func informational(status int) bool { return status >= 100 && status < 200 && status != 101 }

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified && status >= 200
}

// contentLength is the announced length of a body, or -1.
func contentLength(h http.Header) int64 {
	v := h["Content-Length"]
	if len(v) == 0 {
		return -1
	}
	n, err := strconv.ParseInt(v[0], 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// Mark returns a response writer on w whose answers carry the header field name with
// value, whatever the upstream says. Nothing is held back or recorded.
func Mark(w http.ResponseWriter, name, value string) http.ResponseWriter {
	return &marked{ResponseWriter: w, name: name, value: value}
}

type marked struct {
	http.ResponseWriter
	name, value string
	wrote       bool
}

// WriteHeader sends the header.
func (m *marked) WriteHeader(status int) {
	if !m.wrote && !informational(status) {
		m.wrote = true
		m.Header().Set(m.name, m.value)
	}
	m.ResponseWriter.WriteHeader(status)
}

// Write sends p.
func (m *marked) Write(p []byte) (int, error) {
	m.begin()
	return m.ResponseWriter.Write(p)
}

// ReadFrom sends what r gives.
func (m *marked) ReadFrom(r io.Reader) (int64, error) {
	m.begin()
	return io.Copy(m.ResponseWriter, r)
}

// FlushError is Flush for http.ResponseController.
func (m *marked) FlushError() error {
	m.begin()
	return http.NewResponseController(m.ResponseWriter).Flush()
}

func (m *marked) begin() {
	if !m.wrote {
		m.WriteHeader(http.StatusOK)
	}
}

// Unwrap is for http.ResponseController.
func (m *marked) Unwrap() http.ResponseWriter { return m.ResponseWriter }
