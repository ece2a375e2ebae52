package breaker

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// signs answers with tokens, which are made when the call has come.
func signs(make ...func() string) func(http.ResponseWriter, *harness.Arrival) {
	return func(w http.ResponseWriter, _ *harness.Arrival) {
		for _, token := range make {
			w.Header().Add(ect.FieldName, token())
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "signed")
	}
}

// verifying is the block of a breaker that holds probes to an identity.
func verifying(upstream, identity string) string {
	return fmt.Sprintf("breaker {\n cooldown 10h\n downstream %s %s\n verify_probe\n }", upstream, identity)
}

// unsigned is a token of level L1: claims that nobody has signed.
func unsigned(issuer string) string {
	now := time.Now().Unix()
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"iss":%q,"aud":[%q],"iat":%d,"exp":%d,"jti":%q,"exec_act":"answer","par":[]}`,
		issuer, harness.GatewayIdentity, now, now+60, uuid.NewString()))
}

// cascade 6.2: a probe closes the breaker only if a token of the upstream's identity
// comes with the answer.
func TestProbeIsVerifiedByToken(t *testing.T) {
	u, b, other, stranger := harness.NewUpstream(t), harness.NewAgent(t, "b"), harness.NewAgent(t, "c"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{
		App: harness.Trusting(t, b, other) + "\n trust {\n min_level L1\n }", Badger: true,
		Site: "agent_proxy " + u.Addr + " {\n" + verifying(u.Addr, b.Issuer.Identity()) + "\n }",
	})
	of := func(a *harness.Agent) func() string { return func() string { return a.Issue(ect.Claims{}).Raw() } }
	once := b.Issue(ect.Claims{})
	called := b.Issue(ect.Claims{})
	u.On("/called", harness.Status(429, "later")) // which releases the call
	if got := g.Call(harness.With(called, harness.Request{Path: "/called"})); got.Status != http.StatusTooManyRequests {
		t.Fatal(got)
	}
	tests := []struct {
		name  string
		make  []func() string
		cause string // without what all have in common
	}{
		{"the upstream", []func() string{of(b)}, ""},
		{"the upstream, beside what it hands on", []func() string{of(other), of(stranger), of(b)}, ""},
		{"a token for the first time", []func() string{once.Raw}, ""},
		{"a token for the second time", []func() string{once.Raw}, "its token is refused (replayed)"},
		{"the token of a call", []func() string{called.Raw}, "its token is refused (replayed)"},
		{"another", []func() string{of(other)}, "its token is refused (iss)"},
		{"a signature of somebody else's", []func() string{of(stranger)}, "its token is refused (kid)"},
		{"a signature that does not hold", []func() string{func() string { return forge(of(b)()) }}, "its token is refused (signature)"},
		{"nobody's signature", []func() string{func() string { return unsigned(b.Issuer.Identity()) }}, "its token is refused (level)"},
		{"a token for another gateway", []func() string{func() string {
			return b.Issue(ect.Claims{Audience: []string{"spiffe://example.com/else"}}).Raw()
		}}, "its token is refused (aud)"},
		{"a token from before the probe", []func() string{func() string {
			token, err := b.Issuer.Issue(time.Now().Add(-2*time.Minute), ect.Claims{Audience: []string{harness.GatewayIdentity}, Action: "answer"})
			if err != nil {
				panic(err)
			}
			return token.Raw()
		}}, "its token is refused (too-old)"},
		{"no token", []func() string{func() string { return "" }}, "its token is refused (missing)"},
		{"nothing", nil, "it has proven nothing"},
	}
	probes := func(i int, r harness.Request) {
		t.Helper()
		test := tests[i]
		t.Run(test.name, func(t *testing.T) {
			r.Path = fmt.Sprint("/", i)
			u.On(r.Path, signs(test.make...))
			s := g.Probe(u, r)
			if test.cause == "" {
				if s.State != breaker.Closed {
					t.Errorf("%+v", s)
				}
			} else if s.State != breaker.Open || s.Cause != "probe answered by somebody else: "+test.cause {
				t.Errorf("%+v, want %q", s, test.cause)
			}
		})
	}
	for i := 0; i < len(tests); i += 2 {
		probes(i, harness.Request{Method: "POST", Id: uuid.NewString()})
	}
	for i := 1; i < len(tests); i += 2 { // last, since others would wait for such a call from then on
		probes(i, harness.Request{Method: "GET"})
	}
	// A call may still be tried again, though an answer has come with its token.
	harness.Force(t, u.Addr, breaker.ForcedClosed)
	u.On("/called", signs())
	g.Call(harness.With(called, harness.Request{Path: "/called"})).Want(t, 201, "signed", "executed")
}

// forge changes what a token says and leaves its signature.
func forge(raw string) string {
	parts := strings.Split(raw, ".")
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		panic(err)
	}
	parts[1] = base64.RawURLEncoding.EncodeToString([]byte(strings.Replace(string(payload), "charge_card", "charge_cart", 1)))
	return strings.Join(parts, ".")
}

// Whoever calls, the probe is verified: also where no guard stands before the proxy. A
// certificate that is not verified proves nothing, and a token does beside it.
func TestProbeIsVerifiedWithoutAGuard(t *testing.T) {
	u, b := harness.NewTLSUpstream(t), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, b), Badger: true, Site: "reverse_proxy " + u.Addr +
		" {\n transport agent_guard {\n tls_insecure_skip_verify\n" + verifying(u.Addr, b.Issuer.Identity()) + "\n }\n }"})
	g.Call(harness.Request{Path: "/"})
	u.On("/none", signs())
	u.On("/token", signs(func() string { return b.Issue(ect.Claims{}).Raw() }))
	if s := g.Probe(u, harness.Request{Path: "/none"}); s.State != breaker.Open || s.Cause != "probe answered by somebody else: its certificate is not verified" {
		t.Errorf("%+v", s)
	}
	if s := g.Probe(u, harness.Request{Path: "/token"}); s.State != breaker.Closed {
		t.Errorf("%+v", s)
	}
}

// Without the option anybody's answer closes the breaker.
func TestProbeIsNotVerifiedUnlessAsked(t *testing.T) {
	u, b := harness.NewUpstream(t), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, b), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" +
		strings.Replace(verifying(u.Addr, b.Issuer.Identity()), "verify_probe", "", 1) + "\n }"})
	g.Call(harness.Request{Path: "/"})
	u.On("/none", signs())
	if s := g.Probe(u, harness.Request{Path: "/none", Id: "k"}); s.State != breaker.Closed {
		t.Errorf("%+v", s)
	}
}
