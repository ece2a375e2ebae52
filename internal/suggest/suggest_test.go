package suggest_test

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/internal/suggest"
)

func TestNearest(t *testing.T) {
	known := []string{"breaker", "deadline", "name", "exempt", "require_ect"}
	for word, want := range map[string]string{
		"breakr":      `; did you mean "breaker"?`,
		"daedline":    `; did you mean "deadline"?`,
		"require-ect": `; did you mean "require_ect"?`,
		"nmae":        `; did you mean "name"?`,
		"x":           "",
		"na":          "",
		"upstreams":   "",
		"":            "",
	} {
		if got := suggest.Nearest(word, known); got != want {
			t.Errorf("%q: %q, want %q", word, got, want)
		}
	}
}
