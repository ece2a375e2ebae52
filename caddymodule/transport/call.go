package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// call is a request that a breaker has let through. It settles the permit, and becomes
// the body of the answer, since only its end says what came of the call.
type call struct {
	t      *Transport
	ctx    context.Context
	watch  *sent.Watch // nil if the request is not guarded
	permit breaker.Permit
	began  time.Time
	upload *upload // of a request whose body comes from the client
	// impatient says that the deadline is the caller's own.
	impatient bool
	// identity is who must answer, of a probe that is verified; else empty.
	identity string

	io.ReadCloser // the answer's body; nil before
	res           *http.Response
	look          looker      // into the body; nil where nothing is looked for
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

// Read notes the end, after which it is the upstream's turn, and a failure, which is the
// client's.
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

// underWay reports that the client is sending it: what happens meanwhile may be its doing,
// as an upstream hangs up on who takes too long.
func (u *upload) underWay() bool { return u != nil && u.begun.Load() && u.took.Load() == 0 }

// uploads reports whether the body of req is read from its client while it is sent. A
// guarded call's was read before it was claimed.
func uploads(req *http.Request, watch *sent.Watch) bool {
	return watch == nil && req.Body != nil && req.Body != http.NoBody
}

// request is req as it is to be sent. A body that its client still sends can fail on the
// client's side.
func (c *call) request(req *http.Request) *http.Request {
	if !uploads(req, c.watch) {
		return req
	}
	c.upload = &upload{ReadCloser: req.Body, lease: c.permit.Lease(), since: c.began}
	own := req.WithContext(c.ctx)
	own.Body = c.upload
	return own
}

// leave is for every way out on which nothing else settles the permit: a panic, or
// runtime.Goexit.
func (c *call) leave() {
	if c.ReadCloser == nil {
		c.settle(breaker.Outcome{})
	}
}

// answered judges what RoundTrip has returned.
func (c *call) answered(res *http.Response, err error) (*http.Response, error) {
	if err != nil {
		c.settle(c.unanswered(err))
		return res, err
	}
	if outcome, over := c.header(res); over {
		c.settle(outcome)
		return res, nil
	}
	if outcome, over := c.foreign(res); over {
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
		c.good()
		res.Body = newTunnel(c, duplex)
		return res, nil
	}
	c.look = c.t.inBand.looker(c.t.circuits, res)
	switch {
	case c.look != nil:
	case c.grpc && !c.web && c.permit.Probe():
		c.look = message{}
		c.permit.Lease().Alive()
	default:
		c.good()
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
	case c.watch != nil && c.watch.Cut(c.ctx):
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

// overdue reports that the upstream has not met the deadline. A caller that waits for
// less than the action may take says nothing of the upstream by that.
func (c *call) overdue() bool {
	return !c.impatient && errors.Is(c.ctx.Err(), context.DeadlineExceeded)
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

// calledOff is what proxies answer, or log, where the client has left. It says nothing of
// the upstream, unless `failure` names it.
const calledOff = 499

// header judges an answer by its status and header. over says that this settles it.
func (c *call) header(res *http.Response) (outcome breaker.Outcome, over bool) {
	if c.counts(res.StatusCode) {
		return c.bad(res, breaker.Failure, res.StatusCode, fmt.Sprintf("status %d", res.StatusCode)), true
	}
	if res.StatusCode == calledOff {
		return breaker.Outcome{}, true
	}
	if c.grpc, c.web = circuits.IsGRPC(res.Header); c.grpc {
		if outcome, over = c.grpcStatus(res, res.Header); over {
			return outcome, true
		}
	}
	if fault := c.t.circuits.HeaderFault(res.Header); fault != "" {
		return breaker.Outcome{Class: breaker.InBand, RetryAfter: retryAfter(res.Header), Cause: fault}, true
	}
	return breaker.Outcome{}, false
}

// counts reports whether a status of HTTP is a failure or a limit.
func (c *call) counts(status int) bool {
	return status == http.StatusTooManyRequests || c.t.circuits.Failed(status)
}

// bad is what came of an answer whose status counts; class is that of a failure.
func (c *call) bad(res *http.Response, class breaker.Class, status int, cause string) breaker.Outcome {
	if res.Header.Get("Execution-Status") == "refused" {
		return breaker.Outcome{} // a gateway like this one did not call what is behind it
	}
	if status == http.StatusTooManyRequests {
		class = breaker.RateLimited
	}
	return breaker.Outcome{Class: class, RetryAfter: retryAfter(res.Header), Cause: cause}
}

// retryAfter reads Retry-After, in either form; 0 without one.
func retryAfter(header http.Header) time.Duration {
	value := header.Get("Retry-After")
	if value == "" {
		return 0
	}
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(time.Until(at), 0)
}

// Read looks at the answer on its way, and settles the permit at its end.
func (c *call) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	if n > 0 && c.look != nil {
		fault, good := c.look.see(p[:n])
		switch {
		case fault != "":
			c.settle(breaker.Outcome{Class: breaker.InBand, Cause: fault})
		case good && !c.judged.Load():
			c.good()
		}
	}
	if err != nil {
		c.ended(err)
	}
	return n, err
}

// settle tells the breaker what came of the call, with the caller's reference to it.
func (c *call) settle(o breaker.Outcome) {
	if o.Class != breaker.Success && o.Class != breaker.Neutral {
		o.Evidence = circuits.EvidenceOf(c.ctx)
	}
	c.permit.Done(o)
}

// latency is how long the upstream has taken so far, without the time that the client took
// to send the call.
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

// good says that the answer has begun well.
func (c *call) good() {
	c.judged.Store(true)
	c.permit.Answered(c.latency())
}

// ended judges the call by the end of its answer.
func (c *call) ended(err error) {
	o := breaker.Outcome{Class: breaker.Success}
	switch {
	case err == io.EOF:
		fault := ""
		if c.look != nil {
			fault = c.look.end()
		}
		if fault == "" {
			fault = c.t.circuits.HeaderFault(c.res.Trailer)
		}
		if fault != "" {
			o = breaker.Outcome{Class: breaker.InBand, Cause: fault}
		} else if status, over := c.trailer(); over {
			o = status
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

// Close settles the permit of an answer that is not read to its end. That is not the
// upstream's fault: it has answered, unless its body was still to be looked into.
func (c *call) Close() error {
	if c.ctx.Err() == nil && c.judged.Load() {
		c.settle(breaker.Outcome{Class: breaker.Success})
	} else {
		c.settle(breaker.Outcome{})
	}
	return c.ReadCloser.Close()
}
