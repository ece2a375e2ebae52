package badger_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
)

func open(t *testing.T, dir string, o badger.Options) *badger.Store {
	t.Helper()
	o.Absent = []string{""} // all keys
	s, err := badger.Open(dir, o)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return s
}

func TestContract(t *testing.T) {
	storetest.Exercise(t, func(t *testing.T, now func() time.Time) store.Store {
		return open(t, t.TempDir(), badger.Options{Now: now})
	})
}

func TestContractOverReopening(t *testing.T) {
	storetest.Reopen(t, func(t *testing.T, now func() time.Time) func() store.Store {
		dir := t.TempDir()
		return func() store.Store { return open(t, dir, badger.Options{Now: now}) }
	})
}

// observed adds up the calls of an observer.
type observed struct {
	mu      sync.Mutex
	groups  int
	batches int
	wrong   time.Duration
}

func (o *observed) Committed(batches int, took time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.groups++
	o.batches += batches
	if took <= 0 {
		o.wrong = took
	}
}

// An observer sees every group that became durable: all batches that were committed, and no
// conflicts.
func TestObserver(t *testing.T) {
	o := new(observed)
	s := open(t, t.TempDir(), badger.Options{Observer: o})
	defer s.Close()
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			for j := range 5 {
				write := store.Write{Key: []byte{byte(i), byte(j)}, Value: []byte("v"), If: store.Absent()}
				if _, err := s.Commit(t.Context(), write); err != nil {
					t.Error(err)
				}
				if _, err := s.Commit(t.Context(), write); err == nil {
					t.Error("the second insertion landed")
				}
			}
		})
	}
	all.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	stats := s.Stats()
	if o.batches != 100 || o.groups == 0 || uint64(o.groups) != stats.Commits || o.wrong != 0 {
		t.Errorf("told of %d batches in %d groups (%v), want 100 in %d", o.batches, o.groups, o.wrong, stats.Commits)
	}
}

func TestStats(t *testing.T) {
	s := open(t, t.TempDir(), badger.Options{})
	defer s.Close()
	commit := func(writes ...store.Write) {
		if _, err := s.Commit(t.Context(), writes...); err != nil {
			t.Fatal(err)
		}
	}
	a := store.Write{Key: []byte("a"), Value: make([]byte, 1000), If: store.Absent()}
	commit(a)
	commit(store.Write{Key: []byte("b"), Value: make([]byte, 5000), Bulk: true, Expires: time.Now().Add(time.Hour)},
		store.Write{Key: []byte("c"), Value: []byte("1")})
	if _, err := s.Commit(t.Context(), a); err == nil {
		t.Fatal("the second insertion landed")
	}
	got := s.Stats()
	if got.Bytes < 1000 || got.Bytes > 1500 {
		t.Errorf("%d bytes, want 1000 and what keys and headers take", got.Bytes)
	}
	if got.Free == 0 {
		t.Error("it is not known what the disk has left")
	}
	got.Bytes, got.Free, got.Space = 0, 0, badger.Space{}
	got.Applied = 0 // it comes when it comes
	want := badger.Stats{Batches: 2, Writes: 3, Conflicts: 1, Commits: 2, BulkBytes: 5000,
		FreeKnown: true, Room: badger.RoomEnough, MinFree: badger.DefaultMinFree, Healthy: true}
	if got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

// P8: no log line carries a key or a value. Badger's routine messages stay below info.
func TestLogs(t *testing.T) {
	var out bytes.Buffer
	quiet := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo}))
	dir := filepath.Join(t.TempDir(), "s")
	for range 2 {
		s := open(t, dir, badger.Options{Logger: quiet})
		if _, err := s.Commit(t.Context(), store.Write{Key: []byte("secret-key"), Value: []byte("secret-value")}); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if out.Len() != 0 {
		t.Errorf("an ordinary life is not worth a line: %s", out.String())
	}

	loud := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s := open(t, dir, badger.Options{Logger: loud})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "component=badger") {
		t.Error("Badger's messages do not arrive where they are asked for")
	}
	if strings.Contains(out.String(), "secret") {
		t.Errorf("a key or value is in the log: %s", out.String())
	}
}

const (
	crashDir      = "AGENT_GUARD_CRASH_DIR"
	crashClients  = 8
	crashKeys     = 4 // ordinary entries of a batch
	crashBulkSize = 20_000
)

// TestMain is also the child of the crash test: the same binary, which commits until it is
// killed if its environment says so.
func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		if err := commitUntilKilled(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// commitUntilKilled writes one line for every batch that Commit acknowledged.
func commitUntilKilled(dir string) error {
	s, err := badger.Open(dir, badger.Options{Absent: []string{""}})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	var all sync.WaitGroup
	failures := make(chan error, crashClients)
	for c := range crashClients {
		all.Go(func() {
			for i := 0; ; i++ {
				id := fmt.Sprintf("%d-%d-%d", os.Getpid(), c, i)
				if _, err := s.Commit(context.Background(), crashBatch(id)...); err != nil {
					failures <- err
					return
				}
				// One write, so that a line is whole or not there.
				if _, err := os.Stdout.WriteString(id + "\n"); err != nil {
					failures <- err
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(<-failures, s.Close())
}

// crashBatch spreads its keys, so that a scan would find half a batch.
func crashBatch(id string) []store.Write {
	var batch []store.Write
	for k := range crashKeys {
		batch = append(batch, store.Write{
			Key: fmt.Appendf(nil, "%d/%s", k, id), Value: []byte(id), If: store.Absent(),
		})
	}
	return append(batch, store.Write{
		Key: []byte("bulk/" + id), Value: crashBulk(id), Bulk: true, Expires: time.Now().Add(time.Hour),
	})
}

func crashBulk(id string) []byte {
	return bytes.Repeat([]byte(id), crashBulkSize/len(id))
}

// P2: kill -9 in the middle of concurrent commits. What was acknowledged is there, and
// every batch is there whole or not at all. SIGKILL leaves the page cache alone, so this
// does not show that the disk was synced.
func TestKilledInTheMiddle(t *testing.T) {
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	var acknowledged []string
	for round := range 10 {
		acknowledged = append(acknowledged, killedChild(t, dir, 5+random.IntN(400))...)
		checkAfterCrash(t, dir, acknowledged, round)
	}
	t.Logf("%d acknowledged batches over 10 kills", len(acknowledged))
}

// killedChild runs a child until it has acknowledged n batches, kills it, and returns all
// that it acknowledged.
func killedChild(t *testing.T, dir string, n int) (ids []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	child := exec.CommandContext(ctx, os.Args[0])
	child.Env = append(os.Environ(), crashDir+"="+dir)
	var stderr bytes.Buffer
	child.Stderr = &stderr
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			break
		}
		if id := strings.TrimSpace(line); id != "ready" {
			ids = append(ids, id)
		}
		if len(ids) == n {
			if err := child.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = child.Wait() // it was killed
	if len(ids) < n {
		t.Fatalf("the child ended by itself after %d batches: %s", len(ids), stderr.String())
	}
	return ids
}

func checkAfterCrash(t *testing.T, dir string, acknowledged []string, round int) {
	t.Helper()
	s := open(t, dir, badger.Options{})
	defer s.Close()
	parts := map[string]int{}
	versions := map[string]store.Version{}
	for e, err := range s.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatalf("round %d: scan: %v", round, err)
		}
		kind, id, _ := strings.Cut(string(e.Key), "/")
		want := []byte(id)
		if kind == "bulk" {
			want = crashBulk(id)
		}
		if !bytes.Equal(e.Value, want) {
			t.Fatalf("round %d: %s has another value", round, e.Key)
		}
		if v, ok := versions[id]; ok && v != e.Version {
			t.Errorf("round %d: batch %s has versions %d and %d", round, id, v, e.Version)
		}
		versions[id] = e.Version
		parts[id]++
	}
	for id, n := range parts {
		if n != crashKeys+1 {
			t.Errorf("round %d: %d of %d entries of batch %s are there", round, n, crashKeys+1, id)
		}
	}
	for _, id := range acknowledged {
		if parts[id] == 0 {
			t.Errorf("round %d: acknowledged batch %s is lost", round, id)
		}
	}
}
