package workflow_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// tasks are those of the calls that the record with an id is among.
func tasks(l *Live, id string) []Task {
	place, known := l.Links.Place(id)
	if c := l.Calls(place); known && c != nil {
		return c.Tasks
	}
	return nil
}

// same holds that a Live has the tasks of the graph of the same records, in their states.
func same(t *testing.T, all []Record, l *Live) {
	t.Helper()
	g, counts := New(all), map[string]bool{}
	for _, i := range g.Tasks() {
		n := g.At(i)
		counts[n.ID] = true
		got := tasks(l, n.ID)
		if len(got) == 0 && n.IsCheckpoint() && !n.Own && n.Node == "" {
			continue // it is no node of any plan
		}
		at := slices.IndexFunc(got, func(task Task) bool { return task.ID == n.ID })
		if at < 0 {
			t.Fatalf("%s is no task\n%+v", n.ID, all)
		}
		if task := got[at]; task.State != n.State || task.Detail != n.Detail || task.Called != n.Called || task.Event != n.Event {
			t.Fatalf("%s is %s %s (called: %v), not %+v\n%+v", n.ID, n.State, n.Detail, n.Called, task, all)
		}
	}
	for i := range g.Len() { // also what is part of a task
		n := g.At(i)
		met := map[string]bool{}
		for _, task := range tasks(l, n.ID) {
			if !counts[task.ID] || met[task.ID] {
				t.Fatalf("%s has the task %s, which does not count, or twice\n%+v", n.ID, task.ID, all)
			}
			met[task.ID] = true
			if l.Links.ID(task.Place) != task.ID {
				t.Fatalf("%s is at the place of %s", task.ID, l.Links.ID(task.Place))
			}
		}
		if !n.IsTask() && !(n.IsCheckpoint() && n.Own) {
			continue
		}
		waits := n.State != Done || n.Detail != ""
		if n.State == Running || n.State == Pending {
			waits = n.Called
		}
		held := l.Holding([]string{n.ID})
		if len(held) > 0 != waits || waits && (held[0].State != n.State || held[0].Detail != n.Detail) {
			t.Fatalf("%s is %s %s (called: %v), and %+v holds\n%+v", n.ID, n.State, n.Detail, n.Called, held, all)
		}
	}
}

// FuzzLive: whatever comes in whatever order, the states are those that the whole graph has.
func FuzzLive(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 255, 255, 0x23, 0, 0, 0, 1, 255, 0x20, 0x10, 0, 0, 1, 2})
	f.Add([]byte{3, 0, 0, 0, 255, 255, 0, 0, 0, 0, 1, 255, 8, 0, 2, 0, 1, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		l := NewLive()
		all := records(data)
		for i, r := range all {
			l.Add(&r)
			l.Add(&r) // twice is once
			if i%3 == 0 || i == len(all)-1 {
				same(t, all[:i+1], l)
			}
		}
	})
}

func TestLiveOfRandomRecords(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 3))
	for range 300 {
		data := make([]byte, 6*(1+r.IntN(14)))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		// Parents that exist, more often than chance has it, and events of the gateway.
		for i := 0; i+6 <= len(data); i += 6 {
			if data[i+4] = byte(1 + r.IntN(5)); r.IntN(3) == 0 {
				data[i] = 0x20 | byte(r.IntN(12))
			}
		}
		l := NewLive()
		all := records(data)
		for i, record := range all {
			l.Add(&record)
			same(t, all[:i+1], l)
		}
	}
}

// Calls of which nothing but tokens, checkpoints and outcomes is recorded have the states that the whole graph has, also
// where these were asked for between their records.
func TestLiveOfPlainCalls(t *testing.T) {
	for seed := range uint64(6) {
		r := rand.New(rand.NewPCG(seed, 7))
		l, all := NewLive(), []Record(nil)
		for n := range 300 {
			from := len(all)
			for k := range 1 + r.IntN(4) {
				id := fmt.Sprint(n, "/", k)
				record := Record{ID: id, Issuer: "agent", Action: "act", Node: []string{"", id}[r.IntN(2)]}
				switch r.IntN(3) {
				case 0:
					record.Own, record.Event, record.Reversible = true, ect.EventCheckpoint, r.IntN(2) == 0
				case 1:
					record.Own, record.Outcome = true, []Outcome{Completed, InDoubt, Released, "other"}[r.IntN(4)]
				}
				if record.Own {
					record.Issuer, record.Execution = gateway, []string{"", fmt.Sprint(n), fmt.Sprint(n, "b")}[r.IntN(3)]
				}
				record.Escalated = r.IntN(20) == 0
				for i := from; i < len(all); i++ {
					if r.IntN(2) == 0 {
						record.Parents = append(record.Parents, all[i].ID)
					}
				}
				if len(all) > 0 && r.IntN(8) == 0 {
					record.Parents = append(record.Parents, all[r.IntN(len(all))].ID)
				}
				all = append(all, record)
				l.Add(&record)
				if r.IntN(3) == 0 {
					tasks(l, id)
				}
			}
			if n%20 == 19 {
				same(t, all, l)
			}
		}
	}
}

// called are the records of a call as the gateway makes them: the agent's token, the checkpoint, and the
// outcome, if it has one, with an error where that is no success.
func called(name, node string, outcome Outcome, parents ...string) []Record {
	all := []Record{
		{ID: name, Parents: parents, Action: "act", Issuer: "agent", Node: node},
		{ID: name + "/c", Parents: []string{name}, Event: ect.EventCheckpoint, Own: true, Issuer: gateway, Execution: name, Node: node, Reversible: true},
	}
	if outcome == "" {
		return all
	}
	all = append(all, Record{ID: name + "/s", Parents: []string{name, name + "/c"}, Action: "act", Own: true, Issuer: gateway, Execution: name, Outcome: outcome})
	if outcome != Completed {
		all = append(all, Record{ID: name + "/e", Parents: []string{name + "/s", name}, Event: ect.EventError, Own: true, Issuer: gateway, CheckpointID: name + "/c", Severity: "error"})
	}
	return all
}

// A-topological-order-b: of what a token names as a parent the calls hold it that are not done. What is no
// call does not, unless it has failed. A checkpoint or an error counts by its own action.
func TestHolding(t *testing.T) {
	own := func(r Record) Record {
		r.Own, r.Issuer = true, gateway
		return r
	}
	agents := func(r Record) Record {
		r.Issuer = "agent"
		return r
	}
	base := slices.Concat(
		called("done", "", Completed), called("runs", "", ""), called("doubt", "", InDoubt), called("free", "", Released),
		called("undone", "", Completed), called("asked", "", Completed), called("broken", "", Completed),
		[]Record{
			agents(Record{ID: "thought"}), agents(Record{ID: "wrong"}),
			agents(Record{ID: "wrong/e", Event: ect.EventError, Parents: []string{"wrong"}, Severity: "error"}),
			own(Record{ID: "u1", Event: ect.EventRollbackStart, CheckpointID: "undone/c"}),
			own(Record{ID: "u2", Event: ect.EventRollbackComplete, CheckpointID: "undone/c", Status: "completed"}),
			own(Record{ID: "a1", Event: ect.EventRollbackStart, CheckpointID: "asked/c"}),
			agents(Record{ID: "broken/x", Event: ect.EventError, Parents: []string{"broken"}, Severity: "error"}),
			agents(Record{ID: "start", Event: ect.EventWorkflowStart}),
			agents(Record{ID: "before", Event: ect.EventCheckpoint, Parents: []string{"runs"}}),
			agents(Record{ID: "first", Event: ect.EventCheckpoint}),
		})
	for _, more := range []struct {
		name string
		all  []Record
	}{{"few", nil}, {"all", []Record{ // makes New get all of them
		agents(Record{ID: "k", Event: ect.EventCheckpoint}), agents(Record{ID: "k/e", Event: ect.EventError, Parents: []string{"k"}}),
	}}} {
		l := NewLive()
		for _, r := range slices.Concat(base, more.all) {
			l.Add(&r)
		}
		for parent, want := range map[string]string{
			"done": "", "done/c": "", "done/s": "", "start": "", "unknown": "", "thought": "", "first": "", "k": "",
			"runs": "runs running ", "runs/c": "runs/c running ", "before": "runs running ",
			"doubt": "doubt failed in_doubt", "doubt/e": "doubt/s failed in_doubt", "free": "free failed released", "free/s": "free/s failed released",
			"undone": "undone rolled_back ", "undone/c": "undone/c rolled_back ", "asked": "asked done rollback_requested",
			"broken": "broken failed ", "broken/x": "broken failed ", "wrong": "wrong failed ", "wrong/e": "wrong failed ",
		} {
			got := ""
			for _, task := range l.Holding([]string{parent, "done"}) {
				got += task.ID + " " + string(task.State) + " " + string(task.Detail)
			}
			if got != want {
				t.Errorf("%s: after %s waits for %q, want %q", more.name, parent, got, want)
			}
		}
		// Asking about what nobody knows yet changes nothing.
		l.Holding([]string{"later"})
		for _, r := range called("later", "", Completed) {
			l.Add(&r)
		}
		if held := l.Holding([]string{"later"}); len(held) > 0 {
			t.Errorf("%s: %v", more.name, held)
		}
	}
}

// A task has the checkpoints that the gateway has made for it, also those of earlier attempts, and the node
// that they name.
func TestTaskOfLive(t *testing.T) {
	l := NewLive()
	for _, r := range called("x", "", Released) {
		l.Add(&r)
	}
	l.Add(&Record{ID: "x/c2", Parents: []string{"x"}, Event: ect.EventCheckpoint, Own: true, Issuer: gateway, Execution: "x", Node: "pay"})
	for _, id := range []string{"x", "x/c", "x/c2"} {
		got := tasks(l, id)
		if len(got) != 1 || got[0].ID != "x" || got[0].State != Running || got[0].Node != "pay" || !slices.Equal(got[0].Checkpoints, []string{"x/c", "x/c2"}) {
			t.Errorf("%+v", got)
		}
	}
}

// BenchmarkLive adds the records of one call to a workflow that has 10,000.
func BenchmarkLive(b *testing.B) {
	l := NewLive()
	n := 0
	add := func() {
		n++
		name := string(rune('a'+n%26)) + string(rune(n))
		for _, r := range called(name, "node", Completed) {
			place, _, _ := l.Add(&r)
			l.Calls(place)
		}
	}
	for range 10_000 {
		add()
	}
	b.ReportAllocs()
	for b.Loop() {
		add()
	}
}
