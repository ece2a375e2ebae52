package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func TestDirectoryInUse(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b") // made with its parents
	s := reopenWith(t, dir, Options{}, osDisk{})
	mustCommit(t, s, put("a", "1"))
	_, err := Open(dir, Options{})
	wantErr(t, "second open", err, errLocked)
	if err == nil || !strings.Contains(err.Error(), "give this one a directory of its own with `store badger <path>`") {
		t.Errorf("%q does not say what to do", err)
	}
	if err != nil && strings.Contains(err.Error(), dir) {
		t.Errorf("%q names the directory, as its caller does", err)
	}
	wantValue(t, s, "a", "1")
	must(t, s.Close())
	again := reopenWith(t, dir, Options{}, osDisk{})
	wantValue(t, again, "a", "1")
}

func TestUnusableDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for _, dir := range []string{file, filepath.Join(file, "below")} {
		_, err := Open(dir, Options{})
		if err == nil || errors.Is(err, errCorrupt) || errors.Is(err, errLocked) {
			t.Errorf("open of %s: %v; want an error that says it is no directory", dir, err)
		}
	}
}

// A store does not mix its files with others.
func TestDirectoryOfOthersIsRefused(t *testing.T) {
	for _, name := range []string{"notes.txt", "pictures/", ".hidden", "lsm", "bodies"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if made, isDir := strings.CutSuffix(name, "/"); isDir {
				must(t, os.Mkdir(filepath.Join(dir, made), 0o700))
			} else {
				must(t, os.WriteFile(filepath.Join(dir, name), []byte("mine"), 0o600))
			}
			s, err := Open(dir, Options{})
			if err == nil {
				_ = s.Close()
				t.Fatal("it was opened")
			}
			if errors.Is(err, errCorrupt) || errors.Is(err, errLocked) ||
				!strings.Contains(err.Error(), "holds other files and no store; give the store a directory of its own") {
				t.Errorf("open: %v; want an error that says what to do", err)
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
				t.Errorf("the refusal left something behind: %v, %v", entries, err)
			}
		})
	}
}

// Files of a file system, of an unfinished creation, or of a user of the store do not keep
// it from opening.
func TestDirectoryThatMayBecomeAStore(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "lost+found"), 0o700))
	for _, name := range []string{"lock", "STORE.new"} {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	for _, name := range []string{"lsm", "bodies"} {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o700))
	}
	s := reopenWith(t, dir, Options{}, osDisk{})
	mustCommit(t, s, put("a", "1"))
	must(t, s.Close())
	must(t, os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600))
	wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "a", "1")
}

// P1: a store without its manifest is damaged, whatever other files there are.
func TestDamageBesideOtherFiles(t *testing.T) {
	dir := seeded(t)
	must(t, os.Remove(filepath.Join(dir, "STORE")))
	must(t, os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600))
	refused(t, dir)
}

// seeded makes a store with tables and bulk values on disk, closed in order.
func seeded(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for round := range 3 {
		s := reopenWith(t, dir, Options{}, osDisk{})
		for i := range 20 {
			mustCommit(t, s, put(fmt.Sprintf("%d-%d", round, i), strings.Repeat("v", 4000)))
		}
		must(t, s.Close()) // writes a table
	}
	return dir
}

// image copies the files of a store as a crash at this moment would leave them.
//
// It copies again if tables or Badger's manifest changed during the copy.
func image(t *testing.T, from string) (to string) {
	t.Helper()
	tables := func() (all []string) {
		entries, err := os.ReadDir(filepath.Join(from, "lsm"))
		must(t, err)
		for _, e := range entries {
			info, err := e.Info()
			switch {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				t.Fatal(err)
			case e.Name() == "MANIFEST" || strings.HasSuffix(e.Name(), ".sst"):
				all = append(all, fmt.Sprint(e.Name(), info.Size(), info.ModTime()))
			}
		}
		return all
	}
	for {
		before := tables()
		to = t.TempDir()
		err := os.CopyFS(to, os.DirFS(from))
		if err == nil && slices.Equal(before, tables()) {
			return to
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

func tablesIn(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "lsm", "*.sst"))
	must(t, err)
	if len(names) == 0 {
		t.Fatal("the store has no tables")
	}
	return names
}

func refused(t *testing.T, dir string) {
	t.Helper()
	before := listing(t, dir)
	s, err := Open(dir, Options{})
	if err == nil {
		_ = s.Close()
	}
	wantErr(t, "open", err, errCorrupt)
	if err != nil && (!strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(),
		"restore the whole directory from a backup (calls executed since then are forgotten and would run again)")) {
		t.Errorf("%q does not say where, what to do, and what it costs", err)
	}
	if after := listing(t, dir); !slices.Equal(before, after) {
		t.Errorf("the refusal changed the files:\n%q\n%q", before, after)
	}
}

func listing(t *testing.T, dir string) (names []string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || e.Name() == "lock" {
			return err
		}
		info, err := e.Info()
		names = append(names, fmt.Sprintf("%s %d", path, info.Size()))
		return err
	}))
	return names
}

// P1: a store that has lost entries must not open: their keys would be free.
func TestDamageIsFoundAtOpen(t *testing.T) {
	closed := seeded(t)
	manifest := func(dir string) string { return filepath.Join(dir, "lsm", "MANIFEST") }
	change := func(file string, f func([]byte) []byte) {
		b, err := os.ReadFile(file)
		must(t, err)
		must(t, os.WriteFile(file, f(b), 0o600))
	}
	for name, damage := range map[string]func(dir string){
		"manifest missing": func(dir string) { must(t, os.Remove(manifest(dir))) },
		"manifest empty":   func(dir string) { must(t, os.Truncate(manifest(dir), 0)) },
		"manifest garbage": func(dir string) {
			change(manifest(dir), func(b []byte) []byte { return slices.Repeat([]byte("garbage!"), len(b)/8) })
		},
		"manifest flipped": func(dir string) { flip(t, manifest(dir), -3) },
		"manifest longer":  func(dir string) { change(manifest(dir), func(b []byte) []byte { return append(b, 0, 0) }) },
		"STORE missing":    func(dir string) { must(t, os.Remove(filepath.Join(dir, "STORE"))) },
		"STORE garbage": func(dir string) {
			change(filepath.Join(dir, "STORE"), func([]byte) []byte { return []byte("{") })
		},
		"lsm missing":   func(dir string) { must(t, os.RemoveAll(filepath.Join(dir, "lsm"))) },
		"table missing": func(dir string) { must(t, os.Remove(tablesIn(t, dir)[0])) },
		"table empty":   func(dir string) { must(t, os.Truncate(tablesIn(t, dir)[0], 0)) },
		"table of 3 bytes": func(dir string) {
			must(t, os.Truncate(tablesIn(t, dir)[0], 3))
		},
		"table garbage": func(dir string) {
			change(tablesIn(t, dir)[0], func(b []byte) []byte { return slices.Repeat([]byte("garbage!"), len(b)/8) })
		},
		"table zeros": func(dir string) {
			change(tablesIn(t, dir)[0], func(b []byte) []byte { return make([]byte, len(b)) })
		},
		"key registry garbage": func(dir string) {
			change(filepath.Join(dir, "lsm", "KEYREGISTRY"), func(b []byte) []byte { return slices.Repeat([]byte("?"), len(b)) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := image(t, closed)
			damage(dir)
			if name == "key registry garbage" { // found by Badger itself, after it has begun
				_, err := Open(dir, Options{})
				wantErr(t, "open", err, errCorrupt)
				return
			}
			refused(t, dir)
		})
	}
}

func inspectFile(t *testing.T, name string) (tableStats, error) {
	t.Helper()
	f, err := os.Open(name)
	must(t, err)
	defer f.Close()
	return verifyTable(f, func(_, _ []byte) {})
}

// Every cut and every flipped byte in a table is found, and none ends the process.
func TestEveryByteOfATableIsChecked(t *testing.T) {
	name := tablesIn(t, seeded(t))[0]
	_, err := inspectFile(t, name)
	must(t, err)
	whole, err := os.ReadFile(name)
	must(t, err)
	bad := filepath.Join(t.TempDir(), "000001.sst")
	step := max(1, len(whole)/400)
	for i := 0; i < len(whole); i++ {
		// The ends are looked at byte by byte, the middle in steps.
		if i > 200 && i < len(whole)-600 && i%step != 0 {
			continue
		}
		must(t, os.WriteFile(bad, whole[:i], 0o600))
		if _, err := inspectFile(t, bad); err == nil {
			t.Errorf("cut to %d of %d bytes: not found", i, len(whole))
		}
		b := slices.Clone(whole)
		b[i] ^= 0x41
		must(t, os.WriteFile(bad, b, 0o600))
		if _, err := inspectFile(t, bad); err == nil {
			t.Errorf("byte %d of %d flipped: not found", i, len(whole))
		}
	}
}

// After a crash Badger's manifest may end in a torn change set, but must not lose whole
// ones.
func TestManifestAfterACrash(t *testing.T) {
	dir := seeded(t)
	s := reopenWith(t, dir, Options{}, osDisk{})
	mustCommit(t, s, put("last", "1"))
	crashed := image(t, dir)
	manifest, err := os.ReadFile(filepath.Join(crashed, "lsm", "MANIFEST"))
	must(t, err)

	t.Run("as it was", func(t *testing.T) {
		again := reopenWith(t, image(t, crashed), Options{}, osDisk{})
		wantValue(t, again, "last", "1")
		wantValue(t, again, "0-0", strings.Repeat("v", 4000))
	})
	t.Run("torn end", func(t *testing.T) {
		torn := image(t, crashed)
		must(t, os.WriteFile(filepath.Join(torn, "lsm", "MANIFEST"), append(manifest, 0, 0, 0, 40, 1), 0o600))
		again := reopenWith(t, torn, Options{}, osDisk{})
		wantValue(t, again, "last", "1")
	})
	for _, cut := range []int{len(manifest) - 1, len(manifest) / 2, 16, 15, 3, 0} {
		t.Run(fmt.Sprintf("cut to %d of %d", cut, len(manifest)), func(t *testing.T) {
			bad := image(t, crashed)
			must(t, os.Truncate(filepath.Join(bad, "lsm", "MANIFEST"), int64(cut)))
			refused(t, bad)
		})
	}
}

func TestCreationThatDidNotFinishBeginsAnew(t *testing.T) {
	dir := t.TempDir()
	sealer := &manifestFile{dir: dir, lsm: filepath.Join(dir, "lsm"), disk: osDisk{}}
	must(t, sealer.markCreating())
	must(t, os.MkdirAll(sealer.lsm, 0o700))
	must(t, os.WriteFile(sealer.badgerManifest(), []byte("Bdg"), 0o600))
	s := reopenWith(t, dir, Options{}, osDisk{})
	mustCommit(t, s, put("a", "1"))
	must(t, s.Close())
	s = reopenWith(t, dir, Options{}, osDisk{})
	wantValue(t, s, "a", "1")
}

func TestFailureAtOpenIsNotTakenForDamageLater(t *testing.T) {
	dir := seeded(t)
	d := &faultyDisk{left: 1 << 40, onWrite: func(string) error { return errDisk }}
	if _, err := openWith(dir, Options{}, d); err == nil {
		t.Fatal("opened although no log could be made")
	}
	s := reopenWith(t, dir, Options{}, osDisk{})
	wantValue(t, s, "0-0", strings.Repeat("v", 4000))
}

// P1: a table that decays while the store is open would read as free keys.
func TestVerifyClosesADamagedStore(t *testing.T) {
	dir := seeded(t)
	s := reopenWith(t, dir, Options{}, osDisk{})
	must(t, s.verify(func(uint64) bool { return true }, nil))
	wantValue(t, s, "0-0", strings.Repeat("v", 4000))
	name := tablesIn(t, dir)[0]
	f, err := os.OpenFile(name, os.O_RDWR, 0) // in place: the file is mapped
	must(t, err)
	_, err = f.WriteAt([]byte("damage"), 100)
	must(t, errors.Join(err, f.Close()))
	wantErr(t, "verify", s.verify(func(uint64) bool { return true }, nil), errCorrupt)
	_, err = s.Get(t.Context(), []byte("1-0"))
	wantErr(t, "get", err, store.ErrUnhealthy)
}

// A store of another format is left as it is, and is not called damaged.
func TestAnotherFormatIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := reopenWith(t, dir, Options{}, osDisk{})
	mustCommit(t, s, put("a", "1"))
	must(t, s.Close())
	file := filepath.Join(dir, "STORE")
	was, err := os.ReadFile(file)
	must(t, err)
	for _, other := range []int{format - 1, format + 1} {
		change := strings.Replace(string(was), fmt.Sprintf(`"format":%d`, format), fmt.Sprintf(`"format":%d`, other), 1)
		must(t, os.WriteFile(file, []byte(change), 0o600))
		_, err := Open(dir, Options{})
		if err == nil || errors.Is(err, errCorrupt) || !strings.Contains(err.Error(), fmt.Sprintf("in form %d by another version", other)) {
			t.Errorf("open of form %d: %v", other, err)
		}
	}
	must(t, os.WriteFile(file, was, 0o600))
	wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "a", "1")
}
