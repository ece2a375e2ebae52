package router

import (
	"net/http"
	"slices"
	"strings"
	"testing"
)

// FuzzAccept: whatever stands in Accept, one of the offered forms is sent, and never one that is
// refused beside one that is accepted.
func FuzzAccept(f *testing.F) {
	for _, seed := range []string{
		"", "*/*", "image/svg+xml", "IMAGE/SVG+XML;Q=0.3, application/json;q=0.2", "text/*;q=1.1", "image/*;q=NaN", ",,;q", "a/b;q=\"0.5\"", "*/*;q=0, text/vnd.graphviz;q=0.001",
	} {
		f.Add(seed)
	}
	offered := []string{"application/json", mediaDOT, mediaSVG}
	f.Fuzz(func(t *testing.T, accept string) {
		got := Preferred(&http.Request{Header: http.Header{"Accept": {accept}}}, offered...)
		if !slices.Contains(offered, got) {
			t.Fatalf("%q gets %q", accept, got)
		}
		if strings.ContainsAny(accept, "\",;") {
			return
		}
		for _, one := range offered { // a list of one, of full quality
			if strings.EqualFold(strings.TrimSpace(accept), one) && got != one {
				t.Fatalf("%q gets %q", accept, got)
			}
		}
	})
}
