package contain

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// shared is a site whose upstream has a bulkhead with these limits. It shows its metrics.
func shared(u *harness.Upstream, limits, options string) string {
	return fmt.Sprintf("metrics /metrics\nagent_proxy %s {\n name shared\n bulkhead {\n %s\n }\n %s\n}", u.Addr, limits, options)
}

func ofWorkflow(workflow, id string, more ...string) harness.Request {
	r := harness.Request{Path: "/held", Id: id, Header: map[string]string{"Authorization": "Bearer ann", "Workflow-Id": workflow}}
	for i := 0; i < len(more); i += 2 {
		r.Header[more[i]] = more[i+1]
	}
	return r
}

// cascade 3.3.3: a workflow has so many connections to a pool and no more, a queue of its own, and
// its backlog keeps nobody else waiting. A call that is refused was not sent, and its key is free.
func TestBulkheadKeepsWorkflowsApart(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	u.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, "done")(w, a)
	})
	g := harness.Launch(t, harness.Setup{Site: shared(u, "total 3\nper_workflow 2\nqueue 2\nwait 10m", ""), Badger: true})
	var calls []*harness.Pending
	for i := range 4 { // two at work, two wait
		calls = append(calls, g.Begin(ofWorkflow("flood", fmt.Sprint(i))))
		if i == 1 {
			harness.Eventually(t, "two are at work", func() bool { return u.Arrivals("/held") == 2 })
		}
	}
	g.Waiting(2)
	doc := g.Call(ofWorkflow("flood", "refused")).Retryable(t, 429, "bulkhead-full")
	if !*doc.SafeNewKey || doc.ExecutionID != "refused" || doc.State != "" {
		t.Errorf("%+v", doc)
	}
	get := ofWorkflow("flood", "")
	get.Method = "GET"
	g.Call(get).Retryable(t, 429, "bulkhead-full")
	other := ofWorkflow("other", "other")
	other.Path = "/other"
	g.Call(other).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Method: "GET", Path: "/none"}).Want(t, 201, "arrival 1", "")
	attached := g.Begin(ofWorkflow("flood", "0")) // a retry needs no permit
	harness.Followers(t, 1)
	g.Reload(shared(u, "total 3\nper_workflow 3\nqueue 2\nwait 10m", "")) // holds for those that wait
	g.Waiting(1)
	hold.Open()
	for _, p := range append(calls, attached) {
		if got := p.Answer(); got.Status != 201 || got.Body != "done" {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	g.Call(ofWorkflow("flood", "refused")).Want(t, 201, "done", "executed")
	if n := g.Bulkhead("in_use"); n != 0 {
		t.Errorf("%d permits are in use in the end", n)
	}
	u.Arrived("/held", 5)
}

// ATD, "Priority Levels": the class comes from a token, or from the configuration. Nobody who is not
// verified raises his own.
func TestBulkheadServesByClass(t *testing.T) {
	ada, u := harness.NewAgent(t, "ada"), harness.NewUpstream(t)
	l := u.Line("/held")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, ada), Site: shared(u, "total 1\nwait 10m",
		"priority {http.request.header.Urgency}\n action batch {\n  match header Kind batch\n  priority low\n }\n action pager {\n  match header Kind pager\n  priority high\n }"), Badger: true})
	calls := []*harness.Pending{g.Begin(ofWorkflow("first", "first"))}
	harness.Eventually(t, "one is at work", func() bool { return l.Arrived() == 1 })
	enqueue := func(r harness.Request) {
		calls = append(calls, g.Begin(r))
		g.Waiting(len(calls) - 1)
	}
	enqueue(ofWorkflow("a", "low", "Kind", "batch"))
	enqueue(ofWorkflow("b", "stranger", "Urgency", "critical"))
	enqueue(ofWorkflow("c", "normal"))
	enqueue(ofWorkflow("d", "high", "Kind", "pager"))
	urgent := func(class string) *ect.Token {
		return ada.Issue(ect.Claims{Workflow: uuid.NewString(), Ext: new(ect.ExtBuilder).Text("atd.resource_priority", class)})
	}
	enqueue(harness.With(urgent("critical"), harness.Request{Path: "/held", Id: "critical"}))
	enqueue(harness.With(urgent("urgent"), harness.Request{Path: "/held", Id: "unknown"}))
	for i := range calls {
		l.Next <- struct{}{}
		harness.Eventually(t, "the next one", func() bool { return l.Arrived() == min(len(calls), i+2) })
	}
	for _, p := range calls {
		p.Answer()
	}
	if got := strings.Join(l.Came, " "); got != "first critical high stranger normal unknown low" {
		t.Errorf("they came in the order %s", got)
	}
}

// Of two workflows with many and few calls, the one with few is next (ATD, "Fair-Share Scheduling").
func TestBulkheadSharesFairly(t *testing.T) {
	u := harness.NewUpstream(t)
	l := u.Line("/held")
	g := harness.Launch(t, harness.Setup{Site: shared(u, "total 4\nwait 10m", "")})
	var calls []*harness.Pending
	for i := range 30 {
		calls = append(calls, g.Begin(ofWorkflow("many", fmt.Sprint("many", i))))
	}
	g.Waiting(26)
	for i := range 3 {
		calls = append(calls, g.Begin(ofWorkflow("few", fmt.Sprint("few", i))))
	}
	g.Waiting(29)
	for i := range calls {
		l.Next <- struct{}{}
		harness.Eventually(t, "the next one", func() bool { return l.Arrived() == min(len(calls), i+5) })
	}
	for _, p := range calls {
		p.Answer()
	}
	few := 0
	for i, id := range l.Came {
		if strings.HasPrefix(id, "few") {
			few = i
		}
	}
	// The first two permits that come back go to those with none, then each has half.
	if few > 8 {
		t.Errorf("the third call of the other workflow was number %d at the upstream, want within the first nine: %v", few+1, l.Came)
	}
}

// Every way to end gives the permit back, on the wire too.
func TestBulkheadPermitsComeBack(t *testing.T) {
	u := harness.NewUpstream(t)
	u.On("/reset", harness.Reset)
	u.On("/half", harness.Raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"))
	u.On("/stream", func(w http.ResponseWriter, a *harness.Arrival) {
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		<-a.Context().Done()
	})
	u.On("/tunnel", func(w http.ResponseWriter, _ *harness.Arrival) {
		conn, rw := harness.Hijack(w)
		defer conn.Close()
		fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = rw.Flush()
		_, _ = rw.ReadString('\n')
	})
	g := harness.Launch(t, harness.Setup{Site: shared(u, "total 1\nwait 10m", "deadline 10m")})
	n := 0
	free := func(after string) {
		t.Helper()
		n++
		harness.Eventually(t, "the permit comes back after "+after, func() bool { return g.Bulkhead("in_use") == 0 })
		g.Call(harness.Request{Path: "/next", Id: fmt.Sprint(n)}).Want(t, 201, fmt.Sprint("arrival ", n), "executed")
	}
	for _, path := range []string{"/reset", "/half"} {
		for _, method := range []string{"GET", "POST"} {
			res, err := g.Send(harness.Request{Method: method, Path: path, Id: method + path})
			if err == nil {
				_, _ = bufio.NewReader(res.Body).ReadString(0)
				_ = res.Body.Close()
			}
			free(method + path)
		}
	}
	res, err := g.Send(harness.Request{Method: "GET", Path: "/stream"})
	if err != nil {
		t.Fatal(err)
	}
	if n := g.Bulkhead("in_use"); n != 1 {
		t.Errorf("a stream holds %d permits", n)
	}
	_ = res.Body.Close()
	free("a stream whose client has left")
	conn, err := net.Dial("tcp", g.Addr)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /tunnel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "101") {
		t.Fatalf("%q %v", line, err)
	}
	if n := g.Bulkhead("in_use"); n != 1 {
		t.Errorf("a tunnel holds %d permits", n)
	}
	_ = conn.Close()
	free("a tunnel")
	waits, leave := harness.WithCancel(g.Build(harness.Request{Method: "GET", Path: "/stream"}))
	held := make(chan struct{})
	go func() {
		defer close(held)
		if res, err := g.Client.Do(waits); err == nil {
			_, _ = bufio.NewReader(res.Body).ReadString(0)
		}
	}()
	harness.Eventually(t, "it holds the permit", func() bool { return g.Bulkhead("in_use") == 1 })
	queued, leaveQueue := harness.WithCancel(g.Build(harness.Request{Path: "/next", Id: "left"}))
	go func() { _, _ = g.Client.Do(queued) }()
	g.Waiting(1)
	leaveQueue()
	g.Waiting(0)
	leave()
	<-held
	free("a client that left the queue")
}

// What a workflow may make in a second.
func TestBulkheadQuotas(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Site: shared(u, "rate 1", "")})
	refused := 0
	for i := range 20 {
		r := ofWorkflow("quick", fmt.Sprint(i))
		r.Path = "/quick"
		if got := g.Call(r); got.Status != 201 {
			got.Retryable(t, 429, "quota-exceeded")
			refused++
		}
	}
	if refused == 0 {
		t.Error("twenty calls at once are within one a second")
	}
	u.Arrived("/quick", 20-refused)

	g.Reload(fmt.Sprintf("metrics /metrics\nagent_proxy %s {\n name shared\n}", u.Addr))
	if n := g.Bulkhead("permits"); n != 32768 {
		t.Errorf("a guard that says nothing of a bulkhead has %d permits, want the default", n)
	}
}
