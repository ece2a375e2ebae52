package evidence

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// spaceNames is the store's key of the names that the gateway has had.
const spaceNames = 'n'

const (
	// maxNames and maxNameKeys bound what is remembered: of more, the oldest are forgotten.
	maxNames    = 32
	maxNameKeys = 256
)

// names are the names under which this store's gateway has signed, each with the keys
// that it signed with, the latest name last. They are in the store, since the history
// that they explain is, and sealed: whoever could add one would give the gateway's keys
// another history (ADR 0040).
type names struct {
	mu      sync.Mutex
	all     []ect.Former
	version store.Version
	key     uint32 // under which they are sealed
}

var namesKey = []byte{spaceNames}

// readNames reads the names, if there are any yet.
func (e *Evidence) readNames(ctx context.Context) error {
	found, err := e.store.Get(ctx, namesKey)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	text, err := e.sealer.Open(nil, found.Value, namesKey)
	if err == nil {
		err = json.Unmarshal(text, &e.names.all)
	}
	if err != nil {
		return fmt.Errorf("evidence: the names that the gateway has had: %w: %w", ledger.ErrTampered, err)
	}
	e.names.version, e.names.key = found.Version, e.sealer.KeyOf(found.Value)
	return nil
}

// Named notes, before anything is signed so, that the gateway signs under a name with
// the newest key of a ring.
func (e *Evidence) Named(ctx context.Context, name string, ring *ect.Ring) error {
	keys := ring.List()
	signs := keys[len(keys)-1].ID
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	next := slices.Clone(e.names.all)
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
	return e.writeNames(ctx, next[max(0, len(next)-maxNames):])
}

func (e *Evidence) writeNames(ctx context.Context, all []ect.Former) error {
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	condition := store.Absent()
	if e.names.version != 0 {
		condition = store.VersionIs(e.names.version)
	}
	sealed := e.sealer.Seal(nil, text, namesKey)
	version, err := e.store.Commit(ctx, store.Write{Key: namesKey, Value: sealed, If: condition})
	if err != nil {
		return fmt.Errorf("evidence: noting the gateway's name: %w", err)
	}
	e.names.all, e.names.version, e.names.key = all, version, e.sealer.KeyOf(sealed)
	return nil
}

// Reseal seals anew what stands under older keys.
func (e *Evidence) Reseal(ctx context.Context) error {
	_, err := e.log.Reseal(ctx)
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	ids := e.sealer.KeyIDs()
	if e.names.version != 0 && e.names.key != ids[len(ids)-1] {
		err = errors.Join(err, e.writeNames(ctx, e.names.all))
	}
	return err
}

// Lacks lists the keys that the gateway has signed with and that a ring does not hold:
// what they have signed cannot be verified with it.
func (e *Evidence) Lacks(ring *ect.Ring) []string {
	var have []string
	for _, k := range ring.List() {
		have = append(have, k.ID)
	}
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	var lacks []string
	for _, f := range e.names.all {
		for _, id := range f.Keys {
			if !slices.Contains(have, id) && !slices.Contains(lacks, id) {
				lacks = append(lacks, id)
			}
		}
	}
	return lacks
}

// former are the names besides one.
func (e *Evidence) former(name string) []ect.Former {
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(e.names.all), func(f ect.Former) bool { return f.Name == name })
}

// Former are the names that the gateway had before, with the keys that it signed with.
func (w *Witness) Former() []ect.Former { return w.former }

// Names are all names of the gateway, the present one first.
func (w *Witness) Names() []string {
	all := []string{w.Identity()}
	for _, f := range w.former {
		all = append(all, f.Name)
	}
	return all
}

// Source gives the gateway's own keys, for all its names.
func (w *Witness) Source() (ect.Source, error) {
	owner, err := ect.ParseOwner(w.Identity())
	return w.e.ring.Source(owner, w.former...), err
}

// Issued reports whether a verified token is the gateway's.
func (w *Witness) Issued(t *ect.Token) bool {
	return t.Issuer() == w.Identity() || w.e.ring.Signed(t, w.former)
}

// Own reports whether an entry is the gateway's. Under an earlier name it must be signed
// with a key that the gateway has signed with under it: the name may be another's by now,
// or have been before.
func (w *Witness) Own(entry *ledger.Entry) bool {
	if entry.Issuer == w.Identity() {
		return true
	}
	if !slices.ContainsFunc(w.former, func(f ect.Former) bool { return f.Name == entry.Issuer }) {
		return false
	}
	if entry.Unsigned {
		return true // nobody else tells without a token
	}
	sum := sha256.Sum256(entry.Payload)
	if own, ok := w.judged.find("", string(sum[:])); ok {
		return own
	}
	own := w.signed(entry)
	w.judged.add(scope{"", string(sum[:])}, own)
	return own
}

// signed verifies an entry's token under the gateway's own keys.
func (w *Witness) signed(entry *ledger.Entry) bool {
	source, err := w.Source()
	if err != nil {
		return false
	}
	seen, err := ect.ParseInsecure(string(entry.Payload))
	if err != nil {
		return false
	}
	v, err := ect.NewVerifier(ect.Policy{
		Audience: append(seen.Audience(), w.Identity()), Sources: []ect.Source{source}, Algorithms: ect.Algorithms(),
		AnyID: true, LenientParents: true, AllowPartial: true,
	})
	if err != nil {
		return false
	}
	token, err := v.VerifyStored(context.Background(), string(entry.Payload))
	return err == nil && w.e.ring.Signed(token, w.former)
}
