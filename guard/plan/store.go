package plan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Errors of Store.
var (
	// ErrStore: the store did not answer, or refused a record.
	ErrStore = errors.New("plan: the store is unavailable")
	// ErrUnreadable: a plan that is kept cannot be read.
	ErrUnreadable = errors.New("plan: a plan that is kept cannot be read")
	// ErrExists: the workflow has another plan, and the change does not say which one it replaces.
	ErrExists = errors.New("plan: the workflow has another plan already; name the version that is replaced")
	// ErrChanged: the workflow's plan is not the one that was expected.
	ErrChanged = errors.New("plan: the workflow's plan is another one by now")
	// ErrBegun: a call of the workflow has begun under another plan, which stays.
	ErrBegun = errors.New("plan: the workflow has begun under another plan")
	// ErrFull: too much is kept.
	ErrFull = errors.New("plan: too many plans are kept")
)

const (
	// defaultKeep is how long a plan is kept after it was put, and after the workflow's latest call.
	defaultKeep = 90 * 24 * time.Hour
	// maxKnown is how many workflows with a plan are known in memory; of others the store is asked.
	maxKnown = 100_000
	// maxOffers is how many plans may be offered at a time, maxPut how many by one issuer, and maxPutBytes the
	// size of those, and of those that have come into force in the last countedFor.
	maxOffers   = 100_000
	maxPut      = 1000
	maxPutBytes = 64 << 20
	countedFor  = 24 * time.Hour
	// maxEarlier is how many versions are kept that were replaced.
	maxEarlier = 16
	// maxParsed is how many bytes of texts are held in memory as descriptors.
	maxParsed = 64 << 20
	// maxReceived is how many texts are received at a time, and maxReceivedBy how many of those who puts one sends.
	maxReceived   = 16
	maxReceivedBy = 4
)

// Assigned is the plan of a workflow. It never changes.
type Assigned struct {
	// Workflow is the workflow's id in the ledger.
	Workflow string `cbor:"1,keyasint"`
	// Issuer has put the plan without authority over the workflow: it is in force from the first call on that
	// the issuer has led to, for who takes part in that (P3). It is empty where the plan binds all calls.
	Issuer string `cbor:"2,keyasint,omitempty"`
	// By is who put it, as the gateway knows them, or the name of the workflow_start's plan.
	By string `cbor:"3,keyasint,omitempty"`
	// Version is the plan's, and Size the length of its canonical text in bytes. Replaced is that of all
	// texts that it has replaced.
	Version  string `cbor:"4,keyasint"`
	Size     int64  `cbor:"5,keyasint"`           // see Version
	Replaced int64  `cbor:"6,keyasint,omitempty"` // see Version
	// Put is when it was put, and Begun when the first call under it was claimed: from then on the
	// workflow stays with it. Begun is zero before. Expires is when it is forgotten.
	Put     time.Time `cbor:"7,keyasint"`
	Begun   time.Time `cbor:"8,keyasint,omitzero"` // see Put
	Expires time.Time `cbor:"-"`                   // see Put
	// First is the checkpoint of that first call.
	First string `cbor:"9,keyasint,omitempty"`
	// Earlier are the versions that it has replaced, the latest last, at most 16.
	Earlier []string `cbor:"10,keyasint,omitempty"`
	// Plan is the plan itself; nil in lists.
	Plan *Descriptor `cbor:"-"`
}

// Store keeps the plans of workflows. It is safe for concurrent use by one process: which workflows have
// a plan is in memory too, so that the others cost a look into a map. Only of more than maxKnown the store is
// asked, once for each workflow that has none.
//
// Where several gateways share the store, the plans of a workflow are read again when another one has changed them
// (ADR 0139). Each change rewrites the fence of its workflow, on the condition that nobody else has since the plans
// were read; and the claim of a call is bound to the fence that was read before its plan (Fence).
//
// A plan's text is written first, in pieces under its version, and then the record that names it. A
// crash between them leaves what was, and pieces that expire.
type Store struct {
	store  store.Store
	sealer store.Sealer
	heads  store.Table[Assigned]
	pieces store.Table[[]byte] // of texts
	shared store.Shared        // nil where one gateway has the store
	fences *store.Fences       // nil as above
	keep   atomic.Int64        // nanoseconds

	// gates keep changes of one workflow's plan apart, also that by the commit of its first call.
	gates  [256]chan struct{}
	large  chan struct{} // held while a large workflow is read
	seed   maphash.Seed
	seal   sync.Mutex // held while pieces are written
	mu     sync.RWMutex
	all    map[string]plans
	most   int                   // how many of them
	more   bool                  // the store has further ones in force
	absent map[string]bool       // workflows of which it has none
	unsure map[string]bool       // workflows of which a commit has ended without saying how: the store knows
	heard  map[workflowHash]bool // workflows whose plans have changed elsewhere since they were read, or could not be read
	missed bool                  // of some, which is not known
	noted  int64                 // counts the changes of all
	places map[string]int        // the texts that are received, by who puts them
	texts  map[string]text       // by version
	parsed int64                 // bytes of the texts that are there as descriptors
}

// plans are those of one workflow, by issuer; that with authority has none. They never change.
type plans map[string]*Assigned

// with are the plans with one more, or another one of its issuer.
func (p plans) with(a *Assigned) plans {
	next := plans{}
	maps.Copy(next, p)
	next[a.Issuer] = a
	return next
}

// offers reports whether one of them is not in force yet.
func (p plans) offers() bool {
	for _, a := range p {
		if !a.inForce() {
			return true
		}
	}
	return false
}

// inForce reports whether calls are bound.
func (a *Assigned) inForce() bool { return a.Issuer == "" || !a.Begun.IsZero() }

// text is a version that was read.
type text struct {
	plan *Descriptor
	size int64
}

// NewStore makes the store of plans over st. Call Load before the first call.
func NewStore(st store.Store, sealer store.Sealer) *Store {
	s := &Store{
		store: st, sealer: sealer, seed: maphash.MakeSeed(), most: maxKnown, large: make(chan struct{}, 1),
		heads: store.Table[Assigned]{
			Store: st, Sealer: sealer, Prefix: string([]byte{space, kindHead}), Failed: ErrStore, Unreadable: ErrUnreadable,
		},
		pieces: store.Table[[]byte]{
			Store: st, Sealer: sealer, Prefix: string([]byte{space, kindPiece}), Failed: ErrStore, Unreadable: ErrUnreadable,
		},
		all: map[string]plans{}, absent: map[string]bool{}, unsure: map[string]bool{}, heard: map[workflowHash]bool{},
		texts: map[string]text{}, places: map[string]int{},
	}
	for i := range s.gates {
		s.gates[i] = make(chan struct{}, 1)
	}
	s.Configure(defaultKeep)
	if shared, is := st.(store.Shared); is {
		s.shared = shared
		s.fences = store.FollowFences(shared, []byte{space, kindFence})
		shared.Follow([]byte{space, kindFence}, s.changedElsewhere)
	}
	return s
}

// changedElsewhere takes note that another gateway has changed the plans of the workflow in the key of a fence; of
// any without a key.
func (s *Store) changedElsewhere(key []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noted++
	if len(key) > 0 {
		s.hear(workflowIn(key))
		return
	}
	s.miss()
}

// hear has the plans of a workflow read again. mu is held.
func (s *Store) hear(workflow workflowHash) {
	if len(s.heard) < s.most {
		s.heard[workflow] = true
	} else {
		s.miss()
	}
}

// miss has the plans of any workflow read again. mu is held.
func (s *Store) miss() {
	clear(s.heard)
	clear(s.absent)
	s.more, s.missed = true, true // those that memory does not know are looked up
}

// CatchUp returns when the changes that other gateways have made before are known.
func (s *Store) CatchUp(ctx context.Context) error {
	if s == nil || s.shared == nil {
		return nil
	}
	if err := s.shared.CatchUp(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// Fence is what the claim of a call of a workflow is bound to (store.Bind) whose plan is asked for after this: then
// the plans have not changed in between, at any gateway. The errors are those of Of.
func (s *Store) Fence(ctx context.Context, workflow string) (at store.Fence, err error) {
	if s.fences == nil {
		return at, nil
	}
	if s.Has(workflow) { // what a plan refuses is not claimed: it has to be the plan of now
		if err := s.CatchUp(ctx); err != nil {
			return at, err
		}
	}
	_, at, err = s.recorded(ctx, workflow)
	return at, err
}

// Configure changes how long plans are kept after they were put, and after the latest call under them.
func (s *Store) Configure(keep time.Duration) { s.keep.Store(int64(keep)) }

// Load reads which workflows have a plan. If it fails, no call may begin. Calls of workflows whose record
// cannot be read fail with ErrUnreadable; unreadable counts those records.
func (s *Store) Load(ctx context.Context) (unreadable int, err error) {
	var workflow workflowHash
	var p plans
	keep := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.all) >= s.most && !p.offers() {
			s.more = s.more || p != nil
			return
		}
		for _, a := range p {
			if s.all[a.Workflow] == nil { // else it was read later
				s.set(a.Workflow, p)
				s.fences.Forget(s.fenceKey(a.Workflow))
			}
			break
		}
	}
	for row, err := range s.heads.All(ctx) {
		if err != nil && !errors.Is(err, ErrUnreadable) {
			return unreadable, err
		}
		if of := workflowIn(row.Key); of != workflow { // those of one workflow follow each other
			keep()
			workflow, p = of, nil
		}
		if err != nil {
			unreadable++
			s.mu.Lock()
			s.hear(workflow) // perhaps it had begun
			s.mu.Unlock()
			continue
		}
		p = p.with(assigned(row))
	}
	keep()
	return unreadable, nil
}

// assigned is the plan in a record.
func assigned(row store.Row[Assigned]) *Assigned {
	row.Record.Expires = row.Expires
	return row.Record
}

// set keeps the plans of a workflow in memory. mu is held.
func (s *Store) set(workflow string, p plans) {
	delete(s.absent, workflow)
	if s.all[workflow] == nil {
		s.makeRoom()
	}
	s.all[workflow] = p
}

// makeRoom forgets some plans that are in force, which the store has, for one more workflow. It is called with mu
// held.
func (s *Store) makeRoom() {
	for workflow, p := range s.all {
		if len(s.all) < s.most {
			return
		}
		if !p.offers() {
			delete(s.all, workflow)
			s.more = true
		}
	}
}

// Of returns the plan that binds somebody in a workflow; nil if none does. Who takes part in the first call of a plan
// stays with that; of several with the one that began first. Others are bound by the plan that somebody with
// authority has put. takesPart says of a call's checkpoint whether it is in the part; nil is no part. The errors are
// its own, and ErrStore and ErrUnreadable: then no call may begin.
func (s *Store) Of(ctx context.Context, workflow string, takesPart func(call string) (bool, error)) (*Assigned, error) {
	var first *Assigned
	p, _, err := s.recorded(ctx, workflow)
	if err != nil {
		return nil, err
	}
	for _, issuer := range p.issuers() {
		a, err := s.living(ctx, p[issuer])
		if err != nil {
			return nil, err
		}
		if takesPart == nil || a == nil || a.Begun.IsZero() || first != nil && first.Begun.Before(a.Begun) {
			continue
		}
		if has, err := takesPart(a.First); err != nil {
			return nil, err
		} else if has {
			first = a
		}
	}
	if first == nil {
		if first, err = s.living(ctx, p[""]); first == nil || err != nil {
			return nil, err
		}
	}
	return s.whole(ctx, first)
}

// issuers are those who have put a plan without authority, in a fixed order.
func (p plans) issuers() []string {
	if len(p) == 0 || len(p) == 1 && p[""] != nil { // as a rule
		return nil
	}
	all := slices.Sorted(maps.Keys(p))
	return slices.DeleteFunc(all, func(issuer string) bool { return issuer == "" })
}

// Others is how many plans of agents have begun in the workflow of a plan that binds the others.
func (s *Store) Others(ctx context.Context, a *Assigned) (n int, err error) {
	p, _, err := s.recorded(ctx, a.Workflow)
	if err != nil {
		return 0, err
	}
	for _, issuer := range p.issuers() {
		other, err := s.living(ctx, p[issuer])
		if err != nil {
			return 0, err
		}
		if other != nil && !other.Begun.IsZero() && other.Version != a.Version {
			n++
		}
	}
	return n, nil
}

// Offered returns the plan that an issuer has put for a workflow without authority; nil if there is none. The errors
// are those of Of.
func (s *Store) Offered(ctx context.Context, workflow, issuer string) (*Assigned, error) {
	if issuer == "" {
		return nil, nil
	}
	return s.find(ctx, workflow, issuer)
}

// Has reports whether a workflow may have a plan, or one that is offered. It costs a look into a map.
//
// In a fleet it is behind the changes that other gateways have just made, which Fence and CatchUp are not.
func (s *Store) Has(workflow string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.all[workflow] != nil || s.more && !s.absent[workflow] || s.changed(workflow)
}

// changed reports whether the plans of a workflow may be others than those in memory. mu is held.
func (s *Store) changed(workflow string) bool {
	return s.unsure[workflow] || len(s.heard) > 0 && s.heard[s.workflowHash(workflow)]
}

// Offers reports whether somebody may have offered a plan for a workflow.
func (s *Store) Offers(workflow string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	p := s.all[workflow]
	return len(p.issuers()) > 0 || p == nil && s.more && !s.absent[workflow] || s.changed(workflow)
}

func (s *Store) find(ctx context.Context, workflow, issuer string) (*Assigned, error) {
	p, _, err := s.recorded(ctx, workflow)
	if err != nil {
		return nil, err
	}
	a, err := s.living(ctx, p[issuer])
	if a == nil || err != nil {
		return nil, err
	}
	return s.whole(ctx, a)
}

// whole is an assignment with its plan.
func (s *Store) whole(ctx context.Context, a *Assigned) (*Assigned, error) {
	d, err := s.read(ctx, a.Version)
	if err != nil {
		return nil, err
	}
	whole := *a
	whole.Plan = d
	return &whole, nil
}

// recorded are the plans of a workflow, nil for none: in the store where memory does not know them. In a fleet they
// are so as long as the fence has not changed.
func (s *Store) recorded(ctx context.Context, workflow string) (p plans, at store.Fence, err error) {
	known := true
	s.mu.RLock()
	if s.fences != nil {
		at, known = s.fences.Open(s.fenceKey(workflow))
	}
	p = s.all[workflow]
	known = known && (p != nil || !s.more || s.absent[workflow]) && !s.changed(workflow)
	s.mu.RUnlock()
	if !known {
		p, at, err = s.readPlans(ctx, workflow)
	}
	return p, at, err
}

// readPlans reads the plans of a workflow, and before them its fence.
func (s *Store) readPlans(ctx context.Context, workflow string) (p plans, at store.Fence, err error) {
	s.mu.RLock()
	noted := s.noted
	s.mu.RUnlock()
	if s.fences != nil {
		if at, err = s.fences.Read(ctx, s.fenceKey(workflow)); err != nil {
			return nil, at, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
	hash := s.workflowHash(workflow)
	for row, err := range s.heads.All(ctx, hash[:]) {
		if err != nil {
			return nil, at, err
		}
		p = p.with(assigned(row))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noted != noted { // what was read may be out of date
		return p, at, nil
	}
	delete(s.heard, hash)
	switch {
	case p != nil:
		s.set(workflow, p)
	case len(s.absent) >= s.most:
		clear(s.absent)
		fallthrough
	default:
		delete(s.all, workflow)
		s.absent[workflow] = true
	}
	if s.fences != nil {
		s.fences.Pass(at) // with mu held: memory is what it was behind this fence
	}
	return p, at, nil
}

// change is a batch that changes the plans of a workflow, on the condition that nobody else has since its fence was
// read; then the error of the commit is store.ErrFenced.
func (s *Store) change(workflow string, at store.Fence, expires time.Time, writes ...store.Write) *store.Batch {
	b := store.NewBatch(writes...)
	if s.fences != nil {
		b.Add(store.Write{Key: s.fenceKey(workflow), Expires: expires})
		b = store.Bind(b, at)
	}
	return b
}

// living is one of the plans of a workflow, without the plan itself, unless it has expired; nil for nil.
func (s *Store) living(ctx context.Context, a *Assigned) (*Assigned, error) {
	if a == nil {
		return nil, nil
	}
	now, err := s.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if !now.Before(a.Expires) {
		return nil, nil
	}
	return a, nil
}

// read returns the plan of a version.
func (s *Store) read(ctx context.Context, version string) (*Descriptor, error) {
	s.mu.RLock()
	known := s.texts[version]
	s.mu.RUnlock()
	if known.plan != nil {
		return known.plan, nil
	}
	whole, err := s.pieces.GetPieces(ctx, s.piecesOf(version))
	if err != nil {
		return nil, err
	}
	d, err := Parse(whole)
	if err != nil || d.Version() != version {
		return nil, fmt.Errorf("%w: version %s", ErrUnreadable, version)
	}
	s.hold(d, int64(len(whole)))
	return d, nil
}

// hold keeps a plan in memory. Others make room.
func (s *Store) hold(d *Descriptor, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.texts[d.Version()].plan != nil {
		return
	}
	for version, other := range s.texts {
		if s.parsed+size <= maxParsed {
			break
		}
		s.parsed -= other.size
		delete(s.texts, version)
	}
	s.parsed += size
	s.texts[d.Version()] = text{d, size}
}

// Version returns a version of a workflow's plan: that of a, or one that it has replaced; nil if it has
// none of this name. The errors are those of Of.
func (s *Store) Version(ctx context.Context, a *Assigned, version string) (*Descriptor, error) {
	if version != a.Version && !slices.Contains(a.Earlier, version) {
		return nil, nil
	}
	return s.read(ctx, version)
}

// List returns the plans of workflows, the latest first and at most 100,000, without the plans themselves.
func (s *Store) List(ctx context.Context) ([]Assigned, error) {
	all := []Assigned{}
	for row, err := range s.heads.All(ctx) {
		if err != nil && !errors.Is(err, ErrUnreadable) {
			return nil, err
		}
		if err == nil { // Load has reported the others
			all = append(all, *assigned(row))
		}
		if len(all) == maxKnown {
			break
		}
	}
	slices.SortFunc(all, func(a, b Assigned) int {
		return cmp.Or(b.Put.Compare(a.Put), cmp.Compare(a.Workflow, b.Workflow), cmp.Compare(a.Issuer, b.Issuer))
	})
	return all, nil
}

// Reseal seals anew, with the newest key, what is sealed with older ones. It may be stopped anywhere and
// starts over. What does not open is left, and reported as ErrUnreadable.
func (s *Store) Reseal(ctx context.Context) error {
	r := store.NewResealer(s.store, s.sealer)
	err := r.Tables(ctx, s.heads.Prefix)
	if err == nil {
		err = r.Walk(ctx, []byte(s.pieces.Prefix), 1, func(ctx context.Context, older ...store.Entry) error {
			s.seal.Lock() // so that no expiry is set back
			defer s.seal.Unlock()
			for i := range older {
				entry, err := s.store.Get(ctx, older[i].Key)
				if errors.Is(err, store.ErrNotFound) {
					continue
				}
				if err == nil && r.Older(entry.Value) {
					err = r.ResealBulk(ctx, entry)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrStore, err)
	case r.Damaged > 0:
		return fmt.Errorf("%w: %d of them", ErrUnreadable, r.Damaged)
	}
	return nil
}

// The layout of the store:
//
//	g h workflow issuer  the record of an assignment, sealed
//	g f workflow         in a fleet: its fence, rewritten with each change of its plans; no value
//	g p version piece    bulk: a piece of a text, sealed
//
// Workflow, issuer and version are keyed hashes.
const (
	space     = 'g'
	kindHead  = 'h'
	kindFence = 'f'
	kindPiece = 'p'
)

// workflowHash is the keyed hash of a workflow's id, or of an issuer.
type workflowHash [16]byte

func (s *Store) workflowHash(workflow string) workflowHash {
	hash := store.Index(s.sealer, "plan of workflow", workflow)
	return workflowHash(hash[:])
}

func (s *Store) issuerHash(issuer string) workflowHash {
	hash := store.Index(s.sealer, "plan by issuer", issuer)
	return workflowHash(hash[:])
}

func (s *Store) headKey(workflow, issuer string) []byte {
	w, i := s.workflowHash(workflow), s.issuerHash(issuer)
	return s.heads.Key(w[:], i[:])
}

func (s *Store) fenceKey(workflow string) []byte {
	hash := s.workflowHash(workflow)
	return append([]byte{space, kindFence}, hash[:]...)
}

// workflowIn is the hash of the workflow in the key of a record, or of a fence.
func workflowIn(key []byte) (workflow workflowHash) {
	copy(workflow[:], key[min(2, len(key)):])
	return workflow
}

// piecesOf is what the keys of a version's pieces begin with.
func (s *Store) piecesOf(version string) []byte {
	hash := store.Index(s.sealer, "plan", version)
	return s.pieces.Key(hash[:16])
}

func (s *Store) write(a *Assigned) store.Write {
	return s.heads.Put(s.headKey(a.Workflow, a.Issuer), a, store.Condition{}, a.Expires)
}
