package plan

import "github.com/agent-guard/caddy-agent-guard/internal/jsonx"

// Know has the store know so many workflows in memory.
func (s *Store) Know(most int) { s.most = most }

// Known is how many it knows.
func (s *Store) Known() int { return len(s.all) }

// Work is how many steps with nodes and edges a text takes.
func Work(text []byte) int {
	r := &reader{Scanner: jsonx.Scanner{JSON: string(text)}, plan: &Descriptor{}}
	if r.document() {
		r.connect()
	}
	return r.work
}

const (
	DefaultKeep = defaultKeep
	MaxEdges    = maxEdges
)

var ErrUnknownNode = errUnknownNode

// Order are the places of all nodes in topological order.
func (d *Descriptor) Order() []int { return d.order }
