package e2e

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// cascade 4.2.1 and ATD: a token of an event says what the drafts ask, or is refused.
func TestEventsOfAgents(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + upstream.addr})
	ext := func() *ect.ExtBuilder { return new(ect.ExtBuilder) }
	for name, c := range map[string]struct {
		claims        ect.Claims
		reason, names string
	}{
		"a checkpoint that does not say whether it is reversible": {ect.Claims{Action: "checkpoint", Ext: ext().Int(ect.MemberTTL, 60).Text(ect.MemberRollbackURI, "https://a.example/.well-known/cascade/rollback")}, "ext", "; cascade.reversible is missing"},
		"a rollback without a reason":                             {ect.Claims{Action: "rollback_start"}, "ext", "; cascade."},
		"an error without a severity":                             {ect.Claims{Action: "error", Vocabulary: ect.ATD, Ext: ext().Text(ect.MemberErrorType, "timeout")}, "ext", "; atd.severity is missing"},
		"an error of nothing":                                     {ect.Claims{Action: "error", Ext: ext().Text(ect.MemberErrorType, "timeout").Text(ect.MemberSeverity, "error")}, "par", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := g.call(with(a.issue(c.claims), request{path: "/pay"}))
			got.refusedFor(t, 403, c.reason)
			if !strings.Contains(got.body, c.names) {
				t.Errorf("%s: %q is not named", got.body, c.names)
			}
		})
	}
	upstream.arrived("/pay", 0)
}

// What a caller sends is not what the gateway signs: neither the address for rollbacks
// nor the target are taken from a request (cascade Table 2).
func TestCheckpointsAreNotTheCallersWords(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	app := strings.Replace(trusting(t, a), "key_file", "public_url https://gateway.example.com\n key_file", 1)
	g := launch(t, setup{app: app, badger: true, site: "agent_proxy " + upstream.addr + " {\n target billing.example.com\n identity spiffe://example.com/billing\n }"})
	g.call(with(a.issue(ect.Claims{}), request{path: "/pay/secret-5e11", host: "evil.example"}))
	lines := upstream.last("/pay/secret-5e11").Header.Values(ect.FieldName)
	token, err := ect.ParseInsecure(lines[len(lines)-1])
	if err != nil {
		t.Fatal(err)
	}
	uri, _ := token.Ext().Text(ect.MemberRollbackURI)
	target, _ := token.Ext().Text(ect.MemberTarget)
	if uri != "https://gateway.example.com/.well-known/cascade/rollback" || target != "billing.example.com" {
		t.Errorf("%s", token.Payload())
	}
	for _, secret := range []string{"evil.example", "secret-5e11"} {
		if strings.Contains(token.Payload(), secret) {
			t.Errorf("%s is in %s", secret, token.Payload())
		}
	}
}

// Errors that an upstream sends along are recorded with the failure that they explain, and
// count: it was called with the call's token and its checkpoint, whomever those are made for.
// Where the route names the upstream nobody else is it, and of other calls it tells nothing.
func TestUpstreamErrorsAreChained(t *testing.T) {
	upstream, a, b, c := newUpstream(t), newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "c")
	named := func(by *agent) string { return " {\n identity " + by.issuer.Identity() + "\n }" }
	for name, test := range map[string]struct {
		site     string
		of       string // what the error follows from
		names    string // the checkpoint that it names
		answer   int
		recorded bool
	}{
		"the checkpoint":                 {site: named(b), of: "checkpoint", answer: 502, recorded: true},
		"the token":                      {site: named(b), of: "task", answer: 502, recorded: true},
		"both":                           {site: named(b), of: "task checkpoint", names: "checkpoint", answer: 502, recorded: true},
		"a call that is done":            {site: named(b), of: "task", answer: 200, recorded: true},
		"the token, by whoever answers":  {of: "task", answer: 502, recorded: true},
		"a call that is done, likewise":  {of: "task", answer: 200, recorded: true},
		"by somebody else":               {site: named(c), of: "task", answer: 502},
		"more than the call":             {of: "task other", answer: 502},
		"more than the named one's call": {site: named(b), of: "task other", answer: 502},
		"another checkpoint":             {of: "task", names: "other", answer: 502},
	} {
		t.Run(name, func(t *testing.T) {
			g := launch(t, setup{app: trusting(t, a, b, c), badger: true, site: "agent_proxy " + upstream.addr + test.site})
			task := a.issue(ect.Claims{Workflow: uuid.NewString()})
			other := a.issue(ect.Claims{Workflow: task.Workflow()})
			ids := map[string]string{"task": task.ID(), "other": other.ID()}
			if got := g.call(with(other, request{path: "/other"})); test.names == "other" {
				ids["other"] = got.header.Get("Execution-Checkpoint")
			}
			var sent *ect.Token
			upstream.on("/pay", func(w http.ResponseWriter, in *arrival) {
				lines := in.Header.Values(ect.FieldName)
				last, err := ect.ParseInsecure(lines[len(lines)-1])
				if err != nil {
					t.Error(err)
					return
				}
				ids["checkpoint"] = last.ID()
				var parents []string
				for _, of := range strings.Fields(test.of) {
					parents = append(parents, ids[of])
				}
				sent = b.issue(ect.Claims{
					Workflow: task.Workflow(), Action: "error", Parents: parents,
					Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ids[test.names]),
				})
				w.Header().Set(ect.FieldName, sent.Raw())
				w.WriteHeader(test.answer)
			})
			g.call(with(task, request{path: "/pay"}))
			nodes := 6 // of two calls
			if test.answer != http.StatusOK {
				nodes++ // the gateway's error
			}
			if test.recorded {
				nodes++
			}
			view := g.settledView(a, task.Workflow(), nodes)
			if len(view.Nodes) != nodes || (view.state(sent.ID()) != "none") != test.recorded {
				t.Errorf("%+v", view)
			}
			for _, of := range strings.Fields(test.of) {
				counts := slices.ContainsFunc(view.Edges, func(e struct{ From, To, Kind string }) bool {
					return e.From == ids[of] && e.To == sent.ID() && e.Kind == "error_of"
				})
				if counts != test.recorded {
					t.Errorf("of the %s: %+v", of, view)
				}
			}
		})
	}
}

// ADR 0040: a checkpoint that an upstream got from the gateway under its name of before is
// still the gateway's own word when the upstream calls with it.
func TestOwnTokensAfterARename(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	app, site := trusting(t, a, b), "agent_proxy "+upstream.addr+" {\n identity "+b.issuer.Identity()+"\n }"
	var handed string
	upstream.on("/pay", func(_ http.ResponseWriter, in *arrival) {
		lines := in.Header.Values(ect.FieldName)
		handed = lines[len(lines)-1]
	})
	g := launch(t, setup{app: app, site: site})
	g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{path: "/pay"}))
	stop(t)
	renamed := strings.Replace(app, gatewayIdentity, "spiffe://example.com/renamed", 1)
	g = launch(t, setup{app: renamed, site: site, store: g.store})
	if got := g.call(withRaw(handed, request{path: "/next", id: "next"})); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	g.call(with(a.issue(ect.Claims{}), request{path: "/next"})).refusedFor(t, 403, "aud")
}

// P1: so is a retry under a key that has ended since: it gets the recorded answer. Whatever
// else such a key has signed is refused, however far back it is dated.
func TestRetryUnderAnEndedKey(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	app := trusting(t, a)
	g := launch(t, setup{app: app, site: "agent_proxy " + upstream.addr, badger: true})
	past := time.Now().Add(2*time.Second - ect.Skew)
	used, unused := a.issueAt(past, ect.Claims{}), a.issueAt(past, ect.Claims{})
	first := g.call(with(used, request{path: "/pay"}))
	if first.status != http.StatusCreated {
		t.Fatalf("%d %s", first.status, first.body)
	}
	path := app[strings.LastIndex(app, " ")+1:]
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	ended := strings.Replace(string(text), `"kty"`, fmt.Sprintf(`"exp":%d,"kty"`, unused.IssuedAt().Unix()), 1)
	if err := os.WriteFile(path, []byte(ended), 0o600); err != nil {
		t.Fatal(err)
	}
	// The file is looked at once a second, and the key holds for the skew; until then the
	// reason is that the token was used for something else.
	for deadline := time.Now().Add(patience); !strings.Contains(g.call(with(used, request{path: "/else"})).body, `"key-revoked"`); {
		if time.Now().After(deadline) {
			t.Fatal("the key does not end")
		}
	}
	again := g.call(with(used, request{path: "/pay"}))
	if again.header.Get("Execution-Status") != "replayed" || again.body != first.body {
		t.Errorf("%d %v %s", again.status, again.header, again.body)
	}
	g.call(with(unused, request{path: "/new"})).refusedFor(t, 403, "key-revoked")
	upstream.arrived("/pay", 1)
	upstream.arrived("/new", 0)
}
