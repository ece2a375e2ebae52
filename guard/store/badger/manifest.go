package badger

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store/badger/wal"
)

// manifest is the content of the file STORE. Badger takes a missing manifest of its own for
// a new database, silently truncates a torn one, and then deletes the tables that it does
// not list. So ours records enough of Badger's to distinguish a crash, after which a torn
// end is normal, from a loss.
type manifest struct {
	Format int `json:"format"`
	// State is one of the states below.
	State string `json:"state"`
	// ManifestSize is the size of Badger's manifest in bytes. It never shrinks unless
	// Badger rewrites it.
	ManifestSize int64 `json:"manifest_size"`
	// ManifestHead is the SHA-256 of its first change set, which differs after a rewrite.
	ManifestHead string `json:"manifest_head"`
	// Manifest is the SHA-256 of the whole, where State is closed.
	Manifest string `json:"manifest,omitempty"`
	// Log is the range of log files.
	Log wal.Range `json:"log"`
}

const (
	stateCreating = "creating" // Open has not returned yet: nothing to lose
	stateOpen     = "open"     // or crashed
	stateClosed   = "closed"   // in order
)

type manifestFile struct {
	dir  string // of the store
	lsm  string
	disk disk

	mu      sync.Mutex
	current manifest
}

func (s *manifestFile) file() string { return filepath.Join(s.dir, "STORE") }

// load reads the manifest; found is false if there is none.
func (s *manifestFile) load() (found bool, err error) {
	b, err := os.ReadFile(s.file())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(b, &s.current); err != nil {
		return false, corrupt(s.dir, "STORE cannot be read: %w", err)
	}
	switch {
	case s.current.Format != format:
		return false, fmt.Errorf("badger: %s was written in form %d by another version of this program; this one reads form %d",
			s.dir, s.current.Format, format)
	case s.current.State != stateCreating && s.current.State != stateOpen && s.current.State != stateClosed:
		return false, corrupt(s.dir, "STORE has the unknown state %q", s.current.State)
	}
	return true, nil
}

// markCreating marks a new store: if it stays so, a crash ended its creation.
func (s *manifestFile) markCreating() error {
	return s.update(func(now *manifest) error {
		*now = manifest{Format: format, State: stateCreating, Log: wal.Range{First: 1}}
		return nil
	})
}

// markOpen marks a store that is in use.
func (s *manifestFile) markOpen() error {
	return s.update(func(now *manifest) error { return s.readBadger(now, stateOpen) })
}

// markClosed marks a store that was closed in order, with the log that it leaves.
func (s *manifestFile) markClosed(log wal.Range) error {
	return s.update(func(now *manifest) error {
		now.Log = log
		return s.readBadger(now, stateClosed)
	})
}

// setLog records the files of the log.
func (s *manifestFile) setLog(log wal.Range) error {
	return s.update(func(now *manifest) error {
		now.Log = log
		return nil
	})
}

// refresh records Badger's manifest again if it has changed.
func (s *manifestFile) refresh() error {
	info, err := os.Stat(s.badgerManifest())
	if err != nil {
		return err
	}
	s.mu.Lock()
	same := info.Size() == s.current.ManifestSize
	s.mu.Unlock()
	if same {
		return nil
	}
	return s.markOpen()
}

func (s *manifestFile) badgerManifest() string {
	return filepath.Join(s.lsm, badgerdb.ManifestFilename)
}

// readBadger records Badger's manifest in now.
func (s *manifestFile) readBadger(now *manifest, state string) error {
	manifest, err := os.ReadFile(s.badgerManifest())
	if err != nil {
		return err
	}
	now.Format = format
	now.State, now.ManifestSize, now.ManifestHead, now.Manifest = state, int64(len(manifest)), sum(firstChangeSet(manifest)), ""
	if state == stateClosed {
		now.Manifest = sum(manifest)
	}
	return nil
}

// update writes the manifest that change makes of the present one.
func (s *manifestFile) update(change func(now *manifest) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.current
	if err := change(&now); err != nil {
		return err
	}
	b, err := json.Marshal(now)
	if err != nil {
		return err
	}
	next := s.file() + ".new"
	if err := s.replace(next, append(b, '\n')); err != nil {
		return fmt.Errorf("writing %s: %w", s.file(), err)
	}
	s.current = now
	return nil
}

func (s *manifestFile) replace(next string, content []byte) error {
	f, err := os.OpenFile(next, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	if err := os.Rename(next, s.file()); err != nil {
		return err
	}
	return s.disk.syncDir(s.dir)
}

// check compares Badger's manifest with what was recorded and returns the tables that it lists.
func (s *manifestFile) check() (map[uint64]badgerdb.TableManifest, error) {
	content, err := os.ReadFile(s.badgerManifest())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, corrupt(s.dir, "lsm/MANIFEST is missing")
	}
	if err != nil {
		return nil, err
	}
	recorded := s.current
	first := firstChangeSet(content)
	switch {
	case first == nil:
		return nil, corrupt(s.dir, "lsm/MANIFEST is cut or garbled")
	case recorded.State == stateClosed && sum(content) != recorded.Manifest:
		return nil, corrupt(s.dir, "lsm/MANIFEST is not as it was when the store was closed")
	case recorded.State == stateOpen && sum(first) == recorded.ManifestHead && int64(len(content)) < recorded.ManifestSize:
		return nil, corrupt(s.dir, "lsm/MANIFEST is cut: %d bytes, it had %d", len(content), recorded.ManifestSize)
	}
	tables, err := s.listed()
	if err != nil {
		return nil, corrupt(s.dir, "lsm/MANIFEST: %w", err)
	}
	return tables, nil
}

// listed are the tables in Badger's manifest.
func (s *manifestFile) listed() (map[uint64]badgerdb.TableManifest, error) {
	f, err := os.Open(s.badgerManifest())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	manifest, _, err := badgerdb.ReplayManifestFile(f, 0, badgerdb.Options{})
	return manifest.Tables, err
}

// firstChangeSet is the beginning of Badger's manifest: 8 bytes of magic and version, 4
// bytes length, 4 bytes checksum, changes. It is nil if it is not whole.
func firstChangeSet(manifest []byte) []byte {
	if len(manifest) < 16 || !bytes.HasPrefix(manifest, []byte("Bdgr")) {
		return nil
	}
	end := 16 + uint64(binary.BigEndian.Uint32(manifest[8:]))
	if end > uint64(len(manifest)) {
		return nil
	}
	return manifest[:end]
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}
