package table_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/stat"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
)

func report() *table.Report {
	return &table.Report{
		Settings: table.Settings{Go: "go1", GOGC: "100", GOMEMLIMIT: "off", Rounds: 3},
		Rows: []table.Row{
			{Name: "POST", Conns: 64, Of: "req/s", Ratio: stat.Spread{Median: 0.71, Low: 0.6, High: 0.8}, Verdict: table.AtLeast(0.71, 0.7)},
			{Name: "POST", Conns: 64, Of: "p99 ms", Ratio: stat.Spread{Median: 1.7, Low: 1.5, High: 1.9}, Verdict: table.AtMost(1.7, 1.6)},
			{Name: "no-op", Conns: 64, Of: "req/s", Ratio: stat.Spread{Median: 0.98, Low: 0.9, High: 1}},
		},
		Figures: []table.Figure{{Name: "records per sync", Value: 11, Verdict: table.AtLeast(11, 12)}},
	}
}

func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		got  table.Verdict
		bar  string
		word string
	}{
		{table.AtLeast(0.70, 0.70), ">= 0.7", "ok"},
		{table.AtLeast(0.69, 0.70), ">= 0.7", "BELOW"},
		{table.AtMost(1.6, 1.6), "<= 1.6", "ok"},
		{table.AtMost(1.61, 1.6), "<= 1.6", "BELOW"},
		{table.AtLeast(0.1, 0), "", ""},
		{table.AtMost(9, 0), "", ""},
	} {
		if c.got.Bar != c.bar || c.got.String() != c.word {
			t.Errorf("got %q %q, want %q %q", c.got.Bar, c.got, c.bar, c.word)
		}
	}
	if got := report().Below(); got != 2 {
		t.Errorf("%d bars were not reached, want 2", got)
	}
}

// Text is aligned, and says of each row with a bar whether it was reached.
func TestText(t *testing.T) {
	var out bytes.Buffer
	if err := report().Text(&out); err != nil {
		t.Fatal(err)
	}
	var bars int
	var column []int
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "POST") {
			column = append(column, strings.Index(line, "64"))
		}
		if strings.Contains(line, "= 0.7  ok") || strings.Contains(line, "= 1.6  BELOW") || strings.Contains(line, "= 12  BELOW") {
			bars++
		}
	}
	if bars != 3 || len(column) != 2 || column[0] != column[1] {
		t.Errorf("%d bars, columns %v in\n%s", bars, column, &out)
	}
	if !strings.Contains(out.String(), "GOGC=100 and GOMEMLIMIT=off") {
		t.Errorf("the settings are not stated:\n%s", &out)
	}
}

// Every line of a table in Markdown has as many cells as its head.
func TestMarkdown(t *testing.T) {
	var out bytes.Buffer
	if err := report().Markdown(&out); err != nil {
		t.Fatal(err)
	}
	cells, rows := 0, 0
	for line := range strings.Lines(out.String()) {
		n := strings.Count(line, "|")
		switch {
		case n == 0:
			cells = 0
		case cells == 0:
			cells = n
		case n != cells:
			t.Errorf("%d cells under %d: %s", n, cells, line)
		default:
			rows++
		}
	}
	if rows != 1+3+1+1 {
		t.Errorf("%d rows in\n%s", rows, &out)
	}
}

// A report of figures alone has no empty table of ratios.
func TestFiguresAlone(t *testing.T) {
	r := report()
	r.Rows, r.Settings.Rounds = nil, 0
	var text, markdown bytes.Buffer
	if err := r.Text(&text); err != nil {
		t.Fatal(err)
	}
	if err := r.Markdown(&markdown); err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{text.String(), markdown.String()} {
		if strings.Contains(out, "low-high") || strings.Contains(out, "POST") || !strings.Contains(out, "records per sync") {
			t.Errorf("got\n%s", out)
		}
	}
}
