//go:build unix

package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// P8: nothing of a caller stands in the files of the store, beside it, in temporary
// files, in a log or in a metric: neither while the gateway runs, nor after SIGKILL,
// nor after an exit.
func TestProcessSecretsStayInside(t *testing.T) {
	t.Parallel() // its gateways are processes
	const (
		secretID     = "secret-id-77c2"
		secretAsk    = "secret-request-body-18ab"
		secretAnswer = "secret-answer-body-4c0e"
		secretPath   = "secret-path-90dd"
		secretFlow   = "secret-workflow-3b11"
	)
	for _, level := range []string{"INFO", "DEBUG"} {
		t.Run(level, func(t *testing.T) {
			upstream := procNewUpstream(t)
			site := procNewSite(t, upstream.addr)
			site.global = "log default {\n level " + level + "\n }"
			gateway := site.start(t)
			logs := []*procLog{gateway.log}

			respond := func(size int) procScript {
				return func(w http.ResponseWriter, _ *http.Request, _ int) {
					w.Header().Set("X-Token", secretAnswer)
					w.WriteHeader(http.StatusCreated)
					_, _ = io.WriteString(w, strings.Repeat(secretAnswer+" ", 1+size/len(secretAnswer)))
				}
			}
			torn := func(w http.ResponseWriter, _ *http.Request, _ int) {
				w.Header().Set("Content-Length", "1000")
				_, _ = io.WriteString(w, secretAnswer)
				panic(http.ErrAbortHandler)
			}
			call := func(n int, ask int) procCall {
				return procCall{
					id: fmt.Sprint(secretID, "-", n), path: "/" + secretPath,
					body:   strings.Repeat(secretAsk+" ", 1+ask/len(secretAsk)),
					header: map[string]string{"X-Api-Key": procCredential, "Workflow-Id": secretFlow, "Content-Type": "text/plain"},
				}
			}
			shapes := []struct {
				ask    int // bytes of the request
				script procScript
			}{
				{10, respond(10)},      // the answer stands in the record
				{10, respond(5000)},    // beside it
				{10, respond(700_000)}, // in pieces
				{3 << 20, respond(10)}, // the request was kept in a file
				{10, torn},             // in doubt
				{10, func(http.ResponseWriter, *http.Request, int) { panic(http.ErrAbortHandler) }},
			}
			send := func() {
				client := procDial()
				defer client.CloseIdleConnections()
				for n, shape := range shapes {
					c := call(n, shape.ask)
					for range 2 { // a repeat finds the record
						_, _ = procPost(t.Context(), client, site.addr, c) // torn answers are errors
					}
					c.body += "another" // 422
					if a := gateway.post(t, c); a.problem() != "fingerprint-mismatch" {
						t.Errorf("%v", a)
					}
				}
			}
			for n, shape := range shapes {
				upstream.script(call(n, 0).id, shape.script)
			}
			send()
			if got := upstream.total(); got != len(shapes) {
				t.Fatalf("%d executions, not %d", got, len(shapes))
			}

			secrets := []string{secretID, secretAsk, secretAnswer, secretPath, secretFlow, procCredential}
			check := func(when string) {
				t.Helper()
				procSearch(t, when, site.dir, secrets)
				for _, log := range logs {
					for line := range strings.Lines(log.String()) {
						// At DEBUG Caddy itself logs the requests that it forwards.
						if level == "INFO" || procOwnLine.MatchString(line) {
							procFind(t, when+": the log", []byte(line), secrets)
						}
					}
				}
			}
			check("running")
			for _, path := range []string{"/metrics", "/config/"} {
				_, text, err := gateway.admin("GET", path, "", "")
				if err != nil {
					t.Fatal(err)
				}
				procFind(t, path, []byte(text), secrets)
			}

			hold := upstream.hold(t, call(100, 0).id)
			gateway.begin(t.Context(), procDial(), call(100, 3<<20))
			waitWithin(t, procBound, hold.arrived, "arrival")
			check("a large request is under way")
			gateway.kill()
			check("killed")
			gateway = site.start(t)
			logs = append(logs, gateway.log)
			send()
			check("started again")
			gateway.end(t)
			check("ended")
			if level == "DEBUG" && !gateway.log.says("guarded call refused") {
				t.Error("the guard has logged nothing that could tell")
			}
		})
	}
}

// procOwnLine is a line that the guard has logged.
var procOwnLine = regexp.MustCompile(`"logger":"[^"]*agent_guard`)

// procSearch looks for secrets in all files below a directory, and in their names.
func procSearch(t *testing.T, when, dir string, secrets []string) {
	t.Helper()
	found := false
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil // the store works meanwhile
		}
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			return nil
		}
		found = found || strings.Contains(path, "/data/")
		procFind(t, when+": "+path, append(b, path...), secrets)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if !found {
		t.Fatal("no file of the store was looked at")
	}
}

// procFind fails where a secret stands in text, plain or encoded.
func procFind(t *testing.T, where string, text []byte, secrets []string) {
	t.Helper()
	for _, secret := range secrets {
		for _, form := range []string{
			secret, hex.EncodeToString([]byte(secret)),
			strings.TrimRight(base64.StdEncoding.EncodeToString([]byte(secret)), "=")[:len(secret)],
		} {
			if i := bytes.Index(text, []byte(form)); i >= 0 {
				t.Errorf("P8: %s holds %q: ...%.200q", where, form, text[max(0, i-60):])
				break
			}
		}
	}
}
