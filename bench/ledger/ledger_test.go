package ledger_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/ledger"
)

// check holds lines against the calls in the book.
func check(t *testing.T, fill func(*ledger.Book), lines ...string) *ledger.Audit {
	t.Helper()
	book := ledger.NewBook()
	fill(book)
	a, err := book.Check(strings.NewReader(strings.Join(lines, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func story(b *ledger.Book) {
	for _, id := range []string{"done", "doubt-ran", "doubt-not", "open"} {
		b.Begin(id)
	}
	b.Acknowledge("done", 1)
	b.Acknowledge("done", 1) // a replay
	b.Doubt("doubt-ran")
	b.Doubt("doubt-not")
}

// P1: a run in which all is well is found to be well, and its doubts are listed.
func TestGoodRun(t *testing.T) {
	a := check(t, story, "1 done", "2 doubt-ran", "3 open")
	if len(a.Breaches) != 0 {
		t.Errorf("breaches: %q", a.Breaches)
	}
	if a.Executions != 3 || a.Acknowledged != 1 || a.Doubtful != 2 || a.Open != 1 {
		t.Errorf("got %+v", a)
	}
	if !slices.Equal(a.InDoubt, []ledger.Doubt{{"doubt-not", 0}, {"doubt-ran", 1}}) {
		t.Errorf("in doubt: %v", a.InDoubt)
	}
}

// P1: every planted fault is found, and named.
func TestPlantedFaults(t *testing.T) {
	for name, c := range map[string]struct {
		fill  func(*ledger.Book)
		lines []string
		want  string
	}{
		"acknowledged, executed twice": {story, []string{"1 done", "2 doubt-ran", "3 done"}, "done was executed more than once"},
		"in doubt, executed twice":     {story, []string{"1 done", "2 doubt-ran", "3 doubt-ran", "4 doubt-ran"}, "doubt-ran was executed more than once"},
		"open, executed twice":         {story, []string{"1 done", "2 open", "3 open"}, "open was executed more than once"},
		"acknowledged, lost":           {story, []string{"1 doubt-ran"}, "done was acknowledged and never executed"},
		"nobody called it":             {story, []string{"1 done", "2 stranger"}, `"stranger" was executed, and no client has called it`},
		"another's answer":             {story, []string{"1 open", "2 done"}, "done was executed as 2 and answered as 1"},
		"two answers": {func(b *ledger.Book) { b.Begin("a"); b.Acknowledge("a", 1); b.Acknowledge("a", 2) },
			[]string{"1 b", "2 a"}, "a was answered with execution 1, and then with 2"},
		"answered, then in doubt": {func(b *ledger.Book) { b.Begin("a"); b.Acknowledge("a", 1); b.Doubt("a") },
			[]string{"1 a"}, "a was answered, and then in doubt"},
		"in doubt, then answered": {func(b *ledger.Book) { b.Begin("a"); b.Doubt("a"); b.Acknowledge("a", 1) },
			[]string{"1 a"}, "a was in doubt, and then answered"},
		"what a client saw": {func(b *ledger.Book) { b.Breach("%d is wrong", 7) }, nil, "7 is wrong"},
	} {
		if a := check(t, c.fill, c.lines...); !slices.Contains(a.Breaches, c.want) {
			t.Errorf("%s: want %q among %q", name, c.want, a.Breaches)
		}
	}
}

// A ledger with a missing line says nothing about what was executed.
func TestBrokenLedger(t *testing.T) {
	for _, lines := range []string{"1 a\n3 b", "one a", "1"} {
		if _, err := ledger.NewBook().Check(strings.NewReader(lines)); err == nil {
			t.Errorf("%q was taken for a ledger", lines)
		}
	}
}
