package transport_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

const identity = "spiffe://example.com/agent/b"

// cascade 6.2: a probe closes the breaker only if its upstream has answered it, whose
// certificate has its identity. The answer goes to the caller all the same.
func TestProbeIsVerifiedByCertificate(t *testing.T) {
	const other = "spiffe://example.com/agent/c"
	for name, test := range map[string]struct {
		uris    []string
		verify  bool
		closes  bool
		guarded bool
	}{
		"the upstream":                   {uris: []string{identity}, verify: true, closes: true},
		"the upstream, and others":       {uris: []string{other, identity}, verify: true, closes: true},
		"the upstream of a guarded call": {uris: []string{identity}, verify: true, closes: true, guarded: true},
		"another":                        {uris: []string{other}, verify: true},
		"another, of a guarded call":     {uris: []string{other}, verify: true, guarded: true},
		"one whose name is longer":       {uris: []string{identity + "2"}, verify: true},
		"nobody by name":                 {verify: true},
		"another, which nobody asks":     {uris: []string{other}, closes: true},
	} {
		t.Run(name, func(t *testing.T) {
			cert := certificate(t, test.uris...)
			up := listen(t, &tls.Config{Certificates: []tls.Certificate{cert}}, (*serverConn).okAgain)
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", "tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}},
				"breaker": {"probe_prefer": -1, "cooldown": "10h", "verify_probe": %v, "downstream": {"%s": "%s"}}}, "upstreams": [{"dial": "%s"}]}`,
				base64.StdEncoding.EncodeToString(cert.Certificate[0]), test.verify, up.addr, identity, up.addr)
			// What is no probe is not verified.
			if err := unguarded(p, request("GET", "")); err != nil {
				t.Fatal(err)
			}
			if s := statusOf(t, up.addr); s.Calls != 1 || s.Failures != 0 {
				t.Fatalf("%+v", s)
			}
			halfOpen(t, p, up.addr)
			if test.guarded {
				if o := forward(p, request("POST", "x")); o.status != 200 {
					t.Fatal(o)
				}
			} else if err := unguarded(p, request("GET", "")); err != nil {
				t.Fatal(err)
			}
			s := statusOf(t, up.addr)
			if test.closes {
				if s.State != breaker.Closed {
					t.Errorf("%+v", s)
				}
				return
			}
			if want := "probe answered by somebody else: its certificate is not that of " + identity; s.State != breaker.Open || s.Cause != want || s.FailedProbes != 1 {
				t.Errorf("%+v, want %q", s, want)
			}
		})
	}
}

// Where nobody can say whose a token is, the probe fails, too; unless its caller has left
// meanwhile, which says nothing.
func TestProbeThatCannotBeVerified(t *testing.T) {
	cert := certificate(t)
	up := listen(t, &tls.Config{Certificates: []tls.Certificate{cert}}, says("HTTP/1.1 200 OK\r\nExecution-Context: token\r\nContent-Length: 0\r\n\r\n"))
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}},
		"breaker": {"probe_prefer": -1, "cooldown": "10h", "verify_probe": true, "downstream": {"%s": "%s"}}}, "upstreams": [{"dial": "%s"}]}`,
		base64.StdEncoding.EncodeToString(cert.Certificate[0]), up.addr, identity, up.addr)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for _, test := range []struct {
		name   string
		verify error
		state  breaker.State
		cause  string
	}{
		{"verified", nil, breaker.Closed, ""},
		{"refused", &ect.Error{Code: ect.CodeKeyID}, breaker.Open, "probe answered by somebody else: its token is refused (kid)"},
		{"unknown", ect.ErrUnavailable, breaker.Open, "probe not verified: the token of its answer cannot be checked at the moment"},
		{"left", context.Canceled, breaker.HalfOpen, ""},
	} {
		began := time.Now()
		transport.VerifyWith(p.transport(t), func(of context.Context, header http.Header, issuer string, since time.Time) error {
			if header.Get(ect.FieldName) != "token" || issuer != identity || since.Before(began) || since.After(time.Now()) {
				t.Errorf("%s: asked for a token of %s since %v in %v", test.name, issuer, since, header)
			}
			if test.verify == context.Canceled {
				leave()
				return of.Err()
			}
			return test.verify
		})
		halfOpen(t, p, up.addr)
		_ = unguarded(p, request("GET", "").WithContext(ctx)) // what becomes of the breaker matters
		if s := statusOf(t, up.addr); s.State != test.state || s.Probing || test.cause != "" && s.Cause != test.cause {
			t.Errorf("%s: %+v", test.name, s)
		}
	}
}

// A transport that can verify nobody is refused when it is loaded, not when a probe fails.
func TestVerifyProbeNeedsSomebodyToVerify(t *testing.T) {
	for name, test := range map[string]struct{ options, want string }{
		"no identity":         {`"tls": {}, "breaker": {"verify_probe": true}`, "breaker: verify_probe: there is no identity"},
		"another's identity":  {`"tls": {}, "breaker": {"verify_probe": true, "downstream": {"localhost:2": "spiffe://a/b"}}`, "verify_probe: localhost:1 has no identity"},
		"no proof":            {`"breaker": {"verify_probe": true, "downstream": {"localhost:1": "spiffe://a/b"}}`, "verify_probe: nothing can prove who answers"},
		"proof not looked at": {`"tls": {"insecure_skip_verify": true}, "breaker": {"verify_probe": true, "downstream": {"localhost:1": "spiffe://a/b"}}`, "verify_probe: nothing can prove who answers"},
		"all":                 {`"tls": {}, "breaker": {"verify_probe": true, "downstream": {"localhost:1": "spiffe://a/b"}}`, ""},
		"off":                 {`"breaker": {"off": true, "verify_probe": true}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := caddy.NewContext(caddy.ActiveContext())
			defer cancel()
			_, err := ctx.LoadModuleByID("http.handlers.reverse_proxy", fmt.Appendf(nil,
				`{"transport": {"protocol": "agent_guard", %s}, "upstreams": [{"dial": "localhost:1"}]}`, test.options))
			if (test.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}
