package store

import (
	"context"
	"time"
)

// Shared is a store that several gateways use at the same time, each as a member with a lease of its own.
//
// A member whose lease has ended, by the store's clock, is removed by whoever notices. Every commit
// requires, in its own transaction, that its member is still there. So what a removed member has written is
// final: it writes nothing more, whether it knows or not, and Commit returns ErrUnhealthy to it. It has to be
// opened again, as a member with another boot.
//
// A Watch wakes for the commits of all members.
type Shared interface {
	Store

	// Self is this member, as it was last described.
	Self() Member

	// Members returns the members that have not been removed, by node and boot.
	Members(ctx context.Context) ([]Member, error)

	// Gone reports whether no member has this boot any more. Once true it stays true. It is false
	// for a member that has stopped responding, until its lease has ended.
	Gone(ctx context.Context, boot string) (bool, error)

	// Left returns a channel that is closed when a member has been removed since the call, or has closed
	// its store. It may close without that, and Close closes it.
	Left() <-chan struct{}

	// Describe sets what the others read of this member. It is written with the next heartbeat, or at once
	// where that costs no wait.
	Describe(about About)

	// Follow calls changed for every key that begins with prefix and was written or deleted by another
	// member, after the change can be read, from one goroutine and in the order of the commits. A nil key
	// means that any of them may have changed. changed must not block. cancel ends it.
	Follow(prefix []byte, changed func(key []byte)) (cancel func())

	// CatchUp returns when Follow has reported, and Watch has woken for, every commit that ended before the call,
	// or with ctx's error.
	CatchUp(ctx context.Context) error
}

// Member is one life of a gateway that uses a shared store.
type Member struct {
	// Node is the gateway's name, which stays over restarts. At a time one member has it.
	Node string
	// Boot is the life's own, random, and was never used before.
	Boot string
	// Joined and Seen are when it opened the store and when its lease was last renewed, by the store's clock.
	Joined, Seen time.Time
	About
}

// About is what a member says of itself.
type About struct {
	// Version is that of its build.
	Version string
	// Configuration has a hash of each option that has to be the same at all members, by its name; nil if that
	// is not known.
	Configuration map[string]string
	// SealingKeys are the ids of the sealing keys that it has.
	SealingKeys []uint32
	// Open is the number of executions that it runs.
	Open int
	// LogSize is the number of entries in the tree of its ledger.
	LogSize int64
}
