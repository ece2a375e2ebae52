package clients

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// fileServer is an upstream that copies, takes uploads and is pushed to. It keeps what was done.
type fileServer struct {
	dir     string // of Git's repositories
	backend string // `git http-backend`

	mu      sync.Mutex
	done    map[string]map[string]int // how often what was done, by cell
	uploads map[string]int            // their lengths, by path
}

func newFileServer(t *testing.T) *fileServer {
	t.Helper()
	where, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatalf("Git is needed: %v", err)
	}
	return &fileServer{
		dir: t.TempDir(), backend: filepath.Join(strings.TrimSpace(string(where)), "git-http-backend"),
		done: map[string]map[string]int{}, uploads: map[string]int{},
	}
}

// did says that something was done. The server's lock is held.
func (f *fileServer) did(r *http.Request, what string) {
	cell := r.Header.Get("X-Cell")
	if f.done[cell] == nil {
		f.done[cell] = map[string]int{}
	}
	f.done[cell][what]++
}

// s3 is CopyObject: a PUT without a body, whose source stands in the header.
func (f *fileServer) s3(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.did(r, strings.TrimPrefix(r.Header.Get("X-Amz-Copy-Source"), "bucket/"))
	w.Header().Set("Content-Type", "application/xml")
	_, _ = fmt.Fprint(w, `<CopyObjectResult><ETag>"1"</ETag><LastModified>2026-11-20T09:12:44Z</LastModified></CopyObjectResult>`)
}

// webdav is COPY, whose steps differ in Destination, and MOVE, whose steps differ in Overwrite.
func (f *fileServer) webdav(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	what := filepath.Base(r.Header.Get("Destination"))
	if r.Method == "MOVE" {
		what = map[string]string{"T": "a", "F": "b"}[r.Header.Get("Overwrite")]
	}
	f.did(r, what)
	w.WriteHeader(http.StatusCreated)
}

// tus takes uploads: the offset of a part stands in the header (tus 1.0.0).
func (f *fileServer) tus(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.Header().Set("Tus-Resumable", "1.0.0")
	if r.Method == http.MethodPost {
		path := fmt.Sprintf("/%d", len(f.uploads)+1)
		f.uploads[path] = 0
		w.Header().Set("Location", "tus"+path)
		w.WriteHeader(http.StatusCreated)
		return
	}
	if offset := strconv.Itoa(f.uploads[r.URL.Path]); r.Method == http.MethodPatch {
		if offset != r.Header.Get("Upload-Offset") {
			w.WriteHeader(http.StatusConflict)
			return
		}
		f.uploads[r.URL.Path] += int(r.ContentLength)
		f.did(r, offset)
	}
	w.Header().Set("Upload-Offset", strconv.Itoa(f.uploads[r.URL.Path]))
	w.Header().Set("Upload-Length", "12")
	w.Header().Set("Cache-Control", "no-store")
	if r.Method == http.MethodPatch {
		w.WriteHeader(http.StatusNoContent)
	}
}

// git is Git's own server, with a repository for each cell. What was done is what its branch went through.
func (f *fileServer) git(w http.ResponseWriter, r *http.Request) {
	root := filepath.Join(f.dir, plainName(r.Header.Get("X-Cell")))
	f.mu.Lock()
	if _, err := os.Stat(root); err != nil {
		if out, err := exec.Command("git", "-c", "init.defaultBranch=main", "init", "--bare", filepath.Join(root, "repo.git")).CombinedOutput(); err != nil {
			f.mu.Unlock()
			http.Error(w, string(out), http.StatusInternalServerError)
			return
		}
	}
	f.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil // CGI wants a length
	(&cgi.Handler{
		Path: f.backend, Dir: root,
		Env: []string{
			"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=agent",
			"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=core.logAllRefUpdates", "GIT_CONFIG_VALUE_0=always",
		},
	}).ServeHTTP(w, r)
	log, _ := os.ReadFile(filepath.Join(root, "repo.git", "logs", "refs", "heads", "main"))
	f.mu.Lock()
	f.done[r.Header.Get("X-Cell")] = map[string]int{"push": strings.Count(string(log), "\n")}
	f.mu.Unlock()
}

func plainName(name string) string { return regexp.MustCompile(`\W+`).ReplaceAllString(name, "-") }

// large is a step of Git that is pushed in chunks, after a request that is empty: four bytes.
const large = "large"

// callGit commits for each step, and pushes. A push that fails is made again, as by a program.
func callGit(t *testing.T, a task) sight {
	dir := t.TempDir()
	git := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0", "LC_ALL=C",
			"GIT_AUTHOR_NAME=agent", "GIT_AUTHOR_EMAIL=agent@example.com", "GIT_COMMITTER_NAME=agent", "GIT_COMMITTER_EMAIL=agent@example.com")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := git("init"); err != nil {
		return sight{Seen: out}
	}
	var log []string
	for _, step := range a.Steps {
		content, push := make([]byte, 16), []string{"-c", "http.extraHeader=Authorization: Bearer " + a.Key}
		if step == large {
			content, push = make([]byte, 100_000), append(push, "-c", "http.postBuffer=1") // raised to 65,520
		}
		push = append(push, "push", a.Base+"/git/repo.git", "HEAD:refs/heads/main")
		_, _ = rand.Read(content)
		if err := os.WriteFile(filepath.Join(dir, "file"), content, 0o600); err != nil {
			return sight{Seen: err.Error()}
		}
		for _, args := range [][]string{{"add", "file"}, {"commit", "-m", step}} {
			if out, err := git(args...); err != nil {
				return sight{Seen: out}
			}
		}
		for tried := 0; ; tried++ {
			out, err := git(push...)
			if err == nil {
				log = append(log, "succeeds")
				break
			}
			if tried == a.Retries {
				log = append(log, strings.TrimSpace("fails "+regexp.MustCompile(`HTTP \d+`).FindString(out)))
				break
			}
			<-time.After(time.Second)
		}
	}
	return sight{OK: true, ID: strings.Join(log, "; ")}
}

// fileClient is a program that says in header fields what it does, or, as Git does, in the body.
type fileClient struct {
	title string
	name  string
	site  string
	// blind says that nothing tells its retry from a second call that is meant.
	blind bool
	meant func(steps []string) map[string]int
	call  func(*testing.T, task) sight
}

type fileRow struct {
	title string
	do    []deed
	way   accident
	steps []string
	only  []string // the clients that have this row; all if empty
	site  string   // of the gateway, where that is not the client's
	lost  bool     // the guard cannot make up for it, and says so
}

var fileRows = []fileRow{
	{title: "all is well", steps: []string{"a"}},
	{title: "the same call twice, both meant", steps: []string{"a", "a"}, only: []string{"s3", "webdav copy", "webdav move", "tus"}},
	{title: "two different calls, both meant", steps: []string{"a", "b"}, only: []string{"s3", "webdav copy", "webdav move", "git"}},
	{title: "a large push", steps: []string{large}, only: []string{"git"}},
	{title: "a large push, the answer to its empty first request lost", steps: []string{large}, only: []string{"git"}, do: []deed{drops}},
	{title: "the connection breaks while the call runs", steps: []string{"a"}, do: []deed{holds}, way: cuts},
	{title: "answer lost between upstream and gateway", steps: []string{"a"}, do: []deed{drops}},
	{title: "the same, and then the other call", steps: []string{"a", "b"}, do: []deed{drops}},
	{title: taken, steps: []string{"a"}, way: loses},
	{title: "connection lost before the upstream executes the call", steps: []string{"a"}, do: []deed{swallows}, lost: true},
	{title: "the same, with `on_unknown retry`", steps: []string{"a"}, do: []deed{swallows}, only: []string{"tus", "git"}, site: "again"},
}

// has says whether a client has the row.
func (r fileRow) has(c fileClient) bool { return len(r.only) == 0 || slices.Contains(r.only, c.name) }

// Calls that differ in a header field alone, or in the bytes of a push, are calls of their own, also while
// an equal one is in doubt, and a retry is not executed twice.
func TestFiles(t *testing.T) {
	f := newFileServer(t)
	s := &agentSite{servers: map[string]http.Handler{
		"s3": http.HandlerFunc(f.s3), "webdav": http.HandlerFunc(f.webdav), "tus": http.HandlerFunc(f.tus), "git": http.HandlerFunc(f.git),
	}}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	g := newAgentGateway(t, s.Listener.Addr().String())
	node := startNode(t)
	each := func(steps []string) map[string]int {
		meant := map[string]int{}
		for _, step := range steps {
			meant[step]++
		}
		return meant
	}
	parts := func(steps []string) map[string]int {
		return map[string]int{"0": len(steps), "4": len(steps), "8": len(steps)}
	}
	pushes := func(steps []string) map[string]int { return map[string]int{"push": len(steps)} }
	clients := []fileClient{
		{title: "CopyObject of @aws-sdk/client-s3 3.1175.0, from two sources", name: "s3", site: "signed", meant: each, call: node.call},
		{title: "COPY of webdav 5.11.0, to two destinations", name: "webdav copy", site: "files", blind: true, meant: each, call: node.call},
		{title: "MOVE of webdav 5.11.0, with `Overwrite` T and F", name: "webdav move", site: "files", blind: true, meant: each, call: node.call},
		{title: "tus-js-client 4.3.1, uploads of three equal parts", name: "tus", site: "files", meant: parts, call: node.call},
		{title: "`git push`", name: "git", site: "files", meant: pushes, call: callGit},
	}
	var mu sync.Mutex
	cells := map[string]string{}
	var all sync.WaitGroup
	places := make(chan struct{}, 12)
	for _, r := range fileRows {
		for _, c := range clients {
			if !r.has(c) {
				continue
			}
			for _, site := range []string{"bare", "guard"} {
				cell := newAgentCell(r.way, r.do...)
				cell.name = fmt.Sprint(c.name, "/", r.title, "/", site)
				through := site
				if site == "guard" {
					through = c.site
					if r.site != "" {
						through = r.site
					}
				}
				base := s.line(t, g, cell, through)
				all.Go(func() {
					places <- struct{}{}
					defer func() { <-places }()
					seen := c.call(t, task{Client: c.name, Base: base, Key: plainName(cell.name), Retries: retries, Steps: r.steps})
					cell.release()
					cell.settled(t)
					f.mu.Lock()
					done, effects := maps.Clone(f.done[cell.name]), 0
					f.mu.Unlock()
					for _, n := range done {
						effects += n
					}
					if !seen.OK {
						t.Errorf("%s: %s", cell.name, seen.Seen)
					}
					if site == "guard" {
						c.judge(t, r, cell.name, seen.ID, done)
					}
					cell.mu.Lock()
					tries := cell.tries
					cell.mu.Unlock()
					mu.Lock()
					cells[cell.name] = fmt.Sprintf("%d | %d | %s", effects, tries, seen.ID)
					mu.Unlock()
				})
			}
		}
	}
	all.Wait()
	var text strings.Builder
	for _, c := range clients {
		fmt.Fprintf(&text, "\n### %s\n\n| | effects | tries | the program | bare proxy: effects | tries | the program |\n|---|---|---|---|---|---|---|\n", c.title)
		for _, r := range fileRows {
			if r.has(c) {
				name := fmt.Sprint(c.name, "/", r.title, "/")
				fmt.Fprintf(&text, "| %s | %s | %s |\n", r.title, cells[name+"guard"], cells[name+"bare"])
			}
		}
	}
	if t.Failed() && !*write {
		t.Log(text.String())
		return
	}
	compare(t, "files", text.String()+"\n")
}

// judge says whether what was meant was done, once, behind the guard.
func (c fileClient) judge(t *testing.T, r fileRow, cell, seen string, done map[string]int) {
	t.Helper()
	meant := c.meant(r.steps)
	switch {
	case r.lost:
		if done["push"]+done["a"]+done["0"] > 0 || strings.Contains(seen, "succeeds") {
			t.Errorf("%s: %v was done, and the program sees %q", cell, done, seen)
		}
	case c.blind && r.way == loses:
		if done["a"] != 2 {
			t.Errorf("%s: %v was done: is it known for a retry now?", cell, done)
		}
	case !maps.Equal(done, meant):
		t.Errorf("%s: %v was done, where %v was meant; the program sees %q", cell, done, meant, seen)
	}
}
