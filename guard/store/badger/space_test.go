package badger

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Sizes are those of the file system, by part, and Stats does not look at files.
func TestSpace(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	fill{records: 200, key: time.Hour, result: time.Hour}.into(t, s)
	must(t, s.drain(t.Context())) // to where it stays
	// The file system gives files their blocks when it likes: what is compared is taken
	// between two looks that agree.
	var got Space
	for deadline := time.Now().Add(time.Minute); ; {
		all := blocks(t, s.dir)
		got = s.measure()
		if blocks(t, s.dir) == all && got.Total <= all && got.Total >= all-1<<16 { // directories themselves do not count
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, want %d", got, all)
		}
	}
	if got.Bodies < 200*fillBulk || got.LSM < 200*fillValue || got.Log == 0 || got.Total != got.LSM+got.Bodies+got.Log {
		t.Errorf("%+v", got)
	}
	fill{from: 200, records: 200, key: time.Hour, result: time.Hour}.into(t, s)
	if s.Stats().Space != got {
		t.Error("the sizes have changed without a measurement")
	}
}

// A store that has reached its largest size takes nothing new (P4), settles what is
// under way (P6), says so once, and takes new things once there is less of it.
func TestMaxSize(t *testing.T) {
	var log bytes.Buffer
	begun, later := time.Now(), atomic.Int64{}
	s := reopenWith(t, t.TempDir(), Options{
		BulkWindow: time.Minute, Now: func() time.Time { return begun.Add(time.Duration(later.Load())) },
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	}, osDisk{})
	running := mustCommit(t, s, insert("a", "running"))
	body := func(key string) store.Write {
		return store.Write{Key: []byte(key), Value: make([]byte, 1<<20), Bulk: true, Expires: begun.Add(time.Minute)}
	}
	s.SetLimits(0, s.measure().Total+4<<20)
	written := 0
	for {
		s.lookAtDisk()
		_, err := s.Commit(t.Context(), body(strings.Repeat("b", written+1)))
		if errors.Is(err, ErrQuota) {
			break
		}
		must(t, err)
		if written++; written > 8 {
			t.Fatal("the store grows without a bound")
		}
	}
	if written < 3 {
		t.Errorf("%d MiB fit into 4", written)
	}
	_, err := s.Commit(t.Context(), insert("c", "1"))
	wantErr(t, "a claim", err, ErrQuota)
	wantErr(t, "a claim", err, ErrFull)
	if got := s.Stats(); got.Room != RoomLow || got.Full != 2 || got.MaxSize == 0 {
		t.Errorf("%+v", got)
	}
	mustCommit(t, s, store.Write{Key: []byte("a"), Value: []byte("done"), If: store.VersionIs(running)})
	wantValue(t, s, "a", "done")

	later.Store(int64(time.Hour))
	s.sweep()
	s.measure()
	s.lookAtDisk()
	mustCommit(t, s, insert("c", "1"))
	if got := s.Stats(); got.Room != RoomEnough {
		t.Errorf("%+v", got)
	}
	s.SetLimits(0, 1)
	_, err = s.Commit(t.Context(), insert("d", "1"))
	wantErr(t, "a claim under a smaller limit", err, ErrQuota)
	s.SetLimits(0, 0)
	mustCommit(t, s, insert("d", "1"))
	for text, n := range map[string]int{"store has reached its largest size": 2, "store is below its largest size again": 1} {
		if got := strings.Count(log.String(), text); got != n {
			t.Errorf("%q stands %d times in the log, want %d:\n%s", text, got, n, log.String())
		}
	}
}

// A closed store says so, and why, until it is opened anew.
func TestHealth(t *testing.T) {
	s, d := newFaulty(t, Options{})
	if got := s.Stats(); !got.Healthy || s.Err() != nil {
		t.Fatalf("%+v, %v", got, s.Err())
	}
	d.set(func() { d.onCommit = func() error { return errDisk } })
	_, err := s.Commit(t.Context(), put("a", "1"))
	wantErr(t, "commit", err, store.ErrUnknown)
	d.set(func() { d.onCommit = nil }) // the disk is well again, and nobody asks it
	for range 3 {
		_, err = s.Commit(t.Context(), put("a", "1"))
		wantErr(t, "commit after it", err, store.ErrUnhealthy)
	}
	if got := s.Stats(); got.Healthy {
		t.Errorf("%+v", got)
	}
	wantErr(t, "health", s.Err(), errDisk)
	_ = s.Close()
	again := reopenWith(t, s.dir, Options{}, osDisk{})
	mustCommit(t, again, put("a", "1"))
	if got := again.Stats(); !got.Healthy || again.Err() != nil {
		t.Errorf("%+v, %v", got, again.Err())
	}
}
