package e2e

import (
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// A flood of one caller is bounded, nothing of what is refused is recorded or sent,
// and another caller does not notice. Answers of the same caller are still given.
func TestQuotaBoundsAFlood(t *testing.T) {
	const open, flood = 5, 40
	u, hold := newUpstream(t), newGate(t)
	g := launch(t, setup{app: fmt.Sprintf("quota {\n open_executions %d\n}", open), site: "agent_proxy " + u.addr, badger: true})
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "done")(w, a)
	})
	g.call(request{path: "/before", id: "k", header: ann}).want(t, 201, "arrival 1", "executed")

	held := func(i int) request { return request{path: "/held", id: fmt.Sprint(i), header: ann} }
	var calls []*pending
	for i := range flood {
		calls = append(calls, g.begin(held(i)))
	}
	eventually(t, "all but those allowed are refused", func() bool { return done(calls) == flood-open })
	eventually(t, "the others run", func() bool { return u.arrivals("/held") == open })
	var running []int
	for i, p := range calls {
		select {
		case <-p.done:
		default:
			running = append(running, i)
			continue
		}
		got := p.answer()
		doc := got.retryable(t, 429, "quota-exceeded")
		if !*doc.SafeNewKey || doc.State != "" || doc.ExecutionID != fmt.Sprint(i) || got.header.Get("Retry-After") != "2" ||
			doc.Detail != "The caller has 5 executions that run or are in doubt, at most 5." {
			t.Errorf("%+v %v", doc, got.header)
		}
		g.call(asking(fmt.Sprint(i), ann)).terminal(t, 404, "execution-unknown")
	}
	g.call(request{path: "/other", id: "k", header: bob}).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/before", id: "k", header: ann}).want(t, 201, "arrival 1", "replayed")
	attached := g.begin(held(running[0]))
	followers(t, 1)
	hold.open()
	attached.answer().want(t, 201, "done", "attached")
	for _, i := range running {
		calls[i].answer().want(t, 201, "done", "executed")
	}
	for i := range flood { // in turn they are all let through
		if got := g.call(held(i)); got.status != 201 {
			t.Errorf("%d: %d %q", i, got.status, got.body)
		}
	}
	u.arrived("/held", flood)
}

// done counts the calls that are over.
func done(calls []*pending) int {
	n := 0
	for _, p := range calls {
		select {
		case <-p.done:
			n++
		default:
		}
	}
	return n
}

// Stored bytes are bounded, large answers too; room comes back as answers expire, and
// the refusal says when.
func TestQuotaBoundsStoredBytes(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{app: "quota {\n stored_bytes 1MiB\n}", site: "agent_proxy " + u.addr + " {\n retain_result 1h\n}"})
	fill := func(path string, size int) (stored int) {
		u.on(path, status(200, strings.Repeat("x", size)))
		for i := 0; ; i++ {
			r := request{path: path, id: fmt.Sprint(i), header: ann}
			got := g.call(r)
			if got.status == 200 {
				continue
			}
			doc := got.retryable(t, 429, "quota-exceeded")
			if after, err := strconv.Atoi(got.header.Get("Retry-After")); err != nil || after > 3600+600 || after < 3500 || !strings.Contains(doc.Detail, "at most 1048576") {
				t.Errorf("%v %+v", got.header, doc)
			}
			u.arrived(path, i)
			return i
		}
	}
	if n := fill("/large", 300<<10); n != 4 {
		t.Errorf("%d answers of 300 KiB fit into 1 MiB", n)
	}
	g.call(request{path: "/large", id: "0", header: ann}).want(t, 200, strings.Repeat("x", 300<<10), "replayed")
	g.call(request{path: "/other", id: "0", header: bob}).want(t, 201, "arrival 1", "executed")
}

// C-3.3.3-d: what the calls of one workflow store is bounded, whoever makes them, and other workflows do not notice.
// An answer that finds no room is not kept; its key is.
func TestQuotaBoundsWhatAWorkflowStores(t *testing.T) {
	u := newUpstream(t)
	g := launch(t, setup{app: "quota {\n stored_bytes workflow 1MiB\n}", site: "agent_proxy " + u.addr + " {\n retain_result 1h\n}"})
	u.on("/large", status(200, strings.Repeat("x", 300<<10)))
	in := func(workflow string, i int) request {
		header := maps.Clone(ann)
		header["Workflow-Id"] = workflow
		return request{path: "/large", id: fmt.Sprint(workflow, i), header: header}
	}
	n := 0
	for ; ; n++ {
		got := g.call(in("w-1", n))
		if got.status == 200 {
			continue
		}
		doc := got.retryable(t, 429, "quota-exceeded")
		if after, err := strconv.Atoi(got.header.Get("Retry-After")); err != nil || after > 3600+600 || after < 3500 || !strings.Contains(doc.Detail, "at most 1048576") {
			t.Errorf("%v %+v", got.header, doc)
		}
		break
	}
	u.arrived("/large", n)
	if n < 3 || n > 5 {
		t.Errorf("%d answers of 300 KiB fit into 1 MiB", n)
	}
	g.call(in("w-1", 0)).want(t, 200, strings.Repeat("x", 300<<10), "replayed")
	g.call(in("w-2", 0)).want(t, 200, strings.Repeat("x", 300<<10), "executed")
}
