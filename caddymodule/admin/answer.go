package admin

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Answer is an answer that an operator gives in place of the one that was lost.
type Answer struct {
	// Status is from 200 to 599.
	Status int `json:"status"`
	// Header is the header, names with their values.
	Header map[string][]string `json:"header,omitempty"`
	// Body is the body as text: at most 256 KiB.
	Body string `json:"body,omitempty"`
	// BodyBase64 is the body in base64, where it is no text.
	BodyBase64 string `json:"body_base64,omitempty"`
}

// read checks that the answer can be sent as it stands.
func (a *Answer) read() (*guard.Head, []byte, error) {
	if a.Status < 200 || a.Status > 599 {
		return nil, nil, fmt.Errorf("status: %d is no final status; use 200 to 599", a.Status)
	}
	body := []byte(a.Body)
	if a.BodyBase64 != "" {
		if a.Body != "" {
			return nil, nil, errors.New("give either body or body_base64, not both")
		}
		var err error
		if body, err = base64.StdEncoding.DecodeString(a.BodyBase64); err != nil {
			return nil, nil, fmt.Errorf("body_base64: %w", err)
		}
	}
	if len(body) > 0 && (a.Status == http.StatusNoContent || a.Status == http.StatusNotModified) {
		return nil, nil, fmt.Errorf("body: an answer with the status %d has none", a.Status)
	}
	header, err := a.fields(len(body))
	if err != nil {
		return nil, nil, fmt.Errorf("header: %w", err)
	}
	return &guard.Head{Status: a.Status, Header: header}, body, nil
}

// fields is the header with canonical names.
func (a *Answer) fields(length int) (map[string][]string, error) {
	header := make(http.Header, len(a.Header))
	for _, name := range slices.Sorted(maps.Keys(a.Header)) {
		if !httpguts.ValidHeaderFieldName(name) {
			return nil, fmt.Errorf("%q is no name of a header field", name)
		}
		canonical := textproto.CanonicalMIMEHeaderKey(name)
		if header[canonical] != nil {
			return nil, fmt.Errorf("%s stands twice; give one name all its values", canonical)
		}
		values := a.Header[name]
		if len(values) == 0 {
			return nil, fmt.Errorf("%s has no values; leave it out", canonical)
		}
		for _, value := range values {
			if !httpguts.ValidHeaderFieldValue(value) {
				return nil, fmt.Errorf("%s has a value with a control character", canonical)
			}
		}
		header[canonical] = values
	}
	for _, name := range []string{"Content-Encoding", "Trailer"} {
		if header[name] != nil {
			return nil, fmt.Errorf("%s: give the plain body, without it", name)
		}
	}
	if values := header["Content-Length"]; values != nil && !slices.Equal(values, []string{strconv.Itoa(length)}) {
		return nil, fmt.Errorf("Content-Length: the body has %d bytes; leave it out", length)
	}
	replayable := answer.Replayable(header)
	for _, name := range slices.Sorted(maps.Keys(header)) {
		if _, ok := replayable[name]; !ok {
			return nil, fmt.Errorf("%s is never replayed; leave it out", name)
		}
	}
	return replayable, nil
}
