package rollbackapi_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	. "github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// P3: a rollback is looked at by who takes part in it, and by coordinators. For all others
// it is as one that does not exist.
func TestP3LookingAtARollback(t *testing.T) {
	s := newSite(t)
	first := s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow)))
	for _, who := range []string{alice, coordinator} {
		got := s.get(URL(askedID), graph.Reader{Issuer: who})
		if got.Code != http.StatusOK || got.Body.String() != first.Body.String() {
			t.Errorf("%s: %d %s", who, got.Code, got.Body)
		}
	}
	s.readers["spiffe://example.com/agent/bob"] = map[string]bool{point: true}
	s.get(URL("urn:uuid:"+askedID), graph.Reader{Issuer: "spiffe://example.com/agent/bob"}).document(http.StatusOK)

	unknown := s.get(URL("11b1c2d3-e4f5-4789-abcd-ef0123456789"), graph.Reader{Issuer: mallory})
	unknown.refused(403, "not-in-workflow", "")
	same(t, "of others", unknown, s.get(URL(askedID), graph.Reader{Issuer: mallory}))
	same(t, "unknown to a coordinator", unknown, s.get(URL("11b1c2d3-e4f5-4789-abcd-ef0123456789"), graph.Reader{Issuer: coordinator}))
	s.get(URL(askedID), graph.Reader{Anonymous: true}).refused(401, "authentication-required", "")
	s.get(URL("x"), graph.Reader{Issuer: alice}).refused(400, "parameter-invalid", "")
}

// A reader may wait for the end.
func TestLookingWaitsWhereAsked(t *testing.T) {
	s := newSite(t)
	end := s.result
	s.result = nil
	s.post(Path, body(askedID, point, ""), issued(t, alice, claims(flow)), "Prefer", "respond-async").document(http.StatusAccepted)
	s.get(URL(askedID), graph.Reader{Issuer: alice}).document(http.StatusAccepted)
	s.result = end
	s.get(URL(askedID)+"?wait=30s", graph.Reader{Issuer: alice}).document(http.StatusOK)
}

// P6, B-normative-f: a document says no more than what is known, and what a person must
// still do.
func TestP6TheDocumentSaysWhatIsLeft(t *testing.T) {
	r := &rollback.Rollback{
		ID: askedID, Checkpoint: point, State: rollback.Finished, Status: rollback.Partial, Unknown: true, Mixed: true,
		Joined: "11b1c2d3-e4f5-4789-abcd-ef0123456789", Before: [32]byte{1}, Escalations: []string{"e1"},
		Plan: &plan.Plan{Passed: []string{"a1"}, Dependants: []string{"a2"}, Missing: []string{"c9"}},
		Steps: []rollback.Step{
			{Checkpoint: "c1", Agent: alice, What: plan.Undo, State: rollback.StepDone, Status: rollback.Completed},
			{Checkpoint: "c2", Agent: mallory, What: plan.Undo, State: rollback.StepDone, Status: rollback.Failed, Reason: "refused", Escalation: "e1"},
			{Checkpoint: "c3", Agent: mallory, What: plan.Wait, State: rollback.StepDone, Status: rollback.Completed, Cancelled: true},
			{Checkpoint: "c4", What: plan.Expired, State: rollback.StepDone, Status: rollback.Escalated, Reason: "of the future"},
			{Checkpoint: "c5", What: plan.Nothing, State: rollback.StepDone, Status: rollback.Completed},
		},
	}
	doc := Describe(r, askedID)
	if doc.Effect != EffectUnknown || doc.Joined != "urn:uuid:"+r.Joined || !strings.HasPrefix(doc.Before, "sha256:") || doc.After != "" {
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
	for _, text := range []string{"Checkpoint c2: the upstream refuses", "Escalation e1 waits", "Checkpoint c4: it is not undone", "`uncovered`", "`dependants`", "`missing`"} {
		if !strings.Contains(left, text) {
			t.Errorf("no %q in\n%s", text, left)
		}
	}
	if strings.Contains(left, "c1") || strings.Contains(left, "c3") {
		t.Error(left)
	}
	r.State, r.Status = rollback.Executing, ""
	if doc := Describe(r, askedID); doc.Status != "" || len(doc.Cascaded) > 0 {
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
	for _, file := range []string{"../../guard/rollback/step.go", "../../guard/rollback/undo/task.go"} {
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
		for _, step := range []rollback.Step{
			{What: plan.Undo, State: rollback.StepDone, Status: rollback.Failed},
			{What: plan.Escalate}, // foreseen
		} {
			step.Checkpoint, step.Reason = "c1", reason
			r := &rollback.Rollback{ID: askedID, Checkpoint: point, State: rollback.Finished, Steps: []rollback.Step{step}}
			if step.State == "" {
				r.State = ""
			}
			lines := Describe(r, askedID).FollowUp
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
	expired := &rollback.Rollback{ID: askedID, Steps: []rollback.Step{{Checkpoint: "c1", What: plan.Expired}}}
	if lines := Describe(expired, askedID).FollowUp; len(lines) != 1 || said[lines[0]] != "checkpoint-expired" {
		t.Errorf("of what has expired it is said %q", lines)
	}
}
