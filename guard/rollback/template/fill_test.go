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

const (
	jsonType = "application/json"
	formType = "application/x-www-form-urlencoded"
)

func mustParse(t testing.TB, spec template.Spec) *template.Template {
	t.Helper()
	tmpl, err := template.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

func mustFill(t testing.TB, tmpl *template.Template, src *template.Source) template.Request {
	t.Helper()
	req, err := tmpl.Fill(src)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// charge is a call that was made and answered.
func charge() *template.Source {
	return &template.Source{
		Path: "/v1/customers/c%207/charges", Query: "currency=eur&note=a%26b+c&tag=1&tag=2&empty=",
		Request: template.Message{
			Header:      http.Header{"X-Tenant": {"acme"}, "X-Many": {"a", "b"}, "X-Empty": {""}},
			ContentType: "application/json; charset=utf-8",
			Body:        []byte(`{"amount":12345678901234567890,"to":{"name":"Zoë \"Z\""},"live":true}`),
		},
		Status: 201,
		Response: template.Message{
			Header:      http.Header{"Etag": {`"v1"`}, "Location": {"/v1/charges/ch_7"}},
			ContentType: "application/vnd.api+json",
			Body:        []byte(`{"id":"ch_7","fee":1e400,"seq":7,"void":false,"gone":null,"lines":[{"id":"l0"},{"id":"l1"}]}`),
		},
		ExecutionID: "exec-1", WorkflowID: "wf-1", RollbackID: "rb-1", CheckpointID: "cp-1",
	}
}

// with puts a value where {response.header.X-Value} finds it.
func with(value string) *template.Source {
	src := charge()
	src.Response.Header["X-Value"] = []string{value}
	return src
}

// reason is the sentinel in a FillError.
func reason(t *testing.T, err error) error {
	t.Helper()
	var fill *template.FillError
	if err == nil || !errors.As(err, &fill) {
		t.Fatalf("%v is no *FillError", err)
	}
	return fill.Err
}

// Each placeholder gives what was recorded: numbers digit by digit, everything else as
// it was, decoded.
func TestFillReads(t *testing.T) {
	for name, want := range map[string]string{
		"request.path":              `"/v1/customers/c%207/charges"`,
		"request.path.0":            `"v1"`,
		"request.path.2":            `"c 7"`,
		"request.query.currency":    `"eur"`,
		"request.query.note":        `"a&b c"`,
		"request.query.empty":       `""`,
		"request.header.x-tenant":   `"acme"`,
		"request.header.X-Empty":    `""`,
		"request.json./amount":      `12345678901234567890`,
		"request.json./to/name":     `"Zoë \"Z\""`,
		"request.json./live":        `true`,
		"response.status":           `201`,
		"response.header.ETag":      `"\"v1\""`,
		"response.json./id":         `"ch_7"`,
		"response.json./fee":        `1e400`,
		"response.json./void":       `false`,
		"response.json./lines/1/id": `"l1"`,
		"execution.id":              `"exec-1"`,
		"workflow.id":               `"wf-1"`,
		"rollback.id":               `"rb-1"`,
		"checkpoint.id":             `"cp-1"`,
	} {
		tmpl := mustParse(t, template.Spec{Method: "POST", URL: "/", ContentType: jsonType, Body: "[{" + name + "}]"})
		if got := string(mustFill(t, tmpl, charge()).Body); got != "["+want+"]" {
			t.Errorf("{%s}: %s, want [%s]", name, got, want)
		}
	}
}

// A value that is not there, not one, or not a scalar is an error that names the
// placeholder.
func TestFillMisses(t *testing.T) {
	for name, want := range map[string]error{
		"request.path.4":            template.ErrAbsent,
		"request.query.none":        template.ErrAbsent,
		"request.query.tag":         template.ErrAmbiguous,
		"request.header.None":       template.ErrAbsent,
		"request.header.X-Many":     template.ErrAmbiguous,
		"request.json./to":          template.ErrNotScalar,
		"request.json./none":        template.ErrAbsent,
		"response.json./lines":      template.ErrNotScalar,
		"response.json./lines/0":    template.ErrNotScalar,
		"response.json./lines/2/id": template.ErrAbsent,
		"response.json./gone":       template.ErrAbsent,
		"response.json./gone/x":     template.ErrAbsent,
		"response.json./id/0":       template.ErrAbsent,
	} {
		tmpl := mustParse(t, template.Spec{Method: "POST", URL: "/?q={" + name + "}"})
		_, err := tmpl.Fill(charge())
		var fill *template.FillError
		if !errors.As(err, &fill) || !errors.Is(err, want) || fill.Placeholder != name || fill.Place != "a value of a query or form" {
			t.Errorf("{%s}: %v, want %v", name, err, want)
		}
	}
	for _, name := range []string{"execution.id", "workflow.id", "rollback.id", "checkpoint.id", "request.path", "request.path.0", "request.json./a", "response.status", "response.header.ETag", "response.json./id"} {
		src := charge()
		src.Status, src.Path, src.Request.Body = 0, "", nil
		src.ExecutionID, src.WorkflowID, src.RollbackID, src.CheckpointID = "", "", "", ""
		_, err := mustParse(t, template.Spec{Method: "POST", URL: "/?q={" + name + "}"}).Fill(src)
		if reason(t, err) != template.ErrAbsent {
			t.Errorf("{%s} of nothing: %v", name, err)
		}
	}
}

// What was recorded may be malformed.
func TestFillMalformed(t *testing.T) {
	for _, c := range []struct {
		url  string
		edit func(*template.Source)
		want error
	}{
		{"/{request.path.0}", func(s *template.Source) { s.Path = "/%zz" }, template.ErrMalformed},
		{"/{request.path.0}", func(s *template.Source) { s.Path = "*" }, template.ErrAbsent},
		{"/{request.query.a}", func(s *template.Source) { s.Query = "a=1&b=%z" }, template.ErrMalformed},
		{"/{request.query.a}", func(s *template.Source) { s.Query = "a=1;a=2" }, template.ErrMalformed},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = nil }, template.ErrAbsent},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = []byte(" ") }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = []byte(`{"id":1}{}`) }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = []byte("{\"id\":\"a\xff\"}") }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = []byte(`{"id":"\ud800"}`) }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = []byte(`{"id":"\ud83dx\ude00"}`) }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.Body = []byte(`{"id":"\udc00\ud83d"}`) }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.ContentType = "text/html" }, template.ErrNotJSON},
		{"/{response.json./id}", func(s *template.Source) { s.Response.ContentType = "?" }, template.ErrNotJSON},
	} {
		src := charge()
		c.edit(src)
		if _, err := mustParse(t, template.Spec{Method: "POST", URL: c.url}).Fill(src); reason(t, err) != c.want {
			t.Errorf("%s of %v: %v, want %v", c.url, src, err, c.want)
		}
	}
	src := charge()
	src.Response.ContentType = ""
	src.Response.Body = []byte(`{"id":"\ud83d\ude00\\ud800"}`)
	if req := mustFill(t, mustParse(t, template.Spec{Method: "POST", URL: "/?x={response.json./id}"}), src); req.URL != "/?x=%F0%9F%98%80%5Cud800" {
		t.Error(req.URL)
	}
}

// hostile are values that try to leave their place, and what becomes of them there. An
// empty string means that the value is refused.
var hostile = []struct{ value, segment, pair, header, text string }{
	{"../../x", "", "..%2F..%2Fx", "../../x", `"../../x"`},
	{"..", "", "..", "..", `".."`},
	{".", "", ".", ".", `"."`},
	{"...", "...", "...", "...", `"..."`},
	{"a/b", "", "a%2Fb", "a/b", `"a/b"`},
	{`..\x`, "", "..%5Cx", `..\x`, `"..\\x"`},
	{"?x=1&admin=1", "%3Fx%3D1%26admin%3D1", "%3Fx%3D1%26admin%3D1", "?x=1&admin=1", `"?x=1&admin=1"`},
	{"x;y=1#z", "x%3By%3D1%23z", "x%3By%3D1%23z", "x;y=1#z", `"x;y=1#z"`},
	{"%2e%2e", "%252e%252e", "%252e%252e", "%2e%2e", `"%2e%2e"`},
	{"%2f", "%252f", "%252f", "%2f", `"%2f"`},
	{"a\r\nX-Admin: 1", "", "a%0D%0AX-Admin%3A%201", "", `"a\r\nX-Admin: 1"`},
	{"a\n", "", "a%0A", "", `"a\n"`},
	{"a\x00b", "", "a%00b", "", `"a\u0000b"`},
	{"\x7f", "", "%7F", "", "\"\x7f\""},
	{" a", "%20a", "%20a", "", `" a"`},
	{"a\t", "", "a%09", "", `"a\t"`},
	{"a+b c", "a%2Bb%20c", "a%2Bb%20c", "a+b c", `"a+b c"`},
	{`","admin":"1`, "%22%2C%22admin%22%3A%221", "%22%2C%22admin%22%3A%221", `","admin":"1`, `"\",\"admin\":\"1"`},
	{`\`, "", "%5C", `\`, `"\\"`},
	{"{execution.id}", "%7Bexecution.id%7D", "%7Bexecution.id%7D", "{execution.id}", `"{execution.id}"`},
	{"Zoë 😀", "Zo%C3%AB%20%F0%9F%98%80", "Zo%C3%AB%20%F0%9F%98%80", "Zoë 😀", `"Zoë 😀"`},
	{"<\u2028>", "%3C%E2%80%A8%3E", "%3C%E2%80%A8%3E", "<\u2028>", `"<\u2028>"`},
	{"\xff", "%FF", "%FF", "\xff", ""},
	{"1e400", "1e400", "1e400", "1e400", `"1e400"`},
	{"12345678901234567890", "12345678901234567890", "12345678901234567890", "12345678901234567890", `"12345678901234567890"`},
	{"a~b-c_d.e", "a~b-c_d.e", "a~b-c_d.e", "a~b-c_d.e", `"a~b-c_d.e"`},
}

// A value fills its place and changes nothing else of the request.
func TestFillHostile(t *testing.T) {
	const p = "{response.header.X-Value}"
	places := map[string]struct {
		spec template.Spec
		got  func(template.Request) string
	}{
		"segment": {template.Spec{Method: "DELETE", URL: "/a/" + p + "/b"}, func(r template.Request) string {
			return strings.TrimSuffix(strings.TrimPrefix(r.URL, "/a/"), "/b")
		}},
		"pair": {template.Spec{Method: "DELETE", URL: "https://h:1/a?x=" + p + "&y=1"}, func(r template.Request) string {
			return strings.TrimSuffix(strings.TrimPrefix(r.URL, "https://h:1/a?x="), "&y=1")
		}},
		"form": {template.Spec{Method: "POST", URL: "/", ContentType: formType, Body: "x=" + p + "&y=1"}, func(r template.Request) string {
			return strings.TrimSuffix(strings.TrimPrefix(string(r.Body), "x="), "&y=1")
		}},
		"header": {template.Spec{Method: "DELETE", URL: "/", Header: []template.Field{{"x-copy", p}}}, func(r template.Request) string {
			return r.Header["X-Copy"][0]
		}},
		"text": {template.Spec{Method: "POST", URL: "/", ContentType: jsonType, Body: `{{"a":"` + p + `"}}`}, func(r template.Request) string {
			return strings.TrimSuffix(strings.TrimPrefix(string(r.Body), `{"a":`), "}")
		}},
		"value": {template.Spec{Method: "POST", URL: "/", ContentType: jsonType, Body: `{{"a":` + p + `}}`}, func(r template.Request) string {
			return strings.TrimSuffix(strings.TrimPrefix(string(r.Body), `{"a":`), "}")
		}},
	}
	for _, h := range hostile {
		want := map[string]string{"segment": h.segment, "pair": h.pair, "form": h.pair, "header": h.header, "text": h.text, "value": h.text}
		for name, place := range places {
			req, err := mustParse(t, place.spec).Fill(with(h.value))
			if want[name] == "" {
				if reason(t, err) != template.ErrUnfit {
					t.Errorf("%q as %s: %v", h.value, name, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%q as %s: %v", h.value, name, err)
			} else if got := place.got(req); got != want[name] {
				t.Errorf("%q as %s: %s, want %s", h.value, name, got, want[name])
			}
		}
	}
}

// Where a segment or a field needs a value, an empty one would make another request:
// the collection instead of its member, an update without its condition.
func TestFillEmpty(t *testing.T) {
	for _, spec := range []template.Spec{
		{Method: "DELETE", URL: "/a/{response.header.X-Value}"},
		{Method: "DELETE", URL: "/a/x{response.header.X-Value}"},
		{Method: "DELETE", URL: "/a", Header: []template.Field{{"If-Match", "{response.header.X-Value}"}}},
	} {
		if _, err := mustParse(t, spec).Fill(with("")); reason(t, err) != template.ErrEmpty {
			t.Errorf("%v: %v", spec, err)
		}
	}
	// The path of the call ended with a slash.
	src := charge()
	src.Path = "/v1/"
	if _, err := mustParse(t, template.Spec{Method: "DELETE", URL: "/{request.path.1}"}).Fill(src); reason(t, err) != template.ErrEmpty {
		t.Error(err)
	}
	// An encoded slash or dot in the call's path is none in the undo's.
	for _, path := range []string{"/%2e%2E", "/a%2fb", "/%5c"} {
		src.Path = path
		if _, err := mustParse(t, template.Spec{Method: "DELETE", URL: "/{request.path.0}"}).Fill(src); reason(t, err) != template.ErrUnfit {
			t.Errorf("%s: %v", path, err)
		}
	}
	req := mustFill(t, mustParse(t, template.Spec{
		Method: "POST", URL: "/?q={response.header.X-Value}", ContentType: jsonType, Body: `["{response.header.X-Value}",{response.header.X-Value}]`,
	}), with(""))
	if req.URL != "/?q=" || string(req.Body) != `["",""]` {
		t.Errorf("%+v", req)
	}
}

// An error names the placeholder and its place, and holds nothing of the value (P8).
func TestFillErrorsHideValues(t *testing.T) {
	for place, spec := range map[string]template.Spec{
		"a path segment": {Method: "POST", URL: "/{response.header.X-Value}"},
		"a header value": {Method: "POST", URL: "/", Header: []template.Field{{"X-A", "{response.header.X-Value}"}}},
		"text in JSON":   {Method: "POST", URL: "/", ContentType: jsonType, Body: `"{response.header.X-Value}"`},
		"a JSON value":   {Method: "POST", URL: "/", ContentType: jsonType, Body: `{response.header.X-Value}`},
	} {
		_, err := mustParse(t, spec).Fill(with("secret\n\xff"))
		if want := "{response.header.X-Value} as " + place + ": the value cannot stand in this place"; err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// Sizes are bounded, and an error never holds the value (P8).
func TestFillLimits(t *testing.T) {
	long := strings.Repeat("secret", template.MaxValue)[:template.MaxValue]
	one := mustParse(t, template.Spec{Method: "POST", URL: "/{response.header.X-Value}"})
	if req := mustFill(t, one, with(long)); req.URL != "/"+long {
		t.Error("4 KiB are refused")
	}
	_, err := one.Fill(with(long + "x"))
	if reason(t, err) != template.ErrTooLarge || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}

	// 15 values of 4 KiB and a text that fills up the rest.
	spec := func(text int) template.Spec {
		return template.Spec{
			Method: "POST", URL: "https://h/?a=" + strings.Repeat("{response.header.X-Value}", 15),
			Header:      []template.Field{{"x-b", "{response.status}"}},
			ContentType: jsonType, Body: `"` + strings.Repeat("x", text) + `"`,
		}
	}
	size := len("https://h/?a=") + 15*template.MaxValue + len("x-b201") + len(jsonType) + 2
	rest := template.MaxRequest - size
	req := mustFill(t, mustParse(t, spec(rest)), with(long))
	if got := len(req.URL) + len("x-b201") + len(jsonType) + len(req.Body); got != template.MaxRequest {
		t.Errorf("%d bytes", got)
	}
	if _, err := mustParse(t, spec(rest+1)).Fill(with(long)); reason(t, err) != template.ErrTooLarge {
		t.Error(err)
	}
	// Escaping counts too.
	if _, err := mustParse(t, spec(1)).Fill(with(strings.Repeat("/", template.MaxValue))); reason(t, err) != template.ErrTooLarge {
		t.Error(err)
	}
}

// A whole request, and again: it is the same, and the source is as it was.
func TestFillIsDeterministic(t *testing.T) {
	tmpl := mustParse(t, template.Spec{
		Method: "POST", URL: "https://pay.example:8443/v1/{request.path.2}/refunds:{response.json./seq}?by={checkpoint.id}&q=a%20b",
		Header:      []template.Field{{"if-match", "{response.header.ETag}"}, {"X-Note", "{{undo}} of {execution.id}"}},
		ContentType: jsonType,
		Body:        `{{"charge":{response.json./id},"amount":{request.json./amount},"note":"undo \"{response.json./id}\" for {rollback.id}","live":{request.json./live},"n":[{response.status}]}}`,
	})
	src := charge()
	want := template.Request{
		Method: "POST", URL: "https://pay.example:8443/v1/c%207/refunds:7?by=cp-1&q=a%20b",
		Header: http.Header{"If-Match": {`"v1"`}, "X-Note": {"{undo} of exec-1"}, "Content-Type": {jsonType}},
		Body:   []byte(`{"charge":"ch_7","amount":12345678901234567890,"note":"undo \"ch_7\" for rb-1","live":true,"n":[201]}`),
	}
	for range 2 {
		got := mustFill(t, tmpl, src)
		if got.Method != want.Method || got.URL != want.URL || !maps.EqualFunc(got.Header, want.Header, slices.Equal) || !bytes.Equal(got.Body, want.Body) {
			t.Errorf("%+v\n%s", got, got.Body)
		}
		if !json.Valid(got.Body) {
			t.Error("invalid JSON")
		}
		if u, err := url.Parse(got.URL); err != nil || u.String() != got.URL {
			t.Error(u, err)
		}
	}
	if tmpl.Origin() != "https://pay.example:8443" {
		t.Error(tmpl.Origin())
	}
	bare := mustParse(t, template.Spec{Method: "DELETE", URL: "/x"})
	if req := mustFill(t, bare, src); bare.Origin() != "" || req.Body != nil || len(req.Header) != 0 || req.URL != "/x" {
		t.Errorf("%+v", req)
	}
	other := mustParse(t, template.Spec{Method: "POST", URL: "/x", ContentType: "text/plain", Body: "{{a}} }}b"})
	if req := mustFill(t, other, src); string(req.Body) != "{a} }b" {
		t.Errorf("%s", req.Body)
	}
}

// A charge is compensated by a refund of what it took.
func Example() {
	refund, err := template.Parse(template.Spec{
		Method:      "POST",
		URL:         "/v1/charges/{response.json./id}/refunds?reason={checkpoint.id}",
		Header:      []template.Field{{Name: "If-Match", Value: "{response.header.ETag}"}},
		ContentType: "application/json",
		Body:        `{{"amount":{request.json./amount},"note":"undone by {rollback.id}"}}`,
	})
	if err != nil {
		panic(err)
	}
	fmt.Println("needs the response:", refund.Needs().Response())

	call := &template.Source{
		Path:       "/v1/charges",
		Request:    template.Message{ContentType: "application/json", Body: []byte(`{"amount": 12.50}`)},
		Status:     http.StatusCreated,
		Response:   template.Message{Header: http.Header{"Etag": {`"7"`}}, Body: []byte(`{"id": "ch_1"}`)},
		RollbackID: "rb-3", CheckpointID: "cp 9&x=1",
	}
	req, err := refund.Fill(call)
	if err != nil {
		panic(err)
	}
	fmt.Println(req.Method, req.URL)
	fmt.Println("If-Match:", req.Header.Get("If-Match"))
	fmt.Println(string(req.Body))

	// An upstream cannot choose another path.
	call.Response.Body = []byte(`{"id": "../../accounts/1"}`)
	_, err = refund.Fill(call)
	fmt.Println(err)
	// Output:
	// needs the response: true
	// POST /v1/charges/ch_1/refunds?reason=cp%209%26x%3D1
	// If-Match: "7"
	// {"amount":12.50,"note":"undone by rb-3"}
	// {response.json./id} as a path segment: the value cannot stand in this place
}
