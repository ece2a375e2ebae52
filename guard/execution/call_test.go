package execution_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
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
			got, err := execution.ParseID([]string{c.line})
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
		"no line":               {nil, execution.ErrIDMissing},
		"two lines":             {[]string{"a", "a"}, execution.ErrIDRepeated},
		"empty":                 {[]string{""}, execution.ErrIDEmpty},
		"blank":                 {[]string{" \t "}, execution.ErrIDEmpty},
		"empty string":          {[]string{`""`}, execution.ErrIDEmpty},
		"list":                  {[]string{"a, b"}, execution.ErrIDList},
		"list without space":    {[]string{"a,b"}, execution.ErrIDList},
		"quoted list":           {[]string{`"a", "b"`}, execution.ErrIDTrailing},
		"parameters":            {[]string{`"a";q=1`}, execution.ErrIDTrailing},
		"parameters, escaped":   {[]string{`"\\a";q=1`}, execution.ErrIDTrailing},
		"doubled quotes":        {[]string{`""a""`}, execution.ErrIDTrailing},
		"only the opening":      {[]string{`"`}, execution.ErrIDUnterminated},
		"no closing quote":      {[]string{`"abc`}, execution.ErrIDUnterminated},
		"escaped closing quote": {[]string{`"abc\"`}, execution.ErrIDUnterminated},
		"ends in a backslash":   {[]string{`"abc\`}, execution.ErrIDUnterminated},
		"bad escape":            {[]string{`"a\nb"`}, execution.ErrIDEscape},
		"inner space":           {[]string{`a b`}, execution.ErrIDCharacter},
		"quoted space":          {[]string{`"a b"`}, execution.ErrIDCharacter},
		"quoted outer space":    {[]string{`" a"`}, execution.ErrIDCharacter},
		"control":               {[]string{"a\x00b"}, execution.ErrIDCharacter},
		"quoted line feed":      {[]string{"\"a\nb\""}, execution.ErrIDCharacter},
		"delete":                {[]string{"a\x7f"}, execution.ErrIDCharacter},
		"not ASCII":             {[]string{"schlüssel"}, execution.ErrIDCharacter},
		"256 raw":               {[]string{strings.Repeat("k", 256)}, execution.ErrIDTooLong},
		"256 quoted":            {[]string{`"` + strings.Repeat("k", 256) + `"`}, execution.ErrIDTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := execution.ParseID(c.lines)
			if !errors.Is(err, c.want) || got != "" {
				t.Fatalf("got %q, %v; want %v", got, err, c.want)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	for id, want := range map[string]error{
		"":                       execution.ErrIDEmpty,
		"msg-1,2":                nil,
		`"quoted"`:               nil,
		strings.Repeat("x", 255): nil,
		strings.Repeat("x", 256): execution.ErrIDTooLong,
		"a b":                    execution.ErrIDCharacter,
		"\t":                     execution.ErrIDCharacter,
		"é":                      execution.ErrIDCharacter,
	} {
		if err := execution.CheckID(id); !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("Check(%.20q) = %v, want %v", id, err, want)
		}
	}
}

// The quoted form of every id is that id, what comes out is always a valid id,
// and no error text holds the value (P8).
func FuzzParseID(f *testing.F) {
	for _, s := range []string{`abc`, `"abc"`, `"a\"b\\"`, `"a";x`, `a,b`, ` "x" `, `"`, `\`, "\x00", `"\`} {
		f.Add(s)
	}
	esc := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	f.Fuzz(func(t *testing.T, line string) {
		id, err := execution.ParseID([]string{line})
		if err != nil {
			if id != "" {
				t.Fatalf("an error and an id: %q", id)
			}
			if !slices.Contains(sentinels, err) {
				t.Fatalf("not a constant of the package, so it may hold the value: %v", err)
			}
		} else {
			if e := execution.CheckID(id); e != nil {
				t.Fatalf("%q was accepted, but %v", id, e)
			}
			quoted, e := execution.ParseID([]string{`"` + esc.Replace(id) + `"`})
			if e != nil || quoted != id {
				t.Fatalf("quoted form of %q: %q, %v", id, quoted, e)
			}
		}
		if execution.CheckID(line) == nil {
			quoted, e := execution.ParseID([]string{`"` + esc.Replace(line) + `"`})
			if e != nil || quoted != line {
				t.Fatalf("valid id %q is not read in quotes: %q, %v", line, quoted, e)
			}
			if line[0] != '"' && !strings.Contains(line, ",") && (err != nil || id != line) {
				t.Fatalf("valid id %q is not read raw: %q, %v", line, id, err)
			}
		}
	})
}

var sentinels = []error{execution.ErrIDMissing, execution.ErrIDRepeated, execution.ErrIDList, execution.ErrIDEmpty, execution.ErrIDTooLong,
	execution.ErrIDCharacter, execution.ErrIDUnterminated, execution.ErrIDEscape, execution.ErrIDTrailing}

func ExampleParseID() {
	id, _ := execution.ParseID([]string{`"order-17"`})
	fmt.Println(id)
	id, _ = execution.ParseID([]string{`order-17`})
	fmt.Println(id)
	_, err := execution.ParseID([]string{`"order-17";v=2`})
	fmt.Println(err)
	// Output:
	// order-17
	// order-17
	// something follows the closing quote of the execution id; send the quoted id alone, without parameters or further values
}

func BenchmarkParseID(b *testing.B) {
	for name, line := range map[string]string{
		"raw":     `8e03978e-40d5-43dd-bc93-6894a57f9324`,
		"quoted":  `"8e03978e-40d5-43dd-bc93-6894a57f9324"`,
		"escaped": `"8e03978e\"40d5-43dd-bc93-6894a57f9324"`,
	} {
		b.Run(name, func(b *testing.B) {
			lines := []string{line}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := execution.ParseID(lines); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// The outcome table: what a whole answer's status says, by preset.
func TestOutcomeTable(t *testing.T) {
	const done, free, doubt = execution.Completed, execution.Released, execution.InDoubt
	for _, row := range []struct {
		status                     int
		retryAfter                 bool
		plain, stripe, acp, strict execution.Verdict
	}{
		{200, false, done, done, done, done},
		{201, false, done, done, done, done},
		{204, false, done, done, done, done},
		{302, false, done, done, done, done},
		{400, false, done, free, done, done},
		{401, false, free, free, free, free},
		{402, false, done, done, done, done},
		{403, false, free, free, free, free},
		{404, false, done, done, done, done},
		{407, false, free, free, free, free},
		{408, false, doubt, doubt, doubt, doubt},
		{409, false, done, free, done, done},
		{421, false, free, free, free, free},
		{422, false, done, done, done, done},
		{425, false, free, free, free, free},
		{429, false, free, free, free, free},
		{499, false, doubt, doubt, doubt, doubt},
		{500, false, done, done, free, doubt},
		{501, false, done, done, free, doubt},
		{502, false, doubt, doubt, free, doubt},
		{503, false, doubt, doubt, free, doubt},
		{503, true, free, free, free, doubt},
		{504, false, doubt, doubt, free, doubt},
		{529, false, free, free, free, doubt},
	} {
		for preset, want := range map[execution.Preset]execution.Verdict{
			"": row.plain, execution.PresetDefault: row.plain, execution.PresetStripe: row.stripe,
			execution.PresetACP: row.acp, execution.PresetStrict: row.strict,
		} {
			t.Run(fmt.Sprint(preset, "/", row.status, row.retryAfter), func(t *testing.T) {
				if got := preset.Judge(execution.Answer{Status: row.status, RetryAfter: row.retryAfter}); got != want {
					t.Errorf("%v, want %v", got, want)
				}
			})
		}
	}
}

// An upstream that keeps keys itself says by Stripe-Should-Retry whether a repetition is of
// use. Other presets do not read it.
func TestOutcomeByAdvice(t *testing.T) {
	const done, free, doubt = execution.Completed, execution.Released, execution.InDoubt
	for _, row := range []struct {
		status  int
		yes, no execution.Verdict
		plain   execution.Verdict // under the default preset, whatever is advised
	}{
		{200, done, done, done},
		{400, free, done, done},
		{402, free, done, done},
		{408, doubt, done, doubt},
		{409, free, done, done},
		{429, free, free, free}, // refused before the call was looked at
		{500, doubt, done, done},
		{502, doubt, done, doubt},
		{503, doubt, done, doubt},
	} {
		for advice, want := range map[string]execution.Verdict{"true": row.yes, "false": row.no} {
			if got := execution.PresetStripe.Judge(execution.Answer{Status: row.status, ShouldRetry: advice}); got != want {
				t.Errorf("%d with %s: %v, want %v", row.status, advice, got, want)
			}
			if got := execution.PresetDefault.Judge(execution.Answer{Status: row.status, ShouldRetry: advice}); got != row.plain {
				t.Errorf("%d with %s by default: %v, want %v", row.status, advice, got, row.plain)
			}
		}
	}
}

func TestVerdictWords(t *testing.T) {
	for _, v := range []execution.Verdict{execution.Completed, execution.Released, execution.InDoubt} {
		if got, err := execution.ParseVerdict(v.String()); got != v || err != nil {
			t.Errorf("%v: %v, %v", v, got, err)
		}
	}
	if _, err := execution.ParseVerdict("maybe"); err == nil {
		t.Error("an unknown word was read")
	}
}
