package storetest

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

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
