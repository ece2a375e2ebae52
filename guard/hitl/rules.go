package hitl

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// rule is a deployment's rule for errors, in the form of ATD ("HITL Escalation on Error") and AERR.
type rule struct {
	ID      string  `json:"id"`
	Trigger trigger `json:"trigger"`
	// RequiredRole is that of who may decide; empty is DefaultRole.
	RequiredRole string `json:"required_role"`
	// Action is escalate (level 2), pause (1) or stop (3). Anything else stops: what is not
	// understood is denied.
	Action string `json:"action"`
	// AllowOverride says that an approval counts, and OverrideAction what it does: continue, or
	// empty for the same. Anything else is not understood, and no approval counts.
	AllowOverride  bool   `json:"allow_override"`
	OverrideAction string `json:"override_action"` // see AllowOverride
	unreachable
}

// unreachable are the members of a rule, or of all rules that have none, that say what happens where
// nobody decides.
type unreachable struct {
	Unreachable
	// TimeoutS is the time to decide, in seconds. Where there is Unreachable alone it is 24 h; without both there
	// is none.
	TimeoutS float64 `json:"timeout_s"`
}

// read is what they say; nil if they say nothing.
func (u *unreachable) read() (*Unreachable, error) {
	if *u == (unreachable{}) {
		return nil, nil
	}
	if !(u.TimeoutS >= 0 && u.TimeoutS <= maxTimeout.Seconds()) {
		return nil, fmt.Errorf("timeout_s: it is %v; use seconds, up to a year", u.TimeoutS)
	}
	read := u.Unreachable
	read.Within = time.Duration(u.TimeoutS * float64(time.Second))
	if err := read.Check(); err != nil {
		return nil, fmt.Errorf("unreachable_human: %w", err)
	}
	return &read, nil
}

const maxTimeout = 365 * 24 * time.Hour

// RuleSet is a deployment's policy.
type RuleSet struct {
	rules []rule
	// Unreachable is for rules that do not say what happens where nobody decides, and for calls that
	// cannot be undone; nil is nothing.
	Unreachable *Unreachable
}

// trigger says which errors a rule is for.
type trigger struct {
	// Kind is keyword_match, Op eq or ne. A trigger that is not understood matches.
	Kind string `json:"kind"`
	Op   string `json:"op"` // see Kind
	// Value is compared with what InputRef names: severity, error_type or description, with or
	// without ext. and atd., aerr. or cascade. before it.
	Value    string `json:"value"`
	InputRef string `json:"input_ref"` // see Value
}

// maxRules bounds the rules of a deployment.
const maxRules = 256

// ParseRules reads rules: {"hitl": {"rules": [...]}}, or the list alone. An error names the line.
// Beside rules, unreachable_human may stand, with next_role and timeout_s.
func ParseRules(text []byte) (RuleSet, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	var rules []rule
	var all unreachable
	var err error
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("[")) {
		err = d.Decode(&rules)
	} else {
		var wrapped struct {
			HITL *struct {
				Rules []rule `json:"rules"`
				unreachable
			} `json:"hitl"`
		}
		if err = d.Decode(&wrapped); err == nil && wrapped.HITL == nil {
			err = errors.New(`there is no "hitl"; write {"hitl": {"rules": [...]}} or the list alone`)
		} else if err == nil {
			rules, all = wrapped.HITL.Rules, wrapped.HITL.unreachable
		}
	}
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something stands behind the rules")
		}
	}
	if err != nil {
		at := d.InputOffset()
		if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
			at = syntax.Offset
		}
		if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
			at = wrong.Offset
		}
		return RuleSet{}, fmt.Errorf("line %d: %w", 1+bytes.Count(text[:min(max(at, 0), int64(len(text)))], []byte("\n")), err)
	}
	if len(rules) == 0 || len(rules) > maxRules {
		return RuleSet{}, fmt.Errorf("there are %d rules; write 1 to %d", len(rules), maxRules)
	}
	set := RuleSet{rules: rules}
	if set.Unreachable, err = all.read(); err != nil {
		return RuleSet{}, err
	}
	for i := range rules {
		r := &rules[i]
		if r.unreachable == (unreachable{}) {
			r.unreachable = all
		}
		_, err := r.unreachable.read()
		switch {
		case r.ID == "" || len(r.ID) > maxRole:
			return RuleSet{}, fmt.Errorf("rule %d: id: give it one of up to %d bytes", i+1, maxRole)
		case slices.ContainsFunc(rules[:i], func(other rule) bool { return other.ID == r.ID }):
			return RuleSet{}, fmt.Errorf("rule %d: id: %q is another one's", i+1, r.ID)
		case len(r.RequiredRole) > maxRole:
			return RuleSet{}, fmt.Errorf("rule %q: required_role: it has more than %d bytes", r.ID, maxRole)
		case err != nil:
			return RuleSet{}, fmt.Errorf("rule %q: %w", r.ID, err)
		}
	}
	return set, nil
}

// matches reports whether the rule is for an error with these members, by their names without a
// vocabulary. What is not understood matches.
func (r *rule) matches(members map[string]string) bool {
	ref := strings.TrimPrefix(r.Trigger.InputRef, "ext.")
	if _, name, ok := strings.Cut(ref, "."); ok {
		ref = name
	}
	value, known := members[ref]
	if r.Trigger.Kind != "keyword_match" || !known {
		return true
	}
	switch r.Trigger.Op {
	case "eq":
		return value == r.Trigger.Value
	case "ne":
		return value != r.Trigger.Value
	}
	return true
}

// Opening is the escalation that the first rule for an error with these members opens; their names have no vocabulary.
// It lacks its workflow and links, and its key does not name the error. It is false without such a rule.
func (s *RuleSet) Opening(members map[string]string) (Opening, bool) {
	i := slices.IndexFunc(s.rules, func(r rule) bool { return r.matches(members) })
	if i < 0 {
		return Opening{}, false
	}
	return s.rules[i].opening(), true
}

// opening is the escalation that the rule opens.
func (r *rule) opening() Opening {
	o := Opening{
		Key: "rule " + r.ID, Level: Stop, Cause: CauseError, Role: r.RequiredRole,
		Final: !r.AllowOverride || r.OverrideAction != "" && r.OverrideAction != "continue",
	}
	if u, err := r.unreachable.read(); err == nil && u != nil {
		o.Unreachable, o.Within = *u, cmp.Or(u.Within, defaultWithin)
	}
	switch r.Action {
	case "escalate":
		o.Level = Approval
	case "pause":
		o.Level = Pause
	}
	o.Summary = fmt.Sprintf("An agent reports an error that fits the rule %q (%s).", r.ID, cmp.Or(r.Action, "no action"))
	return o
}
