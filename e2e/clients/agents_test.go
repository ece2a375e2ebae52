package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/template"
	"time"
)

// agentsCaddyfile has a site for each kind of upstream, and one that is a bare proxy.
var agentsCaddyfile = template.Must(template.New("Caddyfile").Parse(`{
	admin off
	auto_https off
	agent_guard {
		store badger {{.Dir}}/store
	}
}
http://:1001 {
	bind unix/{{.Dir}}/bare
	reverse_proxy {{.Upstream}}
}
http://:1002 {
	bind unix/{{.Dir}}/api
	agent_proxy {{.Upstream}} {
		name api
		missing_id recognize
		breaker off
	}
}
http://:1003 {
	bind unix/{{.Dir}}/mcp
	agent_proxy {{.Upstream}} {
		name mcp
		protocol mcp
		missing_id recognize
		breaker off
	}
}
http://:1005 {
	bind unix/{{.Dir}}/auto
	agent_proxy {{.Upstream}} {
		name auto
		breaker off
	}
}
http://:1004 {
	bind unix/{{.Dir}}/a2a
	agent_proxy {{.Upstream}} {
		name a2a
		protocol a2a
		missing_id recognize
		breaker off
	}
}
http://:1006 {
	bind unix/{{.Dir}}/files
	agent_proxy {{.Upstream}} {
		name files
		exempt path */git-upload-pack
		exempt {
			path   */git-receive-pack
			header Content-Length 4
		}
		breaker off
	}
}
http://:1007 {
	bind unix/{{.Dir}}/signed
	agent_proxy {{.Upstream}} {
		name signed
		caller {http.request.header.X-Gateway-Key}
		breaker off
	}
}
http://:1008 {
	bind unix/{{.Dir}}/again
	agent_proxy {{.Upstream}} {
		name again
		on_unknown retry
		breaker off
	}
}
`))

var agentSites = []string{"bare", "api", "mcp", "auto", "a2a", "files", "signed", "again"}

// agentGateway is Caddy before the servers of agents. It can be killed and started again.
type agentGateway struct {
	dir string

	mu      sync.Mutex
	process *exec.Cmd
	ended   chan struct{}
	up      chan struct{} // closed while it listens
	log     bytes.Buffer
}

func newAgentGateway(t *testing.T, upstream string) *agentGateway {
	t.Helper()
	dir, err := os.MkdirTemp("", "agents") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	g := &agentGateway{dir: dir}
	var config bytes.Buffer
	if err := agentsCaddyfile.Execute(&config, map[string]string{"Dir": dir, "Upstream": upstream}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "Caddyfile"), config.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	g.up = make(chan struct{})
	g.start(t)
	t.Cleanup(func() {
		_ = g.process.Process.Signal(syscall.SIGTERM)
		<-g.ended
		if t.Failed() {
			t.Logf("the gateway's log:\n%s", g.log.String())
		}
	})
	return g
}

func (g *agentGateway) start(t *testing.T) {
	t.Helper()
	process := exec.Command(caddy(t), "run", "--config", filepath.Join(g.dir, "Caddyfile"), "--adapter", "caddyfile")
	process.Env = append(os.Environ(), "XDG_DATA_HOME="+g.dir, "XDG_CONFIG_HOME="+g.dir)
	process.Stdout, process.Stderr = &g.log, &g.log
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = process.Wait()
		close(ended)
	}()
	g.process, g.ended = process, ended
	deadline := time.After(patience)
	for _, site := range agentSites {
		for {
			conn, err := net.Dial("unix", filepath.Join(g.dir, site))
			if err == nil {
				_ = conn.Close()
				break
			}
			select {
			case <-ended:
				t.Fatalf("the gateway did not start:\n%s", g.log.String())
			case <-deadline:
				t.Fatal("the gateway does not listen")
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	g.mu.Lock()
	close(g.up)
	g.mu.Unlock()
}

// kill ends the gateway as a crash does. Who dials waits for the next start.
func (g *agentGateway) kill() {
	g.mu.Lock()
	g.up = make(chan struct{})
	g.mu.Unlock()
	_ = g.process.Process.Kill()
	<-g.ended
	for _, site := range agentSites {
		_ = os.Remove(filepath.Join(g.dir, site))
	}
}

func (g *agentGateway) dial(ctx context.Context, site string) (net.Conn, error) {
	g.mu.Lock()
	up := g.up
	g.mu.Unlock()
	select {
	case <-up:
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(g.dir, site))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// What happens on the way between a client and the gateway, to its first try.
type accident int

const (
	nothing accident = iota
	cuts             // the connection breaks while the call runs
	loses            // the whole answer is taken from the gateway, and does not arrive
)

// agentCell is what one client means, and what it meets.
type agentCell struct {
	do   []deed
	way  accident
	name string

	arrived chan struct{} // closed when a held call is at the upstream
	letGo   chan struct{} // closed when it may go on
	free    sync.Once

	mu                       sync.Mutex
	arrivals, effects, tries int
	active                   int
	statuses                 map[string]string // Execution-Status of what was called, by tool
}

func newAgentCell(way accident, do ...deed) *agentCell {
	return &agentCell{do: do, way: way, arrived: make(chan struct{}), letGo: make(chan struct{}), statuses: map[string]string{}}
}

// release lets a held call go on.
func (c *agentCell) release() { c.free.Do(func() { close(c.letGo) }) }

// settled waits until the upstream has done what was begun, and counts the effects.
func (c *agentCell) settled(t *testing.T) int {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		c.mu.Lock()
		active, effects := c.active, c.effects
		c.mu.Unlock()
		if active == 0 {
			return effects
		}
		if time.Now().After(deadline) {
			t.Error("a call does not end")
			return effects
		}
		<-time.After(5 * time.Millisecond)
	}
}

const (
	refuses529 deed = 529 // overloaded: no effect
	swallows   deed = -1  // closes the connection: no effect
)

// called names what a request calls that can have an effect; empty if it calls nothing.
func called(r *http.Request, body []byte) string {
	switch {
	case r.Method == http.MethodPut || r.Method == http.MethodPatch || r.Method == "COPY" || r.Method == "MOVE":
		return r.Method
	case r.Method != http.MethodPost || strings.HasSuffix(r.URL.Path, "/git-upload-pack") || strings.HasSuffix(r.URL.Path, "/tus"):
		return ""
	case strings.HasSuffix(r.URL.Path, "/mcp"):
		var message struct {
			Method string
			Params struct{ Name string }
		}
		if json.Unmarshal(body, &message) != nil || message.Method != "tools/call" {
			return ""
		}
		return message.Params.Name
	case strings.HasSuffix(r.URL.Path, "/a2a"):
		for _, method := range []string{"message/send", "message/stream", "SendMessage", "SendStreamingMessage"} {
			if bytes.Contains(body, []byte(`"`+method+`"`)) {
				return method
			}
		}
		return ""
	}
	return "post"
}

// site is what serves all cells: real servers, each under a prefix of its own, behind a script.
type agentSite struct {
	*httptest.Server
	servers map[string]http.Handler
	cells   sync.Map // by name
}

func newAgentSite(t *testing.T) *agentSite {
	node := startServer(t, "servers.mjs")
	s := &agentSite{servers: map[string]http.Handler{
		"ts": node, "a2a-js": node, "everything": startEverything(t),
		"go-sdk": goSDKServer(), "mcp-go": mcpGoServer(), "a2a-go": a2aGoServer(),
	}}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// ServeHTTP does what the cell says with what has an effect, and hands on everything else.
func (s *agentSite) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	what := called(r, body)
	prefix, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	server := s.servers[prefix]
	if server != nil {
		r.URL.Path = "/" + rest
	}
	found, ok := s.cells.Load(r.Header.Get("X-Cell"))
	if !ok {
		http.Error(w, "no such cell", http.StatusNotFound)
		return
	}
	c := found.(*agentCell)
	if what == "" {
		server.ServeHTTP(w, r)
		return
	}
	c.mu.Lock()
	do := executes
	if c.arrivals < len(c.do) {
		do = c.do[c.arrivals]
	}
	c.arrivals++
	c.active++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		c.active--
		c.mu.Unlock()
	}()
	if do == refuses429 || do == refuses529 {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(int(do))
		_, _ = io.WriteString(w, `{"type":"error","error":{"type":"overloaded_error","code":"overloaded","message":"later"}}`)
		return
	}
	if do == swallows {
		panic(http.ErrAbortHandler)
	}
	if do == holds {
		close(c.arrived)
		<-c.letGo
	}
	c.mu.Lock()
	c.effects++
	id := fmt.Sprint("effect-", c.effects)
	c.mu.Unlock()
	r = r.WithContext(context.WithoutCancel(r.Context())) // what has begun ends
	run := func(w http.ResponseWriter) {
		if server == nil {
			sayHTTP(w, http.StatusOK, id)
			return
		}
		server.ServeHTTP(w, r)
	}
	switch do {
	case drops:
		run(httptest.NewRecorder())
		panic(http.ErrAbortHandler)
	case fails500, fails502:
		run(httptest.NewRecorder())
		http.Error(w, "upstream failed", int(do))
	default:
		run(w)
	}
}

// line is the way from a client to a site of the gateway. It names the cell, counts the tries,
// and has the cell's accident.
func (s *agentSite) line(t *testing.T, g *agentGateway, c *agentCell, site string) string {
	t.Helper()
	s.cells.Store(c.name, c)
	transport := &http.Transport{
		DisableCompression: true, DisableKeepAlives: true, // so that Go sends nothing twice
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return g.dial(ctx, site) },
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: r.In.Host})
			r.Out.Host = r.In.Host
			r.Out.Header.Set("X-Cell", c.name)
		},
		Transport: transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ModifyResponse: func(res *http.Response) error {
			if what, ok := res.Request.Context().Value(calledKey{}).(string); ok {
				c.mu.Lock()
				c.statuses[what] = res.Header.Get("Execution-Status")
				c.mu.Unlock()
			}
			return nil
		},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		w.Header().Set("Connection", "close")
		what := called(r, body)
		if what == "" {
			proxy.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancel(context.WithValue(r.Context(), calledKey{}, what))
		defer cancel()
		c.mu.Lock()
		c.tries++
		try := c.tries
		c.mu.Unlock()
		switch {
		case try == 2 && g.isUp():
			c.release() // a held call ends when its client comes again
		case try == 1 && c.way == cuts:
			go func() {
				select {
				case <-c.arrived:
					cancel()
				case <-ctx.Done():
				}
			}()
		case try == 1 && c.way == loses:
			proxy.ServeHTTP(httptest.NewRecorder(), r.WithContext(ctx))
			panic(http.ErrAbortHandler)
		}
		proxy.ServeHTTP(w, r.WithContext(ctx))
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}

type calledKey struct{}

func (g *agentGateway) isUp() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.up:
		return true
	default:
		return false
	}
}

// agentClient is a program with its client, and the server that it talks to.
type agentClient struct {
	title  string
	name   string
	server string // prefix of the server; empty is an API
	site   string // of the gateway
	// blind names the rows where nothing tells its retry from a second call that is meant.
	blind []string
	call  func(*testing.T, task) sight
}

// agentRow is a situation.
type agentRow struct {
	title   string
	do      []deed
	way     accident
	times   int
	timeout int // milliseconds
	kill    bool
}

const taken = "answer lost behind the gateway, which has handed over all of it"

var agentRows = []agentRow{
	{title: "all is well"},
	{title: "the same call twice, both meant", times: 2},
	{title: "the connection breaks while the call runs", do: []deed{holds}, way: cuts},
	{title: "timeout: the client gives up while the call runs", do: []deed{holds}, timeout: 10_000},
	{title: "answer lost between upstream and gateway", do: []deed{drops}},
	{title: taken, way: loses},
	{title: "500, executed", do: []deed{fails500}},
	{title: "502, executed", do: []deed{fails502}},
	{title: "429, not executed", do: []deed{refuses429}},
	{title: "529, not executed", do: []deed{refuses529}},
	{title: "gateway killed while the call runs", do: []deed{holds}, kill: true},
}

// agentMeasured is what came of a cell.
type agentMeasured struct {
	effects, tries int
	sight
}

func (m agentMeasured) String() string {
	return fmt.Sprintf("%d | %d | %s", m.effects, m.tries, m.Seen)
}

// No call without a key has more effects than are meant, or fewer, whatever happens to its answer;
// and what recovers behind a bare proxy without harm recovers behind the guard too.
func TestAgents(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	clients := []agentClient{
		{title: "openai 6.49.0, which sends no key", name: "openai, no key", site: "api", call: node.call},
		{title: "@anthropic-ai/sdk 1.12.0, which sends no key", name: "anthropic, no key", site: "api", call: node.call},
		{title: "stripe-node 23.1.0 with the key that it makes, an upstream that keeps none", name: "stripe, its own key", site: "api", call: node.call},
		{title: "MCP: @modelcontextprotocol/sdk 1.32.2, a server of go-sdk 1.8.0", name: "mcp-ts", server: "go-sdk", site: "mcp", blind: []string{taken}, call: node.call},
		{title: "MCP: @modelcontextprotocol/sdk 1.32.2 with a key in `_meta`, a server of mcp-go 1.2.1", name: "mcp-ts, key in _meta", server: "mcp-go", site: "mcp", call: node.call},
		{title: "MCP: go-sdk 1.8.0, a server of @modelcontextprotocol/sdk 1.32.2", name: "go-sdk", server: "ts", site: "mcp", blind: []string{taken}, call: callGoSDK},
		{title: "MCP: mcp-go 1.2.1, a server of its own", name: "mcp-go", server: "mcp-go", site: "mcp", blind: []string{taken}, call: callMCPGo},
		{title: "A2A 1.0: @a2a-js/sdk 1.3.0, an agent of its own", name: "a2a-js", server: "a2a-js", site: "a2a", call: node.call},
		{title: "A2A 0.3: a2a-go 0.3.3, an agent of its own", name: "a2a-go", server: "a2a-go", site: "a2a", call: callA2AGo},
	}
	var mu sync.Mutex
	cells := map[string]agentMeasured{}
	for _, kill := range []bool{false, true} {
		var all, begun sync.WaitGroup
		places := make(chan struct{}, 24)
		var held []*agentCell
		for _, r := range agentRows {
			if r.kill != kill {
				continue
			}
			for _, c := range clients {
				for _, site := range []string{"bare", c.site} {
					cell := newAgentCell(r.way, r.do...)
					cell.name = fmt.Sprint(c.name, "/", r.title, "/", site)
					base := s.line(t, g, cell, site)
					if c.server != "" {
						base += "/" + c.server
					}
					held = append(held, cell)
					begun.Add(1)
					all.Go(func() {
						if !kill {
							places <- struct{}{}
							defer func() { <-places }()
						}
						begun.Done()
						var key = regexp.MustCompile(`\W+`).ReplaceAllString(cell.name, "-")
						seen := c.call(t, task{Client: c.name, Base: base, Key: key, Amount: 1200, Retries: retries, Times: max(r.times, 1), Timeout: r.timeout})
						cell.release()
						m := agentMeasured{effects: cell.settled(t), sight: seen}
						cell.mu.Lock()
						m.tries = cell.tries
						cell.mu.Unlock()
						mu.Lock()
						cells[cell.name] = m
						mu.Unlock()
					})
				}
			}
		}
		if kill {
			begun.Wait()
			for _, cell := range held {
				select {
				case <-cell.arrived:
				case <-time.After(patience):
					t.Fatalf("%s: the call has not arrived", cell.name)
				}
			}
			g.kill()
			g.start(t)
			for _, cell := range held {
				cell.release()
			}
		}
		all.Wait()
	}
	var text strings.Builder
	for _, c := range clients {
		fmt.Fprintf(&text, "\n### %s\n\n| | effects | tries | the program | bare proxy: effects | tries | the program |\n|---|---|---|---|---|---|---|\n", c.title)
		for _, r := range agentRows {
			bare, guard := cells[fmt.Sprint(c.name, "/", r.title, "/bare")], cells[fmt.Sprint(c.name, "/", r.title, "/", c.site)]
			fmt.Fprintf(&text, "| %s | %s | %s |\n", r.title, guard, bare)
			meant := max(r.times, 1)
			if guard.effects > meant && !slices.Contains(c.blind, r.title) {
				t.Errorf("%s, %s: %d effects", c.title, r.title, guard.effects)
			}
			for _, m := range []agentMeasured{bare, guard} {
				if m.OK && m.effects < meant {
					t.Errorf("%s, %s: %d effects, and the program takes its call for done", c.title, r.title, m.effects)
				}
				if m.OK && !strings.HasPrefix(m.ID, "effect-") {
					t.Errorf("%s, %s: the program takes a problem for a success: %q", c.title, r.title, m.ID)
				}
			}
			if bare.OK && bare.effects <= meant && !guard.OK {
				t.Errorf("%s, %s: recovers behind a bare proxy, and not here", c.title, r.title)
			}
		}
	}
	if t.Failed() && !*write {
		t.Log(text.String())
		return
	}
	compare(t, "agents", text.String()+"\n")
}

// startServer runs a server of Node, and hands on to it.
func startServer(t *testing.T, file string) http.Handler {
	t.Helper()
	node := exec.Command("node", file)
	node.Stderr = os.Stderr
	in, err := node.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := node.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Start(); err != nil {
		t.Fatalf("Node is needed: %v", err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = node.Wait()
	})
	var port int
	if _, err := fmt.Fscan(out, &port); err != nil {
		t.Fatalf("%s does not start: %v; run `npm ci` in e2e/clients", file, err)
	}
	return handTo(port)
}

func handTo(port int) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", port)})
			r.Out.Host = r.In.Host
		},
		FlushInterval: -1, Transport: &http.Transport{}, ErrorLog: log.New(io.Discard, "", 0),
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
}

// startEverything runs the reference server of MCP.
func startEverything(t *testing.T) http.Handler {
	t.Helper()
	port := freePort(t)
	node := exec.Command("node", "node_modules/@modelcontextprotocol/server-everything/dist/index.js", "streamableHttp")
	node.Env = append(os.Environ(), fmt.Sprint("PORT=", port))
	if err := node.Start(); err != nil {
		t.Fatalf("Node is needed: %v", err)
	}
	awaitServer(t, node, port)
	return handTo(port)
}

// made matches what differs from run to run.
var made = regexp.MustCompile(`effect-\d+|[0-9a-f]{8}-[0-9a-f-]{27}`)

// What programs do with real servers goes through the guard as through a bare proxy. Only calls of
// tools that are not read-only are guarded.
func TestToursOfMCP(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	amount := map[string]any{"amount": 7}
	own := []toolCall{{"peek", amount, 0}, {"pay", amount, 0}, {"pay", amount, 0}, {"slow", amount, 2}}
	everything := []toolCall{
		{"echo", map[string]any{"message": "hello"}, 0}, {"get-sum", map[string]any{"a": 1, "b": 2}, 0},
		{"trigger-long-running-operation", map[string]any{"duration": 0.02, "steps": 2}, 2},
		{"toggle-simulated-logging", map[string]any{}, 0}, {"toggle-simulated-logging", map[string]any{}, 0},
	}
	tours := map[string]func(*testing.T, task) sight{"mcp-ts tour": node.call, "go-sdk": tourGoSDK, "mcp-go": tourMCPGo}
	n := 0
	for client, tour := range tours {
		for _, server := range []string{"everything", "ts", "go-sdk", "mcp-go"} {
			if client == "go-sdk" && server == "mcp-go" {
				continue // they do not understand one another: one asks for 2026-07-28 by `server/discover` alone
			}
			t.Run(client+" with "+server, func(t *testing.T) {
				calls, reads, writes := own, []string{"peek"}, []string{"pay", "slow"}
				if server == "everything" {
					calls, reads, writes = everything, []string{"echo", "get-sum", "trigger-long-running-operation"}, []string{"toggle-simulated-logging"}
				}
				if server == "mcp-go" { // which drops notifications at times
					calls = slices.Clone(own)
					calls[3].Progress = 0
				}
				got := map[string]string{}
				for _, site := range []string{"bare", "mcp", "auto"} {
					cell := newAgentCell(nothing)
					n++
					cell.name = fmt.Sprint("tour ", n)
					seen := tour(t, task{Client: client, Base: s.line(t, g, cell, site) + "/" + server, Key: fmt.Sprint("tour-", n), Calls: calls})
					if !seen.OK {
						t.Fatalf("%s: %s", site, seen.Seen)
					}
					got[site] = made.ReplaceAllString(seen.ID, "N")
					cell.mu.Lock()
					for tool, status := range cell.statuses {
						want := ""
						if site != "bare" && !slices.Contains(reads, tool) {
							want = "executed"
						}
						if status != want {
							t.Errorf("%s, %s: Execution-Status is %q", site, tool, status)
						}
					}
					for _, tool := range append(reads, writes...) {
						if _, ok := cell.statuses[tool]; !ok {
							t.Errorf("%s: %s was not called", site, tool)
						}
					}
					cell.mu.Unlock()
				}
				if got["bare"] != got["mcp"] || got["auto"] != got["mcp"] || server != "mcp-go" && !strings.Contains(got["bare"], "1/2 2/2") {
					t.Errorf("through the guard:\n%s\nthat is not told the protocol:\n%s\nthrough a bare proxy:\n%s", got["mcp"], got["auto"], got["bare"])
				}
			})
		}
	}
}

// A program is told of a call in doubt in a sentence, by whichever SDK, and goes on with the same
// session: the problem is no failure of the transport.
func TestProblemsInSDKs(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	for _, c := range []agentClient{
		{name: "mcp-ts, in doubt", server: "go-sdk", call: node.call},
		{name: "go-sdk", server: "ts", call: doubtGoSDK},
		{name: "mcp-go", server: "mcp-go", call: doubtMCPGo},
	} {
		t.Run(c.name, func(t *testing.T) {
			cell := newAgentCell(nothing, drops)
			cell.name = "in doubt/" + c.name
			seen := c.call(t, task{Client: c.name, Base: s.line(t, g, cell, "mcp") + "/" + c.server, Key: c.name, Amount: 5})
			sentence, after, _ := strings.Cut(seen.ID, "\n")
			if !strings.Contains(sentence, "The call may have been executed") || after != "peek 5" {
				t.Errorf("%q, then %q, %s", sentence, after, seen.Seen)
			}
			if n := cell.settled(t); n != 2 { // pay and peek
				t.Errorf("%d calls were executed", n)
			}
		})
	}
}

// A batch of two calls that an SDK sends is refused, whether the guard is told the protocol or not, and uses up no key.
func TestBatchesOfSDKs(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	for _, site := range []string{"mcp", "auto"} {
		for _, server := range []string{"ts", "go-sdk", "mcp-go"} {
			t.Run(site+" "+server, func(t *testing.T) {
				cell := newAgentCell(nothing)
				cell.name = "batch of " + server + " by " + site
				seen := node.call(t, task{Client: "mcp-ts, batch", Base: s.line(t, g, cell, site) + "/" + server, Key: "batch", Amount: 5})
				refused, alone, _ := strings.Cut(seen.ID, "\n")
				if !seen.OK || !strings.Contains(refused, "batch-mixed") || alone == "" {
					t.Errorf("%s %q, then %q", seen.Seen, refused, alone)
				}
				if n := cell.settled(t); n != 1 {
					t.Errorf("%d calls were executed", n)
				}
			})
		}
	}
}

// A call that its client cancels while its server works is in doubt soon, and the same call again is told so:
// servers of the SDK send no answer to what was cancelled.
func TestCancelledCallsOfSDKs(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	for _, site := range []string{"mcp", "auto"} {
		t.Run(site, func(t *testing.T) {
			cell := newAgentCell(nothing)
			cell.name = "cancelled by " + site
			seen := node.call(t, task{Client: "mcp-ts, cancelled", Base: s.line(t, g, cell, site) + "/ts", Key: "cancelled", Amount: 5})
			if seen.ID != "-32090 in_doubt" {
				t.Errorf("the program sees %q, %s", seen.ID, seen.Seen)
			}
			if n := cell.settled(t); n != 1 {
				t.Errorf("%d effects", n)
			}
		})
	}
}

// The stream of a call that its server closes is resumed by its client (MCP 2025-11-25), and the answer
// comes through the guard as through a bare proxy. With one key it is executed once, and the next
// call gets that answer; without a key, calls that were answered so are meant.
func TestStreamsThatAreResumed(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	for site, effects := range map[string]int{"bare": 4, "mcp": 3} {
		cell := newAgentCell(nothing)
		cell.name = "resumed by " + site
		seen := node.call(t, task{Client: "mcp-ts, resumed", Base: s.line(t, g, cell, site) + "/ts", Key: "resumed", Amount: 5})
		said := strings.Split(seen.ID, "\n")
		if !seen.OK || len(said) != 4 || !strings.HasSuffix(said[0], " of 5") {
			t.Fatalf("%s: %s %q", site, seen.Seen, said)
		}
		if n := cell.settled(t); n != effects {
			t.Errorf("%s: %d effects, want %d", site, n, effects)
		}
		slices.Sort(said)
		if n := len(slices.Compact(said)); n != effects {
			t.Errorf("%s: %d different answers, want %d: %q", site, n, effects, said)
		}
	}
}

// Two sessions use the same ids of JSON-RPC, of one credential or of two, at the same time. Each
// gets the answer to its own call.
func TestSessionsWithEqualIDs(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	for _, keys := range [][2]string{{"ada", "ada"}, {"ada", "bob"}} {
		for name, call := range map[string]func(*testing.T, task, string) (string, error){"go-sdk": slowGoSDK, "mcp-go": slowMCPGo} {
			t.Run(name+" "+keys[0]+" "+keys[1], func(t *testing.T) {
				var both sync.WaitGroup
				cell := newAgentCell(nothing)
				cell.name = t.Name()
				base := s.line(t, g, cell, "mcp") + "/ts"
				for n, key := range keys {
					both.Go(func() {
						for turn := range 3 {
							amount := 10*turn + n
							said, err := call(t, task{Base: base, Key: key, Amount: amount}, "slow")
							if want := fmt.Sprint("slow ", amount); err != nil || said != want {
								t.Errorf("%q, %v, want %q", said, err, want)
							}
						}
					})
				}
				both.Wait()
				if n := cell.settled(t); n != 6 {
					t.Errorf("%d of 6 calls were executed", n)
				}
			})
		}
	}
}

// A message that is streamed comes as through a bare proxy; sent again with its id it is answered
// again, and not executed.
func TestToursOfA2A(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	for _, c := range []agentClient{
		{name: "a2a-js tour", server: "a2a-js", call: node.call},
		{name: "a2a-go", server: "a2a-go", call: tourA2AGo},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := map[string][]string{}
			for site, effects := range map[string]int{"bare": 2, "a2a": 1} {
				cell := newAgentCell(nothing)
				cell.name = c.name + " by " + site
				seen := c.call(t, task{Client: c.name, Base: s.line(t, g, cell, site) + "/" + c.server, Key: c.name, Amount: 5})
				if !seen.OK {
					t.Fatalf("%s: %s", site, seen.Seen)
				}
				if n := cell.settled(t); n != effects {
					t.Errorf("%s: %d effects, want %d", site, n, effects)
				}
				got[site] = strings.Split(seen.ID, "\n")
			}
			bare, guard := got["bare"], got["a2a"]
			if len(bare) != 3 || len(guard) != 3 || guard[0] != guard[1] || bare[0] == bare[1] || bare[2] != guard[2] {
				t.Errorf("by the guard %q, by a bare proxy %q", guard, bare)
			}
		})
	}
}
