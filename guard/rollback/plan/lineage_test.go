package plan_test

import (
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

func by(who string, n Node) Node {
	n.By = who
	return n
}

// ATD, "Rollback Authorization", and cascade 6.1: who may ask for what.
func TestLineage(t *testing.T) {
	g := graph(t,
		by("root", act("R")), by("a", act("A", "R")), by("gateway", ckpt("CA", "A")),
		by("sibling", act("S", "R")), by("gateway", ckpt("CS", "S")),
		by("below", act("B", "A")), by("b", ckpt("CB", "B")),
		by("reporter", event("E", "A")), by("c", act("C", "E")), by("gateway", ckpt("CC", "C")),
		by("stranger", act("X")), by("", act("N", "A")),
		by("grouper", group("G", "CA", "CS")), by("root", group("H", "CA", "gone")), by("grouper", group("I")),
		by("d", act("D", "G")), by("gateway", ckpt("CD", "D")),
	)
	for _, test := range []struct {
		who, checkpoint    string
		ancestor, workflow bool
	}{
		{"a", "CA", true, true},
		{"root", "CA", true, true},
		{"gateway", "CA", true, true},
		{"sibling", "CA", false, true},
		{"below", "CA", false, true},
		{"below", "CB", true, true},
		{"b", "CB", true, true}, // its own
		{"a", "CB", true, true},
		{"a", "CC", true, true}, // over an event
		{"reporter", "CC", false, false},
		{"reporter", "CA", false, false},
		{"stranger", "CA", false, false}, // the same name, and not linked
		{"nobody", "CA", false, false},
		{"", "CA", false, false},
		{"a", "A", false, false}, // no checkpoint
		{"a", "unknown", false, false},
		// Groups: all that they contain, and none of it unknown.
		{"root", "G", true, true},
		{"a", "G", false, true},
		{"grouper", "G", false, true},
		{"grouper", "CA", false, true},
		{"root", "H", false, false},
		{"grouper", "I", false, false},
		// What follows from a group follows for rights from whoever made it.
		{"grouper", "CD", true, true},
		{"a", "CD", false, true},
	} {
		if got := g.MayAsk(test.who, test.checkpoint, Ancestor); got != test.ancestor {
			t.Errorf("ancestor: %q for %q: %v", test.who, test.checkpoint, got)
		}
		if got := g.MayAsk(test.who, test.checkpoint, Workflow); got != test.workflow {
			t.Errorf("workflow: %q for %q: %v", test.who, test.checkpoint, got)
		}
		if g.MayAsk(test.who, test.checkpoint, "") {
			t.Errorf("no policy: %q for %q", test.who, test.checkpoint)
		}
	}
}

// What somebody tells of others leads to what follows from it, and joins nothing (ADR 0024).
func TestLineageJoinsNothingByWhatIsTold(t *testing.T) {
	told := event("E", "A", "B")
	told.Told = true
	g := graph(t,
		by("a", act("A")), by("gateway", ckpt("CA", "A")), by("b", act("B")), by("gateway", ckpt("CB", "B")),
		by("eve", told), by("c", act("C", "E")), by("gateway", ckpt("CC", "C")),
	)
	for _, test := range []struct {
		who, checkpoint string
		may             bool
	}{
		{"a", "CA", true}, {"a", "CB", false}, {"b", "CA", false}, {"a", "CC", true}, {"c", "CC", true}, {"c", "CA", false}, {"eve", "CA", false},
	} {
		if got := g.MayAsk(test.who, test.checkpoint, Workflow); got != test.may {
			t.Errorf("%q for %q: %v", test.who, test.checkpoint, got)
		}
	}
}

// A token that names a checkpoint as its parent does not make its issuer an ancestor,
// also where the checkpoint counts as made for it.
func TestLineageIsNotTakenFromBelow(t *testing.T) {
	g := graph(t,
		by("a", before("C", []string{"A1", "M"})), by("a", act("A1", "C")),
		by("mallory", act("M0")), by("mallory", act("M", "C", "M0")),
	)
	if !g.MayAsk("a", "C", Ancestor) || g.MayAsk("mallory", "C", Ancestor) {
		t.Error("rights from below")
	}
}

// Follows is by the tokens, from a checkpoint and from what it was made for on; a group's
// consequences are those of what it contains.
func TestFollows(t *testing.T) {
	g := graph(t,
		act("a"), ckpt("C", "a"), act("b", "a"), event("below", "b"), event("direct", "C"), event("above"),
		act("x"), ckpt("X", "x"), event("beside", "x"), group("G", "C", "X"), event("on", "G"),
	)
	for checkpoint, follow := range map[string]string{"C": "below direct on", "X": "beside on", "G": "below direct beside on", "a": "", "none": ""} {
		var got []string
		for _, id := range []string{"below", "direct", "above", "beside", "on", "none", ""} {
			if g.Follows(id, checkpoint) {
				got = append(got, id)
			}
		}
		wantIDs(t, checkpoint, got, follow)
	}
}
