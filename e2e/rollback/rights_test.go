package rollback

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Cascade 6.1 and P3: who has no part in the workflow gets one answer, whether or not
// there is such a checkpoint, and nothing is touched.
func TestCascade61OthersMayNot(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a, b)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	next := s.Do(harness.Charge(2), root.Checkpoint)

	elsewhere := g.Saga(a)
	elsewhere.Do(harness.Charge(3))
	stranger := g.Saga(b)
	stranger.Wid = s.Wid // a matching wid is not enough
	below := g.Saga(b)
	below.Wid = s.Wid
	below.Do(harness.Charge(4), next.Checkpoint) // it follows from the checkpoint, and is no ancestor
	var answers []string
	for name, c := range map[string]struct {
		saga       *harness.Saga
		checkpoint string
	}{
		"another workflow":     {elsewhere, root.Checkpoint},
		"a stranger":           {stranger, root.Checkpoint},
		"a descendant":         {below, next.Checkpoint},
		"an unknown one":       {s, uuid.NewString()},
		"a stranger's unknown": {stranger, uuid.NewString()},
	} {
		asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: c.checkpoint}
		got := g.Call(c.saga.AskingAfter(asked))
		if got.Status != http.StatusForbidden {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
			continue
		}
		got.Problem(t, http.StatusForbidden, "not-in-workflow")
		answers = append(answers, got.Body)
		// A token that names it as its parent tells no more, on whatever path.
		answers = append(answers, c.saga.Ask(asked).Body)
		for _, path := range []string{"/.well-known/atd/rollback", "/aerr/rollback"} {
			other := c.saga.Asking(asked)
			other.Path = path
			answers = append(answers, g.Call(other).Body)
		}
	}
	if slices.Sort(answers); answers[0] != answers[len(answers)-1] {
		t.Errorf("P3: %s\n%s", answers[0], answers[len(answers)-1])
	}
	if got := stranger.Look(harness.RollbackID(1)); got.Status < 400 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	lab.Arrived("POST /refunds", 0)
}

// Cascade 6.1: without a token, with a forged one, or with one that was used, nobody asks.
func TestCascade61Tokens(t *testing.T) {
	a, stranger := harness.NewAgent(t, "a"), harness.NewAgent(t, "stranger")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	one, two := s.Do(harness.Charge(1)), s.Do(harness.Charge(2))

	forged := g.Saga(stranger)
	forged.Wid = s.Wid
	forged.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: one.Checkpoint}).RefusedFor(t, http.StatusForbidden, "kid")
	altered := s.Asking(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: one.Checkpoint})
	token := altered.Header[ect.FieldName]
	altered.Header[ect.FieldName] = token[:len(token)-4] + "AAAA"
	g.Call(altered).RefusedFor(t, http.StatusForbidden, "signature")
	none := s.Asking(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: one.Checkpoint})
	delete(none.Header, ect.FieldName)
	if got := g.Call(none); got.Status != http.StatusUnauthorized && got.Status != http.StatusForbidden {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	lab.Arrived("POST /refunds", 0)

	asked := s.Asking(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: one.Checkpoint})
	first := g.Call(asked)
	harness.Document[harness.RollbackDoc](t, first).Want(t, "completed")
	// ATD: the same request token again is answered, and does nothing again (P5).
	if again := g.Call(asked); again.Status != first.Status || again.Body != first.Body {
		t.Errorf("P5: %d %s, before: %s", again.Status, again.Body, first.Body)
	}
	// For anything else it is used up.
	replayed := s.Asking(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: two.Checkpoint})
	replayed.Header = asked.Header
	if got := g.Call(replayed); got.Status < 400 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	lab.WantCharge(two.Id(t), "open")
	lab.Arrived("POST /refunds", 1)
}

// Cascade 4.2.3 and 6.3: a checkpoint whose token in the ledger was altered is not undone, and
// those who may ask for it learn that. To others it is as unknown as before (P3).
func TestCascade423AlteredEntry(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a, b)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	next, beside := s.Do(harness.Charge(2), step.Checkpoint), s.Do(harness.Charge(4))
	g.SettledView(a, s.Wid, 9)
	stranger := g.Saga(b)
	stranger.Wid = s.Wid
	stranger.Do(harness.Charge(3))
	unknown := stranger.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: uuid.NewString()})
	g.Alter(a, s.Wid, step.Checkpoint)
	for n, cascade := range []bool{false, true} {
		s.Ask(harness.RollbackBody{ID: harness.RollbackID(2 + n), Checkpoint: step.Checkpoint, Cascade: cascade}).Problem(t, http.StatusConflict, "checkpoint-tampered")
	}
	foreign := stranger.Ask(harness.RollbackBody{ID: harness.RollbackID(4), Checkpoint: step.Checkpoint})
	foreign.Problem(t, http.StatusForbidden, "not-in-workflow")
	if got, want := strings.ReplaceAll(foreign.Body, harness.RollbackID(4), ""), strings.ReplaceAll(unknown.Body, harness.RollbackID(1), ""); got != want || foreign.Status != unknown.Status {
		t.Errorf("P3: %s\n%s", got, want)
	}
	lab.Arrived("POST /refunds", 0)
	// What follows from it is no better known; what does not, is undone.
	s.Ask(harness.RollbackBody{ID: harness.RollbackID(5), Checkpoint: next.Checkpoint}).Problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.Arrived("POST /refunds", 0)
	s.Back(harness.RollbackBody{ID: harness.RollbackID(6), Checkpoint: beside.Checkpoint}).Want(t, "completed")
	lab.WantCharge(step.Id(t), "open")
	lab.WantCharge(next.Id(t), "open")
	lab.WantCharge(beside.Id(t), "refunded")
}

// Cascade 4.2.3 and 6.3: what was altered in the store is not rolled back to, and an error
// token tells of it.
func TestCascade423Tampered(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	before := len(g.SettledView(a, s.Wid, 3).Nodes)
	flipped := 0
	for e, err := range g.Store.Memory.Scan(context.Background(), store.Prefix([]byte("kb"))) {
		if err != nil {
			t.Fatal(err)
		}
		value := append([]byte(nil), e.Value...)
		value[len(value)/2] ^= 1
		if _, err := g.Store.Memory.Commit(context.Background(), store.Write{Key: e.Key, Value: value, Expires: e.Expires}); err != nil {
			t.Fatal(err)
		}
		flipped++
	}
	if flipped != 1 {
		t.Fatalf("%d snapshots", flipped)
	}
	s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}).Problem(t, http.StatusConflict, "checkpoint-tampered")
	lab.Arrived("POST /refunds", 0)
	v := g.SettledView(a, s.Wid, before+1)
	if !slices.ContainsFunc(v.Nodes, func(n harness.WorkflowNode) bool { return n.Event == "error" }) {
		t.Errorf("no error token: %+v", v.Nodes)
	}
	if doc := harness.Document[harness.CheckpointDoc](t, s.Checkpoint(step.Checkpoint)); doc.Verification.Signature != "valid" || doc.Verification.Snapshot == "matches" {
		t.Errorf("cascade 4.2.2: %+v", doc)
	}
}

// Cascade 4.2.3: an expired checkpoint is not used.
func TestCascade423Expired(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	g.Store.Pass(25 * time.Hour)
	s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}).Problem(t, http.StatusGone, "checkpoint-expired")
	lab.Arrived("POST /refunds", 0)
	s.Checkpoint(step.Checkpoint).Problem(t, http.StatusGone, "checkpoint-expired")
}

// Cascade 4.2.2: the checkpoint and its verification, also after its rollback.
func TestCascade422Retrieval(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	_, g := harness.LaunchLab(t, harness.SagaActions, a, b)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	g.SettledView(a, s.Wid, 3)
	doc := harness.Document[harness.CheckpointDoc](t, s.Checkpoint(step.Checkpoint))
	token, err := ect.ParseInsecure(doc.Token)
	if err != nil || token.ID() != step.Checkpoint || token.OutputHash().IsZero() {
		t.Fatalf("%v %+v", err, doc)
	}
	if doc.Verification.Signature != "valid" || doc.Verification.Snapshot != "matches" || !doc.Reversible || doc.Way != "compensate" {
		t.Errorf("%+v", doc)
	}
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}).Want(t, "completed")
	if doc := harness.Document[harness.CheckpointDoc](t, s.Checkpoint(step.Checkpoint)); doc.Undo.State != "undone" {
		t.Errorf("%+v", doc)
	}
	stranger := g.Saga(b)
	if foreign, none := stranger.Checkpoint(step.Checkpoint), stranger.Checkpoint(uuid.NewString()); foreign.Status < 400 || foreign.Body != none.Body {
		t.Errorf("P3: %d %s, %s", foreign.Status, foreign.Body, none.Body)
	}
}

// Cascade 6.1: rollback requests are bounded, and a repetition of one is not counted. The rate is
// so low that no machine is too slow to exceed it.
func TestCascade61Flooding(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\nrollback {\n rate 3\n }", Site: lab.Site()})
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	first := s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint})
	limited := false
	for n := 2; n < 500 && !limited; n++ {
		got := s.Ask(harness.RollbackBody{ID: harness.RollbackID(n), Checkpoint: step.Checkpoint})
		if limited = got.Status == http.StatusTooManyRequests; limited {
			got.Retryable(t, http.StatusTooManyRequests, "quota-exceeded")
		}
	}
	if !limited {
		t.Error("nobody keeps an agent from asking 500 times at once")
	}
	if again := s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint}); again.Status != first.Status || again.Body != first.Body {
		t.Errorf("P5: %d %s", again.Status, again.Body)
	}
	lab.Arrived("POST /refunds", 1)
}

// An agent's own action may have the name of the gateway's event: it is a task as any other (ATD
// "Node States"), and gives its agent a part in what follows from it (C-6.1-a).
func TestActionsNamedLikeEscalations(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a, b)
	for _, name := range []string{"escalation", "escalation_decision"} {
		wid := uuid.NewString()
		task := a.Issue(ect.Claims{Workflow: wid, Action: name})
		g.Call(harness.With(task, harness.Request{Method: "GET", Path: "/docs/none"}))
		below := &harness.Saga{T: t, G: g, A: b, Wid: wid}
		charged := below.Do(harness.Charge(7), task.ID())
		mine := &harness.Saga{T: t, G: g, A: a, Wid: wid}
		if got := mine.View().State(task.ID()); got != "done" {
			t.Errorf("the action %q is %q", name, got)
		}
		mine.Back(harness.RollbackBody{Checkpoint: charged.Checkpoint, Reason: "a test"}).Want(t, "completed")
		lab.WantCharge(charged.Id(t), "refunded")
	}
}
