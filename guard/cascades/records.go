package cascades

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// What is known of cascades is in the store under evidence.SpaceCascade, all sealed:
//
//	f c name    a cascade
//	f n node    how many good answers a node has had, if there are several

const (
	kindCascade = 'c'
	kindAnswers = 'n'
)

// errUnreadable: what is stored of cascades does not open, or cannot be decoded.
var errUnreadable = errors.New("cascades: a record cannot be read by this build")

const (
	// maxCascades is how many cascades are kept, and keepFor for how long after the last change.
	maxCascades = 256
	keepFor     = 30 * 24 * time.Hour
	// maxCascadeRecord bounds the record of a cascade, in bytes.
	maxCascadeRecord = 48 << 10
	// sameCascade is how far apart two findings may be that are one cascade: over a restart.
	sameCascade = 15 * time.Minute
)

// record is a cascade as it is stored.
type record struct {
	Doc api.Cascade `json:"cascade"`
	// Tokens is how often it was recorded in the ledger, Size and Parts how large it was then.
	Tokens int `json:"tokens"`
	Size   int `json:"size"`  // see Tokens
	Parts  int `json:"parts"` // see Tokens

	finding string // its id at the detector
	version store.Version
}

func (r *record) part(wid string) *api.CascadePart {
	for i := range r.Doc.Workflows {
		if r.Doc.Workflows[i].Workflow == wid {
			return &r.Doc.Workflows[i]
		}
	}
	return nil
}

// describe fills in what a finding says. Of breakers that have opened on one downstream a later process may know less:
// the root, and what was known of each workflow, stay as they were recorded.
func (r *record) describe(f *cascade.Finding) {
	d := &r.Doc
	before, root := d.Workflows, d.Root
	stays := root != nil && d.Pattern == string(cascade.Clustering) && f.Pattern == cascade.Clustering && d.Downstream == f.Downstream
	failed, affected := d.Failed, d.Affected
	d.Pattern, d.Class, d.Failed, d.Affected = string(f.Pattern), string(f.Class), f.Failed, f.Affected
	d.Downstream, d.Breakers, d.OneProbe, d.Into = f.Downstream, slices.Clone(f.Breakers), f.OneProbe, f.Into
	d.Root = &api.CascadeRoot{
		Workflow: f.Root.Workflow, Node: f.Root.Node, Error: f.Root.Error, Agent: f.Root.Agent, Guard: f.Root.Pool, Upstream: f.Root.Address,
		Target: f.Root.Target, LastWrite: f.Root.LastWrite,
		Reasons: f.Root.Reasons,
	}
	if stays {
		d.Root, d.Failed, d.Affected = root, max(failed, f.Failed), max(affected, f.Affected)
	}
	if d.Began.IsZero() || f.Began.Before(d.Began) {
		d.Began = f.Began.UTC()
	}
	d.Last, d.Closed = f.Last.UTC(), time.Time{}
	if !f.Closed.IsZero() {
		d.Closed = f.Closed.UTC()
	}
	d.Workflows = make([]api.CascadePart, 0, len(f.Parts))
	for _, p := range f.Parts {
		part := api.CascadePart{
			Workflow: p.Workflow, Alerts: []string{}, Errors: p.Errors, Failed: p.Failed, BlastRadius: p.BlastRadius, Truncated: p.Cut,
		}
		if i := slices.IndexFunc(before, func(o api.CascadePart) bool { return o.Workflow == p.Workflow }); i >= 0 {
			if part.Alerts, part.Escalation = before[i].Alerts, before[i].Escalation; stays && len(before[i].Errors) > len(p.Errors) {
				part = before[i]
			}
		}
		d.Workflows = append(d.Workflows, part)
	}
	for i := range before {
		if stays && r.part(before[i].Workflow) == nil {
			d.Workflows = append(d.Workflows, before[i])
		}
	}
}

// records are the cascades that are kept, in memory and in the store.
type records struct {
	store.Table[record]
	o *Options

	mu  sync.RWMutex
	all map[string]*record // by id; none is changed in place, as readers have them without the lock
}

// openRecords reads what the last process has stored.
func openRecords(ctx context.Context, o *Options) (*records, error) {
	k := &records{o: o, all: map[string]*record{}, Table: store.Table[record]{
		Store: o.Store, Sealer: o.Sealer, Prefix: string([]byte{evidence.SpaceCascade, kindCascade}), Unreadable: errUnreadable,
	}}
	for row, err := range k.All(ctx) {
		switch {
		case errors.Is(err, errUnreadable):
			o.Log.Warn("what is stored of cascades cannot be read", slog.Any("error", err))
		case err != nil:
			return nil, err
		default:
			k.take(row)
		}
	}
	return k, nil
}

// take keeps a record as it was read, and returns the one that was kept before; nil without one.
func (k *records) take(row store.Row[record]) (before *record) {
	r := row.Record
	k.mu.Lock()
	defer k.mu.Unlock()
	if before = k.all[r.Doc.ID]; before != nil {
		r.finding = before.finding
	}
	r.version = row.Version
	k.all[r.Doc.ID] = r
	return before
}

func (k *records) key(id string) []byte {
	name := k.o.Sealer.Index("cascade", string(kindCascade), id)
	return k.Key(name[:16])
}

// of returns a copy of the record of a finding, or a new one. After a restart the same cascade has another
// finding: what shares an error, or the breakers of a downstream, goes on.
func (k *records) of(f *cascade.Finding) *record {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, r := range k.all {
		if r.finding == f.ID {
			return r.clone()
		}
	}
	if r := k.all[f.ID]; r != nil && r.finding == "" {
		return r.clone()
	}
	for _, r := range k.all {
		if r.finding == "" && f.Began.Sub(r.Doc.Last) < sameCascade && r.continues(f) {
			return r.clone()
		}
	}
	return &record{Doc: api.Cascade{ID: f.ID}}
}

func (r *record) clone() *record {
	c := *r
	c.Doc.Workflows = slices.Clone(r.Doc.Workflows)
	for i := range c.Doc.Workflows {
		c.Doc.Workflows[i].Alerts = slices.Clone(c.Doc.Workflows[i].Alerts)
	}
	return &c
}

// continues reports whether a finding is about the cascade of an earlier process.
func (r *record) continues(f *cascade.Finding) bool {
	if f.Downstream != "" && f.Downstream == r.Doc.Downstream && r.Doc.State == "open" {
		return true
	}
	for _, p := range f.Parts {
		if part := r.part(p.Workflow); part != nil && slices.ContainsFunc(p.Errors, func(id string) bool { return slices.Contains(part.Errors, id) }) {
			return true
		}
	}
	return false
}

// write is the write that stores a record. It cuts lists until that fits.
func (k *records) write(r *record) store.Write {
	stored := r.clone()
	for most := 1000; ; most /= 2 {
		w := k.Put(k.key(r.Doc.ID), stored, r.version.Unchanged(), r.Doc.Last.Add(keepFor))
		if len(w.Value) <= maxCascadeRecord {
			return w
		}
		each := most / max(len(stored.Doc.Workflows), 1)
		for i := range stored.Doc.Workflows {
			p := &stored.Doc.Workflows[i]
			p.Truncated = p.Truncated || len(p.BlastRadius) > each
			p.BlastRadius, p.Failed = p.BlastRadius[:min(each, len(p.BlastRadius))], p.Failed[:min(each, len(p.Failed))]
			if each == 0 {
				p.Errors = p.Errors[:min(4, len(p.Errors))]
			}
		}
		if most == 0 {
			stored.Doc.Workflows = stored.Doc.Workflows[:len(stored.Doc.Workflows)/2]
		}
	}
}

// landed notes a record that was committed. Of more than maxCascades the oldest is dropped.
func (k *records) landed(ctx context.Context, r *record, f *cascade.Finding) {
	r.finding = f.ID
	if found, err := k.o.Store.Get(ctx, k.key(r.Doc.ID)); err == nil {
		r.version = found.Version
	}
	k.mu.Lock()
	k.all[r.Doc.ID] = r
	var oldest *record
	if len(k.all) > maxCascades {
		for _, o := range k.all {
			if o != r && (oldest == nil || o.Doc.State == "closed" && oldest.Doc.State == "open" ||
				o.Doc.State == oldest.Doc.State && o.Doc.Last.Before(oldest.Doc.Last)) {
				oldest = o
			}
		}
		delete(k.all, oldest.Doc.ID)
	}
	k.mu.Unlock()
	if oldest != nil {
		if _, err := k.o.Store.Commit(ctx, store.Write{Key: k.key(oldest.Doc.ID), Delete: true}); err != nil {
			k.o.Log.Warn("the oldest cascade cannot be deleted", slog.Any("error", err))
		}
	}
}

// refresh reads a record again that another commit has changed.
func (k *records) refresh(ctx context.Context, id string) {
	if row, err := k.Get(ctx, k.key(id)); err == nil && row.Record != nil {
		k.take(row)
	}
}

// closeQuiet closes the cascades of an earlier process that nothing was found of again.
func (k *records) closeQuiet(ctx context.Context, before time.Time, d *cascade.Detector) {
	for _, r := range k.list() {
		if r.Doc.State != "open" || !r.Doc.Last.Before(before) {
			continue
		}
		if _, there := d.Finding(cmp.Or(r.finding, r.Doc.ID)); there {
			continue
		}
		r.Doc.State, r.Doc.Closed = "closed", time.Now().UTC()
		if _, err := k.o.Store.Commit(ctx, k.write(r)); err != nil {
			continue // the next look tries again
		}
		if r.Doc.OneProbe {
			k.o.Circuits.ShareProbes(r.Doc.Downstream, false)
		}
		k.refresh(ctx, r.Doc.ID)
	}
}

// list returns copies of all records, the newest first.
func (k *records) list() (all []*record) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, r := range k.all {
		all = append(all, r.clone())
	}
	slices.SortFunc(all, func(a, b *record) int {
		return cmp.Or(b.Doc.Began.Compare(a.Doc.Began), cmp.Compare(a.Doc.ID, b.Doc.ID))
	})
	return all
}
