package caddymodule

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dustin/go-humanize"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/internal/suggest"
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
	if err := appOptions().readBlock(d, "the global option agent_guard", app, at); err != nil {
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

func appOptions() options[*App] {
	return options[*App]{
		"store":       {usage: "<module> [<options...>]", parse: parseStore},
		"keys":        {usage: "file <path> | value <placeholder>", parse: parseKeys},
		"drain":       duration(func(a *App) *caddy.Duration { return &a.Drain }),
		"body_memory": size(func(a *App) *int64 { return &a.BodyMemory }),
		"hitl":        {usage: "{ ... }", parse: parseHITL},
		"quota":       {usage: "{ ... }", parse: parseQuota},
		"identity":    {usage: "<uri> { ... }", parse: parseIdentity},
		"trust": {usage: "jwks_file <path> [<owner>] | jwks_url <url> [<owner>] | { ... }",
			several: true, parse: parseTrust},
		"rollback": {usage: "{ ... }", parse: parseRollback},
		"plan": {usage: "<file>", several: true, parse: func(d *caddyfile.Dispenser, a *App) error {
			var file string
			err := parseWord(d, &file)
			a.PlanFiles = append(a.PlanFiles, file)
			a.writtenAt(fmt.Sprintf("plans.%d", len(a.PlanFiles)), d.Token())
			return err
		}},
		"plan_mode": placed("plan_mode", word("enforced | observed", func(a *App) *string { return &a.PlanMode })),
		"workflow_idle": placed("workflow_idle", duration(func(a *App) *caddy.Duration { return &a.WorkflowIdle },
			checkIdle)),
		"on_cascade": placed("on_cascade", option[*App]{usage: "alert | pause | open { ... }", parse: parseOnCascade}),
	}
}

// placed records where an option stands, which loading finds wrong if at all.
func placed(name string, o option[*App]) option[*App] {
	parse := o.parse
	o.parse = func(d *caddyfile.Dispenser, a *App) error {
		a.writtenAt(name, d.Token())
		return parse(d, a)
	}
	return o
}

func parseStore(d *caddyfile.Dispenser, a *App) error {
	if !d.NextArg() {
		return errSyntax
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

func parseKeys(d *caddyfile.Dispenser, a *App) error {
	at := d.Token()
	kind, value, err := parsePair(d)
	if err != nil {
		return err
	}
	if value == "" {
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
func (a *App) writtenAt(option string, at caddyfile.Token) {
	if a.WrittenAt == nil {
		a.WrittenAt = map[string]string{}
	}
	a.WrittenAt[option] = placeOf(at)
}

// parseGuard reads the directive agent_guard [<matcher>] with the options of
// Handler.UnmarshalCaddyfile.
func parseGuard(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	guard := new(Handler)
	if err := guard.UnmarshalCaddyfile(h.Dispenser); err != nil {
		return nil, err
	}
	if err := guard.parseHandlers(h, "upstream", &guard.UpstreamRaw); err != nil {
		return nil, err
	}
	if err := guard.parseHandlers(h, "fallback", &guard.FallbackRaw); err != nil {
		return nil, err
	}
	if err := guard.claimName(h); err != nil {
		return nil, err
	}
	if asks, own := guard.ownRequests(); own && guard.UpstreamRaw == nil {
		return nil, errorAt(asks.at, errors.New(asks.what+" of the guard's own; "+
			"give agent_guard an `upstream` block that says how it reaches the upstream, or use agent_proxy"))
	}
	if err := guard.checkGlobals(h); err != nil {
		return nil, err
	}
	return guard, nil
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

// option is one option of a Caddyfile block, which fills a T.
type option[T any] struct {
	// usage is the syntax of its arguments, as errors show it.
	usage string
	// several says that it may stand several times in its block.
	several bool
	// named says that its first argument is a name, which errors show.
	named bool
	// parse parses all of the option's tokens. d is at the option's name. The error needs
	// neither the name nor the place.
	parse func(d *caddyfile.Dispenser, into T) error
	// check says what is wrong with the value, whether the Caddyfile or JSON has it; nil checks nothing. What
	// is left out is valid.
	check func(of T) error
}

// options are the options of one kind of block, by name.
type options[T any] map[string]option[T]

// merge returns the options of both.
func (o options[T]) merge(more options[T]) options[T] {
	maps.Copy(o, more)
	return o
}

// within turns the options of a part into options of the whole.
func within[T, U any](part func(T) U, opts options[U]) options[T] {
	whole := make(options[T], len(opts))
	for name, opt := range opts {
		one := option[T]{
			usage: opt.usage, several: opt.several, named: opt.named,
			parse: func(d *caddyfile.Dispenser, into T) error { return opt.parse(d, part(into)) },
		}
		if opt.check != nil {
			one.check = func(of T) error { return opt.check(part(of)) }
		}
		whole[name] = one
	}
	return whole
}

// check checks the values of all options, by name.
func (o options[T]) check(of T) error {
	for _, name := range slices.Sorted(maps.Keys(o)) {
		if check := o[name].check; check != nil {
			if err := check(of); err != nil {
				return &invalid{[]string{name}, err}
			}
		}
	}
	return nil
}

// readOnly parses a block whose option takes no argument, and which must say something; nothing is the error if it
// does not.
func (o options[T]) readOnly(d *caddyfile.Dispenser, kind string, into T, nothing string) (origin, error) {
	if d.NextArg() {
		return nil, errSyntax
	}
	at := originOf(d)
	err := o.readBlock(d, kind, into, at)
	if err == nil && len(at) == 1 {
		err = errors.New(nothing)
	}
	return at, err
}

// value makes an option with one value, which the checks take in turn.
func value[T, V any](usage string, into func(T) *V, parse func(dispenser, *V) error, checks ...func(V) error) option[T] {
	return option[T]{
		usage: usage,
		parse: func(d *caddyfile.Dispenser, of T) error { return parse(d, into(of)) },
		check: func(of T) error {
			for _, check := range checks {
				if err := check(*into(of)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func duration[T any, D ~int64](into func(T) *D, checks ...func(D) error) option[T] {
	return value("<duration>", into, parseDuration, append([]func(D) error{checkDuration[D]}, checks...)...)
}

func size[T any](into func(T) *int64) option[T] {
	return value("<size>", into, parseSize, func(n int64) error {
		if n < 0 {
			return fmt.Errorf("%d bytes is negative; it must be positive", n)
		}
		return nil
	})
}

func count[T any](into func(T) *int) option[T] {
	return value("<number>", into, parseCount, func(n int) error {
		if n < 0 {
			return fmt.Errorf("%d is negative; it must be positive", n)
		}
		return nil
	})
}

// word makes an option with a word, which has at most one check.
func word[T any](usage string, into func(T) *string, checks ...func(string) error) option[T] {
	return value(usage, into, parseWord, func(v string) error {
		for _, check := range checks {
			if v != "" {
				return check(v)
			}
		}
		return nil
	})
}

func words[T any](usage string, into func(T) *[]string, checks ...func([]string) error) option[T] {
	return value(usage, into, parseWords, checks...)
}

// choice makes an option with one of some words.
func choice[T any, W ~string](into func(T) *W, choices ...W) option[T] {
	var usage string
	for _, w := range choices {
		usage += " | " + string(w)
	}
	return value(strings.TrimPrefix(usage, " | "), into,
		func(d *caddyfile.Dispenser, v *W) error { return parseChoice(d, v, choices...) },
		func(v W) error {
			if v == "" {
				return nil
			}
			return oneOf(v, choices...)
		})
}

func flag[T any](into func(T) *bool) option[T] {
	return option[T]{parse: func(_ *caddyfile.Dispenser, of T) error {
		*into(of) = true
		return nil
	}}
}

// repeated says that an option may stand several times in its block.
func repeated[T any](o option[T]) option[T] {
	o.several = true
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

// errSyntax says that an option has too many arguments, or too few.
var errSyntax = errors.New("wrong number of arguments")

// readBlock parses the block that begins on the line of d, if there is one. Errors call it
// kind. at gets the tokens of its options.
func (o options[T]) readBlock(d *caddyfile.Dispenser, kind string, into T, at origin) error {
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := o.read(d, kind, into, at); err != nil {
			return err
		}
	}
	return nil
}

// read parses the option at which d stands.
func (o options[T]) read(d *caddyfile.Dispenser, kind string, into T, at origin) error {
	segment := d.NextSegment()
	first := segment[0]
	name := first.Text
	opt, ok := o[name]
	if !ok {
		known := slices.Sorted(maps.Keys(o))
		return errorAt(first, fmt.Errorf("%s has no option %q; it has %s%s",
			kind, name, strings.Join(known, ", "), suggest.Nearest(name, known)))
	}
	before, stood := at[name]
	switch {
	case !stood:
		at[name] = segment
	case !opt.several:
		return errorAt(first, fmt.Errorf("%s stands twice; it stands on line %d already", name, before[0].Line))
	}
	label := name
	if opt.named && len(segment) > 1 && !strings.Contains("{", segment[1].Text) {
		label += " " + segment[1].Text
	}
	// A separate dispenser, so that leftovers of the option, such as a block that it does not
	// take, are not read as the next option.
	inner := caddyfile.NewDispenser(segment)
	inner.Next()
	err := opt.parse(inner, into)
	if err == nil && opt.check != nil {
		err = opt.check(into)
	}
	if err == nil && inner.Next() {
		err = errSyntax
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errSyntax) && !hasPlace(err, first):
		err = fmt.Errorf("%s: %w; the syntax is `%s`", label, err, strings.TrimSpace(name+" "+opt.usage))
	default:
		err = fmt.Errorf("%s: %w", label, err)
	}
	return errorAt(first, err)
}

// origin has the tokens of a block's options in the Caddyfile by name; those of the first
// if an option is repeated. The tokens that begin the block are at "".
type origin map[string]caddyfile.Segment

// originOf begins the origin of the block that d stands before.
func originOf(d *caddyfile.Dispenser) origin { return origin{"": {d.Token()}} }

// invalid is an error in the values of some options, the most likely culprit first.
type invalid struct {
	options []string
	err     error
}

func (e *invalid) Error() string { return e.options[0] + ": " + e.err.Error() }
func (e *invalid) Unwrap() error { return e.err }

// place adds to err the place of its option: in the first block that has one of its
// options, else that of the first block.
func place(err error, blocks ...origin) error {
	var bad *invalid
	if errors.As(err, &bad) {
		for _, block := range blocks {
			for _, name := range bad.options {
				if segment, ok := block[name]; ok {
					return errorAt(segment[0], err)
				}
			}
		}
	}
	return errorAt(blocks[0][""][0], err)
}

// errorAt adds the place of a token to err, unless err already has a more precise one.
func errorAt(at caddyfile.Token, err error) error {
	if hasPlace(err, at) {
		return err
	}
	d := caddyfile.NewDispenser([]caddyfile.Token{at})
	d.Next()
	return d.WrapErr(err)
}

// placeOf returns the place of a token as errors show it: file, line and import chain.
func placeOf(at caddyfile.Token) string {
	return strings.TrimPrefix(errorAt(at, errors.New("")).Error(), ", at ")
}

// withPlace adds a place from the configuration to err, unless err already has a more
// precise one. Caddy passes errors of modules on as text.
func withPlace(err error, place string) error {
	if err == nil || place == "" || endsInPlace.MatchString(err.Error()) {
		return err
	}
	return fmt.Errorf("%w, at %s", err, place)
}

// endsInPlace matches a place at the end of an error.
var endsInPlace = regexp.MustCompile(`, at [^\n]+:[0-9]+( import chain \[[^\n]*\])?$`)

// hasPlace matches the places that dispensers add.
func hasPlace(err error, at caddyfile.Token) bool {
	return strings.Contains(err.Error(), ", at "+at.File+":")
}

// The following functions parse arguments of an option. d is before them.

func parseWord(d *caddyfile.Dispenser, into *string) error {
	if !d.NextArg() {
		return errSyntax
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
		return errSyntax
	}
	*into = append(*into, words...)
	return nil
}

// parsePair reads exactly two arguments. The second may be empty.
func parsePair(d *caddyfile.Dispenser) (name, value string, err error) {
	if !d.Args(&name, &value) {
		return "", "", errSyntax
	}
	return name, value, nil
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

func parseDuration[D ~int64](d *caddyfile.Dispenser, into *D) error {
	if !d.NextArg() {
		return errSyntax
	}
	v, err := caddy.ParseDuration(d.Val())
	if err != nil {
		return fmt.Errorf("%q is no duration (like 30s, 5m, 24h or 7d)", d.Val())
	}
	if v == 0 {
		return fmt.Errorf("%q is no time at all; it must be positive", d.Val())
	}
	*into = D(v)
	return checkDuration(*into)
}

// longest bounds durations so that they fit into 64 bits of nanoseconds: an expiry that
// overflows would free a key (P1).
const longest = 100 * 365 * 24 * time.Hour

// checkDuration checks a duration of a configuration, where 0 is the default.
func checkDuration[D ~int64](v D) error {
	switch d := time.Duration(v); {
	case d < 0:
		return fmt.Errorf("%v is negative; it must be positive", d)
	case d > longest:
		return fmt.Errorf("%v is too long; it must be at most 36500d", d)
	}
	return nil
}

func parseSize(d *caddyfile.Dispenser, into *int64) error {
	if !d.NextArg() {
		return errSyntax
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

// parseStatuses parses statuses. A class such as 5xx is a single digit, as in Caddy's
// response matchers.
func parseStatuses(words []string) ([]int, error) {
	var codes []int
	for _, word := range words {
		digits, class := strings.CutSuffix(word, "xx")
		code, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || len(word) != 3 || class != (code < 10) || checkStatus(int(code)) != nil {
			return nil, fmt.Errorf("%q is no final status; use 200 to 599, or a class from 2xx to 5xx", word)
		}
		codes = append(codes, int(code))
	}
	return codes, nil
}

// checkStatus checks a status of a response matcher.
func checkStatus(code int) error {
	if code >= 2 && code <= 5 || code >= 200 && code <= 599 {
		return nil
	}
	return fmt.Errorf("%d is no final status; use 200 to 599, or a class from 2 to 5", code)
}
