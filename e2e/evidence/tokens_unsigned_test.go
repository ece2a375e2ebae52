package evidence

import (
	"crypto/tls"
	"crypto/x509/pkix"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P3: what an unsigned token says of itself names no caller. Nobody gets a recorded answer
// by it, nor sight of executions, workflows and checkpoints.
func TestP3UnsignedTokenNamesNobody(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "ada")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + harness.Level1, Site: "agent_proxy " + upstream.Addr})
	wid, ada := uuid.NewString(), a.Issuer.Identity()
	order := harness.Request{Path: "/pay", Id: "order-7"}
	task := a.Issue(ect.Claims{Workflow: wid})
	first := g.Call(harness.With(task, order))
	first.Want(t, http.StatusCreated, "arrival 1", "executed")
	checkpoint := first.Header.Get("Execution-Checkpoint")

	forged := func(more map[string]any) string {
		claims := map[string]any{"iss": ada, "wid": wid}
		for name, v := range more {
			claims[name] = v
		}
		return harness.Bare(t, claims)
	}
	g.Call(harness.WithRaw(forged(nil), order)).Want(t, http.StatusCreated, "arrival 2", "executed") // as whoever has no credential
	g.Call(harness.WithRaw(forged(nil), harness.Request{Path: "/pay", Id: "order-7", Header: harness.Headers{"Authorization": "Bearer x"}})).Want(t, http.StatusCreated, "arrival 3", "executed")
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), order)).Want(t, http.StatusCreated, "arrival 1", "replayed")

	// Neither her name nor her nodes as parents give sight, with a credential or without.
	linked := forged(map[string]any{"par": []string{task.ID(), checkpoint}})
	mallory := harness.Headers{"Authorization": "Bearer mallory"}
	got := g.Call(harness.WithRaw(linked, harness.Request{Path: "/pay", Id: "m", Header: mallory}))
	if got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	g.Sees(a, "workflows/"+wid)
	for _, path := range []string{
		"executions/order-7", "workflows/" + wid, "checkpoints/" + checkpoint, "ledger/entries?jti=" + task.ID() + "&wid=" + wid,
		"ledger/entries?jti=" + checkpoint,
	} {
		for _, header := range []harness.Headers{nil, mallory} {
			for _, raw := range []string{forged(nil), ""} {
				r := harness.Request{Method: "GET", Path: "/.well-known/cascade/" + path, Header: header}
				if raw != "" {
					r = harness.WithRaw(raw, r)
				}
				got := g.Call(r)
				if shows := func(id string) bool { return contains(got.Body, `"jti": "`+id) }; shows(task.ID()) || shows(checkpoint) || contains(got.Body, ada) {
					t.Errorf("%s with %v: %s", path, header, got.Body)
				}
			}
		}
		g.Sees(a, path)
	}
}

// ECT section "Levels": the iss of an unsigned token counts where the connection proves it.
func TestUnsignedTokenOfAProvenConnection(t *testing.T) {
	u, a, ca := harness.NewUpstream(t), harness.NewAgent(t, "ada"), harness.NewAuthority(t)
	g := harness.Launch(t, harness.Setup{
		App:     harness.Trusting(t, a) + harness.Level1,
		Address: func(port string) string { return "https://localhost:" + port },
		Site: fmt.Sprintf("tls %s {\n client_auth {\n mode verify_if_given\n trust_pool file %s\n}\n}\nagent_proxy %s",
			ca.Files(t, "localhost"), ca.File, u.Addr),
	})
	as := func(cert *tls.Certificate) *http.Client { return g.NewClient(ca.Client(cert)) }
	spiffe := func(names ...string) (uris []*url.URL) {
		for _, name := range names {
			uris = append(uris, &url.URL{Scheme: "spiffe", Host: "example.com", Path: "/agent/" + name})
		}
		return uris
	}
	order := func(client *http.Client, raw string) harness.Reply {
		return g.Call(harness.WithRaw(raw, harness.Request{Path: "/pay", Id: "order-7", Client: client, Host: "localhost"}))
	}
	ada := map[string]any{"iss": a.Issuer.Identity()}
	order(as(nil), a.Issue(ect.Claims{}).Raw()).Want(t, http.StatusCreated, "arrival 1", "executed")
	order(as(ca.Issue(t, pkix.Name{}, spiffe("ada"))), harness.Bare(t, ada)).Want(t, http.StatusCreated, "arrival 1", "replayed")
	// A certificate that names nobody, several, or no certificate, proves nothing.
	order(as(nil), harness.Bare(t, ada)).Want(t, http.StatusCreated, "arrival 2", "executed")
	order(as(ca.Issue(t, pkix.Name{CommonName: "mallory"}, nil)), harness.Bare(t, ada)).Want(t, http.StatusCreated, "arrival 3", "executed")
	order(as(ca.Issue(t, pkix.Name{CommonName: "both"}, spiffe("ada", "eve"))), harness.Bare(t, ada)).Want(t, http.StatusCreated, "arrival 4", "executed")
	order(as(ca.Issue(t, pkix.Name{}, spiffe("eve"))), harness.Bare(t, ada)).RefusedFor(t, http.StatusForbidden, "iss")

	// A retry after the token's time is judged by the connection too.
	late := map[string]any{"iss": a.Issuer.Identity(), "iat": time.Now().Unix() - 950}
	order(as(ca.Issue(t, pkix.Name{}, spiffe("eve"))), harness.Bare(t, late)).RefusedFor(t, http.StatusForbidden, "iss")
}

// Whoever sends a token without a signature uses up no id of one with a signature.
func TestUnsignedTokenUsesUpNoID(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "ada")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + harness.Level1, Badger: true, Site: "agent_proxy " + upstream.Addr})
	wid, id := uuid.NewString(), uuid.NewString()
	claims := map[string]any{"iss": a.Issuer.Identity(), "wid": wid, "jti": id}
	mallory := harness.Headers{"Authorization": "Bearer mallory"}
	call := func(raw, path, key string) harness.Reply {
		return g.Call(harness.WithRaw(raw, harness.Request{Path: path, Id: key, Header: mallory}))
	}

	unsigned := harness.Bare(t, claims)
	call(unsigned, "/other", "x").Want(t, http.StatusCreated, "arrival 1", "executed")
	call(unsigned, "/other", "x").Want(t, http.StatusCreated, "arrival 1", "replayed")
	call(unsigned, "/other", "y").RefusedFor(t, 403, "replayed")
	call(harness.Bare(t, map[string]any{"wid": wid, "jti": id, "exec_act": "again"}), "/other", "z").RefusedFor(t, 403, "replayed")

	token := a.Issue(ect.Claims{Workflow: wid, ID: id})
	first := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	first.Want(t, http.StatusCreated, "arrival 1", "executed")
	got := g.Sees(a, "ledger/entries?jti="+id+"&wid="+wid)
	if doc := harness.Document[struct{ Token string }](t, got); doc.Token != token.Raw() {
		t.Errorf("under the id stands %s", got.Body)
	}
	// Whoever was there before has no part in what is under the id now.
	r := harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + wid, Header: mallory}
	if got := g.Call(r); contains(got.Body, `"jti": "`+id) || contains(got.Body, first.Header.Get("Execution-Checkpoint")) {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	// And what a signed token stands under is no id for one without a signature.
	call(harness.Bare(t, map[string]any{"wid": wid, "jti": id}), "/third", "x").RefusedFor(t, 403, "replayed")

	// Nor by a request that changes nothing.
	id = uuid.NewString()
	g.Call(harness.WithRaw(harness.Bare(t, map[string]any{"wid": wid, "jti": id}), harness.Request{Method: "GET", Path: "/look"}))
	token = a.Issue(ect.Claims{Workflow: wid, ID: id})
	if got := g.Call(harness.With(token, harness.Request{Method: "GET", Path: "/see"})); got.Status >= 400 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	child := a.Issue(ect.Claims{Workflow: wid, Parents: []string{id}})
	g.Call(harness.With(child, harness.Request{Path: "/child"})).Want(t, http.StatusCreated, "arrival 1", "executed")
	got = g.Sees(a, "ledger/entries?jti="+id+"&wid="+wid)
	if doc := harness.Document[struct{ Token string }](t, got); doc.Token != token.Raw() {
		t.Errorf("under the id of what was seen stands %s", got.Body)
	}
}

func contains(text, part string) bool { return part != "" && strings.Contains(text, part) }
