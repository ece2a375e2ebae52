package clients

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/template"
	"time"
)

// caddyfile has a site for each kind of cell, on a socket of its own.
var caddyfile = template.Must(template.New("Caddyfile").Parse(`{
	admin unix/{{.Dir}}/admin
	auto_https off
	servers {
		protocols h1 h2c
	}
	agent_guard {
		store badger {{.Dir}}/store
	}
}
{{define "cors"}}@preflight {
		method OPTIONS
		header Access-Control-Request-Method *
	}
	header {
		?Access-Control-Allow-Origin   *
		+Access-Control-Expose-Headers "Execution-Id, Execution-Status, Idempotent-Replayed, Retry-After, Link"
		defer
	}
	handle @preflight {
		header {
			Access-Control-Allow-Methods "GET, POST, PUT, PATCH, DELETE"
			Access-Control-Allow-Headers "Authorization, Content-Type, Idempotency-Key"
			Access-Control-Max-Age       600
		}
		respond 204
	}
{{end}}
{{define "site"}}	attach_wait 100ms
		missing_id require
		breaker off
{{end}}
http://:1001 {
	bind unix/{{.Dir}}/default
	agent_proxy {{.HTTP}} {
		name default
	{{template "site"}}
	}
}
http://:1002 {
	bind unix/{{.Dir}}/stripe
	agent_proxy {{.HTTP}} {
		name stripe
		preset stripe
	{{template "site"}}
	}
}
http://:1003 {
	bind unix/{{.Dir}}/grpc
	agent_proxy h2c://{{.HTTP}} {
		name grpc
		grpc unary
	{{template "site"}}
	}
}
http://:1004 {
	bind unix/{{.Dir}}/open
	agent_proxy {{.HTTP}} {
		name open
	}
}
http://:1006 {
	bind unix/{{.Dir}}/cors
	{{template "cors"}}
	handle {
		agent_proxy {{.Plain}} {
			name cors
		{{template "site"}}
		}
	}
}
http://:1007 {
	bind unix/{{.Dir}}/open-cors
	{{template "cors"}}
	handle {
		agent_proxy {{.Plain}} {
			name open-cors
		}
	}
}
http://:1005 {
	bind unix/{{.Dir}}/open-grpc
	agent_proxy h2c://{{.HTTP}} {
		name open-grpc
		grpc unary
	}
}
`))

// built is the gateway's binary, which is built once for all tests.
var built struct {
	sync.Once
	dir string
	out []byte
	err error
}

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(built.dir)
	os.Exit(code)
}

// caddy is the path of the gateway's binary.
func caddy(t *testing.T) string {
	t.Helper()
	built.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "clients-caddy"); built.err != nil {
			return
		}
		build := exec.Command("go", "build", "-o", built.dir, "./cmd/caddy")
		build.Dir = filepath.Join("..", "..")
		built.out, built.err = build.CombinedOutput()
	})
	if built.err != nil {
		t.Fatalf("building the gateway: %v\n%s", built.err, built.out)
	}
	return filepath.Join(built.dir, "caddy")
}

// gateway is Caddy with this module, as a process.
type gateway struct {
	dir string
}

// startGateway builds and starts one before an upstream.
func startGateway(t *testing.T, u *upstream) *gateway {
	t.Helper()
	dir, err := os.MkdirTemp("", "clients") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	var config bytes.Buffer
	if err := caddyfile.Execute(&config, map[string]string{
		"Dir": dir, "HTTP": u.Listener.Addr().String(), "Plain": u.plain.Listener.Addr().String(),
	}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, config.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	process := exec.Command(caddy(t), "run", "--config", file, "--adapter", "caddyfile")
	process.Env = append(os.Environ(), "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	process.Stdout, process.Stderr = &log, &log
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = process.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = process.Process.Signal(syscall.SIGTERM)
		<-ended
		if t.Failed() {
			t.Logf("the gateway's log:\n%s", log.String())
		}
	})
	g := &gateway{dir}
	deadline := time.After(patience)
	for {
		conn, err := net.Dial("unix", filepath.Join(dir, "open-grpc"))
		if err == nil {
			_ = conn.Close()
			g.forceOpen(t, "open", u.Server)
			g.forceOpen(t, "open-cors", u.plain)
			return g
		}
		select {
		case <-ended:
			t.Fatalf("the gateway did not start:\n%s", log.String())
		case <-deadline:
			t.Fatal("the gateway does not listen")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// forceOpen forces the breaker of a site's upstream open, as an operator does.
func (g *gateway) forceOpen(t *testing.T, site string, upstream *httptest.Server) {
	t.Helper()
	ask := func(socket, method, path, body string) {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(g.dir, socket))
		}}}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if text, _ := io.ReadAll(res.Body); socket == "admin" && res.StatusCode != http.StatusOK {
			t.Fatalf("%d %s", res.StatusCode, text)
		}
	}
	ask(site, http.MethodGet, "/", "") // a breaker exists since the first call
	ask("admin", http.MethodPost, "/agent_guard/circuits/mode", fmt.Sprintf(`{"upstream":%q,"mode":"forced_open"}`, upstream.Listener.Addr()))
}

// patience is how long anything may take before it counts as never.
const patience = 2 * time.Minute

// tap stands between a client and a site of the gateway, or the upstream itself, and
// counts the client's tries. What it hears it hands on as it is, lost answers too.
type tap struct {
	*httptest.Server
	mu     sync.Mutex
	tries  map[string]int
	passes map[string]func() // called before an answer to the key goes to the client
}

func newTap(t *testing.T, dial func(context.Context) (net.Conn, error)) *tap {
	t.Helper()
	s := &tap{tries: map[string]int{}, passes: map[string]func(){}}
	transport := func(set func(*http.Protocols)) *http.Transport {
		protocols := new(http.Protocols)
		set(protocols)
		return &http.Transport{
			Protocols: protocols, DisableCompression: true,
			DisableKeepAlives: protocols.HTTP1(), // so that Go sends nothing twice
			DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		}
	}
	one, two := transport(func(p *http.Protocols) { p.SetHTTP1(true) }), transport(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: r.In.Host})
			r.Out.Host = r.In.Host
		},
		Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
			if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
				return two.RoundTrip(r)
			}
			return one.RoundTrip(r)
		}),
		ModifyResponse: func(res *http.Response) error {
			if pass := s.passing(res.Request.Header.Get("Idempotency-Key")); pass != nil {
				pass()
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 {
			// Chromium sends a POST again whose kept connection breaks, and only such a one:
			// without any the counts are the same each time.
			w.Header().Set("Connection", "close")
		}
		if r.Method != http.MethodOptions {
			s.mu.Lock()
			s.tries[r.Header.Get("Idempotency-Key")]++
			s.mu.Unlock()
		}
		proxy.ServeHTTP(w, r)
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip sends a request.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (s *tap) tried(key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tries[key]
}

func (s *tap) passing(key string) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.passes[key]
}

func (s *tap) onPass(key string, f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.passes[key] = f
}

// taps are those before the gateway's sites, by name, and those before the upstream.
func taps(t *testing.T, g *gateway, u *upstream) map[string]*tap {
	dialer := new(net.Dialer)
	all := map[string]*tap{}
	for name, server := range map[string]*httptest.Server{"direct": u.Server, "direct-plain": u.plain} {
		all[name] = newTap(t, func(ctx context.Context) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", server.Listener.Addr().String())
		})
	}
	for _, site := range []string{"default", "stripe", "grpc", "cors", "open", "open-grpc", "open-cors"} {
		all[site] = newTap(t, func(ctx context.Context) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", filepath.Join(g.dir, site))
		})
	}
	return all
}
