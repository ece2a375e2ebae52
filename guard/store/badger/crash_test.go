package badger_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

const (
	crashDir      = "AGENT_GUARD_CRASH_DIR"
	crashClients  = 8
	crashKeys     = 4 // ordinary entries of a batch
	crashBulkSize = 20_000
)

// TestMain is also the child of the crash test: the same binary, told by its
// environment to commit until it is killed.
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
	s, err := badger.Open(dir, badger.Options{})
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

// crashBatch spreads its keys, so that half a batch would be found by a scan.
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

// P2: kill -9 in the middle of concurrent commits. What was acknowledged is there,
// and no batch is there by halves. SIGKILL leaves the page cache alone, so this
// shows the order of things, not that the disk was asked to sync.
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

// killedChild runs a child until it has acknowledged n batches and kills it. It
// returns everything that it acknowledged.
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
