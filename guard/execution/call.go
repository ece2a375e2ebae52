package execution

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
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
	// Sent is a hash of the upstream's own key and the bytes that it is sent with; zero
	// where that is of no use.
	Sent [32]byte
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

// MaxID is the greatest length of an execution id in bytes, after unquoting.
const MaxID = 255

// What can be wrong with an id. The texts go to callers as the detail of a 400
// problem: they say what is wrong and what would be right, and never repeat the
// value, which may be a secret (P8).
var (
	// ErrIDMissing: the request has no such field.
	ErrIDMissing = errors.New("the field with the execution id is missing; send it once, with one id")
	// ErrIDRepeated: the field came on more than one line.
	ErrIDRepeated = errors.New("the field with the execution id was sent more than once; send exactly one field line")
	// ErrIDList: an unquoted value holds a comma, so that it may be two values
	// which something on the way has joined.
	ErrIDList = errors.New("the execution id looks like a comma-separated list; send one id, or put it in double quotes if the comma belongs to it")
	// ErrIDEmpty: nothing is left after trimming and unquoting.
	ErrIDEmpty = errors.New("the execution id is empty; send 1 to 255 visible ASCII characters")
	// ErrIDTooLong: more than MaxID bytes.
	ErrIDTooLong = errors.New("the execution id is too long; at most 255 characters are allowed, quotes not counted")
	// ErrIDCharacter: a space, a control character or something outside ASCII.
	ErrIDCharacter = errors.New("the execution id holds a character that is not allowed; use visible ASCII characters only, without spaces")
	// ErrIDUnterminated: the closing double quote is missing.
	ErrIDUnterminated = errors.New("the quoted execution id does not end; close it with a double quote, or leave both quotes away")
	// ErrIDEscape: a backslash before something else than a quote or a backslash.
	ErrIDEscape = errors.New(`the quoted execution id has a bad escape; after a backslash only a double quote or a backslash may follow`)
	// ErrIDTrailing: parameters, a further list member or other text follows.
	ErrIDTrailing = errors.New("something follows the closing quote of the execution id; send the quoted id alone, without parameters or further values")
)

// ParseID gives the id that the field lines of one header carry. There must
// be exactly one line. A structured-field String (RFC 9651, section 3.3.3) and
// the raw form that most clients send name one and the same id; otherwise a
// client that changes its library between two attempts would run twice (P1).
// The error is one of this package's.
func ParseID(lines []string) (id string, err error) {
	switch len(lines) {
	case 0:
		return "", ErrIDMissing
	case 1:
	default:
		return "", ErrIDRepeated
	}
	v := strings.Trim(lines[0], " \t")
	if strings.HasPrefix(v, `"`) {
		id, err = unquote(v[1:])
		if err != nil {
			return "", err
		}
	} else {
		id = v
		if strings.IndexByte(id, ',') >= 0 {
			return "", ErrIDList
		}
	}
	if err := CheckID(id); err != nil {
		return "", err
	}
	return id, nil
}

// CheckID says whether id, already unquoted and from whatever source, is 1 to
// MaxID bytes of visible ASCII (0x21 to 0x7e). The error is one of this
// package's.
func CheckID(id string) error {
	if id == "" {
		return ErrIDEmpty
	}
	if len(id) > MaxID {
		return ErrIDTooLong
	}
	for i := range len(id) {
		if id[i] < 0x21 || id[i] > 0x7e {
			return ErrIDCharacter
		}
	}
	return nil
}

// unquote reads the rest of a structured-field String after its opening quote.
func unquote(v string) (string, error) {
	end := strings.IndexAny(v, `"\`)
	if end >= 0 && v[end] == '"' {
		if end != len(v)-1 {
			return "", ErrIDTrailing
		}
		return v[:end], nil
	}
	var b strings.Builder
	for i := 0; i < len(v); i++ {
		switch c := v[i]; c {
		case '"':
			if i != len(v)-1 {
				return "", ErrIDTrailing
			}
			return b.String(), nil
		case '\\':
			i++
			if i == len(v) {
				return "", ErrIDUnterminated
			}
			if v[i] != '"' && v[i] != '\\' {
				return "", ErrIDEscape
			}
			b.WriteByte(v[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", ErrIDUnterminated
}

// Verdict is what came of a forwarded call (P6).
type Verdict uint8

// The verdicts.
const (
	// Completed: it was executed, and its answer is the result.
	Completed Verdict = 1 + iota
	// Released: it was not executed; the key is free again.
	Released
	// InDoubt: it may have been executed, and nobody knows.
	InDoubt
)

// String is the word of the configuration and of logs.
func (v Verdict) String() string {
	switch v {
	case Completed:
		return "completed"
	case Released:
		return "released"
	case InDoubt:
		return "in_doubt"
	default:
		return "undecided"
	}
}

// ParseVerdict reads the words of Verdict.String.
func ParseVerdict(word string) (Verdict, error) {
	for _, v := range []Verdict{Completed, Released, InDoubt} {
		if v.String() == word {
			return v, nil
		}
	}
	return 0, fmt.Errorf("%q is no outcome; use completed, released or in_doubt", word)
}

// Preset is a reading of upstream statuses that other services have made known.
type Preset string

// The presets.
const (
	// PresetDefault: refusals are released, what may have happened is in doubt,
	// everything else is completed.
	PresetDefault Preset = "default"
	// PresetStripe: the upstream keeps keys itself and answers a repetition from its
	// record. What it keeps is replayed here too, 500 among it. What it does not keep
	// is released: refusals, 400 and 409. What may come from before it (408, 502, 503,
	// 504) is in doubt. Stripe-Should-Retry goes before the status.
	PresetStripe Preset = "stripe"
	// PresetACP: a 5xx is released and runs again, as the Agentic Commerce
	// Protocol asks. It gives P1 up for these answers, by choice.
	PresetACP Preset = "acp"
	// PresetStrict: every 5xx is in doubt.
	PresetStrict Preset = "strict"
)

// Presets lists the presets by name.
func Presets() []Preset {
	return []Preset{PresetDefault, PresetStripe, PresetACP, PresetStrict}
}

// Rules read the status of a whole answer. The zero value is PresetDefault.
type Rules struct {
	Preset Preset
	// Status overrides the preset for single statuses.
	Status map[int]Verdict
}

// Answer is what Rules read of an answer whose body came whole.
type Answer struct {
	// Status is the final status.
	Status int
	// RetryAfter says that it carries Retry-After: a 503 that does is a refusal.
	RetryAfter bool
	// ShouldRetry is the value of Stripe-Should-Retry.
	ShouldRetry string
}

// refused reports a refusal that comes before the call is looked at.
func (a Answer) refused() bool {
	switch a.Status {
	case 401, 403, 407, 421, 425, 429:
		return true
	case 503:
		return a.RetryAfter
	}
	return false
}

// unclear reports a status that may come from something before the upstream, or that
// leaves open what it has done.
func (a Answer) unclear() bool {
	switch a.Status {
	case 408, 499, 502, 503, 504:
		return true
	}
	return false
}

// Judge reads an answer.
func (r Rules) Judge(a Answer) Verdict {
	status := a.Status
	if v, ok := r.Status[status]; ok {
		return v
	}
	switch r.Preset {
	case PresetStrict:
		if status >= 500 {
			return InDoubt
		}
	case PresetACP:
		if status >= 500 {
			return Released
		}
	}
	switch {
	case a.refused():
		return Released
	case r.Preset == PresetStripe:
		return judgeStripe(a)
	case a.unclear():
		return InDoubt
	}
	return Completed
}

// judgeStripe reads an answer, no refusal, of an upstream that keeps keys itself.
func judgeStripe(a Answer) Verdict {
	advised := a.ShouldRetry == "true"
	switch {
	case a.Status < 400, a.ShouldRetry == "false": // a repetition gets the same
		return Completed
	case a.unclear(), advised && a.Status >= 500:
		return InDoubt // not released: only a record knows until when a repetition is safe
	case advised, a.Status == 400, a.Status == 409:
		return Released
	}
	return Completed
}

// Cause says why an execution is in doubt, or why it was released.
type Cause string

// The causes.
const (
	CauseStatus      Cause = "upstream_status"    // the action's rules read the answer so
	CauseNotSent     Cause = "not_sent"           // proven: no byte left
	CauseLost        Cause = "connection_lost"    // a byte was sent, no answer came
	CauseTruncated   Cause = "answer_truncated"   // the answer's body ended early
	CauseUnframed    Cause = "answer_unframed"    // the answer ended with its connection
	CauseDeadline    Cause = "deadline"           // the action's deadline passed
	CauseInterrupted Cause = "interrupted"        // the forwarding was cut off from inside
	CauseNoAnswer    Cause = "no_answer"          // what the upstream answered was not passed on
	CauseUnrecorded  Cause = "outcome_unrecorded" // the store did not take the outcome
	CauseDied        Cause = "gateway_died"       // its process ended before the outcome
)
