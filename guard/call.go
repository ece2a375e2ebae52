package guard

import (
	"encoding/hex"
	"time"
)

// Key is the execution key: what one intended effect is recorded under.
type Key [32]byte

// String is a short form for logs; it tells nothing of the caller or the id.
func (k Key) String() string { return hex.EncodeToString(k[:8]) }

// Hex is the whole key in hexadecimal, as operators name an execution.
func (k Key) Hex() string { return hex.EncodeToString(k[:]) }

// Fingerprint is the hash of what a call asks for. The same key with another
// fingerprint is another request under a used id, and refused.
type Fingerprint [32]byte

// CallerHash is the keyed hash of a caller's identity.
type CallerHash [16]byte

// Scope is what an execution key is made of. Guard is the guard's configured name,
// never its place or address; actions are recorded, not keyed, so that adding,
// renaming or removing them frees no key.
type Scope struct {
	Caller, Guard, Method, Path, ID string
}

// Origin says where an execution id came from.
type Origin uint8

// The origins of an execution id.
const (
	OriginGiven   Origin = 1 + iota // the caller named the effect
	OriginMinted                    // the gateway made it up: retries cannot find it
	OriginDerived                   // hash of caller and request, valid for a window
)

// Call is one guarded call. Strings that are too long to record are shortened;
// only Key and Fingerprint decide.
type Call struct {
	Key         Key
	Fingerprint Fingerprint
	Scope       Scope
	Origin      Origin
	// Host is recorded, not keyed: who looks an execution up must name it.
	Host     string
	Action   string
	Workflow string
	// Checkpoint is the id of the token that announces the call; it may be empty.
	Checkpoint string
	// Deadline is the longest that the execution may take.
	Deadline time.Duration
	// KeepResult and KeepKey are how long after its settling the result can be
	// replayed and the key stays taken. In-doubt records ignore both.
	KeepResult, KeepKey time.Duration
	// ResultCap is the largest answer body that is kept, in bytes. A larger one
	// flows on, its key stays taken and its result is unavailable.
	ResultCap int64
	// Quota is what the call's caller may hold at a time.
	Quota Quota
}

// Key derives the execution key of s.
func (g *Guard) Key(s Scope) Key {
	return g.sealer.Index("execution", s.Caller, s.Guard, s.Method, s.Path, s.ID)
}

// Caller derives the keyed hash of a caller's identity.
func (g *Guard) Caller(identity string) CallerHash {
	sum := g.sealer.Index("caller", identity)
	return CallerHash(sum[:])
}

// Derive makes an execution id of what a call is, for callers that send none: the
// intent nonce of the Execution Guard pattern. Two equal calls get the same id.
func (g *Guard) Derive(s Scope, fp Fingerprint) string {
	sum := g.sealer.Index("derived", s.Caller, s.Guard, s.Method, s.Path, string(fp[:]))
	return "derived-" + hex.EncodeToString(sum[:16])
}

// Inherit makes the execution id of a nested call of what it is and of the
// execution that it names as its parent, so that a retried parent's nested calls
// land on the same executions.
func (g *Guard) Inherit(s Scope, parent, action string, fp Fingerprint) string {
	sum := g.sealer.Index("inherited", s.Caller, s.Guard, s.Method, s.Path, parent, action, string(fp[:]))
	return "inherited-" + hex.EncodeToString(sum[:16])
}
