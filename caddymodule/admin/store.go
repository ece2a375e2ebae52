package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The health of a store.
const (
	// HealthOK: the store responds.
	HealthOK = "ok"
	// HealthClosed: it closed itself after a failed sync. Only a restart opens it again.
	HealthClosed = "closed"
	// HealthUnknown: it does not respond.
	HealthUnknown = "unknown"
)

// maxCounted is up to which number the executions of a state are counted.
const maxCounted = 10_000

// StoreStatus is the status of a store.
type StoreStatus struct {
	// Path names the store.
	Path string `json:"path"`
	// Health is ok, closed or unknown.
	Health string `json:"health"`
	// Problem is what is wrong, where it is not ok.
	Problem string `json:"problem,omitempty"`
	// Node is the gateway that the store belongs to.
	Node string `json:"node"`
	// Boot is the id of this process of the gateway.
	Boot string `json:"boot"`
	// Executions are the numbers of executions by state; left out where they cannot
	// be counted.
	Executions map[string]Count `json:"executions,omitempty"`
	// Quota is what one caller may hold, by the latest configuration; left out where
	// nothing bounds it.
	Quota *Quota `json:"quota,omitempty"`
	// Store is the state of the store; left out where it cannot.
	Store *Report `json:"store,omitempty"`
}

// Count is how many executions there are in a state.
type Count struct {
	// Count is their number.
	Count int `json:"count"`
	// AtLeast says that there are more: the counting stops at 10,000.
	AtLeast bool `json:"at_least,omitempty"`
	// Oldest is when the first of them was claimed.
	Oldest time.Time `json:"oldest,omitzero"`
	// OldestAge are the seconds since.
	OldestAge int64 `json:"oldest_age,omitempty"`
}

// showStore answers GET store. A store that is not well is no reason for an error: it is
// what was asked.
func showStore(r *http.Request, st Store) (any, error) {
	status := StoreStatus{
		Path: st.Path(), Health: HealthOK, Node: st.Executions().Node(), Boot: st.Executions().Boot(),
		Quota: st.Quota(), Store: st.Report(),
	}
	var err error
	if status.Executions, err = count(r.Context(), st); err != nil {
		if r.Context().Err() != nil {
			return nil, unavailable(err)
		}
		status.Problem, status.Health = err.Error(), HealthUnknown
		if errors.Is(err, store.ErrUnhealthy) {
			status.Health = HealthClosed
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
		counts[state.String()] = Count{Count: c.N, AtLeast: c.More, Oldest: c.Oldest.UTC(), OldestAge: age(now, c.Oldest)}
	}
	return counts, nil
}

func age(now, then time.Time) int64 {
	if then.IsZero() {
		return 0
	}
	return int64(max(now.Sub(then), 0) / time.Second)
}

// Report is the state of a store: what it did since it was opened.
type Report struct {
	// Commits are transactions, each with one sync.
	Commits uint64 `json:"commits"`
	// Batches are the committed batches.
	Batches uint64 `json:"batches"`
	// Writes are the single writes in those.
	Writes uint64 `json:"writes"`
	// RecordsPerSync is Batches over Commits.
	RecordsPerSync float64 `json:"records_per_sync"`
	// Conflicts are batches that lost to another.
	Conflicts uint64 `json:"conflicts"`
	// Bytes are the bytes of records that were written.
	Bytes uint64 `json:"bytes_written"`
	// BodyBytes are the bytes of result bodies that were written.
	BodyBytes uint64 `json:"body_bytes_written"`
	// BodySyncs are the syncs of files of result bodies.
	BodySyncs uint64 `json:"body_syncs"`
	// Dropped are the files of result bodies that were dropped after their expiry.
	Dropped uint64 `json:"segments_dropped"`
	// Size are the bytes that the store takes of the disk, by part.
	Size map[string]uint64 `json:"size_bytes,omitempty"`
	// Dead are the bytes of expired and replaced records that compaction can give back.
	Dead int64 `json:"dead_bytes"`
	// Reclaimed are the bytes that compactions have reclaimed.
	Reclaimed uint64 `json:"reclaimed_bytes"`
	// MaxSize is the largest size of the store in bytes, 0 without a limit.
	MaxSize int64 `json:"max_size_bytes,omitempty"`
	// Verifying is true while what was there before this opening is still read.
	Verifying bool `json:"verifying"`
	// Disk is left out where the system does not say.
	Disk *Disk `json:"disk,omitempty"`
	// Refused are the batches that were refused because the disk was nearly full.
	Refused uint64 `json:"refused_disk_full"`
}

// Disk is the free space of a store's disk.
type Disk struct {
	// Free are the free bytes.
	Free uint64 `json:"free_bytes"`
	// MinFree are the free bytes below which nothing new starts.
	MinFree int64 `json:"min_free_bytes"`
	// Takes is what the store accepts: everything, outcomes, or nothing.
	Takes string `json:"takes"`
}

// What a store accepts, by the free space of its disk (P4).
const (
	// TakesEverything: there is enough.
	TakesEverything = "everything"
	// TakesOutcomes: nothing new starts, running executions can end.
	TakesOutcomes = "outcomes"
	// TakesNothing: running executions end in doubt.
	TakesNothing = "nothing"
)

// Quota is what one caller may hold in a store at a time; a zero member is no bound.
type Quota struct {
	// OpenExecutions is the largest number of executions that run or are in doubt.
	OpenExecutions int `json:"open_executions,omitempty"`
	// StoredBytes is the largest size of records and answers.
	StoredBytes int64 `json:"stored_bytes,omitempty"`
}

// shortage says what is wrong where the store does not take everything.
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

// KeyStatus is what operators see of the key ring. There is never a key in it.
type KeyStatus struct {
	// Source is "file", or "value" where the configuration gives the key.
	Source string `json:"source"`
	// File is the key file's path.
	File string `json:"file,omitempty"`
	// Keys are the sealing keys, the newest last.
	Keys []Key `json:"keys"`
	// Resealing is the last pass of sealing anew since the store was opened.
	Resealing *Resealing `json:"resealing,omitempty"`
}

// Key is one sealing key.
type Key struct {
	// ID is its number.
	ID uint32 `json:"id"`
	// Created is when it was created.
	Created time.Time `json:"created,omitzero"`
	// Newest marks the key that seals new values.
	Newest bool `json:"newest"`
	// InUse says that something may be sealed with it: the ring must keep it.
	InUse bool `json:"in_use"`
	// Until is when the last of that expires, where that is known.
	Until time.Time `json:"until,omitzero"`
}

// Resealing is the progress of a pass.
type Resealing struct {
	// Key is the sealing key to which values are moved.
	Key uint32 `json:"key"`
	// Seen counts the values that were read.
	Seen int `json:"seen"`
	// Resealed counts those that were sealed again.
	Resealed int `json:"resealed"`
	// Damaged counts those that cannot be opened.
	Damaged int `json:"damaged"`
	// Left are the values under older keys, as far as they were read.
	Left []KeyLeft `json:"left"`
	// Started is when it began.
	Started time.Time `json:"started"`
	// Finished is when it was done; left out while it runs, and where it failed.
	Finished time.Time `json:"finished,omitzero"`
	// Done says that everything was read.
	Done bool `json:"done"`
	// Error is why it stopped; it will be tried again.
	Error string `json:"error,omitempty"`
}

// KeyLeft are the values that are sealed with an older key.
type KeyLeft struct {
	// ID is the key's number.
	ID uint32 `json:"id"`
	// Records are those that could not be moved.
	Records int `json:"records"`
	// Results are parts of answers, which expire.
	Results int `json:"results"`
	// Until is when the last of it expires; left out where some of it does not.
	Until time.Time `json:"until,omitzero"`
}

func showKeys(r *http.Request, st Store) (any, error) {
	return st.Keys(r.Context())
}

// rotateKeys answers POST keys/rotate, with the keys that there are now.
func rotateKeys(r *http.Request, st Store) (any, error) {
	if err := st.RotateKeys(r.Context()); err != nil {
		return nil, err
	}
	return st.Keys(r.Context())
}

// Identity is who the gateway is in its tokens, and what it signs them with. There is
// never a private key in it.
type Identity struct {
	// Name is the `iss` of the gateway's tokens.
	Name string `json:"name"`
	// File is the key file's path.
	File string `json:"file"`
	// Algorithm is that of the next key.
	Algorithm string `json:"algorithm"`
	// Keys are those of the file, the one that signs last.
	Keys []IdentityKey `json:"keys"`
}

// IdentityKey is one key of the gateway.
type IdentityKey struct {
	// ID is its name, the `kid` of its tokens.
	ID string `json:"id"`
	// Algorithm is what it signs with.
	Algorithm string `json:"alg"`
	// Created is when it was made; left out where that is not known.
	Created time.Time `json:"created,omitzero"`
	// Until is when it leaves the published set, or has left it; left out for the one
	// that signs.
	Until time.Time `json:"until,omitzero"`
	// Signs marks the one in use.
	Signs bool `json:"signs"`
	// Revoked says that nothing that it has signed is believed any more, not even
	// records.
	Revoked bool `json:"revoked,omitempty"`
}

// IdentityRotation is what POST identity/rotate takes. An empty body is one without
// members.
type IdentityRotation struct {
	// Stolen says that an older key is in wrong hands: none of them is published any
	// more.
	Stolen bool `json:"stolen,omitempty"`
}

// maxRotation is the most bytes of such a request.
const maxRotation = 1 << 10

// identityOf is the identity in the store's latest configuration.
func identityOf(st Store) (*Identity, error) {
	if i := st.Identity(); i != nil {
		return i, nil
	}
	return nil, refuse(http.StatusNotFound,
		"the gateway over the store %s has no identity, and signs nothing: configure `identity`, in whose name it signs what it decides", st.Path())
}

func showIdentity(_ *http.Request, st Store) (any, error) {
	return identityOf(st)
}

// rotateIdentity answers POST identity/rotate, with the keys that there are now.
func rotateIdentity(r *http.Request, st Store) (any, error) {
	var d IdentityRotation
	if err := decode(r.Body, maxRotation, &d); err != nil && !errors.Is(err, io.EOF) {
		return nil, refuse(http.StatusBadRequest, `the request is no {"stolen": true} or {}: %v`, err)
	}
	if _, err := identityOf(st); err != nil {
		return nil, err
	}
	if err := st.RotateIdentity(d.Stolen); err != nil {
		return nil, err
	}
	return identityOf(st)
}

// CircuitMode is what POST circuits/mode takes.
type CircuitMode struct {
	// Upstream is the address of the upstream, as circuits shows it.
	Upstream string `json:"upstream"`
	// Class is read or write, where these have breakers of their own, or undo.
	Class string `json:"class,omitempty"`
	// Mode is auto, observe, forced_open or forced_closed.
	Mode *breaker.Mode `json:"mode"`
}

// maxCircuitMode is the most bytes of such a request.
const maxCircuitMode = 4 << 10

func (d *CircuitMode) read(from io.Reader) error {
	err := decode(from, maxCircuitMode, d)
	switch {
	case err != nil:
		return refuse(http.StatusBadRequest, `the request is no {"upstream": "host:port", "mode": "forced_open"}: %v`, err)
	case d.Upstream == "":
		return refuse(http.StatusBadRequest, "upstream: it is missing")
	case d.Mode == nil:
		return refuse(http.StatusBadRequest, "mode: it is missing; it is auto, observe, forced_open or forced_closed")
	}
	return nil
}

func listCircuits(_ *http.Request, st Store) (any, error) {
	return proxy.Document{Circuits: st.Circuits()}, nil
}

// setCircuitMode answers POST circuits/mode, with the breakers as they are now.
func setCircuitMode(r *http.Request, st Store) (any, error) {
	var d CircuitMode
	if err := d.read(r.Body); err != nil {
		return nil, err
	}
	found, err := st.SetCircuitMode(r.Context(), breaker.Key{Upstream: d.Upstream, Class: d.Class}, *d.Mode)
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
	return proxy.Document{Circuits: st.Circuits()}, nil
}

// Ledger is the log of a store, as operators see it.
type Ledger struct {
	// Log is the log. It is open for as long as the view is held, and nil while it is
	// being opened.
	Log *ledger.Log
	// Key is the public key with which its heads are verified, in the form that
	// note.NewVerifier reads.
	Key string
}

// LedgerHead is the head of a log.
type LedgerHead struct {
	// Origin is the log's name.
	Origin string `json:"origin"`
	// Size is the number of entries.
	Size int64 `json:"size"`
	// Root is the hash of the tree of that size, in base64.
	Root string `json:"root"`
	// Key is the public key with which the note is verified.
	Key string `json:"key"`
	// Note is the signed head itself.
	Note string `json:"note"`
	// Backlog is what is recorded and has no place in the tree yet.
	Backlog LedgerBacklog `json:"backlog"`
	// Refused is the number of entries since the opening of which no token could be
	// made.
	Refused int64 `json:"refused"`
	// Damaged is the number of waiting events that cannot be opened.
	Damaged int64 `json:"damaged"`
	// Retries is the number of moves into the tree that failed and were tried again.
	Retries int64 `json:"retries"`
}

// LedgerBacklog are the events that wait for the sequencer.
type LedgerBacklog struct {
	// Entries is the number of events.
	Entries int `json:"entries"`
	// Age are the seconds for which the oldest has waited.
	Age int64 `json:"age"`
}

// LedgerReport is the result of verifying a whole log.
type LedgerReport struct {
	// Origin is the log's name.
	Origin string `json:"origin"`
	// Size is the number of entries by the head that stands in the store.
	Size int64 `json:"size"`
	// Root is the hash of the tree by that head, in base64.
	Root string `json:"root"`
	// Entries is the number of entries that are there.
	Entries int64 `json:"entries"`
	// Pruned is the number of those of which only the hash is kept.
	Pruned int64 `json:"pruned"`
	// Vouchers are the keys that vouched for what was pruned.
	Vouchers []LedgerVoucher `json:"vouchers,omitempty"`
	// Waiting counts the events that have no place in the tree yet.
	Waiting int64 `json:"waiting"`
	// Faults are the first 1,000 differences from what was recorded.
	Faults []LedgerFault `json:"faults"`
	// Count is the number of all faults; 0 if the log is intact.
	Count int `json:"count"`
}

// LedgerVoucher is a key that vouched for what was pruned.
type LedgerVoucher struct {
	// Key is its name and its hash, as in the signature of a head.
	Key string `json:"key"`
	// Entries is the number of pruned entries that it vouched for.
	Entries int64 `json:"entries"`
}

// LedgerFault is one difference from what was recorded.
type LedgerFault struct {
	// Index is the entry that it concerns, or the first of several; left out where it
	// concerns none.
	Index *int64 `json:"index,omitempty"`
	// What is wrong.
	What string `json:"what"`
}

func ledgerOf(st Store) (*Ledger, error) {
	if l := st.Ledger(); l != nil && l.Log != nil {
		return l, nil
	} else if l != nil {
		return nil, refuse(http.StatusServiceUnavailable, "the ledger of the store %s is being opened: ask again in a moment", st.Path())
	}
	return nil, refuse(http.StatusNotFound,
		"the store %s has no ledger: configure `identity`, in whose name the gateway signs what it decides", st.Path())
}

func ledgerHead(_ *http.Request, st Store) (any, error) {
	l, err := ledgerOf(st)
	if err != nil {
		return nil, err
	}
	stats, head := l.Log.Stats(), l.Log.Head()
	return LedgerHead{
		Origin: head.Origin, Size: head.Size, Root: head.Root.String(), Key: l.Key, Note: string(head.Note),
		Backlog: LedgerBacklog{Entries: stats.Backlog.Entries, Age: int64(stats.Backlog.Age / time.Second)},
		Refused: stats.Refused, Damaged: stats.Damaged, Retries: stats.Retries,
	}, nil
}

func ledgerExport(r *http.Request, st Store) (any, error) {
	l, err := ledgerOf(st)
	if err != nil {
		return nil, err
	}
	return stream(func(to io.Writer) error {
		_, err := l.Log.Export(r.Context(), to)
		return err
	}), nil
}

// ledgerVerify answers GET ledger/verify. It reads the whole log, which takes a while.
func ledgerVerify(r *http.Request, st Store) (any, error) {
	l, err := ledgerOf(st)
	if err != nil {
		return nil, err
	}
	found, err := l.Log.Verify(r.Context())
	if err != nil {
		return nil, unavailable(err)
	}
	report := LedgerReport{
		Origin: l.Log.Origin(), Size: found.Head.Size, Root: found.Head.Root.String(),
		Entries: found.Entries, Pruned: found.Pruned, Waiting: found.Waiting,
		Faults: make([]LedgerFault, 0, len(found.Faults)), Count: found.Count,
	}
	for _, v := range found.Vouchers {
		report.Vouchers = append(report.Vouchers, LedgerVoucher(v))
	}
	for _, fault := range found.Faults {
		f := LedgerFault{What: fault.What}
		if fault.Index >= 0 {
			f.Index = &fault.Index
		}
		report.Faults = append(report.Faults, f)
	}
	return report, nil
}
