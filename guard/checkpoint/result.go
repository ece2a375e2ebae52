package checkpoint

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Record makes the writes by which a call's result gets on disk in the commit of its
// outcome. A later one for the same checkpoint takes its place. maxImage is as in Terms.
//
// A result that is large is stored here already, by commits of its own, and only named
// in the outcome's: a store that is nearly full takes outcomes and nothing large, and
// an outcome must not be lost for it (P1). Where it cannot be stored, or is too large,
// the result says why instead: the call can then be undone by a person only. ctx must
// outlive the client, as that of the outcome does.
//
// Done must be called with the error of the commit.
func (v *Vault) Record(ctx context.Context, h Handle, r Result, maxImage int) (*Pending, error) {
	t := Terms{TTL: MinTTL, MaxImage: maxImage}
	if err := t.check(); err != nil {
		return nil, err
	}
	if h.expires.IsZero() {
		return nil, fmt.Errorf("%w: the handle of no checkpoint", ErrInvalid)
	}
	r.fit(t.maxImage())
	turn := v.writers.enter()
	plain := r.encode()
	at := split(plain)
	if err := v.keep(ctx, v.pieces(h.name, kindResult, at, plain, h.expires)); err != nil {
		plain = (&Result{Status: r.Status, Upstream: r.Upstream, Reason: ReasonUnkept}).encode()
		at = split(plain)
	}
	p := &Pending{turn: turn, handle: h, sum: at.sum}
	p.writes = []store.Write{v.head(h.name, kindResult, at, store.Condition{}, h.expires)}
	if at.pieces > 0 { // a small one was charged with the snapshot
		p.writes = append(p.writes, h.accounts(h.charge+int64(len(plain)))...)
		p.ended = func(err error) {
			if err == nil {
				v.charge(h, 0, int64(len(plain)))
			}
		}
	}
	return p, nil
}

// keep stores the pieces of a result, one after the other.
func (v *Vault) keep(ctx context.Context, pieces []store.Write) error {
	for _, w := range pieces {
		if _, err := v.store.Commit(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// Release makes the writes by which a checkpoint goes whose call never ran. What is left
// says so until the ttl would have ended (ErrReleased), and names the call (Released).
//
// Done must be called with the error of the commit.
func (v *Vault) Release(h Handle) *Pending {
	p := &Pending{turn: v.writers.enter(), handle: h, ended: func(err error) {
		if err == nil {
			v.charge(h, -1, -h.charge)
		}
	}}
	remove := func(key []byte) { p.writes = append(p.writes, store.Write{Key: key, Delete: true}) }
	remove(keyOf(kindSnapshot, h.name))
	remove(keyOf(kindCredential, h.name))
	for i := range h.part.pieces {
		remove(pieceKey(h.name, kindSnapshot, h.part.salt, i))
	}
	for _, s := range h.scopes {
		remove(s.account(h.name))
	}
	p.writes = append(p.writes, v.head(h.name, kindResult, &part{released: true, inline: h.left}, store.Condition{}, h.expires))
	return p
}

// fit drops what is too large.
func (r *Result) fit(maxImage int) {
	body, rest := len(r.Answer.Body), r.Answer.rest()+r.Image.rest()
	if r.Image != nil {
		body = max(body, len(r.Image.Body))
	}
	if body > maxImage || rest > maxFields {
		*r = Result{Status: r.Status, Upstream: r.Upstream, Reason: ReasonTooLarge}
	}
}

// Credentials are the recorded credentials of a checkpoint. ErrUnknown says that there
// are none: none were recorded, their time is over, or the call was undone.
func (v *Vault) Credentials(ctx context.Context, id string) (map[string][]string, error) {
	key := keyOf(kindCredential, v.name(id))
	entry, err := v.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, ErrUnknown
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	plain, err := v.sealer.Open(nil, entry.Value, key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	header, err := decodeCredentials(plain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return header, nil
}

func decodeCredentials(b []byte) (map[string][]string, error) {
	var m Message
	d := decoder{b: b}
	for d.next() {
		m.read(&d)
	}
	return m.Header, d.err
}
