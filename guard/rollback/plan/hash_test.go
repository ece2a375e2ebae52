package plan_test

import (
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// The encoding is an API: a plan that was prepared by one version is executed by the
// next.
func TestHashGolden(t *testing.T) {
	p := planned(t, graph(t, act("T1"), ckpt("C1", "T1"), act("T2", "T1"), act("T3", "T1"), ckpt("C3", "T3")), "C1", SubDAG)
	const want = "8bba7e75a8a9e12d10012d7fc279776b3585da67b913e03ecfb013f4f0af50d3"
	if h := p.Hash(); hex.EncodeToString(h[:]) != want {
		t.Errorf("hash %x, want %s", h, want)
	}
}

// Facts 5.5: execute does exactly what was approved. The hash does not depend on the
// order of what is put in, and is the same after the journal.
func TestHashIsStable(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 20 {
		nodes := randomNodes(r, 60)
		target := someCheckpoint(r, nodes)
		for _, s := range []Scope{Single, SubDAG, FullWorkflow} {
			p := planned(t, graph(t, nodes...), target, s)
			want := p.Hash()
			mixed := slices.Clone(nodes)
			r.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
			for i := range mixed {
				for _, list := range []*[]string{&mixed[i].Parents, &mixed[i].Guards} {
					*list = slices.Clone(*list)
					r.Shuffle(len(*list), func(a, b int) { (*list)[a], (*list)[b] = (*list)[b], (*list)[a] })
				}
			}
			if planned(t, graph(t, mixed...), target, s).Hash() != want {
				t.Fatalf("another order of the nodes, another hash of %s %s", s, target)
			}
			text, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			var stored Plan
			if err := json.Unmarshal(text, &stored); err != nil {
				t.Fatal(err)
			}
			if stored.Hash() != want {
				t.Fatalf("another hash after %s", text)
			}
		}
	}
}

// Whatever a plan says is in its hash.
func TestHashTellsPlansApart(t *testing.T) {
	base := Plan{
		Workflow: "w", Target: "C", Scope: SubDAG,
		Levels: [][]Step{{{"D", Wait, Undo, []string{"b", "a"}}, {"E", Undo, "", nil}}, {{"C", Undo, "", []string{"c"}}}},
		Passed: []string{"p"}, Along: []string{"l"}, Dependants: []string{"q"}, Missing: []string{"r"},
	}
	seen := map[[32]byte]string{base.Hash(): "base"}
	for name, change := range map[string]func(p *Plan){
		"workflow":         func(p *Plan) { p.Workflow = "v" },
		"target":           func(p *Plan) { p.Target = "D" },
		"scope":            func(p *Plan) { p.Scope = FullWorkflow },
		"text moves":       func(p *Plan) { p.Workflow, p.Target = "wC", "" },
		"checkpoint":       func(p *Plan) { p.Levels[0][0].Checkpoint = "F" },
		"what":             func(p *Plan) { p.Levels[0][1].What = Expired },
		"then":             func(p *Plan) { p.Levels[0][0].Then = Escalate },
		"actions":          func(p *Plan) { p.Levels[0][0].Actions = []string{"b"} },
		"actions joined":   func(p *Plan) { p.Levels[0][0].Actions = []string{"ba"} },
		"barrier moves":    func(p *Plan) { p.Levels = [][]Step{p.Levels[0][:1], {p.Levels[0][1], p.Levels[1][0]}} },
		"barrier is gone":  func(p *Plan) { p.Levels = [][]Step{append(p.Levels[0], p.Levels[1]...)} },
		"no levels":        func(p *Plan) { p.Levels = nil },
		"passed":           func(p *Plan) { p.Passed = nil },
		"along":            func(p *Plan) { p.Along = nil },
		"dependants":       func(p *Plan) { p.Dependants = nil },
		"missing":          func(p *Plan) { p.Missing = nil },
		"passed, not left": func(p *Plan) { p.Passed, p.Dependants = p.Dependants, p.Passed },
	} {
		p := base
		p.Levels = [][]Step{slices.Clone(base.Levels[0]), slices.Clone(base.Levels[1])}
		change(&p)
		if before, twice := seen[p.Hash()]; twice {
			t.Errorf("%s has the hash of %s", name, before)
		}
		seen[p.Hash()] = name
	}
}

// What lies outside a plan, and what is only told, does not change it; what is known of
// a step does.
func TestHashFollowsTheWorkflow(t *testing.T) {
	nodes := []Node{act("R"), act("T", "R"), ckpt("C", "T"), act("read", "T")}
	p := planned(t, graph(t, nodes...), "C", SubDAG)
	outside := append(slices.Clone(nodes), event("error", "T"), act("sibling", "R"), ckpt("CS", "sibling"))
	if planned(t, graph(t, outside...), "C", SubDAG).Hash() != p.Hash() {
		t.Error("what is outside changes the hash")
	}
	later, err := graph(t, nodes...).Plan(Request{Target: "C", Scope: SubDAG, Now: nodes[2].Expires})
	if err != nil {
		t.Fatal(err)
	}
	if later.Hash() == p.Hash() {
		t.Error("an expired step has the hash of one that stands")
	}
	if planned(t, graph(t, append(slices.Clone(nodes), act("read2", "T"))...), "C", SubDAG).Hash() == p.Hash() {
		t.Error("another action is passed over, with the same hash")
	}
}
