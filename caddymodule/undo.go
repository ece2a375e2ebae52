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
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// undoSender sends the requests of undos (ADR 0033): to the upstream of the call, by
// whatever way the latest configuration has to it (ADR 0052), and to whole URLs by a client
// of its own.
type undoSender struct {
	e *engine
	// direct is for whole URLs.
	direct http.RoundTripper
}

// newUndoSender makes the sender of an engine. It sends nothing before the first
// configuration has joined the engine, and then says that nothing was sent.
func newUndoSender(e *engine) *undoSender { return &undoSender{e: e, direct: newDirect()} }

// Send implements rollback.Sender. Why there is no answer is recorded: who looks at a rollback
// that takes long sees that it is tried again, and not what for.
func (s *undoSender) Send(ctx context.Context, o *rollback.Outgoing) (*rollback.Answer, error) {
	answer, err := s.dispatch(ctx, o)
	s.e.rollbacks.trials.tried(o, answer, err)
	if err != nil && ctx.Err() == nil {
		what := "a request of an undo got no answer"
		if proven := (*rollback.SendError)(nil); errors.As(err, &proven) && proven.NotSent {
			what = "a request of an undo was not sent"
		}
		s.e.logger.Warn(what, zap.String("rollback", o.Rollback),
			zap.String("checkpoint", o.Checkpoint), zap.String("method", o.Method), zap.Error(err))
	}
	return answer, err
}

func (s *undoSender) dispatch(ctx context.Context, o *rollback.Outgoing) (*rollback.Answer, error) {
	app := s.e.activeConfigs.latest()
	if app == nil {
		return nil, unsent("", errNotOpen) // between configurations: the next one comes
	}
	if o.Delegated {
		return s.whole(ctx, o, func() (*rollback.Answer, error) { return s.delegate(ctx, app, o) })
	}
	if !strings.HasPrefix(o.URL, "/") {
		if o.Recorded { // they are for the upstream of the call only
			return nil, unsent(rollback.ReasonNoCredentials, errOtherWay)
		}
		configured, err := app.undoFields(o, nil)
		if err != nil {
			return nil, unsent("", err)
		}
		return s.whole(ctx, o, func() (*rollback.Answer, error) { return s.send(ctx, o, undoHeader(o, configured)) })
	}
	way, err := app.find(o)
	if errors.Is(err, errOtherWay) {
		return nil, unsent(rollback.ReasonOtherUpstream, err)
	}
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	configured, err := app.undoFields(o, way)
	if err != nil { // a variable that is not set, or a file that is gone: it may come back
		return nil, unsent("", err)
	}
	target, err := url.ParseRequestURI(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, fmt.Errorf("the path of the undo cannot be read: %w", err))
	}
	if !proxy.Safe(o.Method) {
		over, err := s.writes(o, checkpoint.TargetOf(way.reach.Name(), target.EscapedPath()))
		if err != nil {
			return nil, err
		}
		defer over()
	}
	u := undoCall{Outgoing: o, way: way, target: target, header: undoHeader(o, configured)}
	answer, again, err := u.forward(ctx)
	if again {
		answer, _, err = u.forward(ctx)
	}
	return answer, err
}

// unsent is the error of a request of which not a byte was sent.
func unsent(reason rollback.Reason, err error) error {
	return &rollback.SendError{NotSent: true, Reason: reason, Err: fmt.Errorf("undo: %w", err)}
}

// undoHeader is the header of a request of an undo. What was recorded or made from the
// template stays; configured has the fields of the configuration, and its credentials
// where the call's own are not used.
func undoHeader(o *rollback.Outgoing, configured http.Header) http.Header {
	header := http.Header{}
	for name, values := range o.Header {
		header[http.CanonicalHeaderKey(name)] = append([]string(nil), values...)
	}
	for name, values := range configured {
		if !o.Recorded || header[name] == nil {
			header[name] = append([]string(nil), values...)
		}
	}
	// A question for the current state must not be answered from a cache.
	if !proxy.Safe(o.Method) && header.Get("Idempotency-Key") == "" {
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
	*rollback.Outgoing
	way    *passage
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
	if len(u.way.server.TLSConnPolicies) > 0 {
		// The upstream gets X-Forwarded-Proto of calls to this site. One that wants https
		// would answer an undo with a redirect.
		r.TLS = new(tls.ConnectionState)
	}
	return caddyhttp.PrepareRequest(r.WithContext(proxy.WithUndo(asOwn(ctx))), caddy.NewReplacer(), answer, u.way.server)
}

// forward sends the request once. again says that a connection turned out to be dead
// before a byte was written, so that another one is likely to do.
func (u *undoCall) forward(ctx context.Context) (_ *rollback.Answer, again bool, _ error) {
	answer := newUndoAnswer()
	r := u.request(ctx, answer)
	armed, watch := proxy.Arm(r.Context())
	defer watch.Release()
	r = r.WithContext(armed)
	panicked, err := handOn(u.way.handler, answer, r)
	// Of a request that is cut off before its answer reverse_proxy makes a 499 without an error.
	cut := armed.Err() != nil && (answer.Status == 0 || answer.Status == 499)
	proof := watch.Proof(err, proxy.Retries(armed))
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
		if !watch.Unframed() || u.Spec != nil && u.Spec.Unframed {
			return &answer.Answer, false, nil
		}
		if err = answer.maybeCut(u.Method); err == nil {
			return &answer.Answer, false, nil
		}
	}
	if panicked == nil && (answer.Status == 0 || cut) && proof.NotSent() {
		return nil, proof.Again, unsent("", err)
	}
	return nil, false, &rollback.SendError{Err: fmt.Errorf("undo: %w", err)}
}

// Watch implements undo.Watcher.
func (s *undoSender) Watch(o *rollback.Outgoing) rollback.Window {
	app := s.e.activeConfigs.latest()
	if app == nil {
		return nil
	}
	way, err := app.find(o)
	if err != nil {
		return nil // nothing will be sent
	}
	target, err := url.ParseRequestURI(o.URL)
	if err != nil {
		return nil
	}
	return s.e.writes.open(checkpoint.TargetOf(way.reach.Name(), target.EscapedPath()))
}

// writes says that an undo begins to change a target. P6: it does not where somebody else
// has, since its look.
func (s *undoSender) writes(o *rollback.Outgoing, name string) (over func(), err error) {
	own, _ := o.Window.(*writeWindow)
	if own != nil && own.name != name {
		return nil, unsent("", errMoved) // a new look goes where it goes
	}
	over = s.e.writes.write(name, own)
	if own != nil && own.Disturbed() {
		over()
		return nil, unsent(rollback.ReasonChanged, errOvertaken)
	}
	return over, nil
}

var (
	errMoved     = errors.New("the configuration leads to another upstream than when the target was looked at")
	errOvertaken = errors.New("another call has changed the target since it was looked at")
)

var (
	_ rollback.Sender  = (*undoSender)(nil)
	_ rollback.Watcher = (*undoSender)(nil)
)

// undoAnswer is a response writer that keeps the answer to a request of an undo.
type undoAnswer struct {
	rollback.Answer
}

func newUndoAnswer() *undoAnswer { return &undoAnswer{rollback.Answer{Header: http.Header{}}} }

// Header implements http.ResponseWriter.
func (a *undoAnswer) Header() http.Header { return a.Answer.Header }

// WriteHeader implements http.ResponseWriter. Interim answers are not the answer.
func (a *undoAnswer) WriteHeader(status int) {
	if a.Status == 0 && status >= 200 {
		a.Status = status
	}
}

// Write implements http.ResponseWriter. It goes on to take what is not kept: an answer
// that is too long is still known to be whole.
func (a *undoAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	room := rollback.MaxAnswer - len(a.Body)
	if len(p) > room {
		a.Cut = true
		a.Body = append(a.Body, p[:room]...)
		return len(p), nil
	}
	a.Body = append(a.Body, p...)
	return len(p), nil
}

// maybeCut is for a body that nothing but the connection's end has ended, so that its own
// end may be lacking. Of what changes something the status says enough, and the body is
// marked; who looks at what there is must not take a part of it for the whole.
func (a *undoAnswer) maybeCut(method string) error {
	if proxy.Safe(method) {
		return errCutShort
	}
	a.Cut = true
	return nil
}

var (
	errCutShort = errors.New("the answer was cut short")
	errNoAnswer = errors.New("no answer came")
	errReplaced = errors.New("a handler on the way has answered in the upstream's place")
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

// whole lets a request to a whole URL through the breaker of its address (cascade 3.2, ADR
// 0053). A refusal is the proof that nothing was sent: the step tries again.
func (s *undoSender) whole(ctx context.Context, o *rollback.Outgoing, send func() (*rollback.Answer, error)) (*rollback.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	op := breaker.Op{Safe: proxy.Safe(o.Method)}
	if deadline, ok := ctx.Deadline(); ok {
		op.Patience = max(time.Until(deadline), 1)
	}
	permit, err := s.e.circuits.UndoBreaker(addressOf(target)).Acquire(op)
	if err != nil {
		return nil, unsent("", err)
	}
	defer permit.Done(breaker.Outcome{}) // where send panics
	answer, err := send()
	permit.Done(wholeOutcome(ctx, answer, err))
	return answer, err
}

// addressOf is the host and port of a URL.
func addressOf(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// wholeOutcome is what came of a request to a whole URL, as far as its target's health
// goes. What was not sent for a reason of the gateway's own says nothing of it.
func wholeOutcome(ctx context.Context, answer *rollback.Answer, err error) breaker.Outcome {
	failure := breaker.Outcome{Class: breaker.Failure}
	switch notSent := (*rollback.SendError)(nil); {
	case err == nil && answer.Header.Get(headerExecutionStatus) == statusRefused:
		return breaker.Outcome{} // a gateway like this one did not call what is behind it
	case err == nil:
		failure.RetryAfter, failure.Cause = proxy.RetryAfter(answer.Header), fmt.Sprintf("status %d", answer.Status)
		switch {
		case answer.Status == http.StatusTooManyRequests:
			failure.Class = breaker.RateLimited
		case answer.Status < 500:
			return breaker.Outcome{Class: breaker.Success}
		}
	case errors.Is(ctx.Err(), context.Canceled): // the gateway stops
		return breaker.Outcome{}
	case ctx.Err() != nil:
		failure.Cause = "timeout"
	case dialFailed(err):
		failure.Cause = "no connection"
	case errors.As(err, &notSent) && notSent.NotSent:
		return breaker.Outcome{}
	default:
		failure.Cause = "no answer"
	}
	return failure
}

// dialFailed reports whether no connection was made.
func dialFailed(err error) bool {
	var dial *net.OpError
	return errors.As(err, &dial) && dial.Op == "dial"
}

// delegate asks another agent to roll back its own.
func (s *undoSender) delegate(ctx context.Context, app *App, o *rollback.Outgoing) (*rollback.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	way, err := app.tokenPolicy()
	if err != nil {
		return nil, unsent("", err)
	}
	if way == nil {
		return nil, unsent(rollback.ReasonNoCredentials, errNoAsker)
	}
	raw, err := way.events.Request(ctx, &evidence.Request{
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
func (s *undoSender) send(ctx context.Context, o *rollback.Outgoing, header http.Header) (*rollback.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	r, err := http.NewRequestWithContext(ctx, o.Method, target.String(), bytes.NewReader(o.Body))
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	r.Header = header
	r.GetBody = nil
	if ctx.Err() != nil {
		return nil, unsent("", context.Cause(ctx))
	}
	res, err := s.direct.RoundTrip(r)
	if err != nil {
		if dialFailed(err) {
			return nil, unsent("", err)
		}
		return nil, &rollback.SendError{Err: fmt.Errorf("undo: %w", err)}
	}
	defer res.Body.Close()
	answer := newUndoAnswer()
	answer.Answer.Header = res.Header
	answer.WriteHeader(res.StatusCode)
	// One byte more than is kept shows that there is more; no more is waited for.
	if _, err := io.CopyN(answer, res.Body, rollback.MaxAnswer+1); err != nil && err != io.EOF {
		return nil, &rollback.SendError{Err: fmt.Errorf("undo: %w: %w", errCutShort, err)}
	}
	if r.Method != http.MethodHead && res.ContentLength < 0 && len(res.TransferEncoding) == 0 {
		if err := answer.maybeCut(r.Method); err != nil {
			return nil, &rollback.SendError{Err: fmt.Errorf("undo: %w", err)}
		}
	}
	return &answer.Answer, nil
}

// undoTrials are the undos of this life that have got no good answer yet, by the checkpoint
// of their step: who looks at a rollback that hangs learns why.
type undoTrials struct {
	mu  sync.Mutex
	all map[string]admin.Trial
}

// maxTrials bounds how many are remembered: many more than run at a time.
const maxTrials = 10_000

// tried takes what came of a request.
func (t *undoTrials) tried(o *rollback.Outgoing, answer *rollback.Answer, err error) {
	cause := ""
	switch looks := o.Method == http.MethodGet; {
	case err != nil:
		cause = fmt.Sprintf("%s: %v", o.Method, err)
	case answer == nil, answer.Status < 300, looks && answer.Status < 500:
	default:
		cause = fmt.Sprintf("%s: it was answered with %d", o.Method, answer.Status)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	was, known := t.all[o.Step]
	if cause == "" || !known && len(t.all) >= maxTrials {
		return
	}
	if t.all == nil {
		t.all = map[string]admin.Trial{}
	}
	t.all[o.Step] = admin.Trial{Attempts: was.Attempts + 1, Cause: cause}
}

// ended forgets a checkpoint: its step says what came of it.
func (t *undoTrials) ended(checkpoint string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.all, checkpoint)
}

// of is what is known of a checkpoint.
func (t *undoTrials) of(checkpoint string) (admin.Trial, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, ok := t.all[checkpoint]
	return found, ok
}
