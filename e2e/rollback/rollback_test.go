package rollback

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Issue 6 "Rollback", cascade 4.1.2: a PUT is put back, once, however often it is asked; a
// late duplicate does not bring it back.
func TestP5RollbackOfAPut(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	lab.Write("/docs/a", "before")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: lab.Site(), Badger: true})
	f := g.Workflow()
	token, checkpoint := f.Does(a, "PUT", "/docs/a", "after")
	lab.WantDoc("/docs/a", "after")

	id := uuid.NewString()
	asking := a.Issue(f.Request(checkpoint, `, "reason": "a mistake"`))
	first := f.AsksWith(asking, id, checkpoint, `, "reason": "a mistake"`)
	doc := first.Undone(t, rollback.Completed)
	lab.WantDoc("/docs/a", "before")
	if doc.Requester != a.Issuer.Identity() || len(doc.Steps) != 1 || doc.Steps[0].Action != "undo" || len(doc.FollowUp) > 0 || doc.Before == (rollback.Hash{}) || doc.After == (rollback.Hash{}) {
		t.Errorf("%+v", doc)
	}
	result, err := ect.ParseInsecure(doc.ECT)
	if err != nil || result.Event() != ect.EventRollbackComplete || first.Header.Get("Execution-Context") != doc.ECT {
		t.Errorf("%v %q %v", err, doc.ECT, first.Header)
	}
	if again := f.AsksWith(asking, id, checkpoint, `, "reason": "a mistake"`); again.Body != first.Body {
		t.Errorf("%s\n%s", first.Body, again.Body)
	}
	if again := f.Asks(a, id, checkpoint, `, "reason": "a mistake"`); again.Body != first.Body {
		t.Errorf("%s\n%s", first.Body, again.Body)
	}
	if looked := f.Call(harness.With(a.Issue(ect.Claims{Workflow: f.Wid}), harness.Request{Method: "GET", Path: rollback.URL(id)})); looked.Body != first.Body {
		t.Errorf("%d %s", looked.Status, looked.Body)
	}
	lab.WantEffects("changed /docs/a", "changed /docs/a")

	f.AsksWith(asking, uuid.NewString(), checkpoint, "").RefusedFor(t, 403, "replayed")
	f.AsksWith(asking, id, uuid.NewString(), "").RefusedFor(t, 403, "ext")
	f.Asks(a, id, checkpoint, `, "reason": "another"`).Is(t, 422, "rollback-mismatch")
	g.Call(harness.With(token, harness.Request{Method: "PUT", Path: "/docs/a", Body: "after", Header: harness.Headers{"Content-Type": "text/plain"}})).Is(t, 409, "rolled-back")
	// What is undone already is done, under another id too.
	f.Asks(a, uuid.NewString(), checkpoint, "").Undone(t, rollback.Completed)
	lab.WantEffects("changed /docs/a", "changed /docs/a")
}

// Cascade 4.1.1, 4.1.3: a checkpoint and its consequences, in reverse order; what has no
// way back is escalated and not skipped.
func TestCascade413RollbackOfWhatFollowed(t *testing.T) {
	lab, a, b := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b) + harness.UndoesParts, Site: lab.Site(), Badger: true})
	f := g.Workflow()
	root, first := f.Does(a, "PUT", "/docs/a", "1")
	f.Does(b, "POST", "/charges", "{}", root.ID())
	doc := f.Asks(a, uuid.NewString(), first, `, "cascade": true`).Undone(t, rollback.Completed)
	if len(doc.Steps) != 2 || doc.Steps[0].Level >= doc.Steps[1].Level || doc.Steps[1].Checkpoint != first || len(doc.Cascaded) != 1 || doc.Cascaded[0].Agent != b.Issuer.Identity() {
		t.Errorf("%+v", doc)
	}
	lab.WantEffects("created /docs/a", "charged ch_1", "refunded ch_1", "deleted /docs/a")

	f = g.Workflow()
	root, first = f.Does(a, "PUT", "/docs/b", "1")
	_, mail := f.Does(b, "POST", "/mail", "hello", root.ID())
	doc = f.Asks(a, uuid.NewString(), first, `, "scope": "sub_dag"`).Undone(t, rollback.Partial)
	if len(doc.Escalations) == 0 || len(doc.FollowUp) == 0 || !strings.Contains(doc.FollowUp[0], mail) || len(doc.FailedAgents) != 1 {
		t.Errorf("%+v", doc)
	}
	f = g.Workflow()
	_, mail = f.Does(b, "POST", "/mail", "hello")
	f.Asks(b, uuid.NewString(), mail, "").Undone(t, rollback.Escalated)
}

// Cascade 6.1, P3: who has no part in a checkpoint learns nothing, and touches nothing.
func TestP3RollbackOfOthers(t *testing.T) {
	lab, a, b, m := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "m")
	stranger := harness.NewAgent(t, "a") // who has a's name, and another key
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b, m), Site: lab.Site(), Badger: true})
	f := g.Workflow()
	root, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	_, later := f.Does(b, "PUT", "/docs/b", "1", root.ID())
	id := uuid.NewString()

	f.Call(harness.Request{Path: rollback.Path, Body: "{}"}).Is(t, 401, "authentication-required")
	f.Call(harness.Request{Path: rollback.Path, Body: "{}", Header: harness.Headers{"Authorization": "Bearer x"}}).RefusedFor(t, 403, "missing")
	f.Asks(stranger, id, checkpoint, "").RefusedFor(t, 403, "kid")
	unknown := f.Asks(m, id, uuid.NewString(), "")
	unknown.Is(t, 403, "not-in-workflow")
	other := g.Workflow()
	for what, got := range map[string]harness.Reply{
		"a stranger in its workflow": f.Asks(m, id, checkpoint, ""), "from another workflow": other.Asks(a, id, checkpoint, ""),
		"who came later": f.Asks(b, id, checkpoint, ""), "unknown to its own": f.Asks(a, id, uuid.NewString(), ""),
	} {
		if got.Status != unknown.Status || got.Body != unknown.Body {
			t.Errorf("%s: %d %s", what, got.Status, got.Body)
		}
	}
	f.Asks(a, id, checkpoint, `, "scope": "full_workflow"`) // a has begun the workflow
	f.Asks(b, uuid.NewString(), later, `, "scope": "full_workflow"`).Is(t, 403, "coordinator-required")
	f.Asks(a, uuid.NewString(), later, "") // an ancestor
	look := func(by *harness.Agent, id string) harness.Reply {
		return f.Call(harness.With(by.Issue(ect.Claims{Workflow: f.Wid}), harness.Request{Method: "GET", Path: rollback.URL(id)}))
	}
	if got := look(a, id); got.Status != 200 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	nothing := look(m, uuid.NewString())
	nothing.Is(t, 403, "not-in-workflow")
	if got := look(m, id); got.Body != nothing.Body || got.Status != nothing.Status {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	f.Call(harness.Request{Method: "GET", Path: rollback.URL(id)}).Is(t, 401, "authentication-required")
	lab.WantDoc("/docs/b", "")
}

// Option `lineage workflow`, `coordinators` and `rate`.
func TestRollbackOptions(t *testing.T) {
	lab, a, b, c := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "c")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b, c) + "\nrollback {\n lineage workflow\n coordinators " + c.Issuer.Identity() + "\n rate 2\n }", Site: lab.Site(), Badger: true})
	f := g.Workflow()
	root, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	f.Does(b, "PUT", "/docs/b", "1", root.ID())
	f.Asks(b, uuid.NewString(), checkpoint, `, "keep_dependants": true`).Undone(t, rollback.Completed)
	whole := uuid.NewString()
	asking := c.Issue(f.Request(checkpoint, `, "scope": "full_workflow"`))
	f.AsksWith(asking, whole, checkpoint, `, "scope": "full_workflow"`).Undone(t, rollback.Completed)
	lab.WantDoc("/docs/b", "")
	// The workflow's bound is reached; a repetition is answered all the same (C-6.1-d).
	over := f.Asks(a, uuid.NewString(), checkpoint, "")
	over.Is(t, 429, "quota-exceeded")
	if over.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	f.AsksWith(asking, whole, checkpoint, `, "scope": "full_workflow"`).Undone(t, rollback.Completed)
}

// ATD and AERR "Rollback Protocol": the older paths, in their words.
func TestRollbackInOlderDialects(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: lab.Site(), Badger: true})
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	atd := a.Issue(ect.Claims{Workflow: f.Wid, Action: "atd:rollback_request", Vocabulary: ect.ATD, Parents: []string{checkpoint},
		Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, true)})
	var result struct {
		Action  string         `json:"exec_act"`
		Parents []string       `json:"par"`
		Ext     map[string]any `json:"ext"`
		ECT     string         `json:"ect"`
	}
	for range 2 {
		got := g.Call(harness.With(atd, harness.Request{Path: rollback.ATDPath}))
		if err := json.Unmarshal([]byte(got.Body), &result); err != nil || got.Status != 200 {
			t.Fatalf("%d %s %v", got.Status, got.Body, err)
		}
		if result.Action != "atd:rollback_result" || fmt.Sprint(result.Parents) != "["+atd.ID()+"]" || result.Ext["atd.status"] != "completed" ||
			result.Ext["atd.checkpoint_id"] != checkpoint || got.Header.Get("Execution-Context") != result.ECT {
			t.Errorf("%+v", result)
		}
	}
	lab.WantDoc("/docs/a", "")

	root, checkpoint := f.Does(a, "PUT", "/docs/b", "1")
	failure := a.Issue(ect.Claims{Workflow: f.Wid, Action: "aerr:error", Vocabulary: ect.AERR, Parents: []string{root.ID()},
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, checkpoint)})
	if got := g.Call(harness.Request{Path: "/.well-known/cascade/errors", Body: failure.Raw(), Header: harness.Headers{"Content-Type": ect.MediaType}}); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	aerr := a.Issue(ect.Claims{Workflow: f.Wid, Action: "aerr:rollback_request", Vocabulary: ect.AERR, Parents: []string{failure.ID()}})
	got := g.Call(harness.With(aerr, harness.Request{Path: rollback.AERRPath,
		Body: fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "reason": "why", "cascade": true}`, uuid.NewString(), checkpoint)}))
	if err := json.Unmarshal([]byte(got.Body), &result); err != nil || result.Action != "aerr:rollback_complete" || result.Ext["aerr.status"] != "completed" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	lab.WantDoc("/docs/b", "")
}

// P5: the same answer after a restart, also where the rollback was cut off by it.
func TestP5RollbackOverARestart(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	lab.Write("/docs/a", "before")
	app := harness.Trusting(t, a)
	g := harness.Launch(t, harness.Setup{App: app + "\ndrain 1s", Site: lab.Site()})
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "after")
	var restarted atomic.Bool
	lab.On("PUT /docs/a", -1, func(c *harness.RestCall) {
		if !restarted.Load() {
			harness.RestSays(http.StatusServiceUnavailable, "")(c)
			return
		}
		c.Usual()
	})
	id := uuid.NewString()
	asking := a.Issue(f.Request(checkpoint, ""))
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q}`, id, checkpoint)
	accepted := g.Call(harness.With(asking, harness.Request{Path: rollback.Path, Body: body, Header: harness.Headers{"Prefer": "respond-async"}}))
	if accepted.Status != http.StatusAccepted || accepted.Header.Get("Location") != rollback.URL(id)+"?checkpoint_id="+checkpoint {
		t.Fatalf("%d %v %s", accepted.Status, accepted.Header, accepted.Body)
	}
	harness.Eventually(t, "an undo that is tried again", func() bool { return len(lab.All("PUT /docs/a", "")) > 1 })
	harness.Stop(t)
	restarted.Store(true)

	g = harness.Launch(t, harness.Setup{App: app, Site: lab.Site(), Store: g.Store})
	f.Gateway = g
	got := g.Call(harness.With(asking, harness.Request{Path: rollback.Path, Body: body, Header: harness.Headers{"Prefer": "wait=20"}}))
	first := got.Undone(t, rollback.Completed)
	lab.WantDoc("/docs/a", "before")
	if first.ID != "urn:uuid:"+id {
		t.Errorf("%+v", first)
	}
	if again := g.Call(harness.With(asking, harness.Request{Path: rollback.Path, Body: body})); again.Body != got.Body {
		t.Errorf("%s\n%s", got.Body, again.Body)
	}
	lab.WantEffects("changed /docs/a", "changed /docs/a")
}

// The paths are the gateway's own: nothing is guarded there, and `endpoints off` leaves them
// to the upstream; agent_guard_endpoints answers them too.
func TestRollbackPathsOfASite(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: fmt.Sprintf("agent_proxy %s {\n endpoints off\n }", lab.Addr)})
	for _, path := range []string{rollback.Path, rollback.ATDPath, rollback.AERRPath} {
		g.Call(harness.Request{Path: path})
		lab.Arrived("POST "+path, 1)
	}
	harness.Stop(t)
	g = harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_guard_endpoints\n respond 404"})
	for _, path := range []string{rollback.Path, rollback.ATDPath, rollback.AERRPath} {
		if got := g.Call(harness.Request{Path: path, Body: "{}"}); got.Status != 401 || got.Header.Get("Execution-Checkpoint") != "" {
			t.Errorf("%s: %d %s", path, got.Status, got.Body)
		}
	}
	harness.Stop(t)
	g = harness.Launch(t, harness.Setup{App: "identity " + harness.GatewayIdentity + " {\n key_file " + t.TempDir() + "/identity\n }", Site: "agent_guard_endpoints\n respond 404"})
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Path: rollback.Path, Body: "{}"})).RefusedFor(t, 403, "untrusted")
	harness.Stop(t)
	g = harness.Launch(t, harness.Setup{Site: "agent_guard_endpoints\n respond 204"})
	if got := g.Call(harness.Request{Path: rollback.Path, Body: "{}"}); got.Status != 404 && got.Status != 204 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// A token whose time is over finds the rollback that it has asked for, and begins none.
func TestP5LateTokenFindsItsRollback(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: lab.Site(), Badger: true})
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	claims := f.Request(checkpoint, "")
	var short, late *ect.Token
	var id string
	var first harness.Reply
	for claims.Life = time.Second; short == nil || first.Late(short); claims.Life *= 2 {
		past := time.Now().Add(2*time.Second - ect.Skew) // the skew of clocks is over soon
		short, late, id = a.IssueAt(past, claims), a.IssueAt(past, claims), uuid.NewString()
		first = f.AsksWith(short, id, checkpoint, "")
	}
	first.Undone(t, rollback.Completed)
	harness.Eventually(t, "the token expires", func() bool { return time.Now().After(short.Expires().Add(ect.Skew + time.Second)) })
	if again := f.AsksWith(short, id, checkpoint, ""); again.Body != first.Body {
		t.Errorf("%s\n%s", first.Body, again.Body)
	}
	f.AsksWith(late, uuid.NewString(), checkpoint, "").RefusedFor(t, 403, "expired")
}
