package e2e

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"mime/multipart"
	"strings"
	"testing"
)

// Trap 6, section "fingerprint": two attempts are the same call if they mean the
// same; whatever else differs under a used id is another call, and refused.
func TestFingerprintOfBodies(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n fingerprint_exclude /meta/sent_at /trace\n}", u.addr)
	form := headers{"Content-Type": "application/x-www-form-urlencoded"}
	for i, row := range []struct {
		name          string
		first, second request
		same          bool
	}{
		{"key order", request{body: `{"a":1,"b":[1,2]}`}, request{body: `{"b":[1,2],"a":1}`}, true},
		{"whitespace", request{body: `{"a":1}`}, request{body: " {\n\t\"a\" : 1 } "}, true},
		{"number form", request{body: `{"a":1.0}`}, request{body: `{"a":1}`}, true},
		{"exponent", request{body: `{"a":1e2}`}, request{body: `{"a":100}`}, true},
		{"escapes", request{body: `{"a":"\u0041"}`}, request{body: `{"a":"A"}`}, true},
		{"charset", request{}, request{header: headers{"Content-Type": "application/json; charset=utf-8"}}, true},
		{"null or absent", request{body: `{"a":null}`}, request{body: `{}`}, false},
		{"string or number", request{body: `{"a":"1"}`}, request{body: `{"a":1}`}, false},
		{"array order", request{body: `[1,2]`}, request{body: `[2,1]`}, false},
		{"big integers", request{body: `{"a":9007199254740993}`}, request{body: `{"a":9007199254740992}`}, false},
		{"bigger integers", request{body: `{"a":123456789012345678901234567890}`}, request{body: `{"a":123456789012345678901234567891}`}, false},
		{"a little money", request{body: `{"a":0.1}`}, request{body: `{"a":0.10000000000000001}`}, false},
		{"excluded", request{body: `{"a":1,"trace":"x","meta":{"sent_at":1,"k":1}}`}, request{body: `{"a":1,"meta":{"sent_at":2,"k":1}}`}, true},
		{"beside the excluded", request{body: `{"a":1,"meta":{"sent_at":1,"k":1}}`}, request{body: `{"a":1,"meta":{"sent_at":1,"k":2}}`}, false},
		{"broken JSON", request{body: `{"a":1`}, request{body: `{"a":1`}, true},
		{"broken JSON differs", request{body: `{"a":1`}, request{body: `{"a": 1`}, false},
		{"forms are bytes", request{body: "a=1&b=2", header: form}, request{body: "b=2&a=1", header: form}, false},
		{"retry count", request{header: headers{"X-Stainless-Retry-Count": "0"}}, request{header: headers{"X-Stainless-Retry-Count": "2", "Traceparent": "00-1-2-3", "Date": "x"}}, true},
		{"chunked or not", request{}, request{reader: onlyReader{strings.NewReader(`{"amount":1}`)}}, true},
		{"host in capitals", request{host: "A.Example"}, request{host: "a.example"}, true},
		{"host", request{host: "a.example"}, request{host: "b.example"}, false},
		{"query", request{path: "?a=1"}, request{path: "?a=2"}, false},
		{"no body", request{method: "DELETE", reader: onlyReader{strings.NewReader("")}}, request{method: "DELETE", body: "{}"}, false},
		{"media type", request{}, request{header: headers{"Content-Type": "text/plain"}}, false},
		{"gzip is bytes", gzipped("x", 1), gzipped("x", 1), true},
		{"gzip differs", gzipped("x", 1), gzipped("y", 1), false},
		{"multipart boundary", multi(t, "one", "file"), multi(t, "two", "file"), true},
		{"multipart content", multi(t, "one", "file"), multi(t, "one", "other"), false},
	} {
		t.Run(row.name, func(t *testing.T) {
			path := fmt.Sprintf("/%d", i)
			row.first.path, row.second.path = path+row.first.path, path+row.second.path
			row.first.id, row.second.id = "k", "k"
			g.call(row.first).want(t, 201, "arrival 1", "executed")
			got := g.call(row.second)
			if row.same {
				got.want(t, 201, "arrival 1", "replayed")
			} else if doc := got.terminal(t, 422, "fingerprint-mismatch"); *doc.SafeNewKey || doc.State != "completed" {
				t.Errorf("%+v", doc)
			}
			u.arrived(path, 1)
		})
	}
}

// onlyReader hides the length of what it reads.
type onlyReader struct{ io.Reader }

func gzipped(text string, n int) request {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, strings.Repeat(text, n)) // a buffer takes everything
	_ = z.Close()
	return request{body: b.String(), header: headers{"Content-Encoding": "gzip"}}
}

// multi is an upload with this boundary.
func multi(t *testing.T, boundary, content string) request {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	if err := w.SetBoundary(boundary); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{"file": content} {
		part, err := w.CreateFormFile(name, name+".txt")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(part, value) // a buffer takes everything
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return request{body: b.String(), header: headers{"Content-Type": w.FormDataContentType()}}
}
