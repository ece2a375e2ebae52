package caddymodule

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Quota bounds what one caller may hold in the store at a time. Over a bound its new
// calls get 429 `quota-exceeded`, and nothing is recorded or forwarded; its retries are
// answered all the same, and other callers are not touched.
type Quota struct {
	// The largest number of executions that run or are in doubt. Default: no bound.
	OpenExecutions int `json:"open_executions,omitempty"`

	// The largest size of records and answers, in bytes. It is looked at before a
	// call is claimed, so the answers of open executions may go past it. Default: no
	// bound.
	StoredBytes int64 `json:"stored_bytes,omitempty"`

	// The largest number of checkpoints that stand of one workflow; -1 is no bound.
	// Default: 10000.
	WorkflowCheckpoints int `json:"workflow_checkpoints,omitempty"`

	// The largest size of one workflow's checkpoints, in bytes. Default: no bound.
	WorkflowCheckpointBytes int64 `json:"workflow_checkpoint_bytes,omitempty"`

	// How many checkpoints a workflow may make in a minute; -1 is no bound. Default:
	// 6000.
	WorkflowCheckpointRate int `json:"workflow_checkpoint_rate,omitempty"`

	// The largest number of checkpoints that stand of one caller's calls. Default: no
	// bound.
	CallerCheckpoints int `json:"caller_checkpoints,omitempty"`

	// The largest size of the checkpoints of one caller's calls, in bytes. Default: no
	// bound.
	CallerCheckpointBytes int64 `json:"caller_checkpoint_bytes,omitempty"`
}

// The bounds of checkpoints where nothing is said (ATD, "Checkpoint Flooding").
const (
	defaultCheckpoints    = 10_000
	defaultCheckpointRate = 6_000
	unbounded             = -1
)

func (q Quota) validate() error {
	if q.OpenExecutions < 0 {
		return fmt.Errorf("open_executions: %d is negative; it must be positive", q.OpenExecutions)
	}
	if q.StoredBytes < 0 {
		return fmt.Errorf("stored_bytes: %d bytes is negative; it must be positive", q.StoredBytes)
	}
	for name, v := range map[string]int{"workflow_checkpoints": q.WorkflowCheckpoints, "workflow_checkpoint_rate": q.WorkflowCheckpointRate} {
		if v < unbounded {
			return fmt.Errorf("%s: %d is negative; it must be positive, or -1 for no bound", name, v)
		}
	}
	if q.CallerCheckpoints < 0 {
		return fmt.Errorf("caller_checkpoints: %d is negative; it must be positive", q.CallerCheckpoints)
	}
	for name, v := range map[string]int64{"workflow_checkpoint_bytes": q.WorkflowCheckpointBytes, "caller_checkpoint_bytes": q.CallerCheckpointBytes} {
		if v < 0 {
			return fmt.Errorf("%s: %d bytes is negative; it must be positive", name, v)
		}
	}
	return nil
}

// ofCheckpoints bounds what checkpoints a workflow and a caller may have.
func (q Quota) ofCheckpoints(t *undoing.Terms) checkpoint.Terms {
	inherit(&q.WorkflowCheckpoints, defaultCheckpoints)
	inherit(&q.WorkflowCheckpointRate, defaultCheckpointRate)
	return checkpoint.Terms{
		TTL: t.TTL(), MaxImage: int(t.MaxImage), Rate: max(q.WorkflowCheckpointRate, 0),
		Workflow: checkpoint.Quota{Count: max(q.WorkflowCheckpoints, 0), Bytes: q.WorkflowCheckpointBytes},
		Caller:   checkpoint.Quota{Count: q.CallerCheckpoints, Bytes: q.CallerCheckpointBytes},
	}
}

func (q Quota) ofCaller() guard.Quota {
	return guard.Quota{Open: q.OpenExecutions, Bytes: q.StoredBytes}
}

func parseQuota(d *caddyfile.Dispenser, a *App) error {
	if d.NextArg() {
		return errSyntax
	}
	at := originOf(d)
	if err := quotaOptions().readBlock(d, "a quota", &a.Quota, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return errors.New("it bounds nothing; give open_executions, stored_bytes, checkpoints, checkpoint_bytes or checkpoint_rate")
	}
	return nil
}

// quotaOptions are the options of a quota.
func quotaOptions() options[*Quota] {
	return options[*Quota]{
		"open_executions": {usage: "open_executions <number>", parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseCount(d, &q.OpenExecutions)
		}},
		"stored_bytes": {usage: "stored_bytes <size>", parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseSize(d, &q.StoredBytes)
		}},
		"checkpoints": {several: true, usage: "checkpoints workflow | caller <number>", parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseScope(d, &q.WorkflowCheckpoints, &q.CallerCheckpoints, func(d *caddyfile.Dispenser, into *int) error {
				if into == &q.WorkflowCheckpoints {
					return parseCountOrOff(d, into)
				}
				return parseCount(d, into)
			})
		}},
		"checkpoint_bytes": {several: true, usage: "checkpoint_bytes workflow | caller <size>", parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseScope(d, &q.WorkflowCheckpointBytes, &q.CallerCheckpointBytes, parseSize)
		}},
		"checkpoint_rate": {usage: "checkpoint_rate <number>", parse: func(d *caddyfile.Dispenser, q *Quota) error {
			return parseCountOrOff(d, &q.WorkflowCheckpointRate)
		}},
	}
}

// parseScope reads whose a bound is, and the bound, which may stand once for each.
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

// parseCountOrOff reads a number, or `off` for no bound.
func parseCountOrOff(d *caddyfile.Dispenser, into *int) error {
	if d.NextArg() {
		if d.Val() == "off" {
			*into = unbounded
			return nil
		}
		d.Prev()
	}
	return parseCount(d, into)
}

// parseCount reads one number.
func parseCount(d *caddyfile.Dispenser, into *int) error {
	if !d.NextArg() {
		return errSyntax
	}
	n, err := strconv.Atoi(d.Val())
	if err != nil || n < 1 {
		return fmt.Errorf("%q is no count (like 100); it must be at least 1", d.Val())
	}
	*into = n
	return nil
}

// overQuota refuses a call whose caller holds too much. Nothing was recorded of it.
func (x *exchange) overQuota(over *guard.QuotaError) *problem.Problem {
	detail := fmt.Sprintf("The caller has %d bytes of records and answers stored, at most %d.", over.Bytes, over.Quota.Bytes)
	if over.Quota.Open > 0 && over.Open >= over.Quota.Open {
		detail = fmt.Sprintf("The caller has %d executions that run or are in doubt, at most %d.", over.Open, over.Quota.Open)
	}
	full := over.Quota.Open > 0 && over.Doubts >= over.Quota.Open
	if full {
		detail += " All of them are in doubt: an operator or a probe makes room, a retry does not."
	}
	p := x.problem(problem.QuotaExceeded, detail, 0)
	if full {
		p.RetryAfter = max(p.RetryAfter, time.Minute)
	}
	if !over.Retry.IsZero() {
		p.RetryAfter = max(p.RetryAfter, time.Until(over.Retry))
	}
	return p
}

// overCheckpoints refuses a call whose workflow or caller has too many checkpoints.
// Nothing was recorded of it.
func (x *exchange) overCheckpoints(over *checkpoint.QuotaError) *problem.Problem {
	var detail string
	switch over.Over {
	case checkpoint.OverRate:
		detail = fmt.Sprintf("The %s makes more than %d checkpoints in a minute.", over.Of, over.Most)
	case checkpoint.OverCount:
		detail = fmt.Sprintf("The %s has %d checkpoints standing, at most so many.", over.Of, over.Most)
	default:
		detail = fmt.Sprintf("The %s would have more than %d bytes of checkpoints.", over.Of, over.Most)
	}
	p := x.problem(problem.QuotaExceeded, detail, 0)
	if !over.Retry.IsZero() {
		p.RetryAfter = max(p.RetryAfter, time.Until(over.Retry))
	}
	return p
}
