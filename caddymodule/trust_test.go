package caddymodule

import (
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// Level L3 needs a ledger with every parent in it: what takes that away is refused, and
// the error names it.
func TestLevel3Needs(t *testing.T) {
	trust := Trust{Keys: []KeySource{{URL: "http://localhost:1/jwks"}}, MinLevel: "L3"}
	if err := trust.provision("ES256", zap.NewNop()); err != nil {
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
	holds(trust.provision("ES256", zap.NewNop()), "min_level L3", "allow_partial")
	holds((&App{Trust: &trust}).provisionTokens(), "min_level: L3", "identity", "ledger")
}

// A token with more parents than the ledger takes could be verified and never recorded:
// each of its calls would get 503.
func TestMaxParentsIsWhatTheLedgerTakes(t *testing.T) {
	for most, ok := range map[int]bool{100: true, 101: false} {
		trust := Trust{Keys: []KeySource{{URL: "http://localhost:1/jwks"}}, MaxParents: most}
		err := trust.provision("ES256", zap.NewNop())
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "max_parents") {
			t.Errorf("max_parents %d: %v", most, err)
		}
	}
}

// Level L1 takes what anybody can have written: whoever configures that is told.
func TestLevel1Warns(t *testing.T) {
	for level, warnings := range map[string]int{"L1": 1, "l1": 1, "": 0, "L2": 0} {
		core, logs := observer.New(zapcore.WarnLevel)
		trust := Trust{Keys: []KeySource{{URL: "http://localhost:1/jwks"}}, MinLevel: level}
		if err := trust.provision("ES256", zap.New(core)); err != nil {
			t.Fatal(err)
		}
		if got := logs.FilterMessageSnippet("min_level L1").Len(); got != warnings {
			t.Errorf("level %q: %d warnings, want %d", level, got, warnings)
		}
	}
}
