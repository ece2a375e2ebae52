package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// singles is a server of MCP that takes one message at a time, as all have to. It executes the calls of
// tools, by what the tool is called.
type singles struct {
	mu     sync.Mutex
	effect map[string]int
	seen   []string // the bodies
	fields []http.Header
	holds  map[string]*gate // by tool
	heard  chan string      // what a client has answered; closed at the end of the test
}

func newSingles(t *testing.T) (*singles, string) {
	s := &singles{effect: map[string]int{}, holds: map[string]*gate{}, heard: make(chan string, 1)}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(s.heard) }) // else a test that fails would wait for ever
	return s, strings.TrimPrefix(server.URL, "http://")
}

func (s *singles) count(tool string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.effect[tool]
}

// bodies are those of all that has come.
func (s *singles) bodies() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// hold has the calls of a tool wait after their effect.
func (s *singles) hold(t *testing.T, tool string) *gate {
	h := newGate(t)
	t.Cleanup(h.open)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds[tool] = h
	return h
}

func (s *singles) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // what is cut is no message
	var m struct {
		ID     json.RawMessage
		Method string
		Params struct{ Name string }
		Result json.RawMessage
	}
	err := json.Unmarshal(body, &m)
	tool := m.Params.Name
	s.mu.Lock()
	s.seen, s.fields = append(s.seen, string(body)), append(s.fields, r.Header)
	if m.Method == "tools/call" {
		s.effect[tool]++
	}
	n, hold := s.effect[tool], s.holds[tool]
	s.mu.Unlock()
	if hold != nil {
		hold.pass()
	}
	event := func(text string) {
		_, _ = fmt.Fprintf(w, "id: %d\r\nevent: message\r\ndata: %s\r\n\r\n", n, text)
		_ = http.NewResponseController(w).Flush() // an error shows as a missing event
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Server", "singles")
	kind, _, _ := strings.Cut(tool, "-")
	switch {
	case err != nil: // a batch, which this server executes as one
		_, _ = io.WriteString(w, `[{"jsonrpc":"2.0","id":1,"result":{"batch":true}}]`)
	case m.Result != nil:
		s.heard <- string(m.Result)
		w.WriteHeader(http.StatusAccepted)
	case m.ID == nil:
		w.WriteHeader(http.StatusAccepted)
	case m.Method == "tools/list":
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"peek","inputSchema":{},"annotations":{"readOnlyHint":true}}]}}`, m.ID)
	case m.Method == "initialize":
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-03-26","capabilities":{},"serverInfo":{"name":"s"}}}`, m.ID)
	case kind == "stream", kind == "ask":
		w.Header().Set("Content-Type", "text/event-stream")
		event(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":` + string(m.ID) + `,"progress":1}}`)
		if kind == "ask" {
			event(`{"jsonrpc":"2.0","id":"q","method":"elicitation/create","params":{}}`)
			event(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"heard":%s}}`, m.ID, <-s.heard))
			return
		}
		event(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"n":%d}}`, m.ID, n))
	case kind == "quiet":
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush() // an error shows as a missing header
		event(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"heard":%s}}`, m.ID, <-s.heard))
	case kind == "gone":
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, "no such session")
	case kind == "denied":
		w.Header().Set("Www-Authenticate", "Bearer")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Who are you"}}`)
	case kind == "cut":
		w.Header().Set("Content-Length", "1000")
		_, _ = fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{`, m.ID)
		panic(http.ErrAbortHandler)
	default:
		_, _ = fmt.Fprintf(w, "{\n  \"jsonrpc\": \"2.0\", \"id\": %s,\n  \"result\": {\"tool\":%q,\"n\":%d}\n}\n", m.ID, tool, n)
	}
}

func batchOf(messages ...string) string { return "[" + strings.Join(messages, ",") + "]" }

// keyed is the call of a tool with a key.
func keyed(id, tool, key string) string {
	return toolCall(id, tool, `,"_meta":{"execution-id":"`+key+`"}`)
}

// asArray is a message whose client does not read events.
func asArray(body string, header ...string) request {
	r := message(body, header...)
	r.header["Accept"] = "application/json"
	return r
}

// responses reads the answer to a batch: by id the text after it, without spaces.
func responses(t *testing.T, r reply) map[string]string {
	t.Helper()
	if r.cut || r.status != http.StatusOK || r.header.Get("Execution-Status")+r.header.Get("Execution-Id") != "" {
		t.Fatalf("%d, cut %v, %v: %s", r.status, r.cut, r.header, r.body)
	}
	var texts []json.RawMessage
	if r.header.Get("Content-Type") == "text/event-stream" {
		for event := range strings.SplitSeq(strings.TrimSuffix(r.body, "\n\n"), "\n\n") {
			text, ok := strings.CutPrefix(event, "event: message\ndata: ")
			if !ok || strings.ContainsAny(text, "\r\n") {
				t.Fatalf("the event %q in %q", event, r.body)
			}
			texts = append(texts, json.RawMessage(text))
		}
	} else if err := json.Unmarshal([]byte(r.body), &texts); err != nil || r.header.Get("Content-Type") != "application/json" {
		t.Fatalf("%v: %v: %s", err, r.header, r.body)
	}
	all := map[string]string{}
	for _, text := range texts {
		var m struct{ ID, Method, Result, Error json.RawMessage }
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if m.Method == nil {
			if all[string(m.ID)] != "" {
				t.Errorf("two responses for %s: %s", m.ID, r.body)
			}
			all[string(m.ID)] = string(m.Result) + string(m.Error)
		}
	}
	return all
}

func wantResponses(t *testing.T, what string, r reply, want map[string]string) {
	t.Helper()
	got := responses(t, r)
	for id, part := range want {
		if !strings.Contains(got[id], part) {
			t.Errorf("%s: the response for %s is %q, want %q", what, id, got[id], part)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d responses, want %d: %s", what, len(got), len(want), r.body)
	}
}

// P1: each call of a batch has its own key and record, by which it is known in another batch, in a part
// of it and alone. What changes nothing passes, and what needs no answer has none.
func TestBatchEachCallIsItsOwn(t *testing.T) {
	for _, form := range []string{"array", "events"} {
		t.Run(form, func(t *testing.T) {
			s, addr := newSingles(t)
			g := start(t, "agent_proxy %s {\n protocol mcp\n exempt tool peek\n}", addr)
			post := func(body string) reply {
				if form == "array" {
					return g.call(asArray(body))
				}
				return g.call(message(body))
			}
			const initialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`
			first := post(batchOf(ping(1), keyed("2", "pay", "a"), initialized, keyed(`"three"`, "stream", "b"), toolCall("4", "peek", "")))
			wantResponses(t, "the first", first, map[string]string{"1": "{", "2": `"n":1`, `"three"`: `"n":1`, "4": `"peek","n":1`})
			if first.header.Get("X-Server") != "singles" {
				t.Errorf("the header of the server is lost: %v", first.header)
			}
			wantResponses(t, "the whole again", post(batchOf(keyed("7", "pay", "a"), keyed("8", "stream", "b"), toolCall("9", "peek", ""))),
				map[string]string{"7": `"n":1`, "8": `"n":1`, "9": `"peek","n":2`})
			wantResponses(t, "a part, with a new one", post(batchOf(keyed("1", "pay", "c"), keyed("2", "pay", "a"))), map[string]string{"1": `"n":2`, "2": `"n":1`})
			g.call(message(keyed("5", "pay", "a"))).want(t, 200, "{\n  \"jsonrpc\": \"2.0\", \"id\": 5,\n  \"result\": {\"tool\":\"pay\",\"n\":1}\n}\n", "replayed")
			g.call(message(keyed("5", "pay", "d")))
			wantResponses(t, "one that came alone before", post(batchOf(keyed("6", "pay", "d"))), map[string]string{"6": `"n":3`})
			wantResponses(t, "another call under a key", post(batchOf(keyed("1", "other", "a"), keyed("2", "pay", "c"))),
				map[string]string{"1": "fingerprint-mismatch", "2": `"n":2`})
			wantResponses(t, "twice the same key", post(batchOf(keyed("1", "pay", "e"), keyed("2", "pay", "e"))), map[string]string{"1": `"n":4`, "2": `"n":4`})
			got := responses(t, post(batchOf(toolCall("1", "pay", ""), toolCall("2", "pay", ""))))
			if both := got["1"] + got["2"]; s.count("pay") != 6 || !strings.Contains(both, `"n":5`) || !strings.Contains(both, `"n":6`) {
				t.Errorf("two equal calls, both meant: %v, %d effects", got, s.count("pay"))
			}
			if s.count("other") != 0 || s.count("stream") != 1 {
				t.Errorf("%v", s.effect)
			}
			for i, body := range s.seen {
				if body[0] != '{' || s.fields[i].Get("Content-Length") != fmt.Sprint(len(body)) {
					t.Errorf("%s %s has come to the server", s.fields[i].Get("Content-Length"), body)
				}
			}
			if got := post(batchOf(initialized, `{"jsonrpc":"2.0","method":"tools/unknown"}`)); got.status != 202 || got.body != "" {
				t.Errorf("notifications only: %d %q", got.status, got.body)
			}
		})
	}
}

// events sends a batch and reads its answer as far as each part is there.
func (g *gateway) events(r request) (until func(part string), leave func()) {
	g.t.Helper()
	req, leave := withCancel(g.build(r))
	res, err := g.client.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = res.Body.Close() })
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
		g.t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	from, all := bufio.NewReader(res.Body), ""
	return func(part string) {
		g.t.Helper()
		for !strings.Contains(all, part) {
			event, err := from.ReadString('\n')
			if all += event; err != nil {
				g.t.Fatalf("%v after %q, which lacks %q", err, all, part)
			}
		}
	}, leave
}

// The events of each answer come at once, whatever the others do: a server may need its client for a call.
func TestBatchEventsFlow(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n}", addr)
	hold := s.hold(t, "pay")
	until, leave := g.events(message(batchOf(toolCall("1", "pay", ""), toolCall("2", "ask", ""), toolCall("3", "write", ""))))
	defer leave()
	until(`"method":"elicitation/create"`)
	until(`"progressToken":2`)
	until(`"tool":"write"`)
	if got := g.call(message(`{"jsonrpc":"2.0","id":"q","result":{"action":"accept"}}`)); got.status != 202 {
		t.Errorf("%d", got.status)
	}
	until(`"heard":{"action":"accept"}`)
	hold.open()
	until(`"tool":"pay"`)

	// The header comes with that of the server, before there is an event.
	until, leave = g.events(message(batchOf(toolCall("1", "quiet", ""))))
	defer leave()
	g.call(message(`{"jsonrpc":"2.0","id":"q","result":{"action":"decline"}}`))
	until(`"heard":{"action":"decline"}`)
}

// P1 without keys: of a stream that breaks off, what has come was answered, and an equal call afterwards is
// meant; the rest runs on, and is recognised. Of an array nothing was answered before its end.
func TestBatchAnswersThatAreLost(t *testing.T) {
	for _, form := range []string{"array", "events"} {
		t.Run(form, func(t *testing.T) {
			s, addr := newSingles(t)
			g := start(t, toolsGuard, addr)
			hold := s.hold(t, "late")
			body := batchOf(toolCall("1", "early", ""), toolCall("2", "stream", ""), toolCall("3", "late", ""))
			known := left.Load()
			var leave func()
			if form == "events" {
				var until func(string)
				until, leave = g.events(message(body, leaver, "yes"))
				until(`"tool":"early"`)
				until(`"id":2,"result"`)
			} else {
				r := asArray(body, leaver, "yes")
				r.client = g.client
				leave = g.leaving(r)
				wait(t, hold.arrived, "the call")
				eventually(t, "the others have ended", func() bool { return waiting("guard.(*Call).execute") == 1 })
			}
			leave()
			eventually(t, "the gateway knows that the client has left", func() bool { return left.Load() == known+1 })
			early := `"n":1`
			if form == "events" {
				early = `"n":2`
			}
			parts := map[string]string{"early": early, "stream": early}
			for _, tool := range []string{"early", "stream"} {
				if got := g.call(message(toolCall("9", tool, ""))); !strings.Contains(got.body, parts[tool]) || !strings.Contains(got.body, `"id":9`) && !strings.Contains(got.body, `"id": 9`) {
					t.Errorf("%s: %s, want %s", tool, got.body, early)
				}
			}
			hold.open()
			again := g.call(asArray(batchOf(toolCall("7", "late", ""), toolCall("8", "fresh", ""))))
			wantResponses(t, "the retry", again, map[string]string{"7": `"n":1`, "8": `"n":1`})
			wantResponses(t, "meant once more", g.call(asArray(batchOf(toolCall("7", "late", "")))), map[string]string{"7": `"n":2`})
		})
	}
}

// A client that says that it waits no more for one call of a batch has left that one only.
func TestBatchCallIsCancelled(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, toolsGuard, addr)
	hold := s.hold(t, "late")
	first := g.begin(asArray(batchOf(toolCall("1", "early", ""), toolCall("2", "late", ""))))
	wait(t, hold.arrived, "the call")
	eventually(t, "the first has ended", func() bool { return waiting("guard.(*Call).execute") == 1 })
	for _, id := range []string{"1", "2"} {
		g.call(message(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":` + id + `}}`))
	}
	retry := g.begin(message(batchOf(toolCall("3", "late", ""), toolCall("4", "early", ""))))
	followers(t, 1)
	hold.open()
	for _, p := range []*pending{first, retry} {
		if got := responses(t, p.answer()); len(got) != 2 {
			t.Errorf("%v", got)
		}
	}
	if s.count("early") != 1 || s.count("late") != 1 {
		t.Errorf("%v", s.effect)
	}
}

// A refusal on the level of HTTP is the batch's if every request has it; else it is the error of its own
// message, and so is an answer that breaks off. What was executed stays so.
func TestBatchRefusals(t *testing.T) {
	for _, form := range []string{"array", "events"} {
		t.Run(form, func(t *testing.T) {
			s, addr := newSingles(t)
			g := start(t, "agent_proxy %s {\n protocol mcp\n breaker off\n action undecided {\n match tool gone-in_doubt\n outcome in_doubt 404\n }\n}", addr)
			post := func(body string) reply {
				if form == "array" {
					return g.call(asArray(body))
				}
				return g.call(message(body))
			}
			got := post(batchOf(keyed("1", "denied", "a"), `{"jsonrpc":"2.0","method":"notifications/initialized"}`, keyed("2", "denied", "b")))
			if got.status != 401 || got.header.Get("Www-Authenticate") != "Bearer" || !strings.Contains(got.body, "Who are you") || got.header.Get("Execution-Id") != "" {
				t.Errorf("all denied: %d %v %s", got.status, got.header, got.body)
			}
			if got := post(batchOf(keyed("1", "gone", "c"), toolCall("2", "gone", ""))); got.status != 404 || got.body != "no such session" {
				t.Errorf("no session: %d %s", got.status, got.body)
			}
			const first = `"message":"The server has answered this message with the HTTP status `
			wantResponses(t, "one denied, one gone", post(batchOf(keyed("1", "denied", "a"), keyed("2", "gone", "c"), keyed("3", "pay", "d"), keyed("4", "cut", "e"), keyed("5", "gone-in_doubt", "f"))),
				map[string]string{
					"1": first + `401.","data":{"status":401,"body":{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Who are you"}}}`,
					"2": first + `404.","data":{"status":404}`, "3": `"n":1`, "4": "problems/in-doubt", "5": "problems/in-doubt",
				})
			wantResponses(t, "again", post(batchOf(keyed("1", "denied", "a"), keyed("3", "pay", "d"), keyed("4", "cut", "e"), keyed("5", "gone-in_doubt", "f"))),
				map[string]string{"1": first, "3": `"n":1`, "4": "problems/in-doubt", "5": "problems/in-doubt"})
			wantResponses(t, "all in doubt", post(batchOf(keyed("4", "gone-in_doubt", "g"), keyed("5", "gone-in_doubt", "h"))), map[string]string{"4": "problems/in-doubt", "5": "problems/in-doubt"})
			if s.count("cut") != 1 || s.count("pay") != 1 || s.count("gone-in_doubt") != 3 || s.count("denied") != 4 {
				t.Errorf("%v", s.effect)
			}
		})
	}
}

// What our own steps refuse is refused for one call: the breaker, a key that is missing.
func TestBatchProblems(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, `agent_proxy %s {
		protocol mcp
		missing_id require
		breaker {
			consecutive 1
			cooldown 10h
			probe_prefer off
		}
	}`, addr)
	wantResponses(t, "one has no key", g.call(message(batchOf(toolCall("1", "pay", ""), keyed("2", "pay", "a")))),
		map[string]string{"1": "execution-id-missing", "2": `"n":1`})
	g.call(message(keyed("1", "cut", "c")))
	if now := circuit(t, addr); now.State != breaker.Open {
		t.Fatalf("%+v", now)
	}
	wantResponses(t, "the breaker is open", g.call(message(batchOf(keyed("1", "pay", "b"), keyed("2", "pay", "a"), keyed("3", "cut", "c")))),
		map[string]string{"1": "circuit-open", "2": `"n":1`, "3": "in-doubt"})
	if s.count("pay") != 1 || s.count("cut") != 1 {
		t.Errorf("%v", s.effect)
	}
}

// A batch stays one call by the word of its caller, and where nothing is certain.
func TestBatchStaysOneCall(t *testing.T) {
	s, addr := newSingles(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + addr + " {\n protocol mcp\n}"})
	const whole = `[{"jsonrpc":"2.0","id":1,"result":{"batch":true}}]`
	two := batchOf(toolCall("1", "pay", ""), toolCall("2", "pay", ""))
	one := func(what string, r request, status string) {
		t.Helper()
		got := g.call(r)
		if got.status != 200 || got.body != whole || got.header.Get("Execution-Status") != status {
			t.Errorf("%s: %d %v %s", what, got.status, got.header, got.body)
		}
	}
	one("a key", message(two, "Idempotency-Key", "k"), "executed")
	one("its retry", message(two, "Idempotency-Key", "k"), "replayed")
	one("a token", with(a.issue(ect.Claims{}), message(two)), "executed")
	one("with initialize", message(batchOf(initializes, toolCall("2", "pay", ""))), "executed")
	one("of more than 4 MiB", message(batchOf(toolCall("1", "pay", ""), toolCall("2", strings.Repeat("x", 4<<20), ""))), "executed")
	one("that changes nothing", message(batchOf(ping(1), ping(2))), "")
	before := len(s.seen)
	many := g.call(message(batchOf(slices.Repeat([]string{toolCall("1", "pay", "")}, 1001)...)))
	if many.problem(t, 413, "body-too-large"); !strings.Contains(many.body, "1001 messages; send at most 1000") || len(s.seen) != before {
		t.Errorf("%s", many.body)
	}
	if s.effect["pay"] != 0 {
		t.Errorf("%v", s.effect)
	}
}

// P1: with auto the request alone says whether a batch comes apart: the same before the server has shown that
// it speaks MCP, after that, after a reload that forgets it, and where the protocol is configured.
func TestBatchWithAuto(t *testing.T) {
	s, addr := newSingles(t)
	site := "agent_proxy " + addr + " {\n protocol %s\n breaker off\n}"
	g := start(t, site, "auto")
	bare := func(body string) request { // whose client names neither session nor version
		return hello(body, "Authorization", "Bearer a")
	}
	inSession := func(body string) request { return message(body, "Authorization", "Bearer a") }
	seen := map[string]map[string]string{}
	same := func(what string) {
		t.Helper()
		for form, of := range map[string]func(string) request{"bare": bare, "session": inSession} {
			got := responses(t, g.call(of(batchOf(keyed("1", "pay-"+form, "1"+form), keyed("2", "stream-"+form, "2"+form)))))
			if seen[form] == nil {
				seen[form] = got
			}
			if len(got) != 2 || got["1"] != seen[form]["1"] || got["2"] != seen[form]["2"] || s.count("pay-"+form) != 1 || s.count("stream-"+form) != 1 {
				t.Errorf("%s, %s: %v, %v", what, form, got, s.effect)
			}
		}
	}
	same("before a proof")
	g.call(hello(initializes, "Authorization", "Bearer a"))
	g.guardedAs("after a proof", bare(ping(1)), "")
	same("after a proof")
	g.reload(fmt.Sprintf(site, "auto"))
	g.reloads = true
	g.guardedAs("after a reload", bare(ping(1)), "executed")
	same("after a reload")
	for _, name := range []string{"mcp", "auto"} {
		g.reload(fmt.Sprintf(site, name))
		same("after a change to " + name)
	}
	wantResponses(t, "a message of another kind among them", g.call(asArray(batchOf(keyed("1", "pay-bare", "1bare"), `{"jsonrpc":"2.0","id":2,"method":"custom"}`), "Authorization", "Bearer a")),
		map[string]string{"1": `"n":1`, "2": "{"})

	// What names nobody's protocol may keep its order, or be data: it stays one call, with the same bytes.
	const whole = `[{"jsonrpc":"2.0","id":1,"result":{"batch":true}}]`
	for _, body := range []string{
		batchOf(`{"jsonrpc":"2.0","id":1,"method":"transfer"}`, `{"jsonrpc":"2.0","id":2,"method":"transfer"}`),
		batchOf(ping(1), ping(2)), batchOf(initializes, toolCall("2", "pay-bare", "")),
	} {
		g.call(bare(body)).want(t, 200, whole, "executed")
	}
	two := batchOf(keyed("1", "pay-bare", "1bare"), keyed("2", "pay-bare", "3"))
	g.call(message(two, "Idempotency-Key", "k")).want(t, 200, whole, "executed")
	g.call(message(two, "Idempotency-Key", "k")).want(t, 200, whole, "replayed")
	if s.count("pay-bare") != 1 {
		t.Errorf("%v", s.effect)
	}
}

// P1: a tool that its server has announced as read-only makes a batch no other call where the server has not
// shown anything: what is learned comes and goes.
func TestBatchOfReadOnlyToolsWithAuto(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, "agent_proxy %s {\n protocol auto\n}", addr)
	body := batchOf(keyed("1", "peek", "a"), keyed("2", "peek", "b"))
	as := func(credential, body string) request { return hello(body, "Authorization", credential) }
	wantResponses(t, "unknown", g.call(as("Bearer b", body)), map[string]string{"1": `"tool":"peek"`, "2": `"tool":"peek"`})
	g.call(as("Bearer a", initializes))
	g.call(as("Bearer a", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
	g.call(as("Bearer a", toolCall("3", "peek", ""))).want(t, 200, "{\n  \"jsonrpc\": \"2.0\", \"id\": 3,\n  \"result\": {\"tool\":\"peek\",\"n\":3}\n}\n", "")
	wantResponses(t, "known, but not of this client", g.call(as("Bearer b", body)), map[string]string{"1": `"tool":"peek"`, "2": `"tool":"peek"`})
	if s.count("peek") != 3 {
		t.Errorf("%v", s.effect)
	}
	const whole = `[{"jsonrpc":"2.0","id":1,"result":{"batch":true}}]`
	g.call(as("Bearer a", body)).want(t, 200, whole, "") // which passes
}

// Generic JSON-RPC is answered with an array, whatever its client accepts.
func TestBatchOfGenericCalls(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, "agent_proxy %s {\n protocol jsonrpc\n}", addr)
	call := func(id string, key string) string {
		return `{"jsonrpc":"2.0","id":` + id + `,"method":"transfer","params":{"name":"t","_meta":{"execution-id":"` + key + `"}}}`
	}
	for range 2 {
		got := g.call(message(batchOf(call("1", "a"), call(`"b"`, "b"))))
		wantResponses(t, "transfers", got, map[string]string{"1": `"tool":"t"`, `"b"`: `"tool":"t"`})
		if !strings.HasPrefix(got.body, "[") {
			t.Errorf("%v", got.header)
		}
	}
	if len(s.seen) != 2 {
		t.Errorf("%q", s.seen)
	}
}

// Each message has what the handlers before the guard have set, and variables, a path and a log of its own.
func TestBatchMessagesHaveRequestsOfTheirOwn(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, `route {
		vars tenant t1
		map {header.X-A} {mapped} {
			a one
			default two
		}
		handle_path /api/* {
			agent_guard {
				protocol mcp
				caller {vars.tenant}
			}
			reverse_proxy %s {
				transport agent_guard
				header_up X-Tenant {vars.tenant}
				header_up X-Mapped {mapped}
				header_up X-Path {http.request.uri.path}
				header_up X-Sent {http.request.orig_uri.path}
				header_up X-Call {http.agent_guard.execution_id}
			}
		}
	}`, addr)
	r := message(batchOf(ping(1), keyed("2", "pay", "a"), keyed("3", "stream", "b"), keyed("4", "pay", "c")), "X-A", "a")
	r.path = "/api/mcp"
	wantResponses(t, "all", g.call(r), map[string]string{"1": "{", "2": "{", "3": `"n":1`, "4": "{"})
	calls := map[string]string{}
	for i, h := range s.fields {
		calls[s.seen[i]] = h.Get("X-Call")
		if h.Get("X-Tenant") != "t1" || h.Get("X-Mapped") != "one" || h.Get("X-Path") != "/mcp" || h.Get("X-Sent") != "/api/mcp" {
			t.Errorf("%s: %v", s.seen[i], h)
		}
	}
	for id, key := range map[string]string{"2": "a", "4": "c"} {
		if got := calls[keyed(id, "pay", key)]; got != key {
			t.Errorf("the call %s was shown as %q", key, got)
		}
	}
}

// A reload in the middle: the calls of a batch go on, and the new configuration knows them.
func TestBatchOverAReload(t *testing.T) {
	s, addr := newSingles(t)
	site := "agent_proxy " + addr + " {\n protocol mcp\n}"
	g := start(t, "%s", site)
	hold := s.hold(t, "late")
	body := batchOf(keyed("1", "early", "a"), keyed("2", "late", "b"))
	first := g.begin(asArray(body))
	wait(t, hold.arrived, "the call")
	g.reload(site + "\n# anew")
	g.reloads = true
	retry := g.begin(asArray(body))
	followers(t, 1)
	hold.open()
	for _, p := range []*pending{first, retry} {
		wantResponses(t, "both", p.answer(), map[string]string{"1": `"n":1`, "2": `"n":1`})
	}
	if s.count("early") != 1 || s.count("late") != 1 {
		t.Errorf("%v", s.effect)
	}
}

// What could not be sent was not: the batch has the answer that each message would have, and can come again.
func TestBatchUnsent(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n breaker off\n}", freeAddress(t))
	body := batchOf(ping(1), keyed("2", "pay", "a"), keyed("3", "pay", "b"))
	for range 2 {
		if got := g.call(message(body)); got.status != 502 {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	g.reload("agent_proxy " + addr + " {\n protocol mcp\n breaker off\n}")
	if got := responses(t, g.call(message(body))); len(got) != 3 || s.count("pay") != 2 {
		t.Errorf("%v, %d effects", got, s.count("pay"))
	}
}

// P3: tokens and trace contexts in `_meta` are those of their message, also in a batch: each proves, hashes and
// is used up for one call, and names its workflow.
func TestBatchMessagesCarryTokens(t *testing.T) {
	for _, protocol := range []string{"mcp", "auto"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := newSingles(t)
			a := newAgent(t, "a")
			g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + addr + " {\n protocol " + protocol + "\n require_ect\n}"})
			call := func(id, tool string, token *ect.Token) string {
				return toolCall(id, tool, `,"_meta":{"execution-context":`+strconv.Quote(token.Raw())+`}`)
			}
			hash := func(tool string) *ect.Token {
				return a.issue(ect.Claims{Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"` + tool + `"}}`))})
			}
			one, two, hashed := a.issue(ect.Claims{}), a.issue(ect.Claims{}), hash("hashed")
			body := batchOf(call("1", "pay", one), call("2", "pay", two), call("3", "hashed", hashed), call("4", "other", hash("hashed")),
				toolCall("5", "bare", ""), call("6", "stranger", newAgent(t, "x").issue(ect.Claims{})), ping(7), call("8", "again", one))
			got := responses(t, g.call(asArray(body)))
			for id, want := range map[string]string{
				"3": `"n":1`, "4": `"reason":"inp_hash"`, "5": `"reason":"missing"`, "6": "/ect-invalid", "7": `"reason":"missing"`,
			} {
				if !strings.Contains(got[id], want) {
					t.Errorf("the response for %s is %s, want %s", id, got[id], want)
				}
			}
			// One token is good for one of two calls, whichever comes first.
			used, refused := got["1"], got["8"]
			if s.count("again") == 1 {
				used, refused = refused, used
			}
			if !strings.Contains(used, `"n":`) || !strings.Contains(refused, `"reason":"replayed"`) || !strings.Contains(got["2"], `"tool":"pay"`) {
				t.Errorf("%v", got)
			}
			if n := s.count("pay") + s.count("again"); n != 2 || s.count("hashed") != 1 || s.count("other")+s.count("bare")+s.count("stranger") != 0 {
				t.Errorf("%v", s.effect)
			}
			// A message that comes again, alone or in another batch, is known by its token.
			two2 := g.call(message(call("9", "pay", two)))
			if two2.header.Get("Execution-Status") != "replayed" {
				t.Errorf("alone: %v %s", two2.header, two2.body)
			}
			wantResponses(t, "in another batch", g.call(asArray(batchOf(call("1", "hashed", hashed), call("2", "fresh", a.issue(ect.Claims{}))))),
				map[string]string{"1": `"n":1`, "2": `"n":1`})
		})
	}
}

// The workflow of a message of a batch is that of its own trace context.
func TestBatchMessagesNameTheirWorkflow(t *testing.T) {
	s, addr := newSingles(t)
	g := start(t, "agent_proxy %s {\n protocol auto\n}", addr)
	trace := func(n int) string { return fmt.Sprintf("%032x", n) }
	of := func(n int) string {
		return toolCall(strconv.Itoa(n), fmt.Sprint("tool", n), fmt.Sprintf(`,"_meta":{"traceparent":"00-%s-%016x-01"}`, trace(n), n))
	}
	responses(t, g.call(asArray(batchOf(of(1), of(2), toolCall("3", "tool3", "")))))
	for i, body := range s.seen {
		want := ""
		for n := 1; n < 3; n++ {
			if strings.Contains(body, fmt.Sprint(`"tool`, n)) {
				want = trace(n)
			}
		}
		if got := s.fields[i].Get("Workflow-Id"); got != want {
			t.Errorf("%s has the workflow %q, want %q", body, got, want)
		}
	}
}
