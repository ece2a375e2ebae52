package answer

import (
	"cmp"
	"context"
	"io"
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Sink takes a recording.
type Sink interface {
	// Start takes the final status and the header difference.
	Start(status int, header map[string][]string)
	// Write takes the next bytes of the body. needed says that they will be read back; it reports
	// whether they can be.
	Write(p []byte, needed bool) (recorded bool)
	// ReadBack reads from off on. Its Read does not wait for more.
	ReadBack(off int64) io.ReadCloser
	// Wait waits, until ready is closed, for the client to take what cannot be read back. False
	// means that the time is used up.
	Wait(ready <-chan struct{}) bool
	// SetTrailer takes the trailer.
	SetTrailer(trailer map[string][]string)
	// Judge is called once the status and header of the answer are known and before they are
	// sent. It returns further fields that the answer carries, whatever the upstream says.
	Judge(status int) http.Header
	// Cut reports that we have cancelled the forwarded request, which makes a 499 Caddy's own and
	// not the upstream's.
	Cut() bool
}

// Field is a header field with one value.
type Field struct {
	Name, Value string

	list [1]string // what header maps share, whose handlers may change it in place
}

func (f *Field) set(h http.Header) {
	if f.list[0] != f.Value { // else somebody may be reading it: the client's header map has it too
		f.list[0] = f.Value
	}
	h[f.Name] = f.list[:]
}

// Recorder is the response writer of a forwarded call: everything written goes into the sink, and
// to the client at the client's own pace. A slow or leaving client is not noticed.
//
// It has no Unwrap and no Hijack, which would bypass the recording. Its header map is its own:
// the client's must not change while the client is written to.
type Recorder struct {
	w      *Writer
	pump   *pump // from the first write on that could wait for the client
	sink   Sink
	header http.Header     // what the call makes of the client's header map
	before http.Header     // the client's as it was before, where it was changed and the answer may still be replaced
	marks  []Field         // our own fields, which no upstream may set
	small  *[32 << 10]byte // the body, as far as it has come, of an answer that waits whole; nil for others

	status      int
	length      int64 // announced, or -1
	size        int64
	interrupted bool
	judged      http.Header // what Sink.Judge gave
}

// NewRecorder returns a recorder on w. marks are header fields that the answer always carries. They must not change
// while the recorder is in use.
func NewRecorder(w *Writer, sink Sink, marks []Field) Recorder {
	r := Recorder{w: w, sink: sink, marks: marks, length: -1}
	r.header = make(http.Header, len(w.Header())+len(marks)+4)
	fill(r.header, w.Header())
	r.mark(r.header)
	return r
}

// Header is the future header of the answer, and its trailer.
func (r *Recorder) Header() http.Header { return r.header }

// mark sets in h the fields that only the guard sets.
func (r *Recorder) mark(h http.Header) {
	for _, name := range ours {
		delete(h, name)
		delete(h, http.TrailerPrefix+name)
	}
	for i := range r.marks {
		r.marks[i].set(h)
	}
	for name, values := range r.judged {
		h[name] = values
	}
}

// fill copies from to h. The lists are shared, and must not be appended to in place.
func fill(h, from http.Header) {
	for name := range h {
		if _, ok := from[name]; !ok {
			delete(h, name)
		}
	}
	for name, values := range from {
		h[name] = slices.Clip(values)
	}
}

// Reset restores the header maps to their state before the call, to forward or answer it anew. It
// must not be used once anything was sent.
func (r *Recorder) Reset() {
	h := r.w.Header()
	if r.before != nil {
		fill(h, r.before)
		r.before = nil
	}
	if r.small != nil {
		buffers.Put(r.small)
		r.small = nil
	}
	r.judged = nil
	r.mark(h)
	fill(r.header, h)
}

// Status is the final status that was written; 0 if none was.
func (r *Recorder) Status() int { return r.status }

// Interrupted reports that the handler gave up because we had cancelled the call.
func (r *Recorder) Interrupted() bool { return r.interrupted }

// Waits reports that the answer has begun and waits whole, so that another one may still take its place.
func (r *Recorder) Waits() bool { return r.small != nil }

// WriteHeader records and sends the header.
func (r *Recorder) WriteHeader(status int) {
	if informational(status) {
		before := maps.Clone(r.w.Header())
		fill(r.w.Header(), r.header)
		r.w.WriteHeader(status)
		fill(r.w.Header(), before)
		return
	}
	if status < 100 || status > 999 {
		// As net/http would, but before anything is recorded.
		panic("agent_guard: invalid status " + strconv.Itoa(status))
	}
	if r.status != 0 || r.interrupted {
		return
	}
	if status == 499 && r.sink.Cut() {
		r.interrupted = true
		return
	}
	r.status = status
	r.judged = r.sink.Judge(status)
	r.mark(r.header)
	r.length = contentLength(r.header)
	r.sink.Start(status, difference(r.w.Header(), r.header))
	if held, whole := r.w.holds(status, r.length); held || whole {
		r.before = maps.Clone(r.w.Header())
	} else if 0 < r.length && r.length <= waitingSize {
		r.small = buffers.Get().(*[32 << 10]byte)
		return
	}
	fill(r.w.Header(), r.header)
	r.w.WriteHeader(status)
}

// Write records p and queues it for the client. It never fails.
func (r *Recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	n := len(p)
	if r.interrupted || n == 0 {
		return n, nil
	}
	before := r.size
	r.size += int64(n)
	switch {
	case r.w.held:
		r.sink.Write(p, false)
		return n, nil
	case r.small != nil && r.size <= r.length:
		copy(r.small[before:], p)
		r.sink.Write(p, false)
		return n, nil
	case r.small != nil:
		r.letGo(before)
	}
	switch {
	case r.w.whole, r.pump == nil && r.size <= directSize:
		r.sink.Write(p, false)
		return r.w.Write(p)
	case r.pump == nil:
		r.pump = newPump(r.w, r.sink, before)
	}
	r.pump.write(p)
	return n, nil
}

// Flush sends what is buffered to the client.
func (r *Recorder) Flush() { _ = r.FlushError() }

// FlushError is Flush for http.ResponseController. It never fails.
func (r *Recorder) FlushError() error {
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	if r.interrupted || r.w.held || r.w.whole {
		return nil
	}
	if r.small != nil {
		r.letGo(r.size)
	}
	if r.pump == nil {
		r.pump = newPump(r.w, r.sink, r.size)
	}
	r.pump.flushed()
	return nil
}

// letGo sends an answer that waits whole, of which so many bytes have come.
func (r *Recorder) letGo(size int64) {
	body := r.small
	r.small = nil
	fill(r.w.Header(), r.header)
	r.w.WriteHeader(r.status)
	_, _ = r.w.Write(body[:size]) // never fails
	if !r.w.gone {                // see pump.free
		buffers.Put(body)
	}
}

// Finish ends the recording of an answer, and returns its trailer. A handler that wrote nothing answered 200 without
// a body, and announced or prefixed names in the header map are now the trailer. whole reports whether the body has
// the announced length.
func (r *Recorder) Finish() (trailer map[string][]string, whole bool) {
	if r.status == 0 && !r.interrupted {
		r.WriteHeader(http.StatusOK)
	}
	if trailer = r.trailer(); len(trailer) > 0 {
		r.sink.SetTrailer(trailer)
	}
	r.mark(r.header) // in the trailer too
	return trailer, r.length < 0 || r.w.head || !bodyAllowed(r.status) || r.size == r.length
}

// Apart reports that the client gets the answer at its own pace, so that Release and Drain may
// have to wait for it.
func (r *Recorder) Apart() bool { return r.pump != nil }

// Release sends the end of the answer, after waiting until the client has got everything before
// or ctx is over. False means that it has not, and its connection must be aborted to show that.
// shows is the status that the answer means, if that differs from its own; else 0.
func (r *Recorder) Release(ctx context.Context, shows int) (whole bool) {
	if !r.drain(ctx) {
		return false
	}
	h := r.w.Header()
	r.w.shows = cmp.Or(r.w.shows, shows)
	if r.small != nil {
		r.w.kept = true // all of it can go
		r.letGo(r.size)
	} else if !r.w.sent {
		fill(h, r.header) // which may have changed since
	}
	r.w.Release()
	for _, name := range announced(r.header) {
		if values, ok := r.header[name]; ok {
			h[name] = values
		}
	}
	for name, values := range r.header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			h[name] = values
		}
	}
	return true
}

// Drain waits until the client has got what was written of an answer without an end, or ctx is
// over. The client's connection must be aborted then: what was not flushed may not reach it.
func (r *Recorder) Drain(ctx context.Context) {
	r.drain(ctx)
	if r.w.final {
		r.w.Attempt.Unanswered()
	}
}

func (r *Recorder) drain(ctx context.Context) (whole bool) {
	return r.pump == nil || !r.pump.end(ctx)
}

// trailer is what was written after the body.
func (r *Recorder) trailer() map[string][]string {
	var trailer map[string][]string
	add := func(name string, values []string) {
		if len(values) == 0 || neverReplayed(name) {
			return
		}
		if trailer == nil {
			trailer = map[string][]string{}
		}
		trailer[name] = slices.Clone(values)
	}
	h := r.header
	for _, name := range announced(h) {
		add(name, h[name])
	}
	for name, values := range h {
		if after, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			add(textproto.CanonicalMIMEHeaderKey(after), values)
		}
	}
	return trailer
}

// announced lists the canonical names in the Trailer field.
func announced(h http.Header) []string {
	var names []string
	for _, line := range h["Trailer"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = textproto.TrimString(name); name != "" {
				names = append(names, textproto.CanonicalMIMEHeaderKey(name))
			}
		}
	}
	return names
}

// difference is the change from before to after: names with values are set, names without are
// removed. Fields that must not be replayed are left out.
func difference(before, after http.Header) map[string][]string {
	diff := make(map[string][]string, len(after))
	lines := make([]string, 0, len(after)) // of all fields: most have one
	for name, values := range after {
		if len(values) == 0 || neverReplayed(name) || slices.Equal(values, before[name]) {
			continue
		}
		from := len(lines)
		lines = append(lines, values...)
		diff[name] = lines[from:len(lines):len(lines)]
	}
	for name := range before {
		if len(after[name]) == 0 && !neverReplayed(name) {
			diff[name] = nil
		}
	}
	return diff
}

// ours are the fields that only the gateway may set.
var ours = [...]string{"Execution-Id", "Execution-Status", "Execution-Checkpoint", "Execution-Recognized", "Idempotent-Replayed"}

// neverReplayed lists fields of one connection, one moment or one client, and those that we set.
func neverReplayed(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Transfer-Encoding", "Upgrade",
		"Date", "Age", "Set-Cookie", "Set-Cookie2", "Server-Timing",
		"Authentication-Info", "Proxy-Authentication-Info", "Clear-Site-Data":
		return true
	}
	return slices.Contains(ours[:], name) || strings.HasPrefix(name, http.TrailerPrefix)
}

// Replayable is the part of h that can be replayed.
func Replayable(h http.Header) map[string][]string { return difference(nil, h) }

// directSize is the size up to which a body that nobody flushes is written without a goroutine:
// net/http keeps it in memory, so that the write does not wait for the client.
const directSize = 2 << 10

// waitingSize is the size up to which an answer of known length that nobody flushes waits whole for its record, in
// memory of the guard in place of that of net/http: where the outcome cannot be recorded, the client is told so.
const waitingSize = 4 << 10

// pump sends an answer at the client's pace, so that the upstream is read at its own (P7). Two
// buffers of 32 KiB hold what the client is too slow for; the rest is read back from the
// recording.
type pump struct {
	w    *Writer
	sink Sink
	done chan struct{} // closed when nothing more will be written
	wake chan struct{} // says that there is something to do

	mu      sync.Mutex
	size    int64         // of what the upstream has sent
	queue   []byte        // what the client gets next
	back    io.ReadCloser // gives what comes after queue; nil where nothing does
	lag     int64         // bytes to be read back
	adding  bool          // lag is about to grow
	flush   bool
	ended   bool          // the upstream sends no more
	cutOff  bool          // the client gets nothing more
	room    chan struct{} // closed when queue was taken or the lag made up for; nil while nobody waits
	broken  bool          // bytes are missing that the client would have taken
	buffers [2]*[32 << 10]byte
}

func newPump(w *Writer, sink Sink, size int64) *pump {
	p := &pump{w: w, sink: sink, size: size, done: make(chan struct{}), wake: make(chan struct{}, 1)}
	p.buffers[0] = buffers.Get().(*[32 << 10]byte)
	p.queue = p.buffers[0][:0]
	go p.run()
	return p
}

// write records b and queues it for the client. It waits for the client only if b cannot be read
// back later.
func (p *pump) write(b []byte) {
	p.mu.Lock()
	from := p.size
	p.size += int64(len(b))
	switch {
	case p.cutOff:
		p.mu.Unlock()
		p.sink.Write(b, false)
		return
	case p.back == nil && len(b) <= cap(p.queue)-len(p.queue):
		p.queue = append(p.queue, b...)
		p.mu.Unlock()
		p.signal()
		p.sink.Write(b, false)
		return
	case p.back == nil:
		p.back = p.sink.ReadBack(from)
	}
	p.adding = true
	p.mu.Unlock()
	recorded := p.sink.Write(b, true)
	p.mu.Lock()
	p.adding = false
	if recorded {
		p.lag += int64(len(b))
	}
	p.mu.Unlock()
	p.signal()
	if !recorded {
		p.sendUnrecorded(b)
	}
}

// sendUnrecorded waits until the client takes b, which cannot be read back.
func (p *pump) sendUnrecorded(b []byte) {
	for len(b) > 0 {
		p.mu.Lock()
		if p.cutOff {
			p.mu.Unlock()
			return
		}
		if n := min(cap(p.queue)-len(p.queue), len(b)); n > 0 && p.lag == 0 {
			p.queue = append(p.queue, b[:n]...)
			b = b[n:]
			p.mu.Unlock()
			p.signal()
			continue
		}
		if p.room == nil {
			p.room = make(chan struct{})
		}
		room := p.room
		p.mu.Unlock()
		if !p.sink.Wait(room) {
			p.mu.Lock()
			p.broken = true
			p.mu.Unlock()
			p.cut()
			return
		}
	}
}

// flushed marks that the client is to get everything written so far.
func (p *pump) flushed() {
	p.mu.Lock()
	p.flush = true
	p.mu.Unlock()
	p.signal()
}

func (p *pump) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// cut stops sending, and ends a running write.
func (p *pump) cut() {
	p.mu.Lock()
	p.cutOff = true
	p.mu.Unlock()
	p.signal()
	_ = p.w.control().SetWriteDeadline(time.Now())
}

// end waits until the client has got everything, or ctx is over. It reports whether bytes are
// missing that the client would have taken.
func (p *pump) end(ctx context.Context) (broken bool) {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.signal()
	select {
	case <-p.done:
	default:
		select {
		case <-p.done:
		case <-ctx.Done():
			p.cut()
			<-p.done
			return true
		}
	}
	return p.broken
}

// run writes to the client until the answer has ended or the client has gone.
func (p *pump) run() {
	defer close(p.done)
	defer p.free()
	var spare []byte // the buffer that is not the queue's
	for {
		p.mu.Lock()
		if spare == nil && (len(p.queue) > 0 || p.lag > 0) {
			p.buffers[1] = buffers.Get().(*[32 << 10]byte)
			spare = p.buffers[1][:0]
		}
		switch {
		case p.cutOff:
			p.mu.Unlock()
			return
		case len(p.queue) > 0:
			next := p.queue
			p.queue = spare
			p.roomMade()
			p.mu.Unlock()
			_, _ = p.w.Write(next) // never fails
			spare = next[:0]
		case p.lag > 0:
			b, from := spare[:min(int64(cap(spare)), p.lag)], p.back
			p.mu.Unlock()
			n, err := from.Read(b)
			if n == 0 || err != nil {
				p.lost()
				return
			}
			_, _ = p.w.Write(b[:n]) // never fails
			p.mu.Lock()
			if p.lag -= int64(n); p.lag == 0 {
				p.roomMade()
			}
			p.mu.Unlock()
		case p.back != nil && !p.adding:
			_ = p.back.Close()
			p.back = nil
			p.mu.Unlock()
		case p.flush:
			p.flush = false
			p.mu.Unlock()
			p.w.flush()
		case p.ended:
			p.mu.Unlock()
			return
		default:
			p.mu.Unlock()
			<-p.wake
		}
		if p.w.gone {
			return
		}
	}
}

// lost marks that the client's next bytes cannot be read back any more.
func (p *pump) lost() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = true
}

// roomMade wakes sendUnrecorded. The caller holds mu.
func (p *pump) roomMade() {
	if p.room != nil {
		close(p.room)
		p.room = nil
	}
}

// free ends the pump's side: from here on nothing is kept for the client.
func (p *pump) free() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutOff = true
	p.roomMade()
	if p.back != nil {
		_ = p.back.Close()
		p.back = nil
	}
	p.queue = nil
	for _, b := range p.buffers {
		// After a failed write an HTTP/2 connection may still read the buffer it was given, which
		// must not get another caller's answer (P3).
		if b != nil && !p.w.gone {
			buffers.Put(b)
		}
	}
}
