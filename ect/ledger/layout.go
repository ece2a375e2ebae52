package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The store's keys begin with l, a letter for what they hold and, for data of one log,
// eight bytes for its origin. Ids and workflows are keyed hashes. Indexes and counters are
// eight bytes, big-endian.
//
//	l h log                        the signed head, with the log's size
//	l e log index                  an entry: its leaf, sealed
//	l t log level number           a tile of 256 hashes; of level 0 full ones only
//	l p log number                 the pruned entries of that tile of level 0, signed
//	l j id workflow                the location of an event
//	l g id                         this id is used in some workflow; no value
//	l w workflow log index         index: a workflow's entries; no value
//	l c id workflow log index      index: entries by their links; no value
//	l s log index                  the signature of an entry whose key is gone, sealed
//
// All logs of a store share j, g, w and c, so that each node finds the events of the others
// and an id is used once.
const (
	space         = 'l'
	spaceHead     = 'h'
	spaceEntry    = 'e'
	spaceTile     = 't'
	spacePruned   = 'p'
	spaceID       = 'j'
	spaceGiven    = 'g'
	spaceWorkflow = 'w'
	spaceLink     = 'c'
	spaceSigned   = 's'
)

const (
	idHash       = 16 // bytes of the hash of an id, and of a workflow in its own index
	workflowHash = 8  // bytes of the hash of a workflow after an id
	logKeySize   = 2 + 8
	idKeySize    = 2 + idHash + workflowHash
	indexEnd     = 8

	workflowKeySize = 2 + idHash + 8 + indexEnd
	linkKeySize     = idKeySize + 8 + indexEnd
)

// logID identifies a log in keys: a keyed hash of its origin.
type logID [8]byte

// logStore is one log in a store.
type logStore struct {
	store  store.Store
	sealer store.Sealer
	origin string
	keys   note.Verifiers
	id     logID
	links  func(e *Event) []string
	holds  func(header, payload, signature []byte) (holds, known bool)
	none   [idHash]byte // the hash of no workflow
}

func newLogStore(o *Options) *logStore {
	s := &logStore{
		store: o.Store, sealer: o.Sealer, origin: o.Origin, keys: o.HeadKeys,
		id: logOf(o.Sealer, o.Origin), links: o.Links, holds: o.Verifies,
	}
	s.none = s.hashOf("ledger workflow", "")
	return s
}

func logOf(s store.Sealer, origin string) logID {
	hash := store.Index(s, "ledger log", origin)
	return logID(hash[:8])
}

func logKey(kind byte, log logID, more int) []byte {
	return appendLogKey(make([]byte, 0, logKeySize+more), kind, log)
}

func appendLogKey(b []byte, kind byte, log logID) []byte {
	return append(append(b, space, kind), log[:]...)
}

func (s *logStore) headKey() []byte { return logKey(spaceHead, s.id, 0) }

func entryKey(log logID, index int64) []byte {
	return appendEntryKey(make([]byte, 0, logKeySize+indexEnd), log, index)
}

func appendEntryKey(b []byte, log logID, index int64) []byte {
	return binary.BigEndian.AppendUint64(appendLogKey(b, spaceEntry, log), uint64(index))
}

func (s *logStore) entryKey(index int64) []byte { return entryKey(s.id, index) }

func signedKey(log logID, index int64) []byte {
	return binary.BigEndian.AppendUint64(logKey(spaceSigned, log, indexEnd), uint64(index))
}

func (s *logStore) tileKey(level int, n int64) []byte {
	return binary.BigEndian.AppendUint64(append(logKey(spaceTile, s.id, 9), byte(level)), uint64(n))
}

func (s *logStore) prunedKey(n int64) []byte {
	return binary.BigEndian.AppendUint64(logKey(spacePruned, s.id, 8), uint64(n))
}

// names are the keyed hashes of an event's id and workflow, which its keys are made of.
type names struct{ id, workflow [idHash]byte }

func (s *logStore) namesOf(workflow, id string) names {
	n := names{s.hashOf("ledger id", id), s.none}
	if workflow != "" {
		n.workflow = s.hashOf("ledger workflow", workflow)
	}
	return n
}

func (s *logStore) hashOf(domain, name string) [idHash]byte {
	hash := store.Index(s.sealer, domain, name)
	return [idHash]byte(hash[:])
}

// appendID appends the key of the id in the workflow, or in the index of links.
func (n *names) appendID(b []byte, kind byte) []byte {
	return append(append(append(b, space, kind), n.id[:]...), n.workflow[:workflowHash]...)
}

// appendGiven appends the key that marks an id that some workflow has.
func (n *names) appendGiven(b []byte) []byte {
	return append(append(b, space, spaceGiven), n.id[:]...)
}

func (n *names) appendWorkflow(b []byte, log logID, index int64) []byte {
	b = append(append(append(b, space, spaceWorkflow), n.workflow[:]...), log[:]...)
	return binary.BigEndian.AppendUint64(b, uint64(index))
}

func (s *logStore) idKey(workflow, id string) []byte {
	n := s.namesOf(workflow, id)
	return n.appendID(make([]byte, 0, idKeySize), spaceID)
}

func (s *logStore) workflowPrefix(workflow string) []byte {
	return s.workflowKey(workflow, logID{}, 0)[:2+idHash]
}

func (s *logStore) workflowKey(workflow string, log logID, index int64) []byte {
	n := names{workflow: s.hashOf("ledger workflow", workflow)}
	return n.appendWorkflow(make([]byte, 0, workflowKeySize), log, index)
}

// linkKeys returns the keys of an entry in the index of links, without repetitions.
func (s *logStore) linkKeys(e *Event, index int64) [][]byte {
	if s.links == nil || e.Workflow == "" {
		return nil
	}
	return s.linkKeysIn(s.hashOf("ledger workflow", e.Workflow), e, index)
}

// linkKeysIn is linkKeys with the hash of the event's workflow.
func (s *logStore) linkKeysIn(workflow [idHash]byte, e *Event, index int64) [][]byte {
	if s.links == nil || e.Workflow == "" {
		return nil
	}
	ids := s.links(e)
	ids = ids[:min(len(ids), maxLinks)]
	var keys [][]byte
	for i, id := range ids {
		if id == "" || slices.Contains(ids[:i], id) {
			continue
		}
		n := names{s.hashOf("ledger id", id), workflow}
		key := append(n.appendID(make([]byte, 0, linkKeySize), spaceLink), s.id[:]...)
		keys = append(keys, binary.BigEndian.AppendUint64(key, uint64(index)))
	}
	return keys
}

// IDPrefix begins the store's keys of ids, of which one is written with each event. Each ends with the
// WorkflowHash of the event's workflow.
func IDPrefix() []byte { return []byte{space, spaceID} }

// WorkflowHash is what the store's keys of ids have of a workflow.
func (l *Log) WorkflowHash(workflow string) [8]byte {
	n := l.namesOf(workflow, "")
	return [workflowHash]byte(n.workflow[:])
}

func indexIn(key []byte) int64 {
	return int64(binary.BigEndian.Uint64(key[len(key)-indexEnd:]))
}

// location is stored under an event's id: the log that has it, its index, and the first bytes of its leaf hash.
type location struct {
	log   logID
	index int64
	check [8]byte
}

// locationVersion begins an encoded location.
const locationVersion = 1

const locationSize = 1 + 8 + 16

func (a *location) encode(b []byte) []byte {
	b = append(append(b, locationVersion), a.log[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(a.index))
	return append(b, a.check[:]...)
}

func decodeLocation(b []byte) (location, bool) {
	if len(b) != locationSize || b[0] != locationVersion {
		return location{}, false
	}
	return location{logID(b[1:9]), int64(binary.BigEndian.Uint64(b[9:17])), [8]byte(b[17:])}, true
}

func checkOf(leaf tlog.Hash) [8]byte { return [8]byte(leaf[:8]) }

// read opens the entry of a log at index.
func (s *logStore) read(ctx context.Context, log logID, index int64) (Entry, error) {
	key := entryKey(log, index)
	found, err := s.store.Get(ctx, key)
	if err != nil {
		return Entry{}, damagedAt(key, err)
	}
	return s.openEntry(key, found.Value)
}

// damagedAt makes ErrTampered of the store's error for an entry whose value is damaged: it stays so.
func damagedAt(key []byte, err error) error {
	if errors.Is(err, store.ErrDamaged) {
		return fmt.Errorf("%w: entry %d: %w", ErrTampered, indexIn(key), err)
	}
	return err
}

// scan is a Scan that goes on behind damaged values, in another snapshot. Their pairs have only the
// key, and an error that is store.ErrDamaged. It heeds no limit.
func (s *logStore) scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		for more := true; more; {
			more = false
			for found, err := range s.store.Scan(ctx, r) {
				if more = errors.Is(err, store.ErrDamaged); more {
					r.From = append(bytes.Clone(found.Key), 0)
				}
				if !yield(found, err) {
					return
				}
			}
		}
	}
}

func (s *logStore) openEntry(key, sealed []byte) (Entry, error) {
	e, err := s.open(key, sealed)
	if err != nil {
		return Entry{}, fmt.Errorf("%w: entry %d: %w", ErrTampered, indexIn(key), err)
	}
	return e, nil
}

// scanned opens a pair of scan as the entry of its key. The error is ErrTampered, or one of the store.
func (s *logStore) scanned(found store.Entry, err error) (Entry, error) {
	if err != nil {
		return Entry{}, damagedAt(found.Key, err)
	}
	e, err := s.openEntry(found.Key, found.Value)
	if err == nil && e.Index != indexIn(found.Key) {
		err = fmt.Errorf("%w: entry %d stands at %d", ErrTampered, e.Index, indexIn(found.Key))
	}
	return e, err
}

// open decrypts an entry that is stored at key.
func (s *logStore) open(key, sealed []byte) (Entry, error) {
	leaf, err := s.openLeaf(key, sealed)
	if err != nil {
		return Entry{}, err
	}
	return decode(leaf)
}

// openLeaf opens what is sealed under key, in the form in which it is hashed.
func (s *logStore) openLeaf(key, sealed []byte) ([]byte, error) {
	plain, err := s.sealer.Open(nil, sealed, key)
	if err != nil {
		return nil, err
	}
	return unpack(plain)
}

// storedTile reads the hashes of a tile; nil if it is absent.
func (s *logStore) storedTile(ctx context.Context, level int, n int64) ([]tlog.Hash, error) {
	found, err := s.store.Get(ctx, s.tileKey(level, n))
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return splitHashes(found.Value), nil
}

// splitHashes returns nil if the length is not a multiple of a hash.
func splitHashes(b []byte) []tlog.Hash {
	if len(b)%tlog.HashSize != 0 {
		return nil
	}
	hashes := make([]tlog.Hash, 0, tileWidth)
	for ; len(b) > 0; b = b[tlog.HashSize:] {
		hashes = append(hashes, tlog.Hash(b))
	}
	return hashes
}

func joinHashes(hashes []tlog.Hash) []byte {
	b := make([]byte, 0, len(hashes)*tlog.HashSize)
	for i := range hashes {
		b = append(b, hashes[i][:]...)
	}
	return b
}

// errEncoding: a newer build wrote the entry, or it was damaged before it was sealed.
var errEncoding = errors.New("ledger: an entry that this build cannot read")

// encodingVersion begins every encoded leaf.
const encodingVersion = 1

// packedVersion begins a leaf that is stored without the base64 of its payload, a
// token in compact form, which takes a quarter less space: the lengths of the three parts,
// two bytes each; what they encode; and the fields before them, with the payload's head.
const packedVersion = 2

const packedLengths = 3 * 2

var tokenBase64 = base64.RawURLEncoding.Strict()

// pack appends an encoded leaf, which ends with payload, as it is stored.
func pack(b, encoded, payload []byte) []byte {
	begin := len(b)
	b = append(b, packedVersion)
	b = append(b, make([]byte, packedLengths)...)
	rest := payload
	for i := range 3 {
		part, after, dot := bytes.Cut(rest, []byte{'.'})
		from := len(b)
		b = slices.Grow(b, tokenBase64.DecodedLen(len(part)))
		n, err := tokenBase64.Decode(b[from:cap(b)], part)
		// The decoder ignores line breaks.
		if err != nil || dot != (i < 2) || tokenBase64.EncodedLen(n) != len(part) {
			return append(b[:begin], encoded...)
		}
		binary.BigEndian.PutUint16(b[begin+1+2*i:], uint16(n))
		b, rest = b[:from+n], after
	}
	b = append(b, encoded[1:len(encoded)-len(payload)]...)
	if len(b)-begin >= len(encoded) {
		return append(b[:begin], encoded...)
	}
	return b
}

// unpack undoes pack.
func unpack(stored []byte) ([]byte, error) {
	if len(stored) == 0 || stored[0] != packedVersion {
		return stored, nil
	}
	if len(stored) < 1+packedLengths {
		return nil, errEncoding
	}
	lengths, rest := stored[1:1+packedLengths], stored[1+packedLengths:]
	var parts [3][]byte
	for i := range parts {
		n := int(binary.BigEndian.Uint16(lengths[2*i:]))
		if n > len(rest) {
			return nil, errEncoding
		}
		parts[i], rest = rest[:n], rest[n:]
	}
	size := 1 + len(rest) + 2
	for _, part := range parts {
		size += tokenBase64.EncodedLen(len(part))
	}
	encoded := append(append(make([]byte, 0, size), encodingVersion), rest...)
	for i, part := range parts {
		if i > 0 {
			encoded = append(encoded, '.')
		}
		encoded = tokenBase64.AppendEncode(encoded, part)
	}
	return encoded, nil
}

// The fields in the order in which they are written. Zero values are left out.
const (
	tagIndex     = 1
	tagRecorded  = 2
	tagID        = 3
	tagWorkflow  = 4
	tagAction    = 5
	tagIssuer    = 6
	tagParent    = 7 // once for each
	tagTime      = 8
	tagKeepUntil = 9
	tagPayload   = 11
	tagHeader    = 12
)

const (
	fieldOverhead = 1 + 2  // a tag and a length below 16 KiB
	fixedOverhead = 1 << 8 // version, numbers, and the tags and lengths of single fields
)

func (e *Event) encodeFields(to store.Encoder) []byte {
	to.String(tagID, e.ID)
	to.String(tagWorkflow, e.Workflow)
	to.String(tagAction, e.Action)
	to.String(tagIssuer, e.Issuer)
	for _, p := range e.Parents {
		to.String(tagParent, p)
	}
	to.Time(tagTime, e.Time)
	to.Time(tagKeepUntil, e.KeepUntil)
	store.Field(&to, tagPayload, e.Payload)
	to.Bytes(tagHeader, e.Header)
	return to.B
}

// decode accepts only the form that encode and encodeLeaf write: fields in ascending order,
// each at most once except parents. Only Leaf, Payload and Header share the memory of leaf.
func decode(leaf []byte) (Entry, error) {
	e := Entry{Leaf: leaf}
	if len(leaf) == 0 || leaf[0] != encodingVersion {
		return e, errEncoding
	}
	d, last := store.Decoder{B: leaf[1:], Broken: errEncoding}, byte(0)
	for d.Next() {
		if d.Tag < last || d.Tag == last && d.Tag != tagParent {
			return e, errEncoding
		}
		last = d.Tag
		switch d.Tag {
		case tagIndex:
			e.Index = d.Int()
		case tagRecorded:
			e.Recorded = d.Time()
		case tagID:
			e.ID = string(d.Field)
		case tagWorkflow:
			e.Workflow = string(d.Field)
		case tagAction:
			e.Action = string(d.Field)
		case tagIssuer:
			e.Issuer = string(d.Field)
		case tagParent:
			e.Parents = append(e.Parents, string(d.Field))
		case tagTime:
			e.Time = d.Time()
		case tagKeepUntil:
			e.KeepUntil = d.Time()
		case tagPayload:
			e.Payload = d.Field
		case tagHeader:
			if e.Header = d.Field; len(e.Header) == 0 {
				d.Err = errEncoding
			}
		default:
			d.Err = errEncoding
		}
	}
	if d.Err == nil && (last != tagPayload && e.Header == nil || e.ID == "" || e.Header != nil && len(e.Payload) == 0) {
		d.Err = errEncoding
	}
	return e, d.Err
}
