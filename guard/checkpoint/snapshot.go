package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Snapshot is recorded before a call leaves. Its hash is the out_hash of the checkpoint's token.
type Snapshot struct {
	// ID is the id of the checkpoint's token. It is unique in the store.
	ID string
	// Workflow, which may be empty, and Caller are those whose quotas the checkpoint counts
	// against.
	Workflow string
	Caller   execution.CallerHash
	// Execution is the key of the guarded call.
	Execution execution.Key
	// First is the checkpoint of the first attempt, if the call may have run before: both are one
	// execution with one effect, and are undone once. Its own id if the earlier attempt has no
	// checkpoint; empty without an earlier attempt.
	First  string
	Action string
	// Upstream is where the call goes: recorded credentials are used there only.
	Upstream string
	// Way is how the call is undone, Reason why it cannot be; Reason is empty if it can.
	Way    Way
	Reason Reason
	// Created and Expires are set by Prepare, by the store's clock.
	Created, Expires time.Time
	// Credentials is the size in bytes of the credentials recorded by Prepare; 0 without any.
	Credentials int
	// Request is what the undo needs of the request.
	Request Request
	// Image is the state of the target before the call; nil if the undo needs none.
	Image *Image
	// OnError says that errors roll the call back. Decided before the call leaves, like Undo.
	OnError bool
	// Undo is the encoded way to undo the call: decided before the call leaves, whatever the
	// configuration says later. Empty if it cannot be undone.
	Undo []byte
}

// Root is the checkpoint shared by all attempts of the call: that of the first.
func (s *Snapshot) Root() string { return cmp.Or(s.First, s.ID) }

// Reversible is cascade.reversible of the token.
func (s *Snapshot) Reversible() bool { return s.Way != Irreversible }

// Message is the recorded part of a request or an answer.
type Message struct {
	// Header are the chosen fields, under canonical names. A name without values means that the
	// message had no such field.
	Header      map[string][]string
	ContentType string
	Body        []byte
}

// Request is the recorded part of the call.
type Request struct {
	Method, Host string
	// Path is escaped as sent; Query without the question mark.
	Path, Query string
	Message
}

// Image is the state of a call's target at one moment.
type Image struct {
	// Exists is false if there was nothing: then there is no body.
	Exists bool
	// Status is the status of the answer with the state.
	Status int
	ETag   string
	Message
}

// Result is recorded once a call has ended.
type Result struct {
	// Status of the answer; 0 without one.
	Status int
	// Upstream is the status of the upstream's own answer, before handlers changed it; 0 if
	// unknown.
	Upstream int
	// Reason is why the call cannot be undone although its token says that it can; empty if it
	// can.
	Reason Reason
	// Answer is what the undo needs of the answer.
	Answer Message
	// Image is the state of the target afterwards; nil if the undo needs none, or it could not be
	// read.
	Image *Image
}

// The tags of the fields. Readers skip unknown ones.
const (
	tagID = 1 + iota
	tagWorkflow
	tagCaller
	tagExecution
	tagAction
	tagUpstream
	tagWay
	tagReason
	tagCreated
	tagExpires
	tagRequest
	tagImage
	tagStatus
	tagAnswer
	tagCredentials
	tagUndo
	tagUpstreamStatus
	tagFirst
	tagOnError
)

// The tags inside a request, an answer and an image.
const (
	tagMethod = 1 + iota
	tagHost
	tagPath
	tagQuery
	tagHeaderName
	tagHeaderValue
	tagContentType
	tagBody
	tagExists
	tagImageStatus
	tagETag
)

func (s *Snapshot) encode() []byte {
	e := salted(512 + s.Request.size() + s.Image.size())
	e.String(tagID, s.ID)
	e.String(tagWorkflow, s.Workflow)
	e.Bytes(tagCaller, s.Caller[:])
	e.Bytes(tagExecution, s.Execution[:])
	e.String(tagFirst, s.First)
	e.String(tagAction, s.Action)
	e.String(tagUpstream, s.Upstream)
	e.Int(tagWay, int64(s.Way))
	e.String(tagReason, string(s.Reason))
	e.Time(tagCreated, s.Created)
	e.Time(tagExpires, s.Expires)
	e.Int(tagCredentials, int64(s.Credentials))
	e.Bytes(tagRequest, s.Request.encode())
	s.Image.encode(&e)
	e.Bytes(tagUndo, s.Undo)
	e.Bool(tagOnError, s.OnError)
	return e.B
}

func decodeSnapshot(b []byte) (*Snapshot, error) {
	d, err := unsalted(b)
	if err != nil {
		return nil, err
	}
	s := new(Snapshot)
	var way int64
	for d.Next() {
		switch d.Tag {
		case tagID:
			s.ID = string(d.Field)
		case tagWorkflow:
			s.Workflow = string(d.Field)
		case tagCaller:
			d.Fill(s.Caller[:])
		case tagExecution:
			d.Fill(s.Execution[:])
		case tagFirst:
			s.First = string(d.Field)
		case tagAction:
			s.Action = string(d.Field)
		case tagUpstream:
			s.Upstream = string(d.Field)
		case tagWay:
			way = d.Int()
		case tagReason:
			s.Reason = Reason(d.Field)
		case tagCreated:
			s.Created = d.Time()
		case tagExpires:
			s.Expires = d.Time()
		case tagCredentials:
			s.Credentials = int(d.Int())
		case tagRequest:
			d.Err = s.Request.decode(d.Field)
		case tagImage:
			s.Image = new(Image)
			d.Err = s.Image.decode(d.Field)
		case tagUndo:
			s.Undo = bytes.Clone(d.Field)
		case tagOnError:
			s.OnError = d.Int() != 0
		}
	}
	if d.Err == nil && (way < int64(Restore) || way > int64(Irreversible) || s.ID == "") {
		d.Err = errEncoding
	}
	s.Way = Way(way)
	return s, d.Err
}

func (r *Result) encode() []byte {
	e := salted(256 + r.Answer.size() + r.Image.size())
	e.Int(tagStatus, int64(r.Status))
	e.Int(tagUpstreamStatus, int64(r.Upstream))
	e.String(tagReason, string(r.Reason))
	var answer store.Encoder
	r.Answer.encode(&answer)
	e.Bytes(tagAnswer, answer.B)
	r.Image.encode(&e)
	return e.B
}

func decodeResult(b []byte) (*Result, error) {
	d, err := unsalted(b)
	if err != nil {
		return nil, err
	}
	r := new(Result)
	for d.Next() {
		switch d.Tag {
		case tagStatus:
			r.Status = int(d.Int())
		case tagUpstreamStatus:
			r.Upstream = int(d.Int())
		case tagReason:
			r.Reason = Reason(d.Field)
		case tagAnswer:
			d.Err = r.Answer.decode(d.Field, nil)
		case tagImage:
			r.Image = new(Image)
			d.Err = r.Image.decode(d.Field)
		}
	}
	return r, d.Err
}

func (r *Request) encode() []byte {
	e := store.Encoder{B: make([]byte, 0, 64+r.size())}
	e.String(tagMethod, r.Method)
	e.String(tagHost, r.Host)
	e.String(tagPath, r.Path)
	e.String(tagQuery, r.Query)
	r.Message.encode(&e)
	return e.B
}

func (r *Request) decode(b []byte) error {
	return r.Message.decode(b, func(d *store.Decoder) {
		switch d.Tag {
		case tagMethod:
			r.Method = string(d.Field)
		case tagHost:
			r.Host = string(d.Field)
		case tagPath:
			r.Path = string(d.Field)
		case tagQuery:
			r.Query = string(d.Field)
		}
	})
}

// encode writes an image also if nothing is known of it.
func (i *Image) encode(to *store.Encoder) {
	if i == nil {
		return
	}
	e := store.Encoder{B: make([]byte, 0, 64+i.size())}
	e.Bool(tagExists, i.Exists)
	e.Int(tagImageStatus, int64(i.Status))
	e.String(tagETag, i.ETag)
	i.Message.encode(&e)
	store.Field(to, tagImage, e.B)
}

func (i *Image) decode(b []byte) error {
	return i.Message.decode(b, func(d *store.Decoder) {
		switch d.Tag {
		case tagExists:
			i.Exists = d.Int() != 0
		case tagImageStatus:
			i.Status = int(d.Int())
		case tagETag:
			i.ETag = string(d.Field)
		}
	})
}

// encode writes each name of the header, and then its values, which may be empty.
func (m *Message) encode(e *store.Encoder) {
	var few [16]string
	names := few[:0]
	for k := range m.Header {
		names = append(names, k)
	}
	slices.Sort(names)
	for _, k := range names {
		store.Field(e, tagHeaderName, k)
		for _, v := range m.Header[k] {
			store.Field(e, tagHeaderValue, v)
		}
	}
	e.String(tagContentType, m.ContentType)
	e.Bytes(tagBody, m.Body)
}

// decode passes the fields that are not a message's to other, if any.
func (m *Message) decode(b []byte, other func(*store.Decoder)) error {
	d, name := store.Decoder{B: b, Broken: errEncoding}, ""
	for d.Next() {
		switch d.Tag {
		case tagHeaderName:
			if m.Header == nil {
				m.Header = map[string][]string{}
			}
			name = string(d.Field)
			m.Header[name] = nil
		case tagHeaderValue:
			if m.Header == nil {
				return errEncoding
			}
			m.Header[name] = append(m.Header[name], string(d.Field))
		case tagContentType:
			m.ContentType = string(d.Field)
		case tagBody:
			m.Body = d.Field
		default:
			if other != nil {
				other(&d)
			}
		}
	}
	return d.Err
}

// size is about the encoded size of the message.
func (m *Message) size() int { return len(m.Body) + 256*len(m.Header) }

func (i *Image) size() int {
	if i == nil {
		return 0
	}
	return i.Message.size() + len(i.ETag)
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
	// ReasonUnkept: the store had no room for what the undo needs of the answer.
	ReasonUnkept Reason = "not-kept"
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
		return nil, fmt.Errorf("%w: the handle of no checkpoint", ErrInvalid)
	}
	r.fit()
	p := &Pending{Batch: v.batch(nil, nil), handle: h} // before anything is sealed
	plain := r.encode()
	at := split(plain)
	if err := v.keep(ctx, v.pieces(h.name, kindResult, at, plain, h.expires)); err != nil {
		plain = (&Result{Status: r.Status, Upstream: r.Upstream, Reason: ReasonUnkept}).encode()
		at = split(plain)
	}
	p.sum = at.sum
	p.Add(v.head(h.name, kindResult, at, store.Condition{}, h.expires))
	if at.pieces > 0 { // a small one was charged with the snapshot
		p.Add(h.accounts(v, h.charge+int64(len(plain)))...)
		p.OnDone(func(err error) error {
			if err == nil {
				v.charge(h, 0, int64(len(plain)))
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
			v.charge(h, -1, -h.charge)
		}
	})
	remove := func(key []byte) { b.Add(store.Write{Key: key, Delete: true}) }
	remove(keyOf(kindSnapshot, h.name))
	remove(keyOf(kindCredential, h.name))
	for i := range h.part.pieces {
		remove(pieceKey(h.name, kindSnapshot, h.part.salt, i))
	}
	for _, s := range h.scopes {
		remove(s.account(h.name))
	}
	b.Add(v.head(h.name, kindResult, &part{released: true, inline: h.left}, store.Condition{}, h.expires))
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
	key := keyOf(kindCredential, v.name(id))
	entry, err := v.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, ErrUnknown
	}
	if err != nil {
		return nil, unread(err)
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

func encodeCredentials(header map[string][]string) []byte {
	var e store.Encoder
	(&Message{Header: header}).encode(&e)
	return e.B
}

func decodeCredentials(b []byte) (map[string][]string, error) {
	var m Message
	err := m.decode(b, nil)
	return m.Header, err
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
