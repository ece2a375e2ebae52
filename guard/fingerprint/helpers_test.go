package fingerprint_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"sort"
	"strconv"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

// window is how much a body is looked at in one piece; documents that are padded
// to about this size cross the seam.
const window = 64 << 10

func request(contentType string, body []byte) fingerprint.Request {
	return fingerprint.Request{
		Method: "POST", Host: "api.example.com", Path: "/v1/things", RawQuery: "a=1",
		ContentType: contentType, Body: bytes.NewReader(body), Size: int64(len(body)),
	}
}

func mustSum(t testing.TB, cfg *fingerprint.Config, req fingerprint.Request) fingerprint.Sum {
	t.Helper()
	s, err := cfg.Sum(req)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// bodySum gives the sum of a body, and checks that it does not depend on whether
// the body lies in memory.
func bodySum(t testing.TB, cfg *fingerprint.Config, contentType string, body []byte) fingerprint.Sum {
	t.Helper()
	req := request(contentType, body)
	streamed := mustSum(t, cfg, req)
	req.Body = inMemory{bytes.NewReader(body), body}
	if mustSum(t, cfg, req) != streamed {
		t.Fatalf("in memory and streamed sums of %.200q differ", body)
	}
	return streamed
}

func jsonSum(t testing.TB, cfg *fingerprint.Config, doc string) fingerprint.Sum {
	t.Helper()
	return bodySum(t, cfg, "application/json", []byte(doc))
}

// asJSON reports whether doc is compared as JSON: then white space does not count.
func asJSON(t testing.TB, doc string) bool {
	t.Helper()
	return jsonSum(t, nil, doc) == jsonSum(t, nil, " \t\n\r"+doc+"\r\n\t ")
}

func config(t testing.TB, pointers ...string) *fingerprint.Config {
	t.Helper()
	var c fingerprint.Config
	for _, s := range pointers {
		p, err := fingerprint.ParsePointer(s)
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
