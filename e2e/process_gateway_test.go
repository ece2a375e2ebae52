//go:build unix

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/agent-guard/caddy-agent-guard"
)

// procRole in the environment makes this binary the gateway: the same imports as
// cmd/caddy, and one more store, which stops at named points. Under -race the child
// is under the race detector too.
const procRole = "AGENT_GUARD_E2E_ROLE"

// procBound is how long anything may take that should happen at once.
const procBound = 60 * time.Second

func init() {
	switch os.Getenv(procRole) {
	case "gateway":
		go func() {
			// The other end of the pipe is the test: without it, no gateway stays behind.
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1)
		}()
	case "command":
	default:
		return
	}
	caddy.RegisterModule(new(procStagedStore))
	caddycmd.Main()
	os.Exit(0)
}

// procSite is a gateway's place: what stays the same over its restarts.
type procSite struct {
	t    *testing.T // whose end is the end of its gateways
	dir  string     // data, key, configuration and log
	addr string     // of the guarded site
	host string     // its name, where that is not the address
	// admin is the address of the admin endpoint. A socket in the file system is not
	// for tests that reload: Caddy (2.11) duplicates it, which makes it blocking for a
	// moment, and an Accept that falls into that moment holds up the next reload.
	admin string

	// What the configuration says. Empty is the default.
	global   string // further global options
	store    string // in the app's block; default: badger <dir>/data
	app      string // further options of the app's block
	guard    string // options of agent_proxy
	upstream string // its address
	raw      string // the whole configuration, instead of the above

	binary string   // default: this one
	wrap   []string // a command that runs the gateway, such as strace
	env    []string
	user   *syscall.Credential
}

func procNewSite(t *testing.T, upstream string) *procSite {
	t.Helper()
	// A short path: sockets have short names.
	dir, err := os.MkdirTemp("", "agp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &procSite{t: t, dir: dir, addr: freeAddress(t), admin: freeAddress(t), upstream: upstream}
	watchProcess(s.addr, s.admin)
	return s
}

func (s *procSite) path(name string) string { return filepath.Join(s.dir, name) }

// config is the Caddyfile.
func (s *procSite) config() string {
	if s.raw != "" {
		return s.raw
	}
	st := s.store
	if st == "" {
		st = "badger " + s.path("data")
	}
	name := s.addr
	if s.host != "" {
		name = s.host + s.addr[strings.LastIndexByte(s.addr, ':'):]
	}
	return fmt.Sprintf(`{
	admin %s
	persist_config off
	servers {
		protocols h1 h2c
	}
	%s
	agent_guard {
		store %s
		%s
	}
}
http://%s {
	bind 127.0.0.1
	agent_proxy %s {
		%s
	}
}
`, s.admin, s.global, st, s.app, name, s.upstream, s.guard)
}

// command is this binary in a role.
func (s *procSite) command(ctx context.Context, role string, args ...string) *exec.Cmd {
	binary := s.binary
	if binary == "" {
		binary = os.Args[0]
	}
	args = slices.Concat(s.wrap, []string{binary}, args)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), procRole+"="+role, "HOME="+s.dir, "TMPDIR="+s.path("tmp"),
		"XDG_DATA_HOME="+s.path("xdg"), "XDG_CONFIG_HOME="+s.path("xdg"))
	cmd.Env = append(cmd.Env, s.env...)
	if s.user != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.user}
	}
	return cmd
}

// procGateway is one life of a gateway.
type procGateway struct {
	site *procSite
	cmd  *exec.Cmd
	log  *procLog
	dead chan struct{} // closed once the process is gone
	err  error         // of the process; valid once dead is closed
}

// launch starts the process and does not wait for it to be ready.
func (s *procSite) launch(t *testing.T) *procGateway {
	t.Helper()
	if err := os.MkdirAll(s.path("tmp"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path("Caddyfile"), []byte(s.config()), 0o644); err != nil {
		t.Fatal(err)
	}
	g := &procGateway{site: s, log: new(procLog), dead: make(chan struct{})}
	g.cmd = s.command(context.Background(), "gateway", "run", "--config", s.path("Caddyfile"), "--adapter", "caddyfile")
	g.cmd.Stdout, g.cmd.Stderr = g.log, g.log
	g.cmd.WaitDelay = procBound // a wrapper that was killed may leave the gateway behind
	stdin, err := g.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		g.err = g.cmd.Wait()
		_ = stdin.Close()
		close(g.dead)
	}()
	s.t.Cleanup(func() {
		if s.t.Failed() && g.alive() {
			s.t.Logf("log of the gateway:\n%s", g.log.tail(3000))
		}
		g.kill()
		if strings.Contains(g.log.String(), "DATA RACE") {
			s.t.Errorf("data race in the gateway:\n%s", g.log.tail(20000))
		}
	})
	return g
}

// start starts the gateway and waits until it answers.
func (s *procSite) start(t *testing.T) *procGateway {
	t.Helper()
	g := s.launch(t)
	if !g.ready(t) {
		t.Fatalf("the gateway did not start: %v\n%s", g.err, g.log.tail(6000))
	}
	return g
}

// ready waits until the gateway serves, or reports that it has exited. An answer
// would prove nothing: Caddy may serve before all apps have started.
func (g *procGateway) ready(t *testing.T) bool {
	t.Helper()
	select {
	case <-g.log.when("serving initial configuration"):
		return true
	case <-g.dead:
		return false
	case <-time.After(procBound):
		t.Fatalf("the gateway neither serves nor exits\n%s", g.log.tail(6000))
		return false
	}
}

// kill ends the process with SIGKILL, wherever it is, and waits until it is gone.
func (g *procGateway) kill() {
	_ = g.cmd.Process.Kill()
	<-g.dead
}

// end asks the process to exit, and waits until it has.
func (g *procGateway) end(t *testing.T) {
	t.Helper()
	g.term(t)
	g.wait(t)
	if g.err != nil {
		t.Errorf("the gateway ended with %v", g.err)
	}
}

func (g *procGateway) term(t *testing.T) {
	t.Helper()
	if err := g.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

func (g *procGateway) wait(t *testing.T) {
	t.Helper()
	select {
	case <-g.dead:
	case <-time.After(procBound):
		t.Fatal("the gateway does not exit")
	}
}

// alive reports whether the process has not ended.
func (g *procGateway) alive() bool {
	select {
	case <-g.dead:
		return false
	default:
		return true
	}
}

// admin asks the admin API.
func (g *procGateway) admin(method, path, contentType, body string) (int, string, error) {
	transport := &http.Transport{DisableKeepAlives: true}
	host := g.site.admin
	if socket, ok := strings.CutPrefix(host, "unix/"); ok {
		host = "127.0.0.1"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}
	}
	client := &http.Client{Timeout: procBound, Transport: recorded{transport}}
	req, err := http.NewRequest(method, "http://"+host+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// load loads a configuration into the running gateway. The admin endpoint of the
// configuration before it may still close, with connections that it has not read from:
// then nothing came of the request, and to load the same twice changes nothing.
//
// Caddy (2.11) answers before the servers of the configuration before have stopped
// accepting, and they share the port with the new ones: load returns when they have.
func (g *procGateway) load(config string) error {
	status, text, err := g.admin("POST", "/load", "text/caddyfile", config)
	for more := 20; (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)) && g.alive() && more > 0; more-- {
		status, text, err = g.admin("POST", "/load", "text/caddyfile", config)
	}
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%d: %s", status, text)
	}
	eventuallyWithin(g.site.t, procBound, "the servers of the configuration before have stopped", func() bool {
		return listening(g.site.t, g.site.addr) <= 1 && listening(g.site.t, g.site.admin) <= 1
	})
	return err
}

// reload loads the site's configuration as it is now.
func (g *procGateway) reload(t *testing.T) {
	t.Helper()
	if err := g.load(g.site.config()); err != nil {
		t.Fatalf("reload: %v", err)
	}
}

// refused starts a gateway that must not start, and returns what it says.
func (s *procSite) refused(t *testing.T) string {
	t.Helper()
	g := s.launch(t)
	if g.ready(t) {
		t.Fatal("the gateway has started")
	}
	if g.err == nil {
		t.Fatal("the gateway did not start and reports success")
	}
	return g.log.String()
}
