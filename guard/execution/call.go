package execution

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Key is the execution key: what one intended effect is recorded under.
type Key [32]byte

// String is a short form for logs; it reveals nothing about the caller or the id.
func (k Key) String() string { return hex.EncodeToString(k[:8]) }

// Hex is the whole key in hexadecimal, by which operators name an execution.
func (k Key) Hex() string { return hex.EncodeToString(k[:]) }

// CallerHash is the keyed hash of a caller's identity.
type CallerHash [16]byte

// Scope is what an execution key is derived from. Guard is the guard's configured name, not its
// place or address; actions are not part of it, so that adding, renaming or removing them frees
// no key. Tenant says for whom the call is: one caller may use an id once for each.
type Scope struct {
	Caller, Tenant, Guard, Method, Path, ID string
}

// Origin says where an execution id came from.
type Origin uint8

// The origins of an execution id.
const (
	OriginGiven   Origin = 1 + iota // the caller named the effect
	OriginMinted                    // the gateway made it up: retries cannot find it
	OriginDerived                   // hash of caller and request, valid for a window
)

// Call is one guarded call. Strings that are too long to record are shortened; only Key and
// Fingerprint decide.
type Call struct {
	Key         Key
	Fingerprint body.Fingerprint
	Scope       Scope
	// Naming says how its guard names callers and tenants; nil for a call of the gateway's own. With FreeKeys it may
	// differ from what other keys of the guard were made under.
	Naming   *Naming
	FreeKeys bool
	Origin   Origin
	// Host is recorded, not part of the key: a caller that looks an execution up must name it.
	Host     string
	Action   string
	Workflow string
	// Proven says that a token proves the workflow; see LimitWorkflows.
	Proven bool
	// Checkpoint is the id of the token that announces the call; it may be empty.
	Checkpoint string
	// Sent is a hash of the upstream's own key and the bytes sent with it; zero where it is not
	// used.
	Sent [32]byte
	// Deadline is the longest that the execution may take.
	Deadline time.Duration
	// KeepResult and KeepKey are how long after settling the result is replayed and the key stays
	// taken. Records in doubt ignore both.
	KeepResult, KeepKey time.Duration
	// ResultCap is the largest answer body that is kept, in bytes. Of a larger answer only the
	// key is kept.
	ResultCap int64
	// Quota is what the caller may hold at a time.
	Quota Quota
	// Attempt is the call that may be a retry by evidence; nil for one whose key is its caller's word.
	Attempt *Attempt
}

// Key derives the execution key of s.
func (g *Guard) Key(s Scope) Key {
	return store.Index(g.sealer, "execution", s.Caller, s.Tenant, s.Guard, s.Method, s.Path, s.ID)
}

// Caller derives the keyed hash of a caller's identity.
func (g *Guard) Caller(identity string) CallerHash {
	sum := store.Index(g.sealer, "caller", identity)
	return CallerHash(sum[:])
}

// Keyed is Caller in hexadecimal.
func (g *Guard) Keyed(identity string) string {
	hash := g.Caller(identity)
	return hex.EncodeToString(hash[:])
}

// Derive makes an execution id from a call's content, for callers that send none: the intent
// nonce of the Execution Guard pattern. Equal calls get the same id.
func (g *Guard) Derive(s Scope, fp body.Fingerprint) string {
	sum := store.Index(g.sealer, "derived", s.Caller, s.Tenant, s.Guard, s.Method, s.Path, string(fp[:]))
	return "derived-" + hex.EncodeToString(sum[:16])
}

// MaxID is the greatest length of an execution id in bytes, after unquoting.
const MaxID = 255

// Errors of ids. Their texts are the detail of a 400 problem: they say what is wrong and what
// would be right, and never repeat the value, which may be a secret (P8).
var (
	errIDMissing  = errors.New("the field with the execution id is missing; send it once, with one id")
	errIDRepeated = errors.New("the field with the execution id was sent more than once; send exactly one field line")
	// errIDList: an unquoted value contains a comma; an intermediary may have joined two values.
	errIDList = errors.New("the execution id looks like a comma-separated list; " +
		"send one id, or put it in double quotes if the comma belongs to it")
	errIDEmpty     = errors.New("the execution id is empty; send 1 to 255 visible ASCII characters")
	errIDTooLong   = errors.New("the execution id is too long; at most 255 characters are allowed, quotes not counted")
	errIDCharacter = errors.New("the execution id holds a character that is not allowed; " +
		"use visible ASCII characters only, without spaces")
	errIDUnterminated = errors.New("the quoted execution id does not end; " +
		"close it with a double quote, or leave both quotes away")
	errIDEscape = errors.New("the quoted execution id has a bad escape; " +
		"after a backslash only a double quote or a backslash may follow")
	errIDTrailing = errors.New("something follows the closing quote of the execution id; " +
		"send the quoted id alone, without parameters or further values")
)

// ParseID returns the id in the field lines of one header, of which there must be exactly one. A
// structured-field String (RFC 9651, section 3.3.3) and the raw form name the same id; otherwise
// a client that changes its library between two attempts would run twice (P1). The error is one
// of this package's.
func ParseID(lines []string) (id string, err error) {
	switch len(lines) {
	case 0:
		return "", errIDMissing
	case 1:
	default:
		return "", errIDRepeated
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
			return "", errIDList
		}
	}
	if err := CheckID(id); err != nil {
		return "", err
	}
	return id, nil
}

// CheckID checks that an unquoted id is 1 to MaxID bytes of visible ASCII (0x21 to 0x7e). The
// error is one of this package's.
func CheckID(id string) error {
	if id == "" {
		return errIDEmpty
	}
	if len(id) > MaxID {
		return errIDTooLong
	}
	for i := range len(id) {
		if id[i] < 0x21 || id[i] > 0x7e {
			return errIDCharacter
		}
	}
	return nil
}

// unquote reads the rest of a structured-field String after its opening quote.
func unquote(v string) (string, error) {
	end := strings.IndexAny(v, `"\`)
	if end >= 0 && v[end] == '"' {
		if end != len(v)-1 {
			return "", errIDTrailing
		}
		return v[:end], nil
	}
	var b strings.Builder
	for i := 0; i < len(v); i++ {
		switch c := v[i]; c {
		case '"':
			if i != len(v)-1 {
				return "", errIDTrailing
			}
			return b.String(), nil
		case '\\':
			i++
			if i == len(v) {
				return "", errIDUnterminated
			}
			if v[i] != '"' && v[i] != '\\' {
				return "", errIDEscape
			}
			b.WriteByte(v[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", errIDUnterminated
}

// Verdict is the outcome of a forwarded call (P6).
type Verdict uint8

// The verdicts.
const (
	// Completed: it was executed, and its answer is the result.
	Completed Verdict = 1 + iota
	// Released: it was not executed; the key is free again.
	Released
	// InDoubt: it may have been executed.
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
	}
	return "undecided"
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

// Preset is a way to read upstream statuses.
type Preset string

// The presets.
const (
	// PresetDefault: refusals are released, unclear outcomes are in doubt, everything else is
	// completed.
	PresetDefault Preset = "default"
	// PresetStripe: the upstream keeps keys and replays its own answers. They are replayed here
	// too, also a 500. Answers that it does not keep are released: refusals, 400 and 409.
	// Statuses that a proxy may have sent (408, 502, 503, 504) are in doubt. Stripe-Should-Retry
	// overrides the status.
	PresetStripe Preset = "stripe"
	// PresetACP: a 5xx is released and runs again, as the Agentic Commerce Protocol asks. This
	// gives up P1 for these answers.
	PresetACP Preset = "acp"
	// PresetStrict: every 5xx is in doubt.
	PresetStrict Preset = "strict"
)

// Presets lists the presets by name.
func Presets() []Preset {
	return []Preset{PresetDefault, PresetStripe, PresetACP, PresetStrict}
}

// Answer is an answer whose body came whole, as a Preset reads it.
type Answer struct {
	// Status is the final status.
	Status int
	// RetryAfter: it has Retry-After, which makes a 503 a refusal.
	RetryAfter bool
	// ShouldRetry is the value of Stripe-Should-Retry.
	ShouldRetry string
}

// refused reports a refusal before the call was processed.
func (a Answer) refused() bool {
	switch a.Status {
	case 401, 403, 407, 421, 425, 429, 529:
		return true
	case 503:
		return a.RetryAfter
	}
	return false
}

// unclear reports a status that something before the upstream may have sent, or that leaves open
// what the upstream did.
func (a Answer) unclear() bool {
	switch a.Status {
	case 408, 499, 502, 503, 504:
		return true
	}
	return false
}

// Judge reads an answer. The empty Preset is PresetDefault.
func (p Preset) Judge(a Answer) Verdict {
	switch {
	case p == PresetStrict && a.Status >= 500:
		return InDoubt
	case p == PresetACP && a.Status >= 500, a.refused():
		return Released
	case p == PresetStripe:
		return judgeStripe(a)
	case a.unclear():
		return InDoubt
	}
	return Completed
}

// judgeStripe judges an answer, not a refusal, of an upstream that keeps keys.
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
	CauseStatus      Cause = "upstream_status"     // the action's rules read the answer so
	CauseInBand      Cause = "in_band_error"       // a message reports a failure of its server, like a 500
	CauseTool        Cause = "tool_error"          // a message reports that its tool or method has failed
	CauseNotSent     Cause = "not_sent"            // proven: no byte left
	CauseLost        Cause = "connection_lost"     // a byte was sent, no answer came
	CauseTruncated   Cause = "answer_truncated"    // the answer's body ended early
	CauseNoResponse  Cause = "no_response"         // the answer to a message ended whole, without a response
	CauseElsewhere   Cause = "continues_elsewhere" // the answer's stream ended before its answer, and may be resumed
	CauseUnframed    Cause = "answer_unframed"     // the answer ended with its connection
	CauseDeadline    Cause = "deadline"            // the action's deadline passed
	CauseLeft        Cause = "client_left"         // nobody waited, and the action has it cancelled then
	CauseInterrupted Cause = "interrupted"         // the forwarding was cut off from inside
	CauseNoAnswer    Cause = "no_answer"           // what the upstream answered was not passed on
	CauseUnrecorded  Cause = "outcome_unrecorded"  // the store did not take the outcome
	CauseDied        Cause = "gateway_died"        // its process ended before the outcome
)
