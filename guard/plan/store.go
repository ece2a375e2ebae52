package plan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
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
	// DefaultKeep is how long a plan is kept after it was put, and after the workflow's latest call.
	DefaultKeep = 90 * 24 * time.Hour
	// maxAssigned is how many workflows may have a plan.
	maxAssigned = 100_000
	// maxPut is how many plans one issuer may offer at a time, and maxPutBytes the size of all that it has
	// put and that are kept.
	maxPut      = 1000
	maxPutBytes = 64 << 20
	// maxEarlier is how many versions are kept that were replaced.
	maxEarlier = 16
	// maxParsed is how many bytes of texts are held in memory as descriptors.
	maxParsed = 64 << 20
	// maxReceived is how many texts are received at a time: who sends them is known only afterwards.
	maxReceived = 16
	// textPiece is the size of a piece of a text, in bytes.
	textPiece = 256 << 10
)

// Assigned is the plan of a workflow. It never changes.
type Assigned struct {
	// Workflow is the workflow's id in the ledger.
	Workflow string
	// Issuer has put a plan that is in force only from the issuer's own first call on, if that is the
	// workflow's first (P3). It is empty for a plan in force.
	Issuer string
	// By is who put it, as the gateway knows them, or the name of the workflow_start's plan.
	By string
	// Version is the plan's, and Size the length of its canonical text in bytes. Replaced is that of all
	// texts that it has replaced.
	Version        string
	Size, Replaced int64 // see Version
	// Put is when it was put, and Begun when the first call under it was claimed: from then on the
	// workflow stays with it. Begun is zero before. Expires is when it is forgotten.
	Put, Begun, Expires time.Time
	// Earlier are the versions that it has replaced, the latest last, at most 16.
	Earlier []string
	// Plan is the plan itself; nil in lists.
	Plan *Descriptor

	kept time.Time // until when its text is
}

// Store keeps the plans of workflows. It is safe for concurrent use by one process: which workflows have
// a plan is in memory too, so that the others cost a look into a map.
//
// A plan's text is written first, in pieces under its version, and then the record that names it. A
// crash between them leaves what was, and pieces that expire.
type Store struct {
	store  store.Store
	sealer store.Sealer
	keep   atomic.Int64 // nanoseconds

	// gates keep changes of one workflow's plan apart, also that by the commit of its first call.
	gates  [256]chan struct{}
	places chan struct{} // for texts that are received
	seed   maphash.Seed
	seal   sync.Mutex // held while pieces are written
	mu     sync.RWMutex
	all    map[string]*plans
	broken map[workflowHash]bool // workflows whose record cannot be read
	texts  map[string]*text      // by version
	parsed int64                 // bytes of the texts that are there as descriptors
	used   int64                 // counts the uses of texts
}

// plans are those of one workflow.
type plans struct {
	force   *Assigned
	offered map[string]*Assigned // by issuer
	unsure  bool                 // a commit has ended without saying how: the store knows
}

// text is what is known of a version.
type text struct {
	plan  *Descriptor // nil if it has to be read
	size  int64
	until time.Time // its pieces are kept at least until then
	used  int64
}

// NewStore makes the store of plans over st. Call Load before the first call.
func NewStore(st store.Store, sealer store.Sealer) *Store {
	s := &Store{
		store: st, sealer: sealer, seed: maphash.MakeSeed(), all: map[string]*plans{},
		broken: map[workflowHash]bool{}, texts: map[string]*text{}, places: make(chan struct{}, maxReceived),
	}
	for i := range s.gates {
		s.gates[i] = make(chan struct{}, 1)
	}
	s.Configure(DefaultKeep)
	return s
}

// Configure changes how long plans are kept after they were put, and after the latest call under them.
func (s *Store) Configure(keep time.Duration) { s.keep.Store(int64(keep)) }

// Load reads which workflows have a plan. If it fails, no call may begin. Calls of workflows whose record
// cannot be read fail with ErrUnreadable; unreadable counts those records.
func (s *Store) Load(ctx context.Context) (unreadable int, err error) {
	at := store.Prefix([]byte{space, kindHead})
	for more := true; more; {
		more = false
		for entry, err := range s.store.Scan(ctx, at) {
			if err != nil && !errors.Is(err, store.ErrDamaged) {
				return unreadable, fmt.Errorf("%w: %w", ErrStore, err)
			}
			at.From = append(slices.Clone(entry.Key), 0)
			a, bad := s.decode(&entry)
			if err != nil || bad != nil {
				more = err != nil // it has ended the scan
				unreadable++
				if workflow, issuer := hashesIn(entry.Key); issuer == s.issuerHash("") {
					s.broken[workflow] = true
				}
				continue
			}
			s.note(a)
		}
	}
	return unreadable, nil
}

// note keeps what is known of an assignment in memory.
func (s *Store) note(a *Assigned) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.all[a.Workflow]
	if p == nil {
		p = &plans{}
		s.all[a.Workflow] = p
	}
	p.unsure = false
	if a.Issuer == "" {
		p.force = a
	} else {
		if p.offered == nil {
			p.offered = map[string]*Assigned{}
		}
		p.offered[a.Issuer] = a
	}
	t := s.texts[a.Version]
	if t == nil {
		t = &text{size: a.Size}
		s.texts[a.Version] = t
	}
	if a.kept.After(t.until) {
		t.until = a.kept
	}
}

// Of returns the plan that is in force for a workflow; nil if there is none. The errors are ErrStore and
// ErrUnreadable: then no call may begin.
func (s *Store) Of(ctx context.Context, workflow string) (*Assigned, error) {
	return s.find(ctx, workflow, "")
}

// Offered returns the plan that an issuer has put for a workflow, and that is not in force; nil if there
// is none. The errors are those of Of.
func (s *Store) Offered(ctx context.Context, workflow, issuer string) (*Assigned, error) {
	if issuer == "" {
		return nil, nil
	}
	return s.find(ctx, workflow, issuer)
}

// Has reports whether a workflow may have a plan, or one that is offered. It costs a look into a map.
func (s *Store) Has(workflow string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.all[workflow] != nil
}

// Offers reports whether somebody may have offered a plan for a workflow.
func (s *Store) Offers(workflow string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	p := s.all[workflow]
	return p != nil && (p.unsure || len(p.offered) > 0)
}

func (s *Store) find(ctx context.Context, workflow, issuer string) (*Assigned, error) {
	a, err := s.known(ctx, workflow, issuer)
	if a == nil || err != nil {
		return nil, err
	}
	d, err := s.read(ctx, a.Version)
	if err != nil {
		return nil, err
	}
	whole := *a
	whole.Plan = d
	return &whole, nil
}

// known is find without the plan itself.
func (s *Store) known(ctx context.Context, workflow, issuer string) (*Assigned, error) {
	s.mu.RLock()
	p, broken := s.all[workflow], len(s.broken) > 0
	var a *Assigned
	unsure := false
	if p != nil {
		a, unsure = p.force, p.unsure
		if issuer != "" {
			a = p.offered[issuer]
		}
	}
	s.mu.RUnlock()
	if broken && issuer == "" {
		s.mu.RLock()
		broken = s.broken[s.workflowHash(workflow)]
		s.mu.RUnlock()
		if broken {
			return nil, ErrUnreadable
		}
	}
	if unsure {
		return s.ask(ctx, workflow, issuer)
	}
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

// ask reads a record whose commit has ended without saying how.
func (s *Store) ask(ctx context.Context, workflow, issuer string) (*Assigned, error) {
	entry, err := s.store.Get(ctx, s.headKey(workflow, issuer))
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	a, err := s.decode(&entry)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return a, nil
}

// read returns the plan of a version.
func (s *Store) read(ctx context.Context, version string) (*Descriptor, error) {
	s.mu.Lock()
	t := s.texts[version]
	if t != nil && t.plan != nil {
		s.used++
		t.used = s.used
		d := t.plan
		s.mu.Unlock()
		return d, nil
	}
	s.mu.Unlock()
	var whole []byte
	for entry, err := range s.store.Scan(ctx, store.Prefix(s.pieces(version))) {
		if err == nil {
			whole, err = s.sealer.Open(whole, entry.Value, entry.Key)
		} else if !errors.Is(err, store.ErrDamaged) {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
	}
	d, err := Parse(whole)
	if err != nil || d.Version() != version {
		return nil, fmt.Errorf("%w: version %s", ErrUnreadable, version)
	}
	s.hold(d, int64(len(whole)))
	return d, nil
}

// hold keeps a plan in memory. Those that were not used for longest make room.
func (s *Store) hold(d *Descriptor, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.texts[d.Version()]
	if t == nil {
		t = &text{}
		s.texts[d.Version()] = t
	}
	s.used++
	t.size, t.used = size, s.used
	if t.plan != nil {
		return
	}
	t.plan = d
	s.parsed += size
	for s.parsed > maxParsed {
		var oldest *text
		for _, other := range s.texts {
			if other.plan != nil && other != t && (oldest == nil || other.used < oldest.used) {
				oldest = other
			}
		}
		if oldest == nil {
			return
		}
		s.parsed -= oldest.size
		oldest.plan = nil
	}
}

// enter waits until nobody else changes the workflow's plan.
func (s *Store) enter(ctx context.Context, workflow string) (leave func(), err error) {
	gate := s.gates[maphash.String(s.seed, workflow)%uint64(len(s.gates))]
	select {
	case gate <- struct{}{}:
		return func() { <-gate }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Receive takes one of the places for texts that are received, which done returns. It is nil where all are
// taken.
func (s *Store) Receive() (done func()) {
	select {
	case s.places <- struct{}{}:
		return func() { <-s.places }
	default:
		return nil
	}
}

// Settle waits until the commit of a first call of the workflow that is under way has ended, and returns
// the plan that is in force then; nil if there is none.
func (s *Store) Settle(ctx context.Context, workflow string) (*Assigned, error) {
	leave, err := s.enter(ctx, workflow)
	if err != nil {
		return nil, err
	}
	leave()
	return s.Of(ctx, workflow)
}

// Begin returns the writes by which a call begins under a plan, for the commit of its claim: from then on
// the workflow stays with it. a is what Of or Offered has returned, or a plan of the configuration that
// the workflow has named. The batch is nil if nothing is to be written. ErrChanged says that the
// workflow's plan is another one by now: look again.
//
// Other changes of the workflow's plan wait until the batch has ended.
func (s *Store) Begin(ctx context.Context, a *Assigned) (_ *store.Batch, err error) {
	now, err := s.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	keep := time.Duration(s.keep.Load())
	if !a.Begun.IsZero() && a.Expires.Sub(now) > keep/2 {
		return nil, nil
	}
	leave, err := s.enter(ctx, a.Workflow)
	if err != nil {
		return nil, err
	}
	ended := false
	defer func() {
		if !ended {
			leave()
		}
	}()
	current, err := s.known(ctx, a.Workflow, "")
	if err != nil {
		return nil, err
	}
	fresh := current == nil
	switch {
	case fresh && !a.inForce():
	case fresh || current.Version != a.Version:
		return nil, ErrChanged
	case !current.Begun.IsZero() && current.Expires.Sub(now) > keep/2:
		return nil, nil // by another call meanwhile
	}
	s.mu.RLock()
	many := len(s.all) >= maxAssigned
	s.mu.RUnlock()
	if fresh && a.Expires.IsZero() && many && s.full(now, "", true, 0) {
		return nil, ErrFull
	}
	begun := *a
	begun.Issuer, begun.Expires = "", now.Add(keep)
	if begun.Begun.IsZero() {
		begun.Begun = now
	}
	if begun.kept, err = s.keepText(ctx, a.Plan, begun.Expires); err != nil {
		return nil, err
	}
	b := store.NewBatch(s.write(&begun))
	if a.Issuer != "" {
		b.Add(store.Write{Key: s.headKey(a.Workflow, a.Issuer), Delete: true})
	}
	b.OnDone(func(err error) error {
		defer leave()
		s.committed(&begun, a.Issuer, err)
		return err
	})
	ended = true
	return b, nil
}

// inForce reports whether the assignment is recorded as the workflow's.
func (a *Assigned) inForce() bool { return a.Issuer == "" && !a.Expires.IsZero() }

// committed notes the end of a commit. former is the issuer whose plan is in force from now on.
func (s *Store) committed(a *Assigned, former string, err error) {
	kept := *a
	kept.Plan = nil
	switch {
	case err == nil:
		s.note(&kept)
		s.mu.Lock()
		defer s.mu.Unlock()
		if former != a.Issuer {
			delete(s.all[a.Workflow].offered, former)
		}
	case errors.Is(err, store.ErrUnknown):
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.all[a.Workflow] == nil {
			s.all[a.Workflow] = &plans{}
		}
		s.all[a.Workflow].unsure = true
	}
}

// keepText keeps the text of a plan at least until a time, and returns until when it is kept. Most times
// there is nothing to write.
func (s *Store) keepText(ctx context.Context, d *Descriptor, until time.Time) (time.Time, error) {
	version := d.Version()
	s.mu.RLock()
	kept := time.Time{}
	if t := s.texts[version]; t != nil {
		kept = t.until
	}
	s.mu.RUnlock()
	if !kept.Before(until) {
		return kept, nil
	}
	whole := d.Canonical()
	kept = until.Add(time.Duration(s.keep.Load()) / 2)
	prefix := s.pieces(version)
	var batch []store.Write
	for i, rest := 0, whole; len(rest) > 0; i++ {
		n := min(len(rest), textPiece)
		key := pieceKey(prefix, i)
		batch = append(batch, store.Write{Key: key, Value: s.sealer.Seal(nil, rest[:n], key), Expires: kept, Bulk: true})
		rest = rest[n:]
	}
	s.seal.Lock()
	_, err := s.store.Commit(ctx, batch...)
	s.seal.Unlock()
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s.hold(d, int64(len(whole)))
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.texts[version]; kept.After(t.until) {
		t.until = kept
	}
	return kept, nil
}

// Putting is a plan that somebody puts for a workflow.
type Putting struct {
	Workflow string
	// Issuer is the workflow's initiator, if nobody with authority puts it; By is who puts it.
	Issuer, By string
	Plan       *Descriptor
	// Replaces are the versions of which it replaces one; "*" is any, and none says that there may be
	// only the same. Fresh says that there must be no plan.
	Replaces []string
	Fresh    bool // see Replaces
}

// Put assigns a plan. created says that the workflow had none. The errors are ErrExists, ErrChanged,
// ErrBegun, ErrFull, ErrStore and ErrUnreadable, and that of ctx.
func (s *Store) Put(ctx context.Context, p Putting) (_ *Assigned, created bool, err error) {
	leave, err := s.enter(ctx, p.Workflow)
	if err != nil {
		return nil, false, err
	}
	defer leave()
	current, err := s.known(ctx, p.Workflow, p.Issuer)
	if err == nil && current == nil && p.Issuer != "" { // it may be in force by now
		if force, failed := s.known(ctx, p.Workflow, ""); failed != nil || force != nil && force.By == p.By {
			current, err = force, failed
		}
	}
	if err != nil {
		return nil, false, err
	}
	version := p.Plan.Version()
	switch {
	case current == nil && len(p.Replaces) > 0, current != nil && p.Fresh,
		current != nil && len(p.Replaces) > 0 && !slices.Contains(p.Replaces, "*") && !slices.Contains(p.Replaces, current.Version):
		return nil, false, ErrChanged
	case current == nil:
	case current.Version == version:
		same := *current
		same.Plan = p.Plan
		return &same, false, nil
	case !current.Begun.IsZero():
		return nil, false, ErrBegun
	case len(p.Replaces) == 0:
		return nil, false, ErrExists
	}
	now, err := s.store.Now(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	size := int64(len(p.Plan.Canonical()))
	if s.full(now, p.Issuer, current == nil, size) {
		return nil, false, ErrFull
	}
	a := &Assigned{
		Workflow: p.Workflow, Issuer: p.Issuer, By: p.By, Version: version, Size: size, Plan: p.Plan,
		Put: now, Expires: now.Add(time.Duration(s.keep.Load())),
	}
	if current != nil {
		a.Earlier = append(slices.Clone(current.Earlier), current.Version)
		a.Earlier = a.Earlier[max(0, len(a.Earlier)-maxEarlier):]
		a.Replaced = current.Replaced + current.Size
	}
	if a.kept, err = s.keepText(ctx, p.Plan, a.Expires); err != nil {
		return nil, false, err
	}
	_, err = s.store.Commit(ctx, s.write(a))
	s.committed(a, a.Issuer, err)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return a, current == nil, nil
}

// full reports whether there is no room for one more plan, or a further version of one. It forgets what
// has expired. Workflows of an issuer that have the same plan count once.
func (s *Store) full(now time.Time, issuer string, fresh bool, size int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, mine := 0, 0
	living, sizes := map[string]bool{}, map[string]int64{}
	count := func(a *Assigned) {
		n++
		living[a.Version] = true
		if issuer != "" && a.By == issuer {
			sizes[a.Version] = a.Size
			size += a.Replaced
		}
	}
	for workflow, p := range s.all {
		if p.force != nil && !now.Before(p.force.Expires) {
			p.force = nil
		}
		if p.force != nil {
			count(p.force)
		}
		for by, a := range p.offered {
			if !now.Before(a.Expires) {
				delete(p.offered, by)
				continue
			}
			if count(a); by == issuer {
				mine++
			}
		}
		if p.force == nil && len(p.offered) == 0 && !p.unsure {
			delete(s.all, workflow)
		}
	}
	for version, t := range s.texts {
		if !living[version] && !now.Before(t.until) {
			if t.plan != nil {
				s.parsed -= t.size
			}
			delete(s.texts, version)
		}
	}
	for _, of := range sizes {
		size += of
	}
	return fresh && n >= maxAssigned || issuer != "" && (fresh && mine >= maxPut || size > maxPutBytes)
}

// Version returns a version of a workflow's plan: that of a, or one that it has replaced; nil if it has
// none of this name. The errors are those of Of.
func (s *Store) Version(ctx context.Context, a *Assigned, version string) (*Descriptor, error) {
	if version != a.Version && !slices.Contains(a.Earlier, version) {
		return nil, nil
	}
	return s.read(ctx, version)
}

// List returns the plans of all workflows, the latest first, without the plans themselves.
func (s *Store) List(ctx context.Context) ([]Assigned, error) {
	now, err := s.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	all := []Assigned{}
	add := func(a *Assigned) {
		if a != nil && now.Before(a.Expires) {
			all = append(all, *a)
		}
	}
	for _, p := range s.all {
		add(p.force)
		for _, a := range p.offered {
			add(a)
		}
	}
	slices.SortFunc(all, func(a, b Assigned) int {
		return cmp.Or(b.Put.Compare(a.Put), cmp.Compare(a.Workflow, b.Workflow), cmp.Compare(a.Issuer, b.Issuer))
	})
	return all, nil
}

// resealPage is how many records are read in one snapshot.
const resealPage = 64

// Reseal seals anew, with the newest key, what is sealed with older ones. It may be stopped anywhere and
// starts over. What does not open is left, and reported as ErrUnreadable.
func (s *Store) Reseal(ctx context.Context) error {
	r := store.NewResealer(s.store, s.sealer)
	err := r.Walk(ctx, []byte{space, kindHead}, resealPage, r.Reseal)
	if err == nil {
		err = r.Walk(ctx, []byte{space, kindPiece}, 1, func(ctx context.Context, older ...store.Entry) error {
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
//	g p version piece    bulk: a piece of a text, sealed
//
// Workflow, issuer and version are keyed hashes.
const (
	space     = 'g'
	kindHead  = 'h'
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
	return append(append([]byte{space, kindHead}, w[:]...), i[:]...)
}

func hashesIn(key []byte) (workflow, issuer workflowHash) {
	if len(key) == 2+len(workflow)+len(issuer) {
		copy(workflow[:], key[2:])
		copy(issuer[:], key[2+len(workflow):])
	}
	return workflow, issuer
}

// pieces is what the keys of a version's pieces begin with.
func (s *Store) pieces(version string) []byte {
	hash := store.Index(s.sealer, "plan", version)
	return append([]byte{space, kindPiece}, hash[:16]...)
}

func pieceKey(prefix []byte, i int) []byte { return append(slices.Clone(prefix), byte(i>>8), byte(i)) }

// The tags of an assignment's fields.
const (
	tagWorkflow = iota + 1
	tagIssuer
	tagBy
	tagVersion
	tagSize
	tagPut
	tagBegun
	tagKept
	tagEarlier
	tagReplaced
)

func (s *Store) write(a *Assigned) store.Write {
	var e store.Encoder
	e.String(tagWorkflow, a.Workflow)
	e.String(tagIssuer, a.Issuer)
	e.String(tagBy, a.By)
	e.String(tagVersion, a.Version)
	e.Int(tagSize, a.Size)
	e.Int(tagReplaced, a.Replaced)
	e.Time(tagPut, a.Put)
	e.Time(tagBegun, a.Begun)
	e.Time(tagKept, a.kept)
	for _, version := range a.Earlier {
		e.String(tagEarlier, version)
	}
	key := s.headKey(a.Workflow, a.Issuer)
	return store.Write{Key: key, Value: s.sealer.Seal(nil, e.B, key), Expires: a.Expires}
}

func (s *Store) decode(entry *store.Entry) (*Assigned, error) {
	plain, err := s.sealer.Open(nil, entry.Value, entry.Key)
	if err != nil {
		return nil, err
	}
	a := &Assigned{Expires: entry.Expires}
	d := store.Decoder{B: plain, Broken: ErrUnreadable}
	for d.Next() {
		switch d.Tag {
		case tagWorkflow:
			a.Workflow = string(d.Field)
		case tagIssuer:
			a.Issuer = string(d.Field)
		case tagBy:
			a.By = string(d.Field)
		case tagVersion:
			a.Version = string(d.Field)
		case tagSize:
			a.Size = d.Int()
		case tagReplaced:
			a.Replaced = d.Int()
		case tagPut:
			a.Put = d.Time()
		case tagBegun:
			a.Begun = d.Time()
		case tagKept:
			a.kept = d.Time()
		case tagEarlier:
			a.Earlier = append(a.Earlier, string(d.Field))
		}
	}
	return a, d.Err
}
