package call

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Control characters never get as far as the guard: Go's server refuses them.
func TestExecutionIDControlCharacters(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, c := range []string{"\x00", "\x01", "\x1b", "\x7f"} {
		got := g.Raw("POST /bad HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: a" + c + "b\r\n\r\n")
		if !strings.HasPrefix(got, "HTTP/1.1 400 ") {
			t.Errorf("%q: %q", c, got)
		}
	}
	u.Arrived("/bad", 0)
}

// The sources of an id go in order; the first that has one counts.
func TestExecutionIDSources(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	g.Call(harness.Request{Path: "/fallback", Header: map[string]string{"Execution-Id": "e"}}).Want(t, 201, "arrival 1", "executed")
	got := g.Call(harness.Request{Path: "/fallback", Id: "e"})
	got.Want(t, 201, "arrival 1", "replayed") // the same name, wherever it stands
	if id := got.Header.Get("Execution-Id"); id != "e" {
		t.Errorf("Execution-Id: %q", id)
	}

	g = harness.Start(t, `agent_proxy %s {
		execution_id header X-First X-Second
		execution_id json /meta/idempotency_key /requestId
		execution_id placeholder {http.request.uri.query.op}
		missing_id require
	}`, u.Addr)
	for i, row := range []struct {
		harness.Request
		id string
	}{
		{harness.Request{Header: map[string]string{"X-First": "one", "X-Second": "two"}}, "one"},
		{harness.Request{Header: map[string]string{"X-Second": "two"}}, "two"},
		{harness.Request{Body: `{"meta":{"idempotency_key":"three"},"requestId":"four"}`}, "three"},
		{harness.Request{Body: `{"meta":{},"requestId":"four"}`}, "four"},
		{harness.Request{Body: `{"requestId":12345678901234567890}`}, "12345678901234567890"},
		{harness.Request{Body: `{"requestId":null}`, Path: "?op=five"}, "five"},
		{harness.Request{Path: "?op=five"}, "five"},
	} {
		path := fmt.Sprintf("/source/%d", i)
		row.Path = path + row.Path
		got := g.Call(row.Request)
		got.Want(t, 201, "arrival 1", "executed")
		if id := got.Header.Get("Execution-Id"); id != row.id {
			t.Errorf("%d: %q, want %q", i, id, row.id)
		}
		g.Call(row.Request).Want(t, 201, "arrival 1", "replayed")
		u.Arrived(path, 1)
	}
	for _, bad := range []harness.Request{
		{Body: `{"requestId":"a b"}`},
		{Body: `{"requestId":""}`},
		{Body: `{"requestId":["x"]}`},
		{Body: `{"requestId":"a","requestId":"b"}`},
		{Body: `{"requestId":"` + strings.Repeat("x", 256) + `"}`},
		{Path: "?op=a%20b"},
	} {
		bad.Path = "/bad" + bad.Path
		g.Call(bad).Terminal(t, 400, "execution-id-invalid")
	}
	for _, none := range []harness.Request{
		{Id: "k"}, // not a source here
		{Body: `not JSON`},
		{Body: `{"requestId":"x"}`, Header: map[string]string{"Content-Type": "text/plain"}},
	} {
		none.Path = "/bad"
		doc := g.Call(none).Terminal(t, 400, "execution-id-missing")
		if !strings.Contains(doc.Detail, "X-First") || !*doc.SafeNewKey {
			t.Errorf("%+v", doc)
		}
	}
	u.Arrived("/bad", 0)
}

// P1: a caller names its call in whatever field or member its API has for that: each such name is a key, and
// goes on as it came.
func TestKeysUnderOtherNames(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for i, name := range []string{
		"X-Idempotency-Key", "PayPal-Request-Id", "Cko-Idempotency-Key", "Request-Idempotency-Key", "Idempotence-Key",
		"X-Idempotency-Id", "X-Idempotent-Key", "IdempotencyKey", "X-Payout-Idempotency", "X-Idempotency-Token",
	} {
		r := harness.Request{Path: fmt.Sprintf("/field/%d", i), Header: map[string]string{name: `k`}}
		got := g.Call(r)
		got.Want(t, 201, "arrival 1", "executed")
		if id := got.Header.Get("Execution-Id"); id != "k" {
			t.Errorf("%s: Execution-Id %q", name, id)
		}
		g.Call(r).Want(t, 201, "arrival 1", "replayed")
		u.Arrived(r.Path, 1)
		if sent := u.Last(r.Path).Header.Get(name); sent != "k" {
			t.Errorf("%s went on as %q", name, sent)
		}
		other := r
		other.Body = `{"amount":2}`
		g.Call(other).Terminal(t, 422, "fingerprint-mismatch")
	}
	for i, body := range []string{
		`{"idempotency_key":"k","amount":1}`, `{"amount":1, "idempotencyKey" : "k"}`, `{"idempotency\u005fkey":"\u006b"}`,
		`{"idempotency_key":"k","idempotencyKey":"k"}`, `{"idempotency_key":null,"idempotencyKey":"k"}`,
		`{"idempotency_key":"` + strings.Repeat("x", 255) + `"}`, `{"idempotency_key":12345678901234567890}`,
	} {
		r := harness.Request{Path: fmt.Sprintf("/member/%d", i), Body: body}
		g.Call(r).Want(t, 201, "arrival 1", "executed")
		g.Call(r).Want(t, 201, "arrival 1", "replayed")
		u.Arrived(r.Path, 1)
		if sent := string(u.Last(r.Path).Body); sent != body {
			t.Errorf("%s went on as %s", body, sent)
		}
	}
	same := harness.Request{Path: "/both", Id: "k", Body: `{"idempotency_key":"k"}`, Header: map[string]string{"X-Idempotency-Key": `"k"`}}
	g.Call(same).Want(t, 201, "arrival 1", "executed")
	g.Call(same).Want(t, 201, "arrival 1", "replayed")
}

// P1: two keys in one request that differ name no one call. What says nothing of idempotency is no key.
func TestKeysThatDiffer(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, c := range []struct {
		harness.Request
		named []string
	}{
		{harness.Request{Id: "a", Header: map[string]string{"X-Idempotency-Key": "b"}}, []string{"Idempotency-Key", "X-Idempotency-Key"}},
		{harness.Request{Id: "a", Header: map[string]string{"Execution-Id": "b"}}, []string{"Idempotency-Key", "Execution-Id"}},
		{harness.Request{Id: "a", Body: `{"idempotency_key":"b"}`}, []string{"Idempotency-Key", "idempotency_key"}},
		{harness.Request{Body: `{"idempotency_key":"a","idempotencyKey":"b"}`}, []string{"idempotency_key", "idempotencyKey"}},
		{harness.Request{Body: `{"idempotency_key":"a","idempotency_key":"b"}`}, []string{"idempotency_key"}},
		{harness.Request{Body: `{"idempotency_key":"a b"}`}, []string{"idempotency_key"}},
		{harness.Request{Body: `{"idempotency_key":true}`}, []string{"idempotency_key"}},
		{harness.Request{Body: `{"idempotency_key":{"a":"b"}}`}, []string{"idempotency_key"}},
		{harness.Request{Body: `{"idempotency_key":"` + strings.Repeat("x", 256) + `"}`}, []string{"idempotency_key"}},
		{harness.Request{Header: map[string]string{"X-Idempotency-Key": ""}}, []string{"X-Idempotency-Key"}},
	} {
		c.Path = "/differ"
		doc := g.Call(c.Request).Terminal(t, 400, "execution-id-invalid")
		for _, name := range c.named {
			if !strings.Contains(doc.Detail, name) {
				t.Errorf("%q does not name %s", doc.Detail, name)
			}
		}
	}
	u.Arrived("/differ", 0)
	for i, none := range []harness.Request{
		{Header: map[string]string{"X-Request-Id": "r", "Request-Id": "r", "X-Correlation-Id": "r", "X-Amzn-Trace-Id": "r"}},
		{Header: map[string]string{"Session-Id": "s", "Client-Request-Id": "r", "Idempotent-Replayed": "true", "X-Idempotency-Expiry": "60"}},
		{Body: `{"request_id":"r","data":{"idempotency_key":"nested"},"list":[{"idempotency_key":"nested"}]}`},
		{Body: `{"idempotency_key":null}`},
		{Body: `{"idempotency_key":""}`},
		{Body: `[{"idempotency_key":"in an array"}]`},
		{Body: `{"idempotency_key":"a"`},
		{Body: `{"idempotency_key":"a"}`, Header: map[string]string{"Content-Type": "text/plain"}},
	} {
		none.Path = fmt.Sprintf("/none/%d", i)
		g.Call(none).Want(t, 201, "arrival 1", "executed")
		g.Call(none).Want(t, 201, "arrival 2", "executed")
	}
	// What is configured counts alone.
	g = harness.Start(t, "agent_proxy %s {\n execution_id header X-Order\n}", u.Addr)
	r := harness.Request{Path: "/configured", Id: "a", Body: `{"idempotency_key":"b"}`, Header: map[string]string{"X-Order": "c", "X-Idempotency-Key": "d"}}
	if got := g.Call(r); got.Header.Get("Execution-Id") != "c" {
		t.Errorf("%d %v", got.Status, got.Header)
	}
}

// Trap 27: a missing id is refused, or made, as configured; the answer says so.
func TestMissingID(t *testing.T) {
	u := harness.NewUpstream(t)
	t.Run("require", func(t *testing.T) {
		g := harness.Start(t, "agent_proxy %s {\n missing_id require\n}", u.Addr)
		doc := g.Call(harness.Request{Path: "/require"}).Terminal(t, 400, "execution-id-missing")
		if !strings.Contains(doc.Detail, "Idempotency-Key") {
			t.Errorf("detail: %q", doc.Detail)
		}
		u.Arrived("/require", 0)
	})
	t.Run("mint", func(t *testing.T) {
		g := harness.Start(t, "agent_proxy %s", u.Addr)
		one, two := g.Call(harness.Request{Path: "/mint"}), g.Call(harness.Request{Path: "/mint"})
		one.Want(t, 201, "arrival 1", "executed")
		two.Want(t, 201, "arrival 2", "executed")
		id := one.Header.Get("Execution-Id")
		if id == "" || id == two.Header.Get("Execution-Id") {
			t.Errorf("ids %q and %q", id, two.Header.Get("Execution-Id"))
		}
		// Who kept the minted id can ask again under it.
		g.Call(harness.Request{Path: "/mint", Id: id}).Want(t, 201, "arrival 1", "replayed")
	})
	t.Run("derive", func(t *testing.T) {
		g := harness.Start(t, "agent_proxy %s {\n missing_id derive 1m\n}", u.Addr)
		call := harness.Request{Path: "/derive"}
		g.Call(call).Want(t, 201, "arrival 1", "executed")
		g.Call(call).Want(t, 201, "arrival 1", "replayed")
		other := call
		other.Body = `{"amount":2}`
		g.Call(other).Want(t, 201, "arrival 2", "executed")
		stranger := call
		stranger.Header = map[string]string{"X-Api-Key": "stranger"}
		g.Call(stranger).Want(t, 201, "arrival 3", "executed")
		g.Store.Pass(59 * time.Second)
		g.Call(call).Want(t, 201, "arrival 1", "replayed")
		g.Store.Pass(2 * time.Second)
		g.Call(call).Want(t, 201, "arrival 4", "executed")
	})
}
