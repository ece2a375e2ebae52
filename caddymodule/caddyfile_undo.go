package caddymodule

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
)

// termsOptions are the options of a guard and of its actions that say how checkpoints are
// made and kept.
func termsOptions() options[*undoing.Terms] {
	type dispenser = *caddyfile.Dispenser
	opts := options[*undoing.Terms]{
		"checkpoint_ttl": {usage: "checkpoint_ttl <duration>", parse: func(d dispenser, t *undoing.Terms) error {
			return parseDuration(d, &t.CheckpointTTL)
		}},
		"snapshot_timeout": {usage: "snapshot_timeout <duration>", parse: func(d dispenser, t *undoing.Terms) error {
			return parseDuration(d, &t.SnapshotTimeout)
		}},
		"max_image": {usage: "max_image <size>", parse: func(d dispenser, t *undoing.Terms) error {
			return parseSize(d, &t.MaxImage)
		}},
	}
	for name, into := range map[string]func(*undoing.Terms) *string{
		"undo_auth":         func(t *undoing.Terms) *string { return &t.UndoAuth },
		"on_snapshot_error": func(t *undoing.Terms) *string { return &t.OnSnapshotError },
		"on_lost":           func(t *undoing.Terms) *string { return &t.OnLost },
		"on_changed":        func(t *undoing.Terms) *string { return &t.OnChanged },
	} {
		words := undoing.Choices()[name]
		opts[name] = option[*undoing.Terms]{
			usage: name + " " + words[0] + " | " + words[1],
			parse: func(d dispenser, t *undoing.Terms) error { return parseChoice(d, into(t), words...) },
		}
	}
	return opts
}

// waysOptions are the ways to undo a call.
func waysOptions() options[*undoing.Ways] {
	return options[*undoing.Ways]{
		"restore":    {usage: "restore { ... }", parse: parseRestore},
		"compensate": {usage: "compensate <method> <url> { ... }", parse: parseCompensate},
		"delegate": {usage: "delegate <uri>", parse: func(d *caddyfile.Dispenser, w *undoing.Ways) error {
			return parseWord(d, &w.Delegate)
		}},
		"irreversible": {usage: "irreversible", parse: func(_ *caddyfile.Dispenser, w *undoing.Ways) error {
			w.Irreversible = true
			return nil
		}},
	}
}

// parseDefaultUndo reads one of the ways for what no action matches.
func parseDefaultUndo(d *caddyfile.Dispenser, h *Handler) error {
	if !d.NextArg() {
		return errSyntax
	}
	way, ok := waysOptions()[d.Val()]
	if !ok {
		return fmt.Errorf("%q is no way to undo a call; use restore, compensate, delegate or irreversible", d.Val())
	}
	h.DefaultUndo = new(undoing.Ways)
	return way.parse(d, h.DefaultUndo)
}

func parseRestore(d *caddyfile.Dispenser, w *undoing.Ways) error {
	if d.NextArg() {
		return errSyntax
	}
	w.Restore = new(undoing.Restore)
	return restoreOptions().readBlock(d, "restore", w.Restore, originOf(d))
}

// restoreOptions are the options of the way restore.
func restoreOptions() options[*undoing.Restore] {
	return options[*undoing.Restore]{
		"header": {several: true, usage: "header <field> <value>", parse: func(d *caddyfile.Dispenser, r *undoing.Restore) error {
			return parseEntry(d, &r.Header)
		}},
		"on_changed": {usage: "on_changed escalate | overwrite", parse: func(d *caddyfile.Dispenser, r *undoing.Restore) error {
			return parseChoice(d, &r.OnChanged, undoing.Choices()["on_changed"]...)
		}},
		"verify": {usage: "verify off", parse: func(d *caddyfile.Dispenser, r *undoing.Restore) error {
			return parseChoice(d, &r.Verify, "off")
		}},
	}
}

func parseCompensate(d *caddyfile.Dispenser, w *undoing.Ways) error {
	w.Compensate = new(undoing.Compensation)
	if err := parseRequestLine(d, &w.Compensate.Request); err != nil {
		return err
	}
	return compensationOptions().readBlock(d, "compensate", w.Compensate, originOf(d))
}

// parseRequestLine reads a method and a URL.
func parseRequestLine(d *caddyfile.Dispenser, r *undoing.Request) (err error) {
	if r.Method, r.URL, err = parsePair(d); err == nil && d.NextArg() {
		err = errSyntax
	}
	return err
}

// requestOptions are the options of each request of an undo.
func requestOptions() options[*undoing.Request] {
	return options[*undoing.Request]{
		"header": {several: true, usage: "header <field> <value>", parse: func(d *caddyfile.Dispenser, r *undoing.Request) error {
			return parseEntry(d, &r.Header)
		}},
	}
}

// compensationOptions are the options of the way compensate.
func compensationOptions() options[*undoing.Compensation] {
	type dispenser = *caddyfile.Dispenser
	return options[*undoing.Compensation]{
		"json": {several: true, usage: "json <name> <value>", parse: func(d dispenser, c *undoing.Compensation) error {
			return parseEntry(d, &c.JSON)
		}},
		"form": {several: true, usage: "form <name> <value>", parse: func(d dispenser, c *undoing.Compensation) error {
			return parseEntry(d, &c.Form)
		}},
		"body": {usage: "body <media type> <text>", parse: func(d dispenser, c *undoing.Compensation) (err error) {
			c.ContentType, c.Body, err = parsePair(d)
			return err
		}},
		"status": {usage: "status <method> <url> { ... }", parse: func(d dispenser, c *undoing.Compensation) error {
			c.Status = new(undoing.Request)
			if err := parseRequestLine(d, c.Status); err != nil {
				return err
			}
			return requestOptions().readBlock(d, "status", c.Status, originOf(d))
		}},
	}.merge(within(func(c *undoing.Compensation) *undoing.Request { return &c.Request }, requestOptions()))
}

// undoError names the option of an error for place.
func undoError(err error) error {
	if bad := (*undoing.Error)(nil); errors.As(err, &bad) {
		return &invalid{[]string{bad.Option}, bad.Err}
	}
	return err
}

// placeUndo gives an error of a way the place of the option in which the way stands.
func placeUndo(err error, option string, at origin) error {
	bad := (*undoing.Error)(nil)
	if errors.As(err, &bad) {
		if _, ok := at[bad.Option]; ok {
			option = bad.Option
		}
	}
	return place(&invalid{[]string{option}, err}, at)
}

// inheritTerms fills what p leaves out.
func (p *Policy) inheritTerms(base *undoing.Terms) {
	inherit(&p.UndoAuth, base.UndoAuth)
	inherit(&p.OnSnapshotError, base.OnSnapshotError)
	inherit(&p.SnapshotTimeout, base.SnapshotTimeout)
	inherit(&p.OnLost, base.OnLost)
	inherit(&p.OnChanged, base.OnChanged)
	inherit(&p.CheckpointTTL, base.CheckpointTTL)
	inherit(&p.MaxImage, base.MaxImage)
}

// provisionUndo reads how the calls of an action are undone.
func (h *Handler) provisionUndo(a *Action) error {
	if err := checkDescription(a.Description); err != nil {
		return fmt.Errorf("description: %w", err)
	}
	plan, err := undoing.Compile(&a.Ways, &a.Terms, h.Name, h.credentials)
	if err != nil || !plan.Undoes() {
		return err
	}
	if h.app.Identity == nil {
		return fmt.Errorf("%s: it needs an `identity` in the global options, in whose name checkpoints are made", plan.Words()[0])
	}
	if option, own := a.OwnRequests(); own && h.upstream == nil {
		return fmt.Errorf("%s: it takes requests of the guard's own, and they need an `upstream`: the handlers that lead to the upstream", option)
	}
	for _, server := range plan.Exposed() {
		h.logger.Warn("the credentials of an undo leave without TLS; use https, unless something beneath encrypts",
			zap.String("guard", h.Name), zap.String("action", a.Name), zap.String("server", server))
	}
	if err := plan.Unset(); err != nil {
		h.logger.Warn("a header field of an undo has no value; nothing can be undone without it",
			zap.String("guard", h.Name), zap.String("action", a.Name), zap.Error(err))
	}
	a.undo = plan
	h.restores = h.restores || plan.Restores(http.MethodPut)
	return nil
}

// maxDescription leaves room in the extensions of a token.
const maxDescription = 512

func checkDescription(text string) error {
	if len(text) > maxDescription || text != shortened(text, maxDescription) {
		return fmt.Errorf("%.40q is too long, or has characters that are not printable ASCII; it has at most %d bytes and stands in tokens", text, maxDescription)
	}
	return nil
}
