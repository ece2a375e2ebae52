package table

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

const gatewayIdentity = "spiffe://example.com/gateway"

// caller has a token for every call.
type caller struct {
	ring   *ect.Ring
	issuer *ect.Issuer
}

func newCaller(alg ect.Algorithm) (*caller, error) {
	ring, err := ect.GenerateRing(alg)
	if err != nil {
		return nil, err
	}
	issuer, err := ect.NewIssuer("spiffe://example.com/agent", ring)
	return &caller{ring, issuer}, err
}

// publish writes the caller's public key where a gateway can trust it.
func (c *caller) publish(path string) error {
	set, err := c.ring.PublicSet(time.Now(), c.issuer.Identity())
	if err != nil {
		return err
	}
	return os.WriteFile(path, set, 0o600)
}

// callsOfWorkflow is how many tokens share a workflow, so that none reaches a quota of its
// workflow, and no workflow grows beyond what agents make.
const callsOfWorkflow = 1000

// tokens signs n tokens, each of which names a call of its own. All have the same length.
func (c *caller) tokens(n int) (*tokens, error) {
	t := &tokens{raw: make([]string, n)}
	workflows, now := make([]string, (n+callsOfWorkflow-1)/callsOfWorkflow), time.Now()
	for i := range workflows {
		workflows[i] = uuid.NewString()
	}
	var next atomic.Int64
	var all sync.WaitGroup
	var failed atomic.Pointer[error]
	for range signers {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				token, err := c.issuer.Issue(now, ect.Claims{Audience: []string{gatewayIdentity}, Workflow: workflows[i/callsOfWorkflow], Action: "charge_card"})
				if err != nil {
					failed.Store(&err)
					return
				}
				t.raw[i] = token.Raw()
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	return t, nil
}

// signers is how many goroutines sign.
const signers = 4

// tokens are given out one after the other.
type tokens struct {
	raw  []string
	next atomic.Int64
}

// append gives the next one. After the last it begins anew, which a gateway that
// verifies them refuses.
func (t *tokens) append(b []byte) []byte {
	return append(b, t.raw[int(t.next.Add(1)-1)%len(t.raw)]...)
}
