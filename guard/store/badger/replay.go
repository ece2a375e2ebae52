package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// recovery is what the log of the opening before holds.
type recovery struct {
	logRange
	seq     uint64        // of the last frame
	version store.Version // the highest

	// Where the last frame lies.
	file uint64
	at   int64
	size int
}

// survey reads the whole log and changes nothing. Every frame but the last was synced
// before the next one was written, so anything but a torn end is damage (P1, P2).
func survey(dir string, r logRange) (recovery, error) {
	found := recovery{logRange: r, seq: r.Settled}
	for n := r.First; n <= r.Last; n++ {
		name := filepath.Join(filepath.Base(dir), logName(n))
		content, seed, err := readLog(dir, n)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return found, fmt.Errorf("%s is missing", name)
		case err != nil:
			return found, fmt.Errorf("%s: %w", name, err)
		}
		_, err = framesIn(content, seed, func(at int, f frame) error {
			if f.seq != found.seq+1 {
				return fmt.Errorf("frame %d follows frame %d", f.seq, found.seq)
			}
			found.seq, found.version = f.seq, max(found.version, f.version)
			found.file, found.at, found.size = n, int64(at), f.size
			return f.each(func(_, _ []byte) {})
		})
		if err != nil {
			return found, fmt.Errorf("%s: %w", name, err)
		}
	}
	return found, nil
}

// confirm makes the last frame durable: whoever wrote it may not have come to its
// sync, or the sync may have failed, and a file whose sync has failed tells nobody a
// second time. So the frame is written anew.
func (r *recovery) confirm(dir string, d disk) error {
	if r.size == 0 {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(dir, logName(r.file)), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, r.size)
	if _, err := f.ReadAt(b, r.at); err != nil {
		return err
	}
	return d.record(f, b, r.at)
}

// replay brings Badger to the end of the log. All that Badger has is in its tables,
// and what they have is all up to the marker m, since it is brought there in order.
// Bulk values of that stretch may still be missing: their files are not synced with
// the tables. It reports whether there was anything to do.
func (r *recovery) replay(dir string, a *applier, m marker) (changed bool, err error) {
	l := newLayer()
	flush := func() error {
		changed = true
		err := a.apply(l)
		l = newLayer()
		return err
	}
	for n := r.First; n <= r.Last; n++ {
		content, seed, err := readLog(dir, n)
		if err != nil {
			return changed, err
		}
		_, err = framesIn(content, seed, func(_ int, f frame) error {
			var failure error
			err := f.each(func(key, value []byte) {
				wanted := f.seq > m.seq
				if !wanted && failure == nil {
					wanted, failure = a.lacks(key, value)
				}
				if wanted {
					l.put(string(key), value)
				}
			})
			l.seq, l.version = f.seq, f.version
			if err = errors.Join(err, failure); err == nil && l.size >= maxLayer {
				err = flush()
			}
			return err
		})
		if err != nil {
			return changed, err
		}
	}
	if len(l.values) > 0 || l.seq > m.seq {
		err = flush()
	}
	return changed, err
}

// lacks reports whether value is a bulk value that Badger names and that its file does
// not have.
func (a *applier) lacks(key, value []byte) (bool, error) {
	if value == nil || value[0]&flagInline == 0 {
		return false, nil
	}
	txn := a.db.NewTransactionAt(a.ts, false)
	defer txn.Discard()
	raw, err := lookUp(txn, key)
	if err != nil || raw == nil {
		return false, err
	}
	there, err := decode(raw)
	if err != nil {
		return false, err
	}
	logged, err := decode(value)
	if err != nil || there.version != logged.version {
		return false, err // overwritten since
	}
	at := readPointer(there.value)
	_, err = a.bodies.read(at, key[1:])
	if errors.Is(err, store.ErrDamaged) {
		return true, nil
	}
	if err == nil {
		err = a.bodies.unsynced(at.segment)
	}
	return false, err
}

// recover brings Badger and the files of bulk values to the end of the log, durably,
// so that the log can begin anew.
func (s *Store) recover(found *recovery) error {
	m, err := s.marked(found)
	if err != nil {
		return err
	}
	if err := found.confirm(s.walDir(), s.disk); err != nil {
		return fmt.Errorf("badger: log: %w", err)
	}
	changed, err := found.replay(s.walDir(), s.applier, m)
	if err != nil {
		return fmt.Errorf("badger: replaying the log: %w", err)
	}
	if changed {
		// Badger's memory goes to tables when it is closed.
		err := s.closeBadger()
		s.db = nil
		if err == nil {
			err = s.Err()
		}
		if err != nil {
			return fmt.Errorf("badger: replaying the log: %w", err)
		}
		db, err := s.openBadger(false)
		if err != nil {
			return s.explain(err)
		}
		s.db, s.applier.ts = db, db.MaxVersion()
		if m, err = s.marked(found); err == nil && m.seq != found.seq {
			err = fmt.Errorf("badger: replaying the log: the tables end with frame %d, the log with %d", m.seq, found.seq)
		}
		if err != nil {
			return err
		}
	}
	return s.settle()
}

// marked returns Badger's marker, which must agree with the seal and the log.
func (s *Store) marked(found *recovery) (marker, error) {
	m, there, err := readMarker(s.db)
	switch {
	case err != nil:
		return m, corrupt(s.dir, "%w", err)
	case !there && found.Settled > 0:
		return m, corrupt(s.dir, "entries are lost, the marker among them")
	case m.seq < found.Settled:
		return m, corrupt(s.dir, "entries are lost: the tables end with frame %d, the log begins behind %d", m.seq, found.Settled)
	case m.seq > found.seq:
		return m, corrupt(s.dir, "the log is cut: it ends with frame %d, the tables have %d", found.seq, m.seq)
	}
	return m, nil
}
