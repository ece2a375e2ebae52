package e2e

import (
	"encoding/base64"
	"net/http"
	"testing"
)

// P1, P7: what an upstream writes into Execution-Context is anybody's text, maybe the
// client's own. It changes nothing of what became of the call, and ends nothing else.
func TestHostileTokensOfUpstreams(t *testing.T) {
	for _, text := range []string{`{"ext":{"a":"\`, `{"ext":{"\`, `{"ext":{"a":"\ud83d\`, `{`, "\xff", ``} {
		for _, settle := range []string{"", "settle async\n"} {
			t.Run(text+" "+settle, func(t *testing.T) {
				u, a := newUpstream(t), newAgent(t, "a")
				token := base64.RawURLEncoding.EncodeToString([]byte(text))
				for path, code := range map[string]int{"/done": 201, "/failed": 500} {
					u.on(path, func(w http.ResponseWriter, _ *arrival) {
						w.Header().Set("Execution-Context", token)
						w.WriteHeader(code)
					})
				}
				g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + settle + "}"})
				first := g.call(request{path: "/done", id: "done"})
				first.want(t, 201, "", "executed")
				g.call(request{path: "/failed", id: "failed"})
				eventually(t, "the replay", func() bool {
					return g.call(request{path: "/done", id: "done"}).header.Get("Idempotent-Replayed") == "true"
				})
				if n := u.arrivals("/done"); n != 1 {
					t.Errorf("P1: executed %d times", n)
				}
				got := g.call(request{path: "/new", header: map[string]string{"Execution-Context": token}})
				if text != "" && (got.status != 403 && got.status != 400 || got.slug() != "ect-invalid" || u.arrivals("/new") != 0) {
					t.Errorf("from a client: %d %s", got.status, got.body)
				}
			})
		}
	}
}
