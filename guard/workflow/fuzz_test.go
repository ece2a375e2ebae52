package workflow_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// records makes a graph of bytes, hostile ones too: cycles, missing parents, everybody
// says anything about anything.
func records(data []byte) []Record {
	events := []ect.Event{"", "", "", ect.EventCheckpoint, ect.EventCheckpoint, ect.EventError, ect.EventRollbackRequest, ect.EventRollbackStart, ect.EventRollbackComplete, ect.EventCompensate, ect.EventWorkflowComplete, "other"}
	pick := func(words []string, b byte) string { return words[int(b)%len(words)] }
	var all []Record
	for ; len(data) >= 6 && len(all) < 200; data = data[6:] {
		n := len(all)
		r := Record{
			ID: fmt.Sprint(n), Event: events[int(data[0])%len(events)], Issuer: pick([]string{"a", "b", gateway}, data[0]>>4),
			Status:       pick([]string{"completed", "partial", "escalated", "failed", ""}, data[1]),
			Outcome:      Outcome(pick([]string{"", "completed", "in_doubt", "released"}, data[1]>>4)),
			CheckpointID: fmt.Sprint(n - int(data[2])%8), Reversible: data[2]&0x80 == 0, Escalated: data[2]&0x70 == 0x70,
			Execution: pick([]string{"", "", "x", "y"}, data[3]),
		}
		r.Own = r.Issuer == gateway
		for _, b := range data[4:6] {
			if b&0x80 == 0 {
				r.Parents = append(r.Parents, fmt.Sprint(n-int(int8(b<<2)>>2)%16))
			}
		}
		all = append(all, r)
	}
	return all
}

// FuzzGraph: whatever is recorded, the graph is made, its order holds, and nothing
// is called done or rolled back without evidence (P6).
func FuzzGraph(f *testing.F) {
	f.Add([]byte{3, 0, 0, 0, 255, 255, 0, 0, 0, 0, 1, 255, 8, 0, 2, 0, 1, 255})
	// A task and a checkpoint that are each other's parents.
	f.Add([]byte{0, 0, 0, 0, 63, 255, 3, 0, 0, 0, 1, 255})
	f.Add([]byte{0, 0, 0, 0, 60, 1, 0, 0, 0, 0, 1, 60, 32, 48, 0, 2, 1, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		all := records(data)
		g := New(all)
		nodes := g.Nodes()
		if len(nodes) != len(all) {
			t.Fatalf("%d nodes of %d records", len(nodes), len(all))
		}
		at := make(map[string]int)
		for i, n := range nodes {
			at[n.ID] = i
		}
		unordered := g.Unordered()
		for _, e := range g.Edges() {
			if at[e.From] >= at[e.To] && !slices.Contains(unordered, e.To) {
				t.Errorf("%v against the order", e)
			}
		}
		for _, n := range nodes {
			evidence(t, all, n)
		}
		counted := 0
		for _, n := range g.Summary().Tasks {
			counted += n
		}
		if points := g.RecoveryPoints(time.Time{}); len(points)+counted > 2*len(all) {
			t.Errorf("%d points, %d tasks", len(points), counted)
		}
	})
}

// evidence holds that a node's state has a reason among the records.
func evidence(t *testing.T, all []Record, n Node) {
	t.Helper()
	is := func(some func(r *Record) bool) bool {
		return slices.ContainsFunc(all, func(r Record) bool { return some(&r) })
	}
	switch {
	case n.State == "" && n.Event == "":
		t.Errorf("task %s has no state", n.ID)
	case n.State != "" && n.Event != "" && n.Event != ect.EventCheckpoint:
		t.Errorf("%s, which is a %s, has the state %s", n.ID, n.Event, n.State)
	case n.State == RolledBack && !is(func(r *Record) bool {
		return (r.Event == ect.EventRollbackComplete || r.Event == ect.EventCompensate) && r.Status == "completed"
	}):
		t.Errorf("%s is rolled back, and no result says so", n.ID)
	case n.State == Done && n.Event == "" && !is(func(r *Record) bool {
		return r.Own && r.Outcome == Completed || r.Event == "" && r.ID != n.ID
	}):
		t.Errorf("%s is done, and nothing says so", n.ID)
	}
	if n.State != Done || n.Event != "" || n.Own && n.Outcome != "" {
		return
	}
	// The gateway's last word about a task's call decides.
	last := Completed
	for _, r := range all {
		about := func(id string) bool { // over an agent's checkpoint too
			return id == n.ID || is(func(c *Record) bool {
				return c.ID == id && c.Event == ect.EventCheckpoint && !c.Own && slices.Contains(c.Parents, n.ID)
			})
		}
		if r.Own && r.Event == "" && r.Outcome != "" && r.ID != n.ID && slices.ContainsFunc(r.Parents, about) {
			last = r.Outcome
		}
	}
	if last != Completed {
		t.Errorf("%s is done, and its call is %s", n.ID, last)
	}
}
