package cascade_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// entry is an event in one of several logs, with its own time.
type entry struct {
	log  int
	at   time.Time
	feed func(d *cascade.Detector, at time.Time) []cascade.Change
}

// spread makes a failure that spreads, and what each of the given number of logs has of it, in causal order: a chain
// of calls that ends in one that fails, or in a fan of several, in one workflow, or in two that need the same services
// in the end. Each call is made at any of the logs, which has its node and its failure; the tasks of agents are in the
// log of the call that follows from them.
func spread(r *rand.Rand, logs int) (all []entry) {
	at := start
	add := func(log int, feed func(d *cascade.Detector, at time.Time) []cascade.Change) {
		at = at.Add(time.Duration(1+r.IntN(150)) * time.Millisecond)
		all = append(all, entry{log, at, feed})
	}
	type call struct {
		id, pool string
		log      int
	}
	for w := range 1 + r.IntN(2) { // workflows
		wf := fmt.Sprint("w", w)
		begin := func(by, to, parent string, tasks bool) call {
			c := call{fmt.Sprint(by, "-", to, " ", wf), "pool-" + to, r.IntN(logs)}
			n := cascade.Node{ID: c.id, Aliases: []string{c.id + " settled"}, Workflow: wf, Agent: by, Upstream: cascade.Upstream{Pool: c.pool, Agent: to}}
			task := "task of " + c.id
			if n.Parents = []string{parent}; tasks && r.IntN(2) == 0 {
				n.Parents = []string{task}
				add(c.log, func(d *cascade.Detector, at time.Time) []cascade.Change {
					return d.Node(at, cascade.Node{ID: task, Workflow: wf, Agent: by, Parents: []string{parent}})
				})
			}
			add(c.log, func(d *cascade.Detector, at time.Time) []cascade.Change { return d.Node(at, n) })
			return c
		}
		fail := func(c call, kind cascade.Kind, causes ...string) {
			add(c.log, func(d *cascade.Detector, at time.Time) []cascade.Change {
				return d.Fail(at, cascade.Failure{Workflow: wf, Node: c.id, Error: "error " + c.id, Kind: kind, Address: "1", Causes: causes})
			})
		}
		parent, by := "", "user"
		var calls []call
		for i := range 2 + r.IntN(5) {
			to := fmt.Sprint("agent", w, i)
			c := begin(by, to, parent, true)
			calls, by, parent = append(calls, c), to, c.id+[]string{"", " settled"}[r.IntN(2)]
		}
		var leaves, failed []call
		for i := range []int{0, 3, 4, 5}[r.IntN(4)] {
			leaves = append(leaves, begin(by, fmt.Sprint("service", i), parent, false))
		}
		kind := []cascade.Kind{cascade.Failed, cascade.Unreachable, cascade.Exhausted}[r.IntN(3)]
		for _, c := range leaves {
			fail(c, kind)
			failed = append(failed, c)
		}
		names := r.IntN(2) == 0
		for _, c := range slices.Backward(calls) {
			switch last := len(failed) - 1; {
			case last < 0:
				fail(c, kind)
			case names:
				fail(c, cascade.Failed, "error "+failed[last].id)
			default:
				fail(c, cascade.Failed)
			}
			failed = append(failed, c)
		}
	}
	return all
}

// mixed is an order in which the logs may be read: that of each is kept, and some of it is read twice.
func mixed(r *rand.Rand, all []entry, logs int) (order []entry) {
	rest := make([][]entry, logs)
	for _, e := range all {
		rest[e.log] = append(rest[e.log], e)
	}
	behind := r.IntN(logs + 1) // a log that is read at the end
	for range all {
		var from []int
		for i := range rest {
			if len(rest[i]) > 0 && i != behind {
				from = append(from, i)
			}
		}
		if len(from) == 0 {
			from = append(from, behind)
		}
		i := from[r.IntN(len(from))]
		order = append(order, rest[i][0])
		rest[i] = rest[i][1:]
		if r.IntN(4) == 0 {
			order = append(order, order[r.IntN(len(order))])
		}
	}
	return order
}

// outcomes are the cascades that a detector finds in events, without what the order may change: the ids, and when.
func outcomes(t *testing.T, order []entry) (found []string) {
	t.Helper()
	b := newBench(t)
	for _, e := range order {
		b.note(e.feed(b.Detector, e.at))
	}
	if err := b.Faults(); err != nil {
		t.Error(err)
	}
	for _, f := range b.Findings() {
		if f.Into != "" {
			continue
		}
		text := fmt.Sprintf("%s, root %s of %s at %s in %s, %d failed", f.Pattern, f.Root.Error, f.Root.Agent, f.Root.Pool, f.Root.Workflow, f.Failed)
		for _, p := range f.Parts {
			text += fmt.Sprintf("; %s: %v %v %v", p.Workflow, p.Failed, p.BlastRadius, p.Errors)
		}
		found = append(found, text)
	}
	slices.Sort(found)
	return found
}

// C-3.4.2-c, ADR 0138: a failure that spreads over several logs is the cascade that it would be in one, in whatever
// order these are read.
func TestOrderOfLogs(t *testing.T) {
	spreading := 0
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 138))
		logs := 1 + r.IntN(4)
		all := spread(r, logs)
		want := outcomes(t, all)
		spreading += len(want)
		for range 5 {
			order := mixed(r, all, logs)
			if got := outcomes(t, order); !slices.Equal(got, want) {
				t.Fatalf("seed %d, %d logs:\n%q, not\n%q", seed, logs, got, want)
			}
		}
	}
	if spreading < 150 {
		t.Errorf("only %d cascades", spreading)
	}
}
