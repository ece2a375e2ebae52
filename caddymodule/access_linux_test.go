package caddymodule

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// asNobody runs f as somebody whom permissions bind: root becomes another real user, on one
// thread, which is what access(2) goes by.
func asNobody(t *testing.T, f func()) {
	t.Helper()
	if os.Getuid() != 0 {
		f()
		return
	}
	const nobody, keep = 65534, ^uintptr(0)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, keep, keep); errno != 0 {
		t.Fatal(errno)
	}
	defer func() {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 0, keep, keep); errno != 0 {
			panic(errno) // the thread would go on as somebody else
		}
	}()
	f()
}

// What this process may not write or read is refused, with what to do about it.
func TestPermissionsOfTheStoreAreChecked(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"closed": 0o555, "open": 0o777} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(dir, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	for parent := dir; parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "nothing"), link); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, "key")
	if err := os.WriteFile(key, nil, 0o200); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		check func() error
		want  []string // nil is accepted
	}{
		"a directory":           {func() error { return checkDirectory(filepath.Join(dir, "closed")) }, []string{"this process may not write in ", "/closed (permission denied); give the user"}},
		"in a closed directory": {func() error { return checkDirectory(filepath.Join(dir, "closed", "a", "b")) }, []string{"/closed/a/b cannot be made: this process may not write in ", "/closed (permission denied)"}},
		"a link to nothing":     {func() error { return checkDirectory(link) }, []string{"/link is a link to a directory that does not exist; make that directory"}},
		"below such a link":     {func() error { return checkDirectory(filepath.Join(link, "a")) }, []string{"/link is a link to a directory that does not exist"}},
		"an open directory":     {func() error { return checkDirectory(filepath.Join(dir, "open")) }, nil},
		"in an open directory":  {func() error { return checkDirectory(filepath.Join(dir, "open", "a", "b")) }, nil},
		"a key":                 {func() error { return checkKeyFile(key) }, []string{"this process may not read the file " + key + " (permission denied); give the user"}},
		"no key":                {func() error { return checkKeyFile(filepath.Join(dir, "none")) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			asNobody(t, func() { err = c.check() })
			WantError(t, err, c.want)
		})
	}
}
