package guard

import (
	"fmt"
	"time"
)

// State is where a recorded execution stands. docs/state_machine.md draws the ways
// between them.
type State uint8

// The states. A released execution has no record: its key is free.
const (
	// StateClaimed: the claim is durable, nothing was sent yet.
	StateClaimed State = 1 + iota
	// StateSending: it was sent, or may have been.
	StateSending
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
	case StateClaimed:
		return "claimed"
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

// Open reports whether the execution has not come to an end yet.
func (s State) Open() bool { return s == StateClaimed || s == StateSending }

// States lists the states, in the order in which they are documented.
func States() []State {
	return []State{StateClaimed, StateSending, StateCompleted, StateInDoubt, StateRolledBack}
}

// ParseState reads the words of State.String.
func ParseState(word string) (State, error) {
	for _, s := range States() {
		if s.String() == word {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%q is no state; use claimed, running, completed, in_doubt or rolled_back", word)
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
	Deadline    time.Time
	Settled     time.Time
	Cause       Cause
	Status      int // of the upstream's answer; 0 without one
	Result      StoredResult
	KeepResult  time.Duration
	KeepKey     time.Duration
}

// StoredResult says where the answer of a completed execution is kept.
type StoredResult struct {
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
		}
	}
	if d.err == nil && (r.State < StateClaimed || r.State > StateRolledBack) {
		d.err = errEncoding
	}
	return r, d.err
}
