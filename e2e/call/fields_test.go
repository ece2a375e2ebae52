package call

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
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
func anew(r harness.Request, header ...string) harness.Request {
	r.Header = maps.Clone(r.Header)
	for name, value := range map[string]string{
		"User-Agent": "sdk/2", "Date": "Sat, 28 Nov 2026 10:00:00 GMT", "Accept": "text/html", "Accept-Language": "de", "Cookie": "a=1",
		"Cache-Control": "no-cache", "Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "X-Request-Id": "2",
		"X-Amz-Date": "20261128T100000Z", "Amz-Sdk-Invocation-Id": "1", "X-Stripe-Client-Telemetry": "{}", "X-Goog-Api-Client": "gccl-attempt-count/2",
		"X-Forwarded-For": "192.0.2.1", "Via": "1.1 cdn",
	} {
		r.Header[name] = value
	}
	for i := 0; i < len(header); i += 2 {
		r.Header[header[i]] = header[i+1]
	}
	return r
}

// P1 both ways, with a key: another operand under a used key is another call, and refused; what SDKs change in a
// retry, and fields that say nothing of the effect, are not.
func TestOperandsBelongToTheFingerprint(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n compare X-Revision\n ignore If-Match\n}", u.Addr)
	for i, row := range append(operands[:len(operands):len(operands)],
		struct{ method, field, one, other string }{"POST", "X-Revision", "1", "2"}) {
		t.Run(row.field, func(t *testing.T) {
			r := equal(fmt.Sprint("/", i), row.field, row.one)
			r.Method, r.Id = row.method, "k"
			g.Call(r).Want(t, 201, "arrival 1", "executed")
			g.Call(anew(r, "X-Unheard-Of", "2")).Want(t, 201, "arrival 1", "replayed")
			other := anew(r, row.field, row.other)
			if row.field == "If-Match" { // by `ignore`
				g.Call(other).Want(t, 201, "arrival 1", "replayed")
			} else {
				g.Call(other).Terminal(t, 422, "fingerprint-mismatch")
			}
			// What a proxy would take away counts too: a handler behind the guard may read it.
			if other.Header["Connection"] = row.field; row.field != "If-Match" {
				g.Call(other).Terminal(t, 422, "fingerprint-mismatch")
			}
			u.Arrived(r.Path, 1)
		})
	}
}

// P1 both ways, without a key: a retry of an unanswered call is recognised if all end-to-end fields are equal but the
// volatile ones. Another field, known or not, makes another call, which is meant.
func TestRecognizedByHeaderFields(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n missing_id recognize\n breaker off\n ignore X-Attempt-Note\n compare Referer\n}", u.Addr)
	type row = struct{ method, field, one, other string }
	for i, row := range append(operands[:len(operands):len(operands)],
		row{"POST", "X-Unheard-Of", "1", "2"}, row{"POST", "X-Unheard-Of", "", "2"}, row{"POST", "Referer", "https://a.example/", "https://b.example/"},
		row{"POST", "Workflow-Id", "w1", "w2"}) {
		t.Run(row.field, func(t *testing.T) {
			r := equal(fmt.Sprint("/", i), "X-Attempt-Note", "first")
			if r.Method = row.method; row.one != "" {
				r.Header[row.field] = row.one
			}
			retry := anew(r, "X-Attempt-Note", "second", "X-Hop", "1", "Connection", "X-Hop")
			hold := harness.NewGate(t)
			u.On(r.Path, harness.Held(hold))
			g.Cut(t, u, 1, r)
			hold.Open()
			harness.Idle(t)
			other := anew(retry, row.field, row.other)
			own := g.Call(other)
			own.Want(t, 201, "arrival 2", "executed")
			own.ItsOwn(t)
			got := g.Call(retry)
			got.Want(t, 201, "arrival 1", "replayed")
			got.Recognized(t)
			u.Arrived(r.Path, 2)
		})
	}
}

// sameCall are the rows of the first table of docs/same-call.md: parts of a request, and changes of each that have the
// same consequence.
var sameCall = []struct {
	part    string
	changes []func(r *harness.Request)
}{
	{"caller ([who that is](http.md#naming-a-call))", []func(r *harness.Request){field("Authorization", "Bearer bob")}},
	{"guard (its `name`), method, path", []func(r *harness.Request){
		field("X-Guard", "other"), func(r *harness.Request) { r.Method = "PUT" }, func(r *harness.Request) { r.Path = strings.Replace(r.Path, "/a?", "/b?", 1) },
	}},
	{"host", []func(r *harness.Request){func(r *harness.Request) { r.Host = "other.example" }}},
	{"host, in capitals", []func(r *harness.Request){func(r *harness.Request) { r.Host = strings.ToUpper(r.Host) }}},
	{"query, byte by byte", []func(r *harness.Request){
		func(r *harness.Request) { r.Path = strings.Replace(r.Path, "x=1&y=2", "x=1&y=3", 1) }, func(r *harness.Request) { r.Path = strings.Replace(r.Path, "x=1&y=2", "y=2&x=1", 1) },
	}},
	{"media type and `Content-Encoding`", []func(r *harness.Request){field("Content-Type", "application/problem+json"), field("Content-Encoding", "gzip")}},
	{"body: JSON by its values, multipart by its parts, everything else byte by byte; of [messages of agents](http.md#messages-of-agents) not the ids", []func(r *harness.Request){
		func(r *harness.Request) { r.Body = strings.Replace(r.Body, `"n":1`, `"n":2`, 1) }, func(r *harness.Request) { r.Body = strings.Replace(r.Body, `"n":1`, `"n":1,"m":null`, 1) },
	}},
	{"the same values of JSON in another form, and what `fingerprint_exclude` names", []func(r *harness.Request){
		func(r *harness.Request) { r.Body = `{ "at": 1, "n": 1.0 }` }, func(r *harness.Request) { r.Body = strings.Replace(r.Body, `"at":1`, `"at":2`, 1) },
	}},
	{"node of a plan (`Workflow-Node`)", []func(r *harness.Request){field("Workflow-Node", "b")}},
	{"[operands](#operands), and what `compare` names", []func(r *harness.Request){field("Destination", "/b"), field("If-Match", `"2"`), field("X-Compared", "2"), field("Referer", "2")}},
	{"[fields for a tenant](#tenant-fields)", []func(r *harness.Request){field("Stripe-Account", "acct_2"), field("X-Workspace-Id", "2")}},
	{"[credentials](#credentials)", []func(r *harness.Request){field("X-Api-Key", "2"), field("X-Shop-Access-Token", "2")}},
	{"[volatile fields](#volatile-fields), and what `ignore` names", []func(r *harness.Request){field("User-Agent", "sdk/2"), field("X-Ignored", "2"), field("Cookie", "a=2")}},
	{"fields that are [compared by other means](#compared-by-other-means)", []func(r *harness.Request){field("Content-Digest", "sha-256=:AA==:")}},
	{"every other header field, known or not", []func(r *harness.Request){field("X-Unheard-Of", "2"), field("Workflow-Id", "w2")}},
}

func field(name, value string) func(r *harness.Request) {
	return func(r *harness.Request) { r.Header[name] = value }
}

// docs/same-call.md says in its first table what the gateway does.
func TestSameCallIsAsWritten(t *testing.T) {
	u := harness.NewUpstream(t)
	options := "{\n missing_id derive 10m\n breaker off\n compare X-Compared Referer\n ignore X-Ignored\n fingerprint_exclude /at\n"
	g := harness.Start(t, "@other header X-Guard other\nagent_proxy @other %s "+options+" name other\n}\nagent_proxy %[1]s "+options+"}", u.Addr)
	n := 0
	// outcome is what becomes of a call that differs from an earlier one.
	outcome := func(change func(r *harness.Request), key bool) string {
		n++
		r := equal(fmt.Sprintf("/%d/a?x=1&y=2", n), "Content-Type", "application/json", "User-Agent", "sdk/1")
		if r.Host, r.Body = "api.example", `{"n":1,"at":1}`; key {
			r.Id = fmt.Sprint("key-", n)
		}
		first := g.Call(r)
		first.Want(t, 201, first.Body, "executed")
		r.Header = maps.Clone(r.Header)
		change(&r)
		switch got := g.Call(r); {
		case got.Status == 422 && got.Slug() == "fingerprint-mismatch":
			return "422"
		case got.Status == 201 && got.Header.Get("Execution-Status") == "replayed":
			return "not compared"
		case got.Status == 201 && got.Header.Get("Execution-Status") == "executed" && key:
			return "another key"
		case got.Status == 201 && got.Header.Get("Execution-Status") == "executed":
			return "another call"
		default:
			t.Fatalf("%d %v %s", got.Status, got.Header, got.Body)
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
	page, err := os.ReadFile("../../docs/same-call.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "\n\n"+want+"\n") {
		t.Errorf("the table is not\n%s", want)
	}
}

// P1 without a key: an id that is derived from the request is that of the whole request.
func TestDerivedFromHeaderFields(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n missing_id derive 10m\n}", u.Addr)
	r := equal("/a", "Destination", "/b", "X-Unheard-Of", "1")
	r.Method = "COPY"
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	g.Call(anew(r)).Want(t, 201, "arrival 1", "replayed")
	g.Call(anew(r, "Destination", "/c")).Want(t, 201, "arrival 2", "executed")
	g.Call(anew(r, "X-Unheard-Of", "2")).Want(t, 201, "arrival 3", "executed")
	u.Arrived(r.Path, 3)
}

// P1 with keys that are advisory: a new key for each attempt is no other header.
func TestAdvisoryByHeaderFields(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "e2e_leaves\nagent_proxy %s {\n keys advisory\n breaker off\n execution_id header X-Call\n}", u.Addr)
	r := equal("/x", "X-Call", "k1", "X-Unheard-Of", "1")
	hold := harness.NewGate(t)
	u.On(r.Path, harness.Held(hold))
	g.Cut(t, u, 1, r)
	hold.Open()
	harness.Idle(t)
	g.Call(anew(r, "X-Call", "k2", "X-Unheard-Of", "2")).Want(t, 201, "arrival 2", "executed")
	got := g.Call(anew(r, "X-Call", "k3"))
	got.Want(t, 201, "arrival 1", "replayed")
	got.Recognized(t)
	u.Arrived("/x", 2)
}
