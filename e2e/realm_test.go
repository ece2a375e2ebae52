package e2e

import (
	"crypto/tls"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/google/uuid"
	"golang.org/x/crypto/bcrypt"
)

// somebody is how one person comes to one site.
type somebody struct {
	host   string
	client *http.Client
	header headers
}

func (s somebody) does(r request) request {
	r.host, r.client = s.host, s.client
	if r.header == nil {
		r.header = headers{}
	}
	for name, value := range s.header {
		r.header[name] = value
	}
	return r
}

// traces are the names of what a call leaves behind.
type traces struct{ id, workflow, named, checkpoint, rollback string }

// ways are all paths on which somebody could ask after them.
func (s traces) ways() []string {
	base := "/.well-known/cascade/"
	return []string{
		base + "executions/" + s.id, base + "executions/" + s.id + "?wait=1s", base + "executions/" + s.id + "/output",
		base + "executions/" + s.id + "?method=POST&path=/pay",
		base + "workflows/" + s.workflow, base + "workflows/" + s.named,
		base + "checkpoints/" + s.checkpoint + "?wait=100ms", // else it is waited for longer
		base + "ledger/entries?jti=" + s.checkpoint + "&wid=" + s.named, base + "ledger/entries?jti=" + s.checkpoint,
		base + "rollback/" + s.rollback,
		base + "circuits?wid=" + s.workflow, base + "circuits?wid=" + s.named, "/aerr/circuits?wid=" + s.named,
	}
}

// looks is what somebody is answered on all of them, without their names.
func (g *gateway) looks(who somebody, s traces) []string {
	g.t.Helper()
	var seen []string
	for _, path := range s.ways() {
		for _, method := range []string{"GET", "HEAD"} {
			got := g.call(who.does(request{method: method, path: path}))
			h := got.header.Clone()
			h.Del("Date")
			text := fmt.Sprint(method, " ", path, ": ", got.status, h, got.body)
			for _, name := range []string{s.id, s.workflow, s.named, s.checkpoint, s.rollback} {
				text = strings.ReplaceAll(text, name, "X")
			}
			seen = append(seen, text)
		}
	}
	return seen
}

// apart holds that what one has done does not exist for the other, on any endpoint and by
// no answer to a call (P3). ops asks for a rollback of it, at a site of the endpoints alone.
func (g *gateway) apart(boss *agent, ops, one somebody, others ...somebody) {
	t := g.t
	t.Helper()
	s := traces{id: "id-" + uuid.NewString(), workflow: uuid.NewString()}
	none := traces{"id-" + uuid.NewString(), uuid.NewString(), uuid.NewString(), uuid.NewString(), uuid.NewString()}
	unseen := make([][]string, len(others))
	for i, other := range others {
		unseen[i] = g.looks(other, none)
	}

	call := request{path: "/pay", id: s.id, header: headers{"Workflow-Id": s.workflow}}
	first := g.call(one.does(call))
	if first.status != 201 || first.header.Get("Execution-Status") != "executed" {
		t.Fatalf("%d %v %s", first.status, first.header, first.body)
	}
	s.checkpoint = first.header.Get("Execution-Checkpoint")
	var doc struct {
		Workflow string `json:"wid"`
	}
	eventually(t, "the checkpoint is in the ledger", func() bool {
		got := g.call(one.does(request{method: "GET", path: "/.well-known/cascade/checkpoints/" + s.checkpoint}))
		return got.status == 200 && json.Unmarshal([]byte(got.body), &doc) == nil
	})
	s.named, s.rollback = doc.Workflow, "urn:uuid:"+uuid.NewString()
	f := &flow{g, s.named}
	asking := request{path: api.RollbackPath, body: fmt.Sprintf(
		`{"rollback_id": %q, "checkpoint_id": %q, "phase": "execute", "scope": "single"}`, s.rollback, s.checkpoint)}
	got := g.call(ops.does(with(boss.issue(f.request(s.checkpoint, `, "scope": "single"`)), asking)))
	if got.status != 200 {
		t.Fatalf("no rollback: %d %s", got.status, got.body)
	}

	// Who has made the call sees it, so that the paths are those of something.
	for _, way := range []string{"executions/" + s.id, "workflows/" + s.workflow, "checkpoints/" + s.checkpoint, "rollback/" + s.rollback} {
		if got := g.call(one.does(request{method: "GET", path: "/.well-known/cascade/" + way})); got.status != 200 {
			t.Errorf("who has made the call sees nothing at %s: %d %s", way, got.status, got.body)
		}
	}
	var theirs []string
	for i, other := range others {
		for j, seen := range g.looks(other, s) {
			if seen != unseen[i][j] {
				t.Errorf("P3: somebody else at %s can tell that it exists:\n%s\n%s", other.host, unseen[i][j], seen)
			}
		}
		for index := range 8 {
			got := g.call(other.does(request{method: "GET", path: fmt.Sprint("/.well-known/cascade/ledger/entries/", index)}))
			if got.status < 400 {
				t.Errorf("P3: somebody else at %s reads entry %d: %s", other.host, index, got.body)
			}
		}
	}
	for _, other := range others {
		// The same id with another request: neither a result nor a mismatch, and a workflow
		// of the same name is another one.
		again := call
		again.body, again.header = `{"amount":2}`, headers{"Workflow-Id": s.workflow}
		got := g.call(other.does(again))
		if got.header.Get("Execution-Status") != "executed" {
			t.Errorf("P3: somebody else's call at %s: %d %v %s", other.host, got.status, got.header, got.body)
		}
		mine := got.header.Get("Execution-Checkpoint")
		theirs = append(theirs, mine)
		eventually(t, "the other's workflow is there", func() bool {
			got = g.call(other.does(request{method: "GET", path: "/.well-known/cascade/workflows/" + s.workflow}))
			return got.status == 200 && strings.Contains(got.body, mine)
		})
		if strings.Contains(got.body, s.checkpoint) {
			t.Errorf("P3: the other's workflow at %s has the first one's nodes: %s", other.host, got.body)
		}
	}
	view := g.call(one.does(request{method: "GET", path: "/.well-known/cascade/workflows/" + s.workflow}))
	for _, checkpoint := range theirs {
		if strings.Contains(view.body, checkpoint) {
			t.Errorf("P3: the first one's workflow has the others' nodes: %s", view.body)
		}
	}
}

// P3: `alice` of one site's basic_auth is not the `alice` of another's, under any Host.
func TestP3UsersOfTwoSitesAreApart(t *testing.T) {
	one, two, boss := newUpstream(t), newUpstream(t), newAgent(t, "boss")
	hash := func(password string) string {
		h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
		if err != nil {
			t.Fatal(err)
		}
		return string(h)
	}
	g := launch(t, setup{
		app:     trusting(t, boss) + "\n rollback {\n coordinators " + boss.issuer.Identity() + "\n }",
		badger:  true,
		address: func(port string) string { return "http://one.example:" + port },
		site:    "basic_auth {\n alice " + hash("first") + "\n}\nagent_proxy " + one.addr + " {\n name one\n operators user:alice\n}",
		more: func(port string) string {
			return "http://two.example:" + port + " {\n basic_auth {\n alice " + hash("second") + "\n }\n agent_proxy " + two.addr + " {\n name two\n }\n}\n" +
				"http://three.example:" + port + " {\n basic_auth {\n alice " + hash("third") + "\n }\n" +
				" agent_guard_endpoints\n agent_proxy " + two.addr + " {\n name three\n caller {http.auth.user.id}\n }\n}\n" +
				"http://ops.example:" + port + " {\n agent_guard_endpoints\n}"
		},
	})
	as := func(host, password string) somebody {
		r := g.build(request{path: "/"})
		r.SetBasicAuth("alice", password)
		return somebody{host: host, header: headers{"Authorization": r.Header.Get("Authorization")}}
	}
	g.apart(boss, somebody{host: "ops.example"}, as("one.example", "first"), as("two.example", "second"))

	// The name leads nowhere at another site, and the password of another site neither.
	if got := g.call(as("one.example", "second").does(request{path: "/pay", id: "k"})); got.status != 401 {
		t.Errorf("another site's password is taken: %d", got.status)
	}
	// An operator is the alice of the guard that names her.
	g.call(as("two.example", "second").does(request{path: "/pay", id: "k"}))
	g.sights(t, as("one.example", "first"), one.addr, two.addr)
	g.sights(t, as("two.example", "second"), two.addr)
}

// sights holds which upstreams' breakers somebody sees.
func (g *gateway) sights(t *testing.T, who somebody, want ...string) {
	t.Helper()
	var got []string
	for _, c := range document[circuitsView](t, g.call(who.does(request{method: "GET", path: "/.well-known/cascade/circuits"}))).Circuits {
		got = append(got, c.Upstream)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s sees the breakers of %v, want %v", who.host, got, want)
	}
}

// P3: CN=alice of one site's client authority is not that of another's, also where the
// client writes the other site's Host and the server does not compare it.
func TestP3CertificatesOfTwoAuthoritiesAreApart(t *testing.T) {
	one, two, boss := newUpstream(t), newUpstream(t), newAgent(t, "boss")
	server, first, second := newAuthority(t), newAuthority(t), newAuthority(t)
	port := ""
	site := func(host, clients, directives string) string {
		files := server.files(t, host)
		return "https://" + host + ":" + port + " {\n tls " + files + clients + "\n" + directives + "\n}\n"
	}
	auth := func(a *authority) string {
		return " {\n client_auth {\n mode require_and_verify\n trust_pool file " + a.file + "\n }\n }"
	}
	g := launch(t, setup{
		app:     trusting(t, boss) + "\n rollback {\n coordinators " + boss.issuer.Identity() + "\n }",
		badger:  true,
		address: func(p string) string { port = p; return "https://one.example:" + p },
		site: "tls " + server.files(t, "one.example") + auth(first) +
			"\nagent_proxy " + one.addr + " {\n name one\n operators certificate:dn:CN=alice\n}",
		more: func(string) string {
			return site("two.example", auth(second), "agent_proxy "+two.addr+" {\n name two\n}") +
				site("ops.example", "", "agent_guard_endpoints")
		},
	})
	text := strings.Replace(g.config("tls "+server.files(t, "one.example")+auth(first)+
		"\nagent_proxy "+one.addr+" {\n name one\n operators certificate:dn:CN=alice\n}"),
		"protocols h1 h2 h2c", "protocols h1 h2 h2c\n\t\tstrict_sni_host insecure_off", 1)
	if err := loadConfig(text); err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: "alice"}
	as := func(name, host string, cert *tls.Certificate) somebody {
		config := server.client(cert)
		config.ServerName = name
		return somebody{host: host, client: g.newClient(config)}
	}
	ops := as("ops.example", "ops.example", nil)
	eventually(t, "the new configuration answers", func() bool {
		_, err := g.send(ops.does(request{method: "GET", path: "/"}))
		return err == nil
	})
	alice, other := as("one.example", "one.example", first.issue(t, subject, nil)), second.issue(t, subject, nil)
	g.apart(boss, ops, alice, as("two.example", "two.example", other), as("two.example", "one.example", other))

	// Over a renewal she is the same, and an operator only under her own authority.
	renewed := as("one.example", "one.example", first.issue(t, subject, nil))
	r := request{path: "/renewed", id: "k"}
	g.call(alice.does(r)).want(t, 201, "arrival 1", "executed")
	g.call(renewed.does(r)).want(t, 201, "arrival 1", "replayed")
	g.sights(t, alice, one.addr, two.addr)
	g.sights(t, as("two.example", "one.example", other), one.addr)
}
