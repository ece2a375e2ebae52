package hitl_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

const atdRule = `{
"id": "r-critical-error",
"trigger": {
"kind": "keyword_match",
"op": "eq",
"value": "critical",
"input_ref": "atd.severity"
},
"required_role": "operator:oncall",
"action": "escalate",
"allow_override": true,
"override_action": "continue"
}`

// The figures of ATD and AERR are read as they are printed, and mean the same.
func TestRulesOfTheDrafts(t *testing.T) {
	for name, text := range map[string]string{
		"the list":      "[" + atdRule + "]",
		"wrapped":       `{"hitl": {"rules": [` + atdRule + `]}}`,
		"AERR's figure": `{"hitl": {"rules": [` + strings.Replace(atdRule, "atd.severity", "ext.aerr.severity", 1) + `]}}`,
	} {
		set, err := hitl.ParseRules([]byte(text))
		rules := set.Rules()
		if err != nil || len(rules) != 1 {
			t.Fatalf("%s: %v", name, err)
		}
		r := rules[0]
		if !r.Matches(map[string]string{"severity": "critical"}) || r.Matches(map[string]string{"severity": "warning"}) {
			t.Errorf("%s matches something else", name)
		}
		if o := r.Opening(); o.Level != hitl.Approval || o.Role != "operator:oncall" || o.Final || !strings.Contains(o.Summary, "r-critical-error") {
			t.Errorf("%s: %+v", name, o)
		}
	}
}

// What is not understood matches, and is denied.
func TestRulesFailClosed(t *testing.T) {
	warning := map[string]string{"severity": "warning", "error_type": "timeout"}
	for change, matches := range map[string]bool{
		`keyword_match>regex_match`:       true,
		`"eq">"like"`:                     true,
		`atd.severity>atd.mood`:           true,
		`"eq">"ne"`:                       true,
		`"critical">"warning"`:            true,
		`atd.severity>cascade.error_type`: false,
		`"escalate">"escalate"`:           false,
	} {
		from, to, _ := strings.Cut(change, ">")
		set, err := hitl.ParseRules([]byte("[" + strings.Replace(atdRule, from, to, 1) + "]"))
		rules := set.Rules()
		if err != nil {
			t.Fatal(err)
		}
		if rules[0].Matches(warning) != matches {
			t.Errorf("%s: it matches: %t", change, !matches)
		}
	}
	for change, want := range map[string]struct {
		level hitl.Level
		final bool
	}{
		`"escalate">"pause"`:     {hitl.Pause, false},
		`"escalate">"stop"`:      {hitl.Stop, false},
		`"escalate">"celebrate"`: {hitl.Stop, false},
		`"escalate">""`:          {hitl.Stop, false},
		`true>false`:             {hitl.Approval, true},
		`"continue">"retry"`:     {hitl.Approval, true},
	} {
		from, to, _ := strings.Cut(change, ">")
		set, err := hitl.ParseRules([]byte("[" + strings.Replace(atdRule, from, to, 1) + "]"))
		rules := set.Rules()
		if err != nil {
			t.Fatal(err)
		}
		if o := rules[0].Opening(); o.Level != want.level || o.Final != want.final {
			t.Errorf("%s: %+v", change, o)
		}
	}
}

func TestRulesAreChecked(t *testing.T) {
	for text, want := range map[string]string{
		``: "line 1: EOF",
		"{\n\"hitl\": {\n\"rules\": [\n{\"id\": 7}]}}": "line 4: ",
		"[\n" + atdRule + "\n] x":                      "something stands behind the rules",
		`{"rules": []}`:                                `there is no "hitl"`,
		`[]`:                                           "there are 0 rules",
		"[{}]":                                         "rule 1: id",
		"[" + atdRule + "," + atdRule + "]":            `"r-critical-error" is another one's`,
		`[{"id": "a", "unreachable_human": "continue"}]`:                     `rule "a": unreachable_human: "continue" is not known; use deny, abort, pause, or escalate with a role: nobody's silence approves`,
		`[{"id": "a", "unreachable_human": "escalate"}]`:                     "escalate needs the role",
		`[{"id": "a", "unreachable_human": "deny", "next_role": "x"}]`:       "a role is asked next by escalate only",
		`[{"id": "a", "timeout_s": -1}]`:                                     "timeout_s",
		`{"hitl": {"rules": [{"id": "a"}], "unreachable_human": "approve"}}`: "nobody's silence approves",
	} {
		if _, err := hitl.ParseRules([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want ...%s", text, err, want)
		}
	}
}

// A rule says what happens where nobody decides, or the policy does for it.
func TestRulesOfUnreachablePeople(t *testing.T) {
	const text = `{"hitl": {"rules": [
		{"id": "of its own", "unreachable_human": "escalate", "next_role": "lead", "timeout_s": 60},
		{"id": "without"}, {"id": "another time", "unreachable_human": "deny"}], "unreachable_human": "pause", "timeout_s": 0.5}}`
	set, err := hitl.ParseRules([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	pause := hitl.Unreachable{Do: hitl.UnreachablePause, Within: time.Second / 2}
	if set.Unreachable == nil || *set.Unreachable != pause {
		t.Errorf("%+v", set.Unreachable)
	}
	for i, want := range []hitl.Opening{
		{Within: time.Minute, Unreachable: hitl.Unreachable{Do: hitl.UnreachableEscalate, NextRole: "lead", Within: time.Minute}},
		{Within: time.Second / 2, Unreachable: pause},
		{Within: 24 * time.Hour, Unreachable: hitl.Unreachable{Do: hitl.UnreachableDeny}},
	} {
		if o := set.Rules()[i].Opening(); o.Within != want.Within || o.Unreachable != want.Unreachable {
			t.Errorf("%q: %s, %+v", set.Rules()[i].ID, o.Within, o.Unreachable)
		}
	}
	set, err = hitl.ParseRules([]byte("[" + atdRule + "]"))
	if o := set.Rules()[0].Opening(); err != nil || set.Unreachable != nil || o.Within != 0 || o.Unreachable != (hitl.Unreachable{}) {
		t.Errorf("a rule that says nothing: %+v, %v", o, err)
	}
}

// No approval counts where a rule allows none, over restarts.
func TestFinalCannotBeApproved(t *testing.T) {
	p := newPlace()
	o := held("k", "w")
	o.Final = true
	e := open(t, p.escalations(), o)
	d := p.escalations()
	if got, err := d.Decide(t.Context(), e.ID, hitl.Vote{By: "user:ann", Every: true, Approve: true}); !errors.Is(err, hitl.ErrFinal) || got.Status != hitl.Pending {
		t.Errorf("%v, %v", got.Status, err)
	}
	if got, err := d.Decide(t.Context(), e.ID, hitl.Vote{By: "user:ann", Every: true, Reason: "no"}); err != nil || got.Status != hitl.Denied || !got.Held {
		t.Errorf("%v, %v", got.Status, err)
	}
	if _, err := d.AskAgain(t.Context(), e.ID, "user:bob", 0); !errors.Is(err, hitl.ErrFinal) {
		t.Error(err)
	}
}

func FuzzParseRules(f *testing.F) {
	f.Add([]byte("[" + atdRule + "]"))
	f.Add([]byte(`{"hitl": {"rules": [{"id": "a"}]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		set, err := hitl.ParseRules(text)
		rules := set.Rules()
		if err != nil {
			return
		}
		for i := range rules {
			rules[i].Matches(map[string]string{"severity": "critical"})
			if o := rules[i].Opening(); o.Level < hitl.Pause || o.Level > hitl.Stop {
				t.Fatal(o)
			}
		}
	})
}
