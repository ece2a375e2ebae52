package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// C-4.3.1-e, C-4.1.1-d: an agent has made a checkpoint itself, and its token came with a call. It is
// asked at its rollback_uri, in both phases and in its place in the order, if the configuration
// names that host and agent, and believed only what it has signed. Anybody else is left to a person,
// and hears nothing.
func TestForeignCheckpointsAreAskedForWhereNamed(t *testing.T) {
	stranger := newAgent(t, "stranger")
	for name, c := range map[string]struct {
		lies    func(p *participant)
		uri     string // named; empty is that of the agent, with another path
		as      string // empty is the agent
		status  string
		reasons []string
		asked   bool
	}{
		"it is named":             {status: "completed", asked: true},
		"it is slow to come back": {lies: func(p *participant) { p.answers = []int{503} }, status: "completed", asked: true},
		"it signs nothing": {lies: func(p *participant) { p.complete = func(*ect.Claims) *agent { return nil } },
			status: "partial", reasons: []string{"unexpected"}, asked: true},
		"another signs": {lies: func(p *participant) { p.complete = func(*ect.Claims) *agent { return stranger } },
			status: "partial", reasons: []string{"unexpected"}, asked: true},
		"another port is named":  {uri: "http://127.0.0.1:1/rollback", status: "partial", reasons: []string{"foreign"}},
		"another agent is named": {as: "spiffe://example.com/other", status: "partial", reasons: []string{"foreign"}},
		"it names another host": {lies: func(p *participant) { p.rollbackURI = "http://127.0.0.1:1/rollback" },
			status: "partial", reasons: []string{"foreign"}},
		"it names a user": {lies: func(p *participant) { p.rollbackURI = strings.Replace(p.rollbackURI, "://", "://u:p@", 1) },
			status: "partial", reasons: []string{"foreign"}},
	} {
		t.Run(name, func(t *testing.T) {
			a, p, lab := newAgent(t, "a"), newParticipant(t), newRestLab(t)
			if c.lies != nil {
				c.lies(p)
			}
			if c.uri == "" {
				c.uri = p.URL + "/elsewhere"
			}
			if c.as == "" {
				c.as = p.as.issuer.Identity()
			}
			g := launch(t, setup{app: trusting(t, a, p.as, stranger) + fmt.Sprintf("\nrollback {\n participants %s %s\n }", c.uri, c.as), site: lab.site()})
			s := g.saga(a)
			root := s.do(charge(1))
			action := p.as.issue(ect.Claims{Workflow: s.wid, Action: "reserve", Parents: []string{root.checkpoint}})
			theirs := p.as.issue(ect.Claims{
				Workflow: s.wid, Action: "checkpoint", Parents: []string{action.ID()}, Output: ect.Sum([]byte("state")),
				Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.rollbackURI).Int(ect.MemberTTL, 3600),
			})
			next := with(s.a.issue(ect.Claims{Workflow: s.wid, Parents: []string{theirs.ID()}}), charge(2))
			next.header[ect.FieldName] += ", " + theirs.Raw() + ", " + action.Raw()
			leaf := sagaStep{reply: g.call(next)}
			if leaf.status != http.StatusCreated {
				t.Fatalf("%d %s", leaf.status, leaf.body)
			}
			asked := rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.checkpoint, Scope: "sub_dag"}
			status := http.StatusOK
			if slices.Contains(c.reasons, "foreign") {
				status = http.StatusConflict
			}
			s.prepare(asked, status)
			lab.arrived("POST /refunds", 0)
			doc := s.back(asked)
			doc.want(t, c.status, c.reasons...)
			if len(doc.Steps) != 3 || doc.Steps[1].Checkpoint != theirs.ID() {
				t.Errorf("%+v", doc.Steps)
			}
			if unknown := slices.Contains(c.reasons, "unexpected"); unknown != (doc.Effect == "unknown") {
				t.Errorf("the effect is %q", doc.Effect)
			}
			lab.wantCharge(root.id(t), "refunded")
			lab.wantCharge(leaf.id(t), "refunded")
			p.mu.Lock()
			if n := p.undone[theirs.ID()]; c.asked != (n == 1) || c.asked != (p.prepared > 0) {
				t.Errorf("asked %d times to prepare, and it has undone %v", p.prepared, p.undone)
			}
			p.mu.Unlock()
			if c.status == "completed" {
				eventually(t, "the ledger says so", func() bool { return s.view().state(theirs.ID()) == "rolled_back" })
			}
			stop(t)
		})
	}
}
