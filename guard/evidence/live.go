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

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const (
	// maxLive bounds the records of all live workflows. A record takes about 1 kB.
	maxLive = 100_000
	// arrivalSize is how many records take as much memory as a small event that is not added yet; each kB of a token
	// takes as much again, since the event also has it parsed.
	arrivalSize = 3
	// maxArrived bounds the events of other nodes that one question reads singly. A workflow with more is read anew.
	maxArrived = 1024
	// loadTime bounds the reading of a workflow.
	loadTime = 30 * time.Second
)

// liveWorkflows are the workflows whose states somebody has asked for lately. They follow the ledger:
// read from it once, and from then on each event is noted when its commit is durable, before the commit
// returns, and added when somebody asks. Any of them can be dropped, and is read again when it is asked for.
//
// In a fleet the store says under which ids other nodes record events, and in which workflow.
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
	counted int           // its records in liveWorkflows.records, whose mu guards it

	reading chan struct{} // has a value while somebody reads live
	live    *plan.Live    // nil before it was read from the ledger; guarded by reading
	err     error         // why it could not be; guarded by reading

	mu      sync.Mutex
	came    []arrival // what is not added yet
	dropped bool
}

// arrival is an event that has just been recorded: here, or by another node under a key of the store.
type arrival struct {
	event *ledger.Event
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
		if !first {
			if e.live.fleet { // what other nodes have committed is known once the store has caught up
				if err := e.fleet.store.CatchUp(ctx); err != nil {
					return err
				}
			}
			select {
			case w.reading <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if again, err := e.readLive(ctx, w, read); !again {
			return err
		}
	}
}

// readLive is Live for a workflow whose reading the caller has, and gives that back. again says that it was dropped
// meanwhile.
func (e *Evidence) readLive(ctx context.Context, w *liveWorkflow, read func(l *plan.Live)) (again bool, err error) {
	defer func() { <-w.reading }()
	if w.live == nil && w.err == nil {
		if w.err = e.load(ctx, w); w.err != nil {
			e.live.drop(w)
		}
	}
	if w.err != nil {
		return false, w.err
	}
	if err := e.addArrived(ctx, w); err != nil {
		return false, err
	}
	w.mu.Lock()
	dropped := w.dropped
	w.mu.Unlock()
	if dropped {
		return true, nil
	}
	read(w.live)
	e.live.count(w, 1+w.live.Len()) // one without records takes room, too
	return false, nil
}

// addArrived adds what was recorded before the call, by whichever node.
func (e *Evidence) addArrived(ctx context.Context, w *liveWorkflow) (err error) {
	w.mu.Lock()
	came := w.came
	w.mu.Unlock()
	if len(came) == 0 {
		return nil
	}
	records := make([]workflow.Record, 0, len(came))
	var entry ledger.Entry
	for _, a := range came {
		if a.event != nil {
			entry.Event = *a.event
		} else if entry, err = e.log.Recorded(ctx, a.key); errors.Is(err, ledger.ErrNotFound) || errors.Is(err, ledger.ErrPruned) {
			continue
		} else if err != nil {
			return err
		}
		if entry.Workflow == w.name { // else it is another one with its hash
			records = append(records, liveRecord(&entry, w.builder))
		}
	}
	if e.live.fleet {
		records = behindParents(records)
	}
	w.live.Add(records...)
	w.mu.Lock()
	w.came = slices.Delete(w.came, 0, len(came))
	w.mu.Unlock()
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

// find finds a workflow, or makes it, and then its caller has its reading.
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
	w = &liveWorkflow{name: name, hash: hash, builder: b, reading: make(chan struct{}, 1)}
	w.reading <- struct{}{}
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
func (e *Evidence) load(ctx context.Context, w *liveWorkflow) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadTime)
	defer cancel()
	entries, err := e.workflowEntries(ctx, w.name, e.live.most)
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
	w.live = plan.NewLive()
	w.live.Add(records...)
	return nil
}

// liveRecord is the record of an entry. Who is not proven links nothing, as in graphOf, and names no node.
func liveRecord(e *ledger.Entry, b *EventBuilder) workflow.Record {
	r := RecordOf(e, b.Own(e))
	if r.Issuer == "" {
		r.Parents, r.Node, r.Stranger = nil, "", r.Report
	}
	return r
}

// recorded notes the events of a commit.
func (t *liveWorkflows) recorded(events []ledger.Event, err error) {
	if !t.any.Load() || err != nil && !errors.Is(err, store.ErrUnknown) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range events {
		at := t.m[events[i].Workflow]
		switch {
		case at == nil:
		case err != nil: // whether it is recorded only the ledger can say
			t.remove(at)
		default:
			e := events[i] // not the others of its commit
			t.arrived(at, arrival{event: &e}, arrivalSize*(1+len(e.Payload)>>10))
		}
	}
}

// recordedElsewhere notes an event that another node has recorded under a key. Without a key anything may have been
// recorded.
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
	} else if at := t.byHash[[8]byte(key[len(key)-8:])]; at != nil {
		t.arrived(at, arrival{key: bytes.Clone(key)}, arrivalSize)
	}
}

// arrived notes what has to be added to a workflow, and that takes as much room as size records. mu is held.
func (t *liveWorkflows) arrived(at *list.Element, a arrival, size int) {
	w := at.Value.(*liveWorkflow)
	w.mu.Lock()
	full := t.fleet && len(w.came) >= maxArrived
	if !full {
		w.came = append(w.came, a)
	}
	w.mu.Unlock()
	if full {
		t.remove(at)
		return
	}
	t.resize(w, w.counted+size)
}

// count takes note of the size of a workflow.
func (t *liveWorkflows) count(w *liveWorkflow, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at := t.m[w.name]; at != nil && at.Value == w {
		t.resize(w, n)
	}
}

// resize sets the size of a workflow, and drops those that were not asked for the longest where there are too many
// records. mu is held.
func (t *liveWorkflows) resize(w *liveWorkflow, n int) {
	t.records += n - w.counted
	for w.counted = n; t.records > t.most; {
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
