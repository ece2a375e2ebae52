package guard

import (
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// One call in doubt is probed by one retry at a time; the others wait for what it
// finds, and one of them may probe after it.
func TestOneProbeForAKeyAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := new(prober)
		key, other := execution.Key{1}, execution.Key{2}
		probe, first := p.enter(key)
		another, firstOther := p.enter(other)
		if !first || !firstOther {
			t.Fatal("the first of a key must wait")
		}
		var woken, doubts atomic.Int32
		for range 2 {
			same, first := p.enter(key)
			if first || same != probe {
				t.Fatal("a second probe of the key may run")
			}
			go func() {
				<-same.over
				woken.Add(1)
				if same.doubt {
					doubts.Add(1)
				}
			}()
		}
		p.leave(other, another)
		synctest.Wait()
		if n := woken.Load(); n != 0 {
			t.Fatalf("%d go on while the probe runs", n)
		}
		probe.doubt = true
		p.leave(key, probe)
		synctest.Wait()
		if woken.Load() != 2 || doubts.Load() != 2 {
			t.Errorf("of 2, %d were woken, and %d know that it stays in doubt", woken.Load(), doubts.Load())
		}
		if _, first := p.enter(key); !first {
			t.Error("after the probe nobody may probe again")
		}
	})
}
