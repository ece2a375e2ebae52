package checkpoint_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

var ctx = context.Background()

const ttl = 24 * time.Hour

// rig is a vault over a store that outlives it and can be made to fail.
type rig struct {
	*checkpoint.Vault
	t    *testing.T
	st   *failing
	ring *seal.Ring
}

type failing struct {
	store.Store
	fail  atomic.Pointer[func(batch []store.Write) error]
	get   atomic.Pointer[func(key []byte) error]
	scans atomic.Int64
}

func (f *failing) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if get := f.get.Load(); get != nil {
		if err := (*get)(key); err != nil {
			return store.Entry{}, err
		}
	}
	return f.Store.Get(ctx, key)
}

func (f *failing) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if fail := f.fail.Load(); fail != nil {
		if err := (*fail)(batch); err != nil {
			return 0, err
		}
	}
	return f.Store.Commit(ctx, batch...)
}

func (f *failing) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	f.scans.Add(1)
	return f.Store.Scan(ctx, r)
}

var errDisk = errors.New("no space left on device")

func newRig(t *testing.T) *rig { return rigOver(t, memory.New(memory.Options{})) }

func rigOver(t *testing.T, st store.Store) *rig {
	r := &rig{t: t, st: &failing{Store: st}, ring: seal.Generate()}
	r.restart()
	return r
}

// restart begins another life on the same store.
func (r *rig) restart() { r.Vault = checkpoint.New(r.st, r.ring) }

// onStores runs a test on every store.
func onStores(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Run("memory", func(t *testing.T) { test(t, newRig(t)) })
	t.Run("badger", func(t *testing.T) {
		st, err := badger.Open(t.TempDir(), badger.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		})
		test(t, rigOver(t, st))
	})
}

func full(id string, body int) checkpoint.Snapshot {
	message := checkpoint.Message{
		Header:      map[string][]string{"X-One": {"1"}, "X-Two": {"", "2"}, "X-None": nil},
		ContentType: "application/json", Body: bytes.Repeat([]byte("b"), body),
	}
	return checkpoint.Snapshot{
		ID: id, Workflow: "w-1", Caller: guard.CallerHash{1}, Execution: guard.Key{2}, Action: "update", Upstream: "up:1",
		Way:     checkpoint.Restore,
		Request: checkpoint.Request{Method: "PUT", Host: "h", Path: "/a%20b", Query: "q=1", Message: message},
		Image:   &checkpoint.Image{Exists: true, Status: 200, ETag: `"v1"`, Message: message},
	}
}

func result(body int) checkpoint.Result {
	image := full("x", body).Image
	return checkpoint.Result{Status: 201, Answer: image.Message, Image: image}
}

var secret = map[string][]string{"Authorization": {"Bearer sesame"}, "Cookie": {"a=1", "b=2"}}

func (r *rig) prepare(s checkpoint.Snapshot, t checkpoint.Terms) *checkpoint.Pending {
	r.t.Helper()
	if t.TTL == 0 {
		t.TTL = ttl
	}
	p, err := r.Prepare(ctx, s, secret, t)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (r *rig) commit(p *checkpoint.Pending) error {
	_, err := r.st.Commit(ctx, p.Writes()...)
	return p.Done(err)
}

func (r *rig) landed(p *checkpoint.Pending) *checkpoint.Pending {
	r.t.Helper()
	if err := r.commit(p); err != nil {
		r.t.Fatal(err)
	}
	return p
}

// kept records a checkpoint that counts in all its scopes.
func (r *rig) kept(s checkpoint.Snapshot) *checkpoint.Pending {
	r.t.Helper()
	many := checkpoint.Quota{Count: 1_000_000}
	return r.landed(r.prepare(s, checkpoint.Terms{Workflow: many, Caller: many}))
}

func (r *rig) record(h checkpoint.Handle, res checkpoint.Result) *checkpoint.Pending {
	r.t.Helper()
	p, err := r.Record(ctx, h, res, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.landed(p)
}

func (r *rig) open(id string, want checkpoint.Want) *checkpoint.Checkpoint {
	r.t.Helper()
	c, err := r.Open(ctx, id, want)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// refuses wants Open to fail with want.
func (r *rig) refuses(id string, w checkpoint.Want, want error) {
	r.t.Helper()
	if c, err := r.Open(ctx, id, w); !errors.Is(err, want) || c != nil {
		r.t.Errorf("opened %q: %v, want %v", id, err, want)
	}
}

// count counts the living entries under a prefix.
func (r *rig) count(prefix string) int {
	r.t.Helper()
	n := 0
	for _, err := range r.st.Store.Scan(ctx, store.Prefix([]byte(prefix))) {
		if err != nil {
			r.t.Fatal(err)
		}
		n++
	}
	return n
}

func number(prefix string, i int) string { return fmt.Sprint(prefix, "-", i) }
