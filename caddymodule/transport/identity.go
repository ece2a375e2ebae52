package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// AnswerVerifier verifies that the header of an answer has a token of issuer that was
// made since then, is meant for this gateway, and was never used before; the token is
// used up by it. A refusal is an *ect.Error. After any other error nothing is known.
type AnswerVerifier func(ctx context.Context, header http.Header, issuer string, since time.Time) error

// trusting is what the app agent_guard is asked for. It is asked by the transport and
// not by the guard in front of it, because calls that no guard sees can be probes too.
type trusting interface {
	// AnswerVerifier is nil where no tokens are trusted.
	AnswerVerifier() AnswerVerifier
}

// openIdentities finds what can prove who has answered a probe, and fails where nothing
// can.
func (t *Transport) openIdentities(ctx caddy.Context) error {
	app, err := ctx.AppIfConfigured("agent_guard")
	if err != nil && !errors.Is(err, caddy.ErrNotConfigured) {
		return err
	}
	if app, ok := app.(trusting); ok {
		t.verify = app.AnswerVerifier()
	}
	if t.verify == nil && (t.TLS == nil || t.TLS.InsecureSkipVerify) {
		return errors.New("verify_probe: nothing can prove who answers; use TLS to the upstreams, with certificates that are verified, " +
			"or `trust` the upstreams' tokens in the app agent_guard")
	}
	return nil
}

// foreign judges whether a probe was answered by somebody else than its upstream
// (cascade 6.2). over says that it was, or that nobody knows.
func (c *call) foreign(res *http.Response) (outcome breaker.Outcome, over bool) {
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
