package circuits

import (
	"context"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// viewVar is the variable of a request that holds what its caller asks for its workflow of breakers. A
// variable leaves the request as it is, for handlers that nothing stands before.
const viewVar = "agent_guard.view"

// SetView lets a request be refused as its caller asks for its workflow, beside what was set before.
// The view may be nil.
func SetView(ctx context.Context, v *breaker.View) {
	if v != nil {
		caddyhttp.SetVar(ctx, viewVar, v.And(ViewOf(ctx)))
	}
}

// ViewOf is what SetView has said; nil if it has not.
func ViewOf(ctx context.Context) *breaker.View {
	v, _ := caddyhttp.GetVar(ctx, viewVar).(*breaker.View)
	return v
}
