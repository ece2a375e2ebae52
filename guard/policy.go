package guard

import (
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Action is a named kind of guarded calls with its own rules.
type Action struct {
	// The name, as it is recorded. It is not part of the execution key: actions can be added,
	// renamed and removed without freeing one.
	Name string `json:"name,omitempty"`

	// The tools whose calls belong to this action, if `match` takes them too; of messages that call
	// no tool, the methods. Not with `protocol none`. Default: all.
	Tools []string `json:"tools,omitempty"`

	// Values that the arguments of the tool must have, by JSON pointers; of messages that call no
	// tool, the parameters. A value is a string, or a number as it is written. Not with `protocol none`.
	// Default: none.
	Arguments map[string]string `json:"arguments,omitempty"`

	// What the calls do, in a sentence for people. It stands in their checkpoints
	// (`cascade.description`), so it must not contain secrets. Default: the action's name.
	Description string `json:"description,omitempty"`

	// What becomes of a call that has failed: completed with a 5xx or -32603, with any error status
	// if the upstream's own error came along, or named by the error of an agent whom it concerns.
	// `rollback` undoes it, and what followed from it, in the gateway's name; `escalate` undoes
	// nothing by itself, and asks people, once for a workflow until they have decided. Calls in doubt
	// are never undone by themselves. `rollback` needs a way to undo the calls. Default: `escalate`.
	OnError string `json:"on_error,omitempty"`

	// A rollback does not leave these calls out: where one of them cannot be undone, nothing is, unless
	// a person approves that. Recorded with the call when it is sent. Needs `identity`. Default: false.
	Critical bool `json:"critical,omitempty"`

	// How severe it is if these calls go wrong, as their checkpoints state it: `info`, `warning`,
	// `error` or `critical`. Calls of severity `critical` are critical as with that option, and a
	// person is asked before a rollback that goes on to one of them undoes it; the other words only
	// inform. Recorded with the call when it is sent. Needs `identity`. Default: none.
	Severity string `json:"severity,omitempty"`

	Policy

	// Match selects its calls, beside Tools and Arguments, which need a Protocol. Nil: all.
	Match Match `json:"-"`
	// Default marks the action of calls that no other action matches.
	Default bool `json:"-"`
	// Probe asks the upstream about a call in doubt, for OnUnknownProbe.
	Probe *Probe `json:"-"`
	// Rule judges an answer before the Preset; nil, or false, leaves it to that.
	Rule func(status int, header http.Header) (execution.Verdict, bool) `json:"-"`
	// Irreversible declares the calls irreversible. Undo says how to undo them; nil if that is
	// impossible.
	Irreversible bool      `json:"-"`
	Undo         *UndoPlan `json:"-"`
	// Counts counts the calls of the action. Default: its own.
	Counts *ActionCounts `json:"-"`

	arguments []argument // Arguments
}

// argument is a value that calls of an action have.
type argument struct {
	at    jsonx.Pointer
	value string
}

// Policy says how the outcome of guarded calls is read, and how long they are kept. A handler has
// one for all its calls, an action one for its own; what an action leaves out it takes from its
// handler.
type Policy struct {
	// The longest that a forwarded call may take, including its whole answer. After that the call
	// is in doubt. Default: 5m.
	Deadline jsontime.Duration `json:"deadline,omitempty"`

	// For endless answers: the longest pause in an answer whose length is not announced. It
	// replaces the deadline once the header is there. Default: none; the deadline counts to the
	// end.
	StreamIdle jsontime.Duration `json:"stream_idle,omitempty"`

	// How long the answer of a completed call can be replayed. Default: 24h.
	RetainResult jsontime.Duration `json:"retain_result,omitempty"`

	// How long the key of a completed call stays taken, at least as long as its result is kept;
	// after that the same call runs again. Calls in doubt never expire. Default: 720h (30 days).
	RetainKey jsontime.Duration `json:"retain_key,omitempty"`

	// The largest answer body that is kept for replays, in bytes. A larger one still reaches its
	// caller; its key stays taken, and retries get `result-unavailable`. Default: 8 MiB.
	MaxResult int64 `json:"max_result,omitempty"`

	// How the upstream's status is read: `default`; `stripe` (the upstream keeps keys itself: 400
	// and 409 are released, and a call in doubt is sent again under its key, see `on_unknown`);
	// `acp` (a 5xx is released, and a retry runs the call again); or `strict` (every 5xx is in
	// doubt). Default: `default`.
	Preset execution.Preset `json:"preset,omitempty"`

	// What a retry of a call in doubt does: `block` refuses it (409), `probe` asks the status URL
	// in `probe`, `resend` sends it again with the same Idempotency-Key and the same bytes as long
	// as the upstream keeps that key, `retry` runs it again at the risk of a second effect.
	// Default: `block`; with the preset `stripe`: `resend`.
	OnUnknown OnUnknown `json:"on_unknown,omitempty"`

	// How long after the first attempt `resend` sends a call again; afterwards it is blocked. It
	// must be shorter than the time for which the upstream keeps keys. Default: 23h.
	ResendFor jsontime.Duration `json:"resend_for,omitempty"`

	// What a key says. With `trusted` calls with different keys are different calls. With `advisory` a
	// call with a new key is a retry of an equal one where there is the evidence that `missing_id
	// recognize` asks for, and its key names that execution from then on. Default: `trusted`.
	Keys string `json:"keys,omitempty"`

	// The system that the calls change, as their checkpoints name it (`cascade.target`);
	// placeholders are filled. It stands in signed tokens that others read, so it must not contain
	// secrets. Default: the guard's name.
	Target string `json:"target,omitempty"`

	// `unary` guards calls of the content type application/grpc*, which otherwise pass unguarded,
	// and reads grpc-status instead of the HTTP status: 16, 7 and 8 are released; 14, 4, 2, 13 and
	// none are in doubt; others are completed. Default: unset.
	GRPC string `json:"grpc,omitempty"`

	// How the guard answers a `tools/call` of MCP in doubt: `problem` is a JSON-RPC error;
	// `tool_result` is a result with `isError` that tells the model what is not known, and that it
	// must not simply repeat the call. Where `on_unknown` runs a retry again it stays an error. It
	// needs `protocol mcp` or `auto`. Default: `problem`.
	InDoubtAs string `json:"in_doubt_as,omitempty"`

	// What happens when the last client that waits for the answer of a running call has left, by its
	// connection or by `notifications/cancelled` of MCP: `continue` leaves the call alone, so that a
	// retry gets its answer; `cancel` cancels the request to the upstream. The call is in doubt then:
	// that it was cancelled says nothing about its effect. Default: `continue`.
	OnLeave string `json:"on_leave,omitempty"`

	// The class in which calls wait for the `bulkhead`: `low`, `normal`, `high` or `critical`, or a
	// placeholder. One of a caller whom the gateway has not verified raises no call above `normal`. What
	// a token of the caller says (`atd.resource_priority`) comes first. Default: `normal`.
	Priority string `json:"priority,omitempty"`

	// What orders the calls of a workflow: `plan` is its plan alone, `par` also what their own tokens name
	// as parents. A call whose parent is a call that is not done is refused (409 `dependency-not-done`)
	// before anything is recorded, and for good where the parent has failed or was undone. It needs an
	// `identity` and `trust`. Default: `plan`.
	Order string `json:"order,omitempty"`

	// Asks people before a call is sent. Until they have approved it, it gets 409
	// `approval-required` and its key stays free; afterwards the same call under the same id is
	// sent. Default: nobody is asked.
	Approve *Approve `json:"approve,omitempty"`

	Terms
}

// Approve says who has to approve calls before they are sent.
type Approve struct {
	// The role of who may decide. Default: `operator`.
	Role string `json:"role,omitempty"`

	// How many have to approve, up to 16. One denial denies. Default: 1.
	Quorum int `json:"quorum,omitempty"`

	// The time to decide, and after the approval the time to make the call. Then it is denied.
	// Default: 24h.
	Within jsontime.Duration `json:"within,omitempty"`

	// Calls of this action are not asked for, though the guard asks for others.
	Off bool `json:"off,omitempty"`
}

// Terms are the options of checkpoints, independent of the way in which calls are undone.
type Terms struct {
	// Where the credentials of an undo come from: `config` (only what the configuration says) or
	// `recorded` (those of the call itself, sealed with its checkpoint, sent to the same upstream
	// only, and deleted with the checkpoint). Default: `config`.
	UndoAuth string `json:"undo_auth,omitempty"`

	// What happens to a call if the state before it cannot be read: `refuse` (503
	// `snapshot-failed`, nothing is forwarded, the id stays free) or `irreversible` (the call runs,
	// and its checkpoint says that it cannot be undone). Default: `refuse`.
	OnSnapshotError string `json:"on_snapshot_error,omitempty"`

	// What happens if the answer to an undo is lost and no `status` can be asked: `resend` sends
	// the undo again under the same Idempotency-Key, `escalate` leaves it to a person. Default:
	// `resend`.
	OnLost string `json:"on_lost,omitempty"`

	// What an undo does if the current state is not the one that the call left: `escalate` leaves
	// it to a person, `overwrite` puts the earlier state back nevertheless. Default: `escalate`.
	OnChanged string `json:"on_changed,omitempty"`

	// How long a call can be undone, from 1s to 366d in whole seconds. Default: 24h.
	CheckpointTTL jsontime.Duration `json:"checkpoint_ttl,omitempty"`
}

// OnUnknown says how to handle a retry of a call in doubt.
type OnUnknown string

// The call stays in doubt, the upstream is asked, the call is sent again under its own key, or it
// runs again.
const (
	OnUnknownBlock  OnUnknown = "block"
	OnUnknownProbe  OnUnknown = "probe"
	OnUnknownResend OnUnknown = "resend"
	OnUnknownRetry  OnUnknown = "retry"
)

// Words of a Policy and of an Action that are not the default.
const (
	KeysAdvisory      = "advisory"
	GRPCUnary         = "unary"
	InDoubtToolResult = "tool_result"
	OnLeaveCancel     = "cancel"
	OrderPar          = "par"
	OnErrorRollback   = "rollback"
)

// defaults are those of a handler.
var defaults = Policy{
	Deadline:     jsontime.Duration(5 * time.Minute),
	RetainResult: jsontime.Duration(24 * time.Hour),
	RetainKey:    jsontime.Duration(30 * 24 * time.Hour),
	MaxResult:    8 << 20,
	Preset:       execution.PresetDefault,
	ResendFor:    jsontime.Duration(23 * time.Hour), // Stripe keeps keys for a day at least
	Keys:         "trusted",
	Terms: Terms{
		UndoAuth: rollback.AuthConfig, CheckpointTTL: jsontime.Duration(24 * time.Hour),
		OnSnapshotError: "refuse", OnLost: rollback.Resend, OnChanged: rollback.UndoEscalate,
	},
}

// Inherit sets what an action's policy leaves out to what its handler's says, and a handler's to the defaults, with
// nil. A handler that does not say what becomes of calls in doubt leaves that to the preset of each action.
func (p *Policy) Inherit(handler *Policy) {
	if handler == nil {
		merge(reflect.ValueOf(p).Elem(), reflect.ValueOf(defaults))
		return
	}
	merge(reflect.ValueOf(p).Elem(), reflect.ValueOf(handler).Elem())
	if p.Preset == execution.PresetStripe {
		initial(&p.OnUnknown, OnUnknownResend)
	}
	initial(&p.OnUnknown, OnUnknownBlock)
}

// merge sets the fields of a struct, and of those embedded in it, that are zero to those of base.
func merge(of, base reflect.Value) {
	for i := range of.NumField() {
		switch field := of.Field(i); {
		case field.Kind() == reflect.Struct:
			merge(field, base.Field(i))
		case field.IsZero():
			field.Set(base.Field(i))
		}
	}
}

// Check says what is wrong with how the members of p, which has inherited, go together, and names the members, the
// most likely culprit first. probes says that there is a probe for OnUnknownProbe.
func (p *Policy) Check(probes bool) (members []string, err error) {
	switch {
	case p.RetainKey < p.RetainResult:
		return []string{"retain_key", "retain_result"}, fmt.Errorf("%v is shorter than retain_result, which is %v; "+
			"a result cannot outlive its key", time.Duration(p.RetainKey), time.Duration(p.RetainResult))
	case p.OnUnknown == OnUnknownResend && p.Preset != execution.PresetStripe:
		return []string{"on_unknown", "preset"}, fmt.Errorf("resend is for an upstream that keeps keys itself, "+
			"whose 409 is no result; with the preset %s it would be: set preset to stripe", p.Preset)
	case p.OnUnknown == OnUnknownProbe && !probes:
		return []string{"on_unknown"}, errors.New("probe needs a `probe` with the status URL to ask")
	case p.OnUnknown != OnUnknownProbe && probes:
		return []string{"probe"}, fmt.Errorf("it is never asked, as on_unknown is %s; set on_unknown to probe", p.OnUnknown)
	}
	return nil, nil
}

// checkWords refuses a word that an option does not know. It would be as if nothing was said, and guard less.
func (a *Action) checkWords() error {
	for _, option := range [][]string{ // its name, its word, and those that it knows
		{"preset", string(a.Preset), "default", "stripe", "acp", "strict"},
		{"on_unknown", string(a.OnUnknown), "block", "probe", "resend", "retry"},
		{"keys", a.Keys, "trusted", KeysAdvisory},
		{"grpc", a.GRPC, GRPCUnary},
		{"in_doubt_as", a.InDoubtAs, "problem", InDoubtToolResult},
		{"on_leave", a.OnLeave, "continue", OnLeaveCancel},
		{"order", a.Order, "plan", OrderPar},
		{"undo_auth", a.UndoAuth, rollback.AuthConfig, rollback.AuthRecorded},
		{"on_snapshot_error", a.OnSnapshotError, "refuse", checkpoint.Irreversible.String()},
		{"on_lost", a.OnLost, rollback.Resend, rollback.UndoEscalate},
		{"on_changed", a.OnChanged, rollback.UndoEscalate, rollback.Overwrite},
		{"on_error", a.OnError, "escalate", OnErrorRollback},
		{"severity", a.Severity, "info", "warning", "error", "critical"},
	} {
		if word, known := option[1], option[2:]; word != "" && !slices.Contains(known, word) {
			return fmt.Errorf("%s: %q is unknown; use %s", option[0], word, strings.Join(known, " or "))
		}
	}
	return nil
}

// complete completes and checks an action.
func (h *Handler) complete(a *Action) error {
	a.Inherit(&h.Policy)
	if err := a.checkWords(); err != nil {
		return err
	}
	if a.Undo != nil {
		plan := *a.Undo // which other actions may have too
		initial(&plan.Spec.Auth, a.UndoAuth)
		initial(&plan.Spec.OnLost, a.OnLost)
		initial(&plan.OnChanged, a.OnChanged)
		a.Undo = &plan
	}
	if a.Approve != nil && a.Approve.Off {
		a.Approve = nil
	}
	if a.Counts == nil {
		a.Counts = h.Counts.Action(a.Name)
	}
	a.arguments = nil
	for text, value := range a.Arguments {
		p, err := jsonx.ParsePointer(text)
		if err != nil {
			return fmt.Errorf("the pointers of Arguments: %w", err)
		}
		a.arguments = append(a.arguments, argument{p, value})
	}
	switch members, err := a.Check(a.Probe != nil); {
	case err != nil:
		return fmt.Errorf("%s: %w", members[0], err)
	case len(a.Tools)+len(a.Arguments) > 0 && h.rules == nil:
		return errors.New("nothing reads the messages that Tools and Arguments are of: set Protocol")
	case a.Undo != nil && a.Undo.Restore && h.Send == nil:
		return errors.New("an Undo that restores reads the state of its target, and needs Config.Send")
	}
	return nil
}
