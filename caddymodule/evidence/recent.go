package evidence

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// remembered is how many nodes each half of recent holds; a node is a few hundred bytes.
const remembered = 8192

// scope is what an id is unique in.
type scope struct{ workflow, id string }

// recent remembers the nodes that were recorded or asked for last. Most tokens name
// parents that are minutes old, and some of these still wait for their place in the
// tree. When the younger half is full it becomes the older one.
type recent[T any] struct {
	mu             sync.Mutex
	younger, older map[scope]T
}

func newRecent[T any]() *recent[T] { return &recent[T]{younger: map[scope]T{}} }

func (r *recent[T]) add(name scope, v T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.younger) >= remembered {
		r.younger, r.older = make(map[scope]T, remembered), r.younger
	}
	r.younger[name] = v
}

func (r *recent[T]) find(workflow, id string) (T, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.younger[scope{workflow, id}]
	if !ok {
		v, ok = r.older[scope{workflow, id}]
	}
	return v, ok
}

// Seen remembers tokens of requests that wrote nothing: what follows from them may name
// them as parents, and then they are recorded with it.
func (e *Evidence) Seen(tokens []*ect.Token) {
	for _, t := range tokens {
		e.seen.add(scope{t.Workflow(), t.NodeID()}, t)
	}
}

// Unrecorded are the tokens that were seen, stand in no ledger as far as is remembered,
// and are among the ancestors of the given ones: the nearest, at most limit, and of these
// parents first. Each is looked at once, however many ways lead to it.
func (e *Evidence) Unrecorded(tokens []*ect.Token, limit int) []*ect.Token {
	known := make(map[scope]bool, len(tokens)+limit)
	for _, t := range tokens {
		known[scope{t.Workflow(), t.NodeID()}] = true
	}
	var near []*ect.Token
	for todo := slices.Clone(tokens); len(todo) > 0; todo = todo[1:] {
		for _, id := range todo[0].Parents() {
			for _, workflow := range scopes(todo[0].Workflow()) {
				name := scope{workflow, id}
				if e.settled(name) || known[name] {
					break
				}
				parent, ok := e.seen.find(name.workflow, name.id)
				if !ok && e.unsigned.Load() {
					name.id = ect.UnprovenID(id)
					if e.settled(name) || known[name] {
						break
					}
					parent, ok = e.seen.find(name.workflow, name.id)
				}
				if !ok {
					continue
				}
				if len(near) < limit {
					known[name] = true
					near, todo = append(near, parent), append(todo, parent)
				}
				break
			}
		}
	}
	return parentsFirst(near)
}

// settled reports whether a token is remembered as recorded.
func (e *Evidence) settled(name scope) bool {
	_, recorded := e.recent.find(name.workflow, name.id)
	return recorded
}

// scopes are the workflows that a parent of a token can be of: its own, or none.
func scopes(workflow string) []string {
	if workflow == "" {
		return []string{""}
	}
	return []string{workflow, ""}
}

// Presented is the token that was seen under an id of a workflow, or of none, behind those
// that were seen, led to it, and are recorded as little: at most limit of these. Nothing
// where it was not seen.
func (e *Evidence) Presented(ctx context.Context, workflow, id string, limit int) ([]*ect.Token, error) {
	t, ok := e.seen.find(workflow, id)
	if !ok {
		t, ok = e.seen.find("", id)
	}
	if !ok {
		return nil, nil
	}
	var all []*ect.Token
	for _, t := range append(e.Unrecorded([]*ect.Token{t}, limit), t) {
		// What was recorded long ago is remembered no more.
		told, err := e.Told(ctx, t.Workflow(), t.NodeID())
		if err != nil {
			return nil, err
		}
		if !told {
			all = append(all, t)
		}
	}
	return all, nil
}

// parentsFirst orders tokens so that each stands behind those of its parents that are
// among them.
func parentsFirst(tokens []*ect.Token) []*ect.Token {
	ordered := make([]*ect.Token, 0, len(tokens))
	var put func(*ect.Token)
	put = func(t *ect.Token) {
		if slices.Contains(ordered, t) {
			return
		}
		for _, other := range tokens {
			if slices.Contains(scopes(t.Workflow()), other.Workflow()) && slices.Contains(t.Parents(), other.ID()) {
				put(other) // what was verified has no cycles
			}
		}
		ordered = append(ordered, t)
	}
	for _, t := range tokens {
		put(t)
	}
	return ordered
}

// Holds looks up in the ledger how a token stands: Same is recorded, Other says that
// another one has its id.
func (e *Evidence) Holds(ctx context.Context, t *ect.Token) (Standing, error) {
	n, ok, err := e.find(ctx, t.Workflow(), t.NodeID())
	if err != nil {
		return Unused, err
	}
	if !ok {
		return e.elsewhere(ctx, t)
	}
	if n.Digest == t.Digest() {
		return Same, nil
	}
	return Other, nil
}

// elsewhere is Other where a token is recorded that has the id, and one of the two has no
// workflow: an id without one is taken anywhere.
func (e *Evidence) elsewhere(ctx context.Context, t *ect.Token) (Standing, error) {
	waits, cancel := context.WithTimeout(ctx, placeTime)
	defer cancel()
	taken := false
	var err error
	if t.Workflow() != "" {
		_, taken, err = e.find(waits, "", t.NodeID())
	} else {
		var entries []ledger.Entry
		entries, err = e.log.FindRecorded(waits, t.NodeID())
		taken = slices.ContainsFunc(entries, func(e ledger.Entry) bool { return e.Workflow != "" })
	}
	if err != nil || !taken {
		return Unused, err
	}
	return Other, nil
}

// graph is the graph of recorded tokens as a token of one workflow sees it.
type graph struct {
	e        *Evidence
	workflow string
	// own is the token's id: nobody asks under what other workflows it stands, since an
	// id is taken in its workflow only.
	own string
}

// AcceptUnsigned says that tokens may be known that nobody is proven to have issued: they
// are looked for from now on.
func (e *Evidence) AcceptUnsigned() { e.unsigned.Store(true) }

// Graph finds recorded tokens for those of a workflow; "" is none.
func (e *Evidence) Graph(workflow string) ect.DAG { return graph{e: e, workflow: workflow} }

// GraphOf finds recorded tokens for one that is not verified yet.
func (e *Evidence) GraphOf(raw string) ect.DAG { return &unread{e: e, raw: raw} }

// unread is the graph as a token sees it that is read when it is needed.
type unread struct {
	e   *Evidence
	raw string
	as  ect.DAG // once it was read
}

// Nodes implements ect.DAG.
func (u *unread) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	if u.as == nil {
		token, err := ect.ParseInsecure(u.raw)
		if err != nil {
			return nil, err
		}
		// A workflow that is a lie finds the parents of another one, which are refused.
		u.as = graph{u.e, token.Workflow(), token.ID()}
	}
	return u.as.Nodes(ctx, id)
}

// Nodes implements ect.DAG. Where nothing else stands under an id, what nobody is proven
// to have issued does.
func (g graph) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	nodes, err := g.nodes(ctx, id)
	if err == nil && len(nodes) == 0 && g.e.unsigned.Load() {
		return g.nodes(ctx, ect.UnprovenID(id))
	}
	return nodes, err
}

func (g graph) nodes(ctx context.Context, id string) ([]ect.Node, error) {
	if n, ok := g.e.recent.find(g.workflow, id); ok {
		return []ect.Node{n}, nil
	}
	if t, ok := g.e.seen.find(g.workflow, id); ok {
		return []ect.Node{t.Node()}, nil
	}
	n, ok, err := g.e.find(ctx, g.workflow, id)
	if err == nil && !ok && g.workflow != "" {
		n, ok, err = g.e.find(ctx, "", id)
	}
	if t, seen := g.e.seen.find("", id); seen && !ok && err == nil {
		return []ect.Node{t.Node()}, nil
	}
	switch {
	case err != nil:
		return nil, err
	case ok:
		return []ect.Node{n}, nil
	case g.workflow != "" && id == g.own:
		return nil, nil
	}
	waits, cancel := context.WithTimeout(ctx, placeTime)
	entries, err := g.e.log.FindRecorded(waits, id)
	cancel()
	if err != nil {
		return nil, err
	}
	nodes := make([]ect.Node, 0, len(entries))
	for i := range entries {
		nodes = append(nodes, nodeOf(&entries[i]))
	}
	return nodes, nil
}

// find finds the recorded token of a workflow with an id. What waits for its place in
// the tree is as good as there.
func (e *Evidence) find(ctx context.Context, workflow, id string) (ect.Node, bool, error) {
	if n, ok := e.recent.find(workflow, id); ok {
		return n, true, nil
	}
	entry, err := e.log.Lookup(ctx, workflow, id)
	if errors.Is(err, ledger.ErrWaiting) {
		waits, cancel := context.WithTimeout(ctx, placeTime)
		entry, err = e.log.Wait(waits, workflow, id)
		cancel()
	}
	switch {
	case errors.Is(err, ledger.ErrNotFound), errors.Is(err, ledger.ErrPruned):
		return ect.Node{}, false, nil
	case err != nil:
		return ect.Node{}, false, err
	}
	n := nodeOf(&entry)
	e.recent.add(scope{n.Workflow, n.ID}, n)
	return n, true, nil
}

// nodeOf is an entry as the graph knows it. What was recorded had been verified; what
// carries a signature besides is of level L3, since it stands in the ledger.
func nodeOf(entry *ledger.Entry) ect.Node {
	n := ect.Node{
		ID: entry.ID, Workflow: entry.Workflow, IssuedAt: entry.Time, Parents: entry.Parents, Level: ect.L3,
	}
	if entry.Unsigned || !strings.Contains(string(entry.Payload), ".") {
		n.Level = ect.L1
	}
	if !entry.Unsigned {
		n.Digest = sha256.Sum256(entry.Payload)
	}
	return n
}
