package caddymodule

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// undoDial is how long a connection to a whole URL may take to be made, and its handshake.
const undoDial = 10 * time.Second

// newDirect is the transport for whole URLs. Nothing in it sends a request twice: each has
// a connection of its own, so that one that was refused is the proof that nothing was
// sent, and no other failure is. The environment's proxy is not used: through one, a
// refused connection would look like an answer.
func newDirect() http.RoundTripper {
	return &http.Transport{
		DialContext:            (&net.Dialer{Timeout: undoDial}).DialContext,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    undoDial,
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		Protocols:              http1(),
	}
}

func http1() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	return p
}

// delegate asks another agent to roll back its own.
func (s *undoSender) delegate(ctx context.Context, app *App, o *undo.Outgoing) (*undo.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(undo.ReasonNoUpstream, err)
	}
	way, err := app.testimony()
	if err != nil {
		return nil, unsent("", err)
	}
	if way == nil {
		return nil, unsent(undo.ReasonNoCredentials, errNoAsker)
	}
	raw, err := way.witness.Request(ctx, &evidence.Request{
		Rollback: o.Rollback, Checkpoint: o.Checkpoint, Workflow: evidence.WorkflowID(o.Workflow),
		Audience: target.Scheme + "://" + target.Host, Reason: o.Reason,
	})
	if err != nil {
		return nil, unsent("", err)
	}
	header := undoHeader(o, nil)
	header.Set(ect.FieldName, raw)
	return s.send(ctx, o, header)
}

var errNoAsker = errors.New("without `identity` in the global options there is no token by which an agent knows who asks")

// parseWhole reads the URL of somebody who is not the call's upstream.
func parseWhole(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil: // which would show it
		return nil, errors.New("the URL of the undo cannot be read")
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "", u.User != nil:
		return nil, errors.New("the URL of the undo is none of http or https with a host and without credentials")
	}
	return u, nil
}

// send sends a request to a whole URL. Redirects are answers: where they lead is somebody
// else's choice, and so would be who gets the credentials.
func (s *undoSender) send(ctx context.Context, o *undo.Outgoing, header http.Header) (*undo.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(undo.ReasonNoUpstream, err)
	}
	r, err := http.NewRequestWithContext(ctx, o.Method, target.String(), bytes.NewReader(o.Body))
	if err != nil {
		return nil, unsent(undo.ReasonNoUpstream, err)
	}
	r.Header = header
	r.GetBody = nil
	if ctx.Err() != nil {
		return nil, unsent("", context.Cause(ctx))
	}
	res, err := s.direct.RoundTrip(r)
	if err != nil {
		var dial *net.OpError
		if errors.As(err, &dial) && dial.Op == "dial" {
			return nil, unsent("", err)
		}
		return nil, &undo.SendError{Err: fmt.Errorf("undo: %w", err)}
	}
	defer res.Body.Close()
	answer := newUndoAnswer()
	answer.Answer.Header = res.Header
	answer.WriteHeader(res.StatusCode)
	// One byte more than is kept tells that there is more; no more is waited for.
	if _, err := io.CopyN(answer, res.Body, undo.MaxAnswer+1); err != nil && err != io.EOF {
		return nil, &undo.SendError{Err: fmt.Errorf("undo: %w: %w", errCutShort, err)}
	}
	if r.Method != http.MethodHead && res.ContentLength < 0 && len(res.TransferEncoding) == 0 {
		if err := answer.maybeCut(r.Method); err != nil {
			return nil, &undo.SendError{Err: fmt.Errorf("undo: %w", err)}
		}
	}
	return &answer.Answer, nil
}
