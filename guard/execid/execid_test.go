package execid_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execid"
)

// A client may send the id quoted on one attempt and raw on the next: both must
// find the same record (P1; trap "quoted and raw keys seen as two").
func TestQuotedAndRawAreOneID(t *testing.T) {
	for name, c := range map[string]struct{ line, want string }{
		"raw":                {`8e03978e-40d5-43dd-bc93-6894a57f9324`, `8e03978e-40d5-43dd-bc93-6894a57f9324`},
		"quoted":             {`"8e03978e-40d5-43dd-bc93-6894a57f9324"`, `8e03978e-40d5-43dd-bc93-6894a57f9324`},
		"spaces around":      {" \t\"abc\" \t", `abc`},
		"raw, spaces around": {"\t abc ", `abc`},
		"escaped quote":      {`"a\"b"`, `a"b`},
		"raw inner quote":    {`a"b`, `a"b`},
		"escaped backslash":  {`"a\\b"`, `a\b`},
		"raw backslash":      {`a\b`, `a\b`},
		"only a quote":       {`"\""`, `"`},
		"escaped at the end": {`"ab\\"`, `ab\`},
		"quoted comma":       {`"a,b"`, `a,b`},
		"all characters":     {"!#$%&'()*+-./:;<=>?@[]^_`{|}~", "!#$%&'()*+-./:;<=>?@[]^_`{|}~"},
		"one character":      {`x`, `x`},
		"longest raw":        {strings.Repeat("k", 255), strings.Repeat("k", 255)},
		"longest quoted":     {`"` + strings.Repeat(`\"`, 255) + `"`, strings.Repeat(`"`, 255)},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := execid.ParseHeader([]string{c.line})
			if err != nil || got != c.want {
				t.Fatalf("got %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		lines []string
		want  error
	}{
		"no line":               {nil, execid.ErrMissing},
		"two lines":             {[]string{"a", "a"}, execid.ErrRepeated},
		"empty":                 {[]string{""}, execid.ErrEmpty},
		"blank":                 {[]string{" \t "}, execid.ErrEmpty},
		"empty string":          {[]string{`""`}, execid.ErrEmpty},
		"list":                  {[]string{"a, b"}, execid.ErrList},
		"list without space":    {[]string{"a,b"}, execid.ErrList},
		"quoted list":           {[]string{`"a", "b"`}, execid.ErrTrailing},
		"parameters":            {[]string{`"a";q=1`}, execid.ErrTrailing},
		"parameters, escaped":   {[]string{`"\\a";q=1`}, execid.ErrTrailing},
		"doubled quotes":        {[]string{`""a""`}, execid.ErrTrailing},
		"only the opening":      {[]string{`"`}, execid.ErrUnterminated},
		"no closing quote":      {[]string{`"abc`}, execid.ErrUnterminated},
		"escaped closing quote": {[]string{`"abc\"`}, execid.ErrUnterminated},
		"ends in a backslash":   {[]string{`"abc\`}, execid.ErrUnterminated},
		"bad escape":            {[]string{`"a\nb"`}, execid.ErrEscape},
		"inner space":           {[]string{`a b`}, execid.ErrCharacter},
		"quoted space":          {[]string{`"a b"`}, execid.ErrCharacter},
		"quoted outer space":    {[]string{`" a"`}, execid.ErrCharacter},
		"control":               {[]string{"a\x00b"}, execid.ErrCharacter},
		"quoted line feed":      {[]string{"\"a\nb\""}, execid.ErrCharacter},
		"delete":                {[]string{"a\x7f"}, execid.ErrCharacter},
		"not ASCII":             {[]string{"schlüssel"}, execid.ErrCharacter},
		"256 raw":               {[]string{strings.Repeat("k", 256)}, execid.ErrTooLong},
		"256 quoted":            {[]string{`"` + strings.Repeat("k", 256) + `"`}, execid.ErrTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := execid.ParseHeader(c.lines)
			if !errors.Is(err, c.want) || got != "" {
				t.Fatalf("got %q, %v; want %v", got, err, c.want)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	for id, want := range map[string]error{
		"":                       execid.ErrEmpty,
		"msg-1,2":                nil,
		`"quoted"`:               nil,
		strings.Repeat("x", 255): nil,
		strings.Repeat("x", 256): execid.ErrTooLong,
		"a b":                    execid.ErrCharacter,
		"\t":                     execid.ErrCharacter,
		"é":                      execid.ErrCharacter,
	} {
		if err := execid.Check(id); !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("Check(%.20q) = %v, want %v", id, err, want)
		}
	}
}

// The quoted form of every id is that id, what comes out is always a valid id,
// and no error text holds the value (P8).
func FuzzParseHeader(f *testing.F) {
	for _, s := range []string{`abc`, `"abc"`, `"a\"b\\"`, `"a";x`, `a,b`, ` "x" `, `"`, `\`, "\x00", `"\`} {
		f.Add(s)
	}
	esc := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	f.Fuzz(func(t *testing.T, line string) {
		id, err := execid.ParseHeader([]string{line})
		if err != nil {
			if id != "" {
				t.Fatalf("an error and an id: %q", id)
			}
			if !slices.Contains(sentinels, err) {
				t.Fatalf("not a constant of the package, so it may hold the value: %v", err)
			}
		} else {
			if e := execid.Check(id); e != nil {
				t.Fatalf("%q was accepted, but %v", id, e)
			}
			quoted, e := execid.ParseHeader([]string{`"` + esc.Replace(id) + `"`})
			if e != nil || quoted != id {
				t.Fatalf("quoted form of %q: %q, %v", id, quoted, e)
			}
		}
		if execid.Check(line) == nil {
			quoted, e := execid.ParseHeader([]string{`"` + esc.Replace(line) + `"`})
			if e != nil || quoted != line {
				t.Fatalf("valid id %q is not read in quotes: %q, %v", line, quoted, e)
			}
			if line[0] != '"' && !strings.Contains(line, ",") && (err != nil || id != line) {
				t.Fatalf("valid id %q is not read raw: %q, %v", line, id, err)
			}
		}
	})
}

var sentinels = []error{execid.ErrMissing, execid.ErrRepeated, execid.ErrList, execid.ErrEmpty, execid.ErrTooLong,
	execid.ErrCharacter, execid.ErrUnterminated, execid.ErrEscape, execid.ErrTrailing}

func ExampleParseHeader() {
	id, _ := execid.ParseHeader([]string{`"order-17"`})
	fmt.Println(id)
	id, _ = execid.ParseHeader([]string{`order-17`})
	fmt.Println(id)
	_, err := execid.ParseHeader([]string{`"order-17";v=2`})
	fmt.Println(err)
	// Output:
	// order-17
	// order-17
	// something follows the closing quote of the execution id; send the quoted id alone, without parameters or further values
}

func BenchmarkParseHeader(b *testing.B) {
	for name, line := range map[string]string{
		"raw":     `8e03978e-40d5-43dd-bc93-6894a57f9324`,
		"quoted":  `"8e03978e-40d5-43dd-bc93-6894a57f9324"`,
		"escaped": `"8e03978e\"40d5-43dd-bc93-6894a57f9324"`,
	} {
		b.Run(name, func(b *testing.B) {
			lines := []string{line}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := execid.ParseHeader(lines); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
