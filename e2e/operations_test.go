//go:build unix

package e2e

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
)

// operationsGuide is the guide for whoever is on call.
const operationsGuide = "../docs/operations.md"

var operationsBlock = regexp.MustCompile("(?s)<!-- run: (\\S+) -->\n```sh\n(.*?)```")

// operationsBench is a server, and a shell beside it in which `caddy` is the one that runs it.
type operationsBench struct {
	site     *procSite
	upstream *procUpstream
	gateway  *procGateway
	admin    string // address of the admin endpoint
	log      string // the name of the ledger
	logKey   string // and its key
	calls    int

	checkpoint, id string // of the call to be undone
}

func newOperationsBench(t *testing.T) *operationsBench {
	t.Helper()
	b := &operationsBench{upstream: procNewUpstream(t)}
	b.site = procNewSite(t, b.upstream.addr)
	b.admin = b.site.admin
	b.site.guard = "action charge {\n match path /v1/charges\n compensate POST /v1/refunds {\n json charge {execution.id}\n }\n }\n breaker {\n min_volume 1000\n }"
	b.site.app = "identity spiffe://example.com/gateway"
	b.site.raw = b.site.config()
	b.gateway = b.site.start(t)
	script := fmt.Sprintf("#!/bin/sh\n%s=command exec '%s' \"$@\"\n", procRole, os.Args[0])
	if err := os.Mkdir(b.site.path("bin"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.site.path("bin/caddy"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", b.site.path("bin/ect-tool"), "../examples/ect")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return b
}

// run runs a block as it is printed.
func (b *operationsBench) run(t *testing.T, block, key string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", block)
	cmd.Dir = b.site.dir
	cmd.Env = append(os.Environ(), "PATH="+b.site.path("bin")+":"+os.Getenv("PATH"), "USER=ada", "HOME="+b.site.dir,
		"CADDY_ADMIN="+b.admin, "ADMIN="+b.admin, "KEY="+key, "LOG_KEY="+b.logKey, "GATEWAY=http://"+b.site.addr,
		"IDENTITY="+b.site.path("data.identity"), "UPSTREAM="+b.upstream.addr,
		"CHECKPOINT="+b.checkpoint, "ID="+b.id)
	return procRun(t, cmd).says(t)
}

// doubt makes a call that goes into doubt, and returns its key as a log shows it.
func (b *operationsBench) doubt(t *testing.T) (key string, c procCall) {
	t.Helper()
	b.calls++
	c = procCall{id: fmt.Sprint(procTwice, "lost-", b.calls)}
	b.upstream.script(c.id, procLost)
	b.gateway.post(t, c)
	lines := regexp.MustCompile(`"msg":"a call is in doubt","key":"([0-9a-f]{16})"`)
	select { // the log comes through a pipe
	case <-b.gateway.log.wait(func(text []byte) bool { return len(lines.FindAll(text, -1)) >= b.calls }):
	case <-time.After(patience):
	}
	found := lines.FindAllStringSubmatch(b.gateway.log.String(), -1)
	if len(found) != b.calls {
		t.Fatalf("%d doubts are in the log, not %d", len(found), b.calls)
	}
	return found[b.calls-1][1], c
}

// knowLedger notes the name and the key of the gateway's ledger.
func (b *operationsBench) knowLedger(t *testing.T) {
	t.Helper()
	head := procDocument[struct{ Origin, Key string }](t, b.site.operate(t, "ledger", "head", "-o", "json").says(t))
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
	block("show", key, "execution id  "+call.id, "in_doubt")
	block("api", key, `"executions":[]`, `"execution_id":"`+call.id, `"health":"ok"`, `"newest":true`)
	block("applied", key, "retries get the given answer")
	if a := b.gateway.post(t, call); !a.replayed() || a.status != http.StatusCreated || a.body != `{"id":"ch_81","status":"succeeded"}` {
		t.Errorf("applied: %v", a)
	}
	block("decided", key, `"operator": "ada"`, "charge ch_81 is in the dashboard")

	key, call = b.doubt(t)
	block("gone", key, "its answer is gone")
	if a := b.gateway.post(t, call); a.problem() != "result-unavailable" {
		t.Errorf("gone: %v", a)
	}
	key, call = b.doubt(t)
	block("not-applied", key, "a retry runs")
	if a := b.gateway.post(t, call); !a.executed() {
		t.Errorf("not applied: %v", a)
	}
	var calls []procCall
	for range 3 {
		_, call := b.doubt(t)
		calls = append(calls, call)
	}
	block("many", "", "a retry runs")
	for _, call := range calls {
		if a := b.gateway.post(t, call); !a.executed() {
			t.Errorf("many: %v", a)
		}
	}
	b.id = "order-7"
	made := b.gateway.post(t, procCall{id: b.id, header: map[string]string{"Workflow-Id": "trip-7"}})
	if b.checkpoint = made.header.Get("Execution-Checkpoint"); b.checkpoint == "" {
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
	if keys, err := os.ReadFile(b.site.path("all-gateway-keys.json")); err != nil || strings.Count(string(keys), `"kid"`) != 3 || strings.Contains(string(keys), `"d"`) {
		t.Errorf("%v: %s", err, keys)
	}
	b.knowLedger(t)
	block("ledger-keep", "", b.log)
	block("ledger-check", "")
	b.doubt(t) // the log grows
	block("ledger-export", "")
	block("ledger-verify", "", "ledger.export holds.", "it has grown out of all 1 that are known", "signatures hold")
	block("ledger-list", "", "checkpoint")
	block("circuits", "", b.upstream.addr, "closed", "auto")
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
	golden, err := os.ReadFile(filepath.Join("testdata", "operate", "stats.golden"))
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
