package execution

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// State is the state of a recorded execution (docs/state_machine.md).
type State uint8

// The states. A released execution has no record: its key is free.
const (
	// StateSending: it was sent, or may have been.
	StateSending State = 2 + iota // the stored value; 1 is unused
	// StateCompleted: executed; the result is kept for a while, the key longer.
	StateCompleted
	// StateInDoubt: it may have been executed. Never expires.
	StateInDoubt
	// StateRolledBack: it was undone; a late duplicate is refused forever.
	StateRolledBack
)

// String is the word used in answers, logs and problem documents.
func (s State) String() string {
	if s < StateSending || s > StateRolledBack {
		return "unknown"
	}
	return [...]string{"running", "completed", "in_doubt", "rolled_back"}[s-StateSending]
}

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

// Record is the stored state of one execution. It is sealed in the store.
type Record struct {
	State       State
	Claim       [16]byte // random; a claim's result cannot be taken for another's
	Fingerprint body.Fingerprint
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
	Counts      string // the member of a shared store that it counts for, where that is not Boot's
	Created     time.Time
	First       time.Time // when the first of its attempts was claimed; zero where Created is that
	Sent        [32]byte  // see Call.Sent
	Deadline    time.Time
	Settled     time.Time
	Cause       Cause
	Status      int    // of the upstream's answer; 0 without one
	Task        string // by which the upstream can be asked about a doubt; empty without one
	Result      storedResult
	KeepResult  time.Duration
	KeepKey     time.Duration
	// Of a call without a key, which equal ones find for the Window after it.
	Group    groupHash
	Window   time.Duration
	Count    int
	Internal bool // see Outcome.Internal
	Lot      lotHash
}

// storedResult says where the answer of a completed execution is kept.
type storedResult struct {
	// Kept distinguishes a recorded result from one that could not be kept.
	Kept bool
	// Inline is the whole encoded answer if it is small.
	Inline []byte
	// Pieces is the number of full pieces of the body kept beside the head.
	Pieces int
	// Size is how many bytes are stored beside the record.
	Size    int64
	Expires time.Time
}

// beside reports that the answer is under appendAnswerKey, and the full pieces before its rest under its claim.
func (r *storedResult) beside() bool { return r.Kept && r.Inline == nil }

// read takes the field that d has found, if it says of the answer.
func (r *storedResult) read(d *store.Decoder) {
	switch d.Tag {
	case tagResultKept:
		r.Kept = d.Int() != 0
	case tagResultInline:
		r.Inline = d.Field
	case tagResultPieces:
		r.Pieces = int(d.Int())
	case tagResultExpires:
		r.Expires = d.Time()
	case tagResultSize:
		r.Size = d.Int()
	}
}

// began is when the first attempt of the call was claimed, by the store's clock.
func (r *Record) began() time.Time {
	if r.First.IsZero() {
		return r.Created
	}
	return r.First
}

// Announced reports whether the recorded call was announced by the token with this id.
func (r *Record) Announced(checkpoint string) bool {
	return r.Checkpoint == shortText(checkpoint)
}

// Longest recorded forms. They bound a record, so that the store reports its sync errors; the key
// and the fingerprint are of the whole.
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

func shortText(s string) string { return shorten(s, maxRecordedText) }

// records writes the records of executions with their index entries, for one process.
type records struct {
	sealer store.Sealer
	node   string
	boot   string
	shared bool // several gateways have the store
}

func (l *records) newRecord(c *Call, caller CallerHash, now time.Time) Record {
	r := Record{
		State: StateSending, Claim: newClaim(), Fingerprint: c.Fingerprint, Caller: caller, Origin: c.Origin, Sent: c.Sent,
		ID: shorten(c.Scope.ID, maxRecordedID), Guard: shortText(c.Scope.Guard), Action: shortText(c.Action),
		Host: shortText(c.Host), Method: shortText(c.Scope.Method), Path: shortText(c.Scope.Path),
		Workflow: shortText(c.Workflow), Checkpoint: shortText(c.Checkpoint), Node: l.node, Boot: l.boot,
		Created: now, Deadline: now.Add(c.Deadline), KeepResult: c.KeepResult, KeepKey: max(c.KeepKey, c.KeepResult),
	}
	if a := c.Attempt; a != nil {
		r.Group, r.Window, r.Count = a.group, a.window, a.count
	}
	return r
}

// The tags of a record's fields. Readers skip those that they do not know.
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
	_ // unused
	tagResultExpires
	tagKeepResult
	tagKeepKey
	tagHost
	tagResultSize
	tagCheckpoint
	tagFirst
	tagSent
	_ // unused
	tagGroup
	tagWindow
	tagCount
	tagTask
	tagInternal
	tagLot
	tagCounts
)

func (r *Record) encode(dst []byte) []byte {
	e := store.Encoder{B: dst}
	e.Int(tagState, int64(r.State))
	e.Bytes(tagClaim, r.Claim[:])
	e.Bytes(tagFingerprint, r.Fingerprint[:])
	e.Bytes(tagCaller, r.Caller[:])
	e.String(tagID, r.ID)
	e.Int(tagOrigin, int64(r.Origin))
	e.String(tagGuard, r.Guard)
	e.String(tagAction, r.Action)
	e.String(tagMethod, r.Method)
	e.String(tagPath, r.Path)
	e.String(tagWorkflow, r.Workflow)
	e.String(tagNode, r.Node)
	e.String(tagBoot, r.Boot)
	e.Time(tagCreated, r.Created)
	e.Time(tagDeadline, r.Deadline)
	e.Time(tagSettled, r.Settled)
	e.String(tagCause, string(r.Cause))
	e.Int(tagStatus, int64(r.Status))
	e.Bool(tagResultKept, r.Result.Kept)
	e.Bytes(tagResultInline, r.Result.Inline)
	e.Int(tagResultPieces, int64(r.Result.Pieces))
	e.Time(tagResultExpires, r.Result.Expires)
	e.Int(tagKeepResult, int64(r.KeepResult))
	e.Int(tagKeepKey, int64(r.KeepKey))
	e.String(tagHost, r.Host)
	e.Int(tagResultSize, r.Result.Size)
	e.String(tagCheckpoint, r.Checkpoint)
	e.Time(tagFirst, r.First)
	if r.Sent != [32]byte{} {
		e.Bytes(tagSent, r.Sent[:])
	}
	e.String(tagTask, r.Task)
	if r.Group != (groupHash{}) {
		e.Bytes(tagGroup, r.Group[:])
		e.Int(tagWindow, int64(r.Window))
		e.Int(tagCount, int64(r.Count))
		e.Bool(tagInternal, r.Internal)
	}
	if r.Lot != (lotHash{}) {
		e.Bytes(tagLot, r.Lot[:])
	}
	e.String(tagCounts, r.Counts)
	return e.B
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
	return r, r.decode(b)
}

func (r *Record) decode(b []byte) error {
	d := store.Decoder{B: b, Broken: errEncoding}
	for d.Next() {
		switch d.Tag {
		case tagState:
			r.State = State(d.Int())
		case tagClaim:
			d.Fill(r.Claim[:])
		case tagFingerprint:
			d.Fill(r.Fingerprint[:])
		case tagCaller:
			d.Fill(r.Caller[:])
		case tagID:
			r.ID = string(d.Field)
		case tagOrigin:
			r.Origin = Origin(d.Int())
		case tagGuard:
			r.Guard = string(d.Field)
		case tagAction:
			r.Action = string(d.Field)
		case tagMethod:
			r.Method = string(d.Field)
		case tagPath:
			r.Path = string(d.Field)
		case tagWorkflow:
			r.Workflow = string(d.Field)
		case tagNode:
			r.Node = string(d.Field)
		case tagBoot:
			r.Boot = string(d.Field)
		case tagCreated:
			r.Created = d.Time()
		case tagDeadline:
			r.Deadline = d.Time()
		case tagSettled:
			r.Settled = d.Time()
		case tagCause:
			r.Cause = Cause(d.Field)
		case tagStatus:
			r.Status = int(d.Int())
		case tagTask:
			r.Task = string(d.Field)
		case tagKeepResult:
			r.KeepResult = time.Duration(d.Int())
		case tagKeepKey:
			r.KeepKey = time.Duration(d.Int())
		case tagHost:
			r.Host = string(d.Field)
		case tagCheckpoint:
			r.Checkpoint = string(d.Field)
		case tagFirst:
			r.First = d.Time()
		case tagSent:
			d.Fill(r.Sent[:])
		case tagGroup:
			d.Fill(r.Group[:])
		case tagWindow:
			r.Window = time.Duration(d.Int())
		case tagInternal:
			r.Internal = d.Int() != 0
		case tagCount:
			r.Count = int(d.Int())
		case tagLot:
			d.Fill(r.Lot[:])
		case tagCounts:
			r.Counts = string(d.Field)
		default:
			r.Result.read(&d)
		}
	}
	if d.Err == nil && (r.State < StateSending || r.State > StateRolledBack) {
		d.Err = errEncoding
	}
	return d.Err
}

// The store's keys begin with a letter for the kind of the entry. Nothing of a
// caller is readable in them: hashes are keyed, and only times are plain.
//
//	m name                        what the store is: layout, key check, node, keys in use,
//	                              and by a hash of a guard's name how it names callers
//	x key                         the record of an execution
//	s state created key           index: executions by state and age
//	c caller id key               index: a caller's settled executions by id; the value
//	                              is an account of them
//	w workflow created key        index: a workflow's settled executions by age; under a limit of
//	                              LimitWorkflows the value is an account of them
//	n group key                   index: equal calls that retries are recognised among, for their
//	                              window; the value marks those not answered, or released
//	a key                         the execution that an advisory key was recognised for
//	r key                         the head of an answer, with what a replay needs of the record
//	r key claim piece             the full pieces before it, from 1 on
//	o key at                      what an operator has resolved, sealed
//	v i key, v p key claim part   who follows an execution of another member, and what comes of its answer
//	v c kind holder               what each member may have of a quota
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
	spaceGroup    = 'n'
	spaceAlias    = 'a'
	spaceResult   = 'r'
	spaceResolved = 'o'
	spaceLive     = 'v'
)

const keySize = len(Key{})

func recordKey(key Key) []byte { return appendRecordKey(make([]byte, 0, 1+len(key)), key) }

func appendRecordKey(b []byte, key Key) []byte { return append(append(b, spaceRecord), key[:]...) }

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
	return appendStateKey(make([]byte, 0, 2+8+len(key)), state, created, key)
}

func appendStateKey(b []byte, state State, created time.Time, key Key) []byte {
	return append(appendTime(append(b, spaceState, byte(state)), created), key[:]...)
}

func callerPrefix(caller CallerHash) []byte {
	return append(append(make([]byte, 0, 1+16), spaceCaller), caller[:]...)
}

func (l *records) idPrefix(caller CallerHash, id string) []byte {
	return l.appendIDPrefix(make([]byte, 0, 1+2*16), caller, id)
}

func (l *records) appendIDPrefix(b []byte, caller CallerHash, id string) []byte {
	hash := store.Index(l.sealer, "id", string(caller[:]), id)
	return append(append(append(b, spaceCaller), caller[:]...), hash[:16]...)
}

func (l *records) appendCallerKey(b []byte, r *Record, key Key) []byte {
	return append(l.appendIDPrefix(b, r.Caller, r.ID), key[:]...)
}

func (l *records) workflowPrefix(workflow string) []byte {
	return l.appendWorkflowPrefix(make([]byte, 0, 1+16), workflow)
}

func (l *records) appendWorkflowPrefix(b []byte, workflow string) []byte {
	hash := store.Index(l.sealer, "workflow", workflow)
	return append(append(b, spaceWorkflow), hash[:16]...)
}

func (l *records) appendWorkflowKey(b []byte, r *Record, key Key) []byte {
	return append(appendTime(l.appendWorkflowPrefix(b, r.Workflow), r.Created), key[:]...)
}

// indexes are the spaces of the index entries that every record has.
var indexes = [...]byte{spaceState, spaceCaller, spaceWorkflow}

// appendIndexKey appends the key of r's entry in an index, nothing where r has none there or is nil.
func (l *records) appendIndexKey(b []byte, space byte, r *Record, key Key) []byte {
	switch {
	case r == nil || r.State.open() && space != spaceState:
		return b
	case space == spaceState:
		return appendStateKey(b, r.State, r.Created, key)
	case space == spaceCaller:
		return l.appendCallerKey(b, r, key)
	case r.Workflow == "":
		return b
	}
	return l.appendWorkflowKey(b, r, key)
}

// firstPiece is the number of the first full piece of a body.
const firstPiece = 1

// appendAnswerKey appends the name of an answer's head piece, which holds the body's rest too.
func appendAnswerKey(b []byte, key Key) []byte { return append(append(b, spaceResult), key[:]...) }

func pieceKey(key Key, claim [16]byte, piece int) []byte {
	b := append(make([]byte, 0, 1+len(key)+len(claim)+4), spaceResult)
	b = append(append(b, key[:]...), claim[:]...)
	return binary.BigEndian.AppendUint32(b, uint32(piece))
}

// expires is when a record expires: never, unless it is completed.
func (r *Record) expires() time.Time {
	if r.State != StateCompleted {
		return time.Time{}
	}
	return r.Settled.Add(r.KeepKey)
}

// put is the batch that replaces the record old of key by new, with its index entries, and then
// the writes of batches. Either record may be nil. Its committer is in Guard.writers from before the
// call until after the commit.
func (l *records) put(key Key, old, new *Record, condition store.Condition, batches ...*store.Batch) []store.Write {
	var room room
	l.putIn(&room, key, old, new, condition, batches...)
	return room.writes
}

// putIn is put in room.
func (l *records) putIn(room *room, key Key, old, new *Record, condition store.Condition, batches ...*store.Batch) {
	writes := 7 // of a settle: the record, its five index entries, its answer
	if new != nil && new.State.open() {
		writes = 3
	}
	row, size := 0, 0 // of the new record, before it is sealed
	if new != nil && new.Group != (groupHash{}) {
		row = rowSize
		writes++
	}
	for _, b := range batches {
		writes += len(b.Writes())
	}
	plain := scratch.Get().(*[]byte)
	defer freeScratch(plain)
	if new != nil {
		*plain = new.encode((*plain)[:0])
		size = len(*plain)
	}
	room.memory = slices.Grow(room.memory[:0], indexMemory+row+size)
	record := store.Write{Key: room.keep(appendRecordKey(room.memory, key)), If: condition, Delete: new == nil}
	if new != nil {
		record.Value, record.Expires = room.keep(l.sealer.Seal(room.memory, *plain, record.Key)), new.expires()
	}
	room.writes = append(slices.Grow(room.writes[:0], writes), record)
	for _, by := range indexes {
		l.putIndex(room, by, key, old, new, size)
	}
	l.putRow(room, key, old, new)
	// Or it would be replayed. Without an old record too: a clock that is set back brings back what had
	// expired (P1). The store applies no deletion of what it does not have.
	if old == nil || old.Result.beside() {
		room.delete(room.keep(appendAnswerKey(room.memory, key)))
	}
	for _, b := range batches {
		room.writes = append(room.writes, b.Writes()...)
	}
}

// putIndex writes the entry of an index anew if its key, value or expiry changes. size is that of the new record.
func (l *records) putIndex(room *room, by byte, key Key, old, new *Record, size int) {
	before := room.keep(l.appendIndexKey(room.memory, by, old, key))
	after := room.keep(l.appendIndexKey(room.memory, by, new, key))
	var account []byte
	if after != nil && (by == spaceCaller || by == spaceWorkflow && new.Lot != lotHash{}) {
		a := accountOf(new, size)
		if by == spaceWorkflow {
			a.lot = new.Lot
		}
		if l.shared {
			a.boot = new.countsFor()
		}
		account = room.keep(a.appendTo(room.memory))
	}
	same := before != nil && string(before) == string(after)
	if before != nil && !same {
		room.delete(before)
	}
	if after != nil && !(same && account == nil && old.expires().Equal(new.expires())) {
		room.writes = append(room.writes, store.Write{Key: after, Value: account, Expires: new.expires()})
	}
}

// putRow writes the row of a settled call without a key, or deletes it where new has none.
func (l *records) putRow(room *room, key Key, old, new *Record) {
	grouped := func(r *Record) bool { return r != nil && !r.State.open() && r.Group != groupHash{} }
	switch {
	case grouped(new) && !(grouped(old) && old.State == StateCompleted):
		name, mark := room.keep(appendRowKey(room.memory, new.Group, key)), byte(markNone)
		if old != nil && old.State == StateInDoubt && old.Cause != CauseElsewhere {
			// Who was told of the doubt has not learned more. Who waits elsewhere was not.
			mark = markUnanswered
			if l.shared { // nor has a retry that had taken it while it ran
				room.delete(takenKey(new.Group, key))
			}
		}
		value := room.keep(appendRow(room.memory, mark, new.Count, new.Settled))
		room.writes = append(room.writes, store.Write{Key: name, Value: value, Expires: new.Settled.Add(new.Window)})
	case grouped(old) && !grouped(new):
		room.delete(appendRowKey(nil, old.Group, key))
	}
}

// indexMemory is enough for the sealing of a record, its key, its five index entries' and the two
// accounts.
const indexMemory = 64 + 1 + 2*(2+8) + 2*(1+2*16) + (1 + 16 + 8) + 1 + 7*keySize + 2*accountSize

// errEncoding: a sealed record opened but cannot be decoded: a newer build or a bug wrote it.
var errEncoding = errors.New("guard: a record in the store cannot be read by this build")
