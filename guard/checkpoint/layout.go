package checkpoint

import (
	"encoding/binary"
	"time"
)

// spaceCheckpoint begins the store's keys of checkpoints. Hashes are keyed, and nothing
// of a caller is readable in them:
//
//	k b name                  the snapshot, or where its pieces are; sealed
//	k a name                  the result, the same
//	k c name                  recorded credentials, sealed
//	k u name                  how far the undo has come, sealed
//	k p name part salt piece  bulk: a piece of a large snapshot or result, sealed
//	k w workflow name         index: an account of a workflow's standing checkpoint
//	k o caller name           index: the same of a caller's
//	k n w|o hash              says that the index may hold something under the hash
const spaceCheckpoint = 'k'

// The kinds of keys, behind spaceCheckpoint.
const (
	kindSnapshot   = 'b'
	kindResult     = 'a'
	kindCredential = 'c'
	kindMark       = 'u'
	kindPiece      = 'p'
	kindWorkflow   = 'w'
	kindCaller     = 'o'
	kindNote       = 'n'
)

// name is the keyed hash of a checkpoint's id.
type name [32]byte

func (v *Vault) name(id string) name { return v.sealer.Index("checkpoint", id) }

func keyOf(kind byte, n name) []byte {
	return append(append(make([]byte, 0, 2+len(n)), spaceCheckpoint, kind), n[:]...)
}

// saltInKey is how much of a record's random bytes is in the keys of its pieces, so
// that those of two results of one checkpoint are apart.
const saltInKey = 8

func pieceKey(n name, part byte, salt []byte, piece int) []byte {
	b := append(make([]byte, 0, 2+len(n)+1+saltInKey+4), spaceCheckpoint, kindPiece)
	b = append(append(b, n[:]...), part)
	b = append(b, salt[:saltInKey]...)
	return binary.BigEndian.AppendUint32(b, uint32(piece))
}

// scope is a workflow or a caller, as quotas count by them.
type scope struct {
	kind byte
	hash [16]byte
}

func (s scope) prefix() []byte {
	return append(append(make([]byte, 0, 2+len(s.hash)+len(name{})), spaceCheckpoint, s.kind), s.hash[:]...)
}

func (s scope) account(n name) []byte { return append(s.prefix(), n[:]...) }

func (s scope) note() []byte {
	return append(append(make([]byte, 0, 3+len(s.hash)), spaceCheckpoint, kindNote, s.kind), s.hash[:]...)
}

// grace is how long a snapshot stays beyond its ttl: as long as a rollback may take
// that began in time, so that it can be taken up again after a crash (cascade 6.3:
// expired checkpoints are purged, but never under a running rollback).
func grace(ttl time.Duration) time.Duration { return ttl / 2 }
