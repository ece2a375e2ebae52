package badger_test

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

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

// P8: no log line carries a key or a value. Badger's chatter stays below info.
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
