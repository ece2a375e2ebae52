package api

import (
	"fmt"
	"html/template"
	"net/http"
	"slices"
	texttemplate "text/template"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

var htmlPage = template.Must(template.New("problem").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Title}}</title>
<style>body{font:1rem/1.5 system-ui,sans-serif;max-width:42rem;margin:3rem auto;padding:0 1rem}code{background:#8882;padding:.1em .3em}</style>
<p><code>{{.Status}} {{.Slug}}</code></p>
<h1>{{.Title}}</h1>
<p>{{.Meaning}}</p>
<h2>What the caller should do</h2>
<p>{{.Caller}}</p>
<p>{{if .RetryAfter}}A retry of the same call helps.{{else}}A retry of the same call gets the same answer.{{end}}
{{if .SafeNewKey}}A new id is safe.{{else}}A new id is not safe: the effect could happen twice.{{end}}</p>
<h2>What the operator can do</h2>
<p>{{or .Operator "Nothing needs to be done."}}</p>
</html>
`))

var textPage = texttemplate.Must(texttemplate.New("problem").Parse(`{{.Title}} ({{.Status}} {{.Slug}})

{{.Meaning}}

What the caller should do: {{.Caller}}
{{if .RetryAfter}}A retry of the same call helps.{{else}}A retry of the same call gets the same answer.{{end}} {{if .SafeNewKey}}A new id is safe.{{else}}A new id is not safe: the effect could happen twice.{{end}}

What the operator can do: {{or .Operator "Nothing needs to be done."}}
`))

// servePage answers with the page for people about the kind with this slug: as HTML if the
// client accepts it, else as plain text. An empty slug lists all kinds.
func servePage(w http.ResponseWriter, r *http.Request, slug string) {
	all := Kinds()
	if slug == "" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, k := range all {
			_, _ = fmt.Fprintf(w, "%s%s\n\t%d %s\n", problem.BasePath, k.Slug, k.Status, k.Title)
		}
		return
	}
	i := slices.IndexFunc(all, func(k problem.Kind) bool { return k.Slug == slug })
	if i < 0 {
		http.Error(w, "There is no problem of this name.", http.StatusNotFound)
		return
	}
	w.Header().Set("Vary", "Accept")
	if preferred(r, "text/plain", "text/html") == "text/html" {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = htmlPage.Execute(w, all[i]) // only the client's leaving can fail here, as above and below
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_ = textPage.Execute(w, all[i])
}

// Kinds lists all kinds, in the order in which they are documented.
func Kinds() []problem.Kind {
	return []problem.Kind{
		problem.ExecutionIDMissing, problem.ExecutionIDInvalid, problem.WorkflowIDInvalid, problem.NodeUnknown,
		problem.NodeAmbiguous, planInvalid, planRefused, planExists, planReplaced, planInForce, mediaTypeUnsupported,
		problem.BatchMixed, problem.CallerUnstable, problem.FingerprintMismatch, problem.InProgress, problem.InDoubt,
		problem.RolledBack, problem.ResultExpired, problem.ResultUnavailable, problem.QuotaExceeded, problem.BulkheadFull,
		problem.DependencyNotDone, problem.SnapshotFailed, problem.StoreUnavailable, problem.ShuttingDown,
		problem.UpstreamUnreachable, problem.CircuitOpen, problem.BodyTooLarge, problem.BodyTimeout, problem.StreamRefused,
		AuthenticationRequired, executionUnknown, problem.ECTInvalid, problem.ECTUnavailable, entryUnknown, entryPruned,
		WorkflowUnknown, workflowRunning, initiatorRequired, ParameterInvalid, problem.ApprovalRequired,
		problem.ApprovalDenied, escalationUnknown, decisionRefused, decisionVoid, notInWorkflow, coordinatorRequired,
		problem.WorkflowStopped, problem.WorkflowPaused, rollbackConflict, rollbackMismatch, dependedOn, cannotPrepare,
		planChanged, checkpointUnknown, checkpointExpired, checkpointTampered,
	}
}

// The kinds of problems of the gateway's own paths.
var (
	planInvalid = problem.Kind{
		Slug: "plan-invalid", Status: http.StatusUnprocessableEntity, GRPC: 3, // INVALID_ARGUMENT
		Title:   "The plan of the workflow is wrong",
		Meaning: "A plan is taken whole or not at all. `problems` says what is wrong with this one, each with the node that it is about, and what would be right; `more` counts those that are not named. A cycle is named with its path. Nothing was changed.",
		Caller:  "Correct the plan. `caddy agent-guard workflows validate` finds the same without a gateway.",
	}
	planRefused = problem.Kind{
		Slug: "plan-refused", Status: http.StatusForbidden,
		Title:    "The caller may not put a plan for this workflow",
		Meaning:  "A plan is put by a coordinator, by an operator, or by the agent that begins the workflow, before its first call and with a token of the workflow. Nothing was changed.",
		Caller:   "Put the plan before the first call, with a token that names the workflow and has the hash of the body; or let a coordinator do it.",
		Operator: "`coordinators` in the `rollback` block and `operators` in the route name who else may. `caddy agent-guard workflows put` does it from the server.",
	}
	planExists = problem.Kind{
		Slug: "plan-exists", Status: http.StatusPreconditionRequired,
		Title:   "The workflow has another plan already",
		Meaning: "Who changes a plan has to say which version it replaces, so that no other change is lost. Nothing was changed.",
		Caller:  "Read the plan, and send its ETag in If-Match.",
	}
	planReplaced = problem.Kind{
		Slug: "plan-replaced", Status: http.StatusPreconditionFailed,
		Title:   "The plan of the workflow is not the expected one",
		Meaning: "If-Match names another version than the workflow's plan has, or If-None-Match expects none. Somebody else has changed it, or it has expired. Nothing was changed.",
		Caller:  "Read the plan, and decide anew.",
	}
	planInForce = problem.Kind{
		Slug: "plan-in-force", Status: http.StatusConflict,
		Title:    "The workflow has begun under another plan",
		Meaning:  "A workflow stays with the version of its plan under which its first call was claimed. Nothing was changed.",
		Caller:   "Begin another workflow for another plan.",
		Operator: "`caddy agent-guard workflows list` shows which plans are in force.",
	}
	mediaTypeUnsupported = problem.Kind{
		Slug: "media-type-unsupported", Status: http.StatusUnsupportedMediaType,
		Title:   "The body is of another media type",
		Meaning: "The endpoint takes the media types that the field Accept of this answer names. Nothing was changed.",
		Caller:  "Send the body with one of these types in Content-Type.",
	}
	AuthenticationRequired = problem.Kind{
		Slug: "authentication-required", Status: http.StatusUnauthorized,
		Title:    "Only who took part may ask about it",
		Meaning:  "The request has no credential. What became of an execution is told to the identity that made the call, and what a workflow's tokens say to those who took part in it; never to callers without any.",
		Caller:   "Ask with the credential that the call was made with.",
		Operator: "Who the caller is comes from a client certificate, Caddy's authentication, `caller` or a field that is a credential (docs/same-call.md). Cookies count only where `caller cookie` names them. Calls without any of them can be looked up by an operator only.",
	}
	executionUnknown = problem.Kind{
		Slug: "execution-unknown", Status: http.StatusNotFound,
		Title:    "No execution of this caller has this id",
		Meaning:  "At this route and host nothing is recorded under this id for the identity that asks. It was never called, was refused or released without being executed, its key is no longer kept, or it was called with another credential.",
		Caller:   "Ask with the credential and at the host that the call was made with. This is no proof that the call was never executed: a retry is safe under the same id and credential, for as long as keys are kept.",
		Operator: "A credential that was rotated is another caller; an identity from Caddy's authentication, or `caller`, stays the same.",
	}
	entryUnknown = problem.Kind{
		Slug: "entry-unknown", Status: http.StatusNotFound,
		Title:    "The ledger has no such entry for this reader",
		Meaning:  "Nothing stands there, or it belongs to a workflow in which the identity that asks has no part. The two are not told apart.",
		Caller:   "Ask with the identity that took part in the workflow. An entry reaches the ledger a moment after its request.",
		Operator: "Readers are told apart as callers are: by the issuer of a verified token, else by the credential that a call was made with.",
	}
	entryPruned = problem.Kind{
		Slug: "entry-pruned", Status: http.StatusGone,
		Title:    "The content of the entry is no longer kept",
		Meaning:  "The entry was recorded and its content was pruned after the retention. Its hash is still in the tree, and proofs over it still hold.",
		Caller:   "Use a copy of the entry that was made before, if there is one; its receipt and the inclusion proof still prove it.",
		Operator: "`retain` in the `identity` is how long the ledger keeps contents.",
	}
	WorkflowUnknown = problem.Kind{
		Slug: "workflow-unknown", Status: http.StatusNotFound,
		Title:    "No workflow of this reader has this id",
		Meaning:  "Nothing is recorded under this workflow id, or the identity that asks has no part in it. The two are not told apart.",
		Caller:   "Ask with the identity that took part in the workflow.",
		Operator: "Readers are told apart as callers are: by the issuer of a verified token, else by the credential that a call was made with.",
	}
	workflowRunning = problem.Kind{
		Slug: "workflow-running", Status: http.StatusConflict, RetryAfter: 2 * time.Second,
		Title:    "The workflow has not ended",
		Meaning:  "The end of a workflow is recorded when nothing of it runs, is in doubt, or is being undone. Nothing was recorded.",
		Caller:   "Wait for the workflow's calls, and ask again after Retry-After. The workflow's page shows what is open.",
		Operator: "A call in doubt is settled with `caddy agent-guard executions resolve`.",
	}
	initiatorRequired = problem.Kind{
		Slug: "initiator-required", Status: http.StatusForbidden,
		Title:    "Only who has begun the workflow says that it has ended",
		Meaning:  "The end of a workflow is said by who made its first call or sent its workflow_start, or by a coordinator. The identity that asks takes part in the workflow, and is neither. Nothing was recorded.",
		Caller:   "Let the initiator ask.",
		Operator: "`coordinators` in the `rollback` block names who may for all workflows.",
	}
	ParameterInvalid = problem.Kind{
		Slug: "parameter-invalid", Status: http.StatusBadRequest,
		Title:   "The question is malformed",
		Meaning: "A parameter of a request to one of the gateway's own paths cannot be read. This says nothing about any execution.",
		Caller:  "Correct what the detail names.",
	}
	notInWorkflow = problem.Kind{
		Slug: "not-in-workflow", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "The identity that asks has no part in this",
		Meaning:  "The checkpoint or the rollback is not known, or belongs to a workflow in which the identity that asks has no part, or not the part that is needed: by default only who made the call, or what led to it, may have it undone. These are not told apart. Nothing was touched.",
		Caller:   "Ask with a token of the workflow whose issuer is the checkpoint's ancestor: its own token led to the call, or to one before it.",
		Operator: "`lineage workflow` in the `rollback` block lets everybody who is linked to the checkpoint ask, `coordinators` names who may ask for all. An operator can roll back with `caddy agent-guard rollback`.",
	}
	coordinatorRequired = problem.Kind{
		Slug: "coordinator-required", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "Only a rollback coordinator may undo a whole workflow",
		Meaning:  "The scope full_workflow undoes every checkpoint of the workflow, also those of others, and needs the authority of a coordinator. Nothing was touched.",
		Caller:   "Ask for sub_dag, or let the coordinator ask.",
		Operator: "`coordinators` in the `rollback` block names who may. An operator can do it with `caddy agent-guard rollback --scope full_workflow`.",
	}
	rollbackConflict = problem.Kind{
		Slug: "rollback-conflict", Status: http.StatusConflict, SafeNewKey: true, GRPC: 10, // ABORTED: another attempt would be a new one
		Title:    "Another rollback is under way and takes precedence",
		Meaning:  "A rollback of the same checkpoints was asked for before, or with a wider scope. `conflicting_rollback_id` names it. Nothing was begun for this one.",
		Caller:   "Look at the other rollback until it is finished. What it leaves can be asked for again under a new rollback id.",
		Operator: "`caddy agent-guard rollbacks` lists what is under way.",
	}
	escalationUnknown = problem.Kind{
		Slug: "escalation-unknown", Status: http.StatusNotFound,
		Title:    "There is no such escalation for this reader",
		Meaning:  "No escalation has this id, or the identity that asks is neither the one that asked for the decision, nor has the role that is required. These are not told apart.",
		Caller:   "Ask with the identity that made the call, or has the role.",
		Operator: "`role`, `roles` and `role_issuers` in the `hitl` block say who has which role.",
	}
	decisionRefused = problem.Kind{
		Slug: "decision-refused", Status: http.StatusForbidden,
		Title:    "This identity cannot decide it",
		Meaning:  "`reason` says why: `role`, the required role is missing; `own`, who asked cannot approve; `final`, the rule allows no override; `origin`, the request comes from a page of another site. Nothing was decided.",
		Caller:   "Let somebody else decide.",
		Operator: "`role`, `roles` and `role_issuers` in the `hitl` block say who has which role.",
	}
	decisionVoid = problem.Kind{
		Slug: "decision-void", Status: http.StatusConflict,
		Title:    "The decision does not count",
		Meaning:  "`reason` says why: `decided`, it was decided before; `expired`, the time to decide is over; `changed`, something else is proposed than what the decision names. Nothing was changed by it.",
		Caller:   "Read the escalation again.",
		Operator: "`caddy agent-guard escalations show` shows who decided, when and why. A workflow that is still held can be asked for again with `escalations ask`.",
	}
	rollbackMismatch = problem.Kind{
		Slug: "rollback-mismatch", Status: http.StatusUnprocessableEntity, SafeNewKey: true,
		Title:   "The rollback id was used for another rollback",
		Meaning: "A rollback of this checkpoint with this id is recorded, and its scope, reason, urgency or requester are others than this request's. Nothing was begun.",
		Caller:  "If this is meant as another rollback, ask for it under a new id. If it is a repetition, send exactly what was sent before.",
	}
	dependedOn = problem.Kind{
		Slug: "depended-on", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "Completed work depends on what would be undone",
		Meaning:  "Completed actions that the rollback would not undo depend on what it would; `dependants` names some of them. A part of a workflow is rolled back only where nothing of the rest depends on it, unless the request says that the rest is to stay. Nothing was touched.",
		Caller:   "Ask with `cascade` true, or the scope sub_dag, to undo what depends on it too. With `keep_dependants` true it stays as it is: say so only where that can be. Both are other requests, under a new rollback id.",
		Operator: "`caddy agent-guard rollback --cascade --dry-run` shows what would be undone with it; `--keep-dependants` leaves it.",
	}
	cannotPrepare = problem.Kind{
		Slug: "cannot-prepare", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The rollback cannot be planned",
		Meaning:  "What is recorded of the workflow makes no plan; `reason` says why: `too-large`, or `cycle` where something follows from itself. Nothing was touched.",
		Caller:   "Ask for a narrower scope, or ask a person.",
		Operator: "A cycle cannot come from verified tokens: the log names its nodes.",
	}
	planChanged = problem.Kind{
		Slug: "plan-changed", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "What would be undone is not what was prepared",
		Meaning:  "The rollback was prepared, or the request names a `plan_hash`, and by now the plan is another one: calls have ended, or were undone, or others have come. Nothing was begun, and nothing is reserved any more.",
		Caller:   "Prepare the rollback again under the same id, look at the plan, and execute that one.",
		Operator: "Nothing needs to be done. `caddy agent-guard rollback --dry-run` shows the plan as it is now.",
	}
	checkpointUnknown = problem.Kind{
		Slug: "checkpoint-unknown", Status: http.StatusNotFound, SafeNewKey: true,
		Title:    "There is no such checkpoint",
		Meaning:  "Nothing is recorded under this id that could be rolled back. Only coordinators and operators are told so.",
		Caller:   "Take the id from the answer's `Execution-Checkpoint`, or from the workflow.",
		Operator: "The ledger names the checkpoints of a workflow; those whose ttl is long over are purged.",
	}
	checkpointExpired = problem.Kind{
		Slug: "checkpoint-expired", Status: http.StatusGone, SafeNewKey: true,
		Title:    "The checkpoint has expired",
		Meaning:  "The time for which the call could be rolled back is over. What it had changed may have been built upon since. Nothing was touched.",
		Caller:   "Ask a person. A compensating call of your own is a new action.",
		Operator: "The checkpoint's ttl is how long a call can be rolled back.",
	}
	checkpointTampered = problem.Kind{
		Slug: "checkpoint-tampered", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The checkpoint is not what was recorded",
		Meaning:  "The checkpoint's token, one of those that led to it, or the snapshot behind it does not verify. Nothing was touched; an error was told to the ledger.",
		Caller:   "Ask a person. No retry helps.",
		Operator: "Somebody has altered the store, or it is damaged: look at the log, and run `caddy agent-guard ledger check`.",
	}
)
