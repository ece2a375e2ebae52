package records

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// FillRole is the name of the part that fills a store.
const FillRole = "fill"

// fillers is how many executions are under way at a time.
const fillers = 256

// fillBound is how long a fill may take.
const fillBound = 20 * time.Minute

// Fill claims and settles executions as a gateway at -host would, and says how long
// that took.
func Fill(args []string) (err error) {
	flags := flag.NewFlagSet(FillRole, flag.ContinueOnError)
	path := flags.String("store", "", "directory of the store")
	host := flags.String("host", "", "host of the calls")
	records := flags.Uint64("records", 0, "number of executions")
	if err := flags.Parse(args); err != nil {
		return err
	}
	s, err := newShape(*host)
	if err != nil {
		return err
	}
	ring, err := seal.Create(*path + ".key")
	if err != nil {
		return err
	}
	st, err := badger.Open(*path, badger.Options{})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), fillBound, fmt.Errorf("not filled within %s", fillBound))
	defer cancel()
	g, _, err := execution.Open(ctx, st, ring)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := s.fill(ctx, g, *records); err != nil {
		return err
	}
	if err := st.Close(); err != nil {
		return err
	}
	proc.Ready(time.Since(begin).String())
	return nil
}

func (s *shape) fill(ctx context.Context, g *execution.Guard, records uint64) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Uint64
	var all sync.WaitGroup
	for range fillers {
		all.Go(func() {
			for n := next.Add(1) - 1; n < records && ctx.Err() == nil; n = next.Add(1) - 1 {
				if err := s.execute(ctx, g, n); err != nil {
					cancel(err)
				}
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

func (s *shape) execute(ctx context.Context, g *execution.Guard, n uint64) error {
	e, err := g.Claim(ctx, s.call(g, n), execution.Finding{})
	if err != nil {
		return err
	}
	e.Recording().Start(200, answer.header)
	e.Write(answer.body, false)
	return e.Settle(ctx, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
}
