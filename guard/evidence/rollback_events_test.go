package evidence_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	rollbackID = "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"
	monitor    = "spiffe://example.com/agent/monitor"
	classify   = "spiffe://example.com/agent/classify"
	asker      = "spiffe://example.com/agent/asker"
)

// finished is the rollback of Figures 11 and 12.
func finished(workflow, checkpoint, start string) *rollback.Rollback {
	return &rollback.Rollback{
		ID: rollbackID, Checkpoint: checkpoint, Workflow: workflow, Scope: rollback.SubDAG, Reason: "Upstream cascading failure",
		Requester: asker, Status: rollback.Completed, Tokens: rollback.Tokens{Start: start},
		Before: sha256.Sum256([]byte("before")), After: sha256.Sum256([]byte("after")),
		Steps: []rollback.Step{
			{Checkpoint: uuid.NewString(), Agent: monitor, Status: rollback.Completed},
			{Checkpoint: uuid.NewString(), Agent: classify, Status: rollback.Escalated},
			{Checkpoint: checkpoint, Agent: asker, Status: rollback.Completed},
		},
	}
}

// wantFigure holds a token against the claims of a figure, each and no others in ext.
func wantFigure(t *testing.T, payload, figure string) {
	t.Helper()
	var got, want map[string]any
	for text, into := range map[string]*map[string]any{payload: &got, figure: &want} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatal(err, text)
		}
	}
	for name, value := range want {
		if !reflect.DeepEqual(got[name], value) {
			t.Errorf("%s: %v, want %v", name, got[name], value)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		common := slices.Contains([]string{"iss", "aud", "iat", "exp", "wid", "jti"}, name)
		if _, ok := want[name]; !ok && !common {
			t.Errorf("%s is in no figure", name)
		}
	}
}

// Cascade 4.4.1, Figure 11.
func TestCascade441RollbackStart(t *testing.T) {
	b := newBench(t)
	workflow, failure, checkpoint := uuid.NewString(), uuid.NewString(), uuid.NewString()
	d, err := b.builder.RollbackStart(time.Now(), finished(workflow, checkpoint, ""), failure)
	if err != nil {
		t.Fatal(err)
	}
	wantFigure(t, d.Payload(), fmt.Sprintf(`{"jti": %q, "exec_act": "rollback_start", "par": [%q], "wid": %q, "aud": [%q, %q], "ext": {
		"cascade.rollback_id": "urn:uuid:%s", "cascade.checkpoint_id": %q, "cascade.scope": "sub_dag",
		"cascade.reason": "Upstream cascading failure"}}`,
		b.evidence.RollbackStartID(rollbackID), failure, workflow, identity, asker, rollbackID, checkpoint))
	if len(d.Lacks()) > 0 {
		t.Errorf("it lacks %v", d.Lacks())
	}
}

// Cascade 4.4.1, Figure 12; ATD's checkpoint_id besides. 4.3.3: the agents that could not
// be rolled back.
func TestCascade441RollbackComplete(t *testing.T) {
	b := newBench(t)
	workflow, checkpoint, start := uuid.NewString(), uuid.NewString(), uuid.NewString()
	r := finished(workflow, checkpoint, start)
	figure := func(members string) string {
		return fmt.Sprintf(`{"jti": %q, "exec_act": "rollback_complete", "par": [%q], "out_hash": %q, "ext": {
			"cascade.rollback_id": "urn:uuid:%s", "cascade.checkpoint_id": %q, "cascade.state_hash_before": %q, "cascade.state_hash_after": %q,
			"cascade.cascaded": [{"agent": %q, "status": "completed"}, {"agent": %q, "status": "escalated"}], %s}}`,
			b.evidence.RollbackCompleteID(rollbackID), start, ect.HashOf(r.After), rollbackID, checkpoint,
			ect.HashOf(r.Before).Prefixed(), ect.HashOf(r.After).Prefixed(), monitor, classify, members)
	}
	for _, c := range []struct {
		status         rollback.Status
		unknown, mixed bool
		members        string
	}{
		{rollback.Partial, false, false, `"cascade.status": "partial", "cascade.failed_agents": ["` + classify + `"]`},
		{rollback.Partial, false, true, `"cascade.status": "partial", "cascade.failed_agents": ["` + classify + `"], "agent_guard.effect": "mixed"`},
		{rollback.Failed, true, true, `"cascade.status": "failed", "cascade.failed_agents": ["` + classify + `"], "agent_guard.effect": "unknown"`},
	} {
		r.Status, r.Unknown, r.Mixed = c.status, c.unknown, c.mixed
		d, err := b.builder.RollbackComplete(time.Now(), r)
		if err != nil {
			t.Fatal(err)
		}
		wantFigure(t, d.Payload(), figure(c.members))
	}
	// It follows from the request too, by which its requester knows it.
	r.Token = uuid.NewString()
	d, err := b.builder.RollbackComplete(time.Now(), r)
	if err != nil || fmt.Sprint(d.Parents()) != fmt.Sprint([]string{start, r.Token}) {
		t.Errorf("%v, %v", d.Parents(), err)
	}
	// A completed one without a state or others, of one of several checkpoints under one id.
	r = finished(workflow, checkpoint, start)
	r.ID, r.Named = uuid.NewString(), rollbackID
	r.Steps, r.Before, r.After = r.Steps[2:], [32]byte{}, [32]byte{}
	d, err = b.builder.RollbackComplete(time.Now(), r)
	if err != nil {
		t.Fatal(err)
	}
	wantFigure(t, d.Payload(), fmt.Sprintf(`{"exec_act": "rollback_complete", "par": [%q], "ext": {"cascade.rollback_id": "urn:uuid:%s",
		"cascade.checkpoint_id": %q, "cascade.status": "completed", "cascade.cascaded": []}}`, start, rollbackID, checkpoint))
}

// Cascade 4.4.2: what became of one agent with several steps. P6: an open step is not done.
func TestP6AgentsOfARollback(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		steps []rollback.Status
		want  string
	}{
		{[]rollback.Status{rollback.Completed, rollback.Completed}, "completed"},
		{[]rollback.Status{rollback.Completed, rollback.Escalated}, "partial"},
		{[]rollback.Status{rollback.Failed, rollback.Completed, rollback.Failed}, "partial"},
		{[]rollback.Status{rollback.Escalated, rollback.Escalated}, "escalated"},
		{[]rollback.Status{rollback.Escalated, rollback.Failed}, "failed"},
		{[]rollback.Status{rollback.Partial, rollback.Failed}, "partial"},
		{[]rollback.Status{""}, "failed"},
		{[]rollback.Status{"", rollback.Completed}, "partial"},
	} {
		r := finished("", uuid.NewString(), "")
		r.Steps = r.Steps[2:]
		for _, s := range c.steps {
			r.Steps = append(r.Steps, rollback.Step{Checkpoint: uuid.NewString(), Agent: monitor, Status: s})
		}
		d, err := b.builder.RollbackComplete(time.Now(), r)
		if err != nil {
			t.Fatal(err)
		}
		list, _ := d.Ext().Outcomes(ect.MemberCascaded)
		failed, _ := d.Ext().Texts(ect.MemberFailedAgents)
		if len(list) != 1 || list[0] != (ect.Outcome{Agent: monitor, Status: c.want}) || (len(failed) > 0) != (c.want != "completed") {
			t.Errorf("%v: %v, failed %v", c.steps, list, failed)
		}
	}
}

// Lists lose their end where they are too long for a token, and nothing else does.
func TestLongListsOfARollback(t *testing.T) {
	b := newBench(t)
	r := finished("", uuid.NewString(), uuid.NewString())
	r.Status, r.Mixed = rollback.Partial, true
	for n := range 1000 {
		r.Steps = append(r.Steps, rollback.Step{Checkpoint: uuid.NewString(), Agent: fmt.Sprint("spiffe://example.com/agent/", n), Status: rollback.Failed})
	}
	d, err := b.builder.RollbackComplete(time.Now(), r)
	if err != nil {
		t.Fatal(err)
	}
	list, _ := d.Ext().Outcomes(ect.MemberCascaded)
	failed, _ := d.Ext().Texts(ect.MemberFailedAgents)
	effect, _ := d.Ext().Text("agent_guard.effect")
	if len(list) >= 1000 || len(failed) >= 1000 || len(list) == 0 || len(failed) == 0 || effect != "mixed" {
		t.Errorf("%d and %d agents, %q", len(list), len(failed), effect)
	}
	r.Reason = strings.Repeat("é\x00\n", 400)
	start, err := b.builder.RollbackStart(time.Now(), r, r.Checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	if reason, _ := start.Ext().Text(ect.MemberReason); len(reason) > 512 || strings.Trim(reason, "?") != "" {
		t.Errorf("reason %q", reason)
	}
}

// Cascade 4.4.2, Figure 13: the ledger has the error, below it the start, below that one
// node for each step.
func TestCascade442AuditTrail(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	call := b.recordCall(t, call(workflow), evidence.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	checkpoint, failure := call[0].ID(), call[2].ID()
	r := finished(workflow, checkpoint, "")
	now := time.Now()
	start, err := b.builder.RollbackStart(now, r, failure)
	if err != nil {
		t.Fatal(err)
	}
	r.Start = start.ID()
	drafts := []*ect.Draft{start}
	add := func(d *ect.Draft, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		drafts = append(drafts, d)
	}
	r.Steps[0].After, r.Steps[1].Unknown, r.Steps[1].Reason = r.After, true, "answer-lost"
	add(b.builder.RollbackStep(now, r, &r.Steps[0]))
	add(b.builder.RollbackStep(now, r, &r.Steps[1]))
	add(b.builder.Compensate(now, r, &r.Steps[2]))
	add(b.builder.RollbackError(now, r, r.Steps[1].Checkpoint, "timeout", "The rollback was not done in time."))
	add(b.builder.RollbackComplete(now, r))
	if err := b.evidence.Append(t.Context(), now, nil, drafts...); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{
		"rollback_start " + failure, "rollback_complete " + start.ID(), "rollback_complete " + start.ID(),
		"compensate " + start.ID() + " " + checkpoint, "error " + start.ID(), "rollback_complete " + start.ID(),
	} {
		token := b.entry(t, workflow, drafts[i].ID())
		if got := token.Action() + " " + strings.Join(token.Parents(), " "); got != want || len(token.Lacks()) > 0 {
			t.Errorf("%s, want %s; it lacks %v", got, want, token.Lacks())
		}
	}
	wantFigure(t, drafts[1].Payload(), fmt.Sprintf(`{"jti": %q, "exec_act": "rollback_complete", "par": [%q], "out_hash": %q, "ext": {
		"cascade.rollback_id": "urn:uuid:%s", "cascade.checkpoint_id": %q, "cascade.status": "completed", "cascade.state_hash_after": %q}}`,
		b.evidence.RollbackStepID(rollbackID, r.Steps[0].Checkpoint), start.ID(), ect.HashOf(r.After), rollbackID, r.Steps[0].Checkpoint, ect.HashOf(r.After).Prefixed()))
	wantFigure(t, drafts[2].Payload(), fmt.Sprintf(`{"exec_act": "rollback_complete", "par": [%q], "ext": {
		"cascade.rollback_id": "urn:uuid:%s", "cascade.checkpoint_id": %q, "cascade.status": "escalated", "cascade.reason": "answer-lost",
		"agent_guard.effect": "unknown"}}`, start.ID(), rollbackID, r.Steps[1].Checkpoint))
	wantFigure(t, drafts[3].Payload(), fmt.Sprintf(`{"exec_act": "compensate", "par": [%q, %q], "ext": {
		"cascade.rollback_id": "urn:uuid:%s", "cascade.checkpoint_id": %q, "cascade.status": "completed"}}`,
		start.ID(), checkpoint, rollbackID, checkpoint))
	wantFigure(t, drafts[4].Payload(), fmt.Sprintf(`{"exec_act": "error", "par": [%q], "ext": {"cascade.severity": "critical",
		"cascade.error_type": "timeout", "cascade.description": "The rollback was not done in time.", "cascade.checkpoint_id": %q,
		"cascade.upstream_errors": [], "agent_guard.attempt": true}}`, start.ID(), r.Steps[1].Checkpoint))
	// A step is recorded once, under whatever event, and over all restarts.
	if again, err := b.builder.RollbackStep(now, r, &r.Steps[2]); err != nil || again.ID() != drafts[3].ID() {
		t.Errorf("%v", err)
	}
	b.close(t)
	b.open(t)
	if again, err := b.builder.RollbackStart(now, r, failure); err != nil || again.ID() != start.ID() {
		t.Errorf("%v", err)
	}
}

// ATD "Basic Rollback" and AERR "Rollback Response": the result follows from the token
// that asked, in the names of its dialect.
func TestRollbackResultsOfTheOlderDialects(t *testing.T) {
	b := newBench(t)
	workflow, checkpoint, request := uuid.NewString(), uuid.NewString(), uuid.NewString()
	r := finished(workflow, checkpoint, uuid.NewString())
	agents := fmt.Sprintf(`[{"agent": %q, "status": "completed"}, {"agent": %q, "status": "escalated"}]`, monitor, classify)
	result := func(v ect.Vocabulary) *ect.Token {
		t.Helper()
		token, err := b.builder.RollbackResult(time.Now(), r, request, v)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := b.builder.RollbackResult(time.Now(), r, request, v); err != nil || again.ID() != token.ID() || token.ID() == b.evidence.RollbackCompleteID(rollbackID) {
			t.Errorf("%v %s %s", err, again.ID(), token.ID())
		}
		if len(token.Lacks()) > 0 || token.Event() != ect.EventRollbackComplete {
			t.Errorf("%s lacks %v", token.Action(), token.Lacks())
		}
		return token
	}
	for _, status := range []rollback.Status{rollback.Completed, rollback.Partial, rollback.Escalated, rollback.Failed} {
		r.Status = status
		wantFigure(t, result(ect.ATD).Payload(), fmt.Sprintf(`{"exec_act": "atd:rollback_result", "par": [%q], "out_hash": %q, "aud": [%q, %q], "ext": {
			"atd.status": %q, "atd.checkpoint_id": %q, "atd.cascaded": %s}}`, request, ect.HashOf(r.After), identity, asker, status, checkpoint, agents))
		action := "aerr:rollback_complete"
		if status == rollback.Escalated {
			action = "aerr:rollback_escalated"
		}
		wantFigure(t, result(ect.AERR).Payload(), fmt.Sprintf(`{"exec_act": %q, "par": [%q], "out_hash": %q, "ext": {
			"aerr.rollback_id": "urn:uuid:%s", "aerr.status": %q, "aerr.state_hash_before": %q, "aerr.state_hash_after": %q, "aerr.cascaded": %s}}`,
			action, request, ect.HashOf(r.After), rollbackID, status, ect.HashOf(r.Before).Prefixed(), ect.HashOf(r.After).Prefixed(), agents))
	}
	r.Mixed, r.Requester = true, evidence.CallerName(execution.CallerHash{1})
	token := result(ect.ATD)
	if effect, _ := token.Ext().Text("agent_guard.effect"); effect != "mixed" || len(token.Audience()) != 1 {
		t.Errorf("%s", token.Payload())
	}
}

// P5: however often and from how many sides at once an agent is asked for the same, it is
// asked with one token, which the ledger has; for another rollback with another.
func TestP5RequestIsOneToken(t *testing.T) {
	b := newBench(t)
	workflow, checkpoint := uuid.NewString(), uuid.NewString()
	ask := func(rollback string) string {
		raw, err := b.builder.Request(t.Context(), &evidence.Request{
			Rollback: rollback, Checkpoint: checkpoint, Workflow: workflow, Audience: "https://agent.example.com",
			Reason: "the wrong list", Phase: "execute", Input: ect.Sum([]byte("body")),
		})
		if err != nil {
			t.Error(err)
		}
		return raw
	}
	var all sync.WaitGroup
	got := make([]string, 8)
	for i := range got {
		all.Go(func() { got[i] = ask("r1") })
	}
	all.Wait()
	for _, raw := range got {
		if raw == "" || raw != got[0] {
			t.Fatalf("asked with several tokens: %q", got)
		}
	}
	if ask("r2") == got[0] {
		t.Error("another rollback asks with the same token")
	}
	token, err := ect.ParseInsecure(got[0])
	if err != nil {
		t.Fatal(err)
	}
	cascade, _ := token.Ext().Bool(ect.MemberCascade)
	id, _ := token.Ext().Text(ect.MemberRollbackID)
	reason, _ := token.Ext().Text(ect.MemberReason)
	phase, _ := token.Ext().Text(rollback.MemberPhase)
	if token.Event() != ect.EventRollbackRequest || len(token.Lacks()) > 0 || !cascade || token.Workflow() != workflow ||
		token.ID() != b.evidence.RequestID("r1", checkpoint, token.InputHash(), token.IssuedAt()) || token.Expires().Sub(token.IssuedAt()) != ect.MaxAge ||
		id != "urn:uuid:r1" || reason != "the wrong list" || phase != "execute" || token.InputHash() != ect.Sum([]byte("body")) {
		t.Errorf("%s", token.Payload())
	}
}

// fast is a store whose clock is ahead.
type fast struct {
	store.Store
	by atomic.Int64 // a time.Duration
}

func (f *fast) Now(ctx context.Context) (time.Time, error) {
	now, err := f.Store.Now(ctx)
	return now.Truncate(time.Hour).Add(time.Duration(f.by.Load())), err
}

// P5: verifiers refuse a token that is older than 15 minutes, and a rollback goes on for
// hours: an agent is always asked with one that it would take, and with the same one as
// long as it would.
func TestP5RequestIsAlwaysFresh(t *testing.T) {
	b := newBench(t)
	b.close(t)
	clock := &fast{Store: b.store}
	b.store = clock
	b.open(t)
	r := &evidence.Request{Rollback: "r1", Checkpoint: uuid.NewString(), Workflow: uuid.NewString(), Audience: "https://agent.example.com"}
	seen := map[string]string{}
	for by := time.Duration(0); by < 2*time.Hour; by += time.Minute {
		clock.by.Store(int64(by))
		raw, err := b.builder.Request(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		token, err := ect.ParseInsecure(raw)
		if err != nil {
			t.Fatal(err)
		}
		now, _ := clock.Now(t.Context())
		if age := now.Sub(token.IssuedAt()); age > ect.MaxAge-ect.Skew || !now.Before(token.Expires()) {
			t.Errorf("after %v it is %v old", by, age)
		}
		if before, known := seen[token.ID()]; known && before != raw {
			t.Error("two tokens have one id")
		}
		seen[token.ID()] = raw
	}
	if len(seen) != 12 {
		t.Errorf("%d tokens in two hours", len(seen))
	}
	part := evidence.Request{Rollback: "r3", Checkpoint: r.Checkpoint, Workflow: r.Workflow, Audience: r.Audience, PartOf: rollbackID}
	raw, err := b.builder.Request(t.Context(), &part)
	if err != nil {
		t.Fatal(err)
	}
	if of, err := ect.ParseInsecure(raw); err != nil || !strings.Contains(of.Ext().JSON(), `"agent_guard.part_of":"urn:uuid:`+rollbackID+`"`) {
		t.Errorf("a request for a part: %s, %v", raw, err)
	}
	// A completion may follow from each of them, and from the request for nothing else.
	other, later, phase := *r, *r, *r
	other.Rollback, later.Checkpoint, phase.Phase = "r2", uuid.NewString(), "prepare"
	for id := range seen {
		for _, c := range []struct {
			asked *evidence.Request
			id    string
			want  bool
		}{{r, strings.ToUpper(id), true}, {&other, id, false}, {&later, id, false}, {&phase, id, false}, {r, r.Checkpoint, false}, {r, "", false}, {r, strings.Repeat("x", 1000), false}} {
			if got, err := b.builder.Asked(t.Context(), c.asked, c.id); got != c.want || err != nil {
				t.Errorf("%s of %+v: %t, %v", c.id, c.asked, got, err)
			}
		}
	}
}
