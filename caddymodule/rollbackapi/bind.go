package rollbackapi

import (
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// said is what a request says besides its token: in its body, or with ATD nowhere.
func (q *question) said(t *ect.Token, body []byte) (*asked, error) {
	if q.dialect != ect.ATD {
		return parseBody(body, q.dialect)
	}
	return &asked{id: t.ID(), checkpoint: canonical(t.Parents()[0])}, nil
}

// bind holds a request to its token: what the token says the body does not say otherwise,
// and what the body does not say the token does (ADR 0043). The body alone is signed by
// nobody: whoever got hold of the token could else roll back something else with it.
func bind(a *asked, t *ect.Token, dialect ect.Vocabulary) error {
	in := inToken{t: t}
	id, checkpoint := in.text(ect.MemberRollbackID), in.text(ect.MemberCheckpointID)
	scope, reason := in.text(ect.MemberScope), in.text(ect.MemberReason)
	cascade := in.truth(ect.MemberCascade)
	if in.err != nil {
		return in.err
	}
	if id != "" && dialect != ect.ATD { // whose rollbacks are named by the token itself
		if named, err := ParseID(id); err != nil || named != a.id {
			return in.contradicts(ect.MemberRollbackID, "rollback_id")
		}
	}
	if checkpoint != "" && canonical(checkpoint) != a.checkpoint {
		return in.contradicts(ect.MemberCheckpointID, "checkpoint_id")
	}
	if reason != "" && a.reason != "" && reason != a.reason {
		return in.contradicts(ect.MemberReason, "reason")
	}
	if a.reason == "" {
		a.reason = reason
	}
	if len(a.reason) > maxReason {
		return refusedFor(ect.CodeExt, fmt.Sprintf("%s is longer than %d bytes.", in.name(ect.MemberReason), maxReason))
	}
	return in.bindScope(a, scope, cascade)
}

// bindScope holds how far the request goes to what the token says.
func (in *inToken) bindScope(a *asked, scope string, cascade *bool) error {
	if scope == "" && cascade == nil {
		return nil
	}
	signed, err := ParseScope(scope, cascade)
	if err != nil {
		return refusedFor(ect.CodeExt, fmt.Sprintf("%s and %s of the token contradict each other, or the first is no scope.",
			in.name(ect.MemberScope), in.name(ect.MemberCascade)))
	}
	if a.scope == "" && a.cascade == nil {
		a.scope = string(signed)
	}
	if wanted, err := ParseScope(a.scope, a.cascade); err != nil || wanted == signed {
		return err
	}
	m := ect.MemberScope
	if scope == "" {
		m = ect.MemberCascade
	}
	return refusedFor(ect.CodeExt, fmt.Sprintf("%s of the token means the scope %s, and the request's is another one; the token must say the same in %s.",
		in.name(m), signed, ect.MemberScope))
}

// names reports whether a token itself says which checkpoint is meant. What its members say
// was compared before.
func names(t *ect.Token, checkpoint string) bool {
	if id, _ := t.Ext().Text(ect.MemberCheckpointID); id != "" {
		return true
	}
	return slices.ContainsFunc(t.Parents(), func(id string) bool { return canonical(id) == checkpoint })
}

// inToken reads what a token says in its extensions.
type inToken struct {
	t   *ect.Token
	err error // of the first member of a wrong type
}

// name is that of a member as the token's vocabulary has it.
func (in *inToken) name(m ect.Member) string { return in.t.Vocabulary().Member(m) }

func (in *inToken) text(m ect.Member) string {
	value, ok := in.t.Ext().Text(m)
	if _, there := in.t.Ext().Raw(m); there && !ok && in.err == nil {
		in.err = refusedFor(ect.CodeExt, in.name(m)+" is no string.")
	}
	return value
}

func (in *inToken) truth(m ect.Member) *bool {
	value, ok := in.t.Ext().Bool(m)
	if ok {
		return &value
	}
	if _, there := in.t.Ext().Raw(m); there && in.err == nil {
		in.err = refusedFor(ect.CodeExt, in.name(m)+" is neither true nor false.")
	}
	return nil
}

func (in *inToken) contradicts(m ect.Member, member string) error {
	return refusedFor(ect.CodeExt, fmt.Sprintf("%s of the token is not the request's %s.", in.name(m), member))
}

// refusedFor is the refusal of a token with a sentence of its own.
func refusedFor(code ect.Code, detail string) error {
	p := problem.New(problem.ECTInvalid, detail)
	p.Status, p.Reason = (&ect.Error{Code: code}).Status(), string(code)
	return p
}
