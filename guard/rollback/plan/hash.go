package plan

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
)

// hashed is what a hash begins with. Its number changes with the encoding.
const hashed = "agent-guard rollback plan 1"

// Hash is what a plan is recognised by: two plans have the same one only if they say
// the same. It is the SHA-256 of an encoding that has one form for each plan. A text is
// its length in bytes, as 8 bytes with the highest first, and the bytes. A list is its
// length in the same form, and its members. The encoding is
//
//	text "agent-guard rollback plan 1"
//	text workflow, text target, text scope
//	list of levels, each a list of steps, each
//	    text checkpoint, text what, text then, list of texts actions
//	list of texts passed
//	list of texts along
//	list of texts dependants
//	list of texts missing
//	left, in the form of a length, unless it is 0
func (p *Plan) Hash() [sha256.Size]byte {
	e := encoder{sha256.New()}
	e.text(hashed)
	e.text(p.Workflow)
	e.text(p.Target)
	e.text(string(p.Scope))
	e.length(len(p.Levels))
	for _, level := range p.Levels {
		e.length(len(level))
		for _, s := range level {
			e.text(s.Checkpoint)
			e.text(string(s.What))
			e.text(string(s.Then))
			e.texts(s.Actions)
		}
	}
	e.texts(p.Passed)
	e.texts(p.Along)
	e.texts(p.Dependants)
	e.texts(p.Missing)
	if p.Left > 0 {
		e.length(p.Left)
	}
	return [sha256.Size]byte(e.Sum(nil))
}

type encoder struct{ hash.Hash }

func (e encoder) length(n int) {
	// A hash never fails to write.
	_, _ = e.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

func (e encoder) text(s string) {
	e.length(len(s))
	_, _ = e.Write([]byte(s))
}

func (e encoder) texts(all []string) {
	e.length(len(all))
	for _, s := range all {
		e.text(s)
	}
}
