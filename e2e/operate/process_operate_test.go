//go:build unix

package operate

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Section "CLI": executions in every form, from a real server.
func TestGoldenProcessOperate(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Admin = "unix/" + site.Path("admin")
	site.App = "quota {\n open_executions 200\n stored_bytes 1GiB\n }"
	site.Guard = "action charge {\n match path /v1/charges\n }\n action mail {\n match path /v1/mail*\n }"
	gateway := site.Start(t)
	list := func(args ...string) harness.ProcOutput {
		t.Helper()
		return site.Operate(t, append([]string{"executions", "list"}, args...)...)
	}
	if got := list(); got.Says(t) != "" || got.Err != "no executions\n" {
		t.Errorf("an empty store: %q %q", got.Out, got.Err)
	}
	if got := list("-o", "json").Says(t); got != "{\"executions\":[]}\n" {
		t.Errorf("an empty store: %q", got)
	}

	gateway.Post(t, harness.ProcCall{Id: "done"})
	doubt := gateway.Doubtful(t, upstream, harness.ProcCall{Id: "lost", Path: "/v1/mail/7", Header: map[string]string{"Workflow-Id": "w-1"}})
	hold := upstream.Hold(t, "running")
	running := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "running"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")

	harness.ProcGolden(t, "list", list().Says(t))
	harness.ProcGolden(t, "show_doubt", site.Operate(t, "executions", "show", doubt[:16]).Says(t))
	all := harness.ProcDocument[harness.ProcPage](t, list("--output", "json").Says(t))
	if len(all.Executions) != 3 || all.Next != "" {
		t.Fatalf("%+v", all)
	}
	states := func(p harness.ProcPage) (s string) {
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
		"--config " + site.Path("Caddyfile"):        "running in_doubt completed ",
		"--store " + site.Path("data"):              "running in_doubt completed ",
		"--address " + site.Admin + "|0200":         "running in_doubt completed ",
	} {
		got := harness.ProcDocument[harness.ProcPage](t, list(append(strings.Fields(filter), "-o", "json")...).Says(t))
		if states(got) != want {
			t.Errorf("%s: %q, want %q", filter, states(got), want)
		}
	}
	more := list("--limit", "1")
	if lines := strings.Count(more.Says(t), "\n"); lines != 2 || !strings.Contains(more.Err, "There are more: --after ") {
		t.Errorf("%q %q", more.Out, more.Err)
	}

	// How much was written so far depends on how the commits met.
	text := regexp.MustCompile(`(?m)^(size|free|commits|records per sync|batches|writes|written)( +).*$`).
		ReplaceAllString(site.Operate(t, "store", "stats").Says(t), "$1${2}N")
	harness.ProcGolden(t, "stats", strings.ReplaceAll(text, site.Dir, "DIR"))
	stats := harness.ProcDocument[struct {
		Path, Health, Node string
		Executions         map[string]struct{ Count int }
		Store              struct{ Commits, Batches int }
	}](t, site.Operate(t, "store", "stats", "-o", "json").Says(t))
	if stats.Path != site.Path("data") || stats.Health != "ok" || stats.Executions["in_doubt"].Count != 1 ||
		stats.Executions["running"].Count != 1 || stats.Store.Commits == 0 || stats.Store.Batches < stats.Store.Commits {
		t.Errorf("%+v", stats)
	}
	for _, args := range [][]string{{}, {"executions"}, {"store"}, {"keys"}, {"executions", "resolve", "--help"}} {
		if got := site.Operate(t, args...).Says(t); !strings.Contains(got, "Usage:") {
			t.Errorf("%v prints no help: %s", args, got)
		}
	}
	hold.Open()
	harness.WaitWithin(t, harness.ProcBound, running, "the running call ends")
}

// procNext is where a listing goes on after n executions.
func procNext(t *testing.T, site *harness.ProcSite, n int) string {
	t.Helper()
	page := harness.ProcDocument[harness.ProcPage](t, site.Operate(t, "executions", "list", "-o", "json", "--limit", fmt.Sprint(n)).Says(t))
	if len(page.Executions) != n || page.Next == "" {
		t.Fatalf("%+v", page)
	}
	return page.Next
}

// P1: what is in doubt is settled by an operator's word, from a terminal, and the next
// retry meets that.
func TestProcessOperatorResolves(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	body := filepath.Join(site.Dir, "answer")
	if err := os.WriteFile(body, []byte("{\"id\":\"ch_1\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	resolve := func(key string, args ...string) harness.ProcOutput {
		t.Helper()
		return site.Operate(t, append([]string{"executions", "resolve", key, "--reason", "looked at the dashboard"}, args...)...)
	}
	show := func(key string) harness.ProcExecution {
		t.Helper()
		return harness.ProcDocument[harness.ProcExecution](t, site.Operate(t, "executions", "show", key, "-o", "json").Says(t))
	}

	// It was applied, and this was its answer.
	applied := gateway.Doubtful(t, upstream, harness.ProcCall{Id: "applied"})
	said := resolve(applied[:16], "--applied", "--status", "201", "--header", "Content-Type: application/json", "--body-file", body)
	if !strings.Contains(said.Says(t), applied[:16]+": applied; retries get the given answer until ") {
		t.Errorf("%q", said.Out)
	}
	a := gateway.Post(t, harness.ProcCall{Id: "applied"})
	if !a.Replayed() || a.Status != http.StatusCreated || a.Body != "{\"id\":\"ch_1\"}\n" || a.Header.Get("Content-Type") != "application/json" {
		t.Errorf("P1: %v %v", a, a.Header)
	}
	if x := show(applied); len(x.Resolutions) != 1 || x.Resolutions[0].Operator != "ada" || !x.Resolutions[0].Applied {
		t.Errorf("%+v", x)
	}
	resolve(applied, "--applied").Fails(t, "the execution is not in doubt: it is completed")

	// It was applied, and its answer is gone.
	gone := gateway.Doubtful(t, upstream, harness.ProcCall{Id: "gone"})
	if got := resolve(gone, "--applied", "--operator", "bob", "-o", "json"); harness.ProcDocument[harness.ProcExecution](t, got.Says(t)).Detail != "result_unavailable" {
		t.Errorf("%q", got.Out)
	}
	if a := gateway.Post(t, harness.ProcCall{Id: "gone"}); a.Problem() != "result-unavailable" {
		t.Errorf("P1: %v", a)
	}

	// It was not applied: the retry runs.
	const again = harness.ProcTwice + "free"
	free := gateway.Doubtful(t, upstream, harness.ProcCall{Id: again})
	resolve(free, "--not-applied").Fails(t, "without a terminal to ask on, confirm it with --yes")
	harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: again}))
	if got := resolve(free, "--not-applied", "--yes").Says(t); got != free[:16]+": not applied; its key is free, and a retry runs\n" {
		t.Errorf("%q", got)
	}
	if x := show(free[:16]); x.State != "free" || x.Key != free || x.Resolutions[0].Applied {
		t.Errorf("%+v", x)
	}
	if a := gateway.Post(t, harness.ProcCall{Id: again}); !a.Executed() {
		t.Errorf("%v", a)
	}
	resolve(free, "--not-applied", "--yes").Fails(t, "the execution is not in doubt: it is completed")

	for _, want := range []string{
		`"msg":"an operator has settled an execution that was in doubt"`, `"operator":"bob"`, `"reason":"looked at the dashboard"`, `"key":"` + free[:16] + `"`,
	} {
		if !gateway.Log.Says(want) {
			t.Errorf("the log lacks %s", want)
		}
	}
	// P8: neither what was given as the answer, nor the call's credential, nor its id.
	harness.ProcFind(t, "the log", []byte(gateway.Log.String()), []string{"ch_1", harness.ProcCredential, again})
	gateway.End(t)
}

// Section "CLI": what cannot be done says why, and what to do.
func TestProcessOperateRefusals(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Operate(t, "executions", "list").Fails(t, "no server is reachable", "is caddy running, with its admin endpoint on?",
		"tried "+site.Admin, "name another with --address")
	free := harness.FreeAddress(t)
	site.Operate(t, "store", "stats", "--address", free).Fails(t, "tried "+free)

	gateway := site.Start(t)
	key := gateway.Doubtful(t, upstream, harness.ProcCall{Id: "lost"})
	off := site.Path("off.caddyfile")
	if err := os.WriteFile(off, []byte("{\n\tadmin off\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, words := range map[string]string{
		"executions list --config " + off:  "says `admin off`",
		"executions list --store /nowhere": "the store /nowhere is not open; open: " + site.Path("data"),
		"executions list --caller abc":     "no caller's hash",
		"executions show abc":              "nor a whole checkpoint or execution id",
		"executions show 0000000000000000": "no such execution",
		"executions show a/b":              `nor a whole checkpoint or execution id, is "a/b"`,
		"executions lists":                 `unknown command "lists" for "caddy agent-guard executions"`,
		"executions resolve " + key + " --reason x --applied --status 200 --header Set-Cookie:a":     "Set-Cookie is never replayed",
		"executions resolve " + key + " --reason x --applied --operator " + strings.Repeat("a", 257): "at most 256 and 1024 bytes",
	} {
		site.Operate(t, strings.Fields(args)...).Fails(t, words)
	}
	if x := harness.ProcDocument[harness.ProcExecution](t, site.Operate(t, "executions", "show", key, "-o", "json").Says(t)); x.State != "in_doubt" {
		t.Errorf("P1: something was decided: %+v", x)
	}
	if log := gateway.Log.String(); strings.Contains(log, `"logger":"admin.api","msg":"request error"`) {
		t.Errorf("an operator's mistake is an error of the server:\n%s", log)
	}
	// A wrong file is no alarm of tampering, for scripts either.
	const logKey = "agent-guard/node-4c1f+cda3de3b+ASBrRRDTwvvXdWCfzhaZEYwN3NHKfvmZkyiuJ1SnLcUM"
	if got := site.Operate(t, "ledger", "verify", off, "--key", logKey); got.Code != 2 || !strings.Contains(got.Err, "off.caddyfile is no export of a ledger") {
		t.Errorf("exit code %d: %s", got.Code, got.Err)
	}
	// The module without a guard.
	if err := gateway.Load(site.Without()); err != nil {
		t.Fatal(err)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the store is closed", func() bool {
		return strings.Contains(site.Operate(t, "store", "stats").Err, "no store is open")
	})
}

// Section "CLI", P1: a rotation by the command; a retry after it is a replay.
func TestProcessOperatorRotatesTheKey(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})
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
	before := harness.ProcDocument[status](t, site.Operate(t, "keys", "list", "-o", "json").Says(t))
	if before.Source != "file" || before.File != site.Path("data.key") || len(before.Keys) != 1 {
		t.Errorf("%+v", before)
	}
	rotated := site.Operate(t, "keys", "rotate")
	if !strings.Contains(rotated.Says(t), "2    seals") || !strings.Contains(rotated.Err, "Copy the key file anew") {
		t.Errorf("%+v", rotated)
	}
	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "one"}))
	harness.EventuallyWithin(t, harness.ProcBound, "everything is sealed anew", func() bool {
		now := harness.ProcDocument[status](t, site.Operate(t, "keys", "list", "-o", "json").Says(t))
		return len(now.Keys) == 2 && now.Keys[1].Newest && now.Resealing != nil && now.Resealing.Key == 2 && now.Resealing.Done
	})
	if got := site.Operate(t, "keys", "list").Says(t); !strings.Contains(got, "1    unused") || !strings.Contains(got, "Re-sealing to key 2: done, ") {
		t.Errorf("%s", got)
	}
	gateway.End(t)
	gateway = site.Start(t)
	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "one"}))
	gateway.End(t)

	value := harness.ProcNewSite(t, upstream.Addr)
	value.App = "keys value MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
	value.Start(t)
	given := value.Operate(t, "keys", "rotate") // prints the new ring, and changes nothing
	ring := harness.ProcDocument[struct {
		Newest  int
		Sealing []struct{ ID int }
	}](t, given.Says(t))
	if ring.Newest != 2 || len(ring.Sealing) != 2 {
		t.Errorf("%+v", given)
	}
	if got := value.Operate(t, "keys", "list").Says(t); !strings.Contains(got, "given as a value") {
		t.Errorf("%s", got)
	}
}

// Section "Admin API": with two stores open, which one is asked must be said.
func TestProcessOperateTwoStores(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	hold := upstream.Hold(t, "running")
	owner := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "running"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	site.Store = "badger " + site.Path("elsewhere")
	gateway.Reload(t)
	site.Operate(t, "executions", "list").Fails(t, "several stores are open", site.Path("data")+", "+site.Path("elsewhere"))
	for store, want := range map[string]int{site.Path("data"): 1, site.Path("elsewhere"): 0} {
		page := harness.ProcDocument[harness.ProcPage](t, site.Operate(t, "executions", "list", "--store", store, "-o", "json").Says(t))
		if len(page.Executions) != want {
			t.Errorf("%s: %+v", store, page)
		}
	}
	hold.Open()
	harness.WaitWithin(t, harness.ProcBound, owner, "the call ends")
	// A look keeps no store open.
	harness.EventuallyWithin(t, harness.ProcBound, "the first store is closed", func() bool { return site.Operate(t, "store", "stats").Code == 0 })
}

// Section "Admin API": who may ask is decided by Caddy's admin endpoint, as for
// everything else there; the command keeps its rules.
func TestProcessAdminProtects(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	addr := site.Admin
	site.Raw = strings.Replace(site.Config(), "admin "+addr, "admin "+addr+" {\n enforce_origin\n }", 1)
	site.Start(t)
	site.Operate(t, "store", "stats", "--address", addr).Says(t)
	client := harness.ProcDial()
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
	keys := harness.ProcDocument[struct{ Keys []struct{ ID int } }](t, site.Operate(t, "keys", "list", "-o", "json", "--address", addr).Says(t))
	if len(keys.Keys) != 1 {
		t.Errorf("somebody else has rotated the key: %+v", keys)
	}
}

// Section "CLI": the shell completes our commands, the words of flags, and keys of the
// running server.
func TestProcessOperateCompletion(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	offers := func(args ...string) []string {
		t.Helper()
		cmd := site.Command(t.Context(), "command", append([]string{"__complete", "agent-guard"}, args...)...)
		cmd.Env = append(cmd.Env, "CADDY_ADMIN="+site.Admin)
		var words []string
		for line := range strings.Lines(harness.ProcRun(t, cmd).Says(t)) {
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
	gateway := site.Start(t)
	gateway.Post(t, harness.ProcCall{Id: "done"})
	key := gateway.Doubtful(t, upstream, harness.ProcCall{Id: "lost"})[:16]
	if got := offers("executions", "show", ""); len(got) != 2 || got[0] != key {
		t.Errorf("offers the keys %q", got)
	}
	if got := offers("executions", "resolve", ""); !slices.Equal(got, []string{key}) {
		t.Errorf("offers the keys %q to resolve", got)
	}
	if got := offers("executions", "resolve", key, ""); len(got) != 0 {
		t.Errorf("offers %q after the key", got)
	}
	script := site.Command(t.Context(), "command", "completion", "bash")
	if out := harness.ProcRun(t, script).Says(t); !strings.Contains(out, "__complete") {
		t.Errorf("no script of completion:\n%s", out)
	}
}
