package caddymodule

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// Evidence matches an answer. All that is set must hold.
type Evidence struct {
	// Status and header of the answer.
	caddyhttp.ResponseMatcher

	// Values in the answer's JSON body, by JSON pointer: strings or numbers.
	JSON map[string]string `json:"json,omitempty"`

	pointers map[string]fingerprint.Pointer
}

func (e *Evidence) provision() error {
	if e == nil {
		return nil
	}
	if len(e.StatusCode) == 0 && len(e.Headers) == 0 && len(e.JSON) == 0 {
		return errors.New("it names no status, header or json, and would match every answer")
	}
	if err := checkAnswer(&e.ResponseMatcher); err != nil {
		return err
	}
	e.pointers = map[string]fingerprint.Pointer{}
	for text := range e.JSON {
		p, err := fingerprint.ParsePointer(text)
		if err != nil {
			return fmt.Errorf("json %q: %w", text, err)
		}
		e.pointers[text] = p
	}
	return nil
}

func (e *Evidence) matches(a *errandAnswer) bool {
	if e == nil || !e.Match(a.status, a.header) {
		return false
	}
	for text, want := range e.JSON {
		got, found, err := fingerprint.Lookup(bytes.NewReader(a.body), int64(len(a.body)), e.pointers[text])
		if err != nil || !found || got != want {
			return false
		}
	}
	return true
}
