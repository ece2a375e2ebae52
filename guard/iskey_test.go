package guard_test

import (
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// The pattern that is published is what counts.
func TestIsKey(t *testing.T) {
	pattern := regexp.MustCompile(guard.KeyPattern)
	for name, want := range map[string]bool{
		"Idempotency-Key": true, "X-Idempotency-Key": true, "Cko-Idempotency-Key": true, "Request-Idempotency-Key": true,
		"x-IDEMPOTENCY-key": true, "Idempotence-Key": true, "Idempotent-Key": true, "X-Idempotent-Request-Id": true,
		"IdempotencyKey": true, "X_Idempotency_Key": true, "X-Payout-Idempotency": true, "Idempotence": true, "X-Idempotency-Uuid": true,
		"Idempotency-Nonce": true, "Idempotency-Token": true,
		"Idempotent": false, "Idempotent-Replayed": false, "Idempotency-Expiry": false, "X-Idempotency-Ttl": false, "Idempotency-Status": false,
		"Idempotenz-Key": false, "Request-Id": false, "X-Request-Id": false, "Traceparent": false, "Mcp-Session-Id": false, "Client-Token": false,
		"Key": false, "": false,
	} {
		if got := guard.IsKey(http.CanonicalHeaderKey(name)); got != want || pattern.MatchString(name) != want {
			t.Errorf("%s: %v, by the pattern %v", name, got, pattern.MatchString(name))
		}
	}
	for name, want := range map[string]bool{"PayPal-Request-Id": true, "Execution-Id": true, "PayPal-Client-Metadata-Id": false, "Execution-Parent": false} {
		if got := guard.IsKey(http.CanonicalHeaderKey(name)); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, page := range []string{"../docs/same-call.md", "../docs/http.md"} {
		if text, err := os.ReadFile(page); err != nil || !strings.Contains(strings.ReplaceAll(string(text), `\|`, "|"), "`"+guard.KeyPattern+"`") {
			t.Errorf("%s does not show the pattern: %v", page, err)
		}
	}
}
