package evidence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// How the nodes of a fleet, the members of one store, agree on evidence (ADR 0132): each has a log and
// signing keys of its own, whose public parts it stores for the others. What a node leaves behind that is
// gone, the others bring to its end.

// originPrefix and the name of a node are the origin of its log.
const originPrefix = "agent-guard/"

const (
	// tendEvery is how often a node looks after what others have left, besides when one leaves.
	tendEvery = time.Minute
	// keepPeer is how long the keys of a node that is gone verify new tokens: the longest life of one.
	keepPeer = ect.MaxLife + time.Minute
)

// nodes is what a node does for and with the others. Its store is nil where there are none.
type nodes struct {
	store   *fleet.Fleet
	node    string
	changed chan struct{} // buffers one signal: keys or names were written
	added   chan struct{} // buffers one signal: another log has more entries
	ends    []func()      // stop tend, hear and what follows the store

	hearing sync.Mutex
	hears   bool     // what others record is passed on; guarded by hearing
	waiting []func() // who waits until it has been; guarded by hearing

	peers store.Table[peer]

	publishing sync.Mutex
	published  []byte // the text that is stored of the own keys; guarded by publishing
	reading    sync.Mutex
}

// Fleet reports whether other nodes may use the store at the same time.
func (e *Evidence) Fleet() bool { return e.fleet.store != nil }

// beginFleet reads what other nodes have stored, and follows it.
func (e *Evidence) beginFleet(ctx context.Context) error {
	f := &e.fleet
	f.changed, f.added = make(chan struct{}, 1), make(chan struct{}, 1)
	changed := func(key []byte) {
		if len(key) > len(e.later.table.Prefix) && key[0] == spaceNames {
			return // one of execution's: so it is with most calls without a key
		}
		signal(f.changed)
	}
	f.ends = append(f.ends, f.store.Follow([]byte{spaceNames}, changed), f.store.Follow([]byte{spacePeers}, changed),
		f.store.Follow(ledger.HeadPrefix(), func([]byte) { signal(f.added) }),
		f.store.Follow(ledger.IDPrefix(), e.live.recordedElsewhere))
	others, err := e.log.Others(ctx)
	if err == nil {
		err = e.publish(ctx, e.ring)
	}
	if err == nil {
		err = e.readPeers(ctx)
	}
	f.ends = append(f.ends, e.tend().Start())
	if e.placed != nil && err == nil {
		f.hears = true
		f.ends = append(f.ends, e.hear(others).Start())
	}
	if err != nil {
		e.endFleet()
	}
	return err
}

// signal leaves a signal, if there is none yet.
func signal(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// hear passes on what the other logs get: whoever is to know what is recorded needs that of all nodes.
func (e *Evidence) hear(others *ledger.Others) fleet.Job {
	f := &e.fleet
	warned := false
	return fleet.Job{Wake: f.added, Do: func(ctx context.Context, _ bool) (time.Duration, error) {
		f.hearing.Lock()
		waiting := f.waiting
		f.waiting = nil
		f.hearing.Unlock()
		err := others.Read(ctx, func(entry *ledger.Entry) { e.placed(entry.Log, &entry.Event, entry.Recorded) })
		if err != nil {
			f.hearing.Lock()
			f.waiting = append(waiting, f.waiting...)
			f.hearing.Unlock()
			if !warned && ctx.Err() == nil {
				e.logger.Warn("what other nodes have recorded cannot be read; it is tried again", slog.Any("error", err))
			}
			warned = true
			return 0, err
		}
		warned = false
		for _, do := range waiting {
			do()
		}
		return 0, nil
	}}
}

// Heard calls do once Options.Placed has got what other nodes had in their logs when it was called: at once where there
// are none. do must not wait, and is not called any more once the ledger is closed.
func (e *Evidence) Heard(do func()) {
	f := &e.fleet
	f.hearing.Lock()
	hears := f.hears
	if hears {
		f.waiting = append(f.waiting, do)
	}
	f.hearing.Unlock()
	if !hears {
		do()
		return
	}
	signal(f.added)
}

// tend retires the keys of nodes that are gone, and reads what others write of theirs.
func (e *Evidence) tend() fleet.Job {
	return fleet.Job{
		Fleet: e.fleet.store, Wake: e.fleet.changed, Every: tendEvery,
		Do: func(ctx context.Context, _ bool) (time.Duration, error) {
			if err := e.readShared(ctx); err != nil && ctx.Err() == nil {
				e.logger.Error("the keys or names of other nodes cannot be read", slog.Any("error", err))
			}
			if err := e.retirePeers(ctx); err != nil && ctx.Err() == nil {
				e.logger.Warn("the keys of a node that is gone cannot be retired; it is tried again", slog.Any("error", err))
			}
			return 0, nil
		},
	}
}

// endFleet stops following.
func (e *Evidence) endFleet() {
	for _, end := range e.fleet.ends {
		end()
	}
}

// left are the origins of the logs whose nodes have no member; none where the store has no members.
func (e *Evidence) left(ctx context.Context) ([]string, error) {
	if e.fleet.store == nil {
		return nil, nil
	}
	all, err := e.log.Logs(ctx)
	if err != nil {
		return nil, err
	}
	members, err := e.fleet.store.Members(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(origin string) bool {
		return origin == e.log.Origin() || slices.ContainsFunc(members, func(m store.Member) bool { return origin == originPrefix+m.Node })
	}), nil
}

// eachLeft calls do with the log of each node that is gone. Should the node come
// back, or another member do the same: every commit is on the condition of the head, or of what it
// removes.
func (e *Evidence) eachLeft(ctx context.Context, do func(log *ledger.Log) error) error {
	all, err := e.left(ctx)
	for _, origin := range all {
		log, opening := e.openLeft(ctx, origin)
		if opening == nil {
			opening = do(log)
		}
		err = errors.Join(err, opening)
	}
	return err
}

func (e *Evidence) openLeft(ctx context.Context, origin string) (*ledger.Log, error) {
	o, err := e.logOptions(origin)
	if err != nil {
		return nil, err
	}
	o.Placed = nil // hear reads it as that of any other node
	log, err := ledger.Open(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("evidence: the log %s, whose node is gone: %w", origin, err)
	}
	return log, nil
}

// spacePeers begins the store's keys of the public keys of each node: a keyed hash of its name. The value
// is a peer, sealed.
const spacePeers = 'i'

// peer is what a node stores of its signing keys for the others.
type peer struct {
	Node string `cbor:"node"`
	Keys []byte `cbor:"keys"` // ect.Ring.Publish
	// Until is when they are accepted no more, written by another node once this one is gone.
	Until time.Time `cbor:"until,omitzero"`
}

func (e *Evidence) peerKey(node string) []byte {
	hash := store.Index(e.sealer, "peer", node)
	return e.fleet.peers.Key(hash[:hashed])
}

// publish stores the public keys of this node, before anything is signed with one of them.
func (e *Evidence) publish(ctx context.Context, ring *ect.Ring) error {
	f := &e.fleet
	if f.store == nil {
		return nil
	}
	text, err := ring.Publish()
	if err != nil {
		return err
	}
	f.publishing.Lock()
	defer f.publishing.Unlock()
	if bytes.Equal(text, f.published) {
		return nil
	}
	own := &peer{Node: f.node, Keys: text}
	if _, err := e.store.Commit(ctx, f.peers.Put(e.peerKey(own.Node), own, store.Condition{}, time.Time{})); err != nil {
		return fmt.Errorf("evidence: storing the public keys: %w", err)
	}
	f.published = text
	return nil
}

// readPeers gives the keys of the other nodes to the ring.
func (e *Evidence) readPeers(ctx context.Context) error {
	e.fleet.reading.Lock() // so that what was read last is what is set last
	defer e.fleet.reading.Unlock()
	var keys []ect.Peer
	for row, err := range e.fleet.peers.All(ctx) {
		if err != nil {
			return err
		}
		if row.Record.Node != e.fleet.node {
			keys = append(keys, ect.Peer{Keys: row.Record.Keys, Until: row.Record.Until})
		}
	}
	return e.ring.SetPeers(keys, e.readPeers)
}

// retirePeers notes of nodes that are gone when their keys are accepted no more. A node that comes back
// stores its keys anew.
func (e *Evidence) retirePeers(ctx context.Context) error {
	var all []store.Row[peer]
	for row, err := range e.fleet.peers.All(ctx) {
		if err != nil {
			return err
		}
		all = append(all, row)
	}
	members, err := e.fleet.store.Members(ctx) // after the keys: who has stored them is a member until it is gone
	if err != nil {
		return err
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	retired := false
	for _, row := range all {
		p := row.Record
		if !p.Until.IsZero() || slices.ContainsFunc(members, func(m store.Member) bool { return m.Node == p.Node }) {
			continue
		}
		p.Until = now.Add(keepPeer).UTC().Truncate(time.Second)
		_, err := e.store.Commit(ctx, e.fleet.peers.Put(row.Key, p, store.VersionIs(row.Version), time.Time{}))
		if lost := (*store.Conflict)(nil); err != nil && !errors.As(err, &lost) { // it is back, or another node was first
			return err
		}
		retired = true
	}
	if !retired {
		return nil
	}
	return e.readPeers(ctx)
}

// readShared reads again what another node has written.
func (e *Evidence) readShared(ctx context.Context) error {
	e.names.mu.Lock()
	err := e.names.read(ctx)
	e.names.mu.Unlock()
	e.later.mu.Lock()
	err = errors.Join(err, e.later.read(ctx))
	e.later.mu.Unlock()
	return errors.Join(err, e.readPeers(ctx))
}

// logOptions are those of the log of a node, this one or another.
func (e *Evidence) logOptions(origin string) (ledger.Options, error) {
	head, err := newHeadKey(e.sealer, origin)
	if err != nil {
		return ledger.Options{}, err
	}
	var placed func(e *ledger.Event, recorded time.Time)
	if e.placed != nil {
		placed = func(ev *ledger.Event, recorded time.Time) { e.placed(origin, ev, recorded) }
	}
	return ledger.Options{
		Store: e.store, Sealer: e.sealer, Origin: origin, HeadSigner: head, HeadKeys: note.VerifierList(head.Verifier),
		KeysOf: func(origin string) (note.Verifiers, error) {
			head, err := newHeadKey(e.sealer, origin)
			if err != nil {
				return nil, err
			}
			return note.VerifierList(head.Verifier), nil
		},
		Signature: e.ring.Signature, Verifies: e.ring.Verifies,
		Logger: e.logger, Links: e.indexIDs, Placed: placed,
	}, nil
}

// HeadKeyOf is the public key of the heads of a log of the store, in the form of signed notes; empty for
// what is the name of none.
func (e *Evidence) HeadKeyOf(origin string) string {
	if !strings.HasPrefix(origin, originPrefix) {
		return ""
	}
	head, err := newHeadKey(e.sealer, origin)
	if err != nil {
		return ""
	}
	return head.text
}
