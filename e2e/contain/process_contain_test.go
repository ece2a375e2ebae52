//go:build unix

package contain

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// chained is a chain of agents with a gateway before each. Two workflows share the first agent, which
// calls the failing one for the first workflow, and the healthy one for the second.
//
//	gateway 0 -> second -> gateway 1 -> failing -> gateway 2 -> tool
//	                                 \> healthy /
type chained struct {
	t                              *testing.T
	sites                          [3]*harness.ProcSite
	second, failing, healthy, tool *harness.Upstream
	wid                            string

	fault atomic.Pointer[string] // of the failing agent
	held  atomic.Int32           // calls at the failing agent

	mu      sync.Mutex
	effects map[string]int // of the tool, by key
}

const chainGood = `{"ok":true}`

// newChained makes the agents and the places of the gateways. options are those of the failing agent.
func newChained(t *testing.T, options string) *chained {
	t.Helper()
	c := &chained{t: t, second: harness.NewUpstream(t), failing: harness.NewUpstream(t), healthy: harness.NewUpstream(t), tool: harness.NewUpstream(t), wid: uuid.NewString(), effects: map[string]int{}}
	c.fails("")
	for i := range c.sites {
		c.sites[i] = harness.ProcNewSite(t, "")
		c.sites[i].App = fmt.Sprintf("identity %s {\n public_url http://%s\n }\n", harness.StarIdentity(i), c.sites[i].Addr)
		c.sites[i].Store = "badger " + c.sites[i].Path("data")
	}
	c.sites[0].Upstream, c.sites[2].Upstream = c.second.Addr, c.tool.Addr
	// What the second agent fails for others is no failure of its own.
	c.sites[0].Guard = "breaker {\n failure 500 503 504\n}\nbulkhead {\n total 4\n per_workflow 2\n}\n"
	c.sites[1].App += fmt.Sprintf("trust jwks_url http://%s/.well-known/cascade/jwks %s\n", c.sites[0].Addr, harness.StarIdentity(0))
	raw := fmt.Sprintf("agent_proxy /healthy %s {\n name healthy\n}\nagent_proxy %s {\n%s}", c.healthy.Addr, c.failing.Addr, options)
	(&harness.Star{Sites: c.sites[:]}).Before(1, raw)
	c.sites[1].Raw = strings.Replace(c.sites[1].Raw, "agent_guard_endpoints\n", "", 1)
	for _, path := range []string{"/failing", "/healthy"} {
		c.second.On(path, c.passes(c.sites[1]))
		c.healthy.On(path, c.passes(c.sites[2]))
		c.tool.On(path, func(w http.ResponseWriter, a *harness.Arrival) {
			c.mu.Lock()
			c.effects[a.Header.Get("Idempotency-Key")]++
			c.mu.Unlock()
			c.says(w, http.StatusOK, chainGood)
		})
	}
	passes := c.passes(c.sites[2])
	c.failing.On("/failing", func(w http.ResponseWriter, a *harness.Arrival) {
		c.held.Add(1)
		defer c.held.Add(-1)
		fault := *c.fault.Load()
		if fault == "" {
			passes(w, a)
			return
		}
		passes(unread{http.Header{}}, a) // it has its effect, and then does not say so
		switch fault {
		case "fails":
			c.says(w, http.StatusInternalServerError, `{}`)
		case "leaks": // what it has begun it never ends
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"ok":`)
			_ = http.NewResponseController(w).Flush()
			<-a.Context().Done()
		case "hangs":
			<-a.Context().Done()
		case "nonsense":
			c.says(w, http.StatusOK, []string{`<html>It works!</html>`, `{"error":"internal"}`, `{"ok":tr`}[a.N%3])
		}
	})
	return c
}

// unread is an answer that nobody gets.
type unread struct{ header http.Header }

func (u unread) Header() http.Header         { return u.header }
func (u unread) Write(p []byte) (int, error) { return len(p), nil }
func (u unread) WriteHeader(int)             {}

func (c *chained) fails(how string) { c.fault.Store(&how) }

func (c *chained) says(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// passes is an agent that calls the next one under the same key. What fails there it answers with 502,
// and with the name of the gateway's problem.
func (c *chained) passes(next *harness.ProcSite) func(http.ResponseWriter, *harness.Arrival) {
	g := next.Gateway(c.t)
	return func(w http.ResponseWriter, a *harness.Arrival) {
		header := map[string]string{"Workflow-Id": a.Header.Get("Workflow-Id"), "Authorization": "Bearer agent"}
		res, err := g.Send(harness.Request{Path: a.URL.Path, Id: a.Header.Get("Idempotency-Key"), Header: header})
		if err != nil {
			c.says(w, http.StatusBadGateway, `{}`)
			return
		}
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); err == nil && res.StatusCode == http.StatusOK && string(body) == chainGood {
			c.says(w, http.StatusOK, chainGood)
			return
		}
		c.says(w, http.StatusBadGateway, fmt.Sprintf(`{"problem":%q}`, res.Header.Get("Execution-Problem")))
	}
}

// call makes a call of one of the workflows.
func (c *chained) call(path, id string) harness.Reply {
	c.t.Helper()
	return c.sites[0].Gateway(c.t).Call(c.calling(path, id))
}

func (c *chained) calling(path, id string) harness.Request {
	wid := c.wid
	if path == "/healthy" {
		wid = "neighbour-" + wid
	}
	return harness.Request{Path: path, Id: id, Header: map[string]string{"Workflow-Id": wid, "Authorization": "Bearer first"}}
}

// neighbour makes a call that needs no failing agent.
func (c *chained) neighbour(when string) {
	c.t.Helper()
	if got := c.call("/healthy", uuid.NewString()); got.Status != http.StatusOK || got.Body != chainGood {
		c.t.Errorf("%s the neighbour gets %d %v %s", when, got.Status, got.Header, got.Body)
	}
}

// Issue of containment, over the wire: whatever an agent does wrong, its gateway refuses it after a few
// calls, and lets go of what it holds. A workflow beside it goes on, no effect comes twice, the ledger
// says what happened, and all works again by itself.
func TestProcessContain(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newChained(t, "deadline 150ms\nbreaker {\n consecutive 3\n cooldown 2s 2s\n in_band json /error\n}\n")
	for _, site := range c.sites {
		site.Start(t)
	}
	good := func(when string) {
		t.Helper()
		harness.Eventually(t, when, func() bool { return c.call("/failing", uuid.NewString()).Body == chainGood })
	}
	good("the chain works")
	for _, fault := range []string{"fails", "hangs", "leaks", "nonsense"} {
		c.fails(fault)
		before, first := c.failing.Arrivals("/failing"), uuid.NewString()
		id, calls := first, 0
		harness.Eventually(t, "the agent is refused that "+fault, func() bool {
			got := c.call("/failing", id)
			calls++
			if got.Body == chainGood {
				t.Errorf("an agent that %s is believed", fault)
			}
			id = uuid.NewString()
			c.neighbour("beside an agent that " + fault)
			return strings.Contains(got.Body, "circuit-open")
		})
		if n := c.failing.Arrivals("/failing") - before; n < 3 || n >= calls { // more than 3 where a cooldown has ended meanwhile
			t.Errorf("an agent that %s got %d of %d calls", fault, n, calls)
		}
		c.call("/failing", first) // a retry
		harness.Eventually(t, "nothing is held by the agent that "+fault, func() bool { return c.held.Load() == 0 })
		c.fails("")
		good("the agent works again that " + fault)
	}
	// What holds all that its workflow may hold of an agent (C-3.3.3-b) leaves the rest of it to others.
	hold := harness.NewGate(t)
	c.second.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		c.says(w, http.StatusOK, chainGood)
	})
	var held []*harness.Pending
	for range 3 {
		held = append(held, c.sites[0].Gateway(t).Begin(c.calling("/held", uuid.NewString())))
	}
	harness.Eventually(t, "the workflow holds its part", func() bool { return c.second.Arrivals("/held") >= 2 })
	c.neighbour("beside a workflow that holds its part")
	if n := c.second.Arrivals("/held"); n != 2 {
		t.Errorf("a workflow holds %d places of an agent", n)
	}
	hold.Open()
	for _, p := range held {
		if got := p.Answer(); got.Body != chainGood {
			t.Errorf("a call that has waited gets %d %s", got.Status, got.Body)
		}
	}
	c.mu.Lock()
	for id, n := range c.effects {
		if n != 1 {
			t.Errorf("the effect of %s came %d times", id, n)
		}
	}
	c.mu.Unlock()
	recorded := map[ect.Event]int{}
	c.sites[1].Exported(t, func(token *ect.Unverified) { recorded[token.Event()]++ })
	if recorded[ect.EventError] < 4 || recorded[ect.EventCircuitOpen] < 4 || recorded[ect.EventCircuitClose] < 4 {
		t.Errorf("the ledger has %v", recorded)
	}
}
