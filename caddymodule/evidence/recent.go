package evidence

import (
	"context"
	"crypto/sha256"
	"errors"
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
type recent struct {
	mu             sync.Mutex
	younger, older map[scope]ect.Node
}

func newRecent() *recent { return &recent{younger: map[scope]ect.Node{}} }

func (r *recent) add(n ect.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.younger) >= remembered {
		r.younger, r.older = make(map[scope]ect.Node, remembered), r.younger
	}
	r.younger[scope{n.Workflow, n.ID}] = n
}

func (r *recent) find(workflow, id string) (ect.Node, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, ok := r.younger[scope{workflow, id}]
	if !ok {
		n, ok = r.older[scope{workflow, id}]
	}
	return n, ok
}

// graph is the graph of recorded tokens as a token of one workflow sees it.
type graph struct {
	e        *Evidence
	workflow string
	// own is the token's id: nobody asks under what other workflows it stands, since an
	// id is taken in its workflow only.
	own string
}

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

// Nodes implements ect.DAG.
func (g graph) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	n, ok, err := g.e.Find(ctx, g.workflow, id)
	if err == nil && !ok && g.workflow != "" {
		n, ok, err = g.e.Find(ctx, "", id)
	}
	switch {
	case err != nil:
		return nil, err
	case ok:
		return []ect.Node{n}, nil
	case g.workflow != "" && id == g.own:
		return nil, nil
	}
	entries, err := g.e.log.Find(ctx, id)
	if err != nil && !errors.Is(err, ledger.ErrNotFound) {
		return nil, err
	}
	nodes := make([]ect.Node, 0, len(entries))
	for i := range entries {
		nodes = append(nodes, nodeOf(&entries[i]))
	}
	return nodes, nil
}

// Find finds the recorded token of a workflow with an id. What waits for its place in
// the tree is as good as there.
func (e *Evidence) Find(ctx context.Context, workflow, id string) (ect.Node, bool, error) {
	if n, ok := e.recent.find(workflow, id); ok {
		return n, true, nil
	}
	entry, err := e.log.Lookup(ctx, workflow, id)
	if errors.Is(err, ledger.ErrWaiting) {
		entry, err = e.log.Wait(ctx, workflow, id)
	}
	switch {
	case errors.Is(err, ledger.ErrNotFound), errors.Is(err, ledger.ErrPruned):
		return ect.Node{}, false, nil
	case err != nil:
		return ect.Node{}, false, err
	}
	n := nodeOf(&entry)
	e.recent.add(n)
	return n, true, nil
}

// nodeOf is an entry as the graph knows it. What was recorded had been verified.
func nodeOf(entry *ledger.Entry) ect.Node {
	n := ect.Node{
		ID: entry.ID, Workflow: entry.Workflow, IssuedAt: entry.Time, Parents: entry.Parents, Level: ect.L2,
	}
	if !strings.Contains(string(entry.Payload), ".") {
		n.Level = ect.L1
	}
	if !entry.Unsigned {
		n.Digest = sha256.Sum256(entry.Payload)
	}
	return n
}
