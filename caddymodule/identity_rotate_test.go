package caddymodule

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

const gatewayName = "spiffe://example.com/gateway"

// withIdentity are the members of an app whose signing key is in the file.
func withIdentity(file, more string) string {
	return fmt.Sprintf(`, "identity": {"name": %q, "key_file": %q%s}`, gatewayName, file, more)
}

// signing is the name of the key that the app's tokens are signed with.
func signing(t *testing.T, app *App) string {
	t.Helper()
	keys := app.held.ledger.open.Load().Ring().List()
	return keys[len(keys)-1].ID
}

// inFile is the name of the key in the file that signs after a restart.
func inFile(t *testing.T, file string) string {
	t.Helper()
	ring, err := ect.LoadRing(file)
	if err != nil {
		t.Fatal(err)
	}
	keys := ring.List()
	return keys[len(keys)-1].ID
}

func rotateIdentity(t *testing.T, app *App, stolen bool) string {
	t.Helper()
	if err := app.held.ledger.rotate(stolen); err != nil {
		t.Fatal(err)
	}
	return signing(t, app)
}

// signed is a token that the app's identity issues now.
func signed(t *testing.T, app *App) *ect.Token {
	t.Helper()
	issuer, err := ect.NewIssuer(gatewayName, app.held.ledger.open.Load().Ring())
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Issue(time.Now(), ect.Claims{Audience: []string{gatewayName}, Action: "charge", Life: ect.MaxLife})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// verifierOf verifies with keys as others do.
func verifierOf(t *testing.T, keys ect.Source) *ect.Verifier {
	t.Helper()
	v, err := ect.NewVerifier(ect.Policy{Audience: []string{gatewayName}, Sources: []ect.Source{keys}, Algorithms: ect.Algorithms()})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// publishedAt is what others get at that time.
func publishedAt(t *testing.T, app *App, at time.Time) *ect.Set {
	t.Helper()
	text, err := app.held.ledger.open.Load().Ring().PublicSet(at, gatewayName)
	if err != nil {
		t.Fatal(err)
	}
	set, err := ect.ParseSet(text, ect.Owner{})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// Issue 4, "rotation keeps old public keys until their tokens have expired": a token of
// the longest life verifies with what is published until it expires everywhere, and its
// record for ever, also after a restart.
func TestRotatedIdentityKeepsItsPromises(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "identity")
	app := validApp(t, dir, withIdentity(file, ""))
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	before := signing(t, app)
	old := signed(t, app)
	after := rotateIdentity(t, app, false)
	if after == before || inFile(t, file) != after || signed(t, app).Key().ID() != after {
		t.Errorf("%s signs after %s", after, before)
	}
	last := old.Expires().Add(ect.Skew)
	if _, err := verifierOf(t, publishedAt(t, app, last)).VerifyStored(t.Context(), old.Raw()); err != nil {
		t.Errorf("the key is published for too short: %v", err)
	}
	if n := publishedAt(t, app, last.Add(2*time.Minute)).Len(); n != 1 {
		t.Errorf("%d keys are published once all tokens have expired", n)
	}
	cleanUp(t, app)

	again := started(t, dir, withIdentity(file, ""))
	if signing(t, again) != after {
		t.Error("the restarted gateway signs with another key")
	}
	owner, err := ect.ParseOwner(gatewayName)
	if err != nil {
		t.Fatal(err)
	}
	rotateIdentity(t, again, true)
	own := verifierOf(t, again.held.ledger.open.Load().Ring().Source(owner))
	if _, err := own.VerifyStored(t.Context(), old.Raw()); err != nil {
		t.Errorf("a record under a replaced key: %v", err)
	}
}

// A stolen key is published no longer, however often the key was rotated since.
func TestStolenIdentityIsNotPublished(t *testing.T) {
	dir := t.TempDir()
	app := started(t, dir, withIdentity(filepath.Join(dir, "identity"), ""))
	rotateIdentity(t, app, false)
	now := time.Now()
	if n := publishedAt(t, app, now).Len(); n != 2 {
		t.Fatalf("%d keys are published", n)
	}
	rotateIdentity(t, app, true)
	if n := publishedAt(t, app, time.Now().Add(2*time.Second)).Len(); n != 1 {
		t.Errorf("%d keys are published", n)
	}
}

// The key file is that of the latest configuration; one that has failed to load is not that. A new key has the
// algorithm of the one before it.
func TestIdentityRotatesInTheLatestConfiguration(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	first := started(t, dir, withIdentity(one, `, "retain": 3600000000000`))
	if _, err := ect.CreateRing(two, ect.EdDSA); err != nil {
		t.Fatal(err)
	}
	failed := validApp(t, dir, withIdentity(two, `, "retain": 7200000000000`))
	if err := failed.Start(); err != nil {
		t.Fatal(err)
	}
	if signing(t, failed) != inFile(t, two) {
		t.Error("the next configuration does not bring its keys")
	}
	cleanUp(t, failed) // as Caddy does where another app fails
	if signing(t, first) != inFile(t, one) {
		t.Error("a configuration that has failed to load has left its keys")
	}
	if got := first.held.ledger.open.Load().KeysToSign(); !slices.Equal(got, []string{inFile(t, one)}) {
		t.Errorf("something is to be signed under %q", got)
	}
	if got := time.Duration(first.held.ledger.retain.Load()); got != time.Hour {
		t.Errorf("entries are kept for %v", got)
	}
	untouched := inFile(t, two)
	if id := rotateIdentity(t, first, false); inFile(t, one) != id || inFile(t, two) != untouched {
		t.Error("the rotation is in the wrong file")
	}

	next := started(t, dir, withIdentity(two, ""))
	cleanUp(t, first) // it was replaced
	id := rotateIdentity(t, next, false)
	status := next.held.ledger.status()
	if inFile(t, two) != id || status.File != two || status.Name != gatewayName || status.Algorithm != "EdDSA" || len(status.Keys) != 2 {
		t.Fatalf("%+v", status)
	}
	old, fresh := status.Keys[0], status.Keys[1]
	if old.Signs || old.Algorithm != "EdDSA" || old.ID != untouched || old.Until.Before(time.Now().Add(ect.MaxLife)) ||
		!fresh.Signs || fresh.Algorithm != "EdDSA" || fresh.ID != id || !fresh.Until.IsZero() || fresh.Created.IsZero() {
		t.Errorf("%+v", status.Keys)
	}

	without := started(t, dir, "")
	cleanUp(t, next)
	if err := without.held.ledger.rotate(false); !errors.Is(err, errNoIdentity) || without.held.ledger.status() != nil {
		t.Errorf("without an identity: %v", err)
	}
}

// A file that is gone, or is not the one that was loaded, is not rotated: the key that
// signs would be lost with it.
func TestIdentityIsNotRotatedInAnotherFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "identity")
	app := started(t, dir, withIdentity(file, ""))
	id := signing(t, app)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(words string) {
		t.Helper()
		err := storeView{app.held}.RotateIdentity(true)
		if err == nil || !strings.Contains(err.Error(), words) || signing(t, app) != id {
			t.Errorf("%v, want ...%s", err, words)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	refused(file + " is missing: put it back")
	if _, err := ect.CreateRing(file, ect.ES256); err != nil {
		t.Fatal(err)
	}
	refused(file + " is another one than was loaded")
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(file)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	rotateIdentity(t, app, false)
}

// Rotations and reloads at the same time leave the file and the open ring as one.
func TestIdentityRotatesBesideReloads(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "identity")
	app := started(t, dir, withIdentity(file, ""))
	var beside sync.WaitGroup
	beside.Go(func() {
		for range 10 {
			other, err := newApp(t, dir, withIdentity(file, ""))
			if err == nil {
				err = errors.Join(other.Start(), other.Cleanup())
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
	var made []string
	for range 10 {
		made = append(made, rotateIdentity(t, app, false))
	}
	beside.Wait()
	var have []string
	for _, key := range app.held.ledger.status().Keys {
		have = append(have, key.ID)
	}
	if signing(t, app) != inFile(t, file) || !slices.Equal(have[1:], made) {
		t.Errorf("made %q\nhave %q", made, have)
	}
}
