package badger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// oldStore makes a store of the old form, crashed with n transactions of two entries
// in Badger's log and one entry in a table. It returns a version above all of them.
func oldStore(t *testing.T, n int) (dir string, last uint64) {
	t.Helper()
	at := t.TempDir()
	s := &Store{dir: at, options: Options{}.withDefaults(), disk: osDisk{}, failed: make(chan struct{}), known: newKnown(at)}
	s.seal = &sealer{dir: at, lsm: s.lsm(), disk: s.disk}
	must(t, os.Mkdir(s.lsm(), 0o700))
	open := func() *badgerdb.DB {
		db, err := s.openBadger(true)
		must(t, err)
		return db
	}
	db := open()
	ts := uint64(versionGap)
	commit := func(values map[string][]byte) {
		ts++
		txn := db.NewTransactionAt(ts, true)
		for key, value := range values {
			must(t, txn.Set([]byte(key), value))
		}
		must(t, txn.CommitAt(ts, nil))
	}
	value := func(v string) []byte {
		b := make([]byte, headerSize, headerSize+len(v))
		putHeader(b, time.Time{}, 0)
		putVersion(b, store.Version(ts+1))
		return append(b, v...)
	}
	old := binary.BigEndian.AppendUint32([]byte(markerText), oldFormat)
	commit(map[string][]byte{string(markerKey): old, "kfirst": value("1")})
	must(t, db.Close())
	db = open()
	for i := range n {
		commit(map[string][]byte{fmt.Sprint("kcrash-", i): value("1"), "kother": value(fmt.Sprint(i))})
	}
	s.seal.current.Format = oldFormat
	must(t, s.seal.opened())
	must(t, os.MkdirAll(s.bodiesDir(), 0o700))
	dir = image(t, at)
	must(t, db.Close())
	return dir, ts
}

// A store of the old form keeps everything, and its versions go on.
func TestOldFormIsCarriedOver(t *testing.T) {
	dir, last := oldStore(t, 10)
	for round := range 3 {
		s := reopenWith(t, dir, Options{}, osDisk{})
		wantValue(t, s, "first", "1")
		wantValue(t, s, "crash-9", "1")
		if v := mustCommit(t, s, put("other", "new")); uint64(v) <= last {
			t.Errorf("version %d after %d", v, last)
		}
		if s.seal.current.Format != format {
			t.Errorf("still of form %d", s.seal.current.Format)
		}
		if round == 0 {
			dir = image(t, dir) // a crash
		} else {
			must(t, s.Close())
		}
	}
}

// A crash while it is carried over: it begins anew.
func TestOldFormAfterACrashOnTheWay(t *testing.T) {
	dir, _ := oldStore(t, 10)
	var crashed string
	d := newImaging(func(what string) {
		if what == "syncDir lsm" && crashed == "" {
			crashed = image(t, dir)
		}
	})
	s := reopenWith(t, dir, Options{}, d)
	must(t, s.Close())
	must(t, os.MkdirAll(filepath.Join(crashed, "wal"), 0o700))
	must(t, os.WriteFile(filepath.Join(crashed, "wal", logName(1)), []byte("half"), 0o600))
	s = reopenWith(t, crashed, Options{}, osDisk{})
	wantValue(t, s, "crash-9", "1")
}

// In the old form the newest of Badger's logs may have a torn end after a crash.
// Damage before acknowledged transactions is no torn end (P1, P2).
func TestLogsOfTheOldForm(t *testing.T) {
	const n = 10
	crashed, _ := oldStore(t, n)
	logs, err := filepath.Glob(filepath.Join(crashed, "lsm", "*.mem"))
	must(t, err)
	if len(logs) != 1 {
		t.Fatalf("%d logs, want 1", len(logs))
	}
	content, err := os.ReadFile(logs[0])
	must(t, err)
	end := wholePart(content)
	if got := transactionsIn(content); got != n || end >= len(content) {
		t.Fatalf("%d transactions and an end at %d, want %d and one before %d", got, end, n, len(content))
	}
	damaged := func(t *testing.T, at int) string {
		dir := image(t, crashed)
		flip(t, filepath.Join(dir, "lsm", filepath.Base(logs[0])), at)
		return dir
	}
	t.Run("torn end", func(t *testing.T) {
		again := reopenWith(t, damaged(t, end-1), Options{}, osDisk{})
		wantValue(t, again, fmt.Sprintf("crash-%d", n-2), "1")
		_, err := again.Get(t.Context(), fmt.Appendf(nil, "crash-%d", n-1))
		wantErr(t, "the torn transaction", err, store.ErrNotFound)
	})
	for _, at := range []int{memHeader, memHeader + 5, end / 4, end / 2} {
		t.Run(fmt.Sprintf("flipped at %d of %d", at, end), func(t *testing.T) { refused(t, damaged(t, at)) })
	}
	t.Run("unborn", func(t *testing.T) {
		dir := image(t, crashed)
		for _, name := range []string{"00099.mem", "000099.vlog"} {
			must(t, os.WriteFile(filepath.Join(dir, "lsm", name), nil, 0o600))
		}
		wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "first", "1")
	})
	t.Run("without its marker", func(t *testing.T) {
		dir := image(t, crashed)
		must(t, os.RemoveAll(filepath.Join(dir, "lsm")))
		must(t, os.Mkdir(filepath.Join(dir, "lsm"), 0o700))
		_, err := Open(dir, Options{})
		if !errors.Is(err, ErrCorrupt) {
			t.Errorf("open: %v", err)
		}
	})
}
