package evidence_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// cascade 3.2.4, Figures 4 and 5: the tokens of a breaker's changes have what the drafts
// ask, and an opening follows from the error that caused it.
func TestTokensOfCircuits(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	drafts := b.recordCall(t, call(workflow), evidence.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	failure := drafts[2]
	if failure.ID() != b.evidence.ErrorID(drafts[0].ID()) {
		t.Errorf("the error is %s, and was expected as %s", failure.ID(), b.evidence.ErrorID(drafts[0].ID()))
	}
	parent := failure.ID()
	for _, event := range []ect.Event{ect.EventCircuitOpen, ect.EventCircuitHalfOpen, ect.EventCircuitClose} {
		d, err := b.builder.Circuit(time.Now(), &evidence.Circuit{
			Event: event, Downstream: "spiffe://example.com/agent/b", Workflow: workflow, Parents: []string{parent},
			ErrorRate: 0.75, Window: time.Minute, Cooldown: 30 * time.Second, TotalCooldown: 90 * time.Second, Reason: "error_rate",
		})
		if err != nil {
			t.Fatal(err)
		}
		if d.Event() != event || len(d.Lacks()) > 0 || len(d.Parents()) != 1 || d.Parents()[0] != parent || d.Workflow() != workflow {
			t.Errorf("%s lacks %v", d.Payload(), d.Lacks())
		}
		if d.Action() != string(event) {
			t.Errorf("%q is not the cascade vocabulary's name", d.Action())
		}
		rate, hasRate := d.Ext().Number(ect.MemberErrorRate)
		total, hasTotal := d.Ext().Number(ect.MemberTotalCooldown)
		if closed := event == ect.EventCircuitClose; closed == hasRate || closed != hasTotal || hasRate && rate != 0.75 || hasTotal && total != 90 {
			t.Errorf("%s", d.Payload())
		}
		parent = d.ID()
	}
	rejected, err := b.builder.Circuit(time.Now(), &evidence.Circuit{
		Event: ect.EventCircuitOpen, Downstream: "10.0.0.7:9001", Workflow: workflow, Reason: "rejected", ErrorType: "circuit_open",
	})
	if err != nil {
		t.Fatal(err)
	}
	if kind, _ := rejected.Ext().Text(ect.MemberErrorType); kind != "circuit_open" {
		t.Errorf("%s", rejected.Payload())
	}
	unguarded, err := b.builder.Attempt(time.Now(), &evidence.Attempt{Downstream: "10.0.0.7:9001", Cause: "connection refused"})
	if err != nil || len(unguarded.Lacks()) > 0 || len(unguarded.Parents()) > 0 {
		t.Errorf("%v %v", err, unguarded.Lacks())
	}
	checkpoint := drafts[0].ID()
	rescued, err := b.builder.Attempt(time.Now(), &evidence.Attempt{
		Downstream: "10.0.0.7:9001", Cause: "connection refused", Checkpoint: checkpoint, Workflow: workflow,
		ID: b.evidence.AttemptID(checkpoint, "10.0.0.7:9001"),
	})
	if err != nil || len(rescued.Lacks()) > 0 || len(rescued.Parents()) != 1 || rescued.Parents()[0] != checkpoint ||
		rescued.Workflow() != workflow || rescued.ID() == failure.ID() {
		t.Errorf("%v %s", err, rescued.Payload())
	}
}

// cascade 4.2.1 and ATD "Error Signaling": a checkpoint with all its members before
// the call, its node and, where it failed, an error after it.
func TestNodesOfACall(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	token := b.token(t, ect.Claims{Workflow: workflow})
	drafts := b.recordCall(t, call(workflow, token.ID()), evidence.Outcome{
		Verdict: execution.InDoubt, Cause: execution.CauseDeadline, Status: 0, UpstreamErrors: []string{uuid.NewString()},
	}, token)

	checkpoint := b.entry(t, workflow, drafts[0].ID())
	if checkpoint.Event() != ect.EventCheckpoint || fmt.Sprint(checkpoint.Parents()) != fmt.Sprint([]string{token.ID()}) ||
		checkpoint.Issuer() != identity || checkpoint.Workflow() != workflow {
		t.Errorf("checkpoint %s", checkpoint.Payload())
	}
	if lacks := checkpoint.Lacks(); len(lacks) > 0 {
		t.Errorf("the checkpoint lacks %v", lacks)
	}
	if reversible, ok := checkpoint.Ext().Bool(ect.MemberReversible); reversible || !ok {
		t.Error("P6: nothing undoes the call, and the checkpoint says otherwise")
	}
	node := b.entry(t, workflow, drafts[1].ID())
	if outcome, _ := node.Ext().Text("agent_guard.outcome"); node.Action() != "charge" || outcome != "in_doubt" ||
		fmt.Sprint(node.Parents()) != fmt.Sprint([]string{token.ID(), checkpoint.ID()}) {
		t.Errorf("node %s", node.Payload())
	}
	failure := b.entry(t, workflow, drafts[2].ID())
	severity, _ := failure.Ext().Text(ect.MemberSeverity)
	kind, _ := failure.Ext().Text(ect.MemberErrorType)
	upstream, _ := failure.Ext().Texts(ect.MemberUpstreamErrors)
	about, _ := failure.Ext().Text(ect.MemberCheckpointID)
	if failure.Event() != ect.EventError || severity != "critical" || kind != "timeout" || len(upstream) != 1 || about != checkpoint.ID() ||
		fmt.Sprint(failure.Parents()) != fmt.Sprint([]string{node.ID(), token.ID()}) || len(failure.Lacks()) > 0 {
		t.Errorf("error %s", failure.Payload())
	}
}

// What the configuration says of an action is in the checkpoints of its calls, and what an agent's
// token claims of its own action counts where ATD puts it. The configuration of another gateway is in the
// checkpoints that it has signed; an action's own token marks nothing as configured.
func TestCriticalTokens(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	for name, test := range map[string]struct {
		event ect.Event
		ext   *ect.ExtBuilder
		own   bool
		want  string
	}{
		"a priority": {ext: new(ect.ExtBuilder).Text("atd.resource_priority", "critical"), want: "false  critical"},
		"a severity": {ext: new(ect.ExtBuilder).Text("atd.severity", "critical"), want: "false critical "},
		"a mark":     {event: ect.EventCheckpoint, ext: new(ect.ExtBuilder).Bool("agent_guard.critical", true), want: "true  "},
		"our mark":   {event: ect.EventCheckpoint, ext: new(ect.ExtBuilder).Bool("agent_guard.critical", true), own: true, want: "true  "},
		"an action":  {ext: new(ect.ExtBuilder).Bool("agent_guard.critical", true), want: "false  "},
	} {
		c := ect.Claims{Workflow: workflow, Ext: test.ext, Action: string(test.event)}
		if test.event == "" {
			c.Action = "act"
		}
		token := b.token(t, c)
		if err := b.evidence.Append(t.Context(), time.Now().Add(time.Hour), []*ect.Token{token}); err != nil {
			t.Fatal(err)
		}
		entry, err := b.evidence.Log().Lookup(t.Context(), workflow, token.ID())
		if err != nil {
			t.Fatal(err)
		}
		if r := evidence.RecordOf(&entry, test.own); fmt.Sprint(r.Critical, " ", r.Severity, " ", r.Priority) != test.want {
			t.Errorf("%s: %+v", name, r)
		}
	}
	of := call(workflow, uuid.NewString())
	of.Critical, of.Severity = true, "critical"
	draft, err := b.builder.Checkpoint(time.Now(), of)
	if err != nil {
		t.Fatal(err)
	}
	marked, _ := draft.Ext().Bool("agent_guard.critical")
	if severity, _ := draft.Ext().Text(ect.MemberSeverity); !marked || severity != "critical" {
		t.Errorf("%s", draft.Ext().JSON())
	}
}

// Which failures there are, and how bad they are.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		outcome        evidence.Outcome
		severity, kind string
	}{
		{evidence.Outcome{Verdict: execution.Completed, Status: 201}, "", ""},
		{evidence.Outcome{Verdict: execution.Completed, By: "operator"}, "", ""},
		{evidence.Outcome{Verdict: execution.Released, By: "probe"}, "", ""},
		{evidence.Outcome{Verdict: execution.Completed, Status: 422}, "warning", "action_failed"},
		{evidence.Outcome{Verdict: execution.Completed, Status: 500}, "error", "action_failed"},
		{evidence.Outcome{Verdict: execution.Completed, Status: 200, Cause: execution.CauseInBand}, "error", "action_failed"},
		{evidence.Outcome{Verdict: execution.Completed, Status: 200, Cause: execution.CauseTool}, "warning", "action_failed"},
		{evidence.Outcome{Verdict: execution.Completed, Status: 500, UpstreamErrors: []string{uuid.NewString()}}, "error", "upstream_cascade"},
		{evidence.Outcome{Verdict: execution.Released, Status: 429}, "warning", "resource_exhausted"},
		{evidence.Outcome{Verdict: execution.Released, Status: 401}, "warning", "constraint_violation"},
		{evidence.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent}, "error", "action_failed"},
		{evidence.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}, "critical", "unknown"},
	} {
		b := newBench(t)
		drafts := b.recordCall(t, call(""), c.outcome)
		if c.kind == "" {
			if len(drafts) != 2 {
				t.Errorf("%+v: an error is recorded", c.outcome)
			}
			continue
		}
		if len(drafts) != 3 {
			t.Errorf("%+v: no error is recorded", c.outcome)
			continue
		}
		severity, _ := drafts[2].Ext().Text(ect.MemberSeverity)
		kind, _ := drafts[2].Ext().Text(ect.MemberErrorType)
		if severity != c.severity || kind != c.kind {
			t.Errorf("%+v: %s %s, want %s %s", c.outcome, severity, kind, c.severity, c.kind)
		}
	}
}

// An action that is called like an event is not read as one.
func TestActionNamedLikeAnEvent(t *testing.T) {
	b := newBench(t)
	c := call("")
	c.Action = "atd:checkpoint"
	if drafts := b.recordCall(t, c, evidence.Outcome{Verdict: execution.Completed, Status: 200}); drafts[1].Event() != "" {
		t.Errorf("%s", drafts[1].Payload())
	}
}

// The same workflow has one id, and it is a UUID.
func TestWorkflowIDs(t *testing.T) {
	const id = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
	for name, want := range map[string]string{
		"": "", id: id, strings.ToUpper(id): id,
		"a0b1c2d3e4f56789abcdef0123456789": id, // a trace id
	} {
		if got := evidence.WorkflowID(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	seen := map[string]bool{}
	for _, name := range []string{"w-1", "w-2", "urn:uuid:" + id, "{" + id + "}", uuid.Nil.String(), uuid.Max.String()} {
		got := evidence.WorkflowID(name)
		if parsed, err := uuid.Parse(got); err != nil || parsed == uuid.Nil || parsed == uuid.Max || got == id || seen[got] || got != evidence.WorkflowID(name) {
			t.Errorf("%s: %s", name, got)
		}
		seen[got] = true
	}
}

// P6: nobody can take the id of a node before it is recorded: it follows from a secret of
// the store.
func TestNodeIDsAreSecret(t *testing.T) {
	b, other := newBench(t), newBench(t)
	checkpoint := uuid.NewString()
	id := b.evidence.NodeID(checkpoint)
	if id == other.evidence.NodeID(checkpoint) {
		t.Error("two stores give one id")
	}
	b.close(t)
	if b.open(t); b.evidence.NodeID(checkpoint) != id {
		t.Error("the next life gives another id")
	}
	for _, domain := range []string{"outcome", "settled"} {
		o := evidence.Outcome{Checkpoint: checkpoint, Verdict: execution.Completed}
		if domain == "settled" {
			o.By = "operator"
		}
		one, err := b.builder.Outcome(time.Now(), call(""), &o)
		if err != nil {
			t.Fatal(err)
		}
		two, err := other.builder.Outcome(time.Now(), call(""), &o)
		if err != nil {
			t.Fatal(err)
		}
		if one[0].ID() == two[0].ID() {
			t.Errorf("%s: two stores give one id", domain)
		}
	}
}

// What an earlier life left in doubt is recorded once, however often the gateway starts.
func TestOrphansAreRecordedOnce(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	token := b.token(t, ect.Claims{Workflow: workflow})
	of := call(workflow, token.ID())
	of.Node = "pay" // which the checkpoint alone says after a crash
	checkpoint, err := b.builder.Checkpoint(time.Now(), of)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Append(t.Context(), time.Now(), []*ect.Token{token}, checkpoint); err != nil {
		t.Fatal(err)
	}
	b.close(t)
	record := execution.Record{
		State: execution.StateInDoubt, Cause: execution.CauseDied, Checkpoint: checkpoint.ID(), Workflow: workflow, Action: "charge", KeepResult: time.Hour,
	}
	for range 3 {
		b.open(t)
		if err := b.evidence.RecordOrphan(t.Context(), b.builder, execution.Key{1}, &record); err != nil {
			t.Fatal(err)
		}
		node := b.entry(t, workflow, b.evidence.NodeID(checkpoint.ID()))
		if fmt.Sprint(node.Parents()) != fmt.Sprint([]string{token.ID(), checkpoint.ID()}) {
			t.Errorf("%s", node.Payload())
		}
		if of, _ := node.Ext().Text(evidence.MemberNode); of != "pay" {
			t.Errorf("%s", node.Payload())
		}
		b.close(t)
		if size := b.evidence.Log().Head().Size; size != 4 { // token, checkpoint, node, error
			t.Errorf("%d entries", size)
		}
	}
}

// The ids that an entry is found by are the same while its token is at hand in parsed form
// and when the entry is read later.
func TestIndexIDsOfParsedTokens(t *testing.T) {
	b := newBench(t)
	parent, checkpoint := uuid.NewString(), uuid.NewString()
	draft, err := b.builder.Attempt(time.Now(), &evidence.Attempt{Downstream: "d", Cause: "c", Checkpoint: checkpoint, Workflow: uuid.NewString()})
	if err != nil {
		t.Fatal(err)
	}
	token, err := b.builder.Sign(draft)
	if err != nil {
		t.Fatal(err)
	}
	event := func(payload string, parsed any) *ledger.Event {
		return &ledger.Event{ID: draft.ID(), Action: draft.Action(), Parents: []string{parent}, Payload: []byte(payload), Parsed: parsed}
	}
	for name, c := range map[string]struct {
		event *ledger.Event
		want  []string
	}{
		"read":  {event(token.Raw(), nil), []string{parent, checkpoint}},
		"token": {event(token.Raw(), token), []string{parent, checkpoint}},
		"draft": {event(token.Raw(), draft), []string{parent, checkpoint}},
	} {
		if got := b.evidence.IndexIDs(c.event); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
