//go:build unix

package contain

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// C-3.4.1-c, C-3.4.1-d: answers that are slow against what is usual of the upstream are a reason for the root of what
// fails meanwhile. What is usual is known after 200 answers and 30 s, and outlives a reload.
func TestCascadeOfASlowUpstream(t *testing.T) {
	lab := layCascadeLab(t, "on_cascade alert")
	site := harness.ProcNewSite(t, lab.u.Addr)
	load := func(directives string) {
		site.Raw = fmt.Sprintf("{\n admin %s\n persist_config off\n agent_guard {\n store badger %s\n %s\n }\n}\nhttp://%s {\n bind 127.0.0.1\n %s\n}\n",
			site.Admin, site.Path("data"), lab.app, site.Addr, directives)
	}
	load(lab.site)
	gateway := site.Start(t)
	lab.Gateway = site.Gateway(t)
	ask := func(path string) *harness.Pending { return lab.Begin(harness.Request{Method: "GET", Path: path}) }
	begun := time.Now()
	for range 200 {
		if got := ask("/d/usual").Answer(); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	t.Parallel() // its gateway is a process, and the others have the time until its first window ends
	harness.Wait(t, time.After(time.Until(begun.Add(31*time.Second))), "the end of the first window")
	ask("/d/usual").Answer()
	usual := func() string {
		return lab.Samples("/metrics")[fmt.Sprintf("agent_guard_upstream_latency_usual_seconds{upstream=%q}", lab.u.Addr)]
	}
	first := usual()
	n, err := strconv.ParseFloat(first, 64)
	if err != nil || n <= 0 || n > 5 {
		t.Fatalf("the baseline is %q", first)
	}
	load(lab.site + "\n# reloaded\n header -Nothing")
	gateway.Reload(t)
	lab.u.On("/d/slow", func(w http.ResponseWriter, _ *harness.Arrival) {
		<-time.After(time.Second + time.Duration(4*n*float64(time.Second))) // more than three times the usual, and than 250 ms
		w.WriteHeader(http.StatusCreated)
	})
	var slow []*harness.Pending
	for range 10 {
		slow = append(slow, ask("/d/slow"))
	}
	for _, p := range slow {
		p.Answer()
	}
	lab.u.On("/d", harness.Status(http.StatusInternalServerError, ""))
	wid := uuid.NewString()
	lab.act("a", wid, "/b")
	found := lab.cascades(lab.agents["a"], wid, 1)[0]
	if found.Root == nil || found.Root.Upstream != lab.u.Addr || !slices.Contains(found.Root.Reasons, "slow") {
		t.Errorf("%+v %+v", found, found.Root)
	}
	if again := usual(); again != first {
		t.Errorf("the baseline was %s, and is %s", first, again)
	}
}
