package cli

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

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
