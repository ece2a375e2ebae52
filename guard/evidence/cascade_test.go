package evidence_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// C-3.1.1-b: the next process knows at which upstream each call has failed. So it finds that all addresses of a
// service do, also where they failed before it began.
func TestFailuresOfBeforeARestart(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	to := func(agent string, parents ...string) *evidence.Call {
		c := call(workflow, parents...)
		c.Target, c.Audience = agent, []string{"spiffe://example.com/agent/" + agent}
		return c
	}
	begin := func(c *evidence.Call) string {
		draft, err := b.builder.Checkpoint(time.Now(), c)
		if err == nil {
			err = b.evidence.Append(t.Context(), time.Now().Add(time.Hour), nil, draft)
		}
		if err != nil {
			t.Fatal(err)
		}
		return draft.ID()
	}
	last := ""
	fail := func(c *evidence.Call, checkpoint, upstream string) {
		drafts, err := b.builder.Outcome(time.Now(), c, &evidence.Outcome{
			Checkpoint: checkpoint, Verdict: execution.Completed, Cause: execution.CauseStatus, Status: 500,
		})
		if err != nil {
			t.Fatal(err)
		}
		batch, err := b.evidence.NewBatch(time.Now().Add(time.Hour), nil, drafts...)
		if err != nil {
			t.Fatal(err)
		}
		if upstream != "" {
			batch.Add(b.evidence.FailedAt(checkpoint, upstream, time.Now()))
		}
		if err := batch.Commit(t.Context(), b.store); err != nil {
			t.Fatal(err)
		}
		last = drafts[len(drafts)-1].ID()
	}
	outermost, first := to("outermost"), to("first")
	top := begin(outermost)
	first.Parents = []string{top}
	outer := begin(first)
	second := to("second", outer)
	one, two := begin(second), begin(second)
	fail(second, one, "10.0.0.1:80")
	fail(second, two, "10.0.0.2:80")
	fail(first, outer, "10.0.0.9:80")
	fail(outermost, top, "10.0.0.8:80")
	b.entry(t, workflow, last)
	b.close(t)

	b.open(t)
	settings, err := cascade.Settings{}.Check()
	if err != nil {
		t.Fatal(err)
	}
	d := cascade.New(settings)
	d.Pool("second", []string{"10.0.0.1:80", "10.0.0.2:80"})
	feed := &evidence.CascadeFeed{
		Detector: d, Pool: func(target string) string { return target },
		Recorder: func() (evidence.Recorder, bool) {
			return evidence.Recorder{Evidence: b.evidence, EventBuilder: b.builder}, true
		},
	}
	found, whole, err := feed.Rebuild(t.Context(), time.Now().Add(-time.Minute), 1000)
	if err != nil || !whole {
		t.Fatal(whole, err)
	}
	if len(found) != 1 || found[0].Finding.Class != cascade.Service || found[0].Finding.Root.Pool != "second" ||
		found[0].Finding.Root.Address != "10.0.0.1:80" && found[0].Finding.Root.Address != "10.0.0.2:80" {
		t.Errorf("%+v", found)
	}
}

// cascade 3.1.2: how many calls to a target went well is counted by its name, and where there are too many names,
// for all of them. So a popular target is not broken by some failures, whatever else is called.
func TestAnswersAreCountedByTarget(t *testing.T) {
	b := newBench(t)
	settings, err := cascade.Settings{}.Check()
	if err != nil {
		t.Fatal(err)
	}
	for name, answer := range map[string]func(i int) evidence.Call{
		"none":           nil,
		"store":          func(int) evidence.Call { return evidence.Call{Guard: "stock", Target: "store"} },
		"another":        func(int) evidence.Call { return evidence.Call{Guard: "stock", Target: "another"} },
		"of one guard":   func(int) evidence.Call { return evidence.Call{Guard: "store", Target: "store"} },
		"many and store": func(i int) evidence.Call { return evidence.Call{Guard: "stock", Target: fmt.Sprint(i)} },
	} {
		d := cascade.New(settings)
		feed := &evidence.CascadeFeed{
			Detector: d,
			Recorder: func() (evidence.Recorder, bool) {
				return evidence.Recorder{Evidence: b.evidence, EventBuilder: b.builder}, true
			},
		}
		now := time.Now()
		for i, to := range []string{"stock", "orders", "prices"} {
			d.Node(now, cascade.Node{
				ID: to, Workflow: "w", Agent: fmt.Sprint("agent-", i), Upstream: cascade.Upstream{Pool: to, Agent: to}, Target: "store",
			})
		}
		for i := range 5000 {
			if answer != nil {
				c := answer(i)
				b.evidence.Answered(&c)
			}
		}
		feed.Count(now)
		feed.Count(now) // once each
		for _, to := range []string{"stock", "orders", "prices"} {
			d.Fail(now, cascade.Failure{Workflow: "w", Node: to, Error: "error " + to, Address: to})
		}
		found := d.Open()
		if want := map[string]int{"none": 1, "another": 1, "of one guard": 1}[name]; found != want {
			t.Errorf("%s: %d findings, want %d", name, found, want)
		}
	}
}
