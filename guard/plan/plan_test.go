package plan_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	. "github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// figure is the descriptor of ATD ("Optional Declarative Workflow Format"), with the constraints of
// its figures "Circuit Breaker Policy" and "Resource Hints as Node Constraints" at the last node.
const figure = `{
  "wf_id": "bgp-failover-v2",
  "description": "BGP peer failover with validation",
  "nodes": [
    {"id": "n1", "label": "validate-config", "reversible": true, "hitl_required": false,
     "resource_hints": {"priority": "normal", "timeout_s": 30}},
    {"id": "n2", "label": "update-bgp-peer", "reversible": true, "hitl_required": true,
     "resource_hints": {"priority": "critical", "timeout_s": 120}},
    {"id": "n3", "label": "verify-session", "reversible": false, "hitl_required": false,
     "resource_hints": {"priority": "high", "timeout_s": 60},
     "constraints": {"atd.circuit_threshold": 0.5, "atd.circuit_window_s": 60,
       "atd.resource_cpu": "2", "atd.resource_memory_mb": 4096, "atd.resource_timeout_s": 60,
       "atd.resource_priority": "high", "atd.resource_gpu": "0", "atd.resource_network_mbps": 100,
       "max_runtime": {"s": 9.0, "kind": "wall"}}}
  ],
  "edges": [{"from": "n1", "to": "n2"}, {"from": "n2", "to": "n3"}]
}`

func parse(t testing.TB, text string) *Descriptor {
	t.Helper()
	d, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A-optional-declarative-workflow-format-a, A-resource-claim-format-a: the figures are read whole.
func TestFigures(t *testing.T) {
	d := parse(t, figure)
	yes, no := true, false
	want := []Node{
		{ID: "n1", Label: "validate-config", Reversible: &yes, Hints: Hints{Priority: "normal", TimeoutS: 30}, After: []int{1}},
		{ID: "n2", Label: "update-bgp-peer", Reversible: &yes, HITLRequired: true, Hints: Hints{Priority: "critical", TimeoutS: 120}, Before: []int{0}, After: []int{2}, Level: 1},
		{
			ID: "n3", Label: "verify-session", Reversible: &no, Before: []int{1}, Level: 2,
			Hints:            Hints{Priority: "high", TimeoutS: 60, CPU: "2", MemoryMB: 4096, GPU: "0", NetworkMbps: 100},
			CircuitThreshold: 0.5, CircuitWindowS: 60, Others: []Constraint{{"max_runtime", `{"kind":"wall","s":9e0}`}},
		},
	}
	if d.WorkflowID != "bgp-failover-v2" || d.Description != "BGP peer failover with validation" || d.Edges != 2 || len(d.Warnings) > 0 {
		t.Errorf("%+v", d)
	}
	for i, n := range d.Nodes {
		if !reflect.DeepEqual(n, want[i]) {
			t.Errorf("%+v, want %+v", n, want[i])
		}
	}
	if got := d.Levels(); !reflect.DeepEqual(got, [][]string{{"n1"}, {"n2"}, {"n3"}}) {
		t.Errorf("levels %v", got)
	}
	if place, ok := d.Find("n2"); !ok || place != 1 {
		t.Errorf("n2 is at %d", place)
	}
	if _, ok := d.Find("n4"); ok {
		t.Error("n4 is found")
	}
}

// withNodes is a plan of nodes n0, n1...; members are further ones of n0.
func withNodes(n int, members, edges string) string {
	var nodes []string
	for i := range n {
		node := fmt.Sprintf(`{"id": "n%d"`, i)
		if i == 0 && members != "" {
			node += ", " + members
		}
		nodes = append(nodes, node+"}")
	}
	return fmt.Sprintf(`{"wf_id": "w", "nodes": [%s], "edges": [%s]}`, strings.Join(nodes, ", "), edges)
}

func edges(pairs ...string) string {
	var all []string
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, fmt.Sprintf(`{"from": %q, "to": %q}`, pairs[i], pairs[i+1]))
	}
	return strings.Join(all, ", ")
}

// refused are texts with what is wrong with them. inSchema says that the schema refuses them too.
var refused = []struct {
	name, text string
	inSchema   bool
	want       []string
}{
	{"no JSON", "{\n\"wf_id\": \"w\",\n}", false, []string{"line 3: invalid character '}' looking for beginning of object key string"}},
	{"nothing", "", false, []string{"line 1: unexpected end of JSON input"}},
	{"cut", `{"wf_id": "w"`, false, []string{"line 1: unexpected end of JSON input"}},
	{"more behind it", "{}\n\n{}", false, []string{"line 3: invalid character '{' after top-level value"}},
	{"a list", " \n[]", true, []string{"line 2: it is no object"}},
	{"a name twice", "{\"wf_id\": \"w\",\n\"wf_id\": \"v\", \"nodes\": [{\"id\": \"a\"}]}", false, []string{"wf_id: line 2: the name stands twice in one object; write it once"}},
	{"a name twice in a node", "{\"wf_id\": \"w\", \"nodes\": [\n\n{\"id\": \"a\", \"id\": \"b\"}]}", false, []string{"a id: line 3: the name stands twice in one object; write it once"}},
	{"no UTF-8", "{\"wf_id\": \"\xff\", \"nodes\": [{\"id\": \"a\"}]}", false, []string{"wf_id: line 1: the text is no valid Unicode; write UTF-8, and surrogates in pairs"}},
	{"a lone surrogate", `{"wf_id": "\ud800", "nodes": [{"id": "a"}]}`, false, []string{"wf_id: line 1: the text is no valid Unicode; write UTF-8, and surrogates in pairs"}},
	{"a name that is no UTF-8", "{\"wf_id\": \"w\", \"nodes\": [{\"id\": \"a\", \"\xff\": 1}]}", true, []string{"a: line 1: a name is no valid Unicode; write UTF-8, and surrogates in pairs"}},
	{"too deep", "{\"wf_id\": \"w\", \"nodes\": [{\"id\": \"a\"},\n {\"constraints\": {\"x\": " + strings.Repeat("[", 33) + strings.Repeat("]", 33) + "}, \"id\": \"b\"}]}", false,
		[]string{"nodes[1] x: line 2: the value nests too deep; at most 32 levels are allowed"}},
	{"a name twice that is long", `{"wf_id": "w", "` + strings.Repeat("y", 1<<12) + `": 1, "` + strings.Repeat("y", 1<<12) + `": 2}`, true,
		[]string{strings.Repeat("y", 60) + "…: line 1: the name stands twice in one object; write it once"}},
	{"a long id", `{"wf_id": "w", "nodes": [{"id": "` + strings.Repeat("z", 1<<12) + `", "label": 1}], "edges": [{"from": "` + strings.Repeat("z", 1<<12) + `", "to": "` + strings.Repeat("z", 1<<12) + `"}]}`, true, []string{
		"nodes[0] id: has more than 128 characters", "nodes[0] label: is 1; write a string", "edges[0] from: has more than 128 characters", "edges[0] to: has more than 128 characters",
		"edges[0]: leads from " + strings.Repeat("z", 60) + "… to itself",
	}},
	{"empty", `{}`, true, []string{"wf_id: is missing or empty; name the plan", "nodes: there are none; a plan has at least one"}},
	{"of other kinds", `{"wf_id": 7, "description": null, "nodes": {}, "edges": "n1 -> n2"}`, true, []string{
		"wf_id: is 7; write a string", "description: is null; write a string", "nodes: is {}; write a list", `edges: is "n1 -> n2"; write a list`,
	}},
	{"elements of other kinds", `{"wf_id": "w", "nodes": [7, {"id": true}], "edges": [[], {"from": 1, "to": "a"}]}`, true, []string{
		"nodes[0]: is 7; write an object", "nodes[1] id: is true; write a string", "edges[0]: is []; write an object", "edges[1] from: is 1; write a string",
		"nodes[0] id: is missing or empty", "edges[0] from: is missing or empty; name the node that comes before",
	}},
	{"unknown members", `{"wf_id": "w", "node": [], "nodes": [{"id": "a", "hitl": true}], "edges": [{"from": "a", "to": "a", "kind": 1}]}`, true, []string{
		"node: there is no such member; there are wf_id, description, nodes, edges",
		"a hitl: there is no such member; there are id, label, reversible, hitl_required, resource_hints, constraints",
		"edges[0] kind: there is no such member; there are from, to", "edges[0]: leads from a to itself",
	}},
	{"members in other letters", `{"wf_id": "w", "Nodes": [], "nodes": [{"id": "a"}]}`, true, []string{"Nodes: there is no such member; there are wf_id, description, nodes, edges"}},
	{"ids", `{"wf_id": "w", "nodes": [{"id": "a b"}, {"id": ""}, {"label": "x"}, {"id": "ä"}, {"id": "` + strings.Repeat("x", 129) + `"}]}`, true, []string{
		`nodes[0] id: is "a b"; use visible ASCII characters, since header fields name nodes`, `nodes[3] id: is "ä"; use visible ASCII characters, since header fields name nodes`,
		"nodes[4] id: has more than 128 characters", "nodes[1] id: is missing or empty", "nodes[2] id: is missing or empty",
	}},
	{"an id twice", `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}, {"id": "a"}]}`, false, []string{"a id: nodes[0] and nodes[2] have the same; give each its own"}},
	{"long and unseen texts", `{"wf_id": "` + strings.Repeat("é", 257) + `", "description": "` + strings.Repeat("x", 4097) + `", "nodes": [{"id": "a", "label": "x\u0007y"}]}`, true, []string{
		"wf_id: has more than 256 characters", "description: has more than 4096 characters", "a label: has control characters",
	}},
	{"flags", withNodes(1, `"reversible": "yes", "hitl_required": 1`, ""), true, []string{
		`n0 reversible: is "yes"; write true or false`, "n0 hitl_required: is 1; write true or false",
	}},
	{"edges without ends", withNodes(2, "", `{"from": "n0"}, {"to": "n1"}, {}`), true, []string{
		"edges[0] to: is missing or empty; name the node that comes after", "edges[1] from: is missing or empty; name the node that comes before",
		"edges[2] from: is missing or empty; name the node that comes before",
	}},
	{"unknown ends", withNodes(2, "", edges("n0", "n9", "x", "n1")), false, []string{`edges[0] to: there is no node "n9"`, `edges[1] from: there is no node "x"`}},
	{"itself", withNodes(2, "", edges("n1", "n1")), false, []string{"edges[0]: leads from n1 to itself"}},
	{"an edge twice", withNodes(2, "", edges("n0", "n1", "n0", "n1")), false, []string{"edges[1]: n0 -> n1 stands twice"}},
	{"a cycle", withNodes(3, "", edges("n0", "n1", "n1", "n2", "n2", "n1")), false, []string{"n1: lies on a cycle: n1 -> n2 -> n1"}},
	{"two cycles", withNodes(6, "", edges("n0", "n1", "n1", "n0", "n1", "n2", "n2", "n3", "n3", "n4", "n4", "n2", "n4", "n5")), false, []string{
		"n2: lies on a cycle: n2 -> n3 -> n4 -> n2", "n0: lies on a cycle: n0 -> n1 -> n0",
	}},
	{"hints in other units", withNodes(1, `"resource_hints": {"priority": "urgent", "timeout_s": "30s", "timeout_ms": 30000, "memory_mb": "4GiB", "cpu": "500m", "gpu": 1, "network_mbps": 1.5}`, ""), true, []string{
		`n0 resource_hints.priority: is "urgent"; use critical, high, normal or low`,
		`n0 resource_hints.timeout_s: is "30s"; write whole seconds, from 1 to a year, as a number`,
		"n0 resource_hints.timeout_ms: there is no such member; there are priority, timeout_s, cpu, memory_mb, gpu, network_mbps; times are in seconds, sizes in MB",
		`n0 resource_hints.memory_mb: is "4GiB"; write a whole number of MB, as a number`,
		`n0 resource_hints.cpu: is "500m"; write a number as a string, like "2" or "0.5"`,
		`n0 resource_hints.gpu: is 1; write a number as a string, like "2" or "0.5"`,
		"n0 resource_hints.network_mbps: is 1.5; write a whole number of Mbit/s",
	}},
	{"hints out of range", withNodes(1, `"resource_hints": {"priority": 1, "timeout_s": 0, "memory_mb": -1, "network_mbps": 1e99}`, ""), true, []string{
		"n0 resource_hints.priority: is 1; use critical, high, normal or low", "n0 resource_hints.timeout_s: is 0; write whole seconds, from 1 to a year",
		"n0 resource_hints.memory_mb: is -1; write a whole number of MB", "n0 resource_hints.network_mbps: is 1e99; write a whole number of Mbit/s",
	}},
	{"a timeout in milliseconds", withNodes(1, `"constraints": {"atd.resource_timeout_s": 300000000}`, ""), true, []string{
		"n0 constraints.atd.resource_timeout_s: is 300000000; write whole seconds, from 1 to a year",
	}},
	{"constraints", withNodes(1, `"constraints": {"atd.circuit_threshold": 50, "atd.circuit_window_s": 0.5, "atd.resource_timout_s": 3, "atd.circuit": 1}`, ""), true, []string{
		"n0 constraints.atd.circuit_threshold: is 50; write a share above 0 and below 1", "n0 constraints.atd.circuit_window_s: is 0.5; write seconds, 1 or more",
		"n0 constraints.atd.resource_timout_s: there is no such member; there are atd.resource_priority, atd.resource_timeout_s, atd.resource_cpu, atd.resource_memory_mb, atd.resource_gpu, atd.resource_network_mbps, atd.circuit_threshold, atd.circuit_window_s",
		"n0 constraints.atd.circuit: there is no such member; there are atd.resource_priority, atd.resource_timeout_s, atd.resource_cpu, atd.resource_memory_mb, atd.resource_gpu, atd.resource_network_mbps, atd.circuit_threshold, atd.circuit_window_s",
	}},
	{"constraints of other kinds", withNodes(1, `"constraints": {"atd.circuit_threshold": "0.5", "atd.circuit_window_s": -1}, "resource_hints": []`, ""), true, []string{
		`n0 constraints.atd.circuit_threshold: is "0.5"; write a share above 0 and below 1, as a number`, "n0 constraints.atd.circuit_window_s: is -1; write seconds, 1 or more",
		"n0 resource_hints: is []; write an object",
	}},
	{"two answers", withNodes(1, `"constraints": {"atd.resource_timeout_s": 60, "atd.resource_priority": "low"}, "resource_hints": {"timeout_s": 30, "priority": "low"}`, ""), false, []string{
		"n0 resource_hints.timeout_s: and constraints.atd.resource_timeout_s are not the same (60 and 30): say it once",
	}},
}

// A-topological-order-f and the whole format: everything that is wrong is named, with its node.
func TestPlanProblems(t *testing.T) {
	for _, c := range refused {
		_, err := Parse([]byte(c.text))
		var wrong *Error
		if !errors.As(err, &wrong) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := strings.Split(wrong.Error(), "\n"); !slices.Equal(got, c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
	_, err := Parse(bytes.Repeat([]byte(" "), MaxSize+1))
	if err == nil || !strings.Contains(err.Error(), "it has more than 8388608 bytes") {
		t.Error(err)
	}
}

// A cycle is named whole in the problem, and shortened for people.
func TestLongCycle(t *testing.T) {
	var pairs []string
	for i := range 40 {
		pairs = append(pairs, fmt.Sprint("n", i), fmt.Sprint("n", (i+1)%40))
	}
	_, err := Parse([]byte(withNodes(40, "", edges(pairs...))))
	var wrong *Error
	if !errors.As(err, &wrong) || len(wrong.Problems) != 1 || len(wrong.Problems[0].Cycle) != 40 || wrong.Problems[0].Cycle[39] != "n39" {
		t.Fatal(err)
	}
	if want := "n0: lies on a cycle: n0 -> n1 -> n2 -> n3 -> n4 -> n5 -> 29 more -> n35 -> n36 -> n37 -> n38 -> n39 -> n0"; err.Error() != want {
		t.Error(err)
	}
}

// The first hundred problems are named, and the others counted; there are bounds.
func TestBounds(t *testing.T) {
	for text, want := range map[string]string{
		`{"wf_id": "w", "nodes": [` + strings.Repeat("{}, ", 149) + `{}]}`:                                                        "\n50 more",
		withNodes(MaxNodes+1, "", ""):                                                                                             "nodes: there are 10001; at most 10000 are allowed",
		withNodes(2, "", strings.Repeat(`{"from": "n0", "to": "n1"}, `, MaxEdges)+`{"from": "n0", "to": "n1"}`):                   "edges: there are 100001; at most 100000 are allowed",
		`{"wf_id": "w", "nodes": [{"id": "a", "constraints": {"x": ` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}}]}`: "nests too deep",
	} {
		_, err := Parse([]byte(text))
		var wrong *Error
		if !errors.As(err, &wrong) || len(wrong.Problems) > 100 || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %.300v", text, err)
		}
	}
	parse(t, withNodes(MaxNodes, "", ""))
}

// A label that names several nodes is legal: their calls name the node.
func TestWarnings(t *testing.T) {
	d := parse(t, `{"wf_id": "w", "nodes": [{"id": "a", "label": "x"}, {"id": "b", "label": "x"}, {"id": "c", "label": "a"}, {"id": "d", "label": "d"}]}`)
	want := []Problem{
		{Node: "c", Member: "label", Text: `"a" is also the id of a node, and means that one`},
		{Node: "a", Member: "label", Text: `"x" is the label of 2 nodes, such as b: their calls have to name the node`},
	}
	if !reflect.DeepEqual(d.Warnings, want) {
		t.Errorf("%v", d.Warnings)
	}
}

// A-optional-declarative-workflow-format-e: reversible agrees with what undoes the action.
func TestCheckUndo(t *testing.T) {
	d := parse(t, `{"wf_id": "w", "nodes": [
		{"id": "a", "label": "pay", "reversible": true}, {"id": "b", "label": "mail", "reversible": true}, {"id": "c", "label": "pay", "reversible": false},
		{"id": "mail", "label": "other", "reversible": true}, {"id": "e", "label": "unknown", "reversible": true}, {"id": "f", "label": "mail"}, {"id": "g", "label": "mail", "reversible": false}]}`)
	got := d.CheckUndo(func(action string) (bool, bool) { return action == "pay", action == "pay" || action == "mail" })
	const none = `is true, but nothing undoes the action "mail": give it restore, compensate or delegate, or say false`
	want := []Problem{{Node: "b", Member: "reversible", Text: none}, {Node: "c", Member: "reversible", Text: `is false, but the action "pay" can be undone`}, {Node: "mail", Member: "reversible", Text: none}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v", got)
	}
}

// A version is that of the meaning: how a plan is written makes no other one, and everything that it
// says does.
func TestVersions(t *testing.T) {
	d := parse(t, figure)
	const canonical = `{"description":"BGP peer failover with validation","edges":[{"from":"n1","to":"n2"},{"from":"n2","to":"n3"}],"nodes":[` +
		`{"id":"n1","label":"validate-config","resource_hints":{"priority":"normal","timeout_s":30},"reversible":true},` +
		`{"hitl_required":true,"id":"n2","label":"update-bgp-peer","resource_hints":{"priority":"critical","timeout_s":120},"reversible":true},` +
		`{"constraints":{"atd.circuit_threshold":0.5,"atd.circuit_window_s":60,"max_runtime":{"kind":"wall","s":9e0}},"id":"n3","label":"verify-session",` +
		`"resource_hints":{"cpu":"2","gpu":"0","memory_mb":4096,"network_mbps":100,"priority":"high","timeout_s":60},"reversible":false}],"wf_id":"bgp-failover-v2"}`
	if got := string(d.Canonical()); got != canonical {
		t.Errorf("got\n%s\nwant\n%s", got, canonical)
	}
	if got := d.Version(); got != "QBc2EcJ_c846j5luN1Thj6vnvwjQb_pFRFwM84j8B4c" {
		t.Errorf("version %s", got)
	}
	same := withNodes(3, `"hitl_required": false, "resource_hints": {}, "constraints": {"x": [1.0]}`, edges("n0", "n1", "n0", "n2"))
	other := `{"edges": [{"to": "n2", "from": "n0"}, {"to": "n1", "from": "n0"}], "nodes": [{"id": "n2"}, {"id": "n\u0031"}, {"constraints": {"x": [1]}, "id": "n0"}], "wf_id": "w", "description": ""}`
	if a, b := parse(t, same), parse(t, other); a.Version() != b.Version() {
		t.Errorf("%s and %s", a.Canonical(), b.Canonical())
	}
	versions := map[string]string{}
	for _, text := range []string{
		same, withNodes(2, "", edges("n0", "n1")), withNodes(2, "", edges("n1", "n0")), withNodes(2, "", ""), withNodes(3, "", edges("n0", "n1")),
		withNodes(1, `"hitl_required": true`, ""), withNodes(1, `"reversible": true`, ""), withNodes(1, `"reversible": false`, ""), withNodes(1, `"label": "x"`, ""),
		withNodes(1, `"constraints": {"x": [1]}`, ""), withNodes(1, `"constraints": {"x": ["1"]}`, ""), withNodes(1, `"resource_hints": {"cpu": "1"}`, ""),
		withNodes(1, `"resource_hints": {"gpu": "1"}`, ""), withNodes(1, `"resource_hints": {"timeout_s": 1}`, ""), withNodes(1, `"resource_hints": {"memory_mb": 1}`, ""),
		withNodes(1, `"resource_hints": {"network_mbps": 1}`, ""), withNodes(1, `"resource_hints": {"priority": "low"}`, ""),
		withNodes(1, `"resource_hints": {"priority": "normal"}`, ""), withNodes(1, "", ""), // it comes before what a token says
		withNodes(1, `"constraints": {"atd.circuit_threshold": 0.25}`, ""), withNodes(1, `"constraints": {"atd.circuit_window_s": 9}`, ""),
		`{"wf_id": "v", "nodes": [{"id": "n0"}]}`, `{"wf_id": "w", "description": "d", "nodes": [{"id": "n0"}]}`,
	} {
		v := parse(t, text).Version()
		if versions[v] != "" {
			t.Errorf("%s and %s are one version", text, versions[v])
		}
		versions[v] = text
	}
}

var update = flag.Bool("update", false, "write the golden files anew")

// The schema in docs is that of the package.
func TestGoldenSchema(t *testing.T) {
	file := filepath.Join("..", "..", "docs", "atd-workflow.schema.json")
	if *update {
		if err := os.WriteFile(file, Schema(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(kept, Schema()) {
		t.Errorf("%s is not what Schema returns; `make golden` writes it", file)
	}
}

// The schema and the parser agree: the schema takes what the parser takes, and refuses what is wrong
// by itself.
func TestSchemaAndParser(t *testing.T) {
	schema := schemaOf(t)
	for _, text := range []string{figure, withNodes(5, `"constraints": {"max": [1, {"a": null}], "atdx": 1}, "label": ""`, edges("n0", "n1", "n0", "n2"))} {
		if _, err := Parse([]byte(text)); err != nil || valid(t, schema, text) != nil {
			t.Errorf("%s: %v, %v", text, err, valid(t, schema, text))
		}
	}
	for _, c := range refused {
		if json.Valid([]byte(c.text)) && (valid(t, schema, c.text) != nil) != c.inSchema {
			t.Errorf("%s: the schema says %v", c.name, valid(t, schema, c.text))
		}
	}
}

func schemaOf(t testing.TB) map[string]any {
	var schema map[string]any
	if err := json.Unmarshal(Schema(), &schema); err != nil {
		t.Fatal(err)
	}
	return schema
}

func valid(t testing.TB, schema map[string]any, text string) error {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return matches(t, schema, v)
}

// matches is the part of JSON schema that Schema uses. It fails the test for any other word.
func matches(t testing.TB, schema map[string]any, v any) error {
	t.Helper()
	kind := map[bool]string{}
	switch v.(type) {
	case map[string]any:
		kind[true] = "object"
	case []any:
		kind[true] = "array"
	case string:
		kind[true] = "string"
	case bool:
		kind[true] = "boolean"
	case float64:
		kind[true] = "number"
	}
	members, isObject := v.(map[string]any)
	elements, isArray := v.([]any)
	text, isText := v.(string)
	number, isNumber := v.(float64)
	properties, _ := schema["properties"].(map[string]any)
	sub := func(s any, v any) error { return matches(t, s.(map[string]any), v) }
	for word, arg := range schema {
		bad := false
		switch word {
		case "$schema", "title", "default":
		case "type":
			bad = arg != kind[true] && !(arg == "integer" && isNumber && number == float64(int64(number)))
		case "enum":
			bad = !slices.ContainsFunc(arg.([]any), func(one any) bool { return one == v })
		case "maxLength":
			bad = isText && utf8.RuneCountInString(text) > int(arg.(float64))
		case "minLength":
			bad = isText && utf8.RuneCountInString(text) < int(arg.(float64))
		case "pattern":
			pattern := regexp.MustCompile(`\\u([0-9a-f]{4})`).ReplaceAllString(arg.(string), `\x{$1}`)
			bad = isText && !regexp.MustCompile(pattern).MatchString(text)
		case "minimum":
			bad = isNumber && number < arg.(float64)
		case "maximum":
			bad = isNumber && number > arg.(float64)
		case "exclusiveMinimum":
			bad = isNumber && number <= arg.(float64)
		case "exclusiveMaximum":
			bad = isNumber && number >= arg.(float64)
		case "minItems":
			bad = isArray && len(elements) < int(arg.(float64))
		case "maxItems":
			bad = isArray && len(elements) > int(arg.(float64))
		case "items":
			for _, e := range elements {
				if err := sub(arg, e); err != nil {
					return err
				}
			}
		case "required":
			for _, name := range arg.([]any) {
				_, there := members[name.(string)]
				bad = bad || isObject && !there
			}
		case "properties":
			for name, value := range members {
				if s, ok := properties[name]; ok {
					if err := sub(s, value); err != nil {
						return err
					}
				}
			}
		case "additionalProperties":
			for name := range members {
				bad = bad || properties[name] == nil
			}
		case "propertyNames":
			for name := range members {
				if err := sub(arg, name); err != nil {
					return err
				}
			}
		case "anyOf":
			bad = !slices.ContainsFunc(arg.([]any), func(s any) bool { return sub(s, v) == nil })
		case "not":
			bad = sub(arg, v) == nil
		default:
			t.Fatalf("the schema has %s", word)
		}
		if bad {
			return fmt.Errorf("%v: %s %v", v, word, arg)
		}
	}
	return nil
}

// FuzzParse: whatever comes is taken or refused with reasons; what is taken fits the schema, is
// ordered, and is the same plan as its canonical form.
func FuzzParse(f *testing.F) {
	f.Add([]byte(figure))
	for _, c := range refused {
		f.Add([]byte(c.text))
	}
	f.Add([]byte(withNodes(6, `"constraints": {"x": {"b": 1E2, "a": "\u00e9"}, "atd.resource_cpu": "0.5"}`, edges("n0", "n1", "n0", "n2", "n1", "n3", "n2", "n3"))))
	schema := schemaOf(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := Parse(text)
		if err != nil {
			var wrong *Error
			if !errors.As(err, &wrong) || len(wrong.Problems) == 0 || len(wrong.Problems) > 100 || wrong.Error() == "" {
				t.Fatalf("%#v", err)
			}
			return
		}
		if err := valid(t, schema, string(text)); err != nil {
			t.Fatalf("taken, and not by the schema: %v", err)
		}
		ordered(t, d)
		canonical := d.Canonical()
		again, err := Parse(canonical)
		if err != nil {
			t.Fatalf("%s: %v", canonical, err)
		}
		if !bytes.Equal(canonical, again.Canonical()) {
			t.Fatalf("%s becomes %s", canonical, again.Canonical())
		}
	})
}

// ordered holds that the order has every node once, behind all that it depends on.
func ordered(t *testing.T, d *Descriptor) {
	t.Helper()
	at := make(map[int]int)
	for i, n := range d.Order() {
		at[n] = i
	}
	if len(at) != len(d.Nodes) || len(d.Order()) != len(d.Nodes) {
		t.Fatalf("%d of %d nodes are in order", len(at), len(d.Nodes))
	}
	for i, n := range d.Nodes {
		level := 0
		for _, j := range n.Before {
			if at[j] >= at[i] || !slices.Contains(d.Nodes[j].After, i) {
				t.Fatalf("%s comes before %s", n.ID, d.Nodes[j].ID)
			}
			level = max(level, d.Nodes[j].Level+1)
		}
		if n.Level != level {
			t.Fatalf("%s has level %d, want %d", n.ID, n.Level, level)
		}
	}
}

// random is a plan of n nodes with edges from lower to higher places, in an order of its own.
func random(r *rand.Rand, n, perNode int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"wf_id":"w","nodes":[`)
	for i, at := range r.Perm(n) {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"id":"node-%d","label":"do-%d","reversible":true,"hitl_required":false,"resource_hints":{"priority":"high","timeout_s":60}}`, at, at)
	}
	b.WriteString(`],"edges":[`)
	first := true
	for i := 1; i < n; i++ {
		seen := map[int]bool{}
		for range perNode {
			if p := r.IntN(i); !seen[p] {
				seen[p] = true
				if !first {
					b.WriteByte(',')
				}
				first = false
				fmt.Fprintf(&b, `{"from":"node-%d","to":"node-%d"}`, p, i)
			}
		}
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

// A-topological-order-a: the order of random plans holds; with one edge turned back, the cycle that
// it closes is named and is one.
func TestRandomPlans(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 17))
	for range 200 {
		text := random(r, 2+r.IntN(40), 1+r.IntN(3))
		d := parse(t, string(text))
		ordered(t, d)
		from := r.IntN(len(d.Nodes))
		for len(d.Nodes[from].After) == 0 {
			from = r.IntN(len(d.Nodes))
		}
		to := from
		for len(d.Nodes[to].After) > 0 && (to == from || r.IntN(3) > 0) {
			to = d.Nodes[to].After[r.IntN(len(d.Nodes[to].After))]
		}
		text = append(text[:len(text)-2], fmt.Sprintf(`,{"from":%q,"to":%q}]}`, d.Nodes[to].ID, d.Nodes[from].ID)...)
		_, err := Parse(text)
		var wrong *Error
		if !errors.As(err, &wrong) || len(wrong.Problems) != 1 {
			t.Fatal(err)
		}
		cycle := wrong.Problems[0].Cycle
		for i, id := range cycle {
			next := cycle[(i+1)%len(cycle)]
			a, _ := d.Find(id)
			b, _ := d.Find(next)
			if !slices.Contains(d.Nodes[a].After, b) && !(a == to && b == from) {
				t.Fatalf("%v is no cycle", cycle)
			}
		}
	}
}

// The work is linear: twice the nodes and edges are twice the steps, whatever the form.
func TestLinearWork(t *testing.T) {
	chain := func(n int) []byte {
		var pairs []string
		for i := range n - 1 {
			pairs = append(pairs, fmt.Sprint("n", i), fmt.Sprint("n", i+1))
		}
		return []byte(withNodes(n, "", edges(pairs...)))
	}
	for name, form := range map[string]func(n int) []byte{
		"random": func(n int) []byte { return random(rand.New(rand.NewPCG(7, 7)), n, 4) },
		"chain":  chain,
		"circle": func(n int) []byte {
			return bytes.Replace(chain(n), []byte(`"edges": [`), []byte(`"edges": [{"from": "n`+fmt.Sprint(n-1)+`", "to": "n0"}, `), 1)
		},
		"layers": func(n int) []byte {
			var pairs []string
			for i := 8; i < n; i++ {
				for j := range 8 {
					pairs = append(pairs, fmt.Sprint("n", i-i%8-8+j), fmt.Sprint("n", i))
				}
			}
			return []byte(withNodes(n, "", edges(pairs...)))
		},
		// Cycles of two, each of which leads to one node before many others.
		"pairs": func(n int) []byte {
			var pairs []string
			for i := 0; i < n/2; i += 2 {
				a, b := fmt.Sprint("n", i), fmt.Sprint("n", i+1)
				pairs = append(pairs, a, fmt.Sprint("n", n/2), a, b, b, a)
			}
			for i := n/2 + 1; i < n; i++ {
				pairs = append(pairs, fmt.Sprint("n", n/2), fmt.Sprint("n", i))
			}
			return []byte(withNodes(n, "", edges(pairs...)))
		},
	} {
		small, large := Work(form(4000)), Work(form(8000))
		if small < 4000 || large > 2*small+small/10 {
			t.Errorf("%s: %d steps for 4000 nodes, %d for 8000", name, small, large)
		}
	}
}

// BenchmarkParse is the bar: 10,000 nodes in at most 50 ms, with all that is read, checked and named of a plan
// that is put.
func BenchmarkParse(b *testing.B) {
	text := random(rand.New(rand.NewPCG(3, 3)), MaxNodes, 2)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		d, err := Parse(text)
		if err != nil {
			b.Fatal(err)
		}
		if d.Version() == "" {
			b.Fatal("no version")
		}
	}
}
