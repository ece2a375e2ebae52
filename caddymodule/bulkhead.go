package caddymodule

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
)

// Bulkhead shares the upstream among workflows, so that none starves another. A call holds a permit
// until its answer has ended, also if it is not guarded; retries that are answered from the record need
// none, and undos and probes have a lane of their own. A workflow that finds no permit waits in a queue
// of its own. A free permit goes to a critical call first, then to a workflow with less than its equal
// share; what nobody's share needs goes to the higher class. What finds no place gets 429
// `bulkhead-full`, and its key stays free. Calls without a workflow count as one workflow. The limits
// hold over reloads, which change them at once.
type Bulkhead struct {
	// Turns it off: nothing is bounded. Default: false.
	Off bool `json:"off,omitempty"`

	bulkhead.Settings
}

func (b *Bulkhead) validate() error {
	if b.Off && *b != (Bulkhead{Off: true}) {
		return errors.New("it is off and has limits; leave one of them out")
	}
	_, err := b.Check()
	return err
}

// provisionBulkhead finds the pool of the guard.
func (h *Handler) provisionBulkhead() error {
	if err := h.Bulkhead.validate(); err != nil {
		return fmt.Errorf("bulkhead: %w", err)
	}
	if !h.Bulkhead.Off {
		settings, _ := h.Bulkhead.Check() // checked
		h.pool = h.app.collector.Bulkhead(h.Name, settings)
	}
	return nil
}

func parseBulkhead(d *caddyfile.Dispenser, h *Handler) error {
	if d.NextArg() {
		if d.Val() != "off" || d.NextArg() {
			return option.ErrSyntax
		}
		h.Bulkhead.Off = true
		return nil
	}
	_, err := readOnly(bulkheadOptions(), d, "a bulkhead", &h.Bulkhead, "it says nothing; give total, per_workflow, queue, wait, rate or retries, or `off`")
	if err != nil {
		return err
	}
	return h.Bulkhead.validate()
}

func bulkheadOptions() option.Set[*Bulkhead] {
	return option.Set[*Bulkhead]{
		"total":        count(func(b *Bulkhead) *int { return &b.Total }),
		"per_workflow": count(func(b *Bulkhead) *int { return &b.PerWorkflow }),
		"queue":        option.Value("<number> | off", func(b *Bulkhead) *int { return &b.Queue }, countOrOff),
		"wait":         duration(func(b *Bulkhead) *jsontime.Duration { return &b.Wait }),
		"rate":         count(func(b *Bulkhead) *int { return &b.Rate }),
		"retries":      option.Value("<percent>% | off", func(b *Bulkhead) *int { return &b.Retries }, option.OrOff(parseRetries)),
	}
}

// parseRetries parses a part of the calls.
func parseRetries(d *caddyfile.Dispenser, into *int) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	number, percent := strings.CutSuffix(d.Val(), "%")
	n, err := strconv.Atoi(number)
	if err != nil || !percent || n < 1 || n > 100 {
		return fmt.Errorf("%q is no part of the calls (like 20%%); it must be from 1%% to 100%%, or `off`", d.Val())
	}
	*into = n
	return nil
}

// checkPriority refuses what is neither a class nor has a placeholder.
func checkPriority(text string) error {
	if text == "" || checkPlaceholder(text) == nil {
		return nil
	}
	if err := oneOf(text, bulkhead.Classes()...); err != nil {
		return fmt.Errorf("%w, or a placeholder like {http.request.header.Priority}", err)
	}
	return nil
}
