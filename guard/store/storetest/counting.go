package storetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// counter is the write that takes n numbers of a counter.
func counter(key string, n uint32) store.Write { return store.Write{Key: []byte(key), Count: n} }

// number is eight bytes.
func number(n uint64) string { return string(binary.BigEndian.AppendUint64(nil, n)) }

// numbered is a write whose key ends with a number.
func numbered(key string, offset uint64, value string) store.Write {
	return store.Write{Key: []byte(key + number(offset)), Value: []byte(value), Numbered: store.NumberedKey}
}

func exerciseCount(t *testing.T, open Opener) {
	t.Run("NumbersStandInKeysAndValues", func(t *testing.T) {
		b := newBench(t, open)
		for before := uint64(0); before < 9; before += 3 {
			at := store.Write{Key: []byte(fmt.Sprint("at", before)), Value: []byte("at" + number(2)), Numbered: store.NumberedValue}
			both := store.Write{Key: []byte("both" + number(1)), Value: []byte(number(1)), Numbered: store.NumberedKey | store.NumberedValue}
			batch := []store.Write{numbered("e", 2, "third"), at, counter("n", 3), both, numbered("e", 0, "first"), put("plain", number(1))}
			v := b.commit(batch...)
			b.is("n", number(before+3))
			b.is("e"+number(before), "first")
			b.is("e"+number(before+2), "third")
			b.absent("e" + number(before+1))
			b.is("both"+number(before+1), number(before+1))
			b.is(fmt.Sprint("at", before), "at"+number(before+2))
			b.is("plain", number(1))
			if e := b.is("n", number(before+3)); e.Version != v || !e.Expires.IsZero() {
				t.Errorf("the counter is %+v, want version %d and no end", e, v)
			}
			for i, want := range map[int]string{0: "e" + number(before+2), 3: "both" + number(before+1), 4: "e" + number(before)} {
				if got := string(batch[i].Key); got != want {
					t.Errorf("write %d has the key %q afterwards, want %q", i, got, want)
				}
			}
			if got := string(batch[1].Value); got != "at"+number(before+2) {
				t.Errorf("the value is %q afterwards", got)
			}
			if len(batch[2].Value) != 0 {
				t.Errorf("the counter's own write has the value %q afterwards", batch[2].Value)
			}
		}
	})

	t.Run("LosersGetNone", func(t *testing.T) {
		b := newBench(t, open)
		b.put("taken", "1")
		batch := []store.Write{counter("n", 2), numbered("e", 0, "1"), numbered("e", 1, "2"), insert("taken", "2")}
		if lost := b.conflict(batch...); lost.Index != 3 {
			t.Errorf("write %d lost", lost.Index)
		}
		if string(batch[1].Key) != "e"+number(0) || string(batch[2].Key) != "e"+number(1) {
			t.Errorf("a batch that lost has the keys %q and %q", batch[1].Key, batch[2].Key)
		}
		b.absent("n")
		b.commit(batch[:3]...) // the same once more
		b.is("n", number(2))
		b.is("e"+number(1), "2")
	})

	t.Run("ConditionsAreOnTheNumberedKey", func(t *testing.T) {
		b := newBench(t, open)
		b.put("e"+number(1), "in the way")
		batch := func() []store.Write {
			w := numbered("e", 0, "mine")
			w.If = store.Absent()
			return []store.Write{counter("n", 1), w}
		}
		b.commit(batch()...)
		lost := b.conflict(batch()...)
		if lost.Index != 1 || string(lost.Key) != "e"+number(1) || lost.Found == nil || string(lost.Found.Value) != "in the way" {
			t.Errorf("%+v", lost)
		}
		b.is("e"+number(1), "in the way")
		b.is("n", number(1))
		b.commit(remove("e" + number(1)))
		b.commit(batch()...)
		b.is("e"+number(1), "mine")
		// The counter may have a condition too.
		on := counter("n", 1)
		on.If = store.Absent()
		b.conflict(on)
	})

	t.Run("CountersAreApart", func(t *testing.T) {
		b := newBench(t, open)
		b.commit(counter("n", 5))
		b.commit(counter("m", 1), numbered("e", 0, "1"))
		b.is("e"+number(0), "1")
		b.put("n", number(40)) // an ordinary value
		b.commit(counter("n", 1), numbered("f", 0, "1"))
		b.is("f"+number(40), "1")
		b.commit(remove("n"))
		b.commit(counter("n", 1), numbered("g", 0, "1"))
		b.is("g"+number(0), "1")
	})

	t.Run("Refused", func(t *testing.T) {
		b := newBench(t, open)
		b.put("text", "1")
		b.put("end", strings.Repeat("\xff", 8))
		soon := b.Now().Add(1)
		with := func(w store.Write, change func(*store.Write)) store.Write { change(&w); return w }
		e := numbered("e", 0, "1")
		for name, batch := range map[string][]store.Write{
			"no counter":            {e},
			"two counters":          {counter("n", 1), counter("m", 1)},
			"a counter's value":     {with(counter("n", 1), func(w *store.Write) { w.Value = []byte(number(1)) })},
			"a counter that ends":   {with(counter("n", 1), func(w *store.Write) { w.Expires = soon })},
			"a counter as bulk":     {with(counter("n", 1), func(w *store.Write) { w.Bulk = true })},
			"a deleted counter":     {with(counter("n", 1), func(w *store.Write) { w.Delete = true })},
			"a numbered counter":    {with(counter("n"+number(0), 1), func(w *store.Write) { w.Numbered = store.NumberedKey })},
			"an offset beyond":      {counter("n", 1), numbered("e", 1, "1")},
			"no room in the key":    {counter("n", 1), with(put("e", "1"), func(w *store.Write) { w.Numbered = store.NumberedKey })},
			"no room in the value":  {counter("n", 1), with(put("e", "1"), func(w *store.Write) { w.Numbered = store.NumberedValue })},
			"a numbered deletion":   {counter("n", 1), with(e, func(w *store.Write) { w.Delete = true })},
			"a large value":         {counter("n", 1), with(e, func(w *store.Write) { w.Bulk, w.Expires = true, soon })},
			"an unknown part":       {counter("n", 1), with(e, func(w *store.Write) { w.Numbered = 4 })},
			"a key that may be one": {counter("n", 1), e, put("e"+number(7), "2")},
			"one number twice":      {counter("n", 1), e, e},
			"no counter stands":     {counter("text", 1), e},
			"at its end":            {counter("end", 1), e},
		} {
			if v, err := b.Commit(t.Context(), batch...); !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%s: version %d, %v; want ErrInvalid", name, v, err)
			}
		}
		b.scans(store.Range{}, "end", "text")
	})

	t.Run("TogetherWithoutGaps", func(t *testing.T) {
		b := newBench(t, open)
		const callers, each = 8, 60
		b.put("blocked", "1")
		var mu sync.Mutex
		given := map[uint64]string{}
		next := uint64(0)
		var all sync.WaitGroup
		for c := range callers {
			all.Go(func() {
				for i := range each {
					n := uint32(1 + (c+i)%3)
					batch := []store.Write{counter("n", n)}
					for k := range n {
						batch = append(batch, numbered("e", uint64(k), fmt.Sprintf("%d-%d-%d", c, i, k)))
					}
					loses := (c+i)%4 == 0
					switch {
					case loses && i%2 == 0:
						batch = append(batch, insert("blocked", "2"))
					case loses: // in one group with others, perhaps
						batch = append(batch, insert(fmt.Sprint("once", i), "1"))
					}
					_, err := b.Commit(t.Context(), batch...)
					lost := (*store.Conflict)(nil)
					if err != nil && !(loses && errors.As(err, &lost)) {
						t.Error(err)
						return
					}
					mu.Lock()
					for k := range n {
						if err != nil {
							break
						}
						at := binary.BigEndian.Uint64(batch[1+k].Key[1:])
						if given[at] != "" {
							t.Errorf("number %d is given twice", at)
						}
						if first := binary.BigEndian.Uint64(batch[1].Key[1:]); at != first+uint64(k) {
							t.Errorf("number %d at offset %d behind %d", at, k, first)
						}
						given[at] = string(batch[1+k].Value)
						next = max(next, at+1)
					}
					mu.Unlock()
				}
			})
		}
		all.Wait()
		if uint64(len(given)) != next || next < callers*each {
			t.Errorf("%d numbers below %d", len(given), next)
		}
		b.is("n", number(next))
		stands := b.scan(store.Prefix([]byte("e")))
		if uint64(len(stands)) != next {
			t.Errorf("%d numbered entries instead of %d", len(stands), next)
		}
		for i, e := range stands {
			if string(e.Key) != "e"+number(uint64(i)) || string(e.Value) != given[uint64(i)] {
				t.Fatalf("%q = %q, want number %d with %q", e.Key, e.Value, i, given[uint64(i)])
			}
		}
	})
}
