package call

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// C-4.3.1-e, C-4.1.1-d: an agent has made a checkpoint itself, and its token came with a call. It is
// asked at its rollback_uri, in both phases and in its place in the order, if the configuration
// names that host and agent, and believed only what it has signed. Anybody else is left to a person,
// and hears nothing.
func TestForeignCheckpointsAreAskedForWhereNamed(t *testing.T) {
	stranger, other := harness.NewAgent(t, "stranger"), httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	for name, c := range map[string]struct {
		lies    func(p *harness.Participant)
		uri     string // named; empty is that of the agent, with another path
		as      string // empty is the agent
		status  string
		reasons []string
		asked   bool
	}{
		"it is named":             {status: "completed", asked: true},
		"it is slow to come back": {lies: func(p *harness.Participant) { p.Answers = []int{503} }, status: "completed", asked: true},
		"it signs nothing": {lies: func(p *harness.Participant) { p.Complete = func(*ect.Claims) *harness.Agent { return nil } },
			status: "partial", reasons: []string{"unexpected"}, asked: true},
		"another signs": {lies: func(p *harness.Participant) { p.Complete = func(*ect.Claims) *harness.Agent { return stranger } },
			status: "partial", reasons: []string{"unexpected"}, asked: true},
		"another port is named":  {uri: other.URL + "/rollback", status: "partial", reasons: []string{"foreign"}},
		"another agent is named": {as: "spiffe://example.com/other", status: "partial", reasons: []string{"foreign"}},
		"it names another host": {lies: func(p *harness.Participant) { p.RollbackURI = "http://127.0.0.1:1/rollback" },
			status: "partial", reasons: []string{"foreign"}},
		"it names a user": {lies: func(p *harness.Participant) { p.RollbackURI = strings.Replace(p.RollbackURI, "://", "://u:p@", 1) },
			status: "partial", reasons: []string{"foreign"}},
	} {
		t.Run(name, func(t *testing.T) {
			a, p, lab := harness.NewAgent(t, "a"), harness.NewParticipant(t), harness.NewRestLab(t)
			if c.lies != nil {
				c.lies(p)
			}
			if c.uri == "" {
				c.uri = p.URL + "/elsewhere"
			}
			if c.as == "" {
				c.as = p.As.Issuer.Identity()
			}
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, p.As, stranger) + fmt.Sprintf("\nrollback {\n partial allow\n participants %s %s\n }", c.uri, c.as), Site: lab.Site()})
			s := g.Saga(a)
			root, theirs, leaf := s.PassesOn(p)
			asked := harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
			status := http.StatusOK
			if slices.Contains(c.reasons, "foreign") {
				status = http.StatusConflict
			}
			s.Prepare(asked, status)
			lab.Arrived("POST /refunds", 0)
			doc := s.Back(asked)
			doc.Want(t, c.status, c.reasons...)
			if len(doc.Steps) != 3 || doc.Steps[1].Checkpoint != theirs.ID() {
				t.Errorf("%+v", doc.Steps)
			}
			if unknown := slices.Contains(c.reasons, "unexpected"); unknown != (doc.Effect == "unknown") {
				t.Errorf("the effect is %q", doc.Effect)
			}
			lab.WantCharge(root.Id(t), "refunded")
			lab.WantCharge(leaf.Id(t), "refunded")
			p.Mu.Lock()
			if n := p.Undone[theirs.ID()]; c.asked != (n == 1) || c.asked != (p.Prepared > 0) {
				t.Errorf("asked %d times to prepare, and it has undone %v", p.Prepared, p.Undone)
			}
			p.Mu.Unlock()
			if c.status == "completed" {
				harness.Eventually(t, "the ledger says so", func() bool { return s.View().State(theirs.ID()) == "rolled_back" })
			}
			harness.Stop(t)
		})
	}
}

// What an agent has reserved for a checkpoint of its own is released like that for a call (ADR 0087):
// where its requester gives the rollback up, and where the rollback is refused after it was prepared.
// The agent is told with the id and the checkpoint with which it was asked to prepare.
func TestForeignReservationsAreReleased(t *testing.T) {
	for name, ends := range map[string]func(s *harness.Saga, asked harness.RollbackBody){
		"given up": func(s *harness.Saga, asked harness.RollbackBody) {
			asked.Phase = "release"
			r := s.Asking(asked)
			r.Path += "/prepare"
			if got := s.G.Call(r); got.Status != http.StatusOK || !strings.Contains(got.Body, `"released"`) {
				s.T.Fatalf("%d %s", got.Status, got.Body)
			}
		},
		"another plan": func(s *harness.Saga, asked harness.RollbackBody) {
			s.G.Call(s.Executing(asked, strings.Repeat("12", 32))).Problem(s.T, http.StatusConflict, "plan-changed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, p, lab := harness.NewAgent(t, "a"), harness.NewParticipant(t), harness.NewRestLab(t)
			heard := make(chan harness.ParticipantAsked, 100)
			p.Before = func(path string, _ http.ResponseWriter, asked harness.ParticipantAsked) bool {
				if strings.HasPrefix(path, "rollback") && !asked.DryRun {
					heard <- asked
				}
				return false
			}
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, p.As) + fmt.Sprintf("\nrollback {\n participants %s/elsewhere %s\n }", p.URL, p.As.Issuer.Identity()), Site: lab.Site()})
			s := g.Saga(a)
			root, theirs, _ := s.PassesOn(p)
			asked := harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
			s.Prepare(asked, http.StatusOK)
			first := harness.Wait(t, heard, "the request to prepare")
			ends(s, asked)
			last := harness.Wait(t, heard, "the release")
			if first.Phase == "release" || last.Phase != "release" || last.ID != first.ID || last.Checkpoint != theirs.ID() || first.Checkpoint != theirs.ID() ||
				last.Token.Workflow() != s.Wid || last.Token.ID() == first.Token.ID() {
				t.Errorf("asked %+v, and then %+v", first, last)
			}
			lab.Arrived("POST /refunds", 0)
			if p.Undid() != 0 {
				t.Error("it has undone something")
			}
			harness.Stop(t)
		})
	}
}

// C-4.3.1-e, P6: a participant tells of what it has with tokens. Only those count that it has signed
// itself, of this workflow, in a place of the graph that they can have; what it tells of and cannot
// prove, or does not tell at all, keeps the rollback from being completed.
func TestWhatAParticipantTellsOfIsNotBelieved(t *testing.T) {
	stranger := harness.NewAgent(t, "stranger")
	type answer struct {
		status int
		page   string // empty: the page of tokens
	}
	truth := []answer{{status: http.StatusOK}}
	for name, c := range map[string]struct {
		answers []answer // the last one repeats
		lies    func(theirs, action *ect.Token, claims ect.Claims, p *harness.Participant) []string
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
		"a changed token": {truth, func(theirs, action *ect.Token, _ ect.Claims, _ *harness.Participant) []string {
			raw := theirs.Raw()
			return []string{action.Raw(), raw[:len(raw)-8] + "AAAAAAAA"}
		}, "foreign", 1},
		"a checkpoint of somebody else": {truth, func(_, action *ect.Token, claims ect.Claims, _ *harness.Participant) []string {
			return []string{action.Raw(), stranger.Issue(claims).Raw()}
		}, "", 1},
		"of another workflow": {truth, func(_, action *ect.Token, claims ect.Claims, p *harness.Participant) []string {
			claims.Workflow = uuid.NewString()
			return []string{action.Raw(), p.As.Issue(claims).Raw()}
		}, "", 1},
		"checkpoints that follow from each other": {truth, func(_, _ *ect.Token, claims ect.Claims, p *harness.Participant) []string {
			one, two := claims, claims
			one.ID, two.ID = uuid.NewString(), uuid.NewString()
			one.Parents, two.Parents = []string{two.ID}, []string{one.ID}
			return []string{p.As.Issue(one).Raw(), p.As.Issue(two).Raw()}
		}, "foreign", 1},
		"one of two is changed": {truth, func(theirs, action *ect.Token, claims ect.Claims, p *harness.Participant) []string {
			raw := p.As.Issue(claims).Raw()
			return []string{action.Raw(), theirs.Raw(), raw[:len(raw)-8] + "AAAAAAAA"}
		}, "foreign", 2},
	} {
		t.Run(name, func(t *testing.T) {
			a, p, lab := harness.NewAgent(t, "a"), harness.NewParticipant(t), harness.NewRestLab(t)
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, p.As, stranger) + fmt.Sprintf(
				"\nrollback {\n partial allow\n prepare_timeout 2s\n participants %s %s\n }", p.RollbackURI, p.As.Issuer.Identity()), Site: lab.Site()})
			s := g.Saga(a)
			root := s.Do(harness.Charge(1))
			// It is for the participant alone, as agents make their tokens that know nothing of the gateway.
			own := []string{p.As.Issuer.Identity()}
			action := p.As.Issue(ect.Claims{Audience: own, Workflow: s.Wid, Action: "reserve", Parents: []string{root.Checkpoint}})
			claims := ect.Claims{
				Audience: own, Workflow: s.Wid, Action: "checkpoint", Parents: []string{action.ID()}, Output: ect.Sum([]byte("state")),
				Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, p.RollbackURI).Int(ect.MemberTTL, 3600),
			}
			theirs := p.As.Issue(claims)
			raws := []string{action.Raw(), theirs.Raw()}
			if c.lies != nil {
				raws = c.lies(theirs, action, claims, p)
			}
			left := c.answers
			p.Before = func(path string, w http.ResponseWriter, asked harness.ParticipantAsked) bool {
				if path != "workflows/"+s.Wid+"/tokens" {
					return false
				}
				p.Mu.Lock()
				defer p.Mu.Unlock()
				now := left[0]
				if len(left) > 1 {
					left = left[1:]
				}
				if asked.Token.Issuer() != harness.GatewayIdentity || len(asked.Token.Parents()) > 0 {
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
			asked := harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
			status := http.StatusOK
			if c.reason != "" {
				status = http.StatusConflict
			}
			doc := s.Prepare(asked, status)
			if len(doc.Steps) != c.steps {
				t.Errorf("%+v", doc.Steps)
			}
			if c.reason != "" && (doc.Agents[0].Reason != c.reason || doc.Agents[0].Agent != p.As.Issuer.Identity()) {
				t.Errorf("%+v", doc.Agents)
			}
			lab.Arrived("POST /refunds", 0)
			done := s.Back(asked)
			want := "completed"
			if c.reason != "" {
				want = "partial"
			}
			if done.Status != want || slices.Contains(done.Failed, p.As.Issuer.Identity()) != (c.reason != "") {
				t.Errorf("%+v", done)
			}
			lab.WantCharge(root.Id(t), "refunded")
			p.Mu.Lock()
			if n := p.Undone[theirs.ID()]; (n == 1) != (c.steps == 2) {
				t.Errorf("it has undone %v", p.Undone)
			}
			p.Mu.Unlock()
			harness.Stop(t)
		})
	}
}
