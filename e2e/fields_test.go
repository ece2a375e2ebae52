package e2e

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
)

// operands are calls that differ in one header field only, which says what is to be done.
var operands = []struct{ method, field, one, other string }{
	{"COPY", "Destination", "/files/b", "/files/c"},
	{"MOVE", "Overwrite", "T", "F"},
	{"PUT", "X-Amz-Copy-Source", "/bucket/a", "/bucket/b"},
	{"PUT", "Content-Range", "bytes 0-11/24", "bytes 12-23/24"},
	{"PATCH", "Upload-Offset", "0", "12"},
	{"POST", "X-HTTP-Method-Override", "PATCH", "DELETE"},
	{"DELETE", "If-Match", `"1"`, `"2"`},
	{"POST", "SOAPAction", "urn:pay", "urn:refund"},
	{"POST", "X-Amz-Target", "Bank_20200101.Pay", "Bank_20200101.Refund"},
	{"COPY", "Depth", "0", "infinity"},
	{"PUT", "Lock-Token", "<urn:uuid:1>", "<urn:uuid:2>"},
	{"PATCH", "Range", "bytes=0-11", "bytes=12-23"},
	{"POST", "Prefer", "resolution=merge-duplicates", "resolution=ignore-duplicates"},
	{"PUT", "X-Goog-Copy-Source", "/bucket/a", "/bucket/b"},
	{"PUT", "X-Ms-Copy-Source", "https://a.example/a", "https://a.example/b"},
}

// anew is r as the next attempt of an SDK sends it, with further fields.
func anew(r request, header ...string) request {
	r.header = maps.Clone(r.header)
	for name, value := range map[string]string{
		"User-Agent": "sdk/2", "Date": "Sat, 28 Nov 2026 10:00:00 GMT", "Accept": "text/html", "Accept-Language": "de", "Cookie": "a=1",
		"Cache-Control": "no-cache", "Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "X-Request-Id": "2",
		"X-Amz-Date": "20261128T100000Z", "Amz-Sdk-Invocation-Id": "1", "X-Stripe-Client-Telemetry": "{}", "X-Goog-Api-Client": "gccl-attempt-count/2",
		"X-Forwarded-For": "192.0.2.1", "Via": "1.1 cdn",
	} {
		r.header[name] = value
	}
	for i := 0; i < len(header); i += 2 {
		r.header[header[i]] = header[i+1]
	}
	return r
}

// P1 both ways, with a key: another operand under a used key is another call, and refused; what SDKs change in a
// retry, and fields that say nothing of the effect, are not.
func TestOperandsBelongToTheFingerprint(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n compare X-Revision\n ignore If-Match\n}", u.addr)
	for i, row := range append(operands[:len(operands):len(operands)],
		struct{ method, field, one, other string }{"POST", "X-Revision", "1", "2"}) {
		t.Run(row.field, func(t *testing.T) {
			r := equal(fmt.Sprint("/", i), row.field, row.one)
			r.method, r.id = row.method, "k"
			g.call(r).want(t, 201, "arrival 1", "executed")
			g.call(anew(r, "X-Unheard-Of", "2")).want(t, 201, "arrival 1", "replayed")
			other := anew(r, row.field, row.other)
			if row.field == "If-Match" { // by `ignore`
				g.call(other).want(t, 201, "arrival 1", "replayed")
			} else {
				g.call(other).terminal(t, 422, "fingerprint-mismatch")
			}
			// What a proxy would take away counts too: a handler behind the guard may read it.
			if other.header["Connection"] = row.field; row.field != "If-Match" {
				g.call(other).terminal(t, 422, "fingerprint-mismatch")
			}
			u.arrived(r.path, 1)
		})
	}
}

// P1 both ways, without a key: a retry of an unanswered call is recognised if all end-to-end fields are equal but the
// volatile ones. Another field, known or not, makes another call, which is meant.
func TestRecognizedByHeaderFields(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n breaker off\n ignore X-Attempt-Note\n compare Referer\n}", u.addr)
	type row = struct{ method, field, one, other string }
	for i, row := range append(operands[:len(operands):len(operands)],
		row{"POST", "X-Unheard-Of", "1", "2"}, row{"POST", "X-Unheard-Of", "", "2"}, row{"POST", "Referer", "https://a.example/", "https://b.example/"},
		row{"POST", "Workflow-Id", "w1", "w2"}) {
		t.Run(row.field, func(t *testing.T) {
			r := equal(fmt.Sprint("/", i), "X-Attempt-Note", "first")
			if r.method = row.method; row.one != "" {
				r.header[row.field] = row.one
			}
			retry := anew(r, "X-Attempt-Note", "second", "X-Hop", "1", "Connection", "X-Hop")
			hold := newGate(t)
			u.on(r.path, held(hold))
			g.cut(t, u, 1, r)
			hold.open()
			idle(t)
			other := anew(retry, row.field, row.other)
			own := g.call(other)
			own.want(t, 201, "arrival 2", "executed")
			own.itsOwn(t)
			got := g.call(retry)
			got.want(t, 201, "arrival 1", "replayed")
			got.recognized(t)
			u.arrived(r.path, 2)
		})
	}
}

// sameCall are the rows of the first table of docs/same-call.md: parts of a request, and changes of each that have the
// same consequence.
var sameCall = []struct {
	part    string
	changes []func(r *request)
}{
	{"caller ([who that is](http.md#naming-a-call))", []func(r *request){field("Authorization", "Bearer bob")}},
	{"guard (its `name`), method, path", []func(r *request){
		field("X-Guard", "other"), func(r *request) { r.method = "PUT" }, func(r *request) { r.path = strings.Replace(r.path, "/a?", "/b?", 1) },
	}},
	{"host", []func(r *request){func(r *request) { r.host = "other.example" }}},
	{"host, in capitals", []func(r *request){func(r *request) { r.host = strings.ToUpper(r.host) }}},
	{"query, byte by byte", []func(r *request){
		func(r *request) { r.path = strings.Replace(r.path, "x=1&y=2", "x=1&y=3", 1) }, func(r *request) { r.path = strings.Replace(r.path, "x=1&y=2", "y=2&x=1", 1) },
	}},
	{"media type and `Content-Encoding`", []func(r *request){field("Content-Type", "application/problem+json"), field("Content-Encoding", "gzip")}},
	{"body: JSON by its values, multipart by its parts, everything else byte by byte; of [messages of agents](http.md#messages-of-agents) not the ids", []func(r *request){
		func(r *request) { r.body = strings.Replace(r.body, `"n":1`, `"n":2`, 1) }, func(r *request) { r.body = strings.Replace(r.body, `"n":1`, `"n":1,"m":null`, 1) },
	}},
	{"the same values of JSON in another form, and what `fingerprint_exclude` names", []func(r *request){
		func(r *request) { r.body = `{ "at": 1, "n": 1.0 }` }, func(r *request) { r.body = strings.Replace(r.body, `"at":1`, `"at":2`, 1) },
	}},
	{"node of a plan (`Workflow-Node`)", []func(r *request){field("Workflow-Node", "b")}},
	{"[operands](#operands), and what `compare` names", []func(r *request){field("Destination", "/b"), field("If-Match", `"2"`), field("X-Compared", "2"), field("Referer", "2")}},
	{"[fields for a tenant](#tenant-fields)", []func(r *request){field("Stripe-Account", "acct_2"), field("X-Workspace-Id", "2")}},
	{"[credentials](#credentials)", []func(r *request){field("X-Api-Key", "2"), field("X-Shop-Access-Token", "2")}},
	{"[volatile fields](#volatile-fields), and what `ignore` names", []func(r *request){field("User-Agent", "sdk/2"), field("X-Ignored", "2"), field("Cookie", "a=2")}},
	{"fields that are [compared by other means](#compared-by-other-means)", []func(r *request){field("Content-Digest", "sha-256=:AA==:")}},
	{"every other header field, known or not", []func(r *request){field("X-Unheard-Of", "2"), field("Workflow-Id", "w2")}},
}

func field(name, value string) func(r *request) { return func(r *request) { r.header[name] = value } }

// docs/same-call.md says in its first table what the gateway does.
func TestSameCallIsAsWritten(t *testing.T) {
	u := newUpstream(t)
	options := "{\n missing_id derive 10m\n breaker off\n compare X-Compared Referer\n ignore X-Ignored\n fingerprint_exclude /at\n"
	g := start(t, "@other header X-Guard other\nagent_proxy @other %s "+options+" name other\n}\nagent_proxy %[1]s "+options+"}", u.addr)
	n := 0
	// outcome is what becomes of a call that differs from an earlier one.
	outcome := func(change func(r *request), key bool) string {
		n++
		r := equal(fmt.Sprintf("/%d/a?x=1&y=2", n), "Content-Type", "application/json", "User-Agent", "sdk/1")
		if r.host, r.body = "api.example", `{"n":1,"at":1}`; key {
			r.id = fmt.Sprint("key-", n)
		}
		first := g.call(r)
		first.want(t, 201, first.body, "executed")
		r.header = maps.Clone(r.header)
		change(&r)
		switch got := g.call(r); {
		case got.status == 422 && got.slug() == "fingerprint-mismatch":
			return "422"
		case got.status == 201 && got.header.Get("Execution-Status") == "replayed":
			return "not compared"
		case got.status == 201 && got.header.Get("Execution-Status") == "executed" && key:
			return "another key"
		case got.status == 201 && got.header.Get("Execution-Status") == "executed":
			return "another call"
		default:
			t.Fatalf("%d %v %s", got.status, got.header, got.body)
			return ""
		}
	}
	want := "| part of the request | with a key | without a key |\n|---|---|---|\n"
	for _, row := range sameCall {
		with, without := outcome(row.changes[0], true), outcome(row.changes[0], false)
		for i, change := range row.changes[1:] {
			if key, none := outcome(change, true), outcome(change, false); key != with || none != without {
				t.Errorf("%s, change %d: %s and %s, the first %s and %s", row.part, i+2, key, none, with, without)
			}
		}
		want += fmt.Sprintf("| %s | %s | %s |\n", row.part, with, without)
	}
	page, err := os.ReadFile("../docs/same-call.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "\n\n"+want+"\n") {
		t.Errorf("the table is not\n%s", want)
	}
}

// P1 without a key: an id that is derived from the request is that of the whole request.
func TestDerivedFromHeaderFields(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n missing_id derive 10m\n}", u.addr)
	r := equal("/a", "Destination", "/b", "X-Unheard-Of", "1")
	r.method = "COPY"
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.call(anew(r)).want(t, 201, "arrival 1", "replayed")
	g.call(anew(r, "Destination", "/c")).want(t, 201, "arrival 2", "executed")
	g.call(anew(r, "X-Unheard-Of", "2")).want(t, 201, "arrival 3", "executed")
	u.arrived(r.path, 3)
}

// P1 with keys that are advisory: a new key for each attempt is no other header.
func TestAdvisoryByHeaderFields(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "e2e_leaves\nagent_proxy %s {\n keys advisory\n breaker off\n execution_id header X-Call\n}", u.addr)
	r := equal("/x", "X-Call", "k1", "X-Unheard-Of", "1")
	hold := newGate(t)
	u.on(r.path, held(hold))
	g.cut(t, u, 1, r)
	hold.open()
	idle(t)
	g.call(anew(r, "X-Call", "k2", "X-Unheard-Of", "2")).want(t, 201, "arrival 2", "executed")
	got := g.call(anew(r, "X-Call", "k3"))
	got.want(t, 201, "arrival 1", "replayed")
	got.recognized(t)
	u.arrived("/x", 2)
}
