// Package contain measures what a failing agent does to others: a chain of agents with a gateway before
// each, of which one fails, hangs, leaks or answers nonsense, and a second workflow that shares the other
// agents with it. The same chain runs with bare proxies in the gateways' place.
package contain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Options say what to measure, and where.
type Options struct {
	// Faults are the faults to try.
	Faults []string
	// Fault is how long the agent is at fault, Before and After how long it works before and after that.
	Before, Fault, After time.Duration
	// Failing and Neighbour are the calls a second of the two workflows.
	Failing, Neighbour float64
	// Dir is a directory on the file system to use.
	Dir string
}

// Default is what docs/containment.md has.
var Default = Options{
	Faults: Faults, Before: 3 * time.Second, Fault: 10 * time.Second, After: 10 * time.Second,
	Failing: 20, Neighbour: 10,
}

// Validate checks the options.
func (o *Options) Validate() error {
	for _, f := range o.Faults {
		if !slices.Contains(Faults, f) {
			return fmt.Errorf("faults: no %q; there are %s", f, strings.Join(Faults, ", "))
		}
	}
	for name, d := range map[string]time.Duration{"before": o.Before, "fault": o.Fault, "after": o.After} {
		if d < 100*time.Millisecond || d > time.Minute {
			return fmt.Errorf("%s: from 100ms to 1m", name)
		}
	}
	if min(o.Failing, o.Neighbour) < 1 || max(o.Failing, o.Neighbour) > 200 {
		return errors.New("failing, neighbour: from 1 to 200 calls a second")
	}
	return nil
}

// Report is what was measured.
type Report struct {
	Machine table.Machine `json:"machine"`
	Go      string        `json:"go"`
	Options Options       `json:"options"`
	Trials  []Trial       `json:"trials"`
}

// Trial is one fault in one chain.
type Trial struct {
	Fault string `json:"fault"`
	// Chain is Bare or Guarded.
	Chain string `json:"chain"`
	// Neighbour and Failing are the calls of the two workflows that began during the fault, Usual those
	// of the neighbour before it.
	Usual     Calls `json:"usual"`
	Neighbour Calls `json:"neighbour"`
	Failing   Calls `json:"failing"`
	// Contained is how long it took until a gateway refused the calls of the failing agent; nil is never.
	Contained *time.Duration `json:"contained"`
	// Spread is how often another agent was found refused as well, of the looks that were taken.
	Spread int `json:"spread"`
	// Reached are the calls that reached the failing agent during the fault.
	Reached int `json:"reached"`
	// Repeated are the pieces of work whose effect came more than once, of Items.
	Repeated int `json:"repeated"`
	Items    int `json:"items"`
	// Held is the most requests that the two agents before the failing one had open at a time,
	// Goroutines the most goroutines of their processes.
	Held       int `json:"held"`
	Goroutines int `json:"goroutines"`
	// Recovered is how long it took after the fault until the calls of the failing workflow were good
	// again, and stayed so; nil is not within Options.After.
	Recovered *time.Duration `json:"recovered"`
	// Informed are the events in the ledgers of the gateways, by their kind, and Asked the questions to
	// people.
	Informed map[string]int `json:"informed,omitempty"`
	Asked    int            `json:"asked"`
}

// Calls are calls of a workflow.
type Calls struct {
	Made   int           `json:"made"`
	Good   int           `json:"good"`
	Median time.Duration `json:"median"`
	P99    time.Duration `json:"p99"`
}

const (
	// patience is how long the one who asks the first agent waits.
	patience = 15 * time.Second
	// timeout is how long an agent waits for the next one, each time that it asks.
	timeout = 4 * time.Second
	// workers are those of each agent but the first, which has more.
	workers, firstWorkers = 16, 256
	// every is how often agents and breakers are looked at.
	every = 50 * time.Millisecond
	// steady is how many good calls in a row end a failure.
	steady = 10

	identity = "spiffe://example.com/gateway"
)

// Measure tries each fault, with bare proxies and with the guard. progress hears what is under way.
func Measure(ctx context.Context, o Options, progress func(string)) (_ *Report, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &Report{Go: runtime.Version(), Options: o}
	if r.Machine, err = table.Look(o.Dir); err != nil {
		return nil, err
	}
	for _, fault := range o.Faults {
		for _, kind := range []string{Bare, Guarded} {
			progress(fmt.Sprintf("one agent %s, %s", fault, kind))
			trial, err := try(ctx, &o, fault, kind)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", fault, kind, err)
			}
			r.Trials = append(r.Trials, *trial)
		}
	}
	return r, nil
}

// The chains that are compared.
const (
	// Bare has a reverse_proxy before each agent, as people write it.
	Bare = "bare"
	// Guarded has an agent_proxy in its place.
	Guarded = "guard"
)

// chain are the processes of one trial:
//
//	first -> gateway 0 -> second -> gateway 1 -> failing -> gateway 2 -> tool
//	                                          \> healthy /
//
// The failing workflow goes over the failing agent, its neighbour over the healthy one.
type chain struct {
	dir                                   string
	first, second, failing, healthy, tool *proc.Proc
	gateways                              [3]*gateway.Gateway
	client                                *http.Client
}

// The paths of the two workflows.
const (
	failingPath   = "/failing/work"
	neighbourPath = "/healthy/work"
)

// What the gateways say of an agent, in proportion to what it can do: the second agent has 16 workers.
const (
	breakers = "breaker {\n window 10s\n cooldown 1s 4s\n in_band json /error\n}\n"
	// strict is for an agent that serves one purpose, and from which an answer within half a second is
	// expected.
	strict   = "breaker {\n window 10s\n cooldown 1s 4s\n in_band json /error\n consecutive 5\n slow 500ms\n}\n"
	bulkhead = "bulkhead {\n total 16\n per_workflow 8\n wait 1s\n}\n"
)

// way are the directives that lead to a process; all paths or those below one.
func way(kind, below string, to *proc.Proc, options string) string {
	matcher, named := "", ""
	if below != "" {
		matcher, named = fmt.Sprintf("/%s/*", below), "name "+below+"\n"
	}
	if kind == Bare {
		return fmt.Sprintf("reverse_proxy %s %s", matcher, to.Word)
	}
	return fmt.Sprintf("agent_proxy %s %s {\n%s%s}", matcher, to.Word, named, options)
}

// start starts the processes, the last of the chain first. The chain has to be ended, also after an error.
func start(o *Options, kind string) (c *chain, err error) {
	c = &chain{client: &http.Client{Timeout: patience, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	if c.dir, err = os.MkdirTemp(o.Dir, "agc"); err != nil {
		return c, err
	}
	for i := range c.gateways {
		g, err := gateway.New(filepath.Join(c.dir, fmt.Sprint(i)), "", kind != Bare)
		if err != nil {
			return c, err
		}
		g.Options = fmt.Sprintf("identity %s/%d {\n public_url http://%s\n }\n quota {\n checkpoint_rate off\n checkpoints workflow off\n }\n", identity, i, g.Addr)
		c.gateways[i] = g
	}
	agent := func(p **proc.Proc, next *gateway.Gateway, workers int) {
		args := []string{"-workers", fmt.Sprint(workers), "-timeout", timeout.String()}
		if next != nil {
			args = append(args, "-next", "http://"+next.Addr)
		}
		if err == nil {
			*p, err = proc.Start(proc.Spec{Role: Role, Args: args})
		}
	}
	before := func(i int, site func() string) {
		if err == nil {
			c.gateways[i].Site = site()
			err = c.gateways[i].Start()
		}
	}
	agent(&c.tool, nil, 256)
	before(2, func() string { return way(kind, "", c.tool, "deadline 1s\n") })
	agent(&c.failing, c.gateways[2], workers)
	agent(&c.healthy, c.gateways[2], workers)
	before(1, func() string {
		return way(kind, "healthy", c.healthy, "deadline 1500ms\n"+breakers) + "\n" +
			way(kind, "", c.failing, "deadline 1500ms\n"+strict)
	})
	agent(&c.second, c.gateways[1], workers)
	before(0, func() string { return way(kind, "", c.second, "deadline 2500ms\n"+breakers+bulkhead) })
	agent(&c.first, c.gateways[0], firstWorkers)
	return c, err
}

func (c *chain) end() {
	for _, p := range []*proc.Proc{c.first, c.second, c.failing, c.healthy, c.tool} {
		if p != nil {
			p.Kill()
		}
	}
	for _, g := range c.gateways {
		if g != nil && g.Proc() != nil {
			g.Proc().Kill()
		}
	}
	c.client.CloseIdleConnections()
	_ = os.RemoveAll(c.dir) // what stays is in a directory for temporary files
}

// ask asks a process for its state, or sets its fault.
func (c *chain) ask(ctx context.Context, p *proc.Proc, method, path string) (s state, err error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+p.Word+path, nil)
	if err != nil {
		return s, err
	}
	res, err := c.client.Do(req)
	if err != nil {
		return s, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err == nil && len(text) > 0 {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}

// made is one call of a workflow.
type made struct {
	begun time.Time
	took  time.Duration
	good  bool
}

// workflow makes calls, so many a second, until ctx ends, and returns those that it made when all are
// answered.
func (c *chain) workflow(ctx context.Context, path string, rate float64) []made {
	id := uuid.NewString()
	var mu sync.Mutex
	var all []made
	var running sync.WaitGroup
	tick := time.NewTicker(time.Duration(float64(time.Second) / rate))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			running.Wait()
			slices.SortFunc(all, func(a, b made) int { return a.begun.Compare(b.begun) })
			return all
		case <-tick.C:
		}
		running.Go(func() {
			m := made{begun: time.Now()}
			m.good = c.call(context.WithoutCancel(ctx), path, id)
			m.took = time.Since(m.begun)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, m)
		})
	}
}

// call asks the first agent for one piece of work.
func (c *chain) call(ctx context.Context, path, workflow string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+c.first.Word+path, strings.NewReader(`{"do":"it"}`))
	if err != nil {
		return false
	}
	for field, value := range map[string]string{
		"Content-Type": "application/json", keyField: uuid.NewString(), "Workflow-Id": workflow, "Authorization": "Bearer somebody",
	} {
		req.Header.Set(field, value)
	}
	res, err := c.client.Do(req)
	if err != nil {
		return false
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return err == nil && res.StatusCode == http.StatusOK && string(text) == good
}

// refused are the processes whose calls a gateway refuses at the moment.
func (c *chain) refused(ctx context.Context) (all []string, err error) {
	for _, g := range c.gateways {
		text, err := g.Admin(ctx, http.MethodGet, "/agent_guard/circuits", "")
		if err != nil {
			return nil, err
		}
		var doc struct {
			Circuits []struct{ Upstream, State string }
		}
		if err := json.Unmarshal(text, &doc); err != nil {
			return nil, err
		}
		for _, circuit := range doc.Circuits {
			if circuit.State != "closed" {
				all = append(all, circuit.Upstream)
			}
		}
	}
	return all, nil
}

func try(ctx context.Context, o *Options, fault string, kind string) (*Trial, error) {
	c, err := start(o, kind)
	defer c.end()
	if err != nil {
		return nil, err
	}
	t := &Trial{Fault: fault, Chain: kind}
	load, stop := context.WithCancel(ctx)
	defer stop()
	var failing, neighbour []made
	var both sync.WaitGroup
	both.Go(func() { failing = c.workflow(load, failingPath, o.Failing) })
	both.Go(func() { neighbour = c.workflow(load, neighbourPath, o.Neighbour) })
	if err := t.watch(ctx, c, o.Before, time.Time{}); err != nil {
		return nil, err
	}
	before, err := c.ask(ctx, c.failing, http.MethodPost, "/control/fault?is="+fault)
	began := time.Now()
	if err == nil {
		before, err = c.ask(ctx, c.failing, http.MethodGet, "/control/state")
	}
	if err == nil {
		err = t.watch(ctx, c, o.Fault, began)
	}
	if err != nil {
		return nil, err
	}
	after, err := c.ask(ctx, c.failing, http.MethodGet, "/control/state")
	if err == nil {
		_, err = c.ask(ctx, c.failing, http.MethodPost, "/control/fault")
	}
	ended := time.Now()
	t.Reached = after.Arrived - before.Arrived
	if err == nil {
		err = t.watch(ctx, c, o.After, time.Time{})
	}
	if err != nil {
		return nil, err
	}
	stop()
	both.Wait()
	done, err := c.ask(ctx, c.tool, http.MethodGet, "/control/state")
	if err != nil {
		return nil, err
	}
	t.Items, t.Repeated = done.Items, done.Repeated
	t.Usual = between(neighbour, time.Time{}, began)
	t.Neighbour, t.Failing = between(neighbour, began, ended), between(failing, began, ended)
	t.Recovered = recovery(failing, ended)
	if kind != Bare {
		return t, c.informed(ctx, t)
	}
	return t, nil
}

// watch looks at the processes for so long. From began on the failing agent is at fault.
func (t *Trial) watch(ctx context.Context, c *chain, d time.Duration, began time.Time) error {
	tick, over := time.NewTicker(every), time.NewTimer(d)
	defer tick.Stop()
	defer over.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over.C:
			return nil
		case <-tick.C:
		}
		if began.IsZero() {
			continue
		}
		first, err := c.ask(ctx, c.first, http.MethodGet, "/control/state")
		if err != nil {
			return err
		}
		second, err := c.ask(ctx, c.second, http.MethodGet, "/control/state")
		if err != nil {
			return err
		}
		t.Held = max(t.Held, first.Held+second.Held)
		t.Goroutines = max(t.Goroutines, first.Goroutines+second.Goroutines)
		if t.Chain == Bare {
			continue
		}
		refused, err := c.refused(ctx)
		if err != nil {
			return err
		}
		took := time.Since(began)
		for _, upstream := range refused {
			switch {
			case upstream != c.failing.Word:
				t.Spread++
			case t.Contained == nil:
				t.Contained = &took
			}
		}
	}
}

// between sums up the calls that began in a stretch of time.
func between(all []made, from, to time.Time) Calls {
	var sum Calls
	var took []time.Duration
	for _, m := range all {
		if m.begun.Before(from) || !m.begun.Before(to) {
			continue
		}
		sum.Made++
		if m.good {
			sum.Good++
		}
		took = append(took, m.took)
	}
	sum.Median, sum.P99 = stat.Percentile(took, 50), stat.Percentile(took, 99)
	return sum
}

// recovery is how long after the end of the fault the first of enough good calls in a row began, of which
// none that came later failed; nil without.
func recovery(all []made, ended time.Time) *time.Duration {
	good := 0
	for i, m := range slices.Backward(all) {
		if m.good && m.begun.After(ended) {
			good++
			if i > 0 {
				continue
			}
		}
		if good < steady {
			return nil
		}
		took := all[len(all)-good].begun.Sub(ended)
		return &took
	}
	return nil
}

// informed reads what the gateways have recorded.
func (c *chain) informed(ctx context.Context, t *Trial) error {
	t.Informed = map[string]int{}
	for _, g := range c.gateways {
		text, err := g.Admin(ctx, http.MethodGet, "/agent_guard/ledger/head", "")
		if err != nil {
			return err
		}
		var head struct{ Origin, Key string }
		if err := json.Unmarshal(text, &head); err != nil {
			return err
		}
		key, err := note.NewVerifier(head.Key)
		if err != nil {
			return err
		}
		if text, err = g.Admin(ctx, http.MethodGet, "/agent_guard/ledger/export", ""); err != nil {
			return err
		}
		if _, err := ledger.VerifyExport(bytes.NewReader(text), head.Origin, note.VerifierList(key), func(e ledger.Entry) error {
			if token, err := ect.ParseInsecure(string(e.Payload)); err == nil { // what is no token informs nobody
				t.Informed[string(token.Event())]++
			}
			return nil
		}); err != nil {
			return err
		}
		text, err = g.Admin(ctx, http.MethodGet, "/agent_guard/escalations", "")
		if err != nil {
			return err
		}
		var page struct{ Escalations []struct{ ID string } }
		if err := json.Unmarshal(text, &page); err != nil {
			return err
		}
		t.Asked += len(page.Escalations)
	}
	return nil
}
