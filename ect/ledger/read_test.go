package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// TestTwoLogsOneStore: each node finds the other's events with their log; an id is used once
// for both.
func TestTwoLogsOneStore(t *testing.T) {
	mem := memory.New(memory.Options{})
	a := mustOpen(t, testOptions(mem))
	o := testOptions(mem)
	o.Origin = "example.com/ledger/b"
	b := mustOpen(t, o)
	event := func(id string) []Event {
		return []Event{{ID: id, Workflow: "w", Payload: []byte("p")}}
	}
	if err := a.Append(t.Context(), event("1")); err != nil {
		t.Fatal(err)
	}
	if err := b.Append(t.Context(), event("1")); !errors.Is(err, ErrDuplicate) {
		t.Errorf("recorded by both: %v", err)
	}
	if err := b.Append(t.Context(), event("2")); err != nil {
		t.Fatal(err)
	}
	for _, l := range []*Log{a, b} {
		for id, origin := range map[string]string{"1": testOrigin, "2": o.Origin} {
			e, err := l.Lookup(t.Context(), "w", id)
			if err != nil || e.Log != origin || e.Index != 0 {
				t.Errorf("event %s is %d of %s: %v", id, e.Index, e.Log, err)
			}
		}
		if ids := listAll(t, l, "w", 1); len(ids) != 2 {
			t.Errorf("listed: %v", ids)
		}
		mustVerify(t, l)
	}
}

// TestFind: one id in several workflows is several events.
func TestFind(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	for n := range MaxFound + 4 {
		e := testEvent(0)
		e.Workflow = fmt.Sprint(n)
		mustAppend(t, l, e)
	}
	all, err := l.Find(t.Context(), "id-0")
	if err != nil || len(all) != MaxFound {
		t.Errorf("%d found: %v", len(all), err)
	}
	if all, err := l.Find(t.Context(), "id"); err != nil || len(all) != 0 {
		t.Errorf("%d found by another id: %v", len(all), err)
	}
	if _, err := l.Lookup(t.Context(), "nowhere", "id-0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("in another workflow: %v", err)
	}
}

// TestListBounds: a page has what was asked for at most, and less where entries are
// large; cursors that were not given are refused.
func TestListBounds(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	const large = 2*maxPageBytes/MaxPayload + 10
	for n := range large {
		e := Event{ID: fmt.Sprint(n), Workflow: "w", Payload: bytes.Repeat([]byte{'p'}, MaxPayload)}
		mustAppend(t, l, e)
	}
	page, err := l.List(t.Context(), "w", "", MaxPage)
	if err != nil || len(page.Entries) > maxPageBytes/MaxPayload+1 || page.Next == "" {
		t.Errorf("a page of %d, next %q: %v", len(page.Entries), page.Next, err)
	}
	if ids := listAll(t, l, "w", MaxPage); len(ids) != large {
		t.Errorf("%d listed", len(ids))
	}
	for _, c := range []struct {
		workflow string
		from     Cursor
		limit    int
	}{{"", "", 1}, {"w", "", 0}, {"w", "", MaxPage + 1}, {"w", "zz", 1}, {"w", "00", 1}} {
		if _, err := l.List(t.Context(), c.workflow, c.from, c.limit); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if page, err := l.List(t.Context(), "empty", "", 1); err != nil || len(page.Entries) != 0 || page.Next != "" {
		t.Errorf("%+v, %v", page, err)
	}
}

// TestEventLimits: what is at a limit comes through, what is over it is refused before
// anything is written.
func TestEventLimits(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	fits := func(change func(*Event)) error {
		e := testEvent(1)
		change(&e)
		_, err := l.Record(e)
		return err
	}
	name := strings.Repeat("n", MaxName)
	parents := func(n int) []string {
		all := make([]string, n)
		for i := range all {
			all[i] = fmt.Sprintf("%036d", i)
		}
		return all
	}
	for what, change := range map[string]func(*Event){
		"names":   func(e *Event) { e.ID, e.Workflow, e.Action, e.Parents = name, name, name, []string{name} },
		"issuer":  func(e *Event) { e.Issuer = strings.Repeat("i", maxIssuer) },
		"payload": func(e *Event) { e.Payload = make([]byte, MaxPayload) },
		"all":     func(e *Event) { *e = largestEvent(name) },
		"parents": func(e *Event) { e.Payload, e.Parents = make([]byte, MaxPayload), parents(maxParents) },
	} {
		if err := fits(change); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, change := range map[string]func(*Event){
		"no id":        func(e *Event) { e.ID = "" },
		"id":           func(e *Event) { e.ID = name + "n" },
		"workflow":     func(e *Event) { e.Workflow = name + "n" },
		"action":       func(e *Event) { e.Action = name + "n" },
		"issuer":       func(e *Event) { e.Issuer = strings.Repeat("i", maxIssuer+1) },
		"no payload":   func(e *Event) { e.Payload = nil },
		"payload":      func(e *Event) { e.Payload = make([]byte, MaxPayload+1) },
		"parents":      func(e *Event) { e.Parents = parents(maxParents + 1) },
		"empty parent": func(e *Event) { e.Parents = []string{""} },
		"long parent":  func(e *Event) { e.Parents = []string{name + "n"} },
		"time":         func(e *Event) { e.Time = time.Unix(1<<60, 0) },
	} {
		if err := fits(change); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, n := range []int{0, MaxEvents + 1} {
		if _, err := l.Record(make([]Event, n)...); !errors.Is(err, ErrInvalid) {
			t.Errorf("%d events: %v", n, err)
		}
	}
	if _, err := l.Record(testEvent(1), testEvent(1)); !errors.Is(err, ErrDuplicate) {
		t.Errorf("one id twice: %v", err)
	}
}

// largestEvent is one at all limits.
func largestEvent(id string) Event {
	name := strings.Repeat("n", MaxName)
	return Event{
		ID: id, Workflow: name, Action: name, Issuer: strings.Repeat("i", maxIssuer), Parents: longParents(),
		Time: time.Unix(1_000_000_000, 999), KeepUntil: time.Unix(2_000_000_000, 999), Payload: make([]byte, MaxPayload),
	}
}

func longParents() []string {
	all := make([]string, maxParents)
	for i := range all {
		all[i] = strings.Repeat("p", MaxName-3) + fmt.Sprintf("%03d", i)
	}
	return all
}

// TestLargestEvents: what is recorded at once fits into a commit with its entries and tiles, also with the largest ones
// and where a tile becomes full with them.
func TestLargestEvents(t *testing.T) {
	l := mustOpen(t, testOptions(openBadger(t)))
	appendEvents(t, l, 0, tileWidth-2)
	first := l.Head().Size
	var events []Event
	for n := range MaxEvents {
		events = append(events, largestEvent(fmt.Sprintf("%0*d", MaxName, n)))
	}
	mustAppend(t, l, events...)
	e, err := l.Entry(t.Context(), first)
	if err != nil || len(e.Leaf) > maxLeaf || len(e.Leaf) < maxLeaf-fixedOverhead {
		t.Errorf("the largest leaf has %d bytes: %v", len(e.Leaf), err)
	}
	mustVerify(t, l)
}

// TestP8NothingReadable: nothing that a caller gave stands readable in the store.
func TestP8NothingReadable(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	e := Event{
		ID: "secret-id", Workflow: "secret-workflow", Action: "secret-action", Issuer: "secret-issuer",
		Parents: []string{"secret-parent"}, Payload: []byte("secret-payload"),
	}
	look := func(when string) {
		for _, entry := range contents(t, mem) {
			if bytes.Contains(entry.Key, []byte("secret")) || bytes.Contains(entry.Value, []byte("secret")) {
				t.Errorf("%s: %q holds %q", when, entry.Key, entry.Value)
			}
		}
	}
	mustAppend(t, l, e)
	look("in the tree")
}

// TestPruneKeeps: entries are kept by age and by KeepUntil, and pruned later.
func TestPruneKeeps(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	mem := memory.New(memory.Options{Now: func() time.Time { return now }})
	l := mustOpen(t, testOptions(mem))
	kept := map[int64]time.Time{}
	for n := range 3 * tileWidth {
		e := testEvent(n)
		if n%5 == 0 {
			e.KeepUntil = now.Add(time.Duration(n) * time.Minute)
			kept[int64(n)] = e.KeepUntil
		}
		mustAppend(t, l, e)
		if n%tileWidth == 0 {
			now = now.Add(time.Second)
		}
	}
	head := l.Head()
	if n, err := l.Prune(t.Context(), now.Add(-time.Hour)); err != nil || n != 0 {
		t.Errorf("%d young ones pruned: %v", n, err)
	}
	total, looks := 0, 100
	if raced {
		looks = 20
	}
	for range looks {
		n := must(l.Prune(t.Context(), now))(t)
		total += n
		for index, until := range kept {
			if _, err := l.Entry(t.Context(), index); until.After(now) && err != nil {
				t.Fatalf("entry %d must be kept until %s, now is %s: %v", index, until, now, err)
			}
		}
		now = now.Add(1000 * time.Minute / time.Duration(looks))
	}
	r := mustVerify(t, l)
	if total != 3*tileWidth || r.Pruned != int64(total) || r.Entries != 0 {
		t.Errorf("%d pruned of %d; %+v", total, 3*tileWidth, r)
	}
	for _, index := range []int64{0, 255, 256, 767} {
		proof, err := l.Prove(t.Context(), index, head.Size)
		if err != nil || len(proof) == 0 {
			t.Errorf("entry %d cannot be proved any more: %v", index, err)
		}
	}
	// The disk keeps the hashes, and little else.
	for _, e := range contents(t, mem) {
		if !strings.ContainsRune("htp", rune(e.Key[1])) {
			t.Errorf("left behind: %q", e.Key)
		}
	}
	l = mustOpen(t, testOptions(mem))
	if err := l.Append(t.Context(), []Event{testEvent(1)}); err != nil {
		t.Errorf("a pruned id is taken: %v", err)
	}
	checkHeads(t, l, []Head{head, l.Head()})
	mustVerify(t, l)
}

// TestAwait: who waits for an event gets it once it is recorded, or leaves.
func TestAwait(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Await(ctx, testEvent(1).Workflow, "id-1"); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	found := make(chan error)
	go func() {
		_, err := l.Await(context.Background(), testEvent(1).Workflow, "id-1")
		found <- err
	}()
	appendEvents(t, l, 1, 2)
	if err := <-found; err != nil {
		t.Error(err)
	}
}

// An id is unique in its workflow, and one without a workflow everywhere, also among
// concurrent events.
func TestIDsWithoutWorkflow(t *testing.T) {
	ctx := t.Context()
	for _, wids := range [][2]string{{"", "w"}, {"w", ""}, {"", ""}, {"w", "w"}, {"w", "v"}} {
		b := mustOpen(t, testOptions(memory.New(memory.Options{})))
		events := [2]Event{testEvent(1), testEvent(1)}
		for i := range events {
			events[i].Workflow = wids[i]
		}
		var batches [2]*store.Batch
		for i := range events { // both are on their way before one of them lands
			var err error
			if batches[i], err = b.Record(events[i]); err != nil {
				t.Fatal(err)
			}
		}
		var errs [2]error
		for i, batch := range batches {
			errs[i] = batch.Commit(ctx, b.store)
		}
		both := wids == [2]string{"w", "v"}
		if errs[0] != nil || (errs[1] == nil) != both || errs[1] != nil && !errors.Is(errs[1], ErrDuplicate) {
			t.Errorf("%q: %v", wids, errs)
		}
		if _, err := b.Record(events[0], events[1]); err == nil && !both {
			t.Errorf("%q: both in one commit", wids)
		}
	}
}
