// Package option reads the options of Caddyfile blocks: it knows which options a block has, refuses a second one, and
// adds to each error its option, the syntax, the place, and the word that was probably meant. It decodes the JSON of
// modules too, with errors that have the path of the member.
package option

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/internal/suggest"
)

// Set has the options of one kind of block by name. The block fills a T.
type Set[T any] map[string]Option[T]

// Option is one option of a block, which fills a T.
type Option[T any] struct {
	// Usage is the syntax of its arguments, as errors show it.
	Usage string
	// Several says that it may stand several times in its block.
	Several bool
	// Named says that its first argument is a name, which errors show.
	Named bool
	// NamesItself says that those of its errors that begin with its name need no other.
	NamesItself bool
	// Passed says that ReadBeside leaves it to the reader of the rest too.
	Passed bool
	// Parse parses all of the option's tokens. d is at the option's name. The error needs
	// neither the name nor the place.
	Parse func(d *caddyfile.Dispenser, into T) error
	// Check says what is wrong with the value, whether the Caddyfile or JSON has it; nil checks nothing. What
	// is left out is valid.
	Check func(of T) error
}

// ErrSyntax says that an option has too many arguments, or too few. Errors of Read add the syntax.
var ErrSyntax = errors.New("wrong number of arguments")

// Read parses the block that begins on the line of d, if there is one; other arguments must have been taken from the
// line. Errors call it kind. at gets the tokens of its options by name; of a repeated option those of the first.
func (s Set[T]) Read(d *caddyfile.Dispenser, kind string, into T, at map[string]caddyfile.Segment) error {
	if d.NextArg() {
		return ErrSyntax
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		segment := d.NextSegment()
		if err := s.read(segment, kind, into, at); err != nil {
			return ErrorAt(segment[0], err)
		}
	}
	return nil
}

// ReadBeside is like Read, where rest reads the other options of the block: it gets d from its beginning, without the
// options of s.
func (s Set[T]) ReadBeside(
	d *caddyfile.Dispenser, kind string, into T, at map[string]caddyfile.Segment, rest func(*caddyfile.Dispenser) error,
) error {
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name, segment := d.Val(), d.NextSegment()
		opt, ours := s[name]
		if !ours {
			continue
		}
		if err := s.read(segment, kind, into, at); err != nil {
			return ErrorAt(segment[0], err)
		}
		n := len(segment)
		if d.Val() == "}" && segment[n-1].Text != "}" { // segments have no braces of empty blocks
			n += 2
		}
		if !opt.Passed {
			d.DeleteN(n)
		}
	}
	d.Reset()
	err := rest(d)
	if err == nil {
		return nil
	}
	if found := unrecognized.FindStringSubmatch(err.Error()); found != nil {
		if meant := suggest.Nearest(found[1], slices.Sorted(maps.Keys(s))); meant != "" {
			return errors.New(strings.Replace(err.Error(), found[0], found[0]+meant, 1))
		}
	}
	return err
}

// unrecognized matches what Caddy says of an option that it does not know.
var unrecognized = regexp.MustCompile(`unrecognized subdirective ([^\s,]+)`)

// read parses the option of a segment.
func (s Set[T]) read(segment caddyfile.Segment, kind string, into T, at map[string]caddyfile.Segment) error {
	name := segment.Directive()
	opt, ok := s[name]
	if !ok {
		known := slices.Sorted(maps.Keys(s))
		return fmt.Errorf("%s has no option %q; it has %s%s",
			kind, name, strings.Join(known, ", "), suggest.Nearest(name, known))
	}
	before, stood := at[name]
	switch {
	case !stood:
		at[name] = segment
	case !opt.Several:
		where := fmt.Sprintf("on line %d", before[0].Line)
		if file := before[0].File; file != segment[0].File {
			where = fmt.Sprintf("at %s:%d", file, before[0].Line)
		}
		return fmt.Errorf("%s stands twice; it stands %s already", name, where)
	}
	// A separate dispenser, so that leftovers of the option, such as a block that it does not
	// take, are not read as the next option.
	inner := caddyfile.NewDispenser(segment)
	inner.Next()
	err := opt.Parse(inner, into)
	if err == nil && opt.Check != nil {
		err = opt.Check(into)
	}
	if err == nil && inner.Next() {
		err = ErrSyntax
	}
	if err == nil {
		return nil
	}
	label := name
	if text := err.Error(); opt.NamesItself && (strings.HasPrefix(text, name+" ") || strings.HasPrefix(text, name+":")) {
		return err
	}
	if opt.Named && len(segment) > 1 && !strings.Contains("{", segment[1].Text) {
		label += " " + segment[1].Text
	}
	if errors.Is(err, ErrSyntax) && !HasPlace(err) {
		return fmt.Errorf("%s: %w; the syntax is `%s`", label, err, strings.TrimSpace(name+" "+opt.Usage))
	}
	return fmt.Errorf("%s: %w", label, err)
}

// ErrorAt adds the place of a token to err, unless err already has a more precise one.
func ErrorAt(at caddyfile.Token, err error) error {
	if HasPlace(err) {
		return err
	}
	d := caddyfile.NewDispenser([]caddyfile.Token{at})
	d.Next()
	return d.WrapErr(err)
}

// HasPlace reports whether err ends in a place, of whatever file.
func HasPlace(err error) bool { return endsInPlace.MatchString(err.Error()) }

// endsInPlace matches the places that dispensers add.
var endsInPlace = regexp.MustCompile(`, at [^\n]+:[0-9]+( import chain \[[^\n]*\])?$`)

// Value makes an option with one value, which parse reads and the checks take in turn.
func Value[T, V any](
	usage string, into func(T) *V, parse func(*caddyfile.Dispenser, *V) error, checks ...func(V) error,
) Option[T] {
	return Option[T]{
		Usage: usage,
		Parse: func(d *caddyfile.Dispenser, of T) error { return parse(d, into(of)) },
		Check: func(of T) error {
			for _, check := range checks {
				if err := check(*into(of)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// ParseDuration reads a duration, which is positive.
func ParseDuration[D ~int64](d *caddyfile.Dispenser, into *D) error {
	if !d.NextArg() {
		return ErrSyntax
	}
	v, err := caddy.ParseDuration(d.Val())
	if err != nil {
		return fmt.Errorf("%q is no duration (like 30s, 5m, 24h or 7d)", d.Val())
	}
	if v == 0 {
		return fmt.Errorf("%q is no time at all; it must be positive", d.Val())
	}
	*into = D(v)
	return CheckDuration(*into)
}

// longest bounds durations so that they fit into 64 bits of nanoseconds: an expiry that
// overflows would free a key (P1).
const longest = 100 * 365 * 24 * time.Hour

// CheckDuration checks a duration of a configuration, where 0 is the default.
func CheckDuration[D ~int64](v D) error {
	switch d := time.Duration(v); {
	case d < 0:
		return fmt.Errorf("%v is negative; it must be positive", d)
	case d > longest:
		return fmt.Errorf("%v is too long; it must be at most 36500d", d)
	}
	return nil
}

// ParseCount reads a number of at least 1.
func ParseCount(d *caddyfile.Dispenser, into *int) error {
	if !d.NextArg() {
		return ErrSyntax
	}
	n, err := strconv.Atoi(d.Val())
	if err != nil || n < 1 {
		return fmt.Errorf("%q is no count (like 100); it must be at least 1", d.Val())
	}
	*into = n
	return nil
}

// OrOff reads `off` as -1, and everything else with parse.
func OrOff[V ~int | ~int64](parse func(*caddyfile.Dispenser, *V) error) func(*caddyfile.Dispenser, *V) error {
	return func(d *caddyfile.Dispenser, into *V) error {
		if d.NextArg() {
			if d.Val() == "off" {
				*into = -1
				return nil
			}
			d.Prev()
		}
		return parse(d, into)
	}
}

// ParseStatuses reads the statuses of answers. A class such as 5xx is a single digit, as in Caddy's response matchers.
func ParseStatuses(words []string) ([]int, error) {
	var codes []int
	for _, word := range words {
		digits, class := strings.CutSuffix(word, "xx")
		code, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || len(word) != 3 || class != (code < 10) || CheckStatus(int(code)) != nil {
			return nil, fmt.Errorf("%q is no final status; use 200 to 599, or a class from 2xx to 5xx", word)
		}
		codes = append(codes, int(code))
	}
	return codes, nil
}

// CheckStatus checks a status of ParseStatuses.
func CheckStatus(code int) error {
	if code >= 2 && code <= 5 || code >= 200 && code <= 599 {
		return nil
	}
	return fmt.Errorf("%d is no final status; use 200 to 599, or a class from 2 to 5", code)
}
