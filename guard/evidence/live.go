package evidence

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const (
	// maxLive bounds the records of all live workflows. A record takes about 1 kB.
	maxLive = 100_000
	// loadTime bounds the reading of a workflow.
	loadTime = 30 * time.Second
)

// liveWorkflows are the workflows whose states somebody has asked for lately. They follow the ledger:
// read from it once, and from then on each event is added when its commit is durable, before the commit
// returns. Any of them can be dropped, and is read again when it is asked for.
type liveWorkflows struct {
	any     atomic.Bool // there are some; most gateways have none
	mu      sync.Mutex
	m       map[string]*list.Element // of *liveWorkflow, by workflow
	recent  list.List                // the one that was asked for last is the first
	records int
	most    int // records
}

type liveWorkflow struct {
	name    string
	builder *EventBuilder // says whose an event is
	ready   chan struct{} // closed when it was read
	err     error         // why it could not be; see ready
	counted int           // its records in liveWorkflows.records, whose mu guards it

	mu      sync.Mutex
	live    *plan.Live      // nil while it is being read
	came    []*ledger.Entry // meanwhile
	dropped bool
	changed chan struct{} // closed at the next change; nil while nobody waits
}

// Live calls read with the states of a workflow, in which everything counts whose commit has returned. read must
// neither wait nor keep them. Where it returns true, changed is closed at the next change. b says whose an
// event is.
//
// The error is that of the ledger, or of ctx, or a rollback.TooManyError: a workflow that was not read
// whole has no states (P4).
func (e *Evidence) Live(ctx context.Context, b *EventBuilder, name string, read func(l *plan.Live) bool) (changed <-chan struct{}, err error) {
	for {
		w, first := e.live.find(name, b)
		if first {
			w.err = e.load(ctx, w)
			close(w.ready)
		}
		select {
		case <-w.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if w.err != nil {
			return nil, w.err
		}
		w.mu.Lock()
		if w.dropped {
			w.mu.Unlock()
			continue
		}
		before := w.live.Len()
		if read(w.live) {
			if w.changed == nil {
				w.changed = make(chan struct{})
			}
			changed = w.changed
		}
		now := w.live.Len()
		w.mu.Unlock()
		if now > before { // it follows a plan
			e.live.count(w, now)
		}
		return changed, nil
	}
}

// find finds a workflow, or makes it, and then its caller has to read it.
func (t *liveWorkflows) find(name string, b *EventBuilder) (w *liveWorkflow, first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at := t.m[name]; at != nil {
		if w = at.Value.(*liveWorkflow); w.builder.Identity() == b.Identity() {
			t.recent.MoveToFront(at)
			return w, false
		}
		t.remove(at)
	}
	w = &liveWorkflow{name: name, builder: b, ready: make(chan struct{})}
	if t.m == nil {
		t.m = make(map[string]*list.Element)
	}
	t.m[name] = t.recent.PushFront(w)
	t.any.Store(true)
	return w, true
}

// load reads a workflow. It goes on without the caller: others may wait for it.
func (e *Evidence) load(ctx context.Context, w *liveWorkflow) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadTime)
	defer cancel()
	defer func() {
		if err != nil {
			e.live.drop(w)
		}
	}()
	waits, done := context.WithTimeout(ctx, flushTime)
	err = e.log.Flush(waits)
	done()
	if err != nil {
		return err
	}
	rec := &Recorder{Evidence: e, EventBuilder: w.builder}
	entries, err := rec.workflowEntries(ctx, w.name, e.live.most)
	if err != nil {
		return err
	}
	records := make([]workflow.Record, 0, len(entries))
	for i := range entries {
		records = append(records, liveRecord(&entries[i], w.builder))
	}
	live := plan.NewLive()
	live.Add(records...)
	w.mu.Lock()
	for _, entry := range w.came {
		live.Add(liveRecord(entry, w.builder))
	}
	w.live, w.came = live, nil
	n := live.Len()
	w.mu.Unlock()
	e.live.count(w, n)
	return nil
}

// liveRecord is the record of an entry. Who is not proven links nothing, as in graphOf.
func liveRecord(e *ledger.Entry, b *EventBuilder) workflow.Record {
	r := RecordOf(e, b.Own(e))
	if r.Issuer == "" {
		r.Parents, r.Stranger = nil, reportsRecord(&r)
	}
	return r
}

// recorded adds the events of a commit.
func (t *liveWorkflows) recorded(events []ledger.Event, err error) {
	if !t.any.Load() || err != nil && !errors.Is(err, store.ErrUnknown) {
		return
	}
	for i := range events {
		t.mu.Lock()
		at := t.m[events[i].Workflow]
		t.mu.Unlock()
		if at == nil {
			continue
		}
		w := at.Value.(*liveWorkflow)
		if err != nil { // whether it is recorded only the ledger can say
			t.drop(w)
			continue
		}
		entry := &ledger.Entry{Event: events[i]}
		entry.Unsigned = false // in an Entry it says that the signature was refused; this one is to be signed
		w.mu.Lock()
		n := 0
		if w.live == nil {
			w.came = append(w.came, entry)
		} else {
			w.live.Add(liveRecord(entry, w.builder))
			n = w.live.Len()
		}
		w.wake()
		w.mu.Unlock()
		t.count(w, n)
	}
}

// wake wakes those who wait for a change, with mu held.
func (w *liveWorkflow) wake() {
	if w.changed != nil {
		close(w.changed)
		w.changed = nil
	}
}

// count takes note of the size of a workflow, and drops those that were not asked for the longest where
// there are too many records.
func (t *liveWorkflows) count(w *liveWorkflow, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at := t.m[w.name]; at == nil || at.Value != w || n <= w.counted {
		return
	}
	t.records += n - w.counted
	w.counted = n
	for t.records > t.most {
		t.remove(t.recent.Back())
	}
}

// drop drops a workflow.
func (t *liveWorkflows) drop(w *liveWorkflow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at := t.m[w.name]; at != nil && at.Value == w {
		t.remove(at)
	}
}

// remove removes a workflow, with mu held.
func (t *liveWorkflows) remove(at *list.Element) {
	w := t.recent.Remove(at).(*liveWorkflow)
	delete(t.m, w.name)
	t.records -= w.counted
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dropped = true
	w.wake()
}
