package e2e

import (
	"encoding/hex"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// otherNode is a second node on the store of a gateway.
type otherNode struct {
	*execution.Guard
	t *testing.T
}

// openBeside opens a gateway's store as another node, before the gateway does, which
// takes another name then.
func openBeside(t *testing.T, st store.Store, keyFile string) *otherNode {
	t.Helper()
	ring, err := seal.Load(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := execution.Open(t.Context(), st, ring)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Commit(t.Context(), store.Write{Key: []byte("mnode"), Value: []byte("node-of-the-gateway")}); err != nil {
		t.Fatal(err)
	}
	return &otherNode{other, t}
}

// run begins a call to /x of the caller with these credentials.
func (n *otherNode) run(id, host, credentials string) *execution.Execution {
	n.t.Helper()
	hash := n.Caller(credentials)
	c := execution.Call{
		Scope: execution.Scope{Caller: "credential:" + hex.EncodeToString(hash[:]), Guard: "default", Method: "POST", Path: "/x", ID: id},
		Host:  host, Action: "default", Deadline: time.Minute, KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 1 << 20,
	}
	c.Key = n.Key(c.Scope)
	e, err := n.Claim(n.t.Context(), &c, execution.Finding{})
	if err != nil {
		n.t.Fatal(err)
	}
	return e
}

// Section "Endpoints": what runs on another node is shown and waited for as well; its
// answer can be had once it is whole.
func TestExecutionsOfAnotherNode(t *testing.T) {
	const site, annsKey = "agent_proxy 127.0.0.1:1", "X-Api-Key=3:ann;"
	g := launch(t, setup{site: site}) // makes the key
	stop(t)
	node := openBeside(t, g.store.memory, g.store.path+".key")
	g = launch(t, setup{site: site, store: g.store})
	ask := func(what string) request {
		r := asking(what, ann)
		r.host = "site.example"
		return r
	}
	e := node.run("k", "site.example", annsKey)
	if got := g.call(ask("k")).execution(t, "k"); got.State != "running" {
		t.Fatalf("%+v", got)
	}
	g.call(ask("k/output")).retryable(t, 409, "in-progress")
	if got := g.call(ask("k?wait=20ms")).execution(t, "k"); got.State != "running" {
		t.Errorf("%+v", got)
	}
	g.call(ask("k/output?wait=20ms")).retryable(t, 409, "in-progress")

	state, output := g.begin(ask("k?wait=60s")), g.begin(ask("k/output?wait=60s"))
	awaited(t, 2)
	e.Recording().Start(201, map[string][]string{"Content-Type": {"text/plain"}})
	e.Write([]byte("done there"))
	if err := e.Settle(t.Context(), execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true}); err != nil {
		t.Fatal(err)
	}
	if got := state.answer().execution(t, "k"); got.State != "completed" || got.Status != 201 {
		t.Errorf("%+v", got)
	}
	output.answer().want(t, 201, "done there", "replayed")

	e = node.run("doubt", "site.example", annsKey)
	output = g.begin(ask("doubt/output?wait=60s"))
	awaited(t, 1)
	if err := e.Settle(t.Context(), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}); err != nil {
		t.Fatal(err)
	}
	output.answer().terminal(t, 409, "in-doubt")
}
