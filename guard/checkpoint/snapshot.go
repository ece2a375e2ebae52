package checkpoint

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Snapshot is recorded before a call leaves. Its hash is the out_hash of the checkpoint's token.
type Snapshot struct {
	// ID is the id of the checkpoint's token. It is unique in the store.
	ID string `cbor:"1,keyasint,omitempty"`
	// Workflow, which may be empty, and Caller are those whose quotas the checkpoint counts
	// against.
	Workflow string               `cbor:"2,keyasint,omitempty"`
	Caller   execution.CallerHash `cbor:"3,keyasint,omitempty"`
	// Execution is the key of the guarded call.
	Execution execution.Key `cbor:"4,keyasint,omitempty"`
	// First is the checkpoint of the first attempt, if the call may have run before: both are one
	// execution with one effect, and are undone once. Its own id if the earlier attempt has no
	// checkpoint; empty without an earlier attempt.
	First  string `cbor:"18,keyasint,omitempty"`
	Action string `cbor:"5,keyasint,omitempty"`
	// Upstream is where the call goes: recorded credentials are used there only.
	Upstream string `cbor:"6,keyasint,omitempty"`
	// Way is how the call is undone, Reason why it cannot be; Reason is empty if it can.
	Way    Way    `cbor:"7,keyasint,omitempty"`
	Reason Reason `cbor:"8,keyasint,omitempty"`
	// Created and Expires are set by Prepare, by the store's clock.
	Created time.Time `cbor:"9,keyasint"`
	Expires time.Time `cbor:"10,keyasint"`
	// Credentials is the size in bytes of the credentials recorded by Prepare; 0 without any.
	Credentials int `cbor:"15,keyasint,omitempty"`
	// Request is what the undo needs of the request.
	Request Request `cbor:"11,keyasint"`
	// Image is the state of the target before the call; nil if the undo needs none.
	Image *Image `cbor:"12,keyasint,omitempty"`
	// OnError says that errors roll the call back. Decided before the call leaves, like Undo.
	OnError bool `cbor:"19,keyasint,omitempty"`
	// Undo is the encoded way to undo the call: decided before the call leaves, whatever the
	// configuration says later. Empty if it cannot be undone.
	Undo []byte `cbor:"16,keyasint,omitempty"`
}

// Root is the checkpoint shared by all attempts of the call: that of the first.
func (s *Snapshot) Root() string { return cmp.Or(s.First, s.ID) }

// Reversible is cascade.reversible of the token.
func (s *Snapshot) Reversible() bool { return s.Way != Irreversible }

// Message is the recorded part of a request or an answer.
type Message struct {
	// Header are the chosen fields, under canonical names. A name without values means that the
	// message had no such field.
	Header      map[string][]string `cbor:"5,keyasint,omitempty"`
	ContentType string              `cbor:"7,keyasint,omitempty"`
	Body        []byte              `cbor:"8,keyasint,omitempty"`
}

// Request is the recorded part of the call.
type Request struct {
	Method string `cbor:"1,keyasint,omitempty"`
	Host   string `cbor:"2,keyasint,omitempty"`
	// Path is escaped as sent; Query without the question mark.
	Path  string `cbor:"3,keyasint,omitempty"`
	Query string `cbor:"4,keyasint,omitempty"`
	Message
}

// Image is the state of a call's target at one moment.
type Image struct {
	// Exists is false if there was nothing: then there is no body.
	Exists bool `cbor:"9,keyasint,omitempty"`
	// Status is the status of the answer with the state.
	Status int    `cbor:"10,keyasint,omitempty"`
	ETag   string `cbor:"11,keyasint,omitempty"`
	Message
}

// Result is recorded once a call has ended.
type Result struct {
	// Status of the answer; 0 without one.
	Status int `cbor:"13,keyasint,omitempty"`
	// Upstream is the status of the upstream's own answer, before handlers changed it; 0 if
	// unknown.
	Upstream int `cbor:"17,keyasint,omitempty"`
	// Reason is why the call cannot be undone although its token says that it can; empty if it
	// can.
	Reason Reason `cbor:"8,keyasint,omitempty"`
	// Answer is what the undo needs of the answer.
	Answer Message `cbor:"14,keyasint"`
	// Image is the state of the target afterwards; nil if the undo needs none, or it could not be
	// read.
	Image *Image `cbor:"12,keyasint,omitempty"`
}

// errEncoding: a sealed record opened but says nothing that can be: a newer build or a bug wrote it.
var errEncoding = errors.New("checkpoint: a record in the store cannot be read by this build")

// saltSize is how many random bytes precede a snapshot or a result, so that a hash confirms no guess.
const saltSize = 32

func salted(record any, size int) []byte {
	b := make([]byte, saltSize, saltSize+256+size)
	_, _ = rand.Read(b) // never fails
	return store.Encode(b, record)
}

func unsalted(plain []byte, record any) error {
	if len(plain) < saltSize {
		return errEncoding
	}
	return store.Decode(plain[saltSize:], record)
}

func (s *Snapshot) encode() []byte { return salted(s, len(s.Undo)+s.Request.size()+s.Image.size()) }

func decodeSnapshot(plain []byte) (*Snapshot, error) {
	s := new(Snapshot)
	err := unsalted(plain, s)
	if err == nil && (s.Way < Restore || s.Way > Irreversible || s.ID == "") {
		err = errEncoding
	}
	return s, err
}

func (r *Result) encode() []byte { return salted(r, r.Answer.size()+r.Image.size()) }

// rest is the size of a message without its body, in bytes.
func (m *Message) rest() int {
	n := len(m.ContentType)
	for name, values := range m.Header {
		n += len(name) + 2
		for _, v := range values {
			n += len(v) + 2
		}
	}
	return n
}

func (m *Message) size() int { return m.rest() + len(m.Body) }

// rest is the size of a request without its body, in bytes.
func (r *Request) rest() int {
	return len(r.Method) + len(r.Host) + len(r.Path) + len(r.Query) + r.Message.rest()
}

func (i *Image) rest() int {
	if i == nil {
		return 0
	}
	return len(i.ETag) + i.Message.rest()
}

func (i *Image) size() int {
	if i == nil {
		return 0
	}
	return i.rest() + len(i.Body)
}

// Way is how a call can be undone. It is decided before the call leaves.
type Way uint8

// The ways.
const (
	// Restore: the earlier state is put back.
	Restore Way = 1 + iota
	// Compensate: another request takes the effect back.
	Compensate
	// Delegate: the agent that was called undoes it itself.
	Delegate
	// Irreversible: only a person can help (cascade 4.2.1).
	Irreversible
)

// String is the word of the configuration and of answers.
func (w Way) String() string {
	switch w {
	case Restore:
		return "restore"
	case Compensate:
		return "compensate"
	case Delegate:
		return "delegate"
	case Irreversible:
		return "irreversible"
	default:
		return "unknown"
	}
}

// Reason says why a call cannot be undone. It is a fixed word without data of the call.
type Reason string

// The reasons.
const (
	// ReasonDeclared: the action is configured so.
	ReasonDeclared Reason = "declared"
	// ReasonNoAction: no configured action matches the call.
	ReasonNoAction Reason = "no-action"
	// ReasonNoImage: the state of the target could not be fetched.
	ReasonNoImage Reason = "no-image"
	// ReasonChanged: another write changed the target while the call ran, so that the call's own
	// change is unknown.
	ReasonChanged Reason = "changed-meanwhile"
	// ReasonNotCreated: nothing was seen at the target before the call, and its answer does not
	// say that it created something, so that it must not be deleted.
	ReasonNotCreated Reason = "not-created"
	// ReasonAbsent: a value that the undo needs is missing.
	ReasonAbsent Reason = "absent-value"
	// ReasonMethod: the effect of a call with this method cannot be put back.
	ReasonMethod Reason = "method"
	// ReasonTooLarge: the undo needs more than may be kept.
	ReasonTooLarge Reason = "too-large"
	// reasonUnkept: the store had no room for what the undo needs of the answer.
	reasonUnkept Reason = "not-kept"
)

// Record makes the writes that record a call's result in the outcome's commit. It replaces an
// earlier result.
//
// A large result is stored here already, in commits of its own, and only named in the outcome's:
// a store that is nearly full takes outcomes but nothing large, and an outcome must not be lost
// for it (P1). If it cannot be stored, or is too large, the result says why: then only a person
// can undo the call. ctx must outlive the client, like the outcome's.
//
// The batch must be ended.
func (v *Store) Record(ctx context.Context, h Handle, r Result) (*Pending, error) {
	if h.expires.IsZero() {
		return nil, fmt.Errorf("%w: the handle of no checkpoint", errInvalid)
	}
	r.fit()
	p := &Pending{Batch: v.batch(nil, nil), handle: h} // before anything is sealed
	plain := r.encode()
	at := split(plain)
	if err := v.keep(ctx, v.putPieces(h.name, kindResult, at, plain, h.expires)); err != nil {
		plain = (&Result{Status: r.Status, Upstream: r.Upstream, Reason: reasonUnkept}).encode()
		at = split(plain)
	}
	p.sum = at.Sum
	p.Add(v.results.Put(v.results.Key(h.name[:]), at, store.Condition{}, h.expires))
	if at.Salt != nil { // a small one was charged with the snapshot
		p.Add(h.accounts(v, h.charge+int64(len(plain)))...)
		p.OnDone(func(err error) error {
			if err == nil {
				v.changed(h, int64(len(plain)))
			}
			return err
		})
	}
	return p, nil
}

// keep stores the pieces of a result in order.
func (v *Store) keep(ctx context.Context, pieces []store.Write) error {
	for _, w := range pieces {
		if _, err := v.store.Commit(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// Release makes the writes that remove the checkpoint of a call that never ran. Until the ttl
// would have ended a remainder says so (ErrReleased) and names the call (Released). The batch
// must be ended.
func (v *Store) Release(h Handle) *store.Batch {
	b := v.batch(nil, func(err error) {
		if err == nil {
			v.changed(h, 0)
		}
	})
	remove := func(key []byte) { b.Add(store.Write{Key: key, Delete: true}) }
	remove(v.snapshots.Key(h.name[:]))
	remove(v.credentials.Key(h.name[:]))
	if h.part.Salt != nil {
		b.Add(v.pieces.DeletePieces(v.piecesOf(h.name, kindSnapshot, &h.part), h.part.Size)...)
	}
	for _, s := range h.scopes {
		remove(accountKey(s, h.name))
	}
	left := &part{Released: true, Inline: h.left}
	b.Add(v.results.Put(v.results.Key(h.name[:]), left, store.Condition{}, h.expires))
	return b
}

// fit drops what is too large.
func (r *Result) fit() {
	body, rest := len(r.Answer.Body), r.Answer.rest()+r.Image.rest()
	if r.Image != nil {
		body = max(body, len(r.Image.Body))
	}
	if body > MaxImage || rest > maxFields {
		*r = Result{Status: r.Status, Upstream: r.Upstream, Reason: ReasonTooLarge}
	}
}

// Credentials are the recorded credentials of a checkpoint. ErrUnknown: none were recorded, they
// have expired, or the call was undone.
func (v *Store) Credentials(ctx context.Context, id string) (map[string][]string, error) {
	n := v.name(id)
	row, err := v.credentials.Get(ctx, v.credentials.Key(n[:]))
	switch {
	case err != nil:
		return nil, err
	case row.Record == nil:
		return nil, ErrUnknown
	}
	return *row.Record, nil
}

// TargetOf names what a request to an upstream changes: the same for all spellings of its path
// that servers may treat as equal. The query is not part of it.
func TargetOf(upstream, escaped string) string {
	plain, err := url.PathUnescape(escaped)
	if err != nil {
		plain = escaped
	}
	return upstream + " " + strings.ToLower(path.Clean("/"+plain))
}

// Target names what the call of a checkpoint changed, so that calls with the same target are
// undone one after the other, and when the checkpoint was made. It is not verified, and good for
// an order only. The errors are those of Before.
func (v *Store) Target(ctx context.Context, id string) (name string, made time.Time, err error) {
	s, err := v.stored(ctx, id)
	if err != nil {
		return "", time.Time{}, err
	}
	if s.Way != Restore && s.Request.Method == http.MethodPost {
		// Each POST creates something of its own, so that POSTs to one target are independent.
		return hex.EncodeToString(s.Execution[:]), s.Created, nil
	}
	return TargetOf(s.Upstream, s.Request.Path), s.Created, nil
}
