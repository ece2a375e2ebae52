// Package cascades watches for failures that spread from one agent to others: it feeds the detector of package
// cascade with what the ledger records and with what breakers and resources do, records what that finds, has
// people asked, and does what the configuration says (ADR 0102).
package cascades

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// maxInput is how many events may wait for the detector; further ones are dropped and counted.
	maxInput = 8192
	// maxRebuilt is how many entries of the ledger are read at the start.
	maxRebuilt = 20_000
	// every is how often what lasts is looked at.
	every = time.Second
	// stepTime bounds one step of the watch at the store.
	stepTime = 10 * time.Second
)

// Watch finds failures that spread, on its own goroutine: nothing that it does delays a call.
type Watch struct {
	o          Options
	detector   *cascade.Detector
	feed       *evidence.CascadeFeed
	input      chan func(ctx context.Context) []cascade.Change
	kept       *records
	dropped    atomic.Uint64
	found      [3]atomic.Uint64 // by pattern
	topology   atomic.Pointer[Topology]
	exhaustion cascade.Exhaustion

	begin func() // starts the work
	stop  context.CancelFunc
	ended chan struct{}

	// Only the goroutine uses these.
	settings Settings
	pending  map[string]cascade.Change
	answered map[string]uint64 // good answers, by upstream
	peers    peers
}

// Options are what a Watch works with. All are needed.
type Options struct {
	Store       store.Store
	Sealer      store.Sealer
	Escalations *hitl.Store
	// Recorder returns that of the latest configuration; false if that has no identity.
	Recorder func() (evidence.Recorder, bool)
	Circuits Circuits
	// Look returns what there is to see now, about every second; false without a configuration.
	Look func() (Look, bool)
	// Settings are those before the first Look.
	Settings Settings
	// KeepTokens is how long the tokens of cascades are kept.
	KeepTokens time.Duration
	// Emit emits the event of a cascade, with data about it.
	Emit func(data map[string]any)
	Log  *slog.Logger
}

// Circuits are the breakers of the process.
type Circuits struct {
	// Downstream is the identity of an upstream, its address if unknown.
	Downstream func(upstream string) string
	// Status lists all breakers.
	Status func() []breaker.Status
	// Trip opens the closed breakers before a downstream, and returns their upstreams.
	Trip func(downstream string) (opened []string)
	// ShareProbes has those before a downstream probe as one, or ends that.
	ShareProbes func(downstream string, share bool)
}

// Settings say when a failure that spreads is a cascade, and what happens then.
type Settings struct {
	// `alert`: nothing else happens. `pause`: its workflows are paused, by an escalation of level 1,
	// until a person resumes them. `open`: the circuit breakers of the upstream where it began are opened
	// for a cooldown. Default: alert.
	Do string `json:"do,omitempty"`

	// How many agents may be affected before people are asked, from 1. Default: 3.
	Escalate int `json:"escalate,omitempty"`

	cascade.Settings
}

// Check fills in the defaults and checks the ranges. The error names the option.
func (s Settings) Check() (Settings, error) {
	s.Do, s.Escalate = cmp.Or(s.Do, Alert), cmp.Or(s.Escalate, 3)
	switch {
	case s.Do != Alert && s.Do != Pause && s.Do != TripRoot:
		return s, fmt.Errorf("%q is unknown; use %s, %s or %s", s.Do, Alert, Pause, TripRoot)
	case s.Escalate < 1:
		return s, fmt.Errorf("escalate is %d; it must be a number from 1", s.Escalate)
	}
	var err error
	s.Settings, err = s.Settings.Check()
	return s, err
}

// What happens when a failure spreads.
const (
	Alert    = "alert" // nothing else
	Pause    = "pause" // its workflows are paused
	TripRoot = "open"  // the breakers before its root are opened
)

// Look is what there is to see at a moment.
type Look struct {
	Settings Settings
	Topology Topology
	// Answered counts the good answers of each upstream since the process began.
	Answered map[string]uint64
	Readings []cascade.Reading
}

// Topology is what the guards of a configuration lead to.
type Topology struct {
	Pools   map[string][]string // addresses, by guard
	Guards  map[string][]string // guards, by address
	Targets map[string]string   // guards, by the target that their checkpoints name
	Changed map[string][]string // targets that all calls of a guard change, by guard
}

// Open makes the watch, with what an earlier process has stored.
func Open(ctx context.Context, o Options) (*Watch, error) {
	w := &Watch{
		o: o, detector: cascade.New(o.Settings.Settings), input: make(chan func(context.Context) []cascade.Change, maxInput),
		settings: o.Settings, pending: map[string]cascade.Change{}, answered: map[string]uint64{},
		ended: make(chan struct{}),
	}
	w.feed = &evidence.CascadeFeed{
		Detector: w.detector, Recorder: o.Recorder,
		Pool: func(target string) string { return cmp.Or(w.at().Targets[target], target) },
	}
	w.topology.Store(new(Topology))
	var err error
	if w.kept, err = openRecords(ctx, &w.o); err != nil {
		return nil, err
	}
	w.join()
	running, stop := context.WithCancel(context.Background())
	w.stop = stop
	begun := make(chan struct{})
	w.begin = sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(w.ended)
		select {
		case <-begun:
			w.run(running)
		case <-running.Done():
			select {
			case <-begun: // what it was given before is still stored
				w.run(running)
			default:
			}
		}
	}()
	return w, nil
}

// Start begins the work. Calling it again is harmless.
func (w *Watch) Start() { w.begin() }

// Close ends the work, and waits for what is under way.
func (w *Watch) Close() {
	if w.peers.unfollow != nil {
		w.peers.unfollow()
	}
	w.stop()
	<-w.ended
}

func (w *Watch) at() *Topology { return w.topology.Load() }

// later has the goroutine do something. It never waits.
func (w *Watch) later(do func(ctx context.Context) []cascade.Change) {
	select {
	case w.input <- do:
	default:
		w.dropped.Add(1)
	}
}

// Placed takes an event that is in the tree of a log since then. It never waits.
func (w *Watch) Placed(log string, e *ledger.Event, recorded time.Time) {
	if !w.feed.Wants(e) {
		return
	}
	entry := ledger.Entry{Event: *e, Log: log, Recorded: recorded}
	w.later(func(ctx context.Context) []cascade.Change {
		if w.peers.fleet == nil {
			return w.take(ctx, &entry)
		}
		w.peers.logged = append(w.peers.logged, entry)
		return w.sorted(ctx)
	})
}

func (w *Watch) take(ctx context.Context, e *ledger.Entry) []cascade.Change {
	changes, err := w.feed.Take(ctx, e)
	if err != nil && ctx.Err() == nil {
		w.dropped.Add(1)
		w.o.Log.Warn("an event cannot be looked at for cascades", slog.Any("error", err))
	}
	return changes
}

// Circuit notes a change of a breaker, with the id and the workflow of its token if it is recorded.
func (w *Watch) Circuit(ev breaker.Event, id, workflow string) {
	if ev.To == breaker.HalfOpen || ev.Reason == breaker.ByOperator || ev.Reason == breaker.ByCascade {
		return
	}
	w.opened("", ev.Key, id, workflow, ev.To == breaker.Open)
}

// opened gives the detector the state of a breaker of a node; the empty name is this one.
func (w *Watch) opened(node string, key breaker.Key, event, workflow string, open bool) {
	w.later(func(context.Context) []cascade.Change {
		b := cascade.Breaker{
			Downstream: w.o.Circuits.Downstream(key.Upstream), Address: key.Upstream,
			Holder: strings.TrimSpace(node + " " + key.Class), Workflow: workflow, Event: event, Open: open,
		}
		if guards := w.at().Guards[key.Upstream]; len(guards) > 0 {
			b.Pool = guards[0]
			b.Targets = w.at().Changed[b.Pool]
		}
		return w.detector.Breaker(time.Now(), b)
	})
}

// Slow notes that the latency of an upstream begins or ends to be a spike.
func (w *Watch) Slow(upstream string, is bool) {
	w.later(func(context.Context) []cascade.Change {
		w.o.Log.Info("the latency of an upstream has changed", slog.String("upstream", upstream), slog.Bool("spike", is))
		for _, guard := range w.at().Guards[upstream] {
			w.detector.Slow(guard, upstream, is)
		}
		return nil
	})
}

func (w *Watch) run(ctx context.Context) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	w.inspect()
	w.choose(ctx)
	for _, r := range w.kept.list() { // the last process had them share, and they were restored without
		if r.Doc.State == "open" && r.Doc.OneProbe {
			w.o.Circuits.ShareProbes(r.Doc.Downstream, true)
		}
	}
	w.rebuild(ctx)
	for {
		select {
		case do := <-w.input:
			w.act(ctx, do(ctx))
		case <-tick.C:
			w.inspect()
			w.choose(ctx)
			w.act(ctx, w.detector.Advance(time.Now()))
			w.publish(ctx, w.feed.Count(time.Now()))
			w.act(ctx, append(w.sorted(ctx), w.feed.Flush()...))
			w.feed.Forget(time.Now())
			w.overdue(ctx)
			if w.peers.acts {
				w.kept.closeQuiet(ctx, time.Now().Add(-cascade.Quiet), w.detector)
			}
		case <-ctx.Done():
			return
		}
	}
}

// rebuild finds again what the last process knew of failures: those of the time after which a cascade would
// have ended.
func (w *Watch) rebuild(ctx context.Context) {
	for _, s := range w.o.Circuits.Status() {
		if s.State != breaker.Closed && s.Mode == breaker.Auto {
			w.act(ctx, w.detector.Breaker(s.Since, cascade.Breaker{
				Downstream: w.o.Circuits.Downstream(s.Key.Upstream), Address: s.Key.Upstream, Holder: s.Key.Class, Event: s.Reference, Open: true,
			}))
		}
	}
	changes, whole, err := w.feed.Rebuild(ctx, time.Now().Add(-cascade.Quiet), maxRebuilt)
	w.act(ctx, changes)
	switch {
	case err != nil && ctx.Err() == nil:
		w.o.Log.Warn("the latest failures cannot be read; what is spreading is found by the next ones", slog.Any("error", err))
	case !whole:
		w.o.Log.Warn("only the latest failures are looked at for cascades", slog.Int("entries", maxRebuilt))
	}
}

// act records what has changed, and does what follows from it, unless that is another node's to do.
func (w *Watch) act(ctx context.Context, changes []cascade.Change) {
	for _, c := range changes {
		w.pending[c.Finding.ID] = c
		if !w.peers.acts {
			if w.peers.found[c.Finding.ID].IsZero() {
				w.peers.found[c.Finding.ID] = time.Now()
			}
			if c.Kind == cascade.Closed { // whoever acts next finds its record quiet
				delete(w.pending, c.Finding.ID)
				delete(w.peers.found, c.Finding.ID)
			}
			continue
		}
		if err := w.settle(ctx, c); err != nil && ctx.Err() == nil {
			w.o.Log.Error("a cascade cannot be recorded; it is tried again", slog.String("cascade", c.Finding.ID), slog.Any("error", err))
			continue
		}
		delete(w.pending, c.Finding.ID)
	}
}

// inspect applies the latest configuration, and looks at what lasts.
func (w *Watch) inspect() {
	look, ok := w.o.Look()
	if !ok {
		return
	}
	if look.Settings != w.settings {
		w.settings = look.Settings
		w.detector.Configure(look.Settings.Settings)
	}
	now := time.Now()
	w.topology.Store(&look.Topology)
	for guard, addresses := range look.Topology.Pools {
		w.detector.Pool(guard, addresses)
	}
	for upstream, n := range look.Answered {
		if n != w.answered[upstream] {
			for _, guard := range look.Topology.Guards[upstream] {
				w.detector.Answered(now, guard, upstream, int(n-w.answered[upstream]))
			}
		}
	}
	w.answered = look.Answered
	w.exhausted(look.Readings)
}

// exhausted gives the detector what has been exhausted since the readings before, and what is not any more.
func (w *Watch) exhausted(readings []cascade.Reading) {
	begun, ended := w.exhaustion.Update(readings)
	for _, r := range begun {
		w.o.Log.Warn("a resource is exhausted", slog.String("resource", r.Name), slog.String("guard", r.Pool))
		w.detector.Exhausted(r, true)
	}
	for _, r := range ended {
		w.o.Log.Info("a resource is no longer exhausted", slog.String("resource", r.Name), slog.String("guard", r.Pool))
		w.detector.Exhausted(r, false)
	}
}

// settle brings the record of a cascade up to date, in one commit with its tokens and its questions to
// people, and does what the configuration says.
func (w *Watch) settle(ctx context.Context, c cascade.Change) error {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	f := &c.Finding
	for round := 0; ; round++ {
		r := w.kept.of(f)
		first := r.Tokens == 0 && len(r.Doc.Workflows) == 0 && r.Size == 0
		size := max(f.Failed, len(f.Breakers))
		alert := (c.Kind == cascade.Opened || c.Kind == cascade.Grown) && (first || size >= 2*r.Size || len(f.Parts) >= 2*r.Parts)
		r.describe(f)
		err := w.commit(ctx, r, f, alert)
		if (errors.Is(err, ledger.ErrDuplicate) || errors.Is(err, hitl.ErrAlreadyOpen) || errors.As(err, new(*store.Conflict))) && round < 3 {
			w.kept.refresh(ctx, r.Doc.ID)
			continue
		}
		if err != nil {
			return err
		}
		if alert {
			w.announce(r, f, first)
			w.follow(ctx, r, f, first)
		}
		if c.Kind == cascade.Closed && f.OneProbe {
			w.o.Circuits.ShareProbes(f.Downstream, false)
		}
		return nil
	}
}

// commit stores a record, with its tokens and escalations if it alerts.
func (w *Watch) commit(ctx context.Context, r *record, f *cascade.Finding, alert bool) error {
	now, err := w.o.Store.Now(ctx)
	if err != nil {
		return err
	}
	r.Doc.State = "open"
	if !f.Closed.IsZero() {
		r.Doc.State = "closed"
	}
	more := new(store.Batch)
	if alert {
		r.Size, r.Parts = max(f.Failed, len(f.Breakers)), len(f.Parts)
		if err := w.record(now, r, f, more); err != nil {
			return more.Done(err)
		}
		if err := w.ask(ctx, r, f, more); err != nil {
			return more.Done(err)
		}
		r.Tokens++
	}
	// The store judges a batch by its first write.
	b := store.NewBatch(w.kept.write(r))
	b.Join(more)
	if err := b.Commit(ctx, w.o.Store); err != nil {
		return err
	}
	w.kept.landed(ctx, r, f)
	return nil
}

// maxAlerted is how many workflows get a token about one cascade.
const maxAlerted = 16

// record drafts the tokens of a cascade: one for each workflow, with what is in that (P3).
func (w *Watch) record(now time.Time, r *record, f *cascade.Finding, b *store.Batch) error {
	rec, ok := w.o.Recorder()
	if !ok {
		return nil
	}
	var drafts []*ect.Draft
	for i := range f.Parts[:min(len(f.Parts), maxAlerted)] {
		p := &f.Parts[i]
		c := &evidence.Cascade{
			Cascade: r.Doc.ID, Round: r.Tokens, Workflow: p.Workflow, Parents: p.Errors,
			Pattern: string(f.Pattern), Class: string(f.Class), Agents: len(p.BlastRadius), Reach: p.BlastRadius,
		}
		if f.OneProbe { // else it is the target
			c.Downstream = f.Downstream
		}
		if f.Root.Workflow == p.Workflow {
			c.Target = f.Root.Target
			c.Root, c.Description = f.Root.Error, "the root is where it is because of: "+strings.Join(f.Root.Reasons, ", ")
		} else if len(p.Errors) > 0 {
			c.Root = p.Errors[0]
		}
		c.Root = cmp.Or(c.Root, f.Root.Error, f.Root.Node, r.Doc.ID)
		draft, err := rec.EventBuilder.Cascade(now, c)
		if err != nil {
			return err
		}
		drafts = append(drafts, draft)
		if part := r.part(p.Workflow); part != nil {
			part.Alerts = append(part.Alerts, draft.ID())
		}
	}
	if len(drafts) == 0 {
		return nil
	}
	batch, err := rec.Evidence.NewBatch(now.Add(w.o.KeepTokens), nil, drafts...)
	if err != nil {
		return err
	}
	b.Join(batch)
	return nil
}

// ask opens the questions to people: one for each workflow in which many agents are affected, or that is to
// be paused, and one for what belongs to no single workflow (cascade 3.4.3, 3.3.2; ATD, "Coordinated Circuit
// Breaking").
func (w *Watch) ask(ctx context.Context, r *record, f *cascade.Finding, b *store.Batch) error {
	shared := w.sharedQuestion(r, f)
	only := len(f.Parts) == 1 && f.Parts[0].Workflow != ""
	var err error
	for i := range f.Parts[:min(len(f.Parts), maxAlerted)] {
		p := &f.Parts[i]
		part := r.part(p.Workflow)
		n := len(p.BlastRadius)
		if len(f.Parts) == 1 {
			n = max(n, f.Affected)
		}
		if p.Workflow == "" || part == nil || w.settings.Do != Pause && n <= w.settings.Escalate && !(only && shared != nil) {
			continue
		}
		o := hitl.Opening{
			Cause:   hitl.CauseReach,
			Summary: fmt.Sprintf("A failure spreads: %d agents have failed, and %d are affected by it. It is cascade %s.", len(p.Failed), n, r.Doc.ID),
		}
		if only && shared != nil { // one failure of one workflow is one question to its people
			o.Cause, o.Summary = shared.Cause, shared.Summary
		}
		o.Key, o.Level, o.Workflow = "cascade "+r.Doc.ID+" "+p.Workflow, hitl.Approval, p.Workflow
		o.Links.Upstream = cmp.Or(f.Root.Address, o.Links.Upstream)
		if len(p.Errors) > 0 {
			o.Links.Error = p.Errors[0]
		}
		if w.settings.Do == Pause {
			o.Level = hitl.Pause
		}
		asked, err := w.askedOf(ctx, r.Doc.ID, part.Escalation, p, &o, b)
		if err != nil {
			return err
		}
		if asked != "" {
			part.Escalation = asked
			continue
		}
		if part.Escalation, err = w.askOnce(ctx, o, part.Escalation, r.Tokens, b); err != nil {
			return err
		}
	}
	if shared == nil || only {
		return nil
	}
	r.Doc.Escalation, err = w.askOnce(ctx, *shared, r.Doc.Escalation, r.Tokens, b)
	return err
}

// sharedQuestion is the question about what several breakers or workflows share; nil if nothing is.
func (w *Watch) sharedQuestion(r *record, f *cascade.Finding) *hitl.Opening {
	o := hitl.Opening{Key: "cascade " + r.Doc.ID, Level: hitl.Approval, Cause: hitl.CauseReach, Links: hitl.Links{Upstream: f.Root.Address}}
	switch {
	case f.OneProbe:
		o.Cause, o.Links.Upstream = hitl.CauseShared, cmp.Or(f.Root.Address, f.Downstream)
		o.Summary = fmt.Sprintf("%d circuit breakers have opened on %s. One of them probes in place of all. It is cascade %s.", len(f.Breakers), f.Downstream, r.Doc.ID)
	case len(f.Breakers) > 0:
		o.Cause = hitl.CauseShared
		o.Summary = fmt.Sprintf("Circuit breakers of %d services have opened that change %s. It is cascade %s.", len(f.Breakers), f.Downstream, r.Doc.ID)
	case len(f.Parts) > 1:
		o.Summary = fmt.Sprintf("A failure spreads over %d workflows: %d agents have failed, and %d are affected by it. It is cascade %s.", len(f.Parts), f.Failed, f.Affected, r.Doc.ID)
	default:
		return nil
	}
	return &o
}

// askedOf returns the pending escalation that asks about a failure of the cascade already, if it holds what
// the new one would hold: one failure is one question (ADR 0127), that of before if it still waits. It then says that
// the failure spreads. Where the new one holds more, what only asked about a failed call is withdrawn with its commit.
func (w *Watch) askedOf(ctx context.Context, id, before string, p *cascade.Part, o *hitl.Opening, b *store.Batch) (string, error) {
	s := w.o.Escalations
	page, err := s.List(ctx, hitl.Filter{Workflow: p.Workflow, Status: hitl.Pending}, "", maxAlerted)
	if err != nil {
		return "", err
	}
	slices.SortStableFunc(page.Escalations, func(a, b hitl.Escalation) int {
		switch before {
		case a.ID:
			return -1
		case b.ID:
			return 1
		}
		return 0
	})
	for _, e := range page.Escalations {
		switch {
		case e.Links.Error == "" || !slices.Contains(p.Errors, e.Links.Error):
			continue
		case o.Level == hitl.Pause && !e.Held:
			if e.Cause == hitl.CauseFailed {
				b.OnDone(func(err error) error {
					if err == nil {
						_, _ = s.Withdraw(ctx, e.ID) // else it stays beside the one that holds
					}
					return err
				})
			}
			continue
		}
		if _, err = s.Widen(ctx, e.ID, id, o.Summary); errors.Is(err, hitl.ErrDecided) || errors.Is(err, hitl.ErrExpired) {
			continue
		}
		return e.ID, err
	}
	return "", nil
}

// askOnce adds an escalation to the batch, unless the one before waits for an answer. It returns the one
// that counts.
func (w *Watch) askOnce(ctx context.Context, o hitl.Opening, before string, round int, b *store.Batch) (string, error) {
	s := w.o.Escalations
	if before != "" {
		switch e, err := s.Get(ctx, before); {
		case err == nil && (e.Status == hitl.Pending || e.Held):
			return before, nil
		case err != nil && !errors.Is(err, hitl.ErrNotFound) && !errors.Is(err, hitl.ErrUnreadable):
			return "", err
		}
		o.Key += " " + strconv.Itoa(round)
	}
	p, err := s.Prepare(ctx, o)
	if err != nil {
		return "", err
	}
	if p.Fresh() {
		b.Join(p.Batch)
	}
	return p.Escalation().ID, nil
}

// announce logs, emits and counts a cascade. Agents and workflows stay out of it (P8).
func (w *Watch) announce(r *record, f *cascade.Finding, first bool) {
	text := "a failure spreads further"
	if first {
		text = "a failure spreads"
		w.found[slices.Index(patterns, f.Pattern)].Add(1)
	}
	upstream := cmp.Or(f.Root.Address, f.Downstream)
	w.o.Log.Warn(text,
		slog.String("cascade", r.Doc.ID), slog.String("pattern", string(f.Pattern)), slog.String("class", string(f.Class)),
		slog.Int("failed", f.Failed), slog.Int("affected", f.Affected), slog.Int("workflows", len(f.Parts)),
		slog.String("guard", f.Root.Pool), slog.String("upstream", upstream), slog.Any("reasons", f.Root.Reasons))
	w.o.Emit(map[string]any{
		"cascade": r.Doc.ID, "again": !first, "pattern": string(f.Pattern), "class": string(f.Class), "failed": f.Failed, "affected": f.Affected,
		"workflows": len(f.Parts), "guard": f.Root.Pool, "upstream": upstream, "reasons": f.Root.Reasons,
	})
}

// follow does what the configuration says about a cascade.
func (w *Watch) follow(ctx context.Context, r *record, f *cascade.Finding, first bool) {
	if f.OneProbe {
		w.o.Circuits.ShareProbes(f.Downstream, true)
	}
	if w.settings.Do != TripRoot || !first {
		return
	}
	opened := w.trip(f.Root.Address, f.Root.Agent)
	if opened == nil {
		w.o.Log.Warn("nothing is opened because of a cascade: no closed breaker is known to stand before its root", slog.String("cascade", r.Doc.ID))
		return
	}
	r = r.clone() // the other is among the records by now, and readers have it
	r.Doc.Opened = opened
	if err := w.commit(ctx, r, f, false); err != nil {
		w.o.Log.Warn("which breakers were opened because of a cascade cannot be stored", slog.String("cascade", r.Doc.ID), slog.Any("error", err))
	}
}

var patterns = []cascade.Pattern{cascade.DepthFirst, cascade.BreadthFirst, cascade.Clustering}

// Get returns one cascade with its whole blast radius; nil if it is unknown.
func (w *Watch) Get(id string) *api.Cascade {
	for _, r := range w.kept.list() {
		if r.Doc.ID != id {
			continue
		}
		if f, there := w.detector.Finding(r.finding); there {
			r.describe(&f)
		}
		return &r.Doc
	}
	return nil
}

// List returns all cascades that are kept.
func (w *Watch) List() (all []api.Cascade) {
	for _, r := range w.kept.list() {
		all = append(all, r.Doc)
	}
	return all
}

// Reseal seals all that is stored anew, under the newest key.
func (w *Watch) Reseal(ctx context.Context) error {
	r := store.NewResealer(w.o.Store, w.o.Sealer)
	if err := r.Tables(ctx, string(evidence.SpaceCascade)); err != nil {
		return err
	}
	for _, kept := range w.kept.list() { // their versions have changed
		w.kept.refresh(ctx, kept.Doc.ID)
	}
	if r.Damaged > 0 {
		return fmt.Errorf("%d values cannot be read", r.Damaged)
	}
	return nil
}

// Report is what is counted of cascades, for metrics.
type Report struct {
	// Open is the number of cascades that have not ended.
	Open int
	// Found counts them by pattern, and Dropped the events that were not looked at, since the watch was opened.
	Found   map[string]uint64
	Dropped uint64 // see Found
	// Exhausted are the resources that are, of Guards and of the gateway.
	Exhausted []cascade.Resource
	Guards    []string // see Exhausted
}

// Report returns what is counted.
func (w *Watch) Report() Report {
	r := Report{
		Open: w.detector.Open(), Found: map[string]uint64{}, Dropped: w.dropped.Load(),
		Exhausted: w.exhaustion.Exhausted(), Guards: slices.Collect(maps.Keys(w.at().Pools)),
	}
	for i, pattern := range patterns {
		r.Found[string(pattern)] = w.found[i].Load()
	}
	return r
}
