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
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// flow is one workflow of agents over a site.
type flow struct {
	*gateway
	wid string
}

func (g *gateway) workflow() *flow { return &flow{g, uuid.NewString()} }

// does makes a call of an agent that follows from others' tokens, and returns its token
// and checkpoint.
func (f *flow) does(a *agent, method, path, body string, parents ...string) (token *ect.Token, checkpoint string) {
	f.t.Helper()
	token = a.issue(ect.Claims{Workflow: f.wid, Action: "do", Parents: parents})
	got := f.call(with(token, request{method: method, path: path, body: body, header: headers{"Content-Type": "text/plain"}}))
	if got.status >= 300 || got.header.Get("Execution-Checkpoint") == "" {
		f.t.Fatalf("%s %s: %d %v %s", method, path, got.status, got.header, got.body)
	}
	return token, got.header.Get("Execution-Checkpoint")
}

// asks asks for a rollback with a fresh token.
func (f *flow) asks(a *agent, id, checkpoint, more string) reply {
	f.t.Helper()
	return f.asksWith(a.issue(f.request(checkpoint, more)), id, checkpoint, more)
}

// request is a token that asks for what a body with these members does.
func (f *flow) request(checkpoint, more string) ect.Claims {
	f.t.Helper()
	said := struct {
		Scope, Reason string
		Cascade       bool
	}{}
	if err := json.Unmarshal([]byte(`{"of": ""`+more+"}"), &said); err != nil {
		f.t.Fatal(err)
	}
	ext := new(ect.ExtBuilder).Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberReason, said.Reason).
		Bool(ect.MemberCascade, said.Cascade || said.Scope != "" && said.Scope != "single")
	if said.Scope != "" {
		ext.Text(ect.MemberScope, said.Scope)
	}
	return ect.Claims{Workflow: f.wid, Action: "rollback_request", Ext: ext}
}

func (f *flow) asksWith(token *ect.Token, id, checkpoint, more string) reply {
	f.t.Helper()
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "phase": "execute"%s}`, id, checkpoint, more)
	return f.call(with(token, request{path: api.RollbackPath, body: body}))
}

// undone reads the answer to a rollback that is finished.
func (r reply) undone(t *testing.T, want rollback.Status) (doc rollback.Rollback) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.body), &doc); err != nil || r.status != http.StatusOK || doc.Status != want {
		t.Fatalf("%d %s, want %s (%v)", r.status, r.body, want, err)
	}
	return doc
}

// is holds that the answer is this problem.
func (r reply) is(t *testing.T, status int, slug string) {
	t.Helper()
	var doc struct{ Type string }
	_ = json.Unmarshal([]byte(r.body), &doc)
	if r.status != status || doc.Type != "/.well-known/cascade/problems/"+slug {
		t.Errorf("%d %s, want %d %s", r.status, r.body, status, slug)
	}
}

// Issue 6 "Rollback", cascade 4.1.2: a PUT is put back, once, however often it is asked; a
// late duplicate does not bring it back.
func TestP5RollbackOfAPut(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	lab.write("/docs/a", "before")
	g := launch(t, setup{app: trusting(t, a), site: lab.site(), badger: true})
	f := g.workflow()
	token, checkpoint := f.does(a, "PUT", "/docs/a", "after")
	lab.wantDoc("/docs/a", "after")

	id := uuid.NewString()
	asking := a.issue(f.request(checkpoint, `, "reason": "a mistake"`))
	first := f.asksWith(asking, id, checkpoint, `, "reason": "a mistake"`)
	doc := first.undone(t, rollback.Completed)
	lab.wantDoc("/docs/a", "before")
	if doc.Requester != a.issuer.Identity() || len(doc.Steps) != 1 || doc.Steps[0].Action != "undo" || len(doc.FollowUp) > 0 || doc.Before == (rollback.Hash{}) || doc.After == (rollback.Hash{}) {
		t.Errorf("%+v", doc)
	}
	result, err := ect.ParseInsecure(doc.ECT)
	if err != nil || result.Event() != ect.EventRollbackComplete || first.header.Get("Execution-Context") != doc.ECT {
		t.Errorf("%v %q %v", err, doc.ECT, first.header)
	}
	if again := f.asksWith(asking, id, checkpoint, `, "reason": "a mistake"`); again.body != first.body {
		t.Errorf("%s\n%s", first.body, again.body)
	}
	if again := f.asks(a, id, checkpoint, `, "reason": "a mistake"`); again.body != first.body {
		t.Errorf("%s\n%s", first.body, again.body)
	}
	if looked := f.call(with(a.issue(ect.Claims{Workflow: f.wid}), request{method: "GET", path: api.RollbackURL(id)})); looked.body != first.body {
		t.Errorf("%d %s", looked.status, looked.body)
	}
	lab.wantEffects("changed /docs/a", "changed /docs/a")

	f.asksWith(asking, uuid.NewString(), checkpoint, "").refusedFor(t, 403, "replayed")
	f.asksWith(asking, id, uuid.NewString(), "").refusedFor(t, 403, "ext")
	f.asks(a, id, checkpoint, `, "reason": "another"`).is(t, 422, "rollback-mismatch")
	g.call(with(token, request{method: "PUT", path: "/docs/a", body: "after", header: headers{"Content-Type": "text/plain"}})).is(t, 409, "rolled-back")
	// What is undone already is done, under another id too.
	f.asks(a, uuid.NewString(), checkpoint, "").undone(t, rollback.Completed)
	lab.wantEffects("changed /docs/a", "changed /docs/a")
}

// Cascade 4.1.1, 4.1.3: a checkpoint and its consequences, in reverse order; what has no
// way back is escalated and not skipped.
func TestCascade413RollbackOfWhatFollowed(t *testing.T) {
	lab, a, b := newRestLab(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b) + undoesParts, site: lab.site(), badger: true})
	f := g.workflow()
	root, first := f.does(a, "PUT", "/docs/a", "1")
	f.does(b, "POST", "/charges", "{}", root.ID())
	doc := f.asks(a, uuid.NewString(), first, `, "cascade": true`).undone(t, rollback.Completed)
	if len(doc.Steps) != 2 || doc.Steps[0].Level >= doc.Steps[1].Level || doc.Steps[1].Checkpoint != first || len(doc.Cascaded) != 1 || doc.Cascaded[0].Agent != b.issuer.Identity() {
		t.Errorf("%+v", doc)
	}
	lab.wantEffects("created /docs/a", "charged ch_1", "refunded ch_1", "deleted /docs/a")

	f = g.workflow()
	root, first = f.does(a, "PUT", "/docs/b", "1")
	_, mail := f.does(b, "POST", "/mail", "hello", root.ID())
	doc = f.asks(a, uuid.NewString(), first, `, "scope": "sub_dag"`).undone(t, rollback.Partial)
	if len(doc.Escalations) == 0 || len(doc.FollowUp) == 0 || !strings.Contains(doc.FollowUp[0], mail) || len(doc.FailedAgents) != 1 {
		t.Errorf("%+v", doc)
	}
	f = g.workflow()
	_, mail = f.does(b, "POST", "/mail", "hello")
	f.asks(b, uuid.NewString(), mail, "").undone(t, rollback.Escalated)
}

// Cascade 6.1, P3: who has no part in a checkpoint learns nothing, and touches nothing.
func TestP3RollbackOfOthers(t *testing.T) {
	lab, a, b, m := newRestLab(t), newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "m")
	stranger := newAgent(t, "a") // who has a's name, and another key
	g := launch(t, setup{app: trusting(t, a, b, m), site: lab.site(), badger: true})
	f := g.workflow()
	root, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	_, later := f.does(b, "PUT", "/docs/b", "1", root.ID())
	id := uuid.NewString()

	f.call(request{path: api.RollbackPath, body: "{}"}).is(t, 401, "authentication-required")
	f.call(request{path: api.RollbackPath, body: "{}", header: headers{"Authorization": "Bearer x"}}).refusedFor(t, 403, "missing")
	f.asks(stranger, id, checkpoint, "").refusedFor(t, 403, "kid")
	unknown := f.asks(m, id, uuid.NewString(), "")
	unknown.is(t, 403, "not-in-workflow")
	other := g.workflow()
	for what, got := range map[string]reply{
		"a stranger in its workflow": f.asks(m, id, checkpoint, ""), "from another workflow": other.asks(a, id, checkpoint, ""),
		"who came later": f.asks(b, id, checkpoint, ""), "unknown to its own": f.asks(a, id, uuid.NewString(), ""),
	} {
		if got.status != unknown.status || got.body != unknown.body {
			t.Errorf("%s: %d %s", what, got.status, got.body)
		}
	}
	f.asks(a, id, checkpoint, `, "scope": "full_workflow"`) // a has begun the workflow
	f.asks(b, uuid.NewString(), later, `, "scope": "full_workflow"`).is(t, 403, "coordinator-required")
	f.asks(a, uuid.NewString(), later, "") // an ancestor
	look := func(by *agent, id string) reply {
		return f.call(with(by.issue(ect.Claims{Workflow: f.wid}), request{method: "GET", path: api.RollbackURL(id)}))
	}
	if got := look(a, id); got.status != 200 {
		t.Errorf("%d %s", got.status, got.body)
	}
	nothing := look(m, uuid.NewString())
	nothing.is(t, 403, "not-in-workflow")
	if got := look(m, id); got.body != nothing.body || got.status != nothing.status {
		t.Errorf("%d %s", got.status, got.body)
	}
	f.call(request{method: "GET", path: api.RollbackURL(id)}).is(t, 401, "authentication-required")
	lab.wantDoc("/docs/b", "")
}

// Option `lineage workflow`, `coordinators` and `rate`.
func TestRollbackOptions(t *testing.T) {
	lab, a, b, c := newRestLab(t), newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "c")
	g := launch(t, setup{app: trusting(t, a, b, c) + "\nrollback {\n lineage workflow\n coordinators " + c.issuer.Identity() + "\n rate 2\n }", site: lab.site(), badger: true})
	f := g.workflow()
	root, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	f.does(b, "PUT", "/docs/b", "1", root.ID())
	f.asks(b, uuid.NewString(), checkpoint, `, "keep_dependants": true`).undone(t, rollback.Completed)
	whole := uuid.NewString()
	asking := c.issue(f.request(checkpoint, `, "scope": "full_workflow"`))
	f.asksWith(asking, whole, checkpoint, `, "scope": "full_workflow"`).undone(t, rollback.Completed)
	lab.wantDoc("/docs/b", "")
	// The workflow's bound is reached; a repetition is answered all the same (C-6.1-d).
	over := f.asks(a, uuid.NewString(), checkpoint, "")
	over.is(t, 429, "quota-exceeded")
	if over.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	f.asksWith(asking, whole, checkpoint, `, "scope": "full_workflow"`).undone(t, rollback.Completed)
}

// ATD and AERR "Rollback Protocol": the older paths, in their words.
func TestRollbackInOlderDialects(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: lab.site(), badger: true})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	atd := a.issue(ect.Claims{Workflow: f.wid, Action: "atd:rollback_request", Vocabulary: ect.ATD, Parents: []string{checkpoint},
		Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, true)})
	var result struct {
		Action  string         `json:"exec_act"`
		Parents []string       `json:"par"`
		Ext     map[string]any `json:"ext"`
		ECT     string         `json:"ect"`
	}
	for range 2 {
		got := g.call(with(atd, request{path: api.ATDRollbackPath}))
		if err := json.Unmarshal([]byte(got.body), &result); err != nil || got.status != 200 {
			t.Fatalf("%d %s %v", got.status, got.body, err)
		}
		if result.Action != "atd:rollback_result" || fmt.Sprint(result.Parents) != "["+atd.ID()+"]" || result.Ext["atd.status"] != "completed" ||
			result.Ext["atd.checkpoint_id"] != checkpoint || got.header.Get("Execution-Context") != result.ECT {
			t.Errorf("%+v", result)
		}
	}
	lab.wantDoc("/docs/a", "")

	root, checkpoint := f.does(a, "PUT", "/docs/b", "1")
	failure := a.issue(ect.Claims{Workflow: f.wid, Action: "aerr:error", Vocabulary: ect.AERR, Parents: []string{root.ID()},
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, checkpoint)})
	if got := g.call(request{path: "/.well-known/cascade/errors", body: failure.Raw(), header: headers{"Content-Type": ect.MediaType}}); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	aerr := a.issue(ect.Claims{Workflow: f.wid, Action: "aerr:rollback_request", Vocabulary: ect.AERR, Parents: []string{failure.ID()}})
	got := g.call(with(aerr, request{path: api.AERRRollbackPath,
		body: fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "reason": "why", "cascade": true}`, uuid.NewString(), checkpoint)}))
	if err := json.Unmarshal([]byte(got.body), &result); err != nil || result.Action != "aerr:rollback_complete" || result.Ext["aerr.status"] != "completed" {
		t.Errorf("%d %s", got.status, got.body)
	}
	lab.wantDoc("/docs/b", "")
}

// P5: the same answer after a restart, also where the rollback was cut off by it.
func TestP5RollbackOverARestart(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	lab.write("/docs/a", "before")
	app := trusting(t, a)
	g := launch(t, setup{app: app + "\ndrain 1s", site: lab.site()})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "after")
	hold := newGate(t)
	lab.on("* /docs/a", -1, restWaits(hold))
	id := uuid.NewString()
	asking := a.issue(f.request(checkpoint, ""))
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q}`, id, checkpoint)
	accepted := g.call(with(asking, request{path: api.RollbackPath, body: body, header: headers{"Prefer": "respond-async"}}))
	if accepted.status != http.StatusAccepted || accepted.header.Get("Location") != api.RollbackURL(id)+"?checkpoint_id="+checkpoint {
		t.Fatalf("%d %v %s", accepted.status, accepted.header, accepted.body)
	}
	stop(t)
	hold.open()

	g = launch(t, setup{app: app, site: lab.site(), store: g.store})
	f.gateway = g
	got := g.call(with(asking, request{path: api.RollbackPath, body: body, header: headers{"Prefer": "wait=20"}}))
	first := got.undone(t, rollback.Completed)
	lab.wantDoc("/docs/a", "before")
	if first.ID != "urn:uuid:"+id {
		t.Errorf("%+v", first)
	}
	if again := g.call(with(asking, request{path: api.RollbackPath, body: body})); again.body != got.body {
		t.Errorf("%s\n%s", got.body, again.body)
	}
	lab.wantEffects("changed /docs/a", "changed /docs/a")
}

// The paths are the gateway's own: nothing is guarded there, and `endpoints off` leaves them
// to the upstream; agent_guard_endpoints answers them too.
func TestRollbackPathsOfASite(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: fmt.Sprintf("agent_proxy %s {\n endpoints off\n }", lab.addr)})
	for _, path := range []string{api.RollbackPath, api.ATDRollbackPath, api.AERRRollbackPath} {
		g.call(request{path: path})
		lab.arrived("POST "+path, 1)
	}
	stop(t)
	g = launch(t, setup{app: trusting(t, a), site: "agent_guard_endpoints\n respond 404"})
	for _, path := range []string{api.RollbackPath, api.ATDRollbackPath, api.AERRRollbackPath} {
		if got := g.call(request{path: path, body: "{}"}); got.status != 401 || got.header.Get("Execution-Checkpoint") != "" {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	stop(t)
	g = launch(t, setup{app: "identity " + gatewayIdentity + " {\n key_file " + t.TempDir() + "/identity\n }", site: "agent_guard_endpoints\n respond 404"})
	g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{path: api.RollbackPath, body: "{}"})).refusedFor(t, 403, "untrusted")
	stop(t)
	g = launch(t, setup{site: "agent_guard_endpoints\n respond 204"})
	if got := g.call(request{path: api.RollbackPath, body: "{}"}); got.status != 404 && got.status != 204 {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// A token whose time is over finds the rollback that it has asked for, and begins none.
func TestP5LateTokenFindsItsRollback(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: lab.site(), badger: true})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	claims := f.request(checkpoint, "")
	var short, late *ect.Token
	var id string
	var first reply
	for claims.Life = time.Second; short == nil || first.late(short); claims.Life *= 2 {
		past := time.Now().Add(2*time.Second - ect.Skew) // the skew of clocks is over soon
		short, late, id = a.issueAt(past, claims), a.issueAt(past, claims), uuid.NewString()
		first = f.asksWith(short, id, checkpoint, "")
	}
	first.undone(t, rollback.Completed)
	eventually(t, "the token expires", func() bool { return time.Now().After(short.Expires().Add(ect.Skew + time.Second)) })
	if again := f.asksWith(short, id, checkpoint, ""); again.body != first.body {
		t.Errorf("%s\n%s", first.body, again.body)
	}
	f.asksWith(late, uuid.NewString(), checkpoint, "").refusedFor(t, 403, "expired")
}
