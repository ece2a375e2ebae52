package ledger

import (
	"context"
	"encoding/binary"
	"errors"
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

// sign signs the tree that all entries are in, and returns the writes for the head, the entries and the tree.
func (x *extension) sign(l *Log) (_ []store.Write, err error) {
	if x.after.head, err = l.sign(x.after.tree); err != nil {
		return nil, err
	}
	x.batch[0] = store.Write{Key: x.on.headKey(), Value: x.after.head.Note}
	x.batch = append(x.batch, x.links...)
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

// placements put events into the tree in the very commit in which they are recorded.
type placements struct {
	log      *Log
	sequence store.Sequence
	x        extension    // used in commits alone, of which there is one at a time
	group    []*placement // of the commit under way

	mu         sync.Mutex
	new        []placedEvent // in the tree, and Options.Placed has not been called
	announcing chan struct{} // closed when it has been called for all; nil where nobody calls it
}

type placedEvent struct {
	event    *Event
	recorded time.Time
}

// placement is what Assemble gets of an event.
type placement struct {
	event  *hashedEvent
	fields []byte
	links  [][]byte
}

// place makes the write that puts an event into the tree.
func (p *placements) place(e *hashedEvent) store.Write {
	one := &placement{event: e}
	one.fields = e.encodeFields(store.Encoder{B: make([]byte, 0, len(e.Payload)+fixedOverhead)})
	one.links = p.log.linkKeysIn(e.names.workflow, &e.Event, 0)
	size := len(one.fields) + placedOverhead + len(one.links)*linkOverhead
	return store.Write{
		Key: e.names.appendID(make([]byte, 0, idKeySize), spaceID), If: store.Absent(),
		Place: &store.Place{In: &p.sequence, Item: one, Size: size},
	}
}

const (
	// placedOverhead bounds the bytes that an entry takes beside its fields and links, with its share of the tiles and a
	// head.
	placedOverhead = sealedOverhead + 1<<10
	// sealedOverhead bounds the bytes that sealing, keys and location add to an entry.
	sealedOverhead = 1 << 9
	// linkOverhead bounds the bytes of one link.
	linkOverhead = 1 << 7
)

// The largest entry must fit into a value.
const _ = uint(store.MaxValue - maxLeaf - sealedOverhead)

// assemble is the sequence's Assemble. Its writes are conditional on the head, so that of two processes on one log one
// loses, and on nothing standing beyond the end of the tree.
func (p *placements) assemble(places []*store.Place, now time.Time) ([]store.Write, func(store.Version, error), error) {
	l, before, x := p.log, p.log.now.Load(), &p.x
	x.begin(l.logStore, before, now)
	p.group = p.group[:0]
	for _, at := range places {
		one := at.Item.(*placement)
		p.group = append(p.group, one)
		x.encode(one.fields)
		x.add(one.event, one.links)
	}
	after := x.after
	writes, err := x.sign(l)
	if err != nil {
		x.end()
		return nil, nil, err
	}
	writes[0].If = store.VersionIs(before.version)
	writes[entryWrite].If = store.Absent() // anything beyond the end of the tree is forged
	return writes, func(version store.Version, err error) {
		x.end()
		defer clear(p.group)
		if err != nil {
			if errors.Is(err, store.ErrOvertaken) {
				l.overtaken.Store(true)
			}
			return
		}
		after.version = version
		l.now.Store(after)
		if l.options.Placed != nil {
			p.announce(after.recorded)
		}
	}, nil
}

// announce has Options.Placed called for the group that is in the tree.
func (p *placements) announce(recorded time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.group {
		p.new = append(p.new, placedEvent{&one.event.Event, recorded})
	}
	if p.announcing == nil {
		p.announcing = make(chan struct{})
		go p.run()
	}
}

// run calls Options.Placed until nothing is left.
func (p *placements) run() {
	for {
		p.mu.Lock()
		found := p.new
		p.new = nil
		if len(found) == 0 {
			close(p.announcing)
			p.announcing = nil
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
		for i := range found {
			p.log.options.Placed(found[i].event, found[i].recorded)
		}
	}
}

// wait waits until Options.Placed was called for all that is in the tree.
func (p *placements) wait(ctx context.Context) error {
	p.mu.Lock()
	announcing := p.announcing
	p.mu.Unlock()
	if announcing == nil {
		return nil
	}
	select {
	case <-announcing:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
