package call

import (
	"crypto/tls"
	"crypto/x509/pkix"
	"fmt"
	"net/http"
	"net/url"
	"testing"

	"golang.org/x/crypto/bcrypt"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P3: a caller never sees another caller's result, nor learns whether it exists: the
// same id under another credential is another execution.
func TestCallersAreApart(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for name, pair := range map[string][2]harness.Headers{
		"api keys":            {{"X-Api-Key": "a"}, {"X-Api-Key": "b"}},
		"other api key field": {{"X-Api-Key": "a"}, {"Api-Key": "a"}},
		"bearer":              {{"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}},
		"refreshed bearer":    {{"Authorization": "Bearer old"}, {"Authorization": "Bearer new"}},
		"basic":               {{"Authorization": "Basic YTpi"}, {"Authorization": "Basic YTpj"}},
		"any field":           {{"X-Shopify-Access-Token": "a"}, {"X-Shopify-Access-Token": "b"}},
		"none and some":       {{}, {"X-Api-Key": "a"}},
		"one and both":        {{"X-Api-Key": "a"}, {"X-Api-Key": "a", "Authorization": "Bearer a"}},
	} {
		t.Run(name, func(t *testing.T) {
			path := "/" + url.PathEscape(name)
			first, second := harness.Request{Path: path, Id: "k", Header: pair[0]}, harness.Request{Path: path, Id: "k", Header: pair[1]}
			g.Call(first).Want(t, 201, "arrival 1", "executed")
			// Another body: a mismatch would tell that the id is in use.
			second.Body = `{"another":"call"}`
			g.Call(second).Want(t, 201, "arrival 2", "executed")
			g.Call(first).Want(t, 201, "arrival 1", "replayed")
			g.Call(second).Want(t, 201, "arrival 2", "replayed")
			u.Arrived(path, 2)
		})
	}
}

// P3: the user that Caddy's own authentication names is the caller, whatever the
// password was; without it nobody gets as far as the look-up (trap 22).
func TestCallerFromAuthentication(t *testing.T) {
	u := harness.NewUpstream(t)
	hash, err := bcrypt.GenerateFromPassword([]byte("pw"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	g := harness.Start(t, "basic_auth {\n ann %[2]s\n bob %[2]s\n}\nagent_proxy %[1]s", u.Addr, hash)
	as := func(user, password string) harness.Request {
		r := g.Build(harness.Request{Path: "/"})
		r.SetBasicAuth(user, password)
		return harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Authorization": r.Header.Get("Authorization")}}
	}
	g.Call(as("ann", "pw")).Want(t, 201, "arrival 1", "executed")
	g.Call(as("bob", "pw")).Want(t, 201, "arrival 2", "executed")
	withCookie := as("ann", "pw")
	withCookie.Header["Cookie"] = "x=1"
	g.Call(withCookie).Want(t, 201, "arrival 1", "replayed")
	if got := g.Call(as("ann", "wrong")); got.Status != 401 || got.Header.Get("Execution-Id") != "" {
		t.Errorf("a stranger got %d %v", got.Status, got.Header)
	}
}

// P3: the subject of a verified client certificate is the caller, over renewals of
// the certificate and whatever other credentials there are.
func TestCallerFromCertificate(t *testing.T) {
	u := harness.NewUpstream(t)
	ca := harness.NewAuthority(t)
	g := harness.Launch(t, harness.Setup{
		Address: func(port string) string { return "https://localhost:" + port },
		Site: fmt.Sprintf("tls %s {\n client_auth {\n mode verify_if_given\n trust_pool file %s\n}\n}\nagent_proxy %s",
			ca.Files(t, "localhost"), ca.File, u.Addr),
	})
	as := func(cert *tls.Certificate) *http.Client { return g.NewClient(ca.Client(cert)) }
	call := func(client *http.Client, h harness.Headers) harness.Reply {
		return g.Call(harness.Request{Path: "/x", Id: "k", Client: client, Header: h, Host: "localhost"})
	}
	ann, bob := pkix.Name{CommonName: "ann", Organization: []string{"o"}}, pkix.Name{CommonName: "bob", Organization: []string{"o"}}
	call(as(ca.Issue(t, ann, nil)), nil).Want(t, 201, "arrival 1", "executed")
	call(as(ca.Issue(t, ann, nil)), harness.Headers{"Authorization": "Bearer changed"}).Want(t, 201, "arrival 1", "replayed")
	call(as(ca.Issue(t, bob, nil)), nil).Want(t, 201, "arrival 2", "executed")
	call(as(nil), nil).Want(t, 201, "arrival 3", "executed")

	// Workload certificates have no subject but a URI.
	call(as(ca.Issue(t, pkix.Name{}, workload("one"))), nil).Want(t, 201, "arrival 4", "executed")
	call(as(ca.Issue(t, pkix.Name{}, workload("two"))), nil).Want(t, 201, "arrival 5", "executed")
	call(as(ca.Issue(t, pkix.Name{}, workload("one"))), nil).Want(t, 201, "arrival 4", "replayed")
}

// Trap 5: an id counts for one method, one path and one guard. Where only the host
// differs it is another request under a used id.
func TestScopeOfAnID(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `
	handle /named/* {
		agent_proxy %[1]s {
			name other shared
		}
	}
	handle_path /stripped/* {
		agent_proxy %[1]s {
			name other shared
		}
	}
	handle {
		agent_proxy %[1]s
	}`, u.Addr)
	base := harness.Request{Path: "/x", Id: "k"}
	g.Call(base).Want(t, 201, "arrival 1", "executed")

	method := base
	method.Method = http.MethodPut
	g.Call(method).Want(t, 201, "arrival 2", "executed")
	method.Method = "post"
	g.Call(method).Want(t, 201, "arrival 3", "executed")

	path := base
	for i, p := range []string{"/y", "/x/", "/X", "/%78"} {
		path.Path = p
		if got := g.Call(path); got.Header.Get("Execution-Status") != "executed" {
			t.Errorf("%d: %s got %d %q", i, p, got.Status, got.Body)
		}
	}
	named := harness.Request{Path: "/named/x", Id: "k"}
	g.Call(named).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Path: "/stripped/named/x", Id: "k"}).Want(t, 201, "arrival 2", "executed") // by the path that was sent

	host := base
	host.Host = "another.example"
	g.Call(host).Terminal(t, 422, "fingerprint-mismatch")
	query := base
	query.Path += "?a=1"
	g.Call(query).Terminal(t, 422, "fingerprint-mismatch")
	g.Call(base).Want(t, 201, "arrival 1", "replayed")
}

func workload(name string) []*url.URL {
	return []*url.URL{{Scheme: "spiffe", Host: "example.com", Path: "/" + name}}
}
