//go:build unix

package operate

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

// P1, section "Store": the sealing key rotates under load, without a restart; a retry
// after it is a replay, also after a kill in the middle of re-sealing, and after a
// restart. The ring is in its file, or in a value.
func TestProcessRotatesTheKey(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, source := range []string{"file", "value"} {
		t.Run(source, func(t *testing.T) {
			upstream := harness.ProcNewUpstream(t)
			site := harness.ProcNewSite(t, upstream.Addr)
			key := site.Path("data.key")
			if source == "value" {
				key = site.Path("secret")
				if _, err := seal.Create(key); err != nil {
					t.Fatal(err)
				}
				site.App = "keys value {file." + key + "}"
			}
			gateway := site.Start(t)
			var calls []harness.ProcCall
			var answers []harness.ProcAnswer
			for n := range 100 {
				c := harness.ProcCall{Id: fmt.Sprint("early-", n)}
				calls, answers = append(calls, c), append(answers, gateway.Retry(t, c))
			}
			replay := func() {
				t.Helper()
				for i, c := range calls {
					harness.WantProcReplay(t, answers[i], gateway.Retry(t, c))
				}
			}
			hold := upstream.Hold(t, "running")
			owner := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "running"})
			harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")

			id, err := procRotateFile(key)
			if err != nil || id != 2 {
				t.Fatalf("rotated to %d, %v", id, err)
			}
			var beside sync.WaitGroup
			beside.Go(func() {
				for n := range 50 {
					c := harness.ProcCall{Id: fmt.Sprint("beside-", n)}
					harness.WantProcReplay(t, gateway.Retry(t, c), gateway.Retry(t, c))
				}
			})
			site.Guard = "deadline 50s" // Caddy passes over a configuration that has not changed
			gateway.Reload(t)
			harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("re-sealing started"), "re-sealing")
			replay()
			beside.Wait()
			if gateway.Log.Has("re-sealing finished") {
				t.Error("P6: re-sealing has not waited for the running execution")
			}
			hold.Open()
			first := harness.WaitWithin(t, harness.ProcBound, owner, "the call ends")
			if first.Err != nil || !first.Answer.Executed() {
				t.Fatalf("P6: the running call: %v, %v", first.Answer, first.Err)
			}
			harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("re-sealing finished"), "the end of re-sealing")
			calls, answers = append(calls, harness.ProcCall{Id: "running"}), append(answers, first.Answer)
			replay()

			// A running call keeps the pass from ending before the kill.
			cut := upstream.Hold(t, "cut")
			owner = gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "cut"})
			harness.WaitWithin(t, harness.ProcBound, cut.Arrived, "arrival")
			if _, err := procRotateFile(key); err != nil {
				t.Fatal(err)
			}
			site.Guard = "deadline 40s"
			gateway.Reload(t)
			harness.WaitWithin(t, harness.ProcBound, gateway.Log.When(`"re-sealing started","key":3`), "re-sealing")
			gateway.Kill()
			cut.Open()
			harness.WaitWithin(t, harness.ProcBound, owner, "the call breaks")
			said := gateway.Log.String()
			gateway = site.Start(t)
			replay()
			harness.WaitWithin(t, harness.ProcBound, gateway.Log.When(`"re-sealing finished","key":3`), "the end of re-sealing")
			replay()
			if a := gateway.Retry(t, harness.ProcCall{Id: "cut"}); a.Problem() != "in-doubt" {
				t.Errorf("P1: the call that was cut: %v", a)
			}
			gateway.End(t)
			gateway = site.Start(t)
			replay()
			text, err := os.ReadFile(key)
			if err != nil {
				t.Fatal(err)
			}
			for _, part := range strings.Split(string(text), `"`) {
				if len(part) == 44 && strings.Contains(said+gateway.Log.String(), part) {
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
