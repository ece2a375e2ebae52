package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// shared is a site whose upstream has a bulkhead with these limits. It shows its metrics.
func shared(u *upstream, limits, options string) string {
	return fmt.Sprintf("metrics /metrics\nagent_proxy %s {\n name shared\n bulkhead {\n %s\n }\n %s\n}", u.addr, limits, options)
}

// bulkhead is a metric of the site's bulkhead.
func (g *gateway) bulkhead(name string) int {
	g.t.Helper()
	for line := range strings.Lines(g.call(request{method: "GET", path: "/metrics"}).body) {
		if rest, ok := strings.CutPrefix(line, "agent_guard_bulkhead_"+name+`{guard="shared"} `); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				g.t.Fatal(err)
			}
			return int(n)
		}
	}
	g.t.Fatalf("no metric %s", name)
	return 0
}

func (g *gateway) waiting(n int) {
	g.t.Helper()
	eventually(g.t, fmt.Sprintf("%d calls wait", n), func() bool { return g.bulkhead("waiting") == n })
}

// line is the order in which calls come to an upstream that lets one in at a time.
type line struct {
	mu   sync.Mutex
	came []string
	next chan struct{}
}

func (u *upstream) line(path string) *line {
	l := &line{next: make(chan struct{})}
	u.on(path, func(w http.ResponseWriter, a *arrival) {
		l.mu.Lock()
		l.came = append(l.came, a.Header.Get("Idempotency-Key"))
		l.mu.Unlock()
		<-l.next
		status(201, "done")(w, a)
	})
	return l
}

func (l *line) arrived() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.came)
}

func ofWorkflow(workflow, id string, more ...string) request {
	r := request{path: "/held", id: id, header: map[string]string{"Authorization": "Bearer ann", "Workflow-Id": workflow}}
	for i := 0; i < len(more); i += 2 {
		r.header[more[i]] = more[i+1]
	}
	return r
}

// cascade 3.3.3: a workflow has so many connections to a pool and no more, a queue of its own, and
// its backlog keeps nobody else waiting. A call that is refused was not sent, and its key is free.
func TestBulkheadKeepsWorkflowsApart(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "done")(w, a)
	})
	g := launch(t, setup{site: shared(u, "total 3\nper_workflow 2\nqueue 2\nwait 10m", ""), badger: true})
	var calls []*pending
	for i := range 4 { // two at work, two wait
		calls = append(calls, g.begin(ofWorkflow("flood", fmt.Sprint(i))))
		if i == 1 {
			eventually(t, "two are at work", func() bool { return u.arrivals("/held") == 2 })
		}
	}
	g.waiting(2)
	doc := g.call(ofWorkflow("flood", "refused")).retryable(t, 429, "bulkhead-full")
	if !*doc.SafeNewKey || doc.ExecutionID != "refused" || doc.State != "" {
		t.Errorf("%+v", doc)
	}
	get := ofWorkflow("flood", "")
	get.method = "GET"
	g.call(get).retryable(t, 429, "bulkhead-full")
	other := ofWorkflow("other", "other")
	other.path = "/other"
	g.call(other).want(t, 201, "arrival 1", "executed")
	g.call(request{method: "GET", path: "/none"}).want(t, 201, "arrival 1", "")
	attached := g.begin(ofWorkflow("flood", "0")) // a retry needs no permit
	followers(t, 1)
	g.reload(shared(u, "total 3\nper_workflow 3\nqueue 2\nwait 10m", "")) // holds for those that wait
	g.waiting(1)
	hold.open()
	for _, p := range append(calls, attached) {
		if got := p.answer(); got.status != 201 || got.body != "done" {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	g.call(ofWorkflow("flood", "refused")).want(t, 201, "done", "executed")
	if n := g.bulkhead("in_use"); n != 0 {
		t.Errorf("%d permits are in use in the end", n)
	}
	u.arrived("/held", 5)
}

// ATD, "Priority Levels": the class comes from a token, or from the configuration. Nobody who is not
// verified raises his own.
func TestBulkheadServesByClass(t *testing.T) {
	ada, u := newAgent(t, "ada"), newUpstream(t)
	l := u.line("/held")
	g := launch(t, setup{app: trusting(t, ada), site: shared(u, "total 1\nwait 10m",
		"priority {http.request.header.Urgency}\n action batch {\n  match header Kind batch\n  priority low\n }\n action pager {\n  match header Kind pager\n  priority high\n }"), badger: true})
	calls := []*pending{g.begin(ofWorkflow("first", "first"))}
	eventually(t, "one is at work", func() bool { return l.arrived() == 1 })
	enqueue := func(r request) {
		calls = append(calls, g.begin(r))
		g.waiting(len(calls) - 1)
	}
	enqueue(ofWorkflow("a", "low", "Kind", "batch"))
	enqueue(ofWorkflow("b", "stranger", "Urgency", "critical"))
	enqueue(ofWorkflow("c", "normal"))
	enqueue(ofWorkflow("d", "high", "Kind", "pager"))
	urgent := func(class string) *ect.Token {
		return ada.issue(ect.Claims{Workflow: uuid.NewString(), Ext: new(ect.ExtBuilder).Text("atd.resource_priority", class)})
	}
	enqueue(with(urgent("critical"), request{path: "/held", id: "critical"}))
	enqueue(with(urgent("urgent"), request{path: "/held", id: "unknown"}))
	for i := range calls {
		l.next <- struct{}{}
		eventually(t, "the next one", func() bool { return l.arrived() == min(len(calls), i+2) })
	}
	for _, p := range calls {
		p.answer()
	}
	if got := strings.Join(l.came, " "); got != "first critical high stranger normal unknown low" {
		t.Errorf("they came in the order %s", got)
	}
}

// Of two workflows with many and few calls, the one with few is next (ATD, "Fair-Share Scheduling").
func TestBulkheadSharesFairly(t *testing.T) {
	u := newUpstream(t)
	l := u.line("/held")
	g := launch(t, setup{site: shared(u, "total 4\nwait 10m", "")})
	var calls []*pending
	for i := range 30 {
		calls = append(calls, g.begin(ofWorkflow("many", fmt.Sprint("many", i))))
	}
	g.waiting(26)
	for i := range 3 {
		calls = append(calls, g.begin(ofWorkflow("few", fmt.Sprint("few", i))))
	}
	g.waiting(29)
	for i := range calls {
		l.next <- struct{}{}
		eventually(t, "the next one", func() bool { return l.arrived() == min(len(calls), i+5) })
	}
	for _, p := range calls {
		p.answer()
	}
	few := 0
	for i, id := range l.came {
		if strings.HasPrefix(id, "few") {
			few = i
		}
	}
	// The first two permits that come back go to those with none, then each has half.
	if few > 8 {
		t.Errorf("the third call of the other workflow was number %d at the upstream, want within the first nine: %v", few+1, l.came)
	}
}

// Every way to end gives the permit back, on the wire too.
func TestBulkheadPermitsComeBack(t *testing.T) {
	u := newUpstream(t)
	u.on("/reset", reset)
	u.on("/half", raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"))
	u.on("/stream", func(w http.ResponseWriter, a *arrival) {
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		<-a.Context().Done()
	})
	u.on("/tunnel", func(w http.ResponseWriter, _ *arrival) {
		conn, rw := hijack(w)
		defer conn.Close()
		fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = rw.Flush()
		_, _ = rw.ReadString('\n')
	})
	g := launch(t, setup{site: shared(u, "total 1\nwait 10m", "deadline 10m")})
	n := 0
	free := func(after string) {
		t.Helper()
		n++
		eventually(t, "the permit comes back after "+after, func() bool { return g.bulkhead("in_use") == 0 })
		g.call(request{path: "/next", id: fmt.Sprint(n)}).want(t, 201, fmt.Sprint("arrival ", n), "executed")
	}
	for _, path := range []string{"/reset", "/half"} {
		for _, method := range []string{"GET", "POST"} {
			res, err := g.send(request{method: method, path: path, id: method + path})
			if err == nil {
				_, _ = bufio.NewReader(res.Body).ReadString(0)
				_ = res.Body.Close()
			}
			free(method + path)
		}
	}
	res, err := g.send(request{method: "GET", path: "/stream"})
	if err != nil {
		t.Fatal(err)
	}
	if n := g.bulkhead("in_use"); n != 1 {
		t.Errorf("a stream holds %d permits", n)
	}
	_ = res.Body.Close()
	free("a stream whose client has left")
	conn, err := net.Dial("tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /tunnel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "101") {
		t.Fatalf("%q %v", line, err)
	}
	if n := g.bulkhead("in_use"); n != 1 {
		t.Errorf("a tunnel holds %d permits", n)
	}
	_ = conn.Close()
	free("a tunnel")
	waits, leave := withCancel(g.build(request{method: "GET", path: "/stream"}))
	held := make(chan struct{})
	go func() {
		defer close(held)
		if res, err := g.client.Do(waits); err == nil {
			_, _ = bufio.NewReader(res.Body).ReadString(0)
		}
	}()
	eventually(t, "it holds the permit", func() bool { return g.bulkhead("in_use") == 1 })
	queued, leaveQueue := withCancel(g.build(request{path: "/next", id: "left"}))
	go func() { _, _ = g.client.Do(queued) }()
	g.waiting(1)
	leaveQueue()
	g.waiting(0)
	leave()
	<-held
	free("a client that left the queue")
}

// What a workflow may make in a second.
func TestBulkheadQuotas(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{site: shared(u, "rate 1", "")})
	refused := 0
	for i := range 20 {
		r := ofWorkflow("quick", fmt.Sprint(i))
		r.path = "/quick"
		if got := g.call(r); got.status != 201 {
			got.retryable(t, 429, "quota-exceeded")
			refused++
		}
	}
	if refused == 0 {
		t.Error("twenty calls at once are within one a second")
	}
	u.arrived("/quick", 20-refused)

	g.reload(fmt.Sprintf("metrics /metrics\nagent_proxy %s {\n name shared\n}", u.addr))
	if n := g.bulkhead("permits"); n != 32768 {
		t.Errorf("a guard that says nothing of a bulkhead has %d permits, want the default", n)
	}
}
