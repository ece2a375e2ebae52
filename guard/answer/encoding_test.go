package answer_test

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
)

// The upstream is asked for nothing that a replay could not decode (RFC 9110,
// section 12.5.3).
func TestNarrowEncoding(t *testing.T) {
	for _, c := range []struct {
		accept []string
		want   string
	}{
		{[]string{"gzip"}, "gzip"},
		{[]string{"GZip"}, "gzip"},
		{[]string{"x-gzip"}, "gzip"},
		{[]string{"br, gzip, zstd"}, "gzip"},
		{[]string{"br", "gzip"}, "gzip"},
		{[]string{"gzip;q=0.1, br;q=1"}, "gzip"},
		{[]string{"gzip;q=0"}, "identity"},
		{[]string{"gzip; q=0.000"}, "identity"},
		{[]string{"gzip ; Q=0"}, "identity"},
		{[]string{"gzip;\tq=0"}, "identity"},
		{[]string{"*"}, "gzip"},
		{[]string{"*;q=0"}, "identity"},
		{[]string{"*;q=0, gzip"}, "gzip"},
		{[]string{"gzip;q=0, *"}, "identity"},
		{[]string{"*, gzip;q=0"}, "identity"},
		{[]string{"gzip;q=high"}, "identity"},
		{[]string{"br"}, "identity"},
		{[]string{"identity"}, "identity"},
		{[]string{""}, "identity"},
		{[]string{"gzipped"}, "identity"},
	} {
		h := http.Header{"Accept-Encoding": c.accept}
		answer.NarrowEncoding(h)
		if got := h["Accept-Encoding"]; len(got) != 1 || got[0] != c.want {
			t.Errorf("%q becomes %q, want %q", c.accept, got, c.want)
		}
	}
	h := http.Header{}
	answer.NarrowEncoding(h)
	if len(h) != 0 {
		t.Errorf("a request without the field gets %v", h)
	}
}
