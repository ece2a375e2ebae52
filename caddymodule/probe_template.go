package caddymodule

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// template is text with placeholders whose values are escaped.
type template []templatePart

type templatePart struct {
	text        string
	placeholder bool
	escape      func(string) string
}

// parseTemplate reads text with {placeholders}.
func parseTemplate(text string, escape func(string) string) (template, error) {
	var t template
	for text != "" {
		before, rest, open := strings.Cut(text, "{")
		if before != "" {
			t = append(t, templatePart{text: before})
		}
		if !open {
			break
		}
		name, after, closed := strings.Cut(rest, "}")
		if !closed || name == "" {
			return nil, errors.New("a placeholder is empty or not closed")
		}
		t = append(t, templatePart{text: name, placeholder: true, escape: escape})
		text = after
	}
	return t, nil
}

// varies reports that a placeholder is not the same for all requests.
func (t template) varies() bool {
	return slices.ContainsFunc(t, func(part templatePart) bool {
		space, _, _ := strings.Cut(part.text, ".")
		return part.placeholder && !slices.Contains([]string{"env", "file", "system", "time"}, space)
	})
}

// sample is the template with something in the place of each value.
func (t template) sample() string {
	var b strings.Builder
	for _, part := range t {
		if part.placeholder {
			b.WriteString("x")
		} else {
			b.WriteString(part.text)
		}
	}
	return b.String()
}

// fill writes the template out. A placeholder without a value is an error: the
// request would ask something else than was meant.
func (t template) fill(repl *caddy.Replacer) (string, error) {
	var b strings.Builder
	for _, part := range t {
		if !part.placeholder {
			b.WriteString(part.text)
			continue
		}
		value, _ := repl.GetString(part.text)
		if value == "" {
			return "", fmt.Errorf("placeholder {%s} has no value", part.text)
		}
		b.WriteString(part.escape(value))
	}
	return b.String(), nil
}
