package e2e

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
)

// Traps 16 and 17: a replay has what the execution did to the header, once. Fields of
// one moment, one connection or one client are not among it.
func TestReplayedHeaders(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `
	header X-Outer outer
	header X-Request {http.request.uuid}
	header X-Deferred deferred {
		defer
	}
	header ?X-Default default
	header -X-Hidden
	agent_proxy %s`, u.addr)
	u.on("/x", status(201, "made",
		"Location", "/made/1", "Content-Type", "text/x", "X-Two", "1", "X-Two", "2", "X-Empty", "", "X-Outer", "inner",
		"X-Hidden", "secret", "Etag", `"e"`, "Cache-Control", "no-cache", "Link", "<a>", "Vary", "Origin",
		"Date", "Mon, 01 Jan 2001 00:00:00 GMT", "Set-Cookie", "s=1", "Set-Cookie2", "s=2", "Server-Timing", "db",
		"Keep-Alive", "timeout=5", "Proxy-Authenticate", "Basic", "Te", "trailers",
	))
	r := request{path: "/x", id: "k"}
	live, again := g.call(r), g.call(r)
	live.want(t, 201, "made", "executed")
	again.want(t, 201, "made", "replayed")
	if live.header.Get("Set-Cookie") != "s=1" {
		t.Error("the execution's own answer lost its cookie")
	}
	if got := again.header.Get("Date"); got == "" || strings.Contains(got, "2001") {
		t.Errorf("the replay's Date is %q", got)
	}
	want := live.header.Clone()
	for _, name := range []string{"Set-Cookie", "Set-Cookie2", "Server-Timing", "Date"} {
		want.Del(name)
	}
	again.header.Del("Date")
	// What others say of each request is said of the retry.
	if got := again.header.Get("X-Request"); got == "" || got == want.Get("X-Request") {
		t.Errorf("the replay is of the request %q", got)
	}
	want.Set("X-Request", again.header.Get("X-Request"))
	want.Set("Execution-Status", "replayed")
	want.Set("Idempotent-Replayed", "true")
	if !reflect.DeepEqual(again.header, want) {
		t.Errorf("the replay has\n%v, want\n%v", again.header, want)
	}
	for name, values := range map[string][]string{
		"X-Two": {"1", "2"}, "X-Empty": {""}, "X-Deferred": {"deferred"}, "X-Default": {"default"}, "Location": {"/made/1"},
		"X-Hidden": nil, "Keep-Alive": nil, "Proxy-Authenticate": nil, "Te": nil,
	} {
		if got := again.header[name]; !reflect.DeepEqual(got, values) {
			t.Errorf("%s: %q, want %q", name, got, values)
		}
	}
}

// What an upstream says in our own fields is not said by us.
func TestUpstreamCannotSpeakForTheGuard(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	lies := []string{
		"Execution-Id", "lie", "Execution-Status", "attached", "Idempotent-Replayed", "true", "Execution-Checkpoint", "lie",
	}
	check := func(name string, got reply, execution string) {
		t.Helper()
		got.want(t, got.status, got.body, execution)
		if v := got.header.Values("Execution-Id"); len(v) != 1 || v[0] != "k" {
			t.Errorf("%s: Execution-Id %q", name, v)
		}
		if v := got.header.Get("Execution-Checkpoint"); v != "" {
			t.Errorf("%s: Execution-Checkpoint %q", name, v)
		}
	}
	for _, code := range []int{201, 204, 429, 504} {
		path := fmt.Sprintf("/%d", code)
		u.on(path, first(status(code, "", lies...)))
		execution := "executed"
		if code == 504 {
			execution = "in_doubt"
		}
		check(path, g.call(request{path: path, id: "k"}), execution)
	}
	check("replay", g.call(request{path: "/201", id: "k"}), "replayed")
	doc := g.call(request{path: "/504", id: "k"})
	doc.terminal(t, 409, "in-doubt")
	if doc.header.Get("Execution-Status") != "in_doubt" || doc.header.Get("Idempotent-Replayed") != "" {
		t.Errorf("in doubt: %v", doc.header)
	}
	u.on("/trailers", func(w http.ResponseWriter, a *arrival) {
		flushed("body")(w, a)
		for i := 0; i < len(lies); i += 2 {
			w.Header().Set(http.TrailerPrefix+lies[i], lies[i+1])
		}
	})
	for _, execution := range []string{"executed", "replayed"} {
		got := g.call(request{path: "/trailers", id: "k"})
		check("trailers", got, execution)
		if len(got.trailer) != 0 {
			t.Errorf("%s: trailers %v", execution, got.trailer)
		}
	}
}

// What a broken or refused attempt left in the header is not in the problem.
func TestProblemsHaveNoHeadersOfAnAttempt(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "header X-Outer o\nagent_proxy %s", u.addr)
	// The header is the end, so that nothing has left when the record fails.
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		g.store.failCommits(errBroken)
		status(204, "", "X-Upstream", "u", "Etag", "e")(w, a)
	})
	got := g.call(request{path: "/x", id: "k"})
	g.store.onCommit(nil)
	got.terminal(t, 409, "in-doubt")
	if got.header.Get("X-Upstream") != "" || got.header.Get("Etag") != "" || got.header.Get("Execution-Status") != "in_doubt" {
		t.Errorf("header %v", got.header)
	}
	if got.header.Get("X-Outer") != "o" {
		t.Errorf("header %v", got.header)
	}
}
