package ect_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// places are the figures' stand-ins, and what stands there in a complete token.
var places = map[string]string{
	"cb-open-uuid": id(1), "cb-close-uuid": id(2), "error-ect-uuid": id(3), "ckpt-uuid": id(4), "action-ect-uuid": id(5),
	"rb-start-uuid": id(6), "rb-complete-uuid": id(7), "error-uuid": id(8), "failed-action-ect-uuid": id(9),
	"rollback-request-uuid": id(10), "wf-start-ect-uuid": id(11),
	"sha256-of-agent-state-snapshot": stateHash, "sha256-of-restored-state": stateHash,
}

const stateHash = "LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564"

// figureOf reads a figure with its stand-ins replaced. The prefix of out_hash, which is
// against the draft of the tokens themselves, goes; that of the state hashes, which are
// plain strings, stays.
func figureOf(t *testing.T, text string) map[string]any {
	t.Helper()
	for from, to := range places {
		text = strings.ReplaceAll(text, `"`+from+`"`, `"`+to+`"`)
	}
	text = strings.ReplaceAll(text, `"out_hash": "sha256:..."`, `"out_hash": "`+stateHash+`"`)
	text = strings.ReplaceAll(text, `"sha256:..."`, `"sha256:`+stateHash+`"`)
	var m map[string]any
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func ext() *ect.ExtBuilder { return new(ect.ExtBuilder) }

// golden is one figure of a specification and the claims by which it is issued.
type golden struct {
	name, figure string
	vocabulary   ect.Vocabulary
	claims       ect.Claims
	event        ect.Event
}

var state = ect.Sum([]byte("foo"))

var agents = []ect.Outcome{
	{Agent: "spiffe://example.com/agent/monitor", Status: "completed"},
	{Agent: "spiffe://example.com/agent/classify", Status: "escalated"},
}

var goldens = []golden{
	{
		name: "cascade figure 4", event: ect.EventCircuitOpen,
		figure: `{"jti": "cb-open-uuid", "exec_act": "circuit_breaker_open", "par": ["error-ect-uuid"], "ext": {
			"cascade.downstream_agent": "spiffe://example.com/agent/router-mgr", "cascade.error_rate": 0.75,
			"cascade.window_s": 60, "cascade.cooldown_s": 30}}`,
		claims: ect.Claims{ID: id(1), Action: "circuit_breaker_open", Parents: []string{id(3)}, Ext: ext().
			Text(ect.MemberDownstreamAgent, "spiffe://example.com/agent/router-mgr").Number(ect.MemberErrorRate, 0.75).
			Int(ect.MemberWindow, 60).Int(ect.MemberCooldown, 30)},
	},
	{
		name: "cascade figure 5", event: ect.EventCircuitClose,
		figure: `{"jti": "cb-close-uuid", "exec_act": "circuit_breaker_close", "par": ["cb-open-uuid"], "ext": {
			"cascade.downstream_agent": "spiffe://example.com/agent/router-mgr", "cascade.total_cooldown_s": 30}}`,
		claims: ect.Claims{ID: id(2), Action: "circuit_breaker_close", Parents: []string{id(1)}, Ext: ext().
			Text(ect.MemberDownstreamAgent, "spiffe://example.com/agent/router-mgr").Int(ect.MemberTotalCooldown, 30)},
	},
	{
		name: "cascade figure 6", event: ect.EventCascadeDetected,
		figure: `{"exec_act": "cascade_detected", "ext": {"cascade.pattern": "depth_first", "cascade.affected_agents": 4,
			"cascade.root_cause_ect": "error-ect-uuid", "cascade.blast_radius": ["spiffe://example.com/agent/a",
			"spiffe://example.com/agent/b", "spiffe://example.com/agent/c"]}}`,
		claims: ect.Claims{Action: "cascade_detected", Ext: ext().
			Text("cascade.pattern", "depth_first").Int("cascade.affected_agents", 4).Text("cascade.root_cause_ect", id(3)).
			Texts("cascade.blast_radius", []string{"spiffe://example.com/agent/a", "spiffe://example.com/agent/b", "spiffe://example.com/agent/c"})},
	},
	{
		name: "cascade figure 8", event: ect.EventCheckpoint,
		figure: `{"jti": "ckpt-uuid", "exec_act": "checkpoint", "par": ["action-ect-uuid"], "out_hash": "sha256:...", "ext": {
			"cascade.reversible": true, "cascade.rollback_uri": "https://agent-b.example.com/.well-known/cascade/rollback",
			"cascade.target": "router-07.example.com", "cascade.description": "Update BGP peer configuration", "cascade.ttl": 86400}}`,
		claims: ect.Claims{ID: id(4), Action: "checkpoint", Parents: []string{id(5)}, Output: state, Ext: ext().
			Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://agent-b.example.com/.well-known/cascade/rollback").
			Text(ect.MemberTarget, "router-07.example.com").Text(ect.MemberDescription, "Update BGP peer configuration").Int(ect.MemberTTL, 86400)},
	},
	{
		name: "cascade figure 11", event: ect.EventRollbackStart,
		figure: `{"jti": "rb-start-uuid", "exec_act": "rollback_start", "par": ["error-ect-uuid"], "ext": {
			"cascade.rollback_id": "urn:uuid:...", "cascade.checkpoint_id": "ckpt-uuid", "cascade.scope": "sub_dag",
			"cascade.reason": "Upstream cascading failure"}}`,
		claims: ect.Claims{ID: id(6), Action: "rollback_start", Parents: []string{id(3)}, Ext: ext().
			Text(ect.MemberRollbackID, "urn:uuid:...").Text(ect.MemberCheckpointID, id(4)).Text(ect.MemberScope, "sub_dag").
			Text(ect.MemberReason, "Upstream cascading failure")},
	},
	{
		name: "cascade figure 12", event: ect.EventRollbackComplete,
		figure: `{"jti": "rb-complete-uuid", "exec_act": "rollback_complete", "par": ["rb-start-uuid"], "out_hash": "sha256:...", "ext": {
			"cascade.rollback_id": "urn:uuid:...", "cascade.status": "completed", "cascade.state_hash_before": "sha256:...",
			"cascade.state_hash_after": "sha256:...", "cascade.cascaded": [
			{"agent": "spiffe://example.com/agent/monitor", "status": "completed"},
			{"agent": "spiffe://example.com/agent/classify", "status": "escalated"}]}}`,
		claims: ect.Claims{ID: id(7), Action: "rollback_complete", Parents: []string{id(6)}, Output: state, Ext: ext().
			Text(ect.MemberRollbackID, "urn:uuid:...").Text(ect.MemberStatus, "completed").
			Text(ect.MemberStateBefore, state.Prefixed()).Text(ect.MemberStateAfter, state.Prefixed()).Outcomes(ect.MemberCascaded, agents)},
	},
	{
		name: "ATD workflow start", vocabulary: ect.ATD, event: ect.EventWorkflowStart,
		figure: `{"exec_act": "atd:workflow_start", "ext": {"atd.wf_id": "wf-uuid", "atd.description": "BGP failover workflow", "atd.node_count": 5}}`,
		claims: ect.Claims{Action: "workflow_start", Ext: ext().
			Text(ect.MemberWorkflowName, "wf-uuid").Text(ect.MemberDescription, "BGP failover workflow").Int("cascade.node_count", 5)},
	},
	{
		name: "ATD workflow complete", vocabulary: ect.ATD, event: ect.EventWorkflowComplete,
		figure: `{"exec_act": "atd:workflow_complete", "par": ["wf-start-ect-uuid"], "ext": {"atd.wf_id": "wf-uuid", "atd.terminal_status": "success", "atd.elapsed_s": 42}}`,
		claims: ect.Claims{Action: "workflow_complete", Parents: []string{id(11)}, Ext: ext().
			Text(ect.MemberWorkflowName, "wf-uuid").Text(ect.MemberTerminalStatus, "success").Int(ect.MemberElapsed, 42)},
	},
	{
		name: "ATD checkpoint", vocabulary: ect.ATD, event: ect.EventCheckpoint,
		figure: `{"jti": "ckpt-uuid", "exec_act": "atd:checkpoint", "par": ["action-ect-uuid"], "out_hash": "sha256-of-agent-state-snapshot", "ext": {
			"atd.reversible": true, "atd.rollback_uri": "https://agent-b.example.com/.well-known/atd/rollback",
			"atd.target": "router-07.example.com", "atd.description": "Update BGP peer config", "atd.ttl": 86400}}`,
		claims: ect.Claims{ID: id(4), Action: "checkpoint", Parents: []string{id(5)}, Output: state, Ext: ext().
			Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://agent-b.example.com/.well-known/atd/rollback").
			Text(ect.MemberTarget, "router-07.example.com").Text(ect.MemberDescription, "Update BGP peer config").Int(ect.MemberTTL, 86400)},
	},
	{
		name: "ATD error", vocabulary: ect.ATD, event: ect.EventError,
		figure: `{"jti": "error-uuid", "exec_act": "atd:error", "par": ["failed-action-ect-uuid"], "ext": {
			"atd.severity": "critical", "atd.error_type": "action_failed", "atd.description": "BGP session did not establish",
			"atd.checkpoint_id": "ckpt-uuid", "atd.upstream_errors": []}}`,
		claims: ect.Claims{ID: id(8), Action: "error", Parents: []string{id(9)}, Ext: ext().
			Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "action_failed").
			Text(ect.MemberDescription, "BGP session did not establish").Text(ect.MemberCheckpointID, id(4)).Texts(ect.MemberUpstreamErrors, nil)},
	},
	{
		name: "ATD circuit open", vocabulary: ect.ATD, event: ect.EventCircuitOpen,
		figure: `{"exec_act": "atd:circuit_open", "ext": {"atd.downstream_agent": "spiffe://example.com/agent/b", "atd.error_rate": 0.75, "atd.window_s": 60}}`,
		claims: ect.Claims{Action: "circuit_breaker_open", Ext: ext().
			Text(ect.MemberDownstreamAgent, "spiffe://example.com/agent/b").Number(ect.MemberErrorRate, 0.75).Int(ect.MemberWindow, 60)},
	},
	{
		name: "ATD circuit close", vocabulary: ect.ATD, event: ect.EventCircuitClose,
		figure: `{"exec_act": "atd:circuit_close", "ext": {"atd.downstream_agent": "spiffe://example.com/agent/b", "atd.cooldown_s": 30}}`,
		claims: ect.Claims{Action: "circuit_breaker_close", Ext: ext().
			Text(ect.MemberDownstreamAgent, "spiffe://example.com/agent/b").Int(ect.MemberTotalCooldown, 30)},
	},
	{
		name: "ATD rollback request", vocabulary: ect.ATD, event: ect.EventRollbackRequest,
		figure: `{"exec_act": "atd:rollback_request", "par": ["ckpt-uuid"], "ext": {"atd.reason": "Upstream action caused cascading failure", "atd.cascade": true}}`,
		claims: ect.Claims{Action: "rollback_request", Parents: []string{id(4)}, Ext: ext().
			Text(ect.MemberReason, "Upstream action caused cascading failure").Bool(ect.MemberCascade, true)},
	},
	{
		name: "ATD rollback result", vocabulary: ect.ATD, event: ect.EventRollbackComplete,
		figure: `{"exec_act": "atd:rollback_result", "par": ["rollback-request-uuid"], "out_hash": "sha256-of-restored-state", "ext": {
			"atd.status": "completed", "atd.checkpoint_id": "ckpt-uuid", "atd.cascaded": [
			{"agent": "spiffe://example.com/agent/c", "status": "completed"}, {"agent": "spiffe://example.com/agent/d", "status": "escalated"}]}}`,
		claims: ect.Claims{Action: "rollback_complete", Parents: []string{id(10)}, Output: state, Ext: ext().
			Text(ect.MemberStatus, "completed").Text(ect.MemberCheckpointID, id(4)).Outcomes(ect.MemberCascaded, []ect.Outcome{
			{Agent: "spiffe://example.com/agent/c", Status: "completed"}, {Agent: "spiffe://example.com/agent/d", Status: "escalated"},
		})},
	},
	{
		name: "AERR checkpoint", vocabulary: ect.AERR, event: ect.EventCheckpoint,
		figure: `{"exec_act": "aerr:checkpoint", "ext": {"aerr.action_type": "config_update", "aerr.target": "router-07.example.com",
			"aerr.reversible": true, "aerr.rollback_uri": "https://agent-b.example.com/aerr/rollback", "aerr.ttl": 86400}}`,
		claims: ect.Claims{Action: "checkpoint", Ext: ext().
			Text("cascade.action_type", "config_update").Text(ect.MemberTarget, "router-07.example.com").Bool(ect.MemberReversible, true).
			Text(ect.MemberRollbackURI, "https://agent-b.example.com/aerr/rollback").Int(ect.MemberTTL, 86400)},
	},
	{
		name: "AERR error", vocabulary: ect.AERR, event: ect.EventError,
		figure: `{"exec_act": "aerr:error", "ext": {"aerr.severity": "critical", "aerr.error_type": "action_failed",
			"aerr.description": "BGP session did not establish", "aerr.checkpoint_id": "550e8400-e29b-41d4-a716-446655440001", "aerr.upstream_errors": []}}`,
		claims: ect.Claims{Action: "error", Ext: ext().
			Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberDescription, "BGP session did not establish").
			Text(ect.MemberCheckpointID, "550e8400-e29b-41d4-a716-446655440001").Texts(ect.MemberUpstreamErrors, []string{})},
	},
	{
		name: "AERR rollback result", vocabulary: ect.AERR, event: ect.EventRollbackComplete,
		figure: `{"exec_act": "aerr:rollback_complete", "ext": {"aerr.rollback_id": "urn:uuid:...", "aerr.status": "completed",
			"aerr.state_hash_before": "sha256:...", "aerr.state_hash_after": "sha256:...", "aerr.cascaded": [
			{"agent": "spiffe://example.com/agent/monitor", "status": "completed"}, {"agent": "spiffe://example.com/agent/classify", "status": "escalated"}]}}`,
		claims: ect.Claims{Action: "rollback_complete", Ext: ext().
			Text(ect.MemberRollbackID, "urn:uuid:...").Text(ect.MemberStatus, "completed").
			Text(ect.MemberStateBefore, state.Prefixed()).Text(ect.MemberStateAfter, state.Prefixed()).Outcomes(ect.MemberCascaded, agents)},
	},
}

// TestGolden: what is issued in each vocabulary has every claim of the specification's
// figure, and no other but those that make a fragment a whole token; and both it and
// the figure are read with the same meaning.
func TestGolden(t *testing.T) {
	ring := must(ect.GenerateRing(ect.EdDSA))(t)
	issuer := must(ect.NewIssuer(clinical, ring))(t)
	owner := must(ect.ParseOwner(clinical))(t)
	v := verifier(t, ring.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	for _, g := range goldens {
		t.Run(g.name, func(t *testing.T) {
			want := figureOf(t, g.figure)
			claims := g.claims
			claims.Vocabulary, claims.Audience = g.vocabulary, []string{gateway}
			token := must(issuer.Issue(at, claims))(t)
			var got map[string]any
			if err := json.Unmarshal([]byte(token.Payload()), &got); err != nil {
				t.Fatal(err)
			}
			for name, value := range want {
				if !reflect.DeepEqual(got[name], value) {
					t.Errorf("%s is %v, want %v", name, got[name], value)
				}
			}
			for name, value := range map[string]any{"iss": clinical, "aud": gateway, "iat": float64(issued), "exp": float64(expires)} {
				if got[name] != value {
					t.Errorf("%s is %v, want %v", name, got[name], value)
				}
				delete(got, name)
			}
			for name := range got {
				if _, drawn := want[name]; !drawn && name != "jti" && name != "par" {
					t.Errorf("%s is not in the figure", name)
				}
			}
			read := must(v.Verify(t.Context(), token.Raw(), ect.Presentation{Now: at.Add(time.Second)}))(t)
			if read.Event() != g.event || read.Vocabulary() != g.vocabulary || len(read.Lacks()) > 0 {
				t.Errorf("read as %s in %v, lacking %v", read.Event(), read.Vocabulary(), read.Lacks())
			}
			for name, value := range want["ext"].(map[string]any) {
				raw, ok := read.Ext().Raw(ect.ParseMember(name, read.Event()))
				var back any
				if err := json.Unmarshal([]byte(raw), &back); !ok || err != nil || !reflect.DeepEqual(back, value) {
					t.Errorf("%s is read as %s", name, raw)
				}
			}
		})
	}
}

// TestGoldenClaims: header and claims of an issued token.
func TestGoldenClaims(t *testing.T) {
	ring := must(ect.GenerateRing(ect.ES256))(t)
	issuer := must(ect.NewIssuer(clinical, ring))(t)
	token, err := issuer.Issue(at, ect.Claims{
		Audience: []string{gateway, "urn:ledger"}, Action: "review_spec", Parents: []string{strings.ToUpper(id(10))}, Workflow: workflow,
		Ext: new(ect.ExtBuilder).Text("pol", "policy_v1").Text("pol_decision", "approved"), Input: ect.Sum([]byte("test")),
	})
	if err != nil {
		t.Fatal(err)
	}
	var header, claims map[string]any
	parts := strings.Split(token.Raw(), ".")
	if err := json.Unmarshal(b64Decode(t, parts[0]), &header); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b64Decode(t, parts[1]), &claims); err != nil {
		t.Fatal(err)
	}
	wantHeader := map[string]any{"alg": "ES256", "typ": "wimse-exec+jwt", "kid": ring.List()[0].ID}
	if !reflect.DeepEqual(header, wantHeader) {
		t.Errorf("header %v", header)
	}
	if len(b64Decode(t, parts[2])) != 64 {
		t.Errorf("signature of %d octets", len(b64Decode(t, parts[2])))
	}
	wantClaims := map[string]any{
		"iss": clinical, "aud": []any{gateway, "urn:ledger"}, "iat": float64(issued), "exp": float64(expires),
		"jti": token.ID(), "wid": workflow, "exec_act": "review_spec", "par": []any{id(10)},
		"inp_hash": "n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg",
		"ext":      map[string]any{"pol": "policy_v1", "pol_decision": "approved"},
	}
	if !reflect.DeepEqual(claims, wantClaims) {
		t.Errorf("claims %v", claims)
	}
}
