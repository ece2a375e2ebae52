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

// placements put events into the tree in the very commit in which they are recorded.
type placements struct {
	log      *Log
	sequence store.Sequence
	group    []*placement // of the commit under way, of which there is one at a time

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
		Key: e.names.idKey(spaceID), If: store.Absent(),
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

// assemble is the sequence's Assemble: it adds events to the tree, in which all are under one new head. Its writes are
// conditional on the head before, so that of two processes on one log one loses, and on nothing standing beyond the end
// of the tree.
func (p *placements) assemble(places []*store.Place, now time.Time) ([]store.Write, func(store.Version, error), error) {
	l, before := p.log, p.log.now.Load()
	if now = now.Round(0); now.Before(before.recorded) {
		now = before.recorded
	}
	after := &state{tree: before.clone(), recorded: now}
	p.group = p.group[:0]
	writes := make([]store.Write, 1, 1+4*len(places)) // the head, then entries, ids and workflows, links, and tiles
	var links []store.Write
	var tiles []tile
	for _, at := range places {
		one := at.Item.(*placement)
		p.group = append(p.group, one)
		index, leaf := after.size, encodeLeaf(one.fields, after.size, now)
		hash := tlog.RecordHash(leaf)
		tiles = after.add(hash, tiles)
		entry, following := l.entryWrites(one, index, leaf, hash)
		writes, links = append(writes, entry...), append(links, following...)
	}
	var err error
	if after.head, err = l.sign(after.tree); err != nil {
		return nil, nil, err
	}
	writes[0] = store.Write{Key: l.headKey(), Value: after.head.Note, If: store.VersionIs(before.version)}
	writes[1].If = store.Absent() // anything beyond the end of the tree is forged
	writes = append(writes, links...)
	for _, t := range tiles {
		writes = append(writes, store.Write{Key: l.tileKey(t.level, t.n), Value: joinHashes(t.hashes)})
	}
	return writes, func(version store.Version, err error) {
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

// encodeLeaf makes the leaf of an entry from the encoded fields of its event.
func encodeLeaf(fields []byte, index int64, recorded time.Time) []byte {
	to := store.Encoder{B: append(make([]byte, 0, len(fields)+fixedOverhead), encodingVersion)}
	to.Int(tagIndex, index)
	to.Time(tagRecorded, recorded)
	return append(to.B, fields...)
}

// entryWrites are the writes of an entry, and those of the index of links.
func (l *Log) entryWrites(one *placement, index int64, leaf []byte, hash tlog.Hash) (entry, links []store.Write) {
	e, plain := one.event, leaf
	if e.Header == nil {
		plain = pack(nil, leaf, e.Payload)
	}
	key, where := l.entryKey(index), location{log: l.id, index: index, check: checkOf(hash)}
	entry = []store.Write{
		{Key: key, Value: l.sealer.Seal(nil, plain, key), Bulk: true},
		{Key: e.names.idKey(spaceID), Value: where.encode(nil)},
	}
	if e.Workflow != "" {
		entry = append(entry, store.Write{Key: e.names.workflowKey(l.id, index)})
	}
	for _, link := range one.links {
		binary.BigEndian.PutUint64(link[len(link)-indexEnd:], uint64(index))
		links = append(links, store.Write{Key: link})
	}
	return entry, links
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
