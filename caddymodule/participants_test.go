package caddymodule

import "testing"

// C-4.3.1-e: a token does not choose who is asked: scheme, host, port and issuer must be named, and
// only the path is the token's.
func TestParticipantAt(t *testing.T) {
	const agent = "spiffe://example.com/agent/x"
	o := Rollback{Participants: []Participant{
		{"https://x.example.com/.well-known/cascade/rollback", agent},
		{"http://127.0.0.1:9005/rollback", agent},
	}}
	for uri, want := range map[string]string{
		"https://x.example.com/other/rollback":   "https://x.example.com/other/rollback",
		"https://X.example.com:443/rollback/":    "https://x.example.com/rollback",
		"https://x.example.com/a%2Fb/rollback":   "https://x.example.com/a%2Fb/rollback",
		"http://127.0.0.1:9005/rollback":         "http://127.0.0.1:9005/rollback",
		"http://x.example.com/rollback":          "",
		"https://x.example.com:8443/rollback":    "",
		"https://x.example.com.evil/rollback":    "",
		"https://evil.example/x.example.com":     "",
		"https://x.example.com@evil/rollback":    "",
		"https://u:p@x.example.com/rollback":     "",
		"https://x.example.com/rollback?to=evil": "",
		"https://x.example.com/rollback?":        "",
		"https://x.example.com/rollback#part":    "",
		"https://x.example.com/{env.SECRET}":     "",
		"https://x.example.com":                  "",
		"https://x.example.com/":                 "",
		"https://127.0.0.1:9005/rollback":        "",
		"http://localhost:9005/rollback":         "",
		"//x.example.com/rollback":               "",
		"/rollback":                              "",
		"":                                       "",
		"https://x.example.com/\nHost: evil":     "",
	} {
		if got := o.participantAt(agent, uri); got != want {
			t.Errorf("%q is asked at %q, want %q", uri, got, want)
		}
		if got := o.participantAt("spiffe://example.com/agent/y", uri); got != "" {
			t.Errorf("%q of another issuer is asked at %q", uri, got)
		}
	}
}
