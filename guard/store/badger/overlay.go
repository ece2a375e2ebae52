package badger

import (
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// maxLayer is the size in bytes at which a layer goes to Badger at once, and beyond
// which commits wait for the applier.
const maxLayer = 4 << 20

// maxAbsent bounds the keys that are known not to stand.
const maxAbsent = 16 << 10

// overlay is what is in the log and not yet in Badger. Reads look here first.
type overlay struct {
	mu      sync.RWMutex
	active  *layer // the committer adds to it
	frozen  *layer // the applier is bringing it to Badger; nil is none
	spare   *layer
	durable uint64 // the timestamp at which Badger has all that came before
	// absent are keys that Badger has not at durable. Who claims a key has looked
	// for it just before.
	absent  map[string]struct{}
	applied uint64        // the last frame that Badger has
	changed chan struct{} // closed when a layer begins or ends its way to Badger

	some chan struct{} // there is something to apply
	full chan struct{} // and enough of it
}

// layer is the last state of every key that a stretch of frames changed.
type layer struct {
	values  map[string][]byte // by key as in Badger; nil is deleted
	size    int
	seq     uint64        // the last frame
	version store.Version // the highest
}

func newLayer() *layer { return &layer{values: make(map[string][]byte)} }

func (l *layer) put(key string, value []byte) {
	l.values[key] = value
	l.size += len(key) + len(value) + entryOverhead
}

func newOverlay(ts, seq uint64) *overlay {
	return &overlay{
		active: newLayer(), durable: ts, applied: seq, absent: make(map[string]struct{}),
		changed: make(chan struct{}), some: make(chan struct{}, 1), full: make(chan struct{}, 1),
	}
}

// get returns what the overlay has under key; where ok is false, what Badger has at
// ts stands. Both belong to one moment, so that no read goes back in time.
func (o *overlay) get(key []byte) (value []byte, ok bool, ts uint64) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if value, ok = o.active.values[string(key)]; ok {
		return value, true, 0
	}
	if o.frozen != nil {
		if value, ok = o.frozen.values[string(key)]; ok {
			return value, true, 0
		}
	}
	_, ok = o.absent[string(key)]
	return nil, ok, o.durable
}

// lacks notes that Badger has nothing under key at ts.
func (o *overlay) lacks(key []byte, ts uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.durable == ts && len(o.absent) < maxAbsent {
		o.absent[string(key)] = struct{}{}
	}
}

// publish adds the changes of a frame.
func (o *overlay) publish(changes map[string][]byte, seq uint64, version store.Version) {
	o.mu.Lock()
	l := o.active
	first := len(l.values) == 0
	for key, value := range changes {
		l.put(key, value)
	}
	l.seq, l.version = seq, version
	full := l.size >= maxLayer
	o.mu.Unlock()
	if first {
		signal(o.some)
	}
	if full {
		signal(o.full)
	}
}

// freeze takes the active layer, or nil where it is empty.
func (o *overlay) freeze() *layer {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.active.values) == 0 {
		return nil
	}
	o.frozen = o.active
	o.active, o.spare = o.spare, nil
	if o.active == nil {
		o.active = newLayer()
	}
	o.tell()
	return o.frozen
}

// landed drops the frozen layer, all of which Badger has at ts.
func (o *overlay) landed(ts uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	l := o.frozen
	o.frozen, o.durable, o.applied = nil, ts, l.seq
	clear(o.absent)
	if l.size <= 2*maxLayer { // else its map has grown beyond what is usual
		clear(l.values)
		*l = layer{values: l.values}
		o.spare = l
	}
	o.tell()
}

// tell is called with mu held.
func (o *overlay) tell() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// crowded returns what to wait for before more is added; nil is nothing.
func (o *overlay) crowded() <-chan struct{} {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.active.size < maxLayer {
		return nil
	}
	return o.changed
}

// behind returns what to wait for until Badger has frame seq, and the newest frame;
// nil is nothing.
func (o *overlay) behind(seq uint64) <-chan struct{} {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.applied >= seq {
		return nil
	}
	return o.changed
}

// newest is the last frame that can be read.
func (o *overlay) newest() uint64 {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return max(o.active.seq, o.applied, o.frozenSeq())
}

func (o *overlay) frozenSeq() uint64 {
	if o.frozen == nil {
		return 0
	}
	return o.frozen.seq
}
