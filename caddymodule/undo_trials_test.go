package caddymodule

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// What holds up an undo is remembered until its step has ended, and no more than is bounded.
func TestUndoTrials(t *testing.T) {
	var all undoTrials
	post, get := &rollback.Outgoing{Method: "POST", Checkpoint: "c0", Step: "c1"}, &rollback.Outgoing{Method: "GET", Checkpoint: "c0", Step: "c1"}
	all.tried(get, &rollback.Answer{Status: 404}, nil) // a look that finds nothing
	all.tried(post, &rollback.Answer{Status: 201}, nil)
	if got, ok := all.of("c1"); ok {
		t.Errorf("%+v", got)
	}
	all.tried(post, nil, errors.New("connection refused"))
	all.tried(post, &rollback.Answer{Status: 503}, nil)
	if got, _ := all.of("c1"); got.Attempts != 2 || !strings.Contains(got.Cause, "503") {
		t.Errorf("%+v", got)
	}
	all.tried(get, nil, errors.New("connection refused"))
	if got, _ := all.of("c1"); got.Attempts != 3 || got.Cause != "GET: connection refused" {
		t.Errorf("%+v", got)
	}
	all.ended("c1")
	if got, ok := all.of("c1"); ok {
		t.Errorf("%+v", got)
	}
	for i := range maxTrials + 1 {
		all.tried(&rollback.Outgoing{Step: strconv.Itoa(i)}, nil, errors.New("x"))
	}
	if len(all.all) != maxTrials {
		t.Errorf("%d are remembered", len(all.all))
	}
}
