package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Control characters never get as far as the guard: Go's server refuses them.
func TestExecutionIDControlCharacters(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, c := range []string{"\x00", "\x01", "\x1b", "\x7f"} {
		got := g.raw("POST /bad HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: a" + c + "b\r\n\r\n")
		if !strings.HasPrefix(got, "HTTP/1.1 400 ") {
			t.Errorf("%q: %q", c, got)
		}
	}
	u.arrived("/bad", 0)
}

// The sources of an id go in order; the first that has one counts.
func TestExecutionIDSources(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	g.call(request{path: "/fallback", header: map[string]string{"Execution-Id": "e"}}).want(t, 201, "arrival 1", "executed")
	got := g.call(request{path: "/fallback", id: "e"})
	got.want(t, 201, "arrival 1", "replayed") // the same name, wherever it stands
	if id := got.header.Get("Execution-Id"); id != "e" {
		t.Errorf("Execution-Id: %q", id)
	}
	g.call(request{path: "/fallback", id: "k", header: map[string]string{"Execution-Id": "e"}}).want(t, 201, "arrival 2", "executed")

	g = start(t, `agent_proxy %s {
		execution_id header X-First X-Second
		execution_id json /meta/idempotency_key /requestId
		execution_id placeholder {http.request.uri.query.op}
		missing_id require
	}`, u.addr)
	for i, row := range []struct {
		request
		id string
	}{
		{request{header: map[string]string{"X-First": "one", "X-Second": "two"}}, "one"},
		{request{header: map[string]string{"X-Second": "two"}}, "two"},
		{request{body: `{"meta":{"idempotency_key":"three"},"requestId":"four"}`}, "three"},
		{request{body: `{"meta":{},"requestId":"four"}`}, "four"},
		{request{body: `{"requestId":12345678901234567890}`}, "12345678901234567890"},
		{request{body: `{"requestId":null}`, path: "?op=five"}, "five"},
		{request{path: "?op=five"}, "five"},
	} {
		path := fmt.Sprintf("/source/%d", i)
		row.path = path + row.path
		got := g.call(row.request)
		got.want(t, 201, "arrival 1", "executed")
		if id := got.header.Get("Execution-Id"); id != row.id {
			t.Errorf("%d: %q, want %q", i, id, row.id)
		}
		g.call(row.request).want(t, 201, "arrival 1", "replayed")
		u.arrived(path, 1)
	}
	for _, bad := range []request{
		{body: `{"requestId":"a b"}`},
		{body: `{"requestId":""}`},
		{body: `{"requestId":["x"]}`},
		{body: `{"requestId":"a","requestId":"b"}`},
		{body: `{"requestId":"` + strings.Repeat("x", 256) + `"}`},
		{path: "?op=a%20b"},
	} {
		bad.path = "/bad" + bad.path
		g.call(bad).terminal(t, 400, "execution-id-invalid")
	}
	for _, none := range []request{
		{id: "k"}, // not a source here
		{body: `not JSON`},
		{body: `{"requestId":"x"}`, header: map[string]string{"Content-Type": "text/plain"}},
	} {
		none.path = "/bad"
		doc := g.call(none).terminal(t, 400, "execution-id-missing")
		if !strings.Contains(doc.Detail, "X-First") || !*doc.SafeNewKey {
			t.Errorf("%+v", doc)
		}
	}
	u.arrived("/bad", 0)
}

// Trap 27: a missing id is refused, or made, as configured; the answer says so.
func TestMissingID(t *testing.T) {
	u := newUpstream(t)
	t.Run("require", func(t *testing.T) {
		g := start(t, "agent_proxy %s {\n missing_id require\n}", u.addr)
		doc := g.call(request{path: "/require"}).terminal(t, 400, "execution-id-missing")
		if !strings.Contains(doc.Detail, "Idempotency-Key") {
			t.Errorf("detail: %q", doc.Detail)
		}
		u.arrived("/require", 0)
	})
	t.Run("mint", func(t *testing.T) {
		g := start(t, "agent_proxy %s", u.addr)
		one, two := g.call(request{path: "/mint"}), g.call(request{path: "/mint"})
		one.want(t, 201, "arrival 1", "executed")
		two.want(t, 201, "arrival 2", "executed")
		id := one.header.Get("Execution-Id")
		if id == "" || id == two.header.Get("Execution-Id") {
			t.Errorf("ids %q and %q", id, two.header.Get("Execution-Id"))
		}
		// Who kept the minted id can ask again under it.
		g.call(request{path: "/mint", id: id}).want(t, 201, "arrival 1", "replayed")
	})
	t.Run("derive", func(t *testing.T) {
		g := start(t, "agent_proxy %s {\n missing_id derive 1m\n}", u.addr)
		call := request{path: "/derive"}
		g.call(call).want(t, 201, "arrival 1", "executed")
		g.call(call).want(t, 201, "arrival 1", "replayed")
		other := call
		other.body = `{"amount":2}`
		g.call(other).want(t, 201, "arrival 2", "executed")
		stranger := call
		stranger.header = map[string]string{"X-Api-Key": "stranger"}
		g.call(stranger).want(t, 201, "arrival 3", "executed")
		g.store.pass(59 * time.Second)
		g.call(call).want(t, 201, "arrival 1", "replayed")
		g.store.pass(2 * time.Second)
		g.call(call).want(t, 201, "arrival 4", "executed")
	})
	t.Run("inherit", func(t *testing.T) {
		g := start(t, "agent_proxy %s {\n inherit\n missing_id require\n}", u.addr)
		child := func(parent, body string) request {
			return request{path: "/inherit", body: body, header: map[string]string{"Execution-Parent": parent}}
		}
		one := g.call(child("p1", `{"a":1}`))
		one.want(t, 201, "arrival 1", "executed")
		g.call(child("p1", `{"a":1}`)).want(t, 201, "arrival 1", "replayed")
		g.call(child("p1", `{"a":2}`)).want(t, 201, "arrival 2", "executed")
		g.call(child("p2", `{"a":1}`)).want(t, 201, "arrival 3", "executed")
		g.call(request{path: "/inherit"}).terminal(t, 400, "execution-id-missing")
		if id := one.header.Get("Execution-Id"); !strings.HasPrefix(id, "inherited-") {
			t.Errorf("id %q", id)
		}
		g.store.pass(time.Hour) // unlike a derived one, it does not lapse
		g.call(child("p1", `{"a":1}`)).want(t, 201, "arrival 1", "replayed")
	})
}
