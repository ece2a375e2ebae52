package option_test

import (
	"cmp"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
)

// Every error names its option and its line, and says what would be right.
func TestErrors(t *testing.T) {
	word := func(d *caddyfile.Dispenser, into *string) error {
		if !d.Args(into) {
			return option.ErrSyntax
		}
		return nil
	}
	set := option.Set[*string]{
		"colour": {Usage: "<word>", Parse: word, Check: func(into *string) error {
			if *into == "grey" {
				return errors.New("grey is no colour")
			}
			return nil
		}},
		"shade": {Usage: "<word>", Several: true, Named: true, NamesItself: true, Parse: word, Check: func(into *string) error {
			if *into == "odd" {
				return errors.New("shade must not be odd")
			}
			return nil
		}},
	}
	for block, want := range map[string]string{
		"{\ncolour red\nshade a\nshade b\n}":    "",
		"":                                      "",
		"red":                                   "wrong number of arguments",
		"{\ncolur red\n}":                       `paint has no option "colur"; it has colour, shade; did you mean "colour"?, at Testfile:2`,
		"{\ncolour red\nshade a\ncolour red\n}": "colour stands twice; it stands on line 2 already, at Testfile:4",
		"{\n\ncolour\n}":                        "colour: wrong number of arguments; the syntax is `colour <word>`, at Testfile:3",
		"{\ncolour red blue\n}":                 "colour: wrong number of arguments; the syntax is `colour <word>`, at Testfile:2",
		"{\nshade red {\nmat\n}\n}":             "shade red: wrong number of arguments; the syntax is `shade <word>`, at Testfile:2",
		"{\ncolour grey\n}":                     "colour: grey is no colour, at Testfile:2",
		"{\nshade a\nshade odd\n}":              "shade must not be odd, at Testfile:3",
	} {
		var got string
		d := caddyfile.NewTestDispenser("paint " + block)
		d.Next()
		err := set.Read(d, "paint", &got, map[string]caddyfile.Segment{})
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%q: %v\nwant %s", block, err, want)
		}
	}
}

// Errors in a file that is imported name that file alone, and where an option stands in another file.
func TestErrorsOfImports(t *testing.T) {
	word := func(d *caddyfile.Dispenser, into *string) error {
		if !d.Args(into) {
			return option.ErrSyntax
		}
		return nil
	}
	scheme := option.Set[*string]{"colour": {Usage: "<word>", Parse: word}}
	set := option.Set[*string]{
		"colour": {Usage: "<word>", Parse: word},
		"scheme": {Usage: "{ ... }", Parse: func(d *caddyfile.Dispenser, into *string) error {
			return scheme.Read(d, "a scheme", into, map[string]caddyfile.Segment{})
		}},
	}
	for _, c := range []struct{ begin, imported, end, want string }{
		{"paint {\n", "colour red blue\n", "}",
			"colour: wrong number of arguments; the syntax is `colour <word>`, at imported:1"},
		{"paint {\nscheme {\n", "colour red blue\n", "}\n}",
			"scheme: colour: wrong number of arguments; the syntax is `colour <word>`, at imported:1"},
		{"paint {\nscheme {\n", "shade dark\n", "}\n}",
			`scheme: a scheme has no option "shade"; it has colour, at imported:1`},
		{"paint {\ncolour red\n", "colour blue\n", "}",
			"colour stands twice; it stands at main:2 already, at imported:1"},
	} {
		var tokens []caddyfile.Token
		for _, file := range [][2]string{{c.begin, "main"}, {c.imported, "imported"}, {c.end, "main"}} {
			more, err := caddyfile.Tokenize([]byte(file[0]), file[1])
			if err != nil {
				t.Fatal(err)
			}
			tokens = append(tokens, more...)
		}
		d := caddyfile.NewDispenser(tokens)
		d.Next()
		err := set.Read(d, "paint", new(string), map[string]caddyfile.Segment{})
		if err == nil || err.Error() != c.want {
			t.Errorf("%v\nwant %s", err, c.want)
		}
	}
}

// Errors of JSON have the path of the member, without the types of Go.
func TestErrorsOfJSON(t *testing.T) {
	type shade struct {
		Depth float64       `json:"depth"`
		Dry   time.Duration `json:"dry"`
	}
	type paint struct {
		shade                   // its members are those of paint
		Shades []shade          `json:"shades"`
		Names  map[string]shade `json:"names"`
		Coats  int              `json:"coats"`
	}
	for text, want := range map[string]string{
		` {"depth": 0.5, "shades": [{}, null], "names": null} `: "",
		`null`:                            "",
		`{"depth": "deep"}`:               "depth: it must be a number, not string",
		`{"shades": [{}, {"dry": "1s"}]}`: `shades/1/dry: it must be a duration like "30s", not string`,
		`{"coats": 1, "names": {"a\"b": {"depth": 1}, "c": []}}`: "names/c: it must be an object, not array",
		`{"names": {"a\"b": {"dept": 1}}}`:                       `names/a"b/dept: json: unknown field "dept"`,
		`{"shades": {"dry": 1}, "coats": 1.5}`:                   "shades: it must be an array, not object",
		`[1]`:                                                    "it must be an object, not array",
		`{"coats": 1`:                                            "unexpected EOF",
		``:                                                       "EOF",
	} {
		if err := option.DecodeJSON([]byte(text), new(paint)); fmt.Sprint(err) != cmp.Or(want, "<nil>") {
			t.Errorf("%s: %v\nwant %s", text, err, want)
		}
	}
}
