package caddymodule

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// brokenOpener is a store that cannot be opened.
type brokenOpener struct{ storeModule }

func (*brokenOpener) OpenStore(*zap.Logger) (store.Store, error) {
	return nil, errors.New("the disk is gone")
}

// opens is a store that can be, and whose memory a test holds.
type opens struct {
	storeModule
	memory *memory.Store
}

func (o *opens) OpenStore(*zap.Logger) (store.Store, error) { return lent{o.memory}, nil }

// lent is a store that its engine does not close.
type lent struct{ *memory.Store }

func (lent) Close() error { return nil }

// handlerOver is a handler over an app with a store of its own.
func handlerOver(t *testing.T, opener StoreOpener, failOpen bool) *Handler {
	t.Helper()
	app := validApp(t, t.TempDir(), "")
	t.Cleanup(func() { cleanUp(t, app) })
	app.spec.opener = opener
	h := defaulted(t, Handler{Settings: guard.Settings{FailOpen: failOpen}})
	h.app, h.logger, h.proxy = app, slog.New(slog.DiscardHandler), new(atomic.Pointer[proxy.Transport])
	if err := h.provisionActions(app.ctx); err != nil {
		t.Fatal(err)
	}
	return h
}

// serve makes a call and returns its status and its Execution-Status.
func serve(t *testing.T, h *Handler) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusTeapot)
		return nil
	})
	if err := h.ServeHTTP(w, request("POST", "/x", "Idempotency-Key", "k"), next); err != nil {
		t.Fatal(err)
	}
	return w.Code, w.Header().Get("Execution-Status")
}

// P4: a store that cannot be opened refuses the call, unless the route says fail_open.
func TestFailOpenWithoutAStore(t *testing.T) {
	if code, status := serve(t, handlerOver(t, new(brokenOpener), false)); code != 503 || status != "refused" {
		t.Errorf("fail closed: %d %s", code, status)
	}
	if code, status := serve(t, handlerOver(t, new(brokenOpener), true)); code != http.StatusTeapot || status != "unguarded" {
		t.Errorf("fail open: %d %s", code, status)
	}
}

// P1: where the store is there and only the keys are refused, an earlier call may stand
// in it.
func TestFailOpenNotWithoutKeys(t *testing.T) {
	dir := t.TempDir()
	running := started(t, dir, "")
	h := handlerOver(t, nil, true)
	h.app.spec = running.spec
	h.app.spec.keys.File = dir + "/other.key"
	if _, err := seal.Create(h.app.spec.keys.File); err != nil {
		t.Fatal(err)
	}
	if code, status := serve(t, h); code != 503 || status != "refused" {
		t.Errorf("beside a running configuration: %d %s", code, status)
	}
	cleanUp(t, running)
	if code, status := serve(t, h); code != 503 || status != "refused" {
		t.Errorf("with another store's keys: %d %s", code, status)
	}
	if err := os.Remove(h.app.spec.keys.File); err != nil {
		t.Fatal(err)
	}
	if code, status := serve(t, h); code != 503 || status != "refused" {
		t.Errorf("without a key file: %d %s", code, status)
	}
}

// An exit starts nothing new, also where the store is gone.
func TestFailOpenNotOnExit(t *testing.T) {
	o := &opens{memory: memory.New(memory.Options{})}
	h := handlerOver(t, o, true)
	e, err := h.app.engine()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.memory.Close(); err != nil {
		t.Fatal(err)
	}
	if code, status := serve(t, h); code != http.StatusTeapot || status != "unguarded" {
		t.Errorf("before the exit: %d %s", code, status)
	}
	e.exit()
	if code, status := serve(t, h); code != 503 || status != "refused" {
		t.Errorf("on exit: %d %s", code, status)
	}
}
