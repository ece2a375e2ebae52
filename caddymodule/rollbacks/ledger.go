// Package rollbacks joins the coordinator of rollbacks to the ledger: it reads what was
// told of workflows, and makes what is to be told of rollbacks (ADR 0032).
//
// What it reads is verified, and whole: events that are recorded and wait for their place
// in the tree are waited for, and what cannot be had is an error and never left out.
package rollbacks

import (
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// ErrNoIdentity says that the gateway has no identity, so that it can neither read what was
// told nor tell anything.
var ErrNoIdentity = errors.New("rollbacks: without `identity` there is no ledger to read, and none to be told of a rollback")

// placeTime is how long events may take to their places in the tree.
const placeTime = 5 * time.Second

// Voice is how the gateway tells of rollbacks, and whom it believes.
type Voice struct {
	// Evidence is the ledger.
	Evidence *evidence.Evidence
	// Witness tells in the gateway's name.
	Witness *evidence.Witness
	// Verifier verifies tokens of agents; nil where none are believed.
	Verifier *ect.Verifier
}

// own reports whether an entry is the gateway's, also of a name that it had before.
func (v *Voice) own(e *ledger.Entry) bool { return v.Witness.Own(e) }

// Options are the settings of a Ledger. Voice is required.
type Options struct {
	// Voice is that of the latest configuration, asked for anew each time; false where
	// that has no identity.
	Voice func() (Voice, bool)
	// Keep is how long what is told is not pruned, whatever else the ledger's retention is:
	// as long as the coordinator keeps a rollback.
	Keep time.Duration
}

// Ledger is the ledger as the coordinator of rollbacks needs it. It is safe for concurrent
// use.
type Ledger struct {
	o      Options
	behind behind
}

var _ rollback.Ledger = (*Ledger)(nil)

// New makes a Ledger.
func New(o Options) *Ledger { return &Ledger{o: o} }

// voice is how the gateway tells now.
func (l *Ledger) voice() (*Voice, error) {
	v, ok := l.o.Voice()
	if !ok {
		return nil, ErrNoIdentity
	}
	return &v, nil
}

// settled is the voice once all that was told before can be read.
func (l *Ledger) settled(ctx context.Context) (*Voice, error) {
	v, err := l.voice()
	if err != nil {
		return nil, err
	}
	waits, cancel := context.WithTimeout(ctx, placeTime)
	defer cancel()
	err = v.Evidence.Log().Flush(waits)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		err = errBehind // which is not the end of what the caller waits for
	}
	return v, err
}

var errBehind = errors.New("rollbacks: what was told last has no place in the ledger yet")
