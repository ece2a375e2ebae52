package rollback_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// C-4.3.2-h: whose participant cannot prepare is not asked to execute, in another life either; the
// target is critical, and with the policy of all or nothing everything is.
func TestCascade432Participants(t *testing.T) {
	for name, test := range map[string]struct {
		obstacles map[string]string
		whole     bool
		critical  string // a call whose action is configured so
		status    rollback.Status
		steps     string
	}{
		"all can":                   {nil, true, "", rollback.Completed, "c2=completed c1=completed"},
		"one cannot":                {map[string]string{"c2": "unreachable"}, false, "", rollback.Partial, "c2=escalated(unreachable) c1=completed"},
		"all or nothing":            {map[string]string{"c2": "unreachable"}, true, "", rollback.Escalated, "c2=escalated(unreachable) c1=escalated(denied)"},
		"the target cannot":         {map[string]string{"c1": "irreversible"}, false, "", rollback.Escalated, "c2=escalated(denied) c1=escalated(irreversible)"},
		"a critical one cannot":     {map[string]string{"c2": "unreachable"}, false, "c2", rollback.Escalated, "c2=escalated(unreachable) c1=escalated(denied)"},
		"another one than critical": {map[string]string{"c2": "unreachable"}, false, "c1", rollback.Partial, "c2=escalated(unreachable) c1=completed"},
		"nobody can prepare":        {map[string]string{"c1": "refused", "c2": "refused"}, false, "", rollback.Escalated, "c2=escalated(refused) c1=escalated(refused)"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Delegate, execution.Completed)
				r.made("2", checkpoint.Delegate, execution.Completed, "1")
				r.world.obstacles = test.obstacles
				for i := range r.ledger.nodes {
					r.ledger.nodes[i].Critical = r.ledger.nodes[i].ID == test.critical
				}
				q := request("c1", rollback.SubDAG)
				q.Whole = test.whole
				p, err := r.Prepare(ctx, q)
				if err != nil || p.Ready() != (test.obstacles == nil) || len(p.Obstacles) != len(test.obstacles) {
					t.Fatalf("%+v, %v", p, err)
				}
				r.execute(q)
				r.world.obstacles = nil // in the next life nobody is asked again
				asked := r.world.prepared
				r.restart()
				if strings.Contains(test.steps, "denied") {
					r.says(r.question(q.ID), false)
				}
				wantEnd(t, r.wait(q.ID), test.status, test.steps)
				if r.world.prepared != asked {
					t.Errorf("%d were asked again", r.world.prepared-asked)
				}
				for id := range test.obstacles {
					if len(r.world.effects[id]) > 0 {
						t.Errorf("%s was undone", id)
					}
				}
				stop(r.Coordinator)
			})
		})
	}
}

// P6: a participant that is asked for a call may undo with it what followed from that call there, also
// what it could not prepare by itself. Nobody can if it is asked for nothing later.
func TestParticipantMayUndoWhatItDidNotPrepare(t *testing.T) {
	for name, test := range map[string]struct {
		root    checkpoint.Way
		unknown bool
	}{"a later part is asked for": {checkpoint.Delegate, true}, "none is": {checkpoint.Restore, false}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.made("1", test.root, execution.Completed)
			r.made("2", checkpoint.Delegate, execution.Completed, "1")
			r.world.obstacles = map[string]string{"c2": "unreachable"}
			r.start()
			done := r.run(request("c1", rollback.SubDAG))
			wantEnd(t, done, rollback.Partial, "c2=escalated(unreachable) c1=completed")
			if done.Unknown != test.unknown || done.Steps[0].Unknown != test.unknown || !done.Mixed {
				t.Errorf("unknown: %t, mixed: %t, %+v", done.Unknown, done.Mixed, done.Steps[0])
			}
		})
	}
}

// What this gateway itself cannot undo counts the same: an irreversible target ends it all, unless people approve
// the rest.
func TestCascade432IrreversibleTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Irreversible, execution.Completed)
		r.made("2", checkpoint.Restore, execution.Completed, "1")
		r.start()
		q := request("c1", rollback.SubDAG)
		r.execute(q)
		r.says(r.question(q.ID), false)
		wantEnd(t, r.wait(q.ID), rollback.Escalated, "c2=escalated(denied) c1=escalated(irreversible)")
		stop(r.Coordinator)
	})
}

// Who executes what was prepared asks nobody again.
func TestParticipantsArePreparedOnce(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Delegate, execution.Completed)
	r.start()
	q := request("c1", rollback.SubDAG)
	r.prepare(q)
	asked := r.world.prepared
	wantEnd(t, r.run(q), rollback.Completed, "c1=completed")
	if r.world.prepared != asked || asked != 2 { // a look, and then
		t.Errorf("asked %d times, and then %d", asked, r.world.prepared)
	}
}

// Parts of one rollback at another gateway do not conflict: all are prepared, and those that
// contain others are executed as prepared after these. For another requester they do.
func TestPartsOfOneRollback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.made("2", checkpoint.Restore, execution.Completed, "1")
		r.start()
		part := func(target, of string) rollback.Request {
			q := request(target, rollback.SubDAG)
			q.PartOf = of
			return q
		}
		const whole = "00000000-0000-4000-8000-000000000001"
		inner, outer := part("c2", whole), part("c1", whole)
		for _, q := range []rollback.Request{outer, inner} {
			if p := r.prepare(q); !p.Ready() || p.Rollback.Until.IsZero() {
				t.Fatalf("%+v", p)
			}
		}
		time.Sleep(time.Second) // of two that are asked for at once the ids decide
		if p := r.prepare(part("c1", "00000000-0000-4000-8000-000000000002")); p.Refusal == nil {
			t.Errorf("a part of another one: %+v", p)
		}
		wantEnd(t, r.run(inner), rollback.Completed, "c2=completed")
		wantEnd(t, r.run(outer), rollback.Completed, "c2=completed c1=completed")
		for id, keys := range r.world.effects {
			if len(keys) != 1 {
				t.Errorf("%s was undone %d times", id, len(keys))
			}
		}
	})
}

// Cascade 4.3.4: two gateways of one rollback ask a third for the same part. It is one rollback, prepared and
// executed once, and both get the same answer, also after a restart. Each must be allowed to ask.
func TestOnePartOfTwoRequesters(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	const whole = "00000000-0000-4000-8000-000000000001"
	first := request("c1", rollback.SubDAG)
	first.By, first.Coordinator, first.PartOf, first.Token = gateway, true, whole, "token of the first"
	first.Precedence = rollback.Precedence{ID: whole, Scope: rollback.SubDAG, Asked: time.Now().UTC()}
	second, stranger := first, first
	second.By, second.Token = "spiffe://example.com/gateway/2", "token of the second"
	stranger.By, stranger.Coordinator, stranger.Token = "spiffe://example.com/stranger", false, "token of a stranger"
	prepared := r.prepare(first)
	if again := r.prepare(second); !again.Ready() || !again.Rollback.Until.Equal(prepared.Rollback.Until) || hashOf(again) != hashOf(prepared) {
		t.Errorf("%+v", again)
	}
	if _, err := r.Prepare(ctx, stranger); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("P3: %v", err)
	}
	if err := r.Release(ctx, second); err != nil || r.enters("w", "1") == nil {
		t.Errorf("the second one has released it: %v", err)
	}
	done := r.run(second)
	wantEnd(t, done, rollback.Completed, "c1=completed")
	r.restart()
	if same := r.run(first); same.Complete != done.Complete || same.Requester != second.By {
		t.Errorf("%+v", same)
	}
	if _, err := r.Execute(ctx, stranger, nil); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("P3: %v", err)
	}
	for asker, want := range map[string]string{first.By: first.Token, second.By: "", stranger.By: ""} {
		if token, err := r.AskedWith(ctx, first.ID, asker); err != nil || token != want {
			t.Errorf("%s has asked with %q, %v", asker, token, err)
		}
	}
	if n := len(r.world.effects["c1"]); n != 1 {
		t.Errorf("undone %d times", n)
	}
}

// P6: of a part, the checkpoints of who asks for it are left to that gateway. Here nothing was undone
// for them, and nothing says so: no step, no mark, no token. What would follow from them waits all
// the same.
func TestPartLeavesTheRequestersOwn(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.action("2", "1")
	theirs := rollback.Checkpoint{Reversible: true, Parents: []string{"2"}}
	r.known("a2", CheckpointNode, rollback.Ran, theirs, "2")
	r.made("3", checkpoint.Restore, execution.Completed, "a2")
	r.start()
	part := func(target string) rollback.Request {
		q := request(target, rollback.SubDAG)
		q.By, q.Coordinator, q.PartOf = gateway, true, "00000000-0000-4000-8000-000000000001"
		return q
	}
	q := part("c1")
	if p := r.prepare(q); !p.Ready() || len(p.Rollback.Steps) != 2 {
		t.Fatalf("%+v", p)
	}
	for _, id := range []string{"a2", "2"} {
		if _, err := r.Enter(ctx, "w", ids(id)); err == nil {
			t.Errorf("a call that follows from %s has begun", id)
		}
	}
	done := r.run(q)
	wantEnd(t, done, rollback.Completed, "c3=completed c1=completed")
	if left := done.Plan.Elsewhere; len(left) != 1 || left[0].Checkpoint != "a2" || len(done.Plan.Passed) > 0 {
		t.Errorf("%+v", done.Plan)
	}
	if m, err := r.checkpoints.Mark(ctx, "a2"); err != nil || m.State != checkpoint.Active {
		t.Errorf("%+v, %v", m, err)
	}
	for words := range r.recorded() {
		if strings.HasPrefix(words, "step "+q.ID+" a2 ") {
			t.Errorf("%q", words)
		}
	}
	// The target itself is nobody else's business.
	wantEnd(t, r.run(part("a2")), rollback.Partial, "c3=completed a2=escalated(foreign)")
}

// pair is a request for a checkpoint under an id, as Resolve keeps it.
func (r *rig) pair(id, target string, scope rollback.Scope) rollback.Request {
	r.t.Helper()
	q := request(target, scope)
	kept, err := r.Resolve(ctx, id, target)
	if err != nil {
		r.t.Fatal(err)
	}
	if q.ID = kept; kept != id {
		q.Named = id
	}
	return q
}

// Cascade 4.3.4, P5: an id and a checkpoint together name a rollback. Further checkpoints under one id
// are parts of one: they do not conflict, and one that contains others is executed as it was prepared.
// The same pair is the same rollback, in another life too.
func TestSeveralCheckpointsUnderOneID(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.made("9", checkpoint.Restore, execution.Completed)
	r.start()
	const id = "00000000-0000-4000-8000-000000000001"
	pairs := map[string]rollback.Request{}
	for _, target := range []string{"c1", "c2", "c9"} {
		q := r.pair(id, target, rollback.SubDAG)
		if p := r.prepare(q); !p.Ready() || p.Rollback.Until.IsZero() || p.Rollback.AskedAs() != id {
			t.Fatalf("%s: %+v", target, p)
		}
		pairs[target] = q
	}
	for target, q := range pairs {
		if again := r.pair(id, target, rollback.SubDAG); again.ID != q.ID || (q.ID == id) != (target == "c1") {
			t.Errorf("%s is kept as %s, then %s", target, q.ID, again.ID)
		}
	}
	wantEnd(t, r.run(pairs["c2"]), rollback.Completed, "c2=completed")
	wantEnd(t, r.run(pairs["c1"]), rollback.Completed, "c2=completed c1=completed")
	r.restart()
	wantEnd(t, r.run(pairs["c9"]), rollback.Completed, "c9=completed")
	for target, q := range pairs {
		if again := r.pair(id, target, rollback.SubDAG); again.ID != q.ID || again.Named != q.Named {
			t.Errorf("%s is kept as %s, then %s", target, q.ID, again.ID)
		}
		if done := r.run(q); done.Status != rollback.Completed || done.Checkpoint != target || done.AskedAs() != id {
			t.Errorf("%+v", done)
		}
		q.Reason = "something else"
		if _, err := r.Execute(ctx, q, nil); !errors.Is(err, rollback.ErrMismatch) {
			t.Errorf("another content: %v", err)
		}
	}
	for id, keys := range r.world.effects {
		if len(keys) != 1 {
			t.Errorf("%s was undone %d times", id, len(keys))
		}
	}
}

// Of two checkpoints under one id that overlap the second waits for the first. Whoever else uses that id
// asks for a rollback of his own, which conflicts as ever, and is named by the id.
func TestOneIDOfTwoRequesters(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	hold := make(chan struct{})
	r.world.hold["c2"] = hold
	const id = "00000000-0000-4000-8000-000000000001"
	r.execute(r.pair(id, "c1", rollback.SubDAG))
	second := r.pair(id, "c2", rollback.SubDAG)
	r.execute(second)
	other := r.pair(id, "2", rollback.Single)
	other.Checkpoint, other.By, other.Coordinator = "c2", "spiffe://example.com/other", true
	conflict := (*rollback.ConflictError)(nil)
	if _, err := r.Execute(ctx, other, nil); !errors.As(err, &conflict) || conflict.Winner != id {
		t.Errorf("%v", err)
	}
	close(hold)
	wantEnd(t, r.wait(id), rollback.Completed, "c2=completed c1=completed")
	wantEnd(t, r.wait(second.ID), rollback.Completed, "c2=completed")
	if keys := r.world.effects["c2"]; len(keys) != 1 {
		t.Errorf("c2 was undone %d times", len(keys))
	}
}

// What has changed otherwise than by another part of the same rollback is another plan: here somebody
// else has undone a call.
func TestReservedPlanThatAnotherHasChanged(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	first := request("c2", rollback.Single)
	r.world.answers["c2"] = rollback.Result{Reason: rollback.ReasonRefused}
	wantEnd(t, r.run(first), rollback.Failed, "c2=failed(refused)")
	q := request("c1", rollback.SubDAG)
	r.prepare(q)
	m, err := r.checkpoints.Mark(ctx, "c2")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.checkpoints.Advance(ctx, "c2", m, checkpoint.Step{To: checkpoint.Undone, Rollback: first.ID}); err != nil {
		t.Fatal(err)
	}
	var changed *rollback.PlanChangedError
	if _, err := r.Execute(ctx, q, nil); !errors.As(err, &changed) {
		t.Errorf("%v", err)
	}
}

// A part whose plan has changed otherwise is refused as ever.
func TestPartThatChanged(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	e, h := r.claimed("2", checkpoint.Restore, "1")
	r.start()
	q := request("c1", rollback.SubDAG)
	q.PartOf = "00000000-0000-4000-8000-000000000001"
	r.prepare(q)
	r.settle("2", e, h, execution.Completed)
	if _, err := r.Execute(ctx, q, nil); err == nil {
		t.Error("another plan was accepted")
	}
}

// A participant that never answers counts as unreachable after 10 s, and is asked again until
// then.
func TestParticipantUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := undoNewRig(t)
		began, tries := time.Now(), 0
		r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
			tries++
			return nil, &rollback.SendError{NotSent: true, Err: errors.New("no connection")}
		}
		one := task(checkpoint.Delegate, rollback.Spec{Guard: "g", Delegate: "https://b.example/rollback", Agent: "spiffe://b"})
		one.Checkpoint.Result = &checkpoint.Result{Status: 200}
		one.Checkpoint.Result.Answer, _ = rollback.NamedCheckpoint("b1")
		one.Due = began.Add(10 * time.Second)
		obstacle, err := r.Prepare(ctx, one)
		if err != nil || obstacle != "unreachable" || tries < 2 || time.Since(began) > 12*time.Second {
			t.Errorf("%q, %v: %d tries in %v", obstacle, err, tries, time.Since(began))
		}
	})
}

// C-4.3.2-e: prepare_timeout is the silence of a participant. Parts that wait for their turn are no sign
// of it, while it answers others; all of them together are bounded by the time of a reservation. Who is
// silent is not asked for his other parts.
func TestPrepareTimeoutIsSilence(t *testing.T) {
	const parallel, parts = 8, 80
	for name, test := range map[string]struct {
		answers         time.Duration // what each takes; 0 is none
		prepared, asked int
		over            time.Duration
	}{
		"slow":    {5 * time.Second, parts, parts, 50 * time.Second},
		"silent":  {0, 0, parallel, rollback.DefaultPrepareTimeout},
		"endless": {9 * time.Second, 6 * parallel, 7 * parallel, rollback.DefaultReservation},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				for i := range parts {
					r.made(fmt.Sprint(i+2), checkpoint.Delegate, execution.Completed, "1")
				}
				r.start()
				var asked atomic.Int64
				r.undoer.asks = func(ctx context.Context, _ rollback.Task) {
					asked.Add(1)
					answer := (<-chan time.Time)(nil)
					if test.answers > 0 {
						answer = time.After(test.answers)
					}
					select {
					case <-answer:
					case <-ctx.Done():
					}
				}
				began := time.Now()
				p, err := r.Prepare(ctx, request("c1", rollback.SubDAG))
				if err != nil || len(p.Obstacles) != parts-test.prepared || r.world.prepared != test.prepared || int(asked.Load()) != test.asked {
					t.Errorf("%v: %d obstacles, %d prepared, %d asked", err, len(p.Obstacles), r.world.prepared, asked.Load())
				}
				for _, o := range p.Obstacles {
					if o.Reason != "unreachable" {
						t.Errorf("%+v", o)
					}
				}
				if took := time.Since(began); took != test.over {
					t.Errorf("it took %v, not %v", took, test.over)
				}
			})
		})
	}
}

// signedAs is the header of an answer with a token of a result.
func signedAs(status, effect string) http.Header {
	claims := fmt.Sprintf(`{"exec_act":"rollback_complete","ext":{"cascade.status":%q,"agent_guard.effect":%q}}`, status, effect)
	return http.Header{"Execution-Context": {"h." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".s, another.token.s"}}
}

// P6: what a participant has signed counts, whatever the rest of its answer says; what nobody has signed
// is of unknown effect, success and failure alike.
func TestParticipantsWordIsItsToken(t *testing.T) {
	for _, c := range []struct {
		proven         bool
		status         int
		signed, effect string
		body           string
		done, unknown  bool
		reason         rollback.Reason
	}{
		{true, 200, "completed", "", `{"status":"completed"}`, true, false, ""},
		{true, 200, "completed", "", `{"status":"failed"}`, true, false, ""},
		{true, 409, "completed", "", `{"status":"failed"}`, true, false, ""},
		{true, 200, "failed", "", `{"status":"completed"}`, false, false, rollback.ReasonRefused},
		{true, 200, "escalated", "", `{"status":"completed"}`, false, false, rollback.ReasonEscalated},
		{true, 200, "partial", "", `{"status":"completed"}`, false, true, rollback.ReasonPartial},
		{true, 200, "completed", "unknown", `{"status":"completed"}`, false, true, rollback.ReasonUnexpected},
		{true, 200, "", "", `{"status":"completed"}`, false, true, rollback.ReasonUnexpected},
		{false, 200, "completed", "", `{"status":"completed"}`, false, true, rollback.ReasonUnexpected},
		{false, 200, "failed", "", `{"status":"failed"}`, false, true, rollback.ReasonUnexpected},
		{false, 200, "escalated", "", `{"status":"escalated"}`, false, true, rollback.ReasonUnexpected},
		{false, 410, "", "", "", false, true, rollback.ReasonUnexpected},
		{false, 409, "", "", `{"status":"failed"}`, false, false, rollback.ReasonRefused},
		{false, 403, "", "", "", false, false, rollback.ReasonUnauthorized},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := undoNewRig(t)
			one := task(checkpoint.Delegate, rollback.Spec{Guard: "g", Delegate: "https://b.example/rollback", Agent: "spiffe://b"})
			one.Checkpoint.Result = &checkpoint.Result{Status: 200}
			one.Checkpoint.Result.Answer, _ = rollback.NamedCheckpoint("b1")
			one.Due = time.Now().Add(time.Minute)
			r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
				return &rollback.Answer{Status: c.status, Header: signedAs(c.signed, c.effect), Body: []byte(c.body), Proven: c.proven}, nil
			}
			for range 2 { // the second time from the record
				if got, err := r.Undo(ctx, one); err != nil || got.Done != c.done || got.Unknown != c.unknown || got.Reason != c.reason {
					t.Errorf("%+v: %+v, %v", c, got, err)
				}
			}
		})
	}
}

// ADR 0086: who takes part in a part of a rollback is asked for parts of the whole, and each
// checkpoint has one id in it, whoever asks on the way.
func TestParticipantBehindParticipant(t *testing.T) {
	asked := func(rollbackID, partOf string) (id, of string) {
		t.Helper()
		r := undoNewRig(t)
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			var body struct {
				ID     string `json:"rollback_id"`
				PartOf string `json:"part_of"`
			}
			if err := json.Unmarshal(o.Body, &body); err != nil {
				t.Fatal(err)
			}
			if id, of = body.ID, body.PartOf; of != "urn:uuid:"+o.Participant.PartOf {
				t.Errorf("a part of %s in the body, of %s in the token", of, o.Participant.PartOf)
			}
			return &rollback.Answer{Status: 200, Body: []byte(`{"status":"prepared"}`)}, nil
		}
		one := task(checkpoint.Delegate, rollback.Spec{Guard: "g", Delegate: "https://b.example/rollback", Agent: "spiffe://b"})
		one.Checkpoint.Result = &checkpoint.Result{Status: 200}
		one.Checkpoint.Result.Answer, _ = rollback.NamedCheckpoint("b1")
		one.Rollback, one.PartOf = rollbackID, partOf
		if obstacle, err := r.Prepare(ctx, one); err != nil || obstacle != "" {
			t.Fatalf("%q, %v", obstacle, err)
		}
		return id, of
	}
	const whole, part = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
	id, of := asked(whole, "")
	behind, behindOf := asked(part, whole)
	if of != "urn:uuid:"+whole || behindOf != of || behind != id {
		t.Errorf("%s of %s, and behind a participant %s of %s", id, of, behind, behindOf)
	}
	if other, _ := asked(part, ""); other == id {
		t.Error("another rollback has the same id for its part")
	}
}

// How long participants are asked is what the configuration of the time says.
func TestPrepareTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Delegate, execution.Completed)
		var asked []time.Duration
		r.undoer.asks = func(ctx context.Context, _ rollback.Task) {
			began := time.Now()
			<-ctx.Done()
			asked = append(asked, time.Since(began))
		}
		for _, r.prepareTimeout = range []time.Duration{0, 3 * time.Second} {
			if _, err := r.Prepare(ctx, request("c1", rollback.SubDAG)); err != nil {
				t.Fatal(err)
			}
		}
		if want := []time.Duration{rollback.DefaultPrepareTimeout, 3 * time.Second}; !slices.Equal(asked, want) {
			t.Errorf("%v, want %v", asked, want)
		}
	})
}

// Targets that do not answer take nothing of the time in which participants may prepare.
func TestTargetsAndParticipantsHaveTimesOfTheirOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		for i := range 8 {
			r.made(fmt.Sprint("2", i), checkpoint.Restore, execution.Completed, "1")
		}
		r.made("3", checkpoint.Delegate, execution.Completed, "1")
		r.prepareTimeout = rollback.DefaultReservation
		r.undoer.reads = func(ctx context.Context) { <-ctx.Done() }
		r.undoer.asks = func(ctx context.Context, task rollback.Task) {
			if left := time.Until(task.Due); left != rollback.DefaultReservation || ctx.Err() != nil {
				t.Errorf("%v are left, %v", left, ctx.Err())
			}
		}
		r.start()
		q := request("c1", rollback.SubDAG)
		if p, err := r.Prepare(ctx, q); err != nil || !p.Ready() {
			t.Errorf("%+v, %v", p, err)
		}
		if done := r.run(q); done.Status != rollback.Completed {
			t.Errorf("%+v", done)
		}
	})
}

// Where a rollback is given up, those who have prepared for it, or may have, are told so at once:
// one cannot prepare, the plan has changed, another one takes precedence, or it is aborted.
func TestParticipantsAreReleased(t *testing.T) {
	for name, test := range map[string]struct {
		obstacles map[string]string
		give      func(r *rig, q rollback.Request)
		want      []string
	}{
		"another cannot prepare": {map[string]string{"c2": "irreversible"}, func(r *rig, q rollback.Request) {
			p, err := r.Prepare(ctx, q)
			if err != nil || p.Ready() {
				r.t.Fatalf("%+v, %v", p, err)
			}
		}, nil}, // it was only looked at
		"another cannot any more": {nil, func(r *rig, q rollback.Request) {
			p, err := r.Prepare(ctx, q)
			r.world.obstacles = map[string]string{"c2": "irreversible"}
			if err == nil {
				p, err = r.Reserve(ctx, p, time.Minute)
			}
			if err != nil || p.Ready() {
				r.t.Fatalf("%+v, %v", p, err)
			}
		}, []string{"c1"}},
		"another is silent": {nil, func(r *rig, q rollback.Request) {
			p, err := r.Prepare(ctx, q)
			r.world.obstacles = map[string]string{"c2": "unreachable"}
			if err == nil {
				p, err = r.Reserve(ctx, p, time.Minute)
			}
			if err != nil || p.Ready() {
				r.t.Fatalf("%+v, %v", p, err)
			}
		}, []string{"c1", "c2"}},
		"the plan has changed": {nil, func(r *rig, q rollback.Request) {
			r.prepare(q)
			r.made("3", checkpoint.Restore, execution.Completed, "2")
			if _, err := r.Execute(ctx, q, nil); !errors.As(err, new(*rollback.PlanChangedError)) {
				r.t.Fatal(err)
			}
		}, []string{"c1", "c2"}},
		"a wider one takes its place": {nil, func(r *rig, q rollback.Request) {
			r.prepare(q)
			wide := request("c1", rollback.FullWorkflow)
			wide.Coordinator = true
			r.prepare(wide)
		}, []string{"c1", "c2"}},
		"it is aborted": {map[string]string{"c1": "irreversible"}, func(r *rig, q rollback.Request) {
			r.execute(q)
			r.says(r.question(q.ID), false)
			wantEnd(r.t, r.wait(q.ID), rollback.Escalated, "c2=escalated(denied) c1=escalated(irreversible)")
		}, []string{"c2"}},
		"it is refused": {nil, func(r *rig, q rollback.Request) {
			q.Planned = strings.Repeat("\x00", 32) // a hash as any other
			if _, err := r.Execute(ctx, q, nil); !errors.As(err, new(*rollback.PlanChangedError)) {
				r.t.Fatal(err)
			}
		}, nil}, // nobody was asked
		"it is not accepted": {nil, func(r *rig, q rollback.Request) {
			lost := store.Write{Key: []byte("z"), If: store.VersionIs(7)}
			if _, err := r.Execute(ctx, q, writing(lost)); !errors.As(err, new(*store.Conflict)) {
				r.t.Fatal(err)
			}
		}, []string{"c1", "c2"}},
		"it is carried out": {nil, func(r *rig, q rollback.Request) {
			r.prepare(q)
			wantEnd(r.t, r.run(q), rollback.Completed, "c2=completed c1=completed")
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Delegate, execution.Completed)
				r.made("2", checkpoint.Delegate, execution.Completed, "1")
				r.start()
				r.undoer.releases = make(chan string, 10)
				r.world.obstacles = test.obstacles
				test.give(r, request("c1", rollback.SubDAG))
				synctest.Wait()
				close(r.undoer.releases)
				var got []string
				for id := range r.undoer.releases {
					got = append(got, id)
				}
				slices.Sort(got)
				got = slices.Compact(got) // a plan that has changed is given up where it is found and by who asked, which says nothing new
				if !slices.Equal(got, test.want) {
					t.Errorf("%q, want %q", got, test.want)
				}
				r.undoer.releases = nil
			})
		})
	}
}

// A release that is on its way when the rollback is prepared again ends first, and so does not end
// what is reserved then. One that reaches nobody is given up after the time of a prepare.
func TestReleaseOnItsWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Delegate, execution.Completed)
		r.start()
		q := request("c1", rollback.SubDAG)
		r.undoer.releases = make(chan string) // nobody takes it
		began := time.Now()
		r.prepare(q)
		if err := r.Release(ctx, q); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		r.prepare(q)
		synctest.Wait()
		select {
		case id := <-r.undoer.releases:
			t.Errorf("%s is released after it was prepared", id)
		default:
		}
		if err := r.Release(ctx, q); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rollback.DefaultPrepareTimeout + time.Second)
		synctest.Wait()
		select {
		case id := <-r.undoer.releases:
			t.Errorf("%s is released %s later", id, time.Since(began))
		default:
		}
	})
}

// A participant is told until it has answered, with the request that it has prepared.
func TestParticipantIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := undoNewRig(t)
		one := task(checkpoint.Delegate, rollback.Spec{Guard: "g", Delegate: "https://b.example/rollback", Agent: "spiffe://b"})
		one.Checkpoint.Result = &checkpoint.Result{Status: 200}
		one.Checkpoint.Result.Answer, _ = rollback.NamedCheckpoint("b1")
		one.Due = time.Now().Add(10 * time.Second)
		for _, last := range []int{200, 403, 404, 409} {
			var seen []string
			r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
				seen = append(seen, o.Method+" "+o.URL+" "+string(o.Body))
				if len(seen) == 1 {
					return nil, &rollback.SendError{NotSent: true, Err: errors.New("no connection")}
				}
				return &rollback.Answer{Status: last, Header: http.Header{}}, nil
			}
			if err := r.Release(ctx, one); err != nil {
				t.Fatal(err)
			}
			if len(seen) != 2 || seen[0] != seen[1] || !strings.HasPrefix(seen[0], "POST https://b.example/rollback/prepare ") ||
				!strings.Contains(seen[0], `"phase":"release"`) || !strings.Contains(seen[0], `"checkpoint_id":"b1"`) {
				t.Errorf("%d: %q", last, seen)
			}
		}
	})
}

// C-4.3.1-e, C-4.1.1-d: a checkpoint that an agent has made itself is asked for at its rollback_uri,
// in both phases and in its place in the order, if the configuration names the agent; else it is
// left to a person. Whom it may be sent to is decided anew in each life.
func TestForeignCheckpointsAreAskedFor(t *testing.T) {
	const remote, uri = "spiffe://example.com/remote", "https://remote.example/rollback"
	theirs := func(r *rig) {
		r.made("1", checkpoint.Restore, execution.Completed)
		r.action("2", "1")
		r.known("x2", CheckpointNode, rollback.Ran, rollback.Checkpoint{Issuer: remote, RollbackURI: uri, Reversible: true, Parents: []string{"2"}}, "2")
		r.made("3", checkpoint.Restore, execution.Completed, "x2")
		r.participants = func(issuer, at string) (string, error) {
			if issuer != remote {
				return "", nil
			}
			return at, nil
		}
		r.start()
	}
	t.Run("asked", func(t *testing.T) {
		r := newRig(t)
		theirs(r)
		r.undoer.seen = func(task rollback.Task) {
			spec, err := rollback.ParseSpec(task.Checkpoint.Snapshot.Undo)
			if foreign := task.Checkpoint.Snapshot.ID == "x2"; err == nil && foreign != task.Foreign || foreign && (err != nil || spec.Delegate != uri || spec.Agent != remote) {
				t.Errorf("%+v, %+v, %v", task, spec, err)
			}
		}
		q := request("c1", rollback.SubDAG)
		if p := r.prepare(q); !p.Ready() || r.world.prepared != 2 { // a look, and then
			t.Fatalf("%+v, asked %d times", p, r.world.prepared)
		}
		wantEnd(t, r.run(q), rollback.Completed, "c3=completed x2=completed c1=completed")
		if got := r.world.order; !slices.Equal(got, []string{"c3", "x2", "c1"}) {
			t.Errorf("undone in the order %q", got)
		}
	})
	t.Run("cannot prepare", func(t *testing.T) {
		r := newRig(t)
		theirs(r)
		r.world.obstacles = map[string]string{"x2": "unreachable"}
		wantEnd(t, r.run(request("c1", rollback.SubDAG)), rollback.Partial, "c3=completed x2=escalated(unreachable) c1=completed")
		if len(r.world.effects["x2"]) > 0 {
			t.Error("it was asked to execute")
		}
	})
	t.Run("as the target", func(t *testing.T) {
		r := newRig(t)
		theirs(r)
		wantEnd(t, r.run(request("x2", rollback.SubDAG)), rollback.Completed, "c3=completed x2=completed")
		wantEnd(t, r.run(request("x2", rollback.SubDAG)), rollback.Completed, "c3=completed x2=completed")
		if n := len(r.world.effects["x2"]); n != 1 {
			t.Errorf("undone %d times", n)
		}
	})
	t.Run("not named any more", func(t *testing.T) {
		r := newRig(t)
		theirs(r)
		r.undoer.block, r.undoer.asked = true, make(chan string, 1)
		r.world.answers = map[string]rollback.Result{}
		q := request("x2", rollback.Single)
		r.execute(q)
		<-r.undoer.asked
		r.participants = nil
		r.restart()
		done := r.wait(q.ID)
		wantEnd(t, done, rollback.Escalated, "x2=escalated(foreign)")
		if !done.Unknown {
			t.Error("P6: it may have been asked")
		}
	})
	t.Run("not named any more once it has begun", func(t *testing.T) {
		r := newRig(t)
		theirs(r)
		named := r.participants
		r.participants = func(issuer, at string) (string, error) {
			if m, err := r.checkpoints.Mark(ctx, "x2"); err != nil || m.State == checkpoint.Undoing {
				return "", err
			}
			return named(issuer, at)
		}
		wantEnd(t, r.run(request("x2", rollback.Single)), rollback.Escalated, "x2=escalated(foreign)")
		if len(r.world.effects["x2"]) > 0 {
			t.Error("it was asked to execute")
		}
	})
	t.Run("no configuration yet", func(t *testing.T) {
		r := newRig(t)
		theirs(r)
		r.participants = func(string, string) (string, error) { return "", errors.New("not open") }
		if _, err := r.Prepare(ctx, request("c1", rollback.SubDAG)); !errors.Is(err, rollback.ErrStore) {
			t.Errorf("P4: %v", err)
		}
	})
}

// C-4.3.1-e: what a participant has told of is in the plan, which is prepared and carried out without
// asking once more; a rollback of one checkpoint asks nobody, nor does a part of a rollback, and who
// may not ask for the rollback asks nobody either.
func TestParticipantsAreAskedForWhatTheyHave(t *testing.T) {
	const remote, uri = "spiffe://example.com/remote", "https://remote.example/rollback"
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.participants = func(_, at string) (string, error) { return at, nil }
	asked, said := 0, false
	r.discover = func(workflow string) (bool, []rollback.Obstacle, error) {
		if asked++; workflow != "w" || said {
			return false, nil, nil
		}
		said = true
		r.ledger.mu.Lock()
		defer r.ledger.mu.Unlock()
		r.action("2", "1")
		r.known("x2", CheckpointNode, rollback.Ran, rollback.Checkpoint{Issuer: remote, RollbackURI: uri, Reversible: true, Parents: []string{"2"}}, "2")
		return true, nil, nil
	}
	r.start()
	single, part, stranger := request("c1", rollback.Single), request("c1", rollback.SubDAG), request("c1", rollback.SubDAG)
	part.PartOf, single.KeepDependants, stranger.By = "00000000-0000-4000-8000-000000000001", true, "spiffe://example.com/stranger"
	for _, q := range []rollback.Request{single, part} {
		if _, err := r.Plan(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Plan(ctx, stranger); !errors.Is(err, rollback.ErrNotInWorkflow) || asked > 0 {
		t.Fatalf("P3: %v, asked %d times", err, asked)
	}
	q := request("c1", rollback.SubDAG)
	if p := r.prepare(q); !p.Ready() || len(p.Rollback.Steps) != 2 || asked != 1 {
		t.Fatalf("%+v, asked %d times", p, asked)
	}
	if _, err := r.Execute(ctx, q, nil); err != nil || asked != 1 {
		t.Fatalf("%v, asked %d times", err, asked)
	}
	wantEnd(t, r.wait(q.ID), rollback.Completed, "x2=completed c1=completed")
}

// P6: a participant that does not say what it has may have more. The rollback cannot be prepared, is not
// completed, in its next life either, and with the policy of all or nothing asks people first.
func TestParticipantsThatDoNotSay(t *testing.T) {
	silent := []rollback.Obstacle{{Agent: "spiffe://example.com/remote", Reason: "unreachable"}}
	for _, whole := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			asked := 0
			r.discover = func(string) (bool, []rollback.Obstacle, error) { asked++; return false, silent, nil }
			q := request("c1", rollback.FullWorkflow)
			q.Coordinator, q.Whole = true, whole
			p, err := r.Prepare(ctx, q)
			if err != nil || p.Ready() || !slices.Equal(p.Obstacles, silent) {
				t.Fatalf("%+v, %v", p, err)
			}
			r.execute(q)
			asked = 0
			r.restart()
			if whole {
				r.says(r.question(q.ID), true)
			}
			done := r.wait(q.ID)
			wantEnd(t, done, rollback.Partial, "c1=completed")
			if !done.Unknown || !slices.Equal(done.Unreached, silent) || len(done.Escalations) == 0 || asked > 0 {
				t.Errorf("asked %d times: %+v", asked, done)
			}
			stop(r.Coordinator)
		})
	}
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.discover = func(string) (bool, []rollback.Obstacle, error) { return false, nil, errors.New("not open") }
	if _, err := r.Prepare(ctx, request("c1", rollback.SubDAG)); !errors.Is(err, rollback.ErrStore) {
		t.Errorf("P4: %v", err)
	}
}

// Cascade 4.3.4 over gateways: every participant decides between the parts of two rollbacks by the
// wholes, in whichever order they come, and not by its own clock; so one of them has all. The loser
// is told the id of the whole that has won.
func TestCascade434OverGateways(t *testing.T) {
	const one, two = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
	noon := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	for name, test := range map[string]struct{ wins, loses rollback.Precedence }{
		"earlier":     {rollback.Precedence{ID: two, Scope: rollback.SubDAG, Asked: noon}, rollback.Precedence{ID: one, Scope: rollback.SubDAG, Asked: noon.Add(1)}},
		"equal times": {rollback.Precedence{ID: one, Scope: rollback.SubDAG, Asked: noon}, rollback.Precedence{ID: two, Scope: rollback.SubDAG, Asked: noon}},
		"wider":       {rollback.Precedence{ID: two, Scope: rollback.FullWorkflow, Asked: noon.Add(time.Hour)}, rollback.Precedence{ID: one, Scope: rollback.SubDAG, Asked: noon}},
	} {
		for _, order := range []string{"the winner first", "the loser first"} {
			t.Run(name+", "+order, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.made("2", checkpoint.Restore, execution.Completed, "1")
				r.start()
				part := func(target string, p rollback.Precedence) rollback.Request {
					q := request(target, rollback.SubDAG)
					q.By, q.Coordinator, q.PartOf, q.Precedence = "spiffe://example.com/"+p.ID, true, p.ID, p
					return q
				}
				wins, loses := part("c1", test.wins), part("c2", test.loses)
				if order == "the loser first" {
					if p := r.prepare(loses); !p.Ready() || p.Rollback.Until.IsZero() {
						t.Fatalf("%+v", p)
					}
				}
				if p := r.prepare(wins); !p.Ready() || p.Rollback.Until.IsZero() {
					t.Fatalf("%+v", p)
				}
				lost := func(err error) {
					t.Helper()
					conflict := (*rollback.ConflictError)(nil)
					if !errors.As(err, &conflict) || conflict.Winner != test.wins.ID {
						t.Errorf("%v, want a conflict with %s", err, test.wins.ID)
					}
				}
				lost(r.prepare(loses).Refusal)
				_, err := r.Execute(ctx, loses, nil)
				lost(err)
				r.restart()
				_, err = r.Execute(ctx, loses, nil)
				lost(err)
				wantEnd(t, r.run(wins), rollback.Completed, "c2=completed c1=completed")
				wantEnd(t, r.run(loses), rollback.Completed, "c2=completed") // nothing is left of it
			})
		}
	}
}

// What was begun at a participant goes on to its end, and the one that takes precedence waits for it:
// each has a result of its own, that its coordinator believes, and nothing is undone twice.
func TestCascade434BegunAtAParticipant(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	hold := make(chan struct{})
	r.world.hold["c2"] = hold
	part := func(target, of string, scope rollback.Scope, after time.Duration) rollback.Request {
		q := request(target, rollback.SubDAG)
		q.By, q.Coordinator, q.PartOf = "spiffe://example.com/"+of, true, of
		q.Precedence = rollback.Precedence{ID: of, Scope: scope, Asked: r.now().Add(after)}
		return q
	}
	loses := part("c2", "00000000-0000-4000-8000-000000000001", rollback.SubDAG, 0)
	wins := part("c1", "00000000-0000-4000-8000-000000000002", rollback.FullWorkflow, time.Hour)
	r.execute(loses)
	r.execute(wins)
	close(hold)
	for _, end := range []struct {
		q     rollback.Request
		steps string
	}{{loses, "c2=completed"}, {wins, "c2=completed c1=completed"}} {
		done := r.wait(end.q.ID)
		wantEnd(t, done, rollback.Completed, end.steps)
		if done.Joined != "" {
			t.Errorf("it has the result of %s", done.Joined)
		}
	}
	for id, keys := range r.world.effects {
		if len(keys) != 1 {
			t.Errorf("%s was undone %d times", id, len(keys))
		}
	}
}

// Cascade 4.3.4: a rollback that loses at one participant is refused as a whole, with the id of the
// one that has won, and those who have prepared for it are released.
func TestCascade434LostAtAParticipant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const winner = "00000000-0000-4000-8000-000000000001"
		r := newRig(t)
		r.made("1", checkpoint.Delegate, execution.Completed)
		r.made("2", checkpoint.Delegate, execution.Completed, "1")
		r.start()
		r.undoer.releases = make(chan string, 10)
		lost := func(err error) {
			t.Helper()
			conflict := (*rollback.ConflictError)(nil)
			if !errors.As(err, &conflict) || conflict.Winner != winner {
				t.Errorf("%v, want a conflict with %s", err, winner)
			}
		}
		q := request("c1", rollback.SubDAG)
		p, err := r.Prepare(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		r.world.winners = map[string]string{"c2": winner}
		if p, err = r.Reserve(ctx, p, time.Minute); err != nil || !p.Rollback.Until.IsZero() {
			t.Fatalf("%+v, %v", p, err)
		}
		lost(p.Refusal)
		synctest.Wait() // a release that is on its way ends when it is prepared again
		lost(r.prepare(q).Refusal)
		_, err = r.Execute(ctx, q, nil)
		lost(err)
		synctest.Wait()
		if len(r.undoer.releases) != 4 || r.enters("w", "1") != nil {
			t.Errorf("%d are released", len(r.undoer.releases))
		}
		if _, err := r.Get(ctx, q.ID); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("it was accepted: %v", err)
		}
		r.world.winners = nil
		wantEnd(t, r.run(q), rollback.Completed, "c2=completed c1=completed")
	})
}

// Participants are told the same in both phases, and over restarts: what the rollback had when they
// were asked first.
func TestParticipantsAreToldThePrecedence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Delegate, execution.Completed)
		var seen []rollback.Precedence
		note := func(t rollback.Task) { seen = append(seen, t.Precedence) }
		r.undoer.asks = func(_ context.Context, t rollback.Task) { note(t); time.Sleep(time.Second) }
		r.undoer.seen = note
		r.start()
		q := request("c1", rollback.SubDAG)
		asked := r.now()
		r.prepare(q)
		r.undoer.block = true
		r.execute(q)
		synctest.Wait()
		stop(r.Coordinator)
		r.open()
		r.undoer.seen = note
		r.start()
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c1=completed")
		if len(seen) != 4 {
			t.Errorf("asked %d times", len(seen))
		}
		for _, p := range seen {
			if p.ID != q.ID || p.Scope != rollback.SubDAG || !p.Asked.Equal(asked) {
				t.Errorf("%+v, asked at %s", p, asked)
			}
		}
	})
}

// The answer of a participant where another rollback takes precedence: at prepare it names the one
// that has won, at execute the part is asked for again until that has ended.
func TestConflictAtAParticipant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const winner = "00000000-0000-4000-8000-000000000001"
		r := undoNewRig(t)
		one := task(checkpoint.Delegate, rollback.Spec{Guard: "g", Delegate: "https://b.example/rollback", Agent: "spiffe://b"})
		one.Checkpoint.Result = &checkpoint.Result{Status: 200}
		one.Checkpoint.Result.Answer, _ = rollback.NamedCheckpoint("b1")
		one.Due = time.Now().Add(time.Minute)
		one.Precedence = rollback.Precedence{ID: winner, Scope: rollback.SubDAG, Asked: time.Date(2026, 11, 25, 12, 0, 0, 1, time.UTC)}
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			if !strings.Contains(string(o.Body), `"precedence":{"rollback_id":"`+winner+`","scope":"sub_dag","asked":"2026-11-25T12:00:00.000000001Z"}`) {
				t.Errorf("%s", o.Body)
			}
			return &rollback.Answer{Status: 409, Header: http.Header{}, Body: []byte(`{"status":"cannot_prepare","reason_code":"conflict","conflicting_rollback_id":"urn:uuid:` + winner + `"}`)}, nil
		}
		conflict := (*rollback.ConflictError)(nil)
		if _, err := r.Prepare(ctx, one); !errors.As(err, &conflict) || conflict.Winner != winner {
			t.Errorf("%v", err)
		}
		tries := 0
		r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
			if tries++; tries < 3 {
				return &rollback.Answer{Status: 409, Header: http.Header{}, Body: []byte(`{"type":"/.well-known/cascade/problems/rollback-conflict","conflicting_rollback_id":"urn:uuid:` + winner + `"}`)}, nil
			}
			return &rollback.Answer{Status: 200, Header: signedAs("completed", ""), Proven: true}, nil
		}
		if got, err := r.Undo(ctx, one); err != nil || !got.Done || got.Unknown || tries != 3 {
			t.Errorf("%+v, %v: %d tries", got, err, tries)
		}
	})
}
