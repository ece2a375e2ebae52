package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The health of a store.
const (
	// healthOK: the store responds.
	healthOK = "ok"
	// healthClosed: it closed itself after a failed sync. Only a restart opens it again.
	healthClosed = "closed"
	// healthUnknown: it does not respond.
	healthUnknown = "unknown"
)

// maxCounted is the number up to which the executions of a state are counted.
const maxCounted = 10_000

// StoreStatus is the status of a store. Its members are an API.
type StoreStatus struct {
	// Path identifies the store.
	Path string `json:"path"`
	// Health is ok, closed or unknown.
	Health string `json:"health"`
	// Problem says what is wrong if Health is not ok.
	Problem string `json:"problem,omitempty"`
	// Node is the gateway of the store.
	Node string `json:"node"`
	// Boot is the id of this process of the gateway.
	Boot string `json:"boot"`
	// Executions has the numbers of executions by state; absent if they cannot be counted.
	Executions map[string]Count `json:"executions,omitempty"`
	// Quota has the limits of one caller in the latest configuration; absent without
	// limits.
	Quota *Quota `json:"quota,omitempty"`
	// Store is the store's own report; absent if it has none.
	Store *Report `json:"store,omitempty"`
}

// Count is the number of executions in a state; counting stops at 10,000.
type Count struct {
	execution.Count
	// OldestAge is the time since Oldest, in seconds.
	OldestAge int64 `json:"oldest_age,omitempty"`
}

// showStore answers GET store. An unhealthy store is not an error: its health is what was
// asked for.
func showStore(q *request) (any, error) {
	status := StoreStatus{
		Path: q.Path(), Health: healthOK, Node: q.Executions().Node(), Boot: q.Executions().Boot(),
		Quota: q.Quota(), Store: q.Report(),
	}
	var err error
	if status.Executions, err = count(q.Context(), q); err != nil {
		if q.Context().Err() != nil {
			return nil, unavailable(err)
		}
		status.Problem, status.Health = err.Error(), healthUnknown
		if errors.Is(err, store.ErrUnhealthy) {
			status.Health = healthClosed
		}
	}
	if status.Problem == "" && status.Store != nil {
		status.Problem = status.Store.shortage()
	}
	return status, nil
}

func count(ctx context.Context, st Store) (map[string]Count, error) {
	now, err := st.Now(ctx)
	if err != nil {
		return nil, err
	}
	tally, err := st.Executions().Tally(ctx, maxCounted)
	if err != nil {
		return nil, err
	}
	counts := make(map[string]Count, len(tally))
	for _, state := range execution.States() {
		c := tally[state]
		c.Oldest = c.Oldest.UTC()
		counts[state.String()] = Count{c, age(now, c.Oldest)}
	}
	return counts, nil
}

func age(now, then time.Time) int64 {
	if then.IsZero() {
		return 0
	}
	return int64(max(now.Sub(then), 0) / time.Second)
}

// Report has the counts of a store since it was opened. Its members are an API.
type Report struct {
	// Commits is the number of transactions, each with one fsync.
	Commits uint64 `json:"commits"`
	// Batches is the number of committed batches.
	Batches uint64 `json:"batches"`
	// Writes is the number of writes in those.
	Writes uint64 `json:"writes"`
	// RecordsPerSync is Batches divided by Commits.
	RecordsPerSync float64 `json:"records_per_sync"`
	// Conflicts is the number of batches whose conditions failed.
	Conflicts uint64 `json:"conflicts"`
	// Bytes is the size of the written records, in bytes.
	Bytes uint64 `json:"bytes_written"`
	// BodyBytes is the size of the written result bodies, in bytes.
	BodyBytes uint64 `json:"body_bytes_written"`
	// BodySyncs is the number of fsyncs of files with result bodies.
	BodySyncs uint64 `json:"body_syncs"`
	// Dropped is the number of files with result bodies that were deleted after their
	// expiry.
	Dropped uint64 `json:"segments_dropped"`
	// Size is the disk space of the store by part, in bytes.
	Size map[string]uint64 `json:"size_bytes,omitempty"`
	// Dead is the size of expired and replaced records that compaction can reclaim, in
	// bytes.
	Dead int64 `json:"dead_bytes"`
	// Reclaimed is the disk space that compactions have reclaimed, in bytes.
	Reclaimed uint64 `json:"reclaimed_bytes"`
	// MaxSize is the largest size of the store in bytes; 0 without a limit.
	MaxSize int64 `json:"max_size_bytes,omitempty"`
	// Verifying says that the data of earlier processes is still being verified.
	Verifying bool `json:"verifying"`
	// Disk is absent if the system does not report it.
	Disk *Disk `json:"disk,omitempty"`
	// Refused is the number of batches refused because the disk was nearly full.
	Refused uint64 `json:"refused_disk_full"`
	// Database describes the database of a store that is in one: of the above, Commits, Batches,
	// RecordsPerSync and Size are then known. Absent for others.
	Database *Database `json:"database,omitempty"`
}

// Database describes a store's database, as far as its role may see. Its members are an API.
type Database struct {
	// LeaseLeft is how many seconds the lease lasts unless it is renewed; negative once it has ended.
	LeaseLeft float64 `json:"lease_left"`
	// Removed counts the gateways that this one has removed, since they did not respond. Only metrics have it.
	Removed uint64 `json:"-"`
	// Connections are those for reading, by state: in_use, idle, and max, of how many there may be.
	Connections map[string]int `json:"connections"`
	// Waits is the number of reads that waited for a connection.
	Waits uint64 `json:"waits"`
	// Waited is how many seconds they did, together.
	Waited float64 `json:"waited"`
	// Known says that the server has been asked for what follows, a minute ago at most.
	Known bool `json:"known"`
	// Living is the number of rows that are kept, as the server estimates it.
	Living int64 `json:"living_rows"`
	// Dead is the number of rows that were deleted or replaced, and are not vacuumed yet.
	Dead int64 `json:"dead_rows"`
	// Vacuumed is when they were last vacuumed; absent if that is not known.
	Vacuumed time.Time `json:"vacuumed,omitzero"`
	// OldestTransaction is how many seconds the oldest transaction in the database has been open: nothing
	// that was deleted since then is vacuumed.
	OldestTransaction float64 `json:"oldest_transaction"`
	// Standbys is the number of connected standbys.
	Standbys int `json:"standbys"`
	// Lag is how many seconds the last of them is behind; absent if the role may not see it.
	Lag *float64 `json:"standby_lag,omitempty"`
}

// Disk is the free space of a store's disk.
type Disk struct {
	// Free is the free space in bytes.
	Free uint64 `json:"free_bytes"`
	// MinFree is the free space in bytes below which nothing new starts.
	MinFree int64 `json:"min_free_bytes"`
	// Takes is what the store accepts: everything, outcomes, or nothing.
	Takes string `json:"takes"`
}

// What a store accepts, depending on its free disk space (P4).
const (
	// TakesEverything: there is enough space.
	TakesEverything = "everything"
	// TakesOutcomes: nothing new starts, but running executions can end.
	TakesOutcomes = "outcomes"
	// TakesNothing: running executions end in doubt.
	TakesNothing = "nothing"
)

// Watermark is 0 where the store takes everything, 1 for outcomes, and 2 for nothing.
func (d *Disk) Watermark() int {
	return slices.Index([]string{TakesEverything, TakesOutcomes, TakesNothing}, d.Takes)
}

// Quota has the limits of one caller in a store, and of one workflow; zero is no limit.
type Quota struct {
	// OpenExecutions is the largest number of executions that are running or in doubt.
	OpenExecutions int `json:"open_executions,omitempty"`
	// StoredBytes is the largest size of records and answers, in bytes.
	StoredBytes int64 `json:"stored_bytes,omitempty"`
	// WorkflowStoredBytes is the largest size of those of a workflow, in bytes.
	WorkflowStoredBytes int64 `json:"workflow_stored_bytes,omitempty"`
}

// shortage returns the problem of a store that does not accept everything.
func (r *Report) shortage() string {
	switch {
	case r.Disk == nil || r.Disk.Takes == TakesEverything:
		return ""
	case r.MaxSize > 0 && int64(r.Disk.Free) >= r.Disk.MinFree:
		return "the store has reached max_size: guarded calls get 503 until enough has expired"
	default:
		return "the disk is nearly full: guarded calls get 503 until there is space"
	}
}

// NodeList is the answer of GET nodes. Its members are an API.
type NodeList struct {
	// Nodes are the gateways that have the store open, by name.
	Nodes []Node `json:"nodes"`
}

// Node is a gateway that has the store open. What others say of themselves is as old as their last heartbeat. Its
// members are an API.
type Node struct {
	// Node is its name, which stays over restarts.
	Node string `json:"node"`
	// Boot is the id of its process.
	Boot string `json:"boot"`
	// This says that it is the gateway that answers.
	This bool `json:"this"`
	// Version is that of the plugin.
	Version string `json:"version"`
	// Joined is when it opened the store, by the store's clock.
	Joined time.Time `json:"joined"`
	// Seen is when it was last heard of, by the store's clock.
	Seen time.Time `json:"seen"`
	// SeenAge is the time since Seen, in seconds, by the same clock.
	SeenAge float64 `json:"seen_age"`
	// Open is the number of executions that it runs.
	Open int `json:"open_executions"`
	// LogSize is the number of entries in the tree of its log; 0 without an identity.
	LogSize int64 `json:"log_entries"`
	// SealingKeys are the ids of the sealing keys that it has.
	SealingKeys []uint32 `json:"sealing_keys"`
	// Differs are the options in which its configuration differs from that of the gateway that answers, of those
	// that have to be the same at all.
	Differs []string `json:"differs"`
}

func listNodes(q *request) (any, error) {
	all, err := q.Nodes(q.Context())
	if err != nil {
		return nil, unavailable(err)
	}
	return NodeList{Nodes: all}, nil
}

// rotateKeys answers POST keys/rotate with the resulting keys.
func rotateKeys(q *request) (any, error) {
	made, ring, err := q.RotateKeys(q.Context())
	if err != nil {
		return nil, err
	}
	status, err := q.Keys(q.Context())
	if err == nil {
		status.Made, status.Ring = made, ring
	}
	return status, err
}

// Identity is the gateway's identity in tokens, with its public keys. Its members are an
// API.
type Identity struct {
	// Name is the `iss` of the gateway's tokens.
	Name string `json:"name"`
	// File is the path of the key file.
	File string `json:"file"`
	// Algorithm is the algorithm of the next key.
	Algorithm string `json:"algorithm"`
	// Keys are the keys of the file; the last one signs.
	Keys []IdentityKey `json:"keys"`
}

// IdentityKey is one key of the gateway.
type IdentityKey struct {
	// ID is the key's `kid` in tokens.
	ID string `json:"id"`
	// Algorithm is the key's algorithm.
	Algorithm string `json:"alg"`
	// Created is when the key was made; absent if unknown.
	Created time.Time `json:"created,omitzero"`
	// Until is when the key leaves, or has left, the published set; absent for the one that
	// signs.
	Until time.Time `json:"until,omitzero"`
	// Signs says that the key signs new tokens.
	Signs bool `json:"signs"`
	// Revoked says that no signature of the key is accepted any more, not even in records.
	Revoked bool `json:"revoked,omitempty"`
}

// IdentityRotation is the body of POST identity/rotate, which may be empty.
type IdentityRotation struct {
	// Stolen says that an older key was stolen: no older key is published any more.
	Stolen bool `json:"stolen,omitempty"`
}

// maxRotation bounds the body, in bytes.
const maxRotation = 1 << 10

// showIdentity answers GET identity, with the identity of the store's latest configuration.
func showIdentity(q *request) (any, error) {
	if i := q.Identity(); i != nil {
		return i, nil
	}
	return nil, refuse(http.StatusNotFound,
		"the gateway over the store %s has no identity, and signs nothing: configure `identity`, in whose name it signs what it decides", q.Path())
}

// rotateIdentity answers POST identity/rotate with the resulting keys.
func rotateIdentity(q *request) (any, error) {
	var d IdentityRotation
	if err := decode(q.Body, maxRotation, &d); err != nil && !errors.Is(err, io.EOF) {
		return nil, refuse(http.StatusBadRequest, `the request is no {"stolen": true} or {}: %v`, err)
	}
	if _, err := showIdentity(q); err != nil {
		return nil, err
	}
	if err := q.RotateIdentity(d.Stolen); err != nil {
		return nil, err
	}
	return showIdentity(q)
}

// CircuitMode is the body of POST circuits/mode.
type CircuitMode struct {
	// Upstream is the address of the upstream, as in circuits.
	Upstream string `json:"upstream"`
	// Class is undo for servers that the gateway itself calls.
	Class string `json:"class,omitempty"`
	// Mode is auto, observe, forced_open or forced_closed.
	Mode *breaker.Mode `json:"mode"`
}

// maxCircuitMode bounds the body, in bytes.
const maxCircuitMode = 4 << 10

// listCircuits answers GET circuits: with scope=fleet for all nodes that use the store.
func listCircuits(q *request) (any, error) {
	scope := q.one("scope")
	if scope != "" && scope != proxy.ScopeNode && scope != proxy.ScopeFleet {
		q.fail("scope", fmt.Errorf("%q is unknown; use node or fleet", scope))
	}
	if err := q.done(); err != nil {
		return nil, err
	}
	return circuitsOf(q, scope == proxy.ScopeFleet)
}

func circuitsOf(q *request, fleet bool) (any, error) {
	all, err := q.Circuits(q.Context(), fleet)
	if err != nil {
		return nil, unavailable(err)
	}
	return proxy.Document{Circuits: all}, nil
}

func showCascade(q *request) (any, error) {
	c := q.Cascade(q.name)
	if c == nil {
		return nil, refuse(http.StatusNotFound, "no cascade has the id %.80q; cascades lists them", q.name)
	}
	return c, nil
}

func showWorkflow(q *request) (any, error) {
	all := q.Workflows()
	if all == nil {
		return nil, refuse(http.StatusNotFound,
			"the gateway over the store %s has no identity, and records no workflows: configure `identity`", q.Path())
	}
	return shown(func(w http.ResponseWriter) error { return all.ShowOperator(w, q.Request, q.name) }), nil
}

// setCircuitMode answers POST circuits/mode with the resulting breakers.
func setCircuitMode(q *request, d *CircuitMode) (any, error) {
	switch {
	case d.Upstream == "":
		return nil, refuse(http.StatusBadRequest, "upstream: it is missing")
	case d.Mode == nil:
		return nil, refuse(http.StatusBadRequest, "mode: it is missing; it is auto, observe, forced_open or forced_closed")
	}
	found, err := q.SetCircuitMode(q.Context(), breaker.Key{Upstream: d.Upstream, Class: d.Class}, *d.Mode)
	if err != nil {
		return nil, unavailable(err)
	}
	if !found {
		class := ""
		if d.Class != "" {
			class = fmt.Sprintf(" of the class %q", d.Class)
		}
		return nil, refuse(http.StatusNotFound,
			"the upstream %q has no circuit breaker%s: one begins with the first call; circuits lists them", d.Upstream, class)
	}
	return circuitsOf(q, false)
}

// Ledger is the ledger of a store.
type Ledger struct {
	// Log is the log, open as long as the store is in use; nil while it is being opened.
	Log *ledger.Log
	// Key is the public key of the heads of a log of the store, by its origin, in the format of
	// note.NewVerifier.
	Key func(origin string) string
}

// ledgerOf is the store's ledger, and the log in it that the request names: by default the gateway's own.
func ledgerOf(q *request) (l *Ledger, log *ledger.Log, named bool, err error) {
	origin := q.one("log")
	if err := q.done(); err != nil {
		return nil, nil, false, err
	}
	l = q.Ledger()
	switch {
	case l == nil:
		return nil, nil, false, refuse(http.StatusNotFound,
			"the store %s has no ledger: configure `identity`, in whose name the gateway signs what it decides", q.Path())
	case l.Log == nil:
		return nil, nil, false, refuse(http.StatusServiceUnavailable, "the ledger of the store %s is being opened: ask again in a moment", q.Path())
	case origin == "":
		return l, l.Log, false, nil
	}
	log, err = l.Log.In(q.Context(), origin)
	if errors.Is(err, ledger.ErrNotFound) {
		return nil, nil, false, refuse(http.StatusNotFound, "the store has no log %s: `ledger head` lists all", origin)
	}
	if err != nil {
		return nil, nil, false, unavailable(err)
	}
	return l, log, true, nil
}

func ledgerHead(q *request) (any, error) {
	l, log, named, err := ledgerOf(q)
	if err != nil {
		return nil, err
	}
	head := l.head(log)
	if named {
		return head, nil
	}
	origins, err := log.Logs(q.Context())
	if err != nil {
		return nil, unavailable(err)
	}
	for _, origin := range origins {
		if origin == log.Origin() {
			continue
		}
		other, err := log.In(q.Context(), origin)
		theirs := evidence.LedgerHead{Origin: origin, Altered: true}
		if err == nil {
			theirs = l.head(other)
		}
		if err != nil && !errors.Is(err, ledger.ErrTampered) && !errors.Is(err, ledger.ErrNotFound) {
			return nil, unavailable(err)
		}
		head.Logs = append(head.Logs, theirs)
	}
	return head, nil
}

// head describes a log.
func (l *Ledger) head(log *ledger.Log) evidence.LedgerHead {
	head := log.Head()
	return evidence.LedgerHead{Origin: head.Origin, Size: head.Size, Root: head.Root, Key: l.Key(head.Origin), Note: string(head.Note)}
}

func ledgerExport(q *request) (any, error) {
	_, log, _, err := ledgerOf(q)
	if err != nil {
		return nil, err
	}
	return stream(func(to io.Writer) error {
		_, err := log.Export(q.Context(), to)
		return err
	}), nil
}

// ledgerVerify answers GET ledger/verify. It reads the whole log, which may take long.
func ledgerVerify(q *request) (any, error) {
	_, log, _, err := ledgerOf(q)
	if err != nil {
		return nil, err
	}
	found, err := log.Verify(q.Context())
	if err != nil {
		return nil, unavailable(err)
	}
	found.Origin = log.Origin() // also where no head verifies
	return found, nil
}
