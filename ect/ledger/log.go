// Package ledger is an append-only log of events: a Merkle tree (RFC 6962) over a
// store.Store, whose heads are signed notes.
//
// [Log.Record] makes writes for the commit of the state change that an event describes, so that both are durable or
// neither. Where the store is a store.Sequencing, the event is in the tree with that commit, under a head that is
// signed once for a group of commits. Elsewhere, and if its token has to be signed first, it goes into the outbox. The
// sequencer then moves events from the outbox into the tree in their order, and signs those that were recorded
// unsigned. Each move is one commit that is conditional on the head: after a crash it happened completely or not at
// all, and of two processes on one log the loser reloads the tree and continues.
//
// A [Receipt] (index, inclusion proof, signed head) and consistency proofs between two
// heads can be checked with the public keys alone. [Log.Verify] reads the whole log and
// reports alterations; [Log.Export] and [VerifyExport] allow that without a store. Pruned
// entries keep their hashes, and signed notes list them.
//
// Payloads are opaque here. Events are sealed in the store (P8); hashes, counts and heads
// are plain.
package ledger

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Limits of an event, so that every entry fits into a value of every store.
const (
	// MaxPayload is the largest payload, in bytes.
	MaxPayload = 32 << 10
	// MaxClaims is the largest payload with a Header, in bytes.
	MaxClaims = 16 << 10
	// MaxName is the longest id, workflow, action or parent, in bytes.
	MaxName = 256
	// MaxParents is the largest number of parents.
	MaxParents = 100

	maxIssuer = 2048
	maxHeader = 512
	// maxSignature is the longest signature, in bytes.
	maxSignature = 512
	maxLinks     = MaxParents + 1 // further ids under which an event is found
	// maxLeaf is the longest encoding of an entry, in bytes.
	maxLeaf = MaxPayload + maxIssuer + 3*MaxName + MaxParents*(MaxName+fieldOverhead) + fixedOverhead
)

// Event is one recorded decision.
type Event struct {
	// ID is the jti, 1 to MaxName bytes: unique in its workflow, or in the whole store for
	// an event without a workflow. The latter is checked for signed events only.
	ID string
	// Workflow is the wid; it may be empty.
	Workflow string
	// Action is the exec_act.
	Action string
	// Issuer is the iss, of at most 2048 bytes.
	Issuer string
	// Parents are the ids (par) of the events that caused this one.
	Parents []string
	// Time is when the event happened (iat).
	Time time.Time
	// KeepUntil is the time before which the entry is not pruned; zero leaves that to the
	// retention of the log.
	KeepUntil time.Time
	// Payload is the event's token, or with a Header the payload of the token.
	Payload []byte
	// Header is the protected header of a token that is signed when it is asked for: see
	// Log.Token. It is nil where Payload is the token.
	Header []byte
	// Unsigned says that Payload is a draft that Options.Sign turns into the token. In an
	// Entry it says that Options.Sign refused.
	Unsigned bool
	// Parsed is the parsed Payload or its draft, for Options.Sign and Options.Links. It is
	// not recorded: after a crash it is nil.
	Parsed any
}

// Entry is an event that is in the tree of a log.
type Entry struct {
	Event
	// Log is the origin of the log that holds it.
	Log string
	// Index is its position in the tree, from 0.
	Index int64
	// Recorded is when it was added to the tree. It never decreases with the index.
	Recorded time.Time
	// Leaf has the exact bytes under the leaf hash.
	Leaf []byte
}

// Errors of a log.
var (
	// ErrInvalid: the event, the page or the cursor breaks a limit.
	ErrInvalid = errors.New("ledger: invalid event")
	// ErrDuplicate: the workflow has an event with this id.
	ErrDuplicate = errors.New("ledger: an event with this id is recorded")
	// ErrNotFound: no such entry.
	ErrNotFound = errors.New("ledger: not found")
	// ErrWaiting: the event is recorded but not in the tree yet.
	ErrWaiting = errors.New("ledger: recorded, not yet in the tree")
	// ErrPruned: the entry's content was pruned; its hash is still in the tree.
	ErrPruned = errors.New("ledger: the entry was pruned")
	// ErrTampered: the content of the store was altered, or replaced by an older copy. The
	// log accepts no further events.
	ErrTampered = errors.New("ledger: the log was altered")
	// ErrClosed: the log was closed.
	ErrClosed = errors.New("ledger: closed")
	// ErrNoToken: the entry has no token, or the key that its Header names is gone.
	ErrNoToken = errors.New("ledger: the entry has no token")
	// ErrRefused is wrapped by Options.Sign for an event that it will never sign. The
	// event goes into the tree as it is, marked as unsigned.
	ErrRefused = errors.New("ledger: the event cannot be signed")
	// ErrProof: a receipt, proof, head or export is malformed or does not verify.
	ErrProof = errors.New("ledger: the proof does not hold")
)

func (e *Event) check() error {
	switch {
	case e.ID == "":
		return fmt.Errorf("%w: no id", ErrInvalid)
	case len(e.ID) > MaxName, len(e.Workflow) > MaxName, len(e.Action) > MaxName:
		return fmt.Errorf("%w: a name is longer than %d bytes", ErrInvalid, MaxName)
	case len(e.Issuer) > maxIssuer:
		return fmt.Errorf("%w: the issuer is longer than %d bytes", ErrInvalid, maxIssuer)
	case len(e.Parents) > MaxParents:
		return fmt.Errorf("%w: %d parents, at most %d", ErrInvalid, len(e.Parents), MaxParents)
	case len(e.Payload) == 0 || len(e.Payload) > MaxPayload:
		return fmt.Errorf("%w: payload of %d bytes, from 1 to %d", ErrInvalid, len(e.Payload), MaxPayload)
	case len(e.Header) > maxHeader || e.Header != nil && (len(e.Header) == 0 || e.Unsigned || len(e.Payload) > MaxClaims):
		return fmt.Errorf("%w: a header of %d bytes for a payload of %d", ErrInvalid, len(e.Header), len(e.Payload))
	case !encodable(e.Time) || !encodable(e.KeepUntil):
		return fmt.Errorf("%w: a time is out of range", ErrInvalid)
	}
	for _, p := range e.Parents {
		if p == "" || len(p) > MaxName {
			return fmt.Errorf("%w: a parent of %d bytes, from 1 to %d", ErrInvalid, len(p), MaxName)
		}
	}
	return nil
}

var (
	firstTime = time.Unix(0, math.MinInt64)
	lastTime  = time.Unix(0, math.MaxInt64)
)

// encodable reports whether t is zero or fits into nanoseconds since 1970.
func encodable(t time.Time) bool {
	return t.IsZero() || t.After(firstTime) && t.Before(lastTime)
}

// Options are the settings of a log. Store, Sealer, Origin, HeadSigner and HeadKeys are
// required.
type Options struct {
	// Store may hold other data and other logs.
	Store store.Store
	// Sealer encrypts the events in the store.
	Sealer store.Sealer
	// Origin names the log: one for each node, 1 to 255 bytes, never changed.
	Origin string
	// HeadSigner signs the heads.
	HeadSigner note.Signer
	// HeadKeys are the public keys of the heads: the signer's and all earlier ones.
	HeadKeys note.Verifiers
	// Sign makes the token of an event that was recorded unsigned, in the background.
	// After a crash it is called again, and must make a token of the same event. An error
	// that wraps ErrRefused is final; any other is retried, and later events wait. If nil,
	// unsigned events are invalid.
	Sign func(ctx context.Context, e Event) ([]byte, error)
	// Signature signs the token of an entry with a Header, when somebody asks for it: always
	// the same bytes. An error says that the key is gone. If nil, such events are invalid.
	Signature func(header, payload []byte) ([]byte, error)
	// Verifies says whether the key that a header names is known, and whether a stored
	// signature holds under it. If nil, none is known.
	Verifies func(header, payload, signature []byte) (holds, known bool)
	// Links returns the ids in the event's workflow under which Following finds it, such
	// as its parents; those beyond 101 are ignored. It must be deterministic. Nil is none.
	Links func(e *Event) []string
	// Placed gets each event once it is in the tree, also those that an earlier process recorded, in the order of the
	// tree and on the sequencer's goroutine: it must not wait, nor keep the event without a copy. Events may be
	// missing that another process has moved, or whose commit has an unknown result. Nil is nobody.
	Placed func(e *Event, recorded time.Time)
	// KeysOf returns the public keys of the heads of another log of the store, by its origin, so that
	// it can be read and verified here: see In. If nil, its heads are not verified.
	KeysOf func(origin string) (note.Verifiers, error)
	// Shared says that other processes record in other logs of the store at the same time: Flush waits
	// for their events, too.
	Shared bool
	// Known are earlier heads that were kept outside the store. Open returns ErrTampered
	// if the log does not extend them.
	Known []Head
	// MaxBacklog and MaxAge bound the outbox: Admit waits while it has more events, or an
	// older one. Zero is 10,000 and 10 s.
	MaxBacklog int
	MaxAge     time.Duration
	// BatchDelay is how long the sequencer waits for more events once it has one, so that
	// they share a commit. Zero is 5 ms; negative is none.
	BatchDelay time.Duration
	// Logger gets the errors of the sequencer, which has no caller; nil discards them.
	Logger *slog.Logger
}

func (o *Options) complete() error {
	if o.Store == nil || o.Sealer == nil || o.HeadKeys == nil {
		return errors.New("ledger: a log needs a store, a sealer and the keys of its heads")
	}
	o.MaxBacklog = cmp.Or(o.MaxBacklog, 10_000)
	o.MaxAge = cmp.Or(o.MaxAge, 10*time.Second)
	o.BatchDelay = cmp.Or(o.BatchDelay, 5*time.Millisecond)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	const longest = 255
	if o.Origin == "" || len(o.Origin) > longest || !utf8.ValidString(o.Origin) || strings.ContainsFunc(o.Origin, unicode.IsControl) {
		return fmt.Errorf("ledger: %q cannot be the origin of a log", o.Origin)
	}
	return nil
}

// Log is one process's handle of a log. It is safe for concurrent use.
type Log struct {
	*logStore
	options  Options
	signer   note.Signer
	boot     [8]byte
	queue    *queue
	places   placements
	now      atomic.Pointer[state] // the newest that this process has read or written
	pruning  sync.Mutex            // excludes pruning, exporting, verifying and re-sealing
	reported map[int64]bool        // entries that cannot be pruned; guarded by pruning
	origins  sync.Map              // logID -> string, of the other logs of the store
	others   sync.Map              // origin -> *Log, of the other logs of the store

	refused, damaged, retries atomic.Int64

	lifecycle sync.Mutex
	started   bool
	cancel    context.CancelFunc // ends the sequencer at once
	stopped   chan struct{}      // closed when the sequencer has ended
}

// Stats are the counts of a log; those but Size and Backlog begin at Open.
type Stats struct {
	// Size is the number of entries in the tree.
	Size int64
	// Refused is the number of events that went into the tree without a token.
	Refused int64
	// Damaged is the number of waiting events that did not open at the last scan.
	Damaged int64
	// Retries is the number of moves that failed and were retried.
	Retries int64
	// Backlog has the events that are not in the tree yet.
	Backlog Backlog
}

// Open reads the signed head and the right edge of the tree. The error is ErrTampered if
// they do not match each other or Options.Known. Start then moves events into the tree.
func Open(ctx context.Context, o Options) (*Log, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if o.HeadSigner == nil {
		return nil, errors.New("ledger: a log needs a signer of its heads")
	}
	l := &Log{logStore: newLogStore(&o), options: o, signer: o.HeadSigner, stopped: make(chan struct{})}
	_, _ = rand.Read(l.boot[:]) // never fails
	s, err := l.load(ctx)
	if err != nil {
		return nil, err
	}
	for _, known := range o.Known {
		if err := s.contains(ctx, l.logStore, &known); err != nil {
			return nil, err
		}
	}
	if s, err = l.ensureHead(ctx, s); err != nil {
		return nil, err
	}
	l.now.Store(s)
	last, waiting, err := l.countWaiting(ctx)
	if err != nil {
		return nil, err
	}
	l.queue = newQueue(last+1, o.MaxBacklog, o.MaxAge)
	l.queue.setInherited(waiting)
	l.places.log = l
	l.places.sequence.Assemble = l.places.assemble
	return l, nil
}

// ensureHead signs the first head of an empty log, and signs the head anew after a change
// of the key.
func (l *Log) ensureHead(ctx context.Context, s *state) (*state, error) {
	key, err := l.keys.Verifier(l.signer.Name(), l.signer.KeyHash())
	if err != nil {
		return nil, fmt.Errorf("ledger: the keys of the heads lack the signer's: %w", err)
	}
	mine := note.VerifierList(key)
	condition := store.Absent()
	if s.version != 0 {
		if _, err := ParseHead(s.head.Note, l.origin, mine); err == nil {
			return s, nil
		}
		condition = store.VersionIs(s.version)
	}
	head, err := l.sign(s.tree)
	if err != nil {
		return nil, err
	}
	if _, err := ParseHead(head.Note, l.origin, mine); err != nil {
		return nil, fmt.Errorf("ledger: the signer of heads does not fit its key: %w", err)
	}
	version, err := l.store.Commit(ctx, store.Write{Key: l.headKey(), Value: head.Note, If: condition})
	if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
		return l.load(ctx) // another process of this node did it
	}
	if err != nil {
		return nil, err
	}
	return &state{tree: s.tree, head: head, version: version, recorded: s.recorded}, nil
}

// countWaiting counts the events in the outbox; last is their highest number, or 0.
func (l *Log) countWaiting(ctx context.Context) (last uint64, waiting int, err error) {
	for e, err := range l.store.Scan(ctx, store.Prefix(logKey(spaceOutbox, l.id, 0))) {
		if err != nil {
			return 0, 0, err
		}
		if t, ok := ticketIn(e.Key); ok {
			last, waiting = t.number, waiting+1
		}
	}
	return last, waiting, nil
}

// sign makes the head of a tree.
func (l *Log) sign(t *tree) (Head, error) {
	h := Head{Origin: l.origin, Size: t.size, Root: t.root()}
	msg, err := note.Sign(&note.Note{Text: headText(h.Origin, h.Size, h.Root)}, l.signer)
	if err != nil {
		return Head{}, fmt.Errorf("signing the head: %w", err)
	}
	h.Note = msg
	return h, nil
}

// Start starts the sequencer, once.
func (l *Log) Start() {
	l.lifecycle.Lock()
	defer l.lifecycle.Unlock()
	if l.started {
		return
	}
	l.started = true
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	go l.run(ctx)
}

// Close refuses new events and lets the sequencer empty the outbox until ctx ends; what is
// left is moved by the next process. Callers should end their commits first.
func (l *Log) Close(ctx context.Context) error {
	l.queue.close(ErrClosed)
	l.lifecycle.Lock()
	started := l.started
	l.started = true // nothing starts after a close
	l.lifecycle.Unlock()
	if !started || l.cancel == nil {
		return nil
	}
	defer l.cancel()
	select {
	case <-l.stopped:
		return nil
	case <-ctx.Done():
		l.cancel()
		<-l.stopped
		return ctx.Err()
	}
}

// MaxEvents is the largest number of events of one Record, so that a batch has room for
// the state change that they describe.
const MaxEvents = 16

// Record makes the batch that records 1 to MaxEvents events in their order, with at most
// four writes for each. The caller adds it to the commit of the state change that the
// events describe, and must not change slices of the events afterwards. The error is
// ErrInvalid, ErrDuplicate, or the reason why the log is closed.
//
// The caller must end the batch, which wakes the sequencer. The batch fails with
// ErrDuplicate if a workflow already has one of the ids.
func (l *Log) Record(events ...Event) (*store.Batch, error) {
	if len(events) == 0 || len(events) > MaxEvents {
		return nil, fmt.Errorf("%w: %d events at once, from 1 to %d", ErrInvalid, len(events), MaxEvents)
	}
	for i := range events {
		if err := events[i].check(); err != nil {
			return nil, err
		}
		if events[i].Unsigned && l.options.Sign == nil {
			return nil, fmt.Errorf("%w: unsigned, and the log has no signer", ErrInvalid)
		}
		if events[i].Header != nil && l.options.Signature == nil {
			return nil, fmt.Errorf("%w: a header, and the log does not sign", ErrInvalid)
		}
	}
	kept, n := make([]hashedEvent, len(events)), len(events)
	for i := range events {
		kept[i].Event = events[i]
	}
	direct := l.sequencing && !slices.ContainsFunc(events, func(e Event) bool { return e.Unsigned })
	first, direct, err := l.queue.open(kept, direct)
	if err != nil {
		return nil, err
	}
	writes, placed, err := l.recordWrites(kept, first, direct)
	if err != nil {
		l.queue.committed(first, n, err)
		return nil, err
	}
	b := store.NewBatch(writes...)
	b.OnDone(func(err error) error {
		if err == nil && len(placed) > 0 && placed[0].placed { // they are in the tree together, or none is
			l.queue.placed(first, n, l.options.Placed != nil)
			return nil
		}
		l.queue.committed(first, n, err)
		if store.Lost(err, writes) { // the failed condition is of an event, not of another write
			return fmt.Errorf("%w: %w", ErrDuplicate, err)
		}
		return err
	})
	return b, nil
}

// hashedEvent is an event with the hashes of its names, which are computed once.
type hashedEvent struct {
	Event
	names names
}

// recordWrites makes the writes that record events: with direct in the tree, else in the outbox. first is the ticket
// of the first. The error is ErrDuplicate if two events have the same id.
func (l *Log) recordWrites(events []hashedEvent, first uint64, direct bool) (_ []store.Write, placed []*placement, _ error) {
	writes := make([]store.Write, 0, 4*len(events))
	// add adds a write, and reports false if an earlier one conflicts with it.
	add := func(w store.Write) bool {
		for i := range writes {
			if there := &writes[i]; bytes.Equal(there.Key, w.Key) {
				return there.Delete == w.Delete && len(there.Value)+len(w.Value) == 0 && there.Place == nil && w.Place == nil
			}
		}
		writes = append(writes, w)
		return true
	}
	work := scratch.Get().(*[2][]byte)
	defer scratch.Put(work)
	for i := range events {
		e, t := &events[i].Event, ticket{first + uint64(i), l.boot}
		events[i].names = l.namesOf(e.Workflow, e.ID)
		n := &events[i].names
		var unique bool
		if direct {
			w, one := l.places.place(&events[i], t.number)
			placed, unique = append(placed, one), add(w)
		} else {
			work[0] = e.encode(work[0][:0])
			plain := work[0]
			if !e.Unsigned && e.Header == nil {
				work[1] = pack(work[1][:0], plain, e.Payload)
				plain = work[1]
			}
			memory := arena{b: make([]byte, 0, idKeySize+locationSize+outboxKeySize+len(plain)+sealedMore)}
			id := memory.cut(n.appendID(memory.b, spaceID))
			where := location{log: l.id, waiting: true, ticket: t}
			unique = add(store.Write{Key: id, If: store.Absent(), Value: memory.cut(where.encode(memory.b))})
			key := memory.cut(l.outboxKey(memory.b, t))
			writes = append(writes, store.Write{Key: key, Value: memory.cut(l.sealer.Seal(memory.b, plain, key))})
		}
		// An id must not be used both with and without a workflow: the key of the other use
		// must be absent. The gateway generates the ids of its own events, so they are new.
		switch {
		case e.Unsigned, e.Header != nil:
		case e.Workflow == "":
			unique = unique && add(store.Write{Key: n.appendGiven(nil), If: store.Absent(), Delete: true})
		default:
			alone := names{n.id, l.none}
			unique = unique && add(store.Write{Key: alone.appendID(nil, spaceID), If: store.Absent(), Delete: true}) &&
				add(store.Write{Key: n.appendGiven(nil), Expires: e.KeepUntil})
		}
		if !unique {
			return nil, nil, fmt.Errorf("%w: twice in one commit", ErrDuplicate)
		}
	}
	return writes, placed, nil
}

// Given returns the write by which an id that gets no entry, such as that of a token that came with a read, is not used
// both with and without a workflow. With a workflow it marks the id until the given time; without one it is the
// condition that the id is not marked. Record does the same for events.
func (l *Log) Given(workflow, id string, until time.Time) store.Write {
	n := l.namesOf(workflow, id)
	if workflow == "" {
		return store.Write{Key: n.appendGiven(nil), If: store.Absent(), Delete: true}
	}
	return store.Write{Key: n.appendGiven(nil), Expires: until}
}

// IsGiven reports whether some workflow has given the id.
func (l *Log) IsGiven(ctx context.Context, id string) (bool, error) {
	n := l.namesOf("", id)
	_, err := l.store.Get(ctx, n.appendGiven(nil))
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// scratch holds buffers for encoding.
var scratch = sync.Pool{New: func() any { return new([2][]byte) }}

// sealedMore is more than sealing adds to a value.
const sealedMore = 64

// arena is memory for many small values that live equally long.
type arena struct{ b []byte }

// cut returns what was appended to b, which must be the result of that.
func (a *arena) cut(b []byte) []byte {
	from := len(a.b)
	a.b = b
	return b[from:len(b):len(b)]
}

// Append commits events together with more writes and returns when they are durable. Those in the outbox get into the
// tree later: see Wait. The errors are those of Record and of
// the store.
func (l *Log) Append(ctx context.Context, events []Event, more ...store.Write) error {
	b, err := l.Record(events...)
	if err != nil {
		return err
	}
	b.Add(more...)
	return b.Commit(ctx, l.store)
}

// In returns a log of the store by its origin, as it stands now: this one, or one that another process
// writes, of which a Log to read is returned. That one records, prunes and re-seals nothing. The error is
// ErrNotFound, or ErrTampered if its head does not verify, or does not extend what was read of it before.
func (l *Log) In(ctx context.Context, origin string) (*Log, error) {
	if origin == l.options.Origin {
		return l, nil
	}
	if l.options.KeysOf == nil {
		return nil, ErrNotFound
	}
	if found, ok := l.others.Load(origin); ok {
		other := found.(*Log)
		for {
			s := other.now.Load()
			next, err := other.advance(ctx, s)
			if err != nil {
				return nil, err
			}
			if other.now.CompareAndSwap(s, next) {
				return other, nil
			}
		}
	}
	o := l.options
	o.Origin, o.HeadSigner, o.Sign, o.Known, o.Placed = origin, nil, nil, nil, nil
	if err := o.complete(); err != nil { // whoever asks may name anything
		return nil, ErrNotFound
	}
	if there, err := Exists(ctx, l.store, l.sealer, origin); err != nil || !there {
		return nil, cmp.Or(err, ErrNotFound)
	}
	var err error
	if o.HeadKeys, err = l.options.KeysOf(origin); err != nil {
		return nil, err
	}
	other := &Log{logStore: newLogStore(&o), options: o, queue: newQueue(1, o.MaxBacklog, o.MaxAge), stopped: l.stopped}
	other.queue.close(ErrClosed)
	s, err := other.load(ctx)
	if err != nil {
		return nil, err
	}
	other.now.Store(s)
	found, _ := l.others.LoadOrStore(origin, other)
	return found.(*Log), nil
}

// Logs are the origins of all logs of the store, in order. Those whose heads cannot be read are left out.
func (l *Log) Logs(ctx context.Context) (all []string, err error) {
	for found, err := range l.store.Scan(ctx, store.Prefix([]byte{space, spaceHead})) {
		if err != nil {
			return nil, err
		}
		head, err := parseHeadText(noteText(found.Value))
		if err != nil || !bytes.Equal(found.Key, logKey(spaceHead, logOf(l.sealer, head.Origin), 0)) {
			continue
		}
		all = append(all, head.Origin)
	}
	slices.Sort(all)
	return all, nil
}

// Exists reports whether a store has the log of that origin.
func Exists(ctx context.Context, st store.Store, sealer store.Sealer, origin string) (bool, error) {
	_, err := st.Get(ctx, logKey(spaceHead, logOf(sealer, origin), 0))
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Waiting counts the events in the outbox of the log, whoever has recorded them.
func (l *Log) Waiting(ctx context.Context) (int, error) {
	_, waiting, err := l.countWaiting(ctx)
	return waiting, err
}

// Origin is the log's name.
func (l *Log) Origin() string { return l.origin }

// Head is the newest signed head.
func (l *Log) Head() Head {
	head := l.now.Load().head
	head.Note = bytes.Clone(head.Note)
	return head
}

// Stats returns the log's counts.
func (l *Log) Stats() Stats {
	return Stats{
		Size: l.now.Load().size, Refused: l.refused.Load(), Damaged: l.damaged.Load(), Retries: l.retries.Load(),
		Backlog: l.queue.backlog(),
	}
}

// Export writes the whole log up to its newest head and verifies it on the way. Events are
// not encrypted in the export. The error is ErrTampered, or one of the store or of to.
func (l *Log) Export(ctx context.Context, to io.Writer) (Head, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	x := exporter{Log: l, state: l.now.Load(), ctx: ctx, w: bufio.NewWriterSize(to, 64<<10)}
	return x.export()
}

// Verify reads the whole log from the store and reports alterations. It compares every
// entry with its hash and index, every stored hash with those below it, the root with the
// signed head, the key indexes with the entries, and the tree with the known heads. The
// error is one of the store.
func (l *Log) Verify(ctx context.Context, known ...Head) (Report, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	return l.verify(ctx, slices.Concat([]Head{l.Head()}, known, l.options.Known))
}
