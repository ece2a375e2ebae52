package call

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Section "Endpoints": the output is what a retry gets, for small and large answers,
// and takes nothing from the call: nothing is executed, no key is claimed.
func TestOutputIsTheReplay(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		answer func(http.ResponseWriter, *harness.Arrival)
	}{
		"small":    {"POST", harness.Status(201, "done", "Content-Type", "text/plain", "X-Two", "a", "X-Two", "b", "Location", "/there", "ETag", `"e"`)},
		"empty":    {"DELETE", harness.Status(204, "")},
		"large":    {"PUT", harness.Status(200, strings.Repeat("0123456789abcdef", 60_000), "Content-Type", "application/octet-stream")},
		"failed":   {"POST", harness.Status(500, "broken")},
		"redirect": {"POST", harness.Status(303, "", "Location", "/other")},
		"trailers": {"POST", trailers("body")},
		"gzip": {"POST", func(w http.ResponseWriter, a *harness.Arrival) {
			harness.Status(200, gzipped("unpacked", 1).Body, "Content-Encoding", "gzip")(w, a)
		}},
		"cached": {"POST", harness.Status(200, "secret", "Cache-Control", "public, max-age=600", "CDN-Cache-Control", "max-age=600",
			"Surrogate-Control", "max-age=600", "Cross-Origin-Resource-Policy", "cross-origin")},
	} {
		t.Run(name, func(t *testing.T) {
			u := harness.NewUpstream(t)
			g := harness.Start(t, "agent_proxy %s", u.Addr)
			u.On("/x", c.answer)
			r := harness.Request{Method: c.method, Path: "/x", Id: "k", Header: harness.Ann}
			if got := g.Call(r); got.Header.Get("Execution-Status") != "executed" {
				t.Fatalf("%d %q", got.Status, got.Body)
			}
			want := g.Call(r)
			for range 2 {
				got := g.Call(asking("k/output?wait=60s", harness.Ann))
				got.Want(t, want.Status, want.Body, "replayed")
				for _, h := range []http.Header{got.Header, want.Header} {
					for _, name := range []string{"Date", "Cache-Control", "Cdn-Cache-Control", "Surrogate-Control"} {
						h.Del(name)
					}
				}
				for name, value := range map[string]string{"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"} {
					if got.Header.Get(name) != value {
						t.Errorf("%s is %q", name, got.Header.Get(name))
					}
					got.Header.Del(name)
					want.Header.Del(name)
				}
				if fmt.Sprint(got.Header, got.Trailer, got.Length) != fmt.Sprint(want.Header, want.Trailer, want.Length) {
					t.Errorf("got  %v %v %d\nwant %v %v %d", got.Header, got.Trailer, got.Length, want.Header, want.Trailer, want.Length)
				}
			}
			head := asking("k/output", harness.Ann)
			head.Method = http.MethodHead
			if got := g.Call(head); got.Status != want.Status || got.Body != "" || got.Header.Get("Idempotent-Replayed") != "true" {
				t.Errorf("HEAD: %d %v %q", got.Status, got.Header, got.Body)
			}
			u.Arrived("/x", 1)
			if u.Total() != 1 {
				t.Errorf("%d requests reached the upstream", u.Total())
			}
		})
	}
}

// P3: whatever the upstream said of its answer to the call, none of it may be kept on
// the way as the answer to a GET. Conditions and ranges are not looked at.
func TestOutputIsNotCached(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	u.On("/x", harness.Status(200, "secret", "Cache-Control", "public, max-age=600", "Cdn-Cache-Control", "max-age=600",
		"Surrogate-Control", "max-age=600", "ETag", `"e"`, "Accept-Ranges", "bytes"))
	g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Ann})
	for _, h := range []harness.Headers{{}, {"If-None-Match": `"e"`}, {"Range": "bytes=0-1"}} {
		h["X-Api-Key"] = "ann"
		got := g.Call(asking("k/output", h))
		got.Want(t, 200, "secret", "replayed")
		if got.Header.Get("Cache-Control") != "no-store" || got.Header.Get("Cdn-Cache-Control") != "" || got.Header.Get("Surrogate-Control") != "" {
			t.Errorf("%v", got.Header)
		}
	}
}

// What has no answer to give says why, as a retry would hear it.
func TestOutputOfNothing(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, "agent_proxy %s {\n retain_result 1h\n on_unknown retry\n action small {\n match path /large\n max_result 10\n}\n}", u.Addr)
	u.On("/doubt", harness.Reset)
	u.On("/large", harness.Status(200, "more than ten bytes"))
	u.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, "done")(w, a)
	})
	for _, path := range []string{"doubt", "large", "done"} {
		g.Call(harness.Request{Path: "/" + path, Id: path, Header: harness.Ann})
	}
	for range 2 { // and `on_unknown` is for calls, not for questions
		if doc := g.Call(asking("doubt/output?wait=60s", harness.Ann)).Terminal(t, 409, "in-doubt"); doc.State != "in_doubt" || *doc.SafeNewKey {
			t.Errorf("%+v", doc)
		}
		if doc := g.Call(asking("large/output", harness.Ann)).Terminal(t, 409, "result-unavailable"); doc.State != "completed" {
			t.Errorf("%+v", doc)
		}
		g.Call(asking("none/output?wait=60s", harness.Ann)).Terminal(t, 404, "execution-unknown")
	}
	u.Arrived("/doubt", 1)
	g.Store.Pass(2 * time.Hour)
	if doc := g.Call(asking("done/output", harness.Ann)).Terminal(t, 409, "result-expired"); doc.State != "completed" || !strings.Contains(doc.Detail, "until 20") {
		t.Errorf("%+v", doc)
	}
	running := g.Begin(harness.Request{Path: "/held", Id: "held", Header: harness.Ann})
	harness.Wait(t, hold.Arrived, "the call")
	got := g.Call(asking("held/output", harness.Ann))
	if doc := got.Retryable(t, 409, "in-progress"); doc.State != "running" || doc.ExecutionID != "held" ||
		got.Header.Get("Execution-Status") != "refused" || got.Header.Get("Execution-Id") != "held" {
		t.Errorf("%+v %v", doc, got.Header)
	}
	hold.Open()
	running.Answer()
}
