package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"
)

type headers = map[string]string

// P3: a caller never sees another caller's result, nor learns whether it exists: the
// same id under another credential is another execution.
func TestCallersAreApart(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for name, pair := range map[string][2]headers{
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
			first, second := request{path: path, id: "k", header: pair[0]}, request{path: path, id: "k", header: pair[1]}
			g.call(first).want(t, 201, "arrival 1", "executed")
			// Another body: a mismatch would tell that the id is in use.
			second.body = `{"another":"call"}`
			g.call(second).want(t, 201, "arrival 2", "executed")
			g.call(first).want(t, 201, "arrival 1", "replayed")
			g.call(second).want(t, 201, "arrival 2", "replayed")
			u.arrived(path, 2)
		})
	}
}

// P3: the user that Caddy's own authentication names is the caller, whatever the
// password was; without it nobody gets as far as the look-up (trap 22).
func TestCallerFromAuthentication(t *testing.T) {
	u := newUpstream(t)
	hash, err := bcrypt.GenerateFromPassword([]byte("pw"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	g := start(t, "basic_auth {\n ann %[2]s\n bob %[2]s\n}\nagent_proxy %[1]s", u.addr, hash)
	as := func(user, password string) request {
		r := g.build(request{path: "/"})
		r.SetBasicAuth(user, password)
		return request{path: "/x", id: "k", header: headers{"Authorization": r.Header.Get("Authorization")}}
	}
	g.call(as("ann", "pw")).want(t, 201, "arrival 1", "executed")
	g.call(as("bob", "pw")).want(t, 201, "arrival 2", "executed")
	withCookie := as("ann", "pw")
	withCookie.header["Cookie"] = "x=1"
	g.call(withCookie).want(t, 201, "arrival 1", "replayed")
	if got := g.call(as("ann", "wrong")); got.status != 401 || got.header.Get("Execution-Id") != "" {
		t.Errorf("a stranger got %d %v", got.status, got.header)
	}
}

// P3: the subject of a verified client certificate is the caller, over renewals of
// the certificate and whatever other credentials there are.
func TestCallerFromCertificate(t *testing.T) {
	u := newUpstream(t)
	ca := newAuthority(t)
	g := launch(t, setup{
		address: func(port string) string { return "https://localhost:" + port },
		site: fmt.Sprintf("tls %s {\n client_auth {\n mode verify_if_given\n trust_pool file %s\n}\n}\nagent_proxy %s",
			ca.files(t, "localhost"), ca.file, u.addr),
	})
	as := func(cert *tls.Certificate) *http.Client { return g.newClient(ca.client(cert)) }
	call := func(client *http.Client, h headers) reply {
		return g.call(request{path: "/x", id: "k", client: client, header: h, host: "localhost"})
	}
	ann, bob := pkix.Name{CommonName: "ann", Organization: []string{"o"}}, pkix.Name{CommonName: "bob", Organization: []string{"o"}}
	call(as(ca.issue(t, ann, nil)), nil).want(t, 201, "arrival 1", "executed")
	call(as(ca.issue(t, ann, nil)), headers{"Authorization": "Bearer changed"}).want(t, 201, "arrival 1", "replayed")
	call(as(ca.issue(t, bob, nil)), nil).want(t, 201, "arrival 2", "executed")
	call(as(nil), nil).want(t, 201, "arrival 3", "executed")

	// Workload certificates have no subject but a URI.
	call(as(ca.issue(t, pkix.Name{}, workload("one"))), nil).want(t, 201, "arrival 4", "executed")
	call(as(ca.issue(t, pkix.Name{}, workload("two"))), nil).want(t, 201, "arrival 5", "executed")
	call(as(ca.issue(t, pkix.Name{}, workload("one"))), nil).want(t, 201, "arrival 4", "replayed")
}

// Trap 5: an id counts for one method, one path and one guard. Where only the host
// differs it is another request under a used id.
func TestScopeOfAnID(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `
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
	}`, u.addr)
	base := request{path: "/x", id: "k"}
	g.call(base).want(t, 201, "arrival 1", "executed")

	method := base
	method.method = http.MethodPut
	g.call(method).want(t, 201, "arrival 2", "executed")
	method.method = "post"
	g.call(method).want(t, 201, "arrival 3", "executed")

	path := base
	for i, p := range []string{"/y", "/x/", "/X", "/%78"} {
		path.path = p
		if got := g.call(path); got.header.Get("Execution-Status") != "executed" {
			t.Errorf("%d: %s got %d %q", i, p, got.status, got.body)
		}
	}
	named := request{path: "/named/x", id: "k"}
	g.call(named).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/stripped/named/x", id: "k"}).want(t, 201, "arrival 2", "executed") // by the path that was sent

	host := base
	host.host = "another.example"
	g.call(host).terminal(t, 422, "fingerprint-mismatch")
	query := base
	query.path += "?a=1"
	g.call(query).terminal(t, 422, "fingerprint-mismatch")
	g.call(base).want(t, 201, "arrival 1", "replayed")
}

// authority issues certificates for tests.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
	file string
	next int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{key: newKey(t), pool: x509.NewCertPool(), next: 2}
	a.cert = a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, a.key)
	a.pool.AddCert(a.cert)
	a.file = filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, a.file, "CERTIFICATE", a.cert.Raw)
	return a
}

func (a *authority) sign(t *testing.T, template *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent := a.cert
	if parent == nil {
		parent = template
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// issue makes a client's certificate.
func (a *authority) issue(t *testing.T, subject pkix.Name, uris []*url.URL) *tls.Certificate {
	t.Helper()
	a.next++
	key := newKey(t)
	cert := a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: subject, URIs: uris,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, key)
	return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

// files writes a server's certificate and key, and returns their names.
func (a *authority) files(t *testing.T, host string) string {
	t.Helper()
	a.next++
	key := newKey(t)
	cert := a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: host},
		DNSNames: []string{host}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, key)
	dir := t.TempDir()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, filepath.Join(dir, "cert.pem"), "CERTIFICATE", cert.Raw)
	writePEM(t, filepath.Join(dir, "key.pem"), "PRIVATE KEY", der)
	return filepath.Join(dir, "cert.pem") + " " + filepath.Join(dir, "key.pem")
}

// client is the TLS configuration of a client that trusts a, with or without a
// certificate of its own.
func (a *authority) client(cert *tls.Certificate) *tls.Config {
	config := &tls.Config{RootCAs: a.pool, ServerName: "localhost"}
	if cert != nil {
		config.Certificates = []tls.Certificate{*cert}
	}
	return config
}

func workload(name string) []*url.URL {
	return []*url.URL{{Scheme: "spiffe", Host: "example.com", Path: "/" + name}}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}
