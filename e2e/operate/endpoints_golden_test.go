package operate

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// endpointPaths are what the golden answers ask for. Some differ from a path of the gateway
// in their encoding or by a segment.
var endpointPaths = []string{
	"policy", "%70olicy", "policy/", "jwks", "jw%6bs", "health", "healt%68", "circuits", "circuits?state=open", "circuits?wid=w",
	"circuit%73", "circuits/x", "executions", "executions/", "executions/k", "executions/k/output", "executions/k/x",
	"executions/k?wait=x", "executions/never", "execution%73/k", "executions/%22k%22", "executions/k?key=1", "executions/k/output?method=PUT",
	"problems", "problems/", "problems/in-doubt", "problems/none", "problem%73/in-doubt",
	"ledger/head", "ledger%2Fhead", "ledger/proof?index=5", "ledger/proof", "ledger/consistency?old=9", "ledger/entries", "ledger/entries?jti=x",
	"ledger/entries/", "ledger/entries/77", "ledger/entries/x", "ledger/none", "workflows/w", "workflows/", "workflows/a/b", "workflows/%25zz",
	"checkpoints/c?wait=0", "checkpoints/c?wait=x", "errors", "errors/x",
	"rollback", "rollback/", "rollback/x", "rollback/3c8f5f9e-9d0e-4f0e-8f0a-0d0c0b0a0908", "rollback/a/b", "none", "",
	"/.well-known/cascade", "/.well-known/atd/rollback", "/.well-known/atd/rollback/x", "/.well-known/aerr/rollback", "/aerr/rollback",
	"/aerr/rollback/x", "/.well-known/aerr/circuits", "/aerr/circuits", "/aerr/circuit%73", "/aerr/x", "/.well-known/atd/x",
}

// The answers of all endpoints as they are on the wire, for each kind of caller.
func TestGoldenEndpoints(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	callers := map[string]harness.Headers{
		"anonymous": nil, "credential": {"Authorization": "Bearer ann"}, "verified": {"X-Tenant": "ann"},
		"grpc": {"Content-Type": "application/grpc"}, "html": {"Accept": "text/html"}, "token": {"Execution-Context": "x.y.z"},
	}
	guarded := "agent_proxy " + u.Addr + " {\n name pay\n %s\n }"
	endpoints := "agent_guard_endpoints\n respond \"fell through\" 418"
	for name, s := range map[string]harness.Setup{
		"guard-credential":   {Site: fmt.Sprintf(guarded, "")},
		"guard-identity":     {Site: fmt.Sprintf(guarded, "caller {http.request.header.X-Tenant}"), App: harness.Trusting(t, a)},
		"guard-untrusting":   {Site: fmt.Sprintf(guarded, ""), App: "identity " + harness.GatewayIdentity},
		"endpoints":          {Site: endpoints},
		"endpoints-identity": {Site: endpoints, App: harness.Trusting(t, a)},
	} {
		t.Run(name, func(t *testing.T) {
			g := harness.Launch(t, s)
			defer g.Store.Closed()
			defer harness.Stop(t)
			if strings.HasPrefix(name, "guard") {
				g.Call(harness.Request{Path: "/pay", Id: "k", Header: callers["verified"]})
				g.Call(harness.Request{Path: "/pay", Id: "k", Header: callers["credential"]})
			}
			asked := map[string][]string{} // by the answer
			for _, path := range endpointPaths {
				if !strings.HasPrefix(path, "/") {
					path = "/.well-known/cascade/" + path
				}
				for _, method := range []string{"GET", "HEAD", "POST", "OPTIONS"} {
					for _, who := range slices.Sorted(maps.Keys(callers)) {
						if method != "GET" && who != "anonymous" && (method != "POST" || who == "grpc" || who == "html") {
							continue
						}
						got := g.Call(harness.Request{Method: method, Path: path, Header: callers[who]})
						answer := onWire(g, u, got)
						asked[answer] = append(asked[answer], fmt.Sprintf("%s %s %s", method, path, who))
					}
				}
			}
			var text strings.Builder
			for _, answer := range slices.SortedFunc(maps.Keys(asked), func(a, b string) int { return strings.Compare(asked[a][0], asked[b][0]) }) {
				fmt.Fprintf(&text, "%s\n\n%s\n--------\n", strings.Join(asked[answer], "\n"), answer)
			}
			file := filepath.Join("testdata", "endpoints", name+".golden")
			if *harness.UpdateGolden {
				if err := os.WriteFile(file, []byte(text.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if text.String() != string(want) {
				t.Errorf("the answers differ from %s:\n%s", file, firstDifference(text.String(), string(want)))
			}
		})
	}
}

// changing is what differs from run to run in an answer.
var changing = regexp.MustCompile(`\d{4}-\d\d-\d\dT[0-9:.]+Z|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|[0-9a-f]{64}|[A-Za-z0-9_+-]{40,}=*|arrival \d+|"(?:kid|note|key|root|origin|log)": *"[^"]*"|"(?:size|iat|calls)": *\d+`)

// onWire is an answer as it was sent, with what changes from run to run taken out.
func onWire(g *harness.Gateway, u *harness.Upstream, got harness.Reply) string {
	body := strings.NewReplacer(g.Addr, "GATEWAY", u.Addr, "UPSTREAM").Replace(got.Body)
	body = changing.ReplaceAllStringFunc(body, func(s string) string {
		if name, _, ok := strings.Cut(s, ":"); ok && strings.HasPrefix(name, `"`) {
			return name + ": CHANGES"
		}
		return "CHANGES"
	})
	var text strings.Builder
	fmt.Fprintf(&text, "%d\n", got.Status)
	for _, name := range slices.Sorted(maps.Keys(got.Header)) {
		for _, value := range got.Header[name] {
			switch {
			case name == "Date", name == "Server":
				continue
			case name == "Content-Length" && value == strconv.Itoa(len(got.Body)):
				value = "of the body"
			case name == "Content-Length":
				value = "of a body"
			}
			fmt.Fprintf(&text, "%s: %s\n", name, changing.ReplaceAllString(value, "CHANGES"))
		}
	}
	return text.String() + "\n" + body
}

// firstDifference shows where two texts part.
func firstDifference(got, want string) string {
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	around := func(s string) string { return s[max(0, i-400):min(len(s), i+200)] }
	return "got ..." + around(got) + "\n\nwant ..." + around(want)
}
