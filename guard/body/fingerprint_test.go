package body_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"mime/multipart"
	"net/textproto"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Every field counts, and none can flow over into its neighbour.
func TestEveryFieldCounts(t *testing.T) {
	base := request("application/json", []byte(`{"a":1}`))
	seen := map[body.Fingerprint]string{}
	add := func(name string, change func(*body.Request)) {
		req := base
		change(&req)
		s := mustSum(t, nil, req)
		if other, ok := seen[s]; ok {
			t.Errorf("%s and %s have the same sum", name, other)
		}
		seen[s] = name
	}
	of := func(s string) func(*body.Request) {
		return func(r *body.Request) { r.Body, r.Size = strings.NewReader(s), int64(len(s)) }
	}
	add("base", func(*body.Request) {})
	add("method", func(r *body.Request) { r.Method = "PUT" })
	add("host", func(r *body.Request) { r.Host = "example.com" })
	add("path", func(r *body.Request) { r.Path = "/v1/other" })
	add("path case", func(r *body.Request) { r.Path = "/v1/Things" })
	add("escaped path", func(r *body.Request) { r.Path = "/v1%2fthings" })
	add("query", func(r *body.Request) { r.RawQuery = "a=2" })
	add("no query", func(r *body.Request) { r.RawQuery = "" })
	add("query in path", func(r *body.Request) { r.Path, r.RawQuery = "/v1/thingsa=1", "" })
	add("host in method", func(r *body.Request) { r.Method, r.Host = "POSTapi.", "example.com" })
	add("media type", func(r *body.Request) { r.ContentType = "application/x+json" })
	add("raw", func(r *body.Request) { r.ContentType = "text/plain" })
	add("no media type", func(r *body.Request) { r.ContentType = "" })
	add("coding", func(r *body.Request) { r.ContentEncoding = "gzip" })
	add("other coding", func(r *body.Request) { r.ContentEncoding = "br" })
	add("empty", of(""))
	add("white space", of(" "))
	add("other body", of(`{"a":2}`))
	add("invalid body", of(`{"a":1}}`))
}

func TestWhatDoesNotCount(t *testing.T) {
	base := request("application/json", []byte(`{"a":1}`))
	want := mustSum(t, nil, base)
	for name, change := range map[string]func(*body.Request){
		"case of host":          func(r *body.Request) { r.Host = "API.Example.COM" },
		"parameters":            func(r *body.Request) { r.ContentType = "application/json; charset=utf-8" },
		"case of media type":    func(r *body.Request) { r.ContentType = " Application/JSON ;x=y" },
		"identity coding":       func(r *body.Request) { r.ContentEncoding = "Identity" },
		"how the body is held":  func(r *body.Request) { r.Body = inMemory{nil, []byte(`{"a":1}`)} },
		"what follows the size": func(r *body.Request) { r.Body = inMemory{nil, []byte(`{"a":1}]`)} },
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
				if _, err := (*body.Comparison)(nil).Sum(req); !errors.Is(err, want) {
					t.Errorf("%s of %d bytes, %v at %d: %v", c.ct, len(c.body), have, at, err)
				}
				ptr, _ := jsonx.ParsePointer("/b/0")
				if c.ct == "application/json" && c.body[0] != 'x' {
					if _, found, err := body.Lookup(req.Body, req.Size, ptr); found || !errors.Is(err, want) {
						t.Errorf("Lookup, %v at %d: %v, %v", have, at, found, err)
					}
				}
			}
		}
	}
	req := request("text/plain", nil)
	req.Size = -1
	if _, err := (*body.Comparison)(nil).Sum(req); err == nil {
		t.Error("negative size")
	}
	req.Body, req.Size = nil, 1
	if _, err := (*body.Comparison)(nil).Sum(req); err == nil {
		t.Error("size without a body")
	}
	req.Size = 0
	if _, err := (*body.Comparison)(nil).Sum(req); err != nil {
		t.Errorf("no body: %v", err)
	}
}

// One Config serves all requests at once; nothing of one gets into another.
func TestConcurrentSums(t *testing.T) {
	cfg := config(t, "/id", "/list/1")
	var docs []string
	var want []body.Fingerprint
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
				if v, _, err := body.Lookup(bytes.NewReader([]byte(docs[n])), req.Size, mustPointer(t, "/x/y")); err != nil || v != fmt.Sprint(n) {
					t.Errorf("lookup in document %d: %q, %v", n, v, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func ExampleComparison_Read() {
	id, err := jsonx.ParsePointer("/id")
	if err != nil {
		panic(err)
	}
	cfg := &body.Comparison{Exclude: []jsonx.Pointer{id}}
	sum := func(text string) body.Fingerprint {
		s, err := cfg.Sum(body.Request{
			Method: "POST", Host: "api.example.com", Path: "/v1/charges",
			ContentType: "application/json", Body: strings.NewReader(text), Size: int64(len(text)),
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

// window is how much a body is looked at in one piece; documents that are padded
// to about this size cross the seam.
const window = 64 << 10

func request(contentType string, text []byte) body.Request {
	return body.Request{
		Method: "POST", Host: "api.example.com", Path: "/v1/things", RawQuery: "a=1",
		ContentType: contentType, Body: bytes.NewReader(text), Size: int64(len(text)),
	}
}

func mustSum(t testing.TB, cfg *body.Comparison, req body.Request) body.Fingerprint {
	t.Helper()
	s, err := cfg.Sum(req)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// bodySum gives the sum of a body, and checks that it does not depend on whether
// the body lies in memory.
func bodySum(t testing.TB, cfg *body.Comparison, contentType string, body []byte) body.Fingerprint {
	t.Helper()
	req := request(contentType, body)
	streamed := mustSum(t, cfg, req)
	req.Body = inMemory{bytes.NewReader(body), body}
	if mustSum(t, cfg, req) != streamed {
		t.Fatalf("in memory and streamed sums of %.200q differ", body)
	}
	return streamed
}

func jsonSum(t testing.TB, cfg *body.Comparison, doc string) body.Fingerprint {
	t.Helper()
	return bodySum(t, cfg, "application/json", []byte(doc))
}

// asJSON reports whether doc is compared as JSON: then white space does not count.
func asJSON(t testing.TB, doc string) bool {
	t.Helper()
	return jsonSum(t, nil, doc) == jsonSum(t, nil, " \t\n\r"+doc+"\r\n\t ")
}

func config(t testing.TB, pointers ...string) *body.Comparison {
	t.Helper()
	var c body.Comparison
	for _, s := range pointers {
		p, err := jsonx.ParsePointer(s)
		if err != nil {
			t.Fatal(err)
		}
		c.Exclude = append(c.Exclude, p)
	}
	return &c
}

// node is a JSON value with its duplicates and the order of its members, read by
// the standard library.
type node struct {
	kind byte // n(ull) b(ool) # s(tring) a(rray) o(bject)
	text string
	keys []string
	kids []*node
}

func parse(t testing.TB, doc []byte) *node {
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	n := read(t, dec)
	if _, err := dec.Token(); err != io.EOF {
		t.Fatalf("valid document %.200q does not end: %v", doc, err)
	}
	return n
}

func read(t testing.TB, dec *json.Decoder) *node {
	tok, err := dec.Token()
	if err != nil {
		t.Fatal(err)
	}
	switch v := tok.(type) {
	case nil:
		return &node{kind: 'n', text: "null"}
	case bool:
		return &node{kind: 'b', text: strconv.FormatBool(v)}
	case json.Number:
		return &node{kind: '#', text: v.String()}
	case string:
		return &node{kind: 's', text: v}
	}
	n := &node{kind: 'a'}
	if tok == json.Delim('{') {
		n.kind = 'o'
	}
	for dec.More() {
		if n.kind == 'o' {
			key, err := dec.Token()
			if err != nil {
				t.Fatal(err)
			}
			n.keys = append(n.keys, key.(string))
		}
		n.kids = append(n.kids, read(t, dec))
	}
	if _, err := dec.Token(); err != nil {
		t.Fatal(err)
	}
	return n
}

// canonical is the slow and obvious way: one text for every value.
func (n *node) canonical() string {
	switch n.kind {
	case '#':
		return number(n.text)
	case 's':
		return strconv.Quote(n.text)
	case 'a', 'o':
		var kids []string
		for i, k := range n.kids {
			if n.kind == 'o' {
				kids = append(kids, strconv.Quote(n.keys[i])+":"+k.canonical())
			} else {
				kids = append(kids, k.canonical())
			}
		}
		if n.kind == 'a' {
			return "[" + strings.Join(kids, ",") + "]"
		}
		order := make([]int, len(kids))
		for i := range order {
			order[i] = i
		}
		sort.SliceStable(order, func(i, j int) bool { return n.keys[order[i]] < n.keys[order[j]] })
		sorted := make([]string, len(kids))
		for i, o := range order {
			sorted[i] = kids[o]
		}
		return "{" + strings.Join(sorted, ",") + "}"
	default:
		return n.text
	}
}

// number writes the number text as mantissa and exponent, both of any size.
func number(text string) string {
	mant, exp, _ := strings.Cut(strings.ToLower(text), "e")
	e := new(big.Int)
	if exp != "" {
		e.SetString(strings.TrimPrefix(exp, "+"), 10)
	}
	whole, frac, _ := strings.Cut(mant, ".")
	m, ok := new(big.Int).SetString(whole+frac, 10)
	if !ok {
		panic("not a number: " + text)
	}
	if m.Sign() == 0 {
		return "0"
	}
	e.Sub(e, big.NewInt(int64(len(frac))))
	ten, one := big.NewInt(10), big.NewInt(1)
	for {
		q, r := new(big.Int).QuoRem(m, ten, new(big.Int))
		if r.Sign() != 0 {
			return m.String() + "*10^" + e.String()
		}
		m = q
		e.Add(e, one)
	}
}

// rewrite writes the value in another way: members in another order (but for
// equal names), other white space, escapes and forms of numbers.
func (n *node) rewrite(rnd *rand.Rand) string {
	space := func() string { return strings.Repeat(string(" \t\r\n"[rnd.IntN(4)]), rnd.IntN(3)) }
	var b strings.Builder
	b.WriteString(space())
	switch n.kind {
	case '#':
		b.WriteString(rewriteNumber(n.text, rnd))
	case 's':
		b.WriteString(rewriteString(n.text, rnd))
	case 'a':
		b.WriteByte('[')
		for i, k := range n.kids {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(k.rewrite(rnd))
		}
		b.WriteString(space() + "]")
	case 'o':
		// Shuffle names, then give every occurrence of a name its members in
		// their old order.
		queue := map[string][]*node{}
		for i, k := range n.keys {
			queue[k] = append(queue[k], n.kids[i])
		}
		b.WriteByte('{')
		for i, j := range rnd.Perm(len(n.keys)) {
			key := n.keys[j]
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(space() + rewriteString(key, rnd) + space() + ":" + queue[key][0].rewrite(rnd))
			queue[key] = queue[key][1:]
		}
		b.WriteString(space() + "}")
	default:
		b.WriteString(n.text)
	}
	b.WriteString(space())
	return b.String()
}

func rewriteNumber(text string, rnd *rand.Rand) string {
	mant, exp, hasExp := strings.Cut(strings.ToLower(text), "e")
	if rnd.IntN(2) == 0 {
		if strings.Contains(mant, ".") {
			mant += "000"
		} else {
			mant += ".0"
		}
	}
	switch {
	case !hasExp && rnd.IntN(2) == 0:
		return mant + []string{"e0", "E+0", "e-00"}[rnd.IntN(3)]
	case !hasExp:
		return mant
	}
	sign := exp[:len(exp)-len(strings.TrimLeft(exp, "+-"))]
	return mant + "E" + sign + strings.Repeat("0", rnd.IntN(3)) + exp[len(sign):]
}

func rewriteString(s string, rnd *rand.Rand) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r < ' ' || r == '"' || r == '\\' || rnd.IntN(3) == 0:
			if hi, lo := utf16.EncodeRune(r); hi != utf8.RuneError {
				fmt.Fprintf(&b, `\u%04x\u%04X`, hi, lo)
			} else {
				fmt.Fprintf(&b, `\u%04X`, r)
			}
		case r == '/':
			b.WriteString(`\/`)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// strict reports whether doc is JSON in our sense, by the standard library and
// the rules that it leaves out.
func strict(doc []byte) bool {
	if !json.Valid(doc) || !utf8.Valid(doc) {
		return false
	}
	depth, inString := 0, false
	for i := 0; i < len(doc); i++ {
		switch c := doc[i]; {
		case c == '"':
			inString = !inString
		case c == '\\':
			i++
			if doc[i] != 'u' {
				continue
			}
			r := unit(doc[i-1:])
			i += 4
			if utf16.IsSurrogate(r) {
				if utf16.DecodeRune(r, unit(doc[i+1:])) == utf8.RuneError {
					return false
				}
				i += 6
			}
		case inString:
		case c == '[' || c == '{':
			if depth++; depth > 512 {
				return false
			}
		case c == ']' || c == '}':
			depth--
		}
	}
	return true
}

// unit reads \uXXXX at the beginning of p, or gives -1.
func unit(p []byte) rune {
	if len(p) < 6 || p[0] != '\\' || p[1] != 'u' {
		return -1
	}
	v, err := strconv.ParseUint(string(p[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(v)
}

// RFC 6901, section 5, and what an id in a body may look like (facts, section 2:
// "a key must be extractable from the body").
func TestLookup(t *testing.T) {
	const rfc = `{"foo":["bar","baz"],"":0,"a/b":1,"c%d":2,"e^f":3,"g|h":4,"i\\j":5,"k\"l":6," ":7,"m~n":8}`
	long := strings.Repeat("v", 70000)
	for _, c := range []struct {
		doc, pointer, want string
		found              bool
		err                error
	}{
		{rfc, "/foo/0", "bar", true, nil},
		{rfc, "/foo/1", "baz", true, nil},
		{rfc, "/", "0", true, nil},
		{rfc, "/a~1b", "1", true, nil},
		{rfc, "/c%d", "2", true, nil},
		{rfc, "/e^f", "3", true, nil},
		{rfc, "/g|h", "4", true, nil},
		{rfc, `/i\j`, "5", true, nil},
		{rfc, `/k"l`, "6", true, nil},
		{rfc, "/ ", "7", true, nil},
		{rfc, "/m~0n", "8", true, nil},
		{rfc, "/foo", "", false, body.ErrNotScalar},
		{rfc, "", "", false, body.ErrNotScalar},
		{rfc, "/foo/2", "", false, nil},
		{rfc, "/foo/-", "", false, nil},
		{rfc, "/foo/00", "", false, nil},
		{rfc, "/foo/bar", "", false, nil},
		{rfc, "/foo/0/x", "", false, nil},
		{rfc, "/fo", "", false, nil},
		{rfc, "/fooo", "", false, nil},
		{`"x"`, "", "x", true, nil},
		{` 12 `, "", "12", true, nil},
		{`{"id":-1.50E+2}`, "/id", "-1.50E+2", true, nil},
		{`{"id":12345678901234567890}`, "/id", "12345678901234567890", true, nil},
		{`{"\u0069d":"\u0041\ud83d\ude00"}`, "/id", "A😀", true, nil},
		{`{"id":""}`, "/id", "", true, nil},
		{`{"id":null}`, "/id", "", false, nil},
		{`{"id":true}`, "/id", "", false, body.ErrNotScalar},
		{`{"id":false}`, "/id", "", false, body.ErrNotScalar},
		{`{"id":{"x":1}}`, "/id", "", false, body.ErrNotScalar},
		{`{"id":"a","id":"b"}`, "/id", "", false, jsonx.ErrAmbiguous},
		{`{"id":"a","id":"a"}`, "/id", "", false, jsonx.ErrAmbiguous},
		{`{"id":"a","\u0069d":null}`, "/id", "", false, jsonx.ErrAmbiguous},
		{`{"m":{"id":"a"},"m":{}}`, "/m/id", "", false, jsonx.ErrAmbiguous},
		{`{"x":1,"x":2,"id":"a"}`, "/id", "a", true, nil},
		{`{"id":"a","n":{"id":"b"}}`, "/id", "a", true, nil},
		{`{"id":{}} {"n":2}`, "/id", "", false, body.ErrNotScalar}, // what is wrong first
		{`{"id":{},"id":null}`, "/id", "", false, body.ErrNotScalar},
		{`{"id":"a","id":"b"`, "/id", "", false, jsonx.ErrAmbiguous},
		{`{"id":"a"`, "/id", "", false, body.ErrNotJSON},
		{`{"id":"a"} x`, "/id", "", false, body.ErrNotJSON},
		{"{\"id\":\"a\",\"x\":\"\xff\"}", "/id", "", false, body.ErrNotJSON},
		{``, "/id", "", false, nil},
		{`{"id":"` + long[:65536] + `"}`, "/id", long[:65536], true, nil},
		{`{"id":"` + long[:65537] + `"}`, "/id", "", false, body.ErrValueTooLong},
		{`{"other":"` + long + `","id":"a"}`, "/id", "a", true, nil},
		{`{"` + long + `":"a"}`, "/" + long, "a", true, nil},
		{`{"` + long + `":"a"}`, "/" + long[1:], "", false, nil},
		{`{"` + long + `":"a"}`, "/" + long + "v", "", false, nil},
	} {
		p := mustPointer(t, c.pointer)
		for _, pad := range []int{0, window - 1, window - 5, window - 9} {
			if pad > 0 && c.doc == "" {
				continue
			}
			doc := []byte(strings.Repeat(" ", pad) + c.doc)
			for _, from := range []interface {
				ReadAt([]byte, int64) (int, error)
			}{bytes.NewReader(doc), inMemory{bytes.NewReader(doc), doc}} {
				v, found, err := body.Lookup(from, int64(len(doc)), p)
				if v != c.want || found != c.found || err != c.err {
					t.Errorf("%.60s at %.20q: %.20q, %v, %v; want %.20q, %v, %v", c.doc, c.pointer, v, found, err, c.want, c.found, c.err)
				}
			}
		}
	}
}

func multipartSum(t testing.TB, boundary, body string) body.Fingerprint {
	t.Helper()
	return bodySum(t, nil, "multipart/form-data; boundary=\""+boundary+"\"", []byte(body))
}

// asMultipart reports whether body, with boundary "b", is compared by its parts.
func asMultipart(t testing.TB, body string) bool {
	t.Helper()
	return multipartSum(t, "b", body) == multipartSum(t, "b", "preamble\r\n"+body)
}

// form is also a golden body: it must not change.
const form = "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nvalue\r\n" +
	"--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"x\"\r\nContent-Type: text/plain\r\n\r\nfile\r\n--b--\r\n"

// Trap 7: the boundary differs for every attempt.
func TestMultipartSameParts(t *testing.T) {
	want := multipartSum(t, "b", form)
	for name, c := range map[string]struct{ boundary, body string }{
		"another boundary": {"xyz", strings.ReplaceAll(form, "--b", "--xyz")},
		"longest boundary": {strings.Repeat("B", 70), strings.ReplaceAll(form, "--b", "--"+strings.Repeat("B", 70))},
		"preamble":         {"b", "This is\r\na message.\r\n" + form},
		"epilogue":         {"b", form + "the end"},
		"no last CRLF":     {"b", strings.TrimSuffix(form, "\r\n")},
		"padding":          {"b", strings.ReplaceAll(form, "--b\r\n", "--b \t \r\n")},
		"padding at end":   {"b", strings.TrimSuffix(form, "\r\n") + "  "},
		"order of fields":  {"b", strings.Replace(form, "Content-Disposition: form-data; name=\"f\"; filename=\"x\"\r\nContent-Type: text/plain", "content-type:text/plain \r\nCONTENT-DISPOSITION:\tform-data; name=\"f\"; filename=\"x\"", 1)},
		"over the seam":    {"b", strings.Repeat("x", window-20) + "\r\n" + form},
	} {
		if c.body == form {
			t.Fatalf("%s: the test shows nothing", name)
		}
		if multipartSum(t, c.boundary, c.body) != want {
			t.Errorf("%s: another sum", name)
		}
	}
	if bodySum(t, nil, "Multipart/Form-Data; charset=utf-8; boundary=b", []byte(form)) != want {
		t.Error("another parameter: another sum")
	}
}

func TestMultipartOtherParts(t *testing.T) {
	seen := map[body.Fingerprint]string{multipartSum(t, "b", form): "form"}
	first, second, _ := strings.Cut(strings.TrimSuffix(form, "--b--\r\n"), "\r\n--b\r\n")
	for name, body := range map[string]string{
		"value":            strings.Replace(form, "value", "Value", 1),
		"longer value":     strings.Replace(form, "value", "value\r\n", 1),
		"line end":         strings.Replace(form, "value", "va\r\nlue", 1),
		"other line end":   strings.Replace(form, "value", "va\nlue", 1),
		"name":             strings.Replace(form, `name="a"`, `name="b"`, 1),
		"file name":        strings.Replace(form, `"x"`, `"y"`, 1),
		"type":             strings.Replace(form, "text/plain", "text/html", 1),
		"no type":          strings.Replace(form, "\r\nContent-Type: text/plain", "", 1),
		"type twice":       strings.Replace(form, "Content-Type: text/plain", "Content-Type: text/plain\r\nContent-Type: text/plain", 1),
		"order of parts":   "--b\r\n" + second + first + "\r\n--b--\r\n",
		"one part":         first + "\r\n--b--\r\n",
		"a part twice":     first + "\r\n" + form,
		"no part":          "--b--\r\n",
		"empty part":       "--b\r\n\r\n\r\n--b--\r\n",
		"two empty parts":  "--b\r\n\r\n\r\n--b\r\n\r\n\r\n--b--\r\n",
		"field as content": strings.Replace(form, "Content-Type: text/plain\r\n\r\n", "\r\nContent-Type: text/plain\r\n", 1),
		"boundary inside":  strings.Replace(form, "value", "x--b", 1),
		"other boundary":   strings.Replace(form, "value", "\r\n--c\r\n", 1),
	} {
		if !asMultipart(t, body) {
			t.Errorf("%s: not read as parts", name)
		}
		s := multipartSum(t, "b", body)
		if other, ok := seen[s]; ok {
			t.Errorf("%s and %s have the same sum", name, other)
		}
		seen[s] = name
	}
	if bodySum(t, nil, "multipart/mixed; boundary=b", []byte(form)) == multipartSum(t, "b", form) {
		t.Error("another media type, the same sum")
	}
}

// Where readers might see other parts than we do, the bytes are compared.
func TestMultipartRawInstead(t *testing.T) {
	for name, body := range map[string]string{
		"not closed":          strings.TrimSuffix(form, "--b--\r\n"),
		"closed half":         strings.TrimSuffix(form, "-\r\n"),
		"LF only":             strings.ReplaceAll(form, "\r\n", "\n"),
		"LF after boundary":   strings.Replace(form, "--b\r\n", "--b\n", 1),
		"no boundary":         "value",
		"longer boundary":     strings.Replace(form, "value", "\r\n--bb\r\n", 1),
		"text after boundary": strings.Replace(form, "--b\r\n", "--b x\r\n", 1),
		"text after the last": strings.TrimSuffix(form, "\r\n") + "x",
		"much padding":        strings.Replace(form, "--b\r\n", "--b"+strings.Repeat(" ", 300)+"\r\n", 1),
		"no colon":            strings.Replace(form, "Content-Type:", "Content-Type", 1),
		"space in a name":     strings.Replace(form, "Content-Type:", "Content Type:", 1),
		"no name":             strings.Replace(form, "Content-Type:", ":", 1),
		"folded":              strings.Replace(form, "; filename", ";\r\n filename", 1),
		"bare CR":             strings.Replace(form, "text/plain", "text\rplain", 1),
		"bare LF":             strings.Replace(form, "text/plain", "text/plain\nX: y", 1),
		"NUL":                 strings.Replace(form, "text/plain", "text\x00plain", 1),
		"no empty line":       "--b\r\nA: b\r\n--b--",
		"huge header":         strings.Replace(form, "text/plain", strings.Repeat("x", 17<<10), 1),
	} {
		if body == form || asMultipart(t, body) {
			t.Errorf("%s: read as parts", name)
		}
	}
	for _, ct := range []string{"multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=b; boundary=c",
		"multipart/form-data; boundary=" + strings.Repeat("b", 71), `multipart/form-data; boundary="b "`, "multipart/form-data; boundary=b; =", "text/plain; boundary=b"} {
		boundary := "b"
		if strings.Contains(ct, "bb") {
			boundary = strings.Repeat("b", 71)
		}
		body := strings.ReplaceAll(form, "--b", "--"+boundary)
		if bodySum(t, nil, ct, []byte(body)) == bodySum(t, nil, ct, []byte("preamble\r\n"+body)) {
			t.Errorf("%s: read as parts", ct)
		}
	}
}

// What a standard writer makes is read as parts, and only its boundary does not
// count.
func FuzzMultipartBoundary(f *testing.F) {
	f.Add("name", "value", "content", "--b\r\n", uint16(3))
	f.Add("", "", "\r\n", "\r\n--", uint16(0))
	f.Add("X-A", "x", "\r\n--x", "\r", uint16(window-60))
	f.Fuzz(func(t *testing.T, name, value, content, other string, fill uint16) {
		content += strings.Repeat("x", int(fill))
		for _, b := range []string{"first-boundary", "2nd"} {
			if strings.Contains(content+"\r\n"+other, "--"+b) {
				return
			}
		}
		header := textproto.MIMEHeader{}
		if textproto.TrimString(name) == name && name != "" && strings.IndexFunc(name, notAlphanumeric) < 0 && !strings.ContainsAny(value, "\r\n\x00") && len(name+value) < 10000 {
			header.Set(name, value)
		}
		write := func(boundary string, contents ...string) string {
			var b bytes.Buffer
			w := multipart.NewWriter(&b)
			if err := w.SetBoundary(boundary); err != nil {
				t.Fatal(err)
			}
			for _, c := range contents {
				p, err := w.CreatePart(header)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := p.Write([]byte(c)); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			return b.String()
		}
		want := multipartSum(t, "first-boundary", write("first-boundary", content, other))
		if multipartSum(t, "2nd", write("2nd", content, other)) != want {
			t.Errorf("the boundary counts: header %q, contents %q, %q", header, content, other)
		}
		for _, changed := range [][]string{{content}, {content, other, ""}, {content, other + "!"}, {content + "!", other}, {content + other}} {
			if multipartSum(t, "2nd", write("2nd", changed...)) == want {
				t.Errorf("other contents %q, the same sum as %q, %q", changed, content, other)
			}
		}
		if content != other && multipartSum(t, "2nd", write("2nd", other, content)) == want {
			t.Errorf("the order of %q, %q does not count", content, other)
		}
		// Anything at all as a body: no panic, the same sum in both ways of reading.
		multipartSum(t, "b", name+value+other)
		multipartSum(t, "b", "--b\r\n"+name+":"+value+"\r\n\r\n"+content+"\r\n--b--"+other)
	})
}

func notAlphanumeric(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9')
}

func mustPointer(t testing.TB, s string) jsonx.Pointer {
	t.Helper()
	p, err := jsonx.ParsePointer(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// RFC 6901, section 3; the texts go to whoever writes the configuration.
func TestParsePointer(t *testing.T) {
	for _, s := range []string{"", "/", "/a", "/a/b/0", "//", "/a~1b", "/m~0n", "/~01", "/ ", "/é", "/a%b", "/-"} {
		if got := mustPointer(t, s).String(); got != s {
			t.Errorf("%q became %q", s, got)
		}
	}
	for s, want := range map[string]string{
		"a": "begin with '/'", "#/a": "'#'", "#": "'#'", "$.a": "begin with '/'", "/a~": "'~'", "/~2": "'~'", "/a~/b": "'~'", "/\xff": "UTF-8",
	} {
		if _, err := jsonx.ParsePointer(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

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
	exclude := &body.Comparison{}
	for _, p := range []string{"/id", "/metadata/order_id"} {
		ptr, err := jsonx.ParsePointer(p)
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
		cfg         *body.Comparison
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
			req := body.Request{
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
	ptr, err := jsonx.ParsePointer("/metadata/order_id")
	if err != nil {
		b.Fatal(err)
	}
	from := &inMemory{bytes.NewReader([]byte(payment)), []byte(payment)}
	b.ReportAllocs()
	for b.Loop() {
		if v, ok, err := body.Lookup(from, int64(len(payment)), ptr); v != "1017" || !ok || err != nil {
			b.Fatal(v, ok, err)
		}
	}
}

// The members that are asked for come from the pass that makes the sum, which they do not change.
func TestRead(t *testing.T) {
	config := body.Comparison{Members: []string{"key", "other"}}
	long := strings.Repeat("x", 300)
	for text, want := range map[string][]body.Member{
		`{"a":{"key":"no"},"key":"k","list":[{"key":"no"}]}`: {{Name: "key", Value: "k"}},
		`{"\u006bey":"\u006b","other":1.50}`:                 {{Name: "key", Value: "k"}, {Name: "other", Value: "1.50"}},
		`{"key":"` + long + `"}`:                             {{Name: "key", Value: long}},
		`{"key":"` + strings.Repeat(long, 300) + `"}`:        {{Name: "key", Err: body.ErrValueTooLong}},
		`{"key":"a","key":"a"}`:                              {{Name: "key", Value: "a", Err: jsonx.ErrAmbiguous}},
		`{"key":null,"other":""}`:                            {{Name: "key"}, {Name: "other"}},
		`{"key":[],"other":false}`:                           {{Name: "key", Err: body.ErrNotScalar}, {Name: "other", Err: body.ErrNotScalar}},
		`{"key":"a"`:                                         nil,
		`[{"key":"a"}]`:                                      nil,
		`{"keys":"a","Key":"a"}`:                             nil,
	} {
		r := body.Request{ContentType: "application/json", Body: strings.NewReader(text), Size: int64(len(text))}
		sum, found, err := config.Read(r)
		plain, err2 := (&body.Comparison{}).Sum(r)
		if err != nil || err2 != nil || sum != plain || !slices.Equal(found, want) {
			t.Errorf("%.60s: %v, want %v; %v %v; equal sums: %v", text, found, want, err, err2, sum == plain)
		}
	}
}
