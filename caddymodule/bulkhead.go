package caddymodule

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
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

	// Calls at the upstream at a time. This and all other limits here are of each gateway: of several that share a
	// store, each allows so much; divide by their number what the upstream can take. Default: 32768.
	Total int `json:"total,omitempty"`

	// Calls of one workflow at the upstream at a time. Default: 16384.
	PerWorkflow int `json:"per_workflow,omitempty"`

	// Calls of one workflow that wait at a time; -1 for none. Default: 1024.
	Queue int `json:"queue,omitempty"`

	// How long a call waits for a permit, at most 1h. A call that would miss its deadline is refused at
	// once, after 16 calls have shown how long they take. Calls of class `low` wait up to 300 s, after which nobody
	// is preferred to them. Default: 30s.
	Wait caddy.Duration `json:"wait,omitempty"`

	// Calls of one workflow in a second, on average and at once. Above it they get 429
	// `quota-exceeded`. Default: no limit.
	Rate int `json:"rate,omitempty"`

	// Retries that one workflow may send, in percent of its first calls, over 10 s; -1 for any number. A
	// retry is a call that would be sent again, or that counts its attempts in a header field. Ten a second may
	// be sent in any case. Above both retries get 429 `quota-exceeded`, and their keys stay free. Default: 20.
	Retries int `json:"retries,omitempty"`
}

// settings returns the limits, with the defaults.
func (b *Bulkhead) settings() (bulkhead.Settings, error) {
	return bulkhead.Settings{
		Total: b.Total, PerWorkflow: b.PerWorkflow, Queue: b.Queue, Wait: time.Duration(b.Wait),
		Rate: b.Rate, Retries: b.Retries,
	}.Check()
}

func (b *Bulkhead) validate() error {
	if b.Off && *b != (Bulkhead{Off: true}) {
		return errors.New("it is off and has limits; leave one of them out")
	}
	_, err := b.settings()
	return err
}

// provisionBulkhead finds the pool of the guard.
func (h *Handler) provisionBulkhead() error {
	if err := h.Bulkhead.validate(); err != nil {
		return fmt.Errorf("bulkhead: %w", err)
	}
	if h.Bulkhead.Off {
		return nil
	}
	settings, err := h.Bulkhead.settings()
	if err != nil {
		return err
	}
	h.pool = h.app.collector.Bulkhead(h.Name, settings)
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
		"queue":        value("<number> | off", func(b *Bulkhead) *int { return &b.Queue }, parseCountOrOff),
		"wait":         duration(func(b *Bulkhead) *caddy.Duration { return &b.Wait }),
		"rate":         count(func(b *Bulkhead) *int { return &b.Rate }),
		"retries":      value("<percent>% | off", func(b *Bulkhead) *int { return &b.Retries }, parseRetries),
	}
}

// parseRetries parses a part of the calls, or `off` for no limit.
func parseRetries(d *caddyfile.Dispenser, into *int) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	if d.Val() == "off" {
		*into = unbounded
		return nil
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
