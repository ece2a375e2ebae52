package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// modelEntry is an entry in the reference model.
type modelEntry struct {
	event  Event
	at     time.Time
	pruned bool
}

// TestModel drives a log through random histories of commits, moves, crashes and
// prunings, and compares it with a slice of leaves: every entry at its place, every
// proof by package tlog's own check, every head a continuation of those before.
func TestModel(t *testing.T) {
	seeds := uint64(6)
	if raced {
		seeds = 2
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				runModel(t, rand.New(rand.NewPCG(seed, 7)), func(d time.Duration) { time.Sleep(d) })
			})
		})
	}
}

func runModel(t *testing.T, rnd *rand.Rand, pass func(time.Duration)) {
	ctx := t.Context()
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	l := mustOpen(t, o)
	var entries []modelEntry
	heads := []Head{l.Head()}
	n := 0
	for range 300 {
		switch op := rnd.IntN(12); {
		case op < 7:
			events := make([]Event, 1+rnd.IntN(5))
			for i := range events {
				events[i] = testEvent(n)
				if rnd.IntN(4) == 0 {
					events[i].KeepUntil = time.Now().Add(time.Duration(rnd.IntN(10)) * time.Hour)
				}
				n++
			}
			if err := l.Append(ctx, events); err != nil {
				t.Fatal(err)
			}
			for _, e := range events {
				entries = append(entries, modelEntry{event: e, at: time.Now()})
			}
			heads = append(heads, l.Head())
		case op < 8 && n > 0: // an id that is taken
			again := testEvent(rnd.IntN(n))
			place := len(entries)
			for i := range entries {
				if entries[i].event.ID == again.ID {
					place = i
				}
			}
			if place < len(entries) && entries[place].pruned {
				continue
			}
			if err := l.Append(ctx, []Event{again}); !errors.Is(err, ErrDuplicate) {
				t.Fatalf("%s a second time: %v", again.ID, err)
			}
		case op < 11:
			l = mustOpen(t, o) // the process died and came back
		default:
			pass(time.Duration(rnd.IntN(60)) * time.Minute)
			before := time.Now().Add(-time.Duration(rnd.IntN(120)) * time.Minute)
			want := 0
			for i := range entries[:l.Head().Size&^(tileWidth-1)] {
				e := &entries[i]
				if !e.pruned && e.at.Before(before) && !e.event.KeepUntil.After(time.Now()) {
					e.pruned = true
					want++
				}
			}
			if got, err := l.Prune(ctx, before); err != nil || got != want {
				t.Fatalf("%d entries pruned instead of %d: %v", got, want, err)
			}
		}
	}
	compareModel(t, l, entries, heads, rnd)
}

func compareModel(t *testing.T, l *Log, entries []modelEntry, heads []Head, rnd *rand.Rand) {
	ctx := t.Context()
	if got := int(l.Head().Size); got != len(entries) {
		t.Fatalf("%d entries instead of %d", got, len(entries))
	}
	leaves := make([]tlog.Hash, len(entries))
	pruned := int64(0)
	listed := map[string][]string{}
	for i := range entries {
		m := &entries[i]
		tileHash := must(l.now.Load().hashes(ctx, l.logStore).ReadHashes([]int64{tlog.StoredHashIndex(0, int64(i))}))(t)
		leaves[i] = tileHash[0]
		e, err := l.Entry(ctx, int64(i))
		if m.pruned {
			pruned++
			if !errors.Is(err, ErrPruned) {
				t.Fatalf("entry %d was pruned: %v", i, err)
			}
			if _, err := l.Lookup(ctx, m.event.Workflow, m.event.ID); !errors.Is(err, ErrNotFound) {
				t.Fatalf("entry %d was pruned and is found by its id: %v", i, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if tlog.RecordHash(e.Leaf) != leaves[i] || e.ID != m.event.ID || !bytes.Equal(e.Payload, m.event.Payload) ||
			!e.Recorded.Equal(m.at) || !e.KeepUntil.Equal(m.event.KeepUntil) || e.Log != testOrigin {
			t.Fatalf("entry %d is %+v instead of %+v", i, e, m)
		}
		byID, err := l.Lookup(ctx, m.event.Workflow, m.event.ID)
		if err != nil || byID.Index != int64(i) {
			t.Fatalf("entry %d by its id: %d, %v", i, byID.Index, err)
		}
		if m.event.Workflow != "" {
			listed[m.event.Workflow] = append(listed[m.event.Workflow], m.event.ID)
		}
	}
	model := naiveTree(t, leaves)
	if l.Head().Root != model.root(t, len(leaves)) {
		t.Fatal("another root")
	}
	for range 100 {
		size := 1 + rnd.IntN(len(leaves))
		index := rnd.IntN(size)
		proof := must(l.Prove(ctx, int64(index), int64(size)))(t)
		if err := tlog.CheckRecord(proof, int64(size), model.root(t, size), int64(index), leaves[index]); err != nil {
			t.Fatal(err)
		}
		older := 1 + rnd.IntN(size)
		between := must(l.ProveConsistency(ctx, int64(older), int64(size)))(t)
		if err := tlog.CheckTree(between, int64(size), model.root(t, size), int64(older), model.root(t, older)); err != nil {
			t.Fatal(err)
		}
	}
	checkHeads(t, l, heads)
	for workflow, want := range listed {
		if got := listAll(t, l, workflow, 1+rnd.IntN(7)); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("workflow %s lists %v instead of %v", workflow, got, want)
		}
	}
	r := mustVerify(t, l)
	if r.Pruned != pruned || r.Entries != int64(len(entries))-pruned {
		t.Fatalf("verified %d entries and %d pruned ones, instead of %d pruned of %d", r.Entries, r.Pruned, pruned, len(entries))
	}
}

// checkHeads checks that each head is a continuation of the one before.
func checkHeads(t testing.TB, l *Log, heads []Head) {
	t.Helper()
	for i := 1; i < len(heads); i++ {
		old, now := heads[i-1], heads[i]
		proof := must(l.ProveConsistency(t.Context(), old.Size, now.Size))(t)
		if err := CheckConsistency(proof, old, now); err != nil {
			t.Fatalf("from size %d to %d: %v", old.Size, now.Size, err)
		}
	}
}

func listAll(t testing.TB, l *Log, workflow string, limit int) []string {
	t.Helper()
	var ids []string
	for at := Cursor(""); ; {
		page := must(l.List(t.Context(), workflow, at, limit))(t)
		for _, e := range page.Entries {
			ids = append(ids, e.ID)
		}
		if at = page.Next; at == "" {
			return ids
		}
	}
}
