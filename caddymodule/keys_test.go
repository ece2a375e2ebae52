package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// patience bounds every wait. No test comes near it unless something is broken.
const patience = 30 * time.Second

// started is a running app whose store is in dir. Its end is the test's.
func started(t *testing.T, dir, members string) *App {
	t.Helper()
	app := validApp(t, dir, members)
	t.Cleanup(func() { cleanUp(t, app) })
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	return app
}

// refusedToStart is the error of an app that must not start beside the running one.
func refusedToStart(t *testing.T, dir, members string) string {
	t.Helper()
	app := validApp(t, dir, members)
	before := references(t, dir)
	err := app.Start()
	if cleanup := app.Cleanup(); cleanup != nil {
		t.Error(cleanup)
	}
	if err == nil {
		t.Fatal("it was started")
	}
	if n := references(t, dir); n != before {
		t.Errorf("%d references, want %d", n, before)
	}
	return err.Error()
}

// record makes an execution with this id, whose answer does not fit into its record.
func record(t *testing.T, app *App, id string) {
	t.Helper()
	g := app.held.calls.Executions
	c := recordedCall(g, id)
	e, err := g.Claim(t.Context(), c, execution.Finding{})
	if err != nil {
		t.Fatal(err)
	}
	e.Recording().Start(201, nil)
	e.Write([]byte(strings.Repeat("charged ", 100)), false)
	if err := e.Settle(t.Context(), execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true}); err != nil {
		t.Fatal(err)
	}
}

func recordedCall(g *execution.Guard, id string) *execution.Call {
	scope := execution.Scope{Caller: "ada", Guard: "default", Method: "POST", Path: "/v1/charges", ID: id}
	return &execution.Call{Key: g.Key(scope), Scope: scope, Deadline: time.Minute, KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 1 << 20}
}

// replays holds that the execution is found, and its answer whole.
func replays(t *testing.T, app *App, ids ...string) {
	t.Helper()
	g := app.held.calls.Executions
	for _, id := range ids {
		c := recordedCall(g, id)
		found, err := g.LookUp(t.Context(), c.Key, c.Fingerprint)
		if err != nil || found.Status != execution.Replayable {
			t.Fatalf("P1: %s: standing %d, %v", id, found.Status, err)
		}
		if result, err := g.Result(t.Context(), c.Key, found); err != nil || result.Head.Size != 800 {
			t.Errorf("P1: the answer of %s: %v", id, err)
		}
	}
}

// resealed waits until all is sealed under the key.
func resealed(t *testing.T, e *engine, key uint32) *gateway.KeyStatus {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		status, err := e.keys.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if r := status.Resealing; r != nil && r.Done && r.Key == key {
			return status
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not sealed anew: %+v", status.Resealing)
		}
	}
}

func rotateKeys(t *testing.T, e *engine) uint32 {
	t.Helper()
	id, err := e.keys.Rotate(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// P1, section "Store": rotation by command. What is recorded is found at once, after
// re-sealing, after a reload and after a restart; the status tells what is left.
func TestP1RotateKeysInAFile(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "store.key")
	app := validApp(t, dir, "")
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	record(t, app, "before")
	e := app.held
	if status, err := e.keys.Status(t.Context()); err != nil || status.Source != "file" || len(status.Keys) != 1 || status.Resealing != nil {
		t.Errorf("status %+v, %v", status, err)
	}
	if id := rotateKeys(t, e); id != 2 {
		t.Errorf("rotated to %d", id)
	}
	record(t, app, "after")
	replays(t, app, "before", "after")
	status := resealed(t, e, 2)
	replays(t, app, "before", "after")
	if len(status.Keys) != 2 || !status.Keys[0].InUse || status.Keys[0].Newest || status.Keys[0].Until.Before(time.Now()) ||
		!status.Keys[1].InUse || !status.Keys[1].Newest || !status.Keys[1].Until.IsZero() {
		t.Errorf("keys %+v", status.Keys)
	}
	if r := status.Resealing; r.Resealed == 0 || r.Damaged != 0 || r.Error != "" || r.Finished.IsZero() ||
		len(r.Left) != 1 || r.Left[0].ID != 1 || r.Left[0].Records != 0 || r.Left[0].Results != 1 {
		t.Errorf("resealing %+v", r)
	}
	text, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("P8: the key file: %v, %v", info, err)
	}
	shown, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}
	wantNoSecret(t, string(text), string(shown))

	reloaded := started(t, dir, "")
	cleanUp(t, app)
	replays(t, reloaded, "before", "after")
	cleanUp(t, reloaded)
	again := started(t, dir, "")
	replays(t, again, "before", "after")
	if status, err := again.held.keys.Status(t.Context()); err != nil || status.Resealing != nil {
		t.Errorf("a finished pass was begun anew: %+v, %v", status, err)
	}
}

// wantNoSecret holds that none of the strings of a key file stands in shown (P8).
func wantNoSecret(t *testing.T, ring, shown string) {
	t.Helper()
	n := 0
	for _, part := range strings.Split(ring, `"`) {
		if len(part) == 44 && strings.HasSuffix(part, "=") {
			n++
			if strings.Contains(shown, part) {
				t.Errorf("P8: a key is shown: %s", shown)
			}
		}
	}
	if n < 2 {
		t.Fatalf("only %d keys were looked for", n)
	}
}

// rotateFile rotates a key file beside the gateways that use it.
func rotateFile(path string) (uint32, error) {
	ring, err := seal.Load(path)
	if err != nil {
		return 0, err
	}
	return ring.Rotate(path, func(uint32) error { return nil })
}

// A crash after the file was written, before its key was used or all was sealed anew:
// the next start opens everything, and does the rest.
func TestRotationSurvivesACrash(t *testing.T) {
	dir := t.TempDir()
	app := started(t, dir, "")
	record(t, app, "before")
	cleanUp(t, app)
	if _, err := rotateFile(filepath.Join(dir, "store.key")); err != nil {
		t.Fatal(err)
	}
	app = started(t, dir, "")
	replays(t, app, "before")
	resealed(t, app.held, 2)
	replays(t, app, "before")
}

// A reload reads the key file again: what was added beside the gateway is used, and
// its key is not lost to the next rotation.
func TestReloadReadsTheKeyFileAgain(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "store.key")
	app := started(t, dir, "")
	record(t, app, "before")
	for range 2 {
		if _, err := rotateFile(key); err != nil {
			t.Fatal(err)
		}
	}
	reloaded := started(t, dir, "")
	if reloaded.held != app.held {
		t.Fatal("the store was opened anew")
	}
	resealed(t, app.held, 3)
	replays(t, app, "before")
	if id := rotateKeys(t, app.held); id != 4 {
		t.Errorf("rotated to %d", id)
	}
	if _, err := os.Stat(key); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(key, key+".away"); err != nil {
		t.Fatal(err)
	}
	if said := refusedToStart(t, dir, ""); !strings.Contains(said, key+" is missing") {
		t.Errorf("without the file: %s", said)
	}
	if _, err := app.held.keys.Rotate(t.Context()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("rotating without the file: %v", err)
	}
}

// The ring as a value: it cannot be rotated by command; a reload with more keys
// takes them over, one with fewer is refused while they are needed.
func TestReloadWithAnotherValue(t *testing.T) {
	dir := t.TempDir()
	rings := make([]string, 2)
	ring := seal.Generate()
	for i := range rings {
		text, err := ring.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		rings[i] = string(text)
		if ring, err = ring.Rotated(); err != nil {
			t.Fatal(err)
		}
	}
	secret := filepath.Join(dir, "secret")
	place := func(text string) string {
		t.Helper()
		if err := os.WriteFile(secret, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`, "key": "{file.%s}"`, secret)
	}
	first := started(t, dir, place(rings[0]))
	record(t, first, "before")
	if _, err := first.held.keys.Rotate(t.Context()); !errors.Is(err, gateway.ErrKeyGiven) {
		t.Errorf("rotating a value: %v", err)
	}
	made, text, err := storeView{first.held}.RotateKeys(t.Context())
	if err != nil || made != 0 || len(first.held.keys.Ring.KeyIDs()) != 1 {
		t.Errorf("made %d, %v", made, err)
	}
	if printed, err := seal.Parse([]byte(text)); err != nil || fmt.Sprint(printed.KeyIDs()) != "[1 2]" || printed.Check(1) != first.held.keys.Ring.Check(1) {
		t.Errorf("the ring that is printed: %v", err)
	}
	second := started(t, dir, place(rings[1]))
	if second.held != first.held {
		t.Fatal("the store was opened anew")
	}
	status := resealed(t, first.held, 2)
	if status.Source != "value" || status.File != "" {
		t.Errorf("status %+v", status)
	}
	record(t, second, "after")
	replays(t, first, "before", "after")

	// A call of the old configuration is not asked for its keys again.
	e, err := first.acquire()
	if err != nil {
		t.Fatalf("a call that outlives its configuration: %v", err)
	}
	if err := e.release(); err != nil {
		t.Error(err)
	}
	said := refusedToStart(t, dir, place(rings[0]))
	if !strings.Contains(said, "lacks sealing key 2,") || !strings.Contains(said, "the value") {
		t.Errorf("the newest key was taken away: %s", said)
	}
	said = refusedToStart(t, dir, place(strings.Replace(rings[1], row(t, rings[1], 1)+",", "", 1)))
	if !strings.Contains(said, "lacks sealing key 1,") {
		t.Errorf("a key that answers stand under was taken away: %s", said)
	}
}

// Once nothing in the store needs a key, it may go, by a reload or by a restart.
func TestAKeyThatIsNotNeededMayGo(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "store.key")
	app := started(t, dir, "")
	rotateKeys(t, app.held)
	resealed(t, app.held, 2)
	text, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, []byte(strings.Replace(string(text), row(t, string(text), 1)+",", "", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	reloaded := started(t, dir, "")
	if got := reloaded.held.keys.Ring.KeyIDs(); len(got) != 1 || got[0] != 2 {
		t.Errorf("keys %v", got)
	}
	if id := rotateKeys(t, app.held); id != 3 {
		t.Errorf("rotated to %d", id)
	}
	for _, a := range []*App{app, reloaded} {
		cleanUp(t, a)
	}
	again := started(t, dir, "")
	if got := again.held.keys.Ring.KeyIDs(); len(got) != 2 || got[0] != 2 || got[1] != 3 {
		t.Errorf("keys %v: a key that was taken away is back", got)
	}
}

// row is the JSON object of a sealing key.
func row(t *testing.T, ring string, id int) string {
	t.Helper()
	at := strings.Index(ring, fmt.Sprintf(`"id": %d,`, id))
	if at < 0 {
		t.Fatalf("no key %d", id)
	}
	from := strings.LastIndexByte(ring[:at], '{')
	return ring[from : at+strings.IndexByte(ring[at:], '}')+1]
}

// The same ring may move from a file to a value and to another file, and rotations
// write where the latest configuration says. One that failed to load does not count.
func TestTheRingMayMove(t *testing.T) {
	dir := t.TempDir()
	key, other := filepath.Join(dir, "store.key"), filepath.Join(dir, "other.key")
	app := started(t, dir, "")
	record(t, app, "one")
	text, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AGENT_GUARD_TEST_KEY", string(text))
	moved := validApp(t, dir, `, "key": "{env.AGENT_GUARD_TEST_KEY}"`)
	if err := moved.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := app.held.keys.Rotate(t.Context()); !errors.Is(err, gateway.ErrKeyGiven) {
		t.Errorf("rotating a value: %v", err)
	}
	cleanUp(t, moved) // another app of that configuration failed
	if id := rotateKeys(t, app.held); id != 2 {
		t.Errorf("rotated to %d", id)
	}
	if now, err := os.ReadFile(other); err != nil || string(now) != string(text) {
		t.Errorf("the other file was written: %v", err)
	}
	said := refusedToStart(t, dir, fmt.Sprintf(`, "key_file": %q`, other))
	if !strings.Contains(said, "lacks sealing key 2,") || !strings.Contains(said, other) {
		t.Errorf("a copy from before: %s", said)
	}
	if text, err = os.ReadFile(key); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, text, 0o600); err != nil {
		t.Fatal(err)
	}
	there := started(t, dir, fmt.Sprintf(`, "key_file": %q`, other))
	if id := rotateKeys(t, there.held); id != 3 {
		t.Errorf("rotated to %d", id)
	}
	if now, err := os.ReadFile(key); err != nil || string(now) != string(text) {
		t.Errorf("the file of before was written: %v", err)
	}
	replays(t, there, "one")
}

// A reload to another store's ring would make all that is recorded unreachable: it is
// refused, and the running configuration goes on.
func TestTheIndexKeyDoesNotChange(t *testing.T) {
	dir := t.TempDir()
	started(t, dir, "")
	other := filepath.Join(dir, "other.key")
	if _, err := seal.Create(other); err != nil {
		t.Fatal(err)
	}
	if said := refusedToStart(t, dir, fmt.Sprintf(`, "key_file": %q`, other)); !strings.Contains(said, "keeps the index key") || !strings.Contains(said, other) {
		t.Errorf("another ring: %s", said)
	}
	nowhere := filepath.Join(dir, "nowhere.key")
	if said := refusedToStart(t, dir, fmt.Sprintf(`, "key_file": %q`, nowhere)); !strings.Contains(said, nowhere+" is missing") {
		t.Errorf("no ring: %s", said)
	}
	if _, err := os.Stat(nowhere); err == nil {
		t.Error("a new ring was made beside an open store")
	}
}

// joins opens a memory store as one of several gateways.
type joins struct {
	storeModule
	memory *memory.Store
	node   string
}

func (j *joins) OpenStore(*zap.Logger) (store.Store, error) { return j.memory.Join(j.node), nil }

// member is an app of a gateway that shares a store. Its own files are in dir.
func member(t *testing.T, st *memory.Store, node, dir string) *App {
	t.Helper()
	app := validApp(t, dir, "")
	app.spec.opener = &joins{memory: st, node: node}
	t.Cleanup(func() { cleanUp(t, app) })
	return app
}

// ADR 0136: over two gateways a key seals once both have it; it says who lacks it; one of them seals the rest anew; and
// who comes back without it is refused.
func TestRotationOverTwoGateways(t *testing.T) {
	st := memory.New(memory.Options{})
	at := map[string]string{"a": t.TempDir(), "b": t.TempDir()}
	file := func(node string) string { return filepath.Join(at[node], "store.key") }
	if _, err := seal.Create(file("a")); err != nil {
		t.Fatal(err)
	}
	hand := func() []byte { // the file from a to b
		t.Helper()
		before, _ := os.ReadFile(file("b"))
		text, err := os.ReadFile(file("a"))
		if err == nil {
			err = os.WriteFile(file("b"), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return before
	}
	hand()
	a, b := member(t, st, "a", at["a"]), member(t, st, "b", at["b"])
	for _, app := range []*App{a, b} {
		if err := app.Start(); err != nil {
			t.Fatal(err)
		}
	}
	record(t, a, "of a")
	if id := rotateKeys(t, a.held); id != 2 {
		t.Fatalf("rotated to %d", id)
	}
	record(t, a, "of a, later")
	record(t, b, "of b")
	replays(t, b, "of a", "of a, later", "of b")
	status, err := a.held.keys.Status(t.Context())
	if err != nil || !status.Keys[0].Newest || status.Keys[1].Newest || fmt.Sprint(status.Keys[1].Lacking) != "[b]" {
		t.Errorf("%+v, %v", status, err)
	}
	if made, _, err := (storeView{a.held}).RotateKeys(t.Context()); made != 0 || err != nil {
		t.Errorf("another one was made: %d, %v", made, err)
	}
	var refused caddy.APIError
	if _, _, err := (storeView{b.held}).RotateKeys(t.Context()); !errors.As(err, &refused) || refused.HTTPStatus != http.StatusConflict {
		t.Errorf("at b, which lacks the newest: %v", err)
	}
	older := hand()
	reloaded := member(t, st, "b", at["b"])
	if err := reloaded.Start(); err != nil || reloaded.held != b.held {
		t.Fatalf("reload: %v", err)
	}
	resealed(t, a.held, 2) // which has joined first
	for node, app := range map[string]*App{"a": a, "b": reloaded} {
		status, err := app.held.keys.Status(t.Context())
		if err != nil || status.Keys[0].InUse && status.Keys[0].Until.IsZero() || !status.Keys[1].Newest || len(status.Keys[1].Lacking) != 0 {
			t.Errorf("%s: %+v, %v", node, status.Keys, err)
		}
		if status.Resealing != nil && node == "b" {
			t.Errorf("it was sealed anew by both: %+v", status.Resealing)
		}
		replays(t, app, "of a", "of a, later", "of b")
	}
	cleanUp(t, b)
	cleanUp(t, reloaded)
	if err := os.WriteFile(file("b"), older, 0o600); err != nil {
		t.Fatal(err)
	}
	back := member(t, st, "b", at["b"])
	if err := back.Start(); err == nil || !strings.Contains(err.Error(), "sealing key 2") {
		t.Errorf("with the older ring: %v", err)
	}
}

// Rotations and reloads at once, beside calls: every key ends up in the file.
func TestRotationsBesideReloads(t *testing.T) {
	dir := t.TempDir()
	app := started(t, dir, "")
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 5 {
			if _, err := app.held.keys.Rotate(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Go(func() {
		for range 5 {
			reload, err := newApp(t, dir, "")
			if err == nil {
				err = reload.Start()
			}
			if err != nil {
				t.Error(err)
			}
			cleanUp(t, reload)
		}
	})
	var ids []string
	for i := range 20 {
		ids = append(ids, fmt.Sprint(i))
		record(t, app, ids[i])
	}
	wg.Wait()
	resealed(t, app.held, 6)
	replays(t, app, ids...)
	cleanUp(t, app)
	again := started(t, dir, "")
	replays(t, again, ids...)
}

// The log tells of each step, and of no key (P8).
func TestRotationIsLogged(t *testing.T) {
	dir := t.TempDir()
	app := validApp(t, dir, "")
	core, logs := observer.New(zapcore.DebugLevel)
	app.spec.logger = zap.New(core)
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	record(t, app, "one")
	rotateKeys(t, app.held)
	resealed(t, app.held, 2)
	cleanUp(t, app) // which waits for the job
	for _, want := range []string{"sealing key rotated", "re-sealing started", "re-sealing finished"} {
		if n := logs.FilterMessage(want).FilterField(zap.Uint64("key", 2)).Len(); n != 1 {
			t.Errorf("%q is logged %d times", want, n)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "store.key"))
	if err != nil {
		t.Fatal(err)
	}
	wantNoSecret(t, string(text), fmt.Sprintf("%+v", logs.All()))
}

// usedMeanwhile is a store that another gateway has used, after it made the key file, by the time it is looked at.
type usedMeanwhile struct {
	store.Store
	use func(store.Store)
}

func (s usedMeanwhile) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	s.use(s.Store)
	return s.Store.Scan(ctx, r)
}

// P1: gateways of a new fleet that share a missing key file start at the same moment: all use the one that is made, also
// those that find the store used by then.
func TestKeyFileOfGatewaysThatStartTogether(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	source := gateway.KeySource{File: filepath.Join(t.TempDir(), "keys")}
	identity := Identity{KeyFile: filepath.Join(t.TempDir(), "identity")}
	const gateways = 16
	var checks, signers [gateways]string
	var all sync.WaitGroup
	for i := range gateways {
		all.Go(func() {
			keys, _, err := gateway.Open(t.Context(), memory.New(memory.Options{}), source, "store", log)
			if err != nil {
				t.Error(err)
				return
			}
			checks[i] = keys.Ring.Check(1)
			signing, err := identity.loadRing(true, log)
			if err != nil {
				t.Error(err)
				return
			}
			signers[i] = signing.List()[0].ID
		})
	}
	all.Wait()
	for i := range gateways {
		if checks[i] != checks[0] || signers[i] != signers[0] {
			t.Errorf("gateway %d has the keys %s and %s, another %s and %s", i, checks[i], signers[i], checks[0], signers[0])
		}
	}

	source.File = filepath.Join(t.TempDir(), "keys")
	var theirs *gateway.Keys
	used := usedMeanwhile{memory.New(memory.Options{}), func(st store.Store) {
		if theirs != nil {
			return
		}
		var err error
		if theirs, _, err = gateway.Open(t.Context(), st, source, "store", log); err == nil {
			_, err = st.Commit(t.Context(), store.Write{Key: []byte("used")})
		}
		if err != nil {
			t.Error(err)
		}
	}}
	keys, _, err := gateway.Open(t.Context(), used, source, "store", log)
	if err != nil || keys.Ring.Check(1) != theirs.Ring.Check(1) {
		t.Errorf("a store that was used meanwhile: %v", err)
	}
}
