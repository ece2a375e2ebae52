package evidence

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Use says what a token was presented for: an execution key, or the hash of a request
// that changes nothing.
type Use [sha256.Size]byte

const (
	// spaceUsed begins the store's keys of tokens that were used: a keyed hash of
	// workflow and id leads to the hash of the token's bytes and its Use.
	spaceUsed = 'j'
	// spaceLink begins the store's keys of executions by workflow and id, which lead to
	// their checkpoint.
	spaceLink = 'p'
	// hashed is how much of a keyed hash stands in a key.
	hashed = 16
)

// clockMargin is by how much longer than a token is accepted it is remembered, so that
// a step of the clock lets it in no second time.
const clockMargin = time.Hour

func (e *Evidence) usedKey(t *ect.Token) []byte {
	hash := e.sealer.Index("token used", t.Workflow(), t.NodeID())
	return append(append(make([]byte, 0, 1+hashed), spaceUsed), hash[:hashed]...)
}

// Bound is the write that records what a token is used for, on the condition that it
// was not used before. It rides in the claim's commit, so that the same token cannot
// claim two keys, over restarts and nodes. It is kept until then, and at least as long as
// the token could be presented.
func (e *Evidence) Bound(t *ect.Token, u Use, until time.Time) store.Write {
	if end := t.Expires().Add(ect.Skew + clockMargin); end.After(until) {
		until = end
	}
	digest := t.Digest()
	return store.Write{
		Key: e.usedKey(t), Value: append(append(make([]byte, 0, 2*sha256.Size), digest[:]...), u[:]...),
		If: store.Absent(), Expires: until,
	}
}

// Standing says how a token stands to a use.
type Standing uint8

// The standings of a token.
const (
	// Unused: nothing is known of it.
	Unused Standing = iota
	// Same: these bytes were used for this before: a retry.
	Same
	// Other: the id was used for something else, or with other bytes.
	Other
)

func (u used) standing(t *ect.Token, use Use) Standing {
	if u.digest == t.Digest() && u.use == use {
		return Same
	}
	return Other
}

// Recorded looks up in the store how a token stands to a use.
func (e *Evidence) Recorded(ctx context.Context, t *ect.Token, use Use) (Standing, error) {
	item, err := e.store.Get(ctx, e.usedKey(t))
	if errors.Is(err, store.ErrNotFound) {
		return e.elsewhere(ctx, t) // what was used is recorded
	}
	if err != nil {
		return Unused, err
	}
	if len(item.Value) != 2*sha256.Size {
		return Unused, fmt.Errorf("evidence: the record of a used token has %d bytes", len(item.Value))
	}
	return used{digest: [32]byte(item.Value), use: Use(item.Value[sha256.Size:])}.standing(t, use), nil
}

// Take remembers in memory what a token is used for, as one step, and says how it
// stood. ect.ErrUnavailable says that there is no room: nothing is known then.
func (e *Evidence) Take(t *ect.Token, use Use, now time.Time) (Standing, error) {
	return e.uses.take(t, use, now)
}

// Taken says how a token stands to a use by what is remembered in memory; nothing is
// remembered of this use.
func (e *Evidence) Taken(t *ect.Token, use Use, now time.Time) Standing {
	return e.uses.look(t, use, now)
}

// Forget takes back that a token is used for this: the store knows what it was used for,
// or it was not used after all.
func (e *Evidence) Forget(t *ect.Token, use Use) { e.uses.forget(t, use) }

// maxUses bounds the uses in memory; each takes about 150 bytes.
const maxUses = 500_000

type used struct {
	workflow string
	digest   [sha256.Size]byte
	use      Use
	until    time.Time
}

// uses are the tokens that are being claimed with, and those whose use nobody records.
type uses struct {
	mu    sync.Mutex
	most  int
	count int
	m     map[string][]used // by id: of one workflow each, or of one use without any
	swept time.Time
}

func newUses(most int) *uses { return &uses{most: most, m: map[string][]used{}} }

// before is the use that an id has had in a workflow, or anywhere where one of the two
// uses has none; nil without one.
func (u *uses) before(t *ect.Token, now time.Time) *used {
	all := u.m[t.NodeID()]
	for i := range all {
		same := all[i].workflow == t.Workflow() || all[i].workflow == "" || t.Workflow() == ""
		if same && now.Before(all[i].until) {
			return &all[i]
		}
	}
	return nil
}

// drop forgets what uses of an id are gone.
func (u *uses) drop(id string, gone func(*used) bool) {
	all := u.m[id]
	left := slices.DeleteFunc(all, func(v used) bool { return gone(&v) })
	u.count -= len(all) - len(left)
	if len(left) == 0 {
		delete(u.m, id)
		return
	}
	u.m[id] = left
}

func (u *uses) take(t *ect.Token, use Use, now time.Time) (Standing, error) {
	id, digest := t.NodeID(), t.Digest()
	u.mu.Lock()
	defer u.mu.Unlock()
	if before := u.before(t, now); before != nil {
		return before.standing(t, use), nil
	}
	if u.count >= u.most && !u.sweep(now) {
		// Forgetting one would let it in a second time.
		return Unused, fmt.Errorf("%w: %d tokens are remembered already", ect.ErrUnavailable, u.count)
	}
	u.drop(id, func(v *used) bool { return !now.Before(v.until) })
	u.m[id] = append(u.m[id], used{t.Workflow(), digest, use, t.Expires().Add(ect.Skew + clockMargin)})
	u.count++
	return Unused, nil
}

func (u *uses) look(t *ect.Token, use Use, now time.Time) Standing {
	u.mu.Lock()
	defer u.mu.Unlock()
	if before := u.before(t, now); before != nil {
		return before.standing(t, use)
	}
	return Unused
}

// sweep forgets what cannot be presented any more, at most once a second, and reports
// whether there is room now.
func (u *uses) sweep(now time.Time) bool {
	if now.Sub(u.swept).Abs() < time.Second {
		return false
	}
	u.swept = now
	for id := range u.m {
		u.drop(id, func(v *used) bool { return !now.Before(v.until) })
	}
	return u.count < u.most
}

func (u *uses) forget(t *ect.Token, use Use) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.drop(t.NodeID(), func(v *used) bool { return v.standing(t, use) == Same })
}
