package plan

import (
	"fmt"
	"strconv"
	"strings"
)

// longestQuote bounds what an error repeats of foreign text, in bytes.
const longestQuote = 80

// shownIDs is how many ids an error names.
const shownIDs = 5

// TooManyError refuses a graph that is over a limit.
type TooManyError struct {
	// What is counted: nodes, or edges.
	What string
	// Count is how many there are, Limit how many there may be.
	Count, Limit int
}

// Error implements error.
func (e *TooManyError) Error() string {
	return fmt.Sprintf("plan: the workflow has %d %s, and at most %d can be planned for", e.Count, e.What, e.Limit)
}

// NodeError refuses a node that cannot be, which is a mistake of whoever made it.
type NodeError struct {
	// ID is the node's.
	ID string
	// Problem is what is wrong with it.
	Problem string
}

// Error implements error.
func (e *NodeError) Error() string { return "plan: node " + quote(e.ID) + ": " + e.Problem }

// UnknownError refuses a target that is no checkpoint of the workflow.
type UnknownError struct {
	// Checkpoint is the id that was asked for.
	Checkpoint string
}

// Error implements error.
func (e *UnknownError) Error() string {
	return "plan: checkpoint " + quote(e.Checkpoint) + " is not among the workflow's checkpoints"
}

// ScopeError refuses a scope: one that does not exist, or one that the requester has
// no authority for.
type ScopeError struct {
	// Scope is what was asked for.
	Scope Scope
}

// Error implements error.
func (e *ScopeError) Error() string {
	if e.Scope == FullWorkflow {
		return "plan: scope full_workflow needs the authority of a rollback coordinator"
	}
	return "plan: scope " + quote(string(e.Scope)) + " is none of single, sub_dag and full_workflow"
}

// CycleError refuses nodes that follow from themselves. Verified tokens cannot.
type CycleError struct {
	// Nodes lie on a cycle or behind one, the lowest id first. They are never none.
	Nodes []string
}

// Error implements error.
func (e *CycleError) Error() string {
	return "plan: nodes follow from themselves, or from nodes that do: " + list(e.Nodes)
}

// DependedOnError refuses to leave the rest of the workflow as it is.
type DependedOnError struct {
	// Dependants are completed actions outside the plan that depend on what it undoes.
	Dependants []string
}

// Error implements error.
func (e *DependedOnError) Error() string {
	return "plan: completed actions that are not undone depend on what is: " + list(e.Dependants) +
		"; a wider rollback takes them along"
}

func list(ids []string) string {
	var shown []string
	for _, id := range ids[:min(len(ids), shownIDs)] {
		shown = append(shown, quote(id))
	}
	text := strings.Join(shown, ", ")
	if more := len(ids) - shownIDs; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func quote(text string) string {
	if len(text) > longestQuote {
		return strconv.Quote(text[:longestQuote]) + "..."
	}
	return strconv.Quote(text)
}
