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
}

// Graph finds recorded tokens for those of a workflow; "" is none.
func (e *Evidence) Graph(workflow string) ect.DAG { return graph{e, workflow} }

// GraphOf finds recorded tokens for one that is not verified yet.
func (e *Evidence) GraphOf(raw string) ect.DAG { return unread{e, raw} }

// unread is the graph as a token sees it whose workflow is read when it is needed:
// tokens without parents need none.
type unread struct {
	e   *Evidence
	raw string
}

// Nodes implements ect.DAG.
func (u unread) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	token, err := ect.ParseInsecure(u.raw)
	if err != nil {
		return nil, err
	}
	// A workflow that is a lie finds the parents of another one, which are refused.
	return graph{u.e, token.Workflow()}.Nodes(ctx, id)
}

// Nodes implements ect.DAG.
func (g graph) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	if n, ok := g.e.recent.find(g.workflow, id); ok {
		return []ect.Node{n}, nil
	}
	entries, err := g.e.log.Find(ctx, id)
	if err != nil && !errors.Is(err, ledger.ErrNotFound) {
		return nil, err
	}
	here := func(entry ledger.Entry) bool { return entry.Workflow == g.workflow }
	if !slices.ContainsFunc(entries, here) {
		// What waits for its place in the tree is as good as there.
		entry, err := g.e.log.Lookup(ctx, g.workflow, id)
		if errors.Is(err, ledger.ErrWaiting) {
			entry, err = g.e.log.Wait(ctx, g.workflow, id)
		}
		switch {
		case err == nil:
			entries = append(entries, entry)
		case !errors.Is(err, ledger.ErrNotFound) && !errors.Is(err, ledger.ErrPruned):
			return nil, err
		}
	}
	nodes := make([]ect.Node, 0, len(entries))
	for i := range entries {
		n := nodeOf(&entries[i])
		if n.Workflow == g.workflow {
			g.e.recent.add(n)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
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
