//go:build unix

package evidence

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// wire stands before a gateway and keeps what others ask it for with tokens of their own.
type wire struct {
	mu    sync.Mutex
	addr  string
	cut   bool // nothing arrives
	asked []harness.Request
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	w := new(wire)
	forward := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: to})
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		raws, _ := ect.ParseFields(r.Header[ect.FieldName])
		w.mu.Lock()
		cut := w.cut && strings.Contains(r.URL.Path, "rollback")
		if len(raws) == 1 && strings.HasPrefix(r.URL.Path, cascadePath) {
			w.asked = append(w.asked, harness.Request{
				Method: r.Method, Path: r.URL.RequestURI(), Body: string(body),
				Header: harness.Headers{ect.FieldName: raws[0], "Content-Type": r.Header.Get("Content-Type")},
			})
		}
		w.mu.Unlock()
		if cut {
			rw.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		forward.ServeHTTP(rw, r)
	}))
	t.Cleanup(s.Close)
	w.addr = s.Listener.Addr().String()
	return w
}

func (w *wire) taken() []harness.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]harness.Request(nil), w.asked...)
}

// C-6.1-a: the tokens with which a gateway asks another one say what they are for. Whoever gets hold of
// one, used there or not, can repeat that request, and do nothing else with it: before and after a restart
// of the other gateway, also while it looks. None that only looks stands in the ledger of who has asked.
func TestProcessTokensOfAGatewayAreGoodForOneUse(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.LayStar(t)
	w := newWire(t, c.Sites[1].Addr)
	c.A.Also = append(c.A.Also, harness.StarIdentity(1))
	c.Sites[1].App = strings.Replace(c.Sites[1].App, "public_url http://"+c.Sites[1].Addr, "public_url http://"+w.addr, 1) +
		"rollback {\n coordinators " + harness.GatewayIdentity + "\n }"
	c.Sites[0].App += "rollback {\n prepare_timeout 2s\n }"
	c.Before(0, strings.ReplaceAll(c.Behind(1, "/charges"), c.Sites[1].Addr, w.addr))
	s := c.Begin().Saga
	asks := func(n int) harness.RollbackBody {
		return harness.RollbackBody{ID: harness.RollbackID(n), Checkpoint: s.Do(harness.Charge(n)).Checkpoint, Scope: "single"}
	}
	first, second := asks(1), asks(2)
	s.Prepare(first, http.StatusOK)
	w.mu.Lock()
	w.cut = true
	w.mu.Unlock()
	s.Prepare(second, http.StatusConflict) // unreachable: its tokens were used nowhere
	looks := w.taken()
	w.mu.Lock()
	w.cut = false
	w.mu.Unlock()
	if len(looks) < 4 {
		t.Fatalf("%d looks: %+v", len(looks), looks)
	}
	for _, n := range s.G.SettledView(s.A, s.Wid, 6).Nodes {
		if n.Event == "rollback_request" && s.G.Entry(s.A, s.Wid, n.JTI).Issuer() == harness.GatewayIdentity {
			t.Errorf("a look of the gateway stands in its ledger: %+v", n)
		}
	}
	worthless := func(when string, taken []harness.Request) {
		t.Helper()
		g := c.Sites[1].Gateway(t)
		for i, r := range taken {
			token, err := ect.ParseInsecure(r.Header[ect.FieldName])
			if err != nil {
				t.Fatal(err)
			}
			checkpoint, _ := token.Ext().Text(ect.MemberCheckpointID)
			id, _ := token.Ext().Text(ect.MemberRollbackID)
			body := func(id, more string) string {
				return fmt.Sprintf(`{"rollback_id":%q,"checkpoint_id":%q,"scope":"sub_dag"%s}`, id, checkpoint, more)
			}
			for _, other := range []harness.Request{
				{Path: cascadePath + "rollback", Body: body(id, `,"phase":"execute"`)},
				{Path: cascadePath + "rollback", Body: body("urn:uuid:"+uuid.NewString(), `,"phase":"execute"`)},
				{Path: cascadePath + "rollback", Body: strings.Replace(r.Body, `"dry_run":true`, `"dry_run":false`, 1)},
				{Path: cascadePath + "rollback", Body: body(id, `,"dry_run":true`)},
				{Path: "/.well-known/atd/rollback", Body: "{}"},
				{Path: "/aerr/rollback", Body: body(id, "")},
				{Path: cascadePath + "rollback/prepare", Body: body(id, "")},
				{Path: cascadePath + "rollback/prepare", Body: body(id, `,"phase":"release"`)},
				{Path: cascadePath + "errors", Reader: harness.Nothing{}},
				{Path: cascadePath + "workflows/" + s.Wid + "/complete", Reader: harness.Nothing{}},
				{Path: "/charges", Body: `{"amount":99}`}, {Path: "/charges", Body: r.Body},
				{Method: "GET", Path: "/charges"},
				{Method: "GET", Path: cascadePath + "ledger/head"},
				{Method: "GET", Path: cascadePath + "executions/x"},
				{Method: "GET", Path: cascadePath + "workflows/" + s.Wid},
			} {
				other.Header = harness.Headers{ect.FieldName: r.Header[ect.FieldName]}
				if other.Path == r.Path && other.Body == r.Body {
					continue
				}
				if got := g.Call(other); got.Status != http.StatusForbidden {
					t.Errorf("%s: %d: with the token of %s %s %s, %s %s is %d %s", when, i, r.Method, r.Path, r.Body, other.Path, other.Body, got.Status, got.Body)
				}
			}
		}
		c.Lab.Arrived("POST /refunds", 0)
		c.Lab.Arrived("POST /charges", 2)
	}
	worthless("in one life", looks)
	c.Running[1].Kill()
	c.Start(1)
	worthless("after a restart", looks)
	for _, r := range looks { // a look is a look again, also one that never arrived
		if got := c.Sites[1].Gateway(t).Call(r); strings.Contains(r.Body, "dry_run") && got.Status != http.StatusOK {
			t.Errorf("again: %s %s: %d %s", r.Method, r.Path, got.Status, got.Body)
		}
	}
	s.Back(first).Want(t, "completed")
	executes := w.taken()
	last := executes[len(executes)-1]
	if !strings.Contains(last.Body, `"phase":"execute"`) {
		t.Fatalf("%+v", last)
	}
	if got := c.Sites[1].Gateway(t).Call(last); got.Status != http.StatusOK { // P5
		t.Errorf("the same again: %d %s", got.Status, got.Body)
	}
	c.Lab.Arrived("POST /refunds", 1)
}

// C-6.1-a: of two uses of one token at two gateways of a fleet, at the same moment, exactly one comes to something.
// From then on both gateways refuse the other use, and answer the same use as it was answered.
func TestProcessTokenIsBoundOnceInAFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	one, server, there := harness.PostgresSite(t, &harness.ProcUpstream{Addr: lab.Addr})
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, lab.Addr), server.DSN())
	two.Store = strings.Replace(two.Store, "node one", "node two", 1)
	two.App = one.App
	var at [2]*harness.Gateway
	var running [2]*harness.ProcGateway
	for i, site := range []*harness.ProcSite{one, two} {
		site.TokenSite(t, a, lab)
		running[i] = site.Start(t)
		at[i] = site.Gateway(t)
	}
	known := func(c *tokenCase) { // to both gateways
		for _, g := range at {
			look := a.Issue(ect.Claims{Action: "look"})
			if got := g.Call(harness.With(look, harness.Request{Method: "GET", Path: cascadePath + "checkpoints/" + c.step.Checkpoint + "?wait=30s"})); got.Status != http.StatusOK {
				t.Fatalf("%d %s", got.Status, got.Body)
			}
		}
	}
	var all []*tokenCase
	again := func(c *tokenCase, when string) {
		same := *c
		same.second = c.first
		for _, g := range at {
			c.G, same.G = g, g
			c.again(t, lab, when)
			same.again(t, lab, when)
		}
	}
	lab.Write("/docs/read", "1")
	for kind, pairs := range map[string][][2]string{
		"ask":    {{"dry run", "execute"}, {"checkpoint", "execute"}, {"call", "execute"}, {"prepare", "execute"}, {"read of the gateway", "execute"}, {"read of the upstream", "prepare"}},
		"plan":   {{"plan", "call"}, {"plan", "read of the gateway"}},
		"decide": {{"decision", "call"}, {"decision", "read of the gateway"}},
		"hold":   {{"hold", "call"}, {"hold", "checkpoint"}},
		"end":    {{"end", "call"}, {"end", "read of the gateway"}},
		"aerr":   {{"dry run", "execute, AERR"}, {"read of the gateway", "execute"}, {"body", "prepare"}},
		"error":  {{"call", "checkpoint"}, {"read of the upstream", "call"}},
	} {
		for _, names := range pairs {
			for n := range 4 {
				c := newTokenCase(at[n%2].Saga(a), kind, tokenUseOf(names[0]), tokenUseOf(names[1]))
				known(c)
				uses, got := [2]tokenUse{c.first, c.second}, [2]harness.Reply{}
				var wg sync.WaitGroup
				for i, use := range uses {
					there := *c
					there.Saga = at[(i+n/2)%2].Saga(a)
					there.Wid = c.Wid
					wg.Go(func() { got[i] = there.send(use) })
				}
				wg.Wait()
				if done := got[0].Status/100 == 2; done == (got[1].Status/100 == 2) {
					t.Fatalf("%s, %v: %d %s and %d %s", kind, names, got[0].Status, got[0].Body, got[1].Status, got[1].Body)
				} else if done {
					c.answer = got[0]
				} else {
					c.first, c.second, c.answer = c.second, c.first, got[1]
				}
				again(c, kind+", at both")
				all = append(all, c)
			}
		}
	}
	// The whole table: used at one gateway first, and then at the other.
	for _, kind := range tokenKinds {
		for _, first := range tokenUses {
			for _, second := range tokenUses {
				if !slices.Contains(strings.Fields(first.kinds), kind) || !slices.Contains(strings.Fields(second.kinds), kind) {
					continue
				}
				if kind == "error" && second.name == "errors" && first.name != "errors" {
					continue // in a fleet the other request has reported it: docs/threat_model.md
				}
				n := len(all)
				c := newTokenCase(at[n%2].Saga(a), kind, first, second)
				known(c)
				if c.answer = c.send(first); c.answer.Status/100 != 2 {
					t.Fatalf("%s, %s: %d %s", kind, first.name, c.answer.Status, c.answer.Body)
				}
				c.G = at[(n+1)%2]
				c.again(t, lab, kind+", at the other gateway")
				all = append(all, c)
			}
		}
	}
	for i, site := range []*harness.ProcSite{one, two} {
		running[i].Kill()
		site.Start(t)
		at[i] = site.Gateway(t)
	}
	for _, c := range all {
		again(c, "after a restart of both")
	}
}

// C-6.1-a, P5: a gateway is killed when a token is bound and nothing is done yet. Afterwards the token is good for
// the same request, which is done once, and for nothing else.
func TestCrashBetweenBindingAndActing(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, lab, stages := harness.NewAgent(t, "a"), harness.NewRestLab(t), harness.ProcNewStages(t)
	site := harness.ProcNewSite(t, lab.Addr)
	site.Store = "staged " + site.Path("data") + " " + stages.Url
	site.TokenSite(t, a, lab)
	gateway := site.Start(t)
	lab.Write("/docs/read", "1")
	for _, c := range []struct{ kind, use string }{
		{"ask", "execute"}, {"ask", "prepare"}, {"ask", "release"}, {"ask", "dry run"}, {"ask", "checkpoint"}, {"ask", "execute, ATD"},
		{"aerr", "execute, AERR"}, {"plan", "plan"}, {"decide", "decision"}, {"hold", "hold"},
	} {
		c := newTokenCase(site.Gateway(t).Saga(a), c.kind, tokenUseOf(c.use), tokenUse{})
		reached, r := stages.Arm("after token"), c.first.make(c)
		r.Host = "gateway.example.com"
		sent, ended := c.G.Build(harness.With(c.token, r)), make(chan struct{})
		go func() {
			defer close(ended)
			if res, err := c.G.Client.Do(sent); err == nil {
				t.Errorf("%s is answered before it is done: %d", c.first.name, harness.Read(res).Status)
			}
		}()
		harness.WaitWithin(t, harness.ProcBound, reached, c.first.name+" binds the token")
		gateway.Kill()
		<-ended
		gateway = site.Start(t)
		c.G = site.Gateway(t)
		for _, other := range tokenUses {
			if slices.Contains(strings.Fields(other.kinds), c.kind) && other.name != c.first.name {
				c.second = other
				c.again(t, lab, "killed before it acted")
			}
		}
		before := len(lab.All("POST /refunds", ""))
		if c.answer = c.send(c.first); c.answer.Status/100 != 2 {
			t.Fatalf("%s after a kill: %d %s", c.first.name, c.answer.Status, c.answer.Body)
		}
		done := 0
		if strings.HasPrefix(c.first.name, "execute") {
			done = 1
		}
		if after := len(lab.All("POST /refunds", "")); after-before != done {
			t.Errorf("%s is done %d times", c.first.name, after-before)
		}
		c.second = c.first
		c.again(t, lab, "done after the kill")
	}
}
