package badger

import (
	"fmt"
	"time"
)

const (
	keepEvery = time.Second
	// maxLog is the size in bytes of the full files at which Badger's memory is
	// pressed into a table, so that they can go.
	maxLog = 96 << 20
)

// keeper makes the files of the log and drops them when everything in them is durable
// elsewhere: in Badger's tables, which it syncs before it lists them, and in the files
// of bulk values. Badger moves its memory to tables in the order of its coming, and a
// transaction as a whole, so a table with a timestamp shows that all below is in tables.
type keeper struct {
	*Store
	flush   chan struct{}
	pressed uint64 // the timestamp up to which Badger's memory was pressed out
}

func (k *keeper) run(stop <-chan struct{}) {
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-k.log.need:
			k.log.prepare()
		case <-tick.C:
			if k.unhealthy() != nil {
				continue
			}
			if err := k.keep(); err != nil {
				k.fail(err)
			}
		}
	}
}

// keep drops what can be dropped. An error means that the disk is no longer to be
// trusted.
func (k *keeper) keep() error {
	if err := k.log.rest(); err != nil {
		k.options.Logger.Warn("giving back files of the log", "dir", k.dir, "error", err)
	}
	size, applied := k.log.waiting()
	if applied == 0 {
		return nil
	}
	n := k.log.done(k.inTables())
	if n == 0 {
		if size > maxLog && applied > k.pressed {
			k.pressed = k.durable.Load()
			signal(k.flush)
		}
		return nil
	}
	if err := k.settle(); err != nil {
		return err
	}
	if err := k.log.drop(n); err != nil {
		k.options.Logger.Warn("dropping files of the log", "dir", k.dir, "error", err)
	}
	return nil
}

// settle makes durable what tables do not cover: bulk values, and the tables' names.
func (s *Store) settle() error {
	if err := s.bodies.settle(s.countBulkSync); err != nil {
		return err
	}
	if err := s.disk.syncDir(s.lsm()); err != nil {
		return fmt.Errorf("syncing the directory of tables: %w", err)
	}
	return nil
}

// inTables is the highest timestamp in Badger's tables.
func (s *Store) inTables() (ts uint64) {
	for _, t := range s.db.Tables() {
		ts = max(ts, t.MaxVersion)
	}
	return ts
}
