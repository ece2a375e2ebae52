package checkpoint

import (
	"context"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Bounds of what is kept.
const (
	// DefaultMaxImage is the largest body that is kept where nothing is configured, in
	// bytes, and MaxImage the largest that can be configured.
	DefaultMaxImage = 1 << 20
	MaxImage        = 16 << 20
	// MinTTL and MaxTTL bound how long a checkpoint stands.
	MinTTL = time.Second
	MaxTTL = 366 * 24 * time.Hour

	maxID          = 512
	maxName        = 4 << 10
	maxFields      = 32 << 10 // of the request and the image, besides their bodies
	maxUndo        = 96 << 10
	maxCredentials = 32 << 10
	maxRest        = 160 << 10 // of a record, besides its bodies
	maxPieces      = (2*MaxImage+maxRest)/pieceSize + 1
)

// Terms are what a checkpoint is made under.
type Terms struct {
	// TTL is how long it stands at least, from MinTTL to MaxTTL.
	TTL time.Duration
	// MaxImage is the largest body that is kept of the request, of the answer and of
	// each image, in bytes; 0 is DefaultMaxImage. A call that needs more cannot be
	// undone, and its checkpoint says so.
	MaxImage int
	// Workflow and Caller bound what stands of one workflow and of one caller.
	Workflow, Caller Quota
	// Rate is how many checkpoints a workflow may make in a minute, all of them at a
	// time if it has made none before; 0 is no bound.
	Rate int
}

func (t *Terms) maxImage() int {
	if t.MaxImage == 0 {
		return DefaultMaxImage
	}
	return t.MaxImage
}

func (t *Terms) check() error {
	switch {
	case t.TTL < MinTTL || t.TTL > MaxTTL:
		return fmt.Errorf("%w: a ttl of %v, from %v to %v", ErrInvalid, t.TTL, MinTTL, MaxTTL)
	case t.MaxImage < 0 || t.MaxImage > MaxImage:
		return fmt.Errorf("%w: bodies of %d bytes, at most %d", ErrInvalid, t.MaxImage, MaxImage)
	}
	return nil
}

func (s *Snapshot) check() error {
	switch {
	case s.ID == "" || len(s.ID) > maxID:
		return fmt.Errorf("%w: an id of %d bytes, from 1 to %d", ErrInvalid, len(s.ID), maxID)
	case len(s.First) > maxID:
		return fmt.Errorf("%w: a first attempt's id of %d bytes, at most %d", ErrInvalid, len(s.First), maxID)
	case max(len(s.Workflow), len(s.Action), len(s.Upstream)) > maxName:
		return fmt.Errorf("%w: a workflow, action or upstream of more than %d bytes", ErrInvalid, maxName)
	case s.Way < Restore || s.Way > Irreversible:
		return fmt.Errorf("%w: %d is no way to undo a call", ErrInvalid, s.Way)
	case s.Reversible() == (s.Reason != ""):
		return fmt.Errorf("%w: a reason is needed where a call cannot be undone, and only there", ErrInvalid)
	}
	return nil
}

// Handle names a checkpoint that stands, and what is needed to record its result.
type Handle struct {
	name             name
	created, expires time.Time // expires is when the last of it goes
	scopes           []scope
	charge           int64
	part             part
	left             []byte // what stays if the call never runs
}

// Prepare makes the writes by which a checkpoint gets on disk in the commit of the
// claim, before the call leaves (P2). credentials, if any, are kept until its ttl or
// until it was undone, apart from it: they are not in its hash. What the undo needs and
// is too large makes the checkpoint irreversible: Pending.Snapshot shows it.
//
// A *QuotaError says that the workflow or the caller has too many already. Done must be
// called with the error of the commit.
func (v *Vault) Prepare(ctx context.Context, s Snapshot, credentials map[string][]string, t Terms) (*Pending, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	now, err := v.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s.Created, s.Expires = now, now.Add(t.TTL)
	var secret encoder
	secret.header(tagHeaderName, tagHeaderValue, credentials)
	s.Credentials = len(secret.b)
	s.fit(t.maxImage())
	plain := s.encode()
	p := &Pending{snapshot: &s, lost: ErrTaken, handle: Handle{
		name: v.name(s.ID), created: now, expires: s.Expires.Add(grace(t.TTL)),
		scopes: v.scopes(&s, func(kind byte) bool { return !t.of(kind).none() }),
		charge: charge(&s, plain), part: *split(plain),
	}}
	h := &p.handle
	for _, scope := range h.scopes {
		h.part.counted = append(h.part.counted, scope.kind)
	}
	p.sum = h.part.sum
	held, err := v.reserve(ctx, h, &t, now)
	if err != nil {
		return nil, err
	}
	p.ended = held.ended
	h.left = s.left()
	p.turn = v.writers.enter()
	p.writes = append(p.writes, v.head(h.name, kindSnapshot, &h.part, store.Absent(), h.expires))
	p.writes = append(p.writes, v.pieces(h.name, kindSnapshot, &h.part, plain, h.expires)...)
	if s.Credentials > 0 {
		key := keyOf(kindCredential, h.name)
		p.writes = append(p.writes, store.Write{Key: key, Value: v.sealer.Seal(nil, secret.b, key), Expires: s.Expires})
	}
	p.writes = append(append(p.writes, h.accounts(h.charge)...), held.notes()...)
	h.part.inline = nil // only where it stands is needed from now on
	return p, nil
}

// charge is what a checkpoint counts for in bytes: its snapshot, its credentials, and a
// result that is not large.
func charge(s *Snapshot, plain []byte) int64 { return int64(len(plain) + s.Credentials + inlineMost) }

// fit makes s irreversible where what its undo needs is too large, and drops what
// nobody needs of an irreversible one.
func (s *Snapshot) fit(maxImage int) {
	body, image := len(s.Request.Body), 0
	if s.Image != nil {
		image = len(s.Image.Body)
	}
	rest := s.Request.rest() + s.Image.rest()
	if s.Reversible() && (max(body, image) > maxImage || rest > maxFields || len(s.Undo) > maxUndo || s.Credentials > maxCredentials) {
		s.Way, s.Reason = Irreversible, ReasonTooLarge
	}
	if !s.Reversible() {
		r := &s.Request
		s.Image, s.Undo, s.Credentials, r.Message = nil, nil, 0, Message{}
		r.Method, r.Host, r.Path, r.Query = cut(r.Method), cut(r.Host), cut(r.Path), cut(r.Query)
	}
}

// mostShown is how much of a long text an irreversible checkpoint shows.
const mostShown = 1024

func cut(s string) string { return s[:min(len(s), mostShown)] }

// rest is what the encoded request takes without its body.
func (r *Request) rest() int {
	without := *r
	without.Body = nil
	return len(without.encode())
}

func (i *Image) rest() int {
	if i == nil {
		return 0
	}
	return len(i.ETag) + i.Message.rest()
}

func (m *Message) rest() int {
	var e encoder
	e.message(&Message{Header: m.Header, ContentType: m.ContentType})
	return len(e.b)
}

// accounts are the index entries by which quotas are counted.
func (h *Handle) accounts(bytes int64) []store.Write {
	writes := make([]store.Write, 0, len(h.scopes))
	for _, s := range h.scopes {
		writes = append(writes, store.Write{
			Key: s.account(h.name), Value: account{created: h.created, bytes: bytes}.encode(), Expires: h.expires,
		})
	}
	return writes
}
