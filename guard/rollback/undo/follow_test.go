package undo_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// A Location is hostile: it leads nowhere but to the origin that it came from.
func FuzzFollow(f *testing.F) {
	for _, location := range []string{
		"/jobs/1", "jobs", "?x", "//api.example/a", "//evil/a", "http://api.example//evil/a", "https://agent.example/x", "https://agent.example@evil/",
		"///evil/x", `/\evil`, `\\evil`, "http:/x", "/..//evil", "/%2f/evil", "http://[::1]/", "https:opaque",
	} {
		f.Add(location)
	}
	f.Fuzz(func(t *testing.T, location string) {
		if got := undo.Follow("/refunds/1", "api.example", location); got != "" {
			u, err := url.Parse(got)
			if err != nil || u.Host != "" || u.Scheme != "" || !strings.HasPrefix(got, "/") || strings.HasPrefix(got, "//") || strings.ContainsAny(got, "\r\n #") {
				t.Errorf("%q leads to %q", location, got)
			}
		}
		if got := undo.Follow("https://agent.example/rollback", "", location); got != "" {
			u, err := url.Parse(got)
			if err != nil || !strings.EqualFold(u.Host, "agent.example") || u.Scheme != "https" || u.User != nil || strings.ContainsAny(got, "\r\n #") {
				t.Errorf("%q leads to %q", location, got)
			}
		}
	})
}
