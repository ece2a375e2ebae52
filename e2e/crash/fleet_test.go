//go:build unix

package crash

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

const (
	crashHost         = "fleet.test" // the name under which clients know all gateways
	crashNodes        = 3
	crashFleetClients = 16
	// crashPatience is after how long a client with a key asks another gateway.
	crashPatience  = 2 * time.Second
	crashStatement = time.Second // the longest time of a statement
)

// fleetCrash is a crashRun over several gateways on one PostgreSQL. Clients ask any of them, and go on to
// another one when they get no answer, while gateways and the database are killed.
type fleetCrash struct {
	*crashRun
	server  atomic.Pointer[pgserver.Server] // the primary
	standby *pgserver.Server                // synchronous, until it is promoted
	nodes   []*crashNode
	number  atomic.Int64
	events  chan struct{} // one for each effect and each answer, as far as somebody waits for them
	frozen  atomic.Bool   // a gateway is stopped
	seen    sync.Map      // ids whose answer was seen to its end, and when
	tally   struct{ doubtful, settledLate, replayed, attached, keyless, refused atomic.Int64 }
}

// crashNode is one of the gateways, whose process comes and goes.
type crashNode struct {
	name    string
	site    *harness.ProcSite
	mu      sync.Mutex
	gateway *harness.ProcGateway // nil while somebody is busy with it
}

// newFleetCrash starts the gateways, and with failover a synchronous standby of the database.
func newFleetCrash(t *testing.T, seed uint64, failover bool) (*fleetCrash, bool) {
	t.Helper()
	server := pgserver.Test(t)
	if server == nil {
		return nil, false
	}
	upstream := harness.ProcNewUpstream(t)
	f := &fleetCrash{events: make(chan struct{}, 1)}
	f.server.Store(server)
	dsn := server.DSN()
	if failover {
		f.standby = crashStandby(t, server)
		dsn = fmt.Sprintf("host=%s,%s port=5432,5432 user=postgres dbname=postgres target_session_attrs=read-write", f.standby.Dir(), server.Dir())
	}
	var sites []*harness.ProcSite
	for n := range crashNodes {
		name := fmt.Sprintf("n%d", n+1)
		sites = append(sites, crashSite(t, upstream, dsn, name))
		f.nodes = append(f.nodes, &crashNode{name: name, site: sites[n]})
	}
	f.crashRun = newCrashRun(t, upstream, seed, sites...)
	upstream.Watch(func(int) { f.event() })
	f.start()
	return f, true
}

// crashStandby makes a synchronous standby of a server.
func crashStandby(t *testing.T, server *pgserver.Server) *pgserver.Server {
	t.Helper()
	standby, err := server.Standby("wal_retrieve_retry_interval=100ms") // it is back soon after a kill of the server
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := standby.Remove(); err != nil {
			t.Error(err)
		}
	})
	// Apart, since the first cannot be in a transaction.
	for _, statement := range []string{"alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"} {
		if _, err := server.SQL(statement); err != nil {
			t.Fatal(err)
		}
	}
	harness.EventuallyWithin(t, harness.ProcBound, "a synchronous standby", func() bool {
		state, err := server.SQL("select sync_state from pg_stat_replication")
		return err == nil && state == "sync"
	})
	return standby
}

// crashSite is one gateway of a fleet.
func crashSite(t *testing.T, upstream *harness.ProcUpstream, dsn, name string) *harness.ProcSite {
	t.Helper()
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Host = crashHost
	site.Store = "postgres {\n dsn {env.TEST_DSN}\n node " + name + "\n lease 2s\n }"
	site.App = "keys value {env.TEST_KEYS}\n identity spiffe://example.com/gateway {\n key_file " + site.Path("identity") + "\n }"
	site.Env = append(site.Env, "TEST_DSN="+dsn+fmt.Sprintf(" statement_timeout=%d", crashStatement.Milliseconds()), "TEST_KEYS=MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
	return site
}

// start starts the gateways that do not run.
func (f *fleetCrash) start() {
	f.t.Helper()
	for _, n := range f.nodes {
		n.mu.Lock()
		if n.gateway == nil {
			n.gateway = n.site.Launch(f.t)
		}
		n.mu.Unlock()
	}
	for _, n := range f.nodes {
		if !n.gateway.Ready(f.t) {
			f.t.Fatalf("%s did not start: %v\n%s", n.site.Dir, n.gateway.Err, n.gateway.Log.Tail(6000))
		}
	}
}

// take takes the gateway's process for the one who is about to kill it; nil where somebody has it.
func (n *crashNode) take() *harness.ProcGateway {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := n.gateway
	n.gateway = nil
	return g
}

func (n *crashNode) put(g *harness.ProcGateway) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gateway = g
}

func (f *fleetCrash) event() {
	select {
	case f.events <- struct{}{}:
	default:
	}
}

// await waits for so many effects and answers, or more, or until the test has failed: clients call no more then.
func (f *fleetCrash) await(events int) {
	f.t.Helper()
	look := time.NewTicker(100 * time.Millisecond)
	defer look.Stop()
	for range events {
		late := time.After(harness.ProcBound)
		for came := false; !came && !f.t.Failed(); {
			select {
			case <-f.events:
				came = true
			case <-look.C:
			case <-late:
				f.stuck()
				f.t.Fatal("no effect or answer came")
			}
		}
	}
}

// stuck logs what the database and the gateways are busy with.
func (f *fleetCrash) stuck() {
	activity, err := f.server.Load().SQL("select a.pid, a.application_name, a.state, a.wait_event_type, a.wait_event, now() - a.state_change, pg_blocking_pids(a.pid), left(a.query, 120) " +
		"from pg_stat_activity a where a.backend_type = 'client backend' order by a.state_change")
	f.t.Logf("the database: %v\n%s", err, activity)
	members, err := f.server.Load().SQL("select * from agent_guard.members")
	f.t.Logf("members: %v\n%s", err, members)
	for _, n := range f.nodes {
		if g := n.take(); g != nil && g.Alive() {
			_ = g.Cmd.Process.Signal(syscall.SIGCONT)
			_ = g.Cmd.Process.Signal(syscall.SIGQUIT) // it says what its goroutines do
			<-g.Dead
			f.t.Logf("%s:\n%s", n.name, g.Log.Tail(200_000))
		} else {
			f.t.Logf("%s: nobody has it, or it is being killed", n.name)
		}
	}
}

// work lets clients call until ctx ends; the calls that they have begun come to their end.
func (f *fleetCrash) work(ctx context.Context, clients *sync.WaitGroup) {
	for n := range crashFleetClients {
		clients.Go(func() {
			client := harness.ProcDial()
			defer client.CloseIdleConnections()
			for ctx.Err() == nil && !f.t.Failed() {
				c := f.next(n%4 == 0)
				if c.Id == "" {
					f.settle(client, c)
					continue
				}
				var twin sync.WaitGroup
				if c.Id[len(c.Id)-1]%4 == 0 {
					twin.Go(func() { f.settle(client, c) })
				}
				f.settle(client, c)
				twin.Wait()
			}
		})
	}
}

// next is a new call. One without a key has its name in its content and in a field of its own.
func (f *fleetCrash) next(keyless bool) harness.ProcCall {
	c := crashCall(fmt.Sprintf("call-%d", f.number.Add(1)))
	c.Host = crashHost
	f.mu.Lock()
	defer f.mu.Unlock()
	if keyless {
		f.tally.keyless.Add(1)
		c.Header[harness.ProcName], c.Body = c.Id, fmt.Sprintf(`{"amount":4200,"for":%q}`, c.Id)
		c.Id = ""
		return c
	}
	f.calls[c.Id] = c
	return c
}

// settle repeats a call at any of the gateways until its answer is final, and compares that with what others
// have seen of it.
func (f *fleetCrash) settle(client *http.Client, c harness.ProcCall) {
	late := time.Now().Add(harness.ProcBound)
	for {
		begun := time.Now()
		patience := harness.ProcBound
		if c.Id != "" {
			// Without a key it would be one more of its kind: the gateway that it was given up at may
			// have it still before it.
			patience = crashPatience
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		a, err := harness.ProcPost(ctx, client, f.any(), c)
		cancel()
		if f.judge(c, a, err, begun) || f.t.Failed() {
			f.event()
			return
		}
		if time.Now().After(late) {
			f.t.Errorf("%s has no final answer: %v, %v", c.Name(), a, err)
			return
		}
		if err != nil || a.Problem() != "" {
			<-time.After(time.Duration(5+rand.IntN(20)) * time.Millisecond) // as clients do
		}
	}
}

// judge reports whether an answer is final.
func (f *fleetCrash) judge(c harness.ProcCall, a harness.ProcAnswer, err error, begun time.Time) bool {
	if err != nil {
		return false
	}
	name := c.Name()
	seen, before := f.seen.Load(name)
	before = before && seen.(time.Time).Before(begun)
	switch problem := a.Problem(); {
	case problem == "in-progress" || problem == "shutting-down" || problem == "store-unavailable":
		f.tally.refused.Add(1)
		return false
	case problem == "result-unavailable":
		f.tooLarge(c, a)
		return true
	case problem == "in-doubt":
		if before {
			f.t.Errorf("P2: the end of the answer of %s was seen, and now it is in doubt", name)
		}
		f.tally.doubtful.Add(1)
		f.mu.Lock()
		f.settled[name] = true
		f.mu.Unlock()
		return true
	case a.Execution() == "":
		f.t.Errorf("%s: refused: %v", name, a)
		return true
	case a.Executed() && before:
		f.t.Errorf("P1: the end of the answer of %s was seen, and now it was executed", name)
	case a.Replayed():
		f.tally.replayed.Add(1)
	case a.Execution() == "attached":
		f.tally.attached.Add(1)
	}
	f.whole(c, a)
	f.mu.Lock()
	defer f.mu.Unlock()
	if first, ok := f.answered[name]; ok && first != a.Digest() {
		f.t.Errorf("P1: %s was answered in two ways, now %v", name, a)
	}
	f.answered[name] = a.Digest()
	f.seen.LoadOrStore(name, time.Now())
	return true
}

// tooLarge holds that a call whose answer is not kept was in doubt for whoever has asked, and that its answer is too large
// to be kept by an owner that was removed from the store meanwhile.
func (f *fleetCrash) tooLarge(c harness.ProcCall, a harness.ProcAnswer) {
	var size int
	_, _ = fmt.Sscan(c.Header[harness.ProcSize], &size)
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, answered := f.answered[c.Name()]; answered || size <= 256<<10 {
		f.t.Errorf("P7: the answer of %s, of %d bytes, is lost (it was answered: %t): %v", c.Name(), size, answered, a)
	}
}

// whole holds that an answer is the one that the upstream gives for its effect, to the last byte.
func (f *fleetCrash) whole(c harness.ProcCall, a harness.ProcAnswer) {
	var effect, size int
	_, _ = fmt.Sscan(a.Header.Get("Effect"), &effect)
	_, _ = fmt.Sscan(c.Header[harness.ProcSize], &size)
	want := ""
	if c.Header[harness.ProcStatus] != "204" {
		want = harness.ProcBody(effect, size)
	}
	if effect == 0 || a.Body != want {
		f.t.Errorf("P7: the answer of %s is not what the upstream has sent for effect %d: %v", c.Name(), effect, a)
	}
}

// disturb kills gateways and the database, rounds times, and has all of them run in the end.
func (f *fleetCrash) disturb(rounds int) (stops, databases int) {
	var busy sync.WaitGroup
	for n := range rounds {
		f.await(1 + f.random.IntN(100))
		if f.t.Failed() {
			break
		}
		if n%10 == 9 {
			databases++
			if f.standby != nil && n >= rounds/2 {
				f.failover()
			} else {
				server := f.server.Load()
				if err := server.Kill(); err != nil {
					f.t.Error(err)
				}
				if err := server.Run(); err != nil {
					f.t.Fatal(err)
				}
			}
		}
		node, gateway := f.victim()
		// One at a time: somebody has to remove it.
		stop, begin := rounds > 1 && f.random.IntN(8) == 0 && f.frozen.CompareAndSwap(false, true), f.random.IntN(4) == 0
		wake, lines := f.random.IntN(4) > 0, 1+f.random.IntN(10)
		if stop {
			stops++
		}
		busy.Go(func() {
			if stop {
				woken := f.stopped(node, gateway, wake)
				f.frozen.Store(false)
				if woken {
					node.put(gateway)
					f.wroteNothing()
					return
				}
			}
			gateway.Kill()
			if begin { // and once more while it starts
				g := node.site.Launch(f.t)
				<-g.Log.Line(lines)
				g.Kill()
			}
			node.put(node.site.Launch(f.t))
		})
	}
	busy.Wait()
	f.start()
	return stops, databases
}

// failover kills the primary for good, and promotes its standby.
func (f *fleetCrash) failover() {
	f.t.Helper()
	primary := f.server.Load()
	// A commit that waits for the standby until the time of its statement is over is kept by the primary, and read
	// there, without being at the standby: PostgreSQL has it so. None is when all that was written less than that time
	// ago is there.
	harness.EventuallyWithin(f.t, harness.ProcBound, "a standby that has all", func() bool {
		begun := time.Now()
		at, err := primary.SQL("select pg_current_wal_insert_lsn()")
		if err != nil {
			return false
		}
		has, err := primary.SQL("select coalesce(bool_and(flush_lsn >= '" + at + "'), false) from pg_stat_replication")
		return err == nil && has == "t" && time.Since(begun) < crashStatement/2
	})
	if err := primary.Kill(); err != nil {
		f.t.Error(err)
	}
	if err := f.standby.Promote(); err != nil {
		f.t.Fatal(err)
	}
	f.server.Store(f.standby)
	f.standby = nil
}

// victim takes a gateway that runs, or starts.
func (f *fleetCrash) victim() (node *crashNode, gateway *harness.ProcGateway) {
	f.t.Helper()
	harness.EventuallyWithin(f.t, harness.ProcBound, "a gateway that runs", func() bool {
		node = f.nodes[f.random.IntN(len(f.nodes))]
		gateway = node.take()
		return gateway != nil
	})
	return node, gateway
}

// stopped stops a process until the others have removed it, and lets it go on. It reports false where it is to
// be killed instead.
func (f *fleetCrash) stopped(n *crashNode, g *harness.ProcGateway, wake bool) bool {
	boot, err := f.boot(n)
	if err != nil || boot == "" {
		return false // it has not joined yet
	}
	if err := g.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return false
	}
	late := time.After(harness.ProcBound)
	for now, err := f.boot(n); err != nil || now == boot; now, err = f.boot(n) {
		select {
		case <-time.After(100 * time.Millisecond): // psql is a process
		case <-late:
			f.t.Errorf("a gateway that was stopped is not removed: %q, %v", now, err)
			return false
		}
	}
	return wake && g.Cmd.Process.Signal(syscall.SIGCONT) == nil
}

// wroteNothing holds for a moment that no gateway has written under a membership that has ended: the feed has what is
// committed in its order, and the removals.
func (f *fleetCrash) wroteNothing() {
	for range 15 {
		late, err := f.server.Load().SQL(`select count(*) from agent_guard.feed f join agent_guard.feed g on g.boot = f.boot and g.gone and f.seq > g.seq`)
		if err == nil && late != "0" { // else the database is being killed
			f.t.Errorf("a gateway that was removed has written %s times since", late)
			return
		}
		<-time.After(100 * time.Millisecond) // psql is a process
	}
}

// boot is the life of the gateway that is a member of the store; empty if none is.
func (f *fleetCrash) boot(n *crashNode) (string, error) {
	return f.server.Load().SQL("select coalesce(min(boot), '') from agent_guard.members where node = '" + n.name + "'")
}

// verifyAll asks for every call once more: what was answered is replayed, by any gateway, and what is in
// doubt is so at each, unless its owner has settled it since.
func (f *fleetCrash) verifyAll() {
	ids := make([]string, 0, len(f.calls))
	for id := range f.calls {
		ids = append(ids, id)
	}
	f.each(ids, func(client *http.Client, c harness.ProcCall) error {
		f.mu.Lock()
		digest, answered := f.answered[c.Id]
		f.mu.Unlock()
		asked := f.sites
		if answered { // any of them will do
			n := rand.IntN(len(asked))
			asked = asked[n : n+1]
		}
		var doubt harness.ProcAnswer
		for _, site := range asked {
			a, err := harness.ProcPost(f.t.Context(), client, site.Addr, c)
			for late := time.Now().Add(harness.ProcBound); err == nil && a.Problem() == "in-progress" && time.Now().Before(late); {
				<-time.After(50 * time.Millisecond) // its outcome waits for the store (ADR 0147)
				a, err = harness.ProcPost(f.t.Context(), client, site.Addr, c)
			}
			if err != nil {
				return err
			}
			outcome := "completed"
			switch {
			case a.Problem() == "in-doubt" && !answered:
				outcome, doubt = "in_doubt", a
			case a.Problem() == "result-unavailable": // which names no checkpoint
				f.tooLarge(c, a)
				if doubt.Status == 0 {
					continue
				}
				a = doubt
			case !a.Replayed():
				return fmt.Errorf("P1: neither replayed nor in doubt: %v", a)
			case answered && a.Digest() != digest:
				return fmt.Errorf("P1: another answer than before: %v", a)
			default:
				f.whole(c, a)
				if !answered {
					f.tally.settledLate.Add(1)
				}
				digest, answered = a.Digest(), true
				f.mu.Lock()
				f.answered[c.Id] = digest
				f.mu.Unlock()
			}
			if err := f.expect(a, outcome); err != nil {
				return err
			}
		}
		return nil
	})
}

// P1, P2, P6, P7 over several gateways: whatever is killed, at whatever moment, a client that repeats its call
// at any of them gets one answer, or a doubt; nothing is executed twice, and nothing that was answered is lost.
func TestCrashFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	rounds := harness.CrashRounds(t, 1)
	seed := rand.Uint64()
	t.Logf("seed %d", seed) // kills hit where the scheduler lets them: it repeats the plan only
	full := rounds > 1      // else it is a short look at what takes minutes
	f, there := newFleetCrash(t, seed, full)
	if !there {
		return
	}
	if full {
		f.roll(crashNodes)
	}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	var clients sync.WaitGroup
	f.work(ctx, &clients)
	stops, databases := f.disturb(rounds)
	end()
	clients.Wait()
	if t.Failed() {
		return
	}
	f.calm(full)
	f.verifyAll()
	f.verifyLedger()
	for _, n := range f.nodes {
		n.gateway.End(t)
	}
	count := f.upstream.Audit(t)
	for id := range f.answered {
		if count[id] != 1 {
			t.Errorf("P1: %s was answered and executed %d times", id, count[id])
		}
	}
	tally := &f.tally
	failovers := 0
	if full && f.standby == nil {
		failovers = 1
	}
	t.Logf("%d kills of gateways (%d stopped until they were removed) and %d of the database (%d with its standby promoted); %d calls answered, %d without a key; "+
		"%d doubts, %d of them settled by their owner later; %d replayed, %d attached, %d refusals that were retried",
		rounds, stops, databases, failovers, len(f.answered), tally.keyless.Load(), tally.doubtful.Load(), tally.settledLate.Load(),
		tally.replayed.Load(), tally.attached.Load(), tally.refused.Load())
}

// calm holds that gateways that all run refuse nothing, doubt nothing and know of each other, and neither do those
// beside one that is killed.
func (f *fleetCrash) calm(kill bool) {
	f.t.Helper()
	for _, n := range f.nodes {
		f.takesCalls(n)
	}
	var clients sync.WaitGroup
	before := f.tally.refused.Load() + f.tally.doubtful.Load()
	for range 8 {
		clients.Go(func() {
			client := harness.ProcDial()
			defer client.CloseIdleConnections()
			for range 5 {
				c := f.next(false)
				var twin sync.WaitGroup
				twin.Go(func() { f.settle(client, c) })
				f.settle(client, c)
				twin.Wait()
			}
		})
	}
	clients.Wait()
	if after := f.tally.refused.Load() + f.tally.doubtful.Load(); after != before {
		f.t.Errorf("%d refusals and doubts though nothing was killed", after-before)
	}
	if !kill {
		return
	}
	node, gateway := f.victim()
	gateway.Kill()
	for i, n := range f.nodes {
		c := harness.ProcCall{Id: fmt.Sprint("beside-", i), Host: crashHost}
		if n == node {
			continue
		}
		if a, err := harness.ProcPost(f.t.Context(), http.DefaultClient, n.site.Addr, c); err != nil || !a.Executed() {
			f.t.Errorf("a gateway beside one that was killed: %v, %v", a, err)
		}
	}
	node.put(node.site.Start(f.t))
	f.takesCalls(node)
}

// takesCalls waits until a gateway takes calls.
func (f *fleetCrash) takesCalls(n *crashNode) {
	f.t.Helper()
	harness.EventuallyWithin(f.t, harness.ProcBound, n.name+" takes calls", func() bool {
		r, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, "http://"+n.site.Addr+"/.well-known/cascade/health", nil)
		if err != nil {
			f.t.Fatal(err)
		}
		r.Host = crashHost
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// balancer is a Caddy in front of the gateways, as docs/fleet.md has it.
func (f *fleetCrash) balancer() *harness.ProcSite {
	site := harness.ProcNewSite(f.t, "")
	site.Raw = fmt.Sprintf(`{
	admin %s
	persist_config off
}
http://%s%s {
	bind 127.0.0.1
	reverse_proxy %s %s %s {
		lb_policy random
		lb_try_duration 10s
		lb_try_interval 50ms
		lb_retry_match method POST
		lb_retry_match expression `+"`{rp.status_code} == 503 && {rp.header.Execution-Status} == \"refused\"`"+`
		request_buffers 1MiB
		health_uri /.well-known/cascade/health
		health_interval 200ms
	}
}
`, site.Admin, crashHost, site.Addr[strings.LastIndexByte(site.Addr, ':'):], f.sites[0].Addr, f.sites[1].Addr, f.sites[2].Addr)
	return site
}

// roll ends gateways in order, one after the other, and starts them again, while clients call through a
// load balancer. No client sees an error, a refusal or a doubt.
func (f *fleetCrash) roll(nodes int) {
	f.t.Helper()
	front := f.balancer()
	balancer := front.Start(f.t)
	ctx, end := context.WithCancel(f.t.Context())
	defer end()
	var clients sync.WaitGroup
	var calls atomic.Int64
	for n := range crashFleetClients {
		clients.Go(func() {
			client := harness.ProcDial()
			defer client.CloseIdleConnections()
			for ctx.Err() == nil {
				c := f.next(n%4 == 0)
				begun := time.Now()
				a, err := harness.ProcPost(f.t.Context(), client, front.Addr, c)
				f.event()
				if !f.judge(c, a, err, begun) || a.Problem() != "" {
					f.t.Errorf("%s got an error in a restart: %v, %v", c.Name(), a, err)
					return
				}
				calls.Add(1)
			}
		})
	}
	for _, n := range f.nodes[:nodes] {
		f.await(20)
		n.take().End(f.t)
		f.await(20)
		n.put(n.site.Start(f.t))
		f.takesCalls(n)
	}
	f.await(20)
	end()
	clients.Wait()
	balancer.End(f.t)
	f.t.Logf("%d calls while %d gateways were restarted", calls.Load(), nodes)
}
