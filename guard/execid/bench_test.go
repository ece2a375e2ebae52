package execid_test

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execid"
)

// BenchmarkParseHeader reads an id as most clients send it, and as the draft asks.
func BenchmarkParseHeader(b *testing.B) {
	for _, c := range []struct{ name, line string }{
		{"raw", `8e03978e-40d5-43dd-bc93-6894a57f9324`},
		{"quoted", `"8e03978e-40d5-43dd-bc93-6894a57f9324"`},
		{"escaped", `"8e03978e-40d5-43dd-bc93-\\6894a57f9324"`},
	} {
		b.Run(c.name, func(b *testing.B) {
			lines := []string{c.line}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := execid.ParseHeader(lines); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
