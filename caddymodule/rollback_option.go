package caddymodule

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Rollback says who may ask for rollbacks, and how often. Agents ask with tokens that
// `trust` lets in; without it only operators ask.
type Rollback struct {
	// Who of a workflow may ask: `ancestor`, whoever made the call or what led to it, or
	// `workflow`, everybody whose own part in the workflow is linked to it. Default:
	// `ancestor`.
	Lineage string `json:"lineage,omitempty"`

	// The issuers with the authority of a rollback coordinator: they may ask for every
	// checkpoint of the workflow of their token, for the scope `full_workflow`, and look
	// at every rollback. Default: none.
	Coordinators []string `json:"coordinators,omitempty"`

	// How many new rollbacks one issuer may ask for in a minute, and how many may be
	// asked for in one workflow. Over it they get 429 `quota-exceeded`; repetitions are
	// answered, and operators are not counted. Default: 60.
	Rate int `json:"rate,omitempty"`

	// How long an answer waits for the end of its rollback before it is 202, at most 30s;
	// who asks may say otherwise with `Prefer: wait=N`. Default: 10s.
	Wait caddy.Duration `json:"wait,omitempty"`

	// How long a finished rollback is kept, so that asking for it again gets the same
	// answer. It is at least as long as the longest `retain_key`. Default: 30d.
	Retain caddy.Duration `json:"retain,omitempty"`
}

const defaultRollbackRetain = 30 * 24 * time.Hour

// provision checks the options and completes them. It works on no options too.
func (o *Rollback) provision() error {
	inherit(&o.Lineage, string(plan.Ancestor))
	inherit(&o.Rate, rollbackapi.DefaultRate)
	inherit(&o.Wait, caddy.Duration(rollbackapi.DefaultWait))
	inherit(&o.Retain, caddy.Duration(defaultRollbackRetain))
	if err := oneOf(o.Lineage, lineages...); err != nil {
		return fmt.Errorf("lineage: %w", err)
	}
	for _, name := range o.Coordinators {
		if err := checkIdentity(name); err != nil {
			return fmt.Errorf("coordinators: %w", err)
		}
	}
	if o.Rate < 0 {
		return fmt.Errorf("rate: %d is negative; it must be positive", o.Rate)
	}
	if err := checkRollbackWait(o.Wait); err != nil {
		return fmt.Errorf("wait: %w", err)
	}
	if err := checkDuration(o.Retain); err != nil {
		return fmt.Errorf("retain: %w", err)
	}
	return nil
}

var lineages = []string{string(plan.Ancestor), string(plan.Workflow)}

func checkRollbackWait(v caddy.Duration) error {
	if err := checkDuration(v); err != nil {
		return err
	}
	if time.Duration(v) > rollbackapi.LongestWait {
		return fmt.Errorf("%v is too long; it must be at most %v", time.Duration(v), rollbackapi.LongestWait)
	}
	return nil
}

// parseRollback reads
//
//	rollback {
//		lineage      ancestor | workflow
//		coordinators <issuers...>
//		rate         <number>
//		wait         <duration>
//		retain       <duration>
//	}
func parseRollback(d *caddyfile.Dispenser, a *App) error {
	if d.NextArg() {
		return errSyntax
	}
	a.Rollback = new(Rollback)
	at := originOf(d)
	if err := rollbackOptions().readBlock(d, "rollback", a.Rollback, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return errors.New("it says nothing; leave it out for the defaults")
	}
	return nil
}

func rollbackOptions() options[*Rollback] {
	type dispenser = *caddyfile.Dispenser
	return options[*Rollback]{
		"lineage": {usage: "lineage ancestor | workflow", parse: func(d dispenser, o *Rollback) error {
			return parseChoice(d, &o.Lineage, lineages...)
		}},
		"coordinators": {usage: "coordinators <issuers...>", several: true, parse: func(d dispenser, o *Rollback) error {
			if err := parseWords(d, &o.Coordinators); err != nil {
				return err
			}
			for _, name := range o.Coordinators {
				if err := checkIdentity(name); err != nil {
					return err
				}
			}
			return nil
		}},
		"rate": {usage: "rate <number>", parse: func(d dispenser, o *Rollback) error { return parseCount(d, &o.Rate) }},
		"wait": {usage: "wait <duration>", parse: func(d dispenser, o *Rollback) error {
			if err := parseDuration(d, &o.Wait); err != nil {
				return err
			}
			return checkRollbackWait(o.Wait)
		}},
		"retain": {usage: "retain <duration>", parse: func(d dispenser, o *Rollback) error {
			return parseDuration(d, &o.Retain)
		}},
	}
}
