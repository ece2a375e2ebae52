package template_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// A template that is wrong is found when the configuration is read, and the error says
// where and what would be right.
func TestParseRefuses(t *testing.T) {
	get := func(url string) template.Spec { return template.Spec{Method: "POST", URL: url} }
	body := func(contentType, body string) template.Spec {
		return template.Spec{Method: "POST", URL: "/x", ContentType: contentType, Body: body}
	}
	header := func(fields ...template.Field) template.Spec {
		return template.Spec{Method: "POST", URL: "/x", Header: fields}
	}
	for _, c := range []struct {
		spec   template.Spec
		field  string
		offset int
		want   string
	}{
		// Method, scheme and host hold no placeholder.
		{template.Spec{Method: "{response.header.M}", URL: "/"}, "method", 0, "no placeholder"},
		{template.Spec{Method: "post", URL: "/"}, "method", 0, "capital letters"},
		{template.Spec{Method: "", URL: "/"}, "method", 0, "capital letters"},
		{template.Spec{Method: "PO ST", URL: "/"}, "method", 0, "capital letters"},
		{template.Spec{Method: "CONNECT", URL: "/"}, "method", 0, "DELETE"},
		{get("{response.header.Location}"), "url", 0, "scheme and host"},
		{get("{request.query.s}://h/"), "url", 0, "scheme and host"},
		{get("https://{request.query.h}/"), "url", 8, "host and port"},
		{get("https://h:{request.query.h}/"), "url", 10, "host and port"},
		{get("https://h{{}}/"), "url", 9, "host and port"},
		{get(""), "url", 0, "begin with /"},
		{get("v1/refunds"), "url", 0, "begin with /"},
		{get("ftp://h/"), "url", 0, "begin with /"},
		{get("javascript:x"), "url", 0, "begin with /"},
		{get("//evil.example/"), "url", 0, "two slashes"},
		{get("https://h//x"), "url", 9, "two slashes"},
		{get("https://h"), "url", 9, "slash after the host"},
		{get("https://h?x=1"), "url", 9, "slash after the host"},
		{get("https:///x"), "url", 8, "host is missing"},
		{get("https://:443/x"), "url", 8, "host is missing"},
		{get("https://u:p@h/"), "url", 8, "user or a password"},
		{get(`https://h\@evil/`), "url", 8, "user or a password"},
		{get(`https://h\evil/`), "url", 9, "punycode"},
		{get("https://h%2eb/"), "url", 9, "punycode"},
		{get("https://zoë.example/"), "url", 10, "punycode"},
		{get("https://h:0/"), "url", 10, "65535"},
		{get("https://h:65536/"), "url", 10, "65535"},
		{get("https://h:/"), "url", 10, "65535"},
		{get("https://[::1%25eth0]/"), "url", 8, "brackets"},
		{get("https://[1.2.3.4]/"), "url", 8, "brackets"},
		{get("https://[::1/"), "url", 8, "brackets"},
		// Path and query.
		{get("/x#y"), "url", 2, "fragment"},
		{get("/x?y#z"), "url", 4, "fragment"},
		{get("/a b"), "url", 2, "%20"},
		{get("/a\x00"), "url", 2, "%00"},
		{get(`/a\b`), "url", 2, "%5C"},
		{get("/é"), "url", 1, "%C3"},
		{get("/{{x}}"), "url", 1, "%7B"},
		{get("/%2"), "url", 1, "%25"},
		{get("/%2{execution.id}"), "url", 1, "%25"},
		{get("/%zz"), "url", 1, "%25"},
		{get("/a/../b"), "url", 0, `".."`},
		{get("/a/%2E./{execution.id}"), "url", 0, `"%2E."`},
		{get("/./b"), "url", 0, `"."`},
		{get("/v1{request.path}"), "url", 3, "{request.path.N}"},
		{get("/x?{execution.id}=1"), "url", 3, "name={execution.id}"},
		{get("/x?a=1&b{execution.id}=1"), "url", 8, "name={execution.id}"},
		{get("/x?a={execution.id}&{rollback.id}"), "url", 20, "name={rollback.id}"},
		{get("/x?a=1;b=2"), "url", 6, "%3B"},
		{get("https://h/x?a[]=1"), "url", 13, "%5B"},
		// Placeholders.
		{get("/{}"), "url", 1, "unknown"},
		{get("/{http.request.uri}"), "url", 1, "unknown; there are request.path, "},
		{get("/{request.method}"), "url", 1, "unknown"},
		{get("/{Request.Path.0}"), "url", 1, "unknown"},
		{get("/{ execution.id }"), "url", 1, "unknown"},
		{get("/{env.HOME}"), "url", 1, "unknown"},
		{get("/{response.json}"), "url", 1, "{response.json./id}"},
		{get("/{response.json.id}"), "url", 1, "begin it with a slash"},
		{get("/{response.json.}"), "url", 1, "begin it with a slash"},
		{get("/{response.json./a~2}"), "url", 1, "'~'"},
		{get("/{request.path.-1}"), "url", 1, "count from 0"},
		{get("/{request.path.01}"), "url", 1, "count from 0"},
		{get("/{request.path.x}"), "url", 1, "count from 0"},
		{get("/{request.path.99999999999999999999}"), "url", 1, "count from 0"},
		{get("/{request.query.}"), "url", 1, "name is missing"},
		{get("/{request.header.}"), "url", 1, "no name of a header field"},
		{get("/{request.header.A B}"), "url", 1, "no name of a header field"},
		{get("/{execution.id"), "url", 1, "not closed"},
		{get("/{execution.id{rollback.id}}"), "url", 1, "not closed"},
		{get("/execution.id}"), "url", 13, "closes nothing"},
		// Credentials go by undo_auth alone.
		{header(template.Field{"Authorization", "{request.header.authorization}"}), "header Authorization", 0, "undo_auth"},
		{get("https://other.example/?k={request.header.X-API-KEY}"), "url", 25, "undo_auth"},
		{body(jsonType, `"{request.header.Cookie}"`), "body", 1, "undo_auth"},
		// Header fields.
		{header(template.Field{"X-{execution.id}", "v"}), "header X-{execution.id}", 0, "no placeholder"},
		{header(template.Field{"X Y", "v"}), "header X Y", 0, "no name"},
		{header(template.Field{"host", "h"}), "header host", 0, "belongs to the connection"},
		{header(template.Field{"Content-Length", "1"}), "header Content-Length", 0, "belongs to the connection"},
		{header(template.Field{"content-type", "a/b"}), "header content-type", 0, "setting of its own"},
		{header(template.Field{"X-A", "1"}, template.Field{"x-a", "2"}), "header x-a", 0, "twice"},
		{header(template.Field{"X-A", "1\r\nX-B: 2"}), "header X-A", 1, "control characters"},
		{header(template.Field{"X-A", "{{}}{execution.id}\x00"}), "header X-A", 18, "control characters"},
		{header(template.Field{"X-A", " {execution.id}"}), "header X-A", 0, "space"},
		// Bodies.
		{body("", "x"), "content_type", 0, "no type"},
		{body(jsonType, ""), "content_type", 0, "no body"},
		{body("json", "{{}}"), "content_type", 0, "no media type"},
		{body("application/{execution.id}", "x"), "content_type", 12, "no placeholder"},
		{body("application/json; charset=latin1", "1"), "content_type", 0, "leave charset away"},
		{body("text/plain; a=\"\r\n\"", "1"), "content_type", 0, "no media type"},
		{template.Spec{Method: "GET", URL: "/", ContentType: jsonType, Body: "1"}, "content_type", 0, "GET has no body"},
		{body("text/plain", "undo {execution.id}"), "body", 5, "only JSON and form bodies"},
		{body(jsonType, `{"a":1}`), "body", 0, "write {{ for a brace"},
		{body(jsonType, `{"a":{execution.id}}`), "body", 0, "not closed"},
		{body(jsonType, `{{"a":{execution.id}`), "body", 6, "unexpected end"},
		{body(jsonType, `{{"a":1{execution.id}}}`), "body", 7, "after object key:value pair"},
		{body(jsonType, `{{"a":{execution.id}0}}`), "body", 20, "after object key:value pair"},
		{body(jsonType, `{{"a":-{response.status}}}`), "body", 7, "in numeric literal"},
		{body(jsonType, `{{"a":{execution.id}{rollback.id}}}`), "body", 20, "after object key:value pair"},
		{body(jsonType, `{{"a":"\{execution.id}"}}`), "body", 8, "in string escape"},
		{body(jsonType, `{{"a":"\u00{execution.id}"}}`), "body", 11, "escape"},
		{body(jsonType, `{{"{execution.id}":1}}`), "body", 3, "name of a JSON member"},
		{body(jsonType, `{{"a":1,"b{execution.id}c" : 1}}`), "body", 10, "name of a JSON member"},
		{body(jsonType, `{{{execution.id}:1}}`), "body", 2, "object key string"},
		{body(jsonType, `{{"a":{{"b":1,"b":{execution.id}}}}}`), "body", 14, `"b" occurs twice`},
		{body(jsonType, `{{"a":1,"\u0061":2}}`), "body", 8, `"a" occurs twice`},
		{body(jsonType, `[{{"a":{{"b":1}},"c":[{execution.id},{{"b":"b"}}],"b":2, "c":3}}]`), "body", 57, `"c" occurs twice`},
		{body(jsonType, `["\ud800"]`), "body", 2, "surrogate"},
		{body(jsonType, `["\ud83d{execution.id}\ude00"]`), "body", 2, "surrogate"},
		{body(jsonType, "\"\xff\""), "body", 1, "UTF-8"},
		{body(jsonType, `1 2`), "body", 2, "after top-level value"},
		{body("application/vnd.api+json", `nope`), "body", 1, "no JSON"},
		{body(formType, `a={execution.id}&{rollback.id}=1`), "body", 17, "name={rollback.id}"},
		{body(formType, "a=b\n"), "body", 3, "%0A"},
		{body(formType, "a=b c"), "body", 3, "%20"},
		{body("text/plain", strings.Repeat("x", template.MaxRequest)), "template", 0, "64 KiB"},
	} {
		_, err := template.Parse(c.spec)
		var parse *template.ParseError
		if !errors.As(err, &parse) {
			t.Errorf("%.200v: %v", c.spec, err)
			continue
		}
		if parse.Field != c.field || !strings.Contains(parse.Problem, c.want) {
			t.Errorf("%v: %v; want %s and %q", c.spec, err, c.field, c.want)
		}
		if parse.Offset != c.offset {
			t.Errorf("%v: %v; want offset %d", c.spec, err, c.offset)
		}
	}
}

// The text of an error says where, what, and what would be right.
func TestParseErrorText(t *testing.T) {
	_, err := template.Parse(template.Spec{Method: "DELETE", URL: "https://h/v1{request.path}"})
	if want := "url, at byte 12: {request.path} is more than one segment; write the path out with {request.path.N} in it"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// What looks odd and is right.
func TestParseAccepts(t *testing.T) {
	for _, spec := range []template.Spec{
		{Method: "DELETE", URL: "/"},
		{Method: "GET", URL: "https://[::1]:8443/status?id={rollback.id}"},
		{Method: "M-SEARCH", URL: "http://a_b.example:80/x//y/"},
		{Method: "POST", URL: "/orders({request.path.1})/{execution.id}:cancel;v=1?flag&&x=/?{workflow.id}"},
		{Method: "POST", URL: "/a%2Fb/...", ContentType: "text/plain", Body: "{{x}}"},
		{Method: "POST", URL: "/", ContentType: "Application/JSON; charset=UTF-8", Body: " {response.status} "},
		{Method: "POST", URL: "/", ContentType: jsonType, Body: `{{"a":{{"b":[{{"b":1}},{{"b":2}}]}},"b":["b","b"],"":"\\","c\":":"{execution.id}"}}`},
		{Method: "POST", URL: "/", ContentType: jsonType, Body: `{{"a":{response.json./id}}}`},
		{Method: "POST", URL: "/", ContentType: formType, Body: `a%5B%5D={execution.id}&b=+&c`},
		{Method: "POST", URL: "/", Header: []template.Field{{"X-A", ""}, {"If-Match", "{response.header.ETag}"}}},
	} {
		if _, err := template.Parse(spec); err != nil {
			t.Errorf("%v: %v", spec, err)
		}
	}
}

// The checkpoint records what the template reads and no more (P8).
func TestNeeds(t *testing.T) {
	for _, c := range []struct {
		spec     template.Spec
		want     template.Needs
		response bool
	}{
		{template.Spec{Method: "DELETE", URL: "/{execution.id}/{workflow.id}/{rollback.id}/{checkpoint.id}"}, template.Needs{}, false},
		{template.Spec{Method: "DELETE", URL: "/{request.path.1}"}, template.Needs{Path: true}, false},
		{template.Spec{Method: "DELETE", URL: "/?x={request.path}"}, template.Needs{Path: true}, false},
		{template.Spec{Method: "DELETE", URL: "/{response.status}"}, template.Needs{Status: true}, true},
		{template.Spec{Method: "DELETE", URL: "/", Header: []template.Field{{"If-Match", "{response.header.etag}"}}}, template.Needs{ResponseHeader: []string{"Etag"}}, true},
		{template.Spec{
			Method: "POST", URL: "/{response.json./b}?x={request.query.q}&y={request.query.p}&z={request.query.q}", ContentType: jsonType,
			Body: `["{response.json./b}",{response.json./a},{request.json./c},{request.header.x-a},{request.header.X-A}]`,
		}, template.Needs{
			Query: []string{"p", "q"}, RequestHeader: []string{"X-A"}, RequestBody: []string{"/c"}, ResponseBody: []string{"/a", "/b"},
		}, true},
	} {
		got := mustParse(t, c.spec).Needs()
		if !reflect.DeepEqual(got, c.want) || got.Response() != c.response {
			t.Errorf("%v: %+v, %v", c.spec, got, got.Response())
		}
	}
}

// Bodies out of names and values are what they would be written by hand, whatever the
// text in them is.
func TestFields(t *testing.T) {
	fields := []template.Field{
		{Name: "charge", Value: "{response.json./id}"},
		{Name: "amount", Value: "{request.json./amount}"},
		{Name: "note \"&=\"", Value: "a=\"{{b}}\"&\\\n é {response.status}%"},
		{Name: "by", Value: "{rollback.id}{checkpoint.id}"},
		{Name: "empty"},
	}
	for _, c := range []struct {
		contentType string
		write       func([]template.Field) (string, error)
		want, none  string
	}{
		{jsonType, template.JSONObject, `{"charge":"ch_7","amount":12345678901234567890,"note \"&=\"":"a=\"{b}\"&\\\n é 201%","by":"rb-1cp-1","empty":""}`, "{{}}"},
		{formType, template.Form, `charge=ch_7&amount=12345678901234567890&note%20%22%26%3D%22=a%3D%22%7Bb%7D%22%26%5C%0A%20%C3%A9%20201%25&by=rb-1cp-1&empty=`, ""},
	} {
		body, err := c.write(fields)
		if err != nil {
			t.Fatal(err)
		}
		tmpl := mustParse(t, template.Spec{Method: "POST", URL: "/", ContentType: c.contentType, Body: body})
		if got := string(mustFill(t, tmpl, charge()).Body); got != c.want {
			t.Errorf("%s\nwant\n%s", got, c.want)
		}
		if none, err := c.write(nil); err != nil || none != c.none {
			t.Errorf("no fields: %q, %v", none, err)
		}
		for _, bad := range []template.Field{
			{Name: "{execution.id}", Value: "x"}, {Name: "x{{", Value: "x"}, {Name: "\xff", Value: "x"}, {Name: "x", Value: "\xff"},
			{Name: "x", Value: "{response.body./id}"}, {Name: "x", Value: "{"},
		} {
			var parse *template.ParseError
			if body, err := c.write([]template.Field{bad}); !errors.As(err, &parse) || body != "" {
				t.Errorf("%q: %q, %v", bad, body, err)
			}
		}
	}
}

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
