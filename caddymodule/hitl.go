package caddymodule

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl/webhook"
)

// HITL says how people hear of what only they can decide, and how long that is kept. An
// escalation is recorded before anybody says "escalated", whatever stands here.
type HITL struct {
	// Sends each escalation to a receiver, until that has taken it. Default: escalations
	// are written to the log.
	Webhook *Webhook `json:"webhook,omitempty"`

	// How long an escalation is kept after its state last changed. One that nobody was told
	// of is kept for ever. Default: 2160h (90 days).
	Keep caddy.Duration `json:"keep,omitempty"`

	webhook *webhook.Notifier
}

// Webhook is a receiver of escalations. Messages are POSTed in the form of Standard
// Webhooks, signed, at least once each: the receiver tells repetitions by `webhook-id`.
// Redirects are not followed; 410 is final; 429 and 503 with `Retry-After` are heeded.
type Webhook struct {
	// The URL: https, or http on the loopback interface. Placeholders are replaced at load.
	URL string `json:"url,omitempty"`

	// What messages are signed with: `whsec_` and 24 to 64 random bytes in base64, each
	// usually a placeholder like `{env.HOOK_SECRET}` or `{file./run/secrets/hook}`. While a
	// receiver changes over there may be several, up to 8, each of which signs.
	Secrets []string `json:"secrets,omitempty"`

	// How long one attempt may take, at most 60s. Default: 10s.
	Timeout caddy.Duration `json:"timeout,omitempty"`
}

// provision checks the options. gateway names this gateway to the receiver.
func (h *HITL) provision(gateway string) error {
	if err := checkDuration(h.Keep); err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	if h.Webhook == nil {
		return nil
	}
	repl := caddy.NewReplacer()
	c := webhook.Config{Timeout: time.Duration(h.Webhook.Timeout), Gateway: gateway}
	var err error
	// An unset variable must not make another receiver of this one, or a weak secret.
	if c.URL, err = repl.ReplaceOrErr(h.Webhook.URL, true, true); err != nil {
		return fmt.Errorf("webhook: url: %w", err)
	}
	for i, secret := range h.Webhook.Secrets {
		if secret, err = repl.ReplaceOrErr(secret, true, true); err != nil {
			return fmt.Errorf("webhook: secret %d of %d: %w", i+1, len(h.Webhook.Secrets), err)
		}
		c.Secrets = append(c.Secrets, secret)
	}
	h.webhook, err = webhook.New(c)
	return err
}

// close gives up what provision has made.
func (h *HITL) close() {
	if h != nil && h.webhook != nil {
		h.webhook.Close()
	}
}

func parseHITL(d *caddyfile.Dispenser, a *App) error {
	if d.NextArg() {
		return errSyntax
	}
	a.HITL = new(HITL)
	at := originOf(d)
	if err := hitlOptions().readBlock(d, "hitl", a.HITL, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return errors.New("it says nothing; give webhook, keep or both")
	}
	return nil
}

// hitlOptions are the options of hitl.
func hitlOptions() options[*HITL] {
	return options[*HITL]{
		"webhook": {usage: "webhook <url> { ... }", parse: parseWebhook},
		"keep": {usage: "keep <duration>", parse: func(d *caddyfile.Dispenser, h *HITL) error {
			return parseDuration(d, &h.Keep)
		}},
	}
}

func parseWebhook(d *caddyfile.Dispenser, h *HITL) error {
	h.Webhook = new(Webhook)
	at := originOf(d)
	if err := parseWord(d, &h.Webhook.URL); err != nil {
		return err
	}
	if d.NextArg() {
		return errSyntax
	}
	if err := webhookOptions().readBlock(d, "a webhook", h.Webhook, at); err != nil {
		return err
	}
	if len(h.Webhook.Secrets) == 0 {
		return errors.New("it has no secret, so that the receiver could not know who sends; give it a block with `secret <placeholder>`")
	}
	return nil
}

// webhookOptions are the options of a webhook.
func webhookOptions() options[*Webhook] {
	return options[*Webhook]{
		"secret": {usage: "secret <placeholder>...", several: true, parse: func(d *caddyfile.Dispenser, w *Webhook) error {
			return parseWords(d, &w.Secrets)
		}},
		"timeout": {usage: "timeout <duration>", parse: func(d *caddyfile.Dispenser, w *Webhook) error {
			return parseDuration(d, &w.Timeout)
		}},
	}
}
