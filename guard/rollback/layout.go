package rollback

import (
	"encoding/binary"
	"time"
)

// The store's keys of rollbacks. Nothing of a caller is readable in them: hashes are
// keyed, and only times are plain.
//
//	u h name             the head: what was asked, and what came of it; sealed
//	u p name piece       a piece of the plan, sealed
//	u s name step        what came of a step, sealed; none stands of one that was not begun
//	u t token            the rollback that a token asked for, sealed
//	u a asked name       index: all by age
//	u o name             index: those that are not finished, or whose records have no expiry yet
//	u w workflow name    index: those of a workflow that are not finished
//	u x name             index: those that have stopped their workflow
//	u v workflow         changes whenever a rollback of the workflow is accepted
const (
	space        = 'u'
	kindHead     = 'h'
	kindPlan     = 'p'
	kindStep     = 's'
	kindToken    = 't'
	kindAge      = 'a'
	kindOpen     = 'o'
	kindWorkflow = 'w'
	kindStop     = 'x'
	kindFence    = 'v'
)

// name is the keyed hash of a rollback's id.
type name [32]byte

func (c *Coordinator) name(id string) name { return c.o.Sealer.Index("rollback", id) }

func keyOf(kind byte, n name) []byte {
	return append(append(make([]byte, 0, 2+len(n)+4), space, kind), n[:]...)
}

func partKey(kind byte, n name, i int) []byte {
	return binary.BigEndian.AppendUint32(keyOf(kind, n), uint32(i))
}

func ageKey(asked time.Time, n name) []byte {
	b := append(make([]byte, 0, 2+8+len(n)), space, kindAge)
	b = binary.BigEndian.AppendUint64(b, uint64(asked.UnixNano()))
	return append(b, n[:]...)
}

// placeSize is the end of an age key that says where in the listing it is.
const placeSize = 8 + len(name{})

func (c *Coordinator) tokenKey(jti string) []byte {
	return keyOf(kindToken, c.o.Sealer.Index("rollback token", jti))
}

func (c *Coordinator) workflowPrefix(workflow string) []byte {
	hash := c.o.Sealer.Index("rollback workflow", workflow)
	return append(append(make([]byte, 0, 2+16+len(name{})), space, kindWorkflow), hash[:16]...)
}

func (c *Coordinator) workflowKey(workflow string, n name) []byte {
	return append(c.workflowPrefix(workflow), n[:]...)
}

func (c *Coordinator) fenceKey(workflow string) []byte {
	hash := c.o.Sealer.Index("rollback workflow", workflow)
	return append(append(make([]byte, 0, 2+16), space, kindFence), hash[:16]...)
}

// nameIn is the name at the end of an index entry's key.
func nameIn(key []byte) name { return name(key[len(key)-len(name{}):]) }

// indexIn is the number at the end of a part's key.
func indexIn(key []byte) int { return int(binary.BigEndian.Uint32(key[len(key)-4:])) }
