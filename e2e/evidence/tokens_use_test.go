package evidence

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// cascade 4.2.1 and ATD: a token of an event says what the drafts ask, or is refused.
func TestEventsOfAgents(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + upstream.Addr})
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
			got := g.Call(harness.With(a.Issue(c.claims), harness.Request{Path: "/pay"}))
			got.RefusedFor(t, 403, c.reason)
			if !strings.Contains(got.Body, c.names) {
				t.Errorf("%s: %q is not named", got.Body, c.names)
			}
		})
	}
	upstream.Arrived("/pay", 0)
}

// What a caller sends is not what the gateway signs: neither the address for rollbacks
// nor the target are taken from a request (cascade Table 2).
func TestCheckpointsAreNotTheCallersWords(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	app := strings.Replace(harness.Trusting(t, a), "key_file", "public_url https://gateway.example.com\n key_file", 1)
	g := harness.Launch(t, harness.Setup{App: app, Badger: true, Site: "agent_proxy " + upstream.Addr + " {\n target billing.example.com\n identity spiffe://example.com/billing\n }"})
	g.Call(harness.With(a.Issue(ect.Claims{}), harness.Request{Path: "/pay/secret-5e11", Host: "evil.example"}))
	lines := upstream.Last("/pay/secret-5e11").Header.Values(ect.FieldName)
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
	upstream, a, b, c := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "c")
	named := func(by *harness.Agent) string { return " {\n identity " + by.Issuer.Identity() + "\n }" }
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
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b, c), Badger: true, Site: "agent_proxy " + upstream.Addr + test.site})
			task := a.Issue(ect.Claims{Workflow: uuid.NewString()})
			other := a.Issue(ect.Claims{Workflow: task.Workflow()})
			ids := map[string]string{"task": task.ID(), "other": other.ID()}
			if got := g.Call(harness.With(other, harness.Request{Path: "/other"})); test.names == "other" {
				ids["other"] = got.Header.Get("Execution-Checkpoint")
			}
			var sent *ect.Token
			upstream.On("/pay", func(w http.ResponseWriter, in *harness.Arrival) {
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
				sent = b.Issue(ect.Claims{
					Workflow: task.Workflow(), Action: "error", Parents: parents,
					Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "timeout").Text(ect.MemberCheckpointID, ids[test.names]),
				})
				w.Header().Set(ect.FieldName, sent.Raw())
				w.WriteHeader(test.answer)
			})
			g.Call(harness.With(task, harness.Request{Path: "/pay"}))
			nodes := 6 // of two calls
			if test.answer != http.StatusOK {
				nodes++ // the gateway's error
			}
			if test.recorded {
				nodes++
			}
			view := g.SettledView(a, task.Workflow(), nodes)
			if len(view.Nodes) != nodes || (view.State(sent.ID()) != "none") != test.recorded {
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
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	app, site := harness.Trusting(t, a, b), "agent_proxy "+upstream.Addr+" {\n identity "+b.Issuer.Identity()+"\n }"
	var handed string
	upstream.On("/pay", func(_ http.ResponseWriter, in *harness.Arrival) {
		lines := in.Header.Values(ect.FieldName)
		handed = lines[len(lines)-1]
	})
	g := harness.Launch(t, harness.Setup{App: app, Site: site})
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Path: "/pay"}))
	harness.Stop(t)
	renamed := strings.Replace(app, harness.GatewayIdentity, "spiffe://example.com/renamed", 1)
	g = harness.Launch(t, harness.Setup{App: renamed, Site: site, Store: g.Store})
	if got := g.Call(harness.WithRaw(handed, harness.Request{Path: "/next", Id: "next"})); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	g.Call(harness.With(a.Issue(ect.Claims{}), harness.Request{Path: "/next"})).RefusedFor(t, 403, "aud")
}

// P1: so is a retry under a key that has ended since: it gets the recorded answer. Whatever
// else such a key has signed is refused, however far back it is dated.
func TestRetryUnderAnEndedKey(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	app := harness.Trusting(t, a)
	g := harness.Launch(t, harness.Setup{App: app, Site: "agent_proxy " + upstream.Addr, Badger: true})
	past := time.Now().Add(2*time.Second - ect.Skew)
	used, unused := a.IssueAt(past, ect.Claims{}), a.IssueAt(past, ect.Claims{})
	first := g.Call(harness.With(used, harness.Request{Path: "/pay"}))
	if first.Status != http.StatusCreated {
		t.Fatalf("%d %s", first.Status, first.Body)
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
	for deadline := time.Now().Add(harness.Patience); !strings.Contains(g.Call(harness.With(used, harness.Request{Path: "/else"})).Body, `"key-revoked"`); {
		if time.Now().After(deadline) {
			t.Fatal("the key does not end")
		}
	}
	again := g.Call(harness.With(used, harness.Request{Path: "/pay"}))
	if again.Header.Get("Execution-Status") != "replayed" || again.Body != first.Body {
		t.Errorf("%d %v %s", again.Status, again.Header, again.Body)
	}
	g.Call(harness.With(unused, harness.Request{Path: "/new"})).RefusedFor(t, 403, "key-revoked")
	upstream.Arrived("/pay", 1)
	upstream.Arrived("/new", 0)
}
