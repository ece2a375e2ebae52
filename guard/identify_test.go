package guard

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

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
	hash := `[0-9a-f]{32}`

	for _, c := range []struct {
		name string
		h    Config
		r    *http.Request
		user string // {http.auth.user.id}
		want string // a regular expression
	}{
		{"nothing", Config{}, request("POST", "/"), "", `anonymous`},
		{"explicit", Config{Settings: Settings{Caller: "{http.request.header.X-Tenant}"}},
			withCertificate(request("POST", "/", "X-Tenant", "t1", "Authorization", "Bearer a"), true, ann), "u1", `explicit:"default":t1`},
		{"explicit of several", Config{Settings: Settings{Caller: "{http.request.header.X-Tenant}/{http.auth.user.id}"}},
			request("POST", "/", "X-Tenant", "t1"), "u1", `explicit:"default":t1/u1`},
		{"explicit but empty", Config{Settings: Settings{Caller: "{http.request.header.X-Tenant}"}},
			request("POST", "/", "Authorization", "Bearer a"), "u1", `user:"default":u1`},
		// The rest alone would make one caller of all without a tenant (P3).
		{"explicit but partly empty", Config{Settings: Settings{Caller: "tenant-{http.request.header.X-Tenant}"}},
			request("POST", "/", "Authorization", "Bearer a"), "", `credential:` + hash},
		{"explicit but unknown", Config{Settings: Settings{Caller: "tenant-{http.auth.user.tenant}"}},
			request("POST", "/", "Authorization", "Bearer a"), "", `credential:` + hash},
		{"explicit excuses an unstable scheme", Config{Settings: Settings{Caller: "{http.request.header.X-Tenant}"}},
			request("POST", "/", "X-Tenant", "t1", "Authorization", "AWS4-HMAC-SHA256 Credential=a"), "", `explicit:"default":t1`},
		{"certificate", Config{}, withCertificate(request("POST", "/", "Authorization", "Bearer a"), true, ann), "u1", `certificate:[0-9a-f]{64}:dn:CN=ann`},
		{"certificate with a URI", Config{}, withCertificate(request("POST", "/"), true, spiffe), "", `certificate:[0-9a-f]{64}:uri:spiffe://example.com/agent`},
		{"certificate with a name", Config{}, withCertificate(request("POST", "/"), true, dns), "", `certificate:[0-9a-f]{64}:dns:agent\.example\.com`},
		{"certificate with a key only", Config{}, withCertificate(request("POST", "/"), true, bare), "", `certificate:[0-9a-f]{64}:spki:key`},
		{"certificate that nobody verified", Config{}, withCertificate(request("POST", "/"), false, ann), "", `anonymous`},
		{"user", Config{}, request("POST", "/", "Authorization", "Basic a", "Cookie", "c=1"), "u1", `user:"default":u1`},
		{"user with a signed request", Config{}, request("POST", "/", "Authorization", "Signature a"), "u1", `user:"default":u1`},
		{"bearer", Config{}, request("POST", "/", "Authorization", "bearer a"), "", `credential:` + hash},
		{"basic", Config{}, request("POST", "/", "Authorization", "BASIC a"), "", `credential:` + hash},
		{"key", Config{}, request("POST", "/", "X-Api-Key", "a"), "", `credential:` + hash},
		{"other key", Config{}, request("POST", "/", "Api-Key", "a"), "", `credential:` + hash},
		{"configured key", Config{Settings: Settings{Credentials: []string{"X-Tenant-Key"}}}, request("POST", "/", "X-Tenant-Key", "a"), "", `credential:` + hash},
		{"cookie", Config{}, request("POST", "/", "Cookie", "session=1"), "", `changing:` + hash},
		{"named cookie", Config{Settings: Settings{CallerCookies: []string{"session"}}}, request("POST", "/", "Cookie", "session=1"), "", `cookie:` + hash},
		{"no named cookie", Config{Settings: Settings{CallerCookies: []string{"session"}}}, request("POST", "/", "Cookie", "a=1"), "", `anonymous`},
		{"no cookie of a placeholder", Config{Settings: Settings{Caller: "{http.request.cookie.session}"}}, request("POST", "/", "Cookie", "a=1"), "", `anonymous`},
		{"a balancing cookie", Config{BalancingCookies: func() []string { return []string{"lb"} }}, request("POST", "/", "Cookie", "lb=1"), "", `anonymous`},
		{"a signature", Config{}, request("POST", "/", "Signature", "sig=:a:"), "", `changing:` + hash},
		{"an empty credential", Config{}, request("POST", "/", "X-Api-Key", "", "Authorization", ""), "", `anonymous`},
		{"a session beside cookies", Config{Settings: Settings{Protocol: protocol.MCP}}, request("POST", "/", "Cookie", "a=1", "Mcp-Session-Id", "s"), "", `session:` + hash},
		{"a field that was taken out", Config{Settings: Settings{Credentials: []string{"-Authorization"}}}, request("POST", "/", "Authorization", "Bearer a"), "", `anonymous`},
		{"an unstable scheme in a field that does not count", Config{Settings: Settings{Credentials: []string{"X-Tenant-Key", "-Authorization"}}},
			request("POST", "/", "Authorization", "Signature a", "X-Tenant-Key", "k"), "", `credential:` + hash},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.user != "" {
				testHost{}.SetVar(c.r, "user", c.user)
			}
			got, err := newHandler(t, c.h).CallerOf(testGuard(t), c.r, "")
			if err != nil || !regexp.MustCompile("^"+c.want+"$").MatchString(got) {
				t.Errorf("caller %q, %v; want %s", got, err, c.want)
			}
		})
	}
}

// P3: another credential is another caller, and nothing else is.
func TestCallersAreToldApart(t *testing.T) {
	g := testGuard(t)
	caller := func(h Config, fields ...string) string {
		t.Helper()
		name, err := newHandler(t, h).CallerOf(g, request("POST", "/", fields...), "")
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
	for name, fields := range different {
		id := caller(Config{}, fields...)
		if other, ok := seen[id]; ok {
			t.Errorf("%s and %s are one caller", name, other)
		}
		seen[id] = name
	}
	// Cookies change by themselves: beside a better credential they do not count.
	if caller(Config{}, "Authorization", "Bearer a") != caller(Config{}, "Authorization", "Bearer a", "Cookie", "x=2") {
		t.Error("a cookie beside a token makes another caller")
	}
	name, err := newHandler(t, Config{}).CallerOf(testGuard(t), request("POST", "/", "X-Api-Key", "k"), "")
	if err != nil || name == caller(Config{}, "X-Api-Key", "k") {
		t.Errorf("the hash of a credential is the same under another store's key: %v", err)
	}
}

// P8: no credential is readable in a caller's name.
func TestCallersHideCredentials(t *testing.T) {
	g := testGuard(t)
	for _, field := range []string{"Authorization", "X-Api-Key", "Api-Key", "Cookie"} {
		name, err := newHandler(t, Config{}).CallerOf(g, request("POST", "/", field, "Bearer s3cr3t"), "")
		if err != nil || strings.Contains(name, "s3cr3t") {
			t.Errorf("%s: caller %q, %v", field, name, err)
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
		_, err := newHandler(t, Config{}).CallerOf(testGuard(t), request("POST", "/", "Authorization", value), "")
		var p *problem.Problem
		if got := errors.As(err, &p) && p.Kind() == problem.CallerUnstable; got != refused {
			t.Errorf("%q: refused %v (%v), want %v", value, got, err, refused)
		}
	}
	_, err := newHandler(t, Config{}).CallerOf(testGuard(t), request("POST", "/", "Authorization", "Bearer a", "Authorization", "Digest b"), "")
	if err == nil {
		t.Error("a second, unstable Authorization line is not refused")
	}
}

// P1: callers whom nothing names that stays are told of in the log once for each guard, with the line to write.
func TestUnnamedCallersAreLogged(t *testing.T) {
	var log strings.Builder
	h := newHandler(t, Config{Settings: Settings{Name: "shop"}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for range 3 {
		for _, origin := range []execution.Origin{execution.OriginGiven, execution.OriginMinted} {
			x := &Call{h: h, r: request("POST", "/", "Cookie", "session=a")}
			if err := x.refuseUnnamed(&execution.Call{Origin: origin}); (err != nil) != (origin == execution.OriginGiven) {
				t.Error(err)
			}
		}
	}
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "caller cookie NAME") || !strings.Contains(text, "guard=shop") {
		t.Errorf("%q", text)
	}
}

const trace = "4bf92f3577b34da6a3ce929d0e0e4736"

// "Words", workflow: Workflow-Id, else the trace id, else none.
func TestWorkflow(t *testing.T) {
	for _, c := range []struct {
		name   string
		fields []string
		want   string
	}{
		{"none", nil, ""},
		{"named", []string{"Workflow-Id", "wf-1"}, "wf-1"},
		{"the name goes first", []string{"Workflow-Id", "wf-1", "Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}, "wf-1"},
		{"an empty name", []string{"Workflow-Id", "", "Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}, trace},
		{"trace", []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}, trace},
		{"a later version", []string{"Traceparent", "cc-" + trace + "-00f067aa0ba902b7-01-more-to-come"}, trace},
		{"version 00 with more", []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7-01-more"}, ""},
		{"the version that is none", []string{"Traceparent", "ff-" + trace + "-00f067aa0ba902b7-01"}, ""},
		{"no hexadecimal version", []string{"Traceparent", "0x-" + trace + "-00f067aa0ba902b7-01"}, ""},
		{"zero trace", []string{"Traceparent", "00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01"}, ""},
		{"zero parent", []string{"Traceparent", "00-" + trace + "-" + strings.Repeat("0", 16) + "-01"}, ""},
		{"short trace", []string{"Traceparent", "00-" + trace[1:] + "-00f067aa0ba902b7-01"}, ""},
		{"capitals", []string{"Traceparent", "00-" + strings.ToUpper(trace) + "-00f067aa0ba902b7-01"}, ""},
		{"no flags", []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := workflow(request("POST", "/", c.fields...), nil, new(Tokens)); got != c.want || err != nil {
				t.Errorf("workflow %q, want %q (%v)", got, c.want, err)
			}
		})
	}
	// A call never leaves its workflow in silence.
	for _, lines := range [][]string{{"order 7"}, {strings.Repeat("w", 256)}, {"pedido-ñ"}, {"a", "b"}} {
		r := request("POST", "/")
		r.Header["Workflow-Id"] = lines
		_, err := workflow(r, nil, new(Tokens))
		var p *problem.Problem
		if !errors.As(err, &p) || p.Kind() != problem.WorkflowIDInvalid || p.Kind().SafeNewKey {
			t.Errorf("%q: %v", lines, err)
		}
	}
}

// Whatever a client sends, a trace id is 32 hexadecimal digits of what it sent.
func FuzzTraceparent(f *testing.F) {
	f.Add("00-" + trace + "-00f067aa0ba902b7-01")
	f.Add("cc-" + trace + "-00f067aa0ba902b7-01-x")
	f.Add("ff-" + trace + "-00f067aa0ba902b7-01")
	f.Add("----")
	whole := regexp.MustCompile(`^(00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}|[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-(?s:.*))?)$`)
	zero := regexp.MustCompile(`^..-(0{32}-.*|.{32}-0{16}-.*)`)
	f.Fuzz(func(t *testing.T, text string) {
		got := traceID(text)
		valid := whole.MatchString(text) && !strings.HasPrefix(text, "ff") && !zero.MatchString(text) &&
			(!strings.HasPrefix(text, "00") || len(text) == 55)
		switch {
		case valid && got != text[3:35]:
			t.Errorf("%q gives %q", text, got)
		case !valid && got != "":
			t.Errorf("%q is malformed and gives %q", text, got)
		}
	})
}

// stated is the id that a request states to a handler.
func stated(t *testing.T, h Config, r *http.Request) (string, error) {
	t.Helper()
	x := &Call{h: newHandler(t, h), r: r}
	return x.statedID(nil)
}

// An id in the body: a string or a number in a JSON body, and nothing that the
// upstream could read another way (P1).
func TestIDInTheBody(t *testing.T) {
	sources := []IDSource{{JSON: "/order/id"}, {Header: "X-Last"}}
	for _, c := range []struct{ name, contentType, body, want, slug string }{
		{"string", "application/json", `{"order": {"id": "o-1"}}`, "o-1", ""},
		{"number", "application/vnd.api+json; charset=utf-8", `{"order": {"id": 12345678901234567890}}`, "12345678901234567890", ""},
		{"absent", "application/json", `{"order": {}}`, "last", ""},
		{"null", "application/json", `{"order": {"id": null}}`, "last", ""},
		{"no body", "application/json", ``, "last", ""},
		{"no JSON by its type", "text/plain", `{"order": {"id": "o-1"}}`, "last", ""},
		{"no JSON by its look", "application/json", `order=1`, "last", ""},
		{"object", "application/json", `{"order": {"id": {}}}`, "", "execution-id-invalid"},
		{"twice", "application/json", `{"order": {"id": "a", "id": "b"}}`, "", "execution-id-invalid"},
		{"empty", "application/json", `{"order": {"id": ""}}`, "", "execution-id-invalid"},
		{"a space", "application/json", `{"order": {"id": "a b"}}`, "", "execution-id-invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := request("POST", "/", "Content-Type", c.contentType, "X-Last", "last")
			r.Body = io.NopCloser(strings.NewReader(c.body))
			x := &Call{h: newHandler(t, Config{Settings: Settings{ExecutionID: sources}}), r: r}
			if err := x.readBody(nil); err != nil {
				t.Fatal(err)
			}
			defer x.close()
			got, err := x.statedID(nil)
			var p *problem.Problem
			if c.slug != "" && (!errors.As(err, &p) || p.Kind().Slug != c.slug) || c.slug == "" && (err != nil || got != c.want) {
				t.Errorf("%q, %v; want %q %s", got, err, c.want, c.slug)
			}
		})
	}
}

// Step 1: the first source that has an id names the call; a malformed id is refused
// and not passed over, or the call would run under another one (P1).
func TestStatedID(t *testing.T) {
	sources := []IDSource{{Header: "X-First"}, {Placeholder: "order-{http.request.header.X-Order}"}, {Header: "x-last"}}
	for _, c := range []struct {
		name    string
		sources []IDSource
		fields  []string
		want    string
		slug    string // of the problem
	}{
		{"the default", nil, []string{"Idempotency-Key", "a"}, "a", ""},
		{"the other default", nil, []string{"Execution-Id", "b"}, "b", ""},
		{"two of the default", nil, []string{"Execution-Id", "b", "Idempotency-Key", "a"}, "", "execution-id-invalid"},
		{"quoted", nil, []string{"Idempotency-Key", `"a"`}, "a", ""},
		{"none", nil, nil, "", ""},
		{"first", sources, []string{"X-Order", "o", "X-First", "f", "X-Last", "l"}, "f", ""},
		{"placeholder", sources, []string{"X-Order", "o", "X-Last", "l"}, "order-o", ""},
		// The text around an empty placeholder would be the id of all such calls.
		{"a placeholder without value is no id", sources, []string{"X-Last", "l"}, "l", ""},
		{"what replaces the default does not add to it", sources, []string{"Idempotency-Key", "a"}, "", ""},
		{"two lines", nil, []string{"Idempotency-Key", "a", "Idempotency-Key", "b"}, "", "execution-id-invalid"},
		{"empty", nil, []string{"Idempotency-Key", "", "Execution-Id", "b"}, "", "execution-id-invalid"},
		{"a space in a placeholder", sources, []string{"X-Order", "a b", "X-Last", "l"}, "", "execution-id-invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := stated(t, Config{Settings: Settings{ExecutionID: c.sources}}, request("POST", "/", c.fields...))
			var p *problem.Problem
			switch {
			case c.slug != "":
				if !errors.As(err, &p) || p.Kind().Slug != c.slug {
					t.Errorf("%q, %v; want %s", got, err, c.slug)
				}
			case c.want == "":
				if !errors.Is(err, errNoID) {
					t.Errorf("%q, %v; want no id", got, err)
				}
			case err != nil || got != c.want:
				t.Errorf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// P3: where the tokens of a message cannot be verified, because the ledger does not open, it is refused as
// any other call is, and the engine is given back.
func TestMessagesWaitForTheTokenPolicy(t *testing.T) {
	e := testEngine(t)
	held := 0
	h := newHandler(t, Config{
		Settings: Settings{Protocol: protocol.MCP, RequireECT: true}, Verifies: true,
		Open:   func() (*Engine, func(), error) { held++; return e, func() { held-- }, nil },
		Tokens: func() (*TokenPolicy, error) { return nil, errors.New("the ledger is damaged") },
	})
	for _, body := range []string{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay"}}`, `{"amount":1}`} {
		r := request(http.MethodPost, "/mcp", "Content-Type", "application/json")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		w, forwarded := httptest.NewRecorder(), false
		err := h.Serve(w, r, nextFunc(func(http.ResponseWriter, *http.Request) error { forwarded = true; return nil }))
		if err != nil || forwarded || !strings.Contains(w.Body.String(), "store-unavailable") || held != 0 {
			t.Errorf("%s: forwarded %t, %v, %d references to the engine remain: %s", body, forwarded, err, held, w.Body)
		}
	}
}
