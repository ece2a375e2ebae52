package guard

import (
	"context"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// What waits for its answer without a request is bounded, and so is what may.
func TestWaitingCallsAreBounded(t *testing.T) {
	l := &clients{}
	listed := func(id string) *client {
		c := &client{name: requestName{session: "s", id: id}, session: requestName{session: "s"}, call: &Call{action: &Action{}}}
		c.gone, c.leave = context.WithCancel(t.Context())
		l.add(c, execution.Key{})
		return c
	}
	wait := func(c *client, cost int) <-chan struct{} {
		comes, _ := l.wait(c, cost)
		return comes
	}
	first, second := listed("1"), listed("2")
	if wait(first, maxOpen) == nil {
		t.Error("there is room for the first")
	}
	if wait(second, 1) != nil {
		t.Error("there is no room for a second")
	}
	l.remove(first)
	if wait(second, 1) == nil {
		t.Error("the first has gone")
	}
	l.remove(second)
	for id := range mostClients {
		l.named[requestName{id: fmt.Sprint(id)}] = nil
	}
	if wait(listed("3"), 1) != nil {
		t.Error("who is not listed cannot be found")
	}
	if l.waiting != 0 || len(l.sessions) != 0 {
		t.Errorf("%d bytes, %d sessions", l.waiting, len(l.sessions))
	}
}
