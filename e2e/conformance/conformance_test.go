package conformance

import "github.com/agent-guard/caddy-agent-guard/e2e/harness"

// failingWith is an action's answer that says no.
func failingWith(code int) func(*harness.RestCall) {
	return harness.RestSays(code, `{"error":"secret-of-the-upstream"}`)
}
