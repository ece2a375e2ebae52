package fingerprint_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

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
		{rfc, "/foo", "", false, fingerprint.ErrNotScalar},
		{rfc, "", "", false, fingerprint.ErrNotScalar},
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
		{`{"id":true}`, "/id", "", false, fingerprint.ErrNotScalar},
		{`{"id":false}`, "/id", "", false, fingerprint.ErrNotScalar},
		{`{"id":{"x":1}}`, "/id", "", false, fingerprint.ErrNotScalar},
		{`{"id":"a","id":"b"}`, "/id", "", false, fingerprint.ErrAmbiguous},
		{`{"id":"a","id":"a"}`, "/id", "", false, fingerprint.ErrAmbiguous},
		{`{"id":"a","\u0069d":null}`, "/id", "", false, fingerprint.ErrAmbiguous},
		{`{"m":{"id":"a"},"m":{}}`, "/m/id", "", false, fingerprint.ErrAmbiguous},
		{`{"x":1,"x":2,"id":"a"}`, "/id", "a", true, nil},
		{`{"id":"a","n":{"id":"b"}}`, "/id", "a", true, nil},
		{`{"id":"a"`, "/id", "", false, fingerprint.ErrNotJSON},
		{`{"id":"a"} x`, "/id", "", false, fingerprint.ErrNotJSON},
		{"{\"id\":\"a\",\"x\":\"\xff\"}", "/id", "", false, fingerprint.ErrNotJSON},
		{``, "/id", "", false, nil},
		{`{"id":"` + long[:65536] + `"}`, "/id", long[:65536], true, nil},
		{`{"id":"` + long[:65537] + `"}`, "/id", "", false, fingerprint.ErrValueTooLong},
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
			for _, body := range []interface {
				ReadAt([]byte, int64) (int, error)
			}{bytes.NewReader(doc), inMemory{bytes.NewReader(doc), doc}} {
				v, found, err := fingerprint.Lookup(body, int64(len(doc)), p)
				if v != c.want || found != c.found || err != c.err {
					t.Errorf("%.60s at %.20q: %.20q, %v, %v; want %.20q, %v, %v", c.doc, c.pointer, v, found, err, c.want, c.found, c.err)
				}
			}
		}
	}
}
