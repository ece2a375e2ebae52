package circuits

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// InBand names answers that are failures although their status is good. Exactly one of
// JSON, Header and SSEError is set.
type InBand struct {
	// A JSON pointer into the answer's body: the answer failed if a value other than
	// null is there. Bodies over 64 KiB, and those with a Content-Encoding, are not
	// looked into. A probe's answer is then judged at its end.
	JSON string `json:"json,omitempty"`

	// A header or trailer field: the answer failed if it has one.
	Header string `json:"header,omitempty"`

	// What the value has to be: in JSON a string, or a number as it is written. It may
	// begin or end with *, which stands for anything. Default: anything.
	Value string `json:"value,omitempty"`

	// An event stream failed that sends an event called `error`, or one whose data
	// begins with a JSON member `error`. A probe's answer is then judged by its first
	// event.
	SSEError bool `json:"sse_error,omitempty"`
}

// rule is an InBand that was checked.
type rule struct {
	InBand
	pointer fingerprint.Pointer
}

func (b InBand) rule() (rule, error) {
	set := 0
	for _, on := range []bool{b.JSON != "", b.Header != "", b.SSEError} {
		if on {
			set++
		}
	}
	switch {
	case set != 1:
		return rule{}, fmt.Errorf("a rule names %d places; it needs exactly one of json, header and sse_error", set)
	case b.SSEError && b.Value != "":
		return rule{}, errors.New("sse_error takes no value")
	case b.Header != "" && !httpguts.ValidHeaderFieldName(b.Header):
		return rule{}, fmt.Errorf("%q is no name of a header field", b.Header)
	}
	p, err := fingerprint.ParsePointer(b.JSON)
	if err != nil {
		return rule{}, fmt.Errorf("json %q: %w", b.JSON, err)
	}
	return rule{b, p}, nil
}

// HeaderFault returns what in an answer's header or trailer makes it a failure, in a few
// words, or nothing.
func (c *Circuits) HeaderFault(header http.Header) string {
	for i := range c.checked.inBand {
		r := &c.checked.inBand[i]
		if r.Header == "" {
			continue
		}
		for _, value := range header.Values(r.Header) {
			if r.matches(value) {
				return "header " + r.Header
			}
		}
	}
	return ""
}

// BodyFault returns what in a JSON body makes the answer a failure, in a few words, or
// nothing.
func (c *Circuits) BodyFault(body []byte) string {
	for i := range c.checked.inBand {
		r := &c.checked.inBand[i]
		if r.JSON == "" {
			continue
		}
		value, found, err := fingerprint.Lookup(bytes.NewReader(body), int64(len(body)), r.pointer)
		whole := errors.Is(err, fingerprint.ErrNotScalar) && r.Value == ""
		if whole || err == nil && found && r.matches(value) {
			return "json " + r.JSON
		}
	}
	return ""
}

// LooksInto tells which kinds of bodies have to be looked into.
func (c *Circuits) LooksInto() (json, events bool) {
	for i := range c.checked.inBand {
		json = json || c.checked.inBand[i].JSON != ""
		events = events || c.checked.inBand[i].SSEError
	}
	return json, events
}

func (r *rule) matches(value string) bool {
	want, begins := strings.CutSuffix(r.Value, "*")
	want, ends := strings.CutPrefix(want, "*")
	switch {
	case r.Value == "":
		return true
	case begins && ends:
		return strings.Contains(value, want)
	case begins:
		return strings.HasPrefix(value, want)
	case ends:
		return strings.HasSuffix(value, want)
	}
	return value == want
}
