package template_test

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// RFC 6901, sections 3 to 5, and what makes a value ambiguous.
func TestPointer(t *testing.T) {
	const rfc = ` { "foo" : [ "bar" , "baz" ] , "":0,"a/b":1,"c%d":2,"e^f":3,"g|h":4,"i\\j":5,"k\"l":6," ":7,"m~n":8,"~1":9,"-":10,"01":11 } `
	for _, c := range []struct {
		doc, pointer, want string
		err                error
	}{
		{rfc, "/foo/0", `"bar"`, nil},
		{rfc, "/foo/1", `"baz"`, nil},
		{rfc, "/", "0", nil},
		{rfc, "/a~1b", "1", nil},
		{rfc, "/c%d", "2", nil},
		{rfc, "/e^f", "3", nil},
		{rfc, "/g|h", "4", nil},
		{rfc, `/i\j`, "5", nil},
		{rfc, `/k"l`, "6", nil},
		{rfc, "/ ", "7", nil},
		{rfc, "/m~0n", "8", nil},
		{rfc, "/~01", "9", nil},
		{rfc, "/-", "10", nil},
		{rfc, "/01", "11", nil},
		{rfc, "/foo", "", template.ErrNotScalar},
		{rfc, "/foo/2", "", template.ErrAbsent},
		{rfc, "/foo/-", "", template.ErrAbsent},
		{rfc, "/foo/00", "", template.ErrAbsent},
		{rfc, "/foo/01", "", template.ErrAbsent},
		{rfc, "/foo/-0", "", template.ErrAbsent},
		{rfc, "/foo/+1", "", template.ErrAbsent},
		{rfc, "/foo/1e0", "", template.ErrAbsent},
		{rfc, "/foo/", "", template.ErrAbsent},
		{rfc, "/foo/99999999999999999999", "", template.ErrAbsent},
		{rfc, "/foo/bar", "", template.ErrAbsent},
		{rfc, "/foo/0/x", "", template.ErrAbsent},
		{rfc, "/fo", "", template.ErrAbsent},
		{rfc, "/Foo/0", "", template.ErrAbsent},
		{`"x"`, "/", "", template.ErrAbsent},
		{`{}`, "/", "", template.ErrAbsent},
		{`[]`, "/0", "", template.ErrAbsent},
		{`[[],{},[{"a":"]}"}],7]`, "/3", "7", nil},
		{`[[],{},[{"a":"]}\""}],7]`, "/2/0/a", `"]}\""`, nil},
		{`{"id":-1.50E+2}`, "/id", "-1.50E+2", nil},
		{`{"id":1e400 }`, "/id", "1e400", nil},
		{`{"id":12345678901234567890}`, "/id", "12345678901234567890", nil},
		{`{"id":0.1000}`, "/id", "0.1000", nil},
		{`{"\u0069d":"\u0041\ud83d\ude00"}`, "/id", `"A😀"`, nil},
		{`{"id":{"x":1}}`, "/id", "", template.ErrNotScalar},
		{`{"id":"a","id":"b"}`, "/id", "", template.ErrAmbiguous},
		{`{"id":"a","id":"a"}`, "/id", "", template.ErrAmbiguous},
		{`{"id":"a","\u0069d":null}`, "/id", "", template.ErrAmbiguous},
		{`{"m":{"id":"a"},"m":{}}`, "/m/id", "", template.ErrAmbiguous},
		// What is not on the way says nothing about the value.
		{`{"x":1,"x":2,"id":"a"}`, "/id", `"a"`, nil},
		{`{"id":"a","n":{"id":"b"}}`, "/id", `"a"`, nil},
		{`{"id":"a"`, "/id", "", template.ErrNotJSON},
		{strings.Repeat("[", 9999) + strings.Repeat("]", 9999), "/0", "", template.ErrNotScalar},
		{strings.Repeat("[", 10001) + strings.Repeat("]", 10001), "/0", "", template.ErrNotJSON},
	} {
		for _, side := range []string{"request", "response"} {
			tmpl := mustParse(t, template.Spec{Method: "POST", URL: "/", ContentType: jsonType, Body: "{" + side + ".json." + c.pointer + "}"})
			src := &template.Source{Status: 200}
			if side == "request" {
				src.Request.Body = []byte(c.doc)
			} else {
				src.Response.Body = []byte(c.doc)
			}
			req, err := tmpl.Fill(src)
			if c.err != nil {
				if reason(t, err) != c.err {
					t.Errorf("%.60s at %s: %v, want %v", c.doc, c.pointer, err, c.err)
				}
			} else if err != nil || string(req.Body) != c.want {
				t.Errorf("%.60s at %s: %s, %v; want %s", c.doc, c.pointer, req.Body, err, c.want)
			}
		}
	}
}
