package caddymodule

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dustin/go-humanize"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("agent_guard", parseApp)
	httpcaddyfile.RegisterHandlerDirective("agent_guard", parseGuard)
	httpcaddyfile.RegisterHandlerDirective("agent_guard_endpoints", parseEndpoints)
	httpcaddyfile.RegisterDirective("agent_proxy", parseProxy)
	// After encode: the caller is authenticated, bodies are limited, and recorded answers
	// are not compressed by Caddy.
	httpcaddyfile.RegisterDirectiveOrder("agent_guard", httpcaddyfile.After, "encode")
	httpcaddyfile.RegisterDirectiveOrder("agent_guard_endpoints", httpcaddyfile.Before, "respond")
	httpcaddyfile.RegisterDirectiveOrder("agent_proxy", httpcaddyfile.Before, "reverse_proxy")
}

// parseApp reads the global option
//
//	agent_guard {
//		store <module> [<options...>]
//		keys  file <path> | value <placeholder>
//		drain <duration>
//		body_memory <size>
//		quota { ... }
//		identity <uri> { ... }
//		trust jwks_file <path> [<owner>] | jwks_url <url> [<owner>] | { ... }
//		rollback { ... }
//		hitl { ... }
//		plan <file>
//		plan_mode enforced | observed
//		workflow_idle <duration>
//		on_cascade alert | pause | open { ... }
//	}
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if existing != nil {
		return nil, d.Err("agent_guard stands twice in the global options; write one block")
	}
	at := originOf(d)
	if d.NextArg() {
		return nil, d.Errf("agent_guard takes no argument here, but a block; %q is too much", d.Val())
	}
	app := new(App)
	if err := appOptions().Read(d, "the global option agent_guard", app, at); err != nil {
		return nil, err
	}
	if app.Trust != nil {
		if err := app.checkTrust(); err != nil {
			return nil, place(fmt.Errorf("trust: %w", err), app.Trust.origin)
		}
	}
	if err := app.checkParticipants(); err != nil {
		return nil, place(fmt.Errorf("rollback: %w", err), app.Rollback.origin)
	}
	return httpcaddyfile.App{Name: "agent_guard", Value: caddyconfig.JSON(app, nil)}, nil
}

func appOptions() option.Set[*App] {
	return option.Set[*App]{
		"store":       {Usage: "<module> [<options...>]", Parse: parseStore},
		"keys":        {Usage: "file <path> | value <placeholder>", Parse: parseKeys},
		"drain":       duration(func(a *App) *caddy.Duration { return &a.Drain }),
		"body_memory": size(func(a *App) *int64 { return &a.BodyMemory }),
		"hitl":        {Usage: "{ ... }", Parse: parseHITL},
		"quota":       {Usage: "{ ... }", Parse: parseQuota},
		"identity":    {Usage: "<uri> { ... }", Parse: parseIdentity},
		"trust": {Usage: "jwks_file <path> [<owner>] | jwks_url <url> [<owner>] | { ... }",
			Several: true, Parse: parseTrust},
		"rollback": {Usage: "{ ... }", Parse: parseRollback},
		"plan": {Usage: "<file>", Several: true, Parse: func(d *caddyfile.Dispenser, a *App) error {
			var file string
			err := parseWord(d, &file)
			a.PlanFiles = append(a.PlanFiles, file)
			a.writtenAt(fmt.Sprintf("plans.%d", len(a.PlanFiles)), d.Token())
			return err
		}},
		"plan_mode": placed("plan_mode", word("enforced | observed", func(a *App) *string { return &a.PlanMode })),
		"workflow_idle": placed("workflow_idle", duration(func(a *App) *caddy.Duration { return &a.WorkflowIdle },
			checkIdle)),
		"on_cascade": placed("on_cascade", option.Option[*App]{Usage: "alert | pause | open { ... }", Parse: parseOnCascade}),
	}
}

// placed records where an option stands, which loading finds wrong if at all.
func placed(name string, o option.Option[*App]) option.Option[*App] {
	parse := o.Parse
	o.Parse = func(d *caddyfile.Dispenser, a *App) error {
		a.writtenAt(name, d.Token())
		return parse(d, a)
	}
	return o
}

func parseStore(d *caddyfile.Dispenser, a *App) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	name, at := d.Val(), d.Token()
	module, err := caddyfile.UnmarshalModule(d, "agent_guard.stores."+name)
	if err != nil {
		return err
	}
	if badger, ok := module.(*BadgerStore); ok && badger.pathAt != nil {
		at = *badger.pathAt
	}
	a.writtenAt("store", at)
	a.StoreRaw = caddyconfig.JSONModuleObject(module, "module", name, nil)
	return nil
}

func parseKeys(d *caddyfile.Dispenser, a *App) (err error) {
	at := d.Token()
	var kind, value string
	switch {
	case !d.Args(&kind, &value):
		return option.ErrSyntax
	case value == "":
		return fmt.Errorf("the %s is empty; name one", kind)
	}
	a.writtenAt("keys", at)
	switch kind {
	case "file":
		a.KeyFile = value
	case "value":
		a.Key = value
		if !strings.Contains(value, "{") {
			_, err = seal.Parse([]byte(value))
		}
	default:
		err = oneOf(kind, "file", "value")
	}
	return err
}

// writtenAt records the place of an option that only loading can check: it depends on files and
// variables of the machine.
func (a *App) writtenAt(name string, at caddyfile.Token) {
	if a.WrittenAt == nil {
		a.WrittenAt = map[string]string{}
	}
	a.WrittenAt[name] = placeOf(at)
}

// parseGuard reads the directive agent_guard [<matcher>] with the options of
// Handler.read.
func parseGuard(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	guard := new(Handler)
	if err := guard.read(h.Dispenser); err != nil {
		return nil, err
	}
	if err := guard.parseHandlers(h, "upstream", &guard.UpstreamRaw); err != nil {
		return nil, err
	}
	if asks, own := guard.ownRequests(); own && guard.UpstreamRaw == nil {
		return nil, option.ErrorAt(asks.at, errors.New(asks.what+" of the guard's own; "+
			"give agent_guard an `upstream` block that says how it reaches the upstream, or use agent_proxy"))
	}
	return guard, guard.finish(h)
}

// finish does what needs the rest of the Caddyfile.
func (h *Handler) finish(helper httpcaddyfile.Helper) error {
	return cmp.Or(h.parseHandlers(helper, "fallback", &h.FallbackRaw), h.claimName(helper), h.checkGlobals(helper))
}

// wayOf is the first option that says how calls are undone; empty if there is none.
func wayOf(w *Ways) string {
	switch {
	case w.Restore != nil:
		return "restore"
	case w.Compensate != nil:
		return "compensate"
	case w.Delegate != "":
		return "delegate"
	}
	return ""
}

// wanting is an option that makes the guard send requests of its own.
type wanting struct {
	at   caddyfile.Token
	what string
}

type dispenser = *caddyfile.Dispenser

// merge adds the options of the parts to those of the whole.
func merge[T any](whole option.Set[T], parts ...option.Set[T]) option.Set[T] {
	for _, part := range parts {
		maps.Copy(whole, part)
	}
	return whole
}

// within turns the options of a part into options of the whole.
func within[T, U any](part func(T) U, opts option.Set[U]) option.Set[T] {
	whole := make(option.Set[T], len(opts))
	for name, opt := range opts {
		one := option.Option[T]{
			Usage: opt.Usage, Several: opt.Several, Named: opt.Named, NamesItself: opt.NamesItself,
			Parse: func(d *caddyfile.Dispenser, into T) error { return opt.Parse(d, part(into)) },
		}
		if opt.Check != nil {
			one.Check = func(of T) error { return opt.Check(part(of)) }
		}
		whole[name] = one
	}
	return whole
}

// checkOptions checks the values of all options, by name.
func checkOptions[T any](opts option.Set[T], of T) error {
	for _, name := range slices.Sorted(maps.Keys(opts)) {
		if check := opts[name].Check; check != nil {
			if err := check(of); err != nil {
				return invalidOption(name, "%w", err)
			}
		}
	}
	return nil
}

// readOnly parses a block that must say something; nothing is the error if it does not.
func readOnly[T any](opts option.Set[T], d *caddyfile.Dispenser, kind string, into T, nothing string) (origin, error) {
	at := originOf(d)
	err := opts.Read(d, kind, into, at)
	if err == nil && len(at) == 1 {
		err = errors.New(nothing)
	}
	return at, err
}

func duration[T any, D ~int64](into func(T) *D, checks ...func(D) error) option.Option[T] {
	return option.Value("<duration>", into, option.ParseDuration, append([]func(D) error{option.CheckDuration[D]}, checks...)...)
}

func size[T any](into func(T) *int64) option.Option[T] {
	return option.Value("<size>", into, parseSize, func(n int64) error {
		if n < 0 {
			return fmt.Errorf("%d bytes is negative; it must be positive", n)
		}
		return nil
	})
}

func count[T any](into func(T) *int) option.Option[T] {
	return option.Value("<number>", into, option.ParseCount, func(n int) error {
		if n < 0 {
			return fmt.Errorf("%d is negative; it must be positive", n)
		}
		return nil
	})
}

var countOrOff = option.OrOff(option.ParseCount)

// word makes an option with a word, which has at most one check.
func word[T any](usage string, into func(T) *string, checks ...func(string) error) option.Option[T] {
	return option.Value(usage, into, parseWord, func(v string) error {
		for _, check := range checks {
			if v != "" {
				return check(v)
			}
		}
		return nil
	})
}

func words[T any](usage string, into func(T) *[]string, checks ...func([]string) error) option.Option[T] {
	return option.Value(usage, into, parseWords, checks...)
}

// choice makes an option with one of some words.
func choice[T any, W ~string](into func(T) *W, choices ...W) option.Option[T] {
	var usage string
	for _, w := range choices {
		usage += " | " + string(w)
	}
	return option.Value(strings.TrimPrefix(usage, " | "), into,
		func(d *caddyfile.Dispenser, v *W) error { return parseChoice(d, v, choices...) },
		func(v W) error {
			if v == "" {
				return nil
			}
			return oneOf(v, choices...)
		})
}

func flag[T any](into func(T) *bool) option.Option[T] {
	return option.Option[T]{Parse: func(_ *caddyfile.Dispenser, of T) error {
		*into(of) = true
		return nil
	}}
}

// repeated says that an option may stand several times in its block.
func repeated[T any](o option.Option[T]) option.Option[T] {
	o.Several = true
	return o
}

// each checks every word of a list.
func each(check func(string) error) func([]string) error {
	return func(words []string) error {
		for _, w := range words {
			if err := check(w); err != nil {
				return err
			}
		}
		return nil
	}
}

// origin has the tokens of a block's options in the Caddyfile by name; those of the first
// if an option is repeated. The tokens that begin the block are at "".
type origin map[string]caddyfile.Segment

// originOf begins the origin of the block that d stands before.
func originOf(d *caddyfile.Dispenser) origin { return origin{"": {d.Token()}} }

// invalid is an error of some options, the most likely culprit first. Those of the app have their names in WrittenAt.
type invalid struct {
	options []string
	err     error
}

func (e *invalid) Error() string { return e.err.Error() }
func (e *invalid) Unwrap() error { return e.err }

// invalidOption returns the error of one option, which its text begins with.
func invalidOption(name, format string, args ...any) error {
	return &invalid{[]string{name}, fmt.Errorf(name+": "+format, args...)}
}

// place adds to err the place of its option: in the first block that has one of its
// options, else that of the first block.
func place(err error, blocks ...origin) error {
	var bad *invalid
	if errors.As(err, &bad) {
		for _, block := range blocks {
			for _, name := range bad.options {
				if segment, ok := block[name]; ok {
					return option.ErrorAt(segment[0], err)
				}
			}
		}
	}
	return option.ErrorAt(blocks[0][""][0], err)
}

// placeOf returns the place of a token as errors show it: file, line and import chain.
func placeOf(at caddyfile.Token) string {
	return strings.TrimPrefix(option.ErrorAt(at, errors.New("")).Error(), ", at ")
}

// withPlace adds a place from the configuration to err, unless err already has a more
// precise one. Caddy passes errors of modules on as text.
func withPlace(err error, place string) error {
	if err == nil || place == "" || option.HasPlace(err) {
		return err
	}
	return fmt.Errorf("%w, at %s", err, place)
}

// The following functions parse arguments of an option. d is before them.

func parseWord(d *caddyfile.Dispenser, into *string) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	if d.Val() == "" {
		return errors.New("it is empty; leave the option out for its default")
	}
	*into = d.Val()
	return nil
}

func parseWords(d *caddyfile.Dispenser, into *[]string) error {
	words := d.RemainingArgs()
	if len(words) == 0 {
		return option.ErrSyntax
	}
	*into = append(*into, words...)
	return nil
}

func parseChoice[W ~string](d *caddyfile.Dispenser, into *W, choices ...W) error {
	var word string
	err := parseWord(d, &word)
	*into = W(word)
	return cmp.Or(err, oneOf(*into, choices...))
}

// oneOf checks a word against those that are known.
func oneOf[W ~string](word W, known ...W) error {
	list := ""
	for i, k := range known {
		switch {
		case word == k:
			return nil
		case i > 0 && i == len(known)-1:
			list += " or "
		case i > 0:
			list += ", "
		}
		list += string(k)
	}
	return fmt.Errorf("%q is unknown; use %s", word, list)
}

func parseSize(d *caddyfile.Dispenser, into *int64) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	text := d.Val()
	// ParseBytes ignores commas: 1,5MiB would be 15 MiB.
	size, err := humanize.ParseBytes(text)
	switch {
	case err == nil && size > math.MaxInt64, err != nil && strings.Contains(err.Error(), "too large"):
		return fmt.Errorf("%q is too large", text)
	case err != nil || strings.Contains(text, ","):
		return fmt.Errorf("%q is no size (like 512KiB or 32MiB)", text)
	case size == 0:
		return fmt.Errorf("%q is nothing; it must be at least one byte", text)
	}
	*into = int64(size)
	return nil
}

// parseMatchers parses one set of request matchers, all of which must match. Several sets
// are alternatives.
func parseMatchers(d *caddyfile.Dispenser, into *caddyhttp.RawMatcherSets) error {
	if d.NextArg() {
		switch text := d.Val(); {
		case d.Token().Quoted():
		case strings.HasPrefix(text, "@"):
			return fmt.Errorf("named matchers such as %s are not known here; write the matchers themselves, in a block if there are several", text)
		case strings.HasPrefix(text, "/"), text == "*":
			return fmt.Errorf("%q is no matcher; for paths write `path %s`", text, text)
		}
		d.Prev()
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(d)
	if err != nil {
		return err
	}
	if len(set) == 0 {
		return errors.New("no matcher is given; write one on the line, or a block of them")
	}
	for name, raw := range set {
		if text := string(raw); text == "null" || text == "[]" {
			return fmt.Errorf("the matcher %s is empty and would never match", name)
		}
	}
	*into = append(*into, set)
	return nil
}
