// Package workflow makes the graph of a workflow out of its recorded tokens, and tells
// the state of each node: ATD, section "Node States", and the finer words of the
// architecture brief's state model.
//
// What is recorded is evidence of who said what. A state is derived from it anew each
// time and is kept nowhere. Nothing is called done or rolled back that is not (P6): an
// execution in doubt is not done, and only a rollback that ended as completed, told by
// whoever made the checkpoint or by the gateway, makes a node rolled back.
//
// Hostile input cannot do harm here: parents that are missing are named, cycles are
// named and end no walk, and every function takes time in proportion to nodes and
// edges, but for a logarithm.
package workflow
