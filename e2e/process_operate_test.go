//go:build unix

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// procOutput is what a command has said.
type procOutput struct {
	out, err string
	code     int
}

// operate runs `caddy agent-guard` at the gateway's admin endpoint.
func (s *procSite) operate(t *testing.T, args ...string) procOutput {
	t.Helper()
	return procRun(t, s.operator(t, args...))
}

func (s *procSite) operator(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := s.command(t.Context(), "command", append([]string{"agent-guard"}, args...)...)
	cmd.Env = append(cmd.Env, "CADDY_ADMIN="+s.admin, "USER=ada")
	return cmd
}

func procRun(t *testing.T, cmd *exec.Cmd) procOutput {
	t.Helper()
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	failed := cmd.Run()
	if exit := (*exec.ExitError)(nil); failed != nil && !errors.As(failed, &exit) {
		t.Fatal(failed)
	}
	return procOutput{out.String(), err.String(), cmd.ProcessState.ExitCode()}
}

// says fails unless the command succeeded, and returns what it printed.
func (o procOutput) says(t *testing.T) string {
	t.Helper()
	if o.code != 0 {
		t.Fatalf("exit code %d: %s", o.code, o.err)
	}
	return o.out
}

// fails fails unless the command ended with 1 and these words on stderr.
func (o procOutput) fails(t *testing.T, words ...string) {
	t.Helper()
	if o.code != 1 || o.out != "" {
		t.Errorf("exit code %d, output %q", o.code, o.out)
	}
	for _, w := range words {
		if !strings.Contains(o.err, w) {
			t.Errorf("%q is not in\n%s", w, o.err)
		}
	}
}

// procDocument reads what was printed as one JSON document.
func procDocument[T any](t *testing.T, text string) (v T) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	if err := decoder.Decode(&v); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if decoder.More() {
		t.Fatalf("more than one document:\n%s", text)
	}
	return v
}

// procExecution is what tests read of an execution.
type procExecution struct {
	Key, State, Detail, Cause, Action, Workflow, Caller string
	ExecutionID                                         string `json:"execution_id"`
	Resolutions                                         []struct {
		Applied          bool
		Operator, Reason string
	}
}

type procPage struct {
	Executions []procExecution
	Next       string
}

// procChanging is what differs from run to run: keys, hashes, times and ages.
var procChanging = regexp.MustCompile(`\b[0-9a-f]{8,64}\b|\b\d{4}-\d\d-\d\dT[0-9:]+Z|\b\d+[smh]\b *|127\.0\.0\.1:\d+`)

// procGolden compares what a command has printed with a file.
func procGolden(t *testing.T, name, text string) {
	t.Helper()
	text = procChanging.ReplaceAllStringFunc(text, func(s string) string {
		switch {
		case strings.Contains(s, "T") && strings.HasSuffix(s, "Z"):
			return "TIME"
		case strings.Contains(s, ":"):
			return "HOST"
		case len(s) >= 8:
			return strings.Repeat("f", len(s))
		default:
			return "AGE "
		}
	})
	file := filepath.Join("testdata", "operate", name+".golden")
	if *updateGolden {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, text, want)
	}
}

// procLost is an upstream that acts, and whose answer is lost.
func procLost(http.ResponseWriter, *http.Request, int) { panic(http.ErrAbortHandler) }

// doubtful makes a call that goes into doubt, and returns its key.
func (g *procGateway) doubtful(t *testing.T, upstream *procUpstream, c procCall) string {
	t.Helper()
	upstream.script(c.id, procLost)
	if a := g.post(t, c); a.problem() != "in-doubt" && a.status != http.StatusBadGateway {
		t.Fatalf("%v", a)
	}
	page := procDocument[procPage](t, g.site.operate(t, "executions", "list", "-o", "json").says(t))
	for _, x := range page.Executions {
		if x.ExecutionID == c.id && x.State == "in_doubt" {
			return x.Key
		}
	}
	t.Fatalf("%s is not in doubt: %+v", c.id, page)
	return ""
}

// Section "CLI": executions in every form, from a real server.
func TestGoldenProcessOperate(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.admin = "unix/" + site.path("admin")
	site.app = "quota {\n open_executions 200\n stored_bytes 1GiB\n }"
	site.guard = "action charge {\n match path /v1/charges\n }\n action mail {\n match path /v1/mail*\n }"
	gateway := site.start(t)
	list := func(args ...string) procOutput {
		t.Helper()
		return site.operate(t, append([]string{"executions", "list"}, args...)...)
	}
	if got := list(); got.says(t) != "" || got.err != "no executions\n" {
		t.Errorf("an empty store: %q %q", got.out, got.err)
	}
	if got := list("-o", "json").says(t); got != "{\"executions\":[]}\n" {
		t.Errorf("an empty store: %q", got)
	}

	gateway.post(t, procCall{id: "done"})
	doubt := gateway.doubtful(t, upstream, procCall{id: "lost", path: "/v1/mail/7", header: map[string]string{"Workflow-Id": "w-1"}})
	hold := upstream.hold(t, "running")
	running := gateway.begin(t.Context(), procDial(), procCall{id: "running"})
	waitWithin(t, procBound, hold.arrived, "arrival")

	procGolden(t, "list", list().says(t))
	procGolden(t, "show_doubt", site.operate(t, "executions", "show", doubt[:16]).says(t))
	all := procDocument[procPage](t, list("--output", "json").says(t))
	if len(all.Executions) != 3 || all.Next != "" {
		t.Fatalf("%+v", all)
	}
	states := func(p procPage) (s string) {
		for _, x := range p.Executions {
			s += x.State + " "
		}
		return s
	}
	if got := states(all); got != "running in_doubt completed " {
		t.Errorf("in the order %s", got)
	}
	for filter, want := range map[string]string{
		"--state in_doubt,completed":                "in_doubt completed ",
		"--workflow w-1":                            "in_doubt ",
		"--caller " + all.Executions[0].Caller:      "running in_doubt completed ",
		"--limit 1 --all":                           "running in_doubt completed ",
		"--limit 2 --after " + procNext(t, site, 2): "completed ",
		"--config " + site.path("Caddyfile"):        "running in_doubt completed ",
		"--store " + site.path("data"):              "running in_doubt completed ",
		"--address " + site.admin + "|0200":         "running in_doubt completed ",
	} {
		got := procDocument[procPage](t, list(append(strings.Fields(filter), "-o", "json")...).says(t))
		if states(got) != want {
			t.Errorf("%s: %q, want %q", filter, states(got), want)
		}
	}
	more := list("--limit", "1")
	if lines := strings.Count(more.says(t), "\n"); lines != 2 || !strings.Contains(more.err, "There are more: --after ") {
		t.Errorf("%q %q", more.out, more.err)
	}

	// How much was written so far depends on how the commits met.
	text := regexp.MustCompile(`(?m)^(size|free|commits|records per sync|batches|writes|written)( +).*$`).
		ReplaceAllString(site.operate(t, "store", "stats").says(t), "$1${2}N")
	procGolden(t, "stats", strings.ReplaceAll(text, site.dir, "DIR"))
	stats := procDocument[struct {
		Path, Health, Node string
		Executions         map[string]struct{ Count int }
		Store              struct{ Commits, Batches int }
	}](t, site.operate(t, "store", "stats", "-o", "json").says(t))
	if stats.Path != site.path("data") || stats.Health != "ok" || stats.Executions["in_doubt"].Count != 1 ||
		stats.Executions["running"].Count != 1 || stats.Store.Commits == 0 || stats.Store.Batches < stats.Store.Commits {
		t.Errorf("%+v", stats)
	}
	for _, args := range [][]string{{}, {"executions"}, {"store"}, {"keys"}, {"executions", "resolve", "--help"}} {
		if got := site.operate(t, args...).says(t); !strings.Contains(got, "Usage:") {
			t.Errorf("%v prints no help: %s", args, got)
		}
	}
	hold.open()
	waitWithin(t, procBound, running, "the running call ends")
}

// procNext is where a listing goes on after n executions.
func procNext(t *testing.T, site *procSite, n int) string {
	t.Helper()
	page := procDocument[procPage](t, site.operate(t, "executions", "list", "-o", "json", "--limit", fmt.Sprint(n)).says(t))
	if len(page.Executions) != n || page.Next == "" {
		t.Fatalf("%+v", page)
	}
	return page.Next
}

// P1: what is in doubt is settled by an operator's word, from a terminal, and the next
// retry meets that.
func TestProcessOperatorResolves(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	body := filepath.Join(site.dir, "answer")
	if err := os.WriteFile(body, []byte("{\"id\":\"ch_1\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	resolve := func(key string, args ...string) procOutput {
		t.Helper()
		return site.operate(t, append([]string{"executions", "resolve", key, "--reason", "looked at the dashboard"}, args...)...)
	}
	show := func(key string) procExecution {
		t.Helper()
		return procDocument[procExecution](t, site.operate(t, "executions", "show", key, "-o", "json").says(t))
	}

	// It was applied, and this was its answer.
	applied := gateway.doubtful(t, upstream, procCall{id: "applied"})
	said := resolve(applied[:16], "--applied", "--status", "201", "--header", "Content-Type: application/json", "--body-file", body)
	if !strings.Contains(said.says(t), applied[:16]+": applied; retries get the given answer until ") {
		t.Errorf("%q", said.out)
	}
	a := gateway.post(t, procCall{id: "applied"})
	if !a.replayed() || a.status != http.StatusCreated || a.body != "{\"id\":\"ch_1\"}\n" || a.header.Get("Content-Type") != "application/json" {
		t.Errorf("P1: %v %v", a, a.header)
	}
	if x := show(applied); len(x.Resolutions) != 1 || x.Resolutions[0].Operator != "ada" || !x.Resolutions[0].Applied {
		t.Errorf("%+v", x)
	}
	resolve(applied, "--applied").fails(t, "the execution is not in doubt: it is completed")

	// It was applied, and its answer is gone.
	gone := gateway.doubtful(t, upstream, procCall{id: "gone"})
	if got := resolve(gone, "--applied", "--operator", "bob", "-o", "json"); procDocument[procExecution](t, got.says(t)).Detail != "result_unavailable" {
		t.Errorf("%q", got.out)
	}
	if a := gateway.post(t, procCall{id: "gone"}); a.problem() != "result-unavailable" {
		t.Errorf("P1: %v", a)
	}

	// It was not applied: the retry runs.
	const again = procTwice + "free"
	free := gateway.doubtful(t, upstream, procCall{id: again})
	resolve(free, "--not-applied").fails(t, "without a terminal to ask on, confirm it with --yes")
	wantProcDoubt(t, gateway.post(t, procCall{id: again}))
	if got := resolve(free, "--not-applied", "--yes").says(t); got != free[:16]+": not applied; its key is free, and a retry runs\n" {
		t.Errorf("%q", got)
	}
	if x := show(free[:16]); x.State != "free" || x.Key != free || x.Resolutions[0].Applied {
		t.Errorf("%+v", x)
	}
	if a := gateway.post(t, procCall{id: again}); !a.executed() {
		t.Errorf("%v", a)
	}
	resolve(free, "--not-applied", "--yes").fails(t, "the execution is not in doubt: it is completed")

	for _, want := range []string{
		`"msg":"an operator has settled an execution that was in doubt"`, `"operator":"bob"`, `"reason":"looked at the dashboard"`, `"key":"` + free[:16] + `"`,
	} {
		if !gateway.log.says(want) {
			t.Errorf("the log lacks %s", want)
		}
	}
	// P8: neither what was given as the answer, nor the call's credential, nor its id.
	procFind(t, "the log", []byte(gateway.log.String()), []string{"ch_1", procCredential, again})
	gateway.end(t)
}

// Section "CLI": what cannot be done says why, and what to do.
func TestProcessOperateRefusals(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.operate(t, "executions", "list").fails(t, "no server is reachable", "is caddy running, with its admin endpoint on?",
		"tried "+site.admin, "name another with --address")
	free := freeAddress(t)
	site.operate(t, "store", "stats", "--address", free).fails(t, "tried "+free)

	gateway := site.start(t)
	key := gateway.doubtful(t, upstream, procCall{id: "lost"})
	off := site.path("off.caddyfile")
	if err := os.WriteFile(off, []byte("{\n\tadmin off\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, words := range map[string]string{
		"executions list --config " + off:  "says `admin off`",
		"executions list --store /nowhere": "the store /nowhere is not open; open: " + site.path("data"),
		"executions list --caller abc":     "no caller's hash",
		"executions show abc":              "nor a whole checkpoint or execution id",
		"executions show 0000000000000000": "no such execution",
		"executions show a/b":              `nor a whole checkpoint or execution id, is "a/b"`,
		"executions lists":                 `unknown command "lists" for "caddy agent-guard executions"`,
		"executions resolve " + key + " --reason x --applied --status 200 --header Set-Cookie:a":     "Set-Cookie is never replayed",
		"executions resolve " + key + " --reason x --applied --operator " + strings.Repeat("a", 257): "at most 256 and 1024 bytes",
	} {
		site.operate(t, strings.Fields(args)...).fails(t, words)
	}
	if x := procDocument[procExecution](t, site.operate(t, "executions", "show", key, "-o", "json").says(t)); x.State != "in_doubt" {
		t.Errorf("P1: something was decided: %+v", x)
	}
	if log := gateway.log.String(); strings.Contains(log, `"logger":"admin.api","msg":"request error"`) {
		t.Errorf("an operator's mistake is an error of the server:\n%s", log)
	}
	// A wrong file is no alarm of tampering, for scripts either.
	const logKey = "agent-guard/node-4c1f+cda3de3b+ASBrRRDTwvvXdWCfzhaZEYwN3NHKfvmZkyiuJ1SnLcUM"
	if got := site.operate(t, "ledger", "verify", off, "--key", logKey); got.code != 2 || !strings.Contains(got.err, "off.caddyfile is no export of a ledger") {
		t.Errorf("exit code %d: %s", got.code, got.err)
	}
	// The module without a guard.
	if err := gateway.load(site.without()); err != nil {
		t.Fatal(err)
	}
	eventuallyWithin(t, procBound, "the store is closed", func() bool {
		return strings.Contains(site.operate(t, "store", "stats").err, "no store is open")
	})
}

// Section "CLI", P1: a rotation by the command; a retry after it is a replay.
func TestProcessOperatorRotatesTheKey(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	first := gateway.post(t, procCall{id: "one"})
	type status struct {
		Source, File string
		Keys         []struct {
			ID            int
			Newest, InUse bool
		}
		Resealing *struct {
			Key, Resealed int
			Done          bool
		}
	}
	before := procDocument[status](t, site.operate(t, "keys", "list", "-o", "json").says(t))
	if before.Source != "file" || before.File != site.path("data.key") || len(before.Keys) != 1 {
		t.Errorf("%+v", before)
	}
	rotated := site.operate(t, "keys", "rotate")
	if !strings.Contains(rotated.says(t), "2    seals") || !strings.Contains(rotated.err, "Copy the key file anew") {
		t.Errorf("%+v", rotated)
	}
	wantProcReplay(t, first, gateway.post(t, procCall{id: "one"}))
	eventuallyWithin(t, procBound, "everything is sealed anew", func() bool {
		now := procDocument[status](t, site.operate(t, "keys", "list", "-o", "json").says(t))
		return len(now.Keys) == 2 && now.Keys[1].Newest && now.Resealing != nil && now.Resealing.Key == 2 && now.Resealing.Done
	})
	if got := site.operate(t, "keys", "list").says(t); !strings.Contains(got, "1    unused") || !strings.Contains(got, "Re-sealing to key 2: done, ") {
		t.Errorf("%s", got)
	}
	gateway.end(t)
	gateway = site.start(t)
	wantProcReplay(t, first, gateway.post(t, procCall{id: "one"}))
	gateway.end(t)

	value := procNewSite(t, upstream.addr)
	value.app = "keys value MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
	value.start(t)
	given := value.operate(t, "keys", "rotate") // prints the new ring, and changes nothing
	ring := procDocument[struct {
		Newest  int
		Sealing []struct{ ID int }
	}](t, given.says(t))
	if ring.Newest != 2 || len(ring.Sealing) != 2 {
		t.Errorf("%+v", given)
	}
	if got := value.operate(t, "keys", "list").says(t); !strings.Contains(got, "given as a value") {
		t.Errorf("%s", got)
	}
}

// Section "Admin API": with two stores open, which one is asked must be said.
func TestProcessOperateTwoStores(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	hold := upstream.hold(t, "running")
	owner := gateway.begin(t.Context(), procDial(), procCall{id: "running"})
	waitWithin(t, procBound, hold.arrived, "arrival")
	site.store = "badger " + site.path("elsewhere")
	gateway.reload(t)
	site.operate(t, "executions", "list").fails(t, "several stores are open", site.path("data")+", "+site.path("elsewhere"))
	for store, want := range map[string]int{site.path("data"): 1, site.path("elsewhere"): 0} {
		page := procDocument[procPage](t, site.operate(t, "executions", "list", "--store", store, "-o", "json").says(t))
		if len(page.Executions) != want {
			t.Errorf("%s: %+v", store, page)
		}
	}
	hold.open()
	waitWithin(t, procBound, owner, "the call ends")
	// A look keeps no store open.
	eventuallyWithin(t, procBound, "the first store is closed", func() bool { return site.operate(t, "store", "stats").code == 0 })
}

// Section "Admin API": who may ask is decided by Caddy's admin endpoint, as for
// everything else there; the command keeps its rules.
func TestProcessAdminProtects(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	addr := site.admin
	site.raw = strings.Replace(site.config(), "admin "+addr, "admin "+addr+" {\n enforce_origin\n }", 1)
	site.start(t)
	site.operate(t, "store", "stats", "--address", addr).says(t)
	client := procDial()
	defer client.CloseIdleConnections()
	for name, change := range map[string]func(*http.Request){
		"no origin":      func(*http.Request) {},
		"another origin": func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") },
		"another host":   func(r *http.Request) { r.Host = "evil.example"; r.Header.Set("Origin", "http://"+addr) },
	} {
		for _, method := range []string{"GET", "POST"} {
			req, err := http.NewRequest(method, "http://"+addr+"/agent_guard/keys/rotate", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			change(req)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusForbidden {
				t.Errorf("%s, %s: %s", method, name, resp.Status)
			}
		}
	}
	keys := procDocument[struct{ Keys []struct{ ID int } }](t, site.operate(t, "keys", "list", "-o", "json", "--address", addr).says(t))
	if len(keys.Keys) != 1 {
		t.Errorf("somebody else has rotated the key: %+v", keys)
	}
}

// Section "CLI": the shell completes our commands, the words of flags, and keys of the
// running server.
func TestProcessOperateCompletion(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	offers := func(args ...string) []string {
		t.Helper()
		cmd := site.command(t.Context(), "command", append([]string{"__complete", "agent-guard"}, args...)...)
		cmd.Env = append(cmd.Env, "CADDY_ADMIN="+site.admin)
		var words []string
		for line := range strings.Lines(procRun(t, cmd).says(t)) {
			// Flags that are required are offered too.
			if word, _, _ := strings.Cut(strings.TrimSpace(line), "\t"); !strings.HasPrefix(word, "--") {
				words = append(words, word)
			}
		}
		return words[:len(words)-1] // the last is for the shell
	}
	for typed, want := range map[string][]string{
		"":                                   {"executions", "store", "identity"},
		"executions ":                        {"list", "resolve", "show"},
		"identity ":                          {"rotate", "show"},
		"executions list --output ":          {"table", "json"},
		"executions list -o j":               {"json"},
		"executions list --state in":         {"in_doubt"},
		"executions list --state in_doubt,c": {"in_doubt,completed"},
		"executions list --guard ":           {},
		"executions show ":                   {}, // there is no server
	} {
		parts := strings.Split(typed, " ")
		got := offers(parts...)
		for _, w := range want {
			if !slices.Contains(got, w) {
				t.Errorf("%q offers %q, not %s", typed, got, w)
			}
		}
		if len(want) == 0 && len(got) > 0 {
			t.Errorf("%q offers %q", typed, got)
		}
	}
	gateway := site.start(t)
	gateway.post(t, procCall{id: "done"})
	key := gateway.doubtful(t, upstream, procCall{id: "lost"})[:16]
	if got := offers("executions", "show", ""); len(got) != 2 || got[0] != key {
		t.Errorf("offers the keys %q", got)
	}
	if got := offers("executions", "resolve", ""); !slices.Equal(got, []string{key}) {
		t.Errorf("offers the keys %q to resolve", got)
	}
	if got := offers("executions", "resolve", key, ""); len(got) != 0 {
		t.Errorf("offers %q after the key", got)
	}
	script := site.command(t.Context(), "command", "completion", "bash")
	if out := procRun(t, script).says(t); !strings.Contains(out, "__complete") {
		t.Errorf("no script of completion:\n%s", out)
	}
}
