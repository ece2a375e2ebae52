package storetest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// numbering is a sequence that numbers its items: under "item" and the number stands the item, under the item the
// number, and under "end" how many there are.
type numbering struct {
	store.Sequence
	t    *testing.T
	next uint64
	end  store.Version // of the key "end", as done said it
	made []store.Write // of the commit under way
	busy bool

	fails error // of the next one
	ended error // how the last commit has ended
}

func newNumbering(t *testing.T) *numbering {
	n := &numbering{t: t}
	n.Assemble = n.assemble
	return n
}

func itemKey(n uint64) []byte { return binary.BigEndian.AppendUint64([]byte("item"), n) }

// place is a batch's write that adds an item, which none has yet.
func (n *numbering) place(item string) store.Write {
	return store.Write{Key: []byte(item), If: store.Absent(), Place: &store.Place{In: &n.Sequence, Item: item, Size: 100}}
}

func (n *numbering) assemble(places []*store.Place, _ time.Time) ([]store.Write, func(store.Version, error), error) {
	if n.busy {
		n.t.Error("asked again before it was said how the commit has ended")
	}
	if n.fails != nil {
		return nil, nil, n.fails
	}
	n.busy = true
	end := store.Absent()
	if n.end != 0 {
		end = store.VersionIs(n.end)
	}
	next, made := n.next, n.made[:0] // used again, which a store must bear
	for _, p := range places {
		number := binary.BigEndian.AppendUint64(nil, next)
		made = append(made,
			store.Write{Key: itemKey(next), Value: []byte(p.Item.(string)), Bulk: true},
			store.Write{Key: []byte(p.Item.(string)), Value: number})
		next++
	}
	made = append(made, store.Write{Key: []byte("end"), If: end, Value: binary.BigEndian.AppendUint64(nil, next)})
	n.made = made
	return made, func(version store.Version, err error) {
		if n.busy = false; err == nil {
			n.next, n.end = next, version
		}
		n.ended = err
		clear(made)
	}, nil
}

// exerciseSequences tests Write.Place: what a sequence makes is committed with the batches that ask for it, in their
// order.
func exerciseSequences(t *testing.T, open Opener) {
	b := newBench(t, open)
	n := newNumbering(t)
	b.commit(put("x", "1"), n.place("a"), n.place("b"))
	b.is("x", "1")
	b.is("a", string(binary.BigEndian.AppendUint64(nil, 0)))
	b.is("b", string(binary.BigEndian.AppendUint64(nil, 1)))
	b.is(string(itemKey(1)), "b")
	if end := b.is("end", string(binary.BigEndian.AppendUint64(nil, 2))); end.Version != n.end {
		t.Errorf("version %d, and done was called with %d", end.Version, n.end)
	}

	t.Run("NothingOfABatchThatLoses", func(t *testing.T) {
		if lost := b.conflict(put("x", "2"), n.place("c"), n.place("a")); lost.Index != 2 || lost.Found == nil ||
			string(lost.Found.Value) != string(binary.BigEndian.AppendUint64(nil, 0)) {
			t.Errorf("lost to %+v", lost)
		}
		b.conflict(n.place("c"), store.Write{Key: []byte("x"), If: store.Absent(), Check: true})
		b.absent("c")
		b.is("x", "1")
		b.is("end", string(binary.BigEndian.AppendUint64(nil, 2)))
	})

	t.Run("Rules", func(t *testing.T) {
		good := n.place("c")
		for what, change := range map[string]func(w *store.Write){
			"a value":     func(w *store.Write) { w.Value = []byte("1") },
			"an expiry":   func(w *store.Write) { w.Expires = b.Now().Add(time.Hour) },
			"a deletion":  func(w *store.Write) { w.Delete = true },
			"a check":     func(w *store.Write) { w.Check = true },
			"bulk":        func(w *store.Write) { w.Bulk = true },
			"no size":     func(w *store.Write) { w.Place = &store.Place{In: &n.Sequence} },
			"a huge size": func(w *store.Write) { w.Place = &store.Place{In: &n.Sequence, Size: store.MaxBulk + 1} },
			"no sequence": func(w *store.Write) { w.Place = &store.Place{Size: 1} },
		} {
			w := good
			change(&w)
			if _, err := b.Commit(t.Context(), put("x", "3"), w); !errors.Is(err, store.ErrInvalid) {
				t.Errorf("with %s: %v, want ErrInvalid", what, err)
			}
		}
		var many []store.Write
		for i := range 3 {
			w := n.place(fmt.Sprintf("large-%d", i))
			w.Place.Size = store.MaxBatchBytes / 2
			many = append(many, w)
		}
		if _, err := b.Commit(t.Context(), many...); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("larger than a batch: %v", err)
		}
		b.is("x", "1")
	})

	t.Run("TwoSequences", func(t *testing.T) {
		other := &store.Sequence{Assemble: func(places []*store.Place, now time.Time) ([]store.Write, func(store.Version, error), error) {
			if !now.Equal(b.Now()) {
				t.Errorf("the time is %s", now)
			}
			return []store.Write{{Key: []byte("other"), Value: fmt.Append(nil, len(places))}}, nil, nil
		}}
		in := func(key string) store.Write {
			return store.Write{Key: []byte(key), Place: &store.Place{In: other, Size: 1}}
		}
		b.commit(in("o1"), n.place("two"), in("o2"))
		b.is("other", "2")
		b.is("two", string(binary.BigEndian.AppendUint64(nil, 2)))
		b.absent("o1") // nothing was made under its own key
	})

	t.Run("NothingIsWrittenOfASequenceThatDoesNotGoOn", func(t *testing.T) {
		refused := func() {
			t.Helper()
			_, err := b.Commit(t.Context(), put("y", "1"), n.place("refused"))
			if lost := (*store.Conflict)(nil); !errors.Is(err, store.ErrUnavailable) || errors.As(err, &lost) {
				t.Errorf("the commit ended with %v, want ErrUnavailable", err)
			}
			b.absent("y")
			b.absent("refused")
		}
		n.fails = errors.New("out of order")
		refused()
		n.fails = nil
		end := n.end
		n.end++ // somebody else has added something
		refused()
		if !errors.Is(n.ended, store.ErrOvertaken) {
			t.Errorf("done was called with %v, want ErrOvertaken", n.ended)
		}
		n.end = end
		b.commit(put("y", "1"), n.place("refused"))
		b.is("y", "1")
	})

	t.Run("InTheOrderOfTheCommits", func(t *testing.T) {
		const callers, each = 8, 40
		first := n.next
		var all sync.WaitGroup
		var mu sync.Mutex
		version := map[string]store.Version{} // by item
		for c := range callers {
			all.Go(func() {
				for i := range each {
					item := fmt.Sprintf("caller-%d-%02d", c, i)
					batch := []store.Write{{Key: fmt.Append(nil, "state-", c), Value: []byte(item)}, n.place(item)}
					if i%5 == 4 { // somebody else may have it already
						batch[1] = n.place(fmt.Sprintf("shared-%02d", i))
						item = string(batch[1].Key)
					}
					v, err := b.Commit(context.Background(), batch...)
					if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
						if lost.Found == nil || len(lost.Found.Value) != 8 {
							t.Errorf("%s has lost to %+v", item, lost.Found)
						}
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					version[item] = v
					mu.Unlock()
					if at, err := b.Get(context.Background(), []byte(item)); err != nil || len(at.Value) != 8 {
						t.Errorf("%s cannot be read after its commit: %q, %v", item, at.Value, err)
					}
				}
			})
		}
		all.Wait()
		last := store.Version(0)
		for i := first; i < n.next; i++ {
			item, err := b.Get(t.Context(), itemKey(i))
			if err != nil {
				t.Fatalf("number %d: %v", i, err)
			}
			b.is(string(item.Value), string(binary.BigEndian.AppendUint64(nil, i)))
			v := version[string(item.Value)]
			if v <= last {
				t.Errorf("number %d was committed as %d, behind %d", i, v, last)
			}
			last = v
			delete(version, string(item.Value))
		}
		if len(version) > 0 {
			t.Errorf("acknowledged and without a number: %v", version)
		}
		b.is("end", string(binary.BigEndian.AppendUint64(nil, n.next)))
	})
}
