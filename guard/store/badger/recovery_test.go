package badger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P2: a crash or a loss of power before and after every step of a life: what was
// answered is there, what was not is there or not, and nothing else is.
func TestCrashAtEveryPoint(t *testing.T) {
	m := newManual()
	dir := t.TempDir()
	const keys = 2
	body := func(i int) store.Write {
		size := 700
		if i == 2 {
			size = maxInline + 1
		}
		return m.bulk(fmt.Sprintf("body-%d-", i), size, time.Hour)
	}
	type moment struct {
		what     string
		answered int
		dirs     []string
	}
	var moments []moment
	answered := 0
	var d *imagingDisk
	d = newImaging(func(what string) {
		if answered < 0 {
			return
		}
		moments = append(moments, moment{what, answered, []string{crashed(t, dir), d.powerless(t, dir)}})
	})
	s, err := openWith(dir, Options{Now: m.Now, GroupWait: -1}, d)
	must(t, err)
	for i := range keys * 2 {
		mustCommit(t, s, body(i), put(fmt.Sprint("key-", i%keys), fmt.Sprint(i)), put(fmt.Sprint("passing-", i), ""),
			remove(fmt.Sprint("passing-", i-1)))
		d.mu.Lock()
		answered = i + 1
		d.mu.Unlock()
		if i%2 == 1 {
			must(t, s.drain(t.Context()))
		}
	}
	must(t, s.Close())
	d.mu.Lock()
	answered = -1
	d.mu.Unlock()
	if len(moments) < 25 {
		t.Errorf("only %d moments", len(moments))
	}
	for i, m2 := range moments {
		for j, image := range m2.dirs {
			again, err := openWith(image, Options{Now: m.Now}, osDisk{})
			what := fmt.Sprintf("moment %d (%s, answered %d, power %v)", i, m2.what, m2.answered, j == 1)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			last := -1
			for i := range keys * 2 {
				e, err := again.Get(t.Context(), body(i).Key)
				switch {
				case errors.Is(err, store.ErrNotFound):
				case err != nil || !slices.Equal(e.Value, body(i).Value):
					t.Errorf("%s: body %d: %v", what, i, err)
				default:
					last = i
				}
			}
			if last+1 < m2.answered || last > m2.answered {
				t.Errorf("%s: the last commit is %d", what, last)
			}
			for k := range keys {
				want := -1
				for i := k; i <= last; i += keys {
					want = i
				}
				if want >= 0 {
					wantValue(t, again, fmt.Sprint("key-", k), fmt.Sprint(want))
				}
			}
			var passing []string
			for e, err := range again.Scan(t.Context(), store.Prefix([]byte("passing-"))) {
				must(t, err)
				passing = append(passing, string(e.Key))
			}
			if last >= 0 && !slices.Equal(passing, []string{fmt.Sprint("passing-", last)}) {
				t.Errorf("%s: %q are there", what, passing)
			}
			must(t, again.Close())
			must(t, os.RemoveAll(image))
		}
	}
}

// A loss of power while the log is dropped: tables may name bulk values whose files
// were not synced. Until they are, the log has them.
func TestPowerLossAroundADrop(t *testing.T) {
	m := newManual()
	var images []string
	dir := ""
	var d *imagingDisk
	d = newImaging(func(what string) {
		if dir != "" && strings.HasSuffix(what, "Dir lsm") || what == "flushed" {
			images = append(images, d.powerless(t, dir))
		}
	})
	s, n := rotated(t, d, Options{Now: m.Now})
	small := m.bulk("small", 10_000, time.Hour)
	mustCommit(t, s, small, put("names", "small"))
	must(t, s.drain(t.Context()))
	d.mu.Lock()
	dir = s.dir
	d.mu.Unlock()
	have := s.durable.Load()
	signal(s.applier.flush)
	deadline := time.Now().Add(30 * time.Second)
	for s.inTables() < have || s.seal.log().First <= 1 {
		if s.inTables() >= have {
			d.mu.Lock()
			taken := len(images)
			d.mu.Unlock()
			if taken == 0 {
				d.tell("flushed")
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing was dropped")
		}
		mustCommit(t, s, put("more", "1"))
	}
	d.tell("flushed")
	d.mu.Lock()
	taken := slices.Clone(images)
	dir = ""
	d.mu.Unlock()
	for i, image := range taken {
		again := reopenWith(t, image, Options{Now: m.Now}, osDisk{})
		wantValue(t, again, "names", "small")
		wantValue(t, again, "small", string(small.Value))
		wantValue(t, again, "count", fmt.Sprint(n-1))
		if t.Failed() {
			t.Fatalf("image %d of %d", i, len(taken))
		}
		must(t, again.Close())
	}
}

// Badger's own logs hold nothing that the log or the tables have not. Whatever a crash
// leaves of them, it neither loses anything nor keeps the store from opening.
func TestBadgersLogsDoNotMatter(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	const n = 10
	for i := range n {
		mustCommit(t, s, insert(fmt.Sprint("key-", i), "1"))
	}
	must(t, s.drain(t.Context()))
	mustCommit(t, s, put("last", "1"))
	origin := image(t, s.dir)
	for name, damage := range map[string]func(file string){
		"as they were": func(string) {},
		"missing":      func(file string) { must(t, os.Remove(file)) },
		"empty":        func(file string) { must(t, os.Truncate(file, 0)) },
		"cut":          func(file string) { must(t, os.Truncate(file, 30)) },
		"zeros":        func(file string) { change(t, file, func(b []byte) { clear(b) }) },
		"garbage":      func(file string) { change(t, file, func(b []byte) { copy(b, strings.Repeat("garbage!", 1000)) }) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := image(t, origin)
			for _, pattern := range []string{"*.mem", "*.vlog"} {
				files, err := filepath.Glob(filepath.Join(dir, "lsm", pattern))
				must(t, err)
				if len(files) == 0 {
					t.Fatalf("no %s", pattern)
				}
				for _, file := range files {
					damage(file)
				}
			}
			again := reopenWith(t, dir, Options{}, osDisk{})
			for i := range n {
				wantValue(t, again, fmt.Sprint("key-", i), "1")
			}
			wantValue(t, again, "last", "1")
		})
	}
}

// The last frame is written once more at opening: its sync may have failed, which the
// kernel tells only once.
func TestLastFrameIsConfirmed(t *testing.T) {
	dir, _, _ := crashedWith(t, 3)
	d := &faultyDisk{left: 1 << 40, onCommit: func() error { return errDisk }}
	if _, err := openWith(dir, Options{}, d); !errors.Is(err, errDisk) {
		t.Fatalf("open: %v; want the error of the sync", err)
	}
	wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "last", "2")
}

// A log that ends where a layer is full, and one that is much longer than a layer.
func TestReplayOfManyLayers(t *testing.T) {
	for _, size := range []int{maxLayer / 64, maxLayer/64 - headerSize - 100, 60_000} {
		s, d := newFaulty(t, Options{})
		_, release := holdApplier(t, d)
		value := strings.Repeat("v", min(size, store.MaxValue))
		var batch []store.Write
		for i := range 16 {
			batch = append(batch, put(fmt.Sprintf("%02d", i), value))
		}
		for range 4 {
			mustCommit(t, s, batch...)
		}
		mustCommit(t, s, put("last", "1"))
		dir := crashed(t, s.dir)
		release()
		for range 2 {
			again := reopenWith(t, dir, Options{}, osDisk{})
			wantValue(t, again, "last", "1")
			wantValue(t, again, "15", value)
			dir = crashed(t, dir)
		}
	}
}
