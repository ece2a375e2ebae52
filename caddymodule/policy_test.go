package caddymodule

import (
	"encoding/json"
	"net/http"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// An action's options go over its guard's, and those over the defaults.
func TestInherit(t *testing.T) {
	probe, other := new(Probe), new(Probe)
	rule := func(status int) OutcomeRule {
		return OutcomeRule{Outcome: "completed", Match: caddyhttp.ResponseMatcher{StatusCode: []int{status}}}
	}
	handler := guard.Policy{
		Deadline: 1, RetainResult: 2, RetainKey: 3, MaxResult: 4, Preset: execution.PresetStripe, OnUnknown: guard.OnUnknownProbe, ResendFor: 8,
		Keys: guard.KeysAdvisory, GRPC: guard.GRPCUnary, InDoubtAs: guard.InDoubtToolResult, OnLeave: guard.OnLeaveCancel,
		Terms: guard.Terms{UndoAuth: "recorded", OnSnapshotError: "irreversible", OnLost: "escalate", OnChanged: "overwrite", CheckpointTTL: 6},
	}
	own := guard.Policy{
		Deadline: 10, RetainResult: 20, RetainKey: 30, MaxResult: 40, Preset: execution.PresetACP, OnUnknown: guard.OnUnknownProbe, ResendFor: 80,
		Keys: "trusted", GRPC: "",
		Terms: guard.Terms{UndoAuth: "config", OnSnapshotError: "refuse", OnLost: "resend", OnChanged: "escalate", CheckpointTTL: 60},
	}
	both := own
	both.InDoubtAs, both.OnLeave, both.GRPC = guard.InDoubtToolResult, guard.OnLeaveCancel, guard.GRPCUnary
	retry := handler
	retry.OnUnknown = guard.OnUnknownRetry
	of := func(p guard.Policy, a Answers) Action { return Action{Action: guard.Action{Policy: p}, Answers: a} }
	handlers, owns := Answers{[]OutcomeRule{rule(404)}, probe}, Answers{[]OutcomeRule{rule(409)}, other}
	for _, c := range []struct {
		name            string
		action, handler Action
		want            Action
	}{
		{"nothing said", Action{}, Action{}, of(guard.Policy{
			Deadline: jsontime.Duration(5 * time.Minute), RetainResult: jsontime.Duration(24 * time.Hour), RetainKey: jsontime.Duration(720 * time.Hour),
			MaxResult: 8 << 20, Preset: execution.PresetDefault, OnUnknown: guard.OnUnknownBlock, ResendFor: jsontime.Duration(23 * time.Hour), Keys: "trusted",
			Terms: guard.Terms{
				UndoAuth: "config", OnSnapshotError: "refuse", OnLost: "resend", OnChanged: "escalate", CheckpointTTL: jsontime.Duration(24 * time.Hour),
			},
		}, Answers{})},
		{"the handler's", Action{}, of(handler, handlers), of(handler, handlers)},
		{
			"the action's", of(own, owns), of(handler, handlers),
			of(both, Answers{[]OutcomeRule{rule(409), rule(404)}, other}), // the action's rules go first
		},
		{
			"another word for doubts", of(guard.Policy{OnUnknown: guard.OnUnknownRetry}, Answers{}), of(handler, handlers),
			of(retry, Answers{handlers.Outcomes, nil}), // the handler's probe goes with its word
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.handler.Inherit(nil)
			c.action.policy().inherit(c.handler.policy())
			if !reflect.DeepEqual(c.action, c.want) {
				t.Errorf("got  %+v\nwant %+v", c.action, c.want)
			}
		})
	}
	if !reflect.DeepEqual(handlers, Answers{[]OutcomeRule{rule(404)}, probe}) {
		t.Error("inheriting has changed what was inherited from")
	}
}

// JSON has durations as Caddy's own.
func TestDurations(t *testing.T) {
	for _, text := range []string{
		`1`, `1.5`, `-1`, `null`, `"1"`, `""`, `"d"`, `"30s"`, `"7d"`, `"1d12h"`, `"1h1d"`, `"-1d"`, `"+1.5d"`, `"1.d"`, `".5d2d"`, `"1-2d"`, `"1e3d"`, `"1days"`, `"1000000d"`, `{}`,
	} {
		var got jsontime.Duration
		var want caddy.Duration
		gotErr, wantErr := json.Unmarshal([]byte(text), &got), json.Unmarshal([]byte(text), &want)
		if time.Duration(got) != time.Duration(want) || (gotErr == nil) != (wantErr == nil) {
			t.Errorf("%s: %v, %v; Caddy reads %v, %v", text, got, gotErr, want, wantErr)
		}
		if asJSON, _ := json.Marshal(got); wantErr == nil && string(asJSON) != strconv.FormatInt(int64(want), 10) {
			t.Errorf("%s: %s", text, asJSON)
		}
	}
}

// judged reads an answer as the calls of an action do that no rule matches.
func judged(a *Action, status int, header http.Header) execution.Verdict {
	if v, ruled := a.rule(status, header); ruled {
		return v
	}
	return a.Preset.Judge(execution.Answer{Status: status, RetryAfter: header.Get("Retry-After") != ""})
}

// provisioned provisions an action of a handler that says nothing.
func provisioned(t *testing.T, a *Action) *Action {
	t.Helper()
	h := defaulted(t, Handler{})
	h.app = new(App)
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
	a := provisioned(t, &Action{Answers: Answers{Outcomes: []OutcomeRule{
		{Outcome: "completed", Match: match([]int{502}, http.Header{"X-Executed": {"yes"}})},
		{Outcome: "released", Match: match([]int{502, 409}, nil)},
		{Outcome: "in_doubt", Match: match(nil, http.Header{"X-Maybe": {"*"}})},
		{Outcome: "in_doubt", Match: match([]int{4}, nil)},
	}}})
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
		if got := judged(provisioned(t, &Action{Action: guard.Action{Policy: guard.Policy{Preset: preset}}}), 500, nil); got != want {
			t.Errorf("500 with preset %q is %v, want %v", preset, got, want)
		}
	}
}
