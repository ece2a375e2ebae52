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
	// once. Default: 30s.
	Wait caddy.Duration `json:"wait,omitempty"`

	// How long a workflow's calls of one class wait at most while others are preferred, at most 1h. Calls
	// of class `low` wait that long, if it is longer than `wait`. Default: 300s.
	Starve caddy.Duration `json:"starve,omitempty"`

	// Calls of one workflow in a second, on average and at once. Above it they get 429
	// `quota-exceeded`. Default: no limit.
	Rate int `json:"rate,omitempty"`

	// Bytes of request bodies that one workflow may have under way, where their length is known. A
	// single call may have more. Above it they get 429 `quota-exceeded`. Default: no limit.
	Bytes int64 `json:"bytes,omitempty"`

	// Memory for the bodies of one workflow's guarded requests and their answers, in bytes, within
	// `body_memory`. As there, the first 4 KiB of each body do not count, and what finds no room goes to a
	// temporary file. Default: no limit.
	Memory int64 `json:"memory,omitempty"`

	// For how long the calls of one workflow together may keep the upstream busy in each `time_window`, on
	// average and at once, from their admission until their answers have ended. Calls that have begun go
	// on. Above it new ones get 429 `quota-exceeded`. Default: no limit.
	Time caddy.Duration `json:"time,omitempty"`

	// The window of `time`, from 1s to 24h. Default: 1m.
	TimeWindow caddy.Duration `json:"time_window,omitempty"`

	// Retries that one workflow may send, in percent of its first calls, over 10 s; -1 for any number. A
	// retry is a call that would be sent again, or that says so in one of the `retry_headers`. Above it
	// retries get 429 `quota-exceeded`, and their keys stay free. Default: 20.
	Retries int `json:"retries,omitempty"`

	// Retries in a second that one workflow may send in any case, over 10 s; -1 for none. Default: 10.
	RetryFloor int `json:"retry_floor,omitempty"`
}

// settings returns the limits, with the defaults.
func (b *Bulkhead) settings() (bulkhead.Settings, error) {
	return bulkhead.Settings{
		Total: b.Total, PerWorkflow: b.PerWorkflow, Queue: b.Queue, Wait: time.Duration(b.Wait), Starve: time.Duration(b.Starve),
		Rate: b.Rate, Bytes: b.Bytes, Memory: b.Memory, Time: time.Duration(b.Time), TimeWindow: time.Duration(b.TimeWindow),
		Retries: b.Retries, RetryFloor: b.RetryFloor,
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
			return errSyntax
		}
		h.Bulkhead.Off = true
		return nil
	}
	at := originOf(d)
	if err := bulkheadOptions().readBlock(d, "a bulkhead", &h.Bulkhead, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return errors.New("it says nothing; give total, per_workflow, queue, wait, starve, rate, bytes, memory, time, time_window, retries or retry_floor, or `off`")
	}
	return h.Bulkhead.validate()
}

func bulkheadOptions() options[*Bulkhead] {
	return options[*Bulkhead]{
		"total": {usage: "total <number>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseCount(d, &b.Total) }},
		"per_workflow": {usage: "per_workflow <number>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error {
			return parseCount(d, &b.PerWorkflow)
		}},
		"queue":  {usage: "queue <number> | off", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseCountOrOff(d, &b.Queue) }},
		"wait":   {usage: "wait <duration>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseDuration(d, &b.Wait) }},
		"starve": {usage: "starve <duration>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseDuration(d, &b.Starve) }},
		"rate":   {usage: "rate <number>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseCount(d, &b.Rate) }},
		"bytes":  {usage: "bytes <size>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseSize(d, &b.Bytes) }},
		"memory": {usage: "memory <size>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseSize(d, &b.Memory) }},
		"time":   {usage: "time <duration>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error { return parseDuration(d, &b.Time) }},
		"time_window": {usage: "time_window <duration>", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error {
			return parseDuration(d, &b.TimeWindow)
		}},
		"retries": {usage: "retries <percent>% | off", parse: parseRetries},
		"retry_floor": {usage: "retry_floor <number> | off", parse: func(d *caddyfile.Dispenser, b *Bulkhead) error {
			return parseCountOrOff(d, &b.RetryFloor)
		}},
	}
}

// parseRetries parses a part of the calls, or `off` for no limit.
func parseRetries(d *caddyfile.Dispenser, b *Bulkhead) error {
	if !d.NextArg() {
		return errSyntax
	}
	if d.Val() == "off" {
		b.Retries = unbounded
		return nil
	}
	number, percent := strings.CutSuffix(d.Val(), "%")
	n, err := strconv.Atoi(number)
	if err != nil || !percent || n < 1 || n > 100 {
		return fmt.Errorf("%q is no part of the calls (like 20%%); it must be from 1%% to 100%%, or `off`", d.Val())
	}
	b.Retries = n
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
