package breaker_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// P8: what names the call that failed, and the upstream's address, are in no JSON of a status: the gateway adds them
// for those who may see them.
func TestNothingSecretOfAStatusIsShown(t *testing.T) {
	text, err := json.Marshal(breaker.Status{
		Key: breaker.Key{Upstream: "secret-upstream", Class: "secret-class"}, Evidence: "secret-evidence", Cause: "timeout",
	})
	if err != nil || strings.Contains(string(text), "secret") || !strings.Contains(string(text), "timeout") {
		t.Errorf("%s, %v", text, err)
	}
}
