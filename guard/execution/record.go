package execution

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// State is where a recorded execution stands. docs/state_machine.md draws the ways
// between them.
type State uint8

// The states. A released execution has no record: its key is free.
const (
	// StateSending: it was sent, or may have been.
	StateSending State = 2 + iota // as it is recorded; 1 is no state
	// StateCompleted: executed; the result is kept for a while, the key longer.
	StateCompleted
	// StateInDoubt: it may have been executed. Never expires.
	StateInDoubt
	// StateRolledBack: it was undone; a late duplicate is refused for ever.
	StateRolledBack
)

// String is the word used in answers, logs and problem documents.
func (s State) String() string {
	switch s {
	case StateSending:
		return "running"
	case StateCompleted:
		return "completed"
	case StateInDoubt:
		return "in_doubt"
	case StateRolledBack:
		return "rolled_back"
	default:
		return "unknown"
	}
}

// open reports whether the execution has not come to an end yet.
func (s State) open() bool { return s == StateSending }

// States lists the states, in the order in which they are documented.
func States() []State {
	return []State{StateSending, StateCompleted, StateInDoubt, StateRolledBack}
}

// ParseState reads the words of State.String.
func ParseState(word string) (State, error) {
	for _, s := range States() {
		if s.String() == word {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%q is no state; use running, completed, in_doubt or rolled_back", word)
}

// Record is what is kept of one execution. It is sealed in the store.
type Record struct {
	State       State
	Claim       [16]byte // random; a claim's result cannot be taken for another's
	Fingerprint Fingerprint
	Caller      CallerHash
	ID          string
	Origin      Origin
	Guard       string
	Action      string
	Host        string
	Method      string
	Path        string
	Workflow    string
	Checkpoint  string // the id of the token that announced it; empty without one
	Node, Boot  string
	Created     time.Time
	First       time.Time // when the first of its attempts was claimed; zero where Created is that
	Sent        [32]byte  // see Call.Sent
	Deadline    time.Time
	Settled     time.Time
	Cause       Cause
	Status      int // of the upstream's answer; 0 without one
	Result      storedResult
	KeepResult  time.Duration
	KeepKey     time.Duration
}

// storedResult says where the answer of a completed execution is kept.
type storedResult struct {
	// Kept tells a result that was recorded from one that could not be.
	Kept bool
	// Inline is the whole encoded answer where it is small.
	Inline []byte
	// Pieces is the number of full pieces of the body kept beside the head.
	Pieces int
	// Sum is the SHA-256 over the body and then the encoded head.
	Sum [32]byte
	// Size is how many bytes are stored beside the record.
	Size    int64
	Expires time.Time
}

// began is when the first attempt of the call was claimed, by the store's clock.
func (r *Record) began() time.Time {
	if r.First.IsZero() {
		return r.Created
	}
	return r.First
}

// Announced reports whether the record is of the call that a token has announced, by the
// token's id.
func (r *Record) Announced(checkpoint string) bool {
	return r.Checkpoint == shorten(checkpoint, maxRecordedText)
}

// Longest recorded forms. They bound a record, so that it stays where a store's
// sync error is seen; the key and the fingerprint are of the whole.
const (
	maxRecordedID   = 255
	maxRecordedText = 256
)

func shorten(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return s[:most]
}

func (g *Guard) newRecord(c *Call, caller CallerHash, now time.Time) Record {
	return Record{
		State:       StateSending,
		Claim:       newClaim(),
		Fingerprint: c.Fingerprint,
		Caller:      caller,
		ID:          shorten(c.Scope.ID, maxRecordedID),
		Origin:      c.Origin,
		Guard:       shorten(c.Scope.Guard, maxRecordedText),
		Action:      shorten(c.Action, maxRecordedText),
		Host:        shorten(c.Host, maxRecordedText),
		Method:      shorten(c.Scope.Method, maxRecordedText),
		Path:        shorten(c.Scope.Path, maxRecordedText),
		Workflow:    shorten(c.Workflow, maxRecordedText),
		Checkpoint:  shorten(c.Checkpoint, maxRecordedText),
		Node:        g.node,
		Boot:        g.boot,
		Created:     now,
		Sent:        c.Sent,
		Deadline:    now.Add(c.Deadline),
		KeepResult:  c.KeepResult,
		KeepKey:     max(c.KeepKey, c.KeepResult),
	}
}

// The tags of a record's fields. A tag is never used again for something else;
// readers skip tags that they do not know.
const (
	tagState = 1 + iota
	tagClaim
	tagFingerprint
	tagCaller
	tagID
	tagOrigin
	tagGuard
	tagAction
	tagMethod
	tagPath
	tagWorkflow
	tagNode
	tagBoot
	tagCreated
	tagDeadline
	tagSettled
	tagCause
	tagStatus
	tagResultKept
	tagResultInline
	tagResultPieces
	tagResultSum
	tagResultExpires
	tagKeepResult
	tagKeepKey
	tagHost
	tagResultSize
	tagCheckpoint
	tagFirst
	tagSent
)

func (r *Record) encode(dst []byte) []byte {
	e := encoder{dst}
	e.int(tagState, int64(r.State))
	e.bytes(tagClaim, r.Claim[:])
	e.bytes(tagFingerprint, r.Fingerprint[:])
	e.bytes(tagCaller, r.Caller[:])
	e.string(tagID, r.ID)
	e.int(tagOrigin, int64(r.Origin))
	e.string(tagGuard, r.Guard)
	e.string(tagAction, r.Action)
	e.string(tagMethod, r.Method)
	e.string(tagPath, r.Path)
	e.string(tagWorkflow, r.Workflow)
	e.string(tagNode, r.Node)
	e.string(tagBoot, r.Boot)
	e.time(tagCreated, r.Created)
	e.time(tagDeadline, r.Deadline)
	e.time(tagSettled, r.Settled)
	e.string(tagCause, string(r.Cause))
	e.int(tagStatus, int64(r.Status))
	e.bool(tagResultKept, r.Result.Kept)
	e.bytes(tagResultInline, r.Result.Inline)
	e.int(tagResultPieces, int64(r.Result.Pieces))
	if r.Result.Kept {
		e.bytes(tagResultSum, r.Result.Sum[:])
	}
	e.time(tagResultExpires, r.Result.Expires)
	e.int(tagKeepResult, int64(r.KeepResult))
	e.int(tagKeepKey, int64(r.KeepKey))
	e.string(tagHost, r.Host)
	e.int(tagResultSize, r.Result.Size)
	e.string(tagCheckpoint, r.Checkpoint)
	e.time(tagFirst, r.First)
	if r.Sent != [32]byte{} {
		e.bytes(tagSent, r.Sent[:])
	}
	return e.b
}

// size is the number of bytes of the record before it is sealed.
func (r *Record) size() int {
	b := scratch.Get().(*[]byte)
	defer freeScratch(b)
	*b = r.encode((*b)[:0])
	return len(*b)
}

func decodeRecord(b []byte) (*Record, error) {
	r := new(Record)
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagState:
			r.State = State(d.int())
		case tagClaim:
			d.fill(r.Claim[:])
		case tagFingerprint:
			d.fill(r.Fingerprint[:])
		case tagCaller:
			d.fill(r.Caller[:])
		case tagID:
			r.ID = d.string()
		case tagOrigin:
			r.Origin = Origin(d.int())
		case tagGuard:
			r.Guard = d.string()
		case tagAction:
			r.Action = d.string()
		case tagMethod:
			r.Method = d.string()
		case tagPath:
			r.Path = d.string()
		case tagWorkflow:
			r.Workflow = d.string()
		case tagNode:
			r.Node = d.string()
		case tagBoot:
			r.Boot = d.string()
		case tagCreated:
			r.Created = d.time()
		case tagDeadline:
			r.Deadline = d.time()
		case tagSettled:
			r.Settled = d.time()
		case tagCause:
			r.Cause = Cause(d.string())
		case tagStatus:
			r.Status = int(d.int())
		case tagResultKept:
			r.Result.Kept = d.int() != 0
		case tagResultInline:
			r.Result.Inline = d.bytes()
		case tagResultPieces:
			r.Result.Pieces = int(d.int())
		case tagResultSum:
			d.fill(r.Result.Sum[:])
		case tagResultExpires:
			r.Result.Expires = d.time()
		case tagKeepResult:
			r.KeepResult = time.Duration(d.int())
		case tagKeepKey:
			r.KeepKey = time.Duration(d.int())
		case tagHost:
			r.Host = d.string()
		case tagResultSize:
			r.Result.Size = d.int()
		case tagCheckpoint:
			r.Checkpoint = d.string()
		case tagFirst:
			r.First = d.time()
		case tagSent:
			d.fill(r.Sent[:])
		}
	}
	if d.err == nil && (r.State < StateSending || r.State > StateRolledBack) {
		d.err = errEncoding
	}
	return r, d.err
}

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
//	                              (package guard/evidence)
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
// included, and then the writes of batches. Either record may be nil: nothing there before or
// after. Whoever commits it is in g.writers from before the call until after the commit.
func (g *Guard) put(key Key, old, new *Record, condition store.Condition, batches ...*store.Batch) []store.Write {
	writes := 7 // of a settle: the record, its five index entries, its answer
	if new != nil && new.State.open() {
		writes = 3
	}
	for _, b := range batches {
		writes += len(b.Writes())
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
		if r.State.open() {
			return nil
		}
		return g.callerKey(r, key)
	}, func(r *Record) []byte { return accountOf(r, size).encode() })
	keep(func(r *Record) []byte {
		if r.State.open() || r.Workflow == "" {
			return nil
		}
		return g.workflowKey(r, key)
	}, nil)
	for _, b := range batches {
		batch = append(batch, b.Writes()...)
	}
	return batch
}

// errEncoding is the error of a record or head that opened but cannot be read: it
// was written by a newer build, or by a fault of ours. It is never "not found".
var errEncoding = errors.New("guard: a record in the store cannot be read by this build")

// encoder writes fields as tag, length, bytes. Zero values are left out.
type encoder struct{ b []byte }

func (e *encoder) bytes(tag byte, v []byte) {
	if len(v) == 0 {
		return
	}
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

func (e *encoder) string(tag byte, v string) {
	if v == "" {
		return
	}
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

// marked writes v after a valueMark, so that it is written where it is empty too.
func (e *encoder) marked(tag byte, v string) {
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)+1))
	e.b = append(e.b, valueMark)
	e.b = append(e.b, v...)
}

func (e *encoder) int(tag byte, v int64) {
	if v == 0 {
		return
	}
	var buf [binary.MaxVarintLen64]byte
	e.bytes(tag, binary.AppendVarint(buf[:0], v))
}

func (e *encoder) bool(tag byte, v bool) {
	if v {
		e.int(tag, 1)
	}
}

func (e *encoder) time(tag byte, v time.Time) {
	if !v.IsZero() {
		e.int(tag, v.UnixNano())
	}
}

// decoder reads what encoder wrote. The first fault stays in err and ends next.
type decoder struct {
	b     []byte
	tag   byte
	field []byte
	err   error
}

func (d *decoder) next() bool {
	if d.err != nil || len(d.b) == 0 {
		return false
	}
	d.tag = d.b[0]
	size, n := binary.Uvarint(d.b[1:])
	if n <= 0 || size > uint64(len(d.b)-1-n) {
		d.err = errEncoding
		return false
	}
	d.field = d.b[1+n:][:size]
	d.b = d.b[1+n+int(size):]
	return true
}

func (d *decoder) bytes() []byte   { return d.field }
func (d *decoder) string() string  { return string(d.field) }
func (d *decoder) time() time.Time { return time.Unix(0, d.int()) }

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.field)
	if n != len(d.field) || n <= 0 {
		d.err = errEncoding
	}
	return v
}

func (d *decoder) fill(dst []byte) {
	if copy(dst, d.field) != len(dst) || len(d.field) != len(dst) {
		d.err = errEncoding
	}
}

// marked reads a value behind its valueMark.
func (d *decoder) marked() string {
	if len(d.field) == 0 || d.field[0] != valueMark {
		d.err = errEncoding
		return ""
	}
	return string(d.field[1:])
}
