package webhook_test

import (
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

// The guide for operators explains every cause that a message may have.
func TestCausesAreDocumented(t *testing.T) {
	guide, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, cause := range hitl.Causes() {
		if !strings.Contains(string(guide), "`"+string(cause)+"`") {
			t.Errorf("docs/operations.md does not explain %s", cause)
		}
	}
}
