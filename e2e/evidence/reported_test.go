package evidence

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

const toolsGuard = "e2e_leaves\nagent_proxy %s {\n protocol mcp\n missing_id recognize\n}"

// The cases that users have reported of other systems, as they would go with the guard in
// between. docs/comparison.md says what else is offered for them.

// https://github.com/stripe/ai/issues/402: the answer to a payment is lost, and the agent plans it
// anew, as another tool call in another session. Its credential is the same.
func TestReportedAgentPlansThePaymentAnew(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, toolsGuard, addr)
	first := harness.Message(harness.ToolCall("1", "pay", ""), "Authorization", "Bearer ada")
	g.Lose(t, s, first)
	again := harness.Message(harness.ToolCall("7", "pay", ""), "Authorization", "Bearer ada", "Mcp-Session-Id", "b")
	if got := g.Call(again); got.Body != `{"jsonrpc":"2.0","id":7,"result":{"content":[],"n":1}}` || s.Count("pay") != 1 {
		t.Errorf("%d payments, the agent is told %s", s.Count("pay"), got.Body)
	}
	// Another payment of that amount is one.
	if g.Call(again); s.Count("pay") != 2 {
		t.Errorf("%d payments, 2 are meant", s.Count("pay"))
	}
}

// https://github.com/hostinger/api-mcp-server/issues/68: a server of tools sends the same POST to
// its API for each call of a tool, byte by byte and without a key. The guard stands before the API.
func TestReportedWriteToolsResend(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n missing_id recognize\n}", u.Addr)
	u.On("/api/websites", harness.ExecutesAndDrops)
	for range 3 {
		g.Call(harness.Bearer("/api/websites", "", `{"domain":"example.com"}`)).InDoubt(t)
	}
	u.Arrived("/api/websites", 1)
}

// https://github.com/agentmail-to/agentmail-mcp/issues/49: the call has a key in its header, which
// the server of tools does not hand on. The guard stands before that server.
func TestReportedMailAfterATimeout(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, toolsGuard, addr)
	mail := harness.Message(harness.ToolCall(`"retry-1"`, "pay", ""), "Authorization", "Bearer ada", "Idempotency-Key", "retry-1")
	g.Lose(t, s, mail)
	for range 2 {
		g.Call(mail).Want(t, 200, `{"jsonrpc":"2.0","id":"retry-1","result":{"content":[],"n":1}}`, "replayed")
	}
	if s.Count("pay") != 1 {
		t.Errorf("%d mails", s.Count("pay"))
	}
}

// https://github.com/Comfy-Org/comfy-python-sdk/pull/79: the connection breaks while a paid run
// goes on, and the SDK submits again under one key.
func TestReportedModelRunIsBilledOnce(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n}", u.Addr)
	u.On("/v1/runs", harness.Held(hold))
	run := harness.Bearer("/v1/runs", "run-1", `{"model":"m"}`)
	g.Cut(t, u, 1, run)
	retry := g.Begin(run)
	harness.Followers(t, 1)
	hold.Open()
	retry.Answer().Want(t, 201, "arrival 1", "attached")
	u.Arrived("/v1/runs", 1)

	// As it was before that change: a key of its own for each attempt.
	g.Reload("e2e_leaves\nagent_proxy " + u.Addr + " {\n keys advisory\n}")
	again := harness.NewGate(t)
	u.On("/v1/runs", harness.Held(again))
	run.Body, run.Id = `{"model":"n"}`, "run-2"
	g.Cut(t, u, 1, run)
	run.Id = "run-3"
	retry = g.Begin(run)
	harness.Followers(t, 1)
	again.Open()
	retry.Answer().Want(t, 201, "arrival 2", "attached")
	u.Arrived("/v1/runs", 2)
}

// https://github.com/square/square-mcp-server/issues/31: the model writes a new key for each attempt.
func TestReportedFreshKeyPerAttempt(t *testing.T) {
	s, addr := harness.NewToolServer(t)
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n protocol mcp\n keys advisory\n}", addr)
	pay := func(id, key string) harness.Request {
		return harness.Message(harness.ToolCall(id, "pay", `,"_meta":{"idempotency-key":"`+key+`"}`), "Authorization", "Bearer ada")
	}
	g.Lose(t, s, pay("1", "first"))
	for _, id := range []string{"2", "3"} {
		got := g.Call(pay(id, "second"))
		got.Want(t, 200, `{"jsonrpc":"2.0","id":`+id+`,"result":{"content":[],"n":1}}`, "replayed")
		got.Recognized(t)
	}
	if s.Count("pay") != 1 {
		t.Errorf("%d payments", s.Count("pay"))
	}
	// The first one was answered: a new key is the caller's word.
	if g.Call(pay("4", "third")).ItsOwn(t); s.Count("pay") != 2 {
		t.Errorf("%d payments, 2 are meant", s.Count("pay"))
	}
}
