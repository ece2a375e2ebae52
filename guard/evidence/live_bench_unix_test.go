//go:build unix

package evidence_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	. "github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// BenchmarkStatesOfACall is what a plan costs a call beside what is written: to ask twice what holds its node, and to
// add its checkpoint and its outcome to the states. Each node waits for two others. It prints the processor time, and
// that of adding the records alone.
func BenchmarkStatesOfACall(b *testing.B) {
	for _, nodes := range []int{100, 1000, plan.MaxNodes} {
		b.Run(fmt.Sprint("nodes=", nodes), func(b *testing.B) { statesOfCalls(b, nodes) })
	}
}

func statesOfCalls(b *testing.B, nodes int) {
	r, text := rand.New(rand.NewPCG(1, 1)), &strings.Builder{}
	text.WriteString(`{"wf_id": "w", "nodes": [{"id": "n0"}`)
	for i := 1; i < nodes; i++ {
		fmt.Fprintf(text, `, {"id": "n%d"}`, i)
	}
	text.WriteString(`], "edges": [{"from": "n0", "to": "n1"}`)
	for i := 2; i < nodes; i++ {
		first := r.IntN(i)
		fmt.Fprintf(text, `, {"from": "n%d", "to": "n%d"}, {"from": "n%d", "to": "n%d"}`, first, i, (first+1+r.IntN(i-1))%i, i)
	}
	text.WriteString("]}")
	d, err := plan.Parse([]byte(text.String()))
	if err != nil {
		b.Fatal(err)
	}
	bench := newRollbackBench(b)
	events, caller := bench.recorder.EventBuilder, execution.CallerHash{1}
	type call struct{ claim, end []ledger.Event }
	draft := func(workflow string) (calls []call) {
		for i := range nodes {
			c := &Call{
				Key: keyOf(fmt.Sprint(i)), Caller: caller, Action: "act", Workflow: workflow, TTL: time.Hour, Reversible: true, Node: fmt.Sprint("n", i),
				Target: "https://orders.example", RollbackURI: "https://gateway.example/.well-known/cascade/rollback",
			}
			checkpoint, err := events.Checkpoint(time.Now(), c)
			if err != nil {
				b.Fatal(err)
			}
			end, err := events.Outcome(time.Now(), c, &Outcome{Checkpoint: checkpoint.ID(), Verdict: execution.Completed, Status: 201})
			if err != nil {
				b.Fatal(err)
			}
			calls = append(calls, call{EventsOf(checkpoint), EventsOf(end...)})
		}
		return calls
	}
	who := []string{CallerName(caller)}
	ask := func(workflow string, i int) {
		if err := bench.evidence.Live(b.Context(), events, workflow, func(l *plan.Live) {
			p := l.Part(who, nil)
			if held := p.Holds(d, fmt.Sprint("n", i), nil); held != nil {
				b.Error(held)
			}
		}); err != nil {
			b.Fatal(err)
		}
	}
	spend := func(does func()) time.Duration {
		var before, after syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
		does()
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
		return time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	}
	var all, records time.Duration
	made := 0
	for b.Loop() {
		workflow, other := uuid.NewString(), uuid.NewString()
		calls, recorded := draft(workflow), draft(other)
		ask(workflow, 0)
		ask(other, 0)
		all += spend(func() {
			for i, c := range calls {
				ask(workflow, i)
				ask(workflow, i)
				bench.evidence.LiveRecorded(c.claim)
				bench.evidence.LiveRecorded(c.end)
			}
		})
		records += spend(func() {
			for _, c := range recorded {
				bench.evidence.LiveRecorded(c.claim)
				bench.evidence.LiveRecorded(c.end)
				if err := bench.evidence.Live(b.Context(), events, other, func(*plan.Live) {}); err != nil {
					b.Fatal(err)
				}
			}
		})
		made += nodes
	}
	b.ReportMetric(float64(all.Nanoseconds())/float64(made)/1e3, "µs/call")
	b.ReportMetric(float64(records.Nanoseconds())/float64(made)/1e3, "µs-of-records/call")
}
