package call

import (
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// A flood of one caller is bounded, nothing of what is refused is recorded or sent,
// and another caller does not notice. Answers of the same caller are still given.
func TestQuotaBoundsAFlood(t *testing.T) {
	const open, flood = 5, 40
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Launch(t, harness.Setup{App: fmt.Sprintf("quota {\n open_executions %d\n}", open), Site: "agent_proxy " + u.Addr, Badger: true})
	u.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, "done")(w, a)
	})
	g.Call(harness.Request{Path: "/before", Id: "k", Header: harness.Ann}).Want(t, 201, "arrival 1", "executed")

	held := func(i int) harness.Request {
		return harness.Request{Path: "/held", Id: fmt.Sprint(i), Header: harness.Ann}
	}
	var calls []*harness.Pending
	for i := range flood {
		calls = append(calls, g.Begin(held(i)))
	}
	harness.Eventually(t, "all but those allowed are refused", func() bool { return done(calls) == flood-open })
	harness.Eventually(t, "the others run", func() bool { return u.Arrivals("/held") == open })
	var running []int
	for i, p := range calls {
		select {
		case <-p.Done:
		default:
			running = append(running, i)
			continue
		}
		got := p.Answer()
		doc := got.Retryable(t, 429, "quota-exceeded")
		if !*doc.SafeNewKey || doc.State != "" || doc.ExecutionID != fmt.Sprint(i) || got.Header.Get("Retry-After") != "2" ||
			doc.Detail != "The caller has 5 executions that run or are in doubt, at most 5." {
			t.Errorf("%+v %v", doc, got.Header)
		}
		g.Call(asking(fmt.Sprint(i), harness.Ann)).Terminal(t, 404, "execution-unknown")
	}
	g.Call(harness.Request{Path: "/other", Id: "k", Header: harness.Bob}).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Path: "/before", Id: "k", Header: harness.Ann}).Want(t, 201, "arrival 1", "replayed")
	attached := g.Begin(held(running[0]))
	harness.Followers(t, 1)
	hold.Open()
	attached.Answer().Want(t, 201, "done", "attached")
	for _, i := range running {
		calls[i].Answer().Want(t, 201, "done", "executed")
	}
	for i := range flood { // in turn they are all let through
		if got := g.Call(held(i)); got.Status != 201 {
			t.Errorf("%d: %d %q", i, got.Status, got.Body)
		}
	}
	u.Arrived("/held", flood)
}

// done counts the calls that are over.
func done(calls []*harness.Pending) int {
	n := 0
	for _, p := range calls {
		select {
		case <-p.Done:
			n++
		default:
		}
	}
	return n
}

// Stored bytes are bounded, large answers too; room comes back as answers expire, and
// the refusal says when.
func TestQuotaBoundsStoredBytes(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{App: "quota {\n stored_bytes 1MiB\n}", Site: "agent_proxy " + u.Addr + " {\n retain_result 1h\n}"})
	fill := func(path string, size int) (stored int) {
		u.On(path, harness.Status(200, strings.Repeat("x", size)))
		for i := 0; ; i++ {
			r := harness.Request{Path: path, Id: fmt.Sprint(i), Header: harness.Ann}
			got := g.Call(r)
			if got.Status == 200 {
				continue
			}
			doc := got.Retryable(t, 429, "quota-exceeded")
			if after, err := strconv.Atoi(got.Header.Get("Retry-After")); err != nil || after > 3600+600 || after < 3500 || !strings.Contains(doc.Detail, "at most 1048576") {
				t.Errorf("%v %+v", got.Header, doc)
			}
			u.Arrived(path, i)
			return i
		}
	}
	if n := fill("/large", 300<<10); n != 4 {
		t.Errorf("%d answers of 300 KiB fit into 1 MiB", n)
	}
	g.Call(harness.Request{Path: "/large", Id: "0", Header: harness.Ann}).Want(t, 200, strings.Repeat("x", 300<<10), "replayed")
	g.Call(harness.Request{Path: "/other", Id: "0", Header: harness.Bob}).Want(t, 201, "arrival 1", "executed")
}

// C-3.3.3-d: what the calls of one workflow store is bounded, whoever makes them, and other workflows do not notice.
// An answer that finds no room is not kept; its key is.
func TestQuotaBoundsWhatAWorkflowStores(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{App: "quota {\n stored_bytes workflow 1MiB\n}", Site: "agent_proxy " + u.Addr + " {\n retain_result 1h\n}"})
	u.On("/large", harness.Status(200, strings.Repeat("x", 300<<10)))
	in := func(workflow string, i int) harness.Request {
		header := maps.Clone(harness.Ann)
		header["Workflow-Id"] = workflow
		return harness.Request{Path: "/large", Id: fmt.Sprint(workflow, i), Header: header}
	}
	n := 0
	for ; ; n++ {
		got := g.Call(in("w-1", n))
		if got.Status == 200 {
			continue
		}
		doc := got.Retryable(t, 429, "quota-exceeded")
		if after, err := strconv.Atoi(got.Header.Get("Retry-After")); err != nil || after > 3600+600 || after < 3500 || !strings.Contains(doc.Detail, "at most 1048576") {
			t.Errorf("%v %+v", got.Header, doc)
		}
		break
	}
	u.Arrived("/large", n)
	if n < 3 || n > 5 {
		t.Errorf("%d answers of 300 KiB fit into 1 MiB", n)
	}
	g.Call(in("w-1", 0)).Want(t, 200, strings.Repeat("x", 300<<10), "replayed")
	g.Call(in("w-2", 0)).Want(t, 200, strings.Repeat("x", 300<<10), "executed")
}
