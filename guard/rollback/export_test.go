package rollback

import (
	"context"
	"crypto/sha256"
	"sync/atomic"
)

type (
	Contender          = contender
	Precedence         = precedence
	ConflictResolution = conflictResolution
	NodeError          = nodeError
	UnknownError       = unknownError
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
)

func NewContender(p Precedence, plan *Plan) Contender { return contender{p, plan} }

func (g *Graph) Follows(id, checkpoint string) bool { return g.follows(id, checkpoint) }

func (g *Graph) Initiator() string { return g.initiator() }

func (c *Coordinator) ByToken(ctx context.Context, jti string) (string, error) {
	return c.byToken(ctx, jti)
}

// Unbounded makes a plan of as many nodes as there are, and says how many links were
// followed for it.
func Unbounded(nodes []Node, r PlanInput) (*Plan, int, error) {
	g, err := build("w", nodes)
	if err != nil {
		return nil, 0, err
	}
	d := &planner{Graph: g, PlanInput: r}
	p, err := d.plan(nil)
	return p, d.followed, err
}

// Follow is follow, for a request to url with a host.
func Follow(url, host, location string) string {
	return follow(&Outgoing{URL: url, Host: host}, location)
}

// HashPlainly leaves out the salts of hashes.
func (u *Undoer) HashPlainly() {
	u.hash = func(_ string, state []byte) [32]byte { return sha256.Sum256(state) }
}

// NothingThere is what stands for the state of a target where nothing is.
var NothingThere = nothingThere

// SeeNoStatus leaves out the questions for the state before and after a compensation.
func (u *Undoer) SeeNoStatus() { u.noStateHash = true }

// SeeStatus asks them again.
func (u *Undoer) SeeStatus() { u.noStateHash = false }

// Unkept counts the answers that the store has not taken.
func (u *Undoer) Unkept() (n int) {
	u.unkept.Range(func(any, any) bool { n++; return true })
	return n
}

// CountGraphs counts the graphs that are built from now on.
func (c *Coordinator) CountGraphs() *atomic.Int64 {
	n := new(atomic.Int64)
	c.newGraph = func(workflow string, nodes []Node) (*Graph, error) {
		n.Add(1)
		return NewGraph(workflow, nodes)
	}
	return n
}
