package badger

import (
	"bytes"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
)

// absence proves that Badger has nothing under a key, without a look into its tables: what a claim
// asks for, and what was written and deleted again before it was applied, is nearly always absent.
//
// The filter must know every key with one of its prefixes that is in Badger: treating a present key
// as absent would execute its call again (P1). Keys come in two ways. The applier adds
// what it writes, before it writes it. What was there before comes from the tables, each of which
// is read whole around Open (see tables.go). Until all of them are read, nothing is proven.
//
// Deleted keys stay. Once the filter is full a new one is built beside it, and takes its place.
type absence struct {
	prefixes [][]byte // of keys, with the byte in front
	most     int64    // keys after which a filter is replaced

	current atomic.Pointer[filter] // complete; nil while nothing is proven
	next    atomic.Pointer[filter] // being built; nil is none

	mu      sync.Mutex
	off     bool            // nothing is proven any more
	since   uint64          // Badger's timestamp when next was begun: what came before must be in tables
	missing map[uint64]bool // tables whose keys next lacks; nil until they are listed
	read    map[uint64]bool // tables whose keys next has
}

// maxFiltered is how many keys a filter knows before it is replaced. It takes 28 MB then.
const maxFiltered = 22_000_000

// newAbsence begins the first filter: before any table is read and anything is applied.
func newAbsence(prefixes []string, most int64) *absence {
	a := &absence{most: most}
	if most == 0 {
		a.most = maxFiltered
	}
	for _, p := range prefixes {
		a.prefixes = append(a.prefixes, append([]byte{userSpace}, p...))
	}
	a.off = len(prefixes) == 0
	a.begin(0)
	return a
}

// begin begins a filter of what is applied from now on if there is none, or it is full. After
// newAbsence only the applier calls it. ts is Badger's timestamp.
func (a *absence) begin(ts uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.current.Load(); a.off || a.next.Load() != nil || f != nil && f.size() <= a.most {
		return
	}
	a.since, a.missing, a.read = ts, nil, make(map[uint64]bool)
	next := new(filter)
	next.parts.Store(&[]*filterPart{newFilterPart(firstPart)})
	a.next.Store(next)
}

func (a *absence) covers(key []byte) bool {
	for _, p := range a.prefixes {
		if bytes.HasPrefix(key, p) {
			return true
		}
	}
	return false
}

// proves reports that Badger has nothing under key. The caller has looked into the overlay before.
func (a *absence) proves(key []byte) bool {
	f := a.current.Load()
	return f != nil && a.covers(key) && !f.mayHave(maphash.Bytes(seed, key))
}

// add adds a key to filters, of which any may be nil. The applier adds what it is about to write to
// next and then to current: in this order, since next may take the place of current meanwhile.
func (a *absence) add(key []byte, to ...*filter) {
	if !a.covers(key) {
		return
	}
	hash := maphash.Bytes(seed, key)
	for _, f := range to {
		if f != nil {
			f.add(hash)
		}
	}
}

// tableRead notes that all keys of a table were added to a filter, which was next before the first
// of them was read.
func (a *absence) tableRead(id uint64, to *filter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if to != nil && a.next.Load() == to {
		a.read[id] = true
		delete(a.missing, id)
	}
}

// unread lists the tables that are still to be read for the next filter, if one is being built.
// With none left that filter takes its place. listed are Badger's tables, and have all that was
// written up to the timestamp ts.
//
// A table that was missing and is listed no more was merged before it was read: its keys are in
// others. Badger lists the result of a merge before it drops what it has merged.
func (a *absence) unread(listed []uint64, ts uint64) []uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next.Load() == nil || ts < a.since {
		return nil
	}
	merged := a.missing == nil
	for id := range a.missing {
		merged = merged || !slices.Contains(listed, id)
	}
	if merged {
		a.missing = make(map[uint64]bool)
		for _, id := range listed {
			if !a.read[id] {
				a.missing[id] = true
			}
		}
	}
	ids := make([]uint64, 0, len(a.missing))
	for id := range a.missing {
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		a.complete()
	}
	return ids
}

// complete puts the next filter into its place, unless it is more than half full and would soon be
// built again: then nothing is proven until the next opening. The caller holds mu.
func (a *absence) complete() {
	next := a.next.Load()
	a.missing, a.read = nil, nil
	if a.off = next.size() > a.most/2; a.off {
		next = nil
	}
	a.current.Store(next)
	a.next.Store(nil)
}

var seed = maphash.MakeSeed()

// filter is a Bloom filter that grows. Adding and asking may happen at the same time; who asks
// after an add has returned gets its key.
type filter struct {
	growing sync.Mutex
	parts   atomic.Pointer[[]*filterPart]
}

// filterPart has eight words for every 51 keys, and one bit in each of them for every key: about
// ten bits a key, of which one absent key in a hundred finds all set.
type filterPart struct {
	capacity int64
	keys     atomic.Int64
	words    []atomic.Uint64
}

const (
	firstPart  = 1 << 16 // keys; each further part has room for four times as many
	maxParts   = 5       // of a filter; the last one takes what is too much
	blockKeys  = 51
	blockWords = 8
)

func newFilterPart(capacity int64) *filterPart {
	blocks := (capacity + blockKeys - 1) / blockKeys
	return &filterPart{capacity: capacity, words: make([]atomic.Uint64, blocks*blockWords)}
}

func (f *filter) size() (keys int64) {
	for _, p := range *f.parts.Load() {
		keys += p.keys.Load()
	}
	return keys
}

func (f *filter) mayHave(hash uint64) bool {
	for _, p := range *f.parts.Load() {
		if p.mayHave(hash) {
			return true
		}
	}
	return false
}

func (f *filter) add(hash uint64) {
	if f.mayHave(hash) {
		return
	}
	parts := *f.parts.Load()
	last := parts[len(parts)-1]
	words, bits := last.block(hash)
	for i := range words {
		words[i].Or(1 << (bits >> (6 * i) & 63))
	}
	if last.keys.Add(1) < last.capacity || len(parts) == maxParts {
		return
	}
	f.growing.Lock() // all wait for the next part: in a part that is too full nothing is absent
	defer f.growing.Unlock()
	if len(*f.parts.Load()) == len(parts) {
		grown := append(slices.Clone(parts), newFilterPart(4*last.capacity))
		f.parts.Store(&grown)
	}
}

// block returns the words of a key, and where its bits are: six bits of bits for each word.
func (p *filterPart) block(hash uint64) (words []atomic.Uint64, bits uint64) {
	blocks := uint64(len(p.words) / blockWords)
	at := (hash >> 32) * blocks >> 32 * blockWords
	return p.words[at : at+blockWords], hash * 0x9e3779b97f4a7c15 >> 16
}

func (p *filterPart) mayHave(hash uint64) bool {
	words, bits := p.block(hash)
	for i := range words {
		if words[i].Load()&(1<<(bits>>(6*i)&63)) == 0 {
			return false
		}
	}
	return true
}
