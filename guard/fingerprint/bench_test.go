package fingerprint_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// inMemory is a body that lies in one piece, as small spools do.
type inMemory struct {
	*bytes.Reader
	p []byte
}

func (b inMemory) Bytes() ([]byte, bool) { return b.p, true }

// payment is also a golden document: it must not change.
const payment = `{"amount":1999,"currency":"eur","customer":"cus_9s6XKzkNRiz8i3","capture":true,` +
	`"description":"Order 1017","metadata":{"order_id":"1017","channel":"agent"},"items":[{"sku":"A-1","qty":2}]}`

func rows(n int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"rows":[`)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"id":%d,"name":"row %d","price":%d.50,"tags":["a","b"],"note":%q}`, i, i, i, strings.Repeat("x", 100))
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

func BenchmarkSum(b *testing.B) {
	exclude := &fingerprint.Config{}
	for _, p := range []string{"/id", "/metadata/order_id"} {
		ptr, err := fingerprint.ParsePointer(p)
		if err != nil {
			b.Fatal(err)
		}
		exclude.Exclude = append(exclude.Exclude, ptr)
	}
	var parts bytes.Buffer
	parts.WriteString("--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\nContent-Type: text/plain\r\n\r\n")
	parts.WriteString(strings.Repeat("x", 64<<10) + "\r\n--b--\r\n")
	for _, c := range []struct {
		name, media string
		body        []byte
		cfg         *fingerprint.Config
	}{
		{"empty", "application/json", nil, nil},
		{"json200B", "application/json", []byte(payment), nil},
		{"json200B-exclude", "application/json", []byte(payment), exclude},
		{"raw200B", "text/plain", []byte(payment), nil},
		{"json64KiB", "application/json", rows(380), nil},
		{"json4MiB", "application/json", rows(20_000), nil},
		{"raw4MiB", "text/plain", rows(20_000), nil},
		{"multipart64KiB", "multipart/form-data; boundary=b", parts.Bytes(), nil},
	} {
		b.Run(c.name, func(b *testing.B) {
			req := fingerprint.Request{
				Method: "POST", Host: "api.example.com", Path: "/v1/charges",
				ContentType: c.media, Body: &inMemory{bytes.NewReader(c.body), c.body}, Size: int64(len(c.body)),
			}
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.cfg.Sum(req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkLookup(b *testing.B) {
	ptr, err := fingerprint.ParsePointer("/metadata/order_id")
	if err != nil {
		b.Fatal(err)
	}
	body := &inMemory{bytes.NewReader([]byte(payment)), []byte(payment)}
	b.ReportAllocs()
	for b.Loop() {
		if v, ok, err := fingerprint.Lookup(body, int64(len(payment)), ptr); v != "1017" || !ok || err != nil {
			b.Fatal(v, ok, err)
		}
	}
}
