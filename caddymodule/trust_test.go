package caddymodule

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// Level L3 needs a ledger with every parent in it: what takes that away is refused, and
// the error names it.
func TestLevel3Needs(t *testing.T) {
	trust := Trust{Keys: []KeySource{{URL: "http://localhost:1/jwks"}}, MinLevel: "L3"}
	if err := trust.provision(zap.NewNop()); err != nil {
		t.Error(err)
	}
	trust.AllowPartial = true
	holds := func(err error, names ...string) {
		t.Helper()
		for _, name := range names {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%v does not name %s", err, name)
			}
		}
	}
	holds(trust.provision(zap.NewNop()), "min_level L3", "allow_partial")
	holds((&App{Trust: &trust}).provisionTokens(), "min_level: L3", "identity", "ledger")
}

// Plans are read at load, whole; errors name the file and what is wrong with it, warnings are logged.
func TestPlansAtLoad(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	one := file("one.json", `{"wf_id": "w", "nodes": [{"id": "a", "label": "x"}, {"id": "b", "label": "x"}]}`)
	again := file("again.json", `{"wf_id": "w", "nodes": [{"id": "c"}]}`)
	circle := file("circle.json", `{"wf_id": "c", "nodes": [{"id": "a"}, {"id": "b"}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}`)
	for want, files := range map[string][]string{
		"": {one}, `again.json: wf_id: "w" is the name of an earlier plan`: {one, again}, "circle.json: a: lies on a cycle: a -> b -> a": {circle},
		"it has more than 8388608 bytes": {file("large.json", strings.Repeat(" ", plan.MaxSize+1))},
		"placeholder":                    {"{env.AGENT_GUARD_TEST_UNSET}/plan.json"},
	} {
		core, logs := observer.New(zapcore.WarnLevel)
		app := &App{Identity: new(Identity), PlanFiles: files, logger: zap.New(core)}
		err := app.readPlans()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", files, err)
		}
		if want == "" && (app.plans["w"] == nil || logs.Len() != 1) {
			t.Errorf("%v, %d warnings", app.plans, logs.Len())
		}
	}
}

// Level L1 takes what anybody can have written: whoever configures that is told.
func TestLevel1Warns(t *testing.T) {
	for level, warnings := range map[string]int{"L1": 1, "l1": 1, "": 0, "L2": 0} {
		core, logs := observer.New(zapcore.WarnLevel)
		trust := Trust{Keys: []KeySource{{URL: "http://localhost:1/jwks"}}, MinLevel: level}
		if err := trust.provision(zap.New(core)); err != nil {
			t.Fatal(err)
		}
		if got := logs.FilterMessageSnippet("min_level L1").Len(); got != warnings {
			t.Errorf("level %q: %d warnings, want %d", level, got, warnings)
		}
	}
}
