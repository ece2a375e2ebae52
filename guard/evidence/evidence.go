// Package evidence records in the ledger what the gateway decides about calls and
// rollbacks, in the commit of the decision itself (ADR 0023, ADR 0032).
//
// [Open] opens the ledger of a store. An [EventBuilder] drafts the events of calls, circuit
// breakers and rollbacks in the gateway's name (cascade 3.2.4, 4.2.1, 4.4.2).
// [Evidence.NewBatch] makes the writes that append presented tokens and drafts to a commit.
// [Evidence.UseWrite] and [Evidence.UseStatus] keep a token from being used
// twice. The ledger of [NewRollbackLedger] reads recorded workflows for the planning of rollbacks.
package evidence

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// Options are the settings of an Evidence. All but HeadFile and Logger are required.
type Options struct {
	// Store is the guard's own, so that evidence lands in its commits.
	Store store.Store
	// Sealer is the guard's own.
	Sealer store.Sealer
	// Node is the gateway's permanent name, from which the origin of its log is made; that of the member
	// where the store is store.Shared.
	Node string
	// Ring holds the keys that tokens are signed with.
	Ring *ect.Ring
	// HeadFile gets a copy of the newest head, outside of the store; empty for none.
	HeadFile string
	// Logger gets the errors of what runs in the background; nil is none.
	Logger *slog.Logger
	// Placed gets each event once it is in the tree of its log, with the log's origin, those of other nodes too: of each
	// log in order, from when the ledger was opened. It is called by several goroutines, must not wait, nor keep the event without a
	// copy. Nil is nobody.
	Placed func(log string, e *ledger.Event, recorded time.Time)
}

// Evidence is the ledger of one store, with caches of the latest tokens. It is safe for
// concurrent use.
type Evidence struct {
	headFile string
	headSize atomic.Int64 // the size of the head in the file

	log    *ledger.Log
	store  store.Store
	sealer store.Sealer
	ring   *ect.Ring
	issuer *ect.Issuer // signs drafts, which state their own issuer
	key    string
	recent *recent[ect.Node]   // recorded or looked up
	seen   *recent[*ect.Token] // presented, and not recorded
	begun  *recent[struct{}]   // workflows that have a start, or an earlier call
	live   liveWorkflows
	names  names
	about  answered
	later  laterKeys
	fleet  nodes
	logger *slog.Logger
	// failures are the upstreams at which calls have failed, by checkpoint.
	failures store.Table[string]
	placed   func(log string, e *ledger.Event, recorded time.Time)
	// unsigned says that unproven tokens are accepted, so that they have to be looked up
	// too.
	unsigned atomic.Bool
}

// Open opens or creates the ledger in the store. ledger.ErrTampered says that stored data
// was altered.
func Open(ctx context.Context, o Options) (*Evidence, error) {
	shared := fleet.Of(o.Store)
	if shared != nil {
		o.Node = shared.Self().Node
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	e := &Evidence{
		headFile: o.HeadFile, store: o.Store, sealer: o.Sealer, ring: o.Ring, logger: o.Logger, placed: o.Placed,
		recent: newRecent[ect.Node](), seen: newRecent[*ect.Token](), begun: newRecent[struct{}](), live: liveWorkflows{most: maxLive},
	}
	var err error
	if e.issuer, err = ect.NewIssuer("urn:agent-guard:events", o.Ring); err != nil {
		return nil, err
	}
	e.fleet.store, e.fleet.node, e.live.fleet = shared, o.Node, shared != nil
	e.names.called, e.later.called = "the names that the gateway has had", "the keys of what is not signed yet"
	e.names.table = tableOf[[]ect.Former](e, []byte{spaceNames}, e.names.called)
	e.later.table = tableOf[[]string](e, []byte{spaceNames, 's'}, e.later.called)
	e.fleet.peers = tableOf[peer](e, []byte{spacePeers}, "the public keys of a node")
	e.failures = tableOf[string](e, []byte{SpaceCascade, kindFailure}, "where a call has failed")
	origin := originPrefix + o.Node
	options, err := e.logOptions(origin)
	if err != nil {
		return nil, err
	}
	known, err := readHead(o.HeadFile, o.Sealer)
	switch {
	case err != nil:
		return nil, err
	case known == nil:
	case known.Origin != origin:
		if err := e.extends(ctx, known); err != nil {
			return nil, err
		}
	default:
		options.Known = []ledger.Head{*known}
	}
	e.key = options.HeadSigner.(*headKey).text
	if e.log, err = ledger.Open(ctx, options); err != nil {
		return nil, fmt.Errorf("evidence: %w", err)
	}
	if err := errors.Join(e.names.read(ctx), e.later.read(ctx)); err != nil {
		return nil, err
	}
	if shared != nil {
		if err := e.beginFleet(ctx); err != nil {
			return nil, err
		}
	}
	if err := e.WriteHead(); err != nil {
		o.Logger.Warn("the head of the ledger cannot be written beside the identity's key: an older copy of the store would go unnoticed",
			slog.Any("error", err))
	}
	return e, nil
}

// Log is the ledger.
func (e *Evidence) Log() *ledger.Log { return e.log }

// Ring holds the keys that tokens are signed with.
func (e *Evidence) Ring() *ect.Ring { return e.ring }

// HeadKey is the public key of the log's heads, in the form of signed notes.
func (e *Evidence) HeadKey() string { return e.key }

// Close waits until Options.Placed has got all that is recorded, or ctx ends.
func (e *Evidence) Close(ctx context.Context) error {
	e.endFleet()
	return errors.Join(e.log.Close(ctx), e.WriteHead())
}

// headKey signs the heads of a log. It is derived from the index key of the store, so it
// belongs to that store and never changes (ADR 0023).
type headKey struct {
	note.Verifier
	private ed25519.PrivateKey
	text    string
}

func newHeadKey(sealer store.Sealer, origin string) (*headKey, error) {
	seed := store.Index(sealer, "ledger head key", origin)
	private := ed25519.NewKeyFromSeed(seed[:])
	text, err := note.NewEd25519VerifierKey(origin, private.Public().(ed25519.PublicKey))
	if err != nil {
		return nil, fmt.Errorf("evidence: the name of the log: %w", err)
	}
	verifier, err := note.NewVerifier(text)
	if err != nil {
		return nil, fmt.Errorf("evidence: the key of the log's heads: %w", err)
	}
	return &headKey{verifier, private, text}, nil
}

func (k *headKey) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(k.private, msg), nil }

// Prune deletes entries older than retain that need not be kept longer, and returns their
// number: in the log of this node, and in those of nodes that are gone.
func (e *Evidence) Prune(ctx context.Context, retain time.Duration) (int, error) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	pruned, err := e.log.Prune(ctx, now.Add(-retain))
	return pruned, errors.Join(err, e.eachLeft(ctx, func(log *ledger.Log) error {
		n, err := log.Prune(ctx, now.Add(-retain))
		pruned += n
		if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
			return nil // another node prunes it
		}
		return err
	}))
}

// readHead reads the copy of the head of a log of the store, usually that of this node. A log that does not extend it
// was altered, or is an older copy. Without a file it is nil.
func readHead(file string, sealer store.Sealer) (*ledger.Head, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("evidence: the head of the ledger: %w", err)
	}
	origin, _, _ := strings.Cut(string(text), "\n")
	key, err := newHeadKey(sealer, origin)
	if err != nil {
		return nil, fmt.Errorf("evidence: %s is no head of this store's ledger: %w", file, err)
	}
	head, err := ledger.ParseHead(text, origin, note.VerifierList(key.Verifier))
	if err != nil {
		return nil, fmt.Errorf("evidence: %s is no head of this store's ledger: %w", file, err)
	}
	return &head, nil
}

// extends checks that the log of a head that this gateway has kept, under another name of its node, extends it.
func (e *Evidence) extends(ctx context.Context, known *ledger.Head) error {
	there, err := ledger.Exists(ctx, e.store, e.sealer, known.Origin)
	if err == nil && !there {
		err = fmt.Errorf("evidence: the log %s, whose head %s has, is not there: %w", known.Origin, e.headFile, ledger.ErrTampered)
	}
	if err != nil {
		return err
	}
	o, err := e.logOptions(known.Origin)
	if err != nil {
		return err
	}
	o.Known = []ledger.Head{*known}
	if _, err = ledger.Open(ctx, o); err != nil {
		return fmt.Errorf("evidence: the log %s, which this gateway has written before: %w", known.Origin, err)
	}
	return nil
}

// WriteHead replaces the copy of the head if the log has grown.
func (e *Evidence) WriteHead() error {
	head := e.log.Head()
	if e.headFile == "" || head.Size == e.headSize.Load() {
		return nil
	}
	if err := durable.Write(e.headFile, head.Note, durable.Private); err != nil {
		return fmt.Errorf("evidence: keeping the head of the ledger: %w", err)
	}
	e.headSize.Store(head.Size)
	return nil
}

// NewBatch returns a batch that records presented tokens, parents first, and then drafts in
// their order. They are not pruned before keep. The batch must be ended; its error is
// ledger.ErrDuplicate where a token is recorded already.
func (e *Evidence) NewBatch(keep time.Time, tokens []*ect.Token, drafts ...*ect.Draft) (*store.Batch, error) {
	nodes := make([]ect.Node, 0, len(tokens)+len(drafts))
	if len(tokens) > 1 {
		tokens = parentsFirst(tokens)
	}
	events := make([]ledger.Event, 0, len(tokens)+len(drafts))
	for _, token := range tokens {
		events = append(events, eventOf(token, keep))
		nodes = append(nodes, recordedNode(token))
	}
	e.later.mu.RLock()
	for _, d := range drafts {
		header, node := e.headerOf(d), e.draftNode(d)
		payload := d.Payload()
		if header == nil {
			token, err := e.issuer.Sign(d)
			if err != nil {
				e.later.mu.RUnlock()
				return nil, err
			}
			payload = token.Raw()
		}
		events = append(events, ledger.Event{
			ID: d.ID(), Workflow: d.Workflow(), Action: d.Action(), Issuer: d.Issuer(), Parents: node.Parents,
			Time: d.IssuedAt(), KeepUntil: keep, Payload: []byte(payload), Header: header, Parsed: d,
		})
		nodes = append(nodes, node)
	}
	b, err := e.log.Record(events...)
	e.later.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	b.OnDone(func(err error) error {
		if err == nil {
			for _, n := range nodes {
				e.recent.add(scope{n.Workflow, n.ID}, n)
			}
			for i := range events {
				if entry := (ledger.Entry{Event: events[i]}); beginsWorkflow(&entry) {
					e.begun.add(scope{entry.Workflow, ""}, struct{}{})
				}
			}
		}
		e.live.recorded(events, err)
		return err
	})
	return b, nil
}

func eventOf(token *ect.Token, keep time.Time) ledger.Event {
	// A pruned id could be presented again.
	for _, until := range []time.Time{token.Expires().Add(ect.Skew + clockMargin), promisedUntil(token)} {
		if until.After(keep) {
			keep = until
		}
	}
	return ledger.Event{ // P3: an unproven issuer is not recorded
		ID: token.NodeID(), Workflow: token.Workflow(), Action: token.Action(), Issuer: token.Author(), Parents: token.Parents(),
		Time: token.IssuedAt(), KeepUntil: keep, Payload: []byte(token.Raw()), Parsed: token,
	}
}

// longestPromise bounds how long an agent's checkpoint is kept.
const longestPromise = 366 * 24 * time.Hour

// promisedUntil is the end of the ttl that an agent's checkpoint states (cascade 4.2.2).
func promisedUntil(token *ect.Token) time.Time {
	seconds, ok := token.Ext().Number(ect.MemberTTL)
	if token.Event() != ect.EventCheckpoint || !ok || seconds <= 0 {
		return time.Time{}
	}
	return token.IssuedAt().Add(time.Duration(min(seconds, longestPromise.Seconds()) * float64(time.Second)))
}

// recordedNode is the graph's node of a presented token once it is recorded.
func recordedNode(t *ect.Token) ect.Node {
	n := t.Node()
	if n.Level < ect.L2 {
		return n
	}
	if n.Level = ect.L3; n.Weakest > 0 {
		n.Weakest = t.Lineage().Weakest
	}
	return n
}

// draftNode is the graph's node of a draft that is not signed yet.
func (e *Evidence) draftNode(d *ect.Draft) ect.Node {
	n := ect.Node{ID: d.ID(), Workflow: d.Workflow(), IssuedAt: d.IssuedAt(), Parents: d.Parents(), Level: ect.L3, Weakest: ect.L3}
	for _, id := range n.Parents {
		parent, ok := e.recent.find(n.Workflow, id)
		if !ok || parent.Weakest == 0 {
			n.Ancestors, n.Weakest = 0, 0 // unknown: the verifier walks the graph
			return n
		}
		n.Ancestors += parent.Ancestors + 1
		n.Weakest = min(n.Weakest, parent.Weakest)
	}
	return n
}

// Append records tokens and drafts by a commit of their own.
func (e *Evidence) Append(ctx context.Context, keep time.Time, tokens []*ect.Token, drafts ...*ect.Draft) error {
	b, err := e.NewBatch(keep, tokens, drafts...)
	if err != nil {
		return err
	}
	return b.Commit(ctx, e.store)
}

// spaceNames is the store's key of the names that the gateway has had.
const spaceNames = 'n'

const (
	// maxNames and maxNameKeys bound the history; the oldest are dropped.
	maxNames    = 32
	maxNameKeys = 256
)

// names are the names under which this store's gateway has signed, each with its keys, the
// latest name last. They are kept with the ledger that they explain, and sealed, so that
// nobody can add one (ADR 0040).
type names struct {
	mu sync.Mutex
	sealedList[ect.Former]
}

// tableOf keeps records whose keys begin with prefix. In errors they are called so.
func tableOf[T any](e *Evidence, prefix []byte, called string) store.Table[T] {
	return store.Table[T]{
		Store: e.store, Sealer: e.sealer, Prefix: string(prefix), Unreadable: fmt.Errorf("evidence: %s: %w", called, ledger.ErrTampered),
	}
}

// sealedList is a list that is stored as one record.
type sealedList[T any] struct {
	table   store.Table[[]T] // the only key is the prefix
	called  string           // in errors
	all     []T
	version store.Version
	key     uint32 // under which it is sealed
}

// read reads the stored list, if any.
func (l *sealedList[T]) read(ctx context.Context) error {
	row, err := l.table.Get(ctx, l.table.Key())
	if err != nil || row.Record == nil {
		return err
	}
	l.all, l.version, l.key = *row.Record, row.Version, l.table.Sealer.KeyOf(row.Value) // others hold the slices of the list before
	return nil
}

// write replaces the list.
func (l *sealedList[T]) write(ctx context.Context, all []T) error {
	condition := store.Absent()
	if l.version != 0 {
		condition = store.VersionIs(l.version)
	}
	w := l.table.Put(l.table.Key(), &all, condition, time.Time{})
	version, err := l.table.Store.Commit(ctx, w)
	if err != nil {
		return fmt.Errorf("evidence: writing %s: %w", l.called, err)
	}
	l.all, l.version, l.key = all, version, l.table.Sealer.KeyOf(w.Value)
	return nil
}

// update replaces the list by what change makes of it, which is nil where nothing has to change. What
// another node has written meanwhile is read, and changed in turn.
func (l *sealedList[T]) update(ctx context.Context, e *Evidence, change func(all []T) []T) error {
	for {
		next := change(slices.Clone(l.all))
		if next == nil {
			return nil
		}
		err := l.write(ctx, next)
		if lost := (*store.Conflict)(nil); e.fleet.store == nil || !errors.As(err, &lost) {
			return err
		}
		if err := errors.Join(store.AwaitGroup(ctx), l.read(ctx)); err != nil {
			return err
		}
	}
}

// reseal writes the list again unless it is sealed under the newest key.
func (l *sealedList[T]) reseal(ctx context.Context, e *Evidence, newest uint32) error {
	return l.update(ctx, e, func(all []T) []T {
		if l.version == 0 || l.key == newest {
			return nil
		}
		return slices.Concat([]T{}, all)
	})
}

// RecordName records that the gateway signs under a name with the newest key of the ring.
// Call it before anything is signed under that name or with that key.
func (e *Evidence) RecordName(ctx context.Context, name string, ring *ect.Ring) error {
	if err := e.publish(ctx, ring); err != nil {
		return err
	}
	keys := ring.List()
	signs := keys[len(keys)-1].ID
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	return e.names.update(ctx, e, func(next []ect.Former) []ect.Former {
		now := ect.Former{Name: name}
		if i := slices.IndexFunc(next, func(f ect.Former) bool { return f.Name == name }); i >= 0 {
			if slices.Contains(next[i].Keys, signs) && i == len(next)-1 {
				return nil
			}
			now = next[i]
			next = slices.Delete(next, i, i+1)
		}
		if !slices.Contains(now.Keys, signs) {
			now.Keys = append(slices.Clone(now.Keys), signs)
		}
		now.Keys = now.Keys[max(0, len(now.Keys)-maxNameKeys):]
		next = append(next, now)
		return next[max(0, len(next)-maxNames):]
	})
}

// laterKeys are the keys under which events are recorded with the header of their token, to
// be signed when the token is shown (ADR 0064). They are stored before the first such event,
// so that none of them loses its private part unnoticed.
type laterKeys struct {
	mu     sync.RWMutex // read-held from the choice of a key until the event has its ticket
	signs  string       // the newest key of the ring, or of the one that is about to be loaded
	walked []string     // those under which all is signed, once SignReplaced has ended
	noted  string       // the key that this process has noted last
	chosen atomic.Bool  // something was recorded under noted
	sealedList[string]
}

// headerOf is the header that a draft is recorded with; nil if it is signed at once: where other nodes show the token,
// which do not have the key. later.mu is held.
func (e *Evidence) headerOf(d *ect.Draft) []byte {
	if e.fleet.store != nil || len(d.Payload()) > ledger.MaxClaims {
		return nil
	}
	k := &e.later
	header, kid := e.ring.Header()
	if !slices.Contains(k.all, kid) {
		return nil
	}
	if kid == k.noted && !k.chosen.Load() {
		k.chosen.Store(true)
	}
	return header
}

// maxLater bounds the noted keys. Under others events are signed at once: dropping a key could lose tokens.
const maxLater = 256

// SignWhenShown notes the newest key of the ring: from now on events are signed under it when
// their tokens are asked for. Under a key that is not noted they are signed at once, and always where
// the store is shared. The key that was noted before is forgotten if nothing was recorded under
// it. While the ring changes, nobody may call ForgetSigned.
func (e *Evidence) SignWhenShown(ctx context.Context, ring *ect.Ring) error {
	k := &e.later
	k.mu.Lock()
	defer k.mu.Unlock()
	_, kid := ring.Header()
	k.signs = kid
	k.walked = slices.DeleteFunc(k.walked, func(walked string) bool { return walked == kid })
	note, same := false, false
	err := k.update(ctx, e, func(all []string) []string {
		next := slices.Clone(all)
		if k.noted != "" && k.noted != kid && !k.chosen.Load() {
			next = slices.DeleteFunc(next, func(noted string) bool { return noted == k.noted })
		}
		if note = e.fleet.store == nil && !slices.Contains(next, kid) && len(next) < maxLater; note {
			next = append(next, kid)
		}
		if same = slices.Equal(next, all); same {
			return nil
		}
		return slices.Concat([]string{}, next)
	})
	if err != nil || same {
		return err
	}
	k.noted = ""
	if k.chosen.Store(false); note {
		k.noted = kid
	}
	return nil
}

// KeysToSign are the keys under which events may be recorded that have no signature, without those of
// other nodes.
func (e *Evidence) KeysToSign() []string {
	own := e.ring.List()
	e.later.mu.RLock()
	defer e.later.mu.RUnlock()
	return slices.DeleteFunc(slices.Clone(e.later.all), func(kid string) bool {
		return e.ring.OfPeer(kid) && !slices.ContainsFunc(own, func(k ect.RingKey) bool { return k.ID == kid })
	})
}

// SignReplaced makes and stores the signatures of what was recorded under replaced keys of
// the ring and is not signed; in a shared store also under the key that signs. Then
// ForgetSigned forgets these keys. The error is ledger.ErrTampered if entries were altered
// that may name one of them, or that of ledger.Log.StoreSignatures; with any error all keys
// are still needed, and the next call goes on. Do not call it twice at a time.
func (e *Evidence) SignReplaced(ctx context.Context) (stored int, err error) {
	keys, later := e.ring.List(), &e.later
	var walk []string
	later.mu.Lock() // who has chosen one of these keys has a batch now
	for _, k := range keys {
		replaced := !k.Signs && k.ID != later.signs && !k.Until.IsZero()
		if slices.Contains(later.all, k.ID) && k.Private && !k.Revoked && (replaced || e.fleet.store != nil) {
			walk = append(walk, k.ID)
		}
	}
	later.walked = slices.Clone(walk) // SignWhenShown takes out what signs again
	later.mu.Unlock()
	if len(walk) == 0 {
		return 0, nil
	}
	of := func(header []byte) bool { return slices.Contains(walk, ect.HeaderKeyID(header)) }
	stored, err = e.log.StoreSignatures(ctx, of)
	err = errors.Join(err, e.eachLeft(ctx, func(log *ledger.Log) error { // an earlier name of this node, perhaps
		n, err := log.StoreSignatures(ctx, of)
		stored += n
		return err
	}))
	if err != nil {
		later.mu.Lock()
		later.walked = nil
		later.mu.Unlock()
	}
	return stored, err
}

// ForgetSigned forgets the keys whose SignReplaced has ended without an error and that do not
// sign again since, and revoked ones, which sign nothing. It returns the replaced and revoked
// keys of the ring whose private parts nothing needs any more. The ring must not change until
// these are removed.
func (e *Evidence) ForgetSigned(ctx context.Context) (done []string, err error) {
	keys, later := e.ring.List(), &e.later
	later.mu.Lock()
	forget := later.walked
	later.walked = nil
	later.mu.Unlock()
	for _, k := range keys {
		if k.Revoked {
			forget = append(forget, k.ID)
		}
	}
	if err := e.ForgetKeys(ctx, forget...); err != nil {
		return nil, err
	}
	needed := e.KeysToSign()
	for _, k := range keys {
		if k.Private && !k.Signs && (k.Revoked || !k.Until.IsZero()) && !slices.Contains(needed, k.ID) {
			done = append(done, k.ID)
		}
	}
	return done, nil
}

// ForgetKeys says that nothing more is signed under these keys.
func (e *Evidence) ForgetKeys(ctx context.Context, kids ...string) error {
	e.later.mu.Lock()
	defer e.later.mu.Unlock()
	return e.later.update(ctx, e, func(all []string) []string {
		left := slices.DeleteFunc(slices.Clone(all), func(kid string) bool { return slices.Contains(kids, kid) })
		if len(left) == len(all) {
			return nil
		}
		return left
	})
}

// Reseal seals with the newest key what older ones have sealed.
func (e *Evidence) Reseal(ctx context.Context) error {
	_, err := e.log.Reseal(ctx)
	err = errors.Join(err, e.eachLeft(ctx, func(log *ledger.Log) error {
		_, err := log.Reseal(ctx)
		return err
	}))
	ids := e.sealer.KeyIDs()
	newest := ids[len(ids)-1]
	e.later.mu.Lock()
	err = errors.Join(err, e.later.reseal(ctx, e, newest))
	e.later.mu.Unlock()
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	r := store.NewResealer(e.store, e.sealer)
	return errors.Join(err, e.names.reseal(ctx, e, newest), r.Tables(ctx, string(spaceOpen), e.fleet.peers.Prefix))
}

// MissingKeys lists the keys that the gateway has signed with and the ring lacks: their
// tokens cannot be verified any more.
func (e *Evidence) MissingKeys(ring *ect.Ring) []string {
	var have []string
	for _, k := range ring.List() {
		have = append(have, k.ID)
	}
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	var lacks []string
	for _, f := range e.names.all {
		for _, id := range f.Keys {
			if !e.ring.OfPeer(id) && !slices.Contains(have, id) && !slices.Contains(lacks, id) {
				lacks = append(lacks, id)
			}
		}
	}
	return lacks
}

// Exists reports whether the store holds a ledger.
func Exists(ctx context.Context, st store.Store) (bool, error) {
	for _, err := range st.Scan(ctx, store.Range{From: []byte{spaceLedger}, To: []byte{spaceLedger + 1}, Limit: 1}) {
		return err == nil, err
	}
	return false, nil
}

// Signed reports whether the store may hold tokens of this gateway, of a fleet of this node: then its key
// file must be there.
func Signed(ctx context.Context, st store.Store, sealer store.Sealer) (bool, error) {
	if shared, ok := st.(store.Shared); ok {
		return ledger.Exists(ctx, st, sealer, originPrefix+shared.Self().Node)
	}
	return Exists(ctx, st)
}

// spaceLedger begins all keys of the ledger (package ect/ledger).
const spaceLedger = 'l'
