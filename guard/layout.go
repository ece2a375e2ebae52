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
//	s state created key           index: executions by state and age
//	c caller id key               index: a caller's settled executions by id; the value
//	                              is an account of them
//	w workflow created key        index: a workflow's settled executions by age
//	r key claim piece             the result of a claim: its head, then full pieces
//	o key at                      what an operator has resolved, sealed
//	l ...                         the ledger's (package ect/ledger)
//	b name                        the state of a circuit breaker, sealed (package caddymodule)
//	j ... p ...                   tokens that were used, and checkpoints of executions
//	                              (package caddymodule/evidence)
//	h ...                         escalations (package guard/hitl)
//	k ...                         checkpoints: snapshots, results, marks (package guard/checkpoint)
//	u ...                         rollbacks: their journal (package guard/rollback)
//
// What still runs is found by state only: it is little, and the two other entries
// would be written for nothing where the call ends a moment later.
const (
	spaceMeta     = 'm'
	spaceRecord   = 'x'
	spaceCaller   = 'c'
	spaceState    = 's'
	spaceWorkflow = 'w'
	spaceResult   = 'r'
	spaceResolved = 'o'
)

const keySize = len(Key{})

func recordKey(key Key) []byte {
	return append(append(make([]byte, 0, 1+len(key)), spaceRecord), key[:]...)
}

func appendTime(b []byte, t time.Time) []byte {
	return binary.BigEndian.AppendUint64(b, uint64(t.UnixNano()))
}

// keyIn is the execution key at the end of an index entry's key.
func keyIn(name []byte) Key { return Key(name[len(name)-keySize:]) }

// createdIn is the time in front of the execution key, in the indexes by age.
func createdIn(name []byte) int64 {
	return int64(binary.BigEndian.Uint64(name[len(name)-keySize-8:]))
}

func stateKey(state State, created time.Time, key Key) []byte {
	b := append(make([]byte, 0, 2+8+len(key)), spaceState, byte(state))
	return append(appendTime(b, created), key[:]...)
}

func callerPrefix(caller CallerHash) []byte {
	return append(append(make([]byte, 0, 1+2*16+keySize), spaceCaller), caller[:]...)
}

func (g *Guard) idPrefix(caller CallerHash, id string) []byte {
	hash := g.sealer.Index("id", string(caller[:]), id)
	return append(callerPrefix(caller), hash[:16]...)
}

func (g *Guard) callerKey(r *Record, key Key) []byte {
	return append(g.idPrefix(r.Caller, r.ID), key[:]...)
}

func (g *Guard) workflowPrefix(workflow string) []byte {
	hash := g.sealer.Index("workflow", workflow)
	b := append(make([]byte, 0, 1+16+8+keySize), spaceWorkflow)
	return append(b, hash[:16]...)
}

func (g *Guard) workflowKey(r *Record, key Key) []byte {
	return append(appendTime(g.workflowPrefix(r.Workflow), r.Created), key[:]...)
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
	writes := 7 // of a settle: the record, its five index entries, its answer
	if new != nil && new.State.Open() {
		writes = 3
	}
	batch := make([]store.Write, 1, writes)
	name := recordKey(key)
	size := 0 // of the new record, before it is sealed
	if new == nil {
		batch[0] = store.Write{Key: name, If: condition, Delete: true}
	} else {
		plain := scratch.Get().(*[]byte)
		*plain = new.encode((*plain)[:0])
		size = len(*plain)
		sealed := g.sealer.Seal(make([]byte, 0, size+64), *plain, name)
		freeScratch(plain)
		batch[0] = store.Write{Key: name, If: condition, Value: sealed, Expires: new.expires()}
	}
	// An entry is written anew where its key, its value or its expiry changes; value
	// may be nil.
	keep := func(space func(*Record) []byte, value func(*Record) []byte) {
		var before, after, content []byte
		if old != nil {
			before = space(old)
		}
		if new != nil {
			after = space(new)
		}
		if after != nil && value != nil {
			content = value(new)
		}
		same := before != nil && string(before) == string(after)
		if before != nil && !same {
			batch = append(batch, store.Write{Key: before, Delete: true})
		}
		if after != nil && !(same && value == nil && old.expires().Equal(new.expires())) {
			batch = append(batch, store.Write{Key: after, Value: content, Expires: new.expires()})
		}
	}
	keep(func(r *Record) []byte { return stateKey(r.State, r.Created, key) }, nil)
	keep(func(r *Record) []byte {
		if r.State.Open() {
			return nil
		}
		return g.callerKey(r, key)
	}, func(r *Record) []byte { return accountOf(r, size).encode() })
	keep(func(r *Record) []byte {
		if r.State.Open() || r.Workflow == "" {
			return nil
		}
		return g.workflowKey(r, key)
	}, nil)
	return batch
}
