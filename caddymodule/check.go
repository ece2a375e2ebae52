package caddymodule

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// The checks of this file serve the Caddyfile and JSON alike.

// check finds sources that name no place, or several.
func (s *IDSource) check() error {
	set := 0
	for _, v := range []string{s.Header, s.Placeholder, s.JSON} {
		if v != "" {
			set++
		}
	}
	switch {
	case set != 1:
		return fmt.Errorf("it names %d places; it needs exactly one of header, placeholder and json", set)
	case s.Header != "":
		return checkFields([]string{s.Header})
	case s.Placeholder != "":
		return checkPlaceholder(s.Placeholder)
	}
	_, err := fingerprint.ParsePointer(s.JSON)
	return err
}

// checkPlaceholder refuses text that is the same for every request: as a caller it
// would show one caller's results to all (P3), as an id it would make all calls one.
func checkPlaceholder(text string) error {
	if _, rest, open := strings.Cut(text, "{"); open {
		if end := strings.IndexByte(rest, '}'); end > 0 {
			return nil
		}
	}
	return fmt.Errorf("%q has no placeholder and is the same for every request; write one like {http.auth.user.id}", text)
}

// checkFields checks names of header fields.
func checkFields(names []string) error {
	for _, name := range names {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("%q is no name of a header field", name)
		}
	}
	return nil
}

// canonical makes one list of all spellings and orders of the same fields, so that
// no rewriting of the configuration makes another caller of anybody (P1).
func canonical(fields []string) []string {
	names := make([]string, len(fields))
	for i, name := range fields {
		names[i] = http.CanonicalHeaderKey(name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// parsePointers reads JSON pointers to members of a body.
func parsePointers(texts []string) ([]fingerprint.Pointer, error) {
	var pointers []fingerprint.Pointer
	for _, text := range texts {
		p, err := fingerprint.ParsePointer(text)
		if err != nil {
			return nil, err
		}
		if text == "" {
			return nil, errors.New("an empty JSON pointer is the whole body; name a member of it")
		}
		pointers = append(pointers, p)
	}
	return pointers, nil
}
