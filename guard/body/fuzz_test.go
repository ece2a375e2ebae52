package body_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

func seeds() (docs []string) {
	for _, writings := range values {
		docs = append(docs, writings...)
	}
	return append(docs, payment, `{"a":[1,{"b":"c\u0000"}],"a":2.50e-3}`, "\ufeff1", `["\ud800"]`, "[1,]", "", "\"\xff\"", `{"a":1}}`)
}

// We read as JSON exactly what the standard library and our stricter rules allow;
// another writing of a value has its sum, another value has not; what is excluded
// is as if it were not there.
func FuzzJSON(f *testing.F) {
	for i, d := range seeds() {
		f.Add([]byte(d), uint64(i))
	}
	f.Fuzz(func(t *testing.T, doc []byte, seed uint64) {
		sum := jsonSum(t, nil, string(doc))
		ok := strict(doc)
		if got := jsonSum(t, nil, string(doc)+"\n") == sum; got != ok {
			t.Fatalf("%q is read as JSON: %v; want %v", doc, got, ok)
		}
		if !ok {
			return
		}
		rnd := rand.New(rand.NewPCG(seed, 1))
		n := parse(t, doc)
		again := n.rewrite(rnd)
		if strict([]byte(again)) && jsonSum(t, nil, again) != sum {
			t.Fatalf("%q, written as %q, has another sum", doc, again)
		}
		if jsonSum(t, nil, strings.Repeat(" ", window-rnd.IntN(min(len(doc), window-1)+1))+again) != sum {
			t.Fatalf("%q has another sum across the seam", again)
		}

		if path, without := n.remove(rnd); path != "" {
			want := jsonSum(t, nil, without.rewrite(rnd))
			if jsonSum(t, config(t, path), string(doc)) != want {
				t.Fatalf("%q without %q has not the sum of %q", doc, path, without.rewrite(rnd))
			}
		}

		old := n.canonical()
		n.change(rnd)
		changed := n.rewrite(rnd)
		if (jsonSum(t, nil, changed) == sum) != (n.canonical() == old) {
			t.Fatalf("%q and %q: equal sums: %v", doc, changed, jsonSum(t, nil, changed) == sum)
		}
	})
}

// change changes something small somewhere.
func (n *node) change(rnd *rand.Rand) {
	if len(n.kids) > 0 && rnd.IntN(4) > 0 {
		n.kids[rnd.IntN(len(n.kids))].change(rnd)
		return
	}
	switch {
	case n.kind == '#':
		mant, exp, hasExp := strings.Cut(strings.ToLower(n.text), "e")
		switch rnd.IntN(4) {
		case 0:
			n.kind = 's'
		case 1:
			n.text = strings.TrimPrefix("-"+n.text, "--")
		case 2:
			if !strings.Contains(mant, ".") {
				mant += "."
			}
			n.text = mant + "1"
			if hasExp {
				n.text += "e" + exp
			}
		default:
			if hasExp {
				n.text += "0"
			} else {
				n.text += "e" + strconv.Itoa(rnd.IntN(5)-2)
			}
		}
	case n.kind == 's':
		r := []rune(n.text)
		n.text = string(slices.Insert(r, rnd.IntN(len(r)+1), []rune("a\x00é😀\\1")[rnd.IntN(6)]))
	case len(n.kids) == 0:
		*n = []node{{kind: 'n', text: "null"}, {kind: 'b', text: "true"}, {kind: 's'}, {kind: 'a'}, {kind: 'o'}, {kind: '#', text: "0"}}[rnd.IntN(6)]
	default:
		i, j := rnd.IntN(len(n.kids)), rnd.IntN(len(n.kids))
		switch {
		case n.kind == 'o' && rnd.IntN(3) == 0:
			n.keys[i] += "x"
		case rnd.IntN(2) == 0:
			n.kids[i], n.kids[j] = n.kids[j], n.kids[i]
		default:
			n.kids = slices.Delete(n.kids, i, i+1)
			if n.kind == 'o' {
				n.keys = slices.Delete(n.keys, i, i+1)
			}
		}
	}
}

// remove gives the pointer of some part and the document without it.
func (n *node) remove(rnd *rand.Rand) (path string, without *node) {
	if len(n.kids) == 0 {
		return "", n
	}
	i := rnd.IntN(len(n.kids))
	c := &node{kind: n.kind, text: n.text}
	token := strconv.Itoa(i)
	if n.kind == 'o' {
		token = n.keys[i]
	}
	sub, kid := "", n.kids[i]
	if rnd.IntN(2) == 0 {
		sub, kid = kid.remove(rnd)
	}
	for j, k := range n.kids {
		switch {
		case n.kind == 'o' && n.keys[j] == token && j != i && sub != "":
			return "", n // the pointer would reach into the other one too
		case j == i && sub != "":
			k = kid
		case j == i || (n.kind == 'o' && n.keys[j] == token):
			continue
		}
		c.kids = append(c.kids, k)
		if n.kind == 'o' {
			c.keys = append(c.keys, n.keys[j])
		}
	}
	return "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(token) + sub, c
}

// Two documents have the same sum if and only if they are the same value, or both
// no JSON and the same bytes.
func FuzzTwoDocuments(f *testing.F) {
	s := seeds()
	for i := range s {
		f.Add([]byte(s[i]), []byte(s[(i+1)%len(s)]))
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		want := bytes.Equal(a, b)
		if strict(a) && strict(b) {
			want = parse(t, a).canonical() == parse(t, b).canonical()
		}
		if got := jsonSum(t, nil, string(a)) == jsonSum(t, nil, string(b)); got != want {
			t.Fatalf("%q and %q have the same sum: %v", a, b, got)
		}
	})
}

// Lookup finds what a walk through the standard library's document finds.
func FuzzLookup(f *testing.F) {
	for i, d := range seeds() {
		f.Add([]byte(d), []string{"", "/a", "/a/0", "/0", "/", "/metadata/order_id", "/a/1/b"}[i%7])
	}
	f.Fuzz(func(t *testing.T, doc []byte, pointer string) {
		p, err := jsonx.ParsePointer(pointer)
		if err != nil {
			return
		}
		value, found, err := body.Lookup(bytes.NewReader(doc), int64(len(doc)), p)
		inMem, foundInMem, errInMem := body.Lookup(inMemory{bytes.NewReader(doc), doc}, int64(len(doc)), p)
		if value != inMem || found != foundInMem || err != errInMem {
			t.Fatalf("in memory %q, %v, %v; streamed %q, %v, %v", inMem, foundInMem, errInMem, value, found, err)
		}
		if (err != nil || !found) && value != "" {
			t.Fatalf("a value %q that was not found: %v", value, err)
		}
		if !strict(doc) {
			if found || (err == nil) != (len(doc) == 0) {
				t.Fatalf("in %q: %v, %v", doc, found, err)
			}
			return
		}
		var tokens []string
		if pointer != "" {
			for _, tok := range strings.Split(pointer[1:], "/") {
				tokens = append(tokens, strings.NewReplacer("~1", "/", "~0", "~").Replace(tok))
			}
		}
		n, ambiguous := parse(t, doc).walk(tokens)
		switch {
		case ambiguous:
			// Which of both is met first depends on the order.
			if !errors.Is(err, jsonx.ErrAmbiguous) && !errors.Is(err, body.ErrNotScalar) {
				t.Fatalf("%q in %q: %q, %v, %v", pointer, doc, value, found, err)
			}
		case n == nil || n.kind == 'n':
			if found || err != nil {
				t.Fatalf("%q in %q: found %q, %v", pointer, doc, value, err)
			}
		case n.kind == 's' || n.kind == '#':
			if !found || err != nil || value != n.text {
				t.Fatalf("%q in %q: %q, %v, %v; want %q", pointer, doc, value, found, err, n.text)
			}
		default:
			if found || err != body.ErrNotScalar {
				t.Fatalf("%q in %q: %v, %v", pointer, doc, found, err)
			}
		}
	})
}

// walk follows tokens; ambiguous tells that a name on the way stands twice.
func (n *node) walk(tokens []string) (at *node, ambiguous bool) {
	if len(tokens) == 0 {
		return n, false
	}
	var next *node
	for i, k := range n.kids {
		if (n.kind == 'o' && n.keys[i] == tokens[0]) || (n.kind == 'a' && strconv.Itoa(i) == tokens[0]) {
			if next != nil {
				return nil, true
			}
			next = k
		}
	}
	if next == nil {
		return nil, false
	}
	return next.walk(tokens[1:])
}

// The oracle itself: it must agree with the standard library where that can judge.
func TestOracle(t *testing.T) {
	for _, writings := range values {
		for _, w := range writings {
			if !strict([]byte(w)) {
				t.Errorf("%q is not strict", w)
			}
			a, b := parse(t, []byte(writings[0])).canonical(), parse(t, []byte(w)).canonical()
			if a != b {
				t.Errorf("%q and %q: %s, %s", writings[0], w, a, b)
			}
			var v any
			if err := json.Unmarshal([]byte(parse(t, []byte(w)).rewrite(rand.New(rand.NewPCG(1, 2)))), &v); err != nil && !strings.Contains(err.Error(), "cannot unmarshal number") {
				t.Errorf("rewritten %q: %v", w, err)
			}
		}
	}
}

// Sums are stored with their keys, for 30 days and longer: after an upgrade of
// the gateway a retry must still have the sum of its first attempt, or it is
// answered 422. These values never change. A new way to compute them needs a new
// domain, and the old one beside it.
func TestGoldenSums(t *testing.T) {
	const js = "application/json"
	for _, g := range []struct {
		name, contentType, coding, body string
		exclude                         []string
		want                            string
	}{
		{"no body", "", "", "", nil, "a872debfa97af4c6c5907f25cae4ecde9e98dfbb281e4a8e2a0b8c7f60bb53ac"},
		{"no body, JSON", js, "", "", nil, "ca152412aee1d59057625aa695b9e9654aeb2e3033e4b36854d981001839b1a9"},
		{"payment", js + "; charset=utf-8", "", payment, nil, "b34c2615f31928c55762fe4920f0b33d48fbe9073f744f5a7b21d32258771fae"},
		{"payment without its id", js, "", payment, []string{"/metadata/order_id", "/items/0"}, "c1951d0a795ffe6d098d34eaecc5a4dfb6084baddc9dac3ad4fda35d29d812e2"},
		{"all kinds", js, "", `{"z":null,"t":true,"f":false,"n":-12.50e+3,"s":"\u00e9\ud83d\ude00\n","a":[0,"",{},[]],"a":1}`, nil, "4fc356d676dd5cdbf7537edc0689b48d7104c6da8eaeff2dadede7f83a95410f"},
		{"exact number", js, "", `[12345678901234567890,1e400,1e-99999999999999999999,0.1]`, nil, "7439e0e7cf209f9ea60368aa9f0e42a8896dbe04c0427b917180fe9df85e8078"},
		{"scalar", js, "", `"x"`, nil, "d409374c537d1a53a288aab5eb68ce629ee5c9ab4160bccbb4c490bfc64fa9f9"},
		{"hashed string", js, "", `{"s":"` + strings.Repeat("long ", 1000) + `"}`, nil, "666ce4514af0b74bf3d27036db2cc01d245eaa986623f9205b783c86a92346ac"},
		{"hashed name", js, "", `{"` + strings.Repeat("n", 129) + `":1}`, nil, "9f2a4e374426a110972e35130cffe88f78e3100df52addea64d143e2dbbf287a"},
		{"hashed number", js, "", strings.Repeat("9", 200), nil, "f0c996dab726ac9aaa00b077adea7e11f8bb0d0ede882cb7a500668739a639dd"},
		{"hashed object", js, "", `{"o":{"a":"` + strings.Repeat("x", 100) + `","b":"` + strings.Repeat("y", 100) + `"}}`, nil, "243d6b3572a453a569ad9d96c5c39892e471abd1ed9de65080358fd820d4e2bc"},
		{"hashed array", js, "", `[` + strings.Repeat(`"element",`, 100) + `1]`, nil, "a9027d66e2cffd4aaef757c1f58e88fdc019fe1f73965dafc1e035dca18c4eee"},
		{"streamed array", js, "", `[` + strings.Repeat(`"element",`, 1000) + `1]`, nil, "dd95447abd3517381b95f305997ff7a773b549e43ef16b627b804083eaa909ce"},
		{"longest string inline", js, "", `["` + strings.Repeat("x", 128) + `"]`, nil, "6c268df9fd51999679aab3e929d59e9580552a33ef8aeafea93e521c30d197cf"},
		{"shortest string hashed", js, "", `["` + strings.Repeat("x", 129) + `"]`, nil, "97e13e4cdd2ba4662c38a12574277aa4ce194c7dd191618fd22fba036dfdb3c6"},
		{"longest array inline", js, "", `[[` + strings.Repeat("true,", 127) + `true]]`, nil, "f3f28e82ffec8693fea9ed96dbd1da0b3049db52f4685f683b3ec384deae8230"},
		{"shortest array hashed", js, "", `[[` + strings.Repeat("true,", 128) + `true]]`, nil, "a70130286ff1696b6158e6e3a8199e734da9b7c5e3d2f3b51dd7b5c4e8995811"},
		{"longest object inline", js, "", `[{"a":"` + strings.Repeat("x", 123) + `"}]`, nil, "2b4752aa4fa416d39103bd5db2dccd35865cdb1b761b79182edd873b1a5d8900"},
		{"shortest object hashed", js, "", `[{"a":"` + strings.Repeat("x", 124) + `"}]`, nil, "01087d34764d80051456fdbb8d16b713ffe4f3133b0a414e229b0875b13f2925"},
		{"longest number inline", js, "", `[` + strings.Repeat("7", 126) + `]`, nil, "98d82388e39f559d7c9f37be6df6316aca99eef083bb683ac89db5c46f9aca7c"},
		{"shortest number hashed", js, "", `[` + strings.Repeat("7", 127) + `]`, nil, "6fd66e325e602ab13ae7295cf2cad67d4ab7346af710d798c06e87e6a620ab7b"},
		{"wide character over the border", js, "", `["` + strings.Repeat("x", 127) + `€"]`, nil, "3b06583abe25bc777aceecf3351d86f3a217fb0b0b50ae79b1d1d8e1220f79b3"},
		{"whole document excluded", js, "", `{"a":1}`, []string{""}, "5bf2fec258892a03b47247930b250b7bb2054363241307e5584625bd13788674"},
		{"invalid JSON", js, "", `{"a":1,}`, nil, "85fdb0bb8f58999a20b426179d1d6e5438a47651a9927c5f3de5ee2674c04670"},
		{"other JSON type", "application/vnd.api+json", "", `{"a":1}`, nil, "039000f6c834e9f8c7c56651ce8e7000a9ad63faa9d5849b2e5805ec4054ab2c"},
		{"gzip", js, "gzip", "\x1f\x8b\x08\x00", nil, "be26661eafe20d2e65be6a016d2fccd40a137d011475e01f217cdce77f5c0146"},
		{"raw", "text/plain", "", "hello", nil, "5e6a0d670093af1e9408b8771d8fd1bc9786c2911fb583baf1962c53c50591cd"},
		{"form", "application/x-www-form-urlencoded", "", "a=1&b=2", nil, "fb1967c956d0e3d376d15025ecf6ae5fceec2ced72767d91b7e5334526aed9db"},
		{"multipart", "multipart/form-data; boundary=b", "", form, nil, "13de1c4e6262fce18905b7de49759c87bf3fc035dda8e0ef6693f48834423b17"},
		{"multipart without parts", "multipart/form-data; boundary=b", "", "--b--", nil, "b1b7054bf6de8e4ee1852b935046bb492489f3dc0a4eb8977f80e0f374e2cf1b"},
		{"broken multipart", "multipart/form-data; boundary=b", "", "--c--", nil, "1b4e6ec82f39c33bfbfb80f56583582e15173520abe1e67e11e948a81f074539"},
	} {
		req := body.Request{
			Method: "POST", Host: "API.example.com:8443", Path: "/v1/a%20b", RawQuery: "x=1&y",
			ContentType: g.contentType, ContentEncoding: g.coding, Body: strings.NewReader(g.body), Size: int64(len(g.body)),
		}
		if got := fmt.Sprintf("%x", mustSum(t, config(t, g.exclude...), req)); got != g.want {
			t.Errorf("%s: sum %s, must be %s", g.name, got, g.want)
		}
	}
}
