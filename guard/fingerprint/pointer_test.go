package fingerprint_test

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

func mustPointer(t testing.TB, s string) fingerprint.Pointer {
	t.Helper()
	p, err := fingerprint.ParsePointer(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// RFC 6901, section 3; the texts go to whoever writes the configuration.
func TestParsePointer(t *testing.T) {
	for _, s := range []string{"", "/", "/a", "/a/b/0", "//", "/a~1b", "/m~0n", "/~01", "/ ", "/é", "/a%b", "/-"} {
		if got := mustPointer(t, s).String(); got != s {
			t.Errorf("%q became %q", s, got)
		}
	}
	for s, want := range map[string]string{
		"a": "begin with '/'", "#/a": "'#'", "#": "'#'", "$.a": "begin with '/'", "/a~": "'~'", "/~2": "'~'", "/a~/b": "'~'", "/\xff": "UTF-8",
	} {
		if _, err := fingerprint.ParsePointer(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", s, err)
		}
	}
}
