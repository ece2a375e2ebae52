//go:build unix

package crash

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

const (
	crashClients = 16
	// crashAfter is the longest that a round's load lasts, in events.
	crashAfter = 700
)

// crashRun is a store's history over many kills.
type crashRun struct {
	t        *testing.T
	upstream *harness.ProcUpstream
	sites    []*harness.ProcSite // on one store, any of which may be asked
	random   *rand.Rand

	mu       sync.Mutex
	calls    map[string]harness.ProcCall
	answered map[string][32]byte // the digest of each answer whose end was seen
	open     []string            // those without, of this round
	settled  map[string]bool     // in doubt for good
	// checkpoints are the calls' checkpoints, with what must have been told of them.
	checkpoints map[string]string
	tally       struct{ attached, replayed, doubtful, ran int }
}

// P1, P2, P7: whatever the moment of a SIGKILL, no call is executed twice, and every
// answer whose end was seen is there afterwards.
func TestCrashAtRandomMoments(t *testing.T) {
	t.Parallel() // its gateways are processes
	rounds := harness.CrashRounds(t, 5)
	seed := rand.Uint64()
	t.Logf("seed %d", seed) // kills hit where the scheduler lets them: it repeats the plan only
	upstream := harness.ProcNewUpstream(t)
	run := newCrashRun(t, upstream, seed, harness.ProcNewSite(t, upstream.Addr))
	run.sites[0].App = "identity spiffe://example.com/gateway"
	gateway := run.sites[0].Start(t)
	for round := range rounds {
		first := len(run.calls)
		run.load(gateway, round)
		run.upstream.Watch(nil)
		gateway = run.restart()
		run.retry()
		if t.Failed() {
			t.Fatalf("round %d of %d, %d calls before it", round+1, rounds, first)
		}
	}
	run.verifyAll()
	run.verifyLedger()
	gateway.End(t)

	count := upstream.Audit(t)
	for id := range run.answered {
		if count[id] != 1 {
			t.Errorf("P1: %s was answered and executed %d times", id, count[id])
		}
	}
	if run.tally.doubtful == 0 && run.tally.ran == 0 && run.tally.replayed == 0 {
		t.Error("no kill hit an open call")
	}
	t.Logf("%d kills, %d calls answered, none lost, none executed twice; open at a kill: %d in doubt, %d recorded, %d had not run",
		rounds, len(run.answered), run.tally.doubtful, run.tally.replayed, run.tally.ran)
}

func newCrashRun(t *testing.T, upstream *harness.ProcUpstream, seed uint64, sites ...*harness.ProcSite) *crashRun {
	return &crashRun{
		t: t, upstream: upstream, sites: sites, random: rand.New(rand.NewPCG(seed, 0)),
		calls: map[string]harness.ProcCall{}, answered: map[string][32]byte{}, settled: map[string]bool{},
		checkpoints: map[string]string{},
	}
}

// any is the address of one of the gateways.
func (r *crashRun) any() string { return r.sites[rand.IntN(len(r.sites))].Addr }

// load lets clients call until the gateway is killed, at a moment that the random
// source chooses: after so many effects or after so many answers.
func (r *crashRun) load(gateway *harness.ProcGateway, round int) {
	ctx, cancel := context.WithTimeout(context.Background(), harness.ProcBound)
	defer cancel()
	var events atomic.Int64
	moment := 1 + r.random.Int64N(crashAfter)
	byEffect := r.random.IntN(2) == 0
	event := func(effect bool) {
		if effect == byEffect && events.Add(1) == moment {
			_ = gateway.Cmd.Process.Kill()
		}
	}
	r.upstream.Watch(func(int) { event(true) })
	r.open = r.open[:0]
	var number atomic.Int64
	var clients sync.WaitGroup
	for range crashClients {
		clients.Go(func() {
			client := harness.ProcDial()
			defer client.CloseIdleConnections()
			for {
				c := crashCall(fmt.Sprintf("round-%d-%d", round, number.Add(1)))
				twin := r.twin(ctx, gateway, client, c)
				a, err := harness.ProcPost(ctx, client, r.any(), c)
				if second := <-twin; err != nil && second.Err == nil {
					a, err = second.Answer, nil // one of them saw the end
				}
				r.note(c, a, err)
				if err != nil {
					return
				}
				event(false)
			}
		})
	}
	clients.Wait()
	if ctx.Err() != nil {
		r.t.Error("the gateway survived its round")
	}
	<-gateway.Dead
}

// crashCall is a call of one of several shapes.
func crashCall(id string) harness.ProcCall {
	c := harness.ProcCall{Id: id, Header: map[string]string{}}
	switch n := len(id) + int(id[len(id)-1]); n % 8 {
	case 0:
		c.Header[harness.ProcSize] = "3000"
	case 1:
		c.Header[harness.ProcChunked] = "yes"
	case 2:
		c.Header[harness.ProcStatus] = "204"
	case 3:
		if id[len(id)-2]%4 == 0 {
			c.Header[harness.ProcSize] = "600000"
		}
	}
	return c
}

// twin sends some calls a second time beside the first.
func (r *crashRun) twin(ctx context.Context, gateway *harness.ProcGateway, client *http.Client, c harness.ProcCall) <-chan harness.ProcFuture {
	if c.Id[len(c.Id)-1]%4 != 0 {
		none := make(chan harness.ProcFuture, 1)
		none <- harness.ProcFuture{Err: context.Canceled}
		return none
	}
	return gateway.Begin(ctx, client, c)
}

// note remembers what came of a call in the load.
func (r *crashRun) note(c harness.ProcCall, a harness.ProcAnswer, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls[c.Id] = c
	switch {
	case err != nil:
		r.open = append(r.open, c.Id)
	case a.Execution() == "":
		r.t.Errorf("%s: refused without a kill: %v", c.Id, a)
	default:
		if a.Execution() == "attached" {
			r.tally.attached++
		}
		r.answered[c.Id] = a.Digest()
	}
}

// restart starts the gateway again; now and then it is killed in its start first.
func (r *crashRun) restart() *harness.ProcGateway {
	if r.random.IntN(4) == 0 {
		g := r.sites[0].Launch(r.t)
		// What a start says, a line at a time, is as good a clock as any.
		harness.WaitWithin(r.t, harness.ProcBound, g.Log.Line(1+r.random.IntN(10)), "a line of its log")
		g.Kill()
	}
	return r.sites[0].Start(r.t)
}

// retry repeats what was open at the kill until it is settled.
func (r *crashRun) retry() {
	r.each(r.open, func(client *http.Client, c harness.ProcCall) error {
		a, err := harness.ProcDefinite(r.t.Context(), client, r.any(), c)
		if err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case a.Problem() == "in-doubt":
			r.tally.doubtful++
			r.settled[c.Id] = true
			return nil
		case a.Replayed():
			r.tally.replayed++
		case a.Executed():
			r.tally.ran++
		default:
			return fmt.Errorf("neither in doubt nor an answer: %v", a)
		}
		r.answered[c.Id] = a.Digest()
		return nil
	})
}

// verifyAll checks every call of every round.
func (r *crashRun) verifyAll() {
	ids := make([]string, 0, len(r.calls))
	for id := range r.calls {
		ids = append(ids, id)
	}
	r.each(ids, func(client *http.Client, c harness.ProcCall) error {
		a, err := harness.ProcPost(r.t.Context(), client, r.any(), c)
		if err != nil {
			return err
		}
		if r.settled[c.Id] {
			if a.Problem() != "in-doubt" {
				return fmt.Errorf("P1: it was in doubt, and is not any more: %v", a)
			}
			return r.expect(a, "in_doubt")
		}
		if !a.Replayed() || a.Digest() != r.answered[c.Id] {
			return fmt.Errorf("P1: its end was seen, and it is not replayed: %v", a)
		}
		return r.expect(a, "completed")
	})
}

// each does something with calls, several at a time.
func (r *crashRun) each(ids []string, do func(client *http.Client, c harness.ProcCall) error) {
	next := make(chan harness.ProcCall)
	var clients sync.WaitGroup
	for range crashClients {
		clients.Go(func() {
			client := harness.ProcDial()
			defer client.CloseIdleConnections()
			for c := range next {
				if err := do(client, c); err != nil {
					r.t.Errorf("%s: %v", c.Id, err)
				}
			}
		})
	}
	for _, id := range ids {
		next <- r.calls[id]
	}
	close(next)
	clients.Wait()
}
