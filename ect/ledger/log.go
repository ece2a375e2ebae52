// Package ledger is an append-only log of events: a Merkle tree (RFC 6962) over a
// store.Store, whose heads are signed notes.
//
// [Log.Record] makes writes for the commit of the state change that an event describes, so that both are durable or
// neither. With that commit the event is in the tree, under a head that is signed once for a group of commits. What a
// group adds is conditional on the head before it: of two processes on one log one loses, and goes on from the head of
// the other.
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

	"github.com/google/uuid"
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
	// maxParents is the largest number of parents.
	maxParents = 100

	maxIssuer = 2048
	maxHeader = 512
	// maxSignature is the longest signature, in bytes.
	maxSignature = 512
	maxLinks     = maxParents + 1 // further ids under which an event is found
	// maxLeaf is the longest encoding of an entry, in bytes.
	maxLeaf = MaxPayload + maxIssuer + 3*MaxName + maxParents*(MaxName+fieldOverhead) + fixedOverhead
)

// Canonical writes an id as logs have it: a UUID in lower case.
func Canonical(id string) string {
	if u, err := uuid.Parse(id); err == nil && len(id) == len(u.String()) {
		return u.String()
	}
	return id
}

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
	// Parsed is the parsed Payload, for Options.Links. It is not recorded.
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

// in is e as an entry of that log.
func (e Entry) in(log string) Entry { return Entry{e.Event, log, e.Index, e.Recorded, e.Leaf} }

// Errors of a log.
var (
	// ErrInvalid: the event, the page or the cursor breaks a limit.
	ErrInvalid = errors.New("ledger: invalid event")
	// ErrDuplicate: the workflow has an event with this id.
	ErrDuplicate = errors.New("ledger: an event with this id is recorded")
	// ErrNotFound: no such entry.
	ErrNotFound = errors.New("ledger: not found")
	// ErrPruned: the entry's content was pruned; its hash is still in the tree.
	ErrPruned = errors.New("ledger: the entry was pruned")
	// ErrTampered: the content of the store was altered, or replaced by an older copy. The
	// log accepts no further events.
	ErrTampered = errors.New("ledger: the log was altered")
	// ErrClosed: the log was closed.
	ErrClosed = errors.New("ledger: closed")
	// ErrNoToken: the entry has no token, or the key that its Header names is gone.
	ErrNoToken = errors.New("ledger: the entry has no token")
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
	case len(e.Parents) > maxParents:
		return fmt.Errorf("%w: %d parents, at most %d", ErrInvalid, len(e.Parents), maxParents)
	case len(e.Payload) == 0 || len(e.Payload) > MaxPayload:
		return fmt.Errorf("%w: payload of %d bytes, from 1 to %d", ErrInvalid, len(e.Payload), MaxPayload)
	case len(e.Header) > maxHeader || e.Header != nil && (len(e.Header) == 0 || len(e.Payload) > MaxClaims):
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
	// Signature signs the token of an entry with a Header, when somebody asks for it: always
	// the same bytes. An error says that the key is gone. If nil, such events are invalid.
	Signature func(header, payload []byte) ([]byte, error)
	// Verifies says whether the key that a header names is known, and whether a stored
	// signature holds under it. If nil, none is known.
	Verifies func(header, payload, signature []byte) (holds, known bool)
	// Links returns the ids in the event's workflow under which Following finds it, such
	// as its parents; those beyond 101 are ignored. It must be deterministic. Nil is none.
	Links func(e *Event) []string
	// Placed gets each event that this handle has recorded once it is in the tree, in the order of the tree and on one
	// goroutine: it must not keep the event without a copy. Nil is nobody.
	Placed func(e *Event, recorded time.Time)
	// KeysOf returns the public keys of the heads of another log of the store, by its origin, so that
	// it can be read and verified here: see In. If nil, none is known.
	KeysOf func(origin string) (note.Verifiers, error)
	// Known are earlier heads that were kept outside the store. Open returns ErrTampered
	// if the log does not extend them.
	Known []Head
	// Logger gets what is found on the way and has no caller; nil discards it.
	Logger *slog.Logger
}

func (o *Options) complete() error {
	if o.Store == nil || o.Sealer == nil || o.HeadKeys == nil {
		return errors.New("ledger: a log needs a store, a sealer and the keys of its heads")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.KeysOf == nil {
		o.KeysOf = func(string) (note.Verifiers, error) { return nil, ErrNotFound }
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
	places   placements
	now      atomic.Pointer[state] // the newest that this process has read or written
	pruning  sync.Mutex            // excludes pruning, exporting, verifying and re-sealing
	reported reported              // entries that cannot be pruned; guarded by pruning
	origins  sync.Map              // logID -> string, of the other logs of the store
	others   sync.Map              // origin -> *Log, of the other logs of the store

	overtaken atomic.Bool           // another process has written the head, or something stands beyond the end
	ended     atomic.Pointer[error] // why nothing is recorded any more
	commits   commits
}

// Open reads the signed head and the right edge of the tree. The error is ErrTampered if
// they do not match each other or Options.Known.
func Open(ctx context.Context, o Options) (*Log, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if o.HeadSigner == nil {
		return nil, errors.New("ledger: a log needs a signer of its heads")
	}
	l := &Log{
		logStore: newLogStore(&o), options: o, signer: o.HeadSigner,
		reported: reported{make(map[int64]bool)}, commits: commits{last: new(sync.WaitGroup)},
	}
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

// Close refuses new events, and waits until Options.Placed was called for all that are in the tree. Callers should end
// their commits first.
func (l *Log) Close(ctx context.Context) error {
	l.end(ErrClosed)
	return l.places.wait(ctx)
}

// end refuses new events with the error why. Later calls change nothing.
func (l *Log) end(why error) { l.ended.CompareAndSwap(nil, &why) }

// usable reports whether events can be recorded: the error is ErrClosed, ErrTampered, or one of the store.
func (l *Log) usable() error {
	if ended := l.ended.Load(); ended != nil {
		return *ended
	}
	if !l.overtaken.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), overtakenTime)
	defer cancel()
	err := l.goOn(ctx)
	if errors.Is(err, ErrTampered) {
		l.end(err)
	}
	return err
}

// overtakenTime bounds the reading of what another process has written.
const overtakenTime = 5 * time.Second

// goOn continues from the head of another process, if its tree extends the known one.
func (l *Log) goOn(ctx context.Context) error {
	before := l.now.Load()
	next, err := l.advance(ctx, before)
	if err == nil && next == before {
		err = l.nothingAbove(ctx, before.size)
	}
	if err == nil {
		l.now.CompareAndSwap(before, next)
		l.overtaken.Store(false)
	}
	return err
}

// MaxEvents is the largest number of events of one Record, so that a batch has room for
// the state change that they describe.
const MaxEvents = 16

// Record makes the batch that records 1 to MaxEvents events in their order, with at most three writes for each. The
// caller adds it to the commit of the state change that the events describe, and must not change slices of the events
// afterwards. The error is ErrInvalid, ErrDuplicate, ErrClosed, ErrTampered,
// or one of the store.
//
// The caller must end the batch. It fails with ErrDuplicate if a workflow already has one of the ids.
func (l *Log) Record(events ...Event) (*store.Batch, error) {
	if len(events) == 0 || len(events) > MaxEvents {
		return nil, fmt.Errorf("%w: %d events at once, from 1 to %d", ErrInvalid, len(events), MaxEvents)
	}
	for i := range events {
		if err := events[i].check(); err != nil {
			return nil, err
		}
		if events[i].Header != nil && l.options.Signature == nil {
			return nil, fmt.Errorf("%w: a header, and the log does not sign", ErrInvalid)
		}
	}
	if err := l.usable(); err != nil {
		return nil, err
	}
	kept := make([]hashedEvent, len(events))
	for i := range events {
		kept[i].Event = events[i]
	}
	writes, err := l.recordWrites(kept)
	if err != nil {
		return nil, err
	}
	ended := l.commits.begin()
	b := store.NewBatch(writes...)
	b.OnDone(func(err error) error {
		ended()
		if store.Lost(err, writes) { // the failed condition is of an event, not of another write
			return fmt.Errorf("%w: %w", ErrDuplicate, err)
		}
		return err
	})
	return b, nil
}

// commits are the batches that have not ended.
type commits struct {
	mu   sync.Mutex
	last *sync.WaitGroup // replaced by whoever waits for them
}

func (c *commits) begin() (ended func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last.Add(1)
	return c.last.Done
}

// await waits until the batches that were made before have ended.
func (c *commits) await(ctx context.Context) error {
	c.mu.Lock()
	commits, later := c.last, new(sync.WaitGroup)
	later.Add(1) // whoever waits later waits for the same ones
	c.last = later
	c.mu.Unlock()
	done := make(chan struct{})
	go func() {
		commits.Wait()
		later.Done()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// hashedEvent is an event with the hashes of its names, which are computed once.
type hashedEvent struct {
	Event
	names names
}

// recordWrites makes the writes that record events. The error is ErrDuplicate if two events have the same id.
func (l *Log) recordWrites(events []hashedEvent) ([]store.Write, error) {
	writes := make([]store.Write, 0, 3*len(events))
	// add adds a write, and reports false if an earlier one conflicts with it.
	add := func(w store.Write) bool {
		for i := range writes {
			if there := &writes[i]; bytes.Equal(there.Key, w.Key) {
				return there.Delete == w.Delete && there.Place == nil && w.Place == nil
			}
		}
		writes = append(writes, w)
		return true
	}
	for i := range events {
		e := &events[i].Event
		events[i].names = l.namesOf(e.Workflow, e.ID)
		n := &events[i].names
		unique := add(l.places.place(&events[i]))
		// An id must not be used both with and without a workflow: the key of the other use
		// must be absent. The gateway generates the ids of its own events, so they are new.
		switch {
		case e.Header != nil:
		case e.Workflow == "":
			unique = unique && add(store.Write{Key: n.appendGiven(nil), If: store.Absent(), Delete: true})
		default:
			alone := names{n.id, l.none}
			unique = unique && add(store.Write{Key: alone.appendID(nil, spaceID), If: store.Absent(), Delete: true}) &&
				add(store.Write{Key: n.appendGiven(nil), Expires: e.KeepUntil})
		}
		if !unique {
			return nil, fmt.Errorf("%w: twice in one commit", ErrDuplicate)
		}
	}
	return writes, nil
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

// arena is memory for many small values that live equally long.
type arena struct{ b []byte }

// cut returns what was appended to b, which must be the result of that.
func (a *arena) cut(b []byte) []byte {
	from := len(a.b)
	a.b = b
	return b[from:len(b):len(b)]
}

// Append commits events together with more writes and returns when they are durable. The errors are those of Record and
// of the store.
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
	o.Origin, o.HeadSigner, o.Known, o.Placed = origin, nil, nil, nil
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
	other := &Log{logStore: newLogStore(&o), options: o}
	other.end(ErrClosed)
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

// Origin is the log's name.
func (l *Log) Origin() string { return l.origin }

// Head is the newest signed head.
func (l *Log) Head() Head {
	head := l.now.Load().head
	head.Note = bytes.Clone(head.Note)
	return head
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
