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
)

// call is a request that a breaker has let through. It settles the permit, and becomes the body of
// the answer, since only its end shows the outcome of the call.
type call struct {
	t      *Transport
	ctx    context.Context
	watch  *Watch // nil if the request is not guarded
	permit breaker.Permit
	began  time.Time
	upload *upload // of a request whose body comes from the client
	// callerDeadline says that the deadline is the caller's own.
	callerDeadline bool
	// identity is who must answer, of a probe that is verified; else empty.
	identity string

	io.ReadCloser // the answer's body; nil before
	res           *http.Response
	inspect       inspector   // of the body; nil where it needs none
	grpc, web     bool        // it is one of gRPC, or of gRPC-Web
	judged        atomic.Bool // it has begun well
}

// upload is the body of a request that is read from its client while it is sent.
type upload struct {
	io.ReadCloser
	lease  breaker.Lease
	since  time.Time    // when the call began
	begun  atomic.Bool  // some of it was asked for: there is a connection
	took   atomic.Int64 // nanoseconds from since until all was sent; 0 before
	failed atomic.Bool
}

// Read notes the end, after which it is the upstream's turn, and a failure, which is the client's.
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

// underWay reports that the client is sending it: what happens meanwhile may be its doing, as an
// upstream hangs up on who takes too long.
func (u *upload) underWay() bool { return u != nil && u.begun.Load() && u.took.Load() == 0 }

// uploads reports whether the body of req is read from its client while it is sent. A guarded
// call's was read before it was claimed.
func uploads(req *http.Request, watch *Watch) bool {
	return watch == nil && req.Body != nil && req.Body != http.NoBody
}

// request is req as it is to be sent. A body that its client still sends can fail on the client's
// side.
func (c *call) request(req *http.Request) *http.Request {
	if !uploads(req, c.watch) {
		return req
	}
	c.upload = &upload{ReadCloser: req.Body, lease: c.permit.Lease(), since: c.began}
	own := req.WithContext(c.ctx)
	own.Body = c.upload
	return own
}

// settleUnanswered is for every way out on which nothing else settles the permit: a panic, or
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
		c.permit.Answered(c.latency())
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
		return breaker.Outcome{} // an idle connection was stale, or the client's body failed, or was too slow
	case c.watch != nil && c.watch.cutOff(c.ctx):
		failure.Cause = "connection lost"
	case c.overdue():
		failure.Cause = "deadline passed"
	case c.ctx.Err() != nil:
		return breaker.Outcome{} // the client has left
	default:
		failure.Cause = causeOf(err)
	}
	return failure
}

// overdue reports that the upstream has not met the deadline. A caller that waits for less than the
// action may take says nothing of the upstream by that.
func (c *call) overdue() bool {
	return !c.callerDeadline && errors.Is(context.Cause(c.ctx), context.DeadlineExceeded)
}

// causeOf names an error of a transport in a few words without anything of the request.
func causeOf(err error) string {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.As(err, new(reverseproxy.DialError)):
		// Caddy's error shows nothing of the one inside but its text.
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

// statusClientLeft is what proxies answer, or log, where the client has left. It says nothing of
// the upstream, unless `failure` names it.
const statusClientLeft = 499

// header judges an answer by its status and header. over says that this settles it.
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

// failure is what came of an answer whose status counts; class is that of a failure.
func (c *call) failure(res *http.Response, class breaker.Class, status int, cause string) breaker.Outcome {
	if res.Header.Get("Execution-Status") == "refused" {
		return breaker.Outcome{} // a gateway like this one did not call what is behind it
	}
	if status == http.StatusTooManyRequests {
		class = breaker.RateLimited
	}
	return breaker.Outcome{Class: class, RetryAfter: RetryAfter(res.Header), Cause: cause}
}

// Read inspects the answer on its way, and settles the permit at its end.
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
		e := guard.EvidenceOf(c.ctx)
		o.Evidence = e.String()
	}
	c.permit.Done(o)
}

// latency is how long the upstream has taken so far, without the time that the client took to send
// the call.
func (c *call) latency() time.Duration {
	all := time.Since(c.began)
	switch {
	case c.upload == nil:
		return all
	case c.upload.underWay():
		return 0
	}
	return all - time.Duration(c.upload.took.Load())
}

// begunWell notes that the answer has begun well.
func (c *call) begunWell() {
	c.judged.Store(true)
	c.permit.Answered(c.latency())
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

// Close settles the permit of an answer that is not read to its end. That is not the upstream's
// fault: it has answered, unless its body was still to be inspected.
func (c *call) Close() error {
	if c.ctx.Err() == nil && c.judged.Load() {
		c.settle(breaker.Outcome{Class: breaker.Success})
	} else {
		c.settle(breaker.Outcome{})
	}
	return c.ReadCloser.Close()
}

// AnswerVerifier verifies that the header of an answer has a token of issuer that was made since
// then, is meant for this gateway, and was never used before; the token is used up by it. A refusal
// is an *ect.Error. After any other error nothing is known.
type AnswerVerifier func(ctx context.Context, header http.Header, issuer string, since time.Time) error

// openIdentities finds what can prove who has answered a probe, and fails where nothing can.
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

// verifyProbe judges whether a probe was answered by somebody else than its upstream (cascade 6.2).
// over says that it was, or that nobody knows.
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
		return breaker.Outcome{}, true // the client has left
	}
	return failure("probe not verified: the token of its answer cannot be checked at the moment")
}

// certifies reports whether the connection has proven that its other end is identity.
func certifies(state *tls.ConnectionState, identity string) bool {
	if state == nil || len(state.VerifiedChains) == 0 {
		return false
	}
	return slices.ContainsFunc(state.VerifiedChains[0][0].URIs, func(uri *url.URL) bool { return uri.String() == identity })
}

// grpcStatus judges an answer of gRPC by the status in its header or trailer. over says that this
// settles it. Without a status that of HTTP alone counts.
func (c *call) grpcStatus(res *http.Response, fields http.Header) (outcome breaker.Outcome, over bool) {
	status, ok := readGRPCStatus(fields)
	if !ok {
		return breaker.Outcome{}, false
	}
	if status == grpcDeadline && c.lateForCaller(res) {
		return breaker.Outcome{}, true
	}
	if status.HTTP() == http.StatusTooManyRequests || c.t.circuits.failedGRPC(status) {
		return c.failure(res, breaker.InBand, status.HTTP(), status.String()), true
	}
	// Work that somebody called off says neither that the upstream works nor that it fails, unless
	// `failure` says so.
	return breaker.Outcome{}, status == grpcCancelled
}

// lateForCaller reports that the time is over which the caller itself has given to the upstream:
// who is in a hurry must not cut it off from all others.
func (c *call) lateForCaller(res *http.Response) bool {
	if res.Request == nil {
		return false
	}
	timeout, ok := guard.ParseGRPCTimeout(res.Request.Header.Get("Grpc-Timeout"))
	return ok && time.Since(c.began) >= timeout
}

// firstMessage waits for the first message of a gRPC answer: a probe is good with it, since a call
// that fails has none, and a long stream must not hold the probe. The status that comes after it
// counts all the same. A stream that stays silent until the lease ends says nothing: its header has
// shown that the upstream lives.
//
// Calls that are no probes are good with the header: one that waits for messages is not overdue.
type firstMessage struct{}

func (firstMessage) feed(p []byte) (fault string, good bool) { return "", true }

func (firstMessage) end() (fault string) { return "" }
