package guard

import (
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// cascade 3.3.2: however many workflows callers make up whom nobody has verified, those of
// the others are recorded, each once for each generation of a breaker.
func TestMadeUpWorkflowsLeaveRoomForOthers(t *testing.T) {
	var r rejections
	open := &breaker.OpenError{Key: breaker.Key{Upstream: "a:1"}, Generation: 2}
	recorded := func(verified bool, name string, n int) (all int) {
		for i := range n {
			if r.first(open, fmt.Sprint(name, i), verified) {
				all++
			}
		}
		return all
	}
	for range 2 {
		if got := recorded(false, "made up", 2*maxRejected); got != maxRejectedUnverified {
			t.Errorf("%d made-up workflows are recorded, not %d", got, maxRejectedUnverified)
		}
		if got := recorded(true, "made up", 1); got != 1 {
			t.Error("a workflow is not recorded because somebody has named it before")
		}
		if got := recorded(true, "real", 2*maxRejected); got != maxRejected-1 {
			t.Errorf("%d workflows are recorded, not %d", got, maxRejected-1)
		}
		if got := recorded(true, "real", 1) + recorded(false, "made up", 1); got != 0 {
			t.Error("recorded twice")
		}
		open.Generation++
	}
}
