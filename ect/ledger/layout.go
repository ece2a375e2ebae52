package ledger

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The store's keys begin with l, a letter that says what stands there, and, where it
// belongs to one log, eight bytes that stand for its origin. Ids and workflows are
// keyed hashes. Indexes and counters are eight bytes, big-endian.
//
//	l h log                  the signed head; the size in it is the log's
//	l o log ticket boot      an event that waits for the sequencer, sealed
//	l e log index            an entry: its leaf, sealed
//	l t log level number     a tile of 256 hashes; of level 0 full ones only
//	l p log number           which entries of that tile of level 0 were pruned, signed
//	l j id workflow          where the event stands: an account
//	l g id                   that a workflow has given this id; no value
//	l w workflow log index   index: a workflow's entries; no value
//
// The last three are shared by all logs of a store: what one node recorded is known to
// the others, and an id is taken once.
const (
	space         = 'l'
	spaceHead     = 'h'
	spaceOutbox   = 'o'
	spaceEntry    = 'e'
	spaceTile     = 't'
	spacePruned   = 'p'
	spaceID       = 'j'
	spaceGiven    = 'g'
	spaceWorkflow = 'w'
)

const (
	idHash       = 16 // of an event's id, and of a workflow in its own index
	workflowHash = 8  // of a workflow behind an id
	logKeySize   = 2 + 8
	idKeySize    = 2 + idHash + workflowHash
	indexEnd     = 8
)

// logID stands for a log's origin in keys.
type logID [8]byte

// shelf is where one log stands in a store.
type shelf struct {
	store  store.Store
	sealer Sealer
	origin string
	keys   note.Verifiers
	id     logID
}

func newShelf(o *Options) *shelf {
	return &shelf{
		store: o.Store, sealer: o.Sealer, origin: o.Origin, keys: o.HeadKeys,
		id: logOf(o.Sealer, o.Origin),
	}
}

func logOf(s Sealer, origin string) logID {
	hash := s.Index("ledger log", origin)
	return logID(hash[:8])
}

func logKey(kind byte, log logID, more int) []byte {
	return append(append(make([]byte, 0, logKeySize+more), space, kind), log[:]...)
}

func (s *shelf) headKey() []byte { return logKey(spaceHead, s.id, 0) }

func entryKey(log logID, index int64) []byte {
	return binary.BigEndian.AppendUint64(logKey(spaceEntry, log, 8), uint64(index))
}

func (s *shelf) entryKey(index int64) []byte { return entryKey(s.id, index) }

func (s *shelf) tileKey(level int, n int64) []byte {
	return binary.BigEndian.AppendUint64(append(logKey(spaceTile, s.id, 9), byte(level)), uint64(n))
}

func (s *shelf) prunedKey(n int64) []byte {
	return binary.BigEndian.AppendUint64(logKey(spacePruned, s.id, 8), uint64(n))
}

// ticket names an event that waits: in the order of its process, with that process's
// boot behind it, so that no two processes ever give the same.
type ticket struct {
	number uint64
	boot   [8]byte
}

func (s *shelf) outboxKey(t ticket) []byte {
	return append(binary.BigEndian.AppendUint64(logKey(spaceOutbox, s.id, 16), t.number), t.boot[:]...)
}

func ticketIn(key []byte) (ticket, bool) {
	if len(key) != logKeySize+16 {
		return ticket{}, false
	}
	return ticket{binary.BigEndian.Uint64(key[logKeySize:]), [8]byte(key[logKeySize+8:])}, true
}

func (s *shelf) idPrefix(id string) []byte {
	hash := s.sealer.Index("ledger id", id)
	return append(append(make([]byte, 0, idKeySize), space, spaceID), hash[:idHash]...)
}

func (s *shelf) idKey(workflow, id string) []byte {
	hash := s.sealer.Index("ledger workflow", workflow)
	return append(s.idPrefix(id), hash[:workflowHash]...)
}

// givenKey is where an id stands that a workflow has given, whichever that is.
func (s *shelf) givenKey(id string) []byte {
	key := s.idPrefix(id)
	key[1] = spaceGiven
	return key
}

func (s *shelf) workflowPrefix(workflow string) []byte {
	hash := s.sealer.Index("ledger workflow", workflow)
	return append(append(make([]byte, 0, 2+idHash+16), space, spaceWorkflow), hash[:idHash]...)
}

func (s *shelf) workflowKey(workflow string, log logID, index int64) []byte {
	return binary.BigEndian.AppendUint64(append(s.workflowPrefix(workflow), log[:]...), uint64(index))
}

func indexIn(key []byte) int64 {
	return int64(binary.BigEndian.Uint64(key[len(key)-indexEnd:]))
}

// account is what stands under an event's id: which log has it, and its ticket while
// it waits, then its index with the beginning of its leaf hash.
type account struct {
	log     logID
	waiting bool
	ticket  ticket
	index   int64
	check   [8]byte
}

const accountSize = 1 + 8 + 16

func (a *account) encode() []byte {
	b := make([]byte, 0, accountSize)
	if a.waiting {
		b = append(append(b, 0), a.log[:]...)
		b = binary.BigEndian.AppendUint64(b, a.ticket.number)
		return append(b, a.ticket.boot[:]...)
	}
	b = append(append(b, 1), a.log[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(a.index))
	return append(b, a.check[:]...)
}

func decodeAccount(b []byte) (account, bool) {
	if len(b) != accountSize || b[0] > 1 {
		return account{}, false
	}
	a := account{log: logID(b[1:9]), waiting: b[0] == 0}
	number, rest := binary.BigEndian.Uint64(b[9:17]), [8]byte(b[17:25])
	if a.waiting {
		a.ticket = ticket{number, rest}
	} else {
		a.index, a.check = int64(number), rest
	}
	return a, true
}

func checkOf(leaf tlog.Hash) [8]byte { return [8]byte(leaf[:8]) }

// read opens the entry of a log at index.
func (s *shelf) read(ctx context.Context, log logID, index int64) (Entry, error) {
	key := entryKey(log, index)
	found, err := s.store.Get(ctx, key)
	if err != nil {
		return Entry{}, err
	}
	return s.openEntry(key, found.Value)
}

// openEntry is the entry that stands sealed under key.
func (s *shelf) openEntry(key, sealed []byte) (Entry, error) {
	leaf, err := s.sealer.Open(nil, sealed, key)
	if err != nil {
		return Entry{}, fmt.Errorf("%w: entry %d: %w", ErrTampered, indexIn(key), err)
	}
	e, err := decode(leaf)
	if err != nil {
		return Entry{}, fmt.Errorf("%w: entry %d: %w", ErrTampered, indexIn(key), err)
	}
	return e, nil
}

// storedTile reads the hashes of a tile; none where it does not stand there.
func (s *shelf) storedTile(ctx context.Context, level int, n int64) ([]tlog.Hash, error) {
	found, err := s.store.Get(ctx, s.tileKey(level, n))
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return splitHashes(found.Value), nil
}

// splitHashes is none for what is not made of hashes.
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
