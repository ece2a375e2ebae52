package call

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// cascade 3.3.1 (C-3.3.1-b): nothing that is forwarded waits for a hanging upstream for ever,
// guarded or not: 504 where nothing was answered, else an answer that breaks off.
func TestNothingWaitsForEver(t *testing.T) {
	u := harness.NewUpstream(t)
	site := "agent_proxy " + u.Addr + " {\n deadline %s\n idle_timeout %s\n exempt path /exempt*\n action stream {\n  match path /guarded*\n  stream_idle 5s\n }\n}"
	hang := func(begin bool) func(http.ResponseWriter, *harness.Arrival) {
		return func(w http.ResponseWriter, a *harness.Arrival) {
			if begin {
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, "data: 1\n\n")
				_ = http.NewResponseController(w).Flush()
			}
			<-a.Context().Done()
		}
	}
	grpc := harness.Headers{"Content-Type": "application/grpc", "TE": "trailers"}
	t.Run("header", func(t *testing.T) {
		g, calls := harness.Start(t, site, "1s", "1h"), map[string]*harness.Pending{}
		for name, r := range map[string]harness.Request{
			"GET":     {Method: http.MethodGet, Path: "/get"},
			"exempt":  {Path: "/exempt", Id: "k"},
			"SSE":     {Method: http.MethodGet, Path: "/sse", Header: harness.Headers{"Accept": "text/event-stream"}},
			"gRPC":    {Path: "/grpc", Header: grpc, Client: g.H2cClient()},
			"upgrade": {Method: http.MethodGet, Path: "/ws", Header: harness.Headers{"Connection": "Upgrade", "Upgrade": "websocket"}},
		} {
			u.On(r.Path, hang(false))
			calls[name] = g.Begin(r)
		}
		for name, p := range calls {
			if got := p.Answer(); got.Status != http.StatusGatewayTimeout || got.Header.Get("Execution-Id") != "" {
				t.Errorf("%s: %d %v", name, got.Status, got.Header)
			}
		}
	})
	t.Run("idle", func(t *testing.T) {
		g := harness.Start(t, site, "1h", "5s")
		t.Run("pause", func(t *testing.T) {
			t.Parallel()
			calls := map[string]*harness.Pending{}
			for name, r := range map[string]harness.Request{
				"GET":     {Method: http.MethodGet, Path: "/get"},
				"exempt":  {Path: "/exempt", Id: "k"},
				"gRPC":    {Path: "/grpc", Header: grpc, Client: g.H2cClient()},
				"guarded": {Path: "/guarded", Id: "k"},
			} {
				u.On(r.Path, hang(true))
				calls[name] = g.Begin(r)
			}
			for name, p := range calls {
				if got := p.Answer(); got.Status != 200 || got.Body != "data: 1\n\n" || !got.Cut {
					t.Errorf("%s: %d %q, cut %v", name, got.Status, got.Body, got.Cut)
				}
			}
			g.Call(harness.Request{Path: "/guarded", Id: "k"}).Terminal(t, 409, "in-doubt")
			u.Arrived("/guarded", 1)
		})
		t.Run("tunnel", func(t *testing.T) {
			t.Parallel()
			closed := make(chan struct{})
			u.On("/tunnel", func(w http.ResponseWriter, a *harness.Arrival) {
				conn, rw, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				defer close(closed)
				fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
				_ = rw.Flush()
				_, _ = io.Copy(conn, rw)
			})
			conn := g.Dial()
			harness.Write(t, conn, "GET /tunnel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			in := bufio.NewReader(conn)
			if res, err := http.ReadResponse(in, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
				t.Fatalf("%v %v", res, err)
			}
			harness.Write(t, conn, "hello\n")
			if line, err := in.ReadString('\n'); err != nil || line != "hello\n" {
				t.Fatalf("%q %v", line, err)
			}
			harness.Wait(t, closed, "the tunnel's end at the upstream")
			if rest, err := io.ReadAll(in); len(rest) > 0 || err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("%q %v", rest, err)
			}
		})
	})
}
