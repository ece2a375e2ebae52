package caddymodule

import (
	"strings"
	"testing"

	"go.uber.org/zap"
)

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
