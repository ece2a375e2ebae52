package call

import (
	"crypto/tls"
	"crypto/x509/pkix"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P3: `alice` of one site's basic_auth is not the `alice` of another's, under any Host.
func TestP3UsersOfTwoSitesAreApart(t *testing.T) {
	one, two, boss := harness.NewUpstream(t), harness.NewUpstream(t), harness.NewAgent(t, "boss")
	hash := func(password string) string {
		h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
		if err != nil {
			t.Fatal(err)
		}
		return string(h)
	}
	g := harness.Launch(t, harness.Setup{
		App:     harness.Trusting(t, boss) + "\n rollback {\n coordinators " + boss.Issuer.Identity() + "\n }",
		Badger:  true,
		Address: func(port string) string { return "http://one.example:" + port },
		Site:    "basic_auth {\n alice " + hash("first") + "\n}\nagent_proxy " + one.Addr + " {\n name one\n operators user:alice\n}",
		More: func(port string) string {
			return "http://two.example:" + port + " {\n basic_auth {\n alice " + hash("second") + "\n }\n agent_proxy " + two.Addr + " {\n name two\n }\n}\n" +
				"http://three.example:" + port + " {\n basic_auth {\n alice " + hash("third") + "\n }\n" +
				" agent_guard_endpoints\n agent_proxy " + two.Addr + " {\n name three\n caller {http.auth.user.id}\n }\n}\n" +
				"http://ops.example:" + port + " {\n agent_guard_endpoints\n}"
		},
	})
	as := func(host, password string) harness.Somebody {
		r := g.Build(harness.Request{Path: "/"})
		r.SetBasicAuth("alice", password)
		return harness.Somebody{Host: host, Header: harness.Headers{"Authorization": r.Header.Get("Authorization")}}
	}
	g.Apart(boss, harness.Somebody{Host: "ops.example"}, as("one.example", "first"), as("two.example", "second"))

	// The name leads nowhere at another site, and the password of another site neither.
	if got := g.Call(as("one.example", "second").Does(harness.Request{Path: "/pay", Id: "k"})); got.Status != 401 {
		t.Errorf("another site's password is taken: %d", got.Status)
	}
	// An operator is the alice of the guard that names her.
	g.Call(as("two.example", "second").Does(harness.Request{Path: "/pay", Id: "k"}))
	g.Sights(t, as("one.example", "first"), one.Addr, two.Addr)
	g.Sights(t, as("two.example", "second"), two.Addr)
}

// P3: CN=alice of one site's client authority is not that of another's, also where the
// client writes the other site's Host and the server does not compare it.
func TestP3CertificatesOfTwoAuthoritiesAreApart(t *testing.T) {
	one, two, boss := harness.NewUpstream(t), harness.NewUpstream(t), harness.NewAgent(t, "boss")
	server, first, second := harness.NewAuthority(t), harness.NewAuthority(t), harness.NewAuthority(t)
	port := ""
	site := func(host, clients, directives string) string {
		files := server.Files(t, host)
		return "https://" + host + ":" + port + " {\n tls " + files + clients + "\n" + directives + "\n}\n"
	}
	auth := func(a *harness.Authority) string {
		return " {\n client_auth {\n mode require_and_verify\n trust_pool file " + a.File + "\n }\n }"
	}
	g := harness.Launch(t, harness.Setup{
		App:     harness.Trusting(t, boss) + "\n rollback {\n coordinators " + boss.Issuer.Identity() + "\n }",
		Badger:  true,
		Address: func(p string) string { port = p; return "https://one.example:" + p },
		Site: "tls " + server.Files(t, "one.example") + auth(first) +
			"\nagent_proxy " + one.Addr + " {\n name one\n operators certificate:dn:CN=alice\n}",
		More: func(string) string {
			return site("two.example", auth(second), "agent_proxy "+two.Addr+" {\n name two\n}") +
				site("ops.example", "", "agent_guard_endpoints")
		},
	})
	text := strings.Replace(g.Config("tls "+server.Files(t, "one.example")+auth(first)+
		"\nagent_proxy "+one.Addr+" {\n name one\n operators certificate:dn:CN=alice\n}"),
		"protocols h1 h2 h2c", "protocols h1 h2 h2c\n\t\tstrict_sni_host insecure_off", 1)
	if err := harness.LoadConfig(text); err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: "alice"}
	as := func(name, host string, cert *tls.Certificate) harness.Somebody {
		config := server.Client(cert)
		config.ServerName = name
		return harness.Somebody{Host: host, Client: g.NewClient(config)}
	}
	ops := as("ops.example", "ops.example", nil)
	harness.Eventually(t, "the new configuration answers", func() bool {
		_, err := g.Send(ops.Does(harness.Request{Method: "GET", Path: "/"}))
		return err == nil
	})
	alice, other := as("one.example", "one.example", first.Issue(t, subject, nil)), second.Issue(t, subject, nil)
	g.Apart(boss, ops, alice, as("two.example", "two.example", other), as("two.example", "one.example", other))

	// Over a renewal she is the same, and an operator only under her own authority.
	renewed := as("one.example", "one.example", first.Issue(t, subject, nil))
	r := harness.Request{Path: "/renewed", Id: "k"}
	g.Call(alice.Does(r)).Want(t, 201, "arrival 1", "executed")
	g.Call(renewed.Does(r)).Want(t, 201, "arrival 1", "replayed")
	g.Sights(t, alice, one.Addr, two.Addr)
	g.Sights(t, as("two.example", "one.example", other), one.Addr)
}
