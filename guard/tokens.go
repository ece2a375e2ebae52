package guard

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// TokenPolicy is what the identity and the trust of one configuration decide: how evidence is
// recorded, and which tokens are accepted.
type TokenPolicy struct {
	// Engine is the one whose ledger it records in.
	Engine   *Engine
	Evidence *evidence.Evidence
	Events   *evidence.EventBuilder
	// Verifier verifies tokens; nil without trust.
	Verifier *ect.Verifier
	// LedgerFirst is level L3: a token is in the ledger before the request goes on.
	LedgerFirst bool
	// RollbackURI is where rollbacks are asked for.
	RollbackURI string
	// AwaitEnds says that the gateway records the ends of workflows by itself.
	AwaitEnds bool
	// Rule is the escalation that the deployment's rules want for an agent's error; it reports false
	// for none. Nil has no rules.
	Rule func(failure *ect.Token) (o hitl.Opening, fits bool)
	// Plans are the plans of workflows that the configuration knows.
	Plans Plans
	// Reports refuses, with an *ect.Error, a report whose issuer takes part in less than it names. along are
	// tokens that count as recorded. Of an answer it is told who was called, and with which tokens.
	Reports interface {
		CheckReport(ctx context.Context, report *ect.Token, along []*ect.Token) error
		CheckAnswer(ctx context.Context, report *ect.Token, along []*ect.Token, called string, call []string) error
	}
	// HandlesRollback reports whether a request asks for a rollback, or about one; FitsPhase whether a token
	// that was made for a phase may come with it.
	HandlesRollback func(r *http.Request) bool
	FitsPhase       func(r *http.Request, phase string, ext ect.Ext) bool // see HandlesRollback
}

// SettledBy returns the evidence that an execution in doubt was settled, for the commit of that
// decision; nil where there is none.
func (t *TokenPolicy) SettledBy(
	ctx context.Context, key execution.Key, r *execution.Record, applied bool, by string,
) *store.Batch {
	if t == nil || r.Checkpoint == "" {
		return nil
	}
	now, drafts, err := t.settlement(ctx, key, r, applied, by)
	if err == nil {
		var batch *store.Batch
		if batch, err = t.Evidence.NewBatch(now.Add(r.KeepResult), nil, drafts...); err == nil {
			return batch
		}
	}
	t.Engine.Logger.Error("the ledger cannot record how a doubt was settled", slog.Any("key", key), slog.Any("error", err))
	return nil
}

// settlement drafts the event of a settled doubt.
func (t *TokenPolicy) settlement(
	ctx context.Context, key execution.Key, r *execution.Record, applied bool, by string,
) (time.Time, []*ect.Draft, error) {
	now, err := t.Engine.Store.Now(ctx)
	if err != nil {
		return now, nil, err
	}
	outcome := evidence.Outcome{Checkpoint: r.Checkpoint, Verdict: execution.Released, Cause: r.Cause, By: by}
	if applied {
		outcome.Verdict = execution.Completed
	}
	call := t.Evidence.CallOf(ctx, key, r)
	drafts, err := t.Events.Outcome(now, &call, &outcome)
	return now, drafts, err
}

// constrain makes breakers refuse the request as its tokens ask, and as earlier tokens of the
// same issuer in this workflow have asked.
func (t *TokenPolicy) constrain(h *Handler, r *http.Request, p *Tokens) {
	if t == nil || len(p.All) == 0 {
		return
	}
	if workflow, issuer := p.workflow(), p.Issuer(); p.asked != nil && workflow != "" && issuer != "" {
		t.Engine.constraints.add(asker{evidence.WorkflowID(workflow), issuer}, p.asked)
	}
	if asked := p.asked.And(t.Asked(p.workflow(), p.Issuer())); asked != nil {
		h.Host.SetVar(r, ViewVar, asked.And(h.view(r)))
	}
}

// Asked is what an issuer has asked of breakers in a workflow, or nil.
func (t *TokenPolicy) Asked(workflow, issuer string) *breaker.View {
	if t == nil || workflow == "" || issuer == "" {
		return nil
	}
	return t.Engine.constraints.find(asker{evidence.WorkflowID(workflow), issuer})
}

// tokensIn are the tokens, as sent, of a request and of its message, and those that only the message has.
func tokensIn(r *http.Request, m *protocol.Message) (raws, inside []string, err error) {
	raws, err = ect.ParseFields(r.Header[ect.FieldName])
	if m != nil && err == nil {
		lines, ok := m.Tokens()
		if inside, err = ect.ParseFields(lines); !ok {
			err = &ect.Error{Code: ect.CodeMalformed}
		}
		inside = slices.DeleteFunc(inside, func(raw string) bool { return slices.Contains(raws, raw) })
		raws = append(raws, inside...)
	}
	return raws, inside, err
}

// Verify verifies the tokens of a request and of its message m, which is nil without one. A refusal
// is an *ect.Error.
func (t *TokenPolicy) Verify(r *http.Request, m *protocol.Message) (Tokens, error) {
	raws, inside, err := tokensIn(r, m)
	if err != nil || len(raws) == 0 {
		return Tokens{}, err
	}
	if len(raws) > MaxTokens {
		return Tokens{}, &ect.Error{Code: ect.CodeTooManyParents}
	}
	graph := t.Evidence.GraphOf
	if t.HandlesRollback(r) {
		graph = t.Evidence.GraphOfRollbackRequest
	}
	all, err := t.Verifier.VerifyAll(r.Context(), raws, ect.Presentation{Now: time.Now(), Peer: caller.Peer(r), DAG: graph})
	p := Tokens{All: all, message: m, inside: inside}
	if err != nil {
		if p.Late, p.All = err, t.late(r, raws, err); len(p.All) == 0 {
			return Tokens{}, err
		}
	}
	if p, err = t.Sort(r, p); err == nil && len(p.Own) == 0 {
		p.Own, _ = r.Context().Value(tokensHanded{}).([]*ect.Token)
	}
	return p, err
}

// Sort finds the caller's own tokens among verified ones, and what they ask for.
func (t *TokenPolicy) Sort(r *http.Request, p Tokens) (Tokens, error) {
	all := p.All
	rollback := t.HandlesRollback(r)
	for _, token := range all {
		if err := checkEvent(token, rollback); err != nil {
			return Tokens{}, err
		}
		asked, err := askedBy(token)
		if err != nil {
			return Tokens{}, err
		}
		if token.Proven() { // others may not ask for anything
			p.asked = p.asked.And(asked)
		}
		if w := p.workflow(); token.Workflow() != "" && token.Workflow() != w {
			return Tokens{}, &ect.Error{Code: ect.CodeWorkflow}
		}
		parent := slices.ContainsFunc(all, func(other *ect.Token) bool { return slices.Contains(other.Parents(), token.ID()) })
		if parent {
			continue
		}
		if phase, _ := token.Ext().Text(evidence.MemberPhase); phase != "" && !t.FitsPhase(r, phase, token.Ext()) {
			return Tokens{}, &ect.Error{Code: ect.CodeExt} // it is good for another endpoint
		}
		p.leaves = append(p.leaves, token.NodeID())
		if t.Events.Issued(token) {
			// Forwarded by an agent that got it with a call. Whatever its signature, this
			// gateway has issued only what is in its ledger.
			status, err := t.Evidence.LedgerStatus(r.Context(), token)
			if err != nil {
				return Tokens{}, err
			}
			if status != evidence.Same {
				return Tokens{}, &ect.Error{Code: ect.CodeParentUnknown}
			}
			continue
		}
		if len(p.Own) > 0 && p.Own[0].Issuer() != token.Issuer() {
			return Tokens{}, &ect.Error{Code: ect.CodeIssuer} // a request has one caller
		}
		p.Own = append(p.Own, token)
	}
	return p, nil
}

// late returns tokens that have expired, or whose keys have: a retry may come late, and its
// tokens still find the record of the call (P1). Tokens of a revoked key find nothing.
func (t *TokenPolicy) late(r *http.Request, raws []string, refused error) []*ect.Token {
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
		token, err := t.Verifier.VerifyAgain(r.Context(), raw, caller.Peer(r))
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

// CheckReports refuses events about work that their issuer has no part in: a stranger who
// knows one id could otherwise mark somebody's workflow as failed (C-6.2-b). Recorded tokens
// pass: they add nothing, and a retry has to find its record (P1). So do the events in except.
func (t *TokenPolicy) CheckReports(ctx context.Context, p *Tokens, except ...ect.Event) error {
	var along []*ect.Token
	for _, token := range p.All {
		if token.Event() == "" || slices.Contains(except, token.Event()) || token.Issuer() == t.Events.Identity() {
			continue
		}
		if along == nil {
			along = slices.Concat(p.All, t.Evidence.Unrecorded(p.All, maxAncestors))
		}
		err := t.Reports.CheckReport(ctx, token, along)
		if err == nil {
			continue
		}
		status, failed := t.Evidence.LedgerStatus(ctx, token)
		if failed != nil {
			return failed
		}
		if status != evidence.Same {
			return err
		}
	}
	return nil
}

// RefusedErrors hands the errors among tokens that were refused, since what they name is unknown to their
// issuer, to the coordinator: that finds out afterwards whether they are about another workflow, so that
// the answer does not show it (cascade 3.3.2, P3).
func (t *TokenPolicy) RefusedErrors(r *http.Request, raws []string) error {
	if t.Engine.Coordinator == nil || t.Verifier == nil {
		return nil
	}
	c := t.Engine.Coordinator()
	if c == nil {
		return nil
	}
	for _, raw := range raws {
		token, err := t.Verifier.Verify(r.Context(), raw, ect.Presentation{Now: time.Now(), Peer: caller.Peer(r)}) // without its parents
		if errors.Is(err, ect.ErrUnavailable) {
			return err
		}
		if err != nil || !token.Proven() || token.Event() != ect.EventError {
			continue
		}
		named := slices.Clone(token.Parents())
		if id := evidence.NamedCheckpoint(token.Ext()); id != "" && !slices.Contains(named, id) {
			named = append(named, id)
		}
		if err := c.Refused(r.Context(), rollback.Failure{Named: named, Workflow: token.Workflow(), Reporter: token.Issuer()}); err != nil {
			return err
		}
	}
	return nil
}

// records reports whether the tokens of requests that are not guarded are recorded: at level L3, and where
// another node has to know that they were used, and them as parents (ADR 0132).
func (t *TokenPolicy) records() bool { return t.LedgerFirst || t.Evidence.Fleet() }

// Bind binds the caller's own tokens in the store to a request. An error that is no refusal is a
// *problem.Problem, and nothing is known then.
func (t *TokenPolicy) Bind(ctx context.Context, own []*ect.Token, use evidence.Use) error {
	err := t.free(ctx, own, use)
	if err == nil {
		err = t.Evidence.Spend(ctx, own, use)
	}
	if err != nil {
		return RefusedToken(err)
	}
	return nil
}

// free refuses tokens that are bound to another use, and those that the ledger holds for something else.
func (t *TokenPolicy) free(ctx context.Context, own []*ect.Token, use evidence.Use) error {
	for _, token := range own {
		switch status, err := t.Evidence.ActStatus(ctx, token, use); {
		case err != nil:
			return err
		case status == evidence.Other:
			return &ect.Error{Code: ect.CodeReplayed}
		}
	}
	return nil
}

// Spend binds the tokens of a request that is not guarded, in the store: what has looked never acts, also
// after a restart (P3, C-6.1-a). Without a body the same tokens may come again with the same request, and
// with no other; with a body, never. On an error nothing is used up.
func (t *TokenPolicy) Spend(host Host, p *Tokens, r *http.Request) error {
	if err := p.inTime(); err != nil {
		return err
	}
	if len(p.All) == 0 {
		return nil
	}
	use := safeUseOf(r, host)
	if !t.records() {
		return t.Bind(r.Context(), p.Own, use)
	}
	if err := t.free(r.Context(), p.Own, use); err != nil {
		return RefusedToken(err)
	}
	return t.enter(r, p, use)
}
