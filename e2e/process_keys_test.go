//go:build unix

package e2e

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

// P1, section "Store": the sealing key rotates under load, without a restart; a retry
// after it is a replay, also after a kill in the middle of re-sealing, and after a
// restart. The ring is in its file, or in a value.
func TestProcessRotatesTheKey(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, source := range []string{"file", "value"} {
		t.Run(source, func(t *testing.T) {
			upstream := procNewUpstream(t)
			site := procNewSite(t, upstream.addr)
			key := site.path("data.key")
			if source == "value" {
				key = site.path("secret")
				if _, err := seal.Create(key); err != nil {
					t.Fatal(err)
				}
				site.app = "keys value {file." + key + "}"
			}
			gateway := site.start(t)
			var calls []procCall
			var answers []procAnswer
			for n := range 100 {
				c := procCall{id: fmt.Sprint("early-", n)}
				calls, answers = append(calls, c), append(answers, gateway.retry(t, c))
			}
			replay := func() {
				t.Helper()
				for i, c := range calls {
					wantProcReplay(t, answers[i], gateway.retry(t, c))
				}
			}
			hold := upstream.hold(t, "running")
			owner := gateway.begin(t.Context(), procDial(), procCall{id: "running"})
			waitWithin(t, procBound, hold.arrived, "arrival")

			id, err := procRotateFile(key)
			if err != nil || id != 2 {
				t.Fatalf("rotated to %d, %v", id, err)
			}
			var beside sync.WaitGroup
			beside.Go(func() {
				for n := range 50 {
					c := procCall{id: fmt.Sprint("beside-", n)}
					wantProcReplay(t, gateway.retry(t, c), gateway.retry(t, c))
				}
			})
			site.guard = "deadline 50s" // Caddy passes over a configuration that has not changed
			gateway.reload(t)
			waitWithin(t, procBound, gateway.log.when("re-sealing started"), "re-sealing")
			replay()
			beside.Wait()
			if gateway.log.has("re-sealing finished") {
				t.Error("P6: re-sealing has not waited for the running execution")
			}
			hold.open()
			first := waitWithin(t, procBound, owner, "the call ends")
			if first.err != nil || !first.answer.executed() {
				t.Fatalf("P6: the running call: %v, %v", first.answer, first.err)
			}
			waitWithin(t, procBound, gateway.log.when("re-sealing finished"), "the end of re-sealing")
			calls, answers = append(calls, procCall{id: "running"}), append(answers, first.answer)
			replay()

			// A running call keeps the pass from ending before the kill.
			cut := upstream.hold(t, "cut")
			owner = gateway.begin(t.Context(), procDial(), procCall{id: "cut"})
			waitWithin(t, procBound, cut.arrived, "arrival")
			if _, err := procRotateFile(key); err != nil {
				t.Fatal(err)
			}
			site.guard = "deadline 40s"
			gateway.reload(t)
			waitWithin(t, procBound, gateway.log.when(`"re-sealing started","key":3`), "re-sealing")
			gateway.kill()
			cut.open()
			waitWithin(t, procBound, owner, "the call breaks")
			said := gateway.log.String()
			gateway = site.start(t)
			replay()
			waitWithin(t, procBound, gateway.log.when(`"re-sealing finished","key":3`), "the end of re-sealing")
			replay()
			if a := gateway.retry(t, procCall{id: "cut"}); a.problem() != "in-doubt" {
				t.Errorf("P1: the call that was cut: %v", a)
			}
			gateway.end(t)
			gateway = site.start(t)
			replay()
			text, err := os.ReadFile(key)
			if err != nil {
				t.Fatal(err)
			}
			for _, part := range strings.Split(string(text), `"`) {
				if len(part) == 44 && strings.Contains(said+gateway.log.String(), part) {
					t.Error("P8: the log holds a key")
				}
			}
		})
	}
}

// procRotateFile rotates a key file beside the gateways that use it.
func procRotateFile(path string) (uint32, error) {
	ring, err := seal.Load(path)
	if err != nil {
		return 0, err
	}
	return ring.Rotate(path, func(uint32) error { return nil })
}
