package rollback

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The agent that was called is asked to undo
// it, in the form of cascade, Figure 10, with a token of the gateway's.
func TestRollbackDelegates(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: fmt.Sprintf(`agent_proxy %s {
		action monitor {
			match path /agents/monitor
			delegate http://%[1]s/agents/monitor/rollback unsigned
		}
	}`, lab.Addr)})
	for name, c := range map[string]struct {
		script         func(*harness.RestCall)
		status, reason string
		undone         int
	}{
		"completed":               {(*harness.RestCall).Usual, "completed", "", 1},
		"it says that it has not": {harness.RestSays(200, `{"status":"failed"}`), "failed", "refused", 0},
		"in ATD's words":          {harness.RestSays(200, `{"exec_act":"atd:rollback_result","ext":{"atd.status":"failed"}}`), "failed", "refused", 0},
		"in AERR's words":         {harness.RestSays(200, `{"exec_act":"aerr:rollback_escalated","ext":{"aerr.status":"escalated"}}`), "escalated", "escalated", 0},
		"a part":                  {harness.RestSays(200, `{"status":"partial"}`), "partial", "partial", 0},
		"a page":                  {harness.RestSays(200, `<html>Welcome</html>`), "escalated", "unexpected", 0},
		"it has failed":           {harness.RestSays(409, ""), "failed", "refused", 0},
		"it knows nothing":        {harness.RestSays(410, ""), "completed", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			before := lab.EffectsOn("undone", "/agents/monitor")
			s := g.Saga(a).In(t)
			step := s.Do(harness.Request{Path: "/agents/monitor"})
			lab.On("POST /agents/monitor/rollback", 1, c.script)
			doc := s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint, Reason: "wrong peer"})
			if c.reason == "" {
				doc.Want(t, c.status)
			} else {
				doc.Want(t, c.status, c.reason)
			}
			if got := lab.EffectsOn("undone", "/agents/monitor") - before; got != c.undone {
				t.Errorf("it has undone %d, want %d", got, c.undone)
			}
			asked := lab.All("POST /agents/monitor/rollback", step.Checkpoint)
			if len(asked) != 1 {
				t.Fatalf("it was asked %d times", len(asked))
			}
			var body harness.RollbackBody
			if err := json.Unmarshal([]byte(asked[0].Body), &body); err != nil || body.Phase != "execute" || body.ID != doc.ID || body.Reason != "wrong peer" {
				t.Errorf("%s", asked[0].Body)
			}
			token, err := ect.ParseInsecure(asked[0].Header.Get(ect.FieldName))
			if err != nil || token.Issuer() != harness.GatewayIdentity || token.Workflow() != s.Wid {
				t.Fatalf("the agent was asked with %v (%v)", token, err)
			}
			// Body and token say the same, so that a gateway like this one takes them.
			id, _ := token.Ext().Text(ect.MemberRollbackID)
			point, _ := token.Ext().Text(ect.MemberCheckpointID)
			reason, _ := token.Ext().Text(ect.MemberReason)
			if cascade, _ := token.Ext().Bool(ect.MemberCascade); id != body.ID || point != body.Checkpoint || reason != body.Reason || cascade != body.Cascade {
				t.Errorf("%s, and in the body %+v", token.Payload(), body)
			}
		})
	}
}
