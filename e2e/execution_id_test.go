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

// P1: a caller names its call in whatever field or member its API has for that: each such name is a key, and
// goes on as it came.
func TestKeysUnderOtherNames(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for i, name := range []string{
		"X-Idempotency-Key", "PayPal-Request-Id", "Cko-Idempotency-Key", "Request-Idempotency-Key", "Idempotence-Key",
		"X-Idempotency-Id", "X-Idempotent-Key", "IdempotencyKey", "X-Payout-Idempotency", "X-Idempotency-Token",
	} {
		r := request{path: fmt.Sprintf("/field/%d", i), header: map[string]string{name: `k`}}
		got := g.call(r)
		got.want(t, 201, "arrival 1", "executed")
		if id := got.header.Get("Execution-Id"); id != "k" {
			t.Errorf("%s: Execution-Id %q", name, id)
		}
		g.call(r).want(t, 201, "arrival 1", "replayed")
		u.arrived(r.path, 1)
		if sent := u.last(r.path).Header.Get(name); sent != "k" {
			t.Errorf("%s went on as %q", name, sent)
		}
		other := r
		other.body = `{"amount":2}`
		g.call(other).terminal(t, 422, "fingerprint-mismatch")
	}
	for i, body := range []string{
		`{"idempotency_key":"k","amount":1}`, `{"amount":1, "idempotencyKey" : "k"}`, `{"idempotency\u005fkey":"\u006b"}`,
		`{"idempotency_key":"k","idempotencyKey":"k"}`, `{"idempotency_key":null,"idempotencyKey":"k"}`,
		`{"idempotency_key":"` + strings.Repeat("x", 255) + `"}`, `{"idempotency_key":12345678901234567890}`,
	} {
		r := request{path: fmt.Sprintf("/member/%d", i), body: body}
		g.call(r).want(t, 201, "arrival 1", "executed")
		g.call(r).want(t, 201, "arrival 1", "replayed")
		u.arrived(r.path, 1)
		if sent := string(u.last(r.path).body); sent != body {
			t.Errorf("%s went on as %s", body, sent)
		}
	}
	same := request{path: "/both", id: "k", body: `{"idempotency_key":"k"}`, header: map[string]string{"X-Idempotency-Key": `"k"`}}
	g.call(same).want(t, 201, "arrival 1", "executed")
	g.call(same).want(t, 201, "arrival 1", "replayed")
}

// P1: two keys in one request that differ name no one call. What says nothing of idempotency is no key.
func TestKeysThatDiffer(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, c := range []struct {
		request
		named []string
	}{
		{request{id: "a", header: map[string]string{"X-Idempotency-Key": "b"}}, []string{"Idempotency-Key", "X-Idempotency-Key"}},
		{request{id: "a", header: map[string]string{"Execution-Id": "b"}}, []string{"Idempotency-Key", "Execution-Id"}},
		{request{id: "a", body: `{"idempotency_key":"b"}`}, []string{"Idempotency-Key", "idempotency_key"}},
		{request{body: `{"idempotency_key":"a","idempotencyKey":"b"}`}, []string{"idempotency_key", "idempotencyKey"}},
		{request{body: `{"idempotency_key":"a","idempotency_key":"b"}`}, []string{"idempotency_key"}},
		{request{body: `{"idempotency_key":"a b"}`}, []string{"idempotency_key"}},
		{request{body: `{"idempotency_key":true}`}, []string{"idempotency_key"}},
		{request{body: `{"idempotency_key":{"a":"b"}}`}, []string{"idempotency_key"}},
		{request{body: `{"idempotency_key":"` + strings.Repeat("x", 256) + `"}`}, []string{"idempotency_key"}},
		{request{header: map[string]string{"X-Idempotency-Key": ""}}, []string{"X-Idempotency-Key"}},
	} {
		c.path = "/differ"
		doc := g.call(c.request).terminal(t, 400, "execution-id-invalid")
		for _, name := range c.named {
			if !strings.Contains(doc.Detail, name) {
				t.Errorf("%q does not name %s", doc.Detail, name)
			}
		}
	}
	u.arrived("/differ", 0)
	for i, none := range []request{
		{header: map[string]string{"X-Request-Id": "r", "Request-Id": "r", "X-Correlation-Id": "r", "X-Amzn-Trace-Id": "r"}},
		{header: map[string]string{"Session-Id": "s", "Client-Request-Id": "r", "Idempotent-Replayed": "true", "X-Idempotency-Expiry": "60"}},
		{body: `{"request_id":"r","data":{"idempotency_key":"nested"},"list":[{"idempotency_key":"nested"}]}`},
		{body: `{"idempotency_key":null}`},
		{body: `{"idempotency_key":""}`},
		{body: `[{"idempotency_key":"in an array"}]`},
		{body: `{"idempotency_key":"a"`},
		{body: `{"idempotency_key":"a"}`, header: map[string]string{"Content-Type": "text/plain"}},
	} {
		none.path = fmt.Sprintf("/none/%d", i)
		g.call(none).want(t, 201, "arrival 1", "executed")
		g.call(none).want(t, 201, "arrival 2", "executed")
	}
	// What is configured counts alone.
	g = start(t, "agent_proxy %s {\n execution_id header X-Order\n}", u.addr)
	r := request{path: "/configured", id: "a", body: `{"idempotency_key":"b"}`, header: map[string]string{"X-Order": "c", "X-Idempotency-Key": "d"}}
	if got := g.call(r); got.header.Get("Execution-Id") != "c" {
		t.Errorf("%d %v", got.status, got.header)
	}
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
}
