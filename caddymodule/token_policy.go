package caddymodule

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// tokenPolicy is what the identity and the trust of one configuration decide: how evidence is
// recorded, and which tokens are accepted.
type tokenPolicy struct {
	constraints *constraints // shared by all configurations of the engine

	evidence    *evidence.Evidence
	events      *evidence.EventBuilder
	verifier    *ect.Verifier // nil without trust
	own         *ect.Verifier // of the gateway's own tokens
	ledgerFirst bool          // level L3: a token is in the ledger before the request goes on
	rollback    string        // URI
}

// openTokenPolicy opens the ledger of e for a configuration.
func openTokenPolicy(ctx context.Context, e *engine, i *Identity, t *Trust, logger *slog.Logger) (_ *tokenPolicy, err error) {
	ev, err := e.ledger.acquire(ctx, i, logger)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	defer func() {
		if err != nil {
			e.ledger.leave(i)
		}
	}()
	events, err := ev.EventBuilder(i.Name, i.spelling, time.Duration(i.Life))
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	policy := &tokenPolicy{constraints: &e.constraints, evidence: ev, events: events, rollback: i.rollbackURI()}
	ownKeys, err := events.Source()
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	policy.own, err = ect.NewVerifier(ect.Policy{
		Audience: events.Names(), Sources: []ect.Source{ownKeys}, Algorithms: ect.Algorithms(), AllowPartial: true,
	})
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	if t == nil {
		return policy, nil
	}
	// The gateway's own tokens come back as parents.
	sources := append([]ect.Source{ownKeys}, t.sources...)
	algorithms := []string{i.Algorithm}
	for _, k := range ev.Ring().List() { // a key file may have keys of other algorithms
		algorithms = append(algorithms, k.Algorithm.String())
	}
	if policy.verifier, err = t.verifier(i.Name, events.Names()[1:], algorithms, sources...); err != nil {
		return nil, fmt.Errorf("agent_guard: trust: %w", err)
	}
	if t.minLevel() == ect.L1 {
		ev.AcceptUnsigned()
	}
	policy.ledgerFirst = t.minLevel() == ect.L3
	return policy, nil
}

// settledBy returns the evidence that an execution in doubt was settled, for the commit of that
// decision; nil where there is none.
func (t *tokenPolicy) settledBy(ctx context.Context, e *engine, key execution.Key, r *execution.Record, applied bool, by string) *store.Batch {
	if t == nil || r.Checkpoint == "" {
		return nil
	}
	now, drafts, err := t.settlement(ctx, e, key, r, applied, by)
	if err == nil {
		var batch *store.Batch
		if batch, err = t.evidence.NewBatch(now.Add(r.KeepResult), nil, drafts...); err == nil {
			return batch
		}
	}
	e.logger.Error("the ledger cannot record how a doubt was settled", zap.Stringer("key", key), zap.Error(err))
	return nil
}

// settlement drafts the event of a settled doubt.
func (t *tokenPolicy) settlement(ctx context.Context, e *engine, key execution.Key, r *execution.Record, applied bool, by string) (time.Time, []*ect.Draft, error) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return now, nil, err
	}
	outcome := evidence.Outcome{Checkpoint: r.Checkpoint, Verdict: execution.Released, Cause: r.Cause, By: by}
	if applied {
		outcome.Verdict = execution.Completed
	}
	call := t.evidence.CallOf(ctx, key, r)
	drafts, err := t.events.Outcome(now, &call, &outcome)
	return now, drafts, err
}

// constrain makes breakers refuse the request as its tokens ask, and as earlier tokens of the
// same issuer in this workflow have asked.
func (t *tokenPolicy) constrain(r *http.Request, p *presented) {
	if t == nil || len(p.all) == 0 {
		return
	}
	if workflow, issuer := p.workflow(), p.issuer(); p.asked != nil && workflow != "" && issuer != "" {
		t.constraints.add(asker{evidence.WorkflowID(workflow), issuer}, p.asked)
	}
	proxy.SetView(r.Context(), p.asked.And(t.asked(p.workflow(), p.issuer())))
}

// asked is what an issuer has asked of breakers in a workflow, or nil.
func (t *tokenPolicy) asked(workflow, issuer string) *breaker.View {
	if t == nil || workflow == "" || issuer == "" {
		return nil
	}
	return t.constraints.find(asker{evidence.WorkflowID(workflow), issuer})
}

// graph answers questions about the recorded workflows.
func (t *tokenPolicy) graph(e *engine) *api.Ledger {
	return api.NewLedger(api.LedgerOptions{
		Log: t.evidence.Log(), Outcomes: t.evidence.Outcomes, HeadKey: t.evidence.HeadKey(), Identities: []string{t.events.Identity()}, Own: t.events.Own,
		Verify: t.verifyErrors, Record: func(ctx context.Context, tokens []*ect.Token) error { return t.record(ctx, e, tokens) },
		Verified: t.verified, Undos: e.checkpoints, Execution: e.executionStatus, Waits: e.waits,
		Called: func(ctx context.Context, caller [16]byte) (bool, error) { return e.guard.Knows(ctx, caller) },
	})
}

// graphOnly knows the ledger alone, and no executions or checkpoints.
func (t *tokenPolicy) graphOnly() *api.Ledger {
	return api.NewLedger(api.LedgerOptions{Log: t.evidence.Log(), Outcomes: t.evidence.Outcomes, Identities: []string{t.events.Identity()}, Own: t.events.Own})
}

// verified verifies the gateway's own signature of a token, however old it is.
func (t *tokenPolicy) verified(ctx context.Context, raw string) error {
	token, err := ect.ParseInsecure(raw)
	if err != nil {
		return err
	}
	_, err = t.own.Verify(ctx, raw, ect.Presentation{Now: token.IssuedAt()})
	return err
}

// verifyErrors verifies the errors that agents report.
func (t *tokenPolicy) verifyErrors(r *http.Request, raws []string) ([]*ect.Token, error) {
	if t.verifier == nil {
		return nil, &ect.Error{Code: ect.CodeKeyID} // no keys are trusted
	}
	return t.verifier.VerifyAll(r.Context(), raws, ect.Presentation{Now: time.Now(), Peer: peer(r), DAG: t.evidence.GraphOf})
}

// admitTime is how long the errors of agents wait while the ledger is far behind.
const admitTime = 5 * time.Second

// errorUse is what the token of a reported error is used for.
var errorUse = evidence.Use(sha256.Sum256([]byte("agent_guard errors")))

// record adds the errors that agents report to the ledger. Their tokens cannot be used again.
func (t *tokenPolicy) record(ctx context.Context, e *engine, tokens []*ect.Token) error {
	admitted, cancel := context.WithTimeout(ctx, admitTime)
	defer cancel()
	if err := t.evidence.Log().Admit(admitted); err != nil {
		return err
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	batch, err := t.evidence.NewBatch(now, tokens)
	if err != nil {
		return err
	}
	for _, token := range tokens {
		batch.Add(t.evidence.UseWrite(token, errorUse, time.Time{}))
	}
	err = batch.Commit(ctx, e.store)
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
		for _, token := range tokens {
			status, failed := t.evidence.UseStatus(ctx, token, errorUse)
			if failed != nil {
				return failed
			}
			if status == evidence.Other {
				return &ect.Error{Code: ect.CodeReplayed} // it was used for a call
			}
		}
	}
	if err == nil {
		e.logger.Info("agents have reported errors", zap.Int("count", len(tokens)), zap.String("issuer", tokens[0].Issuer()))
	}
	return err
}

// failureOf returns the id of the error that has opened a breaker, and sets the workflow of c.
// If the call has recorded no error, one is drafted: in the call's workflow and after its
// checkpoint, if it was guarded.
func (t *tokenPolicy) failureOf(ctx context.Context, now time.Time, c *evidence.Circuit, ev breaker.Event) (string, []*ect.Draft, error) {
	failure := evidence.Attempt{Downstream: c.Downstream, Cause: cmp.Or(ev.Cause, string(ev.Reason))}
	if of := proxy.ParseEvidence(ev.Evidence); of.Checkpoint != "" {
		attempt := t.evidence.AttemptID(of.Checkpoint, ev.Key.String())
		known, err := t.evidence.Known(ctx, of.Workflow, []string{t.evidence.ErrorID(of.Checkpoint), attempt, of.Checkpoint})
		if err != nil {
			return "", nil, err
		}
		if len(known) > 0 { // else it is in another store
			c.Workflow = of.Workflow
			if known[0] != of.Checkpoint {
				return known[0], nil, nil
			}
			failure.Checkpoint, failure.ID, failure.Workflow = of.Checkpoint, attempt, of.Workflow
		}
	}
	draft, err := t.events.Attempt(now, &failure)
	if err != nil {
		return "", nil, err
	}
	return draft.ID(), []*ect.Draft{draft}, nil
}

// lastFailure is the id of the recorded error of a breaker's last failure, or empty.
func (t *tokenPolicy) lastFailure(ctx context.Context, s *breaker.Status) string {
	of := proxy.ParseEvidence(s.Evidence)
	if t == nil || of.Checkpoint == "" {
		return ""
	}
	ids := []string{t.evidence.ErrorID(of.Checkpoint), t.evidence.AttemptID(of.Checkpoint, s.Key.String())}
	if known, err := t.evidence.Known(ctx, of.Workflow, ids); err == nil && len(known) > 0 {
		return known[0]
	}
	return ""
}

// proves verifies that a token proves that issuer has answered a probe, and uses it up.
func (t *tokenPolicy) proves(ctx context.Context, raw, issuer string, earliest time.Time) error {
	now := time.Now()
	// Without its parents: the question is who has answered, not what it did.
	token, err := t.verifier.Verify(ctx, raw, ect.Presentation{Now: now})
	switch {
	case err != nil:
		return err
	case token.Level() < ect.L2: // whatever `min_level` is: nothing else proves the issuer here
		return &ect.Error{Code: ect.CodeLevel}
	case token.Issuer() != issuer:
		return &ect.Error{Code: ect.CodeIssuer}
	case token.IssuedAt().Before(earliest):
		return &ect.Error{Code: ect.CodeTooOld}
	}
	// The use is random, so that a token that was used before, by a probe (in memory) or a
	// call (there or in the store), is refused, and so is this one with a later call. The
	// memory is bounded and outlives reloads; when it is full, nothing more is verified.
	// After a restart, earliest takes its place.
	var use evidence.Use
	_, _ = rand.Read(use[:]) // never fails
	status, err := t.evidence.Take(token, use, now)
	if err == nil && status == evidence.Unused {
		status, err = t.evidence.UseStatus(ctx, token, use)
	}
	if err == nil && status != evidence.Unused {
		err = &ect.Error{Code: ect.CodeReplayed}
	}
	return err
}

// verify verifies the tokens of a request. A refusal is an *ect.Error.
func (t *tokenPolicy) verify(r *http.Request) (presented, error) {
	raws, err := ect.ParseFields(r.Header[ect.FieldName])
	if err != nil || len(raws) == 0 {
		return presented{}, err
	}
	if len(raws) > maxPresented {
		return presented{}, &ect.Error{Code: ect.CodeTooManyParents}
	}
	graph := t.evidence.GraphOf
	if api.HandlesRollback(r) {
		graph = t.evidence.GraphOfRollbackRequest
	}
	all, err := t.verifier.VerifyAll(r.Context(), raws, ect.Presentation{Now: time.Now(), Peer: peer(r), DAG: graph})
	p := presented{all: all}
	if err != nil {
		if p.late, p.all = err, t.late(r, raws, err); len(p.all) == 0 {
			return presented{}, err
		}
	}
	return t.sort(r, p)
}

// sort finds the caller's own tokens among verified ones, and what they ask for.
func (t *tokenPolicy) sort(r *http.Request, p presented) (presented, error) {
	all := p.all
	rollback := api.HandlesRollback(r)
	for _, token := range all {
		if err := checkEvent(token, rollback); err != nil {
			return presented{}, err
		}
		asked, err := askedBy(token)
		if err != nil {
			return presented{}, err
		}
		if token.Proven() { // others may not ask for anything
			p.asked = p.asked.And(asked)
		}
		if w := p.workflow(); token.Workflow() != "" && token.Workflow() != w {
			return presented{}, &ect.Error{Code: ect.CodeWorkflow}
		}
		parent := slices.ContainsFunc(all, func(other *ect.Token) bool { return slices.Contains(other.Parents(), token.ID()) })
		if parent {
			continue
		}
		p.leaves = append(p.leaves, token.NodeID())
		if t.events.Issued(token) {
			// Forwarded by an agent that got it with a call. Whatever its signature, this
			// gateway has issued only what is in its ledger.
			status, err := t.evidence.LedgerStatus(r.Context(), token)
			if err != nil {
				return presented{}, err
			}
			if status != evidence.Same {
				return presented{}, &ect.Error{Code: ect.CodeParentUnknown}
			}
			continue
		}
		if len(p.own) > 0 && p.own[0].Issuer() != token.Issuer() {
			return presented{}, &ect.Error{Code: ect.CodeIssuer} // a request has one caller
		}
		p.own = append(p.own, token)
	}
	return p, nil
}

// late returns tokens that have expired, or whose keys have: a retry may come late, and its
// tokens still find the record of the call (P1). Tokens of a revoked key find nothing.
func (t *tokenPolicy) late(r *http.Request, raws []string, refused error) []*ect.Token {
	var why *ect.Error
	if !errors.As(refused, &why) {
		return nil
	}
	switch why.Code {
	case ect.CodeExpired, ect.CodeTooOld, ect.CodeKeyRevoked:
	default:
		return nil
	}
	all := make([]*ect.Token, 0, len(raws))
	for _, raw := range raws {
		token, err := t.verifier.VerifyAgain(r.Context(), raw, peer(r))
		if err != nil {
			return nil
		}
		all = append(all, token)
	}
	return all
}

// checkEvent checks that a token has the members that the drafts demand for its event (cascade
// 4.2.1, ATD "Exec Act Table"). In a request for a rollback, the body has what the token of a
// start lacks (cascade Figure 10).
func checkEvent(t *ect.Token, rollback bool) error {
	for _, m := range t.Lacks() {
		_, there := t.Ext().Raw(m)
		switch {
		case t.Event() == ect.EventError && m == ect.MemberCheckpointID: // the sender may have no checkpoints
		case rollback && !there && t.Event() == ect.EventRollbackStart:
		default:
			return &ect.Error{Code: ect.CodeExt, Lacks: t.Vocabulary().Member(m)}
		}
	}
	if t.Event() == ect.EventError && len(t.Parents()) == 0 {
		return &ect.Error{Code: ect.CodeParents}
	}
	return nil
}

// checkReports refuses events about work that their issuer has no part in: a stranger who
// knows one id could otherwise mark somebody's workflow as failed (C-6.2-b). Recorded tokens
// pass: they add nothing, and a retry has to find its record (P1). So do the events in except.
func (t *tokenPolicy) checkReports(ctx context.Context, p *presented, except ...ect.Event) error {
	var along []*ect.Token
	for _, token := range p.all {
		if token.Event() == "" || slices.Contains(except, token.Event()) || token.Issuer() == t.events.Identity() {
			continue
		}
		if along == nil {
			along = slices.Concat(p.all, t.evidence.Unrecorded(p.all, maxAncestors))
		}
		err := t.graphOnly().CheckReport(ctx, token, along)
		if err == nil {
			continue
		}
		status, failed := t.evidence.LedgerStatus(ctx, token)
		if failed != nil {
			return failed
		}
		if status != evidence.Same {
			return err
		}
	}
	return nil
}

// spend uses up the tokens of a request that is not guarded. Without a body the same tokens
// may come again with the same request, and with no other; with a body, never. On an error
// nothing is used up.
func (t *tokenPolicy) spend(p *presented, r *http.Request) error {
	if err := p.inTime(); err != nil {
		return err
	}
	if len(p.all) == 0 {
		return nil
	}
	use := safeUseOf(r)
	taken, err := t.take(r.Context(), p.own, use.Use)
	if err == nil && t.ledgerFirst {
		if err = t.enter(r, p, use); err == nil {
			taken = p.own // the store knows
		}
	}
	if err != nil || t.ledgerFirst {
		for _, token := range taken {
			t.evidence.Forget(token, use.Use)
		}
	}
	return err
}

// take remembers in memory what tokens are used for. It returns those that were unused, also
// with an error.
func (t *tokenPolicy) take(ctx context.Context, own []*ect.Token, use evidence.Use) (taken []*ect.Token, err error) {
	for _, token := range own {
		status, err := t.evidence.Take(token, use, time.Now())
		if err != nil && !t.ledgerFirst { // else the store remembers
			return taken, refusedToken(err)
		}
		if status == evidence.Unused {
			taken = append(taken, token)
			// It may have claimed a key.
			if status, err = t.evidence.UseStatus(ctx, token, use); err != nil {
				return taken, refusedToken(err)
			}
		}
		if status == evidence.Other {
			return taken, replayedToken()
		}
	}
	return taken, nil
}
