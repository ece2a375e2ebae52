package rollbackapi_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Cascade 4.3.2, Figure 10: a rollback in one request, with the token that tells of it.
func TestCascade432Execute(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow, parents(failure)))
	got := s.post(Path, body(askedID, strings.ToUpper(point), `, "scope": "sub_dag", "reason": "a cause", "urgency": "high", "unknown": [1]`), token)
	doc := got.document(http.StatusOK)
	if doc.Status != rollback.Completed || doc.State != "finished" || doc.RollbackID != "urn:uuid:"+askedID || doc.Scope != plan.SubDAG {
		t.Errorf("%+v", doc)
	}
	if doc.ECT != "signed.complete-"+askedID || got.Header().Get("Execution-Context") != doc.ECT {
		t.Errorf("token %q, header %v", doc.ECT, got.Header())
	}
	want := rollback.Request{
		ID: askedID, Checkpoint: point, Scope: plan.SubDAG, Reason: "a cause", Urgency: "high",
		Token: token.ID(), Error: failure, Unnamed: true, By: alice, Lineage: plan.Ancestor,
	}
	if s.accepted[askedID] != want {
		t.Errorf("%+v, want %+v", s.accepted[askedID], want)
	}
	if len(s.entered) != 1 || s.entered[0] != token.ID() {
		t.Errorf("entered %v", s.entered)
	}
}

// C-4.1.3-b, -c: the word for the scope, else cascade, else the checkpoint alone. The whole
// workflow is a coordinator's, whoever asks for whatever checkpoint.
func TestCascade413Scope(t *testing.T) {
	for more, want := range map[string]plan.Scope{
		``: plan.Single, `, "cascade": false`: plan.Single, `, "cascade": true`: plan.SubDAG,
		`, "cascade": true, "scope": "sub_dag"`: plan.SubDAG, `, "cascade": false, "scope": "single"`: plan.Single, `, "scope": null`: plan.Single,
	} {
		s := newSite(t)
		s.post(Path, body(askedID, point, more), issued(t, alice, claims(flow))).document(http.StatusOK)
		if got := s.accepted[askedID].Scope; got != want {
			t.Errorf("%s: %s", more, got)
		}
	}
	s := newSite(t)
	whole := body(askedID, point, `, "scope": "full_workflow"`)
	s.post(Path, whole, issued(t, alice, claims(flow))).refused(403, "coordinator-required", "")
	s.post(Path, whole, issued(t, mallory, claims(flow))).refused(403, "not-in-workflow", "")
	if len(s.entered)+len(s.bound) > 0 {
		t.Errorf("entered %v", s.entered)
	}
	s.post(Path, whole, issued(t, coordinator, claims(flow))).document(http.StatusOK)
	if !s.accepted[askedID].Coordinator {
		t.Error("not asked as a coordinator")
	}
}

// C-4.3.2-g: what the body must be.
func TestCascade432MalformedRequests(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow))
	for what, text := range map[string]string{
		"empty": "", "no object": "[]", "no id": `{"checkpoint_id": "c"}`, "no checkpoint": `{"rollback_id": "urn:uuid:` + askedID + `"}`,
		"an id that is none": `{"rollback_id": "x", "checkpoint_id": "c"}`, "the nil id": body("00000000-0000-0000-0000-000000000000", point, ""),
		"another phase": `{"rollback_id": "urn:uuid:` + askedID + `", "checkpoint_id": "c", "phase": "prepare"}`,
		"another scope": body(askedID, point, `, "scope": "all"`), "a wrong type": body(askedID, point, `, "cascade": "true"`),
		"both at once": body(askedID, point, `, "scope": "single", "cascade": true`), "neither": body(askedID, point, `, "scope": "sub_dag", "cascade": false`),
		"a number": body(askedID, point, `, "reason": 1`), "a duplicate": body(askedID, point, `, "checkpoint_id": "c"`),
		"something behind": body(askedID, point, "") + "{}", "no UTF-8": body(askedID, point, ", \"reason\": \"\xff\""),
		"a long reason": body(askedID, point, `, "reason": "`+strings.Repeat("x", 513)+`"`), "a control character": body(askedID, "a\n", ""),
		"a long urgency": body(askedID, point, `, "urgency": "`+strings.Repeat("x", 65)+`"`), "cut": body(askedID, point, "")[:40],
		"a dry run": body(askedID, point, `, "dry_run": true`),
	} {
		if got := s.post(Path, text, token); got.Code != 400 {
			t.Errorf("%s: %d %s", what, got.Code, got.Body)
		}
	}
	s.post(Path, body(askedID, point, `, "x": "`+strings.Repeat("x", 16<<10)+`"`), token).refused(413, "body-too-large", "")
	if len(s.accepted)+s.plans+len(s.entered) > 0 {
		t.Errorf("accepted %v, %d plans, entered %v", s.accepted, s.plans, s.entered)
	}
	for method, path := range map[string]string{http.MethodGet: Path, http.MethodPost: URL(askedID), http.MethodPut: ATDPath} {
		r, _ := http.NewRequestWithContext(t.Context(), method, path, nil)
		if got := s.do(r); got.Code != 405 || got.Header().Get("Allow") == "" {
			t.Errorf("%s %s: %d", method, path, got.Code)
		}
	}
}

// C-6.1-c, P3: a checkpoint that is unknown, of another workflow, or of others in the same
// one: the same answer, and nothing is recorded.
func TestP3UnknownAndForeignAreOne(t *testing.T) {
	s := newSite(t)
	unknown := s.post(Path, body(askedID, "d1b1c2d3-e4f5-6789-abcd-ef0123456789", ""), issued(t, alice, claims(flow)))
	unknown.refused(403, "not-in-workflow", "")
	same(t, "of another workflow", unknown, s.post(Path, body(askedID, point, ""), issued(t, alice, claims(foreign))))
	same(t, "of others", unknown, s.post(Path, body(askedID, point, ""), issued(t, mallory, claims(flow))))
	same(t, "in ATD's words", unknown, s.post(ATDPath, "", issued(t, mallory, claims(flow, in(ect.ATD), parents(point)))))
	for _, c := range []struct{ path, text string }{
		{Path, body(askedID, "d1b1c2d3-e4f5-6789-abcd-ef0123456789", "")}, {Path, body(askedID, point, "")}, {ATDPath, ""}, {AERRPath, body(askedID, point, "")},
	} {
		token := issued(t, mallory, claims(flow, in(ect.ATD)))
		s.asking = &Asker{Token: token, All: []*ect.Token{token}, Unseen: true}
		same(t, "a parent that is unknown", unknown, s.send(c.path, c.text))
	}
	// What else is wrong is told alike, and what is counted is counted alike.
	limited := newSite(t, func(o *Options) { o.Rate = 1 })
	for _, unseen := range []bool{false, true} {
		task := issued(t, mallory, claims(flow, func(c *ect.Claims) { c.Action = "task" }))
		limited.asking = &Asker{Token: task, All: []*ect.Token{task}, Unseen: unseen}
		limited.send(Path, body(askedID, point, "")).refused(403, "ect-invalid", "exec_act")
		token := issued(t, []string{mallory, mallory + "2"}[map[bool]int{true: 1}[unseen]], claims(flow))
		limited.asking = &Asker{Token: token, All: []*ect.Token{token}, Unseen: unseen}
		limited.send(Path, "{}").refused(400, "parameter-invalid", "")
		limited.send(Path, body(askedID, point, "")).refused(403, "not-in-workflow", "")
		limited.send(Path, body(askedID, point, "")).refused(429, "quota-exceeded", "")
	}
	if len(s.entered)+len(s.bound)+s.executed > 0 {
		t.Errorf("entered %v, bound %v", s.entered, s.bound)
	}

	s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusOK)
	same(t, "an id of others' rollback", unknown, s.post(Path, body(askedID, point, ""), issued(t, mallory, claims(flow))))
	same(t, "from another workflow", unknown, s.post(Path, body(askedID, point, ""), issued(t, alice, claims(foreign))))
	s.post(Path, body(askedID, "unknown", ""), issued(t, coordinator, claims(flow))).refused(404, "checkpoint-unknown", "")
}

// C-4.3.4-d, E-idempotency-a, A-rollback-timeout-d: the same id, or the same token, gets
// the same result, and nothing runs again.
func TestP5TheSameRequestHasOneResult(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow))
	first := s.post(Path, body(askedID, point, ""), token)
	first.document(http.StatusOK)
	same(t, "the same token", first, s.post(Path, body(askedID, point, ""), token))

	s.asking.Late = &ect.Error{Code: ect.CodeExpired}
	same(t, "after the token's time", first, s.send(Path, body(askedID, point, "")))
	again := issued(t, alice, claims(flow))
	same(t, "another token of the same asker", first, s.post(Path, body(askedID, point, ""), again))
	if s.executed != 1 {
		t.Errorf("executed %d times", s.executed)
	}

	other := "11b1c2d3-e4f5-4789-abcd-ef0123456789"
	s.post(Path, body(other, point, ""), token).refused(403, "ect-invalid", "replayed")
	s.post(Path, body(other, point, ""), again).refused(403, "ect-invalid", "replayed")
	s.post(Path, body(askedID, point, `, "cascade": true`), token).refused(403, "ect-invalid", "replayed")
	s.post(Path, body(askedID, point, `, "cascade": true`), issued(t, alice, claims(flow))).refused(422, "rollback-mismatch", "")

	s.asking = &Asker{Token: issued(t, alice, claims(flow)), Late: &ect.Error{Code: ect.CodeExpired}}
	s.send(Path, body(askedID, point, "")).refused(403, "ect-invalid", "expired")
}

// A token that two requests bring at once is bound once: the other one looks again.
func TestP5ATokenIsBoundOnce(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow))
	s.onExecute = func(r rollback.Request) {
		s.onExecute = nil
		s.mu.Lock()
		s.bound[name(token)] = [32]byte{1} // for something else
		s.digests[name(token)] = token.Digest()
		s.mu.Unlock()
	}
	s.post(Path, body(askedID, point, ""), token).refused(403, "ect-invalid", "replayed")
	if s.executed != 0 {
		t.Errorf("executed %d times", s.executed)
	}
}

// A-basic-rollback-a to -f: everything is said in the token, and the answer is a result
// token.
func TestATDBasicRollback(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow, in(ect.ATD), parents(point)))
	got := s.post(ATDPath, "", token)
	want := rollback.Request{
		ID: token.ID(), Checkpoint: point, Scope: plan.SubDAG, Reason: "said in the token",
		Token: token.ID(), By: alice, Lineage: plan.Ancestor,
	}
	if s.accepted[token.ID()] != want {
		t.Errorf("%+v, want %+v", s.accepted[token.ID()], want)
	}
	for _, member := range []string{
		`"exec_act": "atd:rollback_result"`, `"atd.status": "completed"`, fmt.Sprintf(`"atd.checkpoint_id": %q`, point), token.ID(),
	} {
		if !strings.Contains(got.Body.String(), member) {
			t.Errorf("no %s in %s", member, got.Body)
		}
	}
	if raw := got.Header().Get("Execution-Context"); raw == "" || !strings.Contains(got.Body.String(), raw) {
		t.Errorf("token %q", raw)
	}
	s.post(ATDPath, "", issued(t, alice, claims(flow, in(ect.ATD), parents(point, failure)))).refused(403, "ect-invalid", "par")
	s.post(ATDPath, "", issued(t, alice, claims(flow, parents(point), func(c *ect.Claims) { c.Action = "other" }))).refused(403, "ect-invalid", "exec_act")
}

// E-rollback-request-a, -b: the body, and the error that led to it.
func TestAERRRollbackRequest(t *testing.T) {
	for _, path := range []string{AERRPath, "/.well-known/aerr/rollback"} {
		s := newSite(t)
		token := issued(t, alice, claims(flow, in(ect.AERR), parents(failure)))
		got := s.post(path, body(askedID, point, `, "cascade": true, "reason": "why"`), token)
		if got.Code != 200 || !strings.Contains(got.Body.String(), `"exec_act": "aerr:rollback_complete"`) {
			t.Errorf("%d %s", got.Code, got.Body)
		}
		if r := s.accepted[askedID]; r.Error != failure || r.Scope != plan.SubDAG || r.Reason != "why" {
			t.Errorf("%+v", r)
		}
		for _, id := range []string{askedID, "11b1c2d3-e4f5-4789-abcd-ef0123456789"} {
			s.post(path, body(id, point, `, "cascade": true, "reason": "why"`), issued(t, alice, claims(flow, in(ect.AERR), parents(point)))).refused(403, "ect-invalid", "par")
		}
	}
}

// C-6.1-a, A-security-rollback-authorization-b: only a signed token of a workflow is good.
func TestCascade61AskingNeedsASignedToken(t *testing.T) {
	s := newSite(t)
	s.post(Path, body(askedID, point, ""), issued(t, alice, claims(""))).refused(403, "ect-invalid", "wid")
	s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow, func(c *ect.Claims) { c.Input = ect.Sum([]byte("another")) }))).
		refused(403, "ect-invalid", "inp_hash")
	text := body(askedID, point, "")
	s.post(Path, text, issued(t, alice, claims(flow, func(c *ect.Claims) { c.Input = ect.Sum([]byte(text)) }))).document(http.StatusOK)
	s.refuse = &ect.Error{Code: ect.CodeSignature}
	s.send(Path, text).refused(403, "ect-invalid", "signature")
}

// C-6.1-d, B-security-a: new rollbacks are bounded, repetitions are answered.
func TestCascade61Flooding(t *testing.T) {
	s := newSite(t, func(o *Options) { o.Rate = 2 })
	token := issued(t, alice, claims(flow))
	first := s.post(Path, body(askedID, point, ""), token)
	s.post(Path, body("11b1c2d3-e4f5-4789-abcd-ef0123456789", "unknown", ""), issued(t, alice, claims(flow))).refused(403, "not-in-workflow", "")
	over := s.post(Path, body("21b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, alice, claims(flow)))
	over.refused(429, "quota-exceeded", "")
	if over.Header().Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	// Who has no part in the workflow uses nothing up of its own bound.
	s.post(Path, body("31b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, mallory, claims(flow))).refused(403, "not-in-workflow", "")
	s.post(Path, body("41b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, coordinator, claims(flow))).document(http.StatusOK)
	s.post(Path, body("51b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, coordinator, claims(flow))).refused(429, "quota-exceeded", "")
	same(t, "a repetition", first, s.post(Path, body(askedID, point, ""), token))
	s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusOK)
}

// B-normative-e: every refusal says why.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		slug   string
		reason string
	}{
		{rollback.ErrNotInWorkflow, 403, "not-in-workflow", ""},
		{fmt.Errorf("x: %w", checkpoint.ErrExpired), 410, "checkpoint-expired", ""},
		{fmt.Errorf("x: %w", checkpoint.ErrTampered), 409, "checkpoint-tampered", ""},
		{&rollback.ConflictError{Winner: askedID}, 409, "rollback-conflict", ""},
		{&plan.DependedOnError{Dependants: []string{"d1"}}, 409, "cannot-prepare", "depended-on"},
		{&plan.TooManyError{}, 409, "cannot-prepare", "too-large"},
		{&plan.CycleError{Nodes: []string{"n"}}, 409, "cannot-prepare", "cycle"},
		{rollback.ErrCheckpointUnknown, 404, "checkpoint-unknown", ""},
		{rollback.ErrInvalid, 400, "parameter-invalid", ""},
		{rollback.ErrStopping, 503, "shutting-down", ""},
		{rollback.ErrStore, 503, "store-unavailable", ""},
		{context.DeadlineExceeded, 503, "store-unavailable", ""},
	} {
		s := newSite(t)
		s.fail = c.err
		doc := s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow))).refused(c.status, c.slug, c.reason)
		switch c.slug {
		case "rollback-conflict":
			if doc["conflicting_rollback_id"] != "urn:uuid:"+askedID {
				t.Errorf("%v", doc)
			}
		case "cannot-prepare":
			if c.reason == "depended-on" && fmt.Sprint(doc["dependants"]) != "[d1]" {
				t.Errorf("%v", doc)
			}
		}
		if len(s.entered)+len(s.bound) > 0 {
			t.Errorf("%s: entered %v", c.slug, s.entered)
		}
		// Cascade 4.2.3: what does not verify is told as an error, which Execute does.
		tells := c.slug == "checkpoint-tampered" || c.slug == "checkpoint-expired"
		if tells != (s.refusals == 1) {
			t.Errorf("%s: refused by Execute %d times", c.slug, s.refusals)
		}
	}
}

// DESIGN "Settled here": work that outlasts the answer is 202 with its place, for as long
// as the asker wants to wait, and at most 30 s.
func TestWorkThatOutlastsTheAnswer(t *testing.T) {
	for _, c := range []struct {
		prefer, query string
		want          time.Duration
	}{
		{"", "", DefaultWait}, {"wait=3", "", 3 * time.Second}, {"respond-async", "", 0}, {"wait=900", "", LongestWait},
		{`foo, wait="4"; x`, "", DefaultWait}, {"wait=soon", "", DefaultWait}, {"", "?wait=1500ms", 1500 * time.Millisecond},
		{"", "?wait=7", 7 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newSite(t)
			s.result = nil
			began := time.Now()
			got := s.post(Path+c.query, body(askedID, point, ""), issued(t, alice, claims(flow)), "Prefer", c.prefer)
			if took := time.Since(began); took != c.want {
				t.Errorf("%q %q: took %v, want %v", c.prefer, c.query, took, c.want)
			}
			doc := got.document(http.StatusAccepted)
			if got.Header().Get("Location") != URL(askedID) || got.Header().Get("Retry-After") == "" || doc.State != "executing" || doc.Status != "" {
				t.Errorf("%v %+v", got.Header(), doc)
			}
		})
	}
	s := newSite(t)
	if got := s.post(Path+"?wait=soon", body(askedID, point, ""), issued(t, alice, claims(flow))); got.Code != 400 || s.executed > 0 {
		t.Errorf("%d, executed %d times", got.Code, s.executed)
	}
}

// A client that leaves changes nothing: its rollback was accepted, and an exit of the
// gateway ends the wait only.
func TestLeavingChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		exit, end := context.WithCancel(t.Context())
		s := newSite(t, func(o *Options) { o.Waits = exit })
		s.result = nil
		go func() {
			<-s.waited
			end()
		}()
		began := time.Now()
		s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusAccepted)
		if time.Since(began) > 0 || s.executed != 1 {
			t.Errorf("took %v, executed %d", time.Since(began), s.executed)
		}
	})
}
