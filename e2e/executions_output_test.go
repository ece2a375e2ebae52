package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Section "Endpoints": the output is what a retry gets, for small and large answers,
// and takes nothing from the call: nothing is executed, no key is claimed.
func TestOutputIsTheReplay(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		answer func(http.ResponseWriter, *arrival)
	}{
		"small":    {"POST", status(201, "done", "Content-Type", "text/plain", "X-Two", "a", "X-Two", "b", "Location", "/there", "ETag", `"e"`)},
		"empty":    {"DELETE", status(204, "")},
		"large":    {"PUT", status(200, strings.Repeat("0123456789abcdef", 60_000), "Content-Type", "application/octet-stream")},
		"failed":   {"POST", status(500, "broken")},
		"redirect": {"POST", status(303, "", "Location", "/other")},
		"trailers": {"POST", trailers("body")},
		"gzip": {"POST", func(w http.ResponseWriter, a *arrival) {
			status(200, gzipped("unpacked", 1).body, "Content-Encoding", "gzip")(w, a)
		}},
		"cached": {"POST", status(200, "secret", "Cache-Control", "public, max-age=600", "CDN-Cache-Control", "max-age=600",
			"Surrogate-Control", "max-age=600", "Cross-Origin-Resource-Policy", "cross-origin")},
	} {
		t.Run(name, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, "agent_proxy %s", u.addr)
			u.on("/x", c.answer)
			r := request{method: c.method, path: "/x", id: "k", header: ann}
			if got := g.call(r); got.header.Get("Execution-Status") != "executed" {
				t.Fatalf("%d %q", got.status, got.body)
			}
			want := g.call(r)
			for range 2 {
				got := g.call(asking("k/output?wait=60s", ann))
				got.want(t, want.status, want.body, "replayed")
				for _, h := range []http.Header{got.header, want.header} {
					for _, name := range []string{"Date", "Cache-Control", "Cdn-Cache-Control", "Surrogate-Control"} {
						h.Del(name)
					}
				}
				for name, value := range map[string]string{"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"} {
					if got.header.Get(name) != value {
						t.Errorf("%s is %q", name, got.header.Get(name))
					}
					got.header.Del(name)
					want.header.Del(name)
				}
				if fmt.Sprint(got.header, got.trailer, got.length) != fmt.Sprint(want.header, want.trailer, want.length) {
					t.Errorf("got  %v %v %d\nwant %v %v %d", got.header, got.trailer, got.length, want.header, want.trailer, want.length)
				}
			}
			head := asking("k/output", ann)
			head.method = http.MethodHead
			if got := g.call(head); got.status != want.status || got.body != "" || got.header.Get("Idempotent-Replayed") != "true" {
				t.Errorf("HEAD: %d %v %q", got.status, got.header, got.body)
			}
			u.arrived("/x", 1)
			if u.total() != 1 {
				t.Errorf("%d requests reached the upstream", u.total())
			}
		})
	}
}

// P3: whatever the upstream said of its answer to the call, none of it may be kept on
// the way as the answer to a GET. Conditions and ranges are not looked at.
func TestOutputIsNotCached(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", status(200, "secret", "Cache-Control", "public, max-age=600", "Cdn-Cache-Control", "max-age=600",
		"Surrogate-Control", "max-age=600", "ETag", `"e"`, "Accept-Ranges", "bytes"))
	g.call(request{path: "/x", id: "k", header: ann})
	for _, h := range []headers{{}, {"If-None-Match": `"e"`}, {"Range": "bytes=0-1"}} {
		h["X-Api-Key"] = "ann"
		got := g.call(asking("k/output", h))
		got.want(t, 200, "secret", "replayed")
		if got.header.Get("Cache-Control") != "no-store" || got.header.Get("Cdn-Cache-Control") != "" || got.header.Get("Surrogate-Control") != "" {
			t.Errorf("%v", got.header)
		}
	}
}

// What has no answer to give says why, as a retry would hear it.
func TestOutputOfNothing(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s {\n retain_result 1h\n on_unknown retry\n action small {\n match path /large\n max_result 10\n}\n}", u.addr)
	u.on("/doubt", reset)
	u.on("/large", status(200, "more than ten bytes"))
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "done")(w, a)
	})
	for _, path := range []string{"doubt", "large", "done"} {
		g.call(request{path: "/" + path, id: path, header: ann})
	}
	for range 2 { // and `on_unknown` is for calls, not for questions
		if doc := g.call(asking("doubt/output?wait=60s", ann)).terminal(t, 409, "in-doubt"); doc.State != "in_doubt" || *doc.SafeNewKey {
			t.Errorf("%+v", doc)
		}
		if doc := g.call(asking("large/output", ann)).terminal(t, 409, "result-unavailable"); doc.State != "completed" {
			t.Errorf("%+v", doc)
		}
		g.call(asking("none/output?wait=60s", ann)).terminal(t, 404, "execution-unknown")
	}
	u.arrived("/doubt", 1)
	g.store.pass(2 * time.Hour)
	if doc := g.call(asking("done/output", ann)).terminal(t, 409, "result-expired"); doc.State != "completed" || !strings.Contains(doc.Detail, "until 20") {
		t.Errorf("%+v", doc)
	}
	running := g.begin(request{path: "/held", id: "held", header: ann})
	wait(t, hold.arrived, "the call")
	got := g.call(asking("held/output", ann))
	if doc := got.retryable(t, 409, "in-progress"); doc.State != "running" || doc.ExecutionID != "held" ||
		got.header.Get("Execution-Status") != "refused" || got.header.Get("Execution-Id") != "held" {
		t.Errorf("%+v %v", doc, got.header)
	}
	hold.open()
	running.answer()
}
