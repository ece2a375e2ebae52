// Package option reads the options of Caddyfile blocks: it knows which options a block has, refuses a second one, and
// adds to each error its option, the syntax, the place, and the word that was probably meant.
package option

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

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
// line. Errors call it kind. at gets the tokens of its options by name; of a repeated option those of the first. The
// checks are made after each option; their errors name the option themselves.
func (s Set[T]) Read(
	d *caddyfile.Dispenser, kind string, into T, at map[string]caddyfile.Segment, checks ...func() error,
) error {
	if d.NextArg() {
		return ErrSyntax
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		segment := d.NextSegment()
		err := s.read(segment, kind, into, at)
		for _, check := range checks {
			if err == nil {
				err = check()
			}
		}
		if err != nil {
			return ErrorAt(segment[0], err)
		}
	}
	return nil
}

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
		return fmt.Errorf("%s stands twice; it stands on line %d already", name, before[0].Line)
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
	if opt.Named && len(segment) > 1 && !strings.Contains("{", segment[1].Text) {
		label += " " + segment[1].Text
	}
	if errors.Is(err, ErrSyntax) && !hasPlace(err, segment[0]) {
		return fmt.Errorf("%s: %w; the syntax is `%s`", label, err, strings.TrimSpace(name+" "+opt.Usage))
	}
	return fmt.Errorf("%s: %w", label, err)
}

// ErrorAt adds the place of a token to err, unless err already has a more precise one.
func ErrorAt(at caddyfile.Token, err error) error {
	if hasPlace(err, at) {
		return err
	}
	d := caddyfile.NewDispenser([]caddyfile.Token{at})
	d.Next()
	return d.WrapErr(err)
}

// hasPlace matches the places that dispensers add.
func hasPlace(err error, at caddyfile.Token) bool {
	return strings.Contains(err.Error(), ", at "+at.File+":")
}
