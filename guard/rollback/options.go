package rollback

import (
	"context"
	"log/slog"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Sealer keeps values unreadable at rest and derives the store's keys. The guard's own
// is one.
type Sealer interface {
	// Seal appends the sealed plaintext to dst; it opens under the same name only.
	Seal(dst, plaintext, name []byte) []byte
	// Open appends the plain value to dst.
	Open(dst, sealed, name []byte) ([]byte, error)
	// Index derives 32 bytes from parts, stable for the life of the store.
	Index(domain string, parts ...string) [32]byte
	// KeyIDs lists the keys with which it opens, by id, the last of which seals.
	KeyIDs() []uint32
	// KeyOf is the id of the key under which a value is sealed.
	KeyOf(sealed []byte) uint32
}

// Options are what a Coordinator works with. All but Now and Logger are required.
type Options struct {
	Store  store.Store
	Sealer Sealer
	Guard  *guard.Guard
	Vault  *checkpoint.Vault
	Desk   *hitl.Desk
	Ledger Ledger
	Undoer Undoer
	// Keep is how long a finished rollback is kept, so that it is answered when it is asked
	// for again; at least as long as its checkpoints' execution keys.
	Keep time.Duration
	// Parallel is how many steps of a level run at once; 0 is 8.
	Parallel int
	// Logger gets what cannot be told to anybody else; nil is none.
	Logger *slog.Logger
}

// Undoer undoes one call. *undo.Undoer is one.
type Undoer interface {
	// Undo returns when the undo has ended, or when ctx has: then it may go on later by
	// being called again with the same task, which sends nothing a second time that has
	// been answered.
	Undo(ctx context.Context, t undo.Task) (undo.Result, error)
}

// Checkpoint is what the ledger knows of a checkpoint's token.
type Checkpoint struct {
	ID, Workflow string
	// Agent is the identity behind the call.
	Agent string
	// Own says that this gateway has made it.
	Own bool
	// Sum is its out_hash.
	Sum        [32]byte
	Reversible bool
	// Expires is when its ttl ends; TTL is that of the token.
	Expires time.Time
	TTL     time.Duration
	// Parents are the ids in its par.
	Parents []string
}

// Ledger is what was told of workflows, and takes what is to be told. What it tells rides
// in the commit of the decision, of which there may be more than one telling. A Telling
// that is nil is none. Several goroutines call it.
type Ledger interface {
	// Checkpoint finds the token of a checkpoint or group and verifies its signature and
	// those of its parents (cascade 4.2.3). ErrUnknown says that there is none,
	// checkpoint.ErrTampered that the token is not what was recorded.
	Checkpoint(ctx context.Context, id string) (Checkpoint, error)
	// Nodes are the nodes of a workflow, as a plan needs them: states of checkpoints by
	// their tokens alone, which the Coordinator brings up to date from the vault and the
	// guard. target is looked up by its id where workflow is empty; ErrUnknown says that
	// nothing has it. The Coordinator changes the states in what it gets.
	Nodes(ctx context.Context, workflow, target string) ([]plan.Node, error)
	// Started tells of a rollback that is accepted; parents are what it follows from, none
	// where nothing is named.
	Started(ctx context.Context, r *Rollback, parents []string) (Telling, error)
	// Stepped is told for each step that has ended: as compensate where a compensation ran,
	// else as rollback_complete. r has no Steps. way is zero where nothing was undone.
	Stepped(ctx context.Context, r *Rollback, s *Step, way checkpoint.Way) (Telling, error)
	// Completed tells of a rollback that is finished, with all its Steps.
	Completed(ctx context.Context, r *Rollback) (Telling, error)
	// Erred tells an error: errorType is a word of ECT's error types (timeout,
	// constraint_violation), why a fixed sentence. r has no Steps; of a request that is
	// refused it has what was asked and no Start.
	Erred(ctx context.Context, r *Rollback, checkpointID, errorType, why string) (Telling, error)
}

// Telling is evidence on its way into a commit.
type Telling interface {
	// ID is that of the token.
	ID() string
	// Writes are the riders of the commit.
	Writes() []store.Write
	// Done tells what came of the commit, once, and returns err.
	Done(err error) error
}
