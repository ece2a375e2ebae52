//go:build unix

package operate

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// section "Store": one directory, one process.
func TestProcessRefusesADirectoryInUse(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})

	second := harness.ProcNewSite(t, upstream.Addr)
	second.Store = "badger " + site.Path("data")
	said := second.Refused(t)
	harness.WantProcSays(t, said, site.Path("data"), "in use", "stop the process that has it open")

	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "one"}))
	gateway.End(t)
	// Once the first is gone, the second may have it, and its place.
	second.Addr = site.Addr
	harness.WantProcReplay(t, first, second.Start(t).Post(t, harness.ProcCall{Id: "one"}))
}

// P1: a store that is not whole would forget executions, so it is refused, each time,
// with what to do.
func TestProcessRefusesADamagedStore(t *testing.T) {
	t.Parallel() // its gateways are processes
	truncate := func(b []byte) []byte { return b[:len(b)/2] }
	garbage := func(b []byte) []byte {
		for i := range min(len(b), 64) {
			b[i] ^= 0x5a
		}
		return b
	}
	middle := func(b []byte) []byte {
		b[len(b)/2] ^= 0xff
		return b
	}
	tests := []struct {
		name   string
		killed bool // the last process was killed, so that its log is there
		files  string
		damage func([]byte) []byte // nil removes the file
	}{
		{"manifest truncated", false, "lsm/MANIFEST", truncate},
		{"manifest garbage", false, "lsm/MANIFEST", garbage},
		{"manifest gone", false, "lsm/MANIFEST", nil},
		{"table truncated", false, "lsm/*.sst", truncate},
		{"table garbage", false, "lsm/*.sst", garbage},
		{"table with one byte flipped", false, "lsm/*.sst", middle},
		{"table gone", false, "lsm/*.sst", nil},
		{"key registry garbage", false, "lsm/KEYREGISTRY", garbage},
		{"log header garbage", true, "wal/*.wal", garbage},
		{"log gone", true, "wal/*.wal", nil},
		{"log empty", true, "wal/*.wal", func([]byte) []byte { return nil }},
		{"store file truncated", false, "STORE", truncate},
		{"store file garbage", false, "STORE", garbage},
		{"store file gone", false, "STORE", nil},
		{"everything of Badger gone", false, "lsm/*", nil},
	}
	upstream := harness.ProcNewUpstream(t)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			site := harness.ProcNewSite(t, upstream.Addr)
			id := strings.ReplaceAll(test.name, " ", "-")
			gateway := site.Start(t)
			gateway.Post(t, harness.ProcCall{Id: id})
			if test.killed {
				gateway.Kill()
			} else {
				gateway.End(t)
			}
			files, err := filepath.Glob(site.Path("data/" + test.files))
			if err != nil || len(files) == 0 {
				t.Fatalf("nothing to damage at %s: %v", test.files, err)
			}
			for _, file := range files {
				procDamage(t, file, test.damage)
			}
			for range 2 { // the second look must not find it mended
				said := site.Refused(t)
				harness.WantProcSays(t, said, site.Path("data"), "restore the whole directory from a backup")
			}
		})
	}
}

func procDamage(t *testing.T, file string, damage func([]byte) []byte) {
	t.Helper()
	if damage == nil {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		return
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, damage(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

// section "Store": the key file.
func TestProcessKeyFile(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	key := site.Path("data.key")
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})
	gateway.End(t)

	info, err := os.Stat(key)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("P8: the key file has mode %v, not 0600", info.Mode())
	}
	right, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(key, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("missing", func(t *testing.T) {
		if err := os.Remove(key); err != nil {
			t.Fatal(err)
		}
		said := site.Refused(t)
		harness.WantProcSays(t, said, key, "is missing", "put the file back from your backup")
		if _, err := os.Stat(key); !os.IsNotExist(err) {
			t.Errorf("P1: a new key was made for a store that holds executions: %v", err)
		}
	})
	t.Run("of another store", func(t *testing.T) {
		other := harness.ProcNewSite(t, upstream.Addr)
		other.Start(t).End(t)
		wrong, err := os.ReadFile(other.Path("data.key"))
		if err != nil {
			t.Fatal(err)
		}
		write(wrong)
		harness.WantProcSays(t, site.Refused(t), site.Path("data"), "give the key that was made with the store")
	})
	t.Run("damaged", func(t *testing.T) {
		write(right[:len(right)/2])
		harness.WantProcSays(t, site.Refused(t), key)
	})
	t.Run("empty", func(t *testing.T) {
		write(nil)
		harness.WantProcSays(t, site.Refused(t), key)
	})
	t.Run("not a file", func(t *testing.T) {
		if err := os.Remove(key); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(key, 0o700); err != nil {
			t.Fatal(err)
		}
		harness.WantProcSays(t, site.Refused(t), key)
		if err := os.Remove(key); err != nil {
			t.Fatal(err)
		}
	})
	write(right)
	harness.WantProcReplay(t, first, site.Start(t).Post(t, harness.ProcCall{Id: "one"}))
}

// A file that the gateway's user cannot read is named, and is not taken for a missing
// one.
func TestProcessKeyFileUnreadable(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Start(t).End(t)
	key := site.Path("data.key")
	if os.Getuid() == 0 {
		// Nothing is unreadable to root: the gateway runs as somebody else, whose is
		// everything but the key.
		const nobody = 65534
		site.User = &syscall.Credential{Uid: nobody, Gid: nobody}
		err := filepath.WalkDir(site.Dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || path == key {
				return err
			}
			return os.Chown(path, nobody, nobody)
		})
		if err != nil {
			t.Fatal(err)
		}
		site.Binary = procPublicBinary(t)
	} else if err := os.Chmod(key, 0); err != nil {
		t.Fatal(err)
	}
	before, err := os.Lstat(key)
	if err != nil {
		t.Fatal(err)
	}
	harness.WantProcSays(t, site.Refused(t), key, "permission denied")
	if after, err := os.Lstat(key); err != nil || !os.SameFile(before, after) {
		t.Errorf("the key file was replaced: %v", err)
	}
}

// procPublicBinary copies this binary to where other users may run it.
func procPublicBinary(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "gateway")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// section "Store": the key from a placeholder.
func TestProcessKeyFromTheEnvironment(t *testing.T) {
	t.Parallel() // its gateways are processes
	const (
		key   = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
		other = "ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="
	)
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "keys value {env.PROC_KEY}"
	site.Env = []string{"PROC_KEY=" + key}
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})
	gateway.End(t)
	if _, err := os.Stat(site.Path("data.key")); !os.IsNotExist(err) {
		t.Errorf("a key file was made beside a key that was given: %v", err)
	}

	site.Env = []string{"PROC_KEY=" + other}
	harness.WantProcSays(t, site.Refused(t), "give the key that was made with the store")
	site.Env = nil
	harness.WantProcSays(t, site.Refused(t), "keys", "env.PROC_KEY")
	site.Env = []string{"PROC_KEY=too short"}
	said := site.Refused(t)
	harness.WantProcSays(t, said, "keys", "32")
	if strings.Contains(said, "too short") {
		t.Errorf("P8: the log holds the key:\n%s", said)
	}

	site.Env = []string{"PROC_KEY=" + key}
	gateway = site.Start(t)
	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "one"}))
	if bytes.Contains([]byte(gateway.Log.String()), []byte(key)) {
		t.Error("P8: the log holds the key")
	}
	_, config, err := gateway.Admin("GET", "/config/", "", "")
	if err != nil || strings.Contains(config, key) {
		t.Errorf("P8: the admin API shows the key (%v):\n%s", err, config)
	}
}

// section "Store": a directory that cannot be written is named.
func TestProcessRefusesAPlaceThatIsNoDirectory(t *testing.T) {
	t.Parallel() // its gateways are processes
	site := harness.ProcNewSite(t, "127.0.0.1:1")
	if err := os.WriteFile(site.Path("data"), []byte("not a store"), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.WantProcSays(t, site.Refused(t), site.Path("data"), "not a directory")
	if b, err := os.ReadFile(site.Path("data")); err != nil || string(b) != "not a store" {
		t.Errorf("the file was touched: %q, %v", b, err)
	}
}
