package caddymodule

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// undoSender sends the requests of undos (ADR 0033): to the upstream of the call through
// the guard that the call went through, as the latest configuration has it, and to whole
// URLs by a client of its own.
type undoSender struct {
	e *engine
	// direct is for whole URLs.
	direct http.RoundTripper
}

// newUndoSender makes the sender of an engine. It sends nothing before the first
// configuration has joined the engine, and then says that nothing was sent.
func newUndoSender(e *engine) *undoSender { return &undoSender{e: e, direct: newDirect()} }

// Send implements undo.Sender. Why there is no answer is told: who looks at a rollback
// that takes long sees that it is tried again, and not what for.
func (s *undoSender) Send(ctx context.Context, o *undo.Outgoing) (*undo.Answer, error) {
	answer, err := s.dispatch(ctx, o)
	s.e.rollbacks.trials.tried(o, answer, err)
	if err != nil && ctx.Err() == nil {
		what := "a request of an undo got no answer"
		if proven := (*undo.SendError)(nil); errors.As(err, &proven) && proven.NotSent {
			what = "a request of an undo was not sent"
		}
		s.e.logger.Warn(what, zap.String("rollback", o.Rollback),
			zap.String("checkpoint", o.Checkpoint), zap.String("method", o.Method), zap.Error(err))
	}
	return answer, err
}

func (s *undoSender) dispatch(ctx context.Context, o *undo.Outgoing) (*undo.Answer, error) {
	app := s.e.audience.latest()
	if app == nil {
		return nil, unsent("", errNotOpen) // between configurations: the next one comes
	}
	if o.Delegated {
		return s.delegate(ctx, app, o)
	}
	way, err := app.guards.find(o)
	if err != nil {
		return nil, unsent(undo.ReasonNoUpstream, err)
	}
	configured, err := way.action.undoHeader(o.URL)
	if err != nil { // a variable that is not set, or a file that is gone: it may come back
		return nil, unsent("", err)
	}
	if !strings.HasPrefix(o.URL, "/") {
		if o.Recorded { // they are for the upstream of the call only
			return nil, unsent(undo.ReasonNoCredentials, errOtherWay)
		}
		return s.send(ctx, o, undoHeader(o, configured))
	}
	switch {
	case way.h.upstream == nil:
		return nil, unsent(undo.ReasonNoUpstream, errNoOwnWay)
	case o.Recorded && way.h.upstreamName() != o.Upstream:
		return nil, unsent(undo.ReasonOtherUpstream, errOtherWay)
	}
	server, err := app.server(way.h)
	if err != nil {
		return nil, unsent(undo.ReasonNoUpstream, err)
	}
	target, err := url.ParseRequestURI(o.URL)
	if err != nil {
		return nil, unsent(undo.ReasonNoUpstream, fmt.Errorf("the path of the undo cannot be read: %w", err))
	}
	if !circuits.Safe(o.Method) && way.h.restores {
		over, err := s.writes(o, checkpoint.TargetOf(way.h.upstreamName(), target.EscapedPath()))
		if err != nil {
			return nil, err
		}
		defer over()
	}
	u := undoCall{Outgoing: o, way: way, server: server, target: target, header: undoHeader(o, configured)}
	answer, again, err := u.forward(ctx)
	if again {
		answer, _, err = u.forward(ctx)
	}
	return answer, err
}

// unsent is the error of a request of which not a byte was sent.
func unsent(reason undo.Reason, err error) error {
	return &undo.SendError{NotSent: true, Reason: reason, Err: fmt.Errorf("undo: %w", err)}
}

// undoHeader is the header of a request of an undo. What was recorded or made from the
// template stays; configured has the fields of the configuration, and its credentials
// where the call's own are not used.
func undoHeader(o *undo.Outgoing, configured http.Header) http.Header {
	header := http.Header{}
	for name, values := range o.Header {
		header[http.CanonicalHeaderKey(name)] = append([]string(nil), values...)
	}
	for name, values := range configured {
		if !o.Recorded || header[name] == nil {
			header[name] = append([]string(nil), values...)
		}
	}
	// Who asks what there is now must not be told what there was the last time.
	if !circuits.Safe(o.Method) && header.Get("Idempotency-Key") == "" {
		header.Set("Idempotency-Key", o.Rollback+":"+o.Checkpoint)
	}
	if o.Workflow != "" {
		header.Set(headerWorkflowID, o.Workflow)
	}
	// Bodies are compared, so that they have to come as they are.
	header.Set("Accept-Encoding", "identity")
	if header.Get("User-Agent") == "" {
		header.Set("User-Agent", "caddy-agent-guard")
	}
	return header
}

// undoCall is a request of an undo to the upstream of its call.
type undoCall struct {
	*undo.Outgoing
	way    route
	server *caddyhttp.Server
	target *url.URL
	header http.Header
}

// request makes the request anew: handlers on the way change it.
func (u *undoCall) request(ctx context.Context, answer http.ResponseWriter) *http.Request {
	target := *u.target
	r := &http.Request{
		Method: u.Method, URL: &target, RequestURI: target.RequestURI(),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: u.header.Clone(), Host: u.Host,
		Body: http.NoBody, ContentLength: int64(len(u.Body)),
		RemoteAddr: "127.0.0.1:0", // it is the gateway that asks
	}
	if len(u.Body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(u.Body))
	}
	if len(u.server.TLSConnPolicies) > 0 {
		// The upstream is told X-Forwarded-Proto of calls to this site. One that wants https
		// would answer an undo with a redirect.
		r.TLS = new(tls.ConnectionState)
	}
	return caddyhttp.PrepareRequest(r.WithContext(circuits.Undo(asOwn(ctx))), caddy.NewReplacer(), answer, u.server)
}

// forward sends the request once. again says that a connection turned out to be dead
// before a byte was written, so that another one is likely to do.
func (u *undoCall) forward(ctx context.Context) (_ *undo.Answer, again bool, _ error) {
	answer := newUndoAnswer()
	r := u.request(ctx, answer)
	armed, watch := sent.Arm(r.Context())
	defer watch.Release()
	r = r.WithContext(armed)
	panicked, err := handOn(u.way.h.upstream, answer, r)
	// Of a request that is cut off before its answer reverse_proxy makes a 499 without an error.
	cut := armed.Err() != nil && (answer.Status == 0 || answer.Status == 499)
	proof := watch.Proof(err, sent.Retries(armed))
	upstream, answered := replacer(r).Get(upstreamStatus)
	switch {
	case panicked != nil:
		err = errCutShort
	case err != nil:
	case cut:
		err = context.Cause(ctx)
		if err == nil {
			err = errNoAnswer
		}
	case answer.Status == 0:
		err = errNoAnswer
	case answered && upstream != answer.Status:
		err = errReplaced
	default:
		if !watch.Unframed() || u.way.action.Unframed == unframedComplete {
			return &answer.Answer, false, nil
		}
		if err = answer.maybeCut(u.Method); err == nil {
			return &answer.Answer, false, nil
		}
	}
	if panicked == nil && (answer.Status == 0 || cut) && proof.NotSent() {
		return nil, proof.Again, unsent("", err)
	}
	return nil, false, &undo.SendError{Err: fmt.Errorf("undo: %w", err)}
}

// Watch implements undo.Watcher.
func (s *undoSender) Watch(o *undo.Outgoing) undo.Window {
	app := s.e.audience.latest()
	if app == nil {
		return nil
	}
	way, err := app.guards.find(o)
	if err != nil || way.h.upstream == nil {
		return nil // nothing will be sent
	}
	target, err := url.ParseRequestURI(o.URL)
	if err != nil {
		return nil
	}
	return s.e.targets.open(checkpoint.TargetOf(way.h.upstreamName(), target.EscapedPath()))
}

// writes says that an undo begins to change a target. P6: it does not where somebody else
// has, since its look.
func (s *undoSender) writes(o *undo.Outgoing, name string) (over func(), err error) {
	own, _ := o.Window.(*window)
	if own != nil && own.name != name {
		return nil, unsent("", errMoved) // a new look goes where it goes
	}
	over = s.e.targets.write(name, own)
	if own != nil && own.Disturbed() {
		over()
		return nil, unsent(undo.ReasonChanged, errOvertaken)
	}
	return over, nil
}

var (
	errMoved     = errors.New("the configuration leads to another upstream than when the target was looked at")
	errOvertaken = errors.New("another call has changed the target since it was looked at")
)

var (
	_ undo.Sender  = (*undoSender)(nil)
	_ undo.Watcher = (*undoSender)(nil)
)
