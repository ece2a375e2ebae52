package evidence_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// ATD "Workflow Boundary ECTs": a workflow begins with the first call or start that is recorded of it, also for
// another life of the gateway; its start is recorded once, and each of its ends once.
func TestBoundariesAreRecordedOnce(t *testing.T) {
	b, now := newBench(t), time.Now()
	begins := func(wid string, want bool) {
		t.Helper()
		if got, err := b.builder.Begins(t.Context(), wid); got != want || err != nil {
			t.Errorf("begins %v, %v; want %v", got, err, want)
		}
	}
	wid := uuid.NewString()
	begins(wid, true)
	c := call(wid)
	checkpoint, err := b.builder.Checkpoint(now, c)
	if err != nil {
		t.Fatal(err)
	}
	about := evidence.WorkflowStart{Checkpoint: checkpoint.ID(), Name: "trip", Description: "Book a trip", Nodes: 3}
	start, err := b.builder.WorkflowStart(now, c, &about)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Append(t.Context(), now, nil, checkpoint, start); err != nil {
		t.Fatal(err)
	}
	begins(wid, false)
	again, err := b.builder.WorkflowStart(now.Add(time.Hour), call(wid), &evidence.WorkflowStart{Checkpoint: uuid.NewString()})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Append(t.Context(), now, nil, again); !errors.Is(err, ledger.ErrDuplicate) {
		t.Errorf("a second start: %v", err)
	}
	token := b.entry(t, wid, start.ID())
	name, _ := token.Ext().Text(ect.MemberWorkflowName)
	nodes, _ := token.Ext().Number("cascade.node_count")
	if name != "trip" || nodes != 3 || len(token.Lacks()) > 0 || !slices.Equal(token.Parents(), []string{checkpoint.ID()}) {
		t.Errorf("%s", token.Payload())
	}

	// An agent's start, and an earlier call, are found after a restart.
	agents, earlier := uuid.NewString(), uuid.NewString()
	theirs := b.token(t, ect.Claims{Workflow: agents, Action: "workflow_start"})
	before, err := b.builder.Checkpoint(now, call(earlier))
	if err == nil {
		err = b.evidence.Append(t.Context(), now, []*ect.Token{theirs}, before)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.close(t)
	b.open(t)
	for _, begun := range []string{wid, agents, earlier} {
		begins(begun, false)
	}
	alone := uuid.NewString()
	if err := b.evidence.Append(t.Context(), now, []*ect.Token{b.token(t, ect.Claims{Workflow: alone})}); err != nil {
		t.Fatal(err)
	}
	b.close(t)
	b.open(t)
	begins(alone, true) // a token without a call

	end := func() error {
		t.Helper()
		d, err := b.builder.WorkflowEnd(now.Add(time.Minute), &evidence.WorkflowEnd{Workflow: wid, Start: start.ID(), Began: now, Status: "partial"})
		if err != nil {
			t.Fatal(err)
		}
		if err = b.evidence.Append(t.Context(), now, nil, d); err == nil {
			token := b.entry(t, wid, d.ID())
			status, _ := token.Ext().Text(ect.MemberTerminalStatus)
			elapsed, _ := token.Ext().Number(ect.MemberElapsed)
			if status != "partial" || elapsed < 59 || len(token.Lacks()) > 0 || !slices.Equal(token.Parents(), []string{start.ID()}) {
				t.Errorf("%s", token.Payload())
			}
		}
		return err
	}
	if first, twice := end(), end(); first != nil || !errors.Is(twice, ledger.ErrDuplicate) {
		t.Errorf("%v, %v", first, twice)
	}
}

// No end is recorded beside a call that has just begun: its claim has rewritten the note that the end is awaited.
func TestNoEndBesideANewCall(t *testing.T) {
	b, now, wid := newBench(t), time.Now(), uuid.NewString()
	commit := func(w store.Write) error {
		_, err := b.store.Commit(t.Context(), w)
		return err
	}
	since := func() store.Version {
		t.Helper()
		v, err := b.evidence.OpenSince(t.Context(), wid)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	var conflict *store.Conflict
	if since() != 0 || commit(b.evidence.Closed(wid, 0)) != nil {
		t.Error("nothing is awaited, and an end conflicts")
	}
	if err := commit(b.evidence.Opened(now, wid)); err != nil {
		t.Fatal(err)
	}
	if err := commit(b.evidence.Closed(wid, 0)); !errors.As(err, &conflict) {
		t.Errorf("a call has begun since: %v", err)
	}
	read := since()
	if err := commit(b.evidence.Opened(now, wid)); err != nil {
		t.Fatal(err)
	}
	if err := commit(b.evidence.Closed(wid, read)); !errors.As(err, &conflict) {
		t.Errorf("another call has begun since: %v", err)
	}
	// The next life finds it, also under a newer key.
	if _, err := b.sealer.Rotate(textFile(t, b.sealer), func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	ids := b.sealer.KeyIDs()
	for kept, err := range b.store.Scan(t.Context(), store.Prefix([]byte("y"))) {
		if err != nil || b.sealer.KeyOf(kept.Value) != ids[len(ids)-1] {
			t.Errorf("not sealed anew: %v", err)
		}
	}
	b.close(t)
	b.open(t)
	if open, err := b.evidence.OpenWorkflows(t.Context(), 10); !slices.Equal(open, []string{wid}) || err != nil {
		t.Errorf("%v, %v", open, err)
	}
	if err := commit(b.evidence.Closed(wid, since())); err != nil || since() != 0 {
		t.Errorf("%v", err)
	}
}
