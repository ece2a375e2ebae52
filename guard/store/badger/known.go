package badger

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4/table"
)

// known is what was found out about Badger's tables: that their checksums were right,
// when, and what is in them. A table is written once, so a file that the system says
// is the same and unchanged need not be read to be known. After an orderly close it
// is kept in the file TABLES. Losing that file costs time and nothing else.
type known struct {
	file string

	mu    sync.Mutex
	facts map[uint64]fact
}

// fact is what is known of one table.
type fact struct {
	ID      uint64    `json:"id"`
	Mark    fileMark  `json:"file"`
	Checked time.Time `json:"checked"`
	Census  census    `json:"census"`
}

// fileMark tells a file from another one, and from itself with another content as far
// as that came by way of the file system: nobody can set Changed back.
type fileMark struct {
	Size     int64  `json:"size"`
	Modified int64  `json:"modified"`
	Changed  int64  `json:"changed"`
	Inode    uint64 `json:"inode"`
	Device   uint64 `json:"device"`
}

func newKnown(dir string) *known {
	return &known{file: filepath.Join(dir, "TABLES"), facts: make(map[uint64]fact)}
}

// load reads what an orderly close has left. What cannot be read is not known.
func (k *known) load() {
	var facts []fact
	b, err := os.ReadFile(k.file)
	if err != nil || json.Unmarshal(b, &facts) != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range facts {
		k.facts[f.ID] = f
	}
}

// save writes what is known for the next opening. It need not be durable: what a
// crash leaves of it is either this or names other files.
func (k *known) save() error {
	k.mu.Lock()
	facts := make([]fact, 0, len(k.facts))
	for _, f := range k.facts {
		facts = append(facts, f)
	}
	k.mu.Unlock()
	slices.SortFunc(facts, func(a, b fact) int { return cmp.Compare(a.ID, b.ID) })
	b, err := json.Marshal(facts)
	if err != nil {
		return err
	}
	next := k.file + ".new"
	if err := os.WriteFile(next, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, k.file)
}

func (k *known) get(id uint64) (fact, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f, ok := k.facts[id]
	return f, ok
}

// keep forgets all tables but these.
func (k *known) keep(ids []uint64) {
	living := make(map[uint64]bool, len(ids))
	for _, id := range ids {
		living[id] = true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for id := range k.facts {
		if !living[id] {
			delete(k.facts, id)
		}
	}
}

// same reports whether f is the file that is known as id.
func (k *known) same(id uint64, f *os.File) bool {
	known, ok := k.get(id)
	if !ok {
		return false
	}
	mark, ok := markOf(f)
	return ok && mark == known.Mark
}

// check reads a table and remembers what it found.
func (k *known) check(id uint64, f *os.File) error {
	mark, _ := markOf(f) // before it is read
	c, err := inspectTable(f)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.facts[id] = fact{ID: id, Mark: mark, Checked: time.Now(), Census: c}
	return nil
}

// checkIn checks a table in dir.
func (k *known) checkIn(dir string, id uint64) error {
	f, err := os.Open(table.NewFilename(id, dir))
	if err != nil {
		return err
	}
	defer f.Close()
	return k.check(id, f)
}
