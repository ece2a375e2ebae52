package caddymodule

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Policy is how guarded calls are judged and kept. It stands in a handler, for all
// its calls, and in an action, for those that the action matches; what an action
// leaves out it takes from its handler.
type Policy struct {
	// The longest that a forwarded call may take, with its whole answer. A call
	// that is not done by then is in doubt. Default: 5m.
	Deadline caddy.Duration `json:"deadline,omitempty"`

	// How long the answer of a completed call can be replayed. Default: 24h.
	RetainResult caddy.Duration `json:"retain_result,omitempty"`

	// How long the key of a completed call stays taken; at least as long as its
	// result is kept. After it the same call runs again. Calls that are in doubt
	// stay so whatever their age. Default: 720h (30 days).
	RetainKey caddy.Duration `json:"retain_key,omitempty"`

	// The largest answer body that is kept for replays, in bytes. A larger one
	// flows on to its caller; its key stays taken, and retries get
	// `result-unavailable`. Default: 8 MiB.
	MaxResult int64 `json:"max_result,omitempty"`

	// How the upstream's status is read: `default`, `stripe` (every answer is
	// replayed, 5xx too), `acp` (a 5xx is released and runs again) or `strict`
	// (every 5xx is in doubt). Default: `default`.
	Preset guard.Preset `json:"preset,omitempty"`

	// Rules that go before the preset. The first that matches the answer decides.
	Outcomes []OutcomeRule `json:"outcomes,omitempty"`

	// What a retry of a call in doubt does: `block` (409), `probe` (ask the status
	// URL in `probe`), or `retry` (run it again: at the risk of a second effect).
	// Default: `block`.
	OnUnknown string `json:"on_unknown,omitempty"`

	// The status URL for `on_unknown probe`.
	Probe *Probe `json:"probe,omitempty"`

	// `awaited`: the end of the answer leaves after the outcome is on disk, so
	// that whoever saw the end can rely on the record. `async`: the end leaves at
	// once; an answer that was seen may be found in doubt after a crash.
	// Default: `awaited`.
	Settle string `json:"settle,omitempty"`

	// The system that the calls change, as their checkpoints name it
	// (`cascade.target`); placeholders are filled. It stands in signed tokens that
	// others read: nothing that is secret may be in it. Default: the guard's name.
	Target string `json:"target,omitempty"`

	// How an answer is read whose body is framed by nothing but the end of its
	// connection, so that a cut cannot be seen: `doubt` or `complete`.
	// Default: `doubt`.
	Unframed string `json:"unframed,omitempty"`

	// `unary` guards calls of the content type application/grpc*, which are else
	// passed through, and reads grpc-status instead of the HTTP status: 16, 7 and 8
	// are released; 14, 4, 2, 13 and none are in doubt; others are completed.
	// Default: unset.
	GRPC string `json:"grpc,omitempty"`

	undoing.Terms
}

// OutcomeRule reads certain answers as one outcome.
type OutcomeRule struct {
	// `completed`, `released` or `in_doubt`.
	Outcome string `json:"outcome,omitempty"`
	// The answers: by status (one digit is a class) and header.
	Match caddyhttp.ResponseMatcher `json:"match,omitzero"`

	verdict guard.Verdict
}

// Action is a named kind of guarded calls, with rules of its own. The first action
// whose matchers match a call is its action.
type Action struct {
	// The name, as it is recorded. It does not go into the execution key: actions
	// can be added, renamed and removed without freeing one.
	Name string `json:"name,omitempty"`

	// Which calls these are. Any of Caddy's request matchers. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	Policy

	undoing.Ways

	// What the calls do, in a sentence for people: it stands in their checkpoints
	// (`cascade.description`), so that nothing that is secret may be in it. Default: the
	// action's name.
	Description string `json:"description,omitempty"`

	matchers caddyhttp.MatcherSets
	rules    guard.Rules
	undo     *undoing.Plan // nil where the calls cannot be undone
	counts   *metrics.Action
	origin   origin // of a Caddyfile's action
}

const (
	onUnknownBlock = "block"
	onUnknownProbe = "probe"
	onUnknownRetry = "retry"

	settleAwaited = "awaited"
	settleAsync   = "async"

	unframedDoubt    = "doubt"
	unframedComplete = "complete"

	grpcUnary = "unary"
)

// defaults is the policy of a handler that says nothing.
var defaults = Policy{
	Deadline:     caddy.Duration(5 * time.Minute),
	RetainResult: caddy.Duration(24 * time.Hour),
	RetainKey:    caddy.Duration(30 * 24 * time.Hour),
	MaxResult:    8 << 20,
	Preset:       guard.PresetDefault,
	OnUnknown:    onUnknownBlock,
	Settle:       settleAwaited,
	Unframed:     unframedDoubt,
	Terms:        undoing.Defaults,
}

// inherit fills what p leaves out from base.
func (p *Policy) inherit(base *Policy) {
	inherit(&p.Deadline, base.Deadline)
	inherit(&p.RetainResult, base.RetainResult)
	inherit(&p.Target, base.Target)
	inherit(&p.RetainKey, base.RetainKey)
	inherit(&p.MaxResult, base.MaxResult)
	inherit(&p.Preset, base.Preset)
	inherit(&p.OnUnknown, base.OnUnknown)
	if p.OnUnknown == onUnknownProbe {
		inherit(&p.Probe, base.Probe)
	}
	inherit(&p.Settle, base.Settle)
	inherit(&p.Unframed, base.Unframed)
	inherit(&p.GRPC, base.GRPC)
	p.Outcomes = slices.Concat(p.Outcomes, base.Outcomes)
	p.inheritTerms(&base.Terms)
}

func inherit[T comparable](v *T, base T) {
	var zero T
	if *v == zero {
		*v = base
	}
}

// validate checks p after it has inherited. Its errors name the option.
func (p *Policy) validate() error {
	wrong := func(err error, options ...string) error { return &invalid{options, err} }
	for _, d := range []struct {
		name  string
		value caddy.Duration
	}{{"deadline", p.Deadline}, {"retain_result", p.RetainResult}, {"retain_key", p.RetainKey}} {
		if err := checkDuration(d.value); err != nil {
			return wrong(err, d.name)
		}
	}
	if p.RetainKey < p.RetainResult {
		return wrong(fmt.Errorf("%v is shorter than retain_result, which is %v; a result cannot outlive its key",
			time.Duration(p.RetainKey), time.Duration(p.RetainResult)), "retain_key", "retain_result")
	}
	if p.MaxResult < 0 {
		return wrong(fmt.Errorf("%d bytes is negative; it must be positive", p.MaxResult), "max_result")
	}
	for _, word := range []struct {
		name, value string
		known       []string
	}{
		{"preset", string(p.Preset), presets()},
		{"on_unknown", p.OnUnknown, []string{onUnknownBlock, onUnknownProbe, onUnknownRetry}},
		{"settle", p.Settle, []string{settleAwaited, settleAsync}},
		{"unframed", p.Unframed, []string{unframedDoubt, unframedComplete}},
		{"grpc", p.GRPC, []string{grpcUnary}},
	} {
		if word.name == "grpc" && word.value == "" {
			continue
		}
		if err := oneOf(word.value, word.known...); err != nil {
			return wrong(err, word.name)
		}
	}
	switch probing := p.OnUnknown == onUnknownProbe; {
	case probing && p.Probe == nil:
		return wrong(errors.New("probe needs a `probe` with the status URL to ask"), "on_unknown")
	case !probing && p.Probe != nil:
		return wrong(fmt.Errorf("it is never asked, as on_unknown is %s; set on_unknown to probe", p.OnUnknown), "probe")
	}
	for i := range p.Outcomes {
		if err := p.Outcomes[i].check(); err != nil {
			return wrong(fmt.Errorf("rule %d: %w", i+1, err), "outcomes")
		}
	}
	return undoError(p.CheckTerms())
}

func presets() []string {
	var names []string
	for _, preset := range guard.Presets() {
		names = append(names, string(preset))
	}
	return names
}

// check finds rules that would say nothing, or match every answer or none.
func (r *OutcomeRule) check() error {
	if _, err := guard.ParseVerdict(r.Outcome); err != nil {
		return err
	}
	if len(r.Match.StatusCode) == 0 && len(r.Match.Headers) == 0 {
		return errors.New("it would match every answer; name a status or a header")
	}
	return checkAnswer(&r.Match)
}

// checkAnswer checks what a response matcher names.
func checkAnswer(m *caddyhttp.ResponseMatcher) error {
	for _, code := range m.StatusCode {
		if err := checkStatus(code); err != nil {
			return err
		}
	}
	return checkFields(slices.Sorted(maps.Keys(m.Headers)))
}

// judge reads a whole answer. ruled says that a rule of the configuration has decided.
func (a *Action) judge(status int, header http.Header, trailer map[string][]string) (v guard.Verdict, ruled bool) {
	for i := range a.Outcomes {
		if rule := &a.Outcomes[i]; rule.Match.Match(status, header) {
			return rule.verdict, true
		}
	}
	if a.GRPC == grpcUnary && status == http.StatusOK {
		return judgeGRPC(header, trailer), false
	}
	return a.rules.Judge(status, header.Get("Retry-After") != ""), false
}

// judgeGRPC reads the status of a unary call: in the trailer, or in the header of
// an answer that has nothing else.
func judgeGRPC(header http.Header, trailer map[string][]string) guard.Verdict {
	text := header.Get("Grpc-Status")
	if values := trailer["Grpc-Status"]; len(values) > 0 {
		text = values[0]
	}
	code, err := strconv.ParseUint(text, 10, 32) // no sign
	if err != nil {
		return guard.InDoubt
	}
	switch code {
	case 7, 8, 16: // permission denied, resource exhausted, unauthenticated
		return guard.Released
	case 2, 4, 13, 14: // unknown, deadline exceeded, internal, unavailable
		return guard.InDoubt
	default:
		return guard.Completed
	}
}
