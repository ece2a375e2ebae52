package answer

import (
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

// Sink takes a recording.
type Sink interface {
	// Start takes the final status and the header difference.
	Start(status int, header map[string][]string)
	// Write takes the next bytes of the body.
	Write(p []byte)
	// SetTrailer takes what came after the body.
	SetTrailer(trailer map[string][]string)
}

// Recorder is the response writer of a forwarded call: everything that is written
// goes to the client and into the sink. The client's leaving is not noticed.
//
// It has no Unwrap and no Hijack: what goes around it could not be recorded.
type Recorder struct {
	*Writer
	sink   Sink
	before http.Header // the header map as it was before the call
	marks  http.Header // our own fields, which no upstream may set
	cut    func() bool // whether the forwarding was cut off from inside

	status      int
	length      int64 // announced, or -1
	size        int64
	interrupted bool
	refused     bool
}

// StatusRefused is the Execution-Status of a guard's own problems: what they say is
// of that guard's record, and not of an execution.
const StatusRefused = "refused"

// NewRecorder returns a recorder on w. marks are header fields that the answer
// carries whatever the upstream says; cut tells whether the forwarded request was
// cancelled by ourselves, which makes a 499 Caddy's own and not the upstream's.
func NewRecorder(w *Writer, sink Sink, marks http.Header, cut func() bool) *Recorder {
	r := &Recorder{Writer: w, sink: sink, marks: marks, cut: cut, length: -1}
	r.before = make(http.Header, len(w.Header()))
	for name, values := range w.Header() {
		r.before[name] = values
	}
	r.mark()
	return r
}

func (r *Recorder) mark() {
	for _, name := range ours {
		delete(r.Header(), name)
		delete(r.Header(), http.TrailerPrefix+name)
	}
	for name, values := range r.marks {
		r.Header()[name] = values
	}
}

// Reset brings the header map back to what it was before the call, so that the call
// can be forwarded or answered anew. It must not be used once anything was sent.
func (r *Recorder) Reset() {
	clear(r.Header())
	for name, values := range r.before {
		r.Header()[name] = values
	}
	r.mark()
}

// Status is the final status that was written, 0 if none was.
func (r *Recorder) Status() int { return r.status }

// Interrupted reports that the handler gave the call up because we had cancelled it.
func (r *Recorder) Interrupted() bool { return r.interrupted }

// Refused reports that the answer is another guard's refusal.
func (r *Recorder) Refused() bool { return r.refused }

// Whole reports whether the body has the announced length.
func (r *Recorder) Whole() bool {
	if r.length < 0 || r.head || !bodyAllowed(r.status) {
		return true
	}
	return r.size == r.length
}

// WriteHeader records and sends the header.
func (r *Recorder) WriteHeader(status int) {
	if informational(status) {
		r.Writer.WriteHeader(status)
		return
	}
	if status < 100 || status > 999 {
		// As net/http would, but before anything is recorded.
		panic("agent_guard: invalid status " + strconv.Itoa(status))
	}
	if r.status != 0 || r.interrupted {
		return
	}
	if status == 499 && r.cut() {
		r.interrupted = true
		return
	}
	r.status = status
	r.refused = slices.Contains(r.Header()["Execution-Status"], StatusRefused)
	r.mark()
	r.length = contentLength(r.Header())
	r.sink.Start(status, difference(r.before, r.Header()))
	r.Writer.WriteHeader(status)
}

// Write records and sends p. It never fails.
func (r *Recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	if r.interrupted {
		return len(p), nil
	}
	r.size += int64(len(p))
	r.sink.Write(p)
	return r.Writer.Write(p)
}

// Flush sends what is buffered on the way to the client.
func (r *Recorder) Flush() { _ = r.FlushError() }

// FlushError is Flush for http.ResponseController. It never fails.
func (r *Recorder) FlushError() error {
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	if r.interrupted {
		return nil
	}
	return r.Writer.FlushError()
}

// Finish ends the recording of an answer that came whole: a handler that wrote
// nothing answered 200 without a body, and what stands in the header map now under
// announced or prefixed names is the trailer.
func (r *Recorder) Finish() {
	if r.status == 0 && !r.interrupted {
		r.WriteHeader(http.StatusOK)
	}
	if t := r.Trailer(); len(t) > 0 {
		r.sink.SetTrailer(t)
	}
	r.mark() // in the trailer too
}

// Trailer is what was written after the body.
func (r *Recorder) Trailer() map[string][]string {
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
	h := r.Header()
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

// difference is what must be done to before to get after: names with values are
// set, names without are removed. What must not be replayed is left out.
func difference(before, after http.Header) map[string][]string {
	diff := make(map[string][]string, len(after))
	for name, values := range after {
		if len(values) == 0 || neverReplayed(name) || slices.Equal(values, before[name]) {
			continue
		}
		diff[name] = slices.Clone(values)
	}
	for name := range before {
		if len(after[name]) == 0 && !neverReplayed(name) {
			diff[name] = nil
		}
	}
	return diff
}

// ours are the fields in which nobody but the gateway says something about an
// execution.
var ours = [...]string{"Execution-Id", "Execution-Status", "Execution-Checkpoint", "Idempotent-Replayed"}

// neverReplayed lists fields of one connection, one moment or one client, and those
// that we set ourselves.
func neverReplayed(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Transfer-Encoding", "Upgrade",
		"Date", "Set-Cookie", "Set-Cookie2", "Server-Timing":
		return true
	}
	return slices.Contains(ours[:], name) || strings.HasPrefix(name, http.TrailerPrefix)
}

// Replayable is what of h can be replayed.
func Replayable(h http.Header) map[string][]string { return difference(nil, h) }
