package soak

import (
	"fmt"
	"time"
)

// quantity is one that must not grow without end.
type quantity struct {
	name  string
	of    func(Sample) int64
	slack int64 // that does not count, in its unit
	unit  func(int64) string
}

func plain(n int64) string { return fmt.Sprint(n) }

var quantities = []quantity{
	{"goroutines", func(s Sample) int64 { return int64(s.Goroutines) }, 100, plain},
	{"open files", func(s Sample) int64 { return int64(s.Files) }, 100, plain},
	{"anonymous memory", func(s Sample) int64 { return s.RssAnon }, 64 << 20, mebi},
	{"heap", func(s Sample) int64 { return s.Heap }, 64 << 20, mebi},
	{"disk", func(s Sample) int64 { return s.Disk }, 128 << 20, mebi},
}

const (
	// factor is how much larger the last half may be than the first.
	factor = 1.3
	// enough samples show more than how a fresh process fills its caches.
	enough = 20
)

// growth says what has grown within one life of the gateway: its largest value in the
// last half of the samples is far over that in the first. Too few samples say nothing.
func growth(samples []Sample) []string {
	if len(samples) < enough {
		return nil
	}
	half := len(samples) / 2
	var all []string
	for _, q := range quantities {
		first, last := most(samples[:half], q.of), most(samples[half:], q.of)
		if float64(last) > factor*float64(first)+float64(q.slack) {
			all = append(all, fmt.Sprintf("%s grew from %s to %s under even load", q.name, q.unit(first), q.unit(last)))
		}
	}
	return all
}

func most(samples []Sample, of func(Sample) int64) int64 {
	var m int64
	for _, s := range samples {
		m = max(m, of(s))
	}
	return m
}

// What an idle gateway may have more of than a fresh one: tables and segments are open
// files, and a connection or two to the upstream may not have ended yet.
const (
	idleGoroutines = 20
	idleFiles      = 150
	// idleWithin is how long it may take to become idle.
	idleWithin = time.Minute
)

// leftBehind says what an idle gateway has too much of.
func leftBehind(fresh, idle Sample) []string {
	var all []string
	if idle.Goroutines > fresh.Goroutines+idleGoroutines {
		all = append(all, fmt.Sprintf("%d goroutines in a fresh gateway, %d in one that has become idle", fresh.Goroutines, idle.Goroutines))
	}
	if idle.Files > fresh.Files+idleFiles {
		all = append(all, fmt.Sprintf("%d open files in a fresh gateway, %d in one that has become idle", fresh.Files, idle.Files))
	}
	return all
}
