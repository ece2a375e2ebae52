package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
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
	stranger, other := newAgent(t, "stranger"), httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
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
		"another port is named":  {uri: other.URL + "/rollback", status: "partial", reasons: []string{"foreign"}},
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
			g := launch(t, setup{app: trusting(t, a, p.as, stranger) + fmt.Sprintf("\nrollback {\n partial allow\n participants %s %s\n }", c.uri, c.as), site: lab.site()})
			s := g.saga(a)
			root, theirs, leaf := s.passesOn(p)
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

// passesOn makes two calls. The second follows from a checkpoint that the participant has made itself,
// and that from the first; the token comes with the call.
func (s *saga) passesOn(p *participant) (root sagaStep, theirs *ect.Token, leaf sagaStep) {
	s.t.Helper()
	root = s.do(charge(1))
	action := p.as.issue(ect.Claims{Workflow: s.wid, Action: "reserve", Parents: []string{root.checkpoint}})
	theirs = p.as.issue(ect.Claims{
		Workflow: s.wid, Action: "checkpoint", Parents: []string{action.ID()}, Output: ect.Sum([]byte("state")),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.rollbackURI).Int(ect.MemberTTL, 3600),
	})
	next := with(s.a.issue(ect.Claims{Workflow: s.wid, Parents: []string{theirs.ID()}}), charge(2))
	next.header[ect.FieldName] += ", " + theirs.Raw() + ", " + action.Raw()
	leaf = sagaStep{reply: s.g.call(next)}
	if leaf.status != http.StatusCreated {
		s.t.Fatalf("%d %s", leaf.status, leaf.body)
	}
	return root, theirs, leaf
}

// What an agent has reserved for a checkpoint of its own is released like that for a call (ADR 0087):
// where its requester gives the rollback up, and where the rollback is refused after it was prepared.
// The agent is told with the id and the checkpoint with which it was asked to prepare.
func TestForeignReservationsAreReleased(t *testing.T) {
	for name, ends := range map[string]func(s *saga, asked rollbackBody){
		"given up": func(s *saga, asked rollbackBody) {
			asked.Phase = "release"
			r := s.asking(asked)
			r.path += "/prepare"
			if got := s.g.call(r); got.status != http.StatusOK || !strings.Contains(got.body, `"released"`) {
				s.t.Fatalf("%d %s", got.status, got.body)
			}
		},
		"another plan": func(s *saga, asked rollbackBody) {
			s.g.call(s.executing(asked, strings.Repeat("12", 32))).problem(s.t, http.StatusConflict, "plan-changed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, p, lab := newAgent(t, "a"), newParticipant(t), newRestLab(t)
			heard := make(chan participantAsked, 100)
			p.before = func(path string, _ http.ResponseWriter, asked participantAsked) bool {
				if strings.HasPrefix(path, "rollback") && !asked.DryRun {
					heard <- asked
				}
				return false
			}
			g := launch(t, setup{app: trusting(t, a, p.as) + fmt.Sprintf("\nrollback {\n participants %s/elsewhere %s\n }", p.URL, p.as.issuer.Identity()), site: lab.site()})
			s := g.saga(a)
			root, theirs, _ := s.passesOn(p)
			asked := rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.checkpoint, Scope: "sub_dag"}
			s.prepare(asked, http.StatusOK)
			first := wait(t, heard, "the request to prepare")
			ends(s, asked)
			last := wait(t, heard, "the release")
			if first.Phase == "release" || last.Phase != "release" || last.ID != first.ID || last.Checkpoint != theirs.ID() || first.Checkpoint != theirs.ID() ||
				last.Token.Workflow() != s.wid || last.Token.ID() == first.Token.ID() {
				t.Errorf("asked %+v, and then %+v", first, last)
			}
			lab.arrived("POST /refunds", 0)
			if p.undid() != 0 {
				t.Error("it has undone something")
			}
			stop(t)
		})
	}
}

// C-4.3.1-e, P6: a participant tells of what it has with tokens. Only those count that it has signed
// itself, of this workflow, in a place of the graph that they can have; what it tells of and cannot
// prove, or does not tell at all, keeps the rollback from being completed.
func TestWhatAParticipantTellsOfIsNotBelieved(t *testing.T) {
	stranger := newAgent(t, "stranger")
	type answer struct {
		status int
		page   string // empty: the page of tokens
	}
	truth := []answer{{status: http.StatusOK}}
	for name, c := range map[string]struct {
		answers []answer // the last one repeats
		lies    func(theirs, action *ect.Token, claims ect.Claims, p *participant) []string
		reason  string
		steps   int
	}{
		"it tells the truth":           {truth, nil, "", 2},
		"it is slow to come back":      {[]answer{{status: 503}, {status: 429}, {status: 200}}, nil, "", 2},
		"it has no such path":          {[]answer{{status: 404}}, nil, "", 1},
		"it does not know the gateway": {[]answer{{status: 403}}, nil, "unauthorized", 1},
		"it never answers":             {[]answer{{status: 503}}, nil, "unreachable", 1},
		"it answers something else":    {[]answer{{status: 200, page: "<html>"}}, nil, "refused", 1},
		"its pages have no end":        {[]answer{{status: 200, page: `{"tokens":[],"next":"a"}`}}, nil, "refused", 1},
		"a changed token": {truth, func(theirs, action *ect.Token, _ ect.Claims, _ *participant) []string {
			raw := theirs.Raw()
			return []string{action.Raw(), raw[:len(raw)-8] + "AAAAAAAA"}
		}, "foreign", 1},
		"a checkpoint of somebody else": {truth, func(_, action *ect.Token, claims ect.Claims, _ *participant) []string {
			return []string{action.Raw(), stranger.issue(claims).Raw()}
		}, "", 1},
		"of another workflow": {truth, func(_, action *ect.Token, claims ect.Claims, p *participant) []string {
			claims.Workflow = uuid.NewString()
			return []string{action.Raw(), p.as.issue(claims).Raw()}
		}, "", 1},
		"checkpoints that follow from each other": {truth, func(_, _ *ect.Token, claims ect.Claims, p *participant) []string {
			one, two := claims, claims
			one.ID, two.ID = uuid.NewString(), uuid.NewString()
			one.Parents, two.Parents = []string{two.ID}, []string{one.ID}
			return []string{p.as.issue(one).Raw(), p.as.issue(two).Raw()}
		}, "foreign", 1},
		"one of two is changed": {truth, func(theirs, action *ect.Token, claims ect.Claims, p *participant) []string {
			raw := p.as.issue(claims).Raw()
			return []string{action.Raw(), theirs.Raw(), raw[:len(raw)-8] + "AAAAAAAA"}
		}, "foreign", 2},
	} {
		t.Run(name, func(t *testing.T) {
			a, p, lab := newAgent(t, "a"), newParticipant(t), newRestLab(t)
			g := launch(t, setup{app: trusting(t, a, p.as, stranger) + fmt.Sprintf(
				"\nrollback {\n partial allow\n prepare_timeout 2s\n participants %s %s\n }", p.rollbackURI, p.as.issuer.Identity()), site: lab.site()})
			s := g.saga(a)
			root := s.do(charge(1))
			// It is for the participant alone, as agents make their tokens that know nothing of the gateway.
			own := []string{p.as.issuer.Identity()}
			action := p.as.issue(ect.Claims{Audience: own, Workflow: s.wid, Action: "reserve", Parents: []string{root.checkpoint}})
			claims := ect.Claims{
				Audience: own, Workflow: s.wid, Action: "checkpoint", Parents: []string{action.ID()}, Output: ect.Sum([]byte("state")),
				Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.rollbackURI).Int(ect.MemberTTL, 3600),
			}
			theirs := p.as.issue(claims)
			raws := []string{action.Raw(), theirs.Raw()}
			if c.lies != nil {
				raws = c.lies(theirs, action, claims, p)
			}
			left := c.answers
			p.before = func(path string, w http.ResponseWriter, asked participantAsked) bool {
				if path != "workflows/"+s.wid+"/tokens" {
					return false
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				now := left[0]
				if len(left) > 1 {
					left = left[1:]
				}
				if asked.Token.Issuer() != gatewayIdentity || len(asked.Token.Parents()) > 0 {
					t.Errorf("asked with %v", asked.Token)
				}
				w.WriteHeader(now.status)
				if now.page != "" {
					_, _ = w.Write([]byte(now.page))
				} else {
					_ = json.NewEncoder(w).Encode(map[string]any{"tokens": raws})
				}
				return true
			}
			asked := rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.checkpoint, Scope: "sub_dag"}
			status := http.StatusOK
			if c.reason != "" {
				status = http.StatusConflict
			}
			doc := s.prepare(asked, status)
			if len(doc.Steps) != c.steps {
				t.Errorf("%+v", doc.Steps)
			}
			if c.reason != "" && (doc.Agents[0].Reason != c.reason || doc.Agents[0].Agent != p.as.issuer.Identity()) {
				t.Errorf("%+v", doc.Agents)
			}
			lab.arrived("POST /refunds", 0)
			done := s.back(asked)
			want := "completed"
			if c.reason != "" {
				want = "partial"
			}
			if done.Status != want || slices.Contains(done.Failed, p.as.issuer.Identity()) != (c.reason != "") {
				t.Errorf("%+v", done)
			}
			lab.wantCharge(root.id(t), "refunded")
			p.mu.Lock()
			if n := p.undone[theirs.ID()]; (n == 1) != (c.steps == 2) {
				t.Errorf("it has undone %v", p.undone)
			}
			p.mu.Unlock()
			stop(t)
		})
	}
}
