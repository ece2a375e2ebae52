package rollbackapi_test

import (
	"net/http"
	"strings"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// C-6.1-a, E-rollback-request-b: a token that says that something else is done asks for no
// rollback, on whatever path: upstreams are shown the tokens of calls, and could else undo
// these with them.
func TestCascade61OnlyARequestAsks(t *testing.T) {
	text := body(askedID, point, "")
	for _, action := range []string{"task", "undo", "rollback_start", "rollback_complete", "compensate", "error", "Rollback_request"} {
		s := newSite(t)
		other := func(c *ect.Claims) { c.Action = action }
		for _, path := range []string{Path, ATDPath, AERRPath} {
			for _, by := range []string{alice, coordinator} {
				s.post(path, text, issued(t, by, claims(flow, other))).refused(403, "ect-invalid", "exec_act")
			}
		}
		if s.plans+s.executed+len(s.entered) > 0 {
			t.Errorf("%s: %d plans, entered %v", action, s.plans, s.entered)
		}
	}
	for _, v := range []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR} {
		newSite(t).post(Path, text, issued(t, alice, claims(flow, in(v)))).document(http.StatusOK)
	}
}

// C-6.1-a: the signature covers what is done. What the token says the body cannot say
// otherwise, and what the body leaves open the token says.
func TestCascade61TheTokenBindsTheBody(t *testing.T) {
	ext := func() *ect.ExtBuilder { return new(ect.ExtBuilder) }
	const other = "d1b1c2d3-e4f5-6789-abcd-ef0123456789"
	for what, c := range map[string]struct {
		ext   *ect.ExtBuilder
		more  string
		names string // the member that the refusal names; empty is accepted
		scope plan.Scope
	}{
		"nothing":                   {nil, "", "", plan.Single},
		"the checkpoint":            {ext().Text(ect.MemberCheckpointID, strings.ToUpper(point)), "", "", plan.Single},
		"another checkpoint":        {ext().Text(ect.MemberCheckpointID, other), "", "checkpoint_id", ""},
		"the id":                    {ext().Text(ect.MemberRollbackID, "urn:uuid:"+askedID), "", "", plan.Single},
		"the id without its prefix": {ext().Text(ect.MemberRollbackID, askedID), "", "", plan.Single},
		"another id":                {ext().Text(ect.MemberRollbackID, "urn:uuid:"+other), "", "rollback_id", ""},
		"the scope":                 {ext().Text(ect.MemberScope, "sub_dag"), `, "scope": "sub_dag"`, "", plan.SubDAG},
		"the scope alone":           {ext().Text(ect.MemberScope, "sub_dag"), "", "", plan.SubDAG},
		"the scope in other words":  {ext().Text(ect.MemberScope, "sub_dag"), `, "cascade": true`, "", plan.SubDAG},
		"a narrower scope":          {ext().Text(ect.MemberScope, "single"), `, "scope": "full_workflow"`, "scope", ""},
		"a wider scope":             {ext().Text(ect.MemberScope, "sub_dag"), `, "scope": "single"`, "scope", ""},
		"no scope":                  {ext().Text(ect.MemberScope, "all"), "", "scope", ""},
		"a scope of another type":   {ext().Bool(ect.MemberScope, true), "", "scope", ""},
		"cascade alone":             {ext().Bool(ect.MemberCascade, true), "", "", plan.SubDAG},
		"no cascade alone":          {ext().Bool(ect.MemberCascade, false), "", "", plan.Single},
		"no cascade, and a scope":   {ext().Bool(ect.MemberCascade, false), `, "scope": "sub_dag"`, "cascade", ""},
		"cascade, and a whole":      {ext().Bool(ect.MemberCascade, true), `, "scope": "full_workflow"`, "cascade", ""},
		"cascade, and none":         {ext().Bool(ect.MemberCascade, true), `, "cascade": false`, "cascade", ""},
		"both, which contradict":    {ext().Bool(ect.MemberCascade, true).Text(ect.MemberScope, "single"), `, "scope": "single"`, "cascade", ""},
		"cascade of another type":   {ext().Text(ect.MemberCascade, "true"), `, "cascade": true`, "cascade", ""},
		"the reason":                {ext().Text(ect.MemberReason, "why"), `, "reason": "why"`, "", plan.Single},
		"the reason alone":          {ext().Text(ect.MemberReason, "why"), "", "", plan.Single},
		"no reason":                 {ext().Text(ect.MemberReason, ""), `, "reason": "why"`, "", plan.Single},
		"another reason":            {ext().Text(ect.MemberReason, "why"), `, "reason": "for nothing"`, "reason", ""},
		"a long reason":             {ext().Text(ect.MemberReason, strings.Repeat("x", 513)), "", "reason", ""},
		"in ATD's words":            {ext().Text("atd.checkpoint_id", other), "", "checkpoint_id", ""},
	} {
		t.Run(what, func(t *testing.T) {
			s := newSite(t)
			for _, by := range []string{alice, coordinator} {
				got := s.post(Path, body(askedID, point, c.more), issued(t, by, claims(flow, saying(c.ext))))
				if c.names != "" {
					doc := got.refused(403, "ect-invalid", "ext")
					if detail, _ := doc["detail"].(string); !strings.Contains(detail, c.names) {
						t.Errorf("%s is not named: %s", c.names, detail)
					}
					continue
				}
				got.document(http.StatusOK)
				if r := s.accepted[askedID]; r.Scope != c.scope || strings.Contains(what, "reason") && r.Reason != "why" {
					t.Errorf("%+v", r)
				}
				return
			}
			if s.plans+s.executed+len(s.entered) > 0 {
				t.Errorf("%d plans, entered %v", s.plans, s.entered)
			}
		})
	}
	s := newSite(t)
	doc := s.post(Path, body(askedID, point, `, "scope": "single", "cascade": true`), issued(t, alice, claims(flow))).refused(400, "parameter-invalid", "")
	if detail, _ := doc["detail"].(string); !strings.Contains(detail, "scope") || !strings.Contains(detail, "cascade") {
		t.Errorf("not both are named: %s", detail)
	}
	s.post(ATDPath, "", issued(t, alice, claims(flow, in(ect.ATD), saying(ext().Text(ect.MemberReason, "").Bool(ect.MemberCascade, false).
		Text(ect.MemberCheckpointID, other))))).refused(403, "ect-invalid", "ext")
}

// C-6.1-a: a token that names the checkpoint nowhere is good for none, and only who may ask
// learns that (P3). One that names an error is good for what that follows from.
func TestCascade61TheTokenNamesTheCheckpoint(t *testing.T) {
	for _, c := range []struct {
		name    string
		more    func(*ect.Claims)
		unnamed bool
	}{
		{"in par", parents(point), false}, {"in par, besides another", parents(failure, point), false},
		{"in its members", func(c *ect.Claims) {
			c.Parents, c.Ext = []string{failure}, new(ect.ExtBuilder).Text(ect.MemberCheckpointID, point)
		}, false},
		{"by an error", parents(failure), true},
	} {
		s := newSite(t)
		s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow, c.more))).document(http.StatusOK)
		if got := s.accepted[askedID].Unnamed; got != c.unnamed {
			t.Errorf("%s: unnamed is %t", c.name, got)
		}
	}
	s := newSite(t)
	for _, nothing := range [][]string{nil, {"a1b1c2d3-e4f5-6789-abcd-ef0123456789"}} {
		token := func(by string) *ect.Token { return issued(t, by, claims(flow, parents(nothing...))) }
		s.post(Path, body(askedID, point, ""), token(alice)).refused(403, "ect-invalid", "par")
		s.post(Path, body(askedID, point, ""), token(coordinator)).refused(403, "ect-invalid", "par")
		s.post(Path, body(askedID, point, ""), token(mallory)).refused(403, "not-in-workflow", "")
	}
	if s.executed+len(s.entered) > 0 {
		t.Errorf("entered %v", s.entered)
	}
}
