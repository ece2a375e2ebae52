package sent

import (
	"context"
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Reason names the evidence that nothing was sent.
type Reason int

// The reasons, from none to the strongest.
const (
	// Unknown: there is no evidence. The request may have had its effect.
	Unknown Reason = iota
	// NoUpstream: reverse_proxy had no upstream to send to.
	NoUpstream
	// DialFailed: no connection to the upstream could be made.
	DialFailed
	// NothingWritten: our transport counted what was written, and it was nothing.
	NothingWritten
)

// String returns the reason as it stands in logs and metrics.
func (r Reason) String() string {
	switch r {
	case NoUpstream:
		return "no-upstream"
	case DialFailed:
		return "dial-failed"
	case NothingWritten:
		return "nothing-written"
	default:
		return "unknown"
	}
}

// Verdict is what is proven about one forward. The zero value is: nothing.
type Verdict struct {
	Reason Reason
	// Again says that forwarding once more at once is likely to succeed: a
	// connection was there, and turned out to be dead before a byte was written.
	Again bool
}

// NotSent reports whether it is proven that no byte of the request was sent.
func (v Verdict) NotSent() bool { return v.Reason != Unknown }

// Placeholders that reverse_proxy leaves behind.
const (
	retriesPlaceholder = "http.reverse_proxy.retries"
	statusPlaceholder  = "http.reverse_proxy.status_code"
	errorPlaceholder   = "http.error"
)

// noUpstream is the text of reverse_proxy's unexported error. A test holds it
// against the real one.
const noUpstream = "no upstreams available"

// Retries returns how many attempts reverse_proxy made beyond the first in the
// forward that was armed with ctx, or -1 if that cannot be told: none ran to its
// end, an upstream has answered, or an error was handled on the way, so that more
// than one reverse_proxy may have run and the number is only the last one's.
func Retries(ctx context.Context) int {
	repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return -1
	}
	for _, name := range []string{statusPlaceholder, errorPlaceholder} {
		if _, set := repl.Get(name); set {
			return -1
		}
	}
	value, _ := repl.Get(retriesPlaceholder)
	if retries, ok := value.(int); ok {
		return retries
	}
	return -1
}

// Proof ends the forward and says what is proven about it. err is what the
// handlers returned (nil for a cancelled request: reverse_proxy reports 499
// without an error), retries what Retries returned.
//
// It first makes sure that nothing can be sent afterwards: the fuse is blown, the
// context cancelled, and our transport's connections refuse the request's bytes.
func (w *Watch) Proof(err error, retries int) Verdict {
	w.mu.Lock()
	blown := w.blown
	w.blown = true
	if w.attempt != nil {
		w.attempt.sealed = true
	}
	v := w.verdict(err, retries, blown)
	w.mu.Unlock()
	w.cancel()
	return v
}

// verdict weighs the evidence. w.mu is held; blown is the fuse before Proof.
func (w *Watch) verdict(err error, retries int, blown bool) Verdict {
	dialFailed := errors.As(err, new(reverseproxy.DialError))
	switch {
	case retries < 0:
		// Something that nobody saw may have been sent by another proxy.
		return Verdict{}

	case w.attempt != nil && (w.outside || !w.attempt.zero()):
		return Verdict{}

	// A reverse_proxy has one transport: as one attempt was ours, all were, and
	// none of them is opened before the one before it is known to be zero. So
	// retries that found no upstream need no further proof.
	case w.attempt != nil && dialFailed:
		return Verdict{Reason: DialFailed}
	case w.attempt != nil:
		return Verdict{Reason: NothingWritten, Again: w.attempt.taken && w.parent.Err() == nil}

	case blown:
		return Verdict{}

	// The error tells of the last attempt only. fastcgi dials with the same
	// error and reports nothing, so each earlier attempt must have been seen.
	case dialFailed && (retries == 0 || w.conns > retries):
		return Verdict{Reason: DialFailed}

	// This error stands only if no iteration got as far as a transport.
	case w.conns == 0 && isNoUpstream(err):
		return Verdict{Reason: NoUpstream}

	default:
		return Verdict{}
	}
}

func isNoUpstream(err error) bool {
	var herr caddyhttp.HandlerError
	return errors.As(err, &herr) && herr.StatusCode == http.StatusServiceUnavailable &&
		herr.Err != nil && herr.Err.Error() == noUpstream
}
