package workflow_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// wantStates holds the states of some nodes: "id=state" or "id=state/detail".
func wantStates(t *testing.T, g *Graph, want string) {
	t.Helper()
	for part := range strings.FieldsSeq(want) {
		id, state, _ := strings.Cut(part, "=")
		n, ok := node(g, id)
		got := string(n.State)
		if n.Detail != "" {
			got += "/" + string(n.Detail)
		}
		if !ok || got != state {
			t.Errorf("%s is %q, want %q", id, got, state)
		}
	}
}

func stranger(r Record) Record { r.Stranger = true; return r }

// A-node-states-a to -g and P6: each state, and what does not lead to it.
func TestNodeStates(t *testing.T) {
	for name, c := range map[string]struct {
		records []Record
		want    string
	}{
		"running: no end and no error":         {[]Record{task("T")}, "T=running"},
		"running: a checkpoint is no end":      {[]Record{task("T"), ckpt("C", "T")}, "T=running C=running"},
		"running: other events are no end":     {[]Record{task("T"), by("a", Record{ID: "B", Event: "circuit_breaker_open", Parents: []string{"T"}})}, "T=running B="},
		"done: the next task follows":          {[]Record{task("T"), task("U", "T")}, "T=done U=running"},
		"done: the next one has a checkpoint":  {[]Record{task("T"), ckpt("C", "T"), task("U", "T")}, "T=done C=done"},
		"done: it follows over the checkpoint": {[]Record{task("T"), ckpt("C", "T"), task("U", "C")}, "T=done U=running"},
		"pending: a checkpoint goes before":    {[]Record{ckpt("C")}, "C=pending"},
		"failed: an error is its child":        {[]Record{task("T"), failure("E", "", "T")}, "T=failed E="},
		"failed: though something follows":     {[]Record{task("T"), task("U", "T"), failure("E", "", "T")}, "T=failed U=running"},
		"failed: and the next comes later":     {[]Record{task("T"), failure("E", "", "T"), task("U", "T")}, "T=failed"},
		"failed: AERR names the checkpoint":    {[]Record{task("T"), ckpt("C", "T"), failure("E", "", "C")}, "T=failed C=failed"},
		"failed: it names its checkpoint":      {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), failure("E", "C", "U")}, "T=failed U=failed"},
		"failed: of a checkpoint alone":        {[]Record{ckpt("C"), failure("E", "C")}, "C=failed"},
		"an error of an error is no failure":   {[]Record{task("T"), failure("E", "", "T"), failure("F", "", "E")}, "T=failed E= F="},
		"a checkpoint elsewhere is nothing":    {[]Record{task("T"), task("U", "T"), failure("E", "elsewhere", "U")}, "T=done U=failed"},
		"a task is no checkpoint":              {[]Record{task("T"), task("U", "T"), failure("E", "T", "U")}, "T=done U=failed"},

		"of an attempt, whatever the order": {[]Record{task("T"), by(gateway, Record{ID: "C", Event: ect.EventCheckpoint, Parents: []string{"T"}}),
			by(gateway, Record{ID: "S", Outcome: Completed, Parents: []string{"T", "C"}}),
			by(gateway, Record{ID: "E", Event: ect.EventError, CheckpointID: "C", Parents: []string{"C"}, Attempt: true})}, "T=done C=done S=done E="},
		"failed: others have no attempts": {[]Record{task("T"), by("b", Record{ID: "E", Event: ect.EventError, Parents: []string{"T"}, Attempt: true})}, "T=failed"},

		"rolled back": {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T"), start("S", "C", "E"), undone("a", "R", "", "completed", "S")},
			"T=rolled_back C=rolled_back"},
		"rolled back: ATD": {[]Record{task("T"), ckpt("C", "T"), by("b", Record{ID: "Q", Event: ect.EventRollbackRequest, Parents: []string{"C"}}),
			undone("a", "R", "C", "completed", "Q")}, "T=rolled_back"},
		"rolled back: ATD without the member": {[]Record{task("T"), ckpt("C", "T"), by("b", Record{ID: "Q", Event: ect.EventRollbackRequest, Parents: []string{"C"}}),
			undone("a", "R", "", "completed", "Q")}, "T=rolled_back"},
		"rolled back: by the gateway": {[]Record{task("T"), ckpt("C", "T"), undone(gateway, "R", "C", "completed")}, "T=rolled_back"},
		"rolled back: compensated": {[]Record{task("T"), ckpt("C", "T"), by("a", Record{ID: "K", Event: ect.EventCompensate, CheckpointID: "C", Status: "completed"})},
			"T=rolled_back"},
		"a compensation without a status":       {[]Record{task("T"), ckpt("C", "T"), by("a", Record{ID: "K", Event: ect.EventCompensate, CheckpointID: "C"})}, "T=running"},
		"a compensation that names nothing":     {[]Record{task("T"), ckpt("C", "T"), start("S", "C"), by("a", Record{ID: "K", Event: ect.EventCompensate, Status: "completed", Parents: []string{"S"}})}, "T=running/rollback_requested"},
		"asked for":                             {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T"), start("S", "C", "E")}, "T=failed/rollback_requested"},
		"partial":                               {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T"), undone("a", "R", "C", "partial")}, "T=failed/compensation_required"},
		"rollback failed":                       {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), undone("a", "R", "C", "failed")}, "T=done/rollback_failed"},
		"a word of nobody":                      {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), undone("a", "R", "C", "success")}, "T=done"},
		"somebody else says so":                 {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), undone("b", "R", "C", "completed")}, "T=done C=done"},
		"failed first, then completed":          {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "failed"), undone("a", "Q", "C", "completed")}, "T=rolled_back"},
		"asked for again":                       {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "failed"), start("S", "C")}, "T=running/rollback_requested"},
		"done is done":                          {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "completed"), start("S", "C")}, "T=rolled_back"},
		"one of several results is not":         {[]Record{task("T"), ckpt("C", "T"), start("S", "C"), undone("a", "R", "", "failed", "S"), undone("a", "Q", "", "completed", "S")}, "T=running/rollback_failed"},
		"its own result before those":           {[]Record{task("T"), ckpt("C", "T"), start("S", "C"), undone("a", "R", "", "failed", "S"), undone("a", "Q", "C", "completed", "S")}, "T=rolled_back"},
		"a member that leads nowhere":           {[]Record{task("T"), ckpt("C", "T"), start("S", "C"), undone("a", "R", "elsewhere", "completed", "S")}, "T=running/rollback_requested"},
		"one of two checkpoints":                {[]Record{task("T"), ckpt("C", "T"), ckpt("D", "T"), undone("a", "R", "C", "completed"), undone("a", "Q", "D", "failed")}, "T=running/rollback_failed C=rolled_back"},
		"the downstream of Figure 7 stays":      {[]Record{ckpt("A"), task("A1", "A"), ckpt("B", "A1"), task("B1", "B"), undone("a", "R", "B", "completed")}, "A1=done A=done B=rolled_back B1=rolled_back"},
		"AERR: the preceding task is not meant": {[]Record{task("T"), by("a", Record{ID: "C", Event: ect.EventCheckpoint, Action: "aerr:checkpoint", Parents: []string{"T"}}), task("U", "C"), undone("a", "R", "C", "completed")}, "T=done U=rolled_back"},

		"a group": {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), ckpt("D", "U"), ckpt("G", "C", "D"), undone("a", "R", "G", "completed")},
			"T=rolled_back U=rolled_back G=rolled_back"},
		"a group, and what says otherwise": {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), ckpt("D", "U"), ckpt("G", "C", "D"),
			undone("a", "R", "G", "completed"), undone("a", "Q", "D", "failed")}, "T=rolled_back U=running/rollback_failed"},
		"a group over others' checkpoints": {[]Record{task("T"), ckpt("C", "T"), by("b", ckpt("G", "C")), undone("b", "R", "G", "completed")}, "T=running G=rolled_back"},
		"such a group, by the gateway":     {[]Record{task("T"), ckpt("C", "T"), by("b", ckpt("G", "C")), undone(gateway, "R", "G", "completed")}, "T=rolled_back"},
		"a group that stands":              {[]Record{task("T"), ckpt("C", "T"), ckpt("G", "C")}, "G= T=running"},

		"a stranger tells of an error":      {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), stranger(failure("E", "C", "T"))}, "T=done C=done U=running E="},
		"a stranger tells of a rollback":    {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), stranger(start("S", "C")), stranger(undone("a", "R", "C", "completed"))}, "T=done C=done"},
		"a checkpoint of another's action":  {[]Record{task("T"), by("b", ckpt("C", "T")), task("U", "T"), undone("b", "R", "C", "completed")}, "T=done C=rolled_back"},
		"such a checkpoint, by the gateway": {[]Record{task("T"), by("b", ckpt("C", "T")), task("U", "T"), undone(gateway, "R", "C", "completed")}, "T=rolled_back C=rolled_back"},

		"escalated: the rollback says so": {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "escalated")}, "T=escalated/compensation_required C=escalated/compensation_required"},
		"escalated: a human was told":     {[]Record{task("T"), by("a", Record{ID: "E", Event: ect.EventError, Parents: []string{"T"}, Escalated: true})}, "T=escalated"},
		"a human was told of no failure":  {[]Record{func() Record { r := task("T"); r.Escalated = true; return r }(), task("U", "T")}, "T=done"},
	} {
		t.Run(name, func(t *testing.T) { wantStates(t, New(c.records), c.want) })
	}
}

// The gateway's tokens of guarded calls, with and without an agent's token.
func TestStatesOfGuardedCalls(t *testing.T) {
	own := func(id, checkpoint string, parents ...string) Record {
		return by(gateway, failure(id, checkpoint, parents...))
	}
	called := func(name string, r Record) Record { r.Execution = name; return r }
	for name, c := range map[string]struct {
		records []Record
		want    string
	}{
		"claimed":               {[]Record{task("T"), claim("C", "T")}, "T=running C=running"},
		"claimed, and followed": {[]Record{task("T"), claim("C", "T"), task("U", "T")}, "T=running U=running"},
		"completed":             {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C")}, "T=done C=done N=done"},
		"another's checkpoint of it, undone here": {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), by("b", ckpt("D", "T")),
			undone(gateway, "R", "C", "completed")}, "T=rolled_back C=rolled_back D=done"},
		"completed without C":  {[]Record{task("T"), settled("N", Completed, "T")}, "T=done N=done"},
		"in doubt":             {[]Record{task("T"), claim("C", "T"), settled("N", InDoubt, "T", "C"), own("E", "C", "T")}, "T=failed/in_doubt C=failed/in_doubt N=failed/in_doubt"},
		"in doubt is not done": {[]Record{task("T"), claim("C", "T"), settled("N", InDoubt, "T", "C"), task("U", "T")}, "T=failed/in_doubt"},
		"released":             {[]Record{task("T"), claim("C", "T"), settled("N", Released, "T", "C"), own("E", "C", "T")}, "T=failed/released"},
		"released, called again": {[]Record{task("T"), claim("C", "T"), settled("N", Released, "T", "C"), own("E", "C", "T"), claim("D", "T")},
			"T=running D=running C=failed/released"},
		"released, then completed": {[]Record{task("T"), claim("C", "T"), settled("N", Released, "T", "C"), own("E", "C", "T"), claim("D", "T"), settled("M", Completed, "T", "D")},
			"T=done M=done"},
		"doubt that was settled": {[]Record{task("T"), claim("C", "T"), settled("N", InDoubt, "T", "C"), own("E", "C", "T"), settled("M", Completed, "T", "C")},
			"T=done N=done C=done"},
		"an agent's error stands":            {[]Record{task("T"), claim("C", "T"), failure("E", "", "T"), settled("N", Completed, "T", "C")}, "T=failed"},
		"an error after the end (3.1.1)":     {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), own("E", "C", "T")}, "T=failed"},
		"an error of the outcome":            {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), failure("E", "", "N")}, "T=failed N=failed"},
		"only the gateway settles":           {[]Record{task("T"), by("b", settled("N", Completed, "T")), settled("M", InDoubt, "T")}, "T=failed/in_doubt"},
		"what an agent calls an outcome":     {[]Record{task("T"), claim("C", "T"), by("b", settled("N", Completed, "T", "C"))}, "T=running"},
		"rolled back":                        {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), undone(gateway, "R", "C", "completed")}, "T=rolled_back N=rolled_back C=rolled_back"},
		"an agent undoes what is not its":    {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), undone("a", "R", "C", "completed")}, "T=done"},
		"no token: claimed":                  {[]Record{claim("C")}, "C=running"},
		"no token: completed":                {[]Record{claim("C"), settled("N", Completed, "C")}, "C=done N=done"},
		"no token: in doubt":                 {[]Record{claim("C"), settled("N", InDoubt, "C"), own("E", "C", "N")}, "C=failed/in_doubt N=failed/in_doubt"},
		"no token: doubt that was settled":   {[]Record{claim("C"), settled("N", InDoubt, "C"), own("E", "C", "N"), settled("M", Completed, "C")}, "N=done M=done C=done"},
		"no token: a nested call":            {[]Record{claim("C"), settled("N", Completed, "C"), claim("D", "N")}, "N=done D=running"},
		"no token: a nested call is undone":  {[]Record{claim("C"), settled("N", Completed, "C"), claim("D", "N"), settled("M", Completed, "D"), undone(gateway, "R", "D", "completed")}, "N=done M=rolled_back"},
		"no token: an error before the call": {[]Record{claim("C"), own("E", "C", "C")}, "C=failed"},
		"no token: an agent's error":         {[]Record{claim("C"), failure("E", "C", "C")}, "C=failed"},
		"no token: called again": {[]Record{called("x", claim("C")), called("x", settled("N", Released, "C")), own("E", "C", "N"), called("x", claim("D"))},
			"N=running D=running C=running"},
		"no token: called again, completed": {[]Record{called("x", claim("C")), called("x", settled("N", Released, "C")), own("E", "C", "N"), called("x", claim("D")), called("x", settled("M", Completed, "D"))},
			"N=done M=done"},
		"an agent goes on from the checkpoint": {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), task("U", "C"), claim("D", "U"), settled("M", InDoubt, "U", "D")},
			"T=done C=done U=failed/in_doubt D=failed/in_doubt"},
	} {
		t.Run(name, func(t *testing.T) { wantStates(t, New(c.records), c.want) })
	}
}

// of gives the gateway's tokens the name of their execution.
func of(name string, r Record) Record {
	r.Execution = name
	return r
}

// Calls within calls. A nested call without a token names the checkpoint of the call
// that it was made within; agents hand on the gateway's tokens, and tokens of their own
// events; an upstream's tokens follow from the checkpoint that it was sent.
func TestStatesOfNestedCalls(t *testing.T) {
	own := func(id, checkpoint string, parents ...string) Record {
		return by(gateway, failure(id, checkpoint, parents...))
	}
	outer, inner := of("x", claim("C")), of("y", claim("D", "C"))
	for name, c := range map[string]struct {
		records []Record
		want    string
		summary string
	}{
		"both run":         {[]Record{outer, inner}, "C=running D=running", "running map[running:2]"},
		"the inner failed": {[]Record{outer, inner, of("y", settled("M", InDoubt, "C", "D")), own("E", "D", "M", "C")}, "C=running D=failed/in_doubt M=failed/in_doubt", "running map[failed:1 running:1]"},
		"the inner is done": {[]Record{outer, inner, of("y", settled("M", Completed, "C", "D"))},
			"C=running D=done M=done", "running map[done:1 running:1]"},
		"the outer failed": {[]Record{outer, inner, of("y", settled("M", Completed, "C", "D")), of("x", settled("N", InDoubt, "C")), own("E", "C", "N")},
			"C=failed/in_doubt N=failed/in_doubt D=done M=done", "running map[done:1 failed:1]"},
		"the inner is undone": {[]Record{outer, inner, of("y", settled("M", Completed, "C", "D")), of("x", settled("N", Completed, "C")), undone(gateway, "R", "D", "completed")},
			"C=done N=done D=rolled_back M=rolled_back", "partial map[done:1 rolled_back:1]"},
		"the outer is undone": {[]Record{outer, inner, of("y", settled("M", Completed, "C", "D")), of("x", settled("N", Completed, "C")), undone(gateway, "R", "C", "completed")},
			"C=rolled_back N=rolled_back D=done M=done", "partial map[done:1 rolled_back:1]"},
		"an upstream goes on":          {[]Record{outer, task("U", "C"), task("V", "U")}, "C=running U=done V=running", "running map[done:1 running:2]"},
		"an upstream, and the outcome": {[]Record{outer, task("U", "C"), of("x", settled("N", InDoubt, "C"))}, "C=failed/in_doubt U=running", "running map[failed:1 running:1]"},
		"an upstream, and a token":     {[]Record{task("T"), of("x", claim("C", "T")), task("U", "C"), of("x", settled("N", InDoubt, "T", "C"))}, "T=failed/in_doubt U=running", "running map[failed:1 running:1]"},
		"a checkpoint is handed on": {[]Record{outer, task("T"), of("y", claim("D", "T", "C")), of("y", settled("M", Completed, "T", "C", "D"))},
			"C=running T=done D=done M=done", "running map[done:1 running:1]"},
		"an error that is handed on too": {[]Record{outer, task("T"), of("y", claim("D", "T", "C")), of("y", settled("M", InDoubt, "T", "C", "D")), own("E", "D", "M", "T", "C")},
			"C=running T=failed/in_doubt D=failed/in_doubt", "running map[failed:1 running:1]"},
		"the agent's checkpoint, running": {[]Record{task("T"), ckpt("A", "T"), of("y", claim("D", "A"))}, "T=running A=running D=running", "running map[running:1]"},
		"the agent's checkpoint": {[]Record{task("T"), ckpt("A", "T"), of("y", claim("D", "A")), of("y", settled("M", Completed, "A", "D"))},
			"T=done A=done D=done M=done", "success map[done:1]"},
		"the agent's checkpoint, in doubt": {[]Record{task("T"), ckpt("A", "T"), of("y", claim("D", "A")), of("y", settled("M", InDoubt, "A", "D")), own("E", "D", "M", "A")},
			"T=failed/in_doubt A=failed/in_doubt D=failed/in_doubt M=failed/in_doubt", "running map[failed:1]"},
		"the agent's checkpoint alone, running": {[]Record{ckpt("A"), of("y", claim("D", "A"))}, "A=running D=running", "running map[running:1]"},
		"the agent's checkpoint alone":          {[]Record{ckpt("A"), of("y", claim("D", "A")), of("y", settled("M", Completed, "A", "D"))}, "A=done D=done M=done", "success map[done:1]"},
		"an answer that says it failed":         {[]Record{task("T"), of("x", claim("C", "T")), of("x", settled("N", Completed, "T", "C")), own("E", "C", "N", "T")}, "T=failed N=failed C=failed", "running map[failed:1]"},
	} {
		t.Run(name, func(t *testing.T) {
			g := New(c.records)
			wantStates(t, g, c.want)
			s := g.Summary()
			if got := fmt.Sprintf("%s %v", s.Status, s.Tasks); got != c.summary {
				t.Errorf("%s, want %s", got, c.summary)
			}
		})
	}
	g := New([]Record{outer, inner, of("y", settled("M", InDoubt, "C", "D")), own("E", "D", "M", "C")})
	wantEdges(t, g, "C-caused->D", "C-caused->M", "D-caused->M", "M-error_of->E", "C-caused->E")
}

// The gateway's node is an end of the agent's, and does not follow from it.
func TestEdgesOfGuardedCalls(t *testing.T) {
	g := New([]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), claim("D", "N"), settled("M", Completed, "D")})
	wantEdges(t, g, "T-checkpoint_of->C", "T-settles->N", "C-caused->N", "N-caused->D", "D-caused->M")
	n, _ := node(g, "N")
	c, _ := node(g, "C")
	if fmt.Sprint(n.Settles, c.Guards) != "[T] [N T]" {
		t.Errorf("N settles %v, C was made for %v", n.Settles, c.Guards)
	}
	// C-2-c: an agent that goes on knows its own token, not the gateway's.
	g = New([]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), task("U", "T")})
	wantEdges(t, g, "T-checkpoint_of->C", "T-settles->N", "C-caused->N", "T-caused->U")
}

// A-error-signaling-d: the worst of the errors of a node is shown, over its checkpoint
// and its outcome too.
func TestWorstSeverity(t *testing.T) {
	severe := func(id, severity string, parents ...string) Record {
		return by("a", Record{ID: id, Event: ect.EventError, Severity: severity, Parents: parents})
	}
	g := New([]Record{
		task("T"), claim("C", "T"), settled("N", Completed, "T", "C"),
		severe("E1", "warning", "T"), severe("E2", "critical", "N"), severe("E3", "grave", "C"), severe("E4", "info", "C"),
	})
	for id, want := range map[string]string{"T": "critical", "N": "critical", "C": "info", "E1": ""} {
		if n, _ := node(g, id); n.Worst != want {
			t.Errorf("%s: %q, want %q", id, n.Worst, want)
		}
	}
}

// C-4.3.2-h: an agent's critical error makes critical what it is about. The gateway's own does not,
// which each call in doubt has, nor a stranger's (P3).
func TestCriticalError(t *testing.T) {
	err := func(id string, change func(r *Record), parents ...string) Record {
		r := by("a", Record{ID: id, Event: ect.EventError, Severity: Critical, Parents: parents})
		change(&r)
		return r
	}
	for name, test := range map[string]struct {
		change func(r *Record)
		want   string
	}{
		"an agent's":    {func(*Record) {}, "T C N"},
		"of a call":     {func(r *Record) { r.Parents, r.CheckpointID = nil, "C" }, "T C N"},
		"a lesser one":  {func(r *Record) { r.Severity = "error" }, ""},
		"the gateway's": {func(r *Record) { r.Own = true }, ""},
		"a stranger's":  {func(r *Record) { r.Stranger = true }, ""},
	} {
		g := New([]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C"), task("U", "T"), err("E", test.change, "N", "C")})
		var critical []string
		for _, id := range []string{"T", "C", "N", "U", "E"} {
			switch n, _ := node(g, id); n.CriticalError {
			case "E":
				critical = append(critical, id)
			case "":
			default:
				t.Errorf("%s: %s: %q", name, id, n.CriticalError)
			}
		}
		if got := strings.Join(critical, " "); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// Section "Workflow Boundary ECTs" and P6: how the whole stands, by ATD's words.
func TestSummary(t *testing.T) {
	irreversible := func(r Record) Record { r.Reversible = false; return r }
	finish := by("a", Record{ID: "Z", Event: ect.EventWorkflowComplete, Status: "success"})
	called := func(name string, r Record) Record { r.Execution = name; return r }
	for name, c := range map[string]struct {
		records []Record
		want    string
	}{
		"running":                   {[]Record{task("T"), task("U", "T")}, "running map[done:1 running:1]"},
		"one call is one task":      {[]Record{task("T"), claim("C", "T"), settled("N", Completed, "T", "C")}, "success map[done:1]"},
		"a claim stands for a task": {[]Record{claim("C")}, "running map[running:1]"},
		"called twice": {[]Record{task("T"), claim("C", "T"), settled("N", Released, "T", "C"), claim("D", "T"), settled("M", Completed, "T", "D")},
			"success map[done:1]"},
		"called again, no token": {[]Record{called("x", irreversible(claim("C"))), called("x", settled("N", Released, "C")), called("x", claim("D"))}, "running map[running:1]"},
		"and completed": {[]Record{called("x", claim("C")), called("x", settled("N", Released, "C")), called("x", claim("D")), called("x", settled("M", Completed, "D"))},
			"success map[done:1]"},
		"settled twice":            {[]Record{claim("C"), settled("N", InDoubt, "C"), settled("M", Completed, "C")}, "success map[done:1]"},
		"failed, with a way back":  {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T")}, "running map[failed:1]"},
		"failed, without":          {[]Record{task("T"), task("U"), irreversible(ckpt("C", "T")), failure("E", "C", "T")}, "failed map[failed:1 running:1]"},
		"in doubt, with a way":     {[]Record{claim("C"), settled("N", InDoubt, "C")}, "running map[failed:1]"},
		"rolled back":              {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "completed")}, "rolled_back map[rolled_back:1]"},
		"siblings are kept":        {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "completed"), claim("D"), settled("N", Completed, "D")}, "partial map[done:1 rolled_back:1]"},
		"escalated":                {[]Record{task("T"), ckpt("C", "T"), undone("a", "R", "C", "escalated"), task("U")}, "escalated map[escalated:1 running:1]"},
		"what is said is a claim":  {[]Record{task("T"), ckpt("C", "T"), failure("E", "", "T"), finish}, "running map[failed:1] success"},
		"the last statement":       {[]Record{finish, by("a", Record{ID: "Y", Event: ect.EventWorkflowComplete, Status: "failed"})}, "running map[] failed"},
		"failed, and others done":  {[]Record{claim("D"), settled("N", Completed, "D"), irreversible(ckpt("C", "T")), task("T"), failure("E", "C", "T")}, "partial map[done:1 failed:1]"},
		"ended, with a way back":   {[]Record{claim("D"), settled("N", Completed, "D"), task("T"), ckpt("C", "T"), failure("E", "C", "T"), by(gateway, finish)}, "partial map[done:1 failed:1] success"},
		"ended, all failed":        {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T"), by(gateway, finish)}, "failed map[failed:1] success"},
		"ended, and goes on":       {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T"), by(gateway, finish), claim("D")}, "running map[failed:1 running:1] success"},
		"ended while it runs":      {[]Record{task("T"), by(gateway, finish)}, "running map[running:1] success"},
		"ended in doubt":           {[]Record{claim("C"), settled("N", InDoubt, "C"), by(gateway, finish)}, "running map[failed:1] success"},
		"ended while it is undone": {[]Record{task("T"), ckpt("C", "T"), failure("E", "C", "T"), start("S", "C", "E"), by(gateway, finish)}, "running map[failed:1] success"},
		"a group is no task":       {[]Record{task("T"), ckpt("C", "T"), ckpt("G", "C")}, "running map[running:1]"},
		"an announced one is none": {[]Record{task("T"), ckpt("C", "T"), task("U", "C"), claim("D", "U")}, "running map[done:1 running:1]"},
	} {
		t.Run(name, func(t *testing.T) {
			s := New(c.records).Summary()
			if got := strings.TrimSpace(fmt.Sprintf("%s %v %s", s.Status, s.Tasks, s.Stated)); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// Who has recorded the end of a workflow has, whatever comes later.
func TestEndStands(t *testing.T) {
	end := Record{ID: "Z", Event: ect.EventWorkflowComplete, Status: "success"}
	for name, c := range map[string]struct {
		records []Record
		want    EndedBy
	}{
		"nobody's":               {[]Record{task("T")}, 0},
		"the gateway's":          {[]Record{task("T"), by(gateway, end)}, ByGateway},
		"an agent's":             {[]Record{task("T"), by("a", end)}, ByAgent},
		"a stranger's":           {[]Record{task("T"), stranger(end)}, 0},
		"both":                   {[]Record{task("T"), by("a", end), by(gateway, Record{ID: "Y", Event: ect.EventWorkflowComplete})}, ByGateway},
		"the agent's came later": {[]Record{task("T"), by(gateway, end), by("a", Record{ID: "Y", Event: ect.EventWorkflowComplete})}, ByGateway},
		"a task came":            {[]Record{by(gateway, end), task("T")}, ByGateway},
		"a rollback":             {[]Record{task("T"), ckpt("C", "T"), by(gateway, end), start("S", "C"), undone("a", "R", "C", "completed")}, ByGateway},
		"an error":               {[]Record{task("T"), by("a", end), failure("E", "", "T")}, ByAgent},
	} {
		if got := New(c.records).Ended(); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// States do not depend on how the drafts let one write the same: a graph read twice,
// and one whose unrelated nodes come first, say the same.
func TestStatesAreDerivedAnew(t *testing.T) {
	records := []Record{task("T"), claim("C", "T"), settled("N", InDoubt, "T", "C"), task("U", "T"), ckpt("D", "U"), failure("E", "D", "U")}
	before := New(records).Nodes()
	again := New(append([]Record{task("V"), ckpt("W", "V")}, records...))
	for _, n := range before {
		m, _ := node(again, n.ID)
		if m.State != n.State || m.Detail != n.Detail || !slices.Equal(m.Guards, n.Guards) {
			t.Errorf("%+v\n%+v", n, m)
		}
	}
}

// P6: what became of a checkpoint, its own result says; that of a rollback as a whole
// counts only where there is none.
func TestP6ResultOfTheWholeRollback(t *testing.T) {
	whole := func(id, status, start string) Record {
		return Record{ID: id, Parents: []string{start}, Event: ect.EventRollbackComplete, CheckpointID: "C", Status: status, Issuer: "gateway", Own: true, Whole: true}
	}
	step := func(id, status, start string) Record {
		r := whole(id, status, start)
		r.Whole = false
		return r
	}
	begin := []Record{task("T"), ckpt("C", "T"), start("S", "C", "T")}
	for name, test := range map[string]struct {
		more   []Record
		state  State
		detail Detail
	}{
		"undone, and others were not":        {[]Record{step("R", "completed", "S"), whole("W", "partial", "S")}, RolledBack, ""},
		"not undone, whatever is said after": {[]Record{step("R", "failed", "S"), whole("W", "completed", "S")}, Running, RollbackFailed},
		"nothing but the whole":              {[]Record{whole("W", "completed", "S")}, RolledBack, ""},
		"the whole has failed":               {[]Record{whole("W", "failed", "S")}, Running, RollbackFailed},
		"once more": {[]Record{
			step("R", "failed", "S"), whole("W", "failed", "S"), start("S2", "C", "T"), step("R2", "completed", "S2"), whole("W2", "completed", "S2"),
		}, RolledBack, ""},
		"once more, with less": {[]Record{whole("W", "failed", "S"), start("S2", "C", "T"), whole("W2", "completed", "S2")}, RolledBack, ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := New(append(append([]Record(nil), begin...), test.more...))
			if n, _ := node(g, "C"); n.State != test.state || n.Detail != test.detail {
				t.Errorf("%s %s, want %s %s", n.State, n.Detail, test.state, test.detail)
			}
		})
	}
}

// C-2-h: the most recent checkpoint that the workflow can go back to, and what keeps
// one from being it.
func TestRecoveryPoints(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	until := func(d time.Duration, r Record) Record { r.Expires = now.Add(d); return r }
	irreversible := func(r Record) Record { r.Reversible = false; return r }
	chain := func(last Record) []Record {
		return []Record{ckpt("A"), task("A1", "A"), ckpt("B", "A1"), task("B1", "B"), last, task("X1", "X")}
	}
	for name, c := range map[string]struct {
		records []Record
		want    string
	}{
		"the most recent first":                {chain(ckpt("X", "B1")), "[X B A]"},
		"until it expires":                     {chain(until(time.Second, ckpt("X", "B1"))), "[X B A]"},
		"an expired one hides those before":    {chain(until(0, ckpt("X", "B1"))), "[]"},
		"so does an irreversible one":          {chain(irreversible(ckpt("X", "B1"))), "[]"},
		"not those beside it":                  {chain(irreversible(ckpt("X"))), "[B A]"},
		"nor those behind it":                  {chain(irreversible(ckpt("X")))[2:], "[B]"},
		"one that was rolled back is passed":   {append(chain(ckpt("X", "B1")), undone("a", "R", "X", "completed")), "[B A]"},
		"an irreversible call that never was":  {[]Record{ckpt("A"), task("A1", "A"), irreversible(claim("C", "A1")), settled("N", Released, "C")}, "[A]"},
		"a call that runs":                     {[]Record{ckpt("A"), task("A1", "A"), claim("C", "A1")}, "[]"},
		"a call in doubt":                      {[]Record{claim("C"), settled("N", InDoubt, "C")}, "[C]"},
		"what follows the action counts (ATD)": {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), irreversible(ckpt("D", "U"))}, "[]"},
		"a group":                              {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), ckpt("D", "U"), ckpt("G", "C", "D")}, "[G D C]"},
		"a group of an irreversible one":       {[]Record{task("T"), ckpt("C", "T"), task("U"), irreversible(ckpt("D", "U")), ckpt("G", "C", "D")}, "[C]"},
		"none":                                 {[]Record{task("T")}, "[]"},
		"on a cycle":                           {[]Record{ckpt("C", "T"), task("T", "C")}, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := fmt.Sprint(New(c.records).RecoveryPoints(now)); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}
