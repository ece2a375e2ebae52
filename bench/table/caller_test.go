package table

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// No workflow has more tokens than it is to have, every token names a call of its own,
// and all are of one length, with both algorithms.
func TestTokensAreSpreadOverWorkflows(t *testing.T) {
	for _, alg := range []ect.Algorithm{ect.ES256, ect.EdDSA} {
		c, err := newCaller(alg)
		if err != nil {
			t.Fatal(err)
		}
		const n = callsOfWorkflow + 10
		all, err := c.tokens(n)
		if err != nil {
			t.Fatal(err)
		}
		workflows, ids, lengths := map[string]int{}, map[string]int{}, map[int]int{}
		for range n {
			raw := string(all.append(nil))
			lengths[len(raw)]++
			text, err := base64.RawURLEncoding.DecodeString(strings.Split(raw, ".")[1])
			if err != nil {
				t.Fatal(err)
			}
			var claims struct{ Wid, Jti string }
			if err := json.Unmarshal(text, &claims); err != nil {
				t.Fatal(err)
			}
			workflows[claims.Wid]++
			ids[claims.Jti]++
		}
		if len(workflows) != 2 || len(ids) != n || len(lengths) != 1 {
			t.Errorf("%s: %d workflows, %d ids, %d lengths of %d tokens", alg, len(workflows), len(ids), len(lengths), n)
		}
		for id, calls := range workflows {
			if calls > callsOfWorkflow {
				t.Errorf("%s: workflow %q has %d tokens", alg, id, calls)
			}
		}
	}
}
