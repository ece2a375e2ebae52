package guard

import (
	"encoding/binary"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The store's keys begin with a letter that says what stands there. Nothing of a
// caller is readable in them: hashes are keyed, and only times are plain.
//
//	m name                        what the store is: layout, key check, node, keys in use
//	x key                         the record of an execution
//	c caller id key               index: a caller's executions by id
//	s state created key           index: executions by state and age
//	w workflow created key        index: a workflow's executions by age
//	r key claim piece             the result of a claim: its head, then full pieces
const (
	spaceMeta     = 'm'
	spaceRecord   = 'x'
	spaceCaller   = 'c'
	spaceState    = 's'
	spaceWorkflow = 'w'
	spaceResult   = 'r'
)

func recordKey(key Key) []byte {
	return append(append(make([]byte, 0, 1+len(key)), spaceRecord), key[:]...)
}

func appendTime(b []byte, t time.Time) []byte {
	return binary.BigEndian.AppendUint64(b, uint64(t.UnixNano()))
}

func stateKey(state State, created time.Time, key Key) []byte {
	b := append(make([]byte, 0, 2+8+len(key)), spaceState, byte(state))
	return append(appendTime(b, created), key[:]...)
}

func (g *Guard) callerKey(r *Record, key Key) []byte {
	id := g.sealer.Index("id", string(r.Caller[:]), r.ID)
	b := append(make([]byte, 0, 1+2*16+len(key)), spaceCaller)
	b = append(append(b, r.Caller[:]...), id[:16]...)
	return append(b, key[:]...)
}

func (g *Guard) workflowKey(r *Record, key Key) []byte {
	workflow := g.sealer.Index("workflow", r.Workflow)
	b := append(make([]byte, 0, 1+16+8+len(key)), spaceWorkflow)
	b = append(b, workflow[:16]...)
	return append(appendTime(b, r.Created), key[:]...)
}

// headPiece is the number of the piece that holds the head and the body's rest.
const headPiece = 0

func pieceKey(key Key, claim [16]byte, piece int) []byte {
	b := append(make([]byte, 0, 1+len(key)+len(claim)+4), spaceResult)
	b = append(append(b, key[:]...), claim[:]...)
	return binary.BigEndian.AppendUint32(b, uint32(piece))
}

// expires is when a record is forgotten: never, unless it is completed.
func (r *Record) expires() time.Time {
	if r.State != StateCompleted {
		return time.Time{}
	}
	return r.Settled.Add(r.KeepKey)
}

// put is the batch that brings the record of key from old to new, index entries
// included. Either may be nil: nothing there before, nothing there after. Whoever
// commits it is in g.writers from before the call until after the commit.
func (g *Guard) put(key Key, old, new *Record, condition store.Condition) []store.Write {
	batch := make([]store.Write, 1, 8)
	name := recordKey(key)
	if new == nil {
		batch[0] = store.Write{Key: name, If: condition, Delete: true}
	} else {
		var plain [1024]byte
		sealed := g.sealer.Seal(make([]byte, 0, 512), new.encode(plain[:0]), name)
		batch[0] = store.Write{Key: name, If: condition, Value: sealed, Expires: new.expires()}
	}
	keep := func(space func(*Record) []byte) {
		var before, after []byte
		if old != nil {
			before = space(old)
		}
		if new != nil {
			after = space(new)
		}
		if before != nil && string(before) != string(after) {
			batch = append(batch, store.Write{Key: before, Delete: true})
		}
		if after != nil && (string(before) != string(after) || !old.expires().Equal(new.expires())) {
			batch = append(batch, store.Write{Key: after, Expires: new.expires()})
		}
	}
	keep(func(r *Record) []byte { return stateKey(r.State, r.Created, key) })
	keep(func(r *Record) []byte { return g.callerKey(r, key) })
	keep(func(r *Record) []byte {
		if r.Workflow == "" {
			return nil
		}
		return g.workflowKey(r, key)
	})
	return batch
}
