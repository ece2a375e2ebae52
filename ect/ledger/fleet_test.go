package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// nodeOptions are those of the log of a node of a fleet. Each has a key of its own for its heads.
func nodeOptions(st store.Store, node string) Options {
	o := testOptions(st)
	o.Origin = "example.com/ledger/" + node
	o.HeadSigner, o.HeadKeys = newHeadKey(node + ".example")
	o.KeysOf = func(origin string) (note.Verifiers, error) {
		_, keys := newHeadKey(origin[len("example.com/ledger/"):] + ".example")
		return keys, nil
	}
	return o
}

// twoNodes are the logs of two members of a store.
func twoNodes(t *testing.T) (st *memory.Store, a, b *Log) {
	t.Helper()
	st = memory.New(memory.Options{})
	return st, mustOpen(t, nodeOptions(st.Join("a"), "a")), mustOpen(t, nodeOptions(st.Join("b"), "b"))
}

// Each node records in its own tree, whatever the other does meanwhile.
func TestNodesRecordInTheirOwn(t *testing.T) {
	_, a, b := twoNodes(t)
	mustAppend(t, a, testEvent(1), testEvent(2))
	mustAppend(t, b, testEvent(3))
	if a.Head().Size != 2 || b.Head().Size != 1 {
		t.Fatalf("%d and %d entries", a.Head().Size, b.Head().Size)
	}
	const each = 150
	var group sync.WaitGroup
	for node, l := range []*Log{a, b} {
		group.Go(func() {
			for n := range each {
				e := testEvent(n)
				e.ID = fmt.Sprintf("%d-%d", node, n)
				if err := l.Append(context.Background(), []Event{e}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if a.Head().Size != 2+each || b.Head().Size != 1+each {
		t.Errorf("%d and %d entries", a.Head().Size, b.Head().Size)
	}
	mustVerify(t, a)
	mustVerify(t, b)
}

// What one node has recorded another reads, with proofs under the head of the log that has it, also after
// that has grown by little or by much, and after pruning.
func TestReadAnotherLog(t *testing.T) {
	st, a, b := twoNodes(t)
	if _, err := b.In(t.Context(), "example.com/ledger/nobody"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a log that is not there: %v", err)
	}
	if _, err := b.In(t.Context(), ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("no name: %v", err)
	}
	keys := must(b.options.KeysOf(a.Origin()))(t)
	n := 0
	for _, size := range []int{1, 3, tileWidth + 5, tileWidth + 6, 4 * tileWidth} {
		for ; n < size; n++ {
			mustAppend(t, a, testEvent(n))
		}
		last := testEvent(size - 1)
		e := must(b.Lookup(t.Context(), last.Workflow, last.ID))(t)
		theirs := must(b.In(t.Context(), e.Log))(t)
		if theirs.Head().Size != int64(size) || e.Log != a.Origin() || e.Index != int64(size-1) {
			t.Fatalf("entry %d of %s, head %d", e.Index, e.Log, theirs.Head().Size)
		}
		for _, index := range []int64{0, e.Index} {
			at := must(theirs.Entry(t.Context(), index))(t)
			receipt := must(theirs.Receipt(t.Context(), index))(t)
			if _, err := receipt.Check(at.Leaf, a.Origin(), keys); err != nil {
				t.Errorf("entry %d of %d: %v", index, size, err)
			}
		}
		if token := must(b.Token(t.Context(), &e))(t); string(token) != string(last.Payload) {
			t.Errorf("%q", token)
		}
	}
	if err := theirsOf(t, b, a).Append(t.Context(), []Event{testEvent(9000)}); !errors.Is(err, ErrClosed) {
		t.Errorf("recorded in another node's log: %v", err)
	}
	mustVerify(t, theirsOf(t, b, a))
	var mine, other bytes.Buffer
	must(a.Export(t.Context(), &mine))(t)
	must(theirsOf(t, b, a).Export(t.Context(), &other))(t)
	if !bytes.Equal(mine.Bytes(), other.Bytes()) {
		t.Error("the export is another one there")
	}
	all := must(b.Logs(t.Context()))(t)
	if !slices.Equal(all, []string{a.Origin(), b.Origin()}) {
		t.Errorf("%q", all)
	}

	// The note of what was pruned is verified, too.
	if _, err := a.Prune(t.Context(), time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if _, err := theirsOf(t, b, a).Entry(t.Context(), 0); !errors.Is(err, ErrPruned) {
		t.Errorf("pruned: %v", err)
	}
	key := a.prunedKey(0)
	found := must(st.Get(t.Context(), key))(t)
	found.Value[len(found.Value)-4] ^= 1
	if _, err := st.Commit(t.Context(), store.Write{Key: key, Value: found.Value}); err != nil {
		t.Fatal(err)
	}
	if err := b.absent(t.Context(), a.id, 0); !errors.Is(err, ErrTampered) {
		t.Errorf("a forged note of what was pruned: %v", err)
	}
}

func theirsOf(t *testing.T, b, a *Log) *Log {
	t.Helper()
	return must(b.In(t.Context(), a.Origin()))(t)
}

// A head that another node's key has not signed, or that forgets entries, is no state of its log.
func TestForgedHeadOfAnotherLog(t *testing.T) {
	st, a, b := twoNodes(t)
	appendEvents(t, a, 0, 5)
	before := must(st.Get(t.Context(), a.headKey()))(t)
	theirsOf(t, b, a)
	appendEvents(t, a, 5, 9)
	theirsOf(t, b, a)
	put := func(value []byte) {
		t.Helper()
		if _, err := st.Commit(t.Context(), store.Write{Key: a.headKey(), Value: value}); err != nil {
			t.Fatal(err)
		}
	}
	put(before.Value)
	if _, err := b.In(t.Context(), a.Origin()); !errors.Is(err, ErrTampered) {
		t.Errorf("an older head: %v", err)
	}
	foreign := Log{logStore: a.logStore, signer: b.signer}
	put(must(foreign.sign(a.now.Load().tree))(t).Note)
	if _, err := b.In(t.Context(), a.Origin()); !errors.Is(err, ErrTampered) {
		t.Errorf("signed by another node: %v", err)
	}
}

// An id is used once in the fleet, and the loser of two nodes knows it.
func TestIDsAreUniqueOverNodes(t *testing.T) {
	_, a, b := twoNodes(t)
	mustAppend(t, a, testEvent(1))
	if err := b.Append(t.Context(), []Event{testEvent(1)}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("twice: %v", err)
	}
	if e := must(b.Lookup(t.Context(), "workflow-1", "id-1"))(t); e.Log != a.Origin() {
		t.Errorf("in the log %s", e.Log)
	}
}

// A member that was removed records nothing any more, and who takes up its log goes on from its head.
func TestRemovedMemberRecordsNothing(t *testing.T) {
	st := memory.New(memory.Options{})
	first := st.Join("a")
	a := mustOpen(t, nodeOptions(first, "a"))
	mustAppend(t, a, testEvent(0))
	first.Remove()
	if err := a.Append(t.Context(), []Event{testEvent(1)}); !errors.Is(err, store.ErrUnhealthy) {
		t.Fatalf("a removed member records: %v", err)
	}
	again := mustOpen(t, nodeOptions(st.Join("a"), "a"))
	mustAppend(t, again, testEvent(1))
	if again.Head().Size != 2 {
		t.Errorf("%d entries", again.Head().Size)
	}
	mustVerify(t, again)
}
