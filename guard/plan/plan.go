// Package plan reads the plan of a workflow: ATD's declarative workflow descriptor, with the
// constraints that ACP-DAG gives its nodes. It is pure: it reads texts and returns values. The plan of
// a rollback is something else, and package rollback's.
//
// A plan is taken whole or not at all, with every error that it has. Hostile ones do no harm: all
// work is linear in the length of the text.
package plan

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// MediaType is that of a descriptor (ATD, "Media Type").
const MediaType = "application/atd-workflow+json"

// The bounds of a descriptor.
const (
	MaxSize  = 8 << 20 // bytes of its text
	MaxNodes = 10_000
	maxEdges = 100_000
)

// Descriptor is a plan. It never changes, and several goroutines can use it.
type Descriptor struct {
	// WorkflowID is wf_id, the plan's own name: 1 to 256 characters. It is not the wid of a workflow
	// that follows it.
	WorkflowID string
	// Description is for people, up to 4096 characters.
	Description string
	// Nodes are its tasks, as they were written.
	Nodes []Node
	// Edges is how many edges there are.
	Edges int
	// Warnings are what is legal, and probably not meant.
	Warnings []Problem

	index  map[string]int      // id -> place in Nodes
	labels map[string]labelled // by label
	order  []int               // the places in topological order

	version func() string // is computed once
}

// labelled are the nodes with one label: how many, and the places of the first two.
type labelled struct{ n, first, second int }

// Node is a task.
type Node struct {
	// ID is unique in the plan: 1 to 128 visible ASCII characters.
	ID string
	// Label is the action in other words, up to 256 characters. Nodes may share one.
	Label string
	// Reversible says whether the task can be undone; nil if the plan does not say so.
	Reversible *bool
	// HITLRequired says that a person has to approve the task before it begins.
	HITLRequired bool
	// Hints are its needs, from resource_hints and from constraints.
	Hints Hints
	// CircuitThreshold is atd.circuit_threshold, above 0 and below 1; 0 without one.
	CircuitThreshold float64
	// CircuitWindowS is atd.circuit_window_s, seconds from 1 on; 0 without one.
	CircuitWindowS float64
	// Others are the constraints of other specifications, by name.
	Others []Constraint

	// Before and After are the places in Descriptor.Nodes of what it directly depends on, and of what
	// depends on it, for reading only.
	Before, After []int
	// Level is 0 for a node that depends on nothing, else one more than the highest before it.
	Level int
}

// Hints are ATD's resource hints (ATD, "Resource Claim Format"). Zero values are needs that the plan
// does not name.
type Hints struct {
	Priority    string `json:"priority,omitempty"`  // critical, high, normal or low
	TimeoutS    int64  `json:"timeout_s,omitempty"` // whole seconds, up to a year
	CPU         string `json:"cpu,omitempty"`       // a number of processors, like 2 or 0.5
	MemoryMB    int64  `json:"memory_mb,omitempty"`
	GPU         string `json:"gpu,omitempty"` // a number of them
	NetworkMbps int64  `json:"network_mbps,omitempty"`
}

// String is the value of a header field with the hints: a dictionary (RFC 9651), in which their names are
// those of resource_hints. It is empty without hints.
func (h *Hints) String() string {
	var all []string
	add := func(name, value string) {
		if value != "" && value != "0" {
			all = append(all, name+"="+value)
		}
	}
	quoted := func(value string) string {
		if value == "" {
			return ""
		}
		return strconv.Quote(value)
	}
	add("priority", h.Priority)
	add("timeout_s", strconv.FormatInt(h.TimeoutS, 10))
	add("cpu", quoted(h.CPU))
	add("memory_mb", strconv.FormatInt(h.MemoryMB, 10))
	add("gpu", quoted(h.GPU))
	add("network_mbps", strconv.FormatInt(h.NetworkMbps, 10))
	return strings.Join(all, ", ")
}

// Constraint is a member of a node's constraints that is not ATD's. It is kept, and means nothing here.
type Constraint struct {
	Name  string
	Value string // canonical JSON
}

// Problem is an error or a warning.
type Problem struct {
	// Node is the id of the node that it is about, or a place like nodes[3] or edges[0]. It is empty
	// where it is about the whole plan.
	Node string `json:"node,omitempty"`
	// Member is what is wrong, like resource_hints.priority; empty where it is not one member.
	Member string `json:"member,omitempty"`
	// Text says what is wrong and what would be right.
	Text string `json:"problem"`
	// Cycle are the ids on a cycle, in its direction; the first one follows from the last one.
	Cycle []string `json:"cycle,omitempty"`
}

func (p Problem) String() string {
	where := strings.TrimSpace(p.Node + " " + p.Member)
	if where == "" {
		return p.Text
	}
	return where + ": " + p.Text
}

// Error has all that is wrong with a descriptor.
type Error struct {
	// Problems are at most 100.
	Problems []Problem
	// More is how many further ones there are.
	More int
}

func (e *Error) Error() string {
	lines := make([]string, 0, len(e.Problems)+1)
	for _, p := range e.Problems {
		lines = append(lines, p.String())
	}
	if e.More > 0 {
		lines = append(lines, fmt.Sprintf("%d more", e.More))
	}
	return strings.Join(lines, "\n")
}

const maxProblems = 100

// Parse reads a descriptor and checks it whole. The error is an *Error.
func Parse(text []byte) (*Descriptor, error) {
	if len(text) > MaxSize {
		return nil, &Error{Problems: []Problem{{Text: fmt.Sprintf("it has more than %d bytes", MaxSize)}}}
	}
	d := &Descriptor{}
	r := &reader{Scanner: jsonx.Scanner{JSON: string(text), Depth: maxNesting}, plan: d}
	if !r.document() {
		return nil, &Error{Problems: []Problem{r.syntax()}}
	}
	r.connect()
	if len(r.found) > 0 {
		return nil, r.err()
	}
	d.warn()
	d.version = sync.OnceValue(func() string {
		sum := sha256.Sum256(d.Canonical())
		return base64.RawURLEncoding.EncodeToString(sum[:])
	})
	return d, nil
}

// Find returns the place of the node with an id.
func (d *Descriptor) Find(id string) (place int, ok bool) {
	place, ok = d.index[id]
	return place, ok
}

// Levels are the ids of the nodes of each level. Those of one level can run side by side.
func (d *Descriptor) Levels() [][]string {
	var levels [][]string
	for i := range d.Nodes {
		n := &d.Nodes[i]
		for len(levels) <= n.Level {
			levels = append(levels, nil)
		}
		levels[n.Level] = append(levels[n.Level], n.ID)
	}
	return levels
}

// Version names what the plan means: the SHA-256 of its canonical form, in base64url. White space and
// the order of members, nodes and edges make no other version.
func (d *Descriptor) Version() string { return d.version() }

// Canonical is the one text of what the plan means: compact JSON, members by name, nodes by id, edges
// by their ends, and without what is as it is by default. All hints stand in resource_hints.
func (d *Descriptor) Canonical() []byte {
	b := append(make([]byte, 0, 256+128*len(d.Nodes)+64*d.Edges), '{')
	b = appendText(b, "description", d.Description)
	b = append(appendName(b, "edges"), '[')
	byID := make([]int, len(d.Nodes))
	for i := range byID {
		byID[i] = i
	}
	slices.SortFunc(byID, func(i, j int) int { return strings.Compare(d.Nodes[i].ID, d.Nodes[j].ID) })
	rank := make([]int, len(d.Nodes)) // of each place
	for k, i := range byID {
		rank[i] = k
	}
	var after []int // ranks
	for _, i := range byID {
		after = after[:0]
		for _, j := range d.Nodes[i].After {
			after = append(after, rank[j])
		}
		slices.Sort(after)
		for _, k := range after {
			b = append(appendText(appendText(append(comma(b), '{'), "from", d.Nodes[i].ID), "to", d.Nodes[byID[k]].ID), '}')
		}
	}
	b = append(appendName(append(b, ']'), "nodes"), '[')
	for _, i := range byID {
		b = d.Nodes[i].append(comma(b))
	}
	return append(appendText(append(b, ']'), "wf_id", d.WorkflowID), '}')
}

func (n *Node) append(b []byte) []byte {
	b = append(b, '{')
	constraints := slices.Clone(n.Others)
	if n.CircuitThreshold != 0 {
		constraints = append(constraints, Constraint{circuitThreshold, strconv.FormatFloat(n.CircuitThreshold, 'g', -1, 64)})
	}
	if n.CircuitWindowS != 0 {
		constraints = append(constraints, Constraint{circuitWindow, strconv.FormatFloat(n.CircuitWindowS, 'g', -1, 64)})
	}
	if len(constraints) > 0 {
		slices.SortFunc(constraints, func(a, b Constraint) int { return strings.Compare(a.Name, b.Name) })
		b = append(appendName(b, memberConstraints), '{')
		for _, c := range constraints {
			b = append(appendName(b, c.Name), c.Value...)
		}
		b = append(b, '}')
	}
	if n.HITLRequired {
		b = append(appendName(b, "hitl_required"), "true"...)
	}
	b = appendText(appendText(b, "id", n.ID), "label", n.Label)
	if n.Hints != (Hints{}) {
		b = n.Hints.append(appendName(b, memberHints))
	}
	if n.Reversible != nil {
		b = strconv.AppendBool(appendName(b, "reversible"), *n.Reversible)
	}
	return append(b, '}')
}

func (h *Hints) append(b []byte) []byte {
	b = appendText(appendText(append(b, '{'), "cpu", h.CPU), "gpu", h.GPU)
	b = appendWhole(appendWhole(b, "memory_mb", h.MemoryMB), "network_mbps", h.NetworkMbps)
	b = appendText(b, "priority", h.Priority) // normal too: it comes before what a token says
	return append(appendWhole(b, "timeout_s", h.TimeoutS), '}')
}

// comma separates what comes from what stands before it in the same object or array.
func comma(b []byte) []byte {
	if last := b[len(b)-1]; last != '{' && last != '[' {
		b = append(b, ',')
	}
	return b
}

func appendName(b []byte, name string) []byte {
	return append(jsonx.AppendText(comma(b), name), ':')
}

func appendText(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	return jsonx.AppendText(appendName(b, name), value)
}

func appendWhole(b []byte, name string, value int64) []byte {
	if value == 0 {
		return b
	}
	return strconv.AppendInt(appendName(b, name), value, 10)
}

// warn indexes the labels, and finds those by which a call does not name one node.
func (d *Descriptor) warn() {
	d.labels = make(map[string]labelled, len(d.Nodes))
	var shared []string
	for i := range d.Nodes {
		label := d.Nodes[i].Label
		if label == "" {
			continue
		}
		l := d.labels[label]
		switch l.n++; l.n {
		case 1:
			l.first = i
		case 2:
			l.second = i
			shared = append(shared, label)
		}
		d.labels[label] = l
		if other, ok := d.index[label]; ok && other != i {
			d.Warnings = append(d.Warnings, Problem{Node: d.Nodes[i].ID, Member: "label",
				Text: fmt.Sprintf("%q is also the id of a node, and means that one", cut(label))})
		}
	}
	for _, label := range shared {
		if _, ok := d.index[label]; ok {
			continue
		}
		l := d.labels[label]
		d.Warnings = append(d.Warnings, Problem{Node: d.Nodes[l.first].ID, Member: "label",
			Text: fmt.Sprintf("%q is the label of %d nodes, such as %s: their calls have to name the node", cut(label), l.n, cut(d.Nodes[l.second].ID))})
	}
}

// CheckUndo compares reversible with what undoes the calls in truth. A node's action is that called
// like its label, else that called like its id; canUndo says whether a way to undo it is configured,
// and known is false for an action that is not.
func (d *Descriptor) CheckUndo(canUndo func(action string) (reversible, known bool)) []Problem {
	var found []Problem
	for i := range d.Nodes {
		n := &d.Nodes[i]
		if n.Reversible == nil {
			continue
		}
		action := n.Label
		can, known := canUndo(action)
		if !known {
			action = n.ID
			can, known = canUndo(action)
		}
		switch {
		case !known || can == *n.Reversible:
		case can:
			found = append(found, Problem{Node: n.ID, Member: "reversible", Text: fmt.Sprintf("is false, but the action %q can be undone", action)})
		default:
			found = append(found, Problem{Node: n.ID, Member: "reversible",
				Text: fmt.Sprintf("is true, but nothing undoes the action %q: give it restore, compensate or delegate, or say false", action)})
		}
	}
	return found
}

// Kinds are the problems with plans, in the order in which they are documented.
var Kinds = []problem.Kind{invalid, Refused, exists, replaced, inForce, MediaTypeUnsupported}

var (
	invalid = problem.Kind{
		Slug: "plan-invalid", Status: http.StatusUnprocessableEntity, GRPC: 3, // INVALID_ARGUMENT
		Title:   "The plan of the workflow is wrong",
		Meaning: "A plan is taken whole or not at all. `problems` says what is wrong with this one, each with the node that it is about, and what would be right; `more` counts those that are not named. A cycle is named with its path. Nothing was changed.",
		Caller:  "Correct the plan. `caddy agent-guard workflows validate` finds the same without a gateway.",
	}
	exists = problem.Kind{
		Slug: "plan-exists", Status: http.StatusPreconditionRequired,
		Title:   "The workflow has another plan already",
		Meaning: "Who changes a plan has to say which version it replaces, so that no other change is lost. Nothing was changed.",
		Caller:  "Read the plan, and send its ETag in If-Match.",
	}
	replaced = problem.Kind{
		Slug: "plan-replaced", Status: http.StatusPreconditionFailed,
		Title:   "The plan of the workflow is not the expected one",
		Meaning: "If-Match names another version than the workflow's plan has, or If-None-Match expects none. Somebody else has changed it, or it has expired. Nothing was changed.",
		Caller:  "Read the plan, and decide anew.",
	}
	inForce = problem.Kind{
		Slug: "plan-in-force", Status: http.StatusConflict,
		Title:    "The workflow has begun under another plan",
		Meaning:  "A workflow stays with the version of its plan under which its first call was claimed. Nothing was changed.",
		Caller:   "Begin another workflow for another plan.",
		Operator: "`caddy agent-guard workflows list` shows which plans are in force.",
	}
	// Refused is for who may not put a plan.
	Refused = problem.Kind{
		Slug: "plan-refused", Status: http.StatusForbidden,
		Title:    "The caller may not put a plan for this workflow",
		Meaning:  "A plan is put by a coordinator, by an operator, or by the agent that begins the workflow, before its first call and with a token of the workflow. Nothing was changed.",
		Caller:   "Put the plan before the first call, with a token that names the workflow and has the hash of the body; or let a coordinator do it.",
		Operator: "`coordinators` in the `rollback` block and `operators` in the route name who else may. `caddy agent-guard workflows put` does it from the server.",
	}
	// MediaTypeUnsupported is for what is no plan.
	MediaTypeUnsupported = problem.Kind{
		Slug: "media-type-unsupported", Status: http.StatusUnsupportedMediaType,
		Title:   "The body is of another media type",
		Meaning: "The endpoint takes the media types that the field Accept of this answer names. Nothing was changed.",
		Caller:  "Send the body with one of these types in Content-Type.",
	}
)

// ProblemOf maps an error of this package to a problem; nil if it is none.
func ProblemOf(err error) *problem.Problem {
	var wrong *Error
	switch {
	case errors.As(err, &wrong):
		p := problem.New(invalid, fmt.Sprintf("It has %d problems, which the member problems lists.", len(wrong.Problems)+wrong.More))
		p.Problems, p.More = wrong.Problems, wrong.More
		return p
	case errors.Is(err, ErrExists):
		return problem.New(exists, "Name the version that is replaced in If-Match.")
	case errors.Is(err, ErrChanged):
		return problem.New(replaced, "Read it, and decide anew.")
	case errors.Is(err, ErrBegun):
		return problem.New(inForce, "The workflow stays with the version under which its first call began.")
	case errors.Is(err, ErrFull):
		return problem.New(problem.QuotaExceeded, "As many plans are kept as may be.")
	}
	return nil
}
