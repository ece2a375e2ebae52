package template

import (
	"strings"
	"unicode/utf8"
)

// JSONObject writes a [Spec.Body]: a JSON object with a member for each field, in their
// order. A value that is one placeholder and nothing else becomes a JSON value, so that
// a number stays one; any other value becomes text, in which braces that are meant as
// such are written twice. Names hold no placeholders. The error is a *ParseError;
// names that come twice are left to [Parse].
func JSONObject(fields []Field) (body string, err error) {
	return compose(fields, "json ", "{{", ",", "}}", func(name string, value []piece) string {
		member := string(quote(name)) + ":"
		if len(value) == 1 && value[0].name != nil {
			return member + "{" + value[0].name.text + "}"
		}
		return member + `"` + rewrite(value, func(text string) string {
			quoted := quote(text)
			return doubleBraces.Replace(string(quoted[1 : len(quoted)-1]))
		}) + `"`
	})
}

// Form writes a [Spec.Body]: a form with a pair for each field, in their order. Names
// and text are percent-encoded; braces in values that are meant as such are written
// twice. Names hold no placeholders. The error is a *ParseError.
func Form(fields []Field) (body string, err error) {
	escape := func(text string) string { return string(appendEscaped(nil, text)) }
	return compose(fields, "form ", "", "&", "", func(name string, value []piece) string {
		return escape(name) + "=" + rewrite(value, escape)
	})
}

var doubleBraces = strings.NewReplacer("{", "{{", "}", "}}")

func compose(fields []Field, place, open, between, end string, write func(name string, value []piece) string) (string, error) {
	var b strings.Builder
	b.WriteString(open)
	for i, f := range fields {
		if strings.ContainsAny(f.Name, "{}") {
			return "", bad(0, "a name can hold no placeholder; write it out, without braces").in(place + f.Name)
		}
		if !utf8.ValidString(f.Name) || !utf8.ValidString(f.Value) {
			return "", bad(0, "name and value must be valid UTF-8").in(place + f.Name)
		}
		value, err := scan(f.Value)
		if err != nil {
			return "", err.in(place + f.Name)
		}
		if i > 0 {
			b.WriteString(between)
		}
		b.WriteString(write(f.Name, value))
	}
	b.WriteString(end)
	return b.String(), nil
}

// rewrite escapes the text between placeholders.
func rewrite(pieces []piece, escape func(string) string) string {
	var b strings.Builder
	for _, p := range pieces {
		if p.name != nil {
			b.WriteString("{" + p.name.text + "}")
		} else {
			b.WriteString(escape(p.text))
		}
	}
	return b.String()
}
