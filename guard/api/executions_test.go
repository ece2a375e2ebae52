package api

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// Whatever the id, the path that the gateway makes of it leads back to it.
func FuzzIDInAPath(f *testing.F) {
	for _, id := range []string{"order-7", "a/b", "..", ".", `"`, `"\`, `"a"`, "%2F", "a?b#c;d&e=f", "output", "~!*'()"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		if execution.CheckID(id) != nil {
			return
		}
		for suffix, output := range map[string]bool{"": false, "/output": true, "/output?key=ab": true} {
			u, err := url.Parse(problem.ExecutionPath(id) + suffix)
			if err != nil {
				t.Fatalf("%q: %v", id, err)
			}
			to, _ := parseRoute(u)
			q, err := parseQuestion(to.name, u.RawQuery)
			if err != nil || q.id != id || q.output != output {
				t.Errorf("%q: %+v, %v", id, q, err)
			}
		}
	})
}

// Whatever is asked, it is read or refused with a 400, and no wait is too long.
func FuzzExecutionQuestion(f *testing.F) {
	for _, text := range []string{"a", "a/output", "a?wait=30s", "a?wait=60", "%", "a?wait=-1", "a/b", "%22a%22", "a?key=AB&method=POST&path=%2Fx", "a?wait=9e9h"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		u, err := url.Parse(problem.ExecutionsPath + text)
		if err != nil {
			return
		}
		to, ok := parseRoute(u)
		if !ok {
			t.Fatalf("%q is no path of executions", text)
		}
		q, err := parseQuestion(to.name, u.RawQuery)
		var p *problem.Problem
		switch {
		case err == nil:
			if execution.CheckID(q.id) != nil || q.wait < 0 || q.wait > router.LongestQuestion {
				t.Errorf("%q is read as %+v", text, q)
			}
		case !errors.As(err, &p) || p.Kind().Status != 400:
			t.Errorf("%q: %v", text, err)
		}
	})
}

// What a caller sees of its call has its line, also where a part of that is empty: "POST http://a HTTP/1.1" has no path.
func TestExecutionHasItsLine(t *testing.T) {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	e := &execution.Recorded{Finding: execution.Finding{Record: &execution.Record{State: execution.StateRolledBack, Created: at}}}
	text, err := json.Marshal(describeExecution("", "k", e))
	var members map[string]any
	if err := cmp.Or(err, json.Unmarshal(text, &members)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"method", "path", "action"} {
		if value, there := members[name]; value != "" {
			t.Errorf("%s: %v, %t", name, value, there)
		}
	}
}
