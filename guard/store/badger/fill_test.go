package badger

import (
	"crypto/sha256"
	"encoding/binary"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// A fill writes executions as the guard does: a claim of a record and three index
// entries, and a settlement that replaces them, with the answer as a bulk value.
type fill struct {
	records int
	from    int           // the first record's number
	key     time.Duration // how long the keys live; zero is for ever
	result  time.Duration // how long the answers live
	settled bool          // writes only what a settlement leaves
}

const (
	fillValue = 450  // bytes of a sealed record
	fillBulk  = 1024 // bytes of a sealed answer
	fillBatch = 21   // records
)

// name is the execution key of record n, as spread as the guard's are.
func fillName(n int) []byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(n)))
	return sum[:]
}

func fillKey(space byte, middle int, n int) []byte {
	b := append(make([]byte, 0, 1+middle+32), space)
	h := fillName(-n - 1)
	return append(append(b, h[:middle]...), fillName(n)...)
}

func (f fill) into(t testing.TB, s *Store) {
	t.Helper()
	const workers = 48 // so that they share syncs
	next := make(chan int)
	failed := make(chan error, workers)
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for n := range next {
				if err := f.write(t, s, n, min(n+fillBatch, f.from+f.records)); err != nil {
					failed <- err
					for range next { // so that nobody waits
					}
					return
				}
			}
		})
	}
	for n := f.from; n < f.from+f.records; n += fillBatch {
		next <- n
	}
	close(next)
	all.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
}

func (f fill) write(t testing.TB, s *Store, from, to int) error {
	var claims, outcomes []store.Write
	value, answer := make([]byte, fillValue), make([]byte, fillBulk)
	for n := from; n < to; n++ {
		claims = append(claims,
			store.Write{Key: fillKey('x', 0, n), If: store.Absent(), Value: value},
			store.Write{Key: fillKey('s', 9, n)},
			store.Write{Key: fillKey('c', 32, n)},
			store.Write{Key: fillKey('w', 24, n)})
	}
	condition := store.Absent()
	if !f.settled {
		version, err := s.Commit(t.Context(), claims...)
		if err != nil {
			return err
		}
		condition = store.VersionIs(version)
	}
	now := s.options.Now()
	var keyEnd time.Time
	if f.key > 0 {
		keyEnd = now.Add(f.key)
	}
	for n := from; n < to; n++ {
		outcomes = append(outcomes,
			store.Write{Key: fillKey('x', 0, n), If: condition, Value: value, Expires: keyEnd},
			store.Write{Key: fillKey('s', 10, n), Expires: keyEnd},
			store.Write{Key: fillKey('c', 32, n), Expires: keyEnd},
			store.Write{Key: fillKey('w', 24, n), Expires: keyEnd},
			store.Write{Key: fillKey('r', 20, n), Value: answer, Bulk: true, Expires: now.Add(f.result)})
		if !f.settled {
			outcomes = append(outcomes, store.Write{Key: fillKey('s', 9, n), Delete: true})
		}
	}
	_, err := s.Commit(t.Context(), outcomes...)
	return err
}

// blocks is what a directory really takes on disk, as du counts.
func blocks(t testing.TB, dir string) (bytes int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err == nil {
			bytes += allocated(info)
		}
		return err
	})
	must(t, err)
	return bytes
}
