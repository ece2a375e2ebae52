package guard

import (
	"cmp"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// What names callers is what the configuration says (the names themselves are tested in guard/caller).
func TestSettingsNameCallers(t *testing.T) {
	for _, c := range []struct {
		name, want string // want begins the name
		h          Config
		r          *http.Request
	}{
		{"caller", `explicit:"default":t`, Config{Settings: Settings{Caller: "{http.request.header.X-Tenant}"}}, request("POST", "/", "X-Tenant", "t")},
		{"realm", `explicit:"r":t`, Config{Realm: "r", Settings: Settings{Caller: "{http.request.header.X-Tenant}"}}, request("POST", "/", "X-Tenant", "t")},
		{"user", `user:"default":u`, Config{}, request("POST", "/")},
		{"caller_cookies", `cookie:`, Config{Settings: Settings{CallerCookies: []string{"session"}}}, request("POST", "/", "Cookie", "session=1")},
		{"credentials", `credential:`, Config{Settings: Settings{Credentials: []string{"X-Mine"}}}, request("POST", "/", "X-Mine", "a")},
		{"balancing cookies", `anonymous`, Config{BalancingCookies: func() []string { return []string{"lb"} }}, request("POST", "/", "Cookie", "lb=1")},
		{"protocol", `session:`, Config{Settings: Settings{Protocol: protocol.MCP}}, request("POST", "/", "Mcp-Session-Id", "s")},
		{"no protocol", `anonymous`, Config{Settings: Settings{Protocol: protocol.None}}, request("POST", "/", "Mcp-Session-Id", "s")},
	} {
		if c.name == "user" {
			testHost{}.SetVar(c.r, "user", "u")
		}
		g := testGuard(t)
		got, err := newHandler(t, c.h).Callers.Of(c.r, "", g.Keyed)
		if err != nil || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, %v; want %s", c.name, got, err, c.want)
		}
		// P3: what is hashed is so under the store's key.
		another, err := newHandler(t, c.h).Callers.Of(c.r, "", testGuard(t).Keyed)
		if err != nil || (another == got) == strings.HasSuffix(c.want, ":") {
			t.Errorf("%s: %q, and with another store's key %q, %v", c.name, got, another, err)
		}
	}
}

// P1: callers whom nothing names that stays are told of in the log once for each guard, with the line to write.
func TestUnnamedCallersAreLogged(t *testing.T) {
	var log strings.Builder
	h := newHandler(t, Config{Settings: Settings{Name: "shop"}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for range 3 {
		for _, origin := range []execution.Origin{execution.OriginGiven, execution.OriginMinted} {
			x := &guardedRequest{h: h, r: request("POST", "/", "Cookie", "session=a")}
			if err := x.refuseUnnamed(&execution.Call{Origin: origin}); (err != nil) != (origin == execution.OriginGiven) {
				t.Error(err)
			}
		}
	}
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "caller cookie NAME") || !strings.Contains(text, "guard=shop") {
		t.Errorf("%q", text)
	}
}

const trace = "4bf92f3577b34da6a3ce929d0e0e4736"

// "Words", workflow: Workflow-Id, else the trace id, else none.
func TestWorkflow(t *testing.T) {
	for _, c := range []struct {
		name   string
		fields []string
		want   string
	}{
		{"none", nil, ""},
		{"named", []string{"Workflow-Id", "wf-1"}, "wf-1"},
		{"the name goes first", []string{"Workflow-Id", "wf-1", "Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}, "wf-1"},
		{"an empty name", []string{"Workflow-Id", "", "Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}, trace},
		{"trace", []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}, trace},
		{"a later version", []string{"Traceparent", "cc-" + trace + "-00f067aa0ba902b7-01-more-to-come"}, trace},
		{"version 00 with more", []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7-01-more"}, ""},
		{"the version that is none", []string{"Traceparent", "ff-" + trace + "-00f067aa0ba902b7-01"}, ""},
		{"no hexadecimal version", []string{"Traceparent", "0x-" + trace + "-00f067aa0ba902b7-01"}, ""},
		{"zero trace", []string{"Traceparent", "00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01"}, ""},
		{"zero parent", []string{"Traceparent", "00-" + trace + "-" + strings.Repeat("0", 16) + "-01"}, ""},
		{"short trace", []string{"Traceparent", "00-" + trace[1:] + "-00f067aa0ba902b7-01"}, ""},
		{"capitals", []string{"Traceparent", "00-" + strings.ToUpper(trace) + "-00f067aa0ba902b7-01"}, ""},
		{"no flags", []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := workflow(request("POST", "/", c.fields...), nil, new(Tokens)); got != c.want || err != nil {
				t.Errorf("workflow %q, want %q (%v)", got, c.want, err)
			}
		})
	}
	// A call never leaves its workflow in silence.
	for _, lines := range [][]string{{"order 7"}, {strings.Repeat("w", 256)}, {"pedido-ñ"}, {"a", "b"}} {
		r := request("POST", "/")
		r.Header["Workflow-Id"] = lines
		_, err := workflow(r, nil, new(Tokens))
		var p *problem.Problem
		if !errors.As(err, &p) || p.Kind() != problem.WorkflowIDInvalid || p.Kind().SafeNewKey {
			t.Errorf("%q: %v", lines, err)
		}
	}
}

// Whatever a client sends, a trace id is 32 hexadecimal digits of what it sent.
func FuzzTraceparent(f *testing.F) {
	f.Add("00-" + trace + "-00f067aa0ba902b7-01")
	f.Add("cc-" + trace + "-00f067aa0ba902b7-01-x")
	f.Add("ff-" + trace + "-00f067aa0ba902b7-01")
	f.Add("----")
	whole := regexp.MustCompile(`^(00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}|[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-(?s:.*))?)$`)
	zero := regexp.MustCompile(`^..-(0{32}-.*|.{32}-0{16}-.*)`)
	f.Fuzz(func(t *testing.T, text string) {
		got := traceID(text)
		valid := whole.MatchString(text) && !strings.HasPrefix(text, "ff") && !zero.MatchString(text) &&
			(!strings.HasPrefix(text, "00") || len(text) == 55)
		switch {
		case valid && got != text[3:35]:
			t.Errorf("%q gives %q", text, got)
		case !valid && got != "":
			t.Errorf("%q is malformed and gives %q", text, got)
		}
	})
}

// stated is the id that a request states to a handler.
func stated(t *testing.T, h Config, r *http.Request) (string, error) {
	t.Helper()
	return newHandler(t, h).statedID(r, nil, nil)
}

// An id in the body: a string or a number in a JSON body, and nothing that the
// upstream could read another way (P1).
func TestIDInTheBody(t *testing.T) {
	sources := []IDSource{{JSON: "/order/id"}, {Header: "X-Last"}}
	for _, c := range []struct{ name, contentType, body, want, slug string }{
		{"string", "application/json", `{"order": {"id": "o-1"}}`, "o-1", ""},
		{"number", "application/vnd.api+json; charset=utf-8", `{"order": {"id": 12345678901234567890}}`, "12345678901234567890", ""},
		{"absent", "application/json", `{"order": {}}`, "last", ""},
		{"null", "application/json", `{"order": {"id": null}}`, "last", ""},
		{"no body", "application/json", ``, "last", ""},
		{"no JSON by its type", "text/plain", `{"order": {"id": "o-1"}}`, "last", ""},
		{"no JSON by its look", "application/json", `order=1`, "last", ""},
		{"object", "application/json", `{"order": {"id": {}}}`, "", "execution-id-invalid"},
		{"twice", "application/json", `{"order": {"id": "a", "id": "b"}}`, "", "execution-id-invalid"},
		{"empty", "application/json", `{"order": {"id": ""}}`, "", "execution-id-invalid"},
		{"a space", "application/json", `{"order": {"id": "a b"}}`, "", "execution-id-invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := request("POST", "/", "Content-Type", c.contentType, "X-Last", "last")
			r.Body = io.NopCloser(strings.NewReader(c.body))
			h := newHandler(t, Config{Settings: Settings{ExecutionID: sources}})
			whole, _, err := h.readBody(r, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer whole.Close()
			got, err := h.statedID(r, whole, nil)
			var p *problem.Problem
			if c.slug != "" && (!errors.As(err, &p) || p.Kind().Slug != c.slug) || c.slug == "" && (err != nil || got != c.want) {
				t.Errorf("%q, %v; want %q %s", got, err, c.want, c.slug)
			}
		})
	}
}

// Step 1: the first source that has an id names the call; a malformed id is refused
// and not passed over, or the call would run under another one (P1).
func TestStatedID(t *testing.T) {
	sources := []IDSource{{Header: "X-First"}, {Placeholder: "order-{http.request.header.X-Order}"}, {Header: "x-last"}}
	for _, c := range []struct {
		name    string
		sources []IDSource
		fields  []string
		want    string
		slug    string // of the problem
	}{
		{"the default", nil, []string{"Idempotency-Key", "a"}, "a", ""},
		{"the other default", nil, []string{"Execution-Id", "b"}, "b", ""},
		{"two of the default", nil, []string{"Execution-Id", "b", "Idempotency-Key", "a"}, "", "execution-id-invalid"},
		{"quoted", nil, []string{"Idempotency-Key", `"a"`}, "a", ""},
		{"none", nil, nil, "", ""},
		{"first", sources, []string{"X-Order", "o", "X-First", "f", "X-Last", "l"}, "f", ""},
		{"placeholder", sources, []string{"X-Order", "o", "X-Last", "l"}, "order-o", ""},
		// The text around an empty placeholder would be the id of all such calls.
		{"a placeholder without value is no id", sources, []string{"X-Last", "l"}, "l", ""},
		{"what replaces the default does not add to it", sources, []string{"Idempotency-Key", "a"}, "", ""},
		{"two lines", nil, []string{"Idempotency-Key", "a", "Idempotency-Key", "b"}, "", "execution-id-invalid"},
		{"empty", nil, []string{"Idempotency-Key", "", "Execution-Id", "b"}, "", "execution-id-invalid"},
		{"a space in a placeholder", sources, []string{"X-Order", "a b", "X-Last", "l"}, "", "execution-id-invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := stated(t, Config{Settings: Settings{ExecutionID: c.sources}}, request("POST", "/", c.fields...))
			var p *problem.Problem
			switch {
			case c.slug != "":
				if !errors.As(err, &p) || p.Kind().Slug != c.slug {
					t.Errorf("%q, %v; want %s", got, err, c.slug)
				}
			case c.want == "":
				if !errors.Is(err, errNoID) {
					t.Errorf("%q, %v; want no id", got, err)
				}
			case err != nil || got != c.want:
				t.Errorf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// P1, P3: a call without an id gets one by `missing_id`. One is left to recognition only where its caller has a name
// that stays, and it opens no session, whose answer is one client's.
func TestLeftToRecognition(t *testing.T) {
	opening := &protocol.Message{Method: "initialize"}
	for _, c := range []struct {
		name, caller string
		missing      MissingID
		message      *protocol.Message
		want         execution.Origin // 0: refused
		recognized   bool
	}{
		{name: "require", missing: MissingRequire},
		{name: "require of an opening", missing: MissingRequire, message: opening},
		{name: "mint", missing: MissingMint, want: execution.OriginMinted},
		{name: "derive", missing: MissingDerive, want: execution.OriginDerived},
		{name: "derive of an opening", missing: MissingDerive, message: opening, want: execution.OriginMinted},
		{name: "recognize", missing: MissingRecognize, want: execution.OriginMinted, recognized: true},
		{name: "recognize of an opening", missing: MissingRecognize, message: opening, want: execution.OriginMinted},
		{name: "recognize of a changing caller", missing: MissingRecognize, caller: "changing:0", want: execution.OriginMinted},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHandler(t, Config{Settings: Settings{MissingID: c.missing}})
			q, g := &guardedRequest{h: h, r: request("POST", "/"), message: c.message}, testGuard(t)
			call := execution.Call{Scope: execution.Scope{Caller: cmp.Or(c.caller, "user:a")}}
			id, err := q.missingID(g, &call)
			if (err != nil) != (c.want == 0) || call.Origin != c.want || (id == "") != (c.recognized || err != nil) {
				t.Errorf("%q, origin %d, %v", id, call.Origin, err)
			}
			if again, err := q.missingID(g, &call); err == nil && (again == id) != (c.recognized || c.want == execution.OriginDerived) {
				t.Errorf("once more %q after %q", again, id)
			}
		})
	}
}

// P3: where the tokens of a message cannot be verified, because the ledger does not open, it is refused as
// any other call is, and the engine is given back.
func TestMessagesWaitForTheTokenPolicy(t *testing.T) {
	e := testEngine(t)
	held := 0
	h := newHandler(t, Config{
		Settings: Settings{Protocol: protocol.MCP, RequireECT: true}, Verifies: true,
		Open:   func() (*Engine, func(), error) { held++; return e, func() { held-- }, nil },
		Tokens: func() (*TokenPolicy, error) { return nil, errors.New("the ledger is damaged") },
	})
	for _, body := range []string{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay"}}`, `{"amount":1}`} {
		r := request(http.MethodPost, "/mcp", "Content-Type", "application/json")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		w, forwarded := httptest.NewRecorder(), false
		err := h.Serve(w, r, nextFunc(func(http.ResponseWriter, *http.Request) error { forwarded = true; return nil }))
		if err != nil || forwarded || !strings.Contains(w.Body.String(), "store-unavailable") || held != 0 {
			t.Errorf("%s: forwarded %t, %v, %d references to the engine remain: %s", body, forwarded, err, held, w.Body)
		}
	}
}

// P7: where a host panics while a call is identified, what was read of the body is given back, and the engine once.
func TestPanicWhileIdentified(t *testing.T) {
	e := testEngine(t)
	released := 0
	h := newHandler(t, Config{
		Settings: Settings{ExecutionID: []IDSource{{Placeholder: "{panics}"}}}, Host: panickingHost{},
		Open: func() (*Engine, func(), error) { return e, func() { released++ }, nil },
	})
	r := request(http.MethodPost, "/charges")
	body := strings.Repeat("x", 1<<20)
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
	func() {
		defer func() {
			if recover() == nil {
				t.Error("nothing has panicked")
			}
		}()
		_ = h.Serve(httptest.NewRecorder(), r, nextFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
	}()
	if used := e.Executions.BodyMemory().Used(); used != 0 || released != 1 {
		t.Errorf("%d bytes are still taken, and the engine was released %d times", used, released)
	}
}

type panickingHost struct{ plainHost }

func (panickingHost) Expand(_ *http.Request, text string) (string, bool) {
	if text == "{panics}" {
		panic("no value")
	}
	return "", false
}
