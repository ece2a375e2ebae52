package fingerprint_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// Every field counts, and none can flow over into its neighbour.
func TestEveryFieldCounts(t *testing.T) {
	base := request("application/json", []byte(`{"a":1}`))
	seen := map[fingerprint.Sum]string{}
	add := func(name string, change func(*fingerprint.Request)) {
		req := base
		change(&req)
		s := mustSum(t, nil, req)
		if other, ok := seen[s]; ok {
			t.Errorf("%s and %s have the same sum", name, other)
		}
		seen[s] = name
	}
	body := func(s string) func(*fingerprint.Request) {
		return func(r *fingerprint.Request) { r.Body, r.Size = strings.NewReader(s), int64(len(s)) }
	}
	add("base", func(*fingerprint.Request) {})
	add("method", func(r *fingerprint.Request) { r.Method = "PUT" })
	add("host", func(r *fingerprint.Request) { r.Host = "example.com" })
	add("path", func(r *fingerprint.Request) { r.Path = "/v1/other" })
	add("path case", func(r *fingerprint.Request) { r.Path = "/v1/Things" })
	add("escaped path", func(r *fingerprint.Request) { r.Path = "/v1%2fthings" })
	add("query", func(r *fingerprint.Request) { r.RawQuery = "a=2" })
	add("no query", func(r *fingerprint.Request) { r.RawQuery = "" })
	add("query in path", func(r *fingerprint.Request) { r.Path, r.RawQuery = "/v1/thingsa=1", "" })
	add("host in method", func(r *fingerprint.Request) { r.Method, r.Host = "POSTapi.", "example.com" })
	add("media type", func(r *fingerprint.Request) { r.ContentType = "application/x+json" })
	add("raw", func(r *fingerprint.Request) { r.ContentType = "text/plain" })
	add("no media type", func(r *fingerprint.Request) { r.ContentType = "" })
	add("coding", func(r *fingerprint.Request) { r.ContentEncoding = "gzip" })
	add("other coding", func(r *fingerprint.Request) { r.ContentEncoding = "br" })
	add("empty", body(""))
	add("white space", body(" "))
	add("other body", body(`{"a":2}`))
	add("invalid body", body(`{"a":1}}`))
}

func TestWhatDoesNotCount(t *testing.T) {
	base := request("application/json", []byte(`{"a":1}`))
	want := mustSum(t, nil, base)
	for name, change := range map[string]func(*fingerprint.Request){
		"case of host":          func(r *fingerprint.Request) { r.Host = "API.Example.COM" },
		"parameters":            func(r *fingerprint.Request) { r.ContentType = "application/json; charset=utf-8" },
		"case of media type":    func(r *fingerprint.Request) { r.ContentType = " Application/JSON ;x=y" },
		"identity coding":       func(r *fingerprint.Request) { r.ContentEncoding = "Identity" },
		"how the body is held":  func(r *fingerprint.Request) { r.Body = inMemory{nil, []byte(`{"a":1}`)} },
		"what follows the size": func(r *fingerprint.Request) { r.Body = inMemory{nil, []byte(`{"a":1}]`)} },
	} {
		req := base
		change(&req)
		if mustSum(t, nil, req) != want {
			t.Errorf("%s changes the sum", name)
		}
	}
	raw := request("text/plain; charset=utf-8", []byte("x"))
	other := raw
	other.ContentType = "TEXT/PLAIN"
	if mustSum(t, nil, raw) != mustSum(t, nil, other) {
		t.Error("parameters of a raw body change the sum")
	}
}

// A coded body is not looked into: it is compared byte by byte.
func TestCodedBodiesAreRaw(t *testing.T) {
	for _, ct := range []string{"application/json", "multipart/form-data; boundary=b"} {
		a, b := request(ct, []byte(`{"a":1}`)), request(ct, []byte(`{"a": 1}`))
		if strings.HasPrefix(ct, "multipart") {
			a, b = request(ct, []byte("--b--")), request(ct, []byte("preamble\r\n--b--"))
		}
		if mustSum(t, nil, a) != mustSum(t, nil, b) {
			t.Fatalf("%s: the test shows nothing", ct)
		}
		a.ContentEncoding, b.ContentEncoding = "gzip", "gzip"
		if mustSum(t, nil, a) == mustSum(t, nil, b) {
			t.Errorf("%s: a coded body was looked into", ct)
		}
	}
}

func TestOnlyJSONIsReadAsJSON(t *testing.T) {
	for ct, want := range map[string]bool{
		"application/json":                  true,
		"application/problem+json":          true,
		"application/vnd.api+json; ext=bla": true,
		"text/plain":                        false,
		"":                                  false,
		"application/jsonl":                 false,
		"application/json-seq":              false,
		"+json":                             false,
		"application/x-www-form-urlencoded": false,
	} {
		got := bodySum(t, nil, ct, []byte(`{"a":1}`)) == bodySum(t, nil, ct, []byte(`{ "a":1}`))
		if got != want {
			t.Errorf("%q: read as JSON: %v", ct, got)
		}
	}
}

// failing gives its bytes up to at, then an error.
type failing struct {
	p   []byte
	at  int64
	err error
}

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	n := copy(p, f.p[min(off, f.at):f.at])
	if n < len(p) {
		return n, f.err
	}
	return n, nil
}

// A body that cannot be read has no fingerprint: the call must be refused before
// any claim, not go on with a wrong sum.
func TestReadErrorsAreReturned(t *testing.T) {
	broken := errors.New("disk gone")
	doc := []byte(`{"a":"` + strings.Repeat("x", 2*window) + `","b":[1,2,3]}`)
	parts := []byte("--b\r\nA: b\r\n\r\n" + strings.Repeat("x", 2*window) + "\r\n--b--")
	for _, c := range []struct {
		ct   string
		body []byte
	}{
		{"application/json", doc},
		{"application/json", []byte(strings.Repeat(" ", window-1) + "12")},
		{"application/json", []byte("x" + strings.Repeat(" ", 2*window))},
		{"multipart/form-data; boundary=b", parts},
		{"multipart/form-data; boundary=c", parts},
		{"text/plain", doc},
	} {
		for _, at := range []int64{0, 1, 100, window - 1, window, window + 1, int64(len(c.body)) - 1} {
			at = min(at, int64(len(c.body))-1)
			req := request(c.ct, c.body)
			for have, want := range map[error]error{broken: broken, io.EOF: io.ErrUnexpectedEOF} {
				req.Body = failing{c.body, at, have}
				if _, err := (*fingerprint.Config)(nil).Sum(req); !errors.Is(err, want) {
					t.Errorf("%s of %d bytes, %v at %d: %v", c.ct, len(c.body), have, at, err)
				}
				ptr, _ := fingerprint.ParsePointer("/b/0")
				if c.ct == "application/json" && c.body[0] != 'x' {
					if _, found, err := fingerprint.Lookup(req.Body, req.Size, ptr); found || !errors.Is(err, want) {
						t.Errorf("Lookup, %v at %d: %v, %v", have, at, found, err)
					}
				}
			}
		}
	}
	req := request("text/plain", nil)
	req.Size = -1
	if _, err := (*fingerprint.Config)(nil).Sum(req); err == nil {
		t.Error("negative size")
	}
	req.Body, req.Size = nil, 1
	if _, err := (*fingerprint.Config)(nil).Sum(req); err == nil {
		t.Error("size without a body")
	}
	req.Size = 0
	if _, err := (*fingerprint.Config)(nil).Sum(req); err != nil {
		t.Errorf("no body: %v", err)
	}
}

// One Config serves all requests at once; nothing of one gets into another.
func TestConcurrentSums(t *testing.T) {
	cfg := config(t, "/id", "/list/1")
	var docs []string
	var want []fingerprint.Sum
	for i := range 20 {
		doc := fmt.Sprintf(`{"id":%d,"list":[%d,2,%q],"x":{"y":%d}}`, i, i, strings.Repeat("z", i*1000), i)
		docs = append(docs, doc)
		want = append(want, jsonSum(t, cfg, doc))
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 400 {
				n := (i*7 + g) % len(docs)
				req := request("application/json", []byte(docs[n]))
				if got, err := cfg.Sum(req); err != nil || got != want[n] {
					t.Errorf("sum of document %d changed: %v", n, err)
					return
				}
				if v, _, err := fingerprint.Lookup(bytes.NewReader([]byte(docs[n])), req.Size, mustPointer(t, "/x/y")); err != nil || v != fmt.Sprint(n) {
					t.Errorf("lookup in document %d: %q, %v", n, v, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func Example() {
	id, err := fingerprint.ParsePointer("/id")
	if err != nil {
		panic(err)
	}
	cfg := &fingerprint.Config{Exclude: []fingerprint.Pointer{id}}
	sum := func(body string) fingerprint.Sum {
		s, err := cfg.Sum(fingerprint.Request{
			Method: "POST", Host: "api.example.com", Path: "/v1/charges",
			ContentType: "application/json", Body: strings.NewReader(body), Size: int64(len(body)),
		})
		if err != nil {
			panic(err)
		}
		return s
	}
	first := sum(`{"id": 1, "amount": 10.0, "currency": "eur"}`)
	retry := sum(`{"currency":"eur","amount":10,"id":2}`)
	other := sum(`{"currency":"eur","amount":100,"id":1}`)
	fmt.Println(first == retry, first == other)
	// Output: true false
}
