package hitl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func held(key, workflow string) hitl.Opening {
	return hitl.Opening{Key: key, Level: hitl.Stop, Cause: hitl.CauseRollbackFailed, Summary: "It has failed.", Workflow: workflow}
}

func ofCall(key string) hitl.Opening {
	return hitl.Opening{
		Key: key, Level: hitl.Approval, Cause: hitl.CauseCall, Summary: "A call waits.", Requester: "issuer:agent",
		Proposal: hitl.Proposal{Kind: hitl.RunCall, Text: "POST /pay", RequestHash: "sha256:1"}, Within: time.Hour,
	}
}

func vote(by string, approve bool) hitl.Vote {
	return hitl.Vote{By: by, Roles: []string{hitl.DefaultRole}, Approve: approve, Reason: "because", Hash: "sha256:1"}
}

func blocks(t *testing.T, d *hitl.Store, workflow string) string {
	t.Helper()
	e, _, err := d.Blocks(t.Context(), workflow)
	if err != nil {
		t.Fatal(err)
	}
	if e == nil {
		return ""
	}
	return e.ID
}

// The answers to votes that do not count, none of which changes anything.
func TestWhoMayDecide(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	o := ofCall("k")
	o.Role = "payments"
	e := open(t, d, o)
	good := hitl.Vote{By: "user:ann", Roles: []string{"payments"}, Approve: true, Hash: "sha256:1"}
	with := func(change func(v *hitl.Vote)) hitl.Vote {
		v := good
		change(&v)
		return v
	}
	for name, c := range map[string]struct {
		vote hitl.Vote
		want error
	}{
		"without a role":            {with(func(v *hitl.Vote) { v.Roles = nil }), hitl.ErrRole},
		"with another role":         {with(func(v *hitl.Vote) { v.Roles = []string{"operator", "Payments"} }), hitl.ErrRole},
		"who asked":                 {with(func(v *hitl.Vote) { v.By = "issuer:agent" }), hitl.ErrOwn},
		"who asked, with all roles": {with(func(v *hitl.Vote) { v.By, v.Every = "issuer:agent", true }), hitl.ErrOwn},
		"of another request":        {with(func(v *hitl.Vote) { v.Hash = "sha256:2" }), hitl.ErrHash},
		"without the request":       {with(func(v *hitl.Vote) { v.Hash = "" }), hitl.ErrHash},
		"a denial without a reason": {with(func(v *hitl.Vote) { v.Approve = false }), hitl.ErrReason},
	} {
		got, err := d.Decide(t.Context(), e.ID, c.vote)
		if !errors.Is(err, c.want) || got.Status != hitl.Pending {
			t.Errorf("%s: %v, %v; want %v", name, got.Status, err, c.want)
		}
	}
	for _, id := range []string{"", "x", strings.ToUpper(e.ID), "00000000-0000-8000-8000-000000000000"} {
		if _, err := d.Decide(t.Context(), id, good); !errors.Is(err, hitl.ErrNotFound) {
			t.Errorf("%q: %v", id, err)
		}
	}
	got, err := d.Decide(t.Context(), e.ID, good)
	if err != nil || got.Status != hitl.Approved || len(got.Decisions) != 1 || got.Decisions[0].By != "user:ann" || got.Decisions[0].At.IsZero() {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, v := range []hitl.Vote{good, with(func(v *hitl.Vote) { v.By = "user:bob" }), with(func(v *hitl.Vote) { v.Approve, v.Reason = false, "no" })} {
		if again, err := d.Decide(t.Context(), e.ID, v); !errors.Is(err, hitl.ErrDecided) || len(again.Decisions) != 1 {
			t.Errorf("a second decision: %+v, %v", again, err)
		}
	}
	if after := get(t, p.escalations(), e.ID); after.Status != hitl.Approved || after.Decisions[0].By != "user:ann" {
		t.Errorf("after a restart: %+v", after)
	}
}

// P5: a token decides once. The same again, as after a lost answer, finds what it has decided, and does not
// answer the question when it is asked again.
func TestDecisionTokenCountsOnce(t *testing.T) {
	d := newPlace().escalations()
	e := open(t, d, held("k", "w"))
	v := hitl.Vote{By: "issuer:ops", Every: true, Reason: "r", Token: "t"}
	for range 2 {
		if got, err := d.Decide(t.Context(), e.ID, v); err != nil || got.Status != hitl.Denied || len(got.Decisions) != 1 {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	if _, err := d.AskAgain(t.Context(), e.ID, "user:bob", 0); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Decide(t.Context(), e.ID, v); err != nil || got.Status != hitl.Pending || len(got.Decisions) != 1 {
		t.Errorf("asked again: %+v, %v", got, err)
	}
	v.Token = "another"
	if got, err := d.Decide(t.Context(), e.ID, v); err != nil || got.Status != hitl.Denied || len(got.Decisions) != 2 {
		t.Errorf("another token: %+v, %v", got, err)
	}
}

func TestQuorum(t *testing.T) {
	d := newPlace().escalations()
	o := ofCall("k")
	o.Quorum = 2
	e := open(t, d, o)
	if got, err := d.Decide(t.Context(), e.ID, vote("user:ann", true)); err != nil || got.Status != hitl.Pending {
		t.Fatalf("%v, %v", got.Status, err)
	}
	if got, err := d.Decide(t.Context(), e.ID, vote("user:ann", true)); !errors.Is(err, hitl.ErrDecided) || got.Status != hitl.Pending {
		t.Errorf("one person twice: %v, %v", got.Status, err)
	}
	if got, err := d.Decide(t.Context(), e.ID, vote("user:bob", true)); err != nil || got.Status != hitl.Approved {
		t.Errorf("%v, %v", got.Status, err)
	}
	o.Key = "another"
	e = open(t, d, o)
	_, _ = d.Decide(t.Context(), e.ID, vote("user:ann", true))
	if got, err := d.Decide(t.Context(), e.ID, vote("user:bob", false)); err != nil || got.Status != hitl.Denied {
		t.Errorf("one denial denies: %v, %v", got.Status, err)
	}
}

// Two people decide at once: one decision counts, and everybody reads the same.
func TestTwoDecisionsAtOnce(t *testing.T) {
	p := newPlace()
	for i := range 50 {
		d, other := p.escalations(), p.escalations() // as two nodes
		e := open(t, d, ofCall(fmt.Sprint(i)))
		var wg sync.WaitGroup
		var counted atomic.Int32
		for j, by := range []*hitl.Store{d, other, d, other} {
			wg.Go(func() {
				if _, err := by.Decide(t.Context(), e.ID, vote(fmt.Sprint("user:", j), j%2 == 0)); err == nil {
					counted.Add(1)
				} else if !errors.Is(err, hitl.ErrDecided) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if got := get(t, d, e.ID); counted.Load() != 1 || len(got.Decisions) != 1 || got.Status == hitl.Pending ||
			(got.Status == hitl.Approved) != (got.Decisions[0].Decision == hitl.Approve) {
			t.Fatalf("%d counted: %+v", counted.Load(), got)
		}
	}
}

// A decision that races the deadline has one result: the deadline passes between the read and the
// commit, and another node expires the escalation.
func TestDecisionRacesTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		f := &faulty{Store: p.Store}
		d, other := hitl.NewStore(f, p.ring), p.escalations()
		e := open(t, d, ofCall("k"))
		f.beforeCommit = func() {
			time.Sleep(2 * time.Hour)
			if got := get(t, other, e.ID); got.Status != hitl.Expired {
				t.Errorf("the other node reads %v", got.Status)
			}
		}
		if got, err := d.Decide(t.Context(), e.ID, vote("user:ann", true)); !errors.Is(err, hitl.ErrExpired) || got.Status != hitl.Expired {
			t.Errorf("%v, %v", got.Status, err)
		}
		if got := get(t, d, e.ID); got.Status != hitl.Expired || len(got.Decisions) != 0 {
			t.Errorf("%+v", got)
		}
	})
}

// Deadlines go by the store's clock, and pass while the process is down; the dispatcher ends what
// nobody asks for, without waiting for its next poll.
func TestNobodyDecides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		e := open(t, d, ofCall("k"))
		o := held("stopped", "w")
		o.Within = 90 * time.Minute
		stopped := open(t, d, o)
		ended := make(chan string, 8)
		d.OnDecided(func(e hitl.Escalation) { ended <- e.ID + string(e.Status) })
		stop := run(t, d, &receiver{}, hitl.Delivery{Poll: 24 * time.Hour})
		time.Sleep(time.Hour - time.Second)
		synctest.Wait()
		if len(ended) != 0 {
			t.Error("too early:", <-ended)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := <-ended; got != e.ID+"expired" || len(ended) != 0 {
			t.Error(got)
		}
		stop()
		time.Sleep(time.Hour)
		again := p.escalations()
		if _, err := again.Decide(t.Context(), stopped.ID, hitl.Vote{By: "user:ann", Every: true, Approve: true}); !errors.Is(err, hitl.ErrExpired) {
			t.Error(err)
		}
		if got := get(t, again, stopped.ID); got.Status != hitl.Expired || !got.Held {
			t.Errorf("expiry must leave everything as it is: %+v", got)
		}
	})
}

// Where nobody is reached, nothing is approved: it is denied, the workflow is paused, or another role
// is asked, once, and notified; over a restart too (ATD: unreachable_human).
func TestUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d, r := p.escalations(), &receiver{}
		about := func(key string, u hitl.Unreachable) hitl.Opening {
			return hitl.Opening{
				Key: key, Level: hitl.Approval, Cause: hitl.CauseError, Summary: "s", Workflow: "w-" + key, Within: time.Hour, Unreachable: u,
			}
		}
		denied := open(t, d, about("deny", hitl.Unreachable{Do: hitl.UnreachableDeny}))
		aborted := open(t, d, about("abort", hitl.Unreachable{Do: hitl.UnreachableAbort}))
		paused := open(t, d, about("pause", hitl.Unreachable{Do: hitl.UnreachablePause}))
		next := open(t, d, about("escalate", hitl.Unreachable{Do: hitl.UnreachableEscalate, NextRole: "lead", Within: 2 * time.Hour}))
		stop := run(t, d, r, hitl.Delivery{Poll: 24 * time.Hour})
		time.Sleep(time.Hour - time.Second)
		synctest.Wait()
		if n := len(r.attempts(next.ID)); n != 1 || blocks(t, d, "w-pause") != "" {
			t.Errorf("before the end: %d notifications", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for _, id := range []string{denied.ID, aborted.ID} {
			if got := get(t, d, id); got.Status != hitl.Expired || got.Held {
				t.Errorf("%+v", got)
			}
		}
		if got := get(t, d, paused.ID); got.Status != hitl.Pending || got.Proposal.Kind != hitl.Resume || !got.Deadline.IsZero() || got.Round != 1 ||
			len(r.attempts(paused.ID)) != 2 || blocks(t, d, "w-pause") != paused.ID {
			t.Errorf("%+v, %d notifications", got, len(r.attempts(paused.ID)))
		}
		got := get(t, d, next.ID)
		if got.Status != hitl.Pending || got.RequiredRole != "lead" || got.Round != 1 || got.State != hitl.Notified || len(r.attempts(next.ID)) != 2 || blocks(t, d, "w-escalate") != "" {
			t.Errorf("%+v, %d notifications", got, len(r.attempts(next.ID)))
		}
		if _, err := d.Decide(t.Context(), next.ID, hitl.Vote{By: "user:ann", Roles: []string{hitl.DefaultRole}, Approve: true}); !errors.Is(err, hitl.ErrRole) {
			t.Error("the role that was not reached decides:", err)
		}
		stop()
		time.Sleep(2 * time.Hour)
		d = p.escalations()
		if _, err := d.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := get(t, d, next.ID); got.Status != hitl.Expired || got.Round != 1 || got.Held {
			t.Errorf("nobody of the next role: %+v", got)
		}
		if blocks(t, d, "w-pause") != paused.ID {
			t.Error("the pause is forgotten")
		}
		if got, err := d.Decide(t.Context(), paused.ID, hitl.Vote{By: "user:ann", Every: true, Approve: true}); err != nil || got.Held || blocks(t, d, "w-pause") != "" {
			t.Errorf("%+v, %v", got, err)
		}

		// Who comes with the answer to the question before does not resume the workflow.
		late := open(t, d, about("late pause", hitl.Unreachable{Do: hitl.UnreachablePause}))
		time.Sleep(time.Hour)
		if got, err := d.Decide(t.Context(), late.ID, hitl.Vote{By: "user:ann", Every: true, Approve: true}); !errors.Is(err, hitl.ErrExpired) || !got.Held {
			t.Errorf("%+v, %v", got, err)
		}

		// Who is asked next may be the first who comes after the deadline.
		late = open(t, d, about("late", hitl.Unreachable{Do: hitl.UnreachableEscalate, NextRole: "lead"}))
		time.Sleep(time.Hour)
		if got, err := d.Decide(t.Context(), late.ID, hitl.Vote{By: "user:lea", Roles: []string{"lead"}, Approve: true}); err != nil || got.Status != hitl.Approved {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// What cannot be undone gets the time and the kind of its gateway, as it is when it is opened.
func TestUnreachableOfTheIrreversible(t *testing.T) {
	d := newPlace().escalations()
	cannot := func(key string) hitl.Escalation {
		return open(t, d, hitl.Opening{Key: key, Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "s", Workflow: "w"})
	}
	if e := cannot("before"); !e.Deadline.IsZero() {
		t.Errorf("%+v", e)
	}
	d.Configure(&hitl.Unreachable{Do: hitl.UnreachablePause, Within: time.Minute})
	if e := cannot("with"); e.Deadline.Sub(e.Opened) != time.Minute || e.Unreachable.Do != hitl.UnreachablePause {
		t.Errorf("%+v", e)
	}
	if e := open(t, d, hitl.Opening{Key: "other", Level: hitl.Approval, Cause: hitl.CauseOther, Summary: "s", Workflow: "w"}); !e.Deadline.IsZero() {
		t.Errorf("another cause: %+v", e)
	}
	d.Configure(nil)
	if e := cannot("after"); !e.Deadline.IsZero() {
		t.Errorf("%+v", e)
	}
}

// A workflow stays stopped until it is resumed: over denials and restarts, and nothing else is.
func TestHoldsUntilResumed(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	if blocks(t, d, "w") != "" || blocks(t, d, "") != "" {
		t.Error("nothing holds it")
	}
	pause := held("paused", "w")
	pause.Level = hitl.Pause
	paused, stopped := open(t, d, pause), open(t, d, held("stopped", "w"))
	open(t, d, hitl.Opening{Key: "asked", Level: hitl.Approval, Cause: hitl.CauseOther, Summary: "s", Workflow: "calls"})
	if stopped.Proposal.Kind != hitl.Resume || !stopped.Held {
		t.Errorf("%+v", stopped)
	}
	check := func(d *hitl.Store, want string) {
		t.Helper()
		if got := blocks(t, d, "w"); got != want {
			t.Errorf("%s holds it, want %s", got, want)
		}
		if blocks(t, d, "calls") != "" || blocks(t, d, "W") != "" {
			t.Error("another workflow is held")
		}
	}
	check(d, stopped.ID)
	ann := hitl.Vote{By: "user:ann", Every: true, Reason: "r"}
	if got, err := d.Decide(t.Context(), stopped.ID, ann); err != nil || got.Status != hitl.Denied {
		t.Fatal(got, err)
	}
	check(d, stopped.ID)
	d = p.escalations()
	if n, err := d.Load(t.Context()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	check(d, stopped.ID)
	if got, err := d.AskAgain(t.Context(), stopped.ID, "user:bob", 0); err != nil || got.Status != hitl.Pending || got.Round != 1 {
		t.Fatal(got, err)
	}
	if _, err := d.AskAgain(t.Context(), stopped.ID, "user:bob", 0); !errors.Is(err, hitl.ErrNotHeld) {
		t.Error("asked twice:", err)
	}
	ann.Approve = true
	bob := ann
	bob.By = "user:bob"
	if _, err := d.Decide(t.Context(), stopped.ID, bob); !errors.Is(err, hitl.ErrOwn) {
		t.Error("who asked again approves:", err)
	}
	if got, err := d.Decide(t.Context(), stopped.ID, ann); err != nil || got.Held || len(got.Decisions) != 2 {
		t.Fatal(got, err)
	}
	check(d, paused.ID)
	if _, err := d.Withdraw(t.Context(), paused.ID); err != nil {
		t.Fatal(err)
	}
	check(d, "")
	if _, err := d.AskAgain(t.Context(), stopped.ID, "user:bob", 0); !errors.Is(err, hitl.ErrNotHeld) {
		t.Error(err)
	}
	again := p.escalations()
	if _, err := again.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	check(again, "")
}

// What holds a workflow, or still proposes something, outlives the retention.
func TestPendingIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		stopped := open(t, d, held("stopped", "w"))
		o := ofCall("k")
		o.Within = 0
		asked := open(t, d, o)
		stop := run(t, d, &receiver{}, hitl.Delivery{})
		synctest.Wait()
		stop()
		if _, err := d.Decide(t.Context(), stopped.ID, hitl.Vote{By: "user:ann", Every: true, Reason: "not yet"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(400 * 24 * time.Hour)
		if blocks(t, d, "w") != stopped.ID {
			t.Error("time has resumed the workflow")
		}
		if got, err := d.Decide(t.Context(), asked.ID, vote("user:ann", true)); err != nil || got.Status != hitl.Approved {
			t.Fatal(got, err)
		}
		time.Sleep(91 * 24 * time.Hour)
		if _, err := d.Get(t.Context(), asked.ID); !errors.Is(err, hitl.ErrNotFound) {
			t.Error("decided and still kept:", err)
		}
		page, err := d.List(t.Context(), hitl.Filter{Status: hitl.Denied}, "", 10)
		if err != nil || len(page.Escalations) != 1 || page.Escalations[0].ID != stopped.ID {
			t.Errorf("%+v, %v", page, err)
		}
	})
}

// The store does not say what it holds: no call may begin (P4).
func TestP4HoldIsUnknown(t *testing.T) {
	p := newPlace()
	f := &faulty{Store: p.Store}
	d := hitl.NewStore(f, p.ring)
	open(t, d, held("k", "w"))
	f.failing.Store(true)
	if _, _, err := d.Blocks(t.Context(), "w"); !errors.Is(err, hitl.ErrStore) {
		t.Error(err)
	}
	if _, err := d.Load(t.Context()); !errors.Is(err, hitl.ErrStore) {
		t.Error(err)
	}
	if e, _, err := d.Blocks(t.Context(), "untouched"); e != nil || err != nil {
		t.Error("the store is read for a workflow that nothing holds:", e, err)
	}
}

// P4: a record that nobody can read goes on to hold its workflow, also in a later process, and no
// other.
func TestDamagedRecordsHold(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	e := open(t, d, held("k", "w"))
	open(t, d, ofCall("of a call"))
	spoil(t, p, e.ID)
	again := p.escalations()
	if n, err := again.Load(t.Context()); n != 1 || err != nil {
		t.Errorf("%d cannot be read, %v", n, err)
	}
	for name, d := range map[string]*hitl.Store{"the process that opened it": d, "a later one": again} {
		if e, _, err := d.Blocks(t.Context(), "w"); e != nil || !errors.Is(err, hitl.ErrUnreadable) {
			t.Errorf("%s: the workflow is held by %v, %v", name, e, err)
		}
		if e, _, err := d.Blocks(t.Context(), "untouched"); e != nil || err != nil {
			t.Errorf("%s: another workflow is held by %v, %v", name, e, err)
		}
	}
}

// Evidence lands with the change, or neither does.
func TestEvidenceLandsWithTheDecision(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	n := 0
	var failing error
	d.SetEvidence(func(_ context.Context, old, e *hitl.Escalation) (string, *store.Batch, error) {
		n++
		voted := old != nil && len(e.Decisions) > len(old.Decisions)
		return fmt.Sprintf("%v-%v", e.Status, voted), store.NewBatch(store.Write{Key: []byte{'z', byte(n)}}), failing
	})
	e := open(t, d, ofCall("k"))
	got, err := d.Decide(t.Context(), e.ID, vote("user:ann", true))
	if err != nil || got.Token != "pending-false" || got.Resolution != "approved-true" {
		t.Errorf("%+v, %v", got, err)
	}
	if stored := get(t, d, e.ID); stored.Token != got.Token || stored.Resolution != got.Resolution {
		t.Errorf("%+v", stored)
	}
	z := 0
	for _, entry := range entries(t, p) {
		if entry.Key[0] == 'z' {
			z++
		}
	}
	if z != 2 {
		t.Errorf("%d records in the ledger", z)
	}
	failing = errDown
	if _, err := d.Open(t.Context(), ofCall("another")); !errors.Is(err, hitl.ErrStore) {
		t.Error(err)
	}
	if page, err := d.List(t.Context(), hitl.Filter{}, "", 10); err != nil || len(page.Escalations) != 1 {
		t.Errorf("opened without evidence: %+v, %v", page, err)
	}
}

func TestWaitsForADecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newPlace().escalations()
		e := open(t, d, ofCall("k"))
		done := make(chan hitl.Escalation, 1)
		go func() {
			got, err := d.Wait(t.Context(), e.ID)
			if err != nil {
				t.Error(err)
			}
			done <- got
		}()
		synctest.Wait()
		if _, err := d.Decide(t.Context(), e.ID, vote("user:ann", false)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case got := <-done:
			if got.Status != hitl.Denied {
				t.Error(got.Status)
			}
		default:
			t.Error("it does not wake")
		}
	})
}

// A requester's waiting calls are counted, also after a restart, and no more once decided.
func TestWaitingCallsAreCounted(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	var all []hitl.Escalation
	for i := range 3 {
		all = append(all, open(t, d, ofCall(fmt.Sprint(i))))
	}
	full := func(d *hitl.Store, by string, most int) bool {
		t.Helper()
		is, err := d.Waits(t.Context(), by, most)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	again := p.escalations()
	if _, err := again.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, d := range []*hitl.Store{d, again} {
		if !full(d, "issuer:agent", 3) || full(d, "issuer:agent", 4) || full(d, "issuer:other", 1) {
			t.Error("not counted")
		}
	}
	if _, err := again.Decide(t.Context(), all[0].ID, vote("user:ann", false)); err != nil {
		t.Fatal(err)
	}
	for _, d := range []*hitl.Store{d, again} { // the first hears nothing of it, and reads the store
		if full(d, "issuer:agent", 3) {
			t.Error("a decided one is counted")
		}
	}
}

// The state machine of an escalation against a model, over random operations by two nodes, with
// restarts and time in between.
func TestDecisionsAgainstAModel(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 15))
			p := newPlace()
			o := held("k", "w")
			if seed%2 == 0 {
				o = ofCall("k")
			}
			o.Quorum, o.Requester, o.Within = r.IntN(3), "p0", time.Duration(r.IntN(2))*time.Hour
			nodes := []*hitl.Store{p.escalations(), p.escalations()}
			e := open(t, nodes[0], o)
			want := struct {
				status    hitl.Status
				held      bool
				voted     map[string]bool
				requester string
				deadline  time.Time
			}{hitl.Pending, e.Held, map[string]bool{}, "p0", e.Deadline}
			hash := e.Proposal.Hash()
			for range 40 {
				node := nodes[r.IntN(2)]
				by := fmt.Sprint("p", r.IntN(4))
				now := time.Now()
				if want.status == hitl.Pending && !want.deadline.IsZero() && !now.Before(want.deadline) {
					want.status = hitl.Expired
				}
				switch r.IntN(6) {
				case 0, 1:
					approve := r.IntN(3) > 0
					_, err := node.Decide(t.Context(), e.ID, hitl.Vote{By: by, Every: true, Approve: approve, Reason: "r", Hash: hash})
					counts := want.status == hitl.Pending && !want.voted[by] && !(approve && by == want.requester)
					if (err == nil) != counts {
						t.Fatalf("seed %d: a vote by %s (%t) on %+v: %v", seed, by, approve, want, err)
					}
					if !counts {
						break
					}
					if !approve {
						want.status = hitl.Denied
						break
					}
					want.voted[by] = true
					if len(want.voted) >= max(1, o.Quorum) {
						want.status, want.held = hitl.Approved, false
					}
				case 2:
					_, err := node.AskAgain(t.Context(), e.ID, by, 0)
					may := want.held && want.status != hitl.Pending
					if (err == nil) != may {
						t.Fatalf("seed %d: asked again on %+v: %v", seed, want, err)
					}
					if may {
						want.status, want.requester, want.voted, want.deadline = hitl.Pending, by, map[string]bool{}, time.Time{}
						hash = ""
					}
				case 3:
					if r.IntN(8) > 0 {
						break
					}
					if _, err := node.Withdraw(t.Context(), e.ID); (err == nil) != (want.status == hitl.Pending) {
						t.Fatalf("seed %d: withdrawn on %+v: %v", seed, want, err)
					}
					if want.status == hitl.Pending {
						want.status, want.held = hitl.Withdrawn, false
					}
				case 4:
					time.Sleep(time.Duration(r.IntN(30)) * time.Minute)
					continue // what is overdue by now expires when it is asked for
				case 5:
					nodes[r.IntN(2)] = p.escalations()
					for _, d := range nodes {
						if _, err := d.Load(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
				}
				for _, d := range nodes {
					if got := get(t, d, e.ID); got.Status != want.status || got.Held != want.held {
						t.Fatalf("seed %d: %v, held %t; want %+v", seed, got.Status, got.Held, want)
					}
				}
			}
		})
	}
}

// BenchmarkBlocks is what a call of an untouched workflow pays, however much is pending.
func BenchmarkBlocks(b *testing.B) {
	for _, n := range []int{0, 100, 10_000} {
		b.Run(fmt.Sprint(n, "-pending"), func(b *testing.B) {
			d := newPlace().escalations()
			for i := range n {
				if _, err := d.Open(b.Context(), held(fmt.Sprint(i), fmt.Sprint("w", i))); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if e, _, err := d.Blocks(b.Context(), "untouched"); e != nil || err != nil {
					b.Fatal(e, err)
				}
			}
		})
	}
}

// ADR 0127: what turns out to belong to a pending question is added to it once, and it is delivered again. Those
// who approved the smaller question have not approved the larger one; what was decided stays so.
func TestQuestionsAreWidened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d, r := p.escalations(), &receiver{}
		defer run(t, d, r, hitl.Delivery{})()
		o := opening("k")
		o.Summary, o.Quorum = "A call has failed.", 2
		e := open(t, d, o)
		synctest.Wait()
		vote := func(by string) (hitl.Escalation, error) {
			return d.Decide(t.Context(), e.ID, hitl.Vote{By: by, Every: true, Approve: true})
		}
		if _, err := vote("ann"); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			got, err := d.Widen(t.Context(), e.ID, "c1", "It spreads: cascade c1.")
			if err != nil || got.Round != 1 || got.Summary != "It spreads: cascade c1. A call has failed." || got.Cause != e.Cause {
				t.Fatalf("%+v %v", got, err)
			}
			synctest.Wait()
		}
		if n := len(r.attempts(e.ID)); n != 2 {
			t.Errorf("delivered %d times", n)
		}
		if got, err := vote("bob"); err != nil || got.Status != hitl.Pending {
			t.Errorf("one has approved what it is now: %+v %v", got, err)
		}
		if got, err := vote("ann"); err != nil || got.Status != hitl.Approved {
			t.Errorf("%+v %v", got, err)
		}
		if _, err := d.Widen(t.Context(), e.ID, "c2", "It spreads: cascade c2."); !errors.Is(err, hitl.ErrDecided) {
			t.Errorf("what was decided: %v", err)
		}
	})
}
