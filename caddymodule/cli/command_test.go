package cli

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// run runs `caddy agent-guard` in this process.
func run(t *testing.T, args ...string) (out, diagnostics string, err error) {
	t.Helper()
	return runWith(t, "", args...)
}

// runWith runs it with something on its standard input.
func runWith(t *testing.T, stdin string, args ...string) (out, diagnostics string, err error) {
	t.Helper()
	command := Command()
	cmd := &cobra.Command{Use: command.Name, Short: command.Short, Long: command.Long}
	command.CobraFunc(cmd)
	root := &cobra.Command{Use: "caddy", SilenceUsage: true}
	root.AddCommand(cmd)
	var stdout, stderr bytes.Buffer
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&stdout)
	root.SetErr(&stderr)
	root.SetArgs(append([]string{"agent-guard"}, args...))
	err = root.ExecuteContext(t.Context())
	return stdout.String(), stderr.String(), err
}

// says runs a command that must succeed.
func says(t *testing.T, args ...string) string {
	t.Helper()
	out, _, err := run(t, args...)
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	return out
}

// document reads what a command prints as one JSON document.
func document[T any](t *testing.T, args ...string) (v T) {
	t.Helper()
	text := says(t, append(args, "-o", "json")...)
	decoder := json.NewDecoder(strings.NewReader(text))
	if err := decoder.Decode(&v); err != nil || decoder.More() {
		t.Fatalf("%q: %v in %s", args, err, text)
	}
	return v
}

// put writes a file.
func put(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// refuses fails unless the command fails with these words, before it prints anything.
func refuses(t *testing.T, words string, args ...string) {
	t.Helper()
	out, _, err := run(t, args...)
	if err == nil || !strings.Contains(err.Error(), words) || out != "" {
		t.Errorf("%q: %v, want ...%s\n%s", args, err, words, out)
	}
}

// adminServer answers as the admin API does, and records what it was asked.
type adminServer struct {
	address string
	asked   []string // "METHOD URL body"
	last    *http.Request
}

// newAdminServer serves answers: bytes unchanged, anything else as JSON.
func newAdminServer(t *testing.T, answer func(*http.Request) any) *adminServer {
	t.Helper()
	s := new(adminServer)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.asked, s.last = append(s.asked, r.Method+" "+r.URL.String()+" "+string(body)), r
		w.Header().Set(admin.Mark, "1")
		switch answer := answer(r).(type) {
		case string:
			_, _ = io.WriteString(w, answer)
		default:
			_ = json.NewEncoder(w).Encode(answer)
		}
	}))
	t.Cleanup(server.Close)
	s.address = server.Listener.Addr().String()
	return s
}

// run runs a command against the server, and forgets what was asked before.
func (s *adminServer) run(t *testing.T, args ...string) (out, diagnostics string, err error) {
	t.Helper()
	s.asked = nil
	return run(t, append(args, "--address", s.address)...)
}

// Commands, flags and their help stay what scripts and people know.
func TestGoldenHelp(t *testing.T) {
	command := Command()
	cmd := &cobra.Command{Use: command.Name, Short: command.Short, Long: command.Long}
	command.CobraFunc(cmd)
	var help strings.Builder
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		c.InitDefaultHelpFlag()
		help.WriteString("# " + c.CommandPath() + "\n" + c.Long + "\n\n" + c.UsageString() + "\n")
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(cmd)
	golden(t, "help", strings.ReplaceAll(help.String(), caddy.DefaultAdminListen, "localhost:2019"))
}

// Section "CLI": every flag of a listing reaches the server.
func TestListAsks(t *testing.T) {
	server := newAdminServer(t, func(*http.Request) any { return `{"executions": []}` })
	for args, want := range map[string]string{
		"":                                 "limit=50",
		"--state in_doubt,completed":       "limit=50&state=in_doubt&state=completed",
		"--state running --state free":     "",
		"--state in_doubt --state running": "limit=50&state=in_doubt&state=running",
		"--guard g --action a":             "action=a&guard=g&limit=50",
		"--method PUT --workflow w":        "limit=50&method=PUT&workflow=w",
		"--id order-7 --undos without":     "id=order-7&limit=50&undos=without",
		"--checkpoint " + checkpointID:     "checkpoint=" + checkpointID + "&limit=50",
		"--caller 00ff":                    "caller=00ff&limit=50",
		"--older-than 10m":                 "limit=50&min_age=10m",
		"--newer-than 2d":                  "limit=50&max_age=2d",
		"--limit 7 --after x":              "after=x&limit=7",
		"--limit 5000":                     "limit=1000",
		"--all --limit 20":                 "limit=20",
		"--store /data/one":                "limit=50&store=%2Fdata%2Fone",
	} {
		_, _, err := server.run(t, append([]string{"executions", "list"}, strings.Fields(args)...)...)
		if want == "" {
			if err == nil {
				t.Errorf("%s is accepted", args)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", args, err)
			continue
		}
		if got := server.last.URL; got.Path != "/agent_guard/executions" || got.Query().Encode() != want {
			t.Errorf("%s asks for %s, want %s", args, got, want)
		}
	}
	if origin := server.last.Header.Get("Origin"); origin != "http://"+server.address {
		t.Errorf("origin %q", origin)
	}
}

// Section "CLI": pages are followed until as many as were asked for are there; a page
// with none is not the last one.
func TestListFollowsPages(t *testing.T) {
	pages := map[string]string{
		"":  `{"executions": [{"key": "a"}, {"key": "b"}], "next": "1"}`,
		"1": `{"executions": [], "next": "2"}`,
		"2": `{"executions": [{"key": "c"}], "next": "3"}`,
		"3": `{"executions": [{"key": "d"}]}`,
	}
	var limits []string
	server := newAdminServer(t, func(r *http.Request) any {
		limits = append(limits, r.URL.Query().Get("limit"))
		return pages[r.URL.Query().Get("after")]
	})
	list := func(args ...string) (string, string) {
		t.Helper()
		limits = nil
		out, diagnostics, err := server.run(t, append([]string{"executions", "list"}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return strings.ReplaceAll(out, "\n", ""), diagnostics
	}
	if out, _ := list("-o", "json", "--limit", "3"); out != `{"executions":[  {"key": "a"},  {"key": "b"},  {"key": "c"}],"next":"3"}` || strings.Join(limits, " ") != "3 1 1" {
		t.Errorf("%s, asked for %v", out, limits)
	}
	if out, _ := list("-o", "json", "--all", "--limit", "2"); !strings.HasSuffix(out, `{"key": "d"}]}`) || strings.Join(limits, " ") != "2 2 2 2" {
		t.Errorf("%s, asked for %v", out, limits)
	}
	if _, hint := list("--limit", "2"); hint != "There are more: --after 1 goes on, --all lists all.\n" {
		t.Errorf("%q", hint)
	}
	if out, hint := list("--all"); hint != "" || strings.Count(out, "KEY") != 1 {
		t.Errorf("%q %q", out, hint)
	}
}

// Section "CLI": what is asked wrongly is refused before anybody is asked.
func TestWrongFlags(t *testing.T) {
	dir := t.TempDir()
	off := filepath.Join(dir, "off.json")
	if err := os.WriteFile(off, []byte(`{"admin": {"disabled": true}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, maxBody+1), 0o600); err != nil {
		t.Fatal(err)
	}
	resolve := func(args string) []string {
		return append([]string{"executions", "resolve", "abcd", "--reason", "x"}, strings.Fields(args)...)
	}
	for _, c := range []struct {
		words string
		args  []string
	}{
		{"says `admin off`", []string{"executions", "list", "--config", off}},
		{"no such file", []string{"executions", "list", "--config", filepath.Join(dir, "none")}},
		{"--adapter goes with --config", []string{"store", "stats", "--adapter", "caddyfile"}},
		{"is no address of an admin endpoint", []string{"store", "stats", "--address", ":1-9"}},
		{"use table or json", []string{"keys", "list", "--output", "xml"}},
		{"use running, completed, in_doubt or rolled_back", []string{"executions", "list", "--state", "doubtful"}},
		{`for "--older-than" flag: "soon" is no duration; write one like 10m, 4h or 2d`, []string{"executions", "list", "--older-than", "soon"}},
		{`for "--newer-than" flag: "-1h" is no duration`, []string{"executions", "list", "--newer-than=-1h"}},
		{"--limit must be at least 1", []string{"executions", "list", "--limit", "0"}},
		{"`caddy agent-guard executions list` takes no arguments, and \"more\" is one", []string{"executions", "list", "more"}},
		{"`caddy agent-guard keys rotate` takes no arguments", []string{"keys", "rotate", "foo"}},
		{`unknown command "lists" for "caddy agent-guard executions"`, []string{"executions", "lists"}},
		{`unknown command "nothing" for "caddy agent-guard"`, []string{"nothing"}},
		{"give a KEY; `executions list` shows them", []string{"executions", "show"}},
		{"give one KEY; there are 2", []string{"executions", "show", "a", "b"}},
		{"give --reason with what you have found out", []string{"executions", "resolve", "abcd", "--applied"}},
		{"give --applied or --not-applied, and --reason", []string{"executions", "resolve", "abcd"}},
		{"give --applied or --not-applied", resolve("")},
		{"give --applied or --not-applied, and not both", resolve("--applied --not-applied")},
		{"give --body or --body-file", resolve("--applied --status 200 --body a --body-file b")},
		{"--body needs the --status of the answer", resolve("--applied --body y")},
		{"--header needs the --status of the answer", resolve("--applied --header a:b")},
		{"--body-file needs the --status of the answer", resolve("--applied --body-file y")},
		{"write it as 'Name: value'", resolve("--applied --status 200 --header X")},
		{"no such file", resolve("--applied --status 200 --body-file " + filepath.Join(dir, "none"))},
		{"more than 256 KiB", resolve("--applied --status 200 --body-file " + large)},
		{"--not-applied takes no answer", resolve("--not-applied --yes --status 200")},
	} {
		refuses(t, c.words, c.args...)
	}
}

// Section "CLI": answers of something else, and no answer at all, say what to do.
func TestWrongServers(t *testing.T) {
	serve := func(handler http.HandlerFunc) string {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		return server.Listener.Addr().String()
	}
	const nobody = "127.0.0.1:1" // the system gives this port to nobody
	for words, address := range map[string]string{
		"is caddy running, with its admin endpoint on? tried " + nobody + "; name another with --address": nobody,
		"knows no agent guard":                                   serve(http.NotFound),
		"answers something else than the agent guard does":       serve(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) }),
		"answers something else than the agent guard does; name": serve(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"status":"ok"}`)) }),
		"answers 502 Bad Gateway":                                serve(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) }),
		`"\x1b[2J"`: serve(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(400)
			_, _ = w.Write([]byte(`{"error": "\u001b[2J"}`))
		}),
		"has more than 16777216 bytes": serve(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(admin.Mark, "1")
			_, _ = w.Write(make([]byte, 17<<20))
		}),
	} {
		refuses(t, words, "store", "stats", "--address", address)
	}
}

// Section "CLI": the admin endpoint is the one of the configuration, Unix sockets with
// their mode included.
func TestFindAddress(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "caddy.json")
	t.Setenv("AGENT_GUARD_TEST_ADMIN", "localhost:2020")
	for listen, want := range map[string]string{
		`{"admin": {"listen": "unix//run/admin.sock|0220"}}`:    "unix//run/admin.sock|0220",
		`{"admin": {"listen": "{env.AGENT_GUARD_TEST_ADMIN}"}}`: "localhost:2020",
		`{"admin": {"listen": "localhost:2021"}, "apps": {}}`:   "localhost:2021",
		`{}`: caddy.DefaultAdminListen,
	} {
		if err := os.WriteFile(config, []byte(listen), 0o600); err != nil {
			t.Fatal(err)
		}
		o := options{config: config}
		if got, err := o.findAddress(); got != want || err != nil {
			t.Errorf("%s: %q, %v", listen, got, err)
		}
	}
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(admin.Mark, "1")
		if r.Header.Get("Origin") != "" || r.Host != "127.0.0.1" {
			t.Errorf("host %q, %v", r.Host, r.Header)
		}
		_, _ = w.Write([]byte(`{"health": "ok"}`))
	})}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	for _, address := range []string{"unix/" + filepath.Join(dir, "s"), "unix/" + filepath.Join(dir, "s") + "|0200"} {
		o := options{address: address}
		if _, text, err := ask[struct{}](t.Context(), &o, question{path: "store"}); err != nil || string(text) != `{"health": "ok"}` {
			t.Errorf("%s: %s, %v", address, text, err)
		}
	}
}

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file.
func golden(t *testing.T, name, text string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
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

// What callers choose cannot give orders to an operator's terminal, nor pretend to be
// something else on it.
func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "",
		"/v1/charges?x=1":      "/v1/charges?x=1",
		"naïve 日本":             "naïve 日本",
		"\x1b[2J\x1b]0;evil\a": `"\x1b[2J\x1b]0;evil\a"`,
		"a\nb\tc\x00":          `"a\nb\tc\x00"`,
		"c1\u009b31m":          `"c1\u009b31m"`,
		"rtl\u202egnp.exe":     `"rtl\u202egnp.exe"`,
		"\xff\xfe":             `"\xff\xfe"`,
		"zero\u200bwidth":      `"zero\u200bwidth"`,
	} {
		if got := printable(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestHumanUnits(t *testing.T) {
	for seconds, want := range map[int64]string{
		0: "0s", 59: "59s", 60: "1m", 3599: "59m", 3600: "1h", 172799: "47h", 172800: "2d", 86400 * 400: "400d",
	} {
		if got := ago(seconds); got != want {
			t.Errorf("%d seconds: %s, want %s", seconds, got, want)
		}
	}
	for bytes, want := range map[uint64]string{
		0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 5 << 20: "5.0 MiB", 3 << 30: "3.0 GiB", 1 << 50: "1024.0 TiB",
	} {
		if got := size(bytes); got != want {
			t.Errorf("%d bytes: %s, want %s", bytes, got, want)
		}
	}
	now := time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)
	for want, at := range map[string]time.Time{
		"":                              {},
		"2026-11-20T13:00:00Z (1h ago)": now.Add(-time.Hour),
		"2026-11-20T14:00:30Z (in 30s)": now.Add(30 * time.Second),
		"2026-11-20T14:00:00Z (0s ago)": now,
		"2026-12-20T14:00:00Z (in 30d)": now.AddDate(0, 1, 0),
		"2026-11-20T13:59:59Z (1s ago)": now.Add(-time.Second).In(time.FixedZone("", 7200)),
	} {
		if got := moment(at, now); got != want {
			t.Errorf("%v: %q, want %q", at, got, want)
		}
	}
	if got := cut("日本語です", 3); got != "日本…" {
		t.Errorf("cut to %q", got)
	}
}

// Columns of later pages stand below those of earlier ones, where they fit.
func TestTablePages(t *testing.T) {
	var table table
	out := ""
	row := func(a, b, c string) []any { return []any{"A", a, "B", b, "C", c} }
	for _, rows := range [][][]any{{row("a", "b", "c"), row("日本語", "b", "c")}, {row("x", "long", "y")}, {row("x", "y", "z")}} {
		out += table.page(rows...)
	}
	want := "A    B  C\na    b  c\n日本語  b  c\nx    long  y\nx    y     z\n"
	if out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}
