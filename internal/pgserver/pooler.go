//go:build unix

package pgserver

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// ErrNoPooler: PgBouncer is not installed, and nobody requires it.
var ErrNoPooler = errors.New("NO TEST BEHIND A POOLER RAN: PgBouncer is not installed (Debian: apt-get install pgbouncer)")

// Pooler is a PgBouncer in front of a server, in transaction mode: the sessions of its clients share a few
// of the server's.
type Pooler struct {
	server *Server
	dir    string
	log    bytes.Buffer
	cmd    *exec.Cmd
	over   chan struct{}
}

// poolerConfig has what docs/fleet.md asks for.
const poolerConfig = `[databases]
postgres = host=%s port=5432 user=postgres
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = %s
auth_type = any
pool_mode = transaction
default_pool_size = 4
max_client_conn = 200
ignore_startup_parameters = statement_timeout,idle_in_transaction_session_timeout,default_transaction_isolation,default_transaction_read_only,plan_cache_mode,enable_seqscan,jit
`

// NewPooler starts one, and returns when it answers. The error is ErrNoPooler where the tests go on without.
func NewPooler(s *Server) (_ *Pooler, err error) {
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		path = "/usr/sbin/pgbouncer" // where it is, and not in the path of everybody
		if _, err = os.Stat(path); err != nil && os.Getenv(Required) != "" {
			return nil, errors.New("PgBouncer is not installed (Debian: apt-get install pgbouncer), and " + Required + " requires it")
		}
		if err != nil {
			return nil, ErrNoPooler
		}
	}
	dir, err := os.MkdirTemp("/tmp", "pb") // a socket's path must be short
	if err != nil {
		return nil, err
	}
	p := &Pooler{server: s, dir: dir, over: make(chan struct{})}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(dir)
		}
	}()
	config := filepath.Join(dir, "pgbouncer.ini")
	if err := os.WriteFile(config, fmt.Appendf(nil, poolerConfig, s.dir, dir), 0o644); err != nil {
		return nil, err
	}
	if err := Give(dir); err != nil {
		return nil, err
	}
	p.cmd = s.command(path, config)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is not of interest
		close(p.over)
	}()
	for late := time.Now().Add(startTime); time.Now().Before(late); {
		conn, err := net.Dial("unix", filepath.Join(dir, ".s.PGSQL.6432"))
		if err == nil {
			return p, conn.Close()
		}
		select {
		case <-p.over:
			return nil, fmt.Errorf("pgbouncer ended: %s", p.log.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil, errors.Join(errors.New("pgbouncer does not answer"), p.Remove())
}

// DSN leads to the server's database through the pooler.
func (p *Pooler) DSN() string {
	return "host=" + p.dir + " port=6432 user=postgres dbname=postgres default_query_exec_mode=cache_describe"
}

// Remove ends the pooler and removes its files. The error says so if it had ended by itself.
func (p *Pooler) Remove() error {
	err := p.cmd.Process.Signal(syscall.SIGKILL)
	<-p.over
	if errors.Is(err, os.ErrProcessDone) {
		err = fmt.Errorf("pgbouncer had ended: %s", p.log.String())
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}
