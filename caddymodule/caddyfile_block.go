package caddymodule

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// option is one option of a Caddyfile block, which fills a T.
type option[T any] struct {
	// usage is its syntax, as errors show it.
	usage string
	// several says that it may stand several times in its block.
	several bool
	// named says that its first argument is a name, which errors show.
	named bool
	// parse reads the option's tokens, and leaves none over. d stands on the
	// option's name. The error needs neither the name nor the place.
	parse func(d *caddyfile.Dispenser, into T) error
}

// options are the options of one kind of block, by name.
type options[T any] map[string]option[T]

// merge is o and more.
func (o options[T]) merge(more options[T]) options[T] {
	maps.Copy(o, more)
	return o
}

// within makes options of a part those of the whole.
func within[T, U any](part func(T) U, opts options[U]) options[T] {
	whole := make(options[T], len(opts))
	for name, opt := range opts {
		whole[name] = option[T]{
			usage: opt.usage, several: opt.several, named: opt.named,
			parse: func(d *caddyfile.Dispenser, into T) error { return opt.parse(d, part(into)) },
		}
	}
	return whole
}

// errSyntax says that an option has too many arguments, or too few.
var errSyntax = errors.New("wrong number of arguments")

// readBlock reads the block that begins on the line of d, if one does. kind is what
// errors call it. What stands where is noted in at.
func (o options[T]) readBlock(d *caddyfile.Dispenser, kind string, into T, at origin) error {
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := o.read(d, kind, into, at); err != nil {
			return err
		}
	}
	return nil
}

// read reads the option that d stands on.
func (o options[T]) read(d *caddyfile.Dispenser, kind string, into T, at origin) error {
	segment := d.NextSegment()
	first := segment[0]
	name := first.Text
	opt, ok := o[name]
	if !ok {
		return errorAt(first, fmt.Errorf("%s has no option %q; it has %s",
			kind, name, strings.Join(slices.Sorted(maps.Keys(o)), ", ")))
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
	// The option gets a dispenser of its own, so that nothing of it, such as a
	// block that it does not take, can be taken for the next option.
	inner := caddyfile.NewDispenser(segment)
	inner.Next()
	err := opt.parse(inner, into)
	if err == nil && inner.Next() {
		err = errSyntax
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errSyntax) && !hasPlace(err, first):
		err = fmt.Errorf("%s: %w; the syntax is `%s`", label, err, opt.usage)
	default:
		err = fmt.Errorf("%s: %w", label, err)
	}
	return errorAt(first, err)
}

// origin is where the options of a block stand in a Caddyfile, by name: their
// tokens, or those of the first where there are several. The tokens that begin the
// block itself are at "".
type origin map[string]caddyfile.Segment

// originOf begins the origin of the block that d stands before.
func originOf(d *caddyfile.Dispenser) origin { return origin{"": {d.Token()}} }

// invalid is an error in the values of some options, the likeliest first.
type invalid struct {
	options []string
	err     error
}

func (e *invalid) Error() string { return e.options[0] + ": " + e.err.Error() }

// place gives err the place of the option that it comes from: in the first block
// where one of its options stands, else that of the first block.
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

// errorAt adds the place of a token to err, unless err has one from further inside.
func errorAt(at caddyfile.Token, err error) error {
	if hasPlace(err, at) {
		return err
	}
	d := caddyfile.NewDispenser([]caddyfile.Token{at})
	d.Next()
	return d.WrapErr(err)
}

// hasPlace recognises the places that dispensers write.
func hasPlace(err error, at caddyfile.Token) bool {
	return strings.Contains(err.Error(), ", at "+at.File+":")
}
