package plan

import (
	"cmp"
	"time"
)

// Rollback is what precedence is judged by (cascade 4.3.4).
type Rollback struct {
	// ID is the rollback's id. No two rollbacks have the same one.
	ID string
	// Scope is how far it goes.
	Scope Scope
	// Asked is when it was recorded, by the clock of the store and not the requester's.
	Asked time.Time
}

// Compare orders rollbacks by precedence: it is negative if a takes precedence over b,
// positive if b does over a, and zero only if they are the same. The wider scope comes
// first, then the earlier time, then the lower id. A scope that does not exist is the
// narrowest.
func Compare(a, b Rollback) int {
	return cmp.Or(
		cmp.Compare(b.Scope.breadth(), a.Scope.breadth()),
		a.Asked.Compare(b.Asked),
		cmp.Compare(a.ID, b.ID),
	)
}

// Rolling is a rollback that is prepared or under way.
type Rolling struct {
	Rollback
	// Plan is what it does.
	Plan *Plan
	// Executing says that a step has been taken, or is about to be: the journal has it.
	Executing bool
}

// Meeting is what comes of two rollbacks.
type Meeting string

// What can come of them. The loser gets 409 rollback-conflict with the winner's id.
const (
	// Apart: they have no checkpoint in common, and both go on.
	Apart Meeting = "apart"
	// Refused: the one that comes loses.
	Refused Meeting = "refused"
	// Replaced: the one that was there loses. It has not begun.
	Replaced Meeting = "replaced"
	// Joined: the one that was there loses and has begun. It finishes its level, then
	// the other one starts, whose result becomes that of both.
	Joined Meeting = "joined"
	// Queued: the one that was there has begun and goes on to its end, and then the
	// other one starts. To break off would leave a checkpoint to nobody.
	Queued Meeting = "queued"
)

// Meet says what comes of two different rollbacks when one of them was there first. The
// one that Compare prefers wins, but nothing that has begun is left half done:
//
// A rollback that has begun joins a wider one whose plan has all of its checkpoints.
// What it has undone the wider one meets as undone. Where the wider plan lacks some of
// them, as the sub-DAG of one checkpoint does that the other's group contains, the wider
// one waits in the queue. So does one of the same scope that was asked for earlier.
func Meet(there, comes Rolling) Meeting {
	switch {
	case !Overlap(there.Plan, comes.Plan):
		return Apart
	case Compare(there.Rollback, comes.Rollback) <= 0:
		return Refused
	case !there.Executing:
		return Replaced
	case there.Scope.breadth() < comes.Scope.breadth() && len(comes.Plan.lacks(there.Plan)) == 0:
		return Joined
	}
	return Queued
}
