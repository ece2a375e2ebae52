package caddymodule

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
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
}

func (q Quota) validate() error {
	if q.OpenExecutions < 0 {
		return fmt.Errorf("open_executions: %d is negative; it must be positive", q.OpenExecutions)
	}
	if q.StoredBytes < 0 {
		return fmt.Errorf("stored_bytes: %d bytes is negative; it must be positive", q.StoredBytes)
	}
	return nil
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
		return errors.New("it bounds nothing; give open_executions, stored_bytes or both")
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
	}
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
