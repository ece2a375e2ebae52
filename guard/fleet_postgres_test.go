//go:build unix

package guard_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// P1, P7: a call that runs at one gateway is followed while its answer comes, and recognised without a key, at another
// gateway on the same PostgreSQL; also behind a pooler that hands the server's sessions on after each transaction,
// through which no notification comes.
func TestFleetOnPostgreSQL(t *testing.T) {
	server := pgserver.Test(t)
	if server == nil {
		return
	}
	t.Run("directly", func(t *testing.T) { attachOnPostgreSQL(t, server.DSN(), "directly") })
	pooler, err := pgserver.NewPooler(server)
	if errors.Is(err, pgserver.ErrNoPooler) {
		t.Log(err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pooler.Remove() })
	t.Run("behind a pooler", func(t *testing.T) { attachOnPostgreSQL(t, pooler.DSN(), "pooled") })
}

func attachOnPostgreSQL(t *testing.T, dsn, schema string) {
	step := make(chan struct{})
	b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		for _, part := range []string{"a", "b", "c"} {
			select {
			case <-step:
			case <-r.Context().Done():
				panic(http.ErrAbortHandler)
			}
			_, _ = io.WriteString(w, part)
			_ = http.NewResponseController(w).Flush()
		}
	})
	b.config.MissingID = guard.MissingRecognize
	var urls []string
	for _, name := range []string{"one", "two"} {
		m, err := postgres.Join(t.Context(), postgres.Options{DSN: dsn, Schema: schema, Node: name})
		if err != nil {
			t.Fatal(err)
		}
		site := httptest.NewServer(b.node(m).guard)
		t.Cleanup(func() { site.Close(); _ = m.Close() })
		urls = append(urls, site.URL)
	}
	call := func(ctx context.Context, url, key string) *http.Response {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/charges", strings.NewReader("amount=10"))
		if err != nil {
			t.Fatal(err)
		}
		r.Host = "api.example"
		r.Header.Set("Authorization", "Bearer ann")
		if key != "" {
			r.Header.Set("Idempotency-Key", key)
		}
		w, err := http.DefaultClient.Do(r)
		if err != nil {
			return nil
		}
		return w
	}
	for _, key := range []string{"k", ""} {
		first, leave := context.WithCancel(t.Context())
		answers := make(chan *http.Response, 2)
		go func() { answers <- call(first, urls[0], key) }()
		step <- struct{}{}
		owner := <-answers
		byte1 := make([]byte, 1)
		if _, err := io.ReadFull(owner.Body, byte1); err != nil {
			t.Fatal(err)
		}
		if key == "" {
			leave()
		}
		other := call(t.Context(), urls[1], key)
		if _, err := io.ReadFull(other.Body, byte1); err != nil || string(byte1) != "a" {
			rest, _ := io.ReadAll(other.Body)
			close(step)
			t.Fatalf("key %q: %d %q%s, %v", key, other.StatusCode, byte1, rest, err)
		}
		step <- struct{}{}
		if _, err := io.ReadFull(other.Body, byte1); err != nil || string(byte1) != "b" {
			t.Fatalf("%q, %v", byte1, err)
		}
		step <- struct{}{}
		rest, err := io.ReadAll(other.Body)
		if err != nil || string(rest) != "c" || other.Header.Get("Execution-Status") != "attached" {
			t.Errorf("%q %q, %v", rest, other.Header.Get("Execution-Status"), err)
		}
		leave()
	}
	b.was(2)
}

// keyed is a gateway with a ring of its own on a database.
type keyed struct {
	postgres.Member
	ring *seal.Ring
	*execution.Guard
}

// ADR 0136 on PostgreSQL: a key seals once all gateways have it, also where they take it over, make others and join at
// the same time; and who re-seals is taken over from when it is gone.
func TestKeysOnPostgreSQL(t *testing.T) {
	server := pgserver.Test(t)
	if server == nil {
		return
	}
	first := seal.Generate()
	copied := func(ring *seal.Ring) *seal.Ring {
		text, err := ring.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		again, err := seal.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return again
	}
	join := func(name string, ring *seal.Ring) (*keyed, error) {
		m, err := postgres.Join(t.Context(), postgres.Options{DSN: server.DSN(), Node: name})
		if err != nil {
			t.Fatal(err)
		}
		k := &keyed{Member: m, ring: copied(ring)}
		if k.Guard, _, err = execution.Open(t.Context(), m, k.ring); err != nil {
			_ = m.Close()
			return nil, err
		}
		t.Cleanup(func() { _ = k.Guard.Close(context.Background()); _ = m.Close() })
		return k, nil
	}
	seals := func(k *keyed) uint32 {
		ids := k.ring.KeyIDs()
		return ids[len(ids)-1]
	}
	var all []*keyed
	for _, name := range []string{"one", "two", "three"} {
		k, err := join(name, first)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, k)
	}
	key := first
	for round := uint32(2); round < 6; round++ {
		begun := make([]error, len(all))
		var group sync.WaitGroup
		for i, k := range all {
			group.Go(func() { begun[i] = k.Keys().BeginRotation(context.Background()) })
		}
		group.Wait()
		won := slices.IndexFunc(begun, func(err error) bool { return err == nil })
		for i, err := range begun {
			if (err == nil) != (i == won) || err != nil && !errors.Is(err, execution.ErrKeyElsewhere) {
				t.Fatalf("at once: %v", begun)
			}
		}
		next, err := key.Rotated()
		if err != nil {
			t.Fatal(err)
		}
		if late, err := join("four", key); err != nil {
			t.Fatal(err)
		} else if err := errors.Join(late.Guard.Close(t.Context()), late.Member.Close()); err != nil { // it counts no more
			t.Error(err)
		}
		order := []*keyed{all[won], all[(won+1)%3], all[(won+2)%3]}
		for i, k := range order {
			if got := seals(k); got != round-1 {
				t.Errorf("with key %d at %d gateways one seals with %d", round, i, got)
			}
			if i == 0 {
				continue // the others come at once
			}
			group.Go(func() {
				other := copied(next)
				_, err := k.ring.Adopt(other, nil, func(uint32) error { return k.Keys().Hold(context.Background(), other.KeyIDs()...) })
				if err == nil {
					_, err = k.Keys().Settle(context.Background())
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		if _, err := order[0].ring.Adopt(copied(next), nil, func(uint32) error {
			return order[0].Keys().Hold(t.Context(), next.KeyIDs()...)
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := order[0].Keys().Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, k := range all {
			if err := k.Keys().Await(t.Context(), round); err != nil {
				t.Fatal(err)
			}
		}
		for _, k := range all {
			if got := seals(k); got != round {
				t.Errorf("a gateway seals with %d of %d", got, round)
			}
		}
		if _, err := join("four", key); !errors.Is(err, execution.ErrMissingKey) {
			t.Errorf("without key %d: %v", round, err)
		}
		key = next
	}
	for i, want := range []int{0, 0, 1} { // the first re-seals, and the next one when that is gone
		k := all[[]int{0, 1, 1}[i]]
		if i == 2 {
			if err := all[0].Member.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if mine, err := k.Keys().Reseals(t.Context()); err != nil || mine != (k == all[want]) {
			t.Errorf("%d: %t, %v", i, mine, err)
		}
	}
}
