package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/contain"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/soak"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
)

// The parts of a benchmark run in processes of this binary.
func TestMain(m *testing.M) {
	proc.Child(roles)
	os.Exit(m.Run())
}

// bench runs a command and returns its exit status and what it wrote.
func bench(t *testing.T, args ...string) (status int, out, log string) {
	t.Helper()
	var o, l bytes.Buffer
	status = run(t.Context(), args, &o, &l)
	return status, o.String(), l.String()
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args string
		want int
		says string
	}{
		{"", 2, "usage"},
		{"frobnicate", 2, "usage"},
		{"table -h", 0, "-rounds"},
		{"table -frobnicate", 2, "frobnicate"},
		{"table quickly", 2, "quickly"},
		{"table -json -markdown", 2, "not both"},
		{"table -rounds many", 2, "many"},
		{"table -rounds 0", 1, "rounds: at least 1"},
		{"table -round 1us", 1, "too short"},
		{"table -rows (", 1, "rows: "},
		{"table -keys 0", 1, "keys: at least 1"},
		{"table -sustained -1s", 1, "sustained: not negative"},
		{"table -sustained 0s -rows sustained", 1, "no row matches"},
		{"table -rows nosuch", 1, `no row matches "nosuch"`},
		{"compare .", 2, "needs OLD and NEW"},
		{"compare . . .", 2, `takes no "."`},
		{"compare -json -markdown . .", 2, "not both"},
		{"compare nosuch .", 1, "no commit"},
		{"compare -rows nosuch . .", 1, `no row matches "nosuch"`},
		{"compare -rows no-op . .", 1, `no row matches "no-op"`},
		{"store -records 0", 1, "at least 1"},
		{"store -json -markdown", 2, "not both"},
		{"rollback -checkpoints 1", 1, "checkpoints: at least 2"},
		{"rollback -json -markdown", 2, "not both"},
		{"contain -faults sleeps", 1, `faults: no "sleeps"`},
		{"contain -fault 1ms", 1, "fault: from 100ms"},
		{"contain -neighbour 0", 1, "from 1 to 200"},
		{"contain -json -markdown", 2, "not both"},
		{"soak -for 1ms", 1, "for: at least 1s"},
		{"soak -clients 0", 1, "clients: at least 1"},
		{"soak -rate -1", 1, "rate: not negative"},
		{"soak -every 1ms", 1, "every: at least 100ms"},
		{"soak -keep 1s", 1, "keep: at least 20s"},
	} {
		status, _, log := bench(t, strings.Fields(c.args)...)
		if status != c.want || !strings.Contains(log, c.says) {
			t.Errorf("%q: exit status %d, want %d, and %q in %q", c.args, status, c.want, c.says, log)
		}
	}
}

// A bar that was not reached is the exit status, where that was asked for.
func TestCheck(t *testing.T) {
	var out bytes.Buffer
	r := &table.Report{Figures: []table.Figure{{Name: "one", Value: 1, Verdict: table.AtLeast(1, 2)}}}
	if err := new(form).finish(&out, r, false); err != nil {
		t.Error(err)
	}
	if err := new(form).finish(&out, r, true); err == nil {
		t.Error("a bar was not reached, and the check says nothing")
	}
	r.Figures[0].Verdict = table.AtMost(1, 2)
	if err := new(form).finish(&out, r, true); err != nil {
		t.Error(err)
	}
}

// The whole table, with rounds that are too short to say anything.
func TestTable(t *testing.T) {
	status, out, log := bench(t, "table", "-quick", "-rounds", "1", "-round", "20ms", "-limit", "500", "-keys", "300",
		"-sustained", "20ms", "-sustained-calls", "200", "-dir", t.TempDir(), "-json")
	var report table.Report
	if err := json.Unmarshal([]byte(out), &report); status != 0 || err != nil {
		t.Fatalf("exit status %d, %v\n%s\n%s", status, err, out, log)
	}
	sustained, lines := 0, map[string]int{}
	for _, row := range report.Rows {
		lines[row.Of]++
		if strings.Contains(row.Name, "sustained") && row.Of == "req/s" {
			sustained++
		}
	}
	if sustained != 3 || lines["req/s"] != 30 || lines["cpu µs"] != 10 || lines["p99 ms"] != 1 {
		t.Errorf("%d sustained rows; all lines: %v", sustained, lines)
	}
	bars := 0
	for _, row := range report.Rows {
		if row.Ratio.Median <= 0 || row.SubjectValue <= 0 || row.ReferenceValue <= 0 {
			t.Errorf("%s @%d was not measured: %+v", row.Name, row.Conns, row)
		}
		if row.Verdict.Bar != "" {
			bars++
		}
	}
	if bars != 27 {
		t.Errorf("%d rows have a bar", bars)
	}
	figures := map[string]bool{}
	for _, f := range report.Figures {
		figures[f.Name] = f.Verdict.Bar != ""
	}
	for name, bar := range map[string]bool{
		"POST, sustained @64: calls":                                           false,
		"POST, outcome awaited @64: records per sync of the log":               true,
		"POST, outcome awaited @1: added to the middle of a bare call's times": true,
		"POST, outcome awaited @2: added to the middle of a bare call's times": false,
	} {
		if got, has := figures[name]; !has || got != bar {
			t.Errorf("%q: there %t, has a bar %t; all are %v", name, has, got, figures)
		}
	}
	if proc.Measures && !figures["POST, sustained @64: anonymous memory at the end"] {
		t.Errorf("the memory has no bar: %v", figures)
	}
	if m := report.Machine; m.Sync <= 0 || m.Growing <= 0 || m.Cores < 1 || m.FileSystem == "" {
		t.Errorf("the machine is not described: %+v", m)
	}
	if s := report.Settings; s.GOGC != "100" || s.Rounds != 1 {
		t.Errorf("the settings are not stated: %+v", s)
	}
}

// The JSON of a row has what a call costs both sides, under the names that others read.
func TestCosts(t *testing.T) {
	status, out, log := bench(t, "table", "-quick", "-rounds", "2", "-round", "20ms", "-rows", "awaited @16$", "-dir", t.TempDir(), "-json")
	var report struct {
		Rows     []map[string]any `json:"rows"`
		Settings map[string]any   `json:"settings"`
		Machine  map[string]any   `json:"machine"`
	}
	if err := json.Unmarshal([]byte(out), &report); status != 0 || err != nil || len(report.Rows) != 1 {
		t.Fatalf("exit status %d, %v, %d rows\n%s\n%s", status, err, len(report.Rows), out, log)
	}
	row := report.Rows[0]
	for _, name := range []string{"name", "conns", "subject", "reference", "of", "ratio", "subject_value", "reference_value", "verdict"} {
		if row[name] == nil {
			t.Errorf("the row has no %q: %v", name, row)
		}
	}
	members := []string{"calls", "allocs", "alloc_bytes", "collections"}
	if proc.Measures {
		members = append(members, "processor_us", "anonymous_bytes")
	}
	for _, side := range []string{"subject_cost", "reference_cost"} {
		cost, _ := row[side].(map[string]any)
		for _, name := range members {
			if cost[name] == nil {
				t.Errorf("%s has no %q: %v", side, name, cost)
			}
		}
		if cost["device_bytes"] != nil {
			t.Errorf("%s has bytes on a device, which short rounds cannot know", side)
		}
	}
	if report.Settings["keys"] == nil || report.Machine["device"] == nil {
		t.Errorf("the run is not described: %v, %v", report.Settings, report.Machine)
	}
}

// Rollbacks by one gateway and by three, of too few calls to say anything: all is undone, and the
// journals are counted.
func TestRollback(t *testing.T) {
	status, out, log := bench(t, "rollback", "-checkpoints", "5", "-dir", t.TempDir(), "-json")
	var report table.Report
	if err := json.Unmarshal([]byte(out), &report); status != 0 || err != nil {
		t.Fatalf("exit status %d, %v\n%s\n%s", status, err, out, log)
	}
	figures := map[string]float64{}
	for _, f := range report.Figures {
		figures[f.Name] = f.Value
	}
	for _, name := range []string{
		"one gateway, side by side: undone", "one gateway, one after another: the whole rollback", "one gateway, side by side, syncs",
		"three gateways, side by side: first phase", "three gateways, one after another: undone",
		"three gateways, one after another: coordinator, its journal at work", "three gateways, side by side: participant 2, batches committed",
	} {
		if figures[name] <= 0 {
			t.Errorf("%q was not measured: %v", name, figures)
		}
	}
}

// A chain of agents of which one fails, for too short a time to say much: it is measured in each chain,
// with the guard it is refused and nothing is done twice, and the ledgers say so.
func TestContain(t *testing.T) {
	status, out, log := bench(t, "contain", "-faults", "fails", "-before", "1s", "-fault", "3s", "-after", "1s", "-dir", t.TempDir(), "-json")
	var report contain.Report
	if err := json.Unmarshal([]byte(out), &report); status != 0 || err != nil || len(report.Trials) != 2 {
		t.Fatalf("exit status %d, %v, %d trials\n%s\n%s", status, err, len(report.Trials), out, log)
	}
	for _, trial := range report.Trials {
		if trial.Usual.Good == 0 || trial.Failing.Made == 0 || trial.Reached == 0 || trial.Held == 0 || trial.Items == 0 {
			t.Errorf("%s was not measured: %+v", trial.Chain, trial)
		}
		guarded := trial.Chain != contain.Bare
		if guarded != (trial.Contained != nil) || guarded && (trial.Repeated > 0 || trial.Informed["error"] == 0 || trial.Informed["circuit_breaker_open"] == 0) {
			t.Errorf("%s does not contain it: %+v", trial.Chain, trial)
		}
	}
	var text, markdown bytes.Buffer
	if err := report.Text(&text); err != nil {
		t.Fatal(err)
	}
	if err := report.Markdown(&markdown); err != nil {
		t.Fatal(err)
	}
	for _, form := range []string{text.String(), markdown.String()} {
		if !strings.Contains(form, "fails: bare") || !strings.Contains(form, "effects that came twice") {
			t.Errorf("got\n%s", form)
		}
	}
}

// Two programs take turns in one row, each with its own processes, and both their ratios
// and their costs are held against each other; sustained load too.
func TestCompare(t *testing.T) {
	status, out, log := bench(t, "compare", "-rounds", "2", "-round", "20ms", "-rows", "awaited @16$|^POST, sustained",
		"-sustained", "20ms", "-sustained-calls", "100", "-dir", t.TempDir(), "-json", ".", ".")
	var c table.Comparison
	if err := json.Unmarshal([]byte(out), &c); status != 0 || err != nil || len(c.Rows) != 2 {
		t.Fatalf("exit status %d, %v, %d rows\n%s\n%s", status, err, len(c.Rows), out, log)
	}
	for _, row := range c.Rows {
		if row.Rate.Median <= 0 || row.Old.Ratio.Median <= 0 || row.New.Ratio.Median <= 0 || row.Old.Cost.Calls == 0 || row.New.Cost.Calls == 0 {
			t.Errorf("%s was not measured: %+v", row.Name, row)
		}
		if proc.Measures && (row.Work == nil || row.Old.Cost.Work == nil || row.New.Cost.Allocs == nil) {
			t.Errorf("%s has no costs: %+v", row.Name, row)
		}
	}
	var text, markdown bytes.Buffer
	if err := c.Text(&text); err != nil {
		t.Fatal(err)
	}
	if err := c.Markdown(&markdown); err != nil {
		t.Fatal(err)
	}
	for _, form := range []string{text.String(), markdown.String()} {
		if !strings.Contains(form, "Old: ., this working tree") || strings.Count(form, "POST, sustained") != 1 {
			t.Errorf("got\n%s", form)
		}
	}
}

// Replays of a reopened store are found by calls over HTTP: what fills it makes the
// records that a gateway makes.
func TestStore(t *testing.T) {
	status, out, log := bench(t, "store", "-records", "3000", "-calls", "500", "-openings", "1", "-dir", t.TempDir())
	if status != 0 {
		t.Fatalf("exit status %d\n%s\n%s", status, out, log)
	}
	for _, figure := range []string{"B per record", "opening store and guard", "over bare, once it serves", "over bare, after calls"} {
		if !strings.Contains(out, figure) {
			t.Errorf("no %q in\n%s", figure, out)
		}
	}
}

// P1, P2: ten seconds of load with kills and reloads, and nothing is lost or done
// twice.
func TestSoak(t *testing.T) {
	status, out, log := bench(t, "soak", "-for", "10s", "-every", "2500ms", "-clients", "8", "-rate", "300", "-dir", t.TempDir(), "-json")
	var report soak.Report
	if err := json.Unmarshal([]byte(out), &report); status != 0 || err != nil {
		t.Fatalf("exit status %d, %v\n%s\n%s", status, err, out, log)
	}
	if report.Kills == 0 || report.Reloads == 0 || report.Replays == 0 || report.Losses == 0 {
		t.Errorf("%d kills, %d reloads, %d replays, %d lost attempts: not much of a soak",
			report.Kills, report.Reloads, report.Replays, report.Losses)
	}
	a := report.Audit
	if a.Acknowledged == 0 || int64(a.Acknowledged+a.Doubtful+a.Open) != report.Calls {
		t.Errorf("of %d calls: %+v", report.Calls, a)
	}
	if len(report.Samples) < 3 || report.Idle.Goroutines == 0 {
		t.Errorf("%d samples, idle %+v", len(report.Samples), report.Idle)
	}
}
