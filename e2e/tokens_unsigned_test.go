package e2e

import (
	"crypto/tls"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

const level1 = "\n trust {\n min_level L1\n }"

// bare is an unsigned token (level L1) with these claims.
func bare(t *testing.T, claims map[string]any) string {
	t.Helper()
	now := time.Now().Unix()
	all := map[string]any{"aud": gatewayIdentity, "iat": now, "exp": now + 600, "jti": uuid.NewString(), "exec_act": "act", "par": []string{}}
	for name, v := range claims {
		all[name] = v
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

func withRaw(raw string, r request) request {
	header := headers{ect.FieldName: raw}
	for name, v := range r.header {
		header[name] = v
	}
	r.header = header
	return r
}

// P3: what an unsigned token says of itself names no caller. Nobody gets a recorded answer
// by it, nor sight of executions, workflows and checkpoints.
func TestP3UnsignedTokenNamesNobody(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "ada")
	g := launch(t, setup{app: trusting(t, a) + level1, site: "agent_proxy " + upstream.addr})
	wid, ada := uuid.NewString(), a.issuer.Identity()
	order := request{path: "/pay", id: "order-7"}
	task := a.issue(ect.Claims{Workflow: wid})
	first := g.call(with(task, order))
	first.want(t, http.StatusCreated, "arrival 1", "executed")
	checkpoint := first.header.Get("Execution-Checkpoint")

	forged := func(more map[string]any) string {
		claims := map[string]any{"iss": ada, "wid": wid}
		for name, v := range more {
			claims[name] = v
		}
		return bare(t, claims)
	}
	g.call(withRaw(forged(nil), order)).want(t, http.StatusCreated, "arrival 2", "executed") // as whoever has no credential
	g.call(withRaw(forged(nil), request{path: "/pay", id: "order-7", header: headers{"Authorization": "Bearer x"}})).want(t, http.StatusCreated, "arrival 3", "executed")
	g.call(with(a.issue(ect.Claims{Workflow: wid}), order)).want(t, http.StatusCreated, "arrival 1", "replayed")

	// Neither her name nor her nodes as parents give sight, with a credential or without.
	linked := forged(map[string]any{"par": []string{task.ID(), checkpoint}})
	mallory := headers{"Authorization": "Bearer mallory"}
	got := g.call(withRaw(linked, request{path: "/pay", id: "m", header: mallory}))
	if got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	g.sees(a, "workflows/"+wid)
	for _, path := range []string{
		"executions/order-7", "workflows/" + wid, "checkpoints/" + checkpoint, "ledger/entries?jti=" + task.ID() + "&wid=" + wid,
		"ledger/entries?jti=" + checkpoint,
	} {
		for _, header := range []headers{nil, mallory} {
			for _, raw := range []string{forged(nil), ""} {
				r := request{method: "GET", path: "/.well-known/cascade/" + path, header: header}
				if raw != "" {
					r = withRaw(raw, r)
				}
				got := g.call(r)
				if shows := func(id string) bool { return contains(got.body, `"jti": "`+id) }; shows(task.ID()) || shows(checkpoint) || contains(got.body, ada) {
					t.Errorf("%s with %v: %s", path, header, got.body)
				}
			}
		}
		g.sees(a, path)
	}
}

// ECT section "Levels": the iss of an unsigned token counts where the connection proves it.
func TestUnsignedTokenOfAProvenConnection(t *testing.T) {
	u, a, ca := newUpstream(t), newAgent(t, "ada"), newAuthority(t)
	g := launch(t, setup{
		app:     trusting(t, a) + level1,
		address: func(port string) string { return "https://localhost:" + port },
		site: fmt.Sprintf("tls %s {\n client_auth {\n mode verify_if_given\n trust_pool file %s\n}\n}\nagent_proxy %s",
			ca.files(t, "localhost"), ca.file, u.addr),
	})
	as := func(cert *tls.Certificate) *http.Client { return g.newClient(ca.client(cert)) }
	spiffe := func(names ...string) (uris []*url.URL) {
		for _, name := range names {
			uris = append(uris, &url.URL{Scheme: "spiffe", Host: "example.com", Path: "/agent/" + name})
		}
		return uris
	}
	order := func(client *http.Client, raw string) reply {
		return g.call(withRaw(raw, request{path: "/pay", id: "order-7", client: client, host: "localhost"}))
	}
	ada := map[string]any{"iss": a.issuer.Identity()}
	order(as(nil), a.issue(ect.Claims{}).Raw()).want(t, http.StatusCreated, "arrival 1", "executed")
	order(as(ca.issue(t, pkix.Name{}, spiffe("ada"))), bare(t, ada)).want(t, http.StatusCreated, "arrival 1", "replayed")
	// A certificate that names nobody, several, or no certificate, proves nothing.
	order(as(nil), bare(t, ada)).want(t, http.StatusCreated, "arrival 2", "executed")
	order(as(ca.issue(t, pkix.Name{CommonName: "mallory"}, nil)), bare(t, ada)).want(t, http.StatusCreated, "arrival 3", "executed")
	order(as(ca.issue(t, pkix.Name{CommonName: "both"}, spiffe("ada", "eve"))), bare(t, ada)).want(t, http.StatusCreated, "arrival 4", "executed")
	order(as(ca.issue(t, pkix.Name{}, spiffe("eve"))), bare(t, ada)).refusedFor(t, http.StatusForbidden, "iss")

	// A retry after the token's time is judged by the connection too.
	late := map[string]any{"iss": a.issuer.Identity(), "iat": time.Now().Unix() - 950}
	order(as(ca.issue(t, pkix.Name{}, spiffe("eve"))), bare(t, late)).refusedFor(t, http.StatusForbidden, "iss")
}

// Whoever sends a token without a signature uses up no id of one with a signature.
func TestUnsignedTokenUsesUpNoID(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "ada")
	g := launch(t, setup{app: trusting(t, a) + level1, badger: true, site: "agent_proxy " + upstream.addr})
	wid, id := uuid.NewString(), uuid.NewString()
	claims := map[string]any{"iss": a.issuer.Identity(), "wid": wid, "jti": id}
	mallory := headers{"Authorization": "Bearer mallory"}
	call := func(raw, path, key string) reply {
		return g.call(withRaw(raw, request{path: path, id: key, header: mallory}))
	}

	unsigned := bare(t, claims)
	call(unsigned, "/other", "x").want(t, http.StatusCreated, "arrival 1", "executed")
	call(unsigned, "/other", "x").want(t, http.StatusCreated, "arrival 1", "replayed")
	call(unsigned, "/other", "y").refusedFor(t, 403, "replayed")
	call(bare(t, map[string]any{"wid": wid, "jti": id, "exec_act": "again"}), "/other", "z").refusedFor(t, 403, "replayed")

	token := a.issue(ect.Claims{Workflow: wid, ID: id})
	first := g.call(with(token, request{path: "/pay"}))
	first.want(t, http.StatusCreated, "arrival 1", "executed")
	got := g.sees(a, "ledger/entries?jti="+id+"&wid="+wid)
	if doc := document[struct{ Token string }](t, got); doc.Token != token.Raw() {
		t.Errorf("under the id stands %s", got.body)
	}
	// Whoever was there before has no part in what is under the id now.
	r := request{method: "GET", path: "/.well-known/cascade/workflows/" + wid, header: mallory}
	if got := g.call(r); contains(got.body, `"jti": "`+id) || contains(got.body, first.header.Get("Execution-Checkpoint")) {
		t.Errorf("%d %s", got.status, got.body)
	}
	// And what a signed token stands under is no id for one without a signature.
	call(bare(t, map[string]any{"wid": wid, "jti": id}), "/third", "x").refusedFor(t, 403, "replayed")

	// Nor by a request that changes nothing.
	id = uuid.NewString()
	g.call(withRaw(bare(t, map[string]any{"wid": wid, "jti": id}), request{method: "GET", path: "/look"}))
	token = a.issue(ect.Claims{Workflow: wid, ID: id})
	if got := g.call(with(token, request{method: "GET", path: "/see"})); got.status >= 400 {
		t.Errorf("%d %s", got.status, got.body)
	}
	child := a.issue(ect.Claims{Workflow: wid, Parents: []string{id}})
	g.call(with(child, request{path: "/child"})).want(t, http.StatusCreated, "arrival 1", "executed")
	got = g.sees(a, "ledger/entries?jti="+id+"&wid="+wid)
	if doc := document[struct{ Token string }](t, got); doc.Token != token.Raw() {
		t.Errorf("under the id of what was seen stands %s", got.body)
	}
}

func contains(text, part string) bool { return part != "" && strings.Contains(text, part) }

// sees is what an agent gets, once what was told has its place in the ledger.
func (g *gateway) sees(a *agent, path string) (got reply) {
	g.t.Helper()
	eventually(g.t, path+" is to be seen", func() bool {
		got = g.get(a, path)
		return got.status == http.StatusOK
	})
	return got
}
