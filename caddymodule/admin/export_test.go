package admin

import (
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// ReadDecision reads what POST executions/{key}/resolve takes.
func ReadDecision(text string) (*Decision, *execution.Head, []byte, error) {
	var d Decision
	if err := d.read(strings.NewReader(text)); err != nil {
		return nil, nil, nil, err
	}
	head, body, err := d.check()
	return &d, head, body, err
}
