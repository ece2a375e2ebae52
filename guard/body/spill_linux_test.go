package body_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
)

// openFiles gives the file descriptors of this process that lead into dir.
func openFiles(t *testing.T, dir string) []string {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var in []string
	for _, n := range names {
		path := "/proc/self/fd/" + n.Name()
		if to, err := os.Readlink(path); err == nil && strings.HasPrefix(to, dir+"/") {
			in = append(in, path)
		}
	}
	return in
}

// P8: a spilled body has no name, is readable by nobody else, is not plain text
// on the disk, and leaves no open file behind.
func TestSpilledFileIsHiddenAndEncrypted(t *testing.T) {
	dir := t.TempDir()
	secret := []byte("card=4242424242424242;")
	s := body.NewSpool(body.SpoolOptions{Memory: 1000, Dir: dir})
	if _, err := s.Write(bytes.Repeat(secret, 40)); err != nil {
		t.Fatal(err)
	}
	if n := len(openFiles(t, dir)); n != 0 {
		t.Fatalf("%d files for a body that fits into memory", n)
	}
	for range 100 {
		if _, err := s.Write(bytes.Repeat(secret, 40)); err != nil {
			t.Fatal(err)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Fatalf("names in the directory: %v, %v", left, err)
	}
	open := openFiles(t, dir)
	if len(open) != 1 {
		t.Fatalf("open files: %v", open)
	}
	info, err := os.Stat(open[0])
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	// The descriptor has no offset of its own use; reading it by path is enough.
	raw, err := os.ReadFile(open[0])
	if err != nil || int64(len(raw)) != s.Size()-1000 {
		t.Fatalf("%d bytes on disk of %d, %v", len(raw), s.Size(), err)
	}
	for i := 0; i+8 <= len(secret); i++ {
		if bytes.Contains(raw, secret[i:i+8]) {
			t.Fatalf("plain text on disk: %q", secret[i:i+8])
		}
	}

	r := s.NewReader()
	closed(t, s)
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, bytes.Repeat(secret, 4040)) {
		t.Fatalf("reader: %d bytes, %v", len(got), err)
	}
	if n := len(openFiles(t, dir)); n != 1 {
		t.Fatalf("%d files while a reader is open", n)
	}
	closed(t, r)
	if open := openFiles(t, dir); len(open) != 0 {
		t.Fatalf("left open: %v", open)
	}
}

func TestNoFileIsLeftOpen(t *testing.T) {
	dir := t.TempDir()
	for i := range 30 {
		s := body.NewSpool(body.SpoolOptions{Memory: -1, Limit: 5000, Ring: i%2 == 0, Dir: dir})
		_, err := s.ReadFrom(strings.NewReader(fmt.Sprintf("%6000d", i)))
		if (err == body.ErrLimit) != (i%2 == 1) {
			t.Fatal(err)
		}
		r := s.NewReader()
		if i%3 == 0 {
			closed(t, r)
			closed(t, s)
		} else {
			closed(t, s)
			closed(t, r)
		}
	}
	if open := openFiles(t, dir); len(open) != 0 {
		t.Fatalf("left open: %v", open)
	}
}

// A file that cannot be given back properly is told, not swallowed.
func TestCloseGivesTheFilesError(t *testing.T) {
	dir := t.TempDir()
	gone := body.NewSpool(body.SpoolOptions{Memory: -1, Dir: dir}.WithNamedFiles())
	if _, err := gone.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	var spill *body.SpillError
	if err := gone.Close(); !errors.As(err, &spill) || spill.Error() == "" {
		t.Fatalf("Close without the file: %v", err)
	}
}
