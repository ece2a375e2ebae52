package e2e

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The agent that was called is asked to undo
// it, in the form of cascade, Figure 10, with a token of the gateway's.
func TestRollbackDelegates(t *testing.T) {
	a, lab := newAgent(t, "a"), newRestLab(t)
	g := launch(t, setup{app: trusting(t, a), site: fmt.Sprintf(`agent_proxy %s {
		action monitor {
			match path /agents/monitor
			delegate http://%[1]s/agents/monitor/rollback unsigned
		}
	}`, lab.addr)})
	for name, c := range map[string]struct {
		script         func(*restCall)
		status, reason string
		undone         int
	}{
		"completed":               {(*restCall).usual, "completed", "", 1},
		"it says that it has not": {restSays(200, `{"status":"failed"}`), "failed", "refused", 0},
		"in ATD's words":          {restSays(200, `{"exec_act":"atd:rollback_result","ext":{"atd.status":"failed"}}`), "failed", "refused", 0},
		"in AERR's words":         {restSays(200, `{"exec_act":"aerr:rollback_escalated","ext":{"aerr.status":"escalated"}}`), "escalated", "escalated", 0},
		"a part":                  {restSays(200, `{"status":"partial"}`), "partial", "partial", 0},
		"a page":                  {restSays(200, `<html>Welcome</html>`), "escalated", "unexpected", 0},
		"it has failed":           {restSays(409, ""), "failed", "refused", 0},
		"it knows nothing":        {restSays(410, ""), "completed", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			before := lab.effectsOn("undone", "/agents/monitor")
			s := g.saga(a).in(t)
			step := s.do(request{path: "/agents/monitor"})
			lab.on("POST /agents/monitor/rollback", 1, c.script)
			doc := s.back(rollbackBody{Checkpoint: step.checkpoint, Reason: "wrong peer"})
			if c.reason == "" {
				doc.want(t, c.status)
			} else {
				doc.want(t, c.status, c.reason)
			}
			if got := lab.effectsOn("undone", "/agents/monitor") - before; got != c.undone {
				t.Errorf("it has undone %d, want %d", got, c.undone)
			}
			asked := lab.all("POST /agents/monitor/rollback", step.checkpoint)
			if len(asked) != 1 {
				t.Fatalf("it was asked %d times", len(asked))
			}
			var body rollbackBody
			if err := json.Unmarshal([]byte(asked[0].body), &body); err != nil || body.Phase != "execute" || body.ID != doc.ID || body.Reason != "wrong peer" {
				t.Errorf("%s", asked[0].body)
			}
			token, err := ect.ParseInsecure(asked[0].header.Get(ect.FieldName))
			if err != nil || token.Issuer() != gatewayIdentity || token.Workflow() != s.wid {
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
