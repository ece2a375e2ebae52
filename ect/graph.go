package ect

import (
	"context"
	"errors"
	"time"
)

// DAG finds recorded tokens by their id.
type DAG interface {
	// Nodes returns what is recorded under the id in any workflow; none is no error. If
	// there is none, it may return that of the id's UnprovenID.
	Nodes(ctx context.Context, id string) ([]Node, error)
}

// Node is a recorded token in the graph.
type Node struct {
	// ID and Workflow are the NodeID and the wid, in lower case. An id is unique within
	// its workflow.
	ID, Workflow string
	// IssuedAt is iat.
	IssuedAt time.Time
	// Parents are the ids of the parents.
	Parents []string
	// Level is the assurance of the token itself.
	Level Level
	// Digest is that of the token; zero if unknown.
	Digest [32]byte
	// Ancestors and Weakest are those of the Lineage when the token was recorded. With
	// both, its ancestors need not be walked again: a record keeps its parents.
	Ancestors int
	Weakest   Level
}

// Node is the token as the graph records it.
func (t *Token) Node() Node {
	n := Node{
		ID: t.NodeID(), Workflow: t.workflow, IssuedAt: t.IssuedAt(), Parents: t.Parents(), Level: t.level, Digest: t.Digest(),
	}
	if t.lineage.whole {
		n.Ancestors, n.Weakest = t.lineage.Ancestors, min(t.level, t.lineage.Weakest)
	}
	return n
}

// Lineage is what is known of a token's ancestors.
type Lineage struct {
	// Checked reports whether they were looked up at all.
	Checked bool
	// Missing are the parents that were not found, where the policy allows that.
	Missing []string
	// Weakest is the lowest level among the ancestors; L3 if there are none.
	Weakest Level
	// Ancestors is their number, or more: one may be counted twice.
	Ancestors int
	whole     bool // every ancestor was found, so that no later token can be one
}

// walk takes step 14 for the tokens of one request, which may be each other's parents.
func (v *Verifier) walk(ctx context.Context, tokens []*Token, dag DAG) error {
	if len(tokens) > 1 {
		dag = requestDAG{tokens, dag, v.p.MinLevel}
	}
	for _, t := range tokens {
		w := walker{v: v, dag: dag, token: t, weakest: L3, whole: true}
		if err := w.check(ctx); err != nil {
			return err
		}
	}
	return nil
}

// idsConflict reports whether two ids exclude each other: an id is used once in its
// workflow, and once anywhere if it has none.
func idsConflict(id, workflow, otherID, otherWorkflow string) bool {
	return id == otherID && (workflow == otherWorkflow || workflow == "" || otherWorkflow == "")
}

// requestDAG is a graph together with the tokens of the same request.
type requestDAG struct {
	tokens []*Token
	dag    DAG
	least  Level
}

func (i requestDAG) Nodes(ctx context.Context, id string) ([]Node, error) {
	nodes, err := i.dag.Nodes(ctx, id)
	if err != nil {
		return nil, err
	}
	for _, t := range i.tokens {
		if t.id != id && t.NodeID() != id {
			continue
		}
		n := t.Node()
		n.Ancestors, n.Weakest = 0, 0 // not recorded yet: a later token may be its parent
		if n.Level == L2 && i.least == L3 {
			n.Level = L3 // the caller records all of them or none
		}
		nodes = append(nodes[:len(nodes):len(nodes)], n)
	}
	return nodes, nil
}

// walker checks one token against the graph.
type walker struct {
	v       *Verifier
	dag     DAG
	token   *Token
	weakest Level
	whole   bool
	count   int // visited ancestors
	known   int // ancestors that visited nodes have recorded
	seen    map[nodeKey]struct{}
	todo    []Node
}

type nodeKey struct{ id, workflow string }

func (w *walker) check(ctx context.Context) error {
	t := w.token
	own, err := w.dag.Nodes(ctx, t.id)
	if err == nil && !t.proven {
		var apart []Node
		apart, err = w.dag.Nodes(ctx, t.NodeID())
		own = append(own[:len(own):len(own)], apart...)
	}
	if err != nil {
		return unavailable(err)
	}
	for _, n := range own {
		// Unproven tokens must not use up the id of a proven one.
		known := idsConflict(t.id, t.workflow, n.ID, n.Workflow) || idsConflict(t.NodeID(), t.workflow, n.ID, n.Workflow)
		// Equal bytes are a retry, which the caller resolves.
		if known && n.Digest != t.Digest() {
			return refuse(CodeReplayed)
		}
	}
	parents, missing, err := w.parents(ctx)
	if err != nil {
		return err
	}
	if err := w.ancestors(ctx, parents, true); err != nil {
		return err
	}
	if w.count+w.known > MaxAncestors {
		// Recorded counts count some ancestors twice; a full walk does not.
		w.weakest, w.count, w.known = L3, 0, 0
		if err := w.ancestors(ctx, parents, false); err != nil {
			return err
		}
	}
	t.lineage = Lineage{
		Checked: true, Missing: missing, Weakest: w.weakest, Ancestors: w.count + w.known,
		whole: w.whole && len(missing) == 0,
	}
	return nil
}

// parents finds and checks the parents.
func (w *walker) parents(ctx context.Context) (found []Node, missing []string, err error) {
	for _, id := range w.token.parents {
		parent, err := w.parent(ctx, id)
		if errors.Is(err, errNoParent) {
			if !w.v.p.AllowPartial {
				return nil, nil, refuse(CodeParentUnknown)
			}
			missing = append(missing, id)
			continue
		}
		if err == nil {
			err = w.checkParent(parent)
		}
		if err != nil {
			return nil, nil, err
		}
		found = append(found, parent)
	}
	return found, missing, nil
}

var errNoParent = errors.New("no such parent")

// parent finds the node of a parent's id: in the token's workflow, else without a
// workflow; for a token without a workflow, any.
func (w *walker) parent(ctx context.Context, id string) (Node, error) {
	nodes, err := w.dag.Nodes(ctx, id)
	if err != nil {
		return Node{}, unavailable(err)
	}
	if len(nodes) == 0 {
		return Node{}, errNoParent
	}
	if n, ok := inWorkflow(nodes, id, w.token.workflow); ok {
		return n, nil
	}
	if w.token.workflow == "" || w.v.p.CrossWorkflow {
		return nodes[0], nil
	}
	return Node{}, &Error{Code: CodeParentUnknown, err: errOtherWorkflow}
}

// inWorkflow returns the node of the workflow, else the one without a workflow. Nodes
// under the UnprovenID come last.
func inWorkflow(nodes []Node, id, workflow string) (found Node, ok bool) {
	for _, want := range []string{workflow, ""} {
		for _, n := range nodes {
			switch {
			case n.Workflow != want:
			case n.ID == id:
				return n, true
			case !ok:
				found, ok = n, true
			}
		}
	}
	return found, ok
}

func (w *walker) checkParent(parent Node) error {
	// The draft has parent.iat < child.iat + skew, so that equality is too late.
	if !parent.IssuedAt.Before(w.token.IssuedAt().Add(Skew)) {
		return refuse(CodeParentLater)
	}
	if parent.Level < w.v.p.MinLevel {
		return refuse(CodeLevel)
	}
	return nil
}

// visit counts a node once and queues it for the walk.
func (w *walker) visit(n Node) error {
	key := nodeKey{n.ID, n.Workflow}
	if _, again := w.seen[key]; again {
		return nil
	}
	if w.count++; w.count > MaxAncestors {
		return refuse(CodeTooManyAncestors)
	}
	w.seen[key] = struct{}{}
	w.weakest = min(w.weakest, n.Level)
	w.todo = append(w.todo, n)
	return nil
}

// ancestors walks on from the parents. With trusting, it takes the ancestors that a node
// recorded for the walk over them: they were there first, so the token is none of them.
func (w *walker) ancestors(ctx context.Context, parents []Node, trusting bool) error {
	w.seen = make(map[nodeKey]struct{})
	for _, n := range parents {
		if err := w.visit(n); err != nil {
			return err
		}
	}
	for len(w.todo) > 0 {
		n := w.todo[len(w.todo)-1]
		w.todo = w.todo[:len(w.todo)-1]
		if trusting && n.Ancestors > 0 && n.Weakest > 0 {
			w.known += n.Ancestors
			w.weakest = min(w.weakest, n.Weakest)
			continue
		}
		for _, id := range n.Parents {
			if err := w.visitParent(ctx, n, id); err != nil {
				return err
			}
		}
	}
	return nil
}

// visitParent visits the parent of an ancestor. A pruned one was there when its child was
// recorded, unless parents may be missing.
func (w *walker) visitParent(ctx context.Context, n Node, id string) error {
	if idsConflict(id, n.Workflow, w.token.id, w.token.workflow) {
		return refuse(CodeCycle) // the token itself is not in the graph yet
	}
	nodes, err := w.dag.Nodes(ctx, id)
	if err != nil {
		return unavailable(err)
	}
	if len(nodes) == 0 {
		w.whole = w.whole && !w.v.p.AllowPartial
		return nil
	}
	parent, ok := inWorkflow(nodes, id, n.Workflow)
	if !ok {
		parent = nodes[0]
	}
	return w.visit(parent)
}
