package caddymodule

import (
	"net/http"
	"reflect"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// An action's options go over its handler's, and those over the defaults.
func TestInherit(t *testing.T) {
	probe, other := new(Probe), new(Probe)
	rule := func(status int) OutcomeRule {
		return OutcomeRule{Outcome: "completed", Match: caddyhttp.ResponseMatcher{StatusCode: []int{status}}}
	}
	handler := Policy{
		Deadline: 1, RetainResult: 2, RetainKey: 3, MaxResult: 4, Preset: execution.PresetStripe, OnUnknown: onUnknownProbe, ResendFor: 8, Probe: probe,
		Keys: keysAdvisory, GRPC: grpcUnary, InDoubtAs: doubtToolResult, OnLeave: leaveCancel, Outcomes: []OutcomeRule{rule(404)},
		Terms: Terms{UndoAuth: "recorded", OnSnapshotError: "irreversible", OnLost: "escalate", OnChanged: "overwrite", CheckpointTTL: 6},
	}
	own := Policy{
		Deadline: 10, RetainResult: 20, RetainKey: 30, MaxResult: 40, Preset: execution.PresetACP, OnUnknown: onUnknownProbe, ResendFor: 80, Probe: other,
		Keys: keysTrusted, GRPC: "", Outcomes: []OutcomeRule{rule(409)},
		Terms: Terms{UndoAuth: "config", OnSnapshotError: "refuse", OnLost: "resend", OnChanged: "escalate", CheckpointTTL: 60},
	}
	both := own
	both.InDoubtAs, both.OnLeave = doubtToolResult, leaveCancel
	both.GRPC, both.Outcomes = grpcUnary, []OutcomeRule{rule(409), rule(404)} // the action's rules go first
	retry := handler
	retry.OnUnknown, retry.Probe = onUnknownRetry, nil // the handler's probe goes with its word
	for _, c := range []struct {
		name            string
		action, handler Policy
		want            Policy
	}{
		{"nothing said", Policy{}, Policy{}, Policy{
			Deadline: caddy.Duration(5 * time.Minute), RetainResult: caddy.Duration(24 * time.Hour), RetainKey: caddy.Duration(720 * time.Hour),
			MaxResult: 8 << 20, Preset: execution.PresetDefault, ResendFor: caddy.Duration(23 * time.Hour), Keys: keysTrusted, Terms: Defaults,
		}},
		{"the handler's", Policy{}, handler, handler},
		{"the action's", own, handler, both},
		{"another word for doubts", Policy{OnUnknown: onUnknownRetry}, handler, retry},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, got := c.handler, c.action
			h.inherit(&defaults)
			got.inherit(&h)
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
	if got := (Policy{}); !reflect.DeepEqual(defaults.Outcomes, got.Outcomes) || len(handler.Outcomes) != 1 {
		t.Error("inheriting has changed what was inherited from")
	}
}

// judged reads an answer as the calls of an action do that no rule matches.
func judged(a *Action, status int, header http.Header) execution.Verdict {
	if v, ruled := a.rule(status, header); ruled {
		return v
	}
	return a.Preset.Judge(execution.Answer{Status: status, RetryAfter: header.Get("Retry-After") != ""})
}

// provisioned is an action with this policy, on a handler that says nothing.
func provisioned(t *testing.T, p Policy) *Action {
	t.Helper()
	h := defaulted(t, Handler{})
	h.app = new(App)
	a := &Action{Name: "a", Policy: p}
	if err := h.provisionPolicy(a, nil); err != nil {
		t.Fatal(err)
	}
	return a
}

// "Outcome of a forwarded request": the rules go before the preset, the first that
// matches decides.
func TestOutcomeRules(t *testing.T) {
	match := func(status []int, header http.Header) caddyhttp.ResponseMatcher {
		return caddyhttp.ResponseMatcher{StatusCode: status, Headers: header}
	}
	a := provisioned(t, Policy{Outcomes: []OutcomeRule{
		{Outcome: "completed", Match: match([]int{502}, http.Header{"X-Executed": {"yes"}})},
		{Outcome: "released", Match: match([]int{502, 409}, nil)},
		{Outcome: "in_doubt", Match: match(nil, http.Header{"X-Maybe": {"*"}})},
		{Outcome: "in_doubt", Match: match([]int{4}, nil)},
	}})
	for _, c := range []struct {
		status int
		header http.Header
		want   execution.Verdict
	}{
		{502, http.Header{"X-Executed": {"yes"}}, execution.Completed},
		{502, http.Header{"X-Executed": {"no"}}, execution.Released},
		{502, nil, execution.Released},
		{409, http.Header{"X-Maybe": {"who knows"}}, execution.Released},
		{200, http.Header{"X-Maybe": {"who knows"}}, execution.InDoubt},
		{401, nil, execution.InDoubt},
		{200, nil, execution.Completed},
		{504, nil, execution.InDoubt},
		{503, http.Header{"Retry-After": {"1"}}, execution.Released},
		{503, nil, execution.InDoubt},
	} {
		if got := judged(a, c.status, c.header); got != c.want {
			t.Errorf("%d %v is %v, want %v", c.status, c.header, got, c.want)
		}
	}
}

func TestPresetsReachTheRules(t *testing.T) {
	for preset, want := range map[execution.Preset]execution.Verdict{
		"": execution.Completed, execution.PresetDefault: execution.Completed, execution.PresetStripe: execution.Completed,
		execution.PresetACP: execution.Released, execution.PresetStrict: execution.InDoubt,
	} {
		if got := judged(provisioned(t, Policy{Preset: preset}), 500, nil); got != want {
			t.Errorf("500 with preset %q is %v, want %v", preset, got, want)
		}
	}
}
