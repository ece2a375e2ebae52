package workflow

import (
	"cmp"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Status is the state of a whole workflow: running, or one of ATD's terminal words.
type Status string

// The states of a workflow.
const (
	// statusRunning: nothing has begun, something runs, or something failed that can
	// still be undone.
	statusRunning Status = "running"
	// statusSuccess: everything that is recorded is done.
	statusSuccess Status = "success"
	// statusPartial: some of it is done, and some was undone.
	statusPartial Status = "partial"
	// statusFailed: something failed and there is no way back.
	statusFailed Status = "failed"
	// statusRolledBack: everything was undone.
	statusRolledBack Status = "rolled_back"
	// statusEscalated: a human has to decide.
	statusEscalated Status = "escalated"
)

// Summary says how a workflow stands.
type Summary struct {
	// Status follows from the states of the tasks. It is final only as long as nothing
	// more is recorded.
	Status Status
	// Stated is the terminal status that the workflow's own last token says, if there
	// is one. It is a claim: Status need not agree.
	Stated string
	// Tasks counts the tasks by their states. A call that the gateway guards is one
	// task, however many tokens record it; a checkpoint without a task stands for one.
	Tasks map[State]int
}

// Summary counts.
func (g *Graph) Summary() Summary {
	s := Summary{Status: statusRunning, Tasks: make(map[State]int)}
	total, lost, last := 0, false, -1
	for i := range g.nodes {
		node := &g.nodes[i]
		if node.Event == ect.EventWorkflowComplete && !node.Stranger && g.seq[i] > last {
			last, s.Stated = g.seq[i], node.Status
		}
		if !g.counts(i) {
			continue
		}
		total++
		s.Tasks[node.State]++
		lost = lost || node.State == Failed && !g.reversible(i)
	}
	n := s.Tasks
	switch {
	case n[Escalated] > 0:
		s.Status = statusEscalated
	case lost:
		s.Status = statusFailed
	case total == 0 || n[Running]+n[Pending]+n[Failed] > 0:
	case n[RolledBack] == total:
		s.Status = statusRolledBack
	case n[RolledBack] > 0:
		s.Status = statusPartial
	default:
		s.Status = statusSuccess
	}
	return s
}

// counts reports whether node i is a task of its own.
func (g *Graph) counts(i int) bool {
	node := &g.nodes[i]
	if node.IsCheckpoint() {
		if node.Own && len(g.executions[node.Execution]) > 0 {
			return false // called again
		}
		called := func(c int) bool { return g.nodes[c].IsCheckpoint() && g.nodes[c].Own }
		return len(g.guards[i]) == 0 && !g.nodes[i].Group && (node.Own || !slices.ContainsFunc(g.children[i], called))
	}
	return node.IsTask() && len(node.Settles) == 0 && !g.repeated(i)
}

// repeated reports whether node i is a settlement of a claim that a later one has
// settled again.
func (g *Graph) repeated(i int) bool {
	if !g.nodes[i].settlement() {
		return false
	}
	if slices.ContainsFunc(g.executions[g.nodes[i].Execution], func(c int) bool { return g.seq[c] > g.seq[i] }) {
		return true
	}
	for _, p := range g.parents[i] {
		if !g.claimOf(i, p) {
			continue
		}
		for _, c := range g.children[p] {
			if g.claimOf(c, p) && g.seq[c] > g.seq[i] {
				return true
			}
		}
	}
	return false
}

// reversible reports whether a checkpoint of task i, or i itself where it is one, can
// be undone.
func (g *Graph) reversible(i int) bool {
	return g.nodes[i].IsCheckpoint() && g.nodes[i].Reversible || g.undoable[i]
}

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
	blocked := slices.Clone(final)
	for i := len(g.nodes) - 1; i >= 0; i-- {
		if !g.nodes[i].IsCheckpoint() {
			continue
		}
		for _, t := range g.guards[i] {
			blocked[i] = blocked[i] || slices.ContainsFunc(g.down[t], func(c int) bool { return c != i && final[c] })
		}
		if g.nodes[i].Group {
			blocked[i] = blocked[i] || slices.ContainsFunc(g.parents[i], func(c int) bool { return blocked[c] })
		}
		if !blocked[i] && g.stands(i) {
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
	if !node.IsCheckpoint() || !g.stands(i) {
		return false
	}
	expired := !node.Expires.IsZero() && !now.Before(node.Expires)
	return !node.Reversible || expired || node.Own && node.State == Running
}
