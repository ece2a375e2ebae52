package caddymodule

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

// newApp is an app whose store is in dir, with further members, and the error of its
// Provision.
func newApp(t *testing.T, dir, members string) (*App, error) {
	t.Helper()
	if _, known := closing.LoadOrStore(dir, true); !known {
		t.Cleanup(func() { closed(t, dir) }) // once for all apps of the directory, after the last of them
	}
	ctx, err := caddy.ProvisionContext(&caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}})
	if err != nil {
		t.Fatal(err)
	}
	app := new(App)
	config := fmt.Sprintf(`{"store": {"module": "badger", "path": %q}%s}`, filepath.Join(dir, "store"), members)
	if err := json.Unmarshal([]byte(config), app); err != nil {
		t.Fatal(err)
	}
	return app, app.Provision(ctx)
}

// validApp is newApp with options that must be valid.
func validApp(t *testing.T, dir, members string) *App {
	t.Helper()
	app, err := newApp(t, dir, members)
	if err != nil {
		t.Fatal(err)
	}
	return app
}

func cleanUp(t *testing.T, app *App) {
	t.Helper()
	if err := app.Cleanup(); err != nil {
		t.Error(err)
	}
}

// closing are the directories whose stores are waited for.
var closing sync.Map

// closed waits until nobody has the store in dir open, so that it can be removed: what an
// app does in the background holds the store for as long as it takes.
func closed(t *testing.T, dir string) {
	t.Helper()
	closing.Delete(dir)
	path, err := resolve(filepath.Join(dir, "store"))
	if err != nil {
		return // it cannot have been opened
	}
	for end := time.Now().Add(patience); ; <-time.After(time.Millisecond) {
		engines.mu.Lock() // held over the closing too
		n, _ := engines.pool.References(path)
		engines.mu.Unlock()
		if n == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%d have the store in %s open", n, dir)
			return
		}
	}
}

// references counts who holds the store in dir open.
func references(t *testing.T, dir string) int {
	t.Helper()
	path, err := resolve(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	n, _ := engines.pool.References(path)
	return n
}

// An app that is given up half-built gives back what it has acquired, which may be
// nothing, and never another configuration's reference.
func TestCleanupOfHalfBuiltApps(t *testing.T) {
	dir := t.TempDir()
	running := validApp(t, dir, "")
	for range 2 { // a configuration holds one reference, however often it is started
		if err := running.Start(); err != nil {
			t.Fatal(err)
		}
	}
	refused, err := newApp(t, dir, `, "key": "a", "key_file": "b"`)
	if err == nil {
		t.Fatal("two keys are accepted")
	}
	validated := validApp(t, dir, "")
	for name, app := range map[string]*App{"untouched": new(App), "refused": refused, "only validated": validated} {
		for range 2 {
			if err := app.Cleanup(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if n := references(t, dir); n != 1 {
			t.Fatalf("after the cleanup of an app that was %s, the running one's store has %d references, want 1", name, n)
		}
	}
	for range 2 {
		cleanUp(t, running)
	}
	if n := references(t, dir); n != 0 {
		t.Errorf("%d references are left", n)
	}
}

// "Store": a non-empty store whose key file is missing refuses to start, and never
// gets a new one; put back, it opens.
func TestALostKeyFileIsNotMadeAnew(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "store.key")
	start := func() error {
		t.Helper()
		app := validApp(t, dir, "")
		err := app.Start()
		cleanUp(t, app)
		return err
	}
	if err := start(); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(key)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("the key file: %v, %v", info, err)
	}
	saved := filepath.Join(dir, "saved")
	if err := os.Rename(key, saved); err != nil {
		t.Fatal(err)
	}
	if err := start(); err == nil || !strings.Contains(err.Error(), key+" is missing") {
		t.Errorf("starting without the key: %v", err)
	}
	if _, err := os.Stat(key); err == nil {
		t.Error("a new key was made")
	}
	if err := os.Rename(saved, key); err != nil {
		t.Fatal(err)
	}
	if err := start(); err != nil {
		t.Errorf("starting with the key put back: %v", err)
	}
}

// The key can come from the environment instead of a file; no file is made then.
func TestKeyByValue(t *testing.T) {
	text, err := seal.Generate().MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("AGENT_GUARD_TEST_KEY", string(text))
	dir := t.TempDir()
	app := validApp(t, dir, `, "key": "{env.AGENT_GUARD_TEST_KEY}"`)
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	cleanUp(t, app)
	if _, err := os.Stat(filepath.Join(dir, "store.key")); err == nil {
		t.Error("a key file was made")
	}
}

// P8: a key that stands in the configuration itself, and is not one, is shown by no error.
func TestP8AKeyInTheConfigurationIsNotShown(t *testing.T) {
	text, err := seal.Generate().MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]string{"a ring": string(text), "one letter too many": "x" + strings.Repeat("s3cret", 7) + "A="} {
		value, err := json.Marshal(key)
		if err != nil {
			t.Fatal(err)
		}
		_, err = newApp(t, t.TempDir(), `, "key": `+string(value))
		if err == nil {
			t.Fatalf("%s: accepted", name)
		}
		if strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v", name, err)
		}
		wantNoSecret(t, string(text), err.Error())
	}
}

// What only opening the store shows names the place in the Caddyfile too.
func TestStartNamesThePlaceOfTheKeys(t *testing.T) {
	dir := t.TempDir()
	start := func() error {
		t.Helper()
		app := validApp(t, dir, `, "written_at": {"store": "Caddyfile:3", "keys": "Caddyfile:4"}`)
		err := app.Start()
		cleanUp(t, app)
		return err
	}
	if err := start(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "store.key")); err != nil {
		t.Fatal(err)
	}
	if err := start(); err == nil || !strings.Contains(err.Error(), "store.key is missing") || !strings.HasSuffix(err.Error(), ", at Caddyfile:4") {
		t.Error(err)
	}
}

// ADR 0066: a line that moves does not make another guard of one.
func TestPlacesAreNotCompared(t *testing.T) {
	guard := func(place string) *Handler {
		return &Handler{WrittenAt: place, UpstreamRaw: []json.RawMessage{json.RawMessage(`{"handler": "reverse_proxy",
			"transport": {"protocol": "agent_guard", "breaker": {"verify_probe": true, "written_at": "` + place + `"}}}`)}}
	}
	if a, b := guard("Caddyfile:3").writtenAs(), guard("Caddyfile:4").writtenAs(); a != b {
		t.Errorf("%s\n%s", a, b)
	}
}
