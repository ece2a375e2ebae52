// Package agentguard makes the Caddy modules of the agent guard part of a build:
//
//	xcaddy build --with github.com/agent-guard/caddy-agent-guard
//
// It has no API of its own. The modules are in caddymodule, the logic that knows
// nothing of Caddy is in guard and its neighbours.
package agentguard

import _ "github.com/agent-guard/caddy-agent-guard/caddymodule"
