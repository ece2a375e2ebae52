// Package gateway runs Caddy with the agent guard in a process of its own: as it is
// shipped, plus the handlers that it is compared with, and a place that tells what
// the process and its store have done.
package gateway

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/agent-guard/caddy-agent-guard"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// Role is the name of the part that runs Caddy.
const Role = "gateway"

// Run is that part: Caddy's own main, with its command line.
func Run([]string) error {
	caddycmd.Main()
	return nil
}

// Gateway is one gateway's place. It stays the same over restarts.
type Gateway struct {
	// Dir holds what the gateway writes. It is short: sockets have short names.
	Dir string
	// Addr is host:port of its site.
	Addr string
	// Site are the directives of its site.
	Site string
	// Store has the guard's store in Dir; without it there is no guard.
	Store bool
	// Shared is the store in the place of one in Dir, as the Caddyfile has it.
	Shared string
	// Window is the bulk window of the store; 0 is the default.
	Window time.Duration
	// Options are further options of the guard's app, one a line.
	Options string
	// Env is added to the environment of the process.
	Env []string
	// Binary is the program to run, built from these or older sources; empty is this one.
	Binary string

	proc *proc.Proc
}

// New makes a place for a gateway in dir.
func New(dir, site string, store bool) (*Gateway, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	return &Gateway{Dir: dir, Addr: addr, Site: site, Store: store}, nil
}

// freeAddr is an address nobody listens on, below the range from which systems give
// ports to outgoing connections.
func freeAddr() (string, error) {
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 20_000+rand.IntN(10_000)))
		if err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", fmt.Errorf("no port is free")
}

// StorePath is the directory of the store.
func (g *Gateway) StorePath() string { return filepath.Join(g.Dir, "store") }

func (g *Gateway) admin() string { return filepath.Join(g.Dir, "admin") }

// caddyfile is the configuration.
func (g *Gateway) caddyfile() string {
	app := ""
	if g.Store {
		store := cmp.Or(g.Shared, fmt.Sprintf("bench %s %s", g.StorePath(), g.Window))
		app = fmt.Sprintf("agent_guard {\n\t\tstore %s\n%s\n\t}", store, g.Options)
	}
	_, port, _ := net.SplitHostPort(g.Addr)
	return fmt.Sprintf(`{
	admin unix/%s
	persist_config off
	auto_https off
	storage file_system %s
	servers {
		protocols h1
	}
	%s
}
http://:%s {
	bind 127.0.0.1
	%s
}
`, g.admin(), filepath.Join(g.Dir, "caddy"), app, port, g.Site)
}

// Start starts the process and waits until it serves. Caddy answers before all of
// its parts have started, so what it logs is waited for.
func (g *Gateway) Start() error {
	config := filepath.Join(g.Dir, "Caddyfile")
	if err := os.WriteFile(config, []byte(g.caddyfile()), 0o600); err != nil {
		return err
	}
	_ = os.Remove(g.admin()) // of a process that was killed
	var err error
	g.proc, err = proc.Start(proc.Spec{
		Role: Role, Binary: g.Binary, Args: []string{"run", "--config", config, "--adapter", "caddyfile"},
		Env:  append([]string{"XDG_DATA_HOME=" + g.Dir, "XDG_CONFIG_HOME=" + g.Dir, "HOME=" + g.Dir}, g.Env...),
		Mark: "serving initial configuration",
	})
	return err
}

// Proc is the running process, nil before the first Start.
func (g *Gateway) Proc() *proc.Proc { return g.proc }

// Admin asks the product's own admin API, with a body of JSON if there is one.
func (g *Gateway) Admin(ctx context.Context, method, path, body string) ([]byte, error) {
	return g.askAs(ctx, "application/json", method, path, body)
}

// Reload loads the configuration as it is now into the running process.
func (g *Gateway) Reload(ctx context.Context) error {
	_, err := g.ask(ctx, http.MethodPost, "/load", g.caddyfile())
	return err
}

// Stats asks what the process has done so far.
func (g *Gateway) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	body, err := g.ask(ctx, http.MethodGet, statsPath, "")
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	return s, err
}

// ask asks the admin API; a body is a Caddyfile.
func (g *Gateway) ask(ctx context.Context, method, path, body string) ([]byte, error) {
	return g.askAs(ctx, "text/caddyfile", method, path, body)
}

func (g *Gateway) askAs(ctx context.Context, media, method, path, body string) ([]byte, error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", g.admin())
		},
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://127.0.0.1"+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, err
	}
	if body != "" {
		req.Header.Set("Content-Type", media)
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode/100 != 2 {
		err = fmt.Errorf("the admin API answers %d: %s", res.StatusCode, text)
	}
	return text, err
}
