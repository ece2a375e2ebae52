package undo

import (
	"cmp"
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// What Options say where they are zero.
const (
	DefaultFirst   = time.Second         // before an undo is sent a second time
	DefaultLongest = time.Minute         // between two later times
	DefaultTimeout = 30 * time.Second    // of one request
	DefaultPoll    = 2 * time.Second     // between the first two questions for a status
	DefaultKeep    = 30 * 24 * time.Hour // as a key is kept (DESIGN, "Store")
)

// Options are what an Undoer works with. Guard, Vault and Sender are required.
type Options struct {
	// Guard runs the requests that change something.
	Guard *guard.Guard
	// Vault has the recorded credentials.
	Vault *checkpoint.Vault
	// Sender sends.
	Sender Sender
	// First is how long is waited before an undo is sent again; then twice as long each
	// time, up to Longest. What an answer says in Retry-After is waited
	// at least, but never more than half of what is left until the task is due.
	First, Longest time.Duration
	// Timeout is how long one request may take.
	Timeout time.Duration
	// Poll is how long is waited between two questions for a status; it grows like First.
	Poll time.Duration
	// Keep is how long after the rollback is due the answer to an undo is kept, and its key
	// taken: at least as long as the rollback itself is remembered.
	Keep time.Duration
}

// Undoer undoes calls. It is safe for concurrent use, also for the same Task twice: one
// sends, and the other waits for what came of it.
type Undoer struct {
	o      Options
	unkept sync.Map // of guard.Key to note: answers that the store has not taken
	hash   func(rollback string, state []byte) [32]byte
}

// New returns an Undoer.
func New(o Options) *Undoer {
	o.First = cmp.Or(o.First, DefaultFirst)
	o.Longest = max(cmp.Or(o.Longest, DefaultLongest), o.First)
	o.Timeout = cmp.Or(o.Timeout, DefaultTimeout)
	o.Poll = cmp.Or(o.Poll, DefaultPoll)
	o.Keep = cmp.Or(o.Keep, DefaultKeep)
	u := &Undoer{o: o}
	u.hash = u.saltedHash
	return u
}

// Undo undoes the call, and returns what came of it, which is never more than what is
// known (P6). It may take as long as until the task is due, and for one request longer.
//
// The error is for what says nothing of the undo: ctx has ended, ErrQuit, the store is not
// available, or guard.ErrDraining. The same Task then goes on later, also in another
// life of the gateway.
func (u *Undoer) Undo(ctx context.Context, t Task) (Result, error) {
	if err := t.check(); err != nil {
		return Result{}, err
	}
	c := t.Checkpoint
	way := c.Snapshot.Way
	if (way == checkpoint.Compensate || way == checkpoint.Delegate) && c.Result != nil && Refused(c.Result.Upstream) &&
		c.Snapshot.First == "" { // a refusal says nothing of an attempt before it
		return Result{Done: true}, nil
	}
	if c.Result != nil && c.Result.Reason == checkpoint.ReasonChanged {
		return Result{Reason: ReasonChanged}, nil // whatever on_changed says: what is to be put back is not known
	}
	if cause, irreversible := Irreversible(c); irreversible {
		return Result{Reason: ReasonIrreversible, Cause: cause}, nil
	}
	j, err := u.newJob(t)
	if err != nil {
		// What was recorded cannot be done, now or later: a result, and no error.
		return Result{Reason: ReasonUnfilled}, nil
	}
	switch {
	case c.Snapshot.Way == checkpoint.Restore:
		return j.restore(ctx)
	case c.Snapshot.Way == checkpoint.Compensate && j.templates.compensate != nil,
		c.Snapshot.Way == checkpoint.Delegate && j.spec.Delegate != "":
		return j.compensate(ctx)
	}
	return Result{Reason: ReasonUnfilled}, nil
}

// Irreversible reports that a call cannot be undone, and why.
func Irreversible(c *checkpoint.Checkpoint) (cause checkpoint.Reason, is bool) {
	if c.Snapshot.Way == checkpoint.Irreversible {
		return c.Snapshot.Reason, true
	}
	if c.Result != nil && c.Result.Reason != "" {
		return c.Result.Reason, true
	}
	return "", false
}

// Refused reports that a call had no effect, by the status of the upstream's own answer, 0
// where that is not known: a declined payment is not refunded. 408 says nothing of it, and
// 409 may speak of an earlier attempt. It counts for what is compensated or delegated; what
// is restored is compared.
func Refused(status int) bool {
	return status/100 == 4 && status != http.StatusRequestTimeout && status != http.StatusConflict
}
