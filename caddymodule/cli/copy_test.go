package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// embeddedStore makes a gateway's store with n more entries, and returns its directory.
func embeddedStore(t *testing.T, n int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "store")
	st, err := badger.Open(path, badger.Options{MinFree: -1})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := execution.Open(context.Background(), st, seal.Generate()); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if _, err := st.Commit(context.Background(), store.Write{Key: fmt.Appendf(nil, "q%d", i), Value: []byte("1")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStoreCopy(t *testing.T) {
	from := embeddedStore(t, 700)
	if err := os.WriteFile(from+".key", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "copy")
	out, diagnostics, err := run(t, "store", "copy", "--from", "badger:"+from, "--to", "badger:"+to)
	if err != nil {
		t.Fatal(err)
	}
	for _, words := range []string{"badger:" + to + " has the 703 entries of badger:" + from, "This run wrote 703.", "beside the source are " + from + ".key."} {
		if !strings.Contains(out, words) {
			t.Errorf("%q is not in\n%s", words, out)
		}
	}
	// Not on a terminal: a line for each step, and no control characters.
	if want := "copying: 0 entries, 0 B\nverifying: 0 entries, 0 B\n"; diagnostics != want {
		t.Errorf("progress: %q, want %q", diagnostics, want)
	}
	again := document[copyDocument](t, "store", "copy", "--from", "badger:"+to, "--to", "badger:"+to+"2")
	if again.Entries != 703 || again.Written != 703 || !strings.Contains(out, "SHA-256 "+again.SHA256) {
		t.Errorf("the copy of the copy: %+v\n%s", again, out)
	}
	refuses(t, "the target is not empty", "store", "copy", "--from", "badger:"+from, "--to", "badger:"+to)
}

// On a terminal one line shows how far the copy is.
func TestStoreCopyMeter(t *testing.T) {
	var out bytes.Buffer
	m := &meter{out: &out, moving: true}
	m.show(execution.CopyProgress{Step: execution.CopyCounts, Entries: 512, Bytes: 2048})
	m.show(execution.CopyProgress{Step: execution.CopyCopies, Entries: 300, Of: 900, Bytes: 1024})
	m.show(execution.CopyProgress{Step: execution.CopyCopies, Entries: 301, Of: 900, Bytes: 1024}) // too soon
	m.show(execution.CopyProgress{Step: execution.CopyVerifies, Entries: 900, Of: 900, Bytes: 4096})
	const clear = "\x1b[K"
	want := "\rcounting  [" + strings.Repeat(" ", 30) + "] 512 entries, 2.0 KiB" + clear +
		"\rcopying   [" + strings.Repeat("#", 10) + strings.Repeat(" ", 20) + "] 300 of 900 entries, 1.0 KiB" + clear +
		"\rverifying [" + strings.Repeat("#", 30) + "] 900 of 900 entries, 4.0 KiB" + clear
	if out.String() != want {
		t.Errorf("shown: %q\nwant %q", out.String(), want)
	}
}

func TestStoreCopyRefuses(t *testing.T) {
	from := embeddedStore(t, 0)
	t.Setenv("NONE", "")
	t.Setenv("WRONG", "host=secret.example.com user=u password=secret dbname= ")
	target := "badger:" + filepath.Join(t.TempDir(), "copy")
	empty := t.TempDir()
	for _, c := range []struct{ words, from, to string }{
		{"--from: write badger:PATH, or postgres:VARIABLE", "badger", target},
		{"--from: write badger:PATH, or postgres:VARIABLE", "mysql:DSN", target},
		{"--to: write badger:PATH, or postgres:VARIABLE", "badger:" + from, "postgres:"},
		{"--to: name the variable of the environment that has the DSN", "badger:" + from, "postgres://u:secret@db/x"},
		{"--to: the variable NONE is not set", "badger:" + from, "postgres:NONE"},
		{"--to: it is the store of --from", "badger:" + from, "badger:" + from + "/../store"},
		{"--from: there is no store in " + empty, "badger:" + empty, target},
		{"schema: \"Upper\" is no plain name", "badger:" + from, "postgres:WRONG:Upper"},
		{"dsn: it names no database", "badger:" + from, "postgres:WRONG"},
	} {
		out, diagnostics, err := run(t, "store", "copy", "--from", c.from, "--to", c.to)
		if err == nil || !strings.Contains(err.Error(), c.words) || strings.Contains(err.Error()+out+diagnostics, "secret") {
			t.Errorf("from %s to %s: %v, want %q", c.from, c.to, err, c.words)
		}
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) > 0 {
		t.Errorf("a source that is none has %v now, %v", left, err)
	}
}
