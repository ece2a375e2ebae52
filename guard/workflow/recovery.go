package workflow

import (
	"cmp"
	"slices"
	"time"
)

// RecoveryPoints are the checkpoints that the workflow can go back to (cascade,
// "Recovery Point"), the most recent first. Each can be undone, has not expired, was
// not rolled back, and its call was made and has ended; and so it is with every
// checkpoint that follows from it, since otherwise going back would leave effects of
// what never was. Whether the snapshots are still good only a rollback's preparation
// can tell.
func (g *Graph) RecoveryPoints(now time.Time) []string {
	final := make([]bool, len(g.nodes)) // nodes that something final follows from
	for i := len(g.nodes) - 1; i >= 0; i-- {
		final[i] = i >= g.ordered || g.final(i, now) ||
			slices.ContainsFunc(g.down[i], func(c int) bool { return final[c] })
	}
	points := []int{}
	barred := slices.Clone(final)
	for i := len(g.nodes) - 1; i >= 0; i-- {
		if !g.nodes[i].isCheckpoint() {
			continue
		}
		for _, t := range g.guards[i] {
			barred[i] = barred[i] || slices.ContainsFunc(g.down[t], func(c int) bool { return c != i && final[c] })
		}
		if g.groups[i] {
			barred[i] = barred[i] || slices.ContainsFunc(g.parents[i], func(c int) bool { return barred[c] })
		}
		if !barred[i] && g.stands(i) {
			points = append(points, i)
		}
	}
	slices.SortFunc(points, func(a, b int) int { return cmp.Compare(g.seq[b], g.seq[a]) })
	return g.ids(points)
}

// stands reports whether checkpoint i has something to undo.
func (g *Graph) stands(i int) bool {
	return g.nodes[i].State != RolledBack && g.nodes[i].Detail != DetailReleased
}

// final reports whether node i is a checkpoint that nobody can go back behind.
func (g *Graph) final(i int, now time.Time) bool {
	node := &g.nodes[i]
	if !node.isCheckpoint() || !g.stands(i) {
		return false
	}
	expired := !node.Expires.IsZero() && !now.Before(node.Expires)
	return !node.Reversible || expired || node.Own && node.State == Running
}
