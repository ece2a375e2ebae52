package guard

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// What would break a promise is refused before the first call.
func TestNewRefuses(t *testing.T) {
	open := func() (*Engine, func(), error) { panic("nobody calls") }
	for want, c := range map[string]Config{
		"Open is missing":                     {},
		"there is no Host":                    {Open: open, Settings: Settings{Caller: "{user}"}},
		"X-A is written with and without -":   {Open: open, Settings: Settings{Credentials: []string{"X-A", "-X-A"}}},
		"-X-Api-Kay: the field counts":        {Open: open, Settings: Settings{Credentials: []string{"-X-Api-Kay"}}},
		"credentials: cookies change":         {Open: open, Settings: Settings{Credentials: []string{"cookie"}}},
		"tenant: -X-Shop":                     {Open: open, Settings: Settings{Tenant: []string{"-X-Shop"}}},
		"all calls would be one":              {Open: open, Settings: Settings{ExecutionID: []IDSource{{Placeholder: "{id}"}}}},
		"nothing verifies tokens":             {Open: open, Settings: Settings{RequireECT: true}},
		"source 1":                            {Open: open, Settings: Settings{ExecutionID: []IDSource{{JSON: "no pointer"}}}},
		"must match everything":               {Open: open, Actions: []*Action{{Name: "a", Match: paths("/")}}},
		"action a: retain_key":                {Open: open, Actions: []*Action{{Name: "a", Policy: Policy{RetainKey: 1}}}},
		"action a: on_unknown: probe":         {Open: open, Actions: []*Action{{Name: "a", Policy: Policy{OnUnknown: OnUnknownProbe}}}},
		"action a: on_unknown: resend":        {Open: open, Actions: []*Action{{Name: "a", Policy: Policy{OnUnknown: OnUnknownResend}}}},
		"action a: on_unknown: \"blok\" is":   {Open: open, Actions: []*Action{{Name: "a", Policy: Policy{OnUnknown: "blok"}}}},
		"preset: \"stripes\" is unknown; use": {Open: open, Policy: Policy{Preset: "stripes"}},
		"keys: \"advise\" is unknown; use tr": {Open: open, Policy: Policy{Keys: "advise"}},
		"grpc: \"Unary\" is unknown; use una": {Open: open, Policy: Policy{GRPC: "Unary"}},
		"in_doubt_as: \"result\" is unknown":  {Open: open, Policy: Policy{InDoubtAs: "result"}},
		"on_leave: \"stop\" is unknown":       {Open: open, Policy: Policy{OnLeave: "stop"}},
		"order: \"ect\" is unknown":           {Open: open, Policy: Policy{Order: "ect"}},
		"undo_auth: \"own\" is unknown":       {Open: open, Policy: Policy{Terms: Terms{UndoAuth: "own"}}},
		"on_snapshot_error: \"run\" is unkno": {Open: open, Policy: Policy{Terms: Terms{OnSnapshotError: "run"}}},
		"on_lost: \"retry\" is unknown":       {Open: open, Policy: Policy{Terms: Terms{OnLost: "retry"}}},
		"on_changed: \"resend\" is unknown":   {Open: open, Policy: Policy{Terms: Terms{OnChanged: "resend"}}},
		"action a: on_error: \"undo\" is unk": {Open: open, Actions: []*Action{{Name: "a", OnError: "undo"}}},
		"action a: severity: \"fatal\" is un": {Open: open, Actions: []*Action{{Name: "a", Severity: "fatal"}}},
		"action a: an Undo that rest":         {Open: open, Actions: []*Action{{Name: "a", Undo: &UndoPlan{Restore: true}}}},
	} {
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want ...%s...", err, want)
		}
	}
}

// P1, P3: however credentials are spelled, they are the same fields. An action may stand in several configurations.
func TestNewCompletes(t *testing.T) {
	a := &Action{Name: "a", Policy: Policy{OnUnknown: OnUnknownResend, Preset: execution.PresetStripe}}
	one := newHandler(t, Config{Settings: Settings{Credentials: []string{"X-Customer", "authorization", "-x-auth-token"}}, Actions: []*Action{a}})
	two := newHandler(t, Config{Settings: Settings{Credentials: []string{"-X-Auth-Token", "x-customer"}}, Actions: []*Action{a}})
	if want := (execution.Naming{Credentials: "-X-Auth-Token X-Customer"}); one.naming != want || two.naming != want {
		t.Errorf("%q and %q", one.naming, two.naming)
	}
	if got := newHandler(t, Config{Settings: Settings{Credentials: []string{}}}).naming; got != (execution.Naming{}) {
		t.Errorf("%q", got)
	}
	if a.Counts != nil || one.Actions[0].Counts == two.Actions[0].Counts || one.Actions[0].ResendFor <= 0 {
		t.Error("the configuration was changed, or not completed")
	}
}

// What the plan of an undo leaves out is as the terms of its action say. An action's plan may stand in several.
func TestTermsOfUndo(t *testing.T) {
	undo := &UndoPlan{Spec: rollback.Spec{Guard: "g"}, Restore: true}
	terms := Terms{UndoAuth: rollback.AuthRecorded, OnLost: rollback.UndoEscalate, OnChanged: rollback.Overwrite}
	send := func(context.Context, *InternalRequest) (*InternalAnswer, error) { panic("nobody calls") }
	h := newHandler(t, Config{Send: send, Policy: Policy{Terms: terms}, Actions: []*Action{{Name: "a", Undo: undo}}})
	d := h.Actions[0].Undo.Decide(http.MethodPut, &template.Source{}, true)
	got, err := rollback.ParseSpec(d.Undo)
	if err != nil || got.Auth != terms.UndoAuth || got.OnLost != terms.OnLost || got.OnChanged != terms.OnChanged {
		t.Errorf("%+v, %v", got, err)
	}
	if undo.OnChanged != "" || undo.Spec.OnLost != "" {
		t.Error("the configuration was changed")
	}
}

// An error of the handlers' own is no answer of the upstream.
func TestServeHTTPAnswersErrors(t *testing.T) {
	fails := func(*http.Request) (bool, error) { return false, http.ErrNotSupported }
	h := newHandler(t, Config{Host: plainHost{}, Exempt: fails, Next: http.NotFoundHandler()})
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", nil))
	if w.Code != http.StatusInternalServerError {
		t.Errorf("%d", w.Code)
	}
}
