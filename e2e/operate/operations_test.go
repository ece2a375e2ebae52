//go:build unix

package operate

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// operationsGuide is the guide for whoever is on call.
const operationsGuide = "../../docs/operations.md"

var operationsBlock = regexp.MustCompile("(?s)<!-- run: (\\S+) -->\n```sh\n(.*?)```")

// operationsBench is a server, and a shell beside it in which `caddy` is the one that runs it.
type operationsBench struct {
	site     *harness.ProcSite
	upstream *harness.ProcUpstream
	gateway  *harness.ProcGateway
	admin    string // address of the admin endpoint
	log      string // the name of the ledger
	logKey   string // and its key
	calls    int

	checkpoint, id string // of the call to be undone
}

func newOperationsBench(t *testing.T) *operationsBench {
	t.Helper()
	b := &operationsBench{upstream: harness.ProcNewUpstream(t)}
	b.site = harness.ProcNewSite(t, b.upstream.Addr)
	b.admin = b.site.Admin
	b.site.Guard = "action charge {\n match path /v1/charges\n compensate POST /v1/refunds {\n json charge {execution.id}\n }\n }\n breaker {\n min_volume 1000\n }"
	b.site.App = "identity spiffe://example.com/gateway"
	b.site.Raw = b.site.Config()
	b.gateway = b.site.Start(t)
	script := fmt.Sprintf("#!/bin/sh\n%s=command exec '%s' \"$@\"\n", harness.ProcRole, os.Args[0])
	if err := os.Mkdir(b.site.Path("bin"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.site.Path("bin/caddy"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", b.site.Path("bin/ect-tool"), "../../examples/ect")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return b
}

// run runs a block as it is printed.
func (b *operationsBench) run(t *testing.T, block, key string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", block)
	cmd.Dir = b.site.Dir
	cmd.Env = append(os.Environ(), "PATH="+b.site.Path("bin")+":"+os.Getenv("PATH"), "USER=ada", "HOME="+b.site.Dir,
		"CADDY_ADMIN="+b.admin, "ADMIN="+b.admin, "KEY="+key, "LOG_KEY="+b.logKey, "GATEWAY=http://"+b.site.Addr,
		"IDENTITY="+b.site.Path("data.identity"), "UPSTREAM="+b.upstream.Addr,
		"CHECKPOINT="+b.checkpoint, "ID="+b.id)
	return harness.ProcRun(t, cmd).Says(t)
}

// doubt makes a call that goes into doubt, and returns its key as a log shows it.
func (b *operationsBench) doubt(t *testing.T) (key string, c harness.ProcCall) {
	t.Helper()
	b.calls++
	c = harness.ProcCall{Id: fmt.Sprint(harness.ProcTwice, "lost-", b.calls)}
	b.upstream.Script(c.Id, harness.ProcLost)
	b.gateway.Post(t, c)
	lines := regexp.MustCompile(`"msg":"a call is in doubt","key":"([0-9a-f]{16})"`)
	select { // the log comes through a pipe
	case <-b.gateway.Log.Wait(func(text []byte) bool { return len(lines.FindAll(text, -1)) >= b.calls }):
	case <-time.After(harness.Patience):
	}
	found := lines.FindAllStringSubmatch(b.gateway.Log.String(), -1)
	if len(found) != b.calls {
		t.Fatalf("%d doubts are in the log, not %d", len(found), b.calls)
	}
	return found[b.calls-1][1], c
}

// knowLedger notes the name and the key of the gateway's ledger.
func (b *operationsBench) knowLedger(t *testing.T) {
	t.Helper()
	head := harness.ProcDocument[struct{ Origin, Key string }](t, b.site.Operate(t, "ledger", "head", "-o", "json").Says(t))
	b.log, b.logKey = head.Origin, head.Key
}

// The guide's commands do what it says they do, as they stand there.
func TestOperationsRun(t *testing.T) {
	guide, err := os.ReadFile(operationsGuide)
	if err != nil {
		t.Fatal(err)
	}
	blocks := map[string]string{}
	for _, b := range operationsBlock.FindAllStringSubmatch(string(guide), -1) {
		blocks[b[1]] = b[2]
	}
	if shown := strings.Count(string(guide), "```sh\n"); shown != len(blocks) {
		t.Errorf("%d commands are shown, %d have names of their own", shown, len(blocks))
	}
	b := newOperationsBench(t)
	block := func(name, key string, want ...string) {
		t.Helper()
		text, ok := blocks[name]
		if !ok {
			t.Fatalf("the guide has no block %s", name)
		}
		delete(blocks, name)
		out := b.run(t, text, key)
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: %q is not in\n%s", name, w, out)
			}
		}
	}
	key, call := b.doubt(t)
	block("find", "", key, "connection_lost")
	block("show", key, "execution id  "+call.Id, "in_doubt")
	block("api", key, `"executions":[]`, `"execution_id":"`+call.Id, `"health":"ok"`, `"newest":true`)
	block("applied", key, "retries get the given answer")
	if a := b.gateway.Post(t, call); !a.Replayed() || a.Status != http.StatusCreated || a.Body != `{"id":"ch_81","status":"succeeded"}` {
		t.Errorf("applied: %v", a)
	}
	block("decided", key, `"operator": "ada"`, "charge ch_81 is in the dashboard")

	key, call = b.doubt(t)
	block("gone", key, "its answer is gone")
	if a := b.gateway.Post(t, call); a.Problem() != "result-unavailable" {
		t.Errorf("gone: %v", a)
	}
	key, call = b.doubt(t)
	block("not-applied", key, "a retry runs")
	if a := b.gateway.Post(t, call); !a.Executed() {
		t.Errorf("not applied: %v", a)
	}
	var calls []harness.ProcCall
	for range 3 {
		_, call := b.doubt(t)
		calls = append(calls, call)
	}
	block("many", "", "a retry runs")
	for _, call := range calls {
		if a := b.gateway.Post(t, call); !a.Executed() {
			t.Errorf("many: %v", a)
		}
	}
	b.id = "order-7"
	made := b.gateway.Post(t, harness.ProcCall{Id: b.id, Header: map[string]string{"Workflow-Id": "trip-7"}})
	if b.checkpoint = made.Header.Get("Execution-Checkpoint"); b.checkpoint == "" {
		t.Fatalf("%v", made)
	}
	block("find-by", "", "execution id  order-7", "(trip-7)", "charge")
	block("rollback-plan", "", "charge POST /v1/charges", "compensate POST /v1/refunds", "(trip-7)")
	block("rollback", "", "finished, completed", "charge POST /v1/charges")
	block("rollbacks", "", "wrong price list", "operator ada")
	block("undos", "", "undo", "(undo)")
	block("running", "")
	block("nodes", "", "DIFFERS", " *")
	block("stats", "", "health", "records per sync")
	block("escalations", "")
	block("rotate", "", "2    seals")
	block("keys", "", "2    seals")
	block("agent-key", "")
	block("agent-token", "", "VERIFIED: signed with the key ", "spiffe://example.com/agent/billing")
	block("identity", "", "The gateway is spiffe://example.com/gateway", "signs")
	block("identity-rotate", "", "verifies", "signs")
	block("identity-stolen", "", "signs")
	block("identity-records", "")
	if keys, err := os.ReadFile(b.site.Path("all-gateway-keys.json")); err != nil || strings.Count(string(keys), `"kid"`) != 3 || strings.Contains(string(keys), `"d"`) {
		t.Errorf("%v: %s", err, keys)
	}
	b.knowLedger(t)
	block("ledger-keep", "", b.log)
	block("ledger-check", "")
	b.doubt(t) // the log grows
	block("ledger-export", "")
	block("ledger-verify", "", "ledger.export holds.", "it has grown out of all 1 that are known", "signatures hold")
	block("ledger-list", "", "checkpoint")
	block("circuits", "", b.upstream.Addr, "closed", "auto")
	block("circuits-set", "", "forced_open", "auto")
	for name := range blocks {
		t.Errorf("nobody has run the block %s", name)
	}
}

// The guide explains every line that `store stats` prints, and no other.
func TestOperationsExplainsStoreStats(t *testing.T) {
	guide, err := os.ReadFile(operationsGuide)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(guide), "\n## How is the store?\n")
	section, _, _ = strings.Cut(section, "\n## ")
	explained := []string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1) {
		explained = append(explained, row[1])
	}
	printed := []string{"problem"} // where there is one
	golden, err := os.ReadFile(filepath.Join("testdata", "stats.golden"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(golden)) {
		name, _, _ := strings.Cut(line, "  ")
		printed = append(printed, name)
	}
	slices.Sort(explained)
	slices.Sort(printed)
	if !slices.Equal(explained, printed) {
		t.Errorf("explained: %q\nprinted:   %q", explained, printed)
	}
}
