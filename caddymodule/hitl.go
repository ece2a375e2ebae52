package caddymodule

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// HITL (human in the loop) says how people are notified of escalations, the cases that only a
// person can decide. An escalation is always recorded before anything answers "escalated". It is kept
// for 90 days after it was delivered, or after the receiver refused it for good (410); one that is
// still to be delivered is kept until then.
type HITL struct {
	// The receiver to which each escalation is sent until it is accepted. Default: escalations are
	// written to the log.
	Webhook *Webhook `json:"webhook,omitempty"`

	// The issuers whose tokens may state roles, in the extension `roles`. An agent must not be among
	// them: it could give itself a role. Default: none.
	RoleIssuers []string `json:"role_issuers,omitempty"`

	// The URL of a site of this gateway on which operators sign in, such as https://ops.example.com.
	// Messages of the webhook then have a link to a page that shows what is asked, and decides.
	// Default: no link.
	Page string `json:"page,omitempty"`

	// What happens where nobody decides in time about a call that cannot be undone: a rollback has
	// come to it, or an agent reports an error of it. It may stand in the file of `rules` instead.
	// Default: it waits until somebody decides.
	UnreachableHuman *UnreachableHuman `json:"unreachable_human,omitempty"`

	// A file with rules for errors that agents report, in the form of ATD and AERR:
	// `{"hitl": {"rules": [...]}}`, or the list alone. They come before the gateway's own rule for
	// critical errors. A placeholder is replaced at load. Default: none.
	RulesFile string `json:"rules,omitempty"`

	webhook     *hitl.WebhookNotifier
	rules       hitl.RuleSet
	unreachable *hitl.Unreachable
}

// UnreachableHuman says what happens where nobody decides in time. Nobody's silence approves.
type UnreachableHuman struct {
	// `deny`, or `abort` for the same: the escalation expires, and nothing else happens. `pause`: it
	// expires, and its workflow is paused until a person resumes it. `escalate`: another role is
	// asked and notified, once. Required.
	Do string `json:"do,omitempty"`

	// The role that `escalate` asks. Required with it.
	Role string `json:"role,omitempty"`

	// How long people have, each time. Default: 24h.
	Within caddy.Duration `json:"within,omitempty"`
}

func (u *UnreachableHuman) read() (*hitl.Unreachable, error) {
	if u == nil {
		return nil, nil
	}
	if u.Do == "" {
		return nil, errors.New("unreachable_human: it does not say what happens; use deny, abort, pause, or escalate with a role")
	}
	if err := option.CheckDuration(u.Within); err != nil {
		return nil, fmt.Errorf("unreachable_human: within: %w", err)
	}
	read := &hitl.Unreachable{Do: hitl.UnreachableKind(u.Do), NextRole: u.Role, Within: time.Duration(u.Within)}
	if err := read.Check(); err != nil {
		return nil, fmt.Errorf("unreachable_human: %w", err)
	}
	return read, nil
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
}

// provision checks the options. gateway names this gateway to the receiver.
func (h *HITL) provision(gateway string) error {
	err := checkOptions(hitlOptions(), &App{HITL: h})
	if err != nil {
		return err
	}
	if h.unreachable, err = h.UnreachableHuman.read(); err != nil {
		return err
	}
	if h.RulesFile != "" {
		file, err := caddy.NewReplacer().ReplaceOrErr(h.RulesFile, true, true)
		var text []byte
		if err == nil {
			text, err = os.ReadFile(file)
		}
		var set hitl.RuleSet
		if err == nil {
			set, err = hitl.ParseRules(text)
		}
		if err == nil && set.Unreachable != nil && h.unreachable != nil {
			err = errors.New("unreachable_human stands in the configuration too; leave it out in one of them")
		}
		if set.Unreachable != nil {
			h.unreachable = set.Unreachable
		}
		h.rules = set
		if err != nil {
			return &invalid{[]string{"hitl.rules"}, fmt.Errorf("rules: %s: %w", h.RulesFile, err)}
		}
	}
	if h.Webhook == nil {
		return nil
	}
	repl := caddy.NewReplacer()
	c := hitl.WebhookConfig{Gateway: gateway}
	// An unset variable must not change the receiver or weaken a secret.
	if c.URL, err = repl.ReplaceOrErr(h.Webhook.URL, true, true); err == nil {
		err = hitl.CheckURL(c.URL)
	}
	if err != nil {
		return &invalid{[]string{"hitl.webhook"}, fmt.Errorf("webhook: url: %w", err)}
	}
	for i, secret := range h.Webhook.Secrets {
		if secret, err = repl.ReplaceOrErr(secret, true, true); err == nil {
			err = hitl.CheckSecret(secret)
		}
		if err != nil {
			return &invalid{[]string{fmt.Sprintf("hitl.webhook.secret.%d", i+1)}, fmt.Errorf("webhook: secret %d of %d: %w", i+1, len(h.Webhook.Secrets), err)}
		}
		c.Secrets = append(c.Secrets, secret)
	}
	h.webhook, err = hitl.NewWebhook(c)
	return err
}

// checkRole checks a role and the callers that have it.
func checkRole(role string, callers []string) error {
	if role == "" || len(role) > maxRole || strings.ContainsFunc(role, func(r rune) bool { return r <= ' ' || r == ',' || r == 0x7f }) {
		return fmt.Errorf("%.40q is no role: up to %d bytes without blanks and commas", role, maxRole)
	}
	return checkOperators(callers)
}

// checkPage checks the URL of the site with the pages of escalations.
func checkPage(text string) error {
	if text == "" {
		return nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Scheme != "https" && u.Scheme != "http" {
		return fmt.Errorf("%q is no URL of a site; use one like https://ops.example.com", text)
	}
	return nil
}

// Roles say who has which role in decisions, on one site: the names of callers are of that site.
type Roles struct {
	// Callers by role, named like `operators`. Who is one of `operators` has the role `operator`, for
	// which escalations are that require no other. Default: nobody; who has the admin API has every
	// role.
	Roles map[string][]string `json:"roles,omitempty"`

	// A placeholder with the roles of the user whom Caddy has authenticated, separated by commas or
	// blanks. It must not come from what a caller writes. Default: none.
	RolesFrom string `json:"roles_from,omitempty"`
}

// warnRoles warns of approvals by a role that the configuration gives to nobody: only the admin API
// can give them. Tokens and users can bring roles that no configuration names.
func (a *App) warnRoles() {
	a.guards.mu.Lock()
	defer a.guards.mu.Unlock()
	if a.HITL != nil && len(a.HITL.RoleIssuers) > 0 {
		return
	}
	given := map[string]bool{"": true, hitl.DefaultRole: true}
	for _, site := range a.guards.sites {
		if site.RolesFrom != "" {
			return
		}
		for role := range site.Roles {
			given[role] = true
		}
	}
	for _, h := range a.guards.all {
		for _, action := range h.actions {
			if ask := action.Approve; ask != nil && !given[ask.Role] {
				given[ask.Role] = true // one warning a role
				h.logger.Warn("nobody has the role that has to approve calls, so only the admin API can approve them; give it to callers with `role`",
					slog.String("guard", h.Name), slog.String("action", action.Name), slog.String("role", ask.Role))
			}
		}
	}
}

// roleOptions are the options of a guard and of agent_guard_endpoints that say who decides.
func roleOptions() option.Set[*Roles] {
	return option.Set[*Roles]{
		"role": repeated(option.Value("<role> <callers...>", func(o *Roles) *map[string][]string { return &o.Roles },
			parseRole, checkRoles)),
		"roles_from": word("<placeholder>", func(o *Roles) *string { return &o.RolesFrom }, checkPlaceholder),
	}
}

func parseRole(d *caddyfile.Dispenser, into *map[string][]string) error {
	var role string
	var callers []string
	if err := cmp.Or(parseWord(d, &role), parseWords(d, &callers)); err != nil {
		return err
	}
	if *into == nil {
		*into = map[string][]string{}
	}
	(*into)[role] = append((*into)[role], callers...)
	return nil
}

func checkRoles(all map[string][]string) error {
	for role, callers := range all {
		if err := checkRole(role, callers); err != nil {
			return err
		}
	}
	return nil
}

// rolesOf are the roles of a caller whom the gateway knows, by its name here; token is the caller's
// own token, or nil.
func (h *Handler) rolesOf(r *http.Request, name string, token *ect.Token) (roles []string) {
	if slices.Contains(h.Operators, name) {
		roles = append(roles, hitl.DefaultRole)
	}
	for role, callers := range h.Roles.Roles {
		if slices.Contains(callers, name) {
			roles = append(roles, role)
		}
	}
	switch o := h.app.HITL; {
	case token != nil && o != nil && slices.Contains(o.RoleIssuers, token.Author()):
		stated, _ := token.Ext().Texts("roles")
		roles = append(roles, stated...)
	case token == nil && h.RolesFrom != "":
		stated, _ := host{h}.Expand(r, h.RolesFrom)
		roles = append(roles, strings.FieldsFunc(stated, func(r rune) bool { return r <= ' ' || r == ',' })...)
	}
	return roles
}

// escalationReader identifies who reads or decides escalations. body is that of a decision, to which
// a token has to be bound; nil where nothing is decided. token is the caller's own, or nil.
func (h *Handler) escalationReader(e *engine, policy *tokenPolicy, r *http.Request, body []byte) (who *hitl.Reader, token *ect.Token, err error) {
	who, token, err = h.readerOf(e, policy, r, body != nil)
	if err != nil || token == nil || body == nil {
		return who, token, err
	}
	if token.InputHash() != ect.Sum(body) {
		return nil, nil, &ect.Error{Code: ect.CodeInputHash}
	}
	if err := policy.forCalls().Bind(r.Context(), []*ect.Token{token}, router.UseAt("decision", "", body)); err != nil {
		return nil, nil, err
	}
	digest := token.Digest()
	who.Signed, who.Token = body, hex.EncodeToString(digest[:])
	return who, token, nil
}

// readerOf is escalationReader by the header alone. A token that has to be bound to the body says so, and is not
// used up: its hash is still to be compared.
func (h *Handler) readerOf(e *engine, policy *tokenPolicy, r *http.Request, bound bool) (who *hitl.Reader, token *ect.Token, err error) {
	tokens, err := h.handler.VerifyTokens(policy.forCalls(), r, nil, false)
	if err == nil && tokens.Late != nil {
		err = guard.RefusedToken(tokens.Late)
	}
	if err == nil && !bound {
		err = policy.forCalls().Spend(host{h}, &tokens, r)
	}
	if err != nil {
		return nil, nil, err
	}
	who = new(hitl.Reader)
	if tokens.Issuer() != "" {
		token = tokens.Own[0]
		if bound && (len(tokens.Own) > 1 || token.InputHash().IsZero()) {
			return nil, nil, &ect.Error{Code: ect.CodeInputHash}
		}
	}
	name, err := h.handler.Callers.Of(r, tokens.Issuer(), e.calls.Executions.Keyed)
	if err != nil || !caller.Verified(name) {
		return who, token, err
	}
	who.Name = h.handler.Callers.Operator(r, name)
	who.Roles = h.rolesOf(r, who.Name, token)
	return who, token, nil
}

// close releases what provision has opened.
func (h *HITL) close() {
	if h != nil && h.webhook != nil {
		h.webhook.Close()
	}
}

// parseHITL reads
//
//	hitl {
//		webhook <url> {
//			secret <placeholder>...
//		}
//		unreachable_human deny | abort | pause | escalate <role> {
//			within <duration>
//		}
//		role_issuers <issuers...>
//		page <url>
//		rules <file>
//	}
func parseHITL(d *caddyfile.Dispenser, a *App) error {
	a.HITL = new(HITL)
	_, err := readOnly(hitlOptions(), d, "hitl", a, "it says nothing; leave it out for the defaults")
	return err
}

func hitlOptions() option.Set[*App] {
	return option.Set[*App]{
		"webhook": placed("hitl.webhook", option.Option[*App]{Usage: "<url> { ... }", Parse: parseWebhook}),
		"role_issuers": repeated(words("<issuers...>", func(a *App) *[]string { return &a.HITL.RoleIssuers },
			each(checkIdentity))),
		"rules": placed("hitl.rules", word("<file>", func(a *App) *string { return &a.HITL.RulesFile })),
		"page":  word("<url>", func(a *App) *string { return &a.HITL.Page }, checkPage),
		"unreachable_human": {Usage: "deny | abort | pause | escalate <role> { within <duration> }", Parse: func(d *caddyfile.Dispenser, a *App) error {
			u := new(UnreachableHuman)
			a.HITL.UnreachableHuman = u
			at := originOf(d)
			if err := parseWord(d, &u.Do); err != nil {
				return err
			}
			if d.NextArg() {
				u.Role = d.Val()
			}
			err := option.Set[*UnreachableHuman]{
				"within": duration(func(u *UnreachableHuman) *caddy.Duration { return &u.Within }),
			}.Read(d, "unreachable_human", u, at)
			if err == nil {
				_, err = u.read()
			}
			return err
		}},
	}
}

func parseWebhook(d *caddyfile.Dispenser, a *App) error {
	hook := new(Webhook)
	a.HITL.Webhook = hook
	at := originOf(d)
	if err := parseWord(d, &hook.URL); err != nil {
		return err
	}
	if !strings.Contains(hook.URL, "{") {
		if err := hitl.CheckURL(hook.URL); err != nil {
			return err
		}
	}
	if err := webhookOptions().Read(d, "a webhook", a, at); err != nil {
		return err
	}
	if len(hook.Secrets) == 0 {
		return errors.New("it has no secret, so that the receiver could not know who sends; give it a block with `secret <placeholder>`")
	}
	return nil
}

// webhookOptions are the options of a webhook.
func webhookOptions() option.Set[*App] {
	return option.Set[*App]{
		"secret": {Usage: "<placeholder>...", Several: true, Parse: func(d *caddyfile.Dispenser, a *App) error {
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
	}
}

// startEscalations makes the dispatcher, which sends escalations to the receiver of the latest configuration. It lives as
// long as the engine, over reloads, and resumes after a restart.
func (e *engine) startEscalations() {
	e.calls.Escalations.OnDecided(e.decided)
	e.calls.Escalations.SetEvidence(e.escalationEvidence)
	e.calls.Escalations.OnOpened(func(esc hitl.Escalation) {
		e.emit(eventEscalated, map[string]any{
			"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "upstream": esc.Links.Upstream,
		})
	})
	e.escalations = startJob(func(ctx context.Context) {
		var reaching sync.WaitGroup
		reaching.Go(func() {
			e.calls.Escalations.Reach(ctx, hitl.Outreach{
				Inform: newUndoSender(e).informHold, OnAnswer: e.heldAt,
				OnError: func(err error) {
					e.logger.Error("participants cannot be told what holds a workflow", zap.Error(err))
				},
			})
		})
		e.calls.Escalations.Deliver(ctx, hitl.Delivery{
			Notify: e.notify, OnAttempt: e.attempted,
			OnError: func(err error) { e.logger.Error("notifying of escalations is held up", zap.Error(err)) },
		})
		reaching.Wait()
	})
}

// escalationEvidence makes the writes that record an escalation, or what became of it, in the ledger.
// Without an identity there is none.
func (e *engine) escalationEvidence(ctx context.Context, old, esc *hitl.Escalation) (string, *store.Batch, error) {
	policy := e.latestPolicy()
	if policy == nil {
		return "", nil, nil
	}
	now, err := e.calls.Store.Now(ctx)
	if err != nil {
		return "", nil, err
	}
	draft, err := policy.Events.Escalation(now, old, esc)
	if err != nil {
		return "", nil, err
	}
	batch, err := policy.Evidence.NewBatch(now.Add(keepEscalations), nil, draft)
	return draft.ID(), batch, err
}

// escalateErrors adds to the batch that records agents' errors what they escalate (ATD "HITL
// Escalation on Error", and "Interaction with HITL", case 1): a critical error, and any of a call
// that cannot be undone. It is once for a call, and without one once for an issuer and a workflow,
// so that an agent floods nobody.
func (t *tokenPolicy) escalateErrors(ctx context.Context, e *engine, tokens []*ect.Token, batch *store.Batch) error {
	opened := map[string]bool{}
	for _, token := range tokens {
		if !token.Proven() || token.Event() != ect.EventError {
			continue
		}
		checkpoint := evidence.NamedCheckpoint(token.Ext())
		o := errorOpening(token)
		of, fits := e.ruleFor(token)
		if fits && !opened[of.Key] {
			opened[of.Key] = true
			p, err := e.calls.Escalations.Prepare(ctx, of)
			if err != nil {
				return err
			}
			batch.Join(p.Batch)
		}
		irreversible, err := t.irreversible(ctx, token.Workflow(), checkpoint)
		if err != nil {
			return err
		}
		switch severity, _ := token.Ext().Text(ect.MemberSeverity); {
		case irreversible:
			o.Cause, o.Summary = hitl.CauseIrreversible, "An agent reports an error of a call that cannot be undone."
		case severity == "critical" && !fits:
			o.Cause, o.Summary = hitl.CauseError, "An agent reports a critical error."
		default:
			continue
		}
		if opened[o.Key] {
			continue // two errors of one request
		}
		opened[o.Key] = true
		p, err := e.calls.Escalations.Prepare(ctx, o)
		if err != nil {
			return err
		}
		batch.Join(p.Batch)
	}
	return nil
}

// errorOpening is an escalation about an agent's error: once for a call, and without one once for an
// issuer and a workflow.
func errorOpening(token *ect.Token) hitl.Opening {
	checkpoint := evidence.NamedCheckpoint(token.Ext())
	return hitl.Opening{
		Key: "error " + token.Workflow() + " " + cmp.Or(checkpoint, "issuer "+token.Author()), Level: hitl.Approval, Workflow: token.Workflow(),
		Links: hitl.Links{Error: token.NodeID(), Checkpoint: checkpoint},
	}
}

// ruleFor is the escalation that the first rule of the deployment opens which an agent's error fits. It
// reports false if there is none.
func (e *engine) ruleFor(token *ect.Token) (o hitl.Opening, fits bool) {
	a := e.activeConfigs.latest()
	if a == nil || a.HITL == nil {
		return o, false
	}
	members := map[string]string{}
	for name, m := range map[string]ect.Member{
		"severity": ect.MemberSeverity, "error_type": ect.MemberErrorType, "description": ect.MemberDescription,
	} {
		members[name], _ = token.Ext().Text(m)
	}
	if o, fits = a.HITL.rules.Opening(members); fits {
		about := errorOpening(token)
		o.Key, o.Workflow, o.Links = o.Key+" "+about.Key, about.Workflow, about.Links
	}
	return o, fits
}

// irreversible reports whether a checkpoint is recorded, and says that its call cannot be undone.
func (t *tokenPolicy) irreversible(ctx context.Context, workflow, checkpoint string) (bool, error) {
	if checkpoint == "" {
		return false, nil
	}
	log := t.Evidence.Log()
	entry, err := log.Known(ctx, workflow, checkpoint)
	if err != nil || entry == nil {
		return false, err
	}
	r := evidence.RecordOf(entry, t.Events.Own(entry))
	return r.IsCheckpoint() && !r.Reversible, nil
}

// keepEscalations is how long the ledger keeps the tokens of escalations at least.
const keepEscalations = 90 * 24 * time.Hour

// decided logs and emits what was decided, or expired. The reason is for the record only (P8).
func (e *engine) decided(esc hitl.Escalation) {
	by := ""
	if n := len(esc.Decisions); n > 0 && (esc.Status == hitl.Approved || esc.Status == hitl.Denied) {
		by = esc.Decisions[n-1].By
	}
	e.logger.Info("an escalation was decided",
		append(escalationFields(&esc), zap.String("status", string(esc.Status)), zap.String("by", by), zap.String("proposal", string(esc.Proposal.Kind)))...)
	e.emit(eventDecided, map[string]any{
		"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "status": string(esc.Status), "by": by,
		"upstream": esc.Links.Upstream,
	})
}

// adoptHITL applies the options of the latest configuration.
func (e *engine) adoptHITL(o *HITL) {
	var unreachable *hitl.Unreachable
	if o != nil {
		unreachable = o.unreachable
	}
	e.calls.Escalations.Configure(unreachable)
	e.escalations.begin()
}

// notify is the Delivery.Notify with the latest configuration.
func (e *engine) notify(ctx context.Context, esc hitl.Escalation) error {
	a := e.activeConfigs.latest()
	switch {
	case a == nil:
		return errNotOpen // retried with the next configuration
	case a.HITL != nil && a.HITL.webhook != nil:
		if a.HITL.Page != "" {
			esc.Page = strings.TrimSuffix(a.HITL.Page, "/") + hitl.Path + "/" + esc.ID + "/page?key=" + e.calls.Escalations.LinkKey(esc.ID)
		}
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
	result := "taken"
	if err != nil {
		result = "failed"
	}
	e.counts.add(deliveries, result, 1)
	switch {
	case esc.State == hitl.Undeliverable:
		e.logger.Error("an escalation cannot be delivered: the receiver does not take it",
			append(escalationFields(&esc), zap.Error(err))...)
		e.emit(eventUndeliverable, map[string]any{
			"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "upstream": esc.Links.Upstream,
		})
	case err != nil:
		e.logger.Warn("the receiver has not taken an escalation; it is tried again",
			append(escalationFields(&esc), zap.Time("next", esc.NextAttempt), zap.Error(err))...)
	}
}

// escalationFields returns the log fields of an escalation: ids, nothing secret (P8).
func escalationFields(esc *hitl.Escalation) []zap.Field {
	fields := []zap.Field{
		zap.String("escalation", esc.ID), zap.Stringer("level", esc.Level), zap.String("cause", string(esc.Cause)),
		zap.Int("attempts", esc.Attempts),
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
	_, err := e.calls.Escalations.Open(ctx, hitl.Opening{
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

// countEscalations counts the escalations for metrics; nil if that fails.
func (e *engine) countEscalations() ([]escalationReport, map[string]time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), stateWithin)
	defer cancel()
	counts, err := e.calls.Escalations.Count(ctx)
	now, late := e.calls.Store.Now(ctx)
	if err != nil || late != nil {
		return nil, nil
	}
	var all []escalationReport
	waiting := map[string]time.Duration{}
	for l := hitl.Pause; l <= hitl.Stop; l++ {
		for _, s := range hitl.States() {
			for status, n := range counts.N[l][s] {
				all = append(all, escalationReport{Level: l.String(), State: string(s), Status: string(status), N: n})
			}
		}
		waiting[l.String()] = 0
		if oldest := counts.Oldest[l]; !oldest.IsZero() {
			waiting[l.String()] = max(0, now.Sub(oldest))
		}
	}
	return all, waiting
}
