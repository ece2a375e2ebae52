//go:build unix

package operate

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
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
			upstream := harness.ProcNewUpstream(t)
			site := harness.ProcNewSite(t, upstream.Addr)
			site.Global = "log default {\n level " + level + "\n }"
			gateway := site.Start(t)
			logs := []*harness.ProcLog{gateway.Log}

			respond := func(size int) harness.ProcScript {
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
			call := func(n int, ask int) harness.ProcCall {
				return harness.ProcCall{
					Id: fmt.Sprint(secretID, "-", n), Path: "/" + secretPath,
					Body:   strings.Repeat(secretAsk+" ", 1+ask/len(secretAsk)),
					Header: map[string]string{"X-Api-Key": harness.ProcCredential, "Workflow-Id": secretFlow, "Content-Type": "text/plain"},
				}
			}
			shapes := []struct {
				ask    int // bytes of the request
				script harness.ProcScript
			}{
				{10, respond(10)},      // the answer stands in the record
				{10, respond(5000)},    // beside it
				{10, respond(700_000)}, // in pieces
				{3 << 20, respond(10)}, // the request was kept in a file
				{10, torn},             // in doubt
				{10, func(http.ResponseWriter, *http.Request, int) { panic(http.ErrAbortHandler) }},
			}
			send := func() {
				client := harness.ProcDial()
				defer client.CloseIdleConnections()
				for n, shape := range shapes {
					c := call(n, shape.ask)
					for range 2 { // a repeat finds the record
						_, _ = harness.ProcPost(t.Context(), client, site.Addr, c) // torn answers are errors
					}
					c.Body += "another" // 422
					if a := gateway.Post(t, c); a.Problem() != "fingerprint-mismatch" {
						t.Errorf("%v", a)
					}
				}
			}
			for n, shape := range shapes {
				upstream.Script(call(n, 0).Id, shape.script)
			}
			send()
			if got := upstream.Total(); got != len(shapes) {
				t.Fatalf("%d executions, not %d", got, len(shapes))
			}

			secrets := []string{secretID, secretAsk, secretAnswer, secretPath, secretFlow, harness.ProcCredential}
			check := func(when string) {
				t.Helper()
				harness.ProcSearch(t, when, site.Dir, secrets)
				for _, log := range logs {
					for line := range strings.Lines(log.String()) {
						// At DEBUG Caddy itself logs the requests that it forwards.
						if level == "INFO" || procOwnLine.MatchString(line) {
							harness.ProcFind(t, when+": the log", []byte(line), secrets)
						}
					}
				}
			}
			check("running")
			for _, path := range []string{"/metrics", "/config/"} {
				_, text, err := gateway.Admin("GET", path, "", "")
				if err != nil {
					t.Fatal(err)
				}
				harness.ProcFind(t, path, []byte(text), secrets)
			}

			hold := upstream.Hold(t, call(100, 0).Id)
			gateway.Begin(t.Context(), harness.ProcDial(), call(100, 3<<20))
			harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
			check("a large request is under way")
			gateway.Kill()
			check("killed")
			gateway = site.Start(t)
			logs = append(logs, gateway.Log)
			send()
			check("started again")
			gateway.End(t)
			check("ended")
			if level == "DEBUG" && !gateway.Log.Says("guarded call refused") {
				t.Error("the guard has logged nothing that could tell")
			}
		})
	}
}

// procOwnLine is a line that the guard has logged.
var procOwnLine = regexp.MustCompile(`"logger":"[^"]*agent_guard`)
