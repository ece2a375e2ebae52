package rollback_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Every answer of MicroProfile LRA's contract has a defined meaning, and what is final is
// sent once, in this life and in the next (C-4.1.2-b, B-normative-g).
func TestCascade412FinalAnswers(t *testing.T) {
	for _, c := range []struct {
		answer  int
		reason  rollback.Reason
		unknown bool
	}{
		{200, "", false},
		{201, "", false},
		{204, "", false},
		{410, "", false},
		{409, rollback.ReasonRefused, false},
		{401, rollback.ReasonUnauthorized, false},
		{403, rollback.ReasonUnauthorized, false},
		// Turned away for what the request is: nothing was done.
		{405, rollback.ReasonUnexpected, false},
		{411, rollback.ReasonUnexpected, false},
		{413, rollback.ReasonUnexpected, false},
		{414, rollback.ReasonUnexpected, false},
		{415, rollback.ReasonUnexpected, false},
		{421, rollback.ReasonUnexpected, false},
		{426, rollback.ReasonUnexpected, false},
		{431, rollback.ReasonUnexpected, false},
		{501, rollback.ReasonUnexpected, false},
		// P6: the contract does not know it, and it says nothing of the effect.
		{404, rollback.ReasonUnexpected, true},
		{418, rollback.ReasonUnexpected, true},
		{400, rollback.ReasonUnexpected, true},
		{302, rollback.ReasonUnexpected, true},
		{303, rollback.ReasonUnexpected, true},
		{422, rollback.ReasonUnexpected, true},
		{412, rollback.ReasonUnexpected, true},
		{99, rollback.ReasonUnexpected, true},
		{999, rollback.ReasonUnexpected, true},
		{0, rollback.ReasonUnexpected, true},
	} {
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
			t.Run(fmt.Sprint(c.answer, " ", way), func(t *testing.T) {
				bubble(t, func(t *testing.T, r *undoRig) {
					r.answers(c.answer)
					want := rollback.Result{Done: c.reason == "", Unknown: c.unknown, Reason: c.reason, Status: c.answer, Attempts: 1}
					r.wants(task(way, rollback.Spec{}), want)
					r.restart(-1)
					r.wants(task(way, rollback.Spec{}), want)
					if len(r.sent) != 1 {
						t.Errorf("sent %d times", len(r.sent))
					}
				})
			})
		}
	}
}

// The body of a compensation's 2xx need not be one that anybody can read.
func TestCompensationAnswersGarbage(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers("garbage \x00{")
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// refunding is a compensation that is a call of a tool.
func refunding(id string) rollback.Spec {
	return rollback.Spec{Protocol: protocol.MCP, Compensate: &template.Spec{
		Method: "POST", URL: "/mcp", ContentType: "application/json",
		Body: `{{"jsonrpc":"2.0",` + id + `"method":"tools/call","params":{{"name":"refund","arguments":{{"charge":"{response.json./id}"}}}}}}`,
	}}
}

// spoken is the answer to a message, with a body or a stream of events.
func spoken(status int, body string) *rollback.Answer {
	as := "application/json"
	if strings.HasPrefix(body, "data:") {
		as = "text/event-stream"
	}
	return &rollback.Answer{Status: status, Header: http.Header{"Content-Type": {as}}, Body: []byte(body)}
}

// P6: a message is done where a result says so, whatever its status, and nothing that is not
// understood is. An error that precedes execution has had no effect; others may have had one.
func TestP6CompensationsByMessage(t *testing.T) {
	const (
		call    = `"id":7,`
		refused = rollback.ReasonRefused
		odd     = rollback.ReasonUnexpected
		late    = rollback.ReasonTimeout
	)
	for _, c := range []struct {
		id, answer string
		status     int
		reason     rollback.Reason
		unknown    bool
	}{
		{call, `{"jsonrpc":"2.0","id":7,"result":{"content":[]}}`, 200, "", false},
		{call, "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{\"content\":[]}}\n\n", 200, "", false},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"content":[],"isError":true}}`, 200, refused, false},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"structuredContent":{"status":"failed"}}}`, 200, refused, false},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32601}}`, 200, odd, false},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32602}}`, 200, odd, true},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":4}}`, 200, odd, true},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32603}}`, 200, late, true},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32050}}`, 200, late, true},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"resultType":"input_required"}}`, 200, odd, true},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"task":{"taskId":"t","status":"completed"}}}`, 200, "", false},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"task":{"taskId":"t","status":"failed"}}}`, 200, refused, false},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"task":{"taskId":"t","status":"cancelled"}}}`, 200, odd, true},
		// Another guard: what passes is tried until the time is over, and its doubt is one.
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32090,"data":{"type":"/.well-known/cascade/problems/circuit-open","status":503}}}`, 200, late, false},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32090,"data":{"type":"/.well-known/cascade/problems/key-required","status":400}}}`, 200, odd, false},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32090,"data":{"type":"/.well-known/cascade/problems/in-doubt","status":409}}}`, 200, late, true},
		// A stream without its end, an error after progress, what is for others, and what nobody understands.
		{call, "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\n", 200, late, true},
		{call, "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{\"content\":[]}}\n", 200, late, true},
		{call, "data: {\"method\":\"notifications/progress\"}\n\ndata: {\"id\":7,\"error\":{\"code\":-32601}}\n\n", 200, late, true},
		{call, `{"jsonrpc":"2.0","id":8,"result":{"content":[]}}`, 200, late, true},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"content":[]}`, 200, late, true},
		{call, `{"status":"completed"}`, 200, late, true},
		{call, `<html>`, 200, late, true},
		{call, ``, 200, late, true},
		{call, ``, 202, late, true},
		{"", `{"jsonrpc":"2.0","result":{"content":[]}}`, 200, odd, true}, // a notification has no answer
		// The status of the transport.
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32600}}`, 400, odd, false},
		{call, `no`, 404, odd, false},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32602}}`, 400, odd, true},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"content":[]}}`, 410, odd, true},
		{call, `{"jsonrpc":"2.0","id":7,"error":{"code":-32601}}`, 500, odd, false},
		{call, `{"jsonrpc":"2.0","id":7,"result":{"content":[]}}`, 500, late, true},
		{call, ``, 401, rollback.ReasonUnauthorized, false},
		{call, ``, 429, late, false},
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			r.answers(spoken(c.status, c.answer))
			task := task(checkpoint.Compensate, refunding(c.id))
			for life := range 2 {
				got := r.undo(task)
				if got.Done != (c.reason == "") || got.Reason != c.reason || got.Unknown != c.unknown || life == 0 && got.Status != c.status {
					t.Errorf("%d %s: %+v", c.status, c.answer, got)
				}
				r.restart(-1)
			}
			sent := 0
			for _, o := range r.sent {
				if strings.Contains(string(o.Body), "tools/call") {
					sent++
				}
			}
			if c.reason != late && sent != 1 {
				t.Errorf("%s: sent %d times", c.answer, sent)
			}
		})
	}
	// What passes is done later.
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(spoken(200, `{"jsonrpc":"2.0","id":7,"error":{"code":-32603}}`), spoken(200, `{"jsonrpc":"2.0","id":7,"result":{}}`))
		r.wants(task(checkpoint.Compensate, refunding(call)), rollback.Result{Done: true, Status: 200, Attempts: 2})
	})
	// A batch says nothing that could be read, and without a protocol the status decides.
	bubble(t, func(t *testing.T, r *undoRig) {
		spec := refunding(call)
		spec.Compensate.Body = "[" + spec.Compensate.Body + "]"
		r.answers(spoken(200, `[{"jsonrpc":"2.0","id":7,"result":{}}]`))
		r.wants(task(checkpoint.Compensate, spec), rollback.Result{Unknown: true, Reason: odd, Status: 200, Attempts: 1})
	})
	bubble(t, func(t *testing.T, r *undoRig) {
		spec := refunding(call)
		spec.Protocol = ""
		r.answers(spoken(200, `{"jsonrpc":"2.0","id":7,"error":{"code":-32601}}`))
		r.wants(task(checkpoint.Compensate, spec), rollback.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// What undoes as a task is asked for until the task has ended, and not sent again.
func TestCompensationsAsTasks(t *testing.T) {
	const working = `{"jsonrpc":"2.0","id":"task","result":{"taskId":"t 1","status":"working"}}`
	state := func(word string) string { return strings.Replace(working, "working", word, 1) }
	for _, c := range []struct {
		answers []any
		want    rollback.Result
	}{
		{[]any{working, errLost, spoken(503, ""), `<html>`, state("completed")}, rollback.Result{Done: true, Status: 200, Attempts: 1}},
		{[]any{working, state("failed")}, rollback.Result{Reason: rollback.ReasonRefused, Status: 200, Attempts: 1}},
		{[]any{state("cancelled")}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 200, Attempts: 1}},
		{[]any{state("input_required")}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 200, Attempts: 1}},
		{[]any{`{"jsonrpc":"2.0","id":"task","error":{"code":-32602}}`}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 200, Attempts: 1}},
		{[]any{strings.Replace(state("completed"), "t 1", "t 2", 1)}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 200, Attempts: 1}},
		{[]any{spoken(410, "")}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 200, Attempts: 1}},
		{[]any{working}, rollback.Result{Unknown: true, Reason: rollback.ReasonTimeout, Status: 200, Attempts: 1}},
	} {
		for lives := range 2 {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(append([]any{`{"jsonrpc":"2.0","id":7,"result":{"task":{"taskId":"t 1","status":"working"}}}`}, c.answers...)...)
				task, keys := task(checkpoint.Compensate, inSession("s")), map[string]bool{}
				if lives > 0 { // the process dies while it asks
					answer := r.answer
					r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
						if strings.Contains(string(o.Body), "tasks/get") && r.life.Err() == nil && lives > 0 {
							lives = 0
							r.die()
							return nil, errLost
						}
						return answer(o)
					}
					if _, err := r.Undo(r.life, task); err == nil {
						t.Fatal("it lived on")
					}
					r.restart(-1)
				}
				r.wants(task, c.want)
				for i, o := range r.sent {
					if asks := strings.Contains(string(o.Body), `"method":"tasks/get","params":{"taskId":"t 1"}`); asks != (i > 0) || o.Header.Get("Mcp-Session-Id") != "s" || keys[o.Header.Get("Idempotency-Key")] {
						t.Errorf("request %d: %s %v", i, o.Body, o.Header)
					}
					keys[o.Header.Get("Idempotency-Key")] = true
				}
			})
		}
	}
	// In a session of its own, which stays while the task works.
	bubble(t, func(t *testing.T, r *undoRig) {
		s := toolServer{gone: 404, answer: []any{`{"jsonrpc":"2.0","id":7,"result":{"task":{"taskId":"t 1","status":"working"}}}`, state("completed")}}
		r.answer = s.serve
		r.wants(task(checkpoint.Compensate, inSession("old")), rollback.Result{Done: true, Status: 200, Attempts: 2})
		want := []string{"tools/call old", "initialize", "notifications/initialized new 2025-06-18", "tools/call new 2025-06-18", "tasks/get new"}
		if !slices.Equal(s.log, want) {
			t.Errorf("%q", s.log)
		}
	})
}

// toolServer is a server of MCP whose sessions end. It executes a call in any session that it knows.
type toolServer struct {
	gone    int // the status for a session that it does not know
	opens   []any
	ready   int    // the status for notifications/initialized; 0 is 202
	version string // the revision that it chooses
	log     []string
	keys    []string // of what opens and ends sessions
	calls   int
	answer  []any // to what is executed; empty is a result
}

func (s *toolServer) serve(o *rollback.Outgoing) (*rollback.Answer, error) {
	session := o.Header.Get("Mcp-Session-Id")
	method, _, _ := strings.Cut(string(o.Body[max(0, bytes.Index(o.Body, []byte(`"method":"`))):]), `",`)
	method, _, _ = strings.Cut(strings.TrimPrefix(method, `"method":"`), `"`)
	s.log = append(s.log, strings.TrimSpace(cmp.Or(method, o.Method)+" "+session+" "+o.Header.Get("Mcp-Protocol-Version")))
	if method != "tools/call" {
		s.keys = append(s.keys, o.Header.Get("Idempotency-Key"))
	}
	next := func(of *[]any, otherwise any) (*rollback.Answer, error) {
		if len(*of) > 0 {
			otherwise, *of = (*of)[0], (*of)[1:]
		}
		switch a := otherwise.(type) {
		case error:
			return nil, a
		case int:
			return &rollback.Answer{Status: a}, nil
		}
		return spoken(200, otherwise.(string)), nil
	}
	switch {
	case o.Method == http.MethodDelete:
		return &rollback.Answer{Status: 204}, nil
	case method == "initialize":
		a, err := next(&s.opens, `{"jsonrpc":"2.0","id":"initialize","result":{"protocolVersion":"`+cmp.Or(s.version, "2025-06-18")+`","capabilities":{}}}`)
		if a != nil && a.Status == 200 {
			a.Header.Set("Mcp-Session-Id", "new")
		}
		return a, err
	case method == "notifications/initialized":
		return &rollback.Answer{Status: cmp.Or(s.ready, 202)}, nil
	case session != "new":
		return spoken(s.gone, `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}`), nil
	}
	s.calls++
	return next(&s.answer, `{"jsonrpc":"2.0","id":7,"result":{"content":[]}}`)
}

// inSession is a compensation in a session.
func inSession(id string) rollback.Spec {
	spec := refunding(`"id":7,`)
	if id != "" {
		spec.Compensate.Header = []template.Field{{Name: "Mcp-Session-Id", Value: id}}
	}
	return spec
}

// P1: an undo goes into a new session where the server has proven that it was not executed in the one
// that it was sent in, and is executed once.
func TestP1CompensationsInANewSession(t *testing.T) {
	opened := []string{"initialize", "notifications/initialized new 2025-06-18", "tools/call new 2025-06-18", "DELETE new 2025-06-18"}
	for _, c := range []struct {
		name, session string
		server        toolServer
		want          rollback.Result
		log           []string
	}{
		{"ended", "old", toolServer{gone: 404}, rollback.Result{Done: true, Status: 200, Attempts: 2}, append([]string{"tools/call old"}, opened...)},
		{"unknown", "old", toolServer{gone: 400}, rollback.Result{Done: true, Status: 200, Attempts: 2}, append([]string{"tools/call old"}, opened...)},
		{"none", "", toolServer{gone: 400}, rollback.Result{Done: true, Status: 200, Attempts: 2}, append([]string{"tools/call"}, opened...)},
		{"known", "new", toolServer{gone: 404}, rollback.Result{Done: true, Status: 200, Attempts: 1}, []string{"tools/call new"}},
		{"failed there", "old", toolServer{gone: 404, answer: []any{`{"jsonrpc":"2.0","id":7,"result":{"isError":true}}`}},
			rollback.Result{Reason: rollback.ReasonRefused, Status: 200, Attempts: 2}, append([]string{"tools/call old"}, opened...)},
		// Only what was not executed is sent once more, and only where a session can be had.
		{"error", "old", toolServer{gone: 401}, rollback.Result{Reason: rollback.ReasonUnauthorized, Status: 401, Attempts: 1}, []string{"tools/call old"}},
		{"executed", "new", toolServer{answer: []any{`{"jsonrpc":"2.0","id":7,"error":{"code":-32602}}`}},
			rollback.Result{Reason: rollback.ReasonUnexpected, Unknown: true, Status: 200, Attempts: 1}, []string{"tools/call new"}},
		{"no server", "old", toolServer{gone: 404, opens: []any{404}},
			rollback.Result{Reason: rollback.ReasonUnexpected, Status: 404, Attempts: 1}, []string{"tools/call old", "initialize"}},
		{"refused", "old", toolServer{gone: 404, opens: []any{`{"jsonrpc":"2.0","id":"initialize","error":{"code":-32600}}`}},
			rollback.Result{Reason: rollback.ReasonUnexpected, Status: 404, Attempts: 1}, []string{"tools/call old", "initialize"}},
		// What passes is tried again from the beginning.
		{"busy", "old", toolServer{gone: 404, opens: []any{503, errLost, errUnsent, `{"jsonrpc":"2.0","id":"other","result":{}}`}},
			rollback.Result{Done: true, Status: 200, Attempts: 6}, append([]string{
				"tools/call old", "initialize", "tools/call old", "initialize", "tools/call old", "initialize", "tools/call old", "initialize", "tools/call old",
			}, opened...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				s := c.server
				r.answer = s.serve
				r.wants(task(checkpoint.Compensate, inSession(c.session)), c.want)
				r.restart(-1)
				r.wants(task(checkpoint.Compensate, inSession(c.session)), c.want)
				if !slices.Equal(s.log, c.log) {
					t.Errorf("%q", s.log)
				}
				slices.Sort(s.keys)
				if len(slices.Compact(s.keys)) != len(s.keys) || slices.Contains(s.keys, key) {
					t.Errorf("what opens a session has the key of another request: %q", s.keys)
				}
				for _, o := range r.sent {
					if strings.Contains(string(o.Body), "tools/call") && (o.Header.Get("Idempotency-Key") != key || o.URL != "/mcp") {
						t.Errorf("%s %v", o.URL, o.Header)
					}
				}
			})
		})
	}
	// In doubt, the session stays, and by default the call is sent again as it was first.
	bubble(t, func(t *testing.T, r *undoRig) {
		s := toolServer{gone: 404, answer: []any{errLost}}
		r.answer = s.serve
		spec := inSession("old")
		spec.OnLost = rollback.UndoEscalate
		r.wants(task(checkpoint.Compensate, spec), rollback.Result{Unknown: true, Reason: rollback.ReasonLost, Attempts: 2, Status: 0})
		if want := append([]string{"tools/call old"}, opened[:3]...); !slices.Equal(s.log, want) {
			t.Errorf("%q", s.log)
		}
	})
	// A server without sessions has none to open.
	bubble(t, func(t *testing.T, r *undoRig) {
		s := toolServer{gone: 404}
		r.answer = s.serve
		spec := inSession("")
		spec.Compensate.Header = []template.Field{{Name: "Mcp-Protocol-Version", Value: "2026-07-28"}}
		r.wants(task(checkpoint.Compensate, spec), rollback.Result{Reason: rollback.ReasonUnexpected, Status: 404, Attempts: 1})
	})
	// A life can end between any two steps.
	for n := range 24 {
		bubble(t, func(t *testing.T, r *undoRig) {
			s := toolServer{gone: 404}
			r.answer = s.serve
			spec := inSession("old")
			spec.OnLost = rollback.UndoEscalate
			got := r.lives(task(checkpoint.Compensate, spec), n)
			if s.calls > 1 || !got.Done && !got.Unknown || got.Done && s.calls != 1 {
				t.Errorf("%d: %+v after %d calls", n, got, s.calls)
			}
		})
	}
}

// What passes is tried again, later each time, under one key.
func TestCompensationIsTriedAgain(t *testing.T) {
	for _, first := range []any{408, 425, 429, 500, 502, 503, 504, errLost, errUnsent} {
		t.Run(fmt.Sprint(first), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(first, first, first, 200)
				began := time.Now()
				want := rollback.Result{Done: true, Status: 200, Attempts: 4}
				if first == any(errUnsent) {
					want.Attempts = 1
				}
				r.wants(task(checkpoint.Compensate, rollback.Spec{}), want)
				if took := time.Since(began); took != 7*time.Second { // 1 + 2 + 4
					t.Errorf("took %v", took)
				}
				for _, o := range r.sent {
					if o.Header.Get("Idempotency-Key") != key || o.URL != "/refunds" {
						t.Errorf("%s %v", o.URL, o.Header)
					}
				}
				r.restart(-1)
				r.wants(task(checkpoint.Compensate, rollback.Spec{}), want)
				if len(r.sent) != 4 {
					t.Errorf("sent %d times", len(r.sent))
				}
			})
		})
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	for _, after := range []string{"90", time.Date(2000, 1, 1, 0, 1, 30, 0, time.UTC).Format(http.TimeFormat)} {
		bubble(t, func(t *testing.T, r *undoRig) {
			r.answers(later(429, after), 200)
			began := time.Now()
			r.undo(task(checkpoint.Compensate, rollback.Spec{}))
			if took := time.Since(began); took != 90*time.Second {
				t.Errorf("%q: took %v", after, took)
			}
		})
	}
}

// ATD, "Rollback Timeout and Escalation": what asks for more time than there is left does not
// end an undo. It is tried until it is due, and nothing is called a timeout before.
func TestLongRetryAfterEndsNothing(t *testing.T) {
	for _, status := range []int{429, 503} {
		bubble(t, func(t *testing.T, r *undoRig) {
			answers := []any{later(status, "999999"), later(status, "999999"), 200}
			r.answers(answers...)
			began := time.Now()
			r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 3})
			if took := time.Since(began); took != due*3/4 { // half of what is left, twice
				t.Errorf("took %v", took)
			}
		})
		bubble(t, func(t *testing.T, r *undoRig) {
			r.answers(later(status, "999999"))
			task := task(checkpoint.Compensate, rollback.Spec{})
			got := r.undo(task)
			if got.Reason != rollback.ReasonTimeout || got.Attempts < 5 || got.Attempts > 20 || !time.Now().Equal(task.Due) {
				t.Errorf("%v before it was due: %+v", time.Until(task.Due), got)
			}
		})
	}
	bubble(t, func(t *testing.T, r *undoRig) { // what is asked how it stands
		r.answers(accepted("/jobs/1"), later(202, "999999"), later(503, "999999"), 200)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// P6: what was not done in time says whether it may have had its effect.
func TestP6Timeout(t *testing.T) {
	for _, c := range []struct {
		answers []any
		reason  rollback.Reason
		unknown bool
		status  int
	}{
		{[]any{429}, rollback.ReasonTimeout, false, 429},
		{[]any{425}, rollback.ReasonTimeout, false, 425},
		{[]any{errUnsent}, rollback.ReasonUnreachable, false, 0},
		{[]any{429, errUnsent}, rollback.ReasonUnreachable, false, 429},
		{[]any{500}, rollback.ReasonTimeout, true, 500},
		{[]any{408}, rollback.ReasonTimeout, true, 408},
		{[]any{errLost}, rollback.ReasonTimeout, true, 0},
		{[]any{errLost, errUnsent}, rollback.ReasonTimeout, true, 0},
		{[]any{errLost, 429}, rollback.ReasonTimeout, true, 429},
		{[]any{202}, rollback.ReasonTimeout, true, 202},
		{[]any{accepted("/jobs/1"), 202}, rollback.ReasonTimeout, true, 202},
		// A refusal says nothing of an earlier attempt.
		{[]any{errLost, 401}, rollback.ReasonUnauthorized, true, 401},
		{[]any{503, 404}, rollback.ReasonUnexpected, true, 404},
		{[]any{503, 409}, rollback.ReasonRefused, true, 409},
		{[]any{429, 409}, rollback.ReasonRefused, false, 409},
	} {
		t.Run(fmt.Sprint(c.answers...), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(c.answers...)
				task := task(checkpoint.Compensate, rollback.Spec{})
				check := func(got rollback.Result) {
					t.Helper()
					got.Attempts = 0
					if want := (rollback.Result{Reason: c.reason, Unknown: c.unknown, Status: c.status}); got != want {
						t.Errorf("got %+v, want %+v", got, want)
					}
				}
				check(r.undo(task))
				if time.Now().After(task.Due) {
					t.Errorf("it took %v too long", time.Since(task.Due))
				}
				n := len(r.changing())
				r.pass(time.Until(task.Due)) // and nothing is sent after it
				r.restart(-1)
				if got := r.undo(task); got.Done || got.Unknown != c.unknown {
					t.Errorf("afterwards: %+v", got)
				}
				if len(r.changing()) != n {
					t.Errorf("sent after the due time")
				}
			})
		})
	}
}

// A template that needs what nobody knows is no request; one that does not is sent for a
// call that is itself in doubt.
func TestCompensationOfACallInDoubt(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		doubtful := task(checkpoint.Compensate, rollback.Spec{})
		doubtful.Checkpoint.Result = nil
		r.wants(doubtful, rollback.Result{Unknown: true, Reason: rollback.ReasonUnfilled})
		if !rollback.LacksValues(doubtful.Checkpoint) || rollback.LacksValues(task(checkpoint.Compensate, rollback.Spec{}).Checkpoint) {
			t.Error("it cannot be known before")
		}
		if len(r.sent) > 0 {
			t.Error("sent all the same")
		}
		enough := task(checkpoint.Compensate, rollback.Spec{Compensate: &template.Spec{Method: "DELETE", URL: "/orders/{execution.id}"}})
		enough.Checkpoint.Result = nil
		if rollback.LacksValues(enough.Checkpoint) {
			t.Error("it lacks nothing")
		}
		r.wants(enough, rollback.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// What cannot be undone is reported, and nothing is sent (C-4.2.1-g).
func TestIrreversible(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		declared := task(checkpoint.Irreversible, rollback.Spec{})
		late := task(checkpoint.Compensate, rollback.Spec{})
		late.Checkpoint.Result.Reason = checkpoint.ReasonTooLarge
		declared.Checkpoint.Snapshot.Reason = checkpoint.ReasonDeclared
		r.wants(declared, rollback.Result{Reason: rollback.ReasonIrreversible, Cause: checkpoint.ReasonDeclared})
		r.wants(late, rollback.Result{Reason: rollback.ReasonIrreversible, Cause: checkpoint.ReasonTooLarge})
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
			unreadable := task(way, rollback.Spec{})
			unreadable.Checkpoint.Snapshot.Undo = []byte(`{"guard":"default","later":1}`)
			r.wants(unreadable, rollback.Result{Reason: rollback.ReasonUnfilled})
			unreadable.Checkpoint.Snapshot.Undo = []byte(`{"guard":"default"}`)
			r.wants(unreadable, rollback.Result{Reason: rollback.ReasonUnfilled})
		}
	})
}

// What the configuration does not lead to any more is not tried again, and sent by the
// next life if it does then.
func TestSenderKnowsNoWay(t *testing.T) {
	for _, why := range []rollback.Reason{rollback.ReasonNoUpstream, rollback.ReasonNoCredentials} {
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(&rollback.SendError{Reason: why, Err: errLost}, 200)
				r.wants(task(way, rollback.Spec{}), rollback.Result{Reason: why})
				r.wants(task(way, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 1})
			})
		}
	}
}

// An operator's word about a doubt counts.
func TestOperatorSettlesTheDoubt(t *testing.T) {
	for _, c := range []struct {
		doubt   any
		applied bool
		answer  *execution.Head
		want    rollback.Result
	}{
		{500, true, nil, rollback.Result{Done: true, Status: 500, Attempts: 1}},
		{202, true, nil, rollback.Result{Done: true, Status: 202, Attempts: 1}},
		{errLost, true, nil, rollback.Result{Done: true, Attempts: 1}},
		{500, true, &execution.Head{Status: 201}, rollback.Result{Done: true, Status: 201, Attempts: 1}},
		{500, true, &execution.Head{Status: 409}, rollback.Result{Reason: rollback.ReasonRefused, Status: 409, Attempts: 1}},
		{500, false, nil, rollback.Result{Done: true, Status: 200, Attempts: 1}},
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			r.answers(c.doubt)
			task := task(checkpoint.Compensate, rollback.Spec{OnLost: rollback.UndoEscalate})
			r.undo(task)
			ctx := context.Background()
			page, err := r.guard.List(ctx, execution.Filter{States: []execution.State{execution.StateInDoubt}}, "", 10)
			if err != nil {
				t.Fatal(err)
			}
			all := page.Executions
			if len(all) != 1 || all[0].Record.Action != "undo" || all[0].Record.Workflow != "w-1" {
				t.Fatalf("%+v", all)
			}
			word := execution.Resolution{By: execution.ByOperator, Applied: c.applied, Operator: "ada", Reason: "asked them", Answer: c.answer}
			if err := r.guard.SettleDoubt(ctx, all[0], word); err != nil {
				t.Fatal(err)
			}
			r.answers(200)
			r.wants(task, c.want)
		})
	}
}

func TestTaskMustBeWhole(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		for _, task := range []rollback.Task{{}, {Rollback: "a/b"}, {Rollback: "a"}, {Rollback: "a", Checkpoint: new(checkpoint.Checkpoint)}} {
			if _, err := r.Undo(context.Background(), task); !errors.Is(err, rollback.ErrTask) {
				t.Errorf("%v", err)
			}
		}
	})
}

// A pause before the next try does not hold up the end of the process, and nothing is sent
// after it. The next life goes on under the same key.
func TestQuitEndsAPause(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(later(503, "3600"), 200)
		quit := make(chan struct{})
		first := task(checkpoint.Compensate, rollback.Spec{})
		first.Due, first.Quit = time.Now().Add(12*time.Hour), quit
		time.AfterFunc(time.Minute, func() { close(quit) })
		began := time.Now()
		if _, err := r.Undo(context.Background(), first); !errors.Is(err, rollback.ErrQuit) || time.Since(began) != time.Minute {
			t.Fatalf("after %v: %v", time.Since(began), err)
		}
		if len(r.sent) != 1 {
			t.Errorf("sent %d times", len(r.sent))
		}
		r.restart(-1)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 2})
		if a, b := r.sent[0].Header.Get("Idempotency-Key"), r.sent[1].Header.Get("Idempotency-Key"); len(r.sent) != 2 || a != b {
			t.Errorf("%d requests, with the keys %q and %q", len(r.sent), a, b)
		}
	})
}

// What the upstream receives.
func TestCompensationRequest(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		r.undo(task(checkpoint.Compensate, rollback.Spec{Compensate: &template.Spec{
			Method: "POST", URL: "/refunds", ContentType: "application/json",
			Header: []template.Field{{Name: "Idempotency-Key", Value: "another"}, {Name: "X-Order", Value: "{execution.id}"}},
			Body:   `{{"charge":"{response.json./id}","for":"{workflow.id} {rollback.id} {checkpoint.id}"}}`,
		}}))
		o := r.sent[0]
		if o.Method != "POST" || o.URL != "/refunds" || o.Host != "api.example" || o.Guard != "default" || o.Action != "charge" ||
			o.Spec == nil || o.Spec.Guard != o.Guard || o.Rollback != rollbackID || o.Checkpoint != checkpointID || o.Workflow != "w-1" || o.Recorded || o.Delegated {
			t.Errorf("%+v", o)
		}
		if o.Header.Get("Idempotency-Key") != key || o.Header.Get("X-Order") != "order-7" || o.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%v", o.Header)
		}
		if want := `{"charge":"ch_1","for":"w-1 ` + rollbackID + ` ckpt-1"}`; string(o.Body) != want {
			t.Errorf("%s, want %s", o.Body, want)
		}
	})
}

// A call that the upstream has refused by its own word had no effect: nothing is sent.
func TestRefusedCallsNeedNoUndo(t *testing.T) {
	for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
		for status, refused := range map[int]bool{400: true, 404: true, 422: true, 200: false, 302: false, 408: false, 409: false, 500: false} {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(200)
				task := task(way, rollback.Spec{})
				task.Checkpoint.Result.Upstream = status
				if got := r.undo(task); !got.Done || len(r.changing()) == 0 != refused {
					t.Errorf("%v %d: %+v, sent %d times", way, status, got, len(r.changing()))
				}
			})
		}
	}
}

// P6: a refusal says nothing of an attempt before it.
func TestARefusedAttemptIsUndone(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		task := task(checkpoint.Compensate, rollback.Spec{})
		task.Checkpoint.Result.Upstream, task.Checkpoint.Snapshot.First = 400, "ckpt-0"
		if got := r.undo(task); !got.Done || len(r.changing()) != 1 {
			t.Errorf("%+v, sent %d times", got, len(r.changing()))
		}
	})
}

// What a delegate is asked.
func TestDelegateRequest(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		r.undo(task(checkpoint.Delegate, rollback.Spec{Auth: rollback.AuthRecorded}))
		o := r.sent[0]
		var body map[string]any
		if err := json.Unmarshal(o.Body, &body); err != nil {
			t.Fatal(err)
		}
		want := map[string]any{"rollback_id": "urn:uuid:" + rollbackID, "checkpoint_id": checkpointID, "phase": "execute", "cascade": true, "reason": "wrong order"}
		if fmt.Sprint(body) != fmt.Sprint(want) {
			t.Errorf("%v", body)
		}
		if o.Method != "POST" || !o.Delegated || o.Recorded || o.Host != "" || o.Reason != "wrong order" || o.Header.Get("Idempotency-Key") != key {
			t.Errorf("%+v", o)
		}
	})
}

// signed is a token with these claims; nobody looks at what it is signed with.
func signed(claims string) string {
	return "eyJhbGciOiJFUzI1NiJ9." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
}

func says(status int, body, token string) *rollback.Answer {
	a := &rollback.Answer{Status: status, Header: http.Header{}, Body: []byte(body)}
	if token != "" {
		a.Header.Set("Execution-Context", token)
	}
	return a
}

// P6: what a delegate does not call completed is not done, in the words of each draft and
// wherever it says them (cascade 4.4.2, ATD "Basic Rollback", AERR "Rollback Response").
func TestP6DelegateSaysOtherwise(t *testing.T) {
	completed := rollback.Result{Done: true}
	failed := rollback.Result{Reason: rollback.ReasonRefused}
	escalated := rollback.Result{Reason: rollback.ReasonEscalated}
	partial := rollback.Result{Reason: rollback.ReasonPartial, Unknown: true}
	unreadable := rollback.Result{Reason: rollback.ReasonUnexpected, Unknown: true}
	type test struct {
		answer *rollback.Answer
		want   rollback.Result
	}
	tests := []test{
		// Nothing at all is the contract's own answer, but where a token says otherwise.
		{says(200, "", ""), completed},
		{says(204, "", ""), completed},
		{says(200, " \n", "no token"), completed},
		{says(200, "", signed(`{"exec_act":"rollback_complete","ext":{"cascade.status":"completed"}}`)), completed},
		{says(200, "", signed(`{"exec_act":"rollback_complete","ext":{"cascade.status":"failed"}}`)), failed},
		{says(204, "", signed(`{"exec_act":"aerr:rollback_escalated"}`)), escalated},
		{says(200, "", signed(`{"ext":{"atd.status":"partial"}}`)), partial},
		{says(200, "", signed(`{"ext":{"aerr.status":"what"}}`)), unreadable},
		{says(200, "", base64.RawURLEncoding.EncodeToString([]byte(`{"ext":{"cascade.status":"failed"}}`))), failed},
		{says(200, `{"status":"completed"}`, signed(`{"ext":{"cascade.status":"failed"}}`)), failed},
		{says(200, `{"status":"failed"}`, signed(`{"ext":{"cascade.status":"completed"}}`)), failed},
		{says(200, "<html>", signed(`{"ext":{"cascade.status":"completed"}}`)), unreadable},
		{says(200, signed(`{"ext":{"cascade.status":"completed"}}`), ""), completed},
		{says(200, signed(`{"ext":{"cascade.status":"escalated"}}`), ""), escalated},
		{says(201, `{"status":"completed"}`, ""), completed},
		{says(201, `{"id":7}`, ""), unreadable},
		{says(200, `{"status":"compl`, ""), unreadable},
		{&rollback.Answer{Status: 200, Body: []byte(`{"x":"`), Cut: true}, unreadable}, // what it says may stand behind the cut
	}
	for body, want := range map[string]rollback.Result{
		`{"status":"completed"}`:         completed,
		`{"cascade.status":"completed"}`: completed,
		`Compensated`:                    completed,
		` {"state":"finished","status":"completed","x":[{}]} `:                     completed,
		`{"exec_act":"aerr:rollback_complete","ext":{"aerr.status":"completed"}}`:  completed,
		`{"exec_act":"atd:rollback_result","ext":{"atd.status":"completed"}}`:      completed,
		`{"exec_act":"aerr:rollback_escalated","ext":{"aerr.status":"escalated"}}`: escalated,
		`{"exec_act":"aerr:rollback_escalated","ext":{"aerr.status":"completed"}}`: escalated,
		`{"exec_act":"aerr:rollback_complete","ext":{"aerr.status":"failed"}}`:     failed,
		`{"exec_act":"atd:rollback_result","ext":{"atd.status":"failed"}}`:         failed,
		`{"exec_act":"rollback_complete","ext":{"cascade.status":"partial"}}`:      partial,
		`{"status":"escalated"}`:                    escalated,
		`{"status":"escalated","effect":"unknown"}`: {Reason: rollback.ReasonEscalated, Unknown: true},
		`{"status":"failed","effect":"mixed"}`:      {Reason: rollback.ReasonRefused, Unknown: true},
		`{"exec_act":"rollback_complete","ext":{"cascade.status":"failed","agent_guard.effect":"unknown"}}`: {Reason: rollback.ReasonRefused, Unknown: true},
		`{"status":"completed","effect":"unknown"}`:                                                         unreadable,
		`{"status":"partial"}`:                                                                    partial,
		`{"status":"failed","cascade.status":"completed"}`:                                        failed,
		`{"status":"completed","cascade.status":"failed"}`:                                        failed,
		`{"status":"completed","ect":"` + signed(`{"ext":{"cascade.status":"escalated"}}`) + `"}`: escalated,
		`{"status":"completed","ect":"` + signed(`{"exec_act":"rollback_complete","ect_ext":{"cascade.status":"failed"}}`) + `"}`: failed,
		`{"status":"completed","ect":"` + signed(`{"exec_act":"aerr:error"}`) + `"}`:                                              unreadable,
		`{"status":"failed","status":"completed"}`:                                                                                unreadable,
		`{"status":"failed","Status":"completed"}`:                                                                                unreadable,
		`FailedToCompensate`:                  failed,
		`{"status":7}`:                        unreadable,
		`{"status":""}`:                       unreadable,
		`{"status":"fine"}`:                   unreadable,
		`{"rollback_id":"x","status":null}`:   unreadable,
		`{"exec_act":7,"status":"completed"}`: unreadable,
		`{}`:                                  unreadable,
		`[]`:                                  unreadable,
		`<html>Welcome</html>`:                unreadable,
		`OK`:                                  unreadable,
	} {
		tests = append(tests, test{says(200, body, ""), want})
	}
	for _, c := range tests {
		t.Run(string(c.answer.Body), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(c.answer)
				c.want.Status, c.want.Attempts = c.answer.Status, 1
				r.wants(task(checkpoint.Delegate, rollback.Spec{}), c.want)
				r.restart(-1)
				r.wants(task(checkpoint.Delegate, rollback.Spec{}), c.want)
				if len(r.sent) != 1 {
					t.Errorf("sent %d times", len(r.sent))
				}
			})
		})
	}
}

// What a delegate is at is asked for, and what it says then is read in the same way.
func TestP6DelegateSaysLater(t *testing.T) {
	for body, want := range map[string]rollback.Result{
		`{"state":"finished","status":"completed"}`: {Done: true},
		`{"state":"finished","status":"partial"}`:   {Reason: rollback.ReasonPartial, Unknown: true},
		`{"state":"finished","status":"escalated"}`: {Reason: rollback.ReasonEscalated},
		`{"state":"finished","status":"failed"}`:    {Reason: rollback.ReasonRefused},
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			r.answers(&rollback.Answer{Status: 200, Header: http.Header{"Location": {"/r/1"}}, Body: []byte(`{"state":"executing"}`)},
				`{"state":"executing"}`, body)
			want.Status, want.Attempts = 200, 1
			r.wants(task(checkpoint.Delegate, rollback.Spec{}), want)
			if len(r.changing()) != 1 || !r.sent[1].Delegated || r.sent[1].URL != "https://agent.example/r/1" {
				t.Errorf("%d, %+v", len(r.changing()), r.sent[1])
			}
		})
	}
}

// full is a store that has no room for anything large.
type full struct{ store.Store }

func (f full) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	for _, w := range batch {
		if w.Bulk {
			return 0, store.ErrFull
		}
	}
	return f.Store.Commit(ctx, batch...)
}

// choked is a store that takes nothing while it is full.
type choked struct {
	store.Store
	full *bool
}

func (c choked) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if *c.full {
		return 0, store.ErrFull
	}
	return c.Store.Commit(ctx, batch...)
}

// P1, P6: an answer that the store does not take is kept while the process lives, and
// recorded before anything is sent again. Where the store is full until the rollback is due, that
// stays an error.
func TestP6AnswerOutlivesAFullStore(t *testing.T) {
	for _, answer := range []any{200, 409, 404} {
		for _, spec := range []rollback.Spec{{}, {OnLost: rollback.UndoEscalate}, {Status: status}} {
			for _, late := range []bool{false, true} {
				bubble(t, func(t *testing.T, r *undoRig) {
					full := false
					g, _, err := execution.Open(context.Background(), choked{r.mem, &full}, r.ring)
					if err != nil {
						t.Fatal(err)
					}
					u := rollback.NewUndoer(rollback.UndoerOptions{Guard: g, Checkpoints: r.checkpoints, Sender: r})
					rollback.SeeNoStatus(u)
					r.answers(answer)
					say := r.answer
					r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
						full = true
						return say(o)
					}
					task := task(checkpoint.Compensate, spec)
					for range 3 {
						if got, err := u.Undo(context.Background(), task); err == nil {
							t.Fatalf("not recorded, and returned: %+v", got)
						}
					}
					want := rollback.Result{Done: answer == 200, Unknown: answer == 404, Status: answer.(int), Attempts: 1}
					switch answer {
					case 409:
						want.Reason = rollback.ReasonRefused
					case 404:
						want.Reason = rollback.ReasonUnexpected
					}
					if late {
						r.pass(time.Until(task.Due))
					} else {
						full = false
					}
					got, err := u.Undo(context.Background(), task)
					if late && !errors.Is(err, execution.ErrUnrecorded) || !late && (err != nil || got != want) {
						t.Errorf("%v %+v: %+v, %v", answer, spec, got, err)
					}
					if len(r.sent) != 1 {
						t.Errorf("%d requests", len(r.sent))
					}
					if !late { // and it stands in the next life
						r.restart(-1)
						r.wants(task, want)
					}
				})
			}
		}
	}
}

// An undo goes on whose process was killed, also where the next one has found the store full, and so has not recorded
// that it is in doubt.
func TestUndoGoesOnAfterAFullStart(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		full := false
		life := func() (rollback.Undoer, *execution.Guard, execution.Recovery) {
			g, recovered, err := execution.Open(context.Background(), choked{r.mem, &full}, r.ring)
			if err != nil {
				t.Fatal(err)
			}
			u := rollback.NewUndoer(rollback.UndoerOptions{Guard: g, Checkpoints: r.checkpoints, Sender: r})
			rollback.SeeNoStatus(u)
			return u, g, recovered
		}
		u, g, _ := life()
		r.answers(200, 200)
		say := r.answer
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			full = len(r.sent) == 1
			return say(o)
		}
		task := task(checkpoint.Compensate, rollback.Spec{})
		if _, err := u.Undo(context.Background(), task); !errors.Is(err, execution.ErrUnrecorded) {
			t.Fatal(err)
		}
		_ = g.Close(context.Background())
		u, _, recovered := life()
		if recovered.Unrecorded != 1 {
			t.Fatalf("%+v", recovered)
		}
		full = false
		if got, err := u.Undo(context.Background(), task); err != nil || !got.Done || len(r.sent) != 2 {
			t.Errorf("%+v, %v, %d requests", got, err, len(r.sent))
		}
	})
}

// P6: a store that had no room for where to ask does not make it done.
func TestP6LocationIsLost(t *testing.T) {
	long := "/jobs/" + strings.Repeat("x", 2000)
	for _, c := range []struct {
		spec rollback.Spec
		want rollback.Result
	}{
		{rollback.Spec{}, rollback.Result{Unknown: true, Reason: rollback.ReasonLost, Status: 202, Attempts: 1}},
		{rollback.Spec{Status: status}, rollback.Result{Done: true, Status: 200, Attempts: 1}},
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
			g, _, err := execution.Open(context.Background(), full{r.mem}, r.ring)
			if err != nil {
				t.Fatal(err)
			}
			o := rollback.UndoerOptions{Guard: g, Checkpoints: r.checkpoints, Sender: r}
			r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
				if o.URL == long {
					r.die() // before it returns
					return nil, errLost
				}
				if o.Method == http.MethodGet {
					return &rollback.Answer{Status: 200}, nil
				}
				return accepted(long), nil
			}
			first := rollback.NewUndoer(o)
			rollback.SeeNoStatus(first)
			if _, err := first.Undo(r.life, task(checkpoint.Compensate, c.spec)); err == nil {
				t.Fatal("it lived on")
			}
			next := rollback.NewUndoer(o)
			rollback.SeeNoStatus(next)
			if got, err := next.Undo(context.Background(), task(checkpoint.Compensate, c.spec)); err != nil || got != c.want {
				t.Errorf("%+v, %v", got, err)
			}
			if len(r.changing()) != 1 {
				t.Errorf("sent %d times", len(r.changing()))
			}
		})
	}
	bubble(t, func(t *testing.T, r *undoRig) { // where there is room it is asked there
		r.answers(accepted(long), 200)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 1})
		r.restart(-1)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 1})
		if r.sent[2].URL != long {
			t.Errorf("asked %+v", r.sent[2])
		}
	})
}

// The answer is kept for as long as the rollback may ask for it.
func TestAnswerIsKept(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		task := task(checkpoint.Compensate, rollback.Spec{})
		task.Due = time.Now().Add(100 * 24 * time.Hour)
		r.wantsDone(task)
		r.pass(129 * 24 * time.Hour)
		r.wantsDone(task)
		if len(r.sent) != 1 {
			t.Errorf("sent %d times", len(r.sent))
		}
	})
}

// The status of a delegate is asked with the gateway's token, where it is its own.
func TestStatusOfADelegate(t *testing.T) {
	for url, token := range map[string]bool{"https://agent.example/status": true, "https://other.example/status": false, "/status": false} {
		bubble(t, func(t *testing.T, r *undoRig) {
			asks := *status
			asks.URL = url
			r.answers(errLost, 200)
			r.wantsDone(task(checkpoint.Delegate, rollback.Spec{Status: &asks}))
			if r.sent[1].URL != url || r.sent[1].Delegated != token {
				t.Errorf("%+v", r.sent[1])
			}
		})
	}
	// One that cannot be made is none.
	bubble(t, func(t *testing.T, r *undoRig) {
		asks := *status
		asks.URL = "/refunds/{response.json./refund}"
		r.answers(errLost, 200)
		r.wants(task(checkpoint.Compensate, rollback.Spec{Status: &asks}), rollback.Result{Done: true, Status: 200, Attempts: 2})
		if r.asked() > 0 {
			t.Error("asked")
		}
	})
}

// A Location is hostile: it leads nowhere but to the origin that it came from.
func FuzzFollow(f *testing.F) {
	for _, location := range []string{
		"/jobs/1", "jobs", "?x", "//api.example/a", "//evil/a", "http://api.example//evil/a", "https://agent.example/x", "https://agent.example@evil/",
		"///evil/x", `/\evil`, `\\evil`, "http:/x", "/..//evil", "/%2f/evil", "http://[::1]/", "https:opaque",
	} {
		f.Add(location)
	}
	f.Fuzz(func(t *testing.T, location string) {
		if got := rollback.Follow("/refunds/1", "api.example", location); got != "" {
			u, err := url.Parse(got)
			if err != nil || u.Host != "" || u.Scheme != "" || !strings.HasPrefix(got, "/") || strings.HasPrefix(got, "//") || strings.ContainsAny(got, "\r\n #") {
				t.Errorf("%q leads to %q", location, got)
			}
		}
		if got := rollback.Follow("https://agent.example/rollback", "", location); got != "" {
			u, err := url.Parse(got)
			if err != nil || !strings.EqualFold(u.Host, "agent.example") || u.Scheme != "https" || u.User != nil || strings.ContainsAny(got, "\r\n #") {
				t.Errorf("%q leads to %q", location, got)
			}
		}
	})
}
