package graph

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// maxRecoveryPoints is how many candidates are shown.
const maxRecoveryPoints = 16

// workflowDocument is a workflow as its tokens tell. Its members are an API.
type workflowDocument struct {
	Workflow string `json:"wid"`
	// Status and the nodes' states are left out where not all of the workflow was
	// read: what was not could change them (P6).
	Status    workflow.Status `json:"status,omitempty"`
	Stated    string          `json:"stated_status,omitempty"`
	Truncated bool            `json:"truncated,omitempty"`

	Tasks map[workflow.State]int `json:"tasks,omitempty"`
	// RecoveryPoints are the checkpoints that the workflow can go back to, the most
	// recent first.
	RecoveryPoints []string `json:"recovery_points,omitempty"`

	Roots     []string       `json:"roots"`
	Leaves    []string       `json:"leaves"`
	Unordered []string       `json:"unordered,omitempty"`
	Nodes     []nodeDocument `json:"nodes"` // in topological order
	Edges     []edgeDocument `json:"edges"`
}

type nodeDocument struct {
	ID       string         `json:"jti"`
	Action   string         `json:"exec_act"`
	Event    workflow.Event `json:"event,omitempty"`
	Issuer   string         `json:"iss,omitempty"`
	Time     time.Time      `json:"time,omitzero"`
	Recorded time.Time      `json:"recorded"`
	Log      string         `json:"log"`
	Index    int64          `json:"index"`

	State  workflow.State  `json:"state,omitempty"`
	Detail workflow.Detail `json:"detail,omitempty"`

	// Outcome and Answer, the status of the upstream's, are of a guarded call.
	Outcome workflow.Outcome `json:"outcome,omitempty"`
	Answer  int64            `json:"answer_status,omitempty"`
	// Severity is an error's own; Worst the highest of a node's errors.
	Severity     string    `json:"severity,omitempty"`
	Worst        string    `json:"worst_severity,omitempty"`
	CheckpointID string    `json:"checkpoint_id,omitempty"`
	Status       string    `json:"status,omitempty"`
	Reversible   *bool     `json:"reversible,omitempty"`
	Expires      time.Time `json:"expires,omitzero"`
	Guards       []string  `json:"guards,omitempty"`
	Missing      []string  `json:"missing_parents,omitempty"`
	Entry        string    `json:"entry"`
}

type edgeDocument struct {
	From string            `json:"from"`
	To   string            `json:"to"`
	Kind workflow.EdgeKind `json:"kind"`
}

// source is where a node stands in the ledger, and what the graph does not need of it.
type source struct {
	log    string
	index  int64
	at     time.Time
	status int64 // of the upstream's answer; 0 is none
}

func (s *Server) sourceOf(e *ledger.Entry) source {
	from := source{log: e.Log, index: e.Index, at: e.Recorded}
	if s.own(e) {
		from.status, _ = extOf(e).Int(evidence.MemberStatus)
	}
	return from
}

// workflow answers with the graph of a workflow (A-node-states-a).
func (q *question) workflow() error {
	name, err := segment(q.name, "workflow id")
	if err != nil {
		return err
	}
	// Whoever saw the end of a call can rely on its record.
	whole, err := q.caughtUp(q.r.Context())
	if err != nil {
		return err
	}
	for _, wid := range workflowIDs(name) {
		doc, found, err := q.read(wid, whole)
		if err != nil {
			return err
		}
		if found {
			return q.writeJSON(http.StatusOK, doc)
		}
	}
	return unknownWorkflow()
}

func unknownWorkflow() error {
	return problem.New(problem.WorkflowUnknown, "Nothing of it is known for the identity that asks.")
}

// read reads what the reader may see of a workflow. It is not whole where some of what was
// recorded cannot be read.
func (q *question) read(wid string, whole bool) (doc workflowDocument, found bool, err error) {
	var records []workflow.Record
	var sources []source
	p := sharing{Server: q.Server, who: q.who}
	more, err := q.each(q.r.Context(), wid, func(e *ledger.Entry) bool {
		p.add(e)
		records, sources = append(records, q.recordOf(e)), append(sources, q.sourceOf(e))
		return false
	})
	part := p.share()
	if err != nil || part.empty() {
		return doc, false, err
	}
	if err := markStrangers(records, func(id string) ([]string, error) {
		e, err := q.Log.Lookup(q.r.Context(), wid, id)
		if errors.Is(err, ledger.ErrPruned) {
			return nil, nil // meanwhile
		}
		return audienceOf(&e), err
	}); err != nil {
		return doc, false, err
	}
	records, sources = inOrder(records, sources, &part)
	return describe(wid, records, sources, more || !whole, time.Now()), true, nil
}

// inOrder brings what several nodes of a fleet have recorded into one order, as far as
// the reader may see it.
func inOrder(records []workflow.Record, sources []source, part *share) (r []workflow.Record, s []source) {
	var order []int
	for i := range records {
		if part.has(records[i].ID) {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return sources[a].at.Compare(sources[b].at) })
	for _, i := range order {
		r, s = append(r, records[i]), append(s, sources[i])
	}
	return r, s
}

func describe(id string, records []workflow.Record, sources []source, truncated bool, now time.Time) workflowDocument {
	g := workflow.New(records)
	at := make(map[string]source, len(records))
	for i, r := range records {
		if _, twice := at[r.ID]; !twice {
			at[r.ID] = sources[i]
		}
	}
	doc := workflowDocument{
		Workflow: id, Truncated: truncated, Roots: g.Roots(), Leaves: g.Leaves(), Unordered: g.Unordered(),
		Nodes: []nodeDocument{}, Edges: []edgeDocument{},
	}
	if !truncated {
		s := g.Summary()
		doc.Status, doc.Stated, doc.Tasks = s.Status, s.Stated, s.Tasks
		points := g.RecoveryPoints(now)
		doc.RecoveryPoints = points[:min(len(points), maxRecoveryPoints)]
	}
	for _, n := range g.Nodes() {
		doc.Nodes = append(doc.Nodes, describeNode(id, &n, at[n.ID], truncated))
	}
	for _, e := range g.Edges() {
		doc.Edges = append(doc.Edges, edgeDocument(e))
	}
	return doc
}

func describeNode(id string, n *workflow.Node, from source, truncated bool) nodeDocument {
	doc := nodeDocument{
		ID: n.ID, Action: n.Action, Event: n.Event, Issuer: n.Issuer, Time: n.Time.UTC(),
		Recorded: from.at.UTC(), Log: from.log, Index: from.index, Outcome: n.Outcome, Answer: from.status,
		Severity: n.Severity, Worst: n.Worst, CheckpointID: n.CheckpointID, Status: n.Status,
		Guards: n.Guards, Missing: n.Missing, Entry: entryURL(id, n.ID),
	}
	if !truncated {
		doc.State, doc.Detail = n.State, n.Detail
	}
	if n.Event == workflow.Checkpoint {
		doc.Reversible, doc.Expires = &n.Reversible, n.Expires.UTC()
	}
	return doc
}
