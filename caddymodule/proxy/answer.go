package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// InBand matches answers that are failures although their status is good. Exactly one of JSON,
// Header and SSEError is set.
type InBand struct {
	// A JSON pointer into the answer's body: the answer failed if there is a value other than null, and
	// so did a 2xx whose body is no JSON although its Content-Type says so. Bodies over 64 KiB, and
	// those with a Content-Encoding, are not read. A probe's answer is then judged at its end.
	JSON string `json:"json,omitempty"`

	// A header or trailer field: the answer failed if it has one.
	Header string `json:"header,omitempty"`

	// The value to match: in JSON a string, or a number as it is written. It may begin or end with
	// *, which stands for anything. Default: any value.
	Value string `json:"value,omitempty"`

	// An event stream failed if it sends an event called `error`, or one whose data begins with a
	// JSON member `error`. A probe's answer is then judged by its first event.
	SSEError bool `json:"sse_error,omitempty"`
}

// inBandRule is a checked InBand.
type inBandRule struct {
	InBand
	pointer jsonx.Pointer
}

func (b InBand) check() (inBandRule, error) {
	set := 0
	for _, on := range []bool{b.JSON != "", b.Header != "", b.SSEError} {
		if on {
			set++
		}
	}
	switch {
	case set != 1:
		return inBandRule{}, fmt.Errorf("a rule names %d places; it needs exactly one of json, header and sse_error", set)
	case b.SSEError && b.Value != "":
		return inBandRule{}, errors.New("sse_error takes no value")
	case b.Header != "" && !httpguts.ValidHeaderFieldName(b.Header):
		return inBandRule{}, fmt.Errorf("%q is no name of a header field", b.Header)
	}
	p, err := jsonx.ParsePointer(b.JSON)
	if err != nil {
		return inBandRule{}, fmt.Errorf("json %q: %w", b.JSON, err)
	}
	return inBandRule{b, p}, nil
}

// headerFault returns what in an answer's header or trailer makes it a failure, in a few words, or
// nothing.
func (c *Circuits) headerFault(header http.Header) string {
	for i := range c.checked.inBand {
		r := &c.checked.inBand[i]
		if r.Header == "" {
			continue
		}
		for _, value := range header.Values(r.Header) {
			if r.matches(value) {
				return "header " + r.Header
			}
		}
	}
	return ""
}

// bodyFault returns what in a JSON body makes the answer a failure, in a few words, or nothing.
func (c *Circuits) bodyFault(text []byte) string {
	for i := range c.checked.inBand {
		r := &c.checked.inBand[i]
		if r.JSON == "" {
			continue
		}
		value, found, err := body.Lookup(bytes.NewReader(text), int64(len(text)), r.pointer)
		whole := errors.Is(err, body.ErrNotScalar) && r.Value == ""
		if whole || err == nil && found && r.matches(value) {
			return "json " + r.JSON
		}
	}
	return ""
}

// inspectedBodies reports which kinds of bodies have to be inspected.
func (c *Circuits) inspectedBodies() (json, events bool) {
	for i := range c.checked.inBand {
		json = json || c.checked.inBand[i].JSON != ""
		events = events || c.checked.inBand[i].SSEError
	}
	return json, events
}

func (r *inBandRule) matches(value string) bool {
	want, begins := strings.CutSuffix(r.Value, "*")
	want, ends := strings.CutPrefix(want, "*")
	switch {
	case r.Value == "":
		return true
	case begins && ends:
		return strings.Contains(value, want)
	case begins:
		return strings.HasPrefix(value, want)
	case ends:
		return strings.HasSuffix(value, want)
	}
	return value == want
}

// inspector searches the body of an answer that began well for a failure.
type inspector interface {
	// feed takes the next bytes. fault says what makes the answer a failure, in a few
	// words; good that it is good so far.
	feed(p []byte) (fault string, good bool)
	// end is called at the end of the body, and returns the fault if there is one.
	end() (fault string)
}

// bodyKinds are the kinds of bodies that are inspected.
type bodyKinds struct {
	json, events bool
}

// inspector returns the inspector of res's body; nil if it needs none.
func (l bodyKinds) inspector(c *Circuits, res *http.Response) inspector {
	if !l.json && !l.events || res.Header.Get("Content-Encoding") != "" {
		return nil
	}
	kind, _, err := mime.ParseMediaType(res.Header.Get("Content-Type"))
	switch {
	case err != nil:
		return nil
	case l.events && kind == "text/event-stream":
		return new(eventStream)
	case l.json && body.IsJSON(kind) && res.ContentLength <= maxInspected:
		return &jsonBody{circuits: c, good: res.StatusCode < http.StatusMultipleChoices && res.StatusCode != http.StatusPartialContent}
	}
	return nil
}

// maxInspected is the longest JSON body that is inspected, in bytes.
const maxInspected = 64 << 10

// jsonBody inspects a JSON body, at its end.
type jsonBody struct {
	circuits *Circuits
	good     bool // by its status it is a success, and whole
	body     []byte
	long     bool
}

func (d *jsonBody) feed(p []byte) (fault string, good bool) {
	if d.long {
		return "", false
	}
	if len(d.body)+len(p) > maxInspected {
		d.long, d.body = true, nil
		return "", true
	}
	d.body = append(d.body, p...)
	return "", false
}

// end finds the fault in the body. A good answer that is not the JSON that it says it is is one, too; it
// may be several values.
func (d *jsonBody) end() string {
	values := json.NewDecoder(bytes.NewReader(d.body))
	for d.good {
		if err := values.Decode(new(json.RawMessage)); err == io.EOF {
			break
		} else if err != nil {
			return "no JSON"
		}
	}
	return d.circuits.bodyFault(d.body)
}

// messageAnswer inspects the answer to a message of JSON-RPC, beside another inspector, which may be
// nil. Alone it lets a probe be judged at the end of its answer.
type messageAnswer struct {
	inspector
	circuits *Circuits
	answer   *protocol.Answer
}

func (a *messageAnswer) feed(p []byte) (fault string, good bool) {
	_, _ = a.answer.Write(p) // never fails
	if a.inspector == nil {
		return "", false
	}
	return a.inspector.feed(p)
}

// end takes an internal error for a failure, as a 500 is.
func (a *messageAnswer) end() (fault string) {
	if a.inspector != nil {
		fault = a.inspector.end()
	}
	if said := a.answer.End(); fault == "" && said.Internal() && a.circuits.failedStatus(http.StatusInternalServerError) {
		fault = fmt.Sprintf("JSON-RPC error %d", said.Code)
	}
	return fault
}

// eventStream searches an event stream for an error, line by line.
type eventStream struct {
	line  []byte // beginning of the current line
	begun bool   // the current event has a line
	cr    bool   // the last byte was \r, which \n may follow as part of the same line end
}

// maxLine is how much of a line has to be read, in bytes.
const maxLine = 64

func (e *eventStream) feed(p []byte) (fault string, good bool) {
	for _, b := range p {
		half := b == '\n' && e.cr
		e.cr = b == '\r'
		switch {
		case half:
		case b != '\n' && b != '\r':
			if len(e.line) < maxLine {
				e.line = append(e.line, b)
			}
		case len(e.line) == 0: // an empty line ends an event
			good = good || e.begun
			e.begun = false
		default:
			if isErrorLine(e.line) {
				return "error event", good
			}
			e.begun = e.begun || e.line[0] != ':'
			e.line = e.line[:0]
		}
	}
	return "", good
}

func (e *eventStream) end() string { return "" }

// isErrorLine reports whether a line of an event says that it is an error.
func isErrorLine(line []byte) bool {
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "event":
		return string(value) == "error"
	case "data":
		for _, part := range []string{"{", `"error"`, ":"} {
			var ok bool
			if value, ok = bytes.CutPrefix(bytes.TrimLeft(value, " \t"), []byte(part)); !ok {
				return false
			}
		}
		return !bytes.HasPrefix(bytes.TrimLeft(value, " \t"), []byte("null"))
	}
	return false
}

// grpcCode is the status of a gRPC call, as google.rpc.Code numbers them.
type grpcCode uint32

// The statuses that are judged in another way than their HTTP statuses.
const (
	// grpcCancelled: the call was cancelled.
	grpcCancelled grpcCode = 1
	// grpcDeadline: the deadline of the caller or of the upstream itself has passed.
	grpcDeadline grpcCode = 4
)

// grpcUnknown replaces a malformed status, as in gRPC's own clients.
const grpcUnknown grpcCode = 2

// grpcStatuses has the names, and the HTTP statuses that google.rpc.Code assigns to them.
var grpcStatuses = []struct {
	name string
	http int
}{
	{"OK", 200}, {"CANCELLED", 499}, {"UNKNOWN", 500}, {"INVALID_ARGUMENT", 400}, {"DEADLINE_EXCEEDED", 504},
	{"NOT_FOUND", 404}, {"ALREADY_EXISTS", 409}, {"PERMISSION_DENIED", 403}, {"RESOURCE_EXHAUSTED", 429},
	{"FAILED_PRECONDITION", 400}, {"ABORTED", 409}, {"OUT_OF_RANGE", 400}, {"UNIMPLEMENTED", 501}, {"INTERNAL", 500},
	{"UNAVAILABLE", 503}, {"DATA_LOSS", 500}, {"UNAUTHENTICATED", 401},
}

// isGRPC reports whether the Content-Type of an answer is one of gRPC. web says that it is
// gRPC-Web, whose status is in the body unless the body is empty.
func isGRPC(header http.Header) (is, web bool) {
	kind, _, _ := strings.Cut(strings.ToLower(header.Get("Content-Type")), ";")
	rest, is := strings.CutPrefix(strings.TrimSpace(kind), "application/grpc")
	web = strings.HasPrefix(rest, "-web")
	return is && (web || rest == "" || rest[0] == '+'), web
}

// readGRPCStatus reads the status of a gRPC call from the header or the trailer of its
// answer. It returns false if there is none.
func readGRPCStatus(fields http.Header) (grpcCode, bool) {
	values := fields["Grpc-Status"]
	if len(values) == 0 {
		return 0, false
	}
	code, err := strconv.ParseUint(values[0], 10, 32)
	if err != nil {
		return grpcUnknown, true
	}
	return grpcCode(code), true
}

// HTTP returns the corresponding HTTP status: 500 for an undefined number.
func (s grpcCode) HTTP() int {
	if int64(s) >= int64(len(grpcStatuses)) {
		return http.StatusInternalServerError
	}
	return grpcStatuses[s].http
}

// String describes the status as a cause, such as "grpc-status 14 (UNAVAILABLE)".
func (s grpcCode) String() string {
	if int64(s) >= int64(len(grpcStatuses)) {
		return fmt.Sprintf("grpc-status %d", uint32(s))
	}
	return fmt.Sprintf("grpc-status %d (%s)", uint32(s), grpcStatuses[s].name)
}

// tunnel is an upgraded connection. A WebSocket is judged by its close frame (section 7.1);
// for other protocols it is only known that the upstream responded.
type tunnel struct {
	*call
	io.Writer
	websocket  bool
	fromServer frameReader
	mu         sync.Mutex
	toServer   frameReader // guarded by mu
	leaving    atomic.Bool // the client's side has ended, or announced its end
}

// Read watches the upstream's side.
func (t *tunnel) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if t.websocket {
		t.fromServer.feed(p[:n])
	}
	if err != nil {
		t.settle(t.outcome())
	}
	return n, err
}

// outcome judges the end of the upstream's side.
func (t *tunnel) outcome() breaker.Outcome {
	switch code := t.fromServer.code; {
	case code >= 1011 && code <= 1014: // internal error, restart, try again later, bad gateway
		return breaker.Outcome{Class: breaker.InBand, Cause: fmt.Sprintf("websocket closed with %d", code)}
	case code == 0 && t.websocket && t.ctx.Err() == nil && !t.leaving.Load():
		return breaker.Outcome{Class: breaker.InBand, Cause: "websocket cut off"}
	}
	return breaker.Outcome{Class: breaker.Success}
}

// Write watches the client's side.
func (t *tunnel) Write(p []byte) (int, error) {
	if t.websocket {
		t.mu.Lock() // on shutdown the gateway writes concurrently with the client
		if t.toServer.feed(p); t.toServer.code != 0 {
			t.leaving.Store(true)
		}
		t.mu.Unlock()
	}
	return t.Writer.Write(p)
}

// CloseWrite ends only the client's side; reverse_proxy looks for a method of this name.
func (t *tunnel) CloseWrite() error {
	t.leaving.Store(true)
	if half, ok := t.Writer.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return fmt.Errorf("CloseWrite: %w", http.ErrNotSupported)
}

// Close ends both sides. What the upstream sends afterwards is ignored.
func (t *tunnel) Close() error {
	t.leaving.Store(true)
	return t.call.Close()
}

// frameReader follows one side of a WebSocket up to its close frame (RFC 6455, section 5.2).
type frameReader struct {
	code int // of the close frame; 1005 if it has none, 0 before it

	head    [14]byte
	have    int    // bytes of head
	payload uint64 // remaining bytes of the frame
	status  []byte // of a close frame
}

// noStatus is the code of a close frame without one (RFC 6455, section 7.4.1).
const noStatus = 1005

func (f *frameReader) feed(p []byte) {
	for len(p) > 0 && f.code == 0 {
		need := f.headSize()
		if f.have < need {
			n := copy(f.head[f.have:need], p)
			f.have, p = f.have+n, p[n:]
			if f.have < f.headSize() {
				continue
			}
			f.payload = f.length()
			if f.closes() && f.payload < 2 {
				f.code = noStatus
			} else if f.payload == 0 {
				f.have = 0
			}
			continue
		}
		n := int(min(f.payload, uint64(len(p))))
		if f.closes() {
			f.status = append(f.status, p[:min(n, 2-len(f.status))]...)
			if len(f.status) == 2 {
				f.code = f.closeCode()
				return
			}
		}
		f.payload, p = f.payload-uint64(n), p[n:]
		if f.payload == 0 {
			f.have = 0
		}
	}
}

func (f *frameReader) closes() bool { return f.head[0]&0x0f == 8 }
func (f *frameReader) masked() bool { return f.head[1]&0x80 != 0 }

// headSize returns the size of the current frame's head, as far as it is known.
func (f *frameReader) headSize() int {
	if f.have < 2 {
		return 2
	}
	size := 2
	switch f.head[1] & 0x7f {
	case 126:
		size += 2
	case 127:
		size += 8
	}
	if f.masked() {
		size += 4
	}
	return size
}

func (f *frameReader) length() uint64 {
	switch short := f.head[1] & 0x7f; short {
	case 126:
		return uint64(binary.BigEndian.Uint16(f.head[2:]))
	case 127:
		return binary.BigEndian.Uint64(f.head[2:])
	default:
		return uint64(short)
	}
}

func (f *frameReader) closeCode() int {
	if f.masked() {
		mask := f.head[f.have-4:]
		f.status[0] ^= mask[0]
		f.status[1] ^= mask[1]
	}
	if code := int(binary.BigEndian.Uint16(f.status)); code >= 1000 {
		return code
	}
	return noStatus // such a code does not exist
}
