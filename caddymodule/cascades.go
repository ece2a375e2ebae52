package caddymodule

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// What happens when a failure spreads.
const (
	cascadeAlert = "alert"
	cascadePause = "pause"
	cascadeOpen  = "open"
)

// OnCascade says when a failure that spreads from one agent to others is a cascade, and what happens then.
// A cascade is always recorded, in the ledger of each of its workflows as `cascade_detected`, logged,
// emitted as an event, and counted; people are asked where it affects many agents or several workflows, or
// where several breakers open on one downstream.
type OnCascade struct {
	// `alert`: nothing else happens. `pause`: its workflows are paused, by an escalation of level 1,
	// until a person resumes them. `open`: the circuit breakers of the upstream where it began are opened
	// for a cooldown. Default: alert.
	Do string `json:"do,omitempty"`

	// How many agents must have failed, from 2. Default: 3.
	Agents int `json:"agents,omitempty"`

	// How many agents may be affected before people are asked, from 1. Default: 3.
	Escalate int `json:"escalate,omitempty"`

	// How many circuit breakers must have opened on one downstream within `window`, from 2; one of them
	// then probes in place of all. Default: 3.
	Breakers int `json:"breakers,omitempty"`

	// How far apart failures may be that belong together by their places in the workflow, from 1s to 1h.
	// Default: 60s.
	Window caddy.Duration `json:"window,omitempty"`

	// How long after its last failure a cascade has ended, from 1s to 24h. Default: 5m.
	Quiet caddy.Duration `json:"quiet,omitempty"`

	// By what factor the slowest hundredth of an upstream's answers must be slower than usual to count as
	// a spike. Default: 3.
	Latency float64 `json:"latency,omitempty"`

	// From which share permits, connections and memory count as exhausted, from 0.5 to 1. Default: 0.9.
	Full float64 `json:"full,omitempty"`
}

// cascadeSettings are those of OnCascade, with the defaults.
type cascadeSettings struct {
	do       string
	detector cascade.Settings
	latency  cascade.LatencySettings
	escalate int
	full     float64
}

// settings checks the options. It works without any.
func (o *OnCascade) settings() (s cascadeSettings, err error) {
	if o == nil {
		o = new(OnCascade)
	}
	s.do, s.escalate, s.full = cmp.Or(o.Do, cascadeAlert), cmp.Or(o.Escalate, 3), cmp.Or(o.Full, 0.9)
	if err := oneOf(s.do, cascadeAlert, cascadePause, cascadeOpen); err != nil {
		return s, err
	}
	if s.escalate < 1 {
		return s, fmt.Errorf("escalate is %d; it must be a number from 1", s.escalate)
	}
	if !(s.full >= 0.5 && s.full <= 1) {
		return s, fmt.Errorf("full is %v; it must be a share from 0.5 to 1", s.full)
	}
	s.detector, err = cascade.Settings{
		Agents: o.Agents, Breakers: o.Breakers, Window: time.Duration(o.Window), Quiet: time.Duration(o.Quiet),
	}.Check()
	if err == nil {
		s.latency, err = cascade.LatencySettings{Factor: o.Latency}.Check()
	}
	return s, err
}

func parseOnCascade(d *caddyfile.Dispenser, a *App) error {
	at := originOf(d)
	a.OnCascade = new(OnCascade)
	a.writtenAt("on_cascade", d.Token())
	if err := parseChoice(d, &a.OnCascade.Do, cascadeAlert, cascadePause, cascadeOpen); err != nil {
		return err
	}
	if d.NextArg() {
		return errSyntax
	}
	return cascadeOptions().readBlock(d, "on_cascade", a.OnCascade, at)
}

func cascadeOptions() options[*OnCascade] {
	number := func(into func(*OnCascade) *int) func(*caddyfile.Dispenser, *OnCascade) error {
		return func(d *caddyfile.Dispenser, o *OnCascade) error {
			if !d.NextArg() {
				return errSyntax
			}
			n, err := strconv.Atoi(d.Val())
			if err != nil || n < 1 {
				return fmt.Errorf("%q is no number from 1", d.Val())
			}
			*into(o) = n
			return nil
		}
	}
	share := func(into func(*OnCascade) *float64) func(*caddyfile.Dispenser, *OnCascade) error {
		return func(d *caddyfile.Dispenser, o *OnCascade) error {
			if !d.NextArg() {
				return errSyntax
			}
			n, err := strconv.ParseFloat(d.Val(), 64)
			if err != nil || !(n > 0) {
				return fmt.Errorf("%q is no number over 0", d.Val())
			}
			*into(o) = n
			return nil
		}
	}
	all := options[*OnCascade]{
		"agents":   {usage: "agents <number>", parse: number(func(o *OnCascade) *int { return &o.Agents })},
		"escalate": {usage: "escalate <number>", parse: number(func(o *OnCascade) *int { return &o.Escalate })},
		"breakers": {usage: "breakers <number>", parse: number(func(o *OnCascade) *int { return &o.Breakers })},
		"window":   {usage: "window <duration>", parse: func(d *caddyfile.Dispenser, o *OnCascade) error { return parseDuration(d, &o.Window) }},
		"quiet":    {usage: "quiet <duration>", parse: func(d *caddyfile.Dispenser, o *OnCascade) error { return parseDuration(d, &o.Quiet) }},
		"latency":  {usage: "latency <factor>", parse: share(func(o *OnCascade) *float64 { return &o.Latency })},
		"full":     {usage: "full <share>", parse: share(func(o *OnCascade) *float64 { return &o.Full })},
	}
	for name, opt := range all { // each is checked at its own line
		parse := opt.parse
		opt.parse = func(d *caddyfile.Dispenser, o *OnCascade) error {
			err := parse(d, o)
			if err == nil {
				_, err = o.settings()
			}
			return err
		}
		all[name] = opt
	}
	return all
}

const (
	// maxCascadeInput is how many events may wait for the detector; further ones are dropped and counted.
	maxCascadeInput = 8192
	// maxRebuilt is how many entries of the ledger are read at the start.
	maxRebuilt = 20_000
	// cascadeTick is how often what lasts is looked at.
	cascadeTick = time.Second
	// latencyEvery is how often what is known of latencies is stored.
	latencyEvery = time.Minute
	// cascadeTime bounds one step of the watch at the store.
	cascadeTime = 10 * time.Second
)

// cascadeWatch finds failures that spread, on its own goroutine: nothing that it does delays a call. It
// lives as long as the engine, over reloads.
type cascadeWatch struct {
	e          *engine
	detector   *cascade.Detector
	feed       *evidence.CascadeFeed
	input      chan func(ctx context.Context) []cascade.Change
	kept       *cascadeRecords
	dropped    atomic.Uint64
	found      [3]atomic.Uint64 // by pattern
	topology   atomic.Pointer[topology]
	exhaustion cascade.Exhaustion

	begin func() // starts the work
	stop  context.CancelFunc
	ended chan struct{}

	// Only the goroutine uses these.
	settings cascadeSettings
	pending  map[string]cascade.Change
	answered map[string]uint64 // good answers, by upstream
}

// topology is what the guards of the latest configuration lead to.
type topology struct {
	pools   map[string][]string // addresses, by guard
	guards  map[string][]string // guards, by address
	targets map[string]string   // guards, by the target that their checkpoints name
}

// startCascades makes the watch. It begins with the first configuration.
func (e *engine) startCascades(ctx context.Context) error {
	settings, err := (*OnCascade)(nil).settings()
	if err != nil {
		return err
	}
	w := &cascadeWatch{
		e: e, detector: cascade.New(settings.detector), input: make(chan func(context.Context) []cascade.Change, maxCascadeInput),
		settings: settings, pending: map[string]cascade.Change{}, answered: map[string]uint64{},
		ended: make(chan struct{}),
	}
	w.feed = &evidence.CascadeFeed{
		Detector: w.detector,
		Pool:     func(target string) string { return cmp.Or(w.at().targets[target], target) },
		Recorder: func() (evidence.Recorder, bool) {
			policy := e.latestPolicy()
			if policy == nil {
				return evidence.Recorder{}, false
			}
			return evidence.Recorder{Evidence: policy.Evidence, EventBuilder: policy.Events, Verifier: policy.Verifier}, true
		},
	}
	w.topology.Store(new(topology))
	if w.kept, err = openCascadeRecords(ctx, e); err != nil {
		return err
	}
	e.cascades = w
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
		}
	}()
	return nil
}

func (w *cascadeWatch) at() *topology { return w.topology.Load() }

// later has the goroutine do something. It never waits.
func (w *cascadeWatch) later(do func(ctx context.Context) []cascade.Change) {
	select {
	case w.input <- do:
	default:
		w.dropped.Add(1)
	}
}

// placed takes an event of the ledger, on the sequencer's goroutine.
func (e *engine) placed(ev *ledger.Event, recorded time.Time) {
	e.cascades.placed(ev, recorded)
	e.boundaries.placed(ev)
	e.followers.Changed(ev.Workflow)
}

func (w *cascadeWatch) placed(e *ledger.Event, recorded time.Time) {
	if !w.feed.Wants(e) {
		return
	}
	event := *e
	w.later(func(ctx context.Context) []cascade.Change {
		changes, err := w.feed.Take(ctx, recorded, &event)
		if err != nil && ctx.Err() == nil {
			w.dropped.Add(1)
			w.e.logger.Warn("an event cannot be looked at for cascades", zap.Error(err))
		}
		return changes
	})
}

// circuit notes a change of a breaker, with the id and the workflow of its token if it is recorded.
func (w *cascadeWatch) circuit(ev breaker.Event, id, workflow string) {
	if ev.To == breaker.HalfOpen || ev.Reason == breaker.ByOperator || ev.Reason == breaker.ByCascade {
		return
	}
	w.later(func(context.Context) []cascade.Change {
		b := cascade.Breaker{
			Downstream: w.e.circuits.Downstream(ev.Key.Upstream), Address: ev.Key.Upstream, Holder: ev.Key.Class, Workflow: workflow, Event: id, Open: ev.To == breaker.Open,
		}
		if guards := w.at().guards[ev.Key.Upstream]; len(guards) > 0 {
			b.Pool = guards[0]
		}
		return w.detector.Breaker(time.Now(), b)
	})
}

func (w *cascadeWatch) run(ctx context.Context) {
	tick := time.NewTicker(cascadeTick)
	defer tick.Stop()
	stored := time.Now()
	w.inspect()
	for _, r := range w.kept.list() { // the last process had them share, and they were restored without
		if r.Doc.State == "open" && r.Doc.OneProbe {
			w.e.circuits.ShareProbes(r.Doc.Downstream, true)
		}
	}
	w.rebuild(ctx)
	for {
		select {
		case do := <-w.input:
			w.act(ctx, do(ctx))
		case <-tick.C:
			w.inspect()
			w.act(ctx, w.detector.Advance(time.Now()))
			w.feed.Flush(time.Now())
			w.feed.Forget(time.Now())
			w.retry(ctx)
			if time.Since(stored) >= latencyEvery {
				w.storeLatencies(ctx)
				stored = time.Now()
			}
		case <-ctx.Done():
			final, cancel := context.WithTimeout(context.Background(), cascadeTime)
			w.storeLatencies(final)
			cancel()
			return
		}
	}
}

// rebuild finds again what the last process knew of failures: those of the time after which a cascade would
// have ended.
func (w *cascadeWatch) rebuild(ctx context.Context) {
	for _, s := range w.e.circuits.Status() {
		if s.State != breaker.Closed && s.Mode == breaker.Auto {
			w.act(ctx, w.detector.Breaker(s.Since, cascade.Breaker{
				Downstream: w.e.circuits.Downstream(s.Key.Upstream), Address: s.Key.Upstream, Holder: s.Key.Class, Event: s.Reference, Open: true,
			}))
		}
	}
	changes, whole, err := w.feed.Rebuild(ctx, time.Now().Add(-w.settings.detector.Quiet), maxRebuilt)
	w.act(ctx, changes)
	switch {
	case err != nil && ctx.Err() == nil:
		w.e.logger.Warn("the latest failures cannot be read; what is spreading is found by the next ones", zap.Error(err))
	case !whole:
		w.e.logger.Warn("only the latest failures are looked at for cascades", zap.Int("entries", maxRebuilt))
	}
}

// act records what has changed, and does what follows from it.
func (w *cascadeWatch) act(ctx context.Context, changes []cascade.Change) {
	for _, c := range changes {
		w.pending[c.Finding.ID] = c
		if err := w.settle(ctx, c); err != nil && ctx.Err() == nil {
			w.e.logger.Error("a cascade cannot be recorded; it is tried again", zap.String("cascade", c.Finding.ID), zap.Error(err))
			continue
		}
		delete(w.pending, c.Finding.ID)
	}
}

// retry records what could not be recorded before.
func (w *cascadeWatch) retry(ctx context.Context) {
	for id, c := range w.pending {
		if err := w.settle(ctx, c); err == nil {
			delete(w.pending, id)
		}
	}
	w.kept.closeQuiet(ctx, time.Now().Add(-w.settings.detector.Quiet), w.detector)
}

// inspect applies the latest configuration, and looks at what lasts.
func (w *cascadeWatch) inspect() {
	a := w.e.activeConfigs.latest()
	if a == nil {
		return
	}
	if s, err := a.OnCascade.settings(); err == nil && s != w.settings {
		w.settings = s
		w.detector.Configure(s.detector)
	}
	w.e.circuits.WatchLatency(w.settings.latency)
	now, at := time.Now(), topologyOf(a)
	w.topology.Store(at)
	for guard, addresses := range at.pools {
		w.detector.Pool(guard, addresses)
	}
	answered := w.e.circuits.Answered()
	for upstream, n := range answered {
		if n != w.answered[upstream] {
			for _, guard := range at.guards[upstream] {
				w.detector.Answered(now, guard, upstream, int(n-w.answered[upstream]))
			}
		}
	}
	w.answered = answered
	w.exhausted(now, w.readings(a))
}

func topologyOf(a *App) *topology {
	at := &topology{pools: map[string][]string{}, guards: map[string][]string{}, targets: map[string]string{}}
	for _, h := range a.guards.list() {
		for _, action := range h.actions {
			if action.Target != "" && !strings.Contains(action.Target, "{") {
				at.targets[action.Target] = h.Name
			}
		}
		p := h.proxy.Load()
		if p == nil {
			continue
		}
		upstreams, _, _ := p.Upstreams()
		for _, upstream := range upstreams {
			if !slices.Contains(at.pools[h.Name], upstream) {
				at.pools[h.Name] = append(at.pools[h.Name], upstream)
				at.guards[upstream] = append(at.guards[upstream], h.Name)
			}
		}
	}
	return at
}

// storeLatencies stores what has to be known of latencies after a restart.
func (w *cascadeWatch) storeLatencies(ctx context.Context) {
	if err := w.kept.storeLatencies(ctx, w.e.circuits.Latencies()); err != nil && !errors.Is(err, store.ErrClosed) && ctx.Err() == nil {
		w.e.logger.Warn("what is known of the latencies of upstreams cannot be stored", zap.Error(err))
	}
}

// settle brings the record of a cascade up to date, in one commit with its tokens and its questions to
// people, and does what the configuration says.
func (w *cascadeWatch) settle(ctx context.Context, c cascade.Change) error {
	ctx, cancel := context.WithTimeout(ctx, cascadeTime)
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
			w.e.circuits.ShareProbes(f.Downstream, false)
		}
		return nil
	}
}

// commit stores a record, with its tokens and escalations if it alerts.
func (w *cascadeWatch) commit(ctx context.Context, r *cascadeRecord, f *cascade.Finding, alert bool) error {
	now, err := w.e.store.Now(ctx)
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
	write, err := w.kept.write(r)
	if err != nil {
		return more.Done(err)
	}
	// The store judges a batch by its first write.
	b := store.NewBatch(write)
	b.Join(more)
	if err := b.Commit(ctx, w.e.store); err != nil {
		return err
	}
	w.kept.landed(ctx, r, f)
	return nil
}

// maxAlerted is how many workflows get a token about one cascade.
const maxAlerted = 16

// record drafts the tokens of a cascade: one for each workflow, with what is in that (P3).
func (w *cascadeWatch) record(now time.Time, r *cascadeRecord, f *cascade.Finding, b *store.Batch) error {
	policy := w.e.latestPolicy()
	if policy == nil {
		return nil
	}
	var drafts []*ect.Draft
	for i := range f.Parts[:min(len(f.Parts), maxAlerted)] {
		p := &f.Parts[i]
		c := &evidence.Cascade{
			Cascade: r.Doc.ID, Round: r.Tokens, Workflow: p.Workflow, Parents: p.Errors,
			Pattern: string(f.Pattern), Class: string(f.Class), Agents: len(p.BlastRadius), Reach: p.BlastRadius, Downstream: f.Downstream,
		}
		if f.Root.Workflow == p.Workflow {
			c.Root, c.Description = f.Root.Error, "the root is where it is because of: "+strings.Join(reasons(f), ", ")
		} else if len(p.Errors) > 0 {
			c.Root = p.Errors[0]
		}
		c.Root = cmp.Or(c.Root, f.Root.Error, f.Root.Node, r.Doc.ID)
		draft, err := policy.Events.Cascade(now, c)
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
	batch, err := policy.Evidence.NewBatch(now.Add(guard.KeepCircuitTokens), nil, drafts...)
	if err != nil {
		return err
	}
	b.Join(batch)
	return nil
}

func reasons(f *cascade.Finding) (all []string) {
	for _, r := range f.Root.Reasons {
		all = append(all, string(r))
	}
	return all
}

// ask opens the questions to people: one for each workflow in which many agents are affected, or that is to
// be paused, and one for what belongs to no single workflow (cascade 3.4.3, 3.3.2; ATD, "Coordinated Circuit
// Breaking").
func (w *cascadeWatch) ask(ctx context.Context, r *cascadeRecord, f *cascade.Finding, b *store.Batch) error {
	about := hitl.Links{Upstream: f.Root.Address}
	var err error
	for i := range f.Parts[:min(len(f.Parts), maxAlerted)] {
		p := &f.Parts[i]
		part := r.part(p.Workflow)
		n := len(p.BlastRadius)
		if len(f.Parts) == 1 {
			n = max(n, f.Affected)
		}
		if p.Workflow == "" || part == nil || w.settings.do != cascadePause && n <= w.settings.escalate {
			continue
		}
		o := hitl.Opening{
			Key: "cascade " + r.Doc.ID + " " + p.Workflow, Level: hitl.Approval, Cause: hitl.CauseReach, Workflow: p.Workflow, Links: about,
			Summary: fmt.Sprintf("A failure spreads: %d agents have failed, and %d are affected by it. It is cascade %s.", len(p.Failed), n, r.Doc.ID),
		}
		if len(p.Errors) > 0 {
			o.Links.Error = p.Errors[0]
		}
		if w.settings.do == cascadePause {
			o.Level = hitl.Pause
		}
		if part.Escalation, err = w.askOnce(ctx, o, part.Escalation, r.Tokens, b); err != nil {
			return err
		}
	}
	o := hitl.Opening{Key: "cascade " + r.Doc.ID, Level: hitl.Approval, Cause: hitl.CauseReach, Links: about}
	switch {
	case f.OneProbe:
		o.Cause, o.Links.Upstream = hitl.CauseShared, cmp.Or(about.Upstream, f.Downstream)
		o.Summary = fmt.Sprintf("%d circuit breakers have opened on %s. One of them probes in place of all. It is cascade %s.", len(f.Breakers), f.Downstream, r.Doc.ID)
	case len(f.Parts) > 1:
		o.Summary = fmt.Sprintf("A failure spreads over %d workflows: %d agents have failed, and %d are affected by it. It is cascade %s.", len(f.Parts), f.Failed, f.Affected, r.Doc.ID)
	default:
		return nil
	}
	r.Doc.Escalation, err = w.askOnce(ctx, o, r.Doc.Escalation, r.Tokens, b)
	return err
}

// askOnce adds an escalation to the batch, unless the one before waits for an answer. It returns the one
// that counts.
func (w *cascadeWatch) askOnce(ctx context.Context, o hitl.Opening, before string, round int, b *store.Batch) (string, error) {
	s := w.e.escalations.store
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
func (w *cascadeWatch) announce(r *cascadeRecord, f *cascade.Finding, first bool) {
	text := "a failure spreads further"
	if first {
		text = "a failure spreads"
		w.found[slices.Index(cascadePatterns, f.Pattern)].Add(1)
	}
	upstream := cmp.Or(f.Root.Address, f.Downstream)
	w.e.logger.Warn(text,
		zap.String("cascade", r.Doc.ID), zap.String("pattern", string(f.Pattern)), zap.String("class", string(f.Class)),
		zap.Int("failed", f.Failed), zap.Int("affected", f.Affected), zap.Int("workflows", len(f.Parts)),
		zap.String("guard", f.Root.Pool), zap.String("upstream", upstream), zap.Strings("reasons", reasons(f)))
	w.e.emit(eventCascade, map[string]any{
		"cascade": r.Doc.ID, "again": !first, "pattern": string(f.Pattern), "class": string(f.Class), "failed": f.Failed, "affected": f.Affected,
		"workflows": len(f.Parts), "guard": f.Root.Pool, "upstream": upstream, "reasons": reasons(f),
	})
}

// follow does what the configuration says about a cascade.
func (w *cascadeWatch) follow(ctx context.Context, r *cascadeRecord, f *cascade.Finding, first bool) {
	if f.OneProbe {
		w.e.circuits.ShareProbes(f.Downstream, true)
	}
	if w.settings.do != cascadeOpen || !first {
		return
	}
	var opened []string
	for _, downstream := range []string{f.Root.Address, f.Root.Agent} {
		if downstream != "" && opened == nil {
			opened = w.e.circuits.Trip(downstream)
		}
	}
	if opened == nil {
		w.e.logger.Warn("nothing is opened because of a cascade: no closed breaker is known to stand before its root", zap.String("cascade", r.Doc.ID))
		return
	}
	r.Doc.Opened = opened
	if err := w.commit(ctx, r, f, false); err != nil {
		w.e.logger.Warn("which breakers were opened because of a cascade cannot be stored", zap.String("cascade", r.Doc.ID), zap.Error(err))
	}
}

var cascadePatterns = []cascade.Pattern{cascade.DepthFirst, cascade.BreadthFirst, cascade.Clustering}

// What is known of cascades is in the store under evidence.SpaceCascade, all sealed:
//
//	f c name    a cascade
//	f l name    the latency of an upstream
const spaceCascade = evidence.SpaceCascade

const (
	// maxCascades is how many cascades are kept, and cascadeMemory for how long after the last change.
	maxCascades   = 256
	cascadeMemory = 30 * 24 * time.Hour
	// latencyMemory is how long the latency of an upstream is kept that is not called.
	latencyMemory = 7 * 24 * time.Hour
	// maxCascadeRecord bounds the JSON of a cascade, in bytes.
	maxCascadeRecord = 48 << 10
	// sameCascade is how far apart two findings may be that are one cascade: over a restart.
	sameCascade = 15 * time.Minute
)

// cascadeRecord is a cascade as it is stored.
type cascadeRecord struct {
	Doc api.Cascade `json:"cascade"`
	// Tokens is how often it was recorded in the ledger, Size and Parts how large it was then.
	Tokens int `json:"tokens"`
	Size   int `json:"size"`  // see Tokens
	Parts  int `json:"parts"` // see Tokens

	finding string // its id at the detector
	version store.Version
}

func (r *cascadeRecord) part(wid string) *api.CascadePart {
	for i := range r.Doc.Workflows {
		if r.Doc.Workflows[i].Workflow == wid {
			return &r.Doc.Workflows[i]
		}
	}
	return nil
}

// describe fills in what a finding says.
func (r *cascadeRecord) describe(f *cascade.Finding) {
	d := &r.Doc
	before := d.Workflows
	d.Pattern, d.Class, d.Failed, d.Affected = string(f.Pattern), string(f.Class), f.Failed, f.Affected
	d.Downstream, d.Breakers, d.OneProbe, d.Into = f.Downstream, slices.Clone(f.Breakers), f.OneProbe, f.Into
	d.Root = &api.CascadeRoot{
		Workflow: f.Root.Workflow, Node: f.Root.Node, Error: f.Root.Error, Agent: f.Root.Agent, Guard: f.Root.Pool, Upstream: f.Root.Address,
		Reasons: reasons(f),
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
			part.Alerts, part.Escalation = before[i].Alerts, before[i].Escalation
		}
		d.Workflows = append(d.Workflows, part)
	}
}

// cascadeRecords are the cascades that are kept, in memory and in the store.
type cascadeRecords struct {
	e *engine

	mu  sync.RWMutex
	all map[string]*cascadeRecord // by id
}

// openCascadeRecords reads what the last process has stored.
func openCascadeRecords(ctx context.Context, e *engine) (*cascadeRecords, error) {
	k := &cascadeRecords{e: e, all: map[string]*cascadeRecord{}}
	read := func(kind byte, use func(plain []byte, version store.Version) error) error {
		for entry, err := range e.store.Scan(ctx, store.Prefix([]byte{spaceCascade, kind})) {
			if err != nil {
				return err
			}
			plain, err := e.ring.Open(nil, entry.Value, entry.Key)
			if err == nil {
				err = use(plain, entry.Version)
			}
			if err != nil {
				e.logger.Warn("what is stored of cascades cannot be read", zap.Error(err))
			}
		}
		return nil
	}
	err := read('c', func(plain []byte, version store.Version) error {
		r := &cascadeRecord{version: version}
		if err := json.Unmarshal(plain, r); err != nil {
			return err
		}
		k.all[r.Doc.ID] = r
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = read('l', func(plain []byte, _ store.Version) error {
		var saved latencyRecord
		err := json.Unmarshal(plain, &saved)
		if err == nil {
			e.circuits.RestoreLatency(saved.Upstream, saved.State)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return k, nil
}

// latencyRecord is the latency of an upstream as it is stored.
type latencyRecord struct {
	Upstream string               `json:"upstream"`
	State    cascade.LatencyState `json:"state"`
}

func (k *cascadeRecords) key(kind byte, id string) []byte {
	name := k.e.ring.Index("cascade", string(kind), id)
	return append([]byte{spaceCascade, kind}, name[:16]...)
}

func (k *cascadeRecords) storeLatencies(ctx context.Context, states map[string]cascade.LatencyState) error {
	now, err := k.e.store.Now(ctx)
	if err != nil {
		return err
	}
	var writes []store.Write
	for upstream, state := range states {
		if state == (cascade.LatencyState{}) {
			continue // nothing is known
		}
		plain, err := json.Marshal(latencyRecord{upstream, state})
		if err != nil {
			return err
		}
		key := k.key('l', upstream)
		writes = append(writes, store.Write{Key: key, Value: k.e.ring.Seal(nil, plain, key), Expires: now.Add(latencyMemory)})
	}
	for part := range slices.Chunk(writes, store.MaxBatch) {
		if _, err := k.e.store.Commit(ctx, part...); err != nil {
			return err
		}
	}
	return nil
}

// of returns a copy of the record of a finding, or a new one. After a restart the same cascade has another
// finding: what shares an error, or the breakers of a downstream, goes on.
func (k *cascadeRecords) of(f *cascade.Finding) *cascadeRecord {
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
	return &cascadeRecord{Doc: api.Cascade{ID: f.ID}}
}

func (r *cascadeRecord) clone() *cascadeRecord {
	c := *r
	c.Doc.Workflows = slices.Clone(r.Doc.Workflows)
	for i := range c.Doc.Workflows {
		c.Doc.Workflows[i].Alerts = slices.Clone(c.Doc.Workflows[i].Alerts)
	}
	return &c
}

// continues reports whether a finding is about the cascade of an earlier process.
func (r *cascadeRecord) continues(f *cascade.Finding) bool {
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
func (k *cascadeRecords) write(r *cascadeRecord) (store.Write, error) {
	stored := r.clone()
	for most := 1000; ; most /= 2 {
		plain, err := json.Marshal(stored)
		if err != nil {
			return store.Write{}, err
		}
		if len(plain) <= maxCascadeRecord {
			w := store.Write{Key: k.key('c', r.Doc.ID), If: store.Absent(), Expires: r.Doc.Last.Add(cascadeMemory)}
			if r.version != 0 {
				w.If = store.VersionIs(r.version)
			}
			w.Value = k.e.ring.Seal(nil, plain, w.Key)
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
func (k *cascadeRecords) landed(ctx context.Context, r *cascadeRecord, f *cascade.Finding) {
	r.finding = f.ID
	if found, err := k.e.store.Get(ctx, k.key('c', r.Doc.ID)); err == nil {
		r.version = found.Version
	}
	k.mu.Lock()
	k.all[r.Doc.ID] = r
	var oldest *cascadeRecord
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
		if _, err := k.e.store.Commit(ctx, store.Write{Key: k.key('c', oldest.Doc.ID), Delete: true}); err != nil {
			k.e.logger.Warn("the oldest cascade cannot be deleted", zap.Error(err))
		}
	}
}

// refresh reads a record again that another commit has changed.
func (k *cascadeRecords) refresh(ctx context.Context, id string) {
	key := k.key('c', id)
	entry, err := k.e.store.Get(ctx, key)
	if err != nil {
		return
	}
	plain, err := k.e.ring.Open(nil, entry.Value, key)
	r := new(cascadeRecord)
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
func (k *cascadeRecords) closeQuiet(ctx context.Context, before time.Time, d *cascade.Detector) {
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
			_, err = k.e.store.Commit(ctx, w)
		}
		if err != nil {
			continue // the next look tries again
		}
		if r.Doc.OneProbe {
			k.e.circuits.ShareProbes(r.Doc.Downstream, false)
		}
		k.refresh(ctx, r.Doc.ID)
	}
}

// list returns copies of all records, the newest first.
func (k *cascadeRecords) list() (all []*cascadeRecord) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, r := range k.all {
		all = append(all, r.clone())
	}
	slices.SortFunc(all, func(a, b *cascadeRecord) int {
		return cmp.Or(b.Doc.Began.Compare(a.Doc.Began), cmp.Compare(a.Doc.ID, b.Doc.ID))
	})
	return all
}

// reseal seals all that is stored anew, under the newest key. That includes the latencies of upstreams that
// no transport has now.
func (k *cascadeRecords) reseal(ctx context.Context) error {
	r := store.NewResealer(k.e.store, k.e.ring)
	if err := r.Walk(ctx, []byte{spaceCascade}, store.MaxBatch, r.Reseal); err != nil {
		return err
	}
	for _, kept := range k.list() { // their versions have changed
		k.refresh(ctx, kept.Doc.ID)
	}
	if r.Damaged > 0 {
		return fmt.Errorf("%d values cannot be read", r.Damaged)
	}
	return nil
}

// describe returns one cascade with its whole blast radius; nil if it is unknown.
func (w *cascadeWatch) describe(id string) *api.Cascade {
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

// cascadeList returns all cascades that are kept.
func (w *cascadeWatch) cascadeList() (all []api.Cascade) {
	for _, r := range w.kept.list() {
		all = append(all, r.Doc)
	}
	return all
}

// cascadesFor answers the requests of one guard's site.
func cascadesFor(h *Handler, e *engine, policy *tokenPolicy) *api.Cascades {
	return &api.Cascades{
		List: func(context.Context) ([]api.Cascade, error) { return e.cascades.cascadeList(), nil },
		Get:  func(_ context.Context, id string) (*api.Cascade, error) { return e.cascades.describe(id), nil },
		Reader: func(r *http.Request) (evidence.Reader, bool, func(string) bool, error) {
			who, caller, err := h.asker(e, policy, r)
			if err != nil {
				return who, false, nil, err
			}
			if !guard.VerifiedHere(caller) {
				return who, false, nil, api.NewProblem(api.AuthenticationRequired,
					"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
			}
			p := h.proxy.Load()
			leads := func(upstream string) bool {
				return p != nil && p.LeadsTo(upstream[strings.LastIndex(upstream, " ")+1:])
			}
			return who, slices.Contains(h.Operators, h.handler.OperatorName(r, caller)), leads, nil
		},
	}
}
