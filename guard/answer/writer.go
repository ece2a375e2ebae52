// Package answer records the answer to a call and sends it to its client: the end after the outcome is
// recorded, the rest at the client's own pace. It plays recorded and running answers to other clients.
package answer

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// stallLimit is how long a client may take for one write. A client that stalls is
// treated as one that left: its execution goes on and is recorded.
const stallLimit = 30 * time.Second

// Writer sends an answer and holds back its end: with Content-Length the last byte, else the
// return of the handler (terminating chunk, END_STREAM), for answers without a body the header.
// Release sends the end. An answer of known length that is played from its record has nothing to
// wait for: it goes whole.
//
// The first error of the client's connection makes the writer drop everything that follows;
// errors are not returned. Its fields are set before anything is written.
type Writer struct {
	// Host says what a half-closed client has received; may be nil.
	Host interface{ Received(r *http.Request) bool }
	// Attempt is told before the client is answered, and when the answer did not reach it. It is an
	// execution.Attempt or Reader; nil tells nobody.
	Attempt interface {
		Answering(status int, elsewhere bool)
		Unanswered()
	}
	// Message is that of a call without a key which is answered over JSON-RPC; nil for others.
	Message interface {
		// Answer reads an answer of this media type to the message.
		Answer(media string) *protocol.Answer
		// Shows is the status that an answer with this one stands for if it says this.
		Shows(status int, said protocol.Outcome) int
	}
	// HoldFailures makes the writer hold back answers whose status says that the call has failed,
	// header and all, where their announced body has at most so many bytes: what is found out
	// about the failure at its end can stand in the header.
	HoldFailures int64

	w       http.ResponseWriter
	request *http.Request    // of the client
	head    bool             // the request was HEAD
	answer  *protocol.Answer // reads the stream of a message, until its final answer has come; may be nil
	final   bool             // the final answer was written, and not flushed yet
	reached bool             // the final answer was flushed
	http1   bool

	status int
	kept   bool   // the answer is recorded, so that its end need not wait
	held   bool   // the header is the end, and waits
	whole  bool   // a failure that waits whole
	left   int64  // bytes of the announced body that have not come; -1 for a body without a length
	last   []byte // what waits: a byte, or the body
	end    [1]byte
	sent   bool // a part of the answer, or its header, was sent
	ended  bool // the end was sent
	gone   bool // the client has left, or stalls
	shows  int  // the status that the answer stands for, where it is another one

	stall *time.Timer    // of a write that takes too long; made by the first one
	rings sync.WaitGroup // of stall, while it may yet ring
}

// NewWriter returns a Writer on w for an answer to r.
func NewWriter(w http.ResponseWriter, r *http.Request) Writer {
	return Writer{w: w, request: r, head: r.Method == http.MethodHead, left: -1, http1: r.ProtoMajor == 1}
}

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
	if h := w.Header(); w.Message != nil && strings.HasPrefix(h.Get("Content-Type"), "text/event-stream") && h.Get("Content-Encoding") == "" {
		// Whoever has read the final answer may call again before the stream has ended (ADR 0070).
		w.answer = w.Message.Answer(h.Get("Content-Type"))
	}
	w.w.WriteHeader(status)
}

// holds reports whether the header of an answer is its end, or waits for it with the body.
func (w *Writer) holds(status int, length int64) (held, whole bool) {
	held = w.head || !bodyAllowed(status) || length == 0
	return held, !held && status >= http.StatusBadRequest && 0 < length && length <= w.HoldFailures
}

// takeBack forgets an answer of which nothing was sent. header is what was there before.
func (w *Writer) takeBack(header []headerLines) {
	h := w.Header()
	clear(h)
	for _, l := range header {
		h[l.name] = l.values
	}
	w.status, w.shows, w.kept, w.held, w.whole, w.left, w.last = 0, 0, false, false, false, -1, nil
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
			w.left = 0
			if w.kept {
				w.finish(p)
				return n, nil
			}
			w.last = append(w.end[:0], p[len(p)-1])
			p = p[:len(p)-1]
		} else {
			w.left -= int64(n)
		}
	}
	w.send(p, false)
	return n, nil
}

// send writes p, and flushes it.
func (w *Writer) send(p []byte, flush bool) {
	if w.gone || len(p) == 0 && !flush {
		return
	}
	if w.answer != nil {
		_, _ = w.answer.Write(p) // never fails
		if said := w.answer.End(); said.Meaning != protocol.Unanswered {
			w.shows = cmp.Or(w.shows, w.Message.Shows(w.status, said))
			w.Attempt.Answering(w.shows, false) // before the write
			w.answer, w.final = nil, true
		}
	}
	if w.rings.Add(1); w.stall == nil {
		w.stall = time.AfterFunc(stallLimit, func() { defer w.rings.Done(); w.overdue() })
	} else {
		w.stall.Reset(stallLimit)
	}
	var err error
	if len(p) > 0 {
		_, err = w.w.Write(p)
	}
	if flush && err == nil {
		if err = w.control().Flush(); errors.Is(err, http.ErrNotSupported) {
			err = nil
		}
	}
	if w.stall.Stop() {
		w.rings.Done()
	} else {
		w.rings.Wait() // writers of handlers do not take two deadlines at a time, nor one when the handler has returned
		w.overdue()    // a handler's writer may have set another one since, and the end must not go out without p's
		w.gone = true
	}
	if err != nil {
		w.gone = true
	}
	if w.final && w.gone {
		w.Attempt.Unanswered()
	}
	if flush || w.gone {
		w.reached, w.final = w.reached || w.final && !w.gone, false
	}
}

// overdue ends a write or flush where the client stalls. A write deadline that stands while nothing
// is written would reset a healthy HTTP/2 stream whose upstream is silent, so there is one only
// once the write is overdue.
func (w *Writer) overdue() { _ = w.control().SetWriteDeadline(time.Now()) }

func (w *Writer) control() *http.ResponseController { return http.NewResponseController(w.w) }

// flush sends what is buffered to the client.
func (w *Writer) flush() {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if !w.held && !w.whole {
		w.send(nil, true)
	}
}

// Release lets the end of the answer go.
func (w *Writer) Release() {
	if !w.ended {
		w.finish(w.last)
		w.last = nil
	}
}

// finish sends the end of the answer, of which p is the last.
func (w *Writer) finish(p []byte) {
	w.ended = true
	heard := w.Attempt != nil && !w.reached
	if heard {
		w.Attempt.Answering(cmp.Or(w.shows, w.status), false) // before the write, which a client may answer with its next call
	}
	all := w.held || w.left == 0
	if w.held || w.whole {
		w.held, w.whole, w.sent = false, false, true
		w.w.WriteHeader(w.status)
	}
	// A client that has closed its connection, or only its own direction. A caller over JSON-RPC may have said itself
	// that it does not wait.
	closed := heard && w.http1 && w.Message == nil && w.Host != nil && w.request.Context().Err() != nil
	w.send(p, heard && w.http1 && (all || closed)) // else the server writes the end later
	switch {
	case heard && w.gone:
		w.Attempt.Unanswered()
	case closed && w.Host.Received(w.request):
		w.Attempt.Answering(cmp.Or(w.shows, w.status), true)
	}
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

// Answer is the answer of an execution, recorded or still being received.
type Answer struct {
	Head *execution.Head
	Body io.Reader
	// Trailer returns the trailers once Body has ended.
	Trailer func() map[string][]string
	// Live says that the answer is still growing: every read is flushed.
	Live bool
	// Own says that nobody else has Head, so that its lists need no copies.
	Own bool
	// Reader is the caller of the execution, where its client asks for the answer by another request than the
	// call; nil otherwise.
	Reader *execution.Reader
	// Reply makes it an answer to another request than the one that was executed; nil repeats it as it was.
	Reply *protocol.Reply
	// Shows is the status that it stands for, where that is another one; else 0.
	Shows int
}

// Recorded is the answer that is recorded.
func Recorded(ctx context.Context, result *execution.Result) Answer {
	trailer := func() map[string][]string { return result.Head.Trailer }
	return Answer{Head: &result.Head, Body: result.Body(ctx), Trailer: trailer, Own: true}
}

// Following is the answer with this head that f follows.
func Following(ctx context.Context, head *execution.Head, f *execution.Follower) Answer {
	return Answer{Head: head, Body: followed{ctx, f}, Trailer: f.Trailer, Live: true}
}

// followed is a follower as an io.Reader.
type followed struct {
	ctx context.Context
	f   *execution.Follower
}

func (f followed) Read(p []byte) (int, error) { return f.f.Read(f.ctx, p) }

// headerLines are the values of a field of a header map.
type headerLines struct {
	name   string
	values []string
}

// Play sends src to the client of w, with marks as further header fields. The end
// of the answer is released when the body has ended with io.EOF. Any other error is
// returned: if w.Sent() then, the connection must be aborted, so that the client
// sees that the answer is not whole; else w is as it was, for another answer.
func Play(w *Writer, r *http.Request, src Answer, marks ...Field) error {
	w.kept, w.shows = !src.Live, src.Shows
	if src.Reader != nil {
		w.Attempt = src.Reader
	}
	var few [8]headerLines // on the stack
	before := few[:0]
	for name, values := range w.Header() {
		before = append(before, headerLines{name, values})
	}
	err := play(w, r, src, marks)
	if err != nil && !w.Sent() {
		w.takeBack(before)
	}
	return err
}

func play(w *Writer, r *http.Request, src Answer, marks []Field) error {
	h := w.Header()
	src.fill(h, marks)
	body, unpacked := src.Body, false
	if (unasked(h, r) || src.Reply != nil && isGzip(h.Get("Content-Encoding"))) && bodyAllowed(src.Head.Status) {
		buffered := bufio.NewReader(body)
		if unpacked = src.Live || startsGzip(buffered); unpacked {
			plain(h)
			body = &gunzip{from: buffered}
		} else { // it is not what its header says, and is repeated as it came
			body = buffered
		}
	}
	if src.Reply != nil {
		for _, name := range protocol.Unrepeatable {
			delete(h, name)
		}
		body = src.Reply.Reader(body, h.Get("Content-Type"))
	}
	w.WriteHeader(src.Head.Status)
	if src.Live {
		w.flush()
	}
	memory := buffers.Get().(*[32 << 10]byte)
	defer func() {
		// After a failed write an HTTP/2 connection may still read the buffer it was given, which
		// must not get another caller's answer (P3).
		if !w.gone {
			buffers.Put(memory)
		}
	}()
	buf := memory[:]
	for {
		n, err := body.Read(buf)
		if n > 0 {
			_, _ = w.Write(buf[:n]) // never fails
			if src.Live {
				w.flush()
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if w.gone {
			return nil // the client has gone
		}
	}
	w.Release()
	trailer := src.Trailer()
	if src.Reply != nil || unpacked {
		trailer = maps.Clone(trailer)
		for _, name := range protocol.OfBody {
			delete(trailer, name)
		}
	}
	setTrailer(w, trailer)
	return nil
}

// fill sets the header fields of a played answer in h, and then the marks.
func (a *Answer) fill(h http.Header, marks []Field) {
	n := 0
	if !a.Own {
		for _, values := range a.Head.Header {
			n += len(values)
		}
	}
	lists := make([]string, 0, n) // other clients have those of the head
	for name, values := range a.Head.Header {
		if values == nil {
			delete(h, name)
			continue
		}
		if !a.Own {
			from := len(lists)
			lists = append(lists, values...)
			values = lists[from:len(lists):len(lists)]
		}
		h[name] = values
	}
	for i := range marks {
		marks[i].set(h)
	}
}

// buffers are what bodies are played through.
var buffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

func setTrailer(w *Writer, trailer map[string][]string) {
	if len(trailer) == 0 {
		return
	}
	w.flush() // without a length yet, so that the trailer has its chunked framing
	h := w.Header()
	names := announced(h)
	for name, values := range trailer {
		if !slices.Contains(names, name) {
			name = http.TrailerPrefix + name
		}
		h[name] = slices.Clone(values)
	}
}

// unasked reports whether the answer is gzipped and r does not accept that. The guarded request
// asked its upstream for nothing but gzip (NarrowEncoding), so other codings need no care.
func unasked(h http.Header, r *http.Request) bool {
	return isGzip(h.Get("Content-Encoding")) && !acceptsGzip(r.Header)
}

// plain makes the header that of the decoded body.
func plain(h http.Header) {
	h.Del("Content-Encoding")
	for _, name := range protocol.OfBody {
		delete(h, name)
	}
	if tag := h.Get("Etag"); tag != "" && !strings.HasPrefix(tag, "W/") {
		h.Set("Etag", "W/"+tag)
	}
}

// NarrowEncoding leaves of a forwarded request's Accept-Encoding what a replay can
// be decoded from: gzip where the client accepts it, else identity. A request
// without the field stays without.
func NarrowEncoding(h http.Header) {
	if len(h["Accept-Encoding"]) == 0 {
		return
	}
	if acceptsGzip(h) {
		h.Set("Accept-Encoding", "gzip")
		return
	}
	h.Set("Accept-Encoding", "identity")
}

// acceptsGzip reads Accept-Encoding (RFC 9110, section 12.5.3).
func acceptsGzip(h http.Header) bool {
	any := false
	for _, line := range h["Accept-Encoding"] {
		for item := range strings.SplitSeq(line, ",") {
			coding, params, _ := strings.Cut(item, ";")
			accepted := true
			if q, ok := strings.CutPrefix(strings.ToLower(strings.Join(strings.Fields(params), "")), "q="); ok {
				weight, err := strconv.ParseFloat(q, 64)
				accepted = err == nil && weight > 0
			}
			switch coding = strings.TrimSpace(coding); {
			case isGzip(coding):
				return accepted
			case coding == "*":
				any = accepted
			}
		}
	}
	return any
}

// isGzip recognises both names of the coding (RFC 9110, section 8.4.1.3).
func isGzip(coding string) bool {
	return strings.EqualFold(coding, "gzip") || strings.EqualFold(coding, "x-gzip")
}

// startsGzip reports that what comes begins as gzip does, or that nothing comes.
func startsGzip(from *bufio.Reader) bool {
	start, err := from.Peek(2)
	return len(start) == 0 && errors.Is(err, io.EOF) || bytes.Equal(start, []byte{0x1f, 0x8b})
}

// gunzip decodes when it is first read, so that the header can go before a live
// answer has its first byte. A body that does not begin as gzip does stays as it is.
type gunzip struct {
	from *bufio.Reader
	z    *gzip.Reader
	raw  bool
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.z == nil && !g.raw {
		g.raw = !startsGzip(g.from)
	}
	if g.raw {
		return g.from.Read(p)
	}
	if g.z == nil {
		z, err := gzip.NewReader(g.from)
		if err != nil {
			return 0, err
		}
		g.z = z
	}
	return g.z.Read(p)
}
