//go:build unix

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// procStagedStore is the Badger store of a gateway that is to be killed at a named
// point: before and after each commit it asks the test whether to go on. Only the
// child processes of this test know it.
type procStagedStore struct {
	caddymodule.BadgerStore

	// Where to ask.
	Control string `json:"control,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*procStagedStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.staged", New: func() caddy.Module { return new(procStagedStore) }}
}

// UnmarshalCaddyfile reads: staged <path> <control>.
func (s *procStagedStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&s.Path, &s.Control) {
		return d.ArgErr()
	}
	return nil
}

// OpenStore opens the Badger store.
func (s *procStagedStore) OpenStore(logger *zap.Logger) (store.Store, error) {
	if err := procPass(s.Control, "before open"); err != nil {
		return nil, err
	}
	st, err := s.BadgerStore.OpenStore(logger)
	if err != nil {
		return nil, err
	}
	return procStagedCommits{st, s.Control}, procPass(s.Control, "after open")
}

type procStagedCommits struct {
	store.Store
	control string
}

// Commit stops before and after.
func (s procStagedCommits) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	point := procStage(batch)
	if err := procPass(s.control, "before "+point); err != nil {
		return 0, err
	}
	version, err := s.Store.Commit(ctx, batch...)
	if err != nil {
		return version, err
	}
	return version, procPass(s.control, "after "+point)
}

// procStage names a commit by its shape: values are sealed.
func procStage(batch []store.Write) string {
	first := batch[0]
	switch {
	case slices.ContainsFunc(batch, func(w store.Write) bool { return strings.HasPrefix(string(w.Key), "vm") }):
		return "marks"
	case slices.ContainsFunc(batch, func(w store.Write) bool { return strings.HasPrefix(string(w.Key), "hr") && !w.Delete }):
		return "hold" // participants have to hear of it
	case slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'y' && w.Delete }):
		return "workflow end"
	case slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'j' && len(w.Value) == 64 }) &&
		!slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'x' }):
		return "token" // it is bound, and has not acted
	case first.Key[0] == 'm':
		return "christening"
	case first.Key[0] == 'r':
		return "piece"
	case first.Delete:
		return "release"
	case !first.If.None() && first.If.Holds(nil):
		return "claim"
	default:
		return "outcome"
	}
}

// procPass asks the test whether to go on from the point; it waits for the answer.
func procPass(control, point string) error {
	resp, err := http.Post(control, "text/plain", strings.NewReader(point))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: status %d", point, resp.StatusCode)
	}
	return nil
}

// procStages is the test's side.
type procStages struct {
	url string

	mu    sync.Mutex
	armed map[string]chan struct{}
	left  int           // points yet to pass before the one that was counted
	nth   chan struct{} // closed there; nil is none
	name  string        // of the point that was reached by counting
	over  chan struct{}
}

func procNewStages(t *testing.T) *procStages {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &procStages{
		url: "http://" + l.Addr().String() + "/", armed: map[string]chan struct{}{}, over: make(chan struct{}),
	}
	server := &http.Server{Handler: s}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() {
		close(s.over)
		_ = server.Close()
	})
	return s
}

// arm lets the gateway wait at the point when it comes there next; the channel is
// closed once it does.
func (s *procStages) arm(point string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	reached := make(chan struct{})
	s.armed[point] = reached
	return reached
}

// count lets the gateway wait at the nth point from now, whatever its name, counted from
// 0; the channel is closed once it does.
func (s *procStages) count(n int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left, s.nth = n, make(chan struct{})
	return s.nth
}

// disarm lets the gateway wait nowhere, and names the point that it was stopped at by
// counting; empty is none.
func (s *procStages) disarm() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := s.name
	s.armed, s.nth, s.name = map[string]chan struct{}{}, nil, ""
	return name
}

func (s *procStages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	point, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	reached := s.armed[string(point)]
	delete(s.armed, string(point))
	if s.nth != nil {
		if s.left == 0 {
			reached, s.nth, s.name = s.nth, nil, string(point)
		}
		s.left--
	}
	s.mu.Unlock()
	if reached != nil {
		close(reached)
		select { // the gateway is killed now
		case <-r.Context().Done():
		case <-s.over:
		}
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
