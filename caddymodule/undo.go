package caddymodule

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// undoSender sends the requests of undos (ADR 0033): to the upstream of the call through
// the latest configuration (ADR 0052), and to whole URLs with a client of its own.
type undoSender struct {
	e *engine
	// direct is for whole URLs.
	direct http.RoundTripper
}

// newUndoSender makes the sender of an engine. Before the first configuration has joined
// the engine, every request fails as not sent.
func newUndoSender(e *engine) *undoSender { return &undoSender{e: e, direct: newDirect()} }

// Send implements rollback.Sender. It remembers why an attempt failed, so that operators
// see why a rollback takes long.
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
		return nil, unsent("", errNotOpen) // between two configurations
	}
	if o.Delegated {
		return s.whole(ctx, o, func() (*rollback.Answer, error) { return s.delegate(ctx, app, o) })
	}
	if !strings.HasPrefix(o.URL, "/") {
		if o.Recorded { // recorded credentials are only for the upstream of the call
			return nil, unsent(rollback.ReasonNoCredentials, errOtherWay)
		}
		configured, err := app.undoFields(o, nil)
		if err != nil {
			return nil, unsent("", err)
		}
		return s.whole(ctx, o, func() (*rollback.Answer, error) { return s.send(ctx, o, undoHeader(o, configured)) })
	}
	to, err := app.find(o)
	if errors.Is(err, errOtherWay) {
		return nil, unsent(rollback.ReasonOtherUpstream, err)
	}
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	configured, err := app.undoFields(o, to)
	if err != nil { // an unset variable or a missing file may come back
		return nil, unsent("", err)
	}
	target, err := url.ParseRequestURI(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, fmt.Errorf("the path of the undo cannot be read: %w", err))
	}
	if !guard.SafeMethod(o.Method) {
		over, err := s.e.calls.Writes.WriteUndo(checkpoint.TargetOf(to.reach.Name(), target.EscapedPath()), o.Execution, o.Window)
		if err != nil {
			return nil, err
		}
		defer over()
	}
	r := &guard.InternalRequest{
		Method: o.Method, Path: target.EscapedPath(), Query: target.RawQuery, ForceQuery: target.ForceQuery,
		Host: o.Host, Header: undoHeader(o, configured), Body: o.Body, MaxAnswer: rollback.MaxAnswer,
		Remote: "127.0.0.1:0", // the gateway itself asks
	}
	answer, err := sendOwn(guard.WithUndo(ctx), r, to.handler, to.server)
	switch {
	case err != nil && answer.notSent:
		return nil, unsent("", err)
	case err != nil:
	case answer.Replaced:
		err = errReplaced
	case answer.Unframed:
		err = answer.maybeCut(o.Method)
	}
	return answer.ofUndo(err)
}

// unsent is the error of a request of which no byte was sent.
func unsent(reason rollback.Reason, err error) error {
	return &rollback.SendError{NotSent: true, Reason: reason, Err: fmt.Errorf("undo: %w", err)}
}

// undoHeader returns the header of an undo request. Recorded fields and those of the
// template take precedence. configured has the fields of the configuration, including its
// credentials if those of the call are not used.
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
	// The current state must not come from a cache.
	if !guard.SafeMethod(o.Method) && header.Get("Idempotency-Key") == "" {
		header.Set("Idempotency-Key", o.Rollback+":"+o.Checkpoint)
	}
	if o.Workflow != "" {
		header.Set(guard.HeaderWorkflowID, o.Workflow)
	}
	if !guard.SafeMethod(o.Method) {
		header.Set(guard.HeaderRollback, "urn:uuid:"+o.Rollback) // its failure rolls nothing back
	}
	if header.Get("User-Agent") == "" {
		header.Set("User-Agent", "caddy-agent-guard")
	}
	return header
}

// Watch implements rollback.Watcher.
func (s *undoSender) Watch(o *rollback.Outgoing) rollback.WriteWindow {
	app := s.e.activeConfigs.latest()
	if app == nil {
		return nil
	}
	to, err := app.find(o)
	if err != nil {
		return nil // nothing will be sent
	}
	target, err := url.ParseRequestURI(o.URL)
	if err != nil {
		return nil
	}
	return s.e.calls.Writes.Open(checkpoint.TargetOf(to.reach.Name(), target.EscapedPath()), o.Execution)
}

var (
	_ rollback.Sender  = (*undoSender)(nil)
	_ rollback.Watcher = (*undoSender)(nil)
)

// ofUndo converts the answer to an undo request. With an error, the request may have
// arrived.
func (a *internalAnswer) ofUndo(err error) (*rollback.Answer, error) {
	if err != nil {
		return nil, &rollback.SendError{Err: fmt.Errorf("undo: %w", err)}
	}
	return &rollback.Answer{Status: a.Status, Header: a.InternalAnswer.Header, Body: a.Body, Cut: a.Cut}, nil
}

// maybeCut handles a body that ends with the connection, so that it may be incomplete. If
// the request changed something, the status suffices and the body is marked. A read of the
// current state must not use an incomplete body.
func (a *internalAnswer) maybeCut(method string) error {
	if guard.SafeMethod(method) {
		return errCutShort
	}
	a.Cut = true
	return nil
}

var errReplaced = errors.New("a handler on the way has answered in the upstream's place")

// undoDial bounds the connection to a whole URL and, separately, its TLS handshake.
const undoDial = 10 * time.Second

// newDirect makes the transport for whole URLs. It never sends a request twice: each
// request has its own connection, so that a refused connection proves that nothing was
// sent, and no other failure does. It ignores the environment's proxy, through which a
// refused connection would look like an answer.
func newDirect() http.RoundTripper {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Transport{
		DialContext:            (&net.Dialer{Timeout: undoDial}).DialContext,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    undoDial,
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		Protocols:              protocols,
	}
}

// whole sends a request to a whole URL through the breaker of its address (cascade 3.2, ADR
// 0053). A refusal proves that nothing was sent, and the step is retried.
func (s *undoSender) whole(ctx context.Context, o *rollback.Outgoing, send func() (*rollback.Answer, error)) (*rollback.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	op := breaker.Op{Safe: true} // a request that changes something is as good a probe
	if deadline, ok := ctx.Deadline(); ok {
		op.Patience = max(time.Until(deadline), 1)
	}
	permit, err := s.e.circuits.UndoBreaker(addressOf(target)).Acquire(op)
	if err != nil {
		return nil, unsent("", err)
	}
	defer permit.Done(breaker.Outcome{}) // if send panics
	answer, err := send()
	permit.Done(wholeOutcome(ctx, answer, err))
	return answer, err
}

// addressOf returns the host and port of a URL.
func addressOf(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// wholeOutcome judges a request to a whole URL for the breaker. What was not sent for a
// reason of the gateway's own says nothing about the target.
func wholeOutcome(ctx context.Context, answer *rollback.Answer, err error) breaker.Outcome {
	failure := breaker.Outcome{Class: breaker.Failure}
	switch notSent := (*rollback.SendError)(nil); {
	case err == nil && answer.Header.Get(guard.HeaderExecutionStatus) == guard.StatusRefused:
		return breaker.Outcome{} // another gateway refused it and did not call what is behind it
	case err == nil:
		failure.RetryAfter, failure.Cause = proxy.RetryAfter(answer.Header), fmt.Sprintf("status %d", answer.Status)
		switch {
		case answer.Status == http.StatusTooManyRequests:
			failure.Class = breaker.RateLimited
		case answer.Status < 500:
			return breaker.Outcome{Class: breaker.Success}
		}
	case errors.Is(ctx.Err(), context.Canceled): // the gateway is stopping
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

// delegate asks another agent to undo its own action.
func (s *undoSender) delegate(ctx context.Context, app *App, o *rollback.Outgoing) (*rollback.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	policy, err := app.tokenPolicy()
	if err != nil {
		return nil, unsent("", err)
	}
	if policy == nil {
		return nil, unsent(rollback.ReasonNoCredentials, errNoAsker)
	}
	if o.Participant != nil {
		return s.participant(ctx, policy, target, o)
	}
	asking := evidence.Request{
		Rollback: o.Rollback, Checkpoint: o.Checkpoint, Workflow: evidence.WorkflowID(o.Workflow),
		Audience: target.Scheme + "://" + target.Host, Reason: o.Reason, Phase: rollback.PhaseExecute,
	}
	if o.Method == http.MethodGet || o.Spec != nil && o.URL != o.Spec.Delegate {
		asking.Phase = rollback.PhaseStatus
	}
	header, err := s.askingHeader(ctx, policy, o, &asking)
	if err != nil {
		return nil, err
	}
	return s.send(ctx, o, header)
}

// participant asks an agent that takes part in both phases, for the checkpoint that its answer to
// the call has named. Nothing has proven that name: before anything is asked for, the checkpoint
// must verify, and follow from the call.
func (s *undoSender) participant(ctx context.Context, policy *tokenPolicy, target *url.URL, o *rollback.Outgoing) (*rollback.Answer, error) {
	if policy.records == nil {
		return nil, unsent(rollback.ReasonNoCredentials, errors.New("without `trust` in the global options no answer of an agent verifies"))
	}
	p := o.Participant
	asking := evidence.Request{
		Rollback: p.Rollback, Checkpoint: p.Checkpoint, Workflow: evidence.WorkflowID(o.Workflow), Audience: p.Agent, PartOf: p.PartOf, Reason: o.Reason,
	}
	if o.Method != http.MethodGet && len(p.Of) > 0 { // else its token came with a request, and was verified
		if err := s.examine(ctx, policy, target, o, asking); err != nil {
			return nil, err
		}
	}
	asking.Phase = p.Phase
	one := asking
	if o.Method == http.MethodGet {
		one.Phase = rollback.PhaseStatus
	}
	header, err := s.askingHeader(ctx, policy, o, &one)
	if err != nil {
		return nil, err
	}
	answer, err := s.send(ctx, o, header)
	if err != nil {
		return nil, err
	}
	chain, err := provenResult(ctx, policy, answer.Header.Values(ect.FieldName), &asking)
	if err == nil && len(chain) > 0 {
		answer.Proven = true
		answer.Completion, err = recordResult(ctx, policy, chain)
	}
	if err != nil {
		return nil, &rollback.SendError{Err: fmt.Errorf("undo: the result of the agent cannot be verified now: %w", err)}
	}
	return answer, nil
}

// recordResult records what a participant has signed, with the nodes that it follows from, and returns its
// id: by that a third party can prove who has said that the checkpoint is undone. It is empty where the
// ledger has something else under one of the ids.
func recordResult(ctx context.Context, policy *tokenPolicy, chain []*ect.Token) (string, error) {
	last := chain[len(chain)-1]
	known, err := policy.Evidence.Known(ctx, last.Workflow(), []string{last.NodeID()}) // signed anew for a retry
	if err != nil || len(known) > 0 {
		return last.NodeID(), err
	}
	err = policy.Evidence.RecordTokens(ctx, chain, nil, evidence.Use{})
	if errors.As(err, new(*ect.Error)) {
		return "", nil
	}
	return last.NodeID(), err
}

// askingHeader makes the header of a request to an agent, with a token for that phase and body only.
func (s *undoSender) askingHeader(ctx context.Context, policy *tokenPolicy, o *rollback.Outgoing, asking *evidence.Request) (http.Header, error) {
	issue := policy.Events.Ask
	if asking.Input = ect.Sum(o.Body); asking.Phase == rollback.PhaseExecute {
		issue = policy.Events.Request
	}
	raw, err := issue(ctx, asking)
	if err != nil {
		return nil, unsent("", err)
	}
	header := undoHeader(o, nil)
	header.Set(ect.FieldName, raw)
	return header, nil
}

// participantAt is where an agent is asked to roll back a checkpoint of its own, by the latest
// configuration.
func (e *engine) participantAt(issuer, rollbackURI string) (string, error) {
	app := e.activeConfigs.latest()
	if app == nil {
		return "", errNotOpen // between two configurations
	}
	o := app.rollbackOptions()
	return o.participantAt(issuer, rollbackURI), nil
}

// examine reads the participant's checkpoint and verifies it. Of its errors nothing was sent that
// changes anything.
func (s *undoSender) examine(ctx context.Context, policy *tokenPolicy, target *url.URL, o *rollback.Outgoing, asking evidence.Request) error {
	asking.Phase = evidence.PhaseCheckpoint
	at := url.URL{Scheme: target.Scheme, Host: target.Host, Path: router.WellKnown + "checkpoints/" + asking.Checkpoint}
	look := &rollback.Outgoing{Method: http.MethodGet, URL: at.String(), Workflow: o.Workflow, Rollback: o.Rollback}
	header, err := s.askingHeader(ctx, policy, look, &asking)
	if err != nil {
		return err
	}
	answer, err := s.send(ctx, look, header)
	if err != nil {
		return unsent("", err)
	}
	switch {
	case answer.Status >= 500, answer.Status == http.StatusTooManyRequests:
		return unsent("", fmt.Errorf("the checkpoint of the agent cannot be read: status %d", answer.Status))
	case answer.Status != http.StatusOK:
		return unsent(rollback.ReasonForeign, fmt.Errorf("the agent knows no such checkpoint: status %d", answer.Status))
	}
	var doc struct {
		Token string `json:"token"`
	}
	if err := json.Unmarshal(answer.Body, &doc); err != nil || answer.Cut {
		return unsent(rollback.ReasonForeign, errors.New("the checkpoint of the agent cannot be read"))
	}
	records, err := policy.records(o.Participant.Agent)
	if err != nil {
		return unsent("", err)
	}
	token, err := records.VerifyStored(ctx, doc.Token)
	if errors.Is(err, ect.ErrUnavailable) {
		return unsent("", err)
	}
	if err == nil {
		err = checkParticipant(token, target, o.Participant, asking.Workflow)
	}
	if err != nil {
		return unsent(rollback.ReasonForeign, err)
	}
	return nil
}

// checkParticipant holds that a checkpoint is what the participant made for the call.
func checkParticipant(token *ect.Token, target *url.URL, p *rollback.Participant, workflow string) error {
	text, _ := token.Ext().Text(ect.MemberRollbackURI)
	at, err := url.Parse(text)
	switch {
	case token.Issuer() != p.Agent:
		return errors.New("the checkpoint is not one of the agent")
	case token.Event() != ect.EventCheckpoint || ledger.Canonical(token.ID()) != ledger.Canonical(p.Checkpoint):
		return errors.New("the token is not that of the checkpoint")
	case token.Workflow() != workflow:
		return errors.New("the checkpoint is of another workflow")
	case !slices.ContainsFunc(token.Parents(), func(id string) bool { return slices.Contains(p.Of, ledger.Canonical(id)) }):
		return errors.New("the checkpoint does not follow from the call")
	case err != nil || at.Scheme != target.Scheme || addressOf(at) != addressOf(target):
		return errors.New("the checkpoint is rolled back elsewhere than the configuration says")
	}
	return nil
}

// provenResult returns the first token of an answer, last, if that is the participant's own word about what it
// was asked for, for this gateway, and follows from the request: its parents name that, or nodes of the
// participant's that come along and follow from it, which are returned too. An error says nothing: it is asked again.
func provenResult(ctx context.Context, policy *tokenPolicy, lines []string, asked *evidence.Request) ([]*ect.Token, error) {
	raws, err := ect.ParseFields(lines)
	if err != nil || len(raws) == 0 {
		return nil, nil
	}
	result, err := ofParticipant(ctx, policy, raws[0], asked)
	if result == nil || err != nil {
		return nil, err
	}
	said := func(m ect.Member) string {
		text, _ := result.Ext().Text(m)
		return text
	}
	if id, err := router.ParseID(said(ect.MemberRollbackID)); err != nil || id != asked.Rollback || result.Event() != ect.EventRollbackComplete ||
		ledger.Canonical(said(ect.MemberCheckpointID)) != ledger.Canonical(asked.Checkpoint) {
		return nil, nil
	}
	nodes := map[string]*ect.Token{} // that come along
	for _, raw := range raws[1:] {
		node, err := ofParticipant(ctx, policy, raw, asked)
		if err != nil {
			return nil, err
		}
		if node != nil {
			nodes[ledger.Canonical(node.ID())] = node
		}
	}
	chain := []*ect.Token{result}
	for todo := result.Parents(); len(todo) > 0; {
		id := ledger.Canonical(todo[0])
		if is, err := policy.Events.Asked(ctx, asked, id); is || err != nil {
			slices.Reverse(chain) // parents first
			return chain, err
		}
		todo = todo[1:len(todo):len(todo)]
		if node := nodes[id]; node != nil {
			delete(nodes, id)
			chain = append(chain, node)
			todo = append(todo, node.Parents()...)
		}
	}
	return nil, nil
}

// ofParticipant verifies a token of an answer; nil is one that is not the participant's, of the workflow.
func ofParticipant(ctx context.Context, policy *tokenPolicy, raw string, asked *evidence.Request) (*ect.Token, error) {
	token, err := policy.Verifier.VerifyStored(ctx, raw)
	if errors.Is(err, ect.ErrUnavailable) {
		return nil, err
	}
	if err != nil || token.Level() < ect.L2 || token.Issuer() != asked.Audience || token.Workflow() != asked.Workflow {
		return nil, nil
	}
	return token, nil
}

var errNoAsker = errors.New("without `identity` in the global options there is no token by which an agent knows who asks")

// parseWhole parses the URL of a server other than the call's upstream.
func parseWhole(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil: // the error would contain it
		return nil, errors.New("the URL of the undo cannot be read")
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "", u.User != nil:
		return nil, errors.New("the URL of the undo is none of http or https with a host and without credentials")
	}
	return u, nil
}

// send sends a request to a whole URL. It does not follow redirects: the target would
// choose who gets the credentials.
func (s *undoSender) send(ctx context.Context, o *rollback.Outgoing, header http.Header) (*rollback.Answer, error) {
	target, err := parseWhole(o.URL)
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	r, err := http.NewRequestWithContext(ctx, o.Method, target.String(), bytes.NewReader(o.Body))
	if err != nil {
		return nil, unsent(rollback.ReasonNoUpstream, err)
	}
	header.Set("Accept-Encoding", "identity") // bodies are compared
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
	answer := newInternalAnswer(rollback.MaxAnswer)
	answer.InternalAnswer.Header = res.Header
	answer.WriteHeader(res.StatusCode)
	// Reading one byte more than is kept shows that the body is longer, without waiting for
	// more.
	if _, err = io.CopyN(answer, res.Body, rollback.MaxAnswer+1); err == io.EOF {
		err = nil
	}
	switch {
	case err != nil:
		err = fmt.Errorf("%w: %w", errCutShort, err)
	case r.Method != http.MethodHead && res.ContentLength < 0 && len(res.TransferEncoding) == 0:
		err = answer.maybeCut(r.Method)
	}
	return answer.ofUndo(err)
}

// undoTrials remembers the failed undo attempts of this process by checkpoint, for
// operators who look at a rollback that takes long.
type undoTrials struct {
	mu  sync.Mutex
	all map[string]admin.Trial
}

// maxTrials bounds the memory: many more than run at a time.
const maxTrials = 10_000

// tried records the result of a request.
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

// ended forgets a checkpoint once its step is done.
func (t *undoTrials) ended(checkpoint string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.all, checkpoint)
}

// of returns the failed attempts for a checkpoint.
func (t *undoTrials) of(checkpoint string) (admin.Trial, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, ok := t.all[checkpoint]
	return found, ok
}
