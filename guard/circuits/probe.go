package circuits

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// leaseTime bounds asking for the lease of a probe.
const leaseTime = 2 * time.Second

// others is what a keeper knows of the other nodes.
type others struct {
	changed chan struct{}     // buffers one signal: there is something in again or all
	open    map[string]record // breakers of other nodes that are not closed, by key; of the goroutine only
	stop    func()            // ends Follow

	mu      sync.Mutex
	again   map[string]bool // keys that other nodes have written
	all     bool            // any of them may have been
	changes uint64          // counts what other nodes have written
	// held says until when, by the process's clock, the probe of another node is waited for, by its key.
	held map[string]time.Time
	sent map[breaker.Key]*sentProbe // under way, of this node
}

// probe is what is stored of a probe that serves all nodes.
type probe struct {
	Upstream string `json:"upstream"`
	Class    string `json:"class,omitempty"`
	Node     string `json:"node"`
	Boot     string `json:"boot"`
	// Follows are the outages that it ends, by the other nodes whose breakers were open when it was sent.
	Follows map[string]uint64 `json:"follows,omitempty"`

	// Done says that it has ended. One that failed has the cooldown that follows, and its end by the store's clock.
	Done         bool          `json:"done,omitempty"`
	Passed       bool          `json:"passed,omitempty"`
	Cooldown     time.Duration `json:"cooldown_ns,omitempty"`
	Until        time.Time     `json:"until,omitzero"`
	FailedProbes int           `json:"failed_probes,omitempty"`
	Cause        string        `json:"cause,omitempty"`
}

// sentProbe is one that this node sends for all. A nil one is sent for this node alone.
type sentProbe struct {
	k       *Keeper
	of      probe
	key     []byte
	version store.Version
}

func (k *Keeper) probeKey(key breaker.Key) []byte { return append(k.name(key), kindProbe) }

// Follow does what the probes of other nodes say, and reports their breakers, from now until Close, and those from
// before. Call it once, after Restore.
func (k *Keeper) Follow() {
	if k.members == nil {
		return
	}
	f := &k.fleet
	unfollow := k.members.Follow([]byte{Space}, k.heard)
	k.heard(nil) // what was written before
	read := func(ctx context.Context, left bool) (time.Duration, error) {
		k.catchUp(ctx)
		if left {
			k.closeGone(ctx)
		}
		return 0, nil
	}
	reads := fleet.Job{Fleet: k.members, Wake: f.changed, Do: read}.Start()
	keeps := fleet.Every(refreshEvery, func(ctx context.Context) {
		if err := k.keepAll(ctx); err != nil && ctx.Err() == nil {
			k.o.Log.Warn("the states of circuit breakers cannot be recorded", slog.Any("error", err))
		}
	}).Start()
	f.stop = func() {
		unfollow()
		reads()
		keeps()
	}
}

// Close ends Follow.
func (k *Keeper) Close() {
	if k.fleet.stop != nil {
		k.fleet.stop()
	}
}

// heard notes that another node has written a key; nil is any.
func (k *Keeper) heard(key []byte) {
	f := &k.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case key == nil:
		f.all = true
		clear(f.held)
	default:
		f.again[string(key)] = true
		delete(f.held, string(key))
	}
	f.changes++
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// catchUp reads what other nodes have written.
func (k *Keeper) catchUp(ctx context.Context) {
	f := &k.fleet
	f.mu.Lock()
	again, all := f.again, f.all
	f.again, f.all = map[string]bool{}, false
	f.mu.Unlock()
	if all {
		for _, s := range k.o.Breakers.Status() {
			if s.State != breaker.Closed {
				again[string(k.probeKey(s.Key))] = true
			}
		}
		for key := range f.open {
			again[key] = true
		}
		err := k.states(ctx, func(row store.Row[record]) {
			if row.Record.Node != "" && row.Record.Node != k.Node {
				again[string(row.Key)] = true
			}
		})
		if err != nil && ctx.Err() == nil {
			k.o.Log.Warn("the states of other nodes' breakers cannot be read", slog.Any("error", err))
		}
	}
	for key := range again {
		do := k.reread
		if isProbe([]byte(key)) {
			do = k.obey
		}
		if err := do(ctx, []byte(key)); err != nil && ctx.Err() == nil {
			// A breaker goes on by itself when its cooldown is over.
			k.o.Log.Warn("the breaker or the probe of another node cannot be read", slog.Any("error", err))
		}
	}
	if all {
		k.closeGone(ctx)
	}
}

// reread reports the breaker of another node, if it has opened or closed.
func (k *Keeper) reread(ctx context.Context, key []byte) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	before, was := k.fleet.open[string(key)]
	row, err := k.stored.Get(ctx, key)
	if err == nil && row.Record != nil {
		err = row.Record.Check()
	}
	if err != nil {
		return err
	}
	if row.Record == nil {
		if was {
			k.closed(string(key), before)
		}
		return nil
	}
	switch r := *row.Record; {
	case r.State == breaker.Closed && was:
		k.closed(string(key), r)
	case r.State == breaker.Open && (!was || r.Generation != before.Generation):
		k.fleet.open[string(key)] = r
		if k.o.Elsewhere != nil {
			k.o.Elsewhere(r.Node, r.Snapshot)
		}
	}
	return nil
}

// closed reports a breaker of another node that is closed, or that is no more.
func (k *Keeper) closed(key string, r record) {
	delete(k.fleet.open, key)
	r.State = breaker.Closed
	if k.o.Elsewhere != nil {
		k.o.Elsewhere(r.Node, r.Snapshot)
	}
}

// closeGone reports the breakers of nodes that are gone as closed: they refuse nobody. Where the members cannot be
// read, catchUp does it when the store is back.
func (k *Keeper) closeGone(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	members, err := k.members.Members(ctx)
	if err != nil {
		return
	}
	for key, r := range k.fleet.open {
		if !slices.ContainsFunc(members, func(m store.Member) bool { return m.Node == r.Node }) {
			k.closed(key, r)
		}
	}
}

// obey does what a probe says that has ended, if it is another node's and was also for this one's breaker.
func (k *Keeper) obey(ctx context.Context, key []byte) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	row, err := k.probes.Get(ctx, key)
	if err != nil || row.Record == nil {
		return err
	}
	p := row.Record
	outage := p.Follows[k.Node]
	if !p.Done || outage == 0 || p.Boot == k.members.Boot() {
		return nil
	}
	now, err := k.o.Store.Now(ctx)
	if err != nil {
		return err
	}
	of := breaker.Key{Upstream: p.Upstream, Class: p.Class}
	if k.o.Breakers.Follow(of, breaker.PeerProbe{
		Outage: outage, Passed: p.Passed, Cooldown: p.Cooldown, Left: p.Until.Sub(now), FailedProbes: p.FailedProbes, Cause: p.Cause,
	}) && !p.Passed {
		return k.Keep(ctx, of, false) // a longer cooldown is no transition
	}
	return nil
}

// Probe asks whether this node may send the probe of a breaker for all nodes, for as long as lasts. It is false
// while another one does; until is then when that has to have ended, zero if unknown. Where the store cannot say,
// each node sends its own: a breaker must not stay open because of the store.
//
// release gives the right of a probe back that has said nothing of the upstream.
func (k *Keeper) Probe(
	ctx context.Context, key breaker.Key, lasts time.Duration,
) (release func(), until time.Time, ok bool) {
	var p *sentProbe
	if k.members == nil {
		return p.release, time.Time{}, true
	}
	f := &k.fleet
	at := k.probeKey(key)
	f.mu.Lock()
	changes := f.changes
	until, held := f.held[string(at)]
	f.mu.Unlock()
	if held && time.Now().Before(until) {
		return p.release, until, false
	}
	asking, cancel := context.WithTimeout(ctx, leaseTime)
	defer cancel()
	p, left, err := k.lease(asking, key, at, lasts)
	if err != nil {
		if ctx.Err() == nil {
			k.o.Log.Warn("it is not known whether another node probes an upstream; this one does", slog.String("upstream", key.Upstream), slog.Any("error", err))
		}
		return p.release, time.Time{}, true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if p != nil {
		f.sent[key] = p
		return p.release, time.Time{}, true
	}
	if left > 0 {
		until = time.Now().Add(left)
		if changes == f.changes {
			f.held[string(at)] = until
		}
	}
	return p.release, until, false
}

// lease takes the lease of a probe, or returns how long another node still has it; 0 if that is unknown.
func (k *Keeper) lease(ctx context.Context, key breaker.Key, at []byte, lasts time.Duration) (*sentProbe, time.Duration, error) {
	now, err := k.o.Store.Now(ctx)
	if err != nil {
		return nil, 0, err
	}
	p := &sentProbe{k: k, key: at, of: probe{
		Upstream: key.Upstream, Class: key.Class, Node: k.Node, Boot: k.members.Boot(), Follows: map[string]uint64{},
	}}
	var other probe
	for row, err := range k.stored.All(ctx, k.name(key)[1:]) {
		if err != nil && !errors.Is(err, errUnreadable) {
			return nil, 0, err
		}
		if r := row.Record; err == nil && !isProbe(row.Key) && r.Node != k.Node && r.State != breaker.Closed {
			p.of.Follows[r.Node] = r.Outage
		}
	}
	row, err := k.probes.Get(ctx, at)
	if err != nil && !errors.Is(err, errUnreadable) {
		return nil, 0, err
	}
	if row.Record != nil { // else nobody can read it
		other = *row.Record
	}
	is, ends := row.Version.Unchanged(), row.Expires
	if other.Boot != k.members.Boot() && !other.Done {
		gone, err := k.members.Gone(ctx, other.Boot)
		if err != nil || !gone {
			return nil, ends.Sub(now), err
		}
	}
	p.version, err = k.o.Store.Commit(ctx, k.probes.Put(at, &p.of, is, now.Add(lasts)))
	if errors.As(err, new(*store.Conflict)) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	return p, 0, nil
}

// release gives the lease of a probe back that has said nothing of the upstream. After the end of another one it
// does nothing.
func (p *sentProbe) release() {
	if p == nil || !p.k.taken(p) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeTime)
	defer cancel()
	_, err := p.k.o.Store.Commit(ctx, store.Write{Key: p.key, Delete: true, If: store.VersionIs(p.version)})
	if err != nil && !errors.As(err, new(*store.Conflict)) && !errors.Is(err, store.ErrClosed) {
		p.k.o.Log.Warn("the lease of a probe cannot be given back; it ends by itself", slog.String("upstream", p.of.Upstream), slog.Any("error", err))
	}
}

// taken ends a probe of this node; false if it has ended before.
func (k *Keeper) taken(p *sentProbe) bool {
	key := breaker.Key{Upstream: p.of.Upstream, Class: p.of.Class}
	k.fleet.mu.Lock()
	defer k.fleet.mu.Unlock()
	if k.fleet.sent[key] != p {
		return false
	}
	delete(k.fleet.sent, key)
	return true
}

// Transition stores a change of a breaker, and with it what the probe says to the other nodes that has led to it.
func (k *Keeper) Transition(ctx context.Context, ev breaker.Event) error {
	var p *sentProbe
	switch ev.Reason {
	case breaker.ProbePassed, breaker.ProbeFailed, breaker.ProbeTimedOut:
		k.fleet.mu.Lock()
		p = k.fleet.sent[ev.Key]
		k.fleet.mu.Unlock()
	}
	if p == nil || !k.taken(p) {
		return k.Keep(ctx, ev.Key, false)
	}
	now, err := k.o.Store.Now(ctx)
	if err != nil {
		return err
	}
	done := p.of
	done.Done, done.Passed = true, ev.To == breaker.Closed
	if s, _, _ := k.o.Breakers.Snapshot(ev.Key); !done.Passed {
		done.Cooldown, done.Until, done.FailedProbes, done.Cause = s.Cooldown, now.Add(ev.Cooldown), ev.FailedProbes, ev.Cause
	}
	err = k.Keep(ctx, ev.Key, false, k.probes.Put(p.key, &done, store.VersionIs(p.version), now.Add(closedMemory)))
	if errors.As(err, new(*store.Conflict)) { // the lease had ended
		return k.Keep(ctx, ev.Key, false)
	}
	return err
}
