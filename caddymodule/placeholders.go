package caddymodule

import (
	"encoding/hex"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// placeholderSpace begins the names of the placeholders of guarded calls.
const placeholderSpace = "http.agent_guard."

// currentExchange is the variable of a request that holds the exchange of the guard
// that works on it: the innermost, while there are several.
const currentExchange = "agent_guard.exchange"

// noted is what is known of a call, for logs and matchers.
type noted struct {
	status  string // empty until it is decided
	problem string // the slug of a refusal
	outcome guard.Verdict
	cause   guard.Cause
	created time.Time // of the execution that is replayed

	outer *exchange // of the guard around this one
	over  bool
}

// publish lets logs and matchers read the placeholders of this call. Values are made
// when they are asked for.
func (x *exchange) publish() {
	ctx := x.r.Context()
	before, known := caddyhttp.GetVar(ctx, currentExchange).(*exchange)
	if known && !before.noted.over {
		x.noted.outer = before
	}
	caddyhttp.SetVar(ctx, currentExchange, x)
	if known {
		return
	}
	replacer(x.r).Map(func(name string) (any, bool) {
		name, ours := strings.CutPrefix(name, placeholderSpace)
		if !ours {
			return nil, false
		}
		return caddyhttp.GetVar(ctx, currentExchange).(*exchange).placeholder(name)
	})
}

// unpublish gives the placeholders back to the guard around this one. Without one
// they stay, for the access log.
func (x *exchange) unpublish() {
	x.noted.over = true
	if x.noted.outer != nil {
		caddyhttp.SetVar(x.r.Context(), currentExchange, x.noted.outer)
	}
}

// String keeps everything else of a call out of whatever prints the variable (P8).
func (x *exchange) String() string { return x.call.Key.String() }

// identified reports that the call has its key.
func (x *exchange) identified() bool { return x.call.Scope.ID != "" }

// callerHash is the caller as index entries name it.
func (x *exchange) callerHash() string {
	hash := x.guard.Caller(x.call.Scope.Caller)
	return hex.EncodeToString(hash[:])
}

// placeholder is the value under {http.agent_guard.name}. What is not known yet, or
// does not apply, is empty.
func (x *exchange) placeholder(name string) (any, bool) {
	switch name {
	case "execution_id":
		return x.call.Scope.ID, true
	case "key":
		if !x.identified() {
			return "", true
		}
		return x.call.Key.String(), true
	case "guard":
		return x.h.Name, true
	case "action":
		return x.action.Name, true
	case "caller":
		if !x.identified() {
			return "", true
		}
		return x.callerHash(), true
	case "workflow":
		return x.call.Workflow, true
	case "issuer":
		return x.story.tokens.issuer(), true
	case "checkpoint":
		return x.call.Checkpoint, true
	case "status":
		return x.noted.status, true
	case "outcome":
		if x.noted.outcome == 0 {
			return "", true
		}
		return x.noted.outcome.String(), true
	case "cause":
		return string(x.noted.cause), true
	case "problem":
		return x.noted.problem, true
	case "age":
		if x.noted.created.IsZero() {
			return "", true
		}
		return strconv.FormatInt(int64(max(0, time.Since(x.noted.created)).Seconds()), 10), true
	}
	return nil, false
}
