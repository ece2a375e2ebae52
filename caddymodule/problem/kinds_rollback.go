package problem

import (
	"net/http"
	"time"
)

// The kinds of problems of rollbacks.
var (
	NotInWorkflow = Kind{
		Slug: "not-in-workflow", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "The identity that asks has no part in this",
		meaning:  "The checkpoint or the rollback is not known, or belongs to a workflow in which the identity that asks has no part, or not the part that is needed: by default only who made the call, or what led to it, may have it undone. These are not told apart. Nothing was touched.",
		caller:   "Ask with a token of the workflow whose issuer is the checkpoint's ancestor: its own token led to the call, or to one before it.",
		operator: "`lineage workflow` in the `rollback` block lets everybody who is linked to the checkpoint ask, `coordinators` names who may ask for all. An operator can roll back with `caddy agent-guard rollback`.",
	}
	CoordinatorRequired = Kind{
		Slug: "coordinator-required", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "Only a rollback coordinator may undo a whole workflow",
		meaning:  "The scope full_workflow undoes every checkpoint of the workflow, also those of others, and needs the authority of a coordinator. Nothing was touched.",
		caller:   "Ask for sub_dag, or let the coordinator ask.",
		operator: "`coordinators` in the `rollback` block names who may. An operator can do it with `caddy agent-guard rollback --scope full_workflow`.",
	}
	RollbackConflict = Kind{
		Slug: "rollback-conflict", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "Another rollback is under way and takes precedence",
		meaning:  "A rollback of the same checkpoints was asked for before, or with a wider scope. `conflicting_rollback_id` names it. Nothing was begun for this one.",
		caller:   "Look at the other rollback until it is finished. What it leaves can be asked for again under a new rollback id.",
		operator: "`caddy agent-guard rollbacks` lists what is under way.",
	}
	WorkflowStopped = Kind{
		Slug: "workflow-stopped", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "The workflow was ended",
		meaning:  "A rollback of the scope full_workflow was accepted for the call's workflow. With that the workflow has ended: nothing begins in it any more, also when the rollback is finished. Nothing was recorded or forwarded; what was recorded before is answered as ever.",
		caller:   "Stop the work of this workflow. What has to be done all the same is a new workflow, with an id of its own.",
		operator: "`caddy agent-guard rollbacks` shows the rollback. The workflow stays ended for as long as the rollback is kept (`retain` in the `rollback` block).",
	}
	WorkflowPaused = Kind{
		Slug: "workflow-paused", Status: http.StatusConflict, SafeNewKey: true,
		Title: "What the call follows from is being rolled back",
		retry: true, retryAfter: 2 * time.Second,
		meaning:  "A rollback is under way that undoes what led to this call, and a call that began now could be missing in it. Nothing was recorded or forwarded.",
		caller:   "Look whether the work is still wanted: what it follows from is taken back. If so, send the same call again after Retry-After.",
		operator: "`caddy agent-guard rollbacks` lists what is under way.",
	}
	RollbackMismatch = Kind{
		Slug: "rollback-mismatch", Status: http.StatusUnprocessableEntity, SafeNewKey: true,
		Title:    "The rollback id was used for another rollback",
		meaning:  "A rollback with this id is recorded, and its checkpoint, scope, reason, urgency or requester are others than this request's. Nothing was begun.",
		caller:   "If this is meant as another rollback, ask for it under a new id. If it is a repetition, send exactly what was sent before.",
		operator: "Nothing needs to be done.",
	}
	CannotPrepare = Kind{
		Slug: "cannot-prepare", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The rollback would leave work that depends on what it undoes",
		meaning:  "Completed actions outside the scope depend on what would be undone; `dependants` names some of them. A part of a workflow is rolled back only where nothing of the rest depends on it. Nothing was touched.",
		caller:   "Ask for a wider rollback: from a checkpoint further up, or by a coordinator for the whole workflow.",
		operator: "`caddy agent-guard rollback --dry-run` shows the plan. The scope single leaves consequences as they are, on purpose.",
	}
	CheckpointUnknown = Kind{
		Slug: "checkpoint-unknown", Status: http.StatusNotFound, SafeNewKey: true,
		Title:    "There is no such checkpoint",
		meaning:  "Nothing is recorded under this id that could be rolled back. Only coordinators and operators are told so.",
		caller:   "Take the id from the answer's `Execution-Checkpoint`, or from the workflow.",
		operator: "The ledger names the checkpoints of a workflow; those whose ttl is long over are purged.",
	}
	CheckpointExpired = Kind{
		Slug: "checkpoint-expired", Status: http.StatusGone, SafeNewKey: true,
		Title:    "The checkpoint has expired",
		meaning:  "The time for which the call could be rolled back is over. What it had changed may have been built upon since. Nothing was touched.",
		caller:   "Ask a person. A compensating call of your own is a new action.",
		operator: "The checkpoint's ttl is how long a call can be rolled back.",
	}
	CheckpointTampered = Kind{
		Slug: "checkpoint-tampered", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The checkpoint is not what was recorded",
		meaning:  "The checkpoint's token, one of those that led to it, or the snapshot behind it does not verify. Nothing was touched; an error was told to the ledger.",
		caller:   "Ask a person. No retry helps.",
		operator: "Somebody has altered the store, or it is damaged: look at the log, and run `caddy agent-guard ledger check`.",
	}
)

// rollbackKinds lists the kinds of rollbacks, in the order in which they are documented.
func rollbackKinds() []Kind {
	return []Kind{
		NotInWorkflow, CoordinatorRequired, WorkflowStopped, WorkflowPaused, RollbackConflict, RollbackMismatch, CannotPrepare,
		CheckpointUnknown, CheckpointExpired, CheckpointTampered,
	}
}
