package guard

import (
	"cmp"
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
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
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

// MaxTokens is how many tokens a request may carry.
const MaxTokens = 10

// Tokens are the verified tokens of one request.
type Tokens struct {
	// All are the tokens as sent, with parents. Own are those made by the caller: neither the
	// gateway's tokens nor parents issued by others.
	All, Own []*ect.Token
	// Late is the refusal of expired tokens, which are valid only for a recorded call.
	Late error

	leaves  []string // the ids of those that are no parents of others
	asked   *breaker.View
	message *protocol.Message // of the request
	inside  []string          // the tokens, as sent, that only its `_meta` has
}

// Issuer is the caller that the tokens prove, or empty. Unverified tokens do not identify the caller
// (P3) and do not affect other tokens.
func (p *Tokens) Issuer() string {
	for _, t := range p.Own {
		if author := t.Author(); author != "" {
			return author
		}
	}
	return ""
}

func (p *Tokens) workflow() string {
	for _, t := range p.All {
		if t.Workflow() != "" {
			return t.Workflow()
		}
	}
	return ""
}

// proven is the workflow that a token proves, or empty.
func (p *Tokens) proven() string {
	for _, t := range p.All {
		if t.Proven() && t.Workflow() != "" {
			return t.Workflow()
		}
	}
	return ""
}

// checkInput compares the body with the hash in the tokens: a token of another call is refused. A
// token that stands in the message hashes its Input.
func (p *Tokens) checkInput(body func() (ect.Hash, error)) error {
	var whole ect.Hash // once it is needed
	for _, t := range p.Own {
		sum := ect.Hash{}
		switch {
		case t.InputHash().IsZero(), !slices.Contains(p.All, t): // the guard around this one has compared it
			continue
		case slices.Contains(p.inside, t.Raw()):
			if input, ok := p.message.Input(); ok {
				sum = ect.Sum(input)
			}
		default:
			if whole.IsZero() {
				var err error
				if whole, err = body(); err != nil {
					return err
				}
			}
			sum = whole
		}
		if err := t.CheckInput(sum); err != nil {
			return RefusedToken(err)
		}
	}
	return nil
}

// VerifyTokens verifies the tokens of a request and of its message, which may be nil; required says
// that there must be one. Without `trust` they are ignored.
func (h *Handler) VerifyTokens(policy *TokenPolicy, r *http.Request, m *protocol.Message, required bool) (Tokens, error) {
	if policy == nil || policy.Verifier == nil {
		return Tokens{}, nil
	}
	p, err := policy.Verify(r, m)
	if err == nil && len(p.Own) == 0 && required {
		err = &ect.Error{Code: ect.CodeMissing}
	}
	if err == nil {
		err = policy.CheckReports(r.Context(), &p)
	}
	h.Counts.Token(tokenResult(&p, err))
	if err != nil {
		return Tokens{}, RefusedToken(h.refusedFor(policy, r, m, err))
	}
	return p, nil
}

// refusedFor is why the tokens of a request are refused. The errors among them that name what is unknown
// may be about another workflow (cascade 3.3.2).
func (h *Handler) refusedFor(policy *TokenPolicy, r *http.Request, m *protocol.Message, refused error) error {
	code := (*ect.Error)(nil)
	if !errors.As(refused, &code) || code.Code != ect.CodeParentUnknown && code.Code != ect.CodeExt {
		return refused
	}
	_, release, err := h.Open() // the store must not close meanwhile
	if err != nil {
		return err
	}
	defer release()
	raws, _, err := tokensIn(r, m)
	if err == nil {
		err = policy.RefusedErrors(r, raws)
	}
	return cmp.Or(err, refused)
}

// inTime refuses expired tokens; for calls without a record.
func (p *Tokens) inTime() error {
	if p.Late != nil {
		return RefusedToken(p.Late)
	}
	return nil
}

// tokenResult is the result of a verification for metrics; empty without tokens.
func tokenResult(p *Tokens, err error) string {
	var refused *ect.Error
	switch {
	case errors.As(err, &refused):
		return string(refused.Code)
	case err != nil:
		return "unavailable"
	case p.Late != nil:
		return "late"
	case len(p.All) > 0:
		return "verified"
	}
	return ""
}

// executionID is the id of a call that has no other: its token's, or one derived from several;
// empty without tokens.
func (p *Tokens) executionID() string {
	switch len(p.Own) {
	case 0:
		return ""
	case 1:
		return p.Own[0].ID()
	}
	ids := make([]string, 0, len(p.Own))
	for _, t := range p.Own {
		ids = append(ids, t.ID())
	}
	slices.Sort(ids)
	return evidence.JointID(ids)
}

// RefusedToken is the problem of a token that was not accepted.
func RefusedToken(err error) error {
	var refused *ect.Error
	if !errors.As(err, &refused) {
		return problem.New(problem.ECTUnavailable, "Its issuer's keys, or the ledger, do not answer.").Because(err)
	}
	p := problem.New(problem.ECTInvalid, refused.Detail())
	p.Status, p.Reason = refused.Status(), string(refused.Code)
	return p
}

func replayedToken() error { return RefusedToken(&ect.Error{Code: ect.CodeReplayed}) }

// needsTokens reports whether a request has tokens to verify, or lacks required ones.
func (h *Handler) needsTokens(r *http.Request, m *protocol.Message) bool {
	if !h.Verifies {
		return false
	}
	if m != nil {
		if tokens, ok := m.Tokens(); len(tokens) > 0 || !ok {
			return true
		}
	}
	return h.RequireECT || len(r.Header[ect.FieldName]) > 0
}

// verifySafe verifies the tokens of a safe request, and binds them to it before it goes on.
func (h *Handler) verifySafe(r *http.Request, m *protocol.Message) error {
	// Tokens that another guard has verified would count as used twice.
	if !h.needsTokens(r, m) || guardedBy(r.Context(), h.Name) || h.Host.Var(r, tokensVerified) != nil {
		return nil
	}
	policy, err := h.Tokens()
	if err != nil {
		return StoreClosed(err)
	}
	p, err := h.VerifyTokens(policy, r, m, h.RequireECT)
	if err != nil {
		return err
	}
	_, release, err := h.Open() // the store must not close meanwhile
	if err != nil {
		return StoreClosed(err)
	}
	defer release()
	if err := h.checkUnguardedInput(&p, r); err != nil {
		return err
	}
	err = policy.Spend(h.Host, &p, r)
	if err != nil && !h.passesUnbound(policy, err) {
		return err
	}
	if err != nil || !policy.records() {
		policy.Evidence.Seen(p.All)
	}
	h.Host.SetVar(r, tokensVerified, &p)
	policy.constrain(h, r, &p)
	return nil
}

// passesUnbound reports that a request that changes nothing goes on though its tokens could not be bound: the
// store is full, so that it was read that they are bound to nothing else, and the route says `fail_open` (P4).
// When there is room again, such a token may act once.
func (h *Handler) passesUnbound(policy *TokenPolicy, err error) bool {
	if !h.FailOpen || policy.LedgerFirst || h.Host.Exiting() || !errors.Is(err, store.ErrFull) {
		return false
	}
	if n := h.unbound.due(time.Now()); n > 0 {
		h.Logger.Warn("the store is full; requests that change nothing go on, and their tokens are not bound",
			slog.String("guard", h.Name), slog.Uint64("requests", n), slog.Any("error", rootOf(err)))
	}
	return true
}

// tokensVerified is a request variable: the *Tokens of an unguarded request.
const tokensVerified = "agent_guard.tokens_verified"

// verifiedBefore is what verifySafe has found for r; without tokens where it has not looked.
func (h *Handler) verifiedBefore(r *http.Request) *Tokens {
	if p, ok := h.Host.Var(r, tokensVerified).(*Tokens); ok {
		return p
	}
	return new(Tokens)
}

// checkUnguardedInput compares the body of an unguarded request with the hash in its tokens. Only
// with such a hash is the body read before the request is forwarded.
func (h *Handler) checkUnguardedInput(p *Tokens, r *http.Request) error {
	return p.checkInput(func() (ect.Hash, error) {
		if r.ContentLength == 0 {
			return ect.Sum(nil), nil
		}
		whole, _, err := h.readBody(r, nil, nil)
		if err != nil {
			return ect.Hash{}, err
		}
		whole.PutInto(r)
		sent := r.Body
		context.AfterFunc(r.Context(), func() { _, _ = sent.Close(), whole.Close() })
		return bodyHash(whole)
	})
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
	asks := t.HandlesRollback(r)
	for _, token := range all {
		if err := checkEvent(token, asks); err != nil {
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
		if phase, _ := token.Ext().Text(rollback.MemberPhase); phase != "" && !t.FitsPhase(r, phase, token.Ext()) {
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
		// Its parents are not verified.
		token, err := t.Verifier.Verify(r.Context(), raw, ect.Presentation{Now: time.Now(), Peer: caller.Peer(r)})
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
