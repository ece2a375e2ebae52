package body_test

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
)

// Each line: writings of one value. No two lines have the same sum. (Facts,
// section 6: semantic JSON equality; design: big numbers exact.)
var values = [][]string{
	{`{}`, ` { } `, "\t{\n}\r"},
	{`[]`, `[ ]`},
	{`[[]]`}, {`[{}]`}, {`{"":{}}`}, {`{"":[]}`}, {`[[],[]]`}, {`[[[]]]`},
	{`null`, ` null`}, {`true`}, {`false`}, {`[null]`}, {`[true]`}, {`[false]`},
	{`""`}, {`"null"`}, {`[""]`}, {`["",""]`},
	{`1`, `1.0`, `1e0`, `10e-1`, `0.1e1`, `1.000`, `1E+0`, `100E-2`, `0.0001e4`, `1e-0`, `1e+00000000000000000000000000`},
	{`-1`, `-1.0`, `-10e-1`},
	{`0`, `-0`, `0.0`, `0e5`, `-0.00e-7`, `0e99999999999999999999999999`},
	{`"1"`}, {`"0"`}, {`[1]`}, {`[1,1]`}, {`[11]`}, {`["1"]`},
	{`10`, `1e1`, `1.0e1`}, {`100`}, {`0.1`, `1e-1`, `0.10`}, {`0.01`}, {`1.1`, `11e-1`}, {`11`},
	{`12345678901234567890`, `1.234567890123456789e19`, `12345678901234567890.0`},
	{`12345678901234567891`}, {`1234567890123456789`},
	{`0.1000000000000000055511151231257827`},
	{`1e400`, `10e399`, `0.1e401`, `1e0000400`}, {`1e401`}, {`-1e400`}, {`1e-400`, `0.001e-397`},
	{`1e999999999999999999`, `10e999999999999999998`, `0.1e1000000000000000000`},
	{`1e1000000000000000000`, `0.01e1000000000000000002`, `1000e999999999999999997`},
	{`1e-1000000000000000000`, `1000e-1000000000000000003`, `0.1e-999999999999999999`},
	{`1e99999999999999999999999999999999999999`, `100e99999999999999999999999999999999999997`, `0.1e100000000000000000000000000000000000000`},
	{`1e-99999999999999999999999999999999999999`, `0.1e-99999999999999999999999999999999999998`, `10e-100000000000000000000000000000000000000`},
	{`1e9223372036854775807`, `10e9223372036854775806`, `0.1e9223372036854775808`},
	{`1e-9223372036854775808`, `10e-9223372036854775809`},
	{`"A"`, `"\u0041"`}, {`"a"`}, {`"\\u0041"`},
	{`"é"`, `"\u00e9"`, `"\u00E9"`}, {`"e\u0301"`}, // not normalised: other characters
	{`"😀"`, `"\ud83d\ude00"`, `"\uD83D\uDE00"`}, {`"\uffff"`}, {`"\ufffd"`, `"�"`},
	{`"/"`, `"\/"`, `"\u002f"`}, {`"\\"`, `"\u005c"`}, {`"\""`, `"\u0022"`},
	{`"\b\f\n\r\t"`, `"\u0008\u000c\u000a\u000d\u0009"`}, {`"\u0000"`}, {`"\u0000\u0000"`}, {"\"\x7f\""},
	{`{"a":1,"b":2}`, `{"b":2,"a":1}`, "{\n  \"b\" : 2.0,\n  \"\\u0061\" : 1\n}"},
	{`{"a":2,"b":1}`}, {`{"a":1}`}, {`{"a":2}`}, {`{"b":2}`},
	{`{"a":1,"a":2}`}, {`{"a":2,"a":1}`}, {`{"a":1,"a":1}`},
	{`{"a":1,"b":0,"a":2}`, `{"b":0,"a":1,"a":2}`, `{"a":1,"\u0061":2,"b":0}`},
	{`{"a":2,"b":0,"a":1}`},
	{`{"a":null}`}, {`{"a":""}`}, {`{"a":{}}`}, {`{"a":[]}`}, {`{"a":false}`}, {`{"a":0}`},
	{`["a",1]`}, {`[1,"a"]`}, {`["a","1"]`}, {`[["a"],1]`}, {`["a",[1]]`},
	{`[1,2,3]`}, {`[3,2,1]`}, {`[[1,2],3]`}, {`[1,[2,3]]`}, {`[12,3]`}, {`[1,23]`},
	{`{"a":{"b":1,"c":2}}`, `{"a":{"c":2,"b":1}}`}, {`{"a":{"b":1},"c":2}`, `{"c":2,"a":{"b":1}}`},
	{`{"ab":"c"}`}, {`{"a":"bc"}`}, {`{"abc":""}`}, {`{"":"abc"}`}, {`["abc"]`},
	{`{"aa":1,"b":2}`, `{"b":2,"aa":1}`},
	{`{"é":1,"z":2,"😀":3,"\ufffd":4}`, `{"\ufffd":4,"\ud83d\ude00":3,"z":2,"\u00e9":1}`},
}

func TestValues(t *testing.T) {
	seen := map[body.Fingerprint]string{}
	for _, writings := range values {
		sum := jsonSum(t, nil, writings[0])
		if other, ok := seen[sum]; ok {
			t.Errorf("%s and %s have the same sum", writings[0], other)
		}
		seen[sum] = writings[0]
		for _, w := range writings {
			if !asJSON(t, w) {
				t.Errorf("%s is not read as JSON", w)
			}
			if jsonSum(t, nil, w) != sum {
				t.Errorf("%s and %s have different sums", w, writings[0])
			}
			// The same across the seam of two windows.
			for back := range min(len(w)+2, 60) {
				if jsonSum(t, nil, strings.Repeat(" ", window-back)+w) != sum {
					t.Fatalf("%s, %d bytes before the seam: another sum", w, back)
				}
			}
		}
	}
}

// What is not strict JSON is compared byte by byte, without an error.
func TestRawInstead(t *testing.T) {
	for name, doc := range map[string]string{
		"BOM": "\ufeff{}", "trailing garbage": `{} x`, "two values": `{}{}`, "trailing comma": `[1,]`, "trailing comma in an object": `{"a":1,}`,
		"leading comma": `[,1]`, "no comma": `[1 2]`, "no colon": `{"a" 1}`, "no value": `{"a":}`, "number name": `{1:1}`, "open array": `[1`,
		"open object": `{"a":1`, "open string": `"a`, "closed wrongly": `[1}`, "single quotes": `{'a':1}`, "comment": `[1/*x*/]`,
		"leading zero": `01`, "minus zero one": `-01`, "plus": `+1`, "only minus": `-`, "point": `1.`, "leading point": `.5`, "open exponent": `1e`,
		"signed open exponent": `1e+`, "two points": `1.2.3`, "hex": `0x10`, "NaN": `NaN`, "infinity": `Infinity`, "capital": `True`,
		"cut literal": `tru`, "long literal": `nulll`, "control character": "\"\x01\"", "line feed": "\"a\nb\"", "bad escape": `"\x41"`,
		"short escape": `"\u004"`, "escape of no digits": `"\u00g1"`, "lone high": `"\ud83d"`, "lone low": `"\ude00"`, "two high": `"\ud83d\ud83d"`,
		"high and a letter": `"\ud83dx"`, "low before high": `"\ude00\ud83d"`, "lone in a name": `{"\ud800":1}`, "invalid UTF-8": "\"\xff\"",
		"overlong": "\"\xc0\xaf\"", "encoded surrogate": "\"\xed\xa0\x80\"", "cut UTF-8": "\"\xe2\x82\"", "above U+10FFFF": "\"\xf4\x90\x80\x80\"",
		"NUL": "{}\x00", "only NUL": "\x00", "form feed": "{}\f", "no-break space": "{}\u00a0", "white space only": " ", "513 deep": strings.Repeat("[", 513) + strings.Repeat("]", 513),
		"513 objects deep": strings.Repeat(`{"a":`, 513) + "1" + strings.Repeat("}", 513),
		"very deep":        strings.Repeat("[", 1<<20), "number too long": strings.Repeat("1", 32<<10+1),
		"fraction too long": "0." + strings.Repeat("1", 32<<10), "exponent too long": "1e" + strings.Repeat("1", 32<<10),
	} {
		t.Run(name, func(t *testing.T) {
			if asJSON(t, doc) {
				t.Error("read as JSON")
			}
			if jsonSum(t, nil, doc) != jsonSum(t, config(t, "/a"), doc) {
				t.Error("an exclusion changes a raw body's sum")
			}
			if _, found, err := body.Lookup(strings.NewReader(doc), int64(len(doc)), mustPointer(t, "/0/none")); found || err != body.ErrNotJSON {
				t.Errorf("Lookup: %v, %v", found, err)
			}
		})
	}
}

func TestLargeButGood(t *testing.T) {
	for name, doc := range map[string]string{
		"512 deep":    strings.Repeat(`[{"a":`, 256) + "1" + strings.Repeat("}]", 256),
		"long number": strings.Repeat("1", 32<<10), "long string": `"` + strings.Repeat("äx", 100000) + `"`,
		"long name": `{"` + strings.Repeat("n", 100000) + `":1}`, "long array": "[1" + strings.Repeat(",1", 100000) + "]",
		"nested long arrays": strings.Repeat("["+strings.Repeat("1,", 5000), 20) + "1" + strings.Repeat(strings.Repeat(",1", 5000)+"]", 20),
	} {
		if !asJSON(t, doc) {
			t.Errorf("%s is not read as JSON", name)
		}
	}
}

// Strings and containers around the lengths at which their encoding changes:
// all different from each other, all the same in both ways of reading.
func TestLengths(t *testing.T) {
	seen := map[body.Fingerprint]string{}
	for n := range 300 {
		for _, doc := range []string{
			`"` + strings.Repeat("x", n) + `"`,
			`"` + strings.Repeat("x", n) + `é"`,
			`["` + strings.Repeat("x", n) + `"]`,
			`{"` + strings.Repeat("x", n) + `":1}`,
			`[` + strings.Repeat("{},", n) + `[]]`,
			strings.Repeat("1", n+2),
			`[1` + strings.Repeat("7", n) + `]`,
		} {
			sum := jsonSum(t, nil, doc)
			if other, ok := seen[sum]; ok {
				t.Fatalf("%s and %s have the same sum", doc, other)
			}
			seen[sum] = doc
			if !asJSON(t, doc) {
				t.Fatalf("%s is not read as JSON", doc)
			}
		}
	}
	for _, n := range []int{1300, 1365, 1366, 4093, 4094, 4095, 4096, 4097, 4098, 5000, 9000} {
		for _, doc := range []string{
			`"` + strings.Repeat("x", n) + `"`, `[` + strings.Repeat("1,", n) + `2]`, `[` + strings.Repeat("true,", n) + `2]`, `[[` + strings.Repeat("[],", n) + `2]]`,
		} {
			sum := jsonSum(t, nil, doc)
			if other, ok := seen[sum]; ok {
				t.Fatalf("%.20s... (%d) and %.20s... have the same sum", doc, n, other)
			}
			seen[sum] = doc
		}
	}
}

// The order of many members does not count, whatever their names' lengths.
func TestManyMembers(t *testing.T) {
	const n = 3000
	members := make([]string, n)
	for i := range members {
		members[i] = fmt.Sprintf(`"%s%d":{"v":%d,"w":"%s"}`, strings.Repeat("k", i%200), i, i, strings.Repeat("w", i%150))
	}
	forwards := "{" + strings.Join(members, ",") + "}"
	for i := range n / 2 {
		members[i], members[n-1-i] = members[n-1-i], members[i]
	}
	backwards := "{" + strings.Join(members, " , ") + "}"
	if jsonSum(t, nil, forwards) != jsonSum(t, nil, backwards) {
		t.Error("the order of members counts")
	}
	members[7], members[8] = members[8][:len(members[8])-2]+`!"}`, members[7]
	if jsonSum(t, nil, forwards) == jsonSum(t, nil, "{"+strings.Join(members, ",")+"}") {
		t.Error("a changed member does not count")
	}
}

func TestExclude(t *testing.T) {
	for _, c := range []struct {
		pointers []string
		same     []string // all one sum
		other    []string // none of them that sum
	}{
		{[]string{"/id"}, []string{`{"a":1}`, `{"id":1,"a":1}`, `{"a":1,"id":{"x":[1,2,{"id":3}]}}`, `{"id":1,"a":1,"id":2}`, `{"\u0069d":null,"a":1}`},
			[]string{`{"a":1,"ID":1}`, `{"a":1,"x":{"id":1}}`, `{"a":1,"i":1}`, `{"a":1,"idd":1}`, `{"a":2}`, `[{"id":1,"a":1}]`}},
		{[]string{"/params/_meta", "/id"}, []string{`{"params":{}}`, `{"id":7,"params":{"_meta":{"progressToken":3}}}`},
			[]string{`{}`, `{"params":{"meta":1}}`, `{"params":{"x":{"_meta":1}}}`, `{"_meta":1,"params":{}}`}},
		{[]string{"/a/b", "/a/b/c", "/a"}, []string{`{}`, `{"a":{"b":{"c":1}}}`, `{"a":1}`}, []string{`{"b":1}`}},
		{[]string{"/a/b/c", "/a/x"}, []string{`{"a":{"b":{}}}`, `{"a":{"x":1,"b":{"c":2}}}`}, []string{`{"a":{}}`, `{"a":{"b":{"x":1}}}`}},
		{[]string{"/l/1"}, []string{`{"l":[1,2,3]}`, `{"l":[1,{},3]}`}, []string{`{"l":[2,2,3]}`, `{"l":[1,2,4]}`, `{"l":[1,2,3,3]}`}},
		{[]string{"/l/0/t"}, []string{`{"l":[{},{"t":1}]}`, `{"l":[{"t":0},{"t":1}]}`}, []string{`{"l":[{},{}]}`, `{"l":[{},{"t":2}]}`}},
		{[]string{"/0"}, []string{`{"a":1}`, `{"0":1,"a":1}`}, []string{`{"00":1,"a":1}`}},
		{[]string{"/00", "/-", "/-1", "/99999999999999999999"}, []string{`[1,2]`}, []string{`[1]`, `[2]`, `[]`}},
		{[]string{"/a~1b", "/m~0n", "/~01"}, []string{`{}`, `{"a/b":1,"m~n":2,"~1":3}`}, []string{`{"a":{"b":1}}`, `{"/":1}`}},
		{[]string{"/"}, []string{`{}`, `{"":5}`}, []string{`{" ":1}`}},
		{[]string{""}, []string{`{}`, `{"":5}`, `[1]`, `null`, `"x"`}, []string{`{`, `x`}},
		{[]string{"/" + strings.Repeat("k", 200)}, []string{`{}`, `{"` + strings.Repeat("k", 200) + `":1}`}, []string{`{"` + strings.Repeat("k", 201) + `":1}`, `{"k":1}`}},
		{[]string{"/é", "/😀"}, []string{`{}`, `{"\u00e9":1,"\ud83d\ude00":2}`}, []string{`{"e":1}`}},
		{[]string{"/a", "/a"}, []string{`{}`, `{"a":1}`}, nil},
	} {
		cfg := config(t, c.pointers...)
		want := jsonSum(t, cfg, c.same[0])
		for _, doc := range c.same {
			if jsonSum(t, cfg, doc) != want {
				t.Errorf("without %q, %s and %s have different sums", c.pointers, doc, c.same[0])
			}
		}
		for _, doc := range c.other {
			if jsonSum(t, cfg, doc) == want {
				t.Errorf("without %q, %s and %s have the same sum", c.pointers, doc, c.same[0])
			}
		}
	}
	// An exclusion that nothing matches does not change stored sums.
	if jsonSum(t, config(t, "/id"), `{"a":[1]}`) != jsonSum(t, nil, `{"a":[1]}`) {
		t.Error("adding an exclusion changes the sums of bodies without it")
	}
	// An excluded element counts as removed.
	if jsonSum(t, config(t, "/1"), `[1,2,3]`) != jsonSum(t, nil, `[1,3]`) {
		t.Error("an excluded element is not removed")
	}
}

// stream is a body of n times unit between head and tail, made as it is read.
type stream struct {
	head, unit, tail string
	n                int64
}

func (s stream) size() int64 { return int64(len(s.head)+len(s.tail)) + s.n*int64(len(s.unit)) }

func (s stream) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		at, body := off+int64(n), int64(len(s.head))+s.n*int64(len(s.unit))
		var from string
		switch {
		case at < int64(len(s.head)):
			from = s.head[at:]
		case at < body:
			from = s.unit[(at-int64(len(s.head)))%int64(len(s.unit)):]
		case at < s.size():
			from = s.tail[at-body:]
		default:
			return n, io.EOF
		}
		n += copy(p[n:], from)
	}
	return n, nil
}

// Memory does not grow with the body: arrays, strings and small objects stream.
// Only the members of open objects are held, and of them not more than a bound;
// then the body counts as raw.
func TestMemoryIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		s    stream
		json bool
	}{
		"array of objects": {stream{`{"rows":[`, `{"id":1,"name":"somebody","tags":["a","b"]},`, `{}]}`, 400000}, true},
		"string":           {stream{`["`, "0123456789\\n", `"]`, 1 << 20}, true},
		"deep arrays":      {stream{strings.Repeat("[1,", 400), `"x",`, "1" + strings.Repeat("]", 400), 1 << 20}, true},
		"one object":       {stream{`{`, `"a":1,`, `"b":2}`, 4 << 20}, false},
		"raw":              {stream{`[`, `{,,,}`, `]`, 1 << 20}, false},
	} {
		t.Run(name, func(t *testing.T) {
			req := request("application/json", nil)
			req.Body, req.Size = c.s, c.s.size()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			sum := mustSum(t, nil, req)
			runtime.ReadMemStats(&after)
			bound := uint64(2 << 20)
			if name == "one object" {
				bound = 160 << 20 // the growth of a slice up to 16 MiB, all steps added
			}
			if used := after.TotalAlloc - before.TotalAlloc; used > bound {
				t.Errorf("%d bytes allocated for a body of %d", used, req.Size)
			}
			c.s.head = " " + c.s.head
			req.Body, req.Size = c.s, c.s.size()
			if got := mustSum(t, nil, req) == sum; got != c.json {
				t.Errorf("read as JSON: %v", got)
			}
		})
	}
}
