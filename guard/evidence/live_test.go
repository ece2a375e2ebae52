package evidence_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func keyOf(name string) (k execution.Key) {
	copy(k[:], name)
	return k
}

// waitsFor says what a token waits for that names these ids as its parents.
func (b *rollbackBench) waitsFor(wid string, parents ...string) string {
	b.t.Helper()
	text := ""
	if err := b.evidence.Live(b.t.Context(), b.recorder.EventBuilder, wid, func(l *plan.Live) {
		for _, t := range l.Holding(parents) {
			text += string(t.State) + " " + string(t.Detail)
		}
	}); err != nil {
		b.t.Fatal(err)
	}
	return text
}

// calls records the checkpoint of a call, and returns how to record its outcome.
func (b *rollbackBench) calls(wid, parent string) func(verdict execution.Verdict) {
	b.t.Helper()
	c := &Call{Key: keyOf(parent), Action: "act", Workflow: wid, Parents: []string{parent}, TTL: time.Hour, Reversible: true}
	now := time.Now()
	draft, err := b.recorder.EventBuilder.Checkpoint(now, c)
	if err == nil {
		err = b.evidence.Append(b.t.Context(), now, nil, draft)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return func(verdict execution.Verdict) {
		drafts, err := b.recorder.EventBuilder.Outcome(now, c, &Outcome{Checkpoint: draft.ID(), Verdict: verdict, Status: 200})
		if err == nil {
			err = b.evidence.Append(b.t.Context(), now, nil, drafts...)
		}
		if err != nil {
			b.t.Error(err)
		}
	}
}

// The states follow the ledger: whoever sees a commit end finds it counted, at once and after a restart, whether
// events are signed later or at once.
func TestLiveFollowsTheLedger(t *testing.T) {
	for _, later := range []bool{true, false} {
		b := newRollbackBench(t)
		if !later {
			b.signAtOnce()
		}
		wid := uuid.NewString()
		want := func(id, state string) {
			t.Helper()
			if got := b.waitsFor(wid, id); got != state {
				t.Fatalf("%s: %q, want %q (signed later: %v)", id, got, state, later)
			}
		}
		one, two := b.token(alice, ect.Claims{Workflow: wid}), b.token(alice, ect.Claims{Workflow: wid})
		want(one.ID(), "") // no call
		settle := b.calls(wid, one.ID())
		want(one.ID(), "running ")
		doubt := b.calls(wid, two.ID())
		settle(execution.Completed)
		want(one.ID(), "")
		doubt(execution.InDoubt)
		want(two.ID(), "failed in_doubt")
		if err := b.evidence.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		b.open()
		want(one.ID(), "")
		want(two.ID(), "failed in_doubt")
	}
}

// Beside calls that end, every reader finds what has ended before it began to read: also who reads the workflow
// from the ledger meanwhile.
func TestLiveBesideCommits(t *testing.T) {
	b := newRollbackBench(t)
	wid := uuid.NewString()
	var all sync.WaitGroup
	for range 16 {
		token := b.token(alice, ect.Claims{Workflow: wid})
		settle := b.calls(wid, token.ID())
		all.Go(func() {
			settle(execution.Completed)
			if got := b.waitsFor(wid, token.ID()); got != "" {
				t.Errorf("%q after the outcome was recorded", got)
			}
		})
	}
	all.Wait()
}

// A workflow whose latest event nobody knows to be recorded is read again.
func TestLiveAfterAnUnknownCommit(t *testing.T) {
	b := newRollbackBench(t)
	wid := uuid.NewString()
	b.calls(wid, b.token(alice, ect.Claims{Workflow: wid}).ID())
	b.waitsFor(wid)
	before := b.evidence.LiveRecords()
	draft, err := b.recorder.EventBuilder.Checkpoint(time.Now(), &Call{Action: "act", Workflow: wid, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for _, failure := range []error{errors.New("disk full"), store.ErrUnknown} {
		batch, err := b.evidence.NewBatch(time.Now(), nil, draft)
		if err != nil {
			t.Fatal(err)
		}
		_ = batch.Done(failure)
		if n := b.evidence.LiveRecords(); before == 0 || n != before && failure != store.ErrUnknown || n != 0 && failure == store.ErrUnknown {
			t.Errorf("after %v there are %d of %d records", failure, n, before)
		}
	}
}

// P4: a workflow that was not read whole has no states: while an event of the ledger does not open, and where there
// are more records than there is room for.
func TestLiveNeedsAllOfTheWorkflow(t *testing.T) {
	b := newBench(t)
	wid := uuid.NewString()
	ask := func() (read bool, err error) {
		err = b.evidence.Live(t.Context(), b.builder, wid, func(*plan.Live) {
			read = true
		})
		return read, err
	}
	b.evidence.LimitLive(4)
	for n := range 3 {
		b.recordCall(t, call(wid), Outcome{Verdict: execution.Completed, Status: 200})
		if read, err := ask(); read != (n < 2) || n == 2 && !errors.As(err, new(*rollback.TooManyError)) {
			t.Errorf("of %d calls: %v, %v", n+1, read, err)
		}
	}
	b.evidence.LimitLive(100)
	if read, err := ask(); !read || err != nil {
		t.Errorf("%v, %v", read, err)
	}

	wid = uuid.NewString()
	b.recordCall(t, call(wid), Outcome{Verdict: execution.Completed, Status: 200})
	for found, err := range b.store.Scan(t.Context(), store.Prefix([]byte("le"))) {
		if err != nil {
			t.Fatal(err)
		}
		altered := bytes.Clone(found.Value)
		altered[len(altered)-1] ^= 1
		if _, err := b.store.Commit(t.Context(), store.Write{Key: bytes.Clone(found.Key), Value: altered}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if read, err := ask(); read || err == nil {
			t.Errorf("with a damaged event: %v, %v", read, err)
		}
	}
}

// The workflows that nobody has asked for the longest make room for others, and are read again.
func TestLiveMakesRoom(t *testing.T) {
	b := newRollbackBench(t)
	b.evidence.LimitLive(6)
	var tokens []*ect.Token
	for range 5 {
		token := b.token(alice, ect.Claims{Workflow: uuid.NewString()})
		tokens = append(tokens, token)
		b.calls(token.Workflow(), token.ID())
	}
	for range 3 {
		for _, token := range tokens {
			if got := b.waitsFor(token.Workflow(), token.ID()); got != "running " {
				t.Fatalf("%q", got)
			}
			if n := b.evidence.LiveRecords(); n > 6 {
				t.Fatalf("%d records", n)
			}
		}
	}
}

// What everybody takes part in counts too: a workflow that many use has a bound, and what is dropped of it is found
// again.
func TestLiveCountsTheParts(t *testing.T) {
	b := newRollbackBench(t)
	wid := uuid.NewString()
	first := b.token(alice, ect.Claims{Workflow: wid})
	b.calls(wid, first.ID())
	for range 40 {
		b.calls(wid, b.token(alice, ect.Claims{Workflow: wid, Parents: []string{first.ID()}}).ID())
	}
	before := 0
	for i := range 200 {
		if err := b.evidence.Live(t.Context(), b.recorder.EventBuilder, wid, func(l *plan.Live) {
			if p := l.Part([]string{fmt.Sprint("agent ", i)}, []string{first.ID()}); !p.Called() {
				t.Error("nothing was called")
			}
		}); err != nil {
			t.Fatal(err)
		}
		if n := b.evidence.LiveRecords(); i == 0 {
			before = n
		} else if i == 20 && n <= before || n > 20*before {
			t.Fatalf("as much as %d records for %d parts, and %d for one", n, i+1, before)
		}
	}
}

// P3: what is recorded of others in a workflow is no part of it for somebody whom no token or call links to them.
func TestLivePartsAreThoseOfTheLedger(t *testing.T) {
	b := newRollbackBench(t)
	wid := uuid.NewString()
	has := func(issuer string, id string) (has bool) {
		t.Helper()
		if err := b.evidence.Live(t.Context(), b.recorder.EventBuilder, wid, func(l *plan.Live) {
			has = l.Part((&Call{Issuer: issuer}).Names(), nil).Has(id)
		}); err != nil {
			t.Fatal(err)
		}
		return has
	}
	mine, theirs := b.token(alice, ect.Claims{Workflow: wid}), b.token(bob, ect.Claims{Workflow: wid})
	for range 2 {
		if !has(alice, mine.ID()) || has(alice, theirs.ID()) || has(bob, mine.ID()) || !has(bob, theirs.ID()) {
			t.Error("they take part in each other's")
		}
		if err := b.evidence.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		b.open()
	}
	b.token(alice, ect.Claims{Workflow: wid, Parents: []string{mine.ID(), theirs.ID()}})
	if !has(alice, theirs.ID()) || !has(bob, mine.ID()) {
		t.Error("a token has linked them")
	}
}
