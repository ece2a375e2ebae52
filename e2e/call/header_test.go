package call

import (
	"reflect"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Traps 16 and 17: a replay has what the execution did to the header, once. Fields of
// one moment, one connection or one client are not among it.
func TestReplayedHeaders(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `
	header X-Outer outer
	header X-Request {http.request.uuid}
	header X-Deferred deferred {
		defer
	}
	header ?X-Default default
	header -X-Hidden
	agent_proxy %s`, u.Addr)
	u.On("/x", harness.Status(201, "made",
		"Location", "/made/1", "Content-Type", "text/x", "X-Two", "1", "X-Two", "2", "X-Empty", "", "X-Outer", "inner",
		"X-Hidden", "secret", "Etag", `"e"`, "Cache-Control", "no-cache", "Link", "<a>", "Vary", "Origin",
		"Date", "Mon, 01 Jan 2001 00:00:00 GMT", "Set-Cookie", "s=1", "Set-Cookie2", "s=2", "Server-Timing", "db",
		"Keep-Alive", "timeout=5", "Proxy-Authenticate", "Basic", "Te", "trailers",
	))
	r := harness.Request{Path: "/x", Id: "k"}
	live, again := g.Call(r), g.Call(r)
	live.Want(t, 201, "made", "executed")
	again.Want(t, 201, "made", "replayed")
	if live.Header.Get("Set-Cookie") != "s=1" {
		t.Error("the execution's own answer lost its cookie")
	}
	if got := again.Header.Get("Date"); got == "" || strings.Contains(got, "2001") {
		t.Errorf("the replay's Date is %q", got)
	}
	want := live.Header.Clone()
	for _, name := range []string{"Set-Cookie", "Set-Cookie2", "Server-Timing", "Date"} {
		want.Del(name)
	}
	again.Header.Del("Date")
	// What others say of each request is said of the retry.
	if got := again.Header.Get("X-Request"); got == "" || got == want.Get("X-Request") {
		t.Errorf("the replay is of the request %q", got)
	}
	want.Set("X-Request", again.Header.Get("X-Request"))
	want.Set("Execution-Status", "replayed")
	want.Set("Idempotent-Replayed", "true")
	if !reflect.DeepEqual(again.Header, want) {
		t.Errorf("the replay has\n%v, want\n%v", again.Header, want)
	}
	for name, values := range map[string][]string{
		"X-Two": {"1", "2"}, "X-Empty": {""}, "X-Deferred": {"deferred"}, "X-Default": {"default"}, "Location": {"/made/1"},
		"X-Hidden": nil, "Keep-Alive": nil, "Proxy-Authenticate": nil, "Te": nil,
	} {
		if got := again.Header[name]; !reflect.DeepEqual(got, values) {
			t.Errorf("%s: %q, want %q", name, got, values)
		}
	}
}
