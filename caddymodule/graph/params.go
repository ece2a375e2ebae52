package graph

import (
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

const (
	// maxQuery is the longest query string, in bytes.
	maxQuery = 4 << 10
	// longestWait bounds what a question may wait.
	longestWait = 60 * time.Second
)

// params are the parameters of a question.
type params struct{ values url.Values }

// parseParams reads a query of which each of the names may stand once. Others are
// left alone.
func parseParams(u *url.URL, names ...string) (params, error) {
	if len(u.RawQuery) > maxQuery {
		return params{}, badParameter("The query is longer than 4096 bytes.")
	}
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return params{}, badParameter("The query is not percent-encoded correctly.")
	}
	for _, name := range names {
		if len(values[name]) > 1 {
			return params{}, badParameter(name + " stands more than once.")
		}
	}
	return params{values}, nil
}

// number reads a parameter that is a size or an index. It reports whether it is there.
func (p params) number(name string) (n int64, there bool, err error) {
	if !p.values.Has(name) {
		return 0, false, nil
	}
	n, ok := parseNumber(p.values.Get(name))
	if !ok {
		return 0, true, badParameter(name + " is not a whole number from 0 on, without a sign or leading zeros.")
	}
	return n, true, nil
}

// required is number for a parameter that must be there.
func (p params) required(name string) (int64, error) {
	n, there, err := p.number(name)
	if err == nil && !there {
		err = badParameter(name + " is missing.")
	}
	return n, err
}

// parseNumber reads a whole number of at most 18 digits in its one form.
func parseNumber(text string) (int64, bool) {
	if len(text) == 0 || len(text) > 18 || len(text) > 1 && text[0] == '0' {
		return 0, false
	}
	if strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// wait reads a duration, or a number of seconds. What is too long is as long as is
// allowed.
func (p params) wait() (time.Duration, error) {
	if !p.values.Has("wait") {
		return 0, nil
	}
	text := p.values.Get("wait")
	if seconds, ok := parseNumber(text); ok {
		return time.Duration(min(seconds, int64(longestWait/time.Second))) * time.Second, nil
	}
	wait, err := time.ParseDuration(text)
	if err != nil || wait < 0 {
		return 0, badParameter("wait is neither a duration, like 30s, nor a number of seconds.")
	}
	return min(wait, longestWait), nil
}

// name reads a parameter that is an id. It reports whether it is there.
func (p params) name(param string) (id string, there bool, err error) {
	if !p.values.Has(param) {
		return "", false, nil
	}
	id, err = parseName(p.values.Get(param), param)
	return id, true, err
}

// segment reads an id that is the last segment of a path.
func segment(escaped, what string) (string, error) {
	name, err := url.PathUnescape(escaped)
	if err != nil {
		return "", badParameter("The " + what + " is not percent-encoded correctly.")
	}
	return parseName(name, what)
}

// parseName reads the id of a token or a workflow. UUIDs are compared in lower case.
func parseName(id, what string) (string, error) {
	if id == "" || len(id) > ledger.MaxName || !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl) {
		return "", badParameter(what + " is not an id: 1 to 256 bytes without control characters.")
	}
	return canonical(id), nil
}

// canonical writes an id as the ledger has it: UUIDs in lower case.
func canonical(id string) string {
	const form = "00000000-0000-0000-0000-000000000000"
	if len(id) != len(form) {
		return id
	}
	for i := range len(id) {
		if (form[i] == '-') != (id[i] == '-') || form[i] == '0' && !strings.ContainsRune("0123456789abcdefABCDEF", rune(id[i])) {
			return id
		}
	}
	return strings.ToLower(id)
}
