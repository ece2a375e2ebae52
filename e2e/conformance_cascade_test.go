package e2e

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

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Cascade 4.2.1, Tables 1 and 2; ATD "Error Signaling"; brief "Data Model": a call that fails
// leaves a checkpoint, a node and an error, in the drafts' words, each following from what led
// to it.
func TestCascade421TokensOfACall(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, strings.Replace(sagaActions, "match path /charges", "match path /charges\n description \"Takes money\"\n target billing.example.com", 1), a)
	lab.on("POST /charges", 1, failingWith(http.StatusUnprocessableEntity))
	s := g.saga(a)
	began := time.Now().Add(-time.Minute)
	token := a.issue(ect.Claims{Workflow: s.wid})
	got := g.call(with(token, charge(1)))
	if got.status != http.StatusUnprocessableEntity {
		t.Fatalf("%d %s", got.status, got.body)
	}
	id := got.header.Get("Execution-Checkpoint")
	var node, checkpoint, failure *ect.Unverified
	for _, n := range g.settledView(a, s.wid, 4).Nodes {
		switch u := g.entry(a, s.wid, n.JTI); {
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
		if u.Issuer() != gatewayIdentity || u.Workflow() != s.wid || u.IssuedAt().Before(began) || u.Level() != ect.L2 {
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
	follows(t, checkpoint, token.ID())
	says(t, checkpoint, map[ect.Member]string{
		ect.MemberReversible: "true", ect.MemberTTL: "86400", ect.MemberTarget: quoted("billing.example.com"),
		ect.MemberDescription: quoted("Takes money"),
	})
	if uri, _ := checkpoint.Ext().Text(ect.MemberRollbackURI); !strings.HasSuffix(uri, "/.well-known/cascade/rollback") {
		t.Errorf("%s", checkpoint.Payload())
	}
	follows(t, node, token.ID(), id)
	if failure.Action() != "error" {
		t.Errorf("%s", failure.Payload())
	}
	follows(t, failure, node.ID(), token.ID())
	says(t, failure, map[ect.Member]string{
		ect.MemberSeverity: quoted("warning"), ect.MemberErrorType: quoted("action_failed"),
		ect.MemberCheckpointID: quoted(id), ect.MemberUpstreamErrors: "[]",
	})
	if text, _ := failure.Ext().Text(ect.MemberDescription); text == "" {
		t.Errorf("%s", failure.Payload())
	}
	// C-7.2-a: nothing but the drafts' prefix and our own.
	for _, u := range []*ect.Unverified{node, checkpoint, failure} {
		for name := range document[map[string]any](t, reply{status: 200, body: u.Ext().JSON()}) {
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
	a, b, c := newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "c")
	lab, g := launchParts(t, sagaActions, a, b, c)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	by := func(other *agent) *saga { return &saga{t, g, other, s.wid} }
	root := s.do(put("/docs/x", `{"n":2}`))
	paid := by(b).do(charge(1), root.checkpoint)
	mail := by(c).do(request{path: "/mail"}, root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag", Reason: "wrong order"}
	r := s.asking(asked)
	asking, err := ect.ParseInsecure(r.header[ect.FieldName])
	if err != nil {
		t.Fatal(err)
	}
	answer := g.call(r)
	doc := document[rollbackDoc](t, answer)
	doc.want(t, "partial", "irreversible")
	lab.wantDoc("/docs/x", `{"n":1}`)
	lab.wantCharge(paid.id(t), "refunded")
	if answer.header.Get("Execution-Context") != doc.ECT || doc.ECT == "" {
		t.Errorf("the answer carries %q, and its document %q", answer.header.Get("Execution-Context"), doc.ECT)
	}

	// Three calls with three nodes each, the request, the start, three steps and the whole.
	const nodes = 9 + 1 + 1 + 3 + 1
	starts := s.events(nodes, ect.EventRollbackStart)
	if len(starts) != 1 {
		t.Fatalf("%d starts", len(starts))
	}
	start := starts[0]
	follows(t, start, asking.ID())
	says(t, start, map[ect.Member]string{
		ect.MemberRollbackID: quoted(rollbackID(1)), ect.MemberCheckpointID: quoted(root.checkpoint),
		ect.MemberScope: quoted("sub_dag"), ect.MemberReason: quoted("wrong order"),
	})
	if start.Action() != "rollback_start" || start.ID() != doc.Tokens.Start || start.Workflow() != s.wid || start.Issuer() != gatewayIdentity {
		t.Errorf("%s, and the answer names %+v", start.Payload(), doc.Tokens)
	}

	compensations := s.events(nodes, ect.EventCompensate)
	if len(compensations) != 1 {
		t.Fatalf("%d compensations", len(compensations))
	}
	follows(t, compensations[0], start.ID(), paid.checkpoint)
	says(t, compensations[0], map[ect.Member]string{
		ect.MemberRollbackID: quoted(rollbackID(1)), ect.MemberCheckpointID: quoted(paid.checkpoint), ect.MemberStatus: quoted("completed"),
	})

	steps, whole := map[string]*ect.Unverified{}, (*ect.Unverified)(nil)
	for _, u := range s.events(nodes, ect.EventRollbackComplete) {
		if u.ID() == doc.Tokens.Complete {
			follows(t, u, start.ID(), asking.ID())
			whole = u
			continue
		}
		follows(t, u, start.ID())
		of, _ := u.Ext().Text(ect.MemberCheckpointID)
		steps[of] = u
	}
	if whole == nil || len(steps) != 2 || steps[root.checkpoint] == nil || steps[mail.checkpoint] == nil {
		t.Fatalf("the whole is %v, the steps are %v", whole, steps)
	}
	says(t, steps[mail.checkpoint], map[ect.Member]string{ect.MemberStatus: quoted("escalated"), ect.MemberReason: quoted("irreversible")},
		ect.MemberStateBefore, ect.MemberStateAfter)
	restored := steps[root.checkpoint]
	says(t, restored, map[ect.Member]string{ect.MemberStatus: quoted("completed")})
	before, _ := restored.Ext().Text(ect.MemberStateBefore)
	after, _ := restored.Ext().Text(ect.MemberStateAfter)
	if !strings.HasPrefix(before, "sha256:") || !strings.HasPrefix(after, "sha256:") || before == after || restored.OutputHash().Prefixed() != after {
		t.Errorf("%s", restored.Payload())
	}

	says(t, whole, map[ect.Member]string{
		ect.MemberRollbackID: quoted(rollbackID(1)), ect.MemberCheckpointID: quoted(root.checkpoint), ect.MemberStatus: quoted("partial"),
	})
	if whole.OutputHash().IsZero() != (doc.After == "") || !whole.OutputHash().IsZero() && whole.OutputHash().Prefixed() != doc.After {
		t.Errorf("out_hash and the answer's %q: %s", doc.After, whole.Payload())
	}
	hashes := map[ect.Member]string{}
	for m, value := range map[ect.Member]string{ect.MemberStateBefore: doc.Before, ect.MemberStateAfter: doc.After} {
		if value != "" {
			hashes[m] = quoted(value)
		}
	}
	says(t, whole, hashes)
	cascaded, _ := whole.Ext().Outcomes(ect.MemberCascaded)
	slices.SortFunc(cascaded, func(x, y ect.Outcome) int { return strings.Compare(x.Agent, y.Agent) })
	if want := []ect.Outcome{{Agent: b.issuer.Identity(), Status: "completed"}, {Agent: c.issuer.Identity(), Status: "escalated"}}; !slices.Equal(cascaded, want) {
		t.Errorf("cascaded is %v, want %v", cascaded, want)
	}
	if failed, _ := whole.Ext().Texts(ect.MemberFailedAgents); !slices.Equal(failed, []string{c.issuer.Identity()}) {
		t.Errorf("failed_agents is %v", failed)
	}
	if !slices.Equal(doc.Failed, []string{c.issuer.Identity()}) || len(doc.Cascaded) != 2 {
		t.Errorf("the answer says %+v", doc)
	}
}

// Cascade 4.4.1, 4.4.2-b: the four words for what came of a rollback, in the answer and in the
// token alike.
func TestCascade442StatusWords(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchParts(t, sagaActions, a)
	for want, prepare := range map[string]func(s *saga) string{
		"completed": func(s *saga) string { return s.do(charge(1)).checkpoint },
		"failed": func(s *saga) string {
			lab.on("POST /refunds", 1, restSays(http.StatusConflict, `{"error":"no"}`))
			return s.do(charge(1)).checkpoint
		},
		"escalated": func(s *saga) string { return s.do(request{path: "/mail"}).checkpoint },
		"partial": func(s *saga) string {
			root := s.do(charge(1)).checkpoint
			s.do(request{path: "/mail"}, root)
			return root
		},
	} {
		t.Run(want, func(t *testing.T) {
			s := g.saga(a).in(t)
			doc := s.back(rollbackBody{Checkpoint: prepare(s), Cascade: want == "partial"})
			if doc.Status != want {
				t.Errorf("%+v", doc)
			}
			token := g.entry(a, s.wid, doc.Tokens.Complete)
			says(t, token, map[ect.Member]string{ect.MemberStatus: quoted(want)})
			if signed, err := ect.ParseInsecure(doc.ECT); err != nil || signed.ID() != token.ID() {
				t.Errorf("%v %s", err, doc.ECT)
			}
			if failed, there := token.Ext().Texts(ect.MemberFailedAgents); there != (want != "completed") || there && !slices.Equal(failed, []string{a.issuer.Identity()}) {
				t.Errorf("failed_agents is %v, there %v", failed, there)
			}
		})
	}
}

// Cascade 4.1.3: which scope a request has, by its body and its token; and that they must mean
// the same.
func TestCascade413ScopeOnTheWire(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
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
			s := g.saga(a).in(t)
			root := s.do(charge(1))
			next := s.do(charge(2), root.checkpoint)
			ext := new(ect.ExtBuilder).Text(ect.MemberReason, "").Bool(ect.MemberCascade, c.cascade)
			if c.scope != "" {
				ext.Text(ect.MemberScope, c.scope)
			}
			token := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Parents: []string{root.checkpoint}, Ext: ext})
			got := g.call(with(token, request{path: "/.well-known/cascade/rollback",
				body: `{"rollback_id":"urn:uuid:` + uuid.NewString() + `","checkpoint_id":"` + root.checkpoint + `","keep_dependants":true` + c.body + `}`}))
			if got.status != c.status {
				t.Fatalf("%d %s", got.status, got.body)
			}
			want := map[bool]string{true: "refunded", false: "open"}
			lab.wantCharge(root.id(t), want[c.status == 200])
			lab.wantCharge(next.id(t), want[c.both])
		})
	}
}

// Cascade 4.2.3-a, 6.3: before a rollback the checkpoint's token is read again, and one that
// was altered in the ledger is not rolled back to.
func TestCascade423AlteredToken(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(1))
	g.alter(a, s.wid, step.checkpoint)
	s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}).problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.arrived("POST /refunds", 0)
	lab.wantCharge(step.id(t), "open")
}

// Cascade 4.2.3-b: the signature chain is verified at the rollback. A checkpoint of an agent
// whose key was revoked since is not believed any more; what followed from its tokens can be
// undone all the same.
func TestCascade423RevokedKey(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	app, lab := trusting(t, a, b), newRestLab(t)
	setting := setup{app: app, site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n}"}
	g := launch(t, setting)
	s := g.saga(a)
	theirs := &saga{t, g, b, s.wid}
	root := s.do(charge(1))
	below := theirs.do(charge(2), root.checkpoint)
	g.entry(a, s.wid, below.checkpoint)
	group := b.issue(ect.Claims{
		Workflow: s.wid, Action: "checkpoint", Parents: []string{root.checkpoint, below.checkpoint}, Output: ect.Sum([]byte("both")),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 3600).
			Text(ect.MemberRollbackURI, "https://b.example/.well-known/cascade/rollback"),
	})
	next := theirs.calling(charge(3), below.checkpoint)
	next.header[ect.FieldName] = group.Raw() + ", " + next.header[ect.FieldName]
	if got := g.call(next); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	g.entry(a, s.wid, group.ID())

	_, path, _ := strings.Cut(app, "jwks_file ")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	set := document[struct{ Keys []map[string]any }](t, reply{status: 200, body: string(text)})
	last := set.Keys[len(set.Keys)-1] // b's
	last["revoked"] = true
	if text, err = json.Marshal(map[string]any{"keys": set.Keys}); err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	stop(t)
	setting.store = g.store
	s.g = launch(t, setting)
	s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: group.ID()}).problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.arrived("POST /refunds", 0)
	s.back(rollbackBody{ID: rollbackID(2), Checkpoint: below.checkpoint, Keep: true}).want(t, "completed")
	lab.wantCharge(below.id(t), "refunded")
	lab.wantCharge(root.id(t), "open")
}

// Cascade 4.2.3-a, 6.3-d: each checkpoint is verified when its turn comes, and not the target
// alone when the rollback is asked for.
func TestCascade423VerifiedAtItsTurn(t *testing.T) {
	for name, space := range map[string]string{"the token": "le", "the snapshot": "kb"} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, "a")
			lab, g := launchLab(t, sagaActions, a)
			s := g.saga(a)
			root := s.do(charge(1))
			g.entry(a, s.wid, root.checkpoint)
			at := document[struct{ Index uint64 }](t, g.get(a, "ledger/entries?jti="+root.checkpoint)).Index
			var theirs []store.Entry
			for e, err := range g.store.memory.Scan(context.Background(), store.Prefix([]byte(space))) {
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
			next := s.do(charge(2), root.checkpoint)
			hold := newGate(t)
			lab.on("POST /refunds", 1, restWaits(hold))
			s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
			wait(t, hold.arrived, "the undo of what follows")
			value := append([]byte(nil), theirs[0].Value...)
			value[len(value)/2] ^= 1
			if _, err := g.store.memory.Commit(context.Background(), store.Write{Key: theirs[0].Key, Value: value, Expires: theirs[0].Expires}); err != nil {
				t.Fatal(err)
			}
			hold.open()
			s.finished(rollbackID(1)).want(t, "partial", "checkpoint-tampered")
			lab.wantCharge(next.id(t), "refunded")
			lab.wantCharge(root.id(t), "open")
			lab.arrived("POST /refunds", 1)
		})
	}
}

// Cascade 6.1-a, ATD "False Error Injection": a token without a signature asks for nothing,
// also where calls may come with such ones.
func TestCascade61UnsignedTokensAskForNothing(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	g := launch(t, setup{app: trusting(t, a) + "\n trust {\n min_level L1\n }", site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n}"})
	s := g.saga(a)
	step := s.do(charge(1))
	claims := map[string]any{
		"iss": a.issuer.Identity(), "aud": gatewayIdentity, "iat": time.Now().Unix(), "exp": time.Now().Add(time.Minute).Unix(),
		"jti": uuid.NewString(), "wid": s.wid, "exec_act": "rollback_request", "par": []string{step.checkpoint},
		"ext": map[string]any{"cascade.reason": "", "cascade.cascade": false},
	}
	for _, path := range []string{"/.well-known/cascade/rollback", "/.well-known/atd/rollback", "/aerr/rollback"} {
		claims["jti"] = uuid.NewString()
		got := g.call(withRaw(bare(t, claims), request{path: path, body: `{"rollback_id":"` + rollbackID(1) + `","checkpoint_id":"` + step.checkpoint + `"}`}))
		if got.status != http.StatusForbidden && got.status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	lab.wantCharge(step.id(t), "open")
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}).want(t, "completed")
}
