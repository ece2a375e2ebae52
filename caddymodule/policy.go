package caddymodule

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Answers say what the answers of the upstream mean.
type Answers struct {
	// Rules that come before the preset. The first that matches the answer decides. Default: none.
	Outcomes []OutcomeRule `json:"outcomes,omitempty"`

	// The status URL for `on_unknown probe`.
	Probe *Probe `json:"probe,omitempty"`
}

// policy is what a guard or an action says of its calls. What an action leaves out it takes from its guard.
type policy struct {
	*guard.Policy
	*Answers
}

func (h *Handler) policy() policy { return policy{&h.Policy, &h.Answers} }

func (a *Action) policy() policy { return policy{&a.Policy, &a.Answers} }

// inherit sets the options that the action of p leaves out to those of its guard. Its own rules come first.
func (p policy) inherit(guards policy) {
	p.Inherit(guards.Policy)
	p.Outcomes = slices.Concat(p.Outcomes, guards.Outcomes)
	if p.OnUnknown == guard.OnUnknownProbe {
		inherit(&p.Probe, guards.Probe)
	}
}

// check checks how the options of p fit together, after it has inherited. policyOptions checks each one alone.
func (p policy) check() error {
	if err := option.CheckDuration(p.ResendFor); err != nil {
		return invalidOption("resend_for", "%w", err)
	}
	if options, err := p.Check(p.Probe != nil); err != nil {
		return &invalid{options, fmt.Errorf("%s: %w", options[0], err)}
	}
	for i := range p.Outcomes {
		if err := p.Outcomes[i].check(); err != nil {
			return invalidOption("outcomes", "rule %d: %w", i+1, err)
		}
	}
	return nil
}

// checkApprove checks who has to approve calls.
func checkApprove(a *guard.Approve) error {
	switch {
	case a == nil || a.Off:
		return nil
	case len(a.Role) > maxRole || strings.ContainsFunc(a.Role, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return fmt.Errorf("role: %.40q is no role: up to %d bytes without blanks", a.Role, maxRole)
	case a.Quorum < 0 || a.Quorum > maxQuorum:
		return fmt.Errorf("quorum: it is %d; use 1 to %d", a.Quorum, maxQuorum)
	}
	if err := option.CheckDuration(a.Within); err != nil {
		return fmt.Errorf("within: %w", err)
	}
	return nil
}

const (
	maxRole   = 128
	maxQuorum = 16
)

// checkMessages checks the options of an action that are about messages, which only a guard with
// a `protocol` reads.
func (a *Action) checkMessages(h *Handler) error {
	wrong := func(text string, of ...any) error { return invalidOption("match", text, of...) }
	for i, tool := range a.Tools {
		switch {
		case tool == "":
			return wrong("a tool has no name; give it one")
		case slices.Contains(a.Tools[:i], tool):
			return wrong("the tool %q is named twice", tool)
		}
	}
	if _, err := jsonx.ParsePointers(slices.Sorted(maps.Keys(a.Arguments))); err != nil {
		return wrong("argument: %w", err)
	}
	speaks := cmp.Or(h.Protocol, protocol.Auto)
	if a.InDoubtAs == guard.InDoubtToolResult && speaks != protocol.MCP && speaks != protocol.Auto {
		return invalidOption("in_doubt_as", "tool_result is an answer of MCP, and needs `protocol mcp` or `auto`")
	}
	if a.Answers.Probe != nil && a.Answers.Probe.Task && (speaks == protocol.None || speaks == protocol.JSONRPC) {
		return invalidOption("on_unknown", "tasks are of MCP and A2A, and `probe task` needs `protocol mcp`, `a2a` or `auto`")
	}
	if len(a.Tools)+len(a.Arguments) > 0 && !h.readsMessages() {
		return wrong("`tool` and `argument` choose by what a message says, which `protocol none` does not read")
	}
	return nil
}

// checkOnError refuses to roll back what cannot be undone.
func (a *Action) checkOnError() error {
	if a.OnError == guard.OnErrorRollback && a.Restore == nil && a.Compensate == nil && a.Delegate == "" {
		return invalidOption("on_error", "rollback needs a way to undo the calls: add `restore`, `compensate` or `delegate`")
	}
	return nil
}

// checkConsequential: without matchers every request would be guarded. Whether a request calls a tool is
// known only of those that are guarded already.
func (a *Action) checkConsequential() error {
	if a.Consequential && (len(a.MatcherSetsRaw)+len(a.matchers) == 0 || len(a.Tools)+len(a.Arguments) > 0) {
		return invalidOption("consequential", "it needs `match` with matchers of requests, and no `match tool` or `match argument`; for tools there is `consequential tool` of the guard")
	}
	return nil
}

// checkReached refuses an action that no call can belong to, since one of those before it takes every call.
func (a *Action) checkReached(before []*Action) error {
	for _, b := range before {
		if b != nil && len(b.MatcherSetsRaw)+len(b.matchers)+len(b.Tools)+len(b.Arguments) == 0 {
			return fmt.Errorf("no call belongs to it: the action %s before it has no `match` and takes every call; put %s last, or give it a `match`",
				b.Name, b.Name)
		}
	}
	return nil
}

// severities are those of the drafts (ATD and AERR, "Error ECT").
var severities = []string{"info", "warning", "error", workflow.Critical}

// needsIdentity refuses what is recorded in checkpoints, where there are none.
func (a *Action) needsIdentity() error {
	option := wayOf(&a.Ways)
	switch {
	case option != "":
	case a.Critical:
		option = "critical"
	case a.Severity != "":
		option = "severity"
	default:
		return nil
	}
	return invalidOption(option, "%w", errUndoNeedsIdentity)
}

// OutcomeRule gives certain answers an outcome.
type OutcomeRule struct {
	// `completed`, `released` or `in_doubt`.
	Outcome string `json:"outcome,omitempty"`
	// The answers, by status (one digit is a class) and header.
	Match caddyhttp.ResponseMatcher `json:"match,omitzero"`

	verdict execution.Verdict
}

// Action is a named kind of guarded calls with its own rules. A call belongs to the first action
// whose matchers match.
type Action struct {
	guard.Action

	// The calls of this action, by any of Caddy's request matchers. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	Answers

	Ways

	// Guards the calls that `match` takes also with a safe method, so that they have a checkpoint: for
	// what cannot be verified without external state, like the start of a measurement by GET. Needs
	// `match`, and neither `tools` nor `arguments`. Default: false.
	Consequential bool `json:"consequential,omitempty"`

	matchers caddyhttp.MatcherSets
	origin   origin // of a Caddyfile's action
}

func inherit[T comparable](v *T, base T) {
	var zero T
	if *v == zero {
		*v = base
	}
}

// check refuses rules without an outcome, and those that match every answer or none.
func (r *OutcomeRule) check() error {
	if _, err := execution.ParseVerdict(r.Outcome); err != nil {
		return err
	}
	if len(r.Match.StatusCode) == 0 && len(r.Match.Headers) == 0 {
		return errors.New("it would match every answer; name a status or a header")
	}
	return checkAnswer(&r.Match)
}

// checkAnswer checks the statuses and header fields of a response matcher.
func checkAnswer(m *caddyhttp.ResponseMatcher) error {
	for _, code := range m.StatusCode {
		if err := option.CheckStatus(code); err != nil {
			return err
		}
	}
	return checkFields(slices.Sorted(maps.Keys(m.Headers)))
}

// checkSource requires exactly one place of an execution id.
func checkSource(s guard.IDSource) error {
	set := 0
	for _, v := range []string{s.Header, s.Placeholder, s.JSON} {
		if v != "" {
			set++
		}
	}
	switch {
	case set != 1:
		return fmt.Errorf("it names %d places; it needs exactly one of header, placeholder and json", set)
	case s.Header != "":
		return checkFields([]string{s.Header})
	case s.Placeholder != "":
		return checkPlaceholder(s.Placeholder)
	}
	_, err := jsonx.ParsePointer(s.JSON)
	return err
}

// checkPlaceholder refuses text that is the same for all requests: as a caller it would
// show one caller's results to everybody (P3), as an id it would make all calls one.
func checkPlaceholder(text string) error {
	if _, rest, open := strings.Cut(text, "{"); open {
		if end := strings.IndexByte(rest, '}'); end > 0 {
			return nil
		}
	}
	return fmt.Errorf("%q has no placeholder and is the same for every request; write one like {http.auth.user.id}", text)
}

func checkFields(names []string) error {
	for _, name := range names {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("%q is no name of a header field", name)
		}
	}
	return nil
}

// checkCompared checks the fields of `compare` or `ignore`; others are those of the other one.
func checkCompared(names, others []string, fields *body.Fields) error {
	if err := checkFields(names); err != nil {
		return err
	}
	for _, name := range names {
		field := http.CanonicalHeaderKey(name)
		switch fields.Class(field) {
		case body.Credential:
			return fmt.Errorf("%s names the caller, and a caller's calls are compared with his own only; leave it out, or write `credentials -%s` too", field, field)
		case body.Tenant:
			return fmt.Errorf("%s names who the call is for, and is part of its key; leave it out, or write `tenant -%s` too", field, field)
		case body.Elsewhere:
			return fmt.Errorf("%s is always read, though not compared by its value; leave it out", field)
		}
		if slices.ContainsFunc(others, func(other string) bool { return strings.EqualFold(other, name) }) {
			return fmt.Errorf("%s stands both in `compare` and in `ignore`; leave it out of one of them", field)
		}
	}
	return nil
}

// checkChanged checks fields that may have a "-" in front.
func checkChanged(names []string) error {
	for _, name := range names {
		if err := checkFields([]string{strings.TrimPrefix(name, "-")}); err != nil {
			return err
		}
	}
	return nil
}

// Quota limits what one caller, and one workflow, may hold in the store at a time. Above a limit its new
// calls get 429 `quota-exceeded`, and nothing is recorded or forwarded; its retries are still answered, and
// others are not affected. Of several gateways that share a PostgreSQL store all together stay within each limit, but for
// the rate, which is of each gateway.
type Quota struct {
	// The most executions of a caller that are running or in doubt. Default: no limit.
	OpenExecutions int `json:"open_executions,omitempty"`

	// The most bytes of records and answers of a caller. It is checked before a call runs, so the
	// answers of running calls may exceed it. Default: no limit.
	StoredBytes int64 `json:"stored_bytes,omitempty"`

	// The most bytes of records and answers of one workflow, from 1 MiB. It is never exceeded: a running
	// call counts for its record and for an answer of 64 KiB, or as large as those before it up to a quarter of
	// the limit, and an answer that finds no room is not kept, like one over `max_result`. A workflow that no token proves has a limit for each of its callers. Only
	// calls count that begin while there is a limit. Default: no limit.
	WorkflowStoredBytes int64 `json:"workflow_stored_bytes,omitempty"`

	// The most unexpired checkpoints of one workflow; -1 for no limit. Default: 10000.
	WorkflowCheckpoints int `json:"workflow_checkpoints,omitempty"`

	// The most bytes of the checkpoints of one workflow. Default: no limit.
	WorkflowCheckpointBytes int64 `json:"workflow_checkpoint_bytes,omitempty"`

	// The most checkpoints that a workflow may create per minute; -1 for no limit. It is of each gateway: of several that
	// share a store, each allows so many. Default: 6000.
	WorkflowCheckpointRate int `json:"workflow_checkpoint_rate,omitempty"`

	// The most unexpired checkpoints of the calls of one caller. Default: no limit.
	CallerCheckpoints int `json:"caller_checkpoints,omitempty"`

	// The most bytes of the checkpoints of the calls of one caller. Default: no limit.
	CallerCheckpointBytes int64 `json:"caller_checkpoint_bytes,omitempty"`
}

// The default limits of checkpoints (ATD, "Checkpoint Flooding").
const (
	defaultCheckpoints    = 10_000
	defaultCheckpointRate = 6_000
	unbounded             = -1
	// leastWorkflowBytes is enough for some calls that run at a time.
	leastWorkflowBytes = 1 << 20
)

func (q Quota) validate() error {
	if n := q.WorkflowStoredBytes; n < 0 || n > 0 && n < leastWorkflowBytes {
		return fmt.Errorf("workflow_stored_bytes: %d bytes is too little; it must be at least 1MiB, since each running call counts for 64 KiB and more", n)
	}
	for _, of := range []struct {
		name, unit string
		n, least   int64
		end        string
	}{
		{"open_executions", "", int64(q.OpenExecutions), 0, ""},
		{"stored_bytes", " bytes", q.StoredBytes, 0, ""},
		{"workflow_checkpoints", "", int64(q.WorkflowCheckpoints), unbounded, ", or -1 for no bound"},
		{"workflow_checkpoint_rate", "", int64(q.WorkflowCheckpointRate), unbounded, ", or -1 for no bound"},
		{"caller_checkpoints", "", int64(q.CallerCheckpoints), 0, ""},
		{"workflow_checkpoint_bytes", " bytes", q.WorkflowCheckpointBytes, 0, ""},
		{"caller_checkpoint_bytes", " bytes", q.CallerCheckpointBytes, 0, ""},
	} {
		if of.n < of.least {
			return fmt.Errorf("%s: %d%s is negative; it must be positive%s", of.name, of.n, of.unit, of.end)
		}
	}
	return nil
}

// ofCheckpoints returns the limits of a workflow's and a caller's checkpoints.
func (q Quota) ofCheckpoints() checkpoint.Terms {
	inherit(&q.WorkflowCheckpoints, defaultCheckpoints)
	inherit(&q.WorkflowCheckpointRate, defaultCheckpointRate)
	return checkpoint.Terms{
		Rate:     max(q.WorkflowCheckpointRate, 0),
		Workflow: checkpoint.Quota{Count: max(q.WorkflowCheckpoints, 0), Bytes: q.WorkflowCheckpointBytes},
		Caller:   checkpoint.Quota{Count: q.CallerCheckpoints, Bytes: q.CallerCheckpointBytes},
	}
}

func (q Quota) ofCaller() execution.Quota {
	return execution.Quota{Open: q.OpenExecutions, Bytes: q.StoredBytes}
}

// parseQuota reads
//
//	quota {
//		open_executions  <number>
//		stored_bytes     [workflow | caller] <size>
//		checkpoints      workflow | caller <number>
//		checkpoint_bytes workflow | caller <size>
//		checkpoint_rate  <number> | off
//	}
func parseQuota(d *caddyfile.Dispenser, a *App) error {
	_, err := readOnly(quotaOptions(), d, "a quota", &a.Quota, "it bounds nothing; give open_executions, stored_bytes, checkpoints, checkpoint_bytes or checkpoint_rate")
	return err
}

// quotaOptions are the options of a quota.
func quotaOptions() option.Set[*Quota] {
	return option.Set[*Quota]{
		"open_executions": count(func(q *Quota) *int { return &q.OpenExecutions }),
		"stored_bytes":    {Several: true, Usage: "[workflow | caller] <size>", Parse: parseStoredBytes},
		"checkpoints": {Several: true, Usage: "workflow | caller <number>", Parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseScope(d, &q.WorkflowCheckpoints, &q.CallerCheckpoints, func(d *caddyfile.Dispenser, into *int) error {
				if into == &q.WorkflowCheckpoints {
					return countOrOff(d, into)
				}
				return option.ParseCount(d, into)
			})
		}},
		"checkpoint_bytes": {Several: true, Usage: "workflow | caller <size>", Parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseScope(d, &q.WorkflowCheckpointBytes, &q.CallerCheckpointBytes, parseSize)
		}},
		"checkpoint_rate": option.Value("<number>", func(q *Quota) *int { return &q.WorkflowCheckpointRate }, countOrOff),
	}
}

// parseStoredBytes parses a limit of bytes and whose it is: a caller's, where that is not said.
func parseStoredBytes(d *caddyfile.Dispenser, q *Quota) error {
	switch {
	case d.CountRemainingArgs() != 1:
		if err := parseScope(d, &q.WorkflowStoredBytes, &q.StoredBytes, parseSize); err != nil {
			return err
		}
	case q.StoredBytes != 0:
		return errors.New("that of a caller is given twice")
	default:
		if err := parseSize(d, &q.StoredBytes); err != nil {
			return err
		}
	}
	return q.validate()
}

// parseScope parses a limit and whose it is. Each may occur once.
func parseScope[T int | int64](d *caddyfile.Dispenser, workflow, caller *T, parse func(*caddyfile.Dispenser, *T) error) error {
	var whose string
	if err := parseChoice(d, &whose, checkpoint.OfWorkflow, checkpoint.OfCaller); err != nil {
		return err
	}
	into := caller
	if whose == checkpoint.OfWorkflow {
		into = workflow
	}
	if *into != 0 {
		return fmt.Errorf("that of a %s is given twice", whose)
	}
	return parse(d, into)
}
