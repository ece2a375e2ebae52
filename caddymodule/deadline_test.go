package caddymodule

import (
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// cascade 3.3.1: the gateway's deadline is shorter than its caller's, and never longer
// than the action's own.
func TestDeadlines(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        time.Duration
	}{
		{"", "", time.Minute},
		{"Request-Timeout", "10", 9 * time.Second},
		{"Request-Timeout", "0.5", 450 * time.Millisecond},
		{"Request-Timeout", "20s", 18 * time.Second},
		{"Request-Timeout", "3600", time.Minute},
		{"Request-Timeout", "0", time.Minute},
		{"Request-Timeout", "-5", time.Minute},
		{"Request-Timeout", "NaN", time.Minute},
		{"Request-Timeout", "1e300", time.Minute},
		{"Request-Timeout", "soon", time.Minute},
		{"Grpc-Timeout", "5S", 4500 * time.Millisecond},
		{"Grpc-Timeout", "100m", 90 * time.Millisecond},
		{"Grpc-Timeout", "99999999H", time.Minute},
		{"Grpc-Timeout", "S", time.Minute},
		{"Grpc-Timeout", "-1S", time.Minute},
		{"Grpc-Timeout", "123456789S", time.Minute},
	} {
		h := defaulted(t, Handler{})
		x := &exchange{h: h, r: request("POST", "/"), action: &Action{Policy: Policy{Deadline: caddy.Duration(time.Minute)}}}
		if c.name != "" {
			x.r.Header = http.Header{c.name: {c.value}}
		}
		if got := x.deadline(); got != c.want {
			t.Errorf("%s: %s: %v, want %v", c.name, c.value, got, c.want)
		}
	}
}
