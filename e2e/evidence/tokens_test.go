package evidence

import (
	"net/http"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A retry with the same bytes is a retry; any other second use is refused (P1).
func TestTokenIsUsedOnce(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr, Badger: true})
	wid := uuid.NewString()
	token := a.Issue(ect.Claims{Workflow: wid})

	first := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	if first.Status != http.StatusCreated || first.Header.Get("Execution-Id") != token.ID() || first.Header.Get("Execution-Checkpoint") == "" {
		t.Fatalf("%d %v", first.Status, first.Header)
	}
	again := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	if again.Header.Get("Execution-Status") != "replayed" || again.Header.Get("Execution-Checkpoint") != first.Header.Get("Execution-Checkpoint") {
		t.Errorf("%d %v", again.Status, again.Header)
	}
	g.Call(harness.With(token, harness.Request{Path: "/other"})).RefusedFor(t, 403, "replayed")
	g.Call(harness.With(token, harness.Request{Path: "/pay", Id: "another"})).RefusedFor(t, 403, "replayed")
	g.Call(harness.With(token, harness.Request{Path: "/pay", Method: "GET"})).RefusedFor(t, 403, "replayed")
	// Another token of the same id and workflow.
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid, ID: token.ID(), Action: "else"}), harness.Request{Path: "/pay"})).RefusedFor(t, 403, "replayed")
	// In another workflow the id is another one.
	if got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString(), ID: token.ID()}), harness.Request{Path: "/pay2"})); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	upstream.Arrived("/pay", 1)
	upstream.Arrived("/other", 0)
}

// What is wrong with a token is said in one word, and nothing is forwarded.
func TestBadTokens(t *testing.T) {
	upstream, a, stranger := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "stranger")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + upstream.Addr + " {\n require_ect\n }"})
	good := func(c ect.Claims) string { return a.Issue(c).Raw() }
	token := good(ect.Claims{})
	for name, c := range map[string]struct {
		field, reason string
		status        int
	}{
		"none":             {"", "missing", 403},
		"no token":         {"x", "malformed", 400},
		"stranger":         {stranger.Issue(ect.Claims{}).Raw(), "kid", 403},
		"altered":          {token[:len(token)-4] + "AAAA", "signature", 403},
		"for others":       {good(ect.Claims{Audience: []string{"spiffe://example.com/else"}}), "aud", 403},
		"unknown parent":   {good(ect.Claims{Parents: []string{uuid.NewString()}}), "parent-unknown", 403},
		"another body":     {good(ect.Claims{Input: ect.Sum([]byte("x"))}), "inp_hash", 403},
		"too large":        {string(make([]byte, 0)) + "a" + string(bytesOf('a', 9<<10)), "too-large", 400},
		"second is broken": {token + ", x", "malformed", 400},
	} {
		t.Run(name, func(t *testing.T) {
			r := harness.Request{Path: "/pay"}
			if c.field != "" {
				r.Header = map[string]string{ect.FieldName: c.field}
			}
			g.Call(r).RefusedFor(t, c.status, c.reason)
			r.Method = "GET"
			if c.reason != "inp_hash" {
				g.Call(r).RefusedFor(t, c.status, c.reason)
			}
		})
	}
	upstream.Arrived("/pay", 0)
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
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Start(t, "agent_proxy %s", upstream.Addr)
	token := a.Issue(ect.Claims{})
	for range 2 {
		if got := g.Call(harness.With(token, harness.Request{Path: "/pay", Id: uuid.NewString()})); got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	if got := upstream.Last("/pay").Header.Values(ect.FieldName); len(got) != 1 || got[0] != token.Raw() {
		t.Errorf("%q", got)
	}
}

// The caller is the token's issuer: neither another agent nor anybody without a token
// gets its results (P3).
func TestIssuerIsTheCaller(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr})
	wid := uuid.NewString()
	issue := func(who *harness.Agent) *ect.Token { return who.Issue(ect.Claims{Workflow: wid}) }
	for _, c := range []struct {
		r    harness.Request
		want string
	}{
		{harness.With(issue(a), harness.Request{Path: "/pay", Id: "one"}), "executed"},
		{harness.With(issue(a), harness.Request{Path: "/pay", Id: "one"}), "replayed"},
		{harness.With(issue(b), harness.Request{Path: "/pay", Id: "one"}), "executed"},
		{harness.Request{Path: "/pay", Id: "one"}, "executed"},
	} {
		if got := g.Call(c.r); got.Header.Get("Execution-Status") != c.want {
			t.Errorf("%d %v %s, want %s", got.Status, got.Header, got.Body, c.want)
		}
	}
	if got := upstream.Last("/pay").Header.Get("Workflow-Id"); got != "" {
		t.Errorf("Workflow-Id %q of a call without one", got)
	}
	upstream.Arrived("/pay", 3)
}

// An upstream with an identity gets the gateway's checkpoint as a token, which it can
// name as the parent of its own.
func TestForwardedToken(t *testing.T) {
	upstream, a, downstream := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, downstream), Site: "agent_proxy " + upstream.Addr + " {\n identity " + downstream.Issuer.Identity() + "\n }"})
	wid := uuid.NewString()
	token := a.Issue(ect.Claims{Workflow: wid, Audience: []string{harness.GatewayIdentity, downstream.Issuer.Identity()}})
	first := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	lines := upstream.Last("/pay").Header.Values(ect.FieldName)
	if len(lines) != 2 || lines[0] != token.Raw() {
		t.Fatalf("%q", lines)
	}
	ours, err := ect.ParseInsecure(lines[1])
	if err != nil || ours.Event() != ect.EventCheckpoint || ours.ID() != first.Header.Get("Execution-Checkpoint") ||
		len(ours.Parents()) != 1 || ours.Parents()[0] != token.ID() || ours.Workflow() != wid || ours.Audience()[1] != downstream.Issuer.Identity() {
		t.Fatalf("%v %+v", err, ours)
	}
	nested := downstream.Issue(ect.Claims{Workflow: wid, Parents: []string{ours.ID()}})
	if got := g.Call(harness.With(nested, harness.Request{Path: "/nested"})); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	// It may hand our token on beside its own.
	r := harness.Request{Path: "/both", Header: map[string]string{
		ect.FieldName: lines[1] + ", " + downstream.Issue(ect.Claims{Workflow: wid, Parents: []string{ours.ID()}}).Raw(),
	}}
	for range 2 {
		if got := g.Call(r); got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	upstream.Arrived("/both", 1)
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
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "route {\n agent_guard {\n name default shared\n require_ect\n " + outer + "\n }\n uri path_regexp ^/v1 /v2\n agent_proxy " + upstream.Addr + " {\n name " + name + "\n require_ect\n }\n }"})
	for _, method := range []string{"GET", "POST"} {
		token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
		for range 2 {
			if got := g.Call(harness.With(token, harness.Request{Method: method, Path: "/v1/pay"})); got.Status != http.StatusCreated {
				t.Errorf("%s: %d %s", method, got.Status, got.Body)
			}
		}
	}
	upstream.Arrived("/v2/pay", 3)
	// A hash of the body is compared once.
	r := harness.Request{Path: "/v1/pay", Body: "amount=1"}
	hashed := harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString(), Input: ect.Sum([]byte(r.Body))}), r)
	if got := g.Call(hashed); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// A token that is for the gateway alone is not sent on to an upstream with an identity, which would
// have to refuse the call because of it (ADR 0086); one that is also for others is.
func TestTokensForTheGatewayStayThere(t *testing.T) {
	const name = "spiffe://example.com/upstream"
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + upstream.Addr + " {\n identity " + name + "\n }", Badger: true})
	sent := func() (all []string) {
		for _, raw := range upstream.Last("/pay").Header[ect.FieldName] {
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
		{nil, []string{harness.GatewayIdentity}},
		{[]string{a.Issuer.Identity()}, []string{harness.GatewayIdentity}}, // its own copy
		{[]string{name}, []string{a.Issuer.Identity(), harness.GatewayIdentity}},
		{[]string{"https://upstream.example.com"}, []string{a.Issuer.Identity(), harness.GatewayIdentity}}, // perhaps the upstream's other name
	} {
		a.Also = c.also
		token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
		if got := g.Call(harness.With(token, harness.Request{Path: "/pay"})); got.Status != http.StatusCreated {
			t.Fatalf("%v: %d %s", c.also, got.Status, got.Body)
		}
		if got := sent(); !slices.Equal(got, c.want) {
			t.Errorf("with %v the upstream got tokens of %v, want %v", c.also, got, c.want)
		}
	}
}

// P3: without a token nobody gets into a workflow of tokens by knowing its id, but by
// having been called from it.
func TestJoiningAWorkflow(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + upstream.Addr + " {\n name outer\n }", Badger: true})
	wid := uuid.NewString()
	first := g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/pay"}))
	arrived := upstream.Last("/pay").Header
	if arrived.Get("Workflow-Id") != wid || arrived.Get("Execution-Parent") != first.Header.Get("Execution-Id") {
		t.Fatalf("%v", arrived)
	}
	nested := func(parent string) string {
		t.Helper()
		got := g.Call(harness.Request{Path: "/nested", Header: map[string]string{
			"Workflow-Id": wid, "Execution-Parent": parent, "X-Api-Key": "downstream",
		}})
		if got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return got.Header.Get("Execution-Checkpoint")
	}
	joined, stranger := nested(arrived.Get("Execution-Parent")), nested("guessed")
	g.SettledView(a, wid, 5) // the nested call's two nodes among them
	look := func(id, wait string) harness.Reply {
		return g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid, Action: "look"}), harness.Request{
			Method: "GET", Path: "/.well-known/cascade/ledger/entries?jti=" + id + "&wid=" + wid + "&wait=" + wait,
		}))
	}
	if got := look(joined, "10s"); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := look(stranger, "1s"); got.Status != http.StatusNotFound {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}
