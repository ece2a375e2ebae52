//go:build unix

package guard_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// BenchmarkCallUnderAPlan has whole calls over a store on disk in a workflow with a plan, in which each is a node that
// waits for two others, and in one without, in turn: a pair is 50 calls of each, with all that the ledger does for them,
// and pairs begin with the one and with the other by turns. It prints the medians of the processor time, and the
// quartiles of the difference.
func BenchmarkCallUnderAPlan(b *testing.B) {
	for _, nodes := range []int{100, 1000, plan.MaxNodes} {
		b.Run(fmt.Sprint("nodes=", nodes), func(b *testing.B) { callsUnderAPlan(b, nodes) })
	}
}

func callsUnderAPlan(b *testing.B, nodes int) {
	const block = 50
	st, err := badger.Open(b.TempDir(), badger.Options{})
	if err != nil {
		b.Fatal(err)
	}
	check := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	b.Cleanup(func() { _ = st.Close() })
	sealer := seal.Generate()
	engine, _, err := guard.OpenEngine(b.Context(), st, sealer, slog.New(slog.DiscardHandler))
	check(err)
	ring, err := ect.GenerateRing(ect.ES256)
	check(err)
	ev, err := evidence.Open(b.Context(), evidence.Options{Store: st, Sealer: sealer, Node: "node", Ring: ring})
	check(err)
	b.Cleanup(func() { _ = ev.Close(context.Background()) })
	events, err := ev.EventBuilder(gatewayName)
	check(err)
	policy := &guard.TokenPolicy{Engine: engine, Evidence: ev, Events: events, HandlesRollback: api.HandlesRollback}
	h, err := guard.New(guard.Config{
		Open: engine.Open, Tokens: func() (*guard.TokenPolicy, error) { return policy, nil },
		Next: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }),
	})
	check(err)

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
	check(err)

	calls := func(workflow string, from int) (each float64) {
		var before, after syscall.Rusage
		check(syscall.Getrusage(syscall.RUSAGE_SELF, &before))
		for i := from; i < from+block; i++ {
			r := httptest.NewRequest(http.MethodPost, "/pay", strings.NewReader(`{"amount":1999}`))
			r.Header.Set("Authorization", "Bearer 0123456789abcdef")
			r.Header.Set("Idempotency-Key", fmt.Sprint(workflow, "/", i))
			r.Header.Set(guard.HeaderWorkflowID, workflow)
			r.Header.Set("Workflow-Node", fmt.Sprint("n", i))
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Code != http.StatusCreated {
				b.Fatal(w.Code, w.Body)
			}
		}
		check(syscall.Getrusage(syscall.RUSAGE_SELF, &after))
		return float64(after.Utime.Nano()+after.Stime.Nano()-before.Utime.Nano()-before.Stime.Nano()) / block / 1e3
	}
	var with, without, more []float64
	planned, next := "", nodes
	for b.Loop() {
		if next+block > nodes {
			planned, next = fmt.Sprint("planned-", len(more)), 0
			_, _, err := engine.Plans.Put(b.Context(), plan.Putting{Workflow: evidence.WorkflowID(planned), By: "ann", Plan: d})
			check(err)
			calls(planned, 0)
			calls("not-"+planned, 0)
			next = block
		}
		var a, z float64
		if len(more)%2 == 0 {
			a = calls(planned, next)
		}
		z = calls("not-"+planned, next)
		if len(more)%2 == 1 {
			a = calls(planned, next)
		}
		with, without, more = append(with, a), append(without, z), append(more, a-z)
		next += block
	}
	at := func(all []float64, part float64) float64 {
		slices.Sort(all)
		return all[int(part*float64(len(all)-1))]
	}
	b.ReportMetric(at(with, 0.5), "µs/planned-call")
	b.ReportMetric(at(without, 0.5), "µs/other-call")
	b.ReportMetric(at(more, 0.5), "µs-more/call")
	b.ReportMetric(at(more, 0.25), "µs-more/call-first-quartile")
	b.ReportMetric(at(more, 0.75), "µs-more/call-third-quartile")
	b.ReportMetric(at(with, 0.5)/at(without, 0.5), "ratio")
}
