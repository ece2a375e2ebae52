package rollback

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P6: whether a call was refused is the upstream's own word. What a handler on the way has
// put in the place of its answer says nothing: the call is compensated.
func TestRollbackOfAReplacedAnswer(t *testing.T) {
	a := harness.NewAgent(t, "a")
	const compensated = "action charge {\n match path /charges\n compensate POST /refunds {\n json charge {request.json./id}\n }\n }\n"
	for name, options := range map[string]string{
		"replace_status":  "@ok status 201\n replace_status @ok 422",
		"a refusal":       "@ok status 201\n replace_status @ok 429",
		"handle_response": "@ok status 201\n handle_response @ok {\n respond \"no\" 422\n }",
	} {
		t.Run(name, func(t *testing.T) {
			lab, g := harness.LaunchLab(t, compensated+options, a)
			s := g.Saga(a).In(t)
			step := s.Try(harness.Request{Path: "/charges", Body: `{"id":"ch_1","amount":7}`})
			if step.Status/100 != 4 {
				t.Fatalf("%d %s", step.Status, step.Body)
			}
			lab.WantCharge("ch_1", "open")
			s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint}).Want(t, "completed")
			lab.WantCharge("ch_1", "refunded")
			harness.Stop(t)
		})
	}
}

// A refusal of the upstream stays one, whatever a handler makes of it.
func TestRollbackOfAReplacedRefusal(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions+"\n@no status 422\n replace_status @no 200", a)
	lab.On("POST /charges", 1, harness.RestSays(http.StatusUnprocessableEntity, `{"error":"declined"}`))
	s := g.Saga(a)
	step := s.Do(harness.Charge(7))
	s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint}).Want(t, "completed")
	lab.Arrived("POST /refunds", 0)
}

// Where another handler than a proxy answers, nobody says that nothing was done.
func TestRollbackOfAnAnswerWithoutAnUpstream(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "route {\n agent_guard {\n action charge {\n match path /charges\n compensate POST /refunds {\n json charge ch_1\n }\n }\n" +
		"upstream {\n reverse_proxy " + lab.Addr + " {\n transport agent_guard\n }\n }\n }\n respond 422\n }"})
	lab.Charges["ch_1"] = &harness.RestCharge{ID: "ch_1", State: "open"}
	s := g.Saga(a)
	step := s.Try(harness.Charge(7))
	s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint}).Want(t, "completed")
	lab.WantCharge("ch_1", "refunded")
}
