package jsonx_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// TestSameJSON: order, white space, escapes and the way to write a number make no
// difference; everything else does.
func TestSameJSON(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{`{"a":1,"b":2}`, `{"b":2,"a":1}`, true},
		{"{ \"a\" :\n[1 ,2] }", `{"a":[1,2]}`, true},
		{`{"a":{"x":[{"y":1,"z":null}]}}`, `{"a":{"x":[{"z":null,"y":1}]}}`, true},
		{`{"a":"\u00e9\/\n"}`, `{"\u0061":"é/\u000a"}`, true},
		{`[1]`, `[1.0]`, true}, {`[100]`, `[1e2]`, true}, {`[1.50]`, `[0.15E+1]`, true}, {`[0.001]`, `[1e-3]`, true},
		{`[0]`, `[-0.0e99999999999999999999]`, true}, {`[-5]`, `[-50e-1]`, true},
		{`{}`, `{}`, true}, {`{}`, ` { } `, true}, {`[true,false,null,""]`, `[ true, false, null, "" ]`, true},
		{`[1]`, `[-1]`, false}, {`[1]`, `[10]`, false}, {`[1]`, `["1"]`, false}, {`[null]`, `["null"]`, false},
		{`[1e400]`, `[1e401]`, false}, {`[1]`, `[1.00000000000000000001]`, false}, {`[1e99999999999999999999]`, `[1e99999999999999999998]`, false},
		{`[1,2]`, `[2,1]`, false}, {`{"a":1}`, `{"a":1,"b":1}`, false}, {`{"a":"b"}`, `{"b":"a"}`, false},
		{`{"a":{}}`, `{"a":[]}`, false}, {`["a b"]`, `["ab"]`, false}, {`["a\",\"b"]`, `["a","b"]`, false}, {`[[1],2]`, `[[1,2]]`, false},
	} {
		a, b := strings.TrimSpace(c.a), strings.TrimSpace(c.b)
		if jsonx.Same(a, b) != c.same || jsonx.Same(b, a) != c.same {
			t.Errorf("%s and %s", c.a, c.b)
		}
	}
}

// FuzzSameJSON: encoding/json agrees with the scanner on what is JSON, and on what is equal.
func FuzzSameJSON(f *testing.F) {
	f.Add(`{"a":1,"b":[true,null,"\u00e9\\"]}`, `{"b":[true,null,"é\\"],"a":1.0}`)
	f.Add(`{"ext":{"a":"\`, `{"ext":{"a":1e`)
	f.Add(`[[[[[]]]],-0.0e-1]`, `[{"":{"":{}}},1E+2]`)
	f.Fuzz(func(t *testing.T, one, two string) {
		if !wholeValue(one) {
			return
		}
		if !json.Valid([]byte(one)) {
			t.Fatalf("taken: %q", one)
		}
		var v any
		d := json.NewDecoder(strings.NewReader(one))
		d.UseNumber()
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := json.NewEncoder(&out).Encode(v); err != nil {
			t.Fatal(err)
		}
		if canonical := jsonx.Canonical(one); !json.Valid([]byte(canonical)) || !jsonx.Same(one, canonical) {
			t.Fatalf("%q has the canonical form %q", one, canonical)
		}
		if again := strings.TrimSpace(out.String()); !jsonx.Same(one, again) {
			t.Fatalf("%q and %q differ", one, again)
		}
		if !wholeValue(two) || !jsonx.Same(one, two) {
			return
		}
		var a, b any
		if json.Unmarshal([]byte(one), &a) == nil && json.Unmarshal([]byte(two), &b) == nil && !reflect.DeepEqual(a, b) {
			t.Fatalf("%q and %q are the same", one, two)
		}
	})
}

func wholeValue(v string) bool {
	s := jsonx.Scanner{JSON: v}
	_, ok := s.Value()
	return ok && s.At == len(v)
}
