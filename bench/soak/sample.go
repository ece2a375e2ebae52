package soak

import (
	"context"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// Sample is what the gateway uses at one moment. On systems that do not tell of a
// process, its memory and files are zero, and nothing is held against them.
type Sample struct {
	// At is the time since the load began, Life the number of kills before.
	At   time.Duration `json:"at"`
	Life int           `json:"life"`
	proc.Usage
	Goroutines int   `json:"goroutines"`
	Heap       int64 `json:"heap"`
	Disk       int64 `json:"disk"`
}

func take(ctx context.Context, g *gateway.Gateway) (Sample, error) {
	var s Sample
	stats, err := g.Stats(ctx)
	if err != nil {
		return s, err
	}
	s.Goroutines, s.Heap = stats.Goroutines, stats.Heap
	if s.Usage, err = proc.UsageOf(g.Proc().Pid()); err != nil {
		return s, err
	}
	s.Disk, err = proc.DiskUse(g.StorePath())
	return s, err
}

// String is the sample in a line.
func (s Sample) String() string {
	return fmt.Sprintf("rss %s (anonymous %s, heap %s), %d goroutines, %d files, disk %s",
		mebi(s.RSS), mebi(s.RssAnon), mebi(s.Heap), s.Goroutines, s.Files, mebi(s.Disk))
}

func mebi(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }
