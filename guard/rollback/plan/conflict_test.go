package plan_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Cascade 4.3.4: the wider scope, then the earlier time; then the lower id.
func TestCascade434Precedence(t *testing.T) {
	order := []Rollback{
		{"z", FullWorkflow, now.Add(time.Hour)},
		{"y", SubDAG, now},
		{"a", SubDAG, now.Add(1)},
		{"b", SubDAG, now.Add(1)},
		{"c", Single, now.Add(-time.Hour)},
		{"d", "unknown", now.Add(-2 * time.Hour)},
	}
	for i, a := range order {
		for j, b := range order {
			if got := Compare(a, b); cmp.Compare(got, 0) != cmp.Compare(i, j) {
				t.Errorf("Compare(%v, %v) = %d", a, b, got)
			}
		}
	}
}

// Cascade 4.3.4: precedence is a strict total order, also where clocks tell the same
// instant in different zones.
func TestCascade434CompareIsTotal(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 34))
	zones := []*time.Location{time.UTC, time.FixedZone("east", 3600)}
	var all []Rollback
	for i := range 60 {
		all = append(all, Rollback{
			ID: fmt.Sprint("r", i), Scope: []Scope{Single, SubDAG, FullWorkflow, "", "other"}[r.IntN(5)],
			Asked: now.Add(time.Duration(r.IntN(4))).In(zones[r.IntN(2)]),
		})
	}
	for _, a := range all {
		for _, b := range all {
			ab, ba := Compare(a, b), Compare(b, a)
			if (ab == 0) != (a.ID == b.ID) || ab != -ba {
				t.Fatalf("%v and %v: %d and %d", a, b, ab, ba)
			}
			for _, c := range all {
				if ab < 0 && Compare(b, c) < 0 && Compare(a, c) >= 0 {
					t.Fatalf("%v before %v before %v, and not transitive", a, b, c)
				}
			}
		}
	}
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, Compare)
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	slices.SortFunc(all, Compare)
	if !slices.Equal(all, sorted) {
		t.Error("the order depends on where one begins")
	}
}

// conflicts is a workflow with two branches and a group over both.
func conflicts(t *testing.T) *Graph {
	return graph(t,
		act("R"), ckpt("CR", "R"), act("T1", "R"), ckpt("C1", "T1"), act("T2", "R"), ckpt("C2", "T2"),
		act("T3", "T1"), ckpt("C3", "T3"), group("G", "C1", "C2"),
	)
}

// Cascade 4.3.4: rollbacks overlap if they share a checkpoint.
func TestCascade434Overlap(t *testing.T) {
	g := conflicts(t)
	one, other := planned(t, g, "C1", SubDAG), planned(t, g, "C2", SubDAG)
	if Overlap(one, other) || Overlap(other, one) {
		t.Error("branches overlap")
	}
	for _, p := range []*Plan{planned(t, g, "C3", Single), planned(t, g, "G", Single), planned(t, g, "CR", FullWorkflow), one} {
		if !Overlap(one, p) || !Overlap(p, one) {
			t.Errorf("%s and %s do not overlap", levels(one), levels(p))
		}
	}
	elsewhere, err := New("another", []Node{act("T1"), ckpt("C1", "T1")})
	if err != nil {
		t.Fatal(err)
	}
	if Overlap(one, planned(t, elsewhere, "C1", SubDAG)) {
		t.Error("workflows overlap")
	}
}

// DESIGN, "Settled here": a narrower rollback that already executes finishes its level,
// then joins the wider one.
func TestMeet(t *testing.T) {
	g := conflicts(t)
	rolling := func(id, target string, s Scope, after time.Duration, executing bool) Rolling {
		return Rolling{Rollback{id, s, now.Add(after)}, planned(t, g, target, s), executing}
	}
	for name, test := range map[string]struct {
		there, comes Rolling
		want         Meeting
	}{
		"apart":                      {rolling("a", "C1", SubDAG, 0, true), rolling("b", "C2", SubDAG, 1, false), Apart},
		"narrower comes":             {rolling("a", "CR", SubDAG, 1, false), rolling("b", "C3", Single, 0, false), Refused},
		"narrower comes, executing":  {rolling("a", "CR", SubDAG, 1, true), rolling("b", "C3", Single, 0, false), Refused},
		"later comes":                {rolling("a", "CR", SubDAG, 0, true), rolling("b", "C1", SubDAG, 1, false), Refused},
		"wider comes":                {rolling("a", "C3", Single, 0, false), rolling("b", "C1", SubDAG, 1, false), Replaced},
		"earlier comes":              {rolling("a", "C1", SubDAG, 1, false), rolling("b", "CR", SubDAG, 0, false), Replaced},
		"wider comes, executing":     {rolling("a", "C3", Single, 0, true), rolling("b", "C1", SubDAG, 1, false), Joined},
		"full comes, executing":      {rolling("a", "CR", SubDAG, 0, true), rolling("b", "C3", FullWorkflow, 1, false), Joined},
		"wider lacks some of it":     {rolling("a", "G", Single, 0, true), rolling("b", "C1", SubDAG, 1, false), Queued},
		"wider lacks some, prepared": {rolling("a", "G", Single, 0, false), rolling("b", "C1", SubDAG, 1, false), Replaced},
		"earlier comes, executing":   {rolling("a", "C1", SubDAG, 1, true), rolling("b", "CR", SubDAG, 0, false), Queued},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Meet(test.there, test.comes); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}
