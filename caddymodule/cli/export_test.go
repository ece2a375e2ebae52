package cli

import (
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

func TestStoreExportAndImport(t *testing.T) {
	from, dir := "badger:"+embeddedStore(t, 700), t.TempDir()
	file, to := filepath.Join(dir, "guard.export"), "badger:"+filepath.Join(dir, "store")
	out, diagnostics, err := run(t, "store", "export", "--from", from, "--to", file)
	if err != nil || diagnostics != "" || !strings.HasPrefix(out, file+" has the 703 entries of "+from+".\n") {
		t.Fatalf("%v\n%s%s", err, diagnostics, out)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	doc := document[moveDocument](t, "store", "import", "--from", file, "--to", to)
	if doc != (moveDocument{file, to, 703}) {
		t.Errorf("%+v", doc)
	}
	again := document[moveDocument](t, "store", "export", "--from", to, "--to", file+"2")
	if again != (moveDocument{to, file + "2", 703}) {
		t.Errorf("%+v", again)
	}
	refuses(t, "the target is not empty", "store", "import", "--from", file, "--to", to)
	refuses(t, "--to: "+file+" is there", "store", "export", "--from", from, "--to", file)
	refuses(t, "--from: open "+file+"3", "store", "import", "--from", file+"3", "--to", to+"2")
}

func TestStoreExportAndImportRefuse(t *testing.T) {
	from := embeddedStore(t, 0)
	t.Setenv("NONE", "")
	t.Setenv("WRONG", "host=secret.example.com user=u password=secret dbname= ")
	empty, file := t.TempDir(), filepath.Join(t.TempDir(), "guard.export")
	if _, _, err := run(t, "store", "export", "--from", "badger:"+from, "--to", file); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ words, command, from, to string }{
		{"--from: write badger:PATH, or postgres:VARIABLE", "export", "badger", file + "2"},
		{"--from: write badger:PATH, or postgres:VARIABLE", "export", "mysql:DSN", file + "2"},
		{"--to: write badger:PATH, or postgres:VARIABLE", "import", file, "postgres:"},
		{"--to: name the variable of the environment that has the DSN", "import", file, "postgres://u:secret@db/x"},
		{"--to: the variable NONE is not set", "import", file, "postgres:NONE"},
		{"--from: there is no store in " + empty, "export", "badger:" + empty, file + "2"},
		{"schema: \"Upper\" is no plain name", "export", "postgres:WRONG:Upper", file + "2"},
		{"dsn: it names no database", "import", file, "postgres:WRONG"},
	} {
		out, diagnostics, err := run(t, "store", c.command, "--from", c.from, "--to", c.to)
		if err == nil || !strings.Contains(err.Error(), c.words) || strings.Contains(err.Error()+out+diagnostics, "secret") {
			t.Errorf("from %s to %s: %v, want %q", c.from, c.to, err, c.words)
		}
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) > 0 {
		t.Errorf("a source that is none has %v now, %v", left, err)
	}
}
