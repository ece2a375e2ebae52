package rollbacks_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	. "github.com/agent-guard/caddy-agent-guard/caddymodule/rollbacks"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// entry is what the ledger has under an id.
func (b *bench) entry(workflow, id string) *ect.Unverified {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	e, err := b.told.Log().Wait(ctx, workflow, id)
	if err != nil {
		b.t.Fatal(err)
	}
	u, err := ect.ParseInsecure(string(e.Payload))
	if err != nil {
		b.t.Fatal(err)
	}
	return u
}

// Cascade 4.4.1: a rollback follows from the error that caused it, else from the token
// that asked, else from its checkpoint; what the ledger does not hold is no parent.
func TestCascade441ParentOfTheStart(t *testing.T) {
	for name, workflow := range map[string]string{"in a workflow": uuid.NewString(), "in none": ""} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c := b.checkpoint(gateway, workflow, "x1")
			failure, request := b.token(alice, ect.Claims{Workflow: workflow}), b.token(alice, ect.Claims{Workflow: workflow})
			elsewhere := b.token(alice, ect.Claims{Workflow: uuid.NewString()})
			for _, test := range []struct {
				parents []string
				want    string
			}{
				{[]string{failure.ID(), request.ID()}, failure.ID()},
				{[]string{uuid.NewString(), request.ID()}, request.ID()},
				{[]string{elsewhere.ID(), "", "no id"}, c.ID()},
				{nil, c.ID()},
			} {
				r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: plan.Single}
				told, err := b.ledger.Started(t.Context(), r, test.parents)
				if err := b.commit(told, err); err != nil {
					t.Fatal(err)
				}
				if got := b.entry(workflow, told.ID()); fmt.Sprint(got.Parents()) != fmt.Sprint([]string{test.want}) || got.Issuer() != gateway {
					t.Errorf("%v: parents %v, want %s", test.parents, got.Parents(), test.want)
				}
			}
		})
	}
}

// The token that asks is recorded with the start, behind what led to it, and not before:
// else it would be a part of the workflow that lineage is judged by.
func TestRequestIsRecordedWithTheStart(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	c := b.checkpoint(gateway, workflow, "x1")
	issue := func(parents ...string) *ect.Token {
		token, err := b.issuers[alice].Issue(time.Now(), ect.Claims{Audience: []string{gateway}, Workflow: workflow, Action: "read", Parents: parents})
		if err != nil {
			t.Fatal(err)
		}
		b.told.Seen([]*ect.Token{token})
		return token
	}
	read := issue(c.ID())
	request := issue(read.ID())
	if nodes := b.nodes(workflow, ""); len(nodes) != 1 {
		t.Errorf("%d nodes before the rollback was accepted", len(nodes))
	}
	for range 2 { // another rollback that follows from the same request
		r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: plan.Single}
		told, err := b.ledger.Started(t.Context(), r, []string{request.ID()})
		if err := b.commit(told, err); err != nil {
			t.Fatal(err)
		}
		if got := b.entry(workflow, told.ID()); fmt.Sprint(got.Parents()) != fmt.Sprint([]string{request.ID()}) {
			t.Errorf("parents %v", got.Parents())
		}
	}
	if nodes := b.nodes(workflow, ""); len(nodes) != 5 || nodes[request.ID()].By != alice || nodes[read.ID()].By != alice {
		t.Errorf("%v", nodes)
	}
}

// P5: what was told is not told again, in this life or the next, and its id stays.
func TestP5ToldOnce(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	c := b.checkpoint(gateway, workflow, "x1")
	r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: plan.Single, Status: rollback.Failed}
	step := &rollback.Step{Checkpoint: c.ID(), Agent: gateway, Status: rollback.Failed, Attempts: 1}
	r.Steps = []rollback.Step{*step}
	ctx := t.Context()
	tellings := map[string]func() (rollback.Telling, error){
		"start":    func() (rollback.Telling, error) { return b.ledger.Started(ctx, r, nil) },
		"step":     func() (rollback.Telling, error) { return b.ledger.Stepped(ctx, r, step, checkpoint.Compensate) },
		"complete": func() (rollback.Telling, error) { return b.ledger.Completed(ctx, r) },
		"timeout": func() (rollback.Telling, error) {
			return b.ledger.Erred(ctx, r, c.ID(), "timeout", "Not done in time.")
		},
		"failed": func() (rollback.Telling, error) { return b.ledger.Erred(ctx, r, c.ID(), "action_failed", "Refused.") },
	}
	ids := map[string]string{}
	for name, tell := range tellings {
		first, err := tell()
		if err != nil {
			t.Fatal(err)
		}
		second, err := tell() // before the first has landed
		if err != nil || second.ID() != first.ID() || len(second.Writes()) == 0 {
			t.Fatalf("%s: %v", name, err)
		}
		if err := b.commit(first, nil); err != nil {
			t.Fatal(err)
		}
		if err := b.commit(second, nil); !errors.Is(err, ledger.ErrDuplicate) {
			t.Errorf("%s landed twice: %v", name, err)
		}
		third, err := tell()
		if err != nil || third.ID() != first.ID() || len(third.Writes()) != 0 || third.Done(nil) != nil {
			t.Errorf("%s, when it stands: %v", name, err)
		}
		if other := ids[first.ID()]; other != "" {
			t.Errorf("%s and %s have one id", name, other)
		}
		ids[first.ID()] = name
		b.entry(workflow, first.ID())
	}
	closing, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := b.told.Close(closing); err != nil {
		t.Fatal(err)
	}
	b.open()
	for name, tell := range tellings {
		told, err := tell()
		if err != nil || ids[told.ID()] != name || len(told.Writes()) != 0 {
			t.Errorf("%s in the next life: %v", name, err)
		}
	}
	b.mute = true
	for name, tell := range tellings {
		if _, err := tell(); !errors.Is(err, ErrNoIdentity) {
			t.Errorf("%s without an identity: %v", name, err)
		}
	}
}

// Cascade Figure 13: compensate where a compensation was sent, else rollback_complete.
func TestCascade442StepsOfEachWay(t *testing.T) {
	for _, test := range []struct {
		way      checkpoint.Way
		attempts int
		want     string
	}{
		{checkpoint.Compensate, 1, "compensate"}, {checkpoint.Compensate, 0, "rollback_complete"},
		{checkpoint.Restore, 1, "rollback_complete"}, {checkpoint.Delegate, 2, "rollback_complete"}, {checkpoint.Irreversible, 0, "rollback_complete"},
	} {
		b := newBench(t)
		workflow := uuid.NewString()
		c := b.checkpoint(gateway, workflow, "x1")
		r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow}
		told, err := b.ledger.Stepped(t.Context(), r, &rollback.Step{Checkpoint: c.ID(), Status: rollback.Completed, Attempts: test.attempts}, test.way)
		if err := b.commit(told, err); err != nil {
			t.Fatal(err)
		}
		if got := b.entry(workflow, told.ID()); got.Action() != test.want || got.Parents()[0] != c.ID() {
			t.Errorf("%s after %d attempts: %s below %v", test.way, test.attempts, got.Action(), got.Parents())
		}
	}
}

// Cascade 4.1.3, ATD "Workflow Boundary ECTs": with a rollback of the whole workflow this
// has ended, in the words of ATD, behind its start where somebody has told of that.
func TestCascade413WorkflowComplete(t *testing.T) {
	for status, want := range map[rollback.Status]string{
		rollback.Completed: "rolled_back", rollback.Partial: "partial", rollback.Escalated: "escalated", rollback.Failed: "failed",
	} {
		b := newBench(t)
		workflow := uuid.NewString()
		start := b.token(alice, ect.Claims{Workflow: workflow, Action: "workflow_start",
			Ext: new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "the flow").Text(ect.MemberDescription, "what it does")})
		c := b.checkpoint(gateway, workflow, "x1")
		b.nodes(workflow, "") // as a plan was made, before
		for _, scope := range []plan.Scope{plan.SubDAG, plan.FullWorkflow} {
			r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: c.ID(), Workflow: workflow, Scope: scope, Status: status}
			told, err := b.ledger.Completed(t.Context(), r)
			if err := b.commit(told, err); err != nil {
				t.Fatal(err)
			}
			id := b.told.WorkflowCompleteID(r.ID)
			if scope != plan.FullWorkflow {
				if told, err := b.told.Told(t.Context(), workflow, id); told || err != nil {
					t.Errorf("%s: told %v, %v", scope, told, err)
				}
				continue
			}
			got := b.entry(workflow, id)
			name, _ := got.Ext().Text(ect.MemberWorkflowName)
			said, _ := got.Ext().Text(ect.MemberTerminalStatus)
			elapsed, timed := got.Ext().Number(ect.MemberElapsed)
			if got.Event() != ect.EventWorkflowComplete || len(got.Lacks()) > 0 || name != "the flow" || said != want || !timed || elapsed < 0 ||
				fmt.Sprint(got.Parents()) != fmt.Sprint([]string{start.ID(), told.ID()}) {
				t.Errorf("%s %v: %q %q %v", got.Action(), got.Parents(), name, said, elapsed)
			}
		}
	}
}
