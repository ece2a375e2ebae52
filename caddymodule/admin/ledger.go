package admin

import (
	"io"
	"net/http"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Ledger is the log of a store, as operators see it.
type Ledger struct {
	// Log is the log. It is open for as long as the store is borrowed.
	Log *ledger.Log
	// Key is the public key with which its heads are verified, in the form that
	// note.NewVerifier reads.
	Key string
}

// LedgerHead is how a log is.
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
	// Damaged is the number of waiting events that do not open.
	Damaged int64 `json:"damaged"`
	// Retries is the number of moves into the tree that failed and were tried again.
	Retries int64 `json:"retries"`
}

// LedgerBacklog is what waits for the sequencer.
type LedgerBacklog struct {
	// Entries is the number of events.
	Entries int `json:"entries"`
	// Age are the seconds for which the oldest has waited.
	Age int64 `json:"age"`
}

// LedgerReport is what a verification of a whole log has found.
type LedgerReport struct {
	// Origin is the log's name.
	Origin string `json:"origin"`
	// Size is the number of entries by the head that stands in the store.
	Size int64 `json:"size"`
	// Root is the hash of the tree by that head, in base64.
	Root string `json:"root"`
	// Entries is the number of entries that are there.
	Entries int64 `json:"entries"`
	// Pruned is the number of those that have nothing but their hash any more.
	Pruned int64 `json:"pruned"`
	// Vouchers are the keys that vouched for what was pruned.
	Vouchers []LedgerVoucher `json:"vouchers,omitempty"`
	// Waiting counts the events that have no place in the tree yet.
	Waiting int64 `json:"waiting"`
	// Faults are the first 1,000 things that are not as they were written.
	Faults []LedgerFault `json:"faults"`
	// Count is the number of all faults; 0 says that the log holds.
	Count int `json:"count"`
}

// LedgerVoucher is a key that vouched for what was pruned.
type LedgerVoucher struct {
	// Key is its name and its hash, as in the signature of a head.
	Key string `json:"key"`
	// Entries is the number of pruned entries that it vouched for.
	Entries int64 `json:"entries"`
}

// LedgerFault is one thing that is not as it was written.
type LedgerFault struct {
	// Index is the entry that it concerns, or the first of several; left out where it
	// concerns none.
	Index *int64 `json:"index,omitempty"`
	// What is wrong.
	What string `json:"what"`
}

// ledgerOf is the store's ledger.
func ledgerOf(st Store) (*Ledger, error) {
	if l := st.Ledger(); l != nil {
		return l, nil
	}
	return nil, refuse(http.StatusNotFound,
		"the store %s has no ledger: configure `identity`, in whose name the gateway signs what it decides", st.Path())
}

// ledgerHead answers GET ledger/head.
func (a *API) ledgerHead(_ *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
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

// ledgerExport answers GET ledger/export.
func (a *API) ledgerExport(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
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
func (a *API) ledgerVerify(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
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
