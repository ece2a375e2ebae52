package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// newBatchServer is a tool server that takes arrays of messages too. Its answer to one is an array, or a stream of
// events if that to one of the messages is.
func newBatchServer(t *testing.T) (*toolServer, string) {
	s := &toolServer{calls: map[string]int{}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what is cut fits no case
		w.Header().Set("Content-Type", "application/json")
		var messages []json.RawMessage
		if json.Unmarshal(body, &messages) != nil {
			messages = []json.RawMessage{body}
		}
		if strings.Contains(string(body), `"tools/list"`) { // which proves the protocol
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"get","inputSchema":{},"annotations":{"readOnlyHint":true}}]}}`)
			return
		}
		var answers []string
		stream := ""
		for _, m := range messages {
			one := r.Clone(r.Context())
			one.Body = io.NopCloser(bytes.NewReader(m))
			to := httptest.NewRecorder()
			s.ServeHTTP(to, one)
			if to.Header().Get("Content-Type") == "text/event-stream" {
				stream = to.Body.String()
			} else if to.Body.Len() > 0 {
				answers = append(answers, to.Body.String())
			}
		}
		switch {
		case stream != "":
			w.Header().Set("Content-Type", "text/event-stream")
			for _, text := range answers {
				_, _ = io.WriteString(w, "data: "+text+"\n\n")
			}
			_, _ = io.WriteString(w, stream)
		case body[0] == '[':
			_, _ = io.WriteString(w, batchOf(answers...))
		default:
			_, _ = io.WriteString(w, strings.Join(answers, ""))
		}
	}))
	t.Cleanup(server.Close)
	return s, strings.TrimPrefix(server.URL, "http://")
}

func batchOf(messages ...string) string { return "[" + strings.Join(messages, ",") + "]" }

// keyed is the call of a tool with a key.
func keyed(id, tool, key string) string {
	return toolCall(id, tool, `,"_meta":{"execution-id":"`+key+`"}`)
}

const initialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`

// P1: a batch with one message that may change something is the call of that message, under its key. All of the batch
// counts, since its recorded answer keeps its ids.
func TestBatchIsItsOneCall(t *testing.T) {
	for _, protocol := range []string{"mcp", "auto"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := newBatchServer(t)
			g := start(t, "agent_proxy %s {\n protocol "+protocol+"\n exempt tool get\n}", addr)
			body := batchOf(ping(1), initialized, keyed("2", "pay", "a"), toolCall("3", "get", ""))
			const answer = `[{"jsonrpc":"2.0","id":1,"result":{}},{"jsonrpc":"2.0","id":2,"result":{"content":[],"n":1}},{"jsonrpc":"2.0","id":3,"result":{"content":[],"n":1}}]`
			for _, status := range []string{"executed", "replayed"} {
				got := g.call(message(body))
				if got.want(t, 200, answer, status); got.header.Get("Execution-Id") != "a" {
					t.Errorf("%s: %v", status, got.header)
				}
			}
			g.call(message(batchOf(ping(1), initialized, keyed("4", "pay", "a"), toolCall("3", "get", "")))).problem(t, 422, "fingerprint-mismatch")
			if alone := g.call(message(keyed("2", "pay", "a"))); !strings.Contains(alone.body, "problems/fingerprint-mismatch") {
				t.Errorf("the message alone: %d %s", alone.status, alone.body)
			}
			if s.count("pay") != 1 {
				t.Errorf("P1: %d effects", s.count("pay"))
			}
			if protocol == "mcp" {
				g.guardedAs("a batch that changes nothing", message(batchOf(ping(1), initialized)), "")
			}
		})
	}
}

// P1: a batch with several messages that may change something is refused, whatever names it. Nothing is sent, and no
// key is used.
func TestBatchMixed(t *testing.T) {
	for _, protocol := range []string{"mcp", "auto", "jsonrpc"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := newBatchServer(t)
			g := start(t, "agent_proxy %s {\n protocol "+protocol+"\n}", addr)
			two := batchOf(initialized, keyed("2", "pay", "a"), keyed("3", "pay", "b"))
			for _, r := range []request{message(two), message(two, "Idempotency-Key", "k")} {
				got := g.call(r)
				got.problem(t, 400, "batch-mixed")
			}
			if s.seen != 0 {
				t.Errorf("%d messages were sent", s.seen)
			}
			g.guardedAs("one of them alone", message(keyed("2", "pay", "a")), "executed")
			g.guardedAs("another call under the key", message(toolCall("2", "pay", ""), "Idempotency-Key", "k"), "executed")
		})
	}
}

// With auto an array of generic JSON-RPC may be data of its server: it is guarded as it is.
func TestBatchThatNobodyHasAnnounced(t *testing.T) {
	s, addr := newBatchServer(t)
	g := start(t, "agent_proxy %s", addr)
	transfer := func(id int) string { return fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"transfer"}`, id) }
	body := hello(batchOf(transfer(1), transfer(2)), "Idempotency-Key", "k")
	const answer = `[{"jsonrpc":"2.0","id":1,"result":{}},{"jsonrpc":"2.0","id":2,"result":{}}]`
	g.call(body).want(t, 200, answer, "executed")
	g.call(body).want(t, 200, answer, "replayed")
	g.call(hello(batchOf(transfer(1), toolCall("2", "pay", "")))).problem(t, 400, "batch-mixed")
	if s.seen != 2 {
		t.Errorf("%d messages were sent", s.seen)
	}
}

// P1: what a server has announced of its tools counts with its proof only, which a batch that comes again may lack.
func TestBatchOfReadOnlyToolsWithAuto(t *testing.T) {
	s, addr := newBatchServer(t)
	g := start(t, "agent_proxy %s {\n protocol auto\n}", addr)
	body := batchOf(keyed("1", "get", "a"), keyed("2", "get", "b"))
	as := func(credential, body string) request { return hello(body, "Authorization", credential) }
	g.call(as("Bearer b", body)).problem(t, 400, "batch-mixed")
	g.call(as("Bearer a", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
	g.call(as("Bearer b", body)).problem(t, 400, "batch-mixed")
	if s.seen != 0 {
		t.Errorf("%d messages were sent", s.seen)
	}
	g.guardedAs("with a proof", as("Bearer a", body), "")
}

// P6: the answer to the call counts, wherever it stands in that to the batch.
func TestBatchMeansWhatItsCallIsAnswered(t *testing.T) {
	s, addr := newBatchServer(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n breaker off\n}", addr)
	post := func(tool string) reply { return g.call(message(batchOf(ping(1), keyed("2", tool, tool), ping(3)))) }
	for _, tool := range []string{"unknown", "cut", "fail", "stream"} {
		post(tool)
	}
	post("unknown")
	post("cut").problem(t, 409, "in-doubt")
	for _, tool := range []string{"fail", "stream"} {
		if got := post(tool); got.header.Get("Execution-Status") != "replayed" || !strings.Contains(got.body, `"id":3`) {
			t.Errorf("%s: %d %v %s", tool, got.status, got.header, got.body)
		}
	}
	for tool, want := range map[string]int{"unknown": 2, "cut": 1, "fail": 1, "stream": 1} { // -32601 precedes execution
		if s.count(tool) != want {
			t.Errorf("%s: %d effects, want %d", tool, s.count(tool), want)
		}
	}
}

// The action of a batch is that of its call: what undoes it reads that message, and the answer to it.
func TestBatchIsUndoneAsItsCall(t *testing.T) {
	s, addr := newBatchServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: `agent_proxy ` + addr + ` {
		protocol mcp
		action pay {
			match tool pay stream
			compensate POST /mcp {
				body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{"n":{response.json./result/n},"of":"{request.json./params/name}"}}}}}}` + "`" + `
			}
		}
	}`})
	for i, tool := range []string{"pay", "stream"} {
		saga := g.saga(a)
		made := saga.do(message(batchOf(ping(7), toolCall("1", tool, ""), ping(8))))
		saga.back(rollbackBody{Checkpoint: made.checkpoint, Reason: "wrong order"}).want(t, "completed")
		if want := `{"n":1,"of":"` + tool + `"}`; len(s.refunds) != i+1 || !strings.Contains(s.refunds[i], want) {
			t.Errorf("%q, want %s", s.refunds, want)
		}
	}
}

// P3: the tokens and the trace context of a batch are those of its call. Tokens of its other messages are not read.
func TestBatchCarriesTokensOfItsCall(t *testing.T) {
	s, addr := newBatchServer(t)
	a := newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + addr + " {\n protocol mcp\n require_ect\n}"})
	of := func(token *ect.Token) string {
		return `"_meta":{"execution-context":` + strconv.Quote(token.Raw()) + `}`
	}
	hashed := a.issue(ect.Claims{Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"pay"}}`))})
	body := message(batchOf(ping(1), toolCall("2", "pay", ","+of(hashed))))
	for _, status := range []string{"executed", "replayed"} {
		g.guardedAs("with its token", body, status)
	}
	other := g.call(message(batchOf(`{"jsonrpc":"2.0","id":1,"method":"ping","params":{`+of(a.issue(ect.Claims{}))+`}}`, toolCall("2", "pay", ""))))
	if !strings.Contains(other.body, `"reason":"missing"`) || s.count("pay") != 1 {
		t.Errorf("with the token of another message: %d %s, %d effects", other.status, other.body, s.count("pay"))
	}
}
