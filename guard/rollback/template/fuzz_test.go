package template_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// FuzzFill: whatever a template is and whatever was recorded, the request has the
// method, the scheme, the host, the number of segments, the names in query, form and
// header, and the shape of a JSON body that the same template has with plain values.
func FuzzFill(f *testing.F) {
	for _, s := range []struct{ method, url, header, contentType, body string }{
		{"DELETE", "/v1/{request.path.1}/x{response.json./id}?a={request.query.q}&b=1", "{response.header.ETag}", "", ""},
		{"POST", "https://[::1]:8443/%2e{execution.id}", "a {workflow.id}{{", jsonType, `{{"a":"{response.json./id}\n","b":[{response.json./n},{response.status}]}}`},
		{"POST", "http://h/{rollback.id}:{checkpoint.id}", "", formType, "a={request.json./to/0}&b={request.path}&c"},
		{"GET", "/?{", "}", "text/plain", "{{x}}"},
		{"PUT", "/a/{request.header.X-A}", "{request.json./}", "a/b+json", `"{request.json./~01}"`},
	} {
		for _, h := range hostile {
			f.Add(s.method, s.url, s.header, s.contentType, s.body, h.value, uint8(len(h.value)))
		}
	}
	f.Fuzz(func(t *testing.T, method, target, header, contentType, body, value string, form uint8) {
		spec := template.Spec{Method: method, URL: target, ContentType: contentType, Body: body}
		if header != "" {
			spec.Header = []template.Field{{"X-Copy", header}}
		}
		tmpl, err := template.Parse(spec)
		if err != nil {
			var parse *template.ParseError
			text := map[string]string{"method": method, "url": target, "header X-Copy": header, "content_type": contentType, "body": body}
			if !errors.As(err, &parse) || parse.Offset < 0 || parse.Offset > len(text[parse.Field]) {
				t.Fatal(err)
			}
			return
		}
		plain, err := tmpl.Fill(answering(tmpl.Needs(), "x", 0))
		if err != nil {
			// Only a pointer through another's scalar has no plain value, and what is
			// too large.
			if !errors.Is(err, template.ErrAbsent) && !errors.Is(err, template.ErrNotScalar) && !errors.Is(err, template.ErrTooLarge) {
				t.Fatal(err)
			}
			return
		}
		src := answering(tmpl.Needs(), value, form)
		req, err := tmpl.Fill(src)
		if err != nil {
			var fill *template.FillError
			if !errors.As(err, &fill) || fill.Placeholder == "" || fill.Place == "" {
				t.Fatal(err)
			}
			return
		}
		if again, err := tmpl.Fill(src); err != nil || again.URL != req.URL || !bytes.Equal(again.Body, req.Body) {
			t.Errorf("not the same again: %+v, %v", again, err)
		}
		if got, want := shapeOf(t, req), shapeOf(t, plain); got != want {
			t.Errorf("%q in %v:\n%s\nwas\n%s", value, spec, got, want)
		}
		if !strings.HasPrefix(req.URL, tmpl.Origin()+"/") {
			t.Errorf("%s does not go to %s", req.URL, tmpl.Origin())
		}
	})
}

// answering is a source with value wherever the template looks.
func answering(needs template.Needs, value string, form uint8) *template.Source {
	leaf := any(value)
	switch form % 4 {
	case 1:
		if json.Valid([]byte(value)) && !strings.ContainsAny(value, "{[") {
			leaf = json.RawMessage(value)
		}
	case 2:
		leaf = form&4 == 0
	}
	src := &template.Source{
		Path: strings.Repeat("/"+url.PathEscape(value), 20), Status: 200 + int(form),
		ExecutionID: value, WorkflowID: value, RollbackID: value, CheckpointID: value,
	}
	query := make(url.Values)
	for _, name := range needs.Query {
		query.Set(name, value)
	}
	src.Query = query.Encode()
	message := func(fields, pointers []string) template.Message {
		m := template.Message{Header: make(http.Header)}
		for _, name := range fields {
			m.Header[name] = []string{value}
		}
		doc := make(map[string]any)
		for _, pointer := range pointers {
			plant(doc, strings.Split(pointer, "/")[1:], leaf)
		}
		m.Body, _ = json.Marshal(doc)
		return m
	}
	src.Request = message(needs.RequestHeader, needs.RequestBody)
	src.Response = message(needs.ResponseHeader, needs.ResponseBody)
	return src
}

// plant puts leaf where a pointer leads.
func plant(doc map[string]any, tokens []string, leaf any) {
	name := strings.ReplaceAll(strings.ReplaceAll(tokens[0], "~1", "/"), "~0", "~")
	if len(tokens) == 1 {
		doc[name] = leaf
		return
	}
	inner, ok := doc[name].(map[string]any)
	if !ok {
		inner = make(map[string]any)
		doc[name] = inner
	}
	plant(inner, tokens[1:], leaf)
}

// shapeOf is all of a request that no value may change.
func shapeOf(t *testing.T, req template.Request) string {
	t.Helper()
	sent, err := http.NewRequest(req.Method, req.URL, bytes.NewReader(req.Body))
	if err != nil {
		t.Fatalf("%q: %v", req.URL, err)
	}
	for segment := range strings.SplitSeq(sent.URL.EscapedPath(), "/") {
		if plain, err := url.PathUnescape(segment); err != nil || plain == "." || plain == ".." {
			t.Errorf("%q would be resolved", req.URL)
		}
	}
	var b strings.Builder
	fmt.Fprintln(&b, req.Method, sent.URL.Scheme, sent.URL.Host, sent.URL.User, sent.URL.Fragment, strings.Count(sent.URL.EscapedPath(), "/"), strings.Count(sent.URL.Path, "/"))
	fmt.Fprintln(&b, names(t, sent.URL.RawQuery), slices.Sorted(maps.Keys(req.Header)), req.Header["Content-Type"])
	for _, values := range req.Header {
		if len(values) != 1 || strings.ContainsAny(values[0], "\r\n\x00") {
			t.Errorf("%q", req.Header)
		}
	}
	if len(req.Body) > 0 && req.Header.Get("Content-Type") == formType {
		fmt.Fprintln(&b, names(t, string(req.Body)))
	} else if media := req.Header.Get("Content-Type"); media == jsonType || strings.HasSuffix(media, "+json") {
		d := json.NewDecoder(bytes.NewReader(req.Body))
		d.UseNumber()
		var doc any
		if err := d.Decode(&doc); err != nil || !json.Valid(req.Body) {
			t.Fatalf("%s: %v", req.Body, err)
		}
		fmt.Fprintln(&b, erase(doc))
	}
	return b.String()
}

// names are those of a query, each as often as it comes.
func names(t *testing.T, query string) string {
	t.Helper()
	values, err := url.ParseQuery(query)
	if err != nil {
		t.Fatalf("%q: %v", query, err)
	}
	counts := make(map[string]int)
	for name, all := range values {
		counts[name] = len(all)
	}
	return fmt.Sprintf("%#v", counts)
}

// erase takes the scalars out of a document.
func erase(doc any) any {
	switch doc := doc.(type) {
	case map[string]any:
		for name := range doc {
			doc[name] = erase(doc[name])
		}
		return doc
	case []any:
		for i := range doc {
			doc[i] = erase(doc[i])
		}
		return doc
	}
	return "scalar"
}

// FuzzPointer: whatever a body is, a value in it is the one that encoding/json reads
// there, and a body that it refuses has none.
func FuzzPointer(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"b":"c"}],"":null}`), "/a/1/b")
	f.Add([]byte(`{"a":"\ud83d\ude00","a":1}`), "/a")
	f.Add([]byte(`[true,1e400,"\\u"]`), "/2")
	f.Add([]byte(` {"~":{"/":0.10}} `), "/~0/~1")
	f.Fuzz(func(t *testing.T, body []byte, pointer string) {
		tmpl, err := template.Parse(template.Spec{Method: "POST", URL: "/", ContentType: jsonType, Body: "{response.json." + pointer + "}"})
		if err != nil {
			return
		}
		req, err := tmpl.Fill(&template.Source{Status: 200, Response: template.Message{Body: body}})
		d := json.NewDecoder(bytes.NewReader(body))
		d.UseNumber()
		var doc any
		if d.Decode(&doc) != nil || d.More() {
			if err == nil {
				t.Fatalf("%q has %q", body, req.Body)
			}
			return
		}
		if err != nil {
			return
		}
		want := doc
		for _, token := range strings.Split(pointer, "/")[1:] {
			switch in := want.(type) {
			case map[string]any:
				want = in[strings.ReplaceAll(strings.ReplaceAll(token, "~1", "/"), "~0", "~")]
			case []any:
				var i int
				if _, err := fmt.Sscan(token, &i); err != nil || i >= len(in) {
					t.Fatalf("%s of %q", pointer, body)
				}
				want = in[i]
			}
		}
		g := json.NewDecoder(bytes.NewReader(req.Body))
		g.UseNumber()
		var got any
		if err := g.Decode(&got); err != nil || got != want {
			t.Errorf("%s of %q: %q, want %v", pointer, body, req.Body, want)
		}
	})
}
