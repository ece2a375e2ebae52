//go:build unix

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// holding is a message of a coordinator to a participant: by whom, of which workflow.
func holding(by *agent, wid, to string, hold map[string]any) request {
	text, err := json.Marshal(hold)
	if err != nil {
		by.t.Fatal(err)
	}
	token := by.issue(ect.Claims{Audience: []string{to}, Workflow: wid, Action: "escalation", Input: ect.Sum(text)})
	r := with(token, request{path: "/.well-known/cascade/workflows/" + wid + "/holds", body: string(text)})
	r.header["Content-Type"] = "application/json"
	return r
}

// holdsView is what the workflow's page says of its participants.
type holdsView struct {
	Holds []struct {
		Escalation   string `json:"escalation_id"`
		Level, State string
		Participants []struct {
			Agent, State, Confirmed, Reason string
			Since                           time.Time `json:"unreachable_since"`
		}
	}
}

func (s *saga) holds() holdsView {
	s.t.Helper()
	token := s.a.issue(ect.Claims{Workflow: s.wid}).Raw()
	got := s.g.call(request{method: "GET", path: "/.well-known/cascade/workflows/" + s.wid, header: headers{ect.FieldName: token}})
	if got.status != http.StatusOK {
		s.t.Fatalf("%d %s", got.status, got.body)
	}
	return document[holdsView](s.t, got)
}

// tried is what comes of a call at the gateway at a place.
func (c *star) tried(n int, wid string) reply {
	c.t.Helper()
	s := *c.saga
	s.g = c.sites[n].gateway(c.t)
	return s.g.call(with(s.a.issue(ect.Claims{Audience: []string{starIdentity(n)}, Workflow: wid}), charge(9)))
}

// ATD "Interaction with HITL": a rollback that has undone a part pauses its workflow at the coordinator
// and at all that took part, and a person's approval resumes it at all. One that is down meanwhile is
// told when it is back, also by a coordinator that was killed in between. The workflow's page says who
// has confirmed what. Other workflows go on.
func TestProcessPauseReachesParticipants(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStar(t, "rollback {\n partial allow\n prepare_timeout 2s\n }")
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	c.running[2].kill()
	done := s.back(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"})
	if done.Status != "partial" {
		t.Fatalf("%+v", done)
	}
	eventually(t, "it is paused at a participant", func() bool {
		got := c.tried(1, s.wid)
		return got.status == http.StatusConflict && strings.Contains(got.body, "workflow-paused") && strings.Contains(got.body, "escalation_id")
	})
	if got := c.tried(1, uuid.NewString()); got.status != http.StatusCreated {
		t.Errorf("another workflow: %d %s", got.status, got.body)
	}
	eventually(t, "the page says who has not confirmed", func() bool {
		seen := s.holds().Holds
		return len(seen) == 1 && seen[0].State == "held" && len(seen[0].Participants) == 2 &&
			strings.Contains(fmt.Sprint(seen), "unreachable") && strings.Contains(fmt.Sprint(seen), "held held")
	})
	c.running[0].kill()
	c.start(0)
	c.start(2)
	eventually(t, "it is paused at the one that was down", func() bool { return c.tried(2, s.wid).status == http.StatusConflict })
	held := s.holds().Holds
	if len(held) != 1 {
		t.Fatalf("%+v", held)
	}
	c.running[2].kill()
	c.sites[0].decides(t, "approve", held[0].Escalation)
	c.running[0].kill()
	c.start(0)
	eventually(t, "it is resumed at a participant", func() bool { return c.tried(1, s.wid).status == http.StatusCreated })
	c.start(2)
	eventually(t, "it is resumed at the one that was down", func() bool { return c.tried(2, s.wid).status == http.StatusCreated })
	eventually(t, "all have confirmed", func() bool {
		seen := s.holds().Holds
		return len(seen) == 1 && seen[0].State == "lifted" && strings.Count(fmt.Sprint(seen), "lifted lifted") == 2
	})
}

// C-4.1.3: a rollback of the whole workflow stops it at every configured participant, those too that have
// nothing of it, and one that is down when it is back, over kills of the coordinator; for good.
func TestProcessStopReachesAll(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newAskingStar(t)
	s := c.saga
	root := s.do(charge(1))
	c.running[2].kill()
	s.back(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "full_workflow"})
	stopped := func(n int) func() bool {
		return func() bool {
			got := c.tried(n, s.wid)
			return got.status == http.StatusForbidden && strings.Contains(got.body, "workflow-stopped")
		}
	}
	eventually(t, "it is stopped at a participant", stopped(1))
	c.running[0].kill()
	c.start(0)
	c.start(2)
	eventually(t, "it is stopped at the one that was down", stopped(2))
	c.running[1].kill()
	c.start(1)
	if !stopped(1)() {
		t.Error("a restart resumes it")
	}
}

// A participant holds a workflow for the coordinators that it names alone. Messages that come again change
// nothing, nor does an earlier one that comes late: what was lifted stays so, also where that came first.
func TestProcessHoldsOfCoordinators(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := layStar(t)
	for i := range c.sites {
		c.sites[i].app += "rollback {\n coordinators " + c.a.issuer.Identity() + "\n }"
		c.sites[i].raw = ""
	}
	c.begin()
	g, wid, now := c.sites[1].gateway(t), uuid.NewString(), time.Now().UTC()
	hold := func(id string, at time.Time, state, level string) map[string]any {
		return map[string]any{"escalation_id": id, "opened": at, "state": state, "level": level, "cause": "rollback_partial"}
	}
	says := func(h map[string]any) reply { return g.call(holding(c.a, wid, starIdentity(1), h)) }
	is := func(want int, what string) {
		t.Helper()
		if got := c.tried(1, wid); got.status != want {
			t.Errorf("%s: %d %s", what, got.status, got.body)
		}
	}
	one, two := uuid.NewString(), uuid.NewString()
	for range 2 {
		if got := says(hold(one, now, "held", "pause")); got.status != http.StatusOK || !strings.Contains(got.body, `"held"`) {
			t.Fatalf("%d %s", got.status, got.body)
		}
		is(http.StatusConflict, "paused")
	}
	says(hold(two, now, "held", "stop"))
	is(http.StatusForbidden, "stopped by another one")
	for range 2 {
		says(hold(two, now, "lifted", "stop"))
		is(http.StatusConflict, "one of two is lifted")
	}
	says(hold(two, now, "held", "stop"))
	is(http.StatusConflict, "an earlier message came late")
	says(hold(one, now, "lifted", "pause"))
	is(http.StatusCreated, "lifted")
	three := uuid.NewString()
	says(hold(three, now, "lifted", "pause"))
	says(hold(three, now, "held", "pause"))
	is(http.StatusCreated, "the resume overtook the pause")
	says(hold(three, now.Add(time.Hour), "held", "pause"))
	is(http.StatusConflict, "opened again")
	says(hold(three, now.Add(time.Hour), "lifted", "pause"))

	for _, bad := range []map[string]any{{}, hold(one, now, "gone", "pause"), hold(one, now, "held", "approval"), hold("", now, "held", "pause")} {
		if got := says(bad); got.status != http.StatusBadRequest {
			t.Errorf("%v: %d %s", bad, got.status, got.body)
		}
	}
	// P3: a stranger, a token for another workflow, another body.
	stranger := holding(c.a, wid, starIdentity(1), hold(uuid.NewString(), now, "held", "stop"))
	other := stranger
	other.path = "/.well-known/cascade/workflows/" + uuid.NewString() + "/holds"
	g.call(other).problem(t, http.StatusForbidden, "not-in-workflow")
	forged := stranger
	forged.body = strings.Replace(forged.body, "stop", "pause", 1)
	g.call(forged).problem(t, http.StatusForbidden, "ect-invalid")
	none := stranger
	none.header = headers{"Content-Type": "application/json"}
	g.call(none).problem(t, http.StatusUnauthorized, "authentication-required")
	is(http.StatusCreated, "nothing of these counts")
}
