package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// call is a request that a breaker has let through. It becomes the body of the answer,
// because only its end shows the outcome of the call, and then settles the permit.
type call struct {
	t       *Transport
	ctx     context.Context
	watch   *Watch // nil if the request is not guarded
	permit  breaker.Permit
	release func() // gives the lease of a probe back that is for all processes; nil for none
	began   time.Time
	// upstream is its address.
	upstream string
	upload   *upload // of a request whose body comes from the client
	// callerDeadline says that the deadline is the caller's own.
	callerDeadline bool
	// identity is who must answer a verified probe; else empty.
	identity string

	io.ReadCloser // the answer's body; nil before the answer
	res           *http.Response
	inspect       inspector   // of the body; nil if none is needed
	grpc, web     bool        // gRPC or gRPC-Web
	judged        atomic.Bool // its beginning was judged as good
}

// upload is the body of a request that is read from its client while it is sent.
type upload struct {
	io.ReadCloser
	lease  breaker.Lease
	since  time.Time    // when the call began
	begun  atomic.Bool  // some of it was read: there is a connection
	took   atomic.Int64 // nanoseconds from since until all was sent; 0 until then
	failed atomic.Bool
}

// Read notes the end of the body, after which the upstream has to act, and a read error,
// which is the client's fault.
func (u *upload) Read(p []byte) (int, error) {
	u.begun.Store(true)
	n, err := u.ReadCloser.Read(p)
	switch {
	case err == io.EOF:
		if u.took.CompareAndSwap(0, int64(max(time.Since(u.since), 1))) {
			u.lease.Sent()
		}
	case err != nil:
		u.failed.Store(true)
	}
	return n, err
}

// underWay reports whether the client is sending the body. Failures meanwhile may be the
// client's fault: upstreams disconnect slow clients.
func (u *upload) underWay() bool { return u != nil && u.begun.Load() && u.took.Load() == 0 }

// uploads reports whether the body of req is read from its client while it is sent. That of a guarded
// call is read before it is claimed, and that of a message before it passes.
func uploads(req *http.Request, watch *Watch) bool {
	return watch == nil && req.Body != nil && req.Body != http.NoBody && req.Context().Value(guard.MessageKey{}) == nil
}

// request returns req in the form in which it is sent: errors of reading the client's body
// are attributed to the client.
func (c *call) request(req *http.Request) *http.Request {
	if !uploads(req, c.watch) {
		return req
	}
	c.upload = &upload{ReadCloser: req.Body, lease: c.permit.Lease(), since: c.began}
	own := req.WithContext(c.ctx)
	own.Body = c.upload
	return own
}

// settleUnanswered settles the permit if nothing else does: after a panic or
// runtime.Goexit.
func (c *call) settleUnanswered() {
	if c.ReadCloser == nil {
		c.settle(breaker.Outcome{})
	}
}

func (c *call) answered(res *http.Response, err error) (*http.Response, error) {
	if err != nil {
		c.settle(c.unanswered(err))
		return res, err
	}
	if outcome, over := c.header(res); over {
		c.settle(outcome)
		return res, nil
	}
	if outcome, over := c.verifyProbe(res); over {
		c.settle(outcome)
		return res, nil
	}
	if res.Body == http.NoBody {
		c.begunWell()
		c.settle(breaker.Outcome{Class: breaker.Success})
		return res, nil
	}
	c.res, c.ReadCloser = res, res.Body
	if duplex, ok := res.Body.(io.ReadWriteCloser); ok && res.StatusCode == http.StatusSwitchingProtocols {
		c.begunWell()
		res.Body = &tunnel{
			call: c, Writer: duplex,
			websocket: strings.EqualFold(res.Header.Get("Upgrade"), "websocket"),
		}
		return res, nil
	}
	c.inspect = c.t.inBand.inspector(c.t.circuits, res)
	if m, _ := c.ctx.Value(guard.MessageKey{}).(*protocol.Message); m != nil && !m.REST && res.Header.Get("Content-Encoding") == "" {
		if c.inspect == nil && !c.permit.Probe() {
			c.begunWell()
		}
		c.inspect = &messageAnswer{c.inspect, c.t.circuits, m.Answer(res.Header.Get("Content-Type"))}
	}
	switch {
	case c.inspect != nil:
	case c.grpc && !c.web && c.permit.Probe():
		c.inspect = firstMessage{}
		c.permit.Lease().Alive()
	default:
		c.begunWell()
	}
	res.Body = c
	return res, nil
}

// unanswered judges a request that got no answer.
func (c *call) unanswered(err error) breaker.Outcome {
	failure := breaker.Outcome{Class: breaker.Failure}
	switch {
	case errors.Is(err, errGone), errors.Is(err, errAttemptOver), c.upload != nil && c.upload.failed.Load(), c.upload.underWay():
		return breaker.Outcome{} // an idle connection was stale, or the client's body failed or was too slow
	case c.watch != nil && c.watch.cutOff(c.ctx):
		failure.Cause = "connection lost"
	case c.overdue():
		failure.Cause = "deadline passed"
	case c.ctx.Err() != nil:
		return breaker.Outcome{} // the client has disconnected
	default:
		failure.Cause = causeOf(err)
	}
	return failure
}

// overdue reports whether the upstream has missed the deadline. A shorter deadline of the
// caller's own says nothing about the upstream.
func (c *call) overdue() bool {
	return !c.callerDeadline && errors.Is(context.Cause(c.ctx), context.DeadlineExceeded)
}

// causeOf describes an error of a transport in a few words that contain nothing of the
// request.
func causeOf(err error) string {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.As(err, new(reverseproxy.DialError)):
		// Caddy's error wraps the inner one only as text.
		if strings.Contains(err.Error(), syscall.ECONNREFUSED.Error()) {
			return "connection refused"
		}
		return "no connection"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	case errors.Is(err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed without an answer"
	}
	return "no answer"
}

// statusClientLeft is the status that proxies use if the client has disconnected. It says
// nothing about the upstream.
const statusClientLeft = 499

// header judges an answer by its status and header. over says that this is final.
func (c *call) header(res *http.Response) (outcome breaker.Outcome, over bool) {
	if res.StatusCode == http.StatusTooManyRequests || c.t.circuits.failedStatus(res.StatusCode) {
		return c.failure(res, breaker.Failure, res.StatusCode, fmt.Sprintf("status %d", res.StatusCode)), true
	}
	if res.StatusCode == statusClientLeft {
		return breaker.Outcome{}, true
	}
	if c.grpc, c.web = isGRPC(res.Header); c.grpc {
		if outcome, over = c.grpcStatus(res, res.Header); over {
			return outcome, true
		}
	}
	if fault := c.t.circuits.headerFault(res.Header); fault != "" {
		return breaker.Outcome{Class: breaker.InBand, RetryAfter: RetryAfter(res.Header), Cause: fault}, true
	}
	return breaker.Outcome{}, false
}

// failure returns the outcome of an answer whose status is a failure of that class.
func (c *call) failure(res *http.Response, class breaker.Class, status int, cause string) breaker.Outcome {
	if res.Header.Get("Execution-Status") == "refused" {
		return breaker.Outcome{} // another gateway refused it and did not call what is behind it
	}
	if status == http.StatusTooManyRequests {
		class = breaker.RateLimited
	}
	return breaker.Outcome{Class: class, RetryAfter: RetryAfter(res.Header), Cause: cause}
}

// Read inspects the answer while it is read, and settles the permit at its end.
func (c *call) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	if n > 0 && c.inspect != nil {
		fault, good := c.inspect.feed(p[:n])
		switch {
		case fault != "":
			c.settle(breaker.Outcome{Class: breaker.InBand, Cause: fault})
		case good && !c.judged.Load():
			c.begunWell()
		}
	}
	if err != nil {
		c.ended(err)
	}
	return n, err
}

// settle reports the outcome to the breaker, with the caller's reference to it.
func (c *call) settle(o breaker.Outcome) {
	if o.Class != breaker.Success && o.Class != breaker.Neutral {
		o.Evidence = guard.EvidenceOf(c.ctx).String()
		if c.watch != nil {
			c.watch.failed.Store(&c.upstream)
		}
	}
	c.permit.Done(o)
	if c.release != nil {
		c.release()
	}
}

// latency returns how long the upstream has taken until now, without the time for sending the
// call.
func (c *call) latency(now time.Time) time.Duration {
	all := now.Sub(c.began)
	switch {
	case c.upload == nil:
		return all
	case c.upload.underWay():
		return 0
	}
	return all - time.Duration(c.upload.took.Load())
}

// begunWell notes that the beginning of the answer is good.
func (c *call) begunWell() {
	c.judged.Store(true)
	now := time.Now()
	took := c.latency(now)
	c.permit.Answered(took)
	if took > 0 {
		c.t.circuits.pool.observe(c.upstream, now, took)
	}
}

// ended judges the call by the end of its answer.
func (c *call) ended(err error) {
	o := breaker.Outcome{Class: breaker.Success}
	switch {
	case err == io.EOF:
		fault := ""
		if c.inspect != nil {
			fault = c.inspect.end()
		}
		if fault == "" {
			fault = c.t.circuits.headerFault(c.res.Trailer)
		}
		if fault != "" {
			o = breaker.Outcome{Class: breaker.InBand, Cause: fault}
		} else if c.grpc {
			if status, over := c.grpcStatus(c.res, c.res.Trailer); over {
				o = status
			}
		}
	case c.overdue():
		o = breaker.Outcome{Class: breaker.Failure, Cause: "deadline passed"}
	case c.ctx.Err() != nil:
		o.Class = breaker.Neutral
	default:
		o = breaker.Outcome{Class: breaker.InBand, Cause: "answer cut off"}
	}
	c.settle(o)
}

// Close settles the permit of an answer that is not read to its end. Unless the body had to
// be inspected, that is not a failure: the upstream has answered.
func (c *call) Close() error {
	if c.ctx.Err() == nil && c.judged.Load() {
		c.settle(breaker.Outcome{Class: breaker.Success})
	} else {
		c.settle(breaker.Outcome{})
	}
	return c.ReadCloser.Close()
}

// AnswerVerifier verifies that the header of an answer has a token that issuer made after
// since, for this gateway, and that was never used before. It marks the token as used. A
// refusal is an *ect.Error; any other error means that the verification failed.
type AnswerVerifier func(ctx context.Context, header http.Header, issuer string, since time.Time) error

// openIdentities prepares the verification of probes' answers. The error says that nothing
// could prove the identities.
func (t *Transport) openIdentities(ctx caddy.Context) error {
	app, err := ctx.AppIfConfigured("agent_guard")
	if err != nil && !errors.Is(err, caddy.ErrNotConfigured) {
		return err
	}
	if app, ok := app.(guardApp); ok {
		t.verify = app.AnswerVerifier()
	}
	if t.verify == nil && (t.TLS == nil || t.TLS.InsecureSkipVerify) {
		return errors.New("verify_probe: nothing can prove who answers; use TLS to the upstreams, with certificates that are verified, " +
			"or `trust` the upstreams' tokens in the app agent_guard")
	}
	return nil
}

// verifyProbe judges whether the upstream itself answered a probe (cascade 6.2). over says
// that it did not, or that it is unknown.
func (c *call) verifyProbe(res *http.Response) (outcome breaker.Outcome, over bool) {
	if c.identity == "" || certifies(res.TLS, c.identity) {
		return breaker.Outcome{}, false
	}
	const somebody = "probe answered by somebody else: "
	failure := func(cause string) (breaker.Outcome, bool) {
		return breaker.Outcome{Class: breaker.Failure, Cause: cause}, true
	}
	if c.t.verify == nil || len(res.Header[ect.FieldName]) == 0 {
		switch {
		case res.TLS == nil:
			return failure(somebody + "it has proven nothing")
		case len(res.TLS.VerifiedChains) == 0:
			return failure(somebody + "its certificate is not verified")
		}
		return failure(somebody + "its certificate is not that of " + c.identity)
	}
	err := c.t.verify(c.ctx, res.Header, c.identity, c.began)
	refused := (*ect.Error)(nil)
	switch {
	case err == nil:
		return breaker.Outcome{}, false
	case errors.As(err, &refused):
		return failure(fmt.Sprintf("%sits token is refused (%s)", somebody, refused.Code))
	case c.ctx.Err() != nil && !c.overdue():
		return breaker.Outcome{}, true // the client has disconnected
	}
	return failure("probe not verified: the token of its answer cannot be checked at the moment")
}

// certifies reports whether the TLS connection has proven identity as its peer.
func certifies(state *tls.ConnectionState, identity string) bool {
	if state == nil || len(state.VerifiedChains) == 0 {
		return false
	}
	return slices.ContainsFunc(state.VerifiedChains[0][0].URIs, func(uri *url.URL) bool { return uri.String() == identity })
}

// grpcStatus judges a gRPC answer by the status in its header or trailer. over says that
// this is final. Without a gRPC status only the HTTP status counts.
func (c *call) grpcStatus(res *http.Response, fields http.Header) (outcome breaker.Outcome, over bool) {
	status, ok := readGRPCStatus(fields)
	if !ok {
		return breaker.Outcome{}, false
	}
	if status == grpcDeadline && c.lateForCaller(res) {
		return breaker.Outcome{}, true
	}
	if status.HTTP() == http.StatusTooManyRequests || c.t.circuits.failedStatus(status.HTTP()) {
		return c.failure(res, breaker.InBand, status.HTTP(), status.String()), true
	}
	// A cancelled call shows neither that the upstream works nor that it fails.
	return breaker.Outcome{}, status == grpcCancelled
}

// lateForCaller reports whether the caller's own deadline has passed. An impatient caller
// must not open the breaker for all others.
func (c *call) lateForCaller(res *http.Response) bool {
	if res.Request == nil {
		return false
	}
	timeout, ok := guard.ParseGRPCTimeout(res.Request.Header.Get("Grpc-Timeout"))
	return ok && time.Since(c.began) >= timeout
}

// firstMessage waits for the first message of a gRPC answer. A probe succeeds with it: a
// failing call has none, and a long stream must not keep the probe open. A status after it
// still counts. If the stream stays silent until the probe times out, the probe says
// nothing: the header has shown that the upstream lives.
//
// Other calls succeed with the header: a stream that waits for messages is not overdue.
type firstMessage struct{}

func (firstMessage) feed(p []byte) (fault string, good bool) { return "", true }

func (firstMessage) end() (fault string) { return "" }
