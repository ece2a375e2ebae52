package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

func fresh(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "file")
}

// says holds what the file says, and that nothing lies beside it but its lock.
func says(t *testing.T, path, want string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil || string(text) != want {
		t.Errorf("it says %q, %v; want %q", text, err, want)
	}
	beside, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range beside {
		if name := entry.Name(); name != filepath.Base(path) && name != filepath.Base(path)+".lock" {
			t.Errorf("%s was left behind", name)
		}
	}
}

func create(t *testing.T, path, text string) {
	t.Helper()
	if err := durable.Create(path, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

// TestCreate: a file that is there is never written over, and a secret is for its owner.
func TestCreate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "one", "new", "file")
	create(t, path, "one")
	if err := durable.Create(path, []byte("two")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("got %v", err)
	}
	says(t, path, "one")
	for name, want := range map[string]fs.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode(), err, want)
		}
	}
}

// P1: of many who create one file a single one succeeds, and the others then find its whole content.
func TestCreateAtTheSameMoment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "file")
	var made atomic.Pointer[string]
	var all sync.WaitGroup
	texts := make([]string, 16)
	for i := range texts {
		all.Go(func() {
			mine := strings.Repeat(string(rune('a'+i)), 100_000)
			switch err := durable.Create(path, []byte(mine)); {
			case err == nil && made.Swap(&mine) != nil:
				t.Error("two have made the file")
			case err != nil && !errors.Is(err, fs.ErrExist):
				t.Error(err)
			}
			text, err := os.ReadFile(path)
			if err != nil {
				t.Error(err)
			}
			texts[i] = string(text)
		})
	}
	all.Wait()
	for _, text := range texts {
		if text != *made.Load() {
			t.Errorf("somebody has read %d bytes of %.1q", len(text), text)
		}
	}
	says(t, path, *made.Load())
}

// TestSwap: what somebody else wrote stays.
func TestSwap(t *testing.T) {
	path := fresh(t)
	if err := durable.Swap(path, []byte("one"), []byte("two"), 0o644); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is gone: %v", err)
	}
	if err := durable.Swap(path, nil, []byte("one"), 0o644); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	for _, was := range [][]byte{nil, []byte("two")} {
		if err := durable.Swap(path, was, []byte("three"), 0o644); !errors.Is(err, durable.ErrChanged) {
			t.Errorf("in place of %q: %v", was, err)
		}
	}
	says(t, path, "one")
	if err := durable.Write(path, []byte("four"), durable.Private); err != nil {
		t.Fatal(err)
	}
	says(t, path, "four")
}

// TestEdit: an edit sees what somebody wrote by hand meanwhile, and an error leaves all
// as it was.
func TestEdit(t *testing.T) {
	path := fresh(t)
	create(t, path, "a")
	calls := 0
	err := durable.Edit(path, func(was []byte) ([]byte, error) {
		if calls++; calls == 1 {
			if err := os.WriteFile(path, []byte("b"), durable.Private); err != nil {
				t.Fatal(err)
			}
		}
		return append(was, '!'), nil
	})
	if err != nil || calls != 2 {
		t.Errorf("%v after %d calls", err, calls)
	}
	says(t, path, "b!")

	calls = 0
	err = durable.Edit(path, func(was []byte) ([]byte, error) {
		calls++
		return was[:1], os.WriteFile(path, append(was, '?'), durable.Private)
	})
	if !errors.Is(err, durable.ErrChanged) || calls != 3 {
		t.Errorf("somebody who never stops: %v after %d calls", err, calls)
	}
	says(t, path, "b!???")

	no := errors.New("no")
	if err := durable.Edit(path, func([]byte) ([]byte, error) { return nil, no }); !errors.Is(err, no) {
		t.Errorf("got %v", err)
	}
	says(t, path, "b!???")
}

// TestEditBehindALink: a link stays a link.
func TestEditBehindALink(t *testing.T) {
	path := fresh(t)
	create(t, path, "a")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := durable.Edit(link, func([]byte) ([]byte, error) { return []byte("b"), nil }); err != nil {
		t.Fatal(err)
	}
	says(t, path, "b")
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("the link became %v, %v", info.Mode(), err)
	}
}

// TestLock: who comes second does not wait.
func TestLock(t *testing.T) {
	path := fresh(t)
	create(t, path, "a")
	lock, err := durable.Lock(path + ".lock")
	if err != nil {
		t.Fatal(err)
	}
	edit := func([]byte) ([]byte, error) { return []byte("b"), nil }
	if err := durable.Edit(path, edit); !errors.Is(err, durable.ErrBusy) {
		t.Errorf("got %v", err)
	}
	says(t, path, "a")
	lock.Close()
	if err := durable.Edit(path, edit); err != nil {
		t.Error(err)
	}
	says(t, path, "b")
}
