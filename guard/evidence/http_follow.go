package evidence

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const (
	// maxFollowers is how many streams of changes there are at a time, and maxOfReader how many of them one
	// reader has.
	maxFollowers = 256
	maxOfReader  = 16
	// heartbeat is how often a stream without changes sends a comment. Each time the workflow is read again:
	// another node of a fleet may have recorded something.
	heartbeat = 15 * time.Second
	// between is the least time between two changes; what comes meanwhile is one change. A workflow that takes
	// long to read is read less often.
	between = 100 * time.Millisecond
	// followTime is how long a stream lasts. Clients come again by themselves, and are identified anew.
	followTime = 15 * time.Minute
	// sendTime is how long a client may take to read what is sent.
	sendTime = 30 * time.Second
	// mediaEvents is the media type of a stream of changes.
	mediaEvents = "text/event-stream"
)

// Followers wakes those who follow workflows. The zero value is ready. It is safe for concurrent use.
type Followers struct {
	mu  sync.Mutex
	all map[chan struct{}]follower
}

type follower struct {
	wid    string
	reader router.Reader
}

// Changed says that something was recorded in a workflow. It never waits.
func (f *Followers) Changed(wid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for wake, of := range f.all {
		if of.wid != wid {
			continue
		}
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

// join adds a follower; ok is false if there are too many.
func (f *Followers) join(wid string, who router.Reader) (changed <-chan struct{}, leave func(), ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ofReader := 0
	for _, other := range f.all {
		if other.reader == who {
			ofReader++
		}
	}
	if len(f.all) >= maxFollowers || ofReader >= maxOfReader {
		return nil, nil, false
	}
	if f.all == nil {
		f.all = map[chan struct{}]follower{}
	}
	wake := make(chan struct{}, 1)
	f.all[wake] = follower{wid, who}
	return wake, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.all, wake)
	}, true
}

// follow sends a workflow, and then what changes, as server-sent events, until the client leaves, the gateway
// or the configuration ends, or the reader may see nothing of it any more. Errors end the stream: the client
// comes again, and gets the answer that others get.
func (q *ledgerRequest) follow(doc *Workflow) error {
	changed, leave, ok := q.Followers.join(doc.ID, q.who)
	if !ok {
		return problem.New(problem.QuotaExceeded, fmt.Sprintf("Too many follow workflows: %d, or %d of this reader.", maxFollowers, maxOfReader))
	}
	defer leave()
	ctx, cancel := router.Until(q.R.Context(), q.Waits, followTime)
	defer cancel()
	if q.Ends != nil {
		defer context.AfterFunc(q.Ends, cancel)()
	}
	// The stream has joined since the document was read.
	wid := doc.ID
	doc, err := q.again(wid)
	if err != nil || doc == nil {
		return cmp.Or(err, error(unknownWorkflow()))
	}
	h := q.W.Header()
	h.Set("Content-Type", mediaEvents)
	router.Protect(h)
	h.Set("X-Accel-Buffering", "no")
	q.W.WriteHeader(http.StatusOK)
	s := eventStream{w: q.W, rc: http.NewResponseController(q.W)}
	if last := doc.version(); q.R.Header.Get("Last-Event-ID") == last {
		s.last = last
		err = s.send([]byte(": as it was\n\n"))
	} else {
		err = s.event("workflow", last, doc)
	}
	defer func() { _ = s.rc.SetWriteDeadline(time.Time{}) }() // for the next answer on this connection
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for err == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-beat.C:
			if err = s.send([]byte(":\n\n")); err != nil {
				return nil
			}
		}
		began := time.Now()
		next, failed := q.again(wid)
		if failed != nil || next == nil {
			return nil
		}
		if version := next.version(); version != s.last {
			if change, plain := doc.change(next); plain {
				err = s.event("change", version, change)
			} else {
				err = s.event("workflow", version, next)
			}
			doc = next
		}
		wait := time.NewTimer(max(between, 10*time.Since(began)))
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return nil
		}
	}
	return nil
}

// again reads a workflow once more; nil if the reader sees nothing of it.
func (q *ledgerRequest) again(wid string) (*Workflow, error) {
	if err := q.caughtUp(q.R.Context()); err != nil {
		return nil, err
	}
	doc, found, err := q.read(wid)
	if err == nil && found {
		doc.Holds, err = q.holds(wid)
	}
	if err != nil || !found {
		return nil, err
	}
	return &doc, nil
}

// eventStream writes server-sent events.
type eventStream struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	last string // the version that was sent last
}

func (s *eventStream) event(name, version string, doc *Workflow) error {
	s.last = version
	return s.send(fmt.Appendf(nil, "event: %s\nid: %s\ndata: %s\n\n", name, version, encoded(doc)))
}

func (s *eventStream) send(text []byte) error {
	_ = s.rc.SetWriteDeadline(time.Now().Add(sendTime)) // not every connection has one
	if _, err := s.w.Write(text); err != nil {
		return err
	}
	return s.rc.Flush()
}

// version identifies what a document says.
func (d *Workflow) version() string {
	sum := sha256.Sum256(encoded(d))
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

// change is what next says otherwise than d: the whole of next but the nodes, edges and nodes of the plan that
// are as they were. plain is false if something has gone, which a change cannot say.
func (d *Workflow) change(next *Workflow) (change *Workflow, plain bool) {
	c := *next
	var kept int
	c.Nodes, kept = fresh(d.Nodes, next.Nodes, func(n nodeDocument) string { return n.ID })
	plain = kept == len(d.Nodes)
	c.Edges, kept = fresh(d.Edges, next.Edges, func(e edgeDocument) string { return e.From + " " + e.To })
	plain = plain && kept == len(d.Edges) && (d.Plan == nil) == (next.Plan == nil)
	if plain && next.Plan != nil {
		p := *next.Plan
		p.Nodes, kept = fresh(d.Plan.Nodes, next.Plan.Nodes, func(n plan.Status) string { return n.ID })
		plain, c.Plan = kept == len(d.Plan.Nodes) && p.Version == d.Plan.Version, &p
	}
	return &c, plain
}

// fresh are the elements of after that are not in before as they are, and how many of before are there by
// their names.
func fresh[T any](before, after []T, name func(T) string) (all []T, kept int) {
	was := make(map[string][]byte, len(before))
	for _, one := range before {
		was[name(one)] = encoded(one)
	}
	all = []T{}
	for _, one := range after {
		old, there := was[name(one)]
		if there {
			kept++
		}
		if !there || !bytes.Equal(old, encoded(one)) {
			all = append(all, one)
		}
	}
	return all, kept
}

func encoded(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("api: " + err.Error()) // the gateway's documents, and their parts, always marshal
	}
	return b
}

// Apply makes the document what a change of it says.
func (d *Workflow) Apply(change *Workflow) {
	c := *change
	c.Nodes = merged(d.Nodes, change.Nodes, func(n nodeDocument) string { return n.ID })
	c.Edges = merged(d.Edges, change.Edges, func(e edgeDocument) string { return e.From + " " + e.To })
	if d.Plan != nil && change.Plan != nil {
		p := *change.Plan
		p.Nodes = merged(d.Plan.Nodes, change.Plan.Nodes, func(n plan.Status) string { return n.ID })
		c.Plan = &p
	}
	*d = c
}

// merged replaces elements by those of the same name, and adds the others.
func merged[T any](before, changed []T, name func(T) string) []T {
	all := slices.Clone(before)
	at := make(map[string]int, len(all))
	for i := range all {
		at[name(all[i])] = i
	}
	for _, one := range changed {
		if i, there := at[name(one)]; there {
			all[i] = one
			continue
		}
		all = append(all, one)
	}
	return all
}

// Drawing draws the workflow, with nothing that the document does not say: the nodes of its plan, or without one
// its tokens.
func (d *Workflow) Drawing() *drawing.Drawing {
	p := &drawing.Drawing{Title: "Workflow " + d.ID + ": " + words(cmp.Or(string(d.Status), "not all of it was read"))}
	note := func(text string) {
		if text != "" {
			p.Notes = append(p.Notes, text)
		}
	}
	var counts []string
	for _, state := range slices.Sorted(maps.Keys(d.Tasks)) {
		counts = append(counts, fmt.Sprint(d.Tasks[state], " ", words(string(state))))
	}
	note(drawing.Label("tasks:", strings.Join(counts, ", ")))
	note(drawing.Label("its end is recorded as", words(d.Stated)))
	for i := range d.Holds {
		note(d.Holds[i].State + ": escalation " + d.Holds[i].Escalation)
	}
	if d.Plan != nil {
		d.drawPlan(p)
		return p
	}
	layers := make(map[string]int, len(d.Nodes))
	places := make(map[string]int, len(d.Nodes))
	after := make(map[string][]string)
	for i := range d.Nodes {
		places[d.Nodes[i].ID] = i
	}
	for _, e := range d.Edges {
		from, known := places[e.From]
		to, there := places[e.To]
		if known && there && from < to { // what is unordered has no layer of its own
			after[e.From] = append(after[e.From], e.To)
			p.Edges = append(p.Edges, drawing.Edge{From: from, To: to})
		}
	}
	for i := range d.Nodes {
		n := &d.Nodes[i]
		for _, to := range after[n.ID] {
			layers[to] = max(layers[to], layers[n.ID]+1)
		}
		p.Nodes = append(p.Nodes, drawing.Node{
			Layer: layers[n.ID], Name: n.Action, State: stateInWords(n.State, n.Detail), Tone: toneOf(n.State),
			Lines: []string{n.Issuer, n.ID, drawing.Label("outcome", words(string(n.Outcome))), drawing.Label("severity", n.Severity), drawing.Time(n.Time)},
		})
	}
	return p
}

func (d *Workflow) drawPlan(p *drawing.Drawing) {
	note := "plan " + d.Plan.PlanID + ", version " + d.Plan.Version
	if n := len(d.Plan.Others); n > 0 {
		note += fmt.Sprintf("; %d calls are no node of it", n)
	}
	p.Notes = append(p.Notes, note)
	places := make(map[string]int, len(d.Plan.Nodes))
	for i := range d.Plan.Nodes {
		places[d.Plan.Nodes[i].ID] = i
	}
	for i := range d.Plan.Nodes {
		n := &d.Plan.Nodes[i]
		for len(p.Layers) <= n.Level {
			p.Layers = append(p.Layers, fmt.Sprint("level ", len(p.Layers)))
		}
		var waits []string
		for _, h := range n.Holds {
			waits = append(waits, h.Node)
			if h.Final {
				waits[len(waits)-1] += " (for ever)"
			}
		}
		box := drawing.Node{Layer: n.Level, Name: n.ID, State: stateInWords(n.State, n.Detail), Tone: toneOf(n.State)}
		if n.Ready {
			box.State += ", can begin"
		}
		if n.Label != n.ID {
			box.Lines = append(box.Lines, n.Label)
		}
		box.Lines = append(box.Lines, drawing.Label("waits for", strings.Join(waits, ", ")), drawing.Label("begun", drawing.Time(n.Begun)), drawing.Label("ended", drawing.Time(n.Ended)))
		p.Nodes = append(p.Nodes, box)
		for _, id := range n.After {
			if from, ok := places[id]; ok {
				p.Edges = append(p.Edges, drawing.Edge{From: from, To: i})
			}
		}
	}
}

func words(text string) string { return strings.ReplaceAll(text, "_", " ") }

func stateInWords(s workflow.State, d workflow.Detail) string {
	return words(drawing.InWords(string(s), string(d)))
}

func toneOf(s workflow.State) drawing.Tone {
	switch s {
	case workflow.Done:
		return drawing.Good
	case workflow.Running:
		return drawing.Active
	case workflow.Failed:
		return drawing.Bad
	case workflow.Escalated, workflow.RolledBack:
		return drawing.Warning
	}
	return drawing.Plain
}
