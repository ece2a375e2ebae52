package ect_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestCascadeTable1: the seven values of the draft are events, and are what is written.
func TestCascadeTable1(t *testing.T) {
	for _, name := range []string{
		"circuit_breaker_open", "circuit_breaker_close", "checkpoint", "rollback_start", "rollback_complete",
		"compensate", "cascade_detected",
	} {
		event, ok := ect.ParseEvent(name)
		if !ok || string(event) != name || ect.Cascade.Event(event) != name {
			t.Errorf("%s is %q, %v", name, event, ok)
		}
	}
}

// table2 are the claims of Table 2 of the cascade draft; TestTable2Kinds has their types.
var table2 = []string{
	"cascade.downstream_agent", "cascade.error_rate", "cascade.window_s", "cascade.cooldown_s", "cascade.reversible",
	"cascade.rollback_uri", "cascade.target", "cascade.ttl", "cascade.rollback_id", "cascade.checkpoint_id",
	"cascade.scope", "cascade.status", "cascade.reason", "cascade.pattern", "cascade.affected_agents",
	"cascade.blast_radius", "cascade.cascaded", "cascade.failed_agents", "cascade.state_hash_before",
	"cascade.state_hash_after", "cascade.description",
}

// TestCascadeTable2: every claim of the table has one meaning in every vocabulary that
// names it, and stands for itself in cascade's.
func TestCascadeTable2(t *testing.T) {
	for _, name := range table2 {
		m := ect.Member(name)
		if ect.ParseMember(name, "") != m || ect.Cascade.Member(m) != name {
			t.Errorf("%s is %s", name, ect.ParseMember(name, ""))
		}
		for _, v := range []ect.Vocabulary{ect.ATD, ect.AERR} {
			written := v.Member(m)
			if ect.ParseMember(written, "") != m {
				t.Errorf("%s is written %s in %v and read as %s", name, written, v, ect.ParseMember(written, ""))
			}
			if _, bare, _ := strings.Cut(name, "."); written != name && written != v.String()+"."+bare {
				t.Errorf("%s is written %s in %v", name, written, v)
			}
		}
	}
}

// TestATDActions: the table of ATD, with its required fields: a token that has them
// lacks nothing, and one without any lacks each.
func TestATDActions(t *testing.T) {
	values := map[string]any{
		"atd.reversible": true, "atd.rollback_uri": "https://b.example.com", "atd.ttl": 86400, "atd.severity": "critical",
		"atd.error_type": "timeout", "atd.checkpoint_id": taskID, "atd.downstream_agent": clinical, "atd.error_rate": 0.75,
		"atd.window_s": 60, "atd.cooldown_s": 30, "atd.reason": "r", "atd.cascade": true, "atd.status": "completed",
		"atd.cascaded": []any{}, "atd.wf_id": "wf", "atd.description": "d", "atd.terminal_status": "success",
	}
	for _, row := range []struct {
		name     string
		event    ect.Event
		required []string
	}{
		{"atd:checkpoint", ect.EventCheckpoint, []string{"atd.reversible", "atd.rollback_uri", "atd.ttl"}},
		{"atd:error", ect.EventError, []string{"atd.severity", "atd.error_type", "atd.checkpoint_id"}},
		{"atd:circuit_open", ect.EventCircuitOpen, []string{"atd.downstream_agent", "atd.error_rate", "atd.window_s"}},
		{"atd:circuit_close", ect.EventCircuitClose, []string{"atd.downstream_agent", "atd.cooldown_s"}},
		{"atd:rollback_request", ect.EventRollbackRequest, []string{"atd.reason", "atd.cascade"}},
		{"atd:rollback_result", ect.EventRollbackComplete, []string{"atd.status", "atd.checkpoint_id", "atd.cascaded"}},
		{"atd:workflow_start", ect.EventWorkflowStart, []string{"atd.wf_id", "atd.description"}},
		{"atd:workflow_complete", ect.EventWorkflowComplete, []string{"atd.wf_id", "atd.terminal_status"}},
	} {
		event, ok := ect.ParseEvent(row.name)
		if !ok || event != row.event || ect.ATD.Event(event) != row.name {
			t.Errorf("%s is %s and written %s", row.name, event, ect.ATD.Event(event))
		}
		verify := judge(t, nil)
		ext := map[string]any{}
		for _, name := range row.required {
			ext[name] = values[name]
		}
		full := must(verify(with(map[string]any{"exec_act": row.name, "ext": ext})))(t)
		if lacks := full.Lacks(); len(lacks) > 0 {
			t.Errorf("%s lacks %v", row.name, lacks)
		}
		empty := must(verify(with(map[string]any{"exec_act": row.name, "ext": map[string]any{}})))(t)
		var names []string
		for _, m := range empty.Lacks() {
			names = append(names, ect.ATD.Member(m))
		}
		for _, name := range names {
			if !slices.Contains(row.required, name) {
				t.Errorf("%s asks for %s", row.name, name)
			}
		}
		// The result may say less than ATD's table wants: AERR and cascade do.
		if row.event != ect.EventRollbackComplete && len(names) != len(row.required) {
			t.Errorf("%s without anything lacks only %v", row.name, names)
		}
	}
}

// TestAERRRegistrations: the values that AERR registers, the half-open one, and the one
// that it uses without registering.
func TestAERRRegistrations(t *testing.T) {
	for name, want := range map[string]ect.Event{
		"aerr:checkpoint": ect.EventCheckpoint, "aerr:error": ect.EventError,
		"aerr:rollback_request": ect.EventRollbackRequest, "aerr:rollback_complete": ect.EventRollbackComplete,
		"aerr:circuit_open": ect.EventCircuitOpen, "aerr:circuit_half_open": ect.EventCircuitHalfOpen,
		"aerr:circuit_closed": ect.EventCircuitClose,
	} {
		event, ok := ect.ParseEvent(name)
		if !ok || event != want || ect.AERR.Event(event) != name {
			t.Errorf("%s is %s and written %s", name, event, ect.AERR.Event(event))
		}
	}
	if event, _ := ect.ParseEvent("aerr:rollback_escalated"); event != ect.EventRollbackComplete {
		t.Errorf("escalated is %s", event)
	}
	issuer := issuerOf(t, edRing(t))
	for _, c := range []struct {
		vocabulary   ect.Vocabulary
		action, want string
	}{
		{ect.AERR, "aerr:rollback_escalated", "aerr:rollback_escalated"},
		{ect.AERR, "rollback_complete", "aerr:rollback_complete"},
		{ect.AERR, "error", "aerr:error"},
		{ect.ATD, "aerr:rollback_escalated", "atd:rollback_result"},
		{ect.Cascade, "aerr:rollback_escalated", "rollback_complete"},
	} {
		d, err := issuer.Draft(at, ect.Claims{Audience: []string{gateway}, Action: c.action, Vocabulary: c.vocabulary})
		if err != nil || d.Action() != c.want {
			t.Errorf("%s in %s is written %s, %v", c.action, c.vocabulary, d.Action(), err)
		}
	}
	// ATD has no name for it, and cascade's is ours.
	for _, v := range []ect.Vocabulary{ect.Cascade, ect.ATD} {
		if got := v.Event(ect.EventCircuitHalfOpen); got != "circuit_breaker_half_open" {
			t.Errorf("half-open is %q in %s", got, v)
		}
	}
}

// TestUnknownNames stand for themselves, also those that resemble known ones.
func TestUnknownNames(t *testing.T) {
	for _, name := range []string{"", "atd:", "atd:compensate", "aerr:compensate", "Checkpoint", "checkpoint ", "recommend_treatment"} {
		if event, ok := ect.ParseEvent(name); ok {
			t.Errorf("%q is %s", name, event)
		}
	}
	for _, v := range []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR} {
		if v.Event("mine") != "mine" || v.Member("com.example.x") != "com.example.x" {
			t.Errorf("%v renames what it does not know", v)
		}
		if v.Event(ect.EventCompensate) != "compensate" {
			t.Errorf("%v has a name for compensate", v)
		}
	}
}

// TestCooldown: ATD's cooldown of a closing breaker is the whole time, of an opening
// one the next time; cascade has a name for each.
func TestCooldown(t *testing.T) {
	if m := ect.ParseMember("atd.cooldown_s", ect.EventCircuitClose); m != ect.MemberTotalCooldown {
		t.Errorf("closing: %s", m)
	}
	if m := ect.ParseMember("atd.cooldown_s", ect.EventCircuitOpen); m != ect.MemberCooldown {
		t.Errorf("opening: %s", m)
	}
	verify := judge(t, nil)
	token := must(verify(with(map[string]any{"exec_act": "atd:circuit_close", "ext": map[string]any{"atd.downstream_agent": clinical, "atd.cooldown_s": 30}})))(t)
	if n, ok := token.Ext().Int(ect.MemberTotalCooldown); !ok || n != 30 {
		t.Errorf("got %d, %v", n, ok)
	}
}

// A member is found by each of its names, and by no other.
func TestMemberByItsNames(t *testing.T) {
	verify := judge(t, nil)
	names := []string{"cascade.total_cooldown_s", "com.example.x", "atd.node", "cascade.node", "agent_guard.x"}
	for _, name := range table2 {
		for _, v := range []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR} {
			if as := v.Member(ect.Member(name)); !slices.Contains(names, as) {
				names = append(names, as)
			}
		}
	}
	for _, action := range []string{"circuit_breaker_open", "circuit_breaker_close", "act"} {
		event, _ := ect.ParseEvent(action)
		for _, written := range names {
			ext := must(verify(with(map[string]any{"exec_act": action, "ext": map[string]any{"com.example.first": 1, written: 2}})))(t).Ext()
			for _, asked := range names {
				want := ect.ParseMember(written, event) == ect.ParseMember(asked, event)
				if value, found := ext.Raw(ect.Member(asked)); found != want || found && value != "2" {
					t.Errorf("%s in %s, asked for as %s: %s %v, want %v", written, action, asked, value, found, want)
				}
			}
		}
	}
}

// TestTwoNamesOneMember: a member under the names of two vocabularies has one value.
func TestTwoNamesOneMember(t *testing.T) {
	verify := judge(t, nil)
	for _, c := range []struct {
		ext  map[string]any
		want ect.Code
	}{
		{map[string]any{"cascade.reversible": true, "atd.reversible": true, "aerr.reversible": true}, ""},
		{map[string]any{"cascade.reversible": true, "atd.reversible": false}, ect.CodeExt},
		{map[string]any{"aerr.checkpoint_id": "a", "atd.checkpoint_id": "b"}, ect.CodeExt},
		{map[string]any{"cascade.cooldown_s": 30, "cascade.total_cooldown_s": 90, "atd.cooldown_s": 90}, ""},
	} {
		_, err := verify(with(map[string]any{"exec_act": "circuit_breaker_close", "ext": c.ext}))
		wantCode(t, err, c.want)
	}
}
