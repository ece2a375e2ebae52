package badger

import "fmt"

// Small bulk values come to their files after the commit that carried them. The log has
// them too, until the files are synced: see keeper.

// stage writes values and fills in their pointers. They are durable after settle.
func (b *bodies) stage(values []*bulkValue, syncs func()) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	written, err := b.writeAll(values)
	if err == nil && len(b.unsettled()) > maxHandles/2 {
		err = b.sync(b.unsettled(), syncs)
	}
	b.unpin(written)
	return err
}

// settle makes durable what was staged.
func (b *bodies) settle(syncs func()) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	return b.sync(b.unsettled(), syncs)
}

// unsynced says that what was read from a segment may be nowhere but in memory.
func (b *bodies) unsynced(segment int64) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	h, err := b.forAppend(segment)
	if err != nil {
		return err
	}
	b.mu.Lock()
	h.dirty = true
	b.mu.Unlock()
	b.unpin([]*handle{h})
	return nil
}

func (b *bodies) unsettled() (dirty []*handle) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range b.handles {
		if h.dirty {
			dirty = append(dirty, h)
		}
	}
	return dirty
}

// sync is called with writing held.
func (b *bodies) sync(files []*handle, syncs func()) error {
	for _, h := range files {
		syncs()
		if err := b.disk.sync(h.f); err != nil {
			return syncError{fmt.Errorf("syncing bulk values: %w", err)}
		}
		b.mu.Lock()
		h.dirty = false
		b.mu.Unlock()
	}
	if b.created {
		if err := b.disk.syncDir(b.dir); err != nil {
			return syncError{fmt.Errorf("syncing the directory of bulk values: %w", err)}
		}
		b.created = false
	}
	return nil
}
