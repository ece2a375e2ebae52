package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"
)

// conformance names the checks of MCP's conformance suite that do not come out alike behind the
// guard, with the reason.
var conformance = map[string]string{}

var runName = regexp.MustCompile(`^server-(.*)-\d{4}-\d\d-\d\dT.*$`)

// MCP's conformance suite has the same results behind the guard, told of the protocol or not, and behind
// a bare proxy as it has without any, with the server that the Go SDK is tested with.
func TestConformanceOfMCP(t *testing.T) {
	s := newAgentSite(t)
	g := newAgentGateway(t, s.Listener.Addr().String())
	port := startConformanceServer(t)
	s.servers["conformance"] = handTo(port)
	urls := map[string]string{"direct": fmt.Sprintf("http://127.0.0.1:%d/mcp", port)}
	for _, site := range []string{"bare", "mcp", "auto"} {
		cell := newAgentCell(nothing)
		cell.name = "conformance " + site
		urls[site] = s.line(t, g, cell, site) + "/conformance/mcp"
	}
	results := map[string]map[string]string{}
	for _, way := range []string{"direct", "bare", "mcp", "auto"} {
		results[way] = runSuite(t, urls[way])
	}
	if n := len(results["direct"]); n < 40 {
		t.Errorf("the suite made %d checks", n)
	}
	for check, want := range results["direct"] {
		if want != "SUCCESS" && want != "INFO" && want != "SKIPPED" {
			t.Logf("without a proxy %s is %s", check, want)
		}
		for _, way := range []string{"bare", "mcp", "auto"} {
			got, reason := results[way][check], conformance[check]
			if way == "bare" {
				reason = ""
			}
			if (got == want) != (reason == "") {
				t.Errorf("%s: %s is %q, without a proxy %q (expected: %q)", way, check, got, want, reason)
			}
		}
	}
	for _, way := range []string{"bare", "mcp", "auto"} {
		for check, got := range results[way] {
			if _, ok := results["direct"][check]; !ok {
				t.Errorf("%s: %s is %q, and is not made without a proxy", way, check, got)
			}
		}
	}
	for check := range conformance {
		if _, ok := results["direct"][check]; !ok {
			t.Errorf("there is no check %s (there are %q)", check, slices.Sorted(maps.Keys(results["direct"])))
		}
	}
}

// runSuite has all scenarios run against a server, and returns the status of each check.
func runSuite(t *testing.T, url string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	suite := exec.CommandContext(ctx, "node", "node_modules/@modelcontextprotocol/conformance/dist/index.js", "server", "--url", url, "--suite", "all", "-o", dir)
	out, err := suite.CombinedOutput()
	if ctx.Err() != nil {
		t.Fatalf("the suite does not end:\n%s", out)
	}
	if err != nil {
		t.Logf("%v:\n%s", err, out) // some check has failed; which one is compared
	}
	found := map[string]string{}
	runs, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range runs {
		name := runName.FindStringSubmatch(run.Name())
		if name == nil {
			t.Fatalf("what is %s?", run.Name())
		}
		text, err := os.ReadFile(filepath.Join(dir, run.Name(), "checks.json"))
		if err != nil {
			t.Fatal(err)
		}
		var checks []struct{ ID, Status string }
		if err := json.Unmarshal(text, &checks); err != nil {
			t.Fatal(err)
		}
		for _, c := range checks {
			key := name[1] + ": " + c.ID
			if before, ok := found[key]; !ok || before == "SUCCESS" {
				found[key] = c.Status
			}
		}
	}
	return found
}

// startConformanceServer builds and runs the server of the Go SDK's own conformance tests.
func startConformanceServer(t *testing.T) (port int) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "server")
	if out, err := exec.Command("go", "build", "-o", binary, "github.com/modelcontextprotocol/go-sdk/conformance/everything-server").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	port = freePort(t)
	server := exec.Command(binary, "-http", fmt.Sprint("127.0.0.1:", port), "-stateless=false")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	awaitServer(t, server, port)
	return port
}

// freePort is one that nothing listens on.
func freePort(t *testing.T) int {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = free.Close() }()
	return free.Addr().(*net.TCPAddr).Port
}

// awaitServer waits until a process listens, and has it killed at the end of the test.
func awaitServer(t *testing.T, process *exec.Cmd, port int) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		_ = process.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = process.Process.Kill()
		<-ended
	})
	for deadline := time.After(patience); ; {
		conn, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
		if err == nil {
			_ = conn.Close()
			return
		}
		select {
		case <-ended:
			t.Fatalf("%s has ended; run `npm ci` in e2e/clients", process.Path)
		case <-deadline:
			t.Fatalf("%s does not listen", process.Path)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
