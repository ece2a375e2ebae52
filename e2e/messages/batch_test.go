package messages

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

const initialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`

// P1: a batch with one message that may change something is the call of that message, under its key. All of the batch
// counts, since its recorded answer keeps its ids.
func TestBatchIsItsOneCall(t *testing.T) {
	for _, protocol := range []string{"mcp", "auto"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := harness.NewBatchServer(t)
			g := harness.Start(t, "agent_proxy %s {\n protocol "+protocol+"\n exempt tool get\n}", addr)
			body := harness.BatchOf(harness.Ping(1), initialized, harness.Keyed("2", "pay", "a"), harness.ToolCall("3", "get", ""))
			const answer = `[{"jsonrpc":"2.0","id":1,"result":{}},{"jsonrpc":"2.0","id":2,"result":{"content":[],"n":1}},{"jsonrpc":"2.0","id":3,"result":{"content":[],"n":1}}]`
			for _, status := range []string{"executed", "replayed"} {
				got := g.Call(harness.Message(body))
				if got.Want(t, 200, answer, status); got.Header.Get("Execution-Id") != "a" {
					t.Errorf("%s: %v", status, got.Header)
				}
			}
			g.Call(harness.Message(harness.BatchOf(harness.Ping(1), initialized, harness.Keyed("4", "pay", "a"), harness.ToolCall("3", "get", "")))).Problem(t, 422, "fingerprint-mismatch")
			if alone := g.Call(harness.Message(harness.Keyed("2", "pay", "a"))); !strings.Contains(alone.Body, "problems/fingerprint-mismatch") {
				t.Errorf("the message alone: %d %s", alone.Status, alone.Body)
			}
			if s.Count("pay") != 1 {
				t.Errorf("P1: %d effects", s.Count("pay"))
			}
			if protocol == "mcp" {
				g.GuardedAs("a batch that changes nothing", harness.Message(harness.BatchOf(harness.Ping(1), initialized)), "")
			}
		})
	}
}

// P1: a batch with several messages that may change something is refused, whatever names it. Nothing is sent, and no
// key is used.
func TestBatchMixed(t *testing.T) {
	for _, protocol := range []string{"mcp", "auto", "jsonrpc"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := harness.NewBatchServer(t)
			g := harness.Start(t, "agent_proxy %s {\n protocol "+protocol+"\n}", addr)
			two := harness.BatchOf(initialized, harness.Keyed("2", "pay", "a"), harness.Keyed("3", "pay", "b"))
			for _, r := range []harness.Request{harness.Message(two), harness.Message(two, "Idempotency-Key", "k")} {
				got := g.Call(r)
				got.Problem(t, 400, "batch-mixed")
			}
			if s.Seen != 0 {
				t.Errorf("%d messages were sent", s.Seen)
			}
			g.GuardedAs("one of them alone", harness.Message(harness.Keyed("2", "pay", "a")), "executed")
			g.GuardedAs("another call under the key", harness.Message(harness.ToolCall("2", "pay", ""), "Idempotency-Key", "k"), "executed")
		})
	}
}

// With auto an array of generic JSON-RPC may be data of its server: it is guarded as it is.
func TestBatchThatNobodyHasAnnounced(t *testing.T) {
	s, addr := harness.NewBatchServer(t)
	g := harness.Start(t, "agent_proxy %s", addr)
	transfer := func(id int) string { return fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"transfer"}`, id) }
	body := harness.Hello(harness.BatchOf(transfer(1), transfer(2)), "Idempotency-Key", "k")
	const answer = `[{"jsonrpc":"2.0","id":1,"result":{}},{"jsonrpc":"2.0","id":2,"result":{}}]`
	g.Call(body).Want(t, 200, answer, "executed")
	g.Call(body).Want(t, 200, answer, "replayed")
	g.Call(harness.Hello(harness.BatchOf(transfer(1), harness.ToolCall("2", "pay", "")))).Problem(t, 400, "batch-mixed")
	if s.Seen != 2 {
		t.Errorf("%d messages were sent", s.Seen)
	}
}

// P1: what a server has announced of its tools counts with its proof only, which a batch that comes again may lack.
func TestBatchOfReadOnlyToolsWithAuto(t *testing.T) {
	s, addr := harness.NewBatchServer(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol auto\n}", addr)
	body := harness.BatchOf(harness.Keyed("1", "get", "a"), harness.Keyed("2", "get", "b"))
	as := func(credential, body string) harness.Request { return harness.Hello(body, "Authorization", credential) }
	g.Call(as("Bearer b", body)).Problem(t, 400, "batch-mixed")
	g.Call(as("Bearer a", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
	g.Call(as("Bearer b", body)).Problem(t, 400, "batch-mixed")
	if s.Seen != 0 {
		t.Errorf("%d messages were sent", s.Seen)
	}
	g.GuardedAs("with a proof", as("Bearer a", body), "")
}

// P6: the answer to the call counts, wherever it stands in that to the batch.
func TestBatchMeansWhatItsCallIsAnswered(t *testing.T) {
	s, addr := harness.NewBatchServer(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n breaker off\n}", addr)
	post := func(tool string) harness.Reply {
		return g.Call(harness.Message(harness.BatchOf(harness.Ping(1), harness.Keyed("2", tool, tool), harness.Ping(3))))
	}
	for _, tool := range []string{"unknown", "cut", "fail", "stream"} {
		post(tool)
	}
	post("unknown")
	post("cut").Problem(t, 409, "in-doubt")
	for _, tool := range []string{"fail", "stream"} {
		if got := post(tool); got.Header.Get("Execution-Status") != "replayed" || !strings.Contains(got.Body, `"id":3`) {
			t.Errorf("%s: %d %v %s", tool, got.Status, got.Header, got.Body)
		}
	}
	for tool, want := range map[string]int{"unknown": 2, "cut": 1, "fail": 1, "stream": 1} { // -32601 precedes execution
		if s.Count(tool) != want {
			t.Errorf("%s: %d effects, want %d", tool, s.Count(tool), want)
		}
	}
}

// The action of a batch is that of its call: what undoes it reads that message, and the answer to it.
func TestBatchIsUndoneAsItsCall(t *testing.T) {
	s, addr := harness.NewBatchServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: `agent_proxy ` + addr + ` {
		protocol mcp
		action pay {
			match tool pay stream
			compensate POST /mcp {
				body application/json ` + "`" + `{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"refund","arguments":{{"n":{response.json./result/n},"of":"{request.json./params/name}"}}}}}}` + "`" + `
			}
		}
	}`})
	for i, tool := range []string{"pay", "stream"} {
		saga := g.Saga(a)
		made := saga.Do(harness.Message(harness.BatchOf(harness.Ping(7), harness.ToolCall("1", tool, ""), harness.Ping(8))))
		saga.Back(harness.RollbackBody{Checkpoint: made.Checkpoint, Reason: "wrong order"}).Want(t, "completed")
		if want := `{"n":1,"of":"` + tool + `"}`; len(s.Refunds) != i+1 || !strings.Contains(s.Refunds[i], want) {
			t.Errorf("%q, want %s", s.Refunds, want)
		}
	}
}

// P3: the tokens and the trace context of a batch are those of its call. Tokens of its other messages are not read.
func TestBatchCarriesTokensOfItsCall(t *testing.T) {
	s, addr := harness.NewBatchServer(t)
	a := harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + addr + " {\n protocol mcp\n require_ect\n}"})
	of := func(token *ect.Token) string {
		return `"_meta":{"execution-context":` + strconv.Quote(token.Raw()) + `}`
	}
	hashed := a.Issue(ect.Claims{Input: ect.Sum([]byte(`{"method":"tools/call","params":{"arguments":{},"name":"pay"}}`))})
	body := harness.Message(harness.BatchOf(harness.Ping(1), harness.ToolCall("2", "pay", ","+of(hashed))))
	for _, status := range []string{"executed", "replayed"} {
		g.GuardedAs("with its token", body, status)
	}
	other := g.Call(harness.Message(harness.BatchOf(`{"jsonrpc":"2.0","id":1,"method":"ping","params":{`+of(a.Issue(ect.Claims{}))+`}}`, harness.ToolCall("2", "pay", ""))))
	if !strings.Contains(other.Body, `"reason":"missing"`) || s.Count("pay") != 1 {
		t.Errorf("with the token of another message: %d %s, %d effects", other.Status, other.Body, s.Count("pay"))
	}
}
