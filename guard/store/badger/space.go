package badger

import (
	"io/fs"
	"path/filepath"
	"strings"
	"time"
)

// Space is where the bytes of a store are, as the file system counts them: what is
// really taken, not the lengths of files. It is measured once a minute.
type Space struct {
	// LSM are the ordinary values, Bodies the bulk values, Log what lies beside
	// them: the state of the store, and logs.
	LSM, Bodies, Log int64
	// Total is all of it.
	Total int64
	// Dead of LSM may be dropped by the next compaction.
	Dead int64
	// Measured is when.
	Measured time.Time
}

// measure looks at all files of the store.
func (s *Store) measure() Space {
	grown := int64(2*s.counters.bytes.Load() + s.counters.bulkBytes.Load())
	now := Space{Measured: s.options.Now()}
	// Files come and go meanwhile; what cannot be looked at takes nothing.
	_ = filepath.WalkDir(s.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return nil
		}
		part, _, _ := strings.Cut(strings.TrimPrefix(path, s.dir+string(filepath.Separator)), string(filepath.Separator))
		switch bytes := allocated(info); part {
		case "lsm":
			now.LSM += bytes
		case "bodies":
			now.Bodies += bytes
		default:
			now.Log += bytes
		}
		return nil
	})
	now.Total = now.LSM + now.Bodies + now.Log
	if stock, err := s.stock(); err == nil {
		now.Dead = stock.dead
	}
	s.space.Store(&now)
	s.size.Store(now.Total)
	s.grown.Store(grown)
	return now
}
