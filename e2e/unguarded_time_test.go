package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// cascade 3.3.1 (C-3.3.1-b): nothing that is forwarded waits for a hanging upstream for ever,
// guarded or not: 504 where nothing was answered, else an answer that breaks off.
func TestNothingWaitsForEver(t *testing.T) {
	u := newUpstream(t)
	site := "agent_proxy " + u.addr + " {\n deadline %s\n idle_timeout %s\n exempt path /exempt*\n action stream {\n  match path /guarded*\n  stream_idle 5s\n }\n}"
	hang := func(begin bool) func(http.ResponseWriter, *arrival) {
		return func(w http.ResponseWriter, a *arrival) {
			if begin {
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, "data: 1\n\n")
				_ = http.NewResponseController(w).Flush()
			}
			<-a.Context().Done()
		}
	}
	grpc := headers{"Content-Type": "application/grpc", "TE": "trailers"}
	t.Run("header", func(t *testing.T) {
		g, calls := start(t, site, "1s", "1h"), map[string]*pending{}
		for name, r := range map[string]request{
			"GET":     {method: http.MethodGet, path: "/get"},
			"exempt":  {path: "/exempt", id: "k"},
			"SSE":     {method: http.MethodGet, path: "/sse", header: headers{"Accept": "text/event-stream"}},
			"gRPC":    {path: "/grpc", header: grpc, client: g.h2cClient()},
			"upgrade": {method: http.MethodGet, path: "/ws", header: headers{"Connection": "Upgrade", "Upgrade": "websocket"}},
		} {
			u.on(r.path, hang(false))
			calls[name] = g.begin(r)
		}
		for name, p := range calls {
			if got := p.answer(); got.status != http.StatusGatewayTimeout || got.header.Get("Execution-Id") != "" {
				t.Errorf("%s: %d %v", name, got.status, got.header)
			}
		}
	})
	t.Run("idle", func(t *testing.T) {
		g := start(t, site, "1h", "5s")
		t.Run("pause", func(t *testing.T) {
			t.Parallel()
			calls := map[string]*pending{}
			for name, r := range map[string]request{
				"GET":     {method: http.MethodGet, path: "/get"},
				"exempt":  {path: "/exempt", id: "k"},
				"gRPC":    {path: "/grpc", header: grpc, client: g.h2cClient()},
				"guarded": {path: "/guarded", id: "k"},
			} {
				u.on(r.path, hang(true))
				calls[name] = g.begin(r)
			}
			for name, p := range calls {
				if got := p.answer(); got.status != 200 || got.body != "data: 1\n\n" || !got.cut {
					t.Errorf("%s: %d %q, cut %v", name, got.status, got.body, got.cut)
				}
			}
			g.call(request{path: "/guarded", id: "k"}).terminal(t, 409, "in-doubt")
			u.arrived("/guarded", 1)
		})
		t.Run("tunnel", func(t *testing.T) {
			t.Parallel()
			closed := make(chan struct{})
			u.on("/tunnel", func(w http.ResponseWriter, a *arrival) {
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
			conn := g.dial()
			write(t, conn, "GET /tunnel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			in := bufio.NewReader(conn)
			if res, err := http.ReadResponse(in, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
				t.Fatalf("%v %v", res, err)
			}
			write(t, conn, "hello\n")
			if line, err := in.ReadString('\n'); err != nil || line != "hello\n" {
				t.Fatalf("%q %v", line, err)
			}
			wait(t, closed, "the tunnel's end at the upstream")
			if rest, err := io.ReadAll(in); len(rest) > 0 || err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("%q %v", rest, err)
			}
		})
	})
}
