//go:build unix

// Package pgserver starts PostgreSQL servers for tests, from the binaries of Debian's packages, as
// an unprivileged user, in a directory of their own.
package pgserver

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Required is the variable of the environment with which a missing PostgreSQL fails the tests that
// need one; .ci/run sets it.
const Required = "AGENT_GUARD_POSTGRES"

// ErrMissing: no PostgreSQL is installed, and nobody requires it.
var ErrMissing = errors.New("NO TEST ON POSTGRESQL RAN: it is not installed (Debian: apt-get install postgresql)")

// startTime bounds how long a server may take to answer or to end.
const startTime = time.Minute

// Server is a running or stopped server.
type Server struct {
	dir, bin string
	settings []string
	log      bytes.Buffer

	mu   sync.Mutex
	cmd  *exec.Cmd
	over chan struct{} // closed when cmd has ended
}

// Start makes a database cluster and starts its server. Settings are like "fsync=on"; by default
// it is off, since only a machine's stop would show the difference. The error is ErrMissing where
// the tests go on without.
func Start(settings ...string) (*Server, error) {
	return start((*Server).make, settings)
}

// Test is a server for one test, which removes it; nil where none is installed and the tests go on without.
func Test(t testing.TB, settings ...string) *Server {
	t.Helper()
	s, err := Start(settings...)
	if errors.Is(err, ErrMissing) {
		t.Log(err)
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Remove(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Standby makes a standby of the server, which must run, and returns when it answers. It is asked for
// the commits of s if s has the setting synchronous_standby_names=*.
func (s *Server) Standby(settings ...string) (*Server, error) {
	return start(func(standby *Server) error {
		if err := Give(standby.dir); err != nil {
			return err
		}
		backup := standby.command("pg_basebackup", "-D", standby.data(), "-h", s.dir, "-U", "postgres", "-R", "-X", "stream", "-c", "fast", "--no-sync")
		if out, err := backup.CombinedOutput(); err != nil {
			return fmt.Errorf("pg_basebackup: %w: %s", err, out)
		}
		return nil
	}, settings)
}

// Promote makes a standby a primary, and returns when it takes writes.
func (s *Server) Promote() error {
	promote := s.command("pg_ctl", "promote", "-D", s.data(), "-w", "-t", "60")
	if out, err := promote.CombinedOutput(); err != nil {
		return fmt.Errorf("pg_ctl promote: %w: %s", err, out)
	}
	return nil
}

// Pid is the id of the server's first process, whose children the others are.
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd.Process.Pid
}

// Dir is where the server's files and its socket are.
func (s *Server) Dir() string { return s.dir }

func start(make func(*Server) error, settings []string) (*Server, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		if os.Getenv(Required) != "" {
			return nil, errors.New("PostgreSQL is not installed (Debian: apt-get install postgresql), and " + Required + " requires it")
		}
		return nil, ErrMissing
	}
	slices.Sort(found)
	dir, err := os.MkdirTemp("/tmp", "pg") // a socket's path must be short
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, bin: filepath.Dir(found[len(found)-1]), settings: append([]string{
		"fsync=off", "shared_buffers=32MB", "max_connections=80", "listen_addresses=", "unix_socket_directories=" + dir,
	}, settings...)}
	if err := make(s); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	if err := s.Run(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	return s, nil
}

func (s *Server) make() error {
	if err := Give(s.dir); err != nil {
		return err
	}
	initdb := s.command("initdb", "-D", s.data(), "-U", "postgres", "--auth=trust", "--no-sync", "--no-instructions", "--encoding=UTF8", "--locale=C")
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	return nil
}

// nobody is the user and the group as which servers run where the tests run as root, which
// PostgreSQL refuses.
const nobody = 65534

// Give makes a directory the servers' own.
func Give(dir string) error {
	if os.Getuid() != 0 || !mapped(nobody) {
		return nil
	}
	return os.Chown(dir, nobody, nobody)
}

func (s *Server) command(name string, args ...string) *exec.Cmd {
	if !filepath.IsAbs(name) {
		name = filepath.Join(s.bin, name)
	}
	cmd := exec.Command(name, args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC", "HOME=" + s.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	switch {
	case os.Getuid() != 0:
	case mapped(nobody):
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	default:
		asNobody(cmd.SysProcAttr)
	}
	return cmd
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// Socket is the path of the server's socket.
func (s *Server) Socket() string { return filepath.Join(s.dir, ".s.PGSQL.5432") }

// DSN leads to the server's database, over its socket.
func (s *Server) DSN() string { return "host=" + s.dir + " port=5432 user=postgres dbname=postgres" }

// Run starts the server, which must not be running, and returns when it answers.
func (s *Server) Run() error {
	late := time.Now().Add(startTime)
	for {
		err := s.run(late)
		// After a kill the old processes take a moment to leave the shared memory.
		if err == nil || !strings.Contains(s.log.String(), "still in use") || time.Now().After(late) {
			return err
		}
		s.log.Reset()
		<-time.After(50 * time.Millisecond)
	}
}

func (s *Server) run(late time.Time) error {
	args := []string{"-D", s.data()}
	for _, setting := range s.settings {
		args = append(args, "-c", setting)
	}
	cmd := s.command("postgres", args...)
	cmd.Stdout, cmd.Stderr = &s.log, &s.log
	if err := cmd.Start(); err != nil {
		return err
	}
	over := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is not of interest
		close(over)
	}()
	s.mu.Lock()
	s.cmd, s.over = cmd, over
	s.mu.Unlock()
	for time.Now().Before(late) {
		if s.answers() {
			return nil
		}
		select {
		case <-over:
			return fmt.Errorf("postgres ended: %s", s.log.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return errors.Join(errors.New("postgres does not answer"), s.Kill())
}

// answers asks the server for TLS, and for a session: one that still starts refuses that.
func (s *Server) answers() bool {
	conn, err := net.Dial("unix", s.Socket())
	if err != nil {
		return false
	}
	defer conn.Close()
	text := "user\x00postgres\x00database\x00postgres\x00\x00"
	hello := append([]byte{0, 0, 0, byte(8 + len(text)), 0, 3, 0, 0}, text...)
	if _, err := conn.Write(hello); err != nil {
		return false
	}
	first := make([]byte, 1)
	_, err = conn.Read(first)
	return err == nil && first[0] == 'R'
}

// Stop ends the server in order: sessions are cut, and everything is written.
func (s *Server) Stop() error { return s.signal(syscall.SIGINT) }

// Kill ends the server at once, as a crash does.
func (s *Server) Kill() error { return s.signal(syscall.SIGKILL) }

func (s *Server) signal(sig syscall.Signal) error {
	s.mu.Lock()
	cmd, over := s.cmd, s.over
	s.mu.Unlock()
	if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-over:
		return nil
	case <-time.After(startTime):
		return errors.New("postgres, process " + strconv.Itoa(cmd.Process.Pid) + ", does not end")
	}
}

// Remove ends the server and removes its files.
func (s *Server) Remove() error { return errors.Join(s.Kill(), os.RemoveAll(s.dir)) }

// SQL runs statements, and returns what they answer, as psql prints it without titles.
func (s *Server) SQL(statements string) (string, error) {
	psql := s.command("psql", "-h", s.dir, "-U", "postgres", "-d", "postgres", "-v", "ON_ERROR_STOP=1", "-qtA", "-c", statements)
	var said bytes.Buffer // apart from the answer: a server that ends says so, too, where psql has all that it asked for
	psql.Stderr = &said
	out, err := psql.Output()
	if err != nil {
		return "", fmt.Errorf("psql: %w: %s%s", err, out, said.Bytes())
	}
	return strings.TrimSpace(string(out)), nil
}
