package caller_test

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// host is a host whose placeholders are header fields, and the user that it is.
type host string

func (user host) User(*http.Request) string { return string(user) }

func (user host) Expand(r *http.Request, text string) (string, bool) {
	whole := true
	text = regexp.MustCompile(`\{[^}]*\}`).ReplaceAllStringFunc(text, func(name string) string {
		value := ""
		if field, ok := strings.CutPrefix(strings.Trim(name, "{}"), "http.request.header."); ok {
			value = r.Header.Get(field)
		} else if name == "{http.auth.user.id}" {
			value = string(user)
		}
		whole = whole && value != ""
		return value
	})
	return text, whole
}

func request(fields ...string) *http.Request {
	r := httptest.NewRequest("POST", "/", nil)
	for i := 0; i < len(fields); i += 2 {
		r.Header.Add(fields[i], fields[i+1])
	}
	return r
}

// keyed hashes under a key.
func keyed(key string) func(string) string {
	return func(secret string) string {
		sum := sha256.Sum256([]byte(key + secret))
		return hex.EncodeToString(sum[:16])
	}
}

// of names the caller of r by n, with these credentials beside the default.
func of(t *testing.T, n caller.Names, r *http.Request, credentials ...string) (string, error) {
	t.Helper()
	n.Realm, n.Fields = `"default"`, body.NewFields()
	if n.Host == nil {
		n.Host = host("")
	}
	if _, err := n.Fields.Change(body.Credential, credentials); err != nil {
		t.Fatal(err)
	}
	return n.Of(r, "", keyed("k"))
}

// withCertificate makes a request over TLS with a client certificate.
func withCertificate(r *http.Request, verified bool, cert *x509.Certificate) *http.Request {
	r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}}
	if verified {
		r.TLS.VerifiedChains = [][]*x509.Certificate{{cert}}
	}
	return r
}

// "Caller": the first identity that applies.
func TestCaller(t *testing.T) {
	ann := &x509.Certificate{Subject: pkix.Name{CommonName: "ann"}}
	spiffe := &x509.Certificate{URIs: []*url.URL{{Scheme: "spiffe", Host: "example.com", Path: "/agent"}}}
	dns := &x509.Certificate{DNSNames: []string{"agent.example.com", "other"}}
	bare := &x509.Certificate{RawSubjectPublicKeyInfo: []byte("key")}
	tenant := caller.Names{Text: "{http.request.header.X-Tenant}"}
	session := caller.Names{Cookies: []string{"session"}}
	hash := `[0-9a-f]{32}`

	for _, c := range []struct {
		name        string
		n           caller.Names
		r           *http.Request
		user        host     // {http.auth.user.id}
		credentials []string // as configured
		want        string   // a regular expression
	}{
		{name: "nothing", r: request(), want: `anonymous`},
		{name: "explicit", n: tenant,
			r: withCertificate(request("X-Tenant", "t1", "Authorization", "Bearer a"), true, ann), user: "u1", want: `explicit:"default":t1`},
		{name: "explicit of several", n: caller.Names{Text: "{http.request.header.X-Tenant}/{http.auth.user.id}"},
			r: request("X-Tenant", "t1"), user: "u1", want: `explicit:"default":t1/u1`},
		{name: "explicit but empty", n: tenant, r: request("Authorization", "Bearer a"), user: "u1", want: `user:"default":u1`},
		// The rest alone would make one caller of all without a tenant (P3).
		{name: "explicit but partly empty", n: caller.Names{Text: "tenant-{http.request.header.X-Tenant}"},
			r: request("Authorization", "Bearer a"), want: `credential:` + hash},
		{name: "explicit but unknown", n: caller.Names{Text: "tenant-{http.auth.user.tenant}"},
			r: request("Authorization", "Bearer a"), want: `credential:` + hash},
		{name: "explicit excuses an unstable scheme", n: tenant,
			r: request("X-Tenant", "t1", "Authorization", "AWS4-HMAC-SHA256 Credential=a"), want: `explicit:"default":t1`},
		{name: "certificate", r: withCertificate(request("Authorization", "Bearer a"), true, ann), user: "u1", want: `certificate:[0-9a-f]{64}:dn:CN=ann`},
		{name: "certificate with a URI", r: withCertificate(request(), true, spiffe), want: `certificate:[0-9a-f]{64}:uri:spiffe://example.com/agent`},
		{name: "certificate with a name", r: withCertificate(request(), true, dns), want: `certificate:[0-9a-f]{64}:dns:agent\.example\.com`},
		{name: "certificate with a key only", r: withCertificate(request(), true, bare), want: `certificate:[0-9a-f]{64}:spki:key`},
		{name: "certificate that nobody verified", r: withCertificate(request(), false, ann), want: `anonymous`},
		{name: "user", r: request("Authorization", "Basic a", "Cookie", "c=1"), user: "u1", want: `user:"default":u1`},
		{name: "user with a signed request", r: request("Authorization", "Signature a"), user: "u1", want: `user:"default":u1`},
		{name: "bearer", r: request("Authorization", "bearer a"), want: `credential:` + hash},
		{name: "basic", r: request("Authorization", "BASIC a"), want: `credential:` + hash},
		{name: "key", r: request("X-Api-Key", "a"), want: `credential:` + hash},
		{name: "other key", r: request("Api-Key", "a"), want: `credential:` + hash},
		{name: "configured key", credentials: []string{"X-Tenant-Key"}, r: request("X-Tenant-Key", "a"), want: `credential:` + hash},
		{name: "cookie", r: request("Cookie", "session=1"), want: `changing:` + hash},
		{name: "named cookie", n: session, r: request("Cookie", "session=1"), want: `cookie:` + hash},
		{name: "no named cookie", n: session, r: request("Cookie", "a=1"), want: `anonymous`},
		{name: "no cookie of a placeholder", n: caller.Names{Text: "{http.request.cookie.session}"}, r: request("Cookie", "a=1"), want: `anonymous`},
		{name: "a balancing cookie", n: caller.Names{Balancing: func() []string { return []string{"lb"} }}, r: request("Cookie", "lb=1"), want: `anonymous`},
		{name: "a signature", r: request("Signature", "sig=:a:"), want: `changing:` + hash},
		{name: "an empty credential", r: request("X-Api-Key", "", "Authorization", ""), want: `anonymous`},
		{name: "a session beside cookies", n: caller.Names{Session: "Mcp-Session-Id"}, r: request("Cookie", "a=1", "Mcp-Session-Id", "s"), want: `session:` + hash},
		{name: "a field that was taken out", credentials: []string{"-Authorization"}, r: request("Authorization", "Bearer a"), want: `anonymous`},
		{name: "an unstable scheme in a field that does not count", credentials: []string{"X-Tenant-Key", "-Authorization"},
			r: request("Authorization", "Signature a", "X-Tenant-Key", "k"), want: `credential:` + hash},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.n.Host = c.user
			got, err := of(t, c.n, c.r, c.credentials...)
			if err != nil || !regexp.MustCompile("^"+c.want+"$").MatchString(got) {
				t.Errorf("caller %q, %v; want %s", got, err, c.want)
			}
			kind, _, _ := strings.Cut(got, ":")
			verified := kind == "explicit" || kind == "user" || kind == "certificate"
			if unnamed := kind == "anonymous" || kind == "changing"; caller.Verified(got) != verified || caller.Unnamed(got) != unnamed {
				t.Errorf("%s: verified %t, unnamed %t", got, caller.Verified(got), caller.Unnamed(got))
			}
		})
	}
}

// P3: another credential is another caller, and nothing else is.
func TestCallersAreToldApart(t *testing.T) {
	name := func(fields ...string) string {
		t.Helper()
		name, err := of(t, caller.Names{}, request(fields...))
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	different := map[string][]string{
		"token":             {"Authorization", "Bearer a"},
		"other token":       {"Authorization", "Bearer b"},
		"token and key":     {"Authorization", "Bearer a", "X-Api-Key", "k"},
		"key":               {"X-Api-Key", "k"},
		"the key elsewhere": {"Api-Key", "k"},
		"two keys":          {"X-Api-Key", "k", "X-Api-Key", "l"},
		"one key with both": {"X-Api-Key", "kl"},
		"two lines as one":  {"X-Api-Key", "k;X-Api-Key=1:l"},
		"another field":     {"X-Shopify-Access-Token", "k"},
		"two fields":        {"X-Api-Key", "k", "X-Auth-Token", "l"},
		"swapped":           {"X-Api-Key", "l", "X-Auth-Token", "k"},
		"cookie":            {"Cookie", "k"},
		"the key's text":    {"Cookie", "X-Api-Key=1:k;"},
	}
	seen := map[string]string{}
	for what, fields := range different {
		id := name(fields...)
		if other, ok := seen[id]; ok {
			t.Errorf("%s and %s are one caller", what, other)
		}
		seen[id] = what
	}
	// Cookies change by themselves: beside a better credential they do not count.
	if name("Authorization", "Bearer a") != name("Authorization", "Bearer a", "Cookie", "x=2") {
		t.Error("a cookie beside a token makes another caller")
	}
}

// P8: no credential is readable in a caller's name.
func TestCallersHideCredentials(t *testing.T) {
	for _, n := range []caller.Names{{}, {Cookies: []string{"c"}}, {Session: "Mcp-Session-Id"}} {
		for _, field := range []string{"Authorization", "X-Api-Key", "Api-Key", "Cookie", "Mcp-Session-Id", "Signature"} {
			value := "Bearer s3cr3t"
			if field == "Cookie" {
				value = "c=s3cr3t"
			}
			name, err := of(t, n, request(field, value))
			if err != nil || strings.Contains(name, "s3cr3t") {
				t.Errorf("%s: caller %q, %v", field, name, err)
			}
		}
	}
}

// "Caller": schemes whose value changes with every attempt are refused.
func TestUnstableCredentialsAreRefused(t *testing.T) {
	for value, refused := range map[string]bool{
		"Bearer a": false, "bearer a": false, "Basic a": false, "BASIC a": false, " Bearer a": false, "Bearer": false,
		"AWS4-HMAC-SHA256 Credential=a": true, "Digest username=a": true, "Signature keyId=a": true, "DPoP a": true,
		"GNAP a": true, "Negotiate a": true, "raw-token": true, "Bearer,Signature a": true,
	} {
		_, err := of(t, caller.Names{}, request("Authorization", value))
		var p *problem.Problem
		if got := errors.As(err, &p) && p.Kind() == problem.CallerUnstable; got != refused {
			t.Errorf("%q: refused %v (%v), want %v", value, got, err, refused)
		}
	}
	_, err := of(t, caller.Names{}, request("Authorization", "Bearer a", "Authorization", "Digest b"))
	if err == nil {
		t.Error("a second, unstable Authorization line is not refused")
	}
}
