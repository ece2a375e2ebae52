package protocol_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Set(pairs[i], pairs[i+1])
	}
	return h
}

var mcp = header("Mcp-Session-Id", "s1", "Mcp-Protocol-Version", "2025-11-25")

func parse(t *testing.T, u *protocol.Rules, h http.Header, body string) protocol.Message {
	t.Helper()
	q, ok := u.Parse(h, "/mcp", []byte(body))
	if !ok || len(q) != 1 || q[0].Batch {
		t.Fatalf("%s: %v, %+v", body, ok, q)
	}
	return q[0]
}

// Which protocol a message has, and whether it changes something (issue: classify by meaning).
func TestClassify(t *testing.T) {
	a2a := header("A2A-Version", "1.0")
	for _, c := range []struct {
		rules    protocol.Rules
		header   http.Header
		body     string
		protocol protocol.Protocol // empty: no message
		changes  bool
	}{
		{body: `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}`, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":0,"method":"server/discover"}`, protocol: protocol.MCP},
		{body: ` {"jsonrpc":"2.0","id":"a","method":"tools/list"} `, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{}}}`, protocol: protocol.MCP, changes: true},
		{body: `{"jsonrpc":"2.0","method":"notifications/initialized"}`, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":3}}`, header: mcp, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":5,"result":{}}`, header: mcp, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":5,"error":{"code":1,"message":""}}`, header: mcp, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":1,"method":"acme/charge"}`, header: mcp, protocol: protocol.MCP, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"tasks/get"}`, header: mcp, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","id":1,"method":"tasks/get"}`, header: a2a, protocol: protocol.A2A},
		{body: `{"jsonrpc":"2.0","id":1,"method":"tasks/get"}`, protocol: protocol.JSONRPC, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"message/send","params":{}}`, protocol: protocol.A2A, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"SendStreamingMessage","params":{}}`, protocol: protocol.A2A, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{}}`, protocol: protocol.A2A},
		{body: `{"jsonrpc":"2.0","id":1,"method":"CreateTaskPushNotificationConfig"}`, header: a2a, protocol: protocol.A2A, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"eth_sendRawTransaction","params":["0x"]}`, protocol: protocol.JSONRPC, changes: true},
		{rules: protocol.Rules{Protocol: protocol.JSONRPC}, body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`, protocol: protocol.JSONRPC, changes: true},
		{rules: protocol.Rules{Protocol: protocol.A2A}, body: `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, protocol: protocol.A2A, changes: true},
		{rules: protocol.Rules{Protocol: protocol.None}, body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`},
		{rules: protocol.Rules{Exempt: []string{"get"}}, body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get"}}`, protocol: protocol.MCP},
		{rules: protocol.Rules{Exempt: []string{"get"}, Consequential: []string{"get"}}, body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get"}}`, protocol: protocol.MCP, changes: true},
		// What servers may read in two ways is never harmless.
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call"}`},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call"}`},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping","ſomething":1}`},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping","paramſ":{}}`},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping","amount":5}`},
		{body: `{"jsonrpc":"2.0","id":{},"method":"ping"}`},
		{body: `{"jsonrpc":"2.0","id":1,"method":["ping"]}`},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping","result":1}`},
		{body: `{"jsonrpc":"2.0","id":5,"result":{}}`},
		{rules: protocol.Rules{Exempt: []string{"get"}}, body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get","Name":"pay"}}`, protocol: protocol.MCP, changes: true},
		{rules: protocol.Rules{Exempt: []string{"get"}}, body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":["get"]}`, protocol: protocol.MCP, changes: true},
		{body: "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"meth\xffod\":\"tools/call\"}", rules: protocol.Rules{Protocol: protocol.MCP}},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`, header: header("Mcp-Method", "tools/call")},
		{body: `{"jsonrpc":"2.0","id":1,"method":"ping"}`, header: header("Mcp-Method", "ping"), protocol: protocol.MCP},
		{rules: protocol.Rules{Exempt: []string{"get"}}, header: header("Mcp-Name", "pay"), body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get"}}`, protocol: protocol.MCP, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"notifications/x"}`, header: mcp, protocol: protocol.MCP, changes: true},
		{body: `{"jsonrpc":"2.0","method":"notifications/x"}`, header: mcp, protocol: protocol.MCP},
		{body: `{"jsonrpc":"2.0","method":"notifications/pay"}`, protocol: protocol.JSONRPC, changes: true},
		{body: `{"jsonrpc":"2.0","id":1,"method":"tasks/update"}`, protocol: protocol.JSONRPC, changes: true},
		{body: `{"jsonrpc":2.0,"id":1,"method":"ping"}`}, {body: `{"id":1,"method":"ping"}`}, {body: `{}`}, {body: `[]`}, {body: `[1]`}, {body: `1`}, {body: ``}, {body: `{`},
	} {
		q, ok := c.rules.Parse(c.header, "/mcp", []byte(c.body))
		if ok != (c.protocol != "") {
			t.Errorf("%s: is a message: %v", c.body, ok)
			continue
		}
		if !ok {
			continue
		}
		m := &q[0]
		if m.Protocol != c.protocol || c.rules.Changes(m, false) != c.changes {
			t.Errorf("%s: %s, changes %v", c.body, m.Protocol, c.rules.Changes(m, false))
		}
		if strings.TrimSpace(c.body) != string(m.Body) {
			t.Errorf("%s: its text is %s", c.body, m.Body)
		}
	}
}

func TestReadOnlyTools(t *testing.T) {
	var tools protocol.Tools
	var u protocol.Rules
	m := parse(t, &u, mcp, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get"}}`)
	changes := func() bool { return u.Changes(&m, tools.ReadOnly("a", m.Tool)) }
	if !changes() {
		t.Error("an unknown tool is harmless")
	}
	tools.Learn("b", "get", true)
	if !changes() {
		t.Error("another server's word counts")
	}
	tools.Learn("a", "get", true)
	if changes() {
		t.Error("the announcement does not count")
	}
	u.Consequential = []string{"get"}
	if !changes() {
		t.Error("the operator's word does not go first")
	}
	u.Consequential = nil
	tools.Learn("a", "get", false)
	tools.Learn("a", "get", true)
	if !changes() {
		t.Error("a server that contradicts itself is believed")
	}
}

func TestReadsBodies(t *testing.T) {
	var u protocol.Rules
	request := func(method string, pairs ...string) *http.Request {
		r := httptest.NewRequest(method, "/mcp", http.NoBody)
		r.Header = header(pairs...)
		return r
	}
	for _, c := range []struct {
		r     *http.Request
		reads bool
	}{
		{request("POST", "Content-Type", "application/json"), true},
		{request("POST", "Content-Type", "Application/JSON; charset=UTF-8"), true},
		{request("POST", "Content-Type", "application/a2a+json"), true},
		{request("POST", "Content-Type", "application/json", "Content-Encoding", "identity"), true},
		{request("POST", "Content-Type", "application/json", "Content-Encoding", "gzip"), false},
		{request("POST", "Content-Type", "application/json; charset=utf-16"), false},
		{request("POST", "Content-Type", "text/plain"), false},
		{request("POST"), false},
		{request("PUT", "Content-Type", "application/json"), false},
	} {
		if u.Reads(c.r) != c.reads {
			t.Errorf("%s %v: %v", c.r.Method, c.r.Header, !c.reads)
		}
	}
}

func TestBatch(t *testing.T) {
	var u protocol.Rules
	q, ok := u.Parse(mcp, "/mcp", []byte(`[ {"jsonrpc":"2.0","id":9007199254740993,"method":"ping"} ,{"jsonrpc":"2.0","id":"\u0061","method":"tools/call","params":{"name":"pay"}},
		{"jsonrpc":"2.0","method":"notifications/initialized"}]`))
	if !ok || !q[0].Batch || len(q) != 3 {
		t.Fatalf("%v, %+v", ok, q)
	}
	if id := string(q[0].ID); id != "9007199254740993" {
		t.Errorf("the id is %s", id)
	}
	if id := string(q[1].ID); id != `"\u0061"` {
		t.Errorf("the id is %s", id)
	}
	if u.Changes(&q[0], false) || !u.Changes(&q[1], false) || u.Changes(&q[2], false) {
		t.Error("the messages are not classified each on its own")
	}
	if _, ok := u.Parse(mcp, "/mcp", []byte(`[{"jsonrpc":"2.0","id":1,"method":"ping"},{"x":1}]`)); ok {
		t.Error("a batch with something else in it is taken for one")
	}

	const before, after = `[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"pay","_meta":{"execution-context":`, `}}}]`
	q, ok = u.Parse(mcp, "/mcp", []byte(before+`"a"`+after))
	if !ok || string(q[1].WithTokens([]string{"b"})) != before+`["b"]`+after {
		t.Errorf("%v, %+v", ok, q)
	}
}

// Of the answer to a batch that to its call counts, as an array, as an event, and as an event with an array.
func TestAnswersToABatch(t *testing.T) {
	var u protocol.Rules
	q, ok := u.Parse(mcp, "/mcp", []byte(`[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","id":"two","method":"tools/call","params":{"name":"pay"}}]`))
	if !ok {
		t.Fatal("it is none")
	}
	m := &q[1]
	const pong, refused = `{"jsonrpc":"2.0","id":1,"result":{}}`, `{"jsonrpc":"2.0","id":null,"error":{"code":-32600}}`
	for text, want := range map[string]protocol.Meaning{
		`{"jsonrpc":"2.0","id":"two","result":{"content":[{"text":"],["}]}}`:  protocol.Executed,
		`{"jsonrpc":"2.0","id":"two","error":{"code":-32601,"message":"[{"}}`: protocol.NotExecuted,
		`{"jsonrpc":"2.0","id":"two","error":{"code":-32603,"message":""}}`:   protocol.Failed,
		`{"jsonrpc":"2.0","id":"three","result":{}}`:                          protocol.Unanswered,
		refused: protocol.Unanswered, // nobody knows whose it is
	} {
		array := " [" + pong + " ,\n" + text + "," + pong + "] "
		for body, as := range map[string]string{
			array: asJSON, "data: " + pong + "\n\ndata: " + text + "\n\n": asStream, "data: " + strings.ReplaceAll(array, "\n", "\ndata: ") + "\n\n": asStream, text: asJSON,
		} {
			for _, size := range []int{1, 1 << 10} {
				a := m.Answer(as)
				for rest := body; rest != ""; {
					n := min(size, len(rest))
					_, _ = a.Write([]byte(rest[:n])) // never fails
					rest = rest[n:]
				}
				if got := a.End(); got.Meaning != want {
					t.Errorf("%s in pieces of %d: %v, want %v", body, size, got, want)
				}
			}
			if got := string(m.Final(as, []byte(body))); got != text && want == protocol.Executed || want != protocol.Executed && got != "" {
				t.Errorf("the answer in %s is %q", body, got)
			}
		}
	}
}

func TestREST(t *testing.T) {
	said := header("A2A-Version", "configured")
	const send = `{"message":{"messageId":"m1","role":"ROLE_USER","parts":[]}}`
	for _, c := range []struct {
		header       http.Header
		path, body   string
		is, changes  bool
		method, want string
	}{
		{nil, "/message:send", send, true, true, "SendMessage", "m1"},
		{nil, "/tenant/message:stream", send, true, true, "SendStreamingMessage", "m1"},
		{nil, "/message:send", `{"message":"hello"}`, false, false, "", ""},
		{nil, "/message:send", `{"message":{"messageId":"a@b%","role":"ROLE_USER","taskId":"c@d"}}`, true, true, "SendMessage", "a%40b%25@c@d"},
		{said, "/v1/message:send", `{"message":{"messageId":"m1","taskId":"t1"}}`, true, true, "SendMessage", "m1@t1"},
		{said, "/tasks/t1:cancel", `{}`, true, false, "CancelTask", ""},
		{nil, "/tasks/t1:cancel", `{}`, false, false, "", ""},
		{header("A2A-Version", "1.0"), "/operations/o1:cancel", `{}`, false, false, "", ""}, // only the caller says that this is A2A
		{said, "/tasks/t1/pushNotificationConfigs", `{}`, true, true, "CreateTaskPushNotificationConfig", ""},
		{said, "/other", `{}`, false, false, "", ""},
		{said, "/message:send", `[]`, false, false, "", ""},
	} {
		var u protocol.Rules
		if c.header.Get("A2A-Version") == "configured" {
			u.Protocol = protocol.A2A
		}
		q, ok := u.Parse(c.header, c.path, []byte(c.body))
		if ok != c.is {
			t.Errorf("%s %s: %v", c.path, c.body, ok)
		}
		if !ok {
			continue
		}
		m := &q[0]
		key, err := u.Key(m)
		if !m.REST || m.Method != c.method || u.Changes(m, false) != c.changes || key != c.want || err != nil {
			t.Errorf("%s: %+v, key %q, %v", c.path, m, key, err)
		}
	}
}

// Keys in order: `_meta`, the argument, the messageId; never the id of JSON-RPC.
func TestKey(t *testing.T) {
	u := protocol.Rules{Arguments: []string{"request_key"}}
	call := func(params string) string {
		return `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"pay",` + params + `}}`
	}
	send := func(message string) string {
		return `{"jsonrpc":"2.0","id":7,"method":"message/send","params":{"message":` + message + `}}`
	}
	for _, c := range []struct {
		body, key string
		err       error
	}{
		{call(`"arguments":{}`), "", nil},
		{call(`"arguments":{"request_key":"a1"}`), "a1", nil},
		{call(`"arguments":{"request_key":12345678901234567890}`), "12345678901234567890", nil},
		{call(`"arguments":{"request_key":"a1"},"_meta":{"idempotency-key":"m1"}`), "m1", nil},
		{call(`"arguments":{"request_key":"a1"},"_meta":{"idempotencyKey":""}`), "a1", nil},
		{call(`"_meta":{"execution-id":"m2","progressToken":1}`), "m2", nil},
		{call(`"_meta":{"execution-id":["m2"]}`), "", protocol.ErrKeyType},
		{call(`"arguments":{"request_key":"a1"},"_meta":{"idempotency-key":null}`), "a1", nil},
		{call(`"_meta":{"execution-id":null,"Execution-ID":"2"}`), "", protocol.ErrKeyTwice},
		{call(`"_meta":{"execution-id":"1","execution-id":"2"}`), "", protocol.ErrKeyTwice},
		{call(`"_meta":{"execution-id":"ein Schlüssel"}`), "sha256:88ff6d1c2b86cf3d6d4bbd67a2f4ae19c3c2a62c8cf0a0c55ae8bb9e3d9ed8d5", nil},
		{send(`{"messageId":"m1"}`), "m1", nil},
		{send(`{"messageId":"m1","taskId":"t"}`), "m1@t", nil},
		{send(`{"messageId":"m1","MessageId":"m2"}`), "", protocol.ErrKeyTwice},
		{send(`{}`), "", nil},
		{`{"jsonrpc":"2.0","id":7,"method":"acme/pay"}`, "", nil},
	} {
		m := parse(t, &u, nil, c.body)
		key, err := u.Key(&m)
		if strings.HasPrefix(c.key, "sha256:") && len(key) == len(c.key) && key[:7] == c.key[:7] {
			key = c.key // its digits are of no account
		}
		if key != c.key || !errors.Is(err, c.err) {
			t.Errorf("%s: %q, %v", c.body, key, err)
		}
	}
	own := protocol.Rules{MetaKeys: []string{"com.example/key"}}
	m := parse(t, &own, nil, call(`"_meta":{"execution-id":"no","com.example/key":"yes"}`))
	if key, _ := own.Key(&m); key != "yes" {
		t.Errorf("the configured name gives %q", key)
	}
}

// With a key each step of a call has its own; a step sent again has the same.
func TestSteps(t *testing.T) {
	var u protocol.Rules
	key := func(params string) string {
		m := parse(t, &u, nil, `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"pay","_meta":{"execution-id":"k"}`+params+`}}`)
		key, err := u.Key(&m)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	first, second := key(""), key(`,"inputResponses":{"a":{"x":1,"y":2}},"requestState":"s"`)
	if first != "k" || !strings.HasPrefix(second, "k~") {
		t.Errorf("%q and %q", first, second)
	}
	if again := key(`,"requestState":"s","inputResponses":{"a":{"y":2.0,"x":1}}`); again != second {
		t.Errorf("the same step has %q and %q", second, again)
	}
	if other := key(`,"requestState":"t","inputResponses":{"a":{"y":2,"x":1}}`); other == second {
		t.Error("another step has the same key")
	}
}

// The fingerprint is of what is called, with what; not of the id, the progress and the trace.
func TestFingerprint(t *testing.T) {
	u := protocol.Rules{Arguments: []string{"k/e~y"}}
	sum := func(text string) body.Fingerprint {
		m := parse(t, &u, nil, text)
		config := body.Comparison{Exclude: u.Exclude(&m)}
		s, _, err := config.Read(body.Request{ContentType: "application/json", Body: bytes.NewReader(m.Body), Size: int64(len(m.Body))})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, c := range []struct{ one, same, other []string }{
		{
			one: []string{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{}}}}`,
				`{"jsonrpc":"2.0","method":"tools/call","id":"x","params":{"arguments":{"b":{},"a":1.0},"name":"pay"}}`},
			same: []string{`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{}},"_meta":{"progressToken":4,"traceparent":"00"}}}`},
			other: []string{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{"id":1}}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{},"k/e~y":5}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"mail","arguments":{"a":1,"b":{}}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{}},"task":{"ttl":1}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{}},"requestState":"s"}}`,
				`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":1,"b":{}},"inputResponses":{}}}`},
		},
		{
			one: []string{`{"jsonrpc":"2.0","id":1,"method":"message/send","params":{"message":{"messageId":"1","parts":[{"text":"a"}],"metadata":{}}}}`},
			same: []string{`{"jsonrpc":"2.0","id":2,"method":"message/send","params":{"message":{"messageId":"2","parts":[{"text":"a"}],"metadata":{"traceparent":"00"}}}}`,
				`{"jsonrpc":"2.0","id":2,"method":"message/send","params":{"message":{"messageId":"2","parts":[{"text":"a"}]}}}`,
				`{"jsonrpc":"2.0","id":2,"method":"message/send","params":{"metadata":{"tracestate":"a","baggage":"b"},"message":{"messageId":"2","parts":[{"text":"a"}]}}}`},
			other: []string{`{"jsonrpc":"2.0","id":1,"method":"message/send","params":{"message":{"messageId":"1","parts":[{"text":"b"}],"metadata":{}}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"message/send","params":{"message":{"messageId":"1","parts":[{"text":"a"}],"metadata":{"traceparent":"00","amount":1}}}}`},
		},
		{ // a `_meta` that only the guard reads is as none
			one:   []string{`{"jsonrpc":"2.0","id":1,"method":"pay","params":{"a":1}}`},
			same:  []string{`{"jsonrpc":"2.0","id":2,"method":"pay","params":{"a":1,"_meta":{"traceparent":"00","idempotency-key":"k"}}}`},
			other: []string{`{"jsonrpc":"2.0","id":1,"method":"pay","params":{"a":1,"_meta":{"traceparent":"00","tenant":"a"}}}`},
		},
		{
			one:   []string{`{"jsonrpc":"2.0","id":1,"method":"eth_send","params":[{"_meta":1}]}`},
			same:  []string{`{"jsonrpc":"2.0","id":2,"method":"eth_send","params":[{"_meta":1}]}`},
			other: []string{`{"jsonrpc":"2.0","id":1,"method":"eth_send","params":[{"_meta":2}]}`},
		},
		{ // of a server's own members nobody knows that they do not count
			one: []string{`{"jsonrpc":"2.0","id":1,"method":"pay","params":{"a":1,"_meta":{"traceparent":"00","tracestate":"a","baggage":"a","progressToken":1,"execution-context":"t","execution-id":"1","tenant":"a"}}}`},
			same: []string{`{"jsonrpc":"2.0","id":2,"method":"pay","params":{"a":1,"_meta":{"traceparent":"01","tracestate":"b","baggage":"b","progressToken":2,"execution-context":["u"],"idempotency-key":"2","tenant":"a"}}}`,
				`{"jsonrpc":"2.0","id":2,"method":"pay","params":{"a":1,"_meta":{"tenant":"a"}}}`},
			other: []string{`{"jsonrpc":"2.0","id":1,"method":"pay","params":{"a":1,"_meta":{"tenant":"b"}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"pay","params":{"a":1,"_meta":{}}}`,
				`{"jsonrpc":"2.0","id":1,"method":"pay","params":{"a":1,"traceparent":"00","_meta":{"tenant":"a"}}}`},
		},
	} {
		want := sum(c.one[0])
		for _, body := range slices.Concat(c.one, c.same) {
			if sum(body) != want {
				t.Errorf("%s has another sum than %s", body, c.one[0])
			}
		}
		for _, body := range c.other {
			if sum(body) == want {
				t.Errorf("%s has the sum of %s", body, c.one[0])
			}
		}
	}
}

func TestMeta(t *testing.T) {
	var u protocol.Rules
	call := func(meta string) protocol.Message {
		return parse(t, &u, nil, `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"pay","arguments":{"to":{"iban":"DE1"},"n":1.50},"_meta":`+meta+`}}`)
	}
	for _, c := range []struct {
		meta   string
		tokens []string
		ok     bool
	}{
		{`{}`, nil, true}, {`{"execution-context":"a.b.c"}`, []string{"a.b.c"}, true},
		{`{"execution-context":["a","b"]}`, []string{"a", "b"}, true}, {`{"execution-context":[]}`, nil, true},
		{`{"execution-context":1}`, nil, false}, {`{"execution-context":["a",1]}`, nil, false},
		{`{"execution-context":"a","Execution-Context":"b"}`, nil, false},
	} {
		m := call(c.meta)
		if tokens, ok := m.Tokens(); ok != c.ok || !slices.Equal(tokens, c.tokens) {
			t.Errorf("%s: %v, %v", c.meta, tokens, ok)
		}
	}
	m := call(`{"traceparent":"00-a","x":"y"}`)
	if m.Trace != "00-a" {
		t.Errorf("trace %q", m.Trace)
	}
	for path, want := range map[string]string{"/to/iban": "DE1", "/n": "1.50", "/none": ""} {
		p, err := jsonx.ParsePointer(path)
		if err != nil {
			t.Fatal(err)
		}
		if value, found, err := body.Lookup(bytes.NewReader(m.Content), int64(len(m.Content)), p); value != want || found != (want != "") || err != nil {
			t.Errorf("%s: %q, %v, %v", path, value, found, err)
		}
	}
}

// A body that is no message is known by its beginning, whatever comes later, where nobody has named the
// protocol.
func TestBegins(t *testing.T) {
	for text, want := range map[string]bool{
		"": true, " \n": true, "{": true, ` { "json`: true, `{"jsonrpc"`: true, `{"id" : [1,"}"] , "met`: true, `{"id":1`: true, `{"id":"a\\`: true,
		`[`: true, `[ {"method":"a"`: true, `{"\u0069d":1,`: true, `{"id" 1`: true, `{"id":1}`: true,
		`{"amount"`: false, ` {"id":{"a":[{}]}, "amount":`: false, `{"Id":`: false, `{}`: false, `[1`: false, `[{"a"`: false, `"`: false, "1": false,
	} {
		auto, named := protocol.Rules{}, protocol.Rules{Protocol: protocol.MCP}
		if auto.Begins("/", []byte(text)) != want || !auto.Begins("/v1/message:send", []byte(text)) || !named.Begins("/", []byte(text)) {
			t.Errorf("%s: want %t", text, want)
		}
	}
}

// What a token in `_meta` hashes is in the form of RFC 8785, whose examples these are, or there is no
// such form that says exactly what was sent.
func TestInput(t *testing.T) {
	var u protocol.Rules
	of := func(params string) string {
		m := parse(t, &u, mcp, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":`+params+`}`)
		text, ok := m.Input()
		if !ok {
			return "none"
		}
		return strings.TrimSuffix(strings.TrimPrefix(string(text), `{"method":"tools/call","params":`), "}")
	}
	for params, want := range map[string]string{
		`{"name":"pay","_meta":{"execution-context":"x","progressToken":1},"arguments":{ "b":1, "a":[ ] }}`: `{"arguments":{"a":[],"b":1},"name":"pay"}`,
		`{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001,-0,1e21]}`:             "none",
		`{"numbers":[333333333.3333333,1E30,4.50,2e-3,0.000000000000000000000000001,-0,1e21,[1,[]]]}`:       `{"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27,0,1e+21,[1,[]]]}`,
		`{"string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/","literals":[null,true,false]}`:           `{"literals":[null,true,false],"string":"€$\u000f\nA'B\"\\\\\"/"}`,
		`{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7,"\u2028":8}`:            "{\"\\r\":2,\"1\":4,\"\u0080\":6,\"ö\":7,\"\u2028\":8,\"€\":1,\"😀\":5,\"\ufb33\":3}",
		`{"n":9007199254740993}`:       "none",
		`{"n":9007199254740992}`:       `{"n":9007199254740992}`,
		`{"n":1e400}`:                  "none",
		`{"n":1e-400}`:                 "none",
		`{"n":{"a":1,"\u0061":1}}`:     "none",
		`{"n":"\ud800"}`:               "none",
		`{"n":"\ufffd"}`:               "{\"n\":\"\ufffd\"}",
		`{"n":["\udc00 and more"]}`:    "none",
		`{"n":10000000000000001}`:      "none",
		`{"n":1000000000000000000000}`: "none",
	} {
		if got := of(params); got != want {
			t.Errorf("%s: %s, want %s", params, got, want)
		}
	}
}

func TestCancelled(t *testing.T) {
	var u protocol.Rules
	m := parse(t, &u, mcp, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"reason":"3","requestId": 3 }}`)
	if string(m.Cancels()) != "3" {
		t.Errorf("it cancels %s", m.Cancels())
	}
	if got := string(m.WithRequestID([]byte(`"x"`))); got != `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"reason":"3","requestId": "x" }}` {
		t.Errorf("for another request it is %s", got)
	}
	other := parse(t, &u, mcp, `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"requestId":3}}`)
	if other.Cancels() != nil || string(other.WithRequestID([]byte("1"))) != string(other.Body) {
		t.Error("a ping cancels something")
	}
}

func TestErrorAnswers(t *testing.T) {
	var u protocol.Rules
	m := parse(t, &u, header("Mcp-Protocol-Version", "2026-07-28"), `{"jsonrpc":"2.0","id":9007199254740993,"method":"tools/call","params":{"name":"pay"}}`)
	if got := string(m.Error("It is in doubt.", []byte(`{"status":409}`))); got !=
		`{"jsonrpc":"2.0","id":9007199254740993,"error":{"code":-32090,"message":"It is in doubt.","data":{"status":409}}}` {
		t.Error(got)
	}
	if got := string(m.ToolError("Do not repeat it.", []byte(`{"status":409}`))); got !=
		`{"jsonrpc":"2.0","id":9007199254740993,"result":{"resultType":"complete","content":[{"type":"text","text":"Do not repeat it."}],"isError":true,"_meta":{"agent-guard/problem":{"status":409}}}}` {
		t.Error(got)
	}
	note := parse(t, &u, mcp, `{"jsonrpc":"2.0","method":"tools/call"}`)
	if got := string(note.Error("x", nil)); got != `{"jsonrpc":"2.0","id":null,"error":{"code":-32090,"message":"x"}}` {
		t.Error(got)
	}
}

// What is taken for harmless is so for servers that match names in any case, that take the last
// member of a name, and that take the first.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"a":[1,{}]},"_meta":{"execution-id":"k"}}}`,
		`{"jsonrpc":"2.0","id":1,"method":"ping"}`, `[{"jsonrpc":"2.0","method":"notifications/x"}]`, `{"jsonrpc":"2.0","id":null,"result":[]}`,
		`{"message":{"messageId":"a","role":"user"}}`, `{"jsonrpc":"2.0","id":1,"Method":"ping","\u006dethod":"tools/call"}`,
		`{"jsonrpc":"2.0","id":"\ud800","method":"message/send","params":{"message":{"messageId":"é"}}}`, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":{\"\xff\":1}}",
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":-1.5e3}}`,
	} {
		f.Add([]byte(s), "/message:send")
	}
	u := protocol.Rules{Exempt: []string{"get"}, Arguments: []string{"key"}}
	f.Fuzz(func(t *testing.T, body []byte, path string) {
		q, ok := u.Parse(nil, path, body)
		for n := range len(body) + 1 {
			if !u.Begins(path, body[:n]) && ok {
				t.Fatalf("%q is a message, and %q cannot begin one", body, body[:n])
			}
		}
		if !ok {
			return
		}
		for i := range q {
			m := &q[i]
			// The messages of a batch are what they are alone.
			if alone, ok := u.Parse(nil, path, m.Body); q[0].Batch && (!ok || alone[0].Batch || alone[0].Name != m.Name ||
				alone[0].Method != m.Method || alone[0].Protocol != m.Protocol || !bytes.Equal(alone[0].ID, m.ID)) {
				t.Fatalf("%q alone is %+v, in %q %+v", m.Body, alone, body, m)
			}
			if !json.Valid(m.Body) || m.ID != nil && !json.Valid(m.ID) || !bytes.Contains(body, m.Body) {
				t.Fatalf("%q: the message %q has the id %q", body, m.Body, m.ID)
			}
			key, err := u.Key(m)
			if err == nil && (len(key) > 255 || strings.ContainsFunc(key, func(c rune) bool { return c < 0x21 || c > 0x7e })) {
				t.Fatalf("%q: the key is %q", body, key)
			}
			u.Exclude(m)
			m.Tokens()
			if !json.Valid(m.WithRequestID([]byte("1"))) || !m.REST && (!json.Valid(m.Error("é\xff", nil)) || !json.Valid(m.ToolError("", m.Body))) {
				t.Fatalf("%q: what is made of it is no JSON", body)
			}
			if m.REST || u.Changes(m, false) {
				continue
			}
			var folded struct {
				Method string
				Params struct{ Name string }
			}
			_ = json.Unmarshal(m.Body, &folded) // other types keep their zero values
			var last map[string]any
			if err := json.Unmarshal(m.Body, &last); err != nil {
				t.Fatal(err)
			}
			method, _ := last["method"].(string)
			for _, read := range []string{folded.Method, method} {
				if read == "tools/call" && folded.Params.Name != "get" || strings.HasPrefix(read, "message/") || strings.HasPrefix(read, "Send") {
					t.Fatalf("%q is harmless, and means %s to some", m.Body, read)
				}
			}
			if folded.Method != method && !slices.Contains(slices.Collect(maps.Keys(last)), "result") {
				t.Fatalf("%q is read in two ways", m.Body)
			}
		}
	})
}

// Tokens of a message are taken out where they stand, and nothing else of it changes.
func TestWithTokens(t *testing.T) {
	const before, after = ` {"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"_meta":{"a":[1, 2],"execution-context" : `, `,"z":"\u00e4"},"name":"x"}} `
	for _, value := range []string{`"t1"`, `["t1" , "t2"]`, `[]`} {
		body := []byte(before + value + after)
		r, ok := (&protocol.Rules{Protocol: protocol.MCP}).Parse(header("Content-Type", "application/json"), "/mcp", body)
		if !ok || len(r) != 1 {
			t.Fatal(value)
		}
		m := &r[0]
		for want, tokens := range map[string][]string{`[]`: nil, `["t2"]`: {"t2"}} {
			if got := string(m.WithTokens(tokens)); strings.TrimSpace(got) != strings.TrimSpace(before+want+after) {
				t.Errorf("%s without all but %v: %s", value, tokens, got)
			}
		}
	}
}
