package graph_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

type recordedDoc struct {
	Recorded []struct {
		JTI, WID, Log, Entry string
		Index                int64
	}
}

// A-error-signaling: an agent's error of a node in its workflow is recorded, with a
// receipt to be had, and makes that node failed.
func TestErrorIsRecorded(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	failed := g.token(bob, anError(task))
	got := g.post(anonymous, failed.Raw())
	var doc recordedDoc
	got.read(201, &doc)
	got.private()
	if len(doc.Recorded) != 1 || doc.Recorded[0].JTI != failed.ID() || doc.Recorded[0].WID != flow || doc.Recorded[0].Index != 1 ||
		doc.Recorded[0].Log != origin || got.Header().Get("Location") != doc.Recorded[0].Entry {
		t.Fatalf("%+v %v", doc, got.Header())
	}
	var entry entryDoc
	g.get(strings.TrimPrefix(doc.Recorded[0].Entry, basePath), asAlice).read(200, &entry)
	if entry.Token != failed.Raw() || entry.Receipt == nil {
		t.Errorf("%+v", entry)
	}
	var graph workflowDoc
	g.get("workflows/"+flow, asAlice).read(200, &graph)
	if graph.Tasks["failed"] != 1 {
		t.Errorf("%+v", graph.Tasks)
	}
	// P5's rule for repeats: the same bytes get the same answer and are recorded once.
	again := g.post(anonymous, failed.Raw())
	if again.Code != 200 || again.Body.String() != got.Body.String() || again.Header().Get("Location") != got.Header().Get("Location") {
		t.Errorf("again: %d %s", again.Code, again.Body)
	}
	if g.recorded != 1 || g.verified != 1 {
		t.Errorf("recorded %d times, verified %d times", g.recorded, g.verified)
	}
}

// The header carries errors where there is no body.
func TestErrorsInTheHeader(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	one, two := g.token(bob, anError(task)), g.token(alice, anError(task))
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", http.NoBody)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Add(ect.FieldName, one.Raw())
	r.Header.Add(ect.FieldName, two.Raw()+", "+one.Raw())
	var doc recordedDoc
	got := g.do(r, anonymous)
	got.read(201, &doc)
	if len(doc.Recorded) != 2 || got.Header().Get("Location") != "" || g.recorded != 1 {
		t.Errorf("%+v", doc)
	}
}

// Several errors are recorded all or none, may be each other's parents, and some of
// them may be recorded already.
func TestSeveralErrors(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	first := g.token(bob, anError(task))
	second := g.token(bob, anError(first))
	var doc recordedDoc
	g.post(anonymous, first.Raw(), second.Raw()).read(201, &doc)
	if len(doc.Recorded) != 2 {
		t.Errorf("%+v", doc)
	}
	third := g.token(bob, anError(second))
	g.post(anonymous, first.Raw(), third.Raw(), first.Raw()).read(201, &doc)
	if len(doc.Recorded) != 2 || g.recorded != 2 {
		t.Errorf("%+v", doc)
	}
	bad := g.token(bob, ect.Claims{Workflow: flow, Action: "error", Parents: []string{nowhere}, Ext: anError(task).Ext})
	g.post(anonymous, g.token(bob, anError(task)).Raw(), bad.Raw()).refused(403, "ect-invalid", "parent-unknown")
	var many []string
	for range ledger.MaxEvents + 1 {
		many = append(many, g.token(bob, anError(task)).Raw())
	}
	g.post(anonymous, many...).refused(400, "ect-invalid", "too-large")
	if g.recorded != 2 {
		t.Errorf("recorded %d times", g.recorded)
	}
	g.post(anonymous, many[1:]...).read(201, &doc)
}

// C-6.2-b and A-false-error-injection-a: parents stand in the token's own workflow.
// Unknown and foreign ones get the identical answer (P3).
func TestParentsOfErrors(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	other := g.add(alice, foreign, "act", nil)
	nowid := g.add(alice, "", "act", nil)
	ckpt := g.add(alice, flow, "checkpoint", checkpoint(), task)
	elsewhere := g.add(alice, foreign, "checkpoint", checkpoint(), other)
	of := func(checkpoint string, parents ...string) reply {
		c := anError(task)
		c.Parents = parents
		c.Ext = ext().Text(ect.MemberSeverity, "warning").Text(ect.MemberErrorType, "new-word").Text(ect.MemberCheckpointID, checkpoint)
		return g.post(anonymous, g.token(bob, c).Raw())
	}
	unknown := of("", nowhere)
	unknown.refused(403, "ect-invalid", "parent-unknown")
	for _, parents := range [][]string{{other.ID()}, {nowid.ID()}, {task.ID(), other.ID()}, {task.ID(), nowhere}} {
		same(t, fmt.Sprint(parents), unknown, of("", parents...))
	}
	of("").refused(403, "ect-invalid", "par")
	// E-security-considerations-f: so does the checkpoint that is named.
	badCheckpoint := of(nowhere, task.ID())
	badCheckpoint.refused(403, "ect-invalid", "ext")
	same(t, "a foreign checkpoint", badCheckpoint, of(elsewhere.ID(), task.ID()))
	same(t, "a checkpoint with a long name", badCheckpoint, of(strings.Repeat("x", 300), task.ID()))
	if g.recorded != 0 {
		t.Fatalf("recorded %d times", g.recorded)
	}
	for _, good := range []reply{of(ckpt.ID(), task.ID()), of(strings.ToUpper(ckpt.ID()), task.ID()), of("", ckpt.ID()), of("", task.ID(), ckpt.ID())} {
		if good.Code != 201 {
			t.Errorf("%d %s", good.Code, good.Body)
		}
	}
}

// A-error-signaling-b to -e, C-6.2-a: what an error token must be.
func TestWhatAnErrorMustSay(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	members := func(b *ect.ExtBuilder) func(*ect.Claims) { return func(c *ect.Claims) { c.Ext = b } }
	severity := func(s string) *ect.ExtBuilder {
		return ext().Text(ect.MemberSeverity, s).Text(ect.MemberErrorType, "timeout")
	}
	for name, c := range map[string]struct {
		change func(*ect.Claims)
		code   string
	}{
		"another event":         {func(c *ect.Claims) { c.Action = "checkpoint" }, "exec_act"},
		"an agent's own action": {func(c *ect.Claims) { c.Action = "act" }, "exec_act"},
		"no workflow":           {func(c *ect.Claims) { c.Workflow = "" }, "wid"},
		"no parents":            {func(c *ect.Claims) { c.Parents = nil }, "par"},
		"no members":            {members(nil), "ext"},
		"no severity":           {members(ext().Text(ect.MemberErrorType, "timeout")), "ext"},
		"no type":               {members(ext().Text(ect.MemberSeverity, "info")), "ext"},
		"another severity":      {members(severity("fatal")), "ext"},
		"a severity by number":  {members(ext().Int(ect.MemberSeverity, 4).Text(ect.MemberErrorType, "timeout")), "ext"},
		"checkpoint by number":  {members(severity("info").Int(ect.MemberCheckpointID, 1)), "ext"},
		"no checkpoint":         {members(severity("info")), ""},
		"null for a checkpoint": {members(severity("error").JSON(ect.MemberCheckpointID, "null")), ""},
		"ATD":                   {func(c *ect.Claims) { c.Vocabulary = ect.ATD }, ""},
		"AERR":                  {func(c *ect.Claims) { c.Vocabulary = ect.AERR }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			claims := anError(task)
			c.change(&claims)
			got := g.post(anonymous, g.token(bob, claims).Raw())
			if c.code != "" {
				got.refused(403, "ect-invalid", c.code)
				return
			}
			got.read(201, &struct{}{})
		})
	}
}

// What is no token of a trusted agent is refused as ECT says.
func TestForgedErrors(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	good := g.token(bob, anError(task))
	parts := strings.Split(good.Raw(), ".")
	stranger := newGate(t) // has other keys
	for name, c := range map[string]struct {
		raw, code string
		status    int
	}{
		"not a token":    {"x", "malformed", 400},
		"no signature":   {parts[0] + "." + parts[1] + ".AAAA", "signature", 403},
		"payload alone":  {parts[1], "level", 403},
		"other keys":     {stranger.token(bob, anError(task)).Raw(), "kid", 403},
		"over one field": {strings.Repeat("x", 70<<10), "too-large", 400},
	} {
		t.Run(name, func(t *testing.T) {
			g.post(asAlice, c.raw).refused(c.status, "ect-invalid", c.code)
		})
	}
	// Another token with an id that is taken: only its signer learns that.
	g.post(anonymous, good.Raw()).read(201, &struct{}{})
	claims := anError(task)
	claims.ID, claims.Life = good.ID(), 5*time.Minute
	g.post(anonymous, g.token(bob, claims).Raw()).refused(403, "ect-invalid", "replayed")
	claims.ID = task.ID()
	claims.Parents = []string{good.ID()}
	g.post(anonymous, g.token(bob, claims).Raw()).refused(403, "ect-invalid", "replayed")
	g.post(anonymous, stranger.token(bob, claims).Raw()).refused(403, "ect-invalid", "kid")
	if g.recorded != 1 {
		t.Errorf("recorded %d times", g.recorded)
	}
}

// What is posted besides tokens.
func TestBodiesOfErrors(t *testing.T) {
	g := newGate(t)
	send := func(kind, body string, header ...string) reply {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", strings.NewReader(body))
		r.Header.Set("Content-Type", kind)
		for _, h := range header {
			r.Header.Add(ect.FieldName, h)
		}
		return g.do(r, asAlice)
	}
	send("", "").refused(403, "ect-invalid", "missing")
	send("application/json", "[]").refused(403, "ect-invalid", "missing")
	send("application/json", `{"error":1}`).refused(400, "ect-invalid", "malformed")
	send("text/plain", "x").refused(400, "parameter-invalid", "")
	send(ect.Draft01.MediaType(), strings.Repeat("x", 2<<20)).refused(400, "ect-invalid", "too-large")
	send("", "", strings.Repeat("x", 9<<10)).refused(400, "ect-invalid", "too-large")
	g.do(httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", nil), anonymous).refused(401, "authentication-required", "")

	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", strings.NewReader("too much for the site"))
	r.Body = http.MaxBytesReader(httptest.NewRecorder(), r.Body, 3)
	g.do(r, asAlice).refused(400, "ect-invalid", "too-large")
	r = httptest.NewRequestWithContext(t.Context(), http.MethodPost, basePath+"errors", brokenBody{})
	g.do(r, asAlice).refused(400, "parameter-invalid", "")
}

type brokenBody struct{}

func (brokenBody) Read([]byte) (int, error) { return 0, errors.New("cut") }

// Another request may record the same token between the look and the recording; the
// same bytes are no conflict, others are.
func TestErrorsAtTheSameTime(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	raced := 0
	first := func(what func() *ect.Token) {
		raced = 0
		g.onRecord = func([]*ect.Token) error {
			if raced++; raced > 1 {
				return nil
			}
			return g.log.Append(t.Context(), events(what()))
		}
	}
	one := g.token(bob, anError(task))
	first(func() *ect.Token { return one })
	g.post(anonymous, one.Raw()).read(200, &struct{}{})

	two := g.token(bob, anError(task))
	claims := anError(task)
	claims.ID, claims.Life = two.ID(), 5*time.Minute
	first(func() *ect.Token { return g.token(bob, claims) })
	g.post(anonymous, two.Raw()).refused(403, "ect-invalid", "replayed")

	// One of two: the other is recorded in the next round.
	three, four := g.token(bob, anError(task)), g.token(bob, anError(task))
	first(func() *ect.Token { return three })
	var doc recordedDoc
	g.post(anonymous, three.Raw(), four.Raw()).read(201, &doc)
	if raced != 2 || len(doc.Recorded) != 2 {
		t.Errorf("%d rounds, %+v", raced, doc)
	}
	g.onRecord = func([]*ect.Token) error { return fmt.Errorf("other: %w", ledger.ErrDuplicate) }
	g.post(anonymous, g.token(bob, anError(task)).Raw()).refused(503, "store-unavailable", "")
}

// P4: what nobody knows is 503, and the gateway's own problems go through.
func TestErrorsFailClosed(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	token := g.token(bob, anError(task))
	for err, slug := range map[error]string{
		errors.New("disk"): "store-unavailable",
		ect.ErrUnavailable: "ect-unavailable",
		problem.New(problem.ShuttingDown, "It goes down."): "shutting-down",
	} {
		g.onRecord = func([]*ect.Token) error { return err }
		g.post(anonymous, token.Raw()).refused(503, slug, "")
	}
	g.onRecord = nil
	verify := g.Verify
	g.Verify = func(*http.Request, []string) ([]*ect.Token, error) {
		return nil, fmt.Errorf("%w: the URL hangs", ect.ErrUnavailable)
	}
	g.post(anonymous, token.Raw()).refused(503, "ect-unavailable", "")
	g.Verify = func(*http.Request, []string) ([]*ect.Token, error) { return nil, nil }
	g.post(anonymous, token.Raw()).refused(503, "store-unavailable", "")
	g.Verify = verify
	if g.recorded != 0 {
		t.Errorf("recorded %d times", g.recorded)
	}
	// A client that has left gets no answer.
	gone, leave := context.WithCancel(t.Context())
	leave()
	r := httptest.NewRequestWithContext(gone, http.MethodGet, basePath+"ledger/entries/0", nil)
	if err := g.Serve(httptest.NewRecorder(), r, asAlice); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A recorded error that has no place yet is waited for, and is answered all the same.
func TestErrorBehindABacklog(t *testing.T) {
	g := newGate(t)
	task := g.add(alice, flow, "act", nil)
	held := ledger.Event{ID: "held", Workflow: flow, Action: "act", Issuer: gateway, Payload: []byte("held"), Unsigned: true}
	if err := g.log.Append(t.Context(), []ledger.Event{held}); err != nil {
		t.Fatal(err)
	}
	token := g.token(bob, anError(task))
	g.onRecord = func([]*ect.Token) error {
		g.release()
		return nil
	}
	var doc recordedDoc
	g.post(anonymous, token.Raw()).read(201, &doc)
	if doc.Recorded[0].Index != 2 {
		t.Errorf("%+v", doc)
	}
}
