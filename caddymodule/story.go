package caddymodule

import (
	"crypto/sha256"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// story is what the ledger is told of a call.
type story struct {
	way    *testimony
	tokens presented
	// recorded and bound say of which of the tokens the store knows: that they are in
	// the ledger, and that they were used for this call.
	recorded, bound map[*ect.Token]bool
	// ancestors are tokens that were seen before, wrote nothing, and led to these.
	ancestors []*ect.Token
	// use is what the tokens are used for: this key with this request, so that a token
	// is good for no other body.
	use evidence.Use
	// taken are those that this call has taken in memory first; kept says that they
	// were used for it.
	taken []*ect.Token
	kept  bool
	// handed says that a guard around this one uses the tokens, for the same request.
	handed bool
	call   evidence.Call
	// forwarded is the checkpoint as a token, for upstreams with an identity.
	forwarded *ect.Token
}

// maxTarget leaves room in the extensions of a token.
const maxTarget = 512

// target names the system that the call changes: as configured, never as the caller
// has sent it unless a placeholder says so (cascade Table 2).
func (x *exchange) target() string {
	if text, ok := filled(x.r, x.action.Target); ok {
		return shortened(text, maxTarget)
	}
	return x.h.Name
}

// begin is what the ledger will be told of the call. Its key is known.
func (x *exchange) begin() error {
	s := &x.story
	if s.way == nil {
		return nil
	}
	s.call = evidence.Call{
		Key: x.call.Key, Caller: x.h.inEvidence(x.guard, x.call.Scope.Caller, x.r.Host), Action: x.action.Name,
		Workflow: evidence.WorkflowID(x.call.Workflow), Parents: s.tokens.leaves,
		Target: x.target(), Description: x.action.Description, RollbackURI: s.way.rollback, TTL: x.action.TTL(),
	}
	if x.h.UpstreamIdentity != "" {
		s.call.Audience = []string{x.h.UpstreamIdentity}
	}
	if len(s.tokens.all) > 0 {
		return x.takeTokens()
	}
	return x.join()
}

// join finds the place of a call without a token in a workflow: behind the execution
// that it names as its parent. A workflow that tokens speak of cannot be joined without
// that: whoever knows its id could write into it, and read it (P3).
func (x *exchange) join() error {
	s := &x.story
	if s.call.Workflow == "" {
		return nil
	}
	named := s.call.Workflow
	if s.way.verifier != nil {
		named = evidence.NamedWorkflowID(x.call.Workflow)
	}
	if parent := x.r.Header.Get(headerExecutionParent); parent != "" {
		for _, workflow := range slices.Compact([]string{s.call.Workflow, named}) {
			id, err := s.way.evidence.Parent(x.r.Context(), workflow, parent)
			if err != nil {
				return x.storeFailed(err)
			}
			if id != "" {
				s.call.Workflow, s.call.Parents = workflow, []string{id}
				return nil
			}
		}
	}
	s.call.Workflow = named
	return nil
}

func shortened(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return '?'
		}
		return c
	}, s)
}

func (s *story) know(set *map[*ect.Token]bool, t *ect.Token) {
	if *set == nil {
		*set = map[*ect.Token]bool{}
	}
	(*set)[t] = true
}

// bodyHash is the hash of the request's body as it was received.
func (x *exchange) bodyHash() (ect.Hash, error) {
	body, sum := x.body.NewReader(), sha256.New()
	defer body.Close()
	if _, err := io.Copy(sum, body); err != nil {
		return ect.Hash{}, x.unkept(err)
	}
	return ect.HashOf([sha256.Size]byte(sum.Sum(nil))), nil
}

// marked adds the checkpoint to the guard's own fields of an answer.
func marked(marks http.Header, checkpoint string) http.Header {
	if checkpoint != "" {
		marks[headerExecutionCheckpoint] = []string{checkpoint}
	}
	return marks
}
