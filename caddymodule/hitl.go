package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// HITL (human in the loop) says how people are notified of escalations, the cases that only a
// person can decide, and how long those are kept. An escalation is always recorded before anything
// answers "escalated".
type HITL struct {
	// The receiver to which each escalation is sent until it is accepted. Default: escalations are
	// written to the log.
	Webhook *Webhook `json:"webhook,omitempty"`

	// How long an escalation is kept after it was delivered, or after the receiver refused it for
	// good (410). One that is still to be delivered is kept until then. Default: 2160h (90 days).
	Keep caddy.Duration `json:"keep,omitempty"`

	webhook *hitl.WebhookNotifier
}

// Webhook is a receiver of escalations. Messages are sent as POST in the format of Standard
// Webhooks, signed, at least once each; repetitions have the same `webhook-id`. Redirects are not
// followed, 410 ends the attempts, and after 429 and 503 the next attempt follows `Retry-After`.
type Webhook struct {
	// The URL: https, or http on the loopback interface. Placeholders are replaced at load.
	URL string `json:"url,omitempty"`

	// The keys that sign messages: `whsec_` and 24 to 64 random bytes in base64, each usually a
	// placeholder like `{env.HOOK_SECRET}` or `{file./run/secrets/hook}`. At least one and up to 8;
	// each signs every message, so that a receiver can change from one to another.
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
	c := hitl.WebhookConfig{Timeout: time.Duration(h.Webhook.Timeout), Gateway: gateway}
	var err error
	// An unset variable must not change the receiver or weaken a secret.
	if c.URL, err = repl.ReplaceOrErr(h.Webhook.URL, true, true); err == nil {
		err = hitl.CheckURL(c.URL)
	}
	if err != nil {
		return &wrong{"hitl.webhook", fmt.Errorf("webhook: url: %w", err)}
	}
	for i, secret := range h.Webhook.Secrets {
		if secret, err = repl.ReplaceOrErr(secret, true, true); err == nil {
			err = hitl.CheckSecret(secret)
		}
		if err != nil {
			return &wrong{fmt.Sprintf("hitl.webhook.secret.%d", i+1), fmt.Errorf("webhook: secret %d of %d: %w", i+1, len(h.Webhook.Secrets), err)}
		}
		c.Secrets = append(c.Secrets, secret)
	}
	h.webhook, err = hitl.NewWebhook(c)
	return err
}

// close releases what provision has opened.
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
	if err := hitlOptions().readBlock(d, "hitl", a, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return errors.New("it says nothing; give webhook, keep or both")
	}
	return nil
}

func hitlOptions() options[*App] {
	return options[*App]{
		"webhook": {usage: "webhook <url> { ... }", parse: parseWebhook},
		"keep": {usage: "keep <duration>", parse: func(d *caddyfile.Dispenser, a *App) error {
			return parseDuration(d, &a.HITL.Keep)
		}},
	}
}

func parseWebhook(d *caddyfile.Dispenser, a *App) error {
	hook := new(Webhook)
	a.HITL.Webhook = hook
	at := originOf(d)
	a.writtenAt("hitl.webhook", d.Token())
	if err := parseWord(d, &hook.URL); err != nil {
		return err
	}
	if !strings.Contains(hook.URL, "{") {
		if err := hitl.CheckURL(hook.URL); err != nil {
			return err
		}
	}
	if d.NextArg() {
		return errSyntax
	}
	if err := webhookOptions().readBlock(d, "a webhook", a, at); err != nil {
		return err
	}
	if len(hook.Secrets) == 0 {
		return errors.New("it has no secret, so that the receiver could not know who sends; give it a block with `secret <placeholder>`")
	}
	return nil
}

// webhookOptions are the options of a webhook.
func webhookOptions() options[*App] {
	return options[*App]{
		"secret": {usage: "secret <placeholder>...", several: true, parse: func(d *caddyfile.Dispenser, a *App) error {
			at, hook := d.Token(), a.HITL.Webhook
			before := len(hook.Secrets)
			if err := parseWords(d, &hook.Secrets); err != nil {
				return err
			}
			if len(hook.Secrets) > hitl.MaxSecrets {
				return fmt.Errorf("there are %d; give one, or up to %d while a receiver changes over", len(hook.Secrets), hitl.MaxSecrets)
			}
			for i, secret := range hook.Secrets[before:] {
				a.writtenAt(fmt.Sprintf("hitl.webhook.secret.%d", before+i+1), at)
				if strings.Contains(secret, "{") {
					continue
				}
				if err := hitl.CheckSecret(secret); err != nil {
					return err
				}
			}
			return nil
		}},
		"timeout": {usage: "timeout <duration>", parse: func(d *caddyfile.Dispenser, a *App) error {
			if err := parseDuration(d, &a.HITL.Webhook.Timeout); err != nil {
				return err
			}
			return hitl.CheckTimeout(time.Duration(a.HITL.Webhook.Timeout))
		}},
	}
}

// escalating has the engine's store of escalations and the dispatcher that sends them to
// the receiver of the latest configuration. Both live as long as the engine, over reloads.
type escalating struct {
	store *hitl.Store
	begin func() // starts the dispatcher
	stop  context.CancelFunc
	ended chan struct{}
}

// escalationAttempt bounds one attempt to notify: longer than a webhook's timeout may be.
const escalationAttempt = 65 * time.Second

// startEscalations reads what holds workflows, and makes the dispatcher.
func (e *engine) startEscalations(ctx context.Context) error {
	x := &e.escalations
	x.store = hitl.NewStore(e.store, e.ring, 0)
	unreadable, err := x.store.Load(ctx)
	if err != nil {
		return err
	}
	if unreadable > 0 {
		e.logger.Error("some escalations cannot be read; they hold no workflow any more", zap.Int("unreadable", unreadable))
	}
	x.store.OnDecided(e.decided)
	x.store.OnOpened(func(esc hitl.Escalation) {
		e.emit(eventEscalated, map[string]any{
			"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "upstream": esc.Links.Upstream,
		})
	})
	dispatcher := hitl.NewDispatcher(x.store, hitl.NotifierFunc(e.notify), hitl.DispatcherOptions{
		Attempt: escalationAttempt, OnAttempt: e.attempted,
		OnError: func(err error) { e.logger.Error("notifying of escalations is held up", zap.Error(err)) },
	})
	running, stop := context.WithCancel(context.Background())
	x.stop = stop
	x.ended = make(chan struct{})
	begun := make(chan struct{})
	x.begin = sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(x.ended)
		select { // waits for the first configuration, which has the receiver
		case <-begun:
			dispatcher.Run(running)
		case <-running.Done():
		}
	}()
	return nil
}

// decided logs and emits what was decided, or expired. The reason is for the record only (P8).
func (e *engine) decided(esc hitl.Escalation) {
	by := ""
	if n := len(esc.Decisions); n > 0 && (esc.Status == hitl.Approved || esc.Status == hitl.Denied) {
		by = esc.Decisions[n-1].By
	}
	e.logger.Info("an escalation was decided",
		append(escalationFields(&esc), zap.Stringer("status", esc.Status), zap.String("by", by), zap.String("proposal", string(esc.Proposal.Kind)))...)
	e.emit(eventDecided, map[string]any{
		"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "status": esc.Status.String(), "by": by,
		"upstream": esc.Links.Upstream,
	})
}

// adopt applies the options of the latest configuration.
func (x *escalating) adopt(o *HITL) {
	keep := time.Duration(0)
	if o != nil {
		keep = time.Duration(o.Keep)
	}
	x.store.SetKeep(keep)
	x.begin()
}

// end stops the dispatcher and waits until it no longer uses the store. The dispatcher
// resumes after a restart.
func (x *escalating) end() {
	x.stop()
	<-x.ended
}

// notify implements hitl.Notifier with the latest configuration.
func (e *engine) notify(ctx context.Context, esc hitl.Escalation) error {
	a := e.activeConfigs.latest()
	switch {
	case a == nil:
		return errNotOpen // retried with the next configuration
	case a.HITL != nil && a.HITL.webhook != nil:
		return a.HITL.webhook.Notify(ctx, esc)
	}
	level := zapcore.WarnLevel
	if esc.Level == hitl.Stop {
		level = zapcore.ErrorLevel
	}
	e.logger.Log(level, "escalation: "+esc.Summary, escalationFields(&esc)...)
	return nil
}

// attempted logs and counts an attempt to notify of an escalation.
func (e *engine) attempted(esc hitl.Escalation, err error) {
	e.counts.EscalationNotified(err == nil)
	switch {
	case esc.State == hitl.Undeliverable:
		e.logger.Error("an escalation cannot be delivered: the receiver does not take it",
			append(escalationFields(&esc), zap.Error(err))...)
		e.emit(eventUndeliverable, map[string]any{
			"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "upstream": esc.Links.Upstream,
		})
	case err != nil:
		e.logger.Warn("the receiver has not taken an escalation; it is tried again",
			append(escalationFields(&esc), zap.Time("next", esc.Delivery.Next), zap.Error(err))...)
	}
}

// escalationFields returns the log fields of an escalation: ids, nothing secret (P8).
func escalationFields(esc *hitl.Escalation) []zap.Field {
	fields := []zap.Field{
		zap.String("escalation", esc.ID), zap.Stringer("level", esc.Level), zap.String("cause", string(esc.Cause)),
		zap.Int("attempts", esc.Delivery.Attempts),
	}
	for name, id := range map[string]string{
		"workflow": esc.Workflow, "checkpoint": esc.Links.Checkpoint, "rollback": esc.Links.Rollback,
		"error_token": esc.Links.Error, "execution": esc.Links.Execution, "upstream": esc.Links.Upstream,
	} {
		if id != "" {
			fields = append(fields, zap.String(name, id))
		}
	}
	return fields
}

// escalateCircuit opens the escalation of an upstream that does not recover (ATD, HITL case
// 4). The breaker reports it once per outage. The start of the outage identifies it,
// because the generation of a forgotten breaker starts again.
func (e *engine) escalateCircuit(ev breaker.Event) {
	ctx, cancel := context.WithTimeout(context.Background(), circuitPatience)
	defer cancel()
	name := ev.Key.Upstream
	if ev.Key.Class != "" {
		name += " (" + ev.Key.Class + " calls)"
	}
	_, err := e.escalations.store.Open(ctx, hitl.Opening{
		Key:   "breaker " + ev.Key.Upstream + " " + ev.Key.Class + " " + strconv.FormatInt(ev.Time.UnixNano(), 10),
		Level: hitl.Approval, Cause: hitl.CauseBreakerOpen,
		Summary: fmt.Sprintf("The upstream %s does not come back: %d probes in a row have failed, the last one with: %s.",
			name, ev.FailedProbes, ev.Cause),
		Links: hitl.Links{Upstream: ev.Key.Upstream, Checkpoint: guard.ParseEvidence(ev.Evidence).Checkpoint},
	})
	if err != nil && !errors.Is(err, store.ErrClosed) {
		e.logger.Error("an escalation cannot be recorded: an upstream does not come back", append(circuitFields(ev), zap.Error(err))...)
	}
}

// resealEscalations encrypts them anew. Those that no key of the ring opens are already
// lost, and do not stop the others.
func (e *engine) resealEscalations(ctx context.Context) error {
	_, err := e.escalations.store.Reseal(ctx)
	if errors.Is(err, hitl.ErrUnreadable) {
		e.logger.Error("some escalations are damaged, and are left as they are", zap.Error(err))
		return nil
	}
	return err
}

// countEscalations counts the escalations for metrics; nil if that fails.
func (e *engine) countEscalations() []escalationReport {
	ctx, cancel := context.WithTimeout(context.Background(), stateWithin)
	defer cancel()
	counts, err := e.escalations.store.Count(ctx)
	if err != nil {
		return nil
	}
	var all []escalationReport
	for l := hitl.Pause; l <= hitl.Stop; l++ {
		for _, s := range hitl.States() {
			all = append(all, escalationReport{Level: l.String(), State: s.String(), N: counts[l][s]})
		}
	}
	return all
}
