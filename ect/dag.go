package ect

import (
	"context"
	"errors"
	"time"
)

// DAG finds recorded tokens by their id.
type DAG interface {
	// Nodes gives all that are recorded under the id, in whatever workflow; none is
	// no error. Where there is none, it may give those of the id's UnprovenID.
	Nodes(ctx context.Context, id string) ([]Node, error)
}

// Node is what the graph knows of a recorded token.
type Node struct {
	// ID and Workflow are jti, or the NodeID, and wid, in lower case. An id is unique
	// within its workflow.
	ID, Workflow string
	// IssuedAt is iat.
	IssuedAt time.Time
	// Parents are the ids of the parents.
	Parents []string
	// Level is the assurance of the token itself.
	Level Level
	// Digest is that of the token; zero where it is not known.
	Digest [32]byte
	// Decision is the pol_decision.
	Decision string
	// Ancestors and Weakest are what Lineage said when the token was recorded. With
	// both, nobody has to walk over its ancestors again, since what is recorded keeps
	// its parents.
	Ancestors int
	Weakest   Level
}

// Node is the token as the graph records it.
func (t *Token) Node() Node {
	decision, _ := t.Ext().Text("pol_decision")
	n := Node{
		ID: t.NodeID(), Workflow: t.workflow, IssuedAt: t.IssuedAt(), Parents: t.Parents(), Level: t.level,
		Digest: t.Digest(), Decision: decision,
	}
	if t.lineage.whole {
		n.Ancestors, n.Weakest = t.lineage.Ancestors, t.Worth()
	}
	return n
}

// Worth is the level of the token's whole chain: the lowest of its own and those of its
// ancestors, as far as they were looked up.
func (t *Token) Worth() Level {
	if !t.lineage.Checked {
		return t.level
	}
	return min(t.level, t.lineage.Weakest)
}

// Lineage is what is known of a token's ancestors.
type Lineage struct {
	// Checked reports that they were looked up at all.
	Checked bool
	// Missing are the parents that could not be had, where the policy allows that.
	Missing []string
	// Weakest is the lowest level among the ancestors; L3 where there are none.
	Weakest Level
	// Ancestors is how many there are, or more: the same one may be counted twice.
	Ancestors int
	// whole: every ancestor was there, so that none of them can be the child of a
	// token that comes later.
	whole bool
}

// Partial reports that parents could not be had, so that the chain is not whole.
func (l Lineage) Partial() bool { return len(l.Missing) > 0 }

// walk checks the parents of the tokens of one request, which may be each other's.
func (v *Verifier) walk(ctx context.Context, tokens []*Token, dag DAG) error {
	if dag == nil {
		return nil
	}
	if len(tokens) > 1 {
		dag = inline{tokens, dag, v.p.MinLevel}
	}
	for _, t := range tokens {
		w := walker{v: v, dag: dag, token: t, weakest: L3, whole: true}
		if err := w.check(ctx); err != nil {
			return err
		}
	}
	return nil
}

// sameScope reports whether two ids cannot both be used: within a workflow, and
// anywhere where one has no workflow.
func sameScope(id, workflow, otherID, otherWorkflow string) bool {
	return id == otherID && (workflow == otherWorkflow || workflow == "" || otherWorkflow == "")
}

// inline is a graph with the tokens that came along.
type inline struct {
	tokens []*Token
	dag    DAG
	least  Level
}

// Nodes implements DAG.
func (i inline) Nodes(ctx context.Context, id string) ([]Node, error) {
	nodes, err := i.dag.Nodes(ctx, id)
	if err != nil {
		return nil, err
	}
	for _, t := range i.tokens {
		if t.id != id && t.NodeID() != id {
			continue
		}
		n := t.Node()
		n.Ancestors, n.Weakest = 0, 0 // it is not recorded, so that a later one may be its parent
		if n.Level == L2 && i.least == L3 {
			n.Level = L3 // all of them are appended, or none is accepted
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
	count   int // ancestors that the walk has met
	known   int // ancestors that nodes on the way know of
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
		// What stands apart is not in the way of a token that is its issuer's.
		known := sameScope(t.id, t.workflow, n.ID, n.Workflow) || sameScope(t.NodeID(), t.workflow, n.ID, n.Workflow)
		// The same bytes are a retry, which whoever records ids settles.
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
	if w.count+w.known > w.v.p.MaxAncestors {
		// What nodes know counts some ancestors twice; the walk itself does not.
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

// parent finds the node that a parent's id means: that of the token's own workflow,
// else one without a workflow; for a token without one, any.
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
	return Node{}, &Error{Code: CodeParentUnknown, err: ErrOtherWorkflow}
}

// inWorkflow is the node of the workflow, or else the one that has none. What only stands
// for the id, as nobody is proven to have issued it, comes last.
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

// checkParent holds what one parent must be.
func (w *walker) checkParent(parent Node) error {
	t := w.token
	// The draft has parent.iat < child.iat + skew, so that equality is too late.
	if !parent.IssuedAt.Before(t.IssuedAt().Add(w.v.p.Skew)) {
		return refuse(CodeParentLater)
	}
	if parent.Level < w.v.p.MinLevel {
		return refuse(CodeLevel)
	}
	if w.v.p.Decisions && (parent.Decision == rejected || parent.Decision == pending) && !remedies(t) {
		return refuse(CodePolicy)
	}
	return nil
}

// remedies reports whether the token is what may follow a decision against its parent.
func remedies(t *Token) bool {
	switch t.event {
	case EventCompensate, EventRollbackRequest, EventRollbackStart, EventRollbackComplete:
		return true
	}
	required, _ := t.Ext().Bool("compensation_required")
	return required || t.action == "remediate" || t.action == "remediation"
}

// meet counts a node and puts it on the list of those to go on from.
func (w *walker) meet(n Node) error {
	key := nodeKey{n.ID, n.Workflow}
	if _, again := w.seen[key]; again {
		return nil
	}
	if w.count++; w.count > w.v.p.MaxAncestors {
		return refuse(CodeTooManyAncestors)
	}
	w.seen[key] = struct{}{}
	w.weakest = min(w.weakest, n.Level)
	w.todo = append(w.todo, n)
	return nil
}

// ancestors walks from the parents on. Trusting, it takes what a recorded node knows of
// its own ancestors for the walk over them: they were there before it, so that the
// token cannot be among them.
func (w *walker) ancestors(ctx context.Context, parents []Node, trusting bool) error {
	w.seen = make(map[nodeKey]struct{})
	for _, n := range parents {
		if err := w.meet(n); err != nil {
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
			if err := w.up(ctx, n, id); err != nil {
				return err
			}
		}
	}
	return nil
}

// up meets the parent of an ancestor. One that is gone was there when its child was
// recorded, unless parents may be missing.
func (w *walker) up(ctx context.Context, n Node, id string) error {
	if sameScope(id, n.Workflow, w.token.id, w.token.workflow) {
		return refuse(CodeCycle) // the token is not in the graph yet
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
	return w.meet(parent)
}
