package ledger

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// extension makes the writes that add events to a tree.
type extension struct {
	on    *logStore
	after *state
	batch []store.Write // the head, then entries, ids and workflows
	links []store.Write
	tiles []tile

	// Buffers, kept for the next one.
	leaf, packed []byte
	memory       arena
}

// begin begins an extension of a state.
func (x *extension) begin(on *logStore, before *state, now time.Time) {
	if now = now.Round(0); now.Before(before.recorded) {
		now = before.recorded
	}
	x.on, x.after = on, &state{tree: before.clone(), recorded: now}
	x.batch, x.links, x.tiles = append(x.batch[:0], store.Write{}), x.links[:0], nil
	x.memory.b = x.memory.b[:0]
}

// encode makes the leaf of the next entry. fields are those of the event, encoded.
func (x *extension) encode(fields []byte) {
	to := store.Encoder{B: append(x.leaf[:0], encodingVersion)}
	to.Int(tagIndex, x.after.size)
	to.Time(tagRecorded, x.after.recorded)
	x.leaf = append(to.B, fields...)
}

// add adds the entry whose leaf encode has made. links are its keys in the index of links.
func (x *extension) add(e *hashedEvent, links [][]byte) {
	index, hash := x.after.size, tlog.RecordHash(x.leaf)
	x.tiles = x.after.add(hash, x.tiles)
	plain := x.leaf
	if e.Header == nil {
		x.packed = pack(x.packed[:0], x.leaf, e.Payload)
		plain = x.packed
	}
	memory := &x.memory
	key := memory.cut(appendEntryKey(memory.b, x.on.id, index))
	x.batch = append(x.batch, store.Write{Key: key, Value: memory.cut(x.on.sealer.Seal(memory.b, plain, key)), Bulk: true})
	where := location{log: x.on.id, index: index, check: checkOf(hash)}
	id := memory.cut(e.names.appendID(memory.b, spaceID))
	x.batch = append(x.batch, store.Write{Key: id, Value: memory.cut(where.encode(memory.b))})
	if e.Workflow != "" {
		x.batch = append(x.batch, store.Write{Key: memory.cut(e.names.appendWorkflow(memory.b, x.on.id, index))})
	}
	for _, link := range links {
		binary.BigEndian.PutUint64(link[len(link)-indexEnd:], uint64(index))
		x.links = append(x.links, store.Write{Key: link})
	}
}

// entryWrite is where the writes of the first entry stand.
const entryWrite = 1

// sign signs the tree that all entries are in, and returns the writes for them, more, and the tree. The first is that
// of the head: a full store takes only batches that begin with a key which it has.
func (x *extension) sign(l *Log, more ...store.Write) (_ []store.Write, err error) {
	if x.after.head, err = l.sign(x.after.tree); err != nil {
		return nil, err
	}
	x.batch[0] = store.Write{Key: x.on.headKey(), Value: x.after.head.Note}
	x.batch = append(append(x.batch, more...), x.links...)
	for _, t := range x.tiles {
		x.batch = append(x.batch, store.Write{Key: x.on.tileKey(t.level, t.n), Value: joinHashes(t.hashes)})
	}
	return x.batch, nil
}

// end lets go of what nobody needs any more.
func (x *extension) end() {
	clear(x.batch)
	clear(x.links)
	if cap(x.memory.b) > maxKept {
		x.memory = arena{}
	}
}

// maxKept bounds a buffer that is kept for the next extension.
const maxKept = 512 << 10

// placements put events into the tree in the very commit in which they are recorded, where the store is
// store.Sequencing: their payloads and ids are written once, and nothing waits for the sequencer. An event whose
// token the sequencer has to sign goes by the outbox, as do those that follow while anything stands there, so that
// causes stand before their effects.
type placements struct {
	log      *Log
	sequence store.Sequence
	x        extension    // used in commits alone, of which there is one at a time
	group    []*placement // of the commit under way

	mu  sync.Mutex
	new []placedEvent // in the tree, and Options.Placed has not been called
}

type placedEvent struct {
	event    *Event
	index    int64
	recorded time.Time
}

// placement is what Assemble gets of an event.
type placement struct {
	event  *hashedEvent
	ticket uint64
	fields []byte
	links  [][]byte
	index  int64
	placed bool // in the tree; else it waits, under its ticket
}

// place makes the write that puts an event into the tree.
func (p *placements) place(e *hashedEvent, number uint64) (store.Write, *placement) {
	one := &placement{event: e, ticket: number}
	one.fields = e.encodeFields(store.Encoder{B: make([]byte, 0, len(e.Payload)+fixedOverhead)})
	one.links = p.log.linkKeysIn(e.names.workflow, &e.Event, 0)
	size := len(one.fields) + placedOverhead + len(one.links)*linkOverhead
	return store.Write{
		Key: e.names.appendID(make([]byte, 0, idKeySize), spaceID), If: store.Absent(),
		Place: &store.Place{In: &p.sequence, Item: one, Size: size},
	}, one
}

// placedOverhead bounds the bytes that an entry takes beside its fields and links, with its share of the tiles and a
// head.
const placedOverhead = sealedOverhead + 1<<10

// assemble is the sequence's Assemble. Where the head is not the one that is known here, since the sequencer has
// moved it this moment, or if it cannot be signed, the events go to the outbox.
func (p *placements) assemble(places []*store.Place, now time.Time, current func(key []byte) (store.Version, error)) ([]store.Write, func(store.Version, error)) {
	l, before := p.log, p.log.now.Load()
	version, err := current(l.headKey())
	beyond := store.Version(0)
	if err == nil {
		beyond, err = current(l.entryKey(before.size)) // anything beyond the end of the tree is forged
	}
	if err != nil || version != before.version || beyond != 0 {
		return p.outbox(places), nil
	}
	x := &p.x
	x.begin(l.logStore, before, now)
	p.group = p.group[:0]
	for _, at := range places {
		one := at.Item.(*placement)
		p.group = append(p.group, one)
		one.index = x.after.size
		x.encode(one.fields)
		x.add(one.event, one.links)
	}
	after := x.after
	writes, err := x.sign(l)
	if err != nil {
		x.end()
		return p.outbox(places), nil
	}
	return writes, func(version store.Version, err error) {
		x.end()
		defer clear(p.group)
		if err != nil {
			return
		}
		after.version = version
		l.now.Store(after)
		if l.options.Placed != nil {
			p.mu.Lock()
			defer p.mu.Unlock()
		}
		for _, one := range p.group {
			if one.placed = true; l.options.Placed != nil {
				p.new = append(p.new, placedEvent{&one.event.Event, one.index, after.recorded})
			}
		}
	}
}

// outbox are the writes by which events wait for the sequencer.
func (p *placements) outbox(places []*store.Place) []store.Write {
	writes := make([]store.Write, 0, 2*len(places))
	for _, at := range places {
		one := at.Item.(*placement)
		l, t := p.log, ticket{one.ticket, p.log.boot}
		plain := append([]byte{encodingVersion}, one.fields...)
		if one.event.Header == nil {
			plain = pack(nil, plain, one.event.Payload)
		}
		key := l.outboxKey(nil, t)
		where := location{log: l.id, waiting: true, ticket: t}
		writes = append(writes,
			store.Write{Key: one.event.names.appendID(nil, spaceID), Value: where.encode(nil)},
			store.Write{Key: key, Value: l.sealer.Seal(nil, plain, key)})
	}
	return writes
}

// announce calls Options.Placed for what is in the tree before an index.
func (p *placements) announce(before int64) {
	if p.log.options.Placed == nil {
		return
	}
	p.mu.Lock()
	n := 0
	for n < len(p.new) && p.new[n].index < before {
		n++
	}
	found := slices.Clone(p.new[:n])
	p.new = slices.Delete(p.new, 0, n)
	p.mu.Unlock()
	for i := range found {
		p.log.options.Placed(found[i].event, found[i].recorded)
	}
}
