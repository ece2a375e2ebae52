package transport

import (
	"net/http"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// grpcStatus judges an answer of gRPC by the status in its header or trailer. over says
// that this settles it. Without a status that of HTTP alone counts.
func (c *call) grpcStatus(res *http.Response, fields http.Header) (outcome breaker.Outcome, over bool) {
	status, ok := circuits.GRPCStatus(fields)
	if !ok {
		return breaker.Outcome{}, false
	}
	if status == circuits.GRPCDeadline && c.lateForCaller(res) {
		return breaker.Outcome{}, true
	}
	if status.HTTP() == http.StatusTooManyRequests || c.t.circuits.FailedGRPC(status) {
		return c.bad(res, breaker.InBand, status.HTTP(), status.String()), true
	}
	// Work that somebody called off says neither that the upstream works nor that it
	// fails, unless `failure` says so.
	return breaker.Outcome{}, status == circuits.GRPCCancelled
}

// lateForCaller reports that the time is over which the caller itself has given to the
// upstream: who is in a hurry must not cut it off from all others.
func (c *call) lateForCaller(res *http.Response) bool {
	if res.Request == nil {
		return false
	}
	timeout, ok := circuits.ParseGRPCTimeout(res.Request.Header.Get("Grpc-Timeout"))
	return ok && time.Since(c.began) >= timeout
}

// trailer judges a whole answer by its trailer, where that has a status.
func (c *call) trailer() (outcome breaker.Outcome, over bool) {
	if !c.grpc {
		return breaker.Outcome{}, false
	}
	return c.grpcStatus(c.res, c.res.Trailer)
}

// message looks for the first message of a gRPC answer: a probe is good with it, since a
// call that fails has none, and a long stream must not hold the probe. The status that
// comes after it counts all the same. A stream that stays silent until the lease ends
// says nothing: its header has shown that the upstream lives.
//
// Calls that are no probes are good with the header: one that waits for messages is not
// overdue.
type message struct{}

func (message) see(p []byte) (fault string, good bool) { return "", true }

func (message) end() (fault string) { return "" }
