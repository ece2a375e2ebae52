package metrics

import (
	"sync/atomic"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Evidence is what a status probe found.
type Evidence uint8

// The evidence of probes.
const (
	Applied    Evidence = iota // the call was executed
	NotApplied                 // it was not
	Unknown                    // the answer says neither, or none came
	evidences
)

var evidenceNames = [evidences]string{"applied", "not_applied", "unknown"}

var outcomes = [...]guard.Verdict{guard.Completed, guard.Released, guard.InDoubt}

// Action counts what became of the calls of one action of one guard. All its methods
// are single atomic additions. The zero value counts everything but problems.
type Action struct {
	guard, name string

	running  atomic.Int64
	executed [len(outcomes)]atomic.Uint64
	replays  atomic.Uint64
	attaches atomic.Uint64
	failOpen atomic.Uint64
	probes   [evidences]atomic.Uint64
	slugs    []string // of problems, in the order of their counts
	problems []atomic.Uint64
}

// Begun counts an execution that has begun. Settled must follow.
func (a *Action) Begun() { a.running.Add(1) }

// Settled counts the end of an execution, by what was recorded of it.
func (a *Action) Settled(v guard.Verdict) {
	a.running.Add(-1)
	for i := range outcomes {
		if outcomes[i] == v {
			a.executed[i].Add(1)
		}
	}
}

// Replayed counts a call that was answered with a recorded result.
func (a *Action) Replayed() { a.replays.Add(1) }

// Attached counts a call that was answered by an execution that was running.
func (a *Action) Attached() { a.attaches.Add(1) }

// FailedOpen counts a call that was forwarded unguarded for want of a store (P4).
func (a *Action) FailedOpen() { a.failOpen.Add(1) }

// Probed counts a status probe.
func (a *Action) Probed(e Evidence) { a.probes[e].Add(1) }

// Refused counts a call that was answered with the problem of this slug.
func (a *Action) Refused(slug string) {
	for i := range a.slugs {
		if a.slugs[i] == slug {
			a.problems[i].Add(1)
			return
		}
	}
}
