package fingerprint_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
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
		p, err := fingerprint.ParsePointer(pointer)
		if err != nil {
			return
		}
		value, found, err := fingerprint.Lookup(bytes.NewReader(doc), int64(len(doc)), p)
		inMem, foundInMem, errInMem := fingerprint.Lookup(inMemory{bytes.NewReader(doc), doc}, int64(len(doc)), p)
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
			if !errors.Is(err, fingerprint.ErrAmbiguous) && !errors.Is(err, fingerprint.ErrNotScalar) {
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
			if found || err != fingerprint.ErrNotScalar {
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
