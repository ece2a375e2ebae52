package guard

import (
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// The doubts whose answers may come on GET streams are bounded, also those of one session: the oldest one stays in doubt.
func TestDoubtsElsewhereAreBounded(t *testing.T) {
	var l elsewhere
	h := &Handler{rules: &protocol.Rules{Protocol: protocol.MCP}}
	add := func(session string, n int) {
		x := &Call{Request: Request{guardedRequest: guardedRequest{h: h, message: &protocol.Message{Whole: make([]byte, 1<<20)}}}}
		x.client.session = requestName{session: session}
		x.client.name = requestName{session: session, id: fmt.Sprint(n)}
		l.add(x, [16]byte{}, execution.Outcome{})
	}
	add("first", 0)
	for n := range 100 {
		add("s", n)
	}
	s := requestName{session: "s"}
	if n := len(l.order); l.bytes > maxElsewhere || n < 60 || n != len(l.of[s]) || len(l.of) != 1 {
		t.Errorf("%d bytes, %d of %d in %d sessions", l.bytes, len(l.of[s]), n, len(l.of))
	}
	for id, want := range map[string]bool{"0": false, "99": true} {
		if got := l.take(s, proof{}, id, new(clients)).call != nil; got != want {
			t.Errorf("%s: %t", id, got)
		}
	}
}
