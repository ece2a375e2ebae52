package execution

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Errors of a ring that does not fit the store, or the rings of others.
var (
	// ErrMissingKey: the ring lacks a sealing key that values in the store need.
	ErrMissingKey = errors.New("guard: the key ring lacks a sealing key under which values stand in this store: " +
		"put it back into the ring; without it what it sealed is unreadable")
	// ErrOtherKey: the ring has another key under a number.
	ErrOtherKey = errors.New("guard: the key ring has another sealing key under a number than the other gateways " +
		"on this store: give all of them the same ring")
	// ErrKeyElsewhere: no key can be made, since another gateway has made one, or is about to.
	ErrKeyElsewhere = errors.New("guard: another gateway on this store has a newer key ring: " +
		"take it over here, and load the configuration again, before another key is made")
)

// KeyUse is a sealing key under which values may be stored.
type KeyUse struct {
	ID uint32 `cbor:"id"`
	// Until is when the last of them expires; zero if that is unknown, or never.
	Until time.Time `cbor:"until,omitzero"`
}

// keysName is the record of the sealing keys. A ring without a key that the store needs is refused
// before anything is lost: each key is in the record before its first use. The members of a shared store
// agree there on the key that seals (ADR 0136): each records which keys its ring has before it seals or
// opens anything, and before that changes. A key comes into use in a commit on the condition that every
// member of the record has it that is not gone; who records a ring later is refused without it.
const keysName = "keys"

// keyRecord is that record.
type keyRecord struct {
	// Uses are the keys that the store needs, by id, with the time from which one is not needed any more
	// once everything else is re-sealed.
	Uses []KeyUse `cbor:"uses"`
	// Checks are those of the keys that are in use or in the ring of a member.
	Checks  map[uint32]string `cbor:"checks,omitempty"`
	Members []memberRing      `cbor:"members,omitempty"` // of a shared store
}

// text is the record as JSON, to see whether a change of it has changed anything.
func (r *keyRecord) text() string {
	text, _ := json.Marshal(r) // strings, numbers and times
	return string(text)
}

// with is the list with this entry for its key.
func with(uses []KeyUse, new KeyUse) []KeyUse {
	uses = slices.DeleteFunc(uses, func(use KeyUse) bool { return use.ID == new.ID })
	uses = append(uses, new)
	slices.SortFunc(uses, func(a, b KeyUse) int { return cmp.Compare(a.ID, b.ID) })
	return uses
}

// memberRing is what a member has.
type memberRing struct {
	Node string   `cbor:"node"`
	Boot string   `cbor:"boot"`
	Keys []uint32 `cbor:"keys"`
	// Seals is the key under which, or a newer one, everything is sealed that it commits from now on.
	Seals uint32 `cbor:"seals"`
	// Rotates says that it may be about to make another key.
	Rotates bool `cbor:"rotates,omitempty"`
}

// meta keeps records of the store itself, which are not sealed.
func meta[T any](g *Guard) *store.Table[T] {
	t := table[T](g)
	t.Sealer = nil
	return t
}

// Keys are the sealing keys of a store: those that it needs, and in a shared one those that its members have.
type Keys struct {
	g    *Guard
	wake chan struct{} // buffers one signal: keep has to look

	mu     sync.Mutex
	onSeal func(context.Context, uint32) error
}

// InUse lists the sealing keys that the store needs, by id, the one that seals included.
func (k *Keys) InUse(ctx context.Context) ([]KeyUse, error) {
	s, _, err := k.read(ctx)
	if err != nil {
		return nil, err
	}
	return k.living(ctx, s.Uses)
}

// living are the uses that have not ended.
func (k *Keys) living(ctx context.Context, uses []KeyUse) ([]KeyUse, error) {
	now, err := k.g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return slices.DeleteFunc(slices.Clone(uses), func(use KeyUse) bool {
		return !use.Until.IsZero() && !now.Before(use.Until)
	}), nil
}

// keyState is the record as it was read at one time, without members that are gone.
type keyState struct {
	keyRecord
	mine int // the place of this member's ring; negative without one
}

// seals is the key that seals: the newest in use.
func (s *keyState) seals() uint32 {
	if len(s.Uses) == 0 {
		return 0
	}
	return s.Uses[len(s.Uses)-1].ID
}

// lacking are the nodes whose rings lack a key.
func (s *keyState) lacking(id uint32) (nodes []string) {
	for _, m := range s.Members {
		if !slices.Contains(m.Keys, id) {
			nodes = append(nodes, m.Node)
		}
	}
	return nodes
}

// read reads the record, and the condition for replacing it.
func (k *Keys) read(ctx context.Context) (s keyState, as store.Condition, err error) {
	row, err := meta[keyRecord](k.g).Get(ctx, metaKey(keysName))
	if err != nil {
		return s, as, err
	}
	if row.Record != nil {
		s.keyRecord = *row.Record
	} else { // any key may have been used
		for _, id := range k.g.sealer.KeyIDs() {
			s.Uses = append(s.Uses, KeyUse{ID: id})
		}
	}
	s.mine, as = -1, row.Version.Unchanged()
	shared := k.g.members.store
	if shared == nil {
		return s, as, nil
	}
	members, err := shared.Members(ctx) // after the record: who is in it and is no member is gone
	if err == nil && !slices.ContainsFunc(members, func(m store.Member) bool { return m.Boot == k.g.boot }) {
		err = store.ErrUnhealthy // this one was removed
	}
	if err != nil {
		return s, as, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s.Members = slices.DeleteFunc(s.Members, func(r memberRing) bool {
		return !slices.ContainsFunc(members, func(m store.Member) bool { return m.Boot == r.Boot })
	})
	s.mine = slices.IndexFunc(s.Members, func(r memberRing) bool { return r.Boot == k.g.boot })
	return s, as, nil
}

// change applies a change to what was read, on the condition that the record has not changed since, and tries again
// where others change it too.
func (k *Keys) change(ctx context.Context, change func(*keyState) error) error {
	for {
		s, as, err := k.read(ctx)
		if err != nil {
			return err
		}
		before := s.text()
		if err := change(&s); err != nil {
			return err
		}
		if s.text() == before {
			return nil
		}
		_, err = k.g.store.Commit(ctx, meta[keyRecord](k.g).Put(metaKey(keysName), &s.keyRecord, as, time.Time{}))
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		return nil
	}
}

// Hold records that this gateway's ring has these keys and no others. Call it before one of them seals its first
// value, or is removed from the ring. If the store is shared, all of them must open by then, and the errors are
// ErrMissingKey and ErrOtherKey; else the last one seals from now on.
func (k *Keys) Hold(ctx context.Context, ids ...uint32) error {
	return k.change(ctx, func(s *keyState) error {
		if k.g.members.store == nil {
			s.Uses = with(s.Uses, KeyUse{ID: ids[len(ids)-1]})
			return nil
		}
		needed, err := k.living(ctx, s.Uses)
		if err != nil {
			return err
		}
		if err := lacksNone(ids, needed); err != nil {
			return err
		}
		if s.mine < 0 { // nothing was sealed before
			s.mine = len(s.Members)
			node := k.g.members.store.Self().Node
			s.Members = append(s.Members, memberRing{Node: node, Boot: k.g.boot, Seals: s.seals()})
		}
		mine := &s.Members[s.mine]
		if s.Checks == nil {
			s.Checks = map[uint32]string{}
		}
		mine.Keys, mine.Rotates = slices.Sorted(slices.Values(ids)), false
		for _, id := range ids {
			check := k.g.sealer.Check(id)
			if known, there := s.Checks[id]; there && known != check {
				return fmt.Errorf("%w: it is sealing key %d", ErrOtherKey, id)
			}
			s.Checks[id] = check
		}
		maps.DeleteFunc(s.Checks, func(id uint32, _ string) bool {
			return !slices.ContainsFunc(needed, func(use KeyUse) bool { return use.ID == id }) &&
				!slices.ContainsFunc(s.Members, func(m memberRing) bool { return slices.Contains(m.Keys, id) })
		})
		return nil
	})
}

// lacksNone refuses keys without one that is needed.
func lacksNone(held []uint32, needed []KeyUse) error {
	for _, use := range needed {
		if !slices.Contains(held, use.ID) {
			return fmt.Errorf("%w: it is sealing key %d", ErrMissingKey, use.ID)
		}
	}
	return nil
}

// open refuses a sealer without a key that the store needs, and notes its keys.
func (k *Keys) open(ctx context.Context) error {
	held := k.g.sealer.KeyIDs()
	needed, err := k.InUse(ctx)
	if err != nil {
		return err
	}
	if err := lacksNone(held, needed); err != nil {
		return err
	}
	err = k.Hold(ctx, held...)
	if err == nil {
		_, err = k.Settle(ctx)
	}
	if errors.Is(err, store.ErrFull) && k.g.members.store != nil { // it is no member without that, and may be later
		err = fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return err
}

// Settle lets the newest key seal that the rings of all members have, and returns the key that seals.
// On a store that one gateway has it changes nothing.
func (k *Keys) Settle(ctx context.Context) (seals uint32, err error) {
	if k.g.members.store == nil {
		ids := k.g.sealer.KeyIDs()
		return ids[len(ids)-1], nil
	}
	err = k.change(ctx, func(s *keyState) error {
		seals = s.seals()
		if s.mine < 0 {
			return nil
		}
		for _, id := range slices.Backward(s.Members[s.mine].Keys) {
			if id > seals && len(s.lacking(id)) == 0 {
				s.Uses, seals = with(s.Uses, KeyUse{ID: id}), id
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if !k.g.sealer.Use(seals) {
		return 0, fmt.Errorf("%w: it is sealing key %d", ErrMissingKey, seals)
	}
	k.signal()
	return seals, nil
}

func (k *Keys) signal() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// OnSeal has changed called, from one goroutine, when another key seals. When it returns without an error, nothing
// is under way any more that its caller has sealed with an older one. On a store that one gateway has it never is.
func (k *Keys) OnSeal(changed func(ctx context.Context, id uint32) error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.onSeal = changed
}

// keep seals with what the members agree on, and records up to where this one does. stop ends that.
func (k *Keys) keep() (stop func()) {
	members := k.g.members.store
	follow := func(ctx context.Context, _ bool) (time.Duration, error) { return 0, k.follow(ctx) }
	unfollow := members.Follow(metaKey(keysName), func([]byte) { k.signal() }) // before the first look
	end := fleet.Job{Fleet: members, Wake: k.wake, Do: follow}.Start()
	return func() {
		end()
		unfollow()
	}
}

// follow uses the key that seals, and records that once nothing under an older one is under way.
func (k *Keys) follow(ctx context.Context) error {
	s, _, err := k.read(ctx)
	if err != nil || s.mine < 0 {
		return err
	}
	seals, waits := s.seals(), false
	for _, id := range s.Members[s.mine].Keys {
		waits = waits || id > seals && len(s.lacking(id)) == 0
	}
	if waits {
		if seals, err = k.Settle(ctx); err != nil {
			return err
		}
	}
	if !k.g.sealer.Use(seals) {
		return fmt.Errorf("%w: it is sealing key %d", ErrMissingKey, seals)
	}
	if s.Members[s.mine].Seals >= seals {
		return nil
	}
	if err := k.g.writers.Wait(ctx); err != nil {
		return err
	}
	k.mu.Lock()
	changed := k.onSeal
	k.mu.Unlock()
	if changed != nil {
		if err := changed(ctx, seals); err != nil {
			return err
		}
	}
	return k.change(ctx, func(s *keyState) error {
		if s.mine >= 0 {
			s.Members[s.mine].Seals = max(s.Members[s.mine].Seals, seals)
		}
		return nil
	})
}

// KeyWait is a key that does not seal yet.
type KeyWait struct {
	ID uint32
	// Lacking are the nodes whose rings lack it.
	Lacking []string
}

// Waiting are the keys of this gateway's ring that do not seal yet, the newest last. There are none where one gateway
// has the store.
func (k *Keys) Waiting(ctx context.Context) (waiting []KeyWait, err error) {
	s, _, err := k.read(ctx)
	if err != nil || s.mine < 0 {
		return nil, err
	}
	for _, id := range s.Members[s.mine].Keys {
		if id > s.seals() {
			waiting = append(waiting, KeyWait{id, s.lacking(id)})
		}
	}
	return waiting, nil
}

// BeginRotation makes sure that no other member makes a key, or has one that is newer than this ring's, before this
// one does. The next Hold ends it. The error is ErrKeyElsewhere.
func (k *Keys) BeginRotation(ctx context.Context) error {
	if k.g.members.store == nil {
		return nil
	}
	return k.change(ctx, func(s *keyState) error {
		if s.mine < 0 {
			return fmt.Errorf("%w: this gateway has left it", ErrStore)
		}
		mine := &s.Members[s.mine]
		for _, m := range s.Members {
			newer := slices.DeleteFunc(slices.Clone(m.Keys), func(id uint32) bool {
				return id <= s.seals() || slices.Contains(mine.Keys, id)
			})
			if m.Boot != mine.Boot && (m.Rotates || len(newer) > 0) {
				return fmt.Errorf("%w: %s has it", ErrKeyElsewhere, m.Node)
			}
		}
		mine.Rotates = true
		return nil
	})
}

// Await returns when everything that members commit from now on is sealed with this key or a newer one, or with
// ctx's error.
func (k *Keys) Await(ctx context.Context, id uint32) error {
	shared := k.g.members.store
	if shared == nil {
		return nil
	}
	for {
		changed, cancel := shared.Watch(metaKey(keysName)) // before the look
		left := shared.Left()
		s, _, err := k.read(ctx)
		older := slices.ContainsFunc(s.Members, func(m memberRing) bool { return m.Seals < id })
		if err == nil && older {
			select {
			case <-changed:
			case <-left:
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		cancel()
		if err != nil || !older {
			return err
		}
	}
}

// Reseals reports whether this gateway makes the passes of re-sealing: of a shared store the member that has joined
// first, so that another one does when that is gone. Two passes at once harm nothing: it saves work.
func (k *Keys) Reseals(ctx context.Context) (bool, error) {
	first, err := k.g.members.store.First(ctx)
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrStore, err)
	}
	return first, err
}
