package caddymodule

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// headerRequestTimeout is where callers say how long they wait, in seconds.
const headerRequestTimeout = "Request-Timeout"

// shorter is the part of a caller's time that a call may take: what comes of it must be
// known before the caller gives up (cascade 3.3.1).
const shorter = 0.9

// deadline is the longest that the call may take: its action's, or less where its caller
// has said for how long it waits.
func (x *exchange) deadline() time.Duration {
	most := time.Duration(x.action.Deadline)
	left, said := callersTime(x.r.Header, x.h.DeadlineHeader)
	if !said {
		return most
	}
	return min(most, time.Duration(float64(left)*shorter))
}

// callersTime is how long the caller waits, from the first field that says so. What is
// malformed says nothing.
func callersTime(h http.Header, field string) (time.Duration, bool) {
	if text := h.Get(field); text != "" {
		if d, ok := parseSeconds(text); ok {
			return d, true
		}
	}
	return circuits.ParseGRPCTimeout(h.Get("Grpc-Timeout"))
}

// parseSeconds reads a number of seconds, or a duration with a unit.
func parseSeconds(text string) (time.Duration, bool) {
	text = strings.TrimSpace(text)
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil {
		d, err := time.ParseDuration(text)
		return d, err == nil && d > 0
	}
	if !(seconds > 0) || seconds > longest.Seconds() {
		return 0, false
	}
	return time.Duration(math.Ceil(seconds * float64(time.Second))), true
}
