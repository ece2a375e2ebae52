package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// maxPresented is how many tokens one request may carry.
const maxPresented = 10

// presented are the verified tokens of one request.
type presented struct {
	// all are the tokens as they came, parents and callers' own.
	all []*ect.Token
	// own are those that the caller has made: not ours, and not another one's parent.
	own []*ect.Token
	// leaves are the ids of those that are no other one's parent: what led to the
	// request.
	leaves []string
	// late is the refusal of tokens whose time is over. They are good for what they
	// were used for before, and for nothing else.
	late error
	// asked is what they ask of breakers; nil if nothing.
	asked *breaker.View
}

// issuer is the caller that the tokens prove; empty without one. A token that nobody is
// proven to have issued names nobody (P3), and takes nothing from those beside it.
func (p *presented) issuer() string {
	for _, t := range p.own {
		if author := t.Author(); author != "" {
			return author
		}
	}
	return ""
}

// workflow is that of the tokens; empty where none of them names one.
func (p *presented) workflow() string {
	for _, t := range p.all {
		if t.Workflow() != "" {
			return t.Workflow()
		}
	}
	return ""
}

// checkInput holds tokens that name the body they were made for against the one that
// was sent: a token that was taken from another call is refused.
func (p *presented) checkInput(body func() (ect.Hash, error)) error {
	if !slices.ContainsFunc(p.own, func(t *ect.Token) bool { return !t.InputHash().IsZero() }) {
		return nil
	}
	sum, err := body()
	if err != nil {
		return err
	}
	for _, t := range p.own {
		if err := t.CheckInput(sum); err != nil {
			return refusedToken(err)
		}
	}
	return nil
}

// verifyTokens verifies the tokens of a request that goes on to the upstream. Without
// `trust` they mean nothing.
func (h *Handler) verifyTokens(way *testimony, r *http.Request) (presented, error) {
	return h.verified(way, r, h.RequireECT)
}

// verifyQuestion verifies the tokens of a request for a path of the gateway's own, which
// asks for itself: `require_ect` shuts out nobody there whom the gateway knows otherwise.
func (h *Handler) verifyQuestion(way *testimony, r *http.Request) (presented, error) {
	return h.verified(way, r, false)
}

func (h *Handler) verified(way *testimony, r *http.Request, required bool) (presented, error) {
	if way == nil || way.verifier == nil {
		return presented{}, nil
	}
	p, err := way.verify(r)
	if err == nil && len(p.own) == 0 && required {
		err = &ect.Error{Code: ect.CodeMissing}
	}
	if err == nil {
		err = way.checkTelling(r.Context(), &p, "")
	}
	h.counts.Token(tokenResult(&p, err))
	if err != nil {
		return presented{}, refusedToken(err)
	}
	return p, nil
}

// inTime refuses tokens whose time is over, where they could only be used anew.
func (p *presented) inTime() error {
	if p.late != nil {
		return refusedToken(p.late)
	}
	return nil
}

// tokenResult is how metrics name what came of a verification; empty for a request
// without tokens.
func tokenResult(p *presented, err error) string {
	var refused *ect.Error
	switch {
	case errors.As(err, &refused):
		return string(refused.Code)
	case err != nil:
		return "unavailable"
	case p.late != nil:
		return "late"
	case len(p.all) > 0:
		return "verified"
	}
	return ""
}

// verify verifies the tokens of a request. A refusal is an *ect.Error.
func (t *testimony) verify(r *http.Request) (presented, error) {
	raws, err := ect.ParseFields(r.Header[ect.FieldName])
	if err != nil || len(raws) == 0 {
		return presented{}, err
	}
	if len(raws) > maxPresented {
		return presented{}, &ect.Error{Code: ect.CodeTooManyParents}
	}
	all, err := t.verifier.VerifyAll(r.Context(), raws, ect.Presentation{
		Now: time.Now(), Peer: peer(r), DAG: t.evidence.GraphOf(raws[0]),
	})
	p := presented{all: all}
	if err != nil {
		if p.late, p.all = err, t.late(r, raws, err); len(p.all) == 0 {
			return presented{}, err
		}
	}
	return t.sort(r, p)
}

// sort finds out who sends verified tokens, and what for.
func (t *testimony) sort(r *http.Request, p presented) (presented, error) {
	all := p.all
	for _, token := range all {
		if err := checkEvent(token); err != nil {
			return presented{}, err
		}
		asked, err := askedBy(token)
		if err != nil {
			return presented{}, err
		}
		if token.Proven() { // nobody asks by any other
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
		if t.witness.Issued(token) {
			// Handed on by who got it with a call. Whatever its signature says, what
			// the ledger does not hold was not told by this gateway.
			standing, err := t.evidence.Holds(r.Context(), token)
			if err != nil {
				return presented{}, err
			}
			if standing != evidence.Same {
				return presented{}, &ect.Error{Code: ect.CodeParentUnknown}
			}
			continue
		}
		if len(p.own) > 0 && p.own[0].Issuer() != token.Issuer() {
			return presented{}, &ect.Error{Code: ect.CodeIssuer} // whoever sends it is one caller
		}
		p.own = append(p.own, token)
	}
	return p, nil
}

// late are tokens whose time is over, or that of their keys, as the records that they may
// be (P1): a retry comes when it comes, and must not be told to try again under another
// name. Under a key that was revoked nothing is a record.
func (t *testimony) late(r *http.Request, raws []string, refused error) []*ect.Token {
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

// checkEvent holds that a token of an event that the drafts define says what it must
// (cascade 4.2.1, ATD "Exec Act Table").
func checkEvent(t *ect.Token) error {
	for _, m := range t.Lacks() {
		// An error can come from where no checkpoint is.
		if t.Event() != ect.EventError || m != ect.MemberCheckpointID {
			return &ect.Error{Code: ect.CodeExt, Lacks: t.Vocabulary().Member(m)}
		}
	}
	if t.Event() == ect.EventError && len(t.Parents()) == 0 {
		return &ect.Error{Code: ect.CodeParents}
	}
	return nil
}

// checkTelling refuses tokens that tell of what their issuer has nothing to do with: a
// stranger who knows one id could else call somebody's workflow failed (C-6.2-b). What is
// recorded already tells nothing new, and a retry finds its record (P1). Tokens of one
// event may be excepted, whose place has rules of its own.
func (t *testimony) checkTelling(ctx context.Context, p *presented, except ect.Event) error {
	var along []*ect.Token
	for _, token := range p.all {
		if token.Event() == "" || token.Event() == except || token.Issuer() == t.witness.Identity() {
			continue
		}
		if along == nil {
			along = slices.Concat(p.all, t.evidence.Unrecorded(p.all, maxAncestors))
		}
		err := t.graphOnly().CheckTelling(ctx, token, along)
		if err == nil {
			continue
		}
		if standing, failed := t.evidence.Holds(ctx, token); failed != nil || standing == evidence.Same {
			if failed != nil {
				return failed
			}
			continue
		}
		return err
	}
	return nil
}

// executionID is the id of a call that has no other: that of its token, or one made of
// several; empty without any.
func (p *presented) executionID() string {
	switch len(p.own) {
	case 0:
		return ""
	case 1:
		return p.own[0].ID()
	}
	ids := make([]string, 0, len(p.own))
	for _, t := range p.own {
		ids = append(ids, t.ID())
	}
	slices.Sort(ids)
	return evidence.JointID(ids)
}

// peer is who the connection has proven to be at the other end: the SPIFFE ID of a
// verified certificate, which has exactly one URI then (X509-SVID, section 2).
func peer(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return ""
	}
	uris := r.TLS.VerifiedChains[0][0].URIs
	if len(uris) != 1 || uris[0].Scheme != "spiffe" {
		return ""
	}
	return uris[0].String()
}

// refusedToken makes a problem of what went wrong with a token.
func refusedToken(err error) error {
	var refused *ect.Error
	if !errors.As(err, &refused) {
		p := problem.New(problem.ECTUnavailable, "Its issuer's keys, or the ledger, do not answer.")
		p.Cause = err
		return p
	}
	p := problem.New(problem.ECTInvalid, refused.Detail())
	p.Status, p.Reason = refused.Status(), string(refused.Code)
	return p
}

func replayedToken() error { return refusedToken(&ect.Error{Code: ect.CodeReplayed}) }

// needsTokens reports that a request has tokens to be verified, or lacks them.
func (h *Handler) needsTokens(r *http.Request) bool {
	return h.app.Trust != nil && (h.RequireECT || len(r.Header[ect.FieldName]) > 0)
}

// verifySafe verifies the tokens of a request that changes nothing. It writes nothing:
// what such tokens are used for is remembered in memory. Only at level L3 they are
// recorded before the request goes on.
func (h *Handler) verifySafe(r *http.Request) error {
	// What was verified on the way here would be taken for a second use.
	if !h.needsTokens(r) || r.Context().Value(guardedBy{h.Name}) != nil || caddyhttp.GetVar(r.Context(), tokensVerified) != nil {
		return nil
	}
	way, err := h.app.testimony()
	if err != nil {
		return storeClosed(err)
	}
	if way.ledgerFirst { // it writes, and the store must not close meanwhile
		e, err := h.app.acquire()
		if err != nil {
			return storeClosed(err)
		}
		defer func() { _ = e.release() }() // closing the store logs its own errors
	}
	p, err := h.verifyTokens(way, r)
	if err != nil {
		return err
	}
	if err := h.checkUnguardedInput(&p, r); err != nil {
		return err
	}
	if err := way.spend(&p, r); err != nil {
		return err
	}
	if !way.ledgerFirst {
		way.evidence.Seen(p.all)
	}
	caddyhttp.SetVar(r.Context(), tokensVerified, p.issuer())
	way.constrain(r, &p)
	return nil
}

// verifiedSafe is the caller of a request that changes nothing, by what verifySafe has
// found and the gateway knows itself; empty where it does not know it.
func (h *Handler) verifiedSafe(r *http.Request) string {
	issuer, _ := caddyhttp.GetVar(r.Context(), tokensVerified).(string)
	return h.named(r, issuer)
}

// tokensVerified is the variable of a request that changes nothing and whose tokens a
// guard has verified: their issuer.
const tokensVerified = "agent_guard.tokens_verified"

// checkUnguardedInput holds the body of a request that is not guarded against the hash
// that its token names. Only for that is such a body read before it is handed on.
func (h *Handler) checkUnguardedInput(p *presented, r *http.Request) error {
	return p.checkInput(func() (ect.Hash, error) {
		if r.ContentLength == 0 {
			return ect.Sum(nil), nil
		}
		x := &exchange{h: h, r: r}
		if err := x.readBody(); err != nil {
			return ect.Hash{}, err
		}
		context.AfterFunc(r.Context(), func() { _ = x.body.Close() })
		x.giveBack()
		r.ContentLength, r.TransferEncoding = x.body.Size(), nil
		r.Header.Del("Expect") // the body is here
		return x.bodyHash()
	})
}

// storeClosed makes a problem of a store that cannot be opened.
func storeClosed(err error) error {
	p := problem.New(problem.StoreUnavailable, "The gateway's store cannot be opened.")
	p.Cause = err
	return p
}
