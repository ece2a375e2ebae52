package caddymodule

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dustin/go-humanize"
)

// The functions of this file read arguments of an option. d stands before them.

// parseWord reads one argument.
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

// parseWords reads one argument or more.
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

func parseChoice(d *caddyfile.Dispenser, into *string, choices ...string) error {
	if err := parseWord(d, into); err != nil {
		return err
	}
	return oneOf(*into, choices...)
}

// oneOf checks a word against those that are known.
func oneOf(word string, known ...string) error {
	for _, k := range known {
		if word == k {
			return nil
		}
	}
	list := known[len(known)-1]
	if len(known) > 1 {
		list = strings.Join(known[:len(known)-1], ", ") + " or " + list
	}
	return fmt.Errorf("%q is unknown; use %s", word, list)
}

func parseDuration(d *caddyfile.Dispenser, into *caddy.Duration) error {
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
	*into = caddy.Duration(v)
	return checkDuration(*into)
}

// longest is more than anybody waits, and keeps times within what 64 bits of
// nanoseconds can say: an expiry that wraps around would free a key (P1).
const longest = 100 * 365 * 24 * time.Hour

// checkDuration checks a duration of a configuration, where 0 is the default.
func checkDuration(v caddy.Duration) error {
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
	// ParseBytes takes commas out: 1,5MiB would be 15 MiB.
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

// parseMatchers reads one set of request matchers, all of which must match. Further
// sets are alternatives.
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

// parseStatuses reads statuses, where 5xx is a class, as response matchers have
// them: a class is its first digit.
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
