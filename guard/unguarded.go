package guard

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// class says how a request is handled.
type class uint8

const (
	classPass   class = iota // it is forwarded untouched and unwrapped
	classStream              // it may change something, and cannot be guarded: forwarded, and marked
	classGuarded
)

// classify says whether r is guarded, and as which action.
func (h *Handler) classify(r *http.Request) (*Action, class, error) {
	if guardedBy(r.Context(), h.Name) {
		return nil, classPass, nil // it is guarded already, and would wait for itself
	}
	// Both methods count, the one that was sent and the one that a handler like `method` has set:
	// with a reload that adds such a handler, a retry still finds its record (P1).
	if sent, _ := h.Host.Original(r); leavesUnguarded(r.Method) && leavesUnguarded(sent) {
		declared, err := h.Consequential.matches(r)
		declared = declared || namesNode(h, r)
		switch {
		case err != nil:
			return nil, classPass, err
		case isTunnel(r, declared):
			return h.stream(r, ReasonUpgrade)
		case !declared:
			h.Counts.Unguarded(ReasonSafe)
			return nil, classPass, nil
		}
	} else if exempt, err := h.exempted(r); exempt || err != nil {
		return nil, classPass, err
	} else if endsSession(h, r) {
		return nil, classPass, nil
	}
	action, err := h.action(r, nil)
	if err != nil {
		return nil, classPass, err
	}
	if isGRPC(r) && action.GRPC != GRPCUnary {
		return h.stream(r, ReasonGRPC)
	}
	return action, classGuarded, nil
}

// endsSession reports that r ends a session of MCP.
func endsSession(h *Handler, r *http.Request) bool {
	return r.Method == http.MethodDelete && h.Protocol == protocol.MCP && r.Header.Get(protocol.HeaderSession) != ""
}

func (m Match) matches(r *http.Request) (bool, error) {
	if m == nil {
		return false, nil
	}
	return m(r)
}

func (h *Handler) exempted(r *http.Request) (bool, error) {
	exempt, err := h.Exempt.matches(r)
	if exempt {
		h.passThrough(r, ReasonExempt)
	}
	return exempt, err
}

// stream passes or refuses, as configured, a request that cannot be read whole and recorded.
func (h *Handler) stream(r *http.Request, why UnguardedReason) (*Action, class, error) {
	if h.UnguardedStreams != StreamsRefuse {
		h.passThrough(r, why)
		return nil, classStream, nil
	}
	if exempt, err := h.exempted(r); exempt || err != nil {
		return nil, classPass, err
	}
	return nil, classPass, problem.New(problem.StreamRefused, "It is "+streamNames[why]+".")
}

var streamNames = map[UnguardedReason]string{
	ReasonUpgrade: "an upgrade to another protocol, or a tunnel",
	ReasonGRPC:    "a gRPC call that is not declared unary",
}

// passThrough counts and marks a request that is not guarded although it may have effects.
func (h *Handler) passThrough(r *http.Request, why UnguardedReason) {
	h.Counts.Unguarded(why)
	h.Host.Note(r, "status", statusUnguarded)
}

// leavesUnguarded reports whether calls of a method pass unguarded. CONNECT makes tunnels, which cannot be guarded.
func leavesUnguarded(method string) bool { return method == http.MethodConnect || SafeMethod(method) }

// SafeMethod lists the methods that are registered as safe, case-sensitively: an upstream may read
// `post` as POST. The empty one is GET.
func SafeMethod(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, "QUERY", "SEARCH", "PROPFIND", "REPORT":
		return true
	}
	return false
}

// action is the first that matches r and its message, which is nil before the body is read, and for
// requests without one. The last one matches everything.
func (h *Handler) action(r *http.Request, m *protocol.Message) (*Action, error) {
	for _, a := range h.Actions {
		if !a.takes(m) {
			continue
		}
		if a.Match == nil {
			return a, nil
		}
		if matched, err := a.Match(r); err != nil {
			return nil, err
		} else if matched {
			return a, nil
		}
	}
	panic("agent_guard: the default action matches everything")
}

// takes reports whether a takes calls with this message. What servers may read in two ways does not
// match.
func (a *Action) takes(m *protocol.Message) bool {
	if len(a.Tools) == 0 && len(a.arguments) == 0 {
		return true
	}
	if m == nil || len(a.Tools) > 0 && !slices.Contains(a.Tools, m.Name) {
		return false
	}
	for _, want := range a.arguments {
		value, found, err := body.Lookup(bytes.NewReader(m.Content), int64(len(m.Content)), want.at)
		if err != nil || !found || value != want.value {
			return false
		}
	}
	return true
}

// isTunnel reports whether r, with a safe method, leaves HTTP by CONNECT or an upgrade. If it is
// declared consequential, only a GET without a body counts as an upgrade, as in all known protocols:
// otherwise a header field would bypass the guard (P1).
func isTunnel(r *http.Request, consequential bool) bool {
	if r.Method == http.MethodConnect {
		return true
	}
	if consequential && (r.Method != http.MethodGet || r.ContentLength != 0) {
		return false
	}
	return isUpgrade(r)
}

// isUpgrade reports whether r asks for a protocol that is not HTTP. Offers of HTTP/2 or TLS, which
// some clients make with every call, are ignored.
func isUpgrade(r *http.Request) bool {
	if !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return false
	}
	for _, line := range r.Header["Upgrade"] {
		for protocol := range strings.SplitSeq(line, ",") {
			name, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(protocol)), "/")
			if name != "" && name != "h2c" && name != "http" && name != "tls" {
				return true
			}
		}
	}
	return false
}

// isGRPC reports whether a gRPC server would accept r: HTTP/2 or later, with trailers (gRPC over
// HTTP/2, "Requests"). The media type alone is not enough: other servers may ignore it. gRPC-Web does
// not count: its requests are whole messages.
func isGRPC(r *http.Request) bool {
	if r.ProtoMajor < 2 || !httpguts.HeaderValuesContainsToken(r.Header["Te"], "trailers") {
		return false
	}
	return isMedia(r, "application/grpc")
}

// isMedia reports whether the body of r has this media type, with any suffix and parameters.
func isMedia(r *http.Request, name string) bool {
	values := r.Header["Content-Type"]
	if len(values) == 0 || len(values[0]) < len(name) || !strings.EqualFold(values[0][:len(name)], name) {
		return false
	}
	rest := values[0][len(name):]
	return rest == "" || rest[0] == '+' || rest[0] == ';' || rest[0] == ' '
}

// ourFields are the request header fields that this guard or a later one reads.
var ourFields = [...]string{HeaderExecutionID, headerExecutionParent, HeaderWorkflowID, headerWorkflowNode, ect.FieldName, "Idempotency-Key"}

// KeyFieldsOf are the header fields that the execution id is read from; without sources, KeyFields and the
// best known of the others.
func KeyFieldsOf(sources []IDSource) (fields []string) {
	if len(sources) == 0 {
		return append(KeyFields[:], "X-Idempotency-Key", "Idempotence-Key", "Cko-Idempotency-Key", "Request-Idempotency-Key")
	}
	for i := range sources {
		source := &sources[i]
		if source.Header != "" {
			fields = append(fields, source.Header)
		}
		for _, name := range headerPlaceholder.FindAllStringSubmatch(source.Placeholder, -1) {
			fields = append(fields, name[1])
		}
	}
	return fields
}

var headerPlaceholder = regexp.MustCompile(`\{(?:http\.request\.)?header\.([^{}]+)\}`)

// keepEndToEnd removes the names of such fields from Connection. Otherwise a proxy would remove the
// fields, and the upstream would run the call without its id (P1). Other options stay.
func (h *Handler) keepEndToEnd(header http.Header) {
	stays := func(option string) bool {
		return slices.ContainsFunc(h.endToEnd, func(name string) bool { return strings.EqualFold(name, option) }) ||
			len(h.ExecutionID) == 0 && len(option) > len("Keep-Alive") && IsKey(http.CanonicalHeaderKey(option))
	}
	found := false
	var kept []string
	for _, line := range header["Connection"] {
		var options []string
		for option := range strings.SplitSeq(line, ",") {
			switch option = strings.TrimSpace(option); {
			case stays(option):
				found = true
			case option != "":
				options = append(options, option)
			}
		}
		if len(options) > 0 {
			kept = append(kept, strings.Join(options, ", "))
		}
	}
	if !found {
		return
	}
	delete(header, "Connection")
	if len(kept) > 0 {
		header["Connection"] = kept
	}
}

// Unguarded requests have a deadline too (cascade 3.3.1, ADR 0049), until the header of the answer:
// its body may be a long download or a stream, which has an idle timeout.

// errNotInTime: the answer has not begun in time.
var errNotInTime = errors.New("agent_guard: the upstream has not answered within `deadline`")

// forwardInTime forwards r, which is the message m, or none.
func (h *Handler) forwardInTime(w http.ResponseWriter, r *http.Request, m *protocol.Message, next Next) error {
	permit, err := permitUnguarded(h, r, m)
	if err != nil {
		return err
	}
	defer permit.Release()
	if forwarderOf(r.Context()) != nil {
		if m != nil {
			r = r.WithContext(context.WithValue(r.Context(), MessageKey{}, m))
		}
		return next.ServeHTTP(w, r) // the guard before this one counts the time
	}
	most := time.Duration(h.Policy.Deadline)
	limit := atMost(most, r.Header)
	c := new(clock)
	c.start(r.Context(), limit)
	defer c.stop()
	c.idle = limit // sending the body slowly does not count
	t := &timed{clock: c, idle: time.Duration(h.IdleTimeout)}
	t.passing = passing{ResponseWriter: w, to: t}
	var ctx context.Context = c
	if m != nil {
		ctx = context.WithValue(ctx, MessageKey{}, m)
	}
	if limit < most {
		ctx = WithPatience(ctx, most)
	}
	r = r.WithContext(ctx)
	if m == nil && r.Body != nil && r.Body != http.NoBody { // that of a message is here
		r.Body = &timedBody{r.Body, c}
	}
	err = next.ServeHTTP(t, r)
	if err != nil && !t.begun && c.overdue() {
		return &StatusError{Status: http.StatusGatewayTimeout, Err: errNotInTime}
	}
	return err
}

// passing is a response writer through which an answer passes.
type passing struct {
	http.ResponseWriter
	// to hears of the status of the answer, before that is written, and of the next bytes of its body.
	to interface {
		begins(status int)
		hears(p []byte)
	}
	begun bool
}

func (w *passing) WriteHeader(status int) {
	if !w.begun && (status < 100 || status >= 200 || status == 101) {
		w.begun = true
		w.to.begins(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *passing) Write(p []byte) (int, error) {
	w.begin()
	w.to.hears(p)
	return w.ResponseWriter.Write(p)
}

func (w *passing) FlushError() error {
	w.begin()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *passing) begin() {
	if !w.begun {
		w.WriteHeader(http.StatusOK)
	}
}

func (w *passing) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// mark returns a response writer on w whose answers carry the header field name with
// value, whatever the upstream says. Nothing is held back or recorded.
func mark(w http.ResponseWriter, name, value string) http.ResponseWriter {
	m := &marked{name: name, value: value}
	m.passing = passing{ResponseWriter: w, to: m}
	return m
}

type marked struct {
	passing
	name, value string
}

func (m *marked) begins(int) { m.Header().Set(m.name, m.value) }

func (m *marked) hears([]byte) {}

func (m *marked) ReadFrom(r io.Reader) (int64, error) {
	m.begin()
	return io.Copy(m.ResponseWriter, r)
}

// timed is the response writer of an unguarded request. It resets the idle timeout.
type timed struct {
	passing
	clock *clock
	idle  time.Duration
}

// begins ends the deadline; from here on the idle timeout counts.
func (t *timed) begins(int) { t.clock.pausing(t.idle) }

func (t *timed) hears([]byte) { t.clock.touch() }

func (t *timed) Write(p []byte) (int, error) {
	n, err := t.passing.Write(p)
	t.clock.touch()
	return n, err
}

// ReadFrom implements io.ReaderFrom. A local file has no idle timeout.
func (t *timed) ReadFrom(r io.Reader) (int64, error) {
	t.begin()
	from := r
	if limited, ok := r.(*io.LimitedReader); ok {
		from = limited.R
	}
	if _, ok := from.(*os.File); ok {
		t.clock.pausing(0)
		return io.Copy(t.ResponseWriter, r)
	}
	return io.Copy(struct{ io.Writer }{t}, r)
}

// Hijack gives a tunnel its connection. Bytes in either direction reset the idle timeout.
func (t *timed) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(t.ResponseWriter).Hijack()
	if err != nil {
		return conn, rw, err
	}
	return &timedConn{conn, t.clock}, rw, nil
}

// timedBody resets the idle timeout when the client sends something.
type timedBody struct {
	io.ReadCloser
	clock *clock
}

func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.clock.touch()
	}
	return n, err
}

type timedConn struct {
	net.Conn
	clock *clock
}

func (c *timedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.clock.touch()
	}
	return n, err
}

func (c *timedConn) Write(p []byte) (int, error) {
	c.clock.touch()
	n, err := c.Conn.Write(p)
	c.clock.touch()
	return n, err
}

// CloseWrite closes the direction to the client, if the connection can do that.
func (c *timedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Conn.Close()
}

// safeUseOf is what the tokens of an unguarded request are used for. With a body, a retry counts as another request.
func safeUseOf(r *http.Request, host Host) evidence.Use {
	method, target := host.Original(r)
	request := method + "\x00" + r.Host + "\x00" + target.RequestURI()
	if r.ContentLength != 0 {
		request += "\x00" + uuid.NewString() // another body would be another request
	}
	return sha256.Sum256([]byte(request))
}

// passOn forwards a request that is not guarded. If another guard has forwarded it before, that
// one handles the error.
func (h *Handler) passOn(w http.ResponseWriter, r *http.Request, m *protocol.Message, next Next) error {
	err := h.forwardInTime(w, r, m, next)
	if err == nil || forwarderOf(r.Context()) != nil {
		return err
	}
	if unread := (*UnreadError)(nil); errors.As(err, &unread) {
		return StoreClosed(err)
	}
	err = refusedByCircuit(err, caller.Verified(h.Callers.Known(r, h.verifiedBefore(r).Issuer())))
	var p *problem.Problem
	if h.Fallback == nil || !errors.As(err, &p) || p.Kind() != problem.CircuitOpen {
		return err
	}
	h.CountRefusal(p.Kind().Slug)
	return h.Fallback.ServeHTTP(mark(w, HeaderExecutionStatus, StatusRefused), r)
}
