package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The keys of a history: few, so that clients meet.
var historyKeys = [...]string{"x", "y", "z"}

const (
	historyClients = 5
	historySteps   = 40
)

func exerciseLinearizability(t *testing.T, open Opener) {
	for round := range 8 {
		t.Run(fmt.Sprintf("History%d", round), func(t *testing.T) {
			b := newBench(t, open)
			history, err := record(t.Context(), b.Store, uint64(round))
			if err != nil {
				t.Fatal(err)
			}
			// Unknown means that the checker ran out of time; it proves nothing.
			if result := porcupine.CheckOperationsTimeout(model, history, patience); result != porcupine.Ok {
				t.Fatalf("history of %d operations is not linearizable (%s)", len(history), result)
			}
		})
	}
}

// record lets several clients read and write the same few keys at the same time
// and returns what each of them saw.
func record(ctx context.Context, s store.Store, seed uint64) ([]porcupine.Operation, error) {
	var (
		tick    atomic.Int64 // a clock that never shows the same time twice
		mu      sync.Mutex
		history []porcupine.Operation
		failure error
		start   = make(chan struct{})
		all     sync.WaitGroup
	)
	for id := range historyClients {
		all.Go(func() {
			c := client{Store: s, id: id, random: rand.New(rand.NewPCG(seed, uint64(id)))}
			<-start
			for step := range historySteps {
				in := c.choose(step)
				call := tick.Add(1)
				out, err := c.do(ctx, in)
				returned := tick.Add(1)
				mu.Lock()
				history = append(history, porcupine.Operation{
					ClientId: id, Input: in, Call: call, Output: out, Return: returned,
				})
				if err != nil {
					failure = err
				}
				mu.Unlock()
			}
		})
	}
	close(start)
	all.Wait()
	return history, failure
}

// client remembers the versions that it saw, so that its conditions hold often.
type client struct {
	store.Store
	id     int
	random *rand.Rand
	seen   [len(historyKeys)]store.Version
}

type (
	// request is what a client asks: a get of one key, a scan, or a batch.
	request struct {
		kind  requestKind
		key   int
		batch []change
	}
	requestKind uint8

	// change is one write of a batch on historyKeys[key].
	change struct {
		key    int
		remove bool
		check  bool
		value  string
		want   store.Version // wantAny, wantAbsent or a version
	}

	// answer is what the client saw. lost is -1 where the batch landed.
	answer struct {
		cells   [len(historyKeys)]cell
		version store.Version
		lost    int
	}

	// cell is one key's state; version 0 is absent.
	cell struct {
		version store.Version
		value   string
	}
)

const (
	get requestKind = iota
	scan
	commit
)

const (
	wantAbsent store.Version = 0
	wantAny                  = ^store.Version(0)
)

func (c *client) choose(step int) request {
	switch n := c.random.IntN(10); {
	case n < 3:
		return request{kind: get, key: c.random.IntN(len(historyKeys))}
	case n < 4:
		return request{kind: scan}
	}
	order := c.random.Perm(len(historyKeys))
	r := request{kind: commit}
	for i := range 1 + c.random.IntN(len(historyKeys)) {
		key := order[i]
		w := change{key: key, want: c.seen[key], value: fmt.Sprintf("%d-%d-%d", c.id, step, i)}
		switch n := c.random.IntN(10); {
		case n < 2:
			w.want = wantAny
		case n < 4:
			w.want = wantAbsent
		}
		if c.random.IntN(4) == 0 {
			w.remove, w.value = true, ""
		}
		if i > 0 && w.want != wantAny && c.random.IntN(3) == 0 {
			w.check, w.remove, w.value = true, false, ""
		}
		r.batch = append(r.batch, w)
	}
	return r
}

func (c *client) do(ctx context.Context, r request) (answer, error) {
	switch r.kind {
	case get:
		return c.get(ctx, r.key)
	case scan:
		return c.scan(ctx)
	default:
		return c.commit(ctx, r.batch)
	}
}

func (c *client) get(ctx context.Context, key int) (a answer, err error) {
	e, err := c.Get(ctx, []byte(historyKeys[key]))
	if errors.Is(err, store.ErrNotFound) {
		c.seen[key] = wantAbsent
		return a, nil
	}
	a.cells[key] = cell{e.Version, string(e.Value)}
	c.seen[key] = e.Version
	return a, err
}

func (c *client) scan(ctx context.Context) (a answer, err error) {
	for e, err := range c.Scan(ctx, store.Range{}) {
		if err != nil {
			return a, err
		}
		for key, name := range historyKeys {
			if name == string(e.Key) {
				a.cells[key] = cell{e.Version, string(e.Value)}
			}
		}
	}
	for key := range a.cells {
		c.seen[key] = a.cells[key].version
	}
	return a, nil
}

func (c *client) commit(ctx context.Context, batch []change) (answer, error) {
	writes := make([]store.Write, len(batch))
	for i, w := range batch {
		writes[i] = store.Write{Key: []byte(historyKeys[w.key]), Value: []byte(w.value), Delete: w.remove, Check: w.check}
		switch w.want {
		case wantAny:
		case wantAbsent:
			writes[i].If = store.Absent()
		default:
			writes[i].If = store.VersionIs(w.want)
		}
	}
	v, err := c.Commit(ctx, writes...)
	var lost *store.Conflict
	if errors.As(err, &lost) {
		a := answer{lost: lost.Index}
		key := batch[lost.Index].key
		if lost.Found != nil {
			a.cells[key] = cell{lost.Found.Version, string(lost.Found.Value)}
		}
		c.seen[key] = a.cells[key].version
		return a, nil
	}
	for _, w := range batch {
		switch {
		case w.check:
		case w.remove:
			c.seen[w.key] = wantAbsent
		default:
			c.seen[w.key] = v
		}
	}
	return answer{version: v, lost: -1}, err
}

func exerciseConcurrency(t *testing.T, open Opener) {
	t.Run("OneInsertWins", func(t *testing.T) { // P1 rests on this
		b := newBench(t, open)
		const claimants, keys = 16, 20
		for k := range keys {
			key := fmt.Sprintf("key-%d", k)
			var all sync.WaitGroup
			var mu sync.Mutex
			var won []store.Version
			var lost []*store.Conflict
			for c := range claimants {
				all.Go(func() {
					v, err := b.Commit(t.Context(), insert(key, strconv.Itoa(c)))
					mu.Lock()
					defer mu.Unlock()
					var conflict *store.Conflict
					switch {
					case err == nil:
						won = append(won, v)
					case errors.As(err, &conflict):
						lost = append(lost, conflict)
					default:
						t.Errorf("commit: %v", err)
					}
				})
			}
			all.Wait()
			if len(won) != 1 || len(lost) != claimants-1 {
				t.Fatalf("%d won and %d lost, want 1 and %d", len(won), len(lost), claimants-1)
			}
			for _, c := range lost {
				if c.Found == nil || c.Found.Version != won[0] {
					t.Fatalf("a loser was shown %+v, want the winner's version %d", c.Found, won[0])
				}
			}
		}
	})

	t.Run("NoUpdateIsLost", func(t *testing.T) {
		b := newBench(t, open)
		const writers, increments = 8, 25
		first := b.put("n", "0")
		var all sync.WaitGroup
		for range writers {
			all.Go(func() {
				value, version := "0", first
				for done := 0; done < increments; {
					n, _ := strconv.Atoi(value)
					next := strconv.Itoa(n + 1)
					v, err := b.Commit(t.Context(), replace("n", next, version))
					var lost *store.Conflict
					switch {
					case err == nil:
						value, version = next, v
						done++
					case errors.As(err, &lost):
						value, version = string(lost.Found.Value), lost.Found.Version
					default:
						t.Errorf("commit: %v", err)
						return
					}
				}
			})
		}
		all.Wait()
		b.is("n", strconv.Itoa(writers*increments))
	})

	t.Run("BatchesAreSeenWhole", func(t *testing.T) {
		b := newBench(t, open)
		b.commit(put("a", "0"), put("b", "0"))
		done := make(chan error, 1)
		go func() {
			for i := range 200 {
				value := strconv.Itoa(i + 1)
				if _, err := b.Commit(t.Context(), put("a", value), put("b", value)); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
		for {
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
				return
			default:
			}
			entries := b.scan(store.Range{})
			if len(entries) != 2 || entries[0].Version != entries[1].Version {
				t.Fatalf("a scan saw half a batch: %+v", entries)
			}
		}
	})
}
