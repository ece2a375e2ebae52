//go:build unix

package harness

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// CheckpointIn is the gateway's token in a call to an agent.
func CheckpointIn(t *testing.T, h http.Header) *ect.Unverified {
	raws, _ := ect.ParseFields(h[ect.FieldName])
	for _, raw := range raws {
		if token, err := ect.ParseInsecure(raw); err == nil && token.Event() == ect.EventCheckpoint {
			return token
		}
	}
	t.Error("an agent was called without a checkpoint")
	return new(ect.Unverified)
}
