//go:build unix

package harness

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

// ProcRole in the environment makes this binary the gateway: the same imports as
// cmd/caddy, and one more store, which stops at named points. Under -race the child
// is under the race detector too.
const ProcRole = "AGENT_GUARD_E2E_ROLE"

// ProcBound is how long anything may take that should happen at once.
const ProcBound = 60 * time.Second

func init() { actInRole = procAct }

func procAct() {
	switch os.Getenv(ProcRole) {
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

// ProcSite is a gateway's place: what stays the same over its restarts.
type ProcSite struct {
	t    *testing.T // whose end is the end of its gateways
	Dir  string     // data, key, configuration and log
	Addr string     // of the guarded site
	Host string     // its name, where that is not the address
	// admin is the address of the admin endpoint. A socket in the file system is not
	// for tests that reload: Caddy (2.11) duplicates it, which makes it blocking for a
	// moment, and an Accept that falls into that moment holds up the next reload.
	Admin string

	// What the configuration says. Empty is the default.
	Global   string // further global options
	Store    string // in the app's block; default: badger <dir>/data
	App      string // further options of the app's block
	Guard    string // options of agent_proxy
	Upstream string // its address
	Raw      string // the whole configuration, instead of the above

	Binary string   // default: this one
	Wrap   []string // a command that runs the gateway, such as strace
	Env    []string
	User   *syscall.Credential
}

// ProcNewSite makes a place for a gateway before an upstream.
func ProcNewSite(t *testing.T, upstream string) *ProcSite {
	t.Helper()
	// A short path: sockets have short names.
	dir, err := os.MkdirTemp("", "agp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &ProcSite{t: t, Dir: dir, Addr: FreeAddress(t), Admin: FreeAddress(t), Upstream: upstream}
	watchProcess(s.Addr, s.Admin)
	return s
}

// Path is the path of a file of the site.
func (s *ProcSite) Path(name string) string { return filepath.Join(s.Dir, name) }

// Config is the Caddyfile.
func (s *ProcSite) Config() string {
	if s.Raw != "" {
		return s.Raw
	}
	st := s.Store
	if st == "" {
		st = "badger " + s.Path("data")
	}
	name := s.Addr
	if s.Host != "" {
		name = s.Host + s.Addr[strings.LastIndexByte(s.Addr, ':'):]
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
`, s.Admin, s.Global, st, s.App, name, s.Upstream, s.Guard)
}

// Command is this binary in a role.
func (s *ProcSite) Command(ctx context.Context, role string, args ...string) *exec.Cmd {
	binary := s.Binary
	if binary == "" {
		binary = os.Args[0]
	}
	args = slices.Concat(s.Wrap, []string{binary}, args)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), ProcRole+"="+role, "HOME="+s.Dir, "TMPDIR="+s.Path("tmp"),
		"XDG_DATA_HOME="+s.Path("xdg"), "XDG_CONFIG_HOME="+s.Path("xdg"))
	cmd.Env = append(cmd.Env, s.Env...)
	if s.User != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.User}
	}
	return cmd
}

// ProcGateway is one life of a gateway.
type ProcGateway struct {
	Site *ProcSite
	Cmd  *exec.Cmd
	Log  *ProcLog
	Dead chan struct{} // closed once the process is gone
	Err  error         // of the process; valid once dead is closed
}

// Launch starts the process and does not wait for it to be ready.
func (s *ProcSite) Launch(t *testing.T) *ProcGateway {
	t.Helper()
	if err := os.MkdirAll(s.Path("tmp"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.Path("Caddyfile"), []byte(s.Config()), 0o644); err != nil {
		t.Fatal(err)
	}
	g := &ProcGateway{Site: s, Log: new(ProcLog), Dead: make(chan struct{})}
	g.Cmd = s.Command(context.Background(), "gateway", "run", "--config", s.Path("Caddyfile"), "--adapter", "caddyfile")
	g.Cmd.Stdout, g.Cmd.Stderr = g.Log, g.Log
	g.Cmd.WaitDelay = ProcBound // a wrapper that was killed may leave the gateway behind
	stdin, err := g.Cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		g.Err = g.Cmd.Wait()
		_ = stdin.Close()
		close(g.Dead)
	}()
	s.t.Cleanup(func() {
		if s.t.Failed() && g.Alive() {
			s.t.Logf("log of the gateway:\n%s", g.Log.Tail(3000))
		}
		g.Kill()
		if strings.Contains(g.Log.String(), "DATA RACE") {
			s.t.Errorf("data race in the gateway:\n%s", g.Log.Tail(20000))
		}
	})
	return g
}

// Start starts the gateway and waits until it answers.
func (s *ProcSite) Start(t *testing.T) *ProcGateway {
	t.Helper()
	g := s.Launch(t)
	if !g.Ready(t) {
		t.Fatalf("the gateway did not start: %v\n%s", g.Err, g.Log.Tail(6000))
	}
	return g
}

// Ready waits until the gateway serves, or reports that it has exited. An answer
// would prove nothing: Caddy may serve before all apps have started.
func (g *ProcGateway) Ready(t *testing.T) bool {
	t.Helper()
	select {
	case <-g.Log.When("serving initial configuration"):
		return true
	case <-g.Dead:
		return false
	case <-time.After(ProcBound):
		t.Fatalf("the gateway neither serves nor exits\n%s", g.Log.Tail(6000))
		return false
	}
}

// Kill ends the process with SIGKILL, wherever it is, and waits until it is gone.
func (g *ProcGateway) Kill() {
	_ = g.Cmd.Process.Kill()
	<-g.Dead
}

// End asks the process to exit, and waits until it has.
func (g *ProcGateway) End(t *testing.T) {
	t.Helper()
	g.Term(t)
	g.Wait(t)
	if g.Err != nil {
		t.Errorf("the gateway ended with %v", g.Err)
	}
}

// Term ends the gateway as the system does at a shutdown.
func (g *ProcGateway) Term(t *testing.T) {
	t.Helper()
	if err := g.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// Wait waits for the end of the process.
func (g *ProcGateway) Wait(t *testing.T) {
	t.Helper()
	select {
	case <-g.Dead:
	case <-time.After(ProcBound):
		t.Fatal("the gateway does not exit")
	}
}

// Alive reports whether the process has not ended.
func (g *ProcGateway) Alive() bool {
	select {
	case <-g.Dead:
		return false
	default:
		return true
	}
}

// Admin asks the admin API.
func (g *ProcGateway) Admin(method, path, contentType, body string) (int, string, error) {
	transport := &http.Transport{DisableKeepAlives: true}
	host := g.Site.Admin
	if socket, ok := strings.CutPrefix(host, "unix/"); ok {
		host = "127.0.0.1"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}
	}
	client := &http.Client{Timeout: ProcBound, Transport: Recorded{transport}}
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

// Load loads a configuration into the running gateway. The admin endpoint of the
// configuration before it may still close, with connections that it has not read from:
// then nothing came of the request, and to load the same twice changes nothing.
//
// Caddy (2.11) answers before the servers of the configuration before have stopped
// accepting, and they share the port with the new ones: load returns when they have.
func (g *ProcGateway) Load(config string) error {
	status, text, err := g.Admin("POST", "/load", "text/caddyfile", config)
	for more := 20; (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)) && g.Alive() && more > 0; more-- {
		status, text, err = g.Admin("POST", "/load", "text/caddyfile", config)
	}
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%d: %s", status, text)
	}
	EventuallyWithin(g.Site.t, ProcBound, "the servers of the configuration before have stopped", func() bool {
		return listening(g.Site.t, g.Site.Addr) <= 1 && listening(g.Site.t, g.Site.Admin) <= 1
	})
	return err
}

// Reload loads the site's configuration as it is now.
func (g *ProcGateway) Reload(t *testing.T) {
	t.Helper()
	if err := g.Load(g.Site.Config()); err != nil {
		t.Fatalf("reload: %v", err)
	}
}

// Refused starts a gateway that must not start, and returns what it says.
func (s *ProcSite) Refused(t *testing.T) string {
	t.Helper()
	g := s.Launch(t)
	if g.Ready(t) {
		t.Fatal("the gateway has started")
	}
	if g.Err == nil {
		t.Fatal("the gateway did not start and reports success")
	}
	return g.Log.String()
}
