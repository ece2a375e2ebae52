package caddymodule

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A store that a start could not open is refused by Provision, which `caddy validate` runs
// too. Nothing is made by that.
func TestProvisionRefusesAStoreThatCannotBeMade(t *testing.T) {
	for name, c := range map[string]struct {
		dir, at string
		want    []string // nil is accepted
	}{
		"other files":   {"", "store/README", []string{"badger: path: ", "the directory holds other files and no store"}},
		"a file":        {"", "store", []string{"badger: path: ", "/store is not a directory; name a path"}},
		"below a file":  {"file/a", "file", []string{"badger: path: the directory ", "/file/a/store cannot be made: ", "/file is not a directory"}},
		"not there yet": {"a/b", "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if c.at != "" {
				at := filepath.Join(dir, c.at)
				if err := cmp.Or(os.MkdirAll(filepath.Dir(at), 0o700), os.WriteFile(at, nil, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			before, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			app, err := newApp(t, filepath.Join(dir, c.dir), "")
			defer app.Cleanup()
			WantError(t, err, c.want)
			if after, err := os.ReadDir(dir); err != nil || len(after) != len(before) {
				t.Errorf("%v before, %v after, %v", before, after, err)
			}
		})
	}
}

// A reload does not fail of the directory of a store that is open: what is refused with a
// broken disk is calls, and not the configuration that takes them elsewhere.
func TestReloadDoesNotLookAtAnOpenStore(t *testing.T) {
	dir := t.TempDir()
	running := validApp(t, dir, "")
	if err := running.Start(); err != nil {
		t.Fatal(err)
	}
	store, aside := filepath.Join(dir, "store"), filepath.Join(dir, "aside")
	if err := os.Rename(store, aside); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(store, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	next, err := newApp(t, dir, "")
	if err != nil {
		t.Error(err)
	}
	if err := os.Remove(store); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(aside, store); err != nil {
		t.Fatal(err)
	}
	for _, app := range []*App{next, running} {
		cleanUp(t, app)
	}
}

// A key file that is no file is refused by Provision.
func TestProvisionRefusesAKeyFileThatIsADirectory(t *testing.T) {
	dir := t.TempDir()
	app, err := newApp(t, dir, `, "key_file": "`+dir+`"`)
	defer app.Cleanup()
	if err == nil || !strings.Contains(err.Error(), "agent_guard: keys: "+dir+" is a directory; name the file") {
		t.Error(err)
	}
}
