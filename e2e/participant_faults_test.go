package e2e

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

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// remotes runs a gateway before a participant, whose calls it delegates; options are further ones
// of the app, undo those of the action.
func remotes(t *testing.T, a *agent, p *participant, options, undo string) *gateway {
	t.Helper()
	return launch(t, setup{app: trusting(t, a, p.as) + options, site: p.remote("", undo)})
}

// remote proxies to p, which undoes what it has done.
func (p *participant) remote(options, undo string) string {
	return fmt.Sprintf(
		"agent_proxy %s {\n %s\n identity %s\n action remote {\n match path /remote\n %s\n delegate http://%[1]s/.well-known/cascade/rollback %[3]s\n }\n }",
		strings.TrimPrefix(p.URL, "http://"), options, p.as.issuer.Identity(), undo)
}

// undid is how often the participant has undone something, in all.
func (p *participant) undid() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, times := range p.undone {
		n += times
	}
	return n
}

// Cascade 4.3.2, phase 1: to look ahead, and to prepare, asks an agent that knows nothing but the
// draft for nothing that it would carry out.
func TestPrepareUndoesNothingAtAnAgentOfTheDraft(t *testing.T) {
	a, p := newAgent(t, "a"), newParticipant(t)
	s := remotes(t, a, p, "", "").saga(a)
	step := s.do(request{path: "/remote"})
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint, Scope: "single"}
	text, err := json.Marshal(map[string]any{"rollback_id": rollbackID(2), "checkpoint_id": step.checkpoint, "scope": "single", "dry_run": true})
	if err != nil {
		t.Fatal(err)
	}
	token := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Parents: []string{step.checkpoint}})
	dry := document[preparedDoc](t, s.g.call(with(token, request{path: "/.well-known/cascade/rollback", body: string(text)})))
	if dry.Status != "prepared" || p.undid() != 0 {
		t.Errorf("a look: %+v, and the agent has undone %d", dry, p.undid())
	}
	hash := s.prepare(asked, http.StatusOK).PlanHash
	if p.undid() != 0 {
		t.Errorf("prepare: the agent has undone %d", p.undid())
	}
	document[rollbackDoc](t, s.g.call(s.executing(asked, hash))).want(t, "completed")
	if p.undid() != 1 {
		t.Errorf("execute: the agent has undone %d", p.undid())
	}
}

// A participant's own word for a refusal is shown, in the place of `refused` in prepare, and beside it in a step. It is
// the type of its problem; nothing else that it says is.
func TestPeersOwnReasonIsShown(t *testing.T) {
	a, p := newAgent(t, "a"), newParticipant(t)
	g := remotes(t, a, p, "", "")
	for i, c := range []struct{ body, word string }{
		{`{"type":"https://peer.example/problems/rollback-mismatch","status":422}`, "rollback-mismatch"},
		{`{"type":"https://peer.example/problems/<b>-pay-me"}`, ""},
		{`{}`, ""},
	} {
		s := g.saga(a)
		step := s.do(request{path: "/remote"})
		faults{
			fmt.Sprint("rollback/prepare ", i+1): {faultSays(http.StatusUnprocessableEntity, c.body)},
			fmt.Sprint("rollback ", i+1):         {faultSays(http.StatusConflict, c.body)},
		}.of(p)
		asked := rollbackBody{ID: rollbackID(i), Checkpoint: step.checkpoint, Scope: "single"}
		if doc := s.prepare(asked, http.StatusConflict); len(doc.Agents) != 1 || doc.Agents[0].Reason != cmp.Or(c.word, "refused") {
			t.Errorf("%s: %+v", c.body, doc.Agents)
		}
		s.back(asked).want(t, "failed", "refused")
		shown := document[struct {
			Steps []struct{ Reason, Cause string }
		}](t, s.look(asked.ID))
		if len(shown.Steps) != 1 || shown.Steps[0].Reason != "refused" || shown.Steps[0].Cause != c.word {
			t.Errorf("%s: %+v", c.body, shown.Steps)
		}
	}
}

// fault answers a request in the place of a participant, if it reports so.
type fault func(p *participant, w http.ResponseWriter, asked participantAsked) bool

// faults are what happens to the first requests of a path that are about the checkpoint of the nth
// call: "rollback/prepare 1". nil is the truth.
type faults map[string][]fault

// of lets p have them.
func (f faults) of(p *participant) {
	var mu sync.Mutex
	p.before = func(path string, w http.ResponseWriter, asked participantAsked) bool {
		p.mu.Lock()
		path = fmt.Sprint(path, " ", 1+slices.Index(p.calls, asked.Checkpoint))
		p.mu.Unlock()
		mu.Lock()
		var next fault
		if left := f[path]; len(left) > 0 {
			next, f[path] = left[0], left[1:]
		}
		mu.Unlock()
		return next != nil && next(p, w, asked)
	}
}

// carryOut is result, from outside.
func (p *participant) carryOut(asked participantAsked) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.result(asked)
}

// faultDies breaks the connection and does nothing.
func faultDies(_ *participant, w http.ResponseWriter, _ participantAsked) bool {
	reset(w, nil)
	return true
}

// faultDiesLater does what it is asked for, and breaks the connection.
func faultDiesLater(p *participant, w http.ResponseWriter, asked participantAsked) bool {
	p.carryOut(asked)
	return faultDies(p, w, asked)
}

// faultSays gives an answer and does nothing.
func faultSays(status int, body string) fault {
	return func(_ *participant, w http.ResponseWriter, _ participantAsked) bool {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, body)
		return true
	}
}

// faultSigns does what it is asked for, and shows the completions of other requests, or this one's more
// than once.
func faultSigns(others func(p *participant, own string, asked participantAsked) []string) fault {
	return func(p *participant, w http.ResponseWriter, asked participantAsked) bool {
		for _, raw := range others(p, p.carryOut(asked), asked) {
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
	swapped := func(p *participant, _ string, asked participantAsked) []string {
		other := asked
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, id := range p.calls {
			if id != asked.Checkpoint {
				other.Checkpoint = id
			}
		}
		return []string{p.completion(other)}
	}
	earlier := func(p *participant, own string, _ participantAsked) (all []string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, raw := range p.results {
			if raw != own {
				all = append(all, raw)
			}
		}
		return all
	}
	twice := func(_ *participant, own string, _ participantAsked) []string { return []string{own, own} }
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
	a, participants, calls, site := newAgent(t, "a"), map[string]*participant{}, map[string]request{}, ""
	agents := []*agent{a}
	for name := range all {
		n, p := fmt.Sprint(len(participants)), newParticipant(t)
		p.as = newAgent(t, "remote-"+n)
		calls[name] = request{path: "/remote", header: headers{"X-Participant": n}}
		participants[name], agents = p, append(agents, p.as)
		site += fmt.Sprintf("@%s header X-Participant %[1]s\nhandle @%[1]s {\n%s\n}\n", n, p.remote("name remote-"+n, ""))
	}
	g := launch(t, setup{app: trusting(t, agents...) + undoesParts, site: site + "agent_proxy 127.0.0.1:1"}) // whose guard answers for all
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they share a gateway, and wait
			p, call, s := participants[name], calls[name], g.saga(a).in(t)
			first := s.do(call)
			second := s.do(call, first.checkpoint)
			c.faults.of(p)
			asked := rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: first.checkpoint, Scope: "sub_dag"}
			if c.status == "" {
				if s.waits(asked); len(p.undone) > 0 {
					t.Errorf("%v was undone", p.undone)
				}
				return
			}
			doc := s.back(asked)
			for id, want := range map[string]string{first.checkpoint: c.first, second.checkpoint: c.second} {
				at := slices.IndexFunc(doc.Steps, func(step rollbackStep) bool { return step.Checkpoint == id })
				if got := strings.TrimSpace(doc.Steps[at].Status + " " + doc.Steps[at].Reason); got != want {
					t.Errorf("the step is %q, want %q", got, want)
				}
			}
			if doc.Status != c.status || doc.Effect != c.effect {
				t.Errorf("the rollback is %s %q, want %s %q: %+v", doc.Status, doc.Effect, c.status, c.effect, doc)
			}
			if again := s.back(asked); fmt.Sprint(again.Steps) != fmt.Sprint(doc.Steps) {
				t.Errorf("asked again: %+v", again)
			}
			for id, n := range p.undone {
				if n != 1 {
					t.Errorf("P1: %s was undone %d times", id, n)
				}
			}
			if p.undid() != c.undone {
				t.Errorf("the agent has undone %d, want %d", p.undid(), c.undone)
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
	a, p := newAgent(t, "a"), newParticipant(t)
	s := remotes(t, a, p, "", "checkpoint_ttl 6s").saga(a)
	step := s.do(request{path: "/remote"})
	p.before = func(path string, w http.ResponseWriter, asked participantAsked) bool {
		return path == "rollback" && faultDies(p, w, asked)
	}
	doc := s.back(rollbackBody{Checkpoint: step.checkpoint})
	if doc.want(t, "escalated", "timeout"); !doc.TimedOut || doc.Effect != "unknown" || len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
}

// Cascade 4.3.2: the same prepare gets the same answer while its reservation stands, and the agent
// hears of one rollback. When it has ended the agent is asked anew, and the plan is carried out.
func TestParticipantReservationExpires(t *testing.T) {
	a, p := newAgent(t, "a"), newParticipant(t)
	s := remotes(t, a, p, "\nrollback {\n reservation 2s\n }", "").saga(a)
	step := s.do(request{path: "/remote"})
	ids := map[string]bool{}
	p.before = func(path string, _ http.ResponseWriter, asked participantAsked) bool {
		if strings.HasPrefix(path, "rollback") {
			p.mu.Lock()
			ids[asked.ID] = true
			p.mu.Unlock()
		}
		return false
	}
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint, Scope: "single"}
	first, again := s.prepare(asked, http.StatusOK), s.prepare(asked, http.StatusOK)
	if first.PlanHash != again.PlanHash || first.PlanHash == "" {
		t.Errorf("%+v, and then %+v", first, again)
	}
	eventuallyWithin(t, patience, "the end of the reservation", func() bool { return s.look(asked.ID).status == http.StatusForbidden })
	p.mu.Lock()
	before := p.prepared
	p.mu.Unlock()
	document[rollbackDoc](t, s.g.call(s.executing(asked, first.PlanHash))).want(t, "completed")
	if p.prepared == before || p.undid() != 1 || len(ids) != 1 {
		t.Errorf("it was asked to prepare %d times, then %d, has undone %d, and heard of %v", before, p.prepared, p.undid(), ids)
	}
}
