package storetest

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func exerciseClose(t *testing.T, open Opener) {
	t.Run("LaterCalls", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		if err := b.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
		_, get := b.Get(t.Context(), []byte("a"))
		_, commit := b.Commit(t.Context(), put("a", "2"))
		_, now := b.Store.Now(t.Context())
		_, scan := collect(t.Context(), b.Store, store.Range{})
		for call, err := range map[string]error{
			"get": get, "commit": commit, "now": now, "scan": scan, "close": b.Close(),
		} {
			if !errors.Is(err, store.ErrClosed) {
				t.Errorf("%s after close: %v, want ErrClosed", call, err)
			}
		}
	})

	t.Run("CommitsUnderWayLandOrAreRefused", func(t *testing.T) {
		b := newBench(t, open)
		const writers = 8
		started := make(chan struct{}, writers)
		var all sync.WaitGroup
		for w := range writers {
			all.Go(func() {
				for i := 0; ; i++ {
					_, err := b.Commit(t.Context(), put(fmt.Sprintf("%d-%d", w, i), "1"))
					if i == 0 {
						started <- struct{}{}
					}
					if errors.Is(err, store.ErrClosed) {
						return
					}
					if err != nil {
						t.Errorf("commit beside close: %v, want it to land or ErrClosed", err)
						return
					}
				}
			})
		}
		for range writers {
			<-started
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		all.Wait()
	})

	t.Run("ReadsUnderWay", func(t *testing.T) {
		b := newBench(t, open)
		for i := range 20 {
			var batch []store.Write
			for j := range 100 {
				batch = append(batch, put(fmt.Sprintf("%03d-%03d", i, j), "1"))
			}
			b.commit(batch...)
		}
		const readers = 4
		started := make(chan struct{}, readers)
		var all sync.WaitGroup
		for range readers {
			all.Go(func() {
				for i := 0; ; i++ {
					_, scan := collect(t.Context(), b.Store, store.Range{})
					_, get := b.Get(t.Context(), []byte("000-000"))
					if i == 0 {
						started <- struct{}{}
					}
					for _, err := range []error{scan, get} {
						if err != nil && !errors.Is(err, store.ErrClosed) {
							t.Errorf("read beside close: %v", err)
						}
					}
					if get != nil {
						return
					}
				}
			})
		}
		for range readers {
			<-started
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		all.Wait()
	})
}
