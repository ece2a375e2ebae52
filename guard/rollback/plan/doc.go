// Package plan says what a rollback undoes, in which order, who may ask for it, and
// which of two rollbacks that get in each other's way goes on. It does no input or
// output and reads no clock: it is given the nodes of one workflow, and equal nodes
// give equal plans.
//
// # What is put in
//
// A Node is a token of the workflow as it is recorded: somebody's action, a checkpoint,
// a group of checkpoints, or an event such as an error. Its Parents are the ids in its
// par. A checkpoint is linked to the actions that it was made for by Guards and not by
// its parents, since the drafts place it in two ways: below the action (cascade 4.2.1)
// or before it (cascade, Figure 7). All nodes of the workflow have to be there. Parents
// that are not among them are taken as parts of another workflow or as pruned, and the
// plan stops there (cascade 3.3.2).
//
// # What follows from what
//
// The consequences of a checkpoint are the nodes that are reached by walking forward
// from it and from the actions that it was made for (cascade 4.1.1). What follows from
// a group follows from all that the group contains; the group itself does not, since
// anybody can make one afterwards (ATD, "Hierarchical Checkpoints"). The consequences
// of a group are those of what it contains.
//
// # What is in the plan
//
// A Plan has one Step for each checkpoint in its scope:
//
//   - Single: the target. Of a group also what it contains, groups in it too.
//   - SubDAG: the same, and each checkpoint among their consequences. Where none of
//     these was made for an action among them, those that were: a checkpoint that is
//     placed before its action need not follow from what the action follows from.
//   - FullWorkflow: each checkpoint of the workflow. A coordinator has to ask.
//
// A step says what is to be done with its checkpoint: see What. Nothing is left out
// because it cannot be undone: it has a step that says so. Actions in the scope that no
// step undoes are in Passed, actions outside that a step undoes with others in Along,
// what a group names and nobody knows in Missing. Events have no effects of their own,
// and are in no list.
//
// # The order
//
// Steps stand in levels. Between levels is a barrier: all steps of one are finished
// before the first of the next begins. Steps of one level have nothing to do with each
// other by the tokens and can run side by side; they stand in the reverse of their
// start. What follows from an undone action comes in an earlier level than the action's
// checkpoint, and what a group contains in an earlier level than the group.
//
// Checkpoints can be consequences of each other: two for one action, one for two
// actions of which one follows from the other's, or wilder knots. Nothing can undo
// each of them before the other. Among those the parents in the tokens decide alone:
// the one that was made on top of the other comes first.
//
// # What stays
//
// Siblings that are no consequences stay as they are (ATD, "Partial Rollback and Blast
// Radius Containment"). That is allowed only where no completed one among them depends
// on what is undone. Such a one exists where a checkpoint in the plan was made for two
// actions of which only one is a consequence, and something follows from the other. The
// plan names them in Dependants, and [Plan.Partial] refuses. A Single rollback is asked
// for in order to leave consequences as they are (cascade 4.1.3): it names them and is
// not refused.
//
// # Prepare and execute
//
// Prepare shows a plan and [Plan.Hash], and execute takes a step only from a plan with
// that hash. A plan can be stored and read back as JSON, with the same hash. The hash
// covers all that the plan says: also what is known of each step, so that one that has
// expired meanwhile makes another plan. It does not depend on the order of the nodes,
// nor on nodes that the plan does not name. Events that are recorded later do not
// change it.
//
// A call in flight can have consequences that are not recorded yet. Whoever executes a
// plan that waits sees to it that no new calls begin there.
//
// # Two at once
//
// Rollbacks that share a checkpoint are in each other's way. [Compare] says which one
// takes precedence (cascade 4.3.4), [Meet] what that means for one that has begun.
//
// # Limits
//
// MaxNodes nodes and MaxEdges links between them. Time and memory grow in proportion to
// both, but for sorting the ids.
package plan
