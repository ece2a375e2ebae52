package evidence

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
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

// maxArrived is how many events may wait in a fleet to be added to a workflow that nobody asks for. Beyond that it is
// read again when somebody does.
const maxArrived = 1024

// liveWorkflows are the workflows whose states somebody has asked for lately. They follow the ledger:
// read from it once, and from then on each event is added when its commit is durable, before the commit
// returns. Any of them can be dropped, and is read again when it is asked for.
//
// In a fleet the store says under which ids other nodes record events, and in which workflow. They are read and
// added, with the own ones, when somebody asks.
type liveWorkflows struct {
	fleet   bool
	any     atomic.Bool // there are some; most gateways have none
	mu      sync.Mutex
	m       map[string]*list.Element  // of *liveWorkflow, by workflow
	byHash  map[[8]byte]*list.Element // in a fleet: by their hashes in the ledger's keys
	recent  list.List                 // the one that was asked for last is the first
	records int
	most    int // records
}

type liveWorkflow struct {
	name    string
	hash    [8]byte       // of name; see byHash
	builder *EventBuilder // says whose an event is
	ready   chan struct{} // closed when it was read
	err     error         // why it could not be; see ready
	counted int           // its records in liveWorkflows.records, whose mu guards it

	adding chan struct{} // held while what came is added

	mu      sync.Mutex
	live    *plan.Live      // nil while it is being read
	came    []arrival       // what is not added yet: meanwhile, and in a fleet since somebody has asked
	seen    map[string]bool // the keys that came
	dropped bool
}

// arrival is an event that has just been recorded: here, or by another node under a key of the store.
type arrival struct {
	entry *ledger.Entry
	key   []byte
}

// Live calls read with the states of a workflow, in which everything counts whose commit has returned. read must
// neither wait nor keep them. b says whose an event is.
//
// The error is that of the ledger, or of ctx, or a rollback.TooManyError: a workflow that was not read
// whole has no states (P4).
func (e *Evidence) Live(ctx context.Context, b *EventBuilder, name string, read func(l *plan.Live)) error {
	var hash [8]byte
	if e.live.fleet {
		hash = e.log.WorkflowHash(name)
	}
	for {
		w, first := e.live.find(name, hash, b)
		if first {
			w.err = e.load(ctx, w)
			close(w.ready)
		}
		select {
		case <-w.ready: // as a rule
		default:
			select {
			case <-w.ready:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if w.err != nil {
			return w.err
		}
		if e.live.fleet {
			if err := e.addArrived(ctx, w, !first); err != nil {
				return err
			}
		}
		w.mu.Lock()
		if w.dropped {
			w.mu.Unlock()
			continue
		}
		before := w.live.Len()
		read(w.live)
		now := w.live.Len()
		w.mu.Unlock()
		if now > before { // it follows a plan
			e.live.count(w, now)
		}
		return nil
	}
}

// addArrived adds what was recorded before the call, by whichever node: what other nodes have committed is
// known once the store has caught up.
func (e *Evidence) addArrived(ctx context.Context, w *liveWorkflow, catchUp bool) error {
	if catchUp {
		if err := e.fleet.store.CatchUp(ctx); err != nil {
			return err
		}
	}
	select {
	case w.adding <- struct{}{}:
		defer func() { <-w.adding }()
	case <-ctx.Done():
		return ctx.Err()
	}
	w.mu.Lock()
	came := w.came[:len(w.came):len(w.came)]
	w.mu.Unlock()
	records := make([]workflow.Record, 0, len(came))
	for _, a := range came {
		if a.entry == nil {
			entry, err := e.log.Recorded(ctx, a.key)
			if errors.Is(err, ledger.ErrNotFound) || errors.Is(err, ledger.ErrPruned) {
				continue
			}
			if err != nil {
				return err
			}
			if entry.Workflow != w.name { // another one with its hash
				continue
			}
			a.entry = &entry
		}
		records = append(records, liveRecord(a.entry, w.builder))
	}
	if len(came) == 0 {
		return nil
	}
	w.mu.Lock()
	w.live.Add(behindParents(records)...)
	w.came = w.came[len(came):]
	n := w.live.Len()
	w.mu.Unlock()
	e.live.count(w, n)
	return nil
}

// behindParents orders the records of several logs: each behind those that it follows from.
func behindParents(records []workflow.Record) []workflow.Record {
	at := make(map[string]int, len(records))
	for i := range slices.Backward(records) { // of two with one id the first counts
		at[records[i].ID] = i
	}
	ordered, reached := make([]workflow.Record, 0, len(records)), make([]bool, len(records))
	var todo []int
	reach := func(i int) {
		if !reached[i] { // unverified ones may have cycles
			reached[i], todo = true, append(todo, i)
		}
	}
	for i := range records {
		for reach(i); len(todo) > 0; {
			last := len(todo) - 1
			r := &records[todo[last]]
			for _, id := range r.Parents {
				if p, there := at[id]; there {
					reach(p)
				}
			}
			if len(todo) == last+1 {
				ordered, todo = append(ordered, *r), todo[:last]
			}
		}
	}
	return ordered
}

// find finds a workflow, or makes it, and then its caller has to read it.
func (t *liveWorkflows) find(name string, hash [8]byte, b *EventBuilder) (w *liveWorkflow, first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at := t.m[name]; at != nil {
		if w = at.Value.(*liveWorkflow); w.builder.Identity() == b.Identity() {
			t.recent.MoveToFront(at)
			return w, false
		}
		t.remove(at)
	}
	w = &liveWorkflow{name: name, hash: hash, builder: b, ready: make(chan struct{}), adding: make(chan struct{}, 1)}
	if t.m == nil {
		t.m, t.byHash = make(map[string]*list.Element), make(map[[8]byte]*list.Element)
	}
	at := t.recent.PushFront(w)
	t.m[name] = at
	if t.fleet {
		if same := t.byHash[hash]; same != nil {
			t.remove(same)
		}
		t.byHash[hash] = at
	}
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
	rec := &Recorder{Evidence: e, EventBuilder: w.builder}
	entries, err := rec.workflowEntries(ctx, w.name, e.live.most)
	if err != nil {
		return err
	}
	records := make([]workflow.Record, 0, len(entries))
	for i := range entries {
		records = append(records, liveRecord(&entries[i], w.builder))
	}
	if e.live.fleet {
		records = behindParents(records)
	}
	live := plan.NewLive()
	live.Add(records...)
	w.mu.Lock()
	w.live = live
	if !e.live.fleet {
		for _, a := range w.came {
			live.Add(liveRecord(a.entry, w.builder))
		}
		w.came = nil
	}
	n := live.Len()
	w.mu.Unlock()
	e.live.count(w, n)
	return nil
}

// liveRecord is the record of an entry, with who takes part in it. Who is not proven links nothing, as in graphOf;
// and having reported an error is no part in what it is about.
func liveRecord(e *ledger.Entry, b *EventBuilder) workflow.Record {
	room := extRooms.Get().(*extRoom)
	defer extRooms.Put(room)
	own, ext := b.Own(e), Extension(e).Read(room[:0])
	r := recordOf(e, own, ext)
	r.Report = reportsRecord(&r)
	switch {
	case own:
		r.By = callerName(callerIn(ext))
	case r.Issuer == "":
		r.Parents, r.Stranger = nil, r.Report
	case r.Event != ect.EventError:
		r.By = r.Issuer
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
		entry := ledger.Entry{Event: events[i]}
		w.mu.Lock()
		n, full := 0, t.fleet && len(w.came) >= maxArrived
		if w.live == nil || t.fleet {
			kept := entry
			w.came = append(w.came, arrival{entry: &kept})
		} else {
			w.live.Add(liveRecord(&entry, w.builder))
			n = w.live.Len()
		}
		w.mu.Unlock()
		if t.count(w, n); full {
			t.drop(w)
		}
	}
}

// recordedElsewhere takes note of an event that another node has recorded under a key, or whose place it has found.
// Without a key anything may have been recorded.
func (t *liveWorkflows) recordedElsewhere(key []byte) {
	if !t.any.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(key) == 0 {
		for _, at := range t.m {
			t.remove(at)
		}
		return
	}
	at := t.byHash[[8]byte(key[len(key)-8:])]
	if at == nil {
		return
	}
	w := at.Value.(*liveWorkflow)
	w.mu.Lock()
	full := len(w.came) >= maxArrived
	if !full && !w.seen[string(key)] {
		if w.seen == nil {
			w.seen = make(map[string]bool)
		}
		w.seen[string(key)] = true
		w.came = append(w.came, arrival{key: bytes.Clone(key)})
	}
	w.mu.Unlock()
	if full {
		t.remove(at)
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
	if t.byHash[w.hash] == at {
		delete(t.byHash, w.hash)
	}
	t.records -= w.counted
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dropped = true
}
