package execution

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Execution is a call that this process owns. It is settled once.
type Execution struct {
	g       *Guard
	flight  *Flight
	record  Record
	version store.Version
	usage   *held // nil where its caller has no quota
	holding holding
	keeper  *keeper
	attempt *Attempt // nil for a call whose key is its caller's word
	carried Carried  // by the commit of its outcome; nil where an outcome that could not be recorded is a doubt
	// recorded gets the record of an outcome that the store takes only later (ADR 0147); else nil.
	recorded *Record
}

// Recording takes the answer as it arrives.
func (e *Execution) Recording() *Recording { return &e.flight.recording }

// Claim is that of the record.
func (e *Execution) Claim() [16]byte { return e.record.Claim }

// Write records the next bytes of the answer's body and stores full pieces at once, so that
// settling waits only for the last one (P7). needed says that the owner's client will read these
// bytes back; recorded says whether it can: not if the disk has no room for them.
func (e *Execution) Write(p []byte, needed bool) (recorded bool) {
	recorded = e.flight.recording.add(p, needed)
	if e.keeper == nil && e.flight.recording.written() >= pieceSize {
		e.keeper = newKeeper(e)
	}
	if e.keeper != nil {
		e.keeper.grown()
	}
	return recorded
}

// Outcome is how an execution ended.
type Outcome struct {
	Verdict Verdict
	Cause   Cause
	// Status is that of the upstream's answer, 0 without one.
	Status int
	// Internal says that the answer reports an internal error, which clients try again as they do a
	// status of 500.
	Internal bool
	// Task is the id of the task that an answer in doubt names; empty without one.
	Task string
	// Upstream is the address of the upstream that failed; empty if none did, or it is unknown. It is not part
	// of the record.
	Upstream string
	// Whole says that the recorded answer is complete. Followers get all of it, also if the key
	// is released or in doubt.
	Whole bool
}

// Settle records the outcome and wakes the followers. The commit carries the batches of other
// packages and ends them. It is called once.
//
// ErrUnrecorded means that the record was not written: the execution is in doubt and must be
// reported so. It is recorded as such as soon as the store takes that.
func (e *Execution) Settle(ctx context.Context, o Outcome, batches ...*store.Batch) error {
	err := e.settle(ctx, o, batches)
	ending, unrecorded := EndedInDoubt, err != nil
	var pending *pendingOutcome
	switch {
	case err != nil:
		left := e.record.unrecorded(e.keeper)
		lose(e.usage, e.flight.key, left)
		e.holding.end(false, e.flight.key, left)
		pending = e.g.pending.hold(e, &o, left, err)
		err = fmt.Errorf("%w: %w", ErrUnrecorded, err)
	case o.Whole:
		ending = endedAnswered
	case o.Verdict == Released:
		ending = endedUnsent
	}
	if e.attempt != nil {
		if unrecorded {
			o.Verdict = InDoubt
		}
		e.attempt.settled(&o, e.record.Settled, e.record.KeepKey, !unrecorded)
	}
	err = done(err, batches)
	e.holding.end(true, e.flight.key, nil)
	e.g.quotas.leave(e.usage) // before the followers wake, since one of them may claim
	e.g.flights.end(e.flight, ending)
	e.g.running.leave()
	switch {
	case pending != nil:
		pending.busy.leave()
	case unrecorded && !gone(err): // else whoever opens the store next finds it open
		e.g.pending.drop()
	}
	return err
}

func (e *Execution) settle(ctx context.Context, o Outcome, batches []*store.Batch) error {
	g := e.g
	defer g.writers.Enter()()
	var tail []byte
	var pieces pieces
	if e.keeper != nil {
		pieces = e.keeper.finish()
	}
	if e.attempt != nil {
		before, err := g.store.Now(ctx)
		if err != nil {
			return err
		}
		e.attempt.runs(before)
	}
	now, err := g.store.Now(ctx)
	if err != nil {
		return err
	}
	e.record.Settled = now
	if o.Verdict == Released {
		if batches, err = e.discard(ctx, pieces.stored, batches); err != nil {
			return err
		}
		batch := g.put(e.flight.key, &e.record, nil, store.VersionIs(e.version), batches...)
		if r := &e.record; r.Group != (groupHash{}) {
			batch = append(batch, store.Write{Key: appendRowKey(nil, r.Group, e.flight.key),
				Value: appendRow(nil, markReleased, r.Count, now), Expires: now.Add(r.Window)})
		}
		_, err := g.store.Commit(ctx, batch...)
		return err
	}
	record := e.record
	record.Cause, record.Status, record.Internal = o.Cause, o.Status, o.Internal
	if o.Verdict == InDoubt {
		if record.State = StateInDoubt; len(o.Task) <= maxRecordedText { // a part of it names another one
			record.Task = o.Task
		}
		if batches, err = e.discard(ctx, pieces.stored, batches); err != nil {
			return err
		}
		return e.keep(ctx, &record, nil, batches)
	}
	if e.waits(pieces.err) {
		return pieces.err
	}
	record.State = StateCompleted
	buf := scratch.Get().(*[]byte)
	defer freeScratch(buf)
	until := now.Add(record.KeepResult)
	if early := record.piecesUntil(); pieces.stored > 0 && early.Before(until) {
		until = early // a stream has no deadline
	}
	if tail = pieces.rest((*buf)[:0], &e.flight.recording, &record, until); tail != nil {
		*buf = tail
	}
	if r := &record.Result; r.Kept {
		if err = e.holding.room(r.Size + int64(len(r.Inline))); err == nil {
			err = e.keep(ctx, &record, tail, batches)
			if conflict := (*store.Conflict)(nil); err == nil || tail == nil || errors.As(err, &conflict) {
				return err
			}
		}
		if e.waits(err) {
			return err
		}
	}
	// The answer does not fit; the key must be kept all the same (P1).
	record.Result = storedResult{}
	if batches, err = e.discard(ctx, pieces.stored, batches); err != nil {
		return err
	}
	return e.keep(ctx, &record, nil, batches)
}

// SettleWith is Settle for an outcome that is recorded also if the store takes it only later, with what it carries made
// anew (ADR 0147).
func (e *Execution) SettleWith(ctx context.Context, o Outcome, carried Carried, batches ...*store.Batch) error {
	if e.keeper != nil {
		e.keeper.halt() // which reads it
	}
	e.carried = carried
	return e.Settle(ctx, o, batches...)
}

// waits reports that the outcome waits with its answer for a store that has failed with err. An embedded store that is
// nearly full still takes outcomes without their answers; a database promises no such room, and an outcome that has
// waited anyway does so until both fit.
func (e *Execution) waits(err error) bool {
	full := e.carried != nil && (e.g.members.store != nil || e.recorded != nil)
	return away(err) || full && errors.Is(err, store.ErrFull)
}

// discard deletes the first n pieces of an answer that is not kept: with batches, but for those that one commit
// has no room for. The last ones go first, since a crash leaves what discarded finds.
func (e *Execution) discard(ctx context.Context, n int, batches []*store.Batch) ([]*store.Batch, error) {
	writes, err := e.g.discarded(ctx, e.flight.key, e.record.Claim, n)
	if len(writes) == 0 || err != nil {
		return batches, err
	}
	return append(slices.Clip(batches), store.NewBatch(writes...)), nil
}

// unrecorded is a record whose outcome is not recorded, as it is read until this process ends, with the pieces
// that are left.
func (r *Record) unrecorded(k *keeper) *Record {
	left := *r
	left.Cause, left.Settled = CauseUnrecorded, time.Time{}
	if k != nil {
		left.Result = storedResult{Size: int64(k.pieces.stored) * pieceSize, Expires: r.piecesUntil()}
	}
	return &left
}

// atOnce is how many pieces are deleted in one commit.
const atOnce = store.MaxBatch / 2

// discarded are the deletions of the first pieces of an answer. It has deleted those behind them.
func (g *Guard) discarded(ctx context.Context, key Key, claim [16]byte, n int) ([]store.Write, error) {
	for {
		var writes []store.Write
		from := max(n-1, 0) / atOnce * atOnce
		for i := from; i < n; i++ {
			writes = append(writes, store.Write{Key: pieceKey(key, claim, firstPiece+i), Delete: true})
		}
		if from == 0 {
			return writes, nil
		}
		if _, err := g.store.Commit(ctx, writes...); err != nil {
			return nil, err
		}
		n = from
	}
}

// piecesOf is how many pieces of an answer a process has left behind.
func (g *Guard) piecesOf(ctx context.Context, key Key, claim [16]byte) (int, error) {
	var err error
	there := func(n int) bool {
		_, missing := g.store.Get(ctx, pieceKey(key, claim, firstPiece+n))
		if missing != nil && !errors.Is(missing, store.ErrNotFound) && !errors.Is(missing, store.ErrDamaged) {
			err = missing
		}
		return !errors.Is(missing, store.ErrNotFound)
	}
	most := 1
	for there(most-1) && err == nil {
		most *= 2
	}
	n := sort.Search(most-1, func(n int) bool { return !there(n) })
	return n, err
}

// keep records the settled execution, with its answer where tail is not nil.
func (e *Execution) keep(ctx context.Context, record *Record, tail []byte, batches []*store.Batch) error {
	room := rooms.Get().(*room)
	defer room.free()
	e.g.putIn(room, e.flight.key, &e.record, record, store.VersionIs(e.version), batches...)
	e.g.putTail(room, e.flight.key, record, tail)
	_, err := e.g.store.Commit(ctx, room.writes...)
	if err == nil {
		settled(e.usage, record)
		e.holding.end(true, e.flight.key, record)
		if e.recorded != nil {
			*e.recorded = *record
		}
	}
	return err
}

// Ending is how a running execution ended, for the calls that wait for it.
type Ending uint8

// The endings.
const (
	// endedAnswered: the answer is whole and for all waiting calls, whatever became of the key.
	endedAnswered Ending = 1 + iota
	// endedUnsent: proven unsent. Exactly one waiting call may claim the key and run; the others
	// follow it.
	endedUnsent
	// EndedInDoubt: no whole answer, and an unknown outcome.
	EndedInDoubt
)

func (e Ending) whole() bool { return e == endedAnswered }

// Flight is an execution that runs in this process.
type Flight struct {
	key         Key
	fingerprint body.Fingerprint
	caller      CallerHash
	id          string
	checkpoint  string
	recording   Recording
	done        chan struct{}
	exported    atomic.Bool // to other members
	ending      Ending      // valid once done is closed
	owner       Execution   // what its owner holds, in one piece of memory with it
}

// follow reads the flight's answer from its beginning; nil if it is too large for new followers.
func (f *Flight) follow() *Follower { return f.recording.follow() }

// Checkpoint is the id of the token that announced the execution; empty without one.
func (f *Flight) Checkpoint() string { return f.checkpoint }

// Done is closed when the execution is settled.
func (f *Flight) Done() <-chan struct{} { return f.done }

// Ending is how the execution ended. It is valid once Done is closed.
func (f *Flight) Ending() Ending { return f.ending }

// flights is the table of running executions: the first caller owns a key until its final state
// is readable in the store.
type flights [64]struct {
	sync.Mutex
	m map[Key]*Flight
}

func (t *flights) find(key Key) *Flight {
	shard := &t[key[0]%64]
	shard.Lock()
	defer shard.Unlock()
	return shard.m[key]
}

func (t *flights) of(caller CallerHash) bool {
	for i := range t {
		shard := &t[i]
		shard.Lock()
		for _, f := range shard.m {
			if f.caller == caller {
				shard.Unlock()
				return true
			}
		}
		shard.Unlock()
	}
	return false
}

// start registers a flight whose recording shares memory with others; nil if there is one
// already.
func (t *flights) start(c *Call, caller CallerHash, memory *body.Budget) *Flight {
	shard := &t[c.Key[0]%64]
	shard.Lock()
	defer shard.Unlock()
	if shard.m[c.Key] != nil {
		return nil
	}
	f := &Flight{
		key: c.Key, fingerprint: c.Fingerprint, caller: caller, id: c.Scope.ID, checkpoint: c.Checkpoint,
		done: make(chan struct{}),
	}
	f.recording.begin(c.ResultCap, memory)
	if shard.m == nil {
		shard.m = map[Key]*Flight{}
	}
	shard.m[c.Key] = f
	return f
}

func (t *flights) end(f *Flight, e Ending) {
	shard := &t[f.key[0]%64]
	shard.Lock()
	delete(shard.m, f.key)
	shard.Unlock()
	f.ending = e
	close(f.done)
	f.recording.end(e)
}

// Await returns when nothing runs under key any more, here or on another node, or with ctx's
// error.
func (g *Guard) Await(ctx context.Context, key Key) error {
	for {
		over, err := g.awaitChange(ctx, key)
		if over || err != nil {
			return err
		}
	}
}

// awaitChange waits until the execution under key may have ended.
func (g *Guard) awaitChange(ctx context.Context, key Key) (over bool, err error) {
	changed, cancel := g.store.Watch(recordKey(key)) // before the look, so that no change is slept through
	defer cancel()
	left := g.members.store.Left()
	found, err := g.Get(ctx, key)
	switch {
	case errors.Is(err, ErrUnknown):
		return true, nil
	case err != nil:
		return false, err
	case found.Status == RunningHere:
		changed = found.Flight.Done()
	case found.Status != RunningElsewhere:
		return true, nil
	}
	select {
	case <-changed:
		return false, nil
	case <-left:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

const (
	// pieceSize is how much of a body is sealed and stored at a time.
	pieceSize = 256 << 10
	// maxInline is the largest encoded answer within the record itself, which saves a write. The
	// record keeps it as long as the key.
	maxInline = 512
	// lengthSize is the size of the length before the encoded head.
	lengthSize = 4
)

// ErrResultUnavailable: the result is missing or altered in the store. The call was executed and
// does not run again.
var ErrResultUnavailable = errors.New("guard: the recorded result is not available")

// errNotKept: the answer was too large, or a piece of it could not be stored.
var errNotKept = errors.New("guard: the answer is not kept")

// pieces is what was stored of a body so far.
type pieces struct {
	stored int
	err    error // of the next one; what is only away is tried again
}

// keeper stores the full pieces of a growing body in order.
type keeper struct {
	e      *Execution
	wake   chan struct{}
	stop   chan struct{}
	done   chan struct{}
	halted bool // the owner stores what is left
	pieces pieces
}

func newKeeper(e *Execution) *keeper {
	k := &keeper{e: e, wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	go k.run()
	return k
}

// grown signals that the body has grown. It never waits.
func (k *keeper) grown() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// finish stores the remaining full pieces and returns the account. A second call goes on where the store was away.
func (k *keeper) finish() pieces {
	k.halt()
	k.full()
	return k.pieces
}

// halt waits for the piece that is being stored. No other one is stored until finish.
func (k *keeper) halt() {
	if !k.halted {
		close(k.stop)
		<-k.done
		k.halted = true
	}
}

func (k *keeper) run() {
	defer close(k.done)
	for {
		k.full()
		select {
		case <-k.wake:
		case <-k.stop:
			return
		}
	}
}

// full stores the full pieces that are not stored yet.
func (k *keeper) full() {
	for p := &k.pieces; p.err == nil || k.e.waits(p.err); {
		if k.e.flight.recording.written() < int64(p.stored+1)*pieceSize {
			return
		}
		if p.err = k.store(); p.err != nil {
			return
		}
	}
}

func (k *keeper) store() error {
	if k.e.flight.recording.lost() {
		return errNotKept
	}
	if err := k.e.holding.room(int64(k.pieces.stored+1) * pieceSize); err != nil {
		return err
	}
	buf := make([]byte, pieceSize)
	if n, err := k.e.flight.recording.readAt(buf, int64(k.pieces.stored)*pieceSize); n < len(buf) {
		return fmt.Errorf("piece %d has %d bytes: %w", k.pieces.stored, n, err)
	}
	r := &k.e.record
	name := pieceKey(k.e.flight.key, r.Claim, firstPiece+k.pieces.stored)
	defer k.e.g.writers.Enter()()
	write := store.Write{
		Key: name, Value: k.e.g.sealer.Seal(nil, buf, name), Bulk: true,
		Expires: r.piecesUntil(),
	}
	if _, err := k.e.g.store.Commit(context.Background(), write); err != nil {
		return err
	}
	k.pieces.stored++
	return nil
}

// piecesUntil is how long pieces stored early are kept: the result's own time begins at settling,
// at the deadline at the latest unless it is a stream.
func (r *Record) piecesUntil() time.Time { return r.Deadline.Add(r.KeepResult + time.Minute) }

// rest appends the head and the rest of the body to tail, and notes in r where the answer is, until
// when. It returns the head piece to store; nil if the answer is in r itself, or r has no result
// since the answer is not whole, or too large.
func (p *pieces) rest(tail []byte, rec *Recording, r *Record, until time.Time) []byte {
	head, whole := rec.complete()
	if !whole || p.err != nil {
		return nil
	}
	size := int(head.Size - int64(p.stored)*pieceSize)
	tail = head.encode(append(tail[:0], make([]byte, lengthSize)...))
	result := storedResult{Kept: true, Pieces: p.stored, Expires: until}
	inline := p.stored == 0 && len(tail)+size <= maxInline
	if !inline {
		plain := scratch.Get().(*[]byte)
		defer freeScratch(plain)
		replayed := Record{ // what a replay needs
			State: StateCompleted, Claim: r.Claim, Fingerprint: r.Fingerprint, Checkpoint: r.Checkpoint,
			Created: r.Created, First: r.First, Cause: r.Cause, Status: r.Status, Result: result,
		}
		*plain = replayed.encode((*plain)[:0])
		e := store.Encoder{B: tail}
		e.Bytes(tagHeadRecord, *plain)
		tail = e.B
	}
	encoded := len(tail)
	if encoded-lengthSize+size > store.MaxBulk-1024 {
		return nil
	}
	binary.BigEndian.PutUint32(tail, uint32(encoded-lengthSize))
	tail = slices.Grow(tail, size)[:encoded+size]
	left := tail[encoded:]
	if n, _ := rec.readAt(left, int64(p.stored)*pieceSize); n < len(left) {
		return nil
	}
	r.Result = result
	if inline {
		r.Result.Inline = bytes.Clone(tail)
		return nil
	}
	r.Result.Size = int64(p.stored)*pieceSize + int64(len(tail))
	return tail
}

// putTail puts the head piece of an answer in room, unless tail is nil.
func (l *records) putTail(room *room, key Key, record *Record, tail []byte) {
	if tail != nil {
		w := store.Write{Key: room.keep(appendAnswerKey(room.memory, key)), Bulk: true, Expires: record.Result.Expires}
		w.Value = room.keep(l.sealer.Seal(room.memory, tail, w.Key))
		room.writes = append(room.writes, w)
	}
}

// answer is the head piece of a recorded answer.
type answer struct {
	result Result // its head, and the rest of the body after the full pieces
	record Record // what a replay needs of it; empty if the answer is not under appendAnswerKey
}

func decodeAnswer(tail []byte) (*answer, error) {
	if len(tail) < lengthSize || int64(binary.BigEndian.Uint32(tail)) > int64(len(tail)-lengthSize) {
		return nil, ErrResultUnavailable
	}
	size := lengthSize + int(binary.BigEndian.Uint32(tail))
	a := new(answer)
	a.result.rest = tail[size:]
	head := &a.result.Head
	err := head.decode(tail[lengthSize:size])
	if err == nil && head.record != nil {
		err = a.record.decode(head.record)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrResultUnavailable, err)
	}
	return a, nil
}

// answerOf reads the head piece of a recorded answer.
func (g *Guard) answerOf(ctx context.Context, key Key, r *Record) (*answer, error) {
	if r.Result.Inline != nil {
		return decodeAnswer(r.Result.Inline)
	}
	a, err := g.answerUnder(ctx, key)
	if err == nil && a.record.Claim != r.Claim {
		return nil, ErrResultUnavailable
	}
	return a, err
}

func (g *Guard) answerUnder(ctx context.Context, key Key) (*answer, error) {
	name := scratch.Get().(*[]byte)
	defer freeScratch(name)
	*name = appendAnswerKey((*name)[:0], key)
	return g.headPiece(ctx, *name)
}

func (g *Guard) headPiece(ctx context.Context, name []byte) (*answer, error) {
	plain, err := g.piece(ctx, name)
	if err != nil {
		return nil, err
	}
	return decodeAnswer(plain)
}

// Result is a recorded answer.
type Result struct {
	Head Head
	// Created is when the recorded execution was claimed.
	Created time.Time

	g      *Guard
	key    Key
	claim  [16]byte
	pieces int
	rest   []byte
	reader bytes.Reader // of rest
}

// Result reads and verifies the whole answer of a Replayable finding, so that a replay does not
// break off. ErrResultUnavailable means that it is missing or altered.
//
// Sealing verifies it: a piece opens only under its name, with the key, the claim and the piece's
// number, and is written once. The head piece names its claim inside, and how many pieces there are.
func (g *Guard) Result(ctx context.Context, key Key, found Finding) (*Result, error) {
	r, a := found.Record, found.answer
	if a == nil {
		var err error
		if a, err = g.answerOf(ctx, key, r); err != nil {
			return nil, err
		}
	}
	for i := range r.Result.Pieces {
		if _, err := g.piece(ctx, pieceKey(key, r.Claim, firstPiece+i)); err != nil {
			return nil, err
		}
	}
	result := &a.result
	if result.Head.Size != int64(r.Result.Pieces)*pieceSize+int64(len(result.rest)) {
		return nil, ErrResultUnavailable
	}
	result.Created, result.g, result.key, result.claim, result.pieces = r.Created, g, key, r.Claim, r.Result.Pieces
	return result, nil
}

// Body reads the body, a piece at a time. There is one reader at a time.
func (r *Result) Body(ctx context.Context) io.Reader {
	r.reader.Reset(r.rest)
	if r.pieces == 0 {
		return &r.reader
	}
	readers := make([]io.Reader, 0, r.pieces+1)
	for i := range r.pieces {
		readers = append(readers, &pieceReader{ctx: ctx, result: r, piece: firstPiece + i})
	}
	return io.MultiReader(append(readers, &r.reader)...)
}

// pieceReader fetches its piece at the first read.
type pieceReader struct {
	ctx    context.Context
	result *Result
	piece  int
	body   *bytes.Reader
}

func (p *pieceReader) Read(b []byte) (int, error) {
	if p.body == nil {
		piece, err := p.result.g.piece(p.ctx, pieceKey(p.result.key, p.result.claim, p.piece))
		if err != nil {
			return 0, err
		}
		p.body = bytes.NewReader(piece)
	}
	return p.body.Read(b)
}

func (g *Guard) piece(ctx context.Context, name []byte) ([]byte, error) {
	plain, _, err := g.read(ctx, name)
	if err == nil && plain == nil || errors.Is(err, ErrUnreadable) {
		return nil, ErrResultUnavailable
	}
	return plain, err
}

// Head is an answer without its body.
type Head struct {
	Status int
	// Header is the difference that the execution made to the answer's header: names with values
	// were set, names without were removed. Names are canonical.
	Header map[string][]string
	// Trailer holds what came after the body.
	Trailer map[string][]string
	// Size is the body's length in bytes.
	Size int64

	record []byte // see answer; encoded
}

const (
	tagHeadStatus = 1 + iota
	tagHeadSize
	tagHeadName
	tagHeadValue
	tagHeadTrailerName
	tagHeadTrailerValue
	tagHeadRecord
)

const valueMark = "=" // prefix of each value: zero values are not encoded, but empty header values are

func (h *Head) encode(dst []byte) []byte {
	e := store.Encoder{B: dst}
	e.Int(tagHeadStatus, int64(h.Status))
	e.Int(tagHeadSize, h.Size)
	fields := func(fields map[string][]string, name, value byte) {
		for k, values := range fields {
			e.String(name, k)
			for _, v := range values {
				store.Field(&e, value, valueMark, v)
			}
		}
	}
	fields(h.Header, tagHeadName, tagHeadValue)
	fields(h.Trailer, tagHeadTrailerName, tagHeadTrailerValue)
	return e.B
}

// decode reads what encode has written, into an empty h.
func (h *Head) decode(b []byte) error {
	names, values := 0, 0
	for d := (store.Decoder{B: b, Broken: errEncoding}); d.Next(); {
		switch d.Tag {
		case tagHeadName, tagHeadTrailerName:
			names++
		case tagHeadValue, tagHeadTrailerValue:
			values++
		}
	}
	h.Header = make(map[string][]string, names)
	d := store.Decoder{B: b, Broken: errEncoding}
	text := string(b)                  // of which all names and values are parts: one allocation
	lists := make([]string, 0, values) // of which the lists of values are parts
	var fields map[string][]string     // of the name before, whose values follow it
	var name string
	from := 0
	field := func() string {
		end := len(text) - len(d.B)
		return text[end-len(d.Field) : end]
	}
	value := func() string {
		v, ok := strings.CutPrefix(field(), valueMark)
		if !ok {
			d.Err = errEncoding
		}
		return v
	}
	for d.Next() {
		switch d.Tag {
		case tagHeadStatus:
			h.Status = int(d.Int())
		case tagHeadSize:
			h.Size = d.Int()
		case tagHeadName:
			name, fields, from = field(), h.Header, len(lists)
			fields[name] = nil
		case tagHeadTrailerName:
			if h.Trailer == nil {
				h.Trailer = map[string][]string{}
			}
			name, fields, from = field(), h.Trailer, len(lists)
			fields[name] = nil
		case tagHeadValue, tagHeadTrailerValue:
			if fields == nil {
				return errEncoding
			}
			lists = append(lists, value())
			fields[name] = lists[from:len(lists):len(lists)]
		case tagHeadRecord:
			h.record = d.Field
		}
	}
	return d.Err
}
