package body

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// words are those by which a field that the table does not name is a credential or names a tenant. They stand between
// "-", "_" and "."; case does not count.
var words = struct{ Credential, Key, Never, Once, Names, Tenant []string }{
	// A word of a credential is one of these, or ends in it.
	Credential: []string{"token", "secret", "auth", "authorization", "apikey", "password", "passphrase", "credential", "credentials"},
	// So is "key" behind a word that is one of these, or ends in it.
	Key: []string{"api", "access", "app", "application", "subscription", "functions"},
	// Where a word contains one of Never or is one of Once, the field is no credential: it changes with every attempt,
	// or is a position in a list.
	Never: []string{"csrf", "xsrf", "verification", "idempoten", "captcha", "turnstile", "nonce", "continuation", "pagination"},
	Once:  []string{"otp", "totp", "mfa", "2fa", "next", "page", "cursor", "sync", "resume", "lock"},
	// Names are such fields as a whole.
	Names: []string{"X-Amz-Client-Token", "X-Ms-Session-Token", "X-Request-Token", "Sec-Token-Binding"},
	// A word of a tenant's name is one of these, also with "id" behind it.
	Tenant: []string{"tenant", "organization", "organisation", "org", "account", "workspace", "namespace", "project", "merchant"},
}

// byWords is the class of a field that the table does not name, by the words of its name.
func byWords(name string) Class {
	class, before := Content, ""
	if slices.Contains(words.Names, name) {
		return Content
	}
	for rest := name; rest != ""; {
		word := rest
		if i := strings.IndexAny(rest, "-_."); i >= 0 {
			word, rest = rest[:i], rest[i+1:]
		} else {
			rest = ""
		}
		switch {
		case slices.ContainsFunc(words.Never, func(w string) bool { // capitals stand at its beginning only
			return strings.Contains(word, w) || strings.EqualFold(word[:min(len(word), len(w))], w)
		}),
			slices.ContainsFunc(words.Once, func(w string) bool { return strings.EqualFold(word, w) }):
			return Content
		case slices.ContainsFunc(words.Credential, func(w string) bool { return endsIn(word, w) }),
			strings.EqualFold(word, "key") && slices.ContainsFunc(words.Key, func(w string) bool { return endsIn(before, w) }):
			class = Credential
		case class == Content && slices.ContainsFunc(words.Tenant, func(w string) bool {
			rest := word[min(len(word), len(w)):]
			return endsIn(word[:len(word)-len(rest)], w) && (rest == "" || strings.EqualFold(rest, "id"))
		}):
			class = Tenant
		}
		before = word
	}
	return class
}

func endsIn(word, end string) bool {
	return len(word) >= len(end) && strings.EqualFold(word[len(word)-len(end):], end)
}

// Change makes names fields of class, which is Credential or Tenant; a name with "-" in front is none any more.
// It returns how t differs by that from what it was, in one form for all spellings of the same.
func (t *Fields) Change(class Class, names []string) (differences []string, err error) {
	seen := map[string]bool{} // whether it is removed
	for _, written := range names {
		name, removed := strings.CutPrefix(written, "-")
		field := http.CanonicalHeaderKey(name)
		is := t.Class(field) == class
		before, again := seen[field]
		switch {
		case again && before == removed:
		case again:
			return nil, fmt.Errorf("%s is written with and without -; leave one of them out", name)
		case field == "Cookie":
			return nil, errors.New("cookies change by themselves; write `caller cookie NAME` with the cookies that name a caller")
		case removed && !is:
			return nil, fmt.Errorf("-%s: the field counts for nothing here that could be removed; correct its name, or leave it out", name)
		case removed:
			t.Set(Content, field)
			differences = append(differences, "-"+field)
		case !is:
			t.Set(class, field)
			differences = append(differences, field)
		}
		seen[field] = removed
	}
	slices.Sort(differences)
	return differences, nil
}

// Join joins the values of the fields of a class in a header, but for empty ones. Different values never give the
// same text, and the order of the fields does not count.
func (t *Fields) Join(h http.Header, class Class) string {
	var array [8]string
	fields := array[:0]
	for name := range h {
		if t.Class(name) == class {
			fields = append(fields, name)
		}
	}
	if len(fields) == 0 {
		return ""
	}
	slices.Sort(fields)
	var text [512]byte
	b := text[:0]
	for _, name := range fields {
		for _, value := range h[name] {
			if value == "" {
				continue
			}
			b = append(append(b, name...), '=')
			b = append(strconv.AppendInt(b, int64(len(value)), 10), ':')
			b = append(append(b, value...), ';')
		}
	}
	return string(b)
}
