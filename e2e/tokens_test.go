package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

const gatewayIdentity = "spiffe://example.com/gateway"

// agent issues tokens of its own.
type agent struct {
	t      *testing.T
	ring   *ect.Ring
	issuer *ect.Issuer
	also   []string // verifies its tokens besides the gateway
}

func newAgent(t *testing.T, name string) *agent {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer("spiffe://example.com/agent/"+name, ring)
	if err != nil {
		t.Fatal(err)
	}
	return &agent{t: t, ring: ring, issuer: issuer}
}

// issue makes a token for the gateway.
func (a *agent) issue(c ect.Claims) *ect.Token {
	a.t.Helper()
	return a.issueAt(time.Now(), c)
}

func (a *agent) issueAt(at time.Time, c ect.Claims) *ect.Token {
	a.t.Helper()
	if len(c.Audience) == 0 {
		c.Audience = append([]string{gatewayIdentity}, a.also...)
	}
	if c.Action == "" {
		c.Action = "charge_card"
	}
	token, err := a.issuer.Issue(at, c)
	if err != nil {
		a.t.Fatal(err)
	}
	return token
}

// trusting are options of the app with which the gateway has an identity and believes
// agents.
func trusting(t *testing.T, agents ...*agent) string {
	t.Helper()
	if len(agents) == 0 {
		agents = []*agent{newAgent(t, "nobody")}
	}
	// What outlives the test for a moment may write the head of its ledger yet.
	dir, err := os.MkdirTemp("", "agt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	all := struct {
		Keys []json.RawMessage `json:"keys"`
	}{}
	for _, a := range agents {
		text, err := a.ring.PublicSet(time.Now(), a.issuer.Identity())
		if err != nil {
			t.Fatal(err)
		}
		one := all
		one.Keys = nil
		if err := json.Unmarshal(text, &one); err != nil {
			t.Fatal(err)
		}
		all.Keys = append(all.Keys, one.Keys...)
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "agents.jwks")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return "identity " + gatewayIdentity + " {\n key_file " + filepath.Join(dir, "identity") + "\n }\n trust jwks_file " + path
}

// with is a call that carries a token.
func with(token *ect.Token, r request) request {
	if r.header == nil {
		r.header = map[string]string{}
	}
	r.header[ect.FieldName] = token.Raw()
	return r
}

// late reports that a call was refused and that the time of its token is over: on a slow
// machine the call may have come after it.
func (r reply) late(token *ect.Token) bool {
	return r.status == http.StatusForbidden && time.Now().After(token.Expires())
}

// refusedFor holds that a call was refused for this reason.
func (r reply) refusedFor(t *testing.T, status int, reason string) {
	t.Helper()
	var doc struct{ Type, Reason string }
	_ = json.Unmarshal([]byte(r.body), &doc)
	if r.status != status || doc.Type != "/.well-known/cascade/problems/ect-invalid" || doc.Reason != reason {
		t.Errorf("%d %s, want %d %s", r.status, r.body, status, reason)
	}
}

// A retry with the same bytes is a retry; any other second use is refused (P1).
func TestTokenIsUsedOnce(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr, badger: true})
	wid := uuid.NewString()
	token := a.issue(ect.Claims{Workflow: wid})

	first := g.call(with(token, request{path: "/pay"}))
	if first.status != http.StatusCreated || first.header.Get("Execution-Id") != token.ID() || first.header.Get("Execution-Checkpoint") == "" {
		t.Fatalf("%d %v", first.status, first.header)
	}
	again := g.call(with(token, request{path: "/pay"}))
	if again.header.Get("Execution-Status") != "replayed" || again.header.Get("Execution-Checkpoint") != first.header.Get("Execution-Checkpoint") {
		t.Errorf("%d %v", again.status, again.header)
	}
	g.call(with(token, request{path: "/other"})).refusedFor(t, 403, "replayed")
	g.call(with(token, request{path: "/pay", id: "another"})).refusedFor(t, 403, "replayed")
	g.call(with(token, request{path: "/pay", method: "GET"})).refusedFor(t, 403, "replayed")
	// Another token of the same id and workflow.
	g.call(with(a.issue(ect.Claims{Workflow: wid, ID: token.ID(), Action: "else"}), request{path: "/pay"})).refusedFor(t, 403, "replayed")
	// In another workflow the id is another one.
	if got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString(), ID: token.ID()}), request{path: "/pay2"})); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	upstream.arrived("/pay", 1)
	upstream.arrived("/other", 0)
}

// What is wrong with a token is said in one word, and nothing is forwarded.
func TestBadTokens(t *testing.T) {
	upstream, a, stranger := newUpstream(t), newAgent(t, "a"), newAgent(t, "stranger")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + upstream.addr + " {\n require_ect\n }"})
	good := func(c ect.Claims) string { return a.issue(c).Raw() }
	token := good(ect.Claims{})
	for name, c := range map[string]struct {
		field, reason string
		status        int
	}{
		"none":             {"", "missing", 403},
		"no token":         {"x", "malformed", 400},
		"stranger":         {stranger.issue(ect.Claims{}).Raw(), "kid", 403},
		"altered":          {token[:len(token)-4] + "AAAA", "signature", 403},
		"for others":       {good(ect.Claims{Audience: []string{"spiffe://example.com/else"}}), "aud", 403},
		"unknown parent":   {good(ect.Claims{Parents: []string{uuid.NewString()}}), "parent-unknown", 403},
		"another body":     {good(ect.Claims{Input: ect.Sum([]byte("x"))}), "inp_hash", 403},
		"too large":        {string(make([]byte, 0)) + "a" + string(bytesOf('a', 9<<10)), "too-large", 400},
		"second is broken": {token + ", x", "malformed", 400},
	} {
		t.Run(name, func(t *testing.T) {
			r := request{path: "/pay"}
			if c.field != "" {
				r.header = map[string]string{ect.FieldName: c.field}
			}
			g.call(r).refusedFor(t, c.status, c.reason)
			r.method = "GET"
			if c.reason != "inp_hash" {
				g.call(r).refusedFor(t, c.status, c.reason)
			}
		})
	}
	upstream.arrived("/pay", 0)
}

func bytesOf(b byte, n int) []byte {
	all := make([]byte, n)
	for i := range all {
		all[i] = b
	}
	return all
}

// Without `trust`, tokens pass through and mean nothing.
func TestTokensWithoutTrust(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := start(t, "agent_proxy %s", upstream.addr)
	token := a.issue(ect.Claims{})
	for range 2 {
		if got := g.call(with(token, request{path: "/pay", id: uuid.NewString()})); got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	if got := upstream.last("/pay").Header.Values(ect.FieldName); len(got) != 1 || got[0] != token.Raw() {
		t.Errorf("%q", got)
	}
}

// The caller is the token's issuer: neither another agent nor anybody without a token
// gets its results (P3).
func TestIssuerIsTheCaller(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr})
	wid := uuid.NewString()
	issue := func(who *agent) *ect.Token { return who.issue(ect.Claims{Workflow: wid}) }
	for _, c := range []struct {
		r    request
		want string
	}{
		{with(issue(a), request{path: "/pay", id: "one"}), "executed"},
		{with(issue(a), request{path: "/pay", id: "one"}), "replayed"},
		{with(issue(b), request{path: "/pay", id: "one"}), "executed"},
		{request{path: "/pay", id: "one"}, "executed"},
	} {
		if got := g.call(c.r); got.header.Get("Execution-Status") != c.want {
			t.Errorf("%d %v %s, want %s", got.status, got.header, got.body, c.want)
		}
	}
	if got := upstream.last("/pay").Header.Get("Workflow-Id"); got != "" {
		t.Errorf("Workflow-Id %q of a call without one", got)
	}
	upstream.arrived("/pay", 3)
}

// An upstream with an identity gets the gateway's checkpoint as a token, which it can
// name as the parent of its own.
func TestForwardedToken(t *testing.T) {
	upstream, a, downstream := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, downstream), site: "agent_proxy " + upstream.addr + " {\n identity " + downstream.issuer.Identity() + "\n }"})
	wid := uuid.NewString()
	token := a.issue(ect.Claims{Workflow: wid, Audience: []string{gatewayIdentity, downstream.issuer.Identity()}})
	first := g.call(with(token, request{path: "/pay"}))
	lines := upstream.last("/pay").Header.Values(ect.FieldName)
	if len(lines) != 2 || lines[0] != token.Raw() {
		t.Fatalf("%q", lines)
	}
	ours, err := ect.ParseInsecure(lines[1])
	if err != nil || ours.Event() != ect.EventCheckpoint || ours.ID() != first.header.Get("Execution-Checkpoint") ||
		len(ours.Parents()) != 1 || ours.Parents()[0] != token.ID() || ours.Workflow() != wid || ours.Audience()[1] != downstream.issuer.Identity() {
		t.Fatalf("%v %+v", err, ours)
	}
	nested := downstream.issue(ect.Claims{Workflow: wid, Parents: []string{ours.ID()}})
	if got := g.call(with(nested, request{path: "/nested"})); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	// It may hand our token on beside its own.
	r := request{path: "/both", header: map[string]string{
		ect.FieldName: lines[1] + ", " + downstream.issue(ect.Claims{Workflow: wid, Parents: []string{ours.ID()}}).Raw(),
	}}
	for range 2 {
		if got := g.call(r); got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	upstream.arrived("/both", 1)
}

// A request that passes two guards is one use of its token, whatever their names.
func TestTokensPassTwoGuards(t *testing.T) {
	for _, name := range []string{"default shared", "inner"} {
		t.Run(name, func(t *testing.T) { tokensPassTwoGuards(t, name, "") })
	}
	// The outer one adds a token of the gateway's own, and may keep the caller's (ADR 0086).
	t.Run("with an identity", func(t *testing.T) { tokensPassTwoGuards(t, "inner", "identity spiffe://example.com/upstream") })
}

func tokensPassTwoGuards(t *testing.T, name, outer string) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "route {\n agent_guard {\n name default shared\n require_ect\n " + outer + "\n }\n uri path_regexp ^/v1 /v2\n agent_proxy " + upstream.addr + " {\n name " + name + "\n require_ect\n }\n }"})
	for _, method := range []string{"GET", "POST"} {
		token := a.issue(ect.Claims{Workflow: uuid.NewString()})
		for range 2 {
			if got := g.call(with(token, request{method: method, path: "/v1/pay"})); got.status != http.StatusCreated {
				t.Errorf("%s: %d %s", method, got.status, got.body)
			}
		}
	}
	upstream.arrived("/v2/pay", 3)
	// A hash of the body is compared once.
	r := request{path: "/v1/pay", body: "amount=1"}
	hashed := with(a.issue(ect.Claims{Workflow: uuid.NewString(), Input: ect.Sum([]byte(r.body))}), r)
	if got := g.call(hashed); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// A token that is for the gateway alone is not sent on to an upstream with an identity, which would
// have to refuse the call because of it (ADR 0086); one that is also for others is.
func TestTokensForTheGatewayStayThere(t *testing.T) {
	const name = "spiffe://example.com/upstream"
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + upstream.addr + " {\n identity " + name + "\n }", badger: true})
	sent := func() (all []string) {
		for _, raw := range upstream.last("/pay").Header[ect.FieldName] {
			token, err := ect.ParseInsecure(raw)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, token.Issuer())
		}
		return all
	}
	for _, c := range []struct {
		also []string
		want []string
	}{
		{nil, []string{gatewayIdentity}},
		{[]string{a.issuer.Identity()}, []string{gatewayIdentity}}, // its own copy
		{[]string{name}, []string{a.issuer.Identity(), gatewayIdentity}},
		{[]string{"https://upstream.example.com"}, []string{a.issuer.Identity(), gatewayIdentity}}, // perhaps the upstream's other name
	} {
		a.also = c.also
		token := a.issue(ect.Claims{Workflow: uuid.NewString()})
		if got := g.call(with(token, request{path: "/pay"})); got.status != http.StatusCreated {
			t.Fatalf("%v: %d %s", c.also, got.status, got.body)
		}
		if got := sent(); !slices.Equal(got, c.want) {
			t.Errorf("with %v the upstream got tokens of %v, want %v", c.also, got, c.want)
		}
	}
}

// P3: without a token nobody gets into a workflow of tokens by knowing its id, but by
// having been called from it.
func TestJoiningAWorkflow(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + upstream.addr + " {\n name outer\n }", badger: true})
	wid := uuid.NewString()
	first := g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/pay"}))
	arrived := upstream.last("/pay").Header
	if arrived.Get("Workflow-Id") != wid || arrived.Get("Execution-Parent") != first.header.Get("Execution-Id") {
		t.Fatalf("%v", arrived)
	}
	nested := func(parent string) string {
		t.Helper()
		got := g.call(request{path: "/nested", header: map[string]string{
			"Workflow-Id": wid, "Execution-Parent": parent, "X-Api-Key": "downstream",
		}})
		if got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return got.header.Get("Execution-Checkpoint")
	}
	joined, stranger := nested(arrived.Get("Execution-Parent")), nested("guessed")
	g.settledView(a, wid, 5) // the nested call's two nodes among them
	look := func(id, wait string) reply {
		return g.call(with(a.issue(ect.Claims{Workflow: wid, Action: "look"}), request{
			method: "GET", path: "/.well-known/cascade/ledger/entries?jti=" + id + "&wid=" + wid + "&wait=" + wait,
		}))
	}
	if got := look(joined, "10s"); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := look(stranger, "1s"); got.status != http.StatusNotFound {
		t.Errorf("%d %s", got.status, got.body)
	}
}
