package soak

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

func steady(n int) []Sample {
	all := make([]Sample, n)
	for i := range all {
		all[i] = Sample{
			Usage: proc.Usage{RSS: 200 << 20, RssAnon: 100 << 20, Files: 50}, Goroutines: 200, Heap: 50 << 20, Disk: 300 << 20,
		}
	}
	return all
}

// What stays as it is has not grown; what doubles and more has, and is named.
func TestGrowth(t *testing.T) {
	if got := growth(steady(enough)); len(got) != 0 {
		t.Errorf("nothing grew, and yet: %q", got)
	}
	few := steady(enough - 1)
	few[len(few)-1].Goroutines = 900
	if got := growth(few); len(got) != 0 {
		t.Errorf("judged by %d samples: %q", len(few), got)
	}
	for name, grow := range map[string]func(*Sample){
		"goroutines":       func(s *Sample) { s.Goroutines = 900 },
		"open files":       func(s *Sample) { s.Files = 900 },
		"anonymous memory": func(s *Sample) { s.RssAnon = 900 << 20 },
		"heap":             func(s *Sample) { s.Heap = 900 << 20 },
		"disk":             func(s *Sample) { s.Disk = 900 << 20 },
	} {
		all := steady(enough)
		grow(&all[enough-1])
		if got := growth(all); len(got) != 1 || !strings.HasPrefix(got[0], name+" grew") {
			t.Errorf("%s grew: %q", name, got)
		}
		first := steady(enough)
		grow(&first[0]) // a start that needs more is no growth
		if got := growth(first); len(got) != 0 {
			t.Errorf("%s shrank: %q", name, got)
		}
	}
}

func TestLeftBehind(t *testing.T) {
	fresh := steady(1)[0]
	if got := leftBehind(fresh, fresh); len(got) != 0 {
		t.Errorf("nothing was left: %q", got)
	}
	idle := fresh
	idle.Goroutines, idle.Files = 500, 500
	if got := leftBehind(fresh, idle); len(got) != 2 {
		t.Errorf("goroutines and files were left: %q", got)
	}
}
