package cascades

import (
	"cmp"
	"context"
	"encoding/json"
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
	// maxCascades is how many cascades are kept, and keepFor for how long after the last change.
	maxCascades = 256
	keepFor     = 30 * 24 * time.Hour
	// maxCascadeRecord bounds the JSON of a cascade, in bytes.
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
		Reasons: reasons(f),
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
	o    *Options
	node string // this one, of several

	mu  sync.RWMutex
	all map[string]*record // by id; none is changed in place, as readers have them without the lock
}

// openRecords reads what the last process has stored.
func openRecords(ctx context.Context, o *Options) (*records, error) {
	k := &records{o: o, all: map[string]*record{}}
	if shared, is := o.Store.(store.Shared); is {
		k.node = shared.Self().Node
	}
	read := func(kind byte, use func(plain []byte, version store.Version) error) error {
		for entry, err := range o.Store.Scan(ctx, store.Prefix([]byte{evidence.SpaceCascade, kind})) {
			if err != nil {
				return err
			}
			plain, err := o.Sealer.Open(nil, entry.Value, entry.Key)
			if err == nil {
				err = use(plain, entry.Version)
			}
			if err != nil {
				o.Log.Warn("what is stored of cascades cannot be read", slog.Any("error", err))
			}
		}
		return nil
	}
	err := read('c', func(plain []byte, version store.Version) error {
		r := &record{version: version}
		if err := json.Unmarshal(plain, r); err != nil {
			return err
		}
		k.all[r.Doc.ID] = r
		return nil
	})
	if err != nil {
		return nil, err
	}
	return k, nil
}

func (k *records) key(kind byte, id string) []byte {
	name := k.o.Sealer.Index("cascade", string(kind), id)
	return append([]byte{evidence.SpaceCascade, kind}, name[:16]...)
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
func (k *records) write(r *record) (store.Write, error) {
	stored := r.clone()
	for most := 1000; ; most /= 2 {
		plain, err := json.Marshal(stored)
		if err != nil {
			return store.Write{}, err
		}
		if len(plain) <= maxCascadeRecord {
			w := store.Write{Key: k.key('c', r.Doc.ID), If: store.Absent(), Expires: r.Doc.Last.Add(keepFor)}
			if r.version != 0 {
				w.If = store.VersionIs(r.version)
			}
			w.Value = k.o.Sealer.Seal(nil, plain, w.Key)
			return w, nil
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
	if found, err := k.o.Store.Get(ctx, k.key('c', r.Doc.ID)); err == nil {
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
		if _, err := k.o.Store.Commit(ctx, store.Write{Key: k.key('c', oldest.Doc.ID), Delete: true}); err != nil {
			k.o.Log.Warn("the oldest cascade cannot be deleted", slog.Any("error", err))
		}
	}
}

// refresh reads a record again that another commit has changed.
func (k *records) refresh(ctx context.Context, id string) {
	key := k.key('c', id)
	entry, err := k.o.Store.Get(ctx, key)
	if err != nil {
		return
	}
	plain, err := k.o.Sealer.Open(nil, entry.Value, key)
	r := new(record)
	if err != nil || json.Unmarshal(plain, r) != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if before := k.all[id]; before != nil {
		r.finding = before.finding
	}
	r.version = entry.Version
	k.all[id] = r
}

// closeQuiet closes the cascades of an earlier process that nothing was found of again.
func (k *records) closeQuiet(ctx context.Context, before time.Time, d *cascade.Detector) {
	for _, r := range k.list() {
		if r.Doc.State != "open" || !r.Doc.Last.Before(before) {
			continue
		}
		if f, there := d.Finding(cmp.Or(r.finding, r.Doc.ID)); there && f.Closed.IsZero() {
			continue
		}
		r.Doc.State, r.Doc.Closed = "closed", time.Now().UTC()
		w, err := k.write(r)
		if err == nil {
			_, err = k.o.Store.Commit(ctx, w)
		}
		if err != nil {
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
