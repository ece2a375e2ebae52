package call

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Trap 6, section "fingerprint": two attempts are the same call if they mean the
// same; whatever else differs under a used id is another call, and refused.
func TestFingerprintOfBodies(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n fingerprint_exclude /meta/sent_at /trace\n}", u.Addr)
	form := harness.Headers{"Content-Type": "application/x-www-form-urlencoded"}
	for i, row := range []struct {
		name          string
		first, second harness.Request
		same          bool
	}{
		{"key order", harness.Request{Body: `{"a":1,"b":[1,2]}`}, harness.Request{Body: `{"b":[1,2],"a":1}`}, true},
		{"whitespace", harness.Request{Body: `{"a":1}`}, harness.Request{Body: " {\n\t\"a\" : 1 } "}, true},
		{"number form", harness.Request{Body: `{"a":1.0}`}, harness.Request{Body: `{"a":1}`}, true},
		{"exponent", harness.Request{Body: `{"a":1e2}`}, harness.Request{Body: `{"a":100}`}, true},
		{"escapes", harness.Request{Body: `{"a":"\u0041"}`}, harness.Request{Body: `{"a":"A"}`}, true},
		{"charset", harness.Request{}, harness.Request{Header: harness.Headers{"Content-Type": "application/json; charset=utf-8"}}, true},
		{"null or absent", harness.Request{Body: `{"a":null}`}, harness.Request{Body: `{}`}, false},
		{"string or number", harness.Request{Body: `{"a":"1"}`}, harness.Request{Body: `{"a":1}`}, false},
		{"array order", harness.Request{Body: `[1,2]`}, harness.Request{Body: `[2,1]`}, false},
		{"big integers", harness.Request{Body: `{"a":9007199254740993}`}, harness.Request{Body: `{"a":9007199254740992}`}, false},
		{"bigger integers", harness.Request{Body: `{"a":123456789012345678901234567890}`}, harness.Request{Body: `{"a":123456789012345678901234567891}`}, false},
		{"a little money", harness.Request{Body: `{"a":0.1}`}, harness.Request{Body: `{"a":0.10000000000000001}`}, false},
		{"excluded", harness.Request{Body: `{"a":1,"trace":"x","meta":{"sent_at":1,"k":1}}`}, harness.Request{Body: `{"a":1,"meta":{"sent_at":2,"k":1}}`}, true},
		{"beside the excluded", harness.Request{Body: `{"a":1,"meta":{"sent_at":1,"k":1}}`}, harness.Request{Body: `{"a":1,"meta":{"sent_at":1,"k":2}}`}, false},
		{"broken JSON", harness.Request{Body: `{"a":1`}, harness.Request{Body: `{"a":1`}, true},
		{"broken JSON differs", harness.Request{Body: `{"a":1`}, harness.Request{Body: `{"a": 1`}, false},
		{"forms are bytes", harness.Request{Body: "a=1&b=2", Header: form}, harness.Request{Body: "b=2&a=1", Header: form}, false},
		{"retry count", harness.Request{Header: harness.Headers{"X-Stainless-Retry-Count": "0"}}, harness.Request{Header: harness.Headers{"X-Stainless-Retry-Count": "2", "Traceparent": "00-1-2-3", "Date": "x"}}, true},
		{"chunked or not", harness.Request{}, harness.Request{Reader: harness.OnlyReader{Reader: strings.NewReader(`{"amount":1}`)}}, true},
		{"host in capitals", harness.Request{Host: "A.Example"}, harness.Request{Host: "a.example"}, true},
		{"host", harness.Request{Host: "a.example"}, harness.Request{Host: "b.example"}, false},
		{"query", harness.Request{Path: "?a=1"}, harness.Request{Path: "?a=2"}, false},
		{"no body", harness.Request{Method: "DELETE", Reader: harness.OnlyReader{Reader: strings.NewReader("")}}, harness.Request{Method: "DELETE", Body: "{}"}, false},
		{"media type", harness.Request{}, harness.Request{Header: harness.Headers{"Content-Type": "text/plain"}}, false},
		{"gzip is bytes", gzipped("x", 1), gzipped("x", 1), true},
		{"gzip differs", gzipped("x", 1), gzipped("y", 1), false},
		{"multipart boundary", multi(t, "one", "file"), multi(t, "two", "file"), true},
		{"multipart content", multi(t, "one", "file"), multi(t, "one", "other"), false},
	} {
		t.Run(row.name, func(t *testing.T) {
			path := fmt.Sprintf("/%d", i)
			row.first.Path, row.second.Path = path+row.first.Path, path+row.second.Path
			row.first.Id, row.second.Id = "k", "k"
			g.Call(row.first).Want(t, 201, "arrival 1", "executed")
			got := g.Call(row.second)
			if row.same {
				got.Want(t, 201, "arrival 1", "replayed")
			} else if doc := got.Terminal(t, 422, "fingerprint-mismatch"); *doc.SafeNewKey || doc.State != "completed" {
				t.Errorf("%+v", doc)
			}
			u.Arrived(path, 1)
		})
	}
}

func gzipped(text string, n int) harness.Request {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, strings.Repeat(text, n)) // a buffer takes everything
	_ = z.Close()
	return harness.Request{Body: b.String(), Header: harness.Headers{"Content-Encoding": "gzip"}}
}

// multi is an upload with this boundary.
func multi(t *testing.T, boundary, content string) harness.Request {
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
	return harness.Request{Body: b.String(), Header: harness.Headers{"Content-Type": w.FormDataContentType()}}
}
