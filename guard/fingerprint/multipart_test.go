package fingerprint_test

import (
	"bytes"
	"mime/multipart"
	"net/textproto"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

func multipartSum(t testing.TB, boundary, body string) fingerprint.Sum {
	t.Helper()
	return bodySum(t, nil, "multipart/form-data; boundary=\""+boundary+"\"", []byte(body))
}

// asMultipart reports whether body, with boundary "b", is compared by its parts.
func asMultipart(t testing.TB, body string) bool {
	t.Helper()
	return multipartSum(t, "b", body) == multipartSum(t, "b", "preamble\r\n"+body)
}

// form is also a golden body: it must not change.
const form = "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nvalue\r\n" +
	"--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"x\"\r\nContent-Type: text/plain\r\n\r\nfile\r\n--b--\r\n"

// Trap 7: the boundary differs for every attempt.
func TestMultipartSameParts(t *testing.T) {
	want := multipartSum(t, "b", form)
	for name, c := range map[string]struct{ boundary, body string }{
		"another boundary": {"xyz", strings.ReplaceAll(form, "--b", "--xyz")},
		"longest boundary": {strings.Repeat("B", 70), strings.ReplaceAll(form, "--b", "--"+strings.Repeat("B", 70))},
		"preamble":         {"b", "This is\r\na message.\r\n" + form},
		"epilogue":         {"b", form + "the end"},
		"no last CRLF":     {"b", strings.TrimSuffix(form, "\r\n")},
		"padding":          {"b", strings.ReplaceAll(form, "--b\r\n", "--b \t \r\n")},
		"padding at end":   {"b", strings.TrimSuffix(form, "\r\n") + "  "},
		"order of fields":  {"b", strings.Replace(form, "Content-Disposition: form-data; name=\"f\"; filename=\"x\"\r\nContent-Type: text/plain", "content-type:text/plain \r\nCONTENT-DISPOSITION:\tform-data; name=\"f\"; filename=\"x\"", 1)},
		"over the seam":    {"b", strings.Repeat("x", window-20) + "\r\n" + form},
	} {
		if c.body == form {
			t.Fatalf("%s: the test shows nothing", name)
		}
		if multipartSum(t, c.boundary, c.body) != want {
			t.Errorf("%s: another sum", name)
		}
	}
	if bodySum(t, nil, "Multipart/Form-Data; charset=utf-8; boundary=b", []byte(form)) != want {
		t.Error("another parameter: another sum")
	}
}

func TestMultipartOtherParts(t *testing.T) {
	seen := map[fingerprint.Sum]string{multipartSum(t, "b", form): "form"}
	first, second, _ := strings.Cut(strings.TrimSuffix(form, "--b--\r\n"), "\r\n--b\r\n")
	for name, body := range map[string]string{
		"value":            strings.Replace(form, "value", "Value", 1),
		"longer value":     strings.Replace(form, "value", "value\r\n", 1),
		"line end":         strings.Replace(form, "value", "va\r\nlue", 1),
		"other line end":   strings.Replace(form, "value", "va\nlue", 1),
		"name":             strings.Replace(form, `name="a"`, `name="b"`, 1),
		"file name":        strings.Replace(form, `"x"`, `"y"`, 1),
		"type":             strings.Replace(form, "text/plain", "text/html", 1),
		"no type":          strings.Replace(form, "\r\nContent-Type: text/plain", "", 1),
		"type twice":       strings.Replace(form, "Content-Type: text/plain", "Content-Type: text/plain\r\nContent-Type: text/plain", 1),
		"order of parts":   "--b\r\n" + second + first + "\r\n--b--\r\n",
		"one part":         first + "\r\n--b--\r\n",
		"a part twice":     first + "\r\n" + form,
		"no part":          "--b--\r\n",
		"empty part":       "--b\r\n\r\n\r\n--b--\r\n",
		"two empty parts":  "--b\r\n\r\n\r\n--b\r\n\r\n\r\n--b--\r\n",
		"field as content": strings.Replace(form, "Content-Type: text/plain\r\n\r\n", "\r\nContent-Type: text/plain\r\n", 1),
		"boundary inside":  strings.Replace(form, "value", "x--b", 1),
		"other boundary":   strings.Replace(form, "value", "\r\n--c\r\n", 1),
	} {
		if !asMultipart(t, body) {
			t.Errorf("%s: not read as parts", name)
		}
		s := multipartSum(t, "b", body)
		if other, ok := seen[s]; ok {
			t.Errorf("%s and %s have the same sum", name, other)
		}
		seen[s] = name
	}
	if bodySum(t, nil, "multipart/mixed; boundary=b", []byte(form)) == multipartSum(t, "b", form) {
		t.Error("another media type, the same sum")
	}
}

// Where readers might see other parts than we do, the bytes are compared.
func TestMultipartRawInstead(t *testing.T) {
	for name, body := range map[string]string{
		"not closed":          strings.TrimSuffix(form, "--b--\r\n"),
		"closed half":         strings.TrimSuffix(form, "-\r\n"),
		"LF only":             strings.ReplaceAll(form, "\r\n", "\n"),
		"LF after boundary":   strings.Replace(form, "--b\r\n", "--b\n", 1),
		"no boundary":         "value",
		"longer boundary":     strings.Replace(form, "value", "\r\n--bb\r\n", 1),
		"text after boundary": strings.Replace(form, "--b\r\n", "--b x\r\n", 1),
		"text after the last": strings.TrimSuffix(form, "\r\n") + "x",
		"much padding":        strings.Replace(form, "--b\r\n", "--b"+strings.Repeat(" ", 300)+"\r\n", 1),
		"no colon":            strings.Replace(form, "Content-Type:", "Content-Type", 1),
		"space in a name":     strings.Replace(form, "Content-Type:", "Content Type:", 1),
		"no name":             strings.Replace(form, "Content-Type:", ":", 1),
		"folded":              strings.Replace(form, "; filename", ";\r\n filename", 1),
		"bare CR":             strings.Replace(form, "text/plain", "text\rplain", 1),
		"bare LF":             strings.Replace(form, "text/plain", "text/plain\nX: y", 1),
		"NUL":                 strings.Replace(form, "text/plain", "text\x00plain", 1),
		"no empty line":       "--b\r\nA: b\r\n--b--",
		"huge header":         strings.Replace(form, "text/plain", strings.Repeat("x", 17<<10), 1),
	} {
		if body == form || asMultipart(t, body) {
			t.Errorf("%s: read as parts", name)
		}
	}
	for _, ct := range []string{"multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=b; boundary=c",
		"multipart/form-data; boundary=" + strings.Repeat("b", 71), `multipart/form-data; boundary="b "`, "multipart/form-data; boundary=b; =", "text/plain; boundary=b"} {
		boundary := "b"
		if strings.Contains(ct, "bb") {
			boundary = strings.Repeat("b", 71)
		}
		body := strings.ReplaceAll(form, "--b", "--"+boundary)
		if bodySum(t, nil, ct, []byte(body)) == bodySum(t, nil, ct, []byte("preamble\r\n"+body)) {
			t.Errorf("%s: read as parts", ct)
		}
	}
}

// What a standard writer makes is read as parts, and only its boundary does not
// count.
func FuzzMultipartBoundary(f *testing.F) {
	f.Add("name", "value", "content", "--b\r\n", uint16(3))
	f.Add("", "", "\r\n", "\r\n--", uint16(0))
	f.Add("X-A", "x", "\r\n--x", "\r", uint16(window-60))
	f.Fuzz(func(t *testing.T, name, value, content, other string, fill uint16) {
		content += strings.Repeat("x", int(fill))
		for _, b := range []string{"first-boundary", "2nd"} {
			if strings.Contains(content+"\r\n"+other, "--"+b) {
				return
			}
		}
		header := textproto.MIMEHeader{}
		if textproto.TrimString(name) == name && name != "" && strings.IndexFunc(name, notAlphanumeric) < 0 && !strings.ContainsAny(value, "\r\n\x00") && len(name+value) < 10000 {
			header.Set(name, value)
		}
		write := func(boundary string, contents ...string) string {
			var b bytes.Buffer
			w := multipart.NewWriter(&b)
			if err := w.SetBoundary(boundary); err != nil {
				t.Fatal(err)
			}
			for _, c := range contents {
				p, err := w.CreatePart(header)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := p.Write([]byte(c)); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			return b.String()
		}
		want := multipartSum(t, "first-boundary", write("first-boundary", content, other))
		if multipartSum(t, "2nd", write("2nd", content, other)) != want {
			t.Errorf("the boundary counts: header %q, contents %q, %q", header, content, other)
		}
		for _, changed := range [][]string{{content}, {content, other, ""}, {content, other + "!"}, {content + "!", other}, {content + other}} {
			if multipartSum(t, "2nd", write("2nd", changed...)) == want {
				t.Errorf("other contents %q, the same sum as %q, %q", changed, content, other)
			}
		}
		if content != other && multipartSum(t, "2nd", write("2nd", other, content)) == want {
			t.Errorf("the order of %q, %q does not count", content, other)
		}
		// Anything at all as a body: no panic, the same sum in both ways of reading.
		multipartSum(t, "b", name+value+other)
		multipartSum(t, "b", "--b\r\n"+name+":"+value+"\r\n\r\n"+content+"\r\n--b--"+other)
	})
}

func notAlphanumeric(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9')
}
