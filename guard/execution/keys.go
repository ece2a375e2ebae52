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
	ErrOtherKey = errors.New("guard: the key ring has another sealing key under a number than the other gateways on this store: " +
		"give all of them the same ring")
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

// The store notes which sealing keys it needs, so that a ring without one of them is refused
// before anything is lost: each key before its first use, with the time from which it is not
// needed any more once everything else is re-sealed.
const keysName = "keys"

// with is the list with this entry for its key.
func with(uses []KeyUse, new KeyUse) []KeyUse {
	uses = slices.DeleteFunc(uses, func(use KeyUse) bool { return use.ID == new.ID })
	uses = append(uses, new)
	slices.SortFunc(uses, func(a, b KeyUse) int { return cmp.Compare(a.ID, b.ID) })
	return uses
}

// The members of a shared store agree on the key that seals (ADR 0136). Each records which keys its ring has before
// it seals or opens anything, and before that changes. A key comes into use in a commit on the condition that every
// member of that record has it that is not gone; who records a ring later is refused without it.
const ringsName = "rings"

// rings is that record.
type rings struct {
	// Checks are those of the keys that are in use or in a ring.
	Checks  map[uint32]string `json:"checks"`
	Members []memberRing      `json:"members"`
}

// memberRing is what a member has.
type memberRing struct {
	Node string   `json:"node"`
	Boot string   `json:"boot"`
	Keys []uint32 `json:"keys"`
	// Seals is the key under which, or a newer one, everything is sealed that it commits from now on.
	Seals uint32 `json:"seals"`
	// Rotates says that it may be about to make another key.
	Rotates bool `json:"rotates,omitempty"`
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
	uses, _, err := k.uses(ctx)
	if err != nil {
		return nil, err
	}
	return k.living(ctx, uses)
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

// meta keeps records of the store itself, which are not sealed.
func meta[T any](g *Guard) *store.Table[T] {
	t := table[T](g)
	t.Sealer = nil
	return t
}

// uses reads the note, and the condition for replacing it.
func (k *Keys) uses(ctx context.Context) ([]KeyUse, store.Condition, error) {
	row, err := meta[[]KeyUse](k.g).Get(ctx, metaKey(keysName))
	if err != nil {
		return nil, store.Condition{}, err
	}
	if row.Record == nil { // any key may have been used
		row.Record = new([]KeyUse)
		for _, id := range k.g.sealer.KeyIDs() {
			*row.Record = append(*row.Record, KeyUse{ID: id})
		}
	}
	return *row.Record, row.Version.Unchanged(), nil
}

// keyState is what the store has of keys, as it was read at one time.
type keyState struct {
	uses  []KeyUse
	rings rings // without members that are gone
	mine  int   // the place of this member's ring; negative without one
}

// seals is the key that seals: the newest in use.
func (s *keyState) seals() uint32 {
	if len(s.uses) == 0 {
		return 0
	}
	return s.uses[len(s.uses)-1].ID
}

// lacking are the nodes whose rings lack a key.
func (s *keyState) lacking(id uint32) (nodes []string) {
	for _, m := range s.rings.Members {
		if !slices.Contains(m.Keys, id) {
			nodes = append(nodes, m.Node)
		}
	}
	return nodes
}

// read reads it, and the conditions for replacing both records.
func (k *Keys) read(ctx context.Context) (s keyState, usesAre, ringsAre store.Condition, err error) {
	if s.uses, usesAre, err = k.uses(ctx); err != nil {
		return s, usesAre, ringsAre, err
	}
	s.rings.Checks, s.mine, ringsAre = map[uint32]string{}, -1, store.Absent()
	shared := k.g.members.store
	if shared == nil {
		return s, usesAre, ringsAre, nil
	}
	entry, err := shared.Get(ctx, metaKey(ringsName))
	if err == nil {
		ringsAre = store.VersionIs(entry.Version)
		if err = json.Unmarshal(entry.Value, &s.rings); s.rings.Checks == nil {
			s.rings.Checks = map[uint32]string{}
		}
	} else if errors.Is(err, store.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return s, usesAre, ringsAre, fmt.Errorf("%w: %w", ErrStore, err)
	}
	members, err := shared.Members(ctx) // after the record: who is in it and is no member is gone
	if err == nil && !slices.ContainsFunc(members, func(m store.Member) bool { return m.Boot == k.g.boot }) {
		err = store.ErrUnhealthy // this one was removed
	}
	if err != nil {
		return s, usesAre, ringsAre, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s.rings.Members = slices.DeleteFunc(s.rings.Members, func(r memberRing) bool {
		return !slices.ContainsFunc(members, func(m store.Member) bool { return m.Boot == r.Boot })
	})
	s.mine = slices.IndexFunc(s.rings.Members, func(r memberRing) bool { return r.Boot == k.g.boot })
	return s, usesAre, ringsAre, nil
}

// change applies a change to what was read, on the condition that neither record has changed since, and tries again
// where others change them too.
func (k *Keys) change(ctx context.Context, change func(*keyState) error) error {
	for {
		s, usesAre, ringsAre, err := k.read(ctx)
		if err != nil {
			return err
		}
		uses, before := store.Encode(nil, s.uses), encodeRings(s.rings)
		if err := change(&s); err != nil {
			return err
		}
		note := meta[[]KeyUse](k.g).Put(metaKey(keysName), &s.uses, usesAre, time.Time{})
		if string(note.Value) == string(uses) && !usesAre.Holds(nil) {
			note.Value, note.Check = nil, true
		}
		batch := []store.Write{note}
		if k.g.members.store != nil {
			record := store.Write{Key: metaKey(ringsName), If: ringsAre, Value: encodeRings(s.rings)}
			if string(record.Value) == string(before) {
				record.Value, record.Check = nil, true
			}
			batch = append(batch, record)
		}
		if !slices.ContainsFunc(batch, func(w store.Write) bool { return !w.Check }) {
			return nil
		}
		_, err = k.g.store.Commit(ctx, batch...)
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		return nil
	}
}

func encodeRings(r rings) []byte {
	text, _ := json.Marshal(r) // strings and numbers
	return text
}

// Hold records that this gateway's ring has these keys and no others. Call it before one of them seals its first
// value, or is removed from the ring. If the store is shared, all of them must open by then, and the errors are
// ErrMissingKey and ErrOtherKey; else the last one seals from now on.
func (k *Keys) Hold(ctx context.Context, ids ...uint32) error {
	return k.change(ctx, func(s *keyState) error {
		if k.g.members.store == nil {
			s.uses = with(s.uses, KeyUse{ID: ids[len(ids)-1]})
			return nil
		}
		needed, err := k.living(ctx, s.uses)
		if err != nil {
			return err
		}
		if err := lacksNone(ids, needed); err != nil {
			return err
		}
		if s.mine < 0 { // nothing was sealed before
			s.mine = len(s.rings.Members)
			s.rings.Members = append(s.rings.Members, memberRing{Node: k.g.members.store.Self().Node, Boot: k.g.boot, Seals: s.seals()})
		}
		mine := &s.rings.Members[s.mine]
		mine.Keys, mine.Rotates = slices.Sorted(slices.Values(ids)), false
		for _, id := range ids {
			check := k.g.sealer.Check(id)
			if known, there := s.rings.Checks[id]; there && known != check {
				return fmt.Errorf("%w: it is sealing key %d", ErrOtherKey, id)
			}
			s.rings.Checks[id] = check
		}
		maps.DeleteFunc(s.rings.Checks, func(id uint32, _ string) bool {
			return !slices.ContainsFunc(needed, func(use KeyUse) bool { return use.ID == id }) &&
				!slices.ContainsFunc(s.rings.Members, func(m memberRing) bool { return slices.Contains(m.Keys, id) })
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
		for _, id := range slices.Backward(s.rings.Members[s.mine].Keys) {
			if id > seals && len(s.lacking(id)) == 0 {
				s.uses, seals = with(s.uses, KeyUse{ID: id}), id
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
	ends := []func(){fleet.Job{Fleet: members, Wake: k.wake, Do: follow}.Start()}
	for _, name := range []string{keysName, ringsName} {
		ends = append(ends, members.Follow(metaKey(name), func([]byte) { k.signal() }))
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// follow uses the key that seals, and records that once nothing under an older one is under way.
func (k *Keys) follow(ctx context.Context) error {
	s, _, _, err := k.read(ctx)
	if err != nil || s.mine < 0 {
		return err
	}
	seals, waits := s.seals(), false
	for _, id := range s.rings.Members[s.mine].Keys {
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
	if s.rings.Members[s.mine].Seals >= seals {
		return nil
	}
	if err := k.g.writers.drainOlder(ctx); err != nil {
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
			s.rings.Members[s.mine].Seals = max(s.rings.Members[s.mine].Seals, seals)
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
	s, _, _, err := k.read(ctx)
	if err != nil || s.mine < 0 {
		return nil, err
	}
	for _, id := range s.rings.Members[s.mine].Keys {
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
		mine := &s.rings.Members[s.mine]
		for _, m := range s.rings.Members {
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
		changed, cancel := shared.Watch(metaKey(ringsName)) // before the look
		left := shared.Left()
		s, _, _, err := k.read(ctx)
		older := slices.ContainsFunc(s.rings.Members, func(m memberRing) bool { return m.Seals < id })
		if err == nil && older {
			err = await(ctx, changed, left)
		}
		cancel()
		if err != nil || !older {
			return err
		}
	}
}

func await(ctx context.Context, changed, left <-chan struct{}) error {
	select {
	case <-changed:
	case <-left:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// turnName is the record of who re-seals, and of the last pass that has ended.
const turnName = "turn"

// ResealTurn is the right of one member to re-seal.
type ResealTurn struct {
	// Key is the newest key to which everything was sealed anew by a pass that has ended, Node where that was, and
	// Ended when; zero if there was none.
	Key   uint32    `cbor:"key,omitempty"`
	Node  string    `cbor:"node,omitempty"` // see Key
	Ended time.Time `cbor:"ended,omitzero"` // see Key
	// Boot has the turn.
	Boot string `cbor:"boot,omitempty"`
}

// Turn waits until no other member that is not gone re-seals, or for the end of ctx, and takes the turn. done gives
// it back, and says under which key everything is sealed now; 0 if that is not done. Two passes at once harm
// nothing: it saves work.
func (k *Keys) Turn(ctx context.Context) (before ResealTurn, done func(ctx context.Context, key uint32) error, err error) {
	shared := k.g.members.store
	if shared == nil {
		return ResealTurn{}, func(context.Context, uint32) error { return nil }, nil
	}
	key := metaKey(turnName)
	for {
		changed, cancel := shared.Watch(key) // before the look
		left := shared.Left()
		version, err := k.takeTurn(ctx, key, &before)
		if err == nil && version == 0 {
			err = await(ctx, changed, left)
		}
		cancel()
		if err != nil {
			return before, nil, err
		}
		if version == 0 {
			continue
		}
		return before, func(ctx context.Context, sealed uint32) error {
			after := before
			if after.Boot = ""; sealed > 0 && sealed >= before.Key {
				now, err := shared.Now(ctx)
				if err != nil {
					return fmt.Errorf("%w: %w", ErrStore, err)
				}
				after = ResealTurn{Key: sealed, Node: shared.Self().Node, Ended: now.UTC()}
			}
			w := meta[ResealTurn](k.g).Put(key, &after, store.VersionIs(version), time.Time{})
			if _, err := shared.Commit(ctx, w); err != nil {
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
			return nil
		}, nil
	}
}

// takeTurn takes the turn, or returns 0 while another member has it.
func (k *Keys) takeTurn(ctx context.Context, key []byte, before *ResealTurn) (store.Version, error) {
	shared := k.g.members.store
	for {
		*before = ResealTurn{}
		row, err := meta[ResealTurn](k.g).Get(ctx, key)
		if err != nil {
			return 0, err
		}
		if row.Record != nil {
			*before = *row.Record
		}
		if before.Boot != "" && before.Boot != k.g.boot {
			gone, err := shared.Gone(ctx, before.Boot)
			if err == nil && shared.Out(ctx) {
				err = store.ErrUnhealthy
			}
			if err != nil {
				return 0, fmt.Errorf("%w: %w", ErrStore, err)
			}
			if !gone {
				return 0, nil
			}
		}
		mine := *before
		mine.Boot = k.g.boot
		w := meta[ResealTurn](k.g).Put(key, &mine, row.Version.Unchanged(), time.Time{})
		version, err := shared.Commit(ctx, w)
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
		return version, nil
	}
}
