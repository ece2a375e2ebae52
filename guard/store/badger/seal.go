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
)

// seal is the content of the file STORE. Badger takes a missing manifest for a new
// database, cuts a torn one short without a word, and then deletes the tables that
// it does not name. The seal remembers enough of the manifest to tell a crash, after
// which a torn end is normal, from a loss.
type seal struct {
	Format int `json:"format"`
	// State is one of the states below.
	State string `json:"state"`
	// ManifestSize in bytes; the manifest never becomes shorter than it was seen,
	// unless Badger has written it anew.
	ManifestSize int64 `json:"manifest_size"`
	// ManifestHead is the SHA-256 of the first change set. It differs after Badger
	// has written the manifest anew.
	ManifestHead string `json:"manifest_head"`
	// Manifest is the SHA-256 of the whole, where State is closed.
	Manifest string `json:"manifest,omitempty"`
	// Log says which files of the log there are.
	Log logRange `json:"log"`
}

const (
	stateCreating = "creating" // Open has not returned yet: nothing to lose
	stateOpen     = "open"     // or crashed
	stateClosed   = "closed"   // in order
)

type sealer struct {
	dir  string // of the store
	lsm  string
	disk disk

	mu      sync.Mutex
	current seal
}

func (s *sealer) file() string { return filepath.Join(s.dir, "STORE") }

// load reads the seal; found is false where there is none.
func (s *sealer) load() (found bool, err error) {
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
	case s.current.Format != format && s.current.Format != oldFormat:
		return false, fmt.Errorf("badger: %s was written in form %d by another version of this program; this one reads form %d",
			s.dir, s.current.Format, format)
	case s.current.State != stateCreating && s.current.State != stateOpen && s.current.State != stateClosed:
		return false, corrupt(s.dir, "STORE has the unknown state %q", s.current.State)
	}
	return true, nil
}

// creating marks a new store, whose contents a crash makes worthless.
func (s *sealer) creating() error {
	return s.update(func(now *seal) error {
		*now = seal{Format: format, State: stateCreating, Log: logRange{First: 1}}
		return nil
	})
}

// opened marks a store that is in use.
func (s *sealer) opened() error {
	return s.update(func(now *seal) error { return s.take(now, stateOpen) })
}

// closed marks a store that was closed in order, with the log that it leaves.
func (s *sealer) closed(log logRange) error {
	return s.update(func(now *seal) error {
		now.Format, now.Log = format, log
		return s.take(now, stateClosed)
	})
}

// logged remembers the files of the log.
func (s *sealer) logged(log logRange) error {
	return s.update(func(now *seal) error {
		now.Log = log
		return nil
	})
}

// log is what the seal knows of the log.
func (s *sealer) log() logRange {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current.Log
}

// grown remembers a manifest that has changed since.
func (s *sealer) grown() error {
	info, err := os.Stat(s.manifest())
	if err != nil {
		return err
	}
	s.mu.Lock()
	same := info.Size() == s.current.ManifestSize
	s.mu.Unlock()
	if same {
		return nil
	}
	return s.opened()
}

func (s *sealer) manifest() string { return filepath.Join(s.lsm, badgerdb.ManifestFilename) }

// take notes what the manifest is now.
func (s *sealer) take(now *seal, state string) error {
	manifest, err := os.ReadFile(s.manifest())
	if err != nil {
		return err
	}
	now.State, now.ManifestSize, now.ManifestHead, now.Manifest = state, int64(len(manifest)), sum(head(manifest)), ""
	if state == stateClosed {
		now.Manifest = sum(manifest)
	}
	return nil
}

// update writes the seal as change makes it of the present one.
func (s *sealer) update(change func(now *seal) error) error {
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

func (s *sealer) replace(next string, content []byte) error {
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

// check compares the manifest with the seal and returns the tables that it names.
func (s *sealer) check() ([]uint64, error) {
	content, err := os.ReadFile(s.manifest())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, corrupt(s.dir, "lsm/MANIFEST is missing")
	}
	if err != nil {
		return nil, err
	}
	sealed := s.current
	first := head(content)
	switch {
	case first == nil:
		return nil, corrupt(s.dir, "lsm/MANIFEST is cut or garbled")
	case sealed.State == stateClosed && sum(content) != sealed.Manifest:
		return nil, corrupt(s.dir, "lsm/MANIFEST is not as it was when the store was closed")
	case sealed.State == stateOpen && sum(first) == sealed.ManifestHead && int64(len(content)) < sealed.ManifestSize:
		return nil, corrupt(s.dir, "lsm/MANIFEST is cut: %d bytes, it had %d", len(content), sealed.ManifestSize)
	}
	f, err := os.Open(s.manifest())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	manifest, _, err := badgerdb.ReplayManifestFile(f, 0, badgerdb.Options{})
	if err != nil {
		return nil, corrupt(s.dir, "lsm/MANIFEST: %w", err)
	}
	ids := make([]uint64, 0, len(manifest.Tables))
	for id := range manifest.Tables {
		ids = append(ids, id)
	}
	return ids, nil
}

// head is the magic and the first change set: 8 bytes, 4 bytes length, 4 bytes
// checksum, changes. It is nil where they are not whole.
func head(manifest []byte) []byte {
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
