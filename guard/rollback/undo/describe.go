package undo

import (
	"net/http"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Method is that of the executions under which undos are recorded. No request has it.
const Method = undoMethod

// Describe says in words for people how a call is undone: the way, and the request as far
// as it is known before it is made, like "compensate POST /v1/refunds". A URL is the one of
// the configuration, with its placeholders and without its query: no value of the call or
// of its answer stands there. result may be nil.
func Describe(call *checkpoint.Snapshot, result *checkpoint.Result) string {
	why := call.Reason
	if result != nil && result.Reason != "" {
		why = result.Reason
	}
	if why != "" {
		return checkpoint.Irreversible.String() + " (" + string(why) + ")"
	}
	spec, err := ParseSpec(call.Undo)
	if err != nil {
		spec = new(Spec)
	}
	request := ""
	switch {
	case call.Way == 0:
		return "" // nothing is left of it
	case call.Way == checkpoint.Restore && call.Image != nil:
		request = (&job{call: call}).method() + " " + call.Request.Path
	case call.Way == checkpoint.Compensate && spec.Compensate != nil:
		request = spec.Compensate.Method + " " + spec.Compensate.URL
	case call.Way == checkpoint.Delegate && spec.Delegate != "":
		request = http.MethodPost + " " + spec.Delegate
	}
	request, _, _ = strings.Cut(request, "?")
	return strings.TrimSuffix(call.Way.String()+" "+request, " ")
}
