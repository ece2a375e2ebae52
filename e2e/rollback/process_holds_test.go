//go:build unix

package rollback

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// holding is a message of a coordinator to a participant: by whom, of which workflow.
func holding(by *harness.Agent, wid, to string, hold map[string]any) harness.Request {
	text, err := json.Marshal(hold)
	if err != nil {
		by.T.Fatal(err)
	}
	token := by.Issue(ect.Claims{Audience: []string{to}, Workflow: wid, Action: "escalation", Input: ect.Sum(text)})
	r := harness.With(token, harness.Request{Path: "/.well-known/cascade/workflows/" + wid + "/holds", Body: string(text)})
	r.Header["Content-Type"] = "application/json"
	return r
}

// ATD "Interaction with HITL": a rollback that has undone a part pauses its workflow at the coordinator
// and at all that took part, and a person's approval resumes it at all. One that is down meanwhile is
// told when it is back, also by a coordinator that was killed in between. The workflow's page says who
// has confirmed what. Other workflows go on.
func TestProcessPauseReachesParticipants(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewStar(t, "rollback {\n partial allow\n prepare_timeout 2s\n }")
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	c.Running[2].Kill()
	done := s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"})
	if done.Status != "partial" {
		t.Fatalf("%+v", done)
	}
	harness.Eventually(t, "it is paused at a participant", func() bool {
		got := c.Tried(1, s.Wid)
		return got.Status == http.StatusConflict && strings.Contains(got.Body, "workflow-paused") && strings.Contains(got.Body, "escalation_id")
	})
	if got := c.Tried(1, uuid.NewString()); got.Status != http.StatusCreated {
		t.Errorf("another workflow: %d %s", got.Status, got.Body)
	}
	harness.Eventually(t, "the page says who has not confirmed", func() bool {
		seen := s.Holds().Holds
		return len(seen) == 1 && seen[0].State == "held" && len(seen[0].Participants) == 2 &&
			strings.Contains(fmt.Sprint(seen), "unreachable") && strings.Contains(fmt.Sprint(seen), "held held")
	})
	c.Running[0].Kill()
	c.Start(0)
	c.Start(2)
	harness.Eventually(t, "it is paused at the one that was down", func() bool { return c.Tried(2, s.Wid).Status == http.StatusConflict })
	held := s.Holds().Holds
	if len(held) != 1 {
		t.Fatalf("%+v", held)
	}
	c.Running[2].Kill()
	c.Sites[0].Decides(t, "approve", held[0].Escalation)
	c.Running[0].Kill()
	c.Start(0)
	harness.Eventually(t, "it is resumed at a participant", func() bool { return c.Tried(1, s.Wid).Status == http.StatusCreated })
	c.Start(2)
	harness.Eventually(t, "it is resumed at the one that was down", func() bool { return c.Tried(2, s.Wid).Status == http.StatusCreated })
	harness.Eventually(t, "all have confirmed", func() bool {
		seen := s.Holds().Holds
		return len(seen) == 1 && seen[0].State == "lifted" && strings.Count(fmt.Sprint(seen), "lifted lifted") == 2
	})
}

// C-4.1.3: a rollback of the whole workflow stops it at every configured participant, those too that have
// nothing of it, and one that is down when it is back, over kills of the coordinator; for good.
func TestProcessStopReachesAll(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewAskingStar(t)
	s := c.Saga
	root := s.Do(harness.Charge(1))
	c.Running[2].Kill()
	s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "full_workflow"})
	stopped := func(n int) func() bool {
		return func() bool {
			got := c.Tried(n, s.Wid)
			return got.Status == http.StatusForbidden && strings.Contains(got.Body, "workflow-stopped")
		}
	}
	harness.Eventually(t, "it is stopped at a participant", stopped(1))
	c.Running[0].Kill()
	c.Start(0)
	c.Start(2)
	harness.Eventually(t, "it is stopped at the one that was down", stopped(2))
	c.Running[1].Kill()
	c.Start(1)
	if !stopped(1)() {
		t.Error("a restart resumes it")
	}
}

// A participant holds a workflow for the coordinators that it names alone. Messages that come again change
// nothing, nor does an earlier one that comes late: what was lifted stays so, also where that came first.
func TestProcessHoldsOfCoordinators(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.LayStar(t)
	for i := range c.Sites {
		c.Sites[i].App += "rollback {\n coordinators " + c.A.Issuer.Identity() + "\n }"
		c.Sites[i].Raw = ""
	}
	c.Begin()
	g, wid, now := c.Sites[1].Gateway(t), uuid.NewString(), time.Now().UTC()
	hold := func(id string, at time.Time, state, level string) map[string]any {
		return map[string]any{"escalation_id": id, "opened": at, "state": state, "level": level, "cause": "rollback_partial"}
	}
	says := func(h map[string]any) harness.Reply { return g.Call(holding(c.A, wid, harness.StarIdentity(1), h)) }
	is := func(want int, what string) {
		t.Helper()
		if got := c.Tried(1, wid); got.Status != want {
			t.Errorf("%s: %d %s", what, got.Status, got.Body)
		}
	}
	one, two := uuid.NewString(), uuid.NewString()
	for range 2 {
		if got := says(hold(one, now, "held", "pause")); got.Status != http.StatusOK || !strings.Contains(got.Body, `"held"`) {
			t.Fatalf("%d %s", got.Status, got.Body)
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
		if got := says(bad); got.Status != http.StatusBadRequest {
			t.Errorf("%v: %d %s", bad, got.Status, got.Body)
		}
	}
	// P3: a stranger, a token for another workflow, another body.
	stranger := holding(c.A, wid, harness.StarIdentity(1), hold(uuid.NewString(), now, "held", "stop"))
	other := stranger
	other.Path = "/.well-known/cascade/workflows/" + uuid.NewString() + "/holds"
	g.Call(other).Problem(t, http.StatusForbidden, "not-in-workflow")
	forged := stranger
	forged.Body = strings.Replace(forged.Body, "stop", "pause", 1)
	g.Call(forged).Problem(t, http.StatusForbidden, "ect-invalid")
	none := stranger
	none.Header = harness.Headers{"Content-Type": "application/json"}
	g.Call(none).Problem(t, http.StatusUnauthorized, "authentication-required")
	is(http.StatusCreated, "nothing of these counts")
}
