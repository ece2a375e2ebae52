package e2e

import (
	"net/http"
	"testing"
)

// P6: whether a call was refused is the upstream's own word. What a handler on the way has
// put in the place of its answer says nothing: the call is compensated.
func TestRollbackOfAReplacedAnswer(t *testing.T) {
	a := newAgent(t, "a")
	const compensated = "action charge {\n match path /charges\n compensate POST /refunds {\n json charge {request.json./id}\n }\n }\n"
	for name, options := range map[string]string{
		"replace_status":  "@ok status 201\n replace_status @ok 422",
		"a refusal":       "@ok status 201\n replace_status @ok 429",
		"handle_response": "@ok status 201\n handle_response @ok {\n respond \"no\" 422\n }",
	} {
		t.Run(name, func(t *testing.T) {
			lab, g := launchLab(t, compensated+options, a)
			s := g.saga(a).in(t)
			step := s.try(request{path: "/charges", body: `{"id":"ch_1","amount":7}`})
			if step.status/100 != 4 {
				t.Fatalf("%d %s", step.status, step.body)
			}
			lab.wantCharge("ch_1", "open")
			s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
			lab.wantCharge("ch_1", "refunded")
			stop(t)
		})
	}
}

// A refusal of the upstream stays one, whatever a handler makes of it.
func TestRollbackOfAReplacedRefusal(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions+"\n@no status 422\n replace_status @no 200", a)
	lab.on("POST /charges", 1, restSays(http.StatusUnprocessableEntity, `{"error":"declined"}`))
	s := g.saga(a)
	step := s.do(charge(7))
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
	lab.arrived("POST /refunds", 0)
}

// Where another handler than a proxy answers, nobody says that nothing was done.
func TestRollbackOfAnAnswerWithoutAnUpstream(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	g := launch(t, setup{app: trusting(t, a), site: "route {\n agent_guard {\n action charge {\n match path /charges\n compensate POST /refunds {\n json charge ch_1\n }\n }\n" +
		"upstream {\n reverse_proxy " + lab.addr + " {\n transport agent_guard\n }\n }\n }\n respond 422\n }"})
	lab.charges["ch_1"] = &restCharge{ID: "ch_1", State: "open"}
	s := g.saga(a)
	step := s.try(charge(7))
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
	lab.wantCharge("ch_1", "refunded")
}
