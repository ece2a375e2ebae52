package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// Family is one metric family as it is exposed.
type Family struct {
	// Name is the whole name.
	Name string
	// Type is counter, gauge or histogram.
	Type string
	// Help is the sentence that Prometheus shows.
	Help string
	// Labels are the names of its labels, in order.
	Labels []string

	desc *prometheus.Desc
}

const (
	counter   = "counter"
	gauge     = "gauge"
	histogram = "histogram"

	namespace         = "agent_guard_"
	nameCommitSeconds = namespace + "store_commit_duration_seconds"
	helpCommitSeconds = "Time that one group of batches took to become durable."
	nameCommitBatches = namespace + "store_commit_batches"
	helpCommitBatches = "Batches that became durable together, with one sync."
)

func family(name, kind, help string, labels ...string) *Family {
	return &Family{
		Name: namespace + name, Type: kind, Help: help, Labels: labels,
		desc: prometheus.NewDesc(namespace+name, help, labels, nil),
	}
}

// The families. Values of labels are words of the configuration or of this program,
// so that their number is bounded: no id, no path and no caller is among them (P8).
var (
	executions = family("executions_total", counter, "Executions that ended, by outcome.", "guard", "action", "outcome")
	running    = family("running", gauge, "Executions that are running now.", "guard", "action")
	replays    = family("replays_total", counter, "Calls that were answered with a recorded result.", "guard", "action")
	attaches   = family("attaches_total", counter, "Calls that were answered by an execution that was running already.", "guard", "action")
	problems   = family("problems_total", counter, "Calls that were answered with a problem of the gateway's own.", "guard", "action", "problem")
	failOpen   = family("fail_open_total", counter, "Calls that were forwarded unguarded because the store was unavailable.", "guard", "action")
	probes     = family("probes_total", counter, "Status probes, by what they found.", "guard", "action", "result")
	unguarded  = family("unguarded_total", counter, "Calls that are not guarded and were passed through.", "guard", "reason")

	tokens = family("tokens_total", counter, "Requests with Execution Context Tokens, by what came of verifying them.", "guard", "result")

	inDoubt       = family("in_doubt", gauge, "Executions that are in doubt now; counted up to 100000.")
	inDoubtOldest = family("in_doubt_oldest_age_seconds", gauge, "Age of the oldest execution in doubt; 0 without one.")
	recovered     = family("recovered_total", counter, "Executions that an earlier process had left open, by what became of them.", "outcome")

	storeHealthy   = family("store_healthy", gauge, "1 where the store is open and answers, else 0.")
	storeOpened    = family("store_opened_timestamp_seconds", gauge, "When the store was opened, in Unix time.")
	storeBytes     = family("store_bytes", gauge, "Bytes of the store on disk, by part.", "part")
	storeFree      = family("store_free_bytes", gauge, "Free bytes on the disk of the store.")
	storeWatermark = family("store_watermark", gauge, "0 where the disk has enough space, 1 where nothing new begins, 2 where nothing is recorded.")
	storeRefused   = family("store_refused_total", counter, "Commits that were refused for want of disk space.")
	commitSeconds  = &Family{Name: nameCommitSeconds, Type: histogram, Help: helpCommitSeconds}
	commitBatches  = &Family{Name: nameCommitBatches, Type: histogram, Help: helpCommitBatches}

	circuitState    = family("circuit_state", gauge, "State of the circuit breaker of an upstream: 0 closed, 1 half-open, 2 open.", "upstream", "class")
	circuitErrors   = family("circuit_error_ratio", gauge, "Share of failures in the breaker's window.", "upstream", "class")
	circuitOpenings = family("circuit_openings_total", counter, "Times that the breaker has opened, since the process began.", "upstream", "class")
	circuitRejected = family("circuit_rejected_total", counter, "Calls that the breaker has refused, since the process began.", "upstream", "class")

	ledgerEntries  = family("ledger_entries", gauge, "Entries of the ledger's tree.")
	ledgerBacklog  = family("ledger_backlog", gauge, "Events that are recorded and wait for their place in the ledger's tree.")
	ledgerAge      = family("ledger_backlog_age_seconds", gauge, "How long the oldest event has waited for its place in the ledger's tree.")
	ledgerUnsigned = family("ledger_unsigned_total", counter, "Events that went into the ledger without a token, since the store was opened.")
	ledgerRetries  = family("ledger_retries_total", counter, "Moves into the ledger's tree that failed and were tried again, since the store was opened.")

	rollbacks        = family("rollbacks_total", counter, "Rollbacks that are finished, by status.", "status")
	rollbackSteps    = family("rollback_steps_total", counter, "Checkpoints that rollbacks are done with, by what came of them.", "status")
	rollbacksRunning = family("rollbacks_running", gauge, "Rollbacks that are not finished.")
	rollbackOldest   = family("rollback_oldest_age_seconds", gauge, "How long ago the oldest unfinished rollback was asked for; 0 without one.")
	escalations      = family("escalations", gauge, "Escalations that are kept, by level and state; counted up to 100000.", "level", "state")
	deliveries       = family("escalation_deliveries_total", counter, "Attempts to tell somebody of an escalation, by what came of them.", "result")

	eventsDropped = family("events_dropped_total", counter, "Events that were dropped because handlers of events were too slow.")
	info          = family("info", gauge, "Always 1; its labels tell the version of the plugin and the kind of store.", "version", "store")
)

// Families lists all families, in the order in which they are documented.
func Families() []*Family {
	return slices.Clone(families)
}

var families = []*Family{
	executions, running, replays, attaches, problems, failOpen, probes, unguarded, tokens,
	inDoubt, inDoubtOldest, recovered,
	storeHealthy, storeOpened, storeBytes, storeFree, storeWatermark, storeRefused, commitSeconds, commitBatches,
	circuitState, circuitErrors, circuitOpenings, circuitRejected,
	ledgerEntries, ledgerBacklog, ledgerAge, ledgerUnsigned, ledgerRetries,
	rollbacks, rollbackSteps, rollbacksRunning, rollbackOldest,
	escalations, deliveries,
	eventsDropped, info,
}
