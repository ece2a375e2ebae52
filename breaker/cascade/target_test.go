package cascade_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// changes is a call by an agent to another one that changes a target.
func (b *bench) changing(wf, id, agent, to, target string, parents ...string) {
	b.Node(b.now, cascade.Node{
		ID: id, Workflow: wf, Agent: agent, Parents: parents, Upstream: cascade.Upstream{Pool: "pool-" + to, Agent: to}, Target: target,
	})
}

func (b *bench) ends(wf, id string) {
	b.note(b.Succeed(b.now, wf, id))
}

// cascade 3.1.2, shared state: what several services change fails for all of them after a write. The target is the
// root, over workflows, and the last write before it is named.
func TestSharedState(t *testing.T) {
	b := newBench(t)
	b.changing("w0", "earlier", "x", "stock", "store")
	b.changing("w0", "write", "x", "stock", "store")
	b.changing("w1", "elsewhere", "y", "stock", "store")
	for _, end := range [][2]string{{"w0", "earlier"}, {"w0", "write"}, {"w1", "elsewhere"}} {
		b.after(time.Second).ends(end[0], end[1])
	}
	b.after(25 * time.Second) // they are no calls of the present any more
	for i, to := range []string{"stock", "orders", "prices"} {
		b.none("no three services")
		wf, id := fmt.Sprint("w", i), fmt.Sprint("call-", i)
		b.changing(wf, id, fmt.Sprint("agent-", i), to, "store")
		b.after(time.Second).fails(wf, id, cascade.Failed)
	}
	f := b.one()
	r := f.Root
	if r.Target != "store" || r.LastWrite != "write" || r.Workflow != "w0" || r.Node != "call-0" || r.Agent != "" || r.Pool != "" || r.Address != "" ||
		!slices.Contains(r.Reasons, cascade.SharedState) || f.Class != cascade.Infrastructure || f.Failed != 3 || len(f.Parts) != 3 {
		t.Errorf("%+v", f)
	}
}

// What cannot be reached was not spoilt by who wrote it last.
func TestSharedStateThatIsAway(t *testing.T) {
	b := newBench(t)
	b.changing("w", "write", "x", "stock", "store")
	b.ends("w", "write")
	b.after(25 * time.Second)
	for i, to := range []string{"stock", "orders", "prices"} {
		b.changing("w", fmt.Sprint(i), fmt.Sprint("agent-", i), to, "store")
		b.after(time.Second).fails("w", fmt.Sprint(i), cascade.Timeout)
	}
	if r := b.one().Root; r.Target != "store" || r.LastWrite != "" {
		t.Errorf("%+v", r)
	}
}

// One record of a service that works fails for all who write it: the service is not the root. Where most calls
// that write it succeed, its failures have nothing to do with one another.
func TestSharedRecord(t *testing.T) {
	for _, good := range []int{0, 300} {
		b := newBench(t)
		b.Pool("pool-db", []string{"1"})
		for i := range 3 {
			by := fmt.Sprint("agent-", i)
			b.call("w", "to "+by, "planner", by)
			b.changing("w", by+" to db", by, "db", "row-7", "to "+by)
		}
		for i := range 3 {
			by := fmt.Sprint("agent-", i)
			b.Answered(b.now, "pool-db", "1", 500)
			b.AnsweredAbout(b.now, "row-7", good)
			b.after(time.Second).fails("w", by+" to db", cascade.Failed)
			b.after(time.Millisecond).fails("w", "to "+by, cascade.Failed)
			b.Answered(b.now, "pool-db", "1", 500)
		}
		if good > 0 {
			b.none("two agents each, side by side by chance")
			continue
		}
		f := b.one()
		if r := f.Root; r.Target != "row-7" || r.Pool != "pool-db" || r.Agent != "db" || r.Address != "" || f.Class != cascade.Service || f.Failed != 4 {
			t.Errorf("%+v", f)
		}
	}
}

// Good answers to calls about targets that were not told apart count for each of them.
func TestSharedRecordAmongMany(t *testing.T) {
	b := newBench(t)
	for i, to := range []string{"stock", "orders", "prices"} {
		b.changing("w", to, fmt.Sprint("agent-", i), to, "store")
	}
	b.AnsweredAbout(b.now, "", 300)
	for _, to := range []string{"stock", "orders", "prices"} {
		b.after(time.Second).fails("w", to, cascade.Failed)
	}
	b.none("three of 303")
}

// P3: one agent alone, or callers that nobody knows, make no target fail for others; and a target is not the root
// where its services fail without it.
func TestTargetsOfOneAgent(t *testing.T) {
	for _, name := range []string{"mallory", ""} {
		b := newBench(t)
		for i := range 30 {
			id := fmt.Sprint(i)
			b.changing("w", id, name, fmt.Sprint("service-", i%5), "store")
			b.after(300*time.Millisecond).fails("w", id, cascade.Failed)
		}
		b.none("failures of one caller at five services")
	}
	b := newBench(t)
	for i := range 6 {
		to := []string{"stock", "orders", "prices"}[i%3]
		b.changing("w", fmt.Sprint(i), fmt.Sprint("agent-", i), to, "store")
		b.call("w", fmt.Sprint("other ", i), fmt.Sprint("agent-", i), to)
		b.after(100*time.Millisecond).fails("w", fmt.Sprint("other ", i), cascade.Failed)
		b.fails("w", fmt.Sprint(i), cascade.Failed)
	}
	for _, f := range b.Findings() {
		if f.Root.Target != "" {
			t.Errorf("the services fail elsewhere, too: %+v", f)
		}
	}
}

// cascade 3.4.2, clustering: breakers of services that change one target, of each service once. One probe cannot
// replace those of several services.
func TestClusteringOnATarget(t *testing.T) {
	opens := func(b *bench, to, address string, open bool) {
		b.note(b.Breaker(b.now, cascade.Breaker{
			Downstream: to, Pool: "pool-" + to, Address: address, Event: "open " + address, Open: open, Targets: []string{"store"},
		}))
	}
	b := newBench(t)
	opens(b, "stock", "1", true)
	opens(b, "stock", "2", true)
	opens(b, "orders", "3", true)
	b.none("two services")
	opens(b, "orders", "3", false)
	opens(b, "prices", "4", true)
	b.none("one of them is closed")
	opens(b, "orders", "3", true)
	f := b.one()
	if f.Pattern != cascade.Clustering || f.Class != cascade.Infrastructure || f.Root.Target != "store" || f.Root.Agent != "" || f.OneProbe ||
		f.Downstream != "store" || !slices.Equal(f.Breakers, []string{"2", "3", "4"}) || !slices.Contains(f.Root.Reasons, cascade.SharedState) {
		t.Errorf("%+v", f)
	}
	b.after(10 * time.Minute)
	b.note(b.Advance(b.now))
	for _, to := range []string{"stock", "orders", "prices"} { // it begins anew
		opens(b, to, to, true)
	}
	if all := b.Findings(); len(all) != 2 {
		t.Errorf("%+v", all)
	}

	// Breakers that open because of what is found already are no other cascade.
	b = newBench(t)
	for i, to := range []string{"stock", "orders", "prices"} {
		b.changing("w", to, fmt.Sprint("agent-", i), to, "store")
		b.after(time.Second).fails("w", to, cascade.Failed)
	}
	for _, to := range []string{"stock", "orders", "prices"} {
		opens(b, to, to, true)
	}
	if f := b.one(); f.Pattern == cascade.Clustering || f.OneProbe || len(f.Breakers) != 3 {
		t.Errorf("%+v", f)
	}
	if err := b.Faults(); err != nil {
		t.Error(err)
	}
	// Three breakers of one service come first, and are one with those of the target.
	b = newBench(t)
	for _, address := range []string{"1", "2", "3"} {
		opens(b, "stock", address, true)
	}
	opens(b, "orders", "4", true)
	opens(b, "prices", "5", true)
	if f := b.one(); f.Downstream != "stock" || !f.OneProbe {
		t.Errorf("%+v", f)
	}
}
