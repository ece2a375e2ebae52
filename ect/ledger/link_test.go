package ledger

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// linked is a log whose events are found by their parents.
func linked(t testing.TB) (Options, *Log) {
	t.Helper()
	o := testOptions(memory.New(memory.Options{}))
	o.Links = func(e *Event) []string { return e.Parents }
	return o, mustOpen(t, o)
}

func linkedEvent(workflow string, n int, parents ...string) Event {
	e := testEvent(n)
	e.ID, e.Workflow, e.Parents = fmt.Sprint("linked-", n), workflow, parents
	return e
}

func following(t testing.TB, l *Log, workflow, id string) (ids []string) {
	t.Helper()
	for next := Cursor(""); ; {
		page := must(l.Following(t.Context(), workflow, id, next, 3))(t)
		for _, e := range page.Entries {
			ids = append(ids, e.ID)
		}
		if next = page.Next; next == "" {
			return ids
		}
	}
}

// Events are found by their links, in their workflow alone, until they are pruned.
func TestFollowing(t *testing.T) {
	_, l := linked(t)
	var want []string
	for n := range 10 {
		parents := []string{"other", "root", "root"}
		if n%2 == 1 {
			parents = parents[:1]
		} else {
			want = append(want, fmt.Sprint("linked-", n))
		}
		mustAppend(t, l, linkedEvent("w", n, parents...), linkedEvent("v", n, parents...))
	}
	appendEvents(t, l, 100, 100+2*tileWidth) // so that the first tile is full
	if got := following(t, l, "w", "root"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := following(t, l, "w", "other"); len(got) != 10 {
		t.Errorf("%v", got)
	}
	if got := following(t, l, "w", "linked-0"); len(got) != 0 {
		t.Errorf("%v", got)
	}
	if _, err := l.Following(t.Context(), "", "root", "", 1); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
	for _, c := range [][]string{{"w", "root", "v"}, {"v", "other", "w"}, {"u", "root", "v", "w"}, {"w", "linked-0"}} {
		got, err := l.Elsewhere(t.Context(), c[0], c[1])
		if slices.Sort(got); err != nil || !slices.Equal(got, c[2:]) {
			t.Errorf("elsewhere than in %s %q follow from %s: %v", c[0], got, c[1], err)
		}
	}
	mustVerify(t, l)
	mustPrune(t, l, -1)
	for e, err := range l.store.Scan(t.Context(), store.Prefix([]byte{space, spaceLink})) {
		if err != nil || len(e.Key) > logKeySize && indexIn(e.Key) < tileWidth {
			t.Errorf("%x stands there still, %v", e.Key, err)
		}
	}
	mustVerify(t, l)
}

// The ends of a workflow change with each entry of it, and list nothing before them.
func TestEnds(t *testing.T) {
	_, l := linked(t)
	if got := must(l.Ends(t.Context(), "w"))(t); len(got) != 0 {
		t.Errorf("%v", got)
	}
	mustAppend(t, l, linkedEvent("w", 0, "root"))
	before := must(l.Ends(t.Context(), "w"))(t)
	mustAppend(t, l, linkedEvent("v", 0, "root"))
	if got := must(l.Ends(t.Context(), "w"))(t); len(got) != 1 || !slices.Equal(got, before) {
		t.Errorf("%v, want %v", got, before)
	}
	mustAppend(t, l, linkedEvent("w", 1, "root"))
	if got := must(l.Ends(t.Context(), "w"))(t); len(got) != 1 || slices.Equal(got, before) {
		t.Errorf("%v", got)
	}
	page := must(l.List(t.Context(), "w", before[0], 10))(t)
	if len(page.Entries) != 1 || page.Entries[0].ID != "linked-1" {
		t.Errorf("%+v", page.Entries)
	}
}

// Moves and prunings stay within a batch, whatever the number of links.
func TestManyLinksInOneMove(t *testing.T) {
	_, l := linked(t)
	var parents []string
	for n := range maxParents {
		parents = append(parents, fmt.Sprint("parent-", n))
	}
	const events = 40
	for n := range events {
		mustAppend(t, l, linkedEvent("w", n, parents...))
	}
	appendEvents(t, l, 100, 100+tileWidth)
	for _, id := range parents {
		if got := following(t, l, "w", id); len(got) != events {
			t.Errorf("%d follow from %s, want %d", len(got), id, events)
		}
	}
	mustVerify(t, l)
	mustPrune(t, l, -1)
	if got := following(t, l, "w", "parent-0"); len(got) != 0 {
		t.Errorf("%v", got)
	}
	mustVerify(t, l)
}

// Verify and readers find links that were removed or forged.
func TestTamperedLinks(t *testing.T) {
	o, l := linked(t)
	for n := range 3 {
		mustAppend(t, l, linkedEvent("w", n, "root"))
	}
	mustVerify(t, l)
	key := l.linkKeys(&Event{Workflow: "w", Parents: []string{"root"}}, 1)[0]
	for what, w := range map[string]store.Write{"gone": {Key: key, Delete: true}, "altered": {Key: key, Value: []byte("x")}} {
		if _, err := o.Store.Commit(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if r, err := verifyStored(t, o); err != nil || !faultsNaming(&r, 1) {
			t.Errorf("%s: %v %s", what, err, allFaults(&r))
		}
		if _, err := o.Store.Commit(t.Context(), store.Write{Key: key}); err != nil {
			t.Fatal(err)
		}
	}
	forged := l.linkKeys(&Event{Workflow: "w", Parents: []string{"stranger"}}, 1)[0]
	if _, err := o.Store.Commit(t.Context(), store.Write{Key: forged}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Following(t.Context(), "w", "stranger", "", 1); !errors.Is(err, ErrTampered) {
		t.Error(err)
	}
}
