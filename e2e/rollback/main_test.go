package rollback

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
