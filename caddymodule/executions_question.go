package caddymodule

import (
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execid"
)

// question is what a caller asks about its executions.
type question struct {
	id     string
	output bool // the answer, not the state
	wait   time.Duration

	// What narrows it, where the id was used more than once. Empty is any.
	key, method, path string
}

// concerns reports whether an execution with the id is meant.
func (q *question) concerns(e *guard.Recorded) bool {
	return (q.key == "" || q.key == e.Key.Hex()) &&
		(q.method == "" || q.method == e.Record.Method) &&
		(q.path == "" || q.path == e.Record.Path)
}

// parseQuestion reads the URL of a request below executionsPath.
func parseQuestion(u *url.URL) (question, error) {
	var q question
	name, rest, more := strings.Cut(strings.TrimPrefix(u.EscapedPath(), executionsPath), "/")
	if more && rest != "output" {
		return q, badParameter("Below an id there is only /output. A slash that belongs to the id is written as %2F.")
	}
	q.output = more
	id, err := url.PathUnescape(name)
	if err != nil {
		return q, badParameter("The id is not percent-encoded correctly.")
	}
	// In quotes as in a header field, or bare. A comma is no list here.
	if strings.HasPrefix(id, `"`) {
		id, err = execid.ParseHeader([]string{id})
	} else {
		err = execid.Check(id)
	}
	if err != nil {
		return q, invalidID(err)
	}
	q.id = id
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return q, badParameter("The query is not percent-encoded correctly.")
	}
	q.key, q.method, q.path = strings.ToLower(values.Get("key")), values.Get("method"), values.Get("path")
	if values.Has("wait") {
		if q.wait, err = parseWait(values.Get("wait")); err != nil {
			return q, err
		}
	}
	return q, nil
}

func badParameter(detail string) error { return problem.New(problem.ParameterInvalid, detail) }

// parseWait reads a duration, or a number of seconds. What is too long is as long as
// is allowed.
func parseWait(text string) (time.Duration, error) {
	wait, err := time.ParseDuration(text)
	if seconds, notSeconds := strconv.ParseUint(text, 10, 64); notSeconds == nil {
		wait, err = time.Duration(min(seconds, uint64(longestWait/time.Second)))*time.Second, nil
	}
	if err != nil || wait < 0 {
		return 0, badParameter("wait is neither a duration, like 30s, nor a number of seconds.")
	}
	return min(wait, longestWait), nil
}

// inPath writes an execution id as a segment of a path. The quoted form keeps apart
// what would be read as something else.
func inPath(id string) string {
	if id == "." || id == ".." || strings.HasPrefix(id, `"`) {
		id = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(id) + `"`
	}
	return url.PathEscape(id)
}
