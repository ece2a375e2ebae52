package rollback

import (
	"context"
	"crypto/sha256"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

type (
	Undoer             = callUndoer
	UndoerOptions      = undoerOptions
	Task               = undoTask
	Result             = undoResult
	Contender          = *Rollback
	ConflictResolution = conflictResolution
)

const (
	NoConflict      = noConflict
	NewcomerRefused = newcomerRefused
	EarlierJoins    = earlierJoins
	NewcomerWaits   = newcomerWaits
	MaxEdges        = maxEdges
)

var (
	ComparePrecedence = comparePrecedence
	ResolveConflict   = resolveConflict
	Overlap           = overlap
	Bounded           = bounded
	Follows           = follows
	Initiator         = initiator
)

func NewContender(p precedence, plan *Plan) Contender {
	return &Rollback{Journal: Journal{Plan: plan, Precedence: p}}
}

func (c *Coordinator) ByToken(ctx context.Context, jti string) (string, error) {
	return c.byToken(ctx, jti)
}

// RollbackOf is the id of the rollback that errors of a call cause.
func (c *Coordinator) RollbackOf(checkpoint string) string { return c.rollbackOf(checkpoint) }

// MaxFailures is how many of these run at once.
const MaxFailures = maxFailures

// Counted makes a plan, and says how many links were followed for it.
func Counted(g *workflow.Graph, r PlanInput) (*Plan, int, error) {
	target, _ := g.Index(r.Target)
	d := &planner{Graph: g, PlanInput: r}
	p, err := d.plan(target, func(n *workflow.Node) (NodeState, error) { return RecordedState(n), nil })
	return p, d.followed, err
}

// Follow is follow, for a request to url with a host.
func Follow(url, host, location string) string {
	return follow(&Outgoing{URL: url, Host: host}, location)
}

// HashPlainly leaves out the salts of hashes.
func HashPlainly(u Undoer) {
	u.(*undoer).hash = func(_ string, state []byte) [32]byte { return sha256.Sum256(state) }
}

// NothingThere is what stands for the state of a target where nothing is.
var NothingThere = nothingThere

// SeeNoStatus leaves out the questions for the state before and after a compensation.
func SeeNoStatus(u Undoer) { u.(*undoer).noStateHash = true }

// SeeStatus asks them again.
func SeeStatus(u Undoer) { u.(*undoer).noStateHash = false }

// MaxFailed is how many escalations because of a caller's failed calls may be pending.
const MaxFailed = maxFailed

// MaxRefused is how many refused errors of a reporter may wait.
const MaxRefused = maxRefused

const Gather = gather

var (
	ErrQuit = errQuit
	ErrSpec = errSpec
	ErrTask = errTask
)

func (p *Plan) Partial() error { return p.partial() }

func (s *Spec) Check() error { return s.check() }

const (
	ReasonEscalated   = reasonEscalated
	ReasonLost        = reasonLost
	ReasonNoPostImage = reasonNoPostImage
	ReasonPartial     = reasonPartial
	ReasonTimeout     = reasonTimeout
	ReasonUnexpected  = reasonUnexpected
	ReasonUnfilled    = reasonUnfilled
	ReasonUnverified  = reasonUnverified
)

// NewUndoer returns the undoer that sends.
func NewUndoer(o UndoerOptions) Undoer { return newUndoer(o) }

// OpenWith opens a coordinator with an undoer.
func OpenWith(o Options, u Undoer) (*Coordinator, error) {
	o.undoer = u
	return Open(o)
}

// Meets reads the locks of a workflow as a call does that enters. says is what keeps it from beginning, once they are
// decided.
func (c *Coordinator) Meets(workflow string) (says func() error) {
	a, locks := c.locks.enter(workflow)
	a.Leave()
	return func() error {
		_, err := blocked(locks, func(func(string, error) bool) {})
		return err
	}
}

type (
	// PreparedDocument is the answer to a request to prepare a rollback.
	PreparedDocument = preparedDocument
	// ReleasedDocument is the answer to a release.
	ReleasedDocument = releasedDocument
)

const (
	Block              = block
	Expired            = expired
	Nothing            = noUndo
	ReasonIrreversible = reasonIrreversible
	Reserved           = reserved
)

type (
	PlanChangedError = planChangedError
	Precedence       = precedence
	Prepared         = preparation
)

var ErrAccepted = errAccepted

func (l *Limit) Issuer(now time.Time, perMinute int, issuer string) (time.Duration, bool) {
	return l.issuer(now, perMinute, issuer)
}

func (l *Limit) Workflow(now time.Time, perMinute int, workflow string) (time.Duration, bool) {
	return l.workflow(now, perMinute, workflow)
}
