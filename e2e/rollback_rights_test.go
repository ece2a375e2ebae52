package e2e

import (
	"context"
	"encoding/binary"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Cascade 6.1 and P3: who has no part in the workflow gets one answer, whether or not
// there is such a checkpoint, and nothing is touched.
func TestCascade61OthersMayNot(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, g := launchLab(t, sagaActions, a, b)
	s := g.saga(a)
	root := s.do(charge(1))
	next := s.do(charge(2), root.checkpoint)

	elsewhere := g.saga(a)
	elsewhere.do(charge(3))
	stranger := g.saga(b)
	stranger.wid = s.wid // a matching wid is not enough
	below := g.saga(b)
	below.wid = s.wid
	below.do(charge(4), next.checkpoint) // it follows from the checkpoint, and is no ancestor
	var answers []string
	for name, c := range map[string]struct {
		saga       *saga
		checkpoint string
	}{
		"another workflow":     {elsewhere, root.checkpoint},
		"a stranger":           {stranger, root.checkpoint},
		"a descendant":         {below, next.checkpoint},
		"an unknown one":       {s, uuid.NewString()},
		"a stranger's unknown": {stranger, uuid.NewString()},
	} {
		asked := rollbackBody{ID: rollbackID(1), Checkpoint: c.checkpoint}
		got := g.call(c.saga.askingAfter(asked))
		if got.status != http.StatusForbidden {
			t.Errorf("%s: %d %s", name, got.status, got.body)
			continue
		}
		got.problem(t, http.StatusForbidden, "not-in-workflow")
		answers = append(answers, got.body)
		// A token that names it as its parent tells no more, on whatever path.
		answers = append(answers, c.saga.ask(asked).body)
		for _, path := range []string{"/.well-known/atd/rollback", "/aerr/rollback"} {
			other := c.saga.asking(asked)
			other.path = path
			answers = append(answers, g.call(other).body)
		}
	}
	if slices.Sort(answers); answers[0] != answers[len(answers)-1] {
		t.Errorf("P3: %s\n%s", answers[0], answers[len(answers)-1])
	}
	if got := stranger.look(rollbackID(1)); got.status < 400 {
		t.Errorf("%d %s", got.status, got.body)
	}
	lab.arrived("POST /refunds", 0)
}

// Cascade 6.1: without a token, with a forged one, or with one that was used, nobody asks.
func TestCascade61Tokens(t *testing.T) {
	a, stranger := newAgent(t, "a"), newAgent(t, "stranger")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	one, two := s.do(charge(1)), s.do(charge(2))

	forged := g.saga(stranger)
	forged.wid = s.wid
	forged.ask(rollbackBody{ID: rollbackID(1), Checkpoint: one.checkpoint}).refusedFor(t, http.StatusForbidden, "kid")
	altered := s.asking(rollbackBody{ID: rollbackID(1), Checkpoint: one.checkpoint})
	token := altered.header[ect.FieldName]
	altered.header[ect.FieldName] = token[:len(token)-4] + "AAAA"
	g.call(altered).refusedFor(t, http.StatusForbidden, "signature")
	none := s.asking(rollbackBody{ID: rollbackID(1), Checkpoint: one.checkpoint})
	delete(none.header, ect.FieldName)
	if got := g.call(none); got.status != http.StatusUnauthorized && got.status != http.StatusForbidden {
		t.Errorf("%d %s", got.status, got.body)
	}
	lab.arrived("POST /refunds", 0)

	asked := s.asking(rollbackBody{ID: rollbackID(1), Checkpoint: one.checkpoint})
	first := g.call(asked)
	document[rollbackDoc](t, first).want(t, "completed")
	// ATD: the same request token again is answered, and does nothing again (P5).
	if again := g.call(asked); again.status != first.status || again.body != first.body {
		t.Errorf("P5: %d %s, before: %s", again.status, again.body, first.body)
	}
	// For anything else it is used up.
	replayed := s.asking(rollbackBody{ID: rollbackID(2), Checkpoint: two.checkpoint})
	replayed.header = asked.header
	if got := g.call(replayed); got.status < 400 {
		t.Errorf("%d %s", got.status, got.body)
	}
	lab.wantCharge(two.id(t), "open")
	lab.arrived("POST /refunds", 1)
}

// alter changes one bit of a checkpoint's entry in the ledger.
func (g *gateway) alter(a *agent, wid, checkpoint string) {
	g.t.Helper()
	g.entry(a, wid, checkpoint)
	at := document[struct{ Index uint64 }](g.t, g.get(a, "ledger/entries?jti="+checkpoint)).Index
	for e, err := range g.store.memory.Scan(context.Background(), store.Prefix([]byte("le"))) {
		if err != nil {
			g.t.Fatal(err)
		}
		if binary.BigEndian.Uint64(e.Key[len(e.Key)-8:]) != at {
			continue
		}
		value := append([]byte(nil), e.Value...)
		value[len(value)/2] ^= 1
		if _, err := g.store.memory.Commit(context.Background(), store.Write{Key: e.Key, Value: value, Expires: e.Expires}); err != nil {
			g.t.Fatal(err)
		}
		return
	}
	g.t.Fatalf("no entry of %s", checkpoint)
}

// Cascade 4.2.3 and 6.3: a checkpoint whose token in the ledger was altered is not undone, and
// those who may ask for it learn that. To others it is as unknown as before (P3).
func TestCascade423AlteredEntry(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, g := launchLab(t, sagaActions, a, b)
	s := g.saga(a)
	step := s.do(charge(1))
	next, beside := s.do(charge(2), step.checkpoint), s.do(charge(4))
	g.settledView(a, s.wid, 9)
	stranger := g.saga(b)
	stranger.wid = s.wid
	stranger.do(charge(3))
	unknown := stranger.ask(rollbackBody{ID: rollbackID(1), Checkpoint: uuid.NewString()})
	g.alter(a, s.wid, step.checkpoint)
	for n, cascade := range []bool{false, true} {
		s.ask(rollbackBody{ID: rollbackID(2 + n), Checkpoint: step.checkpoint, Cascade: cascade}).problem(t, http.StatusConflict, "checkpoint-tampered")
	}
	foreign := stranger.ask(rollbackBody{ID: rollbackID(4), Checkpoint: step.checkpoint})
	foreign.problem(t, http.StatusForbidden, "not-in-workflow")
	if got, want := strings.ReplaceAll(foreign.body, rollbackID(4), ""), strings.ReplaceAll(unknown.body, rollbackID(1), ""); got != want || foreign.status != unknown.status {
		t.Errorf("P3: %s\n%s", got, want)
	}
	lab.arrived("POST /refunds", 0)
	// What follows from it is no better known; what does not, is undone.
	s.ask(rollbackBody{ID: rollbackID(5), Checkpoint: next.checkpoint}).problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.arrived("POST /refunds", 0)
	s.back(rollbackBody{ID: rollbackID(6), Checkpoint: beside.checkpoint}).want(t, "completed")
	lab.wantCharge(step.id(t), "open")
	lab.wantCharge(next.id(t), "open")
	lab.wantCharge(beside.id(t), "refunded")
}

// Cascade 4.2.3 and 6.3: what was altered in the store is not rolled back to, and an error
// token tells of it.
func TestCascade423Tampered(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(1))
	before := len(g.settledView(a, s.wid, 3).Nodes)
	flipped := 0
	for e, err := range g.store.memory.Scan(context.Background(), store.Prefix([]byte("kb"))) {
		if err != nil {
			t.Fatal(err)
		}
		value := append([]byte(nil), e.Value...)
		value[len(value)/2] ^= 1
		if _, err := g.store.memory.Commit(context.Background(), store.Write{Key: e.Key, Value: value, Expires: e.Expires}); err != nil {
			t.Fatal(err)
		}
		flipped++
	}
	if flipped != 1 {
		t.Fatalf("%d snapshots", flipped)
	}
	s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}).problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.arrived("POST /refunds", 0)
	v := g.settledView(a, s.wid, before+1)
	if !slices.ContainsFunc(v.Nodes, func(n workflowNode) bool { return n.Event == "error" }) {
		t.Errorf("no error token: %+v", v.Nodes)
	}
	if doc := document[checkpointDoc](t, s.checkpoint(step.checkpoint)); doc.Verification.Signature != "valid" || doc.Verification.Snapshot == "matches" {
		t.Errorf("cascade 4.2.2: %+v", doc)
	}
}

// Cascade 4.2.3: an expired checkpoint is not used.
func TestCascade423Expired(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(1))
	g.store.pass(25 * time.Hour)
	s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}).problem(t, http.StatusGone, "checkpoint-expired")
	lab.arrived("POST /refunds", 0)
	s.checkpoint(step.checkpoint).problem(t, http.StatusGone, "checkpoint-expired")
}

// Cascade 4.2.2: the checkpoint and its verification, also after its rollback.
func TestCascade422Retrieval(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	_, g := launchLab(t, sagaActions, a, b)
	s := g.saga(a)
	step := s.do(charge(1))
	g.settledView(a, s.wid, 3)
	doc := document[checkpointDoc](t, s.checkpoint(step.checkpoint))
	token, err := ect.ParseInsecure(doc.Token)
	if err != nil || token.ID() != step.checkpoint || token.OutputHash().IsZero() {
		t.Fatalf("%v %+v", err, doc)
	}
	if doc.Verification.Signature != "valid" || doc.Verification.Snapshot != "matches" || !doc.Reversible || doc.Way != "compensate" {
		t.Errorf("%+v", doc)
	}
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}).want(t, "completed")
	if doc := document[checkpointDoc](t, s.checkpoint(step.checkpoint)); doc.Undo.State != "undone" {
		t.Errorf("%+v", doc)
	}
	stranger := g.saga(b)
	if foreign, none := stranger.checkpoint(step.checkpoint), stranger.checkpoint(uuid.NewString()); foreign.status < 400 || foreign.body != none.body {
		t.Errorf("P3: %d %s, %s", foreign.status, foreign.body, none.body)
	}
}

// Cascade 6.1: rollback requests are bounded, and a repetition of one is not counted. The rate is
// so low that no machine is too slow to exceed it.
func TestCascade61Flooding(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	g := launch(t, setup{app: trusting(t, a) + "\nrollback {\n rate 3\n }", site: lab.site()})
	s := g.saga(a)
	step := s.do(charge(1))
	first := s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint})
	limited := false
	for n := 2; n < 500 && !limited; n++ {
		got := s.ask(rollbackBody{ID: rollbackID(n), Checkpoint: step.checkpoint})
		if limited = got.status == http.StatusTooManyRequests; limited {
			got.retryable(t, http.StatusTooManyRequests, "quota-exceeded")
		}
	}
	if !limited {
		t.Error("nobody keeps an agent from asking 500 times at once")
	}
	if again := s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint}); again.status != first.status || again.body != first.body {
		t.Errorf("P5: %d %s", again.status, again.body)
	}
	lab.arrived("POST /refunds", 1)
}

// An agent's own action may have the name of the gateway's event: it is a task as any other (ATD
// "Node States"), and gives its agent a part in what follows from it (C-6.1-a).
func TestActionsNamedLikeEscalations(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, g := launchLab(t, sagaActions, a, b)
	for _, name := range []string{"escalation", "escalation_decision"} {
		wid := uuid.NewString()
		task := a.issue(ect.Claims{Workflow: wid, Action: name})
		g.call(with(task, request{method: "GET", path: "/docs/none"}))
		below := &saga{t, g, b, wid}
		charged := below.do(charge(7), task.ID())
		mine := &saga{t, g, a, wid}
		if got := mine.view().state(task.ID()); got != "done" {
			t.Errorf("the action %q is %q", name, got)
		}
		mine.back(rollbackBody{Checkpoint: charged.checkpoint, Reason: "a test"}).want(t, "completed")
		lab.wantCharge(charged.id(t), "refunded")
	}
}
