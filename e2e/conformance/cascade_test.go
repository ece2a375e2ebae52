package conformance

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Cascade 4.2.1, Tables 1 and 2; ATD "Error Signaling"; brief "Data Model": a call that fails
// leaves a checkpoint, a node and an error, in the drafts' words, each following from what led
// to it.
func TestCascade421TokensOfACall(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, strings.Replace(harness.SagaActions, "match path /charges", "match path /charges\n description \"Takes money\"\n target billing.example.com", 1), a)
	lab.On("POST /charges", 1, failingWith(http.StatusUnprocessableEntity))
	s := g.Saga(a)
	began := time.Now().Add(-time.Minute)
	token := a.Issue(ect.Claims{Workflow: s.Wid})
	got := g.Call(harness.With(token, harness.Charge(1)))
	if got.Status != http.StatusUnprocessableEntity {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	id := got.Header.Get("Execution-Checkpoint")
	var node, checkpoint, failure *ect.Unverified
	for _, n := range g.SettledView(a, s.Wid, 4).Nodes {
		switch u := g.Entry(a, s.Wid, n.JTI); {
		case n.JTI == token.ID():
		case u.Event() == ect.EventCheckpoint:
			checkpoint = u
		case u.Event() == ect.EventError:
			failure = u
		default:
			node = u
		}
	}
	if node == nil || checkpoint == nil || failure == nil || checkpoint.ID() != id {
		t.Fatalf("node %v, checkpoint %v, error %v", node, checkpoint, failure)
	}
	for _, u := range []*ect.Unverified{node, checkpoint, failure} {
		if u.Issuer() != harness.GatewayIdentity || u.Workflow() != s.Wid || u.IssuedAt().Before(began) || u.Level() != ect.L2 {
			t.Errorf("%s", u.Payload())
		}
		for _, secret := range []string{"secret-of-the-upstream", `"amount"`} { // C-6.3-c, A-checkpoint-confidentiality-c
			if strings.Contains(u.Payload(), secret) {
				t.Errorf("%s is in %s", secret, u.Payload())
			}
		}
	}
	if checkpoint.Action() != "checkpoint" || checkpoint.OutputHash().IsZero() {
		t.Errorf("%s", checkpoint.Payload())
	}
	harness.Follows(t, checkpoint, token.ID())
	harness.Says(t, checkpoint, map[ect.Member]string{
		ect.MemberReversible: "true", ect.MemberTTL: "86400", ect.MemberTarget: harness.Quoted("billing.example.com"),
		ect.MemberDescription: harness.Quoted("Takes money"),
	})
	if uri, _ := checkpoint.Ext().Text(ect.MemberRollbackURI); !strings.HasSuffix(uri, "/.well-known/cascade/rollback") {
		t.Errorf("%s", checkpoint.Payload())
	}
	harness.Follows(t, node, token.ID(), id)
	if failure.Action() != "error" {
		t.Errorf("%s", failure.Payload())
	}
	harness.Follows(t, failure, node.ID(), token.ID())
	harness.Says(t, failure, map[ect.Member]string{
		ect.MemberSeverity: harness.Quoted("warning"), ect.MemberErrorType: harness.Quoted("action_failed"),
		ect.MemberCheckpointID: harness.Quoted(id), ect.MemberUpstreamErrors: "[]",
	})
	if text, _ := failure.Ext().Text(ect.MemberDescription); text == "" {
		t.Errorf("%s", failure.Payload())
	}
	// C-7.2-a: nothing but the drafts' prefix and our own.
	for _, u := range []*ect.Unverified{node, checkpoint, failure} {
		for name := range harness.Document[map[string]any](t, harness.Reply{Status: 200, Body: u.Ext().JSON()}) {
			if !strings.HasPrefix(name, "cascade.") && !strings.HasPrefix(name, "agent_guard.") {
				t.Errorf("%s in %s", name, u.Payload())
			}
		}
	}
}

// Cascade 4.4.1 and 4.4.2, Figures 11 to 13: what a rollback tells the ledger, of the whole and
// of each step; 4.3.3: what could be undone is undone, the rest is named, and the whole is
// partial.
func TestCascade441TokensOfARollback(t *testing.T) {
	a, b, c := harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "c")
	lab, g := harness.LaunchParts(t, harness.SagaActions, a, b, c)
	lab.Write("/docs/x", `{"n":1}`)
	s := g.Saga(a)
	by := func(other *harness.Agent) *harness.Saga { return &harness.Saga{T: t, G: g, A: other, Wid: s.Wid} }
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	paid := by(b).Do(harness.Charge(1), root.Checkpoint)
	mail := by(c).Do(harness.Request{Path: "/mail"}, root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag", Reason: "wrong order"}
	r := s.Asking(asked)
	asking, err := ect.ParseInsecure(r.Header[ect.FieldName])
	if err != nil {
		t.Fatal(err)
	}
	answer := g.Call(r)
	doc := harness.Document[harness.RollbackDoc](t, answer)
	doc.Want(t, "partial", "irreversible")
	lab.WantDoc("/docs/x", `{"n":1}`)
	lab.WantCharge(paid.Id(t), "refunded")
	if answer.Header.Get("Execution-Context") != doc.ECT || doc.ECT == "" {
		t.Errorf("the answer carries %q, and its document %q", answer.Header.Get("Execution-Context"), doc.ECT)
	}

	// Three calls with three nodes each, the request, the start, three steps and the whole.
	const nodes = 9 + 1 + 1 + 3 + 1
	starts := s.Events(nodes, ect.EventRollbackStart)
	if len(starts) != 1 {
		t.Fatalf("%d starts", len(starts))
	}
	start := starts[0]
	harness.Follows(t, start, asking.ID())
	harness.Says(t, start, map[ect.Member]string{
		ect.MemberRollbackID: harness.Quoted(harness.RollbackID(1)), ect.MemberCheckpointID: harness.Quoted(root.Checkpoint),
		ect.MemberScope: harness.Quoted("sub_dag"), ect.MemberReason: harness.Quoted("wrong order"),
	})
	if start.Action() != "rollback_start" || start.ID() != doc.Tokens.Start || start.Workflow() != s.Wid || start.Issuer() != harness.GatewayIdentity {
		t.Errorf("%s, and the answer names %+v", start.Payload(), doc.Tokens)
	}

	compensations := s.Events(nodes, ect.EventCompensate)
	if len(compensations) != 1 {
		t.Fatalf("%d compensations", len(compensations))
	}
	harness.Follows(t, compensations[0], start.ID(), paid.Checkpoint)
	harness.Says(t, compensations[0], map[ect.Member]string{
		ect.MemberRollbackID: harness.Quoted(harness.RollbackID(1)), ect.MemberCheckpointID: harness.Quoted(paid.Checkpoint), ect.MemberStatus: harness.Quoted("completed"),
	})

	steps, whole := map[string]*ect.Unverified{}, (*ect.Unverified)(nil)
	for _, u := range s.Events(nodes, ect.EventRollbackComplete) {
		if u.ID() == doc.Tokens.Complete {
			harness.Follows(t, u, start.ID(), asking.ID())
			whole = u
			continue
		}
		harness.Follows(t, u, start.ID())
		of, _ := u.Ext().Text(ect.MemberCheckpointID)
		steps[of] = u
	}
	if whole == nil || len(steps) != 2 || steps[root.Checkpoint] == nil || steps[mail.Checkpoint] == nil {
		t.Fatalf("the whole is %v, the steps are %v", whole, steps)
	}
	harness.Says(t, steps[mail.Checkpoint], map[ect.Member]string{ect.MemberStatus: harness.Quoted("escalated"), ect.MemberReason: harness.Quoted("irreversible")},
		ect.MemberStateBefore, ect.MemberStateAfter)
	restored := steps[root.Checkpoint]
	harness.Says(t, restored, map[ect.Member]string{ect.MemberStatus: harness.Quoted("completed")})
	before, _ := restored.Ext().Text(ect.MemberStateBefore)
	after, _ := restored.Ext().Text(ect.MemberStateAfter)
	if !strings.HasPrefix(before, "sha256:") || !strings.HasPrefix(after, "sha256:") || before == after || restored.OutputHash().Prefixed() != after {
		t.Errorf("%s", restored.Payload())
	}

	harness.Says(t, whole, map[ect.Member]string{
		ect.MemberRollbackID: harness.Quoted(harness.RollbackID(1)), ect.MemberCheckpointID: harness.Quoted(root.Checkpoint), ect.MemberStatus: harness.Quoted("partial"),
	})
	if whole.OutputHash().IsZero() != (doc.After == "") || !whole.OutputHash().IsZero() && whole.OutputHash().Prefixed() != doc.After {
		t.Errorf("out_hash and the answer's %q: %s", doc.After, whole.Payload())
	}
	hashes := map[ect.Member]string{}
	for m, value := range map[ect.Member]string{ect.MemberStateBefore: doc.Before, ect.MemberStateAfter: doc.After} {
		if value != "" {
			hashes[m] = harness.Quoted(value)
		}
	}
	harness.Says(t, whole, hashes)
	cascaded, _ := whole.Ext().Outcomes(ect.MemberCascaded)
	slices.SortFunc(cascaded, func(x, y ect.Outcome) int { return strings.Compare(x.Agent, y.Agent) })
	if want := []ect.Outcome{{Agent: b.Issuer.Identity(), Status: "completed"}, {Agent: c.Issuer.Identity(), Status: "escalated"}}; !slices.Equal(cascaded, want) {
		t.Errorf("cascaded is %v, want %v", cascaded, want)
	}
	if failed, _ := whole.Ext().Texts(ect.MemberFailedAgents); !slices.Equal(failed, []string{c.Issuer.Identity()}) {
		t.Errorf("failed_agents is %v", failed)
	}
	if !slices.Equal(doc.Failed, []string{c.Issuer.Identity()}) || len(doc.Cascaded) != 2 {
		t.Errorf("the answer says %+v", doc)
	}
}

// Cascade 4.4.1, 4.4.2-b: the four words for what came of a rollback, in the answer and in the
// token alike.
func TestCascade442StatusWords(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchParts(t, harness.SagaActions, a)
	for want, prepare := range map[string]func(s *harness.Saga) string{
		"completed": func(s *harness.Saga) string { return s.Do(harness.Charge(1)).Checkpoint },
		"failed": func(s *harness.Saga) string {
			lab.On("POST /refunds", 1, harness.RestSays(http.StatusConflict, `{"error":"no"}`))
			return s.Do(harness.Charge(1)).Checkpoint
		},
		"escalated": func(s *harness.Saga) string { return s.Do(harness.Request{Path: "/mail"}).Checkpoint },
		"partial": func(s *harness.Saga) string {
			root := s.Do(harness.Charge(1)).Checkpoint
			s.Do(harness.Request{Path: "/mail"}, root)
			return root
		},
	} {
		t.Run(want, func(t *testing.T) {
			s := g.Saga(a).In(t)
			doc := s.Back(harness.RollbackBody{Checkpoint: prepare(s), Cascade: want == "partial"})
			if doc.Status != want {
				t.Errorf("%+v", doc)
			}
			token := g.Entry(a, s.Wid, doc.Tokens.Complete)
			harness.Says(t, token, map[ect.Member]string{ect.MemberStatus: harness.Quoted(want)})
			if signed, err := ect.ParseInsecure(doc.ECT); err != nil || signed.ID() != token.ID() {
				t.Errorf("%v %s", err, doc.ECT)
			}
			if failed, there := token.Ext().Texts(ect.MemberFailedAgents); there != (want != "completed") || there && !slices.Equal(failed, []string{a.Issuer.Identity()}) {
				t.Errorf("failed_agents is %v, there %v", failed, there)
			}
		})
	}
}

// Cascade 4.1.3: which scope a request has, by its body and its token; and that they must mean
// the same.
func TestCascade413ScopeOnTheWire(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	for name, c := range map[string]struct {
		body    string // members of the body
		cascade bool   // of the token
		scope   string // of the token
		status  int
		both    bool // the consequence is undone too
	}{
		"cascade in both":                {`,"cascade":true`, true, "", 200, true},
		"the token alone says it":        {``, true, "", 200, true},
		"the token alone says no":        {``, false, "", 200, false},
		"a scope that both say":          {`,"scope":"sub_dag"`, true, "sub_dag", 200, true},
		"single in both":                 {`,"scope":"single"`, false, "single", 200, false},
		"null is nothing":                {`,"scope":null`, false, "", 200, false},
		"the body wants more":            {`,"cascade":true`, false, "", 403, false},
		"the body wants less":            {`,"cascade":false`, true, "", 403, false},
		"another scope":                  {`,"scope":"sub_dag"`, false, "single", 403, false},
		"a body that contradicts itself": {`,"scope":"single","cascade":true`, true, "", 400, false},
		"no such scope":                  {`,"scope":"all"`, true, "", 400, false},
		"the whole, without its word":    {`,"scope":"full_workflow"`, true, "", 403, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := g.Saga(a).In(t)
			root := s.Do(harness.Charge(1))
			next := s.Do(harness.Charge(2), root.Checkpoint)
			ext := new(ect.ExtBuilder).Text(ect.MemberReason, "").Bool(ect.MemberCascade, c.cascade)
			if c.scope != "" {
				ext.Text(ect.MemberScope, c.scope)
			}
			token := a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Parents: []string{root.Checkpoint}, Ext: ext})
			got := g.Call(harness.With(token, harness.Request{Path: "/.well-known/cascade/rollback",
				Body: `{"rollback_id":"urn:uuid:` + uuid.NewString() + `","checkpoint_id":"` + root.Checkpoint + `","keep_dependants":true` + c.body + `}`}))
			if got.Status != c.status {
				t.Fatalf("%d %s", got.Status, got.Body)
			}
			want := map[bool]string{true: "refunded", false: "open"}
			lab.WantCharge(root.Id(t), want[c.status == 200])
			lab.WantCharge(next.Id(t), want[c.both])
		})
	}
}

// Cascade 4.2.3-a, 6.3: before a rollback the checkpoint's token is read again, and one that
// was altered in the ledger is not rolled back to.
func TestCascade423AlteredToken(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	g.Alter(a, s.Wid, step.Checkpoint)
	s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}).Problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.Arrived("POST /refunds", 0)
	lab.WantCharge(step.Id(t), "open")
}

// Cascade 4.2.3-b: the signature chain is verified at the rollback. A checkpoint of an agent
// whose key was revoked since is not believed any more; what followed from its tokens can be
// undone all the same.
func TestCascade423RevokedKey(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	app, lab := harness.Trusting(t, a, b), harness.NewRestLab(t)
	setting := harness.Setup{App: app, Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n}"}
	g := harness.Launch(t, setting)
	s := g.Saga(a)
	theirs := &harness.Saga{T: t, G: g, A: b, Wid: s.Wid}
	root := s.Do(harness.Charge(1))
	below := theirs.Do(harness.Charge(2), root.Checkpoint)
	g.Entry(a, s.Wid, below.Checkpoint)
	group := b.Issue(ect.Claims{
		Workflow: s.Wid, Action: "checkpoint", Parents: []string{root.Checkpoint, below.Checkpoint}, Output: ect.Sum([]byte("both")),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 3600).
			Text(ect.MemberRollbackURI, "https://b.example/.well-known/cascade/rollback"),
	})
	next := theirs.Calling(harness.Charge(3), below.Checkpoint)
	next.Header[ect.FieldName] = group.Raw() + ", " + next.Header[ect.FieldName]
	if got := g.Call(next); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	g.Entry(a, s.Wid, group.ID())

	_, path, _ := strings.Cut(app, "jwks_file ")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	set := harness.Document[struct{ Keys []map[string]any }](t, harness.Reply{Status: 200, Body: string(text)})
	last := set.Keys[len(set.Keys)-1] // b's
	last["revoked"] = true
	if text, err = json.Marshal(map[string]any{"keys": set.Keys}); err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	harness.Stop(t)
	setting.Store = g.Store
	s.G = harness.Launch(t, setting)
	s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: group.ID()}).Problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.Arrived("POST /refunds", 0)
	s.Back(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: below.Checkpoint, Keep: true}).Want(t, "completed")
	lab.WantCharge(below.Id(t), "refunded")
	lab.WantCharge(root.Id(t), "open")
}

// Cascade 4.2.3-a, 6.3-d: each checkpoint is verified when its turn comes, and not the target
// alone when the rollback is asked for.
func TestCascade423VerifiedAtItsTurn(t *testing.T) {
	for name, space := range map[string]string{"the token": "le", "the snapshot": "kb"} {
		t.Run(name, func(t *testing.T) {
			a := harness.NewAgent(t, "a")
			lab, g := harness.LaunchLab(t, harness.SagaActions, a)
			s := g.Saga(a)
			root := s.Do(harness.Charge(1))
			g.Entry(a, s.Wid, root.Checkpoint)
			at := harness.Document[struct{ Index uint64 }](t, g.Get(a, "ledger/entries?jti="+root.Checkpoint)).Index
			var theirs []store.Entry
			for e, err := range g.Store.Memory.Scan(context.Background(), store.Prefix([]byte(space))) {
				if err != nil {
					t.Fatal(err)
				}
				if space == "kb" || binary.BigEndian.Uint64(e.Key[len(e.Key)-8:]) == at {
					theirs = append(theirs, e)
				}
			}
			if len(theirs) != 1 {
				t.Fatalf("%d entries of the checkpoint", len(theirs))
			}
			next := s.Do(harness.Charge(2), root.Checkpoint)
			hold := harness.NewGate(t)
			lab.On("POST /refunds", 1, harness.RestWaits(hold))
			s.Begun(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true})
			harness.Wait(t, hold.Arrived, "the undo of what follows")
			value := append([]byte(nil), theirs[0].Value...)
			value[len(value)/2] ^= 1
			if _, err := g.Store.Memory.Commit(context.Background(), store.Write{Key: theirs[0].Key, Value: value, Expires: theirs[0].Expires}); err != nil {
				t.Fatal(err)
			}
			hold.Open()
			s.Finished(harness.RollbackID(1)).Want(t, "partial", "checkpoint-tampered")
			lab.WantCharge(next.Id(t), "refunded")
			lab.WantCharge(root.Id(t), "open")
			lab.Arrived("POST /refunds", 1)
		})
	}
}

// Cascade 6.1-a, ATD "False Error Injection": a token without a signature asks for nothing,
// also where calls may come with such ones.
func TestCascade61UnsignedTokensAskForNothing(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\n trust {\n min_level L1\n }", Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n}"})
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	claims := map[string]any{
		"iss": a.Issuer.Identity(), "aud": harness.GatewayIdentity, "iat": time.Now().Unix(), "exp": time.Now().Add(time.Minute).Unix(),
		"jti": uuid.NewString(), "wid": s.Wid, "exec_act": "rollback_request", "par": []string{step.Checkpoint},
		"ext": map[string]any{"cascade.reason": "", "cascade.cascade": false},
	}
	for _, path := range []string{"/.well-known/cascade/rollback", "/.well-known/atd/rollback", "/aerr/rollback"} {
		claims["jti"] = uuid.NewString()
		got := g.Call(harness.WithRaw(harness.Bare(t, claims), harness.Request{Path: path, Body: `{"rollback_id":"` + harness.RollbackID(1) + `","checkpoint_id":"` + step.Checkpoint + `"}`}))
		if got.Status != http.StatusForbidden && got.Status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", path, got.Status, got.Body)
		}
	}
	lab.WantCharge(step.Id(t), "open")
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}).Want(t, "completed")
}
