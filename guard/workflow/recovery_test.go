package workflow_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// C-2-h: the most recent checkpoint that the workflow can go back to, and what keeps
// one from being it.
func TestRecoveryPoints(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	until := func(d time.Duration, r Record) Record { r.Expires = now.Add(d); return r }
	irreversible := func(r Record) Record { r.Reversible = false; return r }
	chain := func(last Record) []Record {
		return []Record{ckpt("A"), task("A1", "A"), ckpt("B", "A1"), task("B1", "B"), last, task("X1", "X")}
	}
	for name, c := range map[string]struct {
		records []Record
		want    string
	}{
		"the most recent first":                {chain(ckpt("X", "B1")), "[X B A]"},
		"until it expires":                     {chain(until(time.Second, ckpt("X", "B1"))), "[X B A]"},
		"an expired one hides those before":    {chain(until(0, ckpt("X", "B1"))), "[]"},
		"so does an irreversible one":          {chain(irreversible(ckpt("X", "B1"))), "[]"},
		"not those beside it":                  {chain(irreversible(ckpt("X"))), "[B A]"},
		"nor those behind it":                  {chain(irreversible(ckpt("X")))[2:], "[B]"},
		"one that was rolled back is passed":   {append(chain(ckpt("X", "B1")), undone("a", "R", "X", "completed")), "[B A]"},
		"an irreversible call that never was":  {[]Record{ckpt("A"), task("A1", "A"), irreversible(claim("C", "A1")), settled("N", Released, "C")}, "[A]"},
		"a call that runs":                     {[]Record{ckpt("A"), task("A1", "A"), claim("C", "A1")}, "[]"},
		"a call in doubt":                      {[]Record{claim("C"), settled("N", InDoubt, "C")}, "[C]"},
		"what follows the action counts (ATD)": {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), irreversible(ckpt("D", "U"))}, "[]"},
		"a group":                              {[]Record{task("T"), ckpt("C", "T"), task("U", "T"), ckpt("D", "U"), ckpt("G", "C", "D")}, "[G D C]"},
		"a group of an irreversible one":       {[]Record{task("T"), ckpt("C", "T"), task("U"), irreversible(ckpt("D", "U")), ckpt("G", "C", "D")}, "[C]"},
		"none":                                 {[]Record{task("T")}, "[]"},
		"on a cycle":                           {[]Record{ckpt("C", "T"), task("T", "C")}, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := fmt.Sprint(New(c.records).RecoveryPoints(now)); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}
