package rollback

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// remotes runs a gateway before a participant, whose calls it delegates; options are further ones
// of the app, undo those of the action.
func remotes(t *testing.T, a *harness.Agent, p *harness.Participant, options, undo string) *harness.Gateway {
	t.Helper()
	return harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, p.As) + options, Site: p.Remote("", undo)})
}

// Cascade 4.3.2, phase 1: to look ahead, and to prepare, asks an agent that knows nothing but the
// draft for nothing that it would carry out.
func TestPrepareUndoesNothingAtAnAgentOfTheDraft(t *testing.T) {
	a, p := harness.NewAgent(t, "a"), harness.NewParticipant(t)
	s := remotes(t, a, p, "", "").Saga(a)
	step := s.Do(harness.Request{Path: "/remote"})
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint, Scope: "single"}
	text, err := json.Marshal(map[string]any{"rollback_id": harness.RollbackID(2), "checkpoint_id": step.Checkpoint, "scope": "single", "dry_run": true})
	if err != nil {
		t.Fatal(err)
	}
	token := a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Parents: []string{step.Checkpoint}})
	dry := harness.Document[harness.PreparedDoc](t, s.G.Call(harness.With(token, harness.Request{Path: "/.well-known/cascade/rollback", Body: string(text)})))
	if dry.Status != "prepared" || p.Undid() != 0 {
		t.Errorf("a look: %+v, and the agent has undone %d", dry, p.Undid())
	}
	hash := s.Prepare(asked, http.StatusOK).PlanHash
	if p.Undid() != 0 {
		t.Errorf("prepare: the agent has undone %d", p.Undid())
	}
	harness.Document[harness.RollbackDoc](t, s.G.Call(s.Executing(asked, hash))).Want(t, "completed")
	if p.Undid() != 1 {
		t.Errorf("execute: the agent has undone %d", p.Undid())
	}
}

// A participant's own word for a refusal is shown, in the place of `refused` in prepare, and beside it in a step. It is
// the type of its problem; nothing else that it says is.
func TestPeersOwnReasonIsShown(t *testing.T) {
	a, p := harness.NewAgent(t, "a"), harness.NewParticipant(t)
	g := remotes(t, a, p, "", "")
	for i, c := range []struct{ body, word string }{
		{`{"type":"https://peer.example/problems/rollback-mismatch","status":422}`, "rollback-mismatch"},
		{`{"type":"https://peer.example/problems/<b>-pay-me"}`, ""},
		{`{}`, ""},
	} {
		s := g.Saga(a)
		step := s.Do(harness.Request{Path: "/remote"})
		faults{
			fmt.Sprint("rollback/prepare ", i+1): {faultSays(http.StatusUnprocessableEntity, c.body)},
			fmt.Sprint("rollback ", i+1):         {faultSays(http.StatusConflict, c.body)},
		}.of(p)
		asked := harness.RollbackBody{ID: harness.RollbackID(i), Checkpoint: step.Checkpoint, Scope: "single"}
		if doc := s.Prepare(asked, http.StatusConflict); len(doc.Agents) != 1 || doc.Agents[0].Reason != cmp.Or(c.word, "refused") {
			t.Errorf("%s: %+v", c.body, doc.Agents)
		}
		s.Back(asked).Want(t, "failed", "refused")
		shown := harness.Document[struct {
			Steps []struct{ Reason, Cause string }
		}](t, s.Look(asked.ID))
		if len(shown.Steps) != 1 || shown.Steps[0].Reason != "refused" || shown.Steps[0].Cause != c.word {
			t.Errorf("%s: %+v", c.body, shown.Steps)
		}
	}
}

// fault answers a request in the place of a participant, if it reports so.
type fault func(p *harness.Participant, w http.ResponseWriter, asked harness.ParticipantAsked) bool

// faults are what happens to the first requests of a path that are about the checkpoint of the nth
// call: "rollback/prepare 1". nil is the truth.
type faults map[string][]fault

// of lets p have them.
func (f faults) of(p *harness.Participant) {
	var mu sync.Mutex
	p.Before = func(path string, w http.ResponseWriter, asked harness.ParticipantAsked) bool {
		p.Mu.Lock()
		path = fmt.Sprint(path, " ", 1+slices.Index(p.Calls, asked.Checkpoint))
		p.Mu.Unlock()
		mu.Lock()
		var next fault
		if left := f[path]; len(left) > 0 {
			next, f[path] = left[0], left[1:]
		}
		mu.Unlock()
		return next != nil && next(p, w, asked)
	}
}

// faultDies breaks the connection and does nothing.
func faultDies(_ *harness.Participant, w http.ResponseWriter, _ harness.ParticipantAsked) bool {
	harness.Reset(w, nil)
	return true
}

// faultDiesLater does what it is asked for, and breaks the connection.
func faultDiesLater(p *harness.Participant, w http.ResponseWriter, asked harness.ParticipantAsked) bool {
	p.CarryOut(asked)
	return faultDies(p, w, asked)
}

// faultSays gives an answer and does nothing.
func faultSays(status int, body string) fault {
	return func(_ *harness.Participant, w http.ResponseWriter, _ harness.ParticipantAsked) bool {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, body)
		return true
	}
}

// faultSigns does what it is asked for, and shows the completions of other requests, or this one's more
// than once.
func faultSigns(others func(p *harness.Participant, own string, asked harness.ParticipantAsked) []string) fault {
	return func(p *harness.Participant, w http.ResponseWriter, asked harness.ParticipantAsked) bool {
		for _, raw := range others(p, p.CarryOut(asked), asked) {
			w.Header().Add(ect.FieldName, raw)
		}
		_, _ = fmt.Fprint(w, `{"status":"completed"}`)
		return true
	}
}

// Cascade 4.3.2, 4.3.4; P1, P6: an agent that knows nothing but the draft, and dies, is slow, refuses,
// or answers twice, late or with the answer to something else. A call leads to it, and a second one
// because of that. It undoes nothing twice, is asked for nothing that it has not prepared, and each
// part counts as done only where the agent has signed that part.
func TestParticipantFaults(t *testing.T) {
	const prepare1, prepare2, execute1, execute2 = "rollback/prepare 1", "rollback/prepare 2", "rollback 1", "rollback 2"
	swapped := func(p *harness.Participant, _ string, asked harness.ParticipantAsked) []string {
		other := asked
		p.Mu.Lock()
		defer p.Mu.Unlock()
		for _, id := range p.Calls {
			if id != asked.Checkpoint {
				other.Checkpoint = id
			}
		}
		return []string{p.Completion(other)}
	}
	earlier := func(p *harness.Participant, own string, _ harness.ParticipantAsked) (all []string) {
		p.Mu.Lock()
		defer p.Mu.Unlock()
		for _, raw := range p.Results {
			if raw != own {
				all = append(all, raw)
			}
		}
		return all
	}
	twice := func(_ *harness.Participant, own string, _ harness.ParticipantAsked) []string {
		return []string{own, own}
	}
	type row struct {
		faults faults
		status string
		second string // its step, which comes first
		first  string // the step of what is asked for
		effect string
		undone int
	}
	all := map[string]row{
		"it dies at prepare, and comes back": {faults{prepare1: {faultDies}, prepare2: {faultDies, faultDies}}, "completed", "completed", "completed", "", 2},
		"it is busy at prepare": {faults{prepare1: {faultSays(503, ""), faultSays(409, `{"type":"workflow-paused"}`)}, prepare2: {faultSays(429, "")}},
			"completed", "completed", "completed", "", 2},
		"it dies before it executes":        {faults{execute2: {faultDies}, execute1: {faultDies}}, "completed", "completed", "completed", "", 2},
		"it dies after it has executed":     {faults{execute2: {faultDiesLater}, execute1: {faultDiesLater}}, "completed", "completed", "completed", "", 2},
		"it takes its time":                 {faults{execute2: {faultSays(202, `{"status":"executing"}`)}, execute1: {faultSays(503, "")}}, "completed", "completed", "completed", "", 2},
		"it cannot prepare the second":      {faults{prepare2: {faultSays(409, `{"status":"cannot_prepare","reason_code":"checkpoint-expired"}`)}}, "partial", "escalated checkpoint-expired", "completed", "unknown", 1},
		"it cannot prepare the first":       {faults{prepare1: {faultSays(409, `{"status":"cannot_prepare","reason_code":"checkpoint-expired"}`)}}, "", "", "", "", 0}, // people are asked
		"it does not say that it can":       {faults{prepare2: {faultSays(200, `{"status":"maybe"}`)}}, "partial", "escalated refused", "completed", "unknown", 1},
		"it has prepared, and then cannot":  {faults{execute2: {faultSays(409, `{"status":"failed"}`)}}, "partial", "failed refused", "completed", "mixed", 1},
		"it says done, and signs nothing":   {faults{execute2: {faultSays(200, `{"status":"completed"}`)}}, "partial", "escalated unexpected", "completed", "unknown", 1},
		"it signs twice":                    {faults{execute2: {faultSigns(twice)}, execute1: {faultSigns(twice)}}, "completed", "completed", "completed", "", 2},
		"it signs the first for the second": {faults{execute2: {faultSigns(swapped)}}, "partial", "escalated unexpected", "completed", "unknown", 2},
		"it signs the second for the first": {faults{execute1: {faultSigns(earlier)}}, "partial", "completed", "escalated unexpected", "unknown", 2},
	}
	a, participants, calls, site := harness.NewAgent(t, "a"), map[string]*harness.Participant{}, map[string]harness.Request{}, ""
	agents := []*harness.Agent{a}
	for name := range all {
		n, p := fmt.Sprint(len(participants)), harness.NewParticipant(t)
		p.As = harness.NewAgent(t, "remote-"+n)
		calls[name] = harness.Request{Path: "/remote", Header: harness.Headers{"X-Participant": n}}
		participants[name], agents = p, append(agents, p.As)
		site += fmt.Sprintf("@%s header X-Participant %[1]s\nhandle @%[1]s {\n%s\n}\n", n, p.Remote("name remote-"+n, ""))
	}
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, agents...) + harness.UndoesParts, Site: site + "agent_proxy 127.0.0.1:1"}) // whose guard answers for all
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they share a gateway, and wait
			p, call, s := participants[name], calls[name], g.Saga(a).In(t)
			first := s.Do(call)
			second := s.Do(call, first.Checkpoint)
			c.faults.of(p)
			asked := harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: first.Checkpoint, Scope: "sub_dag"}
			if c.status == "" {
				if s.Waits(asked); len(p.Undone) > 0 {
					t.Errorf("%v was undone", p.Undone)
				}
				return
			}
			doc := s.Back(asked)
			for id, want := range map[string]string{first.Checkpoint: c.first, second.Checkpoint: c.second} {
				at := slices.IndexFunc(doc.Steps, func(step harness.RollbackStep) bool { return step.Checkpoint == id })
				if got := strings.TrimSpace(doc.Steps[at].Status + " " + doc.Steps[at].Reason); got != want {
					t.Errorf("the step is %q, want %q", got, want)
				}
			}
			if doc.Status != c.status || doc.Effect != c.effect {
				t.Errorf("the rollback is %s %q, want %s %q: %+v", doc.Status, doc.Effect, c.status, c.effect, doc)
			}
			if again := s.Back(asked); fmt.Sprint(again.Steps) != fmt.Sprint(doc.Steps) {
				t.Errorf("asked again: %+v", again)
			}
			for id, n := range p.Undone {
				if n != 1 {
					t.Errorf("P1: %s was undone %d times", id, n)
				}
			}
			if p.Undid() != c.undone {
				t.Errorf("the agent has undone %d, want %d", p.Undid(), c.undone)
			}
			for path, left := range c.faults {
				if len(left) > 0 {
					t.Errorf("%s: %d faults have not happened", path, len(left))
				}
			}
		})
	}
}

// C-4.3.3, ATD "Rollback Timeout and Escalation": who never answers is asked until half of the `ttl`,
// and then a person is: nobody knows what it has done.
func TestParticipantNeverAnswers(t *testing.T) {
	a, p := harness.NewAgent(t, "a"), harness.NewParticipant(t)
	s := remotes(t, a, p, "", "checkpoint_ttl 6s").Saga(a)
	step := s.Do(harness.Request{Path: "/remote"})
	p.Before = func(path string, w http.ResponseWriter, asked harness.ParticipantAsked) bool {
		return path == "rollback" && faultDies(p, w, asked)
	}
	doc := s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint})
	if doc.Want(t, "escalated", "timeout"); !doc.TimedOut || doc.Effect != "unknown" || len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
}

// Cascade 4.3.2: the same prepare gets the same answer while its reservation stands, and the agent
// hears of one rollback. When it has ended the agent is asked anew, and the plan is carried out.
func TestParticipantReservationExpires(t *testing.T) {
	a, p := harness.NewAgent(t, "a"), harness.NewParticipant(t)
	s := remotes(t, a, p, "\nrollback {\n reservation 2s\n }", "").Saga(a)
	step := s.Do(harness.Request{Path: "/remote"})
	ids := map[string]bool{}
	p.Before = func(path string, _ http.ResponseWriter, asked harness.ParticipantAsked) bool {
		if strings.HasPrefix(path, "rollback") {
			p.Mu.Lock()
			ids[asked.ID] = true
			p.Mu.Unlock()
		}
		return false
	}
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint, Scope: "single"}
	first, again := s.Prepare(asked, http.StatusOK), s.Prepare(asked, http.StatusOK)
	if first.PlanHash != again.PlanHash || first.PlanHash == "" {
		t.Errorf("%+v, and then %+v", first, again)
	}
	harness.EventuallyWithin(t, harness.Patience, "the end of the reservation", func() bool { return s.Look(asked.ID).Status == http.StatusForbidden })
	p.Mu.Lock()
	before := p.Prepared
	p.Mu.Unlock()
	harness.Document[harness.RollbackDoc](t, s.G.Call(s.Executing(asked, first.PlanHash))).Want(t, "completed")
	if p.Prepared == before || p.Undid() != 1 || len(ids) != 1 {
		t.Errorf("it was asked to prepare %d times, then %d, has undone %d, and heard of %v", before, p.Prepared, p.Undid(), ids)
	}
}
