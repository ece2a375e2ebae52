package guard

import "fmt"

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
	// PresetStripe: every answer is replayed, 5xx too, but for refusals that come
	// before the call is looked at (401, 403, 407, 421, 425, 429, 503 with
	// Retry-After).
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

// Judge reads the final status of an answer whose body came whole. retryAfter says
// whether the answer carries Retry-After: a 503 that does is a refusal.
func (r Rules) Judge(status int, retryAfter bool) Verdict {
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
	switch status {
	case 401, 403, 407, 421, 425, 429:
		return Released
	case 503:
		if retryAfter {
			return Released
		}
	}
	if r.Preset == PresetStripe {
		return Completed
	}
	switch status {
	case 408, 499, 502, 503, 504:
		return InDoubt
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
