package call

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// The behaviours that Caddy tests of its reverse_proxy (caddytest/integration, and the
// tests of modules/caddyhttp/reverseproxy), asked of both directives over sockets: an
// agent_proxy in the place of a reverse_proxy answers the same. What differs is in
// TestReverseProxyDifferences, with its reason.

// proxied is what a client and an upstream see of one case. options are for the block of
// the directive, site stands before it.
type proxied struct {
	name    string
	site    string
	options string
	// to is the upstream in place of u.addr.
	to  func(t *testing.T, u *harness.Upstream) string
	h2c bool // the upstream speaks HTTP/2
	see func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string
}

// seen runs the case through one of the directives.
func (c *proxied) seen(t *testing.T, directive, more string) (got string) {
	t.Helper()
	t.Run(directive, func(t *testing.T) {
		u := harness.NewUpstream(t)
		if c.h2c {
			u = harness.NewH2CUpstream(t)
		}
		to := u.Addr
		if c.h2c {
			to = "h2c://" + to
		}
		if c.to != nil {
			to = c.to(t, u)
		}
		g := harness.Start(t, "%s\n%s %s {\n%s\n%s\n}", c.site, directive, to, c.options, more)
		got = c.see(t, g, u)
	})
	return got
}

// compared is an answer as it is compared: what agent_proxy adds of its own is left out.
func compared(r harness.Reply, fields ...string) string {
	s := fmt.Sprintf("%d %q cut=%v", r.Status, r.Body, r.Cut)
	for _, name := range fields {
		s += fmt.Sprintf(" %s=%q", name, r.Header[name])
	}
	return s
}

// echoing answers while the request comes.
func echoing(t *testing.T) string {
	t.Helper()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		buf := make([]byte, 1024)
		for {
			n, err := r.Body.Read(buf)
			_, _ = w.Write(buf[:n])
			_ = http.NewResponseController(w).Flush()
			if err != nil {
				return
			}
		}
	}))
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return "h2c://" + server.Listener.Addr().String()
}

// bothWays sends a PUT whose body begins when its answer has begun.
func bothWays(fields ...string) func(*testing.T, *harness.Gateway, *harness.Upstream) string {
	return func(t *testing.T, g *harness.Gateway, _ *harness.Upstream) string {
		body, in := io.Pipe()
		req, cancel := harness.WithCancel(g.Build(harness.Request{Method: http.MethodPut, Path: "/stream", Id: "k", Reader: body}))
		defer cancel()
		for i := 0; i < len(fields); i += 2 {
			req.Header.Set(fields[i], fields[i+1])
		}
		res, err := g.H2cClient().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = io.WriteString(in, "some data to be echoed")
			_ = in.Close()
		}()
		if res.StatusCode != http.StatusOK {
			_ = body.Close()
		}
		return compared(harness.Read(res))
	}
}

// lasting are cases in which both directives do the same, for calls that are guarded and
// for others.
func lasting() []proxied {
	both := func(path string, fields ...string) func(*testing.T, *harness.Gateway, *harness.Upstream) string {
		return func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			var s string
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				s += method + ": " + compared(g.Call(harness.Request{Method: method, Path: path, Id: "k", Body: "{}"}), fields...) + "\n"
			}
			return s
		}
	}
	return []proxied{
		{name: "answers that break off, and whole ones with 5xx", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			abort := func(sent string) func(http.ResponseWriter, *harness.Arrival) {
				return func(w http.ResponseWriter, _ *harness.Arrival) {
					w.Header().Set("Content-Length", "500")
					w.WriteHeader(500)
					_, _ = io.WriteString(w, sent)
					_ = http.NewResponseController(w).Flush()
					panic(http.ErrAbortHandler)
				}
			}
			u.On("/header", abort(""))
			u.On("/partial", abort("partial"))
			u.On("/full", harness.Status(500, strings.Repeat("full", 125), "Content-Length", "500"))
			u.On("/empty", harness.Reset)
			var s string
			for _, path := range []string{"/header", "/partial", "/full", "/empty"} {
				s += path + ": " + compared(g.Call(harness.Request{Method: http.MethodGet, Path: path})) + "\n"
			}
			return s + "POST /full: " + compared(g.Call(harness.Request{Path: "/full", Id: "k"}))
		}},
		{name: "a body without a length over HTTP/2, and a compressed answer", site: "encode gzip", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			text := strings.Repeat("0123456789abcdef", 128)
			u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) { _, _ = io.WriteString(w, a.Body) })
			body, in := io.Pipe()
			go func() {
				_, _ = io.WriteString(in, text)
				_ = in.Close()
			}()
			got := g.Call(harness.Request{Method: http.MethodPut, Path: "/x", Id: "k", Reader: body, Client: g.H2cClient(), Header: harness.Headers{"Accept-Encoding": "gzip", "Content-Type": "text/plain"}})
			if got.Header.Get("Content-Encoding") == "gzip" {
				z, err := gzip.NewReader(strings.NewReader(got.Body))
				if err != nil {
					t.Fatal(err)
				}
				plain, err := io.ReadAll(z)
				return fmt.Sprint("gzip ", string(plain) == text, err, got.Proto)
			}
			return compared(got)
		}},
		{name: "WebSocket header names as browsers write them", to: func(t *testing.T, u *harness.Upstream) string {
			// net/http would hide how they are written.
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					var lines []string
					in := bufio.NewReader(conn)
					for {
						line, err := in.ReadString('\n')
						if err != nil || line == "\r\n" {
							break
						}
						if strings.HasPrefix(strings.ToLower(line), "sec-websocket") {
							lines = append(lines, strings.TrimSpace(line))
						}
					}
					text := strings.Join(lines, ",")
					_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
					_ = conn.Close()
				}
			}()
			return l.Addr().String()
		}, options: "header_up X-Add 1", see: func(t *testing.T, g *harness.Gateway, _ *harness.Upstream) string {
			var s string
			for _, name := range []string{"Sec-WebSocket-Version", "Sec-Websocket-Version", "Sec-Websocket-Other"} {
				got := g.Raw("GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n" + name + ": 13\r\n\r\n")
				_, body, _ := strings.Cut(got, "\r\n\r\n")
				s += got[:12] + " " + body + "\n"
			}
			return s
		}},
		{name: "a body over the limit of request_body", site: "request_body {\nmax_size 10\n}", options: "request_buffers unlimited", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			got := g.Call(harness.Request{Path: "/x", Id: "k", Body: "more than ten bytes"})
			return fmt.Sprint(got.Status, u.Total())
		}},
		{name: "an upstream that cannot be dialled, and another", options: "lb_policy first\nlb_retries 2\nfail_duration 10s", to: func(t *testing.T, u *harness.Upstream) string {
			return harness.FreeAddress(t) + " " + u.Addr
		}, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			got := g.Call(harness.Request{Path: "/x", Id: "k", Body: "the whole body"})
			return compared(got) + u.Last("/x").Body
		}},
		{name: "a status at which a GET is sent again", options: "lb_retries 2\nlb_retry_match {\nexpression `{rp.status_code} == 503`\n}", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", first(func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(503) }))
			return compared(g.Call(harness.Request{Method: http.MethodGet, Path: "/x"}))
		}},
		{name: "no upstream at all", to: func(t *testing.T, u *harness.Upstream) string { return harness.FreeAddress(t) }, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			return compared(g.Call(harness.Request{Method: http.MethodGet, Path: "/x"}))
		}},
		{name: "an address of placeholders", to: func(t *testing.T, u *harness.Upstream) string { return "{http.request.header.X-Dial}" }, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			dial := harness.Headers{"X-Dial": u.Addr}
			return compared(g.Call(harness.Request{Method: http.MethodGet, Path: "/x", Header: dial})) + compared(g.Call(harness.Request{Path: "/x", Id: "k", Header: dial}))
		}},
		{name: "a Unix socket", to: func(t *testing.T, u *harness.Upstream) string {
			dir, err := os.MkdirTemp("", "agu") // a short path, as sockets need
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			path := filepath.Join(dir, "s")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			server := &http.Server{Handler: u}
			go func() { _ = server.Serve(l) }()
			t.Cleanup(func() { _ = server.Close() })
			return "unix/" + path
		}, see: both("/x")},
		// The guard stands first, so that its app subscribes to events before a health check emits one:
		// Caddy does not protect its subscriptions.
		{name: "an upstream that a health check finds", site: "route /never {\nagent_guard {\nname first\n}\nrespond 204\n}", options: "health_uri /health\nhealth_interval 10ms\nhealth_status 200\nlb_try_duration 10s\nlb_try_interval 10ms", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/health", harness.Status(200, ""))
			return both("/x")(t, g, u)
		}},
		{name: "early hints", site: "header Strict-Transport-Security max-age=1", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", func(w http.ResponseWriter, _ *harness.Arrival) {
				h := w.Header()
				h.Set("Link", "</style.css>; rel=preload")
				h.Set("Keep-Alive", "timeout=999")
				h.Set("X-Internal", "secret")
				h.Set("Connection", "X-Internal")
				w.WriteHeader(http.StatusEarlyHints)
				clear(h)
				w.WriteHeader(http.StatusOK)
			})
			var s string
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				req := g.Build(harness.Request{Method: method, Path: "/x", Id: "k", Body: "{}"})
				req = req.WithContext(httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
					Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
						s += fmt.Sprint(code, h["Link"], h["Keep-Alive"], h["X-Internal"], h["Connection"], " ")
						return nil
					},
				}))
				res, err := g.Client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				s += compared(harness.Read(res), "Link", "Strict-Transport-Security", "X-Internal") + "\n"
			}
			return s
		}},
		{name: "hop-by-hop fields of an answer", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", harness.Status(200, "x", "Connection", "X-Internal", "X-Internal", "secret", "Keep-Alive", "timeout=9", "Proxy-Authenticate", "Basic", "X-Kept", "1"))
			return both("/x", "Connection", "X-Internal", "Keep-Alive", "Proxy-Authenticate", "X-Kept")(t, g, u)
		}},
		{name: "an upgrade, half-closed", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/ws", tunnelling)
			got, conn := g.Upgrade("GET", "/ws", "websocket")
			harness.Write(t, conn, "ping")
			echo := make([]byte, 4)
			_, err := io.ReadFull(conn, echo)
			_ = conn.Close()
			return fmt.Sprintf("%d %q %v %q", got.Status, echo, err, got.Header["Upgrade"])
		}},
		{name: "trailers of the request", options: "", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			got := g.Call(harness.Request{Path: "/x", Id: "k", Reader: harness.OnlyReader{Reader: strings.NewReader("body")}, Trailer: http.Header{"X-Sum": {"1"}}})
			return compared(got) + u.Last("/x").Body + fmt.Sprint(u.Last("/x").Trailer["X-Sum"])
		}},
		{name: "response handlers", options: "@error status 500 503\nhandle_response @error {\nrespond \"sorry\" 502\n}\n@gone status 404\nreplace_status @gone 410", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/500", harness.Status(500, "secret"))
			u.On("/404", harness.Status(404, "none"))
			return both("/500")(t, g, u) + both("/404")(t, g, u)
		}},
		{name: "fields up and down", options: "header_up X-Add 1\nheader_up -X-Drop\nheader_down X-Down 2\nheader_down -X-Secret", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", harness.Status(200, "", "X-Secret", "s"))
			got := g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"X-Drop": "d"}})
			up := u.Last("/x").Header
			return compared(got, "X-Down", "X-Secret") + fmt.Sprint(up["X-Add"], up["X-Drop"], up["X-Forwarded-For"], up["X-Forwarded-Proto"], up["Via"])
		}},
		{name: "events as they come, marked incremental", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			hold := harness.NewGate(t)
			u.On("/x", func(w http.ResponseWriter, _ *harness.Arrival) {
				w.Header().Set("Incremental", "?1")
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, "data: one\n\n")
				_ = http.NewResponseController(w).Flush()
				hold.Pass()
			})
			res, err := g.Send(harness.Request{Path: "/x", Id: "k"})
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			line, err := bufio.NewReader(res.Body).ReadString('\n') // before the answer has ended
			hold.Open()
			return fmt.Sprint(res.StatusCode, res.Header["Incremental"], line, err)
		}},
		{name: "both ways at once, with a safe method", to: func(t *testing.T, _ *harness.Upstream) string { return echoing(t) }, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			body, in := io.Pipe()
			req := g.Build(harness.Request{Method: "QUERY", Path: "/stream", Reader: body})
			res, err := g.H2cClient().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				_, _ = io.WriteString(in, "echoed")
				_ = in.Close()
			}()
			return compared(harness.Read(res))
		}},
	}
}

func TestReverseProxyBehaviours(t *testing.T) {
	for _, c := range lasting() {
		t.Run(c.name, func(t *testing.T) {
			theirs := c.seen(t, "reverse_proxy", "")
			ours := c.seen(t, "agent_proxy", "")
			if ours != theirs {
				t.Errorf("agent_proxy:\n%s\nreverse_proxy:\n%s", ours, theirs)
			}
		})
	}
}

// What agent_proxy does otherwise, each with its reason. Both sides are held: where Caddy
// changes, or we do, the list does not go stale.
func TestReverseProxyDifferences(t *testing.T) {
	post := func(path string) func(*testing.T, *harness.Gateway, *harness.Upstream) string {
		return func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			got := g.Call(harness.Request{Path: path, Id: "k"})
			return fmt.Sprint(got.Status, " arrivals=", u.Arrivals(path))
		}
	}
	stream := func(t *testing.T, _ *harness.Upstream) string { return echoing(t) }
	for _, c := range []struct {
		proxied
		theirs, ours string
		// cure is the option with which agent_proxy does as reverse_proxy does.
		cure string
		why  string
	}{
		{proxied{name: "a guarded call that goes both ways at once", site: "timeouts {\nread_timeout 3s\n}", to: stream, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			return bothWays()(t, g, u)[:4]
		}}, "200 ", "408 ", "exempt path /stream", "it is read whole before it is forwarded: without the end of the body there is no fingerprint"},
		{proxied{name: "a guarded call that asks to be forwarded as it comes", to: stream, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			return bothWays("Incremental", "?1")(t, g, u)[:4]
		}}, "200 ", "501 ", "exempt path /stream", "the same, and here the client says so (RFC 10036)"},
		{proxied{name: "a guarded call where no upstream is there", to: func(t *testing.T, u *harness.Upstream) string { return harness.FreeAddress(t) }, see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			got := g.Call(harness.Request{Path: "/x", Id: "k"})
			return fmt.Sprintf("%d %q %q", got.Status, got.Header.Get("Content-Type"), got.Header.Get("Execution-Status"))
		}}, `502 "" ""`, `502 "application/problem+json" "released"`, "exempt path /x", "the client learns that nothing was executed, and that the same call may come again"},
		{proxied{name: "a connection that is lost after the call was sent", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", harness.Reset)
			return post("/x")(t, g, u)
		}}, "502 arrivals=1", "409 arrivals=1", "exempt path /x", "502 invites a retry, and the call may have been executed"},
		{proxied{name: "a status at which a DELETE is sent again", options: "lb_retries 2\nlb_retry_match {\nmethod DELETE\nexpression `{rp.status_code} == 503`\n}", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(503) })
			got := g.Call(harness.Request{Method: http.MethodDelete, Path: "/x", Id: "k", Reader: http.NoBody})
			return fmt.Sprint(got.Status, " arrivals=", u.Arrivals("/x"))
		}}, "503 arrivals=3", "409 arrivals=1", "exempt path /x", "a guarded call leaves once; the fuse stops the second sending"},
		{proxied{name: "an upgrade of a POST", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/ws", func(w http.ResponseWriter, a *harness.Arrival) {
				if a.Header.Get("Upgrade") == "" {
					w.WriteHeader(http.StatusUpgradeRequired)
					return
				}
				tunnelling(w, a)
			})
			got, conn := g.Upgrade("POST", "/ws", "websocket")
			_ = conn.Close()
			return fmt.Sprint(got.Status)
		}}, "101", "426", "exempt path /ws", "an Upgrade that anybody can write would lead past the guard (ADR 0046)"},
		{proxied{name: "codings that the client takes", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Accept-Encoding": "br, zstd, gzip"}})
			return u.Last("/x").Header.Get("Accept-Encoding")
		}}, "br, zstd, gzip", "gzip", "exempt path /x", "a replay has to suit a client that takes less (ADR 0008)"},
		{proxied{name: "a client that leaves", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			arrived, left := make(chan struct{}), make(chan string, 1)
			u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
				close(arrived)
				select {
				case <-a.Context().Done():
					left <- "cancelled"
				case <-g.T.Context().Done():
				}
			})
			req, cancel := harness.WithCancel(g.Build(harness.Request{Path: "/x", Id: "k"}))
			go func() {
				if res, err := g.Client.Do(req); err == nil {
					_ = res.Body.Close()
				}
			}()
			harness.Wait(t, arrived, "the call")
			cancel()
			return harness.Wait(t, left, "the end")
		}}, "cancelled", "", "", "P7: what was begun is finished and recorded (TestOwnerLeaves holds it)"},
		{proxied{name: "an upstream that fails again and again", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			u.On("/x", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(500) })
			for i := range 10 {
				g.Call(harness.Request{Path: "/x", Id: fmt.Sprint(i)})
			}
			return post("/x")(t, g, u)
		}}, "500 arrivals=11", "503 arrivals=10", "breaker off", "every upstream has a circuit breaker"},
		{proxied{name: "an answer to a POST", see: func(t *testing.T, g *harness.Gateway, u *harness.Upstream) string {
			got := g.Call(harness.Request{Path: "/x", Id: "k"})
			return compared(got, "Execution-Id", "Execution-Status") + fmt.Sprint(u.Last("/x").Header["Execution-Parent"])
		}}, `201 "arrival 1" cut=false Execution-Id=[] Execution-Status=[][]`, `201 "arrival 1" cut=false Execution-Id=["k"] Execution-Status=["executed"][k]`, "exempt path /x", "callers and upstreams are told under which name the call runs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.seen(t, "reverse_proxy", ""); got != c.theirs {
				t.Errorf("reverse_proxy: %s, want %s", got, c.theirs)
			}
			if c.ours == "" {
				return
			}
			if got := c.seen(t, "agent_proxy", ""); got != c.ours {
				t.Errorf("agent_proxy: %s, want %s: %s", got, c.ours, c.why)
			}
			if c.cure == "" {
				return
			}
			t.Run("cured", func(t *testing.T) {
				if got := c.seen(t, "agent_proxy", c.cure); got != c.theirs {
					t.Errorf("agent_proxy with %s: %s, want %s", c.cure, got, c.theirs)
				}
			})
		})
	}
}

// C4: pages of another origin can read the gateway's problems, and its fields on every
// answer, with the `header` directive of docs/http.md; where the upstream has said the
// same already, nothing stands twice.
func TestPagesOfAnotherOrigin(t *testing.T) {
	const origin = "https://app.example.com"
	u := harness.NewUpstream(t)
	g := harness.Start(t, `header {
		?Access-Control-Allow-Origin %s
		?Access-Control-Allow-Credentials true
		?Vary Origin
		+Access-Control-Expose-Headers "Execution-Id, Execution-Status, Idempotent-Replayed, Retry-After, Link"
		defer
	}
	agent_proxy %s`, origin, u.Addr)
	u.On("/x", harness.Status(201, "made", "Access-Control-Allow-Origin", origin, "Access-Control-Allow-Credentials", "true", "Vary", "Origin",
		"Access-Control-Expose-Headers", "X-Upstream"))
	u.On("/lost", harness.Reset)
	for _, c := range []struct {
		path, body, execution string
		status                int
	}{
		{"/x", "{}", "executed", 201}, {"/x", "{}", "replayed", 201}, {"/x", "[]", "refused", 422}, {"/lost", "{}", "in_doubt", 409}, {"/lost", "{}", "in_doubt", 409},
	} {
		got := g.Call(harness.Request{Path: c.path, Id: "k", Body: c.body, Header: harness.Headers{"Origin": origin}})
		if got.Status != c.status || got.Header.Get("Execution-Status") != c.execution {
			t.Errorf("%s: %d %v, want %d %s", c.path, got.Status, got.Header, c.status, c.execution)
		}
		for name, want := range map[string]string{"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true", "Vary": "Origin"} {
			if v := got.Header[name]; len(v) != 1 || v[0] != want {
				t.Errorf("%s %s: %s is %q", c.path, c.execution, name, v)
			}
		}
		exposed := strings.Join(got.Header["Access-Control-Expose-Headers"], ", ")
		if !strings.Contains(exposed, "Execution-Status") || (c.status == 201) != strings.Contains(exposed, "X-Upstream") {
			t.Errorf("%s %s: shown are %q", c.path, c.execution, exposed)
		}
	}
}

// With the recipe of docs/recipes.md Caddy answers a page's preflight: the upstream sees
// the call alone. An OPTIONS that is none goes there.
func TestPreflightThatCaddyAnswers(t *testing.T) {
	const origin = "https://app.example.com"
	text, err := os.ReadFile("../../docs/recipes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, recipe, _ := strings.Cut(string(text), "http://pages.localhost:8080 {\n")
	recipe, _, ok := strings.Cut(recipe, "\n}\n```")
	if !ok {
		t.Fatal("the recipe is not there")
	}
	u := harness.NewUpstream(t)
	g := harness.Start(t, "%s", strings.Replace(recipe, "localhost:9004", u.Addr, 1))
	asked := harness.Headers{
		"Origin": origin, "Access-Control-Request-Method": "POST",
		"Access-Control-Request-Headers": "authorization,content-type,idempotency-key",
	}
	got := g.Call(harness.Request{Method: "OPTIONS", Path: "/x", Header: asked})
	if allowed := strings.ToLower(got.Header.Get("Access-Control-Allow-Headers")); got.Status != 204 || got.Header.Get("Access-Control-Allow-Origin") != origin ||
		!strings.Contains(got.Header.Get("Access-Control-Allow-Methods"), "POST") || !strings.Contains(allowed, "idempotency-key") {
		t.Errorf("the preflight: %d %v", got.Status, got.Header)
	}
	u.Arrived("/x", 0)
	for _, execution := range []string{"executed", "replayed"} {
		got := g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Origin": origin}})
		if got.Header.Get("Execution-Status") != execution || got.Header.Get("Access-Control-Allow-Origin") != origin || got.Header.Get("Access-Control-Allow-Methods") != "" {
			t.Errorf("the call: %d %v", got.Status, got.Header)
		}
	}
	u.Arrived("/x", 1)
	g.Call(harness.Request{Method: "OPTIONS", Path: "/x"})
	u.Arrived("/x", 2)
}
