package ect_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestFields: one line, several, joined ones, and the sizes (14, 15).
func TestFields(t *testing.T) {
	k8, k := strings.Repeat("a", ect.MaxField), strings.Repeat("a", 1<<10)
	for name, c := range map[string]struct {
		lines []string
		want  []string
		code  ect.Code
	}{
		"none":           {nil, nil, ""},
		"empty":          {[]string{"", " , ,\t"}, nil, ""},
		"one":            {[]string{" a.b.c\t"}, []string{"a.b.c"}, ""},
		"several":        {[]string{"a", "b"}, []string{"a", "b"}, ""},
		"joined":         {[]string{"a,b ,\tc", "d"}, []string{"a", "b", "c", "d"}, ""},
		"largest":        {[]string{k8}, []string{k8}, ""},
		"too large":      {[]string{k8 + "a"}, nil, ect.CodeTooLarge},
		"largest in all": {[]string{k8, k8}, []string{k8, k8}, ""},
		"too much":       {[]string{k8, k8, "a"}, nil, ect.CodeTooLarge},
		"joined by two":  {[]string{k8 + "," + k8[1:]}, []string{k8, k8[1:]}, ""},
		"joined by many": {[]string{strings.Repeat(k+",", 16)}, nil, ect.CodeTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ect.ParseFields(c.lines)
			wantCode(t, err, c.code)
			if !slices.Equal(got, c.want) {
				t.Errorf("got %d tokens, want %d", len(got), len(c.want))
			}
		})
	}
}

// TestBodies: both media types, the array, and bodies that are somebody else's.
func TestBodies(t *testing.T) {
	for _, c := range []struct {
		media, body string
		want        []string
		ours        bool
		code        ect.Code
	}{
		{"application/exec+jwt", "a.b.c\n", []string{"a.b.c"}, true, ""},
		{"application/wimse-exec+jwt; charset=utf-8", "a.b.c", []string{"a.b.c"}, true, ""},
		{"Application/JSON", ` ["a.b.c", "d"] `, []string{"a.b.c", "d"}, true, ""},
		{"application/json", `{"a":1}`, nil, true, ect.CodeMalformed},
		{"application/json", `["a",1]`, nil, true, ect.CodeMalformed},
		{"application/json", `["a"]x`, nil, true, ect.CodeMalformed},
		{"application/json", `[""]`, nil, true, ect.CodeMalformed},
		{"application/json", `[]`, nil, true, ect.CodeMissing},
		{"application/exec+jwt", " ", nil, true, ect.CodeMissing},
		{"application/exec+jwt", strings.Repeat("a", ect.MaxToken+1), nil, true, ect.CodeTooLarge},
		{"text/plain", "a.b.c", nil, false, ""},
		{"", "a.b.c", nil, false, ""},
	} {
		got, ours, err := ect.ParseBody(c.media, []byte(c.body))
		wantCode(t, err, c.code)
		if ours != c.ours || err == nil && !slices.Equal(got, c.want) {
			t.Errorf("%s %.20s: %v %v", c.media, c.body, got, ours)
		}
	}
}
