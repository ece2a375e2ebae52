package commit_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/commit"
)

// repository is a product with a benchmark beside it, which prints who it is and what
// the product is.
type repository struct {
	t   *testing.T
	dir string
}

func newRepository(t *testing.T) *repository {
	r := &repository{t, t.TempDir()}
	r.git("init", "--quiet")
	r.write("go.mod", "module example.com/product\n\ngo 1.26\n")
	r.write("bench/go.mod", "module example.com/product/bench\n\ngo 1.26\n\nrequire example.com/product v0.0.0\n\nreplace example.com/product => ../\n")
	return r
}

func (r *repository) write(path, text string) {
	r.t.Helper()
	path = filepath.Join(r.dir, filepath.FromSlash(path))
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *repository) git(args ...string) string {
	r.t.Helper()
	c := exec.Command("git", append([]string{"-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"}, args...)...)
	c.Dir = r.dir
	out, err := c.CombinedOutput()
	if err != nil {
		r.t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (r *repository) commit(message string) string {
	r.t.Helper()
	r.git("add", "-A")
	r.git("commit", "--quiet", "-m", message)
	return r.git("rev-parse", "HEAD")
}

func bench(who, call string) string {
	return "package main\n\nimport (\n\t\"fmt\"\n\n\t\"example.com/product\"\n)\n\nfunc main() { fmt.Print(\"" + who + " \", product." + call + ") }\n"
}

func (r *repository) make(name string) (commit.Build, string) {
	r.t.Helper()
	into := r.t.TempDir()
	made, err := commit.Make(r.t.Context(), filepath.Join(r.dir, "bench"), ".", name, into)
	if err != nil {
		r.t.Fatal(err)
	}
	out, err := exec.Command(made.Binary).Output()
	if err != nil {
		r.t.Fatal(err)
	}
	if trees := strings.Count(r.git("worktree", "list", "--porcelain"), "worktree "); trees != 1 {
		r.t.Errorf("%d work trees are there", trees)
	}
	return made, string(out)
}

// A commit is measured by today's benchmark where that builds against its product, also
// where the change is not committed, and by its own otherwise. Nothing stays behind.
func TestMake(t *testing.T) {
	r := newRepository(t)
	r.write("product.go", "package product\n\nconst Old = \"first\"\n")
	r.write("bench/main.go", bench("own", "Old"))
	first := r.commit("first")
	r.write("product.go", "package product\n\nconst Name = \"second\"\n")
	r.write("bench/main.go", bench("own", "Name"))
	second := r.commit("second")
	r.write("product.go", "package product\n\nconst Name = \"third\"\n")
	r.write("bench/main.go", bench("today's", "Name"))

	made, says := r.make("HEAD")
	if made.Commit != second || made.OwnBench || says != "today's second" {
		t.Errorf("%+v says %q", made, says)
	}
	made, says = r.make(first[:10])
	if made.Commit != first || made.Name != first[:10] || !made.OwnBench || says != "own first" {
		t.Errorf("%+v says %q", made, says)
	}
	if status := r.git("status", "--porcelain"); strings.Count(status, "\n") != 1 {
		t.Errorf("the repository was changed:\n%s", status)
	}
}

// What cannot be built is an error that says why, and leaves no work tree.
func TestMakeFails(t *testing.T) {
	r := newRepository(t)
	r.write("product.go", "package product\n")
	r.write("bench/main.go", bench("own", "Missing"))
	r.commit("broken")
	for name, says := range map[string]string{"HEAD": "neither", "nosuch": "no commit"} {
		_, err := commit.Make(t.Context(), filepath.Join(r.dir, "bench"), ".", name, t.TempDir())
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q in it", name, err, says)
		}
	}
	if trees := strings.Count(r.git("worktree", "list", "--porcelain"), "worktree "); trees != 1 {
		t.Errorf("%d work trees are there", trees)
	}
}

// The working tree is this program.
func TestWorkingTree(t *testing.T) {
	made, err := commit.Make(t.Context(), t.TempDir(), ".", commit.WorkingTree, t.TempDir())
	if err != nil || made.Binary != "" || made.Commit != "" {
		t.Errorf("%+v, %v", made, err)
	}
}
