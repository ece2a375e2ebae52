package rollback

import (
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Journal is what is recorded of a rollback, or known of it here, and not shown.
type Journal struct {
	// Plan is recorded in pieces.
	Plan *Plan `cbor:"-"`
	// Named is as in Request.
	Named string `cbor:"named,omitempty"`
	// Token is the id of the token that has asked for it; empty without.
	Token string `cbor:"token,omitempty"`
	// Decisions are the ids of the tokens of the decisions on it; empty without.
	Decisions []string `cbor:"-"`
	// Unknown says that the effect of a step is unknown, Mixed that some effects were undone and
	// others were not (the heuristic outcomes hazard and mixed of XA).
	Unknown bool `cbor:"unknown,omitempty"`
	Mixed   bool `cbor:"mixed,omitempty"`
	// Content is what makes two requests the same.
	Content []byte `cbor:"content"`
	// Halted says that it has given way to the one that it has joined.
	Halted bool `cbor:"halted,omitempty"`
	// Behind are the rollbacks that come first, Absorbed those that give way to this one.
	Behind   []string `cbor:"behind,omitempty"`
	Absorbed []string `cbor:"absorbed,omitempty"`
	// PartOf is as in Request.
	PartOf string `cbor:"part_of,omitempty"`
	// Precedence is that of the whole, and what participants were told of it; zero is its own.
	Precedence precedence `cbor:"precedence,omitzero"`
	// Until is when the reservation of a prepared one ends.
	Until time.Time `cbor:"until,omitzero"`
	// Aborted says that nothing is undone, since what is critical cannot be (C-4.3.2-h).
	Aborted bool `cbor:"aborted,omitempty"`
	// Questions are what people were asked; Request, of one that is reserved or aborted, is what a plan is made of
	// once more.
	Questions []question `cbor:"questions,omitempty"`
	Request   *Request   `cbor:"request,omitempty"`
	// Boot is that of the member that carries it out; empty where one gateway has the store.
	Boot string `cbor:"boot,omitempty"`
	// Pieces counts those of the plan, whose hash is Hash.
	Pieces int    `cbor:"pieces"`
	Hash   []byte `cbor:"hash"`

	version store.Version // of the record that it was read from
	expires time.Time     // of the record; zero until the rollback, and all that it belongs to, are over
}

// question is what people are asked before a rollback goes on.
type question struct {
	// Level is the place of the level that waits; wholePlan for a partial rollback.
	Level      int    `cbor:"level"`
	Escalation string `cbor:"escalation"`
	// Answer is a fixed word; empty while nobody has decided.
	Answer string `cbor:"answer,omitempty"`
	// Token is the id of the decision's token; empty without one.
	Token string `cbor:"token,omitempty"`
}

// wholePlan is the level of a question about all of the plan.
const wholePlan = -1

// The answers of people. Others than an approval are the reason of what is not undone.
const (
	answerApproved = "approved"
	answerDenied   = "denied"
	answerChanged  = "plan-changed" // approved, and it is another plan by now
)

// partOf is the rollback of which whoever is asked for a part of this one is asked for a part; empty if
// it is this one.
func (h *Rollback) partOf() string { return cmp.Or(h.PartOf, h.Named) }

// sameWhole reports whether two rollbacks are parts of one: at another gateway, or of several
// checkpoints under one id. Whoever else uses that id has a rollback of his own.
func (h *Rollback) sameWhole(other *Rollback) bool {
	switch {
	case cmp.Or(h.partOf(), h.ID) != cmp.Or(other.partOf(), other.ID), (h.PartOf != "") != (other.PartOf != ""):
		return false
	case h.PartOf != "" && h.Precedence.ID != "" && h.Precedence == other.Precedence:
		return true
	}
	return h.Requester == other.Requester && h.Operator == other.Operator
}

// precedence decides conflicts with others, here and at the participants.
func (h *Rollback) precedence() precedence {
	if h.Precedence.ID != "" {
		return h.Precedence
	}
	return precedence{ID: cmp.Or(h.Named, h.ID), Scope: h.Scope, Asked: h.Asked}
}

// askedBy reports whether a request is of who was the first to ask.
func (h *Rollback) askedBy(r *Request) bool {
	return h.Operator == r.Operator && (r.Operator != "" || h.Requester == r.By)
}

// open reports whether it still takes steps.
func (h *Rollback) open() bool { return h.State == Executing && !h.Halted }

// stops reports whether it terminates its workflow (cascade 4.1.3).
func (h *Rollback) stops() bool { return h.Scope == FullWorkflow && h.Workflow != "" }

// shown is a copy that is shown, with what of it is not recorded.
func (b *Rollback) shown() *Rollback {
	shown := *b
	if b.Plan != nil {
		shown.Unreached = b.Plan.Unreached
	}
	for _, q := range b.Questions {
		switch {
		case q.Answer == "" && b.open() && !b.TimedOut:
			shown.Waits = q.Escalation
		case q.Token != "":
			shown.Decisions = append(shown.Decisions, q.Token)
		}
	}
	return &shown
}

// planned is the rollback as it is shown before its acceptance.
func (b *Rollback) planned() *Rollback {
	shown := b.shown()
	if b.Plan != nil {
		shown.Steps = b.Plan.begin()
	}
	return shown
}

// content is the hash of what makes two requests the same. The token is not part of it: a retry
// may have another one. Neither is who asks: an id and a checkpoint are one rollback (ADR 0110).
func (r *Request) content() []byte {
	sum := sha256.New()
	for _, text := range []string{r.Checkpoint, string(r.Scope), r.Reason, r.Urgency} {
		_, _ = sum.Write(binary.BigEndian.AppendUint64(nil, uint64(len(text)))) // never fails
		_, _ = sum.Write([]byte(text))
	}
	if r.KeepDependants {
		_, _ = sum.Write([]byte("keep dependants"))
	}
	return sum.Sum(nil)
}

// check reports whether a record is a step that was begun: an unreadable one must not pass for one that was not (P5).
func (s *Step) check() error {
	if s.State != StepRunning && s.State != StepDone {
		return fmt.Errorf("step state %q", s.State)
	}
	return nil
}

// recordedAs is the step as its record has it, with what only the plan says.
func (s *Step) recordedAs(record *Step) *Step {
	record.What, record.Earlier = s.What, s.Earlier
	return record
}

// informed is a participant that is told what holds the workflow.
type informed struct {
	Agent string `json:"agent"`
	URI   string `json:"uri"`
}

// informedOf is who takes part in the undo of a call; zero is nobody.
func informedOf(c *checkpoint.Checkpoint) informed {
	if c.Snapshot.Way != checkpoint.Delegate {
		return informed{}
	}
	spec, err := ParseSpec(c.Snapshot.Undo)
	if err != nil || spec.Agent == "" {
		return informed{}
	}
	return informed{spec.Agent, spec.Delegate}
}

// maxInformed bounds the participants that are told.
const maxInformed = 64

func (p *Plan) inform(one informed) {
	if one != (informed{}) && !slices.Contains(p.Participants, one) && len(p.Participants) < maxInformed {
		p.Participants = append(p.Participants, one)
	}
}

// informs are the participants to whom an escalation of the rollback goes. Of a part of a rollback the
// coordinator of the whole tells them.
func (b *Rollback) informs() (all []hitl.Participant) {
	if b.PartOf != "" {
		return nil
	}
	for _, one := range b.Plan.Participants {
		all = append(all, hitl.NewParticipant(one.Agent, one.URI))
	}
	return all
}

// pieceSize is how much of a plan is stored in one value.
const pieceSize = 48 << 10

// maxPlan bounds a stored plan that is read back, in bytes.
const maxPlan = 64 << 20

// encode packs the plan: the ids of a large one are mostly the same bytes.
func (p *Plan) encode() ([]byte, error) {
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if err := json.NewEncoder(w).Encode(p); err != nil {
		return nil, err
	}
	err = w.Close()
	return b.Bytes(), err
}

func decodePlan(b []byte) (*Plan, error) {
	r := flate.NewReader(bytes.NewReader(b))
	p := new(Plan)
	if err := json.NewDecoder(io.LimitReader(r, maxPlan)).Decode(p); err != nil {
		return nil, err
	}
	return p, r.Close()
}

// begin returns the plan's steps, none begun.
func (p *Plan) begin() (steps []Step) {
	planned := slices.Concat(p.Levels...)
	for i, level := range p.Levels {
		for _, s := range level {
			step := Step{
				Checkpoint: s.Checkpoint, Agent: s.Agent, Via: s.Via, Level: i, State: StepPending, Critical: s.Critical, Review: s.Review,
				StepJournal: StepJournal{What: s.What},
			}
			for _, place := range s.Earlier {
				step.Earlier = append(step.Earlier, planned[place].Checkpoint)
			}
			steps = append(steps, step)
		}
	}
	return steps
}

// tables are the records of rollbacks.
type tables struct {
	heads, reservations  store.Table[Rollback] // without their plans and steps
	plans, reservedPlans store.Table[[]byte]   // pieces of plans
	steps                store.Table[Step]
	tokens               store.Table[string] // the id of the rollback
	askers               store.Table[string] // the id of the token
	failed               store.Table[Failure]
}

func newTables(o *Options) tables {
	t := tables{
		heads: table[Rollback](o, kindHead), reservations: table[Rollback](o, kindReserved),
		plans: table[[]byte](o, kindPlan), reservedPlans: table[[]byte](o, kindReservedPlan),
		steps: table[Step](o, kindStep), failed: table[Failure](o, kindFailure),
		tokens: table[string](o, kindToken), askers: table[string](o, kindAsker),
	}
	t.steps.Check = (*Step).check
	return t
}

func table[T any](o *Options, kind byte) store.Table[T] {
	return store.Table[T]{
		Store: o.Store, Sealer: o.Sealer, Prefix: string([]byte{space, kind}),
		Failed: ErrStore, Unreadable: errUnreadable, Missing: ErrUnknown,
	}
}

func (c *journal) headWrite(n name, h *Rollback, condition store.Condition) store.Write {
	return c.heads.Put(keyOf(kindHead, n), h, condition, h.expires) // no change of what is over keeps it for longer
}

func (c *journal) stepWrite(n name, i int, s *Step) store.Write {
	return c.steps.Put(partKey(kindStep, n, i), s, store.Condition{}, time.Time{})
}

// writePlan makes the pieces of a plan.
func writePlan(to *store.Table[[]byte], n name, p *Plan, expires time.Time) ([]store.Write, error) {
	packed, err := p.encode()
	if err != nil {
		return nil, err
	}
	var writes []store.Write
	for piece := range slices.Chunk(packed, pieceSize) {
		writes = append(writes, to.Put(to.Key(n[:], place(len(writes))), &piece, store.Condition{}, expires))
	}
	return writes, nil
}

// unavailable is the error of the store, or of the ledger; nil where there is none.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrStore, err)
}

func unreadable(err error) error { return fmt.Errorf("%w: %w", errUnreadable, err) }

// readHead reads a head; ErrUnknown where there is none.
func (c *journal) readHead(ctx context.Context, n name) (*Rollback, error) {
	row, err := c.heads.Get(ctx, keyOf(kindHead, n))
	if err != nil {
		return nil, err
	}
	row.Record.version, row.Record.expires = row.Version, row.Expires
	return row.Record, nil
}

// readPlan reads the plan of a head, and holds that it is the one that was accepted, or reserved.
func readPlan(ctx context.Context, from *store.Table[[]byte], n name, h *Rollback) (*Plan, error) {
	var packed []byte
	for i := range h.Pieces {
		piece, err := from.Get(ctx, from.Key(n[:], place(i)))
		if errors.Is(err, ErrUnknown) {
			return nil, unreadable(fmt.Errorf("a piece of the plan of rollback %s is missing", h.ID))
		}
		if err != nil {
			return nil, err
		}
		packed = append(packed, *piece.Record...)
	}
	p, err := decodePlan(packed)
	if err != nil {
		return nil, unreadable(err)
	}
	// What is followed is what was accepted (C-4.3.1-d).
	if sum := p.Hash(); subtle.ConstantTimeCompare(sum[:], h.Hash) != 1 {
		return nil, unreadable(errors.New("the plan is not the one that was accepted"))
	}
	return p, nil
}

func (c *journal) load(ctx context.Context, n name) (*run, error) {
	h, err := c.readHead(ctx, n)
	if err != nil {
		return nil, err
	}
	if h.Plan, err = readPlan(ctx, &c.plans, n, h); err != nil {
		return nil, err
	}
	r := newRun(n, h)
	for row, err := range c.steps.All(ctx, n[:]) {
		if err != nil {
			return nil, err
		}
		i := indexIn(row.Key)
		if i >= len(r.steps) {
			return nil, unreadable(fmt.Errorf("a step that the plan of rollback %s does not have", h.ID))
		}
		r.steps[i] = *r.steps[i].recordedAs(row.Record)
	}
	return r, nil
}

// The store's keys of rollbacks. Nothing of a caller is readable in them: hashes are
// keyed, and only times are plain.
//
//	u h name             the head: what was asked, and what came of it; sealed
//	u p name piece       a piece of the plan, sealed
//	u s name step        what came of a step, sealed; none stands of one that was not begun
//	u t token            the rollback that a token asked for, sealed
//	u k name asker       the token by which somebody else than the requester asked for it too, sealed
//	u e failure          an error because of which a rollback is to be asked for, sealed
//	u a asked name       index: all by age
//	u o name             index: those that are not finished, or whose records have no expiry yet
//	u w workflow name    index: those of a workflow that are not finished
//	u x workflow name    index: those that have stopped their workflow
//	u v workflow         changes whenever a rollback of the workflow is accepted, or reserved; where several
//	                     gateways share the store, also before that is decided, and after
//	u d workflow nonce   a decision about that, with the boot of the member that makes it
//	u r name             a reservation, sealed
//	u q name piece       a piece of its plan, sealed
//	u y workflow name    index: the reservations of a workflow
const (
	space        = 'u'
	kindHead     = 'h'
	kindPlan     = 'p'
	kindStep     = 's'
	kindToken    = 't'
	kindAsker    = 'k'
	kindAge      = 'a'
	kindOpen     = 'o'
	kindWorkflow = 'w'
	kindStop     = 'x'
	kindFence    = 'v'
	kindDeciding = 'd'
	kindFailure  = 'e'

	kindReserved         = 'r'
	kindReservedPlan     = 'q'
	kindReservedWorkflow = 'y'
)

// name is the keyed hash of a rollback's id.
type name [32]byte

func (c *journal) name(id string) name { return store.Index(c.o.Sealer, "rollback", id) }

func keyOf(kind byte, n name) []byte {
	return append(append(make([]byte, 0, 2+len(n)+4), space, kind), n[:]...)
}

// place is the end of the key of one of several parts.
func place(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }

func partKey(kind byte, n name, i int) []byte { return append(keyOf(kind, n), place(i)...) }

func ageKey(asked time.Time, n name) []byte {
	b := append(make([]byte, 0, 2+8+len(n)), space, kindAge)
	b = binary.BigEndian.AppendUint64(b, uint64(asked.UnixNano()))
	return append(b, n[:]...)
}

// placeSize is the end of an age key that says where in the listing it is.
const placeSize = 8 + len(name{})

func (c *journal) tokenKey(jti string) []byte {
	return keyOf(kindToken, store.Index(c.o.Sealer, "rollback token", jti))
}

func (c *journal) askerKey(id, asker string) []byte {
	hash := store.Index(c.o.Sealer, "rollback asker", asker)
	return append(keyOf(kindAsker, c.name(id)), hash[:16]...)
}

// workflowPrefix begins the keys of a workflow in one of the indexes by workflow.
func (c *journal) workflowPrefix(kind byte, workflow string) []byte {
	hash := store.Index(c.o.Sealer, "rollback workflow", workflow)
	return append(append(make([]byte, 0, 2+16+len(name{})), space, kind), hash[:16]...)
}

func (c *journal) workflowKey(kind byte, workflow string, n name) []byte {
	return append(c.workflowPrefix(kind, workflow), n[:]...)
}

func (c *journal) fenceKey(workflow string) []byte { return c.workflowPrefix(kindFence, workflow) }

// nameIn is the name at the end of an index entry's key.
func nameIn(key []byte) name { return name(key[len(key)-len(name{}):]) }

// names are those in ranges of an index.
func (c *journal) names(ctx context.Context, ranges ...store.Range) (names []name, err error) {
	for _, r := range ranges {
		for entry, err := range c.o.Store.Scan(ctx, r) {
			if err != nil {
				return nil, unavailable(err)
			}
			names = append(names, nameIn(entry.Key))
		}
	}
	return names, nil
}

// indexIn is the number at the end of a part's key.
func indexIn(key []byte) int { return int(binary.BigEndian.Uint32(key[len(key)-4:])) }

// AwaitWriters waits until everything is committed, or given up, that was sealed before. The error is that of ctx.
func (c *journal) AwaitWriters(ctx context.Context) error { return c.sealing.Wait(ctx) }

// Reseal seals anew, with the newest key, what is sealed with older ones, and returns how many
// records. It runs beside the traffic, whose commits win, may be stopped anywhere and starts
// over; it must precede execution.Guard.Reseal. Values that do not open are left and reported as
// ErrUnreadable: then the older keys must not be given up.
func (c *journal) Reseal(ctx context.Context) (int, error) {
	r := store.NewResealer(c.o.Store, c.o.Sealer)
	if err := c.AwaitWriters(ctx); err != nil {
		return 0, err
	}
	if err := r.Tables(
		ctx, c.heads.Prefix, c.plans.Prefix, c.steps.Prefix, c.tokens.Prefix, c.askers.Prefix, c.failed.Prefix,
		c.reservations.Prefix, c.reservedPlans.Prefix,
	); err != nil {
		return r.Resealed, unavailable(err)
	}
	if r.Damaged > 0 {
		return r.Resealed, fmt.Errorf("%w: %d of them", errUnreadable, r.Damaged)
	}
	return r.Resealed, nil
}

// expirePage is how many records get their expiry in one commit.
const expirePage = 64

// expireAll sets the expiry of a finished rollback's records, after that of the rollbacks that it
// absorbed, and that those did.
func (c *Coordinator) expireAll(ctx context.Context, n name, h *Rollback) error {
	expires := h.Finished.Add(c.o.Keep)
	seen := map[string]bool{h.ID: true}
	for absorbed := slices.Clone(h.Absorbed); len(absorbed) > 0; {
		id := absorbed[0]
		absorbed = absorbed[1:]
		if seen[id] {
			continue
		}
		seen[id] = true
		n := c.name(id)
		other, err := c.readHead(ctx, n)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return err
		}
		absorbed = append(absorbed, other.Absorbed...)
		if err := c.expire(ctx, n, other, expires); err != nil {
			return err
		}
		c.mu.Lock()
		delete(c.runs, n)
		c.removals++
		c.mu.Unlock()
	}
	return c.expire(ctx, n, h, expires)
}

// cleanUp handles a rollback that cannot be read whole, because of why. The records of a finished
// one may have expired in part, the head last.
func (c *Coordinator) cleanUp(ctx context.Context, n name, why error) error {
	h, err := c.readHead(ctx, n)
	if err == nil {
		if gone, err := c.gone(ctx, h.Boot); err != nil || !gone && h.Boot != c.fleet.Boot() {
			return err
		}
	}
	switch {
	case errors.Is(err, ErrUnknown):
		_, err := c.o.Store.Commit(ctx, store.Write{Key: keyOf(kindOpen, n), Delete: true})
		return unavailable(err)
	case err == nil && h.State == Finished:
		return c.expireAll(ctx, n, h)
	case err == nil && h.Halted: // the one that it gave way to takes it along
		return nil
	}
	c.log.Error("a rollback cannot be taken up again", "error", why)
	return nil
}

// expire sets the expiry of all records of a rollback, the head in the last commit, so that it is
// found again after an interruption. Each is changed as read, or read again.
func (c *journal) expire(ctx context.Context, n name, h *Rollback, at time.Time) error {
	keys := [][]byte{ageKey(h.Asked, n)}
	if h.Token != "" {
		keys = append(keys, c.tokenKey(h.Token))
	}
	if h.stops() {
		keys = append(keys, c.workflowKey(kindStop, h.Workflow, n))
	}
	ranges := []store.Range{store.Prefix(keyOf(kindPlan, n)), store.Prefix(keyOf(kindStep, n))}
	for _, key := range append(keys, keyOf(kindHead, n)) {
		ranges = append(ranges, store.Range{From: key, To: append(bytes.Clone(key), 0)})
	}
	for {
		err := c.expireRanges(ctx, ranges, at, store.Write{Key: keyOf(kindOpen, n), Delete: true})
		if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
			continue // sealed anew meanwhile
		}
		return unavailable(err)
	}
}

// expireRanges sets the expiry of all entries, in few commits, and writes last in the last of them.
func (c *journal) expireRanges(ctx context.Context, ranges []store.Range, at time.Time, last store.Write) error {
	var batch []store.Write
	size := 0
	for _, r := range ranges {
		for more := true; more; {
			var page []store.Entry
			r.Limit = expirePage
			for entry, err := range c.o.Store.Scan(ctx, r) {
				if err != nil {
					return err
				}
				page = append(page, entry)
				r.From = append(bytes.Clone(entry.Key), 0)
			}
			more = len(page) == expirePage
			for _, entry := range page {
				if entry.Expires.Equal(at) {
					continue
				}
				if len(batch) == expirePage || size+len(entry.Value) > store.MaxBatchBytes/2 {
					if _, err := c.o.Store.Commit(ctx, batch...); err != nil {
						return err
					}
					batch, size = nil, 0
				}
				size += len(entry.Value)
				batch = append(batch, store.Write{Key: entry.Key, If: store.VersionIs(entry.Version), Value: entry.Value, Expires: at})
			}
		}
	}
	_, err := c.o.Store.Commit(ctx, append(batch, last)...)
	return err
}

// record adds evidence to a batch and returns the id of its token.
func record(b *store.Batch, e Evidence) string {
	b.Join(e.Batch)
	return e.ID
}
