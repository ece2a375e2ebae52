package e2e

import (
	"maps"
	"testing"
)

const toolsGuard = "e2e_leaves\nagent_proxy %s {\n protocol mcp\n missing_id recognize\n}"

// The cases that users have reported of other systems, as they would go with the guard in
// between. docs/comparison.md says what else is offered for them.

// https://github.com/stripe/ai/issues/402: the answer to a payment is lost, and the agent plans it
// anew, as another tool call in another session. Its credential is the same.
func TestReportedAgentPlansThePaymentAnew(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, toolsGuard, addr)
	first := message(toolCall("1", "pay", ""), "Authorization", "Bearer ada")
	g.lose(t, s, first)
	again := message(toolCall("7", "pay", ""), "Authorization", "Bearer ada", "Mcp-Session-Id", "b")
	if got := g.call(again); got.body != `{"jsonrpc":"2.0","id":7,"result":{"content":[],"n":1}}` || s.count("pay") != 1 {
		t.Errorf("%d payments, the agent is told %s", s.count("pay"), got.body)
	}
	// Another payment of that amount is one.
	if g.call(again); s.count("pay") != 2 {
		t.Errorf("%d payments, 2 are meant", s.count("pay"))
	}
}

// https://github.com/hostinger/api-mcp-server/issues/68: a server of tools sends the same POST to
// its API for each call of a tool, byte by byte and without a key. The guard stands before the API.
func TestReportedWriteToolsResend(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n missing_id recognize\n}", u.addr)
	u.on("/api/websites", executesAndDrops)
	for range 3 {
		g.call(bearer("/api/websites", "", `{"domain":"example.com"}`)).inDoubt(t)
	}
	u.arrived("/api/websites", 1)
}

// https://github.com/agentmail-to/agentmail-mcp/issues/49: the call has a key in its header, which
// the server of tools does not hand on. The guard stands before that server.
func TestReportedMailAfterATimeout(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, toolsGuard, addr)
	mail := message(toolCall(`"retry-1"`, "pay", ""), "Authorization", "Bearer ada", "Idempotency-Key", "retry-1")
	g.lose(t, s, mail)
	for range 2 {
		g.call(mail).want(t, 200, `{"jsonrpc":"2.0","id":"retry-1","result":{"content":[],"n":1}}`, "replayed")
	}
	if s.count("pay") != 1 {
		t.Errorf("%d mails", s.count("pay"))
	}
}

// https://github.com/Comfy-Org/comfy-python-sdk/pull/79: the connection breaks while a paid run
// goes on, and the SDK submits again under one key.
func TestReportedModelRunIsBilledOnce(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n}", u.addr)
	u.on("/v1/runs", held(hold))
	run := bearer("/v1/runs", "run-1", `{"model":"m"}`)
	g.cut(t, u, 1, run)
	retry := g.begin(run)
	followers(t, 1)
	hold.open()
	retry.answer().want(t, 201, "arrival 1", "attached")
	u.arrived("/v1/runs", 1)

	// As it was before that change: a key of its own for each attempt.
	g.reload("e2e_leaves\nagent_proxy " + u.addr + " {\n keys advisory\n}")
	again := newGate(t)
	u.on("/v1/runs", held(again))
	run.body, run.id = `{"model":"n"}`, "run-2"
	g.cut(t, u, 1, run)
	run.id = "run-3"
	retry = g.begin(run)
	followers(t, 1)
	again.open()
	retry.answer().want(t, 201, "arrival 2", "attached")
	u.arrived("/v1/runs", 2)
}

// https://github.com/square/square-mcp-server/issues/31: the model writes a new key for each attempt.
func TestReportedFreshKeyPerAttempt(t *testing.T) {
	s, addr := newToolServer(t)
	g := start(t, "e2e_leaves\nagent_proxy %s {\n protocol mcp\n keys advisory\n}", addr)
	pay := func(id, key string) request {
		return message(toolCall(id, "pay", `,"_meta":{"idempotency-key":"`+key+`"}`), "Authorization", "Bearer ada")
	}
	g.lose(t, s, pay("1", "first"))
	for _, id := range []string{"2", "3"} {
		got := g.call(pay(id, "second"))
		got.want(t, 200, `{"jsonrpc":"2.0","id":`+id+`,"result":{"content":[],"n":1}}`, "replayed")
		got.recognized(t)
	}
	if s.count("pay") != 1 {
		t.Errorf("%d payments", s.count("pay"))
	}
	// The first one was answered: a new key is the caller's word.
	if g.call(pay("4", "third")).itsOwn(t); s.count("pay") != 2 {
		t.Errorf("%d payments, 2 are meant", s.count("pay"))
	}
}

// lose makes a call of a tool whose client leaves while it runs, and waits until it has run.
func (g *gateway) lose(t *testing.T, s *toolServer, r request) {
	t.Helper()
	hold, known := newGate(t), left.Load()
	hold.on(s)
	r.client, r.header = g.client, maps.Clone(r.header)
	r.header[leaver] = "yes"
	leave := g.leaving(r)
	wait(t, hold.arrived, "the call of the tool")
	leave()
	eventually(t, "the gateway knows that the client has left", func() bool { return left.Load() == known+1 })
	(*gate)(nil).on(s)
	hold.open()
	idle(t)
}

// on holds the calls of a server's tools; a nil gate holds none.
func (g *gate) on(s *toolServer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold = g
}
