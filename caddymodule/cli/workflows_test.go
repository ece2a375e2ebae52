package cli

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// blocks returns the fenced blocks of a kind in a document.
func blocks(t *testing.T, document, kind string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", document))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, part := range strings.Split(string(text), "\n```"+kind+"\n")[1:] {
		block, _, _ := strings.Cut(part, "\n```")
		found = append(found, block+"\n")
	}
	return found
}

// The page's plan is valid, and the page shows what the command prints.
func TestValidateShowsThePage(t *testing.T) {
	file := put(t, "trip.json", blocks(t, "workflows.md", "json")[0])
	if out, want := says(t, "workflows", "validate", file), blocks(t, "workflows.md", "text")[0]; out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	shown := document[struct {
		Version  string         `json:"version"`
		Nodes    int            `json:"nodes"`
		Edges    int            `json:"edges"`
		Levels   [][]string     `json:"levels"`
		Warnings []plan.Problem `json:"warnings"`
	}](t, "workflows", "validate", file)
	if shown.Nodes != 4 || shown.Edges != 4 || !reflect.DeepEqual(shown.Levels, [][]string{{"hold"}, {"flight", "hotel"}, {"charge"}}) || shown.Version == "" || shown.Warnings == nil {
		t.Errorf("%+v", shown)
	}
	if got, want := says(t, "workflows", "schema"), string(plan.Schema()); got != want {
		t.Error("schema prints something else")
	}
}

// The page's errors are those of its plan with three mistakes.
func TestRefusedAsOnThePage(t *testing.T) {
	text := strings.NewReplacer(
		`"book_hotel", "reversible": true`, `"book_hotel", "resource_hints": {"timeout_s": "30s"}`, `"from": "flight"`, `"from": "flihgt"`,
		`"from": "hotel", "to": "charge"}`, `"from": "hotel", "to": "charge"}, {"from": "hotel", "to": "hold"}`,
	).Replace(blocks(t, "workflows.md", "json")[0])
	file := put(t, "trip.json", text)
	_, _, err := run(t, "workflows", "validate", file)
	want := strings.TrimPrefix(strings.TrimSpace(blocks(t, "workflows.md", "text")[1]), "Error: trip.json")
	if err == nil || strings.TrimPrefix(err.Error(), file) != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// A-optional-declarative-workflow-format-e: reversible is compared with the actions of a
// configuration, as it is written; differences are warnings.
func TestValidateComparesUndo(t *testing.T) {
	file := put(t, "plan.json", `{"wf_id": "w", "nodes": [{"id": "a", "label": "pay", "reversible": false}, {"id": "mail", "reversible": true}, {"id": "twice", "reversible": true}, {"id": "c", "label": "other", "reversible": true}]}`)
	config := put(t, "config.json", `{"apps": {"http": {"servers": {"s": {"routes": [{"handle": [{"handler": "subroute", "routes": [{"handle": [
		{"handler": "agent_guard", "actions": [{"name": "pay", "compensate": {"url": "/refunds"}}, {"name": "mail", "irreversible": true}, {"name": "twice", "restore": {}}]},
		{"handler": "agent_guard", "name": "b", "actions": [{"name": "twice", "restore": null}]}
	]}]}]}]}}}}}`)
	out, diagnostics, err := run(t, "workflows", "validate", file, "--config", config)
	want := `Warning: a reversible: is false, but the action "pay" can be undone
Warning: mail reversible: is true, but nothing undoes the action "mail": give it restore, compensate or delegate, or say false
Warning: twice reversible: is true, but nothing undoes the action "twice": give it restore, compensate or delegate, or say false
`
	if err != nil || !strings.Contains(out, "w: 4 nodes, 0 edges, 1 levels") || diagnostics != want {
		t.Errorf("%v\n%s\n%s", err, out, diagnostics)
	}
	refuses(t, "reading ", "workflows", "validate", file, "--config", config+".not")
	refuses(t, "--adapter goes with --config", "workflows", "validate", file, "--adapter", "caddyfile")
}

// A-topological-order-f: a plan with a cycle is refused, and so is everything else that is no plan.
func TestValidateRefuses(t *testing.T) {
	const cycle = `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}, {"id": "c", "hitl": {"a":` + "\n" + `1}}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}`
	file := put(t, "plan.json", cycle)
	refuses(t, file+" is no plan:\n  c hitl: there is no such member; there are id, label, reversible, hitl_required, resource_hints, constraints\n  a: lies on a cycle: a -> b -> a", "workflows", "validate", file)
	refuses(t, "no such file", "workflows", "validate", file+".not")
	refuses(t, "give one FILE with a plan; there are 0", "workflows", "validate")

	out, _, err := runWith(t, cycle, "workflows", "validate", "-", "-o", "json")
	if err == nil || err.Error() != "the input is no plan: 2 problems" || !strings.Contains(out, `"cycle": [`) || !strings.Contains(out, `"node": "c"`) {
		t.Errorf("%v\n%s", err, out)
	}
	// What a plan says cannot give orders to a terminal.
	refuses(t, `\x1b[2J`, "workflows", "validate", put(t, "evil.json", `{"\u001b[2J": 1}`))
	refuses(t, "has more than", "workflows", "validate", put(t, "large.json", strings.Repeat(" ", plan.MaxSize+1)))
}

// eventOf is the ledger event of a token with parents and extensions, in a workflow.
func eventOf(t *testing.T, issuer *ect.Issuer, action, wid string, ext *ect.ExtBuilder, parents ...string) ledger.Event {
	t.Helper()
	token, err := issuer.Issue(time.Now(), ect.Claims{Audience: []string{gatewayID}, Action: action, Workflow: wid, Parents: parents, Ext: ext})
	if err != nil {
		t.Fatal(err)
	}
	return ledger.Event{
		ID: token.ID(), Workflow: token.Workflow(), Action: token.Action(), Issuer: token.Issuer(), Time: token.IssuedAt(), Parents: parents, Payload: []byte(token.Raw()),
	}
}

// A-topological-order-d, A-node-states: the states of a plan's nodes follow from the ledger alone, with
// those that can begin, and what holds the others.
func TestProgressFromALedger(t *testing.T) {
	b := newLogbook(t)
	guard, _ := issuerOf(t, gatewayID)
	agent, _ := issuerOf(t, "spiffe://example.com/agent")
	outcome := func(execution, verdict string) *ect.ExtBuilder {
		return new(ect.ExtBuilder).Text("agent_guard.execution", execution).Text("agent_guard.outcome", verdict)
	}
	claim := func(execution string, parents ...string) ledger.Event {
		return eventOf(t, guard, "checkpoint", someWID, new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Text("agent_guard.execution", execution), parents...)
	}
	file := put(t, "trip.json", blocks(t, "workflows.md", "json")[0])
	progress := func(export string, more ...string) []string {
		return append([]string{"workflows", "progress", file, export, "--origin", origin, "--key", b.ledger.Key(origin), "--workflow", someWID, "--gateway", gatewayID}, more...)
	}

	// The gateway's own record of a call without tokens is done.
	hold := claim("k1")
	held := eventOf(t, guard, "hold_budget", someWID, outcome("k1", "completed"), hold.ID)
	// An agent's call is in doubt.
	flight := eventOf(t, agent, "book_flight", someWID, nil, held.ID)
	flightClaim := claim("k2", flight.ID)
	flightDoubt := eventOf(t, guard, "book_flight", someWID, outcome("k2", "in_doubt"), flight.ID, flightClaim.ID)
	// One names its node, and is under way. Another is none of the plan, and one is of another workflow.
	hotel := eventOf(t, agent, "reserve", someWID, new(ect.ExtBuilder).Text("atd.node", "hotel"), held.ID)
	search := eventOf(t, agent, "search", someWID, nil)
	b.record(hold, held, flight, flightClaim, flightDoubt, hotel, claim("k3", hotel.ID), search,
		eventOf(t, agent, "create_payment", "b0b1c2d3-e4f5-6789-abcd-ef0123456789", nil))
	export := b.export()
	version := document[struct{ Version string }](t, "workflows", "validate", file).Version
	want := strings.Replace(blocks(t, "workflows.md", "text")[2], "7c9e6679-7425-40de-944b-e07fc1f90ae7", search.ID, 1)
	if out := says(t, progress(export)...); out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}

	// The gateway settles the doubt, and the last one can begin. Nobody else's outcome counts.
	b.record(eventOf(t, guard, "book_flight", someWID, outcome("k2", "completed"), flight.ID, flightClaim.ID), eventOf(t, guard, "reserve", someWID, outcome("k3", "completed"), hotel.ID),
		claim("k4")) // a call under way without a token says of no node
	export = b.export()
	if doc := document[progressDocument](t, progress(export, "--gateway", "spiffe://example.com/other")...); !doc.Nodes[3].Ready {
		t.Errorf("%+v", doc)
	}
	others := []string{"workflows", "progress", file, export, "--origin", origin, "--key", b.ledger.Key(origin), "--workflow", someWID, "--gateway", "spiffe://example.com/other"}
	if doc := document[progressDocument](t, others...); doc.Nodes[1].State != "running" || doc.Nodes[3].Ready {
		t.Errorf("%+v", doc)
	}
	doc := document[progressDocument](t, progress(export)...)
	if !doc.Nodes[3].Ready || len(doc.Nodes[3].Holds) > 0 || doc.PlanID != "trip" || doc.Version != version || doc.Workflow != someWID || len(doc.Others) != 2 {
		t.Errorf("%+v", doc)
	}

	// What does not hold is not shown.
	text, err := os.ReadFile(export)
	if err != nil {
		t.Fatal(err)
	}
	refuses(t, "DOES NOT HOLD", progress(put(t, "altered", string(text[:len(text)-40])))...)
	refuses(t, "has nothing of the workflow nobody", progress(export, "--workflow", "nobody")...)
	refuses(t, "give a file with a plan and one with an export; there are 1", "workflows", "progress", file)
	refuses(t, `required flag(s) "gateway"`, "workflows", "progress", file, export, "--key", b.ledger.Key(origin), "--workflow", "w")
}
