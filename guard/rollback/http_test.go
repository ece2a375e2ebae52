package rollback_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	. "github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// Cascade 4.3.2, Figure 10: a rollback in one request, with the token that records it.
func TestCascade432Execute(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow, parents(failure)))
	got := s.post(Path, bodyOf(askedID, strings.ToUpper(point), `, "scope": "sub_dag", "reason": "a cause", "urgency": "high", "unknown": [1]`), token)
	doc := got.document(http.StatusOK)
	if doc.Status != Completed || doc.State != "finished" || doc.ID != "urn:uuid:"+askedID || doc.Scope != SubDAG {
		t.Errorf("%+v", doc)
	}
	if doc.ECT != "signed.complete-"+askedID || got.Header().Get("Execution-Context") != doc.ECT {
		t.Errorf("token %q, header %v", doc.ECT, got.Header())
	}
	want := Request{
		ID: askedID, Checkpoint: point, Scope: SubDAG, Reason: "a cause", Urgency: "high",
		Token: token.ID(), Error: failure, Unnamed: true, By: alice, Lineage: Ancestor,
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
	for more, want := range map[string]Scope{
		``: Single, `, "cascade": false`: Single, `, "cascade": true`: SubDAG,
		`, "cascade": true, "scope": "sub_dag"`: SubDAG, `, "cascade": false, "scope": "single"`: Single, `, "scope": null`: Single,
	} {
		s := newSite(t)
		s.post(Path, bodyOf(askedID, point, more), issued(t, alice, claims(flow))).document(http.StatusOK)
		if got := s.accepted[askedID].Scope; got != want {
			t.Errorf("%s: %s", more, got)
		}
	}
	s := newSite(t)
	whole := bodyOf(askedID, point, `, "scope": "full_workflow"`)
	signed := func(by string) *ect.Token {
		return issued(t, by, claims(flow, saying(new(ect.ExtBuilder).Text(ect.MemberScope, "full_workflow"))))
	}
	s.post(Path, whole, signed(alice)).refused(403, "coordinator-required", "")
	s.post(Path, whole, signed(mallory)).refused(403, "not-in-workflow", "")
	if len(s.entered)+len(s.bound) > 0 {
		t.Errorf("entered %v", s.entered)
	}
	s.post(Path, whole, signed(coordinator)).document(http.StatusOK)
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
		"an id that is none": `{"rollback_id": "x", "checkpoint_id": "c"}`, "the nil id": bodyOf("00000000-0000-0000-0000-000000000000", point, ""),
		"another phase": `{"rollback_id": "urn:uuid:` + askedID + `", "checkpoint_id": "c", "phase": "prepare"}`,
		"another scope": bodyOf(askedID, point, `, "scope": "all"`), "a wrong type": bodyOf(askedID, point, `, "cascade": "true"`),
		"both at once": bodyOf(askedID, point, `, "scope": "single", "cascade": true`), "neither": bodyOf(askedID, point, `, "scope": "sub_dag", "cascade": false`),
		"a number": bodyOf(askedID, point, `, "reason": 1`), "a duplicate": bodyOf(askedID, point, `, "checkpoint_id": "c"`),
		"something behind": bodyOf(askedID, point, "") + "{}", "no UTF-8": bodyOf(askedID, point, ", \"reason\": \"\xff\""),
		"a long reason": bodyOf(askedID, point, `, "reason": "`+strings.Repeat("x", 513)+`"`), "a control character": bodyOf(askedID, "a\n", ""),
		"a long urgency": bodyOf(askedID, point, `, "urgency": "`+strings.Repeat("x", 65)+`"`), "cut": bodyOf(askedID, point, "")[:40],
		"a dry run that is none": bodyOf(askedID, point, `, "dry_run": "yes"`),
		"a hash that is none":    bodyOf(askedID, point, `, "plan_hash": "12"`), "a hash of other digits": bodyOf(askedID, point, `, "plan_hash": "`+strings.Repeat("xy", 32)+`"`),
	} {
		if got := s.post(Path, text, token); got.Code != 400 {
			t.Errorf("%s: %d %s", what, got.Code, got.Body)
		}
	}
	s.post(Path, bodyOf(askedID, point, `, "x": "`+strings.Repeat("x", 16<<10)+`"`), token).refused(413, "body-too-large", "")
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

// C-4.3.2-b to -e, Figure 9: the answer says whether the agents are prepared, and why not; a
// reservation is recorded with the use of the token, which is good for nothing else.
func TestCascade432Prepared(t *testing.T) {
	s := newSite(t, func(o *Rollbacks) { o.Reservation = 7 * time.Second })
	token := issued(t, alice, claims(flow))
	figure9 := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "scope": "sub_dag"}`, askedID, point)
	var first PreparedDocument
	got := s.post(PreparePath, figure9, token)
	got.read(http.StatusOK, &first)
	if first.Status != "prepared" || first.State != "prepared" || first.PlanHash == "" || first.Scope != SubDAG ||
		time.Until(first.Until) > 7*time.Second || time.Until(first.Until) <= 0 || fmt.Sprint(first.Agents) != fmt.Sprintf("[{%s prepared  } {%s prepared  }]", alice, mallory) {
		t.Errorf("%+v", first)
	}
	if len(s.entered) != 1 || len(s.bound) != 1 || s.executed != 0 {
		t.Errorf("entered %v, bound %v, executed %d", s.entered, s.bound, s.executed)
	}
	same(t, "the same token", got, s.post(PreparePath, figure9, token))
	same(t, "another token", got, s.post(PreparePath, figure9, issued(t, alice, claims(flow))))
	s.post(Path, bodyOf(askedID, point, `, "cascade": true`), token).refused(403, "ect-invalid", "replayed")
	s.post(PreparePath, bodyOf(askedID, point, ""), token).refused(400, "parameter-invalid", "")
	other := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q}`, askedID, point)
	s.post(PreparePath, other, issued(t, alice, claims(flow))).refused(422, "rollback-mismatch", "")
	s.post(PreparePath, other, issued(t, mallory, claims(flow))).refused(403, "not-in-workflow", "")

	var shown PreparedDocument
	s.get(URL(askedID), router.Reader{Issuer: alice}).read(http.StatusOK, &shown)
	if shown.Status != "prepared" || shown.PlanHash != first.PlanHash {
		t.Errorf("%+v", shown)
	}
	s.get(URL(askedID), router.Reader{Issuer: "spiffe://example.com/agent/nobody"}).refused(403, "not-in-workflow", "")

	// Figure 10 has no scope: it is that of what was prepared.
	s.post(Path, bodyOf(askedID, point, `, "plan_hash": "`+first.PlanHash+`"`), issued(t, alice, claims(flow))).document(http.StatusOK)
	if r := s.accepted[askedID]; r.Scope != SubDAG || fmt.Sprintf("%x", r.Planned) != first.PlanHash {
		t.Errorf("%+v", r)
	}
}

// C-4.3.2-e: who cannot prepare says why, with 409 and the document, and nothing is in the ledger. A
// dry run says the same, and reserves nothing either where all could.
func TestCascade432CannotPrepareIs409(t *testing.T) {
	for name, c := range map[string]struct {
		refusal   error
		obstacles []Obstacle
		code      int
		want      string
	}{
		"nothing in the way": {nil, nil, 200, fmt.Sprintf(`prepared "" [] [{%s prepared  } {%s prepared  }]`, alice, mallory)},
		"irreversible": {nil, []Obstacle{{Checkpoint: "other", Agent: mallory, Reason: "irreversible"}}, 409,
			fmt.Sprintf(`cannot_prepare "" [other] [{%s cannot_prepare irreversible other} {%s prepared  }]`, mallory, alice)},
		"changed":  {nil, []Obstacle{{Checkpoint: point, Agent: alice, Reason: "changed-since"}}, 409, fmt.Sprintf(`cannot_prepare "" [] [{%s cannot_prepare changed-since %s} {%s prepared  }]`, alice, point, mallory)},
		"conflict": {&ConflictError{Winner: askedID}, nil, 409, fmt.Sprintf(`cannot_prepare "conflict" [] [{%s cannot_prepare conflict } {%s cannot_prepare conflict }]`, alice, mallory)},
		"depended": {&DependedOnError{Dependants: []string{"d1"}}, nil, 409, fmt.Sprintf(`cannot_prepare "depended-on" [] [{%s cannot_prepare depended-on } {%s cannot_prepare depended-on }]`, alice, mallory)},
		"expired":  {checkpoint.ErrExpired, nil, 409, fmt.Sprintf(`cannot_prepare "checkpoint-expired" [] [{%s cannot_prepare checkpoint-expired } {%s cannot_prepare checkpoint-expired }]`, alice, mallory)},
		"tampered": {checkpoint.ErrTampered, nil, 409, fmt.Sprintf(`cannot_prepare "checkpoint-tampered" [] [{%s cannot_prepare checkpoint-tampered } {%s cannot_prepare checkpoint-tampered }]`, alice, mallory)},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			s.refusal, s.obstacles = c.refusal, c.obstacles
			for _, send := range []struct{ path, body string }{
				{Path, bodyOf(askedID, point, `, "dry_run": true`)},
				{PreparePath, fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "dry_run": true}`, askedID, point)},
				{PreparePath, fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q}`, askedID, point)},
			} {
				var doc PreparedDocument
				s.post(send.path, send.body, issued(t, alice, claims(flow))).read(c.code, &doc)
				if got := fmt.Sprintf("%s %q %v %v", doc.Status, doc.Reason, doc.Irreversible, doc.Agents); got != c.want {
					t.Errorf("%s, want %s", got, c.want)
				}
				reserved := c.code == 200 && !strings.Contains(send.body, "dry_run")
				if (len(s.entered) > 0) != reserved || doc.Until.IsZero() == reserved || (doc.State == "planned") == reserved {
					t.Errorf("%s: entered %v: %+v", send.path, s.entered, doc)
				}
			}
			if s.executed > 0 || len(s.bound) != 3 { // a look uses its token up as well
				t.Errorf("executed %d times, bound %v", s.executed, s.bound)
			}
		})
	}
}

// What was prepared is released by who has prepared it, with the same request: nothing is reserved
// any more, and the same prepare is judged anew, with a new token. A release that comes again, or later, says the same
// and ends nothing else; an execute that was faster goes on.
func TestCascade432Release(t *testing.T) {
	s := newSite(t, func(o *Rollbacks) { o.Rate = 5 })
	text := func(more string) string {
		return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "scope": "sub_dag"%s}`, askedID, point, more)
	}
	release := text(`, "phase": "release"`)
	fresh := func(by string) *ect.Token { return issued(t, by, claims(flow)) }
	var doc ReleasedDocument
	early := fresh(alice)
	first := s.post(PreparePath, release, early) // nothing is reserved, and nothing recorded
	first.read(http.StatusOK, &doc)
	if doc.Status != "released" || doc.RollbackID != "urn:uuid:"+askedID || doc.CheckpointID != point || len(s.entered) > 0 {
		t.Errorf("%+v, entered %v", doc, s.entered)
	}
	unknown := s.post(PreparePath, release, fresh(mallory))
	unknown.refused(403, "not-in-workflow", "")

	prepares := fresh(alice)
	s.post(PreparePath, text(""), prepares).read(http.StatusOK, new(PreparedDocument))
	same(t, "a release that came before", first, s.post(PreparePath, release, early))
	same(t, "somebody else's", unknown, s.post(PreparePath, release, fresh(mallory)))
	if s.released != 0 {
		t.Fatal("a stranger has released it")
	}
	token := fresh(alice)
	same(t, "what is reserved", first, s.post(PreparePath, release, token))
	if s.released != 1 || s.bound[flow+"/"+token.ID()] == ([sha256.Size]byte{}) {
		t.Errorf("released %d times, bound %v", s.released, s.bound)
	}
	s.post(Path, text(""), token).refused(403, "ect-invalid", "replayed")
	s.post(PreparePath, text(""), token).refused(403, "ect-invalid", "replayed")

	var again PreparedDocument
	s.post(PreparePath, text(""), prepares).refused(403, "ect-invalid", "replayed")
	s.post(PreparePath, text(""), fresh(alice)).read(http.StatusOK, &again)
	same(t, "the same token, later", first, s.post(PreparePath, release, token))
	if s.released != 1 || again.Until.IsZero() {
		t.Errorf("released %d times: %+v", s.released, again)
	}
	s.post(Path, text(""), fresh(alice)).document(http.StatusOK)
	late := s.post(PreparePath, release, fresh(alice)).document(http.StatusConflict)
	if late.State != "finished" || s.released != 1 {
		t.Errorf("%+v", late)
	}
	s.post(PreparePath, text(`, "phase": "execute"`), fresh(alice)).refused(400, "parameter-invalid", "")
	s.post(Path, release, fresh(alice)).refused(400, "parameter-invalid", "")
	s.post(PreparePath, release, fresh(alice)).refused(429, "quota-exceeded", "") // what is not reserved counts
}

// C-6.1-d: who prepares is counted as who executes, unless it is reserved already.
func TestCascade61PrepareIsCounted(t *testing.T) {
	s := newSite(t, func(o *Rollbacks) { o.Rate = 1 })
	text := func(id string) string {
		return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q}`, id, point)
	}
	token := issued(t, alice, claims(flow))
	s.post(PreparePath, text(askedID), token).read(http.StatusOK, new(PreparedDocument))
	s.post(PreparePath, text(askedID), token).read(http.StatusOK, new(PreparedDocument))
	s.post(PreparePath, text("11b1c2d3-e4f5-4789-abcd-ef0123456789"), issued(t, alice, claims(flow))).refused(429, "quota-exceeded", "")
	s.asking = &Asker{Token: issued(t, mallory, claims(flow)), Unseen: true}
	s.send(PreparePath, text(askedID)).refused(403, "not-in-workflow", "")
}

// C-6.1-d: the parts of a coordinator's rollback are not counted, which is one rollback there: more of
// them than the rate would be out of reach in the first phase. Others cannot call theirs parts.
func TestCascade61PartsAreNotCounted(t *testing.T) {
	s := newSite(t, func(o *Rollbacks) { o.Rate = 1 })
	part := func(n int) string {
		return fmt.Sprintf(`{"rollback_id": "urn:uuid:%db1b1c2d-e4f5-4789-abcd-ef0123456789", "checkpoint_id": %q, "part_of": "urn:uuid:%s"}`, n, point, askedID)
	}
	for n := range 3 {
		s.post(PreparePath, part(n), issued(t, coordinator, claims(flow))).read(http.StatusOK, new(PreparedDocument))
	}
	s.post(PreparePath, part(4), issued(t, alice, claims(flow))).read(http.StatusOK, new(PreparedDocument))
	s.post(PreparePath, part(5), issued(t, alice, claims(flow))).refused(429, "quota-exceeded", "")
}

// Cascade 4.3.4: of two checkpoints that are asked for at once under one id, the later one has a rollback
// of its own, under that id for whoever asks: in the document, for the release, for its token, and at
// its URL.
func TestCascade434IDOfSeveralCheckpoints(t *testing.T) {
	const own = "11b1c2d3-e4f5-4789-abcd-ef0123456789"
	for phase, path := range map[string]string{"prepare": PreparePath, "execute": Path} {
		t.Run(phase, func(t *testing.T) {
			s := newSite(t)
			first := true
			s.kept = func(id, checkpoint string) string {
				if checkpoint != point || id != askedID {
					t.Errorf("%s of %s", id, checkpoint)
				}
				if first { // the other one is recorded right after this
					first = false
					return id
				}
				return own
			}
			s.accepted[askedID] = Request{ID: askedID, Checkpoint: "other", By: alice}
			s.reserved[askedID] = &Prepared{Rollback: &Rollback{ID: askedID, Checkpoint: "other", Requester: alice, State: Reserved}}
			token := issued(t, alice, claims(flow))
			asked := func(more string) string {
				return fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q%s}`, askedID, point, more)
			}
			var doc struct {
				ID string `json:"rollback_id"`
			}
			got := s.post(path, asked(""), token)
			got.read(http.StatusOK, &doc)
			if doc.ID != "urn:uuid:"+askedID || s.accepted[askedID].Checkpoint != "other" {
				t.Errorf("%+v", doc)
			}
			same(t, "the same token", got, s.post(path, asked(""), token))
			if phase == "prepare" {
				if s.reserved[own] == nil || s.reserved[own].Rollback.Named != askedID {
					t.Errorf("%+v", s.reserved)
				}
				s.post(PreparePath, asked(`, "phase": "release"`), issued(t, alice, claims(flow))).read(http.StatusOK, &doc)
				if doc.ID != "urn:uuid:"+askedID || s.released != 1 {
					t.Errorf("%+v, %d released", doc, s.released)
				}
				return
			}
			if r := s.accepted[own]; r.Named != askedID || r.Checkpoint != point {
				t.Errorf("%+v", r)
			}
			shown := s.get(URL(askedID)+"?checkpoint_id="+point, router.Reader{Issuer: alice})
			if shown.Code != http.StatusOK || shown.Body.String() != got.Body.String() {
				t.Errorf("%d %s", shown.Code, shown.Body)
			}
		})
	}
}

// C-6.1-d: further checkpoints under one id of a coordinator are counted as one rollback.
func TestCascade61OneIDIsCountedOnce(t *testing.T) {
	s := newSite(t, func(o *Rollbacks) { o.Rate = 2 })
	n := 0
	s.kept = func(id, _ string) string {
		if n++; n == 1 {
			return id
		}
		return fmt.Sprintf("%d1b1c2d3-e4f5-4789-abcd-ef0123456789", n%10)
	}
	for range 3 {
		s.post(Path, bodyOf(askedID, point, ""), issued(t, coordinator, claims(flow))).document(http.StatusOK)
	}
	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusOK)
	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow))).refused(429, "quota-exceeded", "")
}

// C-6.1-c, P3: a checkpoint that is unknown, of another workflow, or of others in the same
// one: the same answer, and nothing is recorded.
func TestP3UnknownAndForeignAreOne(t *testing.T) {
	s := newSite(t)
	unknown := s.post(Path, bodyOf(askedID, "d1b1c2d3-e4f5-6789-abcd-ef0123456789", ""), issued(t, alice, claims(flow)))
	unknown.refused(403, "not-in-workflow", "")
	same(t, "of another workflow", unknown, s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(foreign))))
	same(t, "of others", unknown, s.post(Path, bodyOf(askedID, point, ""), issued(t, mallory, claims(flow))))
	same(t, "in ATD's words", unknown, s.post(ATDPath, "", issued(t, mallory, claims(flow, in(ect.ATD), parents(point)))))
	for _, c := range []struct{ path, text string }{
		{Path, bodyOf(askedID, "d1b1c2d3-e4f5-6789-abcd-ef0123456789", "")}, {Path, bodyOf(askedID, point, "")}, {ATDPath, ""}, {AERRPath, bodyOf(askedID, point, "")},
	} {
		token := issued(t, mallory, claims(flow, in(ect.ATD)))
		s.asking = &Asker{Token: token, All: []*ect.Token{token}, Unseen: true}
		same(t, "a parent that is unknown", unknown, s.send(c.path, c.text))
	}
	// What else is wrong is refused alike, and what is counted is counted alike.
	limited := newSite(t, func(o *Rollbacks) { o.Rate = 1 })
	for _, unseen := range []bool{false, true} {
		task := issued(t, mallory, claims(flow, func(c *ect.Claims) { c.Action = "task" }))
		limited.asking = &Asker{Token: task, All: []*ect.Token{task}, Unseen: unseen}
		limited.send(Path, bodyOf(askedID, point, "")).refused(403, "ect-invalid", "exec_act")
		token := issued(t, []string{mallory, mallory + "2"}[map[bool]int{true: 1}[unseen]], claims(flow))
		limited.asking = &Asker{Token: token, All: []*ect.Token{token}, Unseen: unseen}
		limited.send(Path, "{}").refused(400, "parameter-invalid", "")
		limited.send(Path, bodyOf(askedID, point, "")).refused(403, "not-in-workflow", "")
		limited.send(Path, bodyOf(askedID, point, "")).refused(429, "quota-exceeded", "")
	}
	if len(s.entered)+len(s.bound)+s.executed > 0 {
		t.Errorf("entered %v, bound %v", s.entered, s.bound)
	}

	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusOK)
	same(t, "an id of others' rollback", unknown, s.post(Path, bodyOf(askedID, point, ""), issued(t, mallory, claims(flow))))
	same(t, "from another workflow", unknown, s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(foreign))))
	s.post(Path, bodyOf(askedID, "unknown", ""), issued(t, coordinator, claims(flow))).refused(404, "checkpoint-unknown", "")
}

// C-4.3.4-d, E-idempotency-a, A-rollback-timeout-d: the same id, or the same token, gets
// the same result, and nothing runs again.
func TestP5TheSameRequestHasOneResult(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow))
	first := s.post(Path, bodyOf(askedID, point, ""), token)
	first.document(http.StatusOK)
	same(t, "the same token", first, s.post(Path, bodyOf(askedID, point, ""), token))

	s.asking.Late = &ect.Error{Code: ect.CodeExpired}
	same(t, "after the token's time", first, s.send(Path, bodyOf(askedID, point, "")))
	again := issued(t, alice, claims(flow))
	same(t, "another token of the same asker", first, s.post(Path, bodyOf(askedID, point, ""), again))
	if s.executed != 1 {
		t.Errorf("executed %d times", s.executed)
	}

	other := "11b1c2d3-e4f5-4789-abcd-ef0123456789"
	s.post(Path, bodyOf(other, point, ""), token).refused(403, "ect-invalid", "replayed")
	s.post(Path, bodyOf(other, point, ""), again).refused(403, "ect-invalid", "replayed")
	s.post(Path, bodyOf(askedID, point, `, "cascade": true`), token).refused(403, "ect-invalid", "replayed")
	s.post(Path, bodyOf(askedID, point, `, "cascade": true`), issued(t, alice, claims(flow))).refused(422, "rollback-mismatch", "")

	s.asking = &Asker{Token: issued(t, alice, claims(flow)), Late: &ect.Error{Code: ect.CodeExpired}}
	s.send(Path, bodyOf(askedID, point, "")).refused(403, "ect-invalid", "expired")
}

// A token that two requests bring at once is bound once: the other one looks again.
func TestP5ATokenIsBoundOnce(t *testing.T) {
	s := newSite(t)
	token := issued(t, alice, claims(flow))
	s.onExecute = func(r Request) {
		s.onExecute = nil
		s.mu.Lock()
		s.bound[name(token)] = [32]byte{1} // for something else
		s.digests[name(token)] = token.Digest()
		s.mu.Unlock()
	}
	s.post(Path, bodyOf(askedID, point, ""), token).refused(403, "ect-invalid", "replayed")
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
	want := Request{
		ID: token.ID(), Checkpoint: point, Scope: SubDAG, Reason: "said in the token",
		Token: token.ID(), By: alice, Lineage: Ancestor,
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
		got := s.post(path, bodyOf(askedID, point, `, "cascade": true, "reason": "why"`), token)
		if got.Code != 200 || !strings.Contains(got.Body.String(), `"exec_act": "aerr:rollback_complete"`) {
			t.Errorf("%d %s", got.Code, got.Body)
		}
		if r := s.accepted[askedID]; r.Error != failure || r.Scope != SubDAG || r.Reason != "why" {
			t.Errorf("%+v", r)
		}
		for _, id := range []string{askedID, "11b1c2d3-e4f5-4789-abcd-ef0123456789"} {
			s.post(path, bodyOf(id, point, `, "cascade": true, "reason": "why"`), issued(t, alice, claims(flow, in(ect.AERR), parents(point)))).refused(403, "ect-invalid", "par")
		}
	}
}

// C-6.1-a, A-security-rollback-authorization-b: only a signed token of a workflow is good.
func TestCascade61AskingNeedsASignedToken(t *testing.T) {
	s := newSite(t)
	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(""))).refused(403, "ect-invalid", "wid")
	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow, func(c *ect.Claims) { c.Input = ect.Sum([]byte("another")) }))).
		refused(403, "ect-invalid", "inp_hash")
	text := bodyOf(askedID, point, "")
	s.post(Path, text, issued(t, alice, claims(flow, func(c *ect.Claims) { c.Input = ect.Sum([]byte(text)) }))).document(http.StatusOK)
	s.refuse = &ect.Error{Code: ect.CodeSignature}
	s.send(Path, text).refused(403, "ect-invalid", "signature")
}

// C-6.1-d, B-security-a: new rollbacks are bounded, repetitions are answered.
func TestCascade61Flooding(t *testing.T) {
	s := newSite(t, func(o *Rollbacks) { o.Rate = 2 })
	token := issued(t, alice, claims(flow))
	first := s.post(Path, bodyOf(askedID, point, ""), token)
	s.post(Path, bodyOf("11b1c2d3-e4f5-4789-abcd-ef0123456789", "unknown", ""), issued(t, alice, claims(flow))).refused(403, "not-in-workflow", "")
	over := s.post(Path, bodyOf("21b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, alice, claims(flow)))
	over.refused(429, "quota-exceeded", "")
	if over.Header().Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	// Who has no part in the workflow uses nothing up of its own bound.
	s.post(Path, bodyOf("31b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, mallory, claims(flow))).refused(403, "not-in-workflow", "")
	s.post(Path, bodyOf("41b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, coordinator, claims(flow))).document(http.StatusOK)
	s.post(Path, bodyOf("51b1c2d3-e4f5-4789-abcd-ef0123456789", point, ""), issued(t, coordinator, claims(flow))).refused(429, "quota-exceeded", "")
	same(t, "a repetition", first, s.post(Path, bodyOf(askedID, point, ""), token))
	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusOK)
}

// B-normative-e: every refusal says why.
func TestRefusalsOfRequests(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		slug   string
		reason string
	}{
		{ErrNotInWorkflow, 403, "not-in-workflow", ""},
		{fmt.Errorf("x: %w", checkpoint.ErrExpired), 410, "checkpoint-expired", ""},
		{fmt.Errorf("x: %w", checkpoint.ErrTampered), 409, "checkpoint-tampered", ""},
		{&ConflictError{Winner: askedID}, 409, "rollback-conflict", ""},
		{&DependedOnError{Dependants: []string{"d1"}}, 409, "depended-on", ""},
		{&TooManyError{}, 409, "cannot-prepare", "too-large"},
		{&CycleError{Nodes: []string{"n"}}, 409, "cannot-prepare", "cycle"},
		{&PlanChangedError{Hash: [32]byte{0xab}}, 409, "plan-changed", ""},
		{ErrCheckpointUnknown, 404, "checkpoint-unknown", ""},
		{ErrInvalid, 400, "parameter-invalid", ""},
		{ErrStopping, 503, "shutting-down", ""},
		{ErrStore, 503, "store-unavailable", ""},
		{context.DeadlineExceeded, 503, "store-unavailable", ""},
	} {
		s := newSite(t)
		s.fail = c.err
		doc := s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow))).refused(c.status, c.slug, c.reason)
		switch c.slug {
		case "rollback-conflict":
			if doc["conflicting_rollback_id"] != "urn:uuid:"+askedID {
				t.Errorf("%v", doc)
			}
		case "plan-changed":
			if hash, _ := doc["plan_hash"].(string); !strings.HasPrefix(hash, "ab00") || len(hash) != 64 {
				t.Errorf("%v", doc)
			}
		case "depended-on":
			if fmt.Sprint(doc["dependants"]) != "[d1]" {
				t.Errorf("%v", doc)
			}
		}
		if len(s.entered)+len(s.bound) > 0 {
			t.Errorf("%s: entered %v", c.slug, s.entered)
		}
		// Cascade 4.2.3: what does not verify is recorded as an error, which Execute does.
		records := c.slug == "checkpoint-tampered" || c.slug == "checkpoint-expired"
		if records != (s.refusals == 1) {
			t.Errorf("%s: refused by Execute %d times", c.slug, s.refusals)
		}
	}
}

// Work that outlasts the answer is 202 with its place, for as long
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
			got := s.post(Path+c.query, bodyOf(askedID, point, ""), issued(t, alice, claims(flow)), "Prefer", c.prefer)
			if took := time.Since(began); took != c.want {
				t.Errorf("%q %q: took %v, want %v", c.prefer, c.query, took, c.want)
			}
			doc := got.document(http.StatusAccepted)
			if got.Header().Get("Location") != URL(askedID)+"?checkpoint_id="+point || got.Header().Get("Retry-After") == "" || doc.State != "executing" || doc.Status != "" {
				t.Errorf("%v %+v", got.Header(), doc)
			}
		})
	}
	s := newSite(t)
	if got := s.post(Path+"?wait=soon", bodyOf(askedID, point, ""), issued(t, alice, claims(flow))); got.Code != 400 || s.executed > 0 {
		t.Errorf("%d, executed %d times", got.Code, s.executed)
	}
}

// A client that leaves changes nothing: its rollback was accepted, and an exit of the
// gateway ends the wait only.
func TestLeavingChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		exit, end := context.WithCancel(t.Context())
		s := newSite(t, func(o *Rollbacks) { o.Waits = exit })
		s.result = nil
		go func() {
			<-s.waited
			end()
		}()
		began := time.Now()
		s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow))).document(http.StatusAccepted)
		if time.Since(began) > 0 || s.executed != 1 {
			t.Errorf("took %v, executed %d", time.Since(began), s.executed)
		}
	})
}

// C-6.1-a, E-rollback-request-b: a token that says that something else is done asks for no
// rollback, on whatever path: upstreams are shown the tokens of calls, and could else undo
// these with them.
func TestCascade61OnlyARequestAsks(t *testing.T) {
	text := bodyOf(askedID, point, "")
	for _, action := range []string{"task", "undo", "rollback_complete", "compensate", "error", "Rollback_request", "Rollback_start"} {
		s := newSite(t)
		other := func(c *ect.Claims) { c.Action = action }
		for _, path := range []string{Path, ATDPath, AERRPath} {
			for _, by := range []string{alice, coordinator} {
				s.post(path, text, issued(t, by, claims(flow, other))).refused(403, "ect-invalid", "exec_act")
			}
		}
		if s.plans+s.executed+len(s.entered) > 0 {
			t.Errorf("%s: %d plans, entered %v", action, s.plans, s.entered)
		}
	}
	for _, v := range []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR} {
		newSite(t).post(Path, text, issued(t, alice, claims(flow, in(v)))).document(http.StatusOK)
	}
	// Figure 11 is of the cascade draft, and asks on its path only.
	start := func(c *ect.Claims) { c.Action = "rollback_start" }
	newSite(t).post(Path, text, issued(t, alice, claims(flow, start))).document(http.StatusOK)
	for _, path := range []string{ATDPath, AERRPath} {
		newSite(t).post(path, text, issued(t, alice, claims(flow, start))).refused(403, "ect-invalid", "exec_act")
	}
}

// C-6.1-a: a token that does not say how far it goes is good for no whole workflow, unless it
// has the hash of the body that says so.
func TestCascade61AWholeWorkflowIsSigned(t *testing.T) {
	text := bodyOf(askedID, point, `, "scope": "full_workflow"`)
	s := newSite(t)
	for _, path := range []string{Path, AERRPath} {
		s.post(path, text, issued(t, coordinator, claims(flow))).refused(403, "ect-invalid", "ext")
	}
	if s.plans+s.executed+len(s.entered) > 0 {
		t.Errorf("%d plans, entered %v", s.plans, s.entered)
	}
	for what, c := range map[string]ect.Claims{
		"said":   claims(flow, saying(new(ect.ExtBuilder).Text(ect.MemberScope, "full_workflow"))),
		"hashed": claims(flow, func(c *ect.Claims) { c.Input = ect.Sum([]byte(text)) }),
	} {
		s := newSite(t)
		s.post(Path, text, issued(t, coordinator, c)).document(http.StatusOK)
		if got := s.accepted[askedID].Scope; got != FullWorkflow {
			t.Errorf("%s: %s", what, got)
		}
	}
}

// C-6.1-a: the signature covers what is done. What the token says the body cannot say
// otherwise, and what the body leaves open the token says.
func TestCascade61TheTokenBindsTheBody(t *testing.T) {
	ext := func() *ect.ExtBuilder { return new(ect.ExtBuilder) }
	const other = "d1b1c2d3-e4f5-6789-abcd-ef0123456789"
	for what, c := range map[string]struct {
		ext   *ect.ExtBuilder
		more  string
		names string // the member that the refusal names; empty is accepted
		scope Scope
	}{
		"nothing":                   {nil, "", "", Single},
		"the checkpoint":            {ext().Text(ect.MemberCheckpointID, strings.ToUpper(point)), "", "", Single},
		"another checkpoint":        {ext().Text(ect.MemberCheckpointID, other), "", "checkpoint_id", ""},
		"the id":                    {ext().Text(ect.MemberRollbackID, "urn:uuid:"+askedID), "", "", Single},
		"the id without its prefix": {ext().Text(ect.MemberRollbackID, askedID), "", "", Single},
		"another id":                {ext().Text(ect.MemberRollbackID, "urn:uuid:"+other), "", "rollback_id", ""},
		"the scope":                 {ext().Text(ect.MemberScope, "sub_dag"), `, "scope": "sub_dag"`, "", SubDAG},
		"the scope alone":           {ext().Text(ect.MemberScope, "sub_dag"), "", "", SubDAG},
		"the scope in other words":  {ext().Text(ect.MemberScope, "sub_dag"), `, "cascade": true`, "", SubDAG},
		"a narrower scope":          {ext().Text(ect.MemberScope, "single"), `, "scope": "full_workflow"`, "scope", ""},
		"a wider scope":             {ext().Text(ect.MemberScope, "sub_dag"), `, "scope": "single"`, "scope", ""},
		"no scope":                  {ext().Text(ect.MemberScope, "all"), "", "scope", ""},
		"a scope of another type":   {ext().Bool(ect.MemberScope, true), "", "scope", ""},
		"cascade alone":             {ext().Bool(ect.MemberCascade, true), "", "", SubDAG},
		"no cascade alone":          {ext().Bool(ect.MemberCascade, false), "", "", Single},
		"no cascade, and a scope":   {ext().Bool(ect.MemberCascade, false), `, "scope": "sub_dag"`, "cascade", ""},
		"cascade, and a whole":      {ext().Bool(ect.MemberCascade, true), `, "scope": "full_workflow"`, "cascade", ""},
		"cascade, and none":         {ext().Bool(ect.MemberCascade, true), `, "cascade": false`, "cascade", ""},
		"both, which contradict":    {ext().Bool(ect.MemberCascade, true).Text(ect.MemberScope, "single"), `, "scope": "single"`, "cascade", ""},
		"cascade of another type":   {ext().Text(ect.MemberCascade, "true"), `, "cascade": true`, "cascade", ""},
		"the reason":                {ext().Text(ect.MemberReason, "why"), `, "reason": "why"`, "", Single},
		"the reason alone":          {ext().Text(ect.MemberReason, "why"), "", "", Single},
		"no reason":                 {ext().Text(ect.MemberReason, ""), `, "reason": "why"`, "", Single},
		"another reason":            {ext().Text(ect.MemberReason, "why"), `, "reason": "for nothing"`, "reason", ""},
		"a long reason":             {ext().Text(ect.MemberReason, strings.Repeat("x", 513)), "", "reason", ""},
		"the whole":                 {ext().Text(MemberPartOf, "urn:uuid:"+other), `, "part_of": "urn:uuid:` + strings.ToUpper(other) + `"`, "", Single},
		"the whole alone":           {ext().Text(MemberPartOf, "urn:uuid:"+other), "", "", Single},
		"another whole":             {ext().Text(MemberPartOf, "urn:uuid:"+other), `, "part_of": "urn:uuid:` + askedID + `"`, "part_of", ""},
		"no whole":                  {ext().Text(MemberPartOf, "x"), "", "part_of", ""},
		"in ATD's words":            {ext().Text("atd.checkpoint_id", other), "", "checkpoint_id", ""},
	} {
		t.Run(what, func(t *testing.T) {
			s := newSite(t)
			for _, by := range []string{alice, coordinator} {
				got := s.post(Path, bodyOf(askedID, point, c.more), issued(t, by, claims(flow, saying(c.ext))))
				if c.names != "" {
					doc := got.refused(403, "ect-invalid", "ext")
					if detail, _ := doc["detail"].(string); !strings.Contains(detail, c.names) {
						t.Errorf("%s is not named: %s", c.names, detail)
					}
					continue
				}
				got.document(http.StatusOK)
				if r := s.accepted[askedID]; r.Scope != c.scope || strings.Contains(what, "reason") && r.Reason != "why" {
					t.Errorf("%+v", r)
				}
				return
			}
			if s.plans+s.executed+len(s.entered) > 0 {
				t.Errorf("%d plans, entered %v", s.plans, s.entered)
			}
		})
	}
	s := newSite(t)
	doc := s.post(Path, bodyOf(askedID, point, `, "scope": "single", "cascade": true`), issued(t, alice, claims(flow))).refused(400, "parameter-invalid", "")
	if detail, _ := doc["detail"].(string); !strings.Contains(detail, "scope") || !strings.Contains(detail, "cascade") {
		t.Errorf("not both are named: %s", detail)
	}
	s.post(ATDPath, "", issued(t, alice, claims(flow, in(ect.ATD), saying(ext().Text(ect.MemberReason, "").Bool(ect.MemberCascade, false).
		Text(ect.MemberCheckpointID, other))))).refused(403, "ect-invalid", "ext")
}

// C-6.1-a: a token that names the checkpoint nowhere is good for none, and only who may ask
// learns that (P3). One that names an error is good for what that follows from.
func TestCascade61TheTokenNamesTheCheckpoint(t *testing.T) {
	for _, c := range []struct {
		name    string
		more    func(*ect.Claims)
		unnamed bool
	}{
		{"in par", parents(point), false}, {"in par, besides another", parents(failure, point), false},
		{"in its members", func(c *ect.Claims) {
			c.Parents, c.Ext = []string{failure}, new(ect.ExtBuilder).Text(ect.MemberCheckpointID, point)
		}, false},
		{"by its action", parents(taken), false},
		{"by the hash of the body", func(c *ect.Claims) { c.Parents, c.Input = nil, ect.Sum([]byte(bodyOf(askedID, point, ""))) }, false},
		{"by an error", parents(failure), true},
	} {
		s := newSite(t)
		s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow, c.more))).document(http.StatusOK)
		if got := s.accepted[askedID].Unnamed; got != c.unnamed {
			t.Errorf("%s: unnamed is %t", c.name, got)
		}
	}
	s := newSite(t)
	for _, nothing := range [][]string{nil, {"a1b1c2d3-e4f5-6789-abcd-ef0123456789"}} {
		token := func(by string) *ect.Token { return issued(t, by, claims(flow, parents(nothing...))) }
		s.post(Path, bodyOf(askedID, point, ""), token(alice)).refused(403, "ect-invalid", "par")
		s.post(Path, bodyOf(askedID, point, ""), token(coordinator)).refused(403, "ect-invalid", "par")
		s.post(Path, bodyOf(askedID, point, ""), token(mallory)).refused(403, "not-in-workflow", "")
	}
	if s.executed+len(s.entered) > 0 {
		t.Errorf("entered %v", s.entered)
	}
}

// P3: a rollback is looked at by who takes part in it, and by coordinators. For all others
// it is as one that does not exist.
func TestP3LookingAtARollback(t *testing.T) {
	s := newSite(t)
	first := s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow)))
	for _, who := range []string{alice, coordinator} {
		got := s.get(URL(askedID), router.Reader{Issuer: who})
		if got.Code != http.StatusOK || got.Body.String() != first.Body.String() {
			t.Errorf("%s: %d %s", who, got.Code, got.Body)
		}
	}
	s.readers["spiffe://example.com/agent/bob"] = map[string]bool{point: true}
	s.get(URL("urn:uuid:"+askedID), router.Reader{Issuer: "spiffe://example.com/agent/bob"}).document(http.StatusOK)

	unknown := s.get(URL("11b1c2d3-e4f5-4789-abcd-ef0123456789"), router.Reader{Issuer: mallory})
	unknown.refused(403, "not-in-workflow", "")
	same(t, "of others", unknown, s.get(URL(askedID), router.Reader{Issuer: mallory}))
	same(t, "unknown to a coordinator", unknown, s.get(URL("11b1c2d3-e4f5-4789-abcd-ef0123456789"), router.Reader{Issuer: coordinator}))
	s.get(URL(askedID), router.Reader{Anonymous: true}).refused(401, "authentication-required", "")
	s.get(URL("x"), router.Reader{Issuer: alice}).refused(400, "parameter-invalid", "")
}

// A reader may wait for the end.
func TestLookingWaitsWhereAsked(t *testing.T) {
	s := newSite(t)
	end := s.result
	s.result = nil
	s.post(Path, bodyOf(askedID, point, ""), issued(t, alice, claims(flow)), "Prefer", "respond-async").document(http.StatusAccepted)
	s.get(URL(askedID), router.Reader{Issuer: alice}).document(http.StatusAccepted)
	s.result = end
	s.get(URL(askedID)+"?wait=30s", router.Reader{Issuer: alice}).document(http.StatusOK)
}

// P6, B-normative-f: a document says no more than what is known, and what a person must
// still do.
func TestP6TheDocumentSaysWhatIsLeft(t *testing.T) {
	r := &Rollback{
		ID: askedID, Checkpoint: point, State: Finished, Status: Partial,
		Joined: "11b1c2d3-e4f5-4789-abcd-ef0123456789", Before: [32]byte{1}, Escalations: []string{"e1"},
		Journal: Journal{Unknown: true, Mixed: true, Plan: &Plan{Passed: []string{"a1"}, Dependants: []string{"a2"}, Missing: []string{"c9"}}},
		Steps: []Step{
			{Checkpoint: "c1", Agent: alice, StepJournal: StepJournal{What: Undo}, State: StepDone, Status: Completed},
			{Checkpoint: "c2", Agent: mallory, StepJournal: StepJournal{What: Undo}, State: StepDone, Status: Failed, Reason: "refused", Escalation: "e1"},
			{Checkpoint: "c3", Agent: mallory, StepJournal: StepJournal{What: Wait, Cancelled: true}, State: StepDone, Status: Completed},
			{Checkpoint: "c4", StepJournal: StepJournal{What: Expired}, State: StepDone, Status: Escalated, Reason: "of the future"},
			{Checkpoint: "c5", StepJournal: StepJournal{What: Nothing}, State: StepDone, Status: Completed},
		},
	}
	doc := Shown(r, askedID)
	if doc.Effect != EffectUnknown || doc.Joined != "urn:uuid:"+r.Joined || doc.Before != r.Before || doc.After != (Hash{}) {
		t.Errorf("%+v", doc)
	}
	var actions []string
	for _, step := range doc.Steps {
		actions = append(actions, step.Action)
	}
	if got := strings.Join(actions, " "); got != "undo undo cancel escalate none" {
		t.Error(got)
	}
	var agents []string
	for _, a := range doc.Cascaded {
		agents = append(agents, a.Agent+" "+string(a.Status))
	}
	if got := strings.Join(agents, ", "); !strings.Contains(got, mallory+" partial") {
		t.Error(got)
	}
	left := strings.Join(doc.FollowUp, "\n")
	for _, text := range []string{"Checkpoint c2: the upstream refuses", "Escalation e1 tells people", "Checkpoint c4: it is not undone", "`uncovered`", "`dependants`", "`missing`"} {
		if !strings.Contains(left, text) {
			t.Errorf("no %q in\n%s", text, left)
		}
	}
	if strings.Contains(left, "c1") || strings.Contains(left, "c3") {
		t.Error(left)
	}
	r.State, r.Status = Executing, ""
	if doc := Shown(r, askedID); doc.Status != "" || len(doc.Cascaded) > 0 {
		t.Errorf("%+v", doc)
	}
}

// The bound fills up again with time, and a clock that is set back fills nothing.
func TestLimit(t *testing.T) {
	now := time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC)
	var l Limit
	for range 2 {
		if _, ok := l.Issuer(now, 2, "i"); !ok {
			t.Fatal("refused")
		}
	}
	retry, ok := l.Issuer(now, 2, "i")
	if ok || retry != 30*time.Second {
		t.Errorf("%v %v", retry, ok)
	}
	if _, ok := l.Issuer(now.Add(-time.Hour), 2, "i"); ok {
		t.Error("an earlier time fills it")
	}
	if _, ok := l.Workflow(now, 2, "i"); !ok {
		t.Error("a workflow is taken for an issuer of its name")
	}
	if _, ok := l.Issuer(now, 2, "j"); !ok {
		t.Error("others are refused")
	}
	if _, ok := l.Issuer(now.Add(30*time.Second), 2, "i"); !ok {
		t.Error("it does not fill")
	}
}

// reasons are the fixed words that steps end with, as their packages declare them.
func reasons(t *testing.T) (all []string) {
	t.Helper()
	files, err := filepath.Glob("../rollback/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || !strings.HasPrefix(strings.ToLower(spec.Names[0].Name), "reason") {
				return true
			}
			for _, value := range spec.Values {
				word, err := strconv.Unquote(value.(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, word)
			}
			return true
		})
	}
	if len(all) < 20 {
		t.Fatalf("only %q were found", all)
	}
	return all
}

// B-normative-f: for every reason there is a sentence that says what a person does about it.
func TestEveryReasonHasARemedy(t *testing.T) {
	said := map[string]string{}
	for _, reason := range reasons(t) {
		for _, step := range []Step{
			{StepJournal: StepJournal{What: Undo}, State: StepDone, Status: Failed},
			{StepJournal: StepJournal{What: Escalate}}, // planned
		} {
			step.Checkpoint, step.Reason = "c1", reason
			r := &Rollback{ID: askedID, Checkpoint: point, State: Finished, Steps: []Step{step}}
			if step.State == "" {
				r.State = ""
			}
			lines := Shown(r, askedID).FollowUp
			if len(lines) != 1 || strings.Contains(lines[0], "it is not undone; look at it") {
				t.Errorf("%s: %q", reason, lines)
				continue
			}
			if other, ok := said[lines[0]]; ok && other != reason {
				t.Errorf("%s and %s say the same", reason, other)
			}
			said[lines[0]] = reason
		}
	}
	expired := &Rollback{ID: askedID, Steps: []Step{{Checkpoint: "c1", StepJournal: StepJournal{What: Expired}}}}
	if lines := Shown(expired, askedID).FollowUp; len(lines) != 1 || said[lines[0]] != "checkpoint-expired" {
		t.Errorf("of what has expired it is said %q", lines)
	}
}

// A coordinator says what decides between its rollback and others, for a part of it; nobody else
// can say that, and what cannot be read is refused.
func TestCascade434PrecedenceOfAPart(t *testing.T) {
	const whole = "21b1c2d3-e4f5-4789-abcd-ef0123456789"
	text := func(more string) string { return bodyOf(askedID, point, `, "scope": "sub_dag"`+more) }
	said := `, "precedence": {"rollback_id": "urn:uuid:` + whole + `", "scope": "full_workflow", "asked": "2026-11-25T12:00:00.000000001Z"}`
	for name, c := range map[string]struct {
		by, more string
		want     Precedence
	}{
		"a coordinator": {coordinator, `, "part_of": "urn:uuid:` + whole + `"` + said, Precedence{
			ID: whole, Scope: FullWorkflow, Asked: time.Date(2026, 11, 25, 12, 0, 0, 1, time.UTC),
		}},
		"of no part":  {coordinator, said, Precedence{}},
		"another":     {alice, `, "part_of": "urn:uuid:` + whole + `"` + said, Precedence{}},
		"without one": {coordinator, `, "part_of": "urn:uuid:` + whole + `"`, Precedence{}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			s.post(Path, text(c.more), issued(t, c.by, claims(flow))).document(http.StatusOK)
			if got := s.accepted[askedID].Precedence; got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	s := newSite(t)
	for _, wrong := range []string{`1`, `{}`, `{"rollback_id": "x", "scope": "single", "asked": "2026-11-25T12:00:00Z"}`,
		`{"rollback_id": "urn:uuid:` + whole + `", "scope": "all", "asked": "2026-11-25T12:00:00Z"}`,
		`{"rollback_id": "urn:uuid:` + whole + `", "asked": "2026-11-25T12:00:00Z"}`,
		`{"rollback_id": "urn:uuid:` + whole + `", "scope": "single", "asked": "noon"}`,
		`{"rollback_id": "urn:uuid:` + whole + `", "scope": "single", "asked": "9999-12-31T23:59:59-01:00"}`,
		`{"rollback_id": "urn:uuid:` + whole + `", "scope": "single", "asked": "0000-01-01T00:00:00+01:00"}`,
	} {
		s.post(Path, text(`, "part_of": "urn:uuid:`+whole+`", "precedence": `+wrong), issued(t, coordinator, claims(flow))).refused(400, "parameter-invalid", "")
	}
}
