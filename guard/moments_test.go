package guard_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// How the answer to a call without a key ends, for an equal call that comes after it.
type ending int

const (
	done    ending = iota // an equal call is meant
	failed                // clients retry it, and get it again
	doubted               // nobody knows, and equal calls are refused for the window
	refused               // it was not executed, and its retry runs
)

const events = "application/json, text/event-stream"

// way is one way in which calls are made and answered.
type way struct {
	ending
	early  bool // the client has the answer before the outcome is recorded
	action guard.Action
	rules  protocol.Protocol // empty: no message is read
	make   func(id int) *http.Request
	answer func(w http.ResponseWriter, id string)
}

// The times of a call, after it was made. Every commit takes a second, and the upstream ten.
const (
	claimedAt  = 1 * time.Second
	answeredAt = 11 * time.Second
	recordedAt = 12 * time.Second
)

// moments are when an equal call comes.
var moments = map[string]time.Duration{
	"before the claim is durable":  claimedAt / 2,
	"while it runs":                5 * time.Second,
	"before the record":            answeredAt + 500*time.Millisecond,
	"between the record and marks": recordedAt + 500*time.Millisecond,
	"later":                        30 * time.Second,
}

// plain makes a call without a message.
func plain(int) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/charges", strings.NewReader("amount=10"))
	r.Header.Set("Authorization", "Bearer ada")
	return r
}

// tool makes a call of a tool in a session.
func tool(id int) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"pay"}}`, id)))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", events)
	r.Header.Set("Authorization", "Bearer ada")
	r.Header.Set("Mcp-Session-Id", "s")
	return r
}

// task makes a call of an agent of A2A that has no messageId.
func task(method string) func(id int) *http.Request {
	return func(id int) *http.Request {
		r := tool(id)
		r.Header.Del("Mcp-Session-Id")
		r.Header.Set("A2A-Version", "1.0")
		r.Body = io.NopCloser(strings.NewReader(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":%q,"params":{"message":{"role":"ROLE_USER","parts":[{"text":"pay"}]}}}`, id, method)))
		return r
	}
}

// status answers with a status and a body, whose length is announced.
func status(code int, body string) func(http.ResponseWriter, string) {
	return func(w http.ResponseWriter, _ string) {
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// document answers with a response as JSON, and streamed as an event. rest is what stands behind the id.
func document(rest string) func(http.ResponseWriter, string) {
	return func(w http.ResponseWriter, id string) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, id, rest)
	}
}

func streamed(rest string) func(http.ResponseWriter, string) {
	return func(w http.ResponseWriter, id string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":%s,%s}\n\n", id, rest)
		_ = http.NewResponseController(w).Flush() // a recorder flushes
	}
}

// cutBehind breaks off behind the event.
func cutBehind(rest string) func(http.ResponseWriter, string) {
	return func(w http.ResponseWriter, id string) {
		streamed(rest)(w, id)
		panic(http.ErrAbortHandler)
	}
}

const (
	result      = `"result":{"content":[]}`
	toolError   = `"result":{"isError":true,"content":[]}`
	internal    = `"error":{"code":-32603,"message":"m"}`
	serverError = `"error":{"code":-32000,"message":"m"}`
	unknownTool = `"error":{"code":-32601,"message":"m"}`
	otherGuard  = `"error":{"code":-32090,"message":"m","data":{"type":"https://g/.well-known/cascade/problems/in-doubt","status":409}}`
	finished    = `"result":{"task":{"id":"t","contextId":"c","status":{"state":"TASK_STATE_COMPLETED"}}}`
)

var (
	strict = guard.Action{Policy: guard.Policy{Preset: execution.PresetStrict}}
	// asDoubt has a status leave calls in doubt that no client retries.
	asDoubt = func(code int) guard.Action {
		return guard.Action{Rule: func(status int, _ http.Header) (execution.Verdict, bool) { return execution.InDoubt, status == code }}
	}
)

var ways = map[string]way{
	"200":                     {ending: done, make: plain, answer: status(200, "charge")},
	"200, without a length":   {ending: done, make: plain, answer: func(w http.ResponseWriter, _ string) { _, _ = io.WriteString(w, "charge"); w.(http.Flusher).Flush() }},
	"200, larger than kept":   {ending: done, make: plain, answer: status(200, strings.Repeat("x", 64<<10)), action: guard.Action{Policy: guard.Policy{MaxResult: 10}}},
	"204":                     {ending: done, make: plain, answer: status(204, "")},
	"304":                     {ending: done, make: plain, answer: status(304, "")},
	"200 in doubt":            {ending: doubted, make: plain, answer: status(200, "charge"), action: asDoubt(200)},
	"400":                     {ending: done, make: plain, answer: status(400, "bad")},
	"409":                     {ending: done, make: plain, answer: status(409, "bad")},
	"500":                     {ending: failed, make: plain, answer: status(500, "bad")},
	"500, larger than kept":   {ending: failed, make: plain, answer: status(500, strings.Repeat("x", 64<<10)), action: guard.Action{Policy: guard.Policy{MaxResult: 10}}},
	"502":                     {ending: doubted, make: plain, answer: status(502, "bad")},
	"529":                     {ending: refused, make: plain, answer: status(529, "busy")},
	"the connection is lost":  {ending: doubted, make: plain, answer: func(http.ResponseWriter, string) { panic(http.ErrAbortHandler) }},
	"MCP":                     {ending: done, rules: protocol.MCP, make: tool, answer: document(result)},
	"MCP, isError":            {ending: done, rules: protocol.MCP, make: tool, answer: document(toolError)},
	"MCP, -32603":             {ending: failed, rules: protocol.MCP, make: tool, answer: document(internal)},
	"MCP, -32000":             {ending: done, rules: protocol.MCP, make: tool, answer: document(serverError)},
	"MCP, -32000, strict":     {ending: doubted, rules: protocol.MCP, make: tool, answer: document(serverError), action: strict},
	"MCP, -32601":             {ending: refused, rules: protocol.MCP, make: tool, answer: document(unknownTool)},
	"MCP, in doubt behind":    {ending: doubted, rules: protocol.MCP, make: tool, answer: document(otherGuard)},
	"MCP, 404":                {ending: refused, rules: protocol.MCP, make: tool, answer: status(404, "gone")},
	"events":                  {ending: done, early: true, rules: protocol.MCP, make: tool, answer: streamed(result)},
	"events, isError":         {ending: done, early: true, rules: protocol.MCP, make: tool, answer: streamed(toolError)},
	"events, -32603":          {ending: failed, early: true, rules: protocol.MCP, make: tool, answer: streamed(internal)},
	"events, -32000":          {ending: done, early: true, rules: protocol.MCP, make: tool, answer: streamed(serverError)},
	"events, -32000, strict":  {ending: doubted, early: true, rules: protocol.MCP, make: tool, answer: streamed(serverError), action: strict},
	"events, -32601":          {ending: refused, early: true, rules: protocol.MCP, make: tool, answer: streamed(unknownTool)},
	"events, in doubt behind": {ending: doubted, early: true, rules: protocol.MCP, make: tool, answer: streamed(otherGuard)},
	"events, 200 in doubt":    {ending: doubted, early: true, rules: protocol.MCP, make: tool, answer: streamed(result), action: asDoubt(200)},
	"events, cut behind":      {ending: done, early: true, rules: protocol.MCP, make: tool, answer: cutBehind(result)},
	"events, guessed":         {ending: done, early: true, rules: protocol.Auto, make: tool, answer: streamed(result)},
	"A2A":                     {ending: done, rules: protocol.A2A, make: task("SendMessage"), answer: document(finished)},
	"A2A, -32603":             {ending: failed, rules: protocol.A2A, make: task("SendMessage"), answer: document(internal)},
	"A2A events":              {ending: done, early: true, rules: protocol.A2A, make: task("SendStreamingMessage"), answer: streamed(finished)},
	"A2A events, -32603":      {ending: failed, early: true, rules: protocol.A2A, make: task("SendStreamingMessage"), answer: streamed(internal)},
	"A2A events, -32004":      {ending: refused, early: true, rules: protocol.A2A, make: task("SendStreamingMessage"), answer: streamed(`"error":{"code":-32004,"message":"m"}`)},
	"A2A events, doubt":       {ending: doubted, early: true, rules: protocol.A2A, make: task("SendStreamingMessage"), answer: streamed(internal), action: strict},
}

// fates are what becomes of the first client at the moment at which the equal call comes.
var fates = []string{"waits", "waits, and a new configuration comes", "leaves", "cancels", "is killed", "waits, and its outcome is not recorded"}

// retries are how the equal call comes.
var retries = map[string]func(r *http.Request, n int){
	"equal":   func(*http.Request, int) {},
	"stated":  func(r *http.Request, n int) { r.Header.Set("X-Stainless-Retry-Count", fmt.Sprint(n)) },
	"new key": func(r *http.Request, n int) { r.Header.Set("Idempotency-Key", fmt.Sprint("key-", n)) },
}

// P1 without a key, or with a new one that is advisory: a table of the ways in which an answer ends and of the
// moments at which an equal call comes: how often the upstream is called. Each is answered with its own id, a
// further call some minutes later runs as what it is, and nothing stays open.
func TestRetriesAtEveryMoment(t *testing.T) {
	for name, w := range ways {
		for moment, at := range moments {
			for _, fate := range fates {
				for kind, retry := range retries {
					if w.rules != protocol.MCP && fate == "cancels" || strings.Contains(fate, "and") && kind != "equal" {
						continue // what only MCP has; what says no more
					}
					t.Run(strings.Join([]string{name, moment, fate, kind}, "/"), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) { w.try(t, at, fate, kind, retry) })
					})
				}
			}
		}
	}
}

// expect is how often each call runs where an equal one comes at a time: least and most. doubt says that it is
// in doubt then.
func (w *way) expect(at time.Duration, fate, kind string) (least, most int64, doubt bool) {
	handed := recordedAt
	if w.early && fate != "cancels" { // else the client says that it has no answer
		handed = answeredAt
	}
	stated := kind == "stated"
	switch {
	case fate == fates[5] && at > answeredAt:
		return 1, 1, true
	case fate == "is killed" && at < claimedAt:
		return 1, 1, w.ending == doubted // it was not forwarded the first time
	case fate == "is killed" && at < recordedAt:
		return 1, 1, true
	case fate == "is killed" && at < recordedAt+2*time.Second && w.ending != refused:
		return 1, 1, w.ending == doubted // a crash is evidence
	case at < handed && strings.HasPrefix(fate, "waits") && !stated:
		return 2, 2, w.ending == doubted // both are meant
	case w.ending == refused && answeredAt < at && at < recordedAt:
		return 1, 2, false // it may get the same refusal
	case at < handed:
		return 1, 1, w.ending == doubted
	case w.ending == done && !stated:
		return 2, 2, false
	case w.ending == refused:
		return 2, 2, false
	}
	return 1, 1, w.ending == doubted
}

func (w *way) try(t *testing.T, at time.Duration, fate, kind string, retry func(*http.Request, int)) {
	b := &bed{T: t, disk: &disk{Store: memory.New(memory.Options{}), takes: time.Second}, ring: seal.Generate()}
	b.config.Next = http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		var m struct {
			ID     json.RawMessage
			Method string
		}
		if w.rules != "" {
			if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
				t.Error(err)
			}
		}
		if m.Method == "notifications/cancelled" {
			to.WriteHeader(http.StatusAccepted)
			return
		}
		b.calls.Add(1)
		<-time.After(answeredAt - claimedAt)
		w.answer(to, string(m.ID))
	})
	action := w.action
	action.Name, action.Default, action.Keys = "default", true, guard.KeysAdvisory
	b.config.Actions = []*guard.Action{&action}
	b.config.MissingID = guard.MissingRecognize
	if w.rules != "" {
		b.config.Protocol = w.rules
	}
	b.start()
	call := func(h *guard.Handler, id int, ctx context.Context) *httptest.ResponseRecorder {
		r := w.make(id).WithContext(ctx)
		if retry(r, id/10-1); id == 30 && kind == "stated" {
			r.Header.Del("X-Stainless-Retry-Count")
		}
		to := httptest.NewRecorder()
		serve(h, to, r)
		return to
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	go call(b.guard, 10, ctx)
	if fate == fates[5] {
		time.AfterFunc(answeredAt-1, func() { b.disk.broken.Store(true) })
		time.AfterFunc(20*time.Second, func() { b.disk.broken.Store(false) })
	}
	<-time.After(at)
	switch fate {
	case "leaves":
		leave()
	case "waits, and a new configuration comes":
		b.config.Open = b.engine.Open
		var err error
		if b.guard, err = guard.New(b.config); err != nil {
			t.Fatal(err)
		}
	case "cancels":
		notice := tool(0)
		notice.Body = io.NopCloser(strings.NewReader(fmt.Sprintf(cancelled, "10")))
		b.serve(httptest.NewRecorder(), notice)
	case "is killed":
		b.disk.broken.Store(true)
		dead := b.engine.Executions
		defer func() { _ = dead.Close(context.Background()) }() // it writes nothing, and does not try to any more
		b.disk = &disk{Store: b.disk.Store, takes: time.Second}
		b.start()
	}
	answer := call(b.guard, 20, t.Context())
	least, most, doubt := w.expect(at, fate, kind)
	doubt = doubt || fate == fates[5]
	if b.calls.Load() < least || b.calls.Load() > most {
		t.Errorf("the upstream was called %d times, want %d to %d: %d %v %.200s", b.calls.Load(), least, most, answer.Code, answer.Header(), answer.Body)
	}
	if body := answer.Body.String(); w.rules != "" && strings.Contains(body, "jsonrpc") && (!strings.Contains(body, `"id":20`) || strings.Contains(body, `"id":10`)) {
		t.Errorf("answered with another id: %s", body)
	}
	pause := 5 * time.Minute
	if w.ending == failed {
		pause = 30 * time.Second // for as long as a delivered error is evidence
	}
	<-time.After(pause)
	b.calls.Store(0)
	last := call(b.guard, 30, t.Context())
	want := int64(1)
	if doubt || w.ending == failed || answer.Header().Get("Execution-Problem") == "result-unavailable" { // a 409 of ours
		want = 0
	}
	b.was(want)
	if t.Failed() {
		t.Logf("the last one: %d %v %.200s", last.Code, last.Header(), last.Body)
	}
	<-time.After(time.Hour)
	if open := b.engine.Executions.Drain(t.Context()); open != 0 {
		t.Errorf("%d executions are open", open)
	}
}

// unflushed answers with an event that may not leave the gateway.
func unflushed(w http.ResponseWriter, id string) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":%s,%s}\n\n", id, result)
}

// A stream that is cut behind its final answer has answered its client (*Handed over*), and says what came of
// the call (P6), whoever has cut it. One that is cut before it leaves the call in doubt.
func TestStreamsThatAreCutBehindTheirAnswer(t *testing.T) {
	for by, action := range map[string]guard.Action{
		"the server": {}, "the deadline": {Policy: guard.Policy{Deadline: jsontime.Duration(time.Minute)}}, "a pause": {Policy: guard.Policy{StreamIdle: jsontime.Duration(time.Minute)}}, "its client, who has read it": {Policy: guard.Policy{OnLeave: guard.OnLeaveCancel}},
	} {
		for what, c := range map[string]struct {
			answer      func(http.ResponseWriter, string)
			want, keyed string // what an equal call gets, without a key and with one
		}{
			"a result":              {streamed(result), "200 executed", "200 replayed"},
			"an internal error":     {streamed(internal), "200 replayed", "200 replayed"},
			"a refusal":             {streamed(unknownTool), "200 executed", "200 executed"},
			"a result, not flushed": {unflushed, "200 replayed", "200 replayed"},
			"news of its work":      {streamed(`"method":"notifications/progress","params":{"progressToken":"p"}`), "200 in_doubt", "200 in_doubt"},
			"half of a response":    {streamed(`"result":`), "200 in_doubt", "200 in_doubt"},
		} {
			key := ""
			send := func() *http.Request {
				r := tool(1)
				if key != "" {
					r.Header.Set("Idempotency-Key", key)
				}
				return r
			}
			test := func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) {
						c.answer(w, "1")
						if by == "its client, who has read it" {
							synctest.Wait()
							leave()
						}
						if by != "the server" {
							<-r.Context().Done()
						}
						panic(http.ErrAbortHandler) // as a proxy does
					})
					action.Name, action.Default = "default", true
					b.config.Actions = []*guard.Action{&action}
					b.config.MissingID, b.config.Protocol = guard.MissingRecognize, protocol.MCP
					b.start()
					b.serve(httptest.NewRecorder(), send().WithContext(ctx))
					synctest.Wait()
					retry := httptest.NewRecorder()
					again, leaveAgain := context.WithTimeout(t.Context(), 5*time.Second)
					defer leaveAgain()
					b.serve(retry, send().WithContext(again))
					want := map[bool]string{true: c.want, false: c.keyed}[key == ""]
					if got := fmt.Sprint(retry.Code, " ", retry.Header().Get("Execution-Status")); got != want {
						t.Errorf("got %s, want %s: %s", got, want, retry.Body)
					}
					b.was(map[bool]int64{true: 2, false: 1}[strings.HasSuffix(want, "executed")])
					<-time.After(time.Hour)
				})
			}
			t.Run(fmt.Sprint(by, "/", what), test)
			key = "k"
			t.Run(fmt.Sprint(by, "/", what, "/with a key"), test)
		}
	}
}
