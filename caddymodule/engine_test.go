package caddymodule

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A rotation that waits for the store, and a configuration that waits for the rotation,
// are in nobody else's way.
func TestKeysThatWaitHoldNobodyUp(t *testing.T) {
	dir := t.TempDir()
	running := started(t, dir, "")
	next := validApp(t, dir, "")
	source, rotating, waits := running.held.keys.Source, make(chan struct{}), make(chan struct{})
	running.held.keys.Source = func() gateway.KeySource {
		close(rotating)
		<-waits
		return source()
	}
	rotated := make(chan error, 1)
	go func() {
		_, err := running.held.keys.Rotate(context.Background())
		rotated <- err
	}()
	<-rotating
	before := references(t, dir)
	loaded := make(chan error, 1)
	go func() { loaded <- next.Start() }()
	for references(t, dir) == before {
		runtime.Gosched()
	}
	asked := make(chan error, 1)
	go func() {
		e, err := running.acquire()
		if err == nil {
			err = e.release()
		}
		asked <- err
	}()
	select {
	case err := <-asked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("a call of the running configuration waits")
	}
	close(waits)
	if err := errors.Join(<-rotated, <-loaded); err != nil {
		t.Error(err)
	}
	cleanUp(t, next)
}

// Between the opening of the store and that of the ledger in it, operators are told that it
// comes, and not that there is none.
func TestLedgerThatIsBeingOpened(t *testing.T) {
	dir := t.TempDir()
	app := validApp(t, dir, withIdentity(filepath.Join(dir, "identity"), ""))
	t.Cleanup(func() { cleanUp(t, app) })
	head := func() (int, http.Header) {
		t.Helper()
		w := httptest.NewRecorder()
		err := adminAPI{}.Routes()[0].Handler.ServeHTTP(w, httptest.NewRequest("GET", "/agent_guard/ledger/head", nil))
		if api := (caddy.APIError{}); errors.As(err, &api) {
			return api.HTTPStatus, w.Header()
		}
		if err != nil {
			t.Fatal(err)
		}
		return w.Code, w.Header()
	}
	e, err := app.acquire() // as the first request does
	if err != nil {
		t.Fatal(err)
	}
	if status, header := head(); status != http.StatusServiceUnavailable || header.Get("Retry-After") == "" {
		t.Errorf("while it is opened: %d %v", status, header)
	}
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	if status, _ := head(); status != http.StatusOK {
		t.Errorf("once it is open: %d", status)
	}
	if err := e.release(); err != nil {
		t.Error(err)
	}
}

// unfound notes the keys that are asked for and not there.
type unfound struct {
	store.Store

	mu   sync.Mutex
	keys [][]byte
}

func (u *unfound) Get(ctx context.Context, key []byte) (store.Entry, error) {
	e, err := u.Store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.keys = append(u.keys, bytes.Clone(key))
	}
	return e, err
}

// asked returns the keys since the last time.
func (u *unfound) asked() [][]byte {
	u.mu.Lock()
	defer u.mu.Unlock()
	keys := u.keys
	u.keys = nil
	return keys
}

// What a new call asks for before its claim is in the filter of absent keys, so that no table is
// asked (ADR 0065).
func TestWhatANewCallAsksForIsFiltered(t *testing.T) {
	st := &unfound{Store: memory.New(memory.Options{})}
	g, _, err := execution.Open(t.Context(), st, seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	st.asked()
	c := execution.Call{Deadline: time.Minute, KeepKey: time.Hour}
	c.Key = g.Key(c.Scope)
	found, err := g.LookUp(t.Context(), c.Key, c.Fingerprint)
	if err == nil {
		_, err = g.Claim(t.Context(), &c, found)
	}
	keys := st.asked()
	if err != nil || len(keys) < 2 {
		t.Fatal(len(keys), err)
	}
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	ev, err := evidence.Open(t.Context(), evidence.Options{Store: st, Sealer: seal.Generate(), Node: "n", Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	defer ev.Close(context.Background())
	st.asked() // by a ledger that opens
	if _, err := ev.Link(t.Context(), &evidence.Call{Workflow: "w"}, "id", uuid.NewString(), time.Time{}); err != nil {
		t.Fatal(err)
	}
	linked := st.asked()
	if len(linked) == 0 {
		t.Error("no execution of this id was looked for")
	}
	for _, key := range append(keys, linked...) {
		if !slices.ContainsFunc(oftenAbsent, func(p string) bool { return bytes.HasPrefix(key, []byte(p)) }) {
			t.Errorf("%q is not filtered", key[:1])
		}
	}
}
