// Package circuits keeps the states of circuit breakers in the store, each under the node of its gateway, so
// that they survive restarts and the gateways of one store see each other's. By option these send one probe
// between them (ADR 0138).
package circuits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Space begins the store's keys, all sealed. name is a keyed hash of the breaker's name, of 16 bytes, and node
// one of the gateway's, of 8:
//
//	b name         the state of a breaker, of a store that one gateway has
//	b name node    the state of a node's breaker, of a store that several have
//	b name p       the probe that the nodes send between them
const Space = 'b'

const (
	lenName, lenNode = 16, 8
	kindProbe        = 'p'
)

const (
	// closedMemory is how long the state of a closed breaker is kept: longer than the time within which a new
	// opening continues with the last cooldown.
	closedMemory = time.Hour
	// nodeMemory is how long the states of a node that is gone wait for its return, and refreshEvery how often a
	// node says that it is there.
	nodeMemory   = 30 * 24 * time.Hour
	refreshEvery = 24 * time.Hour
	// storeTime bounds what is done at the store on nobody's behalf.
	storeTime = 5 * time.Second
)

// Options are what a Keeper works with. All others are needed.
type Options struct {
	Store    store.Store
	Sealer   store.Sealer
	Breakers Breakers
	// Elsewhere gets the breakers of other nodes that open and close, once for each. It may be nil.
	Elsewhere func(node string, s breaker.Snapshot)
	Log       *slog.Logger
}

// Breakers are those of the process.
type Breakers struct {
	// Snapshot returns the state of a breaker that must survive the process. keep is false if a new one would be
	// in the same state; there is false if it is forgotten.
	Snapshot func(key breaker.Key) (s breaker.Snapshot, keep, there bool)
	// Restore continues a breaker in the state of an earlier process; false if nothing leads to its upstream.
	Restore func(breaker.Snapshot) (bool, error)
	// Status lists all breakers.
	Status func() []breaker.Status
	// Follow is breaker.Breaker.Follow; false also if there is no such breaker, or if it probes for itself.
	Follow func(breaker.Key, breaker.PeerProbe) bool
}

// Keeper keeps the states of the process's breakers. It is safe for concurrent use.
type Keeper struct {
	// Node is the name of this node; empty where one gateway has the store.
	Node string

	o       Options
	stored  store.Table[record]
	probes  store.Table[probe]
	members *fleet.Fleet   // nil where one gateway has the store
	turns   [16]sync.Mutex // serialise storing the state of each breaker
	fleet   others
}

// New returns a keeper. Restore and Follow begin its work.
func New(o Options) *Keeper {
	k := &Keeper{
		o: o,
		stored: store.Table[record]{
			Store: o.Store, Sealer: o.Sealer, Prefix: string(Space), Unreadable: errUnreadable,
			Check: func(r *record) error { return r.Check() },
		},
		probes: store.Table[probe]{Store: o.Store, Sealer: o.Sealer, Prefix: string(Space), Unreadable: errUnreadable},
	}
	k.fleet = others{
		changed: make(chan struct{}, 1), open: map[string]record{}, again: map[string]bool{},
		held: map[string]time.Time{}, sent: map[breaker.Key]*sentProbe{},
	}
	if k.members = fleet.Of(o.Store); k.members != nil {
		k.Node = k.members.Self().Node
	}
	return k
}

// record is the state of a breaker as it is stored.
type record struct {
	breaker.Snapshot
	// Node is whose breaker it is, and Stored when it was stored, by the store's clock. Both are empty in a store
	// that one gateway has.
	Node   string    `json:"node,omitempty"`
	Stored time.Time `json:"stored,omitzero"` // see Node
}

// errUnreadable: what is stored of a breaker does not open, or cannot be decoded.
var errUnreadable = errors.New("circuits: a record cannot be read by this build")

// name begins the keys of what is stored of a breaker on any node.
func (k *Keeper) name(key breaker.Key) []byte {
	name := k.o.Sealer.Index("circuit", key.Upstream, key.Class)
	return k.stored.Key(name[:lenName])
}

// isProbe reports whether a key is that of a probe, not of a state.
func isProbe(key []byte) bool { return len(key) == 1+lenName+1 }

// key is that of this node's state of a breaker.
func (k *Keeper) key(key breaker.Key) []byte {
	name := k.name(key)
	if k.members != nil {
		node := k.o.Sealer.Index("circuit node", k.Node)
		name = append(name, node[:lenNode]...)
	}
	return name
}

// states are the stored states of breakers of all nodes. Those that cannot be read are logged, and left as they
// are: one may be a mode set by an operator, under a key that is missing now or in a newer format.
func (k *Keeper) states(ctx context.Context, do func(store.Row[record])) error {
	for row, err := range k.stored.All(ctx) {
		switch {
		case err != nil && !errors.Is(err, errUnreadable):
			return err
		case isProbe(row.Key):
			continue
		case err != nil: // it names the upstream if that is known
			k.o.Log.Warn("the state of a circuit breaker cannot be read; it is left as it is until the breaker changes its state", slog.Any("error", err))
		default:
			do(row)
		}
	}
	return nil
}

// Restore gives the breakers the states that the last process of this node has stored, and stores those that
// have changed before. What a gateway has stored that had the store alone is of whoever comes first.
func (k *Keeper) Restore(ctx context.Context) {
	var gone []store.Write
	var alone []store.Row[record]
	own := map[breaker.Key]bool{}
	restore := func(row store.Row[record]) {
		r := row.Record
		kept, err := k.o.Breakers.Restore(r.Snapshot)
		switch {
		case err != nil:
			k.o.Log.Warn("the state of a circuit breaker cannot be restored", slog.String("upstream", r.Upstream), slog.Any("error", err))
		case !kept || r.Node != k.Node:
			gone = append(gone, store.Write{Key: row.Key, Delete: true, If: store.VersionIs(row.Version)})
		}
		if kept && r.State != breaker.Closed {
			fields := []any{slog.String("upstream", r.Upstream), slog.String("class", r.Class),
				slog.String("state", r.State.String())}
			if !r.Until.IsZero() { // it may be half-open
				fields = append(fields, slog.Time("until", r.Until))
			}
			k.o.Log.Warn("a circuit breaker was not closed when the last process ended", append(fields, slog.String("cause", r.Cause))...)
		}
	}
	read := k.states(ctx, func(row store.Row[record]) {
		switch r := row.Record; r.Node {
		case k.Node:
			own[breaker.Key{Upstream: r.Upstream, Class: r.Class}] = true
			restore(row)
		case "":
			alone = append(alone, row)
		}
	})
	for _, row := range alone {
		if r := row.Record; own[breaker.Key{Upstream: r.Upstream, Class: r.Class}] {
			gone = append(gone, store.Write{Key: row.Key, Delete: true, If: store.VersionIs(row.Version)})
			continue
		}
		restore(row)
	}
	if read != nil {
		k.o.Log.Warn("the states of circuit breakers cannot be read", slog.Any("error", read))
	}
	// What opened before the store was open, and what was another's, is stored before that is deleted.
	if err := k.keepAll(ctx); err != nil {
		k.o.Log.Warn("the states of circuit breakers cannot be recorded", slog.Any("error", err))
		return
	}
	for _, w := range gone { // each for itself: another node may have been first
		if _, err := k.o.Store.Commit(ctx, w); err != nil && !errors.As(err, new(*store.Conflict)) {
			k.o.Log.Warn("the states of circuit breakers that are gone cannot be deleted", slog.Any("error", err))
			break
		}
	}
}

// Keep stores the state of a breaker, unless it equals that of a new one. Of a breaker that is forgotten it
// leaves what is stored, and deletes it if gone is set: at the end of a process all are forgotten, while their
// last changes are still being recorded. more are in the same commit.
func (k *Keeper) Keep(ctx context.Context, key breaker.Key, gone bool, more ...store.Write) error {
	w := store.Write{Key: k.key(key), Delete: true}
	turn := &k.turns[int(w.Key[1])%len(k.turns)] // the newest state must be stored last
	turn.Lock()
	defer turn.Unlock()
	s, keep, there := k.o.Breakers.Snapshot(key)
	if !there && !gone {
		return nil
	}
	if keep {
		r := record{Snapshot: s}
		closed := s.State == breaker.Closed && s.Mode == breaker.Auto
		if k.members != nil {
			now, err := k.o.Store.Now(ctx)
			if err != nil {
				return err
			}
			r.Node, r.Stored, w.Expires = k.Node, now, now.Add(nodeMemory)
			if closed {
				w.Expires = now.Add(closedMemory)
			}
		} else if closed {
			w.Expires = s.At.Add(closedMemory)
		}
		w = k.stored.Put(w.Key, &r, store.Condition{}, w.Expires)
	}
	_, err := k.o.Store.Commit(ctx, append([]store.Write{w}, more...)...)
	return err
}

// keepAll stores the states of all breakers, sealed with the newest key. If a state changes meanwhile it is
// stored again, since this commit may have come after that of the change.
func (k *Keeper) keepAll(ctx context.Context) error {
	before := map[breaker.Key]uint64{}
	for settled := false; !settled; {
		settled = true
		for _, s := range k.o.Breakers.Status() {
			if before[s.Key] == s.Generation {
				continue
			}
			before[s.Key], settled = s.Generation, false
			// Skip new breakers: nothing is stored of them, except a state that could not be read, which stays.
			if _, keep, _ := k.o.Breakers.Snapshot(s.Key); !keep && s.State == breaker.Closed && s.Mode == breaker.Auto {
				continue
			}
			if err := k.Keep(ctx, s.Key, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// Reseal seals what is stored of all nodes with the newest key.
func (k *Keeper) Reseal(ctx context.Context) error {
	r := store.NewResealer(k.o.Store, k.o.Sealer)
	if err := r.Tables(ctx, string(Space)); err != nil {
		return err
	}
	if r.Damaged > 0 {
		return fmt.Errorf("circuits: %d states cannot be read", r.Damaged)
	}
	return nil
}

// State is the state of a breaker on another node.
type State struct {
	Node string
	// Age is how long ago the node has stored it, by the store's clock.
	Age    time.Duration
	Status breaker.Status
}

// Others returns the states of the breakers of the other nodes that run now, as they have stored them, sorted by
// node, upstream and class. Each node has those of all keys that any of them has, and also of these: a breaker that
// is closed and was not open lately is not stored. What a node has stored that does not run is not shown: it
// refuses nobody.
func (k *Keeper) Others(ctx context.Context, keys []breaker.Key) ([]State, error) {
	if k.members == nil {
		return nil, nil
	}
	members, err := k.members.Members(ctx)
	if err != nil {
		return nil, err
	}
	now, err := k.o.Store.Now(ctx)
	if err != nil {
		return nil, err
	}
	stored := map[string]map[breaker.Key]State{}
	for _, m := range members {
		if m.Node != k.Node {
			stored[m.Node] = map[breaker.Key]State{}
		}
	}
	all := map[breaker.Key]bool{}
	for _, key := range keys {
		all[key] = true
	}
	err = k.states(ctx, func(row store.Row[record]) {
		r := row.Record
		if of := stored[r.Node]; of != nil {
			key := breaker.Key{Upstream: r.Upstream, Class: r.Class}
			of[key] = State{r.Node, max(now.Sub(r.Stored), 0), r.status(max(now.Sub(r.Stored), 0))}
			all[key] = true
		}
	})
	var states []State
	for node, of := range stored {
		for key := range all {
			s, there := of[key]
			if !there {
				s = State{Node: node, Status: breaker.Status{Key: key}}
			}
			states = append(states, s)
		}
	}
	slices.SortFunc(states, func(a, b State) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Status.Key.Upstream, b.Status.Key.Upstream), cmp.Compare(a.Status.Key.Class, b.Status.Key.Class))
	})
	return states, err
}

// status is what a state says at an age. Its times are those of its node's clock.
func (r *record) status(age time.Duration) breaker.Status {
	s := breaker.Status{
		Key: breaker.Key{Upstream: r.Upstream, Class: r.Class}, State: r.State, Mode: r.Mode, Generation: r.Generation, Since: r.Since,
		Calls: r.Calls, Failures: r.Failures, Cooldown: r.Cooldown, NextProbe: r.Until, FailedProbes: r.FailedProbes,
		Reason: r.Reason, Cause: r.Cause, Evidence: r.Evidence, Reference: r.Reference,
	}
	if r.Calls > 0 {
		s.ErrorRate = float64(r.Failures) / float64(r.Calls)
	}
	if !r.Until.IsZero() {
		s.CooldownRemaining = max(r.Until.Sub(r.At)-age, 0)
	}
	return s
}
